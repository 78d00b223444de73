"""Elections: timeouts, pre-votes, votes, and the refusal of both while a leader is live.

Pre-vote (Raft thesis §9.6): a replica asks whether it could win before it enters a new term, so
that one that hears nothing, or was removed, never raises the term of others. Lease refusal
(§4.2.3): a replica that heard a leader within the least election timeout grants nothing, unless
that leader hands over.

Timeout backoff: where messages take longer than a timeout (a busy machine, hundreds of groups that
elect at once) replicas would depose leaders that live and give up elections that are under way, and
each new election would make it worse, without end. So a replica that loses time that way doubles
its timeouts, up to three times, and halves them again while a leader stays. A replica whose node is
known to be late (`timeout_doublings_floor`) does so before it loses anything. A leader that is gone
with its node is noticed by its closed connection (`leader_lost`), whatever the backoff.

Only voters are asked, and only their votes count, both by the candidate's configuration alone
(thesis §4.1). So a replica that believes itself a learner does answer: the candidate holds a log
that promoted it, and without its vote a group could stay without a leader.
"""

from __future__ import annotations

from typing import Final

from raftmq.ports import Random
from raftmq.raft.membership import VoteOutcome, vote_outcome
from raftmq.raft.messages import (
    PreVoteReply,
    PreVoteRequest,
    Role,
    TimeoutNow,
    VoteReply,
    VoteRequest,
)
from raftmq.raft.replica_state import ReplicaState
from raftmq.types import RaftIndex, ReplicaId, Term

TIMEOUT_DOUBLINGS_MAX: Final = 3
"""Timeouts are doubled so many times at most."""
DECAY_TIMEOUTS: Final = 8
"""After so many of the least timeouts under one leader they are halved."""


def is_up_to_date(
    their_term: Term, their_end: RaftIndex, our_term: Term, our_end: RaftIndex
) -> bool:
    """True when their log is at least as up to date as ours (Raft §5.4.1)."""
    return (their_term, their_end) >= (our_term, our_end)


class Election:
    """The election timer and the votes of one replica. Times are ticks of `core.now`."""

    __slots__ = (
        "_core",
        "_deadline",
        "_heard_at",
        "_random",
        "_steady_since",
        "_timeout",
        "timeout_doublings",
        "votes",
    )

    def __init__(self, core: ReplicaState, random: Random) -> None:
        self._core = core
        self._random = random
        self.votes: dict[ReplicaId, bool] = {}
        self.timeout_doublings = 0
        self.reset()

    def retire(self) -> None:
        """Drop the reference to the core, which ended."""
        del self._core

    @property
    def least_timeout(self) -> int:
        """After a shorter silence, in ticks, no leader is given up."""
        core = self._core
        return core.config.election_ticks << max(
            self.timeout_doublings, core.timeout_doublings_floor
        )

    def reset(self) -> None:
        """Draw a new timeout and begin to wait; priority draws from a shorter range, one that
        stands last from a later one."""
        core, least = self._core, self.least_timeout
        spread = max(1, least >> max(0, core.config.priority))
        self._timeout = least + self._random.randrange(0, spread)
        if core.stands_last:
            self._timeout += least
        self._heard_at = self._steady_since = core.now
        self._deadline = core.now + self._timeout

    def lose_time(self) -> None:
        """A leader fell silent whose connection stands, a majority fell silent to this leader, or
        votes that were promised did not come in time: the others may be slow, and not gone."""
        self.timeout_doublings = min(self.timeout_doublings + 1, TIMEOUT_DOUBLINGS_MAX)

    def decay_backoff(self) -> None:
        """While a leader stays, halve the timeouts again after a while."""
        if self.timeout_doublings and self._core.now - self._steady_since >= self._decay_ticks:
            self.timeout_doublings -= 1
            self.reset()

    @property
    def _decay_ticks(self) -> int:
        return DECAY_TIMEOUTS * self.least_timeout

    def hear_leader(self, leader: ReplicaId) -> None:
        """A message of this term's leader arrived."""
        core = self._core
        if core.role is not Role.FOLLOWER or core.leader is None:
            assert core.role is not Role.LEADER, "two leaders in one term"
            core.become_follower(core.term, leader)
            return
        assert core.leader == leader, "two leaders in one term"
        if self.timeout_doublings:
            self.decay_backoff()
        self._heard_at = core.now
        self._deadline = core.now + self._timeout

    @property
    def is_in_lease(self) -> bool:
        """True while there is no reason to believe that the leader is gone (thesis §4.2.3)."""
        core = self._core
        if not core.config.check_quorum or core.leader is None:
            return False
        return core.role is Role.LEADER or core.now - self._heard_at < self.least_timeout

    def must_ignore(self, message: object) -> bool:
        """True for a vote request that would only disturb a live leader."""
        return isinstance(message, VoteRequest) and not message.is_transfer and self.is_in_lease

    def tick(self) -> None:
        """Stand for election when the leader was silent for a timeout; a group of one at once."""
        core = self._core
        if core.now < self._deadline and not (core.leader is None and core.is_sole_voter):
            return
        if core.leader is not None and core.now - self._heard_at < self.least_timeout:
            return  # the least timeout was doubled after this one was drawn
        if core.waits_for_turn and core.role is Role.FOLLOWER:
            return
        if core.leader is not None or (core.role is Role.CANDIDATE and core.config.pre_vote):
            self.lose_time()
        if core.can_campaign and not core.waits_for_turn:
            self._stand()
        else:
            core.become_follower(core.term, None)  # also so that another group may try

    def leader_lost(self) -> None:
        """The leader's connection closed: do not wait for the timeout.

        All followers notice at the same moment. So that they do not split the vote, one of them,
        another one in each term, stands at once, and the next ones each two ticks later; those
        that stand last after all of them.
        """
        core = self._core
        lost, core.leader = core.leader, None
        if core.role is not Role.FOLLOWER or not core.can_campaign:
            return
        if lost is None:
            self._stand()
            return
        rest = [voter for voter in core.configuration.voters if voter != lost]
        if core.self_id not in rest:
            rest.append(core.self_id)
        rank = (rest.index(core.self_id) + core.term) % len(rest)
        if core.stands_last:
            rank += len(rest)
        if rank == 0:
            self._stand()
        else:
            self._deadline = min(self._deadline, core.now + 2 * rank)

    def stand_at_once(self) -> None:
        """Ask for pre-votes, also again: voters asked before may not have had the group yet, and
        would otherwise be asked again only after a timeout."""
        core = self._core
        if (
            core.leader is None
            and core.role in (Role.FOLLOWER, Role.PRE_CANDIDATE)
            and core.can_campaign
        ):
            self._stand()

    def on_pre_vote_request(self, request: PreVoteRequest) -> None:
        """Say whether we would vote for the sender; changes nothing here."""
        core = self._core
        granted = (
            request.term > core.term
            and not self.is_in_lease
            and self._may_grant(request.last_term, request.log_end)
        )
        term = request.term if granted else core.term
        core.effects.send_now.append(PreVoteReply(term, core.self_id, request.sender, granted))

    def on_pre_vote_reply(self, reply: PreVoteReply) -> None:
        """Count a pre-vote; with a majority of them, become a candidate."""
        core = self._core
        if core.role is not Role.PRE_CANDIDATE:
            return
        if reply.granted and reply.term != core.term + 1:
            return  # for an attempt in an earlier term
        self._count(reply.sender, reply.granted)

    def on_vote_request(self, request: VoteRequest) -> None:
        """Vote once per term, for a log with all we may have helped to commit (§5.2, §5.4.1)."""
        core = self._core
        granted = (
            core.leader is None
            and (core.vote is None or core.vote == request.sender)
            and self._may_grant(request.last_term, request.log_end)
        )
        reply = VoteReply(core.term, core.self_id, request.sender, granted)
        if not granted:
            core.effects.send_now.append(reply)
            return
        if core.vote is None:
            core.vote = request.sender
        core.become_follower(core.term, None)
        core.effects.send_after_flush.append(reply)

    def on_vote_reply(self, reply: VoteReply) -> None:
        """Count a vote; with a majority of them, lead."""
        if self._core.role is Role.CANDIDATE:
            self._count(reply.sender, reply.granted)

    def on_timeout_now(self, message: TimeoutNow) -> None:
        """The leader hands over: stand at once, without a pre-vote (thesis §3.10)."""
        core = self._core
        if core.role is Role.FOLLOWER and core.leader == message.sender and core.can_campaign:
            self._begin(is_real=True, is_transfer=True)

    def _may_grant(self, last_term: Term, log_end: RaftIndex) -> bool:
        core = self._core
        floor = core.claimed_end_floor
        if core.log_end < floor and not is_up_to_date(
            last_term, log_end, core.claimed_term_floor, floor
        ):
            return False
        return is_up_to_date(last_term, log_end, core.epochs.last_term, core.log_end)

    def _stand(self) -> None:
        core = self._core
        self._begin(is_real=not core.config.pre_vote or core.is_sole_voter, is_transfer=False)

    def _begin(self, *, is_real: bool, is_transfer: bool) -> None:
        core = self._core
        core.become_candidate(is_real=is_real)
        self.reset()
        self.votes.clear()
        self_id, last_term, log_end = core.self_id, core.epochs.last_term, core.log_end
        for voter in core.configuration.voters:
            if voter == self_id:
                continue
            if is_real:
                # After the flush: our own vote is counted below and must not be forgotten.
                core.effects.send_after_flush.append(
                    VoteRequest(core.term, self_id, voter, last_term, log_end, is_transfer)
                )
            else:
                core.effects.send_now.append(
                    PreVoteRequest(Term(core.term + 1), self_id, voter, last_term, log_end)
                )
        self._count(self_id, granted=True)

    def _count(self, voter: ReplicaId, granted: bool) -> None:
        core = self._core
        self.votes[voter] = granted
        outcome = vote_outcome(core.configuration.voters, self.votes)
        if outcome is VoteOutcome.LOST:
            core.become_follower(core.term, None)
        elif outcome is VoteOutcome.WON and core.role is Role.CANDIDATE:
            core.become_leader()
        elif outcome is VoteOutcome.WON:
            self._begin(is_real=True, is_transfer=False)
