"""What `delivery=` picks, what it refuses, and what each promise does when an answer is lost."""

from __future__ import annotations

from typing import Any

import pytest

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from raftmq.types import TopicPartition
from raftmq_client import BrokerError, ClientError, CorruptRecordsError, Outcome, UsageError
from raftmq_client.core.admin import READ_COMMITTED, READ_UNCOMMITTED
from raftmq_client.core.build import build_consumer, build_producer
from raftmq_client.core.fetcher import Reset
from raftmq_client.core.produce_requests import ACKS_ALL
from raftmq_client.options import consumer_options, producer_options
from tests.client.drivers import Driver
from tests.client.fake_broker import FakeBroker

KEY = TopicPartition("t", 0)


def fill(driver: Driver, broker: FakeBroker, count: int) -> None:
    with driver.producer(broker.address) as producer:
        for i in range(count):
            producer.send("t", b"%d" % i, partition=0)


def test_each_promise_picks_a_coherent_set() -> None:
    least = producer_options(delivery="at_least_once")
    assert (least.acks, least.is_idempotent, least.sends_once) == (ACKS_ALL, True, False)
    most = producer_options(delivery="at_most_once")
    assert (most.acks, most.is_idempotent, most.sends_once) == (ACKS_ALL, False, True)
    assert producer_options(delivery="at_most_once", acks=0).acks == 0
    keeps = consumer_options(delivery="at_least_once", group="g")
    assert (keeps.fetching.reset, keeps.auto_commit_ms) == (Reset.EARLIEST, 5_000)
    assert not keeps.commits_first
    risks = consumer_options(delivery="at_most_once", group="g")
    assert (risks.fetching.reset, risks.auto_commit_ms) == (Reset.LATEST, None)
    assert risks.commits_first
    once = producer_options(delivery="exactly_once", transactional_id="x")
    assert (once.acks, once.is_idempotent, once.transactional_id) == (ACKS_ALL, True, "x")
    sees = consumer_options(delivery="exactly_once", group="g")
    assert (sees.fetching.reset, sees.auto_commit_ms) == (Reset.EARLIEST, None)
    assert (sees.fetching.isolation, sees.commits_first) == (READ_COMMITTED, False)
    assert consumer_options().auto_commit_ms == 5_000
    assert consumer_options().fetching.isolation == READ_UNCOMMITTED


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"delivery": "once"}, ("at_least_once", "at_most_once", "exactly_once")),
        ({"delivery": "exactly_once"}, ("delivery='exactly_once'", "transactional_id")),
        ({"delivery": "exactly_once", "transactional_id": "x", "acks": 1}, ("acks=1", "exactly_")),
        ({"transactional_id": "x", "acks": 0}, ("acks=0", "transactional_id")),
        ({"transactional_id": "x", "idempotent": False}, ("idempotent=False", "transactional_id")),
        ({"transactional_id": "x", "delivery": "at_most_once"}, ("at_most_once", "transactional_")),
        ({"transactional_id": ""}, ("transactional_id",)),
        ({"transactional_id": "x", "transaction_timeout_ms": 0}, ("transaction_timeout_ms",)),
        ({"delivery": "at_least_once", "acks": 1}, ("acks=1", "delivery='at_least_once'")),
        ({"delivery": "at_least_once", "acks": "0"}, ("acks=0", "delivery='at_least_once'")),
        (
            {"delivery": "at_most_once", "idempotent": True},
            ("idempotent=True", "delivery='at_most_once'"),
        ),
        ({"acks": 1, "idempotent": True}, ("idempotent", "acks")),
        ({"acks": 2}, ("acks",)),
        ({"buffer_bytes": 1}, ("buffer_bytes", "buffer_memory")),
    ],
    ids=str,
)
def test_a_producers_contradictions_are_refused_by_name(
    settings: dict[str, Any], names: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as caught:
        build_producer("h:1", settings)  # type: ignore[arg-type]  # some are wrong on purpose
    assert all(name in str(caught.value) for name in names), str(caught.value)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"delivery": "once"}, ("at_least_once", "at_most_once", "exactly_once")),
        ({"delivery": "exactly_once"}, ("delivery='exactly_once'", "group")),
        (
            {"delivery": "exactly_once", "group": "g", "isolation": "read_uncommitted"},
            ("isolation='read_uncommitted'", "delivery='exactly_once'"),
        ),
        (
            {"delivery": "exactly_once", "group": "g", "auto_commit_ms": 1_000},
            ("auto_commit_ms", "delivery='exactly_once'"),
        ),
        (
            {"delivery": "exactly_once", "group": "g", "reset": "latest"},
            ("reset='latest'", "delivery='exactly_once'"),
        ),
        ({"delivery": "at_least_once"}, ("delivery='at_least_once'", "group")),
        ({"delivery": "at_most_once"}, ("delivery='at_most_once'", "group")),
        (
            {"delivery": "at_least_once", "group": "g", "reset": "latest"},
            ("reset='latest'", "delivery='at_least_once'"),
        ),
        (
            {"delivery": "at_most_once", "group": "g", "auto_commit_ms": 1_000},
            ("auto_commit_ms", "delivery='at_most_once'"),
        ),
        ({"groups": "g"}, ("groups", "group")),
    ],
    ids=str,
)
def test_a_consumers_contradictions_are_refused_by_name(
    settings: dict[str, Any], names: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as caught:
        build_consumer("h:1", (), settings)  # type: ignore[arg-type]
    assert all(name in str(caught.value) for name in names), str(caught.value)


def test_one_name_is_one_topic() -> None:
    assert build_consumer("h:1", "orders", {"group": "g"}).topics == ("orders",)


def test_at_most_once_sends_nothing_again_whose_answer_is_lost(
    broker: FakeBroker, driver: Driver
) -> None:
    with driver.producer(broker.address, delivery="at_most_once") as producer:
        producer.send("t", b"0", partition=0).result(10)
        broker.fault(ApiKey.PRODUCE, "drop after")
        lost = producer.send("t", b"1", partition=0)
        with pytest.raises(ClientError) as caught:
            lost.result(10)
        assert (caught.value.outcome, lost.outcome) == (Outcome.UNKNOWN, Outcome.UNKNOWN)
        assert producer.send("t", b"2", partition=0).result(10).offset == 2
    assert broker.count(ApiKey.PRODUCE) == 3, "the lost one was not sent again"


def test_at_most_once_sends_again_what_was_certainly_not_appended(
    broker: FakeBroker, driver: Driver
) -> None:
    broker.fault(ApiKey.PRODUCE, "refuse", ErrorCode.NOT_ENOUGH_REPLICAS)
    with driver.producer(broker.address, delivery="at_most_once") as producer:
        assert producer.send("t", b"0", partition=0).result(10).offset == 0
    assert broker.count(ApiKey.PRODUCE) == 2


@pytest.mark.parametrize(
    "code", [ErrorCode.ILLEGAL_GENERATION, ErrorCode.REBALANCE_IN_PROGRESS], ids=str
)
def test_a_group_that_went_on_is_no_error_of_at_most_once(
    broker: FakeBroker, driver: Driver, code: ErrorCode
) -> None:
    fill(driver, broker, 3)
    broker.fault(ApiKey.OFFSET_COMMIT, "refuse", code)
    with driver.consumer(
        broker.address, group="g", topics="t", reset="earliest", delivery="at_most_once"
    ) as consumer:
        values: list[bytes] = []
        while len(values) < 3:
            values += [record.value for record in consumer.poll(10)]
        assert values == [b"0", b"1", b"2"], "what could not be committed was not handed out"
    assert broker.groups["g"] == {("t", 0): 3, ("t", 1): 0}


def test_at_least_once_reads_again_what_was_not_come_back_for(
    broker: FakeBroker, driver: Driver
) -> None:
    fill(driver, broker, 4)

    def die() -> None:
        with driver.consumer(
            broker.address, group="g", topics="t", delivery="at_least_once", auto_commit_ms=0
        ) as consumer:
            assert [record.offset for record in consumer.poll(10, 2)] == [0, 1]
            assert [record.offset for record in consumer.poll(10, 1)] == [2]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        die()
    with driver.consumer(
        broker.address, group="g", topics="t", delivery="at_least_once"
    ) as consumer:
        again = consumer.poll(10)
        assert again[0].offset <= 2, "the one in hand is read again"
        assert again[-1].offset == 3


def test_a_seek_passes_over_a_damaged_batch(broker: FakeBroker, driver: Driver) -> None:
    fill(driver, broker, 3)
    damaged = bytearray(broker.logs["t", 0].batches[0])
    damaged[-1] ^= 1
    broker.logs["t", 0].batches[0] = bytes(damaged)
    fill(driver, broker, 1)
    with driver.consumer(broker.address) as consumer:
        consumer.assign({KEY: 0})
        with pytest.raises(CorruptRecordsError, match="t-0 at offset 0") as caught:
            consumer.poll(20)
        assert (caught.value.offset, caught.value.next_offset) == (0, 3)
        consumer.seek(KEY, caught.value.next_offset)
        assert [record.offset for record in consumer.poll(10)] == [3]


def test_a_code_that_nobody_knows_survives() -> None:
    error = BrokerError(9_999, "what is new", about="t-0")
    assert (error.number, error.code) == (9_999, ErrorCode.UNKNOWN_SERVER_ERROR)
    assert error.outcome is Outcome.UNKNOWN
    assert "error 9999" in str(error)
    known = BrokerError(ErrorCode.NOT_COORDINATOR)
    assert (known.number, known.code, known.retriable) == (16, ErrorCode.NOT_COORDINATOR, True)


def test_a_partition_that_is_newer_than_what_is_known_is_looked_for_first(
    broker: FakeBroker, driver: Driver
) -> None:
    with driver.producer(broker.address) as producer:
        producer.send("t", b"0", partition=0).result(10)
        broker.grow("t", 3)
        before = broker.count(ApiKey.METADATA)
        new = producer.send("t", b"1", partition=2)
        behind = producer.send("t", b"2", partition=0)
        assert new.result(10).partition == 2
        assert behind.result(10).offset == 1
        assert broker.count(ApiKey.METADATA) == before + 1
        missing = producer.send("t", b"3", partition=3)
        with pytest.raises(UsageError, match="partition"):
            missing.result(10)
        assert broker.count(ApiKey.METADATA) == before + 2, "asked once, then refused"


def test_a_consumer_reads_a_partition_that_is_newer_than_what_is_known(
    broker: FakeBroker, driver: Driver
) -> None:
    fill(driver, broker, 1)
    with driver.consumer(broker.address, reset="earliest") as consumer:
        consumer.assign([KEY])
        assert len(consumer.poll(10)) == 1
        broker.grow("t", 3)
        new = TopicPartition("t", 2)
        with driver.producer(broker.address) as producer:
            producer.send("t", b"new", partition=2).result(10)
        consumer.assign([new])
        assert [record.value for record in consumer.poll(10)] == [b"new"]
        assert consumer.offsets([new], -1)[new].offset == 1
