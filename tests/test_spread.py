"""Processes share a run by file; the last one takes those that compute."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spread import LONG_S

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
COMPUTES = LIVE.replace("@pytest.mark.live", "").replace(
    "    with open",
    """    until = time.monotonic() + 60
    while len(list(Path(__file__).parent.glob("test_[ad].py.told"))) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    with open""",
)
COMPUTES = f"import time\nfrom pathlib import Path\n{COMPUTES}"
"""Ends after the live files began: the others have them, and help only then."""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_files_stay_whole_and_one_process_computes(tmp_path: Path, processes: int) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    files = {"a": LIVE, "b": COMPUTES, "c": COMPUTES, "d": LIVE}
    for name, text in files.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    live: as ours\n")
    done = run_spread(tmp_path, processes)
    assert done.returncode == 0, done.stdout + done.stderr
    told = {name: (tmp_path / f"test_{name}.py.told").read_text().split() for name in files}
    assert all(len(workers) == 3 for workers in told.values())
    live, computing = (
        {worker for name in names for worker in told[name]} for names in ("ad", "bc")
    )
    assert all(len({*workers}) == 1 for workers in told.values()), "a file stays whole"
    assert len(live) == processes - 1
    assert computing - live, "the last process computes; who has nothing left helps it"


@pytest.mark.slow
def test_what_ends_a_process_is_run_once(tmp_path: Path) -> None:
    """All others are run nevertheless, those of its file by another process."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    ends = "    if number == 1:\n        os._exit(3)\n"
    for name, text in {"a": LIVE + ends, "b": LIVE, "c": LIVE}.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    live: as ours\n")
    done = run_spread(tmp_path, 2)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 8 passed" in done.stdout
    told = {name: len((tmp_path / f"test_{name}.py.told").read_text().split()) for name in "abc"}
    assert told == dict.fromkeys("abc", 3)


SHARES = """
from pathlib import Path
import tests.conftest
from tests.conftest import *

def tell(word):
    with open(Path(__file__).with_name("told"), "a") as told:
        told.write(f"{word} ")

class FakeCluster:
    def __init__(self, folder):
        pass
    def __enter__(self):
        tell("start")
        return self
    def stop(self):
        tell("stop")

tests.conftest.Cluster = FakeCluster
"""
TELLS = """
from pathlib import Path

def test_tells(FIXTURES):
    with open(Path(__file__).with_name("told"), "a") as told:
        told.write(f"{Path(__file__).stem[5:]} ")
"""


@pytest.mark.slow
def test_a_shared_cluster_ends_before_files_that_do_not_use_it(tmp_path: Path) -> None:
    """Files that use it come one after the other, and those that compute at the end."""
    (tmp_path / "conftest.py").write_text(SHARES)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    live: as ours\n")
    live = "import pytest\npytestmark = pytest.mark.live\n"
    files = {
        "a": TELLS.replace("FIXTURES", ""),
        "b": live + TELLS.replace("FIXTURES", "shared_cluster"),
        "c": live + TELLS.replace("FIXTURES", ""),
        "d": live + TELLS.replace("FIXTURES", "shared_cluster"),
    }
    for name, text in files.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    done = run_tests(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "told").read_text().split() == ["c", "start", "b", "d", "stop", "a"]


def test_long_files_are_there() -> None:
    root = Path(__file__).parents[1]
    assert [name for name in LONG_S if not (root / name).is_file()] == []


def run_spread(folder: Path, processes: int) -> subprocess.CompletedProcess[str]:
    """Run the tests of a folder in so many processes."""
    return run_tests(folder, "-n", str(processes), "--dist", "loadscope")


def run_tests(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of a folder in a pytest of their own."""
    plain = ["-p", "no:cacheprovider", "-p", "no:trio"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plain, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
