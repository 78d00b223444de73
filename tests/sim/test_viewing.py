"""What is said of a view that gives something else than a filter would."""

from __future__ import annotations

import pytest

from jepsen_like.cluster.producers import tag_of
from jepsen_like.cluster.viewing import PLAIN, Stand, difference

BASE = list(enumerate(range(100, 140)))
MATCHES = [(offset, value) for offset, value in BASE if tag_of(value) == b"b"]


def said(rows: list[tuple[int, int]], *, start: int = 0, holes: tuple[int, int] = (0, 0)) -> str:
    base = Stand("t", 40, BASE)
    shown = Stand("v", 40, rows, [holes])
    return difference(PLAIN, base, shown, start, 40)


def test_some_match_and_some_do_not() -> None:
    assert 5 < len(MATCHES) < len(BASE) - 5


def test_what_is_equal_is_said_to_be() -> None:
    assert said(MATCHES) == ""
    assert said(MATCHES[3:], start=MATCHES[3][0]) == ""


@pytest.mark.parametrize("place", [0, 3, -1])
def test_a_record_that_is_missing_is_named(place: int) -> None:
    lost = MATCHES[place]
    told = said([row for row in MATCHES if row != lost])
    assert told == f"in [0, 40) {[lost]} are missing, [] too many"
    assert said([row for row in MATCHES if row != lost], holes=(lost[0], lost[0] + 1)) == ""


def test_a_record_too_many_or_another_one_is_named() -> None:
    other = next(row for row in BASE if row not in MATCHES)
    assert said(sorted([*MATCHES, other])) == f"in [0, 40) [] are missing, {[other]} too many"
    wrong = (MATCHES[0][0], 999)
    told = f"in [0, 40) {[MATCHES[0]]} are missing, {[wrong]} too many"
    assert said([wrong, *MATCHES[1:]]) == told


def test_what_the_base_passed_over_is_not_compared() -> None:
    base = Stand("t", 40, BASE[10:], [(0, 10)])
    assert difference(PLAIN, base, Stand("v", 40, MATCHES), 0, 40) == ""
