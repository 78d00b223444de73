"""Who watches a healed node and restarts it for what a failing disk left behind.

Looks where a person would: a replica that has stopped says why, and one that never began is named
by `/status` as not running. Never looks at what only a simulation can see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from raftmq.node.composition import NodeCore
from raftmq.node.status import not_running
from raftmq.replication.replica import DISK_FULL

if TYPE_CHECKING:
    from jepsen_like.cluster.node import ClusterNode

MISSING_MS: Final = 3_000.0
"""A partition opens in less, also when all of a node do."""


class Supervisor:
    """Of one node."""

    def __init__(self, node: ClusterNode) -> None:
        self._node = node
        self._missing_in: tuple[int, float] | None = None
        self.missing: list[dict[str, Any]] = []
        """What a failing disk kept from beginning, at the last look."""

    def look(self) -> None:
        """Restart the node where that is what helps."""
        node = self._node
        if node.core is None:
            return
        failures = [r.failure for r in node.core.plane.multiraft.replicas.values() if r.failure]
        faults = node.world.counts.faults
        if "failed-sync" in faults:
            failures += self._missing_for_long(node.core)
        elif failures and "full-disk" in faults:
            # A bare entry beyond its reserve is the only thing that a full disk may stop.
            broken = [why for why in failures if not why.startswith(DISK_FULL)]
            if broken:
                node.world.watch.invariants.breach("FullDiskIsSurvived", broken[0])
        if failures:
            node.kill(f"a replica failed: {failures[0]}")
            node.restart_later()

    def _missing_for_long(self, core: NodeCore) -> list[str]:
        """What could not begin, once this process has lacked it for seconds."""
        topics = core.machine.image.topics_by_id()
        self.missing = missing = [row for topic in topics for row in not_running(core, topic)]
        life, now_ms = self._node.life, self._node.world.now_ms
        if not missing:
            self._missing_in = None
            return []
        if self._missing_in is None or self._missing_in[0] != life:
            self._missing_in = life, now_ms
        return [f"not running: {missing}"] if now_ms - self._missing_in[1] > MISSING_MS else []
