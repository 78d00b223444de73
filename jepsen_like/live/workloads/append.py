"""Append: idempotent producers under any faults.

Each process appends to one partition, an operation of several records at a time, and begins the
next when the outcome of all is known. librdkafka never gives a record up: from then on it may send
what was under way twice (`message.timeout.ms`). Values are numbers, unique in a run.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
from typing import Any, Final

import confluent_kafka
from attrs import define, field

from jepsen_like.history_events import OFFSET_UNKNOWN, Value
from jepsen_like.live.workloads.base import FAST_RETRIES, Around, join_all, parts_of

OPERATION_RECORDS_MAX: Final = 64
BACKLOG_S: Final = 20.0
"""What a stalled process makes up for afterwards."""
PRODUCERS: Final[tuple[dict[str, Any], ...]] = (
    {"linger.ms": 2},
    {"linger.ms": 0, "batch.num.messages": 3},  # many requests in flight
    {"linger.ms": 5, "compression.type": "lz4"},
)
EPOCHS: Final = {"debug": "eos", "log_level": 7}
"""Makes librdkafka say why it raises a producer's epoch, after which records may stand twice."""
PROCESSES_MAX: Final = 256
PAUSE_S: Final = (0.05, 0.15)
TWO_WRITERS: Final = 2
"""So many partitions are written by two processes."""


def _epochs_raised(number: int) -> logging.Logger:
    """Writes to the load's own log when and why a producer begins a new epoch, and nothing else."""
    logger = logging.Logger(f"appender-{number}", logging.DEBUG)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
    handler.addFilter(lambda record: "epoch bump" in record.getMessage())
    logger.addHandler(handler)
    return logger


@define(eq=False)
class _Sending:
    """An operation under way."""

    values: list[int]
    offsets: dict[int, int] = field(factory=dict)
    errors: set[str] = field(factory=set)
    done: threading.Event = field(factory=threading.Event)

    def settle(self, value: int, offset: int, error: str) -> None:
        """Note the outcome of one record."""
        self.offsets[value] = offset
        if error:
            self.errors.add(error)
        if len(self.offsets) == len(self.values):
            self.done.set()

    @property
    def records(self) -> list[tuple[int, Value]]:
        """What is known of each record."""
        return [(self.offsets.get(value, OFFSET_UNKNOWN), value) for value in self.values]


class Appenders:
    """All appending processes and their producers."""

    def __init__(self, around: Around) -> None:
        self._around = around
        self._is_done = threading.Event()
        self._producers = [self._new_producer(i) for i in range(len(PRODUCERS))]
        keys = around.plan.keys
        keys += keys[:TWO_WRITERS]
        rate = around.plan.rate / len(keys)
        self._threads = [
            threading.Thread(target=self._run, args=(i, key, rate), name=f"append-{i}")
            for i, key in enumerate(keys)
        ]
        self._pollers = [
            threading.Thread(target=self._poll, args=(producer,)) for producer in self._producers
        ]

    def start(self) -> None:
        """Begin."""
        for thread in [*self._pollers, *self._threads]:
            thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait until every record's outcome is known."""
        is_done = join_all(self._threads, timeout_s)
        self._is_done.set()
        return join_all(self._pollers, 10) and is_done

    def _new_producer(self, number: int) -> confluent_kafka.Producer:
        def on_error(error: confluent_kafka.KafkaError) -> None:
            if error.fatal():
                self._around.fatal.append(f"producer {number}: {error}")

        return confluent_kafka.Producer(
            {
                **FAST_RETRIES,
                "bootstrap.servers": self._around.plan.bootstrap,
                "client.id": f"appender-{number}",
                "acks": "all",
                "enable.idempotence": True,
                "max.in.flight.requests.per.connection": 5,
                "message.timeout.ms": 0,
                "request.timeout.ms": 1_000,
                "error_cb": on_error,
                **PRODUCERS[number],
                **EPOCHS,
            },
            logger=_epochs_raised(number),
        )

    def _poll(self, producer: confluent_kafka.Producer) -> None:
        while not self._is_done.is_set():
            producer.poll(0.1)

    def _run(self, number: int, key: str, rate: float) -> None:
        around = self._around
        process = around.process()
        producer = self._producers[number % len(self._producers)]
        rng = random.Random(around.plan.seed * 1000 + number)
        count, began = 0, time.monotonic()
        while not around.stop.wait(rng.uniform(*PAUSE_S)):
            now = time.monotonic()
            began = max(began, now - BACKLOG_S - count / rate)
            due = min(OPERATION_RECORDS_MAX, int((now - began) * rate) - count)
            if due > 0:
                values = [(count + i) * PROCESSES_MAX + number for i in range(due)]
                count += due
                self._append(process, producer, key, _Sending(values))

    def _append(
        self, process: int, producer: confluent_kafka.Producer, key: str, sending: _Sending
    ) -> None:
        around = self._around
        topic, partition = parts_of(key)

        def delivered(
            error: confluent_kafka.KafkaError | None, message: confluent_kafka.Message
        ) -> None:
            data, offset = message.value(), message.offset()
            assert isinstance(data, bytes)
            if error is None:
                # None: a repeated request was answered as a duplicate, which tells no offset.
                sending.settle(number_in(data), OFFSET_UNKNOWN if offset is None else offset, "")
            else:
                sending.settle(number_in(data), OFFSET_UNKNOWN, str(error))

        invoked = around.recorder.invoke(process, "append", records={key: sending.records})
        padding = b"." * around.plan.size
        for value in sending.values:
            data = (b"%d " % value + padding)[: around.plan.size]
            while True:
                try:
                    producer.produce(topic, data, partition=partition, on_delivery=delivered)
                except BufferError:
                    time.sleep(0.05)  # the poller makes room
                else:
                    break
        while not sending.done.wait(1.0):
            if around.is_over.is_set():
                around.recorder.info(
                    invoked, records={key: sending.records}, error="no answer to the end"
                )
                return
        if sending.errors:
            error = "; ".join(sorted(sending.errors))
            around.refused.add(f"{key}: {error}")
            around.recorder.info(invoked, records={key: sending.records}, error=error)
        else:
            around.acked_records += len(sending.values)
            around.recorder.ok(invoked, records={key: sending.records})


def number_in(data: bytes) -> int:
    """The number that a record carries."""
    return int(data.split(b" ", 1)[0])
