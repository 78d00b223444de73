"""Quiet connections: received from at certain moments only, together, and none is forgotten."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import trio
import trio.testing
from attrs import define, field

from raftmq.partition.deadlines import Deadlines
from raftmq.runtime.turns import Turns
from raftmq.server.kafka.connection import Connection
from raftmq.server.kafka.idle_poll import HEAR_GRID_MS, hear_later
from raftmq.server.kafka.limits import Limits
from raftmq.server.kafka.listener import ClientPort
from raftmq.server.kafka.metrics import ServerMetrics
from raftmq.server.kafka.readiness import Readiness
from raftmq.server.kafka.replies import Slot
from tests.partition.fake_replica import FakeClock
from tests.server.kafka.test_readiness import PASS_RECEIVES, Handler, Reader, callers, request


@define
class Moments:
    """Those at which the quiet are looked at: the next one comes when the test says so."""

    waiting: dict[int, Readiness] = field(factory=dict)  # by id(), as `Deadlines` has them
    asked: int = 0

    def __call__(self, waiter: Readiness) -> None:
        self.asked += 1
        self.waiting[id(waiter)] = waiter

    def come(self) -> None:
        """The next moment; who waits for another one meanwhile gets that."""
        waiting, self.waiting = self.waiting, {}
        for waiter in waiting.values():
            waiter.expire()


async def test_the_quiet_are_received_from_at_the_next_moment_in_one_piece() -> None:
    log: list[str] = []

    @contextmanager
    def together() -> Iterator[None]:
        log.append("begin")
        yield
        log.append("end")

    moments = Moments()
    readiness = Readiness(Turns(), together, moments)
    pairs = [socket.socketpair() for _ in range(4)]
    for _, theirs in pairs:
        readiness.watch(theirs.fileno(), Reader(theirs, log))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(readiness.run)
        for _, theirs in pairs[:3]:
            assert readiness.hush(theirs.fileno())
        assert len(readiness) == 4
        assert moments.asked == 1, "for all of them"
        for ours, _ in pairs[:2]:
            ours.send(b"word")
        pairs[3][0].send(b"loud")
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert log == ["loud"]
        log.clear()
        for told in ([], ["silent"]):
            moments.come()
            assert log == ["begin", "word", "word", "end", *told], "not who has nothing to say"
            log.clear()
            for ours, theirs in pairs[:2]:
                assert readiness.hush(theirs.fileno()), "it was answered"
                ours.send(b"word")
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert log == [], "they are quiet as before"
        nursery.cancel_scope.cancel()
    for _, theirs in pairs:
        readiness.unwatch(theirs.fileno())
    log.clear()
    moments.come()
    assert moments.waiting == {}, "no moment is asked for where nobody is quiet"
    assert log == []
    readiness.close()
    for pair in pairs:
        for sock in pair:
            sock.close()


async def test_who_is_quiet_may_be_listened_to_again() -> None:
    moments = Moments()
    async with callers(1, look_later=moments) as found:
        sock, connection = found.socks[0], found.connections[0]
        connection.hush()
        connection.hush()
        assert connection.is_quiet
        sock.send(request(1) + request(2)[:10])
        await trio.testing.wait_all_tasks_blocked()
        assert found.handler.begun == []
        connection.listen()
        connection.listen()
        assert not connection.is_quiet
        await trio.testing.wait_all_tasks_blocked()
        assert found.handler.begun == [1], "what was there already is received at once"
        connection.hush()
        sock.send(request(2)[10:])
        await trio.testing.wait_all_tasks_blocked()
        assert found.handler.begun == [1]
        moments.come()
        assert found.handler.begun == [1, 2], "the half that came before was kept"
        connection.listen()
        sock.send(request(3))
        await trio.testing.wait_all_tasks_blocked()
        moments.come()
        assert found.handler.begun == [1, 2, 3]
        assert moments.waiting == {}
        assert found.tasks == 0


async def test_who_does_not_poll_on_is_listened_to_again() -> None:
    """What it says next, whenever that is, is no poll: it waits for no moment."""
    moments = Moments()
    async with callers(3, look_later=moments) as found:
        prompt, slow, silent = found.connections
        for connection in found.connections:
            connection.hush()
        found.socks[0].send(request(0))
        moments.come()
        assert found.handler.begun == [0]
        assert silent.is_quiet, "it may have been answered a moment ago"
        found.socks[1].send(request(1))
        moments.come()
        assert found.handler.begun == [0, 1]
        assert not silent.is_quiet
        found.socks[2].send(request(2))
        await trio.testing.wait_all_tasks_blocked()
        assert found.handler.begun == [0, 1, 2], "at once"
        for _ in range(5):
            moments.come()
        assert prompt.is_quiet, "it waits for its answer"
        found.handler.answer(0)
        prompt.hush()
        for is_quiet in (True, False):
            moments.come()
            assert prompt.is_quiet == is_quiet
        assert slow.is_quiet
        slow.listen()
        assert moments.waiting
        moments.come()
        assert not moments.waiting


async def test_the_end_of_a_quiet_client_is_noticed_at_the_next_moment() -> None:
    moments = Moments()
    async with callers(2, look_later=moments) as found:
        dropped: list[int] = []
        for number, connection in enumerate(found.connections):
            connection.on_close[number] = partial(dropped.append, number)
            connection.hush()
        found.socks[0].close()
        await trio.testing.wait_all_tasks_blocked()
        assert dropped == []
        moments.come()
        assert dropped == [0]
        assert found.connections[0].is_closed
        assert not found.connections[0].is_quiet
        assert len(found.port.shared.readiness) == len(found.port.connections) == 1
        moments.come()
        assert not found.connections[1].is_closed
        found.connections[1].listen()


async def test_one_request_may_end_or_rouse_other_quiet_ones_of_the_same_moment() -> None:
    moments = Moments()
    async with callers(3, look_later=moments) as found:
        handler = found.handler

        def begin(frame: memoryview, slot: Slot, connection: Connection) -> None:
            handler.begin(frame, slot, connection)
            others = [other for other in found.connections if other is not connection]
            others[0].close()
            others[1].listen()

        found.port.shared.begin = begin
        for number, sock in enumerate(found.socks):
            found.connections[number].hush()
            sock.send(request(number))
        moments.come()
        assert len(handler.begun) == 1
        await trio.testing.wait_all_tasks_blocked()
        assert len(handler.begun) == 2, "who was roused is not forgotten"
        for connection in found.connections:
            connection.close()


async def test_quiet_ones_beyond_the_budget_of_a_pass_are_received_from_in_others() -> None:
    count = 3 * PASS_RECEIVES
    moments = Moments()
    async with callers(count, look_later=moments) as found:
        for number, sock in enumerate(found.socks):
            found.connections[number].hush()
            sock.send(request(number, 2_000))
        await trio.testing.wait_all_tasks_blocked()
        moments.come()
        assert len(found.handler.begun) == PASS_RECEIVES
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(found.handler.begun) == list(range(count)), "each once"
        for number, connection in enumerate(found.connections):
            found.handler.answer(number)
            connection.listen()
        found.socks[0].send(request(count))
        await trio.testing.wait_all_tasks_blocked()
        assert found.handler.begun[-1] == count, "and nobody waits for who was behind"


async def test_nobody_is_quiet_where_no_moments_come() -> None:
    async with callers(1) as found:
        connection = found.connections[0]
        connection.hush()
        assert not connection.is_quiet
        connection.listen()
        found.socks[0].send(request(1))
        await trio.testing.wait_all_tasks_blocked()
        assert found.handler.begun == [1]


async def test_who_has_a_task_is_not_hushed() -> None:
    moments = Moments()
    async with callers(1, look_later=moments) as found:
        sock, connection = found.socks[0], found.connections[0]
        sock.send(request(1, 100_000, 0)[:50_000])
        await trio.testing.wait_all_tasks_blocked()
        assert found.tasks == 1
        connection.hush()
        assert not connection.is_quiet
        assert moments.waiting == {}
        sock.send(request(1, 100_000, 0)[50_000:])
        await trio.testing.wait_all_tasks_blocked()
        assert found.handler.begun == [1]
        connection.rest_if_quiet(connection.last_active + 1.5)
        await trio.testing.wait_all_tasks_blocked()
        assert found.tasks == 0
        connection.hush()
        assert connection.is_quiet, "it is at rest again"
        connection.listen()


async def test_a_quiet_client_that_is_busy_again_gets_its_task() -> None:
    moments = Moments()
    async with callers(1, look_later=moments) as found:
        sock, connection = found.socks[0], found.connections[0]
        connection.hush()
        sock.send(request(1, 100_000, 0))
        await trio.testing.wait_all_tasks_blocked()
        assert found.tasks == 0
        moments.come()
        assert not connection.is_quiet
        connection.listen()
        await trio.testing.wait_all_tasks_blocked()
        assert found.handler.begun == [1]
        assert found.tasks == 1
        assert moments.waiting == {}


async def test_who_is_on_its_way_out_is_not_hushed() -> None:
    moments = Moments()
    async with callers(1, look_later=moments) as found:
        sock, connection = found.socks[0], found.connections[0]
        sock.send(request(1))
        await trio.testing.wait_all_tasks_blocked()
        connection.hush()
        found.handler.slots.pop(1).fail()
        assert not connection.is_quiet
        connection.hush()
        connection.listen()
        assert not connection.is_quiet
        await trio.testing.wait_all_tasks_blocked()
        assert connection.is_closed
        connection.hush()
        connection.listen()
        assert not connection.is_quiet


async def test_quiet_clients_are_answered_and_hung_up_on_when_the_port_drains() -> None:
    moments = Moments()
    async with callers(2, look_later=moments) as found:
        found.socks[0].send(request(1))
        await trio.testing.wait_all_tasks_blocked()
        for connection in found.connections:
            connection.hush()
        with trio.fail_after(5):
            await found.port.drain(lambda: found.handler.answer(1))
        assert found.socks[0].recv(100) == b"done"
        assert found.port.connections == {}
        moments.come()
        assert moments.waiting == {}


async def test_the_port_ends_with_quiet_clients() -> None:
    moments = Moments()
    port = ClientPort(Handler().begin, Limits(), ServerMetrics(), look_later=moments)
    clients = []
    async with port.served() as nursery:
        for _ in range(2):
            ours, theirs = socket.socketpair()
            port.adopt(ours, "test:1").hush()
            clients.append(theirs)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert port.connections == {}
    assert len(port.shared.readiness) == 0
    assert port.shared.readiness._quiet_epoll.closed
    moments.come()
    assert moments.waiting == {}
    for client in clients:
        assert client.recv(1) == b"", "a clear end"
        client.close()


async def test_moments_come_on_the_grid_one_after_the_other() -> None:
    """Who looks again at a moment on the grid gets the next one, never the same once more."""
    clock = FakeClock()
    deadlines = Deadlines(clock)
    look_later = partial(hear_later, deadlines)
    async with callers(2, look_later=look_later) as found:
        clock.now_ms += 7
        for connection in found.connections:
            connection.hush()
        moments_ms: list[float] = []
        for number in range(3):
            found.socks[0].send(request(number))
            assert deadlines.next_ms is not None
            clock.now_ms = deadlines.next_ms
            assert not deadlines.expire(clock.now_ms, count_max=10)
            assert found.handler.begun[-1] == number
            moments_ms.append(clock.now_ms)
        assert [later - earlier for earlier, later in pairwise(moments_ms)] == [HEAR_GRID_MS] * 2
        for connection in found.connections:
            connection.listen()
        clock.now_ms += HEAR_GRID_MS
        deadlines.expire(clock.now_ms)
        assert len(deadlines) == 0


class FullEpoll:
    """The kernel watches no more sockets for us."""

    def __init__(self, epoll: Any) -> None:
        self._epoll = epoll

    def register(self, *_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._epoll, name)


@pytest.mark.parametrize("is_quiet", [False, True])
async def test_who_cannot_be_watched_elsewhere_is_hung_up_on(is_quiet: bool) -> None:
    """Whoever hushes or rouses may be the Raft engine: no error of the kernel reaches it."""
    moments = Moments()
    async with callers(2, look_later=moments) as found:
        readiness: Any = found.port.shared.readiness
        connection = found.connections[0]
        if is_quiet:
            connection.hush()
        name = "_epoll" if is_quiet else "_quiet_epoll"
        epoll = getattr(readiness, name)
        setattr(readiness, name, FullEpoll(epoll))
        if is_quiet:
            connection.listen()
        else:
            connection.hush()
        setattr(readiness, name, epoll)
        assert not connection.is_closed, "not while somebody settles an answer"
        await trio.testing.wait_all_tasks_blocked()
        assert connection.is_closed
        assert found.socks[0].recv(1) == b"", "a clear end"
        moments.come()
        found.socks[1].send(request(1))
        await trio.testing.wait_all_tasks_blocked()
        assert found.handler.begun == [1], "the others are served as before"
