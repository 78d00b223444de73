"""The newest batches in memory, so that followers and hot readers cost no disk read and no copy.

Each log has a `RecentBatches`, contiguous up to its log end. One `RecentBudget` bounds the bytes of
all logs of a process: the batch that was added first, in any log, goes first. A batch is kept as
the buffer it came in (a small one as a copy), which is never changed any more.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from typing import Final

from attrs import define

from raftmq.log.model import LogEntry
from raftmq.types import Buffer

COPIED_BYTES_MAX: Final = 1 << 10
"""A batch of at most this size is kept as a copy: a view would hold the whole request or frame that
it came in, and the view alone takes more memory."""
_COMPACT_AT: Final = 256
_TOKENS_LEFT_MAX: Final = 4096
OBJECT_BYTES: Final = 700
"""What a batch takes beside its own bytes (measured). It is charged too: a budget full of batches
of one small record would else take five times what it says. Copied ones take half."""


def kept(batch: Buffer) -> Buffer:
    """A batch as it is kept: the buffer itself, or a copy where that takes less memory."""
    return bytes(batch) if len(batch) <= COPIED_BYTES_MAX else batch


class RecentBudget:
    """Bytes that all recent batches of a process may take together."""

    def __init__(self, bytes_max: int = 64 << 20) -> None:
        self.bytes_max = bytes_max
        self.used_bytes = 0
        # One token per added batch, oldest first. A batch that is dropped before its turn leaves
        # its token behind; the log then loses an older batch a little early, which is harmless.
        self._tokens: deque[RecentBatches] = deque()
        self._batches = 0  # that are kept

    def charge(self, owner: RecentBatches, size: int) -> None:
        """Count a batch that `owner` added; evict the oldest while over budget."""
        self.used_bytes += size
        self._batches += 1
        self._tokens.append(owner)
        if len(self._tokens) > 2 * self._batches + _TOKENS_LEFT_MAX:
            self._drop_left_tokens()
        while self.used_bytes > self.bytes_max and self._tokens:
            self._tokens.popleft().evict_oldest()

    def release(self, size: int) -> None:
        """Count a batch that was dropped."""
        self.used_bytes -= size
        self._batches -= 1

    def _drop_left_tokens(self) -> None:
        """Forget the tokens of batches that are gone: of each log the oldest ones."""
        left: Counter[int] = Counter(map(id, self._tokens))
        kept: deque[RecentBatches] = deque()
        for owner in self._tokens:
            if left[id(owner)] <= len(owner):
                kept.append(owner)
            left[id(owner)] -= 1
        self._tokens = kept


@define(slots=True)
class RecentBatch:
    """One batch and where it lies; `position` is -1 while it is staged (not yet in a segment)."""

    entry: LogEntry
    base_offset: int
    next_offset: int
    position: int
    segment_base: int
    size: int


class RecentBatches:
    """A contiguous run of batches that ends at the log end."""

    __slots__ = ("_base_offsets", "_batches", "_budget", "_bytes_max", "_first", "_used_bytes")

    def __init__(self, budget: RecentBudget, bytes_max: int) -> None:
        """`bytes_max` is what this log may take of the budget."""
        self._budget = budget
        self._bytes_max = bytes_max
        self._used_bytes = 0
        self._batches: list[RecentBatch | None] = []
        self._base_offsets: list[int] = []
        self._first = 0  # below it, slots are empty

    def __len__(self) -> int:
        return len(self._batches) - self._first

    def add(self, batch: RecentBatch) -> None:
        """Append the newest batch."""
        self._batches.append(batch)
        self._base_offsets.append(batch.base_offset)
        self._used_bytes += batch.size + OBJECT_BYTES
        self._budget.charge(self, batch.size + OBJECT_BYTES)
        while self._used_bytes > self._bytes_max:
            self.evict_oldest()

    def find(self, offset: int) -> int | None:
        """The slot of the batch that contains `offset`, None when it is not here."""
        slot = bisect_right(self._base_offsets, offset, self._first) - 1
        if slot < self._first:
            return None
        batch = self._batches[slot]
        assert batch is not None
        return slot if offset < batch.next_offset else None

    def at(self, slot: int) -> RecentBatch | None:
        """The batch in a slot, None beyond the newest."""
        return self._batches[slot] if slot < len(self._batches) else None

    def last_within(
        self, slot: int, end_offset: int, position_end: int, segment_base: int
    ) -> RecentBatch:
        """The last batch from `slot` on in the same segment that ends within both bounds."""
        low, high = slot, len(self._batches)
        while high - low > 1:
            middle = (low + high) // 2
            batch = self._batches[middle]
            assert batch is not None
            if (
                batch.segment_base == segment_base
                and batch.next_offset <= end_offset
                and batch.position + batch.size <= position_end
            ):
                low = middle
            else:
                high = middle
        found = self._batches[low]
        assert found is not None
        return found

    def place(self, base_offset: int, position: int, segment_base: int) -> None:
        """A staged batch was written; it may have been evicted already."""
        slot = self.find(base_offset)
        if slot is not None:
            batch = self._batches[slot]
            assert batch is not None
            batch.position, batch.segment_base = position, segment_base

    def drop_below(self, offset: int) -> None:
        """Forget batches that end at or below `offset`."""
        while (batch := self.at(self._first)) is not None and batch.next_offset <= offset:
            self.evict_oldest()

    def evict_oldest(self) -> None:
        """Forget the oldest batch, if there is one."""
        if self._first == len(self._batches):
            return
        batch = self._batches[self._first]
        assert batch is not None
        self._batches[self._first] = None
        self._first += 1
        self._release(batch)
        if self._first >= _COMPACT_AT and self._first * 2 >= len(self._batches):
            del self._batches[: self._first]
            del self._base_offsets[: self._first]
            self._first = 0

    def truncate(self, end_offset: int) -> None:
        """Forget batches that start at `end_offset` or above."""
        slot = max(self._first, bisect_left(self._base_offsets, end_offset, self._first))
        for batch in self._batches[slot:]:
            assert batch is not None
            self._release(batch)
        del self._batches[slot:]
        del self._base_offsets[slot:]

    def _release(self, batch: RecentBatch) -> None:
        self._used_bytes -= batch.size + OBJECT_BYTES
        self._budget.release(batch.size + OBJECT_BYTES)

    def clear(self) -> None:
        """Forget all."""
        self.truncate(-1)
