"""Walk the batches of a segment file: headers only, or whole and checked.

A batch is right when its CRC holds *and* its base offset is the expected one *and* its leader epoch
is the one that the bare entries give for this offset: base offset and epoch lie outside the CRC.
Reads go through `File.pread` in bounded pieces, so all of this may run in a worker thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Final, NamedTuple

from attrs import frozen

from raftmq.errors import CorruptBatchError
from raftmq.ports import File
from raftmq.records import (
    HEADER_SIZE,
    MAGIC,
    BatchHeader,
    check_batch,
    check_batch_at,
    parse_header,
)

CHUNK_BYTES: Final = 4 << 20
_HEADERS_BYTES: Final = 16 * 1024
_LENGTH_MIN: Final = HEADER_SIZE - 12
_MAGIC_POSITION: Final = 16


@frozen(slots=True)
class Epochs:
    """Which leader epoch the batch at an offset must have; immutable, so threads may hold it."""

    starts: tuple[int, ...]
    epochs: tuple[int, ...]

    def at(self, offset: int) -> int:
        """The epoch in force at `offset`; the oldest known one below the log start."""
        return self.epochs[max(0, bisect_right(self.starts, offset) - 1)]

    def span(self, offset: int) -> tuple[int, int]:
        """The epoch in force at `offset`, and where the next one begins."""
        at = bisect_right(self.starts, offset)
        end = self.starts[at] if at < len(self.starts) else offset + (1 << 62)
        return self.epochs[max(0, at - 1)], end

    def allows(self, offset: int, epoch: int) -> bool:
        """True when the batch at `offset` may have this epoch.

        Below the log start (in a segment that is kept for its later part) only an upper bound is
        known.
        """
        if offset < self.starts[0]:
            return epoch <= self.epochs[0]
        return epoch == self.at(offset)


class CheckedBatch(NamedTuple):
    """A batch that was read and checked."""

    position: int
    header: BatchHeader
    data: memoryview


class BadBatch(Exception):
    """The bytes at `position` are not the batch that begins at `offset`.

    `claimed` is what they say of themselves, as far as it is plausible; `is_short` says that the
    file (or the range to read) ends before the claimed size.
    """

    def __init__(
        self, position: int, offset: int, claimed: BatchHeader | None, *, is_short: bool
    ) -> None:
        super().__init__(f"bad batch at position {position}, offset {offset}")
        self.position = position
        self.offset = offset
        self.claimed = claimed
        self.is_short = is_short


def is_zero(data: bytes) -> bool:
    """True when there is nothing but zeros: never written, or room that was allocated."""
    return data == bytes(len(data))


def is_plausible(header: BatchHeader, offset: int) -> bool:
    """True when the header could belong to the batch that begins at `offset`."""
    return (
        header.base_offset == offset
        and header.magic == MAGIC
        and header.batch_length >= _LENGTH_MIN
        and header.last_offset_delta >= 0
    )


def checked_batches(
    file: File, position: int, end: int, offset: int, epochs: Epochs, *, chunk: int = CHUNK_BYTES
) -> Iterator[CheckedBatch]:
    """Yield the batches in `[position, end)`, the first of which must begin at `offset`.

    Raises:
        BadBatch: at the first batch that is wrong or cut off by `end`.
        DiskError: the device failed.
    """
    data = memoryview(b"")
    data_at = position
    epoch, epoch_end = -1, offset
    while position < end:
        at = position - data_at
        if at + HEADER_SIZE > len(data):
            data = memoryview(file.pread(min(chunk, end - position), position))
            data_at, at = position, 0
        if offset >= epoch_end:
            epoch, epoch_end = epochs.span(offset)
        try:
            header = check_batch_at(data, at)
        except CorruptBatchError:
            bad = _bad(data, at, position, end, offset)
            size = bad.claimed.size if bad.claimed is not None else 0
            if bad.is_short or at + size <= len(data):
                raise bad from None
            data = memoryview(file.pread(max(size, min(chunk, end - position)), position))
            data_at = position
            if len(data) < size:  # the file is shorter than its caller believes
                bad.is_short = True
                raise bad from None
            continue  # it was only cut by the end of the chunk
        if (
            header.base_offset != offset
            or header.size > end - position
            or (header.leader_epoch != epoch and not epochs.allows(offset, header.leader_epoch))
        ):
            raise _bad(data, at, position, end, offset)
        size = header.size
        yield CheckedBatch(position, header, data[at : at + size])
        position += size
        offset = header.next_offset


def _bad(data: memoryview, at: int, position: int, end: int, offset: int) -> BadBatch:
    """What is wrong with the batch at a position, judged by its header alone."""
    if at + HEADER_SIZE > len(data):
        return BadBatch(position, offset, None, is_short=True)
    header = parse_header(data, at)
    if not is_plausible(header, offset):
        return BadBatch(position, offset, None, is_short=False)
    return BadBatch(position, offset, header, is_short=header.size > end - position)


def _is_sound(batch: memoryview) -> bool:
    try:
        check_batch(batch)
    except CorruptBatchError:
        return False
    return True


def walk_headers(
    file: File, position: int, end: int, offset: int
) -> Iterator[tuple[int, BatchHeader]]:
    """Yield (position, header) of the batches in `[position, end)`; bodies are not read.

    Raises:
        BadBatch: a header that cannot be the one that follows.
        DiskError: the device failed.
    """
    data = b""
    data_at = position
    while position < end:
        at = position - data_at
        if at + HEADER_SIZE > len(data):
            data = file.pread(min(_HEADERS_BYTES, end - position), position)
            data_at, at = position, 0
            if len(data) < HEADER_SIZE:
                raise BadBatch(position, offset, None, is_short=True)
        header = parse_header(data, at)
        if not is_plausible(header, offset):
            raise BadBatch(position, offset, None, is_short=False)
        if header.size > end - position:
            raise BadBatch(position, offset, header, is_short=True)
        yield position, header
        position += header.size
        offset = header.next_offset


def confirmed_headers(
    file: File, position: int, end: int, offset: int, end_offset: int, epochs: Epochs
) -> Iterator[tuple[int, BatchHeader]]:
    """As `walk_headers`, but a header counts only when the next one (for the last, `end_offset`)
    agrees on where its batch ends. Where it does not, the whole batch is read and checked.

    Raises:
        BadBatch: the first batch that is wrong, never the sound one before or behind it.
        DiskError: the device failed.
    """
    held: tuple[int, BatchHeader] | None = None
    try:
        for found in walk_headers(file, position, end, offset):
            if held is not None:
                yield held
            held = found
    except BadBatch:
        if held is not None:
            _check_whole(file, held, epochs)
            yield held
        raise
    if held is not None:
        if held[1].next_offset != end_offset:
            _check_whole(file, held, epochs)
        yield held


def _check_whole(file: File, found: tuple[int, BatchHeader], epochs: Epochs) -> None:
    position, header = found
    end = position + header.size
    for _ in checked_batches(file, position, end, header.base_offset, epochs):
        pass


def find_next_batch(
    file: File, position: int, end: int, offset_min: int, offset_max: int, epochs: Epochs
) -> tuple[int, int] | None:
    """Find the first sound batch after damage: (position, base offset), or None.

    Looks at every byte that could be a magic, since lengths before it cannot be trusted. Offsets
    must lie in `[offset_min, offset_max]`. A batch whose successor has the offset that must follow
    is preferred, since base offsets are not in the CRC.

    Raises:
        DiskError: the device failed.
    """
    offsets = (offset_min, offset_max)
    return _find(file, position, end, offsets, epochs, confirmed=True) or _find(
        file, position, end, offsets, epochs, confirmed=False
    )


def _find(
    file: File,
    position: int,
    end: int,
    offsets: tuple[int, int],
    epochs: Epochs,
    *,
    confirmed: bool,
) -> tuple[int, int] | None:
    at = position
    while at + HEADER_SIZE <= end:
        window = file.pread(min(CHUNK_BYTES, end - at), at)
        found = _find_in_window(file, window, at, end, offsets, epochs, confirmed=confirmed)
        if found is not None:
            return found
        if at + len(window) >= end or len(window) < HEADER_SIZE:
            return None
        at += len(window) - HEADER_SIZE + 1
    return None


def find_after(
    file: File, bad: BadBatch, end: int, offset_max: int, epochs: Epochs
) -> tuple[int, int] | None:
    """Find the first sound batch after a bad one: (position, base offset), or None.

    When the header of the bad one is plausible, its length or its offsets may still be the damaged
    part, but not both: so a follower either begins where the length says, or has the offset that
    the header says. That keeps batches inside record values from being taken for ours.

    Raises:
        DiskError: the device failed.
    """
    claimed = bad.claimed
    if claimed is None:
        return find_next_batch(file, bad.position + 1, end, bad.offset + 1, offset_max, epochs)
    at = bad.position + claimed.size
    if at + HEADER_SIZE <= end:
        header = parse_header(file.pread(HEADER_SIZE, at))
        if bad.offset < header.base_offset <= offset_max and header.size <= end - at:
            try:
                next(checked_batches(file, at, at + header.size, header.base_offset, epochs))
            except BadBatch:
                pass  # the length is damaged, or two batches are: search on
            else:
                return at, header.base_offset
    start = bad.position + HEADER_SIZE
    return find_next_batch(file, start, end, claimed.next_offset, offset_max, epochs)


def _find_in_window(
    file: File,
    window: bytes,
    at: int,
    end: int,
    offsets: tuple[int, int],
    epochs: Epochs,
    *,
    confirmed: bool,
) -> tuple[int, int] | None:
    magic = bytes((MAGIC,))
    hit = window.find(magic, _MAGIC_POSITION)
    last = len(window) - (HEADER_SIZE - _MAGIC_POSITION)
    while 0 <= hit <= last:
        start = hit - _MAGIC_POSITION
        header = parse_header(window, start)
        if (
            offsets[0] <= header.base_offset <= offsets[1]
            and is_plausible(header, header.base_offset)
            and header.size <= end - at - start
            and epochs.allows(header.base_offset, header.leader_epoch)
            and (not confirmed or _is_confirmed(file, at + start + header.size, end, header))
        ):
            batch = file.pread(header.size, at + start)
            if len(batch) == header.size and _is_sound(memoryview(batch)):
                return at + start, header.base_offset
        hit = window.find(magic, hit + 1)
    return None


def _is_confirmed(file: File, position: int, end: int, header: BatchHeader) -> bool:
    """True at the end of the file, or when what follows has the offset that must follow."""
    if position >= end:
        return True
    data = file.pread(HEADER_SIZE, position)
    return len(data) == HEADER_SIZE and parse_header(data).base_offset == header.next_offset
