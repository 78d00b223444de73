"""Statistics of runs: percentiles, medians, ratios. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed (nearest rank).

    Raises:
        ValueError: no values, or a share outside 0..1.
    """
    if not values:
        raise ValueError("percentile of nothing")
    if not 0 <= share <= 1:
        raise ValueError(f"a share of {share}")
    ordered = sorted(values)
    rank = math.ceil(share * len(ordered))
    return ordered[max(rank, 1) - 1]


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two in the middle.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("median of nothing")
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def ratio(ours: float | None, theirs: float | None) -> float | None:
    """Ours over theirs; None when either is missing or theirs is zero."""
    if ours is None or theirs is None or theirs == 0:
        return None
    return ours / theirs


def rounded(value: float) -> float:
    """Four significant digits: more would be noise in the files."""
    if value == 0 or not math.isfinite(value):
        return value
    digits = 3 - math.floor(math.log10(abs(value)))
    return round(value, digits) if digits > 0 else float(round(value))
