"""Readers are sent past batches without records: what is found, what is told of the end, at what
cost; fresh, after the log was opened again, unchecked, in a row and in turns."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from raftmq.log import reader as reader_module
from raftmq.log.model import DamagedError
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.log.segment import Holes, carries_records
from raftmq.records import check_batches, empty_batch, parse_header
from raftmq.types import Offset
from tests.log.helpers import SMALL, append, batch, elect, flush, open_log, sim_disk

BIG = evolve(SMALL, segment_bytes=1 << 20)
RECORDS, HOLE = True, False
Plan = list[tuple[bool, int]]
"""Batches in order: with records or without, and how many offsets."""


def written(log: ReplicatedLog, plan: Plan) -> list[tuple[int, int]]:
    """Append what is planned; returns the offsets of batches that carry records."""
    elect(log, 1)
    full: list[tuple[int, int]] = []
    for has_records, count in plan:
        at = log.log_end_offset
        data = batch(at, 1, count=count) if has_records else empty_batch(at, at + count, 1)
        log.append_batch(data)
        flush(log)
        if has_records:
            full.append((at, at + count))
    return full


def read_all(
    log: ReplicatedLog, bytes_max: int, *, may_check: bool = True
) -> list[tuple[int, int]]:
    """What a client gets that always asks behind the last batch it was given."""
    end, at = log.records_end(log.log_end_offset), log.log_start_offset
    found: list[tuple[int, int]] = []
    while at < end:
        spans = log.locate(at, bytes_max, log.log_end_offset, may_check=may_check)
        if not spans:
            job = log.needs_verification(log.past_holes(at), 4096)
            if job is not None:
                job.run()
                log.checked(job)
            continue
        for span in spans:
            headers = check_batches(memoryview(span.file.pread(span.size, span.position)))
            assert all(carries_records(header) for header in headers)
            assert headers[0].base_offset == span.base_offset
            assert headers[-1].next_offset == span.end_offset
            found += [(header.base_offset, header.next_offset) for header in headers]
        at = Offset(found[-1][1])
    return found


PLANS = st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=25)


@given(PLANS, st.sampled_from([1, 200, 1 << 20]), st.booleans(), st.booleans())
def test_only_records_are_found_and_all_of_them(
    plan: Plan, bytes_max: int, is_opened_again: bool, may_check: bool
) -> None:
    disk = sim_disk()
    log = open_log(disk)
    full = written(log, plan)
    if is_opened_again:
        end = log.flushed_end
        log.close()
        log = open_log(disk, claimed=end)
    assert log.records_end(log.log_end_offset) == (full[-1][1] if full else 0)
    assert read_all(log, bytes_max, may_check=may_check) == full


@given(PLANS, st.integers(0, 200))
def test_the_end_of_the_records_is_told_after_a_crash_too(plan: Plan, end: int) -> None:
    disk = sim_disk()
    log = open_log(disk)
    full = written(log, plan)
    end = min(end, log.log_end_offset)
    borders = [0, *(stop for _, stop in full)]
    again = open_log(disk, claimed=log.flushed_end)
    whole = again.records_end(again.log_end_offset)
    assert whole == borders[-1]
    assert again.records_end(Offset(end)) <= end
    if any(start < end <= stop for start, stop in full):
        assert again.records_end(Offset(end)) == end


def test_a_batch_behind_a_hole_goes_along_whatever_its_size() -> None:
    log = open_log(sim_disk(), BIG)
    elect(log, 1)
    append(log, 1, count=2)
    log.append_batch(empty_batch(2, 10, 1))
    append(log, 1, count=1, size=5000)
    flush(log)
    for at in (2, 5, 9, 10):
        (span,) = log.locate(Offset(at), 100, log.log_end_offset)
        assert (span.base_offset, span.end_offset) == (10, 11)
    assert log.locate(Offset(5), 100, log.log_end_offset, at_least_one=False) == []


def test_a_hole_between_two_batches_makes_two_spans() -> None:
    log = open_log(sim_disk(), BIG)
    written(log, [(RECORDS, 2), (RECORDS, 2), (HOLE, 5), (RECORDS, 1)])
    spans = log.locate(Offset(1), 1 << 20, log.log_end_offset)
    assert [(span.base_offset, span.end_offset) for span in spans] == [(0, 4), (9, 10)]


def test_a_hole_of_damage_that_was_given_up_is_known_from_then_on() -> None:
    disk = sim_disk()
    log = open_log(disk)
    elect(log, 1)
    for _ in range(3):
        append(log, 1, count=2, size=70)
    flush(log)
    end = log.flushed_end
    path = "data/a-0/00000000000000000000.log"
    size = parse_header(disk.content(path)).size
    disk.flip(path, 2 * size + 70, 1)
    log = open_log(disk, claimed=end)
    log.accept_loss(Offset(4))
    assert log.records_end(Offset(6)) == 4
    log.close()
    again = open_log(disk, claimed=end)
    assert again.log_end_offset == 6
    assert again.records_end(Offset(6)) == 4  # not read from the first batch on to find that out
    append(again, 1)
    assert again.records_end(Offset(7)) == 7


def test_a_header_that_nobody_summed_hides_no_records() -> None:
    disk = sim_disk()
    log = open_log(disk, BIG)
    written(log, [(RECORDS, 1), (RECORDS, 3)])
    end = log.flushed_end
    log.close()
    path = "data/a-0/00000000000000000000.log"
    disk.flip(path, 60, 0)  # the record count of the first batch says 0 now
    assert parse_header(disk.content(path)).record_count == 0
    log = open_log(disk, BIG, claimed=end)
    with pytest.raises(DamagedError):
        log.locate(Offset(0), 1 << 20, Offset(4))
    assert log.past_holes(Offset(0)) == 0


def test_a_long_row_of_empty_batches_is_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = sim_disk()
    log = open_log(disk, BIG)
    written(log, [(RECORDS, 1), *[(HOLE, 1)] * 3000, (RECORDS, 1)])
    asked: list[int] = []
    plain = reader_module.ReadableLog._span

    def counted(*args: object, **kwargs: object) -> object:
        asked.append(1)
        return plain(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(reader_module.ReadableLog, "_span", counted)
    (span,) = log.locate(Offset(1), 1 << 20, log.log_end_offset)
    assert span.base_offset == 3001
    assert len(asked) == 1
    end = log.flushed_end
    log.close()
    log = open_log(disk, BIG, claimed=end)  # the hole is not checked: some at a time, on the loop
    looks = 0
    while not (spans := log.locate(log.past_holes(Offset(1)), 1 << 20, log.log_end_offset)):
        looks += 1
    assert spans[0].base_offset == 3001
    assert looks == 3000 * 61 // (2 * reader_module._HOLE_CHECK_BYTES)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=20), st.integers(0, 80))
def test_runs_against_a_set(added: list[tuple[int, int]], asked: int) -> None:
    holes = Holes()
    known: set[int] = set()
    for start, count in added:
        holes.add(start, start + count, 10 * start, 10 * (start + count))
        known |= set(range(start, start + count))
    past = asked
    while past in known:
        past += 1
    before = asked
    while before - 1 in known:
        before -= 1
    assert (holes.past(asked), holes.before(asked)) == (past, before)
    nearest = min((o for o in known if o >= past), default=1000)
    assert holes.position_from(10 * past, 10_000) == 10 * nearest
    holes.cut(asked, 10 * asked)
    known = {offset for offset in known if offset < asked}
    assert bool(holes) == bool(known)
    assert holes.past(0) == min(o for o in range(200) if o not in known)
