"""The admin port: three pages over a real socket."""

from __future__ import annotations

import json
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from raftmq.cluster.partition_registry import PartitionRegistry
from raftmq.server.admin_http import serve_admin
from raftmq.server.listener import open_listen_socket
from raftmq.server.metrics import ServerMetrics
from tests.cluster.fake_replica import Bench


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


@pytest.mark.parametrize("is_healthy", [True, False])
async def test_pages(is_healthy: bool) -> None:
    bench = Bench()
    registry = PartitionRegistry()
    registry.add(bench.partition)
    metrics = ServerMetrics()
    metrics.api("produce").observe(0.001)
    broker: Any = SimpleNamespace(metrics=metrics, partitions=registry)
    sock: socket.socket = open_listen_socket("127.0.0.1", 0)
    port = sock.getsockname()[1]

    async with trio.open_nursery() as nursery:

        async def serve() -> None:
            await serve_admin(
                sock,
                broker,
                health=lambda: (is_healthy, {"status": "ok" if is_healthy else "unavailable"}),
                status=lambda: {"node_id": 1},
            )

        nursery.start_soon(serve)
        with trio.fail_after(10):
            status, body = await get(port, "/health")
            assert status == (200 if is_healthy else 503)
            assert json.loads(body)["status"]
            status, body = await get(port, "/status")
            assert (status, json.loads(body)) == (200, {"node_id": 1})
            status, body = await get(port, "/metrics")
            assert status == 200
            text = body.decode()
            assert 'raftmq_requests_total{api="produce"} 1.0' in text
            assert 'raftmq_request_seconds_bucket{api="produce",le="+Inf"} 1.0' in text
            assert 'raftmq_partition_high_watermark{partition="0",topic="t"} 0.0' in text
            assert "raftmq_node_node_id 1.0" in text
            status, _ = await get(port, "/nothing")
            assert status == 404
        nursery.cancel_scope.cancel()
    sock.close()
