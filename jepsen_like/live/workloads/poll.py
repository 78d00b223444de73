"""Poll with assign: consumers that give themselves their partitions, and read on whatever breaks.

Each reads some partitions from their start or from where it was, and now and then begins anew with
others. `read_to_end` is the last word of a run: everything that every partition holds.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import confluent_kafka

from jepsen_like.history_events import Value
from jepsen_like.live.workloads.append import number_in
from jepsen_like.live.workloads.base import FAST_RETRIES, Around, Crowd, key_of, parts_of
from raftmq.types import TopicPartition
from raftmq_client.blocking import Consumer
from raftmq_client.errors import ClientError
from raftmq_client.options import Isolation

REASSIGN_S: Final = (15.0, 60.0)
POLL_RECORDS_MAX: Final = 1_000
POLL_S: Final = 0.25
Records = dict[str, list[tuple[int, Value]]]


def new_consumer(bootstrap: str, group: str, **settings: Any) -> confluent_kafka.Consumer:
    """A consumer that commits nothing by itself."""
    return confluent_kafka.Consumer(
        {
            **FAST_RETRIES,
            "bootstrap.servers": bootstrap,
            "client.id": group,
            "group.id": group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "fetch.error.backoff.ms": 50,
            "fetch.wait.max.ms": 200,
            "check.crcs": True,
            **settings,
        }
    )


def is_end(message: confluent_kafka.Message) -> bool:
    """True for the notice that a partition has no more."""
    error = message.error()
    return error is not None and error.code() == confluent_kafka.KafkaError._PARTITION_EOF


def records_of(messages: list[confluent_kafka.Message]) -> tuple[Records, set[str]]:
    """What a poll returned, and its errors."""
    found: Records = {}
    errors = set()
    for message in messages:
        error = message.error()
        if error is None:
            data, offset = message.value(), message.offset()
            assert isinstance(data, bytes)
            assert offset is not None
            key = key_of(message.topic(), message.partition())
            found.setdefault(key, []).append((offset, number_in(data)))
        elif not is_end(message):
            errors.add(str(error))
    return found, errors


def ends_in(messages: list[confluent_kafka.Message]) -> dict[str, int]:
    """Partitions that have no more, and where."""
    return {
        key_of(message.topic(), message.partition()): message.offset() or 0
        for message in messages
        if is_end(message)
    }


def poll_own(consumer: Consumer, stop: threading.Event) -> tuple[Records, set[str]]:
    """The same of our own client."""
    found: Records = {}
    try:
        messages = consumer.poll(POLL_S, POLL_RECORDS_MAX)
    except ClientError as error:
        stop.wait(POLL_S)
        return found, {str(error)}
    for message in messages:
        key = key_of(message.topic, message.partition)
        assert message.value is not None, "only numbers are appended"
        found.setdefault(key, []).append((message.offset, number_in(message.value)))
    return found, set()


def assign(consumer: confluent_kafka.Consumer, starts: dict[str, int]) -> None:
    """Have it read these partitions from these offsets."""
    consumer.assign(
        [confluent_kafka.TopicPartition(*parts_of(key), starts[key]) for key in sorted(starts)]
    )


class Reader(Protocol):
    """A consumer that is told what to read."""

    def assign(self, starts: dict[str, int]) -> None:
        """Read these partitions from these offsets."""

    def take(self) -> tuple[Records, set[str]]:
        """What there is, and what went wrong."""

    def close(self) -> None:
        """End it."""


class Librdkafka:
    """One of confluent-kafka."""

    def __init__(self, around: Around, number: int, isolation: Isolation | None = None) -> None:
        settings = {} if isolation is None else {"isolation.level": isolation}
        self._consumer = new_consumer(around.plan.bootstrap, f"assigned-{number}", **settings)

    def assign(self, starts: dict[str, int]) -> None:
        """Read these partitions from these offsets."""
        assign(self._consumer, starts)

    def take(self) -> tuple[Records, set[str]]:
        """What there is."""
        return records_of(self._consumer.consume(POLL_RECORDS_MAX, POLL_S))

    def close(self) -> None:
        """End it."""
        self._consumer.close()


class OwnClient:
    """One of `raftmq_client`."""

    def __init__(self, around: Around, number: int, isolation: Isolation | None = None) -> None:
        self._stop = around.stop
        self._consumer = Consumer(
            around.plan.bootstrap,
            client_id=f"assigned-{number}",
            reset="earliest",
            isolation=isolation,
            max_wait_ms=200,
            metadata_max_age_ms=5_000,
        )

    def assign(self, starts: dict[str, int]) -> None:
        """Read these partitions from these offsets."""
        self._consumer.assign({TopicPartition(*parts_of(key)): starts[key] for key in starts})

    def take(self) -> tuple[Records, set[str]]:
        """What there is."""
        return poll_own(self._consumer, self._stop)

    def close(self) -> None:
        """End it."""
        self._consumer.close()


READERS: Final[tuple[Callable[[Around, int, Isolation | None], Reader], ...]] = (
    Librdkafka,
    OwnClient,
)


class Pollers(Crowd):
    """Consumers that read whole partitions, and now and then begin anew."""

    def __init__(self, around: Around) -> None:
        super().__init__(around, "poll", len(READERS))

    def _run(self, number: int) -> None:
        around, recorder = self._around, self._around.recorder
        process = around.process()
        rng = random.Random(around.plan.seed * 77 + number)
        reader = READERS[number](around, number, None)
        keys = around.plan.keys
        reached: dict[str, int] = {}
        try:
            while not around.stop.is_set():
                chosen = sorted(rng.sample(keys, max(1, len(keys) * 2 // 3)))
                starts = {key: reached.get(key, 0) for key in chosen}
                invoked = recorder.invoke(process, "assign", offsets=starts)
                reader.assign(starts)
                recorder.ok(invoked, offsets=starts)
                until = time.monotonic() + rng.uniform(*REASSIGN_S)
                while time.monotonic() < until and not around.stop.is_set():
                    invoked = recorder.invoke(process, "poll")
                    found, errors = reader.take()
                    around.polled_records += sum(map(len, found.values()))
                    recorder.ok(invoked, records=found, error="; ".join(sorted(errors)))
                    reached.update({key: rows[-1][0] + 1 for key, rows in found.items()})
        finally:
            reader.close()


def read_to_end(around: Around, timeout_s: float) -> bool:
    """Read every partition from its start to its high watermark; False when it took too long."""
    process = around.process()
    settings = {"enable.partition.eof": True, "fetch.wait.max.ms": 50}
    consumer = new_consumer(around.plan.bootstrap, "final", **settings)
    deadline = time.monotonic() + timeout_s
    missing = set(around.plan.keys)
    starts = dict.fromkeys(around.plan.keys, 0)
    try:
        invoked = around.recorder.invoke(process, "assign", offsets=starts)
        assign(consumer, starts)
        around.recorder.ok(invoked, offsets=starts)
        while missing and time.monotonic() < deadline:
            invoked = around.recorder.invoke(process, "poll")
            messages = consumer.consume(POLL_RECORDS_MAX, POLL_S)
            found, errors = records_of(messages)
            around.polled_records += sum(map(len, found.values()))
            around.recorder.ok(invoked, records=found, error="; ".join(sorted(errors)))
            missing -= set(ends_in(messages))
        return not missing
    finally:
        consumer.close()
