"""The client port: accepts connections by all listeners, bounds their number, hangs up on stalled
ones.

Running out of file descriptors must not end the port nor spin: the loop waits and accepts again.
A connection above the limit is accepted and closed, so that the client sees an end, not a hang.
Where a listener has TLS, a connection is handed on when its handshake is over (`Handshakes`).
"""

from __future__ import annotations

import errno
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final, Protocol, TypeAlias

import structlog
import trio
from attrs import evolve, frozen

from raftmq.config import PLAINTEXT
from raftmq.logs import RateLimitedLog
from raftmq.principals import DEFAULT_RULES, PrincipalMapper, read_mapping_rules
from raftmq.runtime.certificates import Revoked, subject
from raftmq.runtime.handshake import HalfOpen, HandshakeError, say_why, shake
from raftmq.runtime.loop import LoopBudget
from raftmq.runtime.tls import TlsSocket
from raftmq.server.audit import Audit, AuditOutcome, Who
from raftmq.server.kafka.authentication import Authentication, Authenticator, Caller
from raftmq.server.kafka.connection import Begin, Connection, Shared, TlsConnection
from raftmq.server.kafka.counts import ServerCounts
from raftmq.server.kafka.limits import Limits, RequestMemory, TokenBucket, canonical_host
from raftmq.server.kafka.replies import Drains, ReplyBatch
from raftmq.tls import TlsLayer

HALF_OPEN_MAX: Final = 256
HANDSHAKE_S: Final = 10.0
"""A client has this long for all of it."""
HANDSHAKE_THREADS: Final = 2
CERTIFICATE: Final = "certificate"
"""How a client authenticates here, and one of the ways to fail."""


class Contexts(Protocol):
    """Gives the context for a connection that begins now, and says which certificates are good no
    more."""

    @property
    def context(self) -> ssl.SSLContext: ...
    @property
    def revoked(self) -> Revoked: ...


class Handshakes:
    """The clients of a port that are half open: their handshake is not over.

    A handshake costs the processor a millisecond and more, the loop none of it: two worker threads
    make them, in the order in which clients send what they need. So many clients may be half open,
    and whoever comes beyond makes the one that has been waited for longest give way: a flood of
    silent ones costs those that are as slow as it, not those that go on, nor those that a thread
    keeps waiting. What a client does wrong is said to it (an alert), counted by its kind, logged,
    and costs this connection alone. Knows nothing of requests.
    """

    def __init__(
        self, metrics: ServerCounts, failed: Callable[[Exception, str], None], audit: Audit
    ) -> None:
        """`failed` is told of a bug of ours, and of the client that met it."""
        self._metrics = metrics
        self._failed = failed
        self._audit = audit
        self._half_open = HalfOpen()
        self._limiter = trio.CapacityLimiter(HANDSHAKE_THREADS)
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


BACKLOG: Final = 1024
ACCEPTS_PER_PASS: Final = 16
ACCEPT_RETRY_S: Final = 0.1
SWEEP_S: Final = 1.0
LOCAL_SEND_BYTES: Final = 48 << 10
"""To a client of this machine nothing is on its way for long: a small buffer keeps the bytes in the
processor's cache, and the reader in step with the sender (a third of the CPU time per byte)."""
KEEP_ALIVE_IDLE_S: Final = 60
KEEP_ALIVE_INTERVAL_S: Final = 10
KEEP_ALIVE_PROBES: Final = 6

_OUT_OF_RESOURCES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_log = RateLimitedLog(structlog.get_logger("raftmq.server"))


def open_listen_socket(host: str, port: int) -> socket.socket:
    """Bind and listen, without a loop, so that a parent may do it before it forks.

    Raises:
        OSError: the address is taken or not ours.
    """
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


Connect: TypeAlias = Callable[[Callable[[], None], Caller], Connection]
"""connect(on_closed, caller): a connection on a socket of its own."""


@frozen(slots=True)
class Listening:
    """One listener of a node, and the socket by which it accepts."""

    sock: socket.socket
    name: str = PLAINTEXT
    tls: Contexts | None = None
    """Where every byte is encrypted."""
    mapper: PrincipalMapper = read_mapping_rules(DEFAULT_RULES)
    """Names clients by the subjects of their certificates."""


class ClientPort:
    """Accepts and keeps client connections."""

    def __init__(
        self,
        begin: Begin,
        limits: Limits,
        metrics: ServerCounts,
        *,
        drains: Drains,
        memory: RequestMemory,
        budget: LoopBudget,
        pause: Callable[[float], Awaitable[None]],
        audit: Audit,
        authenticators: Mapping[str, Authenticator] | None = None,
    ) -> None:
        """`pause` waits for about so many seconds, between two looks at all connections.
        `authenticators`: of the listeners with SASL, by name."""
        self.limits = limits
        self.metrics = metrics
        self.shared = Shared(begin, limits, metrics, ReplyBatch(drains), memory, budget)
        self.connections: dict[int, Connection] = {}
        self.handshakes = Handshakes(metrics, self.shared.failed, audit)
        self._audit = audit
        self._hosts: dict[str, int] = {}  # open and half open ones by the address they came from
        self._authenticators = {} if authenticators is None else authenticators
        self._next_id = 0
        self._pause = pause
        self._accepting = trio.CancelScope()
        self._emptied = trio.Event()

    async def serve(
        self,
        listening: Sequence[Listening],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept until cancelled; closes the listening sockets and every connection then."""
        for listener in listening:
            listener.sock.setblocking(False)
        rate = self.limits.connection_creation_rate_max
        pace = TokenBucket(lambda: trio.current_time() * 1e3, rate, rate)
        try:
            async with self.served() as nursery:
                nursery.start_soon(self._sweep)
                task_status.started()
                with self._accepting:
                    async with trio.open_nursery() as accepting:
                        for listener in listening:
                            accepting.start_soon(self._accept_forever, listener, pace)
                _close_all(listening)
                await trio.sleep_forever()
        finally:
            _close_all(listening)

    @asynccontextmanager
    async def served(self) -> AsyncIterator[trio.Nursery]:
        """Connections are served within this; hangs up on all of them at its end."""
        shared = self.shared
        try:
            async with trio.open_nursery() as nursery:
                shared.nursery = nursery
                nursery.start_soon(shared.budget.run)
                nursery.start_soon(shared.readiness.run)
                try:
                    yield nursery
                finally:
                    # While the nursery is open: a connection may start a task as it closes.
                    self.hang_up_all()
                    nursery.cancel_scope.cancel()
        finally:
            shared.readiness.close()

    async def drain(self, answer_parked: Callable[[], None]) -> None:
        """Accept no connection, begin no request, answer those in hand, and hang up.

        `answer_parked` answers the requests that only wait for something to happen.
        """
        self._accepting.cancel()
        self.handshakes.close()
        for connection in list(self.connections.values()):
            connection.finish()
        answer_parked()
        self._emptied = trio.Event()
        if self.connections:
            await self._emptied.wait()

    def hang_up_all(self) -> None:
        """End every connection (the node stops)."""
        self.handshakes.close()
        for connection in list(self.connections.values()):
            connection.close()

    def end_revoked(self, listener: str, revoked: Revoked) -> int:
        """Hang up on clients of a listener whose certificates are good no more; how many."""
        ended = 0
        for connection in list(self.connections.values()):
            if not isinstance(connection, TlsConnection):
                continue
            if connection.caller.listener == listener and revoked.has(connection.certificate):
                connection.close()
                ended += 1
        return ended

    async def _accept_forever(self, listener: Listening, pace: TokenBucket) -> None:
        answered = 0
        listen_sock = listener.sock
        rate = self.limits.connection_creation_rate_max
        descriptors_max = (
            resource.getrlimit(resource.RLIMIT_NOFILE)[0] - self.limits.descriptors_reserved
        )
        while True:
            try:
                sock, address = listen_sock.accept()
            except (BlockingIOError, InterruptedError):
                await trio.lowlevel.wait_readable(listen_sock)
                continue
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    _log.error("cannot accept connections", why=error.strerror)
                    await trio.sleep(ACCEPT_RETRY_S)
                    continue
                if error.errno in (errno.EBADF, errno.EINVAL, errno.ENOTSOCK):
                    raise
                continue  # this one client is gone already (ECONNABORTED and its kin)
            self._take(sock, _peer_name(address), listener, descriptors_max)
            answered += 1
            if rate and (wait_ms := pace.wait_ms()):
                self.metrics.refuse("connection_creation_rate_max")
                await trio.sleep(wait_ms / 1e3)  # the kernel keeps the next ones
            elif answered % ACCEPTS_PER_PASS == 0:  # a flood must not hold the loop
                await trio.lowlevel.checkpoint()

    def _take(
        self, sock: socket.socket, peer: str, listener: Listening, descriptors_max: int
    ) -> None:
        """Serve a client that was accepted, or refuse it."""
        try:
            bound = self._full(sock, _host(peer), descriptors_max)
            if bound is None:
                if listener.tls is None:
                    self.adopt(sock, peer, listener.name)
                else:
                    self._begin_handshake(sock, peer, listener, listener.tls)
                return
            self.metrics.connections_refused += 1
            self.metrics.refuse(bound)
            _log.warning(f"connection refused: {bound}", peer=peer)
        except Exception as error:  # noqa: BLE001 - one connection's bug, not the port's
            self.shared.failed(error, peer)
        sock.close()

    def _full(self, sock: socket.socket, host: str, descriptors_max: int) -> str | None:
        """The limit that refuses another connection from there, if any."""
        limits = self.limits
        if sock.fileno() >= descriptors_max:
            return "descriptors_reserved"  # the kernel gives the lowest number that is free
        if len(self.connections) + len(self.handshakes) >= limits.connections_max:
            return "connections_max"
        of_host = self._hosts.get(host, 0)
        if limits.connections_per_ip_overrides:
            own_max = limits.connections_per_ip_overrides.get(canonical_host(host))
            if own_max is not None:
                return "connections_per_ip_overrides" if of_host >= own_max else None
        if limits.connections_per_ip_max and of_host >= limits.connections_per_ip_max:
            return "connections_per_ip_max"
        return None

    def adopt(self, sock: socket.socket, peer: str, listener: str = PLAINTEXT) -> Connection:
        """Serve a connected socket from now on."""
        self._prepare(sock)
        caller = Caller(host=_host(peer), listener=listener)
        self._enter(caller.host)
        try:
            return self._serve(partial(Connection, sock, peer, self.shared), caller)
        except BaseException:
            self._leave(caller.host)
            raise

    def _begin_handshake(
        self, sock: socket.socket, peer: str, listener: Listening, tls: Contexts
    ) -> None:
        """Serve a connected socket once its handshake is over; until then it is a client of its
        host, and no connection yet."""
        self._prepare(sock)
        caller = Caller(host=_host(peer), listener=listener.name)

        def is_over(layer: TlsLayer | None) -> None:
            if layer is None:
                self._leave(caller.host)
                return
            try:
                named = self._certified(caller, layer, listener.mapper)
                # Of a handshake that began before its list was loaded.
                if named is None or tls.revoked.has(layer.peer_certificate):
                    self._leave(caller.host)
                    TlsSocket(sock, layer).close()
                    return
                connect = partial(TlsConnection, TlsSocket(sock, layer), peer, self.shared)
                self._serve(connect, named)
            except Exception as error:  # noqa: BLE001 - one connection's bug, not the port's
                self.shared.failed(error, peer)
                self._leave(caller.host)
                sock.close()

        self._enter(caller.host)
        work = partial(self.handshakes.run, sock, tls, listener.name, peer, is_over)
        self.shared.spawn(work)

    def _certified(self, caller: Caller, layer: TlsLayer, mapper: PrincipalMapper) -> Caller | None:
        """The client as its certificate names it, if it showed one; None: it names nobody here."""
        certificate = layer.peer_certificate
        if certificate is None:
            return caller
        name = mapper.name_of(written := subject(certificate))
        if name is None:
            why = "no mapping rule gives its certificate a name"
            who = Who(None, caller.host, caller.listener)
            self._audit.authentication(
                who, CERTIFICATE, AuditOutcome.FAILED, why=f"{why}: {written}"
            )
            self.metrics.fail_handshake("mapping_rules")
            _log.warning(why, peer=caller.host, listener=caller.listener, subject=written)
            return None
        named = evolve(caller, principal=f"User:{name}")
        who = Who(named.principal, named.host, named.listener)
        self._audit.authentication(who, CERTIFICATE, AuditOutcome.OK)
        return named

    def _prepare(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            with suppress(OSError):  # it is gone already: the first read will say so
                self._set_options(sock)

    def _serve(self, connect: Connect, caller: Caller) -> Connection:
        self._next_id += 1
        connection_id = self._next_id
        # What raises here leaves nothing behind; what comes later costs the connection.
        connection = connect(partial(self._closed, connection_id, caller.host), caller)
        authenticator = self._authenticators.get(caller.listener)
        if authenticator is not None:
            connection.authentication = Authentication(authenticator, connection)
        self.connections[connection_id] = connection
        self.metrics.connections += 1
        self.metrics.connections_accepted += 1
        try:
            connection.open()
            if self._accepting.cancel_called:
                connection.finish()  # it came in the very moment in which the port began to drain
        except Exception as error:  # noqa: BLE001 - as above; it is counted among the open already
            connection.failed(error)
        return connection

    def _set_options(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send_bytes = self.limits.socket_send_bytes or _local_send_bytes(sock)
        if send_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
        # A client whose machine vanished while it waits for records says nothing, ever.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEP_ALIVE_INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEP_ALIVE_PROBES)

    def _closed(self, connection_id: int, host: str) -> None:
        del self.connections[connection_id]
        self._leave(host)
        self.metrics.connections -= 1
        if not self.connections:
            self._emptied.set()

    def _enter(self, host: str) -> None:
        self._hosts[host] = self._hosts.get(host, 0) + 1

    def _leave(self, host: str) -> None:
        self._hosts[host] -= 1
        if not self._hosts[host]:
            del self._hosts[host]

    async def _sweep(self) -> None:
        while True:
            await self._pause(SWEEP_S)
            now = trio.current_time()
            for connection in list(self.connections.values()):
                try:
                    if not connection.hang_up_if_stalled(now):
                        connection.rest_if_quiet(now)
                except Exception as error:  # noqa: BLE001 - one connection's bug, not the port's
                    connection.failed(error)
            try:
                self.shared.memory.relieve(now)
            except Exception as error:  # noqa: BLE001 - no connection's bug; the next look tries again
                self.metrics.bug(error)
                _log.error("a look at all clients met a bug", why=repr(error), exc_info=error)


def _host(peer: str) -> str:
    return peer.rpartition(":")[0]


def _close_all(listening: Iterable[Listening]) -> None:
    for listener in listening:
        if listener.sock.fileno() >= 0:
            trio.lowlevel.notify_closing(listener.sock)
            listener.sock.close()


def _local_send_bytes(sock: socket.socket) -> int:
    """`LOCAL_SEND_BYTES` where both ends are on this machine, else 0."""
    try:
        is_local = sock.getpeername()[0] == sock.getsockname()[0]
    except OSError:
        return 0  # the client is gone already; its connection will say so
    return LOCAL_SEND_BYTES if is_local else 0


def _peer_name(address: object) -> str:
    if isinstance(address, tuple) and len(address) >= 2:
        return f"{address[0]}:{address[1]}"
    return str(address) or "local"
