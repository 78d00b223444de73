"""Replace a small file so that a crash or a power loss leaves the old content or the new one.

A rename alone is not enough: after a power loss the new name may stand for a file whose bytes never
left memory. So the bytes are synced before the rename and the folder after it. Everything that
replaces a whole file goes through here, or says in `tests/test_durable_files.py` why it cannot.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from raftmq.ports import Disk, DiskError, File
from raftmq.types import Buffer


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
        return  # the error that is under way says more; the next replacement overwrites it
