"""A replica catches up at the rate that it may, changed while it runs, and live writes go on."""

from __future__ import annotations

import re
import time
from pathlib import Path
from statistics import median
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from tests.live.harness import Cluster, Node, wait_until
from tests.live.load import Load, create_topic, in_sync, leaders

pytestmark = [pytest.mark.live, pytest.mark.slow]

MIB = 1 << 20
GAP_BYTES = 112 * MIB
"""Enough for all that is measured, and for commands that take seconds each on a busy machine."""
RECORD_BYTES = 96 << 10
OWN, KAFKAS = "replica.catchup.bytes.per.s", "leader.replication.throttled.rate"


class TimedLoad(Load):
    """Notes how long each record took."""

    def __enter__(self) -> TimedLoad:
        self.taken_ms: list[float] = []
        super().__enter__()
        return self

    def _delivered(self, error: Any, message: Any) -> None:
        super()._delivered(error, message)
        if error is None:
            self.taken_ms.append(message.latency() * 1e3)

    def median_ms(self, count: int) -> float:
        """Of the next records. A queue would hold all of them up; one flush that takes long, of
        the disk's own, a few."""
        start = len(self.taken_ms)
        wait_until(lambda: len(self.taken_ms) >= start + count, 60, f"{count} more records")
        return median(self.taken_ms[start : start + count])


def _sent(node: Node) -> int:
    found = re.search(r"^raftmq_catch_up_bytes_total ([\d.e+]+)$", node.text("/metrics"), re.M)
    assert found is not None
    return int(float(found[1]))


def _rate(node: Node, seconds: float) -> float:
    """Bytes per second that a leader sends to those that catch up."""
    sent, began = _sent(node), time.monotonic()
    time.sleep(seconds)
    return (_sent(node) - sent) / (time.monotonic() - began)


def _check_rate(rate: float, limit: int) -> None:
    """Within a limit; what is missing to it, a machine without a free core may explain."""
    assert limit / 5 <= rate <= 1.15 * limit, f"{rate / MIB:.2f} MiB/s, not {limit / MIB:.0f}"


def _fill(bootstrap: str) -> None:
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": bootstrap, "linger.ms": 0, "batch.size": RECORD_BYTES}
    )
    for number in range(GAP_BYTES // RECORD_BYTES):
        producer.produce("gap", bytes([number & 255]) * RECORD_BYTES, partition=0)
        if number % 64 == 63:
            producer.flush(60)
    assert producer.flush(60) == 0


def _create_live(bootstrap: str, nodes: list[int]) -> None:
    """A topic of which the node that lacks data has no replica."""
    topic = NewTopic("live", 2, replica_assignment=[nodes, nodes[::-1]])
    admin = AdminClient({"bootstrap.servers": bootstrap})
    (created,) = admin.create_topics([topic]).values()
    created.result(30)


@pytest.mark.parametrize("is_in_memory", [True, False], ids=["from memory", "from disk"])
def test_a_new_disk_is_filled_at_the_rate_that_holds(tmp_path: Path, is_in_memory: bool) -> None:
    memory = 256 * MIB if is_in_memory else 64 << 10
    with Cluster(tmp_path, 3, settings={"recent_bytes_max": memory}) as cluster:
        create_topic(cluster.bootstrap, "gap", partitions=1)
        wait_until(lambda: len(in_sync(cluster.bootstrap, "gap")[0]) == 3, 60, "all are in sync")
        _fill(cluster.bootstrap)
        leader = cluster[leaders(cluster.bootstrap, "gap")[0]]
        away = cluster[next(n for n in cluster.nodes if n != leader.node_id)]
        stay = [n for n in cluster.nodes if n != away.node_id]
        _create_live(cluster.bootstrap, stay)
        away.kill()
        away.wipe()

        def limit(**values: int) -> None:
            words = [f"{name}={value}" for name, value in values.items()]
            done = cluster.run("node", "config", "set", str(leader.node_id), *words)
            assert done.returncode == 0, done.stderr

        limit(**{OWN: 8 * MIB, KAFKAS: 2 * MIB})
        with TimedLoad(cluster.bootstrap, "live", 2, rate=300) as load:
            load.wait_for(300)
            quiet_ms = load.median_ms(900)
            away.start()
            away.wait_ready()
            wait_until(lambda: leader.get("/status")["catch_up"]["held"], 60, "it is held back")
            _check_rate(_rate(leader, 8), 2 * MIB)  # the smaller one holds
            limit(**{KAFKAS: 4 * MIB})
            _check_rate(_rate(leader, 4), 4 * MIB)
            busy_ms = load.median_ms(300)
            assert away.node_id not in in_sync(cluster.bootstrap, "gap")[0], "it is not done yet"
            limit(**{OWN: -1, KAFKAS: 0})
            wait_until(lambda: len(in_sync(cluster.bootstrap, "gap")[0]) == 3, 90, "it has all")
        load.reckon().check()
        # Generous, for a machine that does other things: a queue behind the gap would be seconds.
        assert busy_ms < 5 * quiet_ms + 100, (quiet_ms, busy_ms)
