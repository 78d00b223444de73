"""How a node leaves: everything it is responsible for goes to others first, then it hangs up.

In this order: leaderships go to in-sync voters of live brokers, all at once; the claims of groups
go to their next coordinators; the controller fences this broker, so that Metadata names it no more;
the metadata group gets another leader; clients are answered what they asked and hung up on. Owns
only this order and its deadline: what cannot be handed over in time is left to an election.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import trio

from raftmq.logs import structlog

if TYPE_CHECKING:
    from raftmq.node.node import Node

logger = structlog.get_logger("raftmq.node")

POLL_S: Final = 0.002
HANG_UP_S: Final = 0.5
"""What answers to clients may take of the time at most, at the end of it."""


class Shutdown:
    """One node's way out."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def run(self) -> None:
        """Hand over and hang up; ends within `shutdown_timeout_ms` in any case."""
        node = self._node
        began = trio.current_time()
        timeout_s = node.config.shutdown_timeout_ms / 1e3
        with trio.move_on_after(max(0.0, timeout_s - HANG_UP_S)) as limit:
            await self._until_alone(self._hand_over)
        if limit.cancelled_caught:
            logger.warning("not everything was handed over in time", left=self._left())
        with trio.move_on_after(HANG_UP_S):
            await node.port.drain(node.partitions.answer_fetches)
        logger.info("handed over", took_ms=round((trio.current_time() - began) * 1e3))

    async def _hand_over(self) -> None:
        node = self._node
        await _until(lambda: not node.partitions.transfer_all())
        releases = node.coordinator.drain()
        await _until(lambda: all(release.is_done for release in releases))
        node.control.lifecycle.drain()
        await _until(lambda: not node.control.lifecycle.is_ready)
        # Fenced, it gets nothing back any more; what it got before goes, too.
        await _until(lambda: not node.partitions.transfer_all())
        await self._resign()

    async def _resign(self) -> None:
        """Give the metadata group another leader."""
        node = self._node
        replica = node.metadata_replica
        if replica is None or not replica.is_leader:
            return
        live = {broker.node_id for broker in node.engine.image.live_brokers()}
        while replica.is_leader:
            heirs = [
                voter.node_id
                for voter in replica.in_sync_replicas()
                if voter.node_id != node.node_id and voter.node_id in live
            ]
            if not heirs:
                return
            if not replica.is_handing_over:
                replica.transfer_leadership(heirs[0])
            await trio.sleep(POLL_S)

    async def _until_alone(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work, unless there is nobody to hand anything to: no metadata majority."""
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                await _until(self._is_alone)
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await work()
            nursery.cancel_scope.cancel()

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


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - states of synchronous code, which tells nobody
        await trio.sleep(POLL_S)
