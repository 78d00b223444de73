"""Whether a healed cluster has settled: every group whole, all logs and metadata images equal.

Entries that are under way are no reason to wait: what everybody must have is what was committed, or
appended, a moment ago. All else must hold in one and the same moment. Where two replicas have come
equally far they must be equal, whenever each of them got there.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from attrs import define, field

from jepsen_like.invariants import InvariantViolation
from raftmq.metadata.snapshot import encode_image
from raftmq.partition.partition import Partition
from raftmq.types import RaftGroupId

if TYPE_CHECKING:
    from jepsen_like.cluster.watch import Watcher
    from jepsen_like.cluster.world import ClusterWorld

MOMENT_MS = 500.0
"""For so long something may be under way: some heartbeats, and a flush or two."""


def why_transactions_run(world: ClusterWorld) -> str:
    """Which transactions have not ended, "" when all have, in the metadata and in every log."""
    if not world.options.transactional:
        return ""
    for node in world.present:
        if node.core is None:
            return f"node {node.node_id} is down"
        for known in node.core.engine.image.transactions.ids.values():
            if not known.state.may_begin:
                return f"{known.transactional_id} is {known.state.label} on node {node.node_id}"
    for (node_id, group), watcher in world.watch.machines.items():
        if isinstance(watcher.inner, Partition) and not watcher.replica.log.damaged:
            table = watcher.inner._producers.current()
            if (first := table.first_open_offset) is not None:
                return f"{group}: a transaction from {first} on is open on node {node_id}"
    return ""


@define
class _Marks:
    """How far a group's leader was at the last looks, oldest first; one of a moment ago is kept."""

    seen: deque[tuple[float, int]] = field(factory=deque)

    def of_a_moment_ago(self, now_ms: float, position: int) -> int:
        """Note a position; gives that of a moment ago, the present one while there is none."""
        seen = self.seen
        seen.append((now_ms, position))
        while len(seen) > 1 and seen[1][0] <= now_ms - MOMENT_MS:
            seen.popleft()
        is_old = seen[0][0] <= now_ms - MOMENT_MS
        return min(position, seen[0][1]) if is_old else position


class Settling:
    """Looks again and again, and remembers what it saw a moment ago."""

    def __init__(self, world: ClusterWorld) -> None:
        self._world = world
        self._commits: dict[RaftGroupId, _Marks] = {}
        self._ends: dict[RaftGroupId, _Marks] = {}
        self._versions = _Marks()
        self._images: dict[int, dict[int, bytes]] = {}
        """By version, as each node had it."""

    def why_not_whole(self) -> str:
        """What the groups lack, "" when nothing."""
        world, watch = self._world, self._world.watch
        why = watch.why_not_opened() or watch.why_not_gone()
        if not why and world.elastic is not None:
            why = world.elastic.why_not_done()
        if not why and world.narrower is not None:
            why = world.narrower.why_not_done()
        for group in watch.groups():
            # Every group is looked at, so that each has its marks.
            leaders = watch.leaders(group)
            commit_end = 0
            if leaders:
                replica = watch.machines[leaders[0].node_id, group].replica
                marks = self._commits.setdefault(group, _Marks())
                commit_end = marks.of_a_moment_ago(world.now_ms, replica.core.commit_end)
            if lack := watch.why_not_whole(group, commit_end):
                why = why or f"{group}: {lack}"
        return why

    def why_apart(self) -> str:
        """What the groups lack, or how replicas differ, "" when nothing."""
        why = self.why_not_whole()
        for group in () if why else self._world.watch.groups():
            if lack := self._group_apart(group):
                why = why or f"{group}: {lack}"
        return why or self._images_apart()

    def _group_apart(self, group: RaftGroupId) -> str:
        world, watch = self._world, self._world.watch
        leader = watch.machines[watch.leaders(group)[0].node_id, group]
        watchers = [watch.machines[v.node_id, group] for v in leader.replica.configuration.voters]
        ends = [(w.replica.log.end_index, w.commit_end) for w in watchers]
        marks = self._ends.setdefault(group, _Marks())
        wanted = marks.of_a_moment_ago(world.now_ms, leader.replica.log.end_index)
        common = min(commit_end for _, commit_end in ends)
        if common < wanted:
            return f"ends {ends}, all should have come to {wanted}"
        starts = [int(w.replica.log_start_offset) for w in watchers]
        if len({*starts}) > 1:
            return f"log starts {starts}, all should have dropped the same records"
        digests = [w.digest_at(common) for w in watchers]
        if world.options.is_black_box:
            return ""
        if None in digests:
            return f"not all can be seen below {common}"
        if any(digest != digests[0] for digest in digests):
            raise InvariantViolation("Convergence", f"{group}: logs differ below {common}")
        self._judge_producers(group, watchers)
        return ""

    def _judge_producers(self, group: RaftGroupId, watchers: list[Watcher]) -> None:
        """What logs of the same end say of producers is the same, whatever each was read from."""
        known: dict[int, bytes] = {}
        for watcher in watchers:
            log = watcher.replica.log
            if not isinstance(watcher.inner, Partition) or log.damaged:
                continue
            state = watcher.inner._producers.current().encode()
            if known.setdefault(log.log_end_offset, state) != state:
                told = f"{group}: replicas know different producers below {log.log_end_offset}"
                raise InvariantViolation("ProducersAgree", told)

    def _images_apart(self) -> str:
        world, images = self._world, self._images
        newest = 0
        for node in world.present:
            if node.core is None:
                return f"node {node.node_id} is down"
            image = node.core.engine.image
            newest = max(newest, image.version)
            row = images.setdefault(image.version, {})
            row[node.node_id] = bytes(encode_image(image))
            if len({*row.values()}) > 1:
                told = f"metadata images of version {image.version} differ"
                raise InvariantViolation("Convergence", told)
        wanted = self._versions.of_a_moment_ago(world.now_ms, newest)
        for version in [version for version in images if version < wanted]:
            del images[version]
        # Everybody passes the same versions, though perhaps not at the same time.
        whole = any(len(row) == len(world.present) for row in images.values())
        return "" if whole else f"not all have come to the metadata image of version {wanted}"
