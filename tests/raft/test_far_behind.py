"""A leader and a replica that lacks what is no longer in the leader's memory."""

from __future__ import annotations

from raftmq.raft.core import RaftCore
from raftmq.raft.messages import AppendReply, AppendRequest, EntryKind, Ready
from raftmq.types import RaftIndex
from tests.raft.single import FOUR, ONE, THREE, TWO, Source, accept, effects, leader


def source(core: RaftCore) -> Source:
    assert isinstance(core.source, Source)
    return core.source


def sent_to(ready: Ready, to: object) -> list[tuple[int, int, bool]]:
    """(start, end, stored) of what was sent with entries."""
    return [
        (m.prev_end, m.entries[-1].end, m.chunk is not None)
        for m in ready.send_now
        if isinstance(m, AppendRequest) and m.entries and m.to == to
    ]


def lagging(entries: int = 40) -> RaftCore:
    """A leader with so many entries on disk; node 3 has them, node 2 only the first two."""
    core = leader([1] * entries)
    source(core).memory_start = entries
    accept(core, 3, core.log_end)
    core.step(AppendReply(core.term, TWO, ONE, False, RaftIndex(0), core.term_start, RaftIndex(2)))
    effects(core)
    return core


def test_far_behind_is_served_from_the_disk_in_a_window() -> None:
    core = lagging()
    sent = sent_to(accept(core, 2, 2), TWO)
    assert sent == [(2 + i, 3 + i, True) for i in range(len(sent))]
    assert len(sent) == 38
    assert core.progress[TWO].is_far_behind
    assert sent_to(effects(core), THREE) == []


def test_what_is_held_back_is_asked_for_again_when_the_engine_drains() -> None:
    core = lagging()
    source(core).may_leave = False
    assert sent_to(accept(core, 2, 2), TWO) == []
    core.tick()
    assert not core.wants_ready, "it waits to be woken; ticks do not ask"
    source(core).may_leave = True
    assert sent_to(effects(core), TWO)[0] == (2, 3, True)
    assert [start for start, *_ in source(core).asked][:3] == [2, 2, 3]


def test_what_waits_for_its_turn_is_read_again_only_when_that_has_come() -> None:
    """Each Ready of a leader asks; thousands of small entries cost it more than all else."""
    core = leader([1] * 4, learners=(4,))
    for node in (2, 3):
        accept(core, node, core.log_end)
    source(core).may_leave, source(core).waits = False, True
    reply = AppendReply(core.term, FOUR, ONE, False, RaftIndex(0), core.term_start, RaftIndex(0))
    core.step(reply)
    accept(core, 4, 0)
    reads, asked = source(core).reads, len(source(core).asked)
    assert core.progress[FOUR].is_held
    for _ in range(5):
        core.propose(b"new", 1, EntryKind.BATCH)
        assert sent_to(effects(core), FOUR) == []
    assert (source(core).reads, len(source(core).asked)) == (reads, asked)
    source(core).may_leave, source(core).waits = True, False
    assert sent_to(effects(core), FOUR)


def test_whom_the_commit_waits_for_is_read_for_at_once() -> None:
    core = lagging()
    source(core).may_leave, source(core).waits = False, True
    accept(core, 2, 2)
    assert core.progress[TWO].is_held
    core.progress[THREE].match_end = RaftIndex(0)  # as if it had lost all
    source(core).may_leave = True
    assert sent_to(effects(core), TWO)


def test_what_is_being_read_is_asked_for_with_every_tick() -> None:
    core = lagging()
    source(core).is_read = False
    assert sent_to(accept(core, 2, 2), TWO) == []
    core.tick()
    assert core.wants_ready


def test_who_fell_far_behind_is_limited_until_it_has_all() -> None:
    """From memory, too, so that a catch-up ends at the rate at which it began."""
    core = lagging()
    accept(core, 2, 2)
    core.propose(b"new", 1, EntryKind.BATCH)
    effects(core)
    source(core).asked.clear()
    assert sent_to(accept(core, 2, 40), TWO) == [(40, 42, False)]
    assert source(core).asked == [(40, TWO, False)]
    assert source(core).from_disk[-1] is False
    accept(core, 2, 42)
    source(core).may_leave = False
    core.propose(b"live", 1, EntryKind.BATCH)
    assert sent_to(effects(core), TWO) == [(42, 43, False)]


def test_a_learner_is_limited_until_it_has_all_and_the_living_never() -> None:
    core = leader([1] * 4, learners=(4,))
    for node in (2, 3):
        accept(core, node, core.log_end)
    source(core).may_leave = False
    reply = AppendReply(core.term, FOUR, ONE, False, RaftIndex(0), core.term_start, RaftIndex(0))
    core.step(reply)
    accept(core, 4, 0)
    core.propose(b"new", 1, EntryKind.BATCH)
    ready = effects(core)
    assert sent_to(ready, FOUR) == []
    assert sent_to(ready, TWO) == sent_to(ready, THREE) == [(5, 6, False)]
    source(core).may_leave = True
    core.propose(b"more", 1, EntryKind.BATCH)
    assert sent_to(effects(core), FOUR)
    accept(core, 4, core.log_end)
    source(core).may_leave = False
    core.propose(b"live", 1, EntryKind.BATCH)
    assert sent_to(effects(core), FOUR) == [(7, 8, False)]


def test_what_is_written_meanwhile_comes_on_top_once_for_each_that_takes_entries() -> None:
    core = lagging()
    accept(core, 2, 2)
    core.propose(b"new", 1, EntryKind.BATCH)
    effects(core)
    assert source(core).grew == [41]
    for _ in range(core.config.election_ticks + 1):
        core.tick()
        accept(core, 3, core.log_end)
    core.propose(b"more", 1, EntryKind.BATCH)
    effects(core)
    assert source(core).grew == [41], "it does not answer, so nothing is sent to it either"


def test_the_commit_waits_for_nobody_that_is_behind_while_a_majority_is_not() -> None:
    core = lagging()
    accept(core, 2, 2)
    assert {needed for *_, needed in source(core).asked} == {False}


def test_the_commit_waits_for_the_better_one_of_two_that_are_behind() -> None:
    core = leader([1] * 40)
    source(core).memory_start = 40
    for node, end in ((2, 2), (3, 5)):
        sender = (TWO, THREE)[node - 2]
        reply = AppendReply(
            core.term, sender, ONE, False, RaftIndex(0), core.term_start, RaftIndex(end)
        )
        core.step(reply)
    effects(core)
    source(core).asked.clear()
    accept(core, 3, 5)
    accept(core, 2, 2)
    assert {(to, needed) for _, to, needed in source(core).asked} == {(TWO, False), (THREE, True)}


def test_live_requests_go_on_where_stored_ones_have_all_arrived() -> None:
    """Else they would overtake them and be refused."""
    core = lagging()
    accept(core, 2, 2)
    core.propose(b"new", 1, EntryKind.BATCH)
    assert sent_to(effects(core), THREE) == [(41, 42, False)]
    assert core.progress[TWO].inflight_messages == 38
    assert sent_to(accept(core, 2, 30), TWO) == []
    assert sent_to(accept(core, 2, 40), TWO) == [(40, 42, False)]
    assert not core.progress[TWO].is_far_behind


def test_stored_requests_wait_for_live_ones_under_way() -> None:
    core = leader([1])
    accept(core, 2, core.log_end)
    core.propose(b"new", 1, EntryKind.BATCH)
    assert sent_to(effects(core), TWO) == [(2, 3, False)]
    for _ in range(80):
        core.propose(b"new", 1, EntryKind.BATCH)
        effects(core)
    assert not core.progress[TWO].has_room
    source(core).memory_start = core.log_end
    assert sent_to(accept(core, 2, 10), TWO) == []
    assert sent_to(accept(core, 2, core.progress[TWO].next_end), TWO)[0][2]
