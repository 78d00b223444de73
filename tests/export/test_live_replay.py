"""Archives produced back, killed and resumed; archives held against the log."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from raftmq.types import TopicPartition
from raftmq_client import Admin, Consumer, ConsumerRecord
from raftmq_spark.export import replay as replaying
from raftmq_spark.export.archive import find_archive
from raftmq_spark.export.errors import ArchiveError, ExportError
from raftmq_spark.export.replay import OFFSET_HEADER, SOURCE_HEADER, ReplayWishes, replay
from raftmq_spark.export.verify import Kind, verify
from raftmq_spark.security import ClientSettings
from tests.export import replay_driver
from tests.export.conftest import MakeTopic
from tests.export.inline import make_order, open_at, produce, run_export
from tests.live.harness import Cluster
from tests.tree import PYTHONPATH

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.spark]


def client_of(cluster: Cluster) -> ClientSettings:
    return ClientSettings(cluster.bootstrap, "raftmq-test")


def records(bootstrap: str, topic: str, partitions: int) -> list[ConsumerRecord]:
    found: list[ConsumerRecord] = []
    for partition in range(partitions):
        key = TopicPartition(topic, partition)
        with Consumer(bootstrap) as consumer:
            end = consumer.offsets([key], -1, timeout=60)[key].offset
            consumer.assign({key: 0})
            while (consumer.position(key) or 0) < end:
                found += consumer.poll(5.0, 5_000)
    return found


def check_equal(bootstrap: str, topic: str, into: str, partitions: int) -> None:
    """Same records in the same order, with where they come from in two headers more."""
    before, after = (records(bootstrap, name, partitions) for name in (topic, into))
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        assert (old.partition, old.key, old.value, old.timestamp) == (
            new.partition,
            new.key,
            new.value,
            new.timestamp,
        )
        headers = list(new.headers)
        assert [name for name, _ in headers[-2:]] == [SOURCE_HEADER, OFFSET_HEADER]
        assert headers[:-2] == list(old.headers)
        assert headers[-1][1] == b"%d" % old.offset


def test_it_comes_back_as_it_was(
    shared_cluster: Cluster, make_topic: MakeTopic, tmp_path: Path, unique: str
) -> None:
    bootstrap, topic = shared_cluster.bootstrap, make_topic(2)
    produce(bootstrap, topic, 4_000, partitions=2)
    run_export(make_order(bootstrap, tmp_path, unique, topic, records_per_file=700))
    archive, into = find_archive(open_at(tmp_path)), f"{unique}-again"
    (report,) = replay(archive, client_of(shared_cluster), ReplayWishes(into=into))
    assert (report.rows, report.rows_before) == (4_000, 0)
    check_equal(bootstrap, topic, into, 2)
    (report,) = replay(archive, client_of(shared_cluster), ReplayWishes(into=into))
    assert (report.rows, report.rows_before) == (0, 4_000)
    # What is exported later is all that a later replay adds.
    produce(bootstrap, topic, 100, partitions=2, first=4_000)
    run_export(make_order(bootstrap, tmp_path, unique, topic))
    (report,) = replay(archive, client_of(shared_cluster), ReplayWishes(into=into))
    assert (report.rows, report.rows_before) == (100, 4_000)
    check_equal(bootstrap, topic, into, 2)


@pytest.mark.parametrize("blocks", [1, 4])
def test_killed_and_resumed(
    blocks: int,
    shared_cluster: Cluster,
    make_topic: MakeTopic,
    tmp_path: Path,
    unique: str,
) -> None:
    bootstrap, topic, into = shared_cluster.bootstrap, make_topic(2), f"{unique}-again"
    produce(bootstrap, topic, 4_000, partitions=2)
    run_export(make_order(bootstrap, tmp_path, unique, topic, records_per_file=700))
    words = [sys.executable, replay_driver.__file__, bootstrap, str(tmp_path), into, str(blocks)]
    done = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": PYTHONPATH}, check=False, timeout=200
    )
    assert done.returncode == -9
    archive = find_archive(open_at(tmp_path))
    (report,) = replay(archive, client_of(shared_cluster), ReplayWishes(into=into))
    assert report.rows_before > 0
    assert report.rows > 0
    check_equal(bootstrap, topic, into, 2)


def test_a_torn_block_is_refused(
    shared_cluster: Cluster,
    make_topic: MakeTopic,
    tmp_path: Path,
    unique: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row in its midst that failed can only be added out of order: better to say so."""
    bootstrap, topic, into = shared_cluster.bootstrap, make_topic(), f"{unique}-again"
    produce(bootstrap, topic, 50)
    run_export(make_order(bootstrap, tmp_path, unique, topic))
    archive = find_archive(open_at(tmp_path))
    whole = replaying.range_rows

    def with_hole(*arguments: object) -> object:
        table = whole(*arguments)  # type: ignore[arg-type]
        offsets = table["offset"].to_pylist()
        return table.take([i for i, offset in enumerate(offsets) if offset not in (20, 49)])

    with monkeypatch.context() as patch:
        patch.setattr(replaying, "range_rows", with_hole)
        replay(archive, client_of(shared_cluster), ReplayWishes(into=into))
    with pytest.raises(ArchiveError, match="around old offset 20 are not in a row"):
        replay(archive, client_of(shared_cluster), ReplayWishes(into=into))


def test_a_target_with_other_records(
    shared_cluster: Cluster, make_topic: MakeTopic, tmp_path: Path, unique: str
) -> None:
    bootstrap, topic = shared_cluster.bootstrap, make_topic(2)
    produce(bootstrap, topic, 20, partitions=2)
    run_export(make_order(bootstrap, tmp_path, unique, topic))
    archive, client = find_archive(open_at(tmp_path)), client_of(shared_cluster)
    with pytest.raises(ExportError, match="--into names another topic"):
        replay(archive, client, ReplayWishes())  # into the very topic that was exported
    narrow = make_topic(1, "-narrow")
    with pytest.raises(ExportError, match="has 1 partitions where 2 are needed"):
        replay(archive, client, ReplayWishes(into=narrow))
    with pytest.raises(ArchiveError, match="has no topic 'other'"):
        replay(archive, client, ReplayWishes(("other",)))
    (report,) = replay(archive, client, ReplayWishes(appends=True))
    assert report.rows == 20
    (report,) = replay(archive, client, ReplayWishes(appends=True))
    assert (report.rows, report.rows_before) == (0, 20)
    assert len(records(bootstrap, topic, 2)) == 40


def test_the_check_sees_the_log(
    shared_cluster: Cluster, make_topic: MakeTopic, tmp_path: Path, unique: str
) -> None:
    """An archive whose rows are others than the log's, though its own sums agree."""
    bootstrap, topic, other = shared_cluster.bootstrap, make_topic(), make_topic(1, "-other")
    produce(bootstrap, topic, 30)
    run_export(make_order(bootstrap, tmp_path / "a", unique, topic))
    archive, client = find_archive(open_at(tmp_path / "a")), client_of(shared_cluster)
    verdict = verify(archive, client)
    assert verdict.is_good
    assert verdict.rows_in_log == 30
    # The same offsets of another topic, listed as this one's.
    produce(bootstrap, other, 30, first=1)
    run_export(make_order(bootstrap, tmp_path / "b", f"{unique}-b", other))
    forged = tmp_path / "b" / "_manifests" / "00000001.json"
    honest = tmp_path / "a" / "_manifests" / "00000001.json"
    ids = [find_archive(open_at(tmp_path / n)).manifest(1).manifest.ranges[0] for n in "ab"]
    told = forged.read_text().replace(ids[1].topic_id, ids[0].topic_id)
    forged.write_text(told.replace(f'"topic": "{other}"', f'"topic": "{topic}"'))
    (finding,) = verify(find_archive(open_at(tmp_path / "b")), client).findings
    assert (finding.kind, finding.what) == (Kind.DIFFERS, f"{topic}-0 [0, 30)")
    assert honest.is_file()
    # Where the log has less, what is left is compared, and the rest is a note.
    with Admin(bootstrap, timeout_ms=60_000) as admin:
        admin.delete_records({TopicPartition(topic, 0): 12})
    verdict = verify(archive, client)
    assert verdict.is_good
    assert verdict.rows_in_log == 18
    assert any("retention" in note for note in verdict.notes)
    with Admin(bootstrap, timeout_ms=60_000) as admin:
        admin.delete_topic(topic)
    verdict = verify(archive, client)
    assert verdict.is_good
    assert any("was deleted" in note for note in verdict.notes)


def test_an_archive_on_s3(
    shared_cluster: Cluster, make_topic: MakeTopic, s3_bucket: str, unique: str
) -> None:
    bootstrap, topic = shared_cluster.bootstrap, make_topic(2)
    produce(bootstrap, topic, 2_000, partitions=2)
    to = f"{s3_bucket}/archives/{unique}"
    order = make_order(bootstrap, to, unique, topic, records_per_file=300)
    report = run_export(order)
    assert report.manifest is not None
    assert report.manifest.rows == 2_000
    assert run_export(order).manifest is None
    archive = find_archive(open_at(to))
    assert verify(archive, client_of(shared_cluster)).is_good
    (back,) = replay(archive, client_of(shared_cluster), ReplayWishes(into=f"{unique}-again"))
    assert back.rows == 2_000
    check_equal(bootstrap, topic, f"{unique}-again", 2)
    archive.store.delete(next(archive.files()).path)
    (finding,) = verify(archive).findings
    assert finding.kind is Kind.MISSING


def test_an_archive_can_be_moved(
    shared_cluster: Cluster, make_topic: MakeTopic, tmp_path: Path, unique: str
) -> None:
    """Nothing in it names the place where it lies."""
    bootstrap, topic = shared_cluster.bootstrap, make_topic()
    produce(bootstrap, topic, 10)
    run_export(make_order(bootstrap, tmp_path / "a", unique, topic))
    shutil.move(tmp_path / "a", tmp_path / "b")
    produce(bootstrap, topic, 10, first=10)
    run_export(make_order(bootstrap, tmp_path / "b", unique, topic))
    verdict = verify(find_archive(open_at(tmp_path / "b")), client_of(shared_cluster))
    assert verdict.is_good
    assert verdict.rows == 20
