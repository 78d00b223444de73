"""What a log promises its callers, on the real disk and on the simulated one."""

from __future__ import annotations

import attrs
import pytest

from raftmq.log.log_start import LogStart
from raftmq.log.model import LogConfig, LogEntry
from raftmq.log.reader import ENTRIES_MAX
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.log.shared import Shared
from raftmq.records import LOG_APPEND_TIME, NewRecord, build_batch, parse_header
from raftmq.types import LeaderEpoch, Offset, RaftIndex
from tests.log.conftest import Place
from tests.log.helpers import (
    MEMBERSHIP,
    SMALL,
    FakeClock,
    Model,
    all_entries,
    append,
    batch,
    elect,
    flush,
    open_log,
    span_bytes,
)


def start(place: Place, config: LogConfig = SMALL, **more: object) -> ReplicatedLog:
    return open_log(place.disk, config, folder=f"{place.root}/a-0", **more)  # type: ignore[arg-type]


def again(place: Place, log: ReplicatedLog, **more: object) -> ReplicatedLog:
    """Close the log and open it with an exact claim."""
    log.close()
    return start(place, log.config, claimed=log.flushed_end, **more)


def test_a_new_log_is_empty(place: Place) -> None:
    log = start(place)
    assert log.recovery.is_new
    assert (log.log_start_offset, log.log_end_offset, log.end_index, log.flushed_end) == (0,) * 4
    assert log.flush_job() is None
    assert log.entries(RaftIndex(0), 100) == ()
    assert log.locate(Offset(0), 100, Offset(0)) == []
    assert log.epochs() == []
    assert log.end_offset_for_epoch(LeaderEpoch(9)) is None
    assert log.max_timestamp(Offset(0)) is None
    assert log.offset_for_timestamp(0, Offset(0)) is None
    assert log.scrub(100) == []
    assert log.needs_verification(Offset(0), 100) is None
    assert not again(place, log).recovery.is_new


def test_batches_are_stored_as_they_came(place: Place) -> None:
    log = start(place)
    elect(log, 3)
    flush(log)
    sent = [append(log, 3, count=2, size=300) for _ in range(20)]
    flush(log)
    for opened in (log, again(place, log)):
        spans = opened.locate(Offset(0), 1 << 20, Offset(40))
        assert len(spans) > 3
        assert span_bytes(spans) == b"".join(sent)
        assert [bytes(e.payload) for e in all_entries(opened)[1:]] == sent


def test_bare_entries_take_no_offset(place: Place) -> None:
    log = start(place)
    elect(log, 1)
    first = append(log, 1, count=3)
    log.append_bare(log.end_index, LeaderEpoch(1), MEMBERSHIP, b"members")
    elect(log, 2)
    second = append(log, 2, count=2)
    assert (log.log_end_offset, log.end_index) == (5, 8)
    expected = [
        LogEntry(RaftIndex(0), RaftIndex(1), LeaderEpoch(1), 1, b"e1"),
        LogEntry(RaftIndex(1), RaftIndex(4), LeaderEpoch(1), 0, first),
        LogEntry(RaftIndex(4), RaftIndex(5), LeaderEpoch(1), 2, b"members"),
        LogEntry(RaftIndex(5), RaftIndex(6), LeaderEpoch(2), 1, b"e2"),
        LogEntry(RaftIndex(6), RaftIndex(8), LeaderEpoch(2), 0, second),
    ]
    assert list(log.entries(RaftIndex(0), 1 << 20)) == expected
    assert [e.is_bare for e in expected] == [True, False, True, True, False]
    flush(log)
    log = again(place, log)
    assert [attrs.evolve(e, payload=bytes(e.payload)) for e in all_entries(log)] == expected
    assert log.epochs() == [(1, 0), (2, 5)]
    assert [e.index for e in log.bare_entries()] == [0, 4, 5]
    assert [log.offset_of(RaftIndex(i)) for i in (0, 1, 4, 5, 6, 8)] == [0, 0, 3, 3, 3, 5]
    assert [log.index_of(Offset(o)) for o in (0, 1, 3, 5)] == [1, 2, 6, 8]
    assert log.epoch_at(Offset(2)) == 1
    assert log.epoch_at(Offset(3)) == 2
    assert log.end_offset_for_epoch(LeaderEpoch(1)) == (1, 3)
    assert log.end_offset_for_epoch(LeaderEpoch(7)) == (2, 5)
    assert log.end_offset_for_epoch(LeaderEpoch(0)) is None
    assert log.previous_epoch_at(RaftIndex(0)) == 0
    assert log.previous_epoch_at(RaftIndex(6)) == 2


def test_entries_are_so_many_at_most_wherever_they_lie(place: Place) -> None:
    log = start(place)
    elect(log, 1)
    for _ in range(ENTRIES_MAX + 44):
        append(log, 1, size=10)
    assert len(log.entries(RaftIndex(1), 1 << 20)) == ENTRIES_MAX
    flush(log)
    opened = again(place, log)
    first = opened.entries(RaftIndex(1), 1 << 20)
    assert len(first) == ENTRIES_MAX
    assert len(opened.entries(first[-1].end, 1 << 20)) == 44


def test_bytes_max_and_at_least_one(place: Place) -> None:
    log = start(place)
    elect(log, 1)
    flush(log)
    sent = [append(log, 1, size=100) for _ in range(6)]
    size = len(sent[0])
    for opened in (log, again(place, log)):
        assert len(opened.entries(RaftIndex(1), 1)) == 1
        assert len(opened.entries(RaftIndex(1), 3 * size)) == 3
        assert opened.entries(RaftIndex(7), 100) == ()
        locate = opened.locate
        assert span_bytes(locate(Offset(1), 1, Offset(6))) == sent[1]
        assert locate(Offset(1), 1, Offset(6), at_least_one=False) == []
        assert span_bytes(locate(Offset(1), 2 * size + 1, Offset(6))) == sent[1] + sent[2]
        assert span_bytes(locate(Offset(4), 1 << 20, Offset(5))) == sent[4]
        assert locate(Offset(5), 1 << 20, Offset(5)) == []
        assert locate(Offset(6), 1 << 20, Offset(6)) == []
        assert locate(Offset(0), 0, Offset(6), at_least_one=False) == []


def test_batches_wait_for_the_bare_entry_before_them(place: Place) -> None:
    """A batch whose election could be lost by a crash must not be on disk."""
    log = start(place)
    elect(log, 1)
    sent = append(log, 1)
    assert log.size_bytes == 0
    assert bytes(log.entries(RaftIndex(1), 100)[0].payload) == sent
    assert log.locate(Offset(0), 100, Offset(1)) == []
    assert [h.base_offset for h in log.headers(Offset(0), Offset(1))] == [0]
    job = log.flush_job()
    assert job is not None
    assert log.flush_job() is None, "one at a time"
    job.run()
    assert log.complete(job) == 1
    assert log.size_bytes == len(sent)
    assert span_bytes(log.locate(Offset(0), 100, Offset(1))) == sent
    assert flush(log) == 2


def test_staged_batches_outlive_the_recent_ones(place: Place) -> None:
    shared = Shared.make(place.disk, recent_bytes_max=1)
    log = start(place, shared=shared)
    elect(log, 1)
    sent = [append(log, 1) for _ in range(5)]
    assert [bytes(e.payload) for e in log.entries(RaftIndex(2), 1 << 20)] == sent[1:]
    assert len(log.entries(RaftIndex(1), 2 * len(sent[0]))) == 2
    elect(log, 2)
    append(log, 2)
    assert len(all_entries(log)) == 8
    flush(log)
    assert [bytes(e.payload) for e in log.entries(RaftIndex(1), 1 << 20)[:5]] == sent


def test_the_flushed_end_is_a_prefix(place: Place) -> None:
    log = start(place)
    elect(log, 1)
    flush(log)
    append(log, 1)
    job = log.flush_job()
    assert job is not None
    append(log, 1)
    elect(log, 2)
    append(log, 2)
    job.run()
    assert log.complete(job) == 2, "only what was written when the job was made"
    assert log.flushed_end_offset == 1
    job = log.flush_job()
    assert job is not None
    job.run()
    assert log.complete(job) == 4, "the bare entry, but not the batch behind it"
    assert flush(log) == 5


def test_segments_roll_by_size(place: Place) -> None:
    log = start(place)
    elect(log, 1)
    flush(log)
    for _ in range(12):
        append(log, 1, size=500)
        flush(log)
    names = [n for n in place.disk.list(log.folder) if n.endswith(".log")]
    assert names == [f"{n:020d}.log" for n in (0, 3, 6, 9)]
    append(log, 1, size=5000)
    append(log, 1, size=5000)
    flush(log)
    names = [n for n in place.disk.list(log.folder) if n.endswith(".log")]
    assert names[4:] == [f"{n:020d}.log" for n in (12, 13)], "a large batch is alone"


def test_segments_roll_by_age(place: Place) -> None:
    clock = FakeClock()
    log = start(place, attrs.evolve(SMALL, segment_ms=1000), clock=clock)
    elect(log, 1)
    flush(log)
    assert not log.roll_if_aged(clock.wall_ms() + 5000), "nothing to close"
    append(log, 1)
    flush(log)
    clock.now_ms += 999
    append(log, 1)
    clock.now_ms += 1
    append(log, 1)
    flush(log)
    assert not log.roll_if_aged(clock.wall_ms())
    clock.now_ms += 1000
    append(log, 1)
    assert not log.roll_if_aged(clock.wall_ms()), "busy"
    flush(log)
    clock.now_ms += 1000
    assert log.roll_if_aged(clock.wall_ms())
    assert not log.roll_if_aged(clock.wall_ms()), "empty"
    names = [n for n in place.disk.list(log.folder) if n.endswith(".log")]
    assert names == [f"{n:020d}.log" for n in (0, 2, 3, 4)]
    append(log, 1)
    flush(log)
    assert again(place, log).log_end_offset == 5


def test_an_age_survives_a_restart(place: Place) -> None:
    clock = FakeClock()
    config = attrs.evolve(SMALL, segment_ms=1000)
    log = start(place, config, clock=clock)
    elect(log, 1)
    flush(log)
    append(log, 1, timestamp=clock.wall_ms())
    flush(log)
    clock.now_ms += 1500
    log = again(place, log, clock=clock)
    assert log.roll_if_aged(clock.wall_ms())


def test_records_that_are_old_when_they_come_can_be_read_for_a_while(place: Place) -> None:
    clock = FakeClock()
    log = start(place, clock=clock)
    week_ms = 604_800_000
    clock.now_ms += 2 * week_ms
    log.configure(attrs.evolve(SMALL, segment_ms=week_ms, retention_ms=week_ms))
    elect(log, 1)
    flush(log)
    append(log, 1, timestamp=1_000)
    flush(log)
    clock.now_ms += 299_999
    assert not log.roll_if_aged(clock.wall_ms())
    clock.now_ms += 1
    assert log.roll_if_aged(clock.wall_ms())


@pytest.mark.parametrize("end", range(42))
def test_truncation_across_segments(place: Place, end: int) -> None:
    log = start(place)
    model = Model()
    elect(log, 1)
    model.add(1, 1, b"e1", 1)
    epoch = 1
    for number in range(20):
        if number in (7, 14):
            epoch += 1
            elect(log, epoch)
            model.add(epoch, 1, b"e%d" % epoch, 1)
        model.add(epoch, 0, append(log, epoch, count=1 + number % 3, size=250), 1 + number % 3)
    flush(log)
    if end not in model.boundaries():
        return
    log.truncate_to(RaftIndex(end))
    model.truncate(end)
    model.check(log)
    assert log.flushed_end == end
    log.truncate_to(RaftIndex(end))
    elect(log, 9)
    model.add(9, 1, b"e9", 1)
    model.add(9, 0, append(log, 9), 1)
    assert flush(log) == end + 2
    model.check(log)
    log = again(place, log)
    model.check(log)
    assert not log.recovery.damaged
    assert not log.recovery.cut


def test_truncation_caps_an_outstanding_flush(place: Place) -> None:
    log = start(place)
    elect(log, 1)
    flush(log)
    append(log, 1)
    append(log, 1)
    elect(log, 2)
    job = log.flush_job()
    assert job is not None
    log.truncate_to(RaftIndex(2))
    elect(log, 3)
    append(log, 3)
    job.run()
    assert log.complete(job) == 2, "what it synced is not what is there now"
    assert flush(log) == 4


def test_truncation_of_staged_batches(place: Place) -> None:
    log = start(place)
    elect(log, 1)
    for _ in range(3):
        append(log, 1)
    log.truncate_to(RaftIndex(2))
    assert (log.end_index, log.log_end_offset) == (2, 1)
    assert flush(log) == 2


def test_indexes_are_small_and_found_again(place: Place) -> None:
    config = LogConfig(segment_bytes=1 << 20, index_interval_bytes=500)
    log = start(place, config)
    elect(log, 1)
    flush(log)
    sent = [append(log, 1, count=3, size=40) for _ in range(300)]
    flush(log)
    log = again(place, log)
    assert log.recovery.scanned_bytes == 0, "closed cleanly: nothing to check"
    for offset in (0, 1, 2, 3, 450, 898, 899):
        spans = log.locate(Offset(offset), 1, Offset(900))
        assert span_bytes(spans) == sent[offset // 3]
    whole = b"".join(sent)
    data, at = b"", 0
    while at < 900:
        piece = span_bytes(log.locate(Offset(at), 3000, Offset(900)))
        assert len(piece) <= 3000
        data += piece
        at = len(data) // len(sent[0]) * 3
    assert data == whole


def test_timestamps(place: Place) -> None:
    log = start(place)
    elect(log, 1)
    flush(log)
    for number in range(40):
        append(log, 1, count=3, size=30, timestamp=1000 + 10 * (number ^ 1))
    flush(log)
    for opened in (log, again(place, log)):
        end = Offset(120)
        assert opened.offset_for_timestamp(0, end) == (1010, 0, 1)
        assert opened.offset_for_timestamp(1012, end) == (1012, 2, 1)
        assert opened.offset_for_timestamp(1013, end) == (1030, 6, 1)
        assert opened.offset_for_timestamp(1392, end) == (1392, 116, 1)
        assert opened.offset_for_timestamp(1393, end) is None
        assert opened.offset_for_timestamp(1392, Offset(114)) is None
        assert opened.max_timestamp(end) == (1392, 116, 1)
        assert opened.max_timestamp(Offset(114)) == (1372, 110, 1)
        assert opened.max_timestamp(Offset(0)) is None


def test_log_append_time_and_missing_timestamps(place: Place) -> None:
    log = start(place)
    elect(log, 1)
    flush(log)
    records = [NewRecord(None, b"a", 5), NewRecord(None, b"b", 6)]
    log.append_batch(build_batch(records, timestamp_type=LOG_APPEND_TIME, leader_epoch=1))
    no_time = [NewRecord(None, b"a", -1)]
    log.append_batch(build_batch(no_time, base_offset=2, leader_epoch=1))
    assert log.offset_for_timestamp(6, Offset(3)) == (6, 0, 1)
    assert log.max_timestamp(Offset(3)) == (6, 0, 1)


def test_only_missing_timestamps(place: Place) -> None:
    log = start(place)
    elect(log, 1)
    flush(log)
    log.append_batch(build_batch([NewRecord(None, b"a", -1)], leader_epoch=1))
    assert log.max_timestamp(Offset(1)) is None
    assert log.offset_for_timestamp(0, Offset(1)) is None


def moved(log: ReplicatedLog, offset: int, state: bytes = b"") -> LogStart:
    return attrs.evolve(log.start_at(Offset(offset)), configuration=b"voters", state=state)


def test_the_log_start_moves(place: Place) -> None:
    log = start(place)
    elect(log, 1)
    for _ in range(12):
        append(log, 1, size=500)
        flush(log)
    elect(log, 2)
    append(log, 2, size=500)
    flush(log)
    before = log.size_bytes
    log.move_start(moved(log, 7, state=b"producers" * 200))
    assert log.log_start_offset == 7
    assert log.log_start.index == 8
    assert log.size_bytes < before
    names = [n for n in place.disk.list(log.folder) if n.endswith(".log")]
    assert names[0] == f"{6:020d}.log", "the segment with the start stays"
    assert log.epochs() == [(1, 8), (2, 13)]
    assert log.end_offset_for_epoch(LeaderEpoch(1)) == (1, 12)
    assert [h.base_offset for h in log.headers(Offset(0), Offset(9))] == [7, 8]
    log = again(place, log)
    assert log.log_start == attrs.evolve(log.log_start, offset=Offset(7))
    assert (log.log_start.configuration, log.log_start.state) == (b"voters", b"producers" * 200)
    assert not log.recovery.damaged
    assert len(all_entries(log)) == 7
    log.move_start(moved(log, 13))
    assert (log.log_start_offset, log.log_start.index) == (13, 15)
    assert all_entries(log) == []
    assert log.epochs() == []
    assert log.end_offset_for_epoch(LeaderEpoch(2)) == (2, 13)
    append(log, 2)
    flush(log)
    log = again(place, log)
    assert (log.log_end_offset, log.flushed_end) == (14, 16)


def test_delete_records_inside_a_batch(place: Place) -> None:
    log = start(place)
    elect(log, 1)
    flush(log)
    sent = [append(log, 1, count=5, timestamp=1000 + n) for n in range(4)]
    flush(log)
    log.move_start(moved(log, 7))
    for opened in (log, again(place, log)):
        assert opened.log_start_offset == 7
        assert opened.log_start.base_offset == 5
        assert opened.log_start.index == 6
        assert bytes(opened.entries(RaftIndex(6), 1)[0].payload) == sent[1]
        assert span_bytes(opened.locate(Offset(7), 1, Offset(20))) == sent[1]
        assert opened.offset_for_timestamp(0, Offset(20)) == (1003, 7, 1)
        assert opened.max_timestamp(Offset(10)) == (1005, 9, 1)
    assert opened.start_at(Offset(8)).base_offset == 5


def test_the_start_keeps_bare_entries_that_stand_right_there(place: Place) -> None:
    log = start(place)
    elect(log, 1)
    append(log, 1)
    flush(log)
    elect(log, 2)
    found = log.start_at(Offset(1))
    assert (found.index, found.base_offset, found.previous_epoch) == (2, 1, 1)
    log.move_start(found)
    assert [e.index for e in log.bare_entries()] == [2]
    assert log.epochs() == [(2, 2)]
    assert flush(log) == 3


def test_a_reset_begins_anew(place: Place) -> None:
    log = start(place)
    elect(log, 1)
    for _ in range(10):
        append(log, 1, size=500)
        flush(log)
    append(log, 1)
    job = log.flush_job()
    assert job is not None
    target = LogStart(Offset(77), RaftIndex(80), LeaderEpoch(4), b"c", b"s", Offset(75))
    log.reset_to(target)
    job.run()
    assert log.complete(job) == 80
    assert (log.log_end_offset, log.end_index, log.flushed_end) == (75, 80, 80)
    assert log.log_start_offset == 77
    assert log.size_bytes == 0
    append(log, 4, count=4)
    elect(log, 5)
    assert flush(log) == 85
    log = again(place, log)
    assert log.log_start == target
    assert [e.start for e in all_entries(log)] == [80, 84]
    assert log.epochs() == [(4, 80), (5, 84)]


def test_retention(place: Place) -> None:
    def target(log: ReplicatedLog, now_ms: int, below: int, **more: int) -> int | None:
        config = {"retention_ms": -1, "retention_bytes": -1, **more}
        log.config = attrs.evolve(SMALL, **config)
        return log.retention_target(now_ms, Offset(below))

    log = start(place)
    elect(log, 1)
    flush(log)
    for number in range(12):
        append(log, 1, size=500, timestamp=1000 * number)
        flush(log)
    size = log.size_bytes
    assert target(log, 10**9, 12) is None
    assert target(log, 10**9, 12, retention_ms=0) == 9, "never the last segment"
    assert target(log, 10**9, 8, retention_ms=0) == 6, "never above the bound"
    assert target(log, 5000, 12, retention_ms=2999) == 3
    assert target(log, 5000, 12, retention_ms=3000) is None
    assert target(log, 0, 12, retention_bytes=size) is None
    assert target(log, 0, 12, retention_bytes=size // 2) == 6
    assert target(log, 0, 12, retention_bytes=0) == 9
    log.move_start(moved(log, 9))
    assert target(log, 10**9, 12, retention_ms=0) is None


def test_records_expire_although_nothing_comes_after_them(place: Place) -> None:
    """Kafka rolls a segment all of which has expired; else silence would keep the last records."""
    config = attrs.evolve(SMALL, segment_ms=10**12, retention_ms=2000, retention_bytes=-1)
    log = start(place)
    log.configure(config)
    elect(log, 1)
    flush(log)
    for _ in range(10):
        append(log, 1, timestamp=1_005_000)
    flush(log)
    end, end_index = log.log_end_offset, log.end_index
    newest_ms = log._segments.all[-1].max_timestamp
    assert not log.roll_if_aged(newest_ms + 2000), "not older than that"
    assert log.roll_if_aged(newest_ms + 2001)
    assert log.retention_target(newest_ms + 2000, end) is None, "the agreed time decides"
    assert log.retention_target(newest_ms + 2001, Offset(end - 1)) is None, "not all is committed"
    target = log.retention_target(newest_ms + 2001, end)
    assert target == end
    log.move_start(log.start_at(end))
    assert (log.log_start_offset, log.log_end_offset) == (end, end)
    assert (log.end_index, log.flushed_end, log.log_start.previous_epoch) == (end_index,) * 2 + (1,)
    assert log.size_bytes == 0
    append(log, 1)
    flush(log)
    log = again(place, log)
    assert log.log_end_offset == end + 1


def test_bounded_files_and_memory(place: Place) -> None:
    shared = Shared.make(place.disk, files_max=4, index_bytes_max=1, recent_bytes_max=9000)
    log = start(place, shared=shared)
    elect(log, 1)
    flush(log)
    sent = [append(log, 1, size=500) for _ in range(60)]
    flush(log)
    data = span_bytes(log.locate(Offset(0), 1 << 20, Offset(60)))
    assert data == b"".join(sent)
    assert len(shared.files) <= 4
    assert shared.recent.used_bytes <= 9000
    assert len(all_entries(log)) == 61
    log.delete()
    assert shared.recent.used_bytes == 0
    assert not place.disk.exists(log.folder)


def test_a_span_outlives_its_segment(place: Place) -> None:
    log = start(place)
    elect(log, 1)
    flush(log)
    sent = []
    for _ in range(8):
        sent.append(append(log, 1, size=500))
        flush(log)
    span = log.locate(Offset(0), 1, Offset(8))[0]
    log.move_start(moved(log, 8))
    assert span_bytes([span]) == sent[0]


def test_bytes_are_checked_again_after_a_while(place: Place) -> None:
    clock = FakeClock()
    log = start(place, attrs.evolve(SMALL, verified_ms=1000), clock=clock)
    elect(log, 1)
    flush(log)
    sent = [append(log, 1) for _ in range(3)]
    flush(log)
    assert log.needs_verification(Offset(1), 100) is None
    clock.now_ms += 1000
    assert log.needs_verification(Offset(1), 100) is None
    clock.now_ms += 1000
    job = log.needs_verification(Offset(1), 1)
    assert job is not None
    job.run()
    assert log.checked(job) == []
    assert log.needs_verification(Offset(1), 100) is None
    assert log.needs_verification(Offset(2), 100) is not None
    assert span_bytes(log.locate(Offset(0), 1 << 20, Offset(3))) == b"".join(sent)
    assert log.needs_verification(Offset(2), 100) is None


def test_the_scrub_goes_round(place: Place) -> None:
    log = start(place)
    elect(log, 1)
    flush(log)
    for _ in range(10):
        append(log, 1, size=500)
        flush(log)
    log = again(place, log)
    seen = []
    for _ in range(24):
        job = log.scrub_job(1)
        assert job is not None
        job.run()
        assert log.checked(job) == []
        seen.append(job.offset)
    assert seen[:10] == list(range(1, 11))
    assert seen[10:20] == seen[:10]
    assert log.needs_verification(Offset(0), 1) is None


def test_a_check_of_what_was_cut_meanwhile_says_nothing(place: Place) -> None:
    log = start(place)
    elect(log, 1)
    flush(log)
    for _ in range(4):
        append(log, 1)
    flush(log)
    job = log.scrub_job(1 << 20)
    assert job is not None
    job.run()
    log.truncate_to(RaftIndex(3))
    assert log.checked(job) == []
    log.reset_to(LogStart(Offset(9), RaftIndex(9), LeaderEpoch(1)))
    assert log.checked(job) == []


def test_misuse_is_an_assertion(place: Place) -> None:
    log = start(place)
    elect(log, 2)
    with pytest.raises(AssertionError):
        log.append_batch(batch(1, 2))
    with pytest.raises(AssertionError):
        log.append_batch(batch(0, 1))
    with pytest.raises(AssertionError):
        log.append_batch(batch(0, 2) + b"x")
    with pytest.raises(AssertionError):
        elect(log, 1)
    with pytest.raises(AssertionError):
        log.append_bare(RaftIndex(5), LeaderEpoch(2), 1, b"")
    with pytest.raises(AssertionError):
        log.append_bare(RaftIndex(1), LeaderEpoch(2), 0, b"")
    with pytest.raises(AssertionError):
        log.truncate_to(RaftIndex(9))
    job = log.flush_job()
    assert job is not None
    with pytest.raises(AssertionError):
        log.complete(job)
    append(log, 2, count=4)
    with pytest.raises(AssertionError, match="boundary"):
        log.truncate_to(RaftIndex(3))
    job.run()
    log.complete(job)
    flush(log)
    with pytest.raises(AssertionError, match="batch boundary"):
        log.truncate_to(RaftIndex(3))


def test_a_header_that_was_parsed_before_is_taken(place: Place) -> None:
    log = start(place)
    elect(log, 1)
    data = batch(0, 1)
    log.append_batch(data, parse_header(data))
    assert flush(log) == 2
