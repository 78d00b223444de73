"""Raft groups without nodes around them: seeds without an anomaly, and busy ones."""

from __future__ import annotations

import os
from statistics import median

import pytest

from jepsen_like.pool import run_seeds
from jepsen_like.sim import Verdict, run_seed
from tests.hash_seeds import printed_under_hash_seeds

SEEDS = 40
JOBS = 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_seeds_are_clean_and_eventful() -> None:
    only = os.environ.get("RAFTMQ_SEED")
    first, count = (int(only), 1) if only else (1, SEEDS)
    results = list(run_seeds(first, count, JOBS if count > 1 else 1))
    for result in results:
        assert result.verdict is Verdict.CLEAN, (
            f"seed {result.seed}: {result.name}: {result.detail}\n"
            f"again: python -m jepsen_like replicas --seeds 1 --seed {result.seed}"
        )
    if count > 1:
        summaries = [result.summary for result in results]
        assert median(s.leader_changes for s in summaries) >= 3
        assert median(s.acked_records for s in summaries) >= 300
        assert sum(s.crashes for s in summaries) >= SEEDS
        assert sum(s.truncations for s in summaries) >= SEEDS / 4
        assert sum(s.wipes for s in summaries) >= SEEDS / 40
        assert sum(s.log_starts for s in summaries) >= SEEDS / 2
        assert sum(s.rots for s in summaries) >= SEEDS / 40
        assert sum(s.rests for s in summaries) >= SEEDS / 4


def test_a_seed_replays_itself() -> None:
    first, second = run_seed(4), run_seed(4)
    assert first.trace_hash == second.trace_hash
    assert first.summary == second.summary
    assert run_seed(5).trace_hash != first.trace_hash


@pytest.mark.slow
def test_a_seed_replays_itself_whatever_the_hash_seed() -> None:
    code = "from jepsen_like.sim import run_seed; print(run_seed(9).trace_hash)"
    assert len(printed_under_hash_seeds(code)) == 1
