"""What the library promises its users, feature by feature, on real brokers and by all drivers.

On raftmq, and with the marker `kafka` on Apache Kafka; there also TLS, SASL, closest replicas and
transactions, which raftmq does not offer or another test covers.
"""

from __future__ import annotations

import functools
import re
import ssl
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import confluent_kafka
import kafka as kafka_python
import pytest

from raftmq.types import TopicPartition
from raftmq_client import (
    EARLIEST,
    LATEST,
    AuthenticationError,
    Plain,
    PollIntervalError,
    Scram,
    Security,
)
from tests.client.drivers import Driver
from tests.live.kafka import BOTH_PORT, PASSWORD, SASL_PORT, TLS_PORT, USER, KafkaCluster

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    # kafka-python leaves sockets to the garbage collector when it closes.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
CERTIFICATE = Path(__file__).parent / "tls" / "cert.pem"
PATIENCE_S = 90.0


def until(condition: Callable[[], Any], act: Callable[[], Any]) -> None:
    """Do something again and again until a condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        act()


def key(topic: str, partition: int = 0) -> TopicPartition:
    return TopicPartition(topic, partition)


def fill(driver: Driver, bootstrap: str, topic: str, count: int, partition: int = 0) -> None:
    with driver.producer(bootstrap) as producer:
        for i in range(count):
            producer.send(topic, b"%d" % i, partition=partition)


def read(consumer: Any, count: int) -> list[Any]:
    found: list[Any] = []
    until(lambda: len(found) >= count, lambda: found.extend(consumer.poll(1)))
    return found


# Producers.


@pytest.mark.parametrize(
    ("settings", "offset"),
    [
        ({"acks": "all"}, 9),
        ({"acks": "all", "idempotent": False}, 9),
        ({"acks": 1}, 9),
        ({"acks": 0}, -1),
        ({"delivery": "at_least_once"}, 9),
        ({"delivery": "at_most_once"}, 9),
        ({"partitioner": "round_robin", "compression": "zstd", "linger_ms": 0}, 9),
    ],
    ids=str,
)
def test_every_way_to_produce_arrives(
    driver: Driver, bootstrap: str, topic: str, settings: dict[str, Any], offset: int
) -> None:
    with driver.producer(bootstrap, **settings) as producer:
        receipts = [producer.send(topic, b"%d" % i, partition=0) for i in range(10)]
        assert receipts[-1].result(30).offset == offset
    with driver.consumer(bootstrap) as consumer:
        consumer.assign({key(topic): 0})
        assert [record.value for record in read(consumer, 10)] == [b"%d" % i for i in range(10)]


def placed_by_librdkafka(bootstrap: str, topic: str, keys: list[bytes], name: str) -> list[int]:
    found: dict[int, int] = {}

    def delivered(number: int, error: object, message: confluent_kafka.Message) -> None:
        assert error is None
        found[number] = message.partition()

    settings: dict[str, str | int] = {"bootstrap.servers": bootstrap, "partitioner": name}
    settings["sticky.partitioning.linger.ms"] = 0  # else records without a key share one for 10 ms
    producer = confluent_kafka.Producer(settings)
    for number, item in enumerate(keys):
        producer.produce(topic, b"v", item, on_delivery=functools.partial(delivered, number))
    assert producer.flush(60) == 0
    return [found[number] for number in range(len(keys))]


def placed_by_kafka_python(bootstrap: str, topic: str, keys: list[bytes]) -> list[int]:
    producer = kafka_python.KafkaProducer(bootstrap_servers=bootstrap.split(","))
    sent = [producer.send(topic, b"v", item) for item in keys]
    placed = [item.get(60).partition for item in sent]
    producer.close()
    return placed


@pytest.mark.parametrize("driver", ["blocking"], indirect=True)
def test_keys_go_where_other_clients_put_them(driver: Driver, bootstrap: str, topic: str) -> None:
    keys = [b"key-%d" % i for i in range(200)]
    ours = {}
    for name in ("murmur2", "crc32"):
        with driver.producer(bootstrap, partitioner=name) as producer:
            sent = [producer.send(topic, b"v", item) for item in keys]
            ours[name] = [receipt.result(30).partition for receipt in sent]
    assert ours["murmur2"] == placed_by_kafka_python(bootstrap, topic, keys)
    assert ours["murmur2"] == placed_by_librdkafka(bootstrap, topic, keys, "murmur2")
    assert ours["crc32"] == placed_by_librdkafka(bootstrap, topic, keys, "consistent")
    assert set(ours["crc32"]) == {0, 1, 2, 3}
    assert len(set(placed_by_librdkafka(bootstrap, topic, [b""] * 50, "consistent_random"))) > 1


def test_values_come_back_as_they_went(driver: Driver, bootstrap: str, topic: str) -> None:
    settings = {"key_serializer": "uuid", "value_serializer": "json"}
    names = {"key_deserializer": "str", "value_deserializer": "json"}
    name = uuid.uuid4()
    with driver.producer(bootstrap, **settings) as producer:
        place = producer.send(topic, {"item": 7, "tags": ["a", None]}, key=name).result(30)
    with driver.consumer(bootstrap, **names) as consumer:
        consumer.assign({key(topic, place.partition): 0})
        (record,) = read(consumer, 1)
        assert (record.key, record.value) == (str(name), {"item": 7, "tags": ["a", None]})
        assert (record.key_size, record.leader_epoch >= 0) == (36, True)


# Consumers.


def test_partitions_by_hand_begin_where_the_group_committed(
    driver: Driver, bootstrap: str, topic: str
) -> None:
    fill(driver, bootstrap, topic, 4)
    settings = {"group": f"by-hand-{topic}", "reset": "earliest", "auto_commit_ms": None}
    with driver.consumer(bootstrap, **settings) as consumer:
        consumer.assign([key(topic)])
        assert [record.offset for record in read(consumer, 4)] == [0, 1, 2, 3]
        consumer.commit({key(topic): 2})
        assert consumer.committed() == {key(topic): 2}
    with driver.consumer(bootstrap, **settings) as consumer:
        consumer.assign([key(topic)])
        assert [record.offset for record in read(consumer, 2)] == [2, 3]
    with driver.consumer(bootstrap, topics=topic, reset="earliest") as consumer:
        assert [record.offset for record in read(consumer, 4)] == [0, 1, 2, 3]
        assert len(consumer.assignment) == 4, "without a group all partitions"


def test_offsets_by_time_seek_pause_and_position(
    driver: Driver, bootstrap: str, topic: str
) -> None:
    with driver.producer(bootstrap) as producer:
        for i in range(6):
            producer.send(topic, b"%d" % i, partition=0, timestamp=1_000 * i)
    with driver.consumer(bootstrap, reset="earliest") as consumer:
        consumer.assign([key(topic), key(topic, 1)])
        found = consumer.offsets_for_times({key(topic): 3_500, key(topic, 1): 0})
        assert (found[key(topic)].offset, found[key(topic)].timestamp) == (4, 4_000)
        assert found[key(topic, 1)].offset == -1
        consumer.seek(key(topic), 4)
        assert [record.value for record in read(consumer, 2)] == [b"4", b"5"]
        assert consumer.position(key(topic)) == 6
        consumer.pause(key(topic))
        consumer.seek(key(topic), 0)
        assert consumer.poll(0.3) == []
        consumer.resume(key(topic))
        assert read(consumer, 6)[0].offset == 0


def test_a_message_is_committed_by_itself(driver: Driver, bootstrap: str, topic: str) -> None:
    fill(driver, bootstrap, topic, 8)
    settings: dict[str, Any] = {"group": f"g-{topic}", "topics": topic, "reset": "earliest"}
    with driver.consumer(bootstrap, auto_commit_ms=None, **settings) as consumer:
        messages = read(consumer, 8)
        consumer.commit(messages[4])
        assert consumer.committed([key(topic), key(topic, 1)]) == {key(topic): 5}
    with driver.consumer(bootstrap, **settings) as consumer:
        assert [record.offset for record in read(consumer, 3)] == [5, 6, 7]
    with driver.admin(bootstrap) as admin:
        kept = admin.group_offsets(f"g-{topic}")[key(topic)]
        assert (kept.offset, kept.leader_epoch) == (8, messages[-1].leader_epoch)


@pytest.mark.parametrize(("delivery", "next_offset"), [("at_least_once", 0), ("at_most_once", 3)])
def test_who_dies_with_records_in_hand_repeats_or_loses_them(
    driver: Driver, bootstrap: str, topic: str, delivery: str, next_offset: int
) -> None:
    fill(driver, bootstrap, topic, 6)
    settings: dict[str, Any] = {
        "group": f"g-{topic}",
        "topics": topic,
        "delivery": delivery,
        "reset": "earliest",
        "session_timeout_ms": 6_000,
        "heartbeat_interval_ms": 500,
    }

    def die() -> None:
        with driver.consumer(bootstrap, **settings) as consumer:
            found: list[Any] = []
            until(lambda: found, lambda: found.extend(consumer.poll(1, 3)))
            assert [record.offset for record in found] == [0, 1, 2]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        die()
    with driver.consumer(bootstrap, **settings) as consumer:
        assert read(consumer, 1)[0].offset == next_offset


def test_a_pattern_picks_up_new_topics(driver: Driver, bootstrap: str, topic: str) -> None:
    fill(driver, bootstrap, topic, 1)
    with driver.consumer(
        bootstrap,
        group=f"g-{topic}",
        topics=re.compile(f"{topic}.*"),
        reset="earliest",
        metadata_max_age_ms=300,
    ) as consumer:
        assert [record.topic for record in read(consumer, 1)] == [topic]
        later = f"{topic}-later"
        with driver.admin(bootstrap) as admin:
            admin.create_topic(later, 1)
            fill(driver, bootstrap, later, 1)
            assert [record.topic for record in read(consumer, 1)] == [later]
            assert key(later) in consumer.assignment
            admin.delete_topic(later)


def test_a_member_that_does_not_poll_loses_its_partitions_and_is_told(
    driver: Driver, bootstrap: str, topic: str
) -> None:
    fill(driver, bootstrap, topic, 1)
    settings: dict[str, Any] = {
        "group": f"g-{topic}",
        "topics": topic,
        "reset": "earliest",
        "session_timeout_ms": 60_000,
        "heartbeat_interval_ms": 200,
    }
    revoked: list[Any] = []
    with (
        driver.consumer(
            bootstrap, max_poll_interval_ms=1_500, on_revoked=revoked.append, **settings
        ) as slow,
        driver.consumer(bootstrap, **settings) as quick,
    ):
        until(lambda: slow.assignment, lambda: slow.poll(0.1))
        until(lambda: len(quick.assignment) == 4, lambda: quick.poll(0.1))
        with pytest.raises(PollIntervalError, match="max_poll_interval_ms"):
            slow.poll(0.1)
        until(lambda: slow.assignment, lambda: (slow.poll(0.1), quick.poll(0.1)))
        assert len(slow.assignment) + len(quick.assignment) <= 4
    assert revoked


@pytest.mark.parametrize("assignor", ["range", "roundrobin", "cooperative-sticky"])
def test_callbacks_tell_of_every_partition_that_comes_and_goes(
    driver: Driver, bootstrap: str, topic: str, assignor: str
) -> None:
    owners: dict[TopicPartition, str] = {}

    def member(name: str) -> Any:
        def came(partitions: tuple[TopicPartition, ...]) -> None:
            for item in partitions:
                assert item not in owners, f"{item} is {owners.get(item)}'s"
                owners[item] = name

        def went(partitions: tuple[TopicPartition, ...]) -> None:
            for item in partitions:
                assert owners.pop(item) == name

        return driver.consumer(
            bootstrap,
            group=f"g-{topic}",
            topics=[topic],
            heartbeat_interval_ms=200,
            assignors=[assignor],
            on_assigned=came,
            on_revoked=went,
        )

    with member("first") as first:
        until(lambda: len(owners) == 4, lambda: first.poll(0.1))
        with member("second") as second:
            until(
                lambda: sorted(owners.values()) == ["first"] * 2 + ["second"] * 2,
                lambda: (first.poll(0.05), second.poll(0.05)),
            )
        until(lambda: list(owners.values()) == ["first"] * 4, lambda: first.poll(0.1))
    assert owners == {}, "closing gives up what is held"


# What only Kafka offers here.


def context() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(CERTIFICATE))


@pytest.mark.kafka
@pytest.mark.parametrize("name", ["tls", "plain", "scram-256", "scram-512", "both"])
def test_tls_and_sasl(driver: Driver, kafka: KafkaCluster, name: str) -> None:
    port, security = {
        "tls": (TLS_PORT, context()),
        "plain": (SASL_PORT, Plain(USER, PASSWORD)),
        "scram-256": (SASL_PORT, Scram(USER, PASSWORD, "SHA-256")),
        "scram-512": (SASL_PORT, Scram(USER, PASSWORD)),
        "both": (BOTH_PORT, Security(tls=context(), sasl=Scram(USER, PASSWORD))),
    }[name]
    topic = f"secret-{time.time_ns()}"
    settings: dict[str, Any] = {"security": security}
    with driver.producer(kafka.at(port), **settings) as producer:
        producer.send(topic, b"hidden", partition=0).result(30)
    with driver.consumer(kafka.at(port), **settings) as consumer:
        consumer.assign({key(topic): 0})
        assert read(consumer, 1)[0].value == b"hidden"


@pytest.mark.kafka
@pytest.mark.parametrize("make", [Plain, Scram])
def test_a_wrong_password_is_told_at_once(
    driver: Driver, kafka: KafkaCluster, make: Callable[[str, str], Plain | Scram]
) -> None:
    with (
        driver.admin(kafka.at(SASL_PORT), security=make(USER, "guess")) as admin,
        pytest.raises(AuthenticationError),
    ):
        admin.brokers()


@pytest.mark.kafka
def test_the_closest_replica_is_read(driver: Driver, kafka: KafkaCluster) -> None:
    topic = f"near-{time.time_ns()}"
    with driver.admin(kafka.bootstrap) as admin:
        admin.create_topic(topic, 1, 3)
        fill(driver, kafka.bootstrap, topic, 3)  # from here on every broker knows it
        leader = admin.topic(topic).partitions[0].leader
    near = leader % 3 + 1
    with driver.consumer(kafka.bootstrap, rack=f"rack-{near}") as consumer:
        consumer.assign({key(topic): 0})
        assert len(read(consumer, 3)) == 3
        core = consumer._core
        assert core.fetcher.readers[key(topic)].preferred == near


@pytest.mark.kafka
def test_aborted_transactions_are_hidden_where_asked(driver: Driver, kafka: KafkaCluster) -> None:
    topic = f"transactions-{time.time_ns()}"
    writer = confluent_kafka.Producer(
        {"bootstrap.servers": kafka.bootstrap, "transactional.id": topic}
    )
    writer.init_transactions(60)
    for number, end in enumerate([writer.commit_transaction, writer.abort_transaction] * 2):
        writer.begin_transaction()
        writer.produce(topic, b"%d" % number, partition=0)
        assert writer.flush(60) == 0, "an abort drops what has not left yet"
        end(60)
    expected = {"read_committed": [b"0", b"2"], "read_uncommitted": [b"0", b"1", b"2", b"3"]}
    for isolation, values in expected.items():
        with driver.consumer(kafka.bootstrap, isolation=isolation) as consumer:
            consumer.assign({key(topic): 0})
            assert [record.value for record in read(consumer, len(values))] == values
            end = consumer.offsets([key(topic)], LATEST)[key(topic)].offset
            assert end >= 8, "four records and four marks"
            until(
                lambda at=consumer, to=end: at.position(key(topic)) == to,
                lambda at=consumer: at.poll(1),
            )


# What is committed at the end.


class HandlerError(Exception):
    """What a handler raises."""


def test_an_exception_in_a_handler_finishes_nothing_more(
    driver: Driver, bootstrap: str, topic: str
) -> None:
    fill(driver, bootstrap, topic, 10)
    settings = {"group": f"g-{topic}", "topics": topic, "delivery": "at_least_once"}

    def handle() -> None:
        with driver.consumer(bootstrap, **settings) as consumer:
            try:
                for message in consumer:
                    if message.offset == 3:
                        raise HandlerError
            finally:
                consumer.close()

    with pytest.raises(HandlerError):
        handle()
    with driver.consumer(bootstrap, **settings) as consumer:
        assert next(iter(consumer)).offset == 3


def test_a_member_that_stood_at_the_end_comes_back_to_it(
    driver: Driver, bootstrap: str, topic: str
) -> None:
    fill(driver, bootstrap, topic, 2)
    settings = {"group": f"g-{topic}", "topics": topic, "reset": "latest"}
    with driver.consumer(bootstrap, **settings) as consumer:
        until(lambda: consumer.assignment, lambda: consumer.poll(0.1))
        until(lambda: consumer.position(key(topic)) == 2, lambda: consumer.poll(0.1))
    fill(driver, bootstrap, topic, 3)
    with driver.consumer(bootstrap, **settings) as consumer:
        assert [message.offset for message in read(consumer, 3)] == [2, 3, 4]


def test_a_seek_goes_to_either_end(driver: Driver, bootstrap: str, topic: str) -> None:
    fill(driver, bootstrap, topic, 4)
    with driver.consumer(bootstrap, group=f"g-{topic}", reset="none") as consumer:
        consumer.assign({key(topic): LATEST})
        until(lambda: consumer.position(key(topic)) == 4, lambda: consumer.poll(0.1))
        consumer.seek(key(topic), EARLIEST)
        assert [message.offset for message in read(consumer, 4)] == [0, 1, 2, 3]
        consumer.commit()
        assert consumer.committed() == {key(topic): 4}


def test_a_member_that_was_put_out_rewinds_nobody(
    driver: Driver, bootstrap: str, topic: str
) -> None:
    """Its place is taken while it does not poll; somebody commits further, and then it hears."""
    fill(driver, bootstrap, topic, 5)
    group = f"g-{topic}"
    told: list[str] = []
    settings = {
        "group": group,
        "topics": topic,
        "delivery": "at_least_once",
        "session_timeout_ms": 6_000,
        "max_poll_interval_ms": 1_000,
    }
    callbacks = {
        "on_revoked": lambda _: told.append("revoked"),
        "on_lost": lambda _: told.append("lost"),
    }
    with driver.consumer(bootstrap, **settings, **callbacks) as consumer:
        assert len(read(consumer, 3)) >= 3
        until(lambda: consumer.generation == -1, lambda: time.sleep(0.01))
        with driver.consumer(bootstrap, group=group) as other:
            other.assign([key(topic)])
            other.commit({key(topic): 5})
        with pytest.raises(PollIntervalError):
            until(lambda: False, lambda: consumer.poll(0.1))
        assert told == ["lost"]
    with driver.consumer(bootstrap, group=group) as other:
        assert other.committed([key(topic)]) == {key(topic): 5}
