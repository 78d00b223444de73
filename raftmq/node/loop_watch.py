"""Whether the loop keeps time: how late its ticks are, why, and what garbage collections cost.

A late tick delays heartbeats of every group, and elections follow. A loop that was ready and had no
core needs a bigger machine, and so does one whose host took the core away; one that had a core and
was late did too much in one turn, or waited for the disk.

While a full garbage collection runs, the loop stands still. Python looks at all long-lived objects
when their number has grown by a quarter, as after the creation of a thousand partitions, and that
takes a tenth of a second then. So what outlived one full collection is frozen: the next one looks
only at newer objects. Reference counts free frozen objects like all others; only cycles of them
would stay, so everything is looked at again when the frozen objects have doubled, and are many.
There is one histogram per process, since there is one collector.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final

import structlog

from raftmq.counts import Histogram
from raftmq.logs import RateLimitedLog
from raftmq.runtime.clock import CoreTimes

STALL_SHARE: Final = 0.25
"""A tick later than this share of the election timeout counts as a stall of the loop."""

STOLEN_EVERY_TICKS: Final = 40
"""How often the host's share is read, which costs more the more cores there are. So the share of a
stall may include that of up to a second before, or two on a quiescent node, which takes two ticks
at once."""

_log = RateLimitedLog(structlog.get_logger("raftmq.node"))
_log_of_own = RateLimitedLog(structlog.get_logger("raftmq.node"))
"""Of stalls of the loop's own, which a busy machine's must not crowd out."""


class LoopWatch:
    """Lateness of ticks.

    Attributes:
        lag: of all ticks, in seconds.
        stalls_count: ticks later than the limit.
        without_core_count: those of them that would have been within the limit, had the loop not
            waited for a core that other processes or the host had.
    """

    def __init__(
        self,
        election_timeout_ms: float,
        core_times: Callable[[], CoreTimes],
        core_stolen_ms: Callable[[], float],
    ) -> None:
        self.lag = Histogram()
        self.stalls_count = 0
        self.without_core_count = 0
        self._limit_ms = STALL_SHARE * election_timeout_ms
        self._core_times = core_times
        self._times = core_times()
        self._collected_s = FULL_COLLECTIONS.seconds
        self._core_stolen_ms = core_stolen_ms
        self._stolen_ms = core_stolen_ms()
        self._ticks = 0

    def ticked(self, late_ms: float) -> None:
        """A tick came so long after it was due."""
        self.lag.observe(max(0.0, late_ms / 1e3))
        before, self._times = self._times, self._core_times()
        self._ticks += 1
        collected_s, self._collected_s = self._collected_s, FULL_COLLECTIONS.seconds
        if late_ms > self._limit_ms:
            self._stalled(late_ms, before, (self._collected_s - collected_s) * 1e3)
        elif self._ticks % STOLEN_EVERY_TICKS == 0:
            self._stolen_ms = self._core_stolen_ms()

    def _stalled(self, late_ms: float, before: CoreTimes, collecting_ms: float) -> None:
        no_core_ms = self._times.waited_ms - before.waited_ms
        stolen_ms = self._core_stolen_ms()
        taken_ms = stolen_ms - self._stolen_ms
        self._stolen_ms = stolen_ms
        self.stalls_count += 1
        had_core = late_ms - no_core_ms - taken_ms > self._limit_ms
        if not had_core:
            self.without_core_count += 1
        log = _log_of_own if had_core else _log
        log.warning(
            "loop stalled",
            late_ms=round(late_ms, 1),
            ran_ms=round(self._times.ran_ms - before.ran_ms, 1),
            without_core_ms=round(no_core_ms, 1),
            stolen_ms=round(taken_ms, 1),
            collecting_ms=round(collecting_ms, 1),
            had_core=had_core,
        )


FULL: Final = 2
FROZEN_MIN: Final = 2_000_000
"""Fewer frozen objects than that are never looked at again: they are a few hundred megabytes."""
GROWTH: Final = 2
FULL_COLLECTIONS: Final = Histogram()


class _Watch:
    """When the collection under way began, and how many frozen objects are too many."""

    began = 0.0
    frozen_max = FROZEN_MIN
    is_whole = False


def _collecting(phase: str, info: dict[str, Any]) -> None:
    if info["generation"] != FULL:
        return
    if phase == "start":
        _Watch.began = perf_counter()  # counting frozen objects takes its time, too
        _Watch.is_whole = gc.get_freeze_count() > _Watch.frozen_max
        if _Watch.is_whole:
            gc.unfreeze()
        return
    gc.freeze()
    if _Watch.is_whole:
        _Watch.frozen_max = max(FROZEN_MIN, GROWTH * gc.get_freeze_count())
    FULL_COLLECTIONS.observe(perf_counter() - _Watch.began)


def watch_collections() -> None:
    """Time them and keep them short from now on; once per process."""
    if _collecting not in gc.callbacks:
        gc.callbacks.append(_collecting)
