"""Check a stretch of a segment's bytes, in any thread, and bring the result back to the loop.

The job holds its own file and the epochs it needs; `run` reads and sums. `ReplicatedLog.checked`
(on the loop) changes the segment; it ignores the result when the file was cut or replaced since.
"""

from __future__ import annotations

from attrs import Factory, define

from raftmq.log.batch_reader import BadBatch, Epochs, checked_batches, find_after
from raftmq.log.holes import Holes
from raftmq.log.segment import Damage, Segment
from raftmq.ports import File
from raftmq.records import BatchHeader


@define(slots=True, eq=False)
class VerifyJob:
    """Checks bytes `[position, ...)` of one segment, about `bytes_max` of them.

    Attributes:
        verified: byte ranges found sound.
        holes: which of them hold no records.
        damages: what is not.
        sound_count: how many batches were found sound.
        offset: after `run`, the offset up to which the job came.
        version: of the segment when the job was made; another one voids the result.
    """

    segment: Segment
    file: File | None
    position: int
    offset: int
    bytes_max: int
    size: int
    end_offset: int
    epochs: Epochs
    version: int
    is_scrub: bool = False
    skip: tuple[Damage, ...] = ()
    verified: list[tuple[int, int]] = Factory(list)
    holes: Holes = Factory(Holes)
    damages: list[Damage] = Factory(list)
    read_bytes: int = 0
    sound_count: int = 0

    def run(self) -> None:
        """Read and check. Runs in any thread.

        Raises:
            DiskError: the device failed.
        """
        start = self.position
        while self.offset < self.end_offset and self.position - start < self.bytes_max:
            known = next((d for d in self.skip if d.position >= self.position), None)
            limit = self.size if known is None else known.position
            try:
                self._check(start, limit)
            except BadBatch as bad:
                self._add_damage(bad)
                continue
            if self.position < limit:
                break
            if known is None:
                break
            self.position, self.offset = known.position_end, known.end
        self.read_bytes = self.position - start

    def _check(self, start: int, limit: int) -> None:
        if self.position >= limit or self.file is None:
            return
        for batch in checked_batches(self.file, self.position, limit, self.offset, self.epochs):
            end = batch.position + batch.header.size
            self._add_verified(batch.position, batch.header)
            self.position, self.offset = end, batch.header.next_offset
            if end - start >= self.bytes_max:
                return

    def _add_verified(self, start: int, header: BatchHeader) -> None:
        self.sound_count += 1
        self.holes.note(start, header)
        end = start + header.size
        if self.verified and self.verified[-1][1] == start:
            self.verified[-1] = (self.verified[-1][0], end)
        else:
            self.verified.append((start, end))

    def _add_damage(self, bad: BadBatch) -> None:
        assert self.file is not None
        found = find_after(self.file, bad, self.size, self.end_offset - 1, self.epochs)
        position_end, end = found or (self.size, self.end_offset)
        self.damages.append(Damage(bad.offset, end, bad.position, position_end))
        self.position, self.offset = position_end, end
