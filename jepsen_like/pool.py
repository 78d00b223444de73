"""Many runs in several processes; results come in the order of their seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from multiprocessing import get_context

from jepsen_like.cluster.planted import hunt_in_cluster
from jepsen_like.cluster.run import ClusterResult, run_cluster_seed
from jepsen_like.planted import BUGS, Catch, hunt
from jepsen_like.sim import Result, Verdict, run_seed


def run_seeds(first: int, count: int, jobs: int) -> Iterator[Result]:
    """Run seeds `first`, `first + 1`, ..."""
    seeds = range(first, first + count)
    if jobs <= 1:
        yield from map(run_seed, seeds)
        return
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(run_seed, seeds, chunksize=4)


def run_cluster_seeds(first: int, count: int, jobs: int) -> Iterator[ClusterResult]:
    """Run whole nodes with the seeds `first`, `first + 1`, ...; clean runs come without history."""
    seeds = range(first, first + count)
    if jobs <= 1:
        yield from map(_run_cluster_seed, seeds)
        return
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(_run_cluster_seed, seeds, chunksize=4)


def _run_cluster_seed(seed: int) -> ClusterResult:
    result = run_cluster_seed(seed)
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
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_hunt, tasks, chunksize=1)


def _hunt(task: tuple[str, int, int]) -> Catch:
    name, first, seeds = task
    return hunt(name, first, seeds) if name in BUGS else hunt_in_cluster(name, first, seeds)
