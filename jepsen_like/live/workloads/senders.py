"""The producers of a run: librdkafka's in several settings, and our own client's.

All are idempotent and never give a record up. Each says of every record, once, where it stands or
what error it met.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, Protocol

import confluent_kafka

from jepsen_like.history_events import OFFSET_UNKNOWN
from jepsen_like.live.workloads.base import FAST_RETRIES, Around, Headers
from raftmq_client.blocking import Producer
from raftmq_client.core.accumulator import Receipt
from raftmq_client.errors import BufferFullError

LIBRDKAFKA: Final[tuple[dict[str, Any], ...]] = (
    {"linger.ms": 2},
    {"linger.ms": 0, "batch.num.messages": 3},  # many requests in flight
    {"linger.ms": 5, "compression.type": "lz4"},
)
WINDOWS: Final = {1: 5}
"""So many records of a partition may be under way, by number of the producer: as many as librdkafka
lets an idempotent one have in flight. Whatever waits behind them has the thread of its broker poll
without a pause until they are answered, where nothing lingers: it took a core of the machine that
nodes run on."""
EPOCHS: Final = {"debug": "eos", "log_level": 7}
"""Makes librdkafka say why it raises a producer's epoch, after which records may stand twice."""
FOR_EVER_MS: Final = 1 << 30
FULL_S: Final = 0.05
ROOM_S: Final = 0.5
"""How soon who waits for room sees that it is over."""
Settled = Callable[[int, str], None]
"""settled(offset, error): `OFFSET_UNKNOWN` if it was not told; "" if there is none."""


class Sender(Protocol):
    """One producer."""

    def send(
        self,
        topic: str,
        partition: int,
        data: bytes,
        settled: Settled,
        headers: Headers = (),
        key: bytes | None = None,
    ) -> None:
        """Take a record; waits for room."""

    def close(self) -> None:
        """End it; what is still under way is not waited for."""


def senders(around: Around) -> list[Sender]:
    """All producers of a run."""
    theirs = [Librdkafka(around, number) for number in range(len(LIBRDKAFKA))]
    return [*theirs, OwnClient(around, len(theirs))]


class Librdkafka:
    """A producer of confluent-kafka, and the thread that calls back for it."""

    def __init__(self, around: Around, number: int) -> None:
        def on_error(error: confluent_kafka.KafkaError) -> None:
            if error.fatal():
                around.fatal.append(f"producer {number}: {error}")

        self._producer = confluent_kafka.Producer(
            {
                **FAST_RETRIES,
                "bootstrap.servers": around.plan.bootstrap,
                "client.id": f"appender-{number}",
                "acks": "all",
                "enable.idempotence": True,
                "max.in.flight.requests.per.connection": 5,
                "message.timeout.ms": 0,
                "request.timeout.ms": 1_000,
                "error_cb": on_error,
                **LIBRDKAFKA[number],
                **EPOCHS,
            },
            logger=_epochs_raised(number),
        )
        self._around = around
        self._window = WINDOWS.get(number)
        self._under_way: Counter[tuple[str, int]] = Counter()
        self._has_room = threading.Condition()
        self._is_done = threading.Event()
        self._poller = threading.Thread(target=self._poll, name=f"appender-{number}")
        self._poller.start()

    def send(
        self,
        topic: str,
        partition: int,
        data: bytes,
        settled: Settled,
        headers: Headers = (),
        key: bytes | None = None,
    ) -> None:
        """Take a record."""

        def delivered(
            error: confluent_kafka.KafkaError | None, message: confluent_kafka.Message
        ) -> None:
            if self._window is not None:
                self._arrived((topic, partition))
            offset = message.offset()
            # None: a repeated request was answered as a duplicate, which tells no offset.
            is_told = error is None and offset is not None
            settled(offset if is_told else OFFSET_UNKNOWN, "" if error is None else str(error))  # type: ignore[arg-type]

        if self._window is not None:
            self._wait_for_room((topic, partition), self._window)
        while True:
            try:
                self._producer.produce(
                    topic,
                    data,
                    key,
                    partition=partition,
                    on_delivery=delivered,
                    headers=list(headers),
                )
            except BufferError:
                time.sleep(FULL_S)  # the poller makes room
            else:
                return

    def _wait_for_room(self, where: tuple[str, int], window: int) -> None:
        """Take a place among what is under way; without waiting once no answers are waited for."""
        with self._has_room:
            while self._under_way[where] >= window and not self._around.is_over.is_set():
                self._has_room.wait(ROOM_S)
            self._under_way[where] += 1

    def _arrived(self, where: tuple[str, int]) -> None:
        with self._has_room:
            self._under_way[where] -= 1
            self._has_room.notify_all()

    def close(self) -> None:
        """End its thread."""
        self._is_done.set()
        self._poller.join()

    def _poll(self) -> None:
        while not self._is_done.is_set():
            self._producer.poll(0.1)


def tells_of(settled: Settled) -> Callable[[Receipt], None]:
    """Tells `settled` of a record what its receipt of `raftmq_client` says."""

    def delivered(receipt: Receipt) -> None:
        place, error = receipt.place, receipt.error
        is_told = error is None and place is not None and place.offset >= 0
        settled(
            place.offset if is_told and place is not None else OFFSET_UNKNOWN,
            "" if error is None else str(error),
        )

    return delivered


class OwnClient:
    """A producer of `raftmq_client`."""

    def __init__(self, around: Around, number: int) -> None:
        self._producer = Producer(
            around.plan.bootstrap,
            client_id=f"appender-{number}",
            linger_ms=2,
            request_timeout_ms=1_000,
            delivery_timeout_ms=FOR_EVER_MS,
            metadata_max_age_ms=5_000,
        )

    def send(
        self,
        topic: str,
        partition: int,
        data: bytes,
        settled: Settled,
        headers: Headers = (),
        key: bytes | None = None,
    ) -> None:
        """Take a record."""

        delivered = tells_of(settled)
        while True:
            try:
                self._producer.send(
                    topic, data, key, headers, partition=partition, on_delivery=delivered
                )
            except BufferFullError:
                time.sleep(FULL_S)
            else:
                return

    def close(self) -> None:
        """Hang up."""
        self._producer.close(flush=False)


def _epochs_raised(number: int) -> logging.Logger:
    """Writes to the load's own log when and why a producer begins a new epoch, and nothing else."""
    logger = logging.Logger(f"appender-{number}", logging.DEBUG)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
    handler.addFilter(lambda record: "epoch bump" in record.getMessage())
    logger.addHandler(handler)
    return logger
