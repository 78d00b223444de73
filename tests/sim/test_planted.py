"""Planted bugs: each must be caught, or the simulation is too kind."""

from __future__ import annotations

import pytest

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
