"""Which figures meet which line, and what the table says when some are missing."""

from __future__ import annotations

import pytest

from benchmarks import catalog
from benchmarks.errors import BenchmarkError
from benchmarks.machine import Environment
from benchmarks.results import Measured, Run
from benchmarks.table import ROWS, Row, rows_of, verdict

ENVIRONMENT = Environment(
    started="2026-01-01T00:00:00+00:00",
    raftmq="0.1.0 abc",
    kafka="4.1.1",
    librdkafka="2.16.0",
    confluent_kafka="2.16.1",
    python="3.11.2",
    java="openjdk 17",
    kernel="6.1",
    cores=2,
    cpu="some cpu",
    memory_mib=24_000,
    load_average=0.1,
    variables={"PYTHONHASHSEED": "0"},
    command=["benchmarks", "compare"],
)


def measured(workload: str, **engines: list[dict[str, float]]) -> Measured:
    """Runs of a workload: metrics by engine."""
    runs = [
        Run(engine=engine, seconds=1.0, metrics=metrics)
        for engine, all_metrics in engines.items()
        for metrics in all_metrics
    ]
    return Measured(workload=workload, environment=ENVIRONMENT, runs=runs)


def row(key: str) -> Row:
    return next(row for row in ROWS if row.key == key)


def runs_of(metric: str, *values: float) -> list[dict[str, float]]:
    return [{metric: value} for value in values]


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([120.0, 130.0, 90.0], [100.0, 110.0, 120.0], "met"),
        ([110.0], [110.0], "met"),
        ([88.0], [110.0], "short by 20 %"),
        ([109.9], [110.0], "short by 1 %"),
    ],
)
def test_produce_is_judged_beside_kafka(
    ours: list[float], theirs: list[float], expected: str
) -> None:
    got = measured(
        "bulk", raftmq=runs_of("produce_mb_s", *ours), kafka=runs_of("produce_mb_s", *theirs)
    )
    assert verdict(row("produce"), got) == expected


def test_less_cpu_is_better() -> None:
    ours, theirs = runs_of("produce_cpu_s_per_gb", 5.0), runs_of("produce_cpu_s_per_gb", 10.0)
    line = row("produce-cpu")
    assert verdict(line, measured("bulk", raftmq=ours, kafka=theirs)) == "met"
    assert verdict(line, measured("bulk", raftmq=theirs, kafka=ours)) == "short by 100 %"


def test_the_worst_of_several_conditions_counts() -> None:
    got = measured("endtoend", raftmq=[{"p50_ms": 1.0, "p99_ms": 6.0}])
    assert verdict(row("endtoend"), got) == "short by 20 %"


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ([0.4] * 9 + [3.0], "met"),
        ([0.4] * 8 + [1.5, 3.0], "short by 50 %"),
        ([0.9] * 10, "short by 50 %"),
        ([0.4] * 4 + [1.2], "short by 20 %"),
    ],
    ids=["one late", "two late", "median late", "five runs allow none"],
)
def test_failover_allows_one_late_run_in_ten(gaps: list[float], expected: str) -> None:
    assert (
        verdict(row("failover"), measured("failover", raftmq=runs_of("gap_s", *gaps))) == expected
    )


def test_one_lost_record_in_any_run_is_too_many() -> None:
    line = row("lost")
    assert verdict(line, measured("failover", raftmq=runs_of("lost", 0, 0))) == "met"
    assert verdict(line, measured("failover", raftmq=runs_of("lost", 0, 0, 1))) == "short"


def test_without_kafka_a_line_beside_it_is_not_judged() -> None:
    got = measured("bulk", raftmq=runs_of("produce_mb_s", 500.0))
    assert verdict(row("produce"), got) == "not measured"
    assert verdict(row("produce"), None) == "not measured"


def test_a_failed_run_fails_the_line_however_good_the_others_are() -> None:
    good = measured("start", raftmq=runs_of("first_ack_s", 0.5))
    bad = Run(engine="raftmq", seconds=1.0, error="BenchmarkError: no acknowledgement\nmore")
    got = Measured(workload="start", environment=ENVIRONMENT, runs=[*good.runs, bad])
    (line,) = rows_of([got], [row("start")])
    assert line.verdict == "failed in 1 of 2 runs"
    assert line.note == "raftmq: BenchmarkError: no acknowledgement"


def test_the_client_is_named_as_the_limit() -> None:
    got = measured("small", raftmq=[{"small_msgs_s": 5e5, "small_client_cores": 0.97}])
    (line,) = rows_of([got], [row("small")])
    assert line.note == "the client is the limit"
    assert line.raftmq == "500 k/s"


def test_every_line_belongs_to_a_workload_and_back() -> None:
    assert {row.workload for row in ROWS} == {workload.name for workload in catalog.WORKLOADS}
    assert len({row.key for row in ROWS}) == len(ROWS)


def test_a_line_of_the_table_names_its_workload() -> None:
    names = [workload.name for workload in catalog.workloads_named(["consume", "memory", "lost"])]
    assert names == ["bulk", "memory", "failover"]
    plain, secured = catalog.workloads_named([]), catalog.secured_workloads()
    assert sorted(one.name for one in plain + secured) == sorted(
        one.name for one in catalog.WORKLOADS
    )
    assert catalog.workloads_named(["secured-fetch"]) == secured[:1]


def test_an_unknown_name_is_refused_with_a_near_one() -> None:
    with pytest.raises(BenchmarkError, match="did you mean 'produce'"):
        catalog.workloads_named(["prodcue"])
