"""Which transactions were aborted: one index beside each segment in which their markers stand.

A reader of committed records alone is told, with each piece of the log, of which producers it has
to pass over what, from which offset on up to the marker that says so. The log cannot tell that from
batch headers, so whoever follows it (`partition/producers.py`) says it: `tell` of a range of the
log, in its order, names all transactions whose abort is in that range. A segment is covered up to
where such ranges reach without a gap; the gap is told again, from the log, when somebody reads.

An index is a hint that can be rebuilt, written without promise and checked when it is read, like
the other two of a segment. What it says of a part of the log that is gone would be believed of the
part in its place, so a cut is durable before anything is appended. Segments without control batches
have no such file and need none.

Entries stand in the order of their markers, in blocks of 4 KiB. Of the full blocks only the last
marker and the least first offset are held in memory, in the cache that all indexes share; a look-up
reads those blocks that may have something. Of the rest of a file (less than a block) all is held.

File: header of 64 bytes (magic 4s, version uint16, 2 spare bytes, base_offset int64, full blocks
uint32, entries behind them uint32, covered end int64, least first offset int64, 20 spare bytes, CRC
of all before it uint32), then blocks (CRC of what follows in it uint32, entries uint32, last marker
int64, least first offset int64, entries), little-endian. An entry is producer id, first offset and
offset of the marker, int64 each.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from crc32c import crc32c

from raftmq.errors import RaftmqError
from raftmq.log.indexes import DamagedIndexError
from raftmq.log.model import NewerFormatError
from raftmq.log.shared import FileCache, IndexCache, Table
from raftmq.ports import DiskError, File

_HEADER: Final = struct.Struct("<4sH2xqIIqq20x")
_CRC: Final = struct.Struct("<I")
_BLOCK_HEAD: Final = struct.Struct("<IIqq")
_ENTRY: Final = struct.Struct("<qqq")
HEADER_SIZE: Final = _HEADER.size + _CRC.size
BLOCK_BYTES: Final = 4096
BLOCK_ENTRIES: Final = (BLOCK_BYTES - _BLOCK_HEAD.size) // _ENTRY.size
MAGIC: Final = b"RMQA"
VERSION: Final = 1
_NONE: Final = 1 << 62
"""The least first offset of no transactions."""
_BLOCKS_READ: Final = 256
"""So many blocks are read at once when a file is loaded."""
assert HEADER_SIZE == 64


class Aborted(NamedTuple):
    """A transaction that was aborted: what its producer wrote between two offsets."""

    producer_id: int
    first_offset: int
    marker_offset: int


class UntoldError(RaftmqError):
    """Nobody has told yet which transactions were aborted in `[start, end)`."""

    def __init__(self, start: int, end: int) -> None:
        super().__init__(f"transactions that ended in offsets [{start}, {end}) are not known yet")
        self.start = start
        self.end = end


class AbortedIndex:
    """The aborted transactions whose markers stand in one segment."""

    __slots__ = (
        "_cache",
        "_files",
        "_full",
        "_rest",
        "base_offset",
        "covered",
        "is_dirty",
        "is_known",
        "least_first",
        "path",
    )

    def __init__(self, path: str, base_offset: int, files: FileCache, cache: IndexCache) -> None:
        self.path = path
        self.base_offset = base_offset
        self._files = files
        self._cache = cache
        self.reset()

    def reset(self) -> None:
        """Know nothing of the segment."""
        self.covered = self.base_offset
        """All aborted transactions with markers below are here."""
        self.least_first = _NONE
        """None of them begins below; it may be lower than need be."""
        self._full = 0  # blocks in the file
        self._rest: list[Aborted] = []
        self.is_dirty = False
        self.is_known = False
        """The file was sound when it was opened."""
        self._cache.forget(self.path)

    # --- the file ---------------------------------------------------------------------------

    def open(self) -> None:
        """Take over what the file says; nothing where it is missing or damaged.

        Raises:
            NewerFormatError: written by a newer raftmq.
            DiskError: the device failed.
        """
        self.reset()
        try:
            data = self._files.get(self.path).pread(HEADER_SIZE, 0)
        except FileNotFoundError:
            return
        if len(data) < HEADER_SIZE or not _is_sound(data):
            return
        magic, version, base, full, rest, covered, least = _HEADER.unpack_from(data)
        if magic == MAGIC and version > VERSION:
            raise NewerFormatError(f"{self.path} has format {version}, known is {VERSION}")
        if magic != MAGIC or base != self.base_offset:
            return
        try:
            entries = self._read_block(full) if rest else []
        except DamagedIndexError:
            return
        if len(entries) < rest:
            return
        self._full, self._rest = full, entries[:rest]  # more than `rest` were not covered yet
        self.covered, self.least_first = covered, least
        self.is_known = True

    def write(self) -> None:
        """Bring the file up to date; nothing is synced. On a disk that refuses it stays dirty."""
        if not self.is_dirty:
            return
        try:
            file = self._files.made(self.path)
            while len(self._rest) >= BLOCK_ENTRIES:
                self._write_block(file, self._rest[:BLOCK_ENTRIES])
                self._full += 1
                del self._rest[:BLOCK_ENTRIES]
            if self._rest:
                self._write_block(file, self._rest)
            head = (MAGIC, VERSION, self.base_offset, self._full, len(self._rest))
            header = _HEADER.pack(*head, self.covered, self.least_first)
            file.pwrite(header + _CRC.pack(crc32c(header)), 0)
        except DiskError:
            return  # the log's own writes say so
        self.is_dirty = False

    def _write_block(self, file: File, entries: Sequence[Aborted]) -> None:
        last = entries[-1].marker_offset
        least = min(entry.first_offset for entry in entries)
        body = b"".join(_ENTRY.pack(*entry) for entry in entries)
        head = _BLOCK_HEAD.pack(0, len(entries), last, least)[_CRC.size :]
        block = _CRC.pack(crc32c(body, crc32c(head))) + head + body
        file.pwrite(block, HEADER_SIZE + self._full * BLOCK_BYTES)
        table = self._cache.get(self.path)
        if table is not None and len(entries) == BLOCK_ENTRIES:
            self._cache.forget(self.path)
            table.keys.append(last)
            table.values.append(least)
            self._cache.put(self.path, table)

    def sync(self) -> None:
        """Make what was written durable.

        Raises:
            DiskError: the device failed.
        """
        try:
            self._files.get(self.path).fdatasync()
        except FileNotFoundError:
            return  # not written yet

    def remove(self) -> None:
        """Unlink the file, and know nothing."""
        self.reset()
        self._files.forget(self.path)
        self._files.disk.remove(self.path)

    def release(self) -> None:
        """Drop the open file."""
        self._files.forget(self.path)
        self._cache.forget(self.path)

    # --- entries ----------------------------------------------------------------------------

    def add(self, entry: Aborted) -> None:
        """The next one in the order of markers."""
        assert self.covered <= entry.marker_offset, "markers are told in their order"
        self._rest.append(entry)
        self.least_first = min(self.least_first, entry.first_offset)
        self.covered = entry.marker_offset + 1
        self.is_dirty = True
        if len(self._rest) >= BLOCK_ENTRIES:
            self.write()

    def cover(self, end: int) -> None:
        """There are no more with markers below `end`."""
        if end > self.covered:
            self.covered = end
            self.is_dirty = True

    def cut(self, offset: int) -> bool:
        """Forget what stands at or above `offset`; True when the file said something of it, and is
        to be synced (or removed, if it is dirty still).

        Raises:
            DamagedIndexError: the file cannot be used.
        """
        if offset >= self.covered:
            return False
        if self._full and (not self._rest or offset <= self._rest[0].marker_offset):
            keys = self._load().keys
            full = bisect_left(keys, offset)
            if full < len(keys):
                self._rest = self._read_block(full)
                self._full = full
                self._cache.forget(self.path)
        self._rest = [entry for entry in self._rest if entry.marker_offset < offset]
        self.covered = offset
        self.is_dirty = True
        self.write()
        return True

    def between(self, start: int, end: int) -> Iterator[Aborted]:
        """Those whose marker is at or above `start` and that begin below `end`.

        Raises:
            DamagedIndexError: the file cannot be used.
        """
        if self.least_first >= end or self.covered <= start:
            return
        for at in self._blocks(start, end):
            yield from matching(self._read_block(at), start, end)
        yield from matching(self._rest, start, end)

    def cold(self, start: int, end: int) -> list[tuple[File, int, int]]:
        """The stretches of the file that `between` would wait for."""
        if not self._full or self.least_first >= end or self.covered <= start:
            return []
        try:
            file = self._files.get(self.path)
        except FileNotFoundError:
            return []  # it shows when it is read
        if self._cache.get(self.path) is None:
            stretches = [(HEADER_SIZE, self._full * BLOCK_BYTES)]
        else:
            stretches = [
                (HEADER_SIZE + at * BLOCK_BYTES, BLOCK_BYTES) for at in self._blocks(start, end)
            ]
        return [(file, *stretch) for stretch in stretches if not file.is_cached(*stretch)]

    def _blocks(self, start: int, end: int) -> Iterator[int]:
        """The full blocks that may hold an answer."""
        if not self._full:
            return
        table = self._load()
        for at in range(bisect_left(table.keys, start), len(table.keys)):
            if table.values[at] < end:
                yield at

    def _load(self) -> Table:
        table = self._cache.get(self.path)
        if table is not None:
            return table
        table = Table(array("q"), array("q"))
        for first in range(0, self._full, _BLOCKS_READ):
            count = min(_BLOCKS_READ, self._full - first)
            data = memoryview(self._pread(count * BLOCK_BYTES, first))
            for at in range(count):
                block = data[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES]
                _, entries, last, least = self._checked(block)
                if entries != BLOCK_ENTRIES:
                    raise DamagedIndexError(f"{self.path}: a block that is not full")
                table.keys.append(last)
                table.values.append(least)
        self._cache.put(self.path, table)
        return table

    def _read_block(self, at: int) -> list[Aborted]:
        data = memoryview(self._pread(BLOCK_BYTES, at))
        _, count, _, _ = self._checked(data)
        body = data[_BLOCK_HEAD.size : _BLOCK_HEAD.size + count * _ENTRY.size]
        return [Aborted(*row) for row in _ENTRY.iter_unpack(body)]

    def _pread(self, size: int, block: int) -> bytes:
        try:
            return self._files.get(self.path).pread(size, HEADER_SIZE + block * BLOCK_BYTES)
        except FileNotFoundError as error:
            raise DamagedIndexError(f"{self.path}: missing") from error

    def _checked(self, block: memoryview) -> tuple[int, int, int, int]:
        if len(block) >= _BLOCK_HEAD.size:
            crc, count, last, least = _BLOCK_HEAD.unpack_from(block)
            end = _BLOCK_HEAD.size + count * _ENTRY.size
            if end <= len(block) and crc32c(block[_CRC.size : end]) == crc:
                return crc, count, last, least
        raise DamagedIndexError(f"{self.path}: checksum of a block")


def _is_sound(header: bytes) -> bool:
    checksum: int = _CRC.unpack_from(header, _HEADER.size)[0]
    return bool(crc32c(header[: _HEADER.size]) == checksum)


def matching(entries: Sequence[Aborted], start: int, end: int) -> Iterator[Aborted]:
    """Those whose marker is at or above `start` and that begin below `end`."""
    for entry in entries:
        if entry.marker_offset >= start and entry.first_offset < end:
            yield entry
