"""How a producer ends and flushes while others send: every receipt is settled, nobody waits."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from raftmq.records import NewRecord
from raftmq_client import (
    ClientError,
    Outcome,
    Receipt,
    SerializationError,
    UsageError,
    aio,
    blocking,
)
from tests.client.drivers import Driver, Run
from tests.client.fake_broker import FakeBroker
from tests.client.test_producer_core import World


def test_a_flush_waits_for_what_was_sent_before_it_alone() -> None:
    world = World(linger_ms=1_000_000.0)
    receipt = world.send(b"a")
    told: list[Receipt] = []
    receipt.listen(told.append)
    outstanding = world.core.outstanding()
    later = world.send(b"b")
    world.step()
    assert not outstanding.is_over()
    world.serve(world.calls.popleft())
    world.step()
    assert (receipt.outcome, later.outcome) == (Outcome.OK, None), "nothing lingers for it"
    assert not outstanding.is_over(), "who listens has not been told"
    assert world.core.listeners.take() == [receipt]
    world.core.listeners.told(1)
    assert outstanding.is_over()


def test_a_flush_waits_for_both_halves_of_a_batch_and_for_topics_that_nobody_knows() -> None:
    world = World(is_known=True)
    receipts = [world.send(b"x" * 30) for _ in range(2)]
    world.step()
    outstanding = world.core.outstanding()
    world.refuse(world.calls.popleft(), ErrorCode.MESSAGE_TOO_LARGE)
    world.later(100)
    world.serve(world.calls.popleft())
    world.step()
    assert [receipt.outcome for receipt in receipts] == [Outcome.OK, None]
    assert not outstanding.is_over()
    world.serve(world.calls.popleft())
    assert outstanding.is_over()
    waiting, _ = world.core.send("u", NewRecord(None, b"y", 1), None, None, world.now)
    outstanding = world.core.outstanding()
    assert not outstanding.is_over()
    waiting.fail(UsageError("no such topic"))
    assert outstanding.is_over()


def test_records_that_waited_for_metadata_do_not_linger_on() -> None:
    world = World(linger_ms=1_000_000.0)
    topics, world.metadata.topics = world.metadata.topics, {}
    receipt = world.send(b"x")
    world.core.hurry(receipt)
    world.metadata.topics = topics
    world.step()
    world.serve(world.calls.popleft())
    assert receipt.outcome is Outcome.OK


def test_a_flush_ends_while_another_task_goes_on_sending(broker: FakeBroker, run: Run) -> None:
    async def body() -> None:
        async with aio.Producer(broker.address) as producer:

            async def send_on() -> None:
                while True:
                    await producer.send("t", b"x" * 100, partition=0)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(send_on)
                receipt = await producer.send("t", b"y", partition=1)
                await producer.flush(20)
                assert receipt.outcome is Outcome.OK
                tasks.cancel_scope.cancel()

    run(body)


FULL = {"buffer_memory": 2_000, "linger_ms": 0, "max_block_ms": 9_000}
"""17 records of 100 bytes fill it, as the buffer counts."""


def test_a_send_that_waits_for_room_takes_nothing_from_a_producer_that_ends(
    broker: FakeBroker, run: Run
) -> None:
    refused: list[ClientError] = []

    async def body() -> None:
        async with aio.Producer(broker.address, **FULL) as producer:  # type: ignore[arg-type]
            broker.fault(ApiKey.PRODUCE, "hold")
            for _ in range(17):
                await producer.send("t", b"x" * 100, partition=0)

            async def send_one_more() -> None:
                try:
                    await producer.send("t", b"x" * 100, partition=0)
                except ClientError as error:
                    refused.append(error)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(send_one_more)
                await anyio.wait_all_tasks_blocked()
                await producer.close(flush=False)

    run(body)
    assert [type(error) for error in refused] == [UsageError]


def test_a_thread_that_waits_for_room_gives_nothing_to_a_producer_that_ends(
    broker: FakeBroker,
) -> None:
    outcomes: list[object] = []
    producer = blocking.Producer(broker.address, **FULL)  # type: ignore[arg-type]
    assert producer.partitions("t") == 2
    broker.fault(ApiKey.PRODUCE, "hold")
    for _ in range(17):
        producer.send("t", b"x" * 100, partition=0)
    waits = threading.Event()
    wait_for_room = producer._wait_for_room
    producer._wait_for_room = lambda topic: (waits.set(), wait_for_room(topic))[1]  # type: ignore[method-assign]

    def send_one_more() -> None:
        try:
            outcomes.append(producer.send("t", b"x" * 100, partition=0).outcome)
        except ClientError as error:
            outcomes.append(type(error))

    thread = threading.Thread(target=send_one_more)
    thread.start()
    assert waits.wait(20)
    producer.close(flush=False)
    thread.join(20)
    assert outcomes == [UsageError]


def test_everybody_is_told_though_one_listener_raises(
    broker: FakeBroker, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Receipt] = []

    def fail(_receipt: object) -> None:
        raise ZeroDivisionError

    async def wait(_receipt: object) -> None:
        raise AssertionError("nobody awaits it")

    with driver.producer(broker.address, linger_ms=50) as producer:
        producer.send("t", b"x", partition=0, on_delivery=fail)
        producer.send("t", b"x", partition=0, on_delivery=wait)
        producer.send("t", b"x", partition=9, on_delivery=fail)
        producer.send("t", b"x", partition=0, on_delivery=told.append)
        producer.flush(20)
        assert [receipt.outcome for receipt in told] == [Outcome.OK]
        assert producer.callback_errors == 3
        assert producer.send("t", b"y", partition=0).result(20).offset == 3
    records = [item for item in caplog.records if item.name == "raftmq_client.producer"]
    assert [item.getMessage()[:20] for item in records] == ["on_delivery raised, "] * 3
    assert "ZeroDivisionError" in caplog.text
    assert "plain function" in caplog.text


@pytest.mark.parametrize(
    "extras",
    [
        {"headers": [("h", "text")]},
        {"headers": [("h", 5)]},
        {"headers": [(b"h", b"x")]},
        {"headers": ["h"]},
        {"timestamp": "now"},
        {"timestamp": 1.5},
        {"timestamp": 1 << 63},
    ],
    ids=str,
)
def test_a_record_that_cannot_be_written_is_refused_and_costs_no_other(
    broker: FakeBroker, extras: dict[str, Any]
) -> None:
    with blocking.Producer(broker.address) as producer:
        with pytest.raises(SerializationError):
            producer.send("t", b"x", partition=0, **extras)
        assert producer.send("t", b"y", partition=0).result(20).offset == 0


@pytest.mark.parametrize("is_known", [True, False], ids=["known topic", "unknown topic"])
@pytest.mark.parametrize(("topic", "partition"), [("t", -1), ("t", "0"), (b"t", 0), ("", 0)])
def test_what_is_no_topic_or_partition_is_refused_at_once(
    topic: Any, partition: Any, is_known: bool
) -> None:
    world = World(is_known=is_known)
    with pytest.raises(UsageError, match=r"a (topic|partition) is a"):
        world.core.send(topic, NewRecord(None, b"v", 1), partition, None, world.now)
    assert world.core.pending == 0
    assert not list(world.core.calls(world.now))
