"""An operator of brokers: nodes come, rest, die and go, and what they hold is moved meanwhile.

Each order is what the command line gives, to any node that serves. All that it draws is from a
stream of its own, and comes at times of its own, so that what else strikes is not shifted by it. A
node that was removed loses its disk at once, so whatever it alone had would be missed; it comes
back as an empty one. Once faults end the operator tidies up: nothing stays cordoned or in
maintenance, whoever joined is asked in, drains go on to their end.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING

from jepsen_like.cluster.admins import ask_controller
from jepsen_like.cluster.mover import Mover
from raftmq.controller.moves import is_moving
from raftmq.metadata.broker_messages import (
    AdminRequest,
    BalanceCall,
    ChangeNodesCall,
    MoveRequest,
    PlanMovesCall,
)
from raftmq.metadata.commands import NodeState
from raftmq.metadata.image import MetadataImage, all_partitions, holds
from raftmq.metadata.voters import voters_wanted
from raftmq.types import METADATA_GROUP, NodeId

if TYPE_CHECKING:
    from jepsen_like.cluster.node import ClusterNode
    from jepsen_like.cluster.world import ClusterWorld

FACTOR = 3
KINDS = {
    "join": 3.0,
    "add": 3.0,
    "drain": 2.5,
    "cancel-drain": 1.0,
    "remove": 3.0,
    "cordon": 0.7,
    "uncordon": 0.7,
    "maintenance": 0.7,
    "end-maintenance": 0.7,
    "death": 1.5,
    "reassign": 3.0,
    "cancel": 1.5,
    "move": 0.7,
    "balance": 1.0,
    "voters": 1.0,
}
STATES_TO_CHANGE = {
    "drain": NodeState.ACTIVE,
    "cordon": NodeState.ACTIVE,
    "maintenance": NodeState.ACTIVE,
    "add": NodeState.NEW,
    "cancel-drain": NodeState.DRAINING,
    "uncordon": NodeState.CORDONED,
    "end-maintenance": NodeState.MAINTENANCE,
}
"""The states in which nodes are to which these are done."""
OPERATED = (
    "node joins",
    "node add",
    "node drain",
    "node remove",
    "node maintenance",
    "node end-maintenance",
    "died for a while",
    "move planned",
    "move cancelled",
    "balance answered",
    "voters wanted",
)
"""What must have come of it over many runs."""
DRAWS = 6
"""So often another kind is drawn, where there is nothing to do it to."""


class Elastic:
    """One operator.

    Attributes:
        is_tidy: nothing is left that it would have to do.
    """

    def __init__(self, world: ClusterWorld) -> None:
        self._world = world
        self._random = Random(f"elastic {world.seed}")
        self._mover = Mover(world)
        self._removing: dict[NodeId, None] = {}
        """Stopped, and not known to be removed yet."""
        self._removed: dict[NodeId, None] = {}
        self.is_tidy = False

    async def run(self) -> None:
        """Go on until faults end; then tidy up."""
        world, random = self._world, self._random
        low, high = world.options.elastic_every_ms
        weights = dict(world.options.elastic_weights) or KINDS
        while True:
            await world.clients.sleep(random.uniform(low, high) / 1e3)
            if world.is_healed:
                break
            for _ in range(DRAWS):
                if await self._act(random.choices(list(weights), list(weights.values()))[0]):
                    break
        while not await self._tidy():
            await world.clients.sleep(0.3)
        self.is_tidy = True

    def why_not_done(self) -> str:
        """What of all this has not come to its end, "" when nothing."""
        if not self.is_tidy:
            return "the operator is not done"
        leaders = self._world.watch.leaders(METADATA_GROUP)
        if not leaders or leaders[0].core is None:
            return "no controller"
        image = leaders[0].core.engine.image
        configuration = self._world.watch.machines[leaders[0].node_id, METADATA_GROUP]
        voting = [v.node_id for v in configuration.replica.configuration.voters]
        for topic, partition in all_partitions(image):
            name = f"{topic.name}-{partition.index}"
            if partition.planned or is_moving(partition):
                return f"{name} moves to {partition.planned or partition.replicas}"
            if len(partition.replicas) != FACTOR:
                return f"{name} has replicas {partition.replicas}"
            live = [n for n in partition.dismissed if image.live_epoch(n) is not None]
            if live:
                return f"{name}: {live} are dismissed, and not ordered to go"
        for order in image.removals.values():
            if live := [n for n in order.nodes if image.live_epoch(n) is not None]:
                return f"{order.group}: {live} have not deleted it"
        for node_id in self._in_state(image, NodeState.DRAINING):
            if any(holds(p, node_id) for _, p in all_partitions(image)) or node_id in voting:
                return f"node {node_id} drains, and has not come to an end"
        first = [NodeId(n) for n in range(1, self._world.options.nodes + 1)]
        wanted = voters_wanted(image, first)
        active = self._in_state(image, NodeState.ACTIVE)
        if len(voting) != min(wanted, len(active)):
            return f"{voting} vote on metadata, wanted are {wanted}"
        return ""

    # ---- what it does ----

    async def _act(self, kind: str) -> bool:
        """False when there is nothing that it could be done to."""
        image = self._world.newest_image
        if kind == "join":
            return self._join()
        if kind == "death":
            return self._death()
        if kind == "remove":
            return await self._remove(image)
        if kind in ("reassign", "cancel"):
            return await self._reassign(image, is_cancel=kind == "cancel")
        if kind in STATES_TO_CHANGE:
            return await self._change(image, kind)
        if kind == "move":
            self._mover.move(self._random)
        elif kind == "balance":
            code = await self._ask(BalanceCall(timeout_ms=900))
            self._world.note("balance", code)
            if code == "NONE":
                self._world.had_effect("balance answered")
        else:
            voters = self._random.choice((3, 5))
            code = await self._ask(ChangeNodesCall(voters=voters, timeout_ms=900))
            self._world.note("voters", voters, code)
            if code == "NONE":
                self._world.had_effect("voters wanted")
        return True

    async def _change(self, image: MetadataImage, kind: str) -> bool:
        """Whoever is in a state from which it leads; three nodes stay active."""
        state = STATES_TO_CHANGE[kind]
        nodes = self._in_state(image, state)
        if not nodes or (state is NodeState.ACTIVE and len(nodes) <= FACTOR):
            return False
        await self._ask_change(kind, self._random.choice(nodes))
        return True

    async def _ask_change(self, kind: str, node_id: NodeId) -> str:
        call = ChangeNodesCall(node_ids=(node_id,), change=kind, timeout_ms=900)
        code = await self._ask(call)
        self._world.note("node", kind, node_id, code)
        if code == "NONE":
            self._world.had_effect(f"node {kind}")
        return code

    def _join(self) -> bool:
        """A new node, or one that was removed, with an empty disk. The first voters of a cluster
        must not be empty together: they would take themselves for a new one."""
        world = self._world
        able = [n for n in world.nodes if not n.is_wanted and not n.is_up]
        able = [n for n in able if n.life == 0 or n.node_id in self._removed]
        if not able:
            return False
        node = self._random.choice(able)
        is_first = node.node_id <= world.options.nodes
        if is_first and not (
            world.watch.may_lose_a_storage() and all(n.is_serving for n in world.present)
        ):
            return False
        self._removed.pop(node.node_id, None)
        node.is_wanted = True
        node.start()
        world.had_effect("node joins")
        if is_first:
            world.watch.storage_is_lost()
        return True

    def _death(self) -> bool:
        """A node is away for about as long as its replicas are waited for; sometimes two are."""
        world, options = self._world, self._world.options
        up = [n for n in world.present if n.is_up and not n.is_held]
        held = [n for n in world.present if n.is_held]
        most = 2 if self._random.random() < 0.3 else 1
        if not up or len(held) >= most:
            return False
        for node in self._random.sample(up, min(len(up), most - len(held))):
            if not self._can_spare(node):
                continue
            node.crash()
            node.is_held = True
            after_ms = options.broker_session_ms + options.replace_after_ms
            world.schedule(self._random.uniform(0.5, 2.5) * after_ms, partial(_return, node))
            world.had_effect("died for a while")
        return True

    def _can_spare(self, node: ClusterNode) -> bool:
        """True while metadata has a majority that is not away for long without it; a voter that
        begins anew is none until it was admitted."""
        watch = self._world.watch
        leaders = watch.leaders(METADATA_GROUP)
        if not leaders or watch.is_storage_missing():
            return False
        replica = watch.machines[leaders[0].node_id, METADATA_GROUP].replica
        voters = [self._world.node(v.node_id) for v in replica.configuration.voters]
        staying = [n for n in voters if n is not node and n.is_wanted and not n.is_held]
        return 2 * len(staying) > len(voters)

    async def _remove(self, image: MetadataImage) -> bool:
        """Stop a drained node that holds nothing, and have it forgotten."""
        for node_id in self._in_state(image, NodeState.DRAINING):
            node = self._world.node(node_id)
            if node.is_wanted and not any(holds(p, node_id) for _, p in all_partitions(image)):
                node.kill("as it is to be removed")
                node.is_wanted = False
                self._removing[node_id] = None
        asked = list(self._removing)
        for node_id in asked:
            await self._forget(node_id)
        return bool(asked)

    async def _forget(self, node_id: NodeId) -> None:
        world, node = self._world, self._world.node(node_id)
        for _ in range(4):
            code = await self._ask_change("remove", node_id)
            if code == "NONE":
                node.wipe()
                del self._removing[node_id]
                self._removed[node_id] = None
                return
            if code == "INVALID_REQUEST":
                break
            await world.clients.sleep(0.4)
        broker = self._world.newest_image.brokers.get(node_id)
        if broker is not None and broker.state is not NodeState.DRAINING:
            # It is wanted after all.
            del self._removing[node_id]
            node.is_wanted = True
            node.restart_later()

    async def _reassign(self, image: MetadataImage, *, is_cancel: bool) -> bool:
        rows = [
            (topic, p)
            for topic, p in all_partitions(image)
            if (p.planned or p.moving_from) or not is_cancel
        ]
        active = self._in_state(image, NodeState.ACTIVE)
        if not rows or len(active) < FACTOR:
            return False
        topic, partition = self._random.choice(rows)
        replicas: tuple[int, ...] | None = None
        if not is_cancel:
            by_rack: dict[str | None, list[NodeId]] = {}
            for node_id in active:
                by_rack.setdefault(image.brokers[node_id].rack, []).append(node_id)
            if len(by_rack) < FACTOR:
                return False
            racks = self._random.sample(list(by_rack), FACTOR)
            replicas = tuple(self._random.choice(by_rack[rack]) for rack in racks)
        request = MoveRequest(topic=topic.name, partition=partition.index, replicas=replicas)
        code = await self._ask(PlanMovesCall(moves=(request,), timeout_ms=900))
        self._world.note("reassign", topic.name, partition.index, replicas, code)
        self._world.counts.moves += 1
        if code == "NONE":
            self._world.had_effect("move cancelled" if is_cancel else "move planned")
        return True

    async def _tidy(self) -> bool:
        """One round; True when nothing was left to do."""
        for node_id in list(self._removing):
            await self._forget(node_id)
        image = self._world.newest_image
        left = bool(self._removing)
        for kind in ("add", "uncordon", "end-maintenance"):
            state = STATES_TO_CHANGE[kind]
            for node_id in self._in_state(image, state):
                left = True
                await self._ask_change(kind, node_id)
        return not left

    # ---- how ----

    def _in_state(self, image: MetadataImage, state: NodeState) -> list[NodeId]:
        """Nodes that are in it and stay."""
        leaving = image.leaving()
        return [
            n for n, b in sorted(image.brokers.items()) if b.state is state and n not in leaving
        ]

    async def _ask(self, call: AdminRequest) -> str:
        return await ask_controller(self._world, self._random, call)


def _return(node: ClusterNode) -> None:
    """Its time is over."""
    if node.is_held:
        node.is_held = False
        node.world.restart(node)()
