"""Damage that was found is mended from a peer's batches, or cut by a leader."""

from __future__ import annotations

from random import Random

import pytest

from jepsen_like.disk import CrashOdds
from raftmq.errors import CorruptBatchError
from raftmq.log.model import DamagedError
from raftmq.ports import DiskError
from raftmq.types import Offset, RaftIndex
from tests.log.helpers import (
    BIG,
    FOLDER,
    append,
    batch,
    elect,
    filled,
    flush,
    model_of,
    open_log,
    readable,
    segment,
    sim_disk,
    span_bytes,
)

# --- mending -------------------------------------------------------------------------------------


def test_repair_of_a_closed_segment() -> None:
    disk = sim_disk()
    log = filled(disk, 20)
    model = model_of(log)
    log.close()
    whole = disk.content(segment())
    disk.flip(segment(), 300)
    log = open_log(disk, claimed=log.flushed_end)
    old = log.locate(Offset(0), 1, Offset(2))[0]
    while not log.damaged:
        log.scrub(1000)
    start, end = log.damaged[0]
    good = [e.payload for e in model.entries if e.kind == 0 and start < e.end - 1 <= end]
    for wrong in ([], good * 2, [batch(start, 2, 2)], [bytes(good[0][:-1]) + b"?"]):
        with pytest.raises(CorruptBatchError):
            log.repair(start, wrong)
    log.repair(start, good)
    assert log.damaged == []
    assert disk.content(segment()) == whole
    model.check(log)
    assert len(span_bytes([old])) == old.size, "a span keeps the file it was made of"
    log = open_log(disk, claimed=log.flushed_end)
    assert log.damaged == []
    with pytest.raises(AssertionError):
        log.repair(Offset(2), good)


def test_repair_of_the_active_segment() -> None:
    disk = sim_disk()
    log = filled(disk, 6, BIG)
    model = model_of(log)
    disk.flip(segment(), disk.files()[segment()] // 6 + 80)
    log = open_log(disk, BIG)
    assert log.damaged == [(2, 4)]
    data = append(log, 1, count=2, size=60)
    model.add(1, 0, data, 2)
    log.repair(Offset(2), [model.entries[2].payload])
    model.check(log)
    assert flush(log) == log.end_index
    disk.crash(Random(1), CrashOdds(lose=1, names=1))
    log = open_log(disk, BIG, claimed=log.flushed_end)
    model.check(log)


def test_repair_of_two_ranges_and_of_a_lost_tail() -> None:
    disk = sim_disk()
    log = filled(disk, 8, BIG)
    model = model_of(log)
    size = disk.files()[segment()] // 8
    disk.flip(segment(), size + 80)
    disk.flip(segment(), 4 * size + 80)
    disk.overwrite(segment(), disk.content(segment())[: -size - 9])
    log = open_log(disk, BIG, claimed=17)
    assert log.damaged == [(2, 4), (8, 10), (12, 16)]
    for start, end in list(log.damaged)[::-1]:
        good = [e.payload for e in model.entries[1:] if start < e.end - 1 <= end]
        log.repair(start, good)
    model.check(log)
    assert open_log(disk, BIG, claimed=17).damaged == []


def test_repair_of_damage_that_reaches_below_the_log_start() -> None:
    disk = sim_disk()
    log = filled(disk, 8, BIG)
    model = model_of(log)
    log.move_start(log.start_at(Offset(6)))
    model.drop_below(7)
    size = disk.files()[segment()] // 8
    for at in range(1, 5):
        disk.overwrite(
            segment(),
            disk.content(segment())[: at * size]
            + b"?" * 90
            + disk.content(segment())[at * size + 90 :],
        )
    log.close()
    disk.remove(segment(suffix="index"))
    log = open_log(disk, BIG, claimed=17)
    assert log.damaged == [(6, 10)]
    log.repair(Offset(6), [e.payload for e in model.entries[:2]])
    model.check(log)
    assert not disk.exists(segment())
    assert disk.exists(segment(6))
    log = open_log(disk, BIG, claimed=17)
    model.check(log)


def test_a_missing_first_segment() -> None:
    disk = sim_disk()
    log = filled(disk, 20)
    model = model_of(log)
    log.close()
    disk.remove(segment())
    log = open_log(disk, claimed=log.flushed_end)
    start, end = log.damaged[0]
    assert start == 0
    assert end == log._segments.all[1].base_offset
    with pytest.raises(DamagedError):
        log.entries(RaftIndex(1), 100)
    with pytest.raises(DamagedError):
        log.locate(Offset(0), 100, Offset(3))
    with pytest.raises(DamagedError):
        log.offset_for_timestamp(0, Offset(3))
    assert log.scrub(1) == []
    assert log.scrub(1) == []
    log.repair(Offset(0), [e.payload for e in model.entries[1:] if e.end - 1 <= end])
    model.check(log)
    assert open_log(disk, claimed=log.flushed_end).damaged == []


def test_a_missing_segment_in_the_middle() -> None:
    disk = sim_disk()
    log = filled(disk, 60)
    model = model_of(log)
    bases = [s.base_offset for s in log._segments.all]
    log.close()
    disk.remove(segment(bases[1]))
    log = open_log(disk, claimed=log.flushed_end)
    assert log.damaged == [(bases[1], bases[2])]
    good = [e.payload for e in model.entries[1:] if bases[1] < e.end - 1 <= bases[2]]
    log.repair(Offset(bases[1]), good)
    model.check(log)
    assert open_log(disk, claimed=log.flushed_end).damaged == []


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "in use"])
def test_a_missing_last_segment(*, is_closed: bool) -> None:
    """The one before it is vouched for by its indexes, and ends below the claim."""
    disk = sim_disk()
    log = filled(disk, 60)
    model = model_of(log)
    base, end = log._segments.all[-1].base_offset, int(log.log_end_offset)
    if is_closed:
        log.close()
    disk.remove(segment(base))
    log = open_log(disk, claimed=log.flushed_end)
    assert log.log_end_offset == end
    assert log.damaged == [(base, end)]
    with pytest.raises(DamagedError):
        log.entries(RaftIndex(base + 1), 100)
    with pytest.raises(DamagedError):
        log.locate(Offset(base), 100, Offset(end))
    log.repair(Offset(base), [e.payload for e in model.entries[1:] if e.end - 1 > base])
    model.check(log)
    assert open_log(disk, claimed=log.flushed_end).damaged == []


def test_all_segments_are_missing() -> None:
    disk = sim_disk()
    log = filled(disk, 20)
    for name in disk.list(FOLDER):
        if name[0] == "0":
            disk.remove(f"{FOLDER}/{name}")
    log = open_log(disk, claimed=log.flushed_end)
    assert log.damaged == [(0, 40)]
    log.truncate_to(RaftIndex(11))
    assert log.damaged == [(0, 10)]
    append(log, 1)
    flush(log)
    assert sorted(readable(log)) == [0, 11]
    log.truncate_to(RaftIndex(1))
    assert log.damaged == []
    append(log, 1)
    assert flush(log) == 2


def test_a_segment_that_vanishes_under_a_running_log() -> None:
    disk = sim_disk()
    log = filled(disk, 20)
    log._shared.files.forget(segment())
    disk.remove(segment())
    log._recent.clear()
    with pytest.raises(DiskError):
        log.entries(RaftIndex(1), 100)


def test_truncation_inside_damage() -> None:
    """Boundaries in there cannot be seen, but the leader knows them."""
    disk = sim_disk()
    log = filled(disk, 8, BIG)
    size = disk.files()[segment()] // 8
    for at in (2, 3, 4):
        disk.flip(segment(), at * size + 80)
    log = open_log(disk, BIG)
    assert log.damaged == [(4, 10)]
    log.truncate_to(RaftIndex(9))
    assert (log.log_end_offset, log.damaged) == (8, [(4, 8)])
    elect(log, 2)
    append(log, 2)
    flush(log)
    assert sorted(readable(log)) == [0, 1, 3, 9, 10]
    log = open_log(disk, BIG, claimed=log.flushed_end)
    assert log.damaged == [(4, 8)]
    log.truncate_to(RaftIndex(5))
    assert log.damaged == []
    append(log, 1)
    assert flush(log) == 6


def test_damage_found_while_truncating() -> None:
    disk = sim_disk()
    log = filled(disk, 8, BIG)
    log.close()
    size = disk.files()[segment()] // 8
    disk.flip(segment(), 5 * size, 5)
    log = open_log(disk, BIG, claimed=17)
    log.truncate_to(RaftIndex(11))
    assert log.log_end_offset == 10
    append(log, 1)
    assert flush(log) == 12
    assert len(readable(log)) == 7


def test_the_start_in_damage() -> None:
    disk = sim_disk()
    log = filled(disk, 8, BIG)
    size = disk.files()[segment()] // 8
    disk.flip(segment(), size, 5)
    disk.flip(segment(), 2 * size, 5)
    log = open_log(disk, BIG)
    assert log.damaged == [(2, 6)]
    found = log.start_at(Offset(5))
    assert (found.base_offset, found.index) == (2, 3)


def test_batches_are_gathered_in_a_file() -> None:
    """A range may be a whole segment, and memory is not for that; a crash leaves nothing behind."""
    disk = sim_disk()
    log = filled(disk, 30, count=1)
    end = log.end_index
    good = [bytes(e.payload) for e in log.entries(RaftIndex(1), 1 << 30)]
    [first, *_] = sorted(n for n in disk.list("data/a-0") if n.endswith(".log"))
    log.close()
    disk.remove(f"data/a-0/{first}")
    log = open_log(disk, claimed=end)
    [(start, stop)] = log.damaged
    fill = log.begin_repair(start)
    for offset in range(start, stop - 1):
        fill.add(good[offset])
    assert fill.file is not None
    assert fill.file.size() == fill.size == sum(len(each) for each in good[start : stop - 1])
    last = good[stop - 1]
    for wrong in (good[stop], last[:-1] + bytes([last[-1] ^ 1])):
        with pytest.raises(CorruptBatchError):
            fill.add(wrong)
    with pytest.raises(CorruptBatchError):
        log.filled_job(fill)
    log.close()
    log = open_log(disk, claimed=end)
    assert not any(name.endswith(".tmp") for name in disk.list("data/a-0"))
    fill = log.begin_repair(start)
    for offset in range(start, stop):
        fill.add(good[offset])
    job = log.filled_job(fill)
    job.run()
    assert log.repaired(job)
    assert log.damaged == []
    assert [bytes(e.payload) for e in log.entries(RaftIndex(1), 1 << 30)] == good
    assert not any(name.endswith(".tmp") for name in disk.list("data/a-0"))
    log.close()
