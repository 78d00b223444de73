"""The produced batches of a partition that wait: for a worker to open them, or to be verified.

To open a batch is to check its records, on the loop or in a worker.

Most batches are opened where they are appended: that takes microseconds. Those that take longer
(many records of different layouts, much compressed data, a batch that has to be compressed anew)
go to a worker, since the loop must not be held. Batches of one partition are appended in the order
in which they came, as a producer with several requests under way relies on: while a worker has one,
all that come after it wait, also those that are quick.

A transactional batch is verified before it is appended (`transactions.py`), which may take a round
of the metadata group, or as long as that has no leader. Behind it only batches of its own producer
wait, so that plain ones go on without metadata.

Invariants: a batch waits only behind one that a worker has, or one of its producer that is
verified; a batch that waited goes through the same checks as any other when its turn comes, is
verified then, and is opened again if the topic's configs changed meanwhile; the bytes that wait are
bounded by what requests may hold; what workers hold beside them is bounded by their number and
`codec.output_limit`; verification is waited for as long as its producer would, and seconds at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias
from weakref import WeakMethod

from attrs import define, field, frozen

from raftmq.errors import CorruptBatchError, ErrorCode, KafkaError
from raftmq.partition.parked import Deadline, Deadlines
from raftmq.partition.ports import AppendResult
from raftmq.partition.produce_checks import (
    Allowance,
    OpenedBatch,
    check_produced_batch,
    is_long_work,
    open_batch,
)
from raftmq.partition.settings import PartitionSettings
from raftmq.ports import Clock, DiskError, Runnable
from raftmq.promise import Promise
from raftmq.record_walk import UndecidedError
from raftmq.records import NO_PRODUCER_ID, BatchHeader, parse_header

INLINE: Final = Allowance(
    cost=4_000, plain_bytes=1 << 20, opened_bytes=64 << 10, rebuilt_bytes=2 << 10
)
"""More work costs milliseconds; less costs hardly more than the way to a thread and back."""
WINDOW_MS: Final = 10
"""All partitions of a node together walk `INLINE.cost` records on the loop in such a time."""


@frozen(slots=True, eq=False)
class Waits:
    """A batch that cannot be appended now: a worker has to open it, or it is to be verified.

    Attributes:
        opened: it is open, and waits to be verified.
        settled: kept when it can be verified, broken when it cannot.
    """

    opened: OpenedBatch | None = None
    settled: Promise[None] | None = None


MUST_OPEN: Final = Waits()
VERIFIED_WITHIN_MS_MIN: Final = 500
VERIFIED_WITHIN_MS_MAX: Final = 5_000
"""How long a batch waits to be verified: as long as its request may take, between these bounds."""


Append: TypeAlias = Callable[
    [memoryview, int, int, int, OpenedBatch | None, bool],
    AppendResult | Promise[AppendResult] | Waits,
]
Refused: TypeAlias = Callable[[memoryview, KafkaError], None]


class InlineBudget:
    """How many records all partitions of a node may walk on the loop; renewed by the clock.

    Requests of one pass of the loop follow each other without a pause, so that many small batches
    would hold it as long as a large one does.
    """

    __slots__ = ("_clock", "_left", "_window")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._window = -1
        self._left = 0

    @property
    def left(self) -> int:
        """Records that may still be walked in this window."""
        window = int(self._clock.monotonic_ms()) // WINDOW_MS
        if window != self._window:
            self._window = window
            self._left = INLINE.cost
        return self._left

    def spend(self, cost: int) -> None:
        """Note that so many records were walked."""
        self._left -= cost


class OpeningWorkers(Protocol):
    """Threads for batches that take long, and the budget for those that do not."""

    @property
    def inline(self) -> InlineBudget: ...

    def run(self, job: Runnable, done: Callable[[DiskError | None], None]) -> None:
        """Run `job.run()` elsewhere, then call `done` on the loop."""
        ...


@define(slots=True, eq=False)
class _Waiting:
    records: memoryview
    acks: int
    timeout_ms: int
    version: int
    now_ms: int
    settings: PartitionSettings
    producer_id: int
    promise: Promise[AppendResult] = field(factory=Promise)
    opened: OpenedBatch | None = None
    error: KafkaError | None = None
    is_at_work: bool = False
    deadline: Deadline | None = None  # while it waits to be verified
    is_verified: bool = False  # it waited for that: the next answer is for good

    def run(self) -> None:
        """Open the batch, in any thread."""
        try:
            header = check_produced_batch(self.records, self.settings)
            self.opened = open_batch(self.records, header, self.settings, self.now_ms)
        except KafkaError as error:
            self.error = error
        except MemoryError:
            self.error = KafkaError(
                "no memory to look into the batch", code=ErrorCode.MESSAGE_TOO_LARGE
            )


class BatchOpening:
    """Opens the batches of one partition, in their order."""

    __slots__ = (
        "_append",
        "_clock",
        "_deadlines",
        "_is_due",
        "_is_going_on",
        "_refused",
        "_settings",
        "_waiting",
        "_workers",
    )

    def __init__(
        self,
        workers: OpeningWorkers | None,
        clock: Clock,
        deadlines: Deadlines,
        settings: Callable[[], PartitionSettings],
        append: Append,
        refused: Refused,
    ) -> None:
        """Without workers every batch is opened where it is appended.

        Args:
            settings: a method that returns the settings in force.
            append: a method that appends a batch that waited, unless that has to wait on.
            refused: called with each batch that is not appended.
        """
        self._workers = workers
        self._clock = clock
        self._deadlines = deadlines
        self._is_due = self._is_going_on = False
        # Weak, since the partition holds this: a ring would keep a deleted partition in memory.
        self._settings = WeakMethod(settings)
        self._append = WeakMethod(append)
        self._refused = refused
        self._waiting: deque[_Waiting] = deque()

    @property
    def is_busy(self) -> bool:
        """True while a batch waits: one that comes now may have to wait behind it."""
        return bool(self._waiting)

    def now(self, records: memoryview, header: BatchHeader) -> OpenedBatch | None:
        """Open a batch here; None when that is too much work for the loop.

        Raises:
            KafkaError: as `open_batch`.
        """
        settings, now_ms = self._in_force(), self._clock.wall_ms()
        if self._workers is None:
            return open_batch(records, header, settings, now_ms)
        budget = self._workers.inline
        allowance = Allowance(
            budget.left, INLINE.plain_bytes, INLINE.opened_bytes, INLINE.rebuilt_bytes
        )
        try:
            opened = open_batch(records, header, settings, now_ms, allowance)
        except UndecidedError as undecided:
            budget.spend(undecided.cost)
            return None
        budget.spend(opened.cost)
        return opened

    def wait(
        self,
        records: memoryview,
        acks: int,
        timeout_ms: int,
        version: int,
        waits: Waits | None = None,
    ) -> Promise[AppendResult]:
        """Append a batch after those before it; `waits` where something has to be done first."""
        settings = self._in_force()
        now_ms = self._clock.wall_ms()
        producer_id = _producer_of(records)
        waiting = _Waiting(records, acks, timeout_ms, version, now_ms, settings, producer_id)
        self._waiting.append(waiting)
        if waits is not None:
            self._begin(waiting, waits)
        elif is_long_work(records, settings, INLINE) and self._workers is not None:
            self._work(waiting)
        else:
            self._go_on()
        return waiting.promise

    def look_again(self) -> None:
        """This replica may not lead any more: whoever waits to be verified is told."""
        for waiting in list(self._waiting):
            self._verified(waiting)
        self._go_on()

    def _begin(self, waiting: _Waiting, waits: Waits) -> None:
        """Begin what a batch waits for."""
        if waits.settled is None:
            waiting.settings, waiting.opened = self._in_force(), None
            self._work(waiting)
            return
        wait_ms = min(max(waiting.timeout_ms, VERIFIED_WITHIN_MS_MIN), VERIFIED_WITHIN_MS_MAX)
        waiting.opened = waits.opened

        def settle(_settled: Promise[None] | None = None) -> None:
            if self._verified(waiting):
                self._go_on()

        waiting.deadline = self._deadlines.after(wait_ms, settle)
        waits.settled.when_done(settle)

    def _verified(self, waiting: _Waiting) -> bool:
        """Do not wait any longer for that; False when the batch did not."""
        deadline, waiting.deadline = waiting.deadline, None
        if deadline is None:
            return False
        deadline.cancel()
        waiting.is_verified = True
        return True

    def _in_force(self) -> PartitionSettings:
        settings = self._settings()
        assert settings is not None, "called by the partition, which is there"
        return settings()

    def _work(self, waiting: _Waiting) -> None:
        assert self._workers is not None, "without workers no batch is too much work"
        waiting.is_at_work = True
        self._workers.run(waiting, lambda _error: self._opened(waiting))

    def _opened(self, waiting: _Waiting) -> None:
        waiting.is_at_work = False
        self._go_on()

    def _go_on(self) -> None:
        """Append what has its turn. What comes meanwhile is looked at in the same run."""
        self._is_due = True
        if self._is_going_on:
            return
        self._is_going_on = True
        try:
            while self._is_due:
                self._is_due = False
                self._append_waiting()
        finally:
            self._is_going_on = False

    def _append_waiting(self) -> None:
        held: set[int] = set()  # producers of which a batch is verified: others of theirs wait
        at = 0
        while at < len(self._waiting) and not self._waiting[at].is_at_work:
            waiting = self._waiting[at]
            if waiting.deadline is not None or waiting.producer_id in held:
                held.add(waiting.producer_id)
                at += 1
                continue
            result = self._result_of(waiting)
            if isinstance(result, Waits):
                self._begin(waiting, result)  # and look at it again: that may be done at once
                continue
            del self._waiting[at]
            if isinstance(result, Promise):
                result.when_done(lambda done, to=waiting.promise: to.resolve(done.result()))  # type: ignore[misc]
            else:
                waiting.promise.resolve(result)

    def _result_of(self, waiting: _Waiting) -> AppendResult | Promise[AppendResult] | Waits:
        if waiting.error is not None:
            self._refused(waiting.records, waiting.error)
            return AppendResult.refused(waiting.error)
        append = self._append()
        if append is None:
            return AppendResult(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        return append(
            waiting.records,
            waiting.acks,
            waiting.timeout_ms,
            waiting.version,
            waiting.opened,
            waiting.is_verified,
        )


def _producer_of(records: memoryview) -> int:
    try:
        return parse_header(records).producer_id
    except CorruptBatchError:
        return NO_PRODUCER_ID  # it is refused when its turn comes
