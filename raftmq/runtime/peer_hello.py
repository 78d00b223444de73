"""How a node introduces itself at the beginning of a stream, and what is looked for in it.

A hello is a length of four bytes and JSON, and where the cluster has a secret a proof after them.
Each side says one, the dialling one first. Who may say one is for the protection of the stream to
decide (`peer_tls.py`, `peer_secret.py`).
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec
from attrs import frozen

from raftmq.foreign import decode_foreign
from raftmq.metadata.broker_messages import FORMAT_MAX
from raftmq.replication.multiraft import Stream
from raftmq.runtime.peer_proofs import PROOF_BYTES
from raftmq.runtime.peer_streams import PeerRefusedError
from raftmq.runtime.sockets import read_exactly, send_all
from raftmq.runtime.tls import PeerSocket, PeerTlsSocket
from raftmq.types import NodeId, StorageId

PEER_FORMATS: Final = (5, FORMAT_MAX)
"""The oldest and the newest format of messages between nodes that this version speaks. A change
that an older node would not understand is a new format, used only on streams of that format
(`version`), so nodes of two versions work together. 2: a frame may hold several
messages (`FrameBatcher`); 3: quiescent groups are compared in parts; 4: the metadata group
and requests between brokers have a stream of their own, brokers' heartbeats go by that of
heartbeats; 5: what a node dialled, it also reads; 6: brokers ask for feature levels; 7: metadata
commands and snapshots may hold transactions; 8: metadata may hold moves and states of
nodes, for which the controller has calls; 9: metadata may hold rules of who may do what and users,
likewise; 10: topics may shrink: metadata holds views, logs hold seals; 11: leaders of
delay partitions deliver; 12: metadata may hold views with conditions; 13: topics that shrink get
aliases, which all nodes find, and metadata may hold what the logs of partitions that are gone knew
of producers; admin calls say on whose behalf they are made."""
HELLO_BYTES_MAX: Final = 4096
STREAMS: Final = tuple(Stream)


class Hello(msgspec.Struct, frozen=True):
    """How a node introduces itself on every stream; `address` is where it can be dialled.

    `version` is the oldest format it speaks; nodes of format 5 know nothing of `formats` and look
    at it alone. `formats` are the oldest and the newest one; without them `version` is the only
    one. `why` gives the reason for an oldest format that the version itself does not demand.
    """

    version: int
    cluster_id: str
    node_id: int
    storage_id: str
    stream: str
    address: str = ""
    formation_id: str = ""
    refusal: str = ""
    formats: tuple[int, int] | None = None
    why: str = ""
    process_id: str = ""
    """Drawn at each start: two processes that both live are two, also with the same storage."""
    is_taken: bool = False
    """Beside a refusal: another process of this node id stands."""
    takes_tls: bool = False
    """A listener that need not be spoken to plain."""

    @property
    def spoken(self) -> tuple[int, int]:
        """The oldest and the newest format."""
        return self.formats or (self.version, self.version)


_hello_decoder: Final = msgspec.json.Decoder(Hello)


@frozen(slots=True)
class PeerIdentity:
    """The node, with its storage, at the other end of a stream."""

    node_id: NodeId
    storage_id: StorageId


def common_format(mine: Hello, theirs: Hello) -> int:
    """The newest format that both speak; 0 when there is none."""
    oldest = max(mine.spoken[0], theirs.spoken[0])
    newest = min(mine.spoken[1], theirs.spoken[1])
    return newest if oldest <= newest else 0


def _formats(hello: Hello) -> str:
    oldest, newest = hello.spoken
    span = f"format {oldest}" if oldest == newest else f"formats {oldest} to {newest}"
    return f"{span} at node {hello.node_id}{f' ({hello.why})' if hello.why else ''}"


def check_hello(mine: Hello, theirs: Hello) -> str:
    """Say why `theirs` cannot talk to `mine`; "" when it can."""
    if theirs.refusal:
        return theirs.refusal
    if not common_format(mine, theirs):
        older = min(mine, theirs, key=lambda hello: hello.spoken[1])
        return (
            f"peer {_formats(theirs)}, {_formats(mine)}: none in common, start a newer raftmq on "
            f"node {older.node_id}"
        )
    if theirs.cluster_id != mine.cluster_id:
        return f"cluster_id {theirs.cluster_id!r}, this node is of {mine.cluster_id!r}"
    if theirs.node_id == mine.node_id:
        return f"node_id {theirs.node_id} is this node's own"
    if mine.formation_id and theirs.formation_id and mine.formation_id != theirs.formation_id:
        return (
            f"formation {theirs.formation_id} of cluster {theirs.cluster_id!r}, this node is of "
            f"{mine.formation_id}: a majority of one of them was wiped and formed anew"
        )
    return ""


def identity_of(hello: Hello) -> PeerIdentity:
    """The identity that a hello claims.

    Raises:
        PeerRefusedError: no node can have such numbers.
    """
    try:
        storage_id = int(hello.storage_id, 16)
    except ValueError:
        storage_id = -1
    if not 0 <= storage_id < 1 << 64 or not 0 <= hello.node_id < 1 << 31:
        raise PeerRefusedError(f"no identity: node {hello.node_id}, {hello.storage_id!r}")
    if hello.stream not in STREAMS:
        raise PeerRefusedError(f"no stream is called {hello.stream!r}")
    return PeerIdentity(NodeId(hello.node_id), StorageId(storage_id))


async def write_hello(sock: PeerSocket, hello: Hello) -> None:
    """Introduce this node."""
    content = msgspec.json.encode(hello)
    data = struct.pack(">I", len(content)) + content
    if isinstance(sock, PeerTlsSocket) and sock.proofs is not None:
        data += sock.proofs.said(data)
    await send_all(sock, data)


async def read_hello(sock: PeerSocket) -> Hello:
    """What the other side says of itself.

    Raises:
        EOFError, OSError: it went.
        PeerRefusedError, RemoteProtocolError: it is no hello.
    """
    head = await read_exactly(sock, 4)
    (size,) = struct.unpack(">I", head)
    if size > HELLO_BYTES_MAX:
        raise PeerRefusedError("the other side does not speak raftmq's peer protocol")
    data = await read_exactly(sock, size)
    if isinstance(sock, PeerTlsSocket) and sock.proofs is not None:
        proof = await read_exactly(sock, PROOF_BYTES)
        if not sock.proofs.is_said(head + data, proof):
            raise PeerRefusedError("its hello is not proved by the cluster's secret")
    return decode_foreign("hello", _hello_decoder.decode, data)
