"""The simulated network between nodes: streams that stand, break and are dialled again.

Frames of Raft are treated worse than by TCP on purpose: dropped, doubled, and, where the run says
so, overtaken by later ones. Frames between brokers have a stream's promise: in order, all or none
after; a stream that lost one ends as soon as it is whole again, and both that and the new dialling
are told. Owns which directions are cut. `SimLinks` is one node's end, for as long as its process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from attrs import define

from raftmq.config import Address
from raftmq.ports import DiskError
from raftmq.raft.messages import StoredChunk, VoteReply
from raftmq.replication.messages import NodeBeat, decode
from raftmq.runtime.peer_hello import PEER_FORMATS
from raftmq.runtime.peer_links import (
    KIND_BROKER,
    KIND_BROKER_BEAT,
    KIND_FORMATION,
    KIND_HEARTBEATS,
    KIND_METADATA,
    KIND_RAFT,
)
from raftmq.runtime.peer_streams import KIND_STORED
from raftmq.types import Buffer, NodeId

if TYPE_CHECKING:
    from jepsen_like.cluster.node import ClusterNode
    from jepsen_like.cluster.world import ClusterWorld
    from raftmq.node.environment import PeerEvents

RELIABLE = (KIND_BROKER, KIND_BROKER_BEAT, KIND_FORMATION)
VOTING = (KIND_RAFT, KIND_HEARTBEATS, KIND_METADATA)
BACKOFF_MS = (20.0, 1_000.0)
UNNOTICED_MS = 2_000.0
"""So long it may take until the end of a stream is noticed whose other end lost power."""


class Wires:
    """All links of the world."""

    def __init__(self, world: ClusterWorld, random: Random) -> None:
        self._world = world
        self._random = random
        options = world.options
        self._low_ms, self._high_ms = options.latency_ms
        self._spread_ms = self._high_ms - self._low_ms
        self._straggler = options.straggler
        self._reorders = options.reorder
        self._cut: dict[tuple[int, int], int] = {}
        self._last: dict[tuple[int, int, bool, bool], float] = {}
        self.stale: dict[int, float] = {}
        """Nodes that hear of the metadata group so much later, in milliseconds; 0: not at all."""
        self.is_faulty = True
        self.is_stormy = False

    # ---- faults ----

    def cut(self, sender: int, to: int) -> None:
        """Lose everything from `sender` to `to` from now on."""
        self._cut[sender, to] = self._cut.get((sender, to), 0) + 1

    def mend(self, sender: int, to: int) -> None:
        """Undo one `cut`."""
        count = self._cut.get((sender, to), 0) - 1
        if count > 0:
            self._cut[sender, to] = count
        elif self._cut.pop((sender, to), None) is not None:
            self._reset_torn(sender, to)

    def mend_all(self) -> None:
        """No link is cut."""
        self.stale.clear()
        for sender, to in list(self._cut):
            self._cut[sender, to] = 1
            self.mend(sender, to)

    def is_cut(self, sender: int, to: int) -> bool:
        """True while nothing gets through in this direction."""
        return (sender, to) in self._cut

    def _reset_torn(self, sender: int, to: int) -> None:
        links = self._world.node(sender).links
        if links is not None:
            links.mended(NodeId(to))

    # ---- frames ----

    def delay_ms(self) -> float:
        """How long the next frame takes."""
        random = self._random.random
        if self.is_faulty and random() < (0.1 if self.is_stormy else self._straggler):
            return self._random.uniform(self._high_ms, self._world.options.straggler_ms)
        return self._low_ms + self._spread_ms * random()

    def is_lost(self) -> bool:
        """True when the next frame gets lost."""
        if not self.is_faulty:
            return False
        odds = 0.2 if self.is_stormy else self._world.options.drop
        is_lost = self._random.random() < odds
        if is_lost and self.is_stormy:
            self._world.had_effect("lost in a storm")
        return is_lost

    def copies(self) -> int:
        """How often the next frame arrives."""
        is_doubled = self.is_faulty and self._random.random() < self._world.options.duplicate
        return 2 if is_doubled else 1

    def carry(self, sender: NodeId, to: NodeId, kind: int, data: bytes, life: int) -> None:
        """Let a frame arrive some time, at the process that runs there then."""
        world = self._world
        is_ordered = kind in RELIABLE
        at_ms = world.now_ms + self.delay_ms()
        late_ms = self.stale.get(to, 0.0) if kind == KIND_METADATA else 0.0
        if is_ordered or not (self._reorders or late_ms):
            stream = (sender, to, is_ordered, kind == KIND_BROKER_BEAT)  # beats have one alone
            at_ms = self._last[stream] = max(at_ms, self._last.get(stream, 0.0))
        arrival = partial(self._arrive, sender, to, kind, data, life)
        world.schedule(at_ms + late_ms - world.now_ms, arrival)

    def _arrive(self, sender: NodeId, to: NodeId, kind: int, data: bytes, life: int) -> None:
        if kind == KIND_METADATA and self.stale.get(to) == 0:
            self._world.had_effect("metadata kept back")
            return
        if (sender, to) not in self._cut:
            self._world.frame_arrives(sender, to, kind, data)
            return
        self._world.had_effect("lost in a cut")
        if kind in RELIABLE:
            self._tear(sender, to, life)

    def _tear(self, sender: NodeId, to: NodeId, life: int) -> None:
        node = self._world.node(sender)
        if node.links is not None and node.life == life:
            node.links.torn(to)


@define
class Stream:
    """What one node knows of its streams to another."""

    is_connected: bool = False
    is_torn: bool = False
    has_ended: bool = False  # the peer closed it, and this loop was not told yet
    backoff_ms: float = BACKOFF_MS[0]
    round: int = 0
    queued_bytes: int = 0
    sent_bytes: int = 0
    dropped_frames: int = 0


def _is_vote(frame: bytes) -> bool:
    """True for a granted vote on its way out."""
    content = decode(frame)
    if isinstance(content, NodeBeat):
        return False
    return any(isinstance(message, VoteReply) and message.granted for _, message in content)


class SimLinks:
    """`Links` of one process of a simulated node."""

    def __init__(self, world: ClusterWorld, node: ClusterNode, peer_events: PeerEvents) -> None:
        self._world = world
        self._node = node
        self._peer_events = peer_events
        self._life = node.life
        self.formats = PEER_FORMATS
        self._streams: dict[NodeId, Stream] = {}
        self.block_to: frozenset[NodeId] = frozenset()
        self.block_from: frozenset[NodeId] = frozenset()

    # ---- Links ----

    def send(self, node_id: NodeId, kind: int, pieces: Sequence[Buffer]) -> bool:
        """Send a frame; False when no stream stands."""
        stream = self._streams.get(node_id)
        if stream is None or not stream.is_connected:
            return False
        data = b"".join(pieces)
        stream.sent_bytes += len(data)
        if self._node.crashes_after_voting and kind in VOTING and _is_vote(data):
            self._node.voted()
        wires = self._world.wires
        if kind in RELIABLE:
            if stream.is_torn:
                return True  # as far as anybody here can tell
            if wires.is_lost():
                self.torn(node_id)
                self.mended(node_id)
                return True
            if wires.is_cut(self._node.node_id, node_id):
                self.torn(node_id)
                return True
            wires.carry(self._node.node_id, node_id, kind, data, self._life)
            return True
        if wires.is_lost():
            return True
        for _ in range(wires.copies()):
            wires.carry(self._node.node_id, node_id, kind, data, self._life)
        return True

    def send_stored(self, node_id: NodeId, head: Sequence[Buffer], chunk: StoredChunk) -> bool:
        """Send a message whose batches lie in a file."""
        pieces = list(head)
        if (span := chunk.span) is not None:
            try:
                pieces.append(span.file.pread(span.size, span.position))
            except DiskError:
                return False
        return self.send(node_id, KIND_STORED, pieces)

    def has_room_for_stored(self, node_id: NodeId, size_bytes: int) -> bool:
        """A simulated stream never fills."""
        return self.is_connected(node_id)

    def is_connected(self, node_id: NodeId) -> bool:
        """True while a stream to the peer stands."""
        stream = self._streams.get(node_id)
        return stream is not None and stream.is_connected

    def has_ended(self, node_id: NodeId) -> bool:
        """True when the peer closed a stream of which this loop has not been told yet."""
        stream = self._streams.get(node_id)
        return stream is not None and stream.has_ended

    @property
    def refusals(self) -> Mapping[str, int]:
        """Nobody is refused here: a frame that cannot be is a breach of its own."""
        return {}

    def set_formation(self, formation_id: str) -> None:
        """All nodes of this world are of one formation."""

    def demand(self, oldest: int, why: str) -> None:
        """Speak no older format than this one from now on; streams of older ones end."""
        low, high = self.formats
        self.formats = max(low, oldest), high
        for node_id in self._streams:
            if self.is_connected(node_id) and not self._common_format(node_id):
                self._ends_later(node_id, self._world.wires.delay_ms())

    def version(self, node_id: NodeId) -> int:
        """The format in which requests to this peer go; 0 while it is not connected."""
        return self._common_format(node_id) if self.is_connected(node_id) else 0

    def _common_format(self, node_id: NodeId) -> int:
        other = self._world.node(node_id).links
        if other is None:
            return 0
        low = max(self.formats[0], other.formats[0])
        high = min(self.formats[1], other.formats[1])
        return high if low <= high else 0

    def set_addresses(self, addresses: Mapping[NodeId, Address]) -> None:
        """New peers are dialled."""
        for node_id in addresses:
            if node_id != self._node.node_id and node_id not in self._streams:
                self._streams[node_id] = Stream()
                self._dial_later(node_id, 0.0)

    def queued_bytes(self) -> dict[NodeId, int]:
        """Nothing waits here."""
        return dict.fromkeys(self._streams, 0)

    def streams(self) -> Iterable[tuple[NodeId, str]]:
        """One for all kinds."""
        return [(node_id, "bulk") for node_id in self._streams]

    def counts(self, node_id: NodeId, name: str) -> Stream:
        """What passed through it."""
        return self._streams[node_id]

    # ---- what happens to streams ----

    def torn(self, node_id: NodeId) -> None:
        """A frame that the stream promised is lost: nothing after it may arrive."""
        self._streams[node_id].is_torn = True

    def mended(self, node_id: NodeId) -> None:
        """The way is whole again: a torn stream ends now."""
        stream = self._streams.get(node_id)
        if stream is not None and stream.is_connected and stream.is_torn:
            self._ends_later(node_id, self._world.wires.delay_ms())

    def peer_down(self, node_id: NodeId, *, is_told: bool) -> None:
        """The other process ended; its system closes its streams, unless that lost power, too."""
        stream = self._streams.get(node_id)
        if stream is None or not stream.is_connected:
            return
        stream.is_torn = True
        if is_told:
            stream.has_ended = True
            self._ends_later(node_id, self._world.wires.delay_ms())
        else:
            self._ends_later(node_id, UNNOTICED_MS)

    def peer_up(self, node_id: NodeId) -> None:
        """A new process is there: it resets what is left of streams to its forerunner."""
        stream = self._streams.get(node_id)
        if stream is not None and stream.is_connected:
            self._ends_later(node_id, self._world.wires.delay_ms())

    def dialled_by(self, node_id: NodeId) -> None:
        """A peer came by itself: nobody waits any longer before it is dialled."""
        stream = self._streams[node_id]
        if not stream.is_connected:
            self._dial_later(node_id, self._world.wires.delay_ms())

    def _ends_later(self, node_id: NodeId, delay_ms: float) -> None:
        stream = self._streams[node_id]
        number = stream.round

        def end() -> None:
            if stream.round != number or not stream.is_connected:
                return
            stream.round += 1
            stream.is_connected = stream.is_torn = stream.has_ended = False
            stream.backoff_ms = BACKOFF_MS[0]
            self._world.note("lost", self._node.node_id, node_id)
            self._peer_events.peer_lost(node_id)
            self._dial_later(node_id, stream.backoff_ms)

        self._node.later(delay_ms, end)

    def _dial_later(self, node_id: NodeId, delay_ms: float) -> None:
        stream = self._streams[node_id]
        stream.round += 1
        number = stream.round

        def dial() -> None:
            if stream.round != number or stream.is_connected:
                return
            wires, me = self._world.wires, self._node.node_id
            peer = self._world.node(node_id)
            is_open = not (wires.is_cut(me, node_id) or wires.is_cut(node_id, me))
            is_there = peer.is_listening and not peer.is_paused
            if is_open and is_there and self._common_format(node_id):
                stream.is_connected = True
                stream.is_torn = False  # by what was still on its way in the last one
                stream.backoff_ms = BACKOFF_MS[0]
                self._peer_events.peer_introduced(peer.identity)
                peer.introduced(self._node)
                return
            stream.backoff_ms = min(2 * stream.backoff_ms, BACKOFF_MS[1])
            jitter = 0.5 + self._world.random.random()
            self._dial_later(node_id, stream.backoff_ms * jitter)

        self._node.later(delay_ms, dial)
