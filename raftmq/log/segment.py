"""One segment: a file of whole batches, back to back, with its sparse indexes.

Only the active segment is appended to; a closed one is never written again (it may be cut by a
truncation, or replaced by a repaired copy under the same name). The segment knows which of its
bytes are verified, which are damaged, and which hold no record. It never syncs and knows nothing
of Raft indexes.

Invariants: batches are contiguous in offset from `base_offset`; `size` and `end_offset` lie on a
batch boundary; damaged stretches are walked around and never given out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import Final

from attrs import define

from raftmq.log.aborted import AbortedIndex
from raftmq.log.batch_reader import (
    CHUNK_BYTES,
    BadBatch,
    CheckedBatch,
    Epochs,
    checked_batches,
    confirmed_headers,
    find_after,
    walk_headers,
)
from raftmq.log.indexes import DAMAGED, DamagedIndexError, OffsetIndex, SegmentSummary, TimeIndex
from raftmq.log.model import DamagedError, LogConfig
from raftmq.log.shared import Shared
from raftmq.ports import DiskError, DiskFullError, File
from raftmq.records import CONTROL, BatchHeader, empty_batch
from raftmq.types import Buffer, Offset


def carries_records(header: BatchHeader) -> bool:
    """True for a batch that may be sent to a client: it holds a record."""
    return header.record_count > 0


class Holes:
    """The known runs of one segment's offsets, and of the bytes they take, that hold no record.

    Clients do not agree on a batch without records: some never get past one that stands alone in an
    answer, one jumps back, one spends twice the memory on each. So none is ever sent: an answer to
    Fetch holds batches with records, and where the first batch has none the next one goes along,
    whatever its size. Today only an accepted loss leaves holes (`fillers`). Other code that drops
    records and keeps their offsets is to note its holes here too: a batch without any record left
    as the bytes that it takes, a batch that lost its last records as a run of no bytes behind it.

    Holes are noted where a batch is checked, never from a header alone: a damaged count must not
    make readers pass over records. Only checked bytes are served, so all holes in what is served
    are known.

    Invariant: runs are disjoint, ascending in offset and in position, and merged where they touch,
    so that a long row of empty batches is passed in one step.
    """

    __slots__ = ("_ends", "_position_ends", "_positions", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._positions: list[int] = []
        self._position_ends: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __len__(self) -> int:
        return len(self._starts)

    def note(self, position: int, header: BatchHeader) -> None:
        """Remember a checked batch if it holds no records."""
        if not carries_records(header):
            end = position + header.size
            self.add(header.base_offset, header.next_offset, position, end)

    def add(self, start: int, end: int, position: int, position_end: int) -> None:
        """Note that no record lies in offsets `[start, end)`, bytes `[position, position_end)`."""
        left = bisect_left(self._ends, start)
        right = bisect_right(self._starts, end)
        if left < right:
            start = min(start, self._starts[left])
            position = min(position, self._positions[left])
            end = max(end, self._ends[right - 1])
            position_end = max(position_end, self._position_ends[right - 1])
        self._starts[left:right] = [start]
        self._ends[left:right] = [end]
        self._positions[left:right] = [position]
        self._position_ends[left:right] = [position_end]

    def add_all(self, other: Holes) -> None:
        """Add the runs that `other` knows of the same file."""
        for run in zip(
            other._starts, other._ends, other._positions, other._position_ends, strict=True
        ):
            self.add(*run)

    def past(self, offset: int) -> int:
        """The first offset at or above `offset` that is not known to be in a hole."""
        at = bisect_right(self._starts, offset) - 1
        return max(offset, self._ends[at]) if at >= 0 else offset

    def before(self, end: int) -> int:
        """Where the records below `end` end: the start of a hole that reaches `end`, else `end`."""
        at = bisect_left(self._starts, end) - 1
        return self._starts[at] if at >= 0 and self._ends[at] >= end else end

    def position_from(self, position: int, limit: int) -> int:
        """Where bytes without records begin at or after `position`; at most `limit`."""
        at = bisect_right(self._position_ends, position)
        return min(limit, self._positions[at]) if at < len(self._positions) else limit

    def cut(self, offset: int, position: int) -> None:
        """The segment ends at `offset` now."""
        keep = bisect_left(self._starts, offset)
        for column in (self._starts, self._ends, self._positions, self._position_ends):
            del column[keep:]
        if self._ends and self._ends[-1] > offset:
            self._ends[-1], self._position_ends[-1] = offset, position

    def clear(self) -> None:
        """Forget all runs."""
        self.cut(-1, 0)


FILLER_OFFSETS_MAX: Final = 1 << 31
"""Of one batch: its last offset delta is a signed 32-bit number."""


def fillers(start: int, end: int, epochs: Epochs) -> list[bytes]:
    """Batches without records that fill `[start, end)`."""
    batches = []
    while start < end:
        epoch, epoch_end = epochs.span(start)
        stop = min(end, epoch_end, start + FILLER_OFFSETS_MAX)
        batches.append(empty_batch(start, stop, epoch))
        start = stop
    return batches


def is_filler(header: BatchHeader) -> bool:
    """True for a batch that may be cut into smaller ones: it holds nothing at all."""
    return header.record_count == 0 and not header.is_control and not header.has_producer_id


def cut_filler(batch: Buffer, header: BatchHeader, start: int, end: int) -> Buffer:
    """The part of a filler in `[start, end)`."""
    first, last = max(start, header.base_offset), min(end, header.next_offset)
    if (first, last) == (header.base_offset, header.next_offset):
        return batch
    return empty_batch(first, last, header.leader_epoch)


OFFSETS_MAX: Final = (1 << 32) - 1
"""So many offsets fit above a base offset in the offset index."""
WRITE_AGAIN_BYTES: Final = 1 << 20


@define(slots=True)
class Damage:
    """Offsets `[start, end)` in bytes `[position, position_end)` cannot be read."""

    start: int
    end: int
    position: int
    position_end: int


class Ranges:
    """Disjoint ascending half-open ranges."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """Add `[start, end)`, merged with what it touches."""
        if start >= end:
            return
        ends = self._ends
        if ends and ends[-1] == start:  # an append: by far the most frequent
            ends[-1] = end
            return
        starts = self._starts
        left = bisect_right(ends, start - 1)
        right = bisect_right(starts, end)
        if left < right:
            start = min(start, starts[left])
            end = max(end, ends[right - 1])
        starts[left:right] = [start]
        ends[left:right] = [end]

    def end_from(self, position: int) -> int:
        """The end of the range that contains `position`; `position` itself when none does."""
        at = bisect_right(self._starts, position) - 1
        if at < 0 or self._ends[at] <= position:
            return position
        return self._ends[at]

    def cut(self, end: int) -> None:
        """Remove everything from `end` on."""
        keep = bisect_right(self._starts, end - 1)
        del self._starts[keep:]
        del self._ends[keep:]
        if self._ends and self._ends[-1] > end:
            self._ends[-1] = end


class VerifiedRanges:
    """Two generations of ranges."""

    __slots__ = ("_newer", "_older")

    def __init__(self) -> None:
        self._newer = Ranges()
        self._older = Ranges()

    def add(self, start: int, end: int) -> None:
        """`[start, end)` was just written or checked."""
        self._newer.add(start, end)

    def end_from(self, position: int) -> int:
        """How far bytes are verified from `position` on; `position` itself when they are not."""
        while True:
            end = self._older.end_from(self._newer.end_from(position))
            if end == position:
                return end
            position = end

    def cut(self, end: int) -> None:
        """The file was cut to `end`."""
        self._newer.cut(end)
        self._older.cut(end)

    def rotate(self) -> None:
        """A verification period is over."""
        self._older = self._newer
        self._newer = Ranges()

    def clear(self) -> None:
        """Nothing is verified."""
        self._newer = Ranges()
        self._older = Ranges()


@define(slots=True)
class Scan:
    """What checking a stretch of a file found; nothing sound follows the `tail`."""

    position: int
    offset: int
    damages: list[Damage]
    tail: BadBatch | None


class Segment:
    """One `<base offset>.log` with `.index` and `.timeindex`, and `.txnindex` where it holds
    control batches."""

    __slots__ = (
        "_config",
        "_epochs",
        "_file",
        "_indexed_timestamp",
        "_must_keep_pairs",
        "_shared",
        "_unindexed_bytes",
        "aborted",
        "allocated",
        "base_offset",
        "created_ms",
        "damages",
        "end_offset",
        "has_markers",
        "holes",
        "is_dirty",
        "is_missing",
        "max_timestamp",
        "max_timestamp_offset",
        "offset_index",
        "path",
        "size",
        "time_index",
        "verified",
        "version",
    )

    def __init__(
        self,
        folder: str,
        base_offset: int,
        config: LogConfig,
        shared: Shared,
        epochs: Callable[[], Epochs],
    ) -> None:
        stem = f"{folder}/{base_offset:020d}"
        self.path = f"{stem}.log"
        self.base_offset = base_offset
        self.offset_index = OffsetIndex(f"{stem}.index", base_offset, shared.files, shared.indexes)
        self.time_index = TimeIndex(f"{stem}.timeindex", base_offset, shared.files, shared.indexes)
        self.aborted = AbortedIndex(f"{stem}.txnindex", base_offset, shared.files, shared.indexes)
        self._config = config
        self._shared = shared
        self._epochs = epochs
        self._file: File | None = None
        self._must_keep_pairs = False  # collect index pairs without writing them
        self.is_missing = False  # the file is gone: all of it is damaged
        self.is_dirty = False  # bytes were written that no flush job covered yet
        self.allocated = 0  # bytes reserved in the file; beyond `size` they are zeros
        self.created_ms = 0
        # Changes when bytes that a reader may have seen are cut or all files are let go, and when
        # the indexes were made anew: what jobs found before that is void.
        self.version = 0
        self.verified = VerifiedRanges()
        self.holes = Holes()  # among what was ever verified
        self._reset()

    def _reset(self) -> None:
        self.size = 0
        self.end_offset = self.base_offset
        # Of batches whose sums held, here or when they came: retention believes it.
        self.max_timestamp = -1
        self.max_timestamp_offset = self.base_offset
        self.damages: list[Damage] = []
        self.has_markers = False  # of transactions, or had them before a cut
        self.holes.clear()
        self._unindexed_bytes = 0
        self._indexed_timestamp = -1

    # --- files ------------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """True while the segment holds its own file open and is appended to."""
        return self._file is not None

    @property
    def file(self) -> File:
        """The open log file; closed segments share a bounded number of them."""
        if self._file is not None:
            return self._file
        try:
            return self._shared.files.get(self.path)
        except FileNotFoundError as error:
            raise DiskError(f"{self.path} is gone") from error

    @property
    def may_hold_markers(self) -> bool:
        """False where it is known that no transaction ends in it."""
        return self.has_markers or bool(self.damages)

    def create(self, now_ms: int) -> None:
        """Begin as the active segment with an empty file.

        Raises:
            DiskFullError: nothing was created.
        """
        file = self._shared.files.open(self.path, create=True)
        try:
            if file.size():
                file.truncate(0)  # left by an append that was refused, or by an unfinished repair
            self.offset_index.reset()
            self.time_index.reset()
            self.aborted.reset()
            if self._config.segment_reserve_bytes:
                file.allocate(self._config.segment_reserve_bytes)
        except DiskFullError:
            file.close()
            self._shared.files.disk.remove(self.path)
            raise
        self.allocated = self._config.segment_reserve_bytes
        self._file = file
        self.created_ms = now_ms
        self.is_dirty = True

    def activate(self, created_ms: int) -> None:
        """Become the active segment again after recovery."""
        self._file = self._shared.files.open(self.path)
        self._shared.files.forget(self.path)
        self.created_ms = created_ms
        self.allocated = self._file.size()

    def write_again(self, offset: int) -> None:
        """Write what lies at or above `offset` once more, in place, so that the next sync covers it
        whatever became of earlier ones.

        Raises:
            DiskError: the device failed.
        """
        position = 0
        if offset > self.base_offset:
            try:
                _, position = self.offset_index.floor(offset)
            except DamagedIndexError:
                position = 0  # more than need be
        file = self.file
        while position < self.size:
            piece = file.pread(min(WRITE_AGAIN_BYTES, self.size - position), position)
            file.pwrite(piece, position)
            position += len(piece)

    def close(self) -> None:
        """Never append again; the indexes are completed and written, not synced."""
        if self._file is None:
            return
        if self.allocated > self.size:
            self._file.truncate(self.size)
            self.is_dirty = True
        self.allocated = 0
        self.write_indexes(is_closed=True)
        self._shared.files.put(self.path, self._file)
        self._file = None

    def remove(self) -> None:
        """Unlink the files, the log last, so that no index outlives it."""
        self.version += 1
        self.offset_index.remove()
        self.time_index.remove()
        self.aborted.remove()
        self._shared.files.forget(self.path)
        self._file = None  # before the name goes: the last close of a large file takes long
        self._shared.files.disk.remove(self.path)

    def release(self) -> None:
        """Drop open files; the segment is not used any more."""
        self.version += 1
        self._file = None
        for path in (self.path, self.offset_index.path, self.time_index.path):
            self._shared.files.forget(path)
        self._shared.indexes.forget(self.offset_index.path)
        self._shared.indexes.forget(self.time_index.path)
        self.aborted.release()

    def write_indexes(self, *, is_closed: bool) -> None:
        """Write pending index entries; a full disk keeps them in memory.

        The header says that a segment which ends in a hole is still open. So the next opening scans
        it and finds the hole, before which the log ends for readers.
        """
        ends_in_hole = self.holes.before(self.end_offset) < self.end_offset
        log_size = self.size if is_closed and not ends_in_hole else 0
        summary = SegmentSummary(
            self.base_offset,
            DAMAGED if self.damages else log_size,
            self.end_offset,
            self.max_timestamp,
            self.max_timestamp_offset,
            self.has_markers,
        )
        if is_closed:
            self.aborted.write()
        try:
            self.offset_index.write(summary)
            self.time_index.write(summary)
        except DiskFullError:
            return  # they are hints, and the log goes on; the next write brings them along

    # --- appending --------------------------------------------------------------------------

    def append(self, data: Buffer, header: BatchHeader) -> int:
        """Write a batch behind the last one; returns its position.

        Raises:
            DiskFullError: nothing changed; a partial batch was cut back.
        """
        file = self._file
        assert file is not None, "only the active segment is appended to"
        position = self.size
        size = len(data)
        reserve = self._config.segment_reserve_bytes
        if reserve and position + size + reserve // 2 > self.allocated:
            self._reserve(file, position + size + reserve)
        try:
            file.pwrite(data, position)
        except DiskFullError:
            file.truncate(max(position, self.allocated))
            raise
        self.note(position, header)
        self.verified.add(position, position + size)
        self.holes.note(position, header)
        self.is_dirty = True
        return position

    def _reserve(self, file: File, target: int) -> None:
        try:
            file.allocate(target)
            self.allocated = target
        except DiskFullError:
            return  # what is left of the reserve is what this append may use up

    def note(self, position: int, header: BatchHeader) -> None:
        """Account for a batch that lies in the file now."""
        if self._unindexed_bytes >= self._config.index_interval_bytes:
            is_due = self.offset_index.append(header.base_offset, position)
            if self.max_timestamp > self._indexed_timestamp:
                self._indexed_timestamp = self.max_timestamp
                is_due |= self.time_index.append(self.max_timestamp, self.max_timestamp_offset)
            self._unindexed_bytes = 0
            if is_due and not self._must_keep_pairs:
                self.write_indexes(is_closed=False)
        if header.attributes & CONTROL:
            self._note_marker(header)
        size = header.size
        self._unindexed_bytes += size
        if header.max_timestamp > self.max_timestamp:
            self.max_timestamp = header.max_timestamp
            self.max_timestamp_offset = header.base_offset
        self.size = position + size
        self.end_offset = header.next_offset

    def _note_marker(self, header: BatchHeader) -> None:
        if not self.may_hold_markers and self.aborted.covered < header.base_offset:
            self.aborted.covered = header.base_offset  # no transaction ends before it
        self.has_markers = True

    # --- reading ----------------------------------------------------------------------------

    def floor(self, offset: int) -> tuple[int, int]:
        """A batch boundary (offset, position) at or below `offset`, from the index."""
        if self.is_missing:
            return self.base_offset, 0
        try:
            return self.offset_index.floor(offset)
        except DamagedIndexError:
            self.rebuild()
            return self.offset_index.floor(offset)

    def damage_from(self, position: int) -> Damage | None:
        """The first damage that ends above `position`."""
        for damage in self.damages:
            if damage.position_end > position or damage.position >= position:
                return damage
        return None

    def headers_from(
        self, offset: int, *, confirmed: bool = False
    ) -> Iterator[tuple[int, BatchHeader]]:
        """Yield (position, header) from the batch that contains `offset` on.

        Args:
            confirmed: compare each header with what follows its batch, for callers that read no
                bytes of it.

        Raises:
            DamagedError: when it comes to damaged bytes.
        """
        at, position = self.floor(offset)
        hint = position
        while at < self.end_offset:
            damage = self.damage_from(position)
            limit = self.size if damage is None else damage.position
            end = self.end_offset if damage is None else damage.start
            try:
                if position < limit:
                    for found, header in self._headers(position, limit, at, end, confirmed):
                        if header.next_offset > offset:
                            yield found, header
                        at = header.next_offset
                        position = found + header.size
            except BadBatch as bad:
                if bad.position == hint > 0:
                    # Either the index is wrong, or a batch that begins an index interval.
                    self.rebuild()
                    at, position = self.floor(offset)
                    hint = 0
                else:
                    self.add_damage(bad)
                continue
            if damage is not None:
                if damage.end > offset:
                    raise DamagedError(Offset(damage.start), Offset(damage.end))
                at, position = damage.end, damage.position_end

    def batch_at(self, offset: int) -> tuple[int, BatchHeader]:
        """The batch that contains `offset`, which must lie in this segment: (position, header).

        Raises:
            DamagedError: it is damaged.
        """
        for found in self.headers_from(offset):
            return found
        raise AssertionError(f"{self.path} ends at {self.end_offset}: {offset} is nowhere")

    def _headers(
        self, position: int, limit: int, offset: int, end: int, confirmed: bool
    ) -> Iterator[tuple[int, BatchHeader]]:
        if confirmed:
            return confirmed_headers(self.file, position, limit, offset, end, self._epochs())
        return walk_headers(self.file, position, limit, offset)

    def batches_from(
        self, position: int, offset: int, *, chunk: int = CHUNK_BYTES
    ) -> Iterator[CheckedBatch]:
        """Yield checked batches from a boundary on; what was read counts as verified.

        Raises:
            DamagedError: at the first damaged batch, which is remembered.
        """
        damage = self.damage_from(position)
        limit = self.size if damage is None else damage.position
        try:
            if position < limit:
                found = checked_batches(
                    self.file, position, limit, offset, self._epochs(), chunk=chunk
                )
                for batch in found:
                    self.verified.add(batch.position, batch.position + batch.header.size)
                    self.holes.note(batch.position, batch.header)
                    yield batch
        except BadBatch as bad:
            damage = self.add_damage(bad)
        if damage is not None:
            raise DamagedError(Offset(damage.start), Offset(damage.end))

    # --- damage and rebuilding --------------------------------------------------------------

    def add_damage(self, bad: BadBatch) -> Damage:
        """Remember a stretch that cannot be read: from the bad batch to the next sound one."""
        found = None
        if not self.is_missing:
            found = find_after(self.file, bad, self.size, self.end_offset - 1, self._epochs())
        position_end, end = found or (self.size, self.end_offset)
        damage = Damage(bad.offset, end, bad.position, position_end)
        self.mark_damaged(damage)
        return damage

    def mark_damaged(self, damage: Damage) -> None:
        """Never give out these bytes, and check the whole segment at the next opening."""
        if not any(d.start <= damage.start and damage.end <= d.end for d in self.damages):
            self._shared.watch.damaged(self.path, damage.start, damage.end)
        self.damages = [
            d for d in self.damages if not (damage.start <= d.start and d.end <= damage.end)
        ]
        self.damages.append(damage)
        self.damages.sort(key=lambda d: d.position)
        self.verified.clear()
        if not self.is_missing:
            self.write_indexes(is_closed=False)

    def scan(self, position: int, offset: int, file_size: int, offset_max: int) -> Scan:
        """Check bytes from a boundary to the end of the file, and index what is sound.

        Does not decide what a bad tail means: see `recovery.py`.
        """
        damages: list[Damage] = []
        self.damages = damages  # so that indexes written on the way count the segment as damaged
        epochs = self._epochs()
        file = self.file
        while True:
            self.size, self.end_offset = position, offset
            try:
                for at, header, _ in checked_batches(file, position, file_size, offset, epochs):
                    self.note(at, header)
                    self.holes.note(at, header)
                self.verified.add(position, self.size)
                return Scan(self.size, self.end_offset, damages, None)
            except BadBatch as bad:
                self.verified.add(position, bad.position)
                found = find_after(file, bad, file_size, offset_max, epochs)
                if found is None:
                    return Scan(bad.position, bad.offset, damages, bad)
                damages.append(Damage(bad.offset, found[1], bad.position, found[0]))
                position, offset = found

    def begin_anew(self) -> None:
        """Forget what is known of the bytes: all of them are about to be scanned."""
        self._reset()
        self.offset_index.reset()
        self.time_index.reset()

    def rebuild(self) -> None:
        """Check the whole segment and make its indexes anew; size and end stay."""
        size, end, was_active = self.size, self.end_offset, self.is_active
        self.begin_anew()
        scan = self.scan(0, self.base_offset, size, end - 1)
        self._end_at(scan, size, end)
        self.write_indexes(is_closed=not was_active)

    def describe(self, file: File, size: int, end_offset: int) -> None:
        """Become the segment that `file` holds; nothing is written. `close` puts it to use.

        May run in another thread as long as nothing else refers to this object.
        """
        self._file = file
        self._must_keep_pairs = True
        scan = self.scan(0, self.base_offset, size, end_offset - 1)
        self._must_keep_pairs = False
        self._end_at(scan, size, end_offset)
        self.allocated = size

    def twin(self) -> Segment:
        """Another object for the same bytes, to which nothing else refers."""
        epochs = self._epochs()
        folder = self.path.rpartition("/")[0]
        return Segment(folder, self.base_offset, self._config, self._shared, lambda: epochs)

    def adopt(self, twin: Segment) -> None:
        """Take over the indexes that `twin` made of this segment's beginning, and go on to the end;
        the caller knows that these bytes were not cut since.

        Raises:
            DiskError: the device failed.
        """
        size, end_offset = self.size, self.end_offset
        newest = self.max_timestamp, self.max_timestamp_offset
        self.version += 1
        found: BadBatch | None = None
        self.offset_index.take_over(twin.offset_index)
        self.time_index.take_over(twin.time_index)
        self.size, self.end_offset = twin.size, twin.end_offset
        self.max_timestamp = twin.max_timestamp
        self.max_timestamp_offset = twin.max_timestamp_offset
        self._unindexed_bytes = twin._unindexed_bytes
        self._indexed_timestamp = twin._indexed_timestamp
        self.holes.add_all(twin.holes)
        self.has_markers |= twin.has_markers
        try:
            for position, header in walk_headers(self.file, self.size, size, self.end_offset):
                self.note(position, header)
        except BadBatch as bad:
            found = bad
        finally:
            self.size, self.end_offset = size, end_offset  # the next batch is written there
        if newest[0] > self.max_timestamp:  # of a batch that is damaged by now, known or not
            self.max_timestamp, self.max_timestamp_offset = newest
        if found is not None:
            self.add_damage(found)
        for damage in twin.damages:
            self.mark_damaged(damage)  # before indexes that lack what is damaged are written whole
        self.write_indexes(is_closed=not self.is_active)

    def _end_at(self, scan: Scan, size: int, end_offset: int) -> None:
        """Everything up to a known end that a scan did not find is damage."""
        self.damages = scan.damages
        if scan.offset < end_offset or scan.tail is not None:
            self.damages.append(Damage(scan.offset, end_offset, scan.position, size))
        self.size, self.end_offset = size, end_offset

    # --- truncating -------------------------------------------------------------------------

    def truncate_to(self, offset: int) -> None:
        """Cut the file so that the segment ends at `offset`; the caller syncs.

        `offset` is a batch boundary, or lies in damage, where boundaries cannot be seen.
        """
        assert self.base_offset < offset <= self.end_offset
        if offset == self.end_offset:
            return
        position = self._position_of(offset)
        self.version += 1
        file = self.file
        file.truncate(position)
        self.allocated = position
        for damage in self.damages:
            damage.end = min(damage.end, offset)
            damage.position_end = min(damage.position_end, position)
        self.damages = [d for d in self.damages if d.start < d.end]
        self.verified.cut(position)
        self.holes.cut(offset, position)
        self.size, self.end_offset = position, offset
        try:
            self.offset_index.cut(offset)
            self.time_index.cut(offset)
            self._recount()
        except DamagedIndexError:
            self.rebuild()
        self.write_indexes(is_closed=not self.is_active)

    def _position_of(self, offset: int) -> int:
        for damage in self.damages:
            if damage.start <= offset < damage.end:
                return damage.position
        try:
            position, header = self.batch_at(offset)
        except DamagedError:
            return self._position_of(offset)  # found on the way; now it is in `damages`
        assert header.base_offset == offset, "a truncation ends on a batch boundary"
        return position

    def _recount(self) -> None:
        """Find the greatest timestamp again after a cut."""
        last = self.time_index.greatest_before(self.end_offset)
        self.max_timestamp, self.max_timestamp_offset = last or (-1, self.base_offset)
        self._indexed_timestamp = self.max_timestamp
        at, position = self.offset_index.floor(self.end_offset)
        self._unindexed_bytes = self.size - position
        damage = self.damage_from(position)
        limit = self.size if damage is None else max(position, damage.position)
        try:
            # Less than an index interval and a batch. Retention will believe what they say.
            for _, header, _ in checked_batches(self.file, position, limit, at, self._epochs()):
                if header.max_timestamp > self.max_timestamp:
                    self.max_timestamp = header.max_timestamp
                    self.max_timestamp_offset = header.base_offset
        except BadBatch as bad:
            self.add_damage(bad)

    def resume(self, offset: int, position: int) -> None:
        """Count from an index pair on: what lies before it is taken as it is."""
        last = self.time_index.greatest_before(offset)
        self.size, self.end_offset = position, offset
        self.max_timestamp, self.max_timestamp_offset = last or (-1, self.base_offset)
        self._indexed_timestamp = self.max_timestamp
        self._unindexed_bytes = self._config.index_interval_bytes
