"""What brokers and the controller say to each other outside Raft: forwarded commands, barriers,
heartbeats, admin calls.

Owns shapes and encoding only. Every reply names the controller as its sender knows it, so that a
node that asks the wrong one learns where to ask. Peers are of the same cluster and have a format in
common (the connection's hello checks that), but bytes are checked as well: a bad message ends its
stream. So a call that came after format 5 is not sent on a stream with an older one (`format_of`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, TypeAlias
from uuid import UUID

import msgspec

from raftmq.errors import ErrorCode, KafkaError, RemoteProtocolError
from raftmq.foreign import NODE_ID_MAX, PARTITION_MAX, POSITION_MAX, decode_foreign
from raftmq.promise import Promise
from raftmq.rights import Rule, RuleFilter
from raftmq.types import Buffer, NodeId, RaftIndex, TopicId

NOBODY: Final = NodeId(-1)
DELIVERY_BYTES_MAX: Final = 64 << 20
FORMAT_MAX: Final = 13
"""The newest format between nodes; `runtime/peer_hello.py` says what each brought."""

_NodeNumber: TypeAlias = Annotated[NodeId, msgspec.Meta(ge=0, le=NODE_ID_MAX)]
_MaybeNode: TypeAlias = Annotated[NodeId, msgspec.Meta(ge=-1, le=NODE_ID_MAX)]
_PartitionNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=PARTITION_MAX)]
_Version: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=POSITION_MAX)]
_Index: TypeAlias = Annotated[RaftIndex, msgspec.Meta(ge=0, le=POSITION_MAX)]
_Milliseconds: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
_Int32: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]


class ForwardCommands(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Encoded envelopes of one submitter, in the order of their sequences."""

    commands: tuple[bytes, ...]


class BarrierRequest(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Asks up to where the sender must apply to have seen all that was committed before this."""


class AdmissionRequest(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Asks to follow the metadata log as a learner (an observer).

    `is_member`: the sender is a member as far as it knows, but hears no leader: is it one still?
    """

    node_id: _NodeNumber
    storage_id: Annotated[int, msgspec.Meta(ge=0)]
    is_member: bool = False


class BrokerHeartbeat(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The sender is alive, and has applied the metadata log up to `applied_version`.

    `is_unfit`: records cannot become durable there, so others should lead. An older node does not
    say so, and counts as fit. `replicas_max`: how many partition replicas it has descriptors for;
    where it is 0, from an older node, the controller assumes its own number. `is_reading_delays`:
    what is pending in its delay partitions is not all read yet, so others should lead those.
    """

    node_id: _NodeNumber
    broker_epoch: _Version
    applied_version: _Version
    is_draining: bool = False
    is_unfit: bool = False
    replicas_max: Annotated[int, msgspec.Meta(ge=0, le=POSITION_MAX)] = 0
    is_reading_delays: bool = False


class Way(StrEnum):
    """By which way an admin call came to the node that asks for it."""

    CLIENT = "client"
    """From a principal that proved who it is, where it had to: rules say what it may do."""
    OPERATOR = "operator"
    """By the admin port, which lets it do whatever the port has pages for."""
    NODE = "node"
    """From nobody: the node needs it itself."""


class Asker(msgspec.Struct, frozen=True, array_like=True):
    """On whose behalf an admin call is made; an older node does not say."""

    way: Way
    principal: str = ""
    host: str = ""
    listener: str = ""
    client_id: str | None = None


NODE_ITSELF: Final = Asker(Way.NODE)


class AdminCall(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """A client's admin request, accepted by any broker, decided by the controller.

    `asker`: since format 13.
    """

    payload: bytes
    asker: Asker | None = None


class LeaderUpdate(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Rows of the sender's leader table (`controller/leaders.py` encodes them)."""

    rows: bytes


class MoveLeadership(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Asks the leader of a partition to hand over to a node (ElectLeaders, balancing)."""

    topic_id: TopicId
    partition: _PartitionNumber
    to: _NodeNumber


class ContactRequest(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Asks whether a node sees a majority of the metadata group; one that does answers NONE."""


class QuorumRequest(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Asks the controller how far every member of the metadata group is (`QuorumState`)."""


class SizesRequest(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Asks a broker how many bytes each partition that it leads has (`encode_sizes`); since format
    8."""


class DeliverRecords(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Asks a partition's leader to append what a delay partition delivers; answered once it is
    committed. Since format 11."""

    topic_id: TopicId
    partition: _PartitionNumber
    batch: Annotated[bytes, msgspec.Meta(max_length=DELIVERY_BYTES_MAX)]


Request: TypeAlias = (
    ForwardCommands
    | BarrierRequest
    | AdmissionRequest
    | BrokerHeartbeat
    | AdminCall
    | LeaderUpdate
    | MoveLeadership
    | ContactRequest
    | QuorumRequest
    | SizesRequest
    | DeliverRecords
)


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """Answer to any request. With NOT_CONTROLLER nothing was done, but a part of forwarded commands
    may have been taken: all are sent again under their numbers, and count once."""

    code: ErrorCode
    controller_id: _MaybeNode = NOBODY
    index: _Index = RaftIndex(0)
    is_fenced: bool = False
    payload: bytes = b""
    message: str = ""


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(Request)
_reply_decoder: Final[msgspec.msgpack.Decoder[Reply]] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """Bytes for the peer connection."""
    return _encoder.encode(message)


def decode_request(data: Buffer) -> Request:
    """Read a request.

    Raises:
        RemoteProtocolError: not one.
    """
    return decode_foreign("control message", _decoder.decode, data)


def decode_reply(data: Buffer) -> Reply:
    """Read a reply.

    Raises:
        RemoteProtocolError: not one.
    """
    return decode_foreign("control reply", _reply_decoder.decode, data)


def read_reply(promise: Promise[bytes]) -> Reply | None:
    """The reply; None when there is none, or not one that can be read."""
    if promise.error is not None:
        return None
    try:
        return decode_reply(promise.result())
    except RemoteProtocolError:
        return None


# ---- sizes ----


class PartitionSize(msgspec.Struct, frozen=True, array_like=True):
    """The bytes of a partition's log at its leader."""

    topic_id: TopicId
    partition: _PartitionNumber
    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=POSITION_MAX)]


_sizes_decoder: Final[msgspec.msgpack.Decoder[tuple[PartitionSize, ...]]] = msgspec.msgpack.Decoder(
    tuple[PartitionSize, ...]
)


def encode_sizes(sizes: tuple[PartitionSize, ...]) -> bytes:
    """The payload of the reply to a SizesRequest."""
    return _encoder.encode(sizes)


def decode_sizes(data: Buffer) -> tuple[PartitionSize, ...]:
    """Read the payload of the reply to a SizesRequest.

    Raises:
        RemoteProtocolError: not one.
    """
    return decode_foreign("sizes", _sizes_decoder.decode, data)


# ---- admin calls ----


class NewTopic(msgspec.Struct, frozen=True, kw_only=True):
    """A topic as a client asks for it; -1 means the default (KIP-464)."""

    name: str
    partitions: _Int32 = -1
    replication_factor: _Int32 = -1
    assignments: dict[_Int32, tuple[_Int32, ...]] = {}
    configs: dict[str, str | None] = {}


class CreateTopicsCall(msgspec.Struct, frozen=True, kw_only=True, tag=1):
    """CreateTopics, or an auto-creating Metadata (`is_auto`: an existing topic is no error)."""

    topics: tuple[NewTopic, ...]
    timeout_ms: _Milliseconds = 5000
    validate_only: bool = False
    is_auto: bool = False


class DeleteTopicsCall(msgspec.Struct, frozen=True, kw_only=True, tag=2):
    """DeleteTopics by name or by id; outcomes come in that order, names first."""

    names: tuple[str, ...] = ()
    topic_ids: tuple[UUID, ...] = ()
    timeout_ms: _Milliseconds = 5000


class NewPartitions(msgspec.Struct, frozen=True, kw_only=True):
    """A topic should have `count` partitions in all."""

    name: str
    count: _Int32
    assignments: tuple[tuple[_Int32, ...], ...] | None = None


class CreatePartitionsCall(msgspec.Struct, frozen=True, kw_only=True, tag=3):
    """CreatePartitions."""

    topics: tuple[NewPartitions, ...]
    timeout_ms: _Milliseconds = 5000
    validate_only: bool = False


class ConfigOperation(msgspec.Struct, frozen=True, array_like=True):
    """One change of one key: `operation` 0 set, 1 delete, 2 append, 3 subtract (KIP-339)."""

    name: str
    operation: int
    value: str | None


class ConfigResource(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of one resource: type 2 topic, 4 broker. `replaces_all`: the old AlterConfigs, which
    resets every key that it does not name."""

    resource_type: int
    resource_name: str
    operations: tuple[ConfigOperation, ...]
    replaces_all: bool = False


class AlterConfigsCall(msgspec.Struct, frozen=True, kw_only=True, tag=4):
    """AlterConfigs and IncrementalAlterConfigs."""

    resources: tuple[ConfigResource, ...]
    timeout_ms: _Milliseconds = 5000
    validate_only: bool = False


class ReplaceNodeCall(msgspec.Struct, frozen=True, kw_only=True, tag=5):
    """`raftmq node replace`: let `new_id` take the place of `old_id`, or say what that would do."""

    old_id: _Int32
    new_id: _Int32
    even_if_alive: bool = False
    dry_run: bool = False
    timeout_ms: _Milliseconds = 5000


class FeatureRequest(msgspec.Struct, frozen=True, array_like=True):
    """A level for one feature; `upgrade_type` as in Kafka: 1 upgrade, 2 safe downgrade, 3 unsafe
    downgrade."""

    name: str
    level: _Int32
    upgrade_type: _Int32 = 1


class UpdateFeaturesCall(msgspec.Struct, frozen=True, kw_only=True, tag=6):
    """UpdateFeatures: all of them or none."""

    updates: tuple[FeatureRequest, ...]
    timeout_ms: _Milliseconds = 60_000
    validate_only: bool = False


class ChangeNodesCall(msgspec.Struct, frozen=True, kw_only=True, tag=7):
    """`raftmq node add`, `drain`, `remove` and the like, or what that would do.

    `change` is add, drain, cancel-drain, remove, cordon, uncordon, maintenance or end-maintenance;
    "" changes no node. `voters`: how many voters the metadata group should have, 0 for as many as
    the cluster began with; None leaves it. Outcomes: a verdict for each node, then steps.
    """

    node_ids: tuple[_Int32, ...] = ()
    change: str = ""
    voters: _Int32 | None = None
    dry_run: bool = False
    timeout_ms: _Milliseconds = 5000


class MoveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Where a partition should go; `replicas` None cancels its move."""

    topic: str
    partition: _Int32
    replicas: tuple[_Int32, ...] | None = None


class PlanMovesCall(msgspec.Struct, frozen=True, kw_only=True, tag=8):
    """AlterPartitionReassignments: one outcome for each of the moves, in order."""

    moves: tuple[MoveRequest, ...]
    allow_factor_change: bool = True
    dry_run: bool = False
    timeout_ms: _Milliseconds = 60_000


class BalanceCall(msgspec.Struct, frozen=True, kw_only=True, tag=9):
    """`raftmq cluster balance`: plan the moves that even out the brokers, or say which.

    `onto`: only these brokers gain replicas, so that they get their share; None: any. Outcomes: a
    verdict, then one for each move.
    """

    onto: tuple[_Int32, ...] | None = None
    dry_run: bool = False
    timeout_ms: _Milliseconds = 60_000


class CreateAclsCall(msgspec.Struct, frozen=True, kw_only=True, tag=10):
    """CreateAcls: all of these rules are in force, or none; one outcome."""

    rules: tuple[Rule, ...]
    timeout_ms: _Milliseconds = 5_000


class DeleteAclsCall(msgspec.Struct, frozen=True, kw_only=True, tag=11):
    """DeleteAcls: one outcome for each of the filters, with the rules that it met."""

    filters: tuple[RuleFilter, ...]
    timeout_ms: _Milliseconds = 5_000


class UserRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A credential that a user gets, or with `is_deleted` loses; keys, never a password."""

    user: str
    mechanism: _Int32
    is_deleted: bool = False
    iterations: _Int32 = 0
    salt: bytes = b""
    stored_key: bytes = b""
    server_key: bytes = b""

    def __repr__(self) -> str:
        return f"UserRequest(user={self.user!r}, mechanism={self.mechanism})"


class AlterUsersCall(msgspec.Struct, frozen=True, kw_only=True, tag=12):
    """AlterUserScramCredentials: one outcome for each user, in order.

    `secret`: random, for a cluster that has none yet (`AlterUsers`). `is_first`: nothing is to be
    done where there ever were users; a user may have a credential for each mechanism.
    """

    users: tuple[UserRequest, ...]
    secret: bytes = b""
    is_first: bool = False
    timeout_ms: _Milliseconds = 5_000

    def __repr__(self) -> str:
        return f"AlterUsersCall(users={self.users!r})"


class ShrinkTopicCall(msgspec.Struct, frozen=True, kw_only=True, tag=13):
    """`raftmq topic shrink`: list only the first `partitions` partitions of a topic, or say what
    that would do.

    `view`: the name of the view over the others, "" for the usual one. `now`: seal them at once;
    `force`: also where groups lose what they have not read; `keep`: also where retention never ends
    them. Outcomes: a verdict, then steps, and groups that would lose something.
    """

    name: str
    partitions: _Int32
    view: str = ""
    now: bool = False
    force: bool = False
    keep: bool = False
    dry_run: bool = False
    timeout_ms: _Milliseconds = 5000


class PreferLeaderCall(msgspec.Struct, frozen=True, kw_only=True, tag=14):
    """`raftmq leader transfer`: put a node in front of a partition's replicas; one outcome."""

    topic: str
    partition: _Int32
    to: _Int32
    timeout_ms: _Milliseconds = 5000


AdminRequest: TypeAlias = (
    CreateTopicsCall
    | DeleteTopicsCall
    | CreatePartitionsCall
    | AlterConfigsCall
    | ReplaceNodeCall
    | UpdateFeaturesCall
    | ChangeNodesCall
    | PlanMovesCall
    | BalanceCall
    | CreateAclsCall
    | DeleteAclsCall
    | AlterUsersCall
    | ShrinkTopicCall
    | PreferLeaderCall
)


class MoveTold(msgspec.Struct, frozen=True, kw_only=True):
    """One move of a balance: `copied_bytes` -1 where nobody knows them; `steps` are what the group
    goes through, with its quorum at each."""

    topic: str
    partition: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    why: str
    copied_bytes: int
    steps: tuple[str, ...] = ()


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one topic or resource.

    `is_led` says whether every partition had a leader when this was answered.
    """

    name: str
    code: ErrorCode = ErrorCode.NONE
    message: str | None = None
    topic_id: TopicId | None = None
    resource_type: int = 0
    partitions: int = -1
    replication_factor: int = -1
    is_led: bool = False
    move: MoveTold | None = None
    rules: tuple[Rule, ...] = ()
    """Those that were deleted."""


Outcomes: TypeAlias = tuple[Outcome, ...]

_admin_decoder: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(AdminRequest)
_outcomes_decoder: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(Outcomes)


def format_of(call: AdminRequest) -> int:
    """The oldest format between nodes that knows this call."""
    if isinstance(call, CreateAclsCall | DeleteAclsCall | AlterUsersCall):
        return 9
    if isinstance(call, PreferLeaderCall):
        return 13
    if isinstance(call, ShrinkTopicCall):
        return 10
    if isinstance(call, ChangeNodesCall | PlanMovesCall | BalanceCall):
        return 8
    return 6 if isinstance(call, UpdateFeaturesCall) else 5


def encode_admin(call: AdminRequest) -> bytes:
    """The payload of an AdminCall."""
    return _encoder.encode(call)


def decode_admin(data: Buffer) -> AdminRequest:
    """Read the payload of an AdminCall.

    Raises:
        RemoteProtocolError: not one.
    """
    call: AdminRequest = decode_foreign("admin call", _admin_decoder.decode, data)
    return call


def encode_outcomes(outcomes: Outcomes) -> bytes:
    """The payload of the reply to an AdminCall."""
    return _encoder.encode(outcomes)


def decode_outcomes(data: Buffer) -> Outcomes:
    """Read the payload of the reply to an AdminCall.

    Raises:
        RemoteProtocolError: not one.
    """
    outcomes: Outcomes = decode_foreign("admin reply", _outcomes_decoder.decode, data)
    return outcomes


def reply_error(reply: Reply) -> KafkaError | None:
    """The reply's error as an exception, None when there is none."""
    if reply.code is ErrorCode.NONE:
        return None
    return KafkaError(reply.message, code=reply.code)
