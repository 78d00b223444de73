"""Where the log start could move: whole closed segments that are too old or too much.

Pure arithmetic over segments, oldest first. It proposes; only the leader moves the log start, by an
entry, and each replica deletes once that is committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from raftmq.log.model import LogConfig


class Retained(Protocol):
    """What retention looks at."""

    base_offset: int
    end_offset: int
    size: int
    max_timestamp: int
    created_ms: int


def retention_target(
    segments: Sequence[Retained], config: LogConfig, now_ms: int, below: int, start: int
) -> int | None:
    """The offset at which the log should start, None when it may stay.

    The last segment always stays, as does everything from `below` on. By age a segment goes when
    its newest record is too old, or where its records have no timestamps, what comes after them; by
    size when the rest is still as large as what is to be kept.
    """
    size = sum(segment.size for segment in segments)
    target = None
    for segment, newest_ms in zip(segments[:-1], _newest_ms(segments, now_ms), strict=True):
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


def _newest_ms(segments: Sequence[Retained], now_ms: int) -> list[int]:
    """How new each closed segment is: without a timestamp as new as the one after it, and before
    the last one as old as that, if anybody knows. Kafka asks the file system."""
    newest: list[int] = []
    after_ms = (segments[-1].created_ms or now_ms) if segments else now_ms
    for segment in reversed(segments[:-1]):
        if segment.max_timestamp >= 0:
            after_ms = segment.max_timestamp
        newest.append(after_ms)
    return newest[::-1]
