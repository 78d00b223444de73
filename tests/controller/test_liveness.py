"""Who is fenced when: silence, a lost connection, another registration, a new controller."""

from __future__ import annotations

from raftmq.controller.controller import Liveness
from raftmq.types import NodeId

ONE, TWO = NodeId(1), NodeId(2)
LIVE = [(ONE, 10), (TWO, 20)]


def liveness() -> Liveness:
    made = Liveness(2_000, 500)
    made.begin_term(LIVE, 0)
    return made


def test_a_new_controller_gives_everybody_a_session() -> None:
    made = liveness()
    assert made.expired(LIVE, 1_999) == []
    assert made.expired(LIVE, 2_000) == [ONE, TWO]


def test_a_lost_connection_leaves_little_time() -> None:
    made = liveness()
    made.heard(ONE, 10, 5, 1_000)
    made.heard(TWO, 20, 5, 1_000)
    made.lost(ONE, 1_100)
    made.lost(ONE, 1_300)
    assert made.expired(LIVE, 1_599) == []
    assert made.expired(LIVE, 1_600) == [ONE], "counted from the first loss"


def test_who_is_heard_again_was_not_lost() -> None:
    made = liveness()
    made.lost(ONE, 100)
    made.heard(ONE, 10, 5, 300)
    assert made.expired(LIVE, 1_000) == []
    assert made.applied_version(ONE, 10) == 5
    made.lost(ONE, 1_000)
    assert made.expired(LIVE, 1_500) == [ONE]


def test_who_is_unfit_is_what_the_last_heartbeat_of_this_registration_said() -> None:
    made = liveness()
    assert made.unfit() == set()
    made.heard(ONE, 10, 5, 100, is_unfit=True)
    made.heard(TWO, 20, 5, 100)
    assert made.unfit() == {ONE}
    made.heard(ONE, 10, 6, 200)
    assert made.unfit() == set()
    made.heard(TWO, 20, 6, 200, is_unfit=True)
    assert made.expired([(ONE, 10), (TWO, 21)], 300) == []
    assert made.unfit() == set(), "it started again"


def test_room_is_what_a_broker_last_said_in_any_term() -> None:
    made = liveness()
    made.heard(ONE, 10, 5, 100, replicas_max=50)
    made.heard(TWO, 20, 5, 100)
    made.begin_term(LIVE, 200)
    made.heard(ONE, 11, 5, 300)
    assert made.replicas_max == {ONE: 50}
    made.heard(ONE, 11, 5, 300, replicas_max=60)
    assert made.replicas_max == {ONE: 60}


def test_a_loss_before_a_registration_says_nothing_of_it() -> None:
    made = liveness()
    made.lost(ONE, 100)
    again = [(ONE, 30)]
    assert made.expired(again, 800) == [], "the process that died is not this one"
    assert made.expired(again, 2_799) == []
    assert made.expired(again, 2_800) == [ONE]
    made.lost(NodeId(9), 0)  # of one nobody knows


def test_who_is_fenced_is_silent_once_it_was_not_heard_for_a_session() -> None:
    made = liveness()
    fenced = NodeId(3)
    assert not made.is_silent(fenced, 30, 500), "this controller could not hear it yet"
    assert not made.is_silent(fenced, 30, 2_499)
    assert made.is_silent(fenced, 30, 2_500)
    made.heard(fenced, 30, 0, 2_600)
    assert not made.is_silent(fenced, 30, 4_599)
    assert made.is_silent(fenced, 30, 4_600)
    assert not made.is_silent(fenced, 40, 4_600), "another process has registered"


def test_a_broker_is_heard_by_its_heartbeats_alone() -> None:
    made = liveness()
    assert not made.is_heard(NodeId(3), 30, 0)
    made.heard(NodeId(3), 30, 5, 1_000)  # it is fenced
    assert made.is_heard(NodeId(3), 30, 2_999)
    assert not made.is_heard(NodeId(3), 31, 2_999), "another registration"
    assert not made.is_heard(NodeId(3), 30, 3_000), "a session ago"
    made.heard(NodeId(3), 30, 5, 3_000)
    made.lost(NodeId(3), 3_100)
    assert not made.is_heard(NodeId(3), 30, 3_100), "its connection has ended"
