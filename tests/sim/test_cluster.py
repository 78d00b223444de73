"""Whole nodes in simulation: seeds replay themselves, in any process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jepsen_like.cluster.options import draw_cluster_options
from jepsen_like.cluster.run import run_cluster_seed

ROOT = Path(__file__).parents[2]


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
