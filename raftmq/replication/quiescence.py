"""Quiescence: an idle group costs nothing but its share in one small frame between two nodes.

When nothing happened for a while and every member has everything, the leader quiesces the group. A
quiescent group is not ticked: no heartbeats, no election timer. In their place each two nodes that
share such groups exchange one beat, which proves that the other is the same process and lives.
Whatever touches a replica unquiesces it, and it unquiesces the others; so does the silence of a
member's node, its restart, or a disagreement about which groups are quiescent.

Two nodes that disagree about which groups are quiescent unquiesce those, not all that they share,
and a node whose beats came too late while its connection stood is given more time: where cores are
scarce, hundreds of groups that unquiesce at once make everything later still.

A member that was silent for long (its node is down) keeps no group active, as long as a majority is
there; it is served again as soon as it says anything.

`Quiescence` is one replica's part, `QuiescentReplicas` a node's. Invariants: a group quiesces only
when all members that are there, a majority, hold the same committed, flushed log and say so; a lost
`Unquiesce` costs one election timeout, never an answer; nothing here decides about safety, since a
replica that is active again goes on by Raft's rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from attrs import define, field, frozen

from raftmq.raft.core import RaftCore
from raftmq.raft.messages import AppendReply, Heartbeat, HeartbeatReply
from raftmq.raft.progress import ProgressState
from raftmq.replication.messages import (
    CONFUSED,
    QUIESCENCE_BUCKETS,
    NodeBeat,
    PeerMessage,
    Quiesce,
    Unquiesce,
)
from raftmq.replication.ports import ReplicaConfig
from raftmq.replication.timeout_backoff import TimeoutBackoff
from raftmq.types import NodeId, RaftGroupId, RaftIndex, ReplicaId

if TYPE_CHECKING:
    from raftmq.replication.replica import Replica

ABSENT_AFTER_IDLE_TIMES = 10
"""A member silent for so many times the idle time before quiescence is absent."""
PROBE_BEATS = 20
"""The absent are asked once in so many beats: about once a second."""
MISMATCHES_MAX = 3
"""Beats in a row that may disagree about which groups are quiescent: messages are on their way."""
DECAY_SILENCES = 16
"""After so many of the silences allowed without one, less is allowed again."""


class QuiescencePorts(Protocol):
    """What the quiescence of a group needs of its replica here."""

    @property
    def core(self) -> RaftCore: ...
    @property
    def config(self) -> ReplicaConfig: ...
    @property
    def is_writable(self) -> bool: ...
    @property
    def is_settled(self) -> bool: ...
    @property
    def is_membership_pending(self) -> bool: ...
    def send(self, message: PeerMessage) -> None:
        """Send to another replica of the group."""
        ...

    def vouch(self, follower: ReplicaId) -> None:
        """A follower was in sync until now, although it said nothing."""
        ...


class Quiescence:
    """One replica's share in its group's quiescence."""

    __slots__ = ("_idle_end", "_idle_ticks", "_replica", "_round", "absent", "is_quiescent")

    def __init__(self, replica: QuiescencePorts) -> None:
        self._replica = replica
        self._idle_end = RaftIndex(0)
        self._idle_ticks = 0
        self._round = 0
        self.is_quiescent = False
        self.absent: tuple[ReplicaId, ...] = ()
        """Members whose node was silent for long when this leader quiesced the group."""

    def retire(self) -> None:
        """Let go of the replica, which ended."""
        del self._replica

    def look(self, ticks: int) -> None:
        """So many ticks passed: a leader quiesces a group that has been idle for long."""
        replica = self._replica
        core = replica.core
        leadership = core.leadership
        if leadership is None or core.log_end != self._idle_end:
            self._idle_end, self._idle_ticks = core.log_end, 0
            return
        self._idle_ticks += ticks
        idle_ticks_min = replica.config.quiesce_after_ticks
        if core.log_end == leadership.term_start + 1:
            # Nobody wrote in this term: a new group, or one of many that lost their leader. They
            # come in hundreds, and their heartbeats would keep each other from quiescence.
            idle_ticks_min = min(idle_ticks_min, core.config.election_ticks)
        if self._idle_ticks < idle_ticks_min:
            return
        absent = self._absent()
        if not self._all_have_all(absent):
            return
        self.absent = absent
        round_number = core.next_round()
        for member in core.progress:
            if member in absent:
                continue
            message = Quiesce(core.term, core.self_id, member, core.log_end, round_number)
            replica.send(message)
        self._round = round_number
        self.is_quiescent = True

    def _absent(self) -> tuple[ReplicaId, ...]:
        """Who was silent for long; nobody where what is left is no majority."""
        core = self._replica.core
        silence_ticks_max = ABSENT_AFTER_IDLE_TIMES * self._replica.config.quiesce_after_ticks
        absent = tuple(
            member
            for member, progress in core.progress.items()
            if core.now - progress.last_heard_tick > silence_ticks_max
        )
        voters = core.configuration.voters
        is_majority = 2 * sum(voter not in absent for voter in voters) > len(voters)
        return absent if is_majority else ()

    def _all_have_all(self, absent: tuple[ReplicaId, ...]) -> bool:
        replica = self._replica
        core = replica.core
        if not replica.is_writable or not replica.is_settled or core.transferee is not None:
            return False
        if replica.is_membership_pending:
            return False
        storages = {member.node_id: member for member in core.configuration.members}
        return len(storages) == len(core.configuration.members) and all(
            progress.match_end == core.log_end
            and progress.state is ProgressState.REPLICATE
            and progress.is_promising
            and core.now - progress.last_heard_tick <= core.config.heartbeat_ticks + 1
            for member, progress in core.progress.items()
            if member not in absent
        )

    def probe(self) -> None:
        """Ask the absent: a disk that was exchanged meanwhile says so only when it is asked."""
        core = self._replica.core
        for member in self.absent:
            commit_end = min(core.commit_end, core.progress[member].match_end)
            beat = Heartbeat(core.term, core.self_id, member, commit_end, self._round)
            self._replica.send(beat)

    def on_quiesce(self, message: Quiesce) -> None:
        """The leader quiesces the group, which takes that this replica has everything."""
        replica = self._replica
        core = replica.core
        if (
            message.term == core.term
            and message.sender == core.leader
            and message.log_end == core.log_end
            and replica.is_settled
        ):
            self._round = message.round
            self.is_quiescent = True
        elif message.term >= core.term:
            # The others are quiescent by now, and would find out by beats only that one is not.
            replica.send(Unquiesce(message.term, core.self_id, message.sender))

    def is_late(self, message: PeerMessage) -> bool:
        """True for what was under way when quiescence began, which must not end it."""
        core = self._replica.core
        if message.sender in self.absent:
            return False  # it is back, perhaps with a term of long ago
        if message.term != core.term:
            return message.term < core.term
        if isinstance(message, Heartbeat | Quiesce):
            return message.round <= self._round
        return isinstance(message, AppendReply | HeartbeatReply)

    def unquiesce(self, silent: NodeId | None) -> None:
        """Go on by ticks; `silent` is the node whose silence was the reason, if it was."""
        replica = self._replica
        self.is_quiescent = False
        self._idle_ticks = 0
        absent, self.absent = self.absent, ()
        for member in replica.core.progress:
            if member.node_id != silent and member not in absent:
                replica.vouch(member)  # it kept up until now: so quiescence began, and went on

    def call(self) -> None:
        """Who hears no leader and may not stand for election has no other way to say that it is
        there, to a group that is quiescent without it."""
        core = self._replica.core
        if core.leader is None and not core.can_campaign:
            for voter in core.configuration.voters:
                if voter != core.self_id:
                    self._replica.send(Unquiesce(core.term, core.self_id, voter))

    def announce(self) -> None:
        """Unquiesce the others: a leader all members, a follower its leader."""
        core = self._replica.core
        targets = list(core.progress) if core.is_leader else [core.leader]
        for target in targets:
            if target is not None:
                self._replica.send(Unquiesce(core.term, core.self_id, target))


@frozen(slots=True)
class _Record:
    replica: Replica
    leader: NodeId | None
    nodes: tuple[NodeId, ...]
    digest: int

    @property
    def bucket(self) -> int:
        return self.digest % QUIESCENCE_BUCKETS


def _buckets() -> list[int]:
    return [0] * QUIESCENCE_BUCKETS


@define(slots=True)
class _Peer:
    """Another node that shares quiescent groups with this one."""

    heard_tick: int
    incarnation: int | None = None
    led_here: list[int] = field(factory=_buckets)
    """Digests of the quiescent groups that this node leads and the peer is in."""
    led_there: list[int] = field(factory=_buckets)
    mismatches: list[int] = field(factory=_buckets)
    shared: int = 0
    backoff: TimeoutBackoff = field(factory=TimeoutBackoff)
    """With its silence: it fell silent before while its connection stood."""

    def hears(self, now: int, incarnation: int, election_ticks: int) -> bool:
        """Note a beat; False when groups are quiescent on the word of another process."""
        self.heard_tick = now
        before, self.incarnation = self.incarnation, incarnation
        if before not in (None, incarnation):
            self.backoff = TimeoutBackoff()
            return not self.shared
        self.backoff.decay(now, DECAY_SILENCES * self.silence_max(election_ticks))
        return True

    def silence_max(self, election_ticks: int) -> int:
        """Ticks without a beat after which it is taken for gone."""
        return election_ticks << self.backoff.doublings

    def disagreed(self, quiescent: tuple[int, ...]) -> tuple[int, ...]:
        """Compare what is quiescent there with what is here; the buckets that disagreed for
        long, as ones among zeros, or nothing."""
        counts = [
            count + 1 if theirs != ours else 0
            for count, theirs, ours in zip(self.mismatches, quiescent, self.led_there, strict=True)
        ]
        self.mismatches = [count % MISMATCHES_MAX for count in counts]
        found = tuple(int(count == MISMATCHES_MAX) for count in counts)
        return found if any(found) else ()


class QuiescentReplicas:
    """All quiescent replicas of a node."""

    def __init__(
        self,
        node_id: NodeId,
        incarnation: int,
        send: Callable[[NodeBeat], None],
        unquiesce: Callable[[Replica, NodeId | None], None],
    ) -> None:
        """`incarnation` differs from every earlier process of this node."""
        self._node_id = node_id
        self._incarnation = incarnation
        self._send = send
        self._unquiesce = unquiesce
        self._records: dict[RaftGroupId, _Record] = {}
        self._peers: dict[NodeId, _Peer] = {}
        self._now = 0

    def __contains__(self, group: RaftGroupId) -> bool:
        return group in self._records

    def __len__(self) -> int:
        return len(self._records)

    def add(self, replica: Replica) -> None:
        """A replica quiesced."""
        core = replica.core
        leader = None if core.leader is None else core.leader.node_id
        if leader == self._node_id:
            absent = replica.quiescence.absent
            nodes = tuple(member.node_id for member in core.progress if member not in absent)
        else:
            nodes = () if leader is None else (leader,)
        record = _Record(replica, leader, nodes, _digest(replica.group))
        self._records[replica.group] = record
        for node_id in nodes:
            peer = self._peers.get(node_id)
            if peer is None:
                peer = self._peers[node_id] = _Peer(self._now)
            elif not peer.shared:
                peer.heard_tick, peer.incarnation = self._now, None
            peer.shared += 1
        self._mark(record)

    def remove(self, group: RaftGroupId) -> Replica | None:
        """A replica unquiesces or leaves; None when it was active."""
        record = self._records.pop(group, None)
        if record is None:
            return None
        for node_id in record.nodes:
            self._peers[node_id].shared -= 1
        self._mark(record)
        return record.replica

    def _mark(self, record: _Record) -> None:
        for node_id in record.nodes:
            peer = self._peers[node_id]
            digests = peer.led_here if record.leader == self._node_id else peer.led_there
            digests[record.bucket] ^= record.digest

    def tick(self, heartbeat_ticks: int, election_ticks: int) -> None:
        """Send beats when they are due; unquiesce what shares groups with a silent node."""
        self._now += 1
        if not self._records:
            return
        is_due = self._now % heartbeat_ticks == 0
        if self._now % (PROBE_BEATS * heartbeat_ticks) == 0:
            for record in self._records.values():
                if record.replica.quiescence.absent:
                    record.replica.quiescence.probe()
        for node_id, peer in list(self._peers.items()):
            if not peer.shared:
                continue
            if is_due:
                quiescent = tuple(peer.led_here)
                self._send(NodeBeat(self._node_id, node_id, self._incarnation, quiescent))
            if self._now - peer.heard_tick > peer.silence_max(election_ticks):
                peer.backoff.increase(peer.backoff.doublings + 1, self._now)
                self.unquiesce_shared(node_id, silent=node_id)

    def on_beat(self, beat: NodeBeat, election_ticks: int) -> None:
        """Another node lives, and says which groups are quiescent on its word."""
        if beat.incarnation == CONFUSED:
            self.unquiesce_shared(beat.sender, silent=None, buckets=beat.quiescent)
            return
        peer = self._peers.get(beat.sender)
        if peer is None:
            peer = self._peers[beat.sender] = _Peer(self._now)
        if not peer.hears(self._now, beat.incarnation, election_ticks):
            self.unquiesce_shared(beat.sender, silent=None)
            return
        if buckets := peer.disagreed(beat.quiescent):
            # Also what the other side alone believes quiescent unquiesces: it may be gone here.
            self._send(NodeBeat(self._node_id, beat.sender, CONFUSED, buckets))
            self.unquiesce_shared(beat.sender, silent=None, buckets=buckets)

    def unquiesce_shared(
        self, node_id: NodeId, *, silent: NodeId | None, buckets: tuple[int, ...] = ()
    ) -> None:
        """Unquiesce every replica for which that node vouched, or those of some buckets."""
        records = [
            record
            for record in self._records.values()
            if node_id in record.nodes and (not buckets or buckets[record.bucket])
        ]
        for record in records:
            self._unquiesce(record.replica, silent)


def _digest(group: RaftGroupId) -> int:
    """64 bits, the same on every node; XOR of them tells sets apart."""
    mixed = group.topic_id.int ^ (group.topic_id.int >> 64)
    mixed = (mixed + group.partition * 0x9E3779B97F4A7C15 + group.creation_epoch) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 31)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    return mixed ^ (mixed >> 29)
