"""The async driver on real sockets under trio and asyncio, against a broker that misbehaves."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

import anyio
import anyio.lowlevel
import pytest

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey, compile
from raftmq.types import TopicPartition
from raftmq_client import (
    BrokerError,
    BufferFullError,
    ClientError,
    ConsumerRecord,
    ForkedError,
    Outcome,
    RecordMetadata,
    TimedOutError,
    UsageError,
)
from raftmq_client.aio import Admin, Consumer, Producer, Receipt
from raftmq_client.core import warm_up
from tests.client.drivers import Run
from tests.client.fake_broker import FakeBroker

KEY = TopicPartition("t", 0)


def test_what_is_sent_is_read_back(broker: FakeBroker, run: Run) -> None:
    async def body() -> None:
        async with Producer(broker.address) as producer:
            receipt = await producer.send("t", b"v", b"k", [("h", b"1"), ("n", None)], 0, 1_000)
            assert await receipt == RecordMetadata("t", 0, 0, 1_000)
            assert (receipt.outcome, receipt.error) == (Outcome.OK, None)
            await producer.send("t", None, None, partition=0)
        async with Consumer(broker.address, reset="earliest") as consumer:
            consumer.assign([KEY])
            found = [message async for message in take(consumer, 2)]
            headers = (("h", b"1"), ("n", None))
            assert found[0] == ConsumerRecord("t", 0, 0, 1_000, b"k", b"v", headers, 0, 0)
            assert (found[1].offset, found[1].key, found[1].value) == (1, None, None)
            assert consumer.position(KEY) == 2

    run(body)


def test_codecs_are_compiled_beside_the_loop(
    broker: FakeBroker, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first use takes many milliseconds, in which the rest of a service would stand still."""
    on_the_loop: list[object] = []

    def watch(make: Callable[..., object]) -> Callable[..., object]:
        def watched(cache: object, *what: object) -> object:
            if threading.get_ident() == here and what[-1] in directions:
                on_the_loop.append(what)
            return make(cache, *what)

        return watched

    here, directions = threading.get_ident(), ("request", "response")
    for name in ("_make_encoder", "_make_decoder"):
        monkeypatch.setattr(compile, name, watch(getattr(compile, name)))
    for name in ("_request_encoders", "_response_decoders"):
        monkeypatch.setattr(compile, name, {})
    monkeypatch.setattr(warm_up, "_done", {})

    async def body() -> None:
        async with Producer(broker.address) as producer:
            await (await producer.send("t", b"v"))
        settings = {"group": "g", "topics": "t", "reset": "earliest"}
        async with Consumer(broker.address, **settings) as consumer:  # type: ignore[arg-type]
            assert [message.value async for message in take(consumer, 1)] == [b"v"]
            await consumer.commit()

    run(body)
    assert not on_the_loop, on_the_loop
    assert compile._request_encoders


async def until(condition: Callable[[], bool]) -> None:
    """Wait for the broker's thread."""
    while not condition():  # noqa: ASYNC110 - a thread changes it
        await anyio.sleep(0.001)


async def take(consumer: Consumer, count: int):  # type: ignore[no-untyped-def]
    """The first `count` messages of an iteration."""
    async for message in consumer:
        yield message
        count -= 1
        if not count:
            return


def test_a_large_record_travels_both_ways(broker: FakeBroker, run: Run) -> None:
    value = os.urandom(900_000)

    async def body() -> None:
        async with Producer(broker.address) as producer:
            await (await producer.send("t", value, partition=0))
        async with Consumer(broker.address) as consumer:
            consumer.assign({KEY: 0})
            (message,) = await consumer.poll(10)
            assert message.value == value

    run(body)


@pytest.mark.parametrize("kind", ["drop", "drop after"])
def test_a_lost_connection_loses_and_doubles_nothing(
    broker: FakeBroker, run: Run, kind: str
) -> None:
    async def body() -> None:
        async with Producer(broker.address) as producer:
            await (await producer.send("t", b"0", partition=0))
            broker.fault(ApiKey.PRODUCE, kind)
            receipts = [await producer.send("t", b"%d" % i, partition=0) for i in range(1, 50)]
            assert [(await receipt).offset for receipt in receipts] == list(range(1, 50))

    run(body)
    assert broker.logs[("t", 0)].end == 50


def test_the_delivery_timeout_of_an_unanswered_request_is_unknown(
    broker: FakeBroker, run: Run
) -> None:
    broker.fault(ApiKey.PRODUCE, "hold")

    async def body() -> None:
        async with Producer(broker.address, delivery_timeout_ms=1_000) as producer:
            receipt = await producer.send("t", b"x", partition=0)
            with pytest.raises(TimeoutError):
                await receipt.result(0.001)
            with pytest.raises(ClientError) as caught:
                await receipt
            assert caught.value.outcome is receipt.outcome is Outcome.UNKNOWN
            assert receipt.place is None

    run(body)


def test_nobody_there_is_a_failure_not_a_doubt(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]

    async def body() -> None:
        async with Producer(f"127.0.0.1:{port}", delivery_timeout_ms=150) as producer:
            with pytest.raises(TimedOutError) as caught:
                await (await producer.send("t", b"x"))
            assert caught.value.outcome is Outcome.FAILED

    run(body)


def test_a_listener_is_told_once_well_or_badly(broker: FakeBroker, run: Run) -> None:
    told: list[Receipt] = []

    async def body() -> None:
        async with Producer(broker.address) as producer:
            for i in range(3):
                await producer.send("t", b"%d" % i, partition=0, on_delivery=told.append)
            await producer.flush()
            assert [receipt.place.offset for receipt in told if receipt.place] == [0, 1, 2]
            await anyio.sleep(0.05)  # nothing else is due
            refused = anyio.Event()

            def listen(receipt: Receipt) -> None:
                told.append(receipt)
                refused.set()

            await producer.send("t", b"x", partition=9, on_delivery=listen)
            with anyio.fail_after(20):
                await refused.wait()  # without a flush
        assert len(told) == 4
        assert isinstance(told[3].error, UsageError)

    run(body)


def test_a_full_buffer_blocks_and_then_refuses(broker: FakeBroker, run: Run) -> None:
    broker.fault(ApiKey.PRODUCE, "hold")

    async def body() -> None:
        async with Producer(
            broker.address, buffer_memory=2_000, linger_ms=0, max_block_ms=50
        ) as producer:
            assert await producer.partitions("t") == 2  # else it has half of the buffer
            for _ in range(17):  # 120 bytes each, as the buffer counts
                await producer.send("t", b"x" * 100, partition=0)
            with pytest.raises(BufferFullError):
                await producer.send("t", b"x" * 100, partition=0)
            await producer.close(flush=False)

    run(body)


def test_a_cancelled_send_has_taken_nothing(broker: FakeBroker, run: Run) -> None:
    sent = 0

    async def body() -> None:
        nonlocal sent
        async with Producer(broker.address) as producer:
            with anyio.CancelScope() as scope:
                while True:
                    await producer.send("t", b"x" * 1_000, partition=0)
                    sent += 1
                    if sent == 1_000:
                        scope.cancel()

    run(body)
    assert broker.logs[("t", 0)].end == sent >= 1_000


def test_many_tasks_share_a_producer(broker: FakeBroker, run: Run) -> None:
    offsets: list[int] = []

    async def body() -> None:
        async with Producer(broker.address) as producer:

            async def send_some() -> None:
                for _ in range(20):
                    receipt = await producer.send("t", b"x", partition=0)
                    offsets.append((await receipt).offset)

            async with anyio.create_task_group() as tasks:
                for _ in range(20):
                    tasks.start_soon(send_some)

    run(body)
    assert sorted(offsets) == list(range(400))


def fill(broker: FakeBroker, run: Run, count: int) -> None:
    async def body() -> None:
        async with Producer(broker.address) as producer:
            for i in range(count):
                await producer.send("t", b"%d" % i, partition=0)

    run(body)


def test_a_group_commits_what_was_handed_out_and_resumes(broker: FakeBroker, run: Run) -> None:
    fill(broker, run, 10)
    told: list[tuple[str, tuple[TopicPartition, ...]]] = []

    async def gained(partitions: tuple[TopicPartition, ...]) -> None:
        await anyio.lowlevel.checkpoint()
        told.append(("gained", partitions))

    async def body() -> None:
        async with Consumer(
            broker.address,
            group="g",
            topics=["t"],
            reset="earliest",
            on_assigned=gained,
            on_revoked=lambda partitions: told.append(("lost", partitions)),
        ) as consumer:
            async for message in consumer:
                assert consumer.generation == 1
                if message.offset == 3:
                    break  # what an iteration took and did not hand out is nobody's yet
        assert broker.groups["g"] == {("t", 0): 4, ("t", 1): 0}
        both = (KEY, TopicPartition("t", 1))
        assert told == [("gained", both), ("lost", both)]
        assert broker.count(ApiKey.LEAVE_GROUP) == 1
        async with Consumer(
            broker.address, group="g", topics=["t"], auto_commit_ms=None
        ) as consumer:
            messages = await consumer.poll(20)
            assert [message.offset for message in messages] == [4, 5, 6, 7, 8, 9]
            await consumer.commit(messages[2])
            assert await consumer.committed([KEY]) == {KEY: 7}
            await consumer.commit()
            assert await consumer.committed([KEY]) == {KEY: 10}

    run(body)


def test_an_error_in_the_block_finishes_nothing_and_stays_itself(
    broker: FakeBroker, run: Run
) -> None:
    fill(broker, run, 1)

    async def body() -> None:
        async with Consumer(broker.address, group="g", topics=["t"], reset="earliest") as consumer:
            assert await consumer.poll(20)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(body)
    assert broker.groups["g"] == {("t", 0): 0, ("t", 1): 0}, "where it began"
    assert broker.count(ApiKey.LEAVE_GROUP) == 1


def test_a_cancelled_member_still_leaves_its_group(broker: FakeBroker, run: Run) -> None:
    async def body() -> None:
        with anyio.CancelScope() as scope:
            async with Consumer(
                broker.address,
                group="g",
                topics=["t"],
                on_assigned=lambda _: scope.cancel(),
            ) as consumer:
                async for _ in consumer:
                    pytest.fail("there is nothing to read")
        assert scope.cancelled_caught
        await until(lambda: broker.count(ApiKey.LEAVE_GROUP) == 1)

    run(body)


def test_heartbeats_go_on_while_a_handler_waits(broker: FakeBroker, run: Run) -> None:
    fill(broker, run, 1)

    async def body() -> None:
        async with Consumer(
            broker.address, group="g", topics=["t"], reset="earliest", heartbeat_interval_ms=2
        ) as consumer:
            async for _ in consumer:
                before = broker.count(ApiKey.HEARTBEAT)
                await until(lambda: broker.count(ApiKey.HEARTBEAT) >= before + 3)  # noqa: B023
                break

    run(body)


def test_at_most_once_commits_before_it_hands_out(broker: FakeBroker, run: Run) -> None:
    fill(broker, run, 6)

    async def body() -> None:
        def member() -> Consumer:
            return Consumer(
                broker.address,
                group="g",
                topics=["t"],
                reset="earliest",
                delivery="at_most_once",
                heartbeat_interval_ms=5,
            )

        async def die() -> None:
            async with member() as consumer:
                assert len(await consumer.poll(20, 4)) == 4
                assert broker.groups["g"] == {("t", 0): 4}
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await die()  # with all four in hand
        async with member() as consumer:
            broker.fault(ApiKey.OFFSET_COMMIT, "refuse", ErrorCode.INVALID_COMMIT_OFFSET_SIZE)
            with pytest.raises(BrokerError):
                await consumer.poll(20)
            messages = await consumer.poll(20)
            assert [message.offset for message in messages] == [4, 5], "refused, so not handed out"

    run(body)


def test_seek_pause_offsets_and_partitions(broker: FakeBroker, run: Run) -> None:
    fill(broker, run, 6)

    async def body() -> None:
        async with Consumer(broker.address) as consumer:
            assert await consumer.partitions("t") == 2
            consumer.assign({KEY: 0})
            seen: list[ConsumerRecord] = []
            async for message in consumer:
                seen.append(message)
                if message.offset == 1:
                    consumer.seek(KEY, 4)
                if len(seen) == 4:
                    break
            assert [message.offset for message in seen] == [0, 1, 4, 5]
            consumer.pause(KEY)
            consumer.seek(KEY, 5)
            assert await consumer.poll(0.05) == []
            consumer.resume(KEY)
            assert [message.offset for message in await consumer.poll(20)] == [5]
            assert (await consumer.offsets_for_times({KEY: -2}))[KEY].offset == 0
            assert (await consumer.offsets([KEY], -1))[KEY].offset == 6
            with pytest.raises(UsageError):
                consumer.seek(TopicPartition("other", 0), 1)

    run(body)


def test_administration(broker: FakeBroker, run: Run) -> None:
    async def body() -> None:
        async with Admin(broker.address) as admin:
            assert [item.node_id for item in await admin.brokers()] == [1]
            created = await admin.create_topic("new", 3, 1, {"retention.ms": "1000"})
            assert created.partitions == 3
            await admin.create_partitions("new", 4)
            assert len((await admin.topic("new")).partitions) == 4
            with pytest.raises(BrokerError) as caught:
                await admin.create_topic("new")
            assert caught.value.code is ErrorCode.TOPIC_ALREADY_EXISTS
            broker.fault(ApiKey.CREATE_TOPICS, "drop after")
            with pytest.raises(ClientError) as lost:
                await admin.create_topic("maybe")
            assert lost.value.outcome is Outcome.UNKNOWN
            await admin.delete_topic("new")

    run(body)


def test_clients_are_used_inside_their_block_once(broker: FakeBroker, run: Run) -> None:
    async def body() -> None:
        producer = Producer(broker.address)
        with pytest.raises(UsageError, match="async with"):
            await producer.send("t", b"x")
        async with producer:
            await producer.send("t", b"x")
        with pytest.raises(UsageError, match="closed"):
            await producer.send("t", b"x")
        with pytest.raises(UsageError, match="once"):
            await producer.__aenter__()

    run(body)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_detected(broker: FakeBroker, run: Run) -> None:
    async def body() -> None:
        async with Producer(broker.address) as producer:
            await (await producer.send("t", b"x", partition=0))
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    await producer.send("t", b"y")
                except ForkedError:
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0  # noqa: ASYNC222
            await (await producer.send("t", b"z", partition=0))

    run(body)
