"""What commands do to the replicas of partitions: pure functions of `apply.py`.

A partition's row says which nodes should hold it (`replicas`), which of them its leader last said
vote, and which nodes are `dismissed`; `removals` are the orders to delete. The group of a partition
makes the first true, one member at a time, its leader reports the second, the rest follows.

Invariants: an order to delete names a Raft group. It is made for a node that is not wanted, by a
report that names it neither as a voter nor as a learner and whose leader has seen that it is not
wanted: an earlier one may be about to let it vote. It is taken back only where the node is wanted
again. A cancelled move goes back to exactly the replicas of before, and never begins if it had not:
an order that was on its way by then is rejected. Below LEVEL_OF_MOVES nothing is planned or
dismissed, and an order is made as soon as a voter is reported to have left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from attrs import evolve
from immutables import Map

from raftmq.errors import ErrorCode
from raftmq.metadata.commands import (
    ConfirmRemoved,
    Envelope,
    MembersReport,
    Origin,
    PlanMoves,
    PlannedMove,
    ReassignPartition,
    ReportVoters,
    VotersReport,
)
from raftmq.metadata.image import (
    LEVEL_OF_MOVES,
    MetadataImage,
    PartitionImage,
    RemovalImage,
    TopicImage,
    all_partitions,
)
from raftmq.metadata.results import Done, MoveOutcome, MoveOutcomes, Rejection, Result
from raftmq.types import NodeId, Offset, RaftGroupId, TopicId

Applied: TypeAlias = tuple[MetadataImage, Result]
Removals: TypeAlias = Map[RaftGroupId, RemovalImage]
Found: TypeAlias = tuple[TopicImage, PartitionImage]


def replicas_error(
    image: MetadataImage, replicas: Sequence[tuple[NodeId, ...]]
) -> Rejection | None:
    """Why partitions cannot have these replicas; None when they can."""
    for nodes in replicas:
        if not nodes or len(dict.fromkeys(nodes)) != len(nodes):
            return Rejection(ErrorCode.INVALID_REPLICA_ASSIGNMENT, "no replica, or one twice")
        for node_id in nodes:
            if node_id not in image.brokers:
                return Rejection(
                    ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"broker {node_id} is not registered"
                )
    return None


class _Rows:
    """An image with what a command has changed so far, row by row: each row is judged with the
    changes of those before it, and a topic's partitions are copied once for all of them.

    Attributes:
        removals: the orders to delete, as they are by now.
    """

    def __init__(self, image: MetadataImage) -> None:
        self.image = image
        self.removals = image.removals
        self._changed: dict[str, dict[int, PartitionImage]] = {}
        """By name of the topic and number."""

    def find(self, topic_id: TopicId, number: int, epoch: int) -> Found | None:
        """The partition of that creation epoch (-1: whichever is there); None when there is none.
        The topic is that of the image."""
        topic = self.image.topic_by_id(topic_id)
        known = None if topic is None else topic.partition(number)
        if topic is None or known is None:
            return None
        partition = self._changed.get(topic.name, {}).get(number, known)
        return (topic, partition) if epoch in (-1, partition.creation_epoch) else None

    def removal(self, group: RaftGroupId) -> RemovalImage | None:
        """The order to delete that group's data, None when there is none."""
        order = self.removals.get(self.image.removal_key(group))
        return order if order is not None and order.group == group else None

    def put(self, topic: TopicImage, partition: PartitionImage) -> None:
        """Have the partition be so."""
        self._changed.setdefault(topic.name, {})[partition.index] = partition

    def put_wanted(self, topic: TopicImage, partition: PartitionImage) -> None:
        """The same, and take back orders to delete that its replicas have not yet obeyed."""
        self.put(topic, partition)
        key = self.image.removal_key(topic.group_id(partition.index))
        for node_id in partition.replicas:
            self.removals = _remove_node(self.removals, key, node_id)

    def put_order(self, topic: TopicImage, group: RaftGroupId, nodes: Sequence[NodeId]) -> None:
        """Order these nodes, and no others, to delete their data of a group."""
        key = self.image.removal_key(group)
        if nodes:
            order = RemovalImage(topic.name, group, tuple(sorted(set(nodes))))
            self.removals = self.removals.set(key, order)
        elif key in self.removals:
            self.removals = self.removals.delete(key)

    @property
    def is_changed(self) -> bool:
        """True when anything was put, or taken back."""
        return bool(self._changed) or self.removals is not self.image.removals

    def whole(self) -> MetadataImage:
        """The image with all that; the same one where nothing has changed."""
        if not self.is_changed:
            return self.image
        topics = {}
        for name, rows in self._changed.items():
            topics[name] = self.image.topics[name].with_partitions(rows)
        return evolve(self.image, topics=self.image.topics.update(topics), removals=self.removals)


# ---- targets ----


def reassign_partition(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    """Order a partition onto other brokers."""
    command: ReassignPartition = envelope.command  # type: ignore[assignment]  # by _HANDLERS
    rows = _Rows(image)
    found = rows.find(command.topic_id, command.partition, command.creation_epoch)
    if found is None:
        return image, Rejection(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    rejection = replicas_error(image, (command.replicas,))
    if rejection is not None:
        return image, rejection
    topic, partition = found
    if command.expected not in ((), partition.replicas):
        return image, Rejection(ErrorCode.INVALID_UPDATE_VERSION, "its replicas are others by now")
    is_of_plan = command.expected and command.origin in (Origin.OPERATOR, Origin.BALANCE)
    if is_of_plan and partition.planned != command.replicas:
        return image, Rejection(ErrorCode.INVALID_UPDATE_VERSION, "that is not planned any more")
    if image.level < LEVEL_OF_MOVES:
        changed = evolve(partition, replicas=command.replicas)
    else:
        changed = _begun(partition, command, offset)
    rows.put_wanted(topic, changed)
    return rows.whole(), Done(offset)


def _begun(partition: PartitionImage, command: ReassignPartition, offset: Offset) -> PartitionImage:
    """A partition with a new target; back where it came from, its move is none any more."""
    if partition.planned == command.replicas:
        partition = evolve(partition, planned=())
    if command.replicas == partition.replicas:
        return _settled(partition)
    before = partition.moving_from or partition.replicas
    changed = evolve(
        _targeted(partition, command.replicas, offset),
        moving_from=() if command.replicas == before else before,
        origin=command.origin,
    )
    return _settled(changed)


def _targeted(
    partition: PartitionImage, replicas: tuple[NodeId, ...], offset: Offset
) -> PartitionImage:
    """Whom it may have made a learner meanwhile, and wants no more, is dismissed."""
    unwanted = (*partition.dismissed, *partition.replicas)
    dismissed = {n for n in unwanted if n not in replicas and n not in partition.voters}
    return evolve(
        partition,
        replicas=replicas,
        target_version=int(offset),
        dismissed=tuple(sorted(dismissed)),
    )


def _settled(partition: PartitionImage) -> PartitionImage:
    """A move is over when the voters are the replicas; whose it was goes with the last of it."""
    moving_from = partition.moving_from
    if sorted(partition.voters) == sorted(partition.replicas):
        moving_from = ()
    origin = partition.origin if moving_from or partition.planned else Origin.NONE
    return evolve(partition, moving_from=moving_from, origin=origin)


def plan_moves(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    """Accept moves, or cancel some; each by itself."""
    command: PlanMoves = envelope.command  # type: ignore[assignment]
    if image.level < LEVEL_OF_MOVES:  # no snapshot of this level holds them
        return image, Rejection(ErrorCode.UNSUPPORTED_VERSION, "the level is too low")
    rows = _Rows(image)
    outcomes = tuple(_plan(rows, move, command.origin, offset) for move in command.moves)
    return rows.whole(), MoveOutcomes(outcomes)


def _plan(rows: _Rows, move: PlannedMove, origin: Origin, offset: Offset) -> MoveOutcome:
    found = rows.find(move.topic_id, move.partition, move.creation_epoch)
    if found is None:
        return MoveOutcome(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    topic, partition = found
    if move.expected not in ((), partition.replicas):
        return MoveOutcome(ErrorCode.INVALID_UPDATE_VERSION, "its replicas are others by now")
    is_moving = bool(partition.planned or partition.moving_from)
    if is_moving and origin is Origin.BALANCE and partition.origin is not Origin.BALANCE:
        return MoveOutcome(ErrorCode.REASSIGNMENT_IN_PROGRESS, "it moves for another reason")
    target = move.replicas or partition.moving_from or partition.replicas
    if not move.replicas and not is_moving:
        return MoveOutcome(ErrorCode.NO_REASSIGNMENT_IN_PROGRESS)
    rejection = replicas_error(rows.image, (target,))
    if rejection is not None:
        return MoveOutcome(rejection.code, rejection.message)
    if move.replicas:
        planned = () if target == partition.replicas else target
        changed = evolve(partition, planned=planned, origin=origin if planned else partition.origin)
    elif partition.moving_from:
        changed = _targeted(evolve(partition, planned=(), moving_from=()), target, offset)
    else:
        changed = evolve(partition, planned=())
    changed = _settled(changed)
    if changed == partition:
        return MoveOutcome()
    rows.put_wanted(topic, changed)
    return MoveOutcome()


# ---- facts ----


def report_voters(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    """Take in what leaders say of the members of their groups."""
    command: ReportVoters = envelope.command  # type: ignore[assignment]
    rows = _Rows(image)
    if image.level < LEVEL_OF_MOVES:
        for report in command.reports:
            _take_voters(rows, report)
    else:
        for row in command.members:
            _take_members(rows, row)
    return rows.whole(), Done(offset)


def _take_voters(rows: _Rows, report: VotersReport) -> None:
    """Who left the group by its own word, and is not wanted by metadata either, may delete."""
    found = rows.find(report.topic_id, report.partition, -1)
    if found is None or not report.voters:
        return
    topic, partition = found
    if report.leader_epoch < partition.voters_epoch or report.voters == partition.voters:
        return
    changed = evolve(partition, voters=report.voters, voters_epoch=report.leader_epoch)
    group = topic.group_id(partition.index)
    ordered = rows.removals.get(rows.image.removal_key(group))
    nodes = (*(ordered.nodes if ordered is not None else ()), *partition.voters)
    left = [n for n in nodes if n not in changed.voters and n not in changed.replicas]
    rows.put(topic, changed)
    rows.put_order(topic, group, left)


def _take_members(rows: _Rows, report: MembersReport) -> None:
    found = rows.find(report.topic_id, report.partition, report.creation_epoch)
    if found is None or not report.voters or report.creation_epoch < 0:
        return
    topic, partition = found
    if report.leader_epoch < partition.voters_epoch:
        return
    group = topic.group_id(partition.index)
    order = rows.removal(group)
    ordered = () if order is None else order.nodes
    unwanted = [
        node_id
        for node_id in (*partition.dismissed, *partition.voters, *ordered)
        if node_id not in report.voters and node_id not in partition.replicas
    ]
    is_seen = report.seen_version >= partition.target_version
    going = {n for n in unwanted if n in ordered or (is_seen and n not in report.members)}
    changed = _settled(
        evolve(
            partition,
            voters=report.voters,
            voters_epoch=report.leader_epoch,
            dismissed=tuple(sorted(set(unwanted) - going)),
        )
    )
    if changed == partition and going == set(ordered):
        return
    rows.put(topic, changed)
    rows.put_order(topic, group, sorted(going))


def is_news(image: MetadataImage, report: MembersReport) -> bool:
    """True when this report would change anything."""
    rows = _Rows(image)
    _take_members(rows, report)
    return rows.is_changed


def confirm_removed(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    """Strike out orders that were obeyed."""
    command: ConfirmRemoved = envelope.command  # type: ignore[assignment]
    removals = image.removals
    if image.level < LEVEL_OF_MOVES:
        groups = [RaftGroupId(*replica, -1) for replica in command.replicas]
    else:
        groups = [RaftGroupId(*group) for group in command.groups]
        if command.replicas:  # on its way when the level was raised, so of a life before that
            told = set(command.replicas)
            groups += [g for g in sorted(removals) if g[:2] in told and g[2] < image.features_epoch]
    for group in groups:
        removals = _remove_node(removals, group, command.node_id)
    after = image if removals is image.removals else evolve(image, removals=removals)
    return after, Done(offset)


def _remove_node(removals: Removals, key: RaftGroupId, node_id: NodeId) -> Removals:
    removal = removals.get(key)
    if removal is None or node_id not in removal.nodes:
        return removals
    nodes = tuple(n for n in removal.nodes if n != node_id)
    return removals.set(key, evolve(removal, nodes=nodes)) if nodes else removals.delete(key)


def forget_node(image: MetadataImage, node_id: NodeId, *, is_gone: bool = False) -> MetadataImage:
    """Nothing is waited for that a node should delete; once it is gone, nothing is to move there.

    Args:
        is_gone: it is not registered any more.
    """
    removals = image.removals
    for key in sorted(removals):
        removals = _remove_node(removals, key, node_id)
    after = image if removals is image.removals else evolve(image, removals=removals)
    if image.level < LEVEL_OF_MOVES:
        return after
    rows = _Rows(after)
    for topic, partition in all_partitions(image):
        dismissed = tuple(n for n in partition.dismissed if n != node_id)
        planned = () if is_gone and node_id in partition.planned else partition.planned
        changed = _settled(evolve(partition, dismissed=dismissed, planned=planned))
        if changed != partition:
            rows.put(topic, changed)
    return rows.whole()


def by_group(image: MetadataImage) -> MetadataImage:
    """The same state in the form of LEVEL_OF_MOVES, which its level has just reached.

    Moves that are under way count as ordered now: their leaders say that they have seen them.
    """
    removals: Removals = Map({order.group: order for order in image.removals.values()})
    rows = _Rows(evolve(image, removals=removals))
    for topic, partition in all_partitions(image):
        if sorted(partition.voters) != sorted(partition.replicas):
            changed = evolve(partition, target_version=image.features_epoch)
            rows.put(topic, changed)
    return rows.whole()
