"""Client libraries beside each other: `python -m benchmarks.clients [--target raftmq,kafka] ...`.

Starts a cluster of three nodes, lets every client produce and consume the same records in turn,
as often as wanted, each run in a process of its own, and prints medians and how ours compares.
After every produce the topic's end offsets tell whether all of it is there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import aiokafka
import msgspec
from attrs import define, field
from confluent_kafka import TopicPartition
from rich.console import Console
from rich.table import Table

from benchmarks import peers
from benchmarks.client_run import BATCH_BYTES, LINGER_MS, RUNS, Done, Job
from benchmarks.clients import BULK, consumer, create_topic, delete_topics, new_name, producer
from benchmarks.errors import BenchmarkError
from benchmarks.machine import environment
from benchmarks.stats import median, ratio, rounded
from benchmarks.targets import Target
from raftmq.cli.console import out

OURS: Final = ("trio", "asyncio", "blocking")
MODES: Final = ("produce", "consume", "iterate")
RECORDS_MAX: Final = 400_000
PARTITIONS: Final = 3
_RUN_S: Final = 180


@define
class Race:
    """Clients on one cluster, in turn."""

    target: Target
    records: dict[int, int]
    linger_ms: int = LINGER_MS
    batch_bytes: int = BATCH_BYTES
    runs: dict[tuple[str, int, str], list[Done]] = field(factory=dict)
    """By mode, size and client."""

    def run(
        self, clients: Sequence[str], modes: Sequence[str], rounds: int, warm_rounds: int
    ) -> None:
        """Every client once in each round, beginning with another one each time.

        The first `warm_rounds` of them do not count: a server that compiles as it goes becomes
        several times as fast meanwhile, and would favour whoever comes last.
        """
        for size, count in self.records.items():
            filled = ""
            if set(modes) & {"consume", "iterate"}:
                filled = self._fill(size, count)
            for mode in modes:
                for number in range(-warm_rounds, rounds):
                    turn = number % len(clients)
                    for client in [*clients[turn:], *clients[:turn]]:
                        done = self._run(client, mode, size, count, filled)
                        if number >= 0:
                            self.runs.setdefault((mode, size, client), []).append(done)
            if filled:
                delete_topics(self.target, filled)

    def _run(self, client: str, mode: str, size: int, count: int, filled: str) -> Done:
        topic = filled
        if mode == "produce":
            topic = new_name("race")
            create_topic(self.target, topic, PARTITIONS)
        job = Job(
            client,
            mode,
            self.target.bootstrap,
            topic,
            PARTITIONS,
            size,
            count,
            self.linger_ms,
            self.batch_bytes,
        )
        done = _in_a_process(job)
        if mode == "produce":
            self._check_all_there(topic, count + 1)
            delete_topics(self.target, topic)
        rate = done.records / done.seconds
        out(
            f"{self.target.name} {mode} {size} B {client}: {rate:,.0f}/s, "
            f"{1e6 * done.cpu_s / done.records:.1f} us of CPU each"
        )
        return done

    def _fill(self, size: int, count: int) -> str:
        """A topic that has so many records, spread evenly."""
        topic = new_name("race")
        create_topic(self.target, topic, PARTITIONS)
        client = producer(
            self.target,
            **{**BULK, "batch.size": self.batch_bytes, "delivery.report.only.error": True},
        )
        value = bytes(range(256)) * (size // 256 + 1)
        for number in range(count):
            while True:
                try:
                    client.produce(topic, value[:size], partition=number // 64 % PARTITIONS)
                    break
                except BufferError:
                    client.poll(0.01)
        client.flush(120)
        self._check_all_there(topic, count)
        return topic

    def _check_all_there(self, topic: str, count: int) -> None:
        asker = consumer(self.target)
        try:
            ends = [
                asker.get_watermark_offsets(TopicPartition(topic, number), timeout=30)[1]
                for number in range(PARTITIONS)
            ]
        finally:
            asker.close()
        if sum(ends) != count:
            raise BenchmarkError(f"{topic} has {sum(ends)} records, {count} were acknowledged")

    def rows(self) -> list[dict[str, Any]]:
        """Medians, and ours beside the others'."""
        rates = {
            key: median([done.records / done.seconds for done in runs])
            for key, runs in self.runs.items()
        }
        found = []
        for (mode, size, client), rate in rates.items():
            runs = self.runs[mode, size, client]
            beside = {
                other: ratio(rate, rates.get((mode, size, other)))
                for other in RUNS
                if client in OURS and other not in OURS
            }
            found.append(
                {
                    "target": self.target.name,
                    "mode": mode,
                    "size": size,
                    "client": client,
                    "records_per_s": rounded(rate),
                    "mib_per_s": rounded(rate * size / (1 << 20)),
                    "cpu_us_per_record": rounded(
                        median([1e6 * done.cpu_s / done.records for done in runs])
                    ),
                    "beside": {k: rounded(v) for k, v in beside.items() if v is not None},
                    "runs": [rounded(done.records / done.seconds) for done in runs],
                }
            )
        return found


def _in_a_process(job: Job) -> Done:
    words = [sys.executable, "-m", "benchmarks.client_run", msgspec.json.encode(job).decode()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_RUN_S, check=False)
    if done.returncode:
        raise BenchmarkError(f"{job.client} {job.mode}: {done.stderr[-2000:]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Done)


def show(rows: Sequence[dict[str, Any]]) -> Table:
    """The table for people."""
    table = Table("target", "what", "client", "records/s", "MiB/s", "CPU us", "beside")
    for row in rows:
        beside = ", ".join(f"{value:.2f} x {name}" for name, value in row["beside"].items())
        table.add_row(
            row["target"],
            f"{row['mode']} {row['size']} B",
            row["client"],
            f"{row['records_per_s']:,.0f}",
            f"{row['mib_per_s']:,.0f}",
            f"{row['cpu_us_per_record']:.1f}",
            beside,
        )
    return table


def main(arguments: Sequence[str]) -> int:
    """Run it; 0 done, 1 failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clients", description=__doc__)
    parser.add_argument("--target", default="raftmq", help="of raftmq,kafka [raftmq]")
    parser.add_argument("--bootstrap", help="a cluster that stands already, in place of --target")
    parser.add_argument("--clients", default=",".join(RUNS), help=f"[{','.join(RUNS)}]")
    parser.add_argument("--modes", default="produce,consume", help=f"of {','.join(MODES)}")
    parser.add_argument("--sizes", default="1024,100", help="bytes of a value [1024,100]")
    parser.add_argument("--runs", type=int, default=5, help="of each [5]")
    parser.add_argument(
        "--warm-rounds", type=int, default=0, help="before those that count, for a cold JVM [0]"
    )
    parser.add_argument("--share", type=float, default=1.0, help="of the usual records [1]")
    parser.add_argument("--linger-ms", type=int, default=LINGER_MS, help=f"[{LINGER_MS}]")
    parser.add_argument(
        "--batch-kib", type=int, default=BATCH_BYTES >> 10, help=f"[{BATCH_BYTES >> 10}]"
    )
    parser.add_argument("--json", type=Path, help="for the figures")
    options = parser.parse_args(list(arguments))
    rows: list[dict[str, Any]] = []
    try:
        if options.bootstrap:
            rows += _race(Target("cluster", options.bootstrap), options)
        else:
            for name in options.target.split(","):
                with peers.make(name, kafka_fsync=False) as cluster:
                    cluster.wait_ready()
                    rows += _race(cluster.target, options)
    except BenchmarkError as error:
        sys.stderr.write(f"benchmarks: {error}\n")
        return 1
    Console(width=120).print(show(rows))
    result = {
        "environment": msgspec.to_builtins(environment(list(arguments))),
        "aiokafka": aiokafka.__version__,
        "linger_ms": options.linger_ms,
        "batch_bytes": options.batch_kib << 10,
        "partitions": PARTITIONS,
        "warm_rounds": options.warm_rounds,
        "rows": rows,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _race(target: Target, options: argparse.Namespace) -> list[dict[str, Any]]:
    records = {
        size: max(1_000, int(min(RECORDS_MAX, (100 << 20) // size) * options.share))
        for size in map(int, options.sizes.split(","))
    }
    race = Race(target, records, options.linger_ms, options.batch_kib << 10)
    race.run(
        options.clients.split(","), options.modes.split(","), options.runs, options.warm_rounds
    )
    return race.rows()
