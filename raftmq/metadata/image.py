"""The state of the metadata group at one offset, as an immutable value.

Owns the shape of brokers, topics, partitions, configs and consumer groups (transactions stand in
`transactions.py`), and what follows from
them alone: who coordinates a group, and which nodes the metadata group and each partition should
have as members (a replaced node yields to its successor). Never changes: `apply.py` makes the next
image, which shares all that did not change (`immutables.Map`), so that readers may keep one as long
as they like; `snapshot.py` encodes it.

Invariants: `version` is the offset of the last applied command, -1 before the first;
`structure_version` that of the last one that changed brokers, topics or configs; `topic_names` has
the ids and aliases of all topics, each with its name; whatever is not in a snapshot is not state.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Final, TypeAlias

from attrs import evolve, field, frozen
from immutables import Map

from raftmq.metadata.commands import (
    CommittedOffset,
    Endpoint,
    GroupMember,
    NodeState,
    Origin,
    PartitionState,
)
from raftmq.metadata.transactions import NO_TRANSACTIONS, TransactionsImage
from raftmq.replication.membership import TargetMembership
from raftmq.rights import NO_RULES, Rules
from raftmq.sasl.scram import ScramCredential
from raftmq.types import (
    NodeId,
    RaftGroupId,
    ReplicaId,
    StorageId,
    TopicId,
    TopicPartition,
)

FIRST_PRODUCER_ID: Final = 0
RAFTMQ_LEVEL: Final = "raftmq.level"
"""The feature that covers what nodes store and say together (`features.py`)."""
LEVEL_OF_TRANSACTIONS: Final = 3
"""From it on there are transactional ids."""
LEVEL_OF_MOVES: Final = 4
"""From it on nodes have states, and moves of replicas are planned, cancelled and made by identity:
a partition is named by its topic, number and creation epoch."""
LEVEL_OF_SECURITY: Final = 5
"""From it on there are users, and rules of who may do what."""
LEVEL_OF_VIEWS: Final = 6
"""From it on topics shrink, and there are views."""
LEVEL_OF_DELAYS: Final = 7
"""From it on there are delay topics, and producers of brokers that partitions never forget."""
LEVEL_OF_CONDITIONS: Final = 8
"""From it on there are views with conditions."""
LEVEL_OF_ALIASES: Final = 9
"""From it on a topic that shrinks gets an alias, by which all nodes find it."""
ALIASES_MAX: Final = 8
"""Of one topic. Who knows an older one is told UNKNOWN_TOPIC_ID, and asks for the newest."""
LEVEL_OF_KNOWN_PRODUCERS: Final = 9
"""From it on a partition that is gone leaves what its log knew of idempotent producers."""
KNOWN_IN_ALL_BYTES_MAX: Final = 8 << 20
"""Of that, for all topics together."""
LEVEL_OF_ASKERS: Final = 9
"""From it on every admin call says on whose behalf it is made."""
LEVEL_OF_DEAD_TOPICS: Final = 9
"""From it on a delay topic that retries nothing may have a dead topic, and what a target does not
take for long is dead."""
VIEWS_OF_TOPIC_MAX: Final = 16
"""Views with conditions over one topic: each judges every batch of it."""
EPOCH_ROOM: Final = 1_000
"""So far above the last leader epoch that was told begin those of the next partition of a number:
nodes that did not know yet that the last one was gone may have elected some more leaders."""


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
    state: NodeState = NodeState.ACTIVE

    @property
    def takes_replicas(self) -> bool:
        """False while it must not be given any replica that it does not have."""
        return self.state is NodeState.ACTIVE

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
    """One partition: the nodes that should hold it, and the voters that its leader last reported.

    `first_voters` are the members with which its Raft group began, the same on every node for ever:
    a broker that lost its disk is not among them under its new storage id.

    Attributes:
        moving_from: the replicas before the move that is under way; none while there is no move.
            A cancelled move goes back to them exactly.
        planned: the replicas of a move that is accepted and has not begun; none without one.
        origin: whose move that is, planned or under way.
        target_version: the offset of the last command that changed `replicas`, -1 before any.
        dismissed: nodes that were to hold it and are no longer wanted, and that may have data of
            it: they are ordered to delete it once they can no longer become voters.
        after_epoch: its leader epochs are all above this one; -1 for the first partition that its
            topic ever had under its number.
        begins_at: the offset with which its log begins.
        state_version: the offset of the last command that changed `state`, -1 before any. A seal in
            the log, and its end, name the order that they obey by it.
    """

    index: int
    creation_epoch: int
    replicas: tuple[NodeId, ...]
    first_voters: tuple[ReplicaId, ...]
    voters: tuple[NodeId, ...]
    voters_epoch: int = -1
    moving_from: tuple[NodeId, ...] = ()
    planned: tuple[NodeId, ...] = ()
    origin: Origin = Origin.NONE
    target_version: int = -1
    dismissed: tuple[NodeId, ...] = ()
    after_epoch: int = -1
    begins_at: int = 0
    state: PartitionState = PartitionState.ACTIVE
    state_version: int = -1

    @property
    def is_first_life(self) -> bool:
        """False when its topic had another partition of its number before."""
        return self.after_epoch < 0

    @property
    def takes_records(self) -> bool:
        """False once its seal is ordered: from then on no new transaction has it either."""
        return self.state in (PartitionState.ACTIVE, PartitionState.CLOSING)

    @property
    def preferred_leader(self) -> NodeId:
        """The replica that should lead when it can."""
        return self.replicas[0]


@frozen(slots=True)
class NumberImage:
    """Up to where a number of a topic has ever come: whatever has that number later goes on there.

    `end_offset` and `leader_epoch` never fall.

    Attributes:
        producers: what the log of the last partition that was gone knew of idempotent producers
            where it ended, encoded. The next one's begins with it, on every node and for as long as
            there is that partition; b"" where it is not known.
    """

    end_offset: int
    leader_epoch: int
    producers: bytes = b""


@frozen(slots=True)
class TopicImage:
    """One topic; `configs` holds only what was set on it.

    Attributes:
        partitions: those that are listed, which is the active ones, from 0 without a hole.
        retired: those that are not listed any more, in the order of their numbers: what is left of
            them is read, moved and counted as that of others.
        numbers: how far numbers have come whose partition was ever sealed.
        aliases: ids by which clients may name the topic as well, the newest last.
    """

    name: str
    topic_id: TopicId
    partitions: tuple[PartitionImage, ...]
    configs: Map[str, str]
    retired: tuple[PartitionImage, ...] = ()
    numbers: Map[int, NumberImage] = Map()
    aliases: tuple[TopicId, ...] = ()

    @property
    def held(self) -> tuple[PartitionImage, ...]:
        """All of which there are replicas: listed ones and retired ones, by number."""
        return self.partitions + self.retired if self.retired else self.partitions

    @property
    def width(self) -> int:
        """How many numbers it has ever had, those among them of which nothing is left: it never
        falls."""
        last = max(self.numbers, default=-1)
        if self.retired:
            last = max(last, self.retired[-1].index)
        return max(len(self.partitions), last + 1)

    def partition(self, number: int) -> PartitionImage | None:
        """The partition of a number, listed or not; None when there is none (any more)."""
        if 0 <= number < len(self.partitions):
            return self.partitions[number]
        place = self._place(number)
        if place < len(self.retired) and self.retired[place].index == number:
            return self.retired[place]
        return None

    def state_of(self, number: int) -> PartitionState | None:
        """What has become of a number; None when there was never one."""
        partition = self.partition(number)
        if partition is not None:
            return partition.state
        return PartitionState.GONE if number in self.numbers else None

    def with_partitions(self, changed: Mapping[int, PartitionImage]) -> TopicImage:
        """The same with other rows for these numbers; of each there is a partition."""
        partitions, retired = list(self.partitions), list(self.retired)
        for number, partition in changed.items():
            if number < len(partitions):
                partitions[number] = partition
            else:
                retired[self._place(number)] = partition
        return evolve(self, partitions=tuple(partitions), retired=tuple(retired))

    def _place(self, number: int) -> int:
        """Where a number stands, or would stand, among the retired."""
        return bisect_left(self.retired, number, key=lambda partition: partition.index)

    def group_id(self, partition: int) -> RaftGroupId:
        """The Raft group of one partition."""
        found = self.partition(partition)
        assert found is not None
        return RaftGroupId(self.topic_id, partition, found.creation_epoch)

    def of_group(self, group: RaftGroupId) -> PartitionImage | None:
        """The partition of that group, None when there is none (any more)."""
        found = self.partition(group.partition)
        if found is None or found.creation_epoch != group.creation_epoch:
            return None
        return found if group.topic_id == self.topic_id else None

    def has(self, group: RaftGroupId) -> bool:
        """True when that group is the one of its partition."""
        return self.of_group(group) is not None

    @property
    def replication_factor(self) -> int:
        """Replicas of its first partition."""
        return len(self.partitions[0].replicas)


@frozen(slots=True)
class ViewImage:
    """A topic that nobody writes to, over another one, `source`: the retired partitions of that, or
    with a condition those records of all its partitions that meet it.

    It has the numbers from 0 to below `width`, since clients take a topic with a hole for a broken
    one: those that are not retired, or gone, have no records. Offsets that groups commit in it are
    those of its source; in a view with a condition they are its own. Such a view has all numbers
    that its source ever had (`TopicImage.width`), and its own width means nothing.

    Attributes:
        condition: the words of the condition, "" for a view over what is retired.
        creation_epoch: the offset of the command that made a view with a condition, else -1.
    """

    name: str
    topic_id: TopicId
    source: TopicId
    width: int
    condition: str = ""
    creation_epoch: int = -1

    def source_name(self, topic: str) -> str:
        """The name under which its offsets are kept and rights to it are judged; `topic` is that
        of the topic that it looks at."""
        return self.name if self.condition else topic


@frozen(slots=True)
class RemovalImage:
    """An order to delete: the named brokers still have to delete their data of one partition."""

    topic: str
    group: RaftGroupId
    nodes: tuple[NodeId, ...]


@frozen(slots=True)
class ReplacementImage:
    """`new_id` takes the place of `old_id`; kept when done: a repeated order does nothing."""

    old_id: NodeId
    new_id: NodeId
    is_done: bool = False


ConfigKey = tuple[str, str]
"""(resource type, name): ("broker", "") is the default of all brokers, ("broker", "3") is one."""


OffsetMap: TypeAlias = Map[TopicPartition, CommittedOffset]
LiveEpoch: TypeAlias = Callable[[NodeId], int | None]
"""The broker epoch of a broker that is registered and not fenced, else None."""

NO_COORDINATOR = NodeId(-1)
NO_OFFSETS: Final[OffsetMap] = Map()


@frozen(slots=True)
class GroupImage:
    """One group: its coordinator, its last complete generation, its offsets."""

    name: str
    coordinator: NodeId = NO_COORDINATOR
    coordinator_broker_epoch: int = -1
    coordinator_epoch: int = 0
    generation: int = 0
    protocol_type: str = ""
    protocol: str | None = None
    leader: str | None = None
    members: tuple[GroupMember, ...] = ()
    changed_at_ms: int = 0
    """When the generation was completed; for an empty group, since when it has been empty.
    UNDATED where the coordinator did not know the time."""
    offsets: OffsetMap = Map()
    pending: Map[int, OffsetMap] = Map()
    """Offsets of running transactions, by their producer ids; none without any."""

    def is_pending(self, at: TopicPartition) -> bool:
        """True while a running transaction may change the offset there (UNSTABLE_OFFSET_COMMIT)."""
        return any(at in offsets for offsets in self.pending.values())

    def member(self, member_id: str) -> GroupMember | None:
        """The member of that id."""
        for member in self.members:
            if member.member_id == member_id:
                return member
        return None

    def static_member(self, instance_id: str) -> GroupMember | None:
        """The member of that group.instance.id."""
        for member in self.members:
            if member.instance_id == instance_id:
                return member
        return None


@frozen(slots=True)
class GroupsImage:
    """All groups, and the last coordinator epoch that was given."""

    groups: Map[str, GroupImage] = Map()
    last_epoch: int = 0

    def get(self, name: str) -> GroupImage | None:
        """The group of that name."""
        return self.groups.get(name)

    def names(self) -> list[str]:
        """All groups, sorted: a Map's own order differs from process to process."""
        return sorted(self.groups)

    def with_group(self, group: GroupImage) -> GroupsImage:
        """The same with another state of one group."""
        return evolve(self, groups=self.groups.set(group.name, group))


def holder(group: GroupImage | None, live_epoch: LiveEpoch) -> NodeId | None:
    """The coordinator of the group: the claim's holder while its commands would be accepted."""
    if group is None or group.coordinator == NO_COORDINATOR:
        return None
    if live_epoch(group.coordinator) != group.coordinator_broker_epoch:
        return None
    return group.coordinator


def candidate(name: str, node_ids: Iterable[NodeId]) -> NodeId | None:
    """The node that should coordinate what has no coordinator, the same on every node
    (rendezvous)."""

    def score(node_id: NodeId) -> bytes:
        return blake2b(f"{node_id}/{name}".encode(), digest_size=8).digest()

    return max(node_ids, key=lambda node_id: (score(node_id), node_id), default=None)


Credentials: TypeAlias = Map[int, ScramCredential]
"""Of one user, by the number of the mechanism."""


@frozen(slots=True)
class UsersImage:
    """All users that can prove who they are, and what credentials of others are made up from."""

    credentials: Map[str, Credentials] = Map()
    secret: bytes = field(default=b"", repr=False)

    def get(self, user: str, mechanism: int) -> ScramCredential | None:
        """The credential of a user, None where there is none."""
        known = self.credentials.get(user)
        return None if known is None else known.get(mechanism)

    def names(self) -> list[str]:
        """All users, sorted."""
        return sorted(self.credentials)


NO_USERS: Final = UsersImage()


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
    removals: Map[RaftGroupId, RemovalImage] = field(factory=Map)
    """Orders to delete, by `removal_key`."""
    replacements: Map[NodeId, ReplacementImage] = field(factory=Map)
    next_producer_id: int = FIRST_PRODUCER_ID
    recoveries: int = 0
    submitters: Map[NodeId, tuple[int, int]] = field(factory=Map)
    groups: GroupsImage = field(factory=GroupsImage)
    transactions: TransactionsImage = NO_TRANSACTIONS
    features: Map[str, int] = field(factory=Map)
    """Levels that a command finalized; `features_epoch` is the offset of the last such command."""
    features_epoch: int = -1
    voters_wanted: int = 0
    """How many voters the metadata group should have; 0: as many as the cluster began with."""
    removed: Map[NodeId, tuple[StorageId, ...]] = field(factory=Map)
    """The storages of nodes that were removed for good; none of them may come back."""
    rules: Rules = NO_RULES
    users: UsersImage = NO_USERS
    views: Map[str, ViewImage] = field(factory=Map)
    """By name; no topic has the name or the id of one."""

    @property
    def level(self) -> int:
        """The level of everything that nodes store or say together."""
        return self.features.get(RAFTMQ_LEVEL, 1)

    def feature_level(self, name: str) -> int:
        """The level of a feature; 0 while it is not finalized."""
        return self.level if name == RAFTMQ_LEVEL else self.features.get(name, 0)

    def topic_by_id(self, topic_id: TopicId) -> TopicImage | None:
        """The topic of that id or alias, None when there is none (any more)."""
        name = self.topic_names.get(topic_id)
        return None if name is None else self.topics[name]

    def partition(self, topic_partition: TopicPartition) -> PartitionImage | None:
        """A partition by name, None when there is none."""
        topic = self.topics.get(topic_partition.topic)
        return None if topic is None else topic.partition(topic_partition.partition)

    def partition_by_id(self, topic_id: TopicId, number: int) -> PartitionImage | None:
        """The partition of that number of a topic by its id or alias, None when there is none."""
        topic = self.topic_by_id(topic_id)
        return None if topic is None else topic.partition(number)

    def source_of(self, name: str) -> str:
        """The name whose offsets and rights count for a topic or a view."""
        view = self.views.get(name)
        topic = None if view is None else self.topic_names.get(view.source)
        return name if view is None or topic is None else view.source_name(topic)

    def view_of(self, topic_id: TopicId) -> ViewImage | None:
        """The view over the retired partitions of a topic, None when there is none."""
        views = (view for view in self.views.values() if not view.condition)
        return next((view for view in views if view.source == topic_id), None)

    @property
    def known_bytes(self) -> int:
        """How much the numbers of all topics keep of what is known of producers."""
        return sum(
            len(number.producers)
            for topic in self.topics.values()
            if topic.numbers
            for number in topic.numbers.values()
        )

    @property
    def has_retired(self) -> bool:
        """True while there is a view over retired partitions."""
        return any(not view.condition for view in self.views.values())

    def conditions_of(self, topic_id: TopicId) -> tuple[ViewImage, ...]:
        """The views with conditions over a topic, by name."""
        if not self.views:
            return ()
        found = (v for v in self.views.values() if v.condition and v.source == topic_id)
        return tuple(sorted(found, key=lambda view: view.name))

    def sources(self) -> dict[str, str]:
        """The names of views in which groups commit offsets of another topic, each with that of the
        topic that it looks at."""
        views = (view for view in self.views.values() if not view.condition)
        found = ((view.name, self.topic_by_id(view.source)) for view in views)
        return {name: topic.name for name, topic in found if topic is not None}

    def committed_id(self, name: str) -> TopicId | None:
        """The id of what groups commit offsets in under that name: a topic, or a view with a
        condition. None where there is neither."""
        topic = self.topics.get(name)
        if topic is not None:
            return topic.topic_id
        view = self.views.get(name)
        return None if view is None or not view.condition else view.topic_id

    def committed_name(self, topic_id: TopicId) -> str | None:
        """The name under which groups commit offsets in what has that id, or that alias."""
        topic = self.topic_by_id(topic_id)
        if topic is not None:
            return topic.name
        view = self.view_by_id(topic_id) if self.views else None
        return None if view is None or not view.condition else view.name

    def committed_since(self, at: TopicPartition) -> int | None:
        """Since which version groups commit offsets of that partition, of a topic or of a view with
        a condition; None when there is none (any more)."""
        topic, since = self.topics.get(at.topic), -1
        if topic is None:
            view = self.views.get(at.topic)
            if view is None or not view.condition:
                return None
            topic, since = self.topic_by_id(view.source), view.creation_epoch
        partition = None if topic is None else topic.partition(at.partition)
        return None if partition is None else max(since, partition.creation_epoch)

    def view_by_id(self, topic_id: TopicId) -> ViewImage | None:
        """The view of that id."""
        return next((view for view in self.views.values() if view.topic_id == topic_id), None)

    def holds(self, node_id: NodeId, group: RaftGroupId) -> bool:
        """True while that node is to have a replica of that group."""
        topic = self.topic_by_id(group.topic_id)
        partition = None if topic is None else topic.of_group(group)
        return partition is not None and holds(partition, node_id)

    def may_hold(self, node_id: NodeId, group: RaftGroupId) -> bool:
        """The same, or it was to have one and is not known to be out of the group yet."""
        topic = self.topic_by_id(group.topic_id)
        partition = None if topic is None else topic.of_group(group)
        if partition is None:
            return False
        return holds(partition, node_id) or node_id in partition.dismissed

    def removal_key(self, group: RaftGroupId) -> RaftGroupId:
        """Under which the order to delete a group's data stands: below LEVEL_OF_MOVES by topic and
        number alone."""
        return group if self.level >= LEVEL_OF_MOVES else group._replace(creation_epoch=-1)

    def removal(self, group: RaftGroupId) -> RemovalImage | None:
        """The order to delete that group's data, None when there is none."""
        order = self.removals.get(self.removal_key(group))
        return order if order is not None and order.group == group else None

    def live_brokers(self) -> tuple[BrokerImage, ...]:
        """Brokers that are not fenced, by node id."""
        return tuple(self.brokers[n] for n in sorted(self.brokers) if not self.brokers[n].is_fenced)

    def shunned(self) -> tuple[NodeId, ...]:
        """Live brokers that should lead and coordinate nothing: drained ones, and those in
        maintenance."""
        return tuple(b.node_id for b in self.live_brokers() if b.state in _SHUNNED)

    def coordinators(self) -> tuple[NodeId, ...]:
        """The brokers that may coordinate groups and transactions: live ones that take part for
        good; any live one where there are no such."""
        live = self.live_brokers()
        chosen = tuple(b.node_id for b in live if b.state in _COORDINATING)
        return chosen or tuple(b.node_id for b in live)

    def live_epoch(self, node_id: NodeId) -> int | None:
        """The broker epoch of a broker that is registered and not fenced, else None."""
        broker = self.brokers.get(node_id)
        return None if broker is None or broker.is_fenced else broker.epoch

    def rack_of(self, node_id: NodeId) -> tuple[str, int]:
        """The rack of a node; one without, or that is not registered, is a rack of its own."""
        broker = self.brokers.get(node_id)
        if broker is None or broker.rack is None:
            return "", node_id
        return broker.rack, -1

    def leaving(self) -> dict[NodeId, NodeId]:
        """Nodes that are being replaced, each with its successor."""
        pending = (self.replacements[n] for n in sorted(self.replacements))
        return {row.old_id: row.new_id for row in pending if not row.is_done}

    def broker_configs(self, node_id: NodeId) -> dict[str, str]:
        """What was set dynamically for a broker: the cluster's defaults, then its own."""
        merged = dict(self.configs.get(("broker", ""), {}))
        merged.update(self.configs.get(("broker", str(node_id)), {}))
        return merged

    def with_states(self, states: Mapping[NodeId, NodeState]) -> MetadataImage:
        """The image once these registered brokers are in these states; brokers that are not
        registered are passed over."""
        brokers = self.brokers
        for node_id, state in states.items():
            broker = brokers.get(node_id)
            if broker is not None and broker.state is not state:
                brokers = brokers.set(node_id, evolve(broker, state=state))
        return self if brokers is self.brokers else evolve(self, brokers=brokers)

    def topics_by_id(self) -> list[TopicImage]:
        """All topics in a fixed order."""
        return [self.topics[name] for name in sorted(self.topics)]


EMPTY_IMAGE: Final = MetadataImage()
_SHUNNED: Final = (NodeState.DRAINING, NodeState.MAINTENANCE)
_COORDINATING: Final = (NodeState.ACTIVE, NodeState.CORDONED)


# ---- members ----


def present_nodes(image: MetadataImage) -> dict[NodeId, StorageId]:
    """Live nodes, each with its storage."""
    return {broker.node_id: broker.storage_id for broker in image.live_brokers()}


def successor_of(leaving: Mapping[NodeId, NodeId], node_id: NodeId) -> NodeId:
    """The node that takes another one's place in the end: successors may be replaced as well."""
    for _ in range(len(leaving)):
        if node_id not in leaving:
            break
        node_id = leaving[node_id]
    return node_id


def partition_target(image: MetadataImage, group: RaftGroupId) -> TargetMembership | None:
    """The members that a partition should have; None when there is no partition of that group."""
    topic = image.topic_by_id(group.topic_id)
    partition = None if topic is None else topic.of_group(group)
    if partition is None:
        return None
    replicas = partition.replicas
    # Only live brokers are added: the partition would wait for the others.
    brokers = image.brokers
    present = {
        node_id: brokers[node_id].storage_id
        for node_id in replicas
        if node_id in brokers and not brokers[node_id].is_fenced
    }
    return TargetMembership(replicas, present)


def all_partitions(image: MetadataImage) -> Iterator[tuple[TopicImage, PartitionImage]]:
    """Every partition, with its topic; retired ones as well."""
    for topic in image.topics_by_id():
        for partition in topic.held:
            yield topic, partition


def holds_any(image: MetadataImage, node_id: NodeId) -> bool:
    """True while a node has, or is to have, a replica of any partition, or might again have one if
    a move is cancelled."""
    return any(
        holds(partition, node_id) or node_id in partition.moving_from
        for _, partition in all_partitions(image)
    )


def holds(partition: PartitionImage, node_id: NodeId) -> bool:
    """True while a node has, or is to have, a replica of that partition."""
    return node_id in partition.replicas or node_id in partition.voters


# ---- moves ----


@frozen(slots=True)
class Reassignment:
    """A move as clients see it: `replicas` are those of the target, then those that go."""

    replicas: tuple[NodeId, ...]
    adding: tuple[NodeId, ...]
    removing: tuple[NodeId, ...]


def reassignment_of(partition: PartitionImage, voters: Sequence[NodeId]) -> Reassignment | None:
    """The move of a partition that is planned or under way; None where only their order changes.

    `adding` is what a cancelled move would not have, so that the others are as many as clients may
    expect to be in sync. Only those that still vote are left to go.
    """
    if not partition.planned and not partition.moving_from:
        return None
    target = partition.planned or partition.replicas
    before = partition.moving_from or partition.replicas
    if sorted(before) == sorted(target) == sorted(partition.replicas):
        return None
    adding = tuple(sorted(node_id for node_id in target if node_id not in before))
    removing = tuple(sorted(node_id for node_id in voters if node_id not in target))
    return Reassignment((*target, *removing), adding, removing)
