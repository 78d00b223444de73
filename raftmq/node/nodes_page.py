"""What a node tells of all nodes, from its own copy of the metadata; and the way of an operator's
wish to replace one of them to the controller.

Any node can be asked: images are the same everywhere, give or take a moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio
from attrs import asdict

from raftmq.controller.replacement import progress
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import Outcomes, ReplaceNodeCall
from raftmq.promise import Promise
from raftmq.raft.membership import Configuration
from raftmq.server.admin.admin_nodes import ReplaceWish
from raftmq.types import NodeId

if TYPE_CHECKING:
    from raftmq.node.node import Node


class NodesPage:
    """Implements `admin_nodes.NodesPort` for one node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def show(self) -> dict[str, Any]:
        """All nodes, and what is being replaced."""
        engine, leaders = self._node.engine, self._node.control.leaders
        image = engine.image
        configuration = engine.configuration or Configuration()
        led: dict[NodeId, int] = {}
        held: dict[NodeId, int] = {}
        for topic in image.topics_by_id():
            for partition in topic.partitions:
                row = leaders.get(topic.topic_id, partition.index)
                if row is not None:
                    led[row.leader_id] = led.get(row.leader_id, 0) + 1
                for node_id in partition.replicas:
                    held[node_id] = held.get(node_id, 0) + 1
        node_ids = sorted({*image.brokers, *(m.node_id for m in configuration.members)})
        controller = engine.controller_id
        return {
            "cluster_id": image.cluster_id,
            "controller_id": -1 if controller is None else controller,
            "nodes": [
                {
                    **self._describe(node_id, configuration),
                    "leaders": led.get(node_id, 0),
                    "replicas": held.get(node_id, 0),
                }
                for node_id in node_ids
            ],
            "replacements": [asdict(row) for row in progress(image, engine.configuration, leaders)],
        }

    def _describe(self, node_id: NodeId, configuration: Configuration) -> dict[str, Any]:
        broker = self._node.engine.image.brokers.get(node_id)
        role = "none"
        if any(voter.node_id == node_id for voter in configuration.voters):
            role = "voter"
        elif any(learner.node_id == node_id for learner in configuration.learners):
            role = "learner"
        if broker is None:
            return {"node_id": node_id, "role": role, "state": "never seen"}
        addresses = {e.name: f"{e.host}:{e.port}" for e in broker.endpoints}
        return {
            "node_id": node_id,
            "role": role,
            "state": "fenced" if broker.is_fenced else "live",
            "storage_id": f"{broker.storage_id:016x}",
            "rack": broker.rack,
            **{f"{name}_address": address for name, address in addresses.items()},
        }

    async def replace(self, wish: ReplaceWish) -> dict[str, Any]:
        """Have the controller judge a replacement, and begin it unless only asked."""
        call = ReplaceNodeCall(
            old_id=wish.old_id,
            new_id=wish.new_id,
            even_if_alive=wish.even_if_alive,
            dry_run=wish.dry_run,
            timeout_ms=max(1, min(wish.timeout_ms, 60_000)),
        )
        answered = trio.Event()
        promise = self._node.control.call(call)
        promise.when_done(lambda _promise: answered.set())
        await answered.wait()
        return _told(promise)


def _told(promise: Promise[Outcomes]) -> dict[str, Any]:
    error = promise.error
    if isinstance(error, KafkaError):
        return {"code": error.code.name, "message": error.message, "steps": []}
    verdict, *steps = promise.result()
    return {
        "code": ErrorCode(verdict.code).name,
        "message": verdict.message or "",
        "steps": [step.message or "" for step in steps],
    }
