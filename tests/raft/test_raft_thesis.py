"""The rules that Ongaro's thesis (Consensus: Bridging Theory and Practice) adds to the paper, one
test each: membership, transfer of leadership, check-quorum, pre-vote.
"""

from __future__ import annotations

import pytest

from raftmq.errors import KafkaError, NotLeaderError
from raftmq.raft.messages import (
    AppendReply,
    Entry,
    EntryKind,
    Heartbeat,
    HeartbeatReply,
    PreVoteReply,
    PreVoteRequest,
    Ready,
    Role,
    TimeoutNow,
    VoteReply,
    VoteRequest,
)
from raftmq.types import RaftIndex, Term
from tests.raft.network import configuration, entry, replica
from tests.raft.single import (
    FIVE,
    FOUR,
    ONE,
    THREE,
    TWO,
    accept,
    append,
    effects,
    leader,
    make,
)

# Membership (§6; thesis §4)


def test_a_configuration_is_in_force_from_its_append() -> None:
    """Thesis §4.1: a server uses the latest configuration in its log, committed or not."""
    core = make()
    members = configuration([1, 2, 3], [4])
    change = Entry(RaftIndex(0), RaftIndex(1), Term(1), EntryKind.MEMBERSHIP, members.encode())
    append(core, 0, 0, change, term=1)
    assert core.configuration == members
    append(core, 0, 0, entry(0, 2), term=2)
    assert core.configuration == configuration([1, 2, 3])


def test_one_change_at_a_time() -> None:
    """Thesis §4.1: and none before an entry of the leader's own term is committed (its fix)."""
    core = leader()
    for flushed_end in (1, 2):
        with pytest.raises(KafkaError, match="REASSIGNMENT_IN_PROGRESS"):
            core.propose_membership(core.configuration.with_learner(FIVE))
        accept(core, 2, flushed_end)
        if flushed_end == 1:
            core.propose_membership(core.configuration.with_learner(FOUR))
            effects(core)
    core.propose_membership(core.configuration.with_voter(FOUR))
    assert core.configuration == configuration([1, 2, 3, 4])


def test_learners_do_not_count() -> None:
    """Thesis §4.2.1: a non-voting server gets entries, and counts for neither votes nor commits."""
    core = leader(voters=3, learners=(4, 5))
    for number in (4, 5):
        accept(core, number, 1)
    assert core.commit_end == 0
    core = make(voters=3, learners=(4, 5))
    while core.role is Role.FOLLOWER:
        core.tick()
    for number in (4, 5):
        core.step(VoteReply(core.term, replica(number), ONE, True))
    assert core.role is Role.CANDIDATE
    assert [each.to for each in effects(core).send_after_flush] == [TWO, THREE]


def test_a_learner_does_not_stand() -> None:
    """Thesis §4.2.1: it is no voter, so nobody would count its own vote."""
    core = make()
    members = configuration([2, 3], [1])
    change = Entry(RaftIndex(0), RaftIndex(1), Term(1), EntryKind.MEMBERSHIP, members.encode())
    append(core, 0, 0, change, term=1, commit_end=1)
    for _ in range(50):
        core.tick()
    assert (core.role, core.term, core.leader) == (Role.FOLLOWER, 1, None)
    core.campaign()
    assert core.role is Role.FOLLOWER


def test_strangers_answers_do_not_count() -> None:
    """Thesis §4.1: majorities are of the configuration in force, nobody else."""
    core = leader()
    core.step(AppendReply(core.term, FIVE, ONE, True, RaftIndex(1)))
    core.step(HeartbeatReply(Term(9), FIVE, ONE, 0))
    assert (core.commit_end, core.term, core.role) == (0, 1, Role.LEADER)


def test_a_stranger_may_lead() -> None:
    """Thesis §4.1: requests are served whoever sends them; our configuration may be behind."""
    core = make()
    core.step(VoteRequest(Term(1), FIVE, ONE, Term(0), RaftIndex(0)))
    assert effects(core).send_after_flush == (VoteReply(Term(1), ONE, FIVE, True),)
    core.step(Heartbeat(Term(1), FIVE, ONE, RaftIndex(0), 1))
    assert core.leader == FIVE


def test_leases_keep_disturbers_away() -> None:
    """§6, thesis §4.2.3: who heard a leader within the least timeout ignores vote requests."""
    core = make(check_quorum=True)
    core.step(Heartbeat(Term(1), TWO, ONE, RaftIndex(0), 1))
    effects(core)
    request = VoteRequest(Term(9), THREE, ONE, Term(9), RaftIndex(9))
    core.step(request)
    assert (effects(core), core.term) == (Ready(), 1)
    for _ in range(10):
        core.tick()
    core.step(request)
    assert core.vote == THREE


# Thesis: transfer (§3.10), check-quorum (§6.2), pre-vote (§9.6)


def test_transfer_waits_until_the_target_has_everything() -> None:
    """Thesis §3.10: stop proposals, bring the target up to date, then TimeoutNow."""
    core = leader()
    core.propose(b"batch", 1)
    effects(core)
    core.transfer_leadership(TWO)
    assert core.transferee == TWO
    with pytest.raises(NotLeaderError):
        core.propose(b"batch", 1)
    assert TimeoutNow(Term(1), ONE, TWO) not in accept(core, 2, 1).send_now
    assert TimeoutNow(Term(1), ONE, TWO) in accept(core, 2, 2).send_now


def test_transfer_waits_until_what_was_proposed_is_committed() -> None:
    """Thesis §3.10 does not ask for it; but else whoever waits for an answer gets none."""
    core = leader()
    core.propose(b"batch", 1)
    core.ready()  # written, not flushed here yet
    core.transfer_leadership(TWO)
    core.step(AppendReply(core.term, TWO, ONE, True, RaftIndex(2)))
    ready = core.ready()
    assert ready is None or TimeoutNow(Term(1), ONE, TWO) not in ready.send_now
    core.advance(RaftIndex(2))
    assert core.commit_end == 2
    ready = core.ready()
    assert ready is not None
    assert TimeoutNow(Term(1), ONE, TWO) in ready.send_now


def test_timeout_now_starts_an_election_at_once() -> None:
    """Thesis §3.10: without a pre-vote, and marked so that leases do not stop it."""
    core = make(term=1, pre_vote=True, check_quorum=True)
    core.step(Heartbeat(Term(1), TWO, ONE, RaftIndex(0), 1))
    effects(core)
    core.step(TimeoutNow(Term(1), TWO, ONE))
    assert effects(core).send_after_flush == (
        VoteRequest(Term(2), ONE, TWO, Term(0), RaftIndex(0), True),
        VoteRequest(Term(2), ONE, THREE, Term(0), RaftIndex(0), True),
    )


def test_a_transfer_overrules_the_lease() -> None:
    """Thesis §3.10: the leader itself asked for the election."""
    core = make(term=1, check_quorum=True)
    core.step(Heartbeat(Term(1), TWO, ONE, RaftIndex(0), 1))
    core.step(VoteRequest(Term(2), THREE, ONE, Term(0), RaftIndex(0), True))
    assert core.vote == THREE


def test_a_leader_without_a_majority_steps_down() -> None:
    """Thesis §6.2: within the longest election timeout without answers from a majority."""
    core = make(check_quorum=True, voters=5)
    while core.role is Role.FOLLOWER:
        core.tick()
    for number in (2, 3):
        core.step(VoteReply(core.term, replica(number), ONE, True))
    for _ in range(40):
        core.step(HeartbeatReply(core.term, TWO, ONE, 0))
        core.step(HeartbeatReply(core.term, THREE, ONE, 0))
        core.tick()
    assert core.role is Role.LEADER
    for _ in range(18):
        core.step(HeartbeatReply(core.term, TWO, ONE, 0))
        core.tick()
    assert core.role is Role.LEADER, "its followers may still believe in it"
    for _ in range(4):
        core.step(HeartbeatReply(core.term, TWO, ONE, 0))
        core.tick()
    assert (core.role, core.leader, core.term) == (Role.FOLLOWER, None, 1)


def test_pre_vote_changes_nothing() -> None:
    """Thesis §9.6: a candidate asks first; neither side's term or vote moves."""
    core = make(term=3, pre_vote=True)
    while core.role is Role.FOLLOWER:
        core.tick()
    ready = effects(core)
    assert ready.hard_state is None
    assert ready.send_now == (
        PreVoteRequest(Term(4), ONE, TWO, Term(0), RaftIndex(0)),
        PreVoteRequest(Term(4), ONE, THREE, Term(0), RaftIndex(0)),
    )
    core.step(PreVoteRequest(Term(9), TWO, ONE, Term(0), RaftIndex(0)))
    assert effects(core).send_now == (PreVoteReply(Term(9), ONE, TWO, True),)
    assert (core.term, core.vote, core.role) == (3, None, Role.PRE_CANDIDATE)


@pytest.mark.parametrize(
    ("reply", "role", "term"),
    [
        (PreVoteReply(Term(4), TWO, ONE, True), Role.CANDIDATE, 4),
        (PreVoteReply(Term(3), TWO, ONE, False), Role.PRE_CANDIDATE, 3),
        (PreVoteReply(Term(3), TWO, ONE, True), Role.PRE_CANDIDATE, 3),
        (PreVoteReply(Term(7), TWO, ONE, True), Role.PRE_CANDIDATE, 3),
        (PreVoteReply(Term(7), TWO, ONE, False), Role.FOLLOWER, 7),
        (PreVoteReply(Term(4), FIVE, ONE, True), Role.PRE_CANDIDATE, 3),
    ],
    ids=["granted", "refused", "too early", "too late", "later term", "stranger"],
)
def test_pre_votes_are_counted(reply: PreVoteReply, role: Role, term: int) -> None:
    """Thesis §9.6: a majority of pre-votes for the next term starts the election."""
    core = make(term=3, pre_vote=True)
    while core.role is Role.FOLLOWER:
        core.tick()
    core.step(reply)
    assert (core.role, core.term) == (role, term)


@pytest.mark.parametrize(
    ("term", "last_term", "log_end", "granted"),
    [(2, 1, 1, False), (3, 1, 1, True), (3, 1, 0, False), (3, 0, 9, False)],
)
def test_pre_votes_are_granted_like_votes(
    term: int, last_term: int, log_end: int, granted: bool
) -> None:
    """Thesis §9.6: only for a later term, and a log that is up to date."""
    core = make([1], term=2, pre_vote=True)
    core.step(PreVoteRequest(Term(term), TWO, ONE, Term(last_term), RaftIndex(log_end)))
    reply = PreVoteReply(Term(term if granted else 2), ONE, TWO, granted)
    assert effects(core).send_now == (reply,)
