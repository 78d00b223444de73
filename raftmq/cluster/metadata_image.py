"""The state of the metadata group at one offset, as an immutable value.

Owns the shape of brokers, topics, partitions and configs and the snapshot's encoding (version,
CRC-32C over all bytes). Never changes: `apply.py` makes the next image, which shares all that did
not change (`immutables.Map`), so that readers may keep one as long as they like.

Invariants: `version` is the offset of the last applied command, -1 before the first;
`structure_version` that of the last one that changed brokers, topics or configs; `topic_names` is
the inverse of `topics`; whatever is not in a snapshot is not state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from attrs import field, frozen
from crc32c import crc32c
from immutables import Map

from raftmq.cluster.commands import Endpoint
from raftmq.cluster.group_image import GroupsImage, GroupsRecord, from_record, to_record
from raftmq.errors import RaftmqError
from raftmq.types import (
    Buffer,
    NodeId,
    RaftGroupId,
    ReplicaId,
    StorageId,
    TopicId,
    TopicPartition,
)

SNAPSHOT_VERSION: Final = 1
SNAPSHOT_MAGIC: Final = b"RQMS"
FIRST_PRODUCER_ID: Final = 0


class SnapshotError(RaftmqError):
    """A metadata snapshot that must not be used: damaged, or of a newer format."""


@frozen(slots=True)
class BrokerImage:
    """One registered broker."""

    node_id: NodeId
    storage_id: StorageId
    epoch: int
    incarnation: int
    rack: str | None
    endpoints: tuple[Endpoint, ...]
    features: tuple[str, ...]
    is_fenced: bool

    @property
    def replica_id(self) -> ReplicaId:
        """This broker as a member of a Raft group."""
        return ReplicaId(self.node_id, self.storage_id)

    def endpoint(self, name: str) -> Endpoint | None:
        """Where its listener of that name is."""
        for endpoint in self.endpoints:
            if endpoint.name == name:
                return endpoint
        return None


@frozen(slots=True)
class PartitionImage:
    """One partition: who should hold it, and who votes as its leader last reported.

    `first_voters` are the members with which its Raft group began, the same on every node for ever:
    a broker that lost its disk is not among them under its new storage id.
    """

    index: int
    creation_epoch: int
    replicas: tuple[NodeId, ...]
    first_voters: tuple[ReplicaId, ...]
    voters: tuple[NodeId, ...]
    voters_epoch: int = -1

    @property
    def preferred_leader(self) -> NodeId:
        """The replica that should lead when it can."""
        return self.replicas[0]


@frozen(slots=True)
class TopicImage:
    """One topic; `configs` holds only what was set on it."""

    name: str
    topic_id: TopicId
    partitions: tuple[PartitionImage, ...]
    configs: Map[str, str]

    def group_id(self, partition: int) -> RaftGroupId:
        """The Raft group of one partition."""
        return RaftGroupId(self.topic_id, partition, self.partitions[partition].creation_epoch)

    @property
    def replication_factor(self) -> int:
        """Replicas of its first partition."""
        return len(self.partitions[0].replicas)


@frozen(slots=True)
class RemovalImage:
    """An order to delete: the named brokers still have to delete their data of one partition."""

    topic: str
    group: RaftGroupId
    nodes: tuple[NodeId, ...]


ConfigKey = tuple[str, str]
"""(resource type, name): ("broker", "") is the default of all brokers, ("broker", "3") is one."""


@frozen(slots=True)
class MetadataImage:
    """Everything that the metadata group has agreed on, at `version`."""

    version: int = -1
    structure_version: int = -1
    cluster_id: str = ""
    topics: Map[str, TopicImage] = field(factory=Map)
    topic_names: Map[TopicId, str] = field(factory=Map)
    brokers: Map[NodeId, BrokerImage] = field(factory=Map)
    configs: Map[ConfigKey, Map[str, str]] = field(factory=Map)
    removals: Map[tuple[TopicId, int], RemovalImage] = field(factory=Map)
    next_producer_id: int = FIRST_PRODUCER_ID
    submitters: Map[NodeId, tuple[int, int]] = field(factory=Map)
    groups: GroupsImage = field(factory=GroupsImage)

    def topic_by_id(self, topic_id: TopicId) -> TopicImage | None:
        """The topic of that id, None when there is none (any more)."""
        name = self.topic_names.get(topic_id)
        return None if name is None else self.topics[name]

    def partition(self, topic_partition: TopicPartition) -> PartitionImage | None:
        """A partition by name, None when there is none."""
        topic = self.topics.get(topic_partition.topic)
        if topic is None or not 0 <= topic_partition.partition < len(topic.partitions):
            return None
        return topic.partitions[topic_partition.partition]

    def live_brokers(self) -> tuple[BrokerImage, ...]:
        """Brokers that are not fenced, by node id."""
        return tuple(self.brokers[n] for n in sorted(self.brokers) if not self.brokers[n].is_fenced)

    def live_epoch(self, node_id: NodeId) -> int | None:
        """The broker epoch of a broker that is registered and not fenced, else None."""
        broker = self.brokers.get(node_id)
        return None if broker is None or broker.is_fenced else broker.epoch

    def broker_configs(self, node_id: NodeId) -> dict[str, str]:
        """What was set dynamically for a broker: the cluster's defaults, then its own."""
        merged = dict(self.configs.get(("broker", ""), {}))
        merged.update(self.configs.get(("broker", str(node_id)), {}))
        return merged

    def topics_by_id(self) -> list[TopicImage]:
        """All topics in a fixed order."""
        return [self.topics[name] for name in sorted(self.topics)]


EMPTY_IMAGE: Final = MetadataImage()


# ---- snapshot ----

_BrokerRow = tuple[int, str, int, int, str | None, tuple[Endpoint, ...], tuple[str, ...], bool]
_PartitionRow = tuple[int, int, tuple[int, ...], tuple[tuple[int, str], ...], tuple[int, ...], int]


class _TopicRow(msgspec.Struct, array_like=True):
    name: str
    topic_id: TopicId
    partitions: list[_PartitionRow]
    configs: dict[str, str]


class _RemovalRow(msgspec.Struct, array_like=True):
    topic: str
    topic_id: TopicId
    partition: int
    creation_epoch: int
    nodes: tuple[int, ...]


class _Snapshot(msgspec.Struct, array_like=True):
    version: int
    structure_version: int
    cluster_id: str
    topics: list[_TopicRow]
    brokers: list[_BrokerRow]
    configs: list[tuple[str, str, dict[str, str]]]
    removals: list[_RemovalRow]
    next_producer_id: int
    submitters: list[tuple[int, int, int]]
    groups: GroupsRecord


def encode_image(image: MetadataImage) -> bytes:
    """The whole state as bytes: magic, version, CRC-32C of the body, body. The same image gives the
    same bytes on every node."""
    body = msgspec.msgpack.encode(
        _Snapshot(
            version=image.version,
            structure_version=image.structure_version,
            cluster_id=image.cluster_id,
            topics=[_topic_row(topic) for topic in image.topics_by_id()],
            brokers=[_broker_row(image.brokers[n]) for n in sorted(image.brokers)],
            configs=[(*key, _sorted_dict(image.configs[key])) for key in sorted(image.configs)],
            removals=[
                _RemovalRow(r.topic, *r.group, r.nodes)
                for _, r in sorted(image.removals.items(), key=lambda item: item[0])
            ],
            next_producer_id=image.next_producer_id,
            submitters=[(n, *image.submitters[n]) for n in sorted(image.submitters)],
            groups=to_record(image.groups),
        )
    )
    head = SNAPSHOT_MAGIC + SNAPSHOT_VERSION.to_bytes(2, "big")
    return head + crc32c(body, crc32c(head)).to_bytes(4, "big") + body


def decode_image(data: Buffer) -> MetadataImage:
    """Read a snapshot; empty bytes are the empty image.

    Raises:
        SnapshotError: damaged, or of a newer format.
    """
    if not len(data):
        return EMPTY_IMAGE
    data = memoryview(data)
    if bytes(data[:4]) != SNAPSHOT_MAGIC:
        raise SnapshotError("not a metadata snapshot")
    version = int.from_bytes(data[4:6], "big")
    if version != SNAPSHOT_VERSION:
        raise SnapshotError(f"metadata snapshot of format {version}, known: {SNAPSHOT_VERSION}")
    if int.from_bytes(data[6:10], "big") != crc32c(data[10:], crc32c(data[:6])):
        raise SnapshotError("metadata snapshot with a wrong checksum")
    try:
        snapshot = msgspec.msgpack.decode(data[10:], type=_Snapshot)
    except msgspec.MsgspecError as error:
        raise SnapshotError(f"metadata snapshot of another shape: {error}") from error
    topics = [_read_topic(row) for row in snapshot.topics]
    return MetadataImage(
        version=snapshot.version,
        structure_version=snapshot.structure_version,
        cluster_id=snapshot.cluster_id,
        topics=Map((topic.name, topic) for topic in topics),
        topic_names=Map((topic.topic_id, topic.name) for topic in topics),
        brokers=Map((NodeId(row[0]), _read_broker(row)) for row in snapshot.brokers),
        configs=Map(((kind, name), Map(values)) for kind, name, values in snapshot.configs),
        removals=Map(
            (
                (row.topic_id, row.partition),
                RemovalImage(
                    row.topic,
                    RaftGroupId(row.topic_id, row.partition, row.creation_epoch),
                    _nodes(row.nodes),
                ),
            )
            for row in snapshot.removals
        ),
        next_producer_id=snapshot.next_producer_id,
        submitters=Map((NodeId(n), (inc, seq)) for n, inc, seq in snapshot.submitters),
        groups=from_record(snapshot.groups),
    )


def _sorted_dict(values: Mapping[str, str]) -> dict[str, str]:
    return {key: values[key] for key in sorted(values)}


def _nodes(values: tuple[int, ...]) -> tuple[NodeId, ...]:
    return tuple(NodeId(value) for value in values)


def _topic_row(topic: TopicImage) -> _TopicRow:
    partitions: list[_PartitionRow] = [
        (
            p.index,
            p.creation_epoch,
            p.replicas,
            tuple((r.node_id, f"{r.storage_id:x}") for r in p.first_voters),
            p.voters,
            p.voters_epoch,
        )
        for p in topic.partitions
    ]
    return _TopicRow(topic.name, topic.topic_id, partitions, _sorted_dict(topic.configs))


def _read_topic(row: _TopicRow) -> TopicImage:
    partitions = tuple(
        PartitionImage(
            index,
            creation_epoch,
            _nodes(replicas),
            tuple(ReplicaId(NodeId(n), StorageId(int(s, 16))) for n, s in first_voters),
            _nodes(voters),
            voters_epoch,
        )
        for index, creation_epoch, replicas, first_voters, voters, voters_epoch in row.partitions
    )
    return TopicImage(row.name, row.topic_id, partitions, Map(row.configs))


def _broker_row(broker: BrokerImage) -> _BrokerRow:
    return (
        broker.node_id,
        f"{broker.storage_id:x}",
        broker.epoch,
        broker.incarnation,
        broker.rack,
        broker.endpoints,
        broker.features,
        broker.is_fenced,
    )


def _read_broker(row: _BrokerRow) -> BrokerImage:
    node_id, storage_id, epoch, incarnation, rack, endpoints, features, is_fenced = row
    return BrokerImage(
        NodeId(node_id),
        StorageId(int(storage_id, 16)),
        epoch,
        incarnation,
        rack,
        endpoints,
        features,
        is_fenced,
    )
