"""The small parts of a replica: outbox, in-sync set, retention clock, membership."""

from __future__ import annotations

from random import Random
from typing import ClassVar

import pytest

from jepsen_like.disk import SimDisk
from raftmq.log.journal import GroupState, HardStateJournal
from raftmq.raft.membership import Configuration
from raftmq.raft.messages import AppendReply, VoteReply
from raftmq.replication.clocks import RetentionClock
from raftmq.replication.durability import Outbox
from raftmq.replication.leader_state import InSyncTracker
from raftmq.replication.membership import next_configuration
from raftmq.replication.opening import is_forgotten
from raftmq.types import NodeId, RaftIndex, ReplicaId, StorageId, Term


def replica(node: int, storage: int = 1) -> ReplicaId:
    return ReplicaId(NodeId(node), StorageId(storage))


A, B, C, C2 = replica(1), replica(2), replica(3), replica(3, 2)


def vote(term: int) -> VoteReply:
    return VoteReply(Term(term), A, B, True)


def ack(end: int, term: int = 1) -> AppendReply:
    return AppendReply(Term(term), A, B, True, RaftIndex(end))


class TestOutbox:
    def test_waits_for_both_journal_and_log(self) -> None:
        outbox = Outbox()
        outbox.hold(vote(1), 5, RaftIndex(10))
        assert outbox.release(4, RaftIndex(10), Term(1)) == []
        assert outbox.release(5, RaftIndex(9), Term(1)) == []
        assert outbox.release(5, RaftIndex(10), Term(1)) == [vote(1)]
        assert len(outbox) == 0

    def test_drops_promises_of_an_older_term(self) -> None:
        outbox = Outbox()
        outbox.hold(vote(1), 1, RaftIndex(0))
        outbox.hold(vote(2), 2, RaftIndex(0))
        assert outbox.release(9, RaftIndex(9), Term(2)) == [vote(2)]

    def test_a_truncation_lets_go_of_positions_that_are_gone(self) -> None:
        outbox = Outbox()
        outbox.hold(vote(1), 1, RaftIndex(100))
        outbox.cap(RaftIndex(40))
        assert outbox.release(1, RaftIndex(40), Term(1)) == [vote(1)]

    def test_a_later_ack_of_the_same_flush_replaces_the_earlier(self) -> None:
        outbox = Outbox()
        outbox.hold(ack(5), 1, RaftIndex(5))
        outbox.hold(ack(5), 1, RaftIndex(5))
        outbox.hold(ack(8), 1, RaftIndex(8))
        assert outbox.release(1, RaftIndex(5), Term(1)) == [ack(5)]
        assert outbox.release(1, RaftIndex(8), Term(1)) == [ack(8)]


class TestInSync:
    def test_reaching_an_earlier_end_counts_from_then(self) -> None:
        tracker = InSyncTracker(100.0)
        tracker.observe(B, RaftIndex(0), RaftIndex(10), 0.0)
        assert not tracker.is_in_sync(B, 0.0, 100.0)
        tracker.observe(B, RaftIndex(10), RaftIndex(20), 50.0)
        assert tracker.is_in_sync(B, 90.0, 100.0)
        assert not tracker.is_in_sync(B, 101.0, 100.0)

    def test_a_silent_follower_leaves(self) -> None:
        tracker = InSyncTracker(100.0)
        tracker.observe(B, RaftIndex(10), RaftIndex(10), 0.0)
        assert tracker.is_in_sync(B, 100.0, 100.0)
        assert not tracker.is_in_sync(B, 101.0, 100.0)

    def test_nobody_is_in_sync_at_first(self) -> None:
        assert not InSyncTracker(100.0).is_in_sync(B, 0.0, 100.0)

    def test_who_lost_its_storage_is_out_of_sync_at_once(self) -> None:
        tracker = InSyncTracker(100.0)
        tracker.observe(B, RaftIndex(10), RaftIndex(10), 0.0)
        assert tracker.is_in_sync(B, 1.0, 100.0)
        tracker.forget(B)
        assert not tracker.is_in_sync(B, 1.0, 100.0)


DAY = 86_400_000


class TestRetentionClock:
    @pytest.mark.parametrize(
        ("clocks", "expected"),
        [
            ([1000, 1010, 1005], 1005),
            ([1000 + 15 * DAY, 1000, 1001], 1001),
            ([1000 - 15 * DAY, 1000, 1001], 1000),
        ],
        ids=["agreeing", "one ahead", "one behind"],
    )
    def test_a_majority_decides(self, clocks: list[int], expected: int) -> None:
        assert RetentionClock().read(clocks, 2, 0.0) == expected

    def test_no_majority_no_time(self) -> None:
        assert RetentionClock().read([5], 2, 0.0) is None

    def test_a_jump_of_all_clocks_counts_only_as_time_passes(self) -> None:
        clock = RetentionClock()
        assert clock.read([1000, 1000, 1000], 2, 0.0) == 1000
        jumped = [1000 + 15 * DAY] * 3
        assert clock.read(jumped, 2, 500.0) == 1500
        assert clock.read([900] * 3, 2, 600.0) == 1500


def config(voters: list[ReplicaId], learners: list[ReplicaId] | None = None) -> Configuration:
    return Configuration(tuple(voters), tuple(learners or []))


class TestMembershipChanges:
    STORAGES: ClassVar = {NodeId(3): StorageId(2), NodeId(2): StorageId(1)}

    @pytest.mark.parametrize(
        ("before", "live", "caught_up", "after"),
        [
            (config([A, B, C]), [A, B], [], config([A, B, C], [C2])),
            (config([A, B, C], [C2]), [A, B, C2], [], None),
            (config([A, B, C], [C2]), [A, B, C2], [C2], config([A, B, C, C2])),
            (config([A, B, C, C2]), [A, B, C2], [C2], config([A, B, C2])),
            (config([A, B, C2]), [A, B, C2], [C2], None),
            (config([A, B], [C]), [A, B], [], config([A, B], [C, C2])),
            (config([A, B], [C, C2]), [A, B], [], config([A, B], [C2])),
        ],
        ids=["admit", "wait", "promote", "remove", "done", "learner", "old learner"],
    )
    def test_steps(
        self,
        before: Configuration,
        live: list[ReplicaId],
        caught_up: list[ReplicaId],
        after: Configuration | None,
    ) -> None:
        assert next_configuration(before, self.STORAGES, live, caught_up) == after

    def test_no_step_below_a_quorum_of_live_voters(self) -> None:
        before = config([A, B, C], [C2])
        assert next_configuration(before, self.STORAGES, [A, C2], [C2]) is None
        assert next_configuration(before, self.STORAGES, [A, B, C2], [C2]) is not None


@pytest.mark.parametrize("is_empty", [True, False])
def test_with_the_journal_lost_no_folder_is_believed_to_be_new(is_empty: bool) -> None:
    disk = SimDisk(Random(1))
    disk.make_directories("data")
    lost = HardStateJournal.open(disk, "data/state.journal", is_expected=True)
    promised = GroupState(bootstrapped=StorageId(7))
    assert is_forgotten(lost, None, is_empty=is_empty)
    assert is_forgotten(lost, promised, is_empty=is_empty) == is_empty
    lost.accept_damage()
    assert not is_forgotten(lost, None, is_empty=is_empty)
