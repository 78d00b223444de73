"""Which brokers the controller hears, on its own monotonic clock.

Owns last-heard times and what each broker said of itself: what it has applied, whether it is unfit
to lead, for how many replicas it has room. Never decides by wall clocks. A new
controller knows nobody's past, so it gives every live broker a full session before it fences one.
A broker whose connection ended is given less time: a process that died closes its sockets at once,
and one that lives is heard again as soon as it is reached anew.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define

from raftmq.types import NodeId


@define(slots=True)
class Heard:
    """What the controller knows of one broker."""

    broker_epoch: int
    heard_ms: float
    applied_version: int = -1
    is_unfit: bool = False
    lost_ms: float | None = None
    """When its connection ended, unless it was heard since."""


class Liveness:
    """Sessions of brokers, kept by the controller alone."""

    def __init__(self, session_ms: float, lost_session_ms: float | None = None) -> None:
        """`lost_session_ms` is what is left of a session when the connection has ended."""
        self._session_ms = session_ms
        self._lost_session_ms = session_ms if lost_session_ms is None else lost_session_ms
        self._heard: dict[NodeId, Heard] = {}
        self.replicas_max: dict[NodeId, int] = {}
        """What brokers last said, also in an earlier office: it changes with their files alone."""

    def take_office(self, live: Iterable[tuple[NodeId, int]], now_ms: float) -> None:
        """Begin with (node, broker epoch) of all live brokers, as if each had just been heard."""
        self._heard = {node_id: Heard(epoch, now_ms) for node_id, epoch in live}

    def heard(
        self,
        node_id: NodeId,
        broker_epoch: int,
        applied_version: int,
        now_ms: float,
        *,
        is_unfit: bool = False,
        replicas_max: int = 0,
    ) -> None:
        """A heartbeat came."""
        if replicas_max:
            self.replicas_max[node_id] = replicas_max
        known = self._heard.get(node_id)
        if known is None or known.broker_epoch != broker_epoch:
            known = self._heard[node_id] = Heard(broker_epoch, now_ms)
        known.heard_ms = now_ms
        known.lost_ms = None
        known.is_unfit = is_unfit
        known.applied_version = max(known.applied_version, applied_version)

    def lost(self, node_id: NodeId, now_ms: float) -> None:
        """The connection to a broker's node ended."""
        known = self._heard.get(node_id)
        if known is not None and known.lost_ms is None:
            known.lost_ms = now_ms

    def expired(self, live: Iterable[tuple[NodeId, int]], now_ms: float) -> list[NodeId]:
        """Of the live brokers, those silent for a whole session, or for some time since a loss."""
        late = []
        for node_id, epoch in live:
            known = self._heard.get(node_id)
            if known is None or known.broker_epoch != epoch:
                self._heard[node_id] = Heard(epoch, now_ms)
            elif now_ms - known.heard_ms >= self._session_ms or (
                known.lost_ms is not None and now_ms - known.lost_ms >= self._lost_session_ms
            ):
                late.append(node_id)
        return late

    def applied_version(self, node_id: NodeId, broker_epoch: int) -> int:
        """The newest version that this broker said it has applied, -1 when it said nothing."""
        known = self._heard.get(node_id)
        if known is None or known.broker_epoch != broker_epoch:
            return -1
        return known.applied_version

    def unfit(self) -> set[NodeId]:
        """The brokers whose last heartbeat said that they should not lead."""
        return {node_id for node_id, known in self._heard.items() if known.is_unfit}
