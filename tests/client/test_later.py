"""Delays, retries and dead records by our client: what is written, and where it goes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from raftmq.types import TopicPartition
from raftmq_client import BrokerError, ConsumerRecord, UsageError
from raftmq_client.blocking.consumer import Consumer
from raftmq_client.later import REASON_BYTES_MAX, buried, retried, with_delay
from tests.client.drivers import Driver
from tests.client.fake_broker import FakeBroker

PARIS = timezone(timedelta(hours=1))


@pytest.mark.parametrize(
    ("how", "header"),
    [
        ({"deliver_at": 1_700_000_000_250}, ("deliver-at", b"1700000000250")),
        (
            {"deliver_at": datetime(2023, 11, 14, 22, 13, 20, 250_000, UTC)},
            ("deliver-at", b"1700000000250"),
        ),
        (
            {"deliver_at": datetime(2023, 11, 14, 23, 13, 20, 250_001, PARIS)},
            ("deliver-at", b"1700000000251"),  # never early
        ),
        ({"deliver_after": 1.5}, ("deliver-after", b"1500")),
        ({"deliver_after": 0}, ("deliver-after", b"0")),
        ({"deliver_after": timedelta(days=2)}, ("deliver-after", b"172800000")),
    ],
)
def test_a_delay_is_a_header(how: dict[str, Any], header: tuple[str, bytes]) -> None:
    arguments = {"deliver_at": None, "deliver_after": None, **how}
    assert with_delay([("a", b"1")], **arguments) == [("a", b"1"), header]


@pytest.mark.parametrize(
    ("at", "after"),
    [
        (1, 1),
        (datetime(2023, 11, 14), None),  # whose clock?
        (-1, None),
        (datetime(1969, 1, 1, tzinfo=UTC), None),
        (1.5, None),
        ("never", None),
        (None, -1),
        (None, timedelta(seconds=-1)),
        (None, float("nan")),
        (None, float("inf")),
        (None, True),
        (None, "30m"),
    ],
)
def test_a_delay_that_makes_no_sense(at: Any, after: Any) -> None:
    with pytest.raises(UsageError, match="deliver_"):
        with_delay([], at, after)


def message(topic: str = "t", *headers: tuple[str, bytes | None]) -> ConsumerRecord:
    return ConsumerRecord(topic, 1, 7, 5, b"k", b"v", headers, 0, 3)


def headers_of(record: Any) -> dict[str, bytes | None]:
    found = list(record[3])
    assert len(dict(found)) == len(found), "none is there twice"
    return dict(found)


def test_a_first_retry_says_where_the_record_was_read() -> None:
    sent = retried(message("t", ("trace", b"x")), "g", "no such customer", None)
    assert (sent.topic, sent.partition, sent.record[:3]) == ("t.g.retry", 1, (b"k", b"v", None))
    assert headers_of(sent.record) == {
        "trace": b"x",
        "__dlq.errors.topic": b"t",
        "__dlq.errors.partition": b"1",
        "__dlq.errors.offset": b"7",
        "__dlq.errors.group": b"g",
        "__dlq.errors.delivery.count": b"1",
        "__dlq.errors.message": b"no such customer",
        "raftmq-attempt": b"1",
    }


def test_a_later_one_goes_the_same_way_and_keeps_what_the_first_said() -> None:
    came = message(
        "t.g",
        ("raftmq-attempt", b"3"),
        ("raftmq-created-at", b"1"),
        ("raftmq-delayed-at", b"t.g.retry/1/9"),
        ("__dlq.errors.topic", b"t"),
        ("__dlq.errors.partition", b"4"),
        ("__dlq.errors.offset", b"99"),
        ("__dlq.errors.message", b"before"),
    )
    sent = retried(came, "g", "", timedelta(minutes=1))
    assert sent.topic == "t.g.retry"
    found = headers_of(sent.record)
    assert found == {
        "__dlq.errors.topic": b"t",
        "__dlq.errors.partition": b"4",
        "__dlq.errors.offset": b"99",
        "__dlq.errors.group": b"g",
        "__dlq.errors.delivery.count": b"3",
        "raftmq-attempt": b"3",
        "deliver-after": b"60000",
    }
    assert buried(came, "g", "").topic == "t.g.dead"


def test_a_topic_whose_name_only_looks_retried_is_a_topic() -> None:
    assert retried(message("t.g"), "g", "", None).topic == "t.g.g.retry"
    assert retried(message("t.h", ("raftmq-attempt", b"2")), "g", "", None).topic == "t.h.g.retry"


def test_a_reason_is_cut_and_never_in_a_letter() -> None:
    found = headers_of(retried(message(), "g", "é" * REASON_BYTES_MAX, None).record)
    text = found["__dlq.errors.message"] or b""
    assert text.decode() == "é" * (REASON_BYTES_MAX // 2)


def test_without_a_group_there_is_no_retry() -> None:
    with pytest.raises(UsageError, match="group"):
        retried(message(), None, "", None)


# ---- by each driver ----


def read(broker: FakeBroker, topic: str, partition: int) -> ConsumerRecord:
    with Consumer(broker.address) as consumer:
        consumer.assign({TopicPartition(topic, partition): 0})
        while True:
            for found in consumer.poll(0.05):
                return found


def test_a_producer_delays(broker: FakeBroker, driver: Driver) -> None:
    with driver.producer(broker.address) as producer:
        producer.send("t", b"v", partition=0, deliver_after=2.5, headers=[("a", b"1")]).result(10)
        with pytest.raises(UsageError, match="exclude"):
            producer.send("t", b"v", deliver_after=2.5, deliver_at=1)
    assert read(broker, "t", 0).headers == (("a", b"1"), ("deliver-after", b"2500"))


def test_a_consumer_retries_and_buries(broker: FakeBroker, driver: Driver) -> None:
    """Also what a deserializer read: it goes on as it came."""
    for name in ("t.g.retry", "t.g.dead"):
        broker.make_topic(name, 1)
    with driver.producer(broker.address) as producer:
        producer.send("t", b'{"a":  1}', b"k", partition=1).result(10)
    options = {"group": "g", "value_deserializer": "json", "reset": "earliest"}
    with driver.consumer(broker.address, **options) as consumer:
        consumer.assign({TopicPartition("t", 1): 0})
        taken: list[Any] = []
        while not taken:
            taken = consumer.poll(0.1)
        assert taken[0].value == {"a": 1}
        place = consumer.retry(taken[0], reason="busy", after=5)
        assert (place.topic, place.partition, place.offset) == ("t.g.retry", 0, 0)
        assert consumer.retry(taken[0]).offset == 1
        assert consumer.dead(taken[0], reason="broken").topic == "t.g.dead"
    found = read(broker, "t.g.retry", 0)
    assert (found.key, found.value) == (b"k", b'{"a":  1}')
    assert dict(found.headers)["deliver-after"] == b"5000"
    assert dict(read(broker, "t.g.dead", 0).headers)["__dlq.errors.message"] == b"broken"


def test_a_retry_that_is_refused_is_told(broker: FakeBroker, driver: Driver) -> None:
    broker.make_topic("t.g.retry", 1)
    broker.fault(ApiKey.PRODUCE, "refuse", ErrorCode.INVALID_RECORD)
    with driver.consumer(broker.address, group="g") as consumer:
        with pytest.raises(BrokerError, match="INVALID_RECORD"):
            consumer.retry(message())
        assert consumer.retry(message()).offset >= 0
    assert "t.g.dead" not in broker.topic_ids, "no topic is made by itself"
