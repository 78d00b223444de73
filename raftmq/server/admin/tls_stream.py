"""An encrypted connection to the admin port, with what Hypercorn asks of a trio stream.

Handshakes are made in worker threads, as at all ports: trio's own TLS would make them on the loop.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Final

import trio

from raftmq.runtime.certificates import ServerTls, subject
from raftmq.runtime.handshake import HandshakeError, say_why, shake
from raftmq.runtime.tls import TlsSocket
from raftmq.server.audit import Audit, AuditOutcome, Who
from raftmq.tls import TlsLayer

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

    async def encrypted(self, stream: trio.SocketStream, host: str) -> TlsStream | None:
        """The connection from `host` with TLS; None, and it is closed, where that fails."""
        sock = socket.socket(fileno=stream.socket.detach())
        sock.setblocking(False)
        found: TlsStream | None = None
        try:
            with trio.move_on_after(HANDSHAKE_S), suppress(EOFError, OSError):
                layer = TlsLayer(self._tls.context, is_server=True)
                try:
                    found = TlsStream(sock, await shake(sock, layer, self._limiter))
                except HandshakeError as error:
                    if error.is_about_certificates:
                        who = Who(None, host, self._tls.name)
                        failed = AuditOutcome.FAILED
                        self._audit.authentication(who, "certificate", failed, why=str(error))
                    await say_why(sock, error.layer)
        finally:
            if found is None:
                sock.close()
        return found
