"""Late ticks: counted, and told apart by whose fault they are."""

from __future__ import annotations

import pytest
import structlog
from structlog.testing import capture_logs

from raftmq.logs import RateLimitedLog
from raftmq.node import loop_watch
from raftmq.node.loop_watch import STOLEN_EVERY_TICKS, LoopWatch
from raftmq.runtime.clock import CoreTimes


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
    watch = LoopWatch(150, lambda: CoreTimes(0.0, waited_ms), lambda: 0.0)
    watch.ticked(0.5)
    waited_ms += no_core_ms
    watch.ticked(late_ms)
    watch.ticked(0.5)
    assert (watch.stalls_count, watch.without_core_count) == (stalls, without_core)
    assert watch.lag.count == 3


def test_waits_count_once() -> None:
    """What an earlier tick waited excuses no later one."""
    waited_ms = 0.0
    watch = LoopWatch(150, lambda: CoreTimes(0.0, waited_ms), lambda: 0.0)
    waited_ms = 500.0
    watch.ticked(1.0)
    watch.ticked(100.0)
    assert (watch.stalls_count, watch.without_core_count) == (1, 0)


def test_a_core_that_the_host_took_is_none() -> None:
    stolen_ms = 2_000.0
    watch = LoopWatch(150, CoreTimes, lambda: stolen_ms)
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

    watch = LoopWatch(150, CoreTimes, read)
    stolen_ms = 100.0
    for _ in range(STOLEN_EVERY_TICKS):
        watch.ticked(0.5)
    assert readings == 2, "the machine's counts are read at the start and rarely since"
    watch.ticked(90.0)
    assert (watch.stalls_count, watch.without_core_count) == (1, 0)


def test_a_stall_is_told_with_what_is_known_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 ms of work and 30 without a core: the rest of 90 was a wait for something else."""
    fresh(monkeypatch)
    times = CoreTimes(100.0, 200.0)
    watch = LoopWatch(150, lambda: times, lambda: 0.0)
    times = CoreTimes(112.0, 230.0)
    loop_watch.FULL_COLLECTIONS.observe(0.025)
    with capture_logs() as told:
        watch.ticked(90.0)
        watch.ticked(90.0)
    first, second = [line for line in told if line["event"] == "loop stalled"]
    assert first == {
        "event": "loop stalled",
        "log_level": "warning",
        "late_ms": 90.0,
        "ran_ms": 12.0,
        "without_core_ms": 30.0,
        "stolen_ms": 0.0,
        "collecting_ms": 25.0,
        "had_core": True,
    }
    assert second["collecting_ms"] == 0.0


def test_stalls_of_a_busy_machine_do_not_crowd_out_those_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fresh(monkeypatch)
    waited_ms = 0.0
    watch = LoopWatch(150, lambda: CoreTimes(0.0, waited_ms), lambda: 0.0)
    with capture_logs() as told:
        for _ in range(100):
            waited_ms += 90
            watch.ticked(90.0)
        watch.ticked(90.0)
    had_core = [line["had_core"] for line in told]
    assert len(had_core) < 100
    assert had_core[-1] is True


def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs that have counted nothing yet."""
    for name in ("_log", "_log_of_own"):
        log = RateLimitedLog(structlog.get_logger("raftmq.node"))
        monkeypatch.setattr(loop_watch, name, log)
