"""A failed live test is told and run once more, with fixtures of its own; any other test is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_spread import run_tests

CONFTEST = "from tests.second_try import *\n"
TESTS = """
import time
import pytest
from tests.second_try import PromiseBrokenError

told = []
live = pytest.mark.live

@pytest.fixture(scope="module")
def shared():
    told.append("made")
    yield
    told.append("gone")

def times(word):
    told.append(word)
    return told.count(word)

@live
def test_good(shared):
    assert times("good") == 1

@live
def test_luck(shared):
    assert times("luck") == 2, "out of luck"

def test_what_was_shared_is_made_anew(shared):
    assert told == ["made", "good", "luck", "gone", "made", "luck"]

@live
def test_bad(shared):
    times("bad")
    assert False, "bad for good"

@live
@pytest.mark.timeout(0.2, method="signal")
def test_hangs_once():
    if times("hangs") == 1:
        time.sleep(60)

@pytest.fixture
def ends_badly():
    yield
    assert times("end") == 2, "a bad end"

@live
def test_teardown(ends_badly):
    pass

@live
def test_promise():
    times("promise")
    raise PromiseBrokenError("lost")

def test_plain():
    times("plain")
    assert False, "decides at once"

def test_so_often():
    assert (told.count("bad"), told.count("plain"), told.count("promise")) == (2, 1, 1)
"""


@pytest.mark.slow
def test_a_failed_live_test_runs_twice_and_others_once(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    live: as ours\n")
    done = run_tests(tmp_path, "-q", "test_it.py")
    assert done.returncode == 1, done.stdout + done.stderr
    *_, last = done.stdout.splitlines()
    assert last.startswith("3 failed, 6 passed, 4 rerun in "), done.stdout
    for line in ("out of luck", "Timeout (>0.2s)", "a bad end"):
        assert line in done.stdout
    assert done.stdout.count("bad for good") > 1, "both times"
    again = [line.split()[2] for line in done.stdout.splitlines() if line.startswith("RAN TWICE")]
    names = ("luck", "bad", "hangs_once", "teardown")
    assert again == [f"test_it.py::test_{name}:" for name in names]
