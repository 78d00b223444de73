"""Our Spark source beside Spark's own Kafka source: `python -m benchmarks.spark [--json FILE]`.

One three-node cluster, one local Spark, the same topics: each source reads every column of every
row into nothing, by turns, from a new plan each time. Prints rows a second (medians), their ratio,
the greatest memory of a Python worker, and how long a plan over many partitions takes. Needs the
extra `spark`, Java, and Maven for the JARs of Spark's own source.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from attrs import asdict, frozen
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from benchmarks.dev_run import DevRun
from benchmarks.errors import BenchmarkError
from raftmq.cli.console import out
from raftmq_spark.options import read_options
from raftmq_spark.plan import make_plan
from raftmq_spark.session import spark_session
from tests.spark.connector import connector_jars

ROOT: Final = Path(__file__).parent.parent
SOURCES: Final = ("raftmq", "kafka")
PARTITIONS: Final = 4
_SAMPLE_S: Final = 0.05


@frozen
class Load:
    """What a topic holds."""

    name: str
    rows: int
    size: int
    """Bytes of a value; records have no key."""


@frozen
class Result:
    """One source on one load."""

    load: str
    source: str
    rows: int
    seconds: float
    """The median."""
    rows_per_s: float
    mb_per_s: float
    worker_mib: float
    """Greatest resident memory of a Python worker meanwhile; 0 for Spark's own source."""


def fill(bootstrap: str, load: Load) -> None:
    """Make the topic and write its records."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(load.name, PARTITIONS, 3)])[load.name].result(60)
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "acks": "all",
            "linger.ms": 20,
            "batch.size": 1 << 20,
            "queue.buffering.max.kbytes": 64 << 10,
        }
    )
    values = [os.urandom(load.size) for _ in range(64)]
    for number in range(load.rows):
        while True:
            try:
                producer.produce(load.name, values[number & 63], partition=number % PARTITIONS)
                break
            except BufferError:
                producer.poll(0.1)
    if producer.flush(300):
        raise BenchmarkError(f"{load.name}: some records were not acknowledged")


class Workers:
    """Watches the memory of Spark's Python workers: children of a `pyspark.daemon` of ours."""

    def __init__(self) -> None:
        self.peak_bytes = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Look again and again while the block runs."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(_SAMPLE_S):
                self.peak_bytes = max([self.peak_bytes, *_worker_peaks()])

        thread = threading.Thread(target=look)
        self.peak_bytes = 0
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _worker_peaks() -> Iterator[int]:
    """The greatest resident memory so far (VmHWM) of each worker of this process's Spark."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            names[int(folder.name)] = (folder / "cmdline").read_text()
            parents[int(folder.name)] = int(stat[1])
        except OSError:
            continue  # it ended
    for pid, parent in parents.items():
        is_worker = "pyspark.daemon" in names[pid] and "pyspark.daemon" in names.get(parent, "")
        if not is_worker or os.getpid() not in _ancestors(pid, parents):
            continue
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        yield next(
            (int(line.split()[1]) << 10 for line in status.splitlines() if "VmHWM" in line), 0
        )


def _ancestors(pid: int, parents: dict[int, int]) -> Iterator[int]:
    while pid in parents:
        pid = parents[pid]
        yield pid


def read_all(spark: Any, source: str, bootstrap: str, load: Load) -> float:
    """Seconds to plan and to read every column of every row."""
    started = time.perf_counter()
    reader = spark.read.format(source).option("kafka.bootstrap.servers", bootstrap)
    frame = reader.option("subscribe", load.name).load()
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - started


def race(spark: Any, bootstrap: str, load: Load, repeat: int) -> list[Result]:
    """Both sources by turns, after a round that warms both."""
    seconds: dict[str, list[float]] = {source: [] for source in SOURCES}
    workers = Workers()
    peak = 0
    for source in SOURCES:
        reader = spark.read.format(source).option("kafka.bootstrap.servers", bootstrap)
        found = reader.option("subscribe", load.name).load().count()
        if found != load.rows:
            raise BenchmarkError(f"{source} read {found} rows of {load.rows}")
    for _ in range(repeat):
        for source in SOURCES:
            with workers.watch():
                seconds[source].append(read_all(spark, source, bootstrap, load))
            if source == "raftmq":
                peak = max(peak, workers.peak_bytes)
    results = []
    for source in SOURCES:
        median = statistics.median(seconds[source])
        results.append(
            Result(
                load=load.name,
                source=source,
                rows=load.rows,
                seconds=round(median, 3),
                rows_per_s=round(load.rows / median),
                mb_per_s=round(load.rows * load.size / median / 1e6, 1),
                worker_mib=round((peak if source == "raftmq" else 0) / (1 << 20), 1),
            )
        )
    return results


def time_plan(bootstrap: str, partitions: int) -> tuple[float, list[float]]:
    """Seconds of the first plan over a topic of many partitions just made, and of five more.

    The first waits until each partition has a leader: nobody else knows where its records end.
    """
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic("many", partitions, 3)], operation_timeout=120)["many"].result(
        180
    )
    options = read_options({"kafka.bootstrap.servers": bootstrap, "subscribe": "many"})
    seconds = []
    for _ in range(6):
        started = time.perf_counter()
        plan = make_plan(options)
        seconds.append(round(time.perf_counter() - started, 3))
        if len(plan.ranges["many"]) != partitions:
            raise BenchmarkError(f"a plan of {len(plan.ranges['many'])} partitions")
    return seconds[0], seconds[1:]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run everything."""
    found: dict[str, Any] = {"results": []}
    loads = [
        load
        for load in (
            Load("large", int(options.large_gb * 1e9) // 1024, 1024),
            Load("small", int(options.small_millions * 1e6), 100),
        )
        if options.only in (None, load.name)
    ]
    with DevRun() as run:
        for load in loads:
            fill(run.bootstrap, load)
        if loads:
            found["results"] = race_all(run.bootstrap, loads, options.repeat)
        if options.only in (None, "plan"):
            first, plans = time_plan(run.bootstrap, options.plan_partitions)
            found |= {"first_plan_s": first, "plan_s": plans}
            out(
                f"plans over {options.plan_partitions} partitions, seconds: {plans};"
                f" the first, which waits for leaders: {first}"
            )
    return found


def race_all(bootstrap: str, loads: Sequence[Load], repeat: int) -> list[dict[str, Any]]:
    """One Spark, one load after the other."""
    jars = connector_jars()
    if not jars:
        raise BenchmarkError("Spark's own source could not be fetched; is Maven there?")
    os.environ["PYTHONPATH"] = os.pathsep.join(str(ROOT / part) for part in ("spark", "client", ""))
    spark = spark_session(
        "raftmq-benchmark",
        master="local[2]",
        spark__driver__memory="1g",
        spark__driver__host="127.0.0.1",
        spark__ui__enabled="false",
        spark__ui__showConsoleProgress="false",
        spark__jars=",".join(jars),
    )
    spark.sparkContext.setLogLevel("ERROR")
    results: list[Result] = []
    for load in loads:
        results += race(spark, bootstrap, load, repeat)
        for result in results[-2:]:
            out(str(result))
        ours, theirs = results[-2:]
        out(f"{load.name}: {ours.rows_per_s / theirs.rows_per_s:.2f} x Spark's own source")
    spark.stop()
    return [asdict(result) for result in results]


def main(arguments: Sequence[str]) -> int:
    """Run it; 1 where less than half of Spark's own source's speed, or a limit, is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large-gb", type=float, default=2.0, help="of 1 KiB records")
    parser.add_argument("--small-millions", type=float, default=10.0, help="100-byte records")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--plan-partitions", type=int, default=1_000)
    parser.add_argument("--only", choices=("large", "small", "plan"), help="one part alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    found = measure(options)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    rows = found["results"]
    ratios = [rows[i]["rows_per_s"] / rows[i + 1]["rows_per_s"] for i in range(0, len(rows), 2)]
    is_fast = all(ratio >= 0.5 for ratio in ratios)
    is_small = all(row["worker_mib"] <= 400 for row in rows)
    is_prompt = statistics.median(found.get("plan_s", [0.0])) <= 1.0
    return int(not (is_fast and is_small and is_prompt))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
