"""The admin port: /metrics for Prometheus, /health for load balancers, /status for people.

Imported only after the node is ready: starlette and hypercorn cost more to import than the rest of
a node. It reads and never changes anything, but for /faults, which is refused in production.
/health is 503 until this node has joined, and while it sees no majority of the metadata group.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any, Final, Protocol

import msgspec
from hypercorn.config import Config
from hypercorn.trio import serve
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from raftmq.server.broker import Broker
from raftmq.server.metrics import ServerCollector

Health = Callable[[], tuple[bool, dict[str, Any]]]
Status = Callable[[], dict[str, Any]]

PARTITIONS_MAX: Final = 10_000
"""Beyond this /metrics leaves out the rows per partition."""
KEEP_ALIVE_S: Final = 30.0
_JSON: Final = "application/json"
FAULTS_BYTES_MAX: Final = 64 << 10
FAULTS_REFUSED: Final = (
    "faults are refused: start this node with RAFTMQ_FAULTS=1, never in production"
)


class FaultPort(Protocol):
    """What breaks this node on purpose."""

    def show(self) -> dict[str, Any]: ...
    def replace(self, body: bytes) -> dict[str, Any]:
        """Raises msgspec.DecodeError."""
        ...

    def clear(self) -> dict[str, Any]: ...


class PartitionCollector:
    """Positions and sizes of the partitions on this node."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this moment."""
        labels = ("topic", "partition")

        def gauge(name: str, help_text: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"raftmq_partition_{name}", help_text, labels=labels)

        high_watermark = gauge("high_watermark", "Everything below is committed")
        log_start = gauge("log_start_offset", "First kept offset")
        log_end = gauge("log_end_offset", "Next offset to assign")
        size = gauge("size_bytes", "Bytes of the log on this node")
        is_leader = gauge("is_leader", "1 where this node leads")
        in_sync = gauge("in_sync_replicas", "Replicas in sync, where this node leads")
        partitions = list(self._broker.partitions)
        yield GaugeMetricFamily(
            "raftmq_partitions", "Partitions with a replica on this node", value=len(partitions)
        )
        if len(partitions) > PARTITIONS_MAX:
            return
        for partition in partitions:
            replica = partition.replica
            key = (partition.name.topic, str(partition.index))
            high_watermark.add_metric(key, replica.high_watermark)
            log_start.add_metric(key, replica.log_start_offset)
            log_end.add_metric(key, replica.log_end_offset)
            size.add_metric(key, partition.size_bytes)
            is_leader.add_metric(key, int(partition.is_leader))
            if partition.is_leader:
                in_sync.add_metric(key, len(replica.in_sync_replicas()))
        yield from (high_watermark, log_start, log_end, size, is_leader, in_sync)


class StatusCollector:
    """The numbers of /status: readiness, lags, flushes, as the node tells them."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this moment."""
        for key, value in self._status().items():
            if isinstance(value, int | float):
                yield GaugeMetricFamily(f"raftmq_node_{key}", f"/status: {key}", value=value)


def _faults_page(faults: FaultPort | None) -> Callable[[Request], Awaitable[Response]]:
    def answer(body: dict[str, Any], status_code: int = 200) -> Response:
        return Response(msgspec.json.encode(body), status_code=status_code, media_type=_JSON)

    async def page(request: Request) -> Response:
        if faults is None:
            return answer({"error": FAULTS_REFUSED}, 403)
        if request.method == "PUT":
            body = b""
            async with aclosing(request.stream()) as stream:
                async for piece in stream:
                    body += piece
                    if len(body) > FAULTS_BYTES_MAX:
                        return answer({"error": f"more than {FAULTS_BYTES_MAX} bytes"}, 413)
            try:
                return answer(faults.replace(body))
            except msgspec.DecodeError as error:
                return answer({"error": str(error)}, 400)
        return answer(faults.clear() if request.method == "DELETE" else faults.show())

    return page


def make_app(
    broker: Broker, *, health: Health, status: Status, faults: FaultPort | None = None
) -> Starlette:
    """All pages; without `faults` they are refused."""
    registry = CollectorRegistry()
    registry.register(ServerCollector(broker.metrics))
    registry.register(PartitionCollector(broker))
    registry.register(StatusCollector(status))
    ProcessCollector(registry=registry)

    async def metrics_page(_request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def health_page(_request: Request) -> Response:
        is_healthy, body = health()
        content = msgspec.json.encode(body)
        return Response(content, status_code=200 if is_healthy else 503, media_type=_JSON)

    async def status_page(_request: Request) -> Response:
        content = msgspec.json.format(msgspec.json.encode(status()))
        return Response(content, media_type=_JSON)

    return Starlette(
        routes=[
            Route("/metrics", metrics_page),
            Route("/health", health_page),
            Route("/status", status_page),
            Route("/faults", _faults_page(faults), methods=["GET", "PUT", "DELETE"]),
        ]
    )


async def serve_admin(
    sock: socket.socket,
    broker: Broker,
    *,
    health: Health,
    status: Status,
    faults: FaultPort | None = None,
) -> None:
    """Serve the admin port on a bound socket until cancelled."""
    config = Config()
    # Hypercorn closes what it serves on; the caller's socket stays the caller's.
    config.bind = [f"fd://{os.dup(sock.fileno())}"]
    config.accesslog = None
    config.errorlog = None
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.include_server_header = False
    app = make_app(broker, health=health, status=status, faults=faults)
    await serve(app, config, mode="asgi")  # type: ignore[arg-type]
