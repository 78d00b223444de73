"""The command line: `run` one cluster, `compare` two, `sweep`, `report`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks import catalog, peers, sweep
from benchmarks.compare import RESULT, Comparer, Options
from benchmarks.errors import BenchmarkError
from benchmarks.machine import environment
from benchmarks.picture import draw
from benchmarks.plan import TINY, Plan
from benchmarks.report import insert, markdown, show
from benchmarks.results import merge
from benchmarks.stats import rounded
from benchmarks.targets import Target, parse_pids, read_cluster_file
from benchmarks.workloads.bulk import warm_up


def main(arguments: Sequence[str]) -> int:
    """Run a command; gives the exit code: 0 done, 1 failed, 2 usage."""
    parser = _parser()
    options = parser.parse_args(list(arguments))
    try:
        code: int = options.command(options)
    except BenchmarkError as error:
        sys.stderr.write(f"benchmarks: {error}\n")
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="workloads on one cluster; prints JSON")
    run.set_defaults(command=_run)
    where = run.add_mutually_exclusive_group(required=True)
    where.add_argument("--bootstrap", metavar="HOST:PORT,...", help="any Kafka cluster")
    where.add_argument("--cluster", type=Path, metavar="FILE", help="cluster.json of raftmq dev")
    where.add_argument("--engine", choices=peers.ENGINES, help="start three nodes for it")
    run.add_argument("--pids", default="", metavar="ID:PID,...", help="the servers' processes")
    run.add_argument("--name", default="cluster", help="what to call it in the output")
    run.add_argument("--replicas", type=int, default=3, help="replication factor [3]")
    run.add_argument(
        "--topic-config", action="append", default=[], metavar="KEY=VALUE", help="of topics made"
    )
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="raftmq key")
    run.add_argument("--only", default="bulk", metavar="NAME,...", help="which workloads [bulk]")
    run.add_argument("--runs", type=int, default=1, help="how often each [1]")
    run.add_argument("--warm", type=int, default=0, metavar="MIB", help="produce so much before")
    run.add_argument("--tiny", action="store_true", help="sizes that only show that it runs")
    _add_compare(commands)
    _add_sweep(commands)
    report = commands.add_parser("report", help="the table of results, as markdown")
    report.set_defaults(command=_report)
    report.add_argument("files", type=Path, nargs="+", help="results, or folders of them")
    report.add_argument("--write", type=Path, metavar="FILE", help="put it between FILE's marks")
    return parser


def _add_compare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    compare = commands.add_parser("compare", help="raftmq and Kafka in alternating runs")
    compare.set_defaults(command=_compare)
    what = compare.add_mutually_exclusive_group(required=True)
    what.add_argument("--all", action="store_true", help="all without security, about 30 minutes")
    what.add_argument("--only", metavar="NAME,...", help="these workloads, or lines of the table")
    what.add_argument(
        "--secure", action="store_true", help="TLS, SCRAM and rules, about 20 minutes"
    )
    compare.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    compare.add_argument("--runs", type=int, default=5, help="of each, where not said else [5]")
    compare.add_argument(
        "--engines", default=",".join(peers.ENGINES), metavar="NAME,...", help="[raftmq,kafka]"
    )
    compare.add_argument("--warm", type=int, default=1024, metavar="MIB", help="before it [1024]")
    compare.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="raftmq's")
    compare.add_argument(
        "--kafka-page-cache", action="store_true", help="let Kafka acknowledge without fsync"
    )
    compare.add_argument("--again", action="store_true", help="also what DIR holds already")
    compare.add_argument("--tiny", action="store_true", help="sizes that only show that it runs")


def _add_sweep(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    sweeping = commands.add_parser("sweep", help="throughput against p99 over client settings")
    sweeping.set_defaults(command=_sweep)
    sweeping.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON, resumable")
    sweeping.add_argument("--engines", default="raftmq", metavar="NAME,...", help="[raftmq]")
    sweeping.add_argument("--seconds", type=float, default=2.0, help="per point and load [2]")
    sweeping.add_argument("--warm", type=int, default=1024, metavar="MIB", help="before it [1024]")
    sweeping.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    sweeping.add_argument("--picture", type=Path, action="append", default=[], metavar="FILE")
    sweeping.add_argument("--write", type=Path, metavar="FILE", help="table between FILE's marks")
    sweeping.add_argument("--tiny", action="store_true", help="two points only")


def _plan(options: argparse.Namespace) -> Plan:
    return TINY if options.tiny else Plan()


def _run(options: argparse.Namespace) -> int:
    workloads = catalog.workloads_named(_words(options.only))
    if options.engine:
        faults = {"RAFTMQ_FAULTS": "1"} if any(one.faults for one in workloads) else {}
        kinds = {one.is_secured for one in workloads}
        if len(kinds) > 1:
            raise BenchmarkError("workloads with security and without want two clusters")
        cluster = peers.make(
            options.engine, settings=options.set, environment=faults, is_secured=True in kinds
        )
        with cluster:
            cluster.wait_ready()
            _run_all(options, workloads, cluster.target)
            return 0
    if options.cluster:
        target = read_cluster_file(options.cluster)
    else:
        config = dict(word.partition("=")[::2] for word in options.topic_config)
        target = Target(
            options.name,
            options.bootstrap,
            parse_pids(options.pids),
            topic_config=config,
            replicas=options.replicas,
        )
    _run_all(options, workloads, target)
    return 0


def _run_all(
    options: argparse.Namespace, workloads: Sequence[catalog.Workload], target: Target
) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if options.warm:
        warm_up(target, _plan(options), options.warm)
    for workload in workloads:
        for _ in range(options.runs):
            metrics = workload.measure_on(target, _plan(options))
            line = {"cluster": target.name, "workload": workload.name}
            figures = {name: rounded(value) for name, value in metrics.items()}
            console.print(msgspec.json.encode(line | figures).decode(), markup=False)


def _compare(options: argparse.Namespace) -> int:
    if options.secure:
        workloads = catalog.secured_workloads()
    else:
        workloads = catalog.workloads_named([] if options.all else _words(options.only))
    engines = tuple(_words(options.engines))
    for engine in engines:
        if engine not in peers.ENGINES:
            raise BenchmarkError(f"no engine {engine!r}; one of {', '.join(peers.ENGINES)}")
    if options.runs < 1:
        raise BenchmarkError("--runs must be at least 1")
    console = Console(highlight=False, soft_wrap=True)
    if "kafka" in engines:
        peers.kafka_libs()  # fetched before the environment is looked at, which names its version
    comparer = Comparer(
        Options(
            out=options.out,
            runs=options.runs,
            engines=engines,
            plan=_plan(options),
            warm_mib=0 if options.tiny else options.warm,
            settings=tuple(options.set),
            kafka_fsync=not options.kafka_page_cache,
            again=options.again,
        ),
        environment(sys.argv),
        console,
    )
    comparison = comparer.run(workloads)
    show(console, comparison.rows)
    console.print(f"results in {options.out}; `python -m benchmarks report {options.out}`")
    return 0


def _sweep(options: argparse.Namespace) -> int:
    console = Console(highlight=False, soft_wrap=True)
    points = sweep.read_sweep(options.out).points if options.out.exists() else []
    around = environment(sys.argv)

    def keep(point: sweep.Point) -> None:
        points.append(point)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        content = msgspec.json.encode(sweep.Sweep(environment=around, points=points))
        options.out.write_bytes(msgspec.json.format(content, indent=1) + b"\n")
        console.print(msgspec.json.encode(point).decode(), markup=False)

    for engine in _words(options.engines):
        missing = [
            (load, *setting)
            for setting in sweep.grid(options.tiny)
            for load in sweep.LOADS
            if not any(point.is_of(engine, load, *setting) for point in points)
        ]
        if not missing:
            continue
        with peers.make(engine, settings=options.set) as cluster:
            target = cluster.wait_ready().target
            if options.warm and not options.tiny:
                warm_up(target, Plan(), options.warm)
            for load, batch_kib, linger_ms, partitions in missing:
                setting = batch_kib, linger_ms, partitions
                keep(sweep.measure(target, load, *setting, options.seconds))
    if options.picture:
        draw(points, options.picture)
    table = sweep.markdown(points)
    if options.write is not None:
        insert(options.write, table)
    console.print(table, markup=False)
    return 0


def _report(options: argparse.Namespace) -> int:
    files: list[Path] = []
    for path in options.files:
        files += [path / RESULT] if path.is_dir() else [path]
    workloads = merge(files)
    text = markdown(workloads)
    if options.write is not None:
        insert(options.write, text)
    else:
        sys.stdout.write(text)
    return 0


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]
