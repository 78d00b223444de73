"""Many runs in several processes; results come in the order of their seeds.

A process collects garbage less often than Python's default, since most of a run's objects are in
its history and stay; and it ends after some runs, so that memory is bounded. It has a low priority.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context

from jepsen_like.cluster.planted import hunt_in_cluster
from jepsen_like.cluster.run import ClusterResult, run_cluster_seed
from jepsen_like.planted import BUGS, Catch, hunt
from jepsen_like.sim import Result, Verdict, run_seed

RUNS_PER_PROCESS = 100
COLLECTIONS = (100_000, 50, 100)
NICE = 10


def run_seeds(first: int, count: int, jobs: int) -> Iterator[Result]:
    """Run seeds `first`, `first + 1`, ..."""
    seeds = range(first, first + count)
    if jobs <= 1:
        yield from map(run_seed, seeds)
        return
    with get_context("spawn").Pool(jobs, _get_ready) as pool:
        yield from pool.imap(run_seed, seeds, chunksize=4)


def run_cluster_seeds(first: int, count: int, jobs: int) -> Iterator[ClusterResult]:
    """Run whole nodes with the seeds `first`, `first + 1`, ...; clean runs come without history."""
    yield from run_chosen(range(first, first + count), jobs)


def run_chosen(seeds: Sequence[int], jobs: int) -> Iterator[ClusterResult]:
    """As `run_cluster_seeds`, any seeds."""
    if jobs <= 1 or len(seeds) <= 1:
        yield from map(_run_cluster_seed, seeds)
        return
    with get_context("spawn").Pool(jobs, _get_ready, maxtasksperchild=RUNS_PER_PROCESS) as pool:
        yield from pool.imap(_run_cluster_seed, seeds)


def _get_ready() -> None:
    """Collect seldom, and leave the cores to whoever must be in time, such as tests of nodes."""
    os.nice(NICE)
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
    name, first, seeds = task
    return hunt(name, first, seeds) if name in BUGS else hunt_in_cluster(name, first, seeds)
