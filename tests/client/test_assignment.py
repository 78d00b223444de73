"""What a consumer reads: topics with and without a group, partitions chosen by hand."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from raftmq.types import TopicPartition
from raftmq_client import BrokerError, UsageError
from tests.client.drivers import Driver
from tests.client.fake_broker import FakeBroker

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


def fill(driver: Driver, broker: FakeBroker, topic: str, partition: int, count: int) -> None:
    with driver.producer(broker.address) as producer:
        for number in range(count):
            producer.send(topic, b"%d" % number, partition=partition)


def offsets(records: list[Any]) -> list[tuple[int, int]]:
    return sorted((record.partition, record.offset) for record in records)


def read(consumer: Any, count: int) -> list[Any]:
    found: list[Any] = []
    deadline = time.monotonic() + 20
    while len(found) < count and time.monotonic() < deadline:
        found += consumer.poll(1)
    return found


def test_partitions_chosen_by_hand_begin_where_the_group_committed(
    broker: FakeBroker, driver: Driver
) -> None:
    fill(driver, broker, "t", 0, 4)
    fill(driver, broker, "t", 1, 2)
    broker.groups["g"] = {("t", 0): 2}
    with driver.consumer(broker.address, group="g", reset="earliest") as consumer:
        consumer.assign([T0, T1])
        assert offsets(read(consumer, 4)) == [(0, 2), (0, 3), (1, 0), (1, 1)]
        consumer.commit()
        assert consumer.committed() == {T0: 4, T1: 2}, "without naming what is assigned"
    assert broker.groups["g"] == {("t", 0): 4, ("t", 1): 2}
    assert broker.count(ApiKey.JOIN_GROUP) == 0, "nobody's turn is changed by it"
    with driver.consumer(broker.address, group="g") as consumer:
        consumer.assign({T0: 1, T1: None})
        assert offsets(read(consumer, 3)) == [(0, 1), (0, 2), (0, 3)], "offsets given count"
        assert consumer.position(T1) == 2


def test_a_seek_before_the_first_poll_counts(broker: FakeBroker, driver: Driver) -> None:
    fill(driver, broker, "t", 0, 4)
    broker.groups["g"] = {("t", 0): 3}
    with driver.consumer(broker.address, group="g") as consumer:
        consumer.assign([T0])
        consumer.seek(T0, 1)
        assert offsets(read(consumer, 3)) == [(0, 1), (0, 2), (0, 3)]


def test_a_start_that_cannot_be_looked_up_is_told_and_never_guessed(
    broker: FakeBroker, driver: Driver
) -> None:
    fill(driver, broker, "t", 0, 4)
    broker.groups["g"] = {("t", 0): 2}
    broker.fault(ApiKey.OFFSET_FETCH, "refuse", ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    with driver.consumer(broker.address, group="g", reset="earliest") as consumer:
        consumer.assign([T0])
        with pytest.raises(BrokerError, match="TOPIC_AUTHORIZATION_FAILED"):
            consumer.poll(20)
        assert offsets(read(consumer, 2)) == [(0, 2), (0, 3)]


def test_topics_without_a_group_are_read_whole(broker: FakeBroker, driver: Driver) -> None:
    fill(driver, broker, "t", 0, 2)
    fill(driver, broker, "t", 1, 1)
    with driver.consumer(broker.address, topics="t", reset="earliest") as consumer:
        assert offsets(read(consumer, 3)) == [(0, 0), (0, 1), (1, 0)]
        assert tuple(consumer.assignment) == (T0, T1)
        with pytest.raises(UsageError, match="commits need a group"):
            consumer.commit()
    assert broker.count(ApiKey.FIND_COORDINATOR) == 0


def test_a_pattern_without_a_group_takes_new_topics_up(broker: FakeBroker, driver: Driver) -> None:
    settings = {"reset": "earliest", "metadata_max_age_ms": 100}
    with driver.consumer(broker.address, topics=re.compile("new-.*"), **settings) as consumer:
        assert consumer.poll(0.3) == []
        broker.make_topic("new-x", 1)
        broker.make_topic("old-new-x", 1)
        fill(driver, broker, "new-x", 0, 1)
        fill(driver, broker, "old-new-x", 0, 1)
        assert [record.topic for record in read(consumer, 1)] == ["new-x"]
        assert tuple(consumer.assignment) == (TopicPartition("new-x", 0),)
        hidden = broker.topic_ids.pop("new-x")  # as of a broker that has just started
        broker.wait_for_more(ApiKey.METADATA, 2)
        broker.topic_ids["new-x"] = hidden
        fill(driver, broker, "new-x", 0, 1)
        assert [record.offset for record in read(consumer, 1)] == [1], "its position was kept"


@pytest.mark.parametrize("group", [None, "g"])
def test_topics_and_partitions_by_hand_are_two_ways(
    broker: FakeBroker, driver: Driver, group: str | None
) -> None:
    with driver.consumer(broker.address, group=group, topics="t") as consumer:
        with pytest.raises(UsageError, match="not both"):
            consumer.assign([T0])
        consumer.subscribe(["t"])
    with driver.consumer(broker.address, group=group) as consumer:
        consumer.assign([T0])
        with pytest.raises(UsageError, match="not both"):
            consumer.subscribe("t")
        consumer.assign([T1])


def test_what_is_paused_is_what_is_named(broker: FakeBroker, driver: Driver) -> None:
    fill(driver, broker, "t", 0, 1)
    fill(driver, broker, "t", 1, 1)
    nothing: list[TopicPartition] = []
    with driver.consumer(broker.address, reset="earliest") as consumer:
        consumer.assign([T0, T1])
        consumer.pause(*consumer.assignment)
        assert consumer.poll(0.3) == []
        consumer.resume(*nothing)
        assert consumer.poll(0.3) == [], "an empty list is not everything"
        consumer.resume(T0, T1)
        consumer.pause(*nothing)
        assert offsets(read(consumer, 2)) == [(0, 0), (1, 0)]
