"""Views with conditions, as clients see them beside what they read: topics of their own, with the
partitions of another one, that nobody writes to."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import attrs
import pytest
from immutables import Map

from raftmq.errors import ErrorCode
from raftmq.metadata.broker_messages import CreateTopicsCall, Outcome
from raftmq.metadata.image import LEVEL_OF_CONDITIONS, RAFTMQ_LEVEL, ViewImage
from raftmq.protocol import ApiKey, Struct
from raftmq.records import NewRecord, build_batch
from raftmq.rights import Kind, Operation, Rule
from raftmq.types import TopicId, TopicPartition
from tests.groups.world import Nodes
from tests.server.kafka.test_guards import Guarded, allow, deny
from tests.server.kafka.test_views import GONE, RETIRED, shrink
from tests.server.kafka.world import NodeId, World

VIEW_ID = TopicId(UUID(int=901))
WHERE = "tag = 'refund'"
NO, UNKNOWN_ID = ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.UNKNOWN_TOPIC_ID


def viewed(world: World) -> World:
    """Topic `t` lists 0 and 1, has retired 2, and 3 is gone; `v` is a view of it."""
    shrink(world)
    image = world.engine.image
    view = ViewImage("v", VIEW_ID, image.topics["t"].topic_id, 0, WHERE, 3)
    world.engine.change(
        views=image.views.set("v", view), features=Map({RAFTMQ_LEVEL: LEVEL_OF_CONDITIONS})
    )
    return world


@pytest.fixture
def world() -> World:
    return viewed(World())


def named(world: World, *names: str | UUID) -> list[Struct]:
    wanted = [
        Struct(name=key, topic_id=None) if isinstance(key, str) else Struct(name=None, topic_id=key)
        for key in names
    ]
    answer = world.ask(ApiKey.METADATA, 12, topics=wanted, allow_auto_topic_creation=True)
    return list(answer.topics)


def described(world: World, name: str, *keys: str) -> Struct:
    row = Struct(resource_type=2, resource_name=name, configuration_keys=list(keys) or None)
    answer = world.ask(
        ApiKey.DESCRIBE_CONFIGS,
        4,
        resources=[row],
        include_synonyms=True,
        include_documentation=True,
    )
    [result] = answer.results
    return result


def test_a_view_has_all_numbers_of_its_topic(world: World) -> None:
    by_name, by_id = named(world, "v", VIEW_ID)
    assert (by_name.error_code, by_name.topic_id, by_name.is_internal) == (0, VIEW_ID, False)
    assert [row.partition_index for row in by_name.partitions] == [0, 1, RETIRED, GONE]
    assert by_id.name == "v"
    assert by_id.partitions == by_name.partitions
    [topic] = named(world, "t")
    assert by_name.partitions[:2] == topic.partitions, "with its leaders and replicas"
    assert not world.controller.calls, "nobody creates a view by asking for it"


def test_it_is_listed_among_all_topics(world: World) -> None:
    for version in (0, 5, 12):
        topics = [] if version == 0 else None
        answer = world.ask(ApiKey.METADATA, version, topics=topics)
        assert [row.name for row in answer.topics] == ["t", "v"]
        assert len(answer.topics[1].partitions) == 4
    answer = world.ask(
        ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, topics=[], cursor=None, response_partition_limit=5
    )
    assert [(row.name, len(row.partitions)) for row in answer.topics] == [("t", 2), ("v", 3)]
    assert (answer.next_cursor.topic_name, answer.next_cursor.partition_index) == ("v", 3)


def test_its_topic_still_names_the_view_over_what_it_retired(world: World) -> None:
    view = world.engine.image.view_of(world.engine.image.topics["t"].topic_id)
    assert view is not None
    assert view.name == "t.retired"
    assert world.broker.views.shown_at(TopicPartition("t", RETIRED)).topic == "t.retired"


def test_a_view_that_grows_with_its_topic_does_not_shrink_with_it(world: World) -> None:
    image = world.engine.image
    topic = image.topics["t"]
    last = attrs.evolve(topic.partitions[1], index=4)
    wider = attrs.evolve(topic, retired=(*topic.retired, last))
    world.engine.change(topics=image.topics.set("t", wider))
    assert len(named(world, "v")[0].partitions) == 5
    image = world.engine.image
    world.engine.change(topics=image.topics.set("t", topic))
    assert len(named(world, "v")[0].partitions) == 4


def test_its_configs_are_its_topics_and_what_makes_it_a_view(world: World) -> None:
    view, topic = described(world, "v"), described(world, "t")
    own = {row.name: row for row in view.configs}
    assert own["raftmq.view.of"].value == "t"
    assert own["raftmq.view.where"].value == WHERE
    assert own["raftmq.view.where"].config_source == 1, "it was set on it"
    assert all(row.read_only for row in view.configs)
    others = {row.name: row.value for row in topic.configs}
    assert "raftmq.view.of" not in others
    assert {name: own[name].value for name in others} == others
    assert [row.name for row in view.configs] == sorted(own)
    [one] = described(world, "v", "raftmq.view.where", "nonsense").configs
    assert one.value == WHERE


@pytest.mark.parametrize("key", ["v", VIEW_ID])
def test_nobody_writes_to_a_view(world: World, key: str | UUID) -> None:
    batch = bytearray(build_batch([NewRecord(None, b"v")], timestamp=1))
    version = 9 if key == "v" else 13
    slot = world.produce(version, [(key, 0, batch)], acks=1)
    [answer] = world.produced(version, slot).topics[0].partitions
    assert answer.error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
    deleted = world.ask(
        ApiKey.DELETE_RECORDS,
        2,
        topics=[Struct(name="v", partitions=[Struct(partition_index=0, offset=-1)])],
        timeout=1000,
    )
    assert deleted.topics[0].partitions[0].error_code == ErrorCode.INVALID_TOPIC_EXCEPTION


def test_a_transaction_has_no_view(world: World) -> None:
    """A producer would wait for a topic that is not known."""
    topics = [Struct(name=name, partitions=[0, 1]) for name in ("v", "t", "t.retired")]
    answer = world.ask(
        ApiKey.ADD_PARTITIONS_TO_TXN,
        3,
        v3_and_below_transactional_id="t",
        v3_and_below_producer_id=1,
        v3_and_below_producer_epoch=0,
        v3_and_below_topics=topics,
    )
    told = {
        row.name: {part.partition_error_code for part in row.results_by_partition}
        for row in answer.results_by_topic_v3_and_below
    }
    assert told["v"] == told["t.retired"] == {ErrorCode.INVALID_TOPIC_EXCEPTION}
    assert told["t"] == {ErrorCode.OPERATION_NOT_ATTEMPTED}


def test_groups_commit_under_its_own_name(world: World) -> None:
    world.broker.coordinator = Nodes(1).coordinators[NodeId(1)]
    rows = [
        Struct(partition_index=n, committed_offset=10 + n, committed_metadata=None)
        for n in range(5)
    ]
    answer = world.ask(
        ApiKey.OFFSET_COMMIT,
        7,
        group_id="g",
        generation_id_or_member_epoch=-1,
        member_id="",
        group_instance_id=None,
        topics=[Struct(name="v", partitions=rows), Struct(name="t", partitions=rows[:1])],
    )
    told = [row.error_code for row in answer.topics[0].partitions]
    assert told == [0, 0, 0, 0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION], "3 is gone: passed over"
    fetched = world.ask(ApiKey.OFFSET_FETCH, 7, group_id="g", topics=None, require_stable=False)
    kept = {
        (topic.name, row.partition_index): row.committed_offset
        for topic in fetched.topics
        for row in topic.partitions
    }
    assert kept == {("v", 0): 10, ("v", 1): 11, ("v", RETIRED): 12, ("t", 0): 10}
    deleted = world.ask(
        ApiKey.OFFSET_DELETE,
        0,
        group_id="g",
        topics=[Struct(name="v", partitions=[Struct(partition_index=0)])],
    )
    assert [row.error_code for row in deleted.topics[0].partitions] == [0]


# ---- rights ----


def rules(world: Guarded, *some: Rule) -> list[ErrorCode]:
    """What a caller is told of the view by name and by id, and when it wants to delete it."""
    world.let(*some)
    told = [row.error_code for row in (*named(world, "v"), *named(world, VIEW_ID))]
    answer = world.ask(
        ApiKey.LIST_OFFSETS,
        5,
        replica_id=-1,
        isolation_level=0,
        topics=[
            Struct(
                name="v",
                partitions=[
                    Struct(partition_index=GONE, current_leader_epoch=-1, timestamp=-1),
                ],
            )
        ],
    )
    told.append(answer.topics[0].partitions[0].error_code)
    return [ErrorCode(code) for code in told]


def test_rights_are_asked_for_by_its_own_name() -> None:
    world = Guarded()
    viewed(world)
    assert rules(world, allow(Operation.READ, Kind.TOPIC, "v")) == [ErrorCode.NONE] * 3
    assert rules(world, allow(Operation.READ, Kind.TOPIC, "t")) == [NO, UNKNOWN_ID, NO]
    both = allow(Operation.READ, Kind.TOPIC, "v"), deny(Operation.READ, Kind.TOPIC, "t")
    assert rules(world, *both) == [ErrorCode.NONE] * 3
    assert rules(world) == [NO, UNKNOWN_ID, NO]


def test_it_is_listed_for_whoever_may_see_it() -> None:
    world = Guarded(allow(Operation.DESCRIBE, Kind.TOPIC, "v"))
    viewed(world)
    assert [row.name for row in world.ask(ApiKey.METADATA, 12, topics=None).topics] == ["v"]
    asked: dict[str, Any] = {"topics": [], "cursor": None, "response_partition_limit": 9}
    answer = world.ask(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, **asked)
    assert [row.name for row in answer.topics] == ["v"]
    world.let(allow(Operation.DESCRIBE, Kind.TOPIC, "t"))
    assert [row.name for row in world.ask(ApiKey.METADATA, 12, topics=None).topics] == ["t"]


def create(world: Guarded, of: str) -> ErrorCode:
    """Ask for a view; the controller, if it is asked, makes it."""
    configs = [
        Struct(name="raftmq.view.of", value=of),
        Struct(name="raftmq.view.where", value=WHERE),
    ]
    new = Struct(
        name="w", num_partitions=-1, replication_factor=-1, assignments=[], configs=configs
    )
    world.controller.calls.clear()
    slot = world.send(ApiKey.CREATE_TOPICS, 5, topics=[new], timeout=1000, validate_only=False)
    for call, promise in world.controller.calls:
        assert isinstance(call, CreateTopicsCall)
        assert call.topics[0].configs["raftmq.view.of"] == of
        promise.resolve((Outcome(name="w"),))
    return ErrorCode(world.read(ApiKey.CREATE_TOPICS, 5, slot).topics[0].error_code)


def test_who_creates_a_view_needs_read_on_its_topic_and_hears_nothing_without() -> None:
    world = Guarded()
    viewed(world)
    may_create = allow(Operation.CREATE, Kind.TOPIC, "w")
    world.let(may_create, allow(Operation.READ, Kind.TOPIC, "t"))
    assert create(world, "t") is ErrorCode.NONE
    assert create(world, " t ".strip()) is ErrorCode.NONE
    world.let(may_create, allow(Operation.DESCRIBE, Kind.TOPIC, "t"))
    assert create(world, "t") is NO
    world.let(may_create)
    assert create(world, "t") is create(world, "nope") is NO, "whether it is there or not"
    assert not world.controller.calls
    world.let(allow(Operation.READ, Kind.TOPIC, "t"))
    assert create(world, "t") is NO


def test_who_deletes_a_view_needs_delete_on_it() -> None:
    world = Guarded()
    viewed(world)

    def delete(key: str | UUID) -> ErrorCode:
        world.controller.calls.clear()
        name, topic_id = (key, None) if isinstance(key, str) else (None, key)
        one = Struct(name=name, topic_id=topic_id)
        slot = world.send(ApiKey.DELETE_TOPICS, 6, topics=[one], timeout=1000)
        for _, promise in world.controller.calls:
            promise.resolve((Outcome(name="v", topic_id=VIEW_ID),))
        return ErrorCode(world.read(ApiKey.DELETE_TOPICS, 6, slot).responses[0].error_code)

    world.let(allow(Operation.DELETE, Kind.TOPIC, "v"))
    assert delete("v") is delete(VIEW_ID) is ErrorCode.NONE
    world.let(allow(Operation.DELETE, Kind.TOPIC, "t"))
    assert (delete("v"), delete(VIEW_ID)) == (NO, UNKNOWN_ID)
    world.let(allow(Operation.DESCRIBE, Kind.TOPIC, "v"))
    assert (delete("v"), delete(VIEW_ID)) == (NO, NO)
