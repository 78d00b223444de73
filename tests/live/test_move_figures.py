"""What a move costs those who write: p99 while a partition moves beside p99 before, and its quorum.

By hand, on a quiet machine: `pytest -n 0 -m soak -s tests/live/test_move_figures.py`; it prints the
figures. Partition 2 of factor 3 goes from nodes 1, 2, 3 to 2, 3, 4, three times, with its leader.
"""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from raftmq.cli.console import out
from raftmq_client import Admin, TopicPartition
from tests.live.harness import Cluster, wait_until
from tests.live.load import leaders
from tests.live.test_throttle import TimedLoad

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.soak]

TOPIC = "t"
MOVED = TopicPartition(TOPIC, 2)
BEFORE, AFTER = (1, 2, 3), (2, 3, 4)
FILL_BYTES = 192 << 20
RECORD_BYTES = 64 << 10
RATE = 300
QUIET_S = 12.0
ROUNDS = 3
RATIO_MAX = 2.0

Seen = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Voters, learners and those in sync, as the partition's leader tells them."""


class PlacedLoad(TimedLoad):
    """Notes of which partition each record was, too."""

    def __enter__(self) -> PlacedLoad:
        self.partitions_of: list[int] = []
        super().__enter__()
        return self

    def _delivered(self, error: Any, message: Any) -> None:
        if error is None:
            self.partitions_of.append(message.partition())
        super()._delivered(error, message)

    def told(self, first: int) -> str:
        """The p99 of the partition that moves and of the others, since a record."""
        moved: list[float] = []
        others: list[float] = []
        # A record is noted here first.
        taken = self.taken_ms[first:]
        for partition, ms in zip(self.partitions_of[first:], taken, strict=False):
            (moved if partition == MOVED.partition else others).append(ms)
        return (
            f"p99 of the moved one {_p99(moved):.1f} ms, longest {max(moved):.1f}; "
            f"of the others {_p99(others):.1f} ms, longest {max(others):.1f}"
        )


def _p99(taken_ms: list[float]) -> float:
    return statistics.quantiles(taken_ms, n=100)[98]


class Watch:
    """Asks all nodes for /status, in a thread, and keeps what the partition's leader told."""

    def __init__(self, cluster: Cluster) -> None:
        self.seen: list[Seen] = []
        """Each time that it changed."""
        self._cluster = cluster
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        wait_until(lambda: self.seen, 30, "a leader")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join(30)

    def wait_for(self, voters: tuple[int, ...]) -> None:
        """Return once these alone hold the partition."""
        wait_until(lambda: self.seen[-1] == (voters, (), voters), 180, f"it is on {voters}")

    def _run(self) -> None:
        while not self._is_over.wait(0.05):
            for node in self._cluster.live:
                for row in node.get("/status")["partitions"]:
                    if row["partition"] == MOVED.partition and row["is_leader"]:
                        now = tuple(tuple(sorted(row[k])) for k in ("voters", "learners", "isr"))
                        if not self.seen or self.seen[-1] != now:
                            self.seen.append(now)  # type: ignore[arg-type]  # three of them


def _create(cluster: Cluster) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    replicas = [[3, 1, 2], [2, 3, 1], list(BEFORE)]
    admin.create_topics([NewTopic(TOPIC, 3, replica_assignment=replicas)])[TOPIC].result(60)


def _fill(bootstrap: str) -> None:
    """Numbers below those of the load."""
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "batch.size": 512 << 10})
    for number in range(-FILL_BYTES // RECORD_BYTES, 0):
        value = b"%d " % number
        producer.produce(TOPIC, value.ljust(RECORD_BYTES, b"."), partition=MOVED.partition)
        if not number % 256:
            producer.flush(120)
    assert producer.flush(120) == 0


def _move(cluster: Cluster, watch: Watch, replicas: tuple[int, ...]) -> None:
    with Admin(cluster.bootstrap, timeout_ms=60_000) as admin:
        assert admin.alter_partition_reassignments({MOVED: replicas}) == {MOVED: None}
    watch.wait_for(replicas)


@pytest.mark.timeout(900, method="signal")
def test_what_a_move_costs(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3) as cluster:
        _create(cluster)
        _fill(cluster.bootstrap)
        rounds = []
        with PlacedLoad(cluster.bootstrap, TOPIC, 3, rate=RATE) as load, Watch(cluster) as watch:
            load.wait_for(RATE)
            cluster.add_node()
            added = cluster.run("node", "add", "4")
            assert added.returncode == 0, added.stdout + added.stderr
            for _ in range(ROUNDS):
                _move(cluster, watch, BEFORE)
                wait_until(lambda: leaders(cluster.bootstrap, TOPIC)[2] == BEFORE[0], 60, "node 1")
                quiet_ms = load.p99_ms(QUIET_S)
                began, first = time.monotonic(), len(load.taken_ms)
                _move(cluster, watch, AFTER)
                moving_s = time.monotonic() - began
                moving_ms = _p99(load.taken_ms[first:])
                rounds.append((quiet_ms, moving_ms))
                out(
                    f"p99 before {quiet_ms:.1f} ms, while moving {moving_ms:.1f} ms "
                    f"({moving_ms / quiet_ms:.2f} times), in {moving_s:.1f} s: {load.told(first)}"
                )
        load.reckon(cluster.bootstrap).check()
        assert load.errors == []
        fewest = min(len(set(isr) & set(voters)) for voters, _, isr in watch.seen)
        steps = " -> ".join(dict.fromkeys(str(voters) for voters, _, _ in watch.seen))
        ratio = statistics.median(moving / quiet for quiet, moving in rounds)
        out(f"median {ratio:.2f} times; voters {steps}; never fewer than {fewest} caught up")
        assert (BEFORE, (), BEFORE) in watch.seen
        assert ((1, 2, 3, 4), (), (1, 2, 3, 4)) in watch.seen, "the new one votes before one goes"
        assert fewest >= 3
        assert ratio <= RATIO_MAX, rounds
