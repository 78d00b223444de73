"""Batches that have to be built anew because the topic's compression is not the producer's, or read
because their producer did not say their greatest timestamp.

That takes milliseconds of a megabyte, so a worker thread does it. Batches of one partition are
appended in the order in which they came, as a producer with several requests under way counts on:
while one is being built, those after it wait behind it, also those that are fine as they are.

Invariants: a batch waits only behind one that is at work; what is rebuilt goes through the same
checks as any batch when its turn comes; how much waits is bounded by what requests may hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias
from weakref import WeakMethod

from attrs import define, field

from raftmq.cluster.parked_produces import AppendResult
from raftmq.cluster.partition_settings import PartitionSettings
from raftmq.cluster.produce_checks import check_produced_batch, dated, must_change, recompress
from raftmq.errors import CorruptBatchError, ErrorCode, KafkaError
from raftmq.ports import DiskError, Runnable
from raftmq.promise import Promise
from raftmq.records import HEADER_SIZE, check_batches, parse_header

INLINE_BYTES_MAX: Final = 2 << 10
"""What is smaller costs less than a way to another thread and back."""

Append: TypeAlias = Callable[[memoryview, int, int], AppendResult | Promise[AppendResult]]
Refused: TypeAlias = Callable[[memoryview, KafkaError], None]


class Workers(Protocol):
    """Threads for work that takes long."""

    def run(self, job: Runnable, done: Callable[[DiskError | None], None]) -> None:
        """Run `job.run()` elsewhere, then call `done` on the loop."""
        ...


@define(slots=True, eq=False)
class _Waiting:
    records: memoryview
    acks: int
    timeout_ms: int
    settings: PartitionSettings | None  # None: as it is
    promise: Promise[AppendResult] = field(factory=Promise)
    error: KafkaError | None = None
    is_done: bool = False

    def run(self) -> None:
        """Build it anew; in any thread."""
        assert self.settings is not None, "only what has to be built anew is worked on"
        try:
            header = check_produced_batch(check_batches(self.records), self.settings)
            if self.settings.compression in (None, header.codec):
                self.records, _ = dated(self.records, header, self.settings)
            else:
                self.records = memoryview(recompress(self.records, header, self.settings))
        except KafkaError as error:
            self.error = error


class Recompression:
    """What waits for a worker, of one partition."""

    __slots__ = ("_append", "_refused", "_waiting", "_workers")

    def __init__(self, workers: Workers | None, append: Append, refused: Refused) -> None:
        """Without workers nothing waits: all is built where it is appended. `refused` is told of
        what is not."""
        self._workers = workers
        # Weak, as the partition holds this: a ring would keep all of a partition that was deleted.
        self._append = WeakMethod(append)
        self._refused = refused
        self._waiting: deque[_Waiting] = deque()

    def takes(self, records: memoryview | None, settings: PartitionSettings) -> bool:
        """True when a batch has to come this way."""
        if self._waiting:
            return bool(records)
        return (
            self._workers is not None
            and records is not None
            and len(records) >= INLINE_BYTES_MAX
            and _must_change(records, settings)
        )

    def append(
        self, records: memoryview, acks: int, timeout_ms: int, settings: PartitionSettings
    ) -> Promise[AppendResult]:
        """Append when it is built and those before it are appended."""
        is_work = _must_change(records, settings)
        waiting = _Waiting(records, acks, timeout_ms, settings if is_work else None)
        self._waiting.append(waiting)
        if is_work and self._workers is not None:
            self._workers.run(waiting, lambda _error: self._built(waiting))
        else:
            waiting.is_done = True
        return waiting.promise

    def _built(self, waiting: _Waiting) -> None:
        waiting.is_done = True
        while self._waiting and self._waiting[0].is_done:
            first = self._waiting.popleft()
            if first.error is not None:
                self._refused(first.records, first.error)
                first.promise.resolve(AppendResult(first.error.code, message=first.error.message))
                continue
            append = self._append()
            if append is None:
                first.promise.resolve(AppendResult(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
                continue
            result = append(first.records, first.acks, first.timeout_ms)
            if isinstance(result, Promise):
                result.when_done(lambda done, to=first.promise: to.resolve(done.result()))  # type: ignore[misc]
            else:
                first.promise.resolve(result)


def _must_change(records: memoryview, settings: PartitionSettings) -> bool:
    if len(records) < HEADER_SIZE:
        return False
    try:
        return must_change(parse_header(records), settings)
    except CorruptBatchError:
        return False  # the append says what is wrong with it
