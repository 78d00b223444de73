"""Where a segment holds batches without records, so that readers are sent past them.

Clients do not agree on a batch without records: some never get past one that stands alone in an
answer, one jumps back, one spends twice the memory on each. So none is ever sent: an answer to
Fetch holds batches with records, and where the first batch has none the next one goes along,
whatever its size. Today only an accepted loss leaves holes (`fillers`). Other code that drops
records and keeps their offsets is to note its holes here too: a batch without any record left as
the bytes that it takes, a batch that lost its last records as a run of no bytes behind it.

Holes are noted where a batch is checked, never from a header alone: a damaged count must not make
readers pass over records. Only checked bytes are served, so all holes in what is served are known.

Invariant: runs are disjoint, ascending in offset and in position, and merged where they touch, so
that a long row of empty batches is passed in one step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final

from raftmq.log.batch_reader import Epochs
from raftmq.records import BatchHeader, empty_batch
from raftmq.types import Buffer


def carries_records(header: BatchHeader) -> bool:
    """True for a batch that may be sent to a client: it holds a record."""
    return header.record_count > 0


class Holes:
    """The known runs of one segment's offsets, and of the bytes they take, that hold no record."""

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


OFFSETS_MAX: Final = 1 << 31
"""Of one batch: its last offset delta is a signed 32-bit number."""


def fillers(start: int, end: int, epochs: Epochs) -> list[bytes]:
    """Batches without records that fill `[start, end)`."""
    batches = []
    while start < end:
        epoch, epoch_end = epochs.span(start)
        stop = min(end, epoch_end, start + OFFSETS_MAX)
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
