"""Checks that a batch must pass before it is appended, and the few changes a broker makes to it.

Its header is checked first (`check_produced_batch`), then its records are walked (`open_batch`), as
deep as the topic's `raftmq.produce.check` asks, so that what is stored can be read. Codes are
Kafka's where Kafka has a useful one. `CORRUPT_MESSAGE` makes clients send the same bytes again, so
it is for bytes that were damaged on the way; a bad batch whose checksum is right stays bad, and is
refused for good.

A batch is built anew only when the topic's own compression differs from the producer's; its records
stay byte for byte what they were.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from attrs import frozen

from raftmq.codec import OutputTooLargeError, decompress, output_limit
from raftmq.delays.asks import ADDED_BYTES_MAX, Kind, read_ask
from raftmq.errors import CorruptBatchError, ErrorCode, KafkaError, RecordsRefusedError
from raftmq.partition.settings import CheckDepth, PartitionSettings
from raftmq.record_walk import UndecidedError, Walked, iter_brief, walk_lengths, walk_records
from raftmq.records import (
    CREATE_TIME,
    HEADER_SIZE,
    LENGTH_OVERHEAD,
    LOG_APPEND_TIME,
    MAGIC,
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


def _check_asks(
    batch: memoryview, header: BatchHeader, settings: PartitionSettings, now_ms: int
) -> None:
    """Refuse what a delay topic could not deliver, or would deliver otherwise than was meant."""
    output_max = output_limit(settings.max_message_bytes)
    for index, record in enumerate(read_records(batch, output_max=output_max)):
        size = len(record.key or b"") + len(record.value or b"") + ADDED_BYTES_MAX
        size += sum(len(name) + len(text or b"") + _PER_HEADER for name, text in record.headers)
        try:
            ask = read_ask(
                record.key, record.headers, now_ms, settings.delay_max_ms, settings.retry
            )
            if header.is_transactional and ask.kind is not Kind.ADD:
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
        _check_asks(batch, header, settings, now_ms)
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
