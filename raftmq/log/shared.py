"""What all logs of a process share, so that its limits hold over all of them together: open files,
loaded indexes, the newest batches, and the loop's time for moves of log starts.

The least recently used file is forgotten when there are too many. Forgetting drops a reference and
never closes by force: a connection that still sends from the file keeps its descriptor. Active
segments, bare entries and the journal are held by their owners, not here.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from attrs import Factory, define, frozen

from raftmq.log.recent import RecentBudget
from raftmq.ports import Disk, File, TooManyFilesError


class FileCache:
    """Least recently used files by path."""

    def __init__(
        self,
        disk: Disk,
        files_max: int = 1024,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        """`lock` guards it where logs are opened in threads."""
        assert files_max >= 1
        self._lock = lock or nullcontext()
        self.disk = disk
        self.files_max = files_max
        self._files: OrderedDict[str, File] = OrderedDict()

    def __len__(self) -> int:
        return len(self._files)

    def get(self, path: str) -> File:
        """The open file of that path.

        Raises:
            FileNotFoundError: it does not exist.
            DiskError: it cannot be opened.
        """
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                self._files.move_to_end(path)
                return file
        file = self.open(path)
        self.put(path, file)
        return file

    def open(self, path: str, *, create: bool = False) -> File:
        """Open a file that its owner keeps; where descriptors are short, others are let go first.

        Raises:
            FileNotFoundError: absent and not `create`.
            TooManyFilesError: no descriptor is left even so.
            DiskError: it cannot be opened.
        """
        try:
            return self.disk.open(path, create=create)
        except TooManyFilesError:
            if not self._let_go():
                raise
        return self.disk.open(path, create=create)

    def made(self, path: str) -> File:
        """The open file of that path, made where it does not exist.

        Raises:
            DiskError: it cannot be opened.
        """
        try:
            return self.get(path)
        except FileNotFoundError:
            file = self.open(path, create=True)
            self.put(path, file)
            return file

    def _let_go(self) -> int:
        """Forget the longest unused half; returns how many files that were."""
        with self._lock:
            count = -(-len(self._files) // 2)
            for _ in range(count):
                self._files.popitem(last=False)
        return count

    def put(self, path: str, file: File) -> None:
        """Remember a file that is open already."""
        with self._lock:
            self._files[path] = file
            self._files.move_to_end(path)
            while len(self._files) > self.files_max:
                self._files.popitem(last=False)

    def forget(self, path: str) -> None:
        """Drop the file: it was removed, replaced or renamed."""
        with self._lock:
            self._files.pop(path, None)


@define(slots=True, eq=False)
class Table:
    """Loaded entries of one index: two columns in ascending order."""

    keys: array[int]
    values: array[int]

    @property
    def size_bytes(self) -> int:
        """What both columns take."""
        return len(self.keys) * (self.keys.itemsize + self.values.itemsize)


class IndexCache:
    """Loaded index entries of all logs, the least recently used dropped first."""

    def __init__(
        self, bytes_max: int = 64 << 20, lock: AbstractContextManager[Any] | None = None
    ) -> None:
        """`lock` guards it where logs are opened in threads."""
        self._lock = lock or nullcontext()
        self.bytes_max = bytes_max
        self.used_bytes = 0
        self._tables: OrderedDict[str, Table] = OrderedDict()

    def get(self, path: str) -> Table | None:
        """The loaded entries of that index."""
        with self._lock:
            table = self._tables.get(path)
            if table is not None:
                self._tables.move_to_end(path)
            return table

    def put(self, path: str, table: Table) -> None:
        """Remember loaded entries."""
        with self._lock:
            self._forget(path)
            self._tables[path] = table
            self.used_bytes += table.size_bytes
            while self.used_bytes > self.bytes_max and len(self._tables) > 1:
                _, dropped = self._tables.popitem(last=False)
                self.used_bytes -= dropped.size_bytes

    def forget(self, path: str) -> None:
        """Drop the entries of an index that changed or went."""
        with self._lock:
            self._forget(path)

    def _forget(self, path: str) -> None:
        table = self._tables.pop(path, None)
        if table is not None:
            self.used_bytes -= table.size_bytes


class LogWatch:
    """What happened to the files of all logs: counts, and a listener that is called each time."""

    __slots__ = ("damages_found", "damages_repaired", "on_event", "segments_rolled")

    def __init__(self) -> None:
        self.segments_rolled = 0
        self.damages_found = 0
        self.damages_repaired = 0
        self.on_event: Callable[[str, str, int, int], None] | None = None
        """Called with "rolled", "damaged" or "repaired", the segment's path and an offset range."""

    def rolled(self, path: str, base_offset: int) -> None:
        """Count a segment that was begun."""
        self.segments_rolled += 1
        self._tell("rolled", path, base_offset, base_offset)

    def damaged(self, path: str, start: int, end: int) -> None:
        """Count damage that was not known."""
        self.damages_found += 1
        self._tell("damaged", path, start, end)

    def repaired(self, path: str, start: int, end: int) -> None:
        """Count damage that was repaired from a peer."""
        self.damages_repaired += 1
        self._tell("repaired", path, start, end)

    def _tell(self, what: str, path: str, start: int, end: int) -> None:
        if self.on_event is not None:
            self.on_event(what, path, start, end)


class LoopShare:
    """How much of the loop's time the moves of all log starts may take: a share of it, and a burst
    at most. Each writes and syncs a small file, and thousands may be due together."""

    __slots__ = ("_free_at_ms",)

    SHARE: Final = 0.25
    BURST_MS: Final = 40.0

    def __init__(self) -> None:
        self._free_at_ms = 0.0  # until then the time that was taken lately is paid off

    def is_free(self, now_ms: float) -> bool:
        """True when another move may begin."""
        return self._free_at_ms <= now_ms

    def spend(self, began_ms: float, ended_ms: float) -> None:
        """Charge the time that a move, or a part of one, took."""
        paid_ms = max(self._free_at_ms, began_ms - self.BURST_MS)
        self._free_at_ms = paid_ms + (ended_ms - began_ms) / self.SHARE


@frozen(slots=True)
class Shared:
    """Open files, loaded indexes and recent batches, each bounded; the watch over the files; and
    the loop's time for moves of log starts."""

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
