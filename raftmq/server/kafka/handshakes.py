"""TLS handshakes of clients: off the loop, few at a time, none for ever.

A handshake costs the processor a millisecond and more, the loop none of it: two worker threads
make them, in the order in which clients send what they need. A client is half open until its
handshake is over. So many may be that, and whoever comes beyond makes the one that has been waited
for longest give way: a flood of silent ones costs those that are as slow as it, not those that go
on, nor those that a thread keeps waiting. What a client does wrong is said to it (an alert),
counted by its kind, logged, and costs this connection alone.

Knows nothing of requests: a connection is handed on when its handshake is over.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

import structlog
import trio

from raftmq.logs import RateLimitedLog
from raftmq.runtime.handshake import HalfOpen, HandshakeError, say_why, shake
from raftmq.server.audit import Audit, AuditOutcome, Who
from raftmq.server.kafka.counts import ServerCounts
from raftmq.tls import TlsLayer

HALF_OPEN_MAX: Final = 256
HANDSHAKE_S: Final = 10.0
"""A client has this long for all of it."""
THREADS: Final = 2
CERTIFICATE: Final = "certificate"
"""How a client authenticates here, and one of the ways to fail."""

_log = RateLimitedLog(structlog.get_logger("raftmq.server"))


class Contexts(Protocol):
    """Gives the context for a connection that begins now."""

    @property
    def context(self) -> ssl.SSLContext: ...


class Handshakes:
    """The clients of a port that are half open."""

    def __init__(
        self, metrics: ServerCounts, failed: Callable[[Exception, str], None], audit: Audit
    ) -> None:
        """`failed` is told of a bug of ours, and of the client that met it."""
        self._metrics = metrics
        self._failed = failed
        self._audit = audit
        self._half_open = HalfOpen()
        self._limiter = trio.CapacityLimiter(THREADS)
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._half_open)

    def close(self) -> None:
        """Hang up on all of them, and on whoever comes."""
        self._is_closed = True
        self._half_open.cancel_all()

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
        layer: TlsLayer | None = None
        why = "timeout"
        try:
            with trio.move_on_after(HANDSHAKE_S) as scope:
                number = self._enter(scope)
                try:
                    begun = TlsLayer(contexts.context, is_server=True)
                    turn = partial(self._half_open.turn, number)
                    layer = await shake(sock, begun, self._limiter, turn)
                except (EOFError, OSError):
                    why = "closed"
                except HandshakeError as error:
                    why = CERTIFICATE if error.is_about_certificates else "protocol"
                    if error.is_about_certificates:
                        who = Who(None, peer.rpartition(":")[0], listener)
                        failed = AuditOutcome.FAILED
                        self._audit.authentication(who, CERTIFICATE, failed, why=str(error))
                    _log.warning(
                        "TLS handshake failed", peer=peer, listener=listener, why=str(error)
                    )
                    await say_why(sock, error.layer)
                except Exception as error:  # noqa: BLE001 - a bug of ours costs this connection alone
                    why = "bug"
                    self._failed(error, peer)
            gave_way = self._half_open.leave(number)
            if self._is_closed:
                layer = None
            elif layer is not None:
                self._metrics.handshakes += 1
            else:
                self._metrics.fail_handshake("half_open_max" if gave_way else why)
        finally:
            self._half_open.leave(number)
            if layer is None:
                trio.lowlevel.notify_closing(sock)
                sock.close()
            is_over(layer)

    def _enter(self, scope: trio.CancelScope) -> int:
        if self._is_closed:
            scope.cancel()
        number, _ = self._half_open.enter(scope, HALF_OPEN_MAX)
        return number
