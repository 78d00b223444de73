"""Points in time at which something parked gives up waiting.

Synchronous: somebody (a trio task, the simulation) calls `expire` with the time. Cancelling is
cheap, since nearly every deadline is cancelled: the entry stays in the heap, dead, until its time
or until dead entries outnumber live ones. Long waits that end on a grid of times share one entry
for each of these (`together`), where leaving is as cheap.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from raftmq.ports import Clock

ALIGNED_MS: Final = 1.0
"""Waits until one time on the grid share an entry, so the grid does not follow what is no shift."""
_ROUNDING: Final = 1e-6
"""Of a step of the grid: who waits from one time on it until another one means that very time."""
_SWEEP_MIN: Final = 1024


class Waiter(Protocol):
    """Something that waits until a time on the grid."""

    def expire(self) -> None:
        """It has come."""
        ...


class _Together:
    """Those that wait for the same time."""

    __slots__ = ("at_ms", "waiters")

    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms
        self.waiters: dict[int, Waiter] = {}  # by id()


class Deadline:
    """One pending callback."""

    __slots__ = ("_deadlines", "at_ms", "callback")

    def __init__(self, deadlines: Deadlines, at_ms: float, callback: Callable[[], None]) -> None:
        self._deadlines = deadlines
        self.at_ms = at_ms
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Never call back; harmless when it did already."""
        if self.callback is not None:
            self.callback = None
            self._deadlines.cancelled()


class Deadlines:
    """All deadlines of one node, earliest first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Deadline | _Together]] = []
        self._together: dict[float, _Together] = {}
        # Where the grid begins: nodes of one machine need not all be busy at the same moments.
        self._origin_ms = clock.monotonic_ms()
        self._sequence = 0
        self._dead = 0
        self._soon: deque[Callable[[], None]] = deque()
        self.on_earlier: Callable[[], None] | None = None
        """Called when another deadline is the first one: who sleeps until `next_ms` looks again."""

    def __len__(self) -> int:
        alone = len(self._heap) - self._dead - len(self._together)
        return alone + sum(len(group.waiters) for group in self._together.values())

    @property
    def next_ms(self) -> float | None:
        """Monotonic time of the first entry, perhaps a dead one; None without any."""
        return self._heap[0][0] if self._heap else None

    def after(self, delay_ms: float, callback: Callable[[], None]) -> Deadline:
        """Call `callback` once `delay_ms` from now, unless cancelled."""
        at_ms = self._clock.monotonic_ms() + delay_ms
        deadline = Deadline(self, at_ms, callback)
        self._push(at_ms, deadline)
        return deadline

    def together(
        self,
        delay_ms: float,
        grid_ms: float,
        waiter: Waiter,
        *,
        from_grid_ms: float | None = None,
    ) -> float:
        """Let `waiter` expire at the first time on the grid that is `delay_ms` from now or later;
        from the last time on another grid, where one is given. Returns when that will be, by which
        it may `leave` before."""
        origin_ms = self._origin_ms
        begun_ms = self._clock.monotonic_ms() - origin_ms
        if from_grid_ms is not None:
            begun_ms = begun_ms // from_grid_ms * from_grid_ms
        at_ms = origin_ms + math.ceil((begun_ms + delay_ms) / grid_ms - _ROUNDING) * grid_ms
        group = self._together.get(at_ms)
        if group is None:
            group = self._together[at_ms] = _Together(at_ms)
            self._push(at_ms, group)
        group.waiters[id(waiter)] = waiter
        return at_ms

    def align(self, at_ms: float, grid_ms: float) -> None:
        """Let the grid go through this time from now on; waits that have begun end as they were to.
        A node that does nothing else wakes for it at `at_ms` anyway."""
        off_ms = (at_ms - self._origin_ms) % grid_ms
        if min(off_ms, grid_ms - off_ms) > ALIGNED_MS:
            self._origin_ms = at_ms

    def leave(self, at_ms: float, waiter: Waiter) -> None:
        """Wait no more until `at_ms`; harmless when that is over."""
        group = self._together.get(at_ms)
        if group is not None:
            group.waiters.pop(id(waiter), None)

    def _push(self, at_ms: float, entry: Deadline | _Together) -> None:
        self._sequence += 1
        is_first = not self._heap or at_ms < self._heap[0][0]
        heapq.heappush(self._heap, (at_ms, self._sequence, entry))
        if is_first and self.on_earlier is not None:
            self.on_earlier()

    def soon(self, callback: Callable[[], None]) -> None:
        """Call `callback` at the next `expire`: not in this turn, which has done enough."""
        self._soon.append(callback)
        if len(self._soon) == 1 and self.on_earlier is not None:
            self.on_earlier()

    def expire(self, now_ms: float, *, count_max: int | None = None) -> bool:
        """Call back what is due, at most `count_max` of it; True when that left some over."""
        left = count_max if count_max is not None else -1
        # Those that ask for another turn while these run get the next one.
        count = len(self._soon) if left < 0 else min(len(self._soon), left)
        for _ in range(count):
            left -= 1
            self._soon.popleft()()
        while self._heap and self._heap[0][0] <= now_ms and left != 0:
            left -= 1
            entry = self._heap[0][2]
            if isinstance(entry, _Together):
                if entry.waiters:
                    entry.waiters.popitem()[1].expire()
                else:
                    heapq.heappop(self._heap)
                    del self._together[entry.at_ms]
                continue
            heapq.heappop(self._heap)
            callback = entry.callback
            if callback is None:
                self._dead -= 1
                continue
            entry.callback = None
            callback()
        return bool(self._soon) or (bool(self._heap) and self._heap[0][0] <= now_ms)

    def cancelled(self) -> None:
        """Count a dead entry; drop all of them once they are the majority."""
        self._dead += 1
        if self._dead > _SWEEP_MIN and self._dead * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if not _is_dead(entry[2])]
            heapq.heapify(self._heap)
            self._dead = 0


def _is_dead(entry: Deadline | _Together) -> bool:
    return isinstance(entry, Deadline) and entry.callback is None
