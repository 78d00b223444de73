"""DeleteRecords of one partition that wait until its log start has moved.

Each is answered exactly once: when nothing below its offset is shown any more, when it is too late,
or with an error once this replica does not lead any longer.
"""

from __future__ import annotations

from typing import Final

from raftmq.errors import ErrorCode
from raftmq.partition.deadlines import Deadline, Deadlines
from raftmq.partition.partition_results import DeleteResult
from raftmq.promise import Promise
from raftmq.types import Offset

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
