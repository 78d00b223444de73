"""Who must make progress, and how long it did not."""

from __future__ import annotations

import pytest

from jepsen_like.live.links import between
from jepsen_like.live.progress import CLUSTER, longest_stall, stalls, windows
from jepsen_like.live.stage import Standing

THREE = frozenset({1, 2, 3})
FIVE = frozenset({1, 2, 3, 4, 5})


def standing(
    at: float = 0.0,
    well: frozenset[int] = FIVE,
    cut: frozenset[tuple[int, int]] = frozenset(),
    **members: frozenset[int],
) -> Standing:
    return Standing(at, well, cut, {"": FIVE, "wide": FIVE, "narrow": THREE, **members})


@pytest.mark.parametrize(
    ("now", "wide", "narrow"),
    [
        (standing(), True, True),
        (standing(well=FIVE - {1}), True, True),
        (standing(well=FIVE - {1, 2}), True, False),
        (standing(well=FIVE - {4, 5}), True, True),
        (standing(well=FIVE - {1, 4, 5}), False, False),
        (standing(cut=frozenset(between({1, 2}, {3, 4, 5}))), True, False),
        (standing(cut=frozenset(between({4, 5}, {1, 2, 3}))), True, True),
        (standing(cut=frozenset({(1, 2), (1, 3), (1, 4), (1, 5)})), True, True),
        (standing(cut=frozenset(between({1, 2}, {4, 5}))), True, True),
        (
            standing(cut=frozenset(between({1}, {3, 4}) | between({2}, {4, 5}) | {(3, 5)})),
            False,
            False,
        ),
    ],
    ids=[
        "all well",
        "one gone",
        "a majority of three gone",
        "two others gone",
        "a majority gone",
        "cut in two",
        "cut in two elsewhere",
        "one is not heard",
        "a bridge",
        "a ring: nobody sees a majority that sees itself",
    ],
)
def test_who_must_progress(now: Standing, wide: bool, narrow: bool) -> None:
    assert now.must_progress("wide") is wide
    assert now.must_progress("narrow") is narrow


def test_windows_join_and_end() -> None:
    down = FIVE - {1, 2, 3}
    timeline = [standing(0), standing(1), standing(4, down), standing(6), standing(9, down)]
    assert windows(timeline, lambda s: s.must_progress("wide"), 20) == [(0, 4), (6, 9)]
    assert windows(timeline, lambda s: s.must_progress("wide"), 8) == [(0, 4), (6, 8)]
    assert windows([], lambda s: s.must_progress("wide"), 8) == []


@pytest.mark.parametrize(
    ("spans", "acked_at", "seconds", "began"),
    [
        ([(0, 10)], [1, 2, 3, 9.5], 6.5, 3),
        ([(0, 10)], [], 10, 0),
        ([(0, 4), (6, 10)], [1, 3.5, 6.5, 9], 2.5, 1),
        ([(0, 4), (6, 10)], [3.9], 4, 6),
        ([(0, 4)], [0, 1, 2, 3, 4], 1, 0),
        ([], [5], 0, 0),
    ],
    ids=["within", "never", "none across windows", "second window", "even", "no window"],
)
def test_longest_stall(
    spans: list[tuple[float, float]], acked_at: list[float], seconds: float, began: float
) -> None:
    stall = longest_stall("x", spans, acked_at)
    assert (stall.seconds, stall.began) == (pytest.approx(seconds), pytest.approx(began))


def test_one_partition_that_stands_still_is_seen_among_others() -> None:
    timeline = [standing(0)]
    acked_at = {"wide": [i / 10 for i in range(200)], "narrow": [0.5, 19.0]}
    cluster, worst, other = stalls(timeline, acked_at, 20.0)
    assert cluster.where == CLUSTER
    assert cluster.seconds < 0.2
    assert worst.where == "narrow"
    assert worst.seconds == pytest.approx(18.5)
    assert other.where == "wide"
