"""Times full garbage collections: while one runs, the loop stands still, whatever it was doing.

Python looks at every object that lives long when a quarter more of them came to be, as after the
creation of a thousand partitions. One histogram per process, since the collector is the process's.
"""

from __future__ import annotations

import gc
from time import perf_counter
from typing import Any, Final

from raftmq.counts import Histogram

FULL: Final = 2
FULL_COLLECTIONS: Final = Histogram()
_began = [0.0]


def _collecting(phase: str, info: dict[str, Any]) -> None:
    if info["generation"] != FULL:
        return
    if phase == "start":
        _began[0] = perf_counter()
    else:
        FULL_COLLECTIONS.observe(perf_counter() - _began[0])


def watch_collections() -> None:
    """Time them from now on; once per process."""
    if _collecting not in gc.callbacks:
        gc.callbacks.append(_collecting)
