"""The machine's clocks behind `ports.Clock`. Monotonic for intervals, wall for timestamps only."""

from __future__ import annotations

import time


class RealClock:
    """Reads the operating system's clocks."""

    def monotonic_ms(self) -> float:
        """Milliseconds since some start; never goes back."""
        return time.monotonic() * 1e3

    def wall_ms(self) -> int:
        """Milliseconds since the epoch; may jump."""
        return time.time_ns() // 1_000_000
