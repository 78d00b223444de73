"""The table: which figure of which workload decides which line, and what it must be.

The limits are this project's own goals for three nodes with replication 3 and fsync on; a line that
misses its goal is short by some share of it. Pure: figures in, lines out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from attrs import frozen

from benchmarks.results import Measured, RowResult
from benchmarks.stats import ratio

OURS: Final = "raftmq"
THEIRS: Final = "kafka"


@frozen
class Check:
    """One condition of a line."""

    value: float | None
    limit: float | None
    at_most: bool

    @property
    def short_by(self) -> float | None:
        """By what share of the limit the value misses it; 0 when met, None when not measured."""
        if self.value is None or self.limit is None:
            return None
        missing = self.value - self.limit if self.at_most else self.limit - self.value
        if missing <= 0:
            return 0.0
        return missing / abs(self.limit) if self.limit else float("inf")


Judge: TypeAlias = Callable[[Measured], list[Check]]


def at_most(metric: str, limit: float) -> Judge:
    """Our median is at most this."""
    return lambda got: [Check(got.median(OURS, metric), limit, at_most=True)]


def at_least(metric: str, limit: float) -> Judge:
    """Our median is at least this."""
    return lambda got: [Check(got.median(OURS, metric), limit, at_most=False)]


def beside(metric: str, factor: float, *, less_is_better: bool) -> Judge:
    """Our median is at least, or at most, so many times Kafka's."""

    def judge(got: Measured) -> list[Check]:
        theirs = got.median(THEIRS, metric)
        limit = None if theirs is None else theirs * factor
        return [Check(got.median(OURS, metric), limit, at_most=less_is_better)]

    return judge


def nine_of_ten(metric: str, limit: float) -> Judge:
    """At most one run in ten is above this."""

    def judge(got: Measured) -> list[Check]:
        values = got.of(OURS, metric)
        allowed = len(values) // 10
        worst_counted = sorted(values)[-1 - allowed] if values else None
        return [Check(worst_counted, limit, at_most=True)]

    return judge


def none_of(metric: str) -> Judge:
    """Zero in every run."""

    def judge(got: Measured) -> list[Check]:
        values = got.of(OURS, metric)
        return [Check(max(values) if values else None, 0.0, at_most=True)]

    return judge


def all_of(*judges: Judge) -> Judge:
    """Every one of them."""
    return lambda got: [check for judge in judges for check in judge(got)]


@frozen
class Shown:
    """A figure as the table prints it."""

    metric: str
    unit: str
    digits: int = 1
    scale: float = 1.0


@frozen
class Row:
    """One line."""

    key: str
    title: str
    workload: str
    shown: tuple[Shown, ...]
    must: str
    aim: str
    judge: Judge
    client_cores: str = ""
    """The metric that tells whether the client was the limit."""


ROWS: Final = (
    Row(
        "produce",
        "produce 1 KiB, acks=all, librdkafka",
        "bulk",
        (Shown("produce_mb_s", "MB/s", 0),),
        "≥ Kafka's, warm",
        "1.3 x",
        beside("produce_mb_s", 1.0, less_is_better=False),
        "produce_client_cores",
    ),
    Row(
        "produce-cpu",
        "server CPU per GB produced",
        "bulk",
        (Shown("produce_cpu_s_per_gb", "s"),),
        "≤ Kafka's, warm",
        "0.5 x",
        beside("produce_cpu_s_per_gb", 1.0, less_is_better=True),
    ),
    Row(
        "consume",
        "consume 1 KiB, librdkafka",
        "bulk",
        (Shown("consume_mb_s", "MB/s", 0), Shown("consume_cpu_s_per_gb", "CPU s/GB", 2)),
        "≥ 0.9 x at ≤ its CPU",
        "more",
        all_of(
            beside("consume_mb_s", 0.9, less_is_better=False),
            beside("consume_cpu_s_per_gb", 1.0, less_is_better=True),
        ),
        "consume_client_cores",
    ),
    Row(
        "small",
        "100-byte messages, librdkafka",
        "small",
        (Shown("small_msgs_s", "k/s", 0, 1e-3),),
        "≥ 0.8 x",
        "≥ Kafka's",
        beside("small_msgs_s", 0.8, less_is_better=False),
        "small_client_cores",
    ),
    Row(
        "batches",
        "100-byte messages in prebuilt 1 MiB batches, 6 partitions",
        "batches",
        (Shown("batches_msgs_s", "M/s", 2, 1e-6),),
        "≥ 1.0 M/s",
        "3 M/s",
        at_least("batches_msgs_s", 1e6),
        "batches_client_cores",
    ),
    Row(
        "single",
        "one in flight, p50 (p99)",
        "single",
        (Shown("p50_ms", "ms", 2), Shown("p99_ms", "ms")),
        "≤ Kafka's",
        "0.43 ms",
        beside("p50_ms", 1.0, less_is_better=True),
    ),
    Row(
        "endtoend",
        "end to end at 300/s, p50 and p99",
        "endtoend",
        (Shown("p50_ms", "ms", 2), Shown("p99_ms", "ms")),
        "≤ 1.1 / 5 ms",
        "better",
        all_of(at_most("p50_ms", 1.1), at_most("p99_ms", 5.0)),
    ),
    Row(
        "stopped",
        "a follower stopped: p99 of acks=all (against all well)",
        "stopped",
        (Shown("p99_ms", "ms"), Shown("ratio", "x", 2)),
        "≤ 1.5 x",
        "1.1 x",
        at_most("ratio", 1.5),
    ),
    Row(
        "slow",
        "a follower's fsync slowed to 50 ms: the same",
        "slow",
        (Shown("p99_ms", "ms"), Shown("ratio", "x", 2)),
        "≤ 1.5 x",
        "1.1 x",
        at_most("ratio", 1.5),
    ),
    Row(
        "memory",
        "memory of three nodes after the runs (RSS)",
        "memory",
        (Shown("rss_mib", "MB", 0),),
        "≤ 400 MB",
        "250 MB",
        at_most("rss_mib", 400),
    ),
    Row(
        "stalls",
        "stalls of the loops with a core at hand (in all), every bulk workload and a cold read",
        "stalls",
        (Shown("stalls_with_core", "", 0), Shown("stalls", "in all", 0)),
        "none",
        "none",
        none_of("stalls_with_core"),
    ),
    Row(
        "start",
        "three nodes from nothing to the first ack",
        "start",
        (Shown("first_ack_s", "s", 2),),
        "≤ 3 s",
        "1.5 s",
        at_most("first_ack_s", 3),
    ),
    Row(
        "failover",
        "kill -9 of a leader to the next ack, default timeouts",
        "failover",
        (Shown("gap_s", "s", 2),),
        "≤ 1.0 s in 9 of 10, median ≤ 0.6 s",
        "0.4 s",
        all_of(nine_of_ten("gap_s", 1.0), at_most("gap_s", 0.6)),
    ),
    Row(
        "failover-fast",
        "the same, clients that look for the leader soon",
        "failover-fast",
        (Shown("gap_s", "s", 2),),
        "≤ 1.0 s in 9 of 10",
        "0.4 s",
        nine_of_ten("gap_s", 1.0),
    ),
    Row(
        "failover-many",
        "the same with 300 partitions led by the dead node: all acknowledge again",
        "failover-many",
        (Shown("gap_s", "s", 2),),
        "≤ 2 s",
        "1 s",
        at_most("gap_s", 2.0),
    ),
    Row(
        "lost",
        "acknowledged records lost by those kills",
        "failover",
        (Shown("lost", "", 0),),
        "none",
        "none",
        none_of("lost"),
    ),
    Row(
        "partitions",
        "1,000 partitions x 3 idle for 60 s: CPU of a node, disk writes",
        "partitions",
        (Shown("cpu_percent_max", "%"), Shown("written_kib", "KiB", 0)),
        "≤ 5 % of a core, no writes",
        "1 %",
        all_of(at_most("cpu_percent_max", 5), none_of("written_kib")),
    ),
    Row(
        "consumers",
        "1,000 idle long-polling consumers: CPU of a node",
        "consumers",
        (Shown("cpu_percent_max", "%"),),
        "≤ 6 % of a core",
        "",
        at_most("cpu_percent_max", 6),
    ),
    Row(
        "crowd",
        "2,000 connections, half producing 1/s, half polling: memory each, p99",
        "crowd",
        (Shown("memory_kib_per_connection", "KiB"), Shown("p99_ms", "ms")),
        "≤ 30 KB, ≤ 20 ms",
        "",
        all_of(at_most("memory_kib_per_connection", 30), at_most("p99_ms", 20)),
    ),
    Row(
        "secured-produce",
        "TLS, SCRAM, rules: produce 1 KiB",
        "secured-bulk",
        (Shown("produce_mb_s", "MB/s", 0),),
        "≥ Kafka's, warm",
        "",
        beside("produce_mb_s", 1.0, less_is_better=False),
        "produce_client_cores",
    ),
    Row(
        "secured-produce-cpu",
        "the same: server CPU per GB produced",
        "secured-bulk",
        (Shown("produce_cpu_s_per_gb", "s"),),
        "≤ Kafka's, warm",
        "",
        beside("produce_cpu_s_per_gb", 1.0, less_is_better=True),
    ),
    Row(
        "secured-fetch",
        "TLS, SCRAM, rules: consume 1 KiB, which no sendfile can do",
        "secured-bulk",
        (Shown("consume_mb_s", "MB/s", 0), Shown("consume_cpu_s_per_gb", "CPU s/GB", 2)),
        "≥ Kafka's at ≤ its CPU",
        "",
        all_of(
            beside("consume_mb_s", 1.0, less_is_better=False),
            beside("consume_cpu_s_per_gb", 1.0, less_is_better=True),
        ),
        "consume_client_cores",
    ),
    Row(
        "secured-small",
        "TLS, SCRAM, rules: 100-byte messages",
        "secured-small",
        (Shown("small_msgs_s", "k/s", 0, 1e-3), Shown("small_cpu_us_per_msg", "CPU us each", 2)),
        "≥ Kafka's at ≤ its CPU",
        "",
        all_of(
            beside("small_msgs_s", 1.0, less_is_better=False),
            beside("small_cpu_us_per_msg", 1.0, less_is_better=True),
        ),
        "small_client_cores",
    ),
    Row(
        "secured-single",
        "TLS, SCRAM, rules: one in flight, p50 (p99)",
        "secured-single",
        (Shown("p50_ms", "ms", 2), Shown("p99_ms", "ms")),
        "≤ Kafka's",
        "",
        beside("p50_ms", 1.0, less_is_better=True),
    ),
    Row(
        "secured-failover",
        "TLS, SCRAM, rules: kill -9 of a leader to the next ack",
        "secured-failover",
        (Shown("gap_s", "s", 2),),
        "≤ 1.0 s in 9 of 10, median ≤ 0.6 s",
        "",
        all_of(nine_of_ten("gap_s", 1.0), at_most("gap_s", 0.6)),
    ),
    Row(
        "secured-failover-fast",
        "the same, clients that look for the leader soon",
        "secured-failover-fast",
        (Shown("gap_s", "s", 2),),
        "≤ 1.0 s in 9 of 10",
        "",
        nine_of_ten("gap_s", 1.0),
    ),
    Row(
        "secured-lost",
        "acknowledged records lost by those kills",
        "secured-failover",
        (Shown("lost", "", 0),),
        "none",
        "none",
        none_of("lost"),
    ),
    Row(
        "rules",
        "10,000 rules: produce and fetch, beside 10 rules",
        "rules",
        (Shown("produce_mb_s_ratio", "x", 3), Shown("fetch_mb_s_ratio", "x", 3)),
        "≥ 0.95 x",
        "",
        all_of(at_least("produce_mb_s_ratio", 0.95), at_least("fetch_mb_s_ratio", 0.95)),
    ),
)


def rows_of(workloads: Iterable[Measured], rows: Sequence[Row] = ROWS) -> list[RowResult]:
    """Every line of the table; those of workloads that did not run say so."""
    measured = {one.workload: one for one in workloads}
    return [_result(row, measured) for row in rows]


def _result(row: Row, measured: Mapping[str, Measured]) -> RowResult:
    got = measured.get(row.workload)
    ours, theirs = (_shown(row, got, engine) for engine in (OURS, THEIRS))
    first = row.shown[0].metric
    return RowResult(
        row=row.key,
        title=row.title,
        raftmq=ours,
        kafka=theirs,
        ratio=None if got is None else ratio(got.median(OURS, first), got.median(THEIRS, first)),
        must=row.must,
        aim=row.aim,
        verdict=verdict(row, got),
        note=_note(row, got),
    )


def verdict(row: Row, got: Measured | None) -> str:
    """`met`, `short by N %`, `failed: why` or `not measured`."""
    if got is None or not any(run.engine == OURS for run in got.runs):
        return "not measured"
    errors = got.errors(OURS)
    if errors:
        return f"failed in {len(errors)} of {sum(run.engine == OURS for run in got.runs)} runs"
    shortfalls = [check.short_by for check in row.judge(got)]
    if any(short is None for short in shortfalls):
        return "not measured"
    worst = max(short for short in shortfalls if short is not None)
    if not worst:
        return "met"
    if worst == float("inf"):
        return "short"
    return f"short by {max(1, round(worst * 100))} %"


def _shown(row: Row, got: Measured | None, engine: str) -> str:
    if got is None:
        return ""
    words = []
    for shown in row.shown:
        value = got.median(engine, shown.metric)
        if value is not None:
            words.append(f"{value * shown.scale:,.{shown.digits}f} {shown.unit}".strip())
    if not words and got.errors(engine):
        return "failed"
    return ", ".join(words)


def _note(row: Row, got: Measured | None) -> str:
    if got is None:
        return ""
    notes = []
    if row.client_cores:
        cores = got.median(OURS, row.client_cores)
        if cores is not None and cores >= 0.9:
            notes.append("the client is the limit")
    for engine in (OURS, THEIRS):
        errors = got.errors(engine)
        if errors:
            notes.append(f"{engine}: {errors[0].splitlines()[0]}")
    return "; ".join(notes)
