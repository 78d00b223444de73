"""A cluster's secret between nodes: who comes in, what a stranger is told, how it is replaced."""

from __future__ import annotations

import secrets
import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from crc32c import crc32c
from structlog.testing import capture_logs

from raftmq.config import ConfigError, NodeConfig
from raftmq.runtime import peer_links, peer_secret
from raftmq.runtime.peer_hello import PEER_FORMATS, STREAMS, Hello
from raftmq.runtime.peer_links import KIND_RAFT
from raftmq.runtime.peer_proofs import NUMBER_BYTES, PROOF_BYTES, StreamProofs
from raftmq.runtime.peer_secret import GREETING, REFUSED, SecretTls, read_secrets
from raftmq.runtime.peer_streams import FRAME_HEADER
from raftmq.runtime.peer_tls import THREADS, PeerTls
from raftmq.runtime.sockets import read_exactly, send_all
from raftmq.runtime.tls import PeerTlsSocket
from raftmq.tls import TlsLayer
from tests.runtime.test_peer_links import Node, introduce, running, until_end
from tests.runtime.test_peer_tls import ONE, TWO, check_meeting, connected, is_hidden
from tests.runtime.test_peer_tls import config as certified_config
from tests.runtime.test_peer_tls import secure as certified

FIRST, SECOND, STRANGE = ("0123456789abcdef" * 4, "fedcba9876543210" * 4, "a1b2c3d4e5f60718" * 4)


def secret_file(path: Path, *texts: str) -> Path:
    path.write_text("".join(f"{text}\n" for text in texts))
    path.chmod(0o600)
    return path


def config(folder: Path, node_id: int, mode: str = "required", *texts: str) -> NodeConfig:
    path = secret_file(folder / f"secret-{node_id}", *(texts or (FIRST,)))
    return NodeConfig(node_id=node_id, data=folder, peer_tls=mode, cluster_secret_file=path)


def secure(folder: Path, node_id: int, mode: str = "required", *texts: str) -> Node:
    return Node(node_id, tls=SecretTls(config(folder, node_id, mode, *texts)))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Node, Node]:
    a, b = secure(tmp_path, 1), secure(tmp_path, 2)
    introduce(a, b)
    return a, b


def said(node_id: int, cluster_id: str = "c") -> bytes:
    hello = Hello(PEER_FORMATS[1], cluster_id, node_id, f"{node_id:x}", "bulk")
    content = msgspec.json.encode(hello)
    return struct.pack(">I", len(content)) + content


VOTE = FRAME_HEADER.pack(4, crc32c(b"vote"), KIND_RAFT) + b"vote"


class Stranger:
    """A dialling side that does each step by hand."""

    def __init__(self, sock: PeerTlsSocket, layer: TlsLayer) -> None:
        self.sock = sock
        self.certificate = layer.peer_certificate or b""
        self.number = secrets.token_bytes(NUMBER_BYTES)
        self.greeting = b""

    @classmethod
    async def dial(cls, node: Node) -> Stranger:
        stream = await trio.open_tcp_stream(node.address.host, node.address.port)
        sock = socket.socket(fileno=stream.socket.detach())
        sock.setblocking(False)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        layer = TlsLayer(context)
        while not layer.is_ready:
            layer.shake()
            for piece in layer.outgoing():
                await send_all(sock, piece)
            if not layer.is_ready:
                await trio.lowlevel.wait_readable(sock)
                layer.feed(sock.recv(1 << 16))
        found = cls(PeerTlsSocket(sock, layer, None), layer)
        found.greeting = await read_exactly(found.sock, len(GREETING) + NUMBER_BYTES)
        assert found.greeting.startswith(GREETING)
        return found

    def proofs(self, secret: str = FIRST, **changed: Any) -> StreamProofs:
        made: dict[str, Any] = {
            "dialled_number": self.greeting[len(GREETING) :],
            "dialling_number": self.number,
            "certificate": self.certificate,
            "is_dialling": True,
        }
        return StreamProofs(secret.encode(), **made | changed)

    async def heard(self) -> bytes:
        """All that still comes until the other side hangs up."""
        told = b""
        with trio.fail_after(30):
            while True:
                try:
                    told += await read_exactly(self.sock, 1)
                except (EOFError, OSError):
                    self.sock.close()
                    return told


# ---- who comes in ----


async def test_frames_pass_both_ways(pair: tuple[Node, Node]) -> None:
    a, b = pair
    async with running(a, b):
        await connected(a, b)
        await a.until(lambda: is_hidden(a, b))
        bodies = [bytes([i]) * size for i, size in enumerate((0, 700, 65_528, 2_000_000))]
        for body in bodies:
            assert a.links.send(TWO, KIND_RAFT, [body])
        assert b.links.send(ONE, KIND_RAFT, [b"back"])
        await b.until(lambda: len(b.frames) == len(bodies))
        await a.until(lambda: a.frames)
        assert [frame[2] for frame in b.frames] == bodies
        for refusals in (a.links.refusals, b.links.refusals):
            assert sum(refusals.values()) == 0


async def test_who_knows_the_secret_is_the_node_that_it_says(tmp_path: Path) -> None:
    """The tests of strangers fail for what they leave out alone."""
    node = secure(tmp_path, 2)
    async with running(node):
        friend = await Stranger.dial(node)
        proofs = friend.proofs()
        await send_all(friend.sock, friend.number + proofs.known())
        assert proofs.is_known(await read_exactly(friend.sock, PROOF_BYTES))
        await send_all(friend.sock, said(1) + proofs.said(said(1)) + VOTE)
        (size,) = struct.unpack(">I", head := await read_exactly(friend.sock, 4))
        hello = await read_exactly(friend.sock, size)
        assert b'"cluster_id":"c"' in hello
        assert proofs.is_said(head + hello, await read_exactly(friend.sock, PROOF_BYTES))
        await node.until(lambda: node.frames)
        assert [identity.node_id for identity in node.identities] == [1]
        friend.sock.close()


async def knows_nothing(stranger: Stranger) -> None:
    await send_all(stranger.sock, said(1) + VOTE + bytes(100))


async def knows_another(stranger: Stranger) -> None:
    await send_all(stranger.sock, stranger.number + stranger.proofs(STRANGE).known())


async def knows_part_of_it(stranger: Stranger) -> None:
    await send_all(stranger.sock, stranger.number + stranger.proofs(FIRST[:-1]).known())


async def says_the_proof_of_the_other_side(stranger: Stranger) -> None:
    """As it would be sent back to whoever said it."""
    mirrored = stranger.proofs(is_dialling=False)
    await send_all(stranger.sock, stranger.number + mirrored.known())


async def has_the_proof_of_another_connection(stranger: Stranger) -> None:
    other = stranger.proofs(dialled_number=bytes(NUMBER_BYTES))
    await send_all(stranger.sock, stranger.number + other.known())


async def draws_the_same_number(stranger: Stranger) -> None:
    """Where both are the same, each number could stand for the other."""
    stranger.number = stranger.greeting[len(GREETING) :]
    mirrored = stranger.proofs(is_dialling=False)
    await send_all(stranger.sock, stranger.number + mirrored.known())


async def was_dialled_by_a_node(stranger: Stranger) -> None:
    """And hands on what was said to its own certificate."""
    other = stranger.proofs(certificate=b"its own")
    await send_all(stranger.sock, stranger.number + other.known())


async def says_the_proof_of_a_hello(stranger: Stranger) -> None:
    await send_all(stranger.sock, stranger.number + stranger.proofs().said(b""))


STRANGERS = [
    knows_nothing,
    knows_another,
    knows_part_of_it,
    says_the_proof_of_the_other_side,
    has_the_proof_of_another_connection,
    draws_the_same_number,
    was_dialled_by_a_node,
    says_the_proof_of_a_hello,
]


@pytest.mark.parametrize("act", STRANGERS, ids=lambda act: act.__name__)
async def test_a_stranger_is_refused_and_learns_nothing(
    act: Callable[[Stranger], Awaitable[None]], tmp_path: Path
) -> None:
    node = secure(tmp_path, 2)
    with capture_logs() as logged:
        async with running(node):
            stranger = await Stranger.dial(node)
            await act(stranger)
            assert await stranger.heard() in (REFUSED, b"")
            await node.until(lambda: node.links.refusals["secret"] == 1)
            assert sum(node.links.refusals.values()) == 1
    assert node.identities == node.frames == []
    (line,) = logged
    assert line["event"] == "a stranger at the peer port"
    assert line["reason"] == "it does not know the cluster's secret"
    assert [told[1:] for told in node.strangers] == [("secret", line["reason"])]


async def test_who_speaks_plain_is_refused(tmp_path: Path) -> None:
    node = secure(tmp_path, 2)
    async with running(node):
        with socket.create_connection((node.address.host, node.address.port)) as sock:
            sock.setblocking(False)
            sock.send(said(1))
            assert await until_end(sock) == b""
        await node.until(lambda: node.links.refusals["secret"] == 1)


@pytest.mark.parametrize("spoilt", ["hello", "proof", "proof of the other side"])
async def test_a_hello_without_its_proof_is_none(spoilt: str, tmp_path: Path) -> None:
    node = secure(tmp_path, 2)
    async with running(node):
        friend = await Stranger.dial(node)
        proofs = friend.proofs()
        await send_all(friend.sock, friend.number + proofs.known())
        await read_exactly(friend.sock, PROOF_BYTES)
        told = {
            "hello": said(3) + proofs.said(said(1)),
            "proof": said(1) + bytes(PROOF_BYTES),
            "proof of the other side": said(1) + friend.proofs(is_dialling=False).said(said(1)),
        }[spoilt]
        await send_all(friend.sock, told + VOTE)
        assert await friend.heard() == b""
        await node.until(lambda: node.links.refusals["hello"] == 1)
    assert node.identities == node.frames == []


async def test_what_was_said_on_one_connection_opens_no_other(tmp_path: Path) -> None:
    """A whole conversation that succeeded, byte for byte, to the node that it was held with."""
    node = secure(tmp_path, 2)
    async with running(node):
        friend = await Stranger.dial(node)
        proofs = friend.proofs()
        spoken = friend.number + proofs.known() + said(1) + proofs.said(said(1)) + VOTE
        await send_all(friend.sock, spoken)
        await node.until(lambda: node.frames)
        friend.sock.close()
        again = await Stranger.dial(node)
        await send_all(again.sock, spoken)
        assert await again.heard() in (REFUSED, b"")
        await node.until(lambda: node.links.refusals["secret"] == 1)
    assert len(node.frames) == len(node.identities) == 1


async def test_who_proves_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_links, "HELLO_TIMEOUT_S", 0.3)
    node = secure(tmp_path, 2)
    async with running(node):
        stranger = await Stranger.dial(node)
        await send_all(stranger.sock, stranger.number)  # and no proof
        assert await stranger.heard() == b""
        await node.until(lambda: node.links.refusals["deadline"] == 1)


async def test_those_who_prove_nothing_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where their handshakes of TLS are over."""
    monkeypatch.setattr(peer_links, "HALF_OPEN_MAX", 4)
    a, b = secure(tmp_path, 1), secure(tmp_path, 2)
    async with running(a, b):
        silent = [await Stranger.dial(a) for _ in range(12)]
        await a.until(lambda: a.links.refusals["limit"] == 8)
        introduce(a, b)
        await connected(a, b)
        for stranger in silent:
            stranger.sock.close()


async def test_a_node_whose_handshake_waits_for_a_thread_does_not_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_links, "HALF_OPEN_MAX", 6)
    a, b = secure(tmp_path, 1), secure(tmp_path, 2)
    tls = a.links._tls
    assert isinstance(tls, SecretTls)
    limiter = tls._handshakes._accepting
    async with running(a, b):
        for number in range(THREADS):
            limiter.acquire_on_behalf_of_nowait(number)
        b.links.set_addresses({ONE: a.address})
        await a.until(lambda: limiter.statistics().tasks_waiting == len(STREAMS))
        silent = [await trio.open_tcp_stream("127.0.0.1", a.address.port) for _ in range(12)]
        await a.until(lambda: a.links.refusals["limit"] == 10)
        for number in range(THREADS):
            limiter.release_on_behalf_of(number)
        await b.until(lambda: b.links.is_connected(ONE))
        assert sum(stream.dials for stream in b.links._streams.values()) == len(STREAMS)
        for stream in silent:
            await stream.aclose()


# ---- who is dialled ----


class Impostor:
    """A listener with a certificate of its own at the address of a node."""

    def __init__(self, act: Callable[[PeerTlsSocket], Awaitable[None]]) -> None:
        self.act = act
        self.context, self.certificate = peer_secret._own_context()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.address = self.listener.getsockname()
        self.heard = b""

    async def serve(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                await trio.lowlevel.wait_readable(self.listener)
                sock, _ = self.listener.accept()
                nursery.start_soon(self.meet, sock)

    async def meet(self, sock: socket.socket) -> None:
        with sock:
            sock.setblocking(False)
            layer = TlsLayer(self.context, is_server=True)
            while not layer.is_ready:
                await trio.lowlevel.wait_readable(sock)
                if not (data := sock.recv(1 << 16)):
                    return
                layer.feed(data)
                layer.shake()
                for piece in layer.outgoing():
                    await send_all(sock, piece)
            hidden = PeerTlsSocket(sock, layer, None)
            try:
                await self.act(hidden)
                while True:
                    self.heard += await read_exactly(hidden, 1)
            except (EOFError, OSError):
                return


async def says_nothing_of_a_secret(sock: PeerTlsSocket) -> None:
    await send_all(sock, said(2) * 2)


async def does_not_know_it(sock: PeerTlsSocket) -> None:
    await send_all(sock, GREETING + bytes(NUMBER_BYTES))
    await read_exactly(sock, NUMBER_BYTES + PROOF_BYTES)
    await send_all(sock, secrets.token_bytes(PROOF_BYTES))


async def sends_it_back(sock: PeerTlsSocket) -> None:
    await send_all(sock, GREETING + bytes(NUMBER_BYTES))
    told = await read_exactly(sock, NUMBER_BYTES + PROOF_BYTES)
    await send_all(sock, told[NUMBER_BYTES:])


async def refuses(sock: PeerTlsSocket) -> None:
    await send_all(sock, GREETING + bytes(NUMBER_BYTES))
    await read_exactly(sock, NUMBER_BYTES + PROOF_BYTES)
    await send_all(sock, REFUSED)


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (says_nothing_of_a_secret, "it does not go by the cluster's secret, or by a newer protoc"),
        (does_not_know_it, "it does not know the cluster's secret"),
        (sends_it_back, "it does not know the cluster's secret"),
        (refuses, "it does not accept the first secret of this node's cluster_secret_file"),
    ],
)
async def test_a_node_names_neither_itself_nor_its_cluster_to_an_impostor(
    act: Callable[[PeerTlsSocket], Awaitable[None]], reason: str, tmp_path: Path
) -> None:
    impostor = Impostor(act)
    a = secure(tmp_path, 1)
    with impostor.listener, capture_logs() as logged:
        a.links.set_addresses({TWO: type(a.address)(*impostor.address)})
        async with running(a) as nursery:
            nursery.start_soon(impostor.serve)
            await a.until(lambda: a.links.refusals["secret"] > 4)
            nursery.cancel_scope.cancel()
    assert impostor.heard == b""
    assert not a.links.is_connected(TWO)
    reasons = {line["reason"] for line in logged if line["event"] == "peer refused"}
    assert len(reasons) == 1
    assert reason in reasons.pop()


async def test_who_stands_between_cannot_hand_proofs_on(tmp_path: Path) -> None:
    """It has a certificate of its own, and reads and writes on both sides as it likes."""
    a, b = secure(tmp_path, 1), secure(tmp_path, 2)
    refused: list[bytes] = []

    async def relay(sock: PeerTlsSocket) -> None:
        forward = await Stranger.dial(b)
        await send_all(sock, forward.greeting)
        await send_all(forward.sock, await read_exactly(sock, NUMBER_BYTES + PROOF_BYTES))
        refused.append(answer := await read_exactly(forward.sock, PROOF_BYTES))
        await send_all(sock, answer)
        forward.sock.close()

    between = Impostor(relay)
    with between.listener:
        a.links.set_addresses({TWO: type(a.address)(*between.address)})
        async with running(a, b) as nursery:
            nursery.start_soon(between.serve)
            await a.until(lambda: a.links.refusals["secret"] > 4)
            nursery.cancel_scope.cancel()
    assert set(refused) == {REFUSED}
    assert b.links.refusals["secret"] > 4
    assert a.identities == b.identities == a.frames == b.frames == []


async def test_a_node_says_nothing_more_to_another_one_than_it_meant(tmp_path: Path) -> None:
    a, c = secure(tmp_path, 1), secure(tmp_path, 3)
    a.links.set_addresses({TWO: c.address})
    with capture_logs() as logged:
        async with running(a, c):
            await c.until(lambda: c.identities)  # it is a node, and may join
            await a.until(lambda: any(line["event"] == "peer refused" for line in logged))
            assert not a.links.is_connected(TWO)
            assert c.frames == []
    assert "node 3 answers at node 2's address" in str(logged)


async def test_clusters_with_one_secret_stay_apart(tmp_path: Path) -> None:
    a, b = secure(tmp_path, 1), secure(tmp_path, 2)
    b.links._hello = msgspec.structs.replace(b.links._hello, cluster_id="other")
    introduce(a, b)
    with capture_logs() as logged:
        async with running(a, b):
            await a.until(lambda: a.links.refusals["identity"])
    assert a.identities == b.identities == []
    assert "cluster_id 'other', this node is of 'c'" in str(logged)


# ---- turning it on, and what else peers may have ----


Maker = Callable[[Path, int, str], Node]


def plain(_folder: Path, node_id: int, _mode: str) -> Node:
    return Node(node_id)


@pytest.mark.parametrize(
    ("makers", "modes", "hidden"),
    [
        ((plain, secure), ("off", "accept"), False),
        ((secure, secure), ("accept", "accept"), True),
        ((secure, secure), ("accept", "required"), True),
        ((secure, secure), ("required", "required"), True),
        ((plain, secure), ("off", "required"), None),
        ((certified, secure), ("required", "required"), None),
        ((certified, secure), ("accept", "accept"), None),
    ],
)
async def test_modes_of_two_nodes(
    makers: tuple[Maker, Maker], modes: tuple[str, str], hidden: bool | None, tmp_path: Path
) -> None:
    a, b = (
        make(tmp_path, node_id, mode)
        for node_id, make, mode in zip((1, 2), makers, modes, strict=True)
    )
    await check_meeting(a, b, hidden, "secret")


async def test_a_node_with_certificates_is_told_apart(tmp_path: Path) -> None:
    """Each says in its log what is wrong with the other."""
    a, b = certified(tmp_path, 1), secure(tmp_path, 2)
    introduce(a, b)
    with capture_logs() as logged:
        async with running(a, b):
            await a.until(lambda: a.links.refusals["certificate"] > 8)
            await b.until(lambda: b.links.refusals["secret"] > 8)
    told = str(logged)
    assert "it does not go by the cluster's secret: TLS: " in told
    assert "certificate verify failed" in told


async def test_a_secret_is_replaced_while_streams_stand(tmp_path: Path) -> None:
    """The new one second everywhere, then first, then alone; nodes take each step one by one."""
    a, b = secure(tmp_path, 1), secure(tmp_path, 2)
    introduce(a, b)

    async def load(node: Node, *texts: str) -> None:
        tls = node.links._tls
        assert isinstance(tls, SecretTls)
        secret_file(tls.path, *texts, "")
        loaded = tls.look(must_load=False)
        assert loaded is not None
        tls.take(loaded)
        assert tls.secrets_count == len(texts)
        lost = [len(n.lost) for n in (a, b)]
        for stream in [*a.links._streams.values(), *b.links._streams.values()]:
            stream.end()
        for n, count in zip((a, b), lost, strict=True):
            await n.until(lambda n=n, c=count: len(n.lost) > c)
        await connected(a, b)
        await a.until(lambda: is_hidden(a, b))

    async with running(a, b):
        await connected(a, b)
        for texts in ((FIRST, SECOND), (SECOND, FIRST), (SECOND,)):
            for node in (a, b):
                await load(node, *texts)
        assert a.links.refusals["secret"] == b.links.refusals["secret"] == 0
        stranger = await Stranger.dial(b)
        await send_all(stranger.sock, stranger.number + stranger.proofs(FIRST).known())
        assert await stranger.heard() == REFUSED


# ---- the file ----


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it has no secret in it"),
        ("\n \n", "it has no secret in it"),
        (FIRST[:-1], "line 1 is not 32 random bytes"),
        ("x" * 80, "line 1 is not 32 random bytes"),
        ("0" * 64, "line 1 is not 32 random bytes"),
        ("a passphrase of 42 characters, as one says", "line 1 is not 32 random bytes"),
        (f"{FIRST}\n\n{SECOND[:40]}", "line 3 is not 32 random bytes"),
        ("Aa0+/bCd" * 200, "line 1 is not 32 random bytes"),
        ("\n".join(f"{i:02}{FIRST}" for i in range(9)), "more than 8 secrets"),
    ],
)
def test_a_file_that_holds_no_secret_is_refused(text: str, why: str, tmp_path: Path) -> None:
    path = secret_file(tmp_path / "secret", text)
    with pytest.raises(ConfigError) as caught:
        read_secrets(path)
    told = str(caught.value)
    assert told.startswith(f"key 'cluster_secret_file': {path}: {why}")
    assert caught.value.__cause__ is None
    for word in filter(None, text.split("\n")):
        assert word.strip() == "" or word not in told


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    path = secret_file(tmp_path / "secret", FIRST)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="everyone may read it: chmod o-r"):
        read_secrets(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_secrets(tmp_path / "absent")


@pytest.mark.parametrize("make", [secrets.token_hex, secrets.token_urlsafe])
def test_what_is_random_is_taken(make: Callable[[int], str], tmp_path: Path) -> None:
    for _ in range(30):
        text = make(32)
        assert read_secrets(secret_file(tmp_path / "s", text)).texts == (text.encode(),)


def test_a_file_that_cannot_be_used_changes_nothing(tmp_path: Path) -> None:
    tls = SecretTls(config(tmp_path, 1))
    assert tls.look(must_load=False) is None
    tls.path.write_text("spoilt\n")
    with pytest.raises(ConfigError):
        tls.look(must_load=False)
    assert tls.look(must_load=False) is None, "told once"
    assert tls.secrets_count == 1
    with pytest.raises(ConfigError):
        tls.look(must_load=True)


def test_nothing_shows_a_secret(tmp_path: Path) -> None:
    tls = SecretTls(config(tmp_path, 1))
    shown = [repr(tls), repr(vars(tls)), repr(tls.loaded), repr(config(tmp_path, 1))]
    assert FIRST not in "".join(shown)


def test_secret_or_certificates(tmp_path: Path) -> None:
    made = config(tmp_path, 1)
    with pytest.raises(ConfigError, match="'peer_key_file': goes without cluster_secret_file"):
        NodeConfig(
            node_id=1,
            data=tmp_path,
            peer_tls="accept",
            cluster_secret_file=made.cluster_secret_file,
            peer_key_file=tmp_path,
        )
    assert isinstance(peer_secret.peer_guard(made), SecretTls)
    assert peer_secret.peer_guard(NodeConfig(node_id=1, data=tmp_path)) is None
    assert isinstance(peer_secret.peer_guard(certified_config(tmp_path, 1)), PeerTls)


# ---- certificates that say nothing ----


def test_each_process_has_a_certificate_of_its_own(tmp_path: Path) -> None:
    one, two = SecretTls(config(tmp_path, 1)), SecretTls(config(tmp_path, 1))
    assert one._certificate != two._certificate
    for context in (one.context, one.dialling):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert one.context.num_tickets == 0
    assert one.expires_s is None


def test_it_says_what_is_to_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match="pip install"):
        SecretTls(config(tmp_path, 1))


@pytest.mark.slow
def test_it_costs_nothing_where_it_is_off() -> None:
    code = "import sys, raftmq.node.node; print('cryptography' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# ---- the proofs ----


KEYS: dict[str, dict[str, Any]] = {
    "the same": {},
    "secret": {"secret": SECOND.encode()},
    "dialled number": {"dialled_number": b"n" * NUMBER_BYTES},
    "dialling number": {"dialling_number": b"n" * NUMBER_BYTES},
    "numbers exchanged": {
        "dialled_number": b"b" * NUMBER_BYTES,
        "dialling_number": b"a" * NUMBER_BYTES,
    },
    "certificate": {"certificate": b"another"},
    "direction": {"is_dialling": True},
}


@pytest.mark.parametrize(("name", "changed"), list(KEYS.items()), ids=list(KEYS))
def test_a_proof_is_of_all_that_it_is_made_of(name: str, changed: dict[str, Any]) -> None:
    made: dict[str, Any] = {
        "secret": FIRST.encode(),
        "dialled_number": b"a" * NUMBER_BYTES,
        "dialling_number": b"b" * NUMBER_BYTES,
        "certificate": b"certificate",
    }
    dialling = StreamProofs(**made, is_dialling=True)
    dialled = StreamProofs(**{**made, "is_dialling": False} | changed)
    is_right = name == "the same"
    assert dialled.is_known(dialling.known()) is is_right
    assert dialling.is_known(dialled.known()) is is_right
    assert dialled.is_said(b"hello", dialling.said(b"hello")) is is_right
    assert dialling.is_said(b"answer", dialled.said(b"answer")) is is_right


def test_the_answer_is_to_the_hello_that_was_heard() -> None:
    made: dict[str, Any] = {
        "dialled_number": b"a" * NUMBER_BYTES,
        "dialling_number": b"b" * NUMBER_BYTES,
        "certificate": b"certificate",
    }
    dialling = StreamProofs(b"s", **made, is_dialling=True)
    dialled = StreamProofs(b"s", **made, is_dialling=False)
    dialling.said(b"hello of node 1")
    dialled.is_said(b"hello of node 3", b"")
    assert not dialling.is_said(b"answer", dialled.said(b"answer"))
    steps = [proofs() for each in (dialling, dialled) for proofs in (each.known,)]
    assert len({*steps, dialling.said(b""), dialled.said(b"")}) == 4


def test_numbers_have_a_length() -> None:
    """So what a key is made of can be taken apart in one way alone."""
    with pytest.raises(AssertionError):
        StreamProofs(
            b"s",
            dialled_number=b"a",
            dialling_number=bytes(NUMBER_BYTES),
            certificate=b"",
            is_dialling=True,
        )
