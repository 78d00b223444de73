"""Throughput with librdkafka: 1 KiB records in and out, 100-byte records in."""

from __future__ import annotations

import os
import time
from typing import Final

from attrs import frozen
from confluent_kafka import TopicPartition

from benchmarks.clients import BULK, consumer, create_topic, delete_topics, new_name, producer
from benchmarks.errors import BenchmarkError
from benchmarks.plan import Metrics, Plan
from benchmarks.processes import MIB, CpuWatch
from benchmarks.targets import Target

KIB: Final = 1024
_VALUES: Final = 64
_RUN: Final = 64
"""So many records in a row go to one partition."""
_STALL_S: Final = 30.0


@frozen
class Produced:
    """What came of producing."""

    acknowledged: int
    failed: int
    seconds: float


def produce(target: Target, topic: str, count: int, size: int, partitions: int) -> Produced:
    """Produce so many incompressible values as fast as librdkafka takes them.

    Raises:
        BenchmarkError: not all were settled in time.
    """
    errors: list[str] = []
    client = producer(
        target,
        **BULK,
        # Python would otherwise be called back for every record, and be the limit.
        **{"delivery.report.only.error": True},
        on_delivery=lambda error, _message: errors.append(str(error)),
    )
    blob = os.urandom(size * _VALUES)
    values = [blob[i * size : (i + 1) * size] for i in range(_VALUES)]
    send, poll = client.produce, client.poll
    started = time.perf_counter()
    for first in range(0, count, _RUN):
        partition = first // _RUN % partitions
        for value in values[: count - first]:
            while True:
                try:
                    send(topic, value, partition=partition)
                    break
                except BufferError:
                    poll(0.01)
        if not first & 0x7FF:
            poll(0)
    left = client.flush(180)
    seconds = time.perf_counter() - started
    if left:
        raise BenchmarkError(f"{left} of {count} records neither acknowledged nor failed in 180 s")
    return Produced(count - len(errors), len(errors), seconds)


def consume(target: Target, topic: str, count: int, partitions: int) -> tuple[int, int, float]:
    """Read a topic from its start with one consumer: records, bytes, seconds."""
    client = consumer(
        target,
        **{"fetch.message.max.bytes": 4 << 20, "queued.max.messages.kbytes": 131_072},
    )
    got = size = 0
    started = progressed = time.perf_counter()
    try:
        client.assign([TopicPartition(topic, number, 0) for number in range(partitions)])
        while got < count and time.perf_counter() - progressed < _STALL_S:
            messages = client.consume(10_000, 0.2)
            if messages:
                progressed = time.perf_counter()
            for message in messages:
                if message.error() is None:
                    got += 1
                    size += len(message)
        return got, size, time.perf_counter() - started
    finally:
        client.close()


def bulk(target: Target, plan: Plan) -> Metrics:
    """1 KiB values with acks=all, then the same read back by one consumer."""
    topic = new_name("bulk")
    create_topic(target, topic, plan.partitions)
    warm = min(2000, plan.bulk_count)
    produce(target, topic, warm, KIB, plan.partitions)
    watch = CpuWatch(target.servers)
    made = produce(target, topic, plan.bulk_count, KIB, plan.partitions)
    produce_cpu, produce_client = watch.servers_s, watch.client_cores
    total = warm + made.acknowledged
    watch = CpuWatch(target.servers)
    got, size, seconds = consume(target, topic, total, plan.partitions)
    consume_cpu, consume_client = watch.servers_s, watch.client_cores
    delete_topics(target, topic)
    if made.failed or got < total:  # a repeated produce without idempotence may be there twice
        raise BenchmarkError(f"{made.failed} produces failed, {total - got} records missing")
    gib_in, gib_out = made.acknowledged * KIB / 2**30, size / 2**30
    return {
        "produce_mb_s": made.acknowledged * KIB / MIB / made.seconds,
        "produce_cpu_s_per_gb": produce_cpu / gib_in,
        "produce_client_cores": produce_client,
        "consume_mb_s": size / MIB / seconds,
        "consume_cpu_s_per_gb": consume_cpu / gib_out,
        "consume_client_cores": consume_client,
    }


def small(target: Target, plan: Plan) -> Metrics:
    """100-byte values with acks=all."""
    topic = new_name("small")
    create_topic(target, topic, plan.partitions)
    produce(target, topic, min(2000, plan.small_count), 100, plan.partitions)
    watch = CpuWatch(target.servers)
    made = produce(target, topic, plan.small_count, 100, plan.partitions)
    cpu, cores = watch.servers_s, watch.client_cores
    delete_topics(target, topic)
    if made.failed:
        raise BenchmarkError(f"{made.failed} produces failed")
    return {
        "small_msgs_s": made.acknowledged / made.seconds,
        "small_cpu_us_per_msg": cpu / made.acknowledged * 1e6,
        "small_client_cores": cores,
    }


def warm_up(target: Target, plan: Plan, mebibytes: int) -> None:
    """Let the cluster take so much before anything is measured (Kafka's JIT needs about 1 GB)."""
    topic = new_name("warm")
    create_topic(target, topic, plan.partitions)
    count = mebibytes * MIB // KIB
    produce(target, topic, count, KIB, plan.partitions)
    consume(target, topic, count // 4, plan.partitions)
    delete_topics(target, topic)
