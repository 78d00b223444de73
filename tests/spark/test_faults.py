"""Spark reads on while nodes die, from a cluster of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raftmq_client.blocking import Admin
from tests.live.harness import Cluster, wait_until
from tests.spark.conftest import produce
from tests.spark.test_source import frame, per_partition

pytestmark = [pytest.mark.spark, pytest.mark.live, pytest.mark.slow]


@pytest.fixture(scope="module")
def mortal_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("mortal")) as cluster:
        yield cluster


def test_the_leader_is_killed_in_the_middle_of_a_read(
    spark: Any, mortal_cluster: Cluster, tmp_path: Path
) -> None:
    """Each task stops at its thousandth row until the leader of partition 0 is dead."""
    cluster = mortal_cluster
    with Admin(cluster.bootstrap, timeout_ms=60_000) as admin:
        admin.create_topic("t", 2, 3)
    # More than reader, socket and Spark hold at once, so that most is fetched after the kill.
    written = produce(cluster.bootstrap, "t", 80_000, partitions=(0, 1), size=1_000)
    folder = str(tmp_path)

    def wait_at_row(rows: Any) -> Any:
        import os
        import time

        for number, row in enumerate(rows):
            if number == 1_000:
                open(f"{folder}/reached-{row.partition}", "w").close()
                while not os.path.exists(f"{folder}/go-on"):
                    time.sleep(0.02)
            yield row.partition, row.offset, row.key, bytes(row.value)

    read = frame(spark, cluster, subscribe="t", columns="partition,offset,key,value")
    found: list[Any] = []
    job = threading.Thread(
        target=lambda: found.extend(read.rdd.mapPartitions(wait_at_row).collect())
    )
    job.start()
    wait_until(lambda: len(list(tmp_path.glob("reached-*"))) == 2, 120, "both tasks are reading")
    with Admin(cluster.bootstrap, timeout_ms=60_000) as admin:
        leader = admin.topic("t").partitions[0].leader
    cluster[leader].kill()
    (tmp_path / "go-on").touch()
    job.join(240)
    assert not job.is_alive()
    rows = [spark_row(*fields) for fields in found]
    assert per_partition(rows) == written
    cluster.bring_back()


class spark_row:
    """A row of four columns."""

    def __init__(self, partition: int, offset: int, key: bytes | None, value: bytes) -> None:
        self.partition = partition
        self.offset = offset
        self.key = key
        self.value = value
