"""/nodes of the admin port: the members of the cluster, and the replacement of one of them.

`GET /nodes` shows every node with its role and what is being replaced; `POST /nodes/replace` takes
`{"old_id": 1, "new_id": 4}`, with `even_if_alive` and `dry_run`, at any node, and answers when the
controller has decided. What happens then is the cluster's work, shown by `GET /nodes`.

Any node can be asked: it reads its own copy of the metadata, which is the same everywhere, give or
take a moment.
"""

from __future__ import annotations

from typing import Any

import msgspec
import trio
from attrs import asdict
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from raftmq.controller.control_plane import ControlPlane
from raftmq.controller.replacement import progress
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import Outcomes, ReplaceNodeCall
from raftmq.promise import Promise
from raftmq.raft.membership import Configuration
from raftmq.server.admin.pages import answer, wish_page
from raftmq.types import NodeId


class ReplaceWish(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /nodes/replace`."""

    old_id: int
    new_id: int
    even_if_alive: bool = False
    dry_run: bool = False
    timeout_ms: int = 10_000


class NodesPage:
    """What one node shows and does on these pages."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    def show(self) -> dict[str, Any]:
        """All nodes, and what is being replaced."""
        engine, leaders = self._control.engine, self._control.leaders
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
        broker = self._control.engine.image.brokers.get(node_id)
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
        promise = self._control.call(call)
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


def nodes_routes(nodes: NodesPage) -> list[Route]:
    """The pages' routes."""

    async def show(_request: Request) -> Response:
        return answer(nodes.show())

    return [
        Route("/nodes", show, methods=["GET"]),
        Route("/nodes/replace", wish_page(ReplaceWish, nodes.replace), methods=["POST"]),
    ]
