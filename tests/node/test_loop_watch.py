"""Late ticks: counted, and told apart by whose fault they are."""

from __future__ import annotations

import pytest

from raftmq.node.loop_watch import STOLEN_EVERY_TICKS, LoopWatch


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
    watch = LoopWatch(150, lambda: waited_ms, lambda: 0.0)
    watch.ticked(0.5)
    waited_ms += no_core_ms
    watch.ticked(late_ms)
    watch.ticked(0.5)
    assert (watch.stalls_count, watch.without_core_count) == (stalls, without_core)
    assert watch.lag.count == 3


def test_waits_count_once() -> None:
    """What an earlier tick waited excuses no later one."""
    waited_ms = 0.0
    watch = LoopWatch(150, lambda: waited_ms, lambda: 0.0)
    waited_ms = 500.0
    watch.ticked(1.0)
    watch.ticked(100.0)
    assert (watch.stalls_count, watch.without_core_count) == (1, 0)


def test_a_core_that_the_host_took_is_none() -> None:
    stolen_ms = 2_000.0
    watch = LoopWatch(150, lambda: 0.0, lambda: stolen_ms)
    stolen_ms += 60.0
    watch.ticked(90.0)
    assert (watch.stalls_count, watch.without_core_count) == (1, 1)
    watch.ticked(90.0)
    assert (watch.stalls_count, watch.without_core_count) == (2, 1)


def test_what_the_host_took_long_before_excuses_nothing() -> None:
    stolen_ms = 0.0
    readings = 0

    def read() -> float:
        nonlocal readings
        readings += 1
        return stolen_ms

    watch = LoopWatch(150, lambda: 0.0, read)
    stolen_ms = 100.0
    for _ in range(STOLEN_EVERY_TICKS):
        watch.ticked(0.5)
    assert readings == 2, "the machine's counts are read at the start and rarely since"
    watch.ticked(90.0)
    assert (watch.stalls_count, watch.without_core_count) == (1, 0)
