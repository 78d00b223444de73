"""Who may send which command, and which request: a row of `WHO_MAY`, or of `WHO_MAY_ASK`, for each.

A node forwards its own commands to the controller. Its certificate, or the cluster's secret, says
which node it is; this table says what that node may ask for. About itself it may register, confirm
that it has deleted what it was told to, and ask for producer ids. A node that holds a partition
states what its leader states, the coordinator of a group what becomes of the group. Whatever an
administrator decides is asked for by an AdminCall, which names who asked, and becomes a command at
the controller alone, as do the controller's own steps: neither is ever taken from another node.

A pure function of the image, of the sender and of the command. Judged where commands are taken into
the log, never at apply: what is in the log was judged, by whichever version led then. A command
that only comes too late (of a coordinator that lost its claim) is not a lie: it is let through, and
`apply.py` rejects it as ever.

A request goes to any node, whose image may be older than the sender's. So what `request_error` says
holds only of an image that has all that was committed when the request came
(`controller/peer_requests.py` sees to that).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any, Final, TypeAlias

from attrs import frozen

from raftmq.errors import CorruptBatchError
from raftmq.metadata.broker_messages import (
    AdminCall,
    AdmissionRequest,
    BarrierRequest,
    BrokerHeartbeat,
    ContactRequest,
    DeliverRecords,
    ForwardCommands,
    LeaderUpdate,
    MoveLeadership,
    QuorumRequest,
    SizesRequest,
)
from raftmq.metadata.commands import (
    AbortExpired,
    AddPartitions,
    AllocateProducerIds,
    AlterConfigs,
    AlterUsers,
    ChangeNodes,
    ClaimGroup,
    CommitMany,
    CommitOffsets,
    ConfirmRemoved,
    CreateAcls,
    CreatePartitions,
    CreateTopics,
    DeleteAcls,
    DeleteGroup,
    DeleteOffsets,
    DeleteTopics,
    EndReplacement,
    EndTransaction,
    ExpireOffsets,
    FenceBroker,
    ForgetId,
    Generation,
    InitProducer,
    NoOperation,
    PlanMoves,
    ReassignPartition,
    RegisterBroker,
    ReleaseGroup,
    ReplaceMember,
    ReplaceNode,
    ReportGone,
    ReportMarkers,
    ReportSealed,
    ReportVoters,
    SealPartitions,
    ShrinkTopic,
    TransactionRows,
    UnfenceBroker,
    UnregisterBroker,
    UpdateFeatures,
)
from raftmq.metadata.config_keys import DEAD_TO, DELIVERS_TO
from raftmq.metadata.image import LEVEL_OF_ASKERS, NO_COORDINATOR, MetadataImage, holds
from raftmq.records import parse_header
from raftmq.types import NodeId, RaftGroupId, TopicId


class Authority(StrEnum):
    """Who may send a command, or a request."""

    ITSELF = "a node, about itself"
    HOLDER = "a node that holds the partition"
    COORDINATOR = "the coordinator of the group"
    ORDER = "the controller alone; below level 9 any node, to change the order of replicas"
    """An older node does so itself for `raftmq leader transfer`."""
    ANY_NODE = "any node"
    """On behalf of clients: any node may coordinate any transactional id."""
    CONTROLLER = "the controller alone"
    ADMINISTRATOR = "the controller alone, for an administrator"
    PREFERENCE = "the controller, or any node in favor of the preferred leader"
    """Any node serves ElectLeaders, and `raftmq leader transfer` prefers a node before it asks."""
    SOURCE = "a node that holds the delay partition that it comes from"
    PARTS = "any node, of which each part is judged by itself"


_A: Final = Authority
WHO_MAY: Final[dict[type, Authority]] = {
    RegisterBroker: _A.ITSELF,
    ConfirmRemoved: _A.ITSELF,
    AllocateProducerIds: _A.ITSELF,
    ClaimGroup: _A.ITSELF,
    NoOperation: _A.ANY_NODE,
    FenceBroker: _A.CONTROLLER,
    UnfenceBroker: _A.CONTROLLER,
    EndReplacement: _A.CONTROLLER,
    ReportVoters: _A.CONTROLLER,
    ReassignPartition: _A.ORDER,
    UnregisterBroker: _A.ADMINISTRATOR,
    ReplaceNode: _A.ADMINISTRATOR,
    ChangeNodes: _A.ADMINISTRATOR,
    CreateTopics: _A.ADMINISTRATOR,
    DeleteTopics: _A.ADMINISTRATOR,
    CreatePartitions: _A.ADMINISTRATOR,
    ShrinkTopic: _A.ADMINISTRATOR,
    PlanMoves: _A.ADMINISTRATOR,
    AlterConfigs: _A.ADMINISTRATOR,
    UpdateFeatures: _A.ADMINISTRATOR,
    CreateAcls: _A.ADMINISTRATOR,
    DeleteAcls: _A.ADMINISTRATOR,
    AlterUsers: _A.ADMINISTRATOR,
    SealPartitions: _A.HOLDER,
    ReportSealed: _A.HOLDER,
    ReportGone: _A.HOLDER,
    ReleaseGroup: _A.COORDINATOR,
    Generation: _A.COORDINATOR,
    ReplaceMember: _A.COORDINATOR,
    CommitOffsets: _A.COORDINATOR,
    CommitMany: _A.COORDINATOR,
    DeleteOffsets: _A.COORDINATOR,
    ExpireOffsets: _A.COORDINATOR,
    DeleteGroup: _A.COORDINATOR,
    TransactionRows: _A.ANY_NODE,  # each row by its own kind
    InitProducer: _A.ANY_NODE,
    AddPartitions: _A.ANY_NODE,
    EndTransaction: _A.ANY_NODE,
    ReportMarkers: _A.HOLDER,
    # The controller's, but they share a command with rows of clients, which outlives its term. What
    # they do, any node could do by InitProducer.
    AbortExpired: _A.ANY_NODE,
    ForgetId: _A.ANY_NODE,
}
"""By the kinds of commands, and of rows of transactions."""
WHO_MAY_ASK: Final[dict[type, Authority]] = {
    ForwardCommands: _A.PARTS,  # by WHO_MAY
    AdminCall: _A.PARTS,  # by the rights of whoever it names: `controller/call_rights.py`
    LeaderUpdate: _A.PARTS,  # by `row_error`
    AdmissionRequest: _A.ITSELF,
    BrokerHeartbeat: _A.ITSELF,
    BarrierRequest: _A.ANY_NODE,
    ContactRequest: _A.ANY_NODE,
    QuorumRequest: _A.ANY_NODE,
    SizesRequest: _A.CONTROLLER,
    MoveLeadership: _A.PREFERENCE,
    DeliverRecords: _A.SOURCE,
}
"""By the kinds of requests between nodes."""


def authority_error(image: MetadataImage, sender: NodeId, command: Any) -> str:
    """Say why another node may not send a command; "" when it may."""
    kind = type(command)
    authority = WHO_MAY[kind]
    if isinstance(command, TransactionRows):
        return next(filter(None, (authority_error(image, sender, row) for row in command.rows)), "")
    is_allowed = _RULES[authority]
    if is_allowed(image, sender, command):
        return ""
    return f"node {sender} may not send {kind.__name__}: {authority} may"


@frozen(slots=True)
class Knowledge:
    """What a node judges a request of another one by.

    Attributes:
        controller: as far as is known here; None: there is none.
        source_of: the delay partition that delivers under a producer id.
    """

    image: MetadataImage
    controller: NodeId | None
    source_of: Callable[[int], RaftGroupId | None]


def request_error(known: Knowledge, sender: NodeId, request: Any) -> str:
    """Say why another node may not ask for something; "" when it may, or when nothing would come
    of it."""
    kind = type(request)
    authority = WHO_MAY_ASK[kind]
    if _REQUEST_RULES[authority](known, sender, request):
        return ""
    return f"node {sender} may not send {kind.__name__}: {authority} may"


def row_error(image: MetadataImage, leader: NodeId, topic_id: TopicId, number: int) -> str:
    """Say why a node cannot lead a partition; "" when it can, or where there is no such one."""
    if _is_holder(image, leader, topic_id, number):
        return ""
    name = image.topic_names.get(topic_id, topic_id)
    return f"node {leader} may not say that it leads {name}-{number}: {Authority.HOLDER} may"


def _is_itself(_image: MetadataImage, sender: NodeId, command: Any) -> bool:
    return bool(command.node_id == sender)


def _holds(image: MetadataImage, sender: NodeId, command: Any) -> bool:
    return all(_is_holder(image, sender, *key) for key in _partitions(command))


def _partitions(command: Any) -> Iterable[tuple[TopicId, int]]:
    if isinstance(command, SealPartitions):
        return ((command.topic_id, number) for number, _ in command.partitions)
    if isinstance(command, ReportMarkers):
        return ((command.topic_id, command.partition),)
    return ((report.topic_id, report.partition) for report in command.reports)


def _is_holder(image: MetadataImage, node_id: NodeId, topic_id: TopicId, number: int) -> bool:
    """True for a node that may be a member of the partition's group, whatever moves: its leader is
    one. Also where there is no such partition (any more): nothing comes of that."""
    found = image.partition_by_id(topic_id, number)
    if found is None:
        return True
    first = (voter.node_id for voter in found.first_voters)
    return holds(found, node_id) or node_id in (*found.moving_from, *found.dismissed, *first)


def _coordinates(image: MetadataImage, sender: NodeId, command: Any) -> bool:
    if isinstance(command, CommitMany):
        return all(_coordinates(image, sender, commit) for commit in command.commits)
    group = image.groups.get(command.group)
    if group is None or group.coordinator_epoch != command.coordinator_epoch:
        return True  # of a claim that is over: rejected at apply
    return group.coordinator in (sender, NO_COORDINATOR)


def _reorders(image: MetadataImage, _sender: NodeId, command: Any) -> bool:
    if image.level >= LEVEL_OF_ASKERS:
        return False
    found = image.partition_by_id(command.topic_id, command.partition)
    return found is None or sorted(found.replicas) == sorted(command.replicas)


_Rule: TypeAlias = Callable[[MetadataImage, NodeId, Any], bool]
_RULES: Final[dict[Authority, _Rule]] = {
    Authority.ITSELF: _is_itself,
    Authority.HOLDER: _holds,
    Authority.COORDINATOR: _coordinates,
    Authority.ORDER: _reorders,
    Authority.ANY_NODE: lambda _image, _sender, _command: True,
    Authority.CONTROLLER: lambda _image, _sender, _command: False,
    Authority.ADMINISTRATOR: lambda _image, _sender, _command: False,
}


# ---- requests ----


def _prefers(known: Knowledge, sender: NodeId, request: MoveLeadership) -> bool:
    if sender == known.controller:
        return True
    found = known.image.partition_by_id(request.topic_id, request.partition)
    return found is None or found.preferred_leader == request.to


def _delivers(known: Knowledge, sender: NodeId, request: DeliverRecords) -> bool:
    """True for a delivery of a delay topic to the topic that it names, by a node that may lead the
    partition: neither the note of a delivery, nor a batch under the id of another source."""
    image = known.image
    target = image.topic_by_id(request.topic_id)
    if target is None:
        return True  # deleted: nobody appends it
    try:
        group = known.source_of(parse_header(request.batch).producer_id)
    except CorruptBatchError:
        return True  # refused where it would be appended
    source = None if group is None else image.topic_by_id(group.topic_id)
    if group is None or source is None or not source.has(group):
        return False
    targets = (source.configs.get(DELIVERS_TO), source.configs.get(DEAD_TO))
    return target.name in targets and _is_holder(image, sender, group.topic_id, group.partition)


_RequestRule: TypeAlias = Callable[[Knowledge, NodeId, Any], bool]
_REQUEST_RULES: Final[dict[Authority, _RequestRule]] = {
    Authority.PARTS: lambda _known, _sender, _request: True,
    Authority.ANY_NODE: lambda _known, _sender, _request: True,
    Authority.ITSELF: lambda known, sender, request: _is_itself(known.image, sender, request),
    Authority.CONTROLLER: lambda known, sender, _request: sender == known.controller,
    Authority.PREFERENCE: _prefers,
    Authority.SOURCE: _delivers,
}
