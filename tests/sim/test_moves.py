"""Replicas go to other nodes and come back, and nothing is lost by it."""

from __future__ import annotations

import pytest

from jepsen_like.cluster.run import Verdict, run_cluster_seed
from jepsen_like.cluster.stress import moves


@pytest.mark.slow
def test_replicas_that_come_and_go_lose_nothing() -> None:
    done = 0
    for seed in range(1, 5):
        result = run_cluster_seed(seed, moves(seed))
        assert result.verdict is not Verdict.ANOMALY, f"{seed}: {result.name}: {result.detail}"
        done += result.counts.moves
    assert done >= 10
