"""`raftmq export` in a real local Spark on real nodes: killed drivers, workers and leaders."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from raftmq_client.blocking import Admin
from raftmq_spark.errors import PlanError
from raftmq_spark.export import export_topics
from raftmq_spark.export.archive import archive_files, find_archive
from raftmq_spark.export.engines import Engine, EngineRunner
from raftmq_spark.export.job import Step, export
from raftmq_spark.export.verify import verify
from raftmq_spark.security import ClientSettings
from tests.export.conftest import KEPT, MakeTopic
from tests.export.inline import (
    archive_rows,
    committed,
    files_of,
    kill_at,
    make_order,
    open_at,
    produce,
    read_topic,
)
from tests.live.harness import Cluster, wait_until
from tests.tree import PYTHONPATH

pytestmark = [
    pytest.mark.spark,
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.usefixtures("prerequisites"),
]
COUNT = 12_000
MASTER = "local[2,4]"


def begin(bootstrap: str, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "raftmq.cli.main", "export", *words, "-b", bootstrap]
    return subprocess.Popen(
        [*command, "--master", MASTER, "--json"],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> Any:
    told, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    return json.loads(told)


def make_topic(bootstrap: str, topic: str, partitions: int) -> None:
    with Admin(bootstrap, timeout_ms=60_000) as admin:
        admin.create_topic(topic, partitions, 3, KEPT)
    produce(bootstrap, topic, COUNT, partitions=partitions)


def check(bootstrap: str, to: Path, topic: str, partitions: int) -> None:
    """Every row once, equal to the log's, in the order of offsets within each file and range."""
    rows = archive_rows(to)
    assert len(rows) == COUNT
    assert sorted(rows) == read_topic(bootstrap, topic, range(partitions))
    archive = find_archive(open_at(to))
    assert sorted(file.path for file in archive.files()) == files_of(to)
    verdict = verify(archive, ClientSettings(bootstrap, "raftmq-test"))
    assert verdict.is_good, verdict.findings
    assert verdict.rows_in_log == COUNT


def test_once_and_then_nothing_new(shared_cluster: Cluster, unique: str, tmp_path: Path) -> None:
    bootstrap, to = shared_cluster.bootstrap, tmp_path / "archive"
    make_topic(bootstrap, unique, 3)
    words = (unique, "-g", unique, "--to", str(to), "--records-per-file", "1500")
    first = finish(begin(bootstrap, *words))
    assert first["rows"] == COUNT
    assert [line["ROWS"] for line in first["partitions"]] == [COUNT // 3] * 3
    second = finish(begin(bootstrap, *words))
    assert (second["manifest"], second["rows"]) == (None, 0)
    check(bootstrap, to, unique, 3)
    assert committed(bootstrap, unique, unique) == dict.fromkeys(range(3), COUNT // 3)
    assert all(Path(path).is_file() for path in archive_files(str(to)))


def test_a_driver_killed_while_it_writes(
    shared_cluster: Cluster, unique: str, tmp_path: Path
) -> None:
    """With its JVM going on for a moment: what that writes counts for nothing and goes."""
    bootstrap, to = shared_cluster.bootstrap, tmp_path / "archive"
    make_topic(bootstrap, unique, 2)
    words = (unique, "-g", unique, "--to", str(to), "--records-per-file", "200")
    driver = begin(bootstrap, *words)
    wait_until(lambda: driver.poll() is not None or len(files_of(to)) > 3, 200, "files")
    children = psutil.Process(driver.pid).children(recursive=True)
    driver.kill()
    driver.communicate(timeout=60)
    assert driver.returncode == -signal.SIGKILL
    report = finish(begin(bootstrap, *words))
    assert report["rows"] == COUNT
    assert len(report["voided_runs"]) == 1
    assert report["deleted_files"]
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []  # Spark ends with its driver
    check(bootstrap, to, unique, 2)


@pytest.mark.parametrize("step", [step.name for step in Step])
def test_a_driver_killed_at_each_step(
    step: str, shared_cluster: Cluster, unique: str, tmp_path: Path
) -> None:
    bootstrap, to = shared_cluster.bootstrap, tmp_path / "archive"
    make_topic(bootstrap, unique, 2)
    words = (unique, "-g", unique, "--to", str(to), "--records-per-file", "2000")
    if step == "FINISHED":  # there is one to finish only where another driver died before
        assert kill_at("COUNTED", bootstrap, to, unique, unique, MASTER) == -signal.SIGKILL
    assert kill_at(step, bootstrap, to, unique, unique, MASTER) == -signal.SIGKILL, "at this step"
    report = finish(begin(bootstrap, *words))
    assert bool(report["voided_runs"]) == (step in ("NOTED", "WRITTEN"))
    check(bootstrap, to, unique, 2)
    assert committed(bootstrap, unique, unique) == dict.fromkeys(range(2), COUNT // 2)


def workers_of(pid: int) -> list[psutil.Process]:
    """Spark's Python workers below a driver."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if "pyspark.daemon" in " ".join(process.cmdline()) and not process.children():
                found.append(process)
        except psutil.Error:
            continue  # it ended
    return found


def test_a_worker_and_a_leader_killed_while_it_writes(unique: str, tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    with Cluster(folder) as cluster:
        bootstrap, to = cluster.bootstrap, tmp_path / "archive"
        make_topic(bootstrap, unique, 2)
        words = (unique, "-g", unique, "--to", str(to), "--records-per-file", "200")
        driver = begin(bootstrap, *words)
        wait_until(lambda: driver.poll() is not None or len(files_of(to)) > 3, 200, "files")
        workers = workers_of(driver.pid)
        assert workers, "a Python worker of Spark's"
        workers[0].kill()
        with Admin(bootstrap, timeout_ms=60_000) as admin:
            leader = admin.topic(unique).partitions[0].leader
        cluster.nodes[leader].kill()
        report = finish(driver)
        assert report["rows"] == COUNT
        assert report["manifest"] == 1
        cluster.bring_back()
        check(bootstrap, to, unique, 2)


def test_it_is_read_by_spark_as_a_table(
    shared_cluster: Cluster, unique: str, tmp_path: Path
) -> None:
    """Topic and date are columns of the folder; a stray file does not count by the manifests."""
    import pyarrow.dataset as ds

    bootstrap, to = shared_cluster.bootstrap, tmp_path / "archive"
    make_topic(bootstrap, unique, 1)
    finish(begin(bootstrap, unique, "-g", unique, "--to", str(to)))
    table = ds.dataset(to, partitioning="hive").to_table()
    assert table.num_rows == COUNT
    assert {"topic", "date", "partition", "offset"} <= set(table.column_names)
    assert set(table["topic"].to_pylist()) == {unique}
    assert ds.dataset(archive_files(str(to))).count_rows() == COUNT


def test_sparks_workers_write_to_s3(shared_cluster: Cluster, unique: str, s3_bucket: str) -> None:
    bootstrap, to = shared_cluster.bootstrap, f"{s3_bucket}/archive"
    make_topic(bootstrap, unique, 2)
    words = (unique, "-g", unique, "--to", to, "--records-per-file", "3000")
    first = finish(begin(bootstrap, *words))
    assert (first["rows"], first["manifest"]) == (COUNT, 1)
    assert sorted(archive_rows(to)) == read_topic(bootstrap, unique, range(2))
    second = finish(begin(bootstrap, *words))
    assert (second["manifest"], second["rows"]) == (None, 0)
    verdict = verify(find_archive(open_at(to)), ClientSettings(bootstrap, "raftmq-test"))
    assert verdict.is_good, verdict.findings
    assert verdict.rows_in_log == COUNT


def test_both_engines_write_the_same(
    shared_cluster: Cluster, make_topic: MakeTopic, tmp_path: Path, unique: str
) -> None:
    """Names differ by run and attempt; what is in the files, and what counts, does not. A wrong
    name and nothing new are told without Spark."""
    bootstrap, topic = shared_cluster.bootstrap, make_topic(2)
    produce(bootstrap, topic, 2_000, partitions=2)
    found = []
    for engine in ("arrow", "spark"):
        words = {"group": f"{unique}-{engine}", "bootstrap": bootstrap, "records_per_file": 300}
        to = str(tmp_path / engine)
        report = export_topics(topic, to=to, engine=engine, **words)  # type: ignore[arg-type]
        assert report.manifest is not None
        found.append(
            [
                (
                    (item.key, item.start, item.end, item.rows),
                    [(file.date, file.rows, file.bytes, file.sha256) for file in item.files],
                )
                for item in report.manifest.ranges
            ]
        )
    assert found[0] == found[1]
    runner = EngineRunner(Engine.SPARK, master="nowhere://")  # it would fail as soon as it is used
    order = make_order(bootstrap, tmp_path / "spark", f"{unique}-spark", topic)
    assert export(order, runner).manifest is None
    with pytest.raises(PlanError, match="there is no topic"):
        export(make_order(bootstrap, tmp_path / "x", f"{unique}-x", "no-such-topic"), runner)
