"""TLS handshakes of clients: off the loop, few at a time, none for ever.

A handshake costs the processor a millisecond and more, the loop none of it: two worker threads
make them, in the order in which clients send what they need. A client is half open until its
handshake is over. So many may be that, and whoever comes beyond makes the oldest one give way: a
flood of silent ones costs those that are as slow as it, not those that go on. What
a client does wrong is said to it (an alert), counted by its kind, logged, and costs this connection
alone.

Knows nothing of requests: a connection is handed on when its handshake is over.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

import structlog
import trio

from raftmq.errors import RaftmqError, RemoteProtocolError
from raftmq.logs import RateLimitedLog
from raftmq.runtime.sockets import recv_into
from raftmq.server.kafka.counts import ServerCounts
from raftmq.tls import TlsLayer

HALF_OPEN_MAX: Final = 256
HANDSHAKE_S: Final = 10.0
"""A client has this long for all of it."""
THREADS: Final = 2
HELLO_BYTES_MAX: Final = 256 << 10
"""A client's chain of certificates is smaller by far."""
PART_S: Final = 0.1
"""How long a client that was refused has to hear why."""
_PIECE_BYTES: Final = 16 << 10
_RECORD_HEAD_BYTES: Final = 5
_HANDSHAKE_RECORD: Final = 22

_log = RateLimitedLog(structlog.get_logger("raftmq.server"))


class HandshakeError(RaftmqError):
    """A handshake cannot go on; `layer` may still have to say why."""

    def __init__(self, layer: TlsLayer, why: RemoteProtocolError) -> None:
        super().__init__(str(why))
        self.layer = layer
        self.why = why


class Contexts(Protocol):
    """Gives the context for a connection that begins now."""

    @property
    def context(self) -> ssl.SSLContext: ...


class Handshakes:
    """The clients of a port that are half open."""

    def __init__(self, metrics: ServerCounts, failed: Callable[[Exception, str], None]) -> None:
        """`failed` is told of a bug of ours, and of the client that met it."""
        self._metrics = metrics
        self._failed = failed
        self._half_open: dict[int, trio.CancelScope] = {}
        self._evicted: set[int] = set()
        self._next_id = 0
        self._limiter = trio.CapacityLimiter(THREADS)
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._half_open)

    def close(self) -> None:
        """Hang up on all of them, and on whoever comes."""
        self._is_closed = True
        for scope in self._half_open.values():
            scope.cancel()

    async def run(
        self,
        sock: socket.socket,
        contexts: Contexts,
        listener: str,
        peer: str,
        is_over: Callable[[TlsLayer | None], None],
    ) -> None:
        """Make one handshake, then call `is_over`: with the layer, or with None once the socket is
        closed. Lets out no exception but the loop's own."""
        self._next_id += 1
        number = self._next_id
        layer: TlsLayer | None = None
        why = "timeout"
        try:
            with trio.move_on_after(HANDSHAKE_S) as scope:
                self._enter(number, scope)
                try:
                    layer = await self._shake(sock, contexts)
                except (EOFError, OSError):
                    why = "closed"
                except HandshakeError as error:
                    why = _kind(error)
                    _log.warning(
                        "TLS handshake failed", peer=peer, listener=listener, why=str(error)
                    )
                    await _say_why(sock, error.layer)
                except Exception as error:  # noqa: BLE001 - a bug of ours costs this connection alone
                    why = "bug"
                    self._failed(error, peer)
            if self._is_closed:
                layer = None
            elif layer is not None:
                self._metrics.handshakes += 1
            else:
                self._metrics.fail_handshake("half_open_max" if number in self._evicted else why)
        finally:
            del self._half_open[number]
            self._evicted.discard(number)
            if layer is None:
                trio.lowlevel.notify_closing(sock)
                sock.close()
            is_over(layer)

    def _enter(self, number: int, scope: trio.CancelScope) -> None:
        if self._is_closed:
            scope.cancel()
        elif len(self._half_open) - len(self._evicted) >= HALF_OPEN_MAX:
            oldest = next(each for each in self._half_open if each not in self._evicted)
            self._evicted.add(oldest)
            self._half_open[oldest].cancel()
        self._half_open[number] = scope

    async def _shake(self, sock: socket.socket, contexts: Contexts) -> TlsLayer:
        """Go on until the handshake is over, and all that it says is with the kernel.

        Raises:
            EOFError, OSError: the client went.
            HandshakeError: no TLS, too much of it, or nobody who is trusted.
        """
        layer = TlsLayer(contexts.context, is_server=True)
        piece = memoryview(bytearray(_PIECE_BYTES))
        records = _Records()
        while not layer.is_ready:
            count = await recv_into(sock, piece)
            layer.feed(piece[:count])
            try:
                # Before there is nothing to do: bytes that come one by one cost no thread.
                if records.came(piece[:count]):
                    await trio.to_thread.run_sync(layer.shake, limiter=self._limiter)
            except RemoteProtocolError as error:
                raise HandshakeError(layer, error) from error
            await _send_all(sock, layer)
        return layer


class _Records:
    """Where the records of TLS end in what came."""

    def __init__(self) -> None:
        self._came = 0
        self._head = bytearray()  # of a record, as far as it came
        self._left = 0  # bytes of the present record's body that are still to come

    def came(self, data: memoryview) -> bool:
        """Take note of what came; True when a record is complete by it.

        Raises:
            RemoteProtocolError: too much, or it does not begin like a handshake.
        """
        if not self._came and data[0] != _HANDSHAKE_RECORD:
            raise RemoteProtocolError("TLS: not a handshake; the client may speak plain")
        self._came += len(data)
        if self._came > HELLO_BYTES_MAX:
            raise RemoteProtocolError(f"TLS: more than {HELLO_BYTES_MAX} bytes of a handshake")
        position, is_complete = 0, False
        while position < len(data):
            if not self._left:
                self._head.append(data[position])
                position += 1
                if len(self._head) < _RECORD_HEAD_BYTES:
                    continue
                self._left = int.from_bytes(self._head[3:], "big")
                self._head.clear()
            step = min(self._left, len(data) - position)
            self._left -= step
            position += step
            is_complete = is_complete or not self._left
        return is_complete


def _kind(error: HandshakeError) -> str:
    """What went wrong, as a label of few values."""
    reason = getattr(error.why.__cause__, "reason", None) or ""
    if "CERTIFICATE" in reason or "UNKNOWN_CA" in reason:
        return "certificate"
    return "protocol"


async def _send_all(sock: socket.socket, layer: TlsLayer) -> None:
    for piece in layer.outgoing():
        rest = memoryview(piece)
        while len(rest):
            try:
                rest = rest[sock.send(rest) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(sock)


async def _say_why(sock: socket.socket, layer: TlsLayer) -> None:
    """Send the alert, and let the client hear it: closing with bytes unread would destroy it."""
    with trio.move_on_after(PART_S), suppress(OSError, EOFError):
        await _send_all(sock, layer)
        sock.shutdown(socket.SHUT_WR)
        piece = memoryview(bytearray(_PIECE_BYTES))
        while True:
            await recv_into(sock, piece)
