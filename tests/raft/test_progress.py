"""What a leader sends to one replica: every transition of `Progress`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmq.errors import RemoteProtocolError
from raftmq.raft.progress import Progress, ProgressState
from raftmq.types import RaftIndex
from tests.raft.network import replica

ZERO = RaftIndex(0)


def progress(next_end: int = 10, *, bytes_max: int = 100, messages_max: int = 3) -> Progress:
    return Progress(
        replica(2), RaftIndex(next_end), 0, bytes_max=bytes_max, messages_max=messages_max
    )


def replicating(end: int = 10) -> Progress:
    """A replica that holds all below `end`."""
    it = progress(end)
    it.accepted(RaftIndex(end), 0, is_promise=True)
    assert it.state is ProgressState.REPLICATE
    return it


def test_probe_sends_one_request() -> None:
    """And takes only the answer to that one."""
    it = progress()
    it.sent_entries(RaftIndex(12), 50, 1)
    assert (it.is_awaiting, it.next_end) == (True, 10)
    assert not it.refused(RaftIndex(9), RaftIndex(3), ZERO, 2)
    assert it.refused(RaftIndex(10), RaftIndex(3), ZERO, 2)
    assert (it.state, it.next_end, it.is_awaiting) == (ProgressState.PROBE, 3, False)


def test_probe_waits_for_an_answer_that_is_new() -> None:
    """An acknowledgement from before the loss says nothing about the position asked."""
    it = progress(10)
    it.sent_question(1)
    assert it.accepted(RaftIndex(8), 2, is_promise=True)
    assert (it.state, it.match_end, it.is_awaiting) == (ProgressState.PROBE, 8, True)
    assert it.accepted(RaftIndex(12), 3, is_promise=True)
    assert (it.state, it.match_end, it.next_end) == (ProgressState.REPLICATE, 12, 12)


def test_window_by_messages() -> None:
    """So many requests, and no more."""
    it = replicating()
    room = []
    for end in (11, 12, 13):
        room.append(it.has_room)
        it.sent_entries(RaftIndex(end), 1, 1)
    assert (room, it.has_room) == ([True, True, True], False)
    assert it.accepted(RaftIndex(12), 2, is_promise=True)
    assert (it.has_room, it.inflight_messages, it.inflight_bytes) == (True, 1, 1)


def test_window_by_bytes() -> None:
    """The request that passes the limit still goes: a single batch may be larger."""
    it = replicating()
    it.sent_entries(RaftIndex(11), 99, 1)
    room = [it.has_room]
    it.sent_entries(RaftIndex(12), 500, 1)
    room.append(it.has_room)
    it.accepted(RaftIndex(11), 1, is_promise=True)
    room.append(it.has_room)
    it.accepted(RaftIndex(12), 1, is_promise=True)
    assert (room, it.has_room, it.inflight_bytes) == ([True, False, False], True, 0)


def test_entries_go_forward() -> None:
    """An empty request is a question, not entries."""
    it = replicating()
    with pytest.raises(AssertionError):
        it.sent_entries(RaftIndex(10), 1, 1)
    it.become_catch_up(RaftIndex(20))
    with pytest.raises(AssertionError):
        it.sent_entries(RaftIndex(21), 1, 1)


def test_promises_alone_count() -> None:
    """A damaged replica's answers move the window, not the match."""
    it = replicating()
    it.sent_entries(RaftIndex(15), 1, 1)
    assert not it.accepted(RaftIndex(15), 2, is_promise=False)
    assert (it.match_end, it.next_end, it.inflight_messages) == (10, 15, 0)
    assert "mute" in repr(it)
    it.heard_matched_end(RaftIndex(15), 9, 5)
    assert it.must_ask  # it may promise again by now
    it.sent_question(9)
    assert it.accepted(RaftIndex(15), 10, is_promise=True)
    assert (it.match_end, it.must_ask, it.is_promising) == (15, False, True)
    assert not it.accepted(RaftIndex(15), 11, is_promise=True)


def test_refusals_while_replicating() -> None:
    """The first one ends the pipeline; one that was overtaken by an acknowledgement is ignored."""
    it = replicating()
    it.sent_entries(RaftIndex(11), 1, 1)
    it.sent_entries(RaftIndex(12), 1, 1)
    assert not it.refused(RaftIndex(9), RaftIndex(2), ZERO, 2)
    assert it.refused(RaftIndex(11), RaftIndex(10), ZERO, 2)
    assert (it.state, it.next_end, it.inflight_messages) == (ProgressState.PROBE, 10, 0)
    assert not it.refused(RaftIndex(12), RaftIndex(10), ZERO, 2)
    assert it.match_end == 10


def test_lost_promises() -> None:
    """A replica that refuses what it had acknowledged no longer counts for it."""
    it = replicating()
    it.sent_entries(RaftIndex(11), 1, 1)
    assert it.refused(RaftIndex(10), RaftIndex(4), ZERO, 2)
    assert (it.match_end, it.next_end) == (4, 4)
    with pytest.raises(RemoteProtocolError):
        it.refused(RaftIndex(4), RaftIndex(4), ZERO, 2)


def test_catching_up() -> None:
    """Nothing but the log start until it is there; old answers do not matter."""
    it = progress()
    assert it.refused(RaftIndex(10), None, RaftIndex(50), 1)
    assert (it.state, it.next_end) == (ProgressState.CATCH_UP, 50)
    it.sent_question(2)
    assert it.is_awaiting
    assert not it.refused(RaftIndex(50), RaftIndex(1), ZERO, 2)
    assert it.accepted(RaftIndex(9), 3, is_promise=True)
    assert it.state is ProgressState.CATCH_UP
    assert it.accepted(RaftIndex(50), 4, is_promise=True)
    assert (it.state, it.next_end, it.is_awaiting) == (ProgressState.REPLICATE, 50, False)


@pytest.mark.parametrize(
    ("matched_end", "state", "next_end", "must_ask"),
    [
        (10, ProgressState.PROBE, 10, False),
        (11, ProgressState.PROBE, 11, False),
        (3, ProgressState.PROBE, 10, False),
        (12, ProgressState.REPLICATE, 12, True),
    ],
    ids=["all lost", "half lost", "restarted", "answer lost"],
)
def test_silence(matched_end: int, state: ProgressState, next_end: int, must_ask: bool) -> None:
    """What a heartbeat's answer means when append replies stay away."""
    it = replicating()
    it.sent_entries(RaftIndex(11), 1, 1)
    it.sent_entries(RaftIndex(12), 1, 1)
    it.heard_matched_end(RaftIndex(matched_end), 4, 5)
    assert (it.state, it.next_end, it.must_ask) == (ProgressState.REPLICATE, 12, False)
    it.heard_matched_end(RaftIndex(matched_end), 14, 5)
    assert (it.state, it.next_end, it.must_ask) == (state, next_end, must_ask)


def test_no_silence_while_more_arrives() -> None:
    """A disk that takes long to answer is no reason to send again what is on its way."""
    it = replicating()
    for end in range(11, 15):
        it.sent_entries(RaftIndex(end), 1, 1)
    for now, arrived in ((6, 11), (11, 12), (16, 13)):
        it.heard_matched_end(RaftIndex(arrived), now, 5)
        assert (it.state, it.next_end) == (ProgressState.REPLICATE, 14)
    it.heard_matched_end(RaftIndex(13), 21, 5)
    assert (it.state, it.next_end) == (ProgressState.PROBE, 13)


def test_more_patience_with_one_that_is_far_behind() -> None:
    """Megabytes may wait before what it lacks."""
    it = replicating()
    assert it.may_go_by(is_far_behind=True)
    it.sent_entries(RaftIndex(11), 1, 1)
    it.heard_matched_end(RaftIndex(10), 40, 5)
    assert it.state is ProgressState.REPLICATE
    it.heard_matched_end(RaftIndex(10), 41, 5)
    assert it.state is ProgressState.PROBE


def test_a_restart_is_noticed_soon() -> None:
    """It knows less than it had promised: nothing is on its way."""
    it = replicating()
    it.sent_entries(RaftIndex(11), 1, 1)
    it.heard_matched_end(RaftIndex(3), 6, 5)
    assert (it.state, it.next_end) == (ProgressState.PROBE, 10)


def test_the_way_changes_with_an_empty_window() -> None:
    """Requests on two ways would overtake each other."""
    it = replicating()
    assert it.may_go_by(is_far_behind=False)
    it.sent_entries(RaftIndex(11), 1, 1)
    assert not it.may_go_by(is_far_behind=True)
    assert it.accepted(RaftIndex(11), 2, is_promise=True)
    assert it.may_go_by(is_far_behind=True)
    it.sent_entries(RaftIndex(12), 1, 2)
    assert not it.may_go_by(is_far_behind=False)
    assert repr(it) == "replicate match=11 next=12 far inflight=1"
    it.become_probe(RaftIndex(11))
    assert not it.is_far_behind


def test_silence_of_an_idle_replica() -> None:
    """Nothing in flight and nothing missing: nothing to ask."""
    it = replicating()
    it.heard_matched_end(RaftIndex(10), 100, 5)
    assert (it.state, it.must_ask) == (ProgressState.REPLICATE, False)
    assert repr(it) == "replicate match=10 next=10"


def test_a_probe_is_sent_again() -> None:
    """When it, or its answer, was lost."""
    it = progress()
    it.sent_question(1)
    assert repr(it) == "probe match=0 next=10 awaiting"
    it.heard_matched_end(ZERO, 5, 5)
    assert it.is_awaiting
    it.heard_matched_end(ZERO, 6, 5)
    assert not it.is_awaiting


steps = st.lists(
    st.tuples(st.sampled_from(["send", "ask", "accept", "refuse", "beat"]), st.integers(0, 9)),
    max_size=40,
)


@given(steps)
def test_invariants(told: list[tuple[str, int]]) -> None:
    """Whatever is said in whatever order."""
    it = progress(5)
    log_end, now = 5, 0
    for what, number in told:
        now += number
        if what == "send" and not it.is_awaiting and (it.has_room or it.state.value == "probe"):
            log_end += 1 + number
            it.sent_entries(RaftIndex(log_end), number * 9, now)
        elif what == "ask":
            it.sent_question(now)
        elif what == "accept":
            it.accepted(RaftIndex(min(log_end, number * 2)), now, is_promise=number != 3)
        elif what == "refuse" and it.next_end > number:
            it.refused(it.next_end, RaftIndex(number), ZERO, now)
        elif what == "beat":
            it.heard_matched_end(RaftIndex(min(log_end, number * 2)), now, 5)
        assert 0 <= it.match_end <= it.next_end <= log_end
        assert it.inflight_messages <= 3
        assert (it.inflight_bytes == 0) or it.inflight_messages > 0
        assert it.state is not ProgressState.REPLICATE or not it.is_awaiting


def test_a_log_start_is_sent_again_ever_more_rarely() -> None:
    """It may be large, and take long to read."""
    it = progress()
    it.become_catch_up(RaftIndex(50))
    now, waits = 0, []
    for _ in range(5):
        it.sent_question(now)
        began = now
        while it.is_awaiting:
            now += 1
            it.heard_matched_end(ZERO, now, 5)
        waits.append(now - began)
        it.become_catch_up(RaftIndex(50))
        it.is_awaiting = False
    assert waits == [5, 10, 20, 40, 80]
