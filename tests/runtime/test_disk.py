"""The real disk: what the simulated one cannot tell."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raftmq.ports import DiskError
from raftmq.runtime.disk import RealDisk

LONG_AGO_NS = 1_000_000_000


def test_reading_leaves_the_access_time_alone(tmp_path: Path) -> None:
    """An idle node scrubs its logs, and must not write to the disk for it."""
    path = tmp_path / "0.log"
    path.write_bytes(b"records")
    os.utime(path, ns=(LONG_AGO_NS, path.stat().st_mtime_ns))
    file = RealDisk().open(str(path))
    assert file.pread(7, 0) == b"records"
    assert path.stat().st_atime_ns == LONG_AGO_NS


def test_a_file_of_another_owner_opens_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "0.log"
    path.write_bytes(b"records")
    real_open = os.open

    def refusing(name: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_NOATIME:
            raise PermissionError(1, "Operation not permitted", name)
        return real_open(name, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    assert RealDisk().open(str(path)).pread(7, 0) == b"records"


def test_a_disk_to_look_at_is_not_written(tmp_path: Path) -> None:
    """As on a file system that is mounted read-only, or of a backup."""
    path = tmp_path / "segment"
    path.write_bytes(b"records")
    path.chmod(0o444)
    file = RealDisk(is_read_only=True).open(str(path))
    assert file.pread(7, 0) == b"records"
    with pytest.raises(DiskError):
        file.pwrite(b"x", 0)
    file.close()


def test_what_is_made_is_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        disk = RealDisk()
        disk.make_directories(f"{tmp_path}/a/b")
        disk.open(f"{tmp_path}/a/b/0.log", create=True)
    finally:
        os.umask(before)
    made = [tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "0.log"]
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700, 0o700, 0o600]
