"""Followers that a new leader reports as in sync before it has heard them.

A new leader knows only those that have flushed the entry of its election. Told as it is, every
change of leaders would take followers out of the ISR that other nodes and clients see, and put them
back a moment later. So a leader goes on with what the last one reported, as in Kafka, for as long
as a follower may lag, or until it was heard to have everything.

Invariants: this is told and nothing counts on it. Acknowledgement, min.insync.replicas, hand-overs
and what a node says of itself go by `Replica.in_sync_replicas`, which does not know of it. It adds
none that the last leader did not name: the report must be that of the epoch that precedes this one
in the log. A leader that reported anything had an entry committed, which every later leader has
(Leader Completeness, Raft §5.4.3), so no leader after that one has reported anything else.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import define

from raftmq.controller.leaders import LeaderRow
from raftmq.replication.replica import Replica
from raftmq.types import LeaderEpoch, RaftGroupId, ReplicaId


@define(slots=True)
class _Presumed:
    leader_epoch: LeaderEpoch
    until_ms: float
    followers: frozenset[ReplicaId]


class PresumedIsr:
    """What is presumed of the followers of all that this node leads."""

    def __init__(self, lag_ms_max: float, is_there: Callable[[ReplicaId], bool]) -> None:
        """`is_there`: its node is connected, alive to the cluster, and has that storage."""
        self._lag_ms_max = lag_ms_max
        self._is_there = is_there
        self._presumed: dict[RaftGroupId, _Presumed] = {}

    def begin(self, replica: Replica, last: LeaderRow | None, now_ms: float) -> None:
        """A leadership begins, and has not been reported yet; `last` is the newest report."""
        self._presumed.pop(replica.group, None)
        epochs = replica.core.epochs
        if (
            last is None
            or last.creation_epoch != replica.group.creation_epoch
            or last.leader_epoch != LeaderEpoch(epochs.term_at_end(epochs.last_start))
        ):
            return
        followers = frozenset(v for v in replica.voters if v.node_id in last.isr)
        until_ms = now_ms + self._lag_ms_max
        self._presumed[replica.group] = _Presumed(replica.leader_epoch, until_ms, followers)

    def report(self, replica: Replica, now_ms: float) -> tuple[ReplicaId, ...]:
        """The voters to report as in sync. What was lost, or heard, is not presumed again."""
        in_sync = replica.in_sync_replicas()
        presumed = self._presumed.get(replica.group)
        if presumed is None:
            return in_sync
        presumed.followers = frozenset(
            follower
            for follower in presumed.followers
            if follower not in in_sync and self._is_there(follower)
        )
        if (
            not presumed.followers
            or now_ms >= presumed.until_ms
            or presumed.leader_epoch != replica.leader_epoch
            or replica.quiescence.is_quiescent  # it began with all in sync but the absent
        ):
            del self._presumed[replica.group]
            return in_sync
        return tuple(v for v in replica.voters if v in in_sync or v in presumed.followers)

    def forget(self, group: RaftGroupId) -> None:
        """Its replica is gone from here."""
        self._presumed.pop(group, None)
