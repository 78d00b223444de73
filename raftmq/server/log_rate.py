"""A logger that a flood cannot fill: some lines of one event in a while, then a count of the rest.

Clients choose how often they err, so whatever they can cause is logged through this.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

LINES_MAX: Final = 5
PERIOD_S: Final = 10.0


class RateLimitedLog:
    """At most `LINES_MAX` lines of an event in `PERIOD_S`; the next says how many it left out."""

    __slots__ = ("_log", "_now", "_periods")

    def __init__(self, log: Any, now: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._now = now
        self._periods: dict[str, tuple[float, int]] = {}  # event: (start, lines); events are ours

    def warning(self, event: str, **fields: object) -> None:
        """Log a warning, or count it."""
        self._write("warning", event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Log an error, or count it."""
        self._write("error", event, fields)

    def _write(self, level: str, event: str, fields: dict[str, object]) -> None:
        now = self._now()
        start, lines = self._periods.get(event, (now, 0))
        if now - start >= PERIOD_S or now < start:
            if lines > LINES_MAX:
                fields = {**fields, "left_out": lines - LINES_MAX}
            start, lines = now, 0
        lines += 1
        self._periods[event] = (start, lines)
        if lines <= LINES_MAX:
            getattr(self._log, level)(event, **fields)
