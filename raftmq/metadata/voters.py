"""Who votes on metadata: how many, which nodes, and each step on the way there. Pure.

How many is state (`MetadataImage.voters_wanted`); 0 means as many as the cluster began with. Which
nodes follows from the image and the configuration alone, so any leader of the group goes on where
the last one ended: `metadata_target` names the members that the group should have, and
`replication/membership.py` takes one step at a time towards them.

A replaced node's vote is its successor's. A draining node's vote goes to a live node that is
neither new nor cordoned nor about to leave, in the rack with the fewest votes; the node keeps it
while there is none, unless fewer votes are wanted. Votes beyond the wanted number are taken from
nodes that leave, then from dead ones, then from the rack with the most. A voter that is merely
dead keeps its vote: it may come back, and nothing here judges for how long it may be away.

Invariants: nobody is exchanged for the sake of a better spread; the target of a configuration that
lies on the way to a target is that target.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Final

from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.commands import NodeState
from raftmq.metadata.image import (
    MetadataImage,
    holds_any,
    present_nodes,
    successor_of,
)
from raftmq.raft.membership import Configuration
from raftmq.replication.membership import TargetMembership, next_configuration
from raftmq.types import METADATA_TOPIC, NodeId, ReplicaId, StorageId

GROWN_MAX: Final = 5
"""So many voters a growing cluster gets by itself: two may be lost, and more cost every command."""
VOTERS_MAX: Final = 9
STEPS_MAX: Final = 40
"""From one voter to nine and back takes fewer; more of them go round in circles."""


# ---- how many ----


def voters_wanted(image: MetadataImage, first_voters: Sequence[NodeId]) -> int:
    """How many nodes should vote."""
    return image.voters_wanted or len(first_voters)


def voters_for(nodes: int) -> int:
    """How many of so many nodes vote by themselves: the largest odd number up to five."""
    count = min(GROWN_MAX, nodes)
    return max(1, count - 1 + count % 2)


def grown_voters(
    before: MetadataImage, after: MetadataImage, first_voters: Sequence[NodeId]
) -> int:
    """How many should vote once nodes were added.

    Where there were fewer voters than the nodes would have allowed, somebody wanted it so, and it
    stays; else their number grows with the nodes. Nobody wants an even number: it came of a drain.
    """
    wanted = voters_wanted(before, first_voters)
    if wanted % 2 and wanted < voters_for(_count(before)):
        return wanted
    return max(wanted, voters_for(_count(after)))


def shrunk_voters(
    after: MetadataImage, configuration: Configuration, first_voters: Sequence[NodeId]
) -> int:
    """How many should vote once nodes leave: as many as before where each vote has a successor.

    Else the largest odd number for which there are nodes; but two where there are two: with one
    voter the metadata would be on a single disk.
    """
    wanted = voters_wanted(after, first_voters)
    obtainable = voters_obtainable(after, configuration)
    if obtainable >= wanted:
        return wanted
    return min(wanted, max(voters_for(obtainable), min(obtainable, 2), 1))


def voters_obtainable(image: MetadataImage, configuration: Configuration) -> int:
    """How many nodes could vote: the voters that stay, and those that could be given a vote."""
    staying = _staying(image, configuration)
    return len(staying) + len(_candidates(image, configuration, staying, ()))


def _count(image: MetadataImage) -> int:
    """How many nodes make up the cluster: registered, asked in, and not about to leave."""
    leaving = image.leaving()
    return sum(
        broker.state not in (NodeState.NEW, NodeState.DRAINING) and node_id not in leaving
        for node_id, broker in image.brokers.items()
    )


# ---- which ----


def metadata_target(
    configuration: Configuration, image: MetadataImage, first_voters: Sequence[NodeId]
) -> TargetMembership | None:
    """The members that the metadata group should have; None when it has them.

    Where there are fewer voters than wanted (after an unsafe recovery, too), live nodes are added:
    successors of replaced nodes, then others.
    """
    wanted = voters_wanted(image, first_voters)
    staying = _staying(image, configuration)
    voters = list(staying)
    for node_id in _candidates(image, configuration, staying, first_voters):
        if len(voters) >= wanted:
            break
        voters.append(node_id)
    # Without a successor a vote is better kept by a node that is about to leave.
    going = [v.node_id for v in configuration.voters if v.node_id not in voters]
    kept = [n for n in going if _state(image, n) is NodeState.DRAINING]
    voters += kept[: max(0, wanted - len(voters))]
    if image.voters_wanted:
        voters = _without_surplus(image, voters, wanted)
    return _target(configuration, image, voters)


def _target(
    configuration: Configuration, image: MetadataImage, voters: Sequence[NodeId]
) -> TargetMembership | None:
    leaving, present = image.leaving(), present_nodes(image)
    parting: list[NodeId] = []
    gone: list[NodeId] = []
    voting = [voter.node_id for voter in configuration.voters]
    for member in configuration.members:
        node_id = member.node_id
        if node_id in voters:
            continue
        if member.storage_id in image.removed.get(node_id, ()):
            gone.append(node_id)
        elif node_id in leaving:
            # A replaced node that is alive has to learn from the log which replicas it must hand
            # over and delete. It may be alive although it is fenced: without the log it would lead
            # partitions on, and no client would be told of it.
            follows = node_id in present or holds_any(image, node_id)
            (parting if follows else gone).append(node_id)
        elif node_id in voting:
            parting.append(node_id)  # it follows on: brokers read metadata from this log
    target = TargetMembership(tuple(voters), present, tuple(gone), tuple(parting))
    return None if target.is_reached(configuration) else target


def _staying(image: MetadataImage, configuration: Configuration) -> list[NodeId]:
    """The nodes that vote now and go on, each replaced one as its successor."""
    leaving = image.leaving()
    staying: list[NodeId] = []
    for voter in configuration.voters:
        node_id = successor_of(leaving, voter.node_id)
        is_removed = voter.storage_id in image.removed.get(voter.node_id, ())
        if node_id == voter.node_id and is_removed:
            continue
        if node_id not in staying and _state(image, node_id) is not NodeState.DRAINING:
            staying.append(node_id)
    return staying


def _candidates(
    image: MetadataImage,
    configuration: Configuration,
    voters: Sequence[NodeId],
    first_voters: Sequence[NodeId],
) -> list[NodeId]:
    """Nodes that could be given a vote, the best first: successors of replaced nodes, then such
    that spread the votes over racks, then those with which the cluster began."""
    leaving, present = image.leaving(), present_nodes(image)
    successors = [successor_of(leaving, node_id) for node_id in leaving]
    first = [successor_of(leaving, node_id) for node_id in first_voters]
    following = [m.node_id for m in configuration.members if m.node_id in present]
    able = [
        node_id
        for node_id in following
        if node_id not in voters
        and node_id not in leaving
        and (node_id in successors or _state(image, node_id) is NodeState.ACTIVE)
    ]
    chosen: list[NodeId] = []
    while able:
        votes = _votes_by_rack(image, (*voters, *chosen))
        best = min(
            able,
            key=lambda n: (n not in successors, votes.get(image.rack_of(n), 0), n not in first, n),
        )
        able.remove(best)
        chosen.append(best)
    return chosen


def _without_surplus(image: MetadataImage, voters: list[NodeId], wanted: int) -> list[NodeId]:
    """The voters but for those beyond the wanted number."""
    present = present_nodes(image)
    kept = list(voters)
    while len(kept) > wanted:
        votes = _votes_by_rack(image, kept)
        kept.remove(
            max(
                kept,
                key=lambda n: (
                    _state(image, n) is NodeState.DRAINING,
                    n not in present,
                    _state(image, n) is not NodeState.ACTIVE,
                    votes[image.rack_of(n)],
                    n,
                ),
            )
        )
    return kept


def _state(image: MetadataImage, node_id: NodeId) -> NodeState | None:
    broker = image.brokers.get(node_id)
    return None if broker is None else broker.state


def _votes_by_rack(image: MetadataImage, voters: Iterable[NodeId]) -> dict[tuple[str, int], int]:
    votes: dict[tuple[str, int], int] = {}
    for node_id in voters:
        rack = image.rack_of(node_id)
        votes[rack] = votes.get(rack, 0) + 1
    return votes


# ---- the way ----


def voter_steps(
    image: MetadataImage,
    configuration: Configuration,
    first_voters: Sequence[NodeId],
    leader: NodeId | None = None,
) -> Iterator[str]:
    """Each configuration that the metadata group goes through from here to the target of `image`,
    with its quorum, in words; first the present one. Its leader is the last to lose its vote.

    Raises:
        KafkaError: a step would leave it without a live majority.
    """
    present = present_nodes(image)
    end = yield from configuration_steps(
        METADATA_TOPIC,
        configuration,
        present,
        lambda now: metadata_target(now, image, first_voters),
        leader,
    )
    if metadata_target(end, image, first_voters) is not None:
        raise KafkaError(
            f"{METADATA_TOPIC}: voters {_ids(end.voters)} of which only "
            f"{_ids(_living(end, present))} live: the next step would lose the quorum. "
            "Bring a voter back first",
            code=ErrorCode.INELIGIBLE_REPLICA,
        )


def configuration_steps(
    group: str,
    configuration: Configuration,
    present: Mapping[NodeId, StorageId],
    target_of: Callable[[Configuration], TargetMembership | None],
    leader: NodeId | None = None,
) -> Generator[str, None, Configuration]:
    """Each configuration that a group goes through from here on, with its quorum, in words; first
    the present one. Returns the last one, which is short of the target where a step would be
    unsafe.

    Args:
        present: live nodes, each with its storage.
        target_of: the members that it should have, by its configuration; None when it has them.
        leader: the last to lose its vote.
    """
    yield _quorum_text(group, "now", configuration, present)
    for _ in range(STEPS_MAX):
        target = target_of(configuration)
        if target is None:
            break
        live = [m for m in configuration.members if m.node_id in present]
        live.sort(key=lambda m: m.node_id != leader)
        step = next_configuration(configuration, {}, live, live, target)
        if step is None:
            break
        yield _quorum_text(group, _change_text(configuration, step), step, present)
        configuration = step
    return configuration


def _living(configuration: Configuration, present: Mapping[NodeId, StorageId]) -> list[ReplicaId]:
    return [voter for voter in configuration.voters if voter.node_id in present]


def _quorum_text(
    group: str, what: str, configuration: Configuration, present: Mapping[NodeId, StorageId]
) -> str:
    """One configuration of a group in words: what leads to it, and how many votes it takes."""
    count = len(configuration.voters)
    alive = len(_living(configuration, present))
    return (
        f"{group}: {what}: voters {_ids(configuration.voters)}, {alive} of {count} live, "
        f"quorum {count // 2 + 1}"
    )


def _change_text(before: Configuration, after: Configuration) -> str:
    """One step from a configuration to another in words."""
    if arrived := [m for m in after.members if m not in before.members]:
        return f"add {_ids(arrived)} as a learner"
    if promoted := [v for v in after.voters if v not in before.voters]:
        return f"let {_ids(promoted)} vote once it has caught up"
    if demoted := [m for m in after.learners if m in before.voters]:
        return f"make {_ids(demoted)} a learner"
    return f"remove {_ids([m for m in before.members if m not in after.members])}"


def _ids(members: Sequence[ReplicaId]) -> str:
    return ",".join(str(member.node_id) for member in members) or "none"
