"""How a wiped node comes back: the leader exchanges its old identity for the new one.

A voter is a node *with its storage*. A node whose storage was lost runs under another storage id
and is a stranger to the group: it neither votes nor counts. The leader that hears of it (a peer's
hello, or the answer to a message for the old storage) takes one step at a time, each a committed
membership change (Raft thesis §4.1): admit the new identity as a learner, promote it once it holds
the log, then remove the old identity. The stale name stays in the set until the last step, so a new
leader can tell from the configuration alone what is left to do.

`next_configuration` is pure: it looks at what it is given and names the next step. Invariants: one
identity is added, promoted or removed at a time; no step leaves fewer live voters than the new
set's quorum.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from raftmq.errors import KafkaError
from raftmq.raft.core import RaftCore
from raftmq.raft.membership import Configuration
from raftmq.types import NodeId, RaftIndex, ReplicaId, StorageId


class Readmission:
    """What a replica heard of its peers' storages, and what it does about it when it leads."""

    __slots__ = ("_storages",)

    def __init__(self) -> None:
        self._storages: dict[NodeId, StorageId] = {}

    def heard(self, peer: ReplicaId) -> None:
        """This node runs the group under this storage now."""
        self._storages[peer.node_id] = peer.storage_id

    def step(self, core: RaftCore, commit_end: RaftIndex) -> None:
        """Propose the next change that is due, if any; the caller leads and can commit."""
        self.heard(core.self_id)  # its own node's earlier storage may be what has to go
        storages = self._storages
        members = core.configuration.members
        if all(storages.get(m.node_id, m.storage_id) == m.storage_id for m in members):
            return
        heard = {
            replica: progress
            for replica, progress in core.progress.items()
            if core.now - progress.last_heard_tick <= core.config.election_ticks
        }
        live = [core.self_id, *heard]
        caught_up = [r for r, progress in heard.items() if progress.match_end >= commit_end]
        step = next_configuration(core.configuration, storages, live, caught_up)
        if step is None:
            return
        try:
            core.propose_membership(step)
        except KafkaError:
            return  # another change is under way; the next round looks again


def next_configuration(
    configuration: Configuration,
    storages: Mapping[NodeId, StorageId],
    live: Collection[ReplicaId],
    caught_up: Collection[ReplicaId],
) -> Configuration | None:
    """The next step towards every node standing in the configuration under its present storage.

    Args:
        configuration: in force and committed.
        storages: under which storage each node was last heard to run this group.
        live: replicas heard within the election timeout, this leader among them.
        caught_up: learners that hold all but the newest entries.
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
    return None


def keeps_quorum(configuration: Configuration, live: Collection[ReplicaId]) -> bool:
    """True when the live replicas among these voters are a majority of them."""
    alive = sum(1 for voter in configuration.voters if voter in live)
    return alive >= len(configuration.voters) // 2 + 1
