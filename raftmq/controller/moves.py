"""Moves of replicas: which are due, where each goes, and what keeps one from it. Pure.

A replica must go where its broker is dead for long (`repair`), is drained (`drain`) or gives way to
another (`replace`); other moves are planned, by an operator or for the balance. The image holds all
of that, so any controller reads from it what is left to do: `next_moves` names the commands that
are due now, each compared at apply with the replicas that it was computed from. A partition's own
leader carries its move out and reports it (`partition_target`).

`Survey` keeps up, from image to image, what would otherwise take a look at every partition: those
that a broker holds, that move, that are planned, that must go. A look costs as much as what has
changed, plus a bounded number of partitions that wait.

Invariants: a move keeps the number of replicas; it puts none on a broker that is not active, is
down or has no room, and no two in one rack while there are racks enough; repair comes before drains
and replacements, those before an operator's moves, those before the balance. At most `moves_max`
moves hold a place: one that cannot go on holds none, and one that takes long holds a quarter, so
that no partition waits behind a large one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, TypeAlias

from attrs import field, frozen

from raftmq.controller.leaders import Key, LeaderTable
from raftmq.metadata.commands import (
    NodeState,
    Origin,
    PlanMoves,
    PlannedMove,
    ReassignPartition,
)
from raftmq.metadata.image import (
    EMPTY_IMAGE,
    LEVEL_OF_MOVES,
    BrokerImage,
    MetadataImage,
    PartitionImage,
    successor_of,
)
from raftmq.types import NodeId

Replicas: TypeAlias = tuple[NodeId, ...]

PRECEDENCE: Final = {
    Origin.REPAIR: 0,
    Origin.DRAIN: 1,
    Origin.REPLACE: 1,
    Origin.OPERATOR: 2,
    Origin.NONE: 2,
    Origin.BALANCE: 3,
}
"""Whose moves begin first."""
LOOKS_MAX: Final = 1_000
"""Partitions that wait for a move and are looked at in one turn; the others come in the next."""
LONG_MS: Final = 60_000.0
"""A move that has taken so long holds a quarter of a place."""
_WHOLE, _QUARTER = 4, 1
_NAMED_MAX: Final = 8


def _boundless(_node_id: NodeId) -> int:
    return 1 << 31


@frozen(slots=True)
class Bounds:
    """What a controller knows beside the image and the leaders.

    Attributes:
        moves_max: so many moves may hold a place.
        limit_of: how many replicas a broker has room for.
        dead: brokers whose replicas are to be made again elsewhere.
        emptied: brokers that came back with another disk than they went away with.
    """

    moves_max: int = 4
    limit_of: Callable[[NodeId], int] = field(default=_boundless, eq=False)
    dead: Replicas = ()
    emptied: Replicas = ()


@frozen(slots=True)
class Step:
    """One command, and what to tell of it.

    Attributes:
        what: begun, changed or cancelled, of a move; dropped, of a plan.
        reason: why, where that does not follow from the origin.
    """

    command: ReassignPartition | PlanMoves
    key: Key
    what: str
    origin: Origin
    before: Replicas
    after: Replicas
    reason: str = ""


def is_moving(partition: PartitionImage) -> bool:
    """True from the order to move until the leader has reported that it is done."""
    return bool(partition.moving_from) or tuple(sorted(partition.replicas)) != partition.voters


def going_nodes(image: MetadataImage, dead: Sequence[NodeId] = ()) -> dict[NodeId, Origin]:
    """The brokers that are to lose all their replicas, each with the reason."""
    leaving = image.leaving()
    going = {}
    for node_id in sorted({*image.brokers, *leaving}):
        broker = image.brokers.get(node_id)
        if broker is not None and broker.state is NodeState.DRAINING:
            going[node_id] = Origin.DRAIN
        elif node_id in leaving:
            going[node_id] = Origin.REPLACE
        elif node_id in dead:
            going[node_id] = Origin.REPAIR
    return going


# ---- what an image says of moves ----


class Survey:
    """What matters for moves in the newest image, kept up as images follow each other.

    Attributes:
        image: the newest that was seen.
        going: the brokers that are to lose all their replicas.
        partitions: all of them.
        named: by broker, the partitions that are to be on it.
        held: by broker, the same and those in which it votes.
        mendable: by broker, those of them that keep a majority without it.
        moving: partitions that move, since when each has had its present target here.
        planned: by origin (operator or balance), partitions with a plan that has not begun.
        due: partitions with a replica on a broker that is going, in the order of their turns.
        looked_count: partitions that were looked at one by one since the beginning.
    """

    def __init__(
        self, image: MetadataImage = EMPTY_IMAGE, dead: Sequence[NodeId] = (), now_ms: float = 0.0
    ) -> None:
        self.image = EMPTY_IMAGE
        self.going: dict[NodeId, Origin] = {}
        self.partitions: dict[Key, PartitionImage] = {}
        self.named: dict[NodeId, dict[Key, None]] = {}
        self.held: dict[NodeId, dict[Key, None]] = {}
        self.mendable: dict[NodeId, dict[Key, None]] = {}
        self.moving: dict[Key, float] = {}
        self.planned: dict[Origin, dict[Key, None]] = {Origin.OPERATOR: {}, Origin.BALANCE: {}}
        self.due: dict[Key, None] = {}
        self.looked_count = 0
        self.see(image, dead, now_ms)

    def see(self, image: MetadataImage, dead: Sequence[NodeId], now_ms: float) -> None:
        """Keep up with the newest image, and with the brokers that are dead."""
        before, self.image = self.image, image
        going = going_nodes(image, dead)
        has_other_goers = going != self.going
        self.going = going
        if before.topics is not image.topics:
            self._see_topics(before, image, now_ms)
        if has_other_goers:
            self._make_queue()

    def topic_name(self, key: Key) -> str:
        """The name of a partition's topic."""
        return self.image.topic_names[key[0]]

    def holds_any(self, node_id: NodeId) -> bool:
        """True while a broker has, or is to have, a replica."""
        return bool(self.held.get(node_id))

    def has_any(self, node_id: NodeId) -> bool:
        """The same, or it may get one back: a move away from it may still be cancelled."""
        return self.holds_any(node_id) or any(
            node_id in self.partitions[key].moving_from for key in self.moving
        )

    def _see_topics(self, before: MetadataImage, after: MetadataImage, now_ms: float) -> None:
        if before.topic_names is not after.topic_names:
            for topic_id in sorted(before.topic_names):
                gone = before.topic_by_id(topic_id)
                if topic_id not in after.topic_names and gone is not None:
                    for partition in gone.held:
                        self._forget((topic_id, partition.index))
        for topic in after.topics_by_id():
            old = before.topics.get(topic.name)
            if old is topic:
                continue
            is_same = old is not None and old.topic_id == topic.topic_id
            known = old if is_same else None
            for partition in topic.held:
                at = partition.index
                if known is None or known.partition(at) is not partition:
                    self._put((topic.topic_id, at), partition, now_ms)
            for partition in () if known is None else known.held:
                if topic.partition(partition.index) is None:
                    self._forget((topic.topic_id, partition.index))

    def _put(self, key: Key, partition: PartitionImage, now_ms: float) -> None:
        self.looked_count += 1
        old = self.partitions.get(key)
        since = self.moving.pop(key, now_ms)
        if old is not None:
            self._take_out(key, old)
            if old.replicas != partition.replicas:
                since = now_ms
        self.partitions[key] = partition
        for node_id in partition.replicas:
            self.named.setdefault(node_id, {})[key] = None
        for node_id in (*partition.replicas, *partition.voters):
            self.held.setdefault(node_id, {})[key] = None
            others = sum(n != node_id for n in partition.voters)
            if 2 * others > len(partition.voters):
                self.mendable.setdefault(node_id, {})[key] = None
        if is_moving(partition):
            self.moving[key] = since
        if partition.planned:
            self.planned[_planner(partition)][key] = None
        if any(node_id in self.going for node_id in partition.replicas):
            self.due.setdefault(key)
        else:
            self.due.pop(key, None)

    def _forget(self, key: Key) -> None:
        old = self.partitions.pop(key, None)
        if old is not None:
            self._take_out(key, old)
            self.moving.pop(key, None)
            self.due.pop(key, None)

    def _take_out(self, key: Key, old: PartitionImage) -> None:
        for node_id in old.replicas:
            self.named[node_id].pop(key, None)
        for node_id in (*old.replicas, *old.voters):
            self.held[node_id].pop(key, None)
            self.mendable.get(node_id, {}).pop(key, None)
        for keys in self.planned.values():
            keys.pop(key, None)

    def _make_queue(self) -> None:
        names = self.image.topic_names
        chosen: dict[Key, int] = {}
        for node_id, origin in self.going.items():
            for key in self.named.get(node_id, {}):
                rank = PRECEDENCE[origin]
                chosen[key] = min(rank, chosen.get(key, rank))
        self.looked_count += len(chosen)
        self.due = dict.fromkeys(sorted(chosen, key=lambda k: (chosen[k], names[k[0]], k[1])))


def _planner(partition: PartitionImage) -> Origin:
    is_balance = partition.origin is Origin.BALANCE
    return Origin.BALANCE if is_balance else Origin.OPERATOR


# ---- where a replica may go ----


@frozen(slots=True)
class Relocation:
    """Where a partition's replicas go: those that must leave are replaced as far as possible.

    Attributes:
        stuck: why a replica that must go cannot, for each such broker.
    """

    replicas: Replicas
    origin: Origin = Origin.NONE
    stuck: Mapping[NodeId, str] = field(factory=dict)


class Targets:
    """The brokers that may take replicas, with what was given to them since the image."""

    def __init__(self, survey: Survey, bounds: Bounds) -> None:
        image = survey.image
        self._image = image
        self._going = survey.going
        self._leaving = image.leaving()
        self._limit_of = bounds.limit_of
        self._brokers = [image.brokers[node_id] for node_id in sorted(image.brokers)]
        self._counts = {n: len(keys) for n, keys in survey.named.items()}
        self._held = {n: len(keys) for n, keys in survey.held.items()}
        self._open_racks = [
            image.rack_of(broker.node_id)
            for broker in self._brokers
            if broker.takes_replicas and broker.node_id not in self._going
        ]

    def take(self, partition: PartitionImage, replicas: Replicas) -> None:
        """A partition is ordered onto these brokers."""
        for node_id in replicas:
            if node_id not in partition.replicas:
                self._counts[node_id] = self._counts.get(node_id, 0) + 1
                if node_id not in partition.voters:
                    self._held[node_id] = self._held.get(node_id, 0) + 1
        for node_id in partition.replicas:
            if node_id not in replicas:
                self._counts[node_id] -= 1

    def has_room(self, node_id: NodeId) -> bool:
        """True while a broker may hold another replica."""
        return self._held.get(node_id, 0) < self._limit_of(node_id)

    def moved(self, partition: PartitionImage) -> Relocation:
        """Where the replicas of brokers that are going should be instead, in the same order."""
        going = self._going
        leaving = [n for n in partition.replicas if n in going]
        leaving.sort(key=lambda n: PRECEDENCE[going[n]])
        kept = [n for n in partition.replicas if n not in going]
        replicas = list(partition.replicas)
        origin, stuck = Origin.NONE, {}
        for node_id in leaving:
            chosen = self._choose(partition, node_id, replicas, kept)
            if isinstance(chosen, str):
                stuck[node_id] = chosen
                continue
            replicas[replicas.index(node_id)] = chosen
            kept.append(chosen)
            origin = origin or going[node_id]
        return Relocation(tuple(replicas), origin, stuck)

    def _choose(
        self,
        partition: PartitionImage,
        leaving: NodeId,
        replicas: Sequence[NodeId],
        kept: Sequence[NodeId],
    ) -> NodeId | str:
        """The broker that takes a replica, or why none can. A free rack comes first, then a named
        successor, then a broker that still has the data, then the one with the fewest replicas."""
        image = self._image
        successor = successor_of(self._leaving, leaving)
        racks = {image.rack_of(node_id): node_id for node_id in kept}
        open_racks = {*racks, *self._open_racks}
        must_spread = len(open_racks) >= len(replicas)
        best: tuple[tuple[int, bool, bool, int, NodeId], NodeId] | None = None
        reasons = []
        for broker in self._brokers:
            node_id = broker.node_id
            if node_id == leaving:
                continue
            reason = self._unfit(broker, partition, replicas)
            neighbour = racks.get(image.rack_of(node_id))
            if not reason and neighbour is not None and must_spread:
                reason = f"is in rack {broker.rack} like node {neighbour}"
            if reason:
                reasons.append(f"node {node_id} {reason}")
                continue
            crowd = sum(image.rack_of(n) == image.rack_of(node_id) for n in kept)
            has_data = node_id in partition.voters
            count = self._counts.get(node_id, 0)
            rank = crowd, node_id != successor, not has_data, count, node_id
            if best is None or rank < best[0]:
                best = rank, node_id
        return best[1] if best is not None else _no_target(leaving, reasons)

    def _unfit(
        self, broker: BrokerImage, partition: PartitionImage, replicas: Sequence[NodeId]
    ) -> str:
        """Why a broker cannot take a replica of a partition; "" when it can."""
        node_id = broker.node_id
        if node_id in self._going:
            return _GOING[self._going[node_id]]
        if node_id in replicas:
            return "holds it" if node_id in partition.voters else "is to hold it"
        if not broker.takes_replicas:
            return _STATES[broker.state].format(node_id)
        if broker.is_fenced:
            return "is down"
        if node_id not in partition.voters and not self.has_room(node_id):
            return f"has no room (replicas_max is {self._limit_of(node_id)})"
        return ""

    def plan_error(self, partition: PartitionImage) -> tuple[str, bool]:
        """Why a plan cannot begin, "" when it can, and whether it never will."""
        is_balance = _planner(partition) is Origin.BALANCE
        for node_id in partition.planned:
            broker = self._image.brokers.get(node_id)
            if broker is None:
                return f"node {node_id} is not registered", True
            going = self._going.get(node_id)
            if going is not None:  # also one that has it: it would be taken off it again
                return f"node {node_id} {_GOING[going]}", going is not Origin.REPAIR
            if node_id in partition.replicas or node_id in partition.voters:
                continue
            if reason := self._unfit(broker, partition, ()):
                return f"node {node_id} {reason}", is_balance and not broker.takes_replicas
        return "", False


_GOING: Final = {
    Origin.DRAIN: "is being drained",
    Origin.REPLACE: "is being replaced",
    Origin.REPAIR: "is down",
}
_STATES: Final = {
    NodeState.NEW: "is new (`raftmq node add {}`)",
    NodeState.CORDONED: "is cordoned",
    NodeState.MAINTENANCE: "is in maintenance",
    NodeState.DRAINING: "is being drained",
}


def _no_target(leaving: NodeId, reasons: Sequence[str]) -> str:
    shown = "; ".join(reasons[:_NAMED_MAX]) or "there is no other"
    if len(reasons) > _NAMED_MAX:
        shown += f"; and {len(reasons) - _NAMED_MAX} more"
    return f"no broker can take the replica of node {leaving}: {shown}"


# ---- what is due now ----


def obstacle(
    image: MetadataImage, leaders: LeaderTable, key: Key, partition: PartitionImage
) -> str:
    """What keeps a partition's move from going on just now; "" when nothing does."""
    row = leaders.of(key[0], partition)
    if row is None or image.live_epoch(row.leader_id) is None:
        down = [n for n in partition.voters if image.live_epoch(n) is None]
        if not down:
            return "it has no leader"
        return f"it has no leader: of its voters {_ids(partition.voters)}, {_are_down(down)}"
    arriving = [n for n in partition.replicas if n not in partition.voters]
    down = [n for n in arriving if image.live_epoch(n) is None]
    if down and len(down) == len(arriving):
        return f"it waits for what is to hold it: {_are_down(down)}"
    return ""


def _are_down(nodes: Sequence[NodeId]) -> str:
    return f"node {nodes[0]} is down" if len(nodes) == 1 else f"nodes {_ids(nodes)} are down"


def _ids(nodes: Sequence[NodeId]) -> str:
    return ",".join(str(node_id) for node_id in nodes)


def next_moves(
    survey: Survey, leaders: LeaderTable, bounds: Bounds, now_ms: float = 0.0
) -> list[Step]:
    """The commands that are due. All that is remembered is whose turn it was in `survey.due`."""
    turn = _Turn(survey, leaders, bounds, now_ms)
    turn.look_at_running()
    turn.begin_due()
    turn.begin_planned(Origin.OPERATOR)
    if not turn.has_operator_moves():
        turn.begin_planned(Origin.BALANCE)
    if survey.image.level < LEVEL_OF_MOVES:
        return turn.steps[:1]  # each is compared with the whole state
    return turn.steps


class _Turn:
    """One look at all that may be due."""

    def __init__(self, survey: Survey, leaders: LeaderTable, bounds: Bounds, now_ms: float) -> None:
        self._survey = survey
        self._image = survey.image
        self._leaders = leaders
        self._bounds = bounds
        self._now_ms = now_ms
        self._targets = Targets(survey, bounds)
        self._room = _WHOLE * bounds.moves_max
        self.steps: list[Step] = []

    # ---- moves under way ----

    def look_at_running(self) -> None:
        """Count what holds a place; give another target to moves that lost theirs."""
        survey = self._survey
        for key, since_ms in survey.moving.items():
            survey.looked_count += 1
            partition = survey.partitions[key]
            if not obstacle(self._image, self._leaders, key, partition):
                self._room -= _QUARTER if self._now_ms - since_ms >= LONG_MS else _WHOLE
            elif not self._has_leader(key):
                continue
            if key in survey.due:
                self._change(key, partition, "changed")
            elif self._has_lapsed(partition):
                self._order(key, partition, partition.moving_from, partition.origin, "cancelled")
            elif partition.planned:
                self._begin_plan(key, partition, "changed")

    def _change(self, key: Key, partition: PartitionImage, what: str) -> bool:
        moved = self._targets.moved(partition)
        if moved.replicas == partition.replicas:
            return False
        self._order(key, partition, moved.replicas, moved.origin, what)
        return True

    def _has_lapsed(self, partition: PartitionImage) -> bool:
        """True when what a move was for is no longer so, and to go back costs less than to go on:
        whoever was to lose a replica has it and is up, whoever was to get it has not caught up."""
        before, after = partition.moving_from, partition.replicas
        if partition.origin not in (Origin.REPAIR, Origin.DRAIN, Origin.REPLACE):
            return False
        if not before or set(before) == set(after):
            return False
        if any(n in partition.voters for n in after if n not in before):
            return False
        gone = [n for n in before if n not in after]
        return not any(n in self._survey.going for n in before) and all(
            self._image.live_epoch(n) is not None
            and n in partition.voters
            and n not in self._bounds.emptied
            for n in gone
        )

    # ---- moves that have not begun ----

    def begin_due(self) -> None:
        """Move away from brokers that are going, while there are places."""
        survey = self._survey
        for key in list(islice(survey.due, LOOKS_MAX)):
            if self._room <= 0:
                return
            if key in survey.moving:
                continue
            survey.looked_count += 1
            partition = survey.partitions[key]
            if self._has_leader(key) and self._move_away(key, partition):
                self._room -= _WHOLE
            else:
                survey.due[key] = survey.due.pop(key)  # the others first, the next time

    def _move_away(self, key: Key, partition: PartitionImage) -> bool:
        if partition.planned:
            reason, is_over = self._targets.plan_error(partition)
            if is_over:
                self._drop(key, partition, reason)
                return False
            if not reason and not any(n in self._survey.going for n in partition.planned):
                return self._begin_plan(key, partition, "begun")  # where it is to go anyway
        return self._change(key, partition, "begun")

    def begin_planned(self, origin: Origin) -> None:
        """Begin what an operator or the balance wants, while there are places."""
        survey = self._survey
        keys = survey.planned[origin]
        for key in list(islice(keys, LOOKS_MAX)):
            if self._room <= 0:
                return
            if key in survey.moving or key in survey.due:
                continue  # looked at already
            survey.looked_count += 1
            partition = survey.partitions[key]
            if self._has_leader(key) and self._begin_plan(key, partition, "begun"):
                self._room -= _WHOLE
            elif key in keys:
                keys[key] = keys.pop(key)

    def has_operator_moves(self) -> bool:
        """True while a move of an operator is planned or runs: the balance waits."""
        survey = self._survey
        return bool(survey.planned[Origin.OPERATOR]) or any(
            survey.partitions[key].origin is Origin.OPERATOR for key in survey.moving
        )

    def _begin_plan(self, key: Key, partition: PartitionImage, what: str) -> bool:
        reason, is_over = self._targets.plan_error(partition)
        if is_over and key not in self._survey.moving:
            self._drop(key, partition, reason)
        if reason:
            return False
        # A repair or a drain that came between has left its own origin there. Under that name the
        # plan would be carried out although it was cancelled meanwhile, and taken back as a repair.
        self._order(key, partition, partition.planned, _planner(partition), what)
        return True

    # ---- commands ----

    def _has_leader(self, key: Key) -> bool:
        row = self._leaders.of(key[0], self._survey.partitions[key])
        return row is not None and self._image.live_epoch(row.leader_id) is not None

    def _order(
        self, key: Key, partition: PartitionImage, replicas: Replicas, origin: Origin, what: str
    ) -> None:
        command = ReassignPartition(topic_id=key[0], partition=key[1], replicas=replicas)
        if self._image.level >= LEVEL_OF_MOVES:
            command = ReassignPartition(
                topic_id=key[0],
                partition=key[1],
                replicas=replicas,
                creation_epoch=partition.creation_epoch,
                expected=partition.replicas,
                origin=origin,
            )
        self._targets.take(partition, replicas)
        self.steps.append(Step(command, key, what, origin, partition.replicas, replicas))

    def _drop(self, key: Key, partition: PartitionImage, reason: str) -> None:
        move = PlannedMove(
            topic_id=key[0],
            partition=key[1],
            creation_epoch=partition.creation_epoch,
            expected=partition.replicas,
        )
        command = PlanMoves(moves=(move,), origin=partition.origin)
        self.steps.append(
            Step(
                command,
                key,
                "dropped",
                partition.origin,
                partition.replicas,
                partition.planned,
                reason,
            )
        )


# ---- dead brokers ----


@frozen(slots=True)
class DeadBrokers:
    """The brokers that have been down for too long.

    Attributes:
        dead: those whose replicas are to be made again elsewhere now.
        held_back: why there are none though some are overdue; "" otherwise.
    """

    dead: Replicas = ()
    held_back: str = ""


def find_dead_brokers(
    survey: Survey, down_since_ms: Mapping[NodeId, float], after_ms: float | None, now_ms: float
) -> DeadBrokers:
    """Find the brokers that have been down for too long.

    Where more than one is missing, the network or a rack's power is more likely the reason than
    their disks, and to copy everything then would do harm. Brokers that an operator has sent away
    are not missing. A broker all of whose partitions have no majority without it (those of one
    replica, or of two) does not count: nothing of it could be made again, and it would hold back
    the others for ever.

    Args:
        survey: of the newest image.
        down_since_ms: since when this controller has known a broker to be down.
        after_ms: how long a broker may be down; None: for ever.
        now_ms: the time on the same clock.
    """
    image = survey.image
    missing = [
        broker.node_id
        for node_id in sorted(down_since_ms)
        if (broker := image.brokers.get(node_id)) is not None
        and broker.is_fenced
        and broker.state not in (NodeState.DRAINING, NodeState.MAINTENANCE)
        and survey.going.get(node_id) is not Origin.REPLACE
        and survey.holds_any(node_id)
    ]
    if after_ms is None:
        return DeadBrokers()
    overdue = [n for n in missing if now_ms - down_since_ms[n] >= after_ms]
    counting = [n for n in missing if survey.mendable.get(n)]
    if overdue and len(counting) > 1:
        racks = sorted({r for n in counting if (r := image.brokers[n].rack) is not None})
        where = f" (racks {','.join(racks)})" if racks else ""
        return DeadBrokers(held_back=f"{_are_down(counting)}{where}, more than one")
    return DeadBrokers(tuple(overdue))


# ---- telling ----


def first_names(names: Sequence[str], most: int) -> str:
    """The first names, and a sign that there are more."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


@frozen(slots=True)
class Stuck:
    """A partition that cannot move, and why."""

    topic: str
    partition: int
    reason: str


@frozen(slots=True)
class MoveRow:
    """One move.

    Attributes:
        is_running: the order is given; else it is planned.
        reason: what it waits for, "" where nothing keeps it.
    """

    topic: str
    partition: int
    origin: Origin
    before: Replicas
    after: Replicas
    is_running: bool
    reason: str = ""


@frozen(slots=True)
class Forecast:
    """What the planner will do about brokers that must go, if nothing else happens.

    Attributes:
        moves: in the order in which they begin.
        stuck: replicas that no broker can take.
        leaderless: partitions whose move waits for a leader.
    """

    moves: tuple[MoveRow, ...] = ()
    stuck: tuple[Stuck, ...] = ()
    leaderless: tuple[Stuck, ...] = ()


def forecast(
    image: MetadataImage,
    leaders: LeaderTable | None,
    bounds: Bounds,
    nodes: Sequence[NodeId],
) -> Forecast:
    """Every move that takes a replica off one of these brokers, which the image says must go."""
    survey = Survey(image, bounds.dead)
    targets = Targets(survey, bounds)
    moves, stuck, leaderless = [], [], []
    for key in survey.due:
        partition = survey.partitions[key]
        name = survey.topic_name(key), key[1]
        moved = targets.moved(partition)
        stuck += [Stuck(*name, reason) for n, reason in moved.stuck.items() if n in nodes]
        if leaders is not None and (reason := obstacle(image, leaders, key, partition)):
            leaderless.append(Stuck(*name, reason))
        if moved.replicas != partition.replicas:
            targets.take(partition, moved.replicas)
        if any(n in nodes and n not in moved.replicas for n in partition.replicas):
            moves.append(
                MoveRow(*name, moved.origin, partition.replicas, moved.replicas, is_running=False)
            )
    return Forecast(tuple(moves), tuple(stuck), tuple(leaderless))


def move_rows(survey: Survey, leaders: LeaderTable, bounds: Bounds) -> Iterator[MoveRow]:
    """All moves that are planned or under way, with what they wait for."""
    image, targets = survey.image, Targets(survey, bounds)
    names = image.topic_names
    keys = {**survey.moving, **dict.fromkeys(_planned_keys(survey), 0.0)}
    for key in sorted(keys, key=lambda k: (names[k[0]], k[1])):
        partition = survey.partitions[key]
        name = names[key[0]], key[1]
        if key in survey.moving:
            yield MoveRow(
                *name,
                partition.origin,
                partition.moving_from or partition.voters,
                partition.replicas,
                is_running=True,
                reason=obstacle(image, leaders, key, partition),
            )
        if partition.planned:
            reason = obstacle(image, leaders, key, partition) or targets.plan_error(partition)[0]
            yield MoveRow(
                *name,
                partition.origin,
                partition.replicas,
                partition.planned,
                is_running=False,
                reason=reason,
            )


def _planned_keys(survey: Survey) -> Iterator[Key]:
    for keys in survey.planned.values():
        yield from keys


@frozen(slots=True)
class NodeProgress:
    """What a broker still has that should go.

    Attributes:
        replicas: partitions that it is to hold, or votes in.
        leaderships: partitions that it leads.
        kept: of these, those that nobody else could lead just now.
        claims: groups that it coordinates.
        stuck: replicas of it that cannot go just now, each with the reason.
    """

    node_id: NodeId
    state: NodeState
    replicas: int
    leaderships: int
    kept: int
    claims: int
    stuck: tuple[Stuck, ...] = ()

    @property
    def is_done(self) -> bool:
        """True when it has nothing that its state lets it not have."""
        keeps = self.state is NodeState.MAINTENANCE
        return not self.leaderships and not self.claims and (keeps or not self.replicas)


def node_progress(
    survey: Survey, leaders: LeaderTable, bounds: Bounds, node_id: NodeId
) -> NodeProgress:
    """How far a broker is that is drained, replaced or in maintenance."""
    image = survey.image
    broker = image.brokers.get(node_id)
    state = NodeState.ACTIVE if broker is None else broker.state
    targets = Targets(survey, bounds)
    names = image.topic_names
    held = sorted(survey.held.get(node_id, ()), key=lambda k: (names[k[0]], k[1]))
    shunned = image.shunned()
    fit = [b.node_id for b in image.live_brokers() if b.node_id not in shunned]
    stuck = []
    led = kept = 0
    for key in held:
        partition = survey.partitions[key]
        row = leaders.of(key[0], partition)
        is_led = row is not None and row.leader_id == node_id and not _is_down(image, node_id)
        heirs = () if row is None else [n for n in row.isr if n in fit]
        led += is_led
        kept += is_led and not heirs
        reason = ""
        if is_led and state is NodeState.MAINTENANCE and not heirs:  # else it goes with the replica
            reason = "no other replica is in sync on a broker that may lead"
        if not reason and node_id in survey.going:
            reason = obstacle(image, leaders, key, partition)
        if not reason and node_id in partition.replicas and node_id in survey.going:
            reason = targets.moved(partition).stuck.get(node_id, "")
        if reason:
            stuck.append(Stuck(names[key[0]], key[1], reason))
    claims = sum(
        group.coordinator == node_id and group.coordinator_broker_epoch == image.live_epoch(node_id)
        for group in image.groups.groups.values()
    )
    return NodeProgress(node_id, state, len(held), led, kept, claims, tuple(stuck))


def _is_down(image: MetadataImage, node_id: NodeId) -> bool:
    return image.live_epoch(node_id) is None


@frozen(slots=True)
class Figures:
    """How many moves of one origin there are; those that are stuck count as running too."""

    running: int = 0
    planned: int = 0
    stuck: int = 0


def figures(survey: Survey, leaders: LeaderTable) -> dict[Origin, Figures]:
    """Counts for metrics; what is to leave a broker that is going is planned until it moves."""
    counts = {origin: [0, 0, 0] for origin in Origin}
    for key in survey.moving:
        partition = survey.partitions[key]
        row = counts[partition.origin]
        row[0] += 1
        row[2] += bool(obstacle(survey.image, leaders, key, partition))
    for origin, keys in survey.planned.items():
        counts[origin][1] += len(keys)
    for node_id, origin in survey.going.items():
        counts[origin][1] += len(survey.named.get(node_id, ()))
    return {origin: Figures(*row) for origin, row in counts.items()}
