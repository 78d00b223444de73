"""A replica that was away for long: served from the disk, at a bounded rate, as durable as ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from attrs import define, field

from raftmq.log.shared import Shared
from raftmq.ports import DiskError, Runnable
from raftmq.raft.messages import StoredChunk
from raftmq.replication.catch_up import (
    BATCH_MS_MAX,
    GROWN_BYTES_MAX,
    CatchUpRate,
    LogSource,
    StoredReader,
)
from raftmq.types import (
    METADATA_GROUP,
    NodeId,
    RaftGroupId,
    RaftIndex,
    ReplicaId,
    StorageId,
    TopicId,
)
from tests.log.helpers import FakeClock, append, elect, flush, open_log, sim_disk
from tests.replication.sim_cluster import SimCluster

TWO = ReplicaId(NodeId(2), StorageId(22))
BYTES_MAX = 400
GROUP = RaftGroupId(TopicId(UUID(int=9)), 0, 0)


class Port:
    """Workers that work when told to; a stream whose room is a switch."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Runnable, Callable[[DiskError | None], None]]] = []
        self.has_stream_room = True
        self.clock = FakeClock()
        self.rate = CatchUpRate(self.clock, 0)

    def run(self, job: Runnable, done: Callable[[DiskError | None], None]) -> None:
        self.jobs.append((job, done))

    run_long = run

    def has_room(self, _to: NodeId, _size_bytes: int) -> bool:
        return self.has_stream_room

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
        return self.reader.take(RaftIndex(start), BYTES_MAX)

    def left(self, chunk: Any) -> None:
        self.reader.left(chunk.entries[-1].end, BYTES_MAX)


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
    assert it.port.jobs == []
    it.left(chunk)
    assert len(it.port.jobs) == 1
    it.port.work()
    following = it.take(chunk.entries[-1].end)
    assert following.entries[0].start == chunk.entries[-1].end


def test_bare_entries_need_no_disk() -> None:
    it = Reader()
    chunk = it.take(0)
    assert (chunk.span, bytes(chunk.entries[0].payload)) == (None, b"e1")


class Source:
    """What a core asks of a log that is on disk only, and how often it was woken."""

    def __init__(self, group: RaftGroupId = GROUP) -> None:
        it = Reader()
        self.port, self.wakes = it.port, 0
        self.source = LogSource(
            group, it.log, lambda: None, lambda _error: None, self._wake, it.port
        )

    def _wake(self) -> None:
        self.wakes += 1

    def admit(self, chunk: StoredChunk) -> bool:
        return self.source.admit(
            TWO, chunk.entries, chunk.size_bytes, is_needed=False, next_bytes_max=BYTES_MAX
        )

    def chunk(self) -> StoredChunk:
        assert self.source.stored(RaftIndex(1), BYTES_MAX) is None
        self.port.work()
        chunk = self.source.stored(RaftIndex(1), BYTES_MAX)
        assert chunk is not None
        self.wakes = 0
        return chunk


def test_what_may_not_leave_is_not_read_ahead() -> None:
    it = Source()
    chunk = it.chunk()
    it.port.has_stream_room = False
    assert not it.admit(chunk)
    assert it.port.jobs == []
    it.port.has_stream_room = True
    assert it.admit(chunk)
    assert len(it.port.jobs) == 1


def test_a_full_stream_is_looked_at_again_with_the_next_tick() -> None:
    it = Source()
    chunk = it.chunk()
    it.port.has_stream_room = False
    it.admit(chunk)
    assert it.wakes == 0
    it.port.rate.tick()
    it.port.rate.tick()
    assert it.wakes == 1


@pytest.mark.parametrize("group", [GROUP, METADATA_GROUP], ids=["a partition", "metadata"])
def test_the_metadata_group_waits_for_no_limit(group: RaftGroupId) -> None:
    it = Source(group)
    it.port.rate.set_limit(1)
    it.port.rate.admit(100_000, 1, list, is_needed=False)
    assert it.admit(it.chunk()) is (group == METADATA_GROUP)


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


@define(eq=False)
class Stream:
    """One replica that catches up: sends as much as it may whenever it is woken."""

    rate: CatchUpRate
    size: int
    batches: int = 1
    left: int = 1 << 40
    sent: int = 0
    looks: int = 0
    wake: Callable[[], None] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.wake = self.look  # one object for all times

    def look(self) -> None:
        self.looks += 1
        while self.left > 0 and self.rate.admit(
            self.size, self.batches, self.wake, is_needed=False
        ):
            self.sent += self.size
            self.left -= self.size


@define
class Bucket:
    """A rate that is ticked every 25 ms."""

    bytes_per_s: int
    clock: FakeClock = field(factory=FakeClock)
    rate: CatchUpRate = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.rate = CatchUpRate(self.clock, self.bytes_per_s)

    def stream(self, size: int, **more: int) -> Stream:
        stream = Stream(self.rate, size, **more)
        stream.look()
        return stream

    def run(self, seconds: float, each_tick: Callable[[], None] = lambda: None) -> None:
        for _ in range(round(seconds * 40)):
            self.clock.now_ms += 25.0
            self.rate.tick()
            each_tick()


MIB = 1 << 20


@pytest.mark.parametrize(
    ("limit", "sizes"),
    [
        pytest.param(1_000_000, [20_000], id="one"),
        pytest.param(12 * MIB, [MIB] * 3, id="large chunks"),
        pytest.param(12 * MIB, [MIB] * 400, id="many"),
        pytest.param(MIB // 4, [MIB] * 2, id="chunks above a second's share"),
        pytest.param(200 * MIB, [MIB, 300_000], id="many chunks a tick"),
        pytest.param(12 * MIB, [MIB, 20_000], id="uneven"),
    ],
)
def test_the_rate_holds_over_all(limit: int, sizes: list[int]) -> None:
    it = Bucket(limit)
    streams = [it.stream(size) for size in sizes]
    it.run(40)
    sent = sum(stream.sent for stream in streams)
    assert sent == it.rate.bytes_total
    assert sent == pytest.approx(40 * limit, rel=0.02, abs=2 * max(sizes))
    if len(set(sizes)) == 1:
        turns = [stream.sent // stream.size for stream in streams]
        assert max(turns) - min(turns) <= 2, "each in its turn, the first once more"


def test_held_back_costs_nothing_until_its_turn() -> None:
    it = Bucket(MIB)
    streams = [it.stream(MIB) for _ in range(1000)]
    for stream in streams:
        stream.looks = 0
    it.run(60)
    assert sum(stream.looks for stream in streams) in range(58, 63)
    assert max(stream.looks for stream in streams) == 1
    assert it.rate.waiting_count == 999 + 1


def test_the_limit_does_not_hold_for_whom_the_commit_waits() -> None:
    it = Bucket(1_000)
    it.stream(20_000)
    assert it.rate.admit(20_000, 1, list, is_needed=True)


@pytest.mark.parametrize(
    ("limit", "batches_per_s"),
    [
        pytest.param(12 * MIB, 1536, id="as many bytes"),
        pytest.param(120 * MIB, 15360, id="a high limit"),
        pytest.param(MIB, 1 / BATCH_MS_MAX * 1e3, id="a low one"),
    ],
)
def test_small_batches_are_charged_for_the_work_they_make(limit: int, batches_per_s: float) -> None:
    it = Bucket(limit)
    stream = it.stream(100, batches=10)
    it.run(10)
    assert stream.sent / 100 == pytest.approx(batches_per_s, rel=0.05)


@pytest.mark.parametrize("limit", [0, -1])
def test_zero_is_no_limit(limit: int) -> None:
    assert Bucket(limit).stream(1 << 30, left=100 << 30).left == 0


@pytest.mark.parametrize(
    ("before", "after", "seconds", "least", "most"),
    [
        pytest.param(1_000, 10 * MIB, 1.0, 9 * MIB, 12 * MIB, id="raised: old debts are light"),
        pytest.param(10 * MIB, 1_000, 10.0, 0, 2 * MIB, id="lowered"),
        pytest.param(1_000, 0, 0.025, 1 << 40, 1 << 41, id="lifted"),
        pytest.param(0, MIB, 4.0, 3 * MIB, 5 * MIB, id="set"),
    ],
)
def test_another_limit_holds_at_once(
    before: int, after: int, seconds: float, least: int, most: int
) -> None:
    it = Bucket(before)
    stream = it.stream(MIB, left=MIB if not before else 1 << 40)
    stream.sent, stream.left = 0, 1 << 40
    it.rate.set_limit(after)
    if not before:
        stream.look()
    it.run(seconds)
    assert least <= stream.sent <= most


@pytest.mark.parametrize("written", [MIB // 64, MIB, 3 * MIB])
def test_a_limit_below_the_rate_of_writes_delays_and_does_not_prevent(written: int) -> None:
    """What is written meanwhile comes on top: the backlog shrinks by the limit."""
    it = Bucket(4 * MIB)
    backlog, total = 40 * MIB, 0
    stream = it.stream(MIB, left=backlog)

    def write() -> None:
        nonlocal total
        total += written
        stream.left += written
        it.rate.grown(written, 1)

    it.run(9, write)
    assert stream.left == pytest.approx(backlog - 9 * 4 * MIB, abs=3 * MIB)


def test_what_was_written_while_nobody_sent_is_no_credit_for_ever() -> None:
    it = Bucket(MIB)
    for _ in range(1000):
        it.rate.grown(MIB, 1)
    stream = it.stream(MIB)
    it.run(1)
    assert stream.sent <= GROWN_BYTES_MAX + 3 * MIB


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
