"""Streams between nodes: hello, refusal, order, reconnection, bounds, damaged frames."""

from __future__ import annotations

import errno
import gc
import socket
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random

import msgspec
import pytest
import trio
import trio.testing
from crc32c import crc32c
from structlog.testing import capture_logs

from raftmq.config import Address
from raftmq.replication.multiraft import Stream
from raftmq.runtime import peer_hello, peer_links, peer_streams
from raftmq.runtime.loop import LoopBudget
from raftmq.runtime.peer_hello import (
    PEER_FORMATS,
    Hello,
    PeerIdentity,
    check_hello,
    common_format,
    read_hello,
    write_hello,
)
from raftmq.runtime.peer_links import (
    KIND_BROKER,
    KIND_FORMATION,
    KIND_HEARTBEATS,
    KIND_METADATA,
    KIND_RAFT,
    PeerLinks,
)
from raftmq.runtime.peer_streams import FRAME_HEADER, PeerRefusedError
from raftmq.runtime.peer_tls import PeerTls
from raftmq.types import NodeId, StorageId


class Node:
    """One end: its links and what they told."""

    def __init__(
        self,
        node_id: int,
        cluster_id: str = "c",
        queue_bytes_max: int = 1 << 20,
        memory_bytes_max: int = 64 << 20,
        formats: tuple[int, int] = PEER_FORMATS,
        storage_id: int | None = None,
        process_id: str = "",
        tls: PeerTls | None = None,
    ) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.address = Address("127.0.0.1", self.listener.getsockname()[1])
        self.frames: list[tuple[int, int, bytes]] = []
        self.identities: list[PeerIdentity] = []
        self.greeted: set[NodeId] = set()
        self.lost: list[int] = []
        self.broken: list[str] = []
        self.strangers: list[tuple[str, str, str]] = []
        self.changed = trio.Event()
        self.links = PeerLinks(
            cluster_id=cluster_id,
            node_id=NodeId(node_id),
            storage_id=StorageId(node_id * 11 if storage_id is None else storage_id),
            process_id=process_id or f"process {node_id}",
            queue_bytes_max=queue_bytes_max,
            on_frame=self.on_frame,
            on_identity=self.on_identity,
            on_lost=lambda lost: self.tell(self.lost, lost),
            random=Random(node_id),
            address=self.address,
            budget=LoopBudget(),
            memory_bytes_max=memory_bytes_max,
            on_broken_invariant=self.broken.append,
            on_stranger=lambda *told: self.strangers.append(told),
            formats=formats,
            tls=tls,
        )

    def tell(self, where: list, what: object) -> None:  # type: ignore[type-arg]
        where.append(what)
        self.changed.set()

    def on_identity(self, identity: PeerIdentity) -> None:
        if self.links.send(identity.node_id, KIND_RAFT, [b"hello"]):
            self.greeted.add(identity.node_id)
        self.tell(self.identities, identity)

    def on_frame(self, sender: PeerIdentity, kind: int, payload: memoryview) -> None:
        if payload != b"hello":
            self.tell(self.frames, (sender.node_id, kind, bytes(payload)))

    async def until(self, condition: object) -> None:
        with trio.fail_after(30):
            while not condition():  # type: ignore[operator]
                self.changed = trio.Event()
                if not condition():  # type: ignore[operator]
                    with trio.move_on_after(0.05):
                        await self.changed.wait()


async def until_end(sock: socket.socket) -> bytes:
    """What still comes on a connection until the other side ends it."""
    received = b""
    with trio.fail_after(30):
        while True:
            await trio.lowlevel.wait_readable(sock)
            try:
                piece = sock.recv(65536)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                return received
            if not piece:
                return received
            received += piece


@asynccontextmanager
async def running(*nodes: Node) -> AsyncIterator[trio.Nursery]:
    try:
        async with trio.open_nursery() as nursery:
            for node in nodes:
                await nursery.start(node.links.run, node.listener)
            yield nursery
            nursery.cancel_scope.cancel()
    finally:
        for node in nodes:
            node.listener.close()


def introduce(a: Node, b: Node) -> None:
    a.links.set_addresses({NodeId(2): b.address})
    b.links.set_addresses({NodeId(1): a.address})


async def test_frames_arrive_whole_and_in_order() -> None:
    a, b = Node(1), Node(2)
    introduce(a, b)
    async with running(a, b):
        await a.until(lambda: a.links.is_connected(NodeId(2)))
        bodies = [bytes([i]) * size for i, size in enumerate([0, 1, 700, 300_000, 5, 2_000_000])]
        for body in bodies:
            half = len(body) // 2
            assert a.links.send(NodeId(2), KIND_RAFT, [body[:half], memoryview(body)[half:]])
            with trio.fail_after(30):
                while a.links.queued_bytes()[NodeId(2)]:
                    await trio.lowlevel.checkpoint()
        await b.until(lambda: len(b.frames) == len(bodies))
        assert [frame[2] for frame in b.frames] == bodies
        assert {frame[:2] for frame in b.frames} == {(1, KIND_RAFT)}
        assert PeerIdentity(NodeId(1), StorageId(11)) in b.identities
        await b.until(lambda: b.links.send(NodeId(1), KIND_HEARTBEATS, [b"h"]))
        await a.until(lambda: a.frames)
        assert a.frames == [(2, KIND_HEARTBEATS, b"h")]


@asynccontextmanager
async def all_sockets(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[socket.socket]]:
    """Both ends of every stream between two nodes that are connected."""
    tuned: list[socket.socket] = []
    tune = peer_links.tune
    monkeypatch.setattr(
        peer_links, "tune", lambda sock, *rest: (tune(sock, *rest), tuned.append(sock))
    )
    a, b = Node(1), Node(2)
    introduce(a, b)
    async with running(a, b):
        await a.until(lambda: len(tuned) >= 4 * len(peer_hello.STREAMS))
        yield tuned


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own limit is Linux's")
async def test_silence_ends_a_connection_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's patience grows with each try: a link that was down for half a minute would stay
    unused for another (tests/live/test_dead_switch.py, with packets that are really lost)."""
    async with all_sockets(monkeypatch) as sockets:
        for sock in sockets:
            assert 0 < sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 3_000
            assert 0 < sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 3


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has no default to go back to")
async def test_no_socket_refuses_what_a_segment_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a low-water mark for unsent bytes below the segment size (64 KiB on loopback) the tail
    of a sendfile, which waits for more, and the rest, which waits for room, wait for each other.
    0 is the system's own, which has none."""
    async with all_sockets(monkeypatch) as sockets:
        for sock in sockets:
            unsent = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
            assert unsent == 0 or unsent >= 256 << 10


async def test_a_dialled_peer_can_be_told_things_as_soon_as_it_is_heard() -> None:
    """What a node knows is told to a peer when it connects; it must get through at that moment."""
    a, b = Node(1), Node(2)
    a.links.set_addresses({NodeId(2): b.address})
    async with running(a, b):
        await a.until(lambda: NodeId(2) in a.greeted)


async def test_a_full_queue_drops_and_says_so() -> None:
    a, b = Node(1, queue_bytes_max=1 << 20), Node(2)
    introduce(a, b)
    async with running(a, b):
        await a.until(lambda: a.links.is_connected(NodeId(2)))
        taken = 0
        while a.links.send(NodeId(2), KIND_RAFT, [bytes(1 << 19)]):  # nobody reads meanwhile
            taken += 1
            assert taken < 1_000
        assert a.links.queued_bytes()[NodeId(2)] <= (1 << 20) + (1 << 19) + FRAME_HEADER.size
        await b.until(lambda: len(b.frames) == taken)


@pytest.mark.parametrize("kind", [KIND_METADATA, KIND_BROKER, KIND_FORMATION, KIND_HEARTBEATS])
async def test_what_runs_the_cluster_does_not_wait_behind_data(kind: int) -> None:
    a, b = Node(1), Node(2)
    introduce(a, b)
    async with running(a, b):
        await a.until(lambda: a.links.is_connected(NodeId(2)))
        await a.until(lambda: a.links.send(NodeId(2), kind, [b"first"]))
        taken = 0
        while a.links.send(NodeId(2), KIND_RAFT, [bytes(1 << 19)]):
            taken += 1
        assert a.links.send(NodeId(2), kind, [b"second"])
        await b.until(lambda: len(b.frames) == 2 + taken)
        behind = b.frames[b.frames.index((1, kind, b"second")) :]
        assert len(behind) > 1, "data came later that was sent before"


@pytest.mark.parametrize("name", [Stream.BULK, Stream.CONTROL])
async def test_a_peer_is_lost_with_either_of_two_streams_and_told_so_once(name: str) -> None:
    a, b = Node(1), Node(2)
    introduce(a, b)
    async with running(a, b):
        await a.until(lambda: a.links.is_connected(NodeId(2)))
        before = [a.links._streams[NodeId(2), vital].sock for vital in peer_links._VITAL]
        a.links._streams[NodeId(2), name].end()
        await a.until(lambda: a.lost)
        await a.until(lambda: a.links.is_connected(NodeId(2)))
        after = [a.links._streams[NodeId(2), vital].sock for vital in peer_links._VITAL]
        assert not set(before) & set(after), "both were dialled again"
        assert a.lost == [2]


async def test_a_lost_peer_is_reported_and_dialled_again() -> None:
    a, b = Node(1), Node(2)
    introduce(a, b)
    async with running(a):
        async with running(b):
            await a.until(lambda: a.links.is_connected(NodeId(2)))
        await a.until(lambda: a.lost == [2])
        assert not a.links.send(NodeId(2), KIND_RAFT, [b"x"])
        again = Node(2)
        again.listener.close()
        again.listener = socket.create_server(("127.0.0.1", b.address.port))
        again.listener.setblocking(False)
        again.links.set_addresses({NodeId(1): a.address})
        async with running(again):
            await a.until(lambda: a.links.is_connected(NodeId(2)))


async def test_who_comes_by_itself_is_asked_for_a_connection_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What asked for one while the link was cut is lost, and the system would ask again a second
    or more after that; a leader that is heard and hears nobody gives up meanwhile."""
    monkeypatch.setattr(peer_links, "DIAL_TIMEOUT_S", 60.0)
    monkeypatch.setattr(peer_links, "HELLO_TIMEOUT_S", 60.0)
    a, b = Node(1), Node(2)
    open_tcp_stream, asked = trio.open_tcp_stream, 0

    async def lose(host: str, port: int) -> trio.SocketStream:
        nonlocal asked
        if port == b.address.port and asked < len(peer_hello.STREAMS):
            asked += 1
            await trio.sleep_forever()
        return await open_tcp_stream(host, port)

    monkeypatch.setattr(trio, "open_tcp_stream", lose)
    a.links.set_addresses({NodeId(2): b.address})
    async with running(a, b):
        await a.until(lambda: asked == len(peer_hello.STREAMS))
        assert not a.links.is_connected(NodeId(2))
        b.links.set_addresses({NodeId(1): a.address})
        await b.until(lambda: b.links.is_connected(NodeId(1)))
        await a.until(lambda: a.links.is_connected(NodeId(2)))


WHOLE: frozenset[NodeId] = frozenset()
ONE, TWO = NodeId(1), NodeId(2)


async def both_connected(a: Node, b: Node) -> None:
    await a.until(lambda: a.links.is_connected(TWO))
    await b.until(lambda: b.links.is_connected(ONE))


async def test_what_is_sent_over_a_cut_link_is_dropped() -> None:
    a, b = Node(1), Node(2)
    introduce(a, b)
    async with running(a, b):
        await both_connected(a, b)
        a.links.block(to=frozenset({TWO}), from_=WHOLE)
        assert a.links.send(TWO, KIND_RAFT, [b"dropped"]), "nobody here can tell"
        assert b.links.send(ONE, KIND_RAFT, [b"the other way"])
        await a.until(lambda: a.frames)
        assert a.lost == b.lost == []
        a.links.block(to=WHOLE, from_=WHOLE)
        await a.until(lambda: a.lost == [2])  # no stream goes on with a gap in it
        await a.until(lambda: a.links.send(TWO, KIND_RAFT, [b"heard"]))
        await b.until(lambda: b.frames)
        assert [frame[2] for frame in b.frames] == [b"heard"]


async def test_a_deaf_node_hears_nothing_and_is_heard() -> None:
    a, b = Node(1), Node(2)
    introduce(a, b)
    async with running(a, b):
        await both_connected(a, b)
        a.links.block(to=WHOLE, from_=frozenset({TWO}))
        assert b.links.send(ONE, KIND_RAFT, [b"unheard"])
        assert a.links.send(TWO, KIND_RAFT, [b"heard"])
        await b.until(lambda: b.frames)
        # It is read all the same, else the queue would fill up.
        await b.until(lambda: b.links.send(ONE, KIND_RAFT, [bytes(1 << 20)]))
        assert a.lost == b.lost == []
        a.links.block(to=WHOLE, from_=WHOLE)
        await b.until(lambda: b.links.send(ONE, KIND_RAFT, [b"now"]) and a.frames)
        assert b.lost == [1], "what it sent was lost, so it had to begin anew"
        assert {frame[2] for frame in a.frames} == {b"now"}


async def test_an_end_is_not_heard_over_a_cut_link() -> None:
    a, b = Node(1), Node(2)
    introduce(a, b)
    async with running(a):
        async with running(b):
            await both_connected(a, b)
            a.links.block(to=WHOLE, from_=frozenset({TWO}))
        with trio.move_on_after(0.1):  # a whole link tells within a millisecond
            await a.until(lambda: a.lost)
        assert a.links.is_connected(TWO)
        assert not a.links.has_ended(TWO)
        assert a.links.send(TWO, KIND_RAFT, [b"into the void"])
        assert a.links.send(TWO, KIND_RAFT, [b"into the void"])
        assert a.lost == []
        a.links.block(to=WHOLE, from_=WHOLE)
        await a.until(lambda: a.lost == [2])


@pytest.mark.parametrize("direction", ["to", "from"])
async def test_no_hello_passes_a_cut_link(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_links, "HELLO_TIMEOUT_S", 0.05)
    a, b = Node(1), Node(2)
    cut = frozenset({TWO})
    a.links.block(to=cut if direction == "to" else WHOLE, from_=cut if direction != "to" else WHOLE)
    introduce(a, b)
    async with running(a, b):
        with trio.move_on_after(0.3):
            await a.until(lambda: a.identities or b.identities)
        assert a.identities == b.identities == []
        a.links.block(to=WHOLE, from_=WHOLE)
        await both_connected(a, b)


async def test_a_damaged_frame_costs_the_connection() -> None:
    b = Node(2)
    async with running(b):
        sock = socket.create_connection((b.address.host, b.address.port))
        sock.setblocking(False)
        await write_hello(sock, Hello(PEER_FORMATS[0], "c", 1, "0b", "bulk"))
        assert (await read_hello(sock)).refusal == ""
        sock.send(FRAME_HEADER.pack(3, 12345, KIND_RAFT) + b"abc")
        assert (await until_end(sock)).endswith(b"hello"), "what b greets all with, then the end"
        assert b.frames == []
        assert b.links.refusals["frame"] == 1
        sock.close()


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        (Hello(1, "c", 2, "1", "bulk"), ""),
        (Hello(2, "c", 2, "1", "bulk"), "format 2 at node 2, format 1 at node 1"),
        (Hello(2, "c", 2, "1", "bulk", formats=(1, 9)), ""),
        (Hello(1, "c", 2, "1", "bulk", formats=(2, 9)), "formats 2 to 9 at node 2"),
        (Hello(1, "c", 2, "1", "bulk", formats=(9, 1)), "none in common"),
        (Hello(1, "other", 2, "1", "bulk"), "'other'"),
        (Hello(1, "c", 1, "1", "bulk"), "own"),
        (Hello(1, "c", 2, "1", "bulk", "", "f2"), "formed anew"),
        (Hello(1, "c", 2, "1", "bulk", "", "f1", "go away"), "go away"),
    ],
)
def test_hello(theirs: Hello, told: str) -> None:
    reason = check_hello(Hello(1, "c", 1, "1", "bulk", "", "f1"), theirs)
    assert (told in reason) if told else reason == ""


OLD_HELLO = msgspec.defstruct(
    "Hello",
    [
        ("version", int),
        ("cluster_id", str),
        ("node_id", int),
        ("storage_id", str),
        ("stream", str),
        ("address", str, ""),
        ("formation_id", str, ""),
        ("refusal", str, ""),
    ],
)
"""As format 5 had it, which knew no ranges and demanded equality."""


def test_a_node_of_format_5_takes_a_hello_of_today() -> None:
    node = Node(1)
    node.listener.close()
    hello = node.links._hello
    read = msgspec.json.decode(msgspec.json.encode(hello), type=OLD_HELLO)
    assert read.version == 5
    assert (read.cluster_id, read.node_id, read.stream) == ("c", 1, "bulk")
    assert check_hello(hello, Hello(5, "c", 2, "16", "bulk")) == ""
    assert common_format(hello, Hello(5, "c", 2, "16", "bulk")) == 5


@pytest.mark.parametrize(
    ("spoken", "version"), [((5, 5), 5), ((4, 6), 6), ((6, 9), 6), ((5, 6), 6)], ids=str
)
async def test_a_stream_has_the_newest_format_of_both(
    spoken: tuple[int, int], version: int
) -> None:
    a, b = Node(1, formats=spoken), Node(2, formats=(5, 6))
    assert a.links.version(NodeId(2)) == 0
    introduce(a, b)
    async with running(a, b):
        await both_connected(a, b)
        assert a.links.version(NodeId(2)) == b.links.version(NodeId(1)) == version


async def test_a_stream_back_has_the_format_of_its_hello() -> None:
    a, b = Node(1, formats=(5, 5)), Node(2)
    a.links.set_addresses({NodeId(2): b.address})
    async with running(a, b):
        await b.until(lambda: b.links.is_connected(NodeId(1)))
        assert b.links.version(NodeId(1)) == 5


@pytest.mark.parametrize("spoken", [(4, 4), (7, 8)], ids=str)
async def test_nodes_without_a_common_format_are_refused_on_both_sides(
    spoken: tuple[int, int],
) -> None:
    a, b = Node(1, formats=spoken), Node(2, formats=(5, 6))
    introduce(a, b)
    told: dict[str, dict[str, object]] = {}

    def refused() -> bool:
        told.update({row["event"]: row for row in logs})  # type: ignore[misc]
        return {"peer refused", "refused a peer"} <= told.keys()

    with capture_logs() as logs:
        async with running(a, b):
            await b.until(refused)
            assert not a.links.is_connected(NodeId(2))
            assert not b.links.is_connected(NodeId(1))
    assert a.frames == b.frames == []
    older = 1 if spoken[1] < 5 else 2
    for row in told.values():
        assert "formats 5 to 6 at node 2" in str(row["reason"])
        span = "format 4" if older == 1 else "formats 7 to 8"
        assert f"{span} at node 1" in str(row["reason"])
        assert f"start a newer raftmq on node {older}" in str(row["reason"])
        assert row["log_level"] == "warning"


async def test_a_demand_ends_streams_of_older_formats_and_says_why() -> None:
    a, b = Node(1, formats=(5, 5)), Node(2, formats=(5, 6))
    introduce(a, b)
    with capture_logs() as logs:
        async with running(a, b):
            await both_connected(a, b)
            b.links.demand(6, "raftmq.level is 2")
            await a.until(lambda: a.lost)
            await b.until(lambda: b.lost)
            await a.until(lambda: any("raftmq.level is 2" in str(row) for row in logs))
            assert not a.links.is_connected(NodeId(2))
            assert not b.links.is_connected(NodeId(1))
    assert any(
        "format 6 at node 2 (raftmq.level is 2)" in str(row.get("reason"))
        and row["event"] == "peer refused"
        for row in logs
    )


async def test_another_cluster_is_refused_by_name() -> None:
    a, b = Node(1), Node(2, cluster_id="other")
    introduce(a, b)
    async with running(a, b):
        sock = socket.create_connection((b.address.host, b.address.port))
        sock.setblocking(False)
        await write_hello(sock, Hello(PEER_FORMATS[0], "c", 1, "0b", "bulk"))
        assert "'c'" in (await read_hello(sock)).refusal
        sock.close()
        assert not a.links.is_connected(NodeId(2))


@pytest.mark.parametrize(
    "hello",
    [
        b"\xff" * 8,
        b'{"version":1,"cluster_id":"\xff","node_id":1,"storage_id":"1","stream":"bulk"}',
        b'{"version":1,"cluster_id":"c","node_id":1,"storage_id":"zz","stream":"bulk"}',
        b'{"version":1,"cluster_id":"c","node_id":1,"storage_id":"-1","stream":"bulk"}',
        b'{"version":1,"cluster_id":"c","node_id":4294967296,"storage_id":"1","stream":"bulk"}',
        b'{"version":1,"cluster_id":"c","node_id":1,"storage_id":"1","stream":"bulk",'
        b'"address":"%s:1"}' % (b"x" * 80),
        b'{"version":1,"cluster_id":"c","node_id":1,"storage_id":"1","stream":"bulk",'
        b'"address":"a\\u0000b:1"}',
    ],
)
async def test_a_nonsensical_hello_costs_its_connection_alone(hello: bytes) -> None:
    a, b = Node(1), Node(2)
    async with running(b):
        sock = socket.create_connection((b.address.host, b.address.port))
        sock.sendall(struct.pack(">I", len(hello)) + hello)
        await trio.lowlevel.checkpoint()
        sock.setblocking(False)
        with trio.fail_after(30):
            await trio.lowlevel.wait_readable(sock)  # an answer or the end
        introduce(a, b)
        async with running(a):
            await a.until(lambda: b.links.is_connected(NodeId(1)))
        sock.close()


async def test_no_descriptor_for_a_peer_is_no_reason_to_die(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = Node(1), Node(2)
    refusals = [errno.EMFILE, errno.ENFILE]

    class Scarce(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            if refusals:
                raise OSError(refusals.pop(), "scarce")
            return super().accept()

    b.listener = Scarce(fileno=b.listener.detach())
    b.listener.setblocking(False)
    monkeypatch.setattr(peer_links, "ACCEPT_RETRY_S", 0.001)
    introduce(a, b)
    async with running(a, b):
        await a.until(lambda: a.links.is_connected(NodeId(2)))
    assert refusals == []


async def test_a_stranger_is_answered_where_it_says_it_is() -> None:
    a, b = Node(1), Node(2)
    b.links.set_addresses({NodeId(1): a.address})
    async with running(a, b):
        await a.until(lambda: a.links.send(NodeId(2), KIND_RAFT, [b"welcome"]))
        await b.until(lambda: b.frames)


async def test_beats_are_heard_as_they_come() -> None:
    a, b = Node(1), Node(2)
    introduce(a, b)
    async with running(a, b):
        await a.until(lambda: a.links.is_connected(NodeId(2)))
        for count in (1, 2, 3):
            await b.until(lambda: a.links.send(NodeId(2), KIND_HEARTBEATS, [b"beat"]))
            await b.until(lambda count=count: len(b.frames) >= count)


async def test_many_small_frames_leave_the_loop_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrived at once may take long to handle; ticks go on meanwhile."""
    monkeypatch.setattr(peer_streams, "READ_TURN_S", 0.0)
    a, b = Node(1), Node(2)
    introduce(a, b)
    async with running(a, b) as nursery:
        await a.until(lambda: a.links.is_connected(NodeId(2)))
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += bool(b.frames)

        nursery.start_soon(others)
        a.links.send(NodeId(2), KIND_RAFT, [b"x" * 200_000])  # so that what follows waits behind
        for _ in range(500):
            a.links.send(NodeId(2), KIND_RAFT, [b"small"])
        await b.until(lambda: len(b.frames) == 501)
    assert turns >= 250


# ---- strangers ----


async def say_hello(b: Node, node_id: int, address: str = "") -> socket.socket:
    """A stranger with a valid hello, and b's answer to it read."""
    sock = socket.create_connection((b.address.host, b.address.port))
    sock.setblocking(False)
    await write_hello(sock, Hello(PEER_FORMATS[0], "c", node_id, f"{node_id:x}", "bulk", address))
    with trio.fail_after(30):
        answer = await read_hello(sock)
    if answer.refusal:
        sock.close()
        raise PeerRefusedError(answer.refusal)
    return sock


async def test_nobody_is_dialled_at_an_address_that_he_gives() -> None:
    b = Node(2)
    dialled = socket.create_server(("127.0.0.1", 0))
    dialled.setblocking(False)
    where = f"127.0.0.1:{dialled.getsockname()[1]}"
    async with running(b):
        socks = [await say_hello(b, n, address=where) for n in range(100, 110)]
        await trio.testing.wait_all_tasks_blocked()
        assert not b.links._addresses
        assert not b.links.streams()
        with pytest.raises(BlockingIOError):
            dialled.accept()
        for sock in socks:
            sock.close()
    dialled.close()


async def test_who_cannot_be_dialled_is_answered_on_what_he_dialled() -> None:
    """A node that joins, of which no configuration tells, or one that moved."""
    a, b = Node(1), Node(2)
    a.links.set_addresses({NodeId(2): b.address})
    async with running(b):
        async with running(a):
            await b.until(lambda: b.links.is_connected(NodeId(1)))
            assert NodeId(1) in b.greeted
            for kind in (KIND_RAFT, KIND_METADATA, KIND_BROKER, KIND_FORMATION):
                await b.until(lambda kind=kind: b.links.send(NodeId(1), kind, [bytes(1 << 20)]))
            await b.until(lambda: b.links.send(NodeId(1), KIND_HEARTBEATS, [b"beat"]))
            await a.until(lambda: len(a.frames) == 5)
            assert {sender for sender, _, _ in a.frames} == {2}
        await b.until(lambda: b.lost == [1])
        assert not b.links.is_connected(NodeId(1))


async def test_strangers_are_few() -> None:
    b = Node(2)
    async with running(b):
        socks = [await say_hello(b, n) for n in range(100, 100 + peer_links.GUESTS_MAX)]
        with pytest.raises(PeerRefusedError, match="does not know"):
            await say_hello(b, 99)
        b.links.set_addresses({NodeId(99): Address("127.0.0.1", 1)})
        socks.append(await say_hello(b, 99))  # one of whom it knows
        assert b.links.refusals["limit"] == 1
        for sock in socks:
            sock.close()


async def test_a_stranger_does_not_push_out_a_peer_that_speaks() -> None:
    b = Node(2)
    async with running(b):
        real = await say_hello(b, 1)
        real.send(FRAME_HEADER.pack(4, crc32c(b"real"), KIND_RAFT) + b"real")
        await b.until(lambda: b.frames)
        others = [await say_hello(b, 1) for _ in range(5)]
        assert len(b.links._accepted[NodeId(1), "bulk"]) == peer_links.STREAMS_PER_KIND_MAX
        real.send(FRAME_HEADER.pack(4, crc32c(b"more"), KIND_RAFT) + b"more")
        await b.until(lambda: len(b.frames) == 2)
        for sock in [real, *others]:
            sock.close()


async def test_peers_that_come_at_once_are_as_few() -> None:
    b = Node(2)
    socks: list[socket.socket] = []

    async def come(node_id: int) -> None:
        with suppress(PeerRefusedError):  # told before others took the last place
            socks.append(await say_hello(b, node_id))

    async with running(b):
        async with trio.open_nursery() as nursery:
            for n in range(100, 100 + 2 * peer_links.GUESTS_MAX):
                nursery.start_soon(come, n)
        await b.until(lambda: b.links.refusals["limit"] == peer_links.GUESTS_MAX)
        assert len({peer for peer, _ in b.links._accepted}) == peer_links.GUESTS_MAX
        b.links.set_addresses({NodeId(1): Address("127.0.0.1", 1)})
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(come, 1)
        await b.until(lambda: b.links.refusals["limit"] > peer_links.GUESTS_MAX + 6)
        assert len(b.links._accepted[NodeId(1), "bulk"]) == peer_links.STREAMS_PER_KIND_MAX
        for sock in socks:
            sock.close()


async def test_a_stream_that_ends_leaves_nothing_to_the_collector() -> None:
    """Half a frame of it may be a megabyte, which its peers' share of memory counts no longer."""
    b = Node(2)
    half = FRAME_HEADER.pack(8 << 20, 0, KIND_RAFT) + bytes(100)
    async with running(b):
        gc.collect()
        gc.disable()
        try:
            socks = [await say_hello(b, 1) for _ in range(peer_links.STREAMS_PER_KIND_MAX)]
            for sock in socks:
                sock.send(half)
            socks += [await say_hello(b, 1) for _ in range(3)]  # each takes the place of another
            await b.until(lambda: b.links.refusals["limit"] == 3)
            accepted = b.links._accepted
            most = peer_links.STREAMS_PER_KIND_MAX
            await b.until(lambda: sum(map(len, accepted.values())) == most)
            await trio.testing.wait_all_tasks_blocked()
            readers = [one for one in gc.get_objects() if type(one) is peer_streams.FrameReader]
            assert len(readers) == peer_links.STREAMS_PER_KIND_MAX
        finally:
            gc.enable()
        for sock in socks:
            sock.close()


async def test_connections_without_a_hello_make_room_for_others() -> None:
    b = Node(2)
    async with running(b):
        where = b.address.host, b.address.port
        silent = [socket.create_connection(where) for _ in range(peer_links.NAMELESS_MAX + 5)]
        await b.until(lambda: b.links.refusals["limit"] == 5)
        assert len(b.links._nameless) <= peer_links.NAMELESS_MAX
        (await say_hello(b, 1)).close()
        for sock in silent:
            sock.close()


@pytest.mark.parametrize("hello", [b'{"z":' + b"[" * 1_200, b"[" * 4_000, b"\xff" * 50])
async def test_a_hello_that_cannot_be_read_is_counted_and_told(hello: bytes) -> None:
    b = Node(2)
    async with running(b):
        with capture_logs() as logs:
            sock = socket.create_connection((b.address.host, b.address.port))
            sock.sendall(struct.pack(">I", len(hello)) + hello)
            sock.setblocking(False)
            assert await until_end(sock) == b""
            sock.close()
        assert b.links.refusals["hello"] == 1
        assert [line["event"] for line in logs] == ["no hello of a peer"]


@pytest.mark.parametrize("bug", [KeyError("planted"), RecursionError(), AssertionError("planted")])
@pytest.mark.parametrize("border", ["frame", "identity", "dial"])
async def test_a_bug_at_a_border_costs_a_stream_and_is_told_once(
    bug: Exception, border: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = Node(1), Node(2)
    introduce(a, b)
    planted = 0

    def plant(*_what: object) -> None:
        nonlocal planted
        planted += 1
        if planted < 4:
            raise bug

    if border == "identity":
        monkeypatch.setattr(b.links, "_on_identity", plant)
    elif border == "dial":
        monkeypatch.setattr(b.links, "_stands", plant)
    else:
        monkeypatch.setattr(b.links, "_on_frame", plant)
    with capture_logs() as logs:
        async with running(a, b):
            while b.links.refusals["bug"] < 2:
                a.links.send(NodeId(2), KIND_RAFT, [b"x"])
                await trio.sleep(0.001)
            monkeypatch.undo()
            await a.until(lambda: a.links.is_connected(NodeId(2)))
            await b.until(lambda: b.links.is_connected(NodeId(1)))
    told = [line for line in logs if line["event"] == "a peer's stream met a bug"]
    assert {type(bug).__name__ in line["why"] for line in told} == {True}
    kinds = {line["where"] for line in told}
    assert len([line for line in told if line["exc_info"]]) == len(kinds), "each kind once in full"
    assert bool(b.broken) == isinstance(bug, AssertionError), "a broken invariant stops the node"


@pytest.mark.parametrize("storage_id", [11, 7], ids=["same storage", "other storage"])
async def test_a_second_process_of_a_node_is_refused_and_told_why(storage_id: int) -> None:
    a, b = Node(1), Node(2)
    rival = Node(1, storage_id=storage_id, process_id="rival")
    introduce(a, b)
    rival.links.set_addresses({NodeId(2): b.address})
    async with running(a, b):
        await b.until(lambda: b.links.is_connected(NodeId(1)))
        async with running(rival):
            await rival.until(lambda: rival.links.taken)
            assert "node_id 1 is taken" in rival.links.taken[NodeId(2)]
            assert not rival.links.is_connected(NodeId(2))
            (told,) = b.links.rivals()
            assert (told.node_id, told.storage_id) == (1, f"{storage_id:016x}")
            assert told.address == str(rival.address)
        assert a.links.is_connected(NodeId(2))
        assert a.links.taken == {}
        assert a.lost == b.lost == []


async def test_who_only_says_that_it_is_a_node_keeps_the_node_out_of_nothing() -> None:
    """Anybody can come to the port first; the process at the node's address is the node."""
    a, b, stranger = Node(1), Node(2), Node(1, storage_id=7, process_id="stranger")
    introduce(a, b)
    stranger.links.set_addresses({NodeId(2): b.address})
    b.links.set_addresses({NodeId(1): a.address})
    async with running(b, stranger):
        await b.until(lambda: stranger.links.is_connected(NodeId(2)))
        async with running(a):
            await a.until(lambda: a.links.is_connected(NodeId(2)))
            await a.until(lambda: b.links.is_connected(NodeId(1)))
            assert a.links.taken == {}
            assert b.links.rivals() == []


async def test_the_next_process_of_a_node_comes_as_soon_as_the_first_has_ended() -> None:
    first, then, other = Node(1), Node(1, process_id="then"), Node(2)
    introduce(first, other)
    then.links.set_addresses({NodeId(2): other.address})
    async with running(other):
        async with running(first):
            await other.until(lambda: other.links.is_connected(NodeId(1)))
            await first.until(lambda: first.links.is_connected(NodeId(2)))
        async with running(then):
            await then.until(lambda: then.links.is_connected(NodeId(2)))
            assert then.links.taken == {}
    assert other.links.refusals["identity"] == 0
