"""Changes of nodes: what `raftmq node add`, `drain`, `remove`, `cordon` and `maintenance` do to the
state, what they refuse, and how far each change is. Pure.

What an operator asks for is one command: states of nodes and the wanted number of metadata voters
(`ChangeNodes`), or the end of a node (`UnregisterBroker`). Everything else follows from the state:
the metadata group's leader works towards `metadata_target`, the planner of moves (`moves.py`)
takes replicas off draining nodes, and a node that should lead nothing gives away what it leads.
So any controller goes on with it, and a command line that ends costs nothing.

Invariants: all nodes of a call change or none does; nothing is begun that could not end: a drain
wants a place for every replica and a live majority at each step of the metadata group; a node is
removed only when it holds nothing, has no vote and does not live: it is fenced, and the controller
does not hear it either. One that lives and is not heard may be removed: it leads and coordinates
nothing that others would believe, and ends when it hears of it. To hold nothing means for a group
as well that its leader has said so: until then it may have made a voter of a node that was its
target once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final, TypeAlias

from attrs import evolve, frozen

from raftmq.controller.leaders import LeaderTable
from raftmq.controller.moves import Bounds, Stuck, Survey, first_names, forecast, node_progress
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import ChangeNodesCall, Outcome, Outcomes
from raftmq.metadata.commands import ChangeNodes, NodeChange, NodeState, UnregisterBroker
from raftmq.metadata.features import write_error
from raftmq.metadata.image import (
    LEVEL_OF_MOVES,
    MetadataImage,
    PartitionImage,
    all_partitions,
)
from raftmq.metadata.voters import (
    VOTERS_MAX,
    grown_voters,
    shrunk_voters,
    voter_steps,
    voters_obtainable,
    voters_wanted,
)
from raftmq.raft.membership import Configuration
from raftmq.types import METADATA_TOPIC, NodeId

MovesOf: TypeAlias = Callable[[MetadataImage, tuple[NodeId, ...]], Iterable[str]]
IsHeard: TypeAlias = Callable[[NodeId, int], bool]
"""True for a broker of that epoch, fenced or not, whose heartbeats come."""

NAMES_MAX: Final = 10
"""So many partitions are named in one line."""


class Change(StrEnum):
    """What an operator asks of nodes."""

    ADD = "add"
    DRAIN = "drain"
    CANCEL_DRAIN = "cancel-drain"
    REMOVE = "remove"
    CORDON = "cordon"
    UNCORDON = "uncordon"
    MAINTENANCE = "maintenance"
    END_MAINTENANCE = "end-maintenance"
    VOTERS = ""
    """No node changes, only the number of metadata voters."""


_RETURNS: Final = frozenset({Change.CANCEL_DRAIN, Change.UNCORDON, Change.END_MAINTENANCE})
"""With them a node can vote again. Nobody asks for an even number of voters: it came of a drain for
which there was no successor, and what a node that is back allows is better."""

STATES: Final[Mapping[Change, tuple[frozenset[NodeState], NodeState]]] = {
    Change.ADD: (frozenset({NodeState.NEW}), NodeState.ACTIVE),
    Change.DRAIN: (
        frozenset({NodeState.NEW, NodeState.ACTIVE, NodeState.CORDONED, NodeState.MAINTENANCE}),
        NodeState.DRAINING,
    ),
    Change.CANCEL_DRAIN: (frozenset({NodeState.DRAINING}), NodeState.ACTIVE),
    Change.CORDON: (frozenset({NodeState.ACTIVE}), NodeState.CORDONED),
    Change.UNCORDON: (frozenset({NodeState.CORDONED}), NodeState.ACTIVE),
    Change.MAINTENANCE: (
        frozenset({NodeState.ACTIVE, NodeState.CORDONED}),
        NodeState.MAINTENANCE,
    ),
    Change.END_MAINTENANCE: (frozenset({NodeState.MAINTENANCE}), NodeState.ACTIVE),
}
"""For each change the states from which it leads, and that to which it leads."""
_WAYS_OUT: Final[Mapping[NodeState, str]] = {
    NodeState.NEW: "it is new and takes no data: `raftmq node add {}` first",
    NodeState.CORDONED: "it is cordoned: `raftmq node uncordon {}` first",
    NodeState.DRAINING: "it drains: `raftmq node drain {} --cancel` first",
    NodeState.MAINTENANCE: "it is in maintenance: `raftmq node maintenance {} --end` first",
    NodeState.ACTIVE: "it is active",
}
_DONE: Final[Mapping[Change, str]] = {
    Change.ADD: "added",
    Change.DRAIN: "begun",
    Change.CANCEL_DRAIN: "cancelled",
    Change.REMOVE: "removed",
    Change.CORDON: "cordoned",
    Change.UNCORDON: "uncordoned",
    Change.MAINTENANCE: "begun",
    Change.END_MAINTENANCE: "ended",
    Change.VOTERS: "begun",
}


def plan_change(
    image: MetadataImage,
    configuration: Configuration | None,
    first_voters: Sequence[NodeId],
    call: ChangeNodesCall,
    moves_of: MovesOf,
    is_heard: IsHeard,
    leader: NodeId | None = None,
) -> tuple[ChangeNodes | UnregisterBroker | None, Outcomes]:
    """Judge a call: the command that does it, None when there is nothing to do, and the answer: one
    row with the verdict, then one for each step.

    `leader` is that of the metadata group. `moves_of` says in words which replicas move off or onto
    these nodes in the state that it is given; it raises KafkaError where one has no place to go to.
    """
    try:
        plan = _Plan(image, configuration, first_voters, call, moves_of, is_heard, leader)
        command, steps = plan.make()
    except KafkaError as error:
        return None, (Outcome(name="verdict", code=error.code, message=error.message),)
    if command is None:
        return None, (Outcome(name="verdict", message="done already"),)
    message = "would begin" if call.dry_run else _DONE[Change(call.change)]
    rows = (
        Outcome(name="verdict", message=message),
        *(Outcome(name="step", message=text) for text in steps),
    )
    return (None if call.dry_run else command), rows


class _Plan:
    """One call, judged by one state."""

    def __init__(
        self,
        image: MetadataImage,
        configuration: Configuration | None,
        first_voters: Sequence[NodeId],
        call: ChangeNodesCall,
        moves_of: MovesOf,
        is_heard: IsHeard,
        leader: NodeId | None,
    ) -> None:
        if configuration is None:
            raise KafkaError(
                "metadata does not run on Raft here", code=ErrorCode.UNSUPPORTED_VERSION
            )
        if reason := write_error("a change of nodes", LEVEL_OF_MOVES, image):
            raise KafkaError(reason, code=ErrorCode.UNSUPPORTED_VERSION)
        try:
            self.change = Change(call.change)
        except ValueError:
            raise _invalid(f"there is no change of nodes named {call.change!r}") from None
        self.image = image
        self.configuration = configuration
        self.first_voters = first_voters
        self.node_ids = tuple(dict.fromkeys(NodeId(n) for n in call.node_ids))
        self.voters = call.voters
        self.moves_of = moves_of
        self.is_heard = is_heard
        self.leader = leader

    def make(self) -> tuple[ChangeNodes | UnregisterBroker | None, list[str]]:
        if self.change is Change.REMOVE:
            return self._remove()
        if self.change is Change.VOTERS and self.voters is None:
            raise _invalid("neither a node nor a number of voters is named")
        if bool(self.node_ids) is (self.change is Change.VOTERS):
            raise _invalid(f"{self.change.value or 'voters'}: which nodes?")
        changes = [self._change(node_id) for node_id in self.node_ids]
        due = tuple(change for change in changes if change is not None)
        after = self.image.with_states({change.node_id: change.state for change in due})
        wanted = self._wanted(after)
        if not due and wanted is None:
            return None, []
        if wanted is not None:
            after = evolve(after, voters_wanted=wanted)
        if self.change is Change.DRAIN and not _has_active(after):
            raise KafkaError(
                "no active node would be left to take what is there: start and add another one",
                code=ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            )
        steps: list[str] = []
        if self.change in (Change.ADD, Change.DRAIN, Change.CANCEL_DRAIN, Change.VOTERS):
            steps += voter_steps(after, self.configuration, self.first_voters, self.leader)
        if self.change in (Change.ADD, Change.DRAIN):
            steps += self.moves_of(after, tuple(change.node_id for change in due))
        if self.change is Change.MAINTENANCE:
            steps += _maintenance_steps(after, self.configuration, self.node_ids)
        return ChangeNodes(changes=due, voters=wanted), steps

    def _change(self, node_id: NodeId) -> NodeChange | None:
        """The new state of a node, None when it has it."""
        broker = self.image.brokers.get(node_id)
        if broker is None:
            raise _unknown(self.image, self.configuration, node_id)
        if self.change is Change.VOTERS:
            return None
        sources, state = STATES[self.change]
        if broker.state is state:
            return None
        if broker.state not in sources:
            way_out = _WAYS_OUT[broker.state].format(node_id)
            raise KafkaError(
                f"node {node_id}: {self.change.value} does not apply, {way_out}",
                code=ErrorCode.INVALID_REQUEST,
            )
        leaving = self.image.leaving()
        if node_id in leaving:
            raise _invalid(
                f"node {node_id} is being replaced by node {leaving[node_id]}: it goes with that"
            )
        if self.change is Change.DRAIN and node_id in leaving.values():
            raise _invalid(f"node {node_id} is about to take another node's place")
        if self.change is Change.ADD and broker.is_fenced:
            raise KafkaError(
                f"node {node_id} is down, or has not caught up with the metadata log yet",
                code=ErrorCode.BROKER_NOT_AVAILABLE,
            )
        return NodeChange(node_id, state)

    def _wanted(self, after: MetadataImage) -> int | None:
        """The number of voters to store, None when it stays."""
        now = voters_wanted(self.image, self.first_voters)
        if self.voters is not None:
            wanted = self._checked_voters(after)
        elif self.change is Change.ADD or (self.change in _RETURNS and now % 2 == 0):
            wanted = grown_voters(self.image, after, self.first_voters)
        elif self.change is Change.CANCEL_DRAIN:
            wanted = now
        elif self.change is Change.DRAIN:
            wanted = shrunk_voters(after, self.configuration, self.first_voters)
        else:
            return None
        if wanted != now:
            return wanted
        # Its successor may vote by now, or be about to: without a number in the state nothing
        # would take the surplus back.
        is_cancelled = (
            self.change is Change.CANCEL_DRAIN and after.brokers is not self.image.brokers
        )
        may_exceed = is_cancelled or len(self.configuration.voters) > wanted
        return wanted if may_exceed and not self.image.voters_wanted else None

    def _checked_voters(self, after: MetadataImage) -> int:
        wanted = self.voters or len(self.first_voters)
        if not 1 <= wanted <= VOTERS_MAX or wanted % 2 == 0:
            raise _invalid(
                f"{wanted} voters: an odd number from 1 to {VOTERS_MAX} is wanted, since an even "
                "one survives no more losses than the odd one below it"
            )
        obtainable = voters_obtainable(after, self.configuration)
        if wanted > obtainable:
            raise KafkaError(
                f"{wanted} voters: only {obtainable} nodes could vote, being live and active: "
                "`raftmq node list` shows them",
                code=ErrorCode.INVALID_REPLICATION_FACTOR,
            )
        return wanted

    # ---- the end of a node ----

    def _remove(self) -> tuple[UnregisterBroker | None, list[str]]:
        if len(self.node_ids) != 1:
            raise _invalid("one node at a time is removed")
        [node_id] = self.node_ids
        broker = self.image.brokers.get(node_id)
        if broker is None:
            if node_id in self.image.removed:
                return None, []
            raise _unknown(self.image, self.configuration, node_id)
        reasons = obstacles(self.image, self.configuration, node_id, self.is_heard)
        if reasons:
            raise KafkaError(
                f"node {node_id} cannot be removed: {'; '.join(reasons)}",
                code=ErrorCode.POLICY_VIOLATION,
            )
        return UnregisterBroker(node_id=node_id), [
            f"node {node_id} is forgotten, and its storage {broker.storage_id:016x} refused from "
            "now on; with an empty data folder it may join anew"
        ]


def lives(image: MetadataImage, node_id: NodeId, is_heard: IsHeard) -> bool:
    """True for a broker that is not fenced, or whose heartbeats come although it is."""
    broker = image.brokers.get(node_id)
    return broker is not None and (not broker.is_fenced or is_heard(node_id, broker.epoch))


def obstacles(
    image: MetadataImage, configuration: Configuration, node_id: NodeId, is_heard: IsHeard
) -> list[str]:
    """Why a node cannot be removed yet, each with what to do about it."""
    reasons = []
    leaving = image.leaving()
    if node_id in leaving:
        reasons.append(f"it is being replaced by node {leaving[node_id]}, and forgotten with that")
    elif taken := [old_id for old_id, new_id in leaving.items() if new_id == node_id]:
        reasons.append(f"it is about to take the place of node {taken[0]}")
    held = [
        f"{topic.name}-{partition.index}"
        for topic, partition in all_partitions(image)
        if node_id in _concerned(partition)
    ]
    votes = any(voter.node_id == node_id for voter in configuration.voters)
    if held:
        reasons.append(f"it holds replicas of {_counted(held)}")
    if votes:
        reasons.append("it votes on metadata")
    if held or votes:
        reasons.append(f"`raftmq node drain {node_id}` moves all of that to other nodes")
    doubtful = [
        f"{topic.name}-{partition.index}"
        for topic, partition in all_partitions(image)
        if node_id in partition.dismissed
    ]
    if doubtful:
        reasons.append(
            f"it was to hold {_counted(doubtful)}, and no leader has said yet that it is out of "
            "the group: wait until there is a leader"
        )
    if lives(image, node_id, is_heard):
        reasons.append("it lives: stop it, or wait until the others have noticed that it stopped")
    return reasons


def _concerned(partition: PartitionImage) -> Iterable[NodeId]:
    """The nodes that hold a partition, are to hold it, or would again if its move was cancelled."""
    return (
        *partition.replicas,
        *partition.voters,
        *partition.planned,
        *partition.moving_from,
    )


def _maintenance_steps(
    image: MetadataImage, configuration: Configuration, node_ids: Sequence[NodeId]
) -> list[str]:
    """What stopping these nodes would cost."""
    alone, lost = [], []
    for topic, partition in all_partitions(image):
        concerned = [node_id for node_id in partition.voters if node_id in node_ids]
        if not concerned:
            continue
        name = f"{topic.name}-{partition.index}"
        if len(concerned) == len(partition.voters):
            alone.append(name)
        elif not _has_majority(image, partition.voters, node_ids):
            lost.append(name)
    steps = []
    if alone:
        steps.append(f"no other node has {_counted(alone)}: unavailable once it is stopped")
    if lost:
        steps.append(f"once it is stopped no majority is left of {_counted(lost)}")
    voting = [voter.node_id for voter in configuration.voters]
    if any(n in voting for n in node_ids) and not _has_majority(image, voting, node_ids):
        steps.append(f"{METADATA_TOPIC}: once it is stopped no majority of voters is left")
    return steps


def _has_majority(
    image: MetadataImage, voters: Sequence[NodeId], without: Sequence[NodeId]
) -> bool:
    alive = [n for n in voters if n not in without and image.live_epoch(n) is not None]
    return len(alive) > len(voters) // 2


def _has_active(image: MetadataImage) -> bool:
    return any(broker.state is NodeState.ACTIVE for broker in image.brokers.values())


def _counted(names: Sequence[str]) -> str:
    """Some partitions by name, and how many they are."""
    plural = "s" if len(names) > 1 else ""
    return f"{len(names)} partition{plural} ({first_names(names, NAMES_MAX)})"


def _invalid(message: str) -> KafkaError:
    return KafkaError(message, code=ErrorCode.INVALID_REQUEST)


def _unknown(image: MetadataImage, configuration: Configuration, node_id: NodeId) -> KafkaError:
    if node_id in image.removed:
        text = f"node {node_id} was removed"
    elif any(member.node_id == node_id for member in configuration.members):
        text = f"node {node_id} has never registered: start it"
    else:
        text = (
            f"node {node_id} has not joined: start it with the `peers` and `cluster_id` of this "
            "cluster"
        )
    return KafkaError(text, code=ErrorCode.BROKER_ID_NOT_REGISTERED)


# ---- progress ----


@frozen(slots=True)
class ChangeProgress:
    """What a node still has of what it should not have.

    Attributes:
        partitions: that it holds, or is to hold, or may still vote in.
        leaders: of these, those that it leads.
        kept_leaders: of these, those that nobody else could lead just now.
        groups: consumer groups that it coordinates.
        is_voter: it votes on metadata.
        is_controller: it leads the metadata group.
        stuck: partitions that do not leave it just now, each with the reason.
    """

    node_id: NodeId
    state: NodeState
    partitions: int
    leaders: int
    kept_leaders: int
    groups: int
    is_voter: bool
    is_controller: bool
    stuck: tuple[Stuck, ...]

    @property
    def is_empty(self) -> bool:
        """True when it may be removed once it is stopped."""
        return not self.partitions and not self.is_voter and not self.groups

    @property
    def is_idle(self) -> bool:
        """True when nobody misses it while it is stopped for a moment."""
        return self.leaders == self.kept_leaders and not self.groups and not self.is_controller


def changes_under_way(
    survey: Survey,
    configuration: Configuration,
    leaders: LeaderTable,
    controller_id: NodeId | None,
) -> list[ChangeProgress]:
    """How far every node is that is not simply active."""
    image, bounds = survey.image, Bounds()
    voting = [voter.node_id for voter in configuration.voters]
    rows = []
    for node_id in sorted(image.brokers):
        if image.brokers[node_id].state is NodeState.ACTIVE:
            continue
        moves = node_progress(survey, leaders, bounds, node_id)
        rows.append(
            ChangeProgress(
                node_id=node_id,
                state=moves.state,
                partitions=moves.replicas,
                leaders=moves.leaderships,
                kept_leaders=moves.kept,
                groups=moves.claims,
                is_voter=node_id in voting,
                is_controller=node_id == controller_id,
                stuck=moves.stuck,
            )
        )
    return rows


# ---- what moves ----


def drain_steps(
    image: MetadataImage, leaders: LeaderTable, bounds: Bounds, node_ids: Sequence[NodeId]
) -> list[str]:
    """How many replicas go from these nodes to which others, in words.

    Raises:
        KafkaError: some have no place to go to.
    """
    expected = forecast(image, leaders, bounds, node_ids)
    if expected.stuck:
        names = [f"{row.topic}-{row.partition}" for row in expected.stuck]
        raise KafkaError(
            f"{_counted(names)} cannot go: {expected.stuck[0].reason}. Start and add another node, "
            "or give one of these room",
            code=ErrorCode.INVALID_REPLICA_ASSIGNMENT,
        )
    counts: dict[tuple[NodeId, NodeId], int] = {}
    for move in expected.moves:
        for old, new in zip(move.before, move.after, strict=True):
            if old != new:
                counts[old, new] = counts.get((old, new), 0) + 1
    steps = [
        f"{count} partition replicas go from node {old} to node {new}"
        for (old, new), count in sorted(counts.items())
    ]
    if expected.leaderless:
        names = [f"{row.topic}-{row.partition}" for row in expected.leaderless]
        steps.append(f"{_counted(names)} must wait: {expected.leaderless[0].reason}")
    return steps
