"""A replica that does what a test tells it: a list of batches, a high watermark moved by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast
from uuid import UUID

import pytest
from attrs import define, field, frozen

from raftmq.errors import ErrorCode, KafkaError, NotLeaderError
from raftmq.log.aborted import Aborted, UntoldError
from raftmq.log.log_start import LogStart
from raftmq.log.model import DamagedError, LogEntry
from raftmq.log.verification import VerifyJob
from raftmq.partition.parked import Deadlines
from raftmq.partition.partition import Partition
from raftmq.partition.produce_checks import OpeningWorkers
from raftmq.partition.settings import PartitionSettings
from raftmq.partition.transactions import NO_TRANSACTIONS, TransactionsPort
from raftmq.ports import File, Runnable
from raftmq.promise import Promise
from raftmq.raft.messages import Role, SoftState
from raftmq.records import BatchHeader, Marker, parse_header, parse_marker, stamp
from raftmq.replication.seals import Seal
from raftmq.types import (
    LeaderEpoch,
    NodeId,
    Offset,
    RaftGroupId,
    RaftIndex,
    ReplicaId,
    StorageId,
    Term,
    TopicId,
    TopicPartition,
)

NODE = NodeId(1)
REPLICAS = tuple(ReplicaId(NodeId(n), StorageId(n)) for n in (1, 2, 3))
GROUP = RaftGroupId(TopicId(UUID(int=7)), 0, 1)
NAME = TopicPartition("t", 0)


class FakeClock:
    """Time that stands still."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000.0

    def monotonic_ms(self) -> float:
        return self.now_ms

    def wall_ms(self) -> int:
        return int(self.now_ms)


@frozen
class FakeSpan:
    """A batch, as if it stood in a file."""

    data: bytes
    end_offset: int
    base_offset: int
    position: int = 0

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def file(self) -> File:
        return cast("File", self)

    def pread(self, size: int, position: int) -> bytes:
        """As of its file."""
        return self.data[position : position + size]


@define
class FakeAborted:
    """What was told of aborted transactions, in memory."""

    rows: list[Aborted] = field(factory=list)
    covered: int = 0
    cold_stretches: list[tuple[File, int, int]] = field(factory=list)
    lost_end: int = 0

    def tell(self, start: int, end: int, found: Sequence[Aborted] = ()) -> None:
        if start <= self.covered < end:
            self.rows += [row for row in found if self.covered <= row.marker_offset < end]
            self.covered = end

    def between(self, start: int, end: int) -> list[Aborted]:
        if (missing := self.untold()) is not None:
            raise missing
        rows = [row for row in self.rows if row.marker_offset >= start and row.first_offset < end]
        return sorted(rows, key=lambda row: row.first_offset)

    def untold(self) -> UntoldError | None:
        return None if self.covered >= self.end() else UntoldError(self.covered, self.end())

    def cold(self, start: int, end: int) -> list[tuple[File, int, int]]:
        return self.cold_stretches

    def write(self) -> None:
        """There is no file."""

    def end(self) -> int:
        return max(self.covered, self.lost_end)

    def cut(self, end: int) -> None:
        """The log was cut."""
        self.covered = min(self.covered, end)
        self.lost_end = min(self.lost_end, end)
        self.rows = [row for row in self.rows if row.marker_offset < end]

    def lose(self) -> None:
        """The file is gone: what it held is to be told anew."""
        self.rows, self.covered, self.lost_end = [], 0, self.covered


@define
class FakeLog:
    """Batches in memory."""

    log_start: LogStart = field()
    batches: list[tuple[BatchHeader, bytes]] = field(factory=list)
    flushed_end_offset: Offset = Offset(0)
    damaged: bool = False
    job: Any = None  # the check that cold bytes need, once
    cold_jobs: list[Runnable] = field(factory=list)
    checks: int = 0
    hole: tuple[int, int] = (0, 0)
    aborted: FakeAborted = field(factory=FakeAborted)

    def marker(self, offset: Offset) -> Marker:
        return parse_marker(next(d for h, d in self.batches if h.base_offset == offset))

    @property
    def size_bytes(self) -> int:
        return sum(len(data) for _, data in self.batches)

    @property
    def log_end_offset(self) -> Offset:
        return Offset(self.batches[-1][0].next_offset) if self.batches else self.log_start.offset

    def locate(
        self,
        offset: Offset,
        bytes_max: int,
        end: Offset,
        *,
        at_least_one: bool = True,
        may_check: bool = True,
    ) -> Sequence[FakeSpan]:
        if self.damaged:
            raise DamagedError(offset, end)
        spans: list[FakeSpan] = []
        for header, data in self.batches:
            if header.next_offset <= offset or header.next_offset > end:
                continue
            if len(data) > bytes_max and (spans or not at_least_one):
                break
            bytes_max -= len(data)
            spans.append(FakeSpan(data, header.next_offset, header.base_offset))
        return spans

    def past_holes(self, offset: Offset) -> Offset:
        start, end = self.hole
        return Offset(end) if start <= offset < end else offset

    def records_end(self, end: Offset) -> Offset:
        return Offset(self.hole[0]) if self.hole[0] < end <= self.hole[1] else end

    def end_offset_for_epoch(self, epoch: LeaderEpoch) -> tuple[LeaderEpoch, Offset] | None:
        known = sorted({header.leader_epoch for header, _ in self.batches})
        best = max((e for e in known if e <= epoch), default=None)
        if best is None:
            return None
        later = [h.base_offset for h, _ in self.batches if h.leader_epoch > best]
        return LeaderEpoch(best), Offset(min(later, default=self.log_end_offset))

    def epoch_at(self, offset: Offset) -> LeaderEpoch:
        for header, _ in self.batches:
            if header.base_offset <= offset < header.next_offset:
                return LeaderEpoch(header.leader_epoch)
        raise AssertionError("no such offset")

    def offset_for_timestamp(
        self, timestamp_ms: int, end: Offset
    ) -> tuple[int, Offset, LeaderEpoch] | None:
        for header, _ in self.batches:
            if header.max_timestamp >= timestamp_ms and header.next_offset <= end:
                epoch = LeaderEpoch(header.leader_epoch)
                return header.max_timestamp, Offset(header.base_offset), epoch
        return None

    def max_timestamp(self, end: Offset) -> tuple[int, Offset, LeaderEpoch] | None:
        rows = [h for h, _ in self.batches if h.next_offset <= end]
        if not rows:
            return None
        best = max(rows, key=lambda h: h.max_timestamp)
        return best.max_timestamp, Offset(best.base_offset), LeaderEpoch(best.leader_epoch)

    def headers(self, start: Offset, end: Offset) -> Iterator[BatchHeader]:
        return iter([h for h, _ in self.batches if start < h.next_offset <= end])

    def check_stored(self, offset: Offset) -> None:
        """Nothing is damaged here."""

    def read_ahead(self, offset: Offset, bytes_max: int) -> Runnable | None:
        return self.cold_jobs.pop(0) if self.cold_jobs else None

    def lookup_ahead(self, timestamp_ms: int | None, end: Offset) -> Runnable | None:
        return self.cold_jobs.pop(0) if self.cold_jobs else None

    def needs_verification(
        self, offset: Offset, bytes_max: int, wanted: int = 1
    ) -> VerifyJob | None:
        job: VerifyJob | None = self.job
        return job

    def checked(self, job: VerifyJob) -> object:
        assert job is self.job, "another job was to be run"
        self.checks += 1
        self.job = None
        return []

    def index_of(self, offset: Offset) -> RaftIndex:
        return RaftIndex(offset)


class FakeReplica:
    """Leads with three voters unless told otherwise."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.log = FakeLog(
            LogStart(
                offset=Offset(0),
                index=RaftIndex(0),
                previous_epoch=LeaderEpoch(0),
                configuration=b"",
                state=b"",
            )
        )
        self.is_leader = True
        self.is_writable = True
        self.is_handing_over = False
        self.stands_last = False
        self.leader: ReplicaId | None = REPLICAS[0]
        self.leader_epoch = LeaderEpoch(5)
        self.high_watermark = Offset(0)
        self.failure: str | None = None
        self.newest_seal: Seal | None = None
        self.is_seal_committed = False
        self.voters: tuple[ReplicaId, ...] = REPLICAS
        self.in_sync = REPLICAS
        self.other_clocks_ms: list[int] = []
        self.flushed: dict[ReplicaId, int] = dict.fromkeys(REPLICAS, 0)
        self.wished: list[Offset] = []
        self.refusal: Exception | None = None
        self.damage_count = 0
        self.barrier: Promise[RaftIndex] = Promise.resolved(RaftIndex(0))

    def stand_last(self, is_last: bool, /) -> None:
        """Told by what reads its log."""
        self.stands_last = is_last

    def damage_found(self) -> None:
        self.damage_count += 1

    def fail(self, reason: str) -> None:
        self.failure = reason

    def read_barrier(self) -> Promise[RaftIndex]:
        return self.barrier

    @property
    def log_end_offset(self) -> Offset:
        return self.log.log_end_offset

    @property
    def log_start_offset(self) -> Offset:
        return self.log.log_start.offset

    def in_sync_replicas(self) -> Sequence[ReplicaId]:
        return self.in_sync

    def append_time_ms(self) -> int:
        return max(self.voters_clocks_ms())

    def voters_clocks_ms(self) -> list[int]:
        return [self.partition._clock.wall_ms(), *self.other_clocks_ms]

    def flushed_voters(self, end: RaftIndex) -> int:
        return sum(1 for voter in self.voters if self.flushed[voter] >= end)

    def append(self, batch: bytearray | memoryview, header: BatchHeader) -> Offset:
        if self.refusal is not None:
            raise self.refusal
        if not self.is_leader:
            raise NotLeaderError()
        if self.newest_seal is not None and self.newest_seal.is_closed:
            raise KafkaError("it is sealed", code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        base = self.log.log_end_offset
        stamp(batch, base, self.leader_epoch)
        data = bytes(batch)
        stamped = parse_header(data)
        assert stamped.record_count == header.record_count
        self.log.batches.append((stamped, data))
        self.partition.appended(
            LogEntry(RaftIndex(base), RaftIndex(stamped.next_offset), self.leader_epoch, 0, data)
        )
        return base

    def seal(self, seal: Seal) -> None:
        self.newest_seal, self.is_seal_committed = seal, False

    def move_log_start(self, target: Offset) -> object:
        self.wished.append(target)
        return None

    # ---- what a test does ----

    def flush(self, end: int, count: int) -> None:
        """`count` voters, the leader first, have flushed all below `end`."""
        for voter in self.voters[:count]:
            self.flushed[voter] = end
        self.log.flushed_end_offset = Offset(end)
        self.partition.progressed()

    def commit(self, end: int, count: int = 2) -> None:
        """A majority flushed all below `end`."""
        self.flush(end, count)
        self.high_watermark = Offset(end)
        self.partition.committed(Offset(end), RaftIndex(end))

    def start_at(self, offset: int) -> None:
        """The log start moves."""
        while (state := self.partition.state_at(Offset(offset), RaftIndex(offset))) is None:
            pass
        self.log.log_start = LogStart(
            offset=Offset(offset),
            index=RaftIndex(offset),
            previous_epoch=LeaderEpoch(5),
            configuration=b"",
            state=state,
        )
        self.log.batches = [row for row in self.log.batches if row[0].next_offset > offset]
        self.partition.progressed()

    def follow(self, leader: ReplicaId | None = REPLICAS[1]) -> None:
        """Leadership goes to another."""
        self.is_leader = self.is_writable = False
        self.leader = leader
        self.leader_epoch = LeaderEpoch(self.leader_epoch + 1)
        self.partition.role_changed(SoftState(Role.FOLLOWER, Term(self.leader_epoch), leader))

    def lead(self) -> None:
        """Leadership comes, in a term of its own."""
        self.is_leader = self.is_writable = True
        self.leader = REPLICAS[0]
        self.leader_epoch = LeaderEpoch(self.leader_epoch + 1)
        term = Term(self.leader_epoch)
        self.partition.role_changed(SoftState(Role.LEADER, term, self.leader))

    def truncate(self, end: int) -> None:
        """Entries from `end` on are gone."""
        self.log.batches = [row for row in self.log.batches if row[0].next_offset <= end]
        self.log.aborted.cut(end)
        self.partition.truncated(RaftIndex(end))


@define
class Bench:
    """A partition with everything that it needs."""

    clock: FakeClock = field(factory=FakeClock)
    settings: PartitionSettings = field(factory=PartitionSettings)
    workers: OpeningWorkers | None = None
    transactions: TransactionsPort = NO_TRANSACTIONS
    deadlines: Deadlines = field(init=False)
    partition: Partition = field(init=False)
    replica: FakeReplica = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.deadlines = Deadlines(self.clock)
        self.partition = Partition(
            NAME,
            GROUP,
            NODE,
            settings=self.settings,
            deadlines=self.deadlines,
            clock=self.clock,
            on_broken_invariant=pytest.fail,
            workers=self.workers,
            transactions=self.transactions,
        )
        self.replica = FakeReplica(self.partition)
        self.partition.attach(self.replica)

    def sleep(self, milliseconds: float) -> None:
        """Let time pass, deadline by deadline."""
        end = self.clock.now_ms + milliseconds
        while (next_ms := self.deadlines.next_ms) is not None and next_ms <= end:
            self.clock.now_ms = max(self.clock.now_ms, next_ms)
            self.deadlines.expire(self.clock.now_ms)
        self.clock.now_ms = end
