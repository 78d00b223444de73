"""Connections that end while one of their tasks is about to begin, or to go on: it finds a closed
socket, begins nothing, keeps nothing, and harms nobody else on the port."""

from __future__ import annotations

import socket
from unittest.mock import Mock

import pytest
import trio
import trio.testing

from raftmq.server.kafka.authentication import Authentication
from raftmq.server.kafka.connection import SCRATCH_BYTES, Connection
from raftmq.server.kafka.limits import Limits
from raftmq.server.kafka.replies import Slot
from tests.server.kafka.test_readiness import Callers, callers, request

LARGE_ANSWER = bytes(4_000_000)


def answers_at_once(found: Callers, data: bytes) -> None:
    """Answer every request within the call that begins it."""

    def begin(frame: memoryview, slot: Slot, connection: Connection) -> None:
        found.handler.begin(frame, slot, connection)
        found.handler.answer(found.handler.begun[-1], data)

    found.port.shared.begin = begin


async def is_served(found: Callers, sock: socket.socket, number: int) -> None:
    """The port lives and serves others."""
    found.port.shared.begin = found.handler.begin
    sock.send(request(number))
    await trio.testing.wait_all_tasks_blocked()
    found.handler.answer(number)
    assert sock.recv(100) == b"done"


async def test_a_client_that_leaves_before_its_writer_began() -> None:
    """A receive that fills the scratch buffer is followed by another one in the same call."""
    async with callers(2) as found:
        answers_at_once(found, LARGE_ANSWER)
        found.socks[0].send(request(1, SCRATCH_BYTES - 4))
        found.socks[0].shutdown(socket.SHUT_WR)
        await trio.testing.wait_all_tasks_blocked()
        assert found.connections[0].is_closed
        await is_served(found, found.socks[1], 2)


async def test_a_client_that_leaves_before_its_writer_goes_on() -> None:
    async with callers(2) as found:
        sock = found.socks[0]
        answers_at_once(found, LARGE_ANSWER)
        sock.send(request(1))
        left = len(LARGE_ANSWER)
        while left:
            await trio.testing.wait_all_tasks_blocked()
            left -= len(sock.recv(left))
        await trio.testing.wait_all_tasks_blocked()
        assert found.tasks == 1, "the writer sleeps"
        sock.send(request(2, SCRATCH_BYTES - 4))
        sock.shutdown(socket.SHUT_WR)
        await trio.testing.wait_all_tasks_blocked()
        assert found.connections[0].is_closed
        await is_served(found, found.socks[1], 3)


async def test_one_that_parts_and_is_closed_with_its_last_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its task was woken by the answer, and goes on once the socket is closed. What trio was told
    of such a descriptor it would keep: the next task that does so gets another error."""
    async with callers(3) as found:
        for number in (1, 2):
            found.socks[number].send(request(number))
            await trio.testing.wait_all_tasks_blocked()
            found.connections[number].finish()
            await trio.testing.wait_all_tasks_blocked()
            found.connections[number].authentication = has_failed()
            found.handler.answer(number)
            found.connections[number].close()
            await trio.testing.wait_all_tasks_blocked()
        await is_served(found, found.socks[0], 3)
    assert "a bug" not in "".join(capsys.readouterr())


def has_failed() -> Authentication:
    """The side of a node whose client did not prove who it is."""
    failed = Mock(spec=Authentication)
    failed.has_failed, failed.is_bare = True, False
    return failed


async def test_what_waited_is_not_begun_when_its_connection_ended() -> None:
    async with callers(1, Limits(pipeline_depth_max=1)) as found:
        sock, connection = found.socks[0], found.connections[0]
        sock.send(request(1) + request(2))
        connection.receive()
        assert connection.is_closed is False
        connection.close()
        await trio.testing.wait_all_tasks_blocked()
        assert found.handler.begun == [1]


async def test_nothing_is_begun_behind_what_broke_the_connection() -> None:
    """As where clients are sent to other nodes: they ask for everything again."""
    async with callers(1) as found:

        def begin(frame: memoryview, slot: Slot, connection: Connection) -> None:
            found.handler.begin(frame, slot, connection)
            found.handler.slots.pop(found.handler.begun[-1]).fail()

        found.port.shared.begin = begin
        found.socks[0].send(request(1) + request(2))
        await trio.testing.wait_all_tasks_blocked()
        assert found.handler.begun == [1]
        assert found.connections[0].is_closed


async def test_a_large_frame_that_is_complete_too_late_is_given_up() -> None:
    async with callers(1) as found:
        sock, connection = found.socks[0], found.connections[0]
        frame = request(2, 100_000, 0)
        sock.send(request(1) + frame[:50_000])
        await trio.testing.wait_all_tasks_blocked()
        sock.send(frame[50_000:])
        found.handler.slots.pop(1).fail()
        await trio.testing.wait_all_tasks_blocked()
        assert found.handler.begun == [1]
        assert connection.is_closed


async def test_who_is_accepted_while_the_port_drains_is_hung_up_on() -> None:
    async with callers(1) as found:
        found.socks[0].send(request(1))
        await trio.testing.wait_all_tasks_blocked()
        found.nursery.start_soon(found.port.drain, lambda: None)
        await trio.testing.wait_all_tasks_blocked()
        late = found.call()
        await trio.testing.wait_all_tasks_blocked()
        assert late.recv(1) == b"", "the last of the others may take long"
        found.handler.answer(1)
        late.close()
        found.socks[0].close()
        with trio.fail_after(30):
            while found.port.connections:
                await trio.lowlevel.checkpoint()
