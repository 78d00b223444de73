"""A fault in making an answer fails that answer, however the last thing it waited for came."""

from __future__ import annotations

from typing import Any, NoReturn
from uuid import UUID

import pytest

from raftmq.errors import RemoteProtocolError
from raftmq.promise import Promise
from raftmq.protocol import ApiKey, Struct, encode_request
from raftmq.server.kafka.work import chain, gather, then
from tests.server.kafka.test_polls import polled
from tests.server.kafka.test_produce_fetch import batch, filled
from tests.server.kafka.world import World


def faulty(*_values: object, **_named: object) -> NoReturn:
    raise KeyError("a fault in an answer")


@pytest.mark.parametrize(
    "wait",
    [
        lambda promise: gather([promise], faulty),
        lambda promise: then(promise, faulty),
        lambda promise: chain(promise, faulty),
    ],
    ids=["gather", "then", "chain"],
)
def test_what_settles_a_promise_does_not_meet_the_faults_of_an_answer(wait: Any) -> None:
    promise: Promise[int] = Promise()
    answer = wait(promise)
    promise.resolve(1)  # by the engine, say: it goes on
    assert isinstance(answer.error, KeyError)
    with pytest.raises(KeyError):
        wait(1)  # at once it is the caller's, which is the dispatcher


def test_a_fault_in_a_parked_fetch_costs_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    world, _ = filled()
    slot = polled(world)
    assert world.broker.metrics.parked_fetches == 1
    monkeypatch.setattr(world.partition("t"), "read", faulty)
    world.produce(9, [("t", 0, batch())], acks=1)
    world.replica("t").commit(4)  # the engine wakes the fetch, and must go on
    assert world.replica("t").high_watermark == 4
    assert slot.is_failed
    assert world.broker.metrics.parked_fetches == 0
    assert world.broker.metrics.api("fetch").failures == 1


@pytest.mark.parametrize("version", [10, 11, 12, 13])
def test_a_topic_asked_for_by_an_unknown_id(version: int) -> None:
    """Before version 12 an answer cannot leave the name out."""
    world = World()
    wanted = Struct(topic_id=UUID(int=7), name=None)
    body = encode_request(
        ApiKey.METADATA,
        version,
        Struct(
            topics=[wanted],
            allow_auto_topic_creation=False,
            include_cluster_authorized_operations=False,
            include_topic_authorized_operations=False,
        ),
    )
    try:
        slot = world.begin(ApiKey.METADATA, version, body)
    except RemoteProtocolError:
        pytest.fail("the connection was closed")
    assert slot.pieces
