"""The port through which all of raftmq changes and reads metadata.

Two engines implement it: `raft_engine.py` on our own Raft and log, and
`runtime/reference_engine.py` on pysyncobj, which runs the same state machine for comparison. Owns
no behaviour. A node learns the result of its command where every node does, from the applied log,
so a kept promise also means that this node's image shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from attrs import frozen

from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import BarrierRequest, ForwardCommands, Reply
from raftmq.metadata.commands import AnyCommand
from raftmq.metadata.image import MetadataImage
from raftmq.ports import Buggify, never
from raftmq.promise import Promise
from raftmq.raft.membership import Configuration
from raftmq.records import BatchHeader
from raftmq.replication.membership import TargetMembership
from raftmq.types import LeaderEpoch, NodeId, Offset, RaftIndex, ReplicaId

ImageCallback = Callable[[MetadataImage, MetadataImage], None]
BatchCallback = Callable[[MetadataImage], None]


class CommandNotAppliedError(KafkaError):
    """The command was certainly not applied and never will be; it may be proposed anew."""

    code = ErrorCode.NOT_CONTROLLER


class MetadataEngine(Protocol):
    """The metadata state machine, replicated; on our Raft or on the reference engine."""

    @property
    def image(self) -> MetadataImage:
        """The newest applied state on this node."""
        ...

    @property
    def is_leader(self) -> bool:
        """True while this node is the controller and has applied all that came before it."""
        ...

    @property
    def controller_id(self) -> NodeId | None:
        """The leader of the metadata group, as far as this node knows."""
        ...

    @property
    def controller_epoch(self) -> int:
        """Rises with every controller."""
        ...

    def propose(
        self,
        command: AnyCommand,
        *,
        broker_epoch: int = -1,
        expected_version: int = -1,
        timeout_ms: float | None = None,
        may_resend: bool = True,
    ) -> Promise[Any]:
        """Get a command applied; the promise gives its result once this node's image shows it.

        It fails with the code of a `Rejection`, with CommandNotAppliedError (certainly not applied)
        or with REQUEST_TIMED_OUT (unknown). `may_resend` False: it makes sense from the present
        controller only.
        """
        ...

    @property
    def last_contact_ms(self) -> float:
        """When a majority was last known to be reached, on the monotonic clock."""
        ...

    def read_barrier(self, timeout_ms: float | None = None) -> Promise[None]:
        """Kept once this node has applied everything that was committed before the call."""
        ...

    def on_image(self, callback: ImageCallback) -> None:
        """Call `callback(before, after)` after every change of the image."""
        ...

    def on_batch(self, callback: BatchCallback) -> None:
        """On the controller, call `callback(image)` before commands enter the log, with the image
        that they will leave unless they are lost. What is proposed there enters with them."""
        ...

    @property
    def configuration(self) -> Configuration | None:
        """The members of the metadata group; None where it is no Raft group."""
        ...

    @property
    def first_voters(self) -> Sequence[NodeId]:
        """The voters with which the cluster began."""
        ...


class DrivenEngine(MetadataEngine, Protocol):
    """An engine as the control plane drives it."""

    unauthorized: dict[str, int]
    """How many commands of other nodes were refused, which may not send them, by kind."""

    @property
    def is_member(self) -> bool:
        """True while this node follows the metadata log, as far as it knows."""
        ...

    def on_role(self, callback: Callable[[], None]) -> None:
        """Call `callback()` when the group has another leader or term."""
        ...

    def admit(self, joiner: ReplicaId) -> None:
        """Let a node follow the metadata log, as a learner; only on the controller.

        Raises:
            KafkaError: not now; it may be asked for again.
        """
        ...

    def receive_commands(self, sender: NodeId, request: ForwardCommands) -> Reply:
        """Take another node's own commands, if this node leads."""
        ...

    def receive_barrier(self, request: BarrierRequest) -> Promise[Reply]:
        """Answer up to where another node must apply to have seen all that is committed now."""
        ...

    def tick(self) -> None:
        """Let time pass."""
        ...

    def drain(self) -> None:
        """Do the work that must not be done within callbacks of the replica, if any."""
        ...

    def close(self) -> None:
        """Release threads and ports, where the engine has any."""
        ...


class Forwarder(Protocol):
    """Requests to other nodes, with replies; when the connection ends they fail: a KafkaError."""

    def send(self, node_id: NodeId, payload: bytes, *, is_beat: bool = False) -> Promise[bytes]:
        """Send one request; never blocks. A beat may arrive a tick later at a quiescent node."""
        ...

    def version(self, node_id: NodeId) -> int:
        """The format that a node understands just now; 0 while it is not reached."""
        ...


class MetadataReplica(Protocol):
    """The part of `Replica` that the engine uses."""

    @property
    def is_leader(self) -> bool: ...
    @property
    def is_writable(self) -> bool: ...
    @property
    def leader(self) -> ReplicaId | None: ...
    @property
    def leader_epoch(self) -> LeaderEpoch: ...
    @property
    def log_end_offset(self) -> Offset: ...
    def append(self, batch: bytearray, header: BatchHeader) -> Offset: ...
    def read_barrier(self) -> Promise[RaftIndex]: ...
    def move_log_start(self, target: Offset) -> object: ...
    @property
    def configuration(self) -> Configuration: ...
    def change_membership(self, configuration: Configuration) -> object: ...
    def follow_target_membership(self, target: Callable[[], TargetMembership | None]) -> None: ...


@frozen(slots=True)
class EngineConfig:
    """Limits and times of the engine.

    Attributes:
        timeout_ms: how long a command or barrier may take before its outcome is unknown.
        resend_ms: a forward without a reply for so long is taken for lost.
        pending_max: commands of this node without an outcome; above it new ones are refused.
        batch_bytes_max: commands of one batch.
        queue_bytes_max: commands that wait for a batch; above it forwards are refused.
        snapshot_bytes_min: a snapshot is due after so much log at least,
        snapshot_factor: and after so many times the size of the state.
        buggify: rarely taken branches made frequent; never, outside the simulation.
    """

    timeout_ms: float = 5_000
    resend_ms: float = 1_000
    pending_max: int = 20_000
    batch_bytes_max: int = 512 << 10
    queue_bytes_max: int = 16 << 20
    snapshot_bytes_min: int = 64 << 20
    snapshot_factor: int = 4
    buggify: Buggify = never

    def snapshot_due(self, state_bytes: int) -> int:
        """Bytes of log after which a snapshot of a state of that size pays."""
        if self.buggify("metadata.early_snapshot"):
            return 1
        return max(self.snapshot_bytes_min, self.snapshot_factor * state_bytes)
