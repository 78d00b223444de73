"""Replacing a node: what is left to do, what the next step is, and what may not be done. Pure.

A replacement is one row of the metadata image (`ReplaceNode`). Two things follow from it. The
metadata group's leader works towards `metadata_target`: NEW becomes a learner, a voter once it has
caught up, and only then OLD loses its vote; it follows until it holds nothing and is gone. And the
controller orders OLD's partition replicas onto NEW (`next_move`), few at a time; each partition's
own leader makes that so (`partition_target`) and reports the fact. Nothing else is remembered:
any controller reads from image and configuration alone how far a replacement is, so a crash at any
point costs nothing but time.

Invariants: a partition never gets a broker twice, nor a broker more replicas than it has room for;
a move begins only where the partition has a leader; a replacement ends only when its node holds
nothing and is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from attrs import evolve, frozen

from raftmq.controller.leaders import LeaderTable
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import Outcome, Outcomes, ReplaceNodeCall
from raftmq.metadata.commands import EndReplacement, ReassignPartition, ReplaceNode
from raftmq.metadata.engine import MetadataEngine
from raftmq.metadata.image import (
    MetadataImage,
    PartitionImage,
    ReplacementImage,
    all_partitions,
    holds,
    holds_any,
    successor_of,
)
from raftmq.metadata.voters import voter_steps
from raftmq.promise import Promise
from raftmq.raft.membership import Configuration
from raftmq.types import NodeId

# ---- moving partitions ----


class Room:
    """How many replicas brokers hold, and how many they may hold."""

    def __init__(self, image: MetadataImage, limit_of: Callable[[NodeId], int]) -> None:
        self._limit_of = limit_of
        self._counts: dict[NodeId, int] = {}
        for _, partition in all_partitions(image):
            for node_id in partition.replicas:
                self.take(node_id)

    def count(self, node_id: NodeId) -> int:
        """The replicas of a broker."""
        return self._counts.get(node_id, 0)

    def is_left(self, node_id: NodeId) -> bool:
        """True when it may hold another one."""
        return self.count(node_id) < self._limit_of(node_id)

    def take(self, node_id: NodeId) -> None:
        """It holds one more."""
        self._counts[node_id] = self.count(node_id) + 1


def moved_replicas(
    image: MetadataImage, partition: PartitionImage, leaving: Mapping[NodeId, NodeId], room: Room
) -> tuple[NodeId, ...] | None:
    """The replicas of a partition without the nodes that leave, in the same order; None when no
    broker can take the place of one.

    A successor that holds the partition already cannot hold it twice, and one without room cannot
    hold it at all: then the live broker with the fewest replicas takes it.
    """
    replicas = list(partition.replicas)
    for at, node_id in enumerate(replicas):
        if node_id not in leaving:
            continue
        successor = successor_of(leaving, node_id)
        if successor in replicas or not room.is_left(successor):
            others = [
                broker.node_id
                for broker in image.live_brokers()
                if broker.node_id not in replicas
                and broker.node_id not in leaving
                and room.is_left(broker.node_id)
            ]
            if not others:
                return None
            successor = min(others, key=lambda n: (room.count(n), n))
        replicas[at] = successor
    return tuple(replicas)


def next_move(
    image: MetadataImage,
    leaders: LeaderTable,
    moves_max: int,
    limit_of: Callable[[NodeId], int],
) -> ReassignPartition | None:
    """The next partition to be ordered elsewhere, while fewer than `moves_max` are on their way."""
    leaving = image.leaving()
    if not leaving:
        return None
    due: ReassignPartition | None = None
    room = Room(image, limit_of)
    moving = 0
    for topic, partition in all_partitions(image):
        row = leaders.get(topic.topic_id, partition.index)
        if row is None or image.live_epoch(row.leader_id) is None:
            continue  # without a leader no move can be carried out
        moving += _is_moving(image, partition)
        if due is None and any(node_id in leaving for node_id in partition.replicas):
            replicas = moved_replicas(image, partition, leaving, room)
            if replicas is not None:
                due = ReassignPartition(
                    topic_id=topic.topic_id, partition=partition.index, replicas=replicas
                )
    return due if moving < moves_max else None


def _is_moving(image: MetadataImage, partition: PartitionImage) -> bool:
    """True while members that can do so arrive or leave; a broker that is down cannot arrive."""
    arriving = (n for n in partition.replicas if n not in partition.voters)
    if any(image.live_epoch(node_id) is not None for node_id in arriving):
        return True
    return all(n in partition.voters for n in partition.replicas) and len(partition.voters) > len(
        partition.replicas
    )


def next_end(image: MetadataImage, configuration: Configuration) -> EndReplacement | None:
    """A replacement that has nothing left to do."""
    members = [member.node_id for member in configuration.members]
    for old_id in image.leaving():
        if old_id in members or image.live_epoch(old_id) is not None:
            continue
        if not holds_any(image, old_id):
            return EndReplacement(old_id=old_id)
    return None


# ---- progress ----


@frozen(slots=True)
class Progress:
    """How far a replacement is.

    Attributes:
        is_voting_settled: OLD does not vote on metadata; if it did, NEW does.
        partitions: whose replica on OLD is not replaced yet.
        stuck: those of them without a leader.
        waits_for_end: all is moved; OLD is still alive.
        is_done: nothing is left.
    """

    old_id: NodeId
    new_id: NodeId
    is_voting_settled: bool
    partitions: int
    stuck: tuple[str, ...]
    waits_for_end: bool
    is_done: bool


def partitions_left(image: MetadataImage) -> int:
    """How many partitions nodes that leave still hold."""
    leaving = image.leaving()
    if not leaving:
        return 0
    return sum(
        any(holds(partition, node_id) for node_id in leaving)
        for _, partition in all_partitions(image)
    )


def progress(
    image: MetadataImage, configuration: Configuration | None, leaders: LeaderTable
) -> list[Progress]:
    """All replacements that this image knows of."""
    voting = [] if configuration is None else [v.node_id for v in configuration.voters]
    rows = []
    for old_id in sorted(image.replacements):
        row = image.replacements[old_id]
        held = [(t, p) for t, p in all_partitions(image) if holds(p, old_id)]
        stuck = []
        for topic, partition in held:
            led = leaders.get(topic.topic_id, partition.index)
            if led is None or image.live_epoch(led.leader_id) is None:
                stuck.append(f"{topic.name}-{partition.index}")
        is_settled = old_id not in voting
        rows.append(
            Progress(
                old_id=old_id,
                new_id=row.new_id,
                is_voting_settled=row.is_done or is_settled,
                partitions=len(held),
                stuck=tuple(stuck),
                waits_for_end=not row.is_done and is_settled and not held,
                is_done=row.is_done,
            )
        )
    return rows


# ---- planning ----


def plan_replacement(
    image: MetadataImage,
    configuration: Configuration | None,
    first_voters: Sequence[NodeId],
    call: ReplaceNodeCall,
    limit_of: Callable[[NodeId], int],
    leader: NodeId | None = None,
) -> tuple[ReplaceNode | None, Outcomes]:
    """Judge a call: the command that begins the replacement, None when there is nothing to begin,
    and the answer: one row with the verdict, then one for each step. `leader` is that of the
    metadata group."""
    try:
        if configuration is None:
            raise KafkaError(
                "metadata does not run on Raft here", code=ErrorCode.UNSUPPORTED_VERSION
            )
        known = image.replacements.get(NodeId(call.old_id))
        if known is not None and known.new_id == call.new_id:
            message = "done already" if known.is_done else "goes on"
            return None, (Outcome(name="verdict", message=message),)
        _check_nodes(image, configuration, call)
        after = _with_replacement(image, call)
        steps = [*voter_steps(after, configuration, first_voters, leader)]
        steps += _partition_steps(image, call, Room(image, limit_of))
    except KafkaError as error:
        return None, (Outcome(name="verdict", code=error.code, message=error.message),)
    rows = (
        Outcome(name="verdict", message="would begin" if call.dry_run else "begun"),
        *(Outcome(name="step", message=text) for text in steps),
    )
    if call.dry_run:
        return None, rows
    return ReplaceNode(old_id=NodeId(call.old_id), new_id=NodeId(call.new_id)), rows


def _check_nodes(image: MetadataImage, configuration: Configuration, call: ReplaceNodeCall) -> None:
    old_id, new_id = NodeId(call.old_id), NodeId(call.new_id)
    if old_id == new_id:
        raise KafkaError(
            f"node {old_id} cannot take its own place: with an empty disk it is admitted by itself",
            code=ErrorCode.INVALID_REQUEST,
        )
    members = [member.node_id for member in configuration.members]
    if old_id not in image.brokers and old_id not in members:
        raise KafkaError(f"node {old_id} is not known", code=ErrorCode.BROKER_ID_NOT_REGISTERED)
    if new_id not in image.brokers:
        raise KafkaError(
            f"node {new_id} has not joined: start it with the `peers` and `cluster_id` of this "
            "cluster",
            code=ErrorCode.BROKER_ID_NOT_REGISTERED,
        )
    if image.brokers[new_id].is_fenced:
        raise KafkaError(
            f"node {new_id} is down, or has not caught up with the metadata log yet",
            code=ErrorCode.BROKER_NOT_AVAILABLE,
        )
    if new_id in image.leaving():
        raise KafkaError(f"node {new_id} is being replaced itself", code=ErrorCode.INVALID_REQUEST)
    if image.live_epoch(old_id) is not None and not call.even_if_alive:
        raise KafkaError(
            f"node {old_id} is alive: stop it, or say --even-if-alive to empty it first",
            code=ErrorCode.POLICY_VIOLATION,
        )


def _with_replacement(image: MetadataImage, call: ReplaceNodeCall) -> MetadataImage:
    row = ReplacementImage(NodeId(call.old_id), NodeId(call.new_id))
    return evolve(image, replacements=image.replacements.set(row.old_id, row))


def _partition_steps(image: MetadataImage, call: ReplaceNodeCall, room: Room) -> list[str]:
    """How many replicas move, and which cannot.

    Raises:
        KafkaError: no broker can take a partition.
    """
    old_id = NodeId(call.old_id)
    leaving = {**image.leaving(), old_id: NodeId(call.new_id)}
    targets: dict[NodeId, int] = {}
    leaderless = []
    for topic, partition in all_partitions(image):
        if old_id not in partition.replicas:
            continue
        replicas = moved_replicas(image, partition, leaving, room)
        name = f"{topic.name}-{partition.index}"
        if replicas is None:
            is_on_both = successor_of(leaving, old_id) in partition.replicas
            why = "has replicas on both nodes" if is_on_both else "finds no room on the new node"
            raise KafkaError(
                f"{name} {why}, and no other live broker could take one: start another node",
                code=ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            )
        successor = replicas[partition.replicas.index(old_id)]
        room.take(successor)
        targets[successor] = targets.get(successor, 0) + 1
        voters = partition.voters
        alive = sum(1 for node_id in voters if image.live_epoch(node_id) is not None)
        if alive <= len(voters) // 2:
            leaderless.append(name)
    steps = [
        f"{count} partition replicas go from node {old_id} to node {successor}"
        for successor, count in sorted(targets.items())
    ]
    if leaderless:
        shown = ", ".join(leaderless[:10]) + (", ..." if len(leaderless) > 10 else "")
        steps.append(
            f"{len(leaderless)} of them have lost their majority and cannot move before it is "
            f"back (or recovered with `raftmq recover`): {shown}"
        )
    return steps


LOOK_AGAIN_MS: Final = 500.0


class Replacing:
    """What one controller remembers for its term."""

    def __init__(
        self,
        engine: MetadataEngine,
        leaders: LeaderTable,
        moves_max: int,
        limit_of: Callable[[NodeId], int],
    ) -> None:
        self._engine = engine
        self._leaders = leaders
        self._moves_max = moves_max
        self._limit_of = limit_of
        self._is_proposing = False
        self._seen = (-1, -1)
        self._look_at_ms = 0.0

    def tick(self, now_ms: float) -> None:
        """Propose what is due; looks only where something changed, or after a while."""
        image, configuration = self._engine.image, self._engine.configuration
        if self._is_proposing or configuration is None or not image.replacements:
            return
        seen = image.structure_version, self._leaders.version
        if seen == self._seen and now_ms < self._look_at_ms:
            return
        self._seen, self._look_at_ms = seen, now_ms + LOOK_AGAIN_MS
        move = next_move(image, self._leaders, self._moves_max, self._limit_of)
        command = move or next_end(image, configuration)
        if command is None:
            return
        self._is_proposing = True

        def done(_promise: Promise[Any]) -> None:
            # Whatever came of it: the next tick looks at the state again.
            self._is_proposing = False
            self._seen = (-1, -1)

        self._engine.propose(
            command, expected_version=image.structure_version, may_resend=False
        ).when_done(done)
