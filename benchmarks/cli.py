"""The command line: `run` one cluster, `compare` two, `sweep`, `report`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks import catalog, peers
from benchmarks.errors import BenchmarkError
from benchmarks.plan import TINY, Plan
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
    return parser


def _plan(options: argparse.Namespace) -> Plan:
    return TINY if options.tiny else Plan()


def _run(options: argparse.Namespace) -> int:
    workloads = catalog.workloads_named([name for name in options.only.split(",") if name])
    if options.engine:
        with peers.make(options.engine, settings=options.set) as cluster:
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
            metrics = workload.measure(target, _plan(options))
            line = {"cluster": target.name, "workload": workload.name}
            figures = {name: rounded(value) for name, value in metrics.items()}
            console.print(msgspec.json.encode(line | figures).decode(), markup=False)
