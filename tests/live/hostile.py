"""The smallest inputs that once ended, stalled or filled nodes, for a live test to send again.

Each says what a node logs of it, if anything: one line for each connection that it costs.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final

import msgspec
from attrs import frozen
from crc32c import crc32c

from raftmq.controller.leaders import LeaderRow, encode_rows
from raftmq.metadata.broker_messages import ForwardCommands, LeaderUpdate
from raftmq.metadata.broker_messages import encode as encode_control
from raftmq.metadata.commands import Envelope, RegisterBroker, encode_envelope
from raftmq.protocol import ApiKey, encode_request, encode_request_header
from raftmq.raft.messages import Heartbeat, VoteRequest
from raftmq.replication.messages import encode
from raftmq.runtime.broker_calls import _HEAD
from raftmq.runtime.peer_hello import PEER_FORMATS, Hello
from raftmq.runtime.peer_links import (
    KIND_BROKER,
    KIND_FORMATION,
    KIND_HEARTBEATS,
    KIND_METADATA,
    STREAMS_PER_KIND_MAX,
)
from raftmq.runtime.peer_streams import FRAME_HEADER
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
from tests.live.harness import Node
from tests.poison.kinds import KINDS
from tests.server.kafka.largest_requests import BODIES

NESTED: Final = b"\x91" * 5_000
LIAR: Final = 77
HELLOS: Final = (b'{"z":' + b"[" * 1_200, b"\xff" * 40)
NO_HELLO: Final = "no hello of a peer"
BROKEN: Final = "peer stream broken"
ANNOUNCED_100_MIB: Final = bytes.fromhex("06400000 0000 0007 00000001".replace(" ", ""))
CROWD: Final = 20
ANSWER_BYTES_MAX: Final = 32 << 20


@frozen
class Hostile:
    """One input: `send` returns when the node has answered it, ended it or ignored it for a while;
    sockets on the stack stay open until the stack is closed."""

    name: str
    send: Callable[[Node, ExitStack], None]
    event: str = ""
    lines: int = 1


# ---- the peer port ----


def peer_frame(content: bytes, kind: int) -> bytes:
    return FRAME_HEADER.pack(len(content), crc32c(content), kind) + content


def say(node: Node, data: bytes) -> None:
    """A stranger's valid hello, then `data`; returns once the node ended it, or after a while."""
    raw(node, hello() + data)


def hello(node_id: int = LIAR, storage_id: int = LIAR) -> bytes:
    """Of a node that the cluster does not know, unless one is named."""
    said = Hello(PEER_FORMATS[1], "test-cluster", node_id, f"{storage_id:x}", "control")
    return _counted(msgspec.json.encode(said))


def raw(node: Node, data: bytes) -> None:
    """Bytes for the peer port."""
    with socket.create_connection((node.host, node.peer_port), timeout=10) as sock:
        sock.settimeout(0.5)
        try:
            sock.sendall(data)
            while sock.recv(65536):
                pass
        except (TimeoutError, ConnectionError):
            pass


def _counted(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def _request(body: bytes) -> bytes:
    return peer_frame(_HEAD.pack(0, 1) + body, KIND_BROKER)


def storage_of(node: Node) -> int:
    """The storage id of a node's data folder."""
    folder = json.loads((node.data / "node.json").read_text())
    content = json.loads(folder["content"]) if isinstance(folder["content"], str) else None
    return int((content or folder["content"])["storage_id"], 16)


def lies(node: Node, topic_id: TopicId) -> dict[str, bytes]:
    """The smallest of each kind, as frames that follow a valid hello."""
    storage = storage_of(node)
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
    return {
        "VoteRequest of term 2^63-1": peer_frame(
            b"".join(encode(METADATA_GROUP, vote)), KIND_METADATA
        ),
        "Heartbeat of term 2^31-1": peer_frame(
            b"".join(encode(METADATA_GROUP, beat)), KIND_HEARTBEATS
        ),
        "LeaderRows of epoch 2^31-1": _request(encode_control(LeaderUpdate(encode_rows([row])))),
        "RegisterBroker of storage zz": _request(
            encode_control(ForwardCommands((encode_envelope(poison),)))
        ),
        "ff in an AdminCall": _request(b"\x92\x05\xc4\x02\xa1\xff"),
        "a nested AdminCall": _request(b"\x92\x05" + b"\xc5" + struct.pack(">H", 5_000) + NESTED),
        "a nested request": _request(NESTED),
        "a nested formation": peer_frame(NESTED, KIND_FORMATION),
        "a short message": peer_frame(b"\x01\x01\xff\xff\xff\xff", KIND_METADATA),
        "a kind that is not there": peer_frame(b"x", 99),
        "96 MiB announced": FRAME_HEADER.pack(96 << 20, 0, KIND_METADATA) + bytes(1024),
    }


ANSWERED: Final = frozenset({"RegisterBroker of storage zz", "96 MiB announced"})
"""Lies that end no stream: the one is answered with a refusal, the other waits for its bytes."""


def peer_inputs(nodes: Sequence[Node], topic_id: TopicId) -> Iterator[Hostile]:
    """For the peer ports of these nodes; a lie names the node that it is told."""
    for number, said in enumerate(HELLOS):
        data = _counted(said)
        yield Hostile(f"hello {number}", lambda node, _, data=data: raw(node, data), NO_HELLO)
    told = {node.node_id: lies(node, topic_id) for node in nodes}
    for name in told[nodes[0].node_id]:
        event = "" if name in ANSWERED else BROKEN
        yield Hostile(name, lambda node, _, name=name: say(node, told[node.node_id][name]), event)
    yield Hostile("20 connections of 1 KiB", _crowd, BROKEN, CROWD - STREAMS_PER_KIND_MAX)
    yield Hostile("20 hellos of 1 KiB", _silent, NO_HELLO, CROWD)


def _crowd(node: Node, stack: ExitStack) -> None:
    announced = FRAME_HEADER.pack(96 << 20, 0, KIND_METADATA) + bytes(1000)
    for _ in range(CROWD):
        _leave(node, stack, hello() + announced)


def _silent(node: Node, stack: ExitStack) -> None:
    for _ in range(CROWD):
        _leave(node, stack, struct.pack(">I", 96 << 20) + bytes(1020))


def _leave(node: Node, stack: ExitStack, data: bytes) -> None:
    sock = stack.enter_context(socket.create_connection((node.host, node.peer_port), timeout=10))
    sock.sendall(data)


# ---- the admin port ----


def admin_inputs() -> Iterator[Hostile]:
    """For the admin port of any node."""
    for number, body in enumerate((b"[" * 3_000, b"\xff", b'{"old_id":' + b"9" * 400 + b"}")):
        yield Hostile(
            f"body {number} of a replacement", lambda node, _, body=body: _order(node, body)
        )


def _order(node: Node, body: bytes) -> None:
    head = (
        "POST /nodes/replace HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    with socket.create_connection((node.host, node.admin_port), timeout=10) as sock:
        sock.sendall(head.encode() + body)
        sock.settimeout(5)
        while sock.recv(65536):
            pass


# ---- the client port ----


def exchange(node: Node, request: bytes) -> None:
    """Send one request and read its answer, which has a bound."""
    with socket.create_connection((node.host, node.client_port), timeout=30) as sock:
        sock.sendall(request)
        (size,) = struct.unpack(">i", _read(sock, 4))
        assert size < ANSWER_BYTES_MAX
        _read(sock, size)


def _read(sock: socket.socket, size: int) -> bytearray:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(min(1 << 20, size - len(data)))
        assert piece, "the node hung up"
        data += piece
    return data


def client_frame(api: ApiKey, version: int, body: bytes) -> bytes:
    head = encode_request_header(api, version, 7, "rude")
    return struct.pack(">i", len(head) + len(body)) + head + body


LARGE: Final[Sequence[tuple[ApiKey, str]]] = (
    (ApiKey.DESCRIBE_CONFIGS, "equal"),
    (ApiKey.CREATE_TOPICS, "many"),
    (ApiKey.DESCRIBE_GROUPS, "many"),
    (ApiKey.DELETE_GROUPS, "many"),
    (ApiKey.OFFSET_FETCH, "groups"),
    (ApiKey.FIND_COORDINATOR, "many"),
    (ApiKey.PRODUCE, "unknown"),
    (ApiKey.METADATA, "unknown"),
)
"""Of tens of thousands of entries each."""


def client_inputs(topic: str) -> Iterator[Hostile]:
    """For the client port of the leader of `topic`; all are built beforehand."""
    yield Hostile("12 bytes that announce 100 MiB", lambda node, stack: _announce(node, stack, 1))
    yield Hostile(
        "three announced frames", lambda node, stack: _announce(node, stack, 3, 1 << 20), "", 3
    )
    batch = KINDS["seven million headers, packed"].build(int(time.time() * 1000))
    part = {"index": 0, "records": batch}
    topics = [{"name": topic, "partition_data": [part]}]
    packed = {"transactional_id": None, "acks": -1, "timeout": 10_000, "topic_data": topics}
    yield _asked(
        "seven million headers", ApiKey.PRODUCE, 9, encode_request(ApiKey.PRODUCE, 9, packed)
    )
    for api, kind in LARGE:
        version, make = BODIES[api, kind]
        yield _asked(f"{api.name} {kind}", api, version, make())
    names = [{"name": f"auto-{number}"} for number in range(5_000)]
    fields: dict[str, Any] = {"topics": names, "allow_auto_topic_creation": True}
    body = encode_request(ApiKey.METADATA, 9, fields)
    event = "topics are not created yet: auto_create_topics_max"
    yield _asked("5,000 names to create", ApiKey.METADATA, 9, body, event)


def _announce(node: Node, stack: ExitStack, count: int, more: int = 0) -> None:
    for _ in range(count):
        sock = stack.enter_context(
            socket.create_connection((node.host, node.client_port), timeout=10)
        )
        sock.sendall(ANNOUNCED_100_MIB + bytes(more))


def _asked(name: str, api: ApiKey, version: int, body: bytes, event: str = "") -> Hostile:
    frame = client_frame(api, version, body)
    return Hostile(name, lambda node, _: exchange(node, frame), event)
