"""How long nothing was acknowledged though a majority was up and connected.

A window is a stretch of time in which a partition's group had to make progress, by the stage's
timeline. A stall is the longest piece of a window without an acknowledgement, by what counts of it
where cores are scarce. For the cluster as a whole, any acknowledgement counts, and any group that
had to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Final

from attrs import frozen

from jepsen_like.live.scarcity import Scarcity
from jepsen_like.live.stage import Standing
from jepsen_like.live.workloads.base import TRANSACTIONAL, TRANSACTIONS

CLUSTER = "cluster"
PLENTY: Final = Scarcity()
"""Nobody waited for a core."""
Span = tuple[float, float]


@frozen
class Stall:
    """The longest time that one group, or the cluster, stood still without an excuse."""

    where: str
    seconds: float
    began: float
    counted_s: float
    """What is left of it without the wait for cores."""


def windows(
    timeline: Sequence[Standing], must: Callable[[Standing], bool], end: float
) -> list[Span]:
    """Half-open spans of time in which it must make progress, joined where they touch."""
    spans: list[Span] = []
    starts = [standing.at for standing in timeline[1:]] + [end]
    for standing, until in zip(timeline, starts, strict=False):
        if standing.at >= end or not must(standing):
            continue
        until = min(until, end)
        if spans and spans[-1][1] == standing.at:
            spans[-1] = (spans[-1][0], until)
        else:
            spans.append((standing.at, until))
    return spans


def longest_stall(
    where: str,
    spans: Iterable[Span],
    acked_at: Sequence[float],
    scarcity: Scarcity = PLENTY,
) -> Stall:
    """The longest piece of these spans in which nothing was acknowledged."""
    worst = Stall(where, 0.0, 0.0, 0.0)
    position = 0
    for begin, end in spans:
        while position < len(acked_at) and acked_at[position] <= begin:
            position += 1
        inside = []
        ahead = position
        while ahead < len(acked_at) and acked_at[ahead] < end:
            inside.append(acked_at[ahead])
            ahead += 1
        for a, b in pairwise([begin, *inside, end]):
            if b - a > worst.counted_s:
                counted_s = scarcity.counted_s(a, b)
                if counted_s > worst.counted_s:
                    worst = Stall(where, b - a, a, counted_s)
    return worst


def stalls(
    timeline: Sequence[Standing],
    acked_at: Mapping[str, Sequence[float]],
    end: float,
    scarcity: Scarcity = PLENTY,
) -> list[Stall]:
    """The cluster's longest stall, then each partition's, the worst first."""
    everything = sorted(at for times in acked_at.values() for at in times)
    spans = windows(timeline, lambda s: any(s.must_progress(key) for key in acked_at), end)
    found = [
        longest_stall(
            key,
            windows(timeline, partial(Standing.must_progress, key=key), end),
            times,
            scarcity,
        )
        for key, times in acked_at.items()
    ]
    found.sort(key=lambda stall: -stall.counted_s)
    return [longest_stall(CLUSTER, spans, everything, scarcity), *found]


def transactions_stall(
    timeline: Sequence[Standing],
    committed_at: Sequence[float],
    end: float,
    scarcity: Scarcity = PLENTY,
) -> Stall:
    """The longest time in which no transaction was committed, though metadata and all partitions
    that transactions write to had to make progress."""

    def must(standing: Standing) -> bool:
        keys = [key for key in standing.members if key.startswith(f"{TRANSACTIONAL}-")]
        return bool(keys) and all(standing.must_progress(key) for key in keys)

    return longest_stall(TRANSACTIONS, windows(timeline, must, end), committed_at, scarcity)
