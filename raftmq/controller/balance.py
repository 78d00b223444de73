"""Evening out brokers: which replicas and preferred leaderships should move where, and why. Pure.

Given who holds what, names the moves that bring the number of replicas, and then that of preferred
leaderships, as close to even over brokers as can be, and where that leaves a choice over racks (by
the brokers that each has). First of all two replicas of a partition in one rack are parted, where
there are racks enough.

How: brokers are points, and a unit (a replica, or a leadership) that may go from one to another is
a way between them. A path from a broker to one that has two fewer evens them out; the cheapest is
taken, again and again. What has been moved in the plan moves back at a gain, so for the counts that
it ends with no plan moves fewer replicas, and none that moves as few copies fewer bytes
(minimum-cost flow by successive shortest paths). Where brokers are but one apart, the counts of two
change places if that evens racks out or is cheaper. So a broker that joins takes its share, and the
others give nothing to each other.

Invariants: every path lowers (sum of squares over brokers, the same over racks, cost), so the plan
ends, and a plan for the state that it leads to is empty. Only targets are given anything; what
other brokers hold stays, and so do partitions that are fixed. No path takes from a partition a
rack, a replica, or gives a broker more than it has room for. The same inputs always give the same
plan.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from attrs import field, frozen

from raftmq.controller.placement import Candidate, Load, Rack, Replicas, rack_of
from raftmq.types import NodeId

TURN: Final = 500
"""Partitions that are looked at between two pauses."""


@frozen(slots=True)
class Held:
    """One partition and who holds it, the preferred leader first.

    Attributes:
        size_bytes: of its log; None: not known, and taken for that of an average partition.
        is_fixed: nothing of it moves; it counts all the same.
    """

    topic: str
    partition: int
    replicas: Replicas
    size_bytes: int | None = None
    is_fixed: bool = False


@frozen(slots=True)
class BalanceMove:
    """One partition that should be held otherwise; `copied_bytes` go over the wire, None: nobody
    knows how many."""

    topic: str
    partition: int
    before: Replicas
    after: Replicas
    why: str
    copied_bytes: int | None

    @property
    def arriving(self) -> Replicas:
        """Brokers that did not hold it."""
        return tuple(n for n in self.after if n not in self.before)


@frozen(slots=True)
class Brokers:
    """Who may be given replicas and leaderships, and who only keeps what it has.

    Attributes:
        targets: live brokers that take data; `room` says how many replicas more.
        others: the rest, as far as they hold anything.
        onto: where set, the only targets that gain replicas: the share of brokers that join.
            Leaderships, which cost no copies, are evened out over all.
    """

    targets: tuple[Candidate, ...]
    others: tuple[Candidate, ...] = field(default=(), kw_only=True)
    onto: tuple[NodeId, ...] | None = field(default=None, kw_only=True)

    def gaining(self) -> dict[NodeId, None]:
        """The brokers that may gain, as an ordered set."""
        named = [broker.node_id for broker in self.targets]
        return dict.fromkeys(n for n in sorted(named) if self.onto is None or n in self.onto)


Plan: TypeAlias = tuple[BalanceMove, ...]


def plan_balance(partitions: Sequence[Held], brokers: Brokers) -> Plan:
    """The moves, in the order in which they should be made."""
    steps = balance_steps(partitions, brokers)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            plan: Plan = end.value
            return plan


def balance_steps(partitions: Sequence[Held], brokers: Brokers) -> Generator[None, None, Plan]:
    """The same for a caller that may not work long at a time: returned after many short turns."""
    weights = _weights(partitions)
    # Cheap ones first; of equals those with low numbers, so that no topic goes there as a whole.
    order = sorted(
        range(len(partitions)),
        key=lambda i: (weights[i], partitions[i].partition, partitions[i].topic),
    )
    ordered = [partitions[i] for i in order]
    yield
    load = Load()
    for start in range(0, len(ordered), TURN):
        load.add(held.replicas for held in ordered[start : start + TURN])
        yield
    replicas = _Replicas(ordered, [weights[i] for i in order], brokers, load)
    yield from replicas.look()
    yield from replicas.steps()
    leaders = yield from _Leaders.made(ordered, replicas.members, brokers)
    yield from leaders.steps()
    evened = [
        (leader, *(n for n in members if n != leader))
        for leader, members in zip(leaders.leader, replicas.members, strict=True)
    ]
    yield
    return (yield from _in_order(ordered, evened, replicas.parted, brokers, load))


def _weights(partitions: Sequence[Held]) -> list[int]:
    """What a replica costs: more than all that its bytes could save, and its bytes."""
    known = [held.size_bytes for held in partitions if held.size_bytes is not None]
    average = sum(known) // len(known) if known else 0
    sizes = [average if held.size_bytes is None else held.size_bytes for held in partitions]
    each = 1 + sum(size * len(held.replicas) for size, held in zip(sizes, partitions, strict=True))
    return [each + size for size in sizes]


# ---- paths ----

_Way: TypeAlias = tuple[int, int]
"""(cost, unit)"""
_Path: TypeAlias = list[tuple[int, NodeId, NodeId]]
"""(unit, from, to) from the broker that loses one to the one that gains one."""
_CameFrom: TypeAlias = dict[NodeId, tuple[NodeId, int]]
_Far: TypeAlias = dict[NodeId, int]
_HOPS: Final = 1 << 16
"""A unit of cost, in parts of a path: more than there are brokers."""


class _PathBalancer(ABC):
    """Evens out units on brokers by paths; a subclass says what a unit is and where it may go."""

    def __init__(
        self,
        brokers: Brokers,
        counts: Mapping[NodeId, int],
        units_of: Mapping[NodeId, Sequence[int]],
    ) -> None:
        """`units_of` a broker: those that may move, cheapest first."""
        targets = sorted(brokers.targets, key=lambda target: target.node_id)
        self.nodes = [target.node_id for target in targets]
        self.gaining = brokers.gaining()
        self.ends: Collection[NodeId] = self.gaining
        """Where a way may lead."""
        self.count = {node_id: counts.get(node_id, 0) for node_id in self.nodes}
        self.rack = {target.node_id: rack_of(target) for target in targets}
        self._rack_size: dict[Rack, int] = {}
        self._rack_count: dict[Rack, int] = {}
        for node_id, rack in self.rack.items():
            self._rack_size[rack] = self._rack_size.get(rack, 0) + 1
            self._rack_count[rack] = self._rack_count.get(rack, 0) + self.count[node_id]
        self._per_size = math.lcm(*self._rack_size.values())
        self._unmoved = units_of
        self._passed: dict[tuple[NodeId, NodeId], int] = {}
        """How many of a broker's units cannot go to another one, or have moved."""
        self._moved: dict[int, None] = {}
        self._offers: dict[tuple[NodeId, NodeId], list[_Way]] = {}
        """Heaps of the ways of units that have moved; some of them are no ways any more."""
        self._heights = dict.fromkeys(self.nodes, 0)
        """Potentials: lengths measured with them are never below nothing (Johnson)."""
        self._ways: dict[NodeId, list[tuple[NodeId, int, int]]] = {}
        """(to, cost, unit): the cheapest ways from a broker, until they may have changed."""

    @abstractmethod
    def sites(self, unit: int) -> Sequence[NodeId]:
        """The brokers that have the unit."""

    @abstractmethod
    def can(self, unit: int, source: NodeId, to: NodeId) -> bool:
        """True when the unit is at `source` and may go to `to`, which depends on the unit alone."""

    @abstractmethod
    def cost(self, unit: int, source: NodeId, to: NodeId) -> int:
        """What that adds to the plan; negative where it takes back a part of it."""

    @abstractmethod
    def put(self, unit: int, source: NodeId, to: NodeId) -> None:
        """Have it there."""

    def has_room(self, _node_id: NodeId) -> bool:
        """True when a broker may have one more."""
        return True

    def is_sound(self, _path: _Path) -> bool:
        """True when all of a path can be done, and not only each part of it."""
        return True

    def even_out(self) -> Iterator[None]:
        """Take paths until none is left that gains anything."""
        while True:
            path = yield from self._evening_path()
            if path is None:
                path = yield from self._saving_path()
            if path is None:
                return
            for unit, source, to in path:
                self.move(unit, source, to)
            yield

    def move(self, unit: int, source: NodeId, to: NodeId) -> None:
        """Move a unit in the plan."""
        touched = [*self.sites(unit), to]
        self.put(unit, source, to)
        self._moved[unit] = None
        self.count[source] -= 1
        self.count[to] += 1
        self._rack_count[self.rack[source]] -= 1
        self._rack_count[self.rack[to]] += 1
        for site in self.sites(unit):
            for node_id in self.ends:
                if self.can(unit, site, node_id):
                    way = self.cost(unit, site, node_id), unit
                    heapq.heappush(self._offers.setdefault((site, node_id), []), way)
        for site in touched:
            self._ways.pop(site, None)

    def _ways_from(
        self, source: NodeId
    ) -> Generator[None, None, Sequence[tuple[NodeId, int, int]]]:
        """The cheapest ways; a pause after each that had to be looked for: for that it may have
        passed all that a broker has."""
        ways = self._ways.get(source)
        if ways is None:
            ways = []
            for to in self.ends:
                way = None if to == source else self._cheapest(source, to)
                if way is not None:
                    ways.append((to, *way))
                yield
            self._ways[source] = ways
        return ways

    def _cheapest(self, source: NodeId, to: NodeId) -> _Way | None:
        pair = source, to
        units, at = self._unmoved.get(source, ()), self._passed.get(pair, 0)
        while at < len(units) and (units[at] in self._moved or not self.can(units[at], *pair)):
            at += 1
        self._passed[pair] = at
        offers = self._offers.get(pair, [])
        while offers and not self.can(offers[0][1], *pair):
            heapq.heappop(offers)
        ways = offers[:1]
        if at < len(units):
            ways = [*ways, (self.cost(units[at], *pair), units[at])]
        return min(ways, default=None)

    def _evening_path(self) -> Generator[None, None, _Path | None]:
        """A path between two brokers whose counts differ by two or more."""
        lowest = min(self.count.values(), default=0)
        for start in sorted(self.nodes, key=lambda n: (-self.count[n], n)):
            if self.count[start] - lowest < 2:
                break
            far, came_from = yield from self._reach(start)
            yield
            ends = [n for n in far if self.count[start] - self.count[n] >= 2 and self.has_room(n)]
            if ends:
                end = min((*self._rank(start, n, far), n) for n in ends)[-1]
                self._raise(far, end)
                return (yield from self._sound(start, end, came_from))
        return None

    def _rank(self, start: NodeId, end: NodeId, far: _Far) -> tuple[int, int, int]:
        return self.count[end], self._rack_gain(start, end), self._length(start, end, far)

    def _saving_path(self) -> Generator[None, None, _Path | None]:
        """A path between two whose counts differ by one: it evens out racks, or saves a cost."""
        for start in sorted(self.nodes, key=lambda n: (-self.count[n], n)):
            far, came_from = yield from self._reach(start)
            yield
            gains = [
                (self._rack_gain(start, n), self._length(start, n, far), n)
                for n in far
                if self.count[start] - self.count[n] == 1 and self.has_room(n)
            ]
            for rack_gain, length, end in sorted(gains):
                if rack_gain < 0 and self._is_uneven(self.rack[start], self.rack[end]):
                    self._raise(far, end)
                    return (yield from self._sound(start, end, came_from))
                if rack_gain <= 0 and length < 0:
                    path = self._path(start, end, came_from)
                    if path is not None and self.is_sound(path) and self._cost(path) < 0:
                        self._raise(far, end)
                        return path
        return None

    def _is_uneven(self, losing: Rack, gaining: Rack) -> bool:
        """True when one rack has one more than its share, or the other one less."""
        total, of = sum(self._rack_count.values()), len(self.nodes)
        too_many = self._rack_count[losing] * of >= total * self._rack_size[losing] + of
        too_few = self._rack_count[gaining] * of <= total * self._rack_size[gaining] - of
        return too_many or too_few

    def _rack_gain(self, source: NodeId, to: NodeId) -> int:
        """How much a unit that goes there changes the sum of squares over racks, each by its
        size."""
        losing, gaining = self.rack[source], self.rack[to]
        if losing == gaining:
            return 0
        lost = (2 * self._rack_count[losing] - 1) * (self._per_size // self._rack_size[losing])
        won = (2 * self._rack_count[gaining] + 1) * (self._per_size // self._rack_size[gaining])
        return won - lost

    def _reach(self, start: NodeId) -> Generator[None, None, tuple[_Far, _CameFrom]]:
        """How far it is to all others, and the last part of each path; of paths at one cost that of
        the fewest parts (Dijkstra's way, with potentials that leave no part below nothing)."""
        heights = self._heights
        far: _Far = {start: 0}
        came_from: _CameFrom = {}
        heap = [(0, start)]
        turns_left = len(self.nodes) ** 3  # potentials are at fault where racks do not suffice
        while heap and turns_left:
            turns_left -= 1
            reached, node_id = heapq.heappop(heap)
            if far[node_id] != reached:
                continue  # a shorter path was found meanwhile
            reached += heights[node_id]
            for other, cost, unit in (yield from self._ways_from(node_id)):
                further = reached + cost * _HOPS + 1 - heights[other]
                if other != start and (other not in far or further < far[other]):
                    far[other] = further
                    came_from[other] = node_id, unit
                    heapq.heappush(heap, (further, other))
        return far, came_from

    def _length(self, start: NodeId, end: NodeId, far: _Far) -> int:
        return far[end] - self._heights[start] + self._heights[end]

    def _raise(self, far: _Far, end: NodeId) -> None:
        """Take the distances into the potentials, now that the path to `end` is taken."""
        for node_id in self.nodes:
            self._heights[node_id] += min(far.get(node_id, far[end]), far[end])

    def _fewest(self, start: NodeId) -> Generator[None, None, _CameFrom]:
        """The last part of each path of the fewest parts."""
        came_from: _CameFrom = {}
        queue = deque([start])
        while queue:
            node_id = queue.popleft()
            for other, _, unit in (yield from self._ways_from(node_id)):
                if other != start and other not in came_from:
                    came_from[other] = node_id, unit
                    queue.append(other)
        return came_from

    def _cost(self, path: _Path) -> int:
        return sum(self.cost(*part) for part in path)

    def _path(self, start: NodeId, end: NodeId, came_from: _CameFrom) -> _Path | None:
        path: _Path = []
        node_id = end
        while node_id != start:
            source, unit = came_from[node_id]
            path.append((unit, source, node_id))
            node_id = source
            if len(path) > len(self.nodes):
                return None
        path.reverse()
        return path

    def _sound(
        self, start: NodeId, end: NodeId, came_from: _CameFrom
    ) -> Generator[None, None, _Path]:
        """The path; where its parts are in each other's way, the one with the fewest.

        Two parts of one unit are that only if one way leads directly from the first's beginning to
        the second's end, and then the path does not have the fewest parts.
        """
        path = self._path(start, end, came_from)
        if path is None or not self.is_sound(path):
            path = self._path(start, end, (yield from self._fewest(start)))
            assert path is not None, "hops are never negative"
            assert self.is_sound(path)
        return path


# ---- replicas ----


class _Replicas(_PathBalancer):
    """Replicas: a broker has one of a partition at most, and so has a rack where racks suffice."""

    def __init__(
        self, partitions: Sequence[Held], weights: Sequence[int], brokers: Brokers, load: Load
    ) -> None:
        self.members = [list(held.replicas) for held in partitions]
        self.parted: dict[int, Rack] = {}
        """Partitions that had two replicas in a rack."""
        self._partitions = partitions
        self._weights = weights
        self._rooms = {target.node_id: target.room for target in brokers.targets}
        self._rack_of = {
            candidate.node_id: rack_of(candidate)
            for candidate in (*brokers.others, *brokers.targets)
        }
        self._units: dict[NodeId, list[int]] = {target.node_id: [] for target in brokers.targets}
        super().__init__(brokers, load.replicas, self._units)
        self._before = dict(self.count)

    def look(self) -> Iterator[None]:
        """Look at all partitions, before anything else."""
        for unit, held in enumerate(self._partitions):
            if unit % TURN == 0:
                yield
            for node_id in held.replicas:
                if node_id not in self._rack_of:
                    self._rack_of[node_id] = rack_of(Candidate(node_id))
                if not held.is_fixed and node_id in self._units:
                    self._units[node_id].append(unit)

    def sites(self, unit: int) -> Sequence[NodeId]:
        """The targets that hold the partition."""
        return [n for n in self.members[unit] if n in self.count]

    def can(self, unit: int, source: NodeId, to: NodeId) -> bool:
        """True when the partition loses no rack by it."""
        members = self.members[unit]
        if source not in members or to in members or to not in self.gaining:
            return False
        losing, gaining = self._rack_of[source], self._rack_of[to]
        if losing == gaining:
            return True
        racks = [self._rack_of[n] for n in members]
        return gaining not in racks or racks.count(losing) > 1

    def cost(self, unit: int, source: NodeId, to: NodeId) -> int:
        """The bytes that are copied to a broker that did not hold it."""
        holders = self._partitions[unit].replicas
        return self._weights[unit] * ((to not in holders) - (source not in holders))

    def put(self, unit: int, source: NodeId, to: NodeId) -> None:
        """Let one broker hold it in place of another."""
        members = self.members[unit]
        members[members.index(source)] = to

    def has_room(self, node_id: NodeId) -> bool:
        """True when it may hold one more."""
        room = self._rooms[node_id]
        return room is None or self.count[node_id] - self._before[node_id] < room

    def is_sound(self, path: _Path) -> bool:
        """True when no partition that occurs twice loses a rack."""
        after: dict[int, list[NodeId]] = {}
        for unit, source, to in path:
            members = after.setdefault(unit, list(self.members[unit]))
            members[members.index(source)] = to
        return all(
            len(set(members)) == len(members)
            and self._racks(members) >= self._racks(self.members[unit])
            for unit, members in after.items()
        )

    def steps(self) -> Iterator[None]:
        """Part what is in one rack, then even out, which may make room to part more."""
        yield from self._part()
        while True:
            yield from self.even_out()
            if not (yield from self._part()):
                return

    def _racks(self, members: Sequence[NodeId]) -> int:
        return len(dict.fromkeys(self._rack_of[n] for n in members))

    def _part(self) -> Generator[None, None, int]:
        """Part replicas that share a rack with another; returns how many."""
        parted = 0
        for unit, held in enumerate(self._partitions):
            if unit % TURN == 0:
                yield
            while not held.is_fixed and (way := self._parting(unit)) is not None:
                source, to = way
                self.parted.setdefault(unit, self._rack_of[source])
                self.move(unit, source, to)
                parted += 1
        return parted

    def _parting(self, unit: int) -> tuple[NodeId, NodeId] | None:
        """A replica in a rack that has another one, and a broker in a rack that has none; only
        where there are as many racks as replicas."""
        members = self.members[unit]
        racks = [self._rack_of[n] for n in members]
        if len(dict.fromkeys(racks)) == len(racks):
            return None
        if len(dict.fromkeys([*racks, *self.rack.values()])) < len(racks):
            return None
        sources = [n for n in self.sites(unit) if racks.count(self._rack_of[n]) > 1]
        ends = [n for n in self.gaining if self.rack[n] not in racks and self.has_room(n)]
        if not sources or not ends:
            return None
        source = min(sources, key=lambda n: (n == members[0], -self.count[n], n))
        return source, min(ends, key=lambda n: (self.count[n], n))


# ---- preferred leaders ----


class _Leaders(_PathBalancer):
    """Preferred leaderships: a partition's is with one of those that hold it."""

    def __init__(
        self,
        partitions: Sequence[Held],
        members: Sequence[Sequence[NodeId]],
        brokers: Brokers,
        leader: list[NodeId],
        units: Mapping[NodeId, Sequence[int]],
        counts: Mapping[NodeId, int],
    ) -> None:
        self.leader = leader
        self._partitions = partitions
        self._members = members
        super().__init__(brokers, counts, units)
        self.ends = self.nodes

    @classmethod
    def made(
        cls, partitions: Sequence[Held], members: Sequence[Sequence[NodeId]], brokers: Brokers
    ) -> Generator[None, None, _Leaders]:
        """Look at all partitions, before anything else."""
        leader: list[NodeId] = []
        counts: dict[NodeId, int] = {}
        units: dict[NodeId, list[int]] = {target.node_id: [] for target in brokers.targets}
        for unit, held in enumerate(partitions):
            if unit % TURN == 0:
                yield
            first, nodes = held.replicas[0], members[unit]
            node_id = first if first in nodes else nodes[0]
            leader.append(node_id)
            counts[node_id] = counts.get(node_id, 0) + 1
            if node_id in units and not held.is_fixed:
                units[node_id].append(unit)
        leaders = cls(partitions, members, brokers, leader, units, counts)
        for ours in units.values():
            yield
            ours.sort(key=leaders._weight)
        return leaders

    def sites(self, unit: int) -> Sequence[NodeId]:
        """Where it is led."""
        return [self.leader[unit]]

    def can(self, unit: int, source: NodeId, to: NodeId) -> bool:
        """True when the other holds it."""
        return self.leader[unit] == source != to and to in self._members[unit]

    def cost(self, unit: int, source: NodeId, to: NodeId) -> int:
        """What the change of a leader is worth, once for each partition."""
        before = self._partitions[unit].replicas[0]
        return self._weight(unit) * ((to != before) - (source != before))

    def put(self, unit: int, source: NodeId, to: NodeId) -> None:
        """Let another one lead it."""
        assert self.leader[unit] == source
        self.leader[unit] = to

    def steps(self) -> Iterator[None]:
        """Even out."""
        return self.even_out()

    def _weight(self, unit: int) -> int:
        """Nothing where the leader leaves anyway; least where the partition is moved anyway."""
        held = self._partitions[unit]
        if held.replicas[0] not in self._members[unit]:
            return 0
        return 1 if any(n not in held.replicas for n in self._members[unit]) else 2


# ---- what is told ----


def _in_order(
    partitions: Sequence[Held],
    evened: Sequence[Replicas],
    parted: Mapping[int, Rack],
    brokers: Brokers,
    load: Load,
) -> Generator[None, None, Plan]:
    """The moves in their order: those that part replicas in one rack, then from the smallest to the
    largest, leaderships last."""
    names = {rack_of(c): c.rack or "" for c in (*brokers.others, *brokers.targets)}
    moves: list[tuple[tuple[object, ...], BalanceMove]] = []
    for unit, (held, after) in enumerate(zip(partitions, evened, strict=True)):
        if unit % TURN == 0:
            yield
        if after == held.replicas:
            continue
        arriving = [n for n in after if n not in held.replicas]
        rack = parted.get(unit) if arriving else None
        why = []
        if rack is not None:
            why.append(f"two replicas are in rack {names.get(rack, '')}")
        elif arriving:
            why.append(_counts("replicas", load.replicas, held.replicas, after))
        if after[0] != held.replicas[0] and held.replicas[0] in after:
            leaders = _counts("preferred leaders", load.leaders, held.replicas[:1], after[:1])
            why.append(leaders)
        copied = None if held.size_bytes is None else held.size_bytes * len(arriving)
        move = BalanceMove(
            held.topic,
            held.partition,
            held.replicas,
            after,
            "; ".join(why),
            copied if arriving else 0,
        )
        kind = 0 if rack is not None else 1 if arriving else 2
        is_unknown = move.copied_bytes is None
        key = (kind, is_unknown, move.copied_bytes or 0, held.topic, held.partition)
        moves.append((key, move))
    return tuple(move for _, move in sorted(moves, key=lambda row: row[0]))


def _counts(
    what: str, counts: Mapping[NodeId, int], before: Collection[NodeId], after: Collection[NodeId]
) -> str:
    """How many of something the brokers have that lose or gain one."""
    losing = [n for n in before if n not in after]
    gaining = [n for n in after if n not in before]
    told = [f"node {n} has {counts.get(n, 0)}" for n in (*losing, *gaining)]
    return f"{what}: {', '.join(told)}"
