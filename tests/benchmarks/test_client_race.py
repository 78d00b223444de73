"""The comparison of client libraries: it counts what it says it counts, and ours beside others."""

from __future__ import annotations

import pytest

from benchmarks.client_race import Race, show
from benchmarks.client_run import RUNS, Counting, Done, Job, values_of
from benchmarks.errors import BenchmarkError
from benchmarks.targets import Target

JOB = Job("trio", "consume", "h:1", "t", 3, 10, 100)


def test_every_client_has_every_mode() -> None:
    assert {frozenset(by_mode) for _, by_mode in RUNS.values()} == {
        frozenset({"produce", "consume", "iterate"})
    }


def test_values_are_as_many_and_as_large_as_wanted() -> None:
    values = list(values_of(JOB))
    assert [len(value) for value in values] == [10] * 100
    assert len(set(values)) == 64


def test_time_begins_with_the_first_records_which_do_not_count() -> None:
    counting = Counting(JOB)
    assert not counting.is_over(0)
    for more in (30, 70):
        counting.records += more
        counting.size += 10 * more
        is_over = counting.is_over(more)
    assert is_over
    assert counting.done().records == 70


def test_a_run_that_read_too_little_or_something_else_is_no_run() -> None:
    counting = Counting(JOB)
    counting.records, counting.size = 100, 999
    assert counting.is_over(100)
    with pytest.raises(BenchmarkError, match="100 records of 999 bytes"):
        counting.done()


def test_medians_and_ours_beside_the_others() -> None:
    race = Race(Target("raftmq", "h:1"), {100: 10})
    for client, seconds in (("trio", (1, 2, 4)), ("aiokafka", (8, 8, 8))):
        race.runs["produce", 100, client] = [Done(80, each, 0.8) for each in seconds]
    ours, theirs = race.rows()
    assert (ours["records_per_s"], ours["cpu_us_per_record"]) == (40, 10_000)
    assert ours["beside"] == {"aiokafka": 4.0}
    assert theirs["beside"] == {}
    assert show([ours, theirs]).row_count == 2
