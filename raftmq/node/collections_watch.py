"""Full garbage collections: timed, and kept short. While one runs, the loop stands still.

Python looks at every object that lives long when a quarter more of them came to be, as after the
creation of a thousand partitions, and that takes a tenth of a second then. So what outlived one
full collection is frozen: the next one looks at what came to be since. Reference counts free frozen
objects as any others; only rings of them would stay, so everything is looked at again when the
frozen ones have doubled, and are many. One histogram per process, as the collector is.
"""

from __future__ import annotations

import gc
from time import perf_counter
from typing import Any, Final

from raftmq.counts import Histogram

FULL: Final = 2
FROZEN_MIN: Final = 2_000_000
"""Fewer frozen objects than that are never looked at again: they are a few hundred megabytes."""
GROWTH: Final = 2
FULL_COLLECTIONS: Final = Histogram()


class _Watch:
    """When the collection under way began, and how many frozen objects are too many."""

    began = 0.0
    frozen_max = FROZEN_MIN
    is_whole = False


def _collecting(phase: str, info: dict[str, Any]) -> None:
    if info["generation"] != FULL:
        return
    if phase == "start":
        _Watch.began = perf_counter()  # counting frozen objects takes its time, too
        _Watch.is_whole = gc.get_freeze_count() > _Watch.frozen_max
        if _Watch.is_whole:
            gc.unfreeze()
        return
    gc.freeze()
    if _Watch.is_whole:
        _Watch.frozen_max = max(FROZEN_MIN, GROWTH * gc.get_freeze_count())
    FULL_COLLECTIONS.observe(perf_counter() - _Watch.began)


def watch_collections() -> None:
    """Time them and keep them short from now on; once per process."""
    if _collecting not in gc.callbacks:
        gc.callbacks.append(_collecting)
