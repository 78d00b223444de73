"""Polls that find nothing: repeated in the same words, they are known again, and never stale."""

from __future__ import annotations

from typing import Any

import pytest

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from raftmq.protocol.fetch import FetchPartition, FetchRequest, FetchTopic, encode_fetch_request
from raftmq.types import LeaderEpoch
from tests.server.test_produce_fetch import batch, fetched, filled
from tests.server.world import FakeSlot, World


def polled(world: World, *, current_epoch: int = -1, **changes: Any) -> FakeSlot:
    """A poll without a session, at the end of the log of `filled`."""
    part = FetchPartition(0, fetch_offset=3, current_leader_epoch=current_epoch)
    fields: dict[str, Any] = {"max_wait_ms": 500, "session_epoch": -1, **changes}
    request = FetchRequest(topics=[FetchTopic("t", None, [part])], **fields)
    return world.begin(ApiKey.FETCH, 12, encode_fetch_request(12, request))


def looks(world: World, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes each look at the partition from now on."""
    seen: list[int] = []
    partition = world.partition("t")
    read = partition.read

    def counted(offset: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(offset)
        return read(offset, *args, **kwargs)

    monkeypatch.setattr(partition, "read", counted)
    return seen


def test_a_poll_in_the_same_words_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world, _ = filled()
    seen = looks(world, monkeypatch)
    answers = []
    for _ in range(3):
        slot = polled(world)
        assert slot.pieces is None
        world.bench.sleep(521)
        answers.append(bytes(world.body(ApiKey.FETCH, 12, slot)))
    assert seen == [3], "the first time only"
    assert answers[0] == answers[1] == answers[2]
    assert world.broker.metrics.api("fetch").requests == 3
    assert world.broker.metrics.parked_fetches == 0
    assert not world.connection.on_close


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("what", ["records", "log start", "epoch", "leader", "closed", "removed"])
def test_a_poll_in_the_same_words_learns_what_changed(what: str, when: str) -> None:
    """The same answers as for a client that asks for the first time."""
    world, _ = filled()
    polled(world, current_epoch=5)
    world.bench.sleep(521)
    assert world.connection.fetch_memo.reading is not None

    def change() -> None:
        partition, replica = world.partition("t"), world.replica("t")
        if what == "records":
            world.produce(9, [("t", 0, batch())], acks=1)
            replica.commit(4)
        elif what == "log start":
            replica.start_at(3)
        elif what == "epoch":
            replica.leader_epoch = LeaderEpoch(6)
        elif what == "leader":
            replica.follow(None)
        else:
            if what == "removed":
                world.broker.partitions.remove(partition)
            partition.close()

    if when == "before":
        change()
    slot = polled(world, current_epoch=5)
    if when == "during":
        change()
    world.bench.sleep(2000)
    answer = fetched(world, 12, slot)
    world.connection.fetch_memo = None
    afresh = polled(world, current_epoch=5)
    world.bench.sleep(2000)
    assert answer == fetched(world, 12, afresh)
    if what == "records":
        assert answer.records
    elif what != "log start":
        assert answer.error_code != ErrorCode.NONE


def test_two_polls_in_the_same_words_at_once() -> None:
    world, _ = filled()
    polled(world)
    world.bench.sleep(521)
    slots = [polled(world), polled(world)]
    assert [slot.pieces for slot in slots] == [None, None]
    world.produce(9, [("t", 0, batch())], acks=1)
    world.replica("t").commit(4)
    assert all(fetched(world, 12, slot).records for slot in slots)


@pytest.mark.parametrize(
    "changes", [{"min_bytes": 0}, {"max_wait_ms": 0}, {"rack_id": "a"}], ids=str
)
def test_what_may_be_answered_otherwise_is_looked_at(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, _ = filled()
    seen = looks(world, monkeypatch)
    for _ in range(2):
        polled(world, **changes)
        world.bench.sleep(521)
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("wait_ms", "late_ms"), [(100, 1), (400, 20), (1_000, 40), (5_000, 200), (30_000, 200)]
)
def test_a_wait_ends_in_time(wait_ms: int, late_ms: int) -> None:
    world, _ = filled()
    world.bench.sleep(7)
    slot = polled(world, max_wait_ms=wait_ms)
    world.bench.sleep(wait_ms - 1)
    assert slot.pieces is None, "never early"
    world.bench.sleep(late_ms + 1)
    assert slot.pieces is not None
