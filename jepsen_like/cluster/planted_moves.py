"""Bugs planted in how replicas move: who comes back, what is reported, who is ordered to go."""

from __future__ import annotations

from typing import Any, Final

from attrs import evolve

from jepsen_like.bug import Bug, patching
from jepsen_like.cluster import stress
from raftmq.metadata import apply_moves
from raftmq.metadata.image import PartitionImage
from raftmq.node import partitions
from raftmq.replication.opening import Opening, ReplicaOpener
from raftmq.types import NodeId, Offset, RaftGroupId


def _forget(opening: Opening, group: RaftGroupId) -> None:
    """What a replica promised goes with its data."""
    opening.journal.forget(group)


_init = ReplicaOpener.__init__


def _open_as_new(self: ReplicaOpener, *arguments: Any, **named: Any) -> None:
    """One of the first voters is one whenever it begins."""
    _init(self, *arguments, **{**named, "is_return": False})


def _undismissed(
    partition: PartitionImage, replicas: tuple[NodeId, ...], offset: Offset
) -> PartitionImage:
    """Who never voted has no data that matters."""
    return evolve(partition, replicas=replicas, target_version=int(offset))


MOVE_BUGS: Final[dict[str, Bug]] = {
    "returns-by-its-old-name": Bug(
        patching(
            (partitions, "take_fresh_identity", _forget),
            (ReplicaOpener, "__init__", _open_as_new),
        ),
        stress.moves,
        5,
        (6, 23),
        ("EveryLifeIsNew", "LeaderCompleteness", "CommittedIsDurableAtMajority"),
        begins_at=40,
    ),
    "learner-is-forgotten": Bug(
        patching((apply_moves, "_targeted", _undismissed)),
        stress.changed_minds,
        5,
        (24,),
        ("Liveness", "CrashKeepsIdentity"),
    ),
}
