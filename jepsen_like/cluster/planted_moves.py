"""Bugs planted in how replicas move: who comes back, what is reported, who is ordered to go."""

from __future__ import annotations

from typing import Any, Final

from jepsen_like.bug import Bug, patching
from jepsen_like.cluster import stress
from raftmq.node import partitions
from raftmq.raft.membership import Configuration
from raftmq.replication.recovery import Opening, ReplicaOpener
from raftmq.replication.replica import Replica
from raftmq.types import RaftGroupId


def _forget(opening: Opening, group: RaftGroupId) -> None:
    """What a replica promised goes with its data."""
    opening.journal.forget(group)


_init = ReplicaOpener.__init__


def _open_as_new(self: ReplicaOpener, *arguments: Any, **named: Any) -> None:
    """One of the first voters is one whenever it begins."""
    _init(self, *arguments, **{**named, "is_return": False})


def _appended(self: Replica) -> Configuration:
    """What is appended is a fact."""
    return self.core.configuration


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
    ),
    "appended-voters-reported": Bug(
        patching((Replica, "committed_configuration", property(_appended))),
        stress.moves,
        5,
        (24,),
        ("VotersKeepTheirData",),
    ),
}
