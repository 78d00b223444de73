"""One contract for the real disk and the simulated one, then what only the simulation can do."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from jepsen_like.disk import CrashOdds, SimCrash, SimDisk
from jepsen_like.inode import SECTOR
from raftmq.log.shared import FileCache
from raftmq.ports import DiskError, DiskFullError, TooManyFilesError
from raftmq.runtime.disk import RealDisk
from tests.log.conftest import Place
from tests.log.helpers import sim_disk
from tests.tree import ROOT

KEEP = CrashOdds(lose=0, prefix=0, torn=0, sectors=0, names=0)
LOSE = CrashOdds(lose=1, names=1)


def test_absent_files(place: Place) -> None:
    with pytest.raises(FileNotFoundError):
        place.disk.open(f"{place.root}/a")
    assert not place.disk.exists(f"{place.root}/a")
    place.disk.remove(f"{place.root}/a")
    place.disk.remove_tree(f"{place.root}/b")
    assert place.disk.list(f"{place.root}/b") == []
    with pytest.raises(DiskError):
        place.disk.rename(f"{place.root}/a", f"{place.root}/b")


def test_write_and_read(place: Place) -> None:
    file = place.disk.open(f"{place.root}/a", create=True)
    file.pwrite(b"hello", 0)
    file.pwrite(memoryview(b"XYZ")[1:], 3)
    file.pwritev([b"one", bytearray(b"two"), memoryview(b"three")], 10)
    assert file.size() == 21
    assert file.pread(100, 0) == b"helYZ\0\0\0\0\0onetwothree"
    assert file.pread(3, 20) == b"e"
    assert file.pread(3, 50) == b""
    file.fdatasync()
    file.truncate(4)
    assert file.pread(100, 0) == b"helY"
    file.truncate(6)
    assert file.pread(100, 0) == b"helY\0\0"
    file.allocate(4096)
    assert file.size() == 4096
    assert file.pread(6, 0) == b"helY\0\0"
    file.allocate(10)
    assert file.size() == 4096
    file.close()
    file.close()


def test_what_was_just_written_is_in_memory(place: Place) -> None:
    file = place.disk.open(f"{place.root}/a", create=True)
    file.pwrite(bytes(300_000), 0)
    assert file.is_cached(0, 300_000)
    assert file.is_cached(299_999, 1)
    assert file.is_cached(5, 0)


def test_many_pieces(place: Place) -> None:
    file = place.disk.open(f"{place.root}/a", create=True)
    pieces = [bytes((n % 256,)) * (n % 5) for n in range(3000)]
    file.pwritev(pieces, 7)
    assert file.pread(1 << 20, 7) == b"".join(pieces)


def test_handles_share_a_file_and_outlive_its_name(place: Place) -> None:
    path = f"{place.root}/a"
    one = place.disk.open(path, create=True)
    two = place.disk.open(path)
    one.pwrite(b"x", 0)
    assert two.pread(1, 0) == b"x"
    place.disk.remove(path)
    place.disk.sync_directory(place.root)
    assert two.pread(1, 0) == b"x"
    with pytest.raises(FileNotFoundError):
        place.disk.open(path)


def test_rename_replaces(place: Place) -> None:
    for name in "ab":
        place.disk.open(f"{place.root}/{name}", create=True).pwrite(name.encode(), 0)
    old = place.disk.open(f"{place.root}/b")
    place.disk.rename(f"{place.root}/a", f"{place.root}/b")
    assert old.pread(1, 0) == b"b"
    assert place.disk.open(f"{place.root}/b").pread(1, 0) == b"a"
    assert place.disk.list(place.root) == ["b"]


def test_folders(place: Place) -> None:
    disk, root = place.disk, place.root
    disk.make_directories(f"{root}/x/y")
    disk.make_directories(f"{root}/x/y")
    disk.open(f"{root}/x/y/f", create=True).pwrite(b"1", 0)
    disk.open(f"{root}/x/e", create=True)
    assert disk.list(f"{root}/x") == ["e", "y"]
    assert disk.exists(f"{root}/x/y")
    disk.rename(f"{root}/x", f"{root}/z")
    assert disk.open(f"{root}/z/y/f").pread(1, 0) == b"1"
    disk.remove_tree(f"{root}/z")
    assert not disk.exists(f"{root}/z")
    assert disk.list(root) == []
    with pytest.raises(DiskError):
        disk.open(f"{root}/z/y/f", create=True)


# --- the real disk alone -------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize(
    ("call", "verb"),
    [
        ("pwrite", lambda f: f.pwrite(b"x", 0)),
        ("pwritev", lambda f: f.pwritev([b"x"], 0)),
        ("posix_fallocate", lambda f: f.allocate(10)),
        ("ftruncate", lambda f: f.truncate(1)),
        ("pread", lambda f: f.pread(1, 0)),
        ("fdatasync", lambda f: f.fdatasync()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errno_becomes_a_disk_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str, verb: object
) -> None:
    file = RealDisk().open(str(tmp_path / "a"), create=True)

    def fail(*_arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(DiskError) as caught:
        verb(file)  # type: ignore[operator]
    is_full = code != errno.EIO and call != "fdatasync"
    assert isinstance(caught.value, DiskFullError) == is_full


def test_size_of_a_closed_file(tmp_path: Path) -> None:
    file = RealDisk().open(str(tmp_path / "a"), create=True)
    file.close()
    with pytest.raises(DiskError):
        file.size()


def test_bytes_that_left_memory_are_told(tmp_path: Path) -> None:
    disk = RealDisk()
    file = disk.open(str(tmp_path / "a"), create=True)
    file.pwrite(os.urandom(4 << 20), 0)
    file.fdatasync()
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if file.is_cached(0, 4 << 20):
        pytest.skip("this file system cannot tell, or keeps everything")
    file.pread(4096, 0)
    assert file.is_cached(0, 4096)
    assert not file.is_cached(0, 4 << 20)
    file.pread(4 << 20, 0)
    assert file.is_cached(0, 4 << 20)


def suffer_a_shortage(root: Path) -> None:
    """Open files while hardly any descriptor is free."""
    disk = RealDisk()
    for name in "abc":
        disk.open(str(root / name), create=True).close()
    taken = [os.open(root, os.O_RDONLY) for _ in range(20)]
    files = FileCache(disk, 10)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1, hard))
    for descriptor in (taken.pop(), taken.pop()):
        os.close(descriptor)
    assert [files.get(str(root / name)).size() for name in "abc"] == [0, 0, 0]
    assert len(files) == 2, "one was let go for the third"
    kept = [files.open(str(root / name)) for name in "ab"]
    with pytest.raises(TooManyFilesError, match="cannot open"):
        files.open(str(root / "c"), create=True)
    assert len(files) == 0
    kept.pop()
    assert files.get(str(root / "c")).size() == 0


def test_a_shortage_of_descriptors_may_pass(tmp_path: Path) -> None:
    """In a process of its own: what other tests left open may be closed at any moment."""
    code = f"""
from pathlib import Path
from {__name__} import suffer_a_shortage
suffer_a_shortage(Path({str(tmp_path)!r}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_file_system_that_cannot_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RealDisk().open(str(tmp_path / "a"), create=True)
    code = errno.EOPNOTSUPP

    def preadv(*_args: object) -> int:
        raise OSError(code, "as told")

    monkeypatch.setattr(os, "preadv", preadv)
    assert file.is_cached(0, 10)
    code = errno.EIO
    with pytest.raises(DiskError):
        file.is_cached(0, 10)
    monkeypatch.setattr("raftmq.runtime.disk._NOWAIT", 0)
    assert file.is_cached(0, 10)


def test_short_writes_and_reads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RealDisk().open(str(tmp_path / "a"), create=True)
    pwrite, pread = os.pwrite, os.pread
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, bytes(data)[:2], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, data, at: pwrite(fd, b"".join(data)[:3], at))
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 3), at))
    file.pwrite(b"abcdefg", 0)
    file.pwritev([b"hi", b"jklm"], 7)
    assert file.pread(13, 0) == b"abcdefghijklm"
    assert file.pread(99, 0) == b"abcdefghijklm"


@pytest.mark.parametrize(
    ("call", "verb"),
    [
        ("open", lambda d, r: d.open(f"{r}/a", create=True)),
        ("open", lambda d, r: d.sync_directory(r)),
        ("fsync", lambda d, r: d.sync_directory(r)),
        ("mkdir", lambda d, r: d.make_directories(f"{r}/q")),
        ("unlink", lambda d, r: d.remove(f"{r}/a")),
        ("listdir", lambda d, r: d.list(r)),
        ("rename", lambda d, r: d.rename(f"{r}/a", f"{r}/b")),
    ],
)
def test_folder_operations_fail_as_disk_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, verb: object
) -> None:
    def fail(*_arguments: object, **_more: object) -> None:
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(DiskError):
        verb(RealDisk(), str(tmp_path))  # type: ignore[operator]


def test_remove_tree_of_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    with pytest.raises(DiskError):
        RealDisk().remove_tree(str(tmp_path / "a"))


def test_a_folder_that_appears_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = os.mkdir

    def race(path: str, mode: int) -> None:
        mkdir(path, mode)
        raise FileExistsError(path)

    monkeypatch.setattr(os, "mkdir", race)
    RealDisk().make_directories(str(tmp_path / "a"))
    assert (tmp_path / "a").is_dir()


def test_the_descriptor_goes_with_the_last_reference(tmp_path: Path) -> None:
    file = RealDisk().open(str(tmp_path / "a"), create=True)
    fd = file.fileno()
    os.fstat(fd)
    del file
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


# --- the simulated disk alone --------------------------------------------------------------------


def durable_file(disk: SimDisk, content: bytes = b"") -> None:
    disk.make_directories("d")
    file = disk.open("d/f", create=True)
    file.pwrite(content, 0)
    file.fdatasync()
    disk.sync_directory("d")


def test_unsynced_bytes_and_names_go() -> None:
    disk = sim_disk()
    durable_file(disk, b"old")
    disk.open("d/f").pwrite(b"new and longer", 0)
    disk.open("d/g", create=True).fdatasync()
    disk.crash(Random(1), LOSE)
    assert disk.list("d") == ["f"]
    assert disk.content("d/f") == b"old"
    assert disk.counters.crashes == 1
    assert disk.counters.bytes_lost == 14


def test_unsynced_bytes_and_names_may_stay() -> None:
    disk = sim_disk()
    durable_file(disk, b"old")
    disk.open("d/f").pwrite(b"new", 0)
    disk.rename("d/f", "d/g")
    disk.crash(Random(1), KEEP)
    assert disk.files() == {"d/g": 3}
    assert disk.content("d/g") == b"new"


def test_a_lost_removal_and_a_lost_rename() -> None:
    disk = sim_disk()
    durable_file(disk, b"one")
    disk.open("d/g", create=True).pwrite(b"two", 0)
    disk.open("d/g").fdatasync()
    disk.rename("d/g", "d/f")
    disk.remove("d/f")
    disk.crash(Random(1), LOSE)
    assert disk.content("d/f") == b"one"


@pytest.mark.parametrize("goes", ["removed", "renamed"])
def test_a_folder_that_goes_takes_what_was_not_durable_in_it(goes: str) -> None:
    disk = sim_disk()
    disk.make_directories("f")
    disk.open("f/old", create=True)
    if goes == "removed":
        disk.remove_tree("f")
    else:
        disk.rename("f", "g")
    disk.make_directories("f")
    disk.open("f/new", create=True)
    disk.sync_directory("f")
    disk.crash(odds=KEEP)
    assert disk.list("f") == ["new"]
    assert disk.list("g") == (["old"] if goes == "renamed" else [])


def test_a_truncation_is_durable_only_after_a_sync() -> None:
    disk = sim_disk()
    durable_file(disk, b"0123456789")
    disk.open("d/f").truncate(4)
    disk.crash(Random(1), LOSE)
    assert disk.content("d/f") == b"0123456789"
    file = disk.open("d/f")
    file.truncate(4)
    file.truncate(6)
    file.fdatasync()
    disk.crash(Random(1), LOSE)
    assert disk.content("d/f") == b"0123\0\0"


@pytest.mark.parametrize("seed", range(30))
def test_a_prefix_survives(seed: int) -> None:
    disk = sim_disk()
    durable_file(disk, b"a" * 700)
    new = bytes(range(256)) * 8
    file = disk.open("d/f")
    file.pwrite(new[:1000], 700)
    file.pwrite(new[1000:], 1700)
    is_torn = seed % 2 == 0
    odds = CrashOdds(lose=0, prefix=not is_torn, torn=is_torn, names=0)
    disk.crash(Random(seed), odds)
    content = disk.content("d/f")
    assert content == (b"a" * 700 + new)[: len(content)]
    assert len(content) >= 700
    assert is_torn or len(content) in (700, 2748) or len(content) % SECTOR == 0


def test_sectors_survive_independently() -> None:
    disk = sim_disk()
    durable_file(disk, b"")
    disk.open("d/f").pwrite(b"x" * SECTOR * 20, 0)
    disk.crash(Random(5), CrashOdds(lose=0, prefix=0, torn=0, sectors=1, names=0))
    content = disk.content("d/f")
    sectors = {content[at : at + SECTOR] for at in range(0, len(content), SECTOR)}
    assert sectors == {b"x" * SECTOR, bytes(SECTOR)}


def test_one_seed_gives_one_history() -> None:
    def history(seed: int) -> list[tuple[str, bytes]]:
        disk = sim_disk(seed)
        durable_file(disk, b"abc")
        for number in range(9):
            disk.open(f"d/{number}", create=True).pwrite(b"z" * 900, 0)
        disk.crash()
        return [(path, disk.content(path)) for path in disk.files()]

    assert history(3) == history(3)
    assert any(history(3) != history(seed) for seed in range(4, 9))


def test_a_crash_at_the_given_operation() -> None:
    disk = sim_disk()
    durable_file(disk, b"abc")
    disk.crash_after(2)
    file = disk.open("d/f")
    file.pwrite(b"1", 0)
    with pytest.raises(SimCrash):
        file.pwrite(b"2" * 50, 1)
    with pytest.raises(SimCrash):
        disk.list("d")
    disk.crash(Random(1), LOSE)
    with pytest.raises(SimCrash):
        file.pread(1, 0)
    assert disk.open("d/f").pread(9, 0) == b"abc"


def test_a_full_disk() -> None:
    disk = SimDisk(Random(0), capacity_bytes=100)
    disk.make_directories("d")
    file = disk.open("d/f", create=True)
    file.allocate(60)
    file.pwrite(b"x" * 60, 0)
    with pytest.raises(DiskFullError):
        file.allocate(101)
    with pytest.raises(DiskFullError):
        file.pwrite(b"y" * 80, 50)
    assert file.size() == 100
    file.truncate(10)
    file.pwrite(b"z" * 90, 10)
    disk.capacity_bytes = 200
    file.pwrite(b"z" * 90, 100)
    assert disk.used_bytes() == 190


def test_a_failed_sync_lies_afterwards() -> None:
    disk = sim_disk()
    durable_file(disk, b"old")
    file = disk.open("d/f")
    file.pwrite(b"new", 0)
    disk.fail_when(lambda verb, path: verb == "fdatasync" and path == "d/f")
    with pytest.raises(DiskError):
        file.fdatasync()
    disk.fail_when(None)
    file.fdatasync()
    disk.crash(Random(1), KEEP)
    assert disk.content("d/f") == b"old"
    disk.fail_when(lambda verb, _path: verb == "read")
    with pytest.raises(DiskError):
        disk.open("d/f").pread(1, 0)


def test_flipped_bits_and_stale_sectors() -> None:
    disk = sim_disk()
    durable_file(disk, b"a" * SECTOR * 2)
    disk.flip("d/f", 3, 1)
    assert disk.open("d/f").pread(5, 0) == b"aaaca"
    file = disk.open("d/f")
    file.pwrite(b"b" * 700, 0)
    file.fdatasync()
    assert disk.make_stale("d/f", 1, (0, 2 * SECTOR))
    assert disk.content("d/f") == b"b" * SECTOR + b"a" * SECTOR
    assert not disk.make_stale("d/f", 7, (0, 2 * SECTOR))
    disk.overwrite("d/f", b"q")
    assert disk.content("d/f") == b"q"


def test_handles_are_counted() -> None:
    disk = sim_disk()
    durable_file(disk)
    file = disk.open("d/f")
    assert disk.open_files == 1
    file.close()
    file.close()
    assert disk.open_files == 0
    with pytest.raises(DiskError):
        disk.open("nowhere/f", create=True)
    assert disk.list("") == ["d"]


def test_a_stale_sector_holds_what_it_held_before_its_last_write() -> None:
    disk = sim_disk()
    file = disk.open("f", create=True)
    file.pwrite(b"a" * 100, 0)
    file.fdatasync()
    file.pwrite(b"b" * 600, 100)
    file.fdatasync()
    assert not disk.make_stale("f", 0, within=(0, 300)), "more would change"
    assert not disk.make_stale("f", 7, within=(0, 1 << 20)), "nobody wrote there"
    assert disk.make_stale("f", 0, within=(100, 700))
    assert file.pread(1000, 0) == b"a" * 100 + bytes(SECTOR - 100) + b"b" * (700 - SECTOR)
    assert not disk.make_stale("f", 0, within=(100, 700)), "it is already"
    file.close()
