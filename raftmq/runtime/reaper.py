"""Files that are gone by name give their space back in a thread.

The last close of an unlinked file lets the kernel drop its pages and blocks: a tenth of a second
for a quarter of a gigabyte, a second and more where the disk is still writing them, in which no
heartbeat would leave. So whoever unlinks a large file holds it open meanwhile and leaves the close
to this thread, and so does whoever closes one that has no name any more. Owns descriptors handed
over, nothing else; closing one that was only read, or whose file is gone by name, cannot lose
anything.

Giving back needs nothing: without a thread, because none can be started or the interpreter is on
its way out, the close is made where it is asked for. A finalizer never starts one: it may run
within the lock of another start, and at the interpreter's end the start would wait for ever.
"""

from __future__ import annotations

import os
from queue import SimpleQueue
from threading import Thread
from typing import Final

REAP_BYTES_MIN: Final = 4 << 20
"""Smaller files are gone in less time than a hand-over takes."""


class Reaper:
    """One thread, begun by `start`, or with the first large file that is unlinked or closed."""

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

    def start(self) -> None:
        """Begin the thread, unless the system has none left; what is large is then closed here."""
        if self._thread is not None:
            return
        # A daemon: what it has not closed when the process ends, the kernel closes.
        thread = Thread(target=self._work, name="reaper", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return  # no thread can be started; the next file tries again
        self._thread = thread

    def close(self, fd: int) -> None:
        """Give a descriptor back now, or soon if its file is large and has no name any more."""
        if _is_large_and_nameless(fd):
            self.start()
        self.finalize(fd)

    def finalize(self, fd: int) -> None:
        """As `close`, for finalizers: starts no thread."""
        if self._thread is not None and _is_large_and_nameless(fd):
            self.files_count += 1
            self._queue.put(fd)
        else:
            os.close(fd)

    def _work(self) -> None:
        while True:
            os.close(self._queue.get())


def _is_large_and_nameless(fd: int) -> bool:
    status = os.fstat(fd)
    return status.st_nlink == 0 and status.st_size >= REAP_BYTES_MIN


def _held(path: str) -> int | None:
    """A descriptor that keeps a file for a moment; None without any."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None  # no descriptor is left, say: then it is removed here and now
