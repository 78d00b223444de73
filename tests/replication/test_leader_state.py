"""Who is reported in sync: by the age of what a follower lacks, whatever is on its way."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from raftmq.records import NewRecord, build_batch
from raftmq.replication.leader_state import SAMPLES, InSyncTracker
from raftmq.types import Buffer, NodeId, RaftIndex, ReplicaId, StorageId
from tests.replication.three_nodes import IDS, ThreeNodes

A, B = (ReplicaId(NodeId(n), StorageId(n)) for n in (2, 3))
LAG_MS = 10_000.0


def under_load(
    tracker: InSyncTracker, behind_ms: float, seconds: Iterable[int], rate: int = 1000
) -> float:
    """A follower acknowledges every 5 ms what was appended `behind_ms` ago."""
    now_ms = 0.0
    for second in seconds:
        for step in range(200):
            now_ms = second * 1_000.0 + step * 5
            log_end = RaftIndex(int(now_ms * rate / 1_000))
            match_end = RaftIndex(max(0, int((now_ms - behind_ms) * rate / 1_000)))
            tracker.observe(A, match_end, log_end, now_ms)
    return now_ms


@pytest.mark.parametrize("behind_ms", [0.0, 20.0, 2_000.0, 9_000.0])
def test_a_follower_that_is_steadily_a_little_behind_is_in_sync(behind_ms: float) -> None:
    """With megabytes under way it never has what the log's end was at its last reply."""
    tracker = InSyncTracker(LAG_MS)
    now_ms = under_load(tracker, behind_ms, range(60))
    assert tracker.is_in_sync(A, now_ms, LAG_MS)
    assert not tracker.is_in_sync(A, now_ms, behind_ms - 1_000) or behind_ms < 1_000


def test_a_follower_that_is_further_behind_is_not() -> None:
    tracker = InSyncTracker(LAG_MS)
    assert not tracker.is_in_sync(A, under_load(tracker, 12_000, range(60)), LAG_MS)


def test_a_follower_that_says_nothing_leaves_and_comes_back() -> None:
    tracker = InSyncTracker(LAG_MS)
    now_ms = under_load(tracker, 20, range(5))
    assert tracker.is_in_sync(A, now_ms + LAG_MS - 200, LAG_MS)
    assert not tracker.is_in_sync(A, now_ms + LAG_MS + 1, LAG_MS)
    tracker.observe(A, RaftIndex(30_000), RaftIndex(30_000), now_ms + 20_000)
    assert tracker.is_in_sync(A, now_ms + 20_000, LAG_MS)


def test_an_idle_log_keeps_its_followers_in_sync() -> None:
    tracker = InSyncTracker(LAG_MS)
    for beat in range(1_000):
        tracker.observe(A, RaftIndex(7), RaftIndex(7), beat * 50.0)
    assert tracker.is_in_sync(A, 50_000, LAG_MS)
    tracker.observe(A, RaftIndex(7), RaftIndex(900), 50_010.0)
    assert tracker.is_in_sync(A, 50_010 + LAG_MS - 100, LAG_MS), "it had all but a moment ago"


def test_a_dead_follower_costs_no_memory_and_spoils_nothing() -> None:
    tracker = InSyncTracker(LAG_MS)
    tracker.observe(B, RaftIndex(0), RaftIndex(10), 0.0)
    now_ms = under_load(tracker, 2_000, range(60))
    assert tracker.is_in_sync(A, now_ms, LAG_MS)
    assert not tracker.is_in_sync(B, now_ms, LAG_MS)
    assert len(tracker._ends) <= SAMPLES + 1


def test_what_is_forgotten() -> None:
    tracker = InSyncTracker(LAG_MS)
    tracker.observe(A, RaftIndex(1), RaftIndex(1), 0.0)
    again = ReplicaId(A.node_id, StorageId(99))
    tracker.observe(again, RaftIndex(1), RaftIndex(1), 0.0)
    tracker.forget_former(again)
    assert not tracker.is_in_sync(A, 0, LAG_MS)
    assert tracker.is_in_sync(again, 0, LAG_MS)
    tracker.vouch(again, 5_000)
    assert tracker.is_in_sync(again, 14_000, LAG_MS)
    tracker.reset()
    tracker.vouch(again, 5_000)
    assert not tracker.is_in_sync(again, 5_000, LAG_MS)


def test_a_lag_is_known_once_a_follower_had_everything() -> None:
    tracker = InSyncTracker(LAG_MS)
    assert tracker.lag_ms(A, 0.0) is None
    tracker.observe(A, RaftIndex(3), RaftIndex(7), 10.0)
    assert tracker.lag_ms(A, 20.0) is None
    tracker.observe(A, RaftIndex(7), RaftIndex(7), 30.0)
    assert tracker.lag_ms(A, 50.0) == 20.0


def test_who_left_the_group_comes_back_as_a_stranger(tmp_path: Path) -> None:
    """Its data was deleted meanwhile, and nothing that it had before makes it a voter again."""
    nodes = ThreeNodes(tmp_path)
    replica = nodes.leader.replica
    nodes.tick()
    member = next(one for one in IDS if one != replica.self_id)
    assert replica.has_all_of(member, 500)
    nodes.stopped = member.node_id
    replica.change_membership(replica.configuration.without(member))
    for _ in range(replica.config.election_ticks):  # between two steps of a leader's membership
        nodes.tick()
    replica.change_membership(replica.configuration.with_learner(member))
    nodes.settle()
    assert member in replica.learners
    assert not replica.has_all_of(member, 500)


def test_late_answers_of_a_former_life_count_for_nothing(tmp_path: Path) -> None:
    """They left before the replica was removed, and arrive when it is a member again, without its
    data: the leader takes it neither for there nor for caught up, so it gets no vote."""
    nodes = ThreeNodes(tmp_path)
    replica = nodes.leader.replica
    member = next(one for one in IDS if one != replica.self_id)
    here, there = replica.self_id.node_id, member.node_id
    deliver, late = nodes.multirafts[here].deliver, list[Buffer]()

    def withhold(sender: NodeId, frame: Buffer) -> None:
        if sender == there:
            late.append(frame)
        else:
            deliver(sender, frame)

    nodes.multirafts[here].deliver = withhold  # type: ignore[method-assign]
    nodes.produce(build_batch([NewRecord(None, b"v")], timestamp=1))
    for _ in range(replica.config.heartbeat_ticks):
        nodes.tick()
    nodes.stopped = there
    replica.change_membership(replica.configuration.without(member))
    for _ in range(replica.config.election_ticks):
        nodes.tick()
    replica.change_membership(replica.configuration.with_learner(member))
    nodes.settle()
    known = replica.core.progress[member]
    for _ in range(replica.config.election_ticks):
        nodes.tick()
    heard_tick = known.last_heard_tick
    assert len(late) > 1
    for frame in late:
        deliver(there, frame)
    assert replica.core.progress[member] is known
    assert not replica.has_all_of(member, 500)
    assert (known.match_end, known.last_heard_tick) == (0, heard_tick)
    nodes.multirafts[here].deliver = deliver  # type: ignore[method-assign]
    nodes.resume()
    for _ in range(replica.config.heartbeat_ticks):
        nodes.tick()
    assert replica.has_all_of(member, 500), "it had kept all, and says so as a member"
