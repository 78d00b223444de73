"""Large files are unlinked at once and closed elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from raftmq.runtime import disk as real_disk
from raftmq.runtime.disk import REAP_BYTES_MIN, RealDisk, Reaper


def sparse(path: Path, size: int) -> str:
    with path.open("wb") as file:
        file.truncate(size)
    return str(path)


def is_open(path: str) -> bool:
    """Whether a descriptor of this process is of that file; other threads have theirs."""
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{fd}") == path:
                return True
    return False


class Closes:
    """In which threads descriptors are closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self._close = os.close
        self._one = threading.Semaphore(0)
        monkeypatch.setattr(real_disk.os, "close", self._noted)

    def _noted(self, fd: int) -> None:
        self._close(fd)
        self.threads.append(threading.current_thread().name)
        self._one.release()

    def next(self) -> str:
        assert self._one.acquire(timeout=30)
        return self.threads[-1]


@pytest.fixture
def closes(monkeypatch: pytest.MonkeyPatch) -> Closes:
    return Closes(monkeypatch)


def test_a_large_file_is_closed_in_the_reapers_thread(tmp_path: Path, closes: Closes) -> None:
    made = Reaper()
    path = sparse(tmp_path / "large", REAP_BYTES_MIN)
    made.unlink(path)
    assert not os.path.exists(path)
    assert closes.next() == "reaper"
    assert made.files_count == 1


def test_the_last_close_of_a_large_file_without_a_name_is_the_reapers(
    tmp_path: Path, closes: Closes
) -> None:
    here = threading.current_thread().name
    disk = RealDisk()
    large = sparse(tmp_path / "large", REAP_BYTES_MIN)
    file = disk.open(large)
    other = disk.open(large)
    small = disk.open(str(tmp_path / "small"), create=True)
    other.close()
    assert closes.next() == here
    os.unlink(small.path)
    os.unlink(large)
    small.close()
    assert closes.next() == here
    file.close()
    assert closes.next() == "reaper"
    file.close()
    assert closes.threads == [here, here, "reaper"]


def test_a_small_file_starts_no_thread(tmp_path: Path) -> None:
    made = Reaper()
    made.unlink(sparse(tmp_path / "small", REAP_BYTES_MIN - 1))
    assert os.listdir(tmp_path) == []
    assert made.files_count == 0
    assert made._thread is None


def test_what_cannot_be_unlinked_stays_and_costs_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sparse(tmp_path / "large", REAP_BYTES_MIN)

    def refuse(_path: str) -> None:
        raise PermissionError(13, "no")

    with monkeypatch.context() as patch:
        patch.setattr(real_disk.os, "unlink", refuse)
        with pytest.raises(PermissionError):
            Reaper().unlink(path)
    assert not is_open(path)
    RealDisk().remove(path)
    RealDisk().remove(path)
    assert os.listdir(tmp_path) == []


def dropped_without_a_name(disk: RealDisk, path: Path) -> None:
    """The last reference to a large file goes, and its name is gone already."""
    file = disk.open(sparse(path, REAP_BYTES_MIN))
    os.unlink(path)
    del file


def test_a_finalizer_starts_no_thread(tmp_path: Path, closes: Closes) -> None:
    disk = RealDisk()
    dropped_without_a_name(disk, tmp_path / "a")
    assert closes.next() == threading.current_thread().name
    disk.start_reaper()
    dropped_without_a_name(disk, tmp_path / "b")
    assert closes.next() == "reaper"


def test_giving_back_needs_no_thread(
    tmp_path: Path, closes: Closes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    Reaper().unlink(sparse(tmp_path / "large", REAP_BYTES_MIN))
    assert os.listdir(tmp_path) == []
    assert closes.next() == threading.current_thread().name


EXIT = """
import os, sys
from raftmq.runtime.disk import RealDisk
path, must_start = sys.argv[1:]
disk = RealDisk()
if must_start == "yes":
    disk.start_reaper()
file = disk.open(path)
os.unlink(path)
knot = [file]
knot.append(knot)
"""


@pytest.mark.parametrize("must_start", ["yes", "no"])
def test_the_interpreter_ends_with_a_large_file_open(tmp_path: Path, must_start: str) -> None:
    """Only the last collection finds it, when no thread can begin any more."""
    path = sparse(tmp_path / "large", REAP_BYTES_MIN)
    command = [sys.executable, "-c", EXIT, path, must_start]
    done = subprocess.run(command, timeout=20, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
