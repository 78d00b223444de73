"""Wires on trio: `recv_into` in one task, direct non-blocking sends, another task for full sockets.

Owns a socket and the bytes not yet written to it. The writing task sleeps unless the socket is
full, so a request leaves without a switch of tasks.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Final

import trio

from raftmq.types import Buffer
from raftmq_client.aio.wires import UNREACHABLE, Sink, say

_SEND_PIECES_MAX: Final = 64


class TrioBackend:
    """trio's clock and sockets."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()

    def now(self) -> float:
        """The loop's monotonic seconds."""
        return trio.current_time()

    def is_current(self) -> bool:
        """True in the event loop that this was made in."""
        try:
            return trio.lowlevel.current_trio_token() is self._token
        except RuntimeError:
            return False

    def tasks(self) -> TrioTasks:
        """Tasks for one client."""
        return TrioTasks()

    async def dial(self, host: str, port: int, sink: Sink) -> TrioWire:
        """Connect."""
        failure: Exception = OSError(f"{host} has no address")
        for family, kind, protocol, _, address in await trio.socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        ):
            sock = socket.socket(family, kind, protocol)
            wrapped = trio.socket.from_stdlib_socket(sock)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await wrapped.connect(address)
            except UNREACHABLE as error:
                wrapped.close()
                failure = error
            except BaseException:
                wrapped.close()
                raise
            else:
                return TrioWire(sock, wrapped, sink)
        raise failure


class TrioTasks:
    """A nursery around the caller's block."""

    is_free = False

    def __init__(self) -> None:
        self._manager = trio.open_nursery()
        self._nursery: trio.Nursery | None = None

    async def begin(self) -> None:
        """Open the nursery, in the caller's task."""
        self._nursery = await self._manager.__aenter__()

    def start_soon(self, function: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Start one more."""
        assert self._nursery is not None
        self._nursery.start_soon(function, *args)

    async def end(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        """Cancel all of them and close the nursery.

        An error of the caller's own block is left to him as it is, in no group; only a
        cancellation passes through the nursery, which must see its own.
        """
        assert self._nursery is not None
        self._nursery.cancel_scope.cancel()
        if kind is not None and issubclass(kind, trio.Cancelled):
            return await self._manager.__aexit__(kind, error, trace)
        await self._manager.__aexit__(None, None, None)
        return None


class TrioWire:
    """One connected socket."""

    def __init__(self, sock: socket.socket, wrapped: trio.socket.SocketType, sink: Sink) -> None:
        self._socket = sock
        self._wrapped = wrapped
        self._sink = sink
        self._out: deque[Buffer] = deque()
        self._is_full = False
        self._became_full = trio.Event()
        self._scope = trio.CancelScope()

    def write(self, pieces: Sequence[Buffer]) -> None:
        """Send these in order, or keep them until there is room; never waits."""
        self._out.extend(pieces)
        if not self._is_full:
            self._push()

    def close(self) -> None:
        """Close the socket; `run` ends."""
        self._scope.cancel()
        self._wrapped.close()

    async def run(self) -> None:
        """Move bytes until the connection ends or is closed; the end is told to the sink."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write_when_there_is_room)
                await self._read()
                nursery.cancel_scope.cancel()

    async def closed(self) -> None:
        """A socket of trio is closed at once."""
        await trio.lowlevel.checkpoint()

    async def _read(self) -> None:
        sink, receive = self._sink, self._wrapped.recv_into
        while True:
            try:
                count = await receive(sink.buffer())
            except OSError as error:
                sink.lost(say(error))
                return
            sink.received(count)
            if count == 0:
                return

    async def _write_when_there_is_room(self) -> None:
        while True:
            await self._became_full.wait()
            self._became_full = trio.Event()
            while self._is_full:
                await trio.lowlevel.wait_writable(self._socket)
                self._is_full = False
                self._push()

    def _push(self) -> None:
        out = self._out
        try:
            while out:
                pieces = [out[i] for i in range(min(len(out), _SEND_PIECES_MAX))]
                consume(out, self._socket.sendmsg(pieces))
        except BlockingIOError:
            self._is_full = True
            self._became_full.set()
        except OSError as error:
            out.clear()
            self._sink.lost(say(error))


def consume(out: deque[Buffer], count: int) -> None:
    """Drop `count` written bytes from the head of the queue."""
    while out:
        size = len(out[0])
        if size > count:
            if count:
                out[0] = memoryview(out[0])[count:]
            return
        out.popleft()  # also a piece of no bytes, such as the body of ApiVersions v0
        count -= size


def make_backend() -> TrioBackend:
    """What `current_backend` looks for."""
    return TrioBackend()
