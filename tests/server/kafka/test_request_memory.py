"""Memory of requests on their way: who grows, who waits, who makes room; never all for ever."""

from __future__ import annotations

from random import Random

import pytest
import trio
import trio.testing
from attrs import define

from raftmq.server.kafka.limits import SLOW_S, PartialFrame, RequestMemory


@pytest.fixture(autouse=True)
def no_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raftmq.server.kafka.limits.SMALL_BYTES_MAX", 0)


def never() -> None:
    raise AssertionError("nobody is closed here")


async def test_half_is_for_all_the_rest_for_one_at_a_time() -> None:
    memory = RequestMemory(100)
    first, second = (memory.open(90, float(since), never) for since in (1, 2))
    assert memory.try_grow(first, 20)
    assert memory.try_grow(second, 30)
    assert memory.try_grow(second, 10), "who comes first goes on alone"
    assert not memory.try_grow(first, 10)
    assert memory.try_grow(second, 10)
    memory.pauses(second)
    assert memory.try_grow(first, 10), "its client sends nothing for the moment"
    assert not memory.try_grow(second, 1)
    assert memory.try_grow(first, 21) == 20, "there is no more"
    assert not memory.try_grow(first, 1)
    assert memory.complete(first) == 50
    assert not memory.try_grow(second, 5)
    memory.release(50)
    memory.drop(second)
    memory.drop(second)
    assert memory.bytes_used == memory.partial_bytes == 0


async def test_one_alone_always_fits() -> None:
    memory = RequestMemory(100)
    frame = memory.open(1000, 1.0, never)
    for _ in range(10):
        assert memory.try_grow(frame, 100)
    memory.drop(frame)


async def test_the_oldest_goes_on_first() -> None:
    memory = RequestMemory(100)
    memory.charge(100)
    served: list[float] = []

    async def take(since: float) -> None:
        frame = memory.open(30, since, never)
        while frame.held < 30:
            await memory.grow(frame, 30 - frame.held)
        served.append(since)
        memory.complete(frame)

    async with trio.open_nursery() as nursery:
        for since in (3.0, 1.0, 2.0):
            nursery.start_soon(take, since)
            await trio.testing.wait_all_tasks_blocked()
        assert memory.waiting_count == 3
        for _ in range(10):
            memory.release(10)
            await trio.testing.wait_all_tasks_blocked()
    assert served == [1.0, 2.0, 3.0]
    assert memory.bytes_used == 90


async def test_a_large_one_is_not_overtaken() -> None:
    memory = RequestMemory(100)
    memory.charge(100)
    large, small = memory.open(90, 1.0, never), memory.open(20, 2.0, never)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(memory.grow, large, 90)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(memory.grow, small, 20)
        await trio.testing.wait_all_tasks_blocked()
        assert memory.waiting_count == 2, "the small one does not overtake"
        memory.release(30)
        await trio.testing.wait_all_tasks_blocked()
        assert large.held == 30
        memory.drop(large)
    assert memory.bytes_used == 90


async def test_who_gave_up_is_not_waited_for() -> None:
    memory = RequestMemory(100)
    memory.charge(100)
    gone, other = memory.open(90, 1.0, never), memory.open(20, 2.0, never)
    with trio.move_on_after(0):
        await memory.grow(gone, 90)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(memory.grow, other, 20)
        await trio.testing.wait_all_tasks_blocked()
        memory.release(30)
    assert (gone.held, other.held) == (0, 20)


async def test_the_largest_and_slowest_are_closed_first(
    autojump_clock: trio.testing.MockClock,
) -> None:
    memory = RequestMemory(100)
    closed: list[str] = []

    def held(name: str, size: int) -> PartialFrame:
        frame = memory.open(1000, trio.current_time(), lambda: closed.append(name))
        memory.hold(frame, size)
        return frame

    held("old and small", 5)
    await trio.sleep(3)
    held("large", 45)
    held("less large", 20)
    await trio.sleep(SLOW_S)
    held("new", 30)
    waiting = memory.open(50, trio.current_time(), never)
    await memory.grow(waiting, 40)
    assert closed == ["large"], "and nobody whose place is not needed"
    memory.drop(waiting)


async def test_complete_requests_are_waited_for(autojump_clock: trio.testing.MockClock) -> None:
    memory = RequestMemory(100)
    memory.charge(80)
    frames = [memory.open(60, trio.current_time(), never) for _ in range(3)]
    async with trio.open_nursery() as nursery:
        memory.charge(5)
        for frame in frames:
            memory.hold(frame, 5)
            nursery.start_soon(memory.grow, frame, 20)
        for _ in range(20):
            await trio.sleep(1)
            memory.relieve(trio.current_time())
        assert memory.waiting_count == 3
        memory.release(80)
        await trio.testing.wait_all_tasks_blocked()
        assert memory.waiting_count < 3
        for frame in frames:
            memory.drop(frame)


@define
class _Sender:
    size: int
    is_honest: bool
    is_closed: bool = False
    is_done: bool = False


@pytest.mark.parametrize("seed", range(30))
async def test_frames_never_wait_for_each_other_for_ever(
    seed: int, autojump_clock: trio.testing.MockClock
) -> None:
    """Clients that go on sending get through, or are told to try again, whatever others hold."""
    random = Random(seed)
    memory = RequestMemory(1_000)
    senders = [
        _Sender(random.choice([50, 200, 400, 900]), random.random() < 0.6) for _ in range(30)
    ]

    async def send(sender: _Sender) -> None:
        await trio.sleep(random.random() * 3)
        scope = trio.CancelScope()

        def close() -> None:
            sender.is_closed = True
            scope.cancel()

        frame = memory.open(sender.size, trio.current_time(), close)
        stops_at = sender.size if sender.is_honest else random.randrange(sender.size)
        with scope:
            try:
                while frame.held < stops_at:
                    piece = min(random.choice([1, 20, 100]), stops_at - frame.held)
                    if not memory.try_grow(frame, piece):
                        await memory.grow(frame, piece)
                    await trio.lowlevel.checkpoint()
                    if random.random() < 0.3:
                        memory.pauses(frame)
                        await trio.sleep(random.random() * 0.2)
                if not sender.is_honest:
                    memory.pauses(frame)
                    await trio.sleep_forever()
                held = memory.complete(frame)
                sender.is_done = True
                with trio.CancelScope(shield=True):
                    await trio.sleep(random.random())
                memory.release(held)
            finally:
                memory.drop(frame)

    async with trio.open_nursery() as nursery:
        for sender in senders:
            nursery.start_soon(send, sender)
        for _ in range(120):
            await trio.sleep(1)
            memory.relieve(trio.current_time())
            assert memory.bytes_used <= 1_000 or memory.bytes_used == memory.partial_bytes
        honest = [sender for sender in senders if sender.is_honest]
        assert all(sender.is_done or sender.is_closed for sender in honest)
        assert memory.waiting_count == 0
        nursery.cancel_scope.cancel()
    assert memory.bytes_used == memory.partial_bytes == 0


async def test_honest_senders_alone_are_never_closed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Forty frames of which a few fit: they get through one after the other."""
    memory = RequestMemory(1_000)
    done: list[int] = []

    async def send(number: int) -> None:
        frame = memory.open(300, trio.current_time() + number / 1e6, never)
        while frame.held < 300:
            if not memory.try_grow(frame, 10):
                await memory.grow(frame, 10)
            await trio.lowlevel.checkpoint()
        held = memory.complete(frame)
        done.append(number)
        await trio.sleep(0.5)
        memory.release(held)

    async with trio.open_nursery() as nursery:
        for number in range(40):
            nursery.start_soon(send, number)
        while len(done) < 40:
            await trio.sleep(1)
            memory.relieve(trio.current_time())
            assert memory.bytes_used <= 1_000
    assert memory.bytes_used == 0


async def test_the_last_bytes_of_a_frame_wait_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raftmq.server.kafka.limits.SMALL_BYTES_MAX", 5)
    memory = RequestMemory(100)
    memory.charge(100)
    frame = memory.open(5, 1.0, never)
    assert not memory.try_grow(frame, 6)
    assert memory.try_grow(frame, 5) == 5
    assert memory.complete(frame) == 5
