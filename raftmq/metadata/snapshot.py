"""The metadata state as bytes: what a log start of the metadata group carries.

Layout: magic, format version, CRC-32C of all that follows and precedes, body in MessagePack. Equal
images give equal bytes on every node. `SnapshotEncoder` keeps the encoded form of each topic and
group, which the next image mostly shares, so that a snapshot costs the loop what changed since the
last one; `warm` encodes the rest beforehand, a little at a time.

Formats: 1, and 2 with the levels of features. An image without any is written in format 1, which
nodes from before there were levels read as well.

Invariants: a snapshot with a wrong checksum, of a newer format or with fields that its format does
not have is refused, never read in part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
from attrs import evolve
from crc32c import crc32c
from immutables import Map

from raftmq.errors import AheadError, StateError
from raftmq.metadata.commands import CommittedOffset, Endpoint, GroupMember
from raftmq.metadata.image import (
    EMPTY_IMAGE,
    BrokerImage,
    GroupImage,
    GroupsImage,
    MetadataImage,
    PartitionImage,
    RemovalImage,
    ReplacementImage,
    TopicImage,
)
from raftmq.types import Buffer, NodeId, RaftGroupId, ReplicaId, StorageId, TopicId, TopicPartition

SNAPSHOT_MAGIC: Final = b"RQMS"


class SnapshotError(StateError):
    """A metadata snapshot that must not be used: damaged, or of a newer format."""


class NewerSnapshotError(SnapshotError, AheadError):
    """One that a newer version of this code can read."""


class _GroupRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    coordinator: int = -1
    coordinator_broker_epoch: int = -1
    coordinator_epoch: int = 0
    generation: int = 0
    protocol_type: str = ""
    protocol: str | None = None
    leader: str | None = None
    members: tuple[GroupMember, ...] = ()
    changed_at_ms: int = 0
    offsets: tuple[CommittedOffset, ...] = ()


_BrokerRow = tuple[int, str, int, int, str | None, tuple[Endpoint, ...], tuple[str, ...], bool]
_PartitionRow = tuple[int, int, tuple[int, ...], tuple[tuple[int, str], ...], tuple[int, ...], int]


class _TopicRow(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    name: str
    topic_id: TopicId
    partitions: list[_PartitionRow]
    configs: dict[str, str]


class _RemovalRow(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    topic: str
    topic_id: TopicId
    partition: int
    creation_epoch: int
    nodes: tuple[int, ...]


class _Snapshot(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Format 1."""

    version: int
    structure_version: int
    cluster_id: str
    brokers: list[_BrokerRow]
    configs: list[tuple[str, str, dict[str, str]]]
    removals: list[_RemovalRow]
    next_producer_id: int
    submitters: list[tuple[int, int, int]]
    last_epoch: int
    topics: list[_TopicRow]
    groups: list[_GroupRecord]
    replacements: list[tuple[int, int, bool]] = []
    recoveries: int = 0


class _Snapshot2(_Snapshot):
    features: list[tuple[str, int]] = []
    features_epoch: int = -1


_FORMATS: Final[dict[int, type[_Snapshot]]] = {1: _Snapshot, 2: _Snapshot2}


class _Parts(msgspec.Struct, array_like=True):
    """The same with topics and groups encoded before."""

    version: int
    structure_version: int
    cluster_id: str
    brokers: list[_BrokerRow]
    configs: list[tuple[str, str, dict[str, str]]]
    removals: list[_RemovalRow]
    next_producer_id: int
    submitters: list[tuple[int, int, int]]
    last_epoch: int
    topics: list[msgspec.Raw]
    groups: list[msgspec.Raw]
    replacements: list[tuple[int, int, bool]]
    recoveries: int


class _Parts2(_Parts):
    features: list[tuple[str, int]]
    features_epoch: int


class SnapshotEncoder:
    """Encodes images of one node's state machine, one after the other."""

    def __init__(self) -> None:
        self._topics: dict[str, tuple[TopicImage, msgspec.Raw]] = {}
        self._groups: dict[str, tuple[GroupImage, msgspec.Raw]] = {}
        self._warming: Iterator[None] | None = None

    def warm(self, image: MetadataImage, parts_max: int) -> bool:
        """Encode up to `parts_max` parts ahead; True when a round over `image` has ended."""
        if self._warming is None:
            self._warming = self._round(image)
        for _ in range(parts_max):
            if next(self._warming, self) is self:
                self._warming = None
                return True
        return False

    def encode(self, image: MetadataImage) -> bytes:
        """The whole state as bytes."""
        body = self._body(image)
        version = 1 if image.features_epoch < 0 else 2
        head = SNAPSHOT_MAGIC + version.to_bytes(2, "big")
        return head + crc32c(body, crc32c(head)).to_bytes(4, "big") + body

    def _body(self, image: MetadataImage) -> bytes:
        groups = image.groups.groups
        parts: dict[str, Any] = {
            "version": image.version,
            "structure_version": image.structure_version,
            "cluster_id": image.cluster_id,
            "brokers": [_broker_row(image.brokers[n]) for n in sorted(image.brokers)],
            "configs": [(*key, _sorted_dict(image.configs[key])) for key in sorted(image.configs)],
            "removals": [
                _RemovalRow(r.topic, *r.group, r.nodes)
                for _, r in sorted(image.removals.items(), key=_removal_order)
            ],
            "next_producer_id": image.next_producer_id,
            "submitters": [(n, *image.submitters[n]) for n in sorted(image.submitters)],
            "last_epoch": image.groups.last_epoch,
            "topics": [self._topic(image.topics[name]) for name in sorted(image.topics)],
            "groups": [self._group(groups[name]) for name in sorted(groups)],
            "replacements": [
                (row.old_id, row.new_id, row.is_done)
                for _, row in sorted(image.replacements.items())
            ],
            "recoveries": image.recoveries,
        }
        self._warming = None
        self._topics = {n: row for n, row in self._topics.items() if n in image.topics}
        self._groups = {n: row for n, row in self._groups.items() if n in groups}
        if image.features_epoch < 0:
            return msgspec.msgpack.encode(_Parts(**parts))
        levels = sorted(image.features.items())
        return msgspec.msgpack.encode(
            _Parts2(**parts, features=levels, features_epoch=image.features_epoch)
        )

    def _round(self, image: MetadataImage) -> Iterator[None]:
        for topic in image.topics.values():
            self._topic(topic)
            yield
        for group in image.groups.groups.values():
            self._group(group)
            yield

    def _topic(self, topic: TopicImage) -> msgspec.Raw:
        known = self._topics.get(topic.name)
        if known is None or known[0] is not topic:
            known = topic, msgspec.Raw(msgspec.msgpack.encode(_topic_row(topic)))
            self._topics[topic.name] = known
        return known[1]

    def _group(self, group: GroupImage) -> msgspec.Raw:
        known = self._groups.get(group.name)
        if known is None or known[0] is not group:
            known = group, msgspec.Raw(msgspec.msgpack.encode(_to_group_record(group)))
            self._groups[group.name] = known
        return known[1]


def encode_image(image: MetadataImage) -> bytes:
    """The whole state as bytes, at once."""
    return SnapshotEncoder().encode(image)


def decode_image(data: Buffer) -> MetadataImage:
    """Read a snapshot; empty bytes are the empty image.

    Raises:
        SnapshotError: damaged, or of a newer format.
    """
    try:
        return _decode_image(data)
    except SnapshotError:
        raise
    except Exception as error:  # a peer may have sent it, with whatever in it
        reason = f"{type(error).__name__}: {error}"
        raise SnapshotError(f"metadata snapshot of another shape: {reason}") from error


def _decode_image(data: Buffer) -> MetadataImage:
    if not len(data):
        return EMPTY_IMAGE
    data = memoryview(data)
    if bytes(data[:4]) != SNAPSHOT_MAGIC:
        raise SnapshotError("not a metadata snapshot")
    version = int.from_bytes(data[4:6], "big")
    if int.from_bytes(data[6:10], "big") != crc32c(data[10:], crc32c(data[:6])):
        raise SnapshotError("metadata snapshot with a wrong checksum")
    if version not in _FORMATS:
        known = ", ".join(map(str, _FORMATS))
        told = f"a metadata snapshot of format {version}, known are {known}"
        raise (NewerSnapshotError if version > max(_FORMATS) else SnapshotError)(told)
    snapshot = msgspec.msgpack.decode(data[10:], type=_FORMATS[version])
    image = _image(snapshot)
    if isinstance(snapshot, _Snapshot2):
        levels = Map(snapshot.features)
        image = evolve(image, features=levels, features_epoch=snapshot.features_epoch)
    return image


def _image(snapshot: _Snapshot) -> MetadataImage:
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
        replacements=Map(
            (NodeId(old), ReplacementImage(NodeId(old), NodeId(new), is_done))
            for old, new, is_done in snapshot.replacements
        ),
        recoveries=snapshot.recoveries,
        next_producer_id=snapshot.next_producer_id,
        submitters=Map((NodeId(n), (inc, seq)) for n, inc, seq in snapshot.submitters),
        groups=GroupsImage(
            groups=Map({record.name: _from_group_record(record) for record in snapshot.groups}),
            last_epoch=snapshot.last_epoch,
        ),
    )


def _removal_order(item: tuple[tuple[TopicId, int], RemovalImage]) -> tuple[int, int]:
    (topic_id, partition), _ = item
    return topic_id.int, partition  # UUIDs compare in Python, integers do not


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


def _to_group_record(group: GroupImage) -> _GroupRecord:
    return _GroupRecord(
        name=group.name,
        coordinator=group.coordinator,
        coordinator_broker_epoch=group.coordinator_broker_epoch,
        coordinator_epoch=group.coordinator_epoch,
        generation=group.generation,
        protocol_type=group.protocol_type,
        protocol=group.protocol,
        leader=group.leader,
        members=group.members,
        changed_at_ms=group.changed_at_ms,
        offsets=tuple(group.offsets[at] for at in sorted(group.offsets)),
    )


def _from_group_record(record: _GroupRecord) -> GroupImage:
    return GroupImage(
        name=record.name,
        coordinator=NodeId(record.coordinator),
        coordinator_broker_epoch=record.coordinator_broker_epoch,
        coordinator_epoch=record.coordinator_epoch,
        generation=record.generation,
        protocol_type=record.protocol_type,
        protocol=record.protocol,
        leader=record.leader,
        members=record.members,
        changed_at_ms=record.changed_at_ms,
        offsets=Map({TopicPartition(o.topic, o.partition): o for o in record.offsets}),
    )
