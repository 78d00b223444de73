"""Connections between nodes: four streams to each peer.

Heartbeats never queue behind bulk data, nor do messages that the cluster itself needs (the metadata
group, requests between brokers), and none of these wait behind the catch-up of a peer that was away
for long.

A node dials every peer whose address the configuration or the metadata group names, never an
address that a hello names. It sends on the streams it dialled; to a peer that it cannot dial (one
that joins, or moved) it sends on the streams that the peer dialled. A stream opens with a hello of
both sides (formats spoken, cluster, node and storage id); another cluster, or no format in common,
is refused by name. The stream has the newest format that both speak. Then frames: length, checksum,
kind, payload. A queue to a peer is bounded and is dropped with its connection: Raft repairs losses,
and stale messages are useless.

With TLS both sides prove before the hello which nodes they are (`peer_tls.py`), or that they are
nodes (`peer_secret.py`), and whoever cannot is told nothing. Without it a hello proves no identity.
So bounds hold for all peers: few connections before their hello, few unknown nodes, few streams of
one kind for each node. No exception leaves the task of a stream: bad bytes end the stream, and so
does a bug of ours, which is logged and counted; a broken invariant stops the node.
"""

from __future__ import annotations

import errno
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any, Final

import msgspec
import structlog
import trio
from attrs import frozen
from crc32c import crc32c

from raftmq.config import Address
from raftmq.errors import RemoteProtocolError
from raftmq.raft.messages import StoredChunk
from raftmq.replication.multiraft import Stream
from raftmq.runtime.certificates import NONE_REVOKED, Revoked
from raftmq.runtime.handshake import HalfOpen, Turn
from raftmq.runtime.loop import LoopBudget
from raftmq.runtime.peer_hello import (
    PEER_FORMATS,
    STREAMS,
    Hello,
    PeerIdentity,
    check_hello,
    common_format,
    identity_of,
    read_hello,
    write_hello,
)
from raftmq.runtime.peer_streams import (
    FRAME_HEADER,
    KIND_PART,
    KIND_STORED,
    PART_HEADER,
    STORED_HEADER,
    UNSENT_CHUNK_BYTES_MAX,
    WHOLE_BYTES_MAX,
    ChunkStream,
    FrameReader,
    PeerMemory,
    PeerMemoryError,
    PeerRefusedError,
    PeerStream,
    StreamCounts,
)
from raftmq.runtime.peer_tls import PeerGuard
from raftmq.runtime.sockets import tune
from raftmq.runtime.tls import PeerSocket, PeerTlsSocket
from raftmq.types import Buffer, NodeId, StorageId

BACKOFF_MS: Final = (20, 1000)
HELLO_TIMEOUT_S: Final = 5.0
DIAL_TIMEOUT_S: Final = 2.0
ACCEPT_RETRY_S: Final = 0.1
NAMELESS_MAX: Final = 64
"""So many connections may be open whose hello has not come. The one that is waited for longest
makes room: a peer says hello within milliseconds, so a silent one is hardly a peer."""
HALF_OPEN_MAX: Final = 256
"""So many with TLS: a handshake before the hello takes longer."""
GUESTS_MAX: Final = 32
"""So many nodes that neither configuration nor metadata names may hold streams, so as to join."""
STREAMS_PER_KIND_MAX: Final = 3
"""So many streams of a kind may one node hold here. More than one, since a connection whose other
end lost its power stands for seconds after the next one comes."""
HURRY_S: Final = 0.2
"""At most once in this time a peer's hello shortens the wait for the next dial."""
ENDING_LOOKS: Final = 25
"""The streams of a process that was killed end a moment after it, perhaps after the next came."""
ENDING_LOOK_S: Final = 0.02
RIVAL_S: Final = 30.0
"""A second process of a node is reported for so long after it was refused last."""
REASON_LENGTH_MAX: Final = 300
_TOLD_MAX: Final = 64
_OUT_OF_RESOURCES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_VITAL: Final = (Stream.BULK, Stream.CONTROL)
"""A peer is connected while both stand, and lost with either."""
KIND_RAFT: Final = 1
KIND_HEARTBEATS: Final = 2
KIND_BROKER: Final = 3
KIND_FORMATION: Final = 4
KIND_BROKER_BEAT: Final = 7
KIND_METADATA: Final = 8
"""Frame kinds: a partition's Raft message; coalesced heartbeats; brokers and controller; cluster
formation; a broker's heartbeat to the controller, and its answer; a Raft message of the metadata
group. Two more, 5 and 6, are told apart by their reader (`peer_streams.py`)."""
_STREAM_OF: Final = {
    KIND_RAFT: Stream.BULK,
    KIND_METADATA: Stream.CONTROL,
    KIND_BROKER: Stream.CONTROL,
    KIND_FORMATION: Stream.CONTROL,
    KIND_HEARTBEATS: Stream.HEARTBEAT,
    KIND_BROKER_BEAT: Stream.HEARTBEAT,
}
PART_BYTES: Final = 8 << 20
PARTED_BYTES_MIN: Final = 32 << 20
REFUSALS: Final = (
    "certificate",
    "secret",
    "hello",
    "identity",
    "limit",
    "frame",
    "memory",
    "deadline",
    "bug",
)
"""Why streams are refused or ended, by the names in the metrics."""
REVOKED: Final = "its certificate was revoked"
"""Since its handshake; before the hello was over."""
PIECES_MAX: Final = 512
"""Beyond so many pieces a frame is joined: sendmsg takes 1,024."""

logger = structlog.get_logger("raftmq.peers")


StrangerHandler = Callable[[str, str, str], None]
"""on_stranger(where, mechanism, why): somebody did not prove to be a node, by its `certificate`
or the `secret`."""
FrameHandler = Callable[[PeerIdentity, int, memoryview], None]


class PeerLinks:
    """All streams of a node to and from its peers."""

    _revoked: Revoked = NONE_REVOKED
    """By the list that was loaded since the start, if any."""

    def __init__(
        self,
        *,
        cluster_id: str,
        node_id: NodeId,
        storage_id: StorageId,
        process_id: str,
        address: Address | None = None,
        queue_bytes_max: int,
        on_frame: FrameHandler,
        on_identity: Callable[[PeerIdentity], None],
        on_lost: Callable[[NodeId], None],
        random: Random,
        budget: LoopBudget,
        memory_bytes_max: int,
        on_broken_invariant: Callable[[str], None],
        on_stranger: StrangerHandler,
        log: Any = logger,
        formats: tuple[int, int] = PEER_FORMATS,
        tls: PeerGuard | None = None,
    ) -> None:
        """Make links that `run` opens.

        Args:
            process_id: differs from that of every other process of this node.
            address: where this node listens, sent to others for their logs.
            memory_bytes_max: bytes of incomplete frames from all peers together.
            on_broken_invariant: called with the reason why the node must stop.
            log: takes events that strangers can cause; a node gives one that bounds them.
            formats: the oldest and the newest one to speak.
            tls: protects the streams; None: nothing does.
        """
        self._hello = Hello(
            formats[0],
            cluster_id,
            node_id,
            f"{storage_id:016x}",
            Stream.BULK,
            str(address) if address is not None else "",
            formats=formats,
            process_id=process_id,
            takes_tls=tls is not None,
        )
        self._tls = tls
        self._queue_bytes_max = queue_bytes_max
        self._on_frame = on_frame
        self._on_identity = on_identity
        self._on_lost = on_lost
        self._random = random
        self._budget = budget
        self._memory = PeerMemory(memory_bytes_max)
        self._on_broken_invariant = on_broken_invariant
        self._on_stranger = on_stranger
        self._log = log
        self._told_bugs: set[str] = set()
        self.refusals: Counter[str] = Counter(dict.fromkeys(REFUSALS, 0))
        """Streams that were refused, or ended for what came on them, by reason."""
        self._addresses: dict[NodeId, tuple[Address, ...]] = {}  # newest first, at most two
        self._nameless = HalfOpen()
        self._accepted: dict[tuple[NodeId, str], list[_Accepted]] = {}
        self._hurried_s: dict[NodeId, float] = {}
        self._streams: dict[tuple[NodeId, str], PeerStream] = {}
        self._heard: set[NodeId] = set()  # peers with a vital stream, since they were lost last
        self._nursery: trio.Nursery | None = None
        self.block_to: frozenset[NodeId] = frozenset()
        self.block_from: frozenset[NodeId] = frozenset()
        self._block_changed = trio.Event()
        self.taken: dict[NodeId, str] = {}
        """What peers answer that refuse this process, as they know another one of its node id."""
        self._rivals: dict[NodeId, tuple[Hello, float]] = {}

    def set_formation(self, formation_id: str) -> None:
        """Name this formation of the cluster in each hello from now on."""
        self._hello = msgspec.structs.replace(self._hello, formation_id=formation_id)

    def demand(self, oldest: int, why: str) -> None:
        """Speak no older format than this one from now on; streams of older ones end."""
        known_oldest, newest = self._hello.spoken
        if oldest <= known_oldest:
            return
        assert oldest <= newest, "a format that this version does not speak"
        self._hello = msgspec.structs.replace(
            self._hello, version=oldest, formats=(oldest, newest), why=why
        )
        accepted = [each.back for some in self._accepted.values() for each in some]
        for stream in (*self._streams.values(), *accepted):
            if stream.version < oldest:
                stream.end()

    def end_revoked(self, revoked: Revoked) -> int:
        """End streams with peers whose certificates are good no more; how many. Those between
        handshake and hello end before they stand."""
        self._revoked = revoked
        accepted = [each.back for some in self._accepted.values() for each in some]
        ended = [
            each for each in (*self._streams.values(), *accepted) if self._is_revoked(each.sock)
        ]
        for stream in ended:
            stream.end()
        return len(ended)

    def _is_revoked(self, sock: PeerSocket | None) -> bool:
        return isinstance(sock, PeerTlsSocket) and self._revoked.has(sock.peer_certificate)

    def version(self, node_id: NodeId) -> int:
        """The format in which requests to this peer go; 0 while it is not connected."""
        stream = self._way_to(node_id, Stream.CONTROL)
        return 0 if stream is None or stream.sock is None else stream.version

    # ---- faults ----

    def block(self, *, to: frozenset[NodeId], from_: frozenset[NodeId]) -> None:
        """Cut links, for tests: frames to peers of `to` are dropped, frames from peers of `from_`
        are ignored, as is the end of their connections. A new stream needs both directions, and one
        that lost frames ends when the cut is over: no stream ever goes on with a gap in it."""
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
        stream = self._way_to(node_id, _STREAM_OF[kind])
        if stream is None:
            return False
        if stream.sock is None:
            stream.dropped_frames += 1
            return False
        if node_id in self.block_to:
            stream.is_torn = True
            return True  # a cut link is silence, not an error
        if len(pieces) > PIECES_MAX:
            pieces = [b"".join(pieces)]
        size, checksum = sum(map(len, pieces)), 0
        if size > PARTED_BYTES_MIN:
            return self._send_parts(node_id, kind, pieces)
        for piece in pieces:
            checksum = crc32c(piece, checksum)
        is_sent = stream.send([FRAME_HEADER.pack(size, checksum, kind), *pieces])
        stream.dropped_frames += not is_sent
        return is_sent or node_id in self.block_from  # behind a cut its end is not noticed either

    def _send_parts(self, node_id: NodeId, kind: int, pieces: Sequence[Buffer]) -> bool:
        """Send a message too large for one frame (a snapshot of the metadata state) in several, on
        the stream where nothing urgent waits; one such message at a time."""
        stream = self._way_to(node_id, Stream.CATCH_UP)
        if not isinstance(stream, ChunkStream):
            return False
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
        worker that checked them, and travels within the part that is summed here. So a receiver
        notices damage in transit, also of base offsets and leader epochs, which no batch's own
        checksum covers. Besides, it checks each batch and its place in the log as always.
        """
        stream = self._way_to(node_id, Stream.CATCH_UP)
        if not isinstance(stream, ChunkStream):
            return False
        if stream.sock is None:
            stream.dropped_frames += 1
            return False
        if node_id in self.block_to:
            stream.is_torn = True
            return True  # a cut link is silence, not an error
        body = b"".join(head)
        summed = STORED_HEADER.pack(len(body), chunk.checksum) + body
        size = len(summed) + (0 if chunk.span is None else chunk.span.size)
        frame = FRAME_HEADER.pack(size, crc32c(summed), KIND_STORED) + summed
        is_sent = stream.send_chunk(frame, chunk.span)
        stream.dropped_frames += not is_sent
        return is_sent or node_id in self.block_from

    def has_room_for_stored(self, node_id: NodeId, size_bytes: int) -> bool:
        """True when a stored chunk for this peer would be taken now."""
        stream = self._way_to(node_id, Stream.CATCH_UP)
        return isinstance(stream, ChunkStream) and stream.room_for(size_bytes)

    def is_connected(self, node_id: NodeId) -> bool:
        """True while the streams to this peer stand."""
        streams = [self._way_to(node_id, name) for name in _VITAL]
        return all(stream is not None and stream.sock is not None for stream in streams)

    def plain_peers(self) -> list[NodeId]:
        """The peers with a stream that no TLS protects."""
        accepted = [each.back for some in self._accepted.values() for each in some]
        streams = [*self._streams.values(), *accepted]
        return sorted({s.node_id for s in streams if isinstance(s.sock, socket.socket)})

    def _way_to(self, node_id: NodeId, name: str) -> PeerStream | None:
        """The stream that was dialled; where dialling fails, one that the peer dialled, if any."""
        stream = self._streams.get((node_id, name))
        if stream is not None and (stream.sock is not None or not stream.has_failed):
            return stream
        accepted = self._accepted.get((node_id, name))
        return accepted[0].back if accepted else stream

    def has_ended(self, node_id: NodeId) -> bool:
        """True when the peer closed a stream and this loop has not noticed yet."""
        stream = self._streams.get((node_id, Stream.BULK))
        if stream is None or stream.sock is None or node_id in self.block_from:
            return False
        return _has_ended(stream.sock)

    def queued_bytes(self) -> dict[NodeId, int]:
        """Bytes waiting for each peer."""
        return {s.node_id: s.queued_bytes for s in self._streams.values() if s.name == Stream.BULK}

    def streams(self) -> list[tuple[NodeId, str]]:
        """All outgoing streams: (peer, name)."""
        return list(self._streams)

    def counts(self, node_id: NodeId, name: str) -> StreamCounts:
        """What passed through one of them."""
        return self._streams[node_id, name]

    def set_addresses(self, addresses: Mapping[NodeId, Address]) -> None:
        """Set the peers' addresses, from configuration or metadata; new peers are dialled, moved
        ones dialled anew. Where that fails, the old and the new address are tried alternately: the
        configuration may be newer than metadata that the node could not change yet, or older."""
        for node_id, address in addresses.items():
            known = self._addresses.get(node_id, ())
            if node_id == self._hello.node_id or known[:1] == (address,):
                continue
            is_new = not known
            self._addresses[node_id] = (address, *known[:1])
            if is_new:
                for name in STREAMS:
                    kind = ChunkStream if name == Stream.CATCH_UP else PeerStream
                    stream = kind(node_id, name, self._queue_bytes_max)
                    self._streams[node_id, name] = stream
                    if self._nursery is not None:
                        self._nursery.start_soon(self._keep_connected, stream)

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
                    self._log.error("cannot accept peers", why=error.strerror)
                    await trio.sleep(ACCEPT_RETRY_S)  # clients may hold all descriptors
                    continue
                scope = trio.CancelScope()
                count_max = NAMELESS_MAX if self._tls is None else HALF_OPEN_MAX
                number, is_full = self._nameless.enter(scope, count_max)
                self.refusals["limit"] += is_full
                nursery.start_soon(self._serve, sock, scope, number)

    async def _keep_connected(self, stream: PeerStream) -> None:
        backoff_ms = BACKOFF_MS[0]
        while True:
            await self._until_whole(stream.node_id)
            try:
                is_refused = not await self._connect_once(stream)
            except Exception as error:  # noqa: BLE001 - the border of a dialled stream
                is_refused = True
                self._end_for(error, "dialled stream", stream.node_id)
            backoff_ms = BACKOFF_MS[1] if is_refused else backoff_ms
            if stream.has_stood:
                stream.has_stood = False
                backoff_ms = BACKOFF_MS[0]
            with trio.move_on_after(backoff_ms * (0.5 + self._random.random()) / 1e3):
                await stream.redial.wait()
            if stream.redial.is_set():
                stream.redial = trio.Event()
                backoff_ms = BACKOFF_MS[0]
            backoff_ms = min(2 * backoff_ms, BACKOFF_MS[1])

    async def _connect_once(self, stream: PeerStream) -> bool:
        """Dial and send until the connection ends; False when the peer is not the right one."""
        try:
            sock, identity = await self._dial(stream)
        except (OSError, trio.TooSlowError, EOFError, UnicodeError):
            stream.has_failed = True
            self.taken.pop(stream.node_id, None)
            return True  # not up yet, just gone, or a name that cannot be looked up: try again
        except (PeerRefusedError, RemoteProtocolError) as error:
            reason = str(error)[:REASON_LENGTH_MAX]
            if stream.node_id not in self.taken:  # the node reports that once
                self._log.warning("peer refused", peer=stream.node_id, reason=reason)
            stream.has_failed = True
            return False
        stream.has_failed = False
        stream.sock = sock
        try:
            stream.has_stood = True
            self._stands(stream, identity)
            await self._drain(stream, identity)
            await self._until_heard(stream.node_id)
        except Exception:
            stream.drop_connection()
            self._ended(stream)
            raise
        finally:
            stream.drop_connection()
        self._ended(stream)
        return True

    def _stands(self, stream: PeerStream, identity: PeerIdentity) -> None:
        if stream.name not in _VITAL:
            return
        self._heard.add(stream.node_id)
        if self.is_connected(stream.node_id):
            self._log.info("peer connected", peer=stream.node_id)
        self._on_identity(identity)  # this callback may send to the peer already

    def _ended(self, stream: PeerStream) -> None:
        """With one vital stream the other ends: a peer is lost as a whole, and reported once."""
        if stream.name not in _VITAL or stream.node_id not in self._heard:
            return
        self._heard.remove(stream.node_id)
        for name in _VITAL:
            if (other := self._streams.get((stream.node_id, name))) is not None:
                other.end()
        self._log.info("peer lost", peer=stream.node_id)
        self._on_lost(stream.node_id)

    async def _dial(self, stream: PeerStream) -> tuple[PeerSocket, PeerIdentity]:
        addresses = self._addresses[stream.node_id]
        address = addresses[stream.dials % len(addresses)]
        stream.dials += 1
        with trio.fail_after(HELLO_TIMEOUT_S):
            try:
                with trio.fail_after(DIAL_TIMEOUT_S) as stream.dialling:
                    connected = await trio.open_tcp_stream(address.host, address.port)
            finally:
                stream.dialling = None
            plain = socket.socket(fileno=connected.socket.detach())
            try:
                plain.setblocking(False)
                tune(plain, UNSENT_CHUNK_BYTES_MAX if stream.name == Stream.CATCH_UP else 0)
                sock = await self._protect(plain, stream, address)
                mine = msgspec.structs.replace(self._hello, stream=stream.name)
                await write_hello(sock, mine)
                theirs = await self._read_answer(sock, address)
                await self._until_whole(stream.node_id)
                reason = check_hello(self._hello, theirs)  # which may demand more by now
                if not reason and theirs.node_id != stream.node_id:
                    reason = f"node {theirs.node_id} answers at node {stream.node_id}'s address"
                if not reason and self._is_revoked(sock):
                    reason = REVOKED
                self._heed(stream.node_id, theirs)
                if reason:
                    raise PeerRefusedError(f"{address}: {reason}")
                stream.version = common_format(self._hello, theirs)
                stream.process_id = theirs.process_id
                return sock, identity_of(theirs)
            except BaseException:
                plain.close()
                raise

    async def _protect(
        self, sock: socket.socket, stream: PeerStream, address: Address
    ) -> PeerSocket:
        """The stream, with TLS unless that is off; while it is turned on or off node by node, every
        other dial to a peer that does not speak it goes without.

        Raises:
            EOFError, OSError: it went, or does not speak TLS.
            PeerRefusedError: it is not that node.
        """
        if self._tls is None or stream.dials_plain:
            stream.dials_plain = False
            return sock
        try:
            return await self._tls.dial(sock, stream.node_id)
        except (EOFError, OSError):
            stream.dials_plain = self._tls.accepts_plain
            raise
        except PeerRefusedError as error:
            self.refusals[self._tls.refusal] += 1
            raise PeerRefusedError(f"{address}: {error}") from None

    async def _read_answer(self, sock: PeerSocket, address: Address) -> Hello:
        """The hello of a peer that was dialled.

        Raises:
            EOFError, OSError: it went; or was spoken to without TLS, and takes it by now.
            PeerRefusedError: it does not trust this node.
        """
        try:
            theirs = await read_hello(sock)
        except ConnectionAbortedError as error:
            if isinstance(sock, PeerTlsSocket):  # the other side may verify after this one is ready
                raise PeerRefusedError(f"{address}: it refuses this node: {error}") from None
            raise
        if theirs.takes_tls and self._tls is not None and not isinstance(sock, PeerTlsSocket):
            raise ConnectionAbortedError("this peer takes TLS")
        return theirs

    def _dial_now(self, node_id: NodeId) -> None:
        """A peer dialled this node: end the wait before its next dial."""
        now_s = trio.current_time()
        if (node_id, Stream.BULK) not in self._streams or now_s < self._hurried_s.get(node_id, 0.0):
            return
        self._hurried_s[node_id] = now_s + HURRY_S
        for name in STREAMS:
            if (stream := self._streams.get((node_id, name))) is not None:
                stream.hurry()

    async def _drain(self, stream: PeerStream, identity: PeerIdentity) -> None:
        """Write what did not fit at once; return when the connection ends."""
        sock = stream.sock
        assert sock is not None
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                if not (isinstance(sock, PeerTlsSocket) and sock.has_unread):
                    await trio.lowlevel.wait_readable(sock)  # in most cases it is the end
                await self._reader(sock, identity, stream.name).run()

            async def end_after(work: Callable[[], Awaitable[None]]) -> None:
                await self._guarded(work, "dialled stream", identity.node_id)
                nursery.cancel_scope.cancel()

            nursery.start_soon(end_after, read)
            await end_after(stream.drain)

    # ---- accepted streams ----

    async def _serve(self, sock: socket.socket, scope: trio.CancelScope, number: int) -> None:
        node_id: NodeId | None = None
        try:
            sock.setblocking(False)
            tune(sock)
            met = None
            with scope:
                met = await self._meet(sock, partial(self._nameless.turn, number))
            self._nameless.leave(number)
            if met is not None:
                stream, identity, name, version = met
                node_id = identity.node_id
                if version < self._hello.spoken[0]:
                    raise PeerRefusedError(f"format {version} is not spoken here any more")
                if self._is_revoked(stream):
                    self.refusals["certificate"] += 1
                    self._on_stranger(_remote(stream), "certificate", REVOKED)
                    self._tell_refused(stream, node_id, REVOKED)
                    return
                if reason := self._why_no_room(node_id, name):
                    # Others came in while our hello was on its way.
                    self.refusals["limit"] += 1
                    self._tell_refused(sock, node_id, reason)
                    return
                self._make_room(node_id, name)
                await self._attend(stream, identity, name, version)
        except (OSError, EOFError):
            pass  # the peer went away
        except Exception as error:  # noqa: BLE001 - the border of an accepted stream
            self._end_for(error, "accepted stream", node_id)
        finally:
            self._nameless.leave(number)
            sock.close()

    async def _meet(
        self, accepted: socket.socket, turn: Turn
    ) -> tuple[PeerSocket, PeerIdentity, str, int] | None:
        """Read a hello and answer it; returns connection, identity, stream and format. None:
        refused, with the reason in the answer if the other side is a node."""
        with trio.move_on_after(HELLO_TIMEOUT_S) as limit:
            sock = await self._admit(accepted, turn)
            if sock is None:
                return None
            try:
                theirs = await read_hello(sock)
                identity = identity_of(theirs)
            except (PeerRefusedError, RemoteProtocolError) as error:
                self.refusals["hello"] += 1
                reason = str(error)[:REASON_LENGTH_MAX]
                self._log.warning("no hello of a peer", reason=reason, where=_remote(sock))
                return None
            if isinstance(sock, PeerTlsSocket) and sock.node_id not in (None, identity.node_id):
                self.refusals["certificate"] += 1
                reason = f"its certificate is of node {sock.node_id}"
                self._on_stranger(_remote(sock), "certificate", reason)
                self._tell_refused(sock, identity.node_id, reason)
                return None
            await self._until_whole(identity.node_id)
            is_rival = False
            if reason := check_hello(self._hello, theirs):
                self.refusals["identity"] += 1
            elif reason := self._why_no_room(identity.node_id, theirs.stream):
                self.refusals["limit"] += 1
            elif is_rival := await self._is_rival(theirs):
                self.refusals["identity"] += 1
                reason = self._tell_rival(theirs)
            reason = reason[:REASON_LENGTH_MAX]
            mine = msgspec.structs.replace(self._hello, refusal=reason, is_taken=is_rival)
            await write_hello(sock, mine)
            if not reason:
                return sock, identity, theirs.stream, common_format(mine, theirs)
            self._tell_refused(sock, identity.node_id, reason)
        if limit.cancelled_caught:
            self.refusals["deadline"] += 1
        return None

    async def _admit(self, sock: socket.socket, turn: Turn) -> PeerSocket | None:
        """The connection of whoever may say hello; None for whoever is no node."""
        if self._tls is None:
            return sock
        where = _remote(sock)  # which a refusal closes
        try:
            return await self._tls.accept(sock, turn)
        except PeerRefusedError as error:
            self.refusals[self._tls.refusal] += 1
            reason = str(error)[:REASON_LENGTH_MAX]
            self._log.warning("a stranger at the peer port", reason=reason, where=where)
            self._on_stranger(where, self._tls.refusal, reason)
            return None

    def _tell_refused(self, sock: PeerSocket, node_id: NodeId, reason: str) -> None:
        self._log.warning("refused a peer", peer=node_id, reason=reason, where=_remote(sock))

    def _why_no_room(self, node_id: NodeId, name: str) -> str:
        """Say why there is no room for another stream; "" when there is or can be made.

        Without TLS no peer proves its identity. So the streams that work are kept: where there are
        too many with one identity, the newest one that nothing has come on is ended.
        """
        if node_id not in self._addresses:
            guests = {peer for peer, _ in self._accepted if peer not in self._addresses}
            if node_id not in guests and len(guests) >= GUESTS_MAX:
                return f"{len(guests)} nodes that this cluster does not know are connected"
        accepted = self._accepted.get((node_id, name), [])
        is_full = len(accepted) >= STREAMS_PER_KIND_MAX
        if is_full and all(each.reader.has_heard for each in accepted):
            return f"node {node_id} has {len(accepted)} streams of kind {name} here"
        return ""

    def _make_room(self, node_id: NodeId, name: str) -> None:
        """End the newest stream on which nothing has come, if there are too many."""
        accepted = self._accepted.get((node_id, name), [])
        if len(accepted) >= STREAMS_PER_KIND_MAX:
            silent = [each for each in accepted if not each.reader.has_heard]
            self.refusals["limit"] += 1
            silent[-1].reader.refuse(PeerRefusedError("a newer stream takes its place"))
            accepted.remove(silent[-1])

    # ---- two processes with one node id ----

    async def _is_rival(self, theirs: Hello) -> bool:
        """True when another process answers at that node's address, and did not just end.

        A node is one process with one storage. A second process, with a copied data folder or an
        empty one, would break what the first promised, or take its place. Only streams that were
        dialled tell which is the first: any process may connect and claim to be a node.
        """
        for _ in range(ENDING_LOOKS):
            if not self._stands_otherwise(theirs):
                return False
            await trio.sleep(ENDING_LOOK_S)
        return self._stands_otherwise(theirs)

    def _stands_otherwise(self, theirs: Hello) -> bool:
        streams = [self._streams.get((NodeId(theirs.node_id), name)) for name in STREAMS]
        return any(
            stream is not None
            and stream.sock is not None
            and "" not in (stream.process_id, theirs.process_id)
            and stream.process_id != theirs.process_id
            and not _has_ended(stream.sock)
            for stream in streams
        )

    def _tell_rival(self, theirs: Hello) -> str:
        """The refusal that the second process gets."""
        node_id = NodeId(theirs.node_id)
        self._rivals[node_id] = theirs, trio.current_time()
        where = self._addresses[node_id][0]
        return (
            f"node_id {node_id} is taken: another process with this node_id answers at {where}. "
            "Stop one of the two, or give this one a node_id and a data folder of its own"
        )

    def _heed(self, node_id: NodeId, theirs: Hello) -> None:
        """Remember whether a peer refuses this process for another one of its node id."""
        if theirs.is_taken:
            self.taken[node_id] = theirs.refusal[:REASON_LENGTH_MAX]
        else:
            self.taken.pop(node_id, None)

    @property
    def taken_reason(self) -> str:
        """Why a peer refuses this process that knows another one of its node id; "" for none."""
        return next(iter(self.taken.values()), "")

    def rivals(self) -> list[Hello]:
        """Processes that were refused lately, since another one of their node id lives."""
        since_s = trio.current_time() - RIVAL_S
        return [hello for hello, at_s in self._rivals.values() if at_s >= since_s]

    async def _attend(
        self, sock: PeerSocket, identity: PeerIdentity, name: str, version: int
    ) -> None:
        """Read an accepted stream to its end; send on it while no dialled one works."""
        node_id = identity.node_id
        kind = ChunkStream if name == Stream.CATCH_UP else PeerStream
        back = kind(node_id, name, self._queue_bytes_max, sock=sock, version=version)
        mine = _Accepted(self._reader(sock, identity, name), back)
        self._accepted.setdefault((node_id, name), []).append(mine)

        async def read() -> None:
            self._dial_now(node_id)
            if name in _VITAL and self._way_to(node_id, name) is back:
                self._stands(back, identity)
            else:
                self._on_identity(identity)
            await mine.reader.run()

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._guarded, back.drain, "accepted stream", node_id)
                await self._guarded(read, "accepted stream", node_id)
                nursery.cancel_scope.cancel()
        finally:
            was_the_way = self._way_to(node_id, name) is back
            self._leave(mine)
            back.drop_connection()
        if was_the_way:
            self._ended(back)

    def _leave(self, mine: _Accepted) -> None:
        key = mine.back.node_id, mine.back.name
        accepted = self._accepted.get(key, [])
        if mine in accepted:
            accepted.remove(mine)
        if not accepted:
            self._accepted.pop(key, None)

    def _reader(self, sock: PeerSocket, sender: PeerIdentity, name: str) -> FrameReader:
        return FrameReader(
            sock,
            sender.node_id,
            partial(self._on_frame, sender),
            is_blocked=lambda: sender.node_id in self.block_from,
            budget=self._budget,
            memory=self._memory,
            takes_parts=name == Stream.CATCH_UP,
        )

    # ---- errors ----

    async def _guarded(
        self, work: Callable[[], Awaitable[None]], where: str, node_id: NodeId
    ) -> None:
        """Do a stream's work; what it raises ends here."""
        try:
            await work()
        except (OSError, EOFError):
            pass  # the peer went away
        except Exception as error:  # noqa: BLE001 - the border of a stream
            self._end_for(error, where, node_id)

    def _end_for(self, error: Exception, where: str, node_id: NodeId | None) -> None:
        """Log and count why a stream ends; no exception goes further."""
        errors = _single(error)
        if isinstance(errors, OSError | EOFError):
            return
        reason = _REASONS.get(type(errors), "bug")
        self.refusals[reason] += 1
        text = f"{type(errors).__name__}: {errors}"[:REASON_LENGTH_MAX]
        if reason != "bug":
            self._log.warning("peer stream broken", peer=node_id, where=where, reason=text)
            return
        kind = f"{where} {type(errors).__name__}"
        is_news = kind not in self._told_bugs and len(self._told_bugs) < _TOLD_MAX
        if is_news:
            self._told_bugs.add(kind)
        self._log.error(
            "a peer's stream met a bug",
            peer=node_id,
            where=where,
            why=text,
            exc_info=errors if is_news else None,
        )
        if isinstance(errors, AssertionError):
            self._on_broken_invariant(f"broken invariant: {errors!r}")


@frozen(slots=True, eq=False)
class _Accepted:
    """A stream that a peer dialled: its reader, and its sending side."""

    reader: FrameReader
    back: PeerStream


_REASONS: Final[Mapping[type[Exception], str]] = {
    PeerRefusedError: "frame",
    PeerMemoryError: "memory",
    RemoteProtocolError: "frame",
    trio.TooSlowError: "deadline",
    MemoryError: "memory",
}


def _has_ended(sock: PeerSocket) -> bool:
    """True when the other side closed a connection and all that it sent was read."""
    try:
        return sock.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _single(error: Exception) -> Exception:
    """The first error inside nested groups."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _remote(sock: PeerSocket) -> str:
    """The address of the other side."""
    try:
        return str(Address(*sock.getpeername()[:2]))
    except OSError:
        return "gone"
