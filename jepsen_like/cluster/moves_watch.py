"""The watch over brokers that come and go, and over what is moved for them.

    RacksHold           a planner puts no two replicas into a rack where another had room
    TargetsAreFit       no replica goes to what drains, is new, rests, is about to leave or is down
    RepairWaits         dead brokers are not replaced while more than one is missing
    FactorHolds         no partition is ordered to have fewer replicas; no voter goes before as many
                        as are wanted vote
    VotersHaveCaughtUp  whoever gets a vote has what was committed a moment ago
    VotesPassOn         no vote on metadata is taken before as many as are wanted vote
    CancelIsExact       a move that is cancelled goes back to the replicas of before it began
    OrdersAreOfTheState what is ordered replaces the very replicas that the planner saw

Orders are judged by the image that the controller had when it gave them. Observes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attrs import define

from jepsen_like.cluster.commands_watch import CommandListener
from jepsen_like.invariants import Invariants
from raftmq.metadata.commands import (
    Envelope,
    NodeState,
    Origin,
    PlanMoves,
    ReassignPartition,
)
from raftmq.metadata.image import (
    BrokerImage,
    MetadataImage,
    PartitionImage,
    all_partitions,
    holds,
)
from raftmq.metadata.results import MoveOutcomes, Rejection, Result
from raftmq.metadata.state_machine import MetadataMachine, Skip
from raftmq.types import NodeId, Offset, TopicId

if TYPE_CHECKING:
    from jepsen_like.cluster.node import SimCore

Key = tuple[TopicId, int, int]
"""A partition: its topic, its number, its creation epoch."""
_ANYWHERE = (Origin.REPAIR, Origin.DRAIN, Origin.REPLACE)
"""Moves whose target the controller chooses."""


class MovesWatch:
    """What controllers order, and what comes of it."""

    def __init__(self, invariants: Invariants) -> None:
        self._invariants = invariants

    def attach(self, core: SimCore) -> None:
        """Be told what one node proposes and applies."""
        engine = core.engine
        propose = engine.propose

        def judged(command: Any, **named: Any) -> Any:
            if isinstance(command, ReassignPartition):
                self._judge_order(engine.image, command)
            elif isinstance(command, PlanMoves) and command.origin is Origin.BALANCE:
                self._judge_balance(engine.image, command)
            return propose(command, **named)

        engine.propose = judged  # type: ignore[method-assign]  # it judges before it does
        core.machine.add_listener(_Listener(self._invariants, core.machine))

    # ---- orders ----

    def _judge_order(self, image: MetadataImage, command: ReassignPartition) -> None:
        partition = _partition(image, command.topic_id, command.partition)
        after = command.replicas
        if partition is None or not command.expected or after == partition.moving_from:
            return
        what = f"{command.origin} moves {command.partition} from {partition.replicas} to {after}"
        if command.origin is not Origin.OPERATOR and len(after) < len(partition.replicas):
            self._invariants.breach("FactorHolds", what)
        if command.origin not in _ANYWHERE:
            return
        arriving = [n for n in after if n not in partition.replicas]
        for node_id in arriving:
            if not _is_fit(image, node_id):
                broker = image.brokers.get(node_id)
                self._invariants.breach("TargetsAreFit", f"{what}: {broker}")
        self._judge_racks(image, what, arriving, after)
        missing = [n for n in sorted(image.brokers) if _is_missing(image, image.brokers[n])]
        if command.origin is Origin.REPAIR and arriving and len(missing) > 1:
            self._invariants.breach("RepairWaits", f"{what} while {missing} are down")

    def _judge_racks(
        self, image: MetadataImage, what: str, arriving: list[NodeId], after: Sequence[NodeId]
    ) -> None:
        staying = [n for n in after if _stays(image, n)]
        racks = [image.brokers[n].rack for n in staying]
        if not any(racks.count(image.brokers[n].rack) > 1 for n in arriving if n in staying):
            return
        taken = {b.rack for n in after if (b := image.brokers.get(n)) is not None}
        better = [
            n
            for n in sorted(image.brokers)
            if n not in after and image.brokers[n].rack not in taken and _is_fit(image, n)
        ]
        if better:
            self._invariants.breach("RacksHold", f"{what}, in {racks}: {better} could take it")

    def _judge_balance(self, image: MetadataImage, command: PlanMoves) -> None:
        for move in command.moves:
            partition = _partition(image, move.topic_id, move.partition)
            if partition is None or not move.replicas or move.expected != partition.replicas:
                continue
            before, after = (
                {b.rack for n in nodes if (b := image.brokers.get(n)) is not None}
                for nodes in (partition.replicas, move.replicas)
            )
            what = f"balance moves {move.partition} from {partition.replicas} to {move.replicas}"
            if len(after) < len(before):
                self._invariants.breach("RacksHold", what)
            if len(move.replicas) != len(partition.replicas):
                self._invariants.breach("FactorHolds", what)


def _partition(image: MetadataImage, topic_id: TopicId, number: int) -> PartitionImage | None:
    topic = image.topic_by_id(topic_id)
    if topic is None or not 0 <= number < len(topic.partitions):
        return None
    return topic.partitions[number]


def _is_fit(image: MetadataImage, node_id: NodeId) -> bool:
    """True where a replica may be put."""
    broker = image.brokers.get(node_id)
    return (
        broker is not None
        and broker.state is NodeState.ACTIVE
        and not broker.is_fenced
        and node_id not in image.leaving()
    )


def _stays(image: MetadataImage, node_id: NodeId) -> bool:
    """True for a broker that lives and is not about to lose what it has."""
    broker = image.brokers.get(node_id)
    return (
        broker is not None
        and broker.state is not NodeState.DRAINING
        and not broker.is_fenced
        and node_id not in image.leaving()
    )


def _is_missing(image: MetadataImage, broker: BrokerImage) -> bool:
    """True for a broker that is down, though nobody sent it away, and has data."""
    return (
        broker.is_fenced
        and broker.state not in (NodeState.DRAINING, NodeState.MAINTENANCE)
        and broker.node_id not in image.leaving()
        and any(holds(partition, broker.node_id) for _, partition in all_partitions(image))
    )


@define
class _Move:
    """The replicas before a move that is under way."""

    before: tuple[NodeId, ...]


class _Listener(CommandListener):
    """One node's machine, as it applies."""

    def __init__(self, invariants: Invariants, machine: MetadataMachine) -> None:
        self._invariants = invariants
        self._machine = machine
        self._image = machine.image
        self._moves: dict[Key, _Move] = {}
        self._begin(machine.image)

    def _begin(self, image: MetadataImage) -> None:
        self._image = image
        self._moves = {
            key: _Move(p.moving_from) for key, p in _by_key(image).items() if p.moving_from
        }

    def command_applied(self, envelope: Envelope, result: Result, offset: Offset) -> None:
        """Judge what a command did to partitions."""
        before, after, command = self._image, self._machine.image, envelope.command
        self._image = after
        if before.topics is after.topics:
            return
        known = _by_key(before)
        is_order = isinstance(command, ReassignPartition) and not isinstance(result, Rejection)
        for key, partition in _by_key(after).items():
            old = known.pop(key, None)
            if old is partition or old is None:
                continue
            if is_order and old.replicas != partition.replicas:
                self._judge_expected(command, old, offset)  # type: ignore[arg-type]  # as is_order
            self._judge_memory(key, old, partition, offset)
            if isinstance(command, PlanMoves) and isinstance(result, MoveOutcomes):
                self._judge_cancel(key, command, old, partition, offset)
            if not partition.moving_from:
                self._moves.pop(key, None)
        for key in known:
            self._moves.pop(key, None)

    def _judge_expected(
        self, command: ReassignPartition, old: PartitionImage, offset: Offset
    ) -> None:
        if command.expected and command.expected != old.replicas:
            told = f"{command} at {offset} replaces {old.replicas}"
            self._invariants.breach("OrdersAreOfTheState", told)

    def _judge_memory(
        self, key: Key, old: PartitionImage, new: PartitionImage, offset: Offset
    ) -> None:
        if not new.moving_from:
            return
        move = self._moves.setdefault(key, _Move(old.moving_from or old.replicas))
        if new.moving_from != move.before:
            told = f"{key} at {offset} would go back to {new.moving_from}, not to {move.before}"
            self._invariants.breach("CancelIsExact", told)

    def _judge_cancel(
        self,
        key: Key,
        command: PlanMoves,
        old: PartitionImage,
        new: PartitionImage,
        offset: Offset,
    ) -> None:
        if not any((m.topic_id, m.partition) == key[:2] and not m.replicas for m in command.moves):
            return
        move = self._moves.get(key)
        wanted = old.replicas if move is None else move.before
        if new.replicas != wanted or new.planned:
            told = f"{key} at {offset} went back to {new.replicas} ({new.planned}), not to {wanted}"
            self._invariants.breach("CancelIsExact", told)

    def command_skipped(self, skip: Skip) -> None:
        """What it would have done is not judged."""
        self._image = self._machine.image

    def state_restored(self, image: MetadataImage) -> None:
        """A snapshot: moves are as it says."""
        self._begin(image)


def _by_key(image: MetadataImage) -> dict[Key, PartitionImage]:
    return {
        (topic.topic_id, partition.index, partition.creation_epoch): partition
        for topic, partition in all_partitions(image)
    }
