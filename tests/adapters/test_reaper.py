"""Large files are unlinked at once and closed elsewhere."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from raftmq.adapters import reaper
from raftmq.adapters.disk import RealDisk
from raftmq.adapters.reaper import REAP_BYTES_MIN, Reaper


def sparse(path: Path, size: int) -> str:
    with path.open("wb") as file:
        file.truncate(size)
    return str(path)


def test_a_large_file_is_closed_in_the_reapers_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = threading.Event()
    where: list[str] = []
    close = os.close

    def noted(fd: int) -> None:
        close(fd)
        where.append(threading.current_thread().name)
        closed.set()

    made = Reaper()
    path = sparse(tmp_path / "large", REAP_BYTES_MIN)
    monkeypatch.setattr(reaper.os, "close", noted)
    made.unlink(path)
    assert not os.path.exists(path)
    assert closed.wait(5)
    assert where == ["reaper"]
    assert made.files_count == 1


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

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(reaper.os, "unlink", refuse)
        with pytest.raises(PermissionError):
            Reaper().unlink(path)
    assert len(os.listdir("/proc/self/fd")) == before
    RealDisk().remove(path)
    RealDisk().remove(path)
    assert os.listdir(tmp_path) == []
