"""Several listeners: clients of each are told its addresses alone, and accepted with its name."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from raftmq.errors import ErrorCode
from raftmq.metadata.commands import Endpoint, client_endpoint
from raftmq.protocol import ApiKey
from raftmq.raft.membership import Configuration
from raftmq.records import NewRecord, build_batch
from raftmq.server.kafka.authentication import Caller
from raftmq.server.kafka.connection import Connection
from raftmq.server.kafka.counts import ServerCounts
from raftmq.server.kafka.limits import Limits
from raftmq.server.kafka.listener import Listening, open_listen_socket
from raftmq.server.kafka.replies import Slot
from raftmq.types import NodeId, ReplicaId, StorageId
from tests.server.kafka.ports import client_port
from tests.server.kafka.world import World

PLAIN = [(1, "host1", 9092), (2, "host2", 9092), (3, "host3", 9092)]
SECURE = [(1, "secure1", 9093), (2, "secure2", 9093)]
"""Broker 3 has no such listener."""


def two_listeners() -> World:
    world = World()
    brokers = world.engine.image.brokers
    for node_id, host, port in SECURE:
        broker = brokers[NodeId(node_id)]
        endpoint = Endpoint(client_endpoint("SECURE"), host, port)
        endpoints = (*broker.endpoints, endpoint)
        brokers = brokers.set(NodeId(node_id), attrs.evolve(broker, endpoints=endpoints))
    world.engine.change(brokers=brokers)
    return world


def come_by(world: World, listener: str) -> None:
    """The client has another connection."""
    world.connection.caller = Caller(host="10.0.0.9", listener=listener)


def metadata(world: World) -> Any:
    fields = {"topics": None, "allow_auto_topic_creation": False}
    return world.ask(ApiKey.METADATA, 9, **fields)


def test_the_endpoint_of_a_node_with_one_port_is_named_as_before() -> None:
    assert client_endpoint("PLAINTEXT") == "client"
    assert client_endpoint("SECURE") == "client.SECURE"


def test_metadata_tells_addresses_of_the_listener_that_was_asked() -> None:
    """Also where the bodies of both are kept."""
    world = two_listeners()
    world.add_topic("t")
    for _ in range(2):
        for listener, expected in (("PLAINTEXT", PLAIN), ("SECURE", SECURE)):
            come_by(world, listener)
            answer = metadata(world)
            assert [(b.node_id, b.host, b.port) for b in answer.brokers] == expected
    assert world.broker.metadata_answers.hits == 2


@pytest.mark.parametrize("api", [ApiKey.METADATA, ApiKey.DESCRIBE_TOPIC_PARTITIONS])
def test_a_leader_without_the_listener_is_said_to_have_none(api: ApiKey) -> None:
    world = two_listeners()
    topic_id = world.add_topic("t", 2)
    world.lead(topic_id, 0, 3, 6)
    come_by(world, "SECURE")
    if api is ApiKey.METADATA:
        answer = metadata(world)
    else:
        answer = world.ask(api, 0, topics=[], response_partition_limit=9, cursor=None)
    codes = [part.error_code for part in answer.topics[0].partitions]
    assert codes == [ErrorCode.LISTENER_NOT_FOUND, ErrorCode.NONE]
    come_by(world, "PLAINTEXT")
    if api is ApiKey.METADATA:
        answer = metadata(world)
    else:
        answer = world.ask(api, 0, topics=[], response_partition_limit=9, cursor=None)
    assert [part.error_code for part in answer.topics[0].partitions] == [0, 0]


def test_describe_cluster_tells_addresses_of_the_listener_that_was_asked() -> None:
    world = two_listeners()
    for listener, expected in (("PLAINTEXT", PLAIN), ("SECURE", SECURE)):
        come_by(world, listener)
        answer = world.ask(ApiKey.DESCRIBE_CLUSTER, 1)
        assert [(b.broker_id, b.host, b.port) for b in answer.brokers] == expected


@pytest.mark.parametrize("version", [3, 6])
@pytest.mark.parametrize(
    ("listener", "node_id", "told"),
    [
        ("PLAINTEXT", 2, (ErrorCode.NONE, "host2", 9092)),
        ("SECURE", 2, (ErrorCode.NONE, "secure2", 9093)),
        ("SECURE", 3, (ErrorCode.COORDINATOR_NOT_AVAILABLE, "", -1)),
    ],
)
def test_find_coordinator_tells_the_address_of_the_listener_that_was_asked(
    version: int, listener: str, node_id: int, told: tuple[ErrorCode, str, int]
) -> None:
    world = two_listeners()
    world.broker.coordinator = SimpleNamespace(find=lambda _key: NodeId(node_id))
    come_by(world, listener)
    answer = world.ask(
        ApiKey.FIND_COORDINATOR, version, key="g", key_type=0, coordinator_keys=["g"]
    )
    one = answer if version < 4 else answer.coordinators[0]
    assert (one.error_code, one.host, one.port) == told


def test_a_quorums_nodes_are_told_by_the_listener_that_was_asked() -> None:
    world = two_listeners()
    come_by(world, "SECURE")
    members = tuple(ReplicaId(NodeId(node_id), StorageId(node_id)) for node_id in (1, 2, 3))
    world.engine.configuration = Configuration(members)
    topics = [{"topic_name": "t", "partitions": [{"partition_index": 0}]}]
    answer = world.ask(ApiKey.DESCRIBE_QUORUM, 2, topics=topics)
    rows = [(row.node_id, one.name, one.host) for row in answer.nodes for one in row.listeners]
    assert rows == [(1, "SECURE", "secure1"), (2, "SECURE", "secure2")]


@pytest.mark.parametrize(("listener", "host"), [("PLAINTEXT", "host2"), ("SECURE", "secure2")])
@pytest.mark.parametrize("api", ["produce", "fetch"])
def test_a_moved_leader_is_named_with_that_listeners_address(
    api: str, listener: str, host: str
) -> None:
    world = two_listeners()
    topic_id = world.add_topic("t")
    world.replica("t").follow(None)
    world.lead(topic_id, 0, 2, 6)
    come_by(world, listener)
    endpoints: Any
    if api == "produce":
        batch = build_batch([NewRecord(b"k", b"v", 1)])
        endpoints = world.produced(10, world.produce(10, [("t", 0, batch)])).node_endpoints
    else:
        endpoints = world.fetched(16, world.fetch(16, [(topic_id, 0, 0)])).node_endpoints
    assert [(node.node_id, node.host) for node in endpoints] == [(2, host)]


async def test_a_port_accepts_by_all_its_listeners_and_knows_by_which() -> None:
    callers: list[Caller] = []

    def begin(frame: memoryview, slot: Slot, connection: Connection) -> None:
        callers.append(connection.caller)
        slot.answer((bytes(frame),))

    port = client_port(begin, Limits(), ServerCounts())
    socks = [open_listen_socket("127.0.0.1", 0) for _ in range(2)]
    numbers = [sock.getsockname()[1] for sock in socks]
    async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
        both = [Listening(socks[0]), Listening(socks[1], "SECURE")]
        await nursery.start(port.serve, both)
        for number in numbers:
            stream = await trio.open_tcp_stream("127.0.0.1", number)
            await stack.enter_async_context(stream)
            await stream.send_all(b"\0\0\0\x08\0\x12\0\0\0\0\0\x07")
            assert await stream.receive_some()
        assert callers == [
            Caller("User:ANONYMOUS", "127.0.0.1", "PLAINTEXT"),
            Caller("User:ANONYMOUS", "127.0.0.1", "SECURE"),
        ]
        nursery.start_soon(port.drain, lambda: None)
        await trio.testing.wait_all_tasks_blocked()
        assert all(sock.fileno() < 0 for sock in socks)
        for number in numbers:
            with pytest.raises(OSError, match="all attempts to connect"):
                await trio.open_tcp_stream("127.0.0.1", number)
        nursery.cancel_scope.cancel()
