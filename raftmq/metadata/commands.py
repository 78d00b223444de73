"""Commands of the metadata state machine: typed, versioned, readable by people.

Owns the shape of every command and of its result, and their encoding: a record of the metadata log
is one JSON object, so that an operator can read `__cluster_metadata` with any Kafka client. Never
decides anything: what a command does is the matter of `apply.py`, `apply_groups.py` and
`apply_transactions.py`.

Versions: an envelope says the least version that can express its command: that of its kind, or of
the newest field it sets (`FIRST_VERSIONS`, `LATER_FIELDS`). Versions are levels of `raftmq.level`
(`features.py`): one may be written once the cluster's level has reached it, so every node reads it.

Invariants: an envelope names its submitter as (node, incarnation, sequence), which rises with each
command of a submitter; a command of a kind, version or field that this code does not know is
refused by name, so that an old node stops instead of drifting away from the others. Every command
of a consumer group but ClaimGroup names the coordinator epoch under which it was made, and offset
commands name generation and member too; all are compared *at apply*, so a coordinator that was
replaced, or a member of an older generation, changes nothing however late its command arrives.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, Union
from uuid import UUID

import msgspec

from raftmq.config import PLAINTEXT
from raftmq.errors import AheadError, RaftmqError
from raftmq.foreign import NODE_ID_MAX, PARTITION_MAX, POSITION_MAX, TERM_MAX
from raftmq.metadata.credentials import USERS_MAX, ScramDeletion, ScramUpsertion, Secret
from raftmq.rights import Rule
from raftmq.types import Buffer, NodeId, StorageId, TopicId


class UnknownCommandError(RaftmqError):
    """A record of the metadata log that this code cannot read; the node must stop."""


class NewerCommandError(UnknownCommandError, AheadError):
    """One that a newer version of this code can read."""


class Command(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """Base of all commands; the JSON field `type` holds the class's name."""


NO_TOPIC_ID: Final = TopicId(UUID(int=0))
NodeNumber: TypeAlias = Annotated[NodeId, msgspec.Meta(ge=0, le=NODE_ID_MAX)]
PartitionNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=PARTITION_MAX)]
_Position: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=POSITION_MAX)]
_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=-POSITION_MAX, le=POSITION_MAX)]
ProducerNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)]
ProducerEpoch: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 15) - 1)]
Protocol: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2)]
"""Of a transaction: 1 is KIP-98's, 2 that of KIP-890, in which each end raises the epoch."""


CONDITION_LENGTH_MAX: Final = 4_096
"""Characters of a view's condition."""
RULES_PER_COMMAND_MAX: Final = 1_000
RuleRows: TypeAlias = Annotated[tuple[Rule, ...], msgspec.Meta(max_length=RULES_PER_COMMAND_MAX)]


class Origin(StrEnum):
    """Who wants a move of replicas."""

    NONE = ""
    REPAIR = "repair"
    DRAIN = "drain"
    REPLACE = "replace"
    OPERATOR = "operator"
    BALANCE = "balance"


class PartitionState(StrEnum):
    """What a topic wants of one of its numbers.

    Only `active` ones are listed. A `closing` one still takes records of clients that have not
    noticed; `sealing` is one whose seal is ordered, `sealed` one whose seal is committed; of one
    that is `gone` there is nothing but where a next one of its number begins.
    """

    ACTIVE = "active"
    CLOSING = "closing"
    SEALING = "sealing"
    SEALED = "sealed"
    GONE = "gone"


class NodeState(StrEnum):
    """What the cluster wants of a node; its own restarts do not change it.

    `new` has registered and takes no data until an operator adds it; `cordoned` keeps what it has
    and gets nothing more; from `draining` everything goes; in `maintenance` a node leads nothing
    and gets nothing more, for a while.
    """

    ACTIVE = "active"
    NEW = "new"
    CORDONED = "cordoned"
    DRAINING = "draining"
    MAINTENANCE = "maintenance"


class Endpoint(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a broker listens: `name` is peer, admin, or that of a client listener."""

    name: str
    host: str
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]


def client_endpoint(listener: str) -> str:
    """The name of the endpoint that is a client listener. That of a node with one port for clients
    is what it was before there were others."""
    return "client" if listener == PLAINTEXT else f"client.{listener}"


# ---- brokers ----


class RegisterBroker(Command, frozen=True, kw_only=True):
    """A broker's process has started: it gets a broker epoch and stays fenced until it is current.

    `storage_id` is hexadecimal, since JSON readers round 64-bit numbers. `cluster_id` is what this
    node calls the cluster; the first registration names it. `recoveries` above what is known: the
    end of this log was lost, so whatever it had given away must not be given away again.
    `takes_no_data`: this node is none of those that formed the cluster, so at its first
    registration it is new.
    """

    node_id: NodeNumber
    storage_id: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{1,16}$")]
    cluster_id: str
    rack: str | None = None
    endpoints: tuple[Endpoint, ...] = ()
    features: tuple[str, ...] = ()
    recoveries: _Position = 0
    takes_no_data: bool = False

    @property
    def storage(self) -> StorageId:
        """The storage id as a number."""
        return StorageId(int(self.storage_id, 16))


class FenceBroker(Command, frozen=True, kw_only=True):
    """The controller no longer hears this broker (or it leaves): it is out of Metadata."""

    node_id: NodeNumber
    broker_epoch: _Number


class UnfenceBroker(Command, frozen=True, kw_only=True):
    """The broker is live and has applied its own registration."""

    node_id: NodeNumber
    broker_epoch: _Number


class UnregisterBroker(Command, frozen=True, kw_only=True):
    """An operator removed a broker for good; refused while it holds replicas, or (since version 4
    of the cluster's level) lives. Its storage is refused from then on."""

    node_id: NodeId


class ReplaceNode(Command, frozen=True, kw_only=True):
    """`new_id` takes the place of `old_id` in the metadata group and in every partition, for good.

    The state alone shows what is left to do, so the next controller goes on with it.
    """

    old_id: NodeNumber
    new_id: NodeNumber


class EndReplacement(Command, frozen=True, kw_only=True):
    """Nothing is left of a replaced node: forget its registration."""

    old_id: NodeNumber


class NodeChange(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The state that a node is to have."""

    node_id: NodeNumber
    state: NodeState


class ChangeNodes(Command, frozen=True, kw_only=True):
    """States of nodes, and how many voters the metadata group should have: all of it or nothing.

    `voters` None: as it is; 0: as many as the cluster began with.
    """

    changes: tuple[NodeChange, ...] = ()
    voters: Annotated[int, msgspec.Meta(ge=0, le=NODE_ID_MAX)] | None = None


# ---- topics ----


class TopicCreation(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One topic with its placement, decided by the controller: preferred leader first."""

    name: str
    topic_id: TopicId
    replicas: tuple[tuple[NodeNumber, ...], ...]
    configs: dict[str, str] = {}


class ViewCreation(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A view with a condition: those records of the topic of the id `source` that meet it.

    Whether the condition can be read is the controller's to say: its words are stored as they are.
    """

    name: str
    topic_id: TopicId
    source: TopicId
    condition: Annotated[str, msgspec.Meta(min_length=1, max_length=CONDITION_LENGTH_MAX)]


class CreateTopics(Command, frozen=True, kw_only=True):
    """Create topics, then views with conditions; each succeeds or fails by itself."""

    topics: tuple[TopicCreation, ...]
    views: tuple[ViewCreation, ...] = ()


class DeleteTopics(Command, frozen=True, kw_only=True):
    """Delete topics by id; the data of every replica goes, by this order alone, and all views over
    it go along. `views`: those with conditions that go by themselves, by id."""

    topic_ids: tuple[TopicId, ...]
    views: tuple[TopicId, ...] = ()


class PartitionAddition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """New partitions of a topic, numbered from `first_partition`."""

    topic_id: TopicId
    first_partition: PartitionNumber
    replicas: tuple[tuple[NodeNumber, ...], ...]


class CreatePartitions(Command, frozen=True, kw_only=True):
    """Add partitions to topics."""

    additions: tuple[PartitionAddition, ...]


class ReassignPartition(Command, frozen=True, kw_only=True):
    """Order a partition onto these brokers, preferred first; its own Raft group makes it so.

    It is rejected if the partition is not the one of that `creation_epoch` (-1: whichever), or if
    its replicas are not `expected`, those that the order was computed from (none: whichever). With
    `expected`, a move of an operator or of the balance is what is planned, or is rejected as well.
    """

    topic_id: TopicId
    partition: PartitionNumber
    replicas: tuple[NodeNumber, ...]
    creation_epoch: _Number = -1
    expected: tuple[NodeNumber, ...] = ()
    origin: Origin = Origin.NONE


class ShrinkTopic(Command, frozen=True, kw_only=True):
    """Only the first `partitions` partitions of a topic are listed from now on; the others close.

    Rejected if other than `listed` are listed by now. What closes stays readable by its number, and
    under `view`, a topic of the id `view_id` that nobody writes to: one more, or the topic's own.
    `alias`: an id by which clients may name the topic as well, zero for none. `is_sealed_now`: what
    closes is to be sealed at once.
    """

    topic_id: TopicId
    partitions: PartitionNumber
    listed: PartitionNumber
    view: str
    view_id: TopicId
    alias: TopicId = NO_TOPIC_ID
    is_sealed_now: bool = False


class SealPartitions(Command, frozen=True, kw_only=True):
    """Order closing partitions, by number and creation epoch, to take no more records; all of them
    or none.

    A leader writes the seal into its partition's log; until it is committed there nothing is final.
    """

    topic_id: TopicId
    partitions: tuple[tuple[PartitionNumber, _Number], ...]


KNOWN_BYTES_MAX: Final = 32 << 10
"""So much is kept of what the log of a partition that is gone knew of producers: some 220 of them
with five batches each. The last ones to write are kept."""


class SealReport(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The fact about one sealed partition, as its leader states it.

    `seal_version` names the order that was obeyed: the offset of its SealPartitions. `end_offset`
    is final while that order stands; `leader_epoch` is the newest that the partition had.
    """

    topic_id: TopicId
    partition: PartitionNumber
    creation_epoch: _Number
    seal_version: _Number
    end_offset: _Position
    leader_epoch: Annotated[int, msgspec.Meta(ge=0, le=TERM_MAX)]


class ReportSealed(Command, frozen=True, kw_only=True):
    """Leaders state which seals are committed; what was ordered otherwise since is passed over."""

    reports: tuple[SealReport, ...]


class ReportGone(Command, frozen=True, kw_only=True):
    """Nothing is left in sealed partitions: their replicas go, and offsets that groups have there.

    What was ordered otherwise since is passed over. `producers` has, report by report, what the log
    knew of idempotent producers where it ended, encoded; nothing where that is not told.
    """

    reports: tuple[SealReport, ...]
    producers: tuple[Annotated[bytes, msgspec.Meta(max_length=KNOWN_BYTES_MAX)], ...] = ()


class PlannedMove(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A partition that is to move onto these brokers later; without any its move is cancelled.

    `expected` as in ReassignPartition.
    """

    topic_id: TopicId
    partition: PartitionNumber
    creation_epoch: _Number
    replicas: tuple[NodeNumber, ...] = ()
    expected: tuple[NodeNumber, ...] = ()


class PlanMoves(Command, frozen=True, kw_only=True):
    """Accept moves that the controller begins a few at a time, or cancel some; each of them
    succeeds or fails by itself.

    A move that has begun and is cancelled goes back to exactly the replicas of before.
    """

    moves: tuple[PlannedMove, ...]
    origin: Origin = Origin.OPERATOR


class VotersReport(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The fact about one partition, as its leader states it."""

    topic_id: TopicId
    partition: PartitionNumber
    leader_epoch: Annotated[int, msgspec.Meta(ge=-1, le=TERM_MAX)]
    voters: tuple[NodeNumber, ...]


class MembersReport(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The fact about one Raft group, as its leader states it.

    `members` are voters and learners of the last committed configuration. `seen_version`: the
    version of this state that the leader had seen when it was so.
    """

    topic_id: TopicId
    partition: PartitionNumber
    creation_epoch: _Number
    leader_epoch: Annotated[int, msgspec.Meta(ge=-1, le=TERM_MAX)]
    voters: tuple[NodeNumber, ...]
    members: tuple[NodeNumber, ...]
    seen_version: _Number


class ReportVoters(Command, frozen=True, kw_only=True):
    """Leaders state the voters: metadata holds the target, the partition's own log the fact.

    `reports` come of clusters below level 4, `members` of the others.
    """

    reports: tuple[VotersReport, ...]
    members: tuple[MembersReport, ...] = ()


class ConfirmRemoved(Command, frozen=True, kw_only=True):
    """A broker has deleted the data of replicas that it was ordered to delete.

    `replicas` come of clusters below level 4. `groups` name each by the Raft group it was of: the
    topic, the number and the creation epoch.
    """

    node_id: NodeNumber
    replicas: tuple[tuple[TopicId, PartitionNumber], ...]
    groups: tuple[tuple[TopicId, PartitionNumber, _Number], ...] = ()


# ---- configs and producers ----


class ConfigChange(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """New values for one resource: `resource_type` topic or broker; broker "" is all brokers.

    The controller has already turned append and subtract into whole values.
    """

    resource_type: str
    resource_name: str
    set: dict[str, str] = {}
    delete: tuple[str, ...] = ()


class AlterConfigs(Command, frozen=True, kw_only=True):
    """Change configs; each resource by itself."""

    changes: tuple[ConfigChange, ...]


class AllocateProducerIds(Command, frozen=True, kw_only=True):
    """Hand a block of producer ids to one broker."""

    node_id: NodeId
    count: int = 1000


class FeatureUpdate(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A feature by name, and the level that it is to have; 0 takes it back."""

    name: str
    level: Annotated[int, msgspec.Meta(ge=0, le=(1 << 15) - 1)]


class UpdateFeatures(Command, frozen=True, kw_only=True):
    """Finalize levels of features, all of them or none."""

    updates: tuple[FeatureUpdate, ...]


class CreateAcls(Command, frozen=True, kw_only=True):
    """Let these rules be in force; those that are already stay."""

    rules: RuleRows


class DeleteAcls(Command, frozen=True, kw_only=True):
    """Let these rules be in force no more; those that are not already are passed over."""

    rules: RuleRows


class AlterUsers(Command, frozen=True, kw_only=True):
    """Change credentials of users.

    `scram_secret`: what credentials are made up from for users that there are not; the first one
    stays.
    """

    upsertions: Annotated[tuple[ScramUpsertion, ...], msgspec.Meta(max_length=USERS_MAX)] = ()
    deletions: Annotated[tuple[ScramDeletion, ...], msgspec.Meta(max_length=USERS_MAX)] = ()
    scram_secret: Secret = b""

    def __repr__(self) -> str:
        return f"AlterUsers(upsertions={self.upsertions!r}, deletions={self.deletions!r})"


class NoOperation(Command, frozen=True, kw_only=True):
    """Nothing; its being applied proves that a majority took it after it was proposed."""


# ---- consumer groups ----

UNDATED: Final = -1
"""A time for expiry that was not known at the time; ExpireOffsets sets it later."""


class GroupMember(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One member of a generation, with all that a next coordinator needs to go on with it."""

    member_id: str
    instance_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    session_timeout_ms: int
    rebalance_timeout_ms: int
    subscription: bytes = b""
    """The member's metadata for the protocol that the group chose; opaque."""
    assignment: bytes = b""
    """What the leader gave it; opaque."""


class CommittedOffset(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A group's saved position in one partition."""

    topic: str
    partition: int
    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    timestamp_ms: int = 0
    """When it was committed, or a little later, or UNDATED; for expiry alone."""


class ExpiredOffset(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An offset that has expired, unless it was committed anew since `timestamp_ms`."""

    topic: str
    partition: int
    timestamp_ms: int


class GroupCommand(Command, frozen=True, kw_only=True):
    """Base of all commands of consumer groups."""

    group: str


class ClaimGroup(GroupCommand, frozen=True, kw_only=True):
    """`node_id`, in its incarnation `broker_epoch`, wants to coordinate the group.

    Refused while another live broker holds the claim: a broker that comes back takes nothing away.
    """

    node_id: NodeId
    broker_epoch: int


class ReleaseGroup(GroupCommand, frozen=True, kw_only=True):
    """The holder drains: the claim passes to `successor`; with -1 any node may claim."""

    coordinator_epoch: int
    successor: NodeId = NodeId(-1)


class Generation(GroupCommand, frozen=True, kw_only=True):
    """A generation is complete: these members own these assignments from now on.

    Also says that a group has become empty (no members, a new generation).
    """

    coordinator_epoch: int
    generation: int
    protocol_type: str = ""
    protocol: str | None = None
    leader: str | None = None
    members: tuple[GroupMember, ...] = ()
    timestamp_ms: int = 0


class ReplaceMember(GroupCommand, frozen=True, kw_only=True):
    """A static member has come back under a new member id; its assignment stays (KIP-345)."""

    coordinator_epoch: int
    generation: int
    instance_id: str
    old_member_id: str
    new_member_id: str
    client_id: str = ""
    client_host: str = ""
    session_timeout_ms: int
    rebalance_timeout_ms: int


class OffsetsTransaction(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The transaction whose decision makes offsets visible, or forgets them.

    `txn_seq` and `protocol` as in AddPartitions. Under protocol 2 the commit adds its group to the
    transaction, and begins one where none runs. `topic_ids` has one of each of the offsets: what
    was deleted, or made again, since takes none.
    """

    transactional_id: str
    producer_id: ProducerNumber
    epoch: ProducerEpoch
    txn_seq: _Number = -1
    protocol: Protocol = 1
    topic_ids: tuple[TopicId, ...] = ()


class CommitOffsets(GroupCommand, frozen=True, kw_only=True):
    """Save positions. Generation -1 with member "" is a consumer outside group management.

    With a `transaction` they are pending: no consumer sees them before it is committed.

    Attributes:
        known_version: the structure version in which the coordinator saw the partitions. The commit
            is rejected if one of them was deleted or made since: the next topic of that name
            inherits nothing. -1: it does not say.
    """

    coordinator_epoch: int
    generation: int = -1
    member_id: str = ""
    instance_id: str | None = None
    offsets: tuple[CommittedOffset, ...] = ()
    transaction: OffsetsTransaction | None = None
    known_version: Annotated[int, msgspec.Meta(ge=-1, le=POSITION_MAX)] = -1


class CommitMany(GroupCommand, frozen=True, kw_only=True):
    """Commits of several groups and members in one command; each is judged by itself."""

    group: str = ""
    commits: tuple[CommitOffsets, ...]


class DeleteOffsets(GroupCommand, frozen=True, kw_only=True):
    """Forget positions, by order of an operator.

    `topic_ids` has one of each of the partitions, zero where there was no such topic: what is in
    another topic of that name by now stays. Without any, names alone count.
    """

    coordinator_epoch: int
    partitions: tuple[tuple[str, int], ...]
    topic_ids: tuple[TopicId, ...] = ()


class ExpireOffsets(GroupCommand, frozen=True, kw_only=True):
    """Forget positions that were not used for long, and the group with the last of them.

    `now_ms`: from then on what is UNDATED ages.
    """

    coordinator_epoch: int
    expired: tuple[ExpiredOffset, ...] = ()
    now_ms: int = UNDATED


class DeleteGroup(GroupCommand, frozen=True, kw_only=True):
    """Forget an empty group with its offsets."""

    coordinator_epoch: int


# ---- transactions ----


class TransactionRow(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """Base of all rows: one transition of one transactional id (or of one partition).

    It names what it was made for, by (producer id, epoch) and by `txn_seq`, which numbers the
    transactions of an id; one that comes at another moment changes nothing, however late it is.
    """


class InitProducer(TransactionRow, frozen=True, kw_only=True):
    """A producer begins: it gets a producer id and an epoch above all that were given before.

    `producer_id` and `epoch` are what the client named (KIP-360), -1 where it named nothing. Where
    a transaction runs it is aborted, and CONCURRENT_TRANSACTIONS told until its end is complete.
    """

    transactional_id: str
    timeout_ms: Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
    producer_id: ProducerNumber = -1
    epoch: ProducerEpoch = -1


class AddPartitions(TransactionRow, frozen=True, kw_only=True):
    """Partitions and groups are part of a transaction, all of them or none.

    `txn_seq` is the number of the transaction that they are meant for: of the one that runs, or the
    one after the last, which begins with this. -1 (protocol 2 alone): the epoch tells.
    """

    transactional_id: str
    producer_id: ProducerNumber
    epoch: ProducerEpoch
    txn_seq: _Number = -1
    protocol: Protocol = 1
    partitions: tuple[tuple[TopicId, tuple[PartitionNumber, ...]], ...] = ()
    groups: tuple[str, ...] = ()


class EndTransaction(TransactionRow, frozen=True, kw_only=True):
    """The producer's decision; pending offsets become visible with it.

    `txn_seq` is that of the transaction to end. -1 (protocol 2 alone): the epoch tells.
    """

    transactional_id: str
    producer_id: ProducerNumber
    epoch: ProducerEpoch
    is_commit: bool
    txn_seq: _Number = -1
    protocol: Protocol = 1


class ReportMarkers(TransactionRow, frozen=True, kw_only=True):
    """One partition's leader: the ends of these transactions are committed in its log.

    Each by the producer id in the log, and txn_seq; what is not awaited is passed over.
    """

    topic_id: TopicId
    partition: PartitionNumber
    creation_epoch: _Number
    ended: tuple[tuple[ProducerNumber, _Number], ...]


class AbortExpired(TransactionRow, frozen=True, kw_only=True):
    """This transaction has run for longer than its timeout: abort it, unless it was decided."""

    transactional_id: str
    producer_id: ProducerNumber
    epoch: ProducerEpoch
    txn_seq: _Number


class ForgetId(TransactionRow, frozen=True, kw_only=True):
    """Nobody has used this id for long: forget it, unless anything happened to it since.

    One whose `changed_at_ms` is UNDATED is dated by the command's `now_ms` instead.
    """

    transactional_id: str
    producer_id: ProducerNumber
    epoch: ProducerEpoch
    txn_seq: _Number
    changed_at_ms: _Number


Row: TypeAlias = (
    InitProducer | AddPartitions | EndTransaction | ReportMarkers | AbortExpired | ForgetId
)


class TransactionRows(Command, frozen=True, kw_only=True):
    """Transitions of transactions, one after the other; each succeeds or fails by itself.

    `now_ms`: the time, for the expiry of ids; UNDATED where it is not known. `said_ms`: what the
    clock of the proposing node said, for people alone, who would rather be told a wrong time than
    none: when a transaction began.
    """

    rows: tuple[Row, ...]
    now_ms: _Number = UNDATED
    said_ms: _Number = UNDATED


CONTROL_COMMANDS: Final = (
    RegisterBroker,
    FenceBroker,
    UnfenceBroker,
    UnregisterBroker,
    ReplaceNode,
    EndReplacement,
    ChangeNodes,
    CreateTopics,
    DeleteTopics,
    CreatePartitions,
    ShrinkTopic,
    SealPartitions,
    ReportSealed,
    ReportGone,
    ReassignPartition,
    PlanMoves,
    ReportVoters,
    ConfirmRemoved,
    AlterConfigs,
    AllocateProducerIds,
    UpdateFeatures,
    CreateAcls,
    DeleteAcls,
    AlterUsers,
    NoOperation,
)

GROUP_COMMANDS: Final = (
    ClaimGroup,
    ReleaseGroup,
    Generation,
    ReplaceMember,
    CommitOffsets,
    CommitMany,
    DeleteOffsets,
    ExpireOffsets,
    DeleteGroup,
)

TRANSACTION_COMMANDS: Final = (TransactionRows,)

ALL_COMMANDS: Final = CONTROL_COMMANDS + GROUP_COMMANDS + TRANSACTION_COMMANDS

if TYPE_CHECKING:
    AnyCommand: TypeAlias = msgspec.Struct
else:
    AnyCommand = Union[ALL_COMMANDS]  # noqa: UP007 - made of a tuple


class Envelope(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A command and its submitter.

    `version` is what `version_of` says of the command. `broker_epoch` -1: not made by a registered
    broker. `expected_version` -1: not computed from a state; else it is rejected when brokers,
    topics or configs changed after that version.
    """

    version: int = msgspec.field(name="v")
    node_id: NodeNumber = msgspec.field(name="node")
    incarnation: _Number
    sequence: _Number
    broker_epoch: _Number = -1
    expected_version: _Number = -1
    command: AnyCommand


# ---- versions ----

FIRST_VERSIONS: Final[dict[type, int]] = dict.fromkeys(ALL_COMMANDS, 1)
FIRST_VERSIONS[UpdateFeatures] = 2
FIRST_VERSIONS[TransactionRows] = 3
FIRST_VERSIONS[ChangeNodes] = 4
FIRST_VERSIONS[PlanMoves] = 4
FIRST_VERSIONS[CreateAcls] = 5
FIRST_VERSIONS[DeleteAcls] = 5
FIRST_VERSIONS[AlterUsers] = 5
FIRST_VERSIONS.update(dict.fromkeys((ShrinkTopic, SealPartitions, ReportSealed, ReportGone), 6))
"""Since which version there is each kind of command."""
LATER_FIELDS: Final[dict[type, dict[str, int]]] = {
    CommitOffsets: {"transaction": 3, "known_version": 3},
    RegisterBroker: {"takes_no_data": 4},
    ReassignPartition: {"creation_epoch": 4, "expected": 4, "origin": 4},
    ReportVoters: {"members": 4},
    ConfirmRemoved: {"groups": 4},
    DeleteOffsets: {"topic_ids": 4},
    CreateTopics: {"views": 8},
    DeleteTopics: {"views": 8},
    ReportGone: {"producers": 9},
}
"""Fields of a kind that came after it, by name, with their versions. Each has a default, which is
not written, and which means what its absence meant before."""


def newest_version(kind: type) -> int:
    """The newest version of one kind of command that this code can read."""
    if kind is CommitMany:
        return max(FIRST_VERSIONS[kind], newest_version(CommitOffsets))
    first, later = FIRST_VERSIONS[kind], LATER_FIELDS.get(kind)
    return first if later is None else max(first, *later.values())


def version_of(command: AnyCommand) -> int:
    """The least version that can express a command."""
    kind = type(command)
    version, later = FIRST_VERSIONS[kind], LATER_FIELDS.get(kind)
    if isinstance(command, CommitMany):
        return max([version, *map(version_of, command.commits)])
    if later is not None:
        defaults = _defaults(kind)
        for name, since in later.items():
            if getattr(command, name) != defaults[name]:
                version = max(version, since)
    return version


@cache
def _defaults(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.default for field in msgspec.structs.fields(kind)}


_KINDS: Final = {kind.__name__: kind for kind in FIRST_VERSIONS}
_encoder: Final = msgspec.json.Encoder()
_decoder: Final[msgspec.json.Decoder[Envelope]] = msgspec.json.Decoder(Envelope)


class _Head(msgspec.Struct):
    version: int = msgspec.field(name="v")
    command: msgspec.Raw = msgspec.Raw(b"")


class _Kind(msgspec.Struct):
    type: str


def encode_envelope(envelope: Envelope) -> bytes:
    """One record's value."""
    return _encoder.encode(envelope)


def decode_envelope(data: Buffer) -> Envelope:
    """Read a record's value: all of it, or nothing.

    Raises:
        UnknownCommandError: not a command.
        NewerCommandError: one of a newer version, kind or shape.
    """
    try:
        envelope = _decoder.decode(data)
    except Exception as error:  # also RecursionError and UnicodeDecodeError: others send these
        if reason := _newer(data, str(error)):
            raise NewerCommandError(reason) from error
        raise UnknownCommandError(f"not a metadata command: {error}") from error
    kind, version = type(envelope.command), envelope.version
    if version > newest_version(kind):
        raise NewerCommandError(_of_version(kind.__name__, version))
    if version < version_of(envelope.command):
        raise UnknownCommandError(f"not a metadata command: {kind.__name__} of version {version}")
    return envelope


def _newer(data: Buffer, error: str) -> str:
    """Say what in an unreadable command is of a newer version; "" when it is no command of any
    version."""
    try:
        head = msgspec.json.decode(data, type=_Head)
    except Exception:  # noqa: BLE001 - whatever it is, it is not ours
        return ""
    try:
        kind = msgspec.json.decode(head.command, type=_Kind).type
    except Exception:  # noqa: BLE001 - a newer version may have another shape here
        kind = ""
    if head.version > _known(kind):
        return _of_version(kind or "a command", head.version)
    if kind and kind not in _KINDS:
        return f"a command of the kind {kind!r}, which this version does not know"
    if "unknown field" in error:
        return f"{kind or 'a command'} with what this version does not know: {error}"
    return ""


def _of_version(kind: str, version: int) -> str:
    return f"{kind} of version {version}, this version knows {_known(kind)}"


def _known(kind: str) -> int:
    """The newest version of a kind by name; of a kind that is not known, that of any."""
    kinds = [_KINDS[kind]] if kind in _KINDS else FIRST_VERSIONS
    return max(map(newest_version, kinds))
