"""Stories of Raft groups as transcripts, to be read as prose: see `script.py` for the language.

`RAFTMQ_REWRITE=1 pytest tests/raft/test_scripts.py`, or `pytest --rewrite` on this folder, writes
the transcripts anew; the difference is then reviewed like any other change.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.raft.script import parse, run

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.txt"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_story(path: Path, request: pytest.FixtureRequest) -> None:
    """The commands of a story give its transcript."""
    told = path.read_text(encoding="utf-8")
    now = run(told)
    if os.environ.get("RAFTMQ_REWRITE") or request.config.getoption("--rewrite", default=False):
        path.write_text(now, encoding="utf-8")
        return
    assert now == told


def test_there_are_stories() -> None:
    """A folder that was moved would pass silently."""
    assert len(SCRIPTS) >= 12
    for path in SCRIPTS:
        assert path.read_text(encoding="utf-8").startswith("# "), f"{path.name} says no purpose"
        assert parse(path.read_text(encoding="utf-8"))
