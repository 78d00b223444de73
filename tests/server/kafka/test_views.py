"""Views over retired partitions, as clients see them: dense, read-only, the topic's offsets."""

from __future__ import annotations

from uuid import UUID

import attrs
import pytest
from immutables import Map

from raftmq.errors import ErrorCode
from raftmq.metadata.commands import PartitionState
from raftmq.metadata.image import LEVEL_OF_VIEWS, RAFTMQ_LEVEL, NumberImage, ViewImage
from raftmq.protocol import ApiKey, Struct
from raftmq.records import NewRecord, build_batch
from raftmq.rights import Kind, Operation
from raftmq.types import TopicId, TopicPartition
from tests.server.kafka.test_guards import Guarded, allow
from tests.server.kafka.world import World

VIEW_ID = TopicId(UUID(int=900))
RETIRED = 2
GONE = 3


@pytest.fixture
def world() -> World:
    """With a topic that has shrunk."""
    world = World()
    shrink(world)
    return world


def shrink(world: World) -> None:
    """Topic `t` lists 0 and 1, has retired 2, and 3 is gone; 2 has one record at offset 0."""
    world.add_topic("t", 3)
    batch = bytearray(build_batch([NewRecord(None, b"v")], timestamp=1))
    world.partition("t", RETIRED).append(memoryview(batch), 1, 1000)
    world.replica("t", RETIRED).commit(1)
    image = world.engine.image
    topic = image.topics["t"]
    sealed = attrs.evolve(topic.partitions[2], state=PartitionState.SEALED, state_version=4)
    topic = attrs.evolve(
        topic,
        partitions=topic.partitions[:2],
        retired=(sealed,),
        numbers=Map({2: NumberImage(1, 5), 3: NumberImage(40, 6)}),
    )
    world.engine.change(
        topics=image.topics.set("t", topic),
        views=Map({"t.retired": ViewImage("t.retired", VIEW_ID, topic.topic_id, 4)}),
        features=Map({RAFTMQ_LEVEL: LEVEL_OF_VIEWS}),
    )


def named(world: World, *names: str) -> list[Struct]:
    wanted = [Struct(name=name, topic_id=None) for name in names]
    answer = world.ask(ApiKey.METADATA, 12, topics=wanted, allow_auto_topic_creation=True)
    return list(answer.topics)


def test_a_topic_lists_what_is_active_and_its_view_all_numbers(world: World) -> None:
    topic, view = named(world, "t", "t.retired")
    assert [row.partition_index for row in topic.partitions] == [0, 1]
    assert [row.partition_index for row in view.partitions] == [0, 1, 2, 3]
    assert (view.error_code, view.topic_id) == (0, VIEW_ID)
    assert [row.error_code for row in view.partitions] == [0, 0, 0, 0]
    assert [row.leader_epoch for row in view.partitions] == [5, 5, 5, 6]
    by_id = world.ask(ApiKey.METADATA, 12, topics=[Struct(name=None, topic_id=VIEW_ID)]).topics
    assert [row.name for row in by_id] == ["t.retired"]
    everything = world.ask(ApiKey.METADATA, 12, topics=None).topics
    assert [row.name for row in everything] == ["t"]
    assert not world.controller.calls, "nobody creates a view by asking for it"


def test_the_name_of_a_view_that_is_not_there_yet_is_no_reason_to_create_a_topic(
    world: World,
) -> None:
    world.engine.change(views=Map())
    [row] = named(world, "t.retired")
    assert row.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert not world.controller.calls


def test_described_page_by_page(world: World) -> None:
    asked = {"topics": [Struct(name="t.retired")], "cursor": None}
    answer = world.ask(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, **asked, response_partition_limit=3)
    assert [row.partition_index for row in answer.topics[0].partitions] == [0, 1, 2]
    assert answer.next_cursor.partition_index == 3


def test_a_retired_number_is_read_under_both_names(world: World) -> None:
    for version, key in ((12, "t"), (12, "t.retired"), (13, VIEW_ID)):
        slot = world.fetch(version, [(key, RETIRED, 0)], max_wait_ms=0)
        [topic] = world.fetched(version, slot).topics
        [answer] = topic.partitions
        assert (answer.error_code, answer.high_watermark) == (0, 1)
        assert answer.records


def test_an_empty_number_ends_wherever_its_reader_stands(world: World) -> None:
    for index, offset in ((0, 0), (1, 17), (GONE, 12)):
        slot = world.fetch(12, [("t.retired", index, offset)], max_wait_ms=0)
        [answer] = world.fetched(12, slot).topics[0].partitions
        assert (answer.error_code, answer.high_watermark) == (0, offset)
        assert not answer.records


def test_a_fetch_waits_at_empty_numbers_and_is_answered_in_time(world: World) -> None:
    rows: list[tuple[str | UUID, int, int]] = [("t.retired", n, 1) for n in range(4)]
    slot = world.fetch(12, rows, max_wait_ms=500, min_bytes=1)
    assert slot.pieces is None
    world.bench.clock.now_ms += 501
    world.bench.deadlines.expire(world.bench.clock.now_ms)
    answers = world.fetched(12, slot).topics[0].partitions
    assert [answer.error_code for answer in answers] == [0, 0, 0, 0]


def test_beyond_its_width_a_view_has_nothing(world: World) -> None:
    slot = world.fetch(12, [("t.retired", 4, 0)], max_wait_ms=0)
    [answer] = world.fetched(12, slot).topics[0].partitions
    assert answer.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_offsets_of_a_view(world: World) -> None:
    rows = [Struct(partition_index=n, current_leader_epoch=-1, timestamp=-1) for n in range(4)]
    answer = world.ask(
        ApiKey.LIST_OFFSETS,
        5,
        replica_id=-1,
        isolation_level=0,
        topics=[Struct(name="t.retired", partitions=rows)],
    )
    told = [(row.error_code, row.offset) for row in answer.topics[0].partitions]
    assert told == [(0, 0), (0, 0), (0, 1), (0, 40)]
    ends = [Struct(partition=n, current_leader_epoch=-1, leader_epoch=5) for n in range(4)]
    answer = world.ask(
        ApiKey.OFFSET_FOR_LEADER_EPOCH,
        3,
        replica_id=-1,
        topics=[Struct(topic="t.retired", partitions=ends)],
    )
    told = [(row.error_code, row.end_offset) for row in answer.topics[0].partitions]
    assert told[2] == (0, 1)
    assert [code for code, _ in told] == [0, 0, 0, 0]
    assert all(end > 1 << 60 for _, end in (told[0], told[1], told[3]))


def test_nobody_writes_to_a_view(world: World) -> None:
    for key in ("t.retired", VIEW_ID):
        batch = bytearray(build_batch([NewRecord(None, b"v")], timestamp=1))
        version = 9 if key == "t.retired" else 13
        slot = world.produce(version, [(key, RETIRED, batch)], acks=1)
        [answer] = world.produced(version, slot).topics[0].partitions
        assert answer.error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
    deleted = world.ask(
        ApiKey.DELETE_RECORDS,
        2,
        topics=[Struct(name="t.retired", partitions=[Struct(partition_index=RETIRED, offset=-1)])],
        timeout=1000,
    )
    assert deleted.topics[0].partitions[0].error_code == ErrorCode.INVALID_TOPIC_EXCEPTION


def test_offsets_of_groups_are_those_of_the_topic(world: World) -> None:
    views = world.broker.views
    assert views.committed_at("t.retired", RETIRED) == TopicPartition("t", RETIRED)
    assert views.committed_at("t", RETIRED) == TopicPartition("t", RETIRED)
    assert views.takes_commit("t", 0)
    assert views.takes_commit("t.retired", RETIRED)
    assert not views.takes_commit("t.retired", 0), "the topic's own position stays"
    assert not views.takes_commit("t.retired", GONE)


def test_a_view_has_the_configs_of_its_topic(world: World) -> None:
    """Kafka's own tools ask for them with every description of a topic."""
    rows = [
        Struct(resource_type=2, resource_name=name, configuration_keys=["retention.ms"])
        for name in ("t", "t.retired")
    ]
    answer = world.ask(
        ApiKey.DESCRIBE_CONFIGS,
        4,
        resources=rows,
        include_synonyms=False,
        include_documentation=False,
    )
    topic, view = answer.results
    assert (view.error_code, view.resource_name) == (0, "t.retired")
    assert [row.value for row in view.configs] == [row.value for row in topic.configs]


def codes(world: World) -> list[ErrorCode]:
    """What a caller is told of the view by name and by id: when it fetches, asks for its leaders,
    and for an offset."""
    told = []
    for version, key in ((12, "t.retired"), (13, VIEW_ID)):
        slot = world.fetch(version, [(key, RETIRED, 0)], max_wait_ms=0)
        told.append(world.fetched(version, slot).topics[0].partitions[0].error_code)
    wanted = (
        Struct(name="t.retired", topic_id=None),
        Struct(name=None, topic_id=VIEW_ID),
    )
    for one in wanted:
        answer = world.ask(ApiKey.METADATA, 12, topics=[one], allow_auto_topic_creation=True)
        told.append(answer.topics[0].error_code)
    row = Struct(partition_index=RETIRED, current_leader_epoch=-1, timestamp=-1)
    answer = world.ask(
        ApiKey.LIST_OFFSETS,
        5,
        replica_id=-1,
        isolation_level=0,
        topics=[Struct(name="t.retired", partitions=[row])],
    )
    told.append(answer.topics[0].partitions[0].error_code)
    return [ErrorCode(code) for code in told]


def test_a_view_is_read_by_whoever_may_read_its_topic() -> None:
    world = Guarded(allow(Operation.READ, Kind.TOPIC, "t"))
    shrink(world)
    assert codes(world) == [ErrorCode.NONE] * 5
    world.let(allow(Operation.READ, Kind.TOPIC, "t.retired"))
    name, topic_id = ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.UNKNOWN_TOPIC_ID
    assert codes(world) == [name, topic_id, name, topic_id, name], "its own name gives no right"
