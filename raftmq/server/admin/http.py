"""The admin port: /metrics for Prometheus, /health for load balancers, /status for people.

Imported only after the node is ready: starlette and hypercorn cost more to import than the rest of
a node. It reads and never changes anything, but for /faults, which is refused in production, and
for /nodes and /leaders (`nodes.py`, `leaders.py`).
/health (and /health/ready) is 503 until this node has joined, and while it sees no majority of the
metadata group; /health/live only when the process should be started anew.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from functools import cache
from typing import Any, Final, Protocol

import h11
import msgspec
import trio
from attrs import frozen
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from raftmq.errors import ErrorCode, RemoteProtocolError
from raftmq.foreign import decode_foreign
from raftmq.logs import RateLimitedLog, structlog
from raftmq.metadata.broker_messages import Way
from raftmq.rights import CLUSTER_NAME, Authorizer, Kind, Operation
from raftmq.runtime.certificates import ServerTls
from raftmq.server.admin.access import READS, UNKNOWN_TOKEN, Access, Refusal
from raftmq.server.admin.connections import AdminHandshakes, OpenConnection, OpenConnections
from raftmq.server.admin.pages import (
    WAY,
    WHO,
    BalancePage,
    LeadersPage,
    NodesPage,
    Page,
    TopicsPage,
    answer,
    balance_routes,
    leaders_routes,
    nodes_routes,
    read_body,
    too_large,
    topics_routes,
    who_of,
)
from raftmq.server.audit import Audit, AuditOutcome, AuditRow, Who

Health = Callable[[], tuple[bool, dict[str, Any]]]
Status = Callable[[], Awaitable[dict[str, Any]]]
Metrics = Callable[[str], Awaitable[tuple[bytes, str]]]
"""The page and its content type, for an Accept header."""
CountBug = Callable[[Exception], None]
"""Called with each exception of ours that a request or a connection here met."""

KEEP_ALIVE_S: Final = 30.0
READ_TIMEOUT_S: Final = 60
CONNECTIONS_BOUND: Final = "admin_connections"
"""Its name among what is refused."""
REASON_LENGTH_MAX: Final = 300
_log: Final = RateLimitedLog(structlog.get_logger("raftmq.admin"), lines_max=1)
_subject: ContextVar[str | None] = ContextVar("_subject", default=None)
"""Of the operator's certificate that the client of the present connection showed."""
METHODS: Final = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"PATCH", b"OPTIONS"))
_JSON: Final = "application/json"
REFUSED_CODE: Final = "CLUSTER_AUTHORIZATION_FAILED"
FAULTS_BYTES_MAX: Final = 64 << 10
FAULTS_REFUSED: Final = (
    "faults are refused: start this node with RAFTMQ_FAULTS=1, never in production; an admin port "
    "outside the loopback needs an admin_token_file besides"
)


class FaultPort(Protocol):
    """What breaks this node on purpose."""

    def show(self) -> dict[str, Any]: ...
    def replace(self, body: bytes) -> dict[str, Any]:
        """Raises msgspec.DecodeError."""
        ...

    def clear(self) -> dict[str, Any]: ...


@frozen(slots=True, kw_only=True)
class PageSources:
    """What the pages show, and who acts on them.

    Attributes:
        faults: breaks this node on purpose; None: /faults is refused.
        access: says who may do what.
        tls: the certificates of the port; None: it speaks plain HTTP.
        connections: those that are open; beyond their bound an idle one gives way to a new one.
        refuse: is told of each bound that was reached.
        audit: is told who changes something, and who is refused.
        authorizer: says what the principals of certificates may do; None: everything.
        denied: is told of each right that one of them lacked.
    """

    health: Health
    status: Status
    metrics: Metrics
    faults: FaultPort | None
    access: Access
    tls: ServerTls | None
    connections: OpenConnections
    refuse: Callable[[str], None]
    audit: Audit
    authorizer: Authorizer | None
    denied: Callable[[Kind, Operation], None]
    nodes: NodesPage
    leaders: LeadersPage
    balance: BalancePage
    topics: TopicsPage


def _faults_page(faults: FaultPort | None, audit: Audit) -> Page:
    def tell(request: Request, outcome: AuditOutcome, code: str) -> None:
        row = AuditRow("faults", "", code)
        audit.administration(who_of(request), f"{request.method} /faults", outcome, [row])

    async def page(request: Request) -> Response:
        if faults is None:
            who, method = who_of(request), request.method
            audit.denial(who, f"{method} /faults", method, "faults")
            return answer({"error": FAULTS_REFUSED}, 403)
        if request.method == "PUT":
            body = await read_body(request, FAULTS_BYTES_MAX)
            if body is None:
                tell(request, AuditOutcome.FAILED, ErrorCode.INVALID_REQUEST.name)
                return too_large(FAULTS_BYTES_MAX)
            try:
                replaced = decode_foreign("faults", faults.replace, body)
            except RemoteProtocolError as error:
                tell(request, AuditOutcome.FAILED, ErrorCode.INVALID_REQUEST.name)
                return answer({"error": str(error)}, 400)
            tell(request, AuditOutcome.OK, ErrorCode.NONE.name)
            return answer(replaced)
        if request.method == "DELETE":
            tell(request, AuditOutcome.OK, ErrorCode.NONE.name)
            return answer(faults.clear())
        return answer(faults.show())

    return page


PAGES: Final[Mapping[str, tuple[str, str]]] = {
    "/": ("GET", "this list; JSON for Accept: application/json"),
    "/health": ("GET", "200 once clients may come, else 503 and why"),
    "/health/ready": ("GET", "the same: for a readiness probe"),
    "/health/live": ("GET", "503 when only a new start helps"),
    "/status": ("GET", "everything about this node, as JSON"),
    "/metrics": ("GET", "numbers for Prometheus"),
    "/nodes": ("GET", "the nodes, and what becomes of them"),
    "/nodes/replace": ("POST", "raftmq node replace"),
    "/nodes/change": ("POST", "raftmq node add, drain, remove, ..."),
    "/moves": ("GET", "moves of replicas, planned and under way"),
    "/balance": ("POST", "raftmq cluster balance"),
    "/topics": ("GET", "a topic's partitions: ?name=TOPIC"),
    "/topics/shrink": ("POST", "raftmq topic shrink"),
    "/leaders": ("GET", "leaders, and which node should lead"),
    "/leaders/transfer": ("POST", "raftmq leader transfer"),
    "/faults": ("GET, PUT, DELETE", "faults for tests; refused in production"),
}
"""Methods and meaning of each page."""


def _list_page() -> Page:
    """The list of all pages, for whoever looks at the port with a browser or curl."""
    rows = [
        {"path": path, "methods": methods, "meaning": meaning}
        for path, (methods, meaning) in PAGES.items()
    ]
    lines = [f"{row['path']:<18}{row['methods']:<18}{row['meaning']}\n" for row in rows]

    async def page(request: Request) -> Response:
        if _JSON in request.headers.get("accept", ""):
            return answer({"pages": rows})
        return Response("".join(lines), media_type="text/plain")

    return page


def _indented(body: dict[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(body))


def make_app(sources: PageSources) -> Starlette:
    """All pages."""

    async def metrics_page(request: Request) -> Response:
        body, content_type = await sources.metrics(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def health_page(_request: Request) -> Response:
        is_healthy, body = sources.health()
        return answer(body, 200 if is_healthy else 503)

    async def status_page(_request: Request) -> Response:
        body = await sources.status()
        return Response(await trio.to_thread.run_sync(_indented, body), media_type=_JSON)

    async def live_page(_request: Request) -> Response:
        body = sources.health()[1]
        is_live = bool(body.get("is_live", True))
        return answer(body, 200 if is_live else 503)

    routes = [
        Route("/", _list_page()),
        Route("/metrics", metrics_page),
        Route("/health", health_page),
        Route("/health/ready", health_page),
        Route("/health/live", live_page),
        Route("/status", status_page),
        Route(
            "/faults", _faults_page(sources.faults, sources.audit), methods=["GET", "PUT", "DELETE"]
        ),
        *nodes_routes(sources.nodes, sources.audit),
        *leaders_routes(sources.leaders, sources.audit),
        *balance_routes(sources.balance, sources.audit),
        *topics_routes(sources.topics, sources.audit),
    ]
    return Starlette(routes=routes)


class _Parser(h11.Connection):
    """Reads requests: plain ones only, and leaves nothing of its errors behind."""

    def next_event(self) -> Any:
        """The next part of a request.

        Raises:
            h11.RemoteProtocolError: the client's bytes are none.
        """
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            # h11 raises it from a method of its own: its traceback holds it, and all that was read.
            raise error.with_traceback(None)  # noqa: B904 - it is the same one
        if not isinstance(event, h11.Request):
            return event
        if event.method not in METHODS:
            # "hEAD" would be HEAD to Hypercorn, and something else with a body to h11.
            raise h11.RemoteProtocolError("not a method of this port", error_status_hint=501)
        if all(name != b"upgrade" for name, _ in event.headers):
            return event
        return h11.Request(
            method=event.method,
            target=event.target,
            headers=[pair for pair in event.headers if pair[0] != b"upgrade"],
            http_version=event.http_version,
        )


class _Connection(TCPServer):
    """One connection, which is over when its client hangs up: Hypercorn would wait for the end of
    the time that an idle one may stay."""

    async def _read_data(self) -> None:
        protocol: Any = self.protocol.protocol
        protocol.connection = _Parser(
            h11.SERVER, max_incomplete_event_size=self.config.h11_max_incomplete_size
        )
        await super()._read_data()
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        try:
            await super().protocol_send(event)
        except trio.BusyResourceError:
            await self.protocol.handle(Closed())  # it is being closed just now

    def forget(self) -> None:
        """Drop all that belongs to it: its parts hold each other, and full collections are rare."""
        vars(self).clear()


async def serve_admin(sock: socket.socket, sources: PageSources, count_bug: CountBug) -> None:
    """Serve the admin port on a bound socket until cancelled; it stays the caller's.

    Each connection has a border of its own: what its bytes make of Hypercorn's protocol code costs
    that connection.
    """
    app = guarded(checked(make_app(sources), sources), count_bug)
    handshakes = None if sources.tls is None else AdminHandshakes(sources.tls, sources.audit)
    connections = sources.connections

    async def accepted(stream: trio.SocketStream) -> None:
        if connections.is_full:
            sources.refuse(CONNECTIONS_BOUND)
        connection = connections.enter(_host_of(stream))
        if connection is None:
            await trio.aclose_forcefully(stream)
            return
        try:
            with connection.scope:
                await _serve_connection(app, handshakes, count_bug, stream, connection)
        finally:
            connections.leave(connection)

    listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock.dup()))
    await trio.serve_listeners(accepted, [listener])


def _host_of(stream: trio.SocketStream) -> str:
    try:
        return str(stream.socket.getpeername()[0])
    except OSError:
        return ""  # it is gone already


@cache
def _configuration() -> Config:
    """The same for all connections: nothing changes it."""
    config = Config()
    config.accesslog = None
    config.errorlog = None
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.read_timeout = READ_TIMEOUT_S
    config.include_server_header = False
    return config


async def _serve_connection(
    app: Any,
    handshakes: AdminHandshakes | None,
    count_bug: CountBug,
    stream: trio.SocketStream,
    connection: OpenConnection,
) -> None:
    told: Any = stream  # Hypercorn takes one without TLS, too, but does not say so
    try:
        if handshakes is not None:
            encrypted = await handshakes.encrypted(stream, connection)
            if encrypted is None:
                return
            told = encrypted
            _subject.set(encrypted.subject)
        pages: Any = ASGIWrapper(connection.working(app))
        served = _Connection(
            pages, _configuration(), WorkerContext(None), ConnectionState({}), told
        )
        try:
            await served
        finally:
            served.forget()
    except Exception as error:  # noqa: BLE001 - the border of one connection
        bug = _only(error)
        count_bug(bug)
        _log.error(
            "an admin connection met a bug", why=repr(bug)[:REASON_LENGTH_MAX], exc_info=error
        )
        await trio.aclose_forcefully(told)


def _only(error: Exception) -> Exception:
    """What was raised in a nursery, where it is one exception."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def needed(method: str) -> Operation:
    """What the principal of a certificate must be allowed on the cluster."""
    return Operation.DESCRIBE if method in READS else Operation.ALTER


def checked(app: Any, sources: PageSources) -> Any:
    """The same pages, for those that may."""
    access, audit = sources.access, sources.audit

    def judge(scope: Any, headers: dict[str, str], client: str) -> tuple[Refusal | None, Way]:
        """Why a request is refused, and whether the port alone let it in."""
        subject, method = _subject.get(), scope["method"]
        refusal = access.refusal(method, scope["path"], headers, client)
        if refusal is None or subject is None:
            return refusal, Way.OPERATOR
        if sources.authorizer is None:
            return None, Way.OPERATOR
        rights = sources.authorizer.rights_of(access.principal_of(headers, subject), client)
        wanted = needed(method)
        if rights.may(wanted, Kind.CLUSTER, CLUSTER_NAME):
            return None, Way.CLIENT
        sources.denied(Kind.CLUSTER, wanted)
        return (403, f"{rights.principal} may not {wanted} the cluster"), Way.CLIENT

    def tell(who: Who, method: str, path: str, why: str, *, is_unknown: bool) -> None:
        if is_unknown:
            audit.authentication(who, "token", AuditOutcome.FAILED, why=why)
        elif who.principal is not None:
            resource = f"{Kind.CLUSTER}:{CLUSTER_NAME}"
            audit.denial(who, f"{method} {path}", str(needed(method)), resource)
        else:
            audit.denial(who, f"{method} {path}", method, "admin port")

    async def serve_one(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = {
                name.decode("latin-1").lower(): value.decode("latin-1")
                for name, value in scope["headers"]
            }
            client = str((scope.get("client") or ("",))[0])
            refusal, scope[WAY] = judge(scope, headers, client)
            principal = None
            if refusal is None or scope[WAY] is Way.CLIENT:
                principal = access.principal_of(headers, _subject.get())
            who = scope[WHO] = Who(principal, client, access.name)
            if refusal is not None:
                code, why = refusal
                _log.warning(
                    "an admin request was refused",
                    peer=client,
                    method=scope["method"],
                    path=scope["path"][:REASON_LENGTH_MAX],
                    why=why,
                )
                is_unknown = refusal is UNKNOWN_TOKEN
                tell(who, scope["method"], scope["path"], why, is_unknown=is_unknown)
                response = answer({"error": why, "code": REFUSED_CODE}, code)
                if code == 401:
                    response.headers["WWW-Authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await app(scope, receive, send)

    return serve_one


def guarded(app: Any, count_bug: CountBug) -> Any:
    """The same pages; what a request meets is logged here, once a while, and nowhere else.

    The client has a 500 by then; the connection ends.
    """

    async def serve_one(scope: Any, receive: Any, send: Any) -> None:
        try:
            await app(scope, receive, send)
        except (ClientDisconnect, trio.BusyResourceError):
            pass  # it went away in the middle, or spoke out of turn: nobody is left to answer
        except Exception as error:  # noqa: BLE001 - the border of an admin request
            count_bug(_only(error))
            _log.error(
                "an admin request met a bug",
                path=str(scope.get("path", ""))[:REASON_LENGTH_MAX],
                why=f"{type(error).__name__}: {error}"[:REASON_LENGTH_MAX],
                exc_info=error,
            )

    return serve_one
