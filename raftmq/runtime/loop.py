"""How tasks share the trio loop: they park and are unparked, and a budget bounds each pass.

`Parker` is the sleep of one task that another one, or a time, ends. `LoopBudget` says how much work
all connections together may begin in one pass of the loop. Each connection yields after its own
share, but a hundred of them make a pass of a hundred shares, and the heartbeats of every group wait
behind it. So work is charged to the pass; beyond its budget connections wait, in order of arrival,
for one of the next passes. One alone always fits. What peers send has a lane beside that of the
clients, and the lanes are served alternately: a follower's answer must not queue behind a hundred
clients, nor they behind two peers.

`TrioTasks` is trio behind `node/environment.py`'s `Tasks`, the way in which a real node waits. Code
that waits through this port alone runs unchanged in the simulation, where the same waits are steps
of virtual time. `run_deadlines` lets deadlines pass: it sleeps until the earliest one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from enum import IntEnum
from functools import partial
from typing import Final, TypeVar

import trio

from raftmq.partition.parked import Deadlines
from raftmq.ports import Clock
from raftmq.promise import Promise


class Parker:
    """The sleep of one task: until another task ends it, or a time."""

    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None

    @property
    def is_parked(self) -> bool:
        """True when there is a task to unpark."""
        return self._task is not None

    async def park(self) -> None:
        """Sleep until unparked.

        Raises:
            trio.Cancelled: from outside.
        """
        self._task = trio.lowlevel.current_task()

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def park_until(self, at_s: float) -> None:
        """Sleep until this time of trio's clock, at least for one pass, or until unparked.

        Raises:
            trio.Cancelled: from outside.
        """
        with trio.CancelScope(deadline=at_s):
            await self.park()

    def unpark(self) -> None:
        """End the sleep; nothing without one."""
        task, self._task = self._task, None
        if task is not None:
            trio.lowlevel.reschedule(task)


PASS_COST_MAX: Final = 768 << 10
"""In bytes of Produce, or of batches that a peer sent. A mebibyte costs some milliseconds (check,
write, send to the peers), and is more than this, so that none comes after it in its pass."""
RENEW_COST: Final = 512 << 10
"""Light work of several passes shares one budget up to this: to renew it costs a task switch."""
RECEIVE_COST: Final = 64 << 10
"""What a receive with up to sixteen small requests costs."""
SMALL_RECEIVE_COST: Final = 16 << 10
"""What a receive with a single small request costs; a heartbeat, a poll."""
SMALL_RECEIVE_BYTES: Final = 1 << 10


_Waiting = tuple[int, Callable[[], object]]


class Lane(IntEnum):
    """Whose work waits together for another pass."""

    CLIENTS = 0
    PEERS = 1


class LoopBudget:
    """The budget of the present pass. Without `run` nothing is limited."""

    __slots__ = ("_is_running", "_left", "_next_lane", "_runner", "_waiting")

    def __init__(self) -> None:
        self._left = PASS_COST_MAX
        self._is_running = False
        self._runner = Parker()
        self._waiting: dict[Lane, deque[_Waiting]] = {lane: deque() for lane in Lane}
        self._next_lane = Lane.PEERS

    @property
    def waiting_count(self) -> int:
        """Connections that wait for another pass."""
        return sum(map(len, self._waiting.values()))

    def try_take(self, cost: int, lane: Lane = Lane.CLIENTS) -> bool:
        """Charge this pass, if it has budget left and nothing of this lane waits."""
        if not self._is_running:
            return True
        if self._left <= 0 or self._waiting[lane]:
            return False
        self._left -= cost
        if PASS_COST_MAX - self._left > RENEW_COST:
            self._runner.unpark()
        return True

    def give_back(self, cost: int) -> None:
        """What was charged was not done after all."""
        if self._is_running:
            self._left += cost

    def wait(self, cost: int, go_on: Callable[[], object], lane: Lane = Lane.CLIENTS) -> _Waiting:
        """Call `go_on` in a pass with budget left, which is charged; returns its place in line.

        It is called after `try_take` refused, so `run` is running.
        """
        entry = (cost, go_on)
        self._waiting[lane].append(entry)
        return entry

    async def take(self, cost: int, lane: Lane = Lane.CLIENTS) -> None:
        """Wait for a pass with budget left, and charge it."""
        task = trio.lowlevel.current_task()
        entry = self.wait(cost, partial(trio.lowlevel.reschedule, task), lane)

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            self._waiting[lane].remove(entry)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def run(self) -> None:
        """Begin a new budget with every pass of the loop; sleeps while nothing is charged."""
        self._is_running = True
        try:
            while True:
                if PASS_COST_MAX - self._left <= RENEW_COST and not self.waiting_count:
                    await self._runner.park()
                await trio.lowlevel.checkpoint()
                self._left = PASS_COST_MAX
                while self._left > 0 and (entry := self._next()) is not None:
                    cost, go_on = entry
                    self._left -= cost
                    go_on()
        finally:
            self._is_running = False
            while (entry := self._next()) is not None:
                entry[1]()

    def _next(self) -> _Waiting | None:
        """The next to call: from the lane whose turn it is, else from the other."""
        for lane in (self._next_lane, Lane(1 - self._next_lane)):
            if self._waiting[lane]:
                self._next_lane = Lane(1 - lane)
                return self._waiting[lane].popleft()
        return None


T = TypeVar("T")


class TrioTasks:
    """Waits in the caller's trio run."""

    async def sleep(self, seconds: float) -> None:
        """Let others run for so long; at least for one turn."""
        await trio.sleep(max(0.0, seconds))

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
    parker = Parker()
    deadlines.on_earlier = parker.unpark
    task_status.started()
    try:
        while True:
            if deadlines.expire(clock.monotonic_ms(), count_max=CALLBACKS_PER_PASS):
                # A thousand fetches that end at once are a thousand answers: heartbeats go first.
                await trio.lowlevel.checkpoint()
                continue
            next_ms = deadlines.next_ms
            left_s = math.inf if next_ms is None else (next_ms - clock.monotonic_ms()) / 1e3
            await parker.park_until(trio.current_time() + left_s)
    finally:
        deadlines.on_earlier = None
