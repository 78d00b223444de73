"""Points in time at which something parked gives up waiting.

Synchronous: somebody (a trio task, the simulation) calls `expire` with the time. Cancelling is
cheap, since nearly every deadline is cancelled: the entry stays in the heap, dead, until its time
or until dead entries outnumber live ones.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Final

from raftmq.ports import Clock

_SWEEP_MIN: Final = 1024


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
        self._heap: list[tuple[float, int, Deadline]] = []
        self._sequence = 0
        self._dead = 0
        self._soon: deque[Callable[[], None]] = deque()
        self.on_earlier: Callable[[], None] | None = None
        """Called when another deadline is the first one: who sleeps until `next_ms` looks again."""

    def __len__(self) -> int:
        return len(self._heap) - self._dead

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

    def _push(self, at_ms: float, entry: Deadline) -> None:
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
            entry = heapq.heappop(self._heap)[2]
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
            self._heap = [entry for entry in self._heap if entry[2].callback is not None]
            heapq.heapify(self._heap)
            self._dead = 0
