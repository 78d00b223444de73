"""What all logs of a process share, so that its limits hold over all of them together."""

from __future__ import annotations

from attrs import frozen

from raftmq.log.file_cache import FileCache
from raftmq.log.recent import RecentBudget
from raftmq.log.sparse_index import IndexCache
from raftmq.ports import Disk


@frozen(slots=True)
class Shared:
    """Open files, loaded indexes and recent batches, each bounded."""

    files: FileCache
    indexes: IndexCache
    recent: RecentBudget

    @classmethod
    def make(
        cls,
        disk: Disk,
        *,
        files_max: int = 1024,
        index_bytes_max: int = 64 << 20,
        recent_bytes_max: int = 64 << 20,
    ) -> Shared:
        """Begin empty."""
        return cls(
            FileCache(disk, files_max), IndexCache(index_bytes_max), RecentBudget(recent_bytes_max)
        )
