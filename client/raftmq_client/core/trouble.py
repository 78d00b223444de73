"""Says what does not work through `logging`: at once, then ever more rarely while it lasts.

Owns how often, so that a cluster that is away for a night does not fill a log. Never reads a clock.
"""

from __future__ import annotations

from logging import Logger
from typing import Final

_PAUSE_MS: Final = 1_000.0
_PAUSE_MAX_MS: Final = 60_000.0


class Trouble:
    """What one part of a client is in trouble with, each by a name of its own."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._known: dict[str, tuple[float, float]] = {}  # when it may be said again, and the pause

    def tell(self, name: str, message: str, now: float) -> None:
        """Warn, unless that was done a short time ago."""
        again_at, pause = self._known.get(name, (float("-inf"), _PAUSE_MS / 2))
        if now >= again_at:
            pause = min(pause * 2, _PAUSE_MAX_MS)
            self._known[name] = (now + pause, pause)
            self._logger.warning("%s", message)

    def over(self, name: str, message: str) -> None:
        """It works again."""
        if self._known.pop(name, None) is not None:
            self._logger.info("%s", message)
