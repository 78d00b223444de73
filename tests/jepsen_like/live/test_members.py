"""Clients of groups that never come back from a call: told of, left behind, replaced."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import confluent_kafka
import pytest

from jepsen_like.history_events import Event, Recorder
from jepsen_like.live.workloads import group, members
from jepsen_like.live.workloads.base import Around, HungError, Plan, UnansweredError, unless_hung
from jepsen_like.live.workloads.group import GroupMembers
from jepsen_like.live.workloads.members import Handed, Librdkafka


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def around(events: list[Event]) -> Around:
    plan = Plan("nowhere", {"log": 1}, ("group",), 1.0, 1)
    return Around(plan, Recorder(events.append, lambda: 0))


@pytest.fixture
def forever() -> Iterator[threading.Event]:
    """What a call waits for until the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_a_call_that_comes_back_gives_what_it_gave(around: Around) -> None:
    assert unless_hung(around, "it", 60, lambda: 7) == 7

    def fail() -> None:
        raise KeyError("as it was")

    with pytest.raises(KeyError, match="as it was"):
        unless_hung(around, "it", 60, fail)
    assert around.hung == []


def test_a_call_that_does_not_is_told_of(around: Around, forever: threading.Event) -> None:
    with pytest.raises(HungError):
        unless_hung(around, "it", 0.01, forever.wait)
    assert around.hung == ["it hangs, 0.01 s after it was called"]


class Consumer:
    """One of confluent-kafka that does not come back from a commit."""

    def __init__(self, forever: threading.Event) -> None:
        self._forever = forever
        self.is_closed = False

    def commit(self, **_: Any) -> None:
        self._forever.wait()
        raise confluent_kafka.KafkaException("too late")

    def close(self) -> None:
        self.is_closed = True


def test_one_that_hangs_in_a_commit_is_left_as_it_is(
    around: Around,
    events: list[Event],
    forever: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Consumer(forever)
    monkeypatch.setattr(members, "new_consumer", lambda *_, **__: made)
    monkeypatch.setattr(members, "HANG_S", 0.01)
    client = Librdkafka(around, "g", "member-1")
    with pytest.raises(HungError):
        group.commit(around, 1, client, "g", {"log-0": 5}, -1)
    assert [event.type for event in events] == ["invoke", "info"], "nobody knows what came of it"
    assert events[-1].sent == 1, "of a member nobody counts"
    client.close()
    assert not made.is_closed, "that would hang, too"
    assert around.hung == ["commit of member-1 hangs, 0.01 s after it was called"]
    forever.set()
    other = Librdkafka(around, "g", "member-2")
    with pytest.raises(UnansweredError, match="too late"):
        other.commit({"log-0": 5})
    other.close()
    assert made.is_closed


class Member:
    """A member that is given a partition at once, and hangs in its first commit."""

    def __init__(self, around: Around) -> None:
        self._around = around
        self._given: Handed | None = None
        self.sent = 1
        self.is_closed = False

    def generation(self) -> int:
        return 1

    def committed(self, keys: list[str]) -> dict[str, int]:
        return dict.fromkeys(keys, 0)

    def commit(self, _offsets: dict[str, int]) -> None:
        raise HungError("the client hangs")

    def subscribe(self, _topics: list[str], given: Handed, _taken: Handed) -> None:
        self._given = given

    def start(self, _positions: dict[str, int] | None, _keys: list[str]) -> None:
        pass

    def take(self) -> tuple[dict[str, list[tuple[int, int | str]]], set[str]]:
        if self._given is not None:
            self._given(["log-0"])
            self._given = None
        return {}, set()

    def close(self) -> None:
        self.is_closed = True


def test_another_member_takes_the_place_of_one_that_hangs(
    around: Around, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Member] = []

    def make(*_: Any) -> Member:
        made.append(Member(around))
        if len(made) == 2:
            around.stop.set()
        return made[-1]

    monkeypatch.setattr(group, "group_consumer", make)
    around.stop.wait = lambda timeout=None: around.stop.is_set()  # type: ignore[method-assign]
    GroupMembers(around)._run(0)
    assert len(made) == 2
    assert all(member.is_closed for member in made)
    ended = {event.process for event in events if event.f == "crash"}
    assert ended == {1, 2}, "each in a life of its own"
