"""How many times a node doubles its timeouts while its own loop comes late.

A loop that comes late hears everything late: heartbeats lie in its sockets, and a timeout that ends
before they are read deposes leaders that live. On a machine without a free core that happens to
hundreds of groups at once, and their elections make everything later still. So while ticks come
late, timeouts are doubled, for all groups of the node, until ticks have been in time for a while:
the doubling rises at once, and fades step by step. Sans-IO: the shell tells how late it was. A
leader whose node is gone is noticed by its closed connection, whatever the doubling.

What one replica knows of its own elections is `raft/election.py`'s; this is for what a node knows
of all its groups. Times are ticks.
"""

from __future__ import annotations

from typing import Final

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


TIMEOUTS_PER_LATENESS: Final = 4
"""A timeout is at least so many times as long as ticks come late: the others of a group may share
the machine, and a round of messages passes several loops."""
CALM_TICKS: Final = 200


class Lateness:
    """What one node knows of its own loop."""

    __slots__ = ("_now", "_patience")

    def __init__(self) -> None:
        self._patience = Patience()
        self._now = 0

    @property
    def patience(self) -> int:
        """How often timeouts are doubled now."""
        return self._patience.level

    def ticked(self, late_ticks: float, election_ticks: int) -> None:
        """A tick came, so many ticks late."""
        self._now += 1
        wanted = 0
        while wanted < PATIENCE_MAX and (
            election_ticks << wanted < TIMEOUTS_PER_LATENESS * late_ticks
        ):
            wanted += 1
        if wanted >= max(self.patience, 1):
            self._patience.rise(wanted, self._now)
        else:
            self._patience.fade(self._now, CALM_TICKS)
