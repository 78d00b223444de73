"""Connections between nodes: four streams to each peer, so that heartbeats never queue behind bulk
data, nor does what the cluster itself is run by (the metadata group, requests between brokers), and
none of these behind what a peer that was away for long has to catch up with.

A node dials every peer and only sends on what it dialled; it only reads what it accepted. A stream
opens with a hello of both sides (format version, cluster, node and storage id); another cluster or
version is refused by name. Then frames: length, checksum, kind, payload. A queue to a peer is
bounded and is thrown away with its connection: Raft repairs losses, stale messages help nobody.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Final

import msgspec
import structlog
import trio
from attrs import frozen
from crc32c import crc32c

from raftmq.adapters.peer_reader import (
    FRAME_HEADER,
    KIND_PART,
    KIND_STORED,
    PART_HEADER,
    STORED_HEADER,
    WHOLE_BYTES_MAX,
    FrameReader,
    PeerRefusedError,
)
from raftmq.adapters.peer_socket import read_exactly, tune
from raftmq.adapters.peer_stream import (
    UNSENT_CHUNK_BYTES_MAX,
    ChunkStream,
    PeerStream,
    StreamCounts,
)
from raftmq.config import Address, ConfigError
from raftmq.errors import RemoteProtocolError
from raftmq.raft.messages import StoredChunk
from raftmq.turns import Turns
from raftmq.types import Buffer, NodeId, StorageId

PEER_FORMAT_VERSION: Final = 4
"""Of everything that nodes say to each other: raised with every change that an older node would not
understand, which is refused by name then. 2: a frame may hold several messages (`mail.py`);
3: groups at rest are compared in parts (`resting.py`); 4: the metadata group and requests between
brokers have a stream of their own, brokers' heartbeats go by that of heartbeats."""
HELLO_BYTES_MAX: Final = 4096
BACKOFF_MS: Final = (20, 1000)
HELLO_TIMEOUT_S: Final = 5.0
DIAL_TIMEOUT_S: Final = 2.0
ACCEPT_RETRY_S: Final = 0.1
_OUT_OF_RESOURCES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

BULK: Final = "bulk"
CONTROL: Final = "control"
CATCH_UP: Final = "catch-up"
HEARTBEAT: Final = "heartbeat"
STREAMS: Final = (BULK, CONTROL, HEARTBEAT, CATCH_UP)
_VITAL: Final = (BULK, CONTROL)
"""A peer is connected while both stand, and lost with either."""
KIND_RAFT: Final = 1
KIND_HEARTBEATS: Final = 2
KIND_BROKER: Final = 3
KIND_FORMATION: Final = 4
KIND_BROKER_BEAT: Final = 7
KIND_METADATA: Final = 8
"""Frame kinds: a partition's Raft message; coalesced heartbeats; brokers and controller; cluster
formation; a broker's heartbeat to the controller, and its answer; a Raft message of the metadata
group. Two more, 5 and 6, are told apart by who reads (`peer_reader.py`)."""
_STREAM_OF: Final = {
    KIND_RAFT: BULK,
    KIND_METADATA: CONTROL,
    KIND_BROKER: CONTROL,
    KIND_FORMATION: CONTROL,
    KIND_HEARTBEATS: HEARTBEAT,
    KIND_BROKER_BEAT: HEARTBEAT,
}
PART_BYTES: Final = 8 << 20
PARTED_BYTES_MIN: Final = 32 << 20
PIECES_MAX: Final = 512
"""Beyond so many pieces a frame is joined: sendmsg takes 1,024."""

logger = structlog.get_logger("raftmq.peers")


class Hello(msgspec.Struct, frozen=True):
    """How a node introduces itself on every stream; `address` is where it can be dialled."""

    version: int
    cluster_id: str
    node_id: int
    storage_id: str
    stream: str
    address: str = ""
    formation_id: str = ""
    refusal: str = ""


@frozen(slots=True)
class PeerIdentity:
    """Who answered at a peer's address."""

    node_id: NodeId
    storage_id: StorageId


FrameHandler = Callable[[PeerIdentity, int, memoryview], None]


def check_hello(mine: Hello, theirs: Hello) -> str:
    """Say why `theirs` cannot talk to `mine`; "" when it can."""
    if theirs.refusal:
        return theirs.refusal
    if theirs.version != mine.version:
        return (
            f"peer format version {theirs.version} at node {theirs.node_id}, {mine.version} at "
            f"node {mine.node_id}: both must run a version of raftmq that speaks the same one"
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


class PeerLinks:
    """All streams of a node to and from its peers."""

    def __init__(
        self,
        *,
        cluster_id: str,
        node_id: NodeId,
        storage_id: StorageId,
        address: Address | None = None,
        queue_bytes_max: int,
        on_frame: FrameHandler,
        on_identity: Callable[[PeerIdentity], None],
        on_lost: Callable[[NodeId], None],
        random: Random,
        turns: Turns,
    ) -> None:
        self._hello = Hello(
            PEER_FORMAT_VERSION,
            cluster_id,
            node_id,
            f"{storage_id:016x}",
            BULK,
            str(address) if address is not None else "",
        )
        self._queue_bytes_max = queue_bytes_max
        self._on_frame = on_frame
        self._on_identity = on_identity
        self._on_lost = on_lost
        self._random = random
        self._turns = turns
        self._addresses: dict[NodeId, Address] = {}
        self._streams: dict[tuple[NodeId, str], PeerStream] = {}
        self._heard: set[NodeId] = set()  # peers with a vital stream, since they were lost last
        self._nursery: trio.Nursery | None = None
        self._readers: dict[FrameReader, None] = {}
        self._listens_at_ticks = False
        self.block_to: frozenset[NodeId] = frozenset()
        self.block_from: frozenset[NodeId] = frozenset()
        self._block_changed = trio.Event()

    def set_formation(self, formation_id: str) -> None:
        """Say from now on which formation of the cluster this node belongs to."""
        self._hello = msgspec.structs.replace(self._hello, formation_id=formation_id)

    # ---- faults ----

    def block(self, *, to: frozenset[NodeId], from_: frozenset[NodeId]) -> None:
        """Cut links, for tests: frames to peers of `to` are dropped, those from peers of `from_`
        unheard, as is the end of their connections. A new stream needs both directions, and one
        that lost frames ends when it is whole again: no stream ever goes on with a gap in it."""
        self.block_to, self.block_from = to, from_
        for stream in self._streams.values():
            if stream.is_torn and stream.node_id not in to:
                stream.end()
        self._block_changed.set()
        self._block_changed = trio.Event()
        for stream in self._streams.values():
            stream.redial.set()

    async def _until_whole(self, node_id: NodeId) -> None:
        while node_id in self.block_to or node_id in self.block_from:
            await self._block_changed.wait()

    async def _until_heard(self, node_id: NodeId) -> None:
        while node_id in self.block_from:
            await self._block_changed.wait()

    # ---- sending ----

    def send(self, node_id: NodeId, kind: int, pieces: Sequence[Buffer]) -> bool:
        """Frame and send to a peer; False when dropped (not connected, queue full)."""
        stream = self._streams.get((node_id, _STREAM_OF[kind]))
        if stream is None:
            return False
        if stream.sock is None:
            stream.dropped_frames += 1
            return False
        if node_id in self.block_to:
            stream.is_torn = True
            return True  # as far as anybody here can tell
        if len(pieces) > PIECES_MAX:
            pieces = [b"".join(pieces)]
        size, checksum = sum(map(len, pieces)), 0
        if size > PARTED_BYTES_MIN:
            return self._send_parts(node_id, kind, pieces)
        for piece in pieces:
            checksum = crc32c(piece, checksum)
        is_sent = stream.send([FRAME_HEADER.pack(size, checksum, kind), *pieces])
        stream.dropped_frames += not is_sent
        return is_sent or node_id in self.block_from  # that it is gone is not heard either

    def _send_parts(self, node_id: NodeId, kind: int, pieces: Sequence[Buffer]) -> bool:
        """Send what is too large for a frame (a snapshot of the metadata state) in several, on the
        stream where nothing urgent waits; one such at a time."""
        stream = self._streams[node_id, CATCH_UP]
        assert isinstance(stream, ChunkStream)
        data = memoryview(b"".join(pieces))
        if stream.sock is None or stream.queued_bytes or len(data) > WHOLE_BYTES_MAX:
            stream.dropped_frames += 1
            return False
        for start in range(0, len(data), PART_BYTES):
            part = data[start : start + PART_BYTES]
            head = PART_HEADER.pack(kind, start + PART_BYTES >= len(data))
            checksum = crc32c(part, crc32c(head))
            frame = FRAME_HEADER.pack(len(head) + len(part), checksum, KIND_PART) + head
            stream.send_part(frame, part)
        return True

    def send_stored(self, node_id: NodeId, head: Sequence[Buffer], chunk: StoredChunk) -> bool:
        """Frame and queue a message whose batches lie in a file; False when dropped.

        The loop never has the file's bytes, so it cannot sum them. Their checksum was made by the
        worker that checked them, and travels within the part that is summed here: a receiver can
        tell what was damaged on the way, base offsets and leader epochs too, which no batch's own
        checksum covers. It checks each batch and its place in the log besides, as always.
        """
        stream = self._streams.get((node_id, CATCH_UP))
        if not isinstance(stream, ChunkStream):
            return False
        if stream.sock is None:
            stream.dropped_frames += 1
            return False
        if node_id in self.block_to:
            stream.is_torn = True
            return True  # as far as anybody here can tell
        body = b"".join(head)
        summed = STORED_HEADER.pack(len(body), chunk.checksum) + body
        size = len(summed) + (0 if chunk.span is None else chunk.span.size)
        frame = FRAME_HEADER.pack(size, crc32c(summed), KIND_STORED) + summed
        is_sent = stream.send_chunk(frame, chunk.span)
        stream.dropped_frames += not is_sent
        return is_sent or node_id in self.block_from

    def has_room_for_stored(self, node_id: NodeId, size_bytes: int) -> bool:
        """True when a stored chunk for this peer would be taken now."""
        stream = self._streams.get((node_id, CATCH_UP))
        return isinstance(stream, ChunkStream) and stream.room_for(size_bytes)

    def is_connected(self, node_id: NodeId) -> bool:
        """True while the streams to this peer stand."""
        streams = [self._streams.get((node_id, name)) for name in _VITAL]
        return all(stream is not None and stream.sock is not None for stream in streams)

    def has_ended(self, node_id: NodeId) -> bool:
        """True when the peer closed a stream of which this loop has not been told yet."""
        stream = self._streams.get((node_id, BULK))
        if stream is None or stream.sock is None or node_id in self.block_from:
            return False
        try:
            return stream.sock.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def queued_bytes(self) -> dict[NodeId, int]:
        """Bytes waiting for each peer."""
        return {s.node_id: s.queued_bytes for s in self._streams.values() if s.name == BULK}

    def streams(self) -> list[tuple[NodeId, str]]:
        """All outgoing streams: (peer, name)."""
        return list(self._streams)

    def counts(self, node_id: NodeId, name: str) -> StreamCounts:
        """What passed through one of them."""
        return self._streams[node_id, name]

    def set_addresses(self, addresses: Mapping[NodeId, Address]) -> None:
        """Say where the peers are; new ones are dialled, moved ones dialled anew."""
        for node_id, address in addresses.items():
            if node_id == self._hello.node_id or self._addresses.get(node_id) == address:
                continue
            is_new = node_id not in self._addresses
            self._addresses[node_id] = address
            if is_new:
                for name in STREAMS:
                    kind = ChunkStream if name == CATCH_UP else PeerStream
                    stream = kind(node_id, name, self._queue_bytes_max)
                    self._streams[node_id, name] = stream
                    if self._nursery is not None:
                        self._nursery.start_soon(self._keep_connected, stream)

    # ---- hearing ----

    def listen_at_ticks(self) -> None:
        """Nothing but beats of nodes at rest and brokers is expected on heartbeat streams: read
        them when `look` is called, since every wake-up costs more than what it is for."""
        self._listens_at_ticks = True

    def listen(self) -> None:
        """Read every stream as soon as something comes."""
        if self._listens_at_ticks:
            self._listens_at_ticks = False
            for reader in self._readers:
                reader.attend()

    def look(self) -> None:
        """Hand on what came on the streams that are read at ticks."""
        for reader in list(self._readers):
            reader.look()

    # ---- tasks ----

    async def run(
        self, listener: socket.socket, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Dial, accept, read and write until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for stream in self._streams.values():
                nursery.start_soon(self._keep_connected, stream)
            task_status.started()
            while True:
                await trio.lowlevel.wait_readable(listener)
                try:
                    sock, _ = listener.accept()
                except (BlockingIOError, ConnectionAbortedError):
                    continue
                except OSError as error:
                    if error.errno not in _OUT_OF_RESOURCES:
                        raise
                    logger.error("cannot accept peers", why=error.strerror)
                    await trio.sleep(ACCEPT_RETRY_S)  # clients may hold all descriptors
                    continue
                nursery.start_soon(self._serve, sock)

    async def _keep_connected(self, stream: PeerStream) -> None:
        backoff_ms = BACKOFF_MS[0]
        while True:
            await self._until_whole(stream.node_id)
            try:
                sock, identity = await self._dial(stream)
            except (OSError, trio.TooSlowError, msgspec.DecodeError, EOFError, UnicodeError):
                pass  # not up yet, just gone, or no name that can be looked up: try again
            except PeerRefusedError as error:
                logger.warning("peer refused", peer=stream.node_id, reason=str(error))
                backoff_ms = BACKOFF_MS[1]
            else:
                backoff_ms = BACKOFF_MS[0]
                stream.sock = sock
                try:
                    self._stands(stream, identity)
                    await self._drain(stream)
                    await self._until_heard(stream.node_id)
                finally:
                    stream.drop_connection()
                self._ended(stream)
            with trio.move_on_after(backoff_ms * (0.5 + self._random.random()) / 1e3):
                await stream.redial.wait()
            if stream.redial.is_set():
                stream.redial = trio.Event()
                backoff_ms = BACKOFF_MS[0]
            backoff_ms = min(2 * backoff_ms, BACKOFF_MS[1])

    def _stands(self, stream: PeerStream, identity: PeerIdentity) -> None:
        if stream.name not in _VITAL:
            return
        self._heard.add(stream.node_id)
        if self.is_connected(stream.node_id):
            logger.info("peer connected", peer=stream.node_id)
        self._on_identity(identity)  # who hears it may send to the peer already

    def _ended(self, stream: PeerStream) -> None:
        """With one vital stream the other ends: a peer is lost as a whole, and told so once."""
        if stream.name not in _VITAL or stream.node_id not in self._heard:
            return
        self._heard.remove(stream.node_id)
        for name in _VITAL:
            self._streams[stream.node_id, name].end()
        logger.info("peer lost", peer=stream.node_id)
        self._on_lost(stream.node_id)

    async def _dial(self, stream: PeerStream) -> tuple[socket.socket, PeerIdentity]:
        address = self._addresses[stream.node_id]
        with trio.fail_after(HELLO_TIMEOUT_S):
            try:
                with trio.fail_after(DIAL_TIMEOUT_S) as stream.dialling:
                    connected = await trio.open_tcp_stream(address.host, address.port)
            finally:
                stream.dialling = None
            sock = socket.socket(fileno=connected.socket.detach())
            try:
                sock.setblocking(False)
                tune(sock, UNSENT_CHUNK_BYTES_MAX if stream.name == CATCH_UP else 0)
                mine = msgspec.structs.replace(self._hello, stream=stream.name)
                await _write_hello(sock, mine)
                theirs = await _read_hello(sock)
                await self._until_whole(stream.node_id)
                reason = check_hello(mine, theirs)
                if not reason and theirs.node_id != stream.node_id:
                    reason = f"node {theirs.node_id} answers at node {stream.node_id}'s address"
                if reason:
                    raise PeerRefusedError(f"{address}: {reason}")
            except BaseException:
                sock.close()
                raise
        return sock, _identity(theirs)

    def _dial_now(self, node_id: NodeId) -> None:
        """A peer came by itself: waiting out our back-off, or our patience, is for nothing."""
        for name in STREAMS:
            if (stream := self._streams.get((node_id, name))) is not None:
                stream.hurry()

    async def _drain(self, stream: PeerStream) -> None:
        """Write what did not fit at once; return when the connection ends."""
        sock = stream.sock
        assert sock is not None
        async with trio.open_nursery() as nursery:

            async def watch_for_close() -> None:
                await trio.lowlevel.wait_readable(sock)  # a peer never sends here: it is its end
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch_for_close)
            await stream.drain()
            nursery.cancel_scope.cancel()

    async def _serve(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            tune(sock)
            with trio.fail_after(HELLO_TIMEOUT_S):
                theirs = await _read_hello(sock)
                identity = _identity(theirs)
                await self._until_whole(identity.node_id)
                reason = check_hello(self._hello, theirs)
                await _write_hello(sock, msgspec.structs.replace(self._hello, refusal=reason))
            if reason:
                logger.warning("refused a peer", peer=theirs.node_id, reason=reason)
                return
            if theirs.address:
                # It may be a node that no config here names: it is answered where it says it is.
                self.set_addresses({identity.node_id: Address.parse(theirs.address)})
            self._dial_now(identity.node_id)
            self._on_identity(identity)
            await self._read(sock, identity, is_quiet=theirs.stream == HEARTBEAT)
        except (OSError, EOFError, trio.TooSlowError, msgspec.DecodeError, ConfigError):
            pass  # the peer went away or spoke nonsense: its connection is all it costs
        except (PeerRefusedError, RemoteProtocolError) as error:
            logger.warning("peer stream broken", reason=str(error))
        finally:
            sock.close()

    async def _read(self, sock: socket.socket, sender: PeerIdentity, *, is_quiet: bool) -> None:
        """Read one stream to its end; a quiet one at ticks only, while nothing urgent comes."""
        reader = FrameReader(
            sock,
            sender.node_id,
            partial(self._on_frame, sender),
            is_blocked=lambda: sender.node_id in self.block_from,
            may_rest=lambda: is_quiet and self._listens_at_ticks,
            turns=self._turns,
        )
        self._readers[reader] = None
        try:
            await reader.run()
        finally:
            del self._readers[reader]


def _identity(hello: Hello) -> PeerIdentity:
    """Who says hello.

    Raises:
        PeerRefusedError: nobody has such numbers.
    """
    try:
        storage_id = int(hello.storage_id, 16)
    except ValueError:
        storage_id = -1
    if not 0 <= storage_id < 1 << 64 or not 0 <= hello.node_id < 1 << 31:
        raise PeerRefusedError(f"no identity: node {hello.node_id}, {hello.storage_id!r}")
    return PeerIdentity(NodeId(hello.node_id), StorageId(storage_id))


async def _write_hello(sock: socket.socket, hello: Hello) -> None:
    data = msgspec.json.encode(hello)
    data = struct.pack(">I", len(data)) + data
    while data:
        await trio.lowlevel.wait_writable(sock)
        data = data[sock.send(data) :]


async def _read_hello(sock: socket.socket) -> Hello:
    (size,) = struct.unpack(">I", await read_exactly(sock, 4))
    if size > HELLO_BYTES_MAX:
        raise PeerRefusedError("the other side does not speak raftmq's peer protocol")
    data = await read_exactly(sock, size)
    try:
        return msgspec.json.decode(data, type=Hello)
    except UnicodeDecodeError as error:  # no DecodeError of msgspec's
        raise PeerRefusedError("a hello that is no text") from error
