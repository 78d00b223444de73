"""The client port over real sockets: limits, shortage of descriptors, threads, deadlines."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from raftmq.logs import LINES_MAX, RateLimitedLog
from raftmq.partition.parked import Deadlines
from raftmq.runtime.loop import run_deadlines
from raftmq.runtime.threads import Workers
from raftmq.server.kafka.connection import Connection
from raftmq.server.kafka.counts import ServerCounts
from raftmq.server.kafka.limits import Limits, TokenBucket
from raftmq.server.kafka.listener import ClientPort, Listening, open_listen_socket
from raftmq.server.kafka.replies import ReplyBatch, Slot
from tests.partition.fake_replica import FakeClock
from tests.server.kafka.ports import NoReplicas, client_port
from tests.server.kafka.waiting import wait_for


def begin(frame: memoryview, slot: Slot, _connection: Connection) -> None:
    slot.answer((struct.pack(">i", 4), bytes(frame[4:8])))


@asynccontextmanager
async def listening(limits: Limits | None = None) -> AsyncIterator[tuple[ClientPort, int]]:
    port = client_port(begin, limits or Limits(), ServerCounts())
    sock = open_listen_socket("127.0.0.1", 0)
    async with trio.open_nursery() as nursery:
        await nursery.start(port.serve, [Listening(sock)])
        yield port, sock.getsockname()[1]
        nursery.cancel_scope.cancel()
    assert port.connections == {}
    assert port.metrics.connections == 0


async def call(stream: trio.SocketStream) -> bytes:
    await stream.send_all(struct.pack(">ihhi", 8, 3, 0, 7))
    data = b""
    while len(data) < 8:
        piece = await stream.receive_some()
        if not piece:
            return data
        data += piece
    return data


async def test_serves_many() -> None:
    async with listening() as (port, number):
        streams = [await trio.open_tcp_stream("127.0.0.1", number) for _ in range(20)]
        for stream in streams:
            assert await call(stream) == struct.pack(">ii", 4, 7)
        assert port.metrics.connections == 20
        for stream in streams:
            await stream.aclose()


async def test_connections_above_the_limit_are_closed() -> None:
    async with listening(Limits(connections_max=2)) as (port, number):
        first = await trio.open_tcp_stream("127.0.0.1", number)
        second = await trio.open_tcp_stream("127.0.0.1", number)
        assert await call(first)
        assert await call(second)
        third = await trio.open_tcp_stream("127.0.0.1", number)
        with trio.fail_after(30):
            assert await third.receive_some() == b""
        assert port.metrics.connections_refused == 1
        await first.aclose()
        with trio.fail_after(30):
            while port.metrics.connections == 2:
                await trio.testing.wait_all_tasks_blocked()
            fourth = await trio.open_tcp_stream("127.0.0.1", number)
            assert await call(fourth)
        for stream in (second, third, fourth):
            await stream.aclose()


class Scarce:
    """A listening socket whose process runs out of descriptors, once."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.errors = [errno.EMFILE, errno.ECONNABORTED, errno.ENFILE]

    def accept(self) -> tuple[socket.socket, object]:
        if self.errors:
            raise OSError(self.errors.pop(0), "scarce")
        return self._sock.accept()

    def fileno(self) -> int:
        return self._sock.fileno()

    def setblocking(self, flag: bool) -> None:
        self._sock.setblocking(flag)

    def close(self) -> None:
        self._sock.close()


async def test_shortage_of_descriptors_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raftmq.server.kafka.listener.ACCEPT_RETRY_S", 0.001)
    port = client_port(begin, Limits(), ServerCounts())
    sock = open_listen_socket("127.0.0.1", 0)
    scarce: Any = Scarce(sock)
    pace = TokenBucket(lambda: 0.0, 0, 0)
    async with port.served() as nursery:
        nursery.start_soon(port._accept_forever, Listening(scarce), pace)
        with trio.fail_after(30):
            stream = await trio.open_tcp_stream("127.0.0.1", sock.getsockname()[1])
            assert await call(stream)
        await stream.aclose()
        nursery.cancel_scope.cancel()
    assert scarce.errors == []
    sock.close()


async def test_hang_up_all() -> None:
    async with listening() as (port, number):
        stream = await trio.open_tcp_stream("127.0.0.1", number)
        assert await call(stream)
        port.hang_up_all()
        with trio.fail_after(30):
            assert await stream.receive_some() == b""
        await stream.aclose()


# ---- the pieces ----


async def test_deadlines_pass_in_order(autojump_clock: trio.testing.MockClock) -> None:
    class Clock:
        def monotonic_ms(self) -> float:
            return trio.current_time() * 1000

        def wall_ms(self) -> int:
            return 0

    deadlines = Deadlines(Clock())
    seen: list[str] = []
    async with trio.open_nursery() as nursery:
        await nursery.start(run_deadlines, deadlines, Clock())
        deadlines.after(500, lambda: seen.append("late"))
        await trio.testing.wait_all_tasks_blocked()
        deadlines.after(100, lambda: seen.append("early"))
        cancelled = deadlines.after(50, lambda: seen.append("never"))
        cancelled.cancel()
        cancelled.cancel()
        await trio.sleep(0.2)
        assert seen == ["early"]
        await trio.sleep(0.4)
        assert seen == ["early", "late"]
        assert len(deadlines) == 0
        nursery.cancel_scope.cancel()


def test_dead_deadlines_do_not_pile_up() -> None:
    deadlines = Deadlines(FakeClock())
    keep = deadlines.after(10_000, lambda: None)
    for _ in range(10_000):
        deadlines.after(5_000, lambda: None).cancel()
    assert len(deadlines._heap) < 3_000
    assert len(deadlines) == 1
    keep.cancel()


async def test_workers_bound_their_threads() -> None:
    workers = Workers(2)
    running = 0
    most = 0

    def work() -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        running -= 1
        return 7

    promises = [workers.submit(work) for _ in range(10)]

    def fail() -> None:
        raise ValueError("why")

    bad = workers.submit(fail)
    with trio.fail_after(30):
        results = [await wait_for(promise) for promise in promises]
        with pytest.raises(ValueError, match="why"):
            await wait_for(bad)
    assert results == [7] * 10
    assert most <= 2


def test_a_flood_of_log_lines_is_counted() -> None:
    lines: list[dict[str, object]] = []

    class Log:
        def warning(self, event: str, **fields: object) -> None:
            lines.append({"event": event, **fields})

    now = 0.0
    log = RateLimitedLog(Log(), lambda: now)
    for _ in range(LINES_MAX + 7):
        log.warning("bad", why="x")
    assert len(lines) == LINES_MAX
    now = 11.0
    log.warning("bad", why="x")
    assert lines[-1] == {"event": "bad", "why": "x", "left_out": 7}


def test_answers_gather_while_replicas_drain() -> None:
    class Queue:
        flushes = 0

        def flush(self) -> None:
            self.flushes += 1

    batch, queue = ReplyBatch(NoReplicas()), Queue()
    assert not batch.is_open
    with batch.together():
        assert batch.is_open
        batch.hold(queue)
        batch.hold(queue)
        with batch.together():
            batch.hold(queue)
        assert queue.flushes == 0
    assert queue.flushes == 1


async def test_a_port_that_drains_answers_what_it_began_and_hangs_up_cleanly() -> None:
    held: list[Slot] = []

    def hold(_frame: memoryview, slot: Slot, _connection: Connection) -> None:
        held.append(slot)

    port = client_port(hold, Limits(pipeline_depth_max=2), ServerCounts())
    sock = open_listen_socket("127.0.0.1", 0)
    number = sock.getsockname()[1]
    request = struct.pack(">ihhi", 8, 3, 0, 7)
    async with trio.open_nursery() as nursery:
        await nursery.start(port.serve, [Listening(sock)])
        idle = await trio.open_tcp_stream("127.0.0.1", number)
        busy = await trio.open_tcp_stream("127.0.0.1", number)
        await busy.send_all(request * 3)  # the third is not begun: the pipeline is full
        with trio.fail_after(30):
            while len(held) < 2 or len(port.connections) < 2:
                await trio.lowlevel.checkpoint()
        is_drained = trio.Event()
        told: list[int] = []

        async def drain() -> None:
            await port.drain(lambda: told.append(len(held)))
            is_drained.set()

        nursery.start_soon(drain)
        assert await idle.receive_some() == b"", "nothing is owed to it"
        await idle.aclose()
        assert told == [2], "what only waits is let go"
        with pytest.raises(OSError, match="all attempts to connect"):
            await trio.open_tcp_stream("127.0.0.1", number)
        assert not is_drained.is_set()
        for slot in held:
            slot.answer((b"answer",))
        data = b""
        while piece := await busy.receive_some():
            data += piece
        assert data == b"answer" * 2, "no reset took the answers along"
        assert len(held) == 2, "no request is begun any more"
        await busy.aclose()
        await is_drained.wait()
        assert port.connections == {}
        nursery.cancel_scope.cancel()


async def test_draining_an_empty_port_is_quick() -> None:
    async with listening() as (port, _number):
        with trio.fail_after(30):
            await port.drain(lambda: None)
