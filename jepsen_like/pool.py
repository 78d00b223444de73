"""Many runs in several processes; results come in the order of their seeds.

Each run of whole nodes has a process of its own, forked from one that has imported and compiled
everything (`warm.py`): it frees nothing and its memory ends with it. They have a low priority.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context

from jepsen_like.cluster.run import ClusterResult, Verdict, run_cluster_seed
from jepsen_like.planted import Catch, hunt

WARM = ("jepsen_like.warm", "jepsen_like.__main__")
COLLECTIONS = (100_000, 50, 100)
"""Garbage is collected less often than by Python's default: most objects of a run stay."""
NICE = 10


def run_cluster_seeds(first: int, count: int, jobs: int) -> Iterator[ClusterResult]:
    """Run whole nodes with the seeds `first`, `first + 1`, ...; clean runs come without history."""
    yield from run_chosen(range(first, first + count), jobs)


def run_chosen(seeds: Sequence[int], jobs: int) -> Iterator[ClusterResult]:
    """As `run_cluster_seeds`, any seeds; a single one runs in this process."""
    if len(seeds) <= 1:
        yield from map(_run_cluster_seed, seeds)
        return
    context = get_context("forkserver")
    context.set_forkserver_preload(list(WARM))
    with context.Pool(max(1, jobs), _get_ready_for_one, maxtasksperchild=1) as pool:
        yield from pool.imap(_run_cluster_seed, seeds)


def _step_back() -> None:
    """Leave the cores to whoever must be in time, such as tests of nodes."""
    os.nice(NICE)


def _get_ready_for_one() -> None:
    """Before the only run of a process: its memory ends with it."""
    _step_back()
    gc.disable()


def _get_ready() -> None:
    """Before many runs in one process."""
    _step_back()
    gc.freeze()
    gc.set_threshold(*COLLECTIONS)


def _run_cluster_seed(seed: int) -> ClusterResult:
    began = time.process_time()
    result = run_cluster_seed(seed)
    result.seconds = time.process_time() - began
    if result.verdict is Verdict.CLEAN:
        result.history = []
        result.trace = ()
    return result


def hunt_bugs(names: Sequence[str], first: int, seeds: int, jobs: int) -> Iterator[Catch]:
    """Look for each planted bug in up to `seeds` seeds; results come as they are found."""
    tasks = [(name, first, seeds) for name in names]
    if jobs <= 1:
        yield from map(_hunt, tasks)
        return
    with get_context("spawn").Pool(jobs, _get_ready) as pool:
        yield from pool.imap_unordered(_hunt, tasks, chunksize=1)


def _hunt(task: tuple[str, int, int]) -> Catch:
    return hunt(*task)
