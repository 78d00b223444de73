"""Which records of a batch match a condition, and a batch of those alone.

A batch is opened and its records are walked, but only keys and headers are looked at. What costs
time is the interpreter, so records are spared it, in this order:

- A batch in which none of the byte strings is found that a match must have holds no match.
- Records of one length mostly have their fields in the same places (as in `record_walk.py`): their
  headers are cut out by one call for all of them.
- Equal headers have the same verdict: each different piece of bytes is judged once. What was found
  stays with the condition, in a table of bounded size.

Nothing is believed that was not read: places are taken over from one record to the next only where
all bytes that say so are the same.

Invariant: a batch of kept records has the bytes of these records as they were.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

from attrs import frozen

from raftmq.codec import OUTPUT_MAX, decompress
from raftmq.errors import CorruptBatchError
from raftmq.record_walk import equal_lengths, read_code
from raftmq.records import (
    HEADER_SIZE,
    NO_TIMESTAMP,
    TIMESTAMP_MAX,
    BatchHeader,
    assemble_batch,
    parse_header,
    read_varint,
)
from raftmq.types import Buffer, Offset
from raftmq.views.conditions import Condition

_VERDICTS_MAX: Final = 2048
_SUBJECT_MAX: Final = 256  # bytes; what is longer is judged each time
_RUN_PATIENCE_MAX: Final = 64  # most records walked one by one before the next run is looked for
_RUN_MIN: Final = 8
_LOW: Final = bytes(range(0x80))
_HIGH: Final = bytes(range(0x80, 0x100))

_Subject: TypeAlias = tuple[bytes | None, bytes]
"""Key, and the bytes of the headers from their count on; None and empty where nobody reads them."""


class Kind(IntEnum):
    """How much of a batch matches."""

    NONE = 0
    WHOLE = 1
    MIXED = 2


@frozen(slots=True)
class Judged:
    """What a condition says of a batch.

    Attributes:
        last_match: the offset of the last record that matches, -1 where none does.
        count: how many do.
    """

    kind: Kind
    last_match: Offset
    count: int


NOTHING: Final = Judged(Kind.NONE, Offset(-1), 0)


def judge(batch: Buffer, condition: Condition) -> Judged:
    """How much of a batch matches. The caller has checked its CRC or trusts it; control batches
    match nothing.

    Raises:
        KafkaError: it cannot be opened, or what is read of its records breaks their format. Of what
            is not refused, `keep_matches` refuses nothing.
    """
    header = parse_header(batch)
    if header.is_control or header.record_count <= 0:
        return NOTHING
    data = _open(batch, header)
    if not _may_match(data, condition):
        return NOTHING
    walk = _walked(data, header, condition)
    if not walk.count:
        return NOTHING
    if walk.count == header.record_count:
        last_delta = _fields(data, walk.last_at, header)[1]
        return Judged(Kind.WHOLE, Offset(header.base_offset + last_delta), walk.count)
    _, last_delta = _span(data, header, walk.kept)  # what is taken here, `keep_matches` takes
    return Judged(Kind.MIXED, Offset(header.base_offset + last_delta), walk.count)


def keep_matches(batch: Buffer, condition: Condition) -> bytearray:
    """A batch of those records that match, of which there is at least one: at their offsets, with
    their timestamps, under the same codec and by the same producer. It ends with the last of them.

    Raises:
        KafkaError: as `judge`.
    """
    header = parse_header(batch)
    data = _open(batch, header)
    walk = _walked(data, header, condition)
    assert walk.count, "a batch without a match has no place in a view"
    assert not header.is_control, "nor has a marker"
    if walk.count == header.record_count:
        return bytearray(batch)
    greatest, last_delta = _span(data, header, walk.kept)
    return assemble_batch(
        [data[start:end] for start, end in walk.kept],
        codec=header.codec,
        timestamp_type=header.timestamp_type,
        base_timestamp=header.base_timestamp,
        max_timestamp=header.max_timestamp if header.timestamp_type else greatest,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
        transactional=header.is_transactional,
        base_offset=header.base_offset,
        leader_epoch=header.leader_epoch,
        offset_count=last_delta + 1,
        record_count=walk.count,
    )


def _open(batch: Buffer, header: BatchHeader) -> bytes:
    if header.size > len(batch):
        raise CorruptBatchError("shorter than it says")
    records = memoryview(batch)[HEADER_SIZE : header.size]
    return bytes(decompress(header.codec, records, output_max=OUTPUT_MAX))


def _may_match(data: bytes, condition: Condition) -> bool:
    """False where none of some needles is there that each match has."""
    return all(any(needle in data for needle in group) for group in condition.needles)


def _fields(data: bytes, position: int, header: BatchHeader) -> tuple[int, int, int]:
    """Timestamp and offset delta of the record at `position`, and the position after it."""
    size, position = read_varint(data, position)
    end = position + size
    time, position = read_varint(data, position + 1)
    delta, position = read_varint(data, position)
    if not 0 <= delta <= header.last_offset_delta:
        raise CorruptBatchError(f"offset delta {delta} of {header.last_offset_delta}")
    return header.base_timestamp + time, delta, end


def _span(data: bytes, header: BatchHeader, kept: list[tuple[int, int]]) -> tuple[int, int]:
    """The greatest timestamp and the last offset delta of records in these stretches of bytes.

    Raises:
        CorruptBatchError: offset deltas do not rise, or a number breaks its format.
    """
    greatest, last_delta = NO_TIMESTAMP, -1
    for position, end in kept:
        while position < end:
            timestamp, delta, position = _fields(data, position, header)
            if delta <= last_delta:
                raise CorruptBatchError(f"offset delta {delta} after {last_delta}")
            greatest, last_delta = max(greatest, timestamp), delta
    return min(greatest, TIMESTAMP_MAX), last_delta


def _walked(data: bytes, header: BatchHeader, condition: Condition) -> _Walk:
    count = header.record_count
    walk = _Walk(data, condition)
    try:
        end = walk.go(count)
    except IndexError:
        raise CorruptBatchError("the records end inside of one") from None
    if end != len(data):
        raise CorruptBatchError("the records are shorter or longer than their batch")
    return walk


class _Walk:
    """Judges the records of one batch.

    Attributes:
        count: how many match.
        last_at: where the last one begins that does.
        kept: stretches of bytes of matching records, which do not touch.
    """

    __slots__ = ("_condition", "_data", "_reads_headers", "_reads_key", "count", "kept", "last_at")

    def __init__(self, data: bytes, condition: Condition) -> None:
        self._data = data
        self._condition = condition
        self._reads_key = condition.reads_key
        self._reads_headers = condition.reads_headers
        self.count = 0
        self.last_at = -1
        self.kept: list[tuple[int, int]] = []

    def go(self, count: int) -> int:
        """Walk so many records; the position after them.

        Raises:
            KafkaError: they break their format.
            IndexError: the bytes end.
        """
        position = index = 0
        patience = _RUN_MIN
        while index < count:
            run = self._run(position, count - index)
            if run is not None:
                index += run[0]
                position = run[1]
                patience = _RUN_MIN
                continue
            after = min(count, index + patience)
            position = self._each(position, after - index)
            index = after
            patience = min(2 * patience, _RUN_PATIENCE_MAX)
        return position

    def _each(self, position: int, count: int) -> int:
        """Judge `count` records one by one; the position after them."""
        data, total = self._data, len(self._data)
        verdicts = self._condition.verdicts
        reads_key, reads_headers = self._reads_key, self._reads_headers
        key: bytes | None = None
        block = b""
        for _ in range(count):
            start = position
            size = data[position]
            position += 1
            if size >= 0x80:
                size, position = read_code(data, start)
            end = position + (size >> 1)
            if size & 1 or end > total:
                raise CorruptBatchError("a record that is longer than its batch")
            position += 1  # its attributes
            while data[position] >= 0x80:  # its timestamp delta
                position += 1
            position += 1
            while data[position] >= 0x80:  # its offset delta
                position += 1
            size = data[position + 1]
            position += 2
            if size >= 0x80:
                size, position = read_code(data, position - 1)
            if reads_key:
                key = None if size & 1 else data[position : position + (size >> 1)]
            if not size & 1:
                position += size >> 1
            if reads_headers:
                size = data[position]
                position += 1
                if size >= 0x80:
                    size, position = read_code(data, position - 1)
                if not size & 1:
                    position += size >> 1
                block = data[position:end]
            if position >= end:
                raise CorruptBatchError("a record that is longer than it says")
            verdict = verdicts.get((key, block))
            if verdict is None:
                verdict = self._judge(key, block)
            position = end
            if verdict:
                self._keep(start, start, end, 1)
        return position

    def _judge(self, key: bytes | None, block: bytes) -> bool:
        """The verdict on a key and the bytes of headers, which is remembered."""
        if not self._reads_headers:
            verdict = self._condition.matches(key, ())
        elif self._lacks_needles(key, block):
            verdict = False
        else:
            verdict = self._condition.matches(key, _headers(block))
        if len(block) + len(key or b"") <= _SUBJECT_MAX:
            verdicts = self._condition.verdicts
            if len(verdicts) >= _VERDICTS_MAX:
                verdicts.clear()
            verdicts[key, block] = verdict
        return verdict

    def _lacks_needles(self, key: bytes | None, block: bytes) -> bool:
        """True where something is not there that a match must have: to look for it costs less than
        to take headers apart."""
        for group in self._condition.needles:
            for needle in group:
                if needle in block or (key is not None and needle in key):
                    break
            else:
                return True
        return False

    def _keep(self, start: int, last_at: int, end: int, count: int) -> None:
        kept = self.kept
        if kept and kept[-1][1] == start:
            kept[-1] = (kept[-1][0], end)
        else:
            kept.append((start, end))
        self.count += count
        self.last_at = last_at

    # ---- runs ----

    def _run(self, start: int, left: int) -> tuple[int, int] | None:
        """Judge the records from `start` on that have their fields in the same places; how many
        they are, and the position after them. None where they are too few."""
        data = self._data
        count, width, head = equal_lengths(data, start, left)
        if not count:
            return None
        places = _places(data, start + head)
        if places.headers_at >= start + width:
            return None  # not sound: walked alone it shows where
        for at in places.constant:
            column = data[at : start + count * width : width]
            count = len(column) - len(column.lstrip(column[:1]))
        for at, alike in places.alike:
            column = data[at : start + count * width : width]
            if column.translate(None, alike):
                count = len(column) - len(column.lstrip(alike))
        if count < _RUN_MIN:
            return None
        end = start + count * width
        subjects = self._subjects(data[start:end], start, width, places)
        verdicts = self._condition.verdicts
        try:
            flags = bytes(map(verdicts.__getitem__, subjects))
        except KeyError:
            flags = bytes([self._verdict(subject) for subject in subjects])
        at = flags.find(1)
        while at >= 0:
            stop = flags.find(0, at)
            stop = count if stop < 0 else stop
            last_at = start + (stop - 1) * width
            self._keep(start + at * width, last_at, last_at + width, stop - at)
            at = flags.find(1, stop)
        return count, end

    def _verdict(self, subject: _Subject) -> bool:
        verdict = self._condition.verdicts.get(subject)
        return self._judge(*subject) if verdict is None else verdict

    def _subjects(self, run: bytes, start: int, width: int, places: _Places) -> list[_Subject]:
        """What is to be judged of each record of a run, whose first begins at `start`."""
        headers_at = places.headers_at - start
        if not self._reads_key:
            form = _form(f"{headers_at}x{width - headers_at}s")
            return [(None, block) for (block,) in form.iter_unpack(run)]
        key_at, key_size = places.key_at - start, places.key_size
        if key_size < 0:
            form = _form(f"{headers_at}x{width - headers_at}s")
            found: list[_Subject] = [(None, block) for (block,) in form.iter_unpack(run)]
        else:
            after = headers_at - key_at - key_size
            form = _form(f"{key_at}x{key_size}s{after}x{width - headers_at}s")
            found = list(form.iter_unpack(run))
        return found if self._reads_headers else [(key, b"") for key, _ in found]


class _Places(NamedTuple):
    """Where the first record of a run has its fields.

    Attributes:
        constant: positions of the lengths' bytes, the same in all records of a run.
        alike: positions of bytes that may differ, and the bytes that may stand there.
        key_size: -1 for no key.
    """

    constant: list[int]
    alike: list[tuple[int, bytes]]
    key_at: int
    key_size: int
    headers_at: int


def _places(data: bytes, position: int) -> _Places:
    """Those of the record whose body begins there; they are sound where its headers begin inside
    of it."""
    _, delta_at = read_code(data, position + 1, 10)
    _, size_at = read_code(data, delta_at)
    alike = [
        (at, _LOW if at in (delta_at - 1, size_at - 1) else _HIGH)
        for at in range(position + 1, size_at)
    ]
    code, key_at = read_code(data, size_at)
    key_size = -1 if code & 1 else code >> 1
    value_at = key_at + max(key_size, 0)
    constant = list(range(size_at, key_at))
    code, after = read_code(data, value_at)
    constant += range(value_at, after)
    return _Places(constant, alike, key_at, key_size, after if code & 1 else after + (code >> 1))


@lru_cache(256)
def _form(layout: str) -> struct.Struct:
    return struct.Struct(layout)


def _headers(block: bytes) -> list[tuple[bytes, bytes | None]]:
    """The headers of a record, from the bytes of all of them.

    Raises:
        KafkaError: they break the format.
        IndexError: the bytes end.
    """
    code, position = read_code(block, 0)
    headers: list[tuple[bytes, bytes | None]] = []
    for _ in range(code >> 1):
        size = block[position]
        position += 1
        if size >= 0x80:
            size, position = read_code(block, position - 1)
        if size & 1:
            raise CorruptBatchError("a record header without a name")
        name = block[position : position + (size >> 1)]
        position += size >> 1
        size = block[position]
        position += 1
        if size >= 0x80:
            size, position = read_code(block, position - 1)
        value = None
        if not size & 1:
            value = block[position : position + (size >> 1)]
            position += size >> 1
        headers.append((name, value))
    if position != len(block) or code & 1:
        raise CorruptBatchError("a record that is shorter or longer than it says")
    return headers
