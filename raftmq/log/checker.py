"""Which bytes of a log need checking, and what a check means: for serving and for the scrub.

Makes jobs that may run in a worker thread and takes their results back on the loop. Checked bytes
count as verified for a while; what has left memory since may come back from the device damaged.
"""

from __future__ import annotations

from collections.abc import Callable

from raftmq.log.batch_reader import Epochs
from raftmq.log.segment import Segment
from raftmq.log.segments import Segments
from raftmq.log.verify import VerifyJob
from raftmq.ports import Clock
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
