"""Polls that find nothing: repeated in the same words, they are known again, and never stale."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import pytest
import trio.testing

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey, encode_request_header
from raftmq.protocol.fetch import FetchPartition, FetchRequest, FetchTopic, encode_fetch_request
from raftmq.raft.ready import Role, SoftState
from raftmq.server.kafka.connection import Connection
from raftmq.server.kafka.handlers.fetch import LONG_WAIT_MS, MAX_WAIT_MS_MAX
from raftmq.server.kafka.idle_poll import HEAR_GRID_MS, hear_later
from raftmq.server.kafka.limits import Limits
from raftmq.server.kafka.listener import ClientPort
from raftmq.types import LeaderEpoch, Term
from tests.server.kafka.test_produce_fetch import batch, fetched, filled
from tests.server.kafka.world import FakeSlot, World


class Nobody:
    """Waits for a moment, to know when it is."""

    def expire(self) -> None: ...


def polled(
    world: World, *, current_epoch: int = -1, late_ms: float = 0.0, **changes: Any
) -> FakeSlot:
    """A poll without a session, at the end of the log of `filled`. That of a quiet client is heard
    so late after the next moment at which the quiet are."""
    part = FetchPartition(0, fetch_offset=3, current_leader_epoch=current_epoch)
    fields: dict[str, Any] = {"max_wait_ms": 500, "session_epoch": -1, **changes}
    request = FetchRequest(topics=[FetchTopic("t", None, [part])], **fields)
    if world.connection.is_quiet:
        deadlines, clock = world.bench.deadlines, world.bench.clock
        waiter = Nobody()
        moment_ms = deadlines.together(1.0, HEAR_GRID_MS, waiter)
        deadlines.leave(moment_ms, waiter)
        world.bench.sleep(moment_ms - clock.now_ms)
        world.bench.clock.now_ms += late_ms
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


def idle() -> World:
    """A client whose polls find nothing, between two of them."""
    world, _ = filled()
    for _ in range(2):
        polled(world)
        assert not world.connection.is_quiet
        world.bench.sleep(551)
    assert world.connection.fetch_memo.idle is not None
    return world


def hang_up(world: World) -> None:
    """As `Connection.close` does."""
    connection = world.connection
    connection.is_quiet = False
    while connection.on_close:
        connection.on_close.popitem()[1]()


def assert_nothing_waits(world: World) -> None:
    assert world.broker.metrics.parked_fetches == 0
    assert len(world.bench.deadlines) == 0
    assert world.connection.on_close == {}
    assert world.connection.fetch_memo.idle is None
    assert not world.connection.is_quiet
    if (partition := world.registry.by_name("t", 0)) is not None:
        assert len(partition.fetches) == 0


def move(world: World) -> None:
    """A record comes, which another client produced."""
    is_quiet = world.connection.is_quiet
    world.produce(9, [("t", 0, batch())], acks=1)
    world.connection.is_quiet = is_quiet
    world.replica("t").commit(4)


@pytest.mark.parametrize("wait_ms", [300, 500])
def test_a_poll_in_the_same_words_is_not_looked_at_again(
    wait_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, _ = filled()
    seen = looks(world, monkeypatch)
    answers = []
    for _ in range(3):
        slot = polled(world, max_wait_ms=wait_ms)
        assert slot.pieces is None
        world.bench.sleep(551)
        answers.append(bytes(world.body(ApiKey.FETCH, 12, slot)))
    assert seen == [3], "the first time only"
    assert answers[0] == answers[1] == answers[2]
    assert world.broker.metrics.api("fetch").requests == 3
    assert world.broker.metrics.parked_fetches == 0
    is_long = wait_ms >= LONG_WAIT_MS
    assert len(world.connection.on_close) == len(world.partition("t").fetches) == is_long
    world.partition("t").close()
    assert_nothing_waits(world)


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize(("wait_ms", "quiet_polls"), [(300, 1), (500, 1), (500, 2)])
@pytest.mark.parametrize("what", ["records", "log start", "epoch", "leader", "closed", "removed"])
def test_a_poll_in_the_same_words_learns_what_changed(
    what: str, wait_ms: int, quiet_polls: int, when: str
) -> None:
    """The same answers as for a client that asks for the first time."""
    world, _ = filled()
    for _ in range(quiet_polls):
        polled(world, current_epoch=5, max_wait_ms=wait_ms)
        world.bench.sleep(551)
    memo = world.connection.fetch_memo
    assert (memo.idle is not None) == (quiet_polls > 1)
    assert (memo.reading is not None) == (quiet_polls == 1)

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
    slot = polled(world, current_epoch=5, max_wait_ms=wait_ms)
    if when == "during":
        change()
    assert (slot.pieces is not None) or what != "records", "at once"
    world.bench.sleep(2000)
    answer = fetched(world, 12, slot)
    if what != "log start":
        assert_nothing_waits(world)
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
    world.bench.sleep(551)
    slots = [polled(world), polled(world)]
    assert [slot.pieces for slot in slots] == [None, None]
    move(world)
    assert all(fetched(world, 12, slot).records for slot in slots)
    assert_nothing_waits(world)


def test_many_polls_in_the_same_words_at_once() -> None:
    """All are answered in time, and wait with no more than one alone between them."""
    world = idle()
    for _ in range(3):
        slots = [polled(world) for _ in range(4)]
        assert [slot.pieces for slot in slots] == [None] * 4
        assert world.broker.metrics.parked_fetches == 4
        world.bench.sleep(551)
        bodies = {bytes(world.body(ApiKey.FETCH, 12, slot)) for slot in slots}
        assert len(bodies) == 1
        assert not fetched(world, 12, slots[0]).records
        assert world.broker.metrics.parked_fetches == 0
        assert world.connection.is_quiet
    assert len(world.connection.on_close) == len(world.partition("t").fetches) == 1
    move(world)
    assert_nothing_waits(world)


def test_polls_at_once_wait_no_longer_than_anybody_may() -> None:
    world, _ = filled()
    for _ in range(4):
        slots = [polled(world, max_wait_ms=2 * MAX_WAIT_MS_MAX) for _ in range(2)]
        world.bench.sleep(MAX_WAIT_MS_MAX + 200)
        assert all(slot.pieces is not None for slot in slots)


@pytest.mark.parametrize("is_in_hand", [True, False])
def test_who_polls_in_other_words_leaves_nothing_behind(is_in_hand: bool) -> None:
    """Its partitions may be others by now, and those that it had may never move again."""
    world = idle()
    for wait_ms in range(501, 505):
        before = polled(world, max_wait_ms=wait_ms - 1) if is_in_hand else None
        for _ in range(2):
            polled(world, max_wait_ms=wait_ms)
            assert not world.connection.is_quiet
            world.bench.sleep(600)
        assert before is None or before.pieces is not None
    assert world.connection.is_quiet, "for those in other words, too"
    assert len(world.connection.on_close) == len(world.partition("t").fetches) == 1
    move(world)
    assert_nothing_waits(world)


@pytest.mark.parametrize("is_in_hand", [True, False])
def test_a_client_that_hangs_up_leaves_nothing_behind(is_in_hand: bool) -> None:
    world = idle()
    slot = polled(world) if is_in_hand else None
    assert world.broker.metrics.parked_fetches == is_in_hand
    hang_up(world)
    assert_nothing_waits(world)
    move(world)
    world.bench.sleep(2000)
    assert slot is None or slot.pieces is None, "nobody is left to tell"
    assert_nothing_waits(world)


def test_a_client_is_quiet_while_its_polls_find_nothing() -> None:
    world = idle()
    for _ in range(3):
        assert world.connection.is_quiet
        polled(world)
        assert world.connection.is_quiet
        world.bench.sleep(551)


def test_what_moves_between_two_polls_is_told_at_once() -> None:
    world = idle()
    move(world)
    assert_nothing_waits(world)
    assert fetched(world, 12, polled(world)).records
    assert_nothing_waits(world)


def test_what_changed_without_a_word_is_found_when_the_next_poll_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = idle()
    world.replica("t").start_at(3)
    seen = looks(world, monkeypatch)
    slot = polled(world)
    assert seen == [], "nobody was woken: it is waited with as before"
    world.bench.sleep(551)
    assert fetched(world, 12, slot).log_start_offset == 3
    assert seen == [3]
    assert not world.connection.is_quiet
    assert_nothing_waits(world)


def test_who_is_woken_late_does_not_end_who_began_since() -> None:
    """A partition wakes some at once and the others soon: these may have ended meanwhile."""
    world = idle()
    memo = world.connection.fetch_memo
    assert memo is not None
    first = memo.idle
    assert first is not None
    first.woken()
    assert memo.idle is None
    for _ in range(2):
        polled(world)
        world.bench.sleep(551)
    second = memo.idle
    assert second is not None
    first.woken()
    assert memo.idle is second
    move(world)
    assert_nothing_waits(world)


def test_who_is_answered_with_records_is_listened_to() -> None:
    """It asks for what comes next at once."""
    world = idle()
    slot = polled(world)
    assert world.connection.is_quiet
    move(world)
    assert fetched(world, 12, slot).records
    assert_nothing_waits(world)


def test_too_few_records_are_waited_with_and_told_at_the_end() -> None:
    world, _ = filled()
    for _ in range(2):
        polled(world, min_bytes=1_000)
        world.bench.sleep(551)
    slot = polled(world, min_bytes=1_000)
    move(world)
    world.bench.sleep(499)
    assert slot.pieces is None
    assert world.broker.metrics.parked_fetches == 1
    world.bench.sleep(52)
    assert fetched(world, 12, slot).records
    assert_nothing_waits(world)


@pytest.mark.parametrize("is_in_hand", [True, False])
def test_whoever_asks_for_anything_else_is_listened_to(is_in_hand: bool) -> None:
    world = idle()
    slot = polled(world) if is_in_hand else None
    assert world.connection.is_quiet
    world.ask(ApiKey.API_VERSIONS, 3, client_software_name="c", client_software_version="1")
    assert not world.connection.is_quiet
    slot = slot or polled(world)
    assert slot.pieces is None
    world.bench.sleep(551)
    assert not fetched(world, 12, slot).records
    assert world.connection.is_quiet, "that was all"
    assert world.broker.metrics.parked_fetches == 0


def test_where_too_many_wait_the_next_poll_takes_the_ordinary_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = idle()
    seen = looks(world, monkeypatch)
    config = world.broker.config
    world.broker.config = attrs.evolve(config, parked_fetches_max=0)
    for number in range(3):
        assert not fetched(world, 12, polled(world)).records, "answered at once"
        assert len(seen) == number + 1
    assert world.broker.metrics.parked_fetches == 0
    world.broker.config = config
    slot = polled(world)
    assert slot.pieces is None
    assert len(seen) == 3, "and the one after them waits as before"
    assert len(world.connection.on_close) == len(world.partition("t").fetches) == 1
    move(world)
    assert fetched(world, 12, slot).records
    assert_nothing_waits(world)


def test_polls_that_find_nothing_are_counted_with_the_time_they_took() -> None:
    world = idle()
    metrics = world.broker.metrics.api("fetch")
    seconds = metrics.latency.seconds
    polled(world)
    assert metrics.requests == 2
    world.bench.sleep(551)
    assert metrics.requests == 3
    assert 0.5 <= metrics.latency.seconds - seconds <= 0.55


@asynccontextmanager
async def calling(world: World) -> AsyncIterator[tuple[socket.socket, Connection]]:
    """A client with a socket, whose connection is looked at on the grid when it is quiet."""
    look_later = partial(hear_later, world.bench.deadlines)
    begin: Any = world.dispatcher.begin
    port = ClientPort(begin, Limits(), world.broker.metrics, look_later=look_later)
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


def poll_frame(correlation_id: int) -> bytes:
    part = FetchPartition(0, fetch_offset=3)
    request = FetchRequest(
        topics=[FetchTopic("t", None, [part])], max_wait_ms=500, session_epoch=-1
    )
    head = encode_request_header(ApiKey.FETCH, 12, correlation_id, "client")
    frame = head + encode_fetch_request(12, request)
    return len(frame).to_bytes(4, "big") + frame


async def test_a_quiet_client_is_heard_at_the_next_moment_on_the_grid() -> None:
    world, topic_id = filled()
    async with calling(world) as (sock, connection):
        for number in range(4):
            sock.send(poll_frame(number))
            assert await answered(sock) is None
            is_quiet = number >= 2
            assert connection.is_quiet == is_quiet
            assert world.broker.metrics.parked_fetches == (not is_quiet)
            world.bench.sleep(HEAR_GRID_MS)
            assert world.broker.metrics.parked_fetches == 1
            assert await answered(sock) is None
            world.bench.sleep(500)
            assert await answered(sock) is not None
        world.lead(topic_id, 0, 3, 6)
        world.replica("t").follow(None)
        assert not connection.is_quiet
        sock.send(poll_frame(4))
        assert await answered(sock), "without a moment"


@pytest.mark.parametrize("is_in_hand", [True, False])
async def test_a_quiet_client_that_hangs_up_leaves_nothing_behind(is_in_hand: bool) -> None:
    world, _ = filled()
    async with calling(world) as (sock, connection):
        for number in range(2):
            sock.send(poll_frame(number))
            await trio.testing.wait_all_tasks_blocked(0.01)
            world.bench.sleep(550)
        if is_in_hand:
            sock.send(poll_frame(2))
            world.bench.sleep(HEAR_GRID_MS)
        assert world.broker.metrics.parked_fetches == is_in_hand
        assert connection.is_quiet
        sock.close()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert not connection.is_closed
        world.bench.sleep(HEAR_GRID_MS)
        assert connection.is_closed
        assert connection.on_close == {}
        assert world.broker.metrics.parked_fetches == 0
        assert len(world.partition("t").fetches) == 0
        assert len(world.bench.deadlines) == 0


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
        world.bench.sleep(551)
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("wait_ms", "late_ms"), [(100, 1), (400, 50), (1_000, 100), (5_000, 200), (30_000, 200)]
)
def test_a_wait_ends_in_time(wait_ms: int, late_ms: int) -> None:
    world, _ = filled()
    world.bench.sleep(7)
    slot = polled(world, max_wait_ms=wait_ms)
    world.bench.sleep(wait_ms - 1)
    assert slot.pieces is None, "never early"
    world.bench.sleep(late_ms + 1)
    assert slot.pieces is not None


@pytest.mark.parametrize(
    ("wait_ms", "late_ms"), [(100, 1), (400, 50), (1_000, 100), (5_000, 200), (400_000, 200)]
)
def test_a_wait_without_a_look_ends_in_time(wait_ms: int, late_ms: int) -> None:
    """Who waits for a short time is not kept waiting between two polls either."""
    world, _ = filled()
    for _ in range(2):
        polled(world, max_wait_ms=wait_ms)
        world.bench.sleep(MAX_WAIT_MS_MAX + 200)
    slot = polled(world, max_wait_ms=wait_ms)
    assert world.connection.is_quiet == (wait_ms >= LONG_WAIT_MS)
    wait_ms = min(wait_ms, MAX_WAIT_MS_MAX)
    world.bench.sleep(wait_ms - 1)
    assert slot.pieces is None, "never early"
    world.bench.sleep(late_ms + 1)
    assert slot.pieces is not None


@pytest.mark.parametrize("late_ms", [0, 0.3, 7, 49])
def test_the_wait_of_a_poll_begins_at_the_moment_at_which_it_is_heard(late_ms: float) -> None:
    """Hundreds are heard one after the other, and end together all the same."""
    world = idle()
    slot = polled(world, late_ms=late_ms)
    world.bench.sleep(499 - late_ms)
    assert slot.pieces is None, "never early"
    world.bench.sleep(1)
    assert slot.pieces is not None
