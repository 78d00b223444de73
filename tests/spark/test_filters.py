"""Filters that narrow ranges, and those that are left to Spark."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from attrs import frozen

from raftmq_spark.filters import Limits, read_filter
from raftmq_spark.options import read_options
from raftmq_spark.plan import Plan

OPTIONS = read_options({"kafka.bootstrap.servers": "h", "subscribe": "t"})
PLAN = Plan({"t": {0: (0, 100), 1: (50, 100)}, "u": {0: (0, 10)}})


def make(name: str, column: str, value: Any = None) -> Any:
    """A filter as Spark's are: told apart by the names of their classes."""
    fields = {"__annotations__": {"attribute": tuple, "value": object}}
    return frozen(type(name, (), fields))((column,), value)


def narrow(*filters: Any) -> Any:
    limits = Limits()
    for item in filters:
        found = read_filter(item)
        assert found is not None
        assert found.is_exact
        limits = limits.both(found)
    return limits.narrow(PLAN, OPTIONS).ranges


@pytest.mark.parametrize(
    ("filters", "ranges"),
    [
        ([make("EqualTo", "topic", "u")], {"u": {0: (0, 10)}}),
        ([make("In", "topic", ("u", "v", None))], {"u": {0: (0, 10)}}),
        ([make("EqualTo", "topic", "v")], {}),
        ([make("EqualTo", "partition", 1)], {"t": {1: (50, 100)}}),
        (
            [make("In", "partition", (1, 2)), make("LessThan", "offset", 60)],
            {"t": {1: (50, 60)}},
        ),
        (
            [make("GreaterThan", "offset", 5), make("LessThanOrEqual", "offset", 7)],
            {"t": {0: (6, 8), 1: (50, 50)}, "u": {0: (6, 8)}},
        ),
        (
            [make("GreaterThanOrEqual", "offset", 99), make("EqualTo", "topic", "t")],
            {"t": {0: (99, 100), 1: (99, 100)}},
        ),
        (
            [make("EqualTo", "offset", -5)],
            {"t": {0: (0, 0), 1: (50, 50)}, "u": {0: (0, 0)}},
        ),
        (
            [make("EqualNullSafe", "offset", 9), make("EqualTo", "offset", 8)],
            {"t": {0: (9, 9), 1: (50, 50)}, "u": {0: (9, 9)}},
        ),
    ],
)
def test_exact_filters(filters: list[Any], ranges: Any) -> None:
    found = narrow(*filters)
    sizes = {
        (topic, p): (start, end) for topic in found for p, (start, end) in found[topic].items()
    }
    wanted = {
        (topic, p): (start, end) for topic in ranges for p, (start, end) in ranges[topic].items()
    }
    assert {key: r for key, r in sizes.items() if r[0] < r[1]} == {
        key: r for key, r in wanted.items() if r[0] < r[1]
    }
    assert all(start <= end for start, end in sizes.values())


def test_a_timestamp_moves_starts_and_is_left_to_spark_too() -> None:
    late = datetime.datetime(1970, 1, 1, 0, 0, 1, 500_999, tzinfo=datetime.UTC)
    found = read_filter(make("GreaterThan", "timestamp", late))
    assert found == Limits(earliest_ms=1_500)
    assert found is not None
    assert not found.is_exact
    assert found.both(Limits(earliest_ms=9)).earliest_ms == 1_500


@pytest.mark.parametrize(
    "item",
    [
        make("EqualTo", "value", b"v"),
        make("IsNotNull", "offset"),
        make("Not", "offset", 5),
        make("StringStartsWith", "topic", "t"),
        make("LessThan", "partition", 5),
        make("EqualTo", "topic", 5),
        make("In", "offset", (1, 2)),
        make("EqualTo", "partition", True),
        make("LessThan", "timestamp", datetime.datetime.now(datetime.UTC)),
        make("GreaterThan", "timestamp", datetime.datetime(2024, 1, 1)),
        make("GreaterThan", "timestamp", 5),
    ],
)
def test_what_is_left_to_spark(item: Any) -> None:
    assert read_filter(item) is None
