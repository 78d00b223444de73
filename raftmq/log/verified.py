"""Which bytes of a file count as verified: appended by this process, or checked lately.

Two generations of ranges: new ones go to the younger; `rotate` (once per verification period) drops
the elder. So a byte counts for one to two periods after it was last known good, and never again
without another check: what has left memory may come back from the device damaged.
"""

from __future__ import annotations

from bisect import bisect_right


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

    __slots__ = ("_elder", "_younger")

    def __init__(self) -> None:
        self._younger = Ranges()
        self._elder = Ranges()

    def add(self, start: int, end: int) -> None:
        """`[start, end)` was just written or checked."""
        self._younger.add(start, end)

    def end_from(self, position: int) -> int:
        """How far bytes are verified from `position` on; `position` itself when they are not."""
        while True:
            end = self._elder.end_from(self._younger.end_from(position))
            if end == position:
                return end
            position = end

    def cut(self, end: int) -> None:
        """The file was cut to `end`."""
        self._younger.cut(end)
        self._elder.cut(end)

    def rotate(self) -> None:
        """A verification period is over."""
        self._elder = self._younger
        self._younger = Ranges()

    def clear(self) -> None:
        """Nothing is verified."""
        self._younger = Ranges()
        self._elder = Ranges()
