"""Why a partition is stuck, in words for an operator.

Reads one replica of this node and what the node sees of the others; changes nothing. What only the
leader can know comes from the leader's node; in a partition without a leader each replica reports
what it sees, and `raftmq cluster status` puts these reports together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from raftmq.types import NodeId

if TYPE_CHECKING:
    from raftmq.metadata.image import MetadataImage, TopicImage
    from raftmq.node.composition import NodeCore
    from raftmq.node.node import Node
    from raftmq.partition.partition import Partition
    from raftmq.replication.replica import Replica


def diagnose(node: Node, partition: Partition, replica: Replica) -> list[str]:
    """What keeps this partition from being led, written, or fully replicated."""
    if replica.failure is not None:
        return [f"replica on node {node.node_id} stopped: {replica.failure}"]
    found = [*_of_replica(node, replica)]
    if replica.is_leader:
        found += _of_leader(node, partition, replica)
    elif replica.leader is None:
        found.append(_no_leader(node, replica))
    return found


def _of_replica(node: Node, replica: Replica) -> Iterator[str]:
    own, core = node.node_id, replica.core
    for start, end in replica.damaged():
        yield f"offsets [{start}, {end}) are damaged on node {own}: waits for repair from peers"
    if replica.self_id not in replica.configuration.members:
        yield f"node {own} is no member under its present storage: waits to be admitted"
    elif replica.self_id not in replica.voters:
        yield f"node {own} is a learner: it votes once it has caught up"
    if core.claimed_end_floor:
        yield (
            f"node {own} lost or damaged bytes that it had promised: it votes for longer logs only"
        )
    if core.is_term_absurd:
        yield (
            f"node {own} is at leader epoch {core.term}, its log at {core.epochs.last_term}: no "
            "election can have led there, and peers do not believe it; see `raftmq recover "
            "--reset-term`"
        )
    if node.events.is_disk_full:
        yield f"the disk of node {own} is full: produces are refused"
    if node.events.is_disk_stuck:
        yield f"the disk of node {own} does not answer: a flush has not come back"


def _of_leader(node: Node, partition: Partition, replica: Replica) -> Iterator[str]:
    if not replica.is_writable:
        yield f"leader {node.node_id} waits for a majority to flush the entry of its election"
    in_sync = sorted(r.node_id for r in replica.in_sync_replicas())
    wanted = partition.settings.min_insync_replicas
    if len(in_sync) < wanted:
        yield f"acks=all is refused: in sync are {in_sync}, min.insync.replicas is {wanted}"
    assigned = node.engine.image.partition(partition.name)
    members = [member.node_id for member in replica.configuration.members]
    wished = () if assigned is None else assigned.replicas
    waiting = sorted(n for n in wished if n not in members)
    if waiting:
        yield f"nodes {waiting} should hold it and were not admitted yet"
    short = sorted(v.node_id for v in replica.voters if v not in replica.in_sync_replicas())
    if short and replica.is_writable:
        gone = missing(node, [NodeId(n) for n in short])
        if gone:
            yield f"out of sync: nodes {gone} do not answer"


def _no_leader(node: Node, replica: Replica) -> str:
    voters = [voter.node_id for voter in replica.voters]
    gone = missing(node, voters)
    reached = len(voters) - len(gone)
    if reached <= len(voters) // 2:
        return (
            f"no quorum: {reached} of voters {voters} are there, node {node.node_id} misses {gone}"
        )
    return f"no leader: an election is under way among voters {voters}"


def missing(node: Node, node_ids: list[NodeId]) -> list[int]:
    """Those of these nodes that this one does not reach, or to which the fault switch cuts it."""
    links = node.plane.links
    return [
        int(node_id)
        for node_id in node_ids
        if node_id != node.node_id
        and (
            not links.is_connected(node_id)
            or node_id in links.block_to
            or node_id in links.block_from
        )
    ]


def not_running(node: NodeCore, topic: TopicImage) -> list[dict[str, object]]:
    """Partitions of a topic that this node should hold and does not run (yet)."""
    by_id = node.partitions.registry.by_id
    return [
        {"topic": topic.name, "partition": partition.index}
        for partition in topic.partitions
        if node.node_id in partition.replicas and by_id(topic.topic_id, partition.index) is None
    ]


def unheld(image: MetadataImage, topic: TopicImage) -> list[dict[str, object]]:
    """Partitions of a topic that no live broker holds, so that no replica could tell why."""
    rows: list[dict[str, object]] = []
    for partition in topic.partitions:
        holders = sorted({*partition.replicas, *partition.voters})
        if any(image.live_epoch(node_id) is not None for node_id in holders):
            continue
        why = (
            f"no leader: all its replicas are on nodes {holders}, none of which is up; bring one "
            "back with its data. Where all of them are lost for good its records are, too: then "
            f"`raftmq topic delete {topic.name}` ends it"
        )
        rows.append({"topic": topic.name, "partition": partition.index, "why": why})
    return rows
