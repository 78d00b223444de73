"""`raftmq export` as a person meets it: what it refuses, what it says where things are missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.client.fake_broker import CLUSTER_ID, FakeBroker
from tests.client.tls_front import CERTIFICATE, TlsFront
from tests.tree import PYTHONPATH

BLOCKING = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return None
sys.meta_path.insert(0, Missing())
from raftmq.cli.main import run
run(sys.argv[1:])
"""


def run(
    *words: str, blocked: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKING.format(blocked=set(blocked) or "()"), "export", *words],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("t", "-g", "g"), "where is the archive?"),
        (("-g", "g", "--to", "/x"), "which topics?"),
        (("t", "--to", "/x"), "--group"),
        (("--to", "/x", "--verify", "--replay"), "two commands"),
        (("t", "--to", "/x", "--verify"), "takes no topics"),
        (("--to", "/x", "--verify", "-g", "g"), "--group belongs to exports"),
        (("t", "-g", "g", "--to", "/x", "--into", "u"), "belong to --replay"),
        (("t", "-g", "g", "--to", "/x", "--engine", "arrow", "--master", "x"), "are Spark's"),
    ],
)
def test_what_makes_no_sense_is_refused(words: tuple[str, ...], told: str) -> None:
    done = run(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert "Traceback" not in done.stderr


_SPARK = ("t", "-g", "g", "--engine", "spark")


@pytest.mark.slow
def test_without_java_it_says_what_to_install(tmp_path: Path) -> None:
    done = run(*_SPARK, "--to", str(tmp_path), PATH=str(tmp_path), JAVA_HOME="")
    assert done.returncode == 1
    # Where the extra is missing as well, that is said first.
    assert "Java 17" in done.stderr or "raftmq[spark]" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("words", [("t", "-g", "g"), ("--verify",), ("--replay",)])
def test_without_the_extra_it_says_what_to_install(words: tuple[str, ...], tmp_path: Path) -> None:
    missing = ("pyspark", "pyarrow", "pandas", "numpy")
    done = run(*words, "--to", str(tmp_path), blocked=missing)
    assert done.returncode == 1
    assert "raftmq[export]" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_help_shows_examples() -> None:
    done = run("--help", blocked=("pyspark", "pyarrow"))
    assert done.returncode == 0
    assert "raftmq export orders clicks --group archive --to /data/archive" in done.stdout


@pytest.mark.spark
@pytest.mark.slow
def test_no_archive_no_traceback(tmp_path: Path) -> None:
    done = run("--to", str(tmp_path / "none"), "--verify", "--no-log")
    assert done.returncode == 1
    assert "is no archive" in done.stderr
    done = run("--to", "ftp://h/x", "--verify")
    assert done.returncode == 1
    assert "an archive is a folder" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.spark
@pytest.mark.slow
def test_security_comes_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from raftmq_spark.export.archive import open_archive
    from raftmq_spark.export.manifest import Until
    from raftmq_spark.export.store import locate
    from tests.export.test_archive import export

    archive, file = tmp_path / "archive", tmp_path / "client.properties"
    there, _ = open_archive(locate(str(archive)), cluster=CLUSTER_ID, group="g", until=Until.STABLE)
    export(there, 0, 10, monkeypatch)  # so that there is something to look up
    words = ("--to", str(archive), "--verify", "--timeout", "5")
    file.write_text(
        f"security.protocol=SSL\nssl.truststore.type=PEM\nssl.truststore.location={CERTIFICATE}\n"
    )
    with FakeBroker({"t": 1}) as broker:
        front = TlsFront(broker)
        done = run(*words, "--bootstrap", broker.address)
        assert done.returncode != 0, "TLS alone is spoken here"
        done = run(*words, "--bootstrap", broker.address, "--security", str(file))
        assert (done.returncode, done.stderr) == (0, "")
        front.close()
    file.write_text("security.protocol=SSL\nacks=all\n")
    done = run(*words, "--security", str(file))
    assert done.returncode == 2, "usage"
    assert "'acks'" in done.stderr
