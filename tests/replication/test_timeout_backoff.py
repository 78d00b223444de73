"""Timeouts are doubled while ticks come late, and halved again after a while in time."""

from __future__ import annotations

import pytest

from raftmq.replication.timeout_backoff import DECAY_TICKS, LoopBackoff

ELECTION_TICKS = 6


def after(*late_ticks: float) -> int:
    backoff = LoopBackoff()
    for late in late_ticks:
        backoff.ticked(late, ELECTION_TICKS)
    return backoff.doublings


@pytest.mark.parametrize(
    ("late_ticks", "doublings"),
    [(0.0, 0), (-0.3, 0), (1.5, 0), (1.6, 1), (3.0, 1), (3.1, 2), (6.0, 2), (6.1, 3), (400.0, 3)],
)
def test_a_timeout_is_four_times_as_long_as_ticks_are_late(
    late_ticks: float, doublings: int
) -> None:
    assert after(late_ticks) == doublings


def test_the_latest_of_late_ticks_counts() -> None:
    assert after(7.0, 2.0, 0.0) == 3
    assert after(2.0, 7.0) == 3


def test_backoff_fades_step_by_step_while_ticks_are_in_time() -> None:
    assert after(7.0, *[0.0] * (DECAY_TICKS - 1)) == 3
    assert after(7.0, *[0.0] * DECAY_TICKS) == 2
    assert after(7.0, *[0.0] * (3 * DECAY_TICKS)) == 0


def test_as_long_as_ticks_are_as_late_it_stays() -> None:
    assert after(7.0, *([0.0] * (DECAY_TICKS - 1) + [7.0]) * 3) == 3
    assert after(7.0, *([0.0] * (DECAY_TICKS - 1) + [2.0]) * 3) == 1, "less late, less backoff"
