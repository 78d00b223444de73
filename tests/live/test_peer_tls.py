"""Nodes that speak TLS with each other: what works, what a stranger at the peer port brings about,
and a plain cluster that becomes a secure one under load."""

from __future__ import annotations

import json
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import trustme
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from benchmarks.rolling import TOPIC, Application
from raftmq.controller.leaders import LeaderRow, encode_rows
from raftmq.delays.deliveries import producer_id_of
from raftmq.errors import ErrorCode
from raftmq.metadata.broker_messages import (
    AdminCall,
    AdmissionRequest,
    Asker,
    BrokerHeartbeat,
    DeleteTopicsCall,
    DeliverRecords,
    ForwardCommands,
    LeaderUpdate,
    MoveLeadership,
    SizesRequest,
    Way,
    decode_reply,
    encode_admin,
)
from raftmq.metadata.broker_messages import encode as encode_control
from raftmq.metadata.commands import (
    AllocateProducerIds,
    AlterUsers,
    ChangeNodes,
    CreateAcls,
    DeleteTopics,
    Envelope,
    FeatureUpdate,
    FenceBroker,
    NodeChange,
    NodeState,
    NoOperation,
    ReassignPartition,
    RegisterBroker,
    UpdateFeatures,
    encode_envelope,
    version_of,
)
from raftmq.metadata.credentials import ScramUpsertion
from raftmq.records import NewRecord, build_batch
from raftmq.rights import CLUSTER_NAME, Kind, Operation, Pattern, Permission, Rule
from raftmq.runtime.broker_calls import _HEAD as BROKER_HEAD
from raftmq.runtime.peer_links import KIND_BROKER
from raftmq.runtime.peer_streams import FRAME_HEADER
from raftmq.runtime.peer_tls import node_name
from raftmq.types import LeaderEpoch, NodeId, RaftGroupId, TopicId
from tests.live.harness import Cluster, Node, wait_until
from tests.live.hostile import LIAR, _request, hello, lies, peer_frame, storage_of
from tests.live.load import Load, create_topic, in_sync, leaders, preferred_lead

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
    """Write while a leader is killed and comes back; nothing is lost, all are in sync again, and
    leadership is where it was, so that no term changes any more."""
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
    wait_until(lambda: preferred_lead(cluster.bootstrap, "t"), 60, "leadership is given back")
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


# ---- a node that is one of the cluster's, and lies ----


def told_by(node: Node, context: ssl.SSLContext, hello: bytes, requests: list[bytes]) -> list[Any]:
    """The replies to requests on one stream; fewer where the node ends it."""
    replies: list[Any] = []
    with ExitStack() as stack, suppress(ConnectionError, TimeoutError):
        sock = socket.create_connection((node.host, node.peer_port), timeout=10)
        stack.callback(sock.close)
        sock = stack.enter_context(context.wrap_socket(sock))
        sock.settimeout(10)
        sock.sendall(hello)
        (size,) = struct.unpack(">I", exactly(sock, 4))
        exactly(sock, size)
        for number, body in enumerate(requests, 1):
            sock.sendall(peer_frame(BROKER_HEAD.pack(0, number) + body, KIND_BROKER))
            while True:
                size, _, kind = FRAME_HEADER.unpack(exactly(sock, FRAME_HEADER.size))
                frame = exactly(sock, size)
                if kind == KIND_BROKER and BROKER_HEAD.unpack_from(frame) == (1, number):
                    replies.append(decode_reply(frame[BROKER_HEAD.size :]))
                    break
    return replies


def exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("the node ended it")
        data += piece
    return data


def forbidden(topic_id: TopicId, victim: int) -> dict[str, Any]:
    """Commands that no other node may send, by name."""
    key = b"k" * 32
    user = ScramUpsertion(
        user="eve",
        mechanism=1,
        iterations=4_096,
        scram_salt=b"salt" * 4,
        scram_stored_key=key,
        scram_server_key=key,
    )
    on_cluster = Kind.CLUSTER, Pattern.LITERAL, CLUSTER_NAME
    everything = Rule(*on_cluster, "User:eve", "*", Operation.ALL, Permission.ALLOW)
    return {
        "deletes a topic": DeleteTopics(topic_ids=(topic_id,)),
        "creates a rule": CreateAcls(rules=(everything,)),
        "creates a user": AlterUsers(upsertions=(user,)),
        "fences another": FenceBroker(node_id=NodeId(victim), broker_epoch=1),
        "registers another": RegisterBroker(
            node_id=NodeId(victim), storage_id="1", cluster_id="test-cluster"
        ),
        "takes another's producer ids": AllocateProducerIds(node_id=NodeId(victim)),
        "moves a partition": ReassignPartition(
            topic_id=topic_id, partition=0, replicas=(NodeId(victim),)
        ),
        "drains another": ChangeNodes(changes=(NodeChange(NodeId(victim), NodeState.DRAINING),)),
        "raises a level": UpdateFeatures(updates=(FeatureUpdate("raftmq.level", 1),)),
    }


def sent_by(node_id: int, sequence: int, command: Any) -> bytes:
    """A command as its node forwards it."""
    envelope = Envelope(
        version=version_of(command),
        node_id=NodeId(node_id),
        incarnation=int(time.time() * 1e3),
        sequence=sequence,
        command=command,
    )
    return encode_control(ForwardCommands((encode_envelope(envelope),)))


def make_without(cluster: Cluster, liar: Node, first: Node) -> dict[str, TopicId]:
    """A topic and its delay topic of which a node holds nothing; `first` leads them."""
    others = [n.node_id for n in cluster.nodes.values() if n not in (liar, first)]
    placement = [[first.node_id, *others]]
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    for name, config in (("u", {}), ("u.later", {"raftmq.delivers.to": "u"})):
        new = NewTopic(name, 1, replica_assignment=placement, config=config)
        admin.create_topics([new])[name].result(60)
        wait_until(partial(preferred_lead, cluster.bootstrap, name), 60, "it is led")
    folders = {name: first.partition_folder(name).parent.name for name in ("u", "u.later")}
    return {name: TopicId(UUID(f.removeprefix(f"{name}-"))) for name, f in folders.items()}


def delivery(source: RaftGroupId) -> bytes:
    forged = [NewRecord(b"k", b"forged")]
    number = producer_id_of(source)
    batch = build_batch(forged, timestamp=1, producer_id=number, producer_epoch=0, base_sequence=0)
    return bytes(batch)


def end_of(cluster: Cluster, topic: str) -> int:
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": "ends"})
    try:
        return int(consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=30)[1])
    finally:
        consumer.close()


def test_a_node_of_the_cluster_speaks_for_nothing_that_it_does_not_hold(
    authority: trustme.CA, tmp_path: Path
) -> None:
    """Whoever has node 3's certificate and data: leaderships, deliveries, orders of a controller,
    told to the node that leads what the liar has no replica of."""
    cluster = Cluster(tmp_path, settings={"peer_tls": "required"})
    for node in cluster.nodes.values():
        node.environment |= write_files(tmp_path, authority, node.node_id)
    with cluster:
        controller = cluster[cluster[1].get("/status")["metadata"]["leader"]]
        liar, victim = [n for n in cluster.nodes.values() if n is not controller]
        topics = make_without(cluster, liar, controller)
        storage = storage_of(liar)
        liar.kill()
        context = showing(authority.issue_cert(node_name(liar.node_id)))
        me = NodeId(liar.node_id)
        row = LeaderRow(topics["u"], 0, LeaderEpoch(50), 0, me, (me,), (me,), (me,))
        offsets = range(controller.get("/status")["metadata"]["version"] + 1)
        sources = [RaftGroupId(topics["u.later"], 0, offset) for offset in offsets]
        lies: list[Any] = [
            LeaderUpdate(encode_rows([row])),
            MoveLeadership(topics["u"], 0, NodeId(victim.node_id)),
            SizesRequest(),
            *(DeliverRecords(topics["u"], 0, delivery(source)) for source in sources),
        ]
        bodies = [encode_control(lie) for lie in lies]
        replies = told_by(controller, context, hello(liar.node_id, storage), bodies)
        assert len(replies) == len(lies)
        assert replies[0].code is ErrorCode.NONE, "rows are judged later, one by one"
        denied = {reply.code for reply in replies[1:]}
        assert denied == {ErrorCode.CLUSTER_AUTHORIZATION_FAILED}
        told = cluster.bootstrap_of([controller.node_id])
        assert leaders(told, "u") == {0: controller.node_id}
        assert end_of(cluster, "u") == 0
        page = controller.text("/metrics")
        counts = dict.fromkeys(("LeaderUpdate", "MoveLeadership", "SizesRequest"), 1)
        for kind, count in {**counts, "DeliverRecords": len(sources)}.items():
            assert f'raftmq_peer_requests_refused_total{{request="{kind}"}} {count}.0' in page
        lines = controller.log_path.read_text()
        assert lines.count("request of another node refused") == len(counts) + 1
        liar.start()
        liar.wait_ready()
        wait_until(lambda: len(cluster.live) == 3, 60, "all are there")
        for node in cluster.nodes.values():
            assert leaders(cluster.bootstrap_of([node.node_id]), "u") == {0: controller.node_id}


def test_a_node_of_the_cluster_has_nothing_done_that_is_not_its_own(
    authority: trustme.CA, tmp_path: Path
) -> None:
    """Whoever has node 3's certificate and data: commands of others, calls for nobody and for
    clients without rights, and another node's number."""
    settings = {
        "peer_tls": "required",
        "authorizer": "acl",
        "super_users": ["User:ANONYMOUS"],
    }
    cluster = Cluster(tmp_path, settings=settings)
    for node in cluster.nodes.values():
        node.environment |= write_files(tmp_path, authority, node.node_id)
        node.environment["RAFTMQ_AUDIT_FILE"] = str(tmp_path / f"audit-{node.node_id}.jsonl")
    with cluster:
        create_topic(cluster.bootstrap, "t", 1, min_insync_replicas="2")
        controller = cluster[cluster[1].get("/status")["metadata"]["leader"]]
        liar = next(n for n in cluster.nodes.values() if n is not controller)
        victim = next(n for n in cluster.nodes.values() if n not in (controller, liar))
        topic_id = TopicId(UUID(controller.partition_folder("t").parent.name.removeprefix("t-")))
        storage = storage_of(liar)
        liar.kill()
        context = showing(authority.issue_cert(node_name(liar.node_id)))
        mine = hello(liar.node_id, storage)
        before = seen(controller)
        commands = forbidden(topic_id, victim.node_id)
        bodies = [
            sent_by(liar.node_id, number, command)
            for number, command in enumerate(commands.values(), 1)
        ]
        bodies.append(sent_by(victim.node_id, 1, NoOperation()))
        replies = told_by(controller, context, mine, bodies)
        assert [reply.code for reply in replies] == [ErrorCode.INVALID_REQUEST] * len(bodies)
        for name, reply in zip(commands, replies, strict=False):
            assert "may not send" in reply.message, name
        assert "speaks as" in replies[-1].message
        deletion = encode_admin(DeleteTopicsCall(names=("t",)))
        askers = [
            None,
            Asker(Way.NODE),
            Asker(Way.OPERATOR, "token"),
            Asker(Way.CLIENT, "User:eve", "10.0.0.9", "CLIENTS", "app"),
        ]
        calls = [encode_control(AdminCall(deletion, asker)) for asker in askers]
        codes = [reply.code for reply in told_by(controller, context, mine, calls)]
        denied = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
        assert codes == [denied, denied, denied, ErrorCode.TOPIC_AUTHORIZATION_FAILED]
        beat = encode_control(BrokerHeartbeat(NodeId(victim.node_id), 1, 1))
        assert told_by(controller, context, mine, [beat]) == [], "the stream ends"
        assert told_by(controller, context, hello(victim.node_id, 1), [calls[0]]) == []
        offer(controller, context, mine + lies(controller, topic_id)["VoteRequest of term 2^63-1"])
        assert {**seen(controller), "terms": 0} == {**before, "terms": 0}
        page = controller.text("/metrics")
        for command in commands.values():
            kind = type(command).__name__
            assert f'raftmq_commands_refused_total{{command="{kind}"}} 1.0' in page
        assert 'raftmq_denials_total{operation="delete",resource="topic"} 1.0' in page
        lines = controller.log_path.read_text()
        assert 0 < lines.count("command of another node refused") < len(commands), "it is bounded"
        assert lines.count("admin call refused") == len(askers)
        check_audit(tmp_path, controller, liar, commands)
        assert denials(tmp_path, victim, 0) == [], "nobody asked that one"
        liar.start()
        liar.wait_ready()


def check_audit(folder: Path, controller: Node, liar: Node, commands: dict[str, Any]) -> None:
    """Each refusal is a line of the controller's, with the node that asked and for whom it did."""
    told = wait_until(lambda: denials(folder, controller, len(commands) + 4))
    assert {line["by_node"] for line in told} == {liar.node_id}
    kinds = [type(command).__name__ for command in commands.values()]
    assert [line["request"] for line in told[: len(kinds)]] == kinds
    calls = told[len(kinds) :]
    assert {line["request"] for line in calls} == {"DeleteTopicsCall"}
    assert [line.get("principal") for line in calls] == [None, None, "token", "User:eve"]
    by_eve = calls[-1]
    assert (by_eve["operation"], by_eve["resource"]) == ("delete", "topic:t")
    assert (by_eve["host"], by_eve["listener"]) == ("10.0.0.9", "CLIENTS")


def denials(folder: Path, node: Node, count: int) -> list[dict[str, Any]] | None:
    """The denials in a node's audit file, once there are so many."""
    path = folder / f"audit-{node.node_id}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [row for row in map(json.loads, lines) if row["kind"] == "denial"]
    return found if len(found) >= count else None


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
