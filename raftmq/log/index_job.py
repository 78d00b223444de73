"""Indexes of a segment made anew in a worker, where their files are missing or damaged.

A segment that is kept may hold a gigabyte, and all of it must be read to make its indexes; on the
loop that would hold up everybody for seconds. So a twin of the segment looks at the same bytes in a
thread, and the loop takes over what it found (`Segment.adopt`), together with what was appended
meanwhile. The twin writes nothing.

Invariant: nothing is taken over from a twin whose segment was cut or given up since, or got its
indexes from another one.
"""

from __future__ import annotations

from attrs import define, field

from raftmq.log.segment import Segment
from raftmq.ports import DiskError, File


@define(slots=True, eq=False)
class IndexJob:
    """Looks at one segment from its beginning.

    Attributes:
        segment: whose indexes are needed.
        version: of it when the job was made; another one voids the job.
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
            return  # cut, gone, or another job came first: several may wait for the same indexes
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
            return False  # it shows again when the segment is read, to somebody who can tell
        return bool(segment.damages)
