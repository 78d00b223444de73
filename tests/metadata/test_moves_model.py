"""No replica deletes its data that votes, or that any leader will let vote: a model of one group
whose leaders see what metadata wants late, are deposed without knowing it, and report out of order.

What is under test is `apply_moves.py` and the two rules of `raftmq/node/targets.py`, by which a
leader acts on nothing older than its election and says what it has seen only while it surely leads.
The model breaks without either of them.
"""

from __future__ import annotations

from random import Random

import pytest
from attrs import define, field

from raftmq.metadata.commands import ConfirmRemoved, MembersReport, ReportVoters
from raftmq.metadata.image import PartitionImage
from raftmq.raft.membership import Configuration
from raftmq.replication.membership import TargetMembership, next_configuration
from raftmq.types import NodeId, ReplicaId, StorageId
from tests.metadata.metadata_commands import node
from tests.metadata.test_apply_moves import Moving

NODES = tuple(map(node, range(1, 7)))


class DataGoneError(AssertionError):
    """A replica votes whose data is gone."""


@define
class Leader:
    """One that leads, or believes that it does."""

    epoch: int
    image: PartitionImage
    committed: Configuration
    appended: Configuration | None = None
    is_current: bool = False
    """It has asked the metadata group since its election."""
    seen: int = -1


@define
class Group:
    """A group, its nodes, and the metadata group."""

    random: Random
    asks_first: bool = True
    confirms: bool = True
    machine: Moving = field(factory=Moving)
    lives: dict[NodeId, int] = field(factory=lambda: dict.fromkeys(NODES, 1))
    running: set[NodeId] = field(factory=lambda: set(NODES[:3]))
    gone: set[ReplicaId] = field(factory=set)
    images: list[PartitionImage] = field(factory=list)
    ghosts: list[Leader] = field(factory=list)
    rows: list[MembersReport] = field(factory=list)
    leader: Leader = field(init=False)

    def __attrs_post_init__(self) -> None:
        voters = tuple(self.replica(n) for n in NODES[:3])
        self.images.append(self.machine.partition)
        self.leader = Leader(1, self.machine.partition, Configuration(voters=voters))

    def replica(self, node_id: NodeId) -> ReplicaId:
        return ReplicaId(node_id, StorageId(100 * node_id + self.lives[node_id]))

    def run(self, steps: int) -> int:
        """So many random steps; returns how many replicas deleted their data."""
        actions = [
            (self.move, 2),
            (self.cancel, 1),
            (self.see, 2),
            (self.ask, 3),
            (self.elect, 1),
            (self.take_step, 8),
            (self.commit, 6),
            (self.confirm, 4),
            (self.state, 6),
            (self.report, 8),
            (self.obey, 4),
        ]
        for _ in range(steps):
            self.random.choices([a for a, _ in actions], [w for _, w in actions])[0]()
            self.judge()
        return len(self.gone)

    def judge(self) -> None:
        for configuration in (self.leader.committed, self.leader.appended):
            if configuration is not None and self.gone.intersection(configuration.voters):
                raise DataGoneError(f"{configuration} without {self.gone}")

    # ---- metadata ----

    def move(self) -> None:
        replicas = list(self.machine.partition.replicas)
        arriving = self.random.choice([n for n in NODES if n not in replicas])
        replicas[self.random.randrange(3)] = arriving
        self.machine.reassign(*replicas)
        self.changed()

    def cancel(self) -> None:
        self.machine.plan()
        self.changed()

    def changed(self) -> None:
        """Nodes see it at once or later; those that are wanted run the group."""
        self.images.append(self.machine.partition)
        self.running |= set(self.machine.partition.replicas)

    def report(self) -> None:
        """Any row that was ever stated may be the next to be applied."""
        if self.rows:
            row = self.random.choice(self.rows[-6:])
            self.machine.apply(ReportVoters(reports=(), members=(row,)))
            self.changed()

    def obey(self) -> None:
        """One that is ordered to delete does so, and is somebody else if it comes back."""
        ordered = self.machine.ordered
        if not ordered:
            return
        node_id = self.random.choice(ordered)
        if node_id in self.running:
            self.gone.add(self.replica(node_id))
            self.running.discard(node_id)
            self.lives[node_id] += 1
        groups = ((*self.machine.group,),)
        self.machine.apply(ConfirmRemoved(node_id=node_id, replicas=(), groups=groups))
        self.changed()

    # ---- the group ----

    def see(self) -> None:
        """A leader, or one that was, hears of what metadata wants."""
        self.random.choice([self.leader, *self.ghosts[-2:]]).image = self.machine.partition

    def ask(self) -> None:
        self.leader.image, self.leader.is_current = self.machine.partition, True

    def elect(self) -> None:
        """A node leads that has, or has not, what was appended last, and an image of some day."""
        former = self.leader
        self.ghosts.append(former)
        committed = former.committed
        if former.appended is not None and self.random.random() < 0.5:
            committed = former.appended
        image = self.random.choice(self.images[-8:])
        self.leader = Leader(former.epoch + 1, image, committed)

    def take_step(self) -> None:
        leader = self.leader
        if leader.appended is not None or not (leader.is_current or not self.asks_first):
            return
        target = TargetMembership(
            leader.image.replicas,
            {n: self.replica(n).storage_id for n in leader.image.replicas},
        )
        members = leader.committed.members
        heard = {m.node_id: self.replica(m.node_id).storage_id for m in members}
        alive = [m for m in members if m.node_id in self.running and m not in self.gone]
        leader.appended = next_configuration(leader.committed, heard, alive, alive, target)

    def commit(self) -> None:
        if self.leader.appended is not None:
            self.leader.committed, self.leader.appended = self.leader.appended, None

    def confirm(self) -> None:
        """Its followers say that it still leads: what it had seen before is seen for good."""
        told = self.leader
        if not self.confirms:
            told = self.random.choice([self.leader, *self.ghosts[-2:]])
        told.seen = told.image.target_version

    def state(self) -> None:
        told = self.random.choice([self.leader, *self.ghosts[-2:]])
        voters = tuple(sorted({v.node_id for v in told.committed.voters}))
        members = tuple(sorted({m.node_id for m in told.committed.members}))
        self.rows.append(MembersReport(*self.machine.group, told.epoch, voters, members, told.seen))


def test_who_may_vote_keeps_its_data() -> None:
    gone = sum(Group(Random(seed)).run(250) for seed in range(150))
    assert gone > 100, "the model does nothing"


@pytest.mark.parametrize("rule", ["asks_first", "confirms"])
def test_the_model_needs_both_rules(rule: str) -> None:
    with pytest.raises(DataGoneError):
        _run_all(rule)


def _run_all(rule: str) -> None:
    for seed in range(400):
        Group(Random(seed), **{rule: False}).run(250)
