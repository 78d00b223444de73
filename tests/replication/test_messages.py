"""Peer messages survive the wire, and nothing but `RemoteProtocolError` comes of damaged ones."""

from __future__ import annotations

from hashlib import sha256
from random import Random
from struct import Struct
from uuid import UUID

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftmq.errors import RemoteProtocolError
from raftmq.metadata import broker_messages
from raftmq.raft.messages import (
    AppendReply,
    AppendRequest,
    Entry,
    EntryKind,
    Heartbeat,
    HeartbeatReply,
    InstallLogStart,
    PreVoteReply,
    PreVoteRequest,
    TimeoutNow,
    VoteReply,
    VoteRequest,
)
from raftmq.replication import messages
from raftmq.replication.messages import (
    QUIESCENCE_BUCKETS,
    SEVERAL_MAX,
    NodeBeat,
    PeerMessage,
    Quiesce,
    RepairReply,
    RepairRequest,
    TailReply,
    TailRequest,
    Unquiesce,
    WrongReplica,
    decode,
    encode,
    encode_beats,
    encode_node_beat,
    encode_several,
)
from raftmq.runtime import peer_hello, peer_links
from raftmq.types import (
    NodeId,
    Offset,
    RaftGroupId,
    RaftIndex,
    ReplicaId,
    StorageId,
    Term,
    TopicId,
)

A = ReplicaId(NodeId(1), StorageId(2**64 - 1))
B = ReplicaId(NodeId(2), StorageId(7))
GROUP = RaftGroupId(TopicId(UUID(int=5)), 3, 2**40)
T = Term(9)


def entry(start: int, end: int, term: int = 9, kind: EntryKind = EntryKind.BATCH) -> Entry:
    return Entry(RaftIndex(start), RaftIndex(end), Term(term), kind, b"x" * (end - start))


MESSAGES: list[PeerMessage] = [
    PreVoteRequest(T, A, B, Term(8), RaftIndex(100)),
    PreVoteReply(T, A, B, True),
    VoteRequest(T, A, B, Term(8), RaftIndex(100), is_transfer=True),
    VoteReply(T, A, B, False),
    AppendRequest(T, A, B, RaftIndex(4), Term(1), RaftIndex(3)),
    AppendRequest(
        T,
        A,
        B,
        RaftIndex(4),
        Term(1),
        RaftIndex(3),
        (entry(4, 9, 2), entry(9, 10, 9, EntryKind.ELECTION), entry(20, 21)),
    ),
    AppendReply(T, A, B, True, RaftIndex(50), is_promise=False, clock_ms=2**45),
    AppendReply(T, A, B, False, RaftIndex(0), RaftIndex(5), RaftIndex(4), Term(2)),
    Heartbeat(T, A, B, RaftIndex(5), 77),
    HeartbeatReply(T, A, B, 77, RaftIndex(6), 12345),
    InstallLogStart(T, A, B, RaftIndex(6), Term(3), b"tuple", b"configuration"),
    TimeoutNow(T, A, B),
    WrongReplica(T, A, B),
    RepairRequest(T, A, B, Offset(5), Offset(10)),
    RepairReply(T, A, B, Offset(5), (b"one", b"three")),
    RepairReply(T, A, B, Offset(5), (), b"log start"),
    TailRequest(T, A, B, RaftIndex(9)),
    TailReply(T, A, B, RaftIndex(9), RaftIndex(7), Term(3)),
    Quiesce(T, A, B, RaftIndex(9), 4),
    Unquiesce(T, A, B),
]


def frame(message: PeerMessage) -> bytes:
    return b"".join(encode(GROUP, message))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_round_trip(message: PeerMessage) -> None:
    assert decode(frame(message)) == [(GROUP, message)]


def test_batches_are_not_copied() -> None:
    payload = bytearray(b"y" * 5000)
    request = AppendRequest(
        T,
        A,
        B,
        RaftIndex(0),
        Term(0),
        RaftIndex(0),
        (Entry(RaftIndex(0), RaftIndex(9), T, EntryKind.BATCH, payload),),
    )
    pieces = encode(GROUP, request)
    assert pieces[1] is payload
    joined = b"".join(pieces)
    [(_, decoded)] = decode(joined)
    assert isinstance(decoded, AppendRequest)
    view = decoded.entries[0].payload
    assert isinstance(view, memoryview)
    assert view.obj is joined


def several(frames: list[bytes]) -> bytes:
    return b"".join(encode_several([[frame] for frame in frames]))


@given(
    st.lists(
        st.tuples(st.integers(0, 2**31 - 1), st.sampled_from(MESSAGES)),
        min_size=1,
        max_size=SEVERAL_MAX,
    )
)
def test_messages_of_many_groups_share_a_frame(chosen: list[tuple[int, PeerMessage]]) -> None:
    messages = [(GROUP._replace(partition=number), message) for number, message in chosen]
    [data] = encode_several([encode(group, message) for group, message in messages])
    assert decode(data) == messages


def test_who_keeps_a_payload_does_not_keep_the_frame_that_it_shared() -> None:
    request = MESSAGES[5]
    data = several([frame(request), frame(request)])
    for _, decoded in decode(data):
        assert isinstance(decoded, AppendRequest)
        for taken in decoded.entries:
            assert isinstance(taken.payload, memoryview)
            assert taken.payload.readonly
            assert len(taken.payload.obj) < len(data) / 2


@pytest.mark.parametrize(
    "inner",
    [
        several([frame(MESSAGES[0])]),
        b"".join(
            encode_beats(A.node_id, B.node_id, [(GROUP, Heartbeat(T, A, B, RaftIndex(5), 7))])
        ),
        b"".join(encode_node_beat(NodeBeat(A.node_id, B.node_id, 1, (2,) * QUIESCENCE_BUCKETS))),
        b"",
        frame(MESSAGES[0])[:-1],
        frame(MESSAGES[0]) + b"x",
    ],
    ids=["several", "heartbeats", "a node's", "nothing", "truncated", "too long"],
)
def test_only_whole_messages_share_a_frame(inner: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(several([frame(MESSAGES[0]), inner]))


def test_no_frame_holds_more_messages_than_one_turn_may_take() -> None:
    most = several([frame(MESSAGES[0])] * SEVERAL_MAX)
    assert len(decode(most)) == SEVERAL_MAX
    with pytest.raises(AssertionError):
        several([frame(MESSAGES[0])] * (SEVERAL_MAX + 1))
    head_size = 4 * (SEVERAL_MAX + 1)
    more = b"\x01\x04" + head_size.to_bytes(4, "big") + most[2 + 4 :][:4] + most[2 + 4 :]
    with pytest.raises(RemoteProtocolError, match="messages"):
        decode(more + frame(MESSAGES[0]))
    with pytest.raises(RemoteProtocolError, match="messages"):
        decode(b"\x01\x04\0\0\0\0")


def test_truncated_or_damaged_frames_of_several_messages_are_refused() -> None:
    data = several([frame(message) for message in MESSAGES])
    for size in range(len(data)):
        with pytest.raises(RemoteProtocolError):
            decode(data[:size])
    with pytest.raises(RemoteProtocolError):
        decode(data + b"\0")
    random = Random(2)
    for _ in range(2_000):
        damaged = bytearray(data)
        for _ in range(random.randint(1, 3)):
            damaged[random.randrange(len(damaged))] = random.getrandbits(8)
        try:
            decode(bytes(damaged))
        except RemoteProtocolError:
            continue


def test_heartbeats_of_many_groups_share_a_frame() -> None:
    groups = [RaftGroupId(TopicId(UUID(int=n + 1)), n, 1) for n in range(100)]
    beats: list[tuple[RaftGroupId, Heartbeat | HeartbeatReply]] = []
    for number, group in enumerate(groups):
        beats.append((group, Heartbeat(T, A, B, RaftIndex(number), number)))
        beats.append((group, HeartbeatReply(T, A, B, number, RaftIndex(1), 5)))
    [data] = encode_beats(A.node_id, B.node_id, beats)
    assert decode(data) == beats


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_truncated_frame_is_refused(message: PeerMessage) -> None:
    data = frame(message)
    for size in range(len(data)):
        with pytest.raises(RemoteProtocolError):
            decode(data[:size])
    with pytest.raises(RemoteProtocolError):
        decode(data + b"\0")


def test_damaged_frames_raise_nothing_else() -> None:
    random = Random(1)
    for message in MESSAGES:
        data = frame(message)
        for _ in range(300):
            damaged = bytearray(data)
            for _ in range(random.randint(1, 3)):
                damaged[random.randrange(len(damaged))] = random.getrandbits(8)
            try:
                decode(bytes(damaged))
            except RemoteProtocolError:
                continue


@pytest.mark.parametrize(
    "entries",
    [
        (entry(3, 5),),
        (entry(5, 9), entry(8, 10)),
        (entry(5, 5),),
        (entry(5, 9, term=10),),
        (entry(5, 6, term=5), entry(6, 7, term=4)),
        (entry(5, 7, kind=EntryKind.ELECTION),),
    ],
    ids=["below prev", "overlap", "empty", "of the future", "terms fall", "wide bare entry"],
)
def test_impossible_entries_are_refused(entries: tuple[Entry, ...]) -> None:
    request = AppendRequest(T, A, B, RaftIndex(4), Term(1), RaftIndex(3), entries)
    with pytest.raises(RemoteProtocolError):
        decode(frame(request))


def test_huge_counts_build_nothing() -> None:
    data = bytearray(frame(MESSAGES[4]))
    data[-4:] = b"\xff\xff\xff\xff"
    with pytest.raises(RemoteProtocolError):
        decode(bytes(data))


@settings(max_examples=50)
@given(st.binary(max_size=200))
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(data)


# Everything below the hello that two nodes must agree on. Whoever changes it makes a new format
# between nodes, and says the change on streams of that format alone.
AGREED = {13: "137f5218077f8b87"}


def _fields(kind: type[msgspec.Struct]) -> tuple[object, ...]:
    """What an older decoder must find; a field with a default it passes over, or goes without."""
    required = [field.name for field in msgspec.structs.fields(kind) if field.required]
    return kind.__name__, kind.__struct_config__.tag, required


def test_a_change_of_form_raises_the_peer_format_version() -> None:
    structs = {
        name: value.format for name, value in vars(messages).items() if isinstance(value, Struct)
    }
    forms = {name: value for name, value in vars(messages).items() if name.startswith("FORM")}
    tags = {kind.__name__: tag for kind, tag in messages._TAGS.items()}
    kinds = {name: value for name, value in vars(peer_links).items() if name.startswith("KIND_")}
    requests = {
        name: _fields(value)
        for name, value in vars(broker_messages).items()
        if isinstance(value, type) and issubclass(value, msgspec.Struct)
    }
    said = repr([sorted(table.items()) for table in (structs, forms, tags, kinds, requests)])
    assert AGREED[peer_hello.PEER_FORMATS[1]] == sha256(said.encode()).hexdigest()[:16]
