"""Every limit of a node's configuration has a test at the limit; a new one must name its own.

Some tests live elsewhere, beside what they bound; the table says where. Then limits that need the
whole client port.
"""

from __future__ import annotations

import ast
import resource
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from uuid import UUID

import attrs
import pytest
import trio
import trio.testing

from raftmq.config import ConfigError, NodeConfig
from raftmq.controller.placement import Load
from raftmq.controller.topic_validation import Settings, plan_topic
from raftmq.errors import ErrorCode, KafkaError, RemoteProtocolError
from raftmq.logs import LINES_MAX, RateLimitedLog
from raftmq.metadata.broker_messages import NewTopic, Outcome
from raftmq.node.process import (
    DESCRIPTORS_AT_START,
    FILES_PER_REPLICA,
    OTHER_DESCRIPTORS,
    raise_descriptor_limit,
    replicas_room,
)
from raftmq.protocol import ApiKey
from raftmq.server.kafka.counts import ServerCounts
from raftmq.server.kafka.dispatch import HANDLERS, Dispatcher
from raftmq.server.kafka.limits import Limits, canonical_host, resolve_overrides
from raftmq.server.kafka.listener import (
    ACCEPTS_PER_PASS,
    LOCAL_SEND_BYTES,
    Listening,
    open_listen_socket,
)
from raftmq.types import INTERNAL_TOPICS, METADATA_TOPIC, NodeId, TopicId
from tests.server.kafka.ports import client_port
from tests.server.kafka.world import World

TESTS = Path(__file__).parents[2]
CONNECTION = "server/kafka/test_connection.py::"


class Lines:
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def warning(self, event: str, **_fields: object) -> None:
        self.events.append(event)


HERE = "server/kafka/test_limits.py::"
LIMITS = {
    "request_bytes_max": CONNECTION + "test_frames_at_their_limits_are_taken",
    "request_control_bytes_max": CONNECTION + "test_frames_at_their_limits_are_taken",
    "request_elements_max": HERE + "test_elements_are_counted",
    "produce_elements_max": HERE + "test_elements_are_counted",
    "connections_per_ip_max": HERE + "test_one_address_has_so_many_connections",
    "connections_per_ip_overrides": HERE + "test_single_addresses_have_their_own",
    "connection_creation_rate_max": HERE + "test_connections_are_taken_at_a_pace",
    "auto_create_topics_max": HERE + "test_topics_come_by_name_at_a_pace",
    "group_bytes_max": "groups/test_group_bytes.py::test_a_group_keeps_so_many_bytes",
    "client_id_length_max": "server/kafka/test_group_handlers.py::test_a_client_id_is_cut",
    "request_memory_bytes_max": CONNECTION + "test_large_frames_queue_for_node_memory",
    "connections_max": HERE + "test_who_comes_too_many_is_told_once_a_while",
    "pipeline_depth_max": CONNECTION + "test_no_more_than_the_pipeline_depth_is_begun",
    "pipeline_bytes_max": CONNECTION + "test_no_more_than_the_pipeline_bytes_are_begun",
    "connection_idle_ms": CONNECTION + "test_stalled_connections_are_hung_up_on",
    "parked_fetches_max": "server/kafka/test_produce_fetch.py::test_no_more_fetches_wait_than_may",
    "peer_queue_bytes_max": "runtime/test_peer_links.py::test_a_full_queue_drops_and_says_so",
    "peer_memory_bytes_max": "runtime/test_peer_streams.py::test_who_holds_most_makes_room",
    "open_files_max": "log/test_parts.py::test_the_file_cache_forgets_the_least_recently_used",
    "replicas_max": "controller/test_controller.py::test_no_broker_holds_more_replicas_than_it_may",
    "delay_memory_bytes_max": "node/test_delays.py::test_lanes_share_what_a_node_holds",
    "index_memory_bytes_max": "log/test_parts.py::test_the_index_cache_is_bounded",
    "recent_bytes_max": "log/test_parts.py::test_the_budget_holds_over_all_logs",
}
NO_RESOURCE = {
    "replica_lag_time_max_ms",  # after it something is reported
    "replica_moves_max",  # a pace
    "metrics_partitions_max",  # the detail of a page
    "metrics_groups_max",
    "sasl_session_ms_max",  # a time
}


def names_in(path: Path) -> set[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, functions)}


def test_every_limit_has_its_test() -> None:
    limits = {a.name for a in attrs.fields(NodeConfig) if "_max" in a.name}
    assert limits - NO_RESOURCE <= LIMITS.keys(), "name the test of a new limit"
    for limit, where in LIMITS.items():
        assert hasattr(NodeConfig, limit)
        path, _, name = where.partition("::")
        assert name in names_in(TESTS / path), f"{limit}: no {where}"


def test_elements_are_counted() -> None:
    world = World()
    world.broker.config = attrs.evolve(world.broker.config, request_elements_max=10)
    world.dispatcher = Dispatcher(world.broker, HANDLERS)
    part = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": -1}
    for count in (9, 10):  # and one topic
        fields = {"replica_id": -1, "topics": [{"name": "t", "partitions": [part] * count}]}
        if count == 9:
            assert world.ask(ApiKey.LIST_OFFSETS, 7, **fields).topics
            continue
        with pytest.raises(RemoteProtocolError, match="elements"):
            world.send(ApiKey.LIST_OFFSETS, 7, **fields)
    world.broker.config = attrs.evolve(world.broker.config, produce_elements_max=4)
    world.dispatcher = Dispatcher(world.broker, HANDLERS)
    assert world.produce(9, [("t", 0, b"")] * 2).pieces
    with pytest.raises(RemoteProtocolError, match="elements"):
        world.produce(9, [("t", 0, b"")] * 3)


async def test_who_comes_too_many_is_told_once_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines()
    monkeypatch.setattr("raftmq.server.kafka.listener._log", RateLimitedLog(lines))
    port = client_port(lambda *_: None, Limits(connections_max=1), ServerCounts())
    sock = open_listen_socket("127.0.0.1", 0)
    async with trio.open_nursery() as nursery:
        await nursery.start(port.serve, [Listening(sock)])
        number = sock.getsockname()[1]
        first = await trio.open_tcp_stream("127.0.0.1", number)
        with trio.fail_after(30):
            while not port.connections:
                await trio.lowlevel.checkpoint()
            for _ in range(20):
                late = await trio.open_tcp_stream("127.0.0.1", number)
                assert await late.receive_some() == b"", "a clear end"
                await late.aclose()
        nursery.cancel_scope.cancel()
    await first.aclose()
    assert port.metrics.connections_refused == 20
    assert lines.events == ["connection refused: connections_max"] * LINES_MAX


@pytest.mark.parametrize("room", [1_000, 1], ids=["accepted", "refused"])
async def test_a_storm_of_connections_leaves_room_for_others(room: int) -> None:
    """They are taken, or refused, a few at a time: another task has its turns meanwhile."""
    port = client_port(lambda *_: None, Limits(connections_max=room), ServerCounts())
    metrics = port.metrics
    sock = open_listen_socket("127.0.0.1", 0)
    count = 300
    turns = 0
    async with trio.open_nursery() as nursery:
        callers = []
        for _ in range(count):
            caller = socket.socket()
            caller.setblocking(False)
            caller.connect_ex(sock.getsockname())
            callers.append(caller)
        await nursery.start(port.serve, [Listening(sock)])
        with trio.fail_after(30):
            while metrics.connections_accepted + metrics.connections_refused < count:
                turns += 1
                await trio.lowlevel.checkpoint()
        assert turns >= count // (2 * ACCEPTS_PER_PASS)
        nursery.cancel_scope.cancel()
        for caller in callers:
            caller.close()


@pytest.mark.parametrize(("configured", "expected"), [(0, LOCAL_SEND_BYTES), (200_000, 200_000)])
async def test_clients_of_this_machine_get_a_small_buffer(configured: int, expected: int) -> None:
    port = client_port(lambda *_: None, Limits(socket_send_bytes=configured), ServerCounts())
    with open_listen_socket("127.0.0.1", 0) as listening:
        client = socket.create_connection(listening.getsockname())
        server, _ = listening.accept()
        async with port.served():
            port.adopt(server, "here")
            # Linux doubles it, for its own bookkeeping.
            assert server.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * expected
            client.close()


def test_a_node_takes_the_descriptors_that_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines()
    monkeypatch.setattr("raftmq.node.process.logger", lines)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    config = NodeConfig(node_id=1, data=".", connections_max=100, open_files_max=100)
    config = attrs.evolve(config, replicas_max=50)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (900, hard))
        wanted = 200 + 100 + OTHER_DESCRIPTORS
        assert raise_descriptor_limit(config) == min(wanted, hard)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(wanted, hard)
        many = attrs.evolve(config, connections_max=1 << 40)
        assert raise_descriptor_limit(many) == hard
        assert lines.events == ["descriptors may run out"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_room_for_replicas_follows_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 400 of them 300 replicas were let in, and nobody could connect or delete any more."""
    config = NodeConfig(node_id=1, data=".")
    assert config.replicas_max == 0
    for limit in (64, 400, 1024, 4096, 20_000, 1 << 20):
        room = replicas_room(config, limit)
        left = limit - FILES_PER_REPLICA * room
        assert left >= limit // 4 or room == 20_000
    assert replicas_room(config, 400) == 75
    assert replicas_room(config, 1 << 20) == 20_000
    lines = Lines()
    monkeypatch.setattr("raftmq.node.process.logger", lines)
    limits = 1024, 20_000
    monkeypatch.setattr(resource, "getrlimit", lambda _what: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _what, _limits: None)
    assert raise_descriptor_limit(config) == 20_000
    assert lines.events == [], "an ordinary machine is no reason to warn"


@pytest.mark.parametrize(
    ("limit", "places"), [(1 << 20, DESCRIPTORS_AT_START), (1500, 2048), (300, 512)]
)
def test_the_table_of_descriptors_has_its_size_from_the_start(limit: int, places: int) -> None:
    """In a process of its own: a table never shrinks. The kernel rounds up to powers of two."""
    code = f"""
from raftmq.node.process import grow_descriptor_table
import os, resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
before = len(os.listdir("/proc/self/fd"))
def size():
    return open("/proc/self/status").read().partition("FDSize:")[2].split()[0]
print(size())
grow_descriptor_table({limit})
assert len(os.listdir("/proc/self/fd")) == before
print(size())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    inherited, size = map(int, done.stdout.split())
    assert size == max(inherited, places), "a process begins with a table of its parent's size"


async def call_from(host: str, port: int) -> trio.SocketStream:
    stream = trio.socket.socket()
    await stream.bind((host, 0))
    await stream.connect(("127.0.0.1", port))
    return trio.SocketStream(stream)


async def until_counted(metrics: ServerCounts, accepted: int, refused: int) -> None:
    with trio.fail_after(30):
        while (metrics.connections_accepted, metrics.connections_refused) != (accepted, refused):
            await trio.lowlevel.checkpoint()


async def test_single_addresses_have_their_own() -> None:
    overrides = resolve_overrides("127.0.0.1:3, ::ffff:127.0.0.2:0,127.0.0.3:1, localhost:2")
    assert overrides["127.0.0.1"] == 2, "what is said last, by any name of it"
    limits = Limits(connections_per_ip_max=1, connections_per_ip_overrides=overrides)
    port = client_port(lambda *_: None, limits, ServerCounts())
    sock = open_listen_socket("127.0.0.1", 0)
    number = sock.getsockname()[1]
    async with trio.open_nursery() as nursery:
        await nursery.start(port.serve, [Listening(sock)])
        streams = []
        for host, accepted, refused in (
            ("127.0.0.1", 1, 0),
            ("127.0.0.1", 2, 0),
            ("127.0.0.1", 2, 1),  # two, though others have one
            ("127.0.0.2", 2, 2),  # none at all
            ("127.0.0.3", 3, 2),
            ("127.0.0.4", 4, 2),  # the number of all others
            ("127.0.0.4", 4, 3),
        ):
            streams.append(await call_from(host, number))
            await until_counted(port.metrics, accepted, refused)
        refusals = {"connections_per_ip_overrides": 2, "connections_per_ip_max": 1}
        assert port.metrics.refusals == refusals
        for stream in streams:
            await stream.aclose()
        nursery.cancel_scope.cancel()


async def test_an_override_needs_no_number_for_all() -> None:
    overrides = resolve_overrides("127.0.0.2:0")
    limits = Limits(connections_per_ip_overrides=overrides)
    port = client_port(lambda *_: None, limits, ServerCounts())
    sock = open_listen_socket("127.0.0.1", 0)
    number = sock.getsockname()[1]
    async with trio.open_nursery() as nursery:
        await nursery.start(port.serve, [Listening(sock)])
        streams = [await call_from(host, number) for host in ("127.0.0.2", "127.0.0.1")]
        await until_counted(port.metrics, 1, 1)
        for stream in streams:
            await stream.aclose()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("host", "canonical"),
    [
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("10.0.0.7", "10.0.0.7"),
        ("0:0:0:0:0:0:0:1", "::1"),
        ("local", "local"),
    ],
)
def test_an_address_has_one_form(host: str, canonical: str) -> None:
    assert canonical_host(host) == canonical


def test_a_name_without_an_address_is_said() -> None:
    for name in ("nobody.invalid", "x" * 70 + ".invalid"):
        with pytest.raises(ConfigError, match="has no address"):
            resolve_overrides(f"{name}:3")
    assert resolve_overrides("[::1]:7, 10.0.0.7:0,") == {"::1": 7, "10.0.0.7": 0}


async def test_one_address_has_so_many_connections() -> None:
    port = client_port(lambda *_: None, Limits(connections_per_ip_max=2), ServerCounts())
    sock = open_listen_socket("127.0.0.1", 0)
    number = sock.getsockname()[1]
    call = partial(call_from, port=number)
    wait = partial(until_counted, port.metrics)
    async with trio.open_nursery() as nursery:
        await nursery.start(port.serve, [Listening(sock)])
        first, second, third = [await call("127.0.0.1") for _ in range(3)]
        await wait(2, 1)
        assert port.metrics.refusals == {"connections_per_ip_max": 1}
        other = await call("127.0.0.2")
        await wait(3, 1)
        await first.aclose()
        with trio.fail_after(30):
            while len(port.connections) > 2:
                await trio.lowlevel.checkpoint()
        again = await call("127.0.0.1")
        await wait(4, 1)
        for stream in (second, third, other, again):
            await stream.aclose()
        nursery.cancel_scope.cancel()


async def test_the_last_descriptors_are_not_for_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    sock = open_listen_socket("127.0.0.1", 0)
    number = sock.getsockname()[1]
    free = socket.socket()
    reserved = 64
    least = free.fileno() + 8
    free.close()
    monkeypatch.setattr(
        "raftmq.server.kafka.listener.resource.getrlimit", lambda _kind: (least + reserved, -1)
    )
    port = client_port(lambda *_: None, Limits(descriptors_reserved=reserved), ServerCounts())
    async with trio.open_nursery() as nursery:
        await nursery.start(port.serve, [Listening(sock)])
        streams = [await trio.open_tcp_stream("127.0.0.1", number) for _ in range(20)]
        metrics = port.metrics
        with trio.fail_after(30):
            while metrics.connections_accepted + metrics.connections_refused < 20:
                await trio.lowlevel.checkpoint()
        assert metrics.refusals == {"descriptors_reserved": metrics.connections_refused}
        assert metrics.connections_refused >= 10
        assert all(one._sock.fileno() < least for one in port.connections.values())
        for stream in streams:
            await stream.aclose()
        nursery.cancel_scope.cancel()


async def test_connections_are_taken_at_a_pace(mock_clock: trio.testing.MockClock) -> None:
    """Five at once, and the one that comes too soon; then one in a fifth of a second."""
    port = client_port(lambda *_: None, Limits(connection_creation_rate_max=5), ServerCounts())
    sock = open_listen_socket("127.0.0.1", 0)
    number = sock.getsockname()[1]
    async with trio.open_nursery() as nursery:
        await nursery.start(port.serve, [Listening(sock)])
        streams = [await trio.open_tcp_stream("127.0.0.1", number) for _ in range(8)]
        for taken in (6, 7, 8):
            while port.metrics.connections_accepted < taken:
                await trio.lowlevel.checkpoint()
            await trio.testing.wait_all_tasks_blocked()
            assert port.metrics.connections_accepted == taken
            assert port.metrics.refusals["connection_creation_rate_max"] == taken - 5
            mock_clock.jump(0.21)
        for stream in streams:
            await stream.aclose()
        nursery.cancel_scope.cancel()


def test_topics_come_by_name_at_a_pace() -> None:
    world = World()
    most = world.broker.config.auto_create_topics_max
    names = [f"t{number}" for number in range(most + 5)]
    slot = world.send(ApiKey.METADATA, 9, topics=[{"name": name} for name in names])
    ((call, promise),) = world.controller.calls
    assert [topic.name for topic in call.topics] == names[:most]
    promise.resolve(tuple(Outcome(name=topic.name) for topic in call.topics))
    answer = world.read(ApiKey.METADATA, 9, slot)
    waiting = ErrorCode.LEADER_NOT_AVAILABLE
    assert [topic.error_code for topic in answer.topics] == [waiting] * len(names)
    assert world.broker.metrics.refusals == {"auto_create_topics_max": 1}
    world.bench.clock.now_ms += 200
    world.send(ApiKey.METADATA, 9, topics=[{"name": name} for name in names[most:]])
    assert [topic.name for topic in world.controller.calls[1][0].topics] == names[most : most + 2]


@pytest.mark.parametrize("name", sorted(INTERNAL_TOPICS))
def test_no_client_makes_an_internal_topic(name: str) -> None:
    world = World()
    answer = world.ask(ApiKey.METADATA, 9, topics=[{"name": name}])
    assert not world.controller.calls, "nor does asking for it"
    (topic,) = answer.topics
    expected = ErrorCode.NONE if name == METADATA_TOPIC else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert topic.error_code == expected
    wish = NewTopic(name=name, partitions=1, replication_factor=1)
    settings = Settings(NodeId(1), {})
    with pytest.raises(KafkaError) as refused:
        plan_topic(world.engine.image, {}, Load(), wish, TopicId(UUID(int=9)), settings)
    assert refused.value.code in (ErrorCode.INVALID_REQUEST, ErrorCode.INVALID_TOPIC_EXCEPTION)
