"""The helpers behind `raftmq log dump` and `raftmq log verify` say what is there, and only look."""

from __future__ import annotations

import attrs
import pytest

from jepsen_like.disk import SimDisk
from raftmq.log.indexes import DamagedIndexError
from raftmq.log.log_start import LocalStart, Pending
from raftmq.log.model import LogConfig
from raftmq.tools.inspect import (
    Finding,
    SegmentItem,
    base_offset_of,
    read_bare_entries,
    read_index,
    read_log_start,
    read_segment,
    verify_folder,
)
from raftmq.types import LeaderEpoch, Offset, RaftIndex
from tests.log.conftest import Place
from tests.log.helpers import MEMBERSHIP, SMALL, append, elect, filled, flush, open_log, sim_disk

FOLDER = "data/a-0"
BIG = LogConfig(segment_bytes=1 << 20, index_interval_bytes=300, bare_reserve_bytes=8192)
LOG = f"{FOLDER}/{0:020d}.log"


def verify(disk: SimDisk) -> list[Finding]:
    operations = disk.operations
    findings = verify_folder(disk, FOLDER)
    assert disk.operations == operations, "it only looks"
    return findings


def test_a_sound_folder(place: Place) -> None:
    log = open_log(place.disk, folder=f"{place.root}/a-0")
    for epoch in (1, 2):
        elect(log, epoch)
        log.append_bare(log.end_index, LeaderEpoch(epoch), MEMBERSHIP, b"")
        for _ in range(30):
            append(log, epoch, 2)
        flush(log)
    assert verify_folder(place.disk, log.folder) == []
    log.move_start(log.start_at(Offset(33)))
    log.close()
    assert verify_folder(place.disk, log.folder) == []
    names = [n for n in place.disk.list(log.folder) if n.endswith(".log")]
    items: list[SegmentItem] = []
    for name in names:
        path = f"{log.folder}/{name}"
        items += read_segment(place.disk.open(path), base_offset_of(path))
    assert all(item.is_sound for item in items)
    assert items[-1].header is not None
    assert items[-1].header.next_offset == 120
    entries = list(read_bare_entries(place.disk, f"{log.folder}/bare.entries"))
    assert [(e.leader_epoch, is_whole) for e, is_whole in entries] == [
        (1, True),
        (1, True),
        (2, True),
        (2, True),
    ]
    local = read_log_start(place.disk, f"{log.folder}/log-start")
    assert local is not None
    assert local.log_start.offset == 33
    summary, pairs = read_index(place.disk, f"{log.folder}/{names[0][:-4]}.index")
    assert summary.log_size > 0
    assert all(offset > 0 for offset, _ in pairs)
    assert read_index(place.disk, f"{log.folder}/{names[0][:-4]}.timeindex")[0] == summary


def test_names() -> None:
    assert base_offset_of("x/00000000000000000123.log") == 123
    with pytest.raises(ValueError, match="not a segment"):
        base_offset_of("x/123.log")


@pytest.mark.parametrize("position", range(0, 70, 3))
def test_a_flipped_byte(position: int) -> None:
    disk = sim_disk()
    filled(disk, 5, BIG)
    size = disk.files()[LOG] // 5
    disk.flip(LOG, size + position)
    found = verify(disk)
    assert [(f.path, f.position, f.is_damage) for f in found] == [(LOG, size, True)]
    items = list(read_segment(disk.open(LOG), 0))
    if position not in range(12, 16):  # the epoch cannot be judged by one file alone
        assert [item.is_sound for item in items] == [True, False, True, True, True]
        assert (items[1].position, items[1].size) == (size, size)
        assert items[1].note


def test_tails() -> None:
    disk = sim_disk()
    filled(disk, 5, BIG)
    whole = disk.content(LOG)
    size = len(whole) // 5
    for content, note, count in (
        (whole[:-1], "cut off", 1),
        (whole[: 4 * size + 9], "cut off", 1),
        (whole + bytes(100), "zeros", 0),
        (whole + b"?" * 100, "no batch", 1),
        (whole[:-1] + b"!", "wrong CRC", 1),
    ):
        disk.overwrite(LOG, content)
        found = verify(disk)
        assert len(found) == count
        assert not any(f.is_damage for f in found), "a tail may be an unfinished write"
        item = list(read_segment(disk.open(LOG), 0))[-1]
        assert note in item.note
        assert not item.is_sound


def test_log_start_findings() -> None:
    disk = sim_disk()
    log = filled(disk, 2, BIG)
    path = f"{FOLDER}/log-start"
    log._start_file.replace(LocalStart(log.log_start, RaftIndex(3), Pending.TRUNCATE))
    assert [f.text for f in verify(disk)] == ["unfinished truncate"]
    log._start_file.replace(LocalStart(log.log_start))
    whole = disk.content(path)
    disk.overwrite(path, b"?" * 512 + whole[512:])
    assert [(f.is_damage, f.text) for f in verify(disk)] == [
        (False, "one of two copies is damaged")
    ]
    disk.overwrite(path, b"?" * 1024)
    assert [(f.is_damage, f.text) for f in verify(disk)] == [(True, "both copies are damaged")]
    disk.remove(path)
    assert [(f.is_damage, f.text) for f in verify(disk)] == [(True, "missing")]


def test_bare_entry_findings() -> None:
    disk = sim_disk()
    log = open_log(disk, BIG)
    for epoch in (1, 2, 3):
        elect(log, epoch)
        append(log, epoch)
        flush(log)
    path = f"{FOLDER}/bare.entries"
    whole = disk.content(path)

    def with_bad(start: int, end: int) -> list[Finding]:
        disk.overwrite(path, whole[:start] + b"?" * (end - start) + whole[end:])
        return verify(disk)

    assert [f.is_damage for f in with_bad(0, 512)] == [False]
    lost = with_bad(1024, 2048)
    assert "entries before index 4 are lost" in [f.text for f in lost]
    assert any(f.path == LOG for f in lost), "batches without their election"
    torn = with_bad(2048, 3072)
    assert "a torn or damaged entry at the end" in [f.text for f in torn]
    disk.remove(path)
    assert any(f.is_damage or f.path == LOG for f in verify(disk))


def test_missing_and_superfluous_segments_and_indexes() -> None:
    disk = sim_disk()
    log = filled(disk, 40)
    bases = [s.base_offset for s in log._segments.all]
    log.move_start(log.start_at(Offset(bases[1])))
    log.close()
    disk.open(LOG, create=True)
    assert [f.text for f in verify(disk)] == ["lies below the log start"]
    disk.remove(LOG)
    disk.remove(f"{FOLDER}/{bases[2]:020d}.log")
    found = verify(disk)
    assert [f.text for f in found] == [f"offsets [{bases[2]}, {bases[3]}) are missing before it"]
    assert found[0].is_damage
    path = f"{FOLDER}/{bases[3]:020d}.index"
    disk.overwrite(path, b"?" * 100)
    assert [f.path for f in verify(disk) if not f.is_damage] == [path]
    with pytest.raises(DamagedIndexError):
        read_index(disk, path)


def test_a_log_start_that_contradicts_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from raftmq.log import log_start

    disk = sim_disk()
    filled(disk, 1, attrs.evolve(SMALL))
    path = f"{FOLDER}/log-start"
    local = read_log_start(disk, path)
    assert local is not None
    monkeypatch.setattr(log_start.LogStart, "encode", lambda _self: b"?" * 60)
    disk.overwrite(path, LocalStart(local.log_start, RaftIndex(0)).encode())
    monkeypatch.undo()
    assert [f.is_damage for f in verify(disk)] == [True]
    assert LeaderEpoch(0) == local.log_start.previous_epoch
