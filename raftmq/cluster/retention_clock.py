"""What time it is for retention: no single node's clock may delete data.

The leader takes the least clock that a majority of voters reports (its own among them), so a
minority that is days ahead deletes nothing, and lets it advance no faster than monotonic time
between two looks, so a majority that jumps together deletes nothing early either.
"""

from __future__ import annotations

from collections.abc import Sequence


class RetentionClock:
    """One replica's view of retention time; kept across leaderships."""

    __slots__ = ("_at_ms", "_now_ms")

    def __init__(self) -> None:
        self._now_ms: int | None = None
        self._at_ms = 0.0

    def read(self, clocks_ms: Sequence[int], quorum: int, monotonic_ms: float) -> int | None:
        """Now, from the clocks that voters reported; None without a majority of them."""
        if len(clocks_ms) < quorum:
            return None
        agreed = sorted(clocks_ms, reverse=True)[quorum - 1]
        if self._now_ms is not None:
            agreed = min(agreed, self._now_ms + int(monotonic_ms - self._at_ms))
        self._now_ms = agreed if self._now_ms is None else max(agreed, self._now_ms)
        self._at_ms = monotonic_ms
        return self._now_ms
