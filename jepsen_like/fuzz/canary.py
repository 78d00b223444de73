"""An application at work beside the fuzzer: what it was promised must hold however loud it gets."""

from __future__ import annotations

import threading
import time
from random import Random
from typing import Final

from raftmq_client import TopicPartition
from raftmq_client.blocking import Admin, Consumer, Producer
from raftmq_client.errors import ClientError

PAUSE_S: Final = 0.02
ANSWER_S: Final = 30.0
READ_BACK_S: Final = 60.0
COMMIT_MS: Final = 500.0
WRONG_MAX: Final = 10


class Canary:
    """An idempotent producer, one record at a time, a group of one that reads and commits what is
    produced, and the reckoning of what both were told."""

    def __init__(self, bootstrap: str, random: Random) -> None:
        self.topic = f"canary-{random.getrandbits(64):x}"
        self.acknowledgements: list[tuple[float, float]] = []
        """When each record was sent, and how long its acknowledgement took, in seconds."""
        self.errors: list[str] = []
        self._bootstrap = bootstrap
        self._acknowledged: dict[int, int] = {}  # number: offset
        self._heard: list[tuple[int, int]] = []  # number, offset, as the group read them
        self._stop = threading.Event()
        self._is_sent = threading.Event()
        self._threads = [
            threading.Thread(target=self._send, name="canary"),
            threading.Thread(target=self._listen, name="canary's group"),
        ]

    def start(self) -> None:
        """Create the topic and begin."""
        with Admin(self._bootstrap) as admin:
            admin.create_topic(self.topic, 1)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End; what is on its way is waited for."""
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * ANSWER_S)

    @property
    def acknowledged(self) -> int:
        """Records so far."""
        return len(self._acknowledged)

    @property
    def heard(self) -> int:
        """Records that the group has read so far."""
        return len(self._heard)

    @property
    def latencies_s(self) -> list[float]:
        """Of all acknowledgements so far."""
        return [latency for _, latency in self.acknowledgements]

    def _send(self) -> None:
        try:
            self._send_until_stopped()
        finally:
            self._is_sent.set()

    def _send_until_stopped(self) -> None:
        number = 0
        with Producer(self._bootstrap, linger_ms=0) as producer:
            while not self._stop.is_set():
                began = time.monotonic()
                try:
                    place = producer.send(self.topic, b"%d" % number).result(ANSWER_S)
                except (ClientError, TimeoutError) as error:
                    self.errors.append(f"record {number}: {error}")
                else:
                    self._acknowledged[number] = place.offset
                    self.acknowledgements.append((began, time.monotonic() - began))
                number += 1
                self._stop.wait(PAUSE_S)

    def _listen(self) -> None:
        try:
            with Consumer(
                self._bootstrap,
                topics=[self.topic],
                group=self.topic,
                reset="earliest",
                auto_commit_ms=COMMIT_MS,
                on_lost=lambda *_: self.errors.append("the group lost its partition"),
            ) as consumer:
                deadline = None
                while deadline is None or time.monotonic() < deadline:
                    for record in consumer.poll(0.5):
                        assert record.value is not None
                        self._heard.append((int(record.value), record.offset))
                    if self._is_sent.is_set():
                        deadline = deadline or time.monotonic() + ANSWER_S
                        if not self._unheard():
                            break
                if self._unheard():
                    with Admin(self._bootstrap) as admin:
                        told = admin.describe_group(self.topic)
                    self.errors.append(f"the group reads no further: {told}")
        except ClientError as error:
            self.errors.append(f"the group: {error}")

    def _unheard(self) -> set[int]:
        return self._acknowledged.keys() - {number for number, _ in self._heard}

    def reckon(self) -> list[str]:
        """What is not as it was acknowledged; empty when all is well."""
        if not self._acknowledged:
            return ["the canary was never acknowledged a record"]
        found: dict[int, list[int]] = {}
        for number, offset in self._read_back():
            found.setdefault(number, []).append(offset)
        wrong = [
            f"record {number} acknowledged at {offset}, read at {found.get(number, [])}"
            for number, offset in self._acknowledged.items()
            if found.get(number) != [offset]
        ]
        if unheard := self._unheard():
            told = f"{len(unheard)} records from {min(unheard)} on; it read {len(self._heard)}"
            wrong.append(f"the group never read {told}")
        offsets = [offset for _, offset in self._heard]
        if offsets != list(range(len(offsets))):
            wrong.append("the group did not read each record once, in order")
        return wrong[:WRONG_MAX]

    def _read_back(self) -> list[tuple[int, int]]:
        """Number and offset of each record, up to the last acknowledged one."""
        key = TopicPartition(self.topic, 0)
        found: list[tuple[int, int]] = []
        with Consumer(self._bootstrap) as consumer:
            consumer.assign({key: 0})
            end = max(self._acknowledged.values())
            deadline = time.monotonic() + READ_BACK_S
            while (consumer.position(key) or 0) <= end and time.monotonic() < deadline:
                for record in consumer.poll(0.5):
                    assert record.value is not None
                    found.append((int(record.value), record.offset))
        return found
