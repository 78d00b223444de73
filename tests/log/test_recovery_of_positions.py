"""Opening a log whose bare entries, log start or set of segments is not as it was left."""

from __future__ import annotations

from random import Random

import pytest

from jepsen_like.disk import CrashOdds, SimDisk
from raftmq.log.bare_entries import SECTOR
from raftmq.log.log_start import LocalStart, LogStart, Pending
from raftmq.log.model import NewerFormatError, UnusableLogError
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.types import LeaderEpoch, Offset, RaftIndex
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
    segment,
    sim_disk,
)

# --- bare entries and the log start --------------------------------------------------------------


def elections(disk: SimDisk, count: int = 5) -> ReplicatedLog:
    log = open_log(disk, BIG)
    for epoch in range(1, count + 1):
        elect(log, epoch)
        append(log, epoch)
    flush(log)
    return log


@pytest.mark.parametrize("copy", [0, 1])
@pytest.mark.parametrize("slot", range(5))
def test_one_bad_copy_of_a_bare_entry_is_mended(slot: int, copy: int) -> None:
    disk = sim_disk()
    log = elections(disk)
    model = model_of(log)
    path = f"{FOLDER}/bare.entries"
    at = (2 * slot + copy) * SECTOR
    data = disk.content(path)
    disk.overwrite(path, data[:at] + b"?" * SECTOR + data[at + SECTOR :])
    log = open_log(disk, BIG, claimed=10)
    model.check(log)
    assert disk.content(path)[: 10 * SECTOR] == data[: 10 * SECTOR]


@pytest.mark.parametrize("slot", range(5))
def test_a_lost_bare_entry_below_the_claim_makes_the_log_unusable(slot: int) -> None:
    disk = sim_disk()
    elections(disk)
    path = f"{FOLDER}/bare.entries"
    data = disk.content(path)
    at = 2 * slot * SECTOR
    disk.overwrite(path, data[:at] + b"?" * 2 * SECTOR + data[at + 2 * SECTOR :])
    with pytest.raises(UnusableLogError):
        open_log(disk, BIG, claimed=10)


def test_a_lost_file_of_bare_entries() -> None:
    disk = sim_disk()
    elections(disk)
    disk.remove(f"{FOLDER}/bare.entries")
    with pytest.raises(UnusableLogError):
        open_log(disk, BIG, claimed=10)


@pytest.mark.parametrize("slot", range(5))
def test_batches_without_their_election_end_the_log(slot: int) -> None:
    disk = sim_disk()
    log = elections(disk)
    model = model_of(log)
    path = f"{FOLDER}/bare.entries"
    data = disk.content(path)
    disk.overwrite(path, data[: 2 * slot * SECTOR])
    log = open_log(disk, BIG)
    model.truncate(2 * slot)
    model.check(log)
    assert log.recovery.cut
    elect(log, 9)
    append(log, 9)
    flush(log)
    assert open_log(disk, BIG, claimed=log.flushed_end).log_end_offset == slot + 1


def test_a_bare_entry_that_does_not_follow_ends_the_log() -> None:
    disk = sim_disk()
    log = elections(disk, 2)
    log.append_bare(log.end_index, LeaderEpoch(2), 2, b"x" * 2000)
    flush(log)
    path = f"{FOLDER}/bare.entries"
    data = disk.content(path)
    disk.overwrite(path, data[: 2 * SECTOR] + bytes(2 * SECTOR) + data[4 * SECTOR :])
    with pytest.raises(UnusableLogError):
        open_log(disk, BIG, claimed=5)
    log = open_log(disk, BIG)
    assert log.end_index == 2
    assert log.recovery.cut
    elect(log, 3)
    assert flush(log) == 3


def test_bare_entries_beyond_the_log_end_are_dropped() -> None:
    disk = sim_disk()
    log = elections(disk)
    size = disk.files()[segment()]
    disk.overwrite(segment(), disk.content(segment())[: size // 5 * 2])
    log = open_log(disk, BIG)
    assert log.recovery.dropped_bare_entries == 2
    assert (log.log_end_offset, log.end_index) == (2, 5)
    assert log.epochs() == [(1, 0), (2, 2), (3, 4)]
    assert open_log(disk, BIG).recovery.dropped_bare_entries == 0


def test_many_bare_entries_are_compacted_away() -> None:
    disk = sim_disk()
    log = open_log(disk, BIG)
    for epoch in range(1, 200):
        elect(log, epoch)
        if epoch % 50 == 0:
            append(log, epoch)
            flush(log)
    flush(log)
    path = f"{FOLDER}/bare.entries"
    before = disk.files()[path]
    log.move_start(log.start_at(Offset(3)))
    assert disk.files()[path] < before / 2
    assert [e.leader_epoch for e in log.bare_entries()] == list(range(151, 200))
    log = open_log(disk, BIG, claimed=log.flushed_end)
    assert log.end_index == 202
    elect(log, 200)
    assert flush(log) == 203


def test_log_start_copies() -> None:
    disk = sim_disk()
    filled(disk, 3, BIG)
    path = f"{FOLDER}/log-start"
    whole = disk.content(path)
    for at in (0, SECTOR):
        disk.overwrite(path, whole[:at] + b"?" * SECTOR + whole[at + SECTOR :])
        assert open_log(disk, BIG, claimed=7).end_index == 7
        assert disk.content(path) == whole
    disk.overwrite(path, b"?" * 2 * SECTOR)
    with pytest.raises(UnusableLogError):
        open_log(disk, BIG, claimed=7)
    disk.overwrite(path, b"")
    with pytest.raises(UnusableLogError):
        open_log(disk, BIG, claimed=7)
    disk.remove(path)
    with pytest.raises(UnusableLogError):
        open_log(disk, BIG, claimed=7)


def test_newer_formats_are_refused() -> None:
    disk = sim_disk()
    log = filled(disk, 20)
    log.close()
    from raftmq.log import bare_entries, indexes, log_start

    for module, path in (
        (indexes, segment(suffix="index")),
        (log_start, f"{FOLDER}/log-start"),
        (bare_entries, f"{FOLDER}/bare.entries"),
    ):
        assert disk.exists(path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "VERSION", 0)
            with pytest.raises(NewerFormatError):
                open_log(disk, claimed=log.flushed_end)


def test_segments_below_the_start_that_a_crash_kept() -> None:
    disk = sim_disk()
    log = filled(disk, 20)
    first = disk.content(segment())
    log.move_start(log.start_at(Offset(30)))
    log.close()
    disk.open(segment(), create=True).pwrite(first, 0)
    disk.open(segment(7, "index"), create=True)
    log = open_log(disk, claimed=log.flushed_end)
    assert not disk.exists(segment())
    assert not disk.exists(segment(7, "index"))
    assert log.damaged == []
    assert log.log_end_offset == 40


def test_segments_that_overlap() -> None:
    disk = sim_disk()
    log = filled(disk, 4, BIG)
    log.close()
    data = disk.content(segment())
    disk.open(segment(6), create=True).pwrite(data[len(data) // 4 * 3 :], 0)
    with pytest.raises(UnusableLogError):
        open_log(disk, BIG, claimed=log.flushed_end)


def test_an_unwritten_new_segment_is_dropped() -> None:
    """The name survived a crash, the bytes did not."""
    disk = sim_disk()
    log = filled(disk, 4, BIG)
    log.close()
    data = disk.content(segment())
    for content, claim in ((b"", 0), (b"?" * 50, 0), (b"?" * 500, 10), (batch(8, 1, 3)[:-1], 0)):
        disk.open(segment(8), create=True)
        disk.overwrite(segment(8), content)
        log = open_log(disk, BIG, claimed=log.flushed_end)
        assert log.recovery.cut_claimed_end == claim
        assert log.recovery.cut == bool(content)
        assert log.damaged == []
        assert not disk.exists(segment(8))
        assert disk.content(segment()) == data


def test_an_unfinished_reset_and_truncation_are_finished() -> None:
    disk = sim_disk()
    log = filled(disk, 20)
    local = LocalStart(log.log_start, RaftIndex(11), Pending.TRUNCATE)
    log._start_file.replace(local)
    log = open_log(disk, claimed=11)
    assert log.recovery.finished == "truncation"
    assert (log.end_index, log.damaged) == (11, [])
    target = LogStart(Offset(90), RaftIndex(95), LeaderEpoch(3))
    log._start_file.replace(LocalStart(target, RaftIndex(95), Pending.RESET))
    log = open_log(disk, claimed=11)
    assert log.recovery.finished == "reset"
    assert (log.log_start, log.end_index) == (target, 95)
    assert [n for n in disk.list(FOLDER) if n[0] == "0"] == []


@pytest.mark.parametrize("end", [5, 7, 9, 11])
def test_an_unfinished_truncation_over_damage(end: int) -> None:
    disk = sim_disk()
    log = filled(disk, 6, BIG)
    size = disk.files()[segment()] // 6
    disk.flip(segment(), 3 * size + 80)
    log._start_file.replace(LocalStart(log.log_start, RaftIndex(end), Pending.TRUNCATE))
    log = open_log(disk, BIG, claimed=end)
    assert log.end_index == end
    assert log.damaged == ([] if end < 9 else [(6, 8)])


def test_an_unfinished_truncation_of_a_torn_file() -> None:
    disk = sim_disk()
    log = filled(disk, 6, BIG)
    size = disk.files()[segment()] // 6
    disk.overwrite(segment(), disk.content(segment())[: 2 * size + 5])
    log._start_file.replace(LocalStart(log.log_start, RaftIndex(9), Pending.TRUNCATE))
    log = open_log(disk, BIG, claimed=4)
    assert log.end_index == 5


def test_what_was_not_flushed_is_flushed_after_opening() -> None:
    disk = sim_disk()
    log = filled(disk, 3, BIG)
    append(log, 1)
    elect(log, 2)
    log = open_log(disk, BIG, claimed=3)
    assert log.flushed_end == 3
    assert (log.end_index, log.log_end_offset) == (9, 7)
    append(log, 2)
    assert flush(log) == 10
    disk.crash(Random(0), CrashOdds(lose=1, names=1))
    assert open_log(disk, BIG, claimed=10).log_end_offset == 8


def test_a_batch_inside_a_record_is_not_taken_for_ours() -> None:
    """Records may hold raw batches (mirroring tools); a torn one must not look like damage."""
    from raftmq.records import NewRecord, build_batch

    disk = sim_disk()
    log = open_log(disk, BIG)
    elect(log, 1)
    flush(log)
    inner = batch(1, 1)
    log.append_batch(
        build_batch([NewRecord(None, inner * 3), NewRecord(None, b"x" * 500)], leader_epoch=1)
    )
    flush(log)
    whole = disk.content(segment())
    for cut in (whole[:-1], whole[:-400], whole[:-1] + b"?"):
        disk.overwrite(segment(), cut)
        opened = open_log(disk, BIG, claimed=1)
        assert opened.recovery.cut
        assert opened.damaged == []
        assert opened.end_index == 1
