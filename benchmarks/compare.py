"""Both engines side by side: alternating runs, a file per workload, resumable after any run.

Workloads that share a pair of clusters run while the other cluster idles; the rest have one cluster
of their own at a time, so that nothing else is on the machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from attrs import define, field
from confluent_kafka import KafkaException
from rich.console import Console

from benchmarks import peers
from benchmarks.catalog import Ground, Workload
from benchmarks.errors import BenchmarkError
from benchmarks.machine import Environment
from benchmarks.peers import LocalCluster
from benchmarks.plan import Metrics, Plan
from benchmarks.results import Comparison, Measured, Run, medians_of, merge, read, write
from benchmarks.stats import rounded
from benchmarks.table import ROWS, rows_of
from benchmarks.targets import Target
from benchmarks.workloads.bulk import warm_up
from benchmarks.workloads.start import first_ack

RESULT = "comparison.json"


@define
class Options:
    """What to compare, and how."""

    out: Path
    runs: int = 5
    engines: tuple[str, ...] = peers.ENGINES
    plan: Plan = Plan()
    warm_mib: int = 1024
    settings: tuple[str, ...] = ()
    """Keys of raftmq's nodes, KEY=VALUE."""
    kafka_fsync: bool = True
    again: bool = False
    """Measure anew what the folder holds already."""


@define
class Comparer:
    """One comparison."""

    options: Options
    environment: Environment
    console: Console
    _clusters: dict[str, LocalCluster] = field(factory=dict)
    """Those of the workload at hand, warm."""

    def run(self, workloads: Sequence[Workload]) -> Comparison:
        """Run what the folder does not hold yet; gives all that it holds then."""
        try:
            for number, workload in enumerate(workloads):
                self._measure(workload)
                following = workloads[number + 1 : number + 2]
                if not all(_can_share(workload, one) for one in (workload, *following)):
                    self._stop_all()
        finally:
            self._stop_all()
        return collect(self.options.out)

    def _measure(self, workload: Workload) -> None:
        path = self.options.out / f"{workload.name}.json"
        runs = self._kept(path)
        engines = [name for name in self.options.engines if name in workload.engines]
        started = time.monotonic()
        for engine in self._turns(workload, engines):
            done = sum(run.engine == engine for run in runs)
            if done >= self._count(workload, engine):
                continue
            runs.append(self._run_once(workload, engine))
            self._show(workload, runs[-1])
            self._write(path, workload, runs)
        seconds = time.monotonic() - started
        self.console.print(f"{workload.name}: {len(runs)} runs, {seconds:.0f} s", style="bold")

    def _kept(self, path: Path) -> list[Run]:
        """Runs of an earlier, interrupted comparison of the same versions."""
        if self.options.again or not path.exists():
            return []
        (measured,) = read(path).workloads
        if measured.environment.raftmq != self.environment.raftmq:
            return []
        return [run for run in measured.runs if not run.error]

    def _count(self, workload: Workload, engine: str) -> int:
        own = workload.runs if engine == "raftmq" else workload.kafka_runs
        if own is None:
            return self.options.runs
        # Five is the number that the catalog's own numbers stand beside.
        return max(1, round(own * min(1.0, self.options.runs / 5)))

    def _turns(self, workload: Workload, engines: Sequence[str]) -> Iterator[str]:
        """Which engine's turn it is: in alternation where both clusters stand, else in blocks."""
        counts = {engine: self._count(workload, engine) for engine in engines}
        if workload.ground is Ground.OWN:
            for engine in engines:
                yield from [engine] * counts[engine]
                self._stop_all()
            return
        for number in range(max(counts.values(), default=0)):
            order = engines if number % 2 == 0 else list(reversed(engines))
            yield from (engine for engine in order if number < counts[engine])

    def _run_once(self, workload: Workload, engine: str) -> Run:
        started = time.monotonic()
        error = ""
        metrics: Metrics = {}
        try:
            if workload.ground is Ground.NONE:
                metrics = self._start_once(engine)
            else:
                target = self._target(workload, engine)
                metrics = workload.measure_on(target, self.options.plan)
        except (BenchmarkError, KafkaException, OSError) as problem:
            error = f"{type(problem).__name__}: {problem}"
            self._stop(engine)  # whatever state it is in, the next run gets another
        return Run(
            engine=engine,
            seconds=round(time.monotonic() - started, 1),
            metrics={name: rounded(value) for name, value in metrics.items()},
            error=error,
        )

    def _start_once(self, engine: str) -> Metrics:
        cluster = self._make(engine)
        with ExitStack() as stack:
            stack.callback(cluster.stop)
            cluster.open()
            return first_ack(cluster, self.options.plan)

    def _target(self, workload: Workload, engine: str) -> Target:
        cluster = self._clusters.get(engine)
        if cluster is None:
            faults = {"RAFTMQ_FAULTS": "1"} if workload.faults else {}
            cluster = self._make(engine, faults, is_secured=workload.is_secured)
            self._clusters[engine] = cluster
            cluster.__enter__()
            cluster.wait_ready()
            if self.options.warm_mib and workload.is_warm:
                warm_up(cluster.target, self.options.plan, self.options.warm_mib)
        return cluster.target

    def _make(
        self,
        engine: str,
        environment: dict[str, str] | None = None,
        *,
        is_secured: bool = False,
    ) -> LocalCluster:
        return peers.make(
            engine,
            settings=self.options.settings,
            environment=environment,
            kafka_fsync=self.options.kafka_fsync,
            is_secured=is_secured,
        )

    def _stop(self, engine: str) -> None:
        cluster = self._clusters.pop(engine, None)
        if cluster is not None:
            cluster.stop()

    def _stop_all(self) -> None:
        for engine in list(self._clusters):
            self._stop(engine)

    def _show(self, workload: Workload, run: Run) -> None:
        figures = "  ".join(f"{name} {value:,.4g}" for name, value in run.metrics.items())
        line = f"{workload.name:14} {run.engine:7} {run.seconds:6.1f} s  {run.error or figures}"
        self.console.print(line, markup=False)

    def _write(self, path: Path, workload: Workload, runs: list[Run]) -> None:
        measured = Measured(workload=workload.name, environment=self.environment, runs=runs)
        write(path, comparison_of([measured]))


def _can_share(one: Workload, other: Workload) -> bool:
    """True when a pair of clusters serves both."""
    grounds = {one.ground, other.ground}
    return grounds == {Ground.SHARED} and one.is_secured == other.is_secured


def comparison_of(workloads: Sequence[Measured]) -> Comparison:
    """Runs with what follows from them."""
    ran = {measured.workload for measured in workloads}
    rows = rows_of(workloads, [row for row in ROWS if row.workload in ran])
    return Comparison(workloads=list(workloads), medians=medians_of(workloads), rows=rows)


def collect(folder: Path) -> Comparison:
    """One file of all that a folder holds."""
    files = sorted(path for path in folder.glob("*.json") if path.name != RESULT)
    comparison = comparison_of(merge(files))
    write(folder / RESULT, comparison)
    return comparison
