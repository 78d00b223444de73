"""A group of stock consumers that reads while the cluster changes, and what it was told meanwhile.

Members commit what they have read, as librdkafka does by itself, every second. A record that is
read twice was read once before a rebalance and once after it, or something is wrong.
"""

from __future__ import annotations

import threading
from collections import Counter
from types import TracebackType
from typing import Any

from confluent_kafka import Consumer, KafkaError
from confluent_kafka import TopicPartition as Place

from raftmq.errors import RETRIABLE
from tests.live.harness import wait_until
from tests.second_try import PromiseBrokenError

OF_REBALANCES = (
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.REBALANCE_IN_PROGRESS,
)
"""What a commit may meet: the group has new members, and the next one of them commits."""
Record = tuple[int, int]
"""Partition and offset."""


class Members:
    """So many members of one group, each in a thread."""

    def __init__(self, bootstrap: str, group: str, topic: str, count: int, **settings: Any) -> None:
        self.read: dict[Record, bytes] = {}
        self.twice: list[Record] = []
        self.assignments = 0
        """How often a member was given partitions."""
        self.errors: Counter[str] = Counter()
        """Everything that clients were told, by name."""
        self.failures: list[str] = []
        """What no client gets over by itself."""
        self._topic = topic
        self._settings = {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "auto.commit.interval.ms": 1000,
            "reconnect.backoff.max.ms": 500,
            "error_cb": self._told,
            "on_commit": self._committed,
            **settings,
        }
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]

    def __enter__(self) -> Members:
        for thread in self._threads:
            thread.start()
        wait_until(lambda: self.assignments >= len(self._threads), 60, "members have partitions")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def start_at(self, offsets: dict[int, int]) -> None:
        """Have a group that nobody has joined yet begin at these offsets."""
        consumer = Consumer(self._settings)
        try:
            places = [Place(self._topic, *at) for at in offsets.items()]
            consumer.commit(offsets=places, asynchronous=False)
        finally:
            consumer.close()

    def check(self) -> None:
        """Raise what decides: records twice, and errors that applications would have to handle."""
        if self.failures:
            raise PromiseBrokenError(f"the members were told {self.failures[:5]}")
        if self.twice:
            told = f"{len(self.twice)} records were read twice: {self.twice[:5]}"
            raise PromiseBrokenError(f"{told}, in {self.assignments} assignments")

    def _run(self) -> None:
        consumer = Consumer(self._settings)
        consumer.subscribe([self._topic], on_assign=self._assigned)
        try:
            while not self._is_over.is_set():
                messages = consumer.consume(1000, 0.2)
                with self._lock:
                    for message in messages:
                        self._take(message)
        finally:
            consumer.close()

    def _take(self, message: Any) -> None:
        if message.error() is not None:
            self._judge(message.error())
            return
        record = (message.partition(), message.offset())
        if record in self.read:
            self.twice.append(record)
        self.read[record] = message.value()

    def _assigned(self, _consumer: Consumer, places: list[Place]) -> None:
        self.assignments += bool(places)

    def _told(self, error: KafkaError) -> None:
        self._judge(error)

    def _committed(self, error: KafkaError | None, places: list[Place]) -> None:
        for found in (error, *(place.error for place in places)):
            if found is not None and found.code() not in OF_REBALANCES:
                self._judge(found)

    def _judge(self, error: KafkaError) -> None:
        """Connections (negative codes) come and go; a broker's answer is to be one to try again."""
        self.errors[error.name()] += 1
        if error.fatal() or (error.code() > 0 and error.code() not in RETRIABLE):
            self.failures.append(str(error))
