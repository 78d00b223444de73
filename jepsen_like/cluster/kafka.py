"""A Kafka client in the world: connections in memory, requests by API, who leads what.

Owns what the client's side of the protocol must know, and nothing of workloads. A request either
gets its answer, or fails as `Lost`: nobody knows what became of it; `NotSent` says that nobody can
have done anything. Connections are as TCP gives them: in order, all or none after.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from random import Random
from typing import TYPE_CHECKING, Any, Final

from jepsen_like.cluster.tasks import until
from raftmq.errors import ErrorCode
from raftmq.promise import Promise
from raftmq.protocol import (
    ApiKey,
    Struct,
    decode_response,
    decode_response_header,
    encode_request,
    encode_request_header,
)
from raftmq.types import VIEW_SUFFIX

if TYPE_CHECKING:
    from jepsen_like.cluster.port import SimConnection
    from jepsen_like.cluster.world import ClusterWorld

_SIZE: Final = struct.Struct(">i")
VERSIONS: Final[dict[ApiKey, int]] = {
    ApiKey.PRODUCE: 9,
    ApiKey.FETCH: 12,
    ApiKey.METADATA: 9,
    ApiKey.LIST_OFFSETS: 7,
    ApiKey.CREATE_TOPICS: 5,
    ApiKey.DELETE_TOPICS: 4,
    ApiKey.DELETE_RECORDS: 2,
    ApiKey.INIT_PRODUCER_ID: 4,
    ApiKey.FIND_COORDINATOR: 3,
    ApiKey.JOIN_GROUP: 7,
    ApiKey.SYNC_GROUP: 5,
    ApiKey.HEARTBEAT: 4,
    ApiKey.LEAVE_GROUP: 4,
    ApiKey.OFFSET_COMMIT: 8,
    ApiKey.OFFSET_FETCH: 7,
    ApiKey.CREATE_PARTITIONS: 2,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: 1,
    ApiKey.OFFSET_FOR_LEADER_EPOCH: 4,
    ApiKey.DESCRIBE_GROUPS: 5,
    ApiKey.LIST_GROUPS: 4,
    ApiKey.API_VERSIONS: 3,
    ApiKey.DESCRIBE_CONFIGS: 4,
    ApiKey.DESCRIBE_CLUSTER: 0,
    ApiKey.DESCRIBE_QUORUM: 1,
    ApiKey.ELECT_LEADERS: 2,
    ApiKey.DESCRIBE_PRODUCERS: 0,
    ApiKey.LIST_PARTITION_REASSIGNMENTS: 0,
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: 0,
    ApiKey.OFFSET_DELETE: 0,
    ApiKey.DELETE_GROUPS: 2,
    ApiKey.ALTER_CONFIGS: 1,
    ApiKey.DESCRIBE_LOG_DIRS: 1,
}
NARROW: Final = "narrow"
"""The topic that shrinks and grows."""
VIEW: Final = f"{NARROW}{VIEW_SUFFIX}"
STALE_LEADER: Final = frozenset(
    {
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.LEADER_NOT_AVAILABLE,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.UNKNOWN_LEADER_EPOCH,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.KAFKA_STORAGE_ERROR,
        ErrorCode.OFFSET_NOT_AVAILABLE,
    }
)


class Lost(Exception):  # what became of a request, not a mistake
    """The connection ended, or nobody answered in time: the outcome is unknown."""


class NotSent(Lost):
    """Nobody was there to ask: nothing can have happened."""


class ClientEnd:
    """The client's end of one connection."""

    def __init__(self, world: ClusterWorld, node_id: int, connection: SimConnection | None) -> None:
        self._world = world
        self.node_id = node_id
        self._connection = connection
        self._waiting: dict[int, Promise[memoryview]] = {}
        self._to_node_ms = 0.0
        self._to_client_ms = 0.0
        self.is_open = connection is not None

    @classmethod
    def dial(cls, world: ClusterWorld, node_id: int) -> ClientEnd:
        """Connect; the end is not open where nobody listens."""
        node = world.node(node_id)
        is_there = node.is_serving and node.port is not None and node_id not in world.cut_off
        end = cls(world, node_id, None)
        if is_there and not node.is_paused:
            assert node.port is not None
            end._connection = node.port.accept(end)
            end.is_open = True
        return end

    def send(self, data: bytes, correlation_id: int, answer: Promise[memoryview]) -> None:
        """Send bytes; `answer` is settled with the response to that id."""
        world = self._world
        self._waiting[correlation_id] = answer
        if world.loses_client_frame():
            self._break()
            return
        at_ms = self._to_node_ms = max(
            self._to_node_ms, world.now_ms + world.wires.delay_ms() * 0.5
        )
        world.schedule(at_ms - world.now_ms, lambda: self._reach(data))

    def _reach(self, data: bytes) -> None:
        connection, world = self._connection, self._world
        if connection is None or self.node_id in world.cut_off:
            world.had_effect("clients cut off")
            return  # its timeout tells the client
        node = world.node(self.node_id)
        if connection.is_open:
            node.later(0.0, lambda: connection.receive(data))

    def arrives(self, data: bytes) -> None:
        """The node sent answers."""
        world = self._world
        if self.node_id in world.cut_off:
            return
        if world.loses_client_frame():
            self._break()
            return
        at_ms = self._to_client_ms = max(
            self._to_client_ms, world.now_ms + world.wires.delay_ms() * 0.5
        )
        world.schedule(at_ms - world.now_ms, lambda: self._take(data))

    def _take(self, data: bytes) -> None:
        view = memoryview(data)
        while len(view) and self.is_open:
            (size,) = _SIZE.unpack_from(view)
            frame = view[4 : 4 + size]
            (correlation_id,) = _SIZE.unpack_from(frame)
            promise = self._waiting.pop(correlation_id, None)
            if promise is not None and not promise.is_done:
                promise.resolve(frame)
            view = view[4 + size :]

    def _break(self) -> None:
        """The connection is reset on its way: both ends learn of it."""
        connection, world = self._connection, self._world
        if connection is not None:
            world.node(self.node_id).later(world.wires.delay_ms(), connection.close)
        self.ends(0.0)

    def ends(self, delay_ms: float) -> None:
        """The other end is gone; this one notices after a while."""
        self._world.schedule(delay_ms + self._world.wires.delay_ms(), self._ended)

    def _ended(self) -> None:
        if not self.is_open:
            return
        self.is_open = False
        waiting, self._waiting = self._waiting, {}
        for promise in waiting.values():
            if not promise.is_done:
                promise.fail(Lost("the connection ended"))

    def close(self) -> None:
        """Hang up."""
        connection, world = self._connection, self._world
        if connection is not None and connection.is_open:
            world.node(self.node_id).later(world.wires.delay_ms(), connection.close)
        self._ended()


class Kafka:
    """One client process's view of the cluster."""

    def __init__(self, world: ClusterWorld, process: int) -> None:
        self.world = world
        self.process = process
        self.random = Random(f"cluster client {world.seed} {process}")
        self.leaders: dict[tuple[str, int], int] = {}
        self.epochs: dict[tuple[str, int], int] = {}
        """The newest leader epochs heard of; who names an older one is behind (KIP-320)."""
        self.keeps_epochs = False
        """As clients of today do, and those of long ago did not."""
        self.partition_counts: dict[str, int] = {}
        self.controller = -1
        self._ends: dict[int, ClientEnd] = {}
        self._correlation_id = 0

    # ---- requests ----

    def end_to(self, node_id: int) -> ClientEnd:
        """A connection to a node, standing if it can."""
        end = self._ends.get(node_id)
        if end is None or not end.is_open:
            end = self._ends[node_id] = ClientEnd.dial(self.world, node_id)
        return end

    def hang_up(self) -> None:
        """Close all connections."""
        ends, self._ends = self._ends, {}
        for end in ends.values():
            end.close()

    def request(
        self,
        node_id: int,
        api: ApiKey,
        body: bytes,
        *,
        timeout_ms: float | None = None,
        version: int | None = None,
    ) -> Promise[memoryview]:
        """Ask a node; the promise gives the response's body, or fails as Lost."""
        version = VERSIONS[api] if version is None else version
        self._correlation_id += 1
        number = self._correlation_id
        end = self.end_to(node_id)
        whole: Promise[memoryview] = Promise()
        if not end.is_open:
            whole.fail(NotSent(f"node {node_id} is not there"))
            return whole
        head = encode_request_header(api, version, number, "sim")
        answer: Promise[memoryview] = Promise()

        def settled(done: Promise[memoryview]) -> None:
            if whole.is_done:
                return
            if done.error is not None:
                whole.fail(done.error)
                return
            frame = done.result()
            _, position = decode_response_header(api, version, frame)
            whole.resolve(frame[position:])

        answer.when_done(settled)

        def late() -> None:
            if not answer.is_done:
                answer.fail(Lost("no answer in time"))
                end.close()

        end.send(_SIZE.pack(len(head) + len(body)) + head + body, number, answer)
        limit_ms = self.world.options.request_timeout_ms if timeout_ms is None else timeout_ms
        self.world.schedule(limit_ms, late)
        return whole

    async def ask(
        self,
        node_id: int,
        api: ApiKey,
        *,
        timeout_ms: float | None = None,
        version: int | None = None,
        **fields: Any,
    ) -> Struct:
        """Ask a node and read its answer.

        Raises:
            Lost: there is none.
        """
        version = VERSIONS[api] if version is None else version
        body = encode_request(api, version, fields)
        answer = await until(
            self.request(node_id, api, body, timeout_ms=timeout_ms, version=version)
        )
        return decode_response(api, version, answer)

    async def sleep(self, ms: float) -> None:
        """Let virtual time pass."""
        await self.world.clients.sleep(ms / 1e3)

    async def think(self, low_ms: float, high_ms: float) -> None:
        """Wait before the next operation, longer once the run has had enough of them."""
        await self.sleep(self.random.uniform(low_ms, high_ms) * self.world.slowdown)

    async def pause(self) -> None:
        """Wait a little before another try."""
        await self.sleep(self.random.uniform(20.0, 80.0))

    # ---- the cluster ----

    def any_node(self) -> int:
        """A node to ask whatever any node knows."""
        return int(self.random.choice(self.world.nodes).node_id)

    async def metadata(self, topics: Iterable[str] | None, *, node_id: int | None = None) -> Struct:
        """What a node, any if none is named, says of these topics, or of all there are.

        Raises:
            Lost: it says nothing.
        """
        return await self.ask(
            self.any_node() if node_id is None else node_id,
            ApiKey.METADATA,
            topics=None if topics is None else [{"name": name} for name in topics],
            allow_auto_topic_creation=False,
            include_cluster_authorized_operations=False,
            include_topic_authorized_operations=False,
        )

    async def refresh(self, topics: Iterable[str]) -> bool:
        """Learn who leads what; False when nobody could be asked."""
        names = list(topics)
        if not {NARROW, VIEW}.isdisjoint(names):
            names = list(dict.fromkeys([*names, VIEW, NARROW]))
        for node_id in self._whom_to_ask():
            try:
                answer = await self.metadata(names, node_id=node_id)
            except Lost:
                continue
            self._learn(answer)
            return True
        return False

    def _whom_to_ask(self) -> list[int]:
        first = self.any_node()
        if not self.world.is_healed:
            return [first]
        # The majority's time is limited then, and not to be lost by asking only who is cut off.
        others = [int(node.node_id) for node in self.world.present if node.node_id != first]
        return [first, *others]

    def _learn(self, answer: Struct) -> None:
        self.controller = answer.controller_id
        # What a topic says of a number itself counts more.
        for topic in sorted(answer.topics, key=lambda topic: topic.name != VIEW):
            if topic.error_code:
                continue
            self.partition_counts[topic.name] = len(topic.partitions)
            for row in topic.partitions:
                self._learn_leader((topic.name, row.partition_index), row)
                if topic.name == VIEW:
                    self._learn_leader((NARROW, row.partition_index), row)

    def _learn_leader(self, where: tuple[str, int], row: Struct) -> None:
        is_behind = row.leader_epoch < self.epochs.get(where, -1)
        if row.leader_id < 0 or is_behind:
            self.leaders.pop(where, None)
            return
        self.leaders[where] = row.leader_id
        # Other topics are made anew, and begin at 0 again.
        if self.keeps_epochs and (where in self.world.partitions or where[0] == NARROW):
            self.epochs[where] = row.leader_epoch

    async def leader(self, topic: str, partition: int) -> int:
        """Who leads, asking until somebody is known to.

        Raises:
            Lost: nobody knew.
        """
        known = self.leaders.get((topic, partition))
        if known is None:
            await self.refresh([topic])
            known = self.leaders.get((topic, partition))
        if known is None:
            raise NotSent("no leader is known")
        return known
