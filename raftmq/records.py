"""RecordBatch v2 (KIP-98): parse, check, stamp, build.

A batch is stored and sent byte for byte as its producer made it. The broker changes only base
offset and leader epoch, which lie before the checksummed range, and for LogAppendTime the
timestamp type and the greatest timestamp. The produce path looks at the 61-byte header and sums
the CRC; it makes no object per record and copies nothing. Records are read by consumers, exports
and the few tasks of a broker that need them (timestamp lookup).

Invariant: a batch accepted by `check_batch` is exactly as long as it says and its CRC-32C holds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from crc32c import crc32c

from raftmq.codec import OUTPUT_MAX, Codec, compress, decompress
from raftmq.errors import CorruptBatchError, ErrorCode, KafkaError
from raftmq.types import Buffer

# base_offset int64, batch_length int32 | leader_epoch int32, magic int8, crc uint32 |
# attributes int16, last_offset_delta int32, base_timestamp int64, max_timestamp int64,
# producer_id int64, producer_epoch int16, base_sequence int32, record_count int32, records.
# batch_length counts from leader_epoch on; the CRC covers everything from attributes on.
_HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_OFFSET_AND_LENGTH: Final = struct.Struct(">qi")
_OFFSET: Final = struct.Struct(">q")
_EPOCH: Final = struct.Struct(">i")
_CRC: Final = struct.Struct(">I")
_CHECKED_HEADER: Final = struct.Struct(">hiqqqhii")
_ATTRIBUTES: Final = struct.Struct(">h")
_TIMESTAMP: Final = struct.Struct(">q")
# The end of a transaction: version int16, kind int16 | version int16, coordinator_epoch int32.
_MARKER_KEY: Final = struct.Struct(">hh")
_MARKER_VALUE: Final = struct.Struct(">hi")

HEADER_SIZE: Final = 61
LENGTH_OVERHEAD: Final = 12
MAGIC: Final = 2
_BATCH_LENGTH_MIN: Final = HEADER_SIZE - LENGTH_OVERHEAD
_EPOCH_POSITION: Final = 12
_MAGIC_POSITION: Final = 16
_CRC_POSITION: Final = 17
_CHECKED_POSITION: Final = 21
_MAX_TIMESTAMP_POSITION: Final = 35
_PRODUCER_ID_POSITION: Final = 43

_CODEC_MASK: Final = 0x07
_LOG_APPEND_TIME: Final = 0x08
TRANSACTIONAL: Final = 0x10
"""The attribute of batches that belong to a transaction, and of its marker."""
CONTROL: Final = 0x20
"""The attribute of control batches."""

NO_TIMESTAMP: Final = -1
TIMESTAMP_MAX: Final = (1 << 63) - 1
NO_PRODUCER_ID: Final = -1
NO_PRODUCER_EPOCH: Final = -1
NO_SEQUENCE: Final = -1
SEQUENCE_MODULUS: Final = 1 << 31
"""Sequences run from 0 to 2^31 - 1 and then start at 0 again."""
OWN_PRODUCER_ID_MIN: Final = 1 << 62
"""From here on producer ids are those of brokers themselves (`delays/`): no client may use one."""

CREATE_TIME: Final = 0
LOG_APPEND_TIME: Final = 1

_MARKER_VERSION: Final = 0
_ABORT: Final = 0
_COMMIT: Final = 1

assert _HEADER.size == HEADER_SIZE


class OldFormatError(CorruptBatchError):
    """A message set of magic 0 or 1, which Kafka 4 refuses too (KIP-724): INVALID_RECORD."""

    code = ErrorCode.INVALID_RECORD


class InvalidRecordError(KafkaError):
    """A sound batch that a producer may not send (INVALID_RECORD)."""

    code = ErrorCode.INVALID_RECORD


class BatchHeader(NamedTuple):
    """The fixed part of a batch. A tuple, since one is made per batch on the hot path."""

    base_offset: int
    batch_length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size(self) -> int:
        """Bytes of the whole batch."""
        return LENGTH_OVERHEAD + self.batch_length

    @property
    def offset_count(self) -> int:
        """Offsets that it takes; compaction may have left fewer records."""
        return self.last_offset_delta + 1

    @property
    def next_offset(self) -> int:
        """The offset after its last one."""
        return self.base_offset + self.last_offset_delta + 1

    @property
    def codec(self) -> Codec:
        """How the records are compressed.

        Raises:
            CorruptBatchError: not one of Kafka's codecs.
        """
        number = self.attributes & _CODEC_MASK
        if number > Codec.ZSTD:
            raise CorruptBatchError(f"unknown compression codec {number}")
        return Codec(number)

    @property
    def codec_number(self) -> int:
        """As `codec`, unchecked."""
        return self.attributes & _CODEC_MASK

    @property
    def timestamp_type(self) -> int:
        """CREATE_TIME or LOG_APPEND_TIME."""
        return self.attributes >> 3 & 1

    @property
    def is_transactional(self) -> bool:
        """True for a batch that belongs to a transaction."""
        return self.attributes & TRANSACTIONAL != 0

    @property
    def is_control(self) -> bool:
        """True for a transaction marker, which consumers never see."""
        return self.attributes & CONTROL != 0

    @property
    def has_producer_id(self) -> bool:
        """True for an idempotent or transactional producer."""
        return self.producer_id >= 0

    @property
    def last_sequence(self) -> int:
        """The sequence of its last record."""
        if self.base_sequence == NO_SEQUENCE:
            return NO_SEQUENCE
        return (self.base_sequence + self.last_offset_delta) % SEQUENCE_MODULUS


class NewRecord(NamedTuple):
    """A record to be written. Without a timestamp it takes the batch's."""

    key: bytes | None
    value: bytes | None
    timestamp: int | None = None
    headers: Sequence[tuple[str, bytes | None]] = ()


class Record(NamedTuple):
    """A record that was read."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_type: int = CREATE_TIME
    leader_epoch: int = -1


class Marker(NamedTuple):
    """The end of a transaction, the content of a control batch's one record (KIP-98)."""

    is_commit: bool
    coordinator_epoch: int = 0


_make_header: Final = tuple.__new__
"""The format gives as many values as a header has fields; `_make` would count them every time."""


def parse_header(buf: Buffer, position: int = 0) -> BatchHeader:
    """Read a header, unchecked.

    Raises:
        CorruptBatchError: fewer than 61 bytes are left.
    """
    try:
        return _make_header(BatchHeader, _HEADER.unpack_from(buf, position))
    except struct.error as error:
        raise CorruptBatchError("shorter than a batch header") from error


def check_batch(buf: Buffer) -> BatchHeader:
    """Check that `buf` is exactly one sound batch, without looking at its records.

    Raises:
        OldFormatError: a message set of magic 0 or 1.
        CorruptBatchError: wrong length, magic, CRC or counts.
    """
    header = check_batch_at(memoryview(buf), 0)
    if header.size != len(buf):
        raise CorruptBatchError(f"batch of {header.size} bytes in a buffer of {len(buf)}")
    return header


def check_batches(buf: Buffer) -> list[BatchHeader]:
    """Check that `buf` is one or more sound batches and nothing else.

    Raises:
        CorruptBatchError: as `check_batch`, or `buf` is empty.
    """
    view = memoryview(buf)
    headers: list[BatchHeader] = []
    position = 0
    while position < len(view) or not headers:
        header = check_batch_at(view, position)
        headers.append(header)
        position += header.size
    return headers


def split_batches(buf: Buffer) -> Iterator[tuple[BatchHeader, memoryview]]:
    """Yield each whole batch, unchecked; stop silently at a last one that was cut off (a Fetch)."""
    view = memoryview(buf)
    position = 0
    while position + HEADER_SIZE <= len(view):
        header = parse_header(view, position)
        if header.batch_length < _BATCH_LENGTH_MIN:
            raise CorruptBatchError(f"batch length {header.batch_length}")
        end = position + header.size
        if end > len(view):
            return
        yield header, view[position:end]
        position = end


def check_batch_at(view: memoryview, position: int) -> BatchHeader:
    """Check the sound batch that begins at `position`; more may follow it.

    Raises:
        CorruptBatchError: as `check_batch`.
    """
    left = len(view) - position
    if left < HEADER_SIZE:
        if left > _MAGIC_POSITION and view[position + _MAGIC_POSITION] in (0, 1):
            raise OldFormatError("message sets of magic 0 and 1 are not supported")
        raise CorruptBatchError("shorter than a batch header")
    header = _make_header(BatchHeader, _HEADER.unpack_from(view, position))
    if header.magic != MAGIC:
        if header.magic in (0, 1):
            raise OldFormatError("message sets of magic 0 and 1 are not supported")
        raise CorruptBatchError(f"magic {header.magic}")
    if not _BATCH_LENGTH_MIN <= header.batch_length <= left - LENGTH_OVERHEAD:
        raise CorruptBatchError(f"batch length {header.batch_length}, {left} bytes are left")
    end = position + LENGTH_OVERHEAD + header.batch_length
    if crc32c(view[position + _CHECKED_POSITION : end]) != header.crc:
        raise CorruptBatchError("CRC-32C does not match")
    if not 0 <= header.record_count <= header.last_offset_delta + 1:
        raise CorruptBatchError(
            f"{header.record_count} records, last offset delta {header.last_offset_delta}"
        )
    if header.attributes & _CODEC_MASK > Codec.ZSTD:
        raise CorruptBatchError(f"unknown compression codec {header.attributes & _CODEC_MASK}")
    return header


def has_sound_sum(view: memoryview, header: BatchHeader) -> bool:
    """True when the CRC-32C of the batch that `view` begins with is that of its header."""
    return crc32c(view[_CHECKED_POSITION : header.size]) == header.crc


def check_produced(header: BatchHeader) -> None:
    """Check what a client may send, beyond soundness (Kafka's LogValidator).

    Raises:
        InvalidRecordError: a base offset, an unknown codec, a control batch, gaps in its offsets,
            or a producer id without sequence.
    """
    if header.base_offset:
        raise InvalidRecordError(f"base offset {header.base_offset}, which brokers assign")
    if header.attributes & _CODEC_MASK > Codec.ZSTD:
        raise InvalidRecordError(f"unknown compression codec {header.attributes & _CODEC_MASK}")
    if header.is_control:
        raise InvalidRecordError("clients may not write control batches")
    if header.record_count < 1 or header.record_count != header.last_offset_delta + 1:
        raise InvalidRecordError(
            f"{header.record_count} records over {header.last_offset_delta + 1} offsets"
        )
    if header.producer_id >= 0 and header.base_sequence < 0:
        raise InvalidRecordError(f"producer id with sequence {header.base_sequence}")
    if header.producer_id >= OWN_PRODUCER_ID_MIN:
        raise InvalidRecordError(f"producer id {header.producer_id}, which is a broker's own")
    if header.is_transactional and header.producer_id < 0:
        raise InvalidRecordError("transactional batch without producer id")


def producer_of(buf: Buffer) -> int:
    """The producer id that a batch names, NO_PRODUCER_ID where it is too short to name one."""
    if len(buf) < HEADER_SIZE:
        return NO_PRODUCER_ID
    producer_id: int = _OFFSET.unpack_from(buf, _PRODUCER_ID_POSITION)[0]
    return producer_id


def stamp(buf: bytearray | memoryview, base_offset: int, leader_epoch: int) -> None:
    """Write base offset and leader epoch; both lie outside the CRC, so the checksum still holds."""
    _OFFSET.pack_into(buf, 0, base_offset)
    _EPOCH.pack_into(buf, _EPOCH_POSITION, leader_epoch)


def set_log_append_time(buf: bytearray | memoryview, timestamp: int) -> None:
    """Make `timestamp` the time of every record in the batch and sum the CRC anew."""
    (attributes,) = _ATTRIBUTES.unpack_from(buf, _CHECKED_POSITION)
    _ATTRIBUTES.pack_into(buf, _CHECKED_POSITION, attributes | _LOG_APPEND_TIME)
    set_max_timestamp(buf, timestamp)


def set_create_time(buf: bytearray | memoryview, greatest: int) -> None:
    """Let every record have its own timestamp, of which `greatest` is the greatest one."""
    (attributes,) = _ATTRIBUTES.unpack_from(buf, _CHECKED_POSITION)
    _ATTRIBUTES.pack_into(buf, _CHECKED_POSITION, attributes & ~_LOG_APPEND_TIME)
    set_max_timestamp(buf, greatest)


def set_max_timestamp(buf: bytearray | memoryview, timestamp: int) -> None:
    """Write a batch's greatest timestamp and sum the CRC anew."""
    _TIMESTAMP.pack_into(buf, _MAX_TIMESTAMP_POSITION, timestamp)
    sum_anew(buf)


def sum_anew(buf: bytearray | memoryview) -> None:
    """Sum the CRC of a batch anew, after its bytes were changed."""
    _CRC.pack_into(buf, _CRC_POSITION, crc32c(memoryview(buf)[_CHECKED_POSITION:]))


# --- records ---------------------------------------------------------------------------------
#
# record => length varint, attributes int8, timestamp_delta varlong, offset_delta varint,
#           key_length varint (-1: null), key, value_length varint, value,
#           header_count varint, header => key_length varint, key, value_length varint, value
# Variable-length integers are zigzag, seven bits a byte, lowest first.


def encode_varint(value: int) -> bytes:
    """Zigzag variable-length encoding of a signed integer of up to 64 bits."""
    value = value << 1 if value >= 0 else (-value << 1) - 1
    if value < 0x80:
        return _ONE_BYTE[value]
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_ONE_BYTE: Final = tuple(bytes((value,)) for value in range(0x80))
_NULL: Final = b"\x01"


def read_varint(data: Buffer, position: int) -> tuple[int, int]:
    """Read a zigzag variable-length integer; returns it and the position after it.

    Raises:
        CorruptBatchError: the bytes end, or it does not fit into 64 bits.
    """
    try:
        byte = data[position]
        position += 1
        if byte < 0x80:
            return byte >> 1 ^ -(byte & 1), position
        value = byte & 0x7F
        shift = 7
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > 63:
                raise CorruptBatchError("variable-length integer of more than 10 bytes")
    except IndexError as error:
        raise CorruptBatchError("records end inside a variable-length integer") from error
    if value >> 64:
        raise CorruptBatchError("variable-length integer of more than 64 bits")
    return value >> 1 ^ -(value & 1), position


def encode_record(record: NewRecord, timestamp_delta: int, offset_delta: int) -> bytes:
    """Encode one record, its length prefix included."""
    key, value = record.key, record.value
    headers = record.headers
    pieces = [b"\x00", encode_varint(timestamp_delta), encode_varint(offset_delta)]
    if key is None:
        pieces.append(_NULL)
    else:
        pieces.append(encode_varint(len(key)))
        pieces.append(key)
    if value is None:
        pieces.append(_NULL)
    else:
        pieces.append(encode_varint(len(value)))
        pieces.append(value)
    pieces.append(encode_varint(len(headers)))
    for name, content in headers:
        encoded = name.encode()
        pieces.append(encode_varint(len(encoded)))
        pieces.append(encoded)
        if content is None:
            pieces.append(_NULL)
        else:
            pieces.append(encode_varint(len(content)))
            pieces.append(content)
    body = b"".join(pieces)
    return encode_varint(len(body)) + body


def build_batch(
    records: Sequence[NewRecord],
    *,
    codec: Codec = Codec.NONE,
    level: int | None = None,
    timestamp: int = 0,
    timestamp_type: int = CREATE_TIME,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
    base_sequence: int = NO_SEQUENCE,
    transactional: bool = False,
    control: bool = False,
    base_offset: int = 0,
    leader_epoch: int = 0,
) -> bytearray:
    """Build a batch; records without a timestamp take `timestamp`."""
    assert records, "a batch has at least one record"
    times = [timestamp if r.timestamp is None else r.timestamp for r in records]
    base_timestamp = times[0]
    encoded = [
        encode_record(record, times[delta] - base_timestamp, delta)
        for delta, record in enumerate(records)
    ]
    return assemble_batch(
        encoded,
        codec=codec,
        level=level,
        base_timestamp=base_timestamp,
        max_timestamp=max(times),
        timestamp_type=timestamp_type,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        transactional=transactional,
        control=control,
        base_offset=base_offset,
        leader_epoch=leader_epoch,
    )


def assemble_batch(
    encoded: Sequence[Buffer],
    *,
    base_timestamp: int,
    max_timestamp: int,
    codec: Codec = Codec.NONE,
    level: int | None = None,
    timestamp_type: int = CREATE_TIME,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
    base_sequence: int = NO_SEQUENCE,
    transactional: bool = False,
    control: bool = False,
    base_offset: int = 0,
    leader_epoch: int = 0,
    offset_count: int | None = None,
    record_count: int | None = None,
) -> bytearray:
    """Join records encoded with offset deltas 0, 1, 2, ... into a batch, which takes as many
    offsets as it has records, or `offset_count`. With a `record_count`, `encoded` are pieces of so
    many records."""
    attributes = int(codec) | timestamp_type << 3
    attributes |= TRANSACTIONAL if transactional else 0
    attributes |= CONTROL if control else 0
    if codec is Codec.NONE:
        batch = bytearray().join((bytes(HEADER_SIZE), *encoded))
    else:
        batch = bytearray(HEADER_SIZE)
        batch += compress(codec, b"".join(encoded), level)
    count = len(encoded) if record_count is None else record_count
    _CHECKED_HEADER.pack_into(
        batch,
        _CHECKED_POSITION,
        attributes,
        (count if offset_count is None else offset_count) - 1,
        base_timestamp,
        max_timestamp,
        producer_id,
        producer_epoch,
        base_sequence,
        count,
    )
    _OFFSET_AND_LENGTH.pack_into(batch, 0, base_offset, len(batch) - LENGTH_OVERHEAD)
    _EPOCH.pack_into(batch, _EPOCH_POSITION, leader_epoch)
    batch[_MAGIC_POSITION] = MAGIC
    with memoryview(batch) as view, view[_CHECKED_POSITION:] as checked:
        _CRC.pack_into(batch, _CRC_POSITION, crc32c(checked))
    return batch


def empty_batch(start: int, end: int, leader_epoch: int) -> bytes:
    """A batch without records that takes the offsets `[start, end)`."""
    batch = assemble_batch(
        (),
        base_timestamp=NO_TIMESTAMP,
        max_timestamp=NO_TIMESTAMP,
        base_offset=start,
        leader_epoch=leader_epoch,
        offset_count=end - start,
    )
    return bytes(batch)


def build_marker(
    marker: Marker,
    *,
    producer_id: int,
    producer_epoch: int,
    timestamp: int,
    base_offset: int = 0,
    leader_epoch: int = 0,
) -> bytearray:
    """The control batch that ends a producer's transaction, byte for byte as Kafka's."""
    key = _MARKER_KEY.pack(_MARKER_VERSION, _COMMIT if marker.is_commit else _ABORT)
    return build_batch(
        [NewRecord(key, _MARKER_VALUE.pack(_MARKER_VERSION, marker.coordinator_epoch))],
        timestamp=timestamp,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        transactional=True,
        control=True,
        base_offset=base_offset,
        leader_epoch=leader_epoch,
    )


def parse_marker(batch: Buffer) -> Marker:
    """The marker in a control batch whose CRC the caller has checked or trusts. As in Kafka, a
    later version of key or value may be longer.

    Raises:
        CorruptBatchError: it ends no transaction.
    """
    records = list(read_records(batch))
    try:
        version, kind = _MARKER_KEY.unpack_from(records[0].key or b"")
        _, coordinator_epoch = _MARKER_VALUE.unpack_from(records[0].value or b"")
    except (IndexError, struct.error) as error:
        raise CorruptBatchError("a control batch without a whole marker") from error
    if version < _MARKER_VERSION or kind not in (_ABORT, _COMMIT):
        raise CorruptBatchError(f"a control batch of kind {kind}, version {version}")
    return Marker(kind == _COMMIT, coordinator_epoch)


def read_records(batch: Buffer, *, output_max: int = OUTPUT_MAX) -> Iterator[Record]:
    """Yield the records of one batch, whose CRC the caller has checked or trusts.

    Raises:
        CorruptBatchError: the records break their format, or decompress beyond `output_max`.
    """
    header = parse_header(batch)
    base_offset, base_timestamp = header.base_offset, header.base_timestamp
    timestamp_type, leader_epoch = header.timestamp_type, header.leader_epoch
    for offset_delta, timestamp_delta, key, value, headers in _walk(header, batch, output_max):
        timestamp = base_timestamp + timestamp_delta
        yield Record(
            base_offset + offset_delta,
            header.max_timestamp if timestamp_type else timestamp,
            key,
            value,
            headers,
            timestamp_type,
            leader_epoch,
        )


def validate_records(batch: Buffer, *, output_max: int = OUTPUT_MAX) -> BatchHeader:
    """Check the records too: format, count, offset deltas 0, 1, 2, ..., greatest timestamp.

    Raises:
        CorruptBatchError: the bytes break the format.
        InvalidRecordError: they are sound but numbered or timed otherwise than the header says.
    """
    header = check_batch(batch)
    greatest = NO_TIMESTAMP
    for expected, fields in enumerate(_walk(header, batch, output_max)):
        offset_delta, timestamp_delta = fields[:2]
        if offset_delta != expected:
            raise InvalidRecordError(f"offset delta {offset_delta} where {expected} belongs")
        greatest = max(greatest, header.base_timestamp + timestamp_delta)
    if header.timestamp_type == CREATE_TIME and greatest != header.max_timestamp:
        raise InvalidRecordError(f"greatest timestamp {greatest}, said {header.max_timestamp}")
    return header


def find_timestamp(
    batch: Buffer, timestamp: int, *, output_max: int = OUTPUT_MAX
) -> tuple[int, int] | None:
    """The timestamp and offset of the first record at or after `timestamp`."""
    for record in read_records(batch, output_max=output_max):
        if record.timestamp >= timestamp:
            return record.timestamp, record.offset
    return None


_Fields = tuple[int, int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]


def _walk(header: BatchHeader, batch: Buffer, output_max: int) -> Iterator[_Fields]:
    """Yield (offset delta, timestamp delta, key, value, headers) of each record."""
    view = memoryview(batch)[HEADER_SIZE : header.size]
    data = bytes(decompress(header.codec, view, output_max=output_max))
    position = 0
    last_delta = -1
    for _ in range(header.record_count):
        size, position = read_varint(data, position)
        end = position + size
        if size < 0 or end > len(data):
            raise CorruptBatchError("record longer than its batch")
        position += 1  # attributes, unused
        timestamp_delta, position = read_varint(data, position)
        offset_delta, position = read_varint(data, position)
        if not last_delta < offset_delta <= header.last_offset_delta:
            raise CorruptBatchError(f"offset delta {offset_delta} after {last_delta}")
        last_delta = offset_delta
        key, position = read_bytes(data, position, end)
        value, position = read_bytes(data, position, end)
        count, position = read_varint(data, position)
        headers: tuple[tuple[str, bytes | None], ...] = ()
        if count:
            headers, position = read_headers(data, position, end, count)
        if position != end:
            raise CorruptBatchError("record shorter or longer than it says")
        yield offset_delta, timestamp_delta, key, value, headers
    if position != len(data):
        raise CorruptBatchError("bytes after the last record")


def read_bytes(data: bytes, position: int, end: int) -> tuple[bytes | None, int]:
    """Read a key, a value or part of a header of a record that ends at `end`; returns it and the
    position after.

    Raises:
        CorruptBatchError: it breaks the format.
    """
    size, position = read_varint(data, position)
    if size < 0:
        if size != -1:
            raise CorruptBatchError(f"length {size}")
        return None, position
    after = position + size
    if after > end:
        raise CorruptBatchError("field longer than its record")
    return data[position:after], after


def read_headers(
    data: bytes, position: int, end: int, count: int
) -> tuple[tuple[tuple[str, bytes | None], ...], int]:
    """Read `count` headers of a record that ends at `end`; returns them and the position after.

    Raises:
        CorruptBatchError: they break the format.
    """
    if not 0 <= count <= end - position:
        raise CorruptBatchError(f"{count} record headers")
    headers: list[tuple[str, bytes | None]] = []
    for _ in range(count):
        name, position = read_bytes(data, position, end)
        if name is None:
            raise CorruptBatchError("record header without a name")
        content, position = read_bytes(data, position, end)
        try:
            headers.append((name.decode(), content))
        except UnicodeDecodeError as error:
            raise CorruptBatchError("record header's name is not UTF-8") from error
    return tuple(headers), position
