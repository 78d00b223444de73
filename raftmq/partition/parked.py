"""Requests of one partition that wait: produces, fetches and DeleteRecords.

Produces are kept in order of the log end they wait for, since both conditions (high watermark,
enough flushed copies) hold for a prefix of the log: only the front is ever looked at. A timed-out
record stays in the log; what the client learns is "unknown". A fetch may wait for several
partitions and a least number of bytes over all of them: a partition only wakes it, and the fetch
(a callback of its handler) looks whether it now has enough.

Invariant: each is answered exactly once: when what it waits for has come, when it is too late, or
with an error once this replica does not lead any longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from attrs import frozen

from raftmq.errors import ErrorCode, KafkaError, RecordsRefusedError
from raftmq.partition.deadlines import Deadline, Deadlines
from raftmq.partition.partition_results import DeleteResult
from raftmq.promise import Promise
from raftmq.types import Offset


@frozen(slots=True)
class AppendResult:
    """What a producer is told about one batch."""

    code: ErrorCode
    base_offset: Offset = Offset(-1)
    log_append_time_ms: int = -1
    log_start_offset: Offset = Offset(-1)
    message: str | None = None
    record_errors: tuple[tuple[int, str], ...] = ()
    """(index in the batch, why) of the records for which it was refused, where that is known."""

    @classmethod
    def refused(cls, error: KafkaError) -> AppendResult:
        """What is told of an error."""
        records = error.records if isinstance(error, RecordsRefusedError) else ()
        return cls(error.code, message=error.message, record_errors=records)


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
    """The waiting produces of one partition, by log end."""

    __slots__ = ("_deadlines", "_parked")

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._parked: deque[_Parked] = deque()

    def __len__(self) -> int:
        return len(self._parked)

    @property
    def first_end(self) -> Offset | None:
        """The least log end that anybody waits for."""
        while self._parked and self._parked[0].promise.is_done:
            self._parked.popleft()
        return self._parked[0].end if self._parked else None

    def park(
        self, end: Offset, result: AppendResult, timeout_ms: int, timed_out: ErrorCode
    ) -> Promise[AppendResult]:
        """Answer `result` once all below `end` is acknowledged; `timed_out` after a while."""
        entry = _Parked(end, result)

        def expire() -> None:
            entry.settle(AppendResult(timed_out))

        entry.deadline = self._deadlines.after(timeout_ms, expire)
        if not self._parked or self._parked[-1].end <= end:
            self._parked.append(entry)
        else:  # a duplicate waits for the end of its original
            at = next(i for i, other in enumerate(self._parked) if other.end > end)
            self._parked.insert(at, entry)
        return entry.promise

    def acknowledge(self, end: Offset, is_enough: Callable[[Offset], bool]) -> None:
        """Answer from the front what ends at or below `end`, while `is_enough` holds for it."""
        parked = self._parked
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
        parked, self._parked = self._parked, deque()
        for entry in parked:
            entry.settle(AppendResult(code, message=message))


WOKEN_AT_ONCE: Final = 8


class FetchWaiter(Protocol):
    """Something parked at one or more partitions."""

    def woken(self) -> None:
        """New records, another leader or another log start: look again. May unpark itself."""
        ...


class ParkedFetches:
    """The fetches that wait at one partition."""

    __slots__ = ("_deadlines", "_soon", "_waiters", "is_over")

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._waiters: dict[int, FetchWaiter] = {}  # by id(); in order of arrival
        self._soon: dict[int, FetchWaiter] = {}  # to be woken soon, each once
        self.is_over = False
        """Nobody shall wait here any more."""

    def __len__(self) -> int:
        return len(self._waiters)

    def park(self, waiter: FetchWaiter) -> None:
        """Wake `waiter` at every change until it unparks."""
        self._waiters[id(waiter)] = waiter

    def unpark(self, waiter: FetchWaiter) -> None:
        """Forget `waiter`; harmless when it is not parked."""
        self._waiters.pop(id(waiter), None)

    def wake_all(self) -> None:
        """The partition moved: let every waiter look again, a few at once, the others soon, since
        each may answer."""
        if not self._waiters:
            return
        waiters = list(self._waiters.values())
        for waiter in waiters[:WOKEN_AT_ONCE]:
            if id(waiter) in self._waiters:
                waiter.woken()
        for waiter in waiters[WOKEN_AT_ONCE:]:
            key = id(waiter)
            if key not in self._soon:
                self._soon[key] = waiter
                self._deadlines.soon(partial(self._wake, key))

    def _wake(self, key: int) -> None:
        self._soon.pop(key).woken()


DELETE_WAIT_MS_MIN: Final = 500
"""What a client waits at least. Who says 0 asks for what Kafka can tell at once, since its leader
moves its own log start first; here that takes an entry of the log which a majority has flushed."""


class ParkedDeletes:
    """The waiting deletions of one partition."""

    __slots__ = ("_deadlines", "_parked")

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._parked: list[tuple[Offset, Promise[DeleteResult], Deadline]] = []

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, target: Offset, timeout_ms: int) -> Promise[DeleteResult]:
        """Answer once the log starts at `target` or above, or that it is too late."""
        promise: Promise[DeleteResult] = Promise()

        def expire() -> None:
            self._parked = [entry for entry in self._parked if entry[1] is not promise]
            promise.resolve(DeleteResult(ErrorCode.REQUEST_TIMED_OUT))

        wait_ms = max(timeout_ms, DELETE_WAIT_MS_MIN)
        self._parked.append((target, promise, self._deadlines.after(wait_ms, expire)))
        return promise

    def settle(self, start: Offset) -> None:
        """The log starts at `start` now."""
        parked, self._parked = self._parked, []
        for target, promise, deadline in parked:
            if start >= target:
                deadline.cancel()
                promise.resolve(DeleteResult(ErrorCode.NONE, start))
            else:
                self._parked.append((target, promise, deadline))

    def fail_all(self, code: ErrorCode) -> None:
        """Answer everything with an error."""
        parked, self._parked = self._parked, []
        for _, promise, deadline in parked:
            deadline.cancel()
            promise.resolve(DeleteResult(code))
