"""A queue of items that a few tasks work on in turns, no two tasks on one item.

An item rests until it is woken, or until the time that it named. If it is woken during its turn,
another turn follows. After each failure it pauses for longer. An item that pauses is not woken
before its time: it has seen to what is new itself, or has to wait anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from enum import Enum
from functools import partial
from typing import Final, Generic, TypeVar

from attrs import define, field

from raftmq.node.environment import Tasks
from raftmq.partition.parked import Deadline, Deadlines
from raftmq.promise import Promise

RETRY_MS: Final = 100.0
RETRY_MS_MAX: Final = 2_000.0


class WorkState(Enum):
    """What an item does."""

    RESTING = "nobody is to work on it, or not yet"
    QUEUED = "it has its turn soon"
    AT_WORK = "it has its turn"
    CALLED = "it has its turn, and has another one after it"


@define(eq=False, slots=True)
class WorkItem:
    """What is worked on.

    Attributes:
        trouble: why the last attempt failed; "" where it did not.
        is_pausing: it is not woken before its time; each turn begins with False.
        wake: has it worked on; a queue gives it that.
    """

    trouble: str = field(default="", init=False)
    retry_ms: float = field(default=RETRY_MS, init=False)
    is_pausing: bool = field(default=False, init=False)
    state: WorkState = field(default=WorkState.RESTING, init=False)
    timer: Deadline | None = field(default=None, init=False)
    wake: Callable[[], None] = field(default=lambda: None, init=False)

    def failed(self, why: str) -> float:
        """Remember why it does not go on; how long to wait, in milliseconds."""
        self.trouble = why
        pause_ms = self.retry_ms
        self.retry_ms = min(2 * pause_ms, RETRY_MS_MAX)
        return pause_ms

    def succeeded(self) -> None:
        """It goes on."""
        self.trouble, self.retry_ms = "", RETRY_MS


W = TypeVar("W", bound=WorkItem)


class WorkQueue(Generic[W]):
    """The items whose turn comes next."""

    def __init__(self, tasks: Tasks, deadlines: Deadlines) -> None:
        self._tasks = tasks
        self._deadlines = deadlines
        self._items: deque[W] = deque()
        self._news: Promise[None] = Promise()

    def add(self, item: W) -> None:
        """Give an item its first turn."""
        item.wake = partial(self._wake, item)
        item.wake()

    async def work(self, step: Callable[[W], Awaitable[float | None]]) -> None:
        """Give items their turns until cancelled; `step` says after how many milliseconds the next
        one is due, None: when the item is woken."""
        while True:
            item = await self._next()
            item.state, item.is_pausing = WorkState.AT_WORK, False
            pause_ms = await step(item)
            was_called = item.state is WorkState.CALLED
            item.state = WorkState.RESTING
            if pause_ms == 0 or (was_called and not item.is_pausing):
                self._enqueue(item)
            elif pause_ms is not None:
                item.timer = self._deadlines.after(pause_ms, partial(self._rested, item))

    def _wake(self, item: W) -> None:
        if item.state is WorkState.AT_WORK:
            item.state = WorkState.CALLED
        elif item.state is WorkState.RESTING:
            if item.timer is not None:
                if item.is_pausing:
                    return
                item.timer.cancel()
                item.timer = None
            self._enqueue(item)

    def _rested(self, item: W) -> None:
        item.timer = None
        self._enqueue(item)

    def _enqueue(self, item: W) -> None:
        item.state = WorkState.QUEUED
        self._items.append(item)
        if not self._news.is_done:
            self._news.resolve(None)

    async def _next(self) -> W:
        while not self._items:
            if self._news.is_done:
                self._news = Promise()
            await self._tasks.wait(self._news)
        return self._items.popleft()
