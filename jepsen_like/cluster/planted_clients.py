"""Bugs planted in what clients are told: acknowledgements, producers, groups, metadata.

Each patches the product's own modules and undoes it, with the options that stress what it breaks,
what it breaks, and what it must be caught by.
"""

from __future__ import annotations

from typing import Any, Final
from unittest.mock import patch

import attrs
import msgspec
from immutables import Map

from jepsen_like.bug import Bug, nothing, patching
from jepsen_like.cluster import stress
from raftmq.errors import ErrorCode
from raftmq.groups.group import Group
from raftmq.metadata import apply as metadata_apply
from raftmq.metadata import apply_groups, state_machine
from raftmq.metadata.commands import (
    AllocateProducerIds,
    ClaimGroup,
    CommitMany,
    DeleteTopics,
)
from raftmq.metadata.raft_engine import RaftMetadataEngine
from raftmq.metadata.results import Claimed, ProducerIds
from raftmq.metadata.snapshot import SnapshotEncoder
from raftmq.partition.partition import Partition
from raftmq.partition.ports import AppendResult, DeleteResult
from raftmq.partition.producer_state import ACCEPT, ProducerStateTable
from raftmq.partition.producers import PartitionProducers
from raftmq.ports import Clock
from raftmq.promise import Promise
from raftmq.raft.core import RaftCore
from raftmq.replication.clocks import RetentionClock
from raftmq.replication.log_start import LogStartMoves
from raftmq.server.kafka.handlers.fetch import ParkedFetch
from raftmq.types import Offset, RaftIndex


def _no_error(*_arguments: object, **_named: object) -> ErrorCode:
    return ErrorCode.NONE


def _at_once(_self: Partition, result: AppendResult, *_rest: object) -> AppendResult:
    return result


_acknowledge_duplicate = Partition._acknowledge_duplicate


def _duplicate_at_once(self: Partition, duplicate: Any, _acks: int, timeout_ms: int) -> Any:
    return _acknowledge_duplicate(self, duplicate, 1, timeout_ms)


def _accept(_self: ProducerStateTable, _header: object) -> Any:
    return ACCEPT


def _answer_unproved(self: ParkedFetch) -> None:
    self._settle(self._reading.respond())


def _log_end(self: Partition) -> Offset:
    return self.replica.log_end_offset


def _kept(_engine: object, timeout_ms: float | None = None) -> Promise[None]:
    return Promise.resolved(None)


_claim = apply_groups._claim


def _claim_anew(image: Any, command: Any, live_epoch: Any) -> Any:
    """A new coordinator begins with nothing but the name."""
    after, result = _claim(image, command, live_epoch)
    group = after.get(command.group)
    if isinstance(result, Claimed) and group is not None:
        after = after.with_group(attrs.evolve(group, generation=0, members=()))
    return after, result


def _claim_without_offsets(image: Any, command: Any, live_epoch: Any) -> Any:
    after, result = _claim(image, command, live_epoch)
    group = after.get(command.group)
    if isinstance(result, Claimed) and group is not None:
        after = after.with_group(attrs.evolve(group, offsets=Map()))
    return after, result


def _same_ids(image: Any, envelope: Any, _offset: Any) -> Any:
    start = image.next_producer_id
    return image, ProducerIds(start, start + envelope.command.count)


_delete_topics = metadata_apply._HANDLERS[DeleteTopics]


def _answer_only(image: Any, envelope: Any, offset: Any) -> Any:
    """A deletion is answered, and not done."""
    _, result = _delete_topics(image, envelope, offset)
    return image, result


def _own_time(_self: RetentionClock, _core: object, clock: Clock) -> int | None:
    return clock.wall_ms()


_delete_records = Partition.delete_records


def _deleted_at_once(self: Partition, offset: int, timeout_ms: int) -> Any:
    result = _delete_records(self, offset, timeout_ms)
    return DeleteResult(0, Offset(offset)) if isinstance(result, Promise) else result  # type: ignore[arg-type]


_fulfil = LogStartMoves.fulfil


def _only_the_last(
    self: LogStartMoves, core: RaftCore, commit_end: RaftIndex, high_watermark: Offset
) -> bool:
    """Of the log starts committed together the last one is taken, the greatest or not."""
    for proposal in [proposal for proposal in self.proposals if proposal.end <= commit_end][:-1]:
        self.proposals.remove(proposal)
    return _fulfil(self, core, commit_end, high_watermark)


_encode_snapshot = SnapshotEncoder.encode


def _without_groups(self: SnapshotEncoder, image: Any) -> bytes:
    empty = attrs.evolve(image, groups=attrs.evolve(image.groups, groups=Map()))
    return _encode_snapshot(self, empty)


def _no_state(_self: Partition, _offset: Offset, _index: object) -> bytes:
    return ProducerStateTable().encode()


_apply = metadata_apply.apply


def _apply_twice(image: Any, envelope: Any, offset: Any) -> Any:
    after, result = _apply(image, envelope, offset)
    if result is metadata_apply.STALE_SEQUENCE:
        forgotten = attrs.evolve(image, submitters=Map())
        return _apply(forgotten, envelope, offset)
    return after, result


_apply_group = apply_groups.apply_group


def _as_present(image: Any, command: Any) -> Any:
    """A command as if it were the present coordinator's."""
    group = image.get(command.group)
    if group is None or not hasattr(command, "coordinator_epoch"):
        return command
    return msgspec.structs.replace(command, coordinator_epoch=group.coordinator_epoch)


def _apply_any_coordinator(image: Any, command: Any, live_epoch: Any) -> Any:
    """Whoever was a coordinator once may still change the group."""
    if isinstance(command, ClaimGroup):
        return _apply_group(image, command, live_epoch)
    if isinstance(command, CommitMany):
        commits = tuple(_as_present(image, commit) for commit in command.commits)
        command = msgspec.structs.replace(command, commits=commits)
    return _apply_group(image, _as_present(image, command), live_epoch)


def _log_end_of_follower(self: Partition) -> Offset:
    replica = self.replica
    return replica.high_watermark if replica.is_leader else replica.log_end_offset


_REFUSED = "SequenceAccepted"

CLIENT_BUGS: Final[dict[str, Bug]] = {
    "acked-before-commit": Bug(
        patching((Partition, "_acknowledge", _at_once)),
        stress.leaders,
        1,
        (12,),
        ("lost-write", "inconsistent-offsets", "divergence", "unseen", _REFUSED),
    ),
    "duplicate-acked-before-commit": Bug(
        patching((Partition, "_acknowledge_duplicate", _duplicate_at_once)),
        stress.leaders,
        7,
        (14,),
        ("lost-write", "inconsistent-offsets", "divergence", "unseen", _REFUSED),
    ),
    "sequence-unchecked": Bug(
        patching((ProducerStateTable, "check", _accept)),
        stress.leaders,
        7,
        (),
        ("duplicate", "nonmonotonic-send"),
    ),
    "producers-not-rolled-back": Bug(
        patching((PartitionProducers, "truncated", nothing)),
        stress.leaders,
        7,
        (14,),
        ("AssertionError", _REFUSED),
    ),
    "producers-lost-at-log-start": Bug(
        patching((Partition, "state_at", _no_state)),
        stress.deletions_at_rest,
        7,
        (3, 14),
        ("ProducersAgree", "duplicate"),
    ),
    "producer-ids-twice": Bug(
        lambda: patch.dict(metadata_apply._HANDLERS, {AllocateProducerIds: _same_ids}),
        stress.leaders,
        7,
        (),
        (_REFUSED, "lost-write"),
    ),
    "deletion-not-done": Bug(
        lambda: patch.dict(metadata_apply._HANDLERS, {DeleteTopics: _answer_only}),
        stress.leaders,
        2,
        (18,),
        ("linear-topics", "resurrected-topic"),
    ),
    "read-above-watermark": Bug(
        patching((Partition, "_committed_end", property(_log_end))),
        stress.leaders,
        2,
        (11,),
        ("out-of-range", "divergence", "inconsistent-offsets"),
    ),
    "follower-serves-its-log-end": Bug(
        patching((Partition, "_committed_end", property(_log_end_of_follower))),
        stress.leaders_and_readers,
        2,
        (16,),
        # Seen at one offset, cut off there and sent again it stands at another one: a duplicate.
        (
            "divergence",
            "duplicate",
            "inconsistent-offsets",
            "phantom",
            "out-of-range",
            "lost-write",
        ),
    ),
    "out-of-range-unproved": Bug(
        patching((ParkedFetch, "finish", _answer_unproved)),
        stress.astray,
        2,
        (11,),
        ("out-of-range",),
    ),
    "deleted-before-commit": Bug(
        patching((Partition, "delete_records", _deleted_at_once)),
        stress.deletions,
        2,
        (3,),
        ("out-of-range",),
    ),
    "last-wish-counts": Bug(
        patching((LogStartMoves, "fulfil", _only_the_last)),
        stress.deletions,
        2,
        (3,),
        ("Convergence",),
    ),
    "retention-by-own-clock": Bug(
        patching((RetentionClock, "now_ms", _own_time)),
        stress.clocks,
        6,
        (3,),
        ("RetentionByAgreedTime",),
    ),
    "zombie-commits": Bug(
        patching((apply_groups, "check_commit", nothing), (Group, "check_commit", _no_error)),
        stress.coordinators,
        9,
        (20,),
        ("zombie-commit", "commit-regression"),
    ),
    "committed-without-barrier": Bug(
        patching((RaftMetadataEngine, "read_barrier", _kept)),
        stress.secluded,
        9,
        (18,),
        ("linear-committed", "lost-commit"),
    ),
    "claim-forgets-generation": Bug(
        patching((apply_groups, "_claim", _claim_anew)),
        stress.coordinators,
        9,
        (20,),
        ("double-assignment", "generation-back", "zombie-commit"),
    ),
    "claim-forgets-offsets": Bug(
        patching((apply_groups, "_claim", _claim_without_offsets)),
        stress.coordinators,
        9,
        (20,),
        ("lost-commit", "linear-committed", "consume-skip"),
    ),
    "coordinator-unfenced": Bug(
        patching((metadata_apply, "apply_group", _apply_any_coordinator)),
        stress.secluded,
        9,
        (20,),
        ("CoordinatorIsFenced",),
    ),
    "command-applied-twice": Bug(
        patching((state_machine, "apply", _apply_twice)),
        stress.coordinators,
        9,
        (17,),
        ("CommandsApplyOnce",),
    ),
    "snapshot-without-groups": Bug(
        patching((SnapshotEncoder, "encode", _without_groups)),
        stress.snapshots,
        9,
        (22,),
        ("lost-commit", "linear-committed", "Convergence"),
    ),
}
"""By name. Each must be caught within 200 seeds."""
