"""The smallest requests that once held a node up or filled it, beside applications at work.

The nodes live, nothing acknowledged is lost, and the log says what happened, once.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raftmq.protocol import ApiKey, encode_request, encode_request_header
from tests.live.harness import Cluster, Node
from tests.live.load import Load, create_topic

pytestmark = [pytest.mark.live, pytest.mark.slow]

ANNOUNCED_100_MIB = bytes.fromhex("06400000 0000 0007 00000001".replace(" ", ""))


def frame(api: ApiKey, version: int, **fields: Any) -> bytes:
    body = encode_request_header(api, version, 7, "rude") + encode_request(api, version, fields)
    return struct.pack(">i", len(body)) + body


def many_names() -> Iterator[tuple[str, bytes]]:
    names = [f"n{number}" for number in range(40_000)]
    resource = {"resource_type": 2, "resource_name": "t", "configuration_keys": None}
    yield (
        "DescribeConfigs",
        frame(ApiKey.DESCRIBE_CONFIGS, 4, resources=[resource] * 60_000),
    )
    wide = {"num_partitions": 1000, "replication_factor": 1, "assignments": [], "configs": []}
    yield (
        "CreateTopics",
        frame(
            ApiKey.CREATE_TOPICS,
            7,
            topics=[{"name": name, **wide} for name in names[:10_000]],
            timeout=1000,
            validate_only=True,
        ),
    )
    yield "DescribeGroups", frame(ApiKey.DESCRIBE_GROUPS, 6, groups=names)
    yield "FindCoordinator", frame(ApiKey.FIND_COORDINATOR, 4, key_type=0, coordinator_keys=names)
    yield (
        "Metadata",
        frame(
            ApiKey.METADATA,
            9,
            topics=[{"name": name} for name in names],
            allow_auto_topic_creation=False,
        ),
    )


def exchange(node: Node, request: bytes) -> int:
    """Send a request; the size of its answer."""
    with socket.create_connection((node.host, node.client_port), timeout=60) as sock:
        sock.sendall(request)
        (size,) = struct.unpack(">i", _read(sock, 4))
        _read(sock, size)
        return size


def _read(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(min(1 << 20, size - len(data)))
        assert piece, "the node hung up"
        data += piece
    return bytes(data)


def test_rude_requests_cost_their_senders(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster, contextlib.ExitStack() as stack:
        create_topic(cluster.bootstrap, "t", 1)
        node = cluster[1]
        pids = {one.pid for one in cluster.nodes.values()}
        with Load(cluster.bootstrap, "t", 1, rate=200) as load:
            load.wait_for(50)
            memory = _resident(node)
            for _ in range(20):
                sock = stack.enter_context(
                    socket.create_connection((node.host, node.client_port), timeout=10)
                )
                sock.sendall(ANNOUNCED_100_MIB)
            load.wait_for(50)
            assert _resident(node) < memory + (64 << 20), "an announcement costs nothing"
            for name, request in many_names():
                began = time.monotonic()
                size = exchange(node, request)
                assert size < 32 << 20, name
                assert time.monotonic() - began < 30, name
            load.wait_for(50)
        assert {one.pid for one in cluster.nodes.values()} == pids
        load.reckon().check()
        assert load.errors == [], "another client was not disturbed"
        for one in cluster.nodes.values():
            assert one.is_running
            assert "Traceback" not in one.log_tail(1_000_000), "no bug of ours was logged"


def _resident(node: Node) -> int:
    text = Path(f"/proc/{node.pid}/statm").read_text()
    return int(text.split()[1]) * 4096
