"""Heartbeats that change nothing, which is nearly all of them.

A thousand groups with three replicas exchange some fifty thousand heartbeats and replies a second
on each node. A round of effects for every one would fill a core, delay the next ones, and end in
elections that nobody wins. So what says nothing new is noted and answered on the spot.

Never takes what would move the commit, change a role or owe somebody a message: that is stepped.
"""

from __future__ import annotations

from raftmq.raft.messages import Heartbeat, HeartbeatReply
from raftmq.raft.ready import Role
from raftmq.replication.replica_view import ReplicaView
from raftmq.types import RaftIndex, ReplicaId


class QuietBeats(ReplicaView):
    """The part of a replica that hears that others are alive."""

    _prewritten_end: RaftIndex

    def take_beat(self, message: Heartbeat | HeartbeatReply) -> HeartbeatReply | bool:
        """Take a heartbeat or a reply to one, if nothing else comes of it.

        Returns:
            The reply to send, True when there is none to send, False: `step` the message.
        """
        if self.failure is not None or self._prewritten_end or self._barriers.waiting:
            return False
        if isinstance(message, Heartbeat):
            return self.core.answer(message) or False
        if not self.core.takes_quietly(message):
            return False
        self._observe(message.sender)
        return True

    def _observe(self, sender: ReplicaId) -> None:
        if self.core.role is Role.LEADER:
            end, now_ms = self.log.end_index, self._clock.monotonic_ms()
            self._in_sync.observe(sender, self.flushed_end_of(sender), end, now_ms)
