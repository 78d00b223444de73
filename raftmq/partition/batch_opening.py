"""Where produced batches are opened, which is to check their records: on the loop, or in a worker.

Most batches are opened where they are appended: that takes microseconds. Those that take longer
(many records of different layouts, much compressed data, a batch that has to be compressed anew)
go to a worker, since the loop must not be held. Batches of one partition are appended in the order
in which they came, as a producer with several requests under way relies on: while a worker has one,
all that come after it wait, also those that are quick.

Invariants: a batch waits only behind one that a worker has; a batch that comes back from a worker
goes through the same checks as any other when its turn comes, and is opened again if the topic's
configs changed meanwhile; the bytes that wait are bounded by what requests may hold; what workers
hold beside them is bounded by their number and `codec.output_limit`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias
from weakref import WeakMethod

from attrs import define, field

from raftmq.errors import ErrorCode, KafkaError
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
from raftmq.records import BatchHeader

INLINE: Final = Allowance(
    cost=4_000, plain_bytes=1 << 20, opened_bytes=64 << 10, rebuilt_bytes=2 << 10
)
"""More work costs milliseconds; less costs hardly more than the way to a thread and back."""
WINDOW_MS: Final = 10
"""All partitions of a node together walk `INLINE.cost` records on the loop in such a time."""


Append: TypeAlias = Callable[
    [memoryview, int, int, OpenedBatch | None], AppendResult | Promise[AppendResult] | None
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
    now_ms: int
    settings: PartitionSettings
    promise: Promise[AppendResult] = field(factory=Promise)
    opened: OpenedBatch | None = None
    error: KafkaError | None = None
    is_at_work: bool = False

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

    __slots__ = ("_append", "_clock", "_refused", "_settings", "_waiting", "_workers")

    def __init__(
        self,
        workers: OpeningWorkers | None,
        clock: Clock,
        settings: Callable[[], PartitionSettings],
        append: Append,
        refused: Refused,
    ) -> None:
        """Without workers nothing waits: every batch is opened where it is appended.

        Args:
            settings: a method that returns the settings in force.
            append: a method that appends a batch that waited; it returns None if a worker has to
                open the batch.
            refused: called with each batch that is not appended.
        """
        self._workers = workers
        self._clock = clock
        # Weak, since the partition holds this: a ring would keep a deleted partition in memory.
        self._settings = WeakMethod(settings)
        self._append = WeakMethod(append)
        self._refused = refused
        self._waiting: deque[_Waiting] = deque()

    @property
    def is_busy(self) -> bool:
        """True while a worker has a batch: one that comes now waits behind it."""
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
        *,
        is_work: bool = False,
    ) -> Promise[AppendResult]:
        """Append a batch after those before it; `is_work` when a worker has to open it."""
        settings = self._in_force()
        waiting = _Waiting(records, acks, timeout_ms, self._clock.wall_ms(), settings)
        self._waiting.append(waiting)
        if is_work or is_long_work(records, settings, INLINE):
            self._work(waiting)
        return waiting.promise

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
        while self._waiting and not self._waiting[0].is_at_work:
            first = self._waiting[0]
            if first.error is not None:
                self._waiting.popleft()
                self._refused(first.records, first.error)
                first.promise.resolve(AppendResult.refused(first.error))
                continue
            append = self._append()
            if append is None:
                self._waiting.popleft()
                first.promise.resolve(AppendResult(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
                continue
            result = append(first.records, first.acks, first.timeout_ms, first.opened)
            if result is None:  # it takes long, or the configs changed since it was opened
                first.settings, first.opened = self._in_force(), None
                self._work(first)
                return
            self._waiting.popleft()
            if isinstance(result, Promise):
                result.when_done(lambda done, to=first.promise: to.resolve(done.result()))  # type: ignore[misc]
            else:
                first.promise.resolve(result)
