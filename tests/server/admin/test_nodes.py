"""/nodes on the admin port: shown to all, changed only by a well-formed JSON body."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from raftmq.runtime.clock import RealClock
from raftmq.server.admin.http import serve_admin
from raftmq.server.admin.pages import BODY_BYTES_MAX, ChangeRequest, ReplaceRequest
from raftmq.server.audit import Audit
from raftmq.server.kafka.listener import open_listen_socket
from tests.server.admin.test_http import sources
from tests.server.auditing import Lines


class FakeNodes:
    """Notes what was asked for."""

    def __init__(self) -> None:
        self.asked: list[ReplaceRequest | ChangeRequest] = []

    def show(self) -> dict[str, Any]:
        return {"nodes": [1, 2]}

    async def replace(self, wanted: ReplaceRequest, _asker: Any) -> dict[str, Any]:
        self.asked.append(wanted)
        return {"code": "NONE", "message": "begun", "steps": ["one"]}

    async def change(self, wanted: ChangeRequest, _asker: Any) -> dict[str, Any]:
        self.asked.append(wanted)
        return {"code": "NONE", "message": "added", "steps": []}

    def moves(self) -> dict[str, Any]:
        return {"moves": []}


Ask = Callable[..., Any]


@asynccontextmanager
async def serving(nodes: FakeNodes, **given: Any) -> AsyncIterator[Ask]:
    sock = open_listen_socket("127.0.0.1", 0)
    port = sock.getsockname()[1]
    bugs: list[Exception] = []

    async def serve() -> None:
        await serve_admin(sock, sources(nodes=nodes, **given), bugs.append)

    async def ask(
        method: str, path: str, body: bytes = b"", kind: str = "application/json"
    ) -> tuple[int, Any]:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        data = b""
        async with stream:
            await stream.send_all(head.encode() + body)
            while piece := await stream.receive_some():
                data += piece
        first, _, answer = data.partition(b"\r\n\r\n")
        return int(first.split()[1]), json.loads(answer) if answer.startswith(b"{") else None

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        with trio.fail_after(30):
            yield ask
        nursery.cancel_scope.cancel()
    sock.close()
    assert bugs == []


async def test_nodes_are_shown_and_replaced() -> None:
    nodes = FakeNodes()
    async with serving(nodes) as ask:
        assert await ask("GET", "/nodes") == (200, {"nodes": [1, 2]})
        body = b'{"old_id": 1, "new_id": 4, "dry_run": true}'
        code, answer = await ask("POST", "/nodes/replace", body)
        assert (code, answer["message"]) == (200, "begun")
        assert nodes.asked == [ReplaceRequest(old_id=1, new_id=4, dry_run=True)]
        assert (await ask("GET", "/nodes/replace"))[0] == 405


async def test_nodes_are_changed_and_moves_are_shown() -> None:
    nodes = FakeNodes()
    async with serving(nodes) as ask:
        assert await ask("GET", "/moves") == (200, {"moves": []})
        body = b'{"ids": [4, 5], "change": "add", "voters": 5}'
        code, answer = await ask("POST", "/nodes/change", body)
        assert (code, answer["message"]) == (200, "added")
        assert nodes.asked == [ChangeRequest(ids=(4, 5), change="add", voters=5)]
        assert (await ask("POST", "/nodes/change", b'{"id": 4}'))[0] == 400
        assert (await ask("POST", "/nodes/change", body, "text/plain"))[0] == 415


class Refusing(FakeNodes):
    def __init__(self, code: str) -> None:
        super().__init__()
        self.code = code

    async def change(self, _wanted: ChangeRequest, _asker: Any) -> dict[str, Any]:
        if not self.code:
            raise LookupError("planted")
        return {"code": self.code, "message": "", "steps": []}


@pytest.mark.parametrize(
    ("code", "told", "outcome"),
    [
        ("NONE", "NONE", "ok"),
        ("INVALID_REQUEST", "INVALID_REQUEST", "failed"),
        ("REQUEST_TIMED_OUT", "REQUEST_TIMED_OUT", "unknown"),
        ("", "UNKNOWN_SERVER_ERROR", "unknown"),
    ],
)
async def test_each_change_leaves_a_line(code: str, told: str, outcome: str) -> None:
    lines = Lines()
    audit = Audit(lines, RealClock(), cluster="cluster", node=1)
    nodes = Refusing(code)
    bugs = suppress(AssertionError) if not code else nullcontext()
    with capture_logs(), bugs:
        async with serving(nodes, audit=audit) as ask:
            await ask("GET", "/nodes")
            await ask("POST", "/nodes/change", b'{"ids": [4], "change": "drain", "dry_run": true}')
    detail = "ids=(4,) change=drain voters=None"
    assert lines.read == [
        {
            "kind": "administration",
            "outcome": outcome,
            "principal": "User:ANONYMOUS",
            "host": "127.0.0.1",
            "listener": "admin_listener",
            "request": "POST /nodes/change",
            "dry_run": True,
            "changes": [{"resource": "cluster", "detail": detail, "code": told}],
        }
    ]


@pytest.mark.parametrize(
    ("body", "kind", "code"),
    [
        (b'{"old_id": 1, "new_id": 4}', "text/plain", 415),
        (b'{"old_id": 1}', "application/json", 400),
        (b'{"old_id": 1, "new_id": 4, "now": true}', "application/json", 400),
        (b"\xff", "application/json", 400),
        (b" " * (BODY_BYTES_MAX + 1), "application/json", 413),
    ],
    ids=["not JSON's type", "a field lacks", "a field too many", "no text", "too long"],
)
async def test_anything_else_changes_nothing(body: bytes, kind: str, code: int) -> None:
    nodes = FakeNodes()
    lines = Lines()
    audit = Audit(lines, RealClock(), cluster="cluster", node=1)
    async with serving(nodes, audit=audit) as ask:
        assert (await ask("POST", "/nodes/replace", body, kind))[0] == code
        assert nodes.asked == []
    (line,) = lines.read
    assert (line["kind"], line["request"]) == ("administration", "POST /nodes/replace")
    assert line["outcome"] == "failed"
    changes = [{"resource": "cluster", "detail": "", "code": "INVALID_REQUEST"}]
    assert line["changes"] == changes, "and nothing of the body"
