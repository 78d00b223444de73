"""Who leads each partition, as this node has heard, and where leaderships should move instead.

`LeaderTable` is soft state, never safety. New leaders push rows to all nodes once their election
entry is committed; nodes exchange rows when they connect. Rows are merged by (leader epoch,
revision), so late news never overrides newer. What a leader said itself counts for more than what
another node passed on, which is taken only while a partition's leader has not been heard.

`LeaderBalance`, on the controller, gives preferred leaders their partitions back, and `Evacuation`
takes them off brokers that are to lead nothing. `Isolation` hands over what this broker leads while
it sees no majority of the metadata group, or its disk fails.

Invariants: the leader epoch of a partition never goes back, whichever node answers, but where its
leader speaks for itself after another node spoke for it; a leader once known is named until a newer
one is, since clients treat "no leader" worse than a stale one (librdkafka stops looking for a
while); `None` means none was ever known. Nothing here moves data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Set
from functools import partial
from typing import Annotated, Final, Protocol, TypeAlias

import msgspec
from attrs import define, frozen

from raftmq.errors import ErrorCode, KafkaError, RemoteProtocolError
from raftmq.foreign import (
    NODE_ID_MAX,
    PARTITION_MAX,
    POSITION_MAX,
    TERM_JUMP_MAX,
    TERM_MAX,
    decode_foreign,
)
from raftmq.metadata.broker_messages import Outcome, Outcomes, PreferLeaderCall
from raftmq.metadata.commands import ReassignPartition
from raftmq.metadata.config_keys import DELIVERS_TO
from raftmq.metadata.image import MetadataImage, PartitionImage
from raftmq.promise import Promise
from raftmq.types import Buffer, LeaderEpoch, NodeId, ReplicaId, TopicId

Key = tuple[TopicId, int]


@frozen(slots=True)
class LeaderRow:
    """One partition's leader as it states it.

    `revision` counts its statements within the epoch (the ISR and voters change meanwhile).

    Attributes:
        members: voters and learners of the last committed change; none from an older node.
        seen_version: what metadata wants of the partition as of at least this version was known
            to the leader when its members were so; -1 from an older node.
        creation_epoch: of its Raft group; -1 from an older node.
        is_firsthand: its leader said so itself; False: another node passed it on.
    """

    topic_id: TopicId
    partition: int
    leader_epoch: LeaderEpoch
    revision: int
    leader_id: NodeId
    isr: tuple[NodeId, ...]
    voters: tuple[NodeId, ...]
    members: tuple[NodeId, ...] = ()
    seen_version: int = -1
    creation_epoch: int = -1
    is_firsthand: bool = True

    @property
    def key(self) -> Key:
        """What the row is about."""
        return self.topic_id, self.partition


_NodeNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=NODE_ID_MAX)]


class _Wire(msgspec.Struct, array_like=True):
    topic_id: TopicId
    partition: Annotated[int, msgspec.Meta(ge=0, le=PARTITION_MAX)]
    leader_epoch: Annotated[int, msgspec.Meta(ge=0, le=TERM_MAX)]
    revision: Annotated[int, msgspec.Meta(ge=0, le=POSITION_MAX)]
    leader_id: _NodeNumber
    isr: tuple[_NodeNumber, ...]
    voters: tuple[_NodeNumber, ...]
    members: tuple[_NodeNumber, ...] = ()
    seen_version: Annotated[int, msgspec.Meta(ge=-1, le=POSITION_MAX)] = -1
    creation_epoch: Annotated[int, msgspec.Meta(ge=-1, le=POSITION_MAX)] = -1


_decoder: Final[msgspec.msgpack.Decoder[list[_Wire]]] = msgspec.msgpack.Decoder(list[_Wire])


class LeaderTable:
    """Rows by partition."""

    def __init__(self) -> None:
        self._rows: dict[Key, LeaderRow] = {}
        self._callbacks: list[Callable[[LeaderRow, bool], None]] = []
        self.version = 0
        """Rises with every change: a key for caches of encoded answers."""

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, topic_id: TopicId, partition: int) -> LeaderRow | None:
        """The newest row of a number, of whichever of its partitions; None where no leader was ever
        known."""
        return self._rows.get((topic_id, partition))

    def of(self, topic_id: TopicId, partition: PartitionImage) -> LeaderRow | None:
        """The same, None also where only an earlier partition of that number is known to have had
        a leader."""
        row = self._rows.get((topic_id, partition.index))
        is_earlier = row is not None and 0 <= row.creation_epoch < partition.creation_epoch
        return None if is_earlier else row

    def on_change(self, callback: Callable[[LeaderRow, bool], None]) -> None:
        """Call `callback(row, is_own)` after each change."""
        self._callbacks.append(callback)

    def led(
        self,
        topic_id: TopicId,
        partition: int,
        *,
        leader: NodeId,
        leader_epoch: LeaderEpoch,
        isr: Iterable[NodeId],
        voters: Iterable[NodeId],
        members: Iterable[NodeId] = (),
        seen_version: int = -1,
        creation_epoch: int = -1,
    ) -> LeaderRow | None:
        """State that this node leads; only once its election entry is committed.

        Returns the row to push to the others, None when it says nothing new (or is outdated).
        """
        known = self._rows.get((topic_id, partition))
        revision = 0
        if known is not None and known.leader_epoch == leader_epoch:
            revision = known.revision + 1
        row = LeaderRow(
            topic_id,
            partition,
            leader_epoch,
            revision,
            leader,
            tuple(isr),
            tuple(voters),
            tuple(members),
            seen_version,
            creation_epoch,
        )
        if known is not None and _facts(known) == _facts(row):
            return None
        return row if self._take(row, is_own=True) else None

    def merge(self, rows: Iterable[LeaderRow]) -> list[LeaderRow]:
        """Take in the rows that another node sent; returns those that were new.

        Raises:
            RemoteProtocolError: an epoch beyond all that elections can have made. Believed, it
                would hide the partition's true leader for good, so none of the rows is taken.
        """
        rows = list(rows)
        self.check_epochs(rows)
        return [row for row in rows if self._take(row, is_own=False)]

    def check_epochs(self, rows: Iterable[LeaderRow]) -> None:
        """The check of `merge` alone.

        Raises:
            RemoteProtocolError: as there.
        """
        for row in rows:
            known = self._rows.get(row.key)
            since = 0 if known is None or _is_other_life(known, row) else known.leader_epoch
            if row.leader_epoch - since > TERM_JUMP_MAX:
                raise RemoteProtocolError(
                    f"leader epoch {row.leader_epoch} of partition {row.partition} of "
                    f"{row.topic_id}, known is {known and known.leader_epoch}"
                )

    def is_news(self, row: LeaderRow) -> bool:
        """True for a row that would be taken."""
        known = self._rows.get(row.key)
        return known is None or _is_newer(row, known)

    def forget(self, topic_id: TopicId) -> None:
        """Drop the rows of a deleted topic."""
        gone = [key for key in self._rows if key[0] == topic_id]
        for key in gone:
            del self._rows[key]
        self.version += bool(gone)

    def rows(self) -> list[LeaderRow]:
        """All rows, in a fixed order, for a node that just connected."""
        return [self._rows[key] for key in sorted(self._rows)]

    def _take(self, row: LeaderRow, *, is_own: bool) -> bool:
        if not self.is_news(row):
            return False
        self._rows[row.key] = row
        self.version += 1
        for callback in self._callbacks:
            callback(row, is_own)
        return True


def _is_other_life(one: LeaderRow, other: LeaderRow) -> bool:
    """True when two rows of a partition are of different Raft groups, as far as they say."""
    return -1 not in (one.creation_epoch, other.creation_epoch) and (
        one.creation_epoch != other.creation_epoch
    )


def _is_newer(row: LeaderRow, known: LeaderRow) -> bool:
    if _is_other_life(row, known):
        return row.creation_epoch > known.creation_epoch
    if row.is_firsthand != known.is_firsthand:
        return row.is_firsthand
    return (row.leader_epoch, row.revision) > (known.leader_epoch, known.revision)


def _facts(row: LeaderRow) -> tuple[object, ...]:
    stated = row.leader_epoch, row.leader_id, row.isr, row.voters
    return (*stated, row.members, row.seen_version, row.creation_epoch, row.is_firsthand)


def encode_rows(rows: Iterable[LeaderRow]) -> bytes:
    """Bytes of a push."""
    return msgspec.msgpack.encode(
        [
            _Wire(
                r.topic_id,
                r.partition,
                r.leader_epoch,
                r.revision,
                r.leader_id,
                r.isr,
                r.voters,
                r.members,
                r.seen_version,
                r.creation_epoch,
            )
            for r in rows
        ]
    )


def decode_rows(data: Buffer, sender: NodeId) -> list[LeaderRow]:
    """Read a push of that node.

    Raises:
        RemoteProtocolError: not one.
    """
    wires = decode_foreign("leader rows", _decoder.decode, data)
    return [
        LeaderRow(
            wire.topic_id,
            wire.partition,
            LeaderEpoch(wire.leader_epoch),
            wire.revision,
            NodeId(wire.leader_id),
            tuple(NodeId(n) for n in wire.isr),
            tuple(NodeId(n) for n in wire.voters),
            tuple(NodeId(n) for n in wire.members),
            wire.seen_version,
            wire.creation_epoch,
            wire.leader_id == sender,
        )
        for wire in wires
    ]


# ---- which leader is preferred ----


def preference_error(
    partition: PartitionImage, row: LeaderRow | None, to: int
) -> KafkaError | None:
    """Why a node is not to lead a partition; None where it may."""
    if to not in partition.replicas:
        return KafkaError(
            f"node {to} has no replica of it; nodes {list(partition.replicas)} have",
            code=ErrorCode.INVALID_REPLICA_ASSIGNMENT,
        )
    isr = () if row is None else row.isr
    if to not in isr:
        return KafkaError(
            f"node {to} is not in sync; nodes {list(isr)} are", code=ErrorCode.INELIGIBLE_REPLICA
        )
    return None


def plan_preference(
    image: MetadataImage, leaders: LeaderTable, request: PreferLeaderCall
) -> tuple[ReassignPartition | None, Outcomes]:
    """The command that makes a node the preferred leader, None where nothing is to be changed."""
    topic = image.topics.get(request.topic)
    partition = None if topic is None else topic.partition(request.partition)
    if topic is None or partition is None:
        code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return None, (Outcome(name=request.topic, code=code),)
    row = leaders.of(topic.topic_id, partition)
    if (error := preference_error(partition, row, request.to)) is not None:
        return None, (Outcome(name=topic.name, code=error.code, message=error.message),)
    done = (Outcome(name=topic.name),)
    to = NodeId(request.to)
    if partition.preferred_leader == to:
        return None, done
    others = (node_id for node_id in partition.replicas if node_id != to)
    return ReassignPartition(
        topic_id=topic.topic_id, partition=partition.index, replicas=(to, *others)
    ), done


QUIET_MS: Final = 3_000.0
COOL_DOWN_MS: Final = 8_000.0
COOL_DOWN_MAX_MS: Final = 300_000.0
LOST_SOON_MS: Final = 60_000.0
"""A leadership that was kept for so long after its move did come back."""
MOVES_MAX: Final = 50
ASK_AGAIN_MS: Final = 2_000.0
"""A leader that was asked to hand over, and leads still, is asked again."""


@frozen(slots=True)
class Move:
    """Ask the leader of a partition to hand over to `to`."""

    topic_id: TopicId
    partition: int
    to: NodeId


@define(slots=True)
class _Moved:
    """What came of the last move of a partition."""

    to: NodeId
    at_ms: float
    leader_epoch: int
    """The epoch of the leader that was asked to hand over: a later epoch under another leader than
    `to` is a move that was undone."""
    cool_down_ms: float
    until_ms: float
    """Not again before."""
    is_lost: bool = False

    def see_undone(self, now_ms: float) -> None:
        """The partition is led by another node again, since just now."""
        self.is_lost = True
        if now_ms - self.at_ms < LOST_SOON_MS:
            self.cool_down_ms = min(2 * self.cool_down_ms, COOL_DOWN_MAX_MS)
            self.until_ms = now_ms + self.cool_down_ms
        else:
            self.cool_down_ms = COOL_DOWN_MS


class LeaderBalance:
    """Gives preferred leaders their partitions back, slowly, for one controller term.

    Leaderships pile up on the brokers that stayed while others were away. A leadership is moved
    only after both it and the preferred broker have been stable for a while (a broker that hands
    over in order to leave gets nothing back meanwhile), only to a replica in the reported ISR
    whose broker is fit to lead, a few at a time, and the same one not again before a cool-down.
    A delay partition is not given to a broker that has still to read what is pending there: its
    records would wait for that.
    One that was lost again soon after it was moved waits twice as long each time: whatever made
    the broker lose it may go on, and each move interrupts producers. Pure but for what it
    remembers of earlier calls.
    """

    def __init__(self) -> None:
        self._live_since: dict[NodeId, tuple[int, float]] = {}
        self._led_since: dict[Key, tuple[int, float]] = {}
        self._moved: dict[Key, _Moved] = {}
        self._balanced: tuple[object, ...] = ()
        """Versions of image and leaders, and which brokers were unfit or reading, when nothing was
        to be moved."""

    def due(
        self,
        image: MetadataImage,
        leaders: LeaderTable,
        now_ms: float,
        *,
        unfit: Set[NodeId] = frozenset(),
        reading_delays: Set[NodeId] = frozenset(),
    ) -> list[Move]:
        """The moves to make now; `unfit` brokers are given nothing, those that are
        `reading_delays` no delay partitions."""
        seen = image.structure_version, leaders.version, sorted(unfit), sorted(reading_delays)
        if seen == self._balanced:
            return []  # nothing has changed: a thousand partitions cost nothing here
        self._balanced = seen
        live = {b.node_id: b.epoch for b in image.live_brokers() if b.node_id not in unfit}
        self._live_since = {
            node_id: self._live_since[node_id]
            if self._live_since.get(node_id, (-1, 0.0))[0] == epoch
            else (epoch, now_ms)
            for node_id, epoch in live.items()
        }
        moves: list[Move] = []
        led_since: dict[Key, tuple[int, float]] = {}
        for topic in image.topics_by_id():
            unready = reading_delays if topic.configs.get(DELIVERS_TO) else frozenset[NodeId]()
            for partition in topic.held:
                row = leaders.of(topic.topic_id, partition)
                if row is None:
                    continue
                key = row.key
                known = self._led_since.get(key)
                if known is None or known[0] != row.leader_epoch:
                    known = (row.leader_epoch, now_ms)
                led_since[key] = known
                preferred = partition.preferred_leader
                if row.leader_id == preferred:
                    continue
                if preferred in live:
                    self._balanced = ()  # it may be due by mere time
                moved = self._last_move(row, preferred, now_ms)
                is_due = (
                    preferred in row.isr
                    and preferred in live
                    and preferred not in unready
                    and now_ms - known[1] >= QUIET_MS
                    and now_ms - self._live_since[preferred][1] >= QUIET_MS
                    and (moved is None or now_ms >= moved.until_ms)
                )
                if is_due and len(moves) < MOVES_MAX:
                    cool_down_ms = COOL_DOWN_MS if moved is None else moved.cool_down_ms
                    until_ms = now_ms + COOL_DOWN_MS
                    self._moved[key] = _Moved(
                        preferred, now_ms, row.leader_epoch, cool_down_ms, until_ms
                    )
                    moves.append(Move(*key, preferred))
        self._led_since = led_since
        self._moved = {
            k: moved for k, moved in self._moved.items() if now_ms - moved.until_ms < LOST_SOON_MS
        }
        return moves

    def _last_move(self, row: LeaderRow, preferred: NodeId, now_ms: float) -> _Moved | None:
        """What is remembered of a partition that its preferred leader does not lead."""
        moved = self._moved.get(row.key)
        if moved is None or moved.to != preferred:
            return None
        if not moved.is_lost and row.leader_epoch != moved.leader_epoch:
            moved.see_undone(now_ms)
        return moved


class Evacuation:
    """Takes leaderships off brokers that are to lead nothing: drained ones, and those in
    maintenance. They get them back from `LeaderBalance`, once they are active again.

    A leadership goes to a replica in the reported ISR whose broker is fit to lead, among them to
    the one that leads least. Who was asked and still leads is asked again after a while.
    """

    def __init__(self) -> None:
        self._asked_ms: dict[Key, float] = {}
        self._empty = (-1, -1)  # versions of image and leaders when nothing was to be moved

    def due(
        self,
        image: MetadataImage,
        leaders: LeaderTable,
        now_ms: float,
        *,
        unfit: Set[NodeId] = frozenset(),
    ) -> list[Move]:
        """The moves to ask for now."""
        seen = image.structure_version, leaders.version
        shunned = image.shunned()
        if seen == self._empty or not shunned:
            self._asked_ms.clear()
            return []
        unfit = {*unfit, *shunned}
        fit = {b.node_id for b in image.live_brokers() if b.node_id not in unfit}
        rows = [
            row
            for topic in image.topics_by_id()
            for partition in topic.held
            if (row := leaders.of(topic.topic_id, partition)) is not None
        ]
        load = Counter(row.leader_id for row in rows)
        moves = []
        left = [row for row in rows if row.leader_id in shunned]
        for row in left:
            others = [n for n in row.isr if n in fit]
            if not others or now_ms - self._asked_ms.get(row.key, -ASK_AGAIN_MS) < ASK_AGAIN_MS:
                continue
            chosen = min(others, key=lambda n: (load[n], n))
            load[chosen] += 1
            self._asked_ms[row.key] = now_ms
            moves.append(Move(*row.key, chosen))
            if len(moves) == MOVES_MAX:
                break
        self._empty = (-1, -1) if left else seen
        return moves


ASK_EVERY_MS: Final = 1_000.0


class LedReplica(Protocol):
    """A replica that leads its partition here."""

    @property
    def is_handing_over(self) -> bool: ...
    def in_sync_replicas(self) -> tuple[ReplicaId, ...]: ...
    def transfer_leadership(self, node_id: NodeId) -> bool: ...


class Isolation:
    """Hands leaderships over while this broker is cut off, or worse off than a follower.

    A broker that sees no majority of the metadata group for long serves plain produce and fetch
    on, but its metadata grows old: topics are deleted, configs change, brokers come and go
    without it. So where another in-sync voter of a partition it leads still sees the majority, it
    hands the leadership to that one; it asks first, since that node may be cut off as well.
    Leaderships won while cut off go the same way. Coordinator work ends by itself: its barriers
    are not answered any more. With a full disk a broker refuses records that others could take;
    with one that does not answer it cannot count itself, and commits nothing while a follower is
    behind. It hands over likewise, to a broker that is better off.
    """

    def __init__(
        self,
        node_id: NodeId,
        *,
        is_isolated: Callable[[], bool],
        ask: Callable[[NodeId], Promise[bool]],
        led: Callable[[], Iterable[LedReplica]],
    ) -> None:
        """`ask` tells whether another node could lead better; `led` gives the replicas that lead
        here."""
        self._node_id = node_id
        self._is_isolated = is_isolated
        self._ask = ask
        self._led = led
        self._next_ms = 0.0
        self.handed_over_count = 0

    def tick(self, now_ms: float) -> None:
        """Once a second while cut off, ask the in-sync peers of all that is led here."""
        if now_ms < self._next_ms or not self._is_isolated():
            return
        self._next_ms = now_ms + ASK_EVERY_MS
        for node_id in sorted(self._peers()):
            self._ask(node_id).when_done(partial(self._answered, node_id))

    def _peers(self) -> set[NodeId]:
        peers = {r.node_id for replica in self._led() for r in replica.in_sync_replicas()}
        return peers - {self._node_id}

    def _answered(self, node_id: NodeId, told: Promise[bool]) -> None:
        if told.error is not None or not told.result() or not self._is_isolated():
            return
        for replica in self._led():
            if replica.is_handing_over:
                continue  # asking another one now would let two nodes stand for election
            if any(r.node_id == node_id for r in replica.in_sync_replicas()):
                self.handed_over_count += replica.transfer_leadership(node_id)
