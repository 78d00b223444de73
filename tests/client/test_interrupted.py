"""Calls that are cancelled, interrupted or fail in a callback: what was begun is not forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from raftmq.types import TopicPartition
from raftmq_client import aio
from tests.client.drivers import Driver, Run
from tests.client.fake_broker import FakeBroker

BOTH = (TopicPartition("t", 0), TopicPartition("t", 1))
Told = list[tuple[str, tuple[TopicPartition, ...]]]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - tasks of the test and the broker's thread change it
        await anyio.sleep(0.001)


MEMBER = {"group": "g", "topics": ["t"], "reset": "earliest", "heartbeat_interval_ms": 2}


@pytest.mark.parametrize("which", ["gained", "lost"])
def test_a_poll_cancelled_in_a_callback_goes_on_with_the_next_one(
    broker: FakeBroker, run: Run, which: str
) -> None:
    told: Told = []
    hangs = [which]

    async def tell(what: str, partitions: tuple[TopicPartition, ...]) -> None:
        told.append((what, partitions))
        if what in hangs:
            hangs.remove(what)
            await anyio.sleep_forever()

    async def poll(count: int, consumer: aio.Consumer) -> None:
        while len(told) < count:
            await consumer.poll(0.01)

    async def body() -> None:
        async with aio.Consumer(
            broker.address,
            on_assigned=lambda partitions: tell("gained", partitions),
            on_revoked=lambda partitions: tell("lost", partitions),
            **MEMBER,  # type: ignore[arg-type]
        ) as consumer:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(poll, 10, consumer)
                    await until(lambda: bool(told))
                    if which == "lost":
                        broker.fault(ApiKey.HEARTBEAT, "refuse", ErrorCode.REBALANCE_IN_PROGRESS)
                    await until(lambda: not hangs)
                    scope.cancel()
            before = len(told)
            assert told[-1] == (which, BOTH)
            await poll(before + (1 if which == "gained" else 2), consumer)
            assert told[before:] == [(which, BOTH), ("gained", BOTH)][: len(told) - before]
            assert consumer.assignment == BOTH

    run(body)


class Interrupt(BaseException):
    """As KeyboardInterrupt is, which pytest keeps for itself."""


def poll_until(condition: Callable[[], bool], consumer: Any) -> None:
    while not condition():
        consumer.poll(0.01)


def lose_and_raise(broker: FakeBroker, driver: Driver, error: type[BaseException]) -> list[str]:
    """What a member is told whose `on_revoked` raises once."""
    told: list[str] = []

    def lose(_partitions: object) -> None:
        told.append("lost")
        if len(told) == 2:
            raise error

    with driver.consumer(
        broker.address, on_assigned=lambda _: told.append("gained"), on_revoked=lose, **MEMBER
    ) as consumer:
        while not told:
            consumer.poll(0.01)
        broker.fault(ApiKey.HEARTBEAT, "refuse", ErrorCode.REBALANCE_IN_PROGRESS)
        with pytest.raises(error):
            poll_until(lambda: len(told) > 2, consumer)
        poll_until(lambda: told[-1] == "gained", consumer)
        assert consumer.assignment == BOTH
        return [*told]


def test_a_callback_that_raises_does_not_keep_a_member_from_its_group(
    broker: FakeBroker, driver: Driver
) -> None:
    assert lose_and_raise(broker, driver, ZeroDivisionError) == ["gained", "lost", "gained"]


def test_an_interrupted_callback_is_called_again(broker: FakeBroker) -> None:
    told = lose_and_raise(broker, Driver("blocking", None), Interrupt)
    assert told == ["gained", "lost", "lost", "gained"]


def test_a_member_whose_callback_raises_at_the_end_still_leaves(
    broker: FakeBroker, driver: Driver
) -> None:
    def fail(_partitions: object) -> None:
        raise ZeroDivisionError

    def poll_once() -> None:
        with driver.consumer(broker.address, on_revoked=fail, **MEMBER) as consumer:
            while not consumer.assignment:
                consumer.poll(0.01)

    with pytest.raises(ZeroDivisionError):
        poll_once()
    assert broker.wait_for(ApiKey.LEAVE_GROUP)


def test_a_member_whose_end_is_cancelled_still_leaves(broker: FakeBroker, run: Run) -> None:
    held = broker.fault(ApiKey.OFFSET_COMMIT, "hold")

    async def body() -> None:
        async with aio.Producer(broker.address) as producer:
            await producer.send("t", b"x", partition=0)

        async def cancel_when_held(scope: anyio.CancelScope) -> None:
            await until(held.was_met.is_set)
            scope.cancel()

        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as scope:
                tasks.start_soon(cancel_when_held, scope)
                settings = {**MEMBER, "heartbeat_interval_ms": 3_000}  # what is held holds those up
                async with aio.Consumer(broker.address, **settings) as consumer:  # type: ignore[arg-type]
                    assert await consumer.poll(20)
            assert scope.cancelled_caught

    run(body)
    assert broker.wait_for(ApiKey.OFFSET_COMMIT)
    assert broker.wait_for(ApiKey.LEAVE_GROUP)


def test_a_poll_that_waits_for_long_is_a_poll(broker: FakeBroker, driver: Driver) -> None:
    with driver.consumer(broker.address, max_poll_interval_ms=1_000, **MEMBER) as consumer:
        for seconds in (1.5, 0.0):
            assert consumer.poll(seconds) == []  # a PollIntervalError, were the first one none
        assert broker.count(ApiKey.LEAVE_GROUP) == 0
