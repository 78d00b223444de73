"""What a look-up would have to wait for the disk for, read by a worker first.

Before a consumer that is behind is answered, the loop looks into an index, walks headers and hands
out a span; any of these may have left memory. This finds what of it is not there and makes a job
that reads it, in any thread, so that the loop finds it there afterwards. One round may show only
what the next one needs (an index says where the bytes are), so the caller asks again after a job.

Decides nothing and checks nothing: bytes that must be verified are `verify.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from attrs import define

from raftmq.log.index_job import IndexJob
from raftmq.log.page_cache import is_warm, warm
from raftmq.log.segment import Segment
from raftmq.log.sparse_index import DamagedIndexError
from raftmq.ports import File

BEYOND_BYTES: Final = 16 << 10
"""A walk over headers reads a little more than it was asked for."""
LOOKUP_BYTES: Final = 128 << 10
"""A look-up by time walks an index interval of headers and reads the batch that it comes to."""


@define(slots=True, eq=False)
class WarmJob:
    """Brings stretches of files into memory."""

    stretches: tuple[tuple[File, int, int], ...]

    def run(self) -> None:
        """Read them. Runs in any thread.

        Raises:
            DiskError: the device failed.
        """
        for file, position, size in self.stretches:
            warm(file, position, size)


def cold_job(
    segments: Sequence[Segment], offset: int, position: int | None, size: int
) -> WarmJob | IndexJob | None:
    """What must come into memory before the batch at `offset` and `size` bytes can be found.

    `segments` begin with the one that holds the batch; `position` is where that batch begins, None
    when the index must say it.
    """
    cold: list[tuple[File, int, int]] = []
    for segment in segments:
        if size <= 0 or segment.is_missing:
            break
        if segment.base_offset >= offset:
            position = 0
        index = segment.offset_index.unloaded_file()
        if index is not None and not is_warm(index[0], 0, index[1]):
            cold.append((index[0], 0, index[1]))
            if position is None:
                break  # where the bytes are shows when it is loaded
        if position is None:
            try:
                position = segment.offset_index.floor(offset)[1]
            except DamagedIndexError:
                return IndexJob.of(segment)
        wanted = min(size + BEYOND_BYTES, segment.size - position)
        if wanted > 0 and not is_warm(segment.file, position, wanted):
            cold.append((segment.file, position, wanted))
        size -= segment.size - position
    return WarmJob(tuple(cold)) if cold else None


def lookup_job(
    segment: Segment, timestamp_ms: int | None, offset: int
) -> WarmJob | IndexJob | None:
    """What must come into memory before a look-up by time walks a segment's headers: its indexes,
    then the bytes where they say that it begins. With no `timestamp_ms` it begins at `offset`."""
    if segment.is_missing:
        return None
    cold: list[tuple[File, int, int]] = []
    for index in (segment.time_index, segment.offset_index):
        unloaded = index.unloaded_file()
        if unloaded is not None and not is_warm(unloaded[0], 0, unloaded[1]):
            cold.append((unloaded[0], 0, unloaded[1]))
    if cold:
        return WarmJob(tuple(cold))
    try:
        if timestamp_ms is not None:
            offset = max(offset, segment.time_index.start_for(timestamp_ms))
        position = segment.offset_index.floor(offset)[1]
    except DamagedIndexError:
        return IndexJob.of(segment)
    size = min(LOOKUP_BYTES, segment.size - position)
    if size <= 0 or is_warm(segment.file, position, size):
        return None
    return WarmJob(((segment.file, position, size),))
