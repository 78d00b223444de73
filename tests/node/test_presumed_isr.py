"""What a new leader tells of followers that it has not heard yet: what the last one told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from raftmq.controller.leaders import LeaderRow
from raftmq.node.presumed_isr import PresumedIsr
from raftmq.raft.epoch_history import EpochHistory
from raftmq.types import (
    LeaderEpoch,
    NodeId,
    RaftGroupId,
    RaftIndex,
    ReplicaId,
    StorageId,
    Term,
    TopicId,
)

ONE, TWO, THREE = VOTERS = tuple(ReplicaId(NodeId(n), StorageId(n)) for n in (1, 2, 3))
TOPIC = TopicId(UUID(int=1))
LAG_MS = 10_000.0


class World:
    """The first of three replicas leads in term 5; the leader before that led in term 3."""

    def __init__(self) -> None:
        self.away: set[ReplicaId] = set()
        self.in_sync: tuple[ReplicaId, ...] = (ONE,)
        self.presumed = PresumedIsr(LAG_MS, lambda follower: follower not in self.away)
        terms = [(Term(2), RaftIndex(0)), (Term(3), RaftIndex(10)), (Term(5), RaftIndex(20))]
        self.replica: Any = SimpleNamespace(
            group=RaftGroupId(TOPIC, 0, 7),
            leader_epoch=5,
            voters=VOTERS,
            core=SimpleNamespace(epochs=EpochHistory(terms, log_end=RaftIndex(21))),
            quiescence=SimpleNamespace(is_quiescent=False),
            in_sync_replicas=lambda: self.in_sync,
        )

    def begin(self, isr: tuple[int, ...], epoch: int = 3, creation_epoch: int = 7) -> None:
        named = tuple(NodeId(n) for n in isr)
        ids = tuple(voter.node_id for voter in VOTERS)
        row = LeaderRow(
            TOPIC, 0, LeaderEpoch(epoch), 4, NodeId(3), named, ids, creation_epoch=creation_epoch
        )
        self.presumed.begin(self.replica, row, 0.0)

    def report(self, now_ms: float = 0.0) -> tuple[ReplicaId, ...]:
        return self.presumed.report(self.replica, now_ms)


def test_those_that_the_last_leader_named_are_reported_for_as_long_as_they_may_lag() -> None:
    world = World()
    world.begin((1, 2))
    assert world.report() == (ONE, TWO)
    assert world.replica.in_sync_replicas() == (ONE,), "nothing counts on it"
    assert world.report(LAG_MS - 1) == (ONE, TWO)
    assert world.report(LAG_MS) == (ONE,)
    assert world.report(0.0) == (ONE,), "that is over"


def test_nothing_is_presumed_before_a_leadership_has_begun() -> None:
    world = World()
    world.presumed.begin(world.replica, None, 0.0)
    assert world.report() == (ONE,)


@pytest.mark.parametrize("epoch", [2, 4, 5, 6])
def test_a_report_that_is_not_of_the_leader_before_says_nothing(epoch: int) -> None:
    """The leader of term 3 may have dropped whom the one of term 2 named."""
    world = World()
    world.begin((1, 2, 3), epoch=epoch)
    assert world.report() == (ONE,)


@pytest.mark.parametrize("creation_epoch", [-1, 6, 8])
def test_nor_does_that_of_another_partition_of_this_number(creation_epoch: int) -> None:
    world = World()
    world.begin((1, 2, 3), creation_epoch=creation_epoch)
    assert world.report() == (ONE,)


def test_a_follower_that_was_lost_or_heard_is_in_sync_when_it_says_so() -> None:
    world = World()
    world.begin((1, 2, 3))
    assert world.report() == VOTERS
    world.away = {TWO}
    assert world.report() == (ONE, THREE)
    world.away.clear()
    assert world.report() == (ONE, THREE)
    world.in_sync = (ONE, THREE)
    assert world.report() == (ONE, THREE)
    world.in_sync = (ONE,)
    assert world.report() == (ONE,), "it was heard, and is behind since"


def test_only_voters_are_reported() -> None:
    world = World()
    world.begin((1, 2, 3))
    world.replica.voters = (ONE, THREE)
    assert world.report() == (ONE, THREE)


def test_it_is_of_one_leadership_of_one_replica() -> None:
    world = World()
    world.begin((1, 2))
    world.replica.leader_epoch = 6
    assert world.report() == (ONE,)
    world = World()
    world.begin((1, 2))
    world.presumed.forget(world.replica.group)
    assert world.report() == (ONE,)


def test_quiescence_knows_who_was_absent() -> None:
    world = World()
    world.begin((1, 2, 3))
    world.replica.quiescence.is_quiescent = True
    world.in_sync = (ONE, THREE)
    assert world.report() == (ONE, THREE)
