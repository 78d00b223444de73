"""A stock producer under load, and the reckoning: what was acknowledged must be read back.

Values are numbers per partition; librdkafka's callback says which were acknowledged. A number that
was never acknowledged may or may not be there: its outcome is unknown.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable
from typing import Any

import confluent_kafka
from attrs import frozen
from confluent_kafka.admin import AdminClient, NewTopic

from tests.live.harness import wait_until
from tests.second_try import PromiseBrokenError


def create_topic(
    bootstrap: str, topic: str, partitions: int = 1, replicas: int = 3, **config: str
) -> None:
    """Create a topic and wait until it is there; config keys with _ for dots."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    settings = {key.replace("_", "."): value for key, value in config.items()}
    new = NewTopic(topic, partitions, replicas, config=settings)
    admin.create_topics([new])[topic].result(60)


def leaders(bootstrap: str, topic: str) -> dict[int, int]:
    """Leader by partition, as Metadata tells it."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    told = admin.list_topics(topic, timeout=30).topics[topic]
    return {index: partition.leader for index, partition in told.partitions.items()}


def preferred_lead(bootstrap: str, topic: str) -> bool:
    """True while each partition is led by the first of its replicas, so that no leader moves by
    itself."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    told = admin.list_topics(topic, timeout=30).topics[topic]
    return all(one.leader == one.replicas[0] for one in told.partitions.values())


def in_sync(bootstrap: str, topic: str) -> dict[int, set[int]]:
    """The reported ISR by partition."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    told = admin.list_topics(topic, timeout=30).topics[topic]
    return {index: set(partition.isrs) for index, partition in told.partitions.items()}


@frozen
class Reckoning:
    """What came of a load."""

    acknowledged: int
    lost: list[tuple[int, int, int | None, list[int]]]
    """Partition, number, the offset that was acknowledged, the offsets where it is."""
    duplicates: list[tuple[int, int, list[int]]]
    """Partition, number, offsets."""
    reordered: int
    gap_ms_max: float
    given_up: int = 0
    """Records that the client itself gave up (`message.timeout.ms`). It then begins a new epoch of
    its producer id, and sends under that what was under way under the old one: second copies that
    no broker can tell from new records."""

    def check(self) -> None:
        """Raise what decides at once: no second try makes up for a lost record."""
        if self.lost:
            told = f"{len(self.lost)} acknowledged records are not where they should be"
            raise PromiseBrokenError(f"{told}: {self.lost[:5]}")
        if self.duplicates:
            told = f"{len(self.duplicates)} twice: {self.duplicates[:5]}"
            raise PromiseBrokenError(f"{told}, {self.given_up} given up")
        if self.reordered:
            raise PromiseBrokenError(f"{self.reordered} out of order")
        assert self.acknowledged > 0


class Load:
    """Produces numbers to every partition of a topic in a thread until stopped."""

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        partitions: int,
        *,
        rate: float = 2000.0,
        size: int = 100,
        after: Load | None = None,
        **settings: Any,
    ) -> None:
        """`after`: one that has ended; this one counts on from it, and reckons for both."""
        self.bootstrap = bootstrap
        self.topic = topic
        self.partitions = partitions
        self.sent = 0 if after is None else after.sent
        """How many records there are, by their numbers."""
        self.acknowledged: list[dict[int, int | None]] = (
            [{} for _ in range(partitions)] if after is None else after.acknowledged
        )
        """Offsets by number; None where librdkafka concluded from a later batch's answer that an
        earlier one, whose outcome it did not know, is there as well."""
        self.acknowledged_at: list[float] = []
        self.errors: list[str] = []
        self._rate = rate
        self._padding = b"." * max(0, size - 12)
        self._stop = threading.Event()
        self._producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": bootstrap,
                "acks": "all",
                "enable.idempotence": True,
                "linger.ms": 2,
                "queue.buffering.max.messages": 20_000,  # on a slow machine, no endless backlog
                "message.timeout.ms": 120_000,
                "retry.backoff.ms": 20,
                "retry.backoff.max.ms": 100,
                "reconnect.backoff.ms": 20,
                "reconnect.backoff.max.ms": 200,
                "topic.metadata.refresh.fast.interval.ms": 50,
                **settings,
            }
        )
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Produce no more; return once the outcome of all is known."""
        self._stop.set()
        self._thread.join(150)
        assert not self._thread.is_alive()

    @property
    def count(self) -> int:
        """Acknowledged records so far."""
        return len(self.acknowledged_at)

    def wait_for(self, more: int, timeout_s: float = 90.0) -> None:
        """Return once so many more records were acknowledged."""
        goal = self.count + more
        wait_until(lambda: self.count >= goal, timeout_s, f"{more} more acknowledgements")

    def _run(self) -> None:
        started = time.perf_counter()
        first = self.sent
        while not self._stop.is_set():
            number = self.sent
            if number - first > (time.perf_counter() - started) * self._rate:
                self._producer.poll(0.002)
                continue
            value = b"%d " % number + self._padding
            try:
                self._producer.produce(
                    self.topic,
                    value,
                    partition=number % self.partitions,
                    on_delivery=self._delivered,
                )
            except BufferError:
                self._producer.poll(0.01)
                continue
            self.sent += 1
            if not self.sent & 63:
                self._producer.poll(0)
        self._producer.flush(130)

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None:
            self.errors.append(str(error))
            return
        number = int(message.value().split(b" ", 1)[0])
        self.acknowledged[message.partition()][number] = message.offset()
        self.acknowledged_at.append(time.perf_counter())

    def reckon(self, bootstrap: str | None = None) -> Reckoning:
        """Read everything back and compare."""
        lost: list[tuple[int, int, int | None, list[int]]] = []
        duplicates: list[tuple[int, int, list[int]]] = []
        reordered = 0
        all_read = read_partitions(bootstrap or self.bootstrap, self.topic, range(self.partitions))
        for partition, read in all_read.items():
            where: dict[int, list[int]] = {}
            for offset, number in read:
                where.setdefault(number, []).append(offset)
            for number, told in self.acknowledged[partition].items():
                found = where.get(number, [])
                if not found or (told is not None and told not in found):
                    lost.append((partition, number, told, found))
            duplicates += [(partition, n, o) for n, o in where.items() if len(o) > 1]
            numbers = [number for _, number in read]
            reordered += sum(1 for a, b in itertools.pairwise(numbers) if b < a)
        times = self.acknowledged_at
        gap = max((b - a for a, b in itertools.pairwise(times)), default=0.0)
        given_up = len(self.errors)
        return Reckoning(self.count, lost, duplicates, reordered, gap * 1e3, given_up)


def watermarks(
    consumer: confluent_kafka.Consumer, topic: str, partition: int = 0
) -> tuple[int, int]:
    """Log start and high watermark; librdkafka leaves it to us to ask again after an election."""

    where = confluent_kafka.TopicPartition(topic, partition)
    deadline = time.monotonic() + 90
    while True:
        try:
            low, high = consumer.get_watermark_offsets(where, timeout=3)
        except confluent_kafka.KafkaException:
            if time.monotonic() > deadline:
                raise
        else:
            return low, high


def read_numbers(bootstrap: str, topic: str, partition: int) -> list[tuple[int, int]]:
    """(offset, number) of everything in a partition up to its high watermark."""
    return read_partitions(bootstrap, topic, [partition])[partition]


def read_partitions(
    bootstrap: str, topic: str, partitions: Iterable[int]
) -> dict[int, list[tuple[int, int]]]:
    """(offset, number) of everything in these partitions up to their high watermarks."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "reckoning",
            "enable.auto.commit": False,
            "check.crcs": True,
        }
    )
    read: dict[int, list[tuple[int, int]]] = {partition: [] for partition in partitions}
    ends: dict[int, int] = {}
    try:
        starts = []
        for partition in read:
            low, high = watermarks(consumer, topic, partition)
            if low < high:
                ends[partition] = high
                starts.append(confluent_kafka.TopicPartition(topic, partition, low))
        consumer.assign(starts)
        deadline = time.monotonic() + 120
        while ends:
            assert time.monotonic() < deadline, f"stuck before {ends}"
            for message in consumer.consume(5000, 0.5):
                deadline = time.monotonic() + 120
                assert message.error() is None, message.error()
                where, offset, value = message.partition(), message.offset(), message.value()
                assert where is not None
                assert offset is not None
                assert value is not None
                read[where].append((offset, int(value.split(b" ", 1)[0])))
                if offset >= ends.get(where, offset + 2) - 1:
                    del ends[where]
        return read
    finally:
        consumer.close()
