"""The metadata state as bytes: what a log start of the metadata group carries.

Layout: magic, format version, CRC-32C of all that follows and precedes, body in MessagePack. Equal
images give equal bytes on every node. `SnapshotEncoder` keeps the encoded form of each topic and
group, which the next image mostly shares, so that a snapshot costs the loop what changed since the
last one; `warm` encodes the rest beforehand, a little at a time. So it is with transactional ids.

Formats: 1; 2 with the levels of features; 3 with transactions and pending offsets; 4 with moves of
replicas, states of nodes and what was removed for good. An image is
written in the format of its level, so every node of its cluster reads it; one without any level in
format 1, which nodes from before there were levels read as well.

Invariants: a snapshot with a wrong checksum, of a newer format or with fields that its format does
not have is refused, never read in part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

import msgspec
from attrs import evolve
from crc32c import crc32c
from immutables import Map

from raftmq.errors import AheadError, StateError
from raftmq.metadata.commands import CommittedOffset, Endpoint, GroupMember, NodeState, Origin
from raftmq.metadata.image import (
    EMPTY_IMAGE,
    LEVEL_OF_MOVES,
    LEVEL_OF_TRANSACTIONS,
    BrokerImage,
    GroupImage,
    GroupsImage,
    MetadataImage,
    OffsetMap,
    PartitionImage,
    RemovalImage,
    ReplacementImage,
    TopicImage,
)
from raftmq.metadata.transactions import Transaction, TransactionState, transactions_of
from raftmq.types import Buffer, NodeId, RaftGroupId, ReplicaId, StorageId, TopicId, TopicPartition

T = TypeVar("T")
SNAPSHOT_MAGIC: Final = b"RQMS"
_NIL: Final = msgspec.Raw(msgspec.msgpack.encode(None))


class SnapshotError(StateError):
    """A metadata snapshot that must not be used: damaged, or of a newer format."""


class NewerSnapshotError(SnapshotError, AheadError):
    """One that a newer version of this code can read."""


class _GroupRecord(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
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
    pending: tuple[tuple[int, tuple[CommittedOffset, ...]], ...] = ()
    """By producer id; since format 3."""


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


class _TransactionRow(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    transactional_id: str
    producer_id: int
    epoch: int
    timeout_ms: int
    last: tuple[int, int]
    txn_seq: int
    state: int
    protocol: int
    partitions: list[tuple[TopicId, int, int]]
    groups: tuple[str, ...]
    marker: tuple[int, int]
    decision: int
    started_at_ms: int
    changed_at_ms: int


class _Snapshot3(_Snapshot2):
    transactions: list[_TransactionRow] | None = None
    last_decision: int | None = None


class _MoveRow(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What format 4 adds to a partition; only where there is any of it."""

    partition: int
    moving_from: tuple[int, ...]
    planned: tuple[int, ...]
    origin: Origin
    target_version: int
    dismissed: tuple[int, ...]


class _MovesRow(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Of one topic."""

    topic_id: TopicId
    moves: list[_MoveRow]


class _Snapshot4(_Snapshot3):
    moves: list[_MovesRow] | None = None
    states: list[tuple[int, NodeState]] | None = None
    """Of nodes that are not active."""
    voters_wanted: int | None = None
    removed: list[tuple[int, tuple[str, ...]]] | None = None


_FORMATS: Final[dict[int, type[_Snapshot]]] = {
    1: _Snapshot,
    2: _Snapshot2,
    3: _Snapshot3,
    4: _Snapshot4,
}


class _Parts(msgspec.Struct, array_like=True):
    """The same with topics, groups and transactional ids encoded before."""

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


class _Parts3(_Parts2):
    transactions: list[msgspec.Raw]
    last_decision: int


class _Parts4(_Parts3):
    moves: list[msgspec.Raw]
    states: list[tuple[int, NodeState]]
    voters_wanted: int
    removed: list[tuple[int, tuple[str, ...]]]


def _format_of(image: MetadataImage) -> int:
    if image.level >= LEVEL_OF_MOVES:
        return 4
    if image.level >= LEVEL_OF_TRANSACTIONS:
        return 3
    return 1 if image.features_epoch < 0 else 2


class SnapshotEncoder:
    """Encodes images of one node's state machine, one after the other."""

    def __init__(self) -> None:
        self._topics: dict[str, tuple[TopicImage, msgspec.Raw]] = {}
        self._moves: dict[str, tuple[TopicImage, msgspec.Raw]] = {}
        self._groups: dict[str, tuple[GroupImage, msgspec.Raw]] = {}
        self._transactions: dict[str, tuple[Transaction, msgspec.Raw]] = {}
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
        head = SNAPSHOT_MAGIC + _format_of(image).to_bytes(2, "big")
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
        self._moves = {n: row for n, row in self._moves.items() if n in image.topics}
        self._groups = {n: row for n, row in self._groups.items() if n in groups}
        ids = image.transactions.ids
        self._transactions = {n: row for n, row in self._transactions.items() if n in ids}
        version = _format_of(image)
        if version == 1:
            return msgspec.msgpack.encode(_Parts(**parts))
        parts["features"] = sorted(image.features.items())
        parts["features_epoch"] = image.features_epoch
        if version == 2:
            return msgspec.msgpack.encode(_Parts2(**parts))
        parts["transactions"] = [self._transaction(ids[name]) for name in sorted(ids)]
        parts["last_decision"] = image.transactions.last_decision
        if version == 3:
            return msgspec.msgpack.encode(_Parts3(**parts))
        moves = [self._moves_of(image.topics[name]) for name in sorted(image.topics)]
        parts["moves"] = [row for row in moves if row != _NIL]
        states = [(n, image.brokers[n].state) for n in sorted(image.brokers)]
        parts["states"] = [row for row in states if row[1] is not NodeState.ACTIVE]
        parts["voters_wanted"] = image.voters_wanted
        parts["removed"] = [
            (n, tuple(f"{storage:x}" for storage in image.removed[n]))
            for n in sorted(image.removed)
        ]
        return msgspec.msgpack.encode(_Parts4(**parts))

    def _round(self, image: MetadataImage) -> Iterator[None]:
        for topic in image.topics.values():
            self._topic(topic)
            self._moves_of(topic)
            yield
        for group in image.groups.groups.values():
            self._group(group)
            yield
        for transaction in image.transactions.ids.values():
            self._transaction(transaction)
            yield

    def _topic(self, topic: TopicImage) -> msgspec.Raw:
        return _encoded(self._topics, topic.name, topic, _topic_row)

    def _moves_of(self, topic: TopicImage) -> msgspec.Raw:
        return _encoded(self._moves, topic.name, topic, _moves_row)

    def _group(self, group: GroupImage) -> msgspec.Raw:
        return _encoded(self._groups, group.name, group, _to_group_record)

    def _transaction(self, one: Transaction) -> msgspec.Raw:
        return _encoded(self._transactions, one.transactional_id, one, _transaction_row)


def _encoded(
    cache: dict[str, tuple[T, msgspec.Raw]], name: str, part: T, to_row: Callable[[T], object]
) -> msgspec.Raw:
    """The bytes of a part, which are kept for as long as it does not change."""
    known = cache.get(name)
    if known is None or known[0] is not part:
        known = cache[name] = part, msgspec.Raw(msgspec.msgpack.encode(to_row(part)))
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
        text = f"a metadata snapshot of format {version}, known are {known}"
        raise (NewerSnapshotError if version > max(_FORMATS) else SnapshotError)(text)
    snapshot = msgspec.msgpack.decode(data[10:], type=_FORMATS[version])
    image = _image(snapshot)
    if isinstance(snapshot, _Snapshot2):
        levels = Map(snapshot.features)
        image = evolve(image, features=levels, features_epoch=snapshot.features_epoch)
    if isinstance(snapshot, _Snapshot3):
        if snapshot.transactions is None or snapshot.last_decision is None:
            raise SnapshotError("a metadata snapshot of format 3 without transactions")
        ids = map(_read_transaction, snapshot.transactions)
        image = evolve(image, transactions=transactions_of(ids, snapshot.last_decision))
    if isinstance(snapshot, _Snapshot4):
        image = _with_moves(image, snapshot)
    return image


def _with_moves(image: MetadataImage, snapshot: _Snapshot4) -> MetadataImage:
    if (
        snapshot.moves is None
        or snapshot.states is None
        or snapshot.voters_wanted is None
        or snapshot.removed is None
    ):
        raise SnapshotError("a metadata snapshot of format 4 without moves")
    topics, brokers = image.topics, image.brokers
    for row in snapshot.moves:
        topic = topics[image.topic_names[row.topic_id]]
        partitions = list(topic.partitions)
        for move in row.moves:
            partitions[move.partition] = evolve(
                partitions[move.partition],
                moving_from=_nodes(move.moving_from),
                planned=_nodes(move.planned),
                origin=move.origin,
                target_version=move.target_version,
                dismissed=_nodes(move.dismissed),
            )
        topics = topics.set(topic.name, evolve(topic, partitions=tuple(partitions)))
    for number, state in snapshot.states:
        node_id = NodeId(number)
        brokers = brokers.set(node_id, evolve(brokers[node_id], state=state))
    removed = Map(
        (NodeId(n), tuple(StorageId(int(storage, 16)) for storage in storages))
        for n, storages in snapshot.removed
    )
    by_group = {order.group: order for order in image.removals.values()}
    return evolve(
        image,
        topics=topics,
        brokers=brokers,
        voters_wanted=snapshot.voters_wanted,
        removed=removed,
        removals=Map(by_group),
    )


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
        removals=Map(_read_removal(row) for row in snapshot.removals),
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


def _transaction_row(one: Transaction) -> _TransactionRow:
    partitions = [(*key, epoch) for key, epoch in one.partitions.items()]
    partitions.sort(key=lambda row: (row[0].int, row[1]))
    return _TransactionRow(
        one.transactional_id,
        one.producer_id,
        one.epoch,
        one.timeout_ms,
        one.last,
        one.txn_seq,
        int(one.state),
        one.protocol,
        partitions,
        one.groups,
        one.marker,
        one.decision,
        one.started_at_ms,
        one.changed_at_ms,
    )


def _read_transaction(row: _TransactionRow) -> Transaction:
    return Transaction(
        transactional_id=row.transactional_id,
        producer_id=row.producer_id,
        epoch=row.epoch,
        timeout_ms=row.timeout_ms,
        last=row.last,
        txn_seq=row.txn_seq,
        state=TransactionState(row.state),
        protocol=row.protocol,
        partitions=Map(((topic_id, number), epoch) for topic_id, number, epoch in row.partitions),
        groups=row.groups,
        marker=row.marker,
        decision=row.decision,
        started_at_ms=row.started_at_ms,
        changed_at_ms=row.changed_at_ms,
    )


def _removal_order(item: tuple[RaftGroupId, RemovalImage]) -> tuple[int, int, int]:
    topic_id, partition, epoch = item[0]
    return topic_id.int, partition, epoch  # UUIDs compare in Python, integers do not


def _read_removal(row: _RemovalRow) -> tuple[RaftGroupId, RemovalImage]:
    """By topic and number alone, as below LEVEL_OF_MOVES; `_with_moves` names groups."""
    group = RaftGroupId(row.topic_id, row.partition, row.creation_epoch)
    return group._replace(creation_epoch=-1), RemovalImage(row.topic, group, _nodes(row.nodes))


def _sorted_dict(values: Mapping[str, str]) -> dict[str, str]:
    return {key: values[key] for key in sorted(values)}


def _nodes(values: tuple[int, ...]) -> tuple[NodeId, ...]:
    return tuple(NodeId(value) for value in values)


def _moves_row(topic: TopicImage) -> _MovesRow | None:
    rows = [
        _MoveRow(p.index, p.moving_from, p.planned, p.origin, p.target_version, p.dismissed)
        for p in topic.partitions
        if p.target_version >= 0 or p.moving_from or p.planned or p.dismissed
    ]
    return _MovesRow(topic.topic_id, rows) if rows else None


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
        offsets=_sorted_offsets(group.offsets),
        pending=tuple(
            (number, _sorted_offsets(group.pending[number])) for number in sorted(group.pending)
        ),
    )


def _sorted_offsets(offsets: OffsetMap) -> tuple[CommittedOffset, ...]:
    return tuple(offsets[at] for at in sorted(offsets))


def _read_offsets(rows: tuple[CommittedOffset, ...]) -> OffsetMap:
    return Map({TopicPartition(row.topic, row.partition): row for row in rows})


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
        offsets=_read_offsets(record.offsets),
        pending=Map({number: _read_offsets(rows) for number, rows in record.pending}),
    )
