"""Without Java or pyspark: an error that says what to install, and everything else works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from raftmq_spark.errors import MissingPrerequisiteError
from raftmq_spark.session import check_java, check_prerequisites
from tests.tree import PYTHONPATH, ROOT

BLOCK = """
import sys
class Blind:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pyspark", "pyarrow", "pandas", "numpy"):
            return None
        return self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = [Blind(finder) for finder in sys.meta_path]
"""
EVERYTHING_ELSE = """
import raftmq, raftmq_client, raftmq.cli.main
from raftmq_client import aio, blocking
import raftmq_spark
from raftmq_spark.options import read_options
from raftmq_spark.plan import Plan, split
from raftmq_spark.session import check_prerequisites
read_options({"kafka.bootstrap.servers": "h:1", "subscribe": "t"})
assert not [name for name in sys.modules if name.split(".")[0] in ("pyspark", "pyarrow", "numpy")]
print("all of it")
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code with nothing on PATH and no JAVA_HOME."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "", "JAVA_HOME": "", "PYTHONPATH": PYTHONPATH, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_everything_else_works_without_java_and_pyspark() -> None:
    done = run(BLOCK + EVERYTHING_ELSE)
    assert done.stdout == "all of it\n", done.stderr


def test_the_command_line_works_without_java_and_pyspark() -> None:
    done = run(BLOCK + "import sys; sys.argv = ['raftmq', '--help']\n"
               "from raftmq.cli.main import run; run()")  # fmt: skip
    assert "produce" in done.stdout, done.stderr


def test_a_session_without_java_says_what_to_install() -> None:
    pretend = (
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name: name in ('pyspark', 'pyarrow', 'pandas') or find(name)\n"
    )
    done = run(pretend + "from raftmq_spark.session import spark_session; spark_session()")
    assert "Spark needs Java and found none: install Java 17 or newer" in done.stderr
    assert "apt-get install openjdk-17-jre-headless" in done.stderr


def test_a_session_without_pyspark_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(MissingPrerequisiteError, match=r"pip install 'raftmq\[spark\]'"):
        check_prerequisites()


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ('openjdk version "17.0.15" 2025-04-15', None),
        ('java version "21" 2023-09-19', None),
        ('openjdk version "11.0.2" 2019-01-15', "is Java 11: install Java 17"),
        ('java version "1.8.0_392"', "is Java 8: install Java 17"),
        ("segmentation fault", "does not tell its version"),
    ],
)
def test_versions_of_java(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, error: str | None
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho '{said}' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    if error is None:
        assert check_java() == str(java)
    else:
        with pytest.raises(MissingPrerequisiteError, match=error):
            check_java()


def test_a_java_home_without_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(MissingPrerequisiteError, match=r"cannot run .*No such file"):
        check_java()


def test_ci_sets_nothing_that_nodes_take_for_a_setting() -> None:
    """A node refuses to start with `RAFTMQ_` and an unknown name in its environment."""
    assert "RAFTMQ_" not in (ROOT / ".ci" / "run").read_text()


@pytest.mark.spark
def test_tests_are_collected_without_the_extra() -> None:
    """In the default suite, which has no extra, what needs it is left out without an error."""
    collect = (
        "import sys, pytest\n"
        "sys.exit(pytest.main(['--collect-only', '-m', '', '-p', 'no:cacheprovider',"
        " 'tests/spark', 'tests/export']))"
    )
    done = run(BLOCK + collect)
    assert done.returncode == 0, done.stdout
    assert "test_options.py::test_defaults_are_the_kafka_sources" in done.stdout
