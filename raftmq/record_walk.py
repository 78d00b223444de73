"""Checks the records of a produced batch, so that all that is stored can be read; makes no objects.

It checks bytes that a client sent: as many records as the header says, each as long as it says,
every length within its record, offset deltas 0, 1, 2, ..., header names in UTF-8. It keeps only the
timestamps' range and where the first key is missing.

A record costs some 200 ns in the interpreter. Most producers write records of one layout (equal
sizes of key, value and headers), and a *run* of those is judged by columns, at a tenth of that: the
first bytes of all its records are one strided slice, their second bytes the next, and a comparison
is one call for all of them. By induction: it is known where the first record of a run begins; the
next begins after as many bytes as the length of this one says, and all have the same length.

Invariants: positions only grow; what a walk costs is bounded by its own arguments and by
`ELEMENTS_MAX`, never by what a batch says of itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from sys import byteorder
from typing import Final, Literal, NamedTuple

from raftmq.errors import CorruptBatchError, ErrorCode
from raftmq.records import NO_TIMESTAMP, BatchHeader, InvalidRecordError

ELEMENTS_MAX: Final = 1_000_000
"""Most records, and most record headers, of one batch; as Kafka 4.4 bounds what it decodes."""

_RECORD_BYTES_MIN: Final = 7  # its length, and six fields of which each may be one byte
_COST_MAX: Final = 1 << 62  # no limit but that of the elements
_RUN_MAX: Final = 512  # records judged at once: their bytes stay in the processor's cache
_RUN_MIN: Final = 8  # fewer are not worth the columns
_PATIENCE_MAX: Final = 64  # most records that are walked before the next run is looked for
_RUN_COST: Final = 16  # this many records of a run cost as much as one alone
_COLUMNS_MAX: Final = 64
_LOW: Final = bytes(range(0x80))
_HIGH: Final = bytes(range(0x80, 0x100))


class Walked(NamedTuple):
    """The result of a walk.

    Attributes:
        greatest: the greatest timestamp, -1 where no record has one; may be beyond 64 bits.
        least: the least one that is not -1; -1 where there is none.
        unkeyed: the index of the first record without a key, -1 for none.
        cost: of the walk, in records.
    """

    greatest: int
    least: int
    unkeyed: int
    cost: int


class TooManyElementsError(InvalidRecordError):
    """More records or headers than a broker takes in one batch; its producer may split it."""

    code = ErrorCode.MESSAGE_TOO_LARGE


class UndecidedError(Exception):
    """The walk would take longer than it was allowed to.

    Attributes:
        cost: of the walk up to there, in records.
    """

    def __init__(self, cost: int) -> None:
        super().__init__(f"undecided after the work of {cost} records")
        self.cost = cost


def walk_records(data: bytes, header: BatchHeader, *, cost_max: int | None = None) -> Walked:
    """Check that `data` holds the records that `header` counts.

    Args:
        data: decompressed.
        header: its count and first timestamp are used.
        cost_max: give up after the work of so many records and headers.

    Raises:
        InvalidRecordError: they break the format, or are numbered otherwise than 0, 1, 2, ...
        TooManyElementsError: more than `ELEMENTS_MAX`.
        UndecidedError: that would cost more than `cost_max`.
    """
    count = header.record_count
    _check_count(data, count)
    walk = _Walk(data, count, _COST_MAX if cost_max is None else cost_max)
    try:
        end = walk.go()
    except IndexError:
        raise InvalidRecordError("the records end inside of one") from None
    if end != len(data):
        raise InvalidRecordError("bytes after the last record")
    greatest, least = _span(walk.times, header.base_timestamp)
    return Walked(greatest, least, walk.unkeyed, walk.cost)


def walk_lengths(data: bytes, count: int, *, cost_max: int | None = None) -> int:
    """Check by their lengths alone that `data` is `count` records; returns the cost.

    Raises:
        InvalidRecordError: it is not.
        TooManyElementsError: more than `ELEMENTS_MAX`.
        UndecidedError: that would cost more than `cost_max` records do.
    """
    _check_count(data, count)
    most = _COST_MAX if cost_max is None else cost_max
    cost = position = index = look_at = 0
    patience = _RUN_MIN
    try:
        while index < count:
            if index >= look_at:
                run, width, _ = equal_lengths(data, position, count - index)
                if run:
                    index += run
                    position += run * width
                    cost += 1 + run // _RUN_COST
                    patience = _RUN_MIN
                    continue
                look_at = index + patience
                patience = min(2 * patience, _PATIENCE_MAX)
            cost += 1
            if cost > most:
                raise UndecidedError(cost)
            size = data[position]
            position += 1
            if size >= 0x80:
                size += (data[position] << 7) - 0x80
                position += 1
                if size >= 0x4000:
                    size, position = read_code(data, position - 2)
            if size & 1:
                raise InvalidRecordError("a record of negative length")
            position += size >> 1
            index += 1
    except IndexError:
        raise InvalidRecordError("the records end inside of one") from None
    if position != len(data):
        raise InvalidRecordError("the records are shorter or longer than their batch")
    return cost


def _check_count(data: bytes, count: int) -> None:
    if count > len(data) // _RECORD_BYTES_MIN:
        raise InvalidRecordError(f"{count} records in {len(data)} bytes")
    if count > ELEMENTS_MAX:
        raise TooManyElementsError(f"{count} records in one batch, at most {ELEMENTS_MAX}")


def iter_brief(data: bytes, header: BatchHeader) -> Iterator[tuple[int, int, bool]]:
    """Yield (index, timestamp, has a key) of each record that a walk found sound."""
    position = 0
    for index in range(header.record_count):
        size, position = read_code(data, position)
        end = position + (size >> 1)
        time, position = read_code(data, position + 1, 10)
        _, position = read_code(data, position)
        key, _ = read_code(data, position)
        yield index, header.base_timestamp + _signed(time), key != 1
        position = end


def iter_outlines(
    data: bytes, header: BatchHeader
) -> Iterator[tuple[int, int, bytes | None, int, int]]:
    """Yield (position, timestamp, key, position of the count of headers, end) of each record that a
    walk found sound; values are passed over.

    Raises:
        CorruptBatchError: the bytes are others by now.
    """
    at = 0
    try:
        for _ in range(header.record_count):
            position = at
            size = data[at]
            at += 1
            if size >= 0x80:
                size, at = read_code(data, position)
            end = at + (size >> 1)
            time = data[at + 1]  # after the attributes, of which none is used
            at += 2
            if time >= 0x80:
                time, at = read_code(data, at - 1, 10)
            while data[at] >= 0x80:
                at += 1
            size = data[at + 1]  # after the offset delta
            at += 2
            if size >= 0x80:
                size, at = read_code(data, at - 1)
            key = None
            if not size & 1:
                key = data[at : at + (size >> 1)]
                at += size >> 1
            size = data[at]
            at += 1
            if size >= 0x80:
                size, at = read_code(data, at - 1)
            if not size & 1:
                at += size >> 1
            if not at < end <= len(data):
                raise CorruptBatchError("a record that is longer than it says")
            yield position, header.base_timestamp + (time >> 1 ^ -(time & 1)), key, at, end
            at = end
    except (IndexError, InvalidRecordError) as error:
        raise CorruptBatchError("the records end inside of one") from error


def read_code(data: bytes, position: int, size_max: int = 5) -> tuple[int, int]:
    """Read a variable-length integer, still in zigzag; returns it and the position after it.

    Raises:
        InvalidRecordError: more bytes than `size_max`, or more bits than 32 (for 5) or 64.
        IndexError: the bytes end.
    """
    code = shift = 0
    while (byte := data[position]) >= 0x80:
        code |= (byte & 0x7F) << shift
        shift += 7
        position += 1
        if shift == 7 * size_max:
            raise InvalidRecordError(f"a number of more than {size_max} bytes")
    code |= byte << shift
    if code >> (32 if size_max == 5 else 64):
        raise InvalidRecordError("a number of more bits than its kind has")
    return code, position + 1


class _Walk:
    """One walk and its result so far."""

    __slots__ = ("_cost_max", "_count", "_data", "_headers_left", "cost", "times", "unkeyed")

    def __init__(self, data: bytes, count: int, cost_max: int) -> None:
        self._data = data
        self._count = count
        self._cost_max = cost_max
        self._headers_left = ELEMENTS_MAX
        self.times: set[int] = set()  # timestamp deltas in zigzag
        self.unkeyed = -1
        self.cost = 0

    def go(self) -> int:
        """Walk all records; the position after the last one."""
        count = self._count
        position = index = 0
        patience = _RUN_MIN
        while index < count:
            run = self._run(position, index)
            if run is not None:
                index, position = run
                patience = _RUN_MIN
                continue
            after = min(count, index + patience)
            self._charge(after - index)
            position = self._each(position, index, after)
            index = after
            patience = min(2 * patience, _PATIENCE_MAX)
        return position

    def _each(self, position: int, start: int, stop: int) -> int:
        """Walk the records from number `start` up to `stop` one by one."""
        data = self._data
        last_time = -1
        for index in range(start, stop):
            size = data[position]
            position += 1
            if size >= 0x80:
                size += (data[position] << 7) - 0x80
                position += 1
                if size >= 0x4000:
                    size, position = read_code(data, position - 2)
            if size & 1:
                raise InvalidRecordError("a record of negative length")
            end = position + (size >> 1)
            time = data[position + 1]  # after the attributes, of which none is used
            delta = data[position + 2]
            position += 3
            if time >= 0x80:
                time, position = read_code(data, position - 2, 10)
                delta = data[position]
                position += 1
            if time != last_time:
                last_time = time
                self.times.add(time)
            if delta >= 0x80:
                delta += (data[position] << 7) - 0x80
                position += 1
                if delta >= 0x4000:
                    delta, position = read_code(data, position - 2)
            if delta != index << 1:
                raise InvalidRecordError(f"offset delta {_signed(delta)} where {index} belongs")
            size = data[position]
            position += 1
            if size >= 0x80:
                size += (data[position] << 7) - 0x80
                position += 1
                if size >= 0x4000:
                    size, position = read_code(data, position - 2)
            if not size & 1:
                position += size >> 1
            elif size != 1:
                raise InvalidRecordError("a key of negative length")
            elif self.unkeyed < 0:
                self.unkeyed = index
            size = data[position]
            position += 1
            if size >= 0x80:
                size += (data[position] << 7) - 0x80
                position += 1
                if size >= 0x4000:
                    size, position = read_code(data, position - 2)
            if not size & 1:
                position += size >> 1
            elif size != 1:
                raise InvalidRecordError("a value of negative length")
            if data[position]:
                position = self._headers(position, end)
            else:
                position += 1
            if position != end:
                raise InvalidRecordError("a record that is shorter or longer than it says")
        return position

    def _charge(self, cost: int) -> None:
        self.cost += cost
        if self.cost > self._cost_max:
            raise UndecidedError(self.cost)

    def _headers(self, position: int, end: int) -> int:
        """Walk the headers of a record that ends at `end`; the position after them."""
        data = self._data
        code, position = read_code(data, position)
        count = _signed(code)
        if not 0 <= count <= end - position:
            raise InvalidRecordError(f"{count} record headers")
        self._headers_left -= count
        if self._headers_left < 0:
            raise TooManyElementsError(f"more than {ELEMENTS_MAX} record headers in one batch")
        self._charge(count)
        for _ in range(count):
            size = data[position]
            position += 1
            if size >= 0x80:
                size += (data[position] << 7) - 0x80
                position += 1
                if size >= 0x4000:
                    size, position = read_code(data, position - 2)
            if size & 1:
                raise InvalidRecordError("a record header without a name")
            if size:
                after = position + (size >> 1)
                if after > end:
                    raise InvalidRecordError("a header's name that is longer than its record")
                _check_name(data[position:after])
                position = after
            size = data[position]
            position += 1
            if size >= 0x80:
                size += (data[position] << 7) - 0x80
                position += 1
                if size >= 0x4000:
                    size, position = read_code(data, position - 2)
            if not size & 1:
                position += size >> 1
            elif size != 1:
                raise InvalidRecordError("a header's value of negative length")
        return position

    # ---- runs ----

    def _run(self, start: int, index: int) -> tuple[int, int] | None:
        """Check the records of one layout that begin at `start`, the first with number `index`;
        returns number and position of the record after them.

        None where there are too few, or the plain walk has to look closer.
        """
        data = self._data
        count, width, head = equal_lengths(data, start, self._count - index)
        if not count:
            return None
        layout = _layout(data, start, start + head, width - head)
        if layout is None:
            return None
        for at in layout.constant:
            column = data[at : start + count * width : width]
            count = len(column) - len(column.lstrip(column[:1]))
        time_at, offset_at = layout.time_at, layout.offset_at
        time_size, offset_size = offset_at - time_at, layout.offset_end - offset_at
        for at in range(time_at, offset_at):
            column = data[at : start + count * width : width]
            alike = _LOW if at == offset_at - 1 else _HIGH
            if column.translate(None, alike):
                count -= len(column.lstrip(alike))
        count = min(count, (1 << 7 * offset_size - 1) - index)
        if count < _RUN_MIN or offset_size > 3 or time_size > 8:
            return None
        self._charge(1 + count // _RUN_COST * len(layout.constant) // 4)
        end = start + count * width
        for number in range(offset_size):
            expected = _offset_column(number, number == offset_size - 1, index, count)
            if data[offset_at + number : end : width] != expected:
                return None
        self.times |= _codes(data, range(time_at, offset_at), end, width, count)
        if layout.is_unkeyed and self.unkeyed < 0:
            self.unkeyed = index
        return index + count, end


class _Layout(NamedTuple):
    """Where the first record of a run has its fields.

    Attributes:
        constant: positions of bytes that are the same in all its records: lengths, header names.
        time_at, offset_at, offset_end: timestamp delta and offset delta stand side by side.
    """

    constant: list[int]
    time_at: int
    offset_at: int
    offset_end: int
    is_unkeyed: bool


def equal_lengths(data: bytes, start: int, count: int) -> tuple[int, int, int]:
    """How many records from `start` on have the same length, the bytes that each takes, and how
    many of these hold the length. (0, 0, 0) where they are too few to be checked at once."""
    first = data[start]
    if first < 0x80:
        head, code = 1, first
    elif data[start + 1] < 0x80:
        head, code = 2, first & 0x7F | data[start + 1] << 7
    else:
        return 0, 0, 0
    width = head + (code >> 1)
    count = min(count, _RUN_MAX, (len(data) - start) // width)
    if code & 1 or count < _RUN_MIN or not first == data[start + width] == data[start + 2 * width]:
        return 0, 0, 0
    for at in range(start, start + head):
        column = data[at : start + count * width : width]
        count = len(column) - len(column.lstrip(column[:1]))
    return (count, width, head) if count >= _RUN_MIN else (0, 0, 0)


def _layout(data: bytes, start: int, position: int, size: int) -> _Layout | None:
    """The layout of the record whose body begins at `position`; None where it is not sound, or has
    too many constant bytes."""
    end = position + size
    time_at = position + 1
    _, offset_at = read_code(data, time_at, 10)
    _, offset_end = read_code(data, offset_at)
    key, value_at = read_code(data, offset_end)
    constant = list(range(offset_end, value_at))
    position = value_at if key == 1 else value_at + (key >> 1)
    value, after = read_code(data, position)
    constant += range(position, after)
    position = after if value == 1 else after + (value >> 1)
    code, after = read_code(data, position)
    constant += range(position, after)
    position = after
    if (key & 1 and key != 1) or (value & 1 and value != 1) or code & 1:
        return None
    for _ in range(code >> 1):
        name, after = read_code(data, position)
        stop = after + (name >> 1)
        if name & 1 or stop > end or len(constant) > _COLUMNS_MAX:
            return None
        _check_name(data[after:stop])
        constant += range(position, stop)
        content, after = read_code(data, stop)
        if content & 1 and content != 1:
            return None
        constant += range(stop, after)
        position = after if content == 1 else after + (content >> 1)
    if position != end or len(constant) > _COLUMNS_MAX:
        return None
    return _Layout(constant, time_at, offset_at, offset_end, key == 1)


def _codes(data: bytes, columns: range, end: int, width: int, count: int) -> set[int]:
    """The different timestamp deltas of a run, in zigzag, from the columns of their bytes."""
    if len(columns) == 1:
        return set(data[columns.start : end : width])
    slot = 2 if len(columns) == 2 else 4 if len(columns) <= 4 else 8
    form: Literal["H", "I", "Q"] = "H" if slot == 2 else "I" if slot == 4 else "Q"
    rows = bytearray(count * slot)
    for number, at in enumerate(columns):
        rows[number::slot] = data[at:end:width]
    with memoryview(rows) as view, view.cast(form) as packed:
        different = set(packed)
    return {read_code(row.to_bytes(slot, byteorder), 0, 10)[0] for row in different}


def _offset_column(number: int, is_last: bool, index: int, count: int) -> bytes:
    """Byte `number` of the offset deltas of `count` records from `index` on."""
    if is_last:
        if number < 2:
            return _LAST[number][index : index + count]
        return bytes([position >> 13 for position in range(index, index + count)])
    period = 64 << 7 * number
    return _MORE[number][index % period : index % period + count]


_LAST: Final = (
    bytes(range(0, 128, 2)),
    b"".join(bytes((high,)) * 64 for high in range(128)),
)
"""The last byte of offset deltas of one byte, and of two."""
_MORE: Final = (
    bytes(range(0x80, 0x100, 2)) * (2 + _RUN_MAX // 64),
    b"".join(bytes((0x80 | high,)) * 64 for high in range(128))
    + b"".join(bytes((0x80 | high,)) * 64 for high in range(_RUN_MAX // 64)),
)
"""The first byte of longer ones, and the second one."""


def _check_name(name: bytes) -> None:
    if name.isascii():
        return
    try:
        name.decode()
    except UnicodeDecodeError:
        raise InvalidRecordError("a record header's name that is not UTF-8") from None


def _signed(code: int) -> int:
    return code >> 1 ^ -(code & 1)


def _span(codes: set[int], base: int) -> tuple[int, int]:
    """The greatest and the least timestamp of those deltas; those that are -1 do not count."""
    times = [base + (code >> 1 ^ -(code & 1)) for code in codes]
    least = min((time for time in times if time != NO_TIMESTAMP), default=NO_TIMESTAMP)
    return max(NO_TIMESTAMP, *times) if times else NO_TIMESTAMP, least
