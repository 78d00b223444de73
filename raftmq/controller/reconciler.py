"""What a node must do so that its replicas become what the metadata image says. Pure.

Two images in, ordered actions out; the node performs them. Stops come before starts.

Invariants: data is deleted only where the image holds an order that names this node and the
partition's Raft group (`removals`, made by an applied delete or unassign command), never because
something is absent; a folder that nothing accounts for is quarantined and reported. A partition
that goes and comes again under its number is another one: each life is started, ordered away and
quarantined by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from attrs import frozen
from immutables import Map

from raftmq.log.folders import FIRST_LIFE, ReplicaFolder
from raftmq.metadata.image import (
    EMPTY_IMAGE,
    MetadataImage,
    PartitionImage,
    TopicImage,
    all_partitions,
)
from raftmq.types import LeaderEpoch, NodeId, Offset, RaftGroupId, ReplicaId, TopicPartition


@frozen(slots=True)
class StartReplica:
    """Run a replica.

    Attributes:
        voters: the members its group began with, the same on every node.
        is_return: this node is one of those and its group has let it go since, so it is none now.
        is_first_life: its topic had no other partition of its number before.
        begins_at: the offset with which its log begins.
        after_epoch: its leader epochs are above this one.
        producers: what the log before it knew of idempotent producers, which it begins with.
    """

    group: RaftGroupId
    name: TopicPartition
    voters: tuple[ReplicaId, ...]
    preferred_leader: NodeId
    configs: Map[str, str]
    is_return: bool = False
    is_first_life: bool = True
    begins_at: Offset = Offset(0)
    after_epoch: LeaderEpoch = LeaderEpoch(0)
    producers: bytes = b""

    @property
    def life(self) -> int:
        """Of which life its folder says to be."""
        return FIRST_LIFE if self.is_first_life else self.group.creation_epoch


@frozen(slots=True)
class StopReplica:
    """Stop a replica and delete its data, by order; then confirm with ConfirmRemoved.

    An order does not say whether its group was the first life of its number.
    """

    group: RaftGroupId
    name: TopicPartition


@frozen(slots=True)
class UpdateConfigs:
    """A topic's own configs changed."""

    name: TopicPartition
    group: RaftGroupId
    configs: Map[str, str]


@frozen(slots=True)
class UpdateTarget:
    """Other brokers should hold the partition: its leader makes it so, one member at a time."""

    name: TopicPartition
    group: RaftGroupId
    replicas: tuple[NodeId, ...]
    voters: tuple[NodeId, ...]


@frozen(slots=True)
class Quarantine:
    """Move a folder aside and report it: the image does not account for it."""

    folder: ReplicaFolder


Action: TypeAlias = StartReplica | StopReplica | UpdateConfigs | UpdateTarget | Quarantine


def reconcile(before: MetadataImage, after: MetadataImage, node_id: NodeId) -> list[Action]:
    """Actions for one node when its image moves from `before` to `after`."""
    if after.structure_version == before.structure_version:
        return []
    actions: list[Action] = list(_stops(before, after, node_id))
    for topic in _changed_topics(before, after):
        old = before.topic_by_id(topic.topic_id)
        lives = {} if old is None else {(p.index, p.creation_epoch): p for p in old.held}
        for partition in topic.held:
            previous = lives.get((partition.index, partition.creation_epoch))
            actions += _partition_actions(topic, partition, old, previous, node_id)
    if before.configs != after.configs:
        changed = {action.group for action in actions if isinstance(action, UpdateConfigs)}
        actions += [
            UpdateConfigs(
                TopicPartition(topic.name, p.index), topic.group_id(p.index), topic.configs
            )
            for topic in after.topics_by_id()
            for p in topic.held
            if _holds(p, node_id) and topic.group_id(p.index) not in changed
        ]
    return actions


def at_start(
    image: MetadataImage, node_id: NodeId, folders: Iterable[ReplicaFolder]
) -> list[Action]:
    """Actions for a node that has just become ready: `folders` names what was found on its disk.

    The image must be current (an entry proposed after the start was applied), else a folder of a
    partition that this node has not yet heard of would look unknown.
    """
    wanted = reconcile(EMPTY_IMAGE, image, node_id)
    known: set[RaftGroupId] = set()
    for action in wanted:
        if isinstance(action, StartReplica):
            known.add(_key(action))
        elif isinstance(action, StopReplica):
            known |= {action.group, action.group._replace(creation_epoch=FIRST_LIFE)}
    # A leader that had not seen that a node is dismissed may have let it vote: with what it has it
    # goes on, until it is ordered away or is wanted again.
    found = sorted(folders)
    keys = {folder.key for folder in found}
    for topic, partition in all_partitions(image):
        if node_id in partition.dismissed:
            start = _start(topic, partition, node_id)
            if _key(start) in keys and _key(start) not in known:
                wanted.append(start)
            known.add(_key(start))
    strangers = [Quarantine(folder) for folder in found if folder.key not in known]
    return [*strangers, *wanted]


def _stops(before: MetadataImage, after: MetadataImage, node_id: NodeId) -> Iterator[StopReplica]:
    for key in sorted(after.removals):
        removal = after.removals[key]
        earlier = before.removal(removal.group)
        if node_id not in removal.nodes:
            continue
        if earlier is None or node_id not in earlier.nodes:
            yield StopReplica(removal.group, TopicPartition(removal.topic, key.partition))


def _changed_topics(before: MetadataImage, after: MetadataImage) -> Iterator[TopicImage]:
    for topic in after.topics_by_id():
        if before.topics.get(topic.name) is not topic:
            yield topic


def _holds(partition: PartitionImage, node_id: NodeId) -> bool:
    return node_id in partition.replicas or node_id in partition.voters


def _wish(partition: PartitionImage) -> tuple[object, ...]:
    """What a leader acts on, or answers: a wish that came and went is one to be answered too."""
    return partition.replicas, partition.voters, partition.target_version


def _partition_actions(
    topic: TopicImage,
    partition: PartitionImage,
    old_topic: TopicImage | None,
    old: PartitionImage | None,
    node_id: NodeId,
) -> Iterator[Action]:
    if not _holds(partition, node_id):
        return
    name = TopicPartition(topic.name, partition.index)
    group = topic.group_id(partition.index)
    if old is None or not _holds(old, node_id):
        yield _start(topic, partition, node_id)
    elif old_topic is not None and old_topic.configs != topic.configs:
        yield UpdateConfigs(name, group, topic.configs)
    if old is not None and _wish(old) != _wish(partition):
        yield UpdateTarget(name, group, partition.replicas, partition.voters)


def _start(topic: TopicImage, partition: PartitionImage, node_id: NodeId) -> StartReplica:
    began = any(voter.node_id == node_id for voter in partition.first_voters)
    number = None if partition.is_first_life else topic.numbers.get(partition.index)
    return StartReplica(
        topic.group_id(partition.index),
        TopicPartition(topic.name, partition.index),
        partition.first_voters,
        partition.preferred_leader,
        topic.configs,
        is_return=began and node_id not in partition.voters,
        is_first_life=partition.is_first_life,
        begins_at=Offset(partition.begins_at),
        after_epoch=LeaderEpoch(max(partition.after_epoch, 0)),
        producers=b"" if number is None else number.producers,
    )


def _key(start: StartReplica) -> RaftGroupId:
    return start.group._replace(creation_epoch=start.life)
