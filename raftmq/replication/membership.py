"""Changes of members: the target, and one safe step at a time towards it.

A voter is a node *with its storage*. A node whose storage was lost runs under another storage id
and is a stranger to the group: it neither votes nor counts. The leader that hears of it (by a
peer's hello, or the answer to a message for the old storage) exchanges the old identity for the new
one; metadata may also name other nodes that should make up the group (`TargetMembership`). Either
way the leader takes one step at a time, each a committed membership change (Raft thesis §4.1): add
a learner, promote it once it holds the log, then remove the member that it replaces. That one stays
until the last step, so a new leader can tell from configuration and target alone what is left to
do.

`next_configuration` is a pure function that names the next step. Invariants: one identity is added,
promoted or removed at a time; no step leaves fewer live voters than the new set's quorum; a voter
is removed only when more vote than the target names, or all that it names do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

from attrs import field, frozen

from raftmq.errors import KafkaError
from raftmq.raft.core import RaftCore
from raftmq.raft.membership import Configuration
from raftmq.types import NodeId, RaftIndex, ReplicaId, StorageId

CAUGHT_UP_MS: Final = 500.0
"""A learner that had everything so lately may vote: under load none ever equals a moving end."""


@frozen(slots=True)
class TargetMembership:
    """The members that a group should have.

    Attributes:
        voters: nodes that should vote.
        present: the storage under which a node may be added that this group has not heard of; a
            node that is missing here has to wait until it is heard of.
        leaving: nodes that should be no members; None: all that are not to vote.
        demoted: nodes that should follow the log without a vote.
        is_current: it is no older than the leader's election; else no step is taken towards it.
    """

    voters: tuple[NodeId, ...]
    present: Mapping[NodeId, StorageId] = field(factory=dict)
    leaving: tuple[NodeId, ...] | None = None
    demoted: tuple[NodeId, ...] = ()
    is_current: bool = True

    def must_leave(self, member: ReplicaId) -> bool:
        """True for a member that the group should lose."""
        if self.leaving is None:
            return member.node_id not in self.voters
        return member.node_id in self.leaving

    def is_reached(self, configuration: Configuration) -> bool:
        """True when no step is left to take."""
        voting = [voter.node_id for voter in configuration.voters]
        return (
            all(node_id in voting for node_id in self.voters)
            and not any(node_id in voting for node_id in self.demoted)
            and not any(self.must_leave(member) for member in configuration.members)
        )


class MembershipChanges:
    """The storages that a replica heard its peers run under, and the steps it takes as leader.

    Attributes:
        target: returns the target, if there is one now; None for a group that never has one.
        is_pending: the target was not reached when this leader last looked.
    """

    __slots__ = ("_storages", "is_pending", "target")

    def __init__(self) -> None:
        self._storages: dict[NodeId, StorageId] = {}
        self.target: Callable[[], TargetMembership | None] | None = None
        self.is_pending = False

    def heard(self, peer: ReplicaId) -> None:
        """A node runs the group under this storage now."""
        self._storages[peer.node_id] = peer.storage_id

    def step(
        self,
        core: RaftCore,
        commit_end: RaftIndex,
        has_all_of: Callable[[ReplicaId, float], bool],
    ) -> None:
        """Propose the next change that is due, if any; on a leader that can commit.

        Args:
            has_all_of: True when a replica had everything within so many milliseconds.
        """
        self.heard(core.self_id)  # the member to remove may be this node's earlier storage
        storages = self._storages
        configuration = core.configuration
        target = None if self.target is None else self.target()
        self.is_pending = target is not None and not target.is_reached(configuration)
        is_settled = all(
            storages.get(m.node_id, m.storage_id) == m[1] for m in configuration.members
        )
        if is_settled and not self.is_pending:
            return
        heard = {
            peer: progress
            for peer, progress in core.progress.items()
            if core.now - progress.last_heard_tick <= core.config.election_ticks
        }
        caught_up = [
            peer
            for peer, progress in heard.items()
            if progress.is_promising
            and (progress.match_end >= commit_end or has_all_of(peer, CAUGHT_UP_MS))
        ]
        live = [core.self_id, *heard]
        step = next_configuration(configuration, storages, live, caught_up, target)
        if step is None:
            return
        try:
            if core.self_id in step.voters or core.self_id not in configuration.voters:
                core.propose_membership(step)
            elif core.transferee is None:
                # Another leader removes this replica, so that the group never lacks one.
                core.transfer_leadership(_successor(step, caught_up))
        except KafkaError:
            return  # another change is under way; the next round looks again


def _successor(configuration: Configuration, caught_up: Collection[ReplicaId]) -> ReplicaId:
    """The voter that should lead instead: one that has everything, if there is one."""
    return next((v for v in configuration.voters if v in caught_up), configuration.voters[0])


def next_configuration(
    configuration: Configuration,
    storages: Mapping[NodeId, StorageId],
    live: Collection[ReplicaId],
    caught_up: Collection[ReplicaId],
    target: TargetMembership | None = None,
) -> Configuration | None:
    """The next step; first towards a configuration that names each node with its present storage,
    then towards the target.

    Args:
        configuration: in force and committed.
        storages: the storage under which each node was last heard to run this group.
        live: replicas heard within the election timeout, the leader first.
        caught_up: replicas that hold all but the newest entries.
        target: the members that the group should have.
    """
    voters, learners = configuration.voters, configuration.learners
    for stale in (*voters, *learners):
        storage = storages.get(stale.node_id)
        if storage is None or storage == stale.storage_id:
            continue
        present = ReplicaId(stale.node_id, storage)
        if stale in learners or present in voters:
            step = configuration.without(stale)
            if stale in learners and present not in (*voters, *learners):
                step = configuration.with_learner(present)
        elif present not in learners:
            step = configuration.with_learner(present)
        elif present in caught_up:
            step = configuration.with_voter(present)
        else:
            continue
        if keeps_quorum(step, live):
            return step
    if target is None or not target.is_current:
        return None
    return _arrival(configuration, storages, live, caught_up, target) or _departure(
        configuration, live, target
    )


def _arrival(
    configuration: Configuration,
    storages: Mapping[NodeId, StorageId],
    live: Collection[ReplicaId],
    caught_up: Collection[ReplicaId],
    target: TargetMembership,
) -> Configuration | None:
    """The next learner to add, or to promote."""
    voting = [voter.node_id for voter in configuration.voters]
    learning = {learner.node_id: learner for learner in configuration.learners}
    for node_id in target.voters:
        if node_id in voting:
            continue
        learner = learning.get(node_id)
        if learner is None:
            storage = storages.get(node_id, target.present.get(node_id))
            if storage is not None and node_id in target.present:
                return configuration.with_learner(ReplicaId(node_id, storage))
        elif learner in caught_up and len(voting) <= len(target.voters):
            step = configuration.with_voter(learner)
            if keeps_quorum(step, live):
                return step
    return None


def _departure(
    configuration: Configuration, live: Collection[ReplicaId], target: TargetMembership
) -> Configuration | None:
    """The next member to remove: learners and the silent first, the leader last."""
    voters = configuration.voters
    for learner in configuration.learners:
        if target.must_leave(learner):
            return configuration.without(learner)
    voting = [voter.node_id for voter in voters]
    has_all = all(node_id in voting for node_id in target.voters)
    if not has_all and len(voters) <= len(target.voters):
        return None
    leader = next(iter(live), None)
    going = [v for v in voters if target.must_leave(v) or v.node_id in target.demoted]
    for voter in sorted(going, key=lambda v: (v in live, v == leader, v)):
        step = configuration.without(voter)
        if voter.node_id in target.demoted:
            step = configuration.with_learner(voter)
        if step.voters and keeps_quorum(step, live):
            return step
    return None


def keeps_quorum(configuration: Configuration, live: Collection[ReplicaId]) -> bool:
    """True when the live replicas among these voters are a majority of them."""
    alive = sum(1 for voter in configuration.voters if voter in live)
    return alive >= len(configuration.voters) // 2 + 1
