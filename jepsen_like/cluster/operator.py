"""An operator at a node that is down: looks at its logs, and rehearses an unsafe recovery.

Looking (`raftmq log`) must tell whatever a power loss left there, and change nothing. Unsafe
recovery (`raftmq recover`) is for clusters that no promise covers any more, so it is done on a copy
of the disk: the other nodes are lost, damage is accepted, the power fails in between; a repeat must
finish what was begun, and no offset may move.
"""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING

from jepsen_like.disk import SimCrash, SimDisk
from jepsen_like.invariants import InvariantViolation
from raftmq.log.indexes import DamagedIndexError
from raftmq.tools import inspect
from raftmq.tools.unsafe_recovery import (
    GroupReport,
    Place,
    RecoveryRefusedError,
    Verdict,
    accept_loss,
    recover_lost_majorities,
    report_groups,
    report_loss,
)
from raftmq.types import METADATA_TOPIC, ReplicaId

if TYPE_CHECKING:
    from jepsen_like.cluster.node import ClusterNode
    from jepsen_like.cluster.world import ClusterWorld

ROOT = "data"
CHANGES_MAX = 60
"""About so many changes to its disk does the recovery of a node's groups take."""


class Operator:
    """Works at nodes that are down."""

    def __init__(self, world: ClusterWorld) -> None:
        self._world = world

    def visit(self, node: ClusterNode, random: Random) -> None:
        """Look at a node that is down, and sometimes rehearse."""
        assert not node.is_listening
        self._look_at(node)
        if random.random() < 0.5 and node.disk.exists(f"{ROOT}/meta/log-start"):
            self._rehearse(node, random)

    def _look_at(self, node: ClusterNode) -> None:
        disk = node.disk
        before = {path: disk.content(path) for path in disk.files(ROOT)}
        folders = {path.rpartition("/")[0] for path in before if path.endswith("bare.entries")}
        for folder in sorted(folders):
            findings = inspect.verify_folder(disk, folder)
            self._world.note("verified", node.node_id, folder, len(findings))
            for path in disk.files(folder):
                if path.endswith(".log"):
                    _read_segment(disk, path)
                elif path.endswith("index"):
                    with suppress(DamagedIndexError, ValueError):
                        inspect.read_index(disk, path)
            list(inspect.read_bare_entries(disk, f"{folder}/bare.entries"))
            if disk.exists(f"{folder}/log-start"):  # else it died while it made the folder
                inspect.read_log_start(disk, f"{folder}/log-start")
        if {path: disk.content(path) for path in disk.files(ROOT)} != before:
            raise InvariantViolation("LookingChangesNothing", f"node {node.node_id}'s disk")

    def _rehearse(self, node: ClusterNode, random: Random) -> None:
        disk = node.disk.copy(Random(random.getrandbits(32)))
        self._world.note("rehearses", node.node_id)
        for report in self._recover_unsafely(node, disk, random):
            if report.verdict is not Verdict.UNREADABLE:
                topic, _, partition = report.name.rpartition("-")
                self._accept(node, disk, topic, int(partition))

    def _place(self, node: ClusterNode, disk: SimDisk) -> Place:
        identity = ReplicaId(node.node_id, node.storage_id)
        return Place(disk, ROOT, identity, node.open_journal(disk=disk), node.clock)

    def _recover_unsafely(
        self, node: ClusterNode, disk: SimDisk, random: Random
    ) -> list[GroupReport]:
        """All other nodes are lost, and the power goes in the middle of saying so; returns the
        reports of partitions."""
        place, survivors = self._place(node, disk), [node.node_id]
        before = report_groups(place, survivors)
        power_went = False
        disk.crash_after(random.randint(1, CHANGES_MAX))
        try:
            recover_lost_majorities(place, before)
            disk.crash_after(None)
        except SimCrash:
            self._world.note("in the middle of an unsafe recovery", node.node_id)
            disk.crash()
            power_went = True
        place = self._place(node, disk)
        recover_lost_majorities(place, report_groups(place, survivors))
        after = report_groups(place, survivors)
        place.journal.close()
        if len(after.groups) != len(before.groups):
            told = f"{len(before.groups)} groups, then {len(after.groups)}"
            raise InvariantViolation("UnsafeRecoveryIsRepeatable", told)
        for old, new in zip(before.groups, after.groups, strict=True):
            compare(old, new, power_went=power_went)
        return [a for a in after.groups if a.name != METADATA_TOPIC]

    def _accept(self, node: ClusterNode, disk: SimDisk, topic: str, partition: int) -> None:
        """Where records are damaged, the partition does without them; nothing is left to say."""
        place = self._place(node, disk)
        try:
            loss = report_loss(place, topic, partition)
        except RecoveryRefusedError:
            place.journal.close()
            return
        self._world.note("accepts", node.node_id, topic, partition, loss.damaged, loss.cut)
        accept_loss(place, loss)
        try:
            left = report_loss(place, topic, partition)
        except RecoveryRefusedError:
            return
        finally:
            place.journal.close()
        raise InvariantViolation("LossIsAccepted", f"{topic}-{partition}: {left}")


def _read_segment(disk: SimDisk, path: str) -> None:
    file = disk.open(path)
    try:
        end = 0
        for item in inspect.read_segment(file, inspect.base_offset_of(path)):
            if item.position != end or item.size <= 0:
                raise InvariantViolation("NothingIsPassedOver", f"{path}: {item} after {end}")
            end += item.size
    finally:
        file.close()


def compare(old: GroupReport, new: GroupReport, *, power_went: bool) -> None:
    """Who was in need leads on alone; who was not is as before; nobody's records move.

    How far a segment is known to be sound, and that it is damaged, is noted in its index, which is
    a hint and not synced: where the power went, the next look may begin behind damage that was
    told of, or at the front and find what was not. Who accepts a loss reads every byte.

    Raises:
        InvariantViolation: it is not so.
    """
    wanted = Verdict.STAYS if old.verdict is Verdict.RECOVERED else old.verdict
    range_before = (old.log_start, old.log_end, old.damaged)
    range_after = (new.log_start, new.log_end, new.damaged)
    is_known = power_went or new.damaged == old.damaged
    if new.verdict is not wanted or range_before[:2] != range_after[:2] or not is_known:
        raise InvariantViolation(
            "UnsafeRecoveryIsRepeatable",
            f"{old.name}: {old.verdict} {range_before}, then {new.verdict} {range_after}",
        )
