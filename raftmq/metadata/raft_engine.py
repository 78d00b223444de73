"""The metadata engine on our own Raft: how commands reach the group and results come back. A node
that does not lead forwards encoded commands to the controller and learns each outcome where every
node does: from its own copy of the log. So a result also means that the local image shows it.

What waits, and in which state, is `submissions.py`'s matter; here it is sent, appended and asked.

Invariants: while a forward or a batch is under way the next commands gather, and go together. After
a change of controller, or a lost forward, all unanswered commands are sent again in order with
their old numbers: `apply` takes each once. A command fails for certain only when it was rejected,
or when a later one of this node was applied without it; whatever else goes wrong is unknown
(REQUEST_TIMED_OUT). The replica is never called from within its own work (`Stage`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import Any, Final

import structlog

from raftmq.errors import ErrorCode, KafkaError, NotLeaderError, StorageError
from raftmq.logs import RateLimitedLog
from raftmq.metadata.apply import STALE_SEQUENCE
from raftmq.metadata.broker_messages import (
    NOBODY,
    BarrierRequest,
    ForwardCommands,
    Reply,
    encode,
    read_reply,
)
from raftmq.metadata.commands import (
    AnyCommand,
    Envelope,
    FeatureUpdate,
    NoOperation,
    UpdateFeatures,
    encode_envelope,
    version_of,
)
from raftmq.metadata.engine import (
    BatchCallback,
    CommandNotAppliedError,
    EngineConfig,
    Forwarder,
    ImageCallback,
    MetadataReplica,
)
from raftmq.metadata.features import write_error
from raftmq.metadata.image import MetadataImage
from raftmq.metadata.results import Result
from raftmq.metadata.state_machine import MetadataMachine, Skip
from raftmq.metadata.submissions import (
    BarrierRounds,
    CommandQueue,
    Forward,
    ForwardState,
    Round,
    Submissions,
    Unauthorized,
)
from raftmq.metadata.voters import metadata_target
from raftmq.ports import Clock
from raftmq.promise import Promise
from raftmq.raft.membership import LEARNERS_MAX, Configuration
from raftmq.raft.messages import SoftState
from raftmq.records import build_batch, parse_header
from raftmq.replication.broken_invariants import ReportBroken, reports_assertions
from raftmq.types import NodeId, Offset, RaftIndex, ReplicaId

_log: Final = RateLimitedLog(structlog.get_logger("raftmq.security"))
SNAPSHOT_PARTS_PER_TICK: Final = 64
"""Topics and groups encoded ahead in one tick: a millisecond or two."""


class Stage(IntEnum):
    """What the engine is doing: work that comes meanwhile is done at once, or later."""

    AT_REST = 0
    """Work is done in the call that brings it."""
    DRAINING = 1
    DRAINING_AGAIN = 2
    """Work came while draining: another pass follows this one."""
    REPORTING = 3
    """The machine tells of applied commands, within the replica's own work: the replica must not be
    called, and work waits for the next drain."""


STAGE_NEXT: Final[Mapping[Stage, frozenset[Stage]]] = {
    Stage.AT_REST: frozenset({Stage.DRAINING, Stage.REPORTING}),
    Stage.DRAINING: frozenset({Stage.DRAINING_AGAIN, Stage.AT_REST, Stage.REPORTING}),
    Stage.DRAINING_AGAIN: frozenset({Stage.DRAINING, Stage.AT_REST, Stage.REPORTING}),
    # A report comes in the midst of something, also of another report, which goes on after it.
    Stage.REPORTING: frozenset(Stage),
}
"""All ways from one stage to another; `RaftMetadataEngine._enter` alone takes them."""


class RaftMetadataEngine:
    """The engine on our own core and log."""

    def __init__(
        self,
        *,
        self_id: NodeId,
        incarnation: int,
        machine: MetadataMachine,
        forwarder: Forwarder,
        clock: Clock,
        on_broken_invariant: ReportBroken,
        wake: Callable[[], None],
        drain_later: Callable[[], None],
        config: EngineConfig | None = None,
        on_unauthorized: Unauthorized,
        first_levels: Callable[[], tuple[FeatureUpdate, ...]] = tuple,
    ) -> None:
        """Make an engine; `attach` its replica before the first tick.

        Args:
            incarnation: above that of this node's earlier processes. The wall clock will do: when
                it was not above, the engine finds out and takes a higher one.
            wake: called when the replica, and then this engine, want to be drained soon.
            drain_later: called while there is work that the next round of any replica's drain may
                make possible: `drain` is to follow it.
            on_unauthorized: told of each command of another node that it may not send.
            first_levels: with which a cluster begins, if this node is its first controller.
        """
        self._self_id = self_id
        self.incarnation = incarnation
        self._machine = machine
        self._forwarder = forwarder
        self._clock = clock
        self.on_broken_invariant = on_broken_invariant
        self._config = config or EngineConfig()
        self.wake = wake
        self._drain_later = drain_later
        self._first_levels = first_levels
        self._replica: MetadataReplica | None = None
        self._callbacks: list[ImageCallback] = []
        self._batch_callbacks: list[BatchCallback] = []
        self._role_callbacks: list[Callable[[], None]] = []
        self._submissions = Submissions()
        self._queue = CommandQueue(self._count_unauthorized)
        self._on_unauthorized = on_unauthorized
        self.unauthorized: dict[str, int] = {}
        """How many commands of other nodes were refused, which may not send them, by kind."""
        self._rounds = BarrierRounds()
        self._stage = Stage.AT_REST
        self._controller: tuple[NodeId | None, int] = (None, -1)  # as of the last drain
        self._role_moved = True  # since then
        self._snapshot_target = Offset(-1)
        self.first_voters: tuple[NodeId, ...] = ()
        """The voters with which the cluster began; the group should not stay with fewer."""
        self.last_contact_ms = clock.monotonic_ms()
        """When a majority was last known to be reached: by an applied command or a barrier."""
        machine.add_listener(self)

    def attach(self, replica: MetadataReplica, first_voters: Iterable[NodeId]) -> None:
        """Give the engine its replica, and the voters with which the cluster began; before the
        first tick."""
        self._replica = replica
        self.first_voters = tuple(first_voters)
        replica.follow_target_membership(
            lambda: metadata_target(replica.configuration, self.image, self.first_voters)
        )

    # ---- the port ----

    @property
    def image(self) -> MetadataImage:
        """The newest applied state on this node."""
        return self._machine.image

    @property
    def is_leader(self) -> bool:
        """True while this node leads and its own term's first entry is committed and applied."""
        replica = self._replica
        return replica is not None and replica.is_writable and self._machine.is_current

    @property
    def controller_id(self) -> NodeId | None:
        """The leader of the metadata group, as far as this node knows."""
        leader = None if self._replica is None else self._replica.leader
        return None if leader is None else leader.node_id

    @property
    def controller_epoch(self) -> int:
        """The metadata group's leader epoch."""
        return -1 if self._replica is None else int(self._replica.leader_epoch)

    @reports_assertions
    def propose(
        self,
        command: AnyCommand,
        *,
        broker_epoch: int = -1,
        expected_version: int = -1,
        timeout_ms: float | None = None,
        may_resend: bool = True,
    ) -> Promise[Any]:
        """Get a command applied; see the port."""
        if len(self._submissions.commands) >= self._config.pending_max:
            return Promise.failed(CommandNotAppliedError("too many commands wait on this node"))
        version = version_of(command)
        if not isinstance(command, UpdateFeatures) and (
            reason := write_error(type(command).__name__, version, self.image)
        ):
            return Promise.failed(KafkaError(reason, code=ErrorCode.UNSUPPORTED_VERSION))
        envelope = Envelope(
            version=version,
            node_id=self._self_id,
            incarnation=self.incarnation,
            sequence=self._submissions.last_sequence + 1,
            broker_epoch=broker_epoch,
            expected_version=expected_version,
            command=command,
        )
        promise = self._submissions.add(
            encode_envelope(envelope), self._deadline(timeout_ms), may_resend
        )
        self._work_came()
        return promise

    @reports_assertions
    def read_barrier(self, timeout_ms: float | None = None) -> Promise[None]:
        """Kept once this node has applied everything that was committed before the call."""
        promise = self._rounds.add(self._deadline(timeout_ms))
        self._work_came()
        return promise

    def on_image(self, callback: ImageCallback) -> None:
        """Call `callback(before, after)` after every change of the image."""
        self._callbacks.append(callback)

    def on_batch(self, callback: BatchCallback) -> None:
        """Call `callback(image)` before commands enter the log; see the port."""
        self._batch_callbacks.append(callback)

    def on_role(self, callback: Callable[[], None]) -> None:
        """Call `callback()` when the group has another leader or term."""
        self._role_callbacks.append(callback)

    # ---- driven by the node ----

    def tick(self) -> None:
        """Let time pass: expire, and send again what seems lost."""
        now_ms = self._clock.monotonic_ms()
        self._machine.catch_up()
        due = self._config.snapshot_due(self._machine.state_bytes)
        if 2 * self._machine.log_bytes > due or self._machine.has_skipped:
            self._machine.prepare_snapshot(SNAPSHOT_PARTS_PER_TICK)
        self._submissions.expire(now_ms)
        if self._led is None and self._submissions.is_overdue(now_ms, self._config.resend_ms):
            self._submissions.send_all_again()
        self._rounds.expire(now_ms, self._config.resend_ms)
        self.drain()

    def drain(self) -> None:
        """Do what calls into the replica, which its own callbacks must not. The node calls this
        after a round of the replicas' drains, once for each `wake` and `drain_later`."""
        if not self._has_work():
            return
        stage = self._stage
        if stage is not Stage.AT_REST:
            # What is reported may drain replicas, and then this: it wakes when the report ends.
            if stage is Stage.DRAINING:
                self._enter(Stage.DRAINING_AGAIN)
            return
        self._enter(Stage.DRAINING)
        try:
            self._drain_once()
            while self._stage is Stage.DRAINING_AGAIN:
                self._enter(Stage.DRAINING)
                self._drain_once()
        finally:
            self._enter(Stage.AT_REST)
        if self._has_work():
            self._drain_later()

    def _has_work(self) -> bool:
        machine = self._machine
        return (
            self._role_moved
            or bool(self._submissions.commands)
            or bool(self._queue.commands)
            or self._rounds.is_due
            or machine.log_bytes >= self._config.snapshot_bytes_min
            or machine.has_skipped
        )

    def _drain_once(self) -> None:
        if self._role_moved:
            self._note_role()
        if self._submissions.has_unsent:
            self._send_unsent()
        if self._queue.commands and not self._queue.is_in_flight:
            self._tell_of_batch()
            self._append_queue()
        if self._rounds.is_due:
            self._begin_barrier()
        machine = self._machine
        if machine.has_skipped or machine.log_bytes >= self._config.snapshot_bytes_min:
            self._maybe_snapshot()

    def _enter(self, stage: Stage) -> None:
        assert stage in STAGE_NEXT[self._stage], f"{self._stage.name} to {stage.name}"
        self._stage = stage

    # ---- members ----

    @property
    def configuration(self) -> Configuration | None:
        """The members of the group, as far as this node knows; None before it has a replica."""
        return None if self._replica is None else self._replica.configuration

    @property
    def is_member(self) -> bool:
        """True while this node is in the group's configuration, as far as it knows."""
        members = () if self.configuration is None else self.configuration.members
        return any(member.node_id == self._self_id for member in members)

    def admit(self, joiner: ReplicaId) -> None:
        """Take a node into the group as a learner, unless its number is in the group: the replica
        itself replaces a member whose storage is another one now.

        Raises:
            KafkaError: not the leader, or another change is under way.
        """
        if not self.is_leader or self._replica is None:
            raise KafkaError(code=ErrorCode.NOT_CONTROLLER)
        configuration = self._replica.configuration
        if any(member.node_id == joiner.node_id for member in configuration.members):
            return
        if len(configuration.learners) >= LEARNERS_MAX:
            raise KafkaError("too many nodes follow", code=ErrorCode.POLICY_VIOLATION)
        learners = tuple(sorted((*configuration.learners, joiner)))
        self._replica.change_membership(Configuration(configuration.voters, learners))
        self.wake()

    # ---- other nodes' requests ----

    def close(self) -> None:
        """Nothing to give back: log and journal are the node's."""

    @reports_assertions
    def receive_commands(self, sender: NodeId, request: ForwardCommands) -> Reply:
        """Take another node's own commands into the queue, if this node leads."""
        if self._led is None:
            return self._not_controller()
        size = sum(len(command) for command in request.commands)
        if self._queue.commands and self._queue.size_bytes + size > self._config.queue_bytes_max:
            return Reply(ErrorCode.THROTTLING_QUOTA_EXCEEDED, self._self_id)
        reply = Reply(ErrorCode.NONE, self._self_id)
        for number, command in enumerate(request.commands):
            if reason := self._take(command, sender):
                if not self.is_leader:
                    # It may be in the log already, and this image behind: all of it comes again.
                    reply = self._not_controller()
                    break
                # Those before it are taken; its sender gives it up and sends the rest again.
                index = RaftIndex(number)
                reply = Reply(ErrorCode.INVALID_REQUEST, self._self_id, index, message=reason)
                break
        self._work_came()
        return reply

    def _take(self, command: bytes, submitter: NodeId) -> str:
        is_own = submitter == self._self_id
        supported = self._machine.supported
        return self._queue.take(command, submitter, self.image, supported, is_own=is_own)

    def _count_unauthorized(self, sender: NodeId, kind: str, reason: str) -> None:
        self.unauthorized[kind] = self.unauthorized.get(kind, 0) + 1
        _log.warning("command of another node refused", command=kind, why=reason)
        self._on_unauthorized(sender, kind, reason)

    @reports_assertions
    def receive_barrier(self, request: BarrierRequest) -> Promise[Reply]:
        """Tell another node how far it must apply to have seen all that is committed now."""
        reply: Promise[Reply] = Promise()
        replica = self._led
        if replica is None:
            reply.resolve(self._not_controller())
            return reply

        def settled(barrier: Promise[RaftIndex]) -> None:
            if barrier.error is None:
                reply.resolve(Reply(ErrorCode.NONE, self._self_id, barrier.result()))
            else:
                reply.resolve(self._not_controller())

        replica.read_barrier().when_done(settled)
        self.wake()
        return reply

    # ---- the machine's listener: no call into the replica from here ----

    def command_applied(self, envelope: Envelope, result: Result, offset: Offset) -> None:
        """Note the result of an own command; answered once the image that shows it is out."""
        self.last_contact_ms = self._clock.monotonic_ms()
        if not self._submissions.commands or envelope.node_id != self._self_id:
            return
        if envelope.incarnation != self.incarnation:
            return
        if result is not STALE_SEQUENCE:
            self._submissions.applied(envelope.sequence, result)
            return
        # It was sent twice, or this incarnation is not above an earlier one's.
        last, _ = self.image.submitters.get(self._self_id, (0, 0))
        if last > self.incarnation:
            self.incarnation = last + 1
            self._submissions.incarnation_ended()

    def command_skipped(self, skip: Skip) -> None:
        """Nothing to do: the process that submitted it ended at this command."""

    def state_restored(self, image: MetadataImage) -> None:
        """What a snapshot skipped may hold own commands: their outcome is unknown."""
        incarnation, last = image.submitters.get(self._self_id, (-1, -1))
        # An earlier process's says nothing; a later one's shows when a command comes back stale.
        if incarnation == self.incarnation:
            self._submissions.restored(last)

    def image_changed(self, before: MetadataImage, after: MetadataImage) -> None:
        """Publish the image, then answer."""
        self._queue.applied(Offset(after.version + 1))
        stage = self._stage
        self._enter(Stage.REPORTING)
        try:
            for callback in self._callbacks:
                callback(before, after)
            self._submissions.settle()
        finally:
            self._enter(stage)
        self._wake_for_work()

    def advanced(self, applied_end: RaftIndex) -> None:
        """Keep barriers that waited for this; a snapshot may be due by now."""
        if self._has_work():
            self._drain_later()
        kept = self._rounds.applied(applied_end)
        if not kept:
            return
        stage = self._stage
        self._enter(Stage.REPORTING)
        try:
            for promise in kept:
                promise.resolve(None)
        finally:
            self._enter(stage)
        self._wake_for_work()

    def role_changed(self, soft: SoftState) -> None:
        """Another leader or term: see to it at the next drain, outside the replica."""
        self._role_moved = True
        self.wake()

    # ---- work ----

    def _work_came(self) -> None:
        """Do what is due now, or soon when the replica is at work."""
        if self._stage is Stage.REPORTING:
            self.wake()
        else:
            self.drain()

    def _wake_for_work(self) -> None:
        if (
            self._role_moved
            or self._queue.commands
            or self._rounds.is_due
            or self._rounds.has_next
            or self._submissions.has_unsent
        ):
            self.wake()

    # ---- sending ----

    def _note_role(self) -> None:
        self._role_moved = False
        controller = (self.controller_id, self.controller_epoch)
        if controller == self._controller:
            return
        self._controller = controller
        self._queue.clear()
        if self._submissions.abandon_unrepeatable():
            self.propose(NoOperation())
        self._submissions.send_all_again()
        self._rounds.ask_again()
        self._begin_cluster()
        for callback in self._role_callbacks:
            callback()

    def _begin_cluster(self) -> None:
        """Where no command was ever committed, the first ones of all finalize levels.

        A leader's log has all that is committed: it is the first controller while that has no
        record. What this node proposed before goes with it in one batch, which is committed or
        lost as a whole, so no version that does this ever goes on after a beginning without it.
        """
        replica = self._led
        if replica is None or replica.log_end_offset:
            return
        levels = self._first_levels()
        if levels and self.image.version < 0:
            self.propose(UpdateFeatures(updates=levels))

    def _send_unsent(self) -> None:
        """Put own commands into the queue where this node leads, else forward them."""
        submissions = self._submissions
        if self._led is not None:
            room = self._config.queue_bytes_max - self._queue.size_bytes
            for command in submissions.next_unsent(room):
                if reason := self._take(command.data, self._self_id):
                    submissions.fail(command, KafkaError(reason, code=ErrorCode.INVALID_REQUEST))
            return
        controller = self.controller_id
        if controller is None or controller == self._self_id:
            return
        forward = submissions.begin_forward(
            self._config.batch_bytes_max, self._clock.monotonic_ms()
        )
        if forward is not None:
            payload = encode(ForwardCommands(tuple(c.data for c in forward.commands)))
            self._forwarder.send(controller, payload).when_done(
                lambda reply: self._forward_done(forward, reply)
            )

    def _forward_done(self, forward: Forward, promise: Promise[bytes]) -> None:
        if forward.state is not ForwardState.UNDER_WAY:
            return  # given up long ago
        reply = read_reply(promise)
        if reply is None:
            forward.become(ForwardState.FAILED)
        elif reply.code is ErrorCode.NONE:
            self._submissions.forward_taken(forward)
            if self._submissions.has_unsent:
                self._send_unsent()
        elif reply.code is ErrorCode.INVALID_REQUEST and reply.index < len(forward.commands):
            error = KafkaError(reply.message, code=reply.code)
            self._submissions.forward_refused(forward, reply.index, error)
            self._work_came()
        else:
            forward.become(ForwardState.FAILED)

    def _tell_of_batch(self) -> None:
        """Let what the next batch makes possible go with it."""
        if self._led is None:
            return
        for callback in self._batch_callbacks:
            callback(self._queue.trial or self.image)
        if self._submissions.has_unsent:
            self._send_unsent()

    def _append_queue(self) -> None:
        """Append what waits as one batch, unless one is under way."""
        replica = self._led
        if replica is None:
            return
        records = self._queue.next_batch(self._config.batch_bytes_max)
        if not records:
            return
        batch = build_batch(records, timestamp=self._clock.wall_ms())
        try:
            base = replica.append(batch, parse_header(batch))
        except (NotLeaderError, StorageError):
            return  # deposed: sent again elsewhere; disk full: tried again at the next tick
        self._queue.appended(len(records), Offset(base + len(records)))
        self.wake()

    @property
    def _led(self) -> MetadataReplica | None:
        """The replica, while it leads."""
        replica = self._replica
        return replica if replica is not None and replica.is_leader else None

    def _not_controller(self) -> Reply:
        controller = self.controller_id
        return Reply(ErrorCode.NOT_CONTROLLER, NOBODY if controller is None else controller)

    def _deadline(self, timeout_ms: float | None) -> float:
        wait_ms = self._config.timeout_ms if timeout_ms is None else timeout_ms
        return self._clock.monotonic_ms() + wait_ms

    # ---- barriers ----

    def _begin_barrier(self) -> None:
        """Ask for the committed end, for all callers that wait; one round at a time."""
        due = self._rounds.due()
        if due is None:
            return
        replica = self._led
        if replica is not None:
            self._rounds.asked(due, self._clock.monotonic_ms())
            replica.read_barrier().when_done(lambda promise: self._barrier_index(due, promise))
            self.wake()
            return
        controller = self.controller_id
        if controller is None or controller == self._self_id:
            return
        self._rounds.asked(due, self._clock.monotonic_ms())
        self._forwarder.send(controller, encode(BarrierRequest())).when_done(
            lambda promise: self._barrier_reply(due, promise)
        )

    def _barrier_reply(self, asked: Round, promise: Promise[bytes]) -> None:
        reply = read_reply(promise)
        if reply is None or reply.code is not ErrorCode.NONE:
            self._rounds.failed(asked)
        else:
            self._barrier_known(asked, reply.index)

    def _barrier_index(self, asked: Round, promise: Promise[RaftIndex]) -> None:
        if promise.error is not None:
            self._rounds.failed(asked)
        else:
            self._barrier_known(asked, promise.result())

    def _barrier_known(self, asked: Round, index: RaftIndex) -> None:
        if self._rounds.answered(asked, index):
            self.last_contact_ms = self._clock.monotonic_ms()
            self.advanced(self._machine.applied_end)

    # ---- snapshots ----

    def _maybe_snapshot(self) -> None:
        """Move the log start up to here when enough log has gathered, or a command was skipped.

        Only with nothing above the applied state: then every replica meets the log-start entry at
        exactly this state, whenever it commits it.
        """
        machine = self._machine
        is_due = machine.log_bytes >= self._config.snapshot_due(machine.state_bytes)
        if not (machine.has_skipped or is_due) or machine.is_encoding:
            return  # while one is encoded there is no other
        if not self.is_leader or self._queue.is_in_flight:
            return
        assert self._replica is not None
        target = machine.applied_offset
        if target != self._replica.log_end_offset or target == self._snapshot_target:
            return
        try:
            self._replica.move_log_start(target)
        except (NotLeaderError, StorageError):
            return  # the next leader, or the next tick, does it
        self._snapshot_target = target
        self.wake()
