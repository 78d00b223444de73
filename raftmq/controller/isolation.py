"""What a broker does that sees no majority of the metadata group for long, or whose disk fails it.

It serves plain produce and fetch on, but its metadata grows old: topics are deleted, configs
change, brokers come and go without it. So where another in-sync voter of a partition it leads still
sees the majority, it hands the leadership to that one; it asks first, since that node may be cut
off as well. Leaderships won while cut off go the same way. Coordinator work ends by itself: its
barriers are not answered any more. With a full disk it refuses records that others could take, with
one that does not answer it cannot count itself, and while a follower is behind nothing is committed
under it: it hands over likewise, to who is better off. It never touches data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, Protocol

from raftmq.promise import Promise
from raftmq.types import NodeId, ReplicaId

ASK_EVERY_MS: Final = 1_000.0


class LedReplica(Protocol):
    """A replica that leads its partition here."""

    @property
    def is_handing_over(self) -> bool: ...
    def in_sync_replicas(self) -> tuple[ReplicaId, ...]: ...
    def transfer_leadership(self, node_id: NodeId) -> bool: ...


class Isolation:
    """Hands leaderships over while this broker is cut off."""

    def __init__(
        self,
        node_id: NodeId,
        *,
        is_isolated: Callable[[], bool],
        ask: Callable[[NodeId], Promise[bool]],
        led: Callable[[], Iterable[LedReplica]],
    ) -> None:
        """`ask` tells whether another node could do better; `led` gives what is led here."""
        self._node_id = node_id
        self._is_isolated = is_isolated
        self._ask = ask
        self._led = led
        self._next_ms = 0.0
        self.handed_over_count = 0

    def tick(self, now_ms: float) -> None:
        """Ask the peers of what is led here, once a second while cut off."""
        if now_ms < self._next_ms or not self._is_isolated():
            return
        self._next_ms = now_ms + ASK_EVERY_MS
        for node_id in sorted(self._peers()):
            self._ask(node_id).when_done(partial(self._answered, node_id))

    def _peers(self) -> set[NodeId]:
        peers = {r.node_id for replica in self._led() for r in replica.in_sync_replicas()}
        return peers - {self._node_id}

    def _answered(self, node_id: NodeId, told: Promise[bool]) -> None:
        if told.error is not None or not told.result() or not self._is_isolated():
            return
        for replica in self._led():
            if replica.is_handing_over:
                continue  # asking somebody else now would make two stand against each other
            if any(r.node_id == node_id for r in replica.in_sync_replicas()):
                self.handed_over_count += replica.transfer_leadership(node_id)
