"""How a producer ends and flushes while others send: every receipt is settled, nobody waits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import anyio
import pytest

from raftmq.errors import ErrorCode
from raftmq.records import NewRecord
from raftmq_client import Outcome, Receipt, UsageError, aio
from tests.client.fake_broker import FakeBroker
from tests.client.test_producer_core import World

Run = Callable[[Callable[[], Awaitable[None]]], None]


@pytest.fixture(params=["trio", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a test's body in an event loop, with a limit for what never comes."""

    def runner(body: Callable[[], Awaitable[None]]) -> None:
        async def limited() -> None:
            with anyio.fail_after(10):
                await body()

        anyio.run(limited, backend=request.param)

    return runner


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    with FakeBroker({"t": 2}) as fake:
        yield fake


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
                await producer.flush(5)
                assert receipt.outcome is Outcome.OK
                tasks.cancel_scope.cancel()

    run(body)
