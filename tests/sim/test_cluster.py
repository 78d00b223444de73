"""Whole nodes in simulation: seeds are clean and busy, and replay themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jepsen_like.__main__ import UNKNOWN_SHARE_MAX
from jepsen_like.cluster.options import draw_cluster_options
from jepsen_like.cluster.run import run_cluster_seed
from jepsen_like.pool import run_cluster_seeds
from jepsen_like.sim import Verdict

SEEDS = 60
JOBS = 2
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_seeds_are_clean_and_busy() -> None:
    only = os.environ.get("RAFTMQ_SEED")
    first, count = (int(only), 1) if only else (1, SEEDS)
    results = list(run_cluster_seeds(first, count, JOBS if count > 1 else 1))
    for result in results:
        assert result.verdict is not Verdict.ANOMALY, (
            f"seed {result.seed}: {result.name}: {result.detail}\n"
            f"again: python -m jepsen_like sim --seeds 1 --seed {result.seed}"
        )
    if count > 1:
        unknown = [result.seed for result in results if result.verdict is Verdict.UNKNOWN]
        assert len(unknown) <= max(1, UNKNOWN_SHARE_MAX * SEEDS), f"too idle: {unknown}"
        for name in ("wipes", "rots", "log_starts", "truncations", "malformed"):
            assert sum(getattr(r.counts, name) for r in results) >= SEEDS / 20, name


@pytest.mark.slow
def test_a_seed_replays_itself() -> None:
    first, second = run_cluster_seed(4), run_cluster_seed(4)
    assert first.trace_hash == second.trace_hash
    assert first.counts == second.counts
    assert first.history == second.history


@pytest.mark.slow
def test_a_seed_replays_itself_whatever_the_hash_seed() -> None:
    code = "from jepsen_like.cluster.run import run_cluster_seed as r; print(r(9).trace_hash)"
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "77")
    }
    assert len(hashes) == 1


def test_options_differ_by_seed() -> None:
    assert draw_cluster_options(1) == draw_cluster_options(1)
    assert len({draw_cluster_options(seed) for seed in range(20)}) == 20
