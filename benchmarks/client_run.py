"""One run of one client library, in a process of its own: `python -m benchmarks.client_run JSON`.

Each client does the same work with the same settings, written as its users write it: records
without a key into a topic, flushed, or a whole topic from its start, every value looked at. Prints
one JSON line. What was acknowledged is checked by whoever started it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, closing
from typing import Any, Final

import aiokafka
import confluent_kafka
import msgspec
import trio

from benchmarks.errors import BenchmarkError
from raftmq.types import TopicPartition
from raftmq_client import aio, blocking

LINGER_MS: Final = 5
BATCH_BYTES: Final = 128 * 1024
PARTITION_BYTES: Final = 1 << 20
POLL_RECORDS: Final = 5_000
BUFFER_BYTES: Final = 32 << 20
_VALUES: Final = 64
_POLL_S: Final = 0.5
_STALL_S: Final = 60.0
_KEEP: Final = 20_000
"""After so many more, receipts and futures are looked at: an error in one fails the run."""


class Job(msgspec.Struct, frozen=True):
    """What to do."""

    client: str
    mode: str
    """`produce`, `consume` (whole polls) or `iterate` (one by one)."""
    bootstrap: str
    topic: str
    partitions: int
    size: int
    count: int
    linger_ms: int = LINGER_MS
    batch_bytes: int = BATCH_BYTES


class Done(msgspec.Struct, frozen=True):
    """What came of it."""

    records: int
    seconds: float
    cpu_s: float


def values_of(job: Job) -> Iterator[bytes]:
    """Incompressible values, as many as are wanted."""
    blob = os.urandom(job.size * _VALUES)
    values = [blob[i * job.size : (i + 1) * job.size] for i in range(_VALUES)]
    for first in range(0, job.count, _VALUES):
        yield from values[: job.count - first]


class Clock:
    """Begins with the first thing done, and ends with the last."""

    def __init__(self) -> None:
        self._wall = time.perf_counter()
        self._cpu = time.process_time()

    def done(self, records: int) -> Done:
        """The figures."""
        return Done(records, time.perf_counter() - self._wall, time.process_time() - self._cpu)


class Counting:
    """Counts what was read until all is there. Time begins when the first records are there: what
    comes before is connecting, and for all clients."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._progressed = time.monotonic()
        self._clock: Clock | None = None
        self._at_first = 0
        self.records = 0
        self.size = 0

    def is_over(self, more: int) -> bool:
        """After a poll that gave so many.

        Raises:
            BenchmarkError: nothing has come for long, or more than there is.
        """
        now = time.monotonic()
        if more:
            self._progressed = now
            if self._clock is None:
                self._clock, self._at_first = Clock(), self.records
        elif now - self._progressed > _STALL_S:
            raise BenchmarkError(f"{self.records} of {self._job.count} records, and no more")
        return self.records >= self._job.count

    def done(self) -> Done:
        """The figures; everything was read, once, whole.

        Raises:
            BenchmarkError: it was not.
        """
        if (self.records, self.size) != (self._job.count, self._job.count * self._job.size):
            raise BenchmarkError(f"{self.records} records of {self.size} bytes for {self._job}")
        assert self._clock is not None
        return self._clock.done(self.records - self._at_first)


# ours


async def aio_produce(job: Job) -> Done:
    """raftmq_client on the running loop."""
    settings: dict[str, Any] = {"linger_ms": job.linger_ms, "batch_bytes": job.batch_bytes}
    async with aio.Producer(job.bootstrap, **settings) as producer:
        await (await producer.send(job.topic, b""))
        send, topic = producer.send, job.topic
        clock = Clock()
        receipts, keep = [], _KEEP
        for value in values_of(job):
            receipts.append(await send(topic, value))
            if len(receipts) >= keep:
                receipts = _unsettled(receipts)
                keep = len(receipts) + _KEEP
        await producer.flush()
        _unsettled(receipts)
        return clock.done(job.count)


async def aio_consume(job: Job) -> Done:
    """raftmq_client on the running loop, poll by poll."""
    async with aio.Consumer(job.bootstrap, partition_bytes_max=PARTITION_BYTES) as consumer:
        consumer.assign(_starts(job))
        counting = Counting(job)
        while True:
            records = await consumer.poll(_POLL_S, POLL_RECORDS)
            for record in records:
                counting.size += len(record.value)
            counting.records += len(records)
            if counting.is_over(len(records)):
                return counting.done()


async def aio_iterate(job: Job) -> Done:
    """raftmq_client on the running loop, record by record."""
    async with aio.Consumer(job.bootstrap, partition_bytes_max=PARTITION_BYTES) as consumer:
        consumer.assign(_starts(job))
        counting = Counting(job)
        async for record in consumer:
            counting.size += len(record.value)
            counting.records += 1
            is_watched = counting.records == 1 or counting.records >= job.count
            if is_watched and counting.is_over(1):
                break
        return counting.done()


def blocking_produce(job: Job) -> Done:
    """raftmq_client's blocking facade."""
    settings: dict[str, Any] = {"linger_ms": job.linger_ms, "batch_bytes": job.batch_bytes}
    with blocking.Producer(job.bootstrap, **settings) as producer:
        producer.send(job.topic, b"").result()
        send, topic = producer.send, job.topic
        clock = Clock()
        receipts, keep = [], _KEEP
        for value in values_of(job):
            receipts.append(send(topic, value))
            if len(receipts) >= keep:
                receipts = _unsettled(receipts)
                keep = len(receipts) + _KEEP
        producer.flush()
        _unsettled(receipts)
        return clock.done(job.count)


def blocking_consume(job: Job) -> Done:
    """raftmq_client's blocking facade, poll by poll."""
    with blocking.Consumer(job.bootstrap, partition_bytes_max=PARTITION_BYTES) as consumer:
        consumer.assign(_starts(job))
        counting = Counting(job)
        while True:
            records = consumer.poll(_POLL_S, POLL_RECORDS)
            for record in records:
                counting.size += len(record.value)
            counting.records += len(records)
            if counting.is_over(len(records)):
                return counting.done()


def blocking_iterate(job: Job) -> Done:
    """raftmq_client's blocking facade, record by record."""
    with blocking.Consumer(job.bootstrap, partition_bytes_max=PARTITION_BYTES) as consumer:
        consumer.assign(_starts(job))
        counting = Counting(job)
        for record in consumer:
            counting.size += len(record.value)
            counting.records += 1
            is_watched = counting.records == 1 or counting.records >= job.count
            if is_watched and counting.is_over(1):
                break
        return counting.done()


def _starts(job: Job) -> dict[TopicPartition, int | None]:
    return {TopicPartition(job.topic, number): 0 for number in range(job.partitions)}


def _unsettled(receipts: list[Any]) -> list[Any]:
    """Those that are still on their way.

    Raises:
        ClientError: one failed.
    """
    for receipt in receipts:
        if receipt.error is not None:
            raise receipt.error
    return [receipt for receipt in receipts if not receipt.is_done]


# aiokafka


async def aiokafka_produce(job: Job) -> Done:
    """aiokafka, idempotent as ours."""
    producer = aiokafka.AIOKafkaProducer(
        bootstrap_servers=job.bootstrap,
        acks="all",
        enable_idempotence=True,
        linger_ms=job.linger_ms,
        max_batch_size=job.batch_bytes,
    )
    await producer.start()
    try:
        await producer.send_and_wait(job.topic, b"")
        send, topic = producer.send, job.topic
        clock = Clock()
        futures, keep = [], _KEEP
        for value in values_of(job):
            futures.append(await send(topic, value))
            if len(futures) >= keep:
                futures = _pending(futures)
                keep = len(futures) + _KEEP
        await producer.flush()
        _pending(futures)
        return clock.done(job.count)
    finally:
        await producer.stop()


def _pending(futures: list[asyncio.Future[Any]]) -> list[asyncio.Future[Any]]:
    for future in futures:
        if future.done():
            future.result()
    return [future for future in futures if not future.done()]


async def _aiokafka_consumer(job: Job) -> AsyncGenerator[aiokafka.AIOKafkaConsumer, None]:
    consumer = aiokafka.AIOKafkaConsumer(
        bootstrap_servers=job.bootstrap,
        enable_auto_commit=False,
        max_partition_fetch_bytes=PARTITION_BYTES,
        auto_offset_reset="earliest",
    )
    await consumer.start()
    try:
        wanted = [aiokafka.TopicPartition(job.topic, number) for number in range(job.partitions)]
        consumer.assign(wanted)
        yield consumer
    finally:
        await consumer.stop()


async def aiokafka_consume(job: Job) -> Done:
    """aiokafka, poll by poll."""
    async with aclosing(_aiokafka_consumer(job)) as opened:
        async for consumer in opened:
            counting = Counting(job)
            while True:
                polled = await consumer.getmany(timeout_ms=500, max_records=POLL_RECORDS)
                more = 0
                for records in polled.values():
                    for record in records:
                        counting.size += len(record.value)
                    more += len(records)
                counting.records += more
                if counting.is_over(more):
                    return counting.done()
    raise BenchmarkError("no consumer")


async def aiokafka_iterate(job: Job) -> Done:
    """aiokafka, record by record."""
    async with aclosing(_aiokafka_consumer(job)) as opened:
        async for consumer in opened:
            counting = Counting(job)
            async for record in consumer:
                counting.size += len(record.value)
                counting.records += 1
                is_watched = counting.records == 1 or counting.records >= job.count
                if is_watched and counting.is_over(1):
                    return counting.done()
    raise BenchmarkError("no consumer")


# librdkafka


def confluent_produce(job: Job) -> Done:
    """confluent-kafka, idempotent as ours; only errors are called back."""
    errors: list[str] = []
    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": job.bootstrap,
            "acks": "all",
            "enable.idempotence": True,
            "linger.ms": job.linger_ms,
            "batch.size": job.batch_bytes,
            "queue.buffering.max.kbytes": BUFFER_BYTES >> 10,
            "delivery.report.only.error": True,
            "on_delivery": lambda error, _message: errors.append(str(error)),
        }
    )
    producer.produce(job.topic, b"")
    producer.flush(30)
    produce, topic = producer.produce, job.topic
    clock = Clock()
    for value in values_of(job):
        while True:
            try:
                produce(topic, value)
                break
            except BufferError:
                producer.poll(0.01)
    left = producer.flush(120)
    if errors or left:
        raise BenchmarkError(f"{left} records unsettled; {errors[:3]}")
    return clock.done(job.count)


def _confluent_consumer(job: Job) -> confluent_kafka.Consumer:
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": job.bootstrap,
            "group.id": "client-run",
            "enable.auto.commit": False,
            "check.crcs": True,
            "fetch.message.max.bytes": PARTITION_BYTES,
        }
    )
    consumer.assign(
        [confluent_kafka.TopicPartition(job.topic, number, 0) for number in range(job.partitions)]
    )
    return consumer


def confluent_consume(job: Job) -> Done:
    """confluent-kafka, poll by poll."""
    with closing(_confluent_consumer(job)) as consumer:
        counting = Counting(job)
        while True:
            # It waits for as many as are asked for: never for more than there are.
            wanted = min(POLL_RECORDS, job.count - counting.records)
            messages = consumer.consume(wanted, _POLL_S)
            for message in messages:
                value = message.value()
                if value is None or message.error() is not None:
                    raise BenchmarkError(str(message.error()))
                counting.size += len(value)
            counting.records += len(messages)
            if counting.is_over(len(messages)):
                return counting.done()


def confluent_iterate(job: Job) -> Done:
    """confluent-kafka, record by record."""
    with closing(_confluent_consumer(job)) as consumer:
        counting = Counting(job)
        while True:
            message = consumer.poll(_POLL_S)
            if message is not None:
                value = message.value()
                if value is None or message.error() is not None:
                    raise BenchmarkError(str(message.error()))
                counting.size += len(value)
                counting.records += 1
            if counting.is_over(message is not None):
                return counting.done()


Run = Callable[[Job], Any]
RUNS: Final[dict[str, tuple[Callable[[Run, Job], Done], dict[str, Run]]]] = {}


def _plain(run: Run, job: Job) -> Done:
    done: Done = run(job)
    return done


def _on_asyncio(run: Run, job: Job) -> Done:
    done: Done = asyncio.run(run(job))
    return done


def _on_trio(run: Run, job: Job) -> Done:
    done: Done = trio.run(run, job)
    return done


_AIO: Final = {"produce": aio_produce, "consume": aio_consume, "iterate": aio_iterate}
RUNS["trio"] = _on_trio, {**_AIO}
RUNS["asyncio"] = _on_asyncio, {**_AIO}
RUNS["blocking"] = (
    _plain,
    {"produce": blocking_produce, "consume": blocking_consume, "iterate": blocking_iterate},
)
RUNS["aiokafka"] = (
    _on_asyncio,
    {"produce": aiokafka_produce, "consume": aiokafka_consume, "iterate": aiokafka_iterate},
)
RUNS["confluent-kafka"] = (
    _plain,
    {"produce": confluent_produce, "consume": confluent_consume, "iterate": confluent_iterate},
)


def run_job(job: Job) -> Done:
    """Run one.

    Raises:
        BenchmarkError: it did not do all of its work.
    """
    how, by_mode = RUNS[job.client]
    return how(by_mode[job.mode], job)


if __name__ == "__main__":
    sys.stdout.write(
        json.dumps(msgspec.to_builtins(run_job(msgspec.json.decode(sys.argv[1], type=Job)))) + "\n"
    )
