"""TLS between nodes: who comes in, what passes, what a stranger is told, how it is turned on."""

from __future__ import annotations

import socket
import ssl
import struct
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trustme
from crc32c import crc32c
from structlog.testing import capture_logs

from raftmq.config import ConfigError, NodeConfig
from raftmq.raft.messages import StoredChunk
from raftmq.replication.multiraft import Stream
from raftmq.runtime import peer_links
from raftmq.runtime.peer_hello import PEER_FORMATS, Hello
from raftmq.runtime.peer_links import KIND_RAFT
from raftmq.runtime.peer_streams import FRAME_HEADER
from raftmq.runtime.peer_tls import PeerTls, named_node, node_name
from raftmq.runtime.tls import PeerTlsSocket
from raftmq.types import NodeId
from tests.runtime.test_catch_up_stream import chunk, file_of
from tests.runtime.test_peer_links import Node, introduce, running, until_end
from tests.runtime.test_revocation import revoked_of

ONE, TWO = NodeId(1), NodeId(2)


@cache
def authority(name: str = "peers") -> trustme.CA:
    return trustme.CA(organization_name=name)


def files(folder: Path, *names: str, ca: trustme.CA | None = None) -> dict[str, Path]:
    """A certificate with these names, its key and its CA, by the keys of a configuration."""
    ca = ca or authority()
    folder.mkdir(exist_ok=True)
    issued = ca.issue_cert(*names)
    found = {
        "peer_certificate_file": folder / "peer.pem",
        "peer_key_file": folder / "peer.key",
        "peer_ca_file": folder / "peer-ca.pem",
    }
    found["peer_certificate_file"].write_bytes(b"".join(b.bytes() for b in issued.cert_chain_pems))
    found["peer_key_file"].write_bytes(issued.private_key_pem.bytes())
    found["peer_key_file"].chmod(0o600)
    ca.cert_pem.write_to_path(str(found["peer_ca_file"]))
    return found


def config(folder: Path, node_id: int, mode: str = "required", **changed: Any) -> NodeConfig:
    fields: dict[str, Any] = files(folder / str(node_id), node_name(node_id)) | changed
    return NodeConfig(node_id=node_id, data=folder, peer_tls=mode, **fields)


def secure(folder: Path, node_id: int, mode: str = "required", **changed: Any) -> Node:
    return Node(node_id, tls=PeerTls(config(folder, node_id, mode, **changed)))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Node, Node]:
    a, b = secure(tmp_path, 1), secure(tmp_path, 2)
    introduce(a, b)
    return a, b


def is_hidden(a: Node, b: Node) -> bool:
    streams = [
        stream
        for node, other in ((a, TWO), (b, ONE))
        for (peer, _), stream in node.links._streams.items()
        if peer == other
    ]
    return all(isinstance(stream.sock, PeerTlsSocket) for stream in streams)


async def connected(*nodes: Node) -> None:
    for node, other in permutations(nodes, 2):
        node_id = NodeId(other.links._hello.node_id)
        await node.until(lambda n=node, i=node_id: n.links.is_connected(i))


# ---- what passes ----


async def test_frames_arrive_whole_and_in_order(pair: tuple[Node, Node]) -> None:
    a, b = pair
    async with running(a, b):
        await connected(a, b)
        await a.until(lambda: is_hidden(a, b))
        sizes = [0, 1, 700, 16_384, 65_527, 65_528, 300_000, 5, 2_000_000, 3]
        bodies = [bytes([i]) * size for i, size in enumerate(sizes)]
        for body in bodies:
            half = len(body) // 2
            assert a.links.send(TWO, KIND_RAFT, [body[:half], memoryview(body)[half:]])
            with trio.fail_after(30):
                while a.links.queued_bytes()[TWO]:
                    await trio.lowlevel.checkpoint()
        await b.until(lambda: len(b.frames) == len(bodies))
        assert [frame[2] for frame in b.frames] == bodies
        for refusals in (a.links.refusals, b.links.refusals):
            assert refusals["certificate"] == refusals["frame"] == refusals["bug"] == 0


async def test_a_queue_that_the_kernel_did_not_take_is_sent_later(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than its buffers hold, while nobody reads: parts of frames wait encrypted."""
    a, b = pair
    for node in pair:
        node.links._queue_bytes_max = 64 << 20
    introduce(a, b)
    for stream in a.links._streams.values():
        stream.queue_bytes_max = 64 << 20
    async with running(a, b):
        await a.until(lambda: is_hidden(a, b))
        bodies = [bytes([i]) * (700_000 + i) for i in range(40)]
        for body in bodies:  # without a turn for the reader
            assert a.links.send(TWO, KIND_RAFT, [body[:100], body[100:]])
        assert a.links.queued_bytes()[TWO] > 10 << 20
        await b.until(lambda: len(b.frames) == len(bodies))
        assert [frame[2] for frame in b.frames] == bodies


async def test_what_lies_in_a_file_is_sent(pair: tuple[Node, Node], tmp_path: Path) -> None:
    """Which the kernel cannot do here."""
    a, b = pair
    data = bytes(range(256)) * 20_000
    file = file_of(tmp_path, data)
    a.links._streams[TWO, Stream.CATCH_UP].queue_bytes_max = 8 << 20
    async with running(a, b):
        await a.until(lambda: a.links.has_room_for_stored(TWO, 1))
        assert a.links.send_stored(TWO, [b"he", b"ad"], chunk(file, 7, 3_000_000))
        assert a.links.send_stored(TWO, [b"bare"], StoredChunk((), 4))
        await b.until(lambda: len(b.frames) == 2)
        assert [frame[2] for frame in b.frames] == [b"head" + data[7:3_000_007], b"bare"]


async def test_a_peer_that_ended_is_seen_without_reading(pair: tuple[Node, Node]) -> None:
    a, b = pair
    async with running(a, b):
        await a.until(lambda: is_hidden(a, b))
        assert not a.links.has_ended(TWO)
        (accepted,) = b.links._accepted[ONE, Stream.BULK]
        accepted.back.end()
        assert a.links.has_ended(TWO), "no word of TLS stands before the end"
        await a.until(lambda: a.lost)


# ---- who comes in ----


async def stranger(node: Node, context: ssl.SSLContext | None, data: bytes) -> tuple[bytes, str]:
    """What a node answers to whoever sends this, and what its own TLS says."""
    stream = await trio.open_tcp_stream(node.address.host, node.address.port)
    if context is None:
        sock = socket.socket(fileno=stream.socket.detach())
        with sock:
            sock.setblocking(False)
            sock.send(data)
            return await until_end(sock), ""
    hidden = trio.SSLStream(stream, context, server_hostname="raftmq-node-2")
    told = b""
    try:
        with trio.fail_after(30):
            await hidden.do_handshake()
            await hidden.send_all(data)
            while piece := await hidden.receive_some(1 << 16):
                told += piece
    except trio.BrokenResourceError as error:
        return told, f"{error.__cause__}"
    finally:
        await trio.aclose_forcefully(hidden)
    return told, ""


def said(node_id: int) -> bytes:
    hello = msgspec.json.encode(Hello(PEER_FORMATS[1], "c", node_id, f"{node_id:x}", "bulk"))
    return struct.pack(">I", len(hello)) + hello


def context_of(ca: trustme.CA, issued: trustme.LeafCert | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority().configure_trust(context)
    if issued is not None:
        issued.configure_cert(context)
    return context


@pytest.mark.parametrize("kind", ["plain", "no certificate", "another CA", "client", "node 3"])
async def test_a_stranger_is_refused_and_learns_nothing(kind: str, tmp_path: Path) -> None:
    node = secure(tmp_path, 2)
    ours, other = authority(), authority("clients")
    context = {
        "plain": None,
        "no certificate": context_of(ours, None),
        "another CA": context_of(ours, other.issue_cert("raftmq-node-1")),
        "client": context_of(ours, ours.issue_cert("alice.example.org")),
        "node 3": context_of(ours, ours.issue_cert("raftmq-node-3")),
    }[kind]
    frame = FRAME_HEADER.pack(4, crc32c(b"vote"), KIND_RAFT) + b"vote"
    with capture_logs() as logged:
        async with running(node):
            told, _ = await stranger(node, context, said(1) + frame)
            assert told == b""
            await node.until(lambda: node.links.refusals["certificate"] == 1)
            assert sum(node.links.refusals.values()) == 1
    assert node.identities == node.frames == []
    (line,) = logged
    assert line["event"] == (
        "refused a peer" if kind == "node 3" else "a stranger at the peer port"
    )
    ((where, mechanism, why),) = node.strangers
    assert where == line["where"]
    assert where.startswith("127.0.0.1:")
    assert (mechanism, why) == ("certificate", line["reason"])


async def test_who_has_the_certificate_of_a_node_is_that_node(tmp_path: Path) -> None:
    """The tests above fail for what they say alone."""
    node = secure(tmp_path, 2)
    context = context_of(authority(), authority().issue_cert("raftmq-node-1"))
    async with running(node), trio.open_nursery() as nursery:
        nursery.start_soon(stranger, node, context, said(1))
        await node.until(lambda: node.identities)
        assert [identity.node_id for identity in node.identities] == [1]
        nursery.cancel_scope.cancel()


async def test_a_node_says_nothing_to_another_one_than_it_meant(tmp_path: Path) -> None:
    a, c = secure(tmp_path, 1), secure(tmp_path, 3)
    a.links.set_addresses({TWO: c.address})
    with capture_logs() as logged:
        async with running(a, c):
            await a.until(lambda: a.links.refusals["certificate"] > 4)
            assert not a.links.is_connected(TWO)
            assert c.identities == []
    reasons = {line["reason"] for line in logged if line["event"] == "peer refused"}
    assert reasons == {f"{c.address}: its certificate is of node 3, not 2"}


async def test_a_node_that_is_not_trusted_says_so(tmp_path: Path) -> None:
    """Both sides, each in its own log."""
    other = files(tmp_path / "other", node_name(2), ca=authority("others"))
    both = tmp_path / "both.pem"
    both.write_bytes(authority().cert_pem.bytes() + authority("others").cert_pem.bytes())
    a, b = secure(tmp_path, 1), secure(tmp_path, 2, **other | {"peer_ca_file": both})
    introduce(a, b)
    with capture_logs() as logged:
        async with running(a, b):
            await a.until(lambda: a.links.refusals["certificate"] > 4)
            await b.until(lambda: b.links.refusals["certificate"])
    assert a.identities == b.identities == []
    reasons = " ".join(line["reason"] for line in logged)
    assert "certificate verify failed" in reasons
    assert "it refuses this node: TLS" in reasons


async def test_silent_strangers_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_links, "HALF_OPEN_MAX", 4)
    a, b = secure(tmp_path, 1), secure(tmp_path, 2)
    async with running(a, b):
        silent = [await trio.open_tcp_stream("127.0.0.1", a.address.port) for _ in range(12)]
        await a.until(lambda: a.links.refusals["limit"] == 8)
        introduce(a, b)
        await connected(a, b)
        for stream in silent:
            await stream.aclose()


async def test_a_silent_stranger_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_links, "HELLO_TIMEOUT_S", 0.05)
    node = secure(tmp_path, 1)
    async with running(node):
        stream = await trio.open_tcp_stream("127.0.0.1", node.address.port)
        await stream.send_all(b"\x16\x03")
        with trio.fail_after(30):
            assert await stream.receive_some() == b""
        assert node.links.refusals["deadline"] == 1
        await stream.aclose()


# ---- turning it on ----


async def check_meeting(a: Node, b: Node, hidden: bool | None, refusal: str) -> None:
    """Two nodes hear each other, hidden or not; None: they refuse each other, for that reason."""
    introduce(a, b)
    async with running(a, b):
        if hidden is None:
            await b.until(lambda: b.links.refusals[refusal] > 8)
            assert a.identities == b.identities == []
            return
        streams = [*a.links._streams.values(), *b.links._streams.values()]
        await a.until(lambda: all(stream.sock is not None for stream in streams))
        assert {isinstance(stream.sock, PeerTlsSocket) for stream in streams} == {hidden}
        assert b.links.send(ONE, KIND_RAFT, [b"heard"])
        await a.until(lambda: a.frames)


@pytest.mark.parametrize(
    ("modes", "hidden"),
    [
        (("off", "accept"), False),
        (("accept", "accept"), True),
        (("accept", "required"), True),
        (("required", "required"), True),
        (("off", "required"), None),
    ],
)
async def test_modes_of_two_nodes(
    modes: tuple[str, str], hidden: bool | None, tmp_path: Path
) -> None:
    a, b = (
        Node(node_id) if mode == "off" else secure(tmp_path, node_id, mode)
        for node_id, mode in zip((1, 2), modes, strict=True)
    )
    await check_meeting(a, b, hidden, "certificate")


async def test_a_stream_that_began_without_tls_does_not_stay_so(tmp_path: Path) -> None:
    """As of a node that was just being restarted when the first dial came."""
    a, b = secure(tmp_path, 1, "accept"), secure(tmp_path, 2, "accept")
    introduce(a, b)
    for stream in a.links._streams.values():
        stream.dials_plain = True
    async with running(a, b):
        await connected(a, b)
        await a.until(lambda: is_hidden(a, b))


# ---- certificates ----


@pytest.mark.parametrize(
    ("names", "node_id"),
    [
        (["raftmq-node-3"], 3),
        (["n3.example.org", "RaftMQ-Node-3"], 3),
        (["raftmq-node-0"], 0),
        ([], None),
        (["n3.example.org"], None),
        (["raftmq-node-3", "raftmq-node-4"], None),
        (["raftmq-node-"], None),
        (["raftmq-node-03"], None),
        (["raftmq-node-3.example.org"], None),
        (["raftmq-node-*"], None),
        (["raftmq-node-3\0"], None),
        (["raftmq-node-\N{SUPERSCRIPT THREE}"], None),
        (["raftmq-node-2147483648"], None),
        (["raftmq-node-" + "9" * 5_000], None),
    ],
)
def test_the_node_that_a_certificate_names(names: list[str], node_id: int | None) -> None:
    assert named_node(names) == node_id


def test_files_that_peers_would_not_trust_are_refused_at_once(tmp_path: Path) -> None:
    wrong = {
        "it must have the DNS name raftmq-node-1 ": files(tmp_path / "a", node_name(2)),
        "and that of no other": files(tmp_path / "b", node_name(1), node_name(2)),
        "peers would not trust it": files(tmp_path / "c", node_name(1))
        | {"peer_ca_file": files(tmp_path / "d", "x", ca=authority("others"))["peer_ca_file"]},
    }
    for told, changed in wrong.items():
        with pytest.raises(ConfigError, match=told) as caught:
            PeerTls(config(tmp_path, 1, **changed))
        assert str(caught.value).startswith("key 'peer_certificate_file': ")
    absent = tmp_path / "absent"
    for key in ("peer_certificate_file", "peer_key_file", "peer_ca_file"):
        with pytest.raises(ConfigError, match=f"key '{key}': {absent}: No such file"):
            PeerTls(config(tmp_path, 1, **{key: absent}))
        with pytest.raises(ConfigError, match=f"key '{key}': peer_tls 'required' needs it"):
            config(tmp_path, 1, **{key: None})


def test_nothing_older_than_tls_1_3_and_no_tickets(tmp_path: Path) -> None:
    """What can be read on a stream is frames, or its end."""
    loaded = PeerTls(config(tmp_path, 1)).loaded
    for context in (loaded.context, loaded.dialling):  # type: ignore[attr-defined]
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED
    assert loaded.context.num_tickets == 0


async def test_a_ca_is_replaced_while_streams_stand(tmp_path: Path) -> None:
    """Both CAs everywhere, then new certificates, then the new CA alone."""
    a, b = secure(tmp_path, 1), secure(tmp_path, 2)
    introduce(a, b)
    new = authority("new")

    async def reload() -> None:
        lost = [len(node.lost) for node in (a, b)]
        for node in (a, b):
            assert node.links._tls is not None
            loaded = node.links._tls.look(must_load=False)
            assert loaded is not None
            node.links._tls.take(loaded)
            for stream in list(node.links._streams.values()):
                stream.end()
        for node, count in zip((a, b), lost, strict=True):
            await node.until(lambda n=node, c=count: len(n.lost) > c)
        await connected(a, b)
        await a.until(lambda: is_hidden(a, b))

    async with running(a, b):
        await connected(a, b)
        for node_id in (1, 2):
            ca_file = tmp_path / str(node_id) / "peer-ca.pem"
            ca_file.write_bytes(authority().cert_pem.bytes() + new.cert_pem.bytes())
        await reload()
        for node_id in (1, 2):
            folder = tmp_path / str(node_id)
            bundle = (folder / "peer-ca.pem").read_bytes()
            files(folder, node_name(node_id), ca=new)
            (folder / "peer-ca.pem").write_bytes(bundle)
        await reload()
        for node_id in (1, 2):
            new.cert_pem.write_to_path(str(tmp_path / str(node_id) / "peer-ca.pem"))
        await reload()
        context = context_of(authority(), authority().issue_cert("raftmq-node-1"))
        new.configure_trust(context)
        told, why = await stranger(b, context, said(1))
        assert told == b""
        assert "unknown ca" in why


@pytest.mark.parametrize("dials", [True, False], ids=["dialled", "accepted"])
async def test_who_is_revoked_between_handshake_and_hello_gets_no_stream(
    dials: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is loaded when there is no stream yet that could be ended."""
    a, b = secure(tmp_path, 1), secure(tmp_path, 2)
    a.links.set_addresses({TWO: b.address})
    judge, other = (a, TWO) if dials else (b, ONE)
    read = peer_links.read_hello
    loaded: list[int] = []

    async def read_late(sock: Any) -> Hello:
        theirs = await read(sock)
        if sock.node_id == other:
            loaded.append(judge.links.end_revoked(revoked_of(sock.peer_certificate)))
        return theirs

    monkeypatch.setattr(peer_links, "read_hello", read_late)
    with capture_logs() as logged:
        async with running(a, b):
            await judge.until(lambda: len(loaded) > 4)
            assert set(loaded) == {0}
            assert not judge.links.is_connected(other)
    assert judge.identities == judge.frames == []
    reasons = [
        line["reason"] for line in logged if line["event"] in ("peer refused", "refused a peer")
    ]
    assert reasons
    assert all(reason.endswith("its certificate was revoked") for reason in reasons)
    if not dials:
        assert judge.links.refusals["certificate"] > 2
        assert {why for _, _, why in judge.strangers} == {"its certificate was revoked"}
