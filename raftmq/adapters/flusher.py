"""Threads that do nothing but fdatasync, and bring the news back to the loop.

Group commit: while one flush of a file runs, more is written behind it, and the next job covers all
of that. One outstanding job per file is the callers' rule (`ReplicatedLog.flush_job` gives none
while one is out); several threads keep many files from waiting in one line. Completions are
collected and wake the loop once, since a wake-up costs more than the news itself; those of one
wake-up are told within one `around`, so that what follows from them is done once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import Empty, SimpleQueue
from time import perf_counter, sleep
from typing import Final, Protocol

import trio

from raftmq.counts import Histogram
from raftmq.ports import DiskError

REPORT_MAX: Final = 64
"""So many flushes are told in one turn of the loop: a thousand groups begin to lead at once."""


class Job(Protocol):
    """What a flusher thread runs; touches captured files only."""

    def run(self) -> None: ...


Done = Callable[[DiskError | None], None]


class Flusher:
    """A small pool of threads tied to the trio loop that made it; other workers are one, too.

    Attributes:
        latency: flushes done since the start and the time that each took.
        around: entered for all news of one turn of the loop; `MultiRaft.batch`, where logs flush.
        delay_s: how long a thread sleeps before each; set by the fault switch alone.
    """

    def __init__(self, threads: int, name: str = "flusher") -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._queue: SimpleQueue[tuple[Job, Done, float] | None] = SimpleQueue()
        self._finished: deque[tuple[Done, DiskError | None, float]] = deque()
        self._is_waking = False
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        self.latency = Histogram()
        self.delay_s = 0.0
        self._submitted: list[float | None] = [None] * threads
        self._threads = [
            threading.Thread(
                target=self._work, args=(number,), name=f"{name}-{number}", daemon=True
            )
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, done: Done) -> None:
        """Run `job` in a thread; then `done(error)` on the loop."""
        self._queue.put((job, done, perf_counter()))

    def longest_ms(self) -> float:
        """How long ago the oldest job that has not come back was submitted; 0 where none is out.

        Jobs begin in their order, so it is among those that are being run.
        """
        submitted = [start for start in self._submitted if start is not None]
        return (perf_counter() - min(submitted)) * 1e3 if submitted else 0.0

    def close(self, *, drop: bool = False) -> None:
        """End the threads after what is queued, or without that; returns when they have ended."""
        while drop and not self._queue.empty():
            try:
                self._queue.get_nowait()
            except Empty:
                break  # a thread was quicker
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self, number: int) -> None:
        while (item := self._queue.get()) is not None:
            job, done, self._submitted[number] = item
            started = perf_counter()
            error: DiskError | None = None
            try:
                if self.delay_s:
                    sleep(self.delay_s)
                job.run()
            except DiskError as failure:
                error = failure
            except Exception as bug:  # noqa: BLE001  # ours: the node must stop, not this thread
                self._tell(partial(_raise, bug))
                return
            self._submitted[number] = None
            self._finished.append((done, error, perf_counter() - started))
            if not self._is_waking:  # a lost race costs one spare wake-up
                self._is_waking = True
                if not self._tell(self._report):
                    return

    def _tell(self, call: Callable[[], None]) -> bool:
        """Call something on the loop; False when the node is gone, and nobody waits any more."""
        try:
            self._token.run_sync_soon(call)
        except trio.RunFinishedError:
            return False
        return True

    def _report(self) -> None:
        self._is_waking = False
        with self.around():
            for _ in range(min(REPORT_MAX, len(self._finished))):
                done, error, seconds = self._finished.popleft()
                self.latency.observe(seconds)
                done(error)
        if self._finished and not self._is_waking:
            self._is_waking = True
            self._tell(self._report)


def _raise(bug: Exception) -> None:
    raise bug
