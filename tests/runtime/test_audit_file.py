"""The audit file: written by a thread, made anew when it was moved, bounded while it cannot be."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from raftmq.config import ConfigError
from raftmq.runtime import audit_file
from raftmq.runtime.audit_file import AuditFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def eventually(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end_s
        threading.Event().wait(0.005)


def holds(path: Path, text: bytes) -> Callable[[], bool]:
    return lambda: path.exists() and path.read_bytes() == text


def test_lines_are_written_in_order(path: Path) -> None:
    path.write_bytes(b"before\n")
    file = AuditFile(path)
    for number in range(1_000):
        assert file.write(b"%d\n" % number)
    assert file.close() == 0
    assert path.read_bytes() == b"before\n" + b"".join(b"%d\n" % n for n in range(1_000))
    assert not file.write(b"late\n")


@pytest.mark.parametrize("mode", [None, 0o644])
def test_it_is_for_its_user_alone(path: Path, mode: int | None) -> None:
    if mode is not None:
        path.touch()
        path.chmod(mode)
    before = os.umask(0)
    try:
        AuditFile(path).close()
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_was_moved_is_made_anew(path: Path) -> None:
    file = AuditFile(path)
    file.write(b"one\n")
    eventually(holds(path, b"one\n"))
    old = path.with_suffix(".1")
    path.rename(old)
    file.write(b"two\n")
    eventually(holds(path, b"two\n"))
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    file.write(b"three\n")
    eventually(holds(path, b"three\n"))
    path.rename(path.with_suffix(".2"))
    file.reopen()
    eventually(holds(path, b""))
    assert file.close() == 0
    assert old.read_bytes() == b"one\n"


def test_a_line_that_a_crash_cut_off_ends_where_it_was_cut(path: Path) -> None:
    path.write_bytes(b'{"at"')
    file = AuditFile(path)
    file.write(b"one\n")
    file.close()
    assert path.read_bytes() == b'{"at"\none\n'


def test_what_cannot_be_written_waits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_file, "AGAIN_S", 0.01)
    is_full = True
    write = os.write

    def write_some(descriptor: int, data: memoryview) -> int:
        if is_full:
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr("raftmq.runtime.audit_file.os.write", write_some)
    file = AuditFile(path, queue_bytes_max=20)
    assert file.write(b"one\n")
    eventually(lambda: bool(file.failure))
    assert file.failure == "No space left on device"
    assert file.write(b"two\n")
    assert not file.write(b"x" * 13), "beyond the bound"
    is_full = False
    eventually(lambda: file.failure == "")
    assert file.close() == 0
    assert path.read_bytes() == b"one\ntwo\n"


def test_a_torn_line_is_written_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_file, "AGAIN_S", 0.01)
    fails = [2]
    write = os.write

    def write_some(descriptor: int, data: memoryview) -> int:
        if fails:
            if fails.pop() == 1:
                raise OSError(28, "No space left on device")
            fails.append(1)
            return write(descriptor, data[:2])
        return write(descriptor, data)

    monkeypatch.setattr("raftmq.runtime.audit_file.os.write", write_some)
    file = AuditFile(path)
    file.write(b"one\n")
    eventually(holds(path, b"on\none\n"))
    assert file.close() == 0


def test_memory_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = threading.Event()
    write = os.write

    def write_late(descriptor: int, data: memoryview) -> int:
        hold.wait(20)
        return write(descriptor, data)

    monkeypatch.setattr("raftmq.runtime.audit_file.os.write", write_late)
    file = AuditFile(path, queue_bytes_max=100)
    taken = sum(file.write(b"x" * 9 + b"\n") for _ in range(50))
    assert taken == 10
    hold.set()
    eventually(lambda: file.write(b"y\n"))
    assert file.close() == 0
    assert path.read_bytes() == (b"x" * 9 + b"\n") * 10 + b"y\n"


def test_a_disk_that_does_not_answer_does_not_hold_up_the_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_file, "CLOSE_S", 0.01)
    hold = threading.Event()

    def never(_descriptor: int, data: memoryview) -> int:
        hold.wait(20)
        return len(data)

    monkeypatch.setattr("raftmq.runtime.audit_file.os.write", never)
    file = AuditFile(path)
    file.write(b"lost\n")
    assert file.close() == 5
    hold.set()
    file._thread.join(20)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"key 'audit_file': .*no/such: No such file"):
        AuditFile(tmp_path / "no" / "such")
    with pytest.raises(ConfigError, match="Is a directory"):
        AuditFile(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="not a regular file"):
        AuditFile(tmp_path / "fifo")
