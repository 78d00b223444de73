"""Malformed frames of every API against a live node: they cost their connections only."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import pytest

from tests.live.harness import Cluster
from tests.live.load import Load, create_topic
from tests.protocol.fuzz_frames import every_version, malformed_requests

pytestmark = [pytest.mark.live, pytest.mark.slow]


def throw(node_address: tuple[str, int], frames: list[bytes]) -> None:
    """Send frames, each on a connection that may be closed under them; read what comes."""
    sock: socket.socket | None = None
    for frame in frames:
        try:
            if sock is None:
                sock = socket.create_connection(node_address, timeout=10)
                sock.settimeout(0.0)
            sock.setblocking(True)
            sock.settimeout(2.0)
            sock.sendall(struct.pack(">i", len(frame)) + frame)
            sock.settimeout(0.002)
            while sock.recv(65536):
                pass
            sock.close()
            sock = None
        except TimeoutError:
            continue  # no answer yet (parked, or a request without an answer): go on
        except OSError:
            if sock is not None:
                sock.close()
            sock = None
    if sock is not None:
        sock.close()


def test_malformed_frames_of_every_api(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        create_topic(cluster.bootstrap, "t", 1)
        node = cluster[1]
        pid = node.pid
        with Load(cluster.bootstrap, "t", 1, rate=200) as load:
            load.wait_for(50)
            for api, version in every_version():
                frames = list(malformed_requests(api, version, seed=version, variants=4))
                throw((node.host, node.client_port), frames)
            load.wait_for(50)
        assert node.is_running
        assert node.pid == pid
        load.reckon().check()
        assert load.errors == [], "another client was not disturbed"
        for one in cluster.nodes.values():
            assert one.is_running
            assert "Traceback" not in one.log_tail(1_000_000), "no bug of ours was logged"
