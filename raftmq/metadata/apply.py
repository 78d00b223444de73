"""What a command does to the metadata image: a pure function, the same on every node.

Never raises on a well-formed command: a command that cannot be done returns a `Rejection` and
changes nothing but the submitter's sequence. (Were it to raise nevertheless, the node stops: going
on would let images drift apart.) Never looks at a clock, at randomness or at this node's identity.

Invariants: an envelope takes effect at most once (its sequence must be above its submitter's last);
a command of an older broker epoch, or computed from a state that has changed, is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import msgspec
from attrs import evolve
from immutables import Map

from raftmq.errors import ErrorCode
from raftmq.metadata.apply_groups import apply_group, remove_topics
from raftmq.metadata.apply_transactions import (
    PRODUCER_ID_END,
    apply_commits,
    apply_rows,
    is_transactional,
    remove_partitions,
)
from raftmq.metadata.commands import (
    GROUP_COMMANDS,
    AllocateProducerIds,
    AlterConfigs,
    CommitMany,
    CommitOffsets,
    CommitsDone,
    ConfirmRemoved,
    CreatePartitions,
    CreateTopics,
    DeleteTopics,
    Done,
    EndReplacement,
    Envelope,
    FenceBroker,
    NoOperation,
    ProducerIds,
    ReassignPartition,
    RegisterBroker,
    Registered,
    Rejection,
    ReplaceNode,
    ReportVoters,
    Result,
    TopicCreation,
    TopicOutcome,
    TopicOutcomes,
    TransactionRows,
    UnfenceBroker,
    UnregisterBroker,
    UpdateFeatures,
)
from raftmq.metadata.features import changed, outside, ranges_of, update_error
from raftmq.metadata.image import (
    LEVEL_OF_TRANSACTIONS,
    BrokerImage,
    ConfigKey,
    MetadataImage,
    PartitionImage,
    RemovalImage,
    ReplacementImage,
    TopicImage,
)
from raftmq.types import NodeId, Offset, ReplicaId, TopicId, TopicPartition

Applied: TypeAlias = tuple[MetadataImage, Result]
Removals: TypeAlias = Map[tuple[TopicId, int], RemovalImage]

STALE_SEQUENCE: Final = Rejection(
    ErrorCode.INVALID_UPDATE_VERSION, "the sequence is not above the submitter's last"
)
"""Result of a command that was applied before, or came too late to be applied at all."""


def apply(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    """Apply one command at `offset`; returns the next image and the command's result."""
    assert offset > image.version, "commands are applied once, in log order"
    submitted = (envelope.incarnation, envelope.sequence)
    if submitted <= image.submitters.get(envelope.node_id, (-1, -1)):
        return evolve(image, version=offset), STALE_SEQUENCE
    submitters = image.submitters.set(envelope.node_id, submitted)
    command = envelope.command
    rejection = _fencing(image, envelope)
    if rejection is not None:
        return evolve(image, version=offset, submitters=submitters), rejection
    result: Result
    if isinstance(command, CommitOffsets | CommitMany):
        after, result = _apply_commits(image, command)
        return evolve(after, version=offset, submitters=submitters), result
    if isinstance(command, TransactionRows):
        after, result = _apply_transactional(image, command)
        return evolve(after, version=offset, submitters=submitters), result
    if isinstance(command, _GROUP_TYPES):
        groups, result = apply_group(image.groups, command, image.live_epoch)  # type: ignore[arg-type]
        return evolve(image, version=offset, submitters=submitters, groups=groups), result
    handler = _HANDLERS[type(command)]
    after, result = handler(image, envelope, offset)
    changed = after is not image and not isinstance(command, AllocateProducerIds)
    return (
        evolve(
            after,
            version=offset,
            submitters=submitters,
            structure_version=offset if changed else image.structure_version,
        ),
        result,
    )


def _apply_transactional(
    image: MetadataImage, command: TransactionRows | CommitOffsets | CommitMany
) -> Applied:
    if image.level < LEVEL_OF_TRANSACTIONS:  # no snapshot of this level holds them
        return image, Rejection(ErrorCode.UNSUPPORTED_VERSION, "the level is too low")
    if isinstance(command, TransactionRows):
        return apply_rows(image, command)
    return apply_commits(image, command)


def _apply_commits(image: MetadataImage, command: CommitOffsets | CommitMany) -> Applied:
    """Commits, except those for partitions that are others by now under the same name. Whoever
    committed there is asked to try again: its coordinator knows them as they are now."""
    if isinstance(command, CommitOffsets):
        is_astray = _is_astray(image, command)
        return (image, Rejection(_ASTRAY)) if is_astray else _apply_all(image, command)
    astray = [_is_astray(image, commit) for commit in command.commits]
    if not any(astray):
        return _apply_all(image, command)
    kept = tuple(commit for commit, is_it in zip(command.commits, astray, strict=True) if not is_it)
    after, result = _apply_all(image, msgspec.structs.replace(command, commits=kept))
    if not isinstance(result, CommitsDone):
        return after, result
    codes = iter(result.codes)
    return after, CommitsDone(tuple(int(_ASTRAY) if is_it else next(codes) for is_it in astray))


def _apply_all(image: MetadataImage, command: CommitOffsets | CommitMany) -> Applied:
    if is_transactional(command):
        return _apply_transactional(image, command)
    groups, result = apply_group(image.groups, command, image.live_epoch)
    return evolve(image, groups=groups), result


def _is_astray(image: MetadataImage, commit: CommitOffsets) -> bool:
    """True when a partition was deleted, or made, after the version in which it was seen."""
    if commit.known_version < 0:
        return False
    for offset in commit.offsets:
        partition = image.partition(TopicPartition(offset.topic, offset.partition))
        if partition is None or partition.creation_epoch > commit.known_version:
            return True
    return False


def _fencing(image: MetadataImage, envelope: Envelope) -> Rejection | None:
    if envelope.broker_epoch >= 0:
        broker = image.brokers.get(envelope.node_id)
        if broker is None or broker.epoch != envelope.broker_epoch:
            return Rejection(ErrorCode.STALE_BROKER_EPOCH, "made under an older registration")
    if 0 <= envelope.expected_version < image.structure_version:
        return Rejection(ErrorCode.INVALID_UPDATE_VERSION, "the state it was computed from changed")
    return None


# ---- brokers ----


def _register_broker(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    command: RegisterBroker = envelope.command  # type: ignore[assignment]  # by _HANDLERS
    if image.cluster_id and command.cluster_id != image.cluster_id:
        return image, Rejection(
            ErrorCode.INCONSISTENT_CLUSTER_ID,
            f"this cluster is {image.cluster_id!r}, not {command.cluster_id!r}",
        )
    known = image.brokers.get(command.node_id)
    if known is not None and known.storage_id != command.storage and not known.is_fenced:
        return image, Rejection(
            ErrorCode.DUPLICATE_BROKER_REGISTRATION,
            f"another broker {command.node_id} with other storage is live",
        )
    if beyond := outside(image.features, ranges_of(command.features)):
        return image, Rejection(
            ErrorCode.UNSUPPORTED_VERSION,
            f"broker {command.node_id} cannot be in this cluster: {beyond} by it",
        )
    broker = BrokerImage(
        node_id=command.node_id,
        storage_id=command.storage,
        epoch=offset,
        incarnation=envelope.incarnation,
        rack=command.rack,
        endpoints=command.endpoints,
        features=command.features,
        is_fenced=True,
    )
    removals = image.removals
    if known is not None and known.storage_id != command.storage:
        # The data that it was ordered to delete is gone with its old disk.
        removals = _without_node(image, command.node_id)
    replacements = image.replacements
    replaced = replacements.get(command.node_id)
    if replaced is not None and replaced.is_done:
        replacements = replacements.delete(command.node_id)  # it begins anew, with nothing
    next_producer_id = image.next_producer_id
    if command.recoveries > image.recoveries:
        next_producer_id = min(next_producer_id + PRODUCER_ID_BLOCK_MAX, PRODUCER_ID_END)
    after = evolve(
        image,
        recoveries=max(image.recoveries, command.recoveries),
        next_producer_id=next_producer_id,
        cluster_id=image.cluster_id or command.cluster_id,
        brokers=image.brokers.set(command.node_id, broker),
        removals=removals,
        replacements=replacements,
    )
    return after, Registered(offset)


def _set_fenced(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    command: FenceBroker | UnfenceBroker = envelope.command  # type: ignore[assignment]
    broker = image.brokers.get(command.node_id)
    if broker is None:
        return image, Rejection(ErrorCode.BROKER_ID_NOT_REGISTERED)
    if broker.epoch != command.broker_epoch:
        return image, Rejection(ErrorCode.STALE_BROKER_EPOCH)
    is_fenced = isinstance(command, FenceBroker)
    if broker.is_fenced == is_fenced:
        return image, Done(offset)
    changed = evolve(broker, is_fenced=is_fenced)
    return evolve(image, brokers=image.brokers.set(broker.node_id, changed)), Done(offset)


def _unregister_broker(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    command: UnregisterBroker = envelope.command  # type: ignore[assignment]
    if command.node_id not in image.brokers:
        return image, Rejection(ErrorCode.BROKER_ID_NOT_REGISTERED)
    held = _held_by(image, command.node_id)
    return (image, held) if held is not None else (_forget(image, command.node_id), Done(offset))


def _held_by(image: MetadataImage, node_id: NodeId) -> Rejection | None:
    for topic in image.topics_by_id():
        for partition in topic.partitions:
            if node_id in partition.replicas or node_id in partition.voters:
                return Rejection(
                    ErrorCode.POLICY_VIOLATION, f"broker {node_id} holds replicas of {topic.name}"
                )
    return None


def _forget(image: MetadataImage, node_id: NodeId) -> MetadataImage:
    brokers = image.brokers
    if node_id in brokers:
        brokers = brokers.delete(node_id)
    return evolve(image, brokers=brokers, removals=_without_node(image, node_id))


def _replace_node(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    command: ReplaceNode = envelope.command  # type: ignore[assignment]
    old_id, new_id = command.old_id, command.new_id
    if new_id not in image.brokers:
        return image, Rejection(
            ErrorCode.BROKER_ID_NOT_REGISTERED, f"node {new_id} is not registered"
        )
    leaving = image.leaving()
    if old_id == new_id or new_id in leaving:
        return image, Rejection(ErrorCode.INVALID_REQUEST, f"node {new_id} is to go itself")
    if leaving.get(old_id) == new_id:
        return image, Done(offset)
    replacements = image.replacements.set(old_id, ReplacementImage(old_id, new_id))
    return evolve(image, replacements=replacements), Done(offset)


def _end_replacement(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    command: EndReplacement = envelope.command  # type: ignore[assignment]
    old_id = command.old_id
    row = image.replacements.get(old_id)
    if row is None or row.is_done:
        return image, Done(offset)
    if image.live_epoch(old_id) is not None:
        return image, Rejection(ErrorCode.POLICY_VIOLATION, f"broker {old_id} is alive")
    held = _held_by(image, old_id)
    if held is not None:
        return image, held
    replacements = image.replacements.set(old_id, evolve(row, is_done=True))
    return evolve(_forget(image, old_id), replacements=replacements), Done(offset)


# ---- topics ----


def _create_topics(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
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
    result = TopicOutcomes(tuple(outcomes))
    if topics is image.topics:
        return image, result
    return evolve(image, topics=topics, topic_names=names), result


def _creation_error(
    image: MetadataImage,
    topics: Map[str, TopicImage],
    names: Map[TopicId, str],
    creation: TopicCreation,
) -> Rejection | None:
    if creation.name in topics:
        return Rejection(ErrorCode.TOPIC_ALREADY_EXISTS, f"Topic '{creation.name}' already exists.")
    if creation.topic_id in names or not creation.topic_id.int:
        return Rejection(ErrorCode.INVALID_REQUEST, "topic ids are never zero and never reused")
    if not creation.replicas:
        return Rejection(ErrorCode.INVALID_PARTITIONS, "a topic has at least one partition")
    return _replicas_error(image, creation.replicas)


def _replicas_error(
    image: MetadataImage, replicas: Sequence[tuple[NodeId, ...]]
) -> Rejection | None:
    for nodes in replicas:
        if not nodes or len(dict.fromkeys(nodes)) != len(nodes):
            return Rejection(ErrorCode.INVALID_REPLICA_ASSIGNMENT, "no replica, or one twice")
        for node_id in nodes:
            if node_id not in image.brokers:
                return Rejection(
                    ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"broker {node_id} is not registered"
                )
    return None


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


def _delete_topics(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    command: DeleteTopics = envelope.command  # type: ignore[assignment]
    topics, names, removals = image.topics, image.topic_names, image.removals
    outcomes = []
    for topic_id in command.topic_ids:
        name = names.get(topic_id)
        if name is None:
            outcomes.append(TopicOutcome("", topic_id, ErrorCode.UNKNOWN_TOPIC_ID))
            continue
        topic = topics[name]
        for partition in topic.partitions:
            ordered = removals.get((topic_id, partition.index))
            left = () if ordered is None else ordered.nodes
            nodes = tuple(sorted(dict.fromkeys((*partition.replicas, *partition.voters, *left))))
            removals = removals.set(
                (topic_id, partition.index),
                RemovalImage(name, topic.group_id(partition.index), nodes),
            )
        topics = topics.delete(name)
        names = names.delete(topic_id)
        outcomes.append(TopicOutcome(name, topic_id))
    result = TopicOutcomes(tuple(outcomes))
    if topics is image.topics:
        return image, result
    groups = remove_topics(image.groups, [o.name for o in outcomes if o.code is ErrorCode.NONE])
    transactions = image.transactions
    for topic_id in command.topic_ids:
        gone = image.topic_by_id(topic_id)
        if gone is not None:
            transactions = remove_partitions(transactions, topic_id, range(len(gone.partitions)))
    after = evolve(
        image,
        topics=topics,
        topic_names=names,
        removals=removals,
        groups=groups,
        transactions=transactions,
    )
    return after, result


def _create_partitions(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    command: CreatePartitions = envelope.command  # type: ignore[assignment]
    topics = image.topics
    outcomes = []
    for addition in command.additions:
        name = image.topic_names.get(addition.topic_id)
        if name is None:
            outcomes.append(TopicOutcome("", addition.topic_id, ErrorCode.UNKNOWN_TOPIC_ID))
            continue
        topic = topics[name]
        rejection = _replicas_error(image, addition.replicas)
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
        topics = topics.set(name, evolve(topic, partitions=topic.partitions + added))
        outcomes.append(TopicOutcome(name, addition.topic_id))
    result = TopicOutcomes(tuple(outcomes))
    return (image if topics is image.topics else evolve(image, topics=topics)), result


def _reassign_partition(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    command: ReassignPartition = envelope.command  # type: ignore[assignment]
    topic = image.topic_by_id(command.topic_id)
    if topic is None or not 0 <= command.partition < len(topic.partitions):
        return image, Rejection(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    rejection = _replicas_error(image, (command.replicas,))
    if rejection is not None:
        return image, rejection
    partition = evolve(topic.partitions[command.partition], replicas=command.replicas)
    removals = image.removals
    for node_id in command.replicas:  # wanted again: an order to delete that it has not yet obeyed
        removals = _remove_node(removals, (command.topic_id, command.partition), node_id)
    after = evolve(_with_partition(image, topic, partition), removals=removals)
    return after, Done(offset)


def _report_voters(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    command: ReportVoters = envelope.command  # type: ignore[assignment]
    after = image
    for report in command.reports:
        topic = after.topic_by_id(report.topic_id)
        if topic is None or not 0 <= report.partition < len(topic.partitions) or not report.voters:
            continue
        partition = topic.partitions[report.partition]
        if report.leader_epoch < partition.voters_epoch or report.voters == partition.voters:
            continue
        changed = evolve(partition, voters=report.voters, voters_epoch=report.leader_epoch)
        removals = _after_report(after, topic, partition, changed)
        after = evolve(_with_partition(after, topic, changed), removals=removals)
    return after, Done(offset)


def _after_report(
    image: MetadataImage, topic: TopicImage, before: PartitionImage, after: PartitionImage
) -> Removals:
    """Who left the group by its own word, and is not wanted by metadata either, may delete."""
    key = (topic.topic_id, after.index)
    ordered = image.removals.get(key)
    nodes = (*(ordered.nodes if ordered is not None else ()), *before.voters)
    left = [n for n in nodes if n not in after.voters and n not in after.replicas]
    if not left:
        return image.removals.delete(key) if ordered is not None else image.removals
    removal = RemovalImage(topic.name, topic.group_id(after.index), tuple(sorted(set(left))))
    return image.removals.set(key, removal)


def _with_partition(
    image: MetadataImage, topic: TopicImage, partition: PartitionImage
) -> MetadataImage:
    i = partition.index
    partitions = (*topic.partitions[:i], partition, *topic.partitions[i + 1 :])
    return evolve(image, topics=image.topics.set(topic.name, evolve(topic, partitions=partitions)))


def _confirm_removed(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    command: ConfirmRemoved = envelope.command  # type: ignore[assignment]
    removals = image.removals
    for key in command.replicas:
        removals = _remove_node(removals, key, command.node_id)
    after = image if removals is image.removals else evolve(image, removals=removals)
    return after, Done(offset)


def _remove_node(removals: Removals, key: tuple[TopicId, int], node_id: NodeId) -> Removals:
    removal = removals.get(key)
    if removal is None or node_id not in removal.nodes:
        return removals
    nodes = tuple(n for n in removal.nodes if n != node_id)
    return removals.set(key, evolve(removal, nodes=nodes)) if nodes else removals.delete(key)


def _without_node(image: MetadataImage, node_id: NodeId) -> Removals:
    removals = image.removals
    for key in sorted(removals):
        removals = _remove_node(removals, key, node_id)
    return removals


# ---- configs and producers ----


def _alter_configs(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    command: AlterConfigs = envelope.command  # type: ignore[assignment]
    after = image
    for change in command.changes:
        if change.resource_type == "topic":
            topic = after.topics.get(change.resource_name)
            if topic is None:
                return image, Rejection(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, change.resource_name)
            configs = _with_configs(topic.configs, change.set, change.delete)
            after = evolve(
                after, topics=after.topics.set(topic.name, evolve(topic, configs=configs))
            )
        else:
            key = (change.resource_type, change.resource_name)
            configs = _with_configs(after.configs.get(key, Map()), change.set, change.delete)
            stored = after.configs.set(key, configs) if configs else _discard(after.configs, key)
            after = evolve(after, configs=stored)
    return after, Done(offset)


def _discard(
    configs: Map[ConfigKey, Map[str, str]], key: ConfigKey
) -> Map[ConfigKey, Map[str, str]]:
    return configs.delete(key) if key in configs else configs


def _with_configs(
    configs: Map[str, str], values: dict[str, str], deleted: Sequence[str]
) -> Map[str, str]:
    for name in deleted:
        configs = configs.delete(name) if name in configs else configs
    return configs.update(values) if values else configs


def _allocate_producer_ids(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    command: AllocateProducerIds = envelope.command  # type: ignore[assignment]
    start = image.next_producer_id
    end = start + max(1, min(command.count, PRODUCER_ID_BLOCK_MAX))
    if end > PRODUCER_ID_END:
        return image, Rejection(ErrorCode.UNKNOWN_SERVER_ERROR, "producer ids are used up")
    return evolve(image, next_producer_id=end), ProducerIds(start, end)


def _update_features(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    command: UpdateFeatures = envelope.command  # type: ignore[assignment]
    updates = [(update.name, update.level) for update in command.updates]
    if reason := update_error(image, updates):
        return image, Rejection(ErrorCode.FEATURE_UPDATE_FAILED, reason)
    levels = changed(image, updates)
    if levels == dict(image.features):
        return image, Done(offset)
    return evolve(image, features=Map(levels), features_epoch=int(offset)), Done(offset)


def _no_operation(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    return image, Done(offset)


PRODUCER_ID_BLOCK_MAX: Final = 1_000_000
_ASTRAY: Final = ErrorCode.COORDINATOR_NOT_AVAILABLE  # which every client tries again

_GROUP_TYPES: Final[tuple[type, ...]] = tuple(GROUP_COMMANDS)
_HANDLERS: Final[dict[type, Callable[[MetadataImage, Envelope, Offset], Applied]]] = {
    RegisterBroker: _register_broker,
    FenceBroker: _set_fenced,
    UnfenceBroker: _set_fenced,
    UnregisterBroker: _unregister_broker,
    ReplaceNode: _replace_node,
    EndReplacement: _end_replacement,
    CreateTopics: _create_topics,
    DeleteTopics: _delete_topics,
    CreatePartitions: _create_partitions,
    ReassignPartition: _reassign_partition,
    ReportVoters: _report_voters,
    ConfirmRemoved: _confirm_removed,
    AlterConfigs: _alter_configs,
    AllocateProducerIds: _allocate_producer_ids,
    UpdateFeatures: _update_features,
    NoOperation: _no_operation,
}
