"""Polls that find nothing: each waits, and learns at once what changes meanwhile."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio.testing

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey, encode_request_header
from raftmq.protocol.fetch import FetchPartition, FetchRequest, FetchTopic, encode_fetch_request
from raftmq.raft.messages import Role, SoftState
from raftmq.server.kafka.connection import Connection
from raftmq.server.kafka.handlers.fetch import MAX_WAIT_MS_MAX
from raftmq.server.kafka.limits import Limits
from raftmq.types import LeaderEpoch, Term
from tests.server.kafka.ports import client_port
from tests.server.kafka.test_produce_fetch import batch, fetched, filled
from tests.server.kafka.world import FakeSlot, World


def polled(world: World, *, current_epoch: int = -1, **changes: Any) -> FakeSlot:
    """A poll without a session, at the end of the log of `filled`."""
    part = FetchPartition(0, fetch_offset=3, current_leader_epoch=current_epoch)
    fields: dict[str, Any] = {"max_wait_ms": 500, "session_epoch": -1, **changes}
    request = FetchRequest(topics=[FetchTopic("t", None, [part])], **fields)
    return world.begin(ApiKey.FETCH, 12, encode_fetch_request(12, request))


def idle() -> World:
    """A client whose polls find nothing, between two of them."""
    world, _ = filled()
    for _ in range(2):
        assert polled(world).pieces is None
        world.bench.sleep(500)
    return world


def hang_up(world: World) -> None:
    """As `Connection.close` does."""
    connection = world.connection
    while connection.on_close:
        connection.on_close.popitem()[1]()


def assert_nothing_waits(world: World) -> None:
    assert world.broker.metrics.parked_fetches == 0
    assert len(world.bench.deadlines) == 0
    assert world.connection.on_close == {}
    if (partition := world.registry.by_name("t", 0)) is not None:
        assert len(partition.fetches) == 0


def move(world: World) -> None:
    """A record comes, which another client produced."""
    world.produce(9, [("t", 0, batch())], acks=1)
    world.replica("t").commit(4)


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("polls_before", [0, 1, 2])
@pytest.mark.parametrize("what", ["records", "log start", "epoch", "leader", "closed", "removed"])
def test_a_poll_learns_what_changed(what: str, polls_before: int, when: str) -> None:
    """The same answers as for a client that asks for the first time, however often it asked."""
    world, _ = filled()
    for _ in range(polls_before):
        polled(world, current_epoch=5)
        world.bench.sleep(500)

    def change() -> None:
        partition, replica = world.partition("t"), world.replica("t")
        if what == "records":
            move(world)
        elif what == "log start":
            replica.start_at(3)
        elif what == "epoch":
            replica.leader_epoch = LeaderEpoch(6)
            partition.role_changed(SoftState(Role.LEADER, Term(6), replica.leader))
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
    assert (slot.pieces is not None) or what != "records", "at once"
    world.bench.sleep(2000)
    answer = fetched(world, 12, slot)
    assert_nothing_waits(world)
    afresh = polled(world, current_epoch=5)
    world.bench.sleep(2000)
    assert answer == fetched(world, 12, afresh)
    if what == "records":
        assert answer.records
    elif what == "log start":
        assert answer.log_start_offset == 3
    else:
        assert answer.error_code != ErrorCode.NONE


def test_many_polls_at_once() -> None:
    """A client may send several before it is answered."""
    world, _ = filled()
    for _ in range(3):
        slots = [polled(world) for _ in range(4)]
        assert [slot.pieces for slot in slots] == [None] * 4
        assert world.broker.metrics.parked_fetches == 4
        world.bench.sleep(500)
        assert not any(fetched(world, 12, slot).records for slot in slots)
        assert_nothing_waits(world)
    slots = [polled(world) for _ in range(4)]
    move(world)
    assert all(fetched(world, 12, slot).records for slot in slots)
    assert_nothing_waits(world)


@pytest.mark.parametrize("is_in_hand", [True, False])
def test_a_client_that_hangs_up_leaves_nothing_behind(is_in_hand: bool) -> None:
    world = idle()
    if is_in_hand:
        polled(world)
    assert world.broker.metrics.parked_fetches == is_in_hand
    hang_up(world)
    assert_nothing_waits(world)
    move(world)
    world.bench.sleep(2000)
    assert_nothing_waits(world)


def test_what_moves_between_two_polls_is_told_at_once() -> None:
    world = idle()
    assert_nothing_waits(world)
    move(world)
    assert fetched(world, 12, polled(world)).records
    assert_nothing_waits(world)


def test_too_few_records_are_waited_with_and_told_at_the_end() -> None:
    world, _ = filled()
    slot = polled(world, min_bytes=1_000)
    move(world)
    world.bench.sleep(499)
    assert slot.pieces is None
    assert world.broker.metrics.parked_fetches == 1
    world.bench.sleep(1)
    assert fetched(world, 12, slot).records
    assert_nothing_waits(world)


def test_where_too_many_wait_a_poll_is_answered_at_once() -> None:
    world = idle()
    config = world.broker.config
    world.broker.config = attrs.evolve(config, parked_fetches_max=0)
    for _ in range(3):
        assert not fetched(world, 12, polled(world)).records, "answered at once"
    assert_nothing_waits(world)
    world.broker.config = config
    slot = polled(world)
    assert slot.pieces is None, "and the one after them waits as before"
    move(world)
    assert fetched(world, 12, slot).records
    assert_nothing_waits(world)


def test_polls_that_find_nothing_are_counted_with_the_time_they_took() -> None:
    world = idle()
    metrics = world.broker.metrics.api("fetch")
    seconds = metrics.latency.seconds
    polled(world)
    assert metrics.requests == 2
    world.bench.sleep(500)
    assert metrics.requests == 3
    assert metrics.latency.seconds - seconds == pytest.approx(0.5)


@pytest.mark.parametrize("wait_ms", [1, 100, 400, 1_000, 5_000, 30_000, MAX_WAIT_MS_MAX + 1])
def test_a_wait_ends_when_it_was_asked_to(wait_ms: int) -> None:
    """To the millisecond, and no later than anybody may wait."""
    world, _ = filled()
    world.bench.sleep(7)
    slot = polled(world, max_wait_ms=wait_ms)
    world.bench.sleep(min(wait_ms, MAX_WAIT_MS_MAX) - 1)
    assert slot.pieces is None, "never early"
    world.bench.sleep(1)
    assert slot.pieces is not None


# ---- over a socket ----


@asynccontextmanager
async def calling(world: World) -> AsyncIterator[tuple[socket.socket, Connection]]:
    """A client with a socket."""
    begin: Any = world.dispatcher.begin
    port = client_port(begin, Limits(), world.broker.metrics)
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setblocking(False)
        async with port.served() as nursery:
            yield theirs, port.adopt(ours, "test:1")
            nursery.cancel_scope.cancel()


async def answered(sock: socket.socket) -> bytes | None:
    """What came, once everything is done that can be done now."""
    await trio.testing.wait_all_tasks_blocked(0.01)
    try:
        return sock.recv(10_000)
    except BlockingIOError:
        return None


def poll_frame(correlation_id: int, max_wait_ms: int = 500) -> bytes:
    part = FetchPartition(0, fetch_offset=3)
    request = FetchRequest(
        topics=[FetchTopic("t", None, [part])], max_wait_ms=max_wait_ms, session_epoch=-1
    )
    head = encode_request_header(ApiKey.FETCH, 12, correlation_id, "client")
    frame = head + encode_fetch_request(12, request)
    return len(frame).to_bytes(4, "big") + frame


async def test_every_poll_is_heard_at_once_and_answered_at_its_end() -> None:
    """However many of them found nothing before."""
    world, topic_id = filled()
    async with calling(world) as (sock, _):
        for number in range(5):
            sock.send(poll_frame(number))
            assert await answered(sock) is None
            assert world.broker.metrics.parked_fetches == 1, "no time went by: it waits"
            world.bench.sleep(499)
            assert await answered(sock) is None
            world.bench.sleep(1)
            assert await answered(sock) is not None
        sock.send(poll_frame(5))
        assert await answered(sock) is None
        world.lead(topic_id, 0, 3, 6)
        world.replica("t").follow(None)
        assert await answered(sock) is not None, "what moves ends the wait"


@pytest.mark.parametrize("is_in_hand", [True, False])
async def test_the_end_of_a_poller_is_noticed_at_once(is_in_hand: bool) -> None:
    world, _ = filled()
    async with calling(world) as (sock, connection):
        for number in range(2 + is_in_hand):
            sock.send(poll_frame(number))
            await trio.testing.wait_all_tasks_blocked(0.01)
            if number < 2:
                world.bench.sleep(500)
        assert world.broker.metrics.parked_fetches == is_in_hand
        sock.close()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert connection.is_closed
        assert connection.on_close == {}
        assert world.broker.metrics.parked_fetches == 0
        assert len(world.partition("t").fetches) == 0
        assert len(world.bench.deadlines) == 0
