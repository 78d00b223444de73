"""Replacing a node: what is left to do, what the next step is, and what may not be done. Pure.

A replacement is one row of the metadata image (`ReplaceNode`). Two things follow from it. The
metadata group's leader works towards `metadata_target`: NEW becomes a learner, a voter once it has
caught up, and only then OLD loses its vote; it follows until it holds nothing and is gone. And the
controller orders OLD's partition replicas onto NEW, or onto another broker where NEW has no room
or would be a second one in its rack (`moves.py`). Nothing else is remembered: any controller reads
from image and configuration alone how far a replacement is, so a crash at any point costs nothing
but time.

Invariants: a replacement begins only where every partition of OLD has a place to go to; it ends
only when its node holds nothing and is gone (fenced, and not heard for a session), and (since
LEVEL_OF_MOVES) its storage is refused from then on, as that of any removed node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from attrs import frozen

from raftmq.controller.leaders import LeaderTable
from raftmq.controller.moves import Bounds, first_names, forecast
from raftmq.controller.node_changes import IsHeard, lives
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.apply_brokers import with_replacement
from raftmq.metadata.broker_messages import Outcome, Outcomes, ReplaceNodeCall
from raftmq.metadata.commands import EndReplacement, ReplaceNode, UnregisterBroker
from raftmq.metadata.image import (
    LEVEL_OF_MOVES,
    MetadataImage,
    all_partitions,
    holds,
)
from raftmq.metadata.voters import voter_steps
from raftmq.raft.membership import Configuration
from raftmq.types import NodeId

NAMES_MAX: Final = 10
"""So many partitions are named in one line."""


def next_end(
    image: MetadataImage,
    configuration: Configuration,
    has_any: Callable[[NodeId], bool],
    is_silent: Callable[[NodeId, int], bool],
) -> EndReplacement | UnregisterBroker | None:
    """What ends a replacement that has nothing left to do: its node is removed, then the row is
    done. `has_any` tells whether a node still has, or may get back, a replica of any partition,
    `is_silent` whether the broker of some epoch has not been heard for long: one that came with an
    empty disk is fenced until it has caught up, and that disk is not the one to refuse for good."""
    members = [member.node_id for member in configuration.members]
    for old_id in image.leaving():
        if old_id in members or image.live_epoch(old_id) is not None:
            continue
        if has_any(old_id):
            continue
        broker = image.brokers.get(old_id)
        if broker is not None and not is_silent(old_id, broker.epoch):
            continue
        if any(old_id in partition.dismissed for _, partition in all_partitions(image)):
            continue  # a leader that does not know yet may have let it vote
        if image.level >= LEVEL_OF_MOVES and broker is not None:
            # This leaves the tombstone. Until the row is done as well, the node stays one that
            # leaves: whichever controller comes next ends it.
            return UnregisterBroker(node_id=old_id)
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
            led = leaders.of(topic.topic_id, partition)
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
    is_heard: IsHeard,
    leader: NodeId | None = None,
) -> tuple[ReplaceNode | None, Outcomes]:
    """Judge a call: the command that begins the replacement, None when there is nothing to begin,
    and the answer: one row with the verdict, then one for each step. `is_heard` tells whether the
    heartbeats of a broker of some epoch come, fenced or not; `leader` is that of the metadata
    group."""
    try:
        if configuration is None:
            raise KafkaError(
                "metadata does not run on Raft here", code=ErrorCode.UNSUPPORTED_VERSION
            )
        known = image.replacements.get(NodeId(call.old_id))
        if known is not None and known.new_id == call.new_id:
            message = "done already" if known.is_done else "goes on"
            return None, (Outcome(name="verdict", message=message),)
        _check_nodes(image, configuration, call, is_heard)
        after = with_replacement(image, NodeId(call.old_id), NodeId(call.new_id))
        steps = [*voter_steps(after, configuration, first_voters, leader)]
        steps += _partition_steps(after, NodeId(call.old_id), Bounds(limit_of=limit_of))
    except KafkaError as error:
        return None, (Outcome(name="verdict", code=error.code, message=error.message),)
    rows = (
        Outcome(name="verdict", message="would begin" if call.dry_run else "begun"),
        *(Outcome(name="step", message=text) for text in steps),
    )
    if call.dry_run:
        return None, rows
    return ReplaceNode(old_id=NodeId(call.old_id), new_id=NodeId(call.new_id)), rows


def _check_nodes(
    image: MetadataImage,
    configuration: Configuration,
    call: ReplaceNodeCall,
    is_heard: IsHeard,
) -> None:
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
    if lives(image, old_id, is_heard) and not call.even_if_alive:
        raise KafkaError(
            f"node {old_id} is alive: stop it, or say --even-if-alive to empty it first",
            code=ErrorCode.POLICY_VIOLATION,
        )


def _partition_steps(image: MetadataImage, old_id: NodeId, bounds: Bounds) -> list[str]:
    """How many replicas move, and which cannot.

    Raises:
        KafkaError: no broker can take a partition.
    """
    expected = forecast(image, None, bounds, (old_id,))
    if expected.stuck:
        first, more = expected.stuck[0], len(expected.stuck) - 1
        raise KafkaError(
            f"{first.topic}-{first.partition}: {first.reason}{f' (and {more} more)' * (more > 0)}: "
            "start another node",
            code=ErrorCode.INVALID_REPLICA_ASSIGNMENT,
        )
    targets: dict[NodeId, int] = {}
    leaderless = []
    for row in expected.moves:
        successor = row.after[row.before.index(old_id)]
        targets[successor] = targets.get(successor, 0) + 1
        partition = image.topics[row.topic].partition(row.partition)
        voters = () if partition is None else partition.voters
        alive = sum(1 for node_id in voters if image.live_epoch(node_id) is not None)
        if alive <= len(voters) // 2:
            leaderless.append(f"{row.topic}-{row.partition}")
    steps = [
        f"{count} partition replicas go from node {old_id} to node {successor}"
        for successor, count in sorted(targets.items())
    ]
    if leaderless:
        shown = first_names(leaderless, NAMES_MAX)
        steps.append(
            f"{len(leaderless)} of them have lost their majority and cannot move before it is "
            f"back (or recovered with `raftmq recover`): {shown}"
        )
    return steps
