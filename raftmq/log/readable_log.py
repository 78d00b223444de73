"""The reading side of a log: entries, spans, headers, timestamps, and checks of stored bytes.

The base of `ReplicatedLog`, apart from it only so that each fits a reader. Changes nothing, except
that damage it meets is remembered.
"""

from __future__ import annotations

from collections.abc import Iterator

from raftmq.log.log_start import LogStart
from raftmq.log.model import FileSpan, LogEntry
from raftmq.log.prefetch import IndexJob, WarmJob
from raftmq.log.reader import LogReader
from raftmq.log.segments import Segments
from raftmq.log.timestamps import TimestampJob, timestamp_job
from raftmq.log.verification import Checker, StoredJob, VerifyJob
from raftmq.records import BatchHeader
from raftmq.types import LeaderEpoch, Offset, RaftIndex


class ReadableLog:
    """What can be asked of a log."""

    log_start: LogStart
    end_index: RaftIndex
    _checker: Checker
    _reader: LogReader
    _segments: Segments

    @property
    def damaged(self) -> list[tuple[Offset, Offset]]:
        """Offset ranges that should be here and cannot be read."""
        return self._segments.damaged(self.log_start.base_offset)

    # --- reading ----------------------------------------------------------------------------

    def entries(self, start: RaftIndex, bytes_max: int) -> tuple[LogEntry, ...]:
        """Entries from `start` on, about `bytes_max` of them, at least one if there is any.

        Raises:
            DamagedError: the first of them is damaged.
        """
        assert self.log_start.index <= start <= self.end_index
        return self._reader.entries(start, bytes_max)

    def is_at_hand(self, start: RaftIndex) -> bool:
        """True when `entries` from `start` on are in memory."""
        return self._reader.is_at_hand(start)

    def bare_run(self, start: RaftIndex) -> tuple[LogEntry, ...]:
        """The bare entries that stand together at `start`."""
        return self._reader.bare_run(start)

    def stored_job(self, start: RaftIndex, bytes_max: int) -> StoredJob | None:
        """Find the stored batches at `start`, where no bare entry is; None when none is stored.

        Run it in a worker thread, then hand it to `checked` as any check.

        Raises:
            DamagedError: the first of them is known to be damaged.
        """
        return self._reader.stored_job(start, bytes_max)

    def stored_job_at(self, offset: Offset, bytes_max: int) -> StoredJob | None:
        """As `stored_job`, from the batch on that contains `offset`.

        Raises:
            DamagedError: what is there is damaged.
        """
        return self._reader.stored_job_at(offset, bytes_max)

    def read_ahead(self, offset: Offset, bytes_max: int) -> WarmJob | IndexJob | None:
        """What `locate` would wait for the disk for; None when it is in memory.

        Run it in a worker thread, `take` what it found if it is about an index, and ask again: an
        index that was cold knows more now.
        """
        return self._reader.read_ahead(offset, bytes_max)

    def lookup_ahead(self, timestamp_ms: int | None, end: Offset) -> WarmJob | IndexJob | None:
        """As `read_ahead`, for `offset_for_timestamp` and (None) `max_timestamp`."""
        return self._reader.lookup_ahead(timestamp_ms, end)

    def locate(
        self,
        offset: Offset,
        bytes_max: int,
        end: Offset,
        *,
        at_least_one: bool = True,
        may_check: bool = True,
    ) -> list[FileSpan]:
        """Spans of whole verified batches from the one that contains `offset`, none past `end`.

        What is not verified is checked here, or ends the spans where that may not be. A batch that
        carries no records is in no span: the next that does goes along in its place.

        Raises:
            DamagedError: the first of them is damaged.
        """
        assert self.log_start.offset <= offset
        self._checker.rotate_if_due()
        return self._reader.locate(
            offset, bytes_max, end, at_least_one=at_least_one, may_check=may_check
        )

    def past_holes(self, offset: Offset) -> Offset:
        """The first offset at or above `offset` where there may be a record, as far as is known."""
        return Offset(self._reader.past_holes(offset))

    def records_end(self, end: Offset) -> Offset:
        """Where the records below `end` end: readers are told so, since one that waits for what
        lies in a hole would wait for ever."""
        return Offset(self._reader.records_end(end))

    def headers(self, start: Offset, end: Offset) -> Iterator[BatchHeader]:
        """Headers of the batches that overlap `[start, end)`.

        Raises:
            DamagedError: when it comes to a damaged one.
        """
        return self._reader.headers(start, end)

    def check_stored(self, offset: Offset) -> None:
        """Check the batch that contains `offset`, unless it was: `headers` reads no bodies.

        Raises:
            DamagedError: it is damaged.
        """
        self._checker.rotate_if_due()
        self._reader.check_stored(offset)

    def offset_for_timestamp(
        self, timestamp_ms: int, end: Offset
    ) -> tuple[int, Offset, LeaderEpoch] | None:
        """The first record below `end` that is not older: (timestamp, offset, epoch).

        Raises:
            DamagedError: damage hides the answer.
        """
        return self._reader.offset_for_timestamp(timestamp_ms, end)

    def max_timestamp(self, end: Offset) -> tuple[int, Offset, LeaderEpoch] | None:
        """The newest record below `end`: (timestamp, offset, epoch).

        Raises:
            DamagedError: damage hides the answer.
        """
        return self._reader.max_timestamp(end)

    def bytes_from(self, offset: Offset) -> int:
        """About how many stored bytes follow `offset`: exact to an index interval."""
        if offset >= self._segments.end_offset:
            return 0
        at = max(0, self._segments.at(offset))
        segment, *later = self._segments.all[at:]
        _, position = segment.floor(max(offset, segment.base_offset))
        return segment.size - position + sum(other.size for other in later)

    def timestamp_job(self, offset: Offset) -> TimestampJob:
        """A job, for any thread, that finds when the record at `offset` was written.

        Raises:
            DiskError: the device failed.
        """
        return timestamp_job(self._reader, offset)

    # --- checking ---------------------------------------------------------------------------

    def needs_verification(
        self, offset: Offset, bytes_max: int, wanted: int = 1
    ) -> VerifyJob | None:
        """A check of `bytes_max` that `locate` would otherwise make inline; None when `wanted` of
        them are verified.

        Run it in a worker thread, then hand it to `checked`.

        Raises:
            DamagedError: the batch is known to be damaged.
        """
        return self._checker.needed(offset, bytes_max, wanted)

    def scrub_job(self, bytes_max: int) -> VerifyJob | None:
        """Check the next stretch of the log, from the start again after the end; None if empty."""
        return self._checker.next_stretch(self.log_start.base_offset, bytes_max)

    def checked(self, job: VerifyJob) -> list[tuple[Offset, Offset]]:
        """Take over what a job found; returns damage that was not known before."""
        if isinstance(job, StoredJob):
            self._reader.stored_found(job)
        return self._checker.take(job)

    def scrub(self, budget_bytes: int) -> list[tuple[Offset, Offset]]:
        """Check about `budget_bytes` more of the log here and now; returns new damage.

        Raises:
            DiskError: the device failed.
        """
        job = self.scrub_job(budget_bytes)
        if job is None:
            return []
        job.run()
        return self.checked(job)
