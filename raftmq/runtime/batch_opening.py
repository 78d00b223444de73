"""Threads that look into produced batches, and the budget of what is looked into on the loop.

They are no other work's threads: a producer must not wait behind a slow disk, nor a replica that
catches up behind producers. Their number bounds the memory that opened batches take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from raftmq.partition.batch_opening import InlineBudget
from raftmq.ports import Clock, DiskError, Runnable
from raftmq.runtime.flusher import Flusher

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
