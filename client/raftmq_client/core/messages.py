"""A record as consumers get it, and how a batch becomes many of them quickly.

Records of one shape that follow each other (fields of the same lengths) are read as columns: every
byte that a record of that shape has in common with the first is compared, and its fields are cut,
by a few calls for all of them. Other records are read one by one. Whatever is not plainly sound is
read again by `raftmq.records`, which says what is wrong with it; both give the same records.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import chain, repeat
from struct import Struct
from typing import Any, Final, Generic

import msgspec
from attrs import frozen

from raftmq.codec import OUTPUT_MAX, decompress
from raftmq.errors import CorruptBatchError
from raftmq.records import HEADER_SIZE, BatchHeader, read_headers, read_records, read_varint
from raftmq.types import Buffer
from raftmq_client.serializers import K, V


class ConsumerRecord(msgspec.Struct, Generic[K, V], frozen=True, gc=False):
    """A record and where it was read.

    The garbage collector does not look at them: what was read can be part of no cycle, and
    thousands of them at once would have it walk over all objects of the process again and again.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: K | None
    """What the deserializer made of it, else bytes; None where there is none."""
    value: V | None
    """As the key; None is a tombstone."""
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp_type: int
    """0: the producer's clock (CreateTime), 1: the broker's (LogAppendTime)."""
    leader_epoch: int
    sizes: tuple[int, int] | None = None
    """Of key and value as they came, where a deserializer replaced them."""

    @property
    def key_size(self) -> int:
        """Bytes of the key as it came; -1 without one."""
        if self.sizes is not None:
            return self.sizes[0]
        return -1 if self.key is None else len(self.key)  # type: ignore[arg-type]  # bytes

    @property
    def value_size(self) -> int:
        """Bytes of the value as it came; -1 without one."""
        if self.sizes is not None:
            return self.sizes[1]
        return -1 if self.value is None else len(self.value)  # type: ignore[arg-type]  # bytes


class DecodedRecord(ConsumerRecord[K, V], frozen=True, gc=True):
    """One whose key or value a deserializer made: that may refer to anything, the record too."""

    raw: tuple[bytes | None, bytes | None] = (None, None)
    """Key and value as they came."""


def decoded(record: ConsumerRecord, key: Any, value: Any) -> ConsumerRecord:
    """The same record with what deserializers made of its key and value."""
    return DecodedRecord(
        record.topic,
        record.partition,
        record.offset,
        record.timestamp,
        key,
        value,
        record.headers,
        record.timestamp_type,
        record.leader_epoch,
        (record.key_size, record.value_size),
        (record.key, record.value),
    )


_RUN_MIN: Final = 8
"""Fewer records of one shape are not worth columns."""
_SINGLES: Final = 32
"""So many are read one by one after a shape that did not last."""
_ONE_BYTE: Final = 64
_TWO_BYTES: Final = 8192
"""Offset deltas below these take one byte, and two."""
_ONES: Final = bytes(2 * delta for delta in range(_ONE_BYTE))
_LOWS: Final = bytes(2 * delta & 0x7F | 0x80 for delta in range(_TWO_BYTES))
_HIGHS: Final = bytes(delta >> 6 for delta in range(_TWO_BYTES))
_SIGNED: Final = tuple(byte >> 1 ^ -(byte & 1) for byte in range(128))
_LAST: Final = bytes(range(128))
_CONTINUED: Final = bytes(range(128, 256))


class _NotPlainError(Exception):
    """The quick way does not know what to make of a record."""


def read_messages(
    header: BatchHeader,
    batch: Buffer,
    topic: str,
    partition: int,
    start: int = 0,
    *,
    output_max: int = OUTPUT_MAX,
) -> list[ConsumerRecord]:
    """The records of one batch, whose CRC was checked, from offset `start` on.

    Raises:
        CorruptBatchError: the records break their format, or decompress beyond `output_max`.
    """
    view = memoryview(batch)[HEADER_SIZE : header.size]
    data = memoryview(decompress(header.codec, view, output_max=output_max))
    try:
        found = _Reader(header, data, topic, partition).read()
    except (_NotPlainError, IndexError, CorruptBatchError):
        records = read_records(batch, output_max=output_max)
        found = [ConsumerRecord(topic, partition, *record) for record in records]
    if start > header.base_offset:
        return [message for message in found if message.offset >= start]
    return found


@frozen
class _Shape:
    """Where a record has its fields. Positions count from its first byte."""

    size: int
    stamp_at: int
    delta_at: int
    delta_width: int
    common: tuple[int, ...]
    """The bytes that say lengths, attributes and the number of headers."""
    has_key: bool
    has_value: bool
    fields: Struct


class _Reader:
    """Walks over the records of one batch."""

    def __init__(self, header: BatchHeader, data: memoryview, topic: str, partition: int) -> None:
        self._header = header
        self._data = data
        self._topic = topic
        self._partition = partition
        self._found: list[ConsumerRecord] = []

    def read(self) -> list[ConsumerRecord]:
        """All of them.

        Raises:
            IndexError: the bytes end too soon.
            CorruptBatchError: a number has no end.
            _NotPlainError: something is unusual, or wrong.
        """
        count = self._header.record_count
        data: bytes | None = None
        position = 0
        while len(self._found) < count:
            index = len(self._found)
            position = self._read_columns(index, position)
            if len(self._found) == index:
                data = bytes(self._data) if data is None else data
                position = self._read_singles(data, min(_SINGLES, count - index), position)
        if position != len(self._data):
            raise _NotPlainError
        return self._found

    def _read_columns(self, index: int, position: int) -> int:
        """Read the records that have the shape of the one at `position`, if they are many."""
        shape = _shape_at(self._data, position, index)
        if shape is None:
            return position
        size = shape.size
        limit = _ONE_BYTE if shape.delta_width == 1 else _TWO_BYTES
        count = min(self._header.record_count, limit) - index
        count = min(count, (len(self._data) - position) // size)
        first = self._data[position : position + size]
        view = self._data[position : position + count * size]
        for at in shape.common:
            column = view[at::size].tobytes()
            count = min(count, len(column) - len(column.lstrip(first[at : at + 1])))
        deltas = [(at, first[at]) for at in range(shape.stamp_at, shape.delta_at)]
        for at, byte in deltas:
            column = view[at::size].tobytes()
            known = _LAST if byte < 128 else _CONTINUED
            if not (byte < 128 and column.isascii()):
                count = min(count, len(column) - len(column.lstrip(known)))
        if count < _RUN_MIN or not _counts(view[: count * size], shape, index, count):
            return position
        self._add(shape, view[: count * size], index, count)
        return position + count * size

    def _add(self, shape: _Shape, view: memoryview, index: int, count: int) -> None:
        header = self._header
        first = header.base_offset + index
        fields = shape.fields.iter_unpack(view)
        keys: Iterable[Any] = repeat(None)
        values: Iterable[Any] = repeat(None)
        if shape.has_key and shape.has_value:
            keys, values = zip(*fields, strict=True)
        elif shape.has_key:
            keys = chain.from_iterable(fields)
        elif shape.has_value:
            values = chain.from_iterable(fields)
        columns = (
            repeat(self._topic),
            repeat(self._partition),
            range(first, first + count),
            self._stamps(shape, view),
            keys,
            values,
            repeat(()),
            repeat(header.timestamp_type),
            repeat(header.leader_epoch),
            repeat(None),
        )
        self._found.extend(map(ConsumerRecord, *columns))

    def _stamps(self, shape: _Shape, view: memoryview) -> Iterable[int]:
        header = self._header
        if header.timestamp_type:
            return repeat(header.max_timestamp)
        base, size = header.base_timestamp, shape.size
        low = view[shape.stamp_at :: size].tobytes()
        if shape.delta_at - shape.stamp_at == 1:
            if low.count(low[:1]) == len(low):
                return repeat(base + _SIGNED[low[0]])
            return [base + _SIGNED[byte] for byte in low]
        high = view[shape.stamp_at + 1 :: size].tobytes()
        numbers = [a & 0x7F | b << 7 for a, b in zip(low, high, strict=True)]
        return [base + (number >> 1 ^ -(number & 1)) for number in numbers]

    def _read_singles(self, data: bytes, count: int, position: int) -> int:
        """Read so many records one by one; every number of one or two bytes without a call."""
        header, topic, partition = self._header, self._topic, self._partition
        base_offset, base_timestamp = header.base_offset, header.base_timestamp
        kind, epoch = header.timestamp_type, header.leader_epoch
        append = self._found.append
        last = self._found[-1].offset - base_offset if self._found else -1
        for _ in range(count):
            size = data[position]
            position += 1
            if size > 127:
                size, position = _go_on(data, position, size)
            end = position + (size >> 1)
            stamp = data[position + 1]
            position += 2  # attributes stand before it, unused
            if stamp > 127:
                stamp, position = _go_on(data, position, stamp)
            delta = data[position]
            position += 1
            if delta > 127:
                delta, position = _go_on(data, position, delta)
            if size & 1 or delta & 1 or not last < delta >> 1 <= header.last_offset_delta:
                raise _NotPlainError
            last = delta >> 1
            length = data[position]
            position += 1
            if length > 127:
                length, position = _go_on(data, position, length)
            key = None
            if not length & 1:
                key = data[position : position + (length >> 1)]
                position += length >> 1
            elif length != 1:
                raise _NotPlainError
            length = data[position]
            position += 1
            if length > 127:
                length, position = _go_on(data, position, length)
            value = None
            if not length & 1:
                value = data[position : position + (length >> 1)]
                position += length >> 1
            elif length != 1:
                raise _NotPlainError
            more = data[position]
            position += 1
            headers: tuple[tuple[str, bytes | None], ...] = ()
            if more:
                many, position = read_varint(data, position - 1)
                headers, position = read_headers(data, position, end, many)
            if position != end:
                raise _NotPlainError
            time = header.max_timestamp if kind else base_timestamp + (stamp >> 1 ^ -(stamp & 1))
            offset = base_offset + last
            append(ConsumerRecord(topic, partition, offset, time, key, value, headers, kind, epoch))
        return position


def _go_on(data: bytes, position: int, byte: int) -> tuple[int, int]:
    """The rest of an unsigned number whose first byte was `byte`, and the position after it."""
    second = data[position]
    if second < 128:
        return byte & 0x7F | second << 7, position + 1
    number, position = read_varint(data, position - 1)
    return number << 1 if number >= 0 else (-number << 1) - 1, position


def _shape_at(data: memoryview, position: int, index: int) -> _Shape | None:
    """The shape of a record; None if columns are not made for it, or it is not record `index`."""
    size, at = read_varint(data, position)
    end = at + size
    stamp_at = at + 1
    _, delta_at = read_varint(data, stamp_at)
    delta, at = read_varint(data, delta_at)
    width = 1 if delta < _ONE_BYTE else 2
    if delta != index or at - delta_at != width or delta_at - stamp_at > 2:
        return None
    key_size, key_at = read_varint(data, at)
    at = key_at + max(0, key_size)
    value_size, value_at = read_varint(data, at)
    at = value_at + max(0, value_size)
    if size < 0 or key_size < -1 or value_size < -1 or data[at] or at + 1 != end:
        return None
    return _shape(
        stamp_at - position,
        delta_at - position,
        key_at - position,
        key_size,
        value_at - position,
        value_size,
        delta_at + width - position,
    )


@lru_cache(maxsize=256)
def _shape(
    stamp_at: int,
    delta_at: int,
    key_at: int,
    key_size: int,
    value_at: int,
    value_size: int,
    delta_end: int,
) -> _Shape:
    key_end = key_at + max(0, key_size)
    value_end = value_at + max(0, value_size)
    size = value_end + 1
    fields = f"{key_at}x"
    fields += f"{key_size}s" if key_size >= 0 else ""
    fields += f"{value_at - key_end}x"
    fields += f"{value_size}s" if value_size >= 0 else ""
    return _Shape(
        size=size,
        stamp_at=stamp_at,
        delta_at=delta_at,
        delta_width=delta_end - delta_at,
        common=(
            *range(stamp_at),
            *range(delta_end, key_at),
            *range(key_end, value_at),
            value_end,
        ),
        has_key=key_size >= 0,
        has_value=value_size >= 0,
        fields=Struct(f"{fields}1x"),
    )


def _counts(view: memoryview, shape: _Shape, index: int, count: int) -> bool:
    """True when the offset deltas are `index` and those that follow it."""
    low = view[shape.delta_at :: shape.size].tobytes()
    if shape.delta_width == 1:
        return low == _ONES[index : index + count]
    high = view[shape.delta_at + 1 :: shape.size].tobytes()
    return low == _LOWS[index : index + count] and high == _HIGHS[index : index + count]
