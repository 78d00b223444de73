"""The client on real brokers, by all its drivers: blocking, trio and asyncio.

On raftmq, and with the marker `kafka` on Apache Kafka; what holds on one must hold on the other,
and what one driver does, all do.
"""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from raftmq.codec import Codec
from raftmq.errors import ErrorCode
from raftmq.types import TopicPartition
from raftmq_client import BrokerError, Outcome, ResourceType, UndeliveredError, UsageError
from tests.client.conftest import Fragile
from tests.client.drivers import Driver
from tests.live.harness import wait_until

pytestmark = [pytest.mark.live, pytest.mark.slow]


def keys(topic: str) -> list[TopicPartition]:
    return [TopicPartition(topic, partition) for partition in range(4)]


def read_all(
    driver: Driver, bootstrap: str, topic: str, count: int
) -> list[tuple[int, int, bytes | None]]:
    found = []
    with driver.consumer(bootstrap) as consumer:
        consumer.assign(dict.fromkeys(keys(topic), 0))
        while len(found) < count:
            records = consumer.poll(10)
            assert records, f"only {len(found)} of {count}"
            found += [(record.partition, record.offset, record.value) for record in records]
    return found


@pytest.mark.parametrize(
    ("driver", "codec"),
    [*(("blocking", codec.name.lower()) for codec in Codec), ("trio", "zstd"), ("asyncio", "lz4")],
    indirect=["driver"],
)
def test_every_acknowledged_record_is_where_its_receipt_says(
    driver: Driver, bootstrap: str, topic: str, codec: str
) -> None:
    with driver.producer(bootstrap, compression=codec) as producer:
        sent = [
            (b"%d" % i, producer.send(topic, b"%d" % i, b"%d" % (i % 50))) for i in range(2_000)
        ]
    places = {
        (place.partition, place.offset, value)
        for value, receipt in sent
        for place in [receipt.result()]
    }
    assert set(read_all(driver, bootstrap, topic, len(sent))) == places


def test_headers_nulls_and_timestamps(driver: Driver, bootstrap: str, topic: str) -> None:
    with driver.producer(bootstrap) as producer:
        producer.send(topic, None, None, [("h", None), ("ü", b"\x00")], 0, 1_234).result(10)
    with driver.consumer(bootstrap) as consumer:
        consumer.assign({TopicPartition(topic, 0): 0})
        (record,) = consumer.poll(10)
        assert (record.offset, record.timestamp, record.key, record.value) == (0, 1_234, None, None)
        assert record.headers == (("h", None), ("ü", b"\x00"))


def test_offsets_by_time(driver: Driver, bootstrap: str, topic: str) -> None:
    key = TopicPartition(topic, 0)
    with driver.producer(bootstrap) as producer:
        for i in range(10):
            producer.send(topic, b"x", partition=0, timestamp=1_000 * i).result(10)
    with driver.admin(bootstrap) as admin:
        for asked, offset in ((-2, 0), (-1, 10), (4_500, 5), (0, 0), (99_000, -1), (-3, 9)):
            assert admin.list_offsets({key: asked})[key].offset == offset, asked


@pytest.mark.parametrize("assignor", ["range", "cooperative-sticky"])
def test_two_members_share_and_the_last_one_takes_over(
    driver: Driver, bootstrap: str, topic: str, assignor: str
) -> None:
    group = f"g-{topic}"
    with driver.producer(bootstrap) as producer:
        for i in range(400):
            producer.send(topic, b"%d" % i, partition=i % 4)
    seen: list[bytes | None] = []

    def member() -> Any:
        return driver.consumer(
            bootstrap,
            group=group,
            topics=[topic],
            reset="earliest",
            heartbeat_interval_ms=200,
            assignors=[assignor],
        )

    with member() as first, member() as second:
        deadline = time.monotonic() + 60
        while not (len(first.assignment) == len(second.assignment) == 2 and len(seen) >= 400):
            assert time.monotonic() < deadline, (first.assignment, second.assignment, len(seen))
            for consumer in (first, second):
                seen += [record.value for record in consumer.poll(0.05)]
        first.commit()  # `close` alone leaves what is in hand to whoever takes over
        first.close()
        while len(second.assignment) < 4:
            assert time.monotonic() < deadline
            seen += [record.value for record in second.poll(0.05)]
    assert set(seen) == {b"%d" % i for i in range(400)}
    with driver.admin(bootstrap) as admin:
        committed = admin.group_offsets(group)
        assert {key: item.offset for key, item in committed.items()} == dict.fromkeys(
            keys(topic), 100
        )
        assert admin.describe_group(group).state == "Empty"
        admin.delete_group(group)
        assert group not in [item.group for item in admin.list_groups()]


def test_trimmed_records_are_gone(driver: Driver, bootstrap: str, topic: str) -> None:
    key = TopicPartition(topic, 0)
    with driver.producer(bootstrap) as producer:
        for _ in range(10):
            producer.send(topic, b"x", partition=0)
    with driver.admin(bootstrap) as admin:
        assert admin.delete_records({key: 4}) == {key: 4}
    with driver.consumer(bootstrap, reset="earliest") as consumer:
        consumer.assign({key: 0})
        assert consumer.poll(10)[0].offset == 4


def test_refusals_have_kafkas_names(driver: Driver, bootstrap: str, topic: str) -> None:
    with driver.admin(bootstrap) as admin:
        for act, code in (
            (lambda: admin.create_topic(topic), ErrorCode.TOPIC_ALREADY_EXISTS),
            (lambda: admin.create_topic("a/b"), ErrorCode.INVALID_TOPIC_EXCEPTION),
            (lambda: admin.create_topic("c", 1, 99), ErrorCode.INVALID_REPLICATION_FACTOR),
            (lambda: admin.create_partitions(topic, 2), ErrorCode.INVALID_PARTITIONS),
            (lambda: admin.delete_topic("nope"), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ):
            with pytest.raises(BrokerError) as caught:
                act()
            assert caught.value.code is code
            assert caught.value.outcome is Outcome.FAILED


def test_a_partition_moves_and_there_is_no_move_to_cancel_then(
    driver: Driver, bootstrap: str
) -> None:
    topic = f"moved-{time.time_ns()}"
    key = TopicPartition(topic, 0)
    with driver.admin(bootstrap) as admin:
        admin.create_topic(topic, 1, 2)
        with driver.producer(bootstrap) as producer:
            producer.send(topic, b"x", partition=0).result(30)
        before = admin.topic(topic).partitions[0].replicas
        (third,) = {broker.node_id for broker in admin.brokers()} - set(before)
        target = (third, before[0])
        refused = admin.alter_partition_reassignments({key: [third]}, allow_factor_change=False)
        assert refused[key].code is ErrorCode.INVALID_REPLICATION_FACTOR
        assert admin.alter_partition_reassignments({key: target}) == {key: None}
        wait_until(lambda: not admin.list_partition_reassignments([key]), 60, "it has moved")
        wait_until(
            lambda: tuple(admin.topic(topic).partitions[0].replicas) == target, 30, "all know"
        )
        (again,) = admin.alter_partition_reassignments({key: None}).values()
        assert again.code is ErrorCode.NO_REASSIGNMENT_IN_PROGRESS
    assert read_all(driver, bootstrap, topic, 1) == [(0, 0, b"x")]


@pytest.mark.parametrize(
    ("driver", "how"),
    [("blocking", signal.SIGKILL), ("trio", signal.SIGSTOP), ("asyncio", signal.SIGKILL)],
    indirect=["driver"],
)
def test_a_leader_that_dies_or_freezes_costs_neither_order_nor_records(
    driver: Driver, fragile: Fragile, how: signal.Signals
) -> None:
    topic = f"killed-{time.time_ns()}"
    with driver.admin(fragile.bootstrap) as admin:
        admin.create_topic(topic, 4)
        with driver.producer(fragile.bootstrap) as producer:
            assert producer.partitions(topic) == 4
        leader = admin.topic(topic).partitions[0].leader
    with driver.producer(fragile.bootstrap) as producer:
        receipts: list[Any] = []
        for i in range(8_000):
            receipts.append(producer.send(topic, b"%08d" % i, partition=i % 4))
            if i == 2_000:
                receipts[0].result(20)
                fragile.signal(leader, how)
        producer.flush(60)
    assert {receipt.outcome for receipt in receipts} == {Outcome.OK}
    found = read_all(driver, fragile.bootstrap, topic, len(receipts))
    for partition in range(4):
        values = [value for p, _, value in found if p == partition]
        assert values == [b"%08d" % i for i in range(partition, 8_000, 4)]


def test_what_fails_unheard_is_raised_as_the_block_is_left(
    driver: Driver, bootstrap: str, topic: str
) -> None:
    """Real brokers refuse a batch for its size; its neighbors, and later records, are safe."""
    with driver.admin(bootstrap) as admin:
        admin.alter_configs(ResourceType.TOPIC, topic, {"max.message.bytes": "2000"})

    def use() -> None:
        with driver.producer(bootstrap) as producer:

            def is_refused() -> bool:
                receipt = producer.send(topic, b"x" * 3_000, partition=0)
                producer.flush()
                return receipt.outcome is Outcome.FAILED

            wait_until(is_refused, 30, "the leader knows the limit")
            with pytest.raises(UsageError):
                producer.send("no\udc80topic", b"x")
            assert producer.send(topic, b"y" * 50, partition=0).result(30).offset >= 0
            producer.send(topic, b"x" * 3_000, partition=0)

    with pytest.raises(UndeliveredError) as raised:
        use()
    assert (raised.value.failed, raised.value.unknown) == (1, 0)
