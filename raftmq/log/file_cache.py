"""Open files of closed segments and indexes, bounded over all logs of a process.

The least recently used file is forgotten when there are too many. Forgetting drops a reference and
never closes by force: whoever still sends from the file keeps its descriptor until done. Active
segments, bare entries and the journal are held by their owners, not here.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from typing import Any

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

    def _let_go(self) -> int:
        """Forget the longest unused half; how many that were."""
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
