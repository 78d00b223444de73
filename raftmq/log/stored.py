"""Whole batches of a log as they lie in a file, found and checked off the loop, for catch-up.

A replica that is far behind gets megabytes that nobody has in memory. The job finds where batches
begin, checks every one, sums all bytes for the frame they will travel in, and by reading them
brings them into the page cache, so that the `sendfile` that follows does not wait for the disk. It
holds its own file and the epochs it needs; `run` may run in any thread.

Invariants: a chunk is whole, sound, contiguous batches between two bare entries and of one file;
what is damaged is reported, never sent.
"""

from __future__ import annotations

from typing import Final

from attrs import Factory, define
from crc32c import crc32c

from raftmq.log.batch_reader import BadBatch, checked_batches
from raftmq.log.model import FileSpan
from raftmq.log.verification import VerifyJob
from raftmq.records import HEADER_SIZE

STORED_BATCHES_MAX: Final = 256
"""In one chunk: each is an entry to its follower, which appends all of them in one turn."""


@define(slots=True, eq=False)
class StoredJob(VerifyJob):
    """Gathers batches from `offset` on, at most `bytes_max` or one.

    Attributes:
        batches: (base offset, next offset, leader epoch, size) of each.
        checksum: CRC-32C over all their bytes.
    """

    batches: list[tuple[int, int, int, int]] = Factory(list)
    checksum: int = 0

    @property
    def span(self) -> FileSpan:
        """Where the batches lie."""
        assert self.file is not None, "a missing file has no batches"
        size = sum(size for *_, size in self.batches)
        return FileSpan(self.file, self.position - size, size)

    def run(self) -> None:
        """Read, check and sum.

        Raises:
            DiskError: the device failed.
        """
        start = self.position
        if self.file is None or start >= self.size:
            return
        chunk = max(self.bytes_max, HEADER_SIZE)
        stored = checked_batches(self.file, start, self.size, self.offset, self.epochs, chunk=chunk)
        try:
            for position, header, data in stored:
                if header.base_offset >= self.end_offset or (
                    self.batches
                    and (
                        position - start + header.size > self.bytes_max
                        or len(self.batches) >= STORED_BATCHES_MAX
                    )
                ):
                    break
                self.batches.append(
                    (header.base_offset, header.next_offset, header.leader_epoch, header.size)
                )
                self.checksum = crc32c(data, self.checksum)
                self._add_verified(position, header)
                self.position, self.offset = position + header.size, header.next_offset
        except BadBatch as bad:
            if not self.batches:
                self._add_damage(bad)
        self.read_bytes = self.position - start
