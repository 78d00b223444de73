"""Produces of one partition that are appended and wait to be acknowledged.

Kept in order of the log end they wait for, since both conditions (high watermark, enough flushed
copies) hold for a prefix of the log: only the front is ever looked at. Each is answered exactly
once: acknowledged, failed when leadership is lost, or timed out. A timed-out record stays in the
log; what the client learns is "unknown".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from attrs import frozen

from raftmq.errors import ErrorCode, KafkaError, RecordsRefusedError
from raftmq.partition.deadlines import Deadline, Deadlines
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
