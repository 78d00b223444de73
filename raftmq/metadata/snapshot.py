"""The metadata state as bytes: what a log start of the metadata group carries.

Layout: magic, format version, CRC-32C of all that follows and precedes, body in MessagePack. Equal
images give equal bytes on every node. `SnapshotEncoder` keeps the encoded form of each topic and
group, which the next image mostly shares, so that a snapshot costs the loop what changed since the
last one; `warm` encodes the rest beforehand, a little at a time. So it is with transactional ids.
Those of busy producers change all the time: `prepare` encodes them in turns, of the image itself.

Formats: 1; 2 with the levels of features; 3 with transactions and pending offsets; 4 with moves of
replicas, states of nodes and what was removed for good; 5 with rules of who may do what and users;
6 with retired partitions and views; 8 with views that have conditions; 9 with what was known of
producers in partitions that are gone.
An image is written in the format of its level, so every node of its cluster reads it; one without
any level in format 1, which nodes from before there were levels read as well.

Invariants: a snapshot with a wrong checksum, of a newer format or with fields that its format does
not have is refused, never read in part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import merge
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from attrs import evolve
from crc32c import crc32c
from immutables import Map

from raftmq.errors import AheadError, StateError
from raftmq.metadata.commands import (
    CommittedOffset,
    Endpoint,
    GroupMember,
    NodeState,
    Origin,
    PartitionState,
)
from raftmq.metadata.image import (
    EMPTY_IMAGE,
    LEVEL_OF_CONDITIONS,
    LEVEL_OF_KNOWN_PRODUCERS,
    LEVEL_OF_MOVES,
    LEVEL_OF_SECURITY,
    LEVEL_OF_TRANSACTIONS,
    LEVEL_OF_VIEWS,
    BrokerImage,
    GroupImage,
    GroupsImage,
    MetadataImage,
    NumberImage,
    OffsetMap,
    PartitionImage,
    RemovalImage,
    ReplacementImage,
    TopicImage,
    UsersImage,
    ViewImage,
)
from raftmq.metadata.transactions import Transaction, TransactionState, transactions_of
from raftmq.rights import NO_RULES, Rule, Table, sorted_rules
from raftmq.sasl.scram import ScramCredential
from raftmq.types import Buffer, NodeId, RaftGroupId, ReplicaId, StorageId, TopicId, TopicPartition

T = TypeVar("T")
SNAPSHOT_MAGIC: Final = b"RQMS"
_NIL: Final = msgspec.msgpack.encode(None)


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


_UserRow = tuple[str, int, int, bytes, bytes, bytes]
"""User, mechanism, iterations, salt, stored key, server key."""


class _Snapshot5(_Snapshot4):
    rules: list[list[Rule]] | None = None
    """By principal."""
    users: list[_UserRow] | None = None
    users_secret: bytes | None = None


_NumberRow = tuple[int, int, int]
_StateRow = tuple[int, PartitionState, int, int, int]


class _RetiredRow(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What format 6 adds to a topic; only where there is any of it."""

    topic_id: TopicId
    aliases: tuple[TopicId, ...]
    partitions: list[_PartitionRow]
    """The retired ones."""
    states: list[_StateRow]
    """Of partitions that were ever retired, or are not the first of their number: state and
    `state_version`, `begins_at`, `after_epoch`."""
    numbers: list[_NumberRow]


_ViewRow = tuple[str, TopicId, TopicId, int]


class _Snapshot6(_Snapshot5):
    retired: list[_RetiredRow] | None = None
    views: list[_ViewRow] | None = None


_ConditionRow = tuple[str, TopicId, TopicId, str, int]


class _Snapshot8(_Snapshot6):
    conditions: list[_ConditionRow] | None = None
    """Views that have one; the others are `views`."""


_KnownRow = tuple[TopicId, list[tuple[int, bytes]]]


class _Snapshot9(_Snapshot8):
    known: list[_KnownRow] | None = None
    """`producers` of a topic's numbers; only where something is known."""


_FORMATS: Final[dict[int, type[_Snapshot]]] = {
    1: _Snapshot,
    2: _Snapshot2,
    3: _Snapshot3,
    4: _Snapshot4,
    5: _Snapshot5,
    6: _Snapshot6,
    8: _Snapshot8,
    9: _Snapshot9,
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
    topics: msgspec.Raw
    groups: msgspec.Raw
    replacements: list[tuple[int, int, bool]]
    recoveries: int


class _Parts2(_Parts):
    features: list[tuple[str, int]]
    features_epoch: int


class _Parts3(_Parts2):
    transactions: msgspec.Raw
    last_decision: int


class _Parts4(_Parts3):
    moves: list[msgspec.Raw]
    states: list[tuple[int, NodeState]]
    voters_wanted: int
    removed: list[tuple[int, tuple[str, ...]]]


class _Parts5(_Parts4):
    rules: msgspec.Raw
    users: msgspec.Raw
    users_secret: bytes


class _Parts6(_Parts5):
    retired: list[msgspec.Raw]
    views: list[_ViewRow]


class _Parts8(_Parts6):
    conditions: list[_ConditionRow]


class _Parts9(_Parts8):
    known: list[msgspec.Raw]


def _format_of(image: MetadataImage) -> int:
    if image.level >= LEVEL_OF_KNOWN_PRODUCERS:
        return 9
    if image.level >= LEVEL_OF_CONDITIONS:
        return 8
    if image.level >= LEVEL_OF_VIEWS:
        return 6
    if image.level >= LEVEL_OF_SECURITY:
        return 5
    if image.level >= LEVEL_OF_MOVES:
        return 4
    if image.level >= LEVEL_OF_TRANSACTIONS:
        return 3
    return 1 if image.features_epoch < 0 else 2


RUN_NAMES: Final = 1_000
"""So many names are sorted at once; a merge of these runs gives all of them in order."""
ROUND_PARTS_MAX: Final = 5_000
ROUND_BYTES_MAX: Final = 64 << 10
"""What `prepare` looks at, and what it encodes anew, in one call: two or three milliseconds."""
_Cache: TypeAlias = dict[str, tuple[T, bytes]]


class _Caches:
    """The encoded form of each part of an image."""

    def __init__(self) -> None:
        self.topics: _Cache[TopicImage] = {}
        self.moves: _Cache[TopicImage] = {}
        self.retired: _Cache[TopicImage] = {}
        self.known: _Cache[TopicImage] = {}
        self.groups: _Cache[GroupImage] = {}
        self.transactions: _Cache[Transaction] = {}
        self.rules: _Cache[Table] = {}


class _Round:
    """All parts of one image, encoded one after the other, in the order of their names.

    Attributes:
        kept: the encoded parts so far; of what the image does not have there is nothing.
        fresh_bytes: how much was encoded anew.
    """

    def __init__(self, image: MetadataImage, before: _Caches) -> None:
        self.image = image
        self.kept = _Caches()
        self.is_done = False
        self.fresh_bytes = 0
        self._before = before
        self._steps = self._walk()

    def go_on(self, parts_max: int, bytes_max: int) -> bool:
        """Encode so much more at most; True when all is encoded."""
        bytes_end = self.fresh_bytes + bytes_max
        while parts_max and self.fresh_bytes < bytes_end and not self.is_done:
            parts_max -= 1
            self.is_done = next(self._steps, self) is self
        return self.is_done

    def finish(self) -> None:
        """Encode all that is left."""
        for _ in self._steps:
            pass
        self.is_done = True

    def _walk(self) -> Iterator[None]:
        before, kept = self._before, self.kept
        topics, groups = self.image.topics, self.image.groups.groups
        ids = self.image.transactions.ids
        for name in _in_order(topics):
            if name is not None:
                self._keep(before.topics, kept.topics, name, topics[name], _topic_row)
                self._keep(before.moves, kept.moves, name, topics[name], _moves_row)
                self._keep(before.retired, kept.retired, name, topics[name], _retired_row)
                self._keep(before.known, kept.known, name, topics[name], _known_row)
            yield
        for name in _in_order(groups):
            if name is not None:
                self._keep(before.groups, kept.groups, name, groups[name], _to_group_record)
            yield
        for name in _in_order(ids):
            if name is not None:
                one = ids[name]
                self._keep(before.transactions, kept.transactions, name, one, _transaction_row)
            yield
        tables = self.image.rules.tables
        for name in _in_order(tables):
            if name is not None:
                self._keep(before.rules, kept.rules, name, tables[name], sorted_rules)
            yield

    def _keep(
        self,
        before: _Cache[T],
        kept: _Cache[T],
        name: str,
        part: T,
        to_row: Callable[[T], object],
    ) -> None:
        is_fresh = name not in before or before[name][0] is not part
        row = kept[name] = _encoded(before, name, part, to_row)
        if is_fresh:
            self.fresh_bytes += len(row[1])


class SnapshotEncoder:
    """Encodes images of one node's state machine, one after the other."""

    def __init__(self) -> None:
        self._caches = _Caches()
        self._warming: Iterator[None] | None = None
        self._round: _Round | None = None
        self._users: tuple[UsersImage, bytes] | None = None

    def warm(self, image: MetadataImage, parts_max: int) -> bool:
        """Encode up to `parts_max` parts ahead; True when a round over `image` has ended."""
        if self._warming is None:
            self._warming = self._warm_all(image)
        for _ in range(parts_max):
            if next(self._warming, self) is self:
                self._warming = None
                return True
        return False

    def prepare(self, image: MetadataImage) -> bool:
        """Encode some more of the very image that `encode` will be asked for; True when that has
        nothing left to encode. What changes all the time cannot be encoded earlier."""
        return self._round_over(image).go_on(ROUND_PARTS_MAX, ROUND_BYTES_MAX)

    def encode(self, image: MetadataImage) -> bytes:
        """The whole state as bytes."""
        body = self._body(image)
        head = SNAPSHOT_MAGIC + _format_of(image).to_bytes(2, "big")
        return head + crc32c(body, crc32c(head)).to_bytes(4, "big") + body

    def _round_over(self, image: MetadataImage) -> _Round:
        if self._round is None or self._round.image is not image:
            self._round = _Round(image, self._caches)
        return self._round

    def _body(self, image: MetadataImage) -> bytes:
        finished = self._round_over(image)
        finished.finish()
        self._warming = self._round = None
        kept = self._caches = finished.kept
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
            "topics": _joined(kept.topics),
            "groups": _joined(kept.groups),
            "replacements": [
                (row.old_id, row.new_id, row.is_done)
                for _, row in sorted(image.replacements.items())
            ],
            "recoveries": image.recoveries,
        }
        version = _format_of(image)
        if version == 1:
            return msgspec.msgpack.encode(_Parts(**parts))
        parts["features"] = sorted(image.features.items())
        parts["features_epoch"] = image.features_epoch
        if version == 2:
            return msgspec.msgpack.encode(_Parts2(**parts))
        parts["transactions"] = _joined(kept.transactions)
        parts["last_decision"] = image.transactions.last_decision
        if version == 3:
            return msgspec.msgpack.encode(_Parts3(**parts))
        parts["moves"] = [msgspec.Raw(row) for _, row in kept.moves.values() if row != _NIL]
        states = [(n, image.brokers[n].state) for n in sorted(image.brokers)]
        parts["states"] = [row for row in states if row[1] is not NodeState.ACTIVE]
        parts["voters_wanted"] = image.voters_wanted
        parts["removed"] = [
            (n, tuple(f"{storage:x}" for storage in image.removed[n]))
            for n in sorted(image.removed)
        ]
        if version == 4:
            return msgspec.msgpack.encode(_Parts4(**parts))
        if self._users is None or self._users[0] is not image.users:
            self._users = image.users, msgspec.msgpack.encode(_user_rows(image.users))
        parts["rules"] = _joined(kept.rules)
        parts["users"] = msgspec.Raw(self._users[1])
        parts["users_secret"] = image.users.secret
        if version == 5:
            return msgspec.msgpack.encode(_Parts5(**parts))
        return _encoded_with_views(version, parts, image, kept)

    def _warm_all(self, image: MetadataImage) -> Iterator[None]:
        caches = self._caches
        for name, topic in image.topics.items():
            _encoded(caches.topics, name, topic, _topic_row)
            _encoded(caches.moves, name, topic, _moves_row)
            _encoded(caches.retired, name, topic, _retired_row)
            _encoded(caches.known, name, topic, _known_row)
            yield
        for name, group in image.groups.groups.items():
            _encoded(caches.groups, name, group, _to_group_record)
            yield
        for name, transaction in image.transactions.ids.items():
            _encoded(caches.transactions, name, transaction, _transaction_row)
            yield
        for name, table in image.rules.tables.items():
            _encoded(caches.rules, name, table, sorted_rules)
            yield


def _encoded_with_views(
    version: int, parts: dict[str, Any], image: MetadataImage, kept: _Caches
) -> bytes:
    """A snapshot of format 6 or later, of the parts of format 5 and what came since."""
    parts["retired"] = [msgspec.Raw(row) for _, row in kept.retired.values() if row != _NIL]
    views = [image.views[name] for name in sorted(image.views)]
    plain = (view for view in views if not view.condition)
    parts["views"] = [(v.name, v.topic_id, v.source, v.width) for v in plain]
    if version == 6:
        return msgspec.msgpack.encode(_Parts6(**parts))
    parts["conditions"] = [
        (v.name, v.topic_id, v.source, v.condition, v.creation_epoch) for v in views if v.condition
    ]
    if version == 8:
        return msgspec.msgpack.encode(_Parts8(**parts))
    parts["known"] = [msgspec.Raw(row) for _, row in kept.known.values() if row != _NIL]
    return msgspec.msgpack.encode(_Parts9(**parts))


def _in_order(names: Iterable[str]) -> Iterator[str | None]:
    """All names, sorted; first None for each, since to sort many at once takes long."""
    runs: list[list[str]] = []
    run: list[str] = []
    for name in names:
        run.append(name)
        if len(run) == RUN_NAMES:
            runs.append(sorted(run))
            run = []
        yield None
    yield from merge(*runs, sorted(run))


def _joined(cache: _Cache[Any]) -> msgspec.Raw:
    """An array of encoded parts: that of many costs a copy of its bytes, and no step for each."""
    count = len(cache)
    if count < 16:
        head = bytes([0x90 | count])
    elif count < 1 << 16:
        head = b"\xdc" + count.to_bytes(2, "big")
    else:
        head = b"\xdd" + count.to_bytes(4, "big")
    return msgspec.Raw(head + b"".join([row for _, row in cache.values()]))


def _encoded(
    cache: _Cache[T], name: str, part: T, to_row: Callable[[T], object]
) -> tuple[T, bytes]:
    """A part and its bytes, which are kept for as long as it does not change."""
    known = cache.get(name)
    if known is None or known[0] is not part:
        known = cache[name] = part, msgspec.msgpack.encode(to_row(part))
    return known


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
    if isinstance(snapshot, _Snapshot6):
        image = _with_retired(image, snapshot)  # before the moves: some of theirs are retired
    if isinstance(snapshot, _Snapshot8):
        image = _with_conditions(image, snapshot)
    if isinstance(snapshot, _Snapshot9):
        image = _with_known(image, snapshot)
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
    if isinstance(snapshot, _Snapshot5):
        image = _with_rules(image, snapshot)
        image = _with_users(image, snapshot)
    return image


def _with_rules(image: MetadataImage, snapshot: _Snapshot5) -> MetadataImage:
    if snapshot.rules is None:
        raise SnapshotError("a metadata snapshot of format 5 without rules")
    rules = NO_RULES.with_rules(rule for table in snapshot.rules for rule in table)
    return evolve(image, rules=rules)


def _with_users(image: MetadataImage, snapshot: _Snapshot5) -> MetadataImage:
    if snapshot.users is None or snapshot.users_secret is None:
        raise SnapshotError("a metadata snapshot of format 5 without users")
    credentials: Map[str, Map[int, ScramCredential]] = Map()
    for user, mechanism, iterations, salt, stored_key, server_key in snapshot.users:
        known = credentials.get(user, Map())
        one = ScramCredential(salt, stored_key, server_key, iterations)
        credentials = credentials.set(user, known.set(mechanism, one))
    return evolve(image, users=UsersImage(credentials, snapshot.users_secret))


def _user_rows(users: UsersImage) -> list[_UserRow]:
    return [
        (user, number, one.iterations, one.salt, one.stored_key, one.server_key)
        for user in users.names()
        for number, one in sorted(users.credentials[user].items())
    ]


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
        changed = {}
        for move in row.moves:
            changed[move.partition] = evolve(
                _known(topic, move.partition),
                moving_from=_nodes(move.moving_from),
                planned=_nodes(move.planned),
                origin=move.origin,
                target_version=move.target_version,
                dismissed=_nodes(move.dismissed),
            )
        topics = topics.set(topic.name, topic.with_partitions(changed))
    for number, state in snapshot.states:
        node_id = NodeId(number)
        brokers = brokers.set(node_id, evolve(brokers[node_id], state=state))
    removed = Map(
        (NodeId(n), tuple(StorageId(int(storage, 16)) for storage in storages))
        for n, storages in snapshot.removed
    )
    # From the rows: by number alone, orders of two lives of one number would be one.
    orders = [_read_removal(row) for row in snapshot.removals]
    return evolve(
        image,
        topics=topics,
        brokers=brokers,
        voters_wanted=snapshot.voters_wanted,
        removed=removed,
        removals=Map((order.group, order) for order in orders),
    )


def _known(topic: TopicImage, number: int) -> PartitionImage:
    partition = topic.partition(number)
    if partition is None:
        raise SnapshotError(f"a metadata snapshot without partition {number} of {topic.name}")
    return partition


def _with_retired(image: MetadataImage, snapshot: _Snapshot6) -> MetadataImage:
    if snapshot.retired is None or snapshot.views is None:
        raise SnapshotError("a metadata snapshot of format 6 without retired partitions")
    topics, names = image.topics, image.topic_names
    for row in snapshot.retired:
        topic = evolve(
            topics[names[row.topic_id]],
            retired=tuple(map(_read_partition, row.partitions)),
            numbers=Map((number, NumberImage(end, epoch)) for number, end, epoch in row.numbers),
            aliases=row.aliases,
        )
        states = {
            number: evolve(
                _known(topic, number),
                state=state,
                state_version=version,
                begins_at=begins_at,
                after_epoch=after_epoch,
            )
            for number, state, version, begins_at, after_epoch in row.states
        }
        topics = topics.set(topic.name, topic.with_partitions(states))
        names = names.update((alias, topic.name) for alias in row.aliases)
    views = Map((row[0], ViewImage(*row)) for row in snapshot.views)
    return evolve(image, topics=topics, topic_names=names, views=views)


def _with_conditions(image: MetadataImage, snapshot: _Snapshot8) -> MetadataImage:
    if snapshot.conditions is None:
        raise SnapshotError("a metadata snapshot of format 8 without conditions of views")
    views = image.views.update(
        (name, ViewImage(name, topic_id, source, 0, condition, epoch))
        for name, topic_id, source, condition, epoch in snapshot.conditions
    )
    return evolve(image, views=views)


def _with_known(image: MetadataImage, snapshot: _Snapshot9) -> MetadataImage:
    if snapshot.known is None:
        raise SnapshotError("a metadata snapshot of format 9 without what is known of producers")
    topics = image.topics
    for topic_id, rows in snapshot.known:
        topic = topics[image.topic_names[topic_id]]
        known = {number: evolve(topic.numbers[number], producers=state) for number, state in rows}
        topics = topics.set(topic.name, evolve(topic, numbers=topic.numbers.update(known)))
    return evolve(image, topics=topics)


def _image(snapshot: _Snapshot) -> MetadataImage:
    topics = [_read_topic(row) for row in snapshot.topics]
    orders = [_read_removal(row) for row in snapshot.removals]
    return MetadataImage(
        version=snapshot.version,
        structure_version=snapshot.structure_version,
        cluster_id=snapshot.cluster_id,
        topics=Map((topic.name, topic) for topic in topics),
        topic_names=Map((topic.topic_id, topic.name) for topic in topics),
        brokers=Map((NodeId(row[0]), _read_broker(row)) for row in snapshot.brokers),
        configs=Map(((kind, name), Map(values)) for kind, name, values in snapshot.configs),
        # By topic and number alone, as below LEVEL_OF_MOVES; `_with_moves` names groups.
        removals=Map((order.group._replace(creation_epoch=-1), order) for order in orders),
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


def _read_removal(row: _RemovalRow) -> RemovalImage:
    group = RaftGroupId(row.topic_id, row.partition, row.creation_epoch)
    return RemovalImage(row.topic, group, _nodes(row.nodes))


def _sorted_dict(values: Mapping[str, str]) -> dict[str, str]:
    return {key: values[key] for key in sorted(values)}


def _nodes(values: tuple[int, ...]) -> tuple[NodeId, ...]:
    return tuple(NodeId(value) for value in values)


def _moves_row(topic: TopicImage) -> _MovesRow | None:
    rows = [
        _MoveRow(p.index, p.moving_from, p.planned, p.origin, p.target_version, p.dismissed)
        for p in topic.held
        if p.target_version >= 0 or p.moving_from or p.planned or p.dismissed
    ]
    return _MovesRow(topic.topic_id, rows) if rows else None


def _retired_row(topic: TopicImage) -> _RetiredRow | None:
    states: list[_StateRow] = [
        (p.index, p.state, p.state_version, p.begins_at, p.after_epoch)
        for p in topic.held
        if p.state_version >= 0 or p.after_epoch >= 0 or p.begins_at
    ]
    if not (states or topic.retired or topic.numbers or topic.aliases):
        return None
    numbers = [
        (number, topic.numbers[number].end_offset, topic.numbers[number].leader_epoch)
        for number in sorted(topic.numbers)
    ]
    retired = [_partition_row(partition) for partition in topic.retired]
    return _RetiredRow(topic.topic_id, topic.aliases, retired, states, numbers)


def _known_row(topic: TopicImage) -> _KnownRow | None:
    rows = [
        (number, topic.numbers[number].producers)
        for number in sorted(topic.numbers)
        if topic.numbers[number].producers
    ]
    return (topic.topic_id, rows) if rows else None


def _partition_row(partition: PartitionImage) -> _PartitionRow:
    return (
        partition.index,
        partition.creation_epoch,
        partition.replicas,
        tuple((r.node_id, f"{r.storage_id:x}") for r in partition.first_voters),
        partition.voters,
        partition.voters_epoch,
    )


def _topic_row(topic: TopicImage) -> _TopicRow:
    partitions = [_partition_row(partition) for partition in topic.partitions]
    return _TopicRow(topic.name, topic.topic_id, partitions, _sorted_dict(topic.configs))


def _read_partition(row: _PartitionRow) -> PartitionImage:
    index, creation_epoch, replicas, first_voters, voters, voters_epoch = row
    return PartitionImage(
        index,
        creation_epoch,
        _nodes(replicas),
        tuple(ReplicaId(NodeId(n), StorageId(int(s, 16))) for n, s in first_voters),
        _nodes(voters),
        voters_epoch,
    )


def _read_topic(row: _TopicRow) -> TopicImage:
    partitions = tuple(map(_read_partition, row.partitions))
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
