"""The admin port: three pages over a real socket."""

from __future__ import annotations

import gc
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import h11
import pytest
import trio
import trio.testing
from starlette.routing import Route
from structlog.testing import capture_logs

from raftmq.config import NodeConfig
from raftmq.server.admin import http as admin_http
from raftmq.server.admin.access import Access
from raftmq.server.admin.connections import (
    CONNECTIONS_MAX,
    ENDING_MAX,
    OpenConnection,
    OpenConnections,
)
from raftmq.server.admin.http import PAGES, PageSources, Status, serve_admin
from raftmq.server.kafka.listener import open_listen_socket
from tests.server.auditing import NO_AUDIT


async def get(port: int, path: str) -> tuple[int, bytes]:
    return await ask(port, "GET", path)


async def ask(
    port: int, method: str, path: str, sent: bytes = b"", accept: str = "*/*"
) -> tuple[int, bytes]:
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    async with stream:
        await stream.send_all(
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Accept: {accept}\r\nContent-Length: {len(sent)}\r\n\r\n".encode()
            + sent
        )
        data = b""
        while piece := await stream.receive_some():
            data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


async def metrics(accept: str) -> tuple[bytes, str]:
    is_open = "openmetrics" in accept
    return b"raftmq_up 1\n", "application/openmetrics-text" if is_open else "text/plain"


async def status() -> dict[str, Any]:
    return {"node_id": 1}


class NoCluster:
    """In place of the pages of nodes, leaders and balances."""

    def show(self, *_name: str) -> dict[str, Any]:
        return {}

    async def replace(self, _wanted: Any, _asker: Any) -> dict[str, Any]:
        raise AssertionError("nobody asks for it")

    transfer = change = balance = shrink = replace
    moves = show


def sources(**given: Any) -> PageSources:
    """What a healthy node without faults shows, but for what is given."""
    others: dict[str, Any] = {
        "health": lambda: (True, {}),
        "status": status,
        "metrics": metrics,
        "faults": None,
        "access": Access(NodeConfig(node_id=1, data="d")),  # type: ignore[arg-type]  # converted
        "tls": None,
        "connections": OpenConnections(),
        "refuse": lambda _bound: None,
        "audit": NO_AUDIT,
        "authorizer": None,
        "denied": lambda _kind, _operation: None,
        "nodes": NoCluster(),
        "leaders": NoCluster(),
        "balance": NoCluster(),
        "topics": NoCluster(),
    }
    return PageSources(**{**others, **given})


@pytest.mark.parametrize(("is_healthy", "is_live"), [(True, True), (False, True), (False, False)])
async def test_pages(is_healthy: bool, is_live: bool) -> None:
    sock: socket.socket = open_listen_socket("127.0.0.1", 0)
    port = sock.getsockname()[1]
    told = {"status": "ok" if is_healthy else "unavailable", "is_live": is_live}
    bugs: list[Exception] = []

    async with trio.open_nursery() as nursery:

        async def serve() -> None:
            shown = sources(health=lambda: (is_healthy, told))
            await serve_admin(sock, shown, bugs.append)

        nursery.start_soon(serve)
        with trio.fail_after(30):
            for path in ("/health", "/health/ready"):
                code, body = await get(port, path)
                assert (code, json.loads(body)) == (200 if is_healthy else 503, told)
            code, body = await get(port, "/health/live")
            assert (code, json.loads(body)) == (200 if is_live else 503, told)
            code, body = await get(port, "/status")
            assert (code, json.loads(body)) == (200, {"node_id": 1})
            assert await get(port, "/metrics") == (200, b"raftmq_up 1\n")
            code, _ = await get(port, "/nothing")
            assert code == 404
        nursery.cancel_scope.cancel()
    sock.close()
    assert bugs == []


@asynccontextmanager
async def served(
    bugs: list[Exception] | None = None,
    status: Status = status,
    **given: Any,
) -> AsyncIterator[int]:
    """The port of a running admin server; what it counts comes to `bugs`, or must not be."""
    counted: list[Exception] = [] if bugs is None else bugs
    sock = open_listen_socket("127.0.0.1", 0)
    port = sock.getsockname()[1]

    async def serve() -> None:
        await serve_admin(sock, sources(status=status, **given), counted.append)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            try:
                yield port
            finally:
                nursery.cancel_scope.cancel()
                sock.close()
    assert bugs is not None or counted == []


async def test_the_root_lists_all_pages() -> None:
    async with served() as port:
        for accept in ("*/*", "text/html,application/xhtml+xml"):
            code, body = await ask(port, "GET", "/", accept=accept)
            lines = body.decode().splitlines()
            assert code == 200
            assert max(map(len, lines)) <= 80
            paths = [line.split()[0] for line in lines]
            assert paths == list(PAGES)
        for path, (methods, _) in PAGES.items():
            code = 200 if methods == "GET" else 403 if path == "/faults" else 405
            assert (await get(port, path))[0] == code
        code, body = await ask(port, "GET", "/", accept="application/json")
        assert [page["path"] for page in json.loads(body)["pages"]] == paths


def test_every_page_is_told_of_with_its_methods() -> None:
    made = admin_http.make_app(sources())
    routes = [route for route in made.routes if isinstance(route, Route)]
    assert {
        route.path: ", ".join(sorted((route.methods or set()) - {"HEAD"})) for route in routes
    } == {path: ", ".join(sorted(words.split(", "))) for path, (words, _) in PAGES.items()}


async def test_a_bug_in_the_servers_protocol_costs_one_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others that are open go on: a scrape is not cut off by a stranger's bytes."""
    read = admin_http._Connection._read_data
    asked: list[int] = []

    async def read_or_fail(server: admin_http._Connection) -> None:
        asked.append(1)
        if len(asked) == 2:
            raise trio.BusyResourceError("two tasks send")
        await read(server)

    monkeypatch.setattr(admin_http._Connection, "_read_data", read_or_fail)
    bugs: list[Exception] = []
    async with served(bugs) as port:
        first = await trio.open_tcp_stream("127.0.0.1", port)
        async with first:
            failed = pytest.raises((IndexError, trio.BrokenResourceError))
            with capture_logs() as logs, failed:
                await get(port, "/health")
            assert [line["event"] for line in logs] == ["an admin connection met a bug"]
            assert [type(error) for error in bugs] == [trio.BusyResourceError]
            assert "BusyResourceError" in logs[0]["why"]
            await first.send_all(
                b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            )
            assert (await first.receive_some()).startswith(b"HTTP/1.1 200")
        assert (await get(port, "/health"))[0] == 200


async def say(port: int, sent: bytes, *, is_answered: bool) -> bytes:
    """The first that is answered to these bytes, or nothing."""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(sent)
        with trio.move_on_after(20 if is_answered else 0.2):
            return bytes(await stream.receive_some())
    return b""


HEADERS = b" /health HTTP/1.1\r\nHost: localhost\r\n"
ODD = {
    "hEAD": (b"hEAD" + HEADERS + b"\r\n", b"501"),
    "BREW": (b"BREW" + HEADERS + b"\r\n", b"501"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"501"),
    "h2c": (b"GET" + HEADERS + b"Connection: upgrade\r\nUpgrade: h2c\r\n\r\n", b"200"),
    "websocket": (
        b"GET"
        + HEADERS
        + b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        + b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        b"200",
    ),
    "no request": (b"\xff\xfe\r\n\r\n", b"400"),
    "length": (b"GET" + HEADERS + b"Content-Length: -1\r\n\r\n", b"400"),
    "half a body": (b"POST" + HEADERS + b"Content-Length: 99\r\n\r\nabc", b"405"),
    "half a request": (b"GET /hea", b""),
    "nothing": (b"", b""),
}


@pytest.mark.parametrize("name", ODD)
async def test_an_odd_request_is_answered_and_leaves_nothing(name: str) -> None:
    """No ring of objects either: full collections are rare, and freeze what they find."""
    sent, code = ODD[name]
    async with served() as port:
        is_answered = bool(code)
        await say(port, sent, is_answered=is_answered)  # what is imported at first use stays
        with capture_logs() as logs:
            gc.collect()
            gc.disable()
            try:
                for _ in range(3):
                    assert (await say(port, sent, is_answered=is_answered))[9:12] == code
                for _ in range(100):
                    await trio.testing.wait_all_tasks_blocked(0.01)
                    if not servers():
                        break
                assert not servers()
            finally:
                gc.enable()
        assert logs == []


def servers() -> list[object]:
    return [
        one for one in gc.get_objects() if isinstance(one, (admin_http._Connection, h11.Connection))
    ]


async def test_a_bug_in_a_page_costs_one_request() -> None:
    class Planted(Exception):
        pass

    async def raises() -> dict[str, Any]:
        raise Planted("a bug")

    bugs: list[Exception] = []
    async with served(bugs, raises) as port:
        first = await trio.open_tcp_stream("127.0.0.1", port)
        async with first:
            with capture_logs() as logs:
                for _ in range(3):
                    code, body = await get(port, "/status")
                    assert (code, body) == (500, b"Internal Server Error")
            (line,) = logs
            assert (line["event"], line["path"]) == ("an admin request met a bug", "/status")
            assert line["why"] == "Planted: a bug"
            assert [type(error) for error in bugs] == [Planted] * 3, "each, though one is told"
            await first.send_all(
                b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            )
            assert (await first.receive_some()).startswith(b"HTTP/1.1 200")
        assert (await get(port, "/metrics"))[0] == 200


async def test_silent_connections_do_not_shut_out_an_operator() -> None:
    """As many as there may be say nothing, or half of a request: a new one is served all the same,
    and the oldest silent one gives way to it."""
    refused: list[str] = []
    async with served(refuse=refused.append) as port:
        silent = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(CONNECTIONS_MAX)]
        await silent[1].send_all(b"POST /nodes/change HTTP/1.1\r\nHost: loc")
        assert (await get(port, "/health"))[0] == 200
        assert await silent[0].receive_some() == b"", "the oldest one gave way"
        assert (await get(port, "/health"))[0] == 200
        with trio.move_on_after(0.05) as waited:
            await silent[2].receive_some()
        assert waited.cancelled_caught, "the place of the one that was served was free again"
        for stream in silent:
            await stream.aclose()
    assert set(refused) == {admin_http.CONNECTIONS_BOUND}


async def test_a_request_that_is_worked_on_keeps_its_place() -> None:
    release = trio.Event()
    began: list[int] = []

    async def slow() -> dict[str, Any]:
        began.append(1)
        await release.wait()
        return {"node_id": 1}

    codes: list[int] = []
    opened = OpenConnections(2)
    async with served(status=slow, connections=opened) as port, trio.open_nursery() as nursery:

        async def ask_status() -> None:
            codes.append((await get(port, "/status"))[0])

        for _ in range(2):
            nursery.start_soon(ask_status)
        while len(began) < 2:
            await trio.lowlevel.checkpoint()
        async with await trio.open_tcp_stream("127.0.0.1", port) as extra:
            assert await extra.receive_some() == b"", "it is told by an end at once"
        release.set()
        while len(codes) < 2:
            await trio.lowlevel.checkpoint()
        assert (await get(port, "/health"))[0] == 200
    assert codes == [200, 200]


async def test_a_flood_of_one_address_costs_that_address() -> None:
    connections = OpenConnections(4)
    operator = connections.enter("10.0.0.1")
    flood = [connections.enter("10.0.0.66") for _ in range(7)]
    assert operator is not None
    assert not operator.scope.cancel_called
    given_way = [one is not None and one.scope.cancel_called for one in flood]
    assert given_way == [True] * 4 + [False] * 3
    assert (len(connections), connections.gave_way, connections.refused) == (8, 4, 0)


async def test_ends_that_take_long_are_waited_for() -> None:
    """What was told to end holds its descriptor until it has ended."""
    connections = OpenConnections(4)
    entered = [connections.enter("10.0.0.66") for _ in range(4 + ENDING_MAX)]
    assert None not in entered
    assert connections.enter("10.0.0.66") is None
    assert connections.refused == 1
    assert entered[0] is not None
    connections.leave(entered[0])
    assert connections.enter("10.0.0.66") is not None


async def test_what_waits_for_its_client_is_no_work() -> None:
    (connection,) = [OpenConnection("10.0.0.1")]
    seen = []

    async def receive() -> dict[str, Any]:
        seen.append(("receives", connection.is_busy))
        return {}

    async def send(_message: Any) -> None:
        seen.append(("sends", connection.is_busy))

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        seen.append(("works", connection.is_busy))
        await receive()
        seen.append(("works", connection.is_busy))
        await send({})
        seen.append(("works", connection.is_busy))

    await connection.working(app)({}, receive, send)
    assert not connection.is_busy
    assert seen == [
        ("works", True),
        ("receives", False),
        ("works", True),
        ("sends", False),
        ("works", True),
    ]
