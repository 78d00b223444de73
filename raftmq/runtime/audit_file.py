"""The audit file: lines are handed over by the loop, and written by a thread of its own.

The loop never waits: what it hands over is kept in memory, up to a bound, until the thread has
written it, and beyond the bound a line is refused, which whoever hands it over counts. A disk that
is full or does not answer holds up this thread alone; it tries again each second, with the lines
that it has. A line is written whole or, after a failure in the middle, again from its beginning
on a line of its own.

Before each writing the thread looks whether the file was moved or removed, and makes a new one at
its path then (logrotate without copytruncate); so it does when it is asked to. A file is for the
node's own user alone (0600), also one that was there before. Lines reach the kernel soon, and the
disk when the kernel sees fit: a process that is killed loses those of a moment, a power failure
those of the last half minute.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import deque
from pathlib import Path
from typing import Final

from raftmq.config import ConfigError

QUEUE_BYTES_MAX: Final = 4 << 20
AGAIN_S: Final = 1.0
CLOSE_S: Final = 2.0
"""How long the end of a node waits for the last lines."""
WRITE_BYTES_MAX: Final = 256 << 10
MODE: Final = 0o600
_FLAGS: Final = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK


class AuditFile:
    """One file, open from the beginning on."""

    def __init__(self, path: Path, *, queue_bytes_max: int = QUEUE_BYTES_MAX) -> None:
        """Open it, or make it.

        Raises:
            ConfigError: it cannot be; it says why.
        """
        self.path = path
        self._queue_bytes_max = queue_bytes_max
        self._lines: deque[bytes] = deque()
        self._bytes = 0  # of all that is not written yet
        self._changed = threading.Condition()
        self._must_reopen = False
        self._is_closing = False
        self._failure = ""
        self._is_torn = False
        try:
            self._descriptor = self._open()
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError(f"key 'audit_file': {path}: {why}") from None
        self._thread = threading.Thread(target=self._run, name="raftmq-audit", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str:
        """Why it cannot be written at the moment; "" while it can."""
        return self._failure

    def write(self, line: bytes) -> bool:
        """Have a line written, with its end; False where too many wait already."""
        with self._changed:
            if self._bytes + len(line) > self._queue_bytes_max or self._is_closing:
                return False
            self._bytes += len(line)
            self._lines.append(line)
            self._changed.notify()
        return True

    def reopen(self) -> None:
        """Open the file at the path anew, before the next line."""
        with self._changed:
            self._must_reopen = True
            self._changed.notify()

    def close(self) -> int:
        """Write what waits, within a bound of time, and take no more; how many bytes were not."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(CLOSE_S)
        return self._bytes

    # ---- the thread ----

    def _run(self) -> None:
        taken: list[bytes] = []
        while True:
            with self._changed:
                while not (taken or self._lines or self._is_closing or self._must_reopen):
                    self._changed.wait()
                size = sum(map(len, taken))
                while self._lines and size < WRITE_BYTES_MAX:
                    size += len(self._lines[0])
                    taken.append(self._lines.popleft())
                is_last = self._is_closing and not self._lines
            try:
                self._follow()
                self._write_all(taken)
            except OSError as error:
                self._failure = error.strerror or str(error)
                with self._changed:
                    if not self._is_closing:
                        self._changed.wait(AGAIN_S)
                    is_last = self._is_closing
            else:
                self._failure = ""
            if is_last:
                os.close(self._descriptor)
                return

    def _follow(self) -> None:
        """Open the file anew if it was moved, or if somebody asked for it."""
        with self._changed:
            must_reopen, self._must_reopen = self._must_reopen, False
        if not must_reopen:
            own = os.fstat(self._descriptor)
            try:
                found = os.stat(self.path)
            except FileNotFoundError:
                must_reopen = True
            else:
                must_reopen = (found.st_dev, found.st_ino) != (own.st_dev, own.st_ino)
        if must_reopen:
            try:
                descriptor = self._open()
            except OSError:
                self._must_reopen = True
                raise
            os.close(self._descriptor)
            self._descriptor = descriptor

    def _open(self) -> int:
        descriptor = os.open(self.path, _FLAGS, MODE)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(0, "not a regular file")
            if stat.S_IMODE(found.st_mode) & ~MODE:
                os.fchmod(descriptor, MODE)
            end = found.st_size
            self._is_torn = end > 0 and os.pread(descriptor, 1, end - 1) != b"\n"
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _write_all(self, taken: list[bytes]) -> None:
        """Write these lines, and take out of the list what was."""
        if not taken:
            return
        head = b"\n" if self._is_torn else b""
        data = memoryview(head + b"".join(taken))
        done = 0
        try:
            while done < len(data):
                done += os.write(self._descriptor, data[done:])
        finally:
            if done:
                self._take_out(taken, done - len(head))

    def _take_out(self, taken: list[bytes], done: int) -> None:
        """So many bytes were written: whole lines, and perhaps a part of the next one."""
        written = count = 0
        for line in taken:
            if written + len(line) > done:
                break
            written += len(line)
            count += 1
        self._is_torn = done > written
        del taken[:count]
        with self._changed:
            self._bytes -= written
