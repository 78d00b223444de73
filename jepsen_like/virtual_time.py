"""Virtual time: one seed, one history.

The loop takes the earliest event, sets the clock to it and runs it; events of one moment run in the
order they were scheduled. Nothing reads a real clock, nothing iterates over a set, all randomness
comes from the seed. So a run can be repeated exactly, and `trace_hash` tells whether it was.

Owns the clock, what is scheduled, the trace and the rare branches; never knows what is simulated.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from random import Random
from typing import Final, Protocol

TRACE_LINES = 200
EPOCH_MS: Final = 1_700_000_000_000
"""The time of day when virtual time begins."""


class EventCount(Protocol):
    """Where the events of a run are counted."""

    events: int


class VirtualTime:
    """What every simulated world is made on."""

    def __init__(self, seed: int, counts: EventCount) -> None:
        self.seed = seed
        self.now_ms = 0.0
        self.trace: deque[str] = deque(maxlen=TRACE_LINES)
        self._counted = counts
        self._digest = blake2b(digest_size=16)
        self._pending: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0
        self._buggify_random = Random(f"buggify {seed}")
        self._armed: dict[str, bool] = {}

    def schedule(self, delay_ms: float, action: Callable[[], None]) -> None:
        """Run `action` after a delay."""
        self._scheduled += 1
        heapq.heappush(self._pending, (self.now_ms + delay_ms, self._scheduled, action))

    def run_until(self, time_ms: float) -> None:
        """Let virtual time pass."""
        pending = self._pending
        count = 0
        try:
            while pending and pending[0][0] <= time_ms:
                self.now_ms, _, action = heapq.heappop(pending)
                count += 1
                action()
        finally:
            self._counted.events += count
        self.now_ms = time_ms

    def note(self, *what: object) -> None:
        """One line of the trace."""
        line = f"{self.now_ms:.3f} {' '.join(map(str, what))}"
        self.trace.append(line)
        self._digest.update(line.encode())

    @property
    def trace_hash(self) -> str:
        """Equal for two runs that did the same."""
        return self._digest.hexdigest()

    def takes_rare_branch(self, site: str) -> bool:
        """Rarely taken branches, made frequent in the runs in which their site is armed."""
        random = self._buggify_random
        armed = self._armed.get(site)
        if armed is None:
            armed = self._armed[site] = random.random() < 0.3
        return armed and random.random() < 0.1
