"""Exports as a person at a terminal sees them: a bar while they run, a table, the demo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.export.conftest import MakeTopic
from tests.export.inline import archive_rows, produce
from tests.live.harness import Cluster
from tests.tree import PYTHONPATH

pytestmark = [
    pytest.mark.spark,
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.usefixtures("prerequisites"),
]
COUNT = 3_000


def run_at_terminal(*words: str, folder: Path | None = None) -> tuple[int, str, str]:
    """Exit code, standard output, and what a terminal was shown as standard error."""
    ours, theirs = os.openpty()
    shown: list[bytes] = []

    def watch() -> None:
        while True:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:
                return  # nobody has the other end any more
            if not data:
                return
            shown.append(data)

    watcher = threading.Thread(target=watch)
    watcher.start()
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "TERM": "xterm", "COLUMNS": "160"}
    if folder is not None:
        environment["TMPDIR"] = str(folder)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "raftmq.cli.main", *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=theirs,
            text=True,
            check=False,
            timeout=400,
        )
    finally:
        os.close(theirs)
        watcher.join(30)
        os.close(ours)
    return done.returncode, done.stdout, b"".join(shown).decode(errors="replace")


def test_a_bar_while_it_runs_and_a_table_at_its_end(
    shared_cluster: Cluster, make_topic: MakeTopic, tmp_path: Path, unique: str
) -> None:
    bootstrap, topic, to = shared_cluster.bootstrap, make_topic(2), str(tmp_path / "archive")
    produce(bootstrap, topic, COUNT, partitions=2)
    code, told, shown = run_at_terminal(
        *("export", topic, "-g", unique, "--to", to, "-b", bootstrap),
        *("--master", "local[2,4]", "--records-per-file", "500"),
        folder=tmp_path,
    )
    assert code == 0, shown[-3_000:]
    assert re.search(r"\d+%", shown), "a bar"
    assert f"{COUNT:,} rows" in shown, "how far it is"
    assert "WARN" not in shown, "Java's words would tear the bar"
    assert "log4j" not in shown
    assert not list(tmp_path.glob("raftmq-export-*.log")), "nothing went wrong"
    lines = told.splitlines()
    assert lines[0].split() == [
        *("TOPIC", "PARTITION", "START", "END", "ROWS", "FILES", "BYTES", "GAP"),
    ]
    rows = [line.split() for line in lines if line.startswith(topic)]
    half = str(COUNT // 2)
    assert [row[1:5] for row in rows] == [["0", "0", half, half], ["1", "0", half, half]]
    assert f"manifest 1: {COUNT:,} rows" in lines[-1]
    code, told, shown = run_at_terminal("export", "--to", to, "--verify", "-b", bootstrap)
    assert code == 0, shown
    assert "checking" in shown
    assert f"{COUNT:,} rows equal in the log" in told
    code, told, _ = run_at_terminal(
        "export", topic, "-g", unique, "--to", to, "-b", bootstrap, "--master", "local[2,4]"
    )
    assert (code, told.strip()) == (0, f"nothing new for group {unique}")


def test_what_java_says_of_a_failure_is_kept_and_named(
    shared_cluster: Cluster, make_topic: MakeTopic, tmp_path: Path, unique: str
) -> None:
    bootstrap, topic, to = shared_cluster.bootstrap, make_topic(1), str(tmp_path / "archive")
    produce(bootstrap, topic, 10, partitions=1)
    code, _, shown = run_at_terminal(
        *("export", topic, "-g", unique, "--to", to, "-b", bootstrap, "--master", "nonsense"),
        folder=tmp_path,
    )
    assert code == 1
    (log,) = tmp_path.glob("raftmq-export-*.log")
    last = shown.splitlines()[-1]
    assert "Spark does not start at nonsense: " in last
    assert "Master must" in last, "the reason that Java gave"
    assert f"(log: {log})" in last
    assert "at org.apache.spark" in log.read_text()
    assert "at org.apache.spark" not in shown


@pytest.mark.timeout(500)
def test_the_demo_exports_what_it_acknowledged(tmp_path: Path) -> None:
    to = tmp_path / "archive"
    code, told, shown = run_at_terminal("demo", "--plain", "--export", str(to))
    assert code == 0, shown[-3_000:]
    last = re.fullmatch(
        r"acknowledged (\d+), read (\d+), lost 0, duplicates 0, failover \d+ ms",
        told.splitlines()[-1],
    )
    assert last is not None, told
    assert last[1] == last[2]
    assert f"exported {last[1]} rows to {to}" in told
    assert len(archive_rows(to)) == int(last[1])
