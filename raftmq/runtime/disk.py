"""The real disk: `ports.Disk` over os calls.

It owns descriptors and the translation of errno into `DiskFullError` and `DiskError`, and decides
nothing. Names are made durable only where `ports` says so (`make_directories`, `remove_tree`,
`sync_directory`). A file closes its descriptor when the last reference to it goes, so a span that
is being sent keeps its bytes although the log has dropped or replaced the file.

The last close of an unlinked file lets the kernel drop its pages and blocks: a tenth of a second
for a quarter of a gigabyte, a second and more where the disk is still writing them, in which no
heartbeat would leave. So a large file is held open while it is unlinked, and its last close is left
to the reaper's thread. Where no thread can be started, it is closed at once.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Final, NoReturn

from raftmq.ports import DiskError, DiskFullError, File, TooManyFilesError
from raftmq.types import Buffer

REAP_BYTES_MIN: Final = 4 << 20
"""Smaller files are closed in less time than a hand-over takes."""


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
        """Begin the thread; where the system has none left, callers close large files."""
        if self._thread is not None:
            return
        # A daemon: the kernel closes what is left when the process ends.
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
        return None  # no descriptor is left, for example: then it is removed here and now


_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE)
_PIECES_MAX: Final = 1024  # IOV_MAX of Linux
_NOWAIT: Final = getattr(os, "RWF_NOWAIT", 0)
_CANNOT_TELL: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_PROBE: Final = (bytearray(1),)  # a read into it is only a question, its byte is not used
_PROBE_STRIDE: Final = 128 << 10  # what the kernel reads ahead by itself


class RefusedWrites:
    """How often this process met a full disk."""

    count = 0


DISK_FULL: Final = RefusedWrites()


def _open_quietly(path: str, flags: int) -> int:
    """Open so that reading writes nothing: access times would make an idle scrub dirty inodes."""
    try:
        return os.open(path, flags | getattr(os, "O_NOATIME", 0), 0o600)
    except PermissionError:
        return os.open(path, flags, 0o600)  # O_NOATIME is for the file's owner only


def _refuse(error: OSError, path: str, verb: str) -> NoReturn:
    kind = DiskFullError if error.errno in _NO_SPACE else DiskError
    if error.errno in _NO_DESCRIPTORS:
        kind = TooManyFilesError
    DISK_FULL.count += kind is DiskFullError
    raise kind(f"cannot {verb} {path}: {error.strerror}") from error


class RealFile:
    """One open descriptor. Reads, writes and `fdatasync` may run in different threads."""

    __slots__ = ("_fd", "_reaper", "path")

    def __init__(self, path: str, fd: int, reaper: Reaper) -> None:
        self.path = path
        self._fd = fd
        self._reaper = reaper

    def pread(self, size: int, position: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the file."""
        try:
            data = os.pread(self._fd, size, position)
            if len(data) == size or not data:
                return data
            pieces = [data]
            have = len(data)
            while have < size:  # Linux reads at most 2 GiB at once
                data = os.pread(self._fd, size - have, position + have)
                if not data:
                    break
                pieces.append(data)
                have += len(data)
            return b"".join(pieces)
        except OSError as error:
            _refuse(error, self.path, "read")

    def pwrite(self, data: Buffer, position: int) -> None:
        """Write all of `data`; durable only after `fdatasync`."""
        try:
            written = os.pwrite(self._fd, data, position)
            if written != len(data):
                view = memoryview(data)
                while written < len(view):
                    written += os.pwrite(self._fd, view[written:], position + written)
        except OSError as error:
            _refuse(error, self.path, "write")

    def pwritev(self, pieces: Sequence[Buffer], position: int) -> None:
        """Write all pieces one after the other."""
        for start in range(0, len(pieces), _PIECES_MAX):
            part = pieces[start : start + _PIECES_MAX]
            size = sum(map(len, part))
            try:
                written = os.pwritev(self._fd, part, position)
            except OSError as error:
                _refuse(error, self.path, "write")
            if written != size:
                self.pwrite(b"".join(part)[written:], position + written)
            position += size

    def size(self) -> int:
        """Bytes in the file."""
        try:
            return os.fstat(self._fd).st_size
        except OSError as error:
            _refuse(error, self.path, "stat")

    def truncate(self, size: int) -> None:
        """Cut or extend the file."""
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            _refuse(error, self.path, "truncate")

    def allocate(self, size: int) -> None:
        """Reserve blocks up to `size` bytes."""
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            _refuse(error, self.path, "allocate")

    def fdatasync(self) -> None:
        """Make written bytes and size durable. May run in another thread."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            # Never a DiskFullError, and never retried: the kernel has dropped the dirty pages
            # (delayed allocation reports ENOSPC here too).
            raise DiskError(f"cannot sync {self.path}: {error.strerror}") from error

    def is_cached(self, position: int, size: int) -> bool:
        """True when these bytes are in the page cache: the last one, and one in each stretch before
        it. Where the file system cannot tell, they count as cached."""
        if not _NOWAIT:
            return True
        at = position + size - 1
        try:
            while at > position:
                os.preadv(self._fd, _PROBE, at, _NOWAIT)
                at -= _PROBE_STRIDE
            if size:
                os.preadv(self._fd, _PROBE, position, _NOWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _CANNOT_TELL:
                return True
            _refuse(error, self.path, "read")
        return True

    def fileno(self) -> int:
        """The descriptor, for sendfile."""
        return self._fd

    def close(self) -> None:
        """Give the descriptor back; twice is harmless."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._reaper.close(fd)

    def __del__(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._reaper.finalize(fd)


class RealDisk:
    """The machine's file system; for tools that only look, also one mounted read-only."""

    def __init__(self, *, is_read_only: bool = False) -> None:
        self._reaper = Reaper()
        self._access = os.O_RDONLY if is_read_only else os.O_RDWR

    def start_reaper(self) -> None:
        """Close large files in a thread from now on, wherever their last reference is dropped."""
        self._reaper.start()

    def open(self, path: str, *, create: bool = False) -> File:
        """Open for reading, and for writing unless the disk is read-only.

        Raises:
            FileNotFoundError: absent and not `create`.
        """
        flags = self._access | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        try:
            return RealFile(path, _open_quietly(path, flags), self._reaper)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not create:
                raise
            _refuse(error, path, "open")

    def exists(self, path: str) -> bool:
        """True for a file or folder of that name."""
        return os.path.exists(path)

    def list(self, path: str) -> list[str]:
        """Names in a folder, sorted; empty when the folder is absent."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []
        except OSError as error:
            _refuse(error, path, "list")

    def make_directories(self, path: str) -> None:
        """Create a folder and its parents; durable on return."""
        missing = []
        while path and not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for folder in reversed(missing):
            try:
                os.mkdir(folder, 0o700)
            except FileExistsError:
                pass  # another task was faster; the parent is synced all the same
            except OSError as error:
                _refuse(error, folder, "create")
            self.sync_directory(os.path.dirname(folder) or ".")

    def rename(self, source: str, target: str) -> None:
        """Replace `target` atomically; durable after `sync_directory`."""
        try:
            os.rename(source, target)
        except OSError as error:
            _refuse(error, source, "rename")

    def remove(self, path: str) -> None:
        """Unlink a file that may be absent; durable after `sync_directory`."""
        try:
            self._reaper.unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:
            _refuse(error, path, "remove")

    def remove_tree(self, path: str) -> None:
        """Remove a folder and all in it, and sync its parent."""
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            return
        except OSError as error:
            _refuse(error, path, "remove")
        self.sync_directory(os.path.dirname(path) or ".")

    def sync_directory(self, path: str) -> None:
        """Make the names in a folder durable."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise DiskError(f"cannot sync {path}: {error.strerror}") from error
