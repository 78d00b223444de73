"""Transactions of librdkafka: what is committed is read once, and nothing else of it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from tests.live.harness import Cluster, wait_until
from tests.live.load import create_topic

pytestmark = [pytest.mark.live, pytest.mark.slow]

PARTITIONS = 3
TIMEOUT_S = 60


def producer(cluster: Cluster, name: str, **settings: Any) -> confluent_kafka.Producer:
    made = confluent_kafka.Producer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "transactional.id": name,
            "linger.ms": 0,
            **{key.replace("_", "."): value for key, value in settings.items()},
        }
    )
    made.init_transactions(TIMEOUT_S)
    return made


def send(made: confluent_kafka.Producer, topic: str, *values: str) -> None:
    """Send to partitions in turn, and wait until all are in the log."""
    for number, value in enumerate(values):
        made.produce(topic, value.encode(), partition=number % PARTITIONS)
    assert made.flush(TIMEOUT_S) == 0


@contextmanager
def consumer(cluster: Cluster, group: str, **settings: Any) -> Iterator[confluent_kafka.Consumer]:
    made = confluent_kafka.Consumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
            **{key.replace("_", "."): value for key, value in settings.items()},
        }
    )
    try:
        yield made
    finally:
        made.close()


def read(cluster: Cluster, topic: str, isolation: str = "read_committed") -> list[str]:
    """All that a reader of that isolation sees, up to the ends that it sees."""
    values: list[str] = []
    with consumer(cluster, f"{topic}-reader", isolation_level=isolation) as reader:
        reader.assign([TopicPartition(topic, index, 0) for index in range(PARTITIONS)])
        ended: set[int] = set()
        while len(ended) < PARTITIONS:
            message = reader.poll(TIMEOUT_S)
            assert message is not None, f"still waiting, has {values}"
            error = message.error()
            if error is None:
                values.append(message.value().decode())
            else:
                assert error.code() == confluent_kafka.KafkaError._PARTITION_EOF, error
                ended.add(message.partition())
    return sorted(values)


def latest(cluster: Cluster, topic: str, isolation: IsolationLevel) -> list[int]:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    wanted = {TopicPartition(topic, index): OffsetSpec.latest() for index in range(PARTITIONS)}
    futures = admin.list_offsets(wanted, isolation_level=isolation, request_timeout=TIMEOUT_S)
    return [futures[at].result().offset for at in wanted]


def test_what_is_committed_is_read_and_what_is_aborted_is_not(
    shared_cluster: Cluster, unique: str
) -> None:
    create_topic(shared_cluster.bootstrap, unique, PARTITIONS)
    made = producer(shared_cluster, unique)
    for number in range(6):
        made.begin_transaction()
        send(made, unique, *(f"{number}-{n}" for n in range(2 * PARTITIONS)))
        if number % 2:
            made.abort_transaction(TIMEOUT_S)
        else:
            made.commit_transaction(TIMEOUT_S)
    committed = sorted(f"{number}-{n}" for number in (0, 2, 4) for n in range(2 * PARTITIONS))
    wait_until(lambda: read(shared_cluster, unique) == committed, TIMEOUT_S)
    assert len(read(shared_cluster, unique, "read_uncommitted")) == 12 * PARTITIONS


def test_an_open_transaction_holds_back_readers_of_committed_records_alone(
    shared_cluster: Cluster, unique: str
) -> None:
    create_topic(shared_cluster.bootstrap, unique, PARTITIONS)
    first, second = producer(shared_cluster, unique), producer(shared_cluster, f"{unique}-2")
    first.begin_transaction()
    second.begin_transaction()
    send(first, unique, "first-0")
    send(second, unique, "second-0")
    second.commit_transaction(TIMEOUT_S)
    assert read(shared_cluster, unique) == [], "what came before is open"
    assert read(shared_cluster, unique, "read_uncommitted") == ["first-0", "second-0"]
    assert latest(shared_cluster, unique, IsolationLevel.READ_COMMITTED)[0] == 0
    assert latest(shared_cluster, unique, IsolationLevel.READ_UNCOMMITTED)[0] == 3
    first.abort_transaction(TIMEOUT_S)
    wait_until(lambda: read(shared_cluster, unique) == ["second-0"], TIMEOUT_S)
    assert latest(shared_cluster, unique, IsolationLevel.READ_COMMITTED)[0] == 4


def test_a_zombie_is_fenced_and_leaves_nothing(shared_cluster: Cluster, unique: str) -> None:
    create_topic(shared_cluster.bootstrap, unique, PARTITIONS)
    zombie = producer(shared_cluster, unique)
    zombie.begin_transaction()
    send(zombie, unique, "zombie")
    successor = producer(shared_cluster, unique)
    with pytest.raises(confluent_kafka.KafkaException) as caught:
        zombie.commit_transaction(TIMEOUT_S)
    assert caught.value.args[0].fatal()
    successor.begin_transaction()
    send(successor, unique, "successor")
    successor.commit_transaction(TIMEOUT_S)
    wait_until(lambda: read(shared_cluster, unique) == ["successor"], TIMEOUT_S)


def test_a_transaction_that_runs_for_too_long_is_aborted(
    shared_cluster: Cluster, unique: str
) -> None:
    create_topic(shared_cluster.bootstrap, unique, PARTITIONS)
    silent = producer(shared_cluster, unique, transaction_timeout_ms=1_000)
    other = producer(shared_cluster, f"{unique}-2")
    silent.begin_transaction()
    send(silent, unique, "silent")
    other.begin_transaction()
    send(other, unique, "other")
    other.commit_transaction(TIMEOUT_S)
    wait_until(lambda: read(shared_cluster, unique) == ["other"], TIMEOUT_S)
    with pytest.raises(confluent_kafka.KafkaException) as caught:
        silent.commit_transaction(TIMEOUT_S)
    assert caught.value.args[0].fatal() or caught.value.args[0].txn_requires_abort()


def test_offsets_are_visible_with_the_records(shared_cluster: Cluster, unique: str) -> None:
    create_topic(shared_cluster.bootstrap, unique, PARTITIONS)
    made = producer(shared_cluster, unique)
    at = TopicPartition(unique, 0)
    with consumer(shared_cluster, unique) as member:
        member.subscribe([unique])
        wait_until(lambda: member.poll(0.1) is not None or member.assignment(), TIMEOUT_S)
        for offset, is_commit in ((5, False), (7, True)):
            made.begin_transaction()
            send(made, unique, f"{offset}")
            position = [TopicPartition(unique, 0, offset)]
            made.send_offsets_to_transaction(position, member.consumer_group_metadata(), TIMEOUT_S)
            if is_commit:
                # Who asks for stable offsets waits until it is decided.
                with pytest.raises(confluent_kafka.KafkaException) as caught:
                    member.committed([at], 1)
                assert caught.value.args[0].code() == confluent_kafka.KafkaError._TIMED_OUT
                made.commit_transaction(TIMEOUT_S)
            else:
                made.abort_transaction(TIMEOUT_S)
                assert member.committed([at], TIMEOUT_S)[0].offset < 0
        assert member.committed([at], TIMEOUT_S)[0].offset == 7


def test_a_hundred_partitions_and_a_large_record_in_one_transaction(
    shared_cluster: Cluster, unique: str
) -> None:
    create_topic(shared_cluster.bootstrap, unique, 100)
    made = producer(shared_cluster, unique)
    for is_commit in (False, True):
        made.begin_transaction()
        for index in range(100):
            made.produce(unique, bytes(900_000 if index == 50 else 10), partition=index)
        assert made.flush(TIMEOUT_S) == 0
        if is_commit:
            made.commit_transaction(TIMEOUT_S)
        else:
            made.abort_transaction(TIMEOUT_S)
    with consumer(shared_cluster, f"{unique}-reader", isolation_level="read_committed") as reader:
        reader.assign([TopicPartition(unique, index, 0) for index in range(100)])
        # The answer to a commit comes with the decision: markers may be written a moment later.
        seen: dict[int, int] = {}
        while sum(seen.values()) < 100:
            message = reader.poll(TIMEOUT_S)
            assert message is not None
            if message.error() is None:
                seen[message.partition()] = seen.get(message.partition(), 0) + 1
    assert seen == dict.fromkeys(range(100), 1)
