"""Opening a log: what is kept, what is cut, what is damage.

The node's journal says how far the log was known to be flushed (the claimed end). Bad bytes below
it, or before any sound later batch, were durable once: that is damage, kept in the log's extent and
reported, never cut. Only bytes after the claimed end that nothing sound follows were never promised
and are cut. A batch whose epoch or offset the bare entries do not explain is bad whatever its CRC.

Closed segments below the claimed end are not read: their index says size and extent, and their
bytes are checked before they are served. The tail is read from an index pair near the claimed end;
where damage is known, the whole segment is. A truncation or reset that a crash interrupted is
finished first.

What is read may be in the page cache alone, where the process before was killed and the machine
went on. The folder is synced before anything rests on the names that it shows: else a power loss
could take back a name under which all has been flushed since. Bytes that nobody claimed are written
once more.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from attrs import define, evolve
from crc32c import crc32c

from raftmq.errors import CorruptBatchError
from raftmq.log.bare_entries import BareEntries, Slot
from raftmq.log.batch_reader import BadBatch, checked_batches, find_after, is_plausible, is_zero
from raftmq.log.indexes import DAMAGED, DamagedIndexError, SegmentSummary
from raftmq.log.log_start import LocalStart, LogStart, LogStartFile, Pending
from raftmq.log.model import LogConfig, RecoveryReport, UnusableLogError
from raftmq.log.segment import OFFSETS_MAX, Damage, Scan, Segment
from raftmq.log.segments import Segments
from raftmq.log.shared import Shared
from raftmq.ports import File
from raftmq.records import HEADER_SIZE, parse_header
from raftmq.types import Offset, RaftIndex

_SEGMENT_NAME: Final = re.compile(r"(\d{20})\.log")
_INDEX_NAME: Final = re.compile(r"(\d{20})\.(?:index|timeindex|txnindex)")
_CRC_POSITION: Final = 17


@define(slots=True)
class Recovered:
    """The parts of which `ReplicatedLog` is made."""

    local: LocalStart
    start_file: LogStartFile
    bare: BareEntries
    segments: Segments
    report: RecoveryReport
    synced_offset: int  # batches below it are durable
    flushed_bare: int  # so many bare entries are durable


@define(slots=True)
class _Found:
    """A segment file and what checking it showed."""

    segment: Segment
    file_size: int
    next_base: int | None
    scan: Scan | None  # None where the index says enough

    @property
    def valid_end(self) -> int:
        return self.segment.end_offset if self.scan is None else self.scan.offset


def recover(
    shared: Shared,
    folder: str,
    config: LogConfig,
    *,
    claimed_end: RaftIndex,
    initial: LogStart | None,
    now_ms: int,
    before_cut: Callable[[RaftIndex], None] | None = None,
) -> Recovered:
    """Open the folder; makes a new log when there is none.

    `before_cut` is called with the end that a tail claims, if any, before it is cut off.

    Raises:
        UnusableLogError: the log start or a bare entry below the claimed end is lost.
        NewerFormatError: a file of a newer raftmq.
        DiskError: the device failed.
    """
    recovery = _Recovery(shared, folder, config, now_ms, before_cut)
    return recovery.run(claimed_end, initial or LogStart())


class _Recovery:
    def __init__(
        self,
        shared: Shared,
        folder: str,
        config: LogConfig,
        now_ms: int,
        before_cut: Callable[[RaftIndex], None] | None,
    ) -> None:
        self._before_cut = before_cut
        self._shared = shared
        self._disk = shared.files.disk
        self._folder = folder
        self._config = config
        self._now_ms = now_ms
        self._report = RecoveryReport()
        self._start_file = LogStartFile(self._disk, folder)
        self._bare = BareEntries(self._disk, folder, config.bare_reserve_bytes)
        self._is_bare_suspect = False
        self._local = LocalStart(LogStart())
        self._names: list[str] = []
        self._claimed = 0  # Raft index

    def run(self, claimed_end: RaftIndex, initial: LogStart) -> Recovered:
        self._list()
        for name in self._names:
            if name.endswith(".tmp"):
                self._disk.remove(f"{self._folder}/{name}")
        local = self._start_file.read()
        if local is None:
            return self._begin(initial)
        self._disk.sync_directory(self._folder)
        self._local = local
        if local.pending is Pending.RESET:
            self._finish_reset()
        self._claimed = max(claimed_end, local.log_start.index)
        if local.pending is Pending.TRUNCATE:
            self._claimed = max(local.log_start.index, min(self._claimed, local.truncated_end))
        self._load_bare_entries()
        if local.pending is Pending.TRUNCATE:
            self._finish_truncation()
        return self._recover_segments()

    # --- beginning --------------------------------------------------------------------------

    def _begin(self, initial: LogStart) -> Recovered:
        if self._disk.exists(self._folder):  # whoever made it may have died before it was durable
            self._disk.sync_directory(self._folder.rpartition("/")[0])
        else:
            self._disk.make_directories(self._folder)
        found = self._bare.read()
        if found.slots or found.is_tail_bad or self._bases():
            raise UnusableLogError(f"{self._folder}: log-start is missing")
        self._local = LocalStart(initial)
        self._start_file.replace(self._local)  # syncs the folder, with the bare entries' name
        self._report.is_new = True
        self._bare.load([], initial)
        return self._result(self._new_segments(), initial.base_offset)

    def _new_segments(self) -> Segments:
        start = self._local.log_start.base_offset
        return Segments(self._folder, self._config, self._shared, self._bare.epochs, start)

    def _finish_reset(self) -> None:
        for name in self._names:
            if _SEGMENT_NAME.fullmatch(name) or _INDEX_NAME.fullmatch(name):
                self._disk.remove(f"{self._folder}/{name}")
        self._bare.read()
        self._bare.clear(self._local.log_start)
        self._bare.close()
        self._disk.sync_directory(self._folder)
        self._clear_pending("reset")

    def _clear_pending(self, what: str) -> None:
        self._local = evolve(self._local, pending=Pending.NOTHING)
        self._start_file.finish(self._local)
        self._report.finished = what
        self._list()

    # --- bare entries -----------------------------------------------------------------------

    def _load_bare_entries(self) -> None:
        start = self._local.log_start
        found = self._bare.read()
        accepted: list[Slot] = []
        steps = start.index - start.base_offset
        base, epoch = int(start.base_offset), int(start.previous_epoch)
        for slot in found.slots:
            entry = slot.entry
            if entry.index < start.index:
                continue
            if self._local.pending is Pending.TRUNCATE and (
                entry.index >= self._local.truncated_end
            ):
                break
            if (
                entry.index - entry.base_offset != steps + len(accepted)
                or entry.base_offset < base
                or entry.leader_epoch < epoch
            ):
                self._is_bare_suspect = True
                if entry.index < self._claimed:
                    raise UnusableLogError(f"{self._folder}: a bare entry below the end is lost")
                break
            accepted.append(slot)
            base, epoch = entry.base_offset, entry.leader_epoch
        self._is_bare_suspect |= found.is_tail_bad or self._bare.is_new
        self._bare.load(accepted, start)
        kept = [slot for slot in found.slots if slot.entry.index >= start.index]
        if self._bare.is_new:
            self._disk.sync_directory(self._folder)
        if found.is_tail_bad or len(accepted) < len(kept) or not all(s.is_whole for s in kept):
            # Also so that what was refused does not stand before what is appended next.
            self._bare.compact(now=True)

    def _offset_of(self, index: int) -> int:
        start = self._local.log_start
        return index - (start.index - start.base_offset) - self._bare.count_below(index)

    def _index_of(self, offset: int, batch_offset: int) -> RaftIndex:
        start = self._local.log_start
        steps = start.index - start.base_offset
        return RaftIndex(offset + steps + self._bare.count_up_to(batch_offset))

    # --- finishing a truncation -------------------------------------------------------------

    def _finish_truncation(self) -> None:
        end = self._offset_of(self._local.truncated_end)
        for base in reversed(self._bases()):
            if base >= end:
                self._disk.remove(self._path(base))
            else:
                self._cut_file(base, end)
                break
        self._remove_stray_indexes(all_from=end)
        self._disk.sync_directory(self._folder)
        self._bare.truncate(self._local.truncated_end)
        self._clear_pending("truncation")

    def _cut_file(self, base: int, end: int) -> None:
        file = self._disk.open(self._path(base))
        try:
            size = file.size()
            position = self._position_of(file, size, base, end)
            self._disk.remove(f"{self._folder}/{base:020d}.txnindex")  # it may not have been cut
            if position < size:
                file.truncate(position)
                file.fdatasync()
                for suffix in ("index", "timeindex"):
                    self._disk.remove(f"{self._folder}/{base:020d}.{suffix}")
        finally:
            file.close()

    def _position_of(self, file: File, size: int, base: int, end: int) -> int:
        """Where offset `end` begins, or the damage that hides it."""
        position, offset = 0, base
        epochs = self._bare.epochs()
        while True:
            try:
                for batch in checked_batches(file, position, size, offset, epochs):
                    if batch.header.base_offset >= end:
                        return batch.position
                return size
            except BadBatch as bad:
                # An epoch beyond the cut is not known any more: such batches look bad here.
                if bad.offset >= end:
                    return bad.position
                found = find_after(file, bad, size, end - 1, epochs)
                if found is None:
                    return bad.position
                position, offset = found

    def _list(self) -> None:
        self._names = self._disk.list(self._folder)

    def _bases(self) -> list[int]:
        matches = (_SEGMENT_NAME.fullmatch(name) for name in self._names)
        return [int(match[1]) for match in matches if match is not None]

    def _path(self, base: int) -> str:
        return f"{self._folder}/{base:020d}.log"

    def _remove_stray_indexes(self, *, all_from: int) -> None:
        bases = self._bases()
        for name in self._names:
            match = _INDEX_NAME.fullmatch(name)
            if match and (int(match[1]) not in bases or int(match[1]) >= all_from):
                self._disk.remove(f"{self._folder}/{name}")

    # --- segments ---------------------------------------------------------------------------

    def _recover_segments(self) -> Recovered:
        start = int(self._local.log_start.base_offset)
        claimed_offset = max(start, self._offset_of(self._claimed))
        segments = self._new_segments()
        found = self._examine(segments, start, claimed_offset)
        last_valid = max([start, *(f.valid_end for f in found if _holds_batches(f))])
        if self._is_bare_suspect and last_valid < claimed_offset:
            raise UnusableLogError(f"{self._folder}: bare entries below the claimed end are lost")
        end = max(last_valid, claimed_offset)
        kept = self._settle(segments, found, start, end)
        self._open_aborted(kept)
        if last_valid < claimed_offset or any(s.damages for s in kept):
            self._report.claimed_end = RaftIndex(self._end_index(end))
        segments.adopt(kept, end)
        self._drop_bare_entries_beyond(end)
        last = kept[-1] if kept else None
        if last is not None and not last.is_missing and not _ends_in_damage(last):
            last.activate(self._created_ms(last, kept[-2] if len(kept) > 1 else None))
        for segment in kept:
            for damage in segment.damages:
                if damage.end > start:
                    at = Offset(max(damage.start, start))
                    self._report.damaged.append((at, Offset(damage.end)))
        return self._result(segments, min(claimed_offset, end))

    def _examine(self, segments: Segments, start: int, claimed_offset: int) -> list[_Found]:
        bases = self._bases()
        found: list[_Found] = []
        for at, base in enumerate(bases):
            next_base = bases[at + 1] if at + 1 < len(bases) else None
            if next_base is not None and next_base <= start:
                self._disk.remove(self._path(base))  # below the log start: a crash kept it
                self._names.remove(f"{base:020d}.log")
                continue
            found.append(self._examine_one(segments.new(base), next_base, claimed_offset))
        self._remove_stray_indexes(all_from=1 << 63)
        return found

    def _examine_one(self, segment: Segment, next_base: int | None, claimed_offset: int) -> _Found:
        size = segment.file.size()
        summary = _open_indexes(segment)
        if (
            summary is not None
            and 0 < summary.log_size == size
            and summary.end_offset <= claimed_offset
            and summary.end_offset == (claimed_offset if next_base is None else next_base)
        ):
            segment.size, segment.end_offset = size, summary.end_offset
            segment.max_timestamp = summary.max_timestamp
            segment.max_timestamp_offset = summary.max_timestamp_offset
            return _Found(segment, size, next_base, None)
        position, offset = 0, segment.base_offset
        is_tail = next_base is None or next_base > claimed_offset
        if summary is not None and is_tail and summary.log_size != DAMAGED:
            offset, position = self._resume_point(segment, size, claimed_offset)
        scan = self._scan(segment, offset, position, size, next_base)
        wanted = claimed_offset if next_base is None else next_base
        if position and (
            scan.damages or scan.offset < wanted or segment.holes.past(offset) > offset
        ):
            # From now on each opening checks it whole, so this one does, too. A hole where the scan
            # began may begin before that.
            scan = self._scan(segment, segment.base_offset, 0, size, next_base)
        if next_base is not None and scan.offset > next_base:
            raise UnusableLogError(f"{segment.path}: runs into the next segment")
        return _Found(segment, size, next_base, scan)

    def _scan(
        self, segment: Segment, offset: int, position: int, size: int, next_base: int | None
    ) -> Scan:
        if position == 0:
            segment.begin_anew()
        offset_max = segment.base_offset + OFFSETS_MAX if next_base is None else next_base - 1
        self._report.scanned_bytes += size - position
        return segment.scan(position, offset, size, offset_max)

    def _resume_point(self, segment: Segment, size: int, claimed_offset: int) -> tuple[int, int]:
        """An index pair below the claimed end that the file confirms, taken over; or the start."""
        try:
            offset, position = segment.offset_index.floor(claimed_offset)
            header = parse_header(segment.file.pread(HEADER_SIZE, position))
            if not is_plausible(header, offset) or position + header.size > size:
                return segment.base_offset, 0
            segment.offset_index.cut(offset)
            segment.time_index.cut(offset)
            segment.resume(offset, position)
        except (DamagedIndexError, CorruptBatchError):
            return segment.base_offset, 0
        return offset, position

    def _settle(
        self, segments: Segments, found: list[_Found], start: int, end: int
    ) -> list[Segment]:
        """Keep, cut or drop each segment."""
        kept: list[Segment] = []
        if end > start and (not found or found[0].segment.base_offset > start):
            first = found[0].segment.base_offset if found else end
            kept.append(_missing(segments.new(start), min(first, end)))
        claims: list[int] = []
        has_cut = False
        for item in found:
            segment = item.segment
            if segment.base_offset >= end and kept:
                self._note_claim(self._claim_of(item), claims)
                self._report.cut |= item.file_size > 0
                segment.remove()
                has_cut = True
                continue
            if item.scan is not None:
                target = end if item.next_base is None else min(item.next_base, end)
                has_cut |= self._settle_scanned(item, item.scan, target, end, claims)
            kept.append(segment)
        self._report.cut_claimed_end = RaftIndex(max([0, *claims]))
        if has_cut:
            self._disk.sync_directory(self._folder)
        return kept

    def _open_aborted(self, kept: list[Segment]) -> None:
        """Take over what is known of aborted transactions, as far as it is of what is here."""
        has_removed = False
        for segment in kept:
            index = segment.aborted
            if f"{segment.base_offset:020d}.txnindex" not in self._names:
                continue
            covered = index.covered
            if segment.may_hold_markers:
                index.open()
            if not segment.may_hold_markers or index.covered > segment.end_offset:
                index.remove()
                has_removed = True
            index.covered = max(index.covered, covered)
        if has_removed:
            self._disk.sync_directory(self._folder)  # before anything is appended in its place

    def _settle_scanned(
        self, item: _Found, scan: Scan, target: int, end: int, claims: list[int]
    ) -> bool:
        """Returns True when bytes were cut off."""
        segment = item.segment
        segment.damages = scan.damages
        segment.size, segment.end_offset = scan.position, scan.offset
        if scan.offset < target:
            damage = Damage(scan.offset, target, scan.position, item.file_size)
            segment.damages.append(damage)
            segment.size, segment.end_offset = item.file_size, target
            return False
        if item.file_size == scan.position:
            return False
        rest = segment.file.pread(item.file_size - scan.position, scan.position)
        if is_zero(rest) and self._config.segment_reserve_bytes:
            return False  # room allocated ahead
        if item.next_base is None or item.next_base >= end:
            # Else the next segment began where this one ended.
            self._note_claim(self._claim_of(item), claims)
        self._report.cut = True
        segment.file.truncate(scan.position)
        segment.file.fdatasync()
        return True

    def _note_claim(self, claim: int, claims: list[int]) -> None:
        """Remember where a tail that is about to be cut claims to end; `before_cut` stores it."""
        claims.append(claim)
        if claim and self._before_cut is not None:
            self._before_cut(RaftIndex(claim))

    def _claim_of(self, item: _Found) -> int:
        """The end that cut bytes claim, 0 when they cannot have been a whole batch."""
        tail = item.scan.tail if item.scan is not None else None
        if tail is None:
            return 0
        data = item.segment.file.pread(item.file_size - tail.position, tail.position)
        if is_zero(data) or (tail.is_short and tail.claimed is None):
            return 0
        if tail.claimed is None:  # the header itself is bad: one record at least
            return self._index_of(tail.offset + 1, tail.offset)
        if tail.is_short and not _is_sound_but_for_length(data):
            return 0
        # The two counts must agree, so one of them may be damaged. The lower one still tells logs
        # without this batch from logs with it.
        count = max(1, min(tail.claimed.offset_count, tail.claimed.record_count))
        return self._index_of(tail.offset + count, tail.offset)

    def _end_index(self, end: int) -> int:
        return self._index_of(end, end)

    def _drop_bare_entries_beyond(self, end: int) -> None:
        count = self._bare.count_up_to(end)
        dropped = len(self._bare.entries) - count
        if dropped:
            self._bare.truncate(self._bare.entries[count].index)
            self._report.dropped_bare_entries = dropped

    def _created_ms(self, segment: Segment, before: Segment | None) -> int:
        """A segment is as old as its first batch says (no file times in the ports).

        The one before it is as old as that where its records have no times, and retention deletes
        what is old on all replicas: then the batch must be sound.
        """
        data = segment.file.pread(HEADER_SIZE, 0) if segment.size else b""
        if len(data) < HEADER_SIZE:
            return self._now_ms
        stamp = parse_header(data).max_timestamp
        if before is not None and before.max_timestamp < 0 and not self._is_first_sound(segment):
            return self._now_ms
        return min(self._now_ms, stamp) if stamp >= 0 else self._now_ms

    def _is_first_sound(self, segment: Segment) -> bool:
        base, epochs = segment.base_offset, self._bare.epochs()
        file, size = segment.file, segment.size
        try:
            next(checked_batches(file, 0, size, base, epochs, chunk=HEADER_SIZE))
        except BadBatch:
            return False  # the scrub will find it
        return True

    def _result(self, segments: Segments, synced_offset: int) -> Recovered:
        # What is not known to be flushed is written once more, where it lies. After a failed sync
        # the system counts pages as written that are not: another sync would flush nothing.
        for segment in reversed(segments.all):
            if segment.end_offset <= synced_offset:
                break
            segment.is_dirty = not segment.is_missing
            segments.is_folder_dirty = True
            if segment.is_dirty:
                segment.write_again(synced_offset)
        self._bare.write_again(RaftIndex(self._claimed))
        return Recovered(
            local=self._local,
            start_file=self._start_file,
            bare=self._bare,
            segments=segments,
            report=self._report,
            synced_offset=synced_offset,
            flushed_bare=self._bare.count_below(self._claimed),
        )


def _open_indexes(segment: Segment) -> SegmentSummary | None:
    """What both indexes say of their segment; None where they cannot be used.

    A crash between the writes of the two leaves one older than the other. Pairs of one would then
    stand for batches that the other does not know, so the segment is scanned as without indexes.
    """
    try:
        times = segment.time_index.open()
        offsets = segment.offset_index.open()
    except DamagedIndexError:
        return None
    segment.has_markers = offsets.has_markers
    return offsets if offsets == times else None


def _holds_batches(found: _Found) -> bool:
    return found.valid_end > found.segment.base_offset


def _ends_in_damage(segment: Segment) -> bool:
    return bool(segment.damages) and segment.damages[-1].end == segment.end_offset


def _missing(segment: Segment, end: int) -> Segment:
    segment.is_missing = True
    segment.end_offset = end
    segment.damages = [Damage(segment.base_offset, end, 0, 0)]
    return segment


def _is_sound_but_for_length(data: bytes) -> bool:
    """True when a batch whose length field is wrong ends with the file, or somewhere in the zeros
    at its end, which are room allocated ahead or the batch's own."""
    shortest = max(len(data.rstrip(b"\0")), HEADER_SIZE)
    wanted = int.from_bytes(data[_CRC_POSITION : _CRC_POSITION + 4], "big")
    checksum = crc32c(data[_CRC_POSITION + 4 : shortest])
    for _ in range(shortest, len(data) + 1):
        if checksum == wanted:
            return True
        checksum = crc32c(b"\0", checksum)
    return False
