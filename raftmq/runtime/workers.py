"""Threads for work that would hold up the loop; each kind has its own, and waits for no other.

`Workers` read and check cold bytes, a few jobs at a time, the rest in order of arrival; each is a
promise that settles on the loop. Threads are trio's cached ones, so an idle node has none.
`NodeBatchOpening` looks into produced batches: a producer must not wait behind a slow disk, nor a
replica that catches up behind producers; the number of its threads bounds the memory that opened
batches take. `NodeCatchUp` reads ahead of replicas that are far behind: a chunk leaves when the
rate allows it and the peer's stream has room, so what waits for a peer is bounded, and what was not
sent need not be sent twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

import trio
from outcome import Error, Outcome

from raftmq.partition.batch_opening import InlineBudget
from raftmq.ports import Clock, DiskError, Runnable
from raftmq.promise import Promise
from raftmq.replication.catch_up import CatchUpRate
from raftmq.runtime.flusher import Flusher
from raftmq.runtime.peer_links import PeerLinks
from raftmq.types import NodeId

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
        """End the threads after what they are at."""
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

    def admit(self, to: NodeId, size_bytes: int, batches: int, *, is_needed: bool) -> bool:
        """True when a chunk may leave now."""
        return self._links.has_room_for_stored(to, size_bytes) and self.rate.admit(
            size_bytes, batches, is_needed=is_needed
        )

    def close(self) -> None:
        """End the threads after what they are at; the rest is for a later life."""
        self._workers.close(drop=True)
        self._menders.close(drop=True)
