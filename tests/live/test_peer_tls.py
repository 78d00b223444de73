"""Nodes that speak TLS with each other: what works, what a stranger at the peer port brings about,
and a plain cluster that becomes a secure one under load."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from uuid import UUID

import pytest
import trustme

from benchmarks.rolling import TOPIC, Application
from raftmq.metadata.broker_messages import AdmissionRequest, ForwardCommands
from raftmq.metadata.broker_messages import encode as encode_control
from raftmq.metadata.commands import DeleteTopics, Envelope, encode_envelope
from raftmq.runtime.peer_tls import node_name
from raftmq.types import NodeId, TopicId
from tests.live.harness import Cluster, Node, wait_until
from tests.live.hostile import LIAR, _request, hello, lies
from tests.live.load import Load, create_topic, in_sync, leaders

pytestmark = [pytest.mark.live, pytest.mark.slow]


def write_files(folder: Path, ca: trustme.CA, node_id: int) -> dict[str, str]:
    """A node's certificate, its key and the CA, as the variables that name them."""
    issued = ca.issue_cert(node_name(node_id))
    pem, key, trusted = (folder / f"peer-{node_id}{end}" for end in (".pem", ".key", "-ca.pem"))
    pem.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    key.chmod(0o600)
    ca.cert_pem.write_to_path(str(trusted))
    return {
        "RAFTMQ_PEER_CERTIFICATE_FILE": str(pem),
        "RAFTMQ_PEER_KEY_FILE": str(key),
        "RAFTMQ_PEER_CA_FILE": str(trusted),
    }


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def secured(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("secured")
    cluster = Cluster(folder, settings={"peer_tls": "required"})
    for node in cluster.nodes.values():
        node.environment |= write_files(folder, authority, node.node_id)
    with cluster:
        create_topic(cluster.bootstrap, "t", 3, min_insync_replicas="2")
        yield cluster


def survive_a_kill(cluster: Cluster) -> None:
    """Write while a leader is killed and comes back; nothing is lost, and all are in sync again."""
    with Load(cluster.bootstrap, "t", 3) as load:
        load.wait_for(500)
        victim = cluster[leaders(cluster.bootstrap, "t")[0]]
        victim.kill()
        load.wait_for(500)
        cluster.bring_back()
        load.wait_for(500)
    wait_until(
        lambda: set(map(len, in_sync(cluster.bootstrap, "t").values())) == {3}, 60, "all in sync"
    )
    load.reckon().check()


def test_records_survive_a_kill(secured: Cluster) -> None:
    """Formation, votes, appends, catch-up: all of it passes."""
    survive_a_kill(secured)
    for node in secured.nodes.values():
        told = node.get("/status")["peer_tls"]
        assert told.pop("expires_s") > 0
        assert told.pop("by") == "certificate"
        assert told.pop("secrets") == 0
        assert told == {"mode": "required", "is_open": False, "plain_peers": []}
        page = node.text("/metrics")
        assert 'raftmq_certificate_expires_timestamp_seconds{listener="peer_listener"}' in page


# ---- strangers ----


def offer(node: Node, context: ssl.SSLContext | None, data: bytes) -> bytes:
    """What the peer port answers to this."""
    told = b""
    with ExitStack() as stack, suppress(ssl.SSLError, ConnectionError, TimeoutError):
        sock = socket.create_connection((node.host, node.peer_port), timeout=10)
        stack.callback(sock.close)
        if context is not None:
            sock = stack.enter_context(context.wrap_socket(sock))
        sock.settimeout(2)
        sock.sendall(data)
        while piece := sock.recv(65536):
            told += piece
    return told


def showing(issued: trustme.LeafCert | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if issued is not None:
        issued.configure_cert(context)
    return context


def abuse(node: Node, topic_id: TopicId) -> list[bytes]:
    """Votes, terms, leaders, registrations; and orders to join and to delete a topic."""
    delete = Envelope(
        version=1,
        node_id=NodeId(LIAR),
        incarnation=1,
        sequence=1,
        command=DeleteTopics(topic_ids=(topic_id,)),
    )
    orders = [ForwardCommands((encode_envelope(delete),)), AdmissionRequest(LIAR, LIAR)]
    frames = [*lies(node, topic_id).values(), *(_request(encode_control(one)) for one in orders)]
    return [hello() + frame for frame in frames]


def seen(node: Node) -> dict[str, object]:
    """What no stranger may change."""
    status = node.get("/status")
    metadata = status["metadata"]
    return {
        "terms": {
            (row["topic"], row["partition"]): row["leader_epoch"] for row in status["partitions"]
        },
        "metadata": (metadata["leader_epoch"], metadata["voters"], metadata["learners"]),
        "brokers": [(row["node_id"], row["epoch"]) for row in status["brokers"]],
    }


def refused(node: Node) -> dict[str, float]:
    name = "raftmq_peer_streams_refused_total{reason="
    lines = [line for line in node.text("/metrics").splitlines() if line.startswith(name)]
    pairs = (line.removeprefix(name).split("} ") for line in lines)
    return {reason.strip('"'): float(value) for reason, value in pairs}


def test_a_stranger_at_the_peer_port_brings_nothing_about(
    secured: Cluster, authority: trustme.CA
) -> None:
    clients = trustme.CA()
    strangers = {
        "plain": None,
        "without a certificate": showing(None),
        "of another CA": showing(clients.issue_cert(node_name(LIAR))),
        "a client": showing(authority.issue_cert("alice.example.org")),
        "another node": showing(authority.issue_cert(node_name(LIAR + 1))),
    }
    node = secured[1]
    topic_id = TopicId(UUID(node.partition_folder("t").parent.name.removeprefix("t-")))
    before, counted = seen(node), refused(node)
    inputs = abuse(node, topic_id)
    for name, context in strangers.items():
        for data in inputs:
            assert offer(node, context, data) == b"", name
    after = refused(node)
    more = {reason: after[reason] - counted[reason] for reason in after}
    assert more.pop("certificate") == len(strangers) * len(inputs)
    assert set(more.values()) == {0}
    assert seen(node) == before
    lines = node.log_path.read_text().count("a stranger at the peer port")
    assert 0 < lines <= 40
    # The other way round: what keeps them out is nothing but their certificates.
    admitted = showing(authority.issue_cert(node_name(LIAR)))
    assert b'"cluster_id":"test-cluster"' in offer(node, admitted, hello())


# ---- from plain to secure ----


@pytest.mark.soak
def test_a_plain_cluster_becomes_secure_node_by_node(tmp_path: Path) -> None:
    ca = trustme.CA()
    with Cluster(tmp_path, settings={"shutdown_timeout_ms": 60_000}) as cluster:
        create_topic(cluster.bootstrap, TOPIC, 4, min_insync_replicas="2")
        application = Application(cluster.bootstrap, 4, rate=200)
        application.begin()
        try:
            wait_until(lambda: application.committed > 4, 60, "the group commits")
            for mode in ("accept", "required", "accept", "off"):
                for node in cluster.nodes.values():
                    assert node.terminate(90) == 0
                    node.environment |= write_files(tmp_path, ca, node.node_id)
                    node.environment["RAFTMQ_PEER_TLS"] = mode
                    node.start()
                    node.wait_ready()
                    acked = len(application.acked_at)
                    wait_until(lambda n=acked: len(application.acked_at) > n + 50, 60, "records")
                    wait_until(lambda: is_whole(cluster), 60, "the node is caught up")
                plain = [n.get("/status")["peer_tls"]["plain_peers"] for n in cluster.live]
                if mode != "off":
                    wait_until(lambda: not any(plain_peers(cluster)), 60, "nobody speaks plain")
                else:
                    assert all(plain)
        finally:
            application.end()
        assert application.errors == []
        assert application.lost == 0


def plain_peers(cluster: Cluster) -> list[list[int]]:
    return [node.get("/status")["peer_tls"]["plain_peers"] for node in cluster.live]


def is_whole(cluster: Cluster) -> bool:
    return set(map(len, in_sync(cluster.bootstrap, TOPIC).values())) == {3}
