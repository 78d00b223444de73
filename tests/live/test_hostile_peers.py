"""Strangers at the peer and admin ports, after a valid hello: nothing is lost, nobody stops."""

from __future__ import annotations

import json
import socket
import struct
from pathlib import Path
from uuid import UUID

import msgspec
import pytest
from confluent_kafka import Consumer, Producer
from crc32c import crc32c

from raftmq.adapters.broker_calls import _HEAD
from raftmq.adapters.peer_links import (
    KIND_BROKER,
    KIND_FORMATION,
    KIND_HEARTBEATS,
    KIND_METADATA,
    PEER_FORMATS,
    Hello,
)
from raftmq.adapters.peer_reader import FRAME_HEADER
from raftmq.cluster.broker_messages import ForwardCommands, LeaderUpdate
from raftmq.cluster.broker_messages import encode as encode_control
from raftmq.cluster.commands import Envelope, RegisterBroker, encode_envelope
from raftmq.cluster.leader_table import LeaderRow, encode_rows
from raftmq.cluster.peer_codec import encode
from raftmq.raft.messages import Heartbeat, VoteRequest
from raftmq.types import (
    METADATA_GROUP,
    LeaderEpoch,
    NodeId,
    RaftIndex,
    ReplicaId,
    StorageId,
    Term,
    TopicId,
)
from tests.live.harness import Cluster, Node, wait_until

pytestmark = pytest.mark.live

NESTED = b"\x91" * 5_000
LIAR = 77


def frame(content: bytes, kind: int) -> bytes:
    return FRAME_HEADER.pack(len(content), crc32c(content), kind) + content


def say(node: Node, data: bytes, *, stream: str = "control", node_id: int = LIAR) -> None:
    """A valid hello as `node_id`, then `data`, then wait until the node has ended it or a while."""
    hello = Hello(PEER_FORMATS[0], "test-cluster", node_id, f"{node_id:x}", stream)
    encoded = msgspec.json.encode(hello)
    raw(node, struct.pack(">I", len(encoded)) + encoded + data)


def raw(node: Node, data: bytes) -> None:
    with socket.create_connection((node.host, node.peer_port), timeout=10) as sock:
        sock.settimeout(0.5)
        try:
            sock.sendall(data)
            while sock.recv(65536):
                pass
        except (TimeoutError, ConnectionError):
            pass


def request(body: bytes) -> bytes:
    return frame(_HEAD.pack(0, 1) + body, KIND_BROKER)


def lies(node: Node, topic_id: TopicId) -> list[bytes]:
    """The smallest of each kind, as frames."""
    folder = json.loads((node.data / "node.json").read_text())
    content = json.loads(folder["content"]) if isinstance(folder["content"], str) else None
    storage = int((content or folder["content"])["storage_id"], 16)
    me = ReplicaId(NodeId(LIAR), StorageId(LIAR))
    you = ReplicaId(NodeId(node.node_id), StorageId(storage))
    huge = Term((1 << 63) - 1)
    vote = VoteRequest(huge, me, you, Term(0), RaftIndex(0), True)
    beat = Heartbeat(Term((1 << 31) - 1), me, you, RaftIndex(0), 1)
    row = LeaderRow(topic_id, 0, LeaderEpoch((1 << 31) - 1), 0, NodeId(LIAR), (), (NodeId(LIAR),))
    poison = Envelope(
        version=1,
        node_id=NodeId(LIAR),
        incarnation=1,
        sequence=1,
        command=RegisterBroker(node_id=NodeId(LIAR), storage_id="zz", cluster_id="test-cluster"),
    )
    return [
        frame(b"".join(encode(METADATA_GROUP, vote)), KIND_METADATA),
        frame(b"".join(encode(METADATA_GROUP, beat)), KIND_HEARTBEATS),
        request(encode_control(LeaderUpdate(encode_rows([row])))),
        request(encode_control(ForwardCommands((encode_envelope(poison),)))),
        request(b"\x92\x05\xc4\x02\xa1\xff"),
        request(b"\x92\x05" + b"\xc5" + struct.pack(">H", 5_000) + NESTED),
        request(NESTED),
        frame(NESTED, KIND_FORMATION),
        frame(b"\x01\x01\xff\xff\xff\xff", KIND_METADATA),
        frame(b"x", 99),
        FRAME_HEADER.pack(96 << 20, 0, KIND_METADATA) + bytes(1024),
    ]


def ask_admin(node: Node, method: str, path: str, body: bytes) -> None:
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    with socket.create_connection((node.host, node.admin_port), timeout=10) as sock:
        sock.sendall(head.encode() + body)
        sock.settimeout(5)
        while sock.recv(65536):
            pass


def test_liars_cost_their_streams(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        assert cluster.run("topic", "create", "canary", "--partitions", "1").returncode == 0
        producer = Producer(
            {"bootstrap.servers": cluster.bootstrap, "enable.idempotence": True, "linger.ms": 1}
        )
        acknowledged: list[bytes] = []

        def sing(count: int = 20) -> None:
            for _ in range(count):
                value = b"%d" % (len(acknowledged) + len(producer))
                producer.produce(
                    "canary",
                    value,
                    on_delivery=lambda error, m: error or acknowledged.append(m.value()),
                )
                producer.poll(0)
            assert producer.flush(60) == 0

        sing()
        pids = {n: node.pid for n, node in cluster.nodes.items()}
        folder = next(cluster[1].data.glob("topics/canary-*"))
        topic_id = TopicId(UUID(folder.name[-36:]))
        for node in cluster.nodes.values():
            for hello in (b'{"z":' + b"[" * 1_200, b"\xff" * 40):
                raw(node, struct.pack(">I", len(hello)) + hello)
            for lie in lies(node, topic_id):
                say(node, lie)
            for body in (b"[" * 3_000, b"\xff", b'{"old_id":' + b"9" * 400 + b"}"):
                ask_admin(node, "POST", "/nodes/replace", body)
            sing()
        assert {n: node.pid for n, node in cluster.nodes.items() if node.is_running} == pids
        for node in cluster.nodes.values():
            text = node.text("/metrics")
            assert 'raftmq_peer_streams_refused_total{reason="hello"} 2' in text
            assert 'raftmq_peer_streams_refused_total{reason="bug"} 0' in text
            assert "peer stream broken" in node.log_path.read_text()
            assert f'raftmq_peer_connected{{peer="{LIAR}"}}' not in text, "nobody dials it"
        for node in cluster.nodes.values():  # whatever was kept must not keep it from starting
            node.kill()
        cluster.bring_back()
        sing()
        heard = read_all(cluster, len(acknowledged))
        assert heard == acknowledged, "each once, in order"


def read_all(cluster: Cluster, count: int) -> list[bytes]:
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": "ears",
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe(["canary"])
    values: list[bytes] = []

    def poll() -> bool:
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            values.append(message.value())
        return len(values) >= count

    wait_until(poll, 60)
    consumer.close()
    return values
