"""Whole nodes in simulation: seeds replay themselves, in any process."""

from __future__ import annotations

import pytest

from jepsen_like.cluster.options import draw_cluster_options
from jepsen_like.cluster.run import run_cluster_seed
from tests.hash_seeds import printed_under_hash_seeds


@pytest.mark.slow
def test_a_seed_replays_itself() -> None:
    first, second = run_cluster_seed(4), run_cluster_seed(4)
    assert first.trace_hash == second.trace_hash
    assert first.counts == second.counts
    assert first.history == second.history


@pytest.mark.slow
def test_a_seed_replays_itself_whatever_the_hash_seed() -> None:
    code = "from jepsen_like.cluster.run import run_cluster_seed as r; print(r(9).trace_hash)"
    assert len(printed_under_hash_seeds(code)) == 1


def test_options_differ_by_seed() -> None:
    assert draw_cluster_options(1) == draw_cluster_options(1)
    assert len({draw_cluster_options(seed) for seed in range(20)}) == 20
