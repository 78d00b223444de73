"""The admin port: three pages over a real socket."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
import trio

from raftmq.server.admin_http import serve_admin
from raftmq.server.listener import open_listen_socket


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
