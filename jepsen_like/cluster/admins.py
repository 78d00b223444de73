"""Administrators: the topics that clients use, topics that come and go, records deleted by wish.

Topics are a set: created, deleted and listed by several processes, and checked as such.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Final

from jepsen_like.cluster.consumers import LATEST, Fetcher, Where, name_of
from jepsen_like.cluster.kafka import Kafka, Lost, NotSent
from jepsen_like.cluster.tasks import until
from raftmq.errors import ErrorCode
from raftmq.metadata.broker_messages import AdminRequest, Asker, ReplaceNodeCall, Way
from raftmq.promise import Promise
from raftmq.protocol import ApiKey
from raftmq.types import NodeId

if TYPE_CHECKING:
    from jepsen_like.cluster.node import ClusterNode
    from jepsen_like.cluster.world import ClusterWorld

ADMIN_TIMEOUT_MS: Final = 1_200
CLIENT: Final = Asker(Way.CLIENT, "User:ANONYMOUS", "10.0.0.9", "PLAINTEXT")
UNANSWERED: Final = "nobody answered"
_MAYBE = frozenset({ErrorCode.REQUEST_TIMED_OUT, ErrorCode.NETWORK_EXCEPTION})


async def create_topics(
    world: ClusterWorld,
    process: int,
    names: list[str],
    count: int,
    configs: Sequence[tuple[str, str]] = (),
) -> None:
    """Create the run's own topics, asking until they are there; the first has these configs."""
    kafka = Kafka(world, process)
    missing = list(names)
    while missing:
        rows = [topic_row(name, count, configs if name == names[0] else ()) for name in missing]
        try:
            answer = await kafka.ask(
                kafka.any_node(),
                ApiKey.CREATE_TOPICS,
                topics=rows,
                timeout=ADMIN_TIMEOUT_MS,
                validate_only=False,
            )
        except Lost:
            await kafka.pause()
            continue
        done = (ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS)
        missing = [topic.name for topic in answer.topics if topic.error_code not in done]
        await kafka.pause()
    world.note("topics created")
    kafka.hang_up()


async def create_in_turn(world: ClusterWorld, process: int, rows: Iterable[dict[str, Any]]) -> None:
    """Create topics, or views, asking for each until it is there."""
    kafka = Kafka(world, process)
    for row in rows:
        while not await _is_created(kafka, row):
            await kafka.pause()
    kafka.hang_up()


async def _is_created(kafka: Kafka, row: dict[str, Any]) -> bool:
    try:
        answer = await kafka.ask(
            kafka.any_node(),
            ApiKey.CREATE_TOPICS,
            topics=[row],
            timeout=ADMIN_TIMEOUT_MS,
            validate_only=False,
        )
    except Lost:
        return False
    code = answer.topics[0].error_code
    return code in (ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS)


def topic_row(
    name: str, count: int, configs: Iterable[tuple[str, str]] = (), *, replicas: int = 3
) -> dict[str, Any]:
    """A topic as CreateTopics wants it."""
    return {
        "name": name,
        "num_partitions": count,
        "replication_factor": replicas,
        "assignments": [],
        "configs": [{"name": key, "value": value} for key, value in configs],
    }


class TopicAdmin:
    """One process that creates, deletes and lists topics."""

    def __init__(self, world: ClusterWorld, process: int) -> None:
        self._world = world
        self._kafka = Kafka(world, process)
        self._process = process

    async def run(self) -> None:
        """Go on until the world is quiet; list once more at the end."""
        kafka = self._kafka
        while not self._world.is_quiet:
            name = f"set-{kafka.random.randrange(6)}"
            draw = kafka.random.random()
            if draw < 0.3:
                await self._create(name)
            elif draw < 0.55:
                await self._delete(name)
            else:
                await self._list()
            await kafka.think(20.0, 250.0)
        await self._list()
        kafka.hang_up()

    async def _change(self, f: str, name: str, api: ApiKey, **fields: Any) -> None:
        world, kafka = self._world, self._kafka
        operation = world.recorder.invoke(self._process, f, topics=[name])
        try:
            answer = await kafka.ask(
                kafka.any_node(), api, timeout_ms=4_000.0, timeout=ADMIN_TIMEOUT_MS, **fields
            )
        except NotSent:
            world.recorder.fail(operation)
            return
        except Lost:
            world.recorder.info(operation)
            return
        row = (answer.topics if f == "create_topic" else answer.responses)[0]
        code = ErrorCode(row.error_code)
        world.note(f, name, code.name)
        if code is ErrorCode.NONE:
            world.counts.acked += 1
            world.recorder.ok(operation)
        elif code in _MAYBE:
            world.recorder.info(operation, code=int(code))
        else:
            world.recorder.fail(operation, code=int(code))

    async def _create(self, name: str) -> None:
        await self._change(
            "create_topic",
            name,
            ApiKey.CREATE_TOPICS,
            topics=[topic_row(name, 1)],
            validate_only=False,
        )

    async def _delete(self, name: str) -> None:
        await self._change("delete_topic", name, ApiKey.DELETE_TOPICS, topic_names=[name])

    async def list_at_last(self) -> None:
        """List until an answer comes, once all nodes have the same image: what is there counts."""
        while not await self._list(is_stale=False):
            await self._kafka.pause()
        self._kafka.hang_up()

    async def _list(self, *, is_stale: bool = True) -> bool:
        """Ask any node. It answers from its own image: fresh only after a barrier, which it has
        not, or when no other image is left."""
        world, kafka = self._world, self._kafka
        operation = world.recorder.invoke(self._process, "list_topics", stale=is_stale)
        try:
            answer = await kafka.metadata(None)
        except Lost:
            world.recorder.info(operation)
            return False
        names = [topic.name for topic in answer.topics if topic.name.startswith("set-")]
        world.counts.acked += 1
        world.recorder.ok(operation, topics=names, stale=is_stale)
        return True


async def ask_controller(world: ClusterWorld, random: Random, call: AdminRequest) -> str:
    """Ask any node that serves for what the controller is to do; the name of the first code."""
    serving = [n for n in world.present if n.is_serving and not n.is_paused]
    if not serving:
        return UNANSWERED
    return await call_by(random.choice(serving), call, patience_ms=1_000.0)


async def call_by(node: ClusterNode, call: AdminRequest, *, patience_ms: float) -> str:
    """Ask by way of one node; the name of the first outcome's code."""
    answer: Promise[str] = Promise()

    def told(done: Promise[Any]) -> None:
        if not answer.is_done:
            failed = done.error is not None or not done.result()
            answer.resolve("unknown" if failed else ErrorCode(done.result()[0].code).name)

    def ask() -> None:
        assert node.core is not None
        node.core.control.call(call, CLIENT).when_done(told)

    def late() -> None:
        if not answer.is_done:
            answer.resolve(UNANSWERED)

    node.world.schedule(patience_ms, late)
    node.run(ask)
    return await until(answer)


class NodeReplacer:
    """An operator who wants one node's place taken by another, and asks until it is begun."""

    def __init__(self, world: ClusterWorld, old_id: NodeId, new_id: NodeId) -> None:
        self._world = world
        self._old_id = old_id
        self._new_id = new_id

    async def run(self) -> None:
        """Ask nodes that serve, one after the other."""
        world = self._world
        while True:
            serving = [n for n in world.present if n.is_serving and not n.is_paused]
            if serving and world.node(self._new_id).is_serving:
                asked = world.random.choice(serving)
                if await self._ask(asked):
                    return
            await world.clients.sleep(0.2)

    async def _ask(self, node: ClusterNode) -> bool:
        call = ReplaceNodeCall(
            old_id=self._old_id,
            new_id=self._new_id,
            even_if_alive=True,
            dry_run=False,
            timeout_ms=2_000,
        )
        code = await call_by(node, call, patience_ms=5_000.0)
        self._world.note("replacement", self._old_id, self._new_id, code)
        if code == "NONE":
            self._world.had_effect("replaced")
        return code == "NONE"


class RecordDeleter(Fetcher):
    """Deletes records when it is asked to."""

    async def delete(self, where: Where, share: float) -> None:
        """Delete a share of what a partition holds."""
        world = self.world
        start, end = await self.offset_of(where, -2), await self.offset_of(where, LATEST)
        if start is None or end is None or end <= start:
            return
        offset = start + int((end - start) * share)
        name = name_of(where)
        world.delete_wishes[name] = max(offset, world.delete_wishes.get(name, 0))
        operation = world.recorder.invoke(self.process, "delete_records", offsets={name: offset})
        try:
            leader = await self.kafka.leader(*where)
            answer = await self.kafka.ask(
                leader,
                ApiKey.DELETE_RECORDS,
                topics=[
                    {
                        "name": where[0],
                        "partitions": [{"partition_index": where[1], "offset": offset}],
                    }
                ],
                timeout=1_000,
            )
        except NotSent:
            world.recorder.fail(operation)
            return
        except Lost:
            world.recorder.info(operation)
            return
        row = answer.topics[0].partitions[0]
        world.note("deleted", name_of(where), offset, row.error_code)
        if row.error_code == ErrorCode.NONE:
            world.had_effect("records deleted")
            world.recorder.ok(operation, offsets={name_of(where): row.low_watermark})
        else:
            world.recorder.info(operation, code=row.error_code)
