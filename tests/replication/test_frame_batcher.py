"""Messages to other nodes: few frames, none too large, order kept within a stream."""

from __future__ import annotations

from collections import defaultdict
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from raftmq.raft.messages import AppendRequest, Entry, EntryKind, Heartbeat, VoteReply
from raftmq.replication.messages import SEVERAL_MAX, NodeBeat, PeerMessage, decode
from raftmq.replication.multiraft import (
    BEATS_MAX,
    GATHERED_BYTES_MAX,
    SMALL_BYTES_MAX,
    FrameBatcher,
    Stream,
)
from raftmq.types import (
    Buffer,
    NodeId,
    RaftGroupId,
    RaftIndex,
    ReplicaId,
    StorageId,
    Term,
    TopicId,
)

A, B, C = (ReplicaId(NodeId(n), StorageId(n)) for n in (1, 2, 3))
T = Term(4)


def group(number: int) -> RaftGroupId:
    return RaftGroupId(TopicId(UUID(int=1)), number, 1)


def append(to: ReplicaId, at: int, size: int) -> AppendRequest:
    payload = memoryview(bytes(size))
    entry = Entry(RaftIndex(at), RaftIndex(at + 1), T, EntryKind.BATCH, payload)
    return AppendRequest(T, A, to, RaftIndex(at), T, RaftIndex(0), (entry,))


class Post:
    """Takes what a node's batcher sends."""

    def __init__(self) -> None:
        self.frames: list[tuple[NodeId, bytes, Stream]] = []
        self.batcher = FrameBatcher(A.node_id, self._send)

    def _send(self, node_id: NodeId, frame: list[Buffer], stream: Stream) -> bool:
        self.frames.append((node_id, b"".join(frame), stream))
        return True

    def received(self) -> dict[tuple[NodeId, Stream], list[tuple[RaftGroupId, PeerMessage]]]:
        streams: dict[tuple[NodeId, Stream], list[tuple[RaftGroupId, PeerMessage]]]
        streams = defaultdict(list)
        for to, frame, stream in self.frames:
            content = decode(frame)
            assert not isinstance(content, NodeBeat)
            streams[to, stream] += content
        return streams


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),
            st.sampled_from([B, C]),
            st.sampled_from(Stream),
            st.sampled_from([0, 80, SMALL_BYTES_MAX, 10 * SMALL_BYTES_MAX]),
        ),
        max_size=200,
    )
)
def test_every_message_arrives_once_and_in_the_order_of_its_stream(
    plan: list[tuple[int, ReplicaId, Stream, int]],
) -> None:
    post = Post()
    given: dict[tuple[NodeId, Stream], list[tuple[RaftGroupId, PeerMessage]]] = defaultdict(list)
    for number, (of, to, stream, size) in enumerate(plan):
        message = append(to, number, size) if size else VoteReply(T, A, to, bool(number % 2))
        given[to.node_id, stream].append((group(of), message))
        post.batcher.add(group(of), message, stream)
    post.batcher.send_all()
    assert post.received() == given
    for _, frame, _ in post.frames:
        content = decode(frame)
        assert not isinstance(content, NodeBeat)
        assert len(content) == 1 or len(frame) <= GATHERED_BYTES_MAX + 2 * SMALL_BYTES_MAX
    count = len(post.frames)
    post.batcher.send_all()
    assert len(post.frames) == count, "nothing stays"


def test_a_thousand_votes_leave_in_frames_that_one_turn_can_take() -> None:
    post = Post()
    for number in range(1_000):
        post.batcher.add(group(number), VoteReply(T, A, B, True), Stream.HEARTBEAT)
    post.batcher.send_all()
    assert len(post.frames) == -(-1_000 // SEVERAL_MAX)
    assert [g.partition for g, _ in post.received()[B.node_id, Stream.HEARTBEAT]] == [*range(1_000)]


def test_heartbeats_of_a_thousand_groups_are_few_frames() -> None:
    post = Post()
    for number in range(1_000):
        post.batcher.add_beat(group(number), Heartbeat(T, A, B, RaftIndex(0), 1))
    post.batcher.send_all()
    assert len(post.frames) == -(-1_000 // BEATS_MAX)
    assert len(post.received()[B.node_id, Stream.HEARTBEAT]) == 1_000


def test_a_large_message_is_not_copied_and_does_not_overtake_a_small_one() -> None:
    pieces: list[list[Buffer]] = []

    def send(_to: NodeId, frame: list[Buffer], stream: Stream) -> bool:
        assert stream is Stream.BULK
        pieces.append(frame)
        return True

    batcher = FrameBatcher(A.node_id, send)
    batcher.add(group(0), append(B, 0, 10), Stream.BULK)
    large = append(B, 1, SMALL_BYTES_MAX)
    assert pieces == []
    batcher.add(group(0), large, Stream.BULK)
    assert len(pieces) == 2
    assert pieces[1][1] is large.entries[0].payload
