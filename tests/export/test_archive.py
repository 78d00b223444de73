"""Archives and their check, without a broker: files written from batches made here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from attrs import evolve

from raftmq_spark.decode import arrow_schema
from raftmq_spark.errors import ReadError
from raftmq_spark.export import writer
from raftmq_spark.export.archive import Archive, archive_files, find_archive, open_archive
from raftmq_spark.export.errors import ArchiveError, BusyError
from raftmq_spark.export.manifest import ExportedRange, Run, Until, manifest_path
from raftmq_spark.export.store import locate
from raftmq_spark.export.verify import Kind, verify
from raftmq_spark.export.writer import COLUMNS, RangeTask
from raftmq_spark.plan import RangePart
from raftmq_spark.reader import PassedBy
from raftmq_spark.security import ClientSettings

pytestmark = pytest.mark.spark
DAY_US = 86_400_000_000


def open_here(folder: Path) -> Archive:
    archive, _ = open_archive(locate(str(folder)), cluster="c", group="g", until=Until.STABLE)
    return archive


def batch_of(start: int, end: int, *, step_us: int = 1_000_000, first_us: int = DAY_US) -> object:
    count = end - start
    columns = {
        "partition": [0] * count,
        "offset": list(range(start, end)),
        "timestamp": [first_us + number * step_us for number in range(start, end)],
        "timestampType": [0] * count,
        "key": [None] * count,
        "value": [b"%d" % number for number in range(start, end)],
        "headers": [[]] * count,
    }
    schema = arrow_schema(COLUMNS)
    return pa.RecordBatch.from_arrays(
        [pa.array(columns[name], type=schema.field(name).type) for name in COLUMNS], schema=schema
    )


def write(
    archive: Archive, run: Run, start: int, end: int, monkeypatch: pytest.MonkeyPatch, **batch: int
) -> ExportedRange:
    part = RangePart("t", 0, start, end)
    task = RangeTask(part, run.run, ClientSettings("h:1"), archive.store.location)
    made = [batch_of(start, end, **batch)]
    monkeypatch.setattr(writer, "read_range", lambda *_a, **_k: iter(made))
    (item,) = writer.write_range(task).ranges
    return item


def export(
    archive: Archive, start: int, end: int, monkeypatch: pytest.MonkeyPatch, **batch: int
) -> ExportedRange:
    state = archive.state()
    run = archive.begin(state, ["t"])
    written = write(archive, run, start, end, monkeypatch, **batch)
    archive.put(state, run, [written], [])
    archive.end(run)
    return written


def findings(archive: Archive) -> list[tuple[Kind, str]]:
    return [(item.kind, item.what) for item in verify(archive).findings]


def test_a_good_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = open_here(tmp_path)
    first = export(archive, 0, 100, monkeypatch)
    export(archive, 100, 150, monkeypatch, step_us=DAY_US // 20)
    assert [file.date for file in first.files] == ["1970-01-02"]
    again = find_archive(archive.store)
    assert again.identity == archive.identity
    verdict = verify(again)
    assert verdict.is_good
    assert (verdict.manifests, verdict.rows) == (2, 150)
    assert verdict.files == len(archive_files(str(tmp_path))) == 4  # 50 rows over three days
    paths = [Path(path) for path in archive_files(str(tmp_path))]
    assert all(path.is_file() for path in paths)


def test_dates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """UTC, also before 1970; what is no date goes to the folder of nulls."""
    archive = open_here(tmp_path)
    run = archive.begin(archive.state(), ["t"])
    for number, (time_us, date) in enumerate(
        [
            (-1, "1969-12-31"),
            (-1_000, ""),  # Kafka's word for no timestamp
            (2**63 - 1, ""),
            (int(datetime(9999, 12, 31, 23, tzinfo=UTC).timestamp()) * 1_000_000, "9999-12-31"),
        ]
    ):
        written = write(archive, run, number, number + 1, monkeypatch, first_us=time_us, step_us=0)
        assert [file.date for file in written.files] == [date]
    folders = sorted(path.name for path in (tmp_path / "topic=t").iterdir())
    assert folders == ["date=1969-12-31", "date=9999-12-31", "date=__HIVE_DEFAULT_PARTITION__"]


def test_more_dates_than_files_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file longest unused ends, and its date gets another one."""
    archive = open_here(tmp_path)
    state = archive.state()
    run = archive.begin(state, ["t"])
    step = DAY_US // 10
    again = batch_of(30, 60, step_us=step, first_us=DAY_US - 30 * step)
    batches = [batch_of(0, 30, step_us=step), again]  # three days, and once more
    task = RangeTask(
        RangePart("t", 0, 0, 60), run.run, ClientSettings("h:1"), archive.store.location
    )
    for limit, files in ((24, 3), (2, 6)):
        monkeypatch.setattr(writer, "_OPEN_MAX", limit)
        monkeypatch.setattr(writer, "read_range", lambda *_a, **_k: iter(batches))
        (written,) = writer.write_range(task).ranges
        assert len(written.files) == files
        assert len({file.path for file in written.files}) == files
        assert len({file.date for file in written.files}) == 3
    manifest = archive.put(state, run, [written], [])
    # Those of the first attempt, as of a speculative task, count for nothing.
    assert [kind for kind, _ in findings(archive)] == [Kind.SURPLUS] * 3
    assert len(archive.sweep(run, manifest)) == 3
    assert findings(archive) == []


def test_what_cannot_be_read_is_a_gap_between_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = open_here(tmp_path)
    state = archive.state()
    run = archive.begin(state, ["t"])
    plain = RangeTask(
        RangePart("t", 0, 0, 50), run.run, ClientSettings("h:1"), archive.store.location
    )

    def read(*_a: object, passed_by: PassedBy | None, **_k: object) -> Iterator[pa.RecordBatch]:
        if passed_by is None:
            raise ReadError("unreadable")
        yield batch_of(0, 10)
        passed_by(10, 12, "broken")
        passed_by(12, 20, "broken, too")
        yield batch_of(20, 30)
        passed_by(45, 50, "broken at the end")

    monkeypatch.setattr(writer, "read_range", read)
    with pytest.raises(ReadError):
        writer.write_range(plain)
    assert archive.data_entries() == []
    written = writer.write_range(evolve(plain, skips_unreadable=True))
    assert [(item.start, item.end, item.rows) for item in written.ranges] == [
        (0, 10, 10),
        (20, 45, 10),
    ]
    gaps = [(gap.start, gap.end, gap.why) for gap in written.gaps]
    assert gaps == [(10, 20, "unreadable"), (45, 50, "unreadable")]
    manifest = archive.put(state, run, written.ranges, written.gaps)
    assert list(manifest.end_of().values()) == [50]
    assert findings(archive) == []


def test_rows_out_of_order_are_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = open_here(tmp_path)
    run = archive.begin(archive.state(), ["t"])
    task = RangeTask(
        RangePart("t", 0, 0, 5), run.run, ClientSettings("h:1"), archive.store.location
    )
    for batches in ([batch_of(0, 6)], [batch_of(2, 4), batch_of(3, 5)]):
        monkeypatch.setattr(writer, "read_range", lambda *_a, b=batches, **_k: iter(b))
        with pytest.raises(ReadError):
            writer.write_range(task)
    assert archive.data_entries() == []


def test_damaged_missing_surplus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = open_here(tmp_path)
    paths = [export(archive, start, start + 10, monkeypatch).files[0].path for start in (0, 10, 20)]
    data = bytearray((tmp_path / paths[0]).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / paths[0]).write_bytes(data)
    (tmp_path / paths[1]).unlink()
    surplus = "topic=t/date=1970-01-02/t-00000-x.parquet"
    (tmp_path / surplus).write_bytes((tmp_path / paths[2]).read_bytes())
    assert findings(archive) == [
        (Kind.DAMAGED, paths[0]),
        (Kind.MISSING, paths[1]),
        (Kind.SURPLUS, surplus),
    ]


def test_a_file_swapped_for_another_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = open_here(tmp_path)
    first, second = (export(archive, s, s + 10, monkeypatch).files[0].path for s in (0, 10))
    (tmp_path / first).write_bytes((tmp_path / second).read_bytes())
    assert findings(archive) == [(Kind.DAMAGED, first)]


def test_manifests_that_were_lost_or_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = open_here(tmp_path)
    for start in (0, 10, 20):
        export(archive, start, start + 10, monkeypatch)
    path = tmp_path / manifest_path(2)
    good = path.read_bytes()
    changed = json.loads(good)
    changed["ranges"][0]["rows"] = 9
    path.write_text(json.dumps(changed))
    kinds = {(kind, what) for kind, what in findings(archive)}
    assert (Kind.WRONG, "t-0 [10, 20)") in kinds
    assert (Kind.DAMAGED, "manifest 3") in kinds  # its predecessor has another checksum
    path.unlink()
    assert (Kind.MISSING, "manifest 2") in findings(archive)
    path.write_bytes(good[:50])
    assert (Kind.DAMAGED, "manifest 2") in findings(archive)
    path.write_bytes(good)
    assert findings(archive) == []


def test_rows_that_are_not_what_the_manifest_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checksum holds, so it was listed wrongly: each kind is told."""
    archive = open_here(tmp_path)
    written = export(archive, 0, 10, monkeypatch)
    path = tmp_path / manifest_path(1)
    good = json.loads(path.read_bytes())
    for changes, why in [
        ({"rows": 9}, "10 rows, not 9"),
        ({"last_offset": 8}, "outside those of the manifest"),
        ({"date": "1970-01-03"}, "rows of 1970-01-02"),
    ]:
        told = json.loads(json.dumps(good))
        told["ranges"][0]["files"][0].update(changes)
        path.write_text(json.dumps(told))
        whys = [item.why for item in verify(archive).findings if item.what == written.files[0].path]
        assert len(whys) == 1
        assert why in whys[0]


def test_a_run_that_died_is_voided_and_can_never_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it only slept: its manifest finds its number taken."""
    archive = open_here(tmp_path)
    export(archive, 0, 10, monkeypatch)
    state = archive.state()
    asleep = archive.begin(state, ["t"])
    written = write(archive, asleep, 10, 20, monkeypatch)
    (tmp_path / "topic=t" / f"._tmp.0.t-{asleep.run}-half.parquet").write_bytes(b"half")

    other = open_here(tmp_path)
    assert [run.run for run in other.open_runs()] == [asleep.run]
    assert not other.settle(asleep)
    assert not other.settle(asleep)  # twice is once
    assert len(other.clean(asleep)) == 2
    with pytest.raises(BusyError, match="another export wrote manifest 2"):
        archive.put(state, asleep, [written], [])
    other.end(asleep)
    export(other, 10, 30, monkeypatch)
    verdict = verify(other)
    assert verdict.is_good
    assert (verdict.manifests, verdict.voided, verdict.rows) == (3, 1, 30)


def test_a_run_whose_manifest_stands_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = open_here(tmp_path)
    state = archive.state()
    run = archive.begin(state, ["t"])
    written = write(archive, run, 0, 10, monkeypatch)
    manifest = archive.put(state, run, [written], [])
    assert archive.put(state, run, [written], []) == manifest  # an answer that was lost
    assert archive.settle(run)
    assert archive.state().next_number == 2


def test_whose_archive_it_is(tmp_path: Path) -> None:
    open_here(tmp_path)
    where = locate(str(tmp_path))
    for cluster, group in (("other", "g"), ("c", "other")):
        with pytest.raises(ArchiveError, match="is the archive of group 'g' of cluster 'c'"):
            open_archive(where, cluster=cluster, group=group, until=Until.STABLE)
    with pytest.raises(ArchiveError, match="cannot change"):
        open_archive(where, cluster="c", group="g", until=Until.COMMITTED)
    with pytest.raises(ArchiveError, match="is no archive"):
        archive_files(str(tmp_path / "elsewhere"))
