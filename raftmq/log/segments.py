"""All segments of one log: which one holds an offset, rolling, cutting, dropping; what their
indexes know of aborted transactions.

Owns the set of files that the next flush job must sync. Segments are contiguous in offset; only the
last may be active; after a start or a cut there may be none that is active, and the next append
makes one. Knows nothing of bare entries and Raft indexes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from raftmq.log.aborted import Aborted, UntoldError, matching
from raftmq.log.batch_reader import Epochs
from raftmq.log.indexes import DamagedIndexError
from raftmq.log.model import LogConfig
from raftmq.log.segment import OFFSETS_MAX, Damage, Segment
from raftmq.log.shared import Shared
from raftmq.ports import File
from raftmq.records import BatchHeader
from raftmq.types import Buffer, Offset


class Segments:
    """The files of one log in offset order."""

    __slots__ = (
        "_bases",
        "_config",
        "_epochs",
        "_folder",
        "_shared",
        "_sync_also",
        "all",
        "end_offset",
        "is_folder_dirty",
        "size_bytes",
    )

    def __init__(
        self,
        folder: str,
        config: LogConfig,
        shared: Shared,
        epochs: Callable[[], Epochs],
        start_offset: int,
    ) -> None:
        self._folder = folder
        self._config = config
        self._shared = shared
        self._epochs = epochs
        self.all: list[Segment] = []
        self._bases: list[int] = []
        self._sync_also: list[File] = []  # indexes of segments that were closed
        self.end_offset = start_offset
        self.is_folder_dirty = False
        self.size_bytes = 0

    def configure(self, config: LogConfig) -> None:
        """Obey changed settings from now on."""
        self._config = config

    def new(self, base_offset: int) -> Segment:
        """A segment object; not yet part of the log, no file touched."""
        return Segment(self._folder, base_offset, self._config, self._shared, self._epochs)

    def adopt(self, segments: list[Segment], end_offset: int) -> None:
        """Take over what recovery accepted."""
        self.all = segments
        self._bases = [segment.base_offset for segment in segments]
        self.end_offset = end_offset
        self.size_bytes = sum(segment.size for segment in segments)

    @property
    def active(self) -> Segment | None:
        """The one that is appended to."""
        return self.all[-1] if self.all and self.all[-1].is_active else None

    def at(self, offset: int) -> int:
        """The position in `all` of the segment that holds `offset`, -1 when it is below all."""
        return bisect_right(self._bases, offset) - 1

    def holding(self, offset: int) -> Segment:
        """The segment that holds `offset`, which must lie in the log."""
        at = bisect_right(self._bases, offset) - 1
        assert at >= 0, "an offset below the log start"
        return self.all[at]

    # --- appending --------------------------------------------------------------------------

    def must_roll(self, size: int, next_offset: int, now_ms: int) -> bool:
        """True when a batch of that size belongs into a new segment."""
        segment = self.all[-1] if self.all else None
        if segment is None or not segment.is_active:
            return True
        return segment.size > 0 and (
            segment.size + size > self._config.segment_bytes
            or now_ms - segment.created_ms >= self._config.segment_ms
            or next_offset - segment.base_offset > OFFSETS_MAX
        )

    def append(self, data: Buffer, header: BatchHeader) -> tuple[int, Segment]:
        """Write a batch at the end of the active segment; returns its position.

        Raises:
            DiskFullError: nothing changed.
        """
        segment = self.all[-1]
        position = segment.append(data, header)
        self.end_offset = segment.end_offset
        self.size_bytes += len(data)
        return position, segment

    def roll(self, now_ms: int) -> Segment:
        """Begin a new active segment at the end and close the one before it.

        Raises:
            DiskFullError: nothing changed.
        """
        segment = self.new(self.end_offset)
        segment.create(now_ms)
        self.close_active()
        self.all.append(segment)
        self._bases.append(segment.base_offset)
        self.is_folder_dirty = True
        self._shared.watch.rolled(segment.path, segment.base_offset)
        return segment

    def close_active(self) -> None:
        """Never append to the last segment again; its indexes go into the next flush."""
        segment = self.active
        if segment is None:
            return
        segment.close()
        for index in (segment.offset_index, segment.time_index):
            try:
                self._sync_also.append(index.file())
            except FileNotFoundError:
                continue  # the disk was full: the index is rebuilt when it is wanted
        self.is_folder_dirty = True

    # --- flushing ---------------------------------------------------------------------------

    def take_dirty(self) -> tuple[list[File], list[str]]:
        """Files and folders that must be synced to make everything written so far durable."""
        files: list[File] = []
        for segment in self._dirty_segments():
            files.append(segment.file)
            segment.is_dirty = False
        files += self._sync_also
        self._sync_also = []
        folders = [self._folder] if self.is_folder_dirty else []
        self.is_folder_dirty = False
        return files, folders

    def _dirty_segments(self) -> list[Segment]:
        dirty: list[Segment] = []
        for segment in reversed(self.all):
            if not segment.is_dirty:
                break  # older ones were flushed before: what is dirty is a suffix
            dirty.append(segment)
        dirty.reverse()
        return dirty

    # --- dropping ---------------------------------------------------------------------------

    def remove_below(self, offset: int) -> list[Segment]:
        """Unlink segments that end at or below `offset`, never the active one.

        Nothing is synced: should a name come back after a crash, recovery drops it again.
        """
        count = 0
        for segment in self.all:
            if segment.is_active or segment.end_offset > offset:
                break
            count += 1
        removed = self.all[:count]
        for segment in removed:
            segment.remove()
            self.size_bytes -= segment.size
        del self.all[:count], self._bases[:count]
        return removed

    def truncate_to(self, offset: int) -> None:
        """Drop everything from `offset` on; durable on return.

        Raises:
            DiskError: the device failed; the replica must stop.
        """
        disk = self._shared.files.disk
        keep = bisect_left(self._bases, offset)
        has_removed = keep < len(self.all)
        for segment in reversed(self.all[keep:]):
            segment.remove()
        del self.all[keep:], self._bases[keep:]
        if self.all and not self.all[-1].is_missing:
            self._cut_last(self.all[-1], offset)
        elif self.all:
            self._cut_missing(self.all[-1], offset)
        if has_removed or self.is_folder_dirty:
            disk.sync_directory(self._folder)
            self.is_folder_dirty = False
        self.end_offset = offset
        self.size_bytes = sum(segment.size for segment in self.all)

    def _cut_last(self, segment: Segment, offset: int) -> None:
        segment.truncate_to(offset)
        segment.file.fdatasync()
        segment.is_dirty = False
        for index in (segment.offset_index, segment.time_index):
            try:
                index.file().fdatasync()
            except FileNotFoundError:
                continue  # not written yet
        self._cut_aborted(segment, offset)
        if segment.damages and segment.damages[-1].end == segment.end_offset:
            segment.close()  # never append behind bytes that cannot be read

    def _cut_missing(self, segment: Segment, offset: int) -> None:
        segment.end_offset = offset
        for damage in segment.damages:
            damage.end = min(damage.end, offset)
        self._cut_aborted(segment, offset)

    def _cut_aborted(self, segment: Segment, offset: int) -> None:
        """Durable on return: what it said of the part that is gone must not come back."""
        index = segment.aborted
        if not segment.may_hold_markers:
            index.covered = min(index.covered, offset)
            return
        try:
            is_changed = index.cut(offset)
        except DamagedIndexError:
            index.is_dirty = is_changed = True
        if is_changed and not index.is_dirty:
            index.sync()
        elif is_changed:
            index.remove()
            self.is_folder_dirty = True

    def doubt_aborted(self, offset: int) -> None:
        """What is known of aborted transactions from `offset` on was perhaps read off damaged
        batches: forget it, durably. Whoever reads has it told again."""
        for segment in self.all[max(0, self.at(offset)) :]:
            if segment.base_offset < offset or not segment.may_hold_markers:
                self._cut_aborted(segment, max(offset, segment.base_offset))
            else:
                segment.aborted.remove()
                self.is_folder_dirty = True
        if self.is_folder_dirty:
            self._shared.files.disk.sync_directory(self._folder)
            self.is_folder_dirty = False

    def damaged(self, first: int) -> list[tuple[Offset, Offset]]:
        """Offset ranges from `first` on that cannot be read."""
        return [
            (Offset(max(damage.start, first)), Offset(damage.end))
            for segment in self.all
            for damage in segment.damages
            if damage.end > first
        ]

    def damage_at(self, start: int, first: int) -> tuple[Segment, Damage]:
        """The damage of which `damaged(first)` says that it begins at `start`."""
        for segment in self.all:
            for damage in segment.damages:
                if max(damage.start, first) == start and damage.end > first:
                    return segment, damage
        raise AssertionError("no damage begins there")

    def replace(self, old: Segment, new: Segment) -> None:
        """A repaired copy took the place of a segment."""
        at = self.all.index(old)
        self.all[at] = new
        self._bases[at] = new.base_offset
        self.size_bytes += new.size - old.size

    def clear(self, offset: int) -> None:
        """Unlink all and begin at `offset`; the caller syncs the folder."""
        for segment in self.all:
            segment.remove()
        self.all, self._bases = [], []
        self._sync_also = []
        self.end_offset = offset
        self.size_bytes = 0
        self.is_folder_dirty = True

    def release(self) -> None:
        """Drop open files."""
        for segment in self.all:
            segment.release()


_Told: TypeAlias = tuple[int, int, tuple[Aborted, ...]]
"""Start and end of a range, and who was aborted there."""


class AbortedTransactions:
    """The indexes of all segments of one log."""

    __slots__ = ("_ahead", "_segments", "first")

    def __init__(self, segments: Segments, first: int) -> None:
        self._segments = segments
        self.first = first
        """Where the log begins; nobody asks for what ended below."""
        # What was told of batches that are in no segment yet.
        self._ahead: deque[_Told] = deque()

    def tell(self, start: int, end: int, found: Sequence[Aborted] = ()) -> None:
        """In `[start, end)` of the log, between two batches each, these were aborted and no others,
        in the order of their markers."""
        self._take()
        if start < end:
            left = self._take_written(start, end, found)
            if left is not None:
                self._ahead.append(left)

    def _take(self) -> None:
        """Go through with what was ahead of the segments, as far as they reach by now."""
        while self._ahead and self._ahead[0][0] < self._segments.end_offset:
            left = self._take_written(*self._ahead.popleft())
            if left is not None:
                self._ahead.appendleft(left)

    def _take_written(self, start: int, end: int, found: Sequence[Aborted]) -> _Told | None:
        """Take what stands in segments; what of it does not yet."""
        written_end = self._segments.end_offset
        if start < written_end:
            self._take_one(start, min(end, written_end), found)
        if end <= written_end:
            return None
        later = tuple(entry for entry in found if entry.marker_offset >= written_end)
        return max(start, written_end), end, later

    def _take_one(self, start: int, end: int, found: Sequence[Aborted]) -> None:
        segments = self._segments
        at = max(0, segments.at(start))
        for segment in segments.all[at : segments.at(end - 1) + 1]:
            index = segment.aborted
            reached = max(start, segment.base_offset) if start > self.first else segment.base_offset
            if index.covered < reached:
                continue  # something before that is still to be told
            stop = min(end, segment.end_offset)
            for entry in found:
                if index.covered <= entry.marker_offset < stop:
                    index.add(entry)
            if segment.may_hold_markers:
                index.cover(stop)
            else:
                index.covered = max(index.covered, stop)  # no file of it is needed
            if not segment.is_active and index.covered == segment.end_offset:
                index.write()

    def between(self, start: int, end: int) -> list[Aborted]:
        """The aborted transactions whose marker is at or above `start` and that begin below `end`,
        by their first offset.

        Raises:
            UntoldError: what is missing is to be told first.
        """
        self._take()
        segments = self._segments
        found: list[Aborted] = []
        for segment in segments.all[max(0, segments.at(start)) :]:
            if not segment.may_hold_markers:
                continue
            index = segment.aborted
            if index.covered < segment.end_offset:
                self._raise_untold(segment)
            try:
                found.extend(index.between(start, end))
            except DamagedIndexError:
                index.reset()
                self._raise_untold(segment)
        for *_, ahead in self._ahead:  # a majority may have committed it before it stands here
            found.extend(matching(ahead, start, end))
        found.sort(key=lambda entry: entry.first_offset)
        return found

    def _raise_untold(self, segment: Segment) -> None:
        start = max(segment.aborted.covered, self.first)
        if start < segment.end_offset:
            raise UntoldError(start, segment.end_offset)
        segment.aborted.cover(segment.end_offset)  # all of it is below the log's beginning

    def untold(self) -> UntoldError | None:
        """The first range of the log of which nobody has told."""
        self._take()
        for segment in self._segments.all:
            start = max(segment.aborted.covered, self.first)
            if segment.may_hold_markers and start < segment.end_offset:
                return UntoldError(start, segment.end_offset)
        return None

    def cold(self, start: int, end: int) -> list[tuple[File, int, int]]:
        """The stretches of files that `between` would wait for."""
        segments = self._segments
        return [
            stretch
            for segment in segments.all[max(0, segments.at(start)) :]
            if segment.may_hold_markers
            for stretch in segment.aborted.cold(start, end)
        ]

    def write(self) -> None:
        """Bring the file of the last segment up to date; nothing is synced."""
        if self._segments.all:
            self._segments.all[-1].aborted.write()

    def cut(self, offset: int) -> None:
        """The log ends at `offset` now."""
        kept: deque[_Told] = deque()
        for start, end, found in self._ahead:
            if start < offset:
                left = tuple(entry for entry in found if entry.marker_offset < offset)
                kept.append((start, min(end, offset), left))
        self._ahead = kept

    def clear(self, first: int) -> None:
        """The log begins anew."""
        self._ahead.clear()
        self.first = first


class Retained(Protocol):
    """What retention looks at."""

    base_offset: int
    end_offset: int
    size: int
    max_timestamp: int
    created_ms: int
    damages: list[Damage]


def retention_target(
    segments: Sequence[Retained], config: LogConfig, now_ms: int, below: int, start: int
) -> int | None:
    """The offset at which the log should start, None when it may stay.

    The last segment always stays, as does everything from `below` on. By age a segment goes when
    its newest record is too old, or where its records have no timestamps, what comes after them; by
    size when the rest is still as large as what is to be kept. Damage that a peer may repair hides
    how old records are, so they stay: what the leader proposes all replicas delete.
    """
    size = sum(segment.size for segment in segments)
    target = None
    newest = _newest_ms(segments, now_ms, start)
    for segment, newest_ms in zip(segments[:-1], newest, strict=True):
        if segment.end_offset > below:
            break
        is_old = is_older(newest_ms, config.retention_ms, now_ms)
        is_much = 0 <= config.retention_bytes <= size - segment.size
        if not (is_old or is_much):
            break
        size -= segment.size
        target = segment.end_offset
    return target if target is not None and target > start else None


def is_older(newest_ms: int, retention_ms: int, now_ms: int) -> bool:
    """True when a newest record of that time has expired; never without a time (-1) or a limit."""
    return newest_ms >= 0 and 0 <= retention_ms < now_ms - newest_ms


def _newest_ms(segments: Sequence[Retained], now_ms: int, start: int) -> list[int]:
    """How new each closed segment is. One without a timestamp counts as new as the one after it,
    one with damage from `start` on as new as can be; for the last segment the time when it was made
    counts. Kafka asks the file system."""
    newest: list[int] = []
    after_ms = (segments[-1].created_ms or now_ms) if segments else now_ms
    for segment in reversed(segments[:-1]):
        if any(damage.end > start for damage in segment.damages):
            after_ms = now_ms
        elif segment.max_timestamp >= 0:
            after_ms = segment.max_timestamp
        newest.append(after_ms)
    return newest[::-1]
