"""A disk that does not answer: whoever leads there hands over, and gets it back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.harness import Cluster, wait_until
from tests.live.load import Load, create_topic, leaders
from tests.node.exposition import Page

pytestmark = [pytest.mark.live, pytest.mark.slow]

TOPIC = "t"
PARTITIONS = 3
DELAY_MS = 8_000


def test_leaderships_go_where_disks_answer(tmp_path: Path) -> None:
    with Cluster(tmp_path, faults=True) as cluster:
        create_topic(cluster.bootstrap, TOPIC, PARTITIONS)
        stuck = cluster[leaders(cluster.bootstrap, TOPIC)[0]]

        def leads() -> bool:
            return stuck.node_id in leaders(cluster.bootstrap, TOPIC).values()

        def gauge() -> float:
            return Page(stuck.text("/metrics")).value("raftmq_disk_stuck")

        with Load(cluster.bootstrap, TOPIC, PARTITIONS, rate=200.0) as load:
            stuck.fault(fsync_delay_ms=DELAY_MS)
            wait_until(lambda: gauge() == 1, 60, "the disk is seen to be stuck")
            wait_until(lambda: not leads(), 60, f"all handed over\n{stuck.log_tail()}")
            load.wait_for(100)
            assert stuck.get("/status")["disk"]["is_stuck"]
            stuck.fault()
            wait_until(lambda: gauge() == 0, 60, "the disk answers again")
            wait_until(leads, 90, "the preferred leader leads again")
        load.reckon().check()
        log = stuck.log_path.read_text()
        assert "the disk does not answer" in log
        assert "the disk answers again" in log
