"""The sparse offset index of a segment: base offset of a batch -> its position in the file.

One pair per `index_interval_bytes`, made when the batch is appended. Every pair is a batch
boundary; a reader starts at the last pair not above its offset and walks headers from there.
"""

from __future__ import annotations

from typing import Final

from raftmq.log.file_cache import FileCache
from raftmq.log.sparse_index import IndexCache, SparseIndex

_KIND: Final = 1


class OffsetIndex(SparseIndex):
    """Pairs of (offset - base offset, position), 8 bytes each on disk: two uint32."""

    def __init__(self, path: str, base_offset: int, files: FileCache, cache: IndexCache) -> None:
        super().__init__(path, base_offset, _KIND, "I", files, cache)

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
