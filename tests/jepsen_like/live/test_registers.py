"""What clients of committed offsets do when an answer is lost: they commit once more, and tell."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("confluent_kafka")

from jepsen_like.checkers import check_events
from jepsen_like.checkers.verdict import Validity
from jepsen_like.history_events import Event, Recorder
from jepsen_like.live.workloads import members
from jepsen_like.live.workloads.base import Around, HungError, Plan
from jepsen_like.live.workloads.group import commit, committed
from jepsen_like.live.workloads.members import SENT_MANY, Librdkafka, group_consumer
from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey, Struct
from tests.client.fake_broker import FakeBroker

KEY = "log-0"
COORDINATOR_NOT_AVAILABLE = ErrorCode.COORDINATOR_NOT_AVAILABLE
LIBRDKAFKA, OWN = 0, 2
"""Numbers of clients of either library."""


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    with FakeBroker({"log": 1}) as broker:
        yield broker


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def around(broker: FakeBroker, events: list[Event]) -> Around:
    plan = Plan(broker.address, {"log": 1}, ("registers",), 1.0, 1)
    return Around(plan, Recorder(events.append, time.monotonic_ns, threading.Lock()))


@pytest.mark.parametrize("number", [LIBRDKAFKA, OWN])
def test_counts_what_it_sends(broker: FakeBroker, around: Around, number: int) -> None:
    client = group_consumer(around, number, "g", "register", is_member=False)
    try:
        for offset, lost in enumerate((0, 1, 0, 2)):
            before = broker.count(ApiKey.OFFSET_COMMIT)
            for _ in range(lost):
                broker.fault(ApiKey.OFFSET_COMMIT, "drop after")
            client.commit({KEY: offset})
            assert client.sent == broker.count(ApiKey.OFFSET_COMMIT) - before == lost + 1
    finally:
        client.close()
    taken = [offsets["log", 0] for _, offsets in broker.commits]
    assert taken == [0, 1, 1, 2, 3, 3, 3], "each of them was a commit"


@pytest.mark.parametrize("number", [LIBRDKAFKA, OWN])
def test_a_commit_taken_twice_is_in_order_where_it_was_sent_twice(
    broker: FakeBroker,
    around: Around,
    events: list[Event],
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_find = threading.Event()
    find = broker._on_find_coordinator

    def find_later(version: int, body: memoryview, code: ErrorCode) -> Struct:
        """Who lost a connection asks for its coordinator before it sends anything again."""
        return find(version, body, code if may_find.is_set() else COORDINATOR_NOT_AVAILABLE)

    one = group_consumer(around, number, "g", "register-1", is_member=False)
    other = group_consumer(around, OWN, "g", "register-2", is_member=False)
    try:
        for process, client in enumerate((one, other)):
            assert committed(around, process, client, "g", [KEY]) == {KEY: -1}
        commit(around, 2, other, "g", {KEY: 280}, -1)
        monkeypatch.setattr(broker, "_on_find_coordinator", find_later)
        lost = broker.fault(ApiKey.OFFSET_COMMIT, "drop after")
        again = threading.Thread(target=commit, args=(around, 1, one, "g", {KEY: 281}, -1))
        again.start()
        assert lost.was_met.wait(20)
        assert committed(around, 2, other, "g", [KEY]) == {KEY: 281}
        assert commit(around, 2, other, "g", {KEY: 283}, -1)
        may_find.set()
        again.join(20)
        assert committed(around, 2, other, "g", [KEY]) == {KEY: 281}
    finally:
        one.close()
        other.close()
    assert [offsets["log", 0] for _, offsets in broker.commits] == [280, 281, 283, 281]
    assert check_events(events)["linear-committed"].validity is Validity.VALID
    for event in events:
        event.sent = 1
    assert check_events(events)["linear-committed"].validity is Validity.INVALID


class Consumer:
    """One of confluent-kafka that does not come back from a commit."""

    def __init__(self, forever: threading.Event) -> None:
        self._forever = forever

    def commit(self, **_: Any) -> None:
        self._forever.wait()


def test_one_that_hangs_may_go_on_sending(
    around: Around, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    forever = threading.Event()
    monkeypatch.setattr(members, "new_consumer", lambda *_, **__: Consumer(forever))
    monkeypatch.setattr(members, "HANG_S", 0.01)
    client = Librdkafka(around, "g", "register-1", is_member=False)
    with pytest.raises(HungError):
        commit(around, 1, client, "g", {KEY: 5}, -1)
    forever.set()
    assert (events[-1].type, events[-1].sent) == ("info", SENT_MANY)
