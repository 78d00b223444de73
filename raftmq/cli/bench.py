"""`raftmq bench`: what a cluster does with our own client, in one short run.

Honest by construction: the clock runs from the first send to the last acknowledgement, latency is
per acknowledged record in flight one at a time, and what is read back is counted.
"""

from __future__ import annotations

import os
import time
from typing import Annotated

import typer

from raftmq.cli import completion
from raftmq.cli.common import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    Bar,
    Bootstrap,
    CommandError,
    client_security,
    open_admin,
    partitions_of,
    progress_bar,
    reported,
    show,
)
from raftmq.cli.console import note
from raftmq.cli.produce import Acks, Compression
from raftmq.errors import ErrorCode
from raftmq.types import TopicPartition
from raftmq_client.blocking.admin import Admin
from raftmq_client.blocking.consumer import Consumer
from raftmq_client.blocking.producer import Producer
from raftmq_client.errors import BrokerError

COLUMNS = ("Test", "Records", "Bytes", "Seconds", "Records/s", "MB/s", "p50 ms", "p99 ms")
TIMEOUT_S = 15.0
_LATENCY_RECORDS_MAX = 2_000
_STEP = 1_000
_SHOW_EVERY_S = 0.25


def bench(
    topic: Annotated[
        str,
        typer.Option("-t", "--topic", autocompletion=completion.topics, help="Made when absent."),
    ] = "bench",
    records: Annotated[int, typer.Option("-c", "--count", help="Records to write.", min=1)] = (
        200_000
    ),
    size: Annotated[int, typer.Option("-s", "--size", help="Bytes of each value.", min=1)] = 100,
    partitions: Annotated[
        int, typer.Option("-p", "--partitions", help="Of a topic made here.", min=1)
    ] = 1,
    acks: Annotated[Acks, typer.Option("-a", "--acks", help="all, 1 or 0.")] = Acks.all,
    compression: Annotated[
        Compression, typer.Option("-z", "--compression", help="How batches are compressed.")
    ] = Compression.none,
    keep: Annotated[bool, typer.Option("--keep", help="Do not delete a topic made here.")] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    as_json: AsJson = False,
) -> None:
    """Measure latency, writing and reading with our own client.

    Examples: raftmq bench -c 1000000 -s 170 -z lz4
    """
    with reported(), open_admin(bootstrap, TIMEOUT_S) as admin:
        made = _ensure_topic(admin, topic, partitions)
        try:
            value = os.urandom(size // 2 + 1).hex()[:size].encode()
            few = min(records, _LATENCY_RECORDS_MAX)
            with progress_bar("one in flight", as_json) as bar:
                rows = [_latency(bootstrap, topic, value, acks, few, _Pace(bar, few))]
                ends = _ends(admin, topic)
                bar.name("produce")
                pace = _Pace(bar, records)
                rows.append(_write(bootstrap, topic, value, acks, compression, records, pace))
                bar.name("consume")
                rows.append(_read(bootstrap, ends, records, size, _Pace(bar, records)))
            show(COLUMNS, rows, as_json=as_json)
        finally:
            if made and not keep:
                admin.delete_topic(topic)


class _Pace:
    """Shows how far a test is a few times a second: drawing more often would be measured."""

    def __init__(self, bar: Bar, count: int) -> None:
        self._bar = bar
        self._count = count
        self._shown_at = 0.0

    def at(self, done: int) -> None:
        """So many records are done."""
        now = time.perf_counter()
        if now - self._shown_at >= _SHOW_EVERY_S or done >= self._count:
            self._shown_at = now
            self._bar.update(done, self._count, f"{done:,} records")


def _ensure_topic(admin: Admin, topic: str, partitions: int) -> bool:
    try:
        admin.create_topic(topic, partitions)
    except BrokerError as error:
        if error.code is not ErrorCode.TOPIC_ALREADY_EXISTS:
            raise
        note(f"topic {topic} exists; records are added to it")
        return False
    return True


def _ends(admin: Admin, topic: str) -> dict[TopicPartition, int]:
    found = admin.list_offsets(dict.fromkeys(partitions_of(admin, topic), -1))
    return {key: item.offset for key, item in found.items()}


def _latency(
    bootstrap: str, topic: str, value: bytes, acks: Acks, count: int, pace: _Pace
) -> tuple[object, ...]:
    times = []
    with Producer(
        bootstrap,
        security=client_security(),
        acks=acks.value,
        linger_ms=0,
        client_id="raftmq-bench",
    ) as producer:
        producer.send(topic, value, partition=0).result()  # connections, producer id
        begun = time.perf_counter()
        for _ in range(count):
            start = time.perf_counter()
            producer.send(topic, value, partition=0).result()
            times.append(time.perf_counter() - start)
            pace.at(len(times))
            if time.perf_counter() - begun > 5:
                break
        seconds = time.perf_counter() - begun
    times.sort()
    p50, p99 = (round(times[int(len(times) * share)] * 1000, 2) for share in (0.5, 0.99))
    return _row("one in flight", len(times), len(value), seconds, p50, p99)


def _write(
    bootstrap: str,
    topic: str,
    value: bytes,
    acks: Acks,
    compression: Compression,
    count: int,
    pace: _Pace,
) -> tuple[object, ...]:
    with Producer(
        bootstrap,
        security=client_security(),
        acks=acks.value,
        compression=compression.value,
        batch_bytes=512 * 1024,
        request_bytes_max=4 << 20,
        client_id="raftmq-bench",
    ) as producer:
        producer.partitions(topic)
        begun = time.perf_counter()
        receipts = []
        for number in range(0, count, _STEP):
            receipts += [producer.send(topic, value) for _ in range(min(_STEP, count - number))]
            pace.at(len(receipts))
        producer.flush()
        seconds = time.perf_counter() - begun
        for receipt in receipts:
            receipt.result()
    return _row("produce", count, len(value), seconds)


def _read(
    bootstrap: str, starts: dict[TopicPartition, int], count: int, size: int, pace: _Pace
) -> tuple[object, ...]:
    with Consumer(bootstrap, security=client_security(), client_id="raftmq-bench") as consumer:
        consumer.assign(starts)
        got = 0
        begun = time.perf_counter()
        while got < count:
            batch = consumer.poll(5.0, 10_000)
            if not batch:
                raise CommandError(f"only {got} of {count} records came back within 5 s")
            got += len(batch)
            pace.at(got)
        seconds = time.perf_counter() - begun
    return _row("consume", got, size, seconds)


def _row(
    name: str, count: int, size: int, seconds: float, p50: object = None, p99: object = None
) -> tuple[object, ...]:
    rate = round(count / seconds)
    megabytes = round(count * size / seconds / 1e6, 1)
    return name, count, count * size, round(seconds, 2), rate, megabytes, p50, p99
