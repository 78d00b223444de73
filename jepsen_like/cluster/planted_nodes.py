"""Bugs planted in what nodes do with disks, damage, peers and bad input.

Each patches the product's own modules and undoes it, with the options that stress what it breaks,
what it breaks, and what it must be caught by.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final

from attrs import evolve

from jepsen_like.bug import Bug, nothing, patching
from jepsen_like.cluster import stress
from raftmq import records
from raftmq.controller.broker_lifecycle import BrokerLifecycle
from raftmq.controller.leaders import Isolation
from raftmq.errors import CorruptBatchError, RemoteProtocolError
from raftmq.log import batch_reader
from raftmq.log import journal as journal_file
from raftmq.log.bare_entries import BareEntries
from raftmq.log.journal import GroupState, JournalRecord
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.log.segment import Segment
from raftmq.node.partitions import Partitions
from raftmq.partition import produce_checks
from raftmq.ports import DiskError, DiskFullError
from raftmq.raft import leader
from raftmq.raft import membership as raft_membership
from raftmq.raft.membership import Configuration, check_change
from raftmq.raft.messages import Heartbeat
from raftmq.replication import membership, opening
from raftmq.replication.membership import MembershipChanges
from raftmq.replication.repair import Repairer
from raftmq.replication.replica import Replica
from raftmq.runtime.data_folder import DataFolder
from raftmq.server.kafka.dispatch import Dispatcher
from raftmq.types import NodeId, RaftIndex, ReplicaId

_unlocked = DataFolder.unlocked.__func__  # type: ignore[attr-defined]  # a classmethod's function


def _same_storage(cls: type[DataFolder], /, disk: Any, root: str, **named: Any) -> DataFolder:
    node_id: NodeId = named["node_id"]
    folder: DataFolder = _unlocked(cls, disk, root, **{**named, "draw": 1_000 + node_id})
    return folder


_sound_copy = journal_file._sound_copy
_check_batch_at = records.check_batch_at


def _check_all_but_the_sum(view: memoryview, position: int) -> Any:
    try:
        return _check_batch_at(view, position)
    except CorruptBatchError as error:
        if "CRC" not in error.message:
            raise
        return records.parse_header(view, position)


_append_batch = ReplicatedLog.append_batch


def _append_or_fail(self: ReplicatedLog, *arguments: Any, **named: Any) -> None:
    """A full disk is taken for a broken one."""
    try:
        _append_batch(self, *arguments, **named)
    except DiskFullError as error:
        raise DiskError(str(error)) from error


_append = Replica.append


_perform = Replica._perform


def _perform_and_hold_heartbeats(self: Replica, ready: Any) -> None:
    """Heartbeats leave with what has to be flushed first."""
    beats = tuple(m for m in ready.send_now if isinstance(m, Heartbeat))
    if beats and self.log.flushed_end < self.log.end_index:
        rest = tuple(m for m in ready.send_now if not isinstance(m, Heartbeat))
        ready = evolve(ready, send_now=rest, send_after_flush=(*ready.send_after_flush, *beats))
    _perform(self, ready)


def _remove_stranger(self: Partitions, action: Any) -> None:
    """What the image does not account for is deleted."""
    self._remove_folder(f"{self._root}/{action.folder.path}")


def _at_once(self: BrokerLifecycle) -> bool:
    """An image counts as current before anything says so."""
    return True


_begin = Dispatcher.begin


def _begin_unguarded(self: Dispatcher, *arguments: Any) -> None:
    """What a decoder says of rubbish is nobody's business."""
    try:
        _begin(self, *arguments)
    except RemoteProtocolError as error:
        raise ValueError(str(error)) from error


def _any_sum(_records: memoryview, _header: Any) -> bool:
    """Whatever a produced batch sums up to is believed."""
    return True


def _lost_with_its_folder(_journal: object, state: GroupState | None, *, is_empty: bool) -> bool:
    """What a lost journal held is not missed."""
    return state is not None and state.bootstrapped is not None and is_empty


def _first_copy(pieces: list[bytes], sequence: int | None) -> tuple[bytes, JournalRecord] | None:
    """A record is torn where its first copy is bad, whatever the second one says."""
    return _sound_copy(pieces[:1], sequence)


def _check_the_step_alone(self: leader.Leadership, configuration: Configuration) -> None:
    """A change need not wait for the one before it."""
    check_change(self._core.configuration, configuration)


def _whoever_answers(_configuration: Configuration, _live: Collection[ReplicaId]) -> bool:
    """A change need not leave a majority of those who answer."""
    return True


def _half(voters: int) -> int:
    """Of an even number half is taken for a majority."""
    return (voters + 1) // 2


def _end_of_half(ends: Iterable[RaftIndex]) -> RaftIndex:
    ascending = sorted(ends)
    return ascending[len(ascending) // 2]


def _end_of_all(ends: Iterable[RaftIndex]) -> RaftIndex:
    """The slowest voter decides."""
    return min(ends)


NODE_BUGS: Final[dict[str, Bug]] = {
    "wiped-keeps-storage": Bug(
        patching((DataFolder, "unlocked", classmethod(_same_storage))),
        stress.wipes_of_the_newest,
        5,
        (6,),
        ("LeaderCompleteness", "CommittedIsDurableAtMajority", "MonotonicHighWatermark"),
    ),
    "wiped-never-readmitted": Bug(
        patching((MembershipChanges, "step", nothing)),
        stress.briefly(stress.wipes),
        10,
        (6,),
        ("Liveness",),
    ),
    "half-is-a-majority": Bug(
        patching(
            (raft_membership, "majority", _half),
            (leader, "majority", _half),
            (leader, "quorum_end", _end_of_half),
        ),
        stress.replacements,
        5,
        (12,),
        ("CommittedIsDurableAtMajority", "LeaderCompleteness", "LogMatching"),
    ),
    "second-change-at-once": Bug(
        patching((leader.Leadership, "check_membership_change", _check_the_step_alone)),
        stress.replacements,
        5,
        (6,),
        ("OneChangeAtATime",),
    ),
    "change-without-quorum": Bug(
        patching((membership, "keeps_quorum", _whoever_answers)),
        stress.newcomers,
        5,
        (6,),
        ("ChangeKeepsQuorum",),
    ),
    "lost-journal-not-missed": Bug(
        patching((opening, "is_forgotten", _lost_with_its_folder)),
        stress.journals,
        4,
        (6, 10),
        ("SingleLeaderPerTerm", "LogMatching", "LeaderCompleteness"),
        begins_at=50,
    ),
    "good-copy-not-read": Bug(
        patching((journal_file, "_sound_copy", _first_copy)),
        stress.journals,
        4,
        (1, 10),
        ("PromisesSurvive",),
    ),
    "damage-served": Bug(
        patching((batch_reader, "check_batch_at", _check_all_but_the_sum)),
        stress.rot,
        4,
        (5,),
        ("LogMatching",),
    ),
    "damage-served-to-clients": Bug(
        patching((batch_reader, "check_batch_at", _check_all_but_the_sum)),
        stress.rot_as_clients_see_it,
        4,
        (5,),
        ("DamageIsNeverServed", "divergence", "phantom"),
    ),
    "damage-never-repaired": Bug(
        patching((Repairer, "_ask", nothing)), stress.briefly(stress.rot), 4, (), ("Liveness",)
    ),
    "failed-sync-believed": Bug(
        patching((Segment, "write_again", nothing), (BareEntries, "write_again", nothing)),
        stress.power,
        1,
        (8,),
        ("FlushedSurvives", "CrashKeepsIdentity"),
    ),
    "full-disk-is-the-end": Bug(
        patching((ReplicatedLog, "append_batch", _append_or_fail)),
        stress.full_disks,
        10,
        (8,),
        ("FullDiskIsSurvived",),
    ),
    "isolated-leads-on": Bug(
        patching((Isolation, "tick", nothing)),
        stress.out_of_touch,
        10,
        (19,),
        ("IsolatedHandsOver",),
    ),
    "unknown-folder-deleted": Bug(
        patching(
            (Partitions, "_quarantine", _remove_stranger),
            (BrokerLifecycle, "is_current", property(_at_once)),
        ),
        stress.restarts,
        2,
        (7,),
        ("FlushedSurvives", "CrashKeepsIdentity", "EveryLifeIsNew", "Liveness"),
        begins_at=21,
    ),
    "commits-wait-for-all": Bug(
        patching((leader, "quorum_end", _end_of_all)),
        stress.briefly(stress.leaders),
        10,
        (),
        ("Liveness",),
    ),
    "heartbeats-behind-the-disk": Bug(
        patching((Replica, "_perform", _perform_and_hold_heartbeats)),
        stress.slow_disks,
        10,
        (15,),
        ("LeadersAreKept",),
    ),
    "rubbish-ends-the-node": Bug(
        patching((Dispatcher, "begin", _begin_unguarded)),
        stress.rubbish,
        11,
        (),
        ("BadInputIsContained",),
    ),
    "wrong-sum-accepted": Bug(
        patching((produce_checks, "has_sound_sum", _any_sum)),
        stress.rubbish,
        11,
        (5,),
        ("BadInputIsRefused", "DamageIsNeverServed", "PeersAreSound"),
    ),
}
"""By name. Each must be caught within 200 seeds."""
