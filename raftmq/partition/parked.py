"""Requests of one partition that wait (produces, fetches, DeleteRecords), and their deadlines.

Produces are kept in order of the log end they wait for, since both conditions (high watermark,
enough flushed copies) hold for a prefix of the log: only the front is ever looked at. A timed-out
record stays in the log; what the client learns is "unknown". A fetch may wait for several
partitions and a least number of bytes over all of them: a partition only wakes it, and the fetch
(a callback of its handler) looks whether it now has enough.

`Deadlines` holds the deadlines of all that is parked on a node, and calls nothing by itself: a trio
task, or the simulation, calls `expire` with the time. Nearly every deadline is cancelled, so that
is cheap: the entry stays in the heap, dead, until its time or until dead entries outnumber live
ones.

Invariant: each request is answered exactly once: when what it waits for has come, when its time is
up, or with an error once this replica does not lead any longer.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from raftmq.errors import ErrorCode, KafkaError
from raftmq.partition.ports import AppendResult, DeleteResult
from raftmq.ports import Clock
from raftmq.promise import Promise
from raftmq.types import Offset

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
        """Called when `next_ms` has become earlier, so that a sleeper until then wakes sooner."""

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
        """Call `callback` at the next `expire`, since this turn of the loop has done enough."""
        self._soon.append(callback)
        if len(self._soon) == 1 and self.on_earlier is not None:
            self.on_earlier()

    def expire(self, now_ms: float, *, count_max: int | None = None) -> bool:
        """Make the calls that are due, at most `count_max`; True when some are left."""
        left = count_max if count_max is not None else -1
        # Calls that are asked for while these run belong to the next turn.
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


class _Parked:
    __slots__ = ("deadline", "end", "promise", "result")

    def __init__(self, end: Offset, result: AppendResult) -> None:
        self.end = end
        self.result = result
        self.promise: Promise[AppendResult] = Promise()
        self.deadline: Deadline | None = None

    def settle(self, result: AppendResult) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
        if not self.promise.is_done:
            self.promise.resolve(result)


class ParkedProduces:
    """The waiting produces of one partition, by log end.

    Attributes:
        waiting: those, in their order, some of them perhaps answered. Here as in the classes below:
            every move of the high watermark or of a flushed end looks whether there are any.
    """

    __slots__ = ("_deadlines", "waiting")

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self.waiting: deque[_Parked] = deque()

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def first_end(self) -> Offset | None:
        """The least log end that a produce waits for."""
        while self.waiting and self.waiting[0].promise.is_done:
            self.waiting.popleft()
        return self.waiting[0].end if self.waiting else None

    def park(
        self, end: Offset, result: AppendResult, timeout_ms: int, timed_out: ErrorCode
    ) -> Promise[AppendResult]:
        """Answer `result` once all below `end` is acknowledged, `timed_out` after `timeout_ms`."""
        entry = _Parked(end, result)

        def expire() -> None:
            entry.settle(AppendResult(timed_out))

        entry.deadline = self._deadlines.after(timeout_ms, expire)
        if not self.waiting or self.waiting[-1].end <= end:
            self.waiting.append(entry)
        else:  # a duplicate waits for the end of its original
            at = next(i for i, other in enumerate(self.waiting) if other.end > end)
            self.waiting.insert(at, entry)
        return entry.promise

    def acknowledge(self, end: Offset, is_enough: Callable[[Offset], bool]) -> None:
        """Answer, from the front, produces that end at or below `end` while `is_enough` holds."""
        parked = self.waiting
        while parked:
            entry = parked[0]
            if not entry.promise.is_done:
                if entry.end > end or not is_enough(entry.end):
                    return
                parked.popleft()
                entry.settle(entry.result)
            else:
                parked.popleft()

    def fail_all(self, code: ErrorCode, message: str | None = None) -> None:
        """Answer everything with an error."""
        parked, self.waiting = self.waiting, deque()
        for entry in parked:
            entry.settle(AppendResult(code, message=message))


class ParkedEnds:
    """Who waits until all below an end of the log is committed, however long that takes."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: deque[tuple[Offset, Promise[Offset]]] = deque()  # by end

    def park(self, end: Offset, promise: Promise[Offset]) -> None:
        """Keep `promise` once all below `end`, the log's, is committed."""
        assert not self.waiting or self.waiting[-1][0] <= end, "the log's end does not fall"
        self.waiting.append((end, promise))

    def settle(self, high_watermark: Offset) -> None:
        """All below is committed."""
        parked = self.waiting
        while parked and parked[0][0] <= high_watermark:
            end, promise = parked.popleft()
            promise.resolve(end)

    def fail_all(self, code: ErrorCode) -> None:
        """Break all of them: whether it will be committed is not known here."""
        parked, self.waiting = self.waiting, deque()
        for _, promise in parked:
            promise.fail(KafkaError(code=code))


WOKEN_AT_ONCE: Final = 8


class FetchWaiter(Protocol):
    """Something parked at one or more partitions."""

    def woken(self) -> None:
        """New records, another leader or another log start: look again. May unpark itself."""
        ...


class ParkedFetches:
    """The fetches that wait at one partition."""

    __slots__ = ("_deadlines", "_soon", "is_over", "waiting")

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self.waiting: dict[int, FetchWaiter] = {}  # by id(); in order of arrival
        self._soon: dict[int, FetchWaiter] = {}  # to be woken soon, each once
        self.is_over = False
        """True when no fetch shall wait here any more."""

    def __len__(self) -> int:
        return len(self.waiting)

    def park(self, waiter: FetchWaiter) -> None:
        """Wake `waiter` at every change until it unparks."""
        self.waiting[id(waiter)] = waiter

    def unpark(self, waiter: FetchWaiter) -> None:
        """Forget `waiter`; harmless when it is not parked."""
        self.waiting.pop(id(waiter), None)

    def wake_all(self) -> None:
        """The partition moved: let every waiter look again, a few at once, the others soon, since
        each may answer."""
        if not self.waiting:
            return
        waiters = list(self.waiting.values())
        for waiter in waiters[:WOKEN_AT_ONCE]:
            if id(waiter) in self.waiting:
                waiter.woken()
        for waiter in waiters[WOKEN_AT_ONCE:]:
            key = id(waiter)
            if key not in self._soon:
                self._soon[key] = waiter
                self._deadlines.soon(partial(self._wake, key))

    def _wake(self, key: int) -> None:
        self._soon.pop(key).woken()


DELETE_WAIT_MS_MIN: Final = 500
"""A deletion waits at least so long. Clients that send a timeout of 0 expect an answer at once:
Kafka's leader moves its own log start first, while here a majority must flush an entry for it."""


class ParkedDeletes:
    """The waiting deletions of one partition."""

    __slots__ = ("_deadlines", "waiting")

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self.waiting: list[tuple[Offset, Promise[DeleteResult], Deadline]] = []

    def park(self, target: Offset, timeout_ms: int) -> Promise[DeleteResult]:
        """Answer once the log starts at `target` or above, or when the time is up."""
        promise: Promise[DeleteResult] = Promise()

        def expire() -> None:
            self.waiting = [entry for entry in self.waiting if entry[1] is not promise]
            promise.resolve(DeleteResult(ErrorCode.REQUEST_TIMED_OUT))

        wait_ms = max(timeout_ms, DELETE_WAIT_MS_MIN)
        self.waiting.append((target, promise, self._deadlines.after(wait_ms, expire)))
        return promise

    def settle(self, start: Offset) -> None:
        """The log starts at `start` now."""
        parked, self.waiting = self.waiting, []
        for target, promise, deadline in parked:
            if start >= target:
                deadline.cancel()
                promise.resolve(DeleteResult(ErrorCode.NONE, start))
            else:
                self.waiting.append((target, promise, deadline))

    def fail_all(self, code: ErrorCode) -> None:
        """Answer everything with an error."""
        parked, self.waiting = self.waiting, []
        for _, promise, deadline in parked:
            deadline.cancel()
            promise.resolve(DeleteResult(code))
