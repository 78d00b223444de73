"""The budget of one pass of the loop: who waits, in which order, and that nobody waits for ever."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import trio
import trio.testing

from raftmq.runtime.loop import PASS_COST_MAX, RENEW_COST, Lane, LoopBudget


@asynccontextmanager
async def running() -> AsyncIterator[LoopBudget]:
    budget = LoopBudget()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(budget.run)
        await trio.testing.wait_all_tasks_blocked()
        yield budget
        nursery.cancel_scope.cancel()


async def test_without_a_runner_nothing_is_limited() -> None:
    budget = LoopBudget()
    assert all(budget.try_take(PASS_COST_MAX) for _ in range(5))


async def test_a_pass_ends_when_its_budget_is_spent() -> None:
    budget = LoopBudget()
    done: list[int] = []
    passes: list[int] = []
    clock = 0

    async def count_passes() -> None:
        nonlocal clock
        while True:
            await trio.lowlevel.checkpoint()
            clock += 1

    async def work(number: int, cost: int) -> None:
        if not budget.try_take(cost):
            await budget.take(cost)
        done.append(number)
        passes.append(clock)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(budget.run)
        nursery.start_soon(count_passes)
        await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
        async with trio.open_nursery() as workers:
            for number in range(20):
                workers.start_soon(work, number, PASS_COST_MAX // 2)
        assert sorted(done) == list(range(20))
        assert passes[-1] - passes[0] >= 8, "two in a pass"
        assert budget.waiting_count == 0
        nursery.cancel_scope.cancel()


async def test_one_alone_always_fits() -> None:
    async with running() as budget:
        assert budget.try_take(100 * PASS_COST_MAX)
        assert not budget.try_take(1)
        with trio.fail_after(30):
            await budget.take(1)
        assert budget.try_take(1)
        budget.give_back(1)


async def test_who_gives_up_is_forgotten() -> None:
    async with running() as budget:
        assert budget.try_take(PASS_COST_MAX)
        with trio.move_on_after(0):
            await budget.take(1)
        assert budget.waiting_count == 0
        await budget.take(1)


async def test_who_waits_is_called_from_both_lanes_in_turn() -> None:
    called: list[str] = []
    async with running() as budget:
        assert budget.try_take(PASS_COST_MAX)
        for number in range(4):
            budget.wait(PASS_COST_MAX, partial(called.append, f"client {number}"))
        for number in range(2):
            budget.wait(PASS_COST_MAX, partial(called.append, f"peer {number}"), Lane.PEERS)
        await trio.testing.wait_all_tasks_blocked()
    assert called == ["peer 0", "client 0", "peer 1", "client 1", "client 2", "client 3"]


async def test_a_lane_is_not_held_up_by_the_other() -> None:
    called: list[str] = []
    async with running() as budget:
        assert budget.try_take(PASS_COST_MAX)
        budget.wait(1, partial(called.append, "client"))
        budget.give_back(PASS_COST_MAX)
        assert not budget.try_take(1), "another client came before"
        assert budget.try_take(1, Lane.PEERS)
    assert called == ["client"], "nobody waits for what has ended"


async def test_light_work_of_several_passes_shares_one_budget() -> None:
    async with running() as budget:
        for _ in range(4):
            assert budget.try_take(RENEW_COST // 4)
            await trio.testing.wait_all_tasks_blocked()
        assert budget.try_take(PASS_COST_MAX - RENEW_COST)
        assert not budget.try_take(1), "it is spent, and was not renewed in between"
        await trio.testing.wait_all_tasks_blocked()
        assert budget.try_take(1)
