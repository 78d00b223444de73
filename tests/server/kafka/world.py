"""A broker whose cluster a test makes up: images by hand, partitions on fake replicas."""

from __future__ import annotations

import struct
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import attrs
from immutables import Map

from raftmq.config import NodeConfig
from raftmq.controller.control_plane import QuorumState
from raftmq.controller.leaders import LeaderTable
from raftmq.errors import ErrorCode
from raftmq.metadata.broker_messages import AdminRequest, Asker, Outcome
from raftmq.metadata.commands import Endpoint
from raftmq.metadata.image import BrokerImage, MetadataImage, PartitionImage, TopicImage
from raftmq.metadata.results import ProducerIds
from raftmq.partition.partition import Partition
from raftmq.partition.registry import PartitionRegistry
from raftmq.partition.settings import PartitionSettings
from raftmq.ports import never
from raftmq.promise import Promise
from raftmq.protocol import (
    ApiKey,
    Struct,
    decode_response,
    decode_response_header,
    encode_request,
    encode_request_header,
)
from raftmq.protocol.fetch import (
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    decode_fetch_response,
    encode_fetch_request,
)
from raftmq.protocol.produce import (
    ProducePartition,
    ProduceRequest,
    ProduceResponse,
    ProduceTopic,
    decode_produce_response,
    encode_produce_request,
)
from raftmq.raft.membership import Configuration
from raftmq.runtime.threads import Workers
from raftmq.server.audit import Audit
from raftmq.server.kafka.authentication import Caller
from raftmq.server.kafka.broker import Broker
from raftmq.server.kafka.dispatch import HANDLERS, Dispatcher
from raftmq.server.kafka.leader_waits import Hold
from raftmq.server.kafka.replies import Pieces
from raftmq.server.kafka.request_context import RequestContext
from raftmq.transactions.coordinator import TransactionConfig, TransactionCoordinator
from raftmq.transactions.rows import RowQueue
from raftmq.types import (
    LeaderEpoch,
    NodeId,
    RaftGroupId,
    ReplicaId,
    StorageId,
    TopicId,
    TopicPartition,
)
from tests.partition.fake_replica import Bench, FakeReplica
from tests.server.auditing import Lines
from tests.server.kafka.ports import NoReplicas

NODES = tuple(NodeId(n) for n in (1, 2, 3))
MAXIMUM = 99


def broker_image(node_id: int, *, is_fenced: bool = False) -> BrokerImage:
    return BrokerImage(
        NodeId(node_id),
        StorageId(node_id),
        1,
        1,
        f"rack{node_id}",
        (Endpoint("client", f"host{node_id}", 9092),),
        (),
        is_fenced,
    )


class FakeSlot:
    """Keeps one answer."""

    def __init__(self) -> None:
        self.pieces: Pieces | None = None
        self.is_failed = False
        self.correlation_id = 0

    def answer(self, pieces: Pieces) -> None:
        assert self.pieces is None
        self.pieces = pieces

    def fail(self) -> None:
        self.is_failed = True

    @property
    def data(self) -> bytes:
        assert self.pieces is not None
        out = b""
        for piece in self.pieces:
            is_bytes = isinstance(piece, bytes | bytearray | memoryview)
            out += bytes(piece) if is_bytes else piece.data  # type: ignore[union-attr,arg-type]
        return out


class FakeEngine:
    """Metadata that a test sets."""

    def __init__(self) -> None:
        self.image = MetadataImage(
            version=1,
            structure_version=1,
            brokers=Map({node_id: broker_image(node_id) for node_id in NODES}),
        )
        self.controller_id: NodeId | None = NodeId(2)
        self.controller_epoch = 3
        self.configuration: Configuration | None = None
        self.proposed: list[tuple[Any, Promise[Any]]] = []

    def on_image(self, _callback: Any) -> None:
        """Nobody is told here."""

    def on_batch(self, _callback: Any) -> None:
        """Nor here."""

    def read_barrier(self, **_kwargs: Any) -> Promise[None]:
        return Promise.resolved(None)

    def propose(self, command: Any, **_kwargs: Any) -> Promise[Any]:
        promise: Promise[Any] = Promise()
        self.proposed.append((command, promise))
        return promise

    def give_block(self, start: int, end: int) -> None:
        self.proposed.pop(0)[1].resolve(ProducerIds(start=start, end=end))

    def change(self, **changes: Any) -> None:
        version = self.image.version + 1
        self.image = attrs.evolve(self.image, version=version, structure_version=version, **changes)


class FakeController:
    """Keeps admin calls until the test decides them."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Promise[tuple[Outcome, ...]]]] = []
        self.askers: list[Asker] = []
        self.quorum: Promise[QuorumState | None] = Promise()

    def ask_quorum(self) -> Promise[QuorumState | None]:
        return self.quorum

    def call(self, request: AdminRequest, asker: Asker) -> Promise[tuple[Outcome, ...]]:
        promise: Promise[tuple[Outcome, ...]] = Promise()
        self.calls.append((request, promise))
        self.askers.append(asker)
        return promise


def context_of(
    api: ApiKey, version: int, client_id: str = "client", host: str = "10.0.0.9"
) -> RequestContext:
    """Of a request whose handler is called by a test."""
    caller = Caller(host=host)
    connection: Any = SimpleNamespace(
        peer=f"{host}:5555", software="", hold=Hold(), caller=caller, authentication=None
    )
    return RequestContext(connection, int(api), version, 1, client_id, caller, 0.0)


class World:
    """One broker (node 1 of three) and a client without a socket."""

    def __init__(self, *, is_audited: bool = False, **config: Any) -> None:
        """`config`: keys of its node that are not as by default."""
        self.bench = Bench()  # its clock and deadlines serve the whole world
        self.lines = Lines()
        sink = self.lines if is_audited else None
        self.audit = Audit(sink, self.bench.clock, cluster="cluster", node=1)
        self.broken_invariants: list[str] = []
        self.engine = FakeEngine()
        self.controller = FakeController()
        self.leaders = LeaderTable()
        self.registry = PartitionRegistry()
        self.handed_over: list[TopicPartition] = []
        self.broker = Broker(
            NODES[0],
            "cluster",
            engine=self.engine,
            controller=self.controller,
            leader_table=self.leaders,
            partitions=self.registry,
            coordinator=None,
            transactions=TransactionCoordinator(
                self.engine,
                RowQueue(self.engine, self.bench.deadlines, *[self.bench.clock.wall_ms] * 2),
                self.bench.deadlines,
                TransactionConfig(),
            ),
            deadlines=self.bench.deadlines,
            clock=self.bench.clock,
            config=NodeConfig(node_id=1, data=Path("/tmp"), **config),
            random=Random(1),
            buggify=never,
            drains=NoReplicas(),
            hand_over=self._hand_over,
            has_ended=lambda _node_id: False,
            is_cut_off=lambda: False,
            workers=Workers(),
            filtered=lambda _topic_id, _source: None,
            audit=self.audit,
        )
        self.dispatcher = Dispatcher(self.broker, HANDLERS)
        self.connection: Any = SimpleNamespace(
            authentication=None,
            peer="10.0.0.9:5555",
            software="",
            on_close={},
            hold=Hold(),
            caller=Caller(host="10.0.0.9"),
            replies=SimpleNamespace(bar=lambda: None, unbar=lambda: None),
        )
        self._correlation_id = 0

    def _hand_over(self, _leader: NodeId, name: TopicPartition) -> bool:
        self.handed_over.append(name)
        return True

    def add_topic(self, name: str, partition_count: int = 1, **configs: str) -> UUID:
        """A topic of three replicas; this node runs one of each partition, and leads it."""
        topic_id = TopicId(UUID(int=100 + len(self.engine.image.topics)))
        first = tuple(ReplicaId(node_id, StorageId(node_id)) for node_id in NODES)
        partitions = tuple(
            PartitionImage(i, 1, NODES, first, NODES) for i in range(partition_count)
        )
        topic = TopicImage(name, topic_id, partitions, Map(configs))
        image = self.engine.image
        self.engine.change(
            topics=image.topics.set(name, topic),
            topic_names=image.topic_names.set(topic_id, name),
        )
        for i in range(partition_count):
            partition = Partition(
                TopicPartition(name, i),
                RaftGroupId(topic_id, i, 1),
                NODES[0],
                settings=PartitionSettings.from_configs(configs),
                deadlines=self.bench.deadlines,
                clock=self.bench.clock,
                on_broken_invariant=self.broken_invariants.append,
            )
            partition.attach(FakeReplica(partition))
            self.registry.add(partition)
            self.lead(topic_id, i, 1, 5)
        return topic_id

    def lead(self, topic_id: UUID, index: int, leader: int, epoch: int) -> None:
        """The leader table hears of a leader."""
        self.leaders.led(
            TopicId(topic_id),
            index,
            leader=NodeId(leader),
            leader_epoch=LeaderEpoch(epoch),
            isr=NODES[:2],
            voters=NODES,
        )

    def partition(self, name: str, index: int = 0) -> Partition:
        found = self.registry.by_name(name, index)
        assert found is not None
        return found

    def replica(self, name: str, index: int = 0) -> FakeReplica:
        replica = self.partition(name, index).replica
        assert isinstance(replica, FakeReplica)
        return replica

    # ---- the client ----

    def begin(self, api: ApiKey, version: int, body: bytes) -> FakeSlot:
        self._correlation_id += 1
        head = encode_request_header(api, version, self._correlation_id, "client")
        slot = FakeSlot()
        slot.correlation_id = self._correlation_id
        frame = memoryview(bytearray(head + body))
        self.dispatcher.begin(frame, slot, self.connection)  # type: ignore[arg-type]
        return slot

    def send(self, api: ApiKey, version: int, **fields: Any) -> FakeSlot:
        return self.begin(api, version, encode_request(api, version, fields))

    def ask(self, api: ApiKey, version: int, **fields: Any) -> Struct:
        return self.read(api, version, self.send(api, version, **fields))

    def read(self, api: ApiKey, version: int, slot: FakeSlot) -> Struct:
        return decode_response(api, version, self.body(api, version, slot))

    def body(self, api: ApiKey, version: int, slot: FakeSlot) -> memoryview:
        data = memoryview(slot.data)
        (size,) = struct.unpack_from(">i", data)
        assert size == len(data) - 4, "one whole frame"
        correlation_id, position = decode_response_header(api, version, data[4:])
        assert correlation_id == slot.correlation_id
        return data[4 + position :]

    def produce(
        self,
        version: int,
        rows: list[tuple[str | UUID, int, Any]],
        *,
        acks: int = -1,
        timeout_ms: int = 1000,
        transactional_id: str | None = None,
    ) -> FakeSlot:
        topics = [
            ProduceTopic(
                key if isinstance(key, str) else None,
                key if isinstance(key, UUID) else None,
                [ProducePartition(index, records)],
            )
            for key, index, records in rows
        ]
        request = ProduceRequest(transactional_id, acks, timeout_ms, topics)
        pieces = encode_produce_request(version, request)
        return self.begin(ApiKey.PRODUCE, version, b"".join(bytes(p) for p in pieces))

    def produced(self, version: int, slot: FakeSlot) -> ProduceResponse:
        return decode_produce_response(version, self.body(ApiKey.PRODUCE, version, slot))

    def fetch(
        self, version: int, rows: list[tuple[str | UUID, int, int]], **fields: Any
    ) -> FakeSlot:
        topics: dict[str | UUID, FetchTopic] = {}
        for key, index, offset in rows:
            topic = topics.setdefault(
                key,
                FetchTopic(
                    key if isinstance(key, str) else None,
                    key if isinstance(key, UUID) else None,
                    [],
                ),
            )
            topic.partitions.append(FetchPartition(index, fetch_offset=offset))
        request = FetchRequest(topics=list(topics.values()), **fields)
        return self.begin(ApiKey.FETCH, version, encode_fetch_request(version, request))

    def fetched(self, version: int, slot: FakeSlot) -> FetchResponse:
        return decode_fetch_response(version, self.body(ApiKey.FETCH, version, slot))


def code(value: int) -> ErrorCode:
    return ErrorCode(value)
