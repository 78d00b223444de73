"""Throughput against p99 over batch size x linger x partitions, with 1 KiB records and librdkafka.

Two loads per point: as fast as it goes with a bounded number of records unacknowledged, and a
steady rate well below that. A record's time runs from the call of produce to its acknowledgement,
so at full speed it is mostly time in the client's own queue.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Final

import msgspec
from confluent_kafka import KafkaError, Message

from benchmarks.clients import create_topic, delete_topics, new_name, producer
from benchmarks.errors import BenchmarkError
from benchmarks.machine import Environment
from benchmarks.processes import MIB, CpuWatch
from benchmarks.stats import percentile, rounded
from benchmarks.targets import Target
from benchmarks.workloads.latency import no_collector

BATCH_KIB: Final = (16, 128, 1024)
LINGER_MS: Final = (0, 5, 50)
PARTITIONS: Final = (1, 6, 24)
LOADS: Final = ("full", "steady")
STEADY_MB_S: Final = 20.0
_HELD: Final = 0.9
"""A steady rate counts as held from this share on."""
_KIB: Final = 1024
_UNACKNOWLEDGED: Final = 16 * 1024
"""Records, thus 16 MiB: enough for several full batches under way."""
_SAMPLE: Final = 16
"""Every so many records one is timed: more would make Python the limit."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One setting under one load."""

    engine: str
    load: str
    """`full` or `steady`."""
    batch_kib: int
    linger_ms: int
    partitions: int
    mb_s: float
    p50_ms: float
    p99_ms: float
    cpu_s_per_gb: float

    def is_of(
        self, engine: str, load: str, batch_kib: int, linger_ms: int, partitions: int
    ) -> bool:
        """True for the point of that setting."""
        wanted = (engine, load, batch_kib, linger_ms, partitions)
        return wanted == (
            self.engine,
            self.load,
            self.batch_kib,
            self.linger_ms,
            self.partitions,
        )


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """A whole file."""

    environment: Environment
    points: list[Point]


def measure(
    target: Target, load: str, batch_kib: int, linger_ms: int, partitions: int, seconds: float
) -> Point:
    """One point.

    Raises:
        BenchmarkError: something was not acknowledged.
    """
    topic = new_name("sweep")
    create_topic(target, topic, partitions)
    errors: list[str] = []

    def failed(error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            errors.append(str(error))

    times: list[float] = []

    def timed(error: KafkaError | None, message: Message) -> None:
        failed(error, message)
        latency = message.latency()
        if latency is not None:
            times.append(latency)

    settings = {
        "linger.ms": linger_ms,
        "batch.size": batch_kib * _KIB,
        "batch.num.messages": 100_000,
        "queue.buffering.max.messages": _UNACKNOWLEDGED,
        "delivery.report.only.error": False,
    }
    client = producer(target, **settings)
    value = os.urandom(_KIB)
    run = _full if load == "full" else _steady

    def send(number: int) -> None:
        on_delivery = failed if number % _SAMPLE else timed
        partition = number // 64 % partitions
        while True:
            try:
                client.produce(topic, value, partition=partition, on_delivery=on_delivery)
                return
            except BufferError:
                client.poll(0.002)

    with no_collector():
        for number in range(2000):
            send(number)
        client.flush(60)
        times.clear()
        watch = CpuWatch(target.servers)
        started = time.perf_counter()
        count = run(send, client.poll, seconds)
        left = client.flush(60)
        elapsed = time.perf_counter() - started
        cpu = watch.servers_s
    delete_topics(target, topic)
    if left or errors or not times:
        raise BenchmarkError(f"{left} records not acknowledged, {errors[:1]}")
    return Point(
        engine=target.name,
        load=load,
        batch_kib=batch_kib,
        linger_ms=linger_ms,
        partitions=partitions,
        mb_s=rounded(count * _KIB / MIB / elapsed),
        p50_ms=rounded(percentile(times, 0.5) * 1e3),
        p99_ms=rounded(percentile(times, 0.99) * 1e3),
        cpu_s_per_gb=rounded(cpu / (count * _KIB / 2**30)),
    )


def _full(send: Callable[[int], None], poll: Callable[[float], int], seconds: float) -> int:
    end = time.perf_counter() + seconds
    number = 0
    while time.perf_counter() < end:
        for _ in range(64):
            send(number)
            number += 1
        poll(0)
    return number


def _steady(send: Callable[[int], None], poll: Callable[[float], int], seconds: float) -> int:
    rate = STEADY_MB_S * MIB / _KIB
    started = time.perf_counter()
    count = int(rate * seconds)
    number = 0
    while number < count:
        due = min(count, int((time.perf_counter() - started) * rate))
        while number < due:
            send(number)
            number += 1
        poll(0.001)
    return count


def grid(small: bool) -> Iterator[tuple[int, int, int]]:
    """Batch size, linger, partitions; all of them, or two points."""
    if small:
        yield from ((16, 0, 1), (1024, 5, 6))
    else:
        yield from product(BATCH_KIB, LINGER_MS, PARTITIONS)


def read_sweep(path: Path) -> Sweep:
    """Read a file.

    Raises:
        BenchmarkError: it is not one.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Sweep)
    except (OSError, msgspec.DecodeError) as error:
        raise BenchmarkError(f"{path} is no sweep: {error}") from error


def markdown(points: Sequence[Point], engine: str = "raftmq") -> str:
    """The points of one engine as a table, both loads side by side."""
    by_setting: dict[tuple[int, int, int], dict[str, Point]] = {}
    for point in points:
        if point.engine == engine:
            key = point.batch_kib, point.linger_ms, point.partitions
            by_setting.setdefault(key, {})[point.load] = point
    lines = [
        f"| batch.size | linger.ms | partitions | full speed: MB/s | p99 ms | CPU s/GB "
        f"| at {STEADY_MB_S:.0f} MB/s: p50 ms | p99 ms | CPU s/GB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (batch_kib, linger_ms, partitions), loads in by_setting.items():
        full, steady = loads.get("full"), loads.get("steady")
        cells = [f"{batch_kib} KiB", str(linger_ms), str(partitions)]
        cells += _cells(full, lambda point: (point.mb_s, point.p99_ms, point.cpu_s_per_gb))
        cells += _cells(steady, lambda point: (point.p50_ms, point.p99_ms, point.cpu_s_per_gb))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cells(point: Point | None, figures: Callable[[Point], tuple[float, ...]]) -> list[str]:
    if point is None:
        return [""] * 3
    if point.load == "steady" and point.mb_s < _HELD * STEADY_MB_S:
        return [f"only {point.mb_s:.0f} MB/s", "", ""]
    return [f"{value:.1f}" for value in figures(point)]
