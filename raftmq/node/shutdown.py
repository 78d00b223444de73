"""How a node leaves: it hands over everything it is responsible for, then it hangs up.

In this order: leaderships go to in-sync voters of live brokers, all at once; the claims of groups
go to their next coordinators; the controller fences this broker, so that Metadata names it no more;
the metadata group gets another leader; then the process answers the requests under way and hangs
up. Owns only this order and its deadline: what is not handed over in time is left to an election.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from raftmq.logs import structlog

if TYPE_CHECKING:
    from raftmq.node.composition import NodeCore

logger = structlog.get_logger("raftmq.node")

POLL_S: Final = 0.002
HANG_UP_S: Final = 0.5
"""The last part of the time, for answers to clients."""


class _EndOfHandoverError(Exception):
    """The time is over, or no node is left to hand anything to."""


class Shutdown:
    """The shutdown of one node."""

    def __init__(self, node: NodeCore) -> None:
        self._node = node
        self._deadline_ms = 0.0

    async def run(self) -> None:
        """Hand over; ends within `shutdown_timeout_ms` less `HANG_UP_S` in any case."""
        node = self._node
        timeout_ms = max(0.0, node.config.shutdown_timeout_ms - HANG_UP_S * 1e3)
        self._deadline_ms = node.plane.clock.monotonic_ms() + timeout_ms
        try:
            await self._hand_over()
        except _EndOfHandoverError:
            if not self._is_alone():
                logger.warning("not everything was handed over in time", left=self._left())

    async def _hand_over(self) -> None:
        node = self._node
        await self._until(lambda: not node.partitions.transfer_all())
        releases = node.coordinator.drain()
        await self._until(lambda: all(release.is_done for release in releases))
        node.control.lifecycle.drain()
        await self._until(lambda: not node.control.lifecycle.is_ready)
        # Fenced, it gets no more leaderships; it hands over those it got meanwhile.
        await self._until(lambda: not node.partitions.transfer_all())
        await self._until(self._has_resigned)

    def _has_resigned(self) -> bool:
        """Give the metadata group another leader; True when it has one, or none is left."""
        node = self._node
        replica = node.metadata_replica
        if replica is None or not replica.is_leader:
            return True
        live = {broker.node_id for broker in node.engine.image.live_brokers()}
        successors = [
            voter.node_id
            for voter in replica.in_sync_replicas()
            if voter.node_id != node.node_id and voter.node_id in live
        ]
        if successors and not replica.is_handing_over:
            replica.transfer_leadership(successors[0])
        return not successors

    async def _until(self, condition: Callable[[], bool]) -> None:
        node = self._node
        while not condition():
            if self._is_alone() or node.plane.clock.monotonic_ms() >= self._deadline_ms:
                raise _EndOfHandoverError
            await node.tasks.sleep(POLL_S)

    def _is_alone(self) -> bool:
        node = self._node
        if node.metadata_replica is None:
            return False
        voters = node.metadata_replica.voters
        reached = [
            voter
            for voter in voters
            if voter.node_id == node.node_id or node.plane.links.is_connected(voter.node_id)
        ]
        return len(reached) <= len(voters) // 2

    def _left(self) -> int:
        return sum(replica.is_leader for replica in self._node.partitions.replicas())
