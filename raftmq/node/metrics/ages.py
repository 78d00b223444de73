"""When records at committed offsets were written, remembered from scrape to scrape.

A group that does not move costs nothing; one that moves costs one look-up a scrape, in a worker
thread. Only positions that the last scrape wanted are kept, so memory is bounded by its rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from raftmq.log.reader import TimestampJob
from raftmq.ports import DiskError
from raftmq.types import Offset, RaftGroupId

if TYPE_CHECKING:
    from raftmq.partition.partition import Partition


class Ages:
    """Timestamps at committed offsets that earlier scrapes looked up."""

    def __init__(self) -> None:
        self._known: dict[tuple[RaftGroupId, int], int] = {}
        self._jobs: dict[tuple[RaftGroupId, int], TimestampJob] = {}

    def want(self, partition: Partition, offset: Offset) -> None:
        """Have the timestamp there looked up, unless it is known."""
        key = (partition.group, offset)
        if key in self._known or key in self._jobs:
            return
        try:
            self._jobs[key] = partition.replica.log.timestamp_job(offset)
        except DiskError:
            return  # a read for a client from there reports it

    def run(self) -> None:
        """Look up what is wanted. Runs in a worker thread."""
        for job in self._jobs.values():
            try:
                job.run()
            except DiskError:
                continue  # as above

    def take(self, wanted: Iterable[tuple[RaftGroupId, int]]) -> None:
        """Keep what was found, of the positions that are still wanted."""
        for key, job in self._jobs.items():
            if job.timestamp is not None:
                self._known[key] = job.timestamp
        self._jobs.clear()
        self._known = {key: self._known[key] for key in wanted if key in self._known}

    def timestamp(self, key: tuple[RaftGroupId, int]) -> int | None:
        """What is known of a position."""
        return self._known.get(key)
