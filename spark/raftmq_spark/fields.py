"""Where the fields of many records lie, found by numpy over several batches at once.

Every position and size is checked against its record's end, and every record's end against its
batch's, before anything is read there; what is wrong is a `CorruptBatchError` or an `IndexError`
(a position past the last byte), never a wrong row. Positions count from the start of all payloads.

record => length varint, attributes int8, timestamp_delta varlong, offset_delta varint,
          key_length varint (-1: null), key, value_length varint, value,
          header_count varint, header => key_length varint, key, value_length varint, value
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from raftmq.errors import CorruptBatchError
from raftmq.records import BatchHeader, read_varint

Ints: TypeAlias = npt.NDArray[np.int64]
Octets: TypeAlias = npt.NDArray[np.uint8]

_RUN_MIN: Final = 32
_ROWS_MIN: Final = 64
"""Below so many records with headers left, a numpy pass costs more than reading one by one."""
_VARINT_BITS_MAX: Final = 63
_TIMESTAMP_MAX: Final = 1 << 62
_CUT: Final = (
    "ends",
    "key_starts",
    "key_sizes",
    "value_starts",
    "value_sizes",
    "header_starts",
    "header_counts",
    "offsets",
    "timestamps",
    "timestamp_types",
)


class Fields:
    """The fields of all records, one row each."""

    def __init__(
        self, data: bytes, headers: Sequence[BatchHeader], payload_sizes: Sequence[int]
    ) -> None:
        octets = np.frombuffer(data, np.uint8)
        starts = find_records(data, octets, headers, payload_sizes)
        sizes, bodies = read_varints(octets, starts)
        ends = bodies + sizes
        _check(sizes >= 0, "negative record length")
        time_deltas, position = read_varints(octets, bodies + 1)
        offset_deltas, position = read_varints(octets, position)
        key_sizes, key_starts = read_varints(octets, position)
        position = _skip(key_starts, key_sizes, ends - 1, "key")
        value_sizes, value_starts = read_varints(octets, position)
        position = _skip(value_starts, value_sizes, ends - 1, "value")
        header_counts, header_starts = read_varints(octets, position)
        left = ends - header_starts
        _check((header_counts >= 0) & (header_counts <= left // 2), "wrong count of headers")
        _check((header_counts > 0) | (left == 0), "record shorter or longer than it says")
        self.data = data
        self.octets = octets
        self.ends = ends
        self.key_starts, self.key_sizes = key_starts, key_sizes
        self.value_starts, self.value_sizes = value_starts, value_sizes
        self.header_starts, self.header_counts = header_starts, header_counts
        self._number(headers, offset_deltas, time_deltas)

    def _number(
        self, headers: Sequence[BatchHeader], offset_deltas: Ints, time_deltas: Ints
    ) -> None:
        """Offsets and times, of what the batches and the records say."""
        counts = [header.record_count for header in headers]
        last_deltas = _spread([header.last_offset_delta for header in headers], counts)
        _check((offset_deltas >= 0) & (offset_deltas <= last_deltas), "wrong offset delta")
        self.offsets = _spread([header.base_offset for header in headers], counts) + offset_deltas
        _check(np.diff(self.offsets) > 0, "offsets do not rise")
        types = _spread([header.timestamp_type for header in headers], counts)
        times = _spread([header.base_timestamp for header in headers], counts)
        fits = (np.abs(times) < _TIMESTAMP_MAX) & (np.abs(time_deltas) < _TIMESTAMP_MAX)
        _check(fits, "timestamp of more than 62 bits")
        times = times + time_deltas
        if types.any():  # the broker's clock: one time for the whole batch
            broker_times = _spread([header.max_timestamp for header in headers], counts)
            times = np.where(types > 0, broker_times, times)
        self.timestamps = times
        self.timestamp_types = types.astype(np.int32)

    @property
    def count(self) -> int:
        """Records."""
        return len(self.offsets)

    def cut(self, start: int, end: int) -> None:
        """Keep the records with offsets in `[start, end)`."""
        first, last = (int(row) for row in np.searchsorted(self.offsets, (start, end)))
        if (first, last) == (0, self.count):
            return
        for name in _CUT:
            setattr(self, name, getattr(self, name)[first:last])


class HeaderFields:
    """The record headers of all records, one row for each header."""

    def __init__(self, fields: Fields) -> None:
        octets = fields.octets
        counts = fields.header_counts
        self.edges = np.zeros(fields.count + 1, np.int32)
        np.cumsum(counts, out=self.edges[1:])
        total = int(self.edges[-1])
        self.name_starts, self.name_sizes, self.value_starts, self.value_sizes = (
            np.empty(total, np.int64) for _ in range(4)
        )
        rows = np.flatnonzero(counts)
        slots = self.edges[:-1][rows].astype(np.int64)
        left, ends, position = counts[rows], fields.ends[rows], fields.header_starts[rows]
        while len(left) >= _ROWS_MIN:  # the next header of every record that has one more
            sizes, starts = read_varints(octets, position)
            _check(sizes >= 0, "record header without a name")
            position = _skip(starts, sizes, ends - 1, "record header")
            self.name_starts[slots], self.name_sizes[slots] = starts, sizes
            sizes, starts = read_varints(octets, position)
            position = _skip(starts, sizes, ends, "record header")
            self.value_starts[slots], self.value_sizes[slots] = starts, sizes
            left = left - 1
            goes_on = left > 0
            _check(goes_on | (position == ends), "record shorter or longer than it says")
            slots, left = slots[goes_on] + 1, left[goes_on]
            ends, position = ends[goes_on], position[goes_on]
        # One record may have as many headers as there are bytes: a pass for each would take hours.
        for row in range(len(left)):
            at = (int(slots[row]), int(left[row]), int(position[row]), int(ends[row]))
            self._read_on(fields.data, *at)

    def _read_on(self, data: bytes, slot: int, left: int, position: int, end: int) -> None:
        """The last `left` headers of one record."""
        found: tuple[list[int], ...] = ([], [], [], [])
        name_starts, name_sizes, value_starts, value_sizes = found
        for _ in range(left):
            size, position = read_varint(data, position)
            if not 0 <= size < end - position:
                raise CorruptBatchError("record header without a name, or a longer one")
            name_starts.append(position)
            name_sizes.append(size)
            size, position = read_varint(data, position + size)
            if not -1 <= size <= end - position:
                raise CorruptBatchError("record header longer than its record")
            value_starts.append(position)
            value_sizes.append(size)
            position += max(size, 0)
        if position != end:
            raise CorruptBatchError("record shorter or longer than it says")
        columns = (self.name_starts, self.name_sizes, self.value_starts, self.value_sizes)
        for column, values in zip(columns, found, strict=True):
            column[slot : slot + left] = values


def find_records(
    data: bytes, octets: Octets, headers: Sequence[BatchHeader], payload_sizes: Sequence[int]
) -> Ints:
    """Where each record begins, at its length.

    Raises:
        CorruptBatchError: the records do not fill their batch.
        IndexError: they reach beyond the last one.
    """
    starts = array("q")
    position = 0
    end = 0
    for header, size in zip(headers, payload_sizes, strict=True):
        end += size
        position = _walk(data, octets, position, end, header.record_count, starts)
        if position != end:
            raise CorruptBatchError("records do not fill their batch")
    return np.frombuffer(starts, np.int64) if starts else np.empty(0, np.int64)


def _walk(
    data: bytes, octets: Octets, position: int, end: int, count: int, starts: array[int]
) -> int:
    """Follow the lengths of `count` records; where the last one ends.

    A negative length only leads astray; the caller checks all lengths.
    """
    append = starts.append
    before = 0
    patience = 0
    while count:
        append(position)
        count -= 1
        byte = data[position]
        if byte < 0x80:
            stride = 1 + (byte >> 1)
        else:
            second = data[position + 1]
            if second < 0x80:
                stride = 2 + ((byte & 0x7F | second << 7) >> 1)
            else:
                size, after = read_varint(data, position)
                stride = after - position + max(size, 0)
        position += stride
        if stride != before:
            before = stride
        elif patience:
            patience -= 1
        else:
            room = max(end - position, 0) // stride
            run = _run(data, octets, position - stride, stride, min(count, room))
            if run < _RUN_MIN:
                patience = 2 * _RUN_MIN
            starts.frombytes(
                np.arange(position, position + run * stride, stride, dtype=np.int64).tobytes()
            )
            position += run * stride
            count -= run
    return position


def _run(data: bytes, octets: Octets, position: int, stride: int, count: int) -> int:
    """How many records of the same length follow the one at `position`, of at most `count`."""
    width = 1
    while data[position + width - 1] >= 0x80:
        width += 1
    for at in range(position, position + width):
        follower = octets[at + stride : at + stride * count + 1 : stride]
        differs = follower != data[at]
        first = int(differs.argmax()) if count else 0
        if count and differs[first]:
            count = first
    return count


def read_varints(octets: Octets, positions: Ints) -> tuple[Ints, Ints]:
    """Read a zigzag variable-length integer at each position; the positions after them.

    Raises:
        CorruptBatchError: one does not fit into 64 bits.
        IndexError: one lies beyond the last byte.
    """
    byte = octets.take(positions)
    values = (byte & 0x7F).astype(np.uint64)
    after = positions + 1
    rows = np.flatnonzero(byte & 0x80)
    shift = 7
    while len(rows):
        byte = octets.take(after[rows])
        if shift > _VARINT_BITS_MAX or (shift == _VARINT_BITS_MAX and (byte > 1).any()):
            raise CorruptBatchError("variable-length integer of more than 64 bits")
        values[rows] |= (byte & 0x7F).astype(np.uint64) << np.uint64(shift)
        after[rows] += 1
        rows = rows[byte >= 0x80]
        shift += 7
    sign = (values & np.uint64(1)).view(np.int64)
    return (values >> np.uint64(1)).view(np.int64) ^ -sign, after


def _skip(starts: Ints, sizes: Ints, ends: Ints, what: str) -> Ints:
    """The positions behind fields; a size of -1 is null. Never past `ends`."""
    _check(sizes >= -1, f"{what} of negative length")
    taken = np.maximum(sizes, 0)
    _check(taken <= ends - starts, f"{what} longer than its record")
    return starts + taken


def _spread(values: Sequence[int], counts: Sequence[int]) -> Ints:
    """Each batch's value for each of its records."""
    return np.repeat(np.array(values, np.int64), counts)


def _check(holds: npt.NDArray[np.bool_], what: str) -> None:
    if not holds.all():
        raise CorruptBatchError(what)
