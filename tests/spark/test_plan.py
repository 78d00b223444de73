"""Planning without a cluster: bounds and positions become half-open ranges, ranges become parts."""

from __future__ import annotations

import json
import warnings
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmq.types import TopicPartition
from raftmq_spark.errors import DataLossError, PlanError
from raftmq_spark.options import SourceOptions, read_options
from raftmq_spark.plan import Plan, Positions, fix_ranges, split

KEY = TopicPartition("t", 0)


def read(**options: Any) -> SourceOptions:
    texts = {name: str(value) for name, value in options.items()}
    return read_options({"kafka.bootstrap.servers": "h", "subscribe": "t", **texts})


def fix(log_start: int, stable_end: int, /, committed: int | None = None, **options: Any) -> Any:
    times: dict[str, Any] = {
        name: {KEY: options.pop(name)} for name in ("start_times", "end_times") if name in options
    }
    positions = Positions(
        {KEY: log_start}, {KEY: stable_end}, {} if committed is None else {KEY: committed}, **times
    )
    return fix_ranges(read(**options), [KEY], positions)["t"][0]


def at(offset: int) -> str:
    return json.dumps({"t": {"0": offset}})


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (fix(10, 90), (10, 90)),
        (fix(10, 10), (10, 10)),
        (fix(10, 90, startingOffsets=at(20), endingOffsets=at(30)), (20, 30)),
        (fix(10, 90, startingOffsets=at(-2), endingOffsets=at(-1)), (10, 90)),
        (fix(10, 90, startingOffsets=at(90)), (90, 90)),
        (fix(10, 90, group="g"), (10, 90)),
        (fix(10, 90, committed=40, group="g"), (40, 90)),
        (fix(10, 90, committed=40, group="g", endingOffsets="committed"), (10, 40)),
        (fix(10, 90, group="g", endingOffsets="committed"), (10, 10)),
        (fix(10, 90, startingTimestamp=5, start_times=33), (33, 90)),
        (fix(10, 90, endingTimestamp=5, end_times=33), (10, 33)),
        (fix(10, 90, endingTimestamp=5, end_times=-1), (10, 90)),
        # What is found above the last stable offset belongs to an open transaction.
        (fix(10, 90, startingTimestamp=5, start_times=95), (90, 90)),
        (fix(10, 90, startingTimestamp=5, start_times=33, endingTimestamp=2, end_times=9), (9, 9)),
        (fix(10, 90, committed=40, group="g", endingTimestamp=2, end_times=20), (20, 20)),
        # An empty range has nothing to lose, wherever it lies.
        (fix(10, 90, startingOffsets=at(5), endingOffsets=at(5)), (5, 5)),
    ],
)  # fmt: skip
def test_ranges(found: tuple[int, int], expected: tuple[int, int]) -> None:
    start, end = found
    assert (start, end) == expected or (start == end and expected[0] == expected[1])


@pytest.mark.parametrize(
    ("log_start", "stable_end", "options", "said", "rest"),
    [
        (10, 90, {"startingOffsets": at(5)}, r"t-0: offsets \[5, 10\) .* starts at 10", (10, 90)),
        (50, 90, {"startingOffsets": at(5), "endingOffsets": at(20)}, r"\[5, 20\)", (20, 20)),
        (10, 90, {"endingOffsets": at(95)}, r"\[10, 95\) ends past .* 90", (10, 90)),
        (10, 90, {"startingOffsets": at(95)}, r"\[95, 90\) starts past .* 90", (90, 90)),
        (50, 90, {"group": "g", "committed": 40}, r"offsets \[40, 50\)", (50, 90)),
        (10, 20, {"group": "g", "committed": 40}, r"starts past .* 20", (20, 20)),
    ],
)
def test_what_is_not_there_is_data_loss(
    log_start: int,
    stable_end: int,
    options: dict[str, Any],
    said: str,
    rest: tuple[int, int],
) -> None:
    with pytest.raises(DataLossError, match=said):
        fix(log_start, stable_end, **options)
    with pytest.warns(RuntimeWarning, match=said):
        assert fix(log_start, stable_end, failOnDataLoss="false", **options) == rest


def test_what_options_do_not_say() -> None:
    keys = [KEY, TopicPartition("t", 1)]
    positions = Positions(dict.fromkeys(keys, 0), dict.fromkeys(keys, 9))
    with pytest.raises(PlanError, match="startingOffsets says nothing about t-1"):
        fix_ranges(read(startingOffsets=at(1)), keys, positions)
    with pytest.raises(PlanError, match="endingOffsetsByTimestamp says nothing about t-0"):
        fix_ranges(read(endingOffsetsByTimestamp=at(1)), keys, positions)
    with pytest.raises(PlanError, match="no record at or after the starting timestamp"):
        fix(10, 90, startingTimestamp=5, start_times=-1)
    latest: dict[str, Any] = {"startingOffsetsByTimestampStrategy": "latest"}
    assert fix(10, 90, startingTimestamp=5, start_times=-1, **latest) == (90, 90)
    with pytest.raises(PlanError, match=r"\[30, 20\) starts behind its end"):
        fix(10, 90, startingOffsets=at(30), endingOffsets=at(20))


@given(
    log_start=st.integers(0, 40),
    size=st.integers(0, 40),
    start=st.integers(-2, 90).filter(lambda n: n != -1),
    end=st.integers(-1, 90),
)
def test_a_range_never_leaves_what_is_stable(
    log_start: int, size: int, start: int, end: int
) -> None:
    """Going on in spite of losses, a range lies within what is there, or it is empty."""
    stable_end = log_start + size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            first, last = fix(
                log_start,
                stable_end,
                startingOffsets=at(start),
                endingOffsets=at(end),
                failOnDataLoss="false",
            )
        except PlanError:
            assert start > end >= 0
            return
    assert first <= last <= stable_end
    assert first == last or first >= log_start
    asked = set(range(log_start if start == -2 else start, stable_end if end == -1 else end))
    assert set(range(first, last)) == asked & set(range(log_start, stable_end))


SIZES = st.lists(st.integers(0, 50), max_size=6)


@given(sizes=SIZES, wanted=st.none() | st.integers(1, 60), most=st.none() | st.integers(1, 20))
def test_parts_cover_ranges_once(sizes: list[int], wanted: int | None, most: int | None) -> None:
    ranges = {number: (7 * number, 7 * number + size) for number, size in enumerate(sizes)}
    parts = split(Plan({"t": ranges}), partitions_min=wanted, records_max=most)
    for number, (start, end) in ranges.items():
        mine = [part for part in parts if part.partition == number]
        assert [offset for part in mine for offset in range(part.start, part.end)] == list(
            range(start, end)
        )
        assert all(before.end == after.start for before, after in pairwise(mine))
        if mine:
            spread = [part.size for part in mine]
            assert max(spread) - min(spread) <= 1
            assert min(spread) > 0
    assert len(parts) >= min(wanted or 0, sum(sizes))
    assert all(part.size <= most for part in parts) if most else True
    if wanted is None and most is None:
        assert len(parts) == sum(1 for size in sizes if size)


def test_a_large_plan_is_split_in_no_time() -> None:
    ranges = dict.fromkeys(range(1_000), (0, 1_000_000))
    parts = split(Plan({"t": ranges}), partitions_min=20_000)
    assert len(parts) == 20_000
