"""Topics with more ids than one: who is told which, and that each of them is taken everywhere."""

from __future__ import annotations

from uuid import UUID

import attrs
import pytest

from raftmq.errors import ErrorCode
from raftmq.metadata.broker_messages import DeleteTopicsCall, Outcome
from raftmq.protocol import ApiKey, Struct
from raftmq.protocol.fetch import (
    FetchPartition,
    FetchRequest,
    FetchTopic,
    ForgottenTopic,
    encode_fetch_request,
)
from raftmq.protocol.wire import CurrentLeader
from raftmq.records import NewRecord, build_batch
from raftmq.rights import Kind, Operation
from raftmq.types import TopicId
from tests.server.kafka.test_guards import Guarded, allow
from tests.server.kafka.world import World, context_of

OLDER, NEWEST = (TopicId(UUID(int=number)) for number in (801, 802))
LIBRDKAFKA = "librdkafka 2.16.0"


@pytest.fixture
def world() -> World:
    """With a topic that has shrunk twice and grown again, and another one."""
    world = World()
    add(world)
    return world


def add(world: World) -> None:
    world.add_topic("t", 2)
    world.add_topic("other", 1)
    image = world.engine.image
    topic = attrs.evolve(image.topics["t"], aliases=(OLDER, NEWEST))
    names = image.topic_names.set(OLDER, "t").set(NEWEST, "t")
    world.engine.change(topics=image.topics.set("t", topic), topic_names=names)


def own_id(world: World, name: str = "t") -> TopicId:
    return world.engine.image.topics[name].topic_id


def told_ids(world: World, *names: str, creates: bool = True) -> list[UUID]:
    """The ids of these topics, or of all, as Metadata tells them."""
    wanted = [Struct(name=name, topic_id=None) for name in names] or None
    answer = world.ask(ApiKey.METADATA, 12, topics=wanted, allow_auto_topic_creation=creates)
    return [row.topic_id for row in answer.topics]


@pytest.mark.parametrize(
    ("software", "expected"),
    [
        pytest.param("librdkafka 2.16.0", True, id="C"),
        pytest.param("confluent-kafka-python 2.16.1-rdkafka-2.16.0", True, id="Python"),
        pytest.param("confluent-kafka-go 2.6.1", True, id="Go"),
        pytest.param("confluent-kafka-dotnet 2.6.1", True, id=".NET"),
        pytest.param("confluent-kafka-javascript v1.0.0-librdkafka-2.6.1", True, id="JavaScript"),
        pytest.param("karafka v2.4.0-rdkafka-ruby-v0.16.0-librdkafka-v2.4.0", True, id="Ruby"),
        pytest.param("php-rdkafka-ffi 0.5.0-librdkafka-2.2.0", True, id="PHP"),
        pytest.param("kcat 1.7.1-librdkafka-2.3.0", True, id="kcat"),
        pytest.param("ClickHouse v24.3", True, id="ClickHouse"),
        pytest.param("apache-kafka-java 4.1.1", False, id="Java"),
        pytest.param("kgo v1.22.3", False, id="franz-go"),
        pytest.param("kafka-python 3.0.12", False, id="kafka-python"),
        pytest.param("aiokafka 0.14.0", False, id="aiokafka"),
        pytest.param("sarama 1.46.3", False, id="Sarama"),
        pytest.param("raftmq-client 1.0", False, id="ours"),
        pytest.param("confluent-kafka-golang 1.0", False, id="a name that only begins like one"),
        pytest.param("", False, id="says nothing"),
    ],
)
def test_who_is_on_librdkafka(software: str, expected: bool) -> None:
    context = context_of(ApiKey.METADATA, 12)
    context.connection.software = software
    assert context.is_of_rdkafka is expected


@pytest.mark.parametrize(
    ("software", "creates", "expected"),
    [
        pytest.param(LIBRDKAFKA, True, NEWEST, id="a producer of librdkafka"),
        pytest.param(LIBRDKAFKA, False, None, id="a consumer of librdkafka"),
        pytest.param("kgo 1.22.3", True, None, id="another"),
        pytest.param("", True, None, id="says nothing"),
    ],
)
def test_who_is_told_the_newest_alias_and_who_the_topics_own_id(
    world: World, software: str, creates: bool, expected: UUID | None
) -> None:
    other, wanted = own_id(world, "other"), expected or own_id(world)
    for _ in range(2):  # answers are kept, and shared by those that are told the same
        world.connection.software = "kgo 1.22.3"
        assert told_ids(world, "t", "other") == [own_id(world), other]
        world.connection.software = software
        assert told_ids(world, "t", "other", creates=creates) == [wanted, other]
        assert set(told_ids(world, creates=creates)) == {wanted, other}
        fields = {"topics": [Struct(name="t")], "cursor": None, "response_partition_limit": 9}
        [row] = world.ask(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, **fields).topics
        assert row.topic_id == own_id(world)


@pytest.mark.parametrize("software", [LIBRDKAFKA, "kgo 1.22.3"])
def test_whoever_asks_by_an_id_is_answered_by_it(world: World, software: str) -> None:
    world.connection.software = software
    ids = [own_id(world), OLDER, NEWEST]
    wanted = [Struct(name=None, topic_id=topic_id) for topic_id in ids]
    rows = world.ask(ApiKey.METADATA, 12, topics=wanted).topics
    assert [(row.error_code, row.name, row.topic_id) for row in rows] == [
        (0, "t", topic_id) for topic_id in ids
    ]
    assert [len(row.partitions) for row in rows] == [2, 2, 2]
    stranger = Struct(name=None, topic_id=UUID(int=803))
    [row] = world.ask(ApiKey.METADATA, 12, topics=[stranger]).topics
    assert row.error_code == ErrorCode.UNKNOWN_TOPIC_ID


def test_records_are_written_and_read_under_each_id(world: World) -> None:
    ids = [own_id(world), OLDER, NEWEST]
    for position, topic_id in enumerate(ids):
        batch = build_batch([NewRecord(None, b"v")], timestamp=1)
        slot = world.produce(13, [(topic_id, 1, bytearray(batch))], acks=1)
        [topic] = world.produced(13, slot).topics
        assert topic.topic_id == topic_id
        assert [(p.error_code, p.base_offset) for p in topic.partitions] == [(0, position)]
    world.replica("t", 1).commit(len(ids))
    for topic_id in ids:
        [read] = world.fetched(13, world.fetch(13, [(topic_id, 1, 0)], max_wait_ms=0)).topics
        assert read.topic_id == topic_id
        assert [(p.error_code, p.high_watermark) for p in read.partitions] == [(0, 3)]
        assert read.partitions[0].records
    slot = world.fetch(13, [(UUID(int=803), 1, 0)], max_wait_ms=0)
    [unknown] = world.fetched(13, slot).topics
    assert unknown.partitions[0].error_code == ErrorCode.UNKNOWN_TOPIC_ID


def test_a_session_goes_over_to_another_id_and_keeps_them_apart(world: World) -> None:
    batch = build_batch([NewRecord(None, b"v")], timestamp=1)
    world.produce(13, [(own_id(world), 0, bytearray(batch))], acks=1)
    world.replica("t", 0).commit(1)
    first = world.fetched(13, world.fetch(13, [(own_id(world), 0, 0)], session_epoch=0))
    assert [topic.topic_id for topic in first.topics] == [own_id(world)]

    def go_on(epoch: int, **fields: object) -> list[tuple[UUID | None, int]]:
        request = FetchRequest(
            session_id=first.session_id,
            session_epoch=epoch,
            max_wait_ms=0,
            **fields,  # type: ignore[arg-type]
        )
        slot = world.begin(ApiKey.FETCH, 13, encode_fetch_request(13, request))
        answer = world.fetched(13, slot)
        assert answer.error_code == 0
        return [(topic.topic_id, len(topic.partitions)) for topic in answer.topics]

    added = [FetchTopic(None, NEWEST, [FetchPartition(0, fetch_offset=0)])]
    both = go_on(1, topics=added)
    assert sorted(both, key=str) == sorted([(own_id(world), 1), (NEWEST, 1)], key=str)
    assert go_on(2, forgotten=[ForgottenTopic(None, own_id(world), [0])]) == [(NEWEST, 1)]


def test_a_leader_elsewhere_is_named_under_each_id(world: World) -> None:
    world.registry.remove(world.partition("t", 1))
    world.lead(own_id(world), 1, 2, 6)
    for topic_id in (own_id(world), OLDER, NEWEST):
        slot = world.fetch(16, [(topic_id, 1, 0)], max_wait_ms=0)
        [row] = world.fetched(16, slot).topics[0].partitions
        assert row.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert row.current_leader == CurrentLeader(2, 6)


def test_a_topic_is_deleted_by_an_alias(world: World) -> None:
    asked = [Struct(name=None, topic_id=OLDER)]
    slot = world.send(ApiKey.DELETE_TOPICS, 6, topics=asked, timeout=9)
    [(call, promise)] = world.controller.calls
    assert isinstance(call, DeleteTopicsCall)
    assert call.topic_ids == (OLDER,)
    promise.resolve((Outcome(name="t", topic_id=own_id(world)),))
    [row] = world.read(ApiKey.DELETE_TOPICS, 6, slot).responses
    assert (row.name, row.topic_id, row.error_code) == ("t", OLDER, 0)


def test_rights_to_an_alias_are_those_to_its_topic() -> None:
    world = Guarded()
    add(world)
    batch = build_batch([NewRecord(None, b"v")], timestamp=1)

    def codes() -> tuple[int, int]:
        slot = world.produce(13, [(NEWEST, 0, bytearray(batch))], acks=1)
        [written] = world.produced(13, slot).topics
        [read] = world.fetched(13, world.fetch(13, [(NEWEST, 0, 0)], max_wait_ms=0)).topics
        return written.partitions[0].error_code, read.partitions[0].error_code

    assert codes() == (ErrorCode.UNKNOWN_TOPIC_ID, ErrorCode.UNKNOWN_TOPIC_ID)
    world.let(*(allow(how, Kind.TOPIC, "t") for how in (Operation.WRITE, Operation.READ)))
    assert codes() == (0, 0)
