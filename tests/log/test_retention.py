"""Damage to one replica's bytes never makes its records look older than they are.

Retention believes the greatest timestamp of a segment, and what a leader proposes all replicas
delete. So that timestamp comes only from batches whose sums held, and damage counts as new.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from jepsen_like.disk import SimDisk
from raftmq.log.batch_reader import CheckedBatch
from raftmq.log.model import DamagedError, LogConfig
from raftmq.log.prefetch import IndexJob
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.log.segment import Segment
from raftmq.records import parse_header
from raftmq.types import Offset
from tests.log.helpers import (
    SMALL,
    FakeClock,
    append,
    batch,
    elect,
    flush,
    open_log,
    segment,
    sim_disk,
)

OLD_MS = 1000
YOUNG_MS = 1 << 40
NOW_MS = YOUNG_MS + 1000
CONFIG = attrs.evolve(SMALL, segment_bytes=1 << 20, retention_ms=10**6)
_TIME_AT = 35  # of the greatest timestamp in a header
SIZE = len(batch(0, 1))


def make_old(disk: SimDisk, position: int) -> None:
    """The bit that makes the batch at a position a young one rots."""
    path = segment()
    assert parse_header(disk.content(path), position).max_timestamp == YOUNG_MS
    disk.flip(path, position + _TIME_AT + 2, 0)
    assert parse_header(disk.content(path), position).max_timestamp == 0


def begun(disk: SimDisk, young: int, count: int = 20, config: LogConfig = CONFIG) -> ReplicatedLog:
    """A log with one segment, which is still open; one of its batches is young."""
    log = open_log(disk, config)
    elect(log, 1)
    for number in range(count):
        append(log, 1, timestamp=YOUNG_MS if number == young else OLD_MS)
    flush(log)
    return log


def closed(log: ReplicatedLog) -> None:
    """The first segment is closed, and another one begins."""
    log.configure(attrs.evolve(log.config, segment_bytes=100))
    append(log, 1, timestamp=YOUNG_MS)
    flush(log)
    assert len(log._segments.all) == 2


def target(log: ReplicatedLog) -> Offset | None:
    return log.retention_target(NOW_MS, log.log_end_offset)


def scrubbed(log: ReplicatedLog) -> list[tuple[Offset, Offset]]:
    for _ in range(10):
        log.scrub(1 << 20)
    return log.damaged


def test_what_is_old_goes() -> None:
    log = begun(sim_disk(), young=-1)
    closed(log)
    assert target(log) == 20


@pytest.mark.parametrize("lost", [(), ("index",), ("timeindex",), ("index", "timeindex")])
def test_a_log_that_is_opened_again(lost: tuple[str, ...]) -> None:
    disk = sim_disk()
    log = begun(disk, young=19)
    closed(log)
    log.close()
    make_old(disk, 19 * SIZE)
    for suffix in lost:
        disk.flip(segment(suffix=suffix), 30)
    log = open_log(disk, CONFIG, claimed=log.flushed_end)
    assert target(log) is None
    assert scrubbed(log) == [(19, 20)]
    assert target(log) is None, "also when the damage is known"
    log.repair(Offset(19), [batch(19, 1, timestamp=YOUNG_MS)])
    assert log.damaged == []
    assert target(log) is None
    log.configure(attrs.evolve(CONFIG, retention_ms=999))
    assert target(log) == 20


def test_indexes_that_are_made_anew() -> None:
    """Also at a leader, which goes on leading when it finds damage."""
    disk = sim_disk()
    log = begun(disk, young=19)
    closed(log)
    make_old(disk, 19 * SIZE)
    log._segments.all[0].rebuild()
    assert log.damaged == [(19, 20)]
    assert target(log) is None


def test_indexes_that_a_worker_makes_anew() -> None:
    disk = sim_disk()
    log = begun(disk, young=15, count=10)
    job = IndexJob.of(log._segments.all[0])
    job.run()
    for number in range(10, 20):
        append(log, 1, timestamp=YOUNG_MS if number == 15 else OLD_MS)
    make_old(disk, 15 * SIZE)
    assert not job.take()
    flush(log)
    closed(log)
    assert target(log) is None


def test_a_log_that_is_cut() -> None:
    """What follows the last index pair is read again: the tail is an uncommitted one."""
    disk = sim_disk()
    log = begun(disk, young=17, count=18)
    assert log._segments.all[0].floor(17)[0] == 16, "the young one has no pair of its own"
    append(log, 1, timestamp=OLD_MS)
    flush(log)
    make_old(disk, 17 * SIZE)
    log.truncate_to(log.index_of(Offset(18)))
    closed(log)
    assert target(log) is None
    assert log.damaged == [(17, 18)]
    log.repair(Offset(17), [batch(17, 1, timestamp=YOUNG_MS)])
    assert target(log) is None


def test_damage_below_the_log_start_hides_nothing() -> None:
    """Nobody can repair it, so it must not keep the rest for ever."""
    disk = sim_disk()
    log = begun(disk, young=3)
    closed(log)
    make_old(disk, 3 * SIZE)
    assert scrubbed(log) == [(3, 4)]
    log.move_start(log.start_at(Offset(4)))
    log._segments.all[0].rebuild()
    assert log.damaged == []
    assert target(log) == 20


def test_size_counts_also_where_damage_is() -> None:
    log = begun(disk := sim_disk(), young=19)
    closed(log)
    make_old(disk, 19 * SIZE)
    assert scrubbed(log) == [(19, 20)]
    log.configure(attrs.evolve(CONFIG, retention_bytes=0))
    assert target(log) == 20


@pytest.mark.parametrize("rots", [False, True])
def test_how_old_the_last_segment_is(rots: bool) -> None:
    """Records without times are as old as what comes after them."""
    disk = sim_disk()
    log = open_log(disk, CONFIG)
    elect(log, 1)
    append(log, 1, timestamp=-1)
    flush(log)
    log.configure(attrs.evolve(CONFIG, segment_bytes=100))
    append(log, 1, timestamp=YOUNG_MS + 500)
    flush(log)
    log.close()
    if rots:
        disk.flip(segment(1), _TIME_AT + 2, 0)
    log = open_log(disk, CONFIG, claimed=log.flushed_end, clock=FakeClock(NOW_MS))
    made_ms = log._segments.all[1].created_ms
    assert made_ms == (NOW_MS if rots else YOUNG_MS + 500)
    assert target(log) is None
    log.configure(attrs.evolve(CONFIG, retention_ms=499))
    assert target(log) == (None if rots else 1)


# --- look-ups by time, which read the same headers ------------------------------------------------


def test_a_look_up_passes_over_no_damaged_batch() -> None:
    """It would send a consumer past records that are new enough."""
    disk = sim_disk()
    log = begun(disk, young=18)
    closed(log)
    log.close()
    make_old(disk, 18 * SIZE)
    log = open_log(disk, CONFIG, claimed=log.flushed_end)
    for found in (log.offset_for_timestamp, lambda stamp, end: log.max_timestamp(end)):
        with pytest.raises(DamagedError):
            found(YOUNG_MS, Offset(20))
    log.repair(Offset(18), [batch(18, 1, timestamp=YOUNG_MS)])
    assert log.offset_for_timestamp(YOUNG_MS, Offset(20)) == (YOUNG_MS, 18, 1)


def test_the_newest_below_a_bound_is_sound() -> None:
    """A part of a segment: its index does not say which is the newest."""
    disk = sim_disk()
    log = begun(disk, young=18)
    log.close()
    make_old(disk, 18 * SIZE)
    log = open_log(disk, CONFIG, claimed=log.flushed_end)
    with pytest.raises(DamagedError):
        log.max_timestamp(Offset(19))
    log.repair(Offset(18), [batch(18, 1, timestamp=YOUNG_MS)])
    assert log.max_timestamp(Offset(19)) == (YOUNG_MS, 18, 1)


def test_a_look_up_checks_a_bounded_part_of_what_it_passes_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where times jump about it passes over much, and must not hold up the loop."""
    log = begun(sim_disk(), young=19)
    log._segments.all[0].verified.clear()
    read: list[int] = []
    checked = Segment.batches_from

    def counted(at: Segment, position: int, *more: Any, **others: Any) -> Iterator[CheckedBatch]:
        read.append(position)
        return checked(at, position, *more, **others)

    monkeypatch.setattr(Segment, "batches_from", counted)
    monkeypatch.setattr("raftmq.log.reader.LOOKUP_BYTES", 5 * SIZE)
    assert log.offset_for_timestamp(OLD_MS + 1, Offset(20)) == (YOUNG_MS, 19, 1)
    assert read == [*(SIZE * n for n in range(5)), 19 * SIZE]
    read.clear()
    assert log.offset_for_timestamp(OLD_MS + 1, Offset(20)) == (YOUNG_MS, 19, 1)
    assert read == [*(SIZE * n for n in range(5, 10)), 19 * SIZE], "once"
