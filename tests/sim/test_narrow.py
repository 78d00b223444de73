"""A topic shrinks and grows, and nothing of it is lost, doubled or shown twice."""

from __future__ import annotations

import pytest

from jepsen_like.cluster.narrow import NARROWED
from jepsen_like.cluster.run import Verdict, run_cluster_seed
from jepsen_like.cluster.stress import narrows


@pytest.mark.slow
def test_a_topic_that_shrinks_and_grows_loses_nothing() -> None:
    seen: dict[str, int] = {}
    for seed in (1, 4):
        result = run_cluster_seed(seed, narrows(seed))
        assert result.verdict is not Verdict.ANOMALY, f"{seed}: {result.name}: {result.detail}"
        for name, often in result.counts.effects.items():
            seen[name] = seen.get(name, 0) + often
    assert not [name for name in NARROWED if not seen.get(name)]
