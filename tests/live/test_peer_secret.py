"""Nodes that go by a secret of the cluster: what works, what strangers bring about who do not know
it, and a plain cluster that gets one, replaces it and gives it up under load."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from uuid import UUID

import pytest
from attrs import define

from benchmarks.rolling import TOPIC, Application
from raftmq.runtime.peer_proofs import NUMBER_BYTES, PROOF_BYTES, StreamProofs
from raftmq.runtime.peer_secret import GREETING, REFUSED
from raftmq.types import TopicId
from tests.live.harness import Cluster, Node, wait_until
from tests.live.hostile import hello
from tests.live.load import create_topic
from tests.live.test_peer_tls import (
    abuse,
    is_whole,
    plain_peers,
    refused,
    seen,
    showing,
    survive_a_kill,
)

pytestmark = [pytest.mark.live, pytest.mark.slow]

FIRST, SECOND = secrets.token_hex(32), secrets.token_urlsafe(32)


def write_secrets(path: Path, *texts: str) -> None:
    """Replace the file at once, as an operator does it: nobody reads a half of it."""
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(f"{text}\n" for text in texts))
    fresh.chmod(0o600)
    fresh.rename(path)


def give_secret(node: Node, folder: Path, *texts: str) -> Path:
    path = folder / f"secret-{node.node_id}"
    write_secrets(path, *texts)
    node.environment["RAFTMQ_CLUSTER_SECRET_FILE"] = str(path)
    return path


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("secured")
    cluster = Cluster(folder, settings={"peer_tls": "required"})
    for node in cluster.nodes.values():
        give_secret(node, folder, FIRST)
    with cluster:
        create_topic(cluster.bootstrap, "t", 3, min_insync_replicas="2")
        yield cluster


def told(node: Node) -> dict[str, object]:
    found: dict[str, object] = node.get("/status")["peer_tls"]
    return found


def test_records_survive_a_kill(secured: Cluster) -> None:
    """Formation, votes, appends, catch-up: all of it passes. And no page or log has the secret."""
    survive_a_kill(secured)
    for node in secured.nodes.values():
        assert told(node) == {
            "mode": "required",
            "by": "secret",
            "is_open": False,
            "plain_peers": [],
            "expires_s": None,
            "secrets": 1,
        }
        page = node.text("/metrics")
        assert 'raftmq_peer_streams_refused_total{reason="secret"} 0' in page
        assert "certificate_expires_timestamp_seconds{" not in page
        for text in (page, node.text("/status"), node.log_path.read_text()):
            assert FIRST not in text


# ---- strangers ----


@define
class Dialled:
    """What a stranger saw of a node before it had to say something."""

    certificate: bytes
    number: bytes
    own: bytes

    def proofs(
        self, secret: str, *, certificate: bytes = b"", is_dialling: bool = True
    ) -> StreamProofs:
        return StreamProofs(
            secret.encode(),
            dialled_number=self.number,
            dialling_number=self.own,
            certificate=certificate or self.certificate,
            is_dialling=is_dialling,
        )


def offer(node: Node, say: Callable[[Dialled], bytes]) -> bytes:
    """What the peer port answers to this, behind TLS."""
    answer = b""
    with ExitStack() as stack, suppress(ssl.SSLError, ConnectionError, TimeoutError):
        sock = socket.create_connection((node.host, node.peer_port), timeout=10)
        stack.callback(sock.close)
        hidden = stack.enter_context(showing(None).wrap_socket(sock))
        greeting = b""
        while len(greeting) < len(GREETING) + NUMBER_BYTES:
            greeting += hidden.recv(1024)
        certificate = hidden.getpeercert(binary_form=True)
        assert certificate is not None
        seen = Dialled(certificate, greeting[len(GREETING) :], secrets.token_bytes(NUMBER_BYTES))
        hidden.settimeout(2)
        hidden.sendall(say(seen))
        while piece := hidden.recv(65536):
            answer += piece
    return answer


def admitted(said: bytes, secret: str = FIRST) -> Callable[[Dialled], bytes]:
    """What a node says that knows the secret."""

    def say(dialled: Dialled) -> bytes:
        proofs = dialled.proofs(secret)
        return dialled.own + proofs.known() + said + proofs.said(said)

    return say


def test_a_stranger_at_the_peer_port_brings_nothing_about(secured: Cluster) -> None:
    node = secured[1]
    kept: list[bytes] = []

    def keep(dialled: Dialled) -> bytes:
        kept.append(admitted(hello())(dialled))
        return kept[0]

    # What keeps strangers out is nothing but the secret: who knows it is the node that it says.
    answer = offer(node, keep)
    assert len(answer) > PROOF_BYTES
    assert b'"cluster_id":"test-cluster"' in answer
    strangers: dict[str, Callable[[Dialled], bytes]] = {
        "no secret": lambda d: b"",
        "a wrong one": lambda d: d.own + d.proofs(SECOND).known(),
        "a proof of another connection": lambda d: kept[0],
        "the proof of the other side": lambda d: d.own + d.proofs(FIRST, is_dialling=False).known(),
        "a proof for another certificate": lambda d: (
            d.own + d.proofs(FIRST, certificate=b"of one between").known()
        ),
    }
    topic_id = TopicId(UUID(node.partition_folder("t").parent.name.removeprefix("t-")))
    before, counted = seen(node), refused(node)
    inputs = abuse(node, topic_id)
    for name, proof in strangers.items():
        for data in inputs:
            heard = offer(node, lambda d, p=proof, x=data: p(d) + x)
            assert heard in (REFUSED, b""), name
    with socket.create_connection((node.host, node.peer_port), timeout=10) as sock:
        sock.sendall(hello())
        with suppress(ConnectionError):
            assert sock.recv(1024) == b""
    after = refused(node)
    more = {reason: after[reason] - counted[reason] for reason in after}
    assert more.pop("secret") == len(strangers) * len(inputs) + 1
    assert set(more.values()) == {0}
    assert seen(node) == before
    lines = node.log_path.read_text().count("a stranger at the peer port")
    assert 0 < lines <= 40


# ---- from plain to a secret, to another one, and back ----


@pytest.mark.soak
def test_a_plain_cluster_gets_a_secret_replaces_it_and_gives_it_up(tmp_path: Path) -> None:
    with Cluster(tmp_path, settings={"shutdown_timeout_ms": 60_000}) as cluster:
        create_topic(cluster.bootstrap, TOPIC, 4, min_insync_replicas="2")
        application = Application(cluster.bootstrap, 4, rate=200)
        application.begin()
        try:
            wait_until(lambda: application.committed > 4, 60, "the group commits")
            for mode in ("accept", "required"):
                roll(cluster, application, tmp_path, mode, FIRST)
                wait_until(lambda: not any(plain_peers(cluster)), 60, "nobody speaks plain")
            replace(cluster, application, tmp_path)
            assert offer(cluster[1], admitted(hello())) == REFUSED
            assert b"test-cluster" in offer(cluster[1], admitted(hello(), SECOND))
            for mode in ("accept", "off"):
                roll(cluster, application, tmp_path, mode, SECOND)
            assert all(plain_peers(cluster))
        finally:
            application.end()
        assert application.errors == []
        assert application.lost == 0
        for node in cluster.nodes.values():
            text = node.log_path.read_text()
            assert FIRST not in text
            assert SECOND not in text


def roll(cluster: Cluster, application: Application, folder: Path, mode: str, secret: str) -> None:
    """Restart one node after the other in this mode, while records flow."""
    for node in cluster.nodes.values():
        assert node.terminate(90) == 0
        give_secret(node, folder, secret)
        node.environment["RAFTMQ_PEER_TLS"] = mode
        node.start()
        node.wait_ready()
        goes_on(application)
        wait_until(lambda: is_whole(cluster), 60, "the node is caught up")


def replace(cluster: Cluster, application: Application, folder: Path) -> None:
    """The second secret beside the first, then before it, then alone. In the last step each node is
    restarted, so that all streams are made anew with each mixture that there is."""
    for texts in ((FIRST, SECOND), (SECOND, FIRST), (SECOND,)):
        for node in cluster.nodes.values():
            loaded = node.log_path.read_text().count("certificates loaded")
            write_secrets(folder / f"secret-{node.node_id}", *texts)
            if node.node_id != 1:  # which finds the change by itself
                os.kill(node.pid, signal.SIGHUP)
            wait_until(
                lambda n=node, c=loaded: n.log_path.read_text().count("certificates loaded") > c,
                30,
                "the secrets are loaded",
            )
            assert told(node)["secrets"] == len(texts)
        for node in cluster.nodes.values():
            assert node.terminate(90) == 0
            node.start()
            node.wait_ready()
            goes_on(application)
            wait_until(lambda: is_whole(cluster), 60, "the node is caught up")
        for node in cluster.nodes.values():
            assert refused(node)["secret"] == 0


def goes_on(application: Application) -> None:
    acked = len(application.acked_at)
    wait_until(lambda: len(application.acked_at) > acked + 50, 60, "records")
