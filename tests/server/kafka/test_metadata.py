"""Metadata, DescribeTopicPartitions, DescribeCluster, ApiVersions: what clients learn."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from attrs import evolve
from immutables import Map

from raftmq.errors import ErrorCode, KafkaError, RemoteProtocolError
from raftmq.metadata.broker_messages import CreateTopicsCall, Outcome
from raftmq.metadata.image import ViewImage
from raftmq.protocol import ANNOUNCED, ApiKey
from raftmq.records import NewRecord, build_batch
from raftmq.server.kafka.broker import MetadataAnswers
from raftmq.server.kafka.dispatch import HANDLERS
from raftmq.server.kafka.handlers import produce
from raftmq.server.kafka.leader_waits import WAIT_MS, Hold
from raftmq.server.kafka.work import TURN_PARTITIONS
from raftmq.types import TopicId
from tests.server.kafka.world import FakeSlot, World, broker_image

METADATA_VERSIONS = range(14)


def test_every_announced_api_has_a_handler() -> None:
    assert {*HANDLERS, ApiKey.PRODUCE, ApiKey.FETCH} == set(ANNOUNCED)


# ---- ApiVersions ----


@pytest.mark.parametrize("version", range(5))
def test_api_versions(version: int) -> None:
    answer = World().ask(
        ApiKey.API_VERSIONS,
        version,
        client_software_name="x",
        client_software_version="1.0",
    )
    ranges = {row.api_key: (row.min_version, row.max_version) for row in answer.api_keys}
    assert (answer.error_code, ranges) == (0, dict(ANNOUNCED))


def test_api_versions_of_tomorrow_are_answered_in_version_0() -> None:
    """Franz-go opens with one that Kafka 4.1 does not know, reads this and asks again (KIP-511)."""
    world = World()
    slot = world.begin(ApiKey.API_VERSIONS, 5, b"\0\0\0")
    code, count, key, low, high = struct.unpack_from(">hihhh", slot.data, 8)
    assert (code, count) == (ErrorCode.UNSUPPORTED_VERSION, 1)
    assert (key, low, high) == (18, 0, 4)


def test_bad_software_names_are_refused() -> None:
    answer = World().ask(
        ApiKey.API_VERSIONS, 3, client_software_name="-", client_software_version="1"
    )
    assert answer.error_code == ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    ("api_key", "version"), [(3, 14), (3, -1), (0, 14), (1, 3), (2, 0), (7, 0), (29, 1), (-1, 0)]
)
def test_what_was_not_announced_costs_the_connection(api_key: int, version: int) -> None:
    world = World()
    frame = memoryview(bytearray(struct.pack(">hhih", api_key, version, 1, -1) + bytes(20)))
    with pytest.raises(RemoteProtocolError):
        world.dispatcher.begin(frame, None, world.connection)  # type: ignore[arg-type]


def test_a_handlers_bug_costs_the_connection_alone() -> None:
    world = World()
    world.engine.image = None  # type: ignore[assignment]
    with pytest.raises(RemoteProtocolError, match="could not be served"):
        world.ask(ApiKey.METADATA, 9, topics=None)
    assert world.broker.metrics.api("metadata").failures == 1


def test_a_handlers_failed_assertion_ends_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.add_topic("t")

    def planted(*_args: Any) -> None:
        raise AssertionError("of a handler")

    monkeypatch.setattr(produce, "handle", planted)
    batch = build_batch([NewRecord(None, b"v")], timestamp=1_000_000)
    with pytest.raises(RemoteProtocolError):
        world.produce(9, [("t", 0, batch)])
    assert world.broken_invariants == []


def test_a_broken_invariant_below_a_handler_ends_the_node() -> None:
    world = World()
    world.add_topic("t")
    world.partition("t")._replica = None
    batch = build_batch([NewRecord(None, b"v")], timestamp=1_000_000)
    with pytest.raises(RemoteProtocolError):
        world.produce(9, [("t", 0, batch)])
    assert len(world.broken_invariants) == 1


# ---- Metadata ----


@pytest.mark.parametrize("version", METADATA_VERSIONS)
def test_metadata_of_all_topics(version: int) -> None:
    world = World()
    topic_id = world.add_topic("t", 2)
    answer = world.ask(ApiKey.METADATA, version, topics=None if version else [])
    assert [(b.node_id, b.host, b.port) for b in answer.brokers] == [
        (1, "host1", 9092),
        (2, "host2", 9092),
        (3, "host3", 9092),
    ]
    (topic,) = answer.topics
    assert (topic.name, topic.error_code) == ("t", 0)
    assert [(p.partition_index, p.leader_id) for p in topic.partitions] == [(0, 1), (1, 1)]
    assert topic.partitions[0].replica_nodes == [1, 2, 3]
    assert topic.partitions[0].isr_nodes == [1, 2]
    if version >= 1:
        assert answer.controller_id == 2
    if version >= 2:
        assert answer.cluster_id == "cluster"
    if version >= 7:
        assert topic.partitions[0].leader_epoch == 5
    if version >= 10:
        assert topic.topic_id == topic_id


@pytest.mark.parametrize("version", range(1, 14))
def test_metadata_of_no_topics(version: int) -> None:
    world = World()
    world.add_topic("t")
    assert world.ask(ApiKey.METADATA, version, topics=[]).topics == []


def test_metadata_by_id() -> None:
    world = World()
    topic_id = world.add_topic("t")
    asked = [{"topic_id": topic_id, "name": None}, {"topic_id": UUID(int=9), "name": None}]
    answer = world.ask(ApiKey.METADATA, 12, topics=asked)
    assert [(t.name, t.error_code) for t in answer.topics] == [
        ("t", 0),
        (None, ErrorCode.UNKNOWN_TOPIC_ID),
    ]


@pytest.mark.parametrize("version", [8, 9, 13])
def test_what_a_topic_lists_no_more_is_told_beside_it(version: int) -> None:
    world = World()
    topic_id = world.add_topic("t", 3)
    world.add_topic("u")
    topics = world.engine.image.topics
    whole = topics["t"]
    shrunk = evolve(whole, partitions=whole.partitions[:1], retired=whole.partitions[1:])
    view = ViewImage("t.old", TopicId(UUID(int=9)), whole.topic_id, 3)
    world.engine.change(topics=topics.set("t", shrunk), views=Map({"t.old": view}))
    told = {topic.name: topic for topic in world.ask(ApiKey.METADATA, version, topics=None).topics}
    assert [p.partition_index for p in told["t"].partitions] == [0]
    if version < 9:
        return
    rows = told["t"].retired_partitions
    assert [(p.partition_index, p.leader_id, p.leader_epoch) for p in rows] == [
        (1, 1, 5),
        (2, 1, 5),
    ]
    assert told["t"].retired_view == "t.old"
    assert (told["u"].retired_partitions, told["u"].retired_view) == ([], "")
    world.lead(topic_id, 2, 2, 6)
    asked = [{"topic_id": topic_id, "name": None}] if version > 9 else [{"name": "t"}]
    (topic,) = world.ask(ApiKey.METADATA, version, topics=asked).topics
    assert topic.retired_partitions[1].leader_id == 2


def named(*names: str, auto: bool = False) -> dict[str, object]:
    return {
        "topics": [{"name": name} for name in names],
        "allow_auto_topic_creation": auto,
    }


def test_unknown_and_illegal_names() -> None:
    world = World()
    answer = world.ask(ApiKey.METADATA, 9, **named("nothing", "a/b", ".", "x" * 250))
    assert [t.error_code for t in answer.topics] == [
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.INVALID_TOPIC_EXCEPTION,
        ErrorCode.INVALID_TOPIC_EXCEPTION,
        ErrorCode.INVALID_TOPIC_EXCEPTION,
    ]
    assert world.controller.calls == []


def test_the_last_leader_is_named_while_the_next_is_elected() -> None:
    world = World()
    topic_id = world.add_topic("t", 2)
    world.lead(topic_id, 0, 3, 8)
    world.lead(topic_id, 0, 2, 7)  # older news, arriving late
    world.engine.change(brokers=world.engine.image.brokers.set(3, broker_image(3, is_fenced=True)))
    answer = world.ask(ApiKey.METADATA, 9, **named("t"))
    partition = answer.topics[0].partitions[0]
    assert (partition.leader_id, partition.leader_epoch, partition.error_code) == (3, 8, 0)
    assert partition.offline_replicas == [3]
    assert [broker.node_id for broker in answer.brokers] == [1, 2]


@pytest.mark.parametrize("wanted", [{}, {"topics": None}])
def test_a_node_that_is_cut_off_sends_its_clients_to_others(wanted: dict[str, Any]) -> None:
    """It cannot hear who leads after it; told the old leader for ever, a client with no other
    connection would never learn it."""
    world = World()
    world.add_topic("t")
    world.replica("t").follow(None)
    flags = {**named("t"), **wanted}
    waiting = world.send(ApiKey.METADATA, 9, **flags)
    assert waiting.pieces is None, "the next leader may be known in a moment"
    world.broker.is_cut_off = lambda: True
    world.bench.sleep(WAIT_MS)
    later = world.send(ApiKey.METADATA, 9, **flags)
    for slot in (waiting, later):
        assert slot.is_failed
        assert slot.pieces is None
    world.broker.is_cut_off = lambda: False
    assert world.ask(ApiKey.METADATA, 9, **flags).topics[0].partitions[0].leader_id == 1


def test_a_client_that_this_node_serves_is_not_thrown_out() -> None:
    """While a busy cluster elects leaders, one partition without one must not cost the connection
    on which records of the others are under way: the client would not know what became of them."""
    world = World()
    world.add_topic("t", 2)
    world.replica("t", 1).follow(None)
    world.broker.is_cut_off = lambda: True
    served = world.send(ApiKey.METADATA, 9, **named("t"))
    world.bench.sleep(WAIT_MS)
    assert not served.is_failed
    assert served.pieces is not None
    world.replica("t").follow(None)
    thrown_out = world.send(ApiKey.METADATA, 9, **named("t"))
    world.bench.sleep(WAIT_MS)
    assert thrown_out.is_failed, "it leads none of them"


def test_elections_one_after_the_other_do_not_hold_up_a_connection() -> None:
    world = World()
    topic_id = world.add_topic("t", 2)
    world.replica("t").follow(None)
    first = world.send(ApiKey.METADATA, 9, **named("t"))
    assert first.pieces is None
    world.bench.sleep(100)
    world.lead(topic_id, 0, 2, 6)
    assert first.pieces is not None
    world.replica("t", 1).follow(None)
    behind = world.send(ApiKey.METADATA, 9, **named("t"))
    assert behind.pieces is not None, "acknowledgements may wait behind it"
    world.bench.sleep(400)
    world.replica("t").follow(None)
    assert world.send(ApiKey.METADATA, 9, **named("t")).pieces is None


def test_a_node_that_is_cut_off_still_tells_what_it_knows() -> None:
    world = World()
    topic_id = world.add_topic("t")
    world.broker.is_cut_off = lambda: True
    assert world.ask(ApiKey.METADATA, 9, **named("t")).topics[0].partitions[0].leader_id == 1
    world.replica("t").follow()
    world.lead(topic_id, 0, 2, 6)
    assert world.ask(ApiKey.METADATA, 9, **named("t")).topics[0].partitions[0].leader_id == 2


def test_a_partition_that_never_had_a_leader() -> None:
    world = World()
    topic_id = world.add_topic("t")
    world.leaders.forget(topic_id)  # type: ignore[arg-type]
    slot = world.send(ApiKey.METADATA, 9, **named("t"))
    assert slot.pieces is None, "its first election is given a moment"
    world.bench.sleep(WAIT_MS)
    partition = world.read(ApiKey.METADATA, 9, slot).topics[0].partitions[0]
    assert (partition.leader_id, partition.error_code) == (-1, ErrorCode.LEADER_NOT_AVAILABLE)


def test_the_metadata_log_can_be_found_by_name_alone() -> None:
    world = World()
    assert world.ask(ApiKey.METADATA, 9, topics=None).topics == []
    (topic,) = world.ask(ApiKey.METADATA, 9, **named("__cluster_metadata")).topics
    assert (topic.is_internal, topic.partitions[0].leader_id) == (True, 2)


# ---- auto-creation ----


def test_missing_topics_are_created_where_the_client_allows_it() -> None:
    world = World()
    slot = world.send(ApiKey.METADATA, 9, **named("new", "bad name", auto=True))
    assert slot.pieces is None
    (request, promise) = world.controller.calls[0]
    assert isinstance(request, CreateTopicsCall)
    assert ([topic.name for topic in request.topics], request.is_auto) == (["new"], True)
    world.add_topic("new")
    promise.resolve((Outcome(name="new"),))
    answer = world.read(ApiKey.METADATA, 9, slot)
    assert [(t.name, t.error_code, len(t.partitions)) for t in answer.topics] == [
        ("new", 0, 1),
        ("bad name", ErrorCode.INVALID_TOPIC_EXCEPTION, 0),
    ]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (ErrorCode.NONE, ErrorCode.LEADER_NOT_AVAILABLE),
        (ErrorCode.REQUEST_TIMED_OUT, ErrorCode.LEADER_NOT_AVAILABLE),
        (ErrorCode.INVALID_REPLICATION_FACTOR, ErrorCode.INVALID_REPLICATION_FACTOR),
    ],
)
def test_topics_that_did_not_come_in_time(code: ErrorCode, told: ErrorCode) -> None:
    world = World()
    slot = world.send(ApiKey.METADATA, 9, **named("new", auto=True))
    world.controller.calls[0][1].resolve((Outcome(name="new", code=code),))
    assert world.read(ApiKey.METADATA, 9, slot).topics[0].error_code == told


def test_an_unreachable_controller_is_no_reason_to_give_up() -> None:
    world = World()
    slot = world.send(ApiKey.METADATA, 9, **named("new", auto=True))
    world.controller.calls[0][1].fail(KafkaError(code=ErrorCode.NOT_CONTROLLER))
    code = world.read(ApiKey.METADATA, 9, slot).topics[0].error_code
    assert code == ErrorCode.LEADER_NOT_AVAILABLE


def test_a_new_topic_is_answered_once_its_leader_is_known_here() -> None:
    """The controller may hear of the first leader sooner than the node that was asked; told "no
    leader", librdkafka waits for two seconds."""
    world = World()
    slot = world.send(ApiKey.METADATA, 9, **named("new", auto=True))
    topic_id = world.add_topic("new", 2)
    world.leaders.forget(topic_id)  # type: ignore[arg-type]
    other = Hold()
    other.free_at_ms = 1e12
    world.connection = SimpleNamespace(**{**vars(world.connection), "hold": other})
    world.ask(ApiKey.METADATA, 9, **named("new"))  # another connection's request, meanwhile
    world.controller.calls[0][1].resolve((Outcome(name="new"),))
    world.lead(topic_id, 0, 3, 1)
    assert slot.pieces is None
    world.lead(topic_id, 1, 2, 1)
    (topic,) = world.read(ApiKey.METADATA, 9, slot).topics
    assert [(p.leader_id, p.error_code) for p in topic.partitions] == [(3, 0), (2, 0)]


def test_a_new_topic_that_nobody_leads_is_answered_in_a_second() -> None:
    world = World()
    slot = world.send(ApiKey.METADATA, 9, **named("new", auto=True))
    world.leaders.forget(world.add_topic("new"))  # type: ignore[arg-type]
    world.controller.calls[0][1].resolve((Outcome(name="new"),))
    world.bench.sleep(WAIT_MS)
    (topic,) = world.read(ApiKey.METADATA, 9, slot).topics
    assert topic.partitions[0].error_code == ErrorCode.LEADER_NOT_AVAILABLE


def test_many_who_ask_for_a_missing_topic_share_one_call() -> None:
    world = World()
    slots = [world.send(ApiKey.METADATA, 9, **named("new", auto=True)) for _ in range(5)]
    ((_, promise),) = world.controller.calls
    promise.resolve((Outcome(name="new"),))
    assert all(slot.pieces is not None for slot in slots)


@pytest.mark.parametrize(
    ("version", "fields"),
    [(9, named("new")), (9, {"topics": None, "allow_auto_topic_creation": True})],
)
def test_nothing_is_created_otherwise(version: int, fields: dict[str, object]) -> None:
    world = World()
    assert world.send(ApiKey.METADATA, version, **fields).pieces is not None
    assert world.controller.calls == []


def test_auto_creation_can_be_switched_off() -> None:
    world = World()
    configs = Map({("broker", ""): Map({"auto.create.topics.enable": "false"})})
    world.engine.change(configs=configs)
    assert world.send(ApiKey.METADATA, 9, **named("new", auto=True)).pieces is not None


# ---- the cache ----


def test_bodies_are_encoded_once_per_state() -> None:
    world = World()
    topic_id = world.add_topic("t")
    cache = world.broker.metadata_answers

    def leader() -> int:
        answer = world.ask(ApiKey.METADATA, 9, **named("t"))
        return int(answer.topics[0].partitions[0].leader_id)

    assert [leader(), leader(), cache.hits] == [1, 1, 1]
    world.lead(topic_id, 0, 2, 9)
    assert [leader(), cache.hits] == [2, 1]
    world.engine.change(brokers=world.engine.image.brokers.delete(3))  # type: ignore[arg-type]
    assert [leader(), cache.hits] == [2, 1]
    assert [leader(), cache.hits] == [2, 2]
    world.ask(ApiKey.METADATA, 10, **named("t"))
    assert cache.hits == 2, "another version is another body"


def test_the_cache_is_bounded_by_bytes() -> None:
    cache = MetadataAnswers(bytes_max=250)
    assert cache.get(1, "a") is None
    for key in "abc":
        cache.put(1, key, bytes(100))
    assert cache.get(1, "a") is None
    assert cache.get(1, "b") is not None
    assert cache.get(2, "b") is None, "another state"
    cache.put(1, "late", b"of a state that is over")
    assert cache.get(2, "late") is None


# ---- many partitions ----


def turn(world: World) -> None:
    world.bench.deadlines.expire(world.bench.clock.monotonic_ms())


def answered(world: World, slot: FakeSlot) -> int:
    """Let the loop pass until there is an answer; how many passes that took."""
    passes = 0
    while slot.pieces is None:
        turn(world)
        passes += 1
        assert passes < 1000
    return passes


@pytest.mark.parametrize("version", [1, 9, 12])
def test_many_partitions_are_told_in_short_turns(version: int) -> None:
    world = World()
    for name in "abc":
        world.add_topic(name, TURN_PARTITIONS - 56)
    fields = {"topics": [{"name": name, "topic_id": None} for name in "abc"]}
    many = world.send(ApiKey.METADATA, version, **fields)
    shared = world.send(ApiKey.METADATA, version, **fields)
    assert answered(world, many) >= 4, "gathered and encoded, 256 at a time"
    assert shared.pieces is not None, "who asked meanwhile shares the work"
    topics = world.read(ApiKey.METADATA, version, many).topics
    assert world.read(ApiKey.METADATA, version, shared).topics == topics
    for topic in topics:
        few = world.ask(ApiKey.METADATA, version, topics=[{"name": topic.name, "topic_id": None}])
        assert few.topics == [topic]
    again = world.send(ApiKey.METADATA, version, **fields)
    assert again.pieces is not None, "the cache has it"


def test_a_body_encoded_while_the_state_moved_is_not_kept() -> None:
    world = World()
    topic_id = world.add_topic("t", 3 * TURN_PARTITIONS)
    slot = world.send(ApiKey.METADATA, 9, **named("t"))
    turn(world)
    world.lead(topic_id, 0, 2, 9)
    fresh = world.send(ApiKey.METADATA, 9, **named("t"))
    answered(world, slot)
    answered(world, fresh)
    for late in (fresh, world.send(ApiKey.METADATA, 9, **named("t"))):
        answered(world, late)
        partitions = world.read(ApiKey.METADATA, 9, late).topics[0].partitions
        assert (partitions[0].leader_id, partitions[0].leader_epoch) == (2, 9)


def test_long_work_of_many_clients_takes_one_turn_a_pass() -> None:
    world = World()
    world.add_topic("t", 2 * TURN_PARTITIONS)
    versions = range(5, 13)
    slots = [world.send(ApiKey.METADATA, version, **named("t")) for version in versions]
    scheduler = world.broker.scheduler
    assert len(scheduler) == len(versions)
    before = scheduler.turns
    turn(world)
    assert scheduler.turns == before + 1
    for slot in slots:
        answered(world, slot)
    assert len(scheduler) == 0


# ---- DescribeTopicPartitions, DescribeCluster ----


def test_topic_partitions_come_in_pages() -> None:
    world = World()
    world.add_topic("a", 3)
    world.add_topic("b", 2)
    seen = []
    cursor = None
    for _ in range(3):
        answer = world.ask(
            ApiKey.DESCRIBE_TOPIC_PARTITIONS,
            0,
            topics=[],
            response_partition_limit=2,
            cursor=cursor,
        )
        seen.append([(t.name, p.partition_index) for t in answer.topics for p in t.partitions])
        cursor = answer.next_cursor and {
            "topic_name": answer.next_cursor.topic_name,
            "partition_index": answer.next_cursor.partition_index,
        }
    assert seen == [[("a", 0), ("a", 1)], [("a", 2), ("b", 0)], [("b", 1)]]
    assert cursor is None


def test_describe_cluster() -> None:
    world = World()
    world.engine.change(brokers=world.engine.image.brokers.set(3, broker_image(3, is_fenced=True)))
    answer = world.ask(ApiKey.DESCRIBE_CLUSTER, 1)
    assert (answer.cluster_id, answer.controller_id) == ("cluster", 2)
    assert [broker.broker_id for broker in answer.brokers] == [1, 2]
    every = world.ask(ApiKey.DESCRIBE_CLUSTER, 2, include_fenced_brokers=True)
    assert [(b.broker_id, b.is_fenced) for b in every.brokers] == [
        (1, False),
        (2, False),
        (3, True),
    ]
    wrong = world.ask(ApiKey.DESCRIBE_CLUSTER, 1, endpoint_type=2)
    assert wrong.error_code == ErrorCode.MISMATCHED_ENDPOINT_TYPE


def test_authorized_operations_are_all_that_kafka_knows_of_clusters_and_topics() -> None:
    world = World()
    world.add_topic("t")
    answer = world.ask(
        ApiKey.METADATA,
        10,
        topics=[{"topic_id": UUID(int=0), "name": "t"}],
        allow_auto_topic_creation=False,
        include_cluster_authorized_operations=True,
        include_topic_authorized_operations=True,
    )
    # Kafka 4.1's AclEntry.supportedOperations
    assert answer.cluster_authorized_operations == 0x1FA0
    assert [row.topic_authorized_operations for row in answer.topics] == [0xDF8]
    answer = world.ask(ApiKey.DESCRIBE_CLUSTER, 1, include_cluster_authorized_operations=True)
    assert answer.cluster_authorized_operations == 0x1FA0
