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


class Canary:
    """An idempotent producer, one record at a time, and the reckoning of what it was told."""

    def __init__(self, bootstrap: str, random: Random) -> None:
        self.topic = f"canary-{random.getrandbits(64):x}"
        self.latencies_s: list[float] = []
        self.errors: list[str] = []
        self._bootstrap = bootstrap
        self._acknowledged: dict[int, int] = {}  # number: offset
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="canary")

    def start(self) -> None:
        """Create the topic and begin."""
        with Admin(self._bootstrap) as admin:
            admin.create_topic(self.topic, 1)
        self._thread.start()

    def stop(self) -> None:
        """End; what is on its way is waited for."""
        self._stop.set()
        self._thread.join(2 * ANSWER_S)

    @property
    def acknowledged(self) -> int:
        """Records so far."""
        return len(self._acknowledged)

    def _run(self) -> None:
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
                    self.latencies_s.append(time.monotonic() - began)
                number += 1
                self._stop.wait(PAUSE_S)

    def reckon(self) -> list[str]:
        """What is not as it was acknowledged; empty when all is well."""
        if not self._acknowledged:
            return ["the canary was never acknowledged a record"]
        key = TopicPartition(self.topic, 0)
        found: dict[int, list[int]] = {}
        with Consumer(self._bootstrap) as consumer:
            consumer.assign({key: 0})
            end = max(self._acknowledged.values())
            deadline = time.monotonic() + READ_BACK_S
            while (consumer.position(key) or 0) <= end and time.monotonic() < deadline:
                for record in consumer.poll(0.5):
                    assert record.value is not None
                    found.setdefault(int(record.value), []).append(record.offset)
        wrong = [
            f"record {number} acknowledged at {offset}, read at {found.get(number, [])}"
            for number, offset in self._acknowledged.items()
            if found.get(number) != [offset]
        ]
        return wrong[:10]
