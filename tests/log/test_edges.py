"""Corners of the log that the other tests come by only by chance."""

from __future__ import annotations

from random import Random

import attrs
import pytest

from jepsen_like.disk import CrashOdds, SimDisk
from raftmq.log.batch_reader import BadBatch
from raftmq.log.indexes import SparseIndex
from raftmq.log.log_start import LocalStart, LogStart, Pending
from raftmq.log.model import LogConfig
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.ports import DiskError, DiskFullError
from raftmq.records import TIMESTAMP_MAX, NewRecord, assemble_batch, build_batch, encode_record
from raftmq.types import LeaderEpoch, Offset, RaftIndex
from tests.log.helpers import (
    SMALL,
    all_entries,
    append,
    batch,
    elect,
    filled,
    flush,
    open_log,
    sim_disk,
    span_bytes,
)

FOLDER = "data/a-0"
BIG = LogConfig(segment_bytes=1 << 20, index_interval_bytes=300, bare_reserve_bytes=8192)


def segment(base: int = 0, suffix: str = "log") -> str:
    return f"{FOLDER}/{base:020d}.{suffix}"


def spoil(disk: SimDisk, log: ReplicatedLog, suffix: str) -> None:
    """Damage an index under a log that has not loaded it."""
    first = log._segments.all[0]
    first.write_indexes(is_closed=False)
    index = first.offset_index if suffix == "index" else first.time_index
    log._shared.indexes.forget(index.path)
    disk.flip(index.path, 70)


@pytest.mark.parametrize("suffix", ["index", "timeindex"])
def test_an_index_damaged_while_the_log_is_open(suffix: str) -> None:
    for use in range(4):
        disk = sim_disk()
        log = filled(disk, 30, BIG)
        sent = span_bytes(log.locate(Offset(0), 1 << 20, Offset(60)))
        log._recent.clear()
        spoil(disk, log, suffix)
        if use == 0:
            # The first batch is found by a cursor, so only the end of the span needs the index.
            log._remember(0, log._segments.all[0], 0)
            data = span_bytes(log.locate(Offset(0), 2000, Offset(40)))
            assert sent.startswith(data)
            assert data
        elif use == 1:
            assert log.max_timestamp(Offset(50)) == (1241, 49, 1)
        elif use == 2:
            assert log.offset_for_timestamp(1100, Offset(60)) == (1100, 20, 1)
        else:
            log.truncate_to(RaftIndex(31))
            assert log.max_timestamp(Offset(30)) == (1141, 29, 1)
            append(log, 1)
            flush(log)
        assert span_bytes(log.locate(Offset(0), 1 << 20, Offset(60)))[: 30 * 100]


def test_headers_of_a_part() -> None:
    log = filled(sim_disk(), 10)
    elect(log, 2)
    append(log, 2, 2)
    append(log, 2, 2)
    assert [h.base_offset for h in log.headers(Offset(3), Offset(7))] == [2, 4, 6]
    assert [h.base_offset for h in log.headers(Offset(19), Offset(22))] == [18, 20]
    assert [h.base_offset for h in log.headers(Offset(22), Offset(23))] == [22]


def test_a_timestamp_that_only_deleted_records_have() -> None:
    log = open_log(sim_disk())
    elect(log, 1)
    flush(log)
    for base in (0, 2):
        records = [NewRecord(None, b"", 90 - base), NewRecord(None, b"", 5)]
        log.append_batch(build_batch(records, base_offset=base, leader_epoch=1))
    flush(log)
    log.move_start(log.start_at(Offset(1)))
    assert log.offset_for_timestamp(80, Offset(4)) == (88, 2, 1)
    assert log.offset_for_timestamp(89, Offset(4)) is None
    assert log.max_timestamp(Offset(4)) == (88, 2, 1)


def test_a_time_beyond_64_bits_is_told_in_64() -> None:
    log = open_log(sim_disk())
    elect(log, 1)
    flush(log)
    record = encode_record(NewRecord(None, b""), TIMESTAMP_MAX, 0)
    log.append_batch(assemble_batch([record], base_timestamp=1, max_timestamp=7, leader_epoch=1))
    assert log.offset_for_timestamp(5, Offset(1)) == (TIMESTAMP_MAX, 0, 1)


def test_settings_may_change() -> None:
    log = filled(sim_disk(), 5)
    log.configure(attrs.evolve(SMALL, segment_bytes=100, retention_ms=0))
    append(log, 1)
    flush(log)
    assert len(log._segments.all) == 2
    assert log.retention_target(10**9, Offset(11)) == 10


def test_a_file_left_by_another_attempt_is_emptied() -> None:
    disk = sim_disk()
    log = open_log(disk)
    elect(log, 1)
    flush(log)
    disk.open(segment(), create=True).pwrite(b"left over", 0)
    data = append(log, 1)
    assert disk.content(segment()) == data


def test_closing_twice_and_without_segments() -> None:
    log = open_log(sim_disk())
    log.close()
    log = filled(sim_disk(), 2)
    log._segments.close_active()
    log._segments.close_active()
    log.close()


def test_a_closed_segment_without_indexes_is_flushed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = sim_disk()
    log = filled(disk, 3)

    def refuse(_self: SparseIndex, _summary: object) -> None:
        raise DiskFullError("no room for an index")

    with monkeypatch.context() as patch:
        patch.setattr(SparseIndex, "write", refuse)
        for _ in range(4):
            append(log, 1, size=1200)
            flush(log)
    assert not disk.exists(segment(suffix="index"))
    assert len(log._segments.all) > 3
    log = open_log(disk, claimed=log.flushed_end)
    assert len(all_entries(log)) == 8


def test_truncation_before_any_index_was_written() -> None:
    disk = sim_disk()
    log = filled(disk, 3, BIG)
    assert not disk.exists(segment(suffix="index"))
    log.truncate_to(RaftIndex(3))
    assert log.log_end_offset == 2
    disk.capacity_bytes = disk.used_bytes() + 2048
    append(log, 1)
    assert flush(log) == 4


def test_damage_in_the_last_index_interval_is_found_by_a_truncation() -> None:
    disk = sim_disk()
    log = filled(disk, 12, attrs.evolve(BIG, index_interval_bytes=100_000))
    log._recent.clear()
    size = disk.files()[segment()] // 12
    disk.flip(segment(), 3 * size + 16, 2)
    log.truncate_to(RaftIndex(5))
    assert (log.log_end_offset, log.damaged) == (4, [])
    log = filled(sim_disk(), 12, BIG)
    assert isinstance(log._disk, SimDisk)
    first = log._segments.all[0]
    log._disk.flip(segment(), 11 * size + 16, 2)
    first._recount()
    assert log.damaged == [(22, 24)]


def test_a_missing_segment_that_is_truncated_into_nothing() -> None:
    disk = sim_disk()
    log = filled(disk, 20)
    log.close()
    for name in disk.list(FOLDER):
        if name[0] == "0":
            disk.remove(f"{FOLDER}/{name}")
    log = open_log(disk, claimed=log.flushed_end)
    first = log._segments.all[0]
    assert first.is_missing
    first.add_damage(BadBatch(0, 0, None, is_short=True))
    assert log.damaged == [(0, 40)]


def test_repair_meets_a_full_disk() -> None:
    disk = sim_disk()
    log = filled(disk, 6, BIG)
    good = [bytes(e.payload) for e in all_entries(log)][1:]
    size = disk.files()[segment()] // 6
    disk.flip(segment(), 2 * size + 80)
    log = open_log(disk, BIG)
    append(log, 1)
    flush(log)
    disk.capacity_bytes = disk.used_bytes() + 600
    with pytest.raises(DiskFullError):
        log.repair(Offset(4), good[2:3])
    assert log.damaged == [(4, 6)]
    assert not [name for name in disk.list(FOLDER) if name.endswith(".tmp")]
    disk.capacity_bytes = None
    log.repair(Offset(4), good[2:3])
    assert log.damaged == []


def test_repair_in_a_worker_while_the_log_changes() -> None:
    disk = sim_disk()
    log = filled(disk, 20)
    entries = [bytes(e.payload) for e in all_entries(log)][1:]
    log.close()
    disk.flip(segment(), 300)
    log = open_log(disk, claimed=log.flushed_end)
    while not log.damaged:
        log.scrub(1 << 20)
    start = log.damaged[0][0]
    job = log.repair_job(start, entries[start // 2 : start // 2 + 1])
    with pytest.raises(AssertionError):
        log.repaired(job)
    job.run()
    log.move_start(log.start_at(Offset(30)))
    assert not log.repaired(job)
    assert not disk.exists(job.temporary)
    assert log.damaged == []
    log.truncate_to(RaftIndex(35))
    append(log, 1)
    assert flush(log) == 36


def test_a_file_that_is_shorter_than_the_log() -> None:
    """Somebody cut a segment under a running node: nothing short is served, repair mends it."""
    disk = sim_disk()
    log = filled(disk, 6, BIG)
    entries = [bytes(e.payload) for e in all_entries(log)][1:]
    size = disk.files()[segment()] // 6
    disk.flip(segment(), size + 80)
    log = open_log(disk, BIG)
    assert log.damaged == [(2, 4)]
    append(log, 1)
    flush(log)
    disk.overwrite(segment(), disk.content(segment())[: 4 * size])
    log.repair(Offset(2), entries[1:2])
    assert log.damaged == [(8, 13)]


def test_an_unfinished_truncation_whose_rest_is_unreadable() -> None:
    disk = sim_disk()
    log = filled(disk, 6, BIG)
    size = disk.files()[segment()] // 6
    content = disk.content(segment())
    disk.overwrite(segment(), content[: 3 * size] + b"?" * 3 * size)
    log._start_file.replace(LocalStart(log.log_start, RaftIndex(11), Pending.TRUNCATE))
    log = open_log(disk, BIG, claimed=7)
    assert log.end_index == 7


def test_reads_that_fail() -> None:
    disk = sim_disk()
    log = filled(disk, 20)
    log._recent.clear()
    disk.fail_when(lambda verb, _path: verb == "read")
    with pytest.raises(DiskError):
        log.entries(RaftIndex(1), 100)
    with pytest.raises(DiskError):
        log.scrub(100)


def test_garbage_behind_a_closed_segment_claims_nothing() -> None:
    """A refused append left bytes there; the next segment shows that nothing of it counts."""
    disk = sim_disk()
    log = filled(disk, 20)
    log.close()
    bases = [s.base_offset for s in log._segments.all]
    path = segment(bases[0])
    whole = disk.content(path)
    disk.overwrite(path, whole + b"?" * 200)
    log = open_log(disk, claimed=log.flushed_end)
    assert log.recovery.cut
    assert log.recovery.cut_claimed_end == 0
    assert disk.content(path) == whole
    assert log.damaged == []


def test_damage_below_the_start_is_nobodys_business() -> None:
    disk = sim_disk()
    log = filled(disk, 10, BIG)
    log.move_start(log.start_at(Offset(8)))
    disk.flip(segment(), 90)
    disk.flip(segment(), 16, 2)
    log.close()
    disk.remove(segment(suffix="index"))
    log = open_log(disk, BIG, claimed=log.flushed_end)
    assert log.recovery.damaged == []
    assert log.damaged == []
    assert len(all_entries(log)) == 6


def test_batches_of_older_epochs_below_the_start() -> None:
    disk = sim_disk()
    log = open_log(disk, BIG)
    for epoch in (1, 2, 3):
        elect(log, epoch)
        append(log, epoch, 2)
        flush(log)
    log.move_start(log.start_at(Offset(4)))
    log.close()
    disk.remove(segment(suffix="index"))
    disk.crash(Random(1), CrashOdds(lose=1, names=1))
    log = open_log(disk, BIG)
    assert log.damaged == []
    assert [e.leader_epoch for e in all_entries(log)] == [3, 3]
    assert log.scrub(1 << 20) == []


def test_a_reset_to_the_middle_of_a_batch() -> None:
    log = filled(sim_disk(), 5)
    log.reset_to(LogStart(Offset(13), RaftIndex(14), LeaderEpoch(3), b"", b"", Offset(10)))
    assert (log.log_start_offset, log.log_end_offset) == (13, 10)
    log.append_batch(batch(10, 3, 5))
    assert flush(log) == 19
    assert span_bytes(log.locate(Offset(13), 1, Offset(15))) == batch(10, 3, 5)


def test_truncation_inside_damage_of_a_closed_segment() -> None:
    disk = sim_disk()
    log = filled(disk, 40)
    log.close()
    disk.flip(segment(), 300)
    size = len(batch(0, 1, 2, 60))
    disk.flip(segment(), 5 * size + 80)
    disk.remove(segment(suffix="index"))
    log = open_log(disk, claimed=log.flushed_end)
    assert log.damaged == [(2, 4), (10, 12)]
    log.truncate_to(RaftIndex(12))
    assert (log.log_end_offset, log.damaged) == (11, [(2, 4), (10, 11)])
    append(log, 1)
    assert flush(log) == 13


def test_truncation_without_room_for_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = sim_disk()
    log = filled(disk, 3, BIG)

    def refuse(_self: SparseIndex, _summary: object) -> None:
        raise DiskFullError("no room for an index")

    monkeypatch.setattr(SparseIndex, "write", refuse)
    log.truncate_to(RaftIndex(3))
    append(log, 1)
    assert flush(log) == 4


def test_a_pair_that_the_file_does_not_confirm_ends_no_span() -> None:
    disk = sim_disk()
    log = filled(disk, 30, BIG)
    first = log._segments.all[0]
    sent = span_bytes(log.locate(Offset(0), 1 << 20, Offset(60)))
    values = first.offset_index._pending_values
    for at in range(len(values)):
        values[at] += 7
    log._recent.clear()
    for end in range(8, 60, 2):
        log._remember(0, first, 0)
        data = span_bytes(log.locate(Offset(0), 1 << 20, Offset(end)))
        assert data == sent[: end // 2 * len(sent) // 30]


def test_a_log_without_reserves() -> None:
    disk = sim_disk()
    log = open_log(disk, attrs.evolve(BIG, bare_reserve_bytes=0))
    log.reset_to(LogStart(Offset(3), RaftIndex(4), LeaderEpoch(2)))
    elect(log, 3)
    append(log, 3)
    assert flush(log) == 6
    log.reset_to(LogStart(Offset(9), RaftIndex(12), LeaderEpoch(4)))
    assert open_log(disk, BIG, claimed=12).end_index == 12


def test_bare_entries_are_mended_on_a_full_disk() -> None:
    disk = sim_disk()
    log = filled(disk, 2, BIG)
    path = f"{FOLDER}/bare.entries"
    disk.overwrite(path, disk.content(path)[:1024])
    disk.flip(path, 20)
    disk.capacity_bytes = disk.used_bytes() + 1500
    log = open_log(disk, BIG, claimed=log.flushed_end)
    assert disk.files()[path] == 1024
    disk.capacity_bytes = None
    elect(log, 2)
    assert flush(log) == 6
