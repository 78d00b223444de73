"""Reads of a log that may not wait for a disk on the loop: what they need is fetched by a thread.

A read that lacks something comes back with a job instead. The job is done elsewhere, its outcome
handed to the partition, and the read begun anew, as often as it takes (an index, then the bytes,
then their check).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from raftmq.node.environment import Tasks
from raftmq.partition.partition import Partition
from raftmq.ports import Runnable


class Found(Protocol):
    """What a read gives."""

    @property
    def job(self) -> Runnable | None:
        """What has to be done first; None where nothing is lacking."""
        ...


F = TypeVar("F", bound=Found)


async def read_cold(tasks: Tasks, partition: Partition, read: Callable[[], F]) -> F:
    """What `read` gives once everything it needs is in memory.

    Raises:
        DiskError: the device failed.
    """
    while True:
        found = read()
        if found.job is None:
            return found
        await tasks.in_thread(found.job.run)
        partition.prepared(found.job)
