"""The sparse time index of a segment: greatest timestamp so far -> offset of the batch that has it.

Pairs ascend in both columns. Whatever lies before the batch of the last pair below some timestamp
is older than that timestamp, so a lookup starts there and walks headers.
"""

from __future__ import annotations

from typing import Final

from raftmq.log.file_cache import FileCache
from raftmq.log.sparse_index import IndexCache, SparseIndex

_KIND: Final = 2


class TimeIndex(SparseIndex):
    """Pairs of (timestamp in ms, offset), 16 bytes each on disk: two int64."""

    def __init__(self, path: str, base_offset: int, files: FileCache, cache: IndexCache) -> None:
        super().__init__(path, base_offset, _KIND, "q", files, cache)

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
