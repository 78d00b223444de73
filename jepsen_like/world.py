"""A whole cluster on virtual time: one seed, one history.

Time, order and trace: `jepsen_like/virtual_time.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from uuid import UUID

from attrs import define

from jepsen_like.history import History, Operation, Outcome
from jepsen_like.invariants import Invariants
from jepsen_like.machine import SimMachine
from jepsen_like.network import Network
from jepsen_like.node import SimNode, original_configuration
from jepsen_like.options import SimOptions
from jepsen_like.virtual_time import VirtualTime
from raftmq.raft.ready import Role, SoftState
from raftmq.types import METADATA_GROUP, RaftGroupId, ReplicaId, TopicId


@define
class Summary:
    """What a run went through."""

    leader_changes: int = 0
    crashes: int = 0
    truncations: int = 0
    wipes: int = 0
    rots: int = 0
    log_starts: int = 0
    acked_records: int = 0
    rests: int = 0
    events: int = 0


@define
class Parked:
    """A client's append that waits for the high watermark of one leadership."""

    operation: Operation
    machine: SimMachine
    end: int
    epoch: int


class World(VirtualTime):
    """Nodes, network, clients and time."""

    def __init__(self, seed: int, options: SimOptions) -> None:
        self.summary = Summary()
        super().__init__(seed, self.summary)
        self.options = options
        self.random = Random(f"world {seed}")
        self.history = History()
        self.invariants = Invariants()
        self.siesta_until_ms = 0.0
        self.rotten: list[RaftGroupId] = []
        self._parked: list[Parked] = []
        self.groups = [METADATA_GROUP] + [
            RaftGroupId(TopicId(UUID(int=number + 10)), number, 7)
            for number in range(1, options.groups)
        ]
        self.network = Network(Random(f"network {seed}"), options, self.schedule, self._deliver)
        self.nodes = [
            SimNode(self, number, Random(f"node {seed} {number}"))
            for number in range(1, options.nodes + 1)
        ]
        self.initial = original_configuration(self.nodes)

    def buggify(self, site: str) -> bool:
        """Rarely taken branches, made frequent in the runs in which their site is armed."""
        return self.network.is_faulty and self.takes_rare_branch(site)

    # ---- nodes ----

    def start(self) -> None:
        """Boot all nodes."""
        for node in self.nodes:
            node.start()

    def restart(self, node: SimNode) -> Callable[[], None]:
        """An action that boots a node, if it is down by then."""

        def action() -> None:
            if not node.is_up:
                node.start()

        return action

    def node(self, node_id: int) -> SimNode:
        """By number."""
        return self.nodes[node_id - 1]

    def _deliver(self, sender: int, to: int, frame: bytes) -> None:
        node = self.node(to)
        self._digest.update(frame)
        if node.is_up:
            node.deliver(sender, frame)

    def forget(self, node: SimNode) -> None:
        """A node stopped: what clients waited for there is unknown."""
        machines = list(node.machines.values())
        for machine in machines:
            self.summary.truncations += machine.truncations
        self._end_parked(lambda parked: parked.machine in machines)
        node.machines = {}

    def heal(self) -> None:
        """All faults end: links, disks, power."""
        self.note("heal")
        self.network.is_faulty = False
        self.network.is_stormy = False
        self.network.mend_all()
        for node in self.nodes:
            node.is_slow = False
            node.crashes_after_voting = False
            node.paused_until_ms = 0.0
            node.disk.capacity_bytes = None
            node.disk.crash_after(None)
            if not node.is_up:
                node.start()

    def is_whole(self) -> bool:
        """True when every group has all nodes as voters under their present storage, caught up."""
        return all(self.is_group_whole(group) for group in self.groups)

    def is_group_whole(self, group: RaftGroupId) -> bool:
        """The same of one group."""
        leaders = self.leaders(group)
        if not leaders:
            return False
        leader = leaders[0].replicas[group]
        present: list[ReplicaId] = []
        for node in self.nodes:
            replica = node.replicas.get(group)
            if replica is None or replica.log.flushed_end < leader.commit_end:
                return False
            if replica.log.damaged or replica.core.claimed_end_floor:
                return False
            present.append(replica.self_id)
        configuration = leader.configuration
        return (
            configuration.voters == tuple(sorted(present))
            and not configuration.learners
            and leader.core.configurations.is_committed(leader.core.commit_end)
        )

    # ---- clients ----

    def leaders(self, group: RaftGroupId) -> list[SimNode]:
        """Nodes that believe that they lead, the latest term first."""
        found = [node for node in self.nodes if node.leads(group) is not None]
        found.sort(key=lambda node: -node.replicas[group].leader_epoch)
        return found

    def park(self, operation: Operation, machine: SimMachine, end: int, epoch: int) -> None:
        """A client's records were appended; it waits until the high watermark covers them."""
        self._parked.append(Parked(operation, machine, end, epoch))
        self.on_committed(machine)

    def on_committed(self, machine: SimMachine) -> None:
        """A high watermark moved: answer those whom it covers."""
        replica = machine.replica
        assert replica is not None
        if not self._parked or not replica.is_writable:
            return
        kept: list[Parked] = []
        for parked in self._parked:
            is_covered = parked.machine is machine and parked.end <= replica.high_watermark
            if is_covered and parked.epoch == replica.leader_epoch:
                self._acknowledge(parked)
            else:
                kept.append(parked)
        self._parked = kept

    def _acknowledge(self, parked: Parked) -> None:
        operation = parked.operation
        if operation.outcome is Outcome.PENDING:
            truth = self.invariants.truth(operation.group)
            truth.acked_end = max(truth.acked_end, parked.machine.commit_end)
            self.note("ack", operation.number, operation.offset)
        self.history.end(operation, Outcome.OK, self.now_ms)

    def on_role_changed(self, machine: SimMachine, soft: SoftState) -> None:
        """A replica leads, follows or stopped."""
        if machine.replica is None:
            return
        number = self.groups.index(machine.group)
        self.note("role", machine.identity, number, soft.role.value, soft.term)
        if soft.role is Role.LEADER:
            self.summary.leader_changes += 1
        else:
            self._end_parked(lambda parked: parked.machine is machine)

    def _end_parked(self, is_over: Callable[[Parked], bool]) -> None:
        kept: list[Parked] = []
        for parked in self._parked:
            if is_over(parked):
                self.history.end(parked.operation, Outcome.INFO, self.now_ms)
            else:
                kept.append(parked)
        self._parked = kept
