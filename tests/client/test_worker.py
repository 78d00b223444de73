"""Workers: what is done, retried or dead, and what is committed of it, however they end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from raftmq.types import TopicPartition
from raftmq_client import BrokerError, Consumer, ConsumerRecord, Producer, UsageError, Worker, aio
from tests.client.drivers import Run
from tests.client.fake_broker import FakeBroker

GROUP = {"group": "g", "topics": "t", "heartbeat_interval_ms": 2}
EXACTLY = {**GROUP, "delivery": "exactly_once", "transactional_id": "w"}


class HandlerError(Exception):
    """What a handler raises."""


@pytest.fixture
def broker(broker: FakeBroker) -> FakeBroker:
    for name in ("t.g", "t.g.retry", "t.g.dead", "out"):
        broker.make_topic(name, 1)
    with Producer(broker.address) as producer:
        for number in range(6):
            producer.send("t", b"%d" % number, partition=0)
    return broker


def saved(broker: FakeBroker) -> int | None:
    return broker.groups.get("g", {}).get(("t", 0))


def stored(broker: FakeBroker, topic: str) -> list[ConsumerRecord[bytes, bytes]]:
    """What is in the one partition of a topic."""
    place = TopicPartition(topic, 0)
    with Consumer(broker.address) as consumer:
        consumer.assign({place: 0})
        found: list[Any] = []
        while consumer.position(place) != broker.logs[topic, 0].end:
            found += consumer.poll(0.1)
        return found


def reasons(records: list[Any]) -> list[tuple[bytes, bytes | None]]:
    return [(r.value, dict(r.headers).get("__dlq.errors.message")) for r in records]


# ---- every driver ----


def test_what_returns_is_done_and_what_raises_is_retried(broker: FakeBroker, run: Run) -> None:
    async def body() -> None:
        async with aio.Worker(broker.address, **GROUP) as worker:
            async for message in worker:
                async with worker.handling(message):
                    if message.offset in (1, 3):
                        raise HandlerError(f"no {message.offset}")
                if message.offset == 4:
                    await worker.dead(message)  # it is done already
                    assert await worker.retry(message) is False
                if message.offset == 5:
                    worker.stop()

    run(body)
    assert saved(broker) == 6
    assert reasons(stored(broker, "t.g.retry")) == [
        (b"1", b"HandlerError: no 1"),
        (b"3", b"HandlerError: no 3"),
    ]
    assert stored(broker, "t.g.dead") == []


def test_the_blocking_one_does_the_same(broker: FakeBroker) -> None:
    def handle(message: ConsumerRecord) -> None:
        if message.offset == 1:
            raise HandlerError("no")
        if message.offset == 2:
            assert worker.dead(message, reason="never")
            assert worker.retry(message) is False, "it is settled"
        if message.offset == 5:
            worker.stop()

    with Worker(broker.address, **GROUP) as worker:
        worker.run(handle)
    assert saved(broker) == 6
    assert reasons(stored(broker, "t.g.retry")) == [(b"1", b"HandlerError: no")]
    assert reasons(stored(broker, "t.g.dead")) == [(b"2", b"never")]


def test_an_error_that_leaves_the_block_retries_its_message_and_is_raised(
    broker: FakeBroker, run: Run
) -> None:
    async def body() -> None:
        async with aio.Worker(broker.address, **GROUP) as worker:
            async for message in worker:
                if message.offset == 2:
                    raise HandlerError("left")

    with pytest.raises(HandlerError):
        run(body)
    assert saved(broker) == 3
    assert reasons(stored(broker, "t.g.retry")) == [(b"2", b"HandlerError: left")]


def test_a_blocking_block_does_too_and_break_has_done_it(broker: FakeBroker) -> None:
    def work() -> None:
        with Worker(broker.address, **GROUP) as worker:
            for message in worker:
                if message.offset == 2:
                    raise HandlerError("left")

    with pytest.raises(HandlerError):
        work()
    assert saved(broker) == 3
    with Worker(broker.address, **GROUP) as worker:
        for message in worker:
            if message.offset == 4:
                break
    assert saved(broker) == 5
    worker = Worker(broker.address, **GROUP)
    assert next(iter(worker)).offset == 5
    worker.close()
    assert saved(broker) == 5, "what is in hand at a close is not done"
    assert len(stored(broker, "t.g.retry")) == 1


def test_a_cancelled_worker_commits_what_is_done_and_retries_nothing(
    broker: FakeBroker, run: Run
) -> None:
    async def body() -> None:
        with anyio.CancelScope() as scope:
            async with aio.Worker(broker.address, **GROUP, commit_ms=1e6) as worker:
                async for message in worker:
                    if message.offset == 3:
                        scope.cancel()
                        await anyio.sleep_forever()

    run(body)
    assert broker.wait_for(ApiKey.LEAVE_GROUP)
    assert saved(broker) == 3
    assert stored(broker, "t.g.retry") == []


def test_positions_are_committed_in_order_whatever_is_done_first(
    broker: FakeBroker, run: Run
) -> None:
    together: list[int] = []

    async def body() -> None:
        gate, rest = anyio.Event(), anyio.Event()

        async def handle(message: ConsumerRecord) -> None:
            together.append(message.offset)
            if message.offset == 1:
                await gate.wait()
            elif message.offset == 5:
                rest.set()

        async with (
            aio.Worker(broker.address, **GROUP, commit_ms=0) as worker,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(functools.partial(worker.run, handle, in_flight_max=2))
            await rest.wait()
            assert await anyio.to_thread.run_sync(broker.wait_for, ApiKey.OFFSET_COMMIT)
            # It looks at what is to be committed before each poll.
            assert await anyio.to_thread.run_sync(broker.wait_for_more, ApiKey.FETCH, 2)
            assert saved(broker) == 1, "2 to 4 are done, and 1 is not"
            worker.stop()
            gate.set()

    run(body)
    assert together == [0, 1, 2, 3, 4, 5]
    assert saved(broker) == 6
    assert all(offsets.get(("t", 0), 0) in (0, 1, 6) for _, offsets in broker.commits)


def test_no_more_than_asked_for_are_in_flight(broker: FakeBroker, run: Run) -> None:
    most = 0

    async def body() -> None:
        now = 0

        async def handle(message: ConsumerRecord) -> None:
            nonlocal now, most
            now += 1
            most = max(most, now)
            await anyio.sleep(0.01)
            now -= 1
            if message.offset == 5:
                worker.stop()

        async with aio.Worker(broker.address, **GROUP) as worker:
            await worker.run(handle, in_flight_max=3)

    run(body)
    assert most == 3


def test_partitions_that_are_revoked_wait_for_what_is_in_hand(broker: FakeBroker, run: Run) -> None:
    """And are committed then; what comes after that belongs to the next reader."""
    seen: list[tuple[int, int | None]] = []

    async def body() -> None:
        async def handle(message: ConsumerRecord) -> None:
            if message.offset == 1 and not seen:
                broker.fault(ApiKey.HEARTBEAT, "refuse", ErrorCode.REBALANCE_IN_PROGRESS)
                joined = broker.count(ApiKey.JOIN_GROUP)
                await anyio.sleep(0.3)
                assert broker.count(ApiKey.JOIN_GROUP) == joined, "it is still waited for"
            seen.append((message.offset, saved(broker)))
            if message.offset == 5:
                worker.stop()

        async with aio.Worker(broker.address, **GROUP, commit_ms=1e6) as worker:
            await worker.run(handle, in_flight_max=2)

    run(body)
    assert sorted(offset for offset, _ in seen) == list(range(6)), "none comes twice"
    assert saved(broker) == 6


def test_what_was_revoked_meanwhile_is_neither_committed_nor_sent_on(
    broker: FakeBroker, run: Run
) -> None:
    async def body() -> None:
        again = anyio.Event()
        first: list[ConsumerRecord] = []

        async def handle(message: ConsumerRecord) -> None:
            if message.offset == 1 and not first:
                first.append(message)
                broker.fault(ApiKey.HEARTBEAT, "refuse", ErrorCode.REBALANCE_IN_PROGRESS)
                await again.wait()
                assert await worker.retry(message) is False
                raise HandlerError("late")  # is not retried either
            if message.offset == 1:
                again.set()
            if message.offset == 5 and again.is_set():
                worker.stop()

        settings = {**GROUP, "grace": 0.05, "commit_ms": 0}
        async with aio.Worker(broker.address, **settings) as worker:
            await worker.run(handle, in_flight_max=2)

    run(body)
    assert saved(broker) == 6
    assert stored(broker, "t.g.retry") == []


def test_what_cannot_be_read_is_dead_and_in_nobodys_way(broker: FakeBroker, run: Run) -> None:
    with Producer(broker.address) as producer:
        producer.send("t", b"{", partition=1).result()
        producer.send("t", b'{"a": 1}', partition=1).result()
    found: list[Any] = []

    async def body() -> None:
        settings = {**GROUP, "value_deserializer": "json"}
        async with aio.Worker(broker.address, **settings) as worker:
            async for message in worker:
                found.append(message.value)
                if message.partition == 1:
                    worker.stop()

    run(body)
    assert found[-1] == {"a": 1}
    ((value, why),) = reasons(stored(broker, "t.g.dead"))
    assert value == b"{"
    assert why is not None
    assert why.startswith(b"it cannot be read: ")


def test_a_retry_that_cannot_be_sent_ends_the_worker_and_commits_nothing_of_it(
    broker: FakeBroker, run: Run
) -> None:
    broker.fault(ApiKey.PRODUCE, "refuse", ErrorCode.INVALID_RECORD)

    async def body() -> None:
        async def handle(message: ConsumerRecord) -> None:
            if message.offset == 2:
                raise HandlerError("no")

        async with aio.Worker(broker.address, **GROUP) as worker:
            await worker.run(handle, in_flight_max=1)

    with pytest.raises(BrokerError, match="INVALID_RECORD"):
        run(body)
    assert saved(broker) == 2
    assert stored(broker, "t.g.retry") == [], "it is not tried a second time"


# ---- exactly once ----
# The fake broker notes what it is asked; what counts then, the live tests see.


def offsets_in_transactions(broker: FakeBroker) -> list[int]:
    return [offsets["t", 0] for _, _, offsets in broker.transactional_offsets]


def test_a_retry_and_its_position_are_one_transaction(broker: FakeBroker, run: Run) -> None:
    """What the failed attempt sent does not count."""

    async def body() -> None:
        async with aio.Worker(broker.address, **EXACTLY) as worker:
            async for message in worker:
                async with worker.handling(message):
                    await (await worker.transaction.send("out", message.value))
                    if message.offset == 2:
                        raise HandlerError("no")
                if message.offset == 5:
                    worker.stop()

    run(body)
    assert reasons(stored(broker, "t.g.retry")) == [(b"2", b"HandlerError: no")]
    assert [is_committed for _, is_committed in broker.ends] == [True, True, False, *[True] * 4]
    assert offsets_in_transactions(broker) == [1, 2, 3, 4, 5, 6]
    assert broker.commits == [], "but by transactions"


def test_blocking_exactly_once(broker: FakeBroker) -> None:
    with Worker(broker.address, **EXACTLY) as worker:
        for message in worker:
            with worker.handling(message):
                worker.transaction.send("out", message.value).result()
                if message.offset == 2:
                    worker.dead(message, reason="no")
                if message.offset == 5:
                    worker.stop()
        with pytest.raises(UsageError, match="exactly_once"):
            _ = worker.transaction
    assert reasons(stored(broker, "t.g.dead")) == [(b"2", b"no")]
    assert [is_committed for _, is_committed in broker.ends] == [True, True, False, *[True] * 4]
    assert offsets_in_transactions(broker) == [1, 2, 3, 4, 5, 6]


def test_a_transaction_that_must_be_aborted_brings_its_message_again(
    broker: FakeBroker, run: Run
) -> None:
    offsets: list[int] = []

    async def body() -> None:
        async with aio.Worker(broker.address, **EXACTLY) as worker:
            async for message in worker:
                offsets.append(message.offset)
                if len(offsets) == 1:
                    broker.fault(ApiKey.TXN_OFFSET_COMMIT, "refuse", ErrorCode.ILLEGAL_GENERATION)
                if message.offset == 5:
                    worker.stop()

    run(body)
    assert offsets == [0, 0, 1, 2, 3, 4, 5]
    assert [is_committed for _, is_committed in broker.ends][:2] == [False, True]
    assert offsets_in_transactions(broker) == [1, 2, 3, 4, 5, 6]


# ---- settings ----


@pytest.mark.parametrize(
    "wrong",
    [
        {"group": None},
        {"topics": ()},
        {"topics": "a b"},
        {"delivery": "at_most_once"},
        {"delivery": "exactly_once"},
        {"transactional_id": "w"},
        {"auto_commit_ms": 5},
        {"commit_ms": -1},
        {"commit_ms": "1"},
        {"reset": "latest"},
    ],
)
@pytest.mark.parametrize("make", [Worker, aio.Worker])
def test_settings_that_make_no_sense(make: Callable[..., Any], wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        make("127.0.0.1:1", **{"group": "g", "topics": "t", **wrong})
