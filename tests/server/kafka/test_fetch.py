"""The states of a fetch that waits: the ways it takes, and what comes too late for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from raftmq.errors import ErrorCode
from raftmq.server.kafka.handlers.fetch import NEXT, FetchState, ParkedFetch
from tests.server.kafka.test_produce_fetch import batch, filled
from tests.server.kafka.world import World

LOOKING, PARKED = FetchState.LOOKING, FetchState.PARKED
CONFIRMING, ANSWERED = FetchState.CONFIRMING, FetchState.ANSWERED


def hang_up(world: World) -> None:
    (abandon,) = world.connection.on_close.values()
    abandon()


def move(world: World) -> None:
    world.produce(9, [("t", 0, batch())], acks=1)
    world.replica("t").commit(4)


def depose(world: World) -> None:
    """To nobody yet: who leads is to be learned."""
    world.replica("t").follow(None)


def lead_elsewhere(world: World) -> None:
    topic = world.broker.image.topics["t"]
    world.lead(topic.topic_id, 0, 3, 6)


def wait(world: World) -> None:
    world.bench.sleep(500)


WAYS: Final[list[tuple[list[Callable[[World], None]], list[FetchState]]]] = [
    ([wait], [PARKED, LOOKING, ANSWERED]),
    ([move], [PARKED, LOOKING, ANSWERED]),
    ([hang_up], [PARKED, ANSWERED]),
    ([depose, lead_elsewhere], [PARKED, LOOKING, CONFIRMING, ANSWERED]),
    ([depose, wait, wait], [PARKED, LOOKING, CONFIRMING, ANSWERED]),
    ([depose, hang_up], [PARKED, LOOKING, CONFIRMING, ANSWERED]),
    ([depose, move, lead_elsewhere], [PARKED, LOOKING, CONFIRMING, ANSWERED]),
]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[FetchState]:
    """The states that fetches come to."""
    become, states = ParkedFetch._become, list[FetchState]()

    def noted(self: ParkedFetch, state: FetchState) -> None:
        become(self, state)
        states.append(state)

    monkeypatch.setattr(ParkedFetch, "_become", noted)
    return states


@pytest.mark.parametrize(
    ("events", "wanted"), WAYS, ids=["-".join(one.__name__ for one in way) for way, _ in WAYS]
)
def test_each_way(
    events: list[Callable[[World], None]], wanted: list[FetchState], taken: list[FetchState]
) -> None:
    world, _ = filled()
    slot = world.fetch(12, [("t", 0, 3)], max_wait_ms=500)
    assert taken == [PARKED]
    for number, event in enumerate(events):
        assert slot.pieces is None, number
        event(world)
    assert slot.pieces is not None
    assert taken == wanted
    assert world.broker.metrics.parked_fetches == 0
    assert len(world.partition("t").fetches) == 0


def test_no_other_way_can_be_taken() -> None:
    world, _ = filled()
    parked: Any = ParkedFetch(world.broker, None, 1)  # type: ignore[arg-type]
    for before in FetchState:
        for after in set(FetchState) - NEXT[before]:
            parked.state = before
            with pytest.raises(AssertionError, match="a fetch goes from"):
                parked._become(after)


def test_a_wake_that_comes_late_is_harmless(taken: list[FetchState]) -> None:
    """A partition wakes some at once and others soon; by then they may know of another move."""
    world = World()
    topic_id = world.add_topic("t", 2)
    slot = world.fetch(12, [("t", 0, 0), ("t", 1, 0)], max_wait_ms=500, session_epoch=-1)
    (parked,) = world.partition("t", 0).fetches.waiting.values()
    world.registry.remove(world.partition("t", 1))
    world.replica("t", 0).follow(None)
    for state in (CONFIRMING, ANSWERED):
        assert taken[-1] is state
        parked.woken()
        assert taken[-1] is state
        assert (slot.pieces is None) == (state is CONFIRMING)
        world.lead(topic_id, 0, 3, 6)
        world.lead(topic_id, 1, 3, 6)
    (topic,) = world.fetched(12, slot).topics
    assert [row.error_code for row in topic.partitions] == [ErrorCode.NOT_LEADER_OR_FOLLOWER] * 2
    assert world.broker.metrics.bugs == {}
