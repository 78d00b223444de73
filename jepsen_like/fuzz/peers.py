"""Frames of the peer port: hellos, and every kind of message behind a valid one.

The fuzzer cannot be told from a peer once its hello is good, so it claims only what no peer of a
working group says: messages are spoiled, or speak of groups that do not exist, or carry terms,
epochs and positions from the edges of their types. What a lying peer could do with a plausible
message (depose a leader, cut a log) no check of bytes prevents; it is kept from the port instead.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from random import Random
from typing import Any, Final
from uuid import UUID

import msgspec
from attrs import frozen
from crc32c import crc32c

from jepsen_like.fuzz.spoil import Frame, Spot, spoiled
from raftmq.foreign import CLOCK_MS_MAX
from raftmq.metadata import broker_messages as broker
from raftmq.metadata import commands
from raftmq.raft import messages as raft
from raftmq.replication.messages import (
    QUIESCENCE_BUCKETS,
    NodeBeat,
    PeerMessage,
    Quiesce,
    RepairReply,
    RepairRequest,
    TailReply,
    TailRequest,
    Unquiesce,
    WrongReplica,
    encode,
    encode_beats,
    encode_node_beat,
    encode_several,
)
from raftmq.runtime.peer_hello import PEER_FORMATS, STREAMS, Hello
from raftmq.runtime.peer_streams import FRAME_HEADER, PART_HEADER, STORED_HEADER
from raftmq.types import NodeId, RaftGroupId, ReplicaId, StorageId, TopicId

KINDS: Final = tuple(range(1, 9))
_CALL: Final = struct.Struct(">BQ")
"""Before what brokers say to each other: 0 request, 1 reply; number (`broker_calls.py`)."""
EDGES: Final = (0, 1, 2, 1 << 31, (1 << 31) - 1, 1 << 40, (1 << 63) - 1, 1 << 62, -1)
JSON_BOMBS: Final = (
    b'{"z":' + b"[" * 1200,
    b'{"version":' + b"9" * 400 + b"}",
    b'{"cluster_id":"\\ud800"}',
    b"\xff\xfe{}",
    b"null",
    b"[]",
    b"{" * 1000,
)


@frozen(slots=True)
class Target:
    """The node that is dialled, and the peer that the fuzzer pretends to be."""

    cluster_id: str
    formation_id: str
    me: NodeId
    my_storage: str
    to: NodeId
    to_storage: str
    groups: tuple[RaftGroupId, ...]
    """Of topics that exist for the fuzzer alone."""


class PeerFrameMaker:
    """Draws what is sent on one connection to a peer port."""

    def __init__(self, target: Target, random: Random) -> None:
        self._target = target
        self._random = random

    def draw(self) -> list[Frame]:
        """A hello, and if it is good some frames after it."""
        random = self._random
        if random.random() < 0.3:
            return [self._odd_hello()]
        return [self.hello(), *(self._frame() for _ in range(random.randrange(1, 6)))]

    def hello(self) -> Frame:
        """A hello that the node takes."""
        target = self._target
        said = Hello(
            PEER_FORMATS[1],
            target.cluster_id,
            target.me,
            target.my_storage,
            self._random.choice(STREAMS),
            formation_id=target.formation_id,
        )
        return _hello_frame(msgspec.json.encode(said))

    def _odd_hello(self) -> Frame:
        random, target = self._random, self._target
        if random.random() < 0.3:
            return _hello_frame(random.choice(JSON_BOMBS))
        fields: dict[str, Any] = {
            "version": random.choice((PEER_FORMATS[0], 0, 1 << 80, -1, "4")),
            "cluster_id": random.choice((target.cluster_id, "other\n\x1b[2J", "x" * 3000)),
            "node_id": random.choice((target.me, target.to, 0, 77, 1 << 31, -5, 1 << 70)),
            "storage_id": random.choice((target.my_storage, "zz", "f" * 16, "f" * 40, "")),
            "stream": random.choice((*STREAMS, "", "none", "heartbeat\n")),
            "address": random.choice(("", "127.0.0.1:1", "no such host:0", ":", "a" * 500)),
            "formation_id": random.choice((target.formation_id, "", "\x1b[1m")),
            "formats": random.choice((None, [5, 6], [6, 5], [0, 1 << 40], [-1], "5", [1 << 70, 9])),
            "why": random.choice(("", "because\nfatal", "w" * 3000)),
            "refusal": random.choice(("", "", "go away\nfatal")),
        }
        for name in random.sample(sorted(fields), random.randrange(3)):
            del fields[name]
        return spoiled(_hello_frame(msgspec.json.encode(fields)), random)

    def _frame(self) -> Frame:
        random = self._random
        kind, content = random.choice(self._makers())()
        inner = spoiled(content, random)
        kind = random.choice((kind, kind, kind, kind, random.randrange(256)))
        checksum = crc32c(inner.data)
        if kind == 5 and random.random() < 0.8:
            head = STORED_HEADER.pack(len(inner.data), 0) + inner.data
            inner, checksum = Frame(inner.label, head), crc32c(head)
        elif kind == 6:
            part = PART_HEADER.pack(random.choice(KINDS), random.random() < 0.5) + inner.data
            inner, checksum = Frame(inner.label, part), crc32c(part)
        size = len(inner.data)
        if random.random() < 0.05:
            size = random.choice((0, size + 1, 90 << 20, 0xFFFFFFFF))
        if random.random() < 0.03:
            checksum ^= 1
        header = FRAME_HEADER.pack(size, checksum, kind)
        return Frame(f"kind {kind} {inner.label}", header + inner.data)

    def _makers(self) -> Sequence[Callable[[], tuple[int, Frame]]]:
        return (self._raft, self._raft, self._beats, self._broker, self._broker, self._commands)

    # ---- Raft ----

    def _replicas(self) -> tuple[ReplicaId, ReplicaId]:
        target, random = self._target, self._random
        me = ReplicaId(target.me, StorageId(int(target.my_storage, 16)))
        to = ReplicaId(target.to, StorageId(int(target.to_storage, 16)))
        stranger = ReplicaId(NodeId(random.choice((9, -1, 1 << 30))), StorageId(7))
        return random.choice((me, me, me, stranger)), random.choice((to, to, to, stranger))

    def _edge(self) -> Any:
        return self._random.choice(EDGES)

    def _position(self) -> Any:
        return self._random.choice(tuple(edge for edge in EDGES if edge >= 0))

    def _message(self) -> PeerMessage:
        """One message of a group, its term beyond what a working group has."""
        random = self._random
        sender, to = self._replicas()
        term: Any = random.choice((1 << 31, 1 << 40, (1 << 63) - 1, -1, -(1 << 63)))
        at, flag = self._position, random.random() < 0.5
        makers: tuple[Callable[[], PeerMessage], ...] = (
            lambda: raft.PreVoteRequest(term, sender, to, at(), at()),
            lambda: raft.PreVoteReply(term, sender, to, flag),
            lambda: raft.VoteRequest(term, sender, to, at(), at(), flag),
            lambda: raft.VoteReply(term, sender, to, flag),
            lambda: raft.AppendRequest(term, sender, to, at(), at(), at(), self._entries()),
            lambda: raft.AppendReply(term, sender, to, flag, at(), at(), at(), at(), flag, at()),
            lambda: raft.Heartbeat(term, sender, to, at(), at()),
            lambda: raft.HeartbeatReply(term, sender, to, at(), at(), at()),
            lambda: raft.InstallLogStart(term, sender, to, at(), at(), random.randbytes(40), b"{}"),
            lambda: raft.TimeoutNow(term, sender, to),
            lambda: WrongReplica(term, sender, to),
            lambda: RepairRequest(term, sender, to, at(), at()),
            lambda: RepairReply(term, sender, to, at(), (random.randbytes(80),)),
            lambda: TailRequest(term, sender, to, at()),
            lambda: TailReply(term, sender, to, at(), at(), at()),
            lambda: Quiesce(term, sender, to, at(), at()),
            lambda: Unquiesce(term, sender, to),
        )
        return random.choice(makers)()

    def _entries(self) -> tuple[raft.Entry, ...]:
        random = self._random
        return tuple(
            raft.Entry(
                self._position(),
                self._position(),
                self._position(),
                random.choice(tuple(raft.EntryKind)),
                random.randbytes(random.randrange(80)),
            )
            for _ in range(random.randrange(3))
        )

    def _group(self) -> RaftGroupId:
        random = self._random
        stranger = RaftGroupId(TopicId(UUID(int=random.getrandbits(128))), 0, 1)
        return random.choice((*self._target.groups, stranger))

    def _raft(self) -> tuple[int, Frame]:
        random = self._random
        count = random.choice((1, 1, 1, 2, 40))
        frames = [encode(self._group(), self._message()) for _ in range(count)]
        pieces = frames[0] if count == 1 else encode_several(frames)
        label = "raft message" if count == 1 else f"{count} raft messages"
        return random.choice((1, 1, 1, 5)), _with_spots(label, b"".join(map(bytes, pieces)))

    def _beats(self) -> tuple[int, Frame]:
        random, target = self._random, self._target
        if random.random() < 0.5:
            digests = tuple(random.getrandbits(64) for _ in range(QUIESCENCE_BUCKETS))
            beat = NodeBeat(target.me, target.to, self._edge(), digests)
            return 2, _with_spots("node beat", b"".join(map(bytes, encode_node_beat(beat))))
        sender, to = self._replicas()
        beats = [
            (self._group(), raft.Heartbeat(self._edge(), sender, to, self._edge(), self._edge()))
            for _ in range(random.randrange(4))
        ]
        data = b"".join(map(bytes, encode_beats(target.me, target.to, beats)))
        return 2, _with_spots("beats", data)

    # ---- brokers and the controller ----

    def _broker(self) -> tuple[int, Frame]:
        """A request of another node: call number, whether it is a reply, the message."""
        random = self._random
        kind = random.choice((3, 3, 3, 7))
        if random.random() < 0.2:
            request = broker.AdminCall(
                random.choice((b"\xff", b"\x91" * 5000, random.randbytes(30), b""))
            )
        else:
            request = odd_struct(random.choice(BROKER_REQUESTS), random)
        data = msgspec.msgpack.encode(request)
        head = _CALL.pack(random.choice((0, 0, 0, 1, 2)), random.getrandbits(16))
        return kind, Frame(type(request).__name__, random.choice((head, b"")) + data)

    def _commands(self) -> tuple[int, Frame]:
        """Metadata commands forwarded to the controller."""
        encoded = tuple(odd_command(self._target.me, self._random) for _ in range(2))
        data = msgspec.msgpack.encode(broker.ForwardCommands(encoded))
        return 3, Frame("commands", _CALL.pack(0, 1) + data)


BROKER_REQUESTS: Final = (
    broker.BarrierRequest,
    broker.AdmissionRequest,
    broker.BrokerHeartbeat,
    broker.LeaderUpdate,
    broker.MoveLeadership,
    broker.ContactRequest,
    broker.QuorumRequest,
    broker.SizesRequest,
    broker.DeliverRecords,
)
HARMFUL_COMMANDS: Final = (
    commands.DeleteTopics,
    commands.ReplaceNode,
    commands.EndReplacement,
    commands.UnregisterBroker,
    commands.FenceBroker,
    commands.AlterConfigs,
)
"""Orders that a working controller gives: with values that fit they do what they say."""


def odd_command(node_id: int, random: Random) -> bytes:
    """An encoded envelope whose command has the right shape and odd values."""
    kinds = [kind for kind in commands.ALL_COMMANDS if kind not in HARMFUL_COMMANDS]
    command = odd_struct(random.choice(kinds), random)
    if isinstance(command, commands.RegisterBroker):
        # Of a node that exists it would be believed, as that node with a new disk.
        command = msgspec.structs.replace(command, node_id=NodeId(random.choice((77, -5, 1 << 40))))
    envelope = {
        "v": random.choice((1, 1, 1, 2, 3, 1 << 40)),
        "node": random.choice((node_id, 77)),
        "incarnation": random.choice((1, CLOCK_MS_MAX, 1 << 62)),
        "sequence": random.choice(EDGES),
        "command": command,
    }
    return msgspec.json.encode(envelope)


@frozen(slots=True)
class Plausible:
    """Values of a cluster that exists: a command with one odd field among them gets far."""

    texts: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    ids: tuple[UUID, ...] = ()


NOTHING_PLAUSIBLE: Final = Plausible()


def odd_struct(kind: Any, random: Random, plausible: Plausible = NOTHING_PLAUSIBLE) -> Any:
    """A struct whose fields are of their types, with values from the edges.

    It is made without validation, as bytes from a stranger are: texts where numbers are encoded,
    numbers that fit no column.
    """
    make = partial(_of_info, random=random, plausible=plausible)
    info: Any = msgspec.inspect.type_info(kind)
    return kind(**{field.name: make(field.type, depth=0) for field in info.fields})


def _of_info(info: Any, *, random: Random, plausible: Plausible, depth: int) -> Any:
    inspect = msgspec.inspect
    make = partial(_of_info, random=random, plausible=plausible, depth=depth + 1)
    is_plausible = random.random() < 0.7
    match info:
        case inspect.IntType():
            if is_plausible and plausible.numbers:
                return random.choice(plausible.numbers)
            return random.choice((0, 1, 2, 3, -1, 100, (1 << 31) - 1, 1 << 31, (1 << 63) - 1))
        case inspect.BoolType():
            return random.random() < 0.5
        case inspect.StrType():
            if is_plausible and plausible.texts:
                return random.choice(plausible.texts)
            return random.choice(("", "zz", "fuzz", "a\nb", "f" * 16, "é" * 300, "0"))
        case inspect.BytesType():
            return random.randbytes(random.randrange(40))
        case inspect.FloatType():
            return random.choice((0.0, -1.0, 1e300))
        case inspect.NoneType():
            return None
        case inspect.UUIDType():
            if is_plausible and plausible.ids:
                return random.choice(plausible.ids)
            return UUID(int=random.getrandbits(128))
        case inspect.UnionType():
            return make(random.choice(info.types))
        case inspect.VarTupleType() | inspect.ListType():
            count = 0 if depth > 7 else random.randrange(3)
            return tuple(make(info.item_type) for _ in range(count))
        case inspect.TupleType():
            return tuple(make(item) for item in info.item_types)
        case inspect.DictType():
            pairs = ((make(info.key_type), make(info.value_type)) for _ in range(2))
            return dict(islice(pairs, random.randrange(3)))
        case inspect.EnumType():
            return random.choice(tuple(info.cls))
        case inspect.StructType():
            return info.cls(**{field.name: make(field.type) for field in info.fields})
        case inspect.CustomType() | inspect.AnyType():
            return None
    raise TypeError(f"no odd values for {info!r}")


def _hello_frame(data: bytes) -> Frame:
    return Frame("hello", struct.pack(">I", len(data)) + data, (Spot(0, 4),))


def _with_spots(label: str, data: bytes) -> Frame:
    """Every aligned number of a packed head may be spoiled, wherever it stands."""
    spots = [
        Spot(at, at + size) for size in (1, 4, 8) for at in range(0, min(len(data), 160), size)
    ]
    return Frame(label, data, tuple(spot for spot in spots if spot.end <= len(data)))
