"""Quiescence: an idle group costs only its share in one small frame between two nodes.

When nothing happened for a while and every member has everything, the leader quiesces the group. A
quiescent group is not ticked: no heartbeats, no election timer. In their place each two nodes that
share such groups exchange one beat, which proves that the other is the same process and alive. Any
touch unquiesces a replica, which unquiesces the other members; so does the silence of a member's
node, its restart, or a disagreement about which groups are quiescent.

Two nodes that disagree about which groups are quiescent unquiesce those, not all that they share,
and a node whose beats came too late while its connection stood is given more time: where cores are
scarce, hundreds of groups that unquiesce at once make everything later still.

A member that was silent for long (its node is down) keeps no group active while a majority is
there; any message of it unquiesces the group.

`Quiescence` is one replica's part, `QuiescentReplicas` a node's. Invariants: a group quiesces only
when all members that are there, a majority, hold the same committed, flushed log and say so; a lost
`Unquiesce` costs one election timeout, never an answer; nothing here decides about safety, since a
replica that is active again goes on by Raft's rules.
"""

from __future__ import annotations

from collections.abc import Callable

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

ABSENT_AFTER_IDLE_TIMES = 10
"""A member is absent when it was silent for so many times the idle time before quiescence."""
PROBE_BEATS = 20
"""Absent members are probed once in so many beats: about once a second."""
MISMATCHES_MAX = 3
"""Beats in a row that may disagree about which groups are quiescent, by messages under way."""
DECAY_SILENCES = 16
"""The allowed silence shrinks again after so many times its length without one."""


class Quiescence:
    """One replica's share in its group's quiescence."""

    __slots__ = ("_config", "_idle_end", "_idle_ticks", "_round", "_send", "absent", "is_quiescent")

    def __init__(self, config: ReplicaConfig, send: Callable[[PeerMessage], None]) -> None:
        """`send` sends to another replica of the group."""
        self._config = config
        self._send = send
        self._idle_end = RaftIndex(0)
        self._idle_ticks = 0
        self._round = 0
        self.is_quiescent = False
        self.absent: tuple[ReplicaId, ...] = ()
        """Members whose node was silent for long when this leader quiesced the group."""

    def is_idle(self, core: RaftCore, ticks: int) -> bool:
        """So many ticks passed; True on a leader whose group has been idle for long enough."""
        leadership = core.leadership
        if leadership is None or core.log_end != self._idle_end:
            self._idle_end, self._idle_ticks = core.log_end, 0
            return False
        self._idle_ticks += ticks
        idle_ticks_min = self._config.quiesce_after_ticks
        if core.log_end == leadership.term_start + 1:
            # Nothing was written in this term: a new group, or one of many that lost their leader.
            # They come in hundreds, and their heartbeats would keep each other from quiescence.
            idle_ticks_min = min(idle_ticks_min, core.config.election_ticks)
        return self._idle_ticks >= idle_ticks_min

    def begin(self, core: RaftCore) -> None:
        """Quiesce an idle group that this replica leads, if all members that are there have
        everything."""
        absent = self._absent(core)
        if not _all_have_all(core, absent):
            return
        self.absent = absent
        self._round = core.next_round()
        for member in core.progress:
            if member not in absent:
                self._send(Quiesce(core.term, core.self_id, member, core.log_end, self._round))
        self.is_quiescent = True

    def _absent(self, core: RaftCore) -> tuple[ReplicaId, ...]:
        """The members that were silent for long; none if the others are no majority."""
        silence_ticks_max = ABSENT_AFTER_IDLE_TIMES * self._config.quiesce_after_ticks
        absent = tuple(
            member
            for member, progress in core.progress.items()
            if core.now - progress.last_heard_tick > silence_ticks_max
        )
        voters = core.configuration.voters
        is_majority = 2 * sum(voter not in absent for voter in voters) > len(voters)
        return absent if is_majority else ()

    def nodes(self, core: RaftCore) -> tuple[NodeId, ...]:
        """The nodes whose beats stand for this group's: on a leader those of its members, but for
        the absent; on a follower its leader's."""
        if core.is_leader:
            return tuple(member.node_id for member in core.progress if member not in self.absent)
        return () if core.leader is None else (core.leader.node_id,)

    def probe(self, core: RaftCore) -> None:
        """Send absent members a heartbeat: one whose disk was exchanged says so only when asked."""
        for member in self.absent:
            commit_end = min(core.commit_end, core.progress[member].match_end)
            self._send(Heartbeat(core.term, core.self_id, member, commit_end, self._round))

    def on_quiesce(self, core: RaftCore, message: Quiesce, *, is_settled: bool) -> None:
        """The leader quiesces the group; agree if this replica has everything and is settled."""
        if (
            message.term == core.term
            and message.sender == core.leader
            and message.log_end == core.log_end
            and is_settled
        ):
            self._round = message.round
            self.is_quiescent = True
        elif message.term >= core.term:
            # The others are quiescent by now, and would find out by beats only that one is not.
            self._send(Unquiesce(message.term, core.self_id, message.sender))

    def is_late(self, core: RaftCore, message: PeerMessage) -> bool:
        """True for a message that was under way when quiescence began, and must not end it."""
        if message.sender in self.absent:
            return False  # it is back, perhaps with a term of long ago
        if message.term != core.term:
            return message.term < core.term
        if isinstance(message, Heartbeat | Quiesce):
            return message.round <= self._round
        return isinstance(message, AppendReply | HeartbeatReply)

    def end(self, core: RaftCore, silent: NodeId | None) -> list[ReplicaId]:
        """Go on by ticks; returns the members that were in sync until now, as they were when
        quiescence began.

        Args:
            silent: the node whose silence was the reason, if one's was.
        """
        self.is_quiescent = False
        self._idle_ticks = 0
        absent, self.absent = self.absent, ()
        return [m for m in core.progress if m.node_id != silent and m not in absent]

    def call(self, core: RaftCore) -> None:
        """Unquiesce the voters, if this replica hears no leader and may not stand for election: it
        has no other way to tell a group that is quiescent without it that it is there."""
        if core.leader is None and not core.can_campaign:
            for voter in core.configuration.voters:
                if voter != core.self_id:
                    self._send(Unquiesce(core.term, core.self_id, voter))

    def announce(self, core: RaftCore) -> None:
        """Unquiesce the others: a leader all members, a follower its leader."""
        targets = list(core.progress) if core.is_leader else [core.leader]
        for target in targets:
            if target is not None:
                self._send(Unquiesce(core.term, core.self_id, target))


def _all_have_all(core: RaftCore, absent: tuple[ReplicaId, ...]) -> bool:
    """True when every member but the absent was heard lately and holds the whole log."""
    members = core.configuration.members
    return len({member.node_id for member in members}) == len(members) and all(
        progress.match_end == core.log_end
        and progress.state is ProgressState.REPLICATE
        and progress.is_promising
        and core.now - progress.last_heard_tick <= core.config.heartbeat_ticks + 1
        for member, progress in core.progress.items()
        if member not in absent
    )


@frozen(slots=True)
class _Record:
    group: RaftGroupId
    is_led_here: bool
    nodes: tuple[NodeId, ...]
    has_absent: bool
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
    """Of the allowed silence: it fell silent before while its connection stood."""

    def hears(self, now: int, incarnation: int, election_ticks: int) -> bool:
        """Note a beat; False when groups are quiescent by agreement with an earlier process."""
        self.heard_tick = now
        before, self.incarnation = self.incarnation, incarnation
        if before not in (None, incarnation):
            self.backoff = TimeoutBackoff()
            return not self.shared
        self.backoff.decay(now, DECAY_SILENCES * self.silence_max(election_ticks))
        return True

    def silence_max(self, election_ticks: int) -> int:
        """Ticks without a beat after which the node counts as silent."""
        return election_ticks << self.backoff.doublings

    def disagreed(self, quiescent: tuple[int, ...]) -> tuple[int, ...]:
        """Compare the groups that are quiescent there and here; returns the buckets that disagreed
        for long, as ones among zeros, or nothing."""
        counts = [
            count + 1 if theirs != ours else 0
            for count, theirs, ours in zip(self.mismatches, quiescent, self.led_there, strict=True)
        ]
        self.mismatches = [count % MISMATCHES_MAX for count in counts]
        found = tuple(int(count == MISMATCHES_MAX) for count in counts)
        return found if any(found) else ()


class QuiescentReplicas:
    """The quiescent replicas of a node, by their groups, and the nodes that share them."""

    def __init__(
        self,
        node_id: NodeId,
        incarnation: int,
        send: Callable[[NodeBeat], None],
        unquiesce: Callable[[RaftGroupId, NodeId | None], None],
        probe: Callable[[RaftGroupId], None],
    ) -> None:
        """Make it without replicas.

        Args:
            incarnation: differs from that of every earlier process of this node.
            send: sends a beat to another node.
            unquiesce: ends the quiescence of a replica, for the silence of a node or for None.
            probe: asks the absent members of a group whether they are back.
        """
        self._node_id = node_id
        self._incarnation = incarnation
        self._send = send
        self._unquiesce = unquiesce
        self._probe = probe
        self._records: dict[RaftGroupId, _Record] = {}
        self._peers: dict[NodeId, _Peer] = {}
        self._now = 0

    def __contains__(self, group: RaftGroupId) -> bool:
        return group in self._records

    def __len__(self) -> int:
        return len(self._records)

    def add(
        self,
        group: RaftGroupId,
        nodes: tuple[NodeId, ...],
        *,
        is_led_here: bool,
        has_absent: bool,
    ) -> None:
        """A replica quiesced, whose group these nodes share."""
        record = _Record(group, is_led_here, nodes, has_absent, _digest(group))
        self._records[group] = record
        for node_id in nodes:
            peer = self._peers.get(node_id)
            if peer is None:
                peer = self._peers[node_id] = _Peer(self._now)
            elif not peer.shared:
                peer.heard_tick, peer.incarnation = self._now, None
            peer.shared += 1
        self._mark(record)

    def remove(self, group: RaftGroupId) -> None:
        """A replica unquiesces or leaves; harmless when it was active."""
        record = self._records.pop(group, None)
        if record is None:
            return
        for node_id in record.nodes:
            self._peers[node_id].shared -= 1
        self._mark(record)

    def _mark(self, record: _Record) -> None:
        for node_id in record.nodes:
            peer = self._peers[node_id]
            digests = peer.led_here if record.is_led_here else peer.led_there
            digests[record.bucket] ^= record.digest

    def tick(self, heartbeat_ticks: int, election_ticks: int) -> None:
        """Send beats when they are due; unquiesce the groups shared with a silent node."""
        self._now += 1
        if not self._records:
            return
        is_due = self._now % heartbeat_ticks == 0
        if self._now % (PROBE_BEATS * heartbeat_ticks) == 0:
            for record in self._records.values():
                if record.has_absent:
                    self._probe(record.group)
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
        """Another node is alive, and says which of the groups that it leads are quiescent."""
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
            # The other node unquiesces too: a group that is quiescent there may be gone here.
            self._send(NodeBeat(self._node_id, beat.sender, CONFUSED, buckets))
            self.unquiesce_shared(beat.sender, silent=None, buckets=buckets)

    def unquiesce_shared(
        self, node_id: NodeId, *, silent: NodeId | None, buckets: tuple[int, ...] = ()
    ) -> None:
        """Unquiesce every group shared with that node, or those of some buckets."""
        records = [
            record
            for record in self._records.values()
            if node_id in record.nodes and (not buckets or buckets[record.bucket])
        ]
        for record in records:
            self._unquiesce(record.group, silent)


def _digest(group: RaftGroupId) -> int:
    """64 bits of a group's name, the same on every node; their XOR tells sets apart."""
    mixed = group.topic_id.int ^ (group.topic_id.int >> 64)
    mixed = (mixed + group.partition * 0x9E3779B97F4A7C15 + group.creation_epoch) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 31)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    return mixed ^ (mixed >> 29)
