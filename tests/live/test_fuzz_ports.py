"""A short run of the fuzzer against each port; `python -m jepsen_like fuzz` goes on for longer."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from jepsen_like.fuzz.run import PORTS, fuzz

pytestmark = [pytest.mark.live, pytest.mark.slow]


@pytest.mark.parametrize("port", PORTS)
def test_hostile_bytes_cost_their_own_connection(port: str, tmp_path: Path) -> None:
    """Nodes live, log no traceback, and what the canary was told holds. Stalls are judged in runs
    on a machine that does nothing else."""
    told = io.StringIO()
    outcome = fuzz(port, 0.08, 11, told, tmp_path)
    assert outcome.findings == [], told.getvalue()
    assert outcome.inputs > 100
    assert outcome.acknowledged > 0
