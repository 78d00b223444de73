"""The node's part in catch-up: worker threads that read, and the limits on what may leave.

Reading ahead of replicas that are far behind must neither block the loop nor wait behind flushes,
so it has threads of its own. A chunk leaves when the rate allows it and the peer's stream has room:
what waits for a peer is bounded, and what was not sent need not be sent twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from raftmq.ports import DiskError, Runnable
from raftmq.replication.catch_up import CatchUpRate
from raftmq.runtime.flusher import Flusher
from raftmq.runtime.peer_links import PeerLinks
from raftmq.types import NodeId

READERS: Final = 2


class NodeCatchUp:
    """`CatchUp` of a real node."""

    def __init__(self, links: PeerLinks, rate: CatchUpRate) -> None:
        self._links = links
        self._workers = Flusher(READERS, "reader", patience_s=0.0)
        self._menders = Flusher(1, "mender")
        self.rate = rate

    def run(self, job: Runnable, done: Callable[[DiskError | None], None]) -> None:
        """Run it in a worker thread."""
        self._workers.submit(job, done)

    def run_long(self, job: Runnable, done: Callable[[DiskError | None], None]) -> None:
        """Run it in the thread for long work."""
        self._menders.submit(job, done)

    def admit(self, to: NodeId, size_bytes: int, batches: int, *, is_needed: bool) -> bool:
        """True when a chunk may leave now."""
        return self._links.has_room_for_stored(to, size_bytes) and self.rate.admit(
            size_bytes, batches, is_needed=is_needed
        )

    def close(self) -> None:
        """End the threads after what they are at; the rest is for a later life."""
        self._workers.close(drop=True)
        self._menders.close(drop=True)
