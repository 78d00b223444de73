"""A logger that a flood cannot fill: some lines of one event in a while, then a count of the rest.

Whatever clients can cause, and whatever can happen to a thousand partitions in one moment, is
logged through this. `flush` (a node calls `flush_all` about once a second) says how much was left
out also where the event never comes again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakSet

LINES_MAX: Final = 5
PERIOD_S: Final = 10.0
_all: Final[WeakSet[RateLimitedLog]] = WeakSet()


class RateLimitedLog:
    """At most `lines_max` lines of an event in `PERIOD_S`; one line says how many were left out."""

    __slots__ = ("__weakref__", "_lines_max", "_log", "_now", "_periods")

    def __init__(
        self,
        log: Any,
        now: Callable[[], float] = time.monotonic,
        *,
        lines_max: int = LINES_MAX,
    ) -> None:
        self._log = log
        self._now = now
        self._lines_max = lines_max
        self._periods: dict[str, tuple[float, int, str]] = {}  # event (ours): start, lines, level
        _all.add(self)

    def debug(self, event: str, **fields: object) -> None:
        """Log a detail, or count it."""
        self._write("debug", event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Log a change, or count it."""
        self._write("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Log a warning, or count it."""
        self._write("warning", event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Log an error, or count it."""
        self._write("error", event, fields)

    def flush(self) -> None:
        """Tell of what was left out in periods that are over."""
        now = self._now()
        for event, (start, lines, level) in list(self._periods.items()):
            if 0 <= now - start < PERIOD_S:
                continue
            del self._periods[event]
            if lines > self._lines_max:
                getattr(self._log, level)(event, left_out=lines - self._lines_max)

    def _write(self, level: str, event: str, fields: dict[str, object]) -> None:
        now = self._now()
        start, lines, _ = self._periods.get(event, (now, 0, level))
        if now - start >= PERIOD_S or now < start:
            if lines > self._lines_max:
                fields = {**fields, "left_out": lines - self._lines_max}
            start, lines = now, 0
        lines += 1
        self._periods[event] = (start, lines, level)
        if lines <= self._lines_max:
            getattr(self._log, level)(event, **fields)


def flush_all() -> None:
    """Flush every logger of this process."""
    for log in list(_all):
        log.flush()
