"""Transactions by all drivers against a scripted broker: lost and late answers, blocks, ends."""

from __future__ import annotations

import time
from typing import Any

import anyio
import pytest

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from raftmq.types import TopicPartition
from raftmq_client import (
    Admin,
    EndUnknownError,
    FencedError,
    MustAbortError,
    Outcome,
    TransactionError,
    TransactionHandle,
    UsageError,
    aio,
    blocking,
)
from tests.client.drivers import Driver, Run
from tests.client.fake_broker import FakeBroker

ID = {"transactional_id": "x"}


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def broker(broker: FakeBroker, request: pytest.FixtureRequest) -> FakeBroker:
    broker.transaction_version = request.param
    return broker


def test_what_a_commit_says_and_costs(broker: FakeBroker, driver: Driver) -> None:
    with driver.producer(broker.address, **ID) as producer:
        for number in range(3):
            tx = driver.begin(producer)
            receipt = tx.send("t", b"%d" % number, partition=0)
            receipt.result(20)
            tx.abort() if number == 1 else tx.commit()
            assert receipt.outcome is Outcome.OK
    assert [committed for _, committed in broker.ends] == [True, False, True]
    assert broker.count(ApiKey.FIND_COORDINATOR) == 1
    assert broker.count(ApiKey.ADD_PARTITIONS_TO_TXN) == (2 - broker.transaction_version) * 3


@pytest.mark.parametrize("how", ["drop", "drop after"])
def test_a_commit_whose_answer_is_lost_is_asked_for_again(
    broker: FakeBroker, driver: Driver, how: str
) -> None:
    with driver.producer(broker.address, **ID) as producer:
        tx = driver.begin(producer)
        tx.send("t", b"x", partition=0)
        broker.fault(ApiKey.END_TXN, how)
        tx.commit()
        assert broker.count(ApiKey.END_TXN) == 2
        tx.commit()  # again: the same word, and nothing is asked
        assert broker.count(ApiKey.END_TXN) == 2


def test_a_commit_without_an_answer_in_time_is_unknown_and_told_later(
    broker: FakeBroker, driver: Driver
) -> None:
    with driver.producer(broker.address, **ID, request_timeout_ms=1_000) as producer:
        tx = driver.begin(producer)
        tx.send("t", b"x", partition=0).result(20)
        held = broker.fault(ApiKey.END_TXN, "hold")
        with pytest.raises(EndUnknownError) as caught:
            tx.commit(timeout=0.3)
        assert held.was_met.wait(20)
        error = caught.value
        assert (error.outcome, error.advice, error.retriable) == (Outcome.UNKNOWN, "retry", True)
        with pytest.raises(UsageError, match="may stand"):
            tx.abort()
        with pytest.raises(UsageError, match="nobody knows"):
            driver.begin(producer)
        tx.commit()
        driver.begin(producer).abort()
    assert broker.ends[0][1] is True


def test_a_handle_is_ended_however_often_answers_are_lost(
    broker: FakeBroker, driver: Driver
) -> None:
    with driver.producer(broker.address, **ID) as producer:
        tx = driver.begin(producer)
        tx.send("t", b"x", partition=0)
        handle = producer.detach()
        with pytest.raises(UsageError, match="another process"):
            driver.begin(producer)
    assert broker.ends == []
    assert abs(handle.deadline_ms - time.time() * 1000 - 60_000) < 30_000
    with driver.admin(broker.address) as admin:
        broker.fault(ApiKey.END_TXN, "drop")
        broker.fault(ApiKey.END_TXN, "drop after")
        broker.fault(ApiKey.END_TXN, "refuse", ErrorCode.CONCURRENT_TRANSACTIONS)
        admin.end_transaction(handle, commit=True)
        assert {committed for _, committed in broker.ends} == {True}
        for code, kind in (
            (ErrorCode.PRODUCER_FENCED, FencedError),
            (ErrorCode.INVALID_PRODUCER_ID_MAPPING, FencedError),
            (ErrorCode.INVALID_TXN_STATE, TransactionError),
        ):
            broker.fault(ApiKey.END_TXN, "refuse", code)
            with pytest.raises(kind):
                admin.end_transaction(handle, commit=True)
        asked = broker.count(ApiKey.END_TXN)
        empty = TransactionHandle("x", 1, 1, 2, 0, is_empty=True)
        admin.end_transaction(empty, commit=True)
        assert broker.count(ApiKey.END_TXN) == asked


def test_an_end_by_handle_that_nobody_answers_is_unknown(broker: FakeBroker) -> None:
    broker.fault(ApiKey.END_TXN, "hold")
    with Admin(broker.address, timeout_ms=1_000) as admin, pytest.raises(EndUnknownError):
        admin.end_transaction(TransactionHandle("x", 77, 0, 1, 0), commit=True)


def test_a_closed_producer_aborts(broker: FakeBroker, driver: Driver) -> None:
    with driver.producer(broker.address, **ID) as producer:
        tx = driver.begin(producer)
        tx.send("t", b"x", partition=0).result(20)
    assert [committed for _, committed in broker.ends] == [False]


def fail_in_block(producer: blocking.Producer, kind: type[BaseException]) -> None:
    with producer.transaction() as tx:
        tx.send("t", b"x", partition=0).result(20)
        raise kind


async def fail_in_async_block(producer: aio.Producer) -> None:
    async with producer.transaction() as tx:
        await (await tx.send("t", b"x", partition=0))
        raise ZeroDivisionError


def test_errors_of_a_block_abort_and_are_raised_as_they_are(broker: FakeBroker) -> None:
    with blocking.Producer(broker.address, **ID) as producer:
        for kind in (ZeroDivisionError, KeyboardInterrupt):
            with pytest.raises(kind):
                fail_in_block(producer, kind)
        with producer.transaction() as tx:
            tx.send("t", b"x", partition=0).result(20)
        with producer.transaction() as tx:
            tx.send("t", b"x", partition=0).result(20)
            tx.abort()
    assert [committed for _, committed in broker.ends] == [False, False, True, False]


def test_a_commit_that_cannot_be_aborts_as_the_block_is_left(broker: FakeBroker) -> None:
    with blocking.Producer(broker.address, **ID) as producer:
        broker.fault(ApiKey.PRODUCE, "refuse", ErrorCode.INVALID_RECORD)
        with pytest.raises(MustAbortError, match="INVALID_RECORD"), producer.transaction() as tx:
            tx.send("t", b"x", partition=0)
        with producer.transaction() as tx:
            tx.send("t", b"x", partition=0)
    assert broker.ends[-1][1] is True


def test_async_blocks(broker: FakeBroker, run: Run) -> None:
    async def body() -> None:
        async with aio.Producer(broker.address, **ID) as producer:
            async with producer.transaction() as tx:
                await tx.send("t", b"x", partition=0)
            with pytest.raises(ZeroDivisionError):
                await fail_in_async_block(producer)
            with anyio.CancelScope() as scope:
                async with producer.transaction() as tx:
                    await (await tx.send("t", b"x", partition=0))
                    scope.cancel()
                    await anyio.sleep_forever()
            async with producer.transaction() as tx:  # waits until that is aborted
                await tx.send("t", b"x", partition=0)

    run(body)
    assert [committed for _, committed in broker.ends] == [True, False, False, True]


def test_a_cancelled_producer_asks_for_the_abort_at_once(broker: FakeBroker, run: Run) -> None:
    async def body() -> None:
        with anyio.CancelScope() as scope:
            async with aio.Producer(broker.address, **ID) as producer:
                tx = await producer.begin()
                await (await tx.send("t", b"x", partition=0))
                scope.cancel()
                await anyio.sleep_forever()
        await anyio.to_thread.run_sync(broker.wait_for, ApiKey.END_TXN)

    run(body)
    assert broker.count(ApiKey.END_TXN) == 1


def consumer_of(driver: Driver, broker: FakeBroker) -> Any:
    return driver.consumer(broker.address, topics=["t"], group="g", delivery="exactly_once")


def values(records: list[Any]) -> list[bytes]:
    return [record.value for record in records]


def fill(broker: FakeBroker) -> None:
    with blocking.Producer(broker.address) as producer:
        for number in range(6):
            producer.send("t", b"%d" % number, partition=0)


def test_positions_go_along_and_an_abort_takes_the_consumer_back(
    broker: FakeBroker, driver: Driver
) -> None:
    fill(broker)
    broker.make_topic("made", 1)
    key = TopicPartition("t", 0)
    with driver.producer(broker.address, **ID) as producer, consumer_of(driver, broker) as consumer:
        found: list[bytes] = []
        for number in range(4):
            tx = driver.begin(producer, consumer)
            records: list[Any] = []
            while not records:
                records = consumer.poll(1.0, 2)
            if number % 2 == 0:
                tx.send("made", b"made", partition=0)
                tx.abort()
            else:
                tx.commit()
                broker.groups.setdefault("g", {})["t", 0] = records[-1].offset + 1
                found += values(records)
        assert found == [b"0", b"1", b"2", b"3"]
        sent = [offsets["t", 0] for _, _, offsets in broker.transactional_offsets]
        assert sent == [2, 4]
        assert {generation for _, generation, _ in broker.transactional_offsets} == {1}
        assert consumer.position(key) == 4
        consumer.poll(20)
        assert consumer.position(key) == 6
        consumer.rewind()
        assert values(consumer.poll(10.0)) == [b"4", b"5"]
    assert broker.commits == [], "nothing is committed beside the transactions"


def test_a_fenced_producers_consumer_goes_back_for_the_next_one(
    broker: FakeBroker, driver: Driver
) -> None:
    fill(broker)
    with driver.producer(broker.address, **ID) as producer, consumer_of(driver, broker) as consumer:
        tx = driver.begin(producer, consumer)
        first: list[Any] = []
        while not first:
            first = consumer.poll(1.0, 3)
        tx.send("t", b"made", partition=1)
        broker.fault(ApiKey.END_TXN, "refuse", ErrorCode.PRODUCER_FENCED)
        broker.fault(ApiKey.INIT_PRODUCER_ID, "refuse", ErrorCode.PRODUCER_FENCED)
        with pytest.raises(FencedError):
            tx.commit()
        again: list[Any] = []
        while len(again) < 3:
            again += [record for record in consumer.poll(1.0, 3) if record.partition == 0]
        assert values(again) == values(first) == [b"0", b"1", b"2"]


def test_offsets_that_are_refused_doom_the_transaction(broker: FakeBroker, driver: Driver) -> None:
    with driver.producer(broker.address, **ID) as producer:
        tx = driver.begin(producer)
        broker.fault(ApiKey.TXN_OFFSET_COMMIT, "refuse", ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
        tx.commit_offsets("g", {TopicPartition("t", 0): 3})
        broker.fault(ApiKey.TXN_OFFSET_COMMIT, "refuse", ErrorCode.GROUP_AUTHORIZATION_FAILED)
        with pytest.raises(MustAbortError, match="GROUP_AUTHORIZATION_FAILED"):
            tx.commit_offsets("g", {TopicPartition("t", 0): 3})
        with pytest.raises(MustAbortError):
            tx.commit()
        tx.abort()
        for wrong in (None, {("t", 0): 1}, {TopicPartition("t", 0): -1}):
            tx = driver.begin(producer)
            with pytest.raises(UsageError):
                tx.commit_offsets("g", wrong)
            tx.abort()
        with pytest.raises(UsageError, match="no transaction is open"):
            tx.commit_offsets("g", {TopicPartition("t", 0): 3})


def test_an_older_transaction_of_the_producer_is_over(broker: FakeBroker, driver: Driver) -> None:
    with driver.producer(broker.address, **ID) as producer:
        old = driver.begin(producer)
        old.commit()
        new = driver.begin(producer)
        for use in (lambda: old.send("t", b"x"), old.commit, old.abort):
            with pytest.raises(UsageError, match="another one"):
                use()
        new.commit()
