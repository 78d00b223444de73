"""What a look-up would have to wait for the disk for, read by a worker first.

`sendfile` or a read of bytes that have left memory would block the loop. `is_warm` tells, `warm`
brings them back, for whatever sends files.

Before a consumer that is behind is answered, the loop looks into an index, walks headers and hands
out a span; any of these may have left memory. This finds what of it is not there and makes a job
that reads it, in any thread, so that the loop finds it there afterwards. One round may show only
what the next one needs (an index says where the bytes are), so the caller asks again after a job.
It decides nothing and checks nothing: bytes that must be verified are `verification.py`'s.

Indexes whose files are missing or damaged are made anew in the same way. All of a segment must be
read for that, up to a gigabyte, so a twin of it looks at the same bytes in a thread, writes
nothing, and the loop takes over what it found (`Segment.adopt`), together with what was appended
meanwhile.

Invariant: nothing is taken over from a twin whose segment was cut or let go since, or got its
indexes from another twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from attrs import define, field

from raftmq.log.indexes import DamagedIndexError
from raftmq.log.segment import Segment
from raftmq.ports import DiskError, File

READ_AHEAD_BYTES: Final = 256 << 10


def is_warm(file: File, position: int, size: int) -> bool:
    """True when these bytes are in memory; a cold sendfile would block the loop."""
    return size == 0 or file.is_cached(position, size)


def warm(file: File, position: int, size: int) -> None:
    """Bring bytes into memory; for a worker thread."""
    end = position + size
    while position < end:
        data = file.pread(min(READ_AHEAD_BYTES, end - position), position)
        if not data:
            return  # the send that follows reports the short file
        position += len(data)


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
    """What must come into memory before the batch at `offset`, and `size` bytes, can be read.

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


@define(slots=True, eq=False)
class IndexJob:
    """Looks at one segment from its beginning.

    Attributes:
        segment: the one whose indexes are needed.
        version: of the segment when the job was made; another one voids the job.
    """

    segment: Segment
    twin: Segment
    file: File
    size: int
    end_offset: int
    version: int = field(default=0)
    is_done: bool = field(default=False)

    @classmethod
    def of(cls, segment: Segment) -> IndexJob:
        """A job for a segment whose file is there.

        Raises:
            DiskError: it is not.
        """
        size, end = segment.size, segment.end_offset
        return cls(segment, segment.twin(), segment.file, size, end, segment.version)

    def run(self) -> None:
        """Read and check the segment. Runs in any thread.

        Raises:
            DiskError: the device failed.
        """
        if self.segment.version != self.version:
            return  # cut, gone, or another job for the same indexes came first
        self.twin.describe(self.file, self.size, self.end_offset)
        self.is_done = True

    def take(self) -> bool:
        """Give the segment what was found; on the loop. True when damage was found."""
        segment = self.segment
        if not self.is_done or segment.version != self.version or segment.is_missing:
            return False
        try:
            segment.adopt(self.twin)
        except DiskError:
            return False  # reading the segment will meet it again, where it can be reported
        return bool(segment.damages)
