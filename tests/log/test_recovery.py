"""Opening a log after something happened: what is cut, what is damage, what is mended."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import attrs
import pytest

from jepsen_like.disk import CrashOdds, SimDisk
from raftmq.errors import CorruptBatchError
from raftmq.log.bare_entries import SECTOR
from raftmq.log.log_start import LocalStart, LogStart, Pending
from raftmq.log.model import DamagedError, LogConfig, NewerFormatError, UnusableLogError
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.ports import DiskError
from raftmq.types import LeaderEpoch, Offset, RaftIndex
from tests.log.helpers import (
    SMALL,
    Model,
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


def model_of(log: ReplicatedLog) -> Model:
    model = Model()
    for e in all_entries(log):
        model.add(e.leader_epoch, e.kind, bytes(e.payload), e.end - e.start)
    return model


def readable(log: ReplicatedLog) -> dict[int, bytes]:
    """Every entry that the log gives out, by index; damaged ones are skipped."""
    found: dict[int, bytes] = {}
    at = log.log_start.index
    while at < log.end_index:
        try:
            for entry in log.entries(at, 1 << 20):
                found[entry.start] = bytes(entry.payload)
                at = entry.end
        except DamagedError as error:
            at = RaftIndex(log.index_of(Offset(error.end - 1)) + 1)
    return found


# --- torn tails ----------------------------------------------------------------------------------


def test_torn_tails_of_every_length_are_cut() -> None:
    disk = sim_disk()
    log = filled(disk, 4, BIG)
    whole = disk.content(segment())
    model = model_of(log)
    sizes = [len(e.payload) for e in model.entries[1:]]
    for size in range(len(whole) - sizes[-1], len(whole)):
        disk.overwrite(segment(), whole[:size])
        opened = open_log(disk, BIG, claimed=7)
        assert opened.log_end_offset == 6
        assert opened.recovery.cut == (size > len(whole) - sizes[-1])
        assert opened.recovery.cut_claimed_end == 0, "a short file cannot have been synced whole"
        assert opened.damaged == []
        append(opened, 1)
        flush(opened)
        assert open_log(disk, BIG, claimed=opened.flushed_end).log_end_offset == 7


def test_a_whole_but_wrong_last_batch_is_cut_and_its_claim_reported() -> None:
    disk = sim_disk()
    filled(disk, 4, BIG)
    whole = disk.content(segment())
    size = len(whole) // 4
    for position in range(3 * size, len(whole)):
        disk.overwrite(segment(), whole)
        disk.flip(segment(), position, position % 8)
        opened = open_log(disk, BIG, claimed=7)
        assert opened.recovery.cut
        # 9 is what the batch claimed; a broken header claims at least one record.
        assert opened.recovery.cut_claimed_end in (9, 8), position
        assert opened.log_end_offset == 6
        assert opened.recovery.claimed_end == 0


def test_zeros_at_the_end_claim_nothing() -> None:
    disk = sim_disk()
    filled(disk, 3, BIG)
    whole = disk.content(segment())
    disk.overwrite(segment(), whole + bytes(5000))
    log = open_log(disk, BIG, claimed=7)
    assert log.recovery.cut
    assert log.recovery.cut_claimed_end == 0
    assert disk.files()[segment()] == len(whole)


def test_a_reserve_is_no_tail() -> None:
    disk = sim_disk()
    config = attrs.evolve(BIG, segment_reserve_bytes=10_000)
    log = filled(disk, 3, config)
    assert disk.files()[segment()] >= 10_000
    size = log.size_bytes
    log = open_log(disk, config, claimed=log.flushed_end)
    assert not log.recovery.cut
    assert log.size_bytes == size
    for _ in range(100):
        append(log, 1, size=300)
        flush(log)
    assert disk.files()[segment()] >= log.size_bytes + 5000
    assert open_log(disk, config, claimed=log.flushed_end).log_end_offset == 106
    small = attrs.evolve(config, segment_bytes=8000)
    log = open_log(disk, small, claimed=log.flushed_end)
    append(log, 1)
    flush(log)
    assert disk.files()[segment()] == log._segments.all[0].size, "a closed segment has no reserve"


def test_below_the_claim_a_torn_tail_is_damage() -> None:
    disk = sim_disk()
    filled(disk, 4, BIG)
    whole = disk.content(segment())
    disk.overwrite(segment(), whole[:-5])
    log = open_log(disk, BIG, claimed=9)
    assert not log.recovery.cut
    assert log.recovery.damaged == [(6, 8)]
    assert log.recovery.claimed_end == 9
    assert (log.log_end_offset, log.end_index) == (8, 9)
    append(log, 1)
    flush(log)
    assert disk.content(segment()) == whole[:-5], "nothing is written behind damage"
    assert disk.exists(segment(8))
    with pytest.raises(DamagedError):
        log.entries(RaftIndex(7), 100)
    assert len(readable(log)) == 5
    log = open_log(disk, BIG, claimed=log.flushed_end)
    assert log.damaged == [(6, 8)]


def test_a_claim_in_the_middle_of_what_is_torn() -> None:
    """Bytes below the claim are damage, those above it are cut: here one batch spans both."""
    disk = sim_disk()
    filled(disk, 4, BIG)
    disk.overwrite(segment(), disk.content(segment())[:-5])
    log = open_log(disk, BIG, claimed=8)
    assert log.log_end_offset == 7
    assert log.damaged == [(6, 7)]


def test_damage_before_a_sound_batch_is_damage_whatever_the_claim() -> None:
    disk = sim_disk()
    filled(disk, 4, BIG)
    size = disk.files()[segment()] // 4
    disk.flip(segment(), size + 90)
    log = open_log(disk, BIG)
    assert log.damaged == [(2, 4)]
    assert log.recovery.claimed_end == 9
    assert sorted(readable(log)) == [0, 1, 5, 7]


@pytest.mark.slow
def test_every_flipped_byte_is_detected_and_never_served() -> None:
    disk = sim_disk()
    log = filled(disk, 3, attrs.evolve(SMALL, segment_bytes=300), size=9)
    model = model_of(log)
    payloads = {e.start: e.payload for e in model.entries}
    log.close()
    files = {path: disk.content(path) for path in disk.files(FOLDER)}
    for path, whole in files.items():
        for position in range(len(whole)):
            for other, content in files.items():
                disk.open(other, create=True)
                disk.overwrite(other, content)
            disk.flip(path, position, position % 8)
            opened = open_log(disk, log.config, claimed=7)
            found = readable(opened)
            assert all(payloads[start] == payload for start, payload in found.items())
            if path.endswith(".log"):
                assert opened.damaged != [], (path, position)
                assert len(found) == len(payloads) - 1
                start = opened.damaged[0][0]
                with pytest.raises(DamagedError):
                    opened.locate(start, 1 << 20, Offset(6))
                good = [e for e in model.entries[1:] if e.end - 1 <= start]
                spans = opened.locate(Offset(0), 1 << 20, Offset(6)) if good else []
                assert span_bytes(spans) == b"".join(e.payload for e in good)
            else:
                assert len(found) == len(payloads), (path, position)
                assert opened.damaged == []
            assert opened.log_end_offset == 6


def test_the_scrub_finds_what_recovery_trusts() -> None:
    disk = sim_disk()
    log = filled(disk, 20)
    log.close()
    disk.flip(segment(), 300)
    log = open_log(disk, claimed=log.flushed_end)
    assert log.recovery.damaged == []
    found: list[tuple[Offset, Offset]] = []
    while not found:
        found = log.scrub(500)
    assert found == log.damaged
    assert log.recovery.claimed_end == 0
    log.close()
    log = open_log(disk, claimed=log.flushed_end)
    assert log.recovery.damaged == found, "what was found once is looked for at the next opening"


@pytest.mark.parametrize("reader", ["locate", "entries", "headers", "job"])
def test_reading_finds_damage_too(reader: str) -> None:
    disk = sim_disk()
    log = filled(disk, 20)
    log.close()
    position = 0 if reader == "headers" else 300
    disk.flip(segment(), position, 5)
    log = open_log(disk, claimed=log.flushed_end)
    start = Offset(2 if position else 0)
    if reader == "job":
        job = log.needs_verification(start, 1)
        assert job is not None
        job.run()
        assert log.checked(job) == [(start, start + 2)]
        with pytest.raises(DamagedError):
            log.needs_verification(start, 1)
    reads: dict[str, Callable[[], object]] = {
        "headers": lambda: list(log.headers(start, Offset(40))),
        "entries": lambda: log.entries(log.index_of(start), 100),
        "locate": lambda: log.locate(start, 100, Offset(40)),
    }
    with pytest.raises(DamagedError) as caught:
        reads.get(reader, reads["locate"])()
    assert (caught.value.start, caught.value.end) == (start, start + 2)
    assert log.damaged == [(start, start + 2)]


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


# --- indexes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["index", "timeindex"])
@pytest.mark.parametrize("harm", ["missing", "empty", "short", "header", "entry", "other"])
def test_damaged_indexes_are_rebuilt(suffix: str, harm: str) -> None:
    disk = sim_disk()
    config = attrs.evolve(SMALL, segment_bytes=8000)
    log = filled(disk, 100, config)
    model = model_of(log)
    bases = [s.base_offset for s in log._segments.all]
    assert len(bases) > 2
    log.close()
    for base in bases:
        path = segment(base, suffix)
        data = disk.content(path)
        if harm == "missing":
            disk.remove(path)
        elif harm == "other":
            disk.overwrite(path, disk.content(segment(bases[-1 if base == 0 else 0], suffix)))
        else:
            size = {"empty": 0, "short": len(data) - 1, "header": len(data), "entry": len(data)}
            disk.overwrite(path, data[: size[harm]])
            if harm in ("header", "entry"):
                disk.flip(path, 20 if harm == "header" else 70, 3)
    log = open_log(disk, config, claimed=log.flushed_end)
    model.check(log)
    for number in range(100):
        assert log.offset_for_timestamp(1000 + 10 * number, Offset(200)) == (
            1000 + 10 * number,
            2 * number,
            1,
        )
        expected = model.entries[number + 1].payload
        assert span_bytes(log.locate(Offset(2 * number), 1, Offset(200))) == expected
    for end in range(2, 200, 10):
        assert log.max_timestamp(Offset(end)) == (1000 + 5 * end - 9, end - 1, 1)


def test_a_wrong_index_with_right_checksums_shows_nothing_wrong() -> None:
    """Say a device brought back an older index: pairs point into the middle of batches."""
    disk = sim_disk()
    log = filled(disk, 40, BIG)
    model = model_of(log)
    index = log._segments.all[0].offset_index
    for at in range(len(index._pending_values)):
        index._pending_values[at] += 7
    log._recent.clear()
    log._reader.forget_positions()
    for offset in range(0, 80, 2):
        for end in range(offset + 2, 81, 6):
            data = span_bytes(log.locate(Offset(offset), 700, Offset(end)))
            whole = b"".join(e.payload for e in model.entries[1:] if offset < e.end - 1 <= end)
            assert whole.startswith(data)
            assert data
    model.check(log)


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
    from raftmq.log import bare_entries, log_start, sparse_index

    for module, path in (
        (sparse_index, segment(suffix="index")),
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
