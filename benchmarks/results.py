"""The file of a comparison: every raw run, medians and the verdict on each row. JSON by msgspec.

A file holds one or more workloads with the environment each was run in, so files of several
evenings may be read together; of a workload that stands in several the last file counts.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.errors import BenchmarkError
from benchmarks.machine import Environment
from benchmarks.stats import median

FORMAT: Final = 1


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a workload on one engine."""

    engine: str
    seconds: float
    metrics: dict[str, float] = {}
    error: str = ""
    """Why it gave no figures; such a run counts as failed, it is not left out."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of one workload."""

    workload: str
    environment: Environment
    runs: list[Run]

    def of(self, engine: str, metric: str) -> list[float]:
        """Every run's value, in order; runs without it give nothing."""
        return [
            run.metrics[metric]
            for run in self.runs
            if run.engine == engine and metric in run.metrics
        ]

    def median(self, engine: str, metric: str) -> float | None:
        """The median over the runs, if there was one."""
        values = self.of(engine, metric)
        return median(values) if values else None

    def errors(self, engine: str) -> list[str]:
        """What went wrong."""
        return [run.error for run in self.runs if run.engine == engine and run.error]


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table."""

    row: str
    title: str
    raftmq: str
    kafka: str
    ratio: float | None
    must: str
    aim: str
    verdict: str
    """`met`, `short`, `failed` or `not measured`."""
    note: str = ""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A whole file."""

    format: int = FORMAT
    workloads: list[Measured]
    medians: dict[str, dict[str, dict[str, float]]] = {}
    """Median by workload, engine and metric."""
    rows: list[RowResult] = []


def medians_of(workloads: Iterable[Measured]) -> dict[str, dict[str, dict[str, float]]]:
    """Median by workload, engine and metric."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for measured in workloads:
        for run in measured.runs:
            by_metric = found.setdefault(measured.workload, {}).setdefault(run.engine, {})
            for metric in run.metrics:
                value = measured.median(run.engine, metric)
                if value is not None:
                    by_metric[metric] = value
    return found


def write(path: Path, comparison: Comparison) -> None:
    """Write a file, atomically: an interrupted run leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.format(msgspec.json.encode(comparison), indent=1) + b"\n"
    handle, name = tempfile.mkstemp(prefix=".result", dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.chmod(name, 0o644)
    os.replace(name, path)


def read(path: Path) -> Comparison:
    """Read a file.

    Raises:
        BenchmarkError: it is not there, or not of this format; the message says what is wrong.
    """
    try:
        comparison = msgspec.json.decode(path.read_bytes(), type=Comparison)
    except FileNotFoundError:
        raise BenchmarkError(f"{path}: no such file") from None
    except msgspec.DecodeError as error:
        raise BenchmarkError(f"{path} is no result of a comparison: {error}") from error
    if comparison.format != FORMAT:
        raise BenchmarkError(f"{path} is of format {comparison.format}, {FORMAT} is wanted")
    return comparison


def merge(files: Iterable[Path]) -> list[Measured]:
    """The workloads of several files; the last file that has one counts."""
    found: dict[str, Measured] = {}
    for path in files:
        for measured in read(path).workloads:
            found[measured.workload] = measured
    return list(found.values())


def schema() -> dict[str, Any]:
    """The JSON schema of a file."""
    return msgspec.json.schema(Comparison)
