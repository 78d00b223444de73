"""Trio behind `node/environment.py`'s `Tasks`, the way in which a real node waits, and the task
that lets deadlines pass: it sleeps until the earliest one, and wakes when that moves up.

Owns nothing. Code that waits through this port alone runs unchanged in the simulation, where the
same waits are steps of virtual time.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

import trio

from raftmq.partition.parked import Deadlines
from raftmq.ports import Clock
from raftmq.promise import Promise
from raftmq.runtime.nap import Nap

T = TypeVar("T")


class TrioTasks:
    """Waits in the trio run of whoever calls."""

    async def sleep(self, seconds: float) -> None:
        """Let others run for so long; at least for one turn."""
        if seconds > 0:
            await Nap().until(trio.current_time() + seconds)
        else:
            await trio.lowlevel.checkpoint()

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in one of trio's worker threads."""
        return await trio.to_thread.run_sync(work)

    async def wait(self, promise: Promise[T]) -> T:
        """Sleep until the promise is settled."""
        if promise.is_done:
            await trio.lowlevel.checkpoint()
            return promise.result()
        sleeper: trio.lowlevel.Task | None = trio.lowlevel.current_task()

        def settled(_promise: Promise[T]) -> None:
            if sleeper is not None:
                trio.lowlevel.reschedule(sleeper)

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            nonlocal sleeper
            sleeper = None
            return trio.lowlevel.Abort.SUCCEEDED

        promise.when_done(settled)
        await trio.lowlevel.wait_task_rescheduled(abort)
        return promise.result()

    async def together(self, tasks: Iterable[Callable[[], Awaitable[None]]]) -> None:
        """Run all of them in one nursery."""
        async with trio.open_nursery() as nursery:
            for task in tasks:
                nursery.start_soon(task)


CALLBACKS_PER_PASS: Final = 128


async def run_deadlines(
    deadlines: Deadlines,
    clock: Clock,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Call back what is due until cancelled."""
    nap = Nap()
    deadlines.on_earlier = nap.wake
    task_status.started()
    try:
        while True:
            if deadlines.expire(clock.monotonic_ms(), count_max=CALLBACKS_PER_PASS):
                # A thousand fetches that end at once are a thousand answers: heartbeats go first.
                await trio.lowlevel.checkpoint()
                continue
            next_ms = deadlines.next_ms
            left_s = math.inf if next_ms is None else (next_ms - clock.monotonic_ms()) / 1e3
            await nap.until(trio.current_time() + left_s)
    finally:
        deadlines.on_earlier = None
