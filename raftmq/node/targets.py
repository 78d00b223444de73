"""The target memberships of the partitions that this node leads, and how new each certainly is.

A node that should not hold a partition any more deletes its data once a leader reports that the
node is no member and cannot become one. Two rules make that report hold for every leader, earlier
or later. A leader reports a target as seen only after its followers have confirmed that it still
leads (`Replica.read_barrier`), so every later leader was elected after that. And a leader adds,
promotes and removes no member before it has asked the metadata group, in its own term, for the
target (`MetadataEngine.read_barrier`), so it acts on nothing older than its election.

Invariants: what `seen` returns holds for every later leader of the group as well. Nothing here is
remembered across terms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve, frozen

from raftmq.metadata.engine import MetadataEngine
from raftmq.metadata.image import partition_target
from raftmq.promise import Promise
from raftmq.raft.core import RaftCore
from raftmq.replication.membership import TargetMembership
from raftmq.replication.replica import Replica
from raftmq.types import RaftGroupId

UNSEEN = -1


@frozen(slots=True)
class _Seen:
    term: int
    version: int


class TargetMemberships:
    """The targets of all groups of one node."""

    def __init__(self, engine: MetadataEngine, restate: Callable[[RaftGroupId], None]) -> None:
        """`restate` is called when `seen` has more to say of a group."""
        self._engine = engine
        self._restate = restate
        self._current: dict[RaftGroupId, int] = {}
        """The terms in which the metadata group was asked."""
        self._asking: dict[RaftGroupId, int] = {}
        """The same, not yet asked or not yet answered."""
        self._is_asking = False
        self._seen: dict[RaftGroupId, _Seen] = {}
        self._confirming: dict[RaftGroupId, _Seen] = {}

    def forget(self, group: RaftGroupId) -> None:
        """The replica of that group ends here."""
        for known in (self._current, self._asking, self._seen, self._confirming):
            known.pop(group, None)

    def of(self, group: RaftGroupId, leader: RaftCore) -> TargetMembership | None:
        """The members that a group should have, for its leader."""
        target = partition_target(self._engine.image, group)
        if target is None or target.is_reached(leader.configuration):
            return target
        if self._current.get(group) == leader.term:
            return target
        self._asking[group] = leader.term
        self._ask()
        return evolve(target, is_current=False)

    def seen(self, replica: Replica) -> int:
        """The version of the target of a group that is led here, once it is certain that no leader
        of a later term acts on an older target; UNSEEN before that, and where no node is to delete
        anything."""
        group, term = replica.group, replica.core.term
        topic = self._engine.image.topic_by_id(group.topic_id)
        partition = None if topic is None else topic.of_group(group)
        if partition is None:
            return UNSEEN
        wanted = _Seen(term, partition.target_version)
        seen = self._seen.get(group)
        # Without anybody who could be ordered to go, nobody asks, and a node that comes to lead
        # thousands of partitions at once has enough to do.
        matters = partition.dismissed or not {*partition.voters} <= {*partition.replicas}
        if matters and seen != wanted and self._confirming.get(group) != wanted:
            self._confirming[group] = wanted
            replica.read_barrier().when_done(
                lambda promise: self._confirmed(replica, wanted, promise)
            )
            seen = self._seen.get(group)  # a group of one may be that quick
        return UNSEEN if seen is None or seen.term != term else seen.version

    def _confirmed(self, replica: Replica, wanted: _Seen, promise: Promise[Any]) -> None:
        group = replica.group
        if self._confirming.get(group) == wanted:
            del self._confirming[group]
        if promise.error is not None or replica.core.term != wanted.term:
            return  # whoever leads now asks
        known = self._seen.get(group)
        if known is None or known.term != wanted.term or known.version < wanted.version:
            self._seen[group] = wanted
            self._restate(group)

    def _ask(self) -> None:
        """Ask for all groups that wait, in one round; those that come later wait for the next."""
        if self._is_asking or not self._asking:
            return
        self._is_asking = True
        asked, self._asking = self._asking, {}

        def done(promise: Promise[None]) -> None:
            self._is_asking = False
            if promise.error is None:
                self._current.update(asked)
            # Without an answer each of them asks again at its next step.

        self._engine.read_barrier().when_done(done)
