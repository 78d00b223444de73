"""Two processes share a run by file; the first takes the live ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = "from tests.spread import *\n"
LIVE = """
import os
import pytest

@pytest.mark.live
@pytest.mark.parametrize("number", range(3))
def test_waits(number):
    with open(f"{__file__}.told", "a") as told:
        told.write(os.environ["PYTEST_XDIST_WORKER"] + " ")
"""
COMPUTES = LIVE.replace("@pytest.mark.live", "")


@pytest.mark.slow
def test_files_stay_whole_and_live_ones_are_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    files = {"a": LIVE, "b": COMPUTES, "c": COMPUTES, "d": LIVE}
    for name, text in files.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    live: as ours\n")
    words = ["-p", "no:cacheprovider", "-p", "no:trio", "-n", "2", "--dist", "loadscope"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = {name: (tmp_path / f"test_{name}.py.told").read_text().split() for name in files}
    assert all(len(workers) == 3 for workers in told.values())
    live, computing = (
        {worker for name in names for worker in told[name]} for names in ("ad", "bc")
    )
    assert (len(live), len(computing)) == (1, 1)
    assert live != computing
