"""What is committed is what the application has finished with, however a consumer ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from raftmq.types import TopicPartition
from raftmq_client import EARLIEST, LATEST, BrokerError, UsageError, aio
from tests.client.drivers import Driver, Run
from tests.client.fake_broker import FakeBroker

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
AT_LEAST = {"group": "g", "topics": "t", "delivery": "at_least_once"}
QUICK = {"heartbeat_interval_ms": 2}


class HandlerError(Exception):
    """What a handler raises."""


def fill(driver: Driver, broker: FakeBroker, count: int, partition: int = 0) -> None:
    with driver.producer(broker.address) as producer:
        for number in range(count):
            producer.send("t", b"%d" % number, partition=partition)


def until(condition: Callable[[], Any], act: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        act()


def iterated(consumer: Any) -> Iterator[Any]:
    yield from consumer


def polled(consumer: Any) -> Iterator[Any]:
    while True:
        yield from consumer.poll(1, 10)


@pytest.mark.parametrize("auto_commit_ms", [0, 5_000])
@pytest.mark.parametrize("leave", ["close", "block"])
@pytest.mark.parametrize(("how", "finished"), [(iterated, 3), (polled, 0)])
def test_an_exception_finishes_nothing_more(
    broker: FakeBroker,
    driver: Driver,
    how: Callable[[Any], Iterator[Any]],
    finished: int,
    leave: str,
    auto_commit_ms: int,
) -> None:
    fill(driver, broker, 10)
    handled: list[int] = []

    def handle() -> None:
        settings = {**AT_LEAST, "auto_commit_ms": auto_commit_ms}
        with driver.consumer(broker.address, **settings) as consumer:
            try:
                for message in how(consumer):
                    if message.offset == 3:
                        raise HandlerError
                    handled.append(message.offset)
            finally:
                if leave == "close":
                    consumer.close()

    with pytest.raises(HandlerError):
        handle()
    assert handled == [0, 1, 2]
    assert broker.groups["g"]["t", 0] == finished, "the three that were come back from, if any"
    with driver.consumer(broker.address, **AT_LEAST) as consumer:
        assert next(iter(consumer)).offset == finished


def test_a_block_that_ends_well_has_finished_what_it_had_in_hand(
    broker: FakeBroker, driver: Driver
) -> None:
    fill(driver, broker, 10)
    with driver.consumer(broker.address, **AT_LEAST) as consumer:
        for message in consumer:
            if message.offset == 3:
                break
    assert broker.groups["g"]["t", 0] == 4
    with driver.consumer(broker.address, **AT_LEAST) as consumer:
        assert [message.offset for message in consumer.poll(10, 2)] == [4, 5]
    assert broker.groups["g"]["t", 0] == 6


@pytest.mark.parametrize("what", ["message", "offset"])
def test_a_message_that_was_committed_is_finished(
    broker: FakeBroker, driver: Driver, what: str
) -> None:
    """And what comes at the end does not put the group back behind it."""
    fill(driver, broker, 10)

    def handle() -> None:
        with driver.consumer(broker.address, **AT_LEAST) as consumer:
            for message in consumer.poll(10, 10):
                if message.offset == 4:
                    raise HandlerError
                consumer.commit(message if what == "message" else {T0: message.offset + 1})

    with pytest.raises(HandlerError):
        handle()
    assert broker.groups["g"]["t", 0] == 4


def test_a_commit_in_the_callback_of_an_end_finishes_nothing(
    broker: FakeBroker, driver: Driver
) -> None:
    fill(driver, broker, 10)
    held: list[Any] = []

    def revoked(partitions: tuple[TopicPartition, ...]) -> Any:
        client = getattr(held[0], "_client", held[0])
        return client.commit() if T0 in partitions else None

    def handle() -> None:
        with driver.consumer(broker.address, on_revoked=revoked, **AT_LEAST) as consumer:
            held.append(consumer)
            for message in consumer:
                if message.offset == 3:
                    raise HandlerError

    with pytest.raises(HandlerError):
        handle()
    assert broker.groups["g"]["t", 0] == 3


def test_a_rebalance_commits_what_was_finished_before_it(
    broker: FakeBroker, driver: Driver
) -> None:
    fill(driver, broker, 10)
    told: list[int] = []

    def revoked(_: object) -> None:
        told.append(broker.groups["g"]["t", 0])

    with driver.consumer(broker.address, on_revoked=revoked, **AT_LEAST, **QUICK) as consumer:
        assert len(consumer.poll(10, 4)) == 4
        broker.fault(ApiKey.HEARTBEAT, "refuse", ErrorCode.REBALANCE_IN_PROGRESS)
        until(lambda: told, lambda: consumer.poll(0.01, 1))
        assert told[0] >= 4
        consumer.close()


def test_a_pause_or_a_seek_elsewhere_leaves_what_is_in_hand_in_hand(
    broker: FakeBroker, driver: Driver
) -> None:
    fill(driver, broker, 3)
    fill(driver, broker, 3, partition=1)

    def handle() -> None:
        with driver.consumer(broker.address, **AT_LEAST) as consumer:
            for message in consumer:
                other = T1 if message.partition == 0 else T0
                consumer.pause(other)
                consumer.seek(other, 1)
                raise HandlerError

    with pytest.raises(HandlerError):
        handle()
    saved = broker.groups["g"]
    assert sorted(saved.values()) == [0, 1], "0 of what was in hand, 1 by the seek's own word"


def test_a_consumer_that_is_cancelled_commits_what_was_finished(
    broker: FakeBroker, run: Run
) -> None:
    async def body() -> None:
        async with aio.Producer(broker.address) as producer:
            for _ in range(5):
                await producer.send("t", b"x", partition=0)
        with anyio.CancelScope() as scope:
            async with aio.Consumer(broker.address, **AT_LEAST) as consumer:  # type: ignore[arg-type]
                async for message in consumer:
                    if message.offset == 3:
                        scope.cancel()
                        await anyio.sleep_forever()
        assert scope.cancelled_caught

    run(body)
    assert broker.wait_for(ApiKey.LEAVE_GROUP), "which is sent behind the commit"
    assert broker.groups["g"]["t", 0] == 3


def test_what_is_finished_is_committed_in_time_while_nothing_comes(
    broker: FakeBroker, driver: Driver
) -> None:
    fill(driver, broker, 3)
    settings = {**AT_LEAST, "auto_commit_ms": 300}
    with driver.consumer(broker.address, **settings) as consumer:
        consumer.poll(10)
        assert consumer.poll(1.5) == []
        assert broker.groups["g"]["t", 0] == 3, "one long poll, and its commit was due within it"


# Positions that a reset chose.


@pytest.mark.parametrize("delivery", [None, "at_most_once"])
def test_a_member_that_stood_at_the_end_comes_back_to_it(
    broker: FakeBroker, driver: Driver, delivery: str | None
) -> None:
    fill(driver, broker, 2)
    settings = {"group": "g", "topics": "t", "reset": "latest", "delivery": delivery}
    with driver.consumer(broker.address, **settings) as consumer:
        until(lambda: consumer.assignment, lambda: consumer.poll(0.1))
        until(lambda: consumer.position(T0) == 2, lambda: consumer.poll(0.1))
    assert broker.groups["g"] == {("t", 0): 2, ("t", 1): 0}
    fill(driver, broker, 3)
    with driver.consumer(broker.address, **settings) as consumer:
        assert [message.offset for message in consumer.poll(10)] == [2, 3, 4]


def test_the_first_records_behind_a_reset_are_not_passed_over(
    broker: FakeBroker, driver: Driver
) -> None:
    fill(driver, broker, 2)

    def handle() -> None:
        with driver.consumer(broker.address, group="g", topics="t") as consumer:
            until(lambda: T0 in consumer.assignment, lambda: consumer.poll(0.1))
            until(lambda: consumer.position(T0) == 2, lambda: consumer.poll(0.1))
            fill(driver, broker, 3)
            assert consumer.poll(10)
            raise HandlerError

    with pytest.raises(HandlerError):
        handle()
    assert broker.groups["g"]["t", 0] == 2
    with driver.consumer(broker.address, group="g", topics="t") as consumer:
        assert [message.offset for message in consumer.poll(10)] == [2, 3, 4]


# Seeking and assigning.


@pytest.mark.parametrize("way", ["seek", "assign"])
@pytest.mark.parametrize(("where", "first"), [(EARLIEST, 1), (LATEST, 4)])
@pytest.mark.parametrize("reset", ["none", "latest", "earliest"])
def test_earliest_and_latest_are_places(
    broker: FakeBroker, driver: Driver, way: str, where: int, first: int, reset: str
) -> None:
    fill(driver, broker, 4)
    broker.logs["t", 0].start = 1
    with driver.consumer(broker.address, group="g", reset=reset) as consumer:
        consumer.assign({T0: where if way == "assign" else 2})
        if way == "seek":
            consumer.seek(T0, where)
        until(lambda: consumer.position(T0) == first, lambda: time.sleep(0.001))
        consumer.commit()
    assert broker.groups["g"]["t", 0] == first
    assert all(offset >= 0 for _, offsets in broker.commits for offset in offsets.values())


@pytest.mark.parametrize("offset", [-3, -4, True, 1.0, "1", 1 << 63], ids=repr)
def test_what_is_no_offset_is_refused_in_the_call(
    broker: FakeBroker, driver: Driver, offset: Any
) -> None:
    with driver.consumer(broker.address, group="g") as consumer:
        consumer.assign([T0])
        for call in (
            lambda: consumer.seek(T0, offset),
            lambda: consumer.assign({T0: offset}),
            lambda: consumer.commit({T0: offset}),
        ):
            with pytest.raises(UsageError, match="offset"):
                call()
        with pytest.raises(UsageError, match="offset"):
            consumer.commit({T0: EARLIEST})
        assert consumer.assignment == (T0,)
    assert broker.commits == []


@pytest.mark.parametrize(
    "key",
    [
        ("t", 0),
        "t",
        TopicPartition("t", -1),
        TopicPartition("t", True),
        TopicPartition("\ud800", 0),
    ],
    ids=ascii,
)
def test_what_is_no_partition_is_refused_in_the_call(
    broker: FakeBroker, driver: Driver, key: Any
) -> None:
    with driver.consumer(broker.address, group="g") as consumer:
        with pytest.raises(UsageError):
            consumer.assign([key])
        with pytest.raises(UsageError):
            consumer.commit({key: 1})
        with pytest.raises(UsageError):
            consumer.subscribe(["\ud800", "x" * 40_000])
        consumer.assign([T0])
        assert consumer.poll(0.1) == []


def test_what_is_no_longer_assigned_is_not_committed(broker: FakeBroker, driver: Driver) -> None:
    fill(driver, broker, 3)
    fill(driver, broker, 3, partition=1)
    with driver.consumer(
        broker.address, group="g", reset="earliest", auto_commit_ms=None
    ) as consumer:
        consumer.assign([T0])
        assert len(consumer.poll(10)) == 3
        consumer.assign([T1])
        broker.groups["g"] = {("t", 0): 3}  # somebody else has gone on
        assert len(consumer.poll(10)) == 3
        consumer.commit()
        assert broker.commits[-1][1] == {("t", 1): 3}
        consumer.assign([T0, T1])
        until(lambda: consumer.position(T0) == 3, lambda: consumer.poll(0.1))


def test_what_is_finished_is_committed_when_it_is_no_longer_assigned(
    broker: FakeBroker, driver: Driver
) -> None:
    fill(driver, broker, 3)
    with driver.consumer(broker.address, group="g", reset="earliest") as consumer:
        consumer.assign([T0])
        assert len(consumer.poll(10, 2)) == 2
        assert len(consumer.poll(10, 2)) == 1
        consumer.assign([T1])
        until(lambda: ("t", 0) in broker.groups.get("g", {}), lambda: consumer.poll(0.01))
        assert broker.groups["g"]["t", 0] == 2, "the third is in hand"


@pytest.mark.parametrize("count", [0, -1, True, None, "5"], ids=repr)
def test_a_poll_of_no_records_is_refused(broker: FakeBroker, driver: Driver, count: Any) -> None:
    with driver.consumer(broker.address) as consumer:
        consumer.assign({T0: 0})
        with pytest.raises(UsageError, match="records_max"):
            consumer.poll(0.1, count)


# Members that were put out.


@pytest.mark.parametrize("code", [ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION])
def test_a_member_that_was_put_out_while_it_gives_up_has_lost(
    broker: FakeBroker, driver: Driver, code: ErrorCode
) -> None:
    fill(driver, broker, 5)
    told: list[str] = []
    callbacks = {
        "on_revoked": lambda _: told.append("revoked"),
        "on_lost": lambda _: told.append("lost"),
    }
    with driver.consumer(broker.address, **callbacks, **AT_LEAST, **QUICK) as consumer:
        assert consumer.poll(10, 3)
        broker.fault(ApiKey.HEARTBEAT, "refuse", ErrorCode.REBALANCE_IN_PROGRESS)
        put_out = broker.fault(ApiKey.HEARTBEAT, "refuse", code)
        assert put_out.was_met.wait(20)  # while the application is busy with its three
        until(lambda: consumer.generation == -1, lambda: time.sleep(0.001))
        broker.groups["g"] = {("t", 0): 5}  # another member has gone on, and left
        until(lambda: told, lambda: consumer.poll(0.01))
        assert told == ["lost"]
    assert all(generation != -1 for generation, _ in broker.commits)
    assert broker.groups["g"]["t", 0] == 5


def test_a_member_that_was_put_out_commits_nothing(broker: FakeBroker, driver: Driver) -> None:
    fill(driver, broker, 5)
    with driver.consumer(broker.address, **AT_LEAST, **QUICK) as consumer:
        (message,) = consumer.poll(10, 1)
        broker.fault(ApiKey.HEARTBEAT, "refuse", ErrorCode.UNKNOWN_MEMBER_ID)
        until(lambda: consumer.generation == -1, lambda: time.sleep(0.001))
        for what in (None, message, {T0: 1}):
            with pytest.raises(BrokerError, match="ILLEGAL_GENERATION"):
                consumer.commit(what)
        consumer.close()
    assert broker.commits == []


def test_a_group_that_cannot_be_used_is_told_by_every_call(
    broker: FakeBroker, driver: Driver
) -> None:
    broker.fault(ApiKey.JOIN_GROUP, "refuse", ErrorCode.GROUP_AUTHORIZATION_FAILED)
    # The first answer gives a member id, whatever was refused in it.
    broker.fault(ApiKey.JOIN_GROUP, "refuse", ErrorCode.GROUP_AUTHORIZATION_FAILED)
    seen = []
    with driver.consumer(broker.address, **AT_LEAST) as consumer:
        for call in (
            lambda: consumer.poll(20),
            lambda: consumer.poll(20),
            lambda: next(iter(consumer)),
            consumer.commit,
            lambda: consumer.commit({T0: 1}),
            consumer.committed,
            lambda: consumer.position(T0),
            lambda: consumer.seek(T0, 0),
        ):
            with pytest.raises(BrokerError, match="GROUP_AUTHORIZATION_FAILED") as caught:
                call()
            seen.append(caught.value)
        assert len({id(error) for error in seen}) == len(seen), "each has its own traceback"
        consumer.subscribe("t")
        fill(driver, broker, 1)
        assert len(consumer.poll(20)) == 1, "other topics, or the same, begin anew"
    assert broker.commits[-1][0] == 1
