"""Late ticks: counted, and told apart by whose fault they are."""

from __future__ import annotations

import pytest

from raftmq.node.loop_watch import LoopWatch


@pytest.mark.parametrize(
    ("late_ms", "no_core_ms", "stalls", "without_core"),
    [
        (-1.0, 0.0, 0, 0),
        (37.5, 30.0, 0, 0),
        (38.0, 0.0, 1, 0),
        (38.0, 1.0, 1, 1),
        (200.0, 160.0, 1, 0),
        (200.0, 165.0, 1, 1),
    ],
)
def test_stalls(late_ms: float, no_core_ms: float, stalls: int, without_core: int) -> None:
    """A quarter of 150 ms is 37.5."""
    waited_ms = 1_000.0
    watch = LoopWatch(150, lambda: waited_ms)
    watch.ticked(0.5)
    waited_ms += no_core_ms
    watch.ticked(late_ms)
    watch.ticked(0.5)
    assert (watch.stalls_count, watch.without_core_count) == (stalls, without_core)
    assert watch.lag.count == 3


def test_waits_count_once() -> None:
    """What an earlier tick waited excuses no later one."""
    waited_ms = 0.0
    watch = LoopWatch(150, lambda: waited_ms)
    waited_ms = 500.0
    watch.ticked(1.0)
    watch.ticked(100.0)
    assert (watch.stalls_count, watch.without_core_count) == (1, 0)
