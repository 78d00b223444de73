"""A pipeline of transactions loses and doubles nothing while nodes and members are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from jepsen_like.live.pipeline import run

pytestmark = [pytest.mark.live, pytest.mark.slow]


@pytest.mark.parametrize(
    ("seconds", "records"),
    [
        pytest.param(20.0, 4_000, id="short"),
        pytest.param(120.0, 40_000, marks=pytest.mark.soak, id="two minutes"),
    ],
)
def test_each_record_comes_out_once(tmp_path: Path, seconds: float, records: int) -> None:
    verdict = run(tmp_path, seconds=seconds, records=records, members=3, seed=11)
    assert verdict.is_clean, verdict
    assert verdict.written == records
    assert sum(verdict.kills.values()) >= 3
