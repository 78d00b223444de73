"""The admin port: three pages over a real socket."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from raftmq.server.admin import admin_http
from raftmq.server.admin.admin_http import serve_admin
from raftmq.server.kafka.listener import open_listen_socket


async def get(port: int, path: str) -> tuple[int, bytes]:
    return await ask(port, "GET", path)


async def ask(port: int, method: str, path: str, sent: bytes = b"") -> tuple[int, bytes]:
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    async with stream:
        await stream.send_all(
            f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            f"Content-Length: {len(sent)}\r\n\r\n".encode()
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


@pytest.mark.parametrize(("is_healthy", "is_live"), [(True, True), (False, True), (False, False)])
async def test_pages(is_healthy: bool, is_live: bool) -> None:
    sock: socket.socket = open_listen_socket("127.0.0.1", 0)
    port = sock.getsockname()[1]
    told = {"status": "ok" if is_healthy else "unavailable", "is_live": is_live}

    async with trio.open_nursery() as nursery:

        async def serve() -> None:
            await serve_admin(
                sock, health=lambda: (is_healthy, told), status=status, metrics=metrics
            )

        nursery.start_soon(serve)
        with trio.fail_after(10):
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


@asynccontextmanager
async def served() -> AsyncIterator[int]:
    """The port of a running admin server."""
    sock = open_listen_socket("127.0.0.1", 0)
    port = sock.getsockname()[1]

    async def serve() -> None:
        await serve_admin(sock, health=lambda: (True, {}), status=status, metrics=metrics)

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            try:
                yield port
            finally:
                nursery.cancel_scope.cancel()
                sock.close()


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
    async with served() as port:
        first = await trio.open_tcp_stream("127.0.0.1", port)
        async with first:
            failed = pytest.raises((IndexError, trio.BrokenResourceError))
            with capture_logs() as logs, failed:
                await get(port, "/health")
            assert [line["event"] for line in logs] == ["an admin connection met a bug"]
            await first.send_all(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert (await first.receive_some()).startswith(b"HTTP/1.1 200")
        assert (await get(port, "/health"))[0] == 200


async def test_no_more_connections_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_http, "CONNECTIONS_MAX", 2)
    async with served() as port:
        kept = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(2)]
        async with await trio.open_tcp_stream("127.0.0.1", port) as extra:
            assert await extra.receive_some() == b"", "it is told by an end at once"
        for stream in kept:
            await stream.aclose()
        code = 0
        while code != 200:  # until the server has seen them go
            with suppress(IndexError, trio.BrokenResourceError):
                code, _ = await get(port, "/health")
