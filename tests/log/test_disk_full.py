"""A full disk refuses what does not fit and nothing else; freed space is used at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from random import Random

import attrs
import pytest

from jepsen_like.disk import SimCrash
from raftmq.log.log_start import LogStartFile
from raftmq.log.model import LogConfig
from raftmq.ports import DiskError, DiskFullError
from raftmq.types import Offset, RaftIndex
from tests.log.helpers import SMALL, all_entries, append, elect, filled, flush, open_log, sim_disk

BIG = LogConfig(segment_bytes=1 << 20, index_interval_bytes=300, bare_reserve_bytes=8192)


def until_full(step: Callable[[int], object]) -> int:
    """Repeat a step until the disk is full; returns how often it worked."""
    for count in range(10_000):
        try:
            step(count)
        except DiskFullError:
            return count
    raise AssertionError("the disk never filled")


def test_an_append_that_does_not_fit_changes_nothing() -> None:
    disk = sim_disk()
    log = filled(disk, 5, BIG)
    path = log._segments.all[0].path
    size = disk.files()[path]
    for room in (0, 1, 50, 400):
        disk.capacity_bytes = disk.used_bytes() + room
        with pytest.raises(DiskFullError):
            append(log, 1, size=500)
        assert disk.files()[path] == size, "the partial batch was cut back"
        assert (log.log_end_offset, log.end_index) == (10, 11)
    disk.capacity_bytes = None
    append(log, 1, size=500)
    assert flush(log) == 12
    assert len(all_entries(open_log(disk, BIG, claimed=12))) == 7


def test_a_new_segment_that_does_not_fit() -> None:
    disk = sim_disk()
    config = attrs.evolve(SMALL, segment_reserve_bytes=4096)
    log = filled(disk, 5, config)
    log.config = config
    append(log, 1, size=1500)
    flush(log)
    disk.capacity_bytes = disk.used_bytes()
    for _ in range(3):
        with pytest.raises(DiskFullError):
            append(log, 1, size=1500)
    names = disk.list(log.folder)
    assert not log._segments.all[-1].path.endswith(f"{log.log_end_offset:020d}.log")
    assert f"{log.log_end_offset:020d}.log" not in names
    disk.capacity_bytes = None
    append(log, 1, size=1500)
    assert flush(log) == log.end_index


def test_a_segment_reserve_is_used_up() -> None:
    disk = sim_disk()
    log = filled(disk, 2, attrs.evolve(BIG, segment_reserve_bytes=5000))
    disk.capacity_bytes = disk.used_bytes()
    written = until_full(lambda _count: append(log, 1, size=100))
    assert written > 10
    flush(log)
    assert open_log(disk, BIG, claimed=log.flushed_end).log_end_offset == 4 + written


def test_elections_work_on_a_full_disk() -> None:
    disk = sim_disk()
    log = filled(disk, 2, BIG)
    disk.capacity_bytes = disk.used_bytes()

    def elect_and_flush(count: int) -> None:
        elect(log, count + 2)
        assert flush(log) == log.end_index

    epoch = 1 + until_full(elect_and_flush)
    assert epoch >= 5
    end = log.end_index
    assert log.epochs()[-1] == (epoch, end - 1)
    disk.capacity_bytes = None
    elect(log, epoch + 1)
    assert flush(log) == end + 1
    log = open_log(disk, BIG, claimed=end + 1)
    assert log.end_index == end + 1


def test_staged_batches_that_do_not_fit_are_dropped_with_what_follows() -> None:
    disk = sim_disk()
    log = filled(disk, 2, BIG)
    elect(log, 2)
    append(log, 2, size=10)
    append(log, 2, size=900)
    elect(log, 3)
    append(log, 3)
    disk.capacity_bytes = disk.used_bytes() + 200
    job = log.flush_job()
    assert job is not None
    job.run()
    with pytest.raises(DiskFullError):
        log.complete(job)
    assert (log.end_index, log.log_end_offset) == (7, 5)
    assert log.epochs() == [(1, 0), (2, 5)]
    assert flush(log) == 7
    disk.capacity_bytes = None
    append(log, 2)
    assert flush(log) == 8
    assert open_log(disk, BIG, claimed=8).end_index == 8


def test_what_waits_in_memory_is_bounded() -> None:
    disk = sim_disk()
    log = open_log(disk, attrs.evolve(BIG, staged_bytes_max=1000))
    elect(log, 1)
    append(log, 1, size=5000)
    with pytest.raises(DiskFullError):
        append(log, 1)
    assert log.end_index == 2
    assert flush(log) == 2
    append(log, 1)
    assert flush(log) == 3


def test_indexes_wait_for_space() -> None:
    disk = sim_disk()
    config = attrs.evolve(BIG, index_interval_bytes=1, segment_reserve_bytes=60_000)
    log = filled(disk, 2, config)
    disk.capacity_bytes = disk.used_bytes()
    sent = [append(log, 1, size=100) for _ in range(150)]
    flush(log)
    log._recent.clear()
    for number in (0, 70, 149):
        span = log.locate(Offset(4 + number), 1, Offset(154))[0]
        assert span.file.pread(span.size, span.position) == sent[number]
    log.close()
    log = open_log(disk, config, claimed=log.flushed_end)
    assert len(all_entries(log)) == 153


def test_the_log_start_moves_without_a_byte_free() -> None:
    """It is what gives space back: on the disk that is full, now and after a restart."""
    disk = sim_disk()
    log = filled(disk, 20, attrs.evolve(SMALL, segment_bytes=300))
    disk.capacity_bytes = disk.used_bytes()
    log.move_start(log.start_at(Offset(10)))
    assert disk.used_bytes() < disk.capacity_bytes, "segments are gone"
    disk.capacity_bytes = disk.used_bytes()
    log = open_log(disk, claimed=log.flushed_end)
    assert (log.log_start_offset, log.end_index) == (10, 41)
    log.move_start(log.start_at(Offset(20)))
    disk.capacity_bytes = None
    assert open_log(disk, claimed=log.flushed_end).log_start_offset == 20


def test_truncation_and_reset_need_no_room_either() -> None:
    disk = sim_disk()
    log = filled(disk, 20)
    disk.capacity_bytes = disk.used_bytes()
    log.truncate_to(RaftIndex(11))
    assert log.end_index == 11
    disk.capacity_bytes = disk.used_bytes()
    log.reset_to(attrs.evolve(log.start_at(Offset(4)), state=b"s" * 3000))
    assert log.end_index == 5
    assert open_log(disk, claimed=5).log_start.state == b"s" * 3000


@pytest.mark.parametrize("seed", range(30))
def test_power_lost_while_the_start_is_written_over(seed: int) -> None:
    """One copy is sound at every moment: the start is the old one or the new one."""
    disk = sim_disk()
    log = filled(disk, 20)
    disk.capacity_bytes = disk.used_bytes()
    disk.crash_after(1 + seed % 9)
    is_moved = False
    try:
        log.move_start(log.start_at(Offset(10)))
        is_moved = True
    except SimCrash:
        pass
    disk.crash(Random(seed))
    again = open_log(disk, claimed=41)
    assert again.log_start_offset in ((10,) if is_moved else (0, 10))
    assert again.end_index == 41


def test_a_record_that_outgrew_its_room_changes_nothing() -> None:
    disk = sim_disk()
    log = filled(disk, 20)
    disk.capacity_bytes = disk.used_bytes()
    start = attrs.evolve(log.start_at(Offset(20)), state=bytes(5000))
    with pytest.raises(DiskFullError):
        log.move_start(start)
    with pytest.raises(DiskFullError):
        log.reset_to(start)
    assert log.log_start_offset == 0
    assert len(all_entries(log)) == 21
    assert open_log(disk, claimed=log.flushed_end).end_index == 41


@pytest.mark.parametrize("is_reopened", [False, True])
@pytest.mark.parametrize("size", [1_000, 9_000, 60_000])
def test_room_for_a_state_that_grew_is_kept_beforehand(size: int, *, is_reopened: bool) -> None:
    disk = sim_disk()
    log = filled(disk, 20)
    for state_bytes in range(0, size + 1, 1_000):  # it grows
        log.reserve_start(state_bytes)
    if is_reopened:
        log = open_log(disk, claimed=log.flushed_end)
    disk.capacity_bytes = disk.used_bytes()
    log.reserve_start(size)
    log.move_start(attrs.evolve(log.start_at(Offset(10)), state=b"s" * size))
    disk.capacity_bytes = disk.used_bytes()
    log.reset_to(attrs.evolve(log.start_at(Offset(20)), state=b"t" * size))
    assert open_log(disk, claimed=log.flushed_end).log_start.state == b"t" * size


def test_room_is_kept_in_few_steps_and_given_back() -> None:
    disk = sim_disk()
    log = filled(disk, 20)
    path = f"{log.folder}/log-start"
    sizes = []
    for state_bytes in range(0, 300_000, 1_000):
        log.reserve_start(state_bytes)
        assert disk.files()[path] // 2 >= state_bytes
        sizes.append(disk.files()[path])
    assert len(set(sizes)) < 10
    log.move_start(attrs.evolve(log.start_at(Offset(10)), state=b"s"))
    assert disk.files()[path] == sizes[-1], "it will be needed again"
    log.reserve_start(1_000)
    log.move_start(attrs.evolve(log.start_at(Offset(12)), state=b"s"))
    assert disk.files()[path] == 8192


def test_what_cannot_be_reserved_changes_nothing() -> None:
    disk = sim_disk()
    log = filled(disk, 20)
    disk.capacity_bytes = disk.used_bytes()
    for _ in range(2):
        with pytest.raises(DiskFullError):
            log.reserve_start(9_000)
    disk.capacity_bytes = disk.used_bytes() + 8192
    log.move_start(log.start_at(Offset(10)))  # in a file as large as before
    disk.capacity_bytes = None
    log.reserve_start(9_000)
    assert open_log(disk, claimed=log.flushed_end).log_start_offset == 10


@pytest.mark.parametrize("seed", range(12))
def test_power_lost_while_room_is_reserved(seed: int) -> None:
    disk = sim_disk()
    log = filled(disk, 20)
    log.move_start(attrs.evolve(log.start_at(Offset(10)), state=b"s" * 100))
    disk.crash_after(1 + seed)
    with suppress(SimCrash):
        log.reserve_start(9_000)
    disk.crash(Random(seed))
    again = open_log(disk, claimed=41)
    assert (again.log_start_offset, again.log_start.state) == (10, b"s" * 100)


def test_a_file_without_room_to_grow_is_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions padded each copy to a sector."""
    disk = sim_disk()
    with monkeypatch.context() as patch:
        patch.setattr("raftmq.log.log_start._BLOCK", 512)
        log = filled(disk, 20)
        log.move_start(log.start_at(Offset(10)))
    size = disk.files()[f"{log.folder}/log-start"]
    assert size == 1024
    disk.flip(f"{log.folder}/log-start", 30)
    again = open_log(disk, claimed=log.flushed_end)
    assert again.log_start_offset == 10
    disk.flip(f"{log.folder}/log-start", size // 2 + 30)
    assert open_log(disk, claimed=log.flushed_end).log_start_offset == 10, "mended"


def test_a_change_that_was_begun_needs_no_more_room() -> None:
    disk = sim_disk()
    log = filled(disk, 20)
    disk.capacity_bytes = disk.used_bytes() + 1024
    log.truncate_to(RaftIndex(11))
    disk.capacity_bytes = disk.used_bytes() + 1024
    log.reset_to(attrs.evolve(log.start_at(Offset(8)), state=b""))
    assert log.end_index == 9
    assert open_log(disk, claimed=9).recovery.finished == ""


@pytest.mark.parametrize("room", [1024, 2048, 6000])
def test_dead_bare_entries_stay_when_there_is_no_room_to_rewrite(room: int) -> None:
    disk = sim_disk()
    log = open_log(disk, BIG)
    for epoch in range(1, 120):
        elect(log, epoch)
    append(log, 119)
    flush(log)
    size = disk.files()[f"{log.folder}/bare.entries"]
    disk.capacity_bytes = disk.used_bytes() + room
    log.move_start(log.start_at(Offset(1)))
    assert disk.files()[f"{log.folder}/bare.entries"] == size
    assert log.log_start_offset == 1
    assert open_log(disk, BIG, claimed=120).end_index == 120
    assert disk.list(log.folder)[-1] == "log-start"


def test_bare_entries_are_truncated_when_their_reserve_is_used_up() -> None:
    disk = sim_disk()
    log = open_log(disk, attrs.evolve(BIG, bare_reserve_bytes=2048))
    disk.capacity_bytes = disk.used_bytes()
    count = until_full(lambda number: elect(log, number + 1))
    assert count == 2
    flush(log)
    log.truncate_to(RaftIndex(1))
    log.truncate_to(RaftIndex(0))
    assert log.end_index == 0


def test_a_full_disk_in_the_middle_of_a_change_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Had it gone on, the next start would have carried the truncation out once more."""
    disk = sim_disk()
    log = filled(disk, 20)

    def refuse(_self: LogStartFile, _local: object) -> None:
        raise DiskFullError("full")

    with monkeypatch.context() as patch:
        patch.setattr(LogStartFile, "finish", refuse)
        with pytest.raises(DiskError) as caught:
            log.truncate_to(RaftIndex(11))
        assert not isinstance(caught.value, DiskFullError)
    assert open_log(disk, claimed=11).recovery.finished == "truncation"


def test_a_failed_flush_never_completes() -> None:
    disk = sim_disk()
    log = filled(disk, 2)
    append(log, 1)
    job = log.flush_job()
    assert job is not None
    disk.fail_when(lambda verb, _path: verb == "fdatasync")
    with pytest.raises(DiskError):
        job.run()
    assert log.flush_job() is None
    assert log.flushed_end == 5


def test_closing_without_room_for_indexes() -> None:
    disk = sim_disk()
    log = filled(disk, 3, attrs.evolve(SMALL, index_interval_bytes=1))
    disk.capacity_bytes = disk.used_bytes()
    log.close()
    log = open_log(disk, claimed=log.flushed_end)
    assert log.end_index == 7
    disk.capacity_bytes = disk.used_bytes() + 100
    append(log, 1)
    flush(log)


def test_a_start_whose_second_copy_was_cut_off_is_made_whole() -> None:
    disk = sim_disk()
    log = filled(disk, 5)
    path = f"{log.folder}/log-start"
    file = disk.open(path)
    size = file.size()
    file.truncate(130)
    file.fdatasync()
    file.close()
    again = open_log(disk, claimed=log.flushed_end)
    assert again.end_index == log.end_index
    assert disk.files()[path] == size
