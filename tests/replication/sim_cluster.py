"""Three healthy simulated nodes for tests that want one fault at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raftmq.records import NewRecord, build_batch, parse_header
from raftmq.replication.replica import Replica
from raftmq.types import Offset
from tests.replication.sim_nodes import Options, SimNode, World


class SimCluster:
    """A world without a nemesis, and shortcuts into its first group."""

    def __init__(self, seed: int = 1, **options: Any) -> None:
        self.world = World(seed, Options(**options))
        self.group = self.world.groups[0]
        self.world.start()
        self.until(lambda: bool(self.leaders()) and self.world.is_whole())

    @property
    def nodes(self) -> list[SimNode]:
        return self.world.nodes

    def leaders(self) -> list[SimNode]:
        return [n for n in self.world.leaders(self.group) if n.replicas[self.group].is_writable]

    @property
    def leader(self) -> SimNode:
        return self.leaders()[0]

    def followers(self) -> list[SimNode]:
        leader = self.leader
        return [node for node in self.nodes if node is not leader]

    def replica(self, node: SimNode) -> Replica:
        return node.replicas[self.group]

    def run(self, ms: float) -> None:
        self.world.run_until(self.world.now_ms + ms)

    def until(self, condition: Callable[[], bool], within_ms: float = 5_000) -> None:
        """Let time pass until something holds; fails when it never does."""
        deadline_ms = self.world.now_ms + within_ms
        while not condition():
            assert self.world.now_ms < deadline_ms, "it never came to pass"
            self.run(5.0)

    def append(self, node: SimNode | None = None, *, count: int = 1, size: int = 10) -> Offset:
        """Append a batch at a leader; not yet committed."""
        node = node or self.leader
        batch = build_batch([NewRecord(None, b"v" * size)] * count, timestamp=1_700_000_000_000)
        return self.replica(node).append(batch, parse_header(batch))

    def commit(self, count: int = 1, *, size: int = 10) -> None:
        """Append batches one by one and wait until each is committed everywhere that is up."""
        for _ in range(count):
            leader = self.replica(self.leader)
            self.append(size=size)
            end = leader.log_end_offset
            self.until(lambda end=end, leader=leader: leader.high_watermark >= end)  # type: ignore[misc]

    def settle(self) -> None:
        """Wait until all that are up have the same, committed and flushed."""

        def is_settled() -> bool:
            ends = [
                (r.log.end_index, r.log.flushed_end, r.commit_end)
                for r in (self.replica(node) for node in self.nodes if node.is_up)
            ]
            return len({*ends}) == 1 and len({*ends[0]}) == 1

        self.until(is_settled)

    def isolate(self, node: SimNode) -> None:
        for other in self.nodes:
            if other is not node:
                self.world.network.cut(node.node_id, other.node_id)
                self.world.network.cut(other.node_id, node.node_id)

    def mend(self) -> None:
        self.world.network.mend_all()
