"""/leaders of the admin port: the leaders of partitions, and a transfer to another replica.

`GET /leaders` shows every partition with its leader, preferred leader and in-sync replicas, as the
node knows them; `POST /leaders/transfer` takes `{"topic": "t", "partition": 0, "to": 2}` at any
node and answers when node 2 leads, or at its timeout. The transfer makes it the preferred leader
too, or balancing would undo it.

Any node can be asked: image and leader table are the same everywhere, give or take a moment. A
transfer is first a metadata command that puts the node in front of the partition's replicas, and
then a request to the present leader; only to a replica in sync, and by a command that names the
state it was computed from.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from raftmq.controller.control_plane import ControlPlane
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.commands import ReassignPartition
from raftmq.metadata.image import PartitionImage, TopicImage
from raftmq.promise import Promise
from raftmq.server.admin.pages import answer, wish_page
from raftmq.types import NodeId

POLL_S: Final = 0.02
ASK_AGAIN_S: Final = 0.5
TIMEOUT_MS_MAX: Final = 60_000


class TransferWish(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /leaders/transfer`."""

    topic: str
    partition: int
    to: int
    timeout_ms: int = 10_000


class LeadersPage:
    """What one node shows and does on these pages."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    def show(self) -> dict[str, Any]:
        """All partitions with their leaders and preferred leaders."""
        control = self._control
        rows = []
        for topic in sorted(control.engine.image.topics_by_id(), key=lambda t: t.name):
            for partition in topic.partitions:
                row = control.leaders.get(topic.topic_id, partition.index)
                rows.append(
                    {
                        "topic": topic.name,
                        "partition": partition.index,
                        "leader": None if row is None else row.leader_id,
                        "leader_epoch": None if row is None else row.leader_epoch,
                        "preferred": partition.preferred_leader,
                        "replicas": list(partition.replicas),
                        "isr": [] if row is None else list(row.isr),
                    }
                )
        return {"partitions": rows}

    async def transfer(self, wish: TransferWish) -> dict[str, Any]:
        """Make a node the leader of a partition, and its preferred one."""
        try:
            with trio.fail_after(min(max(wish.timeout_ms, 1), TIMEOUT_MS_MAX) / 1e3):
                return _told(await self._transfer(wish))
        except KafkaError as error:
            return {"code": error.code.name, "message": error.message}
        except trio.TooSlowError:
            return {
                "code": ErrorCode.REQUEST_TIMED_OUT.name,
                "message": f"node {wish.to} does not lead yet",
            }

    async def _transfer(self, wish: TransferWish) -> str:
        control = self._control
        while True:
            topic, partition = self._find(wish)
            to = NodeId(wish.to)
            row = control.leaders.get(topic.topic_id, partition.index)
            leads = row is not None and row.leader_id == to
            if leads and partition.preferred_leader == to:
                return f"node {to} leads {topic.name}-{partition.index}"
            self._check(to, partition, () if row is None else row.isr)
            if partition.preferred_leader != to and not await self._prefer(topic, partition, to):
                continue  # computed from a state that has changed meanwhile
            if not leads:
                control.move_leadership(topic.topic_id, partition.index, to)
                with trio.move_on_after(ASK_AGAIN_S):
                    await self._until_led(topic, partition.index, to)

    def _find(self, wish: TransferWish) -> tuple[TopicImage, PartitionImage]:
        topic = self._control.engine.image.topics.get(wish.topic)
        if topic is None or not 0 <= wish.partition < len(topic.partitions):
            raise KafkaError(
                f"there is no partition {wish.topic}-{wish.partition}",
                code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            )
        return topic, topic.partitions[wish.partition]

    def _check(self, to: NodeId, partition: PartitionImage, isr: tuple[NodeId, ...]) -> None:
        if to not in partition.replicas:
            raise KafkaError(
                f"node {to} has no replica of it; nodes {list(partition.replicas)} have",
                code=ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            )
        if to not in isr:
            raise KafkaError(
                f"node {to} is not in sync; nodes {list(isr)} are",
                code=ErrorCode.INELIGIBLE_REPLICA,
            )

    async def _prefer(self, topic: TopicImage, partition: PartitionImage, to: NodeId) -> bool:
        """Put a node in front of a partition's replicas; False when the state has moved on."""
        engine = self._control.engine
        others = tuple(node_id for node_id in partition.replicas if node_id != to)
        promise = engine.propose(
            ReassignPartition(
                topic_id=topic.topic_id, partition=partition.index, replicas=(to, *others)
            ),
            expected_version=engine.image.version,
        )
        try:
            await _kept(promise)
        except KafkaError as error:
            if error.code is ErrorCode.INVALID_UPDATE_VERSION:
                return False
            raise
        return True

    async def _until_led(self, topic: TopicImage, index: int, to: NodeId) -> None:
        while True:
            row = self._control.leaders.get(topic.topic_id, index)
            if row is not None and row.leader_id == to:
                return
            await trio.sleep(POLL_S)


def _told(message: str) -> dict[str, Any]:
    return {"code": ErrorCode.NONE.name, "message": message}


async def _kept(promise: Promise[Any]) -> None:
    """Wait for a promise, and raise what it fails with."""
    done = trio.Event()
    promise.when_done(lambda _promise: done.set())
    await done.wait()
    promise.result()


def leaders_routes(leaders: LeadersPage) -> list[Route]:
    """The pages' routes."""

    async def show(_request: Request) -> Response:
        return answer(leaders.show())

    return [
        Route("/leaders", show, methods=["GET"]),
        Route("/leaders/transfer", wish_page(TransferWish, leaders.transfer), methods=["POST"]),
    ]
