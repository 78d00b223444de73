"""The fault switch: what it refuses, what it changes; unarmed it is not there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio

from raftmq.runtime.clock import RealClock
from raftmq.runtime.faults import FaultSwitch, is_armed
from raftmq.runtime.peer_links import PeerLinks
from raftmq.runtime.threads import Flusher
from raftmq.server.admin.http import FAULTS_BYTES_MAX, serve_admin
from raftmq.server.audit import Audit
from raftmq.server.kafka.listener import open_listen_socket
from tests.runtime.test_peer_links import Node
from tests.server.admin.test_http import ask, sources
from tests.server.auditing import Lines

WHOLE = {"block_to": [], "block_from": [], "fsync_delay_ms": 0}


@pytest.fixture
async def flusher() -> Any:
    flusher = Flusher(1)
    yield flusher
    flusher.close()


@pytest.fixture
def links() -> Iterator[PeerLinks]:
    node = Node(1)
    yield node.links
    node.listener.close()


@asynccontextmanager
async def admin_port(
    faults: FaultSwitch | None, lines: Lines | None = None
) -> AsyncIterator[Callable[..., Any]]:
    sock = open_listen_socket("127.0.0.1", 0)
    bugs: list[Exception] = []

    async def serve() -> None:
        audit = Audit(lines, RealClock(), cluster="cluster", node=1)
        await serve_admin(sock, sources(faults=faults, audit=audit), bugs.append)

    async def request(method: str, body: bytes = b"") -> tuple[int, Any]:
        code, answer = await ask(sock.getsockname()[1], method, "/faults", body)
        return code, msgspec.json.decode(answer) if answer[:1] == b"{" else answer

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        with trio.fail_after(30):
            yield request
        nursery.cancel_scope.cancel()
    sock.close()
    assert bugs == []


def test_only_a_one_arms_it() -> None:
    assert is_armed({"RAFTMQ_FAULTS": "1"})
    assert not is_armed({"RAFTMQ_FAULTS": "0"})
    assert not is_armed({"RAFTMQ_FAULTS": ""})
    assert not is_armed({})


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_unarmed_it_is_refused(method: str) -> None:
    lines = Lines()
    async with admin_port(None, lines) as request:
        status, answer = await request(method, b"{}")
        assert status == 403
        assert "RAFTMQ_FAULTS=1" in answer["error"]
    (line,) = lines.read
    assert (line["kind"], line["request"]) == ("denial", f"{method} /faults")


async def test_the_whole_state_is_replaced(flusher: Flusher, links: PeerLinks) -> None:
    async with admin_port(FaultSwitch(links, flusher)) as request:
        assert await request("GET") == (200, WHOLE)
        status, answer = await request("PUT", b'{"block_to": [2], "fsync_delay_ms": 50}')
        assert (status, answer) == (200, WHOLE | {"block_to": [2], "fsync_delay_ms": 50})
        assert (links.block_to, links.block_from, flusher.delay_s) == ({2}, set(), 0.05)
        assert await request("PUT", b'{"block_from": [2, 3]}') == (
            200,
            WHOLE | {"block_from": [2, 3]},
        )
        assert (links.block_to, links.block_from, flusher.delay_s) == (set(), {2, 3}, 0)
        assert await request("GET") == (200, WHOLE | {"block_from": [2, 3]})
        assert await request("DELETE") == (200, WHOLE)
        assert (links.block_to, links.block_from, flusher.delay_s) == (set(), set(), 0)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b'{"blok_to": [2]}', "blok_to"),
        (b'{"block_to": 2}', "block_to"),
        (b'{"block_from": [-1]}', "block_from"),
        (b'{"fsync_delay_ms": 60001}', "fsync_delay_ms"),
        (b'{"fsync_delay_ms": -1}', "fsync_delay_ms"),
        (b"[]", "object"),
        (b"", "truncated"),
    ],
)
async def test_what_it_does_not_know_is_refused_by_name(
    body: bytes, named: str, flusher: Flusher, links: PeerLinks
) -> None:
    async with admin_port(FaultSwitch(links, flusher)) as request:
        await request("PUT", b'{"block_to": [2]}')
        status, answer = await request("PUT", body)
        assert status == 400
        assert named in answer["error"]
        assert links.block_to == {2}, "nothing changed"


async def test_too_much_is_refused(flusher: Flusher, links: PeerLinks) -> None:
    lines = Lines()
    async with admin_port(FaultSwitch(links, flusher), lines) as request:
        status, _ = await request("PUT", b" " * (FAULTS_BYTES_MAX + 1))
        assert status == 413
    (line,) = lines.read
    assert (line["kind"], line["outcome"]) == ("administration", "failed")


async def test_a_delayed_flush_takes_its_time(flusher: Flusher) -> None:
    flusher.delay_s = 0.05
    done = trio.Event()
    started = perf_counter()
    flusher.submit(SimpleNamespace(run=lambda: None), lambda _error: done.set())
    with trio.fail_after(30):
        await done.wait()
    assert perf_counter() - started >= 0.05
    assert flusher.latency.seconds >= 0.05
