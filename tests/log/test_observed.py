"""What a log tells those who watch it: timestamps at offsets, bytes left, ends of spans, events."""

from __future__ import annotations

from random import Random

import pytest

from raftmq.log.shared import Shared
from raftmq.records import LOG_APPEND_TIME, NewRecord, build_batch
from raftmq.types import Offset
from tests.log.helpers import (
    BIG,
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


@pytest.mark.parametrize("is_cold", [False, True])
def test_the_timestamp_at_every_offset(is_cold: bool) -> None:
    """The first record's own; of the others the newest of their batch."""
    disk = sim_disk()
    log = filled(disk, 30)  # batches of two records, 10 ms apart, over several segments
    if is_cold:
        log.close()
        log = open_log(disk, claimed=log.flushed_end)
    for offset in range(60):
        job = log.timestamp_job(Offset(offset))
        assert (job.file is None) is not is_cold
        job.run()
        assert job.timestamp == 1000 + 10 * (offset // 2) + offset % 2, offset


def test_offsets_that_are_not_there_have_no_timestamp() -> None:
    log = filled(sim_disk(), 3)
    for offset in (6, 1000, -1):
        job = log.timestamp_job(Offset(offset))
        job.run()
        assert job.timestamp is None


def test_append_time_counts_for_the_first_record_too() -> None:
    log = open_log(sim_disk())
    elect(log, 1)
    records = [NewRecord(None, b"a", 5), NewRecord(None, b"b", 6)]
    built = build_batch(records, leader_epoch=1, timestamp_type=LOG_APPEND_TIME)
    log.append_batch(bytes(built))
    job = log.timestamp_job(Offset(0))
    job.run()
    assert job.timestamp == 6, "the newest is the broker's time, the first record's the producer's"


def test_damaged_headers_have_no_timestamp() -> None:
    disk = sim_disk()
    log = filled(disk, 3, BIG)
    log.close()
    disk.flip(segment(), 16)  # the magic
    log = open_log(disk, BIG)
    job = log.timestamp_job(Offset(0))
    job.run()
    assert job.timestamp is None


def test_bytes_that_follow_an_offset() -> None:
    log = filled(sim_disk(), 30)
    size = len(batch(0, 1, 2, 60))
    assert log.bytes_from(log.log_end_offset) == 0
    assert log.bytes_from(log.log_start_offset) == log.size_bytes == 30 * size
    slack = 300 + size  # an index interval and the batch that ends it
    for offset in range(0, 60, 2):
        left = size * (60 - offset) // 2
        assert left <= log.bytes_from(Offset(offset)) <= left + slack


@pytest.mark.parametrize("seed", range(20))
def test_a_span_says_where_its_last_batch_ends(seed: int) -> None:
    random = Random(seed)
    disk = sim_disk(seed)
    log = filled(disk, 30, count=3)
    if random.random() < 0.5:
        log.close()
        log = open_log(disk, claimed=log.flushed_end)
    for _ in range(20):
        start = Offset(random.randrange(90))
        end = Offset(random.randrange(start, 90) // 3 * 3)
        spans = log.locate(start, random.randrange(1, 3000), end)
        at = start // 3 * 3
        size = len(batch(0, 1, 3, 60))
        for span in spans:
            at += 3 * (span.size // size)
            assert span.end_offset == at


def test_who_watches_is_told_of_rolls_damage_and_repair() -> None:
    told: list[tuple[str, int, int]] = []
    disk = sim_disk()
    log = filled(disk, 20)
    model = model_of(log)
    log.close()
    disk.flip(segment(), 300)
    shared = Shared.make(disk)
    shared.watch.on_event = lambda what, _path, start, end: told.append((what, start, end))
    log = open_log(disk, claimed=log.flushed_end, shared=shared)
    while not log.damaged:
        log.scrub(1000)
    for _ in range(50):
        log.scrub(1000)  # the same damage is told of once
    start, end = log.damaged[0]
    good = [e.payload for e in model.entries if e.kind == 0 and start < e.end - 1 <= end]
    log.repair(start, good)
    assert told == [("damaged", start, end), ("repaired", start, end)]
    before = shared.watch.segments_rolled
    for _ in range(20):
        append(log, 1, 2, 60)
    flush(log)
    assert shared.watch.segments_rolled > before
    assert {what for what, _, _ in told[2:]} == {"rolled"}
    watch = shared.watch
    assert (watch.damages_found, watch.damages_repaired) == (1, 1)
