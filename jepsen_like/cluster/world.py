"""A cluster of whole nodes, and clients, on virtual time: one seed, one history.

Time, order and trace: `jepsen_like/virtual_time.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final
from zlib import crc32

from attrs import define, field

from jepsen_like.cluster.admins import RecordDeleter
from jepsen_like.cluster.consumers import Member
from jepsen_like.cluster.delayed import Ledger
from jepsen_like.cluster.delayed_more import Parting
from jepsen_like.cluster.elastic import Elastic
from jepsen_like.cluster.narrow import Narrower
from jepsen_like.cluster.node import ClusterNode
from jepsen_like.cluster.options import ClusterOptions
from jepsen_like.cluster.tasks import SimTasks
from jepsen_like.cluster.watch import Watch
from jepsen_like.cluster.wires import Wires
from jepsen_like.history_events import Event, Recorder
from jepsen_like.invariants import InvariantViolation
from jepsen_like.virtual_time import VirtualTime
from raftmq.metadata.image import EMPTY_IMAGE, MetadataImage
from raftmq.types import METADATA_GROUP, NodeId, RaftGroupId


@define
class Counts:
    """What a run went through."""

    acked: int = 0
    leader_changes: int = 0
    controllers: int = 0
    crashes: int = 0
    rebalances: int = 0
    truncations: int = 0
    log_starts: int = 0
    wipes: int = 0
    rots: int = 0
    stale_sectors: int = 0
    journals: int = 0
    replacements: int = 0
    moves: int = 0
    malformed: int = 0
    look_ups: int = 0
    scrapes: int = 0
    events: int = 0
    faults: dict[str, int] = field(factory=dict)
    """How often each struck."""
    effects: dict[str, int] = field(factory=dict)
    """How often something came of it, see `had_effect`."""


FLOORS: Final = {"acked": 1_000, "leader_changes": 5, "crashes": 3, "rebalances": 2}
"""What a run that goes through less of says too little."""


@define
class Fault:
    """One strike of the nemesis: when, which, and the draw that decided its details."""

    at_ms: float
    name: str
    draw: int


class ClusterWorld(VirtualTime):
    """Nodes, wires, clients and time."""

    def __init__(self, seed: int, options: ClusterOptions) -> None:
        self.counts = Counts()
        super().__init__(seed, self.counts)
        self.options = options
        self.random = Random(f"cluster world {seed}")
        self.events: list[Event] = []
        self.recorder = Recorder(self.events.append, lambda: int(self.now_ms * 1e6))
        self.is_quiet = False
        """True once clients should come to an end."""
        self.generations: dict[tuple[str, int], bool] = {}
        """Generations of groups that some member was told of."""
        self._values = 0
        self.names: dict[RaftGroupId, str] = {}
        """Partitions as histories name them."""
        self.groups: dict[str, RaftGroupId] = {}
        """The first group of each of those names."""
        self.delete_wishes: dict[str, int] = {}
        """Below which offsets clients asked to delete."""
        self._log_starts: dict[RaftGroupId, int] = {}
        self.partitions: list[tuple[str, int]] = []
        """Of the topics that clients use."""
        self.deleter: RecordDeleter | None = None
        self.delayed = Ledger()
        self.parting = Parting(counts_attempts=not options.parting_plain)
        self.members: list[Member] = []
        self.elastic: Elastic | None = None
        self.narrower: Narrower | None = None
        self.is_written = False
        """True once no producer has anything under way."""
        self.is_under_faults = False
        """From the first fault on until all have ended."""
        self.is_healed = False
        self.cut_off: dict[int, bool] = {}
        """Nodes that clients cannot reach."""
        self.watch = Watch(self)
        self.wires = Wires(self, Random(f"wires {seed}"))
        self.nodes = [
            ClusterNode(self, NodeId(number), Random(f"cluster node {seed} {number}"))
            for number in range(1, options.nodes + options.spares + options.newcomers + 1)
        ]
        self.clients = SimTasks(self.schedule, lambda work: self.schedule(0.0, work))

    def buggify(self, site: str) -> bool:
        """Rarely taken branches, made frequent in the runs in which their site is armed."""
        return not self.is_healed and self.takes_rare_branch(site)

    def had_effect(self, what: str) -> None:
        """A fault met what it was meant for."""
        effects = self.counts.effects
        effects[what] = effects.get(what, 0) + 1

    @property
    def slowdown(self) -> float:
        """So much longer clients think now."""
        has_enough = self.counts.acked >= FLOORS["acked"] and not self.is_quiet
        return self.options.slowdown if has_enough else 1.0

    def next_value(self) -> int:
        """A value that no record has."""
        self._values += 1
        return self._values

    def log_start_moves(self, group: RaftGroupId, offset: int) -> None:
        """Records below an offset go, by wish or by age: the history must know before clients."""
        name = self.names.get(group)
        if name is not None and offset > self._log_starts.get(group, 0):
            self._log_starts[group] = offset
            is_asked = offset <= self.delete_wishes.get(name, 0)
            is_judged = name.rpartition("-")[0] in {topic for topic, _ in self.partitions}
            if is_judged and not is_asked and self.options.retention_bytes < 0:
                # Nothing here is a fortnight old, whatever some node's clock says.
                raise InvariantViolation(
                    "RetentionByAgreedTime", f"{name}: records below {offset} go too early"
                )
            self.recorder.note(-1, "log_start", offsets={name: offset})

    def log_start_of(self, group: RaftGroupId) -> int:
        """Below which offset records of a group were to go, as far as anybody knows."""
        return self._log_starts.get(group, 0)

    def is_newest_leader(self, node_id: int, name: str) -> bool:
        """True when a node leads a partition, and nobody of a later epoch does."""
        group = self.groups.get(name)
        return group is not None and self.watch.newest_leader(group) == node_id

    def keeps_leader(self, group: RaftGroupId) -> bool:
        """True while no fault is a reason for a new leader of this group."""
        if not (self.options.keeps_leaders and self.is_under_faults):
            return False
        own = [f"{topic}-{index}" for topic, index in self.partitions]
        return group == METADATA_GROUP or self.names.get(group) in own

    def loses_client_frame(self) -> bool:
        """True when a client's connection breaks now."""
        odds = self.options.client_drop
        return odds > 0 and self.wires.is_faulty and self.random.random() < odds

    # ---- nodes ----

    def node(self, node_id: int) -> ClusterNode:
        """By number."""
        return self.nodes[node_id - 1]

    def start(self) -> None:
        """Boot all nodes."""
        for node in self.present:
            node.start()

    @property
    def present(self) -> list[ClusterNode]:
        """The nodes that the cluster is to consist of just now."""
        return [node for node in self.nodes if node.is_wanted]

    @property
    def newest_image(self) -> MetadataImage:
        """The newest that any node has."""
        images = [n.core.engine.image for n in self.present if n.core is not None]
        return max(images, key=lambda image: int(image.version), default=EMPTY_IMAGE)

    def restart(self, node: ClusterNode) -> Callable[[], None]:
        """An action that boots a node, if it is down by then."""

        def action() -> None:
            if not node.is_up and node.is_wanted and not node.is_held:
                node.start()

        return action

    def frame_arrives(self, sender: NodeId, to: NodeId, kind: int, data: bytes) -> None:
        """A frame reached a node's machine."""
        self._digest.update(b"%d %d %d %x" % (sender, to, kind, crc32(data)))
        node = self.nodes[to - 1]
        if node.is_listening:
            node.deliver(sender, kind, data)

    def heal(self) -> None:
        """All faults end: links, disks, clocks, power."""
        self.note("heal")
        self.recorder.note(-1, "heal")
        self.is_healed = True
        self.is_under_faults = False
        self.wires.is_faulty = self.wires.is_stormy = False
        self.wires.mend_all()
        self.cut_off.clear()
        for node in self.present:
            node.heal()

    def close(self) -> None:
        """End what still runs, so that nothing is left to the garbage collector's order."""
        self.clients.kill()
        for node in self.nodes:
            node.close()
