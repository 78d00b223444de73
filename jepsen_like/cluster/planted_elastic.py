"""Bugs planted in how brokers come and go: where replicas are put, in what order, what a cancelled
move goes back to, who votes on metadata meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from attrs import evolve
from msgspec.structs import replace

from jepsen_like.bug import Bug, patching
from jepsen_like.cluster import stress
from raftmq.controller import mover
from raftmq.controller.moves import DeadBrokers, Survey, Targets
from raftmq.metadata import apply, apply_moves, voters
from raftmq.metadata.commands import Envelope, ReassignPartition
from raftmq.metadata.image import BrokerImage, MetadataImage, PartitionImage
from raftmq.raft.membership import Configuration
from raftmq.replication import membership
from raftmq.replication.membership import TargetMembership, keeps_quorum
from raftmq.types import NodeId, Offset, ReplicaId


def _own_rack(image: MetadataImage, node_id: NodeId) -> tuple[str, int]:
    """Every broker is a rack of its own."""
    return "", node_id


_departure = membership._departure


def _depart_at_once(
    configuration: Configuration, live: Collection[ReplicaId], target: TargetMembership
) -> Configuration | None:
    """What is not wanted goes, whoever has come."""
    if target.leaving is not None:
        return _departure(configuration, live, target)
    for voter in sorted(configuration.voters, key=lambda v: v in live):
        step = configuration.without(voter)
        if target.must_leave(voter) and step.voters and keeps_quorum(step, live):
            return step
    return _departure(configuration, live, target)


def _demote_at_once(
    configuration: Configuration, live: Collection[ReplicaId], target: TargetMembership
) -> Configuration | None:
    """A vote is taken before whoever is to get it has it."""
    for voter in configuration.voters:
        step = configuration.with_learner(voter)
        if voter.node_id in target.demoted and step.voters and keeps_quorum(step, live):
            return step
    return _departure(configuration, live, target)


_next_configuration = membership.next_configuration


def _all_caught_up(
    configuration: Configuration,
    storages: Mapping[NodeId, Any],
    live: Collection[ReplicaId],
    caught_up: Collection[ReplicaId],
    target: TargetMembership | None = None,
) -> Configuration | None:
    """Whoever is a member has the data, dead or alive."""
    return _next_configuration(configuration, storages, live, configuration.members, target)


_begun_well = apply_moves._begun


def _begun(partition: PartitionImage, command: ReassignPartition, offset: Offset) -> PartitionImage:
    """A move that is changed on its way goes back to where it was on its way to."""
    return _begun_well(evolve(partition, moving_from=()), command, offset)


def _blindly(image: MetadataImage, envelope: Envelope, offset: Offset) -> tuple[MetadataImage, Any]:
    """What the planner saw is not compared with what there is."""
    command: Any = envelope.command
    topic = image.topic_by_id(command.topic_id)
    if command.expected and topic is not None and command.partition < len(topic.partitions):
        command = ReassignPartition(
            topic_id=command.topic_id,
            partition=command.partition,
            replicas=command.replicas,
            creation_epoch=command.creation_epoch,
            expected=topic.partitions[command.partition].replicas,
            origin=command.origin,
        )
    return apply_moves.reassign_partition(image, replace(envelope, command=command), offset)


def _fit(
    self: Targets, broker: BrokerImage, partition: PartitionImage, replicas: Sequence[NodeId]
) -> str:
    """Whoever lives and has none takes a replica."""
    return "holds it" if broker.node_id in replicas or broker.is_fenced else ""


def _all_overdue(
    survey: Survey, down_since_ms: Mapping[NodeId, float], after_ms: float | None, now_ms: float
) -> DeadBrokers:
    """However many are missing, what they had is made again."""
    if after_ms is None:
        return DeadBrokers()
    return DeadBrokers(
        tuple(n for n, at in sorted(down_since_ms.items()) if now_ms - at >= after_ms)
    )


def _going_on(image: MetadataImage, configuration: Configuration) -> list[NodeId]:
    """Whoever votes goes on, though it drains."""
    return [voter.node_id for voter in configuration.voters]


ELASTIC_BUGS: Final[dict[str, Bug]] = {
    "racks-ignored": Bug(
        patching((MetadataImage, "rack_of", _own_rack)), stress.drains, 5, (), ("RacksHold",)
    ),
    "old-goes-before-new": Bug(
        patching((membership, "_departure", _depart_at_once)),
        stress.drains,
        5,
        (),
        ("FactorHolds",),
    ),
    "members-count-as-caught-up": Bug(
        patching((membership, "next_configuration", _all_caught_up)),
        stress.drains,
        5,
        (),
        ("VotersHaveCaughtUp",),
    ),
    "cancel-forgets-the-beginning": Bug(
        patching((apply_moves, "_begun", _begun)), stress.plans, 5, (), ("CancelIsExact",)
    ),
    "expected-not-compared": Bug(
        patching(
            (
                apply,
                "_HANDLERS",
                {**apply._HANDLERS, ReassignPartition: _blindly},
            )
        ),
        stress.races,
        5,
        (),
        ("OrdersAreOfTheState",),
    ),
    "drained-node-is-a-target": Bug(
        patching((Targets, "_unfit", _fit)), stress.drains, 5, (), ("TargetsAreFit",)
    ),
    "vote-taken-early": Bug(
        patching((membership, "_departure", _demote_at_once)),
        stress.votes,
        5,
        (),
        ("VotesPassOn",),
    ),
    "drained-node-keeps-its-vote": Bug(
        patching((voters, "_staying", _going_on)), stress.votes, 5, (), ("Liveness",), begins_at=2
    ),
    "repair-though-two-are-dead": Bug(
        patching((mover, "find_dead_brokers", _all_overdue)), stress.deaths, 5, (), ("RepairWaits",)
    ),
}
