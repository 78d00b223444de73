"""Which brokers hold which partition: balanced, and spread over racks. Pure functions.

Invariants: never two replicas of a partition on one broker; never two in one rack while there are
at least as many racks as replicas. Replicas per broker differ by at most one over a topic where
racks allow it, and so do preferred leaders; the load of other topics breaks ties, so that many
small topics spread too. The same inputs always give the same answer.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from attrs import evolve, frozen

from raftmq.errors import ErrorCode, KafkaError
from raftmq.types import NodeId

Replicas = tuple[NodeId, ...]
"""Brokers of one partition, preferred leader first."""


class Load:
    """How many replicas and preferred leaders each broker has."""

    __slots__ = ("leaders", "replicas")

    def __init__(self, partitions: Iterable[Replicas] = ()) -> None:
        self.replicas: dict[NodeId, int] = {}
        self.leaders: dict[NodeId, int] = {}
        self.add(partitions)

    def add(self, partitions: Iterable[Replicas], by: int = 1) -> None:
        """Count these partitions as well; with `by` -1, no longer."""
        for nodes in partitions:
            self.leaders[nodes[0]] = self.leaders.get(nodes[0], 0) + by
            for node_id in nodes:
                self.replicas[node_id] = self.replicas.get(node_id, 0) + by

    def without(self, partitions: Iterable[Replicas]) -> Load:
        """The load but for these."""
        other = Load()
        other.replicas, other.leaders = dict(self.replicas), dict(self.leaders)
        other.add(partitions, -1)
        return other


@frozen(slots=True)
class Candidate:
    """A broker that may take replicas. A broker without a rack is a rack of its own.

    A fenced one is no preferred leader while another replica could be. `room`: so many replicas it
    may take; None: any number.
    """

    node_id: NodeId
    rack: str | None = None
    is_fenced: bool = False
    room: int | None = None


def place(
    candidates: Sequence[Candidate],
    *,
    partitions: int,
    replication_factor: int,
    of_topic: Sequence[Replicas] = (),
    elsewhere: Sequence[Replicas] | Load = (),
) -> tuple[Replicas, ...]:
    """Choose brokers for `partitions` new partitions of a topic.

    Args:
        candidates: live brokers.
        partitions: how many to place.
        replication_factor: replicas of each.
        of_topic: partitions that the topic already has.
        elsewhere: partitions of all other topics.

    Where there is not enough room for all replicas, room is ignored: the caller must check it.

    Raises:
        KafkaError: INVALID_REPLICATION_FACTOR, there are too few brokers.
    """
    if replication_factor < 1 or replication_factor > len(candidates):
        raise KafkaError(
            f"Unable to replicate the partition {replication_factor} time(s): "
            f"The target replication factor of {replication_factor} cannot be reached because only "
            f"{len(candidates)} broker(s) are registered.",
            code=ErrorCode.INVALID_REPLICATION_FACTOR,
        )
    brokers = sorted(candidates, key=lambda candidate: candidate.node_id)
    here = Load(of_topic)
    there = elsewhere if isinstance(elsewhere, Load) else Load(elsewhere)
    quotas = _quotas(brokers, partitions, replication_factor, here, there)
    if quotas is None:
        boundless = [evolve(broker, room=None) for broker in brokers]
        quotas = _quotas(boundless, partitions, replication_factor, here, there)
        assert quotas is not None, "each broker takes one replica of each partition"
    members = _deal(brokers, quotas, partitions)
    leaders = _leaders(brokers, members, here, there)
    return tuple(
        (leader, *_rotated([node for node in nodes if node != leader], i))
        for i, (leader, nodes) in enumerate(zip(leaders, members, strict=True))
    )


Rack: TypeAlias = tuple[str, int]
"""A rack's name; or "" and the node that is a rack of its own."""


def rack_of(candidate: Candidate) -> Rack:
    """Where a broker is."""
    return (candidate.rack, -1) if candidate.rack is not None else ("", candidate.node_id)


def _quotas(
    brokers: Sequence[Candidate],
    partitions: int,
    replication_factor: int,
    of_topic: Load,
    elsewhere: Load,
) -> dict[NodeId, int] | None:
    """How many replicas each broker gets: the least loaded takes the next, if its rack may. None
    when there is no room for all."""
    here, there = of_topic.replicas, elsewhere.replicas
    racks = {rack_of(broker): 0 for broker in brokers}
    rack_max = partitions if len(racks) >= replication_factor else partitions * len(brokers)
    quotas = {broker.node_id: 0 for broker in brokers}
    quota_max = {
        broker.node_id: partitions if broker.room is None else min(partitions, broker.room)
        for broker in brokers
    }
    heap = [
        (here.get(b.node_id, 0), there.get(b.node_id, 0), b.node_id, rack_of(b)) for b in brokers
    ]
    heapq.heapify(heap)
    for _ in range(partitions * replication_factor):
        while heap:
            count, other, node_id, rack = heapq.heappop(heap)
            if quotas[node_id] < quota_max[node_id] and racks[rack] < rack_max:
                break  # a broker or rack once full stays full, so it need not come back
        else:
            return None
        quotas[node_id] += 1
        racks[rack] += 1
        heapq.heappush(heap, (count + 1, other, node_id, rack))
    return quotas


def _deal(
    brokers: Sequence[Candidate], quotas: Mapping[NodeId, int], partitions: int
) -> list[list[NodeId]]:
    """Hand the quotas out like cards, rack after rack, going round the partitions.

    A rack's cards lie side by side and are at most as many as partitions (where racks suffice), so
    no partition gets two of them; the same holds for a broker. (McNaughton's wrap-around rule.)
    """
    by_rack: dict[Rack, list[NodeId]] = {}
    for broker in brokers:
        by_rack.setdefault(rack_of(broker), []).append(broker.node_id)
    members: list[list[NodeId]] = [[] for _ in range(partitions)]
    card = 0
    for rack in sorted(by_rack):
        total = sum(quotas[node_id] for node_id in by_rack[rack])
        order = (
            _interleaved(by_rack[rack], quotas)
            if total <= partitions
            else [n for n in by_rack[rack] for _ in range(quotas[n])]
        )
        for node_id in order:
            members[card % partitions].append(node_id)
            card += 1
    return members


def _interleaved(nodes: Sequence[NodeId], quotas: Mapping[NodeId, int]) -> list[NodeId]:
    """Brokers of one rack in turn, so that each meets all brokers of the other racks."""
    left = {node_id: quotas[node_id] for node_id in nodes}
    order = []
    while any(left.values()):
        for node_id in nodes:
            if left[node_id]:
                left[node_id] -= 1
                order.append(node_id)
    return order


def _leaders(
    brokers: Sequence[Candidate],
    members: Sequence[Sequence[NodeId]],
    of_topic: Load,
    elsewhere: Load,
) -> list[NodeId]:
    """A preferred leader for each partition, leaderships per broker as equal as can be."""
    count = {broker.node_id: of_topic.leaders.get(broker.node_id, 0) for broker in brokers}
    other = {broker.node_id: elsewhere.leaders.get(broker.node_id, 0) for broker in brokers}
    fenced = [broker.node_id for broker in brokers if broker.is_fenced]
    leaders = []
    members = [[n for n in nodes if n not in fenced] or nodes for nodes in members]
    for nodes in members:
        leader = min(nodes, key=lambda node: (count[node], other[node], node))
        count[leader] += 1
        leaders.append(leader)
    while _shift_one(leaders, members, count):
        pass
    return leaders


def _shift_one(
    leaders: list[NodeId], members: Sequence[Sequence[NodeId]], count: dict[NodeId, int]
) -> bool:
    """Move one leadership along a path from a busier broker to one with two fewer, if any."""
    edges: dict[NodeId, dict[NodeId, int]] = {}
    for i, nodes in enumerate(members):
        for node in nodes:
            if node != leaders[i]:
                edges.setdefault(leaders[i], {}).setdefault(node, i)
    for source in sorted(count, key=lambda node: (-count[node], node)):
        came_from: dict[NodeId, NodeId] = {source: source}
        queue = deque([source])
        while queue:
            node = queue.popleft()
            if count[node] <= count[source] - 2:
                _move(leaders, edges, came_from, source, node)
                count[source] -= 1
                count[node] += 1
                return True
            for following in edges.get(node, {}):
                if following not in came_from:
                    came_from[following] = node
                    queue.append(following)
    return False


def _move(
    leaders: list[NodeId],
    edges: Mapping[NodeId, Mapping[NodeId, int]],
    came_from: Mapping[NodeId, NodeId],
    source: NodeId,
    target: NodeId,
) -> None:
    node = target
    while node != source:
        leaders[edges[came_from[node]][node]] = node
        node = came_from[node]


def _rotated(nodes: list[NodeId], by: int) -> list[NodeId]:
    if not nodes:
        return nodes
    by %= len(nodes)
    return nodes[by:] + nodes[:by]
