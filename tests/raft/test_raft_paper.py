"""The rules of the Raft paper (Ongaro, Ousterhout: In Search of an Understandable Consensus
Algorithm, extended version) and of Ongaro's thesis, one test each, in the paper's order.

Each looks at a single core: what it is told, and what it wants done.
"""

from __future__ import annotations

from random import Random

import pytest

from raftmq.errors import KafkaError, NotLeaderError
from raftmq.raft.core import RaftConfig, RaftCore
from raftmq.raft.epochs import EpochHistory
from raftmq.raft.membership import Configuration
from raftmq.raft.messages import (
    AppendReply,
    AppendRequest,
    Entry,
    EntryKind,
    Heartbeat,
    HeartbeatReply,
    InstallLogStart,
    PreVoteReply,
    PreVoteRequest,
    TimeoutNow,
    VoteReply,
    VoteRequest,
)
from raftmq.raft.ready import HardState, Ready, Role
from raftmq.types import RaftIndex, ReplicaId, Term
from tests.raft.network import Disk, configuration, entries_of, entry, epochs_of, replica

ONE, TWO, THREE, FOUR, FIVE = (replica(number) for number in range(1, 6))


class Source:
    """Entries below the ones at hand, for followers that lag."""

    def __init__(self, entries: list[Entry]) -> None:
        self.log = entries

    def entries(self, start: RaftIndex, _bytes_max: int) -> tuple[Entry, ...]:
        return tuple(each for each in self.log if each.start >= start)

    def log_start_payload(self) -> bytes:
        return b"log start"


def make(
    terms: list[int] | None = None,
    *,
    voters: int = 3,
    learners: tuple[int, ...] = (),
    term: int = 0,
    commit_end: int = 0,
    pre_vote: bool = False,
    check_quorum: bool = False,
) -> RaftCore:
    """Node 1 of a group, with a log of one position per term, flushed."""
    entries = entries_of(terms or [])
    disk = Disk(entries)
    return RaftCore(
        RaftConfig(ONE, pre_vote=pre_vote, check_quorum=check_quorum),
        hard_state=HardState(Term(max([term, *(terms or [])]))),
        epochs=epochs_of(disk),
        configuration=configuration(range(1, voters + 1), learners),
        flushed_end=disk.log_end,
        commit_end=RaftIndex(commit_end),
        source=Source(entries),
        random=Random(1),
    )


def effects(core: RaftCore) -> Ready:
    """What it wants done; everything written is flushed at once."""
    ready = core.ready() or Ready()
    assert isinstance(core.source, Source)
    if ready.truncate_end is not None:
        core.source.log = [each for each in core.source.log if each.end <= ready.truncate_end]
    core.source.log += ready.append
    core.advance(core.log_end)
    return ready


def leader(
    terms: list[int] | None = None,
    *,
    voters: int = 3,
    learners: tuple[int, ...] = (),
    term: int = 0,
) -> RaftCore:
    """A leader of the next term whose election entry is appended and flushed."""
    core = make(terms, voters=voters, learners=learners, term=term)
    for _ in range(20):
        core.tick()
        if core.role is not Role.FOLLOWER:
            break
    for voter in core.configuration.voters:
        if core.role is Role.CANDIDATE:
            core.step(VoteReply(core.term, voter, ONE, True))
    assert core.role is Role.LEADER
    effects(core)
    return core


def append(
    core: RaftCore, prev_end: int, prev_term: int, *entries: Entry, term: int, commit_end: int = 0
) -> Ready:
    """Node 2, leader of `term`, sends entries."""
    core.step(
        AppendRequest(
            Term(term),
            TWO,
            ONE,
            RaftIndex(prev_end),
            Term(prev_term),
            RaftIndex(commit_end),
            entries,
        )
    )
    return effects(core)


def accept(core: RaftCore, sender: int, flushed_end: int) -> Ready:
    """Node `sender` has flushed so much."""
    core.step(AppendReply(core.term, replica(sender), ONE, True, RaftIndex(flushed_end)))
    return effects(core)


# Terms (§5.1)


@pytest.mark.parametrize("role", [Role.FOLLOWER, Role.CANDIDATE, Role.LEADER])
def test_a_later_term_makes_everybody_a_follower(role: Role) -> None:
    """§5.1: a server that sees a larger term takes it and reverts to follower."""
    core = leader() if role is Role.LEADER else make()
    while core.role is not role:
        core.tick()
    effects(core)
    append(core, 0, 0, term=7)
    assert (core.term, core.role, core.leader) == (7, Role.FOLLOWER, TWO)


def test_a_later_term_in_a_reply_ends_leadership() -> None:
    """§5.1: also when it comes in an answer."""
    core = leader()
    core.step(HeartbeatReply(Term(5), TWO, ONE, 0))
    assert (core.term, core.role, core.leader) == (5, Role.FOLLOWER, None)
    assert effects(core).hard_state == HardState(Term(5))


def test_messages_of_earlier_terms_are_refused() -> None:
    """§5.1: a request with a stale term is rejected, and its sender told of ours."""
    core = make(term=3)
    assert append(core, 0, 0, entry(0, 2), term=2).send_now == (
        HeartbeatReply(Term(3), ONE, TWO, 0),
    )
    assert core.log_end == 0
    core.step(VoteRequest(Term(2), TWO, ONE, Term(9), RaftIndex(9)))
    assert effects(core).send_now == (VoteReply(Term(3), ONE, TWO, False),)
    core.step(VoteReply(Term(2), TWO, ONE, True))
    core.step(TimeoutNow(Term(2), TWO, ONE))
    assert effects(core) == Ready()


# Elections (§5.2)


def test_starts_as_a_follower() -> None:
    """§5.2: when servers start up, they begin as followers."""
    core = make(term=3)
    assert (core.role, core.leader, core.term) == (Role.FOLLOWER, None, 3)


def test_leader_sends_heartbeats() -> None:
    """§5.2: a leader sends heartbeats to all, to keep its authority."""
    core = leader()
    core.tick()
    assert effects(core) == Ready()
    core.tick()
    beats = effects(core).send_now
    assert [type(beat) for beat in beats] == [Heartbeat, Heartbeat]
    assert [beat.to for beat in beats] == [TWO, THREE]


def test_a_heartbeat_keeps_a_follower_from_standing() -> None:
    """§5.2: a follower remains one as long as it hears from a leader."""
    core = make()
    for _ in range(50):
        core.step(Heartbeat(Term(1), TWO, ONE, RaftIndex(0), 1))
        for _ in range(9):
            core.tick()
    assert core.role is Role.FOLLOWER


def test_silence_starts_an_election() -> None:
    """§5.2: it increments its term, votes for itself and asks the others."""
    core = make(term=1)
    for _ in range(9):
        core.tick()
    assert effects(core) == Ready()  # never before the least election timeout
    for _ in range(10):
        core.tick()
    ready = effects(core)
    assert ready.hard_state == HardState(Term(2), ONE)
    assert ready.send_now == ()
    assert ready.send_after_flush == (
        VoteRequest(Term(2), ONE, TWO, Term(0), RaftIndex(0)),
        VoteRequest(Term(2), ONE, THREE, Term(0), RaftIndex(0)),
    )


@pytest.mark.parametrize(
    ("voters", "answers", "role"),
    [
        (1, {}, Role.LEADER),
        (3, {2: True}, Role.LEADER),
        (3, {2: True, 3: True}, Role.LEADER),
        (3, {2: False}, Role.CANDIDATE),
        (3, {2: False, 3: False}, Role.FOLLOWER),
        (4, {2: True}, Role.CANDIDATE),
        (4, {2: True, 3: True}, Role.LEADER),
        (4, {2: False, 3: False}, Role.FOLLOWER),
        (5, {2: True}, Role.CANDIDATE),
        (5, {2: True, 3: False, 4: True}, Role.LEADER),
        (5, {2: False, 3: False, 4: False}, Role.FOLLOWER),
        (5, {}, Role.CANDIDATE),
    ],
)
def test_a_majority_of_votes_elects(voters: int, answers: dict[int, bool], role: Role) -> None:
    """§5.2: a candidate wins with votes from a majority, and is lost once none is possible."""
    core = make(voters=voters)
    while core.role is Role.FOLLOWER:
        core.tick()
    for number, granted in answers.items():
        core.step(VoteReply(core.term, replica(number), ONE, granted))
    assert core.role is role
    assert core.term == 1


def test_a_vote_counts_once() -> None:
    """§5.2: a majority of servers, not of answers."""
    core = make(voters=5)
    while core.role is Role.FOLLOWER:
        core.tick()
    for _ in range(5):
        core.step(VoteReply(core.term, TWO, ONE, True))
    assert core.role is Role.CANDIDATE


@pytest.mark.parametrize(
    ("vote", "asking", "granted"),
    [(None, TWO, True), (None, THREE, True), (TWO, TWO, True), (TWO, THREE, False)],
)
def test_first_come_first_served(vote: ReplicaId | None, asking: ReplicaId, granted: bool) -> None:
    """§5.2: each server votes for at most one candidate in a term."""
    core = make(term=1)
    if vote is not None:
        core.step(VoteRequest(Term(1), vote, ONE, Term(0), RaftIndex(0)))
        effects(core)
    core.step(VoteRequest(Term(1), asking, ONE, Term(0), RaftIndex(0)))
    ready = effects(core)
    reply = VoteReply(Term(1), ONE, asking, granted)
    # A vote is a promise and waits for the disk; a refusal promises nothing.
    assert ready.send_after_flush == ((reply,) if granted else ())
    assert ready.send_now == (() if granted else (reply,))


def test_a_vote_is_written_before_it_leaves() -> None:
    """§5.2, figure 2: votedFor is persistent, updated before responding."""
    core = make(term=1)
    core.step(VoteRequest(Term(4), THREE, ONE, Term(0), RaftIndex(0)))
    ready = effects(core)
    assert ready.hard_state == HardState(Term(4), THREE)
    assert ready.send_after_flush == (VoteReply(Term(4), ONE, THREE, True),)


def test_a_candidate_yields_to_the_leader_of_its_term() -> None:
    """§5.2: an AppendEntries of a leader whose term is at least its own makes it a follower."""
    core = make()
    while core.role is Role.FOLLOWER:
        core.tick()
    core.step(Heartbeat(core.term, TWO, ONE, RaftIndex(0), 1))
    assert (core.role, core.leader, core.vote) == (Role.FOLLOWER, TWO, ONE)


def test_election_timeouts_are_random() -> None:
    """§5.2: timeouts are drawn anew from a fixed interval, so that split votes are rare."""
    seen: dict[int, bool] = {}
    core = make(voters=2)
    for _ in range(300):
        ticks, term = 0, core.term
        while core.term == term:
            core.tick()
            ticks += 1
        seen[ticks] = True
    assert sorted(seen) == list(range(10, 20))


# Replication (§5.3)


def test_a_proposal_is_appended_and_sent() -> None:
    """§5.3: the leader appends the command to its log and sends it to the others in parallel."""
    core = leader()
    accept(core, 2, 1)
    accept(core, 3, 1)
    proposed = core.propose(b"batch", 5)
    assert proposed == Entry(RaftIndex(1), RaftIndex(6), Term(1), EntryKind.BATCH, b"batch")
    ready = effects(core)
    assert ready.append == (proposed,)
    assert [message.to for message in ready.send_now] == [TWO, THREE]
    for message in ready.send_now:
        assert isinstance(message, AppendRequest)
        assert (message.prev_end, message.prev_term) == (1, 1)
        assert message.entries == (proposed,)


def test_only_a_leader_takes_proposals() -> None:
    """§5.3: clients' commands go to the leader."""
    core = make()
    with pytest.raises(NotLeaderError):
        core.propose(b"batch", 1)
    with pytest.raises(NotLeaderError):
        core.propose_membership(Configuration((ONE,)))


@pytest.mark.parametrize(
    ("voters", "holders", "is_committed"),
    [
        (1, [], True),
        (3, [], False),
        (3, [2], True),
        (3, [2, 3], True),
        (4, [2], False),
        (4, [2, 3], True),
        (5, [2], False),
        (5, [2, 3], True),
        (5, [2, 3, 4, 5], True),
    ],
)
def test_a_majority_commits(voters: int, holders: list[int], is_committed: bool) -> None:
    """§5.3: an entry is committed once the leader that created it has it on a majority."""
    core = leader(voters=voters)
    for number in range(2, voters + 1):
        accept(core, number, 1)
    proposed = core.propose(b"batch", 3)
    effects(core)
    for number in holders:
        accept(core, number, proposed.end)
    assert (core.commit_end == proposed.end) is is_committed


def test_a_leader_counts_itself_when_it_has_flushed() -> None:
    """§5.3, figure 2: a server responds after the update of stable storage; so does the leader."""
    core = leader()
    accept(core, 2, 1)
    core.propose(b"batch", 1)
    ready = core.ready()
    assert ready is not None
    assert any(isinstance(message, AppendRequest) for message in ready.send_now)
    core.step(AppendReply(core.term, TWO, ONE, True, RaftIndex(2)))
    assert core.commit_end == 1
    core.advance(RaftIndex(2))
    assert core.commit_end == 2


def test_preceding_entries_are_committed_too() -> None:
    """§5.3: a commit covers all preceding entries, those of earlier leaders included."""
    core = leader([1, 1, 2])
    assert core.commit_end == 0
    accept(core, 2, 4)
    assert core.commit_end == 4


def test_followers_learn_of_the_commit() -> None:
    """§5.3: the leader tells the highest index it knows to be committed."""
    core = leader()
    accept(core, 2, 1)
    core.propose(b"batch", 1)
    requests = [each for each in effects(core).send_now if isinstance(each, AppendRequest)]
    assert [each.commit_end for each in requests] == [1]


@pytest.mark.parametrize(
    ("leader_commit", "prev_end", "entries", "commit_end"),
    [
        (1, 2, [], 1),
        (9, 2, [], 2),
        (9, 1, [], 1),
        (3, 2, [3], 3),
        (9, 2, [3, 3], 4),
        (0, 2, [3], 0),
    ],
)
def test_a_follower_commits_what_it_knows_to_agree(
    leader_commit: int, prev_end: int, entries: list[int], commit_end: int
) -> None:
    """§5.3, figure 2: commitIndex = min(leaderCommit, index of the last new entry)."""
    core = make([1, 1])
    added = entries_of(entries, start=prev_end)
    append(core, prev_end, 1, *added, term=3, commit_end=leader_commit)
    assert core.commit_end == commit_end


def test_a_heartbeat_commits_only_what_agrees() -> None:
    """§5.3: a heartbeat checks nothing, so it says nothing of a suffix that may differ."""
    core = make([1, 1])
    core.step(Heartbeat(Term(3), TWO, ONE, RaftIndex(2), 1))
    assert core.commit_end == 0
    append(core, 1, 1, term=3)
    core.step(Heartbeat(Term(3), TWO, ONE, RaftIndex(2), 2))
    assert core.commit_end == 1


@pytest.mark.parametrize(
    ("prev_end", "prev_term", "accepted"),
    [(0, 0, True), (1, 1, True), (2, 2, True), (1, 2, False), (3, 3, False), (2, 1, False)],
)
def test_the_consistency_check(prev_end: int, prev_term: int, accepted: bool) -> None:
    """§5.3: a follower without the preceding entry refuses."""
    core = make([1, 2])
    ready = append(core, prev_end, prev_term, term=3)
    if accepted:
        reply = AppendReply(Term(3), ONE, TWO, True, RaftIndex(prev_end))
        assert ready.send_after_flush == (reply,)
    else:
        (refusal,) = ready.send_now
        assert isinstance(refusal, AppendReply)
        assert not refusal.accepted
        assert refusal.refused_prev_end == prev_end


@pytest.mark.parametrize(
    ("prev_end", "prev_term", "terms", "truncate_end", "result"),
    [
        (2, 2, [3], None, [1, 2, 3]),
        (1, 1, [3, 4], 1, [1, 3, 4]),
        (0, 0, [1], None, [1, 2]),
        (0, 0, [3], 0, [3]),
        (0, 0, [1, 2, 3], None, [1, 2, 3]),
        (0, 0, [1, 3], 1, [1, 3]),
    ],
    ids=["new", "conflict", "known prefix", "all differs", "overlap", "known, then conflict"],
)
def test_conflicts_are_overwritten(
    prev_end: int, prev_term: int, terms: list[int], truncate_end: int | None, result: list[int]
) -> None:
    """§5.3, figure 2: delete a conflicting entry and all that follow; append what is missing."""
    core = make([1, 2])
    ready = append(core, prev_end, prev_term, *entries_of(terms, start=prev_end), term=5)
    assert ready.truncate_end == truncate_end
    assert isinstance(core.source, Source)
    assert [each.term for each in core.source.log] == result


def test_a_late_request_drops_nothing() -> None:
    """§5.3: "if an existing entry conflicts" - one that agrees stays, whatever follows it."""
    core = make()
    first, second = entries_of([1, 1])
    append(core, 0, 0, first, second, term=1)
    ready = append(core, 0, 0, first, term=1)
    assert (ready.truncate_end, core.log_end) == (None, 2)
    assert ready.send_after_flush == (AppendReply(Term(1), ONE, TWO, True, RaftIndex(2)),)


FIGURE_7 = {
    "a": [1, 1, 1, 4, 4, 5, 5, 6, 6],
    "b": [1, 1, 1, 4],
    "c": [1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 6],
    "d": [1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 7, 7],
    "e": [1, 1, 1, 4, 4, 4, 4],
    "f": [1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3],
}


@pytest.mark.parametrize("case", sorted(FIGURE_7))
def test_leader_brings_followers_logs_to_its_own(case: str) -> None:
    """§5.3, figure 7: nextIndex is found, conflicts removed, the rest appended."""
    ours = [1, 1, 1, 4, 4, 5, 5, 6, 6, 6]
    core = leader(ours, term=7)
    follower = RaftCore(
        RaftConfig(TWO),
        hard_state=HardState(Term(7)),
        epochs=epochs_of(Disk(entries_of(FIGURE_7[case]))),
        configuration=configuration([1, 2, 3]),
        flushed_end=RaftIndex(len(FIGURE_7[case])),
        commit_end=RaftIndex(0),
        source=Source(entries_of(FIGURE_7[case])),
        random=Random(2),
    )
    core.propose(b"more", 1)
    # What was sent at the election is lost, and found missing by a heartbeat's answer.
    for _ in range(6):
        core.tick()
    core.step(HeartbeatReply(core.term, TWO, ONE, 1))
    trips = 0
    assert isinstance(follower.source, Source)
    assert isinstance(core.source, Source)
    while follower.source.log != core.source.log:
        for message in effects(core).send_now:
            if message.to == TWO:
                follower.step(message)
                trips += 1
        ready = effects(follower)
        for reply in (*ready.send_now, *ready.send_after_flush):
            core.step(reply)
        assert trips < 10


def test_a_leader_never_truncates_its_own_log() -> None:
    """§5.3, figure 3: Leader Append-Only."""
    core = leader([1, 1])
    ends = [core.log_end]
    for number in (2, 3):
        core.step(
            AppendReply(
                core.term, replica(number), ONE, False, RaftIndex(0), RaftIndex(2), RaftIndex(0)
            )
        )
        assert effects(core).truncate_end is None
        ends.append(core.log_end)
    assert ends == [3, 3, 3]


# Safety (§5.4)


@pytest.mark.parametrize(
    ("last_term", "log_end", "granted"),
    [(1, 2, False), (2, 1, False), (1, 9, False), (2, 2, True), (2, 3, True), (3, 1, True)],
)
def test_votes_go_to_logs_that_are_up_to_date(last_term: int, log_end: int, granted: bool) -> None:
    """§5.4.1: the later last term wins; of the same term, the longer log."""
    core = make([1, 2])
    core.step(VoteRequest(Term(5), TWO, ONE, Term(last_term), RaftIndex(log_end)))
    ready = effects(core)
    (reply,) = (*ready.send_now, *ready.send_after_flush)
    assert reply == VoteReply(Term(5), ONE, TWO, granted)


@pytest.mark.parametrize(("flushed_end", "commit_end"), [(1, 0), (2, 0), (3, 3)])
def test_older_terms_are_not_committed_by_counting(flushed_end: int, commit_end: int) -> None:
    """§5.4.2: only entries of the leader's own term are committed by counting replicas."""
    core = leader([1, 2])
    accept(core, 2, flushed_end)
    accept(core, 3, flushed_end)
    assert core.commit_end == commit_end


def test_lost_messages_are_sent_again() -> None:
    """§5.5: if a follower crashes, the leader retries indefinitely."""
    core = leader()
    for _ in range(5):
        for _ in range(6):
            core.tick()
        effects(core)
        core.step(HeartbeatReply(core.term, TWO, ONE, 1))
        (again,) = effects(core).send_now
        assert isinstance(again, AppendRequest)
        assert (again.to, again.prev_end) == (TWO, 0)


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


# Log start (§7)


def test_a_follower_begins_anew_at_a_log_start() -> None:
    """§7: a snapshot that goes beyond the log replaces it, term and configuration with it."""
    core = make([1, 1])
    members = configuration([1, 2, 3], [4])
    install = InstallLogStart(
        Term(4), TWO, ONE, RaftIndex(9), Term(3), b"log start", members.encode()
    )
    core.step(install)
    ready = effects(core)
    assert ready.install == install
    assert ready.commit_end == 9
    assert ready.send_after_flush == (AppendReply(Term(4), ONE, TWO, True, RaftIndex(9)),)
    assert (core.log_start, core.log_end, core.epochs.last_term) == (9, 9, 3)
    assert core.configuration == members


def test_what_follows_a_log_start_is_kept() -> None:
    """§7: entries that follow the snapshot, in a log that contains its last entry, are retained."""
    core = make([1, 2, 2])
    core.step(InstallLogStart(Term(4), TWO, ONE, RaftIndex(2), Term(2), b"", b""))
    ready = effects(core)
    assert (ready.install, ready.commit_end, core.log_end) == (None, 2, 3)
    assert ready.send_after_flush == (AppendReply(Term(4), ONE, TWO, True, RaftIndex(2)),)


# Clients (§8)


def test_a_leader_begins_with_an_entry_of_its_own() -> None:
    """§8: a no-op at the start of its term lets it learn which entries are committed."""
    core = leader([1, 1])
    assert (core.term_start, core.log_end) == (2, 3)
    assert not core.has_committed_own_term
    accept(core, 3, 3)
    assert core.has_committed_own_term


def test_reads_wait_for_a_round_of_heartbeats() -> None:
    """§8: before it answers a read-only request a leader exchanges heartbeats with a majority."""
    core = leader(voters=5)
    assert core.read_index() is None  # nothing of its own term is committed
    for number in (2, 3):
        accept(core, number, 1)
    asked = core.read_index()
    assert asked is not None
    round_number, commit_end = asked
    assert commit_end == 1
    assert core.read_index() == asked  # shares the round that has not left yet
    beats = [each for each in effects(core).send_now if isinstance(each, Heartbeat)]
    assert [each.round for each in beats] == [round_number] * 4
    core.step(HeartbeatReply(core.term, TWO, ONE, round_number - 1))
    core.step(HeartbeatReply(core.term, THREE, ONE, round_number))
    assert not core.read_confirmed(round_number)
    core.step(HeartbeatReply(core.term, FOUR, ONE, round_number + 1))
    assert core.read_confirmed(round_number)


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
    """Thesis §6.2: within an election timeout without answers from a majority."""
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
    for _ in range(12):
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


def test_the_log_may_be_ahead_of_the_journal() -> None:
    """§5.1: a term that is in the log was entered, even if the journal's flush came too late."""
    core = RaftCore(
        RaftConfig(ONE),
        hard_state=HardState(Term(1), TWO),
        epochs=EpochHistory([(Term(4), RaftIndex(0))], log_end=RaftIndex(2)),
        configuration=configuration([1, 2, 3]),
        flushed_end=RaftIndex(2),
        commit_end=RaftIndex(0),
        source=Source([]),
        random=Random(1),
    )
    assert (core.term, core.vote) == (4, None)
    assert effects(core).hard_state == HardState(Term(4))
