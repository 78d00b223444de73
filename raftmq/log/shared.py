"""What all logs of a process share, so that its limits hold over all of them together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from attrs import Factory, frozen

from raftmq.log.file_cache import FileCache
from raftmq.log.indexes import IndexCache
from raftmq.log.recent import RecentBudget
from raftmq.ports import Disk


class LogWatch:
    """What happened to the files of all logs: counts, and a listener told of each."""

    __slots__ = ("damages_found", "damages_repaired", "on_event", "segments_rolled")

    def __init__(self) -> None:
        self.segments_rolled = 0
        self.damages_found = 0
        self.damages_repaired = 0
        self.on_event: Callable[[str, str, int, int], None] | None = None
        """Called with "rolled", "damaged" or "repaired", the segment's path and an offset range."""

    def rolled(self, path: str, base_offset: int) -> None:
        """A segment was begun."""
        self.segments_rolled += 1
        self._tell("rolled", path, base_offset, base_offset)

    def damaged(self, path: str, start: int, end: int) -> None:
        """Damage was found that was not known."""
        self.damages_found += 1
        self._tell("damaged", path, start, end)

    def repaired(self, path: str, start: int, end: int) -> None:
        """Damage was repaired from a peer."""
        self.damages_repaired += 1
        self._tell("repaired", path, start, end)

    def _tell(self, what: str, path: str, start: int, end: int) -> None:
        if self.on_event is not None:
            self.on_event(what, path, start, end)


class LoopShare:
    """How much of the loop's time the moves of all log starts may take: a share of it, and so much
    at once. Each writes and syncs a small file, and thousands may be due together."""

    __slots__ = ("_free_at_ms",)

    SHARE: Final = 0.25
    BURST_MS: Final = 40.0

    def __init__(self) -> None:
        self._free_at_ms = 0.0  # before then what was spent lately is not paid off

    def is_free(self, now_ms: float) -> bool:
        """True when another move may begin."""
        return self._free_at_ms <= now_ms

    def spend(self, began_ms: float, ended_ms: float) -> None:
        """A move, or a part of one, took so long."""
        paid_ms = max(self._free_at_ms, began_ms - self.BURST_MS)
        self._free_at_ms = paid_ms + (ended_ms - began_ms) / self.SHARE


@frozen(slots=True)
class Shared:
    """Open files, loaded indexes and recent batches, each bounded; who watches the files; and what
    moves of log starts may take."""

    files: FileCache
    indexes: IndexCache
    recent: RecentBudget
    watch: LogWatch = Factory(LogWatch)
    moves: LoopShare = Factory(LoopShare)

    @classmethod
    def make(
        cls,
        disk: Disk,
        *,
        files_max: int = 1024,
        index_bytes_max: int = 64 << 20,
        recent_bytes_max: int = 64 << 20,
        make_lock: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Shared:
        """Begin empty. Where logs are opened in threads, files and indexes need a lock each."""
        return cls(
            FileCache(disk, files_max, make_lock()),
            IndexCache(index_bytes_max, make_lock()),
            RecentBudget(recent_bytes_max),
        )
