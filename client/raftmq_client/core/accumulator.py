"""Collects records into batches, per partition, by size and by linger time.

Owns records between `send` and the wire, and their receipts. Never decides about retries or
sequences (`producer.py` does) and never reads a clock: times come as arguments. A batch is open
until it is full, its linger time is over, or somebody waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec
from attrs import define, field, frozen

from raftmq.types import TopicPartition
from raftmq_client.core.untold import Loss
from raftmq_client.errors import ClientError, Outcome

RECORD_OVERHEAD = 20
"""Bytes that a record costs on the wire beside key, value and headers, at most."""
BATCH_OVERHEAD = 61

Fields: TypeAlias = tuple[
    bytes | None, bytes | None, int | None, Sequence[tuple[str, bytes | None]]
]
"""Key, value, timestamp and headers: a `NewRecord`, or a plain tuple, which the garbage collector
drops from its lists at the first look. Hundreds of thousands may wait at once."""


@frozen
class RecordMetadata:
    """Where an acknowledged record is."""

    topic: str
    partition: int
    offset: int
    """-1 when the broker did not say (acks=0, or a duplicate whose offset it forgot)."""
    timestamp: int


class Waiter(Protocol):
    """How a driver waits for a receipt."""

    def wait(self, receipt: Receipt, timeout_s: float | None) -> bool:
        """Wait until the receipt is settled; False when the time is over."""
        ...


class Receipt(msgspec.Struct, eq=False):
    """The promise of a record's place. Settled once its batch is.

    A struct, since one is made per record. Compared by identity.
    """

    timestamp: int
    _waiter: Any
    """A Waiter, or what a driver's own kind of receipt waits with."""
    batch: Batch | None = None
    """None until a partition is chosen."""
    index: int = 0
    listeners: list[Listener] | None = None
    _error: ClientError | None = None

    def __repr__(self) -> str:
        batch = self._follow()  # to look at it in a debugger is not to hear of it
        error = batch.error if batch is not None else None
        outcome = Outcome.OK if error is None else error.outcome
        return f"<{type(self).__name__} {outcome.name if self.is_done else 'pending'}>"

    @property
    def is_done(self) -> bool:
        """True once the outcome is settled: ok, failed or unknown."""
        batch = self._follow()
        return batch is not None and batch.is_done

    @property
    def outcome(self) -> Outcome | None:
        """What is known; None while pending."""
        if not self.is_done:
            return None
        error = self.error
        return Outcome.OK if error is None else error.outcome

    @property
    def error(self) -> ClientError | None:
        """Why it failed or is unknown; None while pending or ok."""
        if self._error is None:
            batch = self._follow()
            if batch is not None and batch.error is not None:
                self._error = batch.error.fresh()  # one's traceback is no other's
                if batch.loss is not None and self.listeners is None:
                    batch.loss.count -= 1
        return self._error

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """Wait until the record is acknowledged.

        Args:
            timeout: seconds; None waits for the producer's delivery timeout.

        Raises:
            ClientError: failed or unknown, see its `outcome`.
            TimeoutError: nothing is settled yet; the record is still on its way.
        """
        if not self.is_done and (self._waiter is None or not self._waiter.wait(self, timeout)):
            raise TimeoutError("the record is still on its way")
        error = self.error
        if error is not None:
            raise error.fresh()
        place = self.place
        assert place is not None
        return place

    @property
    def place(self) -> RecordMetadata | None:
        """Where the record is; None while pending, and when it failed or is unknown."""
        batch = self._follow()
        if batch is None or not batch.is_done or self.error is not None:
            return None
        offset = batch.base_offset + self.index if batch.base_offset >= 0 else -1
        stamp = batch.log_append_time if batch.log_append_time >= 0 else self.timestamp
        return RecordMetadata(batch.key.topic, batch.key.partition, offset, stamp)

    def listen(self, listener: Listener) -> None:
        """Be told by the driver once it is settled. Not for a receipt that is settled already."""
        assert not self.is_done
        if self.listeners is None:
            self.listeners = []
            batch = self._follow()
            if batch is not None:
                batch.listening.append(self)
        self.listeners.append(listener)

    def fail(self, error: ClientError, topic: str = "") -> None:
        """Settle a receipt that never got into a batch; in one of its own, therefore."""
        self.batch = Batch(TopicPartition(topic, -1), (0, 0), 0.0, 0.0)
        self.batch.settle(error, -1, -1)

    def _follow(self) -> Batch | None:
        """Its batch, or the part of it that it is in since that was split."""
        batch = self.batch
        while batch is not None and batch.halves is not None:
            first, second = batch.halves
            if self.index < batch.middle:
                batch = first
            else:
                self.index -= batch.middle
                batch = second
            self.batch = batch
        return batch


Listener = Callable[[Any], object]
"""Called once with a settled receipt, of whatever kind the driver has."""


@define(eq=False)
class Batch:
    """Records of one partition that travel and settle together."""

    key: TopicPartition
    order: tuple[int, int]
    """(number, first record): the order in which a partition's batches must be appended."""
    created_at: float
    deadline: float
    records: list[Fields] = field(factory=list)
    """Let go once it is settled or split: receipts keep their batch, and shall not keep these."""
    listening: list[Receipt] = field(factory=list)
    """Receipts that somebody listens to. The others know their batch, and are their owners'."""
    halves: tuple[Batch, Batch] | None = None
    """What it was split into."""
    middle: int = 0
    """How many records went to the first half."""
    size_bytes: int = BATCH_OVERHEAD
    is_closed: bool = False
    is_hurried: bool = False
    base_sequence: int = -1
    slot: int = -1
    """Counts the partition's numbered batches, whatever their epoch."""
    producer_epoch: int = -1
    sent_as_head: bool = False
    may_exist: bool = False
    """An earlier attempt may have been appended: it can no longer simply fail."""
    attempts: int = 0
    request: Any = None
    """The Request that it is in, while it is not settled."""
    is_done: bool = False
    error: ClientError | None = None
    loss: Loss | None = None
    """What counts its records while nobody has heard that they failed."""
    base_offset: int = -1
    log_append_time: int = -1
    last_error: ClientError | None = None

    @property
    def has_left(self) -> bool:
        """True when bytes of it may have left."""
        return self.may_exist or (self.request is not None and self.request.call.sent)

    def add(self, record: Fields, receipt: Receipt, size: int) -> None:
        """Take one more record."""
        receipt.batch = self
        receipt.index = len(self.records)
        if receipt.listeners is not None:
            self.listening.append(receipt)
        self.take(record, size)

    def take(self, record: Fields, size: int) -> None:
        """Take one more record, whose receipt is known elsewhere."""
        self.records.append(record)
        self.size_bytes += size

    def settle(self, error: ClientError | None, base_offset: int, log_append_time: int) -> None:
        """Give all its receipts their outcome; later ones are ignored."""
        if self.is_done:
            return
        self.is_closed = True
        self.error = error
        self.base_offset = base_offset
        self.log_append_time = log_append_time
        self.is_done = True
        self.request = None
        self.records = []  # an attempt that is not written yet has its own hold on them

    def split(self) -> tuple[Batch, Batch]:
        """Two halves that keep the sequence numbers of their records."""
        middle = len(self.records) // 2
        halves = []
        for start, end in ((0, middle), (middle, len(self.records))):
            order = (self.order[0], self.order[1] + start)
            half = Batch(self.key, order, self.created_at, self.deadline, is_closed=True)
            for record in self.records[start:end]:
                half.take(record, record_size(record))
            half.may_exist = self.may_exist
            half.producer_epoch = self.producer_epoch
            if self.base_sequence >= 0:
                half.base_sequence = (self.base_sequence + start) & 0x7FFFFFFF
            halves.append(half)
        self.middle = middle
        self.halves = halves[0], halves[1]
        listening, self.listening, self.records, self.request = self.listening, [], [], None
        for receipt in listening:
            part = receipt._follow()
            assert part is not None
            part.listening.append(receipt)
        return self.halves


def record_size(record: Fields) -> int:
    """An upper estimate of a record's uncompressed bytes."""
    key, value, _, headers = record
    size = RECORD_OVERHEAD
    if key is not None:
        size += len(key)
    if value is not None:
        size += len(value)
    for name, content in headers:
        size += len(name) * 3 + (len(content) if content is not None else 0) + 10
    return size


@define
class Accumulator:
    """Batches of all partitions, oldest first within each."""

    batch_bytes: int = 128 * 1024
    linger_ms: float = 5.0
    delivery_timeout_ms: float = 120_000.0
    queues: dict[TopicPartition, deque[Batch]] = field(factory=dict)
    size_bytes: int = 0
    next_order: int = 0

    def add(
        self, key: TopicPartition, record: Fields, receipt: Receipt, size: int, now: float
    ) -> bool:
        """Put a record into its partition's open batch; True when that closed a batch."""
        queue = self.queues.get(key)
        if queue is None:
            queue = self.queues[key] = deque()
        closed = False
        batch = queue[-1] if queue else None
        if batch is None or batch.is_closed or batch.size_bytes + size > self.batch_bytes:
            if batch is not None and not batch.is_closed:
                batch.is_closed = closed = True
            self.next_order += 1
            batch = Batch(key, (self.next_order, 0), now, now + self.delivery_timeout_ms)
            queue.append(batch)
        batch.add(record, receipt, size)
        self.size_bytes += size
        if batch.size_bytes >= self.batch_bytes:
            batch.is_closed = closed = True
        return closed

    def is_ready(self, batch: Batch, now: float) -> bool:
        """True when a queued batch should leave."""
        return batch.is_closed or batch.is_hurried or now - batch.created_at >= self.linger_ms

    def ready_at(self, batch: Batch) -> float:
        """When it becomes ready by itself."""
        if batch.is_closed or batch.is_hurried:
            return 0.0
        return batch.created_at + self.linger_ms

    def take(self, key: TopicPartition) -> Batch:
        """Remove and close a partition's oldest batch."""
        batch = self.queues[key].popleft()
        batch.is_closed = True
        return batch

    def release(self, batch: Batch) -> None:
        """A batch is settled: its bytes are free again."""
        self.size_bytes -= batch.size_bytes - BATCH_OVERHEAD
        assert self.size_bytes >= 0
