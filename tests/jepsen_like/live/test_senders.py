"""How many records the producers of live runs have under way."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest

from jepsen_like.history_events import Recorder
from jepsen_like.live.workloads.base import Around, Plan

pytest.importorskip("confluent_kafka")

from jepsen_like.live.workloads import senders as module
from jepsen_like.live.workloads.senders import LIBRDKAFKA, WINDOWS, Librdkafka


class FakeMessage:
    """What a delivery tells."""

    def offset(self) -> int:
        return 7


class FakeProducer:
    """Takes records, and delivers the oldest when the test says so."""

    def __init__(self, _settings: dict[str, Any], logger: object) -> None:
        del logger
        self.taken: deque[tuple[int, Callable[[None, FakeMessage], None]]] = deque()
        self.may_deliver = threading.Semaphore(0)

    def produce(self, _topic: str, _data: bytes, _key: None, **given: Any) -> None:
        self.taken.append((given["partition"], given["on_delivery"]))

    def poll(self, _seconds: float) -> None:
        if self.may_deliver.acquire(timeout=0.01):
            _, on_delivery = self.taken.popleft()
            on_delivery(None, FakeMessage())

    def count(self) -> Counter[int]:
        """What is under way, by partition."""
        return Counter(partition for partition, _ in self.taken)


@pytest.fixture
def around() -> Around:
    plan = Plan("nowhere:1", {"t": 2}, ("append",), 1.0, 1)
    return Around(plan, Recorder(lambda _event: None, time.monotonic_ns, threading.Lock()))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("number", range(len(LIBRDKAFKA)))
def test_what_is_under_way_of_a_partition_has_room(
    around: Around, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(module.confluent_kafka, "Producer", FakeProducer)
    monkeypatch.setattr(module, "ROOM_S", 0.01)
    sender = Librdkafka(around, number)
    producer: Any = sender._producer
    settled: list[tuple[int, str]] = []

    def send(count: int) -> None:
        for _ in range(count):
            sender.send("t", 0, b"1", lambda *told: settled.append(told))

    thread = threading.Thread(target=send, args=(12,))
    thread.start()
    try:
        if number not in WINDOWS:
            until(lambda: producer.count() == {0: 12})
            return
        window = WINDOWS[number]
        until(lambda: producer.count() == {0: window})
        sender.send("t", 1, b"1", lambda *_told: None)
        assert producer.count() == {0: window, 1: 1}, "another partition has room of its own"
        producer.may_deliver.release(3)
        until(lambda: len(settled) == 3 and producer.count()[0] == window)
        assert settled == [(7, "")] * 3
        around.is_over.set()
        until(lambda: producer.count()[0] == 12 - 3)
    finally:
        around.is_over.set()
        thread.join(10)
        sender.close()
    assert not thread.is_alive()
