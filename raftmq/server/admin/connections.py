"""The open connections of the admin port: how many there may be, and which one gives way.

A port that is full of silent connections must not shut out an operator. So beyond the bound a new
one takes the place of another at which this node does nothing: one whose handshake or request is
not complete, that rests between two requests, or that does not read its answer. Of those it is the
oldest one of the address that has most, so that a flood of one address costs that address alone.
Where this node works for all of them the new one is refused.

A connection whose client showed a certificate ends once that is revoked, whatever this node does
for it: what was asked may have been done then.

Encrypted ones have what Hypercorn asks of a trio stream (`TlsStream`). Their handshakes are made in
worker threads, as at all ports: trio's own TLS would make them on the loop.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any, Final

import trio
from attrs import define, field

from raftmq.runtime.certificates import Revoked, ServerTls, subject
from raftmq.runtime.handshake import HandshakeError, say_why, shake
from raftmq.runtime.tls import TlsSocket
from raftmq.server.audit import Audit, AuditOutcome, Who
from raftmq.tls import TlsLayer

CONNECTIONS_MAX: Final = 100
"""At a time, so that nobody takes the descriptors of the node here."""
ENDING_MAX: Final = 16
"""So many connections at most are told to end and have not ended yet, beyond the bound."""


@define(eq=False)
class OpenConnection:
    """One connection.

    Attributes:
        host: the address that it came from.
        is_busy: this node works on a request of it.
        certificate: that its client showed (DER); None: it showed none, or not yet.
        scope: in which it is served; cancelled when it gives way, or its certificate is revoked.
    """

    host: str
    is_busy: bool = False
    certificate: bytes | None = field(default=None, repr=False)
    scope: trio.CancelScope = field(factory=trio.CancelScope)

    def working(self, app: Any) -> Any:
        """The same pages; what waits for the client is no work."""

        async def serve_one(scope: Any, receive: Any, send: Any) -> None:
            async def receive_idly() -> Any:
                self.is_busy = False
                try:
                    return await receive()
                finally:
                    self.is_busy = True

            async def send_idly(message: Any) -> None:
                self.is_busy = False
                try:
                    await send(message)
                finally:
                    self.is_busy = True

            self.is_busy = True
            try:
                await app(scope, receive_idly, send_idly)
            finally:
                self.is_busy = False

        return serve_one


class OpenConnections:
    """All of a port."""

    def __init__(self, connections_max: int = CONNECTIONS_MAX) -> None:
        self._connections_max = connections_max
        self._open: dict[OpenConnection, None] = {}  # the oldest first
        self._ending: set[OpenConnection] = set()
        self.gave_way = 0
        self.refused = 0

    def __len__(self) -> int:
        return len(self._open) + len(self._ending)

    @property
    def is_full(self) -> bool:
        """True while a new one takes the place of another, or is refused."""
        return len(self._open) >= self._connections_max

    def enter(self, host: str) -> OpenConnection | None:
        """A connection from there; None when there is no room for it."""
        if self.is_full and not self._make_room():
            self.refused += 1
            return None
        connection = OpenConnection(host)
        self._open[connection] = None
        return connection

    def leave(self, connection: OpenConnection) -> None:
        """It is closed."""
        self._open.pop(connection, None)
        self._ending.discard(connection)

    def end_revoked(self, revoked: Revoked) -> int:
        """End those whose certificates are good no more; how many."""
        ended = [one for one in self._open if revoked.has(one.certificate)]
        for one in ended:
            del self._open[one]
            self._ending.add(one)
            one.scope.cancel()
        return len(ended)

    def _make_room(self) -> bool:
        idle = [one for one in self._open if not one.is_busy]
        if not idle or len(self._ending) >= ENDING_MAX:
            return False
        of_host: dict[str, int] = {}
        for one in self._open:
            of_host[one.host] = of_host.get(one.host, 0) + 1
        oldest = max(idle, key=lambda one: of_host[one.host])  # the first of equals
        del self._open[oldest]
        self._ending.add(oldest)
        oldest.scope.cancel()
        self.gave_way += 1
        return True


HANDSHAKE_S: Final = 10.0
THREADS: Final = 2


class TlsStream:
    """One connection whose handshake is over."""

    def __init__(self, sock: socket.socket, layer: TlsLayer) -> None:
        self.socket = sock
        shown = layer.peer_certificate
        self.subject = None if shown is None else subject(shown)
        """Of the certificate that the client showed, which was verified then; None: it did not."""
        self._hidden = TlsSocket(sock, layer)

    async def send_all(self, data: bytes) -> None:
        """Send all of it.

        Raises:
            trio.BrokenResourceError, trio.ClosedResourceError: that cannot be.
        """
        rest = memoryview(data)
        while rest:
            self._check_open()
            try:
                rest = rest[self._hidden.send(rest) :]
                await trio.lowlevel.checkpoint()  # a mebibyte was encrypted
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self.socket)
            except OSError as error:
                raise trio.BrokenResourceError(str(error)) from error

    async def receive_some(self, bytes_max: int) -> bytes:
        """What there is, at least a byte; nothing at the end.

        Raises:
            trio.BrokenResourceError, trio.ClosedResourceError: that cannot be.
        """
        buffer = memoryview(bytearray(bytes_max))
        await trio.lowlevel.checkpoint()  # whoever never stops sending leaves the loop to others
        while True:
            self._check_open()
            try:
                return bytes(buffer[: self._hidden.recv_into(buffer)])
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self.socket)
            except OSError as error:
                raise trio.BrokenResourceError(str(error)) from error

    def _check_open(self) -> None:
        if self.socket.fileno() < 0:
            raise trio.ClosedResourceError

    async def aclose(self) -> None:
        """Close it; whoever waits for it is told."""
        if self.socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self.socket)
            self._hidden.close()
        await trio.lowlevel.checkpoint()


class AdminHandshakes:
    """Makes connections encrypted."""

    def __init__(self, tls: ServerTls, audit: Audit) -> None:
        self._tls = tls
        self._audit = audit
        self._limiter = trio.CapacityLimiter(THREADS)

    async def encrypted(
        self, stream: trio.SocketStream, connection: OpenConnection
    ) -> TlsStream | None:
        """The connection with TLS; None, and it is closed, where that fails. From here on it ends
        with the certificate that was shown."""
        sock = socket.socket(fileno=stream.socket.detach())
        sock.setblocking(False)
        found: TlsStream | None = None
        try:
            with trio.move_on_after(HANDSHAKE_S), suppress(EOFError, OSError):
                layer = TlsLayer(self._tls.context, is_server=True)
                try:
                    layer = await shake(sock, layer, self._limiter)
                except HandshakeError as error:
                    if error.is_about_certificates:
                        self._tell(connection, str(error))
                    await say_why(sock, error.layer)
                    return None
                if self._tls.revoked.has(layer.peer_certificate):
                    self._tell(connection, "its certificate was revoked since the handshake began")
                    return None
                connection.certificate = layer.peer_certificate
                found = TlsStream(sock, layer)
        finally:
            if found is None:
                sock.close()
        return found

    def _tell(self, connection: OpenConnection, why: str) -> None:
        who = Who(None, connection.host, self._tls.name)
        self._audit.authentication(who, "certificate", AuditOutcome.FAILED, why=why)
