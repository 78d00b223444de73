"""How often a node doubles a timeout: it rises at once, and fades step by step.

What one replica knows of its own elections is `raft/election.py`'s; this is for what a node knows
of all its groups. Times are ticks.
"""

from __future__ import annotations

from raftmq.raft.election import PATIENCE_MAX


class Patience:
    """One timeout's.

    Attributes:
        level: how often the timeout is doubled now, from 0 to `PATIENCE_MAX`.
    """

    __slots__ = ("_since", "level")

    def __init__(self) -> None:
        self.level = 0
        self._since = 0

    def rise(self, level: int, now: int) -> None:
        """There is a reason, now, to double the timeout so often."""
        self.level = min(level, PATIENCE_MAX)
        self._since = now

    def fade(self, now: int, calm_ticks: int) -> None:
        """There is none now: after so long without one the timeout is halved."""
        if self.level and now - self._since >= calm_ticks:
            self.level -= 1
            self._since = now
