"""Whether the loop keeps time: how late its ticks are, and whose fault that is.

A late tick delays heartbeats of every group, and elections follow. A loop that was ready and had no
core needs a bigger machine; one that had a core and was late did too much in one turn, or waited
for the disk. Owns the counts; never sleeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog

from raftmq.counts import Histogram
from raftmq.server.log_rate import RateLimitedLog

STALL_SHARE: Final = 0.25
"""A tick later than this share of the election timeout counts as a stall of the loop."""

_log = RateLimitedLog(structlog.get_logger("raftmq.node"))


class LoopWatch:
    """Lateness of ticks.

    Attributes:
        lag: of all ticks, in seconds.
        stalls_count: ticks later than the limit.
        without_core_count: those within the limit but for the wait for a core.
    """

    def __init__(self, election_timeout_ms: float, core_waited_ms: Callable[[], float]) -> None:
        self.lag = Histogram()
        self.stalls_count = 0
        self.without_core_count = 0
        self._limit_ms = STALL_SHARE * election_timeout_ms
        self._core_waited_ms = core_waited_ms
        self._waited_ms = core_waited_ms()

    def ticked(self, late_ms: float) -> None:
        """A tick came so long after it was due."""
        self.lag.observe(max(0.0, late_ms / 1e3))
        waited_ms = self._core_waited_ms()
        no_core_ms = waited_ms - self._waited_ms
        self._waited_ms = waited_ms
        if late_ms <= self._limit_ms:
            return
        self.stalls_count += 1
        if late_ms - no_core_ms <= self._limit_ms:
            self.without_core_count += 1
        _log.warning(
            "loop stalled", late_ms=round(late_ms, 1), without_core_ms=round(no_core_ms, 1)
        )
