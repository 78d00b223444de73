"""The metadata engine on our own Raft: how commands reach the group and results come back. A node
that does not lead forwards encoded commands to the controller and learns each outcome where every
node does: from its own copy of the log. So a result also means that the local image shows it.

Invariants: a submitter has one stream of commands, numbered; while a forward or a batch is under
way the next ones gather, and go together. After a change of controller, or a lost forward, all
unanswered commands are sent again in order with their old numbers: `apply` takes each once. A
command fails for certain only when it was rejected, or when a later one of this node was applied
without it; whatever else goes wrong is unknown (REQUEST_TIMED_OUT). Barriers are coalesced: all
callers that came before a round began share it, never one that came later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from attrs import define, field

from raftmq.errors import (
    ErrorCode,
    KafkaError,
    NotLeaderError,
    RequestTimedOutError,
    StorageError,
)
from raftmq.foreign import CLOCK_MS_MAX
from raftmq.metadata.apply import STALE_SEQUENCE, apply
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
    NoOperation,
    Rejection,
    Result,
    UpdateFeatures,
    decode_envelope,
    encode_envelope,
    version_of,
)
from raftmq.metadata.engine import (
    CommandNotAppliedError,
    EngineConfig,
    Forwarder,
    ImageCallback,
    MetadataReplica,
)
from raftmq.metadata.features import check_supported, write_error
from raftmq.metadata.image import MetadataImage, metadata_target
from raftmq.metadata.machine import MetadataMachine
from raftmq.ports import Clock
from raftmq.promise import Promise
from raftmq.raft.membership import LEARNERS_MAX, Configuration
from raftmq.raft.messages import SoftState
from raftmq.records import NewRecord, build_batch, parse_header
from raftmq.replication.broken_invariants import ReportBroken, reports_assertions
from raftmq.types import NodeId, Offset, RaftIndex, ReplicaId

OVERTAKEN: Final = object()
SKIPPED: Final = object()


@define(eq=False)
class Pending:
    """One command, encoded once: it is sent again under its old number.

    Attributes:
        may_resend: False where it makes sense from the present controller only.
        is_sent: it may be in a log.
        is_abandoned: it may be, and is not sent again; a later command tells.
    """

    sequence: int
    data: bytes
    promise: Promise[Any]
    deadline_ms: float
    may_resend: bool
    is_sent: bool = False
    is_abandoned: bool = False


def settle(promise: Promise[Any], result: Result) -> None:
    """Keep or break the promise, as the log says."""
    if result is OVERTAKEN:
        promise.fail(CommandNotAppliedError("overtaken by a later command"))
    elif result is SKIPPED:
        promise.fail(RequestTimedOutError("applied or not, before the snapshot that came"))
    elif isinstance(result, Rejection):
        promise.fail(KafkaError(result.message, code=result.code))
    else:
        promise.resolve(result)


def incarnation_max(image: MetadataImage, node_id: NodeId) -> int:
    """The highest incarnation that is believed of a node's commands.

    A process takes what its clock says, or the one after the last that was applied. A command that
    claims the end of the range would leave no higher one: the node could submit nothing any more.
    """
    last, _ = image.submitters.get(node_id, (0, 0))
    return max(CLOCK_MS_MAX, last + 1)


@define(eq=False)
class Round:
    """Who waits (with deadlines), when it was asked (-1: not yet), and the answer."""

    promises: list[tuple[Promise[None], float]] = field(factory=list)
    asked_ms: float = -1.0
    index: RaftIndex | None = None


class BarrierRounds:
    """The round under way and the next one."""

    def __init__(self) -> None:
        self._current: Round | None = None
        self._next: Round | None = None

    @property
    def has_next(self) -> bool:
        """True when somebody waits for a round that cannot begin yet."""
        return self._next is not None

    def add(self, promise: Promise[None], deadline_ms: float) -> None:
        """Wait for the next round."""
        if self._next is None:
            self._next = Round()
        self._next.promises.append((promise, deadline_ms))

    @property
    def is_due(self) -> bool:
        """True when `due` gives a round."""
        first = self._current or self._next
        return first is not None and first.asked_ms < 0

    def due(self) -> Round | None:
        """The round that should be asked now; the caller sets `asked_ms` when it is."""
        if self._current is None:
            self._current, self._next = self._next, None
        if self._current is None or self._current.asked_ms >= 0:
            return None
        return self._current

    def is_waiting(self, asked: Round) -> bool:
        """True while this round is under way and has no answer."""
        return asked is self._current and asked.index is None

    def ask_again(self) -> None:
        """The question may be lost."""
        if self._current is not None and self._current.index is None:
            self._current.asked_ms = -1.0

    def applied(self, applied_end: RaftIndex) -> list[Promise[None]]:
        """The promises that are kept now that everything below `applied_end` is applied."""
        current = self._current
        if current is None or current.index is None or applied_end < current.index:
            return []
        self._current = None
        return [promise for promise, _ in current.promises]

    def expire(self, now_ms: float, resend_ms: float) -> None:
        """Fail who waited too long; ask again what has no answer."""
        for waiting in (self._current, self._next):
            if waiting is None:
                continue
            late = [promise for promise, deadline in waiting.promises if deadline <= now_ms]
            waiting.promises = [row for row in waiting.promises if row[1] > now_ms]
            for promise in late:
                promise.fail(RequestTimedOutError("no majority of the metadata group answered"))
        current = self._current
        if current is not None:
            if not current.promises:
                self._current = None
            elif current.index is None and now_ms - current.asked_ms >= resend_ms:
                current.asked_ms = -1.0


FIRST_SEQUENCE: Final = 1
REFUSAL_LENGTH_MAX: Final = 300
SNAPSHOT_PARTS_PER_TICK: Final = 64
"""Topics and groups encoded ahead in one tick: a millisecond or two."""


def _nothing() -> None:
    return None


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
        config: EngineConfig | None = None,
        wake: Callable[[], None] = _nothing,
    ) -> None:
        """Make an engine; `attach` its replica before the first tick.

        Args:
            incarnation: above that of this node's earlier processes. The wall clock will do: when
                it was not above, the engine finds out and takes a higher one.
            wake: called when the replica, and then this engine, want to be drained soon.
        """
        self._self_id = self_id
        self.incarnation = incarnation
        self._machine = machine
        self._forwarder = forwarder
        self._clock = clock
        self.on_broken_invariant = on_broken_invariant
        self._config = config or EngineConfig()
        self.wake = wake
        self._replica: MetadataReplica | None = None
        self._callbacks: list[ImageCallback] = []
        self._role_callbacks: list[Callable[[], None]] = []
        self._sequence = FIRST_SEQUENCE - 1
        self._pending: dict[int, Pending] = {}  # in the order of sequences
        self._applied: list[tuple[Pending, Result]] = []  # to be answered with the next image
        self._sent_sequence = 0  # own commands up to here are in the queue or forwarded
        self._queue: list[bytes] = []  # only on the controller: commands of the next batches
        self._queue_bytes = 0
        self._in_flight_end: Offset | None = None
        self._trial: MetadataImage | None = None
        """The image as the queue and the batch under way will leave it; None: as it is."""
        self._forward_round = 0
        self._forward_began_ms = -1.0
        self._rounds = BarrierRounds()
        self._controller: tuple[NodeId | None, int] = (None, -1)
        self._snapshot_target = Offset(-1)
        self._inside = 0  # within a callback of the replica, which must not be called then
        self._role_moved = True
        self._is_draining = False
        self._drain_again = False
        self._stale = False
        self._retry_at_tick = False
        self.first_voters: tuple[NodeId, ...] = ()
        """With whom the cluster began; the group is not to have fewer voters for ever."""
        self.last_contact_ms = clock.monotonic_ms()
        """When a majority last proved to be there: a command was applied or a barrier answered."""
        machine.add_listener(self)

    def attach(self, replica: MetadataReplica) -> None:
        """Give the engine its replica; before the first tick."""
        self._replica = replica
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
        """Who leads the metadata group, as far as this node knows."""
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
        if len(self._pending) >= self._config.pending_max:
            return Promise.failed(CommandNotAppliedError("too many commands wait on this node"))
        version = version_of(command)
        if not isinstance(command, UpdateFeatures) and (
            reason := write_error(type(command).__name__, version, self.image)
        ):
            return Promise.failed(KafkaError(reason, code=ErrorCode.UNSUPPORTED_VERSION))
        self._sequence += 1
        envelope = Envelope(
            version=version,
            node_id=self._self_id,
            incarnation=self.incarnation,
            sequence=self._sequence,
            broker_epoch=broker_epoch,
            expected_version=expected_version,
            command=command,
        )
        deadline_ms = self._deadline(timeout_ms)
        promise: Promise[Any] = Promise()
        data = encode_envelope(envelope)
        self._pending[self._sequence] = Pending(
            self._sequence, data, promise, deadline_ms, may_resend
        )
        self._has_work()
        return promise

    @reports_assertions
    def read_barrier(self, timeout_ms: float | None = None) -> Promise[None]:
        """Kept once this node has applied everything that was committed before the call."""
        promise: Promise[None] = Promise()
        self._rounds.add(promise, self._deadline(timeout_ms))
        self._has_work()
        return promise

    def on_image(self, callback: ImageCallback) -> None:
        """Call `callback(before, after)` after every change of the image."""
        self._callbacks.append(callback)

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
        for pending in list(self._pending.values()):
            if pending.deadline_ms <= now_ms:
                self._fail(pending, RequestTimedOutError("the command's outcome is unknown"))
        is_late = 0 <= self._forward_began_ms <= now_ms - self._config.resend_ms
        if self._retry_at_tick or is_late:
            self._retry_at_tick = False
            if not self._leads():
                self._resend_all()
            self._rounds.ask_again()
        self._rounds.expire(now_ms, self._config.resend_ms)
        self.drain()

    def drain(self) -> None:
        """Do what calls into the replica, which its own callbacks must not. The node calls this
        after every round of the replica's `drain`; `wake` says when both are due again."""
        if self._is_draining:
            self._drain_again = True
            return
        self._is_draining = True
        try:
            self._drain_again = True
            while self._drain_again:
                self._drain_again = False
                # Nearly every round comes by here with nothing to do.
                if self._role_moved:
                    self._note_role()
                if self._pending:
                    self._send_pending()
                if self._queue:
                    self._flush_queue()
                if self._rounds.is_due:
                    self._begin_barrier()
                machine = self._machine
                if machine.has_skipped or machine.log_bytes >= self._config.snapshot_bytes_min:
                    self._maybe_snapshot()
        finally:
            self._is_draining = False

    # ---- members ----

    @property
    def configuration(self) -> Configuration | None:
        """Who makes up the group, as far as this node knows; None where no Raft group does."""
        return None if self._replica is None else self._replica.configuration

    @property
    def is_member(self) -> bool:
        """True while this node is in the group's configuration, as far as it knows."""
        members = () if self.configuration is None else self.configuration.members
        return any(member.node_id == self._self_id for member in members)

    def admit(self, joiner: ReplicaId) -> None:
        """Take a node into the group as a learner, if its number is not in it yet; one that is in
        it under another storage is exchanged by the replica itself.

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
    def receive_commands(self, request: ForwardCommands) -> Reply:
        """Take another node's commands into the queue, if this node leads."""
        if not self._leads():
            return self._not_controller()
        size = sum(len(command) for command in request.commands)
        if self._queue and self._queue_bytes + size > self._config.queue_bytes_max:
            return Reply(ErrorCode.THROTTLING_QUOTA_EXCEEDED, self._self_id)
        reply = Reply(ErrorCode.NONE, self._self_id)
        for number, command in enumerate(request.commands):
            if reason := self._take(command):
                if not self.is_leader:
                    # It may be in the log already, and this image behind: all of it comes again.
                    reply = self._not_controller()
                    break
                # Those before it are taken; its sender gives it up and sends the rest again.
                index = RaftIndex(number)
                reply = Reply(ErrorCode.INVALID_REQUEST, self._self_id, index, message=reason)
                break
        self._has_work()
        return reply

    def _take(self, command: bytes) -> str:
        """Put a command into the queue if every node can apply it; else why not.

        It is tried on the newest image there will be when its turn has come. What raises there
        would end every node, at each of its starts, once it is in the log.
        """
        if self._in_flight_end is None and not self._queue:
            self._trial = None
        image = self.image if self._trial is None else self._trial
        try:
            envelope = decode_envelope(command)
            if envelope.incarnation > incarnation_max(image, envelope.node_id):
                return f"no process of node {envelope.node_id} is so late: {envelope.incarnation}"
            trial, result = apply(image, envelope, Offset(image.version + 1))
            if trial.features is not image.features:
                check_supported(trial, self._machine.supported)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not enter the log
            text = f"{type(error).__name__}: {error}"[:REFUSAL_LENGTH_MAX]
            return f"this command cannot be applied: {text}"
        # What raises the level is of the new level itself.
        if reason := write_error(type(envelope.command).__name__, envelope.version, trial):
            return result.message if isinstance(result, Rejection) else reason
        self._trial = trial
        self._queue.append(command)
        self._queue_bytes += len(command)
        return ""

    @reports_assertions
    def receive_barrier(self, request: BarrierRequest) -> Promise[Reply]:
        """Tell another node how far it must apply to have seen all that is committed now."""
        reply: Promise[Reply] = Promise()
        if not self._leads():
            reply.resolve(self._not_controller())
            return reply

        def settled(barrier: Promise[RaftIndex]) -> None:
            if barrier.error is None:
                reply.resolve(Reply(ErrorCode.NONE, self._self_id, barrier.result()))
            else:
                reply.resolve(self._not_controller())

        assert self._replica is not None
        self._replica.read_barrier().when_done(settled)
        self.wake()
        return reply

    # ---- the machine's listener: no call into the replica from here ----

    def command_applied(self, envelope: Envelope, result: Result, offset: Offset) -> None:
        """Note the result of an own command; answered once the image that shows it is out."""
        self.last_contact_ms = self._clock.monotonic_ms()
        if not self._pending or envelope.node_id != self._self_id:
            return
        if envelope.incarnation != self.incarnation:
            return
        if result is STALE_SEQUENCE:
            self._stale = True  # sent twice, or this incarnation is not above an earlier one's
            return
        for sequence in [s for s in self._pending if s < envelope.sequence]:
            # Sequences only rise at apply: those passed over can never be applied any more.
            self._applied.append((self._pending.pop(sequence), OVERTAKEN))
        pending = self._pending.pop(envelope.sequence, None)
        if pending is not None:
            self._applied.append((pending, result))

    def state_restored(self, image: MetadataImage) -> None:
        """What a snapshot skipped may hold own commands: their outcome is unknown."""
        incarnation, last = image.submitters.get(self._self_id, (-1, -1))
        if incarnation != self.incarnation:
            return  # an earlier process's; a later one's shows when a command comes back stale
        for sequence in [s for s in self._pending if s <= last]:
            self._applied.append((self._pending.pop(sequence), SKIPPED))

    def image_changed(self, before: MetadataImage, after: MetadataImage) -> None:
        """Publish the image, then answer."""
        if self._in_flight_end is not None and after.version + 1 >= self._in_flight_end:
            self._in_flight_end = None
        self._inside += 1
        try:
            for callback in self._callbacks:
                callback(before, after)
            if self._stale:
                self._stale = False
                self._adopt_incarnation(after)
            applied, self._applied = self._applied, []
            for pending, result in applied:
                settle(pending.promise, result)
        finally:
            self._inside -= 1
        self._has_work_later()

    def advanced(self, applied_end: RaftIndex) -> None:
        """Keep barriers that waited for this."""
        kept = self._rounds.applied(applied_end)
        if not kept:
            return
        self._inside += 1
        try:
            for promise in kept:
                promise.resolve(None)
        finally:
            self._inside -= 1
        self._has_work_later()

    def role_changed(self, soft: SoftState) -> None:
        """Another leader or term: see to it at the next drain, outside the replica."""
        self._role_moved = True
        self.wake()

    # ---- work ----

    def _has_work(self) -> None:
        """Do what is due now, or soon when the replica is at work."""
        if self._inside:
            self.wake()
        else:
            self.drain()

    def _has_work_later(self) -> None:
        if self._queue or self._rounds.has_next or self._sent_sequence < self._sequence:
            self.wake()

    # ---- sending ----

    def _note_role(self) -> None:
        self._role_moved = False
        controller = (self.controller_id, self.controller_epoch)
        if controller == self._controller:
            return
        self._controller = controller
        self._queue.clear()  # others will send theirs again, to whom it concerns
        self._queue_bytes = 0
        self._in_flight_end = None
        self._trial = None
        self._drop_unrepeatable()
        self._resend_all()
        self._rounds.ask_again()
        for callback in self._role_callbacks:
            callback()

    def _resend_all(self) -> None:
        """Whatever was forwarded may be lost: send all of it again, in order."""
        self._forward_round += 1
        self._forward_began_ms = -1.0
        self._sent_sequence = 0

    def _drop_unrepeatable(self) -> None:
        """What made sense from the former controller only is not sent to the next one.

        What was sent may be in a log that wins all the same. A command of this node that follows
        it tells: once that is applied, the former ones were applied before, or never will be.
        """
        must_ask = False
        for pending in [p for p in self._pending.values() if not p.may_resend]:
            if pending.is_sent:
                must_ask = must_ask or not pending.is_abandoned
                pending.is_abandoned = True
            else:
                self._fail(pending, CommandNotAppliedError("the controller changed meanwhile"))
        if must_ask:
            self.propose(NoOperation())

    def _send_pending(self) -> None:
        if not self._pending or self._sent_sequence >= self._sequence:
            return
        if self._leads():
            for pending in self._unsent(self._config.queue_bytes_max - self._queue_bytes):
                if reason := self._take(pending.data):
                    self._fail(pending, KafkaError(reason, code=ErrorCode.INVALID_REQUEST))
            return
        controller = self.controller_id
        if controller is None or controller == self._self_id or self._forward_began_ms >= 0:
            return
        sent = self._unsent(self._config.batch_bytes_max)
        if not sent:
            return
        self._forward_began_ms = self._clock.monotonic_ms()
        round_number = self._forward_round
        payload = encode(ForwardCommands(tuple(pending.data for pending in sent)))
        self._forwarder.send(controller, payload).when_done(
            lambda reply: self._forward_done(round_number, sent, reply)
        )

    def _unsent(self, bytes_max: int) -> list[Pending]:
        """The next commands to send, in order, at least one; they count as sent now."""
        chosen: list[Pending] = []
        for sequence, pending in self._pending.items():
            if sequence <= self._sent_sequence or pending.is_abandoned:
                continue
            bytes_max -= len(pending.data)
            if chosen and bytes_max < 0:
                break
            chosen.append(pending)
            pending.is_sent = True
            self._sent_sequence = sequence
        return chosen

    def _forward_done(
        self, round_number: int, sent: list[Pending], promise: Promise[bytes]
    ) -> None:
        if round_number != self._forward_round:
            return  # given up long ago
        reply = read_reply(promise)
        if (
            reply is not None
            and reply.code is ErrorCode.INVALID_REQUEST
            and reply.index < len(sent)
        ):
            refused = sent[reply.index]
            self._sent_sequence = refused.sequence  # what follows it was not taken
            if self._pending.get(refused.sequence) is refused:
                self._fail(refused, KafkaError(reply.message, code=reply.code))
            self._forward_began_ms = -1.0
            self._has_work()
            return
        if reply is None or reply.code is not ErrorCode.NONE:
            # Not taken, or lost: the next tick, or a new leader, sends all of it again.
            self._retry_at_tick = True
            return
        self._forward_began_ms = -1.0
        self._send_pending()

    def _flush_queue(self) -> None:
        """Append what waits as one batch, unless one is under way."""
        if not self._queue or self._in_flight_end is not None:
            return
        if not self._leads():
            return
        records: list[NewRecord] = []
        size = 0
        for data in self._queue:
            size += len(data)
            if records and size > self._config.batch_bytes_max:
                break
            records.append(NewRecord(None, data))
        batch = build_batch(records, timestamp=self._clock.wall_ms())
        assert self._replica is not None
        try:
            base = self._replica.append(batch, parse_header(batch))
        except (NotLeaderError, StorageError):
            return  # deposed: sent again elsewhere; disk full: tried again at the next tick
        del self._queue[: len(records)]
        self._queue_bytes -= sum(len(record.value or b"") for record in records)
        self._in_flight_end = Offset(base + len(records))
        self.wake()

    def _leads(self) -> bool:
        return self._replica is not None and self._replica.is_leader

    def _not_controller(self) -> Reply:
        controller = self.controller_id
        return Reply(ErrorCode.NOT_CONTROLLER, NOBODY if controller is None else controller)

    def _adopt_incarnation(self, image: MetadataImage) -> None:
        last = image.submitters.get(self._self_id, (0, 0))
        if last[0] <= self.incarnation:
            return
        self.incarnation = last[0] + 1
        for pending in list(self._pending.values()):
            self._fail(pending, CommandNotAppliedError("of an incarnation that is over"))

    def _fail(self, pending: Pending, error: KafkaError) -> None:
        del self._pending[pending.sequence]
        pending.promise.fail(error)

    def _deadline(self, timeout_ms: float | None) -> float:
        wait_ms = self._config.timeout_ms if timeout_ms is None else timeout_ms
        return self._clock.monotonic_ms() + wait_ms

    # ---- barriers ----

    def _begin_barrier(self) -> None:
        """Ask for the committed end, for everybody who waits; one round at a time."""
        due = self._rounds.due()
        if due is None:
            return
        if self._leads():
            assert self._replica is not None
            due.asked_ms = self._clock.monotonic_ms()
            self._replica.read_barrier().when_done(lambda p: self._barrier_index(due, p))
            self.wake()
            return
        controller = self.controller_id
        if controller is None or controller == self._self_id:
            return
        due.asked_ms = self._clock.monotonic_ms()
        self._forwarder.send(controller, encode(BarrierRequest())).when_done(
            lambda promise: self._barrier_reply(due, promise)
        )

    def _barrier_reply(self, asked: Round, promise: Promise[bytes]) -> None:
        # An answer to an earlier asking of this round will do: it came after its callers.
        if not self._rounds.is_waiting(asked):
            return
        reply = read_reply(promise)
        if reply is None or reply.code is not ErrorCode.NONE:
            self._retry_at_tick = True
            return
        self._barrier_known(asked, reply.index)

    def _barrier_index(self, asked: Round, promise: Promise[RaftIndex]) -> None:
        if not self._rounds.is_waiting(asked):
            return
        if promise.error is None:
            self._barrier_known(asked, promise.result())
        else:
            self._retry_at_tick = True

    def _barrier_known(self, asked: Round, index: RaftIndex) -> None:
        asked.index = index
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
        if (
            not (machine.has_skipped or is_due)
            or not self.is_leader
            or self._in_flight_end is not None
        ):
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
