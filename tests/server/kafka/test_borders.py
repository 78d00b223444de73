"""A bug of ours where a poll waits, a client is accepted, or all clients are looked at.

Planted once at each border: it is logged once with its kind, counted, and costs the connection that
met it; the others, and the node, go on.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from raftmq import logs as raftmq_logs
from raftmq.server.kafka.connection import Connection, Readiness, Shared
from raftmq.server.kafka.counts import ServerCounts
from raftmq.server.kafka.handlers.fetch import ParkedFetch, Reading
from raftmq.server.kafka.limits import Limits, RequestMemory
from raftmq.server.kafka.listener import ClientPort, Listening, open_listen_socket
from tests.server.kafka.ports import client_port
from tests.server.kafka.test_listener import begin, call
from tests.server.kafka.test_polls import answered, filled, poll_frame
from tests.server.kafka.world import World


class Planted(Exception):
    """Only a bug raises it."""


def plant_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[int]:
    """Have the next call raise, and none after it; the list says whether it did."""
    as_before = getattr(owner, name)
    met: list[int] = []

    def planted(*args: Any, **kwargs: Any) -> Any:
        if not met:
            met.append(1)
            raise Planted(name)
        return as_before(*args, **kwargs)

    monkeypatch.setattr(owner, name, planted)
    return met


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    """What is logged, from a moment on at which nothing was left out."""
    for log in raftmq_logs._all:
        log._periods.clear()
    with capture_logs() as lines:
        yield lines


def assert_told_once(logs: list[Any], metrics: ServerCounts) -> None:
    (line,) = [line for line in logs if line["log_level"] == "error"]
    assert "Planted(" in line["why"]
    assert isinstance(line["exc_info"], Planted), "with its traceback"
    assert metrics.bugs == {"Planted": 1}


# ---- polls that wait ----


@asynccontextmanager
async def polling(world: World) -> AsyncIterator[list[socket.socket]]:
    """Two clients, each of which has had two polls that found nothing."""
    start: Any = world.dispatcher.begin
    port = client_port(start, Limits(), world.broker.metrics)
    pairs = [socket.socketpair() for _ in range(2)]
    async with port.served() as nursery:
        for number, (ours, theirs) in enumerate(pairs):
            theirs.setblocking(False)
            port.adopt(ours, f"test:{number}")
        clients = [theirs for _, theirs in pairs]
        for number in range(2):
            for client in clients:
                client.send(poll_frame(number))
            await trio.testing.wait_all_tasks_blocked(0.01)
            world.bench.sleep(500)
            assert all([await answered(client) for client in clients])
        try:
            yield clients
            assert len(port.connections) == 1
        finally:
            nursery.cancel_scope.cancel()
            for client in clients:
                client.close()
    assert world.broker.metrics.parked_fetches == 0


async def received_by(client: socket.socket) -> tuple[bytes, bool]:
    """What came, and whether the connection is over."""
    data = b""
    while (piece := await answered(client)) is not None:
        if not piece:
            return data, True
        data += piece
    return data, False


@pytest.mark.parametrize(
    ("owner", "name", "when"),
    [
        (Reading, "read", "asked"),
        (ParkedFetch, "park", "asked"),
        (Reading, "has_news", "over"),
        (Reading, "respond", "over"),
        (ParkedFetch, "_unpark", "over"),
        (Reading, "has_news", "moved"),
        (ParkedFetch, "answer", "moved"),
        (ParkedFetch, "abandon", "gone"),
    ],
)
async def test_a_bug_in_a_poll_costs_its_client_alone(
    owner: type, name: str, when: str, monkeypatch: pytest.MonkeyPatch, logs: list[Any]
) -> None:
    world, topic_id = filled()
    async with polling(world) as clients:
        if when in ("asked", "gone"):  # what is called when it hangs up is kept when it asks
            met = plant_once(monkeypatch, owner, name)
        for client in clients:
            client.send(poll_frame(2))
        await trio.testing.wait_all_tasks_blocked(0.01)
        if when != "asked":
            assert world.broker.metrics.parked_fetches == 2
        if when in ("over", "moved"):
            met = plant_once(monkeypatch, owner, name)
        if when == "gone":
            clients[0].shutdown(socket.SHUT_RDWR)
            await trio.testing.wait_all_tasks_blocked(0.01)
        if when == "moved":  # away: all who wait there are told
            world.lead(topic_id, 0, 3, 6)
            world.replica("t").follow(None)
        else:
            world.bench.sleep(500)
        assert met
        received = [await received_by(client) for client in clients]
        (victim,) = [i for i, (_, is_over) in enumerate(received) if is_over]
        other = clients[1 - victim]
        assert received[1 - victim][0], "it has its answer"
        assert not received[victim][0]
        assert_told_once(logs, world.broker.metrics)
        # And the other one polls on.
        other.send(poll_frame(3))
        await trio.testing.wait_all_tasks_blocked(0.01)
        world.bench.sleep(500)
        assert await answered(other)
    # What failed to leave stays until the partition moves, and is harmless.
    world.replica("t").follow(None)
    assert len(world.partition("t").fetches) == 0


# ---- accept, and the look at all clients ----


class Sweeps:
    """The pauses between two looks at all clients, ended by hand."""

    def __init__(self) -> None:
        self._go, self._wait = trio.open_memory_channel[None](0)

    async def pause(self, _seconds: float) -> None:
        await self._wait.receive()

    async def one(self) -> None:
        """A look begins; returns when it is over."""
        await self._go.send(None)
        await trio.testing.wait_all_tasks_blocked()


@asynccontextmanager
async def listening(sweeps: Sweeps) -> AsyncIterator[tuple[ClientPort, int]]:
    port = client_port(begin, Limits(), ServerCounts(), pause=sweeps.pause)
    sock = open_listen_socket("127.0.0.1", 0)
    async with trio.open_nursery() as nursery:
        await nursery.start(port.serve, [Listening(sock)])
        with trio.fail_after(30):
            yield port, sock.getsockname()[1]
        nursery.cancel_scope.cancel()
    assert port.connections == {}
    assert port.metrics.connections == 0


async def is_ended(stream: trio.SocketStream) -> bool:
    """True when the node hung up; a reset is what is left of bytes that it never read."""
    try:
        return await stream.receive_some() == b""
    except trio.BrokenResourceError:
        return True


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (ClientPort, "_full"),
        (ClientPort, "adopt"),
        (ClientPort, "_set_options"),
        (Connection, "__init__"),
        (Connection, "open"),
        (Readiness, "watch"),
    ],
)
async def test_a_bug_at_accept_costs_who_came_alone(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch, logs: list[Any]
) -> None:
    async with listening(Sweeps()) as (port, number):
        first = await trio.open_tcp_stream("127.0.0.1", number)
        assert await call(first)
        met = plant_once(monkeypatch, owner, name)
        victim = await trio.open_tcp_stream("127.0.0.1", number)
        assert await is_ended(victim)
        assert met
        await trio.testing.wait_all_tasks_blocked()
        assert_told_once(logs, port.metrics)
        assert len(port.connections) == port.metrics.connections == 1, "it is not counted for ever"
        assert port._hosts == {"127.0.0.1": 1}
        third = await trio.open_tcp_stream("127.0.0.1", number)
        for stream in (first, third):
            assert await call(stream)
            await stream.aclose()
        await victim.aclose()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Connection, "hang_up_if_stalled"),
        (Connection, "rest_if_quiet"),
        (RequestMemory, "relieve"),
    ],
)
async def test_a_bug_in_the_sweep_costs_whom_it_was_about(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch, logs: list[Any]
) -> None:
    sweeps = Sweeps()
    async with listening(sweeps) as (port, number):
        streams = []
        for _ in range(3):
            streams.append(await trio.open_tcp_stream("127.0.0.1", number))
            assert await call(streams[-1])
        met = plant_once(monkeypatch, owner, name)
        for _ in range(3):
            await sweeps.one()
        assert met
        assert_told_once(logs, port.metrics)
        if owner is Connection:
            first = streams.pop(0)
            assert await is_ended(first), "the first one that was looked at"
            await first.aclose()
        assert len(port.connections) == len(streams)
        for stream in streams:
            assert await call(stream)
            await stream.aclose()


async def test_a_bug_in_hanging_up_for_memory_costs_who_held_it(
    monkeypatch: pytest.MonkeyPatch, logs: list[Any]
) -> None:
    async with listening(Sweeps()) as (port, number):
        victim = await trio.open_tcp_stream("127.0.0.1", number)
        assert await call(victim)
        (connection,) = port.connections.values()
        met = plant_once(monkeypatch, Shared, "refused")
        connection._evicted()  # as one whose large frame waits calls it
        assert met
        assert await is_ended(victim)
        assert_told_once(logs, port.metrics)
        await victim.aclose()
