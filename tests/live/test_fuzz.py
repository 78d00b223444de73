"""Malformed frames of every API against a live node: they cost their connections only."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
from pathlib import Path
from typing import cast

import pytest

from tests.live.harness import Cluster
from tests.live.load import Load, create_topic
from tests.protocol.fuzz_frames import every_version, malformed_requests

pytestmark = [pytest.mark.live, pytest.mark.slow]


AT_ONCE = 64
PATIENCE_S = 0.01


def throw(node_address: tuple[str, int], frames: list[bytes]) -> None:
    """Send frames, each on a connection of its own, many at once; read what comes."""
    for start in range(0, len(frames), AT_ONCE):
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
            for frame in frames[start : start + AT_ONCE]:
                sock = stack.enter_context(socket.create_connection(node_address, timeout=10))
                with contextlib.suppress(ConnectionError):  # closed before we had finished
                    sock.sendall(struct.pack(">i", len(frame)) + frame)
                sock.setblocking(False)
                selector.register(sock, selectors.EVENT_READ)
            # Those that say nothing are parked, or their frames want no answer: we hang up.
            while selector.get_map() and (ready := selector.select(PATIENCE_S)):
                for key, _ in ready:
                    if not answered(cast(socket.socket, key.fileobj)):
                        selector.unregister(key.fileobj)


def answered(sock: socket.socket) -> bool:
    """Read what there is; False once the node closed the connection, or the answer is read."""
    try:
        return len(sock.recv(1 << 16)) == 1 << 16
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def test_malformed_frames_of_every_api(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        create_topic(cluster.bootstrap, "t", 1)
        node = cluster[1]
        pid = node.pid
        with Load(cluster.bootstrap, "t", 1, rate=200) as load:
            load.wait_for(50)
            frames = [
                frame
                for api, version in every_version()
                for frame in malformed_requests(api, version, seed=version, variants=2)
            ]
            throw((node.host, node.client_port), frames)
            load.wait_for(50)
        assert node.is_running
        assert node.pid == pid
        load.reckon().check()
        assert load.errors == [], "another client was not disturbed"
        for one in cluster.nodes.values():
            assert one.is_running
            assert "Traceback" not in one.log_tail(1_000_000), "no bug of ours was logged"
