"""How many times a node doubles its timeouts while its own loop comes late.

A loop that comes late hears everything late: heartbeats lie in its sockets, and a timeout that ends
before they are read deposes leaders that live. On a machine without a free core that happens to
hundreds of groups at once, and their elections make everything later still. So while ticks come
late, timeouts are doubled, for all groups of the node, until ticks have been in time for a while:
the number of doublings rises at once, and decays step by step. Sans-IO: the shell says how late a
tick was. A leader whose node is gone is noticed by its closed connection, whatever the timeout.

Backoff of one group, after its own elections, is in `raft/election.py`. Times are in ticks.
"""

from __future__ import annotations

from typing import Final

from raftmq.raft.election import TIMEOUT_DOUBLINGS_MAX


class TimeoutBackoff:
    """How many times one timeout is doubled.

    Attributes:
        doublings: how many times the timeout is doubled now, from 0 to `TIMEOUT_DOUBLINGS_MAX`.
    """

    __slots__ = ("_since", "doublings")

    def __init__(self) -> None:
        self.doublings = 0
        self._since = 0

    def increase(self, doublings: int, now: int) -> None:
        """Double the timeout so many times, from now on."""
        self.doublings = min(doublings, TIMEOUT_DOUBLINGS_MAX)
        self._since = now

    def decay(self, now: int, decay_ticks: int) -> None:
        """There is no reason to increase it now: halve the timeout after so long without one."""
        if self.doublings and now - self._since >= decay_ticks:
            self.doublings -= 1
            self._since = now


TIMEOUTS_PER_DELAY: Final = 4
"""A timeout is at least so many times the delay of ticks: other members of a group may share the
machine, and a round of messages passes several loops."""
DECAY_TICKS: Final = 200


class LoopBackoff:
    """The backoff of one node for its own loop."""

    __slots__ = ("_backoff", "_now")

    def __init__(self) -> None:
        self._backoff = TimeoutBackoff()
        self._now = 0

    @property
    def doublings(self) -> int:
        """How many times timeouts are doubled now."""
        return self._backoff.doublings

    def ticked(self, late_ticks: float, election_ticks: int) -> None:
        """A tick came, late by so many ticks."""
        self._now += 1
        wanted = 0
        while wanted < TIMEOUT_DOUBLINGS_MAX and (
            election_ticks << wanted < TIMEOUTS_PER_DELAY * late_ticks
        ):
            wanted += 1
        if wanted >= max(self.doublings, 1):
            self._backoff.increase(wanted, self._now)
        else:
            self._backoff.decay(self._now, DECAY_TICKS)
