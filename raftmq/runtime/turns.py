"""How much work all connections together may begin in one pass of the loop.

Each connection yields after its own share, but a hundred of them make a pass of a hundred shares,
and the heartbeats of every group wait behind it. So work is charged to the pass; beyond its budget
connections wait, in order of arrival, for one of the next passes. One alone always fits. What peers
send has a lane beside that of the clients, and who waits is called from both in turn: a follower's
answer must not queue behind a hundred clients, nor they behind two peers. A leaf, since servers of
clients and links to peers share the loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Final

import trio

from raftmq.runtime.nap import Sleeper

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
    """Who waits with whom for another pass."""

    CLIENTS = 0
    PEERS = 1


class Turns:
    """The budget of the present pass. Without `run` nothing is limited."""

    __slots__ = ("_is_running", "_left", "_next_lane", "_runner", "_waiting")

    def __init__(self) -> None:
        self._left = PASS_COST_MAX
        self._is_running = False
        self._runner = Sleeper()
        self._waiting: dict[Lane, deque[_Waiting]] = {lane: deque() for lane in Lane}
        self._next_lane = Lane.PEERS

    @property
    def waiting_count(self) -> int:
        """Connections that wait for another pass."""
        return sum(map(len, self._waiting.values()))

    def try_take(self, cost: int, lane: Lane = Lane.CLIENTS) -> bool:
        """Charge this pass, if it has budget left and nobody of this lane came before."""
        if not self._is_running:
            return True
        if self._left <= 0 or self._waiting[lane]:
            return False
        self._left -= cost
        if PASS_COST_MAX - self._left > RENEW_COST:
            self._runner.wake()
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
                    await self._runner.sleep()
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
        """Who is called now: from the lane whose turn it is, else from the other."""
        for lane in (self._next_lane, Lane(1 - self._next_lane)):
            if self._waiting[lane]:
                self._next_lane = Lane(1 - lane)
                return self._waiting[lane].popleft()
        return None
