"""A replica that was away for long: served from the disk, at a bounded rate, as durable as ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raftmq.log.shared import Shared
from raftmq.ports import DiskError, Runnable
from raftmq.replication.catch_up import BATCH_CHARGE_BYTES, CatchUpRate, StoredReader
from raftmq.types import NodeId, RaftIndex
from tests.log.helpers import FakeClock, append, elect, flush, open_log, sim_disk
from tests.replication.sim_cluster import SimCluster

TWO = NodeId(2)


class Port:
    """Workers that work when told to; a limit that is a switch."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Runnable, Callable[[DiskError | None], None]]] = []
        self.may_leave = True
        self.admitted: list[int] = []

    def run(self, job: Runnable, done: Callable[[DiskError | None], None]) -> None:
        self.jobs.append((job, done))

    run_long = run

    def admit(self, _to: NodeId, size_bytes: int, _batches: int, *, is_needed: bool) -> bool:
        if self.may_leave:
            self.admitted.append(size_bytes)
        return self.may_leave

    def work(self, error: DiskError | None = None) -> None:
        job, done = self.jobs.pop(0)
        if error is None:
            job.run()
        done(error)


class Reader:
    """A reader over a log whose batches are on disk only."""

    def __init__(self) -> None:
        disk = sim_disk()
        log = open_log(disk)
        elect(log, 1)
        flush(log)
        for _ in range(9):
            append(log, 1, 1, 100)
            flush(log)
        log.close()
        self.log = open_log(disk, shared=Shared.make(disk, recent_bytes_max=0))
        self.port = Port()
        self.told: list[Any] = []
        self.reader = StoredReader(
            self.log,
            self.port,
            lambda: self.told.append("prepared"),
            lambda: self.told.append("damaged"),
            self.told.append,
        )

    def take(self, start: int) -> Any:
        return self.reader.take(RaftIndex(start), 400, TWO, is_needed=False)


def test_a_chunk_is_prepared_in_a_worker_and_the_next_one_ahead() -> None:
    it = Reader()
    assert it.take(1) is None
    assert it.take(1) is None
    assert len(it.port.jobs) == 1
    it.port.work()
    assert it.told == ["prepared"]
    chunk = it.take(1)
    assert chunk.entries[0].start == 1
    assert chunk.size_bytes == sum(chunk.sizes) == chunk.span.size
    assert {entry.payload for entry in chunk.entries} == {b""}
    assert len(it.port.jobs) == 1
    it.port.work()
    following = it.take(chunk.entries[-1].end)
    assert following.entries[0].start == chunk.entries[-1].end


def test_bare_entries_need_no_disk() -> None:
    it = Reader()
    chunk = it.take(0)
    assert (chunk.span, bytes(chunk.entries[0].payload)) == (None, b"e1")
    assert len(it.port.jobs) == 1


def test_what_may_not_leave_is_not_read_ahead() -> None:
    it = Reader()
    it.take(1)
    it.port.work()
    it.port.may_leave = False
    assert it.take(1) is None
    assert it.port.jobs == []
    it.port.may_leave = True
    assert it.take(1) is not None


def test_another_leadership_knows_nothing_of_what_was_read() -> None:
    it = Reader()
    it.take(1)
    it.reader.forget()
    it.port.work()
    assert it.told == []
    assert it.take(1) is None
    assert len(it.port.jobs) == 1


def test_a_failing_disk_is_told() -> None:
    it = Reader()
    it.take(1)
    error = DiskError("gone")
    it.port.work(error)
    assert it.told == [error]


def test_the_rate_holds_over_all_and_not_for_whom_the_commit_waits() -> None:
    clock = FakeClock()
    rate = CatchUpRate(clock, 1_000_000)
    sent = 0
    for _ in range(1000):
        clock.now_ms += 1.0
        while rate.admit(20_000, 1, is_needed=False):
            sent += 20_000
    assert 950_000 <= sent <= 1_100_000
    assert rate.bytes_total == sent
    assert rate.admit(20_000, 1, is_needed=True)


def test_small_batches_are_charged_for_the_work_they_make() -> None:
    clock = FakeClock()
    rate = CatchUpRate(clock, 1_000 * BATCH_CHARGE_BYTES)
    sent = 0
    for _ in range(1000):
        clock.now_ms += 1.0
        while rate.admit(10_000, 100, is_needed=False):
            sent += 100
    assert 950 <= sent <= 1_200


def test_zero_is_no_limit() -> None:
    rate = CatchUpRate(FakeClock(), 0)
    assert all(rate.admit(1 << 30, 1, is_needed=False) for _ in range(100))


def test_a_node_that_was_away_catches_up_from_a_leader_that_forgot() -> None:
    """The leader restarted meanwhile, so nothing of the gap is in anybody's memory."""
    cluster = SimCluster(groups=1)
    away = cluster.followers()[0]
    away.crash()
    cluster.commit(40, size=200)
    for node in list(cluster.nodes):
        if node.is_up:
            node.crash()
    for node in cluster.nodes:
        if node is not away:
            node.start()
    cluster.until(lambda: bool(cluster.leaders()))
    leader = cluster.replica(cluster.leader)
    assert not leader.log.is_at_hand(RaftIndex(5))
    away.start()
    cluster.settle()
    assert cluster.replica(away).log.log_end_offset == 40
