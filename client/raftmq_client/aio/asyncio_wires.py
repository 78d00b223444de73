"""Wires on asyncio: a `BufferedProtocol`, so bytes are received in place and no stream copies them.

Owns a transport. The loop calls the sink itself; `run` merely waits for the end.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from raftmq.types import Buffer
from raftmq_client.aio.wires import Sink, say

_JOINED_BYTES_MAX: Final = 16 * 1024


class AsyncioBackend:
    """asyncio's clock and transports."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def now(self) -> float:
        """The loop's monotonic seconds."""
        return self._loop.time()

    def is_current(self) -> bool:
        """True in the event loop that this was made in."""
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def tasks(self) -> AsyncioTasks:
        """Tasks for one client."""
        return AsyncioTasks()

    async def dial(self, host: str, port: int, sink: Sink) -> AsyncioWire:
        """Connect."""
        _, protocol = await self._loop.create_connection(lambda: AsyncioWire(sink), host, port)
        return protocol


class AsyncioTasks:
    """Plain tasks: a task group would belong to the task that entered it, and so would the client.

    Test fixtures, and the startup and shutdown of servers, run in tasks of their own.
    """

    is_free = True

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self) -> None:
        """There is nothing to prepare."""

    def start_soon(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """Start one more."""
        task = asyncio.get_running_loop().create_task(function(*args))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self, *_error: object) -> None:
        """Cancel all of them and wait for their ends."""
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


class AsyncioWire(asyncio.BufferedProtocol):
    """One connection, the protocol of its transport."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._transport: asyncio.Transport | None = None
        self._ended = asyncio.Event()

    def write(self, pieces: Sequence[Buffer]) -> None:
        """Send these in order, or keep them until there is room; never waits."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if sum(len(piece) for piece in pieces) <= _JOINED_BYTES_MAX:
            transport.write(b"".join(pieces))
            return
        for piece in pieces:  # large ones leave uncopied where the socket takes them
            if len(piece):
                transport.write(piece)

    def close(self) -> None:
        """Close the socket; `run` ends."""
        if self._transport is not None:
            self._transport.abort()

    async def run(self) -> None:
        """Wait until the connection ends or is closed; the end is told to the sink."""
        await self._ended.wait()

    async def closed(self) -> None:
        """Wait for the loop's last word about the transport."""
        await self._ended.wait()

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket stands."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def get_buffer(self, _size_hint: int) -> memoryview:
        """Where the next bytes go."""
        return self._sink.buffer()

    def buffer_updated(self, count: int) -> None:
        """Bytes came."""
        self._sink.received(count)

    def eof_received(self) -> None:
        """The other side closed."""
        self._sink.received(0)

    def connection_lost(self, error: Exception | None) -> None:
        """The transport is gone."""
        self._transport = None
        self._ended.set()
        reason = say(error) if isinstance(error, OSError) else str(error or "closed")
        self._sink.lost(reason)


def make_backend() -> AsyncioBackend:
    """What `current_backend` looks for."""
    return AsyncioBackend()
