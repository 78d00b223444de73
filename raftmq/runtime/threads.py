"""Threads for work that would hold up the loop; each kind has its own, and waits for no other.

`Flusher` threads do nothing but fdatasync. Group commit: while one flush of a file runs, more is
written behind it, and the next job covers all of that. One outstanding job per file is the callers'
rule (`ReplicatedLog.flush_job` gives none while one is out). The first thread does what it can
alone, since every thread that is woken takes the interpreter's lock from the loop; the others help
with jobs that have waited for long, as they do behind a slow disk or many files. Completions are
collected and wake the loop once, since a wake-up costs more than the completion itself; those of
one wake-up are reported within one `around`, so that what follows from them is done once.

`Workers` read and check cold bytes, a few jobs at a time, the rest in order of arrival; each is a
promise that settles on the loop. Threads are trio's cached ones, so an idle node has none.
`NodeBatchOpening` looks into produced batches: a producer must not wait behind a slow disk, nor a
replica that catches up behind producers; the number of its threads bounds the memory that opened
batches take. `NodeCatchUp` reads ahead of replicas that are far behind: a chunk leaves when the
rate allows it and the peer's stream has room, so what waits for a peer is bounded, and what was not
sent need not be sent twice.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from queue import SimpleQueue
from time import perf_counter, sleep
from typing import Any, Final, Protocol

import trio
from outcome import Error, Outcome

from raftmq.counts import Histogram
from raftmq.partition.produce_checks import InlineBudget
from raftmq.ports import Clock, DiskError, Runnable
from raftmq.promise import Promise
from raftmq.replication.catch_up import CatchUpRate
from raftmq.runtime.peer_links import PeerLinks
from raftmq.types import NodeId

REPORT_MAX: Final = 64
"""So many flushes are reported in one pass of the loop: a thousand groups may begin at once."""
PATIENCE_S: Final = 0.01
"""A job that has waited for so long calls another thread."""


class Job(Protocol):
    """What a flusher thread runs; touches captured files only."""

    def run(self) -> None: ...


Done = Callable[[DiskError | None], None]


class Flusher:
    """A small pool of threads tied to the trio loop that made it; used for other long work, too.

    Args:
        threads: how many there are at most.
        patience_s: how long a job waits before one more thread is woken; 0 for jobs that should
            rather run side by side than one after the other.

    Attributes:
        latency: flushes done since the start and the time that each took.
        around: entered around all completions of one pass; `MultiRaft.batch`, where logs flush.
        delay_s: how long a thread sleeps before each job; set by the fault switch alone.
    """

    def __init__(
        self, threads: int, name: str = "flusher", *, patience_s: float = PATIENCE_S
    ) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._patience_s = patience_s
        self._jobs: deque[tuple[Job, Done, float]] = deque()
        self._is_first_asleep = False
        self._helpers_asleep: deque[int] = deque()
        self._bells: list[SimpleQueue[None]] = [SimpleQueue() for _ in range(threads)]
        self._is_closing = False
        self._finished: deque[tuple[Done, DiskError | None, float]] = deque()
        self._is_waking = False
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        self.latency = Histogram()
        self.delay_s = 0.0
        self._submitted: list[float | None] = [None] * threads
        self._threads = [
            threading.Thread(
                target=self._help if number else self._work,
                args=(number,),
                name=f"{name}-{number}",
                daemon=True,
            )
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, done: Done) -> None:
        """Run `job` in a thread; then `done(error)` on the loop."""
        now = perf_counter()
        self._jobs.append((job, done, now))
        self._call(now)

    def longest_ms(self) -> float:
        """How long ago the oldest job that has not come back was submitted; 0 where none is out.

        Jobs begin in their order, so it is among those that are being run. Called at every tick,
        which also wakes a helper for a job that no other came after.
        """
        now = perf_counter()
        self._call(now)
        submitted = [start for start in self._submitted if start is not None]
        return (now - min(submitted)) * 1e3 if submitted else 0.0

    def close(self, *, drop: bool = False) -> None:
        """Run what is queued, unless `drop`, and end the threads; returns when they have ended."""
        if drop:
            self._jobs.clear()
        self._is_closing = True
        for bell in self._bells:
            bell.put(None)
        for thread in self._threads:
            thread.join()

    def _call(self, now: float) -> None:
        """Wake the first thread when there is work, another one when it has waited."""
        if not self._jobs:
            return
        if self._is_first_asleep:
            self._is_first_asleep = False
            self._bells[0].put(None)
        elif self._helpers_asleep and self._has_waited(now):
            self._bells[self._helpers_asleep.pop()].put(None)

    def _has_waited(self, now: float) -> bool:
        try:
            return now - self._jobs[0][2] >= self._patience_s
        except IndexError:
            return False  # a thread was quicker

    # ---- the threads ----

    def _work(self, number: int) -> None:
        """The first thread runs all jobs, until it is told to end."""
        while True:
            while self._jobs:
                if not self._run_next(number):
                    return
            if self._is_closing:
                return
            # It is marked as asleep before it looks again. So a job that comes in between is seen
            # here, or its submitter sees the mark. A ring too many costs one look.
            self._is_first_asleep = True
            if not self._jobs:
                self._bells[number].get()
            self._is_first_asleep = False

    def _help(self, number: int) -> None:
        """Other threads run jobs that have waited for long."""
        while not self._is_closing:
            while self._has_waited(perf_counter()):
                if not self._run_next(number):
                    return
            # As in the first: marked as asleep, then it looks again.
            self._helpers_asleep.append(number)
            if self._has_waited(perf_counter()) and self._is_awake_again(number):
                continue
            self._bells[number].get()

    def _is_awake_again(self, number: int) -> bool:
        """Take back that a helper is asleep; False when it was woken meanwhile: its bell rings."""
        try:
            self._helpers_asleep.remove(number)
        except ValueError:
            return False
        return True

    def _run_next(self, number: int) -> bool:
        """Run one job and report it; False when the loop has ended."""
        try:
            job, done, self._submitted[number] = self._jobs.popleft()
        except IndexError:
            return True  # another thread was quicker
        started = perf_counter()
        error: DiskError | None = None
        try:
            if self.delay_s:
                sleep(self.delay_s)
            job.run()
        except DiskError as failure:
            error = failure
        except Exception as bug:  # noqa: BLE001  # ours: the node must stop, not this thread
            self._call_on_loop(partial(_raise, bug))
            return False
        self._submitted[number] = None
        self._finished.append((done, error, perf_counter() - started))
        if self._is_waking:  # a lost race costs one spare wake-up
            return True
        self._is_waking = True
        return self._call_on_loop(self._report)

    def _call_on_loop(self, call: Callable[[], None]) -> bool:
        """Call something on the loop; False when the loop has ended."""
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
            self._call_on_loop(self._report)


def _raise(bug: Exception) -> None:
    raise bug


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
            with suppress(trio.RunFinishedError):  # the node stopped, so no one waits for it
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


OPENERS: Final = 2


class NodeBatchOpening:
    """`OpeningWorkers` of a real node."""

    def __init__(self, clock: Clock) -> None:
        self.inline = InlineBudget(clock)
        self._workers = Flusher(OPENERS, "batch-opener", patience_s=0.0)

    def run(self, job: Runnable, done: Callable[[DiskError | None], None]) -> None:
        """Run it in a worker thread."""
        self._workers.submit(job, done)

    def close(self) -> None:
        """End the threads after their present jobs."""
        self._workers.close(drop=True)


READERS: Final = 2


class NodeCatchUp:
    """`CatchUp` of a real node."""

    def __init__(self, links: PeerLinks, rate: CatchUpRate) -> None:
        self._links = links
        self._workers = Flusher(READERS, "reader", patience_s=0.0)
        self._menders = Flusher(1, "mender")
        self.rate = rate

    def run(self, job: Runnable, done: Callable[[DiskError | None], None]) -> None:
        """Run it in a worker thread."""
        self._workers.submit(job, done)

    def run_long(self, job: Runnable, done: Callable[[DiskError | None], None]) -> None:
        """Run it in the thread for long work."""
        self._menders.submit(job, done)

    def has_room(self, to: NodeId, size_bytes: int) -> bool:
        """True when the stream to that node would take a chunk."""
        return self._links.has_room_for_stored(to, size_bytes)

    def close(self) -> None:
        """End the threads after their present jobs; the rest is dropped."""
        self._workers.close(drop=True)
        self._menders.close(drop=True)
