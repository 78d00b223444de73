"""What each promise of delivery keeps while nodes and clients die, and that counting can see it.

The storms are `python -m tests.client.kills`; here a few kills, and with the marker `soak` 200 for
each promise and two million records for a group of four.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from tests.client.kills import LIFE, Plan, Verdict, follow, inversions, run

CLEAN = Verdict(
    promise="at_least_once",
    kills={"node": 3},
    left_in_order=0,
    seconds=1.0,
    sent_lives=1,
    acknowledged=10,
    failed=0,
    unknown=0,
    in_log=10,
    handed_out=10,
    lost_from_log=0,
    twice_in_log=0,
    out_of_order=0,
    never_handed_out=0,
    handed_out_twice=0,
    unexplained_twice=0,
    skipped=0,
)
LOG = {(0, offset): 100 + offset for offset in range(20)} | {(1, 0): 7}


def h(*offsets: int) -> list[str]:
    return [f"h 0 {offset} {100 + offset}" for offset in offsets]


@pytest.mark.parametrize(
    ("lines", "skipped", "repeated"),
    [
        pytest.param(["+ 0", *h(3, 4, 5), "h 1 0 7", *h(6)], 0, 0, id="one by one"),
        pytest.param(["+ 0", *h(3, 5)], 1, 0, id="passed over"),
        pytest.param(["+ 0", *h(3, 4, 4)], 0, 1, id="again without cause"),
        pytest.param(["+ 0", *h(3, 4), "- 0", "+ 0", *h(3, 4)], 0, 0, id="again, reassigned"),
        pytest.param(["+ 0", *h(3, 4), "- 1", "+ 1", *h(3)], 0, 1, id="another was reassigned"),
        pytest.param(["+", "-", *h(0)], 0, 0, id="nothing assigned"),
    ],
)
def test_what_one_consumer_handed_out(lines: list[str], skipped: int, repeated: int) -> None:
    handed, *found = follow(lines, LOG)
    assert found == [skipped, repeated]
    assert sum(handed.values()) == sum(line[0] == "h" for line in lines)


def test_a_record_that_is_not_the_logs_is_noticed() -> None:
    with pytest.raises(AssertionError, match="not what the log has"):
        follow(["+ 0", "h 0 3 99"], LOG)


def test_order_counts_within_a_producers_life() -> None:
    assert inversions([(0, 1), (1, 2), (2, LIFE + 1), (3, 3), (4, LIFE + 2)]) == 0
    assert inversions([(0, 1), (1, 3), (2, 2)]) == 1


@pytest.mark.parametrize(
    ("promise", "field", "is_broken"),
    [
        ("at_least_once", "lost_from_log", True),
        ("at_least_once", "never_handed_out", True),
        ("at_least_once", "handed_out_twice", False),
        ("at_most_once", "handed_out_twice", True),
        ("at_most_once", "twice_in_log", True),
        ("at_most_once", "never_handed_out", False),
        ("idempotent", "twice_in_log", True),
        ("idempotent", "lost_from_log", True),
        ("idempotent", "out_of_order", True),
        ("idempotent", "skipped", True),
    ],
)
def test_verdicts(promise: str, field: str, is_broken: bool) -> None:
    clean = evolve(CLEAN, promise=promise)
    assert clean.broken == []
    bad: dict[str, Any] = {field: 1}
    assert bool(evolve(clean, **bad).broken) is is_broken


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize("promise", ["at_least_once"])
def test_a_few_kills(tmp_path: Path, promise: str) -> None:
    verdict = run(Plan(promise=promise, kills=3, seed=2), tmp_path)
    assert verdict.broken == []
    assert verdict.acknowledged >= 150


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("promise", ["idempotent", "at_most_once", "at_least_once"])
def test_two_hundred_kills(tmp_path: Path, promise: str) -> None:
    verdict = run(Plan(promise=promise, kills=200), tmp_path)
    assert verdict.broken == []
    assert sum(verdict.kills.values()) == 200


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.soak
def test_two_million_records_for_a_group_of_four(tmp_path: Path) -> None:
    plan = Plan(promise="idempotent", seconds=180, records=2_000_000, consumers=4, partitions=8)
    verdict = run(evolve(plan, rate=12_000), tmp_path)
    assert verdict.broken == []
    assert verdict.acknowledged == 2_000_000
