"""When a record was written: the timestamp at an offset, read from batch headers in any thread.

The job is made on the loop, where the log is, and holds its own file; `run` walks headers from an
index entry to the batch wanted. No body is read, so within a batch its newest timestamp stands for
all records but the first.
"""

from __future__ import annotations

from attrs import define

from raftmq.log.batch_reader import BadBatch, walk_headers
from raftmq.log.reader import LogReader
from raftmq.ports import File
from raftmq.records import LOG_APPEND_TIME, BatchHeader, parse_header
from raftmq.types import Offset


@define(slots=True, eq=False)
class TimestampJob:
    """Finds the timestamp at `offset`; None after `run` where the bytes cannot be read."""

    offset: int
    file: File | None
    position: int
    size: int
    first_offset: int
    timestamp: int | None = None

    def run(self) -> None:
        """Read headers. Runs in any thread.

        Raises:
            DiskError: the device failed.
        """
        if self.timestamp is not None or self.file is None:
            return
        try:
            for _, header in walk_headers(self.file, self.position, self.size, self.first_offset):
                if header.next_offset > self.offset:
                    self.timestamp = _at(header, self.offset)
                    return
        except BadBatch:
            return  # damaged: whoever reads it for a client or scrubs it will say so


def timestamp_job(reader: LogReader, offset: Offset) -> TimestampJob:
    """A job for one offset of the log; already done where the batch is in memory."""
    slot = reader.recent.find(offset)
    batch = None if slot is None else reader.recent.at(slot)
    if batch is not None:
        stamp = _at(parse_header(batch.entry.payload), offset)
        return TimestampJob(offset, None, 0, 0, offset, stamp)
    if not reader.log_start.base_offset <= offset < reader.segments.end_offset:
        return TimestampJob(offset, None, 0, 0, offset)
    segment = reader.segments.holding(offset)
    first, position = segment.floor(offset)
    file = None if segment.is_missing else segment.file
    return TimestampJob(offset, file, position, segment.size, first)


def _at(header: BatchHeader, offset: int) -> int:
    is_first = header.base_offset == offset and header.timestamp_type != LOG_APPEND_TIME
    return header.base_timestamp if is_first else header.max_timestamp
