"""Messages on their way to other nodes: those of many groups share few frames.

When a node dies that led hundreds of groups, each of them asks for votes, answers and begins its
term at the same moment. A frame for every one of these messages costs both sides more than the
message itself: a system call, a checksum, a turn of the receiver's replicas. So what is small waits
until the round of drains ends that caused it; a message that is alone then leaves as it is.

Invariants: messages of one stream to one node leave in the order they came, so a group's requests
never overtake each other; what is urgent (heartbeats, votes, answers) has a stream of its own and
never waits for bulk (a node whose groups all rest reads it at its ticks, so what wakes them comes
another way), nor do requests of the metadata group, on which every partition and every consumer
group depends; a frame takes its receiver milliseconds, however many groups there are; nothing
stays here when a drain is over.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, Protocol

from raftmq.raft.messages import Heartbeat, HeartbeatReply
from raftmq.replication.peer_codec import SEVERAL_MAX, encode, encode_beats, encode_several
from raftmq.replication.peer_messages import PeerMessage
from raftmq.types import Buffer, NodeId, RaftGroupId

SMALL_BYTES_MAX: Final = 2 << 10
"""What is larger than that is worth a frame of its own, and not worth a copy."""
GATHERED_BYTES_MAX: Final = 32 << 10
BEATS_MAX: Final = 256


class Stream(Enum):
    """How a message travels; none waits for those of another stream."""

    BULK = "bulk"
    CONTROL = "control"
    HEARTBEAT = "heartbeat"


class SendFrame(Protocol):
    """The shell's way to another node."""

    def __call__(self, node_id: NodeId, frame: list[Buffer], stream: Stream) -> bool:
        """Send one frame, given in pieces, without blocking; False when it was dropped."""
        ...


class _Bag:
    """What waits for one node on one stream."""

    __slots__ = ("frames", "size_bytes")

    def __init__(self) -> None:
        self.frames: list[list[Buffer]] = []
        self.size_bytes = 0


class Mail:
    """What a node's replicas have to say to those of other nodes."""

    def __init__(self, node_id: NodeId, send: SendFrame) -> None:
        self._node_id = node_id
        self._send = send
        self._beats: dict[NodeId, list[tuple[RaftGroupId, Heartbeat | HeartbeatReply]]] = {}
        self._bags: dict[tuple[NodeId, Stream], _Bag] = {}

    def add_beat(self, group: RaftGroupId, beat: Heartbeat | HeartbeatReply) -> None:
        """Take a heartbeat or the reply to one; it leaves with the others."""
        to = beat.to.node_id
        beats = self._beats.setdefault(to, [])
        beats.append((group, beat))
        if len(beats) >= BEATS_MAX:
            self._send_beats(to, self._beats.pop(to))

    def add(self, group: RaftGroupId, message: PeerMessage, stream: Stream) -> None:
        """Take any other message; a large one leaves at once, after those before it."""
        to = message.to.node_id
        frame = encode(group, message)
        size = len(frame[0]) if len(frame) == 1 else sum(map(len, frame))
        bag = self._bags.get((to, stream))
        if size > SMALL_BYTES_MAX:
            if bag is not None:
                self._send_bag(to, stream)
            self._send(to, frame, stream)
            return
        if bag is None:
            bag = self._bags[to, stream] = _Bag()
        bag.frames.append(frame)
        bag.size_bytes += size
        if len(bag.frames) >= SEVERAL_MAX or bag.size_bytes >= GATHERED_BYTES_MAX:
            self._send_bag(to, stream)

    def leave(self) -> None:
        """Send what was gathered."""
        while self._bags:
            self._send_bag(*next(iter(self._bags)))
        while self._beats:
            self._send_beats(*self._beats.popitem())

    def _send_bag(self, to: NodeId, stream: Stream) -> None:
        frames = self._bags.pop((to, stream)).frames
        frame = frames[0] if len(frames) == 1 else encode_several(frames)
        self._send(to, frame, stream)

    def _send_beats(
        self, to: NodeId, beats: list[tuple[RaftGroupId, Heartbeat | HeartbeatReply]]
    ) -> None:
        self._send(to, encode_beats(self._node_id, to, beats), Stream.HEARTBEAT)
