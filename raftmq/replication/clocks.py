"""What time it is for a node's groups, from the clocks of many nodes.

Owns two bounds: at the earliest (what expires is judged by it) and at the latest (what begins to
age is stamped with it). Both are sound while fewer clocks are wrong than half of the metadata
group's voters, or of the clocks heard: of more clocks than may be wrong, one is right. They go on
by monotonic time where no clocks are heard, and the earliest never runs ahead of monotonic time, so
a majority that jumps together lets nothing expire. Knows nothing until this node has led a group
with enough voters. Never decides about safety, and never trusts this node's clock alone, but where
there is no other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final

from raftmq.ports import Clock
from raftmq.replication.retention import heard_clocks
from raftmq.types import NodeId

if TYPE_CHECKING:
    from raftmq.replication.replica import Replica


HEAR_EVERY_MS: Final = 1_000.0
AFTER_PAUSE_MS: Final = 10_000.0
"""A process that stood still takes what it heard before for new until it has ticked for long."""
_GROUPS_HEARD: Final = 64
"""So many groups that this node leads tell the clocks of most of its neighbours."""


class TimeBounds:
    """The two bounds, kept as distances from monotonic time."""

    __slots__ = ("_ceiling", "_earliest", "_latest")

    def __init__(self) -> None:
        self._ceiling: float | None = None
        self._earliest = self._latest = 0.0

    def hear(self, clocks_ms: Collection[int], voters: int, monotonic_ms: float) -> None:
        """Take clocks of different nodes into account; too few of them change nothing."""
        wrong_max = max(voters - 1, len(clocks_ms) - 1) // 2
        if len(clocks_ms) <= wrong_max:
            return
        ahead = sorted(clock_ms - monotonic_ms for clock_ms in clocks_ms)
        self._latest = ahead[wrong_max]
        if self._ceiling is None:
            self._ceiling = self._latest
        self._earliest = min(ahead[-1 - wrong_max], self._ceiling)

    def earliest_ms(self, monotonic_ms: float) -> int | None:
        """No right clock shows less; None: unknown."""
        return None if self._ceiling is None else int(monotonic_ms + self._earliest)

    def latest_ms(self, monotonic_ms: float) -> int | None:
        """No right clock shows more; None: unknown."""
        return None if self._ceiling is None else int(monotonic_ms + self._latest)


class AgreedTime:
    """The bounds as one node knows them."""

    def __init__(
        self,
        node_id: NodeId,
        clock: Clock,
        replicas: Callable[[], Collection[Replica]],
        voters: Callable[[], int],
    ) -> None:
        """`voters`: of the metadata group; 0 while they are not known."""
        self._node_id = node_id
        self._clock = clock
        self._replicas = replicas
        self._voters = voters
        self._bounds = TimeBounds()
        self._asked_ms = clock.monotonic_ms()
        self._next_ms = 0.0

    def earliest_ms(self) -> int | None:
        """What time it is at the earliest; None: unknown."""
        return self._bounds.earliest_ms(self._heard())

    def latest_ms(self) -> int | None:
        """What time it is at the latest; None: unknown."""
        return self._bounds.latest_ms(self._heard())

    def _heard(self) -> float:
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._asked_ms > HEAR_EVERY_MS:
            self._next_ms = now_ms + AFTER_PAUSE_MS
        self._asked_ms = now_ms
        voters = self._voters()
        if now_ms >= self._next_ms and voters:
            self._next_ms = now_ms + HEAR_EVERY_MS
            self._bounds.hear(self._clocks().values(), voters, now_ms)
        return now_ms

    def _clocks(self) -> dict[NodeId, int]:
        clocks: dict[NodeId, int] = {}
        groups = 0
        for replica in self._replicas():
            # What a quiescent group has heard is old.
            if not replica.is_leader or replica.quiescence.is_quiescent:
                continue
            for peer, clock_ms in heard_clocks(replica.core):
                clocks[peer.node_id] = max(clock_ms, clocks.get(peer.node_id, clock_ms))
            groups += 1
            if groups == _GROUPS_HEARD:
                break
        clocks[self._node_id] = self._clock.wall_ms()
        return clocks
