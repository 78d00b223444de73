"""The sparse indexes of a segment, by offset and by time, and the file format and cache they share.

An index is a hint that can be rebuilt from its segment: it is written without promise, checked by
checksum when it is loaded, and thrown away when it is missing or damaged. Entries collect in memory
and are appended in groups; then the header, which counts and sums them, is written over. A crash
between the two leaves a header that covers fewer entries, which is sound. Loaded entries of all
logs of a process share one bounded cache (`IndexCache`).

The offset index maps base offsets to positions in the file, one pair per `index_interval_bytes`:
every pair is a batch boundary, and a reader starts at the last pair not above its offset and walks
headers from there. The time index maps the greatest timestamp so far to the offset of the batch
that has it; its pairs ascend in both columns. What lies before the batch of the last pair below
some timestamp is older than that timestamp, so a look-up starts there.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from typing import Final, Self

from attrs import frozen
from crc32c import crc32c

from raftmq.errors import RaftmqError
from raftmq.log.model import NewerFormatError
from raftmq.log.shared import FileCache, IndexCache, Table
from raftmq.ports import File

# magic 4s, version uint16, kind uint16, base_offset int64, entry count uint32, crc of the entries
# uint32, log_size int64 (0 while the segment is open, -1 if it is damaged), end_offset int64,
# max_timestamp int64, offset of the batch with it int64, flags uint8 (1: control batches may be
# there), then 3 spare bytes and the crc of all before it.
_HEADER: Final = struct.Struct("<4sHHqIIqqqqB3x")
_CRC: Final = struct.Struct("<I")
HEADER_SIZE: Final = _HEADER.size + _CRC.size
DAMAGED: Final = -1
"""The `log_size` of a segment in which damage is known: pairs may lie behind it."""
MAGIC: Final = b"RMQX"
VERSION: Final = 1
_HAS_MARKERS: Final = 1
_GROUP: Final = 64
_COLUMNS: Final = 2
assert HEADER_SIZE == 64


class DamagedIndexError(RaftmqError):
    """The index file is missing, damaged or does not belong to the segment: rebuild it."""


@frozen(slots=True)
class SegmentSummary:
    """What an index header says of its segment; `log_size` 0 means it was still open, `DAMAGED`
    that all of it is to be checked when it is opened."""

    base_offset: int
    log_size: int
    end_offset: int
    max_timestamp: int
    max_timestamp_offset: int
    has_markers: bool = False


class SparseIndex:
    """Ascending (key, value) pairs of one segment; keys and values both never fall."""

    def __init__(
        self,
        path: str,
        base_offset: int,
        kind: int,
        typecode: str,
        files: FileCache,
        cache: IndexCache,
    ) -> None:
        self.path = path
        self.base_offset = base_offset
        self._kind = kind
        self._typecode = typecode
        self._entry_size = array(typecode).itemsize * _COLUMNS
        self._files = files
        self._cache = cache
        self._count = 0  # entries in the file
        self._crc = 0
        self._pending_keys: list[int] = []
        self._pending_values: list[int] = []

    @property
    def count(self) -> int:
        """Entries, written or not."""
        return self._count + len(self._pending_keys)

    def add(self, key: int, value: int) -> bool:
        """Append a pair; True when a group is full and `write` is due."""
        self._pending_keys.append(key)
        self._pending_values.append(value)
        return len(self._pending_keys) >= _GROUP

    def last_not_above(self, key: int) -> tuple[int, int] | None:
        """The last pair whose key is not above `key`.

        Raises:
            DamagedIndexError: the file cannot be used.
        """
        if self._pending_keys and self._pending_keys[0] <= key:
            at = bisect_right(self._pending_keys, key) - 1
            return self._pending_keys[at], self._pending_values[at]
        return self._pick(bisect_right(self._load().keys, key) - 1)

    def last_below(self, key: int) -> tuple[int, int] | None:
        """The last pair whose key is below `key`.

        Raises:
            DamagedIndexError: the file cannot be used.
        """
        if self._pending_keys and self._pending_keys[0] < key:
            at = bisect_left(self._pending_keys, key) - 1
            return self._pending_keys[at], self._pending_values[at]
        return self._pick(bisect_left(self._load().keys, key) - 1)

    def last_value_not_above(self, value: int) -> tuple[int, int] | None:
        """The last pair whose value is not above `value`.

        Raises:
            DamagedIndexError: the file cannot be used.
        """
        if self._pending_values and self._pending_values[0] <= value:
            at = bisect_right(self._pending_values, value) - 1
            return self._pending_keys[at], self._pending_values[at]
        return self._pick(bisect_right(self._load().values, value) - 1)

    def pairs(self) -> list[tuple[int, int]]:
        """All pairs that the file holds.

        Raises:
            DamagedIndexError: the file cannot be used.
        """
        table = self._load()
        return list(zip(table.keys, table.values, strict=True))

    def _pick(self, at: int) -> tuple[int, int] | None:
        if at < 0:
            return None
        table = self._load()
        return table.keys[at], table.values[at]

    def _load(self) -> Table:
        table = self._cache.get(self.path)
        if table is None:
            table = Table(array(self._typecode), array(self._typecode))
            if self._count:
                data = self._file_bytes(self._count * self._entry_size)
                if crc32c(data) != self._crc:
                    raise DamagedIndexError(f"{self.path}: checksum of the entries")
                table = self._parse(data)
            self._cache.put(self.path, table)
        return table

    def _parse(self, data: bytes) -> Table:
        both: array[int] = array(self._typecode)
        both.frombytes(data)
        if sys.byteorder == "big":  # pragma: no cover  # files are little-endian everywhere
            both.byteswap()
        return Table(both[0::2], both[1::2])

    def _file_bytes(self, size: int) -> bytes:
        try:
            data = self._files.get(self.path).pread(size, HEADER_SIZE)
        except FileNotFoundError as error:
            raise DamagedIndexError(f"{self.path}: missing") from error
        if len(data) != size:
            raise DamagedIndexError(f"{self.path}: cut off")
        return data

    def open(self) -> SegmentSummary:
        """Read the header and take over the entries it covers.

        Raises:
            DamagedIndexError: missing, damaged, or of another segment.
            NewerFormatError: written by a newer raftmq.
        """
        try:
            data = self._files.get(self.path).pread(HEADER_SIZE, 0)
        except FileNotFoundError as error:
            raise DamagedIndexError(f"{self.path}: missing") from error
        if (
            len(data) < HEADER_SIZE
            or crc32c(data[: _HEADER.size]) != _CRC.unpack_from(data, _HEADER.size)[0]
        ):
            raise DamagedIndexError(f"{self.path}: checksum of the header")
        magic, version, kind, base, count, crc, size, end, stamp, stamp_offset, flags = (
            _HEADER.unpack_from(data)
        )
        if magic == MAGIC and version > VERSION:
            raise NewerFormatError(f"{self.path} has format {version}, known is {VERSION}")
        if magic != MAGIC or kind != self._kind or base != self.base_offset:
            raise DamagedIndexError(f"{self.path}: not the index of this segment")
        self._count = count
        self._crc = crc
        self._pending_keys.clear()
        self._pending_values.clear()
        self._cache.forget(self.path)
        return SegmentSummary(base, size, end, stamp, stamp_offset, bool(flags & _HAS_MARKERS))

    def write(self, summary: SegmentSummary) -> None:
        """Append pending entries to the file and renew its header; nothing is synced.

        Raises:
            DiskError: the caller may go on without: the entries stay in memory.
        """
        interleaved: array[int] = array(self._typecode, bytes(0))
        for key, value in zip(self._pending_keys, self._pending_values, strict=True):
            interleaved.append(key)
            interleaved.append(value)
        if sys.byteorder == "big":  # pragma: no cover
            interleaved.byteswap()
        data = interleaved.tobytes()
        crc = crc32c(data, self._crc)
        header = _HEADER.pack(
            MAGIC,
            VERSION,
            self._kind,
            self.base_offset,
            self.count,
            crc,
            summary.log_size,
            summary.end_offset,
            summary.max_timestamp,
            summary.max_timestamp_offset,
            _HAS_MARKERS if summary.has_markers else 0,
        )
        file = self._files.made(self.path)
        if data:
            file.pwrite(data, HEADER_SIZE + self._count * self._entry_size)
        file.pwrite(header + _CRC.pack(crc32c(header)), 0)
        table = self._cache.get(self.path)
        if table is not None:
            self._cache.forget(self.path)
            table.keys.extend(self._pending_keys)
            table.values.extend(self._pending_values)
            self._cache.put(self.path, table)
        self._count = self.count
        self._crc = crc
        self._pending_keys.clear()
        self._pending_values.clear()

    def truncate(self, key: int) -> None:
        """Forget pairs whose key is `key` or above.

        Raises:
            DamagedIndexError: the file cannot be used.
        """
        kept = bisect_left(self._pending_keys, key)
        del self._pending_keys[kept:]
        del self._pending_values[kept:]
        if kept or not self._count:
            return
        keys = self._load().keys
        count = bisect_left(keys, key)
        if count < len(keys):
            self._crc = crc32c(self._file_bytes(count * self._entry_size))
            self._count = count
            self._cache.forget(self.path)

    def reset(self) -> None:
        """Forget all pairs: the index is about to be rebuilt."""
        self._count = 0
        self._crc = 0
        self._pending_keys.clear()
        self._pending_values.clear()
        self._cache.forget(self.path)

    def take_over(self, other: Self) -> None:
        """Become what `other` collected, none of which was written yet."""
        assert other._count == 0, "none of it was written"
        self.reset()
        self._pending_keys = other._pending_keys
        self._pending_values = other._pending_values

    def unloaded_file(self) -> tuple[File, int] | None:
        """The file and its size, as long as the next look-up must read it; None when its entries
        are in memory, or there is no file to read."""
        if not self._count or self._cache.get(self.path) is not None:
            return None
        try:
            return self._files.get(self.path), HEADER_SIZE + self._count * self._entry_size
        except FileNotFoundError:
            return None

    def file(self) -> File:
        """The open file, for a flush job."""
        return self._files.get(self.path)

    def remove(self) -> None:
        """Unlink the file."""
        self._cache.forget(self.path)
        self._files.forget(self.path)
        self._files.disk.remove(self.path)


_OFFSETS_KIND: Final = 1


class OffsetIndex(SparseIndex):
    """Pairs of (offset - base offset, position), 8 bytes each on disk: two uint32."""

    def __init__(self, path: str, base_offset: int, files: FileCache, cache: IndexCache) -> None:
        super().__init__(path, base_offset, _OFFSETS_KIND, "I", files, cache)

    def append(self, offset: int, position: int) -> bool:
        """Add a batch boundary; True when `write` is due."""
        return self.add(offset - self.base_offset, position)

    def floor(self, offset: int) -> tuple[int, int]:
        """The last known boundary (offset, position) at or below `offset`.

        Raises:
            DamagedIndexError: the file cannot be used.
        """
        found = self.last_not_above(max(0, offset - self.base_offset))
        return (self.base_offset, 0) if found is None else (self.base_offset + found[0], found[1])

    def floor_position(self, position: int) -> tuple[int, int]:
        """The last known boundary (offset, position) at or below a position.

        Raises:
            DamagedIndexError: the file cannot be used.
        """
        found = self.last_value_not_above(position)
        return (self.base_offset, 0) if found is None else (self.base_offset + found[0], found[1])

    def cut(self, offset: int) -> None:
        """Forget boundaries at or above `offset`.

        Raises:
            DamagedIndexError: the file cannot be used.
        """
        self.truncate(max(0, offset - self.base_offset))


_TIMES_KIND: Final = 2


class TimeIndex(SparseIndex):
    """Pairs of (timestamp in ms, offset), 16 bytes each on disk: two int64."""

    def __init__(self, path: str, base_offset: int, files: FileCache, cache: IndexCache) -> None:
        super().__init__(path, base_offset, _TIMES_KIND, "q", files, cache)

    def append(self, timestamp: int, offset: int) -> bool:
        """Add the greatest timestamp so far and the batch that has it; True when `write` is due."""
        return self.add(timestamp, offset)

    def start_for(self, timestamp: int) -> int:
        """An offset at or below the first batch that reaches `timestamp`.

        Raises:
            DamagedIndexError: the file cannot be used.
        """
        found = self.last_below(timestamp)
        return self.base_offset if found is None else found[1]

    def greatest_before(self, offset: int) -> tuple[int, int] | None:
        """The last (timestamp, offset of its batch) whose batch is at or below `offset`.

        Raises:
            DamagedIndexError: the file cannot be used.
        """
        return self.last_value_not_above(offset)

    def cut(self, offset: int) -> None:
        """Forget pairs of batches at or above `offset`.

        Raises:
            DamagedIndexError: the file cannot be used.
        """
        found = self.last_value_not_above(offset - 1)
        if found is None:
            self.reset()
        else:
            self.truncate(found[0] + 1)
