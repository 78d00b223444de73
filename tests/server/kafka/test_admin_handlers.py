"""Topics, configs, offsets, producers, quorum, log dirs, elections: through the dispatcher."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from attrs import evolve
from immutables import Map

from raftmq.controller.control_plane import (
    QuorumMember,
    QuorumState,
    decode_quorum,
    encode_quorum,
)
from raftmq.errors import ErrorCode, KafkaError, RemoteProtocolError
from raftmq.metadata.broker_messages import (
    AlterConfigsCall,
    Asker,
    CreatePartitionsCall,
    CreateTopicsCall,
    DeleteTopicsCall,
    FeatureRequest,
    NewPartitions,
    NewTopic,
    Outcome,
    UpdateFeaturesCall,
    Way,
)
from raftmq.metadata.features import SUPPORTED
from raftmq.metadata.image import RAFTMQ_LEVEL
from raftmq.promise import Promise
from raftmq.protocol import ApiKey, decode_request, encode_request
from raftmq.raft.membership import Configuration
from raftmq.records import NewRecord, build_batch
from raftmq.server.kafka.broker import QUORUM_WAIT_MS
from raftmq.server.kafka.handlers import configs
from raftmq.server.kafka.work import all_at_once
from raftmq.types import LeaderEpoch, TopicId, TopicPartition
from tests.partition.fake_replica import REPLICAS
from tests.server.kafka.world import NODES, FakeSlot, World, broker_image, context_of


def decide(world: World, *outcomes: Outcome) -> Any:
    """Answer the one admin call under way; returns it."""
    ((request, promise),) = world.controller.calls
    world.controller.calls.clear()
    promise.resolve(outcomes)
    return request


# ---- topics ----


@pytest.mark.parametrize("version", range(2, 8))
def test_create_topics(version: int) -> None:
    world = World()
    slot = world.send(
        ApiKey.CREATE_TOPICS,
        version,
        topics=[
            {
                "name": "a",
                "num_partitions": 2,
                "replication_factor": 3,
                "assignments": [],
                "configs": [{"name": "retention.ms", "value": "5"}],
            },
            {
                "name": "b",
                "num_partitions": -1,
                "replication_factor": -1,
                "assignments": [{"partition_index": 0, "broker_ids": [2, 3]}],
                "configs": [],
            },
        ],
        timeout=700,
        validate_only=False,
    )
    topic_id = world.add_topic("a", 2, **{"retention.ms": "5"})
    call = decide(
        world,
        Outcome(name="a", topic_id=topic_id, partitions=2, replication_factor=3),  # type: ignore[arg-type]
        Outcome(name="b", code=ErrorCode.INVALID_REPLICA_ASSIGNMENT, message="no"),
    )
    assert call == CreateTopicsCall(
        topics=(
            NewTopic(name="a", partitions=2, replication_factor=3, configs={"retention.ms": "5"}),
            NewTopic(name="b", assignments={0: (2, 3)}),
        ),
        timeout_ms=700,
    )
    answer = world.read(ApiKey.CREATE_TOPICS, version, slot)
    assert [(t.name, t.error_code) for t in answer.topics] == [
        ("a", 0),
        ("b", ErrorCode.INVALID_REPLICA_ASSIGNMENT),
    ]
    if version >= 5:
        created = answer.topics[0]
        assert (created.num_partitions, created.replication_factor) == (2, 3)
        values = {config.name: config.value for config in created.configs}
        assert values["retention.ms"] == "5"
    if version >= 7:
        assert answer.topics[0].topic_id == topic_id


def test_a_topic_named_twice_is_refused_alone() -> None:
    world = World()
    row = {"num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}
    slot = world.send(
        ApiKey.CREATE_TOPICS,
        4,
        topics=[{"name": name, **row} for name in ("twice", "once", "twice")],
        timeout=1,
    )
    call = decide(world, Outcome(name="once"))
    assert [topic.name for topic in call.topics] == ["once"]
    answer = world.read(ApiKey.CREATE_TOPICS, 4, slot)
    assert {t.name: t.error_code for t in answer.topics} == {
        "once": 0,
        "twice": ErrorCode.INVALID_REQUEST,
    }


def test_an_unreachable_controller_is_told_per_topic() -> None:
    world = World()
    slot = world.send(ApiKey.CREATE_PARTITIONS, 3, topics=[{"name": "t", "count": 3}], timeout=1)
    world.controller.calls[0][1].fail(KafkaError("who knows", code=ErrorCode.REQUEST_TIMED_OUT))
    (row,) = world.read(ApiKey.CREATE_PARTITIONS, 3, slot).results
    assert (row.name, row.error_code) == ("t", ErrorCode.REQUEST_TIMED_OUT)


def test_delete_topics_by_name() -> None:
    world = World()
    slot = world.send(ApiKey.DELETE_TOPICS, 4, topic_names=["a", "b"], timeout=9)
    call = decide(
        world, Outcome(name="a"), Outcome(name="b", code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    )
    assert call == DeleteTopicsCall(names=("a", "b"), timeout_ms=9)
    client = Asker(Way.CLIENT, "User:ANONYMOUS", "10.0.0.9", "PLAINTEXT", "client")
    assert world.controller.askers == [client], "the controller judges the client, not this node"
    answer = world.read(ApiKey.DELETE_TOPICS, 4, slot)
    assert [(row.name, row.error_code) for row in answer.responses] == [
        ("a", 0),
        ("b", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    ]


def test_delete_topics_by_name_and_id() -> None:
    world = World()
    one, two = UUID(int=5), UUID(int=6)
    asked = [
        {"name": None, "topic_id": one},
        {"name": "a", "topic_id": None},
        {"name": None, "topic_id": two},
    ]
    slot = world.send(ApiKey.DELETE_TOPICS, 6, topics=asked, timeout=9)
    call = decide(
        world,
        Outcome(name="a"),
        Outcome(name="x"),
        Outcome(name="", code=ErrorCode.UNKNOWN_TOPIC_ID),
    )
    assert call == DeleteTopicsCall(names=("a",), topic_ids=(one, two), timeout_ms=9)
    answer = world.read(ApiKey.DELETE_TOPICS, 6, slot)
    assert [(row.name, row.topic_id, row.error_code) for row in answer.responses] == [
        ("a", None, 0),
        ("x", one, 0),
        (None, two, ErrorCode.UNKNOWN_TOPIC_ID),
    ]


def test_create_partitions() -> None:
    world = World()
    slot = world.send(
        ApiKey.CREATE_PARTITIONS,
        3,
        topics=[
            {"name": "a", "count": 3, "assignments": None},
            {"name": "b", "count": 2, "assignments": [{"broker_ids": [1, 2]}]},
        ],
        timeout=9,
        validate_only=True,
    )
    call = decide(world, Outcome(name="a"), Outcome(name="b"))
    assert call == CreatePartitionsCall(
        topics=(
            NewPartitions(name="a", count=3),
            NewPartitions(name="b", count=2, assignments=((1, 2),)),
        ),
        timeout_ms=9,
        validate_only=True,
    )
    answer = world.read(ApiKey.CREATE_PARTITIONS, 3, slot)
    assert [row.error_code for row in answer.results] == [0, 0]


# ---- configs ----


def described(world: World, version: int, kind: int, name: str, **fields: Any) -> Any:
    resource = {"resource_type": kind, "resource_name": name, "configuration_keys": None, **fields}
    answer = world.ask(
        ApiKey.DESCRIBE_CONFIGS,
        version,
        resources=[resource],
        include_synonyms=True,
        include_documentation=True,
    )
    return answer.results[0]


@pytest.mark.parametrize("version", range(1, 5))
def test_describe_topic_configs(version: int) -> None:
    world = World()
    world.add_topic("t", **{"retention.ms": "77"})
    result = described(world, version, 2, "t")
    rows = {config.name: config for config in result.configs}
    assert (rows["retention.ms"].value, rows["retention.ms"].config_source) == ("77", 1)
    assert [s.value for s in rows["retention.ms"].synonyms][:1] == ["77"]
    assert rows["max.message.bytes"].value == "1048588"
    if version >= 3:
        assert rows["retention.ms"].config_type == 5
        assert rows["retention.ms"].documentation
    only = described(world, version, 2, "t", configuration_keys=["cleanup.policy"])
    assert [config.name for config in only.configs] == ["cleanup.policy"]


@pytest.mark.parametrize(
    ("kind", "name", "code"),
    [
        (2, "unknown", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (2, "a/b", ErrorCode.INVALID_TOPIC_EXCEPTION),
        (4, "1", ErrorCode.NONE),
        (4, "", ErrorCode.NONE),
        (4, "2", ErrorCode.INVALID_REQUEST),
        (8, "1", ErrorCode.INVALID_REQUEST),
    ],
)
def test_describe_other_resources(kind: int, name: str, code: ErrorCode) -> None:
    assert described(World(), 4, kind, name).error_code == code


@pytest.mark.parametrize("version", range(1, 5))
def test_a_broker_config_that_nobody_knows_is_told_without_its_value(version: int) -> None:
    world = World()
    world.engine.change(configs=Map({("broker", "1"): Map({"plugin.key": "secret"})}))
    rows = {config.name: config for config in described(world, version, 4, "1").configs}
    row = rows["plugin.key"]
    assert (row.value, row.config_source, row.is_sensitive, row.read_only) == (None, 2, True, True)
    assert [s.value for s in row.synonyms] == [None]
    if version >= 3:
        assert (row.config_type, row.documentation) == (0, None)


def test_what_topics_have_in_common_is_made_once() -> None:
    world = World()
    for name in ("a", "b", "c"):
        world.add_topic(name)
    world.add_topic("d", **{"retention.ms": "77"})
    fields = {"resources": [topic_resource(name) for name in "abcd"]}
    body = encode_request(ApiKey.DESCRIBE_CONFIGS, 4, fields)
    request = decode_request(ApiKey.DESCRIBE_CONFIGS, 4, body)
    context = context_of(ApiKey.DESCRIBE_CONFIGS, 4)
    made = all_at_once(configs.describe_configs(world.broker, context, request))
    a, b, c, d = [row["configs"] for row in made["results"]]
    assert a is b is c
    assert sum(one is not other for one, other in zip(a, d, strict=True)) == 1


def topic_resource(name: str) -> dict[str, Any]:
    return {"resource_type": 2, "resource_name": name, "configuration_keys": None}


def test_an_answer_about_configs_has_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    for number in range(8):  # each with a value of its own
        world.add_topic(f"t{number}", **{"retention.ms": str(number)})
    fields: dict[str, Any] = {
        "resources": [topic_resource(f"t{number}") for number in range(8)],
        "include_synonyms": True,
        "include_documentation": True,
    }

    def ask() -> tuple[list[int], int]:
        slot = world.send(ApiKey.DESCRIBE_CONFIGS, 4, **fields)
        while slot.pieces is None:
            world.bench.deadlines.expire(world.bench.clock.monotonic_ms())
        size = len(world.body(ApiKey.DESCRIBE_CONFIGS, 4, slot))
        rows = world.read(ApiKey.DESCRIBE_CONFIGS, 4, slot).results
        assert all(bool(row.configs) is not bool(row.error_code) for row in rows)
        assert all(bool(row.error_code) is bool(row.error_message) for row in rows)
        return [row.error_code for row in rows], size

    codes, whole = ask()
    assert codes == [0] * 8
    monkeypatch.setattr(configs, "DESCRIBED_BYTES_MAX", whole // 2)
    codes, size = ask()
    assert 0 < codes.count(0) < 5
    assert codes == sorted(codes)
    assert set(codes) == {0, int(ErrorCode.INVALID_REQUEST)}
    assert whole // 4 < size < whole // 2 + 1_000


def test_incremental_alter_configs() -> None:
    world = World()
    slot = world.send(
        ApiKey.INCREMENTAL_ALTER_CONFIGS,
        1,
        resources=[
            {
                "resource_type": 2,
                "resource_name": "t",
                "configs": [{"name": "retention.ms", "config_operation": 1, "value": None}],
            },
            {"resource_type": 9, "resource_name": "x", "configs": []},
        ],
        validate_only=False,
    )
    call = decide(world, Outcome(name="t", resource_type=2))
    assert isinstance(call, AlterConfigsCall)
    (resource,) = call.resources
    assert [(o.name, o.operation, o.value) for o in resource.operations] == [
        ("retention.ms", 1, None)
    ]
    assert not resource.replaces_all
    answer = world.read(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, slot)
    assert [(row.resource_name, row.error_code) for row in answer.responses] == [
        ("t", 0),
        ("x", ErrorCode.INVALID_REQUEST),
    ]


def test_the_old_alter_configs_replaces_everything() -> None:
    world = World()
    resource = {
        "resource_type": 2,
        "resource_name": "t",
        "configs": [{"name": "retention.ms", "value": "3"}],
    }
    slot = world.send(ApiKey.ALTER_CONFIGS, 2, resources=[resource], validate_only=True)
    call = decide(
        world, Outcome(name="t", resource_type=2, code=ErrorCode.INVALID_CONFIG, message="why")
    )
    assert (call.resources[0].replaces_all, call.validate_only) == (True, True)
    (row,) = world.read(ApiKey.ALTER_CONFIGS, 2, slot).responses
    assert (row.error_code, row.error_message) == (ErrorCode.INVALID_CONFIG, "why")


def test_a_resource_named_twice_is_refused() -> None:
    world = World()
    one = {"resource_type": 2, "resource_name": "t", "configs": []}
    answer = world.ask(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, resources=[one, one])
    assert [row.error_code for row in answer.responses] == [ErrorCode.INVALID_REQUEST]


# ---- offsets ----


def filled() -> World:
    world = World()
    world.add_topic("t")
    for i in range(3):
        batch = build_batch([NewRecord(None, b"v")], timestamp=1_000_000 + i)
        world.produce(9, [("t", 0, batch)], acks=1)
    world.replica("t").commit(2)
    return world


def listed(world: World, version: int, timestamp: int, topic: str = "t") -> Any:
    part = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": timestamp}
    answer = world.ask(
        ApiKey.LIST_OFFSETS,
        version,
        replica_id=-1,
        topics=[{"name": topic, "partitions": [part]}],
    )
    return answer.topics[0].partitions[0]


@pytest.mark.parametrize("version", range(1, 11))
def test_list_offsets(version: int) -> None:
    world = filled()
    assert listed(world, version, -1).offset == 2
    assert listed(world, version, -2).offset == 0
    assert listed(world, version, 1_000_001).offset == 1
    newest = listed(world, version, -3)
    if version >= 7:
        assert (newest.offset, newest.timestamp) == (1, 1_000_001)
    unsupported = [t for t in (-3, -4, -5, -6) if listed(world, version, t).error_code]
    assert unsupported == [
        t for t, since in ((-3, 7), (-4, 8), (-5, 9), (-6, 99)) if version < since
    ]
    refused = {listed(world, version, timestamp).error_code for timestamp in unsupported}
    assert refused == {ErrorCode.UNSUPPORTED_VERSION}
    unknown = listed(world, version, -1, "unknown")
    assert unknown.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def ask_offset(world: World, version: int, timestamp: int, timeout: int = 0) -> FakeSlot:
    part = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": timestamp}
    fields: dict[str, Any] = {
        "replica_id": -1,
        "topics": [{"name": "t", "partitions": [part]}],
    }
    if version >= 10:
        fields["timeout"] = timeout
    return world.send(ApiKey.LIST_OFFSETS, version, **fields)


def told_offset(world: World, slot: FakeSlot, version: int) -> Any:
    return world.read(ApiKey.LIST_OFFSETS, version, slot).topics[0].partitions[0]


@pytest.mark.parametrize(("timestamp", "offset"), [(-1, 3), (-3, 2), (1_000_002, 2)])
@pytest.mark.parametrize("version", [5, 10])
def test_the_end_of_a_single_replica_waits_for_what_it_acknowledged(
    version: int, timestamp: int, offset: int
) -> None:
    """Kafka's only replica commits as it appends: its end is never before what it acknowledged."""
    if timestamp == -3 and version < 7:
        version = 7
    world = filled()
    world.replica("t").voters = world.replica("t").voters[:1]
    slot = ask_offset(world, version, timestamp)
    assert slot.pieces is None, "answered before the flush"
    assert ask_offset(world, version, -2).pieces is not None, "the start waits for nothing"
    world.replica("t").commit(3)
    assert told_offset(world, slot, version).offset == offset
    assert ask_offset(world, version, timestamp).pieces is not None, "all is committed"


@pytest.mark.parametrize(
    ("version", "timeout", "waits_ms", "code"),
    [
        (4, 0, 5_000, ErrorCode.LEADER_NOT_AVAILABLE),
        (9, 0, 5_000, ErrorCode.OFFSET_NOT_AVAILABLE),
        (10, 0, 500, ErrorCode.OFFSET_NOT_AVAILABLE),
        (10, 700, 700, ErrorCode.OFFSET_NOT_AVAILABLE),
        (10, 2**31 - 1, 30_000, ErrorCode.OFFSET_NOT_AVAILABLE),
    ],
)
def test_the_wait_for_what_was_acknowledged_ends(
    version: int, timeout: int, waits_ms: int, code: ErrorCode
) -> None:
    world = filled()
    world.replica("t").voters = world.replica("t").voters[:1]
    slot = ask_offset(world, version, -1, timeout)
    world.bench.sleep(waits_ms - 1)
    assert slot.pieces is None
    world.bench.sleep(2)
    assert told_offset(world, slot, version).error_code == code


def test_the_wait_for_what_was_acknowledged_ends_with_the_leadership() -> None:
    world = filled()
    world.replica("t").voters = world.replica("t").voters[:1]
    slot = ask_offset(world, 9, -1)
    world.replica("t").follow()
    assert told_offset(world, slot, 9).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    world.replica("t").truncate(2)
    world.replica("t").lead()
    assert told_offset(world, ask_offset(world, 9, -1), 9).offset == 2, "the rest is no more"


@pytest.mark.parametrize(
    ("version", "code"),
    [(4, ErrorCode.LEADER_NOT_AVAILABLE), (5, ErrorCode.OFFSET_NOT_AVAILABLE)],
)
def test_a_new_leaders_end_is_not_told(version: int, code: ErrorCode) -> None:
    world = filled()
    world.replica("t").is_writable = False
    assert listed(world, version, -1).error_code == code


@pytest.mark.parametrize("version", range(2, 5))
def test_offset_for_leader_epoch(version: int) -> None:
    part = {"partition": 0, "current_leader_epoch": -1, "leader_epoch": 5}
    answer = filled().ask(
        ApiKey.OFFSET_FOR_LEADER_EPOCH,
        version,
        replica_id=-1,
        topics=[{"topic": "t", "partitions": [part, {**part, "partition": 3}]}],
    )
    one, other = answer.topics[0].partitions
    assert (one.leader_epoch, one.end_offset) == (5, 2)
    assert other.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


@pytest.mark.parametrize("version", range(3))
def test_delete_records(version: int) -> None:
    world = filled()
    parts = [{"partition_index": 0, "offset": 1}, {"partition_index": 1, "offset": 1}]
    slot = world.send(
        ApiKey.DELETE_RECORDS, version, topics=[{"name": "t", "partitions": parts}], timeout=500
    )
    assert slot.pieces is None
    world.replica("t").start_at(1)
    world.bench.sleep(10)
    rows = world.read(ApiKey.DELETE_RECORDS, version, slot).topics[0].partitions
    assert [(row.low_watermark, row.error_code) for row in rows] == [
        (1, 0),
        (-1, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    ]


# ---- producers ----


def init_producer(world: World, transactional_id: str | None = None) -> FakeSlot:
    return world.send(
        ApiKey.INIT_PRODUCER_ID, 4, transactional_id=transactional_id, transaction_timeout=1
    )


def test_producer_ids_come_in_blocks() -> None:
    world = World()
    slots = [init_producer(world) for _ in range(3)]
    assert len(world.engine.proposed) == 1, "one block for all who wait"
    world.engine.give_block(1000, 1002)
    assert slots[2].pieces is None
    world.engine.give_block(5000, 6000)
    slots.append(init_producer(world))
    ids = [world.read(ApiKey.INIT_PRODUCER_ID, 4, slot).producer_id for slot in slots]
    assert ids == [1000, 1001, 5000, 5001]
    assert world.engine.proposed == []


def test_a_silent_metadata_group_is_retriable() -> None:
    world = World()
    slot = init_producer(world)
    world.engine.proposed.pop()[1].fail(KafkaError(code=ErrorCode.REQUEST_TIMED_OUT))
    answer = world.read(ApiKey.INIT_PRODUCER_ID, 4, slot)
    assert answer.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
    init_producer(world)
    assert len(world.engine.proposed) == 1, "asked again"


def test_transactions_are_refused() -> None:
    world = World()
    answer = world.read(ApiKey.INIT_PRODUCER_ID, 4, init_producer(world, "x"))
    assert answer.error_code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED


def test_describe_producers() -> None:
    world = World()
    world.add_topic("t")
    batch = build_batch(
        [NewRecord(None, b"v")] * 2,
        timestamp=1_000_000,
        producer_id=7,
        producer_epoch=1,
        base_sequence=0,
    )
    world.produce(9, [("t", 0, batch)], acks=1)
    asked = [{"name": "t", "partition_indexes": [0, 1]}]
    rows = world.ask(ApiKey.DESCRIBE_PRODUCERS, 0, topics=asked).topics[0].partitions
    (producer,) = rows[0].active_producers
    assert (producer.producer_id, producer.producer_epoch) == (7, 1)
    assert (producer.last_sequence, producer.last_timestamp) == (1, 1_000_000)
    assert rows[1].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


# ---- the operator's view ----


# ---- features ----


@pytest.mark.parametrize("version", range(3))
def test_update_features(version: int) -> None:
    world = World()
    row: dict[str, Any] = {"feature": "raftmq.level", "max_version_level": 1}
    row |= {"allow_downgrade": True} if version < 1 else {"upgrade_type": 2}
    slot = world.send(
        ApiKey.UPDATE_FEATURES,
        version,
        timeout=1_000,
        feature_updates=[row],
        validate_only=True,
    )
    refused = Outcome(name="raftmq.level", code=ErrorCode.INVALID_UPDATE_VERSION, message="never")
    request = decide(world, refused)
    assert request == UpdateFeaturesCall(
        updates=(FeatureRequest("raftmq.level", 1, 2),),
        timeout_ms=1_000,
        validate_only=version >= 1,
    )
    answer = world.read(ApiKey.UPDATE_FEATURES, version, slot)
    told = answer if version >= 2 else answer.results[0]
    assert (told.error_code, told.error_message) == (ErrorCode.INVALID_UPDATE_VERSION, "never")
    if version < 2:
        assert answer.error_code == ErrorCode.NONE


def test_update_features_of_nobody_knows_how_many_is_refused() -> None:
    world = World()
    rows = [{"feature": "x", "max_version_level": 1, "upgrade_type": 1}] * 101
    answer = world.ask(ApiKey.UPDATE_FEATURES, 2, feature_updates=rows, validate_only=False)
    assert answer.error_code == ErrorCode.INVALID_REQUEST
    assert world.controller.calls == []


@pytest.mark.parametrize("version", [3, 4])
def test_api_versions_tell_the_levels_and_the_offset_at_which_they_changed(version: int) -> None:
    """Clients of version 3 cannot read a feature whose lowest level is 0."""
    world = World()
    levels_known = (RAFTMQ_LEVEL, *SUPPORTED[RAFTMQ_LEVEL])
    known = [levels_known, ("transaction.version", 0, 2)][: version - 2]

    def told() -> tuple[list[tuple[str, int, int]], list[tuple[str, int]], int]:
        answer = world.ask(
            ApiKey.API_VERSIONS, version, client_software_name="t", client_software_version="1"
        )
        supported = [(f.name, f.min_version, f.max_version) for f in answer.supported_features]
        levels = [(f.name, f.max_version_level) for f in answer.finalized_features]
        return supported, levels, answer.finalized_features_epoch

    assert told() == (known, [("raftmq.level", 1)], 0)
    world.engine.image = evolve(
        world.engine.image, features=Map({"raftmq.level": 2, "x.y": 1}), features_epoch=77
    )
    levels = [("raftmq.level", 2), ("x.y", 1)]
    assert told() == (known, levels, 77)


def test_describe_quorum() -> None:
    world = World()
    topics = [
        {"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]},
        {"topic_name": "t", "partitions": [{"partition_index": 0}]},
    ]
    world.broker.metadata_replica = SimpleNamespace(  # type: ignore[assignment]
        is_leader=True,
        leader_epoch=3,
        high_watermark=40,
        log_end_offset=41,
        voters=REPLICAS,
        learners=(),
        follower_end_offset=lambda replica: 41 if replica.node_id == 2 else None,
    )
    answer = world.ask(ApiKey.DESCRIBE_QUORUM, 2, topics=topics)
    quorum, unknown = (topic.partitions[0] for topic in answer.topics)
    assert (quorum.leader_id, quorum.leader_epoch, quorum.high_watermark) == (2, 3, 40)
    assert [(v.replica_id, v.log_end_offset) for v in quorum.current_voters] == [
        (1, 41),
        (2, 41),
        (3, -1),
    ]
    assert unknown.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_the_voters_that_are_told_are_those_of_now() -> None:
    """Not those of the node's file, with which the cluster began."""
    world = World()
    wanted = [{"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}]

    def told() -> tuple[list[int], list[int]]:
        quorum = world.ask(ApiKey.DESCRIBE_QUORUM, 2, topics=wanted)
        topics = [{"name": "__cluster_metadata", "topic_id": None}]
        metadata = world.ask(ApiKey.METADATA, 12, topics=topics)
        return (
            [node.node_id for node in quorum.nodes],
            list(metadata.topics[0].partitions[0].replica_nodes),
        )

    assert told() == ([1], [1])
    world.engine.configuration = Configuration(REPLICAS[1:], REPLICAS[:1])
    assert told() == ([2, 3], [2, 3])
    world.engine.configuration = Configuration(REPLICAS)
    assert told() == ([1, 2, 3], [1, 2, 3])


def follow(world: World, promise: Promise[QuorumState | None]) -> FakeSlot:
    world.broker.metadata_replica = SimpleNamespace(  # type: ignore[assignment]
        is_leader=False,
        leader_epoch=3,
        high_watermark=40,
        log_end_offset=40,
        voters=REPLICAS,
        learners=(),
        follower_end_offset=lambda _replica: None,
    )
    world.controller.quorum = promise
    topics = [{"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}]
    return world.send(ApiKey.DESCRIBE_QUORUM, 2, topics=topics)


def log_ends(world: World, slot: FakeSlot) -> list[tuple[int, int]]:
    answer = world.read(ApiKey.DESCRIBE_QUORUM, 2, slot)
    voters = answer.topics[0].partitions[0].current_voters
    return [(voter.replica_id, voter.log_end_offset) for voter in voters]


def test_a_follower_asks_the_leader_about_the_quorum() -> None:
    world = World()
    promise: Promise[QuorumState | None] = Promise()
    slot = follow(world, promise)
    assert slot.pieces is None
    members = tuple(QuorumMember(r.node_id, r.storage_id, 40 + r.node_id) for r in REPLICAS)
    promise.resolve(decode_quorum(encode_quorum(QuorumState(2, 3, 41, members, ()))))
    assert log_ends(world, slot) == [(1, 41), (2, 42), (3, 43)]


def test_without_an_answer_of_the_leader_a_follower_tells_what_it_knows() -> None:
    world = World()
    silent: Promise[QuorumState | None] = Promise()
    slot = follow(world, silent)
    world.bench.sleep(QUORUM_WAIT_MS + 1)
    assert log_ends(world, slot) == [(1, 40), (2, -1), (3, -1)]
    silent.resolve(None)  # late: nobody waits any more
    with pytest.raises(RemoteProtocolError):
        decode_quorum(b"nonsense")


@pytest.mark.parametrize("version", range(1, 5))
def test_describe_log_dirs(version: int) -> None:
    world = filled()
    world.add_topic("u", 2)
    (folder,) = world.ask(ApiKey.DESCRIBE_LOG_DIRS, version, topics=None).results
    assert [(t.name, len(t.partitions)) for t in folder.topics] == [("t", 1), ("u", 2)]
    assert folder.topics[0].partitions[0].partition_size == world.partition("t").size_bytes
    if version >= 4:
        assert folder.total_bytes >= folder.usable_bytes > 0
    asked = [{"topic": "u", "partitions": [1]}]
    (folder,) = world.ask(ApiKey.DESCRIBE_LOG_DIRS, version, topics=asked).results
    rows = [(t.name, p.partition_index) for t in folder.topics for p in t.partitions]
    assert rows == [("u", 1)]


def elect(world: World, version: int = 2, kind: int = 0, name: str = "t") -> FakeSlot:
    topics = [{"topic": name, "partitions": [0]}]
    return world.send(
        ApiKey.ELECT_LEADERS, version, election_type=kind, topic_partitions=topics, timeout=500
    )


def elected(world: World, slot: FakeSlot, version: int = 2) -> int:
    answer = world.read(ApiKey.ELECT_LEADERS, version, slot)
    return int(answer.replica_election_results[0].partition_result[0].error_code)


def test_a_partition_is_handed_to_its_preferred_leader() -> None:
    world = World()
    topic_id = world.add_topic("t")
    assert elected(world, elect(world)) == ErrorCode.ELECTION_NOT_NEEDED
    world.lead(topic_id, 0, 3, 6)
    slot = elect(world)
    assert world.handed_over == [TopicPartition("t", 0)]
    assert slot.pieces is None
    world.lead(topic_id, 0, 1, 7)
    world.bench.sleep(50)
    assert elected(world, slot) == ErrorCode.NONE


def test_elections_that_cannot_be() -> None:
    world = World()
    topic_id = world.add_topic("t")
    assert elected(world, elect(world, name="x")) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert elected(world, elect(world, kind=1)) == ErrorCode.ELECTION_NOT_NEEDED
    world.lead(topic_id, 0, 3, 6)
    late = elect(world)
    world.bench.sleep(600)
    assert elected(world, late) == ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE
    assert len(world.handed_over) == 3, "asked again on the way"
    world.leaders.led(
        TopicId(topic_id),
        0,
        leader=NODES[2],
        leader_epoch=LeaderEpoch(7),
        isr=NODES[1:],
        voters=NODES,
    )
    assert elected(world, elect(world)) == ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, "not in sync"
    assert len(world.handed_over) == 3
    dead = {node: broker_image(node, is_fenced=node != 2) for node in NODES}
    world.engine.change(brokers=type(world.engine.image.brokers)(dead))
    assert elected(world, elect(world)) == ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE
    unclean = elected(world, elect(world, kind=1))
    assert unclean == ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE


def test_elections_of_everything_tell_only_what_happened() -> None:
    world = World()
    topic_id = world.add_topic("t", 3)
    world.lead(topic_id, 1, 2, 6)
    slot = world.send(ApiKey.ELECT_LEADERS, 1, topic_partitions=None, timeout=500)
    world.lead(topic_id, 1, 1, 7)
    world.bench.sleep(50)
    (row,) = world.read(ApiKey.ELECT_LEADERS, 1, slot).replica_election_results
    assert [part.partition_id for part in row.partition_result] == [1]


def test_no_reassignments() -> None:
    answer = World().ask(ApiKey.LIST_PARTITION_REASSIGNMENTS, 0, topics=None, timeout=1)
    assert (answer.error_code, answer.topics) == (0, [])


@pytest.mark.parametrize("version", [0, 1])
def test_there_are_no_quotas(version: int) -> None:
    """`kafka-configs --describe --entity-type users` asks for them first."""
    any_user = {"entity_type": "user", "match_type": 2, "match": None}
    answer = World().ask(ApiKey.DESCRIBE_CLIENT_QUOTAS, version, components=[any_user], strict=True)
    assert (answer.error_code, answer.error_message, list(answer.entries)) == (0, None, [])
