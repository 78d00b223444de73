"""The index of aborted transactions: its file, and how it follows the segments of a log."""

from __future__ import annotations

from random import Random

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from jepsen_like.disk import SimDisk
from raftmq.log.aborted import (
    BLOCK_BYTES,
    BLOCK_ENTRIES,
    HEADER_SIZE,
    Aborted,
    AbortedIndex,
    UntoldError,
)
from raftmq.log.indexes import DamagedIndexError
from raftmq.log.model import NewerFormatError
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.log.shared import Shared
from raftmq.records import Marker, build_marker
from raftmq.types import Offset
from tests.log.helpers import append, elect, flush, open_log, sim_disk

PATH = "data/a-0/00000000000000000100.txnindex"


def index_of(disk: SimDisk) -> AbortedIndex:
    disk.make_directories("data/a-0")
    shared = Shared.make(disk)
    return AbortedIndex(PATH, 100, shared.files, shared.indexes)


def rows(count: int, *, seed: int = 1) -> list[Aborted]:
    """Markers at 110, 120, ...; first offsets anywhere before them."""
    random = Random(seed)
    return [
        Aborted(random.randrange(9), random.randrange(110 + 10 * at), 110 + 10 * at)
        for at in range(count)
    ]


def filled(disk: SimDisk, count: int) -> tuple[AbortedIndex, list[Aborted]]:
    index, entries = index_of(disk), rows(count)
    for entry in entries:
        index.add(entry)
    return index, entries


def all_of(index: AbortedIndex) -> list[Aborted]:
    return list(index.between(0, 1 << 40))


COUNTS = [0, 1, BLOCK_ENTRIES - 1, BLOCK_ENTRIES, BLOCK_ENTRIES + 1, 3 * BLOCK_ENTRIES, 1000]


@pytest.mark.parametrize("count", COUNTS)
def test_the_file_holds_what_was_added(count: int) -> None:
    disk = sim_disk()
    index, entries = filled(disk, count)
    index.cover(50_000)
    assert all_of(index) == entries
    index.write()
    assert all_of(index) == entries
    again = index_of(disk)
    again.open()
    assert all_of(again) == entries
    assert again.covered == 50_000
    assert len(again._rest) < BLOCK_ENTRIES


@given(st.integers(0, 700), st.integers(90, 7200), st.integers(0, 7200))
def test_a_look_up_finds_what_overlaps(count: int, start: int, end: int) -> None:
    index, entries = filled(sim_disk(), count)
    found = list(index.between(start, end))
    assert found == [e for e in entries if e.marker_offset >= start and e.first_offset < end]


@given(st.integers(1, 700), st.integers(100, 7200))
def test_a_cut_forgets_what_stands_behind_it(count: int, offset: int) -> None:
    disk = sim_disk()
    index, entries = filled(disk, count)
    index.write()
    left = [entry for entry in entries if entry.marker_offset < offset]
    assert index.cut(offset) == (offset < 110 + 10 * count - 9)
    assert all_of(index) == left
    more = Aborted(7, 3, 8000)
    index.add(more)
    index.write()
    again = index_of(disk)
    again.open()
    assert all_of(again) == [*left, more]


@pytest.mark.parametrize("at", [0, 20, HEADER_SIZE - 1, HEADER_SIZE + BLOCK_BYTES + 40])
def test_a_damaged_file_is_as_if_it_were_missing(at: int) -> None:
    disk = sim_disk()
    index, _ = filled(disk, BLOCK_ENTRIES + 2)
    index.write()
    disk.flip(PATH, at)
    again = index_of(disk)
    again.open()
    assert again.covered == 100
    assert all_of(again) == []


def test_a_damaged_block_is_noticed_when_it_is_read() -> None:
    disk = sim_disk()
    index, _ = filled(disk, 2 * BLOCK_ENTRIES)
    index.write()
    disk.flip(PATH, HEADER_SIZE + 99)
    again = index_of(disk)
    again.open()
    with pytest.raises(DamagedIndexError):
        all_of(again)
    with pytest.raises(DamagedIndexError):
        again.cut(110)
    disk.lose(PATH)
    gone = index_of(disk)
    gone._full = gone.covered = 1_000
    gone.least_first = 0
    with pytest.raises(DamagedIndexError, match="missing"):
        all_of(gone)
    assert gone.cold(0, 1000) == []


def test_another_segments_file_is_not_believed() -> None:
    disk = sim_disk()
    index, _ = filled(disk, 3)
    index.base_offset = 99
    index.write()
    again = index_of(disk)
    again.open()
    assert again.covered == 100


def test_a_newer_file_is_refused() -> None:
    disk = sim_disk()
    index, _ = filled(disk, 3)
    index.write()
    content = bytearray(disk.content(PATH))
    content[4] = 9
    content[60:64] = crc32c(content[:60]).to_bytes(4, "little")
    disk.overwrite(PATH, bytes(content))
    with pytest.raises(NewerFormatError, match="format 9"):
        index_of(disk).open()


def test_a_full_disk_keeps_entries_in_memory() -> None:
    disk = sim_disk()
    index, entries = filled(disk, 3)
    disk.capacity_bytes = disk.used_bytes()
    for entry in rows(2 * BLOCK_ENTRIES)[3:]:
        index.add(entry)
        entries.append(entry)
    assert index.is_dirty
    assert all_of(index) == rows(2 * BLOCK_ENTRIES)
    disk.capacity_bytes = None
    index.write()
    assert not index.is_dirty
    again = index_of(disk)
    again.open()
    assert all_of(again) == rows(2 * BLOCK_ENTRIES)


def test_what_is_cold_is_named() -> None:
    disk = sim_disk()
    index, _ = filled(disk, 3 * BLOCK_ENTRIES)
    index.write()
    index.sync()
    assert index.cold(0, 1 << 40) == []
    disk.drop_cache()
    again = index_of(disk)
    again.open()
    disk.drop_cache()
    ((_, position, size),) = again.cold(0, 1 << 40)
    assert (position, size) == (HEADER_SIZE, 3 * BLOCK_BYTES)
    assert again.cold(1 << 40, 1 << 41) == []
    all_of(again)
    disk.drop_cache()
    last = 110 + 10 * (3 * BLOCK_ENTRIES - 1)
    assert [size for _, _, size in again.cold(last, 1 << 40)] == [BLOCK_BYTES]


# ---- beside the segments ----


def marker(log: ReplicatedLog, epoch: int = 1) -> int:
    """An abort at the log's end."""
    at = log.log_end_offset
    data = build_marker(
        Marker(is_commit=False),
        producer_id=5,
        producer_epoch=0,
        timestamp=1000,
        base_offset=at,
        leader_epoch=epoch,
    )
    log.append_batch(bytes(data))
    return int(at)


def test_segments_without_markers_have_no_file_and_need_none() -> None:
    disk = sim_disk()
    log = open_log(disk)
    elect(log, 1)
    flush(log)
    for _ in range(100):
        append(log, 1, size=200)
    flush(log)
    assert len(log._segments.all) > 5
    assert log.aborted.between(0, 100) == []
    assert log.aborted.untold() is None
    log.close()
    assert not [path for path in disk.files("data/a-0") if path.endswith("txnindex")]
    again = open_log(disk, claimed=int(log.flushed_end))
    assert again.aborted.untold() is None


def test_markers_are_untold_until_somebody_tells() -> None:
    log = open_log(sim_disk())
    elect(log, 1)
    flush(log)
    append(log, 1, 3)
    at = marker(log)
    append(log, 1, 2)
    with pytest.raises(UntoldError) as missing:
        log.aborted.between(0, 5)
    assert (missing.value.start, missing.value.end) == (at, 6), "no transaction ends before it"
    entry = Aborted(5, 1, at)
    log.aborted.tell(at + 1, 6)
    assert log.aborted.untold() is not None, "a gap is no cover"
    log.aborted.tell(0, 6, [entry])
    assert log.aborted.untold() is None
    assert log.aborted.between(0, 2) == [entry]
    assert log.aborted.between(0, 1) == []
    log.aborted.tell(0, 6, [entry])
    assert log.aborted.between(0, 2) == [entry], "told twice is told once"


def test_what_waits_for_an_election_is_told_ahead() -> None:
    log = open_log(sim_disk())
    elect(log, 1)
    append(log, 1, 3)
    at = marker(log)
    append(log, 1, 3)
    assert log._segments.end_offset == 0, "all is staged"
    assert log.marker(Offset(at)) == Marker(is_commit=False)
    log.aborted.tell(0, 4, [Aborted(5, 0, at)])
    assert log.aborted.between(0, 3) == [Aborted(5, 0, at)], "a majority may have it before"
    log.aborted.tell(4, 7)
    flush(log)
    assert log.aborted.between(0, 7) == [Aborted(5, 0, at)]


def test_a_cut_reaches_what_was_told_ahead() -> None:
    log = open_log(sim_disk())
    elect(log, 1)
    append(log, 1, 3)
    at = marker(log)
    log.aborted.tell(0, 4, [Aborted(5, 0, at)])
    log.truncate_to(log.index_of(Offset(3)))
    append(log, 1, 1)
    flush(log)
    assert log.aborted.untold() is None, "no marker is there"
    assert log.aborted.between(0, 4) == []


@pytest.mark.parametrize("seed", range(20))
def test_what_was_cut_never_comes_back(seed: int) -> None:
    """A power loss may bring back older bytes of any file that was not synced."""
    disk, random = sim_disk(seed), Random(seed)
    log = open_log(disk)
    elect(log, 1)
    flush(log)
    append(log, 1, 3)
    at = marker(log)
    log.aborted.tell(0, 4, [Aborted(5, 0, at)])
    log.aborted.write()
    flush(log)
    log.truncate_to(log.index_of(Offset(3)))
    elect(log, 2)
    flush(log)
    append(log, 2, 5)
    marker(log, 2)
    flush(log)
    disk.crash(random)
    disk.end_faults()
    again = open_log(disk, claimed=int(log.flushed_end))
    again.aborted.tell(int(again._segments.all[0].aborted.covered), 9)
    assert again.aborted.between(0, 9) == []


@pytest.mark.parametrize("seed", range(20))
def test_what_a_crash_took_is_not_in_the_index(seed: int) -> None:
    disk, random = sim_disk(seed), Random(seed)
    log = open_log(disk)
    elect(log, 1)
    flush(log)
    append(log, 1, 3)
    flush(log)
    claimed = int(log.flushed_end)
    at = marker(log)
    log.aborted.tell(0, 4, [Aborted(5, 0, at)])
    log.aborted.write()
    disk.crash(random)
    disk.end_faults()
    again = open_log(disk, claimed=claimed)
    lost = again.log_end_offset == 3
    if lost:
        elect(again, 2)
        flush(again)
        append(again, 2, 1)
        flush(again)
        disk.crash(random)
        disk.end_faults()
        again = open_log(disk, claimed=int(again.flushed_end))
    if again.aborted.untold() is None:
        assert again.aborted.between(0, 4) == ([] if lost else [Aborted(5, 0, at)])


def test_a_cut_that_cannot_be_written_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = sim_disk()
    log = open_log(disk)
    elect(log, 1)
    flush(log)
    append(log, 1, 3)
    at = marker(log)
    log.aborted.tell(0, 4, [Aborted(5, 0, at)])
    log.aborted.write()
    flush(log)
    path = log._segments.all[0].aborted.path
    assert path in disk.files("data/a-0")
    monkeypatch.setattr(AbortedIndex, "write", lambda _self: None)
    log.truncate_to(log.index_of(Offset(3)))
    assert path not in disk.files("data/a-0")


def test_a_repaired_segment_keeps_what_was_told_of_what_comes_before() -> None:
    """The rest may have been read off headers that were damaged already."""
    disk = sim_disk()
    log = open_log(disk)
    elect(log, 1)
    flush(log)
    append(log, 1, 3)
    at = marker(log)
    position = log._segments.all[0].size
    second = append(log, 1, 3)
    end = marker(log)
    log.aborted.tell(0, 8, [Aborted(5, 0, at), Aborted(5, 5, end)])
    assert log.aborted.between(0, 8) == [Aborted(5, 0, at), Aborted(5, 5, end)]
    log.aborted.write()
    flush(log)
    disk.flip(log._segments.all[0].path, position + 70)
    log._segments.all[0].verified.clear()
    log.scrub(1 << 20)
    assert log.damaged == [(4, 7)]
    log.repair(Offset(4), [second])
    disk.crash(Random(1))
    log = open_log(disk, claimed=log.flushed_end)
    for _ in range(2):
        with pytest.raises(UntoldError) as untold:
            log.aborted.between(0, 8)
        assert (untold.value.start, untold.value.end) == (4, 8)
    log.aborted.tell(4, 8, [Aborted(5, 4, end)])
    assert log.aborted.between(0, 8) == [Aborted(5, 0, at), Aborted(5, 4, end)]
