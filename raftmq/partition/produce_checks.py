"""Checks that a batch must pass before it is appended, and the few changes a broker makes to it.

Its header is checked first (`check_produced_batch`), then its records are walked (`open_batch`), as
deep as the topic's `raftmq.produce.check` asks, so that what is stored can be read. Codes are
Kafka's where Kafka has a useful one. `CORRUPT_MESSAGE` makes clients send the same bytes again, so
it is for bytes that were damaged on the way; a bad batch whose checksum is right stays bad, and is
refused for good.

A batch is built anew only when the topic's own compression differs from the producer's; its records
stay byte for byte what they were.

To open a batch is to check its records, on the loop or in a worker; `BatchOpening` decides where,
and has those wait that are to come after it.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol, TypeAlias, TypeVar
from weakref import WeakMethod

from attrs import define, field, frozen

from raftmq.codec import OutputTooLargeError, decompress, output_limit
from raftmq.delays.headers import ADDED_BYTES_MAX, Kind, read_schedule
from raftmq.errors import CorruptBatchError, ErrorCode, KafkaError, RecordsRefusedError
from raftmq.partition.parked import Deadline, Deadlines
from raftmq.partition.ports import AppendResult
from raftmq.partition.settings import CheckDepth, PartitionSettings
from raftmq.ports import Clock, DiskError, Runnable
from raftmq.promise import Promise
from raftmq.record_walk import UndecidedError, Walked, iter_brief, walk_lengths, walk_records
from raftmq.records import (
    CREATE_TIME,
    HEADER_SIZE,
    LENGTH_OVERHEAD,
    LOG_APPEND_TIME,
    MAGIC,
    NO_PRODUCER_ID,
    NO_TIMESTAMP,
    OWN_PRODUCER_ID_MIN,
    TIMESTAMP_MAX,
    BatchHeader,
    InvalidRecordError,
    OldFormatError,
    assemble_batch,
    check_batch,
    check_produced,
    has_sound_sum,
    parse_header,
    read_records,
    set_create_time,
    set_log_append_time,
    set_max_timestamp,
)

_T = TypeVar("_T")
_SIZE_AND_MAGIC: Final = struct.Struct(">8xi4xb")
_OLD_BATCH_LENGTH_MIN: Final = 14  # of any format: what is shorter is no batch
_BYTES_PER_COST: Final = 256  # so many are decompressed in the time in which a record is walked
ASKS_INLINE_MAX: Final = 100
"""Records of a delay topic whose headers are read on the loop: a millisecond."""
_PER_HEADER: Final = 10
RECORD_ERRORS_MAX: Final = 100
"""At most so many records of a refused batch are named."""


@frozen(slots=True)
class Allowance:
    """How much work the opening of one batch may be.

    Attributes:
        cost: of the walk, in records.
        plain_bytes: size of records that are not compressed.
        opened_bytes: size of compressed records when decompressed.
        rebuilt_bytes: size of records that are compressed anew.
    """

    cost: int
    plain_bytes: int
    opened_bytes: int
    rebuilt_bytes: int


@frozen(slots=True)
class OpenedBatch:
    """A batch whose records were checked as deep as its topic asks.

    Attributes:
        batch, header: as they will be stored, except for what is stamped into the header.
        settings: those in force then; if others are now, the batch is opened again.
        walked: None where the records were not read.
        odd: (index, reason) of records whose timestamps are too far from the leader's clock.
        cost: how much work it was, in records.
    """

    batch: memoryview
    header: BatchHeader
    settings: PartitionSettings
    walked: Walked | None = None
    odd: tuple[tuple[int, str], ...] = ()
    cost: int = 0


def check_produced_batch(records: memoryview, settings: PartitionSettings) -> BatchHeader:
    """Check the header and the checksum of produced bytes: one batch and nothing else (KIP-98).

    Raises:
        KafkaError: INVALID_RECORD, CORRUPT_MESSAGE, INVALID_TXN_STATE, MESSAGE_TOO_LARGE or
            RECORD_LIST_TOO_LARGE.
    """
    size = _size_of_batch(records)
    header = parse_header(records)
    if not has_sound_sum(records, header):
        raise CorruptBatchError("CRC-32C does not match")
    if size < len(records):
        _size_of_batch(records[size:])  # raises what is wrong with the rest
        raise InvalidRecordError("exactly one batch per partition")
    check_produced(header)
    if header.size > settings.max_message_bytes:
        raise KafkaError(
            f"a batch of {header.size} bytes is above max.message.bytes "
            f"{settings.max_message_bytes}",
            code=ErrorCode.MESSAGE_TOO_LARGE,
        )
    if header.size > settings.segment_bytes:
        raise KafkaError(
            f"a batch of {header.size} bytes is above segment.bytes {settings.segment_bytes}",
            code=ErrorCode.RECORD_LIST_TOO_LARGE,
        )
    return header


def _size_of_batch(view: memoryview) -> int:
    """Bytes of the batch that `view` begins with, checked in Kafka's order."""
    if len(view) < _SIZE_AND_MAGIC.size:
        raise InvalidRecordError("bytes that are no batch")
    length, magic = _SIZE_AND_MAGIC.unpack_from(view)
    if length < _OLD_BATCH_LENGTH_MIN:
        raise CorruptBatchError(f"batch length {length}")
    if magic in (0, 1):
        raise OldFormatError("message sets of magic 0 and 1 are not supported")
    if magic != MAGIC:
        raise CorruptBatchError(f"magic {magic}")
    if length > len(view) - LENGTH_OVERHEAD:
        raise InvalidRecordError(f"batch length {length}, {len(view)} bytes are there")
    if length < HEADER_SIZE - LENGTH_OVERHEAD:
        raise CorruptBatchError(f"batch length {length}")
    return LENGTH_OVERHEAD + int(length)


def check_timestamps(
    opened: OpenedBatch,
    now_ms: int,
    voters_clocks_ms: Callable[[], Sequence[int]],
) -> None:
    """Check that a batch is neither too old nor too far in the future.

    To clients a refusal is final, and librdkafka begins a new producer epoch on it, for all its
    partitions. So this leader's clock, which may be wrong, refuses nothing alone: most clocks
    of the voters that it hears must agree. They are read only where its own would refuse.

    Raises:
        KafkaError: INVALID_TIMESTAMP.
    """
    settings = opened.settings
    if settings.timestamp_type == LOG_APPEND_TIME:
        return
    earliest, latest = times = _range_of(opened)
    why = _off_by(times, settings, now_ms)
    if not why:
        return
    is_no_time = latest > TIMESTAMP_MAX or earliest < -TIMESTAMP_MAX
    clocks_ms = voters_clocks_ms()
    refusing = sum(1 for clock_ms in clocks_ms if _off_by(times, settings, clock_ms))
    if is_no_time or 2 * refusing > len(clocks_ms):
        raise RecordsRefusedError(why, opened.odd, code=ErrorCode.INVALID_TIMESTAMP)


def _range_of(opened: OpenedBatch) -> tuple[int, int]:
    """Its earliest and latest timestamp, as far as they were read; -1 for none."""
    if opened.walked is not None:
        return opened.walked.least, opened.walked.greatest
    return opened.header.base_timestamp, opened.header.max_timestamp


def _off_by(times: tuple[int, int], settings: PartitionSettings, now_ms: int) -> str:
    """What is wrong at `now_ms` with timestamps from `times[0]` to `times[1]`; empty if nothing."""
    earliest, latest = times
    if latest != NO_TIMESTAMP and latest - now_ms > settings.timestamp_after_ms_max:
        return (
            f"timestamp {latest} is more than message.timestamp.after.max.ms "
            f"{settings.timestamp_after_ms_max} ahead of {now_ms}"
        )
    if earliest != NO_TIMESTAMP and now_ms - earliest > settings.timestamp_before_ms_max:
        return (
            f"timestamp {earliest} is more than message.timestamp.before.max.ms "
            f"{settings.timestamp_before_ms_max} behind {now_ms}"
        )
    if latest > TIMESTAMP_MAX or earliest < -TIMESTAMP_MAX:
        return f"timestamps from {earliest} to {latest}, beyond 64 bits"
    return ""


def is_long_work(records: memoryview, settings: PartitionSettings, inline: Allowance) -> bool:
    """True for a batch that, by its header alone, will be more work than `inline` allows."""
    if len(records) < HEADER_SIZE:
        return False
    header = parse_header(records)
    if _must_rebuild(header, settings):
        return len(records) > inline.rebuilt_bytes
    if settings.check is CheckDepth.CRC:
        return False
    return len(records) > (inline.opened_bytes if header.codec_number else inline.plain_bytes)


def _must_read(header: BatchHeader, settings: PartitionSettings) -> bool:
    """True where the records are read whatever `raftmq.produce.check` says."""
    return (
        bool(settings.delivers_to)
        or _must_rebuild(header, settings)
        or (
            settings.timestamp_type == CREATE_TIME
            and header.timestamp_type == CREATE_TIME
            and header.max_timestamp < header.base_timestamp
        )
    )


def _check_schedules(
    batch: memoryview, header: BatchHeader, settings: PartitionSettings, now_ms: int
) -> None:
    """Refuse what a delay topic could not deliver, or would deliver otherwise than was meant."""
    output_max = output_limit(settings.max_message_bytes)
    for index, record in enumerate(read_records(batch, output_max=output_max)):
        size = len(record.key or b"") + len(record.value or b"") + ADDED_BYTES_MAX
        size += sum(len(name) + len(text or b"") + _PER_HEADER for name, text in record.headers)
        try:
            schedule = read_schedule(
                record.key, record.headers, now_ms, settings.delay_max_ms, settings.retry
            )
            if header.is_transactional and schedule.kind is not Kind.ADD:
                raise InvalidRecordError("nothing is cancelled or replaced in a transaction")
            if size + HEADER_SIZE > settings.max_message_bytes:
                raise InvalidRecordError("too large to be delivered")
        except InvalidRecordError as error:
            why = error.message or "a header that is not understood"
            raise RecordsRefusedError(
                why, ((index, why),), code=ErrorCode.INVALID_RECORD
            ) from error


def check_own_batch(batch: bytearray) -> BatchHeader:
    """Check a batch that a broker made: of deliveries, or the note of one. Neither the topic's
    max.message.bytes nor its segment.bytes bounds it: what was taken has to be delivered.

    Raises:
        KafkaError: it came otherwise than it was made.
    """
    header = check_batch(batch)
    if header.producer_id < OWN_PRODUCER_ID_MIN or header.base_sequence < 0 or header.base_offset:
        raise InvalidRecordError("no batch of a broker")
    if header.is_control or header.is_transactional or not header.record_count:
        raise InvalidRecordError("a broker's own batch holds records, of no transaction")
    return header


def _must_rebuild(header: BatchHeader, settings: PartitionSettings) -> bool:
    return settings.compression is not None and header.codec_number != settings.compression


def open_batch(
    batch: memoryview,
    header: BatchHeader,
    settings: PartitionSettings,
    now_ms: int,
    allowance: Allowance | None = None,
) -> OpenedBatch:
    """Check the records of a batch whose header was checked; may run in any thread.

    The greatest timestamp is written into the header where the producer wrote another one: Sarama
    before 1.46 leaves -1, as Kafka's broker sets it; retention and look-ups by time use it.
    It is written in place if `batch` is writable.

    Args:
        allowance: how much work it may be; None for any.

    Raises:
        KafkaError: INVALID_RECORD or MESSAGE_TOO_LARGE.
        UndecidedError: it would be more work than allowed.
    """
    must_read = _must_read(header, settings)
    if settings.check is CheckDepth.CRC and not must_read:
        return OpenedBatch(batch, header, settings)
    data = _payload(batch, header, settings, allowance)
    cost = len(data) // _BYTES_PER_COST if header.codec else 0
    cost_max = None if allowance is None else allowance.cost - cost
    if settings.check is CheckDepth.FRAME and not must_read:
        cost += walk_lengths(data, header.record_count, cost_max=cost_max)
        return OpenedBatch(batch, header, settings, cost=cost)
    walked = walk_records(data, header, cost_max=cost_max)
    cost += walked.cost
    is_long = allowance is not None and header.record_count > allowance.cost
    if is_long and _is_any_odd(walked, settings, now_ms):
        raise UndecidedError(cost)  # to find the odd ones each record must be read
    _check_keys(data, header, walked, settings)
    if settings.delivers_to:
        if allowance is not None and header.record_count > ASKS_INLINE_MAX:
            raise UndecidedError(cost)
        _check_schedules(batch, header, settings, now_ms)
    odd = _odd_records(data, header, walked, settings, now_ms)
    if _must_rebuild(header, settings):
        if allowance is not None and len(data) > allowance.rebuilt_bytes:
            raise UndecidedError(cost)
        batch = _rebuilt(data, header, settings)
        header = parse_header(batch)
    batch, header = _dated(batch, header, walked, settings)
    return OpenedBatch(batch, header, settings, walked, odd, cost)


def _payload(
    batch: memoryview,
    header: BatchHeader,
    settings: PartitionSettings,
    allowance: Allowance | None,
) -> bytes:
    """The records of a batch, decompressed."""
    packed = batch[HEADER_SIZE:]
    output_max = output_limit(settings.max_message_bytes)
    if allowance is not None:
        bytes_max = allowance.opened_bytes if header.codec else allowance.plain_bytes
        if len(packed) > bytes_max:
            raise UndecidedError(0)
        output_max = bytes_max
    try:
        return bytes(decompress(header.codec, packed, output_max=output_max, for_all_clients=True))
    except OutputTooLargeError:
        if allowance is not None:
            raise UndecidedError(output_max // _BYTES_PER_COST) from None
        raise
    except CorruptBatchError as error:
        raise InvalidRecordError(error.message) from error


def _check_keys(
    data: bytes, header: BatchHeader, walked: Walked, settings: PartitionSettings
) -> None:
    if settings.is_compacted and walked.unkeyed >= 0:
        why = "a compacted topic takes no record without a key"
        unkeyed = _some(index for index, _, is_keyed in iter_brief(data, header) if not is_keyed)
        raise RecordsRefusedError(
            why, tuple((index, why) for index in unkeyed), code=ErrorCode.INVALID_RECORD
        )


def _odd_records(
    data: bytes, header: BatchHeader, walked: Walked, settings: PartitionSettings, now_ms: int
) -> tuple[tuple[int, str], ...]:
    """The records whose timestamps may be refused, each with the reason.

    Raises:
        RecordsRefusedError: INVALID_TIMESTAMP where a producer stamps what the broker stamps.
    """
    if settings.timestamp_type == LOG_APPEND_TIME:
        if header.timestamp_type == CREATE_TIME:
            return ()
        why = "LogAppendTime is for the broker to set"
        records = tuple(
            (index, why) for index in range(min(header.record_count, RECORD_ERRORS_MAX))
        )
        raise RecordsRefusedError(why, records, code=ErrorCode.INVALID_TIMESTAMP)
    if not _off_by((walked.least, walked.greatest), settings, now_ms):
        return ()
    judged = (
        (index, _off_by((time, time), settings, now_ms))
        for index, time, _ in iter_brief(data, header)
    )
    return tuple(_some((index, why) for index, why in judged if why))


def _is_any_odd(walked: Walked, settings: PartitionSettings, now_ms: int) -> bool:
    if settings.is_compacted and walked.unkeyed >= 0:
        return True
    return settings.timestamp_type == CREATE_TIME and bool(
        _off_by((walked.least, walked.greatest), settings, now_ms)
    )


def _some(found: Iterator[_T]) -> Iterator[_T]:
    """The first `RECORD_ERRORS_MAX` ones."""
    for _, one in zip(range(RECORD_ERRORS_MAX), found, strict=False):
        yield one


def _dated(
    batch: memoryview, header: BatchHeader, walked: Walked, settings: PartitionSettings
) -> tuple[memoryview, BatchHeader]:
    """Correct the header where it has another greatest timestamp than the records, or says that the
    broker set the timestamps."""
    if settings.timestamp_type == LOG_APPEND_TIME or walked.greatest > TIMESTAMP_MAX:
        return batch, header  # it is stamped, or refused
    is_stamped = header.timestamp_type == LOG_APPEND_TIME
    if header.max_timestamp == walked.greatest and not is_stamped:
        return batch, header
    result = memoryview(bytearray(batch)) if batch.readonly else batch
    if is_stamped:
        set_create_time(result, walked.greatest)
    else:
        set_max_timestamp(result, walked.greatest)
    return result, parse_header(result)


def _rebuilt(data: bytes, header: BatchHeader, settings: PartitionSettings) -> memoryview:
    """The same records in a batch with the topic's compression."""
    assert settings.compression is not None
    rebuilt = assemble_batch(
        [data],
        codec=settings.compression,
        base_timestamp=header.base_timestamp,
        max_timestamp=header.max_timestamp,
        timestamp_type=header.timestamp_type,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
        transactional=header.is_transactional,
        offset_count=header.offset_count,
        record_count=header.record_count,
    )
    if len(rebuilt) > settings.max_message_bytes:
        raise KafkaError(
            f"{len(rebuilt)} bytes under the topic's compression, above max.message.bytes",
            code=ErrorCode.MESSAGE_TOO_LARGE,
        )
    return memoryview(rebuilt)


def prepare(opened: OpenedBatch, now_ms: int) -> tuple[bytearray | memoryview, BatchHeader]:
    """The batch in memory that may be written to, with LogAppendTime where the topic has that."""
    batch = opened.batch
    result: bytearray | memoryview = bytearray(batch) if batch.readonly else batch
    if opened.settings.timestamp_type != LOG_APPEND_TIME:
        return result, opened.header
    set_log_append_time(result, now_ms)
    return result, parse_header(result)


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
    """Opens the batches of one partition, in their order, or has them wait: for a worker that opens
    them, or to be verified.

    Most batches are opened where they are appended: that takes microseconds. Those that take longer
    (many records of different layouts, much compressed data, a batch that has to be compressed
    anew) go to a worker, since the loop must not be held. Batches of one partition are appended in
    the order in which they came, as a producer with several requests under way relies on: while a
    worker has one, all that come after it wait, also those that are quick.

    A transactional batch is verified before it is appended (`transactions.py`), which may take a
    round of the metadata group, or as long as that has no leader. Behind it only batches of its own
    producer wait, so that plain ones go on without metadata.

    Invariants: a batch waits only behind one that a worker has, or one of its producer that is
    verified; a batch that waited goes through the same checks as any other when its turn comes, is
    verified then, and is opened again if the topic's configs changed meanwhile; the bytes that wait
    are bounded by what requests may hold; what workers hold beside them is bounded by their number
    and `codec.output_limit`; verification is waited for as long as its producer would, and seconds
    at most.
    """

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
