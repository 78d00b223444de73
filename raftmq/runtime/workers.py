"""Work that would hold up the loop, done in threads: reading and checking cold bytes.

A few at a time, the rest in order of arrival; each is a promise that settles on the loop. Threads
are trio's cached ones, so an idle node has none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

import trio
from outcome import Error, Outcome

from raftmq.promise import Promise

WORKERS_MAX: Final = 4


class WorkerPool(Protocol):
    """Where work is done that would hold up the loop."""

    def submit(self, work: Callable[[], Any]) -> Promise[Any]:
        """Run `work` elsewhere; the promise settles on the loop, with what `work` raises, too."""
        ...


class Workers:
    """A bounded pool."""

    def __init__(self, workers_max: int = WORKERS_MAX) -> None:
        self._workers_max = workers_max
        self._busy = 0
        self._queue: deque[tuple[Callable[[], Any], Promise[Any]]] = deque()

    def submit(self, work: Callable[[], Any]) -> Promise[Any]:
        """Run `work` in a thread; call on the loop. The promise fails with what `work` raises."""
        promise: Promise[Any] = Promise()
        self._queue.append((work, promise))
        self._start()
        return promise

    def _start(self) -> None:
        while self._queue and self._busy < self._workers_max:
            work, promise = self._queue.popleft()
            self._busy += 1
            self._run(work, promise)

    def _run(self, work: Callable[[], Any], promise: Promise[Any]) -> None:
        token = trio.lowlevel.current_trio_token()

        def deliver(result: Outcome[Any]) -> None:
            with suppress(trio.RunFinishedError):  # the node stopped: nobody waits any more
                token.run_sync_soon(self._done, promise, result)

        trio.lowlevel.start_thread_soon(work, deliver, "raftmq-worker")

    def _done(self, promise: Promise[Any], result: Outcome[Any]) -> None:
        self._busy -= 1
        if isinstance(result, Error) and not isinstance(result.error, Exception):
            result.unwrap()
        if isinstance(result, Error):
            assert isinstance(result.error, Exception)
            promise.fail(result.error)
        else:
            promise.resolve(result.unwrap())
        self._start()
