"""A partition of a view with a condition: the committed records of another partition that match.

It stands over this node's replica of the base partition and reads its log by an index of the
batches in which something matches (`raftmq/views/index.py`), which `node/views.py` fills. Batches
that match wholly are given as they lie in the file; of mixed ones a batch of the matches alone is
made, in a worker, and kept for other readers (`raftmq/views/filling.py`).

Its end is one past its last match, its start one past the last match that was deleted, and every
position between its start and the base's end is in range. A reader beyond the last match waits for
the next one, not for the base. Nothing is told at both isolation levels but committed records,
so no transaction is ever listed as aborted.

Where the index is more than a moment behind the base, what is not examined may hold matches:
fetches are then told the base's end as the high watermark, and `latest` waits until all is examined
that was stable when it was asked for. So no reader takes the end of the index for the end of the
view, and `latest` does not fall when another replica leads.

Invariants: nothing at or above the base's committed end is served; what is served lies in rows of
the index; a batch in an answer holds a match at or above the offset that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, cast

from attrs import define, evolve, field

from raftmq.counts import TopicCounts
from raftmq.errors import ErrorCode, KafkaError
from raftmq.log.model import DamagedError
from raftmq.partition.look_ups import MAX_TIMESTAMP, code_outside, diverging_end, epoch_at
from raftmq.partition.parked import Deadline, Deadlines
from raftmq.partition.partition import (
    EARLIEST,
    EARLIEST_LOCAL,
    LATEST,
    LATEST_TIERED,
    Partition,
)
from raftmq.partition.ports import (
    NO_OFFSET,
    AppendResult,
    EpochEnd,
    FileSpan,
    OffsetResult,
    ReadResult,
    ReplicaPort,
)
from raftmq.ports import Clock, DiskError, Runnable
from raftmq.promise import Promise
from raftmq.records import parse_header
from raftmq.replication.broken_invariants import reports_assertions, reports_bugs
from raftmq.types import (
    Buffer,
    LeaderEpoch,
    Offset,
    RaftGroupId,
    RaftIndex,
    ReplicaId,
    TopicId,
    TopicPartition,
)
from raftmq.views.batches import Kind
from raftmq.views.conditions import Condition
from raftmq.views.filling import JudgeJob, RebuildJob, RebuiltBatches
from raftmq.views.index import AwayError, BlockJob, Row, ViewIndex

_NEVER: Final = float("-inf")
NEAR_MS: Final = 1_000.0
"""An index that lacks nothing older than this tells where its view ends."""
EXAMINED_WAIT_MS: Final = 5_000.0
"""How long `latest` waits for the index; clients ask again after OFFSET_NOT_AVAILABLE."""
PIECES_MAX: Final = 256
SPANS_MAX: Final = 64
"""Stretches of whole batches in one answer: each costs a look into the base's index."""
ROWS_MAX: Final = 4_000
"""Rows that one call looks at: some milliseconds."""
REBUILD_BYTES: Final = 512 << 10
"""What one job reads of the base to make batches anew."""
DENSE_BYTES: Final = 128 << 10
"""Read at once where mixed batches follow each other closely."""


class _Shown:
    """What readers ask of a replica."""

    __slots__ = ("_view",)

    def __init__(self, view: FilteredPartition) -> None:
        self._view = view

    @property
    def leader_epoch(self) -> LeaderEpoch:
        """The base's."""
        return self._view.base.leader_epoch

    @property
    def log_start_offset(self) -> Offset:
        """The view's."""
        return self._view.start

    def in_sync_replicas(self) -> Sequence[ReplicaId]:
        """The base's: each has an index of its own."""
        return self._view.base.replica.in_sync_replicas()

    def read_barrier(self) -> Promise[RaftIndex]:
        """The base's."""
        return self._view.base.replica.read_barrier()


@define(slots=True, eq=False)
class _Ask:
    """Somebody waits until all below `goal` is examined."""

    goal: Offset
    promise: Promise[OffsetResult]
    epoch: LeaderEpoch
    deadline: Deadline | None = None


LookUp = Callable[["FilteredPartition", int], Promise[OffsetResult]]
"""look_up(view, timestamp): the first match that is not older, or the newest (`node/views.py`)."""


class FilteredPartition(Partition):
    """What readers of one number of a view with a condition are given."""

    def __init__(
        self,
        name: TopicPartition,
        view_id: TopicId,
        base: Partition,
        condition: Condition,
        *,
        rebuilt: RebuiltBatches,
        look_up: LookUp,
        deadlines: Deadlines,
        clock: Clock,
        counts: TopicCounts | None = None,
    ) -> None:
        """Show nothing yet; `take_index` gives it what it shows."""
        super().__init__(
            name,
            RaftGroupId(view_id, base.index, base.group.creation_epoch),
            base.node_id,
            settings=base.settings,
            deadlines=deadlines,
            clock=clock,
            on_broken_invariant=base.on_broken_invariant,
            counts=counts,
        )
        self.base = base
        self.condition = condition
        self.view_index: ViewIndex | None = None
        """None until it is loaded."""
        self._rebuilt = rebuilt
        self._look_up = look_up
        self._shown = _Shown(self)
        self._asks: list[_Ask] = []
        # The index reached the goal, which was the stable end at `_goal_ms`, or is yet to; all that
        # was stable at `_caught_up_ms` is examined.
        self._goal: Offset | None = NO_OFFSET
        self._goal_ms = 0.0
        self._caught_up_ms = _NEVER
        self._examined_end = Offset(0)  # when it was looked at last
        self._log_start = NO_OFFSET  # the index's start is found for that one of the base
        self._seen: tuple[object, ...] = ()

    # ---- what it is ----

    @property
    def replica(self) -> ReplicaPort:
        """There is none of its own: only what readers ask of it."""
        return cast(ReplicaPort, self._shown)

    @property
    def is_leader(self) -> bool:
        """True while this node leads the base."""
        return not self._is_closed and self.base.is_leader

    @property
    def serves_fetches(self) -> bool:
        """False when a fetch that waits here must be told to go elsewhere, or of the view's end."""
        return not self._is_closed and self.base.serves_fetches

    @property
    def leader_epoch(self) -> LeaderEpoch:
        """The base's."""
        return self.base.leader_epoch

    @property
    def start(self) -> Offset:
        """One past the last match that was deleted, as far as this replica can tell; where a worker
        has to read of the index for that, the one before until then."""
        self.follow_start()
        index = self.view_index
        return self.base.replica.log_start_offset if index is None else index.start

    @property
    def examined_end(self) -> Offset:
        """All that is committed below is in the index."""
        index = self.view_index
        return self.base.replica.log_start_offset if index is None else index.examined_end

    @property
    def readable_end(self) -> Offset:
        """What clients are told as the high watermark: one past the last match that they may read;
        the base's stable end while the index is far behind it."""
        base_end = self.base.readable_end
        index = self.view_index
        end = self.start if index is None else min(index.end, base_end)
        if self.look_how_near():
            return end
        stable = self.base.stable_end
        return max(end, base_end if stable == NO_OFFSET else stable)

    @property
    def stable_end(self) -> Offset:
        """The same: nothing but stable records is shown."""
        return self.readable_end

    @property
    def stable_lag(self) -> int:
        """Nothing: both kinds of consumers see the same."""
        return 0

    def look_how_near(self) -> bool:
        """True when everything is examined that was stable a moment ago."""
        index = self.view_index
        if index is None:
            return False
        now_ms = self._clock.monotonic_ms()
        stable, examined_end = self.base.stable_end, index.examined_end
        if examined_end < self._examined_end:  # a part of it was damaged, and is examined again
            self._goal, self._caught_up_ms = NO_OFFSET, _NEVER
        self._examined_end = examined_end
        if stable != NO_OFFSET:
            goal = self._goal
            if examined_end >= stable:
                self._goal, self._caught_up_ms = None, now_ms
            elif goal is None:
                # It had everything when it looked last, which it does at each commit.
                self._goal, self._goal_ms, self._caught_up_ms = stable, now_ms, now_ms
            elif goal == NO_OFFSET or examined_end >= goal:
                if goal != NO_OFFSET:
                    self._caught_up_ms = self._goal_ms
                self._goal, self._goal_ms = stable, now_ms
        return now_ms - self._caught_up_ms <= NEAR_MS

    def close(self, code: ErrorCode = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION) -> None:
        """Answer everything that waits; the view, or its base here, is going away."""
        self._is_closed = True
        self._fail_asks(code)
        self._rebuilt.forget(self.group)
        self.fetches.wake_all()

    # ---- what fills it ----

    def take_index(self, index: ViewIndex) -> None:
        """Show what an index says."""
        self.view_index = index
        self.follow_start()
        self._settle_asks()
        self.fetches.wake_all()

    @reports_bugs
    def examined(self, job: JudgeJob, end: Offset) -> None:
        """Take over what a worker found up to `end`, from the examined end on."""
        index = self.view_index
        assert index is not None, "the index is loaded before anything is judged"
        before, log = index.end, self.base.replica.log
        self._rebuilt.put(self.group, job.rebuilt)
        for base_offset, next_offset, judged in job.judged:
            if next_offset <= index.examined_end:
                continue  # the log start passed it meanwhile
            index.epoch = log.epoch_at(Offset(next_offset - 1))
            index.add(Offset(base_offset), Offset(next_offset), judged)
        if index.examined_end < end:
            index.epoch = log.epoch_at(Offset(end - 1))
            index.pass_to(end)
        self._settle_asks()
        if index.end != before:
            self.fetches.wake_all()

    @reports_bugs
    def base_moved(self) -> None:
        """The base has new records, another leader, another log start, or is closing."""
        self.follow_start()
        self.look_how_near()
        if self._asks and not self.base.replica.is_writable:
            self._fail_asks(self.base._no_leader_code())
        self._settle_asks()
        base = self.base
        self.fetches.is_over = base.fetches.is_over
        seen = base.serves_fetches, base.leader_epoch, base.fetches.is_over, self.start
        if seen != self._seen:
            self._seen = seen
            self.fetches.wake_all()

    def follow_start(self, *, may_wait: bool = False) -> Runnable | None:
        """Find where the view starts, now that the base does; a job that must be done first."""
        index, log_start = self.view_index, self.base.replica.log_start_offset
        if index is None or log_start <= self._log_start:
            return None
        try:
            index.pass_start(log_start, may_wait=may_wait)
        except AwayError as away:
            return away.job
        except DiskError:
            return None  # the base says so where it reads; whoever looks next tries again
        self._log_start = log_start
        return None

    # ---- fetch ----

    def _refusal(self, current_epoch: int, *, may_follow: bool = False) -> ErrorCode:
        """The base's, while the view is there."""
        if self._is_closed:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return self.base._refusal(current_epoch, may_follow=may_follow)

    @reports_assertions
    def read(
        self,
        offset: Offset,
        bytes_max: int,
        *,
        current_epoch: int = -1,
        last_fetched_epoch: int = -1,
        may_follow: bool = False,
        at_least_one: bool = True,
        may_wait: bool = True,
        committed_only: bool = False,
    ) -> ReadResult:
        """As `Partition.read`; what is found is in `pieces`."""
        code = self._refusal(current_epoch, may_follow=may_follow)
        if code is not ErrorCode.NONE:
            return ReadResult(code)
        base = self.base
        away = self.follow_start(may_wait=may_wait)
        start, end = self.start, self.readable_end
        if last_fetched_epoch >= 0 and base.replica.is_leader:
            diverging = diverging_end(base.replica, offset, LeaderEpoch(last_fetched_epoch))
            if diverging is not None:
                return ReadResult(ErrorCode.NONE, end, start, diverging=diverging)
        committed_end = base._committed_end
        base_end = base._readable_end(committed_end)
        index = self.view_index
        if offset < start:
            is_known = index is not None
            code = ErrorCode.OFFSET_OUT_OF_RANGE if is_known else ErrorCode.OFFSET_NOT_AVAILABLE
            return ReadResult(code, end, start)
        if offset > committed_end:
            code = code_outside(base.replica, offset, start, base_end)
            told = max(end, offset) if code is ErrorCode.NONE else end
            return ReadResult(code, told, start, last_stable_offset=told)
        # Beyond the last match a reader's own position is the end: clients that are told a lower
        # one never take themselves for being there (librdkafka), or have a lag below zero (Java).
        end = max(end, offset)
        nothing = ReadResult(ErrorCode.NONE, end, start, last_stable_offset=end)
        if away is not None and offset < base.replica.log_start_offset:
            # It may lie before what was deleted: whoever reads on from there has to be told.
            return evolve(nothing, job=away)
        if index is None or (bytes_max <= 0 and not at_least_one):
            return nothing
        if self._buggify("partition.short_read"):
            bytes_max = min(bytes_max, 1)
        found = _Found(bytes_max, at_least_one, may_wait)
        try:
            self._collect(index, max(offset, base.replica.log_start_offset), base_end, found)
        except AwayError as away:
            found.job = away.job
        except KafkaError as error:
            if isinstance(error, DamagedError):
                base.replica.damage_found()
            if not found.pieces:
                return ReadResult(error.code, end, start)
        except DiskError:
            if not found.pieces:
                return ReadResult(ErrorCode.KAFKA_STORAGE_ERROR, end, start)
        if found.pieces:
            found.job = None  # whoever wants more asks again
        return ReadResult(
            ErrorCode.NONE,
            end,
            start,
            size=found.size,
            record_count=found.record_count,
            job=found.job,
            last_stable_offset=end,
            pieces=tuple(found.pieces),
        )

    def _collect(self, index: ViewIndex, offset: Offset, limit: Offset, found: _Found) -> None:
        """Find what matches in `[offset, limit)`, as much as `found` has room for.

        Raises:
            AwayError: a worker has to read of the index.
            KafkaError: DamagedError above all.
            DiskError: the device failed.
        """
        may_wait = found.may_wait
        row = self._next(index, offset, limit, may_wait)
        while row is not None and found.has_room and found.rows < ROWS_MAX:
            found.rows += 1
            if row.kind is Kind.MIXED:
                if not self._add_rebuilt(index, row, limit, found):
                    return
                row = self._next(index, Offset(row.last_match + 1), limit, may_wait)
                continue
            run_end = Offset(row.last_match + 1)
            first, away = row, None
            try:
                while (row := self._next(index, run_end, limit, may_wait)) is not None:
                    if row.kind is Kind.MIXED or row.base_offset != run_end:
                        break
                    if found.rows >= ROWS_MAX:
                        break
                    found.rows += 1
                    run_end = Offset(row.last_match + 1)
            except AwayError as error:
                away = error
            if not self._add_whole(first.base_offset, run_end, found):
                return
            if away is not None:
                raise away

    def row_from(self, offset: Offset, *, may_wait: bool = True) -> Row | None:
        """The first batch with a match at or above `offset` that may be read, of what is examined.

        Raises:
            AwayError: it may not wait, and a worker has to read of the index.
            DiskError: the device failed.
        """
        index = self.view_index
        if index is None:
            return None
        at = max(offset, self.base.replica.log_start_offset)
        return self._next(index, at, self.base.readable_end, may_wait)

    def first_match(self, offset: Offset) -> Offset:
        """Where the batch with the first match at or above `offset` begins, `offset` where there is
        none; not below the log's start.

        Raises:
            AwayError: a worker has to read of the index.
        """
        row = self.row_from(offset, may_wait=False)
        return offset if row is None else max(row.base_offset, self.base.replica.log_start_offset)

    def batch_of(self, row: Row) -> tuple[Sequence[FileSpan], Runnable | None]:
        """Where the batch of a row lies, or a job that must be done first.

        Raises:
            KafkaError: DamagedError above all.
            DiskError: the device failed.
        """
        at = max(row.base_offset, self.base.replica.log_start_offset)
        return self.base._spans(at, 1, self.base.readable_end, True, False)

    def _next(self, index: ViewIndex, offset: Offset, limit: Offset, may_wait: bool) -> Row | None:
        row = index.next_match(offset, may_wait=may_wait)
        return row if row is not None and row.last_match < limit else None

    def _add_whole(self, base_offset: Offset, run_end: Offset, found: _Found) -> bool:
        """Add the batches in `[base_offset, run_end)`, all of which match; False where not all of
        them were added."""
        at = max(base_offset, self.base.replica.log_start_offset)
        must = found.must
        spans, job = self.base._spans(at, max(found.left, 0), run_end, must, found.may_wait)
        found.job = job
        for span in spans:
            found.add_span(span)
        return bool(spans) and spans[-1].end_offset >= run_end

    def _add_rebuilt(self, index: ViewIndex, row: Row, limit: Offset, found: _Found) -> bool:
        """Add what was made of a mixed batch; False where it does not fit, or is yet to be made."""
        batch = self._rebuilt.get(self.group, row.base_offset)
        if batch is None:
            if found.pieces:
                return False
            job = self._rebuild_job(index, row, limit, may_wait=found.may_wait)
            if not found.may_wait or not isinstance(job, RebuildJob):
                found.job = job
                return False
            job.run()
            self._rebuilt.put(self.group, job.rebuilt)
            batch = self._rebuilt.get(self.group, row.base_offset)
            if batch is None:
                return False
        if len(batch) > found.left and not found.must:
            return False
        if batch:
            found.add_batch(batch)
        return True

    def _rebuild_job(
        self, index: ViewIndex, first: Row, limit: Offset, *, may_wait: bool
    ) -> Runnable | None:
        """A job that makes mixed batches from `first` on; only that one where it `may_wait`, since
        it is run on the loop. Another job where something must come into memory before that.

        Raises:
            KafkaError: DamagedError above all.
            DiskError: the device failed.
        """
        spans: list[FileSpan] = []
        wanted: set[int] = set()
        read_to, left = -1, REBUILD_BYTES
        row = first
        for _ in range(1 if may_wait else PIECES_MAX):
            try:
                following = self._next(index, Offset(row.last_match + 1), limit, may_wait)
            except AwayError:
                following = None  # the next read comes to it
            if row.kind is Kind.MIXED and self._rebuilt.get(self.group, row.base_offset) is None:
                if row.base_offset >= read_to:
                    size = DENSE_BYTES if not may_wait and _are_close(row, following) else 1
                    at = max(row.base_offset, self.base.replica.log_start_offset)
                    more, job = self.base._spans(at, size, limit, True, may_wait)
                    if not more and not wanted:
                        return job
                    if not more:
                        break
                    spans += more
                    read_to = more[-1].end_offset
                    left -= sum(span.size for span in more)
                wanted.add(row.base_offset)
            if following is None or left <= 0:
                break
            row = following
        return RebuildJob(spans, frozenset(wanted), self.condition)

    @reports_bugs
    def prepared(self, job: Runnable) -> None:
        """A worker ran `job`."""
        if isinstance(job, BlockJob):
            if job.index is self.view_index:
                job.index.take_block(job)
        elif isinstance(job, RebuildJob):
            if not self._is_closed:
                self._rebuilt.put(self.group, job.rebuilt)
        else:
            self.base.prepared(job)

    # ---- offsets and epochs ----

    @reports_assertions
    def list_offset(
        self,
        timestamp: int,
        *,
        current_epoch: int = -1,
        may_wait: bool = True,
        committed_only: bool = False,
    ) -> OffsetResult:
        """As `Partition.list_offset`, of matches alone; mostly the answer comes `later`."""
        code = self._refusal(current_epoch)
        if code is not ErrorCode.NONE:
            return OffsetResult(code)
        replica = self.base.replica
        if timestamp in (EARLIEST, EARLIEST_LOCAL):
            if self.view_index is None:
                return OffsetResult(ErrorCode.OFFSET_NOT_AVAILABLE)
            away = self.follow_start(may_wait=may_wait)
            if away is not None:
                return OffsetResult(ErrorCode.NONE, job=away)
            start = self.start
            epoch = epoch_at(replica, max(start, replica.log_start_offset))
            return OffsetResult(ErrorCode.NONE, start, leader_epoch=epoch)
        if not replica.is_writable:
            return OffsetResult(ErrorCode.OFFSET_NOT_AVAILABLE)
        if timestamp == LATEST_TIERED:
            return OffsetResult(ErrorCode.NONE)
        if timestamp < LATEST and timestamp != MAX_TIMESTAMP:
            return OffsetResult(ErrorCode.UNSUPPORTED_VERSION)
        if timestamp == LATEST:
            later = self.when_examined()
        else:
            later = self._look_up(self, timestamp)
        return later.result() if later.is_done else OffsetResult(ErrorCode.NONE, later=later)

    def when_examined(self) -> Promise[OffsetResult]:
        """The view's end, once all is examined that is stable now; OFFSET_NOT_AVAILABLE where that
        takes too long, or cannot be known."""
        stable = self.base.stable_end
        if stable == NO_OFFSET:
            return Promise.resolved(OffsetResult(ErrorCode.OFFSET_NOT_AVAILABLE))
        ask = _Ask(stable, Promise(), self.base.leader_epoch)

        def expire() -> None:
            ask.deadline = None
            self._settle(ask, OffsetResult(ErrorCode.OFFSET_NOT_AVAILABLE))

        self._asks.append(ask)
        self._settle_asks()
        if not ask.promise.is_done:
            ask.deadline = self._deadlines.after(EXAMINED_WAIT_MS, expire)
        return ask.promise

    def _settle_asks(self) -> None:
        index = self.view_index
        for ask in list(self._asks) if index is not None else ():
            if index is not None and index.examined_end >= ask.goal:
                self._settle(ask, self._end_for(index, ask.epoch))

    def _end_for(self, index: ViewIndex, epoch: LeaderEpoch) -> OffsetResult:
        """The end, from the leader of an epoch."""
        replica = self.base.replica
        if not replica.is_writable or replica.leader_epoch != epoch:
            return OffsetResult(self.base._no_leader_code())
        return OffsetResult(ErrorCode.NONE, index.end, leader_epoch=epoch)

    def _fail_asks(self, code: ErrorCode) -> None:
        for ask in list(self._asks):
            self._settle(ask, OffsetResult(code))

    def _settle(self, ask: _Ask, result: OffsetResult) -> None:
        self._asks.remove(ask)
        if ask.deadline is not None:
            ask.deadline.cancel()
        ask.promise.resolve(result)

    def end_offset_for_epoch(self, epoch: int, *, current_epoch: int = -1) -> EpochEnd:
        """The base's: no position in the view lies beyond."""
        if self._is_closed:
            return EpochEnd(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        return self.base.end_offset_for_epoch(epoch, current_epoch=current_epoch)

    def acknowledged(self, _timeout_ms: int) -> Promise[AppendResult] | None:
        """None: the index waits for what is committed."""
        return None


def _are_close(row: Row, following: Row | None) -> bool:
    """True where the next match is near enough for one read of both."""
    if following is None:
        return False
    return following.base_offset - row.last_match <= 4 * (row.last_match - row.base_offset + 4)


@define(slots=True)
class _Found:
    """What a read has found so far, and for how much more there is room."""

    left: int
    at_least_one: bool
    may_wait: bool
    pieces: list[FileSpan | Buffer] = field(factory=list)
    spans_count: int = 0
    rows: int = 0
    size: int = 0
    record_count: int = 0
    job: Runnable | None = None

    @property
    def must(self) -> bool:
        """The next batch goes along whatever its size."""
        return self.at_least_one and not self.pieces

    @property
    def has_room(self) -> bool:
        """True while something may be added."""
        if self.spans_count >= SPANS_MAX or len(self.pieces) >= PIECES_MAX:
            return False
        return self.left > 0 or self.must

    def add_span(self, span: FileSpan) -> None:
        """Add whole batches."""
        self.pieces.append(span)
        self.spans_count += 1
        self.left -= span.size
        self.size += span.size
        self.record_count += span.end_offset - span.base_offset

    def add_batch(self, batch: Buffer) -> None:
        """Add a batch that was made anew."""
        self.pieces.append(batch)
        self.left -= len(batch)
        self.size += len(batch)
        self.record_count += parse_header(batch).record_count
