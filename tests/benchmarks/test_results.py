"""Files of results: written, read, merged, refused; the report made of them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks.compare import RESULT, collect, comparison_of
from benchmarks.errors import BenchmarkError
from benchmarks.picture import draw
from benchmarks.report import BEGIN, END, insert, markdown
from benchmarks.results import Comparison, Measured, Run, medians_of, merge, read, schema, write
from benchmarks.sweep import LOADS, Point, Sweep, grid, read_sweep
from benchmarks.sweep import markdown as sweep_markdown
from tests.benchmarks.test_table import ENVIRONMENT, measured, runs_of
from tests.tree import ROOT

BULK = measured(
    "bulk",
    raftmq=[
        {"produce_mb_s": value, "produce_cpu_s_per_gb": 5.0} for value in (100.0, 300.0, 200.0)
    ],
    kafka=[{"produce_mb_s": value, "produce_cpu_s_per_gb": 20.0} for value in (80.0, 100.0)],
)


def test_a_file_says_the_same_when_read_again(tmp_path: Path) -> None:
    comparison = comparison_of([BULK])
    write(tmp_path / "deep" / "bulk.json", comparison)
    assert read(tmp_path / "deep" / "bulk.json") == comparison
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["bulk.json"]


def test_medians_stand_beside_the_raw_runs() -> None:
    assert medians_of([BULK])["bulk"]["raftmq"]["produce_mb_s"] == 200.0
    assert medians_of([BULK])["bulk"]["kafka"]["produce_mb_s"] == 90.0
    assert [row.verdict for row in comparison_of([BULK]).rows][:2] == ["met", "met"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "no result"),
        ('{"workloads": 3}', "no result"),
        ('{"workloads": [{"workload": "bulk"}]}', "no result.*environment"),
        ('{"format": 99, "workloads": []}', "format 99"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(BenchmarkError, match=message) as caught:
        read(tmp_path / "x.json")
    assert "x.json" in str(caught.value)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="no such file"):
        read(tmp_path / "none.json")


def test_the_schema_names_what_a_file_holds() -> None:
    definitions = schema()["$defs"]
    assert set(definitions) >= {"Comparison", "Measured", "Run", "Environment", "RowResult"}
    assert {"raftmq", "kafka", "librdkafka", "python", "kernel", "variables", "command"} <= set(
        definitions["Environment"]["required"]
    )
    json.dumps(schema())


def test_a_folder_is_collected_and_the_last_file_counts(tmp_path: Path) -> None:
    old = measured("start", raftmq=runs_of("first_ack_s", 9.0))
    new = measured("start", raftmq=runs_of("first_ack_s", 1.0))
    write(tmp_path / "bulk.json", Comparison(workloads=[BULK]))
    write(tmp_path / "start.json", Comparison(workloads=[old]))
    whole = collect(tmp_path)
    assert {one.workload for one in whole.workloads} == {"bulk", "start"}
    assert read(tmp_path / RESULT) == whole
    write(tmp_path / "later.json", Comparison(workloads=[new]))
    merged = {one.workload: one for one in merge([tmp_path / RESULT, tmp_path / "later.json"])}
    assert merged["start"].median("raftmq", "first_ack_s") == 1.0


def test_markdown_has_the_table_where_it_was_and_what_failed() -> None:
    failed = Run(engine="kafka", seconds=1.0, error="BenchmarkError: a | b\nc")
    got = Measured(workload="bulk", environment=ENVIRONMENT, runs=[*BULK.runs, failed])
    text = markdown([got])
    assert "| produce 1 KiB, acks=all, librdkafka | 200 MB/s | 90 MB/s | 2.22 |" in text
    assert "- failed: bulk on kafka: BenchmarkError: a | b c\n" in text
    assert "PYTHONHASHSEED=0" in text
    assert "not measured" in text  # the lines of workloads that did not run are not left out


def test_the_kept_results_are_those_of_the_page() -> None:
    comparisons = sorted((ROOT / "benchmarks" / "results").glob("comparison-*.json"))
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert f"{BEGIN}\n{markdown(merge(comparisons))}{END}" in page


def test_nothing_gives_no_report() -> None:
    with pytest.raises(BenchmarkError, match="no workload"):
        markdown([])


def test_figures_replace_those_between_the_marks(tmp_path: Path) -> None:
    document = tmp_path / "doc.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    insert(document, "new\n")
    insert(document, "newer\n")
    assert document.read_text() == f"before\n{BEGIN}\nnewer\n{END}\nafter\n"
    document.write_text("no marks")
    with pytest.raises(BenchmarkError, match="has no lines"):
        insert(document, "new\n")
    assert document.read_text() == "no marks"


def point(load: str, mb_s: float, batch_kib: int = 16) -> Point:
    """A point of a sweep."""
    return Point(
        engine="raftmq",
        load=load,
        batch_kib=batch_kib,
        linger_ms=5,
        partitions=6,
        mb_s=mb_s,
        p50_ms=1.0,
        p99_ms=2.0,
        cpu_s_per_gb=5.0,
    )


def test_a_sweep_has_each_setting_once_and_its_table_both_loads() -> None:
    settings = list(grid(small=False))
    assert len(settings) == len(set(settings)) == 27
    text = sweep_markdown([point("full", 100.0), point("steady", 20.0)])
    assert "| 16 KiB | 5 | 6 | 100.0 | 2.0 | 5.0 | 1.0 | 2.0 | 5.0 |" in text
    assert point("full", 1.0).is_of("raftmq", "full", 16, 5, 6)
    assert not point("full", 1.0).is_of("kafka", "full", 16, 5, 6)


def test_a_rate_that_was_not_held_gives_no_latencies() -> None:
    text = sweep_markdown([point("full", 9.0), point("steady", 9.0)])
    assert "| 16 KiB | 5 | 6 | 9.0 | 2.0 | 5.0 | only 9 MB/s |  |  |" in text


def test_a_sweep_is_read_again_and_other_files_refused(tmp_path: Path) -> None:
    whole = Sweep(environment=ENVIRONMENT, points=[point("full", 1.0)])
    (tmp_path / "sweep.json").write_bytes(msgspec.json.encode(whole))
    assert read_sweep(tmp_path / "sweep.json") == whole
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(BenchmarkError, match="no sweep"):
        read_sweep(tmp_path / "sweep.json")


@pytest.mark.slow
def test_the_same_points_give_the_same_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="of the bench group")
    points = [point(load, 10.0, batch_kib=size) for load in LOADS for size in (16, 1024)]
    first, second = tmp_path / "1.svg", tmp_path / "deep" / "2.svg"
    draw(points, [first, tmp_path / "1.png"])
    draw(points, [second])
    assert first.read_bytes() == second.read_bytes()
    assert (tmp_path / "1.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(BenchmarkError, match="no points"):
        draw([], [first])
