"""One replica's share of one Raft group: its state, and the verbs that move it.

Sans-IO: `tick` is time, `step` is the network, `propose` is a client, `advance` says what reached
the disk; `ready` hands out the effects these caused and promises nothing that is not durable yet
(see `messages.py`). The core keeps no entries.

Where to look: what a replica knows is `replica_state.py`; who may lead is `election.py`; what a
leader does is `leader.py`, a follower `follower.py`; who belongs to the group, and when a majority
has something, is `membership.py`.

Invariants: those of `replica_state.py`; `leadership` exists exactly while the role is LEADER.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from raftmq.errors import NotLeaderError, RemoteProtocolError
from raftmq.foreign import TERM_JUMP_MAX
from raftmq.ports import Buggify, Random, never
from raftmq.raft import follower
from raftmq.raft.election import Election
from raftmq.raft.epoch_history import EpochHistory
from raftmq.raft.leader import Leadership, election_payload
from raftmq.raft.membership import Configuration
from raftmq.raft.messages import (
    AppendReply,
    AppendRequest,
    Entry,
    EntryKind,
    HardState,
    Heartbeat,
    HeartbeatReply,
    InstallLogStart,
    Message,
    PreVoteReply,
    PreVoteRequest,
    Ready,
    Role,
    SoftState,
    TimeoutNow,
    VoteReply,
    VoteRequest,
)
from raftmq.raft.progress import Progress
from raftmq.raft.replica_state import EntrySource, RaftConfig, ReplicaState
from raftmq.types import Buffer, RaftIndex, ReplicaId, Term


class RaftCore(ReplicaState):
    """The state machine of Raft for one replica of one group."""

    def __init__(
        self,
        config: RaftConfig,
        *,
        hard_state: HardState,
        epochs: EpochHistory,
        configuration: Configuration,
        configuration_history: Sequence[tuple[RaftIndex, Configuration]] = (),
        flushed_end: RaftIndex,
        commit_end: RaftIndex,
        source: EntrySource,
        random: Random,
        buggify: Buggify = never,
    ) -> None:
        """Take over what recovery found, as `ReplicaState` does; `random` draws timeouts."""
        super().__init__(
            config,
            hard_state=hard_state,
            epochs=epochs,
            configuration=configuration,
            configuration_history=configuration_history,
            flushed_end=flushed_end,
            commit_end=commit_end,
            source=source,
            buggify=buggify,
        )
        self.leadership: Leadership | None = None
        self._durable_from = hard_state  # what the engine was last told to keep
        self._soft_state = SoftState(self.role, self.term, None)
        self._told_commit_end = commit_end
        self.election: Final = Election(self, random)
        self._handlers: Final = self._handlers_by_type()

    def _handlers_by_type(self) -> dict[type, Callable[[Any], None]]:
        return {
            VoteRequest: self.election.on_vote_request,
            VoteReply: self.election.on_vote_reply,
            PreVoteReply: self.election.on_pre_vote_reply,
            TimeoutNow: self.election.on_timeout_now,
            AppendRequest: self._on_append_request,
            Heartbeat: self._on_heartbeat,
            InstallLogStart: self._on_install_log_start,
            AppendReply: self._on_append_reply,
            HeartbeatReply: self._on_heartbeat_reply,
        }

    def retire(self) -> None:
        """Take no more messages, and break the reference cycles of a group that ended."""
        self.role, self.leadership = Role.FOLLOWER, None
        self._handlers.clear()
        self.election.retire()
        del self.source

    # State that others may read.

    @property
    def is_leader(self) -> bool:
        """True while this replica leads its term, as far as it knows."""
        return self.leadership is not None

    @property
    def is_term_absurd(self) -> bool:
        """True when the term is so far above the log that no election can have led there.

        No other replica adopts it, so this one stays alone in it; `recover --reset-term` sets it
        back.
        """
        return self.term - self.epochs.last_term > TERM_JUMP_MAX

    @property
    def term_start(self) -> RaftIndex | None:
        """Where the leader's own election entry starts; None when not leading."""
        return None if self.leadership is None else self.leadership.term_start

    @property
    def has_committed_own_term(self) -> bool:
        """True when a leader's commit_end is exact: its own election entry is committed (§8)."""
        return self.leadership is not None and self.leadership.has_committed_own_term

    @property
    def progress(self) -> Mapping[ReplicaId, Progress]:
        """What a leader knows of the other replicas; empty when not leading."""
        return {} if self.leadership is None else self.leadership.progress

    @property
    def transferee(self) -> ReplicaId | None:
        """The replica that leadership is being handed to."""
        return None if self.leadership is None else self.leadership.transferee

    # The verbs.

    def tick(self) -> None:
        """Let one unit of time pass."""
        self.now += 1
        if self.leadership is not None:
            self.leadership.tick()
        else:
            self.election.tick()

    @property
    def wants_ready(self) -> bool:
        """False when a tick surely left `ready` nothing to do: at a follower that waits, or a
        leader between its heartbeats."""
        if self.leadership is not None:
            return self.leadership.is_due
        return self.role is not Role.FOLLOWER or self._soft_state.leader != self.leader

    def answer(self, heartbeat: Heartbeat) -> HeartbeatReply | None:
        """The reply to a heartbeat of the known leader with nothing new in it; None: `step` it.

        Most messages of thousands of groups are such, so it must cost no round of effects.
        """
        if (
            heartbeat.term != self.term
            or self.role is not Role.FOLLOWER
            or self.leader != heartbeat.sender
            or heartbeat.to != self.self_id
            or min(heartbeat.commit_end, self.matched_end) > self.commit_end
        ):
            return None
        self.election.hear_leader(heartbeat.sender)
        return follower.heartbeat_reply(self, heartbeat)

    def takes_quietly(self, reply: HeartbeatReply) -> bool:
        """Note the reply of a follower that has everything; False: `step` it.

        True means that nothing is to be sent or reported.
        """
        if self.leadership is None or reply.term != self.term or reply.to != self.self_id:
            return False
        return self.leadership.takes_quietly(reply)

    def step(self, message: Message) -> None:
        """Advance the group by one message; never blocks, never performs I/O.

        Raises:
            RemoteProtocolError: no correct replica sends this. It changed no more than any message
                may: the term, and when the leader was last heard.
        """
        if message.to != self.self_id:
            return  # for an earlier life of this node, with another storage
        kind = type(message)
        if kind is PreVoteRequest:
            assert isinstance(message, PreVoteRequest)
            self.election.on_pre_vote_request(message)  # changes nothing here, so no term to adopt
            return
        if kind in _REPLIES and message.sender not in self.configurations.current.members:
            return
        if message.term != self.term:
            if message.term < self.term:
                self._refuse_stale(message)
                return
            if kind is PreVoteReply and message.granted:  # type: ignore[union-attr]
                self.election.on_pre_vote_reply(message)  # type: ignore[arg-type]
                return
            if self.election.must_ignore(message):
                return
            if message.term - self.term > TERM_JUMP_MAX:
                raise RemoteProtocolError(
                    f"{message.sender} claims term {message.term}, this replica is at {self.term}"
                )
            self.become_follower(message.term, None)
        elif kind in _FROM_LEADER and self.leader not in (None, message.sender):
            raise RemoteProtocolError(
                f"{message.sender} claims to lead term {self.term}, which {self.leader} leads"
            )
        assert message.term == self.term or kind is PreVoteReply
        self._handlers[kind](message)

    def propose(self, payload: Buffer, width: int, kind: EntryKind = EntryKind.BATCH) -> Entry:
        """Append an entry of `width` positions to the group's log.

        Raises:
            NotLeaderError: not leading, or handing leadership over.
        """
        leadership = self._leading()
        if leadership.transferee is not None:
            raise NotLeaderError("leadership is being handed over")
        assert kind is EntryKind.BATCH or width == 1, "a bare entry takes one position"
        assert kind is not EntryKind.MEMBERSHIP, "propose_membership checks what this does not"
        return self.append_own(payload, width, kind)

    def propose_membership(self, configuration: Configuration) -> Entry:
        """Append a configuration that differs by at most one voter; it is in force at once.

        Raises:
            NotLeaderError: not leading, or handing leadership over.
            KafkaError: REASSIGNMENT_IN_PROGRESS while another is uncommitted or nothing of the own
                term is committed yet; INVALID_REPLICA_ASSIGNMENT for a step that is not allowed.
        """
        leadership = self._leading()
        if leadership.transferee is not None:
            raise NotLeaderError("leadership is being handed over")
        leadership.check_membership_change(configuration)
        entry = self.append_own(configuration.encode(), 1, EntryKind.MEMBERSHIP)
        self.configurations.append(entry.start, configuration)
        leadership.configuration_changed()
        return entry

    def transfer_leadership(self, to: ReplicaId) -> None:
        """Hand leadership to voter `to`; proposals are refused until that is done or timed out.

        Raises:
            NotLeaderError: not leading.
            KafkaError: INELIGIBLE_REPLICA when `to` is no other voter.
        """
        self._leading().start_transfer(to)

    def abort_transfer(self) -> None:
        """Take proposals again. The target may win all the same, if it was already asked to."""
        if self.leadership is not None:
            self.leadership.transferee = None

    def read_index(self) -> tuple[int, RaftIndex] | None:
        """Begin a linearizable read (Raft §8): (heartbeat round, commit_end to read up to).

        None: not leading, or nothing of the own term is committed yet.
        """
        return None if self.leadership is None else self.leadership.read_index()

    def read_confirmed(self, round: int) -> bool:
        """True once a majority answered `round`, so this replica still led when it was asked."""
        return self.leadership is not None and self.leadership.is_confirmed(round)

    def campaign(self) -> None:
        """Stop believing in the leader, whose connection closed, and stand for election soon."""
        if self.leadership is None:
            self.election.leader_lost()

    def stand(self) -> None:
        """Stand for election now where no leader is known; ask again where it was asked before."""
        if self.leadership is None:
            self.election.stand_at_once()

    def ready(self) -> Ready | None:
        """Take the effects gathered since the last call."""
        if self.leadership is not None:
            self.leadership.send()
        hard_state = soft_state = commit_end = None
        durable = self._durable_from
        if durable.term != self.term or durable.vote != self.vote:
            hard_state = self._durable_from = HardState(self.term, self.vote)
        soft = self._soft_state
        if soft.role is not self.role or soft.leader != self.leader or soft.term != self.term:
            soft_state = self._soft_state = SoftState(self.role, self.term, self.leader)
        if self.commit_end != self._told_commit_end:
            commit_end = self._told_commit_end = self.commit_end
        return self.effects.take(hard_state, soft_state, commit_end)

    def advance(self, flushed_end: RaftIndex) -> None:
        """The engine's log is flushed up to `flushed_end`; only now does a leader count itself."""
        assert flushed_end <= self.log_end, "flushed beyond the log"
        if flushed_end > self.flushed_end:
            self.flushed_end = flushed_end
            if self.leadership is not None:
                self.leadership.commit_if_possible()

    def log_start_moved(self, log_start: RaftIndex, previous_term: Term) -> None:
        """The engine dropped the log below `log_start`, which is committed."""
        assert log_start <= self.commit_end, "only a committed prefix may go"
        self.epochs.move_start(log_start, previous_term)
        self.configurations.move_start(log_start)

    # Between the roles.

    def become_follower(self, term: Term, leader: ReplicaId | None) -> None:
        """Follow `leader`, None while it is not known; a later term forgets the vote (§5.1)."""
        assert term >= self.term, "terms never fall"
        if term > self.term:
            self._enter_term(term, None)
        self.role = Role.FOLLOWER
        self.leader = leader
        self.leadership = None
        self.election.reset()

    def become_candidate(self, *, is_real: bool) -> None:
        """Stand for election; only a real candidate, not a pre-candidate, enters the next term."""
        assert self.can_campaign
        assert self.leadership is None
        if is_real:
            self._enter_term(Term(self.term + 1), self.self_id)
        self.role = Role.CANDIDATE if is_real else Role.PRE_CANDIDATE
        self.leader = None

    def become_leader(self) -> None:
        """Lead this term; its first entry says so and lets older ones be committed (§8)."""
        assert self.role is Role.CANDIDATE
        assert self.vote == self.self_id
        self.role = Role.LEADER
        self.leader = self.self_id
        self.leadership = Leadership(self, self.election, self.epochs.log_end)
        self.append_own(election_payload(self.self_id), 1, EntryKind.ELECTION)

    def set_commit_end(self, commit_end: RaftIndex) -> None:
        """Note that all below `commit_end` is on a majority."""
        assert self.commit_end < commit_end <= self.log_end
        was_settled = self.configurations.is_committed(self.commit_end)
        self.commit_end = commit_end
        if was_settled or not self.configurations.is_committed(commit_end):
            return
        if self.leadership is not None:
            self.leadership.configuration_committed()

    def _enter_term(self, term: Term, vote: ReplicaId | None) -> None:
        self.term = term
        self.vote = vote
        self.matched_end = self.commit_end

    def _leading(self) -> Leadership:
        if self.leadership is None:
            raise NotLeaderError
        return self.leadership

    def _refuse_stale(self, message: Message) -> None:
        """Answer a sender of an earlier term, so that it learns of ours (§5.1).

        By the time it arrives its receiver may lead our term, so it must hold nothing that is not
        true of that term: no round, since it confirms none, and no refusal of a position.
        """
        reply: Message
        if isinstance(message, AppendRequest | Heartbeat | InstallLogStart):
            reply = HeartbeatReply(self.term, self.self_id, message.sender, 0, self.matched_end)
        elif isinstance(message, VoteRequest):
            reply = VoteReply(self.term, self.self_id, message.sender, False)
        else:
            return
        self.effects.send_now.append(reply)

    def _on_append_request(self, request: AppendRequest) -> None:
        self.election.hear_leader(request.sender)
        follower.on_append_request(self, request)

    def _on_heartbeat(self, heartbeat: Heartbeat) -> None:
        self.election.hear_leader(heartbeat.sender)
        follower.on_heartbeat(self, heartbeat)

    def _on_install_log_start(self, install: InstallLogStart) -> None:
        self.election.hear_leader(install.sender)
        follower.on_install_log_start(self, install)

    def _on_append_reply(self, reply: AppendReply) -> None:
        if self.leadership is not None:
            self.leadership.on_append_reply(reply)

    def _on_heartbeat_reply(self, reply: HeartbeatReply) -> None:
        if self.leadership is not None:
            self.leadership.on_heartbeat_reply(reply)


_FROM_LEADER: Final = frozenset({AppendRequest, Heartbeat, InstallLogStart})
_REPLIES: Final = frozenset({PreVoteReply, VoteReply, AppendReply, HeartbeatReply})
