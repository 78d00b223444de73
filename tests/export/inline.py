"""Exports by pyarrow alone, in this process, and an order with a test's defaults.

What an export promises is tested with it in seconds; `test_spark_export.py` holds Spark to it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from raftmq.types import TopicPartition
from raftmq_client.blocking import Admin, Consumer, Producer
from raftmq_spark.export.engines import ArrowRunner
from raftmq_spark.export.job import Order, Report, Watcher, export
from raftmq_spark.export.manifest import Until
from raftmq_spark.export.planning import Wishes
from raftmq_spark.export.store import Store, locate, open_store
from raftmq_spark.export.writer import RangeTask, Written
from raftmq_spark.security import ClientSettings
from tests.tree import PYTHONPATH

Row = tuple[int, int, bytes | None, bytes | None]
"""Partition, offset, key, value."""


class InlineRunner(ArrowRunner):
    """The product's runner without Spark, which tells a test before each range."""

    def __init__(self, before_task: Callable[[int], None] = lambda _number: None) -> None:
        self._before_task = before_task
        self._number = 0

    def write(self, task: RangeTask) -> Written:
        self._before_task(self._number)
        self._number += 1
        return super().write(task)


def make_order(
    bootstrap: str, to: str | Path, group: str, *topics: str, session_ms: int = 6_000, **wishes: Any
) -> Order:
    client = ClientSettings(bootstrap, "raftmq-test")
    return Order(topics, locate(str(to)), client, Wishes(group, **wishes), session_ms=session_ms)


def run_export(order: Order, watcher: Watcher | None = None, **runner: Any) -> Report:
    return export(order, InlineRunner(**runner), watcher)


def open_at(to: str | Path) -> Store:
    return open_store(locate(str(to)))


def produce(bootstrap: str, topic: str, count: int, *, partitions: int = 1, first: int = 0) -> None:
    """Numbered records, with keys, nulls and headers among them."""
    with Producer(bootstrap, linger_ms=20) as producer:
        for number in range(first, first + count):
            producer.send(
                topic,
                None if number % 11 == 5 else b"value %d" % number,
                None if number % 3 == 0 else b"k%d" % number,
                [("n", b"%d" % number), ("n", None)] if number % 2 else [],
                number % partitions,
                1_750_000_000_000 + number * 60_000,  # a day is 1,440 of them
            )


def read_topic(bootstrap: str, topic: str, partitions: Iterable[int]) -> list[Row]:
    """Everything in a topic, by partition and offset."""
    keys = [TopicPartition(topic, partition) for partition in partitions]
    rows: list[Row] = []
    with Admin(bootstrap, timeout_ms=60_000) as admin:
        ends = admin.list_offsets(dict.fromkeys(keys, -1))
        starts = admin.list_offsets(dict.fromkeys(keys, -2))
    for key in keys:
        with Consumer(bootstrap) as consumer:
            consumer.assign({key: starts[key].offset})
            while (consumer.position(key) or 0) < ends[key].offset:
                rows += [
                    (record.partition, record.offset, record.key, record.value)
                    for record in consumer.poll(5.0, 5_000)
                ]
    return rows


def committed(bootstrap: str, group: str, topic: str) -> dict[int, int]:
    with Admin(bootstrap, timeout_ms=60_000) as admin:
        found = admin.group_offsets(group)
    return {key.partition: item.offset for key, item in found.items() if key.topic == topic}


def commit(bootstrap: str, group: str, topic: str, offsets: dict[int, int]) -> None:
    """As a consumer of this group would."""
    with Consumer(bootstrap, group=group) as consumer:
        consumer.commit({TopicPartition(topic, p): offset for p, offset in offsets.items()})


def archive_rows(to: str | Path) -> list[Row]:
    """Every row that counts, in the order of manifests, ranges and files."""
    import pyarrow.parquet as pq

    from raftmq_spark.export.archive import find_archive

    archive = find_archive(open_at(to))
    rows: list[Row] = []
    for file in archive.files():
        with archive.store.open_input(file.path) as stream:
            table = pq.read_table(stream)
        columns = (table[name].to_pylist() for name in ("partition", "offset", "key", "value"))
        rows += list(zip(*columns, strict=True))
    return rows


def files_of(to: Path) -> list[str]:
    return sorted(str(path.relative_to(to)) for path in to.rglob("*.parquet"))


__all__ = ["InlineRunner", "Until", "archive_rows", "commit", "committed", "make_order"]


def kill_at(step: str, bootstrap: str, to: Path, group: str, topic: str, master: str = "") -> int:
    """Exit code of an export in a process of its own that dies at a step (`crash_driver.py`)."""
    here = Path(__file__).parent
    words = [sys.executable, str(here / "crash_driver.py"), bootstrap, str(to), group, topic, step]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run([*words, master], env=environment, check=False, timeout=300)
    return done.returncode
