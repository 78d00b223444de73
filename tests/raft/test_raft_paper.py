"""The rules of the Raft paper (Ongaro, Ousterhout: In Search of an Understandable Consensus
Algorithm, extended version), one test each, in the paper's order. See also `test_raft_thesis.py`.
"""

from __future__ import annotations

from random import Random

import pytest

from raftmq.errors import NotLeaderError, RemoteProtocolError
from raftmq.raft.core import RaftCore
from raftmq.raft.epoch_history import EpochHistory
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
    Ready,
    Role,
    TimeoutNow,
    VoteReply,
    VoteRequest,
)
from raftmq.raft.replica_state import RaftConfig
from raftmq.types import RaftIndex, ReplicaId, Term
from tests.raft.network import Disk, configuration, entries_of, entry, epochs_of, replica
from tests.raft.single import (
    FOUR,
    ONE,
    THREE,
    TWO,
    Source,
    accept,
    append,
    effects,
    leader,
    make,
)

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
    with pytest.raises(RemoteProtocolError, match="not begun"):
        core.step(HeartbeatReply(core.term, FOUR, ONE, round_number + 1))
    assert not core.read_confirmed(round_number)
    core.step(HeartbeatReply(core.term, FOUR, ONE, round_number))
    assert core.read_confirmed(round_number)


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
