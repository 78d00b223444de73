"""Files that are gone by name give their space back in a thread.

The last close of an unlinked file lets the kernel drop its pages and blocks: a tenth of a second
for a quarter of a gigabyte, a second and more where the disk is still writing them, in which no
heartbeat would leave. So whoever unlinks a large file holds it open meanwhile and leaves the close
to this thread, and so does whoever closes one that has no name any more. Owns descriptors handed
over, nothing else; closing one that was only read, or whose file is gone by name, cannot lose
anything.
"""

from __future__ import annotations

import os
from queue import SimpleQueue
from threading import Thread
from typing import Final

REAP_BYTES_MIN: Final = 4 << 20
"""Smaller files are gone in less time than a hand-over takes."""


class Reaper:
    """One thread, begun with the first file."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[int] = SimpleQueue()
        self._thread: Thread | None = None
        self.files_count = 0

    def unlink(self, path: str) -> None:
        """Remove a name now, and the bytes behind it soon.

        Raises:
            OSError: as `os.unlink`; the name is still there.
        """
        fd = _held(path)
        try:
            os.unlink(path)
        finally:
            if fd is not None:
                self.close(fd)

    def close(self, fd: int) -> None:
        """Give a descriptor back now, or soon if its file is large and has no name any more."""
        status = os.fstat(fd)
        if status.st_nlink == 0 and status.st_size >= REAP_BYTES_MIN:
            self._take(fd)
        else:
            os.close(fd)

    def _take(self, fd: int) -> None:
        self.files_count += 1
        self._queue.put(fd)
        if self._thread is None:
            # A daemon: what it has not closed when the process ends, the kernel closes.
            self._thread = Thread(target=self._work, name="reaper", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            os.close(self._queue.get())


def _held(path: str) -> int | None:
    """A descriptor that keeps a file for a moment; None without any."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None  # no descriptor is left, say: then it is removed here and now
