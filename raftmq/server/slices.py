"""Long work of one request, done in short turns of the loop between everybody else's.

A question about ten thousand partitions takes a tenth of a second to read, answer and write; in one
go it would hold up heartbeats and other clients. Such work is a generator that yields after each
few milliseconds, or yields a promise of what it waits for (a worker, say). Short work ends before
its first turn is over and costs nothing more; of all long work of a node one piece is done in a
pass of the loop, so that many askers do not add up.

Never used for requests that change anything: requests after it on the same connection may be begun
before it is done (their answers still come later).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Any, Final, TypeAlias, TypeVar

from raftmq.cluster.deadlines import Deadlines
from raftmq.promise import Promise

R = TypeVar("R")
Work: TypeAlias = Generator[Promise[None] | None, None, R]

TURN_PARTITIONS: Final = 256
"""So many partitions are looked at before others have a turn."""


def all_at_once(work: Work[R]) -> R:
    """What `work` returns, without a pause; it must not wait for anything."""
    while True:
        try:
            waits = next(work)
            assert waits is None, "work that waits is for `Slices`"
        except StopIteration as end:
            result: R = end.value
            return result


class Slices:
    """The long work of one node, in order of arrival, each getting a turn after the other."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._queue: deque[tuple[Work[Any], Promise[Any]]] = deque()
        self.turns = 0

    def __len__(self) -> int:
        return len(self._queue)

    def run(self, work: Work[R]) -> R | Promise[R]:
        """What `work` returns: at once if it never yields, else when its last turn is over."""
        try:
            waits = next(work)
        except StopIteration as end:
            result: R = end.value
            return result
        promise: Promise[R] = Promise()
        self._put(work, promise, waits)
        return promise

    def _put(
        self, work: Work[Any], promise: Promise[Any], waits: Promise[None] | None = None
    ) -> None:
        """Queue work, once what it waits for is there, whatever came of it."""
        if waits is not None:
            waits.when_done(lambda _: self._put(work, promise))
            return
        self._queue.append((work, promise))
        if len(self._queue) == 1:
            self._deadlines.soon(self._go_on)

    def _go_on(self) -> None:
        work, promise = self._queue[0]
        self.turns += 1
        end: Any = None
        error: Exception | None = None
        try:
            waits = next(work)
        except StopIteration as stop:
            end = stop.value
        except Exception as caught:  # noqa: BLE001 - it concerns whoever waits for the promise
            error = caught
        else:
            self._queue.popleft()
            if self._queue:
                self._deadlines.soon(self._go_on)
            self._put(work, promise, waits)
            return
        self._queue.popleft()
        if self._queue:
            self._deadlines.soon(self._go_on)
        if error is None:
            promise.resolve(end)
        else:
            promise.fail(error)
