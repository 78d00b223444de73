"""Plain numbers that hot paths add to, and that `node/metrics/` shows to Prometheus when asked.

No locks, no label look-ups: an addition is one attribute. A histogram is a list of counts, its
bucket found by bit length of the microseconds, so an observation costs no search. Each object has
one writer (the loop, or a flusher thread); readers may see it half-way.
"""

from __future__ import annotations

from typing import Final

BUCKET_COUNT: Final = 26
"""Bucket i counts durations under 2**i microseconds; the last one all others (above 16.8 s)."""
FIRST_SHOWN: Final = 5
"""Buckets below 2**5 us are shown as one."""


class Histogram:
    """Durations by powers of two."""

    __slots__ = ("buckets", "seconds", "seconds_max")

    def __init__(self) -> None:
        self.buckets = [0] * BUCKET_COUNT
        self.seconds = 0.0
        self.seconds_max = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.seconds += seconds
        if seconds > self.seconds_max:
            self.seconds_max = seconds
        bucket = int(seconds * 1e6).bit_length()
        self.buckets[bucket if bucket < BUCKET_COUNT else BUCKET_COUNT - 1] += 1

    @property
    def count(self) -> int:
        """How many durations were counted."""
        return sum(self.buckets)

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper edge in seconds, how many were below) as Prometheus wants them."""
        total = 0
        rows = []
        for i, count in enumerate(self.buckets):
            total += count
            if i == BUCKET_COUNT - 1:
                rows.append(("+Inf", float(total)))
            elif i >= FIRST_SHOWN:
                rows.append((repr((1 << i) / 1e6), float(total)))
        return rows


class TopicCounts:
    """Records and bytes that clients wrote to and read from one topic on this node."""

    __slots__ = ("bytes_in", "bytes_out", "messages_in", "messages_out", "producer_epochs")

    def __init__(self) -> None:
        self.messages_in = 0
        self.bytes_in = 0
        self.messages_out = 0
        self.bytes_out = 0
        self.producer_epochs = 0  # that producers raised themselves


class ReplicaCounts:
    """Events of the replicas of one node."""

    __slots__ = (
        "appends",
        "elections",
        "elections_won",
        "leader_changes",
        "scrub_batches",
        "scrub_damages",
        "scrub_read_bytes",
    )

    def __init__(self) -> None:
        self.appends = 0
        self.elections = 0
        self.elections_won = 0
        self.leader_changes = 0
        self.scrub_batches = 0
        self.scrub_damages = 0
        self.scrub_read_bytes = 0
