"""How a client lives and ends: callbacks, signal handlers, forks, tasks, stuck topics, and records
that nobody was told of."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import anyio
import pytest
import trio

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from raftmq.records import read_records
from raftmq.types import TopicPartition
from raftmq_client import (
    BrokerError,
    BufferFullError,
    ClientError,
    ForkedError,
    Outcome,
    Receipt,
    UndeliveredError,
    UsageError,
    aio,
    blocking,
)
from raftmq_client.core.untold import Untold
from tests.client.drivers import Driver
from tests.client.fake_broker import FakeBroker
from tests.tree import PYTHONPATH

# ---- callbacks ----


@pytest.mark.parametrize(
    "wait",
    [
        lambda producer: producer.flush(),
        lambda producer: producer.close(),
        lambda producer: producer.partitions("t"),
        lambda producer: [producer.send("t", b"x" * 100, partition=1) for _ in range(40)],
        lambda producer: producer.send("t", b"x", partition=1).result(),
    ],
    ids=["flush", "close", "partitions", "send into a full buffer", "result"],
)
def test_what_would_wait_in_a_callback_is_refused_at_once(
    broker: FakeBroker, wait: Callable[[blocking.Producer], object]
) -> None:
    refused: list[Exception] = []

    def call(_receipt: Receipt) -> None:
        try:
            wait(producer)
        except Exception as error:  # noqa: BLE001 - looked at below
            refused.append(error)

    with blocking.Producer(broker.address, buffer_memory=3_000, linger_ms=0) as producer:
        producer.partitions("t")
        broker.fault(ApiKey.PRODUCE, "refuse", ErrorCode.INVALID_RECORD)
        broker.fault(ApiKey.PRODUCE, "hold")
        first = producer.send("t", b"1", partition=0, on_delivery=call)
        until(lambda: bool(refused))
        assert first.outcome is Outcome.FAILED
        (error,) = refused
        assert isinstance(error, UsageError)
        assert "callback may not wait" in str(error)
        producer.close(flush=False)


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing came of it"
        time.sleep(0.001)


def test_a_callback_may_send_while_there_is_room(broker: FakeBroker) -> None:
    sent: list[Receipt] = []
    with blocking.Producer(broker.address) as producer:
        producer.send(
            "t", b"1", partition=0, on_delivery=lambda _: sent.append(producer.send("t", b"2"))
        )
        until(lambda: bool(sent))
        sent[0].result(10)


# ---- signal handlers ----


@contextmanager
def handler(handle: Callable[[], None], number: signal.Signals = signal.SIGUSR1) -> Iterator[None]:
    def call(_number: int, _frame: FrameType | None) -> None:
        handle()

    before = signal.signal(number, call)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("what", ["send", "flush", "close", "result", "partitions"])
def test_a_signal_handler_in_the_middle_of_a_call_is_refused(
    broker: FakeBroker, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler runs while the main thread is inside `append`, as signals come anywhere."""
    errors: list[Exception] = []
    with blocking.Producer(broker.address, linger_ms=50) as producer:
        first = producer.send("t", b"0", partition=0)
        first.result(10)
        pending = producer.send("t", b"1", partition=0)

        def handle() -> None:
            calls = {
                "send": lambda: producer.send("t", b"signal", partition=0),
                "flush": producer.flush,
                "close": producer.close,
                "result": pending.result,
                "partitions": lambda: producer.partitions("t"),
            }
            try:
                calls[what]()
            except UsageError as error:
                errors.append(error)

        append = producer._core.append

        def interrupted(*arguments: Any) -> Any:
            signal.raise_signal(signal.SIGUSR1)
            return append(*arguments)

        with handler(handle):
            monkeypatch.setattr(producer._core, "append", interrupted)
            second = producer.send("t", b"2", partition=0)
            monkeypatch.undo()
        assert "signal handler" in str(errors[0])
        assert [item.result(10).offset for item in (first, pending, second)] == [0, 1, 2]
    assert len(errors) == 1


def test_receipts_tell_true_offsets_though_a_handler_sends(broker: FakeBroker) -> None:
    receipts: dict[bytes, Receipt] = {}
    numbers = iter(range(10_000_000))

    def send() -> None:
        value = b"%d" % next(numbers)
        try:
            receipts[value] = producer.send("t", value, partition=0)
        except UsageError:
            return

    with blocking.Producer(broker.address) as producer, handler(send, signal.SIGALRM):
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        try:
            for _ in range(20_000):
                send()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        producer.flush()
    log = [r.value for b in broker.logs["t", 0].batches for r in read_records(memoryview(b))]
    for value, receipt in receipts.items():
        assert log[receipt.result().offset] == value


# ---- forks ----

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def in_child(body: Callable[[], bool]) -> None:
    """Run in a fork; it must say True, in time."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(10)
            code = 0 if body() else 2
        except BaseException:  # noqa: BLE001 - the child tells by its code alone
            code = 3
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("what", ["send", "flush", "partitions", "result", "close", "leave"])
def test_a_child_of_a_fork_does_not_wait_for_a_lock_that_nobody_holds(
    broker: FakeBroker, what: str
) -> None:
    told: list[object] = []
    with blocking.Producer(broker.address) as producer:
        producer.partitions("t")
        broker.fault(ApiKey.PRODUCE, "hold")
        pending = producer.send("t", b"x", partition=0, on_delivery=told.append)
        held, go = threading.Event(), threading.Event()

        def hold() -> None:
            with producer._engine.lock:
                held.set()
                go.wait(20)

        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(20)

        def refused() -> bool:
            calls = {
                "send": lambda: producer.send("t", b"y"),
                "flush": producer.flush,
                "partitions": lambda: producer.partitions("t"),
                "result": pending.result,
                "close": producer.close,
                "leave": lambda: producer.__exit__(None, None, None),
            }
            try:
                calls[what]()
            except ForkedError:
                return what not in ("close", "leave") and not told
            return what in ("close", "leave") and not told

        try:
            in_child(refused)
        finally:
            go.set()
            thread.join()
        producer.close(flush=False)


def test_a_child_that_leaves_the_block_calls_no_callback(broker: FakeBroker) -> None:
    async def body() -> None:
        told: list[object] = []
        async with aio.Producer(broker.address) as producer:
            await producer.partitions("t")
            broker.fault(ApiKey.PRODUCE, "hold")
            await producer.send("t", b"x", partition=0, on_delivery=told.append)

            def leave() -> bool:
                leaving = producer.__aexit__(None, None, None)
                try:
                    leaving.send(None)
                except StopIteration:
                    return not told
                return False

            in_child(leave)
            await producer.close(flush=False)
        assert len(told) == 1

    asyncio.run(body())


# ---- tasks ----

MAKERS: dict[str, Callable[[str], Any]] = {
    "producer": aio.Producer,
    "consumer": aio.Consumer,
    "admin": aio.Admin,
}


@pytest.mark.parametrize("name", MAKERS)
def test_asyncio_clients_start_and_close_in_any_task_and_any_order(
    broker: FakeBroker, name: str
) -> None:
    async def body() -> None:
        clients = [MAKERS[name](broker.address) for _ in range(3)]
        for client in clients:
            assert await asyncio.create_task(client.start()) is client
        for client in clients:  # not the other way round, as blocks would
            await asyncio.create_task(client.close())
            await client.close()
        with pytest.raises(UsageError):
            await clients[0].start()
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    asyncio.run(body())


@pytest.mark.parametrize("name", MAKERS)
def test_asyncio_blocks_are_entered_and_left_by_different_tasks(
    broker: FakeBroker, name: str
) -> None:
    async def body() -> None:
        client = MAKERS[name](broker.address)
        await asyncio.create_task(client.__aenter__())
        if name == "producer":
            await client.send("t", b"x", partition=0)
        await asyncio.create_task(client.__aexit__(None, None, None))

    asyncio.run(body())


def test_an_asyncio_client_that_was_started_works_until_it_is_closed(broker: FakeBroker) -> None:
    async def body() -> None:
        producer = aio.Producer(broker.address)
        with pytest.raises(UsageError, match="enter the client"):
            await producer.send("t", b"x")
        await producer.start()
        receipt = await producer.send("t", b"x", partition=0)
        await producer.close()
        assert receipt.outcome is Outcome.OK
        with pytest.raises(UsageError, match="closed"):
            await producer.send("t", b"x")

    asyncio.run(body())


@pytest.mark.parametrize("name", MAKERS)
def test_a_client_that_was_never_started_can_be_closed(broker: FakeBroker, name: str) -> None:
    for backend in ("asyncio", "trio"):
        anyio.run(MAKERS[name](broker.address).close, backend=backend)


@pytest.mark.parametrize("name", MAKERS)
def test_trio_wants_a_block(broker: FakeBroker, name: str) -> None:
    with pytest.raises(UsageError, match="async with"):
        trio.run(MAKERS[name](broker.address).start)


def test_a_client_in_another_loop_is_refused_and_does_not_hang(broker: FakeBroker) -> None:
    first = asyncio.new_event_loop()
    try:
        producer = aio.Producer(broker.address)
        first.run_until_complete(producer.start())

        async def use() -> None:
            for call in (producer.flush(), producer.partitions("t"), producer.close()):
                with pytest.raises(UsageError, match="another event loop"):
                    await call

        asyncio.run(use())
        first.run_until_complete(producer.close())
    finally:
        first.close()


# ---- one topic that cannot be ----


@pytest.mark.parametrize("kind", ["unknown", "deleted"])
def test_a_topic_that_cannot_be_does_not_stop_the_others(
    broker: FakeBroker, driver: Driver, kind: str
) -> None:
    options = {"buffer_memory": 40_000, "max_block_ms": 100, "linger_ms": 0}
    with driver.producer(broker.address, **options) as producer:
        producer.send("t", b"x", partition=0).result(10)
        if kind == "deleted":
            broker.make_topic("other", 1)
            producer.send("other", b"x", partition=0).result(10)
            del broker.topic_ids["other"]
            broker.refuse_always(ApiKey.PRODUCE, "other", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        with pytest.raises(BufferFullError, match="'other' does not get on"):
            fill(producer, "other")
        for number in range(50):
            assert producer.send("t", b"x" * 500, partition=0).result(10).offset == number + 1
        producer.close(flush=False)


def fill(producer: Any, topic: str) -> None:
    for _ in range(1_000):
        producer.send(topic, b"x" * 500, partition=0)


@pytest.mark.parametrize(
    "code", [ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.INVALID_TOPIC_EXCEPTION]
)
def test_a_topic_that_is_refused_for_good_fails_at_once_and_may_be_tried_again(
    broker: FakeBroker, driver: Driver, code: ErrorCode
) -> None:
    with driver.producer(broker.address) as producer:
        broker.topic_errors["u"] = code
        with pytest.raises(BrokerError) as raised:
            producer.send("u", b"x").result(10)
        assert raised.value.code is code
        del broker.topic_errors["u"]
        broker.make_topic("u", 1)
        assert producer.send("u", b"x").result(10).offset == 0


# ---- records that nobody was told of ----


def leave_with_failures(producer: Any, broker: FakeBroker, look: Callable[[Any], object]) -> None:
    """Three records fail in a batch, one for itself; one is fine."""
    with producer:
        producer.send("t", b"x", partition=0).result(10)
        broker.fault(ApiKey.PRODUCE, "refuse", ErrorCode.INVALID_RECORD)
        for _ in range(3):
            look(producer.send("t", b"x", partition=0))
        look(producer.send("t", b"x", partition=9))
        producer.flush()
        producer.send("t", b"x", partition=1)


def test_leaving_the_block_raises_what_nobody_was_told(broker: FakeBroker, driver: Driver) -> None:
    producer = driver.producer(broker.address, linger_ms=50)
    with pytest.raises(UndeliveredError) as raised:
        leave_with_failures(producer, broker, lambda _receipt: None)
    group = raised.value
    assert (group.failed, group.unknown, group.outcome) == (4, 0, Outcome.FAILED)
    assert sorted(item.records for item in group.exceptions) == [1, 3]
    assert isinstance(group, ClientError)
    matched, rest = group.split(BrokerError)
    assert isinstance(matched, UndeliveredError)
    assert (matched.failed, len(rest.exceptions)) == (3, 1)  # type: ignore[union-attr]


def test_what_somebody_was_told_is_not_raised_again(broker: FakeBroker, driver: Driver) -> None:
    told: list[Any] = []
    producer = driver.producer(broker.address, linger_ms=50)
    with producer:
        producer.send("t", b"x", partition=0).result(10)
        broker.fault(ApiKey.PRODUCE, "refuse", ErrorCode.INVALID_RECORD)
        receipts = [producer.send("t", b"x", partition=0) for _ in range(3)]
        producer.send("t", b"x", partition=0, on_delivery=told.append)
        producer.send("t", b"x", partition=9, on_delivery=told.append)
        with pytest.raises(BrokerError):
            receipts[0].result(10)
        producer.flush()
        assert receipts[1].outcome is Outcome.FAILED
        assert isinstance(receipts[2].error, BrokerError)
    assert len(told) == 2


def test_unknown_outcomes_are_counted_as_such(broker: FakeBroker, driver: Driver) -> None:
    producer = driver.producer(broker.address, delivery_timeout_ms=1_000)

    def use() -> None:
        with producer:
            producer.send("t", b"x", partition=0).result(10)
            broker.fault(ApiKey.PRODUCE, "hold")
            producer.send("t", b"x", partition=0)

    with pytest.raises(UndeliveredError) as raised:
        use()
    assert (raised.value.failed, raised.value.unknown) == (0, 1)
    assert raised.value.outcome is Outcome.UNKNOWN


def test_an_error_of_the_block_leaves_as_itself_and_the_rest_is_logged(
    broker: FakeBroker, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    producer = driver.producer(broker.address)

    def use() -> None:
        with producer:
            producer.send("t", b"x", partition=9)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert "1 records failed" in caplog.text


def test_what_nobody_hears_of_takes_no_room_that_grows() -> None:
    untold = Untold()
    for number in range(10_000):
        untold.add(TopicPartition("t", number), UsageError(str(number)), 1)
    error = untold.take()
    assert error is not None
    assert error.failed == 10_000
    assert len(error.exceptions) <= 101
    assert untold.take() is None


UNCLOSED = {
    "blocking": """
        from raftmq_client.blocking import Producer
        producer = Producer(address, linger_ms=60_000)
        producer.send("t", b"x", partition=0)
        producer.send("t", b"x", partition=0)
    """,
    "asyncio": """
        import asyncio
        from raftmq_client.aio import Producer
        async def main():
            producer = await Producer(address, linger_ms=60_000).start()
            await producer.send("t", b"x", partition=0)
            await producer.send("t", b"x", partition=0)
        asyncio.run(main())
    """,
}


@pytest.mark.parametrize("driver_name", UNCLOSED)
def test_a_process_that_ends_with_records_on_board_says_so(
    broker: FakeBroker, driver_name: str
) -> None:
    program = f"address = {broker.address!r}\n{textwrap.dedent(UNCLOSED[driver_name])}"
    run = subprocess.run(
        [sys.executable, "-W", "always", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        check=True,
    )
    assert "ResourceWarning: a producer was not closed" in run.stderr
    assert run.stderr.count("a producer was not closed") == 2, "warned and logged"
    assert "2 " in run.stderr


def test_a_producer_that_is_dropped_with_nothing_on_board_is_silent(broker: FakeBroker) -> None:
    aio.Producer(broker.address)
    gc.collect()  # a warning would be an error
