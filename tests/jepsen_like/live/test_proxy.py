"""The proxy: what passes, what is held, and what is told of the end of a connection."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from jepsen_like.live.links import BLOCKED, CLIENTS, HOST, ProxyLinks, Weather, between
from jepsen_like.live.proxy import dialler_of

QUIET_S = 0.15
"""Long enough for loopback to bring what should not come."""


@pytest.fixture
def links() -> Iterator[ProxyLinks]:
    links = ProxyLinks()
    yield links
    links.close()


class Service:
    """A node of the tests: a client port and a peer port, behind the proxy."""

    def __init__(self, links: ProxyLinks, node: int) -> None:
        self.client, self.peer = (socket.create_server((HOST, 0)) for _ in range(2))
        for listener in (self.client, self.peer):
            listener.settimeout(20)
        ports = [listener.getsockname()[1] for listener in (self.client, self.peer)]
        self.places = links.place(node, (ports[0], ports[1], 0))

    def dial(self, address: str) -> socket.socket:
        host, _, port = address.rpartition(":")
        sock = socket.create_connection((host, int(port)), timeout=20)
        sock.settimeout(20)
        return sock

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """A client's connection: its end and the node's."""
        near = self.dial(self.places.advertised_client)
        far, _ = self.client.accept()
        far.settimeout(20)
        return near, far

    def connect_peer(self, node: int) -> tuple[socket.socket, socket.socket]:
        """A connection of another node, which opens with a hello."""
        near = self.dial(self.places.advertised_peer)
        opening = hello(node)
        near.sendall(opening)
        far, _ = self.peer.accept()
        far.settimeout(20)
        assert far.recv(1000) == opening
        return near, far

    def close(self) -> None:
        self.client.close()
        self.peer.close()


def hello(node: int) -> bytes:
    body = json.dumps({"version": 1, "node_id": node}).encode()
    return struct.pack(">I", len(body)) + body


@pytest.fixture
def service(links: ProxyLinks) -> Iterator[Service]:
    service = Service(links, 1)
    yield service
    service.close()


def is_silent(sock: socket.socket) -> bool:
    """Nothing arrives, not even an end."""
    sock.settimeout(QUIET_S)
    try:
        sock.recv(1)
    except TimeoutError:
        return True
    finally:
        sock.settimeout(20)
    return False


def is_at_end(sock: socket.socket) -> bool:
    """The other side is gone, in order or not; with a limit of 20 seconds."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_bytes_pass_both_ways_and_ends_one_by_one(service: Service) -> None:
    near, far = service.connect()
    with near, far:
        near.sendall(b"ask")
        assert far.recv(10) == b"ask"
        near.shutdown(socket.SHUT_WR)
        assert far.recv(10) == b""
        far.sendall(b"answer")
        far.close()
        assert near.recv(10) == b"answer"
        assert near.recv(10) == b""


def test_much_passes_whole(service: Service) -> None:
    near, far = service.connect()
    data = bytes(range(256)) * 40_000
    with near, far:
        near.setblocking(False)
        sent, got = 0, bytearray()
        while len(got) < len(data):
            if sent < len(data):
                with contextlib.suppress(BlockingIOError):
                    sent += near.send(data[sent:])
            got += far.recv(1 << 20)
        assert bytes(got) == data


def test_a_blocked_direction_is_held_and_the_other_goes_on(
    links: ProxyLinks, service: Service
) -> None:
    near, far = service.connect()
    with near, far:
        links.set({(CLIENTS, 1): BLOCKED})
        near.sendall(b"held")
        assert is_silent(far)
        far.sendall(b"heard")
        assert near.recv(10) == b"heard"
        links.set({})
        assert far.recv(10) == b"held"


def test_the_end_of_a_connection_does_not_cross_a_blocked_link(
    links: ProxyLinks, service: Service
) -> None:
    near, far = service.connect()
    with near:
        links.set({(1, CLIENTS): BLOCKED})
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        far.close()
        assert is_silent(near)
        near.sendall(b"nobody reads this")
        assert is_silent(near)
        links.set({})
        assert is_at_end(near)


def test_a_connection_over_a_blocked_link_waits(links: ProxyLinks, service: Service) -> None:
    links.set(dict.fromkeys(between({CLIENTS}, {1}), BLOCKED))
    with service.dial(service.places.advertised_client) as near:
        near.sendall(b"early")
        service.client.settimeout(QUIET_S)
        with pytest.raises(TimeoutError):
            service.client.accept()
        service.client.settimeout(20)
        links.set({})
        far, _ = service.client.accept()
        with far:
            assert far.recv(10) == b"early"


def test_peers_are_told_apart_by_their_hello(links: ProxyLinks, service: Service) -> None:
    near2, far2 = service.connect_peer(2)
    near3, far3 = service.connect_peer(3)
    with near2, far2, near3, far3:
        links.set({(2, 1): BLOCKED})
        near2.sendall(b"of two")
        near3.sendall(b"of three")
        assert far3.recv(10) == b"of three"
        assert is_silent(far2)
        assert links.reset([(2, 1)]) == 1
        links.set({})
        near3.sendall(b"still here")
        assert far3.recv(10) == b"still here"
        with pytest.raises(ConnectionResetError):
            near2.recv(10)


def test_delay_and_width_of_a_link(links: ProxyLinks, service: Service) -> None:
    near, far = service.connect()
    with near, far:
        links.set({(CLIENTS, 1): Weather(delay_ms=120)})
        began = time.monotonic()
        near.sendall(b"late")
        assert far.recv(10) == b"late"
        assert time.monotonic() - began >= 0.12
        links.set({(CLIENTS, 1): Weather(bytes_per_s=100_000)})
        began = time.monotonic()
        for _ in range(4):  # what one read takes is not split
            near.sendall(bytes(10_000))
            got = 0
            while got < 10_000:
                got += len(far.recv(10_000))
        assert time.monotonic() - began >= 0.25


def test_a_node_that_is_down_refuses(service: Service) -> None:
    service.close()
    try:
        near = service.dial(service.places.advertised_client)
    except ConnectionResetError:
        return  # it was refused before it stood
    with near:
        assert is_at_end(near)


def test_what_is_no_hello_costs_its_connection(service: Service) -> None:
    with service.dial(service.places.advertised_peer) as near:
        near.sendall(b"\xff" * 8)
        with pytest.raises(ConnectionResetError):
            near.recv(1)


def test_the_hello_is_the_products_own() -> None:
    """Who dials is read off what a node really sends."""
    import msgspec

    from raftmq.runtime.peer_hello import PEER_FORMATS, Hello

    body = msgspec.json.encode(Hello(PEER_FORMATS[0], "c", 7, "0" * 16, "bulk", "127.0.0.1:1"))
    opening = struct.pack(">I", len(body)) + body
    for size in range(len(opening)):
        assert dialler_of(opening[:size]) is None
    assert dialler_of(opening + b"more") == 7
