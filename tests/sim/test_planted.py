"""Planted bugs: each must be caught, or the simulation is too kind."""

from __future__ import annotations

import pytest

from jepsen_like.cluster.planted import CLUSTER_BUGS, hunt_in_cluster
from jepsen_like.planted import BUGS, hunt
from jepsen_like.sim import Verdict, run_seed


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name: str) -> None:
    catch = hunt(name, seeds=200)
    assert catch.is_caught, str(catch)


@pytest.mark.parametrize("name", BUGS)
def test_without_the_bug_the_same_seed_is_clean(name: str) -> None:
    result = run_seed(1, BUGS[name].options(1))
    assert result.verdict is Verdict.CLEAN, f"{result.name}: {result.detail}"


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CLUSTER_BUGS)
def test_a_bug_planted_above_the_groups_is_caught(name: str) -> None:
    catch = hunt_in_cluster(name, seeds=200)
    assert catch.is_caught, str(catch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "acked-before-commit",
        "sequence-unchecked",
        "read-above-watermark",
        "snapshot-without-groups",
    ],
)
def test_a_bug_planted_above_the_groups_is_caught_soon(name: str) -> None:
    """Those that a seed or two find; all of them are for the soak."""
    catch = hunt_in_cluster(name, seeds=5)
    assert catch.is_caught, str(catch)
