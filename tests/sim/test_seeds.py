"""Whole nodes in simulation: seeds are clean and busy.

Forty of them by default; three hundred, in which every effect of faults has to occur as well, are
for the soak, which CI runs of this file: `pytest -m soak tests/sim/test_seeds.py`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from jepsen_like.__main__ import UNKNOWN_SHARE_MAX
from jepsen_like.cluster.elastic import OPERATED
from jepsen_like.cluster.faults import EFFECTS
from jepsen_like.cluster.narrow import NARROWED
from jepsen_like.cluster.options import DEFAULT_WEIGHTS
from jepsen_like.cluster.run import ClusterResult, Verdict
from jepsen_like.pool import run_chosen

FEW = range(1, 41)
MANY = range(1, 301)
"""Three minutes of two cores where one does 25,000 events a second."""
JOBS = 2
"""Live tests wait most of the time: their core is used, too. These come behind all others."""
ONLY = os.environ.get("RAFTMQ_SEED")
WANTED = {
    "wipes": 20,
    "rots": 20,
    "stale_sectors": 3,
    "journals": 8,
    "replacements": 8,
    "log_starts": 20,
    "truncations": 20,
    "malformed": 20,
}
"""So often at least in `MANY`; half as much in proportion in `FEW`: of so few chance says more."""
FAULTS = (*DEFAULT_WEIGHTS, "rot-journal", "crash-voter", "stale-metadata")
MISSING_MAX = 2
"""So many faults may be missing in `FEW`: the rarest is drawn for one seed in thirty."""
EFFECTS_MIN = 2
"""So often each fault strikes at least in `MANY`, and each effect of faults is there."""


def run_clean(seeds: Sequence[int]) -> list[ClusterResult]:
    """Run seeds, none of which may show an anomaly, and few too little to say anything."""
    results = []
    for result in run_chosen(seeds, JOBS):
        assert result.verdict is not Verdict.ANOMALY, (
            f"seed {result.seed}: {result.name}: {result.detail}\n"
            f"again: python -m jepsen_like sim --seeds 1 --seed {result.seed}"
        )
        results.append(result)
    if not ONLY:
        unknown = [result.seed for result in results if result.verdict is Verdict.UNKNOWN]
        assert len(unknown) <= max(1, UNKNOWN_SHARE_MAX * len(seeds)), f"too idle: {unknown}"
    return results


def assert_busy(results: Sequence[ClusterResult]) -> None:
    """What is wanted happened, in proportion to the seeds, and nearly every fault struck."""
    counts = {name: sum(getattr(r.counts, name) for r in results) for name in WANTED}
    share = 1.0 if len(results) == len(MANY) else len(results) / len(MANY) / 2
    assert all(counts[name] >= int(least * share) for name, least in WANTED.items()), counts
    missing = [name for name, often in count("faults", FAULTS, results).items() if not often]
    assert len(missing) <= MISSING_MAX, f"in {len(results)} seeds never: {missing}"


def count(kind: str, names: Sequence[str], results: Sequence[ClusterResult]) -> dict[str, int]:
    """How often each name is among the faults, or the effects, of all these runs."""
    return {name: sum(getattr(r.counts, kind).get(name, 0) for r in results) for name in names}


@pytest.mark.slow
@pytest.mark.timeout(3600)  # they give way to all others
def test_seeds_are_clean_and_busy() -> None:
    """Or the only one that is asked for."""
    if ONLY:
        run_clean([int(ONLY)])
    else:
        assert_busy(run_clean(FEW))


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_seeds_are_clean_and_know_every_fault() -> None:
    results = run_clean(MANY)
    assert_busy(results)
    effects = (*EFFECTS, *OPERATED, *NARROWED)
    seen = count("faults", FAULTS, results) | count("effects", effects, results)
    rare = {name: often for name, often in seen.items() if often < EFFECTS_MIN}
    assert not rare, f"too rare in {len(results)} seeds: {rare}"
