"""What a batch must satisfy before it is appended, and the few changes a broker makes to it.

Everything here looks at the 61-byte header; records are opened only when the topic's own
compression differs from the producer's, since then the batch must be built anew, and when the
header lacks their greatest timestamp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from raftmq.cluster.partition_settings import PartitionSettings
from raftmq.codec import output_limit
from raftmq.errors import ErrorCode, KafkaError
from raftmq.records import (
    LOG_APPEND_TIME,
    NO_TIMESTAMP,
    TIMESTAMP_MAX,
    BatchHeader,
    InvalidRecordError,
    NewRecord,
    Record,
    build_batch,
    check_produced,
    parse_header,
    read_records,
    set_log_append_time,
    set_max_timestamp,
)


def check_produced_batch(
    headers: Sequence[BatchHeader], settings: PartitionSettings
) -> BatchHeader:
    """Check the batches of one produced partition; there must be exactly one (KIP-98).

    Raises:
        KafkaError: INVALID_RECORD, INVALID_TXN_STATE, MESSAGE_TOO_LARGE or RECORD_LIST_TOO_LARGE.
    """
    if len(headers) != 1:
        raise KafkaError(
            f"exactly one batch per partition, not {len(headers)}", code=ErrorCode.INVALID_RECORD
        )
    header = headers[0]
    check_produced(header)
    if header.is_transactional:
        raise KafkaError("transactions are not enabled", code=ErrorCode.INVALID_TXN_STATE)
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


def check_timestamps(
    header: BatchHeader,
    settings: PartitionSettings,
    now_ms: int,
    voters_clocks_ms: Callable[[], Sequence[int]],
) -> None:
    """Check that a batch is neither too old nor too far in the future.

    To clients a refusal is final, and librdkafka begins a new producer epoch on it, for all its
    partitions. So one clock that is wrong, this leader's, refuses nothing: most of those of the
    voters that it hears must say the same. They are asked for only where this one refuses.

    Raises:
        KafkaError: INVALID_TIMESTAMP.
    """
    if settings.timestamp_type == LOG_APPEND_TIME:
        return
    why = _off_by(header, settings, now_ms)
    if not why:
        return
    clocks_ms = voters_clocks_ms()
    refusing = sum(1 for clock_ms in clocks_ms if _off_by(header, settings, clock_ms))
    if 2 * refusing > len(clocks_ms):
        raise KafkaError(why, code=ErrorCode.INVALID_TIMESTAMP)


def _off_by(header: BatchHeader, settings: PartitionSettings, now_ms: int) -> str:
    """What is wrong with a batch's timestamps at that time; empty when nothing is."""
    earliest, latest = header.base_timestamp, header.max_timestamp
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
    return ""


def must_change(header: BatchHeader, settings: PartitionSettings) -> bool:
    """True for a batch whose records have to be read before it can be stored.

    Raises:
        CorruptBatchError: an unknown codec.
    """
    if settings.compression is not None and header.codec is not settings.compression:
        return True
    return _is_undated(header, settings)


def _is_undated(header: BatchHeader, settings: PartitionSettings) -> bool:
    if settings.timestamp_type == LOG_APPEND_TIME or header.timestamp_type == LOG_APPEND_TIME:
        return False
    return header.max_timestamp < header.base_timestamp


def dated(
    batch: memoryview, header: BatchHeader, settings: PartitionSettings
) -> tuple[memoryview, BatchHeader]:
    """Give a checked batch its greatest timestamp, where its producer did not say it.

    Sarama before 1.46 leaves -1 there, since Kafka's broker sets it. Retention and look-ups by time
    go by it. In place if `batch` can be written; may run in any thread.

    Raises:
        KafkaError: as `prepare`.
    """
    if not _is_undated(header, settings):
        return batch, header
    greatest = max(record.timestamp for record in _records(batch, settings))
    result = memoryview(bytearray(batch)) if batch.readonly else batch
    set_max_timestamp(result, greatest)
    return result, parse_header(result)


def _records(batch: memoryview, settings: PartitionSettings) -> Iterator[Record]:
    """The records of a batch; a timestamp is the sum of two fields, which may be anything."""
    for record in read_records(batch, output_max=output_limit(settings.max_message_bytes)):
        if not -TIMESTAMP_MAX <= record.timestamp <= TIMESTAMP_MAX:
            raise InvalidRecordError(f"a record of the time {record.timestamp}")
        yield record


def prepare(
    batch: memoryview, header: BatchHeader, settings: PartitionSettings, now_ms: int
) -> tuple[bytearray | memoryview, BatchHeader]:
    """Give a checked batch the topic's compression and timestamp type; usually it has them.

    Raises:
        KafkaError: CORRUPT_MESSAGE when its records cannot be read, INVALID_RECORD when they cannot
            be what it says; MESSAGE_TOO_LARGE when they are too large under the topic's
            compression.
    """
    result: bytearray | memoryview = batch
    wanted = settings.compression
    if wanted is not None and wanted is not header.codec:
        result = recompress(batch, header, settings)
    elif batch.readonly:
        result = bytearray(batch)
    if settings.timestamp_type == LOG_APPEND_TIME:
        set_log_append_time(result, now_ms)
    if result is not batch or settings.timestamp_type == LOG_APPEND_TIME:
        header = parse_header(result)
    return result, header


def recompress(batch: memoryview, header: BatchHeader, settings: PartitionSettings) -> bytearray:
    """Build a checked batch anew with the topic's compression; may run in any thread.

    Raises:
        KafkaError: as `prepare`.
    """
    assert settings.compression is not None
    records = [
        NewRecord(record.key, record.value, record.timestamp, record.headers)
        for record in _records(batch, settings)
    ]
    if len(records) != header.record_count:
        raise KafkaError(
            "the batch does not hold as many records as it says", code=ErrorCode.INVALID_RECORD
        )
    rebuilt = build_batch(
        records,
        codec=settings.compression,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
        transactional=header.is_transactional,
    )
    if len(rebuilt) > settings.max_message_bytes:
        raise KafkaError(
            f"{len(rebuilt)} bytes under the topic's compression, above max.message.bytes",
            code=ErrorCode.MESSAGE_TOO_LARGE,
        )
    return rebuilt
