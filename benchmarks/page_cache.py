"""Put the logs of a cluster on this machine out of the page cache, so that reads meet the disk."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def logs_of(pids: Iterable[int], topic: str) -> set[Path]:
    """The log files of a topic, found by the folders in which these processes hold files open.

    Raises:
        PermissionError: the processes are someone else's.
    """
    folders: set[Path] = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                path = Path(os.readlink(link))
            except FileNotFoundError:
                continue  # closed meanwhile
            if topic in str(path.parent) and path.parent.is_dir():
                folders.add(path.parent)
    return {path for folder in folders for path in folder.glob("*.log")}


def forget(paths: Iterable[Path]) -> None:
    """What of these files is on disk leaves the page cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
