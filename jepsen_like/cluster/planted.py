"""Bugs planted above the Raft groups: acknowledgements, producers, groups, metadata, storage.

Each is a context manager that patches the product's own modules and undoes it, with the options
that stress what it breaks, and the promise that it breaks. What each is caught by is told by
`python -m jepsen_like planted`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final
from unittest.mock import patch

import attrs
from attrs import frozen
from immutables import Map

from jepsen_like.cluster.options import ClusterOptions, draw_cluster_options
from jepsen_like.cluster.run import run_cluster_seed
from jepsen_like.planted import Catch
from jepsen_like.sim import Verdict
from raftmq import records
from raftmq.adapters.data_folder import DataFolder
from raftmq.cluster import apply as metadata_apply
from raftmq.cluster import group_image
from raftmq.cluster.commands import AllocateProducerIds, ProducerIds
from raftmq.cluster.group_commands import Claimed
from raftmq.cluster.metadata_snapshot import SnapshotEncoder
from raftmq.cluster.parked_produces import AppendResult
from raftmq.cluster.partition import Partition
from raftmq.cluster.partition_producers import PartitionProducers
from raftmq.cluster.partition_results import DeleteResult
from raftmq.cluster.producer_state import ACCEPT, ProducerStateTable
from raftmq.cluster.raft_engine import RaftMetadataEngine
from raftmq.cluster.retention import Retention
from raftmq.errors import CorruptBatchError, ErrorCode
from raftmq.groups.group import Group
from raftmq.log import batch_reader
from raftmq.log.bare_entries import BareEntries
from raftmq.log.segment import Segment
from raftmq.promise import Promise
from raftmq.types import NodeId, Offset

Plant = Callable[[], AbstractContextManager[None]]


@frozen
class ClusterBug:
    """A planted bug, where to look for it, and the promise of mission.md that it breaks."""

    plant: Plant
    options: Callable[[int], ClusterOptions]
    promise: int


def _patching(*targets: tuple[object, str, object]) -> Plant:
    @contextmanager
    def plant() -> Iterator[None]:
        patches = [patch.object(*target) for target in targets]
        for one in patches:
            one.start()
        try:
            yield
        finally:
            for one in patches:
                one.stop()

    return plant


def _nothing(*_arguments: object, **_named: object) -> None:
    return None


def _no_error(*_arguments: object, **_named: object) -> ErrorCode:
    return ErrorCode.NONE


# ---- options that stress ----


def _drawn(seed: int, **changes: Any) -> ClusterOptions:
    options = draw_cluster_options(seed)
    return attrs.evolve(
        options, nodes=3, partitions=1, safety_ms=4_000, retention_bytes=-1, **changes
    )


def _leaders(seed: int) -> ClusterOptions:
    """Leaders die or are cut off again and again, and producers send again."""
    return _drawn(
        seed,
        client_drop=0.02,
        fault_every_ms=(80.0, 350.0),
        fault_lasts_ms=(60.0, 500.0),
    ).with_weights(isolate_leader=4, crash_leader=3, transfer=2, one_way=1, kill=1)


def _power(seed: int) -> ClusterOptions:
    """Power loss and failing syncs, short outages."""
    return _drawn(
        seed,
        fsync_ms=(1.0, 10.0),
        fault_every_ms=(60.0, 250.0),
        fault_lasts_ms=(20.0, 200.0),
    ).with_weights(crash=3, crash_leader=2, crash_all=2, failed_sync=4, kill=1)


def _coordinators(seed: int) -> ClusterOptions:
    """The metadata group and the coordinators change, members come late."""
    return _drawn(
        seed,
        client_drop=0.02,
        straggler=0.03,
        session_ms=700,
        fault_every_ms=(80.0, 400.0),
        fault_lasts_ms=(100.0, 900.0),
    ).with_weights(isolate_controller=4, isolate=2, clients_cut=3, pause=3, transfer=1, kill=2)


def _wipes(seed: int) -> ClusterOptions:
    """Storages are lost while leaders change."""
    return _drawn(seed, fault_every_ms=(150.0, 500.0), fault_lasts_ms=(50.0, 400.0)).with_weights(
        wipe=4, isolate_leader=2, crash_leader=1
    )


def _rot(seed: int) -> ClusterOptions:
    """Flushed bytes go bad."""
    return _drawn(
        seed, fault_every_ms=(150.0, 500.0), fault_lasts_ms=(50.0, 300.0), segment_bytes=2_048
    ).with_weights(rot=3, rot_everywhere=1, transfer=2, kill=1)


def _deletions(seed: int) -> ClusterOptions:
    """Records are deleted while leaders change and replicas are replaced."""
    return _drawn(
        seed, fault_every_ms=(80.0, 350.0), fault_lasts_ms=(60.0, 500.0), segment_bytes=2_048
    ).with_weights(delete_records=5, isolate=3, isolate_leader=2, transfer=2, wipe=1, kill=1)


def _clocks(seed: int) -> ClusterOptions:
    """Clocks jump by days."""
    return _drawn(seed, clock_skew_ms=15 * 86_400_000.0, segment_bytes=2_048).with_weights(
        clock_jump=4, transfer=2, crash_leader=1
    )


def _snapshots(seed: int) -> ClusterOptions:
    """Metadata snapshots are taken and installed."""
    return _drawn(seed, snapshot_bytes=8_192).with_weights(wipe=2, crash=2, isolate=2, kill=1)


# ---- bugs ----


def _at_once(_self: Partition, result: AppendResult, *_rest: object) -> AppendResult:
    return result


_acknowledge_duplicate = Partition._acknowledge_duplicate


def _duplicate_at_once(self: Partition, duplicate: Any, _acks: int, timeout_ms: int) -> Any:
    return _acknowledge_duplicate(self, duplicate, 1, timeout_ms)


def _accept(_self: ProducerStateTable, _header: object) -> Any:
    return ACCEPT


def _log_end(self: Partition) -> Offset:
    return self.replica.log_end_offset


def _kept(_engine: object, timeout_ms: float | None = None) -> Promise[None]:
    return Promise.resolved(None)


_claim = group_image._claim


def _claim_anew(image: Any, command: Any, live_epoch: Any) -> Any:
    """A new coordinator begins with nothing but the name."""
    after, result = _claim(image, command, live_epoch)
    group = after.get(command.group)
    if isinstance(result, Claimed) and group is not None:
        after = after._with(attrs.evolve(group, generation=0, members=()))
    return after, result


def _claim_without_offsets(image: Any, command: Any, live_epoch: Any) -> Any:
    after, result = _claim(image, command, live_epoch)
    group = after.get(command.group)
    if isinstance(result, Claimed) and group is not None:
        after = after._with(attrs.evolve(group, offsets=Map()))
    return after, result


def _same_ids(image: Any, envelope: Any, _offset: Any) -> Any:
    start = image.next_producer_id
    return image, ProducerIds(start, start + envelope.command.count)


_unlocked = DataFolder.unlocked.__func__  # type: ignore[attr-defined]  # a classmethod's function


def _same_storage(cls: type[DataFolder], /, disk: Any, root: str, **named: Any) -> DataFolder:
    node_id: NodeId = named["node_id"]
    folder: DataFolder = _unlocked(cls, disk, root, **{**named, "draw": 1_000 + node_id})
    return folder


def _own_time(self: Retention) -> int | None:
    return self._clock.wall_ms() if self._replica.is_writable else None


_check_batch_at = records.check_batch_at


def _check_all_but_the_sum(view: memoryview, position: int) -> Any:
    try:
        return _check_batch_at(view, position)
    except CorruptBatchError as error:
        if "CRC" not in error.message:
            raise
        return records.parse_header(view, position)


_delete_records = Partition.delete_records


def _deleted_at_once(self: Partition, offset: int, timeout_ms: int) -> Any:
    result = _delete_records(self, offset, timeout_ms)
    return DeleteResult(0, Offset(offset)) if isinstance(result, Promise) else result  # type: ignore[arg-type]


_encode_snapshot = SnapshotEncoder.encode


def _without_groups(self: SnapshotEncoder, image: Any) -> bytes:
    empty = attrs.evolve(image, groups=attrs.evolve(image.groups, groups=Map()))
    return _encode_snapshot(self, empty)


CLUSTER_BUGS: Final[dict[str, ClusterBug]] = {
    "acked-before-commit": ClusterBug(
        _patching((Partition, "_acknowledge", _at_once)), _leaders, 1
    ),
    "duplicate-acked-before-commit": ClusterBug(
        _patching((Partition, "_acknowledge_duplicate", _duplicate_at_once)), _leaders, 7
    ),
    "sequence-unchecked": ClusterBug(
        _patching((ProducerStateTable, "check", _accept)), _leaders, 7
    ),
    "producers-not-rolled-back": ClusterBug(
        _patching((PartitionProducers, "truncated", _nothing)), _leaders, 7
    ),
    "producer-ids-twice": ClusterBug(
        lambda: patch.dict(metadata_apply._HANDLERS, {AllocateProducerIds: _same_ids}),
        _leaders,
        7,
    ),
    "read-above-watermark": ClusterBug(
        _patching((Partition, "readable_end", property(_log_end))), _leaders, 2
    ),
    "deleted-before-commit": ClusterBug(
        _patching((Partition, "delete_records", _deleted_at_once)), _deletions, 2
    ),
    "retention-by-own-clock": ClusterBug(_patching((Retention, "now_ms", _own_time)), _clocks, 6),
    "zombie-commits": ClusterBug(
        _patching((group_image, "check_commit", _nothing), (Group, "check_commit", _no_error)),
        _coordinators,
        9,
    ),
    "committed-without-barrier": ClusterBug(
        _patching((RaftMetadataEngine, "read_barrier", _kept)), _coordinators, 9
    ),
    "claim-forgets-generation": ClusterBug(
        _patching((group_image, "_claim", _claim_anew)), _coordinators, 9
    ),
    "claim-forgets-offsets": ClusterBug(
        _patching((group_image, "_claim", _claim_without_offsets)), _coordinators, 9
    ),
    "snapshot-without-groups": ClusterBug(
        _patching((SnapshotEncoder, "encode", _without_groups)), _snapshots, 9
    ),
    "wiped-keeps-storage": ClusterBug(
        _patching((DataFolder, "unlocked", classmethod(_same_storage))), _wipes, 5
    ),
    "damage-served": ClusterBug(
        _patching((batch_reader, "check_batch_at", _check_all_but_the_sum)), _rot, 4
    ),
    "failed-sync-believed": ClusterBug(
        _patching((Segment, "write_again", _nothing), (BareEntries, "write_again", _nothing)),
        _power,
        1,
    ),
}
"""By name. Each must be caught within 200 seeds."""


def hunt_in_cluster(name: str, first: int = 1, seeds: int = 200) -> Catch:
    """Run seeds with the bug planted until one is caught."""
    bug = CLUSTER_BUGS[name]
    for number in range(seeds):
        seed = first + number
        with bug.plant():
            result = run_cluster_seed(seed, bug.options(seed))
        if result.verdict is Verdict.ANOMALY:
            return Catch(name, number + 1, True, result.name)
    return Catch(name, seeds, False)
