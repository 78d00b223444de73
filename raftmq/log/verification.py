"""Checks of stored bytes: for serving, for the scrub, and for catch-up.

Bytes count as verified once this process appended or checked them, for one to two periods
(`VerifiedRanges` of a segment keeps two generations of ranges and drops the older one): what has
left memory since may come back from the device damaged. `Checker` makes the jobs. A `VerifyJob`
holds its own file and the epochs it needs and reads in any thread; the loop takes the result back,
and ignores it when the file was cut or replaced since.

A `StoredJob` gathers whole batches for a replica that is far behind, megabytes that are on disk
alone: it finds where batches begin, checks every one, and sums all bytes for the frame in which
they will travel. Reading them brings them into the page cache, so that the `sendfile` that follows
does not wait for the disk. A chunk is whole, sound, contiguous batches between two bare entries and
of one file; what is damaged is reported, never sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from attrs import Factory, define
from crc32c import crc32c

from raftmq.log.batch_reader import BadBatch, Epochs, checked_batches, find_after
from raftmq.log.model import FileSpan
from raftmq.log.segment import Damage, Holes, Segment
from raftmq.log.segments import Segments
from raftmq.ports import Clock, File
from raftmq.records import HEADER_SIZE, BatchHeader
from raftmq.types import Offset


class Checker:
    """Checks one log's segments, each byte again and again."""

    def __init__(
        self,
        segments: Segments,
        epochs: Callable[[], Epochs],
        clock: Clock,
        verified_ms: int,
    ) -> None:
        self._segments = segments
        self._epochs = epochs
        self._clock = clock
        self._verified_ms = verified_ms
        self._rotate_at_ms = clock.monotonic_ms() + verified_ms
        self._scrubbed: VerifyJob | None = None

    def forget(self) -> None:
        """Let go of the last stretch: the log is closed."""
        self._scrubbed = None

    def rotate_if_due(self) -> None:
        """Let old verifications lapse; to be called before bytes are served."""
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._rotate_at_ms:
            self._rotate_at_ms = now_ms + self._verified_ms
            for segment in self._segments.all:
                segment.verified.rotate()

    def needed(self, offset: int, bytes_max: int, wanted: int = 1) -> VerifyJob | None:
        """A check of `bytes_max` from the batch at `offset` on; None when `wanted` of them are
        verified.

        Raises:
            DamagedError: the batch is known to be damaged.
        """
        self.rotate_if_due()
        if offset >= self._segments.end_offset:
            return None
        segment = self._segments.holding(offset)
        position, header = segment.batch_at(offset)
        verified = segment.verified.end_from(position) - position
        damage = segment.damage_from(position)
        limit = segment.size if damage is None else damage.position
        if verified and verified >= min(wanted, limit - position):
            return None
        return self._job(segment, position, header.base_offset, bytes_max)

    def next_stretch(self, first: int, bytes_max: int) -> VerifyJob | None:
        """A check of what follows the last stretch, at `first` again after the end."""
        self.rotate_if_due()
        last = self._segments.end_offset
        if first >= last:
            return None
        done = self._scrubbed
        at = first if done is None or not first <= done.offset < last else done.offset
        segment = self._segments.holding(at)
        goes_on = done is not None and at == done.offset and done.segment is segment
        if goes_on and done is not None and done.version == segment.version:
            position = done.position
        else:
            at, position = segment.floor(at)
        job = self._job(segment, position, at, bytes_max)
        job.is_scrub = True
        return job

    def _job(self, segment: Segment, position: int, offset: int, bytes_max: int) -> VerifyJob:
        return VerifyJob(
            segment=segment,
            file=None if segment.is_missing else segment.file,
            position=position,
            offset=offset,
            bytes_max=bytes_max,
            size=segment.size,
            end_offset=segment.end_offset,
            epochs=self._epochs(),
            version=segment.version,
            skip=tuple(segment.damages),
        )

    def take(self, job: VerifyJob) -> list[tuple[Offset, Offset]]:
        """Take over what a job found; returns damage that was not known before."""
        segment = job.segment
        if job.is_scrub:
            self._scrubbed = job
            job.file = None  # a segment that is dropped meanwhile gives its space back
        if job.version != segment.version or not any(s is segment for s in self._segments.all):
            return []  # cut, replaced or dropped meanwhile
        for start, end in job.verified:
            segment.verified.add(start, end)
        segment.holes.add_all(job.holes)
        for damage in job.damages:
            segment.mark_damaged(damage)
        return [(Offset(d.start), Offset(d.end)) for d in job.damages]


@define(slots=True, eq=False)
class VerifyJob:
    """Checks bytes `[position, ...)` of one segment, about `bytes_max` of them.

    Attributes:
        verified: byte ranges found sound.
        holes: which of them hold no records.
        damages: what was found damaged.
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
