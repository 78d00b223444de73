"""Configurations, their encoding, and which one is in force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmq.errors import ErrorCode, KafkaError, RemoteProtocolError
from raftmq.raft.membership import Configuration, ConfigurationHistory, check_change
from raftmq.types import NodeId, RaftIndex, ReplicaId, StorageId
from tests.raft.network import configuration, replica

replicas = st.builds(
    ReplicaId,
    st.integers(-(2**31), 2**31 - 1).map(NodeId),
    st.integers(0, 2**64 - 1).map(StorageId),
)


@given(st.lists(replicas, unique=True, max_size=9), st.integers(0, 9))
def test_encoding(members: list[ReplicaId], voters: int) -> None:
    """Comes back equal, in whatever order it was said."""
    one = Configuration(tuple(members[:voters]), tuple(members[voters:]))
    other = Configuration(tuple(members[:voters][::-1]), tuple(members[voters:][::-1]))
    assert one == other
    assert hash(one) == hash(other)
    assert Configuration.decode(memoryview(one.encode())) == one
    assert one.members == one.voters + one.learners
    assert list(one.voters) == sorted(one.voters)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x02\x00\x00\x00\x00",
        b"\x01\x00\x01\x00\x00",
        configuration([1, 2]).encode()[:-1],
        configuration([1, 2]).encode() + b"\x00",
        configuration([1]).encode()[:2] + b"\x02\x00\x00" + configuration([1]).encode()[5:] * 2,
    ],
    ids=["empty", "version", "short", "cut", "long", "twice"],
)
def test_bytes_that_are_no_configuration(payload: bytes) -> None:
    """A peer's bytes are never trusted."""
    with pytest.raises(RemoteProtocolError):
        Configuration.decode(payload)


def test_nobody_twice() -> None:
    """Neither as voter and learner nor as a voter twice."""
    for voters, learners in [([1, 1], []), ([1], [1])]:
        with pytest.raises(KafkaError) as refusal:
            configuration(voters, learners)
        assert refusal.value.code is ErrorCode.INVALID_REPLICA_ASSIGNMENT


def test_changes_move_a_replica() -> None:
    """A replica is a voter or a learner, never both."""
    start = configuration([1, 2], [3])
    assert start.with_voter(replica(3)) == configuration([1, 2, 3])
    assert start.with_learner(replica(2)) == configuration([1], [2, 3])
    assert start.without(replica(3)) == configuration([1, 2])
    assert start.without(replica(9)) == start


@pytest.mark.parametrize(
    ("new", "allowed"),
    [
        (configuration([1, 2, 3, 4]), True),
        (configuration([1, 2]), True),
        (configuration([1, 2, 3], [4, 5]), True),
        (configuration([1, 2], [3, 4]), True),
        (configuration([1, 2, 3]), False),
        (configuration([1, 2, 4]), False),
        (configuration([1]), False),
        (configuration([], [1, 2, 3]), False),
    ],
)
def test_one_voter_changes_at_a_time(new: Configuration, allowed: bool) -> None:
    """Learners may change along with it."""
    if allowed:
        check_change(configuration([1, 2, 3]), new)
        return
    with pytest.raises(KafkaError) as refusal:
        check_change(configuration([1, 2, 3]), new)
    assert refusal.value.code is ErrorCode.INVALID_REPLICA_ASSIGNMENT


def test_history() -> None:
    """In force from the append, settled by the commit, rolled back by a truncation."""
    base, second, third = configuration([1]), configuration([1, 2]), configuration([1, 2, 3])
    history = ConfigurationHistory(base, RaftIndex(4), [(RaftIndex(6), second)])
    assert (history.current, history.current_start) == (second, 6)
    history.append(RaftIndex(9), third)
    assert history.committed(RaftIndex(6)) == (4, base)
    assert history.committed(RaftIndex(7)) == (6, second)
    assert history.committed(RaftIndex(10)) == (9, third)
    assert not history.is_committed(RaftIndex(9))
    assert history.is_committed(RaftIndex(10))
    assert not history.truncate_to(RaftIndex(10))
    assert history.truncate_to(RaftIndex(9))
    assert history.current == second
    history.move_start(RaftIndex(7))
    assert (history.base, history.base_start, history.current_start) == (second, 7, 7)
    assert history.is_committed(RaftIndex(0))
    history.append(RaftIndex(9), third)
    assert history.truncate_to(RaftIndex(8))
    assert history.current == second
    history.reset(base, RaftIndex(40))
    assert (history.current, history.current_start) == (base, 40)
    with pytest.raises(AssertionError):
        history.append(RaftIndex(39), second)
