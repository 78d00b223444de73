"""How much longer a silence may last while this node's loop comes late.

A loop that comes late hears everything late: heartbeats lie in its sockets, and a timeout that ends
before they are read deposes leaders that live. On a machine without a free core that happens to
hundreds of groups at once, and their elections make everything later still. So while ticks come
late, timeouts are doubled, for all groups of the node, until ticks have been in time for a while.
Sans-IO: the shell tells how late it was. A leader whose node is gone is noticed by its closed
connection, whatever the patience.
"""

from __future__ import annotations

from typing import Final

from raftmq.raft.election import PATIENCE_MAX
from raftmq.replication.patience import Patience

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
