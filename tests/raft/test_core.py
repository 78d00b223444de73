"""Edges of the core that neither the paper nor a story tells of."""

from __future__ import annotations

from random import Random

import pytest

from raftmq.errors import RemoteProtocolError
from raftmq.raft.core import RaftCore
from raftmq.raft.follower import heartbeat_reply
from raftmq.raft.leader import ASKED_APART_MS, ASKED_MAX, election_payload, may_commit
from raftmq.raft.messages import (
    AppendReply,
    AppendRequest,
    Effects,
    Entry,
    EntryKind,
    HardState,
    Heartbeat,
    HeartbeatReply,
    PreVoteReply,
    PreVoteRequest,
    Ready,
    Role,
    SoftState,
    TimeoutNow,
)
from raftmq.raft.replica_state import RaftConfig
from raftmq.types import RaftIndex, Term
from tests.raft.network import Disk, Network, configuration, entry, epochs_of, group, replica
from tests.raft.single import ONE, THREE, TWO, accept, effects, leader, make


def elected(**settings: object) -> tuple[Network, RaftCore]:
    """Three nodes, led by the first."""
    network = group([1, 2, 3], **settings)  # type: ignore[arg-type]  # the core's settings
    core = network.elect(1)
    network.tick(1, count=2)
    network.settle()
    return network, core


def requests(network: Network, to: int) -> list[AppendRequest]:
    """The append requests on their way to one node."""
    return [
        each
        for each in network.flight
        if isinstance(each, AppendRequest) and each.to == replica(to)
    ]


def test_proposals_of_one_ready_share_a_request() -> None:
    """The same tuple goes to all followers: built once."""
    network, core = elected()
    for size in (10, 20):
        core.propose(bytes(size), 1)
    network.nodes[1].drain()
    (to_two,), (to_three,) = requests(network, 2), requests(network, 3)
    assert [len(each.payload) for each in to_two.entries] == [10, 20]
    assert to_two.entries is to_three.entries


def test_requests_are_cut_by_bytes() -> None:
    """At most append_bytes_max, at least one entry."""
    network, core = elected(append_bytes_max=100)
    for size in (40, 60, 1, 300, 100):
        core.propose(bytes(size), 1)
    network.nodes[1].drain()
    sizes = [[len(each.payload) for each in request.entries] for request in requests(network, 2)]
    assert sizes == [[40, 60], [1], [300], [100]]


def test_a_window_by_bytes() -> None:
    """What does not fit is read from the log once there is room."""
    network, core = elected(inflight_bytes_max=150, append_bytes_max=100)
    for size in (100, 100, 100):
        core.propose(bytes(size), 1)
    network.nodes[1].drain()
    assert len(requests(network, 2)) == 2
    network.settle()
    assert network.core(2).log_end == core.log_end


def test_buggify_makes_short_requests() -> None:
    """In simulation a request may hold a single entry, whatever the limit."""
    network, core = elected(buggify=lambda site: site == "raft.short_append")
    for _ in range(3):
        core.propose(b"x", 1)
    network.nodes[1].drain()
    assert [len(each.entries) for each in requests(network, 2)] == [1, 1, 1]


def test_reading_fails_for_now() -> None:
    """() from the source means later, not never."""
    network, core = elected()
    network.partition([1, 2], [3])
    core.propose(b"x", 1)
    network.settle()
    network.heal()
    network.nodes[1].can_read = False
    network.tick(1, count=6)
    network.settle()
    assert network.core(3).log_end == 1
    network.nodes[1].can_read = True
    network.tick(1)
    network.settle()
    assert network.core(3).log_end == 2


def test_a_new_leader_does_not_read_what_is_about_to_change() -> None:
    """Its own truncation may be in the same Ready as its election."""
    network = group([1], [2], logs={1: [1, 1, 1]})
    core = network.core(1)
    core.become_follower(Term(2), replica(2))
    core.truncate_to(RaftIndex(1))
    core.campaign()
    leadership = core.leadership
    assert leadership is not None
    assert leadership._entries(RaftIndex(0)) == ((), 0)
    ready = core.ready()
    assert ready is not None
    assert (ready.truncate_end, len(ready.append)) == (1, 1)
    assert leadership._entries(RaftIndex(0))[0][0].start == 0


def test_install_waits_for_the_engine() -> None:
    """A log start that this Ready installs cannot be sent by it."""
    _, core = elected()
    assert core.leadership is not None
    progress = core.leadership.progress[replica(2)]
    progress.become_catch_up(RaftIndex(0))
    core.effects.install = object()  # type: ignore[assignment]
    core.leadership.send()
    assert not progress.is_awaiting
    core.effects.install = None
    core.leadership.send()
    assert len(core.effects.send_now) == 1


def test_gaps_left_by_compaction() -> None:
    """Entries may start above the end before them; a log that still has more keeps it."""
    core = make_follower([1, 1, 1, 1])
    core.set_commit_end(RaftIndex(4))
    gap = entry(4, 2)
    core.step(request(2, 1, gap, term=2))
    assert core.ready().truncate_end is None  # type: ignore[union-attr]
    assert core.log_end == 5
    core = make_follower([1, 1])
    core.step(request(2, 1, entry(6, 2), entry(7, 2), term=2))
    assert core.epochs.pairs() == [(1, 0), (2, 6)]
    assert core.log_end == 8


def test_a_gap_does_not_hide_a_conflict() -> None:
    """Positions inside the gap agree only if their term does."""
    core = make_follower([1, 1, 2, 2])
    core.step(request(2, 1, entry(4, 3), term=3))
    assert core.ready().truncate_end == 2  # type: ignore[union-attr]
    assert core.log_end == 5


def test_requests_below_the_log_start() -> None:
    """What lies below our start is committed, so it agrees; what lies above is taken."""
    core = make_follower([1, 1, 1, 1])
    core.set_commit_end(RaftIndex(3))
    core.log_start_moved(RaftIndex(3), Term(1))
    core.step(request(0, 0, *[entry(n, 1) for n in range(6)], term=2))
    ready = core.ready()
    assert ready is not None
    assert [each.start for each in ready.append] == [4, 5]
    (reply,) = ready.send_after_flush
    assert isinstance(reply, AppendReply)
    assert (reply.accepted, reply.flushed_end) == (True, 6)


def test_a_committed_prefix_is_never_touched() -> None:
    """Who disagrees with it is no leader of this group: its stream ends, the log stays."""
    core = make_follower([1, 1, 1])
    core.set_commit_end(RaftIndex(2))
    with pytest.raises(RemoteProtocolError, match="committed"):
        core.step(request(2, 2, term=2))
    with pytest.raises(RemoteProtocolError, match="committed"):
        core.step(request(0, 0, entry(0, 2), term=2))
    with pytest.raises(AssertionError, match="never truncated"):
        core.truncate_to(RaftIndex(1))
    with pytest.raises(AssertionError, match="committed prefix may go"):
        core.log_start_moved(RaftIndex(3), Term(1))


def test_what_agrees_with_a_leader_is_never_truncated() -> None:
    """Within one term the leader only appends (Raft figure 3)."""
    core = make_follower([1])
    core.step(request(1, 1, entry(1, 2), term=2))
    with pytest.raises(RemoteProtocolError, match="was sent"):
        core.step(request(0, 0, entry(0, 2), term=2))
    with pytest.raises(AssertionError, match="never truncated"):
        core.truncate_to(RaftIndex(1))


def test_two_leaders_in_a_term() -> None:
    """Election safety is checked, not assumed: the second one is not believed."""
    core = make_follower([1])
    core.step(request(1, 1, term=2))
    with pytest.raises(RemoteProtocolError, match="claims to lead"):
        core.step(Heartbeat(Term(2), replica(3), replica(1), RaftIndex(0), 1))
    assert core.leader == replica(2)
    _, lead = elected()
    with pytest.raises(RemoteProtocolError, match="claims to lead"):
        lead.step(Heartbeat(lead.term, replica(3), replica(1), RaftIndex(0), 1))


def test_messages_for_another_life() -> None:
    """A node with other storage is somebody else."""
    core = make_follower([])
    core.step(Heartbeat(Term(9), replica(2), replica(1, 77), RaftIndex(0), 1))
    assert core.term == 0


def test_replies_to_a_follower() -> None:
    """Late answers to a former leader change nothing."""
    core = make_follower([1])
    core.step(AppendReply(Term(1), replica(2), replica(1), True, RaftIndex(1)))
    core.step(TimeoutNow(Term(1), replica(2), replica(1)))
    assert core.ready() is None
    assert (core.role, core.commit_end, core.term) == (Role.FOLLOWER, 0, 1)
    assert not core.read_confirmed(1)
    assert core.progress == {}
    assert core.term_start is None


def test_answers_to_one_ready_are_one() -> None:
    """The later acknowledgement says all that the earlier one said, after the same flush."""
    core = make_follower([1])
    core.step(request(1, 1, entry(1, 2), term=2))
    core.step(request(2, 2, entry(2, 2), term=2))
    ready = core.ready()
    assert ready is not None
    (reply,) = ready.send_after_flush
    assert isinstance(reply, AppendReply)
    assert (len(ready.append), reply.flushed_end) == (2, 3)


def test_its_own_name_in_an_answer() -> None:
    """A leader is no follower of its own, whatever a peer says."""
    network, core = elected()
    core.propose(b"x", 1)
    core.step(AppendReply(core.term, replica(1), replica(1), True, RaftIndex(2)))
    core.step(HeartbeatReply(core.term, replica(1), replica(1), 9))
    assert core.commit_end == 1
    assert not core.read_confirmed(9)
    network.settle()


def test_clocks_are_passed_on() -> None:
    """The follower's wall clock reaches the leader with both kinds of answers."""
    network, core = elected()
    network.core(2).clock_ms = 1234
    core.propose(b"x", 1)
    network.settle()
    assert core.progress[replica(2)].clock_ms == 1234
    network.core(3).clock_ms = 99
    core.clock_ms = 7
    network.tick(1, count=2)
    network.settle()
    assert core.progress[replica(3)].clock_ms == 99


def beat_at(network: Network, core: RaftCore, now_ms: float) -> None:
    """The leader sends heartbeats at that time."""
    core.monotonic_ms = now_ms
    network.tick(1, count=core.config.heartbeat_ticks)


def test_how_old_a_clock_is_tells_the_heartbeat_that_it_answers() -> None:
    network, core = elected()
    told = core.progress[replica(2)]
    network.core(2).clock_ms = 10
    for now_ms in (1_000.0, 1_000.0 + ASKED_APART_MS - 1, 9_000.0):
        beat_at(network, core, now_ms)
    oldest, between, newest = (
        each for each in network.flight if isinstance(each, Heartbeat) and each.to == replica(2)
    )
    for heartbeat, clock_ms, known in (
        (between, 20, (20, 1_000.0)),
        (newest, 30, (30, 9_000.0)),
        (oldest, 10, (30, 9_000.0)),
    ):
        network.core(2).clock_ms = clock_ms
        core.step(heartbeat_reply(network.core(2), heartbeat))
        assert told.told_clock == known
        assert told.clock_ms == clock_ms
    told.told_clock = None
    for number in range(ASKED_MAX):
        beat_at(network, core, 10_000.0 + number * ASKED_APART_MS)
    core.step(heartbeat_reply(network.core(2), newest))
    assert told.told_clock is None, "nobody knows when that left"


def test_the_first_answers_of_a_term_tell_clocks_of_that_term() -> None:
    """A leader knows the time before its first heartbeat is answered."""
    network = group([1, 2, 3])
    network.core(1).monotonic_ms = 5_000.0
    network.core(2).clock_ms = 70
    core = network.elect(1)
    network.settle(lambda message: not isinstance(message, HeartbeatReply))
    told = core.progress[replica(2)]
    assert told.told_clock == (70, 5_000.0)
    network.core(2).clock_ms = 80
    core.monotonic_ms = 6_000.0
    core.propose(b"x", 1)
    network.settle()
    assert (told.clock_ms, told.told_clock) == (80, (70, 5_000.0))


def test_a_leader_forgets_the_removed() -> None:
    """Also answers of theirs that are still on their way, and a transfer to them."""
    network, core = elected()
    network.partition([1, 2], [3])
    core.propose(b"x", 1)
    network.settle()
    core.transfer_leadership(replica(3))
    core.abort_transfer()
    core.propose_membership(configuration([1, 2], [3]))
    network.settle()
    core.propose_membership(configuration([1, 2]))
    network.settle()
    assert list(core.progress) == [replica(2)]
    core.step(AppendReply(core.term, replica(3), replica(1), True, RaftIndex(1)))
    assert core.is_leader


def test_bare_entries_take_one_position() -> None:
    """And a membership goes through its own door."""
    _, core = elected()
    with pytest.raises(AssertionError):
        core.propose(b"", 2, EntryKind.LOG_START)
    with pytest.raises(AssertionError):
        core.propose(b"", 1, EntryKind.MEMBERSHIP)
    assert core.propose(b"", 1, EntryKind.LOG_START).is_bare


def test_claims() -> None:
    """Restored by agreement up to the claimed end, or by a later leader's election entry."""
    core = make_follower([1, 1, 1])
    core.claimed_end_floor = RaftIndex(6)
    restored = [core.is_claim_restored]
    election = Entry(RaftIndex(3), RaftIndex(4), Term(2), EntryKind.ELECTION, b"")
    core.step(request(3, 1, election, term=2))
    restored.append(core.is_claim_restored)  # not flushed yet
    core.advance(RaftIndex(4))
    restored.append(core.is_claim_restored)
    assert restored == [False, False, True]
    core = make_follower([1, 1, 1])
    core.claimed_end_floor = RaftIndex(6)
    core.step(request(3, 1, *[entry(n, 1) for n in range(3, 6)], term=1))
    core.advance(RaftIndex(5))
    restored = [core.is_claim_restored]
    core.advance(RaftIndex(6))
    restored.append(core.is_claim_restored)
    assert restored == [False, True]


def test_the_configuration_of_a_restarted_replica() -> None:
    """The last membership entry of its log is in force, committed or not."""
    disk = Disk([entry(0, 1)], base=configuration([1, 2]))
    core = RaftCore(
        RaftConfig(replica(1)),
        hard_state=HardState(Term(1)),
        epochs=epochs_of(disk),
        configuration=disk.base,
        configuration_history=[(RaftIndex(0), configuration([1, 2, 3]))],
        flushed_end=RaftIndex(1),
        commit_end=RaftIndex(0),
        source=group([1]).nodes[1],
        random=Random(1),
    )
    assert core.configuration == configuration([1, 2, 3])
    assert core.ready() is None


def test_effects_are_taken_in_order() -> None:
    """What the engine never saw is dropped without a word; the rest is truncated once."""
    effects = Effects()
    assert effects.take(None, None, None) is None
    effects.append += [entry(5, 1), entry(6, 1), entry(7, 1)]
    effects.truncate_to(RaftIndex(6))
    assert (effects.truncate_end, effects.append) == (None, [entry(5, 1)])
    effects.truncate_to(RaftIndex(3))
    assert (effects.truncate_end, effects.append) == (3, [])
    effects.truncate_to(RaftIndex(4))
    assert effects.truncate_end == 3
    soft = SoftState(Role.FOLLOWER, Term(1), None)
    ready = effects.take(HardState(Term(1)), soft, RaftIndex(2))
    assert ready is not None
    assert (ready.hard_state, ready.truncate_end, ready.append) == (HardState(Term(1)), 3, ())
    assert (ready.soft_state, ready.commit_end) == (soft, 2)
    assert effects.take(None, None, None) is None


def test_settings_are_checked() -> None:
    """Heartbeats must be more frequent than elections."""
    with pytest.raises(AssertionError):
        RaftConfig(replica(1), election_ticks=2, heartbeat_ticks=2)
    with pytest.raises(ValueError, match="election_ticks"):
        RaftConfig(replica(1), election_ticks=1)


def test_election_payload() -> None:
    """Says who leads: version, node, storage."""
    assert election_payload(replica(3, 9)) == bytes.fromhex("01 00000003 0000000000000009")


@pytest.mark.parametrize(
    ("end", "commit_end", "term_start", "expected"),
    [(5, 4, 3, True), (5, 5, 3, False), (5, 4, 5, False), (6, 4, 5, True)],
)
def test_may_commit(end: int, commit_end: int, term_start: int, expected: bool) -> None:
    """Raft §5.4.2."""
    assert may_commit(RaftIndex(end), RaftIndex(commit_end), RaftIndex(term_start)) is expected


def make_follower(terms: list[int]) -> RaftCore:
    return group([1, 2, 3], logs={1: terms}).core(1)


def request(prev_end: int, prev_term: int, *entries: Entry, term: int) -> AppendRequest:
    """From node 2, which leads `term`."""
    return AppendRequest(
        Term(term),
        replica(2),
        replica(1),
        RaftIndex(prev_end),
        Term(prev_term),
        RaftIndex(0),
        entries,
    )


def test_a_quiet_answer_is_what_a_step_would_have_sent() -> None:
    quiet, stepped = make(), make()
    for core in (quiet, stepped):
        core.step(Heartbeat(Term(1), TWO, ONE, RaftIndex(0), 1))
        effects(core)
        core.tick()
    heartbeat = Heartbeat(Term(1), TWO, ONE, RaftIndex(0), 2)
    stepped.step(heartbeat)
    assert effects(stepped).send_now == (quiet.answer(heartbeat),)
    assert quiet.ready() is None
    for _ in range(9):
        quiet.tick()
    assert quiet.role is Role.FOLLOWER, "it counts as a sign of life"


NEWS = {
    "another term": Heartbeat(Term(2), TWO, ONE, RaftIndex(0), 1),
    "an old term": Heartbeat(Term(0), TWO, ONE, RaftIndex(0), 1),
    "another leader": Heartbeat(Term(1), THREE, ONE, RaftIndex(0), 1),
    "for somebody else": Heartbeat(Term(1), TWO, THREE, RaftIndex(0), 1),
}


@pytest.mark.parametrize("heartbeat", NEWS.values(), ids=NEWS.keys())
def test_a_heartbeat_with_news_is_not_answered_quietly(heartbeat: Heartbeat) -> None:
    core = make()
    assert core.answer(heartbeat) is None, "no leader is known yet"
    core.step(Heartbeat(Term(1), TWO, ONE, RaftIndex(0), 1))
    effects(core)
    assert core.answer(heartbeat) is None


def test_a_commit_is_news() -> None:
    core = make([1, 1])
    core.step(AppendRequest(Term(1), TWO, ONE, RaftIndex(2), Term(1), RaftIndex(0), ()))
    effects(core)
    assert core.answer(Heartbeat(Term(1), TWO, ONE, RaftIndex(1), 1)) is None


def test_a_reply_is_taken_quietly_only_from_who_was_sent_everything() -> None:
    core = leader()
    reply = HeartbeatReply(Term(1), TWO, ONE, 1, RaftIndex(1))
    assert not core.takes_quietly(reply), "what it flushed is not known yet"
    accept(core, 2, 1)
    accept(core, 3, 1)
    assert core.takes_quietly(reply)
    assert core.ready() is None
    assert not core.takes_quietly(HeartbeatReply(Term(2), TWO, ONE, 1, RaftIndex(1)))
    core.propose(b"batch", 1)
    assert not core.takes_quietly(reply), "the batch is not sent yet"
    effects(core)
    assert core.takes_quietly(reply), "the batch is on its way"
    assert core.ready() is None
    for _ in range(core.config.election_ticks):
        core.tick()
        core.step(HeartbeatReply(Term(1), THREE, ONE, 1, RaftIndex(1)))
    assert not core.takes_quietly(reply), "the batch seems lost"
    assert any(isinstance(m, AppendRequest) for m in effects(core).send_now)


def test_what_only_announces_a_commit_is_not_answered() -> None:
    core = make([1, 1])
    core.step(AppendRequest(Term(1), TWO, ONE, RaftIndex(2), Term(1), RaftIndex(0), ()))
    effects(core)
    core.step(Heartbeat(Term(1), TWO, ONE, RaftIndex(0), 7))
    assert [type(m) for m in effects(core).send_now] == [HeartbeatReply]
    core.step(Heartbeat(Term(1), TWO, ONE, RaftIndex(1), 7))
    assert effects(core).send_now == ()
    assert core.commit_end == 1
    core.step(Heartbeat(Term(1), TWO, ONE, RaftIndex(2), 8))
    assert [type(m) for m in effects(core).send_now] == [HeartbeatReply], "a new round"
    core.step(Heartbeat(Term(2), THREE, ONE, RaftIndex(2), 8))
    assert [type(m) for m in effects(core).send_now] == [HeartbeatReply], "another leader's round"


def test_who_waits_for_its_turn_does_not_stand() -> None:
    core = make()
    core.waits_for_turn = True
    for _ in range(50):
        core.tick()
    assert (core.role, core.term) == (Role.FOLLOWER, 0)
    core.waits_for_turn = False
    core.tick()
    assert core.role is Role.CANDIDATE, "its timeout has long passed"


def test_the_first_leader_of_a_group_asks_again_whom_it_reached_too_early() -> None:
    """Those that did not have the group yet dropped the question; a timeout later is late."""
    core = make(pre_vote=True)
    core.stand()
    assert [type(each) for each in effects(core).send_now] == [PreVoteRequest] * 2
    core.stand()
    assert [each.to for each in effects(core).send_now] == [TWO, THREE]
    core.step(PreVoteReply(Term(1), TWO, ONE, True))
    effects(core)
    assert (core.role, core.term) == (Role.CANDIDATE, 1)
    core.stand()
    assert effects(core) == Ready(), "no other term while votes of this one are under way"
    assert core.term == 1
    core.step(Heartbeat(Term(1), TWO, ONE, RaftIndex(0), 1))
    effects(core)
    core.stand()
    assert (core.role, core.leader) == (Role.FOLLOWER, TWO)
