"""Which delay topics the controller makes."""

from __future__ import annotations

import pytest
from attrs import evolve

from raftmq.controller.topic_validation import (
    Settings,
    plan_configs,
    plan_move,
    plan_topic,
    planned_load_of,
)
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import (
    ConfigOperation,
    ConfigResource,
    MoveRequest,
    NewTopic,
)
from raftmq.metadata.commands import CreateTopics, ShrinkTopic
from raftmq.metadata.image import (
    LEVEL_OF_DEAD_TOPICS,
    LEVEL_OF_DELAYS,
    LEVEL_OF_VIEWS,
    RAFTMQ_LEVEL,
    MetadataImage,
)
from raftmq.partition.settings import PartitionSettings
from raftmq.types import METADATA_TOPIC, NodeId
from tests.metadata.metadata_commands import Machine, creation, raised, topic_id

ONE = (NodeId(1),)
SETTINGS = Settings(NodeId(1), {})


def image(level: int = LEVEL_OF_DELAYS) -> MetadataImage:
    machine = Machine()
    machine.register_all(1)
    machine.image = raised(machine.image, LEVEL_OF_VIEWS)
    made = (
        creation("orders", 1, ONE),
        creation("later", 2, ONE),
        creation("big", 3, ONE, ONE),
        creation("dead", 5, ONE),
    )
    machine.apply(CreateTopics(topics=made))
    machine.apply(
        ShrinkTopic(
            topic_id=topic_id(3), partitions=1, listed=2, view="big.retired", view_id=topic_id(4)
        )
    )
    image = machine.image
    configs = image.topics["later"].configs.set("raftmq.delivers.to", "orders")
    later = evolve(image.topics["later"], configs=configs)
    topics = image.topics.set("later", later)
    return evolve(image, topics=topics, features=image.features.set(RAFTMQ_LEVEL, level))


def plan(known: MetadataImage, replicas: int = 1, **configs: str | None) -> dict[str, str]:
    named = {name.replace("_", "."): value for name, value in configs.items()}
    new = NewTopic(name="x", partitions=1, replication_factor=replicas, configs=named)
    load = planned_load_of(known)
    return dict(plan_topic(known, {}, load, new, topic_id(9), SETTINGS).configs)


def test_a_delay_topic_is_made() -> None:
    assert plan(image(), raftmq_delivers_to="orders") == {"raftmq.delivers.to": "orders"}


def test_a_retry_topic_is_made() -> None:
    wanted = {"raftmq_delivers_to": "orders", "raftmq_dead_to": "dead"}
    configs = plan(image(), **wanted, raftmq_retry_attempts="3", raftmq_retry_factor="1.5")
    assert configs["raftmq.dead.to"] == "dead"


UNDELIVERED = {
    "raftmq_delivers_to": "orders",
    "raftmq_dead_to": "dead",
    "raftmq_retry_attempts": "0",
}


def test_a_delay_topic_without_retries_has_a_dead_topic() -> None:
    configs = plan(image(LEVEL_OF_DEAD_TOPICS), **UNDELIVERED)
    settings = PartitionSettings.from_configs(configs)
    assert (settings.delivers_to, settings.dead_to, settings.retry) == ("orders", "dead", None)
    retried = {**configs}
    del retried["raftmq.retry.attempts"]
    policy = PartitionSettings.from_configs(retried).retry
    assert policy is not None, "without a word of it there are retries, as ever"
    assert policy.attempts == 8


def test_it_has_none_below_its_level() -> None:
    """An older node would take every record of it for one that was tried too often."""
    with pytest.raises(KafkaError, match=r"needs raftmq\.level 9") as caught:
        plan(image(LEVEL_OF_DEAD_TOPICS - 1), **UNDELIVERED)
    assert caught.value.code is ErrorCode.UNSUPPORTED_VERSION


@pytest.mark.parametrize(
    ("configs", "why"),
    [
        ({"raftmq_dead_to": "x"}, "no such topic"),
        ({"raftmq_dead_to": "orders"}, "another topic as its"),
        ({"raftmq_delivers_to": ""}, "another topic as its"),
        ({"raftmq_dead_to": "later"}, "delay topic itself"),
        ({"raftmq_dead_to": "big.retired"}, "that is a view"),
        ({"raftmq_dead_to": "__consumer_offsets"}, "internal topic"),
        ({"raftmq_dead_to": ""}, "a retry topic has a"),
        ({"raftmq_retry_attempts": "-1"}, "at least 0"),
        ({"raftmq_retry_min_ms": "5"}, "there are no retries"),
        ({"raftmq_retry_factor": "2"}, "there are no retries"),
    ],
)
def test_which_dead_topics_are_refused(configs: dict[str, str], why: str) -> None:
    with pytest.raises(KafkaError, match=why) as caught:
        plan(image(LEVEL_OF_DEAD_TOPICS), **{**UNDELIVERED, **configs})
    assert caught.value.code is ErrorCode.INVALID_CONFIG


@pytest.mark.parametrize(
    ("configs", "why"),
    [
        ({"raftmq_delivers_to": "nothing"}, "no such topic"),
        ({"raftmq_delivers_to": "x"}, "no such topic"),
        ({"raftmq_delivers_to": "big.retired"}, "that is a view"),
        ({"raftmq_delivers_to": "__consumer_offsets"}, "internal topic"),
        ({"raftmq_delivers_to": METADATA_TOPIC}, "internal topic"),
        ({"raftmq_delivers_to": "later"}, "delay topic itself"),
        ({"raftmq_dead_to": "dead"}, "another topic as its raftmq.delivers.to"),
        ({"raftmq_delivers_to": "dead", "raftmq_dead_to": "dead"}, "another topic as its"),
        ({"raftmq_delivers_to": "orders", "raftmq_dead_to": "later"}, "delay topic itself"),
        ({"raftmq_delivers_to": "orders", "raftmq_dead_to": "nothing"}, "no such topic"),
        ({"raftmq_delivers_to": "orders", "raftmq_retry_min_ms": "5"}, "has a raftmq.dead.to"),
        ({"raftmq_delivers_to": "orders", "cleanup_policy": "compact"}, "compacted"),
        ({"raftmq_delivers_to": "orders", "max_message_bytes": "2000000"}, "max.message.bytes"),
    ],
)
def test_what_is_refused(configs: dict[str, str], why: str) -> None:
    with pytest.raises(KafkaError, match=why) as caught:
        plan(image(), **configs)
    assert caught.value.code is ErrorCode.INVALID_CONFIG


def test_where_one_clock_is_not_believed_one_replica_is_refused() -> None:
    alone = image()
    machine = Machine()
    machine.register_all(1, 2)
    two = evolve(alone, brokers=machine.image.brokers)
    with pytest.raises(KafkaError, match="With 2 brokers a delay topic has 2 replicas") as caught:
        plan(two, raftmq_delivers_to="orders")
    assert caught.value.code is ErrorCode.INVALID_REPLICATION_FACTOR
    assert plan(two) == {}
    assert plan(two, replicas=2, raftmq_delivers_to="orders")
    assert plan(alone, raftmq_delivers_to="orders"), "a single node goes by its own clock"


def test_a_delay_topic_does_not_shrink_to_one_replica() -> None:
    machine = Machine()
    machine.register_all(1, 2)
    known = evolve(image(), brokers=machine.image.brokers)
    for topic, is_refused in (("later", True), ("orders", False)):
        found = known.topics[topic]
        both = evolve(found.partitions[0], replicas=(NodeId(1), NodeId(2)))
        wide = evolve(known, topics=known.topics.set(topic, evolve(found, partitions=(both,))))
        wanted = MoveRequest(topic=topic, partition=0, replicas=(1,))
        load = planned_load_of(wide)
        if is_refused:
            with pytest.raises(KafkaError, match="2 replicas at least"):
                plan_move(wide, load, wanted, SETTINGS, allow_factor_change=True)
        else:
            assert plan_move(wide, load, wanted, SETTINGS, allow_factor_change=True)


def test_below_the_level_there_are_none() -> None:
    with pytest.raises(KafkaError, match=r"needs raftmq\.level 7") as caught:
        plan(image(LEVEL_OF_DELAYS - 1), raftmq_delivers_to="orders")
    assert caught.value.code is ErrorCode.UNSUPPORTED_VERSION
    assert plan(image(1)) == {}


@pytest.mark.parametrize(
    ("topic", "key", "value"),
    [
        ("orders", "raftmq.delivers.to", "later"),
        ("later", "raftmq.delivers.to", None),
        ("later", "raftmq.dead.to", "dead"),
        ("later", "raftmq.retry.attempts", "3"),
        ("later", "raftmq.retry.min.ms", "3"),
        ("later", "raftmq.retry.max.ms", "3"),
        ("later", "raftmq.retry.factor", "3"),
    ],
)
def test_a_topic_neither_becomes_one_nor_another_one(
    topic: str, key: str, value: str | None
) -> None:
    operation = ConfigOperation(key, 0 if value else 1, value)
    resource = ConfigResource(resource_type=2, resource_name=topic, operations=(operation,))
    with pytest.raises(KafkaError, match="when the topic is created"):
        plan_configs(image(), resource, SETTINGS)


def test_a_delay_topic_does_not_become_compacted() -> None:
    for topic, is_refused in (("later", True), ("orders", False)):
        operation = ConfigOperation("cleanup.policy", 0, "compact")
        resource = ConfigResource(resource_type=2, resource_name=topic, operations=(operation,))
        if is_refused:
            with pytest.raises(KafkaError, match="a delay topic cannot be compacted"):
                plan_configs(image(), resource, SETTINGS)
        else:
            plan_configs(image(), resource, SETTINGS)
