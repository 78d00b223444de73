"""Percentiles, medians, ratios, rounding."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.stats import median, percentile, ratio, rounded

VALUES = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([5.0], 0.99, 5.0),
        ([1.0, 2.0, 3.0, 4.0], 0.5, 2.0),
        ([4.0, 1.0, 3.0, 2.0], 0.75, 3.0),
        ([float(n) for n in range(1, 101)], 0.99, 99.0),
        ([float(n) for n in range(1, 101)], 1.0, 100.0),
        ([2.0, 1.0], 0.0, 1.0),
    ],
)
def test_percentile_is_the_nearest_rank(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == expected


@given(VALUES, st.floats(0, 1))
def test_percentile_is_a_value_that_so_many_do_not_exceed(
    values: list[float], share: float
) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) <= share * len(values)


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_percentile_refuses_other_shares(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        percentile([1.0], share)


@pytest.mark.parametrize("call", [lambda: percentile([], 0.5), lambda: median([])])
def test_nothing_has_no_statistics(call: object) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match="of nothing"):
        call()


@given(VALUES)
def test_median_lies_in_the_middle(values: list[float]) -> None:
    found = median(values)
    half = len(values) / 2
    assert sum(value < found for value in values) <= half
    assert sum(value > found for value in values) <= half


def test_median_of_an_even_number_is_the_mean_of_two() -> None:
    assert median([1.0, 10.0, 2.0, 3.0]) == 2.5


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [(3.0, 2.0, 1.5), (None, 2.0, None), (3.0, None, None), (3.0, 0.0, None), (0.0, 2.0, 0.0)],
)
def test_ratio(ours: float | None, theirs: float | None, expected: float | None) -> None:
    assert ratio(ours, theirs) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (123456.7, 123457.0),
        (12.34567, 12.35),
        (0.00123456, 0.001235),
        (0.0, 0.0),
        (-9.87654, -9.877),
    ],
)
def test_rounded_keeps_four_digits(value: float, expected: float) -> None:
    assert rounded(value) == expected


def test_rounded_passes_infinity_on() -> None:
    assert rounded(math.inf) == math.inf
