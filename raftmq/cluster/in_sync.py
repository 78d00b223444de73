"""The reported in-sync set: who keeps up with the leader, as Kafka's clients and operators see it.

A voter is in sync when its flushed end reached the leader's log end at some moment within
`replica.lag.time.max.ms`. Under constant load nobody ever equals a moving end, so an
acknowledgement that reaches the end as it was at the previous one counts from then (as Kafka does).

It is a report and serves min.insync.replicas; Raft's commit rule never looks at it.
"""

from __future__ import annotations

from attrs import define

from raftmq.types import RaftIndex, ReplicaId


@define(slots=True)
class _Follower:
    end_at_last_ack: RaftIndex
    last_ack_ms: float
    caught_up_ms: float


class InSyncTracker:
    """A leader's memory of when each follower was last caught up."""

    __slots__ = ("_followers",)

    def __init__(self) -> None:
        self._followers: dict[ReplicaId, _Follower] = {}

    def reset(self) -> None:
        """A new leadership begins: nobody is known to be caught up."""
        self._followers.clear()

    def forget(self, replica: ReplicaId) -> None:
        """That storage is known to be gone, however lately it was caught up."""
        self._followers.pop(replica, None)

    def forget_former(self, replica: ReplicaId) -> None:
        """Its node runs with this storage now: any other one of that node is gone."""
        for known in [r for r in self._followers if r.node_id == replica.node_id and r != replica]:
            self.forget(known)

    def observe(
        self, replica: ReplicaId, match_end: RaftIndex, log_end: RaftIndex, now_ms: float
    ) -> None:
        """A reply of `replica` came; it has flushed up to `match_end`."""
        follower = self._followers.get(replica)
        if follower is None:
            never = float("-inf")
            follower = self._followers[replica] = _Follower(log_end, now_ms, never)
        elif match_end >= follower.end_at_last_ack:
            follower.caught_up_ms = max(follower.caught_up_ms, follower.last_ack_ms)
        if match_end >= log_end:
            follower.caught_up_ms = now_ms
        follower.end_at_last_ack = log_end
        follower.last_ack_ms = now_ms

    def vouch(self, replica: ReplicaId, now_ms: float) -> None:
        """It is known to have been caught up until now, without a reply."""
        follower = self._followers.get(replica)
        if follower is not None:
            follower.caught_up_ms = follower.last_ack_ms = now_ms

    def is_in_sync(self, replica: ReplicaId, now_ms: float, lag_ms_max: float) -> bool:
        """True when it was caught up within the allowed lag."""
        follower = self._followers.get(replica)
        return follower is not None and now_ms - follower.caught_up_ms <= lag_ms_max
