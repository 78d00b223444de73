"""Sleeps of one task that end by their time, by another task, by a cancellation."""

from __future__ import annotations

import math

import pytest
import trio
import trio.testing

from raftmq.runtime.loop import Parker


async def test_it_ends_when_its_time_has_come(autojump_clock: trio.testing.MockClock) -> None:
    parker = Parker()
    for number in range(1, 4):
        await parker.park_until(number * 2.5)
        assert trio.current_time() == number * 2.5


async def test_a_time_that_is_over_lets_others_run(
    autojump_clock: trio.testing.MockClock,
) -> None:
    ran: list[str] = []

    async def other() -> None:
        ran.append("other")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        for _ in range(2):  # trio runs those of one turn in any order
            await Parker().park_until(trio.current_time() - 1)
        assert ran == ["other"]


async def test_another_task_ends_it(autojump_clock: trio.testing.MockClock) -> None:
    parker = Parker()
    parker.unpark()
    async with trio.open_nursery() as nursery:
        for at_s in (3.0, math.inf):
            begun = trio.current_time()
            nursery.start_soon(_unpark_after, parker, 1.0)
            await parker.park_until(begun + at_s)
            assert trio.current_time() == begun + 1.0
    parker.unpark()


async def _unpark_after(parker: Parker, seconds: float) -> None:
    await trio.sleep(seconds)
    parker.unpark()
    parker.unpark()


@pytest.mark.parametrize("outer_s", [1.0, 2.0])
async def test_a_cancellation_from_outside_is_raised(
    autojump_clock: trio.testing.MockClock, outer_s: float
) -> None:
    """Also one that comes at the very time at which the sleep would have ended."""
    parker = Parker()
    with trio.move_on_after(outer_s) as scope:
        await parker.park_until(2.0)
        pytest.fail("cancelled before this")
    assert scope.cancelled_caught
    assert trio.current_time() == outer_s
    parker.unpark()


async def test_woken_and_out_of_time_in_one_turn_is_one_end(
    autojump_clock: trio.testing.MockClock,
) -> None:
    parker = Parker()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_unpark_after, parker, 1.0)
        await parker.park_until(1.0)
        assert trio.current_time() == 1.0
    await parker.park_until(5.0)
    assert trio.current_time() == 5.0


async def test_a_task_that_parks_only_until_times_that_are_over_can_be_cancelled(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A task that is always late must end as well: it would keep its node from ending."""
    parker = Parker()
    count = 0
    with trio.CancelScope() as scope:
        while count < 100:
            count += 1
            if count == 3:
                scope.cancel()
            await parker.park_until(trio.current_time() - 1)
    assert scope.cancelled_caught
    assert count == 3


async def test_it_is_parked_until_it_is_unparked() -> None:
    parker = Parker()
    parker.unpark()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(parker.park)
        await trio.testing.wait_all_tasks_blocked()
        assert parker.is_parked
        parker.unpark()
        assert not parker.is_parked, "a second call would wake it twice"
        parker.unpark()


async def test_one_that_was_cancelled_is_not_unparked() -> None:
    parker = Parker()
    with trio.move_on_after(0) as scope:
        await parker.park()
    assert scope.cancelled_caught
    assert not parker.is_parked
    parker.unpark()
