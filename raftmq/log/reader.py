"""The reading side of a log: entries for followers, spans for consumers, headers, timestamps.

The base of `ReplicatedLog`, which writes. Hot reads come from the recent batches without a disk
read or a copy. Cold ones find a boundary in the sparse index, walk headers and check what they
read. A span is given out only of bytes that were appended by this process or checked lately; what
is not yet verified is checked here, in bounded pieces. Reading never changes the log, except that
damage it meets is remembered.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import islice
from typing import Final

from attrs import define

from raftmq.log.bare_entries import BareEntries
from raftmq.log.batch_reader import BadBatch, walk_headers
from raftmq.log.indexes import DamagedIndexError
from raftmq.log.log_start import LogStart
from raftmq.log.model import BATCH_KIND, BareEntry, DamagedError, FileSpan, LogConfig, LogEntry
from raftmq.log.prefetch import LOOKUP_BYTES, IndexJob, WarmJob, cold_job, lookup_job
from raftmq.log.recent import RecentBatches
from raftmq.log.segment import Segment, carries_records
from raftmq.log.segments import AbortedTransactions, Segments
from raftmq.log.verification import Checker, StoredJob, VerifyJob
from raftmq.ports import Clock, File
from raftmq.records import (
    HEADER_SIZE,
    LOG_APPEND_TIME,
    TIMESTAMP_MAX,
    BatchHeader,
    Marker,
    parse_header,
    parse_marker,
    read_records,
)
from raftmq.types import Buffer, LeaderEpoch, Offset, RaftIndex

ENTRIES_MAX: Final = 256
"""In one answer, however small they are: each is an object here and an append at a follower."""
_CURSORS_MAX: Final = 32
_SEGMENTS_AHEAD: Final = 8
_BARE_OVERHEAD: Final = 64
_MARKER_CHUNK: Final = 128
"""A control batch has 78 bytes."""
_SPANS_MAX: Final = 64
"""Each hole between two batches costs a span, and its span a look into the index."""
_HOLE_CHECK_BYTES: Final = 64 << 10
"""About a thousand empty batches that were not checked yet; at most twice in one `locate`."""


@define(slots=True)
class StagedBatch:
    """A batch that waits in memory for a bare entry before it to be flushed."""

    header: BatchHeader
    data: Buffer


@define(slots=True, eq=False)
class TimestampJob:
    """Finds when the record at `offset` was written; None after `run` where that cannot be read.

    It is made on the loop and holds its own file. No body is read, so within a batch its newest
    timestamp stands for all records but the first.
    """

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
                    self.timestamp = _timestamp_at(header, self.offset)
                    return
        except BadBatch:
            return  # damaged: reading it for a client, or the scrub, reports it


class ReadableLog:
    """What can be asked of a log. `ReplicatedLog` makes its parts and keeps them up to date."""

    def __init__(
        self,
        config: LogConfig,
        log_start: LogStart,
        clock: Clock,
        bare: BareEntries,
        segments: Segments,
        recent: RecentBatches,
    ) -> None:
        self.config = config
        self.log_start = log_start
        self.log_end_offset = Offset(segments.end_offset)
        self.end_index = RaftIndex(0)
        self._bare = bare
        self._segments = segments
        self._recent = recent
        self._staged: deque[StagedBatch] = deque()
        self._checker = Checker(segments, bare.epochs, clock, config.verified_ms)
        self.aborted = AbortedTransactions(segments, log_start.base_offset)
        """Which transactions were aborted, as far as the state machine has told."""
        # Where `headers` came to: segment, its version, position, header.
        self._walked: tuple[Segment, int, int, BatchHeader] | None = None
        # Where readers probably go on: offsets, and the segment and position at which they are.
        self._cursors: OrderedDict[int, tuple[Segment, int]] = OrderedDict()

    @property
    def damaged(self) -> list[tuple[Offset, Offset]]:
        """Offset ranges that should be here and cannot be read."""
        return self._segments.damaged(self.log_start.base_offset)

    def _forget_positions(self) -> None:
        """Files were cut or replaced."""
        self._cursors.clear()

    def _steps(self) -> int:
        """Bare entries before the log start."""
        return self.log_start.index - self.log_start.base_offset

    # --- entries ----------------------------------------------------------------------------

    def entries(self, start: RaftIndex, bytes_max: int) -> tuple[LogEntry, ...]:
        """Entries from `start` on, at least one if there is any.

        They are about `bytes_max`, and at most `ENTRIES_MAX`.

        Raises:
            DamagedError: the first of them is damaged.
        """
        assert self.log_start.index <= start <= self.end_index
        bare = self._bare
        at = bare.count_below(start)
        offset = start - self._steps() - at
        out: list[LogEntry] = []
        left = bytes_max
        end_offset = self.log_end_offset
        try:
            while left > 0 and len(out) < ENTRIES_MAX:
                if at < len(bare.entries) and bare.offsets[at] == offset:
                    entry = bare.entries[at]
                    left -= len(entry.payload) + _BARE_OVERHEAD
                    if out and left < 0:
                        break
                    out.append(_bare_log_entry(entry))
                    at += 1
                    continue
                limit = bare.offsets[at] if at < len(bare.entries) else end_offset
                if offset >= limit:
                    break
                used, offset = self._batches(offset, limit, left, at + self._steps(), out)
                if not used:
                    break
                left -= used
        except DamagedError:
            if not out:
                raise
        return tuple(out)

    def _batches(
        self, offset: int, limit: int, left: int, steps: int, out: list[LogEntry]
    ) -> tuple[int, int]:
        """Add batches in `[offset, limit)`; returns bytes used and the next offset."""
        slot = self._recent.find(offset)
        if slot is not None:
            return self._recent_batches(slot, offset, limit, left, out)
        if offset >= self._segments.end_offset:
            return self._staged_batches(offset, limit, left, steps, out)
        used = 0
        segment, position = self._position_of(offset)
        for batch in segment.batches_from(position, offset, chunk=max(left, HEADER_SIZE)):
            header = batch.header
            if header.base_offset >= limit or (out and header.size > left - used):
                break
            out.append(_log_entry(header, steps, batch.data))
            used += header.size
            offset = header.next_offset
            position = batch.position + header.size
            is_full = used >= left or len(out) >= ENTRIES_MAX
            if is_full or self._recent.find(offset) is not None:
                break
        if offset < segment.end_offset:
            self._remember(offset, segment, position)
        return used, offset

    def _recent_batches(
        self, slot: int, offset: int, limit: int, left: int, out: list[LogEntry]
    ) -> tuple[int, int]:
        used = 0
        while offset < limit and (batch := self._recent.at(slot)) is not None:
            if out and (batch.size > left - used or len(out) >= ENTRIES_MAX):
                break
            out.append(batch.entry)
            used += batch.size
            offset = batch.next_offset
            slot += 1
        return used, offset

    def _staged_batches(
        self, offset: int, limit: int, left: int, steps: int, out: list[LogEntry]
    ) -> tuple[int, int]:
        """Staged batches that the recent ones had no room for any more."""
        used = 0
        for staged in self._staged:
            header = staged.header
            if header.base_offset < offset:
                continue
            is_full = out and (header.size > left - used or len(out) >= ENTRIES_MAX)
            if header.base_offset >= limit or is_full:
                break
            out.append(_log_entry(header, steps, staged.data))
            used += header.size
            offset = header.next_offset
        return used, offset

    def _position_of(self, offset: int) -> tuple[Segment, int]:
        """Where the batch that begins at `offset` lies.

        Raises:
            DamagedError: it is damaged.
        """
        cursor = self._cursors.get(offset)
        if cursor is not None and cursor[1] < cursor[0].size:
            return cursor  # at a segment's end the next batch may have gone to another one
        segment = self._segments.holding(offset)
        position, header = segment.batch_at(offset)
        assert header.base_offset == offset, "not an entry boundary"
        return segment, position

    def _remember(self, offset: int, segment: Segment, position: int) -> None:
        """The next reader probably goes on here."""
        self._cursors[offset] = (segment, position)
        if len(self._cursors) > _CURSORS_MAX:
            self._cursors.popitem(last=False)

    # --- for replicas far behind --------------------------------------------------------------

    def _place_of(self, start: RaftIndex) -> tuple[int, int]:
        """How many bare entries come before an index, and the offset there."""
        at = self._bare.count_below(start)
        return at, start - self._steps() - at

    def is_at_hand(self, start: RaftIndex) -> bool:
        """True when `entries` from `start` on are in memory: recent batches reach up to the end."""
        _, offset = self._place_of(start)
        return offset >= self._segments.end_offset or self._recent.find(offset) is not None

    def bare_run(self, start: RaftIndex) -> tuple[LogEntry, ...]:
        """The bare entries that stand together at `start`."""
        at, offset = self._place_of(start)
        end = at
        while end < len(self._bare.entries) and self._bare.offsets[end] == offset:
            end += 1
        return tuple(_bare_log_entry(entry) for entry in self._bare.entries[at:end])

    def stored_job(self, start: RaftIndex, bytes_max: int) -> StoredJob | None:
        """Find the stored batches at `start`, where no bare entry is; None when none is stored.

        Run it in a worker thread, then hand it to `checked` as any check.

        Raises:
            DamagedError: the first of them is known to be damaged.
        """
        at, offset = self._place_of(start)
        if offset >= self._segments.end_offset:
            return None
        return self._stored_job(*self._position_of(offset), offset, at, bytes_max)

    def stored_job_at(self, offset: Offset, bytes_max: int) -> StoredJob | None:
        """As `stored_job`, from the batch on that contains `offset`, behind all bare entries there.

        Raises:
            DamagedError: what is there is damaged.
        """
        if offset >= self._segments.end_offset:
            return None
        segment = self._segments.holding(offset)
        position, header = segment.batch_at(offset)
        base = header.base_offset
        return self._stored_job(segment, position, base, self._bare.count_up_to(base), bytes_max)

    def _stored_job(
        self, segment: Segment, position: int, offset: int, at: int, bytes_max: int
    ) -> StoredJob:
        bare = self._bare
        limit = bare.offsets[at] if at < len(bare.entries) else self._segments.end_offset
        damage = next((d for d in segment.damages if d.position >= position), None)
        if damage is not None and damage.position == position:
            raise DamagedError(Offset(damage.start), Offset(damage.end))
        return StoredJob(
            segment=segment,
            file=segment.file,
            position=position,
            offset=offset,
            bytes_max=bytes_max,
            size=segment.size if damage is None else damage.position,
            end_offset=min(limit, segment.end_offset),
            epochs=bare.epochs(),
            version=segment.version,
        )

    # --- spans ------------------------------------------------------------------------------

    def read_ahead(self, offset: Offset, bytes_max: int) -> WarmJob | IndexJob | None:
        """What `locate` would wait for the disk for; None when it is in memory.

        Run it in a worker thread, `take` what it found if it is about an index, and ask again: an
        index that was cold knows more now.
        """
        if offset >= self._segments.end_offset or self._recent.find(offset) is not None:
            return None
        segments = self._segments
        at = segments.at(offset)
        cursor = self._cursors.get(offset)
        is_known = cursor is not None and cursor[0] is segments.all[at]
        position = cursor[1] if cursor is not None and is_known else None
        return cold_job(segments.all[at : at + _SEGMENTS_AHEAD], offset, position, bytes_max)

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
        carries no records is in no span: the next that does goes along in its place (`segment.py`).

        Raises:
            DamagedError: the first of them is damaged.
        """
        assert self.log_start.offset <= offset
        self._checker.rotate_if_due()
        at = int(offset)
        limit = min(int(end), self._segments.end_offset)
        left = bytes_max
        spans: list[FileSpan] = []
        has_met_hole = False
        while (left > 0 or (at_least_one and not spans)) and len(spans) < _SPANS_MAX:
            at = self._past_holes(at)
            if at >= limit:
                break
            try:
                must = at_least_one and not spans
                span, after = self._span(at, left, limit, must=must, may_check=may_check)
            except DamagedError:
                if spans:
                    break
                raise
            if span is None:
                if after == at or has_met_hole:
                    break  # a longer row of empty batches is left to the next call
                has_met_hole = True
                at = after
                continue
            left -= span.size
            last = spans[-1] if spans else None
            if (
                last is not None
                and last.file is span.file
                and (last.position + last.size == span.position)
            ):
                size = last.size + span.size
                spans[-1] = FileSpan(last.file, last.position, size, after, last.base_offset)
            else:
                spans.append(span)
            at = after
        return spans

    def _span(
        self, offset: int, left: int, end: int, *, must: bool, may_check: bool
    ) -> tuple[FileSpan | None, int]:
        slot = self._recent.find(offset)
        if slot is not None:
            found = self._recent_span(slot, left, end, must=must)
            if found is not None:
                return found
        segment, position, first = self._batch_at(offset)
        if first.next_offset > end or (first.size > left and not must and carries_records(first)):
            return None, offset
        verified_end = segment.verified.end_from(position)
        if verified_end < position + first.size:
            if not may_check:
                return None, offset  # left to a worker, once these bytes are asked for
            if not carries_records(first):
                return None, self._check_hole(segment, position, first.base_offset)
            after, to = self._verify(segment, position, first, left, end)
        else:
            limit = min(verified_end, position + max(left, first.size))
            limit = segment.holes.position_from(position, limit)
            after, to = _boundary(segment, position, first, limit, end)
        self._remember(after, segment, to)
        base = first.base_offset
        return FileSpan(segment.file, position, to - position, after, base), after

    def _recent_span(
        self, slot: int, left: int, end: int, *, must: bool
    ) -> tuple[FileSpan | None, int] | None:
        """A span of batches appended lately; None when their bytes need another check."""
        first = self._recent.at(slot)
        assert first is not None
        if first.next_offset > end or (first.size > left and not must):
            return None, first.base_offset
        start = first.position
        segment = self._segments.holding(first.base_offset)
        limit = min(start + max(left, first.size), segment.verified.end_from(start))
        if start < 0 or limit < start + first.size:
            return None
        limit = segment.holes.position_from(start, limit)
        last = self._recent.last_within(slot, end, limit, segment.base_offset)
        size = last.position + last.size - start
        after = last.next_offset
        return FileSpan(segment.file, start, size, after, first.base_offset), after

    def _batch_at(self, offset: int) -> tuple[Segment, int, BatchHeader]:
        """Segment, position and header of the batch that contains `offset`."""
        cursor = self._cursors.get(offset)
        if cursor is not None and cursor[1] + HEADER_SIZE <= cursor[0].size:
            segment, position = cursor
            header = parse_header(segment.file.pread(HEADER_SIZE, position))
            if header.base_offset == offset and segment.verified.end_from(position) > position:
                return segment, position, header
        segment = self._segments.holding(offset)
        position, header = segment.batch_at(offset)
        return segment, position, header

    def _check_hole(self, segment: Segment, position: int, base: int) -> int:
        """Check a row of empty batches, as far as one call may; returns the offset after it.

        Raises:
            DamagedError: the first of them is damaged.
        """
        limit = position + _HOLE_CHECK_BYTES
        try:
            for batch in segment.batches_from(position, base, chunk=_HOLE_CHECK_BYTES):
                if carries_records(batch.header) or batch.position >= limit:
                    break
        except DamagedError:
            if segment.holes.past(base) == base:
                raise
        return segment.holes.past(base)

    def past_holes(self, offset: Offset) -> Offset:
        """The first offset at or above `offset` where there may be a record, as far as is known."""
        return Offset(self._past_holes(offset))

    def _past_holes(self, offset: int) -> int:
        """The first offset at or above `offset` that is not known to lie in a hole."""
        segments = self._segments.all
        at = self._segments.at(offset)
        while 0 <= at < len(segments) and segments[at].holes:
            after = segments[at].holes.past(offset)
            if after == offset or after < segments[at].end_offset:
                return after
            offset = after
            at += 1
        return offset

    def records_end(self, end: Offset) -> Offset:
        """Where the records below `end` end: before the hole that reaches up to it, if one does.
        Readers are told so, since one that waits for what lies in a hole would wait for ever."""
        return Offset(self._records_end(end))

    def _records_end(self, end: int) -> int:
        segments = self._segments.all
        if segments and end > segments[-1].base_offset and not segments[-1].holes:
            return end  # nearly always
        start = min(end, int(self.log_start.offset))
        at = self._segments.at(end - 1)
        while at >= 0 and end > start:
            before = segments[at].holes.before(end)
            if before == end or before > segments[at].base_offset:
                return max(before, start)
            end = before
            at -= 1
        return max(end, start)

    def _verify(
        self, segment: Segment, position: int, first: BatchHeader, left: int, end: int
    ) -> tuple[int, int]:
        """Check from a batch on, as far as one call may; returns the end as (offset, position)."""
        bytes_max = max(first.size, min(left, self.config.verify_bytes_max))
        limit = position + bytes_max
        to, after = position, first.base_offset
        try:
            for batch in segment.batches_from(position, first.base_offset, chunk=bytes_max):
                if batch.header.next_offset > end or batch.position + batch.header.size > limit:
                    break
                if not carries_records(batch.header):
                    break
                to, after = batch.position + batch.header.size, batch.header.next_offset
                if to >= limit:
                    break
        except DamagedError:
            if to == position:
                raise
        return after, to

    # --- headers and times ------------------------------------------------------------------

    def headers(self, start: Offset, end: Offset) -> Iterator[BatchHeader]:
        """Headers of the batches that overlap `[start, end)`, staged ones included.

        Raises:
            DamagedError: when it comes to a damaged one.
        """
        at = max(int(start), self.log_start.base_offset)
        while at < min(end, self._segments.end_offset):
            segment = self._segments.holding(at)
            for position, header in segment.headers_from(at, confirmed=True):
                if header.base_offset >= end:
                    return
                at = header.next_offset
                # Whoever walks may want to know what it says, or whether it is sound.
                self._walked = segment, segment.version, position, header
                yield header
        for staged in list(self._staged):
            if staged.header.next_offset > at and staged.header.base_offset < end:
                yield staged.header

    def marker(self, offset: Offset) -> Marker:
        """What the control batch at `offset` says, checked; cheap after `headers` came to it.

        Raises:
            DamagedError: it is damaged.
            CorruptBatchError: it ends no transaction.
        """
        for staged in self._staged:
            if staged.header.base_offset == offset:
                return parse_marker(staged.data)
        segment, position, _ = self._walked_to(offset)
        found = segment.batches_from(position, offset, chunk=_MARKER_CHUNK)
        return parse_marker(next(found).data)

    def check_stored(self, offset: Offset) -> None:
        """Check the batch that contains `offset`, unless it was: `headers` reads no bodies.

        Raises:
            DamagedError: it is damaged.
        """
        if offset >= self._segments.end_offset:
            return  # not written yet
        self._checker.rotate_if_due()
        _read_unless_checked(*self._walked_to(offset))

    def _walked_to(self, offset: Offset) -> tuple[Segment, int, BatchHeader]:
        """The batch that contains an offset: (segment, position, header); cheap for the one that
        `headers` came to.

        Raises:
            DamagedError: it is damaged.
        """
        if self._walked is not None:
            segment, version, position, header = self._walked
            if header.base_offset == offset and segment.version == version:
                return segment, position, header
        return self._batch_at(offset)

    def offset_for_timestamp(
        self, timestamp_ms: int, end: Offset
    ) -> tuple[int, Offset, LeaderEpoch] | None:
        """The first record below `end` that is not older: (timestamp, offset, epoch).

        Raises:
            DamagedError: damage hides the answer.
        """
        self._checker.rotate_if_due()
        start = int(self.log_start.offset)
        for segment in self._segments.all[max(0, self._segments.at(start)) :]:
            if segment.max_timestamp < timestamp_ms and not segment.damages:
                continue
            at = max(start, _or_base(segment, timestamp_ms))
            for position, header in _sound_headers(segment, at, timestamp_ms):
                if header.base_offset >= end:
                    return None
                if header.max_timestamp < timestamp_ms or header.next_offset <= start:
                    continue
                found = _first_record(segment, position, header, timestamp_ms, start, end)
                if found is not None:
                    return found
        return None

    def lookup_ahead(self, timestamp_ms: int | None, end: Offset) -> WarmJob | IndexJob | None:
        """As `read_ahead`, for `offset_for_timestamp` and (None) `max_timestamp`."""
        start = int(self.log_start.offset)
        best: Segment | None = None
        for segment in self._segments.all[max(0, self._segments.at(start)) :]:
            if segment.base_offset >= end:
                break
            if timestamp_ms is None:
                if best is None or segment.max_timestamp > best.max_timestamp:
                    best = segment
            elif segment.max_timestamp >= timestamp_ms:
                best = segment
                break
        if best is None:
            return None
        at = best.max_timestamp_offset if timestamp_ms is None else best.base_offset
        return lookup_job(best, timestamp_ms, max(start, at))

    def max_timestamp(self, end: Offset) -> tuple[int, Offset, LeaderEpoch] | None:
        """The newest record below `end`, a batch's end: (timestamp, offset, epoch). The first if
        several are as new (KIP-734).

        Raises:
            DamagedError: damage hides the answer.
        """
        self._checker.rotate_if_due()
        start = int(self.log_start.offset)
        best: tuple[int, int, Segment] | None = None
        for segment in self._segments.all[max(0, self._segments.at(start)) :]:
            if segment.base_offset >= end:
                break
            if best is not None and segment.max_timestamp <= best[0]:
                continue
            found = _greatest(segment, start, end)
            if found is not None and (best is None or found[0] > best[0]):
                best = (*found, segment)
        if best is None:
            return None
        stamp, offset, segment = best
        position, header = segment.batch_at(offset)
        return _first_record(segment, position, header, stamp, start, end)

    def bytes_from(self, offset: Offset) -> int:
        """About how many stored bytes follow `offset`: exact to an index interval."""
        if offset >= self._segments.end_offset:
            return 0
        at = max(0, self._segments.at(offset))
        segment, *later = self._segments.all[at:]
        _, position = segment.floor(max(offset, segment.base_offset))
        return segment.size - position + sum(other.size for other in later)

    def timestamp_job(self, offset: Offset) -> TimestampJob:
        """A job, for any thread, that finds when the record at `offset` was written; already done
        where the batch is in memory.

        Raises:
            DiskError: the device failed.
        """
        slot = self._recent.find(offset)
        batch = None if slot is None else self._recent.at(slot)
        if batch is not None:
            stamp = _timestamp_at(parse_header(batch.entry.payload), offset)
            return TimestampJob(offset, None, 0, 0, offset, stamp)
        if not self.log_start.base_offset <= offset < self._segments.end_offset:
            return TimestampJob(offset, None, 0, 0, offset)
        segment = self._segments.holding(offset)
        first, position = segment.floor(offset)
        file = None if segment.is_missing else segment.file
        return TimestampJob(offset, file, position, segment.size, first)

    # --- checks of stored bytes -------------------------------------------------------------

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
        if (
            isinstance(job, StoredJob)
            and job.version == job.segment.version
            and job.offset < job.segment.end_offset
        ):
            self._remember(job.offset, job.segment, job.position)
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


def _log_entry(header: BatchHeader, steps: int, data: Buffer) -> LogEntry:
    return LogEntry(
        RaftIndex(header.base_offset + steps),
        RaftIndex(header.next_offset + steps),
        LeaderEpoch(header.leader_epoch),
        BATCH_KIND,
        data,
    )


def _bare_log_entry(entry: BareEntry) -> LogEntry:
    end = RaftIndex(entry.index + 1)
    return LogEntry(entry.index, end, entry.leader_epoch, entry.kind, entry.payload)


def _or_base(segment: Segment, timestamp_ms: int) -> int:
    try:
        return segment.time_index.start_for(timestamp_ms)
    except DamagedIndexError:
        segment.rebuild()
        return segment.base_offset


def _boundary(
    segment: Segment, position: int, first: BatchHeader, limit: int, end: int
) -> tuple[int, int]:
    """The last known batch end in verified bytes: (offset, position), not past `end` or `limit`.

    Whole segment, else an index pair (confirmed in the file, since a wrong one would show bytes
    above the high watermark), else a walk over headers.
    """
    if segment.size <= limit and segment.end_offset <= end:
        return segment.end_offset, segment.size
    try:
        offset, at = segment.offset_index.floor_position(limit)
        if offset > end:
            offset, at = segment.offset_index.floor(end)
    except DamagedIndexError:
        segment.rebuild()
        offset, at = segment.base_offset, 0
    if at > position + first.size:
        header = parse_header(segment.file.pread(HEADER_SIZE, at))
        if header.base_offset == offset:
            return offset, at
    after, to = first.next_offset, position + first.size
    following = islice(segment.headers_from(first.base_offset), 1, None)
    for found, header in following:  # pragma: no branch  # the segment goes on beyond a bound
        if header.next_offset > end or found + header.size > limit:
            break
        after, to = header.next_offset, found + header.size
    return after, to


def _sound_headers(
    segment: Segment, offset: int, below_ms: int = TIMESTAMP_MAX
) -> Iterator[tuple[int, BatchHeader]]:
    """As `headers_from`; batches that are older than `below_ms`, which are passed over, have been
    checked, but no more of them than usually follow an index pair. One that is not older is read.

    Raises:
        DamagedError: when it comes to damaged bytes.
    """
    left = LOOKUP_BYTES
    for position, header in segment.headers_from(offset):
        if left > 0 and header.max_timestamp < below_ms:
            left -= _read_unless_checked(segment, position, header)
        yield position, header


def _read_unless_checked(segment: Segment, position: int, header: BatchHeader) -> int:
    """Check a batch, unless it was lately; how many bytes were read for it.

    Raises:
        DamagedError: it is damaged.
    """
    if segment.verified.end_from(position) >= position + header.size:
        return 0
    next(segment.batches_from(position, header.base_offset, chunk=header.size))
    return header.size


def _greatest(segment: Segment, start: int, end: int) -> tuple[int, int] | None:
    """Greatest timestamp of the batches in `[start, end)` and the first batch that has it."""
    if start <= segment.max_timestamp_offset and segment.end_offset <= end:
        if segment.size == 0 or segment.max_timestamp < 0:
            return None
        return segment.max_timestamp, segment.max_timestamp_offset
    best = _greatest_known(segment, start, end)
    at = max(start, best[1] if best else segment.base_offset)
    for position, header in _sound_headers(segment, at):
        if header.base_offset >= end:
            break
        stamp = header.max_timestamp
        if header.base_offset < start:  # the log starts inside this batch
            batch = next(segment.batches_from(position, header.base_offset, chunk=header.size))
            stamp = max(r.timestamp for r in read_records(batch.data) if r.offset >= start)
        if best is None or stamp > best[0]:
            best = (stamp, header.base_offset)
    return best if best is not None and best[0] >= 0 else None


def _greatest_known(segment: Segment, start: int, end: int) -> tuple[int, int] | None:
    try:
        known = segment.time_index.greatest_before(end - 1)
    except DamagedIndexError:
        segment.rebuild()
        return None
    return known if known is not None and known[1] >= start else None


def _first_record(
    segment: Segment, position: int, header: BatchHeader, timestamp_ms: int, start: int, end: int
) -> tuple[int, Offset, LeaderEpoch] | None:
    """The first record of a batch that is new enough and in `[start, end)`."""
    batch = next(segment.batches_from(position, header.base_offset, chunk=header.size))
    epoch = LeaderEpoch(header.leader_epoch)
    for record in read_records(batch.data):
        if record.timestamp >= timestamp_ms and start <= record.offset < end:
            # The sum of two fields that the producer chose; the answer has 64 bits.
            return min(record.timestamp, TIMESTAMP_MAX), Offset(record.offset), epoch
    return None


def _timestamp_at(header: BatchHeader, offset: int) -> int:
    is_first = header.base_offset == offset and header.timestamp_type != LOG_APPEND_TIME
    return header.base_timestamp if is_first else header.max_timestamp
