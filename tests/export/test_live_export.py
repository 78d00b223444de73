"""Exports on a real cluster, written in this process: what comes out, and what stops them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raftmq.types import TopicPartition
from raftmq_client.blocking import Admin, Consumer
from raftmq_spark.errors import PlanError
from raftmq_spark.export.archive import find_archive
from raftmq_spark.export.errors import ArchiveError, BusyError, ExportError, LostRecordsError
from raftmq_spark.export.job import Step, Watcher
from raftmq_spark.export.lease import INSTANCE, Holder, Lease
from raftmq_spark.export.manifest import Until
from raftmq_spark.export.verify import verify
from raftmq_spark.security import ClientSettings
from tests.export import crash_driver
from tests.export.conftest import KEPT, MakeTopic
from tests.export.inline import (
    archive_rows,
    commit,
    committed,
    files_of,
    kill_at,
    make_order,
    open_at,
    produce,
    read_topic,
    run_export,
)
from tests.live.harness import Cluster
from tests.tree import PYTHONPATH

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.spark]
COUNT = 3_000


def check_good(cluster: Cluster, to: Path, *, with_log: bool = True) -> None:
    client = ClientSettings(cluster.bootstrap, "raftmq-test") if with_log else None
    verdict = verify(find_archive(open_at(to)), client)
    assert verdict.is_good, verdict.findings


def test_everything_once_then_only_what_is_new(
    shared_cluster: Cluster, make_topic: MakeTopic, tmp_path: Path, unique: str
) -> None:
    bootstrap, topic = shared_cluster.bootstrap, make_topic(2)
    produce(bootstrap, topic, COUNT, partitions=2)
    order = make_order(bootstrap, tmp_path, unique, topic, records_per_file=400)
    first = run_export(order)
    assert first.manifest is not None
    assert first.manifest.rows == COUNT
    assert committed(bootstrap, unique, topic) == {0: COUNT // 2, 1: COUNT // 2}
    assert run_export(order).manifest is None  # nothing new
    produce(bootstrap, topic, 10, partitions=2, first=COUNT)
    second = run_export(order)
    assert second.manifest is not None
    assert (second.manifest.number, second.manifest.rows) == (2, 10)
    # Within each partition rows come in the order of their offsets, and each comes once.
    rows = archive_rows(tmp_path)
    assert sorted(rows) == read_topic(bootstrap, topic, (0, 1))
    by_range = [
        item
        for stored in find_archive(open_at(tmp_path)).manifests()
        for item in stored.manifest.ranges
    ]
    assert [(item.partition, item.start) for item in by_range[:2]] == [(0, 0), (0, 375)]
    dates = {path.split("/")[1] for path in files_of(tmp_path)}
    assert {"date=2025-06-15", "date=2025-06-16", "date=2025-06-17"} <= dates
    check_good(shared_cluster, tmp_path)


@pytest.mark.parametrize(
    "step", [step.name for step in Step if step is not Step.DONE] + ["TASK", "DONE"]
)
def test_a_killed_driver_loses_and_repeats_nothing(
    step: str, shared_cluster: Cluster, make_topic: MakeTopic, tmp_path: Path, unique: str
) -> None:
    bootstrap, topic = shared_cluster.bootstrap, make_topic(2)
    group = unique
    produce(bootstrap, topic, 1_000, partitions=2)
    run_export(make_order(bootstrap, tmp_path, group, topic, records_per_file=300))
    produce(bootstrap, topic, COUNT, partitions=2, first=1_000)
    code = kill_at(step, bootstrap, tmp_path, group, topic)
    assert code == -9, f"the driver was to die at {step}"
    produce(bootstrap, topic, 500, partitions=2, first=1_000 + COUNT)
    report = run_export(make_order(bootstrap, tmp_path, group, topic, records_per_file=300))
    assert sorted(archive_rows(tmp_path)) == read_topic(bootstrap, topic, (0, 1))
    assert set(committed(bootstrap, group, topic).values()) == {(1_500 + COUNT) // 2}
    # What is in the folder is what counts: readers of the folder see each row once, too.
    archive = find_archive(open_at(tmp_path))
    assert sorted(file.path for file in archive.files()) == files_of(tmp_path)
    assert archive.open_runs() == []
    check_good(shared_cluster, tmp_path)
    assert bool(report.voided) == (step in ("NOTED", "TASK", "WRITTEN"))
    assert report.finished == (2 if step == "COUNTED" else None)


def test_an_empty_topic_and_a_group_that_never_committed(
    shared_cluster: Cluster, make_topic: MakeTopic, tmp_path: Path, unique: str
) -> None:
    bootstrap = shared_cluster.bootstrap
    empty, full = make_topic(1, "-empty"), make_topic(1, "-full")
    produce(bootstrap, full, 20)
    report = run_export(make_order(bootstrap, tmp_path, unique, empty, full))
    assert report.manifest is not None
    assert [item.topic for item in report.manifest.ranges] == [full]
    assert run_export(make_order(bootstrap, tmp_path, unique, empty)).manifest is None
    check_good(shared_cluster, tmp_path)


def test_it_starts_where_the_group_stands(
    shared_cluster: Cluster, make_topic: MakeTopic, tmp_path: Path, unique: str
) -> None:
    bootstrap, topic = shared_cluster.bootstrap, make_topic()
    produce(bootstrap, topic, 50)
    commit(bootstrap, unique, topic, {0: 30})
    run_export(make_order(bootstrap, tmp_path, unique, topic))
    assert [row[1] for row in archive_rows(tmp_path)] == list(range(30, 50))


def test_a_topic_deleted_in_between(
    shared_cluster: Cluster, make_topic: MakeTopic, tmp_path: Path, unique: str
) -> None:
    bootstrap = shared_cluster.bootstrap
    other, topic = make_topic(1, "-a"), make_topic(1, "-b")  # written in this order
    produce(bootstrap, topic, 20)
    produce(bootstrap, other, 20)

    class Deleting(Watcher):
        def reached(self, step: Step) -> None:
            if step is Step.NOTED:
                with Admin(bootstrap, timeout_ms=60_000) as admin:
                    admin.delete_topic(topic)

    order = make_order(bootstrap, tmp_path, unique, other, topic)
    with pytest.raises(ExportError, match=f"topic '{topic}' was deleted while"):
        run_export(order, Deleting())
    assert files_of(tmp_path) == []  # also those of the other topic: nothing of the run counts
    with pytest.raises(PlanError, match="there is no topic"):
        run_export(order)
    report = run_export(make_order(bootstrap, tmp_path, unique, other))
    assert report.manifest is not None
    assert report.manifest.rows == 20
    check_good(shared_cluster, tmp_path)


def test_a_topic_created_anew_starts_over(
    shared_cluster: Cluster, make_topic: MakeTopic, tmp_path: Path, unique: str
) -> None:
    bootstrap, topic = shared_cluster.bootstrap, make_topic()
    produce(bootstrap, topic, 20)
    run_export(make_order(bootstrap, tmp_path, unique, topic))
    with Admin(bootstrap, timeout_ms=60_000) as admin:
        admin.delete_topic(topic)
        admin.create_topic(topic, 1, 3, KEPT)
    produce(bootstrap, topic, 30, first=100)
    commit(bootstrap, unique, topic, {0: 20})  # what a broker that remembers would say
    run_export(make_order(bootstrap, tmp_path, unique, topic))
    assert [row[1] for row in archive_rows(tmp_path)] == [*range(20), *range(30)]
    check_good(shared_cluster, tmp_path)


def test_retention_that_was_faster(
    shared_cluster: Cluster, make_topic: MakeTopic, tmp_path: Path, unique: str
) -> None:
    """Before the plan and under it; accepted, the gap is written down."""
    bootstrap, topic = shared_cluster.bootstrap, make_topic()
    produce(bootstrap, topic, 50)

    class Trimming(Watcher):
        def reached(self, step: Step) -> None:
            if step is Step.NOTED:
                trim(bootstrap, topic, 10)

    with pytest.raises(LostRecordsError, match=f"{topic}-0"):
        run_export(make_order(bootstrap, tmp_path, unique, topic), Trimming())
    assert files_of(tmp_path) == []
    commit(bootstrap, unique, topic, {0: 5})
    with pytest.raises(LostRecordsError, match=r"\[5, 10\).*--accept-loss"):
        run_export(make_order(bootstrap, tmp_path, unique, topic))

    class TrimmingOnce(Watcher):
        is_done = False

        def reached(self, step: Step) -> None:
            if step is Step.NOTED and not self.is_done:
                self.is_done = True
                trim(bootstrap, topic, 25)

    order = make_order(bootstrap, tmp_path, unique, topic, accepts_loss=True)
    report = run_export(order, TrimmingOnce())
    assert report.manifest is not None
    assert [(gap.start, gap.end, gap.why) for gap in report.manifest.gaps] == [(5, 25, "retention")]
    assert [row[1] for row in archive_rows(tmp_path)] == list(range(25, 50))
    check_good(shared_cluster, tmp_path)


def trim(bootstrap: str, topic: str, before: int) -> None:
    with Admin(bootstrap, timeout_ms=60_000) as admin:
        admin.delete_records({TopicPartition(topic, 0): before})


def test_two_exports_at_once(
    shared_cluster: Cluster, make_topic: MakeTopic, tmp_path: Path, unique: str
) -> None:
    """The second stops and says who has the group; the first does not notice."""
    bootstrap, topic = shared_cluster.bootstrap, make_topic()
    produce(bootstrap, topic, 50)
    errors: list[subprocess.CompletedProcess[str]] = []

    class Starting(Watcher):
        def reached(self, step: Step) -> None:
            if step is Step.NOTED:
                words = [sys.executable, crash_driver.__file__, bootstrap, str(tmp_path)]
                words += [unique, topic, "NONE"]
                environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
                done = subprocess.run(
                    words, env=environment, capture_output=True, text=True, check=False, timeout=150
                )
                errors.append(done)

    report = run_export(make_order(bootstrap, tmp_path, unique, topic), Starting())
    assert report.manifest is not None
    assert report.manifest.rows == 50
    (second,) = errors
    assert second.returncode == 1
    assert f"BusyError: group '{unique}' is being exported by process {os.getpid()}" in (
        second.stderr.replace('"', "'")
    )
    check_good(shared_cluster, tmp_path)


def test_an_export_that_lost_its_group_counts_nothing(
    shared_cluster: Cluster, make_topic: MakeTopic, tmp_path: Path, unique: str
) -> None:
    """As after a pause longer than its session: the other one took the group meanwhile."""
    bootstrap, topic = shared_cluster.bootstrap, make_topic()
    produce(bootstrap, topic, 50)
    client = ClientSettings(bootstrap, "raftmq-test")
    taken: list[Lease] = []

    class Losing(Watcher):
        def reached(self, step: Step) -> None:
            if step is Step.WRITTEN:
                taken.append(Lease(client, unique, session_ms=6_000).__enter__())

    with pytest.raises(BusyError, match="lost group"):
        run_export(make_order(bootstrap, tmp_path, unique, topic), Losing())
    taken[0].__exit__()
    assert files_of(tmp_path) == []
    assert committed(bootstrap, unique, topic) == {}
    run_export(make_order(bootstrap, tmp_path, unique, topic))
    check_good(shared_cluster, tmp_path)


def test_a_group_with_consumers_is_refused(
    shared_cluster: Cluster, make_topic: MakeTopic, tmp_path: Path, unique: str
) -> None:
    bootstrap, topic = shared_cluster.bootstrap, make_topic()
    produce(bootstrap, topic, 5)
    with Consumer(bootstrap, group=unique, topics=[topic], reset="earliest") as consumer:
        assert consumer.poll(30.0)
        with pytest.raises(BusyError, match="needs a group of its own"):
            run_export(make_order(bootstrap, tmp_path, unique, topic))


def test_until_committed_follows_consumers(
    shared_cluster: Cluster, make_topic: MakeTopic, tmp_path: Path, unique: str
) -> None:
    """Only what they committed, from the log start; nothing is committed for them."""
    bootstrap, topic = shared_cluster.bootstrap, make_topic()
    produce(bootstrap, topic, 50)
    order = make_order(bootstrap, tmp_path, unique, topic, until=Until.COMMITTED)
    assert run_export(order).manifest is None
    commit(bootstrap, unique, topic, {0: 20})
    with Consumer(bootstrap, group=unique, topics=[topic], auto_commit_ms=None) as consumer:
        assert consumer.poll(30.0)  # a live member is no hindrance
        run_export(order)
    assert [row[1] for row in archive_rows(tmp_path)] == list(range(20))
    commit(bootstrap, unique, topic, {0: 35})
    run_export(order)
    assert [row[1] for row in archive_rows(tmp_path)] == list(range(35))
    assert committed(bootstrap, unique, topic) == {0: 35}
    with pytest.raises(ArchiveError, match="--until committed"):
        run_export(make_order(bootstrap, tmp_path, unique, topic))
    check_good(shared_cluster, tmp_path)


def test_a_group_that_went_ahead_of_its_archive(
    shared_cluster: Cluster, make_topic: MakeTopic, tmp_path: Path, unique: str
) -> None:
    bootstrap, topic = shared_cluster.bootstrap, make_topic()
    produce(bootstrap, topic, 50)
    order = make_order(bootstrap, tmp_path, unique, topic)
    run_export(order)
    produce(bootstrap, topic, 50, first=50)
    commit(bootstrap, unique, topic, {0: 80})
    with pytest.raises(ArchiveError, match="--skip-to-committed"):
        run_export(order)
    skipping = make_order(bootstrap, tmp_path, unique, topic, skips_to_committed=True)
    report = run_export(skipping)
    assert report.manifest is not None
    assert [(gap.start, gap.end, gap.why) for gap in report.manifest.gaps] == [(50, 80, "skipped")]
    check_good(shared_cluster, tmp_path)


def test_an_archive_belongs_to_one_group(
    shared_cluster: Cluster, make_topic: MakeTopic, tmp_path: Path, unique: str
) -> None:
    bootstrap, topic = shared_cluster.bootstrap, make_topic()
    produce(bootstrap, topic, 5)
    run_export(make_order(bootstrap, tmp_path, unique, topic))
    with pytest.raises(ArchiveError, match=f"archive of group '{unique}'"):
        run_export(make_order(bootstrap, tmp_path, f"{unique}-other", topic))


def test_a_session_elsewhere_is_waited_for(
    shared_cluster: Cluster,
    make_topic: MakeTopic,
    tmp_path: Path,
    unique: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody can see whether a process on another machine is alive: its session decides."""
    bootstrap, topic = shared_cluster.bootstrap, make_topic()
    produce(bootstrap, topic, 5)
    client = ClientSettings(bootstrap, "raftmq-test")
    elsewhere = Holder("another-machine", 1, 1)
    said: list[str] = []

    class Hearing(Watcher):
        def say(self, text: str) -> None:
            said.append(text)

    with monkeypatch.context() as patch:
        patch.setattr(Holder, "this", classmethod(lambda _cls: elsewhere))
        lease = Lease(client, unique, session_ms=6_000).__enter__()
    abandon(lease)
    report = run_export(make_order(bootstrap, tmp_path, unique, topic), Hearing())
    assert report.manifest is not None
    assert any("process 1 on another-machine" in text for text in said)


def abandon(lease: Any) -> None:
    """As kill -9 does: no word to the group."""
    assert INSTANCE
    lease._engine.close()


def test_a_topic_that_shrinks_is_exported_whole(
    shared_cluster: Cluster, make_topic: MakeTopic, tmp_path: Path, unique: str
) -> None:
    """Each record once, under its topic and number, before and after; also once it grew again."""
    bootstrap, topic = shared_cluster.bootstrap, make_topic(3)
    produce(bootstrap, topic, 300, partitions=3)
    order = make_order(bootstrap, tmp_path, unique, topic)
    first = run_export(order)
    assert first.manifest is not None
    produce(bootstrap, topic, 30, partitions=3, first=300)
    how = ("--now", "--force", "--keep")  # retention is not what this is about
    done = shared_cluster.run("topic", "shrink", topic, "-p", "1", *how)
    assert done.returncode == 0, done.stderr
    produce(bootstrap, topic, 10, first=330)
    both = make_order(bootstrap, tmp_path, unique, topic, f"{topic}.retired")
    second = run_export(both)
    assert second.manifest is not None
    assert (first.manifest.rows, second.manifest.rows) == (300, 40)
    assert {key.topic for key in second.manifest.end_of()} == {topic}
    assert run_export(order).manifest is None
    done = shared_cluster.run("topic", "add-partitions", topic, "3")
    assert done.returncode == 0, done.stderr
    produce(bootstrap, topic, 30, partitions=3, first=340)
    third = run_export(order)
    assert third.manifest is not None
    assert third.manifest.rows == 30
    assert sorted(archive_rows(tmp_path)) == read_topic(bootstrap, topic, range(3))
    check_good(shared_cluster, tmp_path)
