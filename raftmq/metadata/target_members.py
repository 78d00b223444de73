"""Who should belong to a group, by the metadata image: a replaced node yields to its successor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from raftmq.metadata.metadata_image import MetadataImage, PartitionImage, TopicImage
from raftmq.raft.membership import Configuration
from raftmq.replication.membership import TargetMembership
from raftmq.types import NodeId, StorageId, TopicId


def present_nodes(image: MetadataImage) -> dict[NodeId, StorageId]:
    """Live nodes, each with its storage."""
    return {broker.node_id: broker.storage_id for broker in image.live_brokers()}


def metadata_target(
    configuration: Configuration, image: MetadataImage, first_voters: Sequence[NodeId]
) -> TargetMembership | None:
    """Who should vote in the metadata group; None when it is as it should be.

    A replaced voter's place is its successor's. Where fewer vote than the cluster began with (a
    lost majority was given up), live nodes fill up: successors, then first voters, then others.
    """
    leaving = image.leaving()
    voting = [voter.node_id for voter in configuration.voters]
    present = present_nodes(image)
    voters: list[NodeId] = []
    for node_id in voting:
        successor = successor_of(leaving, node_id)
        if successor not in voters:
            voters.append(successor)
    observers = [learner.node_id for learner in configuration.learners]
    candidates = [successor_of(leaving, node_id) for node_id in (*leaving, *first_voters, *present)]
    for node_id in candidates:
        if len(voters) >= len(first_voters):
            break
        if node_id in present and node_id in observers and node_id not in voters:
            voters.append(node_id)
    parting = [
        member.node_id
        for member in configuration.members
        if member.node_id in leaving and member.node_id not in voters
    ]
    # While it lives it has to learn what it is to give away and to delete. It may live though it is
    # fenced, and lead partitions that it would lead on, named to no client, if it never heard.
    demoted = tuple(n for n in parting if n in present or holds_any(image, n))
    gone = tuple(n for n in parting if n not in demoted)
    target = TargetMembership(tuple(voters), present, gone, demoted)
    return None if target.is_reached(configuration) else target


def successor_of(leaving: Mapping[NodeId, NodeId], node_id: NodeId) -> NodeId:
    """Who takes a node's place in the end: successors may be replaced as well."""
    for _ in range(len(leaving)):
        if node_id not in leaving:
            break
        node_id = leaving[node_id]
    return node_id


def partition_target(
    image: MetadataImage, topic_id: TopicId, partition: int
) -> TargetMembership | None:
    """Who should hold a partition, as metadata has it; None when there is no such partition."""
    topic = image.topic_by_id(topic_id)
    if topic is None or partition >= len(topic.partitions):
        return None
    replicas = topic.partitions[partition].replicas
    # Only whom metadata holds live is added: the others would be waited for.
    brokers = image.brokers
    present = {
        node_id: brokers[node_id].storage_id
        for node_id in replicas
        if node_id in brokers and not brokers[node_id].is_fenced
    }
    return TargetMembership(replicas, present)


def all_partitions(image: MetadataImage) -> Iterator[tuple[TopicImage, PartitionImage]]:
    """Every partition, with its topic."""
    for topic in image.topics_by_id():
        for partition in topic.partitions:
            yield topic, partition


def holds_any(image: MetadataImage, node_id: NodeId) -> bool:
    """True while a node has, or is to have, a replica of any partition."""
    return any(holds(partition, node_id) for _, partition in all_partitions(image))


def holds(partition: PartitionImage, node_id: NodeId) -> bool:
    """True while a node has, or is to have, a replica of that partition."""
    return node_id in partition.replicas or node_id in partition.voters
