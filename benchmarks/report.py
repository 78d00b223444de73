"""Results for people: a table on the terminal, a table for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.errors import BenchmarkError
from benchmarks.machine import Environment
from benchmarks.results import Measured, RowResult
from benchmarks.table import rows_of

BEGIN: Final = "<!-- figures: written by `python -m benchmarks report` -->"
END: Final = "<!-- end of figures -->"
_VERDICT_STYLES: Final = {"met": "green", "not measured": "dim"}


def show(console: Console, rows: Iterable[RowResult]) -> None:
    """The table on a terminal."""
    table = Table(title="raftmq beside Apache Kafka: medians", title_justify="left")
    for column in ("", "raftmq", "Kafka", "ratio", "must", "verdict"):
        table.add_column(column, justify="left" if column in ("", "must", "verdict") else "right")
    for row in rows:
        style = _VERDICT_STYLES.get(row.verdict, "red")
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(
            row.title, row.raftmq, row.kafka, ratio, row.must, f"[{style}]{row.verdict}[/]"
        )
    console.print(table)


def markdown(workloads: Sequence[Measured]) -> str:
    """The table with notes, where it was measured, and the runs that failed.

    Raises:
        BenchmarkError: there is nothing to report.
    """
    if not workloads:
        raise BenchmarkError("no workload in these files")
    rows = rows_of(workloads)
    lines = [
        "| three nodes, replication 3, fsync on | raftmq | Kafka | ratio | must | aim | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    notes: list[str] = []
    for row in rows:
        mark = ""
        if row.note:
            notes.append(row.note)
            mark = f" ({len(notes)})"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        cells = (row.title, row.raftmq, row.kafka, ratio, row.must, row.aim, row.verdict + mark)
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    lines += [f"({number}) {note}" for number, note in enumerate(notes, start=1)]
    if notes:
        lines.append("")
    lines += environment_lines([measured.environment for measured in workloads])
    lines += [
        f"- failed: {measured.workload} on {engine}: {_line(error)}"
        for measured in workloads
        for engine in dict.fromkeys(run.engine for run in measured.runs)
        for error in measured.errors(engine)
    ]
    return "\n".join(lines) + "\n"


def environment_lines(environments: Sequence[Environment]) -> list[str]:
    """What was measured where; each different machine or version once."""
    lines: list[str] = []
    for one in environments:
        variables = ", ".join(f"{name}={value}" for name, value in one.variables.items())
        line = (
            f"- raftmq {one.raftmq}, Apache Kafka {one.kafka or 'absent'}, librdkafka "
            f"{one.librdkafka}, Python {one.python}, {one.java or 'no Java'}; {one.cores} cores "
            f"({one.cpu}), {one.memory_mib / 1024:.0f} GB, Linux {one.kernel}; PYTHON* and "
            f"RAFTMQ_* variables: {variables or 'none'}; {one.started[:10]}"
        )
        if line not in lines:
            lines.append(line)
    return lines


def _line(text: str) -> str:
    return " ".join(text.split())[:200]


def insert(path: Path, figures: str) -> None:
    """Put the figures between a document's marks.

    Raises:
        BenchmarkError: it has none.
    """
    text = path.read_text()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise BenchmarkError(f"{path} has no lines {BEGIN!r} and {END!r}")
    path.write_text(f"{head}{BEGIN}\n{figures}{END}{tail}")
