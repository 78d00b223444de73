"""What the deciding code needs of the outside world: clock, randomness, disk.

`runtime/` implements these for a real machine, `jepsen_like/` for the simulation; both pass the
same contract tests. A leaf module: no trio, no os.

Disk rules: a write reaches the page cache at once and is durable only after `fdatasync` of that
file; a created, renamed or removed name is durable only after `sync_directory` of its folder. That
holds for what a process meets as well: the one before it may have been killed in between.

`replace_file` keeps these rules where a small file is replaced: a crash or a power loss leaves the
old content or the new one. A rename alone is not enough: after a power loss the new name may stand
for a file whose bytes never left memory. So the bytes are synced before the rename and the folder
after it. Everything that replaces a whole file goes through here, or says in
`tests/test_durable_files.py` why it cannot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from raftmq.types import Buffer


class DiskError(Exception):
    """A disk operation failed: fatal to the replica (the journal: to the node), never retried."""


class DiskFullError(DiskError):
    """No space left (ENOSPC, EDQUOT): the write did not happen as a whole; space may come back."""


class TooManyFilesError(DiskFullError):
    """No descriptor is left to open a file with; as with a full disk they may come back."""


class Clock(Protocol):
    """Time. No clock is trusted for safety."""

    def monotonic_ms(self) -> float:
        """Milliseconds since some start; never goes back."""
        ...

    def wall_ms(self) -> int:
        """Milliseconds since the epoch (Kafka's timestamps); may jump."""
        ...


class File(Protocol):
    """One open file. Positions are bytes from its start."""

    path: str

    def pread(self, size: int, position: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the file.

        Raises:
            DiskError: the device failed.
        """
        ...

    def pwrite(self, data: Buffer, position: int) -> None:
        """Write all of `data`; durable only after `fdatasync`.

        Raises:
            DiskFullError: no space; a part may have been written.
            DiskError: the device failed.
        """
        ...

    def pwritev(self, pieces: Sequence[Buffer], position: int) -> None:
        """Write all pieces one after the other, as `pwrite`."""
        ...

    def size(self) -> int:
        """Bytes in the file."""
        ...

    def truncate(self, size: int) -> None:
        """Cut the file (or extend it with zeros) to `size` bytes; durable after `fdatasync`."""
        ...

    def allocate(self, size: int) -> None:
        """Reserve blocks up to `size` bytes, so that later writes below it cannot meet a full disk.

        The file's size becomes at least `size`; new bytes read as zeros.
        """
        ...

    def fdatasync(self) -> None:
        """Return once all written bytes and the size are on the device; may run in any thread."""
        ...

    def is_cached(self, position: int, size: int) -> bool:
        """True when reading these bytes would not wait for the device, as far as can be told."""
        ...

    def fileno(self) -> int:
        """The descriptor for sendfile; the simulation gives -1."""
        ...

    def close(self) -> None:
        """Give the descriptor back. Closing twice is harmless."""
        ...


class Span(Protocol):
    """Bytes of a file that are not changed any more; it keeps the file open."""

    @property
    def file(self) -> File: ...
    @property
    def position(self) -> int: ...
    @property
    def size(self) -> int: ...


class Disk(Protocol):
    """A folder tree. Paths are absolute or relative strings with `/`."""

    def open(self, path: str, *, create: bool = False) -> File:
        """Open for reading and writing.

        Raises:
            FileNotFoundError: absent and not `create`.
        """
        ...

    def exists(self, path: str) -> bool:
        """True for a file or folder of that name."""
        ...

    def list(self, path: str) -> list[str]:
        """Names in a folder, sorted; empty when the folder is absent."""
        ...

    def make_directories(self, path: str) -> None:
        """Create a folder and its parents; durable (parents synced) on return."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Replace `target` atomically; durable after `sync_directory`."""
        ...

    def remove(self, path: str) -> None:
        """Unlink a file; durable after `sync_directory`. Open descriptors go on working."""
        ...

    def remove_tree(self, path: str) -> None:
        """Remove a folder and all in it, and sync its parent."""
        ...

    def sync_directory(self, path: str) -> None:
        """Make the names in a folder durable."""
        ...


class Runnable(Protocol):
    """Work on what it captured, for any thread."""

    def run(self) -> None:
        """Do it.

        Raises:
            DiskError: the device failed.
        """
        ...


class Random(Protocol):
    """The part of `random.Random` that deciding code may use."""

    def random(self) -> float: ...
    def randrange(self, start: int, stop: int) -> int: ...
    def getrandbits(self, k: int) -> int: ...


class Buggify(Protocol):
    """Rarely taken branches made frequent in simulation; always False in production."""

    def __call__(self, site: str, /) -> bool: ...


def never(_site: str) -> bool:
    """The production `Buggify`."""
    return False


@contextmanager
def replacing(disk: Disk, path: str, temporary: str = "") -> Iterator[File]:
    """An empty file that takes the place of `path`, durably, once the block ended well.

    It stays open, for the caller to keep or to close. When the block fails, the old file is in
    place and the room of the new one is given back.

    Args:
        path: absolute, or relative to a folder that is named in it.
        temporary: its name meanwhile, in the same folder; by default `path` with `.tmp`. One that
            is left from a crash is overwritten.

    Raises:
        DiskError: the old one is in place; or, where the last sync failed, either of them.
    """
    temporary = temporary or f"{path}.tmp"
    file = disk.open(temporary, create=True)
    try:
        file.truncate(0)
        yield file
        file.fdatasync()
        disk.rename(temporary, path)
    except Exception:
        file.close()
        _discard(disk, temporary)
        raise
    disk.sync_directory(path.rpartition("/")[0])


def replace_file(disk: Disk, path: str, data: Buffer, temporary: str = "") -> None:
    """Give `path` this content, durably; readers see the old content or the new one.

    Raises:
        DiskError: as `replacing`.
    """
    with replacing(disk, path, temporary) as file:
        file.pwrite(data, 0)
    file.close()


def _discard(disk: Disk, temporary: str) -> None:
    try:
        disk.remove(temporary)
    except DiskError:
        return  # the first error says more; the next replacement overwrites the file
