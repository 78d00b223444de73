"""What replicas say to each other beyond Raft, and the bytes of all their messages.

The messages are plain values beside `raft/messages.py` that the Raft core never sees: which storage
a node runs, repair of damage, quiescence. They carry sender and target as every peer message does,
so that a message for another storage of the same node is told apart. None of them is a promise:
losing, repeating or delaying one costs time, never data.

A frame carries one message of one group, or small ones of many groups, or the heartbeats and
heartbeat replies of many groups between two nodes. Batches are not copied: `encode` returns a list
of buffers to be sent one after the other, `decode` returns views into the frame, which nobody may
change afterwards. The shell adds length and checksum (`runtime/peer_links.py`).

Invariants: every count and size is checked against the bytes at hand before anything is built of
them, every number against what it can mean (`raftmq/foreign.py`); whatever a peer may not send
raises `RemoteProtocolError`; nothing else is ever raised.

    frame   version u8 | form u8 | head size u32 | head | batches
    message (form 1)    tag u8 | topic id 16s | partition i32 | creation epoch i64
                        | sender: node i32, storage u64 | to: node i32, storage u64
                        | term i64 | body
    beats   (form 2)    sender node i32 | to node i32 | count u32 | count * beat
    beat    tag u8 | topic id 16s | partition i32 | creation epoch i64 | sender storage u64
            | to storage u64 | term i64 | round i64 | commit or matched end i64 | clock ms i64
    node    (form 3)    sender node i32 | to node i32 | incarnation i64 | digests of groups u64
    several (form 4)    size u32 of each frame; behind the head, in place of batches, the frames,
                        which are all of form 1
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final, TypeAlias
from uuid import UUID

from attrs import frozen

from raftmq.errors import RemoteProtocolError
from raftmq.foreign import (
    CLOCK_MS_MAX,
    NODE_ID_MAX,
    PARTITION_MAX,
    POSITION_MAX,
    TERM_MAX,
    check_bounds,
    decode_foreign,
)
from raftmq.raft.messages import (
    AppendReply,
    AppendRequest,
    Entry,
    EntryKind,
    Heartbeat,
    HeartbeatReply,
    InstallLogStart,
    Message,
    PreVoteReply,
    PreVoteRequest,
    TimeoutNow,
    VoteReply,
    VoteRequest,
)
from raftmq.types import (
    Buffer,
    NodeId,
    Offset,
    RaftGroupId,
    RaftIndex,
    ReplicaId,
    StorageId,
    Term,
    TopicId,
)

CONFUSED: Final = -1
"""In place of an incarnation: we disagree about which groups are quiescent; unquiesce those that we
share, in each bucket whose number is not 0."""
QUIESCENCE_BUCKETS: Final = 32
"""Quiescent groups are compared in so many parts."""


@frozen(slots=True)
class WrongReplica:
    """Your message named another storage of this node; `sender` is the one that runs here.

    `term` repeats the term of that message, so that a leader ignores late answers.
    """

    term: Term
    sender: ReplicaId
    to: ReplicaId


@frozen(slots=True)
class RepairRequest:
    """Send me the batches in `[start, end)`; my copy of them is damaged."""

    term: Term
    sender: ReplicaId
    to: ReplicaId
    start: Offset
    end: Offset


@frozen(slots=True)
class RepairReply:
    """Whole, verified batches from `start` on; they may end before the asked range does.

    Where the sender dropped the beginning of the range, it sends its encoded log start instead.
    """

    term: Term
    sender: ReplicaId
    to: ReplicaId
    start: Offset
    batches: tuple[Buffer, ...] = ()
    log_start: Buffer = b""


@frozen(slots=True)
class TailRequest:
    """Do you hold the log up to `floor`? I cut a torn tail that ended there (see `recovery.py`)."""

    term: Term
    sender: ReplicaId
    to: ReplicaId
    floor: RaftIndex


@frozen(slots=True)
class TailReply:
    """My log ends at `log_end`, with an entry of `last_term`; repeats the `floor` asked for."""

    term: Term
    sender: ReplicaId
    to: ReplicaId
    floor: RaftIndex
    log_end: RaftIndex
    last_term: Term


@frozen(slots=True)
class Quiesce:
    """The group is idle and all members have everything up to `log_end`: quiesce
    (see `quiescence.py`).

    Heartbeats of rounds up to `round` were sent before.
    """

    term: Term
    sender: ReplicaId
    to: ReplicaId
    log_end: RaftIndex
    round: int


@frozen(slots=True)
class Unquiesce:
    """I am not quiescent any more."""

    term: Term
    sender: ReplicaId
    to: ReplicaId


@frozen(slots=True)
class NodeBeat:
    """This process is alive.

    `quiescent` holds a digest of 64 bits, for each of `QUIESCENCE_BUCKETS`, of the quiescent groups
    that the sender leads and `to` is in: so two nodes that disagree know in which buckets.
    """

    sender: NodeId
    to: NodeId
    incarnation: int
    quiescent: tuple[int, ...]


EngineMessage: TypeAlias = (
    WrongReplica | RepairRequest | RepairReply | TailRequest | TailReply | Quiesce | Unquiesce
)
PeerMessage: TypeAlias = Message | EngineMessage


FORMAT_VERSION: Final = 1
FORM_MESSAGE: Final = 1
FORM_BEATS: Final = 2
FORM_NODE_BEAT: Final = 3
FORM_SEVERAL: Final = 4

SEVERAL_MAX: Final = 64
"""Messages that may share a frame: the receiver takes all in one turn of its loop, and each may
make its group elect a leader, which takes part of a millisecond."""

_PREFIX: Final = struct.Struct(">BBI")
_HEAD: Final = struct.Struct(">B28siQiQq")
_BEATS: Final = struct.Struct(">iiI")
_BEAT: Final = struct.Struct(">B28sQQqqqq")
_GROUP: Final = struct.Struct(">16siq")
_VOTE: Final = struct.Struct(">qq?")
_GRANTED: Final = struct.Struct(">?")
_APPEND: Final = struct.Struct(">qqqI")
_ENTRY: Final = struct.Struct(">qqqBI")  # start, end, term, kind, payload size
_APPEND_REPLY: Final = struct.Struct(">??qqqqq")
_BEAT_REPLY: Final = struct.Struct(">qqq")
_INSTALL: Final = struct.Struct(">qqII")
_RANGE: Final = struct.Struct(">qq")
_BATCHES: Final = struct.Struct(">qII")
_SIZE: Final = struct.Struct(">I")
_INDEX: Final = struct.Struct(">q")
_NODE_BEAT: Final = struct.Struct(f">iiq{QUIESCENCE_BUCKETS}Q")
_TAIL: Final = struct.Struct(">qqq")  # floor, log end, last term

_TAGS: Final[dict[type, int]] = {
    PreVoteRequest: 1,
    PreVoteReply: 2,
    VoteRequest: 3,
    VoteReply: 4,
    AppendRequest: 5,
    AppendReply: 6,
    Heartbeat: 7,
    HeartbeatReply: 8,
    InstallLogStart: 9,
    TimeoutNow: 10,
    WrongReplica: 11,
    RepairRequest: 12,
    RepairReply: 13,
    TailRequest: 14,
    TailReply: 15,
    Quiesce: 16,
    Unquiesce: 17,
}
_KNOWN_GROUPS_MAX: Final = 1 << 16
_known_groups: dict[bytes, RaftGroupId] = {}
_KINDS: Final = {int(kind): kind for kind in EntryKind}


def encode(group: RaftGroupId, message: PeerMessage) -> list[Buffer]:
    """Frame one message; the buffers are to be sent in order and not changed until then.

    The batches of a stored chunk are not among them; its span is sent after them.
    """
    body, batches = _body(message)
    sender, to = message.sender, message.to
    head = _HEAD.pack(
        _TAGS[type(message)],
        _encoded_group(group),
        sender.node_id,
        sender.storage_id,
        to.node_id,
        to.storage_id,
        message.term,
    )
    return [
        b"".join((_PREFIX.pack(FORMAT_VERSION, FORM_MESSAGE, len(head) + len(body)), head, body)),
        *batches,
    ]


def encode_beats(
    sender: NodeId, to: NodeId, beats: Sequence[tuple[RaftGroupId, Heartbeat | HeartbeatReply]]
) -> list[Buffer]:
    """Frame the heartbeats and heartbeat replies of many groups between two nodes."""
    size = _BEATS.size + len(beats) * _BEAT.size
    frame = bytearray(_PREFIX.size + size)
    _PREFIX.pack_into(frame, 0, FORMAT_VERSION, FORM_BEATS, size)
    _BEATS.pack_into(frame, _PREFIX.size, sender, to, len(beats))
    position = _PREFIX.size + _BEATS.size
    for group, beat in beats:
        if isinstance(beat, Heartbeat):
            tag, end, clock_ms = 7, beat.commit_end, 0
        else:
            tag, end, clock_ms = 8, beat.matched_end, beat.clock_ms
        _BEAT.pack_into(
            frame,
            position,
            tag,
            _encoded_group(group),
            beat.sender.storage_id,
            beat.to.storage_id,
            beat.term,
            beat.round,
            end,
            clock_ms,
        )
        position += _BEAT.size
    return [frame]


def encode_several(frames: Sequence[Sequence[Buffer]]) -> list[Buffer]:
    """Put frames of `encode` into one. They are copied, so they should be small."""
    assert len(frames) <= SEVERAL_MAX, "more messages than a receiver takes at once"
    sizes = [_SIZE.pack(sum(map(len, frame))) for frame in frames]
    head = _PREFIX.pack(FORMAT_VERSION, FORM_SEVERAL, len(sizes) * _SIZE.size)
    return [b"".join((head, *sizes, *chain.from_iterable(frames)))]


def encode_node_beat(beat: NodeBeat) -> list[Buffer]:
    """Frame a node's sign of life."""
    body = _NODE_BEAT.pack(beat.sender, beat.to, beat.incarnation, *beat.quiescent)
    return [_PREFIX.pack(FORMAT_VERSION, FORM_NODE_BEAT, len(body)) + body]


def decode(frame: Buffer) -> list[tuple[RaftGroupId, PeerMessage]] | NodeBeat:
    """Read a frame; payloads are views into it, or small copies.

    Raises:
        RemoteProtocolError: not a frame of this format, or impossible values in it.
    """
    return decode_foreign("peer message", _decode, frame)


def _decode(frame: Buffer) -> list[tuple[RaftGroupId, PeerMessage]] | NodeBeat:
    form, head, rest = _open(memoryview(frame))
    if form == FORM_MESSAGE:
        return [_decode_message(head, rest)]
    if form == FORM_BEATS:
        return _decode_beats(head, rest)
    if form == FORM_SEVERAL:
        return _decode_several(head, rest)
    if form == FORM_NODE_BEAT and not len(rest):
        sender, to, incarnation, *quiescent = _NODE_BEAT.unpack(head)
        _check_nodes(sender, to)
        if incarnation != CONFUSED:
            check_bounds("incarnation", incarnation, POSITION_MAX)
        return NodeBeat(NodeId(sender), NodeId(to), incarnation, tuple(quiescent))
    raise RemoteProtocolError(f"unknown form {form} of a peer message")


def _open(frame: memoryview) -> tuple[int, memoryview, memoryview]:
    """The form, the head, and the bytes behind it."""
    version, form, head_size = _PREFIX.unpack_from(frame, 0)
    if version != FORMAT_VERSION:
        raise RemoteProtocolError(f"peer message format {version}, known is {FORMAT_VERSION}")
    if head_size > len(frame) - _PREFIX.size:
        raise RemoteProtocolError("peer message head is longer than its frame")
    head_end = _PREFIX.size + head_size
    return form, frame[_PREFIX.size : head_end], frame[head_end:]


def _body(message: PeerMessage) -> tuple[bytes, tuple[Buffer, ...]]:
    """The fields of one kind of message, and the batches that follow the head."""
    match message:
        case AppendRequest():
            return _append_body(message)
        case AppendReply():
            body = _APPEND_REPLY.pack(
                message.accepted,
                message.is_promise,
                message.flushed_end,
                message.refused_prev_end,
                message.hint_end,
                message.hint_term,
                message.clock_ms,
            )
        case Heartbeat():
            body = _RANGE.pack(message.commit_end, message.round)
        case HeartbeatReply():
            body = _BEAT_REPLY.pack(message.round, message.matched_end, message.clock_ms)
        case PreVoteRequest():
            body = _VOTE.pack(message.last_term, message.log_end, False)
        case VoteRequest():
            body = _VOTE.pack(message.last_term, message.log_end, message.is_transfer)
        case PreVoteReply() | VoteReply():
            body = _GRANTED.pack(message.granted)
        case InstallLogStart():
            sizes = len(message.configuration), len(message.payload)
            fixed = _INSTALL.pack(message.log_start, message.previous_term, *sizes)
            body = b"".join((fixed, message.configuration, message.payload))
        case TimeoutNow() | WrongReplica() | Unquiesce():
            body = b""
        case RepairRequest():
            body = _RANGE.pack(message.start, message.end)
        case RepairReply():
            log_start = message.log_start
            fixed = _BATCHES.pack(message.start, len(message.batches), len(log_start))
            pieces = [fixed, *(_SIZE.pack(len(batch)) for batch in message.batches), log_start]
            return b"".join(pieces), message.batches
        case TailRequest():
            body = _INDEX.pack(message.floor)
        case TailReply():
            body = _TAIL.pack(message.floor, message.log_end, message.last_term)
        case Quiesce():
            body = _RANGE.pack(message.log_end, message.round)
    return body, ()


def _append_body(message: AppendRequest) -> tuple[bytes, tuple[Buffer, ...]]:
    entries = message.entries
    if message.chunk is not None and message.chunk.span is not None:
        sizes: Sequence[int] = message.chunk.sizes
    else:
        sizes = [len(entry.payload) for entry in entries]
    pieces = [
        _APPEND.pack(message.prev_end, message.prev_term, message.commit_end, len(entries)),
    ]
    pieces += [
        _ENTRY.pack(entry.start, entry.end, entry.term, entry.kind, size)
        for entry, size in zip(entries, sizes, strict=True)
    ]
    return b"".join(pieces), tuple(entry.payload for entry in entries if len(entry.payload))


def _decode_message(head: memoryview, rest: memoryview) -> tuple[RaftGroupId, PeerMessage]:
    tag, group_bytes, node, storage, to_node, to_storage, term = _HEAD.unpack_from(head, 0)
    if node < 0 or to_node < 0 or not 0 <= term <= TERM_MAX:
        _check_nodes(node, to_node)
        _check_terms(term)
    group = _known_groups.get(group_bytes) or _group(group_bytes)
    sender = ReplicaId(NodeId(node), StorageId(storage))
    to = ReplicaId(NodeId(to_node), StorageId(to_storage))
    reader = _READERS.get(tag)
    if reader is None:
        raise RemoteProtocolError(f"unknown peer message {tag}")
    message, used = reader(term, sender, to, head[_HEAD.size :], rest)
    if used != len(rest):
        raise RemoteProtocolError("bytes after a peer message")
    return group, message


def _decode_beats(head: memoryview, rest: memoryview) -> list[tuple[RaftGroupId, PeerMessage]]:
    sender_node, to_node, count = _BEATS.unpack_from(head, 0)
    if len(rest) or count * _BEAT.size != len(head) - _BEATS.size:
        raise RemoteProtocolError("heartbeats do not fill their frame")
    _check_nodes(sender_node, to_node)
    sender_node, to_node = NodeId(sender_node), NodeId(to_node)
    beats: list[tuple[RaftGroupId, PeerMessage]] = []
    for fields in _BEAT.iter_unpack(head[_BEATS.size :]):
        tag, group_bytes, storage, to_storage, term, number, end, clock = fields
        if not (0 <= term <= TERM_MAX and 0 <= number <= POSITION_MAX and 0 <= end <= POSITION_MAX):
            _check_terms(term)
            _check_position(number, end)
        if not 0 <= clock <= CLOCK_MS_MAX:
            check_bounds("clock", clock, CLOCK_MS_MAX)
        group = _known_groups.get(group_bytes) or _group(group_bytes)
        sender = ReplicaId(sender_node, storage)
        to = ReplicaId(to_node, to_storage)
        if tag == 7:
            beats.append((group, Heartbeat(term, sender, to, end, number)))
        elif tag == 8:
            beats.append((group, HeartbeatReply(term, sender, to, number, end, clock)))
        else:
            raise RemoteProtocolError(f"message {tag} among heartbeats")
    return beats


def _decode_several(head: memoryview, rest: memoryview) -> list[tuple[RaftGroupId, PeerMessage]]:
    if not 0 < len(head) <= SEVERAL_MAX * _SIZE.size:
        raise RemoteProtocolError(f"a frame with sizes of messages in {len(head)} bytes")
    messages: list[tuple[RaftGroupId, PeerMessage]] = []
    position = 0
    for (size,) in _SIZE.iter_unpack(head):
        form, message_head, payload = _open(_take(rest, position, size))
        if form != FORM_MESSAGE:
            raise RemoteProtocolError(f"form {form} among several messages")
        if len(payload):
            payload = memoryview(bytes(payload))  # a kept payload must not keep the whole frame
        messages.append(_decode_message(message_head, payload))
        position += size
    if position != len(rest):
        raise RemoteProtocolError("bytes after the last of several messages")
    return messages


def _encoded_group(group: RaftGroupId) -> bytes:
    return _GROUP.pack(group.topic_id.bytes, group.partition, group.creation_epoch)


def _group(encoded: bytes) -> RaftGroupId:
    """Decode the name of a group, and remember it: heartbeats repeat it again and again."""
    topic_id, partition, epoch = _GROUP.unpack(encoded)
    check_bounds("partition", partition, PARTITION_MAX)
    check_bounds("creation epoch", epoch, POSITION_MAX)
    group = RaftGroupId(TopicId(UUID(bytes=topic_id)), partition, epoch)
    if len(_known_groups) >= _KNOWN_GROUPS_MAX:
        _known_groups.clear()
    _known_groups[encoded] = group
    return group


def forget_group(group: RaftGroupId) -> None:
    """A group ended: its name need not be remembered."""
    _known_groups.pop(_encoded_group(group), None)


def _check_nodes(*node_ids: int) -> None:
    for node_id in node_ids:
        check_bounds("node", node_id, NODE_ID_MAX)


def _check_terms(*terms: int) -> None:
    for term in terms:
        if not 0 <= term <= TERM_MAX:
            check_bounds("term", term, TERM_MAX)


def _check_position(*values: int) -> None:
    for value in values:
        if not 0 <= value <= POSITION_MAX:
            check_bounds("position", value, POSITION_MAX)


def _take(rest: memoryview, position: int, size: int) -> memoryview:
    if size > len(rest) - position:
        raise RemoteProtocolError("payload is longer than its frame")
    return rest[position : position + size]


def _read_append(
    term: Term, sender: ReplicaId, to: ReplicaId, body: memoryview, rest: memoryview
) -> tuple[PeerMessage, int]:
    prev_end, prev_term, commit_end, count = _APPEND.unpack_from(body, 0)
    _check_position(prev_end, commit_end)
    _check_terms(prev_term)
    if count * _ENTRY.size != len(body) - _APPEND.size:
        raise RemoteProtocolError("entries do not fill their head")
    entries = []
    position, end, entry_term = 0, prev_end, prev_term
    for start, entry_end, of_term, kind, size in _ENTRY.iter_unpack(body[_APPEND.size :]):
        payload = _take(rest, position, size)
        position += size
        if start < end or entry_end <= start or of_term < entry_term or of_term > term:
            raise RemoteProtocolError(f"entry [{start}, {entry_end}) of {of_term} out of order")
        known = _KINDS.get(kind)
        if known is None:
            raise RemoteProtocolError(f"unknown kind of entry {kind}")
        if known is not EntryKind.BATCH and entry_end != start + 1:
            raise RemoteProtocolError("a bare entry takes one position")
        entries.append(Entry(start, entry_end, of_term, known, payload))
        end, entry_term = entry_end, of_term
    _check_position(end)
    if prev_term > term:
        raise RemoteProtocolError(f"an entry of term {prev_term} before those of term {term}")
    request = AppendRequest(term, sender, to, prev_end, prev_term, commit_end, tuple(entries))
    return request, position


def _read_append_reply(
    term: Term, sender: ReplicaId, to: ReplicaId, body: memoryview, _rest: memoryview
) -> tuple[PeerMessage, int]:
    accepted, is_promise, *ends, clock = _APPEND_REPLY.unpack(body)
    flushed_end, refused, hint_end, hint_term = ends
    _check_position(flushed_end, refused, hint_end)
    _check_terms(hint_term)
    if not 0 <= clock <= CLOCK_MS_MAX:
        check_bounds("clock", clock, CLOCK_MS_MAX)
    reply = AppendReply(
        term, sender, to, accepted, flushed_end, refused, hint_end, hint_term, is_promise, clock
    )
    return reply, 0


def _read_vote_request(tag: int) -> Callable[..., tuple[PeerMessage, int]]:
    def read(
        term: Term, sender: ReplicaId, to: ReplicaId, body: memoryview, _rest: memoryview
    ) -> tuple[PeerMessage, int]:
        last_term, log_end, is_transfer = _VOTE.unpack(body)
        _check_position(log_end)
        _check_terms(last_term)
        if last_term > term:
            raise RemoteProtocolError(f"a log of term {last_term} asks for votes in term {term}")
        if tag == _TAGS[PreVoteRequest]:
            return PreVoteRequest(term, sender, to, last_term, log_end), 0
        return VoteRequest(term, sender, to, last_term, log_end, is_transfer), 0

    return read


def _read_vote_reply(kind: type[PreVoteReply | VoteReply]) -> Callable[..., Any]:
    def read(
        term: Term, sender: ReplicaId, to: ReplicaId, body: memoryview, _rest: memoryview
    ) -> tuple[PeerMessage, int]:
        (granted,) = _GRANTED.unpack(body)
        return kind(term, sender, to, granted), 0

    return read


def _read_heartbeat(
    term: Term, sender: ReplicaId, to: ReplicaId, body: memoryview, _rest: memoryview
) -> tuple[PeerMessage, int]:
    commit_end, round_number = _RANGE.unpack(body)
    _check_position(commit_end, round_number)
    return Heartbeat(term, sender, to, commit_end, round_number), 0


def _read_heartbeat_reply(
    term: Term, sender: ReplicaId, to: ReplicaId, body: memoryview, _rest: memoryview
) -> tuple[PeerMessage, int]:
    round_number, matched_end, clock = _BEAT_REPLY.unpack(body)
    _check_position(round_number, matched_end)
    check_bounds("clock", clock, CLOCK_MS_MAX)
    return HeartbeatReply(term, sender, to, round_number, matched_end, clock), 0


def _read_install(
    term: Term, sender: ReplicaId, to: ReplicaId, body: memoryview, _rest: memoryview
) -> tuple[PeerMessage, int]:
    log_start, previous_term, configuration_size, size = _INSTALL.unpack_from(body, 0)
    _check_position(log_start)
    _check_terms(previous_term)
    if previous_term > term:
        raise RemoteProtocolError(f"a log start of term {previous_term} in term {term}")
    rest = body[_INSTALL.size :]
    if len(rest) != configuration_size + size:
        raise RemoteProtocolError("log start does not fill its message")
    configuration = bytes(rest[:configuration_size])
    payload = rest[configuration_size:]
    install = InstallLogStart(term, sender, to, log_start, previous_term, payload, configuration)
    return install, 0


def _read_empty(kind: type[TimeoutNow | WrongReplica | Unquiesce]) -> Callable[..., Any]:
    def read(
        term: Term, sender: ReplicaId, to: ReplicaId, body: memoryview, _rest: memoryview
    ) -> tuple[PeerMessage, int]:
        if len(body):
            raise RemoteProtocolError("bytes in an empty message")
        return kind(term, sender, to), 0

    return read


def _read_quiesce(
    term: Term, sender: ReplicaId, to: ReplicaId, body: memoryview, _rest: memoryview
) -> tuple[PeerMessage, int]:
    log_end, round_number = _RANGE.unpack(body)
    _check_position(log_end, round_number)
    return Quiesce(term, sender, to, RaftIndex(log_end), round_number), 0


def _read_repair_request(
    term: Term, sender: ReplicaId, to: ReplicaId, body: memoryview, _rest: memoryview
) -> tuple[PeerMessage, int]:
    start, end = _RANGE.unpack(body)
    _check_position(start, end, end - start)
    return RepairRequest(term, sender, to, Offset(start), Offset(end)), 0


def _read_repair_reply(
    term: Term, sender: ReplicaId, to: ReplicaId, body: memoryview, rest: memoryview
) -> tuple[PeerMessage, int]:
    start, count, log_start_size = _BATCHES.unpack_from(body, 0)
    _check_position(start)
    sizes_end = _BATCHES.size + count * _SIZE.size
    if sizes_end + log_start_size != len(body):
        raise RemoteProtocolError("batch sizes do not fill their head")
    batches = []
    position = 0
    for (size,) in _SIZE.iter_unpack(body[_BATCHES.size : sizes_end]):
        batches.append(_take(rest, position, size))
        position += size
    return RepairReply(term, sender, to, Offset(start), tuple(batches), body[sizes_end:]), position


def _read_tail(kind: type[TailRequest | TailReply]) -> Callable[..., Any]:
    def read(
        term: Term, sender: ReplicaId, to: ReplicaId, body: memoryview, _rest: memoryview
    ) -> tuple[PeerMessage, int]:
        if kind is TailRequest:
            (floor,) = _INDEX.unpack(body)
            _check_position(floor)
            return TailRequest(term, sender, to, RaftIndex(floor)), 0
        floor, log_end, last_term = _TAIL.unpack(body)
        _check_position(floor, log_end)
        _check_terms(last_term)
        tail = RaftIndex(floor), RaftIndex(log_end), Term(last_term)
        return TailReply(term, sender, to, *tail), 0

    return read


_READERS: Final[dict[int, Callable[..., tuple[PeerMessage, int]]]] = {
    1: _read_vote_request(1),
    2: _read_vote_reply(PreVoteReply),
    3: _read_vote_request(3),
    4: _read_vote_reply(VoteReply),
    5: _read_append,
    6: _read_append_reply,
    7: _read_heartbeat,
    8: _read_heartbeat_reply,
    9: _read_install,
    10: _read_empty(TimeoutNow),
    11: _read_empty(WrongReplica),
    12: _read_repair_request,
    13: _read_repair_reply,
    14: _read_tail(TailRequest),
    15: _read_tail(TailReply),
    16: _read_quiesce,
    17: _read_empty(Unquiesce),
}
