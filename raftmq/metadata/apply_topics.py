"""What commands do to topics: pure functions of `apply.py`.

Invariants: topic ids are never zero and never reused while their topic is there; partitions are
numbered from 0 without a gap; with a topic goes everything that is about it, and every node that
may have data of it is ordered to delete that.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve
from immutables import Map

from raftmq.errors import ErrorCode
from raftmq.metadata.apply_groups import remove_topics
from raftmq.metadata.apply_moves import Applied, replicas_error
from raftmq.metadata.apply_transactions import remove_partitions
from raftmq.metadata.apply_views import (
    committed_in,
    create_views,
    delete_views,
    grown,
    growth_error,
    removal_of,
    without_view,
)
from raftmq.metadata.commands import (
    CreatePartitions,
    CreateTopics,
    DeleteTopics,
    Envelope,
    TopicCreation,
)
from raftmq.metadata.image import MetadataImage, PartitionImage, TopicImage
from raftmq.metadata.results import Rejection, TopicOutcome, TopicOutcomes
from raftmq.types import NodeId, Offset, ReplicaId, TopicId


def create_topics(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    """Create topics, then views; each succeeds or fails by itself."""
    command: CreateTopics = envelope.command  # type: ignore[assignment]
    topics, names = image.topics, image.topic_names
    outcomes = []
    for creation in command.topics:
        rejection = _creation_error(image, topics, names, creation)
        if rejection is None:
            partitions = _partitions(image, 0, creation.replicas, offset)
            topic = TopicImage(creation.name, creation.topic_id, partitions, Map(creation.configs))
            topics = topics.set(creation.name, topic)
            names = names.set(creation.topic_id, creation.name)
            outcomes.append(TopicOutcome(creation.name, creation.topic_id))
        else:
            outcomes.append(
                TopicOutcome(creation.name, creation.topic_id, rejection.code, rejection.message)
            )
    if topics is not image.topics:
        image = evolve(image, topics=topics, topic_names=names)
    image, made = create_views(image, command.views, offset)
    return image, TopicOutcomes((*outcomes, *made))


def _creation_error(
    image: MetadataImage,
    topics: Map[str, TopicImage],
    names: Map[TopicId, str],
    creation: TopicCreation,
) -> Rejection | None:
    if creation.name in topics:
        return Rejection(ErrorCode.TOPIC_ALREADY_EXISTS, f"Topic '{creation.name}' already exists.")
    if creation.name in image.views:
        return Rejection(ErrorCode.TOPIC_ALREADY_EXISTS, f"'{creation.name}' is a view.")
    is_taken = creation.topic_id in names or image.view_by_id(creation.topic_id) is not None
    if is_taken or not creation.topic_id.int:
        return Rejection(ErrorCode.INVALID_REQUEST, "topic ids are never zero and never reused")
    if not creation.replicas:
        return Rejection(ErrorCode.INVALID_PARTITIONS, "a topic has at least one partition")
    return replicas_error(image, creation.replicas)


def _partitions(
    image: MetadataImage, first: int, replicas: Sequence[tuple[NodeId, ...]], offset: Offset
) -> tuple[PartitionImage, ...]:
    return tuple(
        PartitionImage(
            index=first + i,
            creation_epoch=offset,
            replicas=nodes,
            first_voters=_members(image, nodes),
            voters=tuple(sorted(nodes)),
        )
        for i, nodes in enumerate(replicas)
    )


def _members(image: MetadataImage, nodes: Sequence[NodeId]) -> tuple[ReplicaId, ...]:
    return tuple(image.brokers[node_id].replica_id for node_id in sorted(nodes))


def delete_topics(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    """Delete views, then topics with all views over them, and order their data away."""
    command: DeleteTopics = envelope.command  # type: ignore[assignment]
    image, outcomes = delete_views(image, command.views)
    topics, names, removals = image.topics, image.topic_names, image.removals
    views = image.views
    forgotten: list[str] = []
    for topic_id in command.topic_ids:
        name = names.get(topic_id)
        if name is None:
            outcomes.append(TopicOutcome("", topic_id, ErrorCode.UNKNOWN_TOPIC_ID))
            continue
        topic = topics[name]
        for partition in topic.held:
            removals = removals.update(removal_of(image, topic, partition))
        topics = topics.delete(name)
        for known_id in (topic.topic_id, *topic.aliases):
            names = names.delete(known_id)
        forgotten += committed_in(image, topic)
        for view in image.views.values():
            if view.source == topic.topic_id:
                views = views.delete(view.name)
        outcomes.append(TopicOutcome(name, topic_id))
    result = TopicOutcomes(tuple(outcomes))
    if topics is image.topics:
        return image, result
    groups = remove_topics(image.groups, forgotten)
    transactions = image.transactions
    for topic_id in command.topic_ids:
        gone = image.topic_by_id(topic_id)
        if gone is not None:
            numbers = [partition.index for partition in gone.held]
            transactions = remove_partitions(transactions, gone.topic_id, numbers)
    after = evolve(
        image,
        topics=topics,
        topic_names=names,
        removals=removals,
        groups=groups,
        transactions=transactions,
        views=views,
    )
    return after, result


def create_partitions(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    """Add partitions to topics."""
    command: CreatePartitions = envelope.command  # type: ignore[assignment]
    topics = image.topics
    outcomes = []
    for addition in command.additions:
        name = image.topic_names.get(addition.topic_id)
        if name is None:
            outcomes.append(TopicOutcome("", addition.topic_id, ErrorCode.UNKNOWN_TOPIC_ID))
            continue
        topic = topics[name]
        rejection = replicas_error(image, addition.replicas)
        if rejection is None:
            rejection = growth_error(topic, len(addition.replicas))
        if addition.first_partition != len(topic.partitions):
            rejection = Rejection(
                ErrorCode.INVALID_PARTITIONS, f"Topic currently has {len(topic.partitions)}"
            )
        if rejection is not None:
            outcomes.append(
                TopicOutcome(name, addition.topic_id, rejection.code, rejection.message)
            )
            continue
        added = _partitions(image, addition.first_partition, addition.replicas, offset)
        topics = topics.set(name, grown(topic, added, offset))
        outcomes.append(TopicOutcome(name, addition.topic_id))
    result = TopicOutcomes(tuple(outcomes))
    if topics is image.topics:
        return image, result
    after = evolve(image, topics=topics)
    for addition in command.additions:
        wider = after.topic_by_id(addition.topic_id)
        after = after if wider is None else without_view(after, wider)
    return after, result
