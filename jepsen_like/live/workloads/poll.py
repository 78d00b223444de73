"""Poll with assign: consumers that give themselves their partitions, and read on whatever breaks.

Each reads some partitions from their start or from where it was, and now and then begins anew with
others. `read_to_end` is the last word of a run: everything that every partition holds.
"""

from __future__ import annotations

import random
import time
from typing import Any, Final

import confluent_kafka

from jepsen_like.history_events import Event, Value
from jepsen_like.live.workloads.append import number_in
from jepsen_like.live.workloads.base import FAST_RETRIES, Around, Crowd, key_of, parts_of

CONSUMERS: Final = 2
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


def poll(
    around: Around, process: int, consumer: confluent_kafka.Consumer, **more: Any
) -> list[confluent_kafka.Message]:
    """One poll, noted; what it returned."""
    invoked = around.recorder.invoke(process, "poll", **more)
    messages = consumer.consume(POLL_RECORDS_MAX, POLL_S)
    found, errors = records_of(messages)
    around.polled_records += sum(map(len, found.values()))
    around.recorder.ok(invoked, records=found, error="; ".join(sorted(errors)), **more)
    return messages


def assign(
    around: Around, process: int, consumer: confluent_kafka.Consumer, starts: dict[str, int]
) -> Event:
    """Give a consumer these partitions, to be read from these offsets."""
    invoked = around.recorder.invoke(process, "assign", offsets=starts)
    consumer.assign(
        [confluent_kafka.TopicPartition(*parts_of(key), starts[key]) for key in sorted(starts)]
    )
    around.recorder.ok(invoked, offsets=starts)
    return invoked


class Pollers(Crowd):
    """Consumers that read whole partitions, and now and then begin anew."""

    def __init__(self, around: Around) -> None:
        super().__init__(around, "poll", CONSUMERS)

    def _run(self, number: int) -> None:
        around = self._around
        process = around.process()
        rng = random.Random(around.plan.seed * 77 + number)
        consumer = new_consumer(around.plan.bootstrap, f"assigned-{number}")
        keys = around.plan.keys
        reached: dict[str, int] = {}
        try:
            while not around.stop.is_set():
                chosen = sorted(rng.sample(keys, max(1, len(keys) * 2 // 3)))
                assign(around, process, consumer, {key: reached.get(key, 0) for key in chosen})
                until = time.monotonic() + rng.uniform(*REASSIGN_S)
                while time.monotonic() < until and not around.stop.is_set():
                    for message in poll(around, process, consumer):
                        offset = message.offset()
                        if message.error() is None and offset is not None:
                            key = key_of(message.topic(), message.partition())
                            reached[key] = offset + 1
        finally:
            consumer.close()


def read_to_end(around: Around, timeout_s: float) -> bool:
    """Read every partition from its start to its high watermark; False when it took too long."""
    process = around.process()
    settings = {"enable.partition.eof": True, "fetch.wait.max.ms": 50}
    consumer = new_consumer(around.plan.bootstrap, "final", **settings)
    deadline = time.monotonic() + timeout_s
    missing = set(around.plan.keys)
    try:
        assign(around, process, consumer, dict.fromkeys(around.plan.keys, 0))
        while missing and time.monotonic() < deadline:
            messages = poll(around, process, consumer)
            missing -= {key_of(m.topic(), m.partition()) for m in messages if is_end(m)}
        return not missing
    finally:
        consumer.close()
