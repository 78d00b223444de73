"""This node as a broker: joins the metadata group, registers, says that it lives, leaves.

Owns the broker epoch and the heartbeats to the controller; two tables say every way from one state
of the registration, and of the heartbeat, to another. Never fences anybody. Registration is a
command proposed after the start; its being applied is what makes the node ready, since everything
committed before is then applied too.

Invariants: one heartbeat is under way at a time; a change of structure is reported at once, because
an admin call may wait for it; a broker told that its epoch is stale registers anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final

from attrs import frozen

from raftmq.errors import ErrorCode
from raftmq.metadata.broker_messages import (
    AdmissionRequest,
    BrokerHeartbeat,
    Reply,
    encode,
    read_reply,
)
from raftmq.metadata.commands import Endpoint, RegisterBroker
from raftmq.metadata.engine import Forwarder, MetadataEngine
from raftmq.metadata.image import LEVEL_OF_MOVES, MetadataImage
from raftmq.ports import Clock
from raftmq.promise import Promise
from raftmq.types import NodeId, ReplicaId

RETRY_MS: Final = 250.0
LOST_MS: Final = 1_000.0
LOST_HEARTBEATS: Final = 2
"""After so many intervals, and a second at most, a heartbeat without an answer is taken for lost,
and the next one follows: a session has room for few, and the next one lets a fenced broker back."""
UNLED_MS: Final = 2_000.0
"""A member that hears no leader for so long at its start asks whether it still is a member."""
ISOLATED_MS: Final = 10_000.0

LearnAddress = Callable[[NodeId, str], None]
"""Told where a node listens for other nodes, as `host:port`."""


class Registration(IntEnum):
    """How far this process is as a broker."""

    UNINFORMED = 0
    """Of a new node: what it registers as goes by the cluster's level, which it does not know."""
    ASKING = 1
    """A read barrier is under way, after which it does."""
    UNREGISTERED = 2
    REGISTERING = 3
    """The command is under way; whether it was applied is not known."""
    REGISTERED = 4
    """It has a broker epoch, as far as it knows."""


REGISTRATION_NEXT: Final[Mapping[Registration, frozenset[Registration]]] = {
    Registration.UNINFORMED: frozenset({Registration.ASKING}),
    Registration.ASKING: frozenset({Registration.UNINFORMED, Registration.UNREGISTERED}),
    Registration.UNREGISTERED: frozenset({Registration.REGISTERING}),
    Registration.REGISTERING: frozenset({Registration.UNREGISTERED, Registration.REGISTERED}),
    # A controller does not know that epoch, nor does the image.
    Registration.REGISTERED: frozenset({Registration.UNREGISTERED}),
}


class Beat(IntEnum):
    """Where the heartbeat is; it needs a registration."""

    AT_REST = 0
    UNDER_WAY = 1


BEAT_NEXT: Final[Mapping[Beat, frozenset[Beat]]] = {
    # An answer may come after all when its heartbeat was taken for lost.
    Beat.AT_REST: frozenset({Beat.UNDER_WAY, Beat.AT_REST}),
    Beat.UNDER_WAY: frozenset({Beat.AT_REST}),
}


@frozen(slots=True)
class BrokerInfo:
    """What this node registers as.

    Attributes:
        recoveries: how often a lost majority was recovered from this node's data.
        replicas_max: how many partition replicas it has room for; 0: unknown.
        takes_no_data: if the cluster does not know it yet, it joins as new: it takes no data until
            an operator adds it.
    """

    replica_id: ReplicaId
    cluster_id: str
    rack: str | None
    endpoints: tuple[Endpoint, ...]
    features: tuple[str, ...] = ()
    recoveries: int = 0
    replicas_max: int = 0
    takes_no_data: bool = False


def removal_text(image: MetadataImage, node_id: NodeId) -> str:
    """What a node is told that comes back after it was replaced or removed."""
    if (row := image.replacements.get(node_id)) is not None:
        return (
            f"node {node_id} was replaced by node {row.new_id} (`raftmq node replace {node_id} "
            f"{row.new_id}`) while it was away: the cluster goes on without its data. Do not start "
            "it again; with an empty data folder it joins anew, as a node that holds nothing"
        )
    return (
        f"node {node_id} was removed from this cluster (`raftmq node remove {node_id}`). Do not "
        "start it again with this data; with an empty data folder it joins anew, as a node that "
        "holds nothing"
    )


class BrokerLifecycle:
    """One node's life in the cluster."""

    def __init__(
        self,
        info: BrokerInfo,
        engine: MetadataEngine,
        forwarder: Forwarder,
        *,
        clock: Clock,
        heartbeat_ms: float,
        bootstrap: Sequence[NodeId],
        is_member: Callable[[], bool],
        learn_address: LearnAddress,
    ) -> None:
        """`bootstrap` are nodes to ask for the controller; `is_member` tells whether this node is
        in the metadata group's configuration as far as it knows."""
        self._info = info
        self._engine = engine
        self._forwarder = forwarder
        self._clock = clock
        self._heartbeat_ms = heartbeat_ms
        self._bootstrap = tuple(n for n in bootstrap if n != info.replica_id.node_id)
        self._is_member = is_member
        self._learn_address = learn_address
        self.registration = (
            Registration.UNINFORMED if info.takes_no_data else Registration.UNREGISTERED
        )
        self.broker_epoch = -1
        """-1 unless it is registered."""
        self.refusal: str | None = None
        """Why the cluster refuses this node, if so: other cluster id, its number is taken, or it
        does not support a level that the cluster has."""
        self.is_replaced = False
        """Another node took this one's place, or it was removed: it will never be ready."""
        self._unled_since_ms = clock.monotonic_ms()
        self.is_draining = False
        self.has_full_disk = False
        """Records are refused here until space is free; said by the node."""
        self.has_stuck_disk = False
        """A flush has not come back for long; said by the node."""
        self.is_reading_delays = False
        """What is pending in its delay partitions is not all read yet; said by the node."""
        self._drained: Promise[None] | None = None
        self._register_at_ms = 0.0
        self._join_at_ms = 0.0
        self._join_turn = 0
        self._beat = Beat.AT_REST
        self._beat_at_ms = 0.0
        self._beat_began_ms = 0.0
        self._beat_round = 0
        self._reported_version = -1
        self._doubted_since_ms: float | None = None
        self._contact_ms = clock.monotonic_ms()
        self._ready_callbacks: list[Callable[[], None]] = []
        self._was_ready = False
        engine.on_image(self._image_changed)

    # ---- what it is ----

    @property
    def is_current(self) -> bool:
        """True once an entry proposed after this start was applied: the image can be acted on."""
        return self.broker_epoch >= 0

    @property
    def is_ready(self) -> bool:
        """True while this broker is registered under its present epoch and not fenced."""
        broker = self._engine.image.brokers.get(self._info.replica_id.node_id)
        return (
            broker is not None
            and self.broker_epoch >= 0
            and broker.epoch == self.broker_epoch
            and not broker.is_fenced
        )

    def isolated_ms(self) -> float:
        """For how long no metadata majority was seen."""
        if self._engine.is_leader:
            return 0.0  # a leader without its majority steps down within an election timeout
        contact_ms = max(self._contact_ms, self._engine.last_contact_ms)
        return max(0.0, self._clock.monotonic_ms() - contact_ms)

    @property
    def is_isolated(self) -> bool:
        """True after ten seconds without a metadata majority."""
        return self.isolated_ms() > ISOLATED_MS

    @property
    def should_not_lead(self) -> bool:
        """True while another node would serve producers better than this one."""
        return self.is_isolated or self.disk_fails_producers

    @property
    def disk_fails_producers(self) -> bool:
        """True while records cannot become durable here, for want of space or of an answer."""
        return self.has_full_disk or self.has_stuck_disk

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Call `callback()` the first time this broker is ready."""
        self._ready_callbacks.append(callback)

    def drain(self) -> Promise[None]:
        """Leave Metadata; kept once this broker is fenced."""
        self.is_draining = True
        if self._drained is None:
            self._drained = Promise()
            self._check_drained(self._engine.image)
        self._beat_at_ms = 0.0
        self.tick()
        return self._drained

    # ---- driven by the node ----

    def tick(self) -> None:
        """Join, register or send a heartbeat, whatever is due."""
        now_ms = self._clock.monotonic_ms()
        if not self._is_member():
            self._join(now_ms)
        elif self.broker_epoch < 0 or self.is_isolated or self._is_doubted(now_ms):
            self._ask_membership(now_ms)
        if self.registration is not Registration.REGISTERED:
            self._register(now_ms)
            return
        lost_ms = min(LOST_MS, LOST_HEARTBEATS * self._heartbeat_ms)
        if self._beat is Beat.UNDER_WAY and now_ms - self._beat_began_ms >= lost_ms:
            self._let_beat(Beat.AT_REST)
        if self._beat is Beat.AT_REST and now_ms >= self._beat_at_ms:
            self._send_heartbeat(now_ms)

    def _become(self, registration: Registration) -> None:
        """Go on to another state of the registration."""
        before, self.registration = self.registration, registration
        assert registration in REGISTRATION_NEXT[before], f"{before.name} to {registration.name}"

    def _let_beat(self, beat: Beat) -> None:
        """The same of the heartbeat."""
        before, self._beat = self._beat, beat
        assert beat in BEAT_NEXT[before], f"a heartbeat: {before.name} to {beat.name}"

    def _image_changed(self, before: MetadataImage, after: MetadataImage) -> None:
        if before.structure_version == after.structure_version:
            return
        own = self._info.replica_id
        if own.storage_id in after.removed.get(own.node_id, ()):
            self.is_replaced = True
            self.refusal = removal_text(after, own.node_id)
        self._beat_at_ms = 0.0
        if self._beat is Beat.AT_REST and self.registration is Registration.REGISTERED:
            self._send_heartbeat(self._clock.monotonic_ms())
        if not self._was_ready and self.is_ready:
            self._was_ready = True
            for callback in self._ready_callbacks:
                callback()
        self._check_drained(after)

    def _check_drained(self, image: MetadataImage) -> None:
        drained = self._drained
        if drained is None or drained.is_done:
            return
        broker = image.brokers.get(self._info.replica_id.node_id)
        if broker is None or broker.is_fenced or broker.epoch != self.broker_epoch:
            drained.resolve(None)

    # ---- joining ----

    def _join(self, now_ms: float) -> None:
        """Ask to follow the metadata log; a node that is not the controller names it."""
        if now_ms < self._join_at_ms:
            return
        self._join_at_ms = now_ms + RETRY_MS
        controller = self._engine.controller_id
        if controller is not None and controller != self._info.replica_id.node_id:
            self._ask_to_join(controller)
        elif self._bootstrap:
            self._join_turn += 1
            self._ask_to_join(self._bootstrap[self._join_turn % len(self._bootstrap)])

    def _ask_to_join(
        self, node_id: NodeId, *, is_member: bool = False, is_hint: bool = False
    ) -> None:
        replica_id = self._info.replica_id
        request = AdmissionRequest(replica_id.node_id, replica_id.storage_id, is_member)

        def done(promise: Promise[bytes]) -> None:
            reply = read_reply(promise)
            if reply is None:
                return
            if reply.code is not ErrorCode.NOT_CONTROLLER:
                if reply.code is ErrorCode.POLICY_VIOLATION:
                    self.refusal = reply.message  # for now: it goes on asking
                if is_member or reply.code is ErrorCode.BROKER_ID_NOT_REGISTERED:
                    self._learn_membership(reply)
                return
            if is_hint:
                return
            if reply.controller_id >= 0 and reply.controller_id != node_id:
                if reply.payload:
                    # No first voter leads: this node's file does not say where the leader is.
                    self._learn_address(reply.controller_id, reply.payload.decode(errors="replace"))
                self._ask_to_join(reply.controller_id, is_member=is_member, is_hint=True)

        self._forwarder.send(node_id, encode(request)).when_done(done)

    def _ask_membership(self, now_ms: float) -> None:
        """This node's log says that it is a member, but no leader is heard: the node may have been
        replaced or removed while it was down or cut off, and then no leader ever will send to
        it."""
        if self._engine.controller_id is not None and self.broker_epoch < 0:
            self._unled_since_ms = now_ms
            return
        if now_ms < max(self._join_at_ms, self._unled_since_ms + UNLED_MS):
            return
        self._join_at_ms = now_ms + RETRY_MS
        own = self._info.replica_id.node_id
        others = sorted({*self._bootstrap, *self._engine.image.brokers} - {own})
        if others:
            self._join_turn += 1
            self._ask_to_join(others[self._join_turn % len(others)], is_member=True)

    def _learn_membership(self, reply: Reply) -> None:
        is_over = reply.code is ErrorCode.BROKER_ID_NOT_REGISTERED
        if reply.code is ErrorCode.NONE or (self.broker_epoch >= 0 and not is_over):
            return
        if reply.code is ErrorCode.INELIGIBLE_REPLICA:
            # What made it a member was not committed before its leader was lost: it joins anew.
            self._ask_to_join(reply.controller_id)
            return
        self.is_replaced = is_over
        self.refusal = reply.message

    def _register(self, now_ms: float) -> None:
        if now_ms < self._register_at_ms or self.is_draining:
            return
        if self.registration is Registration.UNINFORMED:
            self._become(Registration.ASKING)
            self._engine.read_barrier().when_done(self._level_told)
        elif self.registration is Registration.UNREGISTERED:
            self._become(Registration.REGISTERING)
            self._engine.propose(self._command()).when_done(self._registration_told)

    def _command(self) -> RegisterBroker:
        info = self._info
        return RegisterBroker(
            node_id=info.replica_id.node_id,
            storage_id=f"{info.replica_id.storage_id:016x}",
            cluster_id=info.cluster_id,
            rack=info.rack,
            endpoints=info.endpoints,
            features=info.features,
            recoveries=info.recoveries,
            takes_no_data=info.takes_no_data and self._engine.image.level >= LEVEL_OF_MOVES,
        )

    def _registration_told(self, promise: Promise[Any]) -> None:
        if promise.error is None:
            self._become(Registration.REGISTERED)
            self.refusal = None
            self.broker_epoch = promise.result().broker_epoch
            self._contact_ms = self._clock.monotonic_ms()
            self._send_heartbeat(self._contact_ms)
            return
        self._become(Registration.UNREGISTERED)
        self._register_at_ms = self._clock.monotonic_ms() + RETRY_MS
        code = getattr(promise.error, "code", None)
        if code in (
            ErrorCode.INCONSISTENT_CLUSTER_ID,
            ErrorCode.DUPLICATE_BROKER_REGISTRATION,
            ErrorCode.UNSUPPORTED_VERSION,
            ErrorCode.INVALID_REQUEST,  # the controller did not let it into the log
        ):
            self.refusal = str(promise.error)

    def _level_told(self, promise: Promise[None]) -> None:
        """The state is that of now: an empty image would have said that the cluster is at level 1,
        and at that level there are no new nodes."""
        if promise.error is None:
            self._become(Registration.UNREGISTERED)
            return
        self._become(Registration.UNINFORMED)
        self._register_at_ms = self._clock.monotonic_ms() + RETRY_MS

    # ---- heartbeats ----

    def _send_heartbeat(self, now_ms: float) -> None:
        controller = self._engine.controller_id
        if controller is None:
            return
        self._let_beat(Beat.UNDER_WAY)
        self._beat_began_ms = now_ms
        self._beat_at_ms = now_ms + self._heartbeat_ms
        self._beat_round += 1
        beat_round = self._beat_round
        image = self._engine.image
        self._reported_version = image.structure_version
        beat = BrokerHeartbeat(
            self._info.replica_id.node_id,
            self.broker_epoch,
            image.version,
            self.is_draining,
            self.disk_fails_producers,
            self._info.replicas_max,
            self.is_reading_delays,
        )
        self._forwarder.send(controller, encode(beat), is_beat=True).when_done(
            lambda promise: self._heartbeat_done(beat_round, promise)
        )

    def _heartbeat_done(self, beat_round: int, promise: Promise[bytes]) -> None:
        reply = read_reply(promise)
        now_ms = self._clock.monotonic_ms()
        if beat_round != self._beat_round:
            if reply is not None and reply.code is ErrorCode.NONE:
                self._contact_ms = now_ms  # late, but an answer
            return
        self._let_beat(Beat.AT_REST)
        if reply is None or reply.code is ErrorCode.NOT_CONTROLLER:
            self._beat_at_ms = min(self._beat_at_ms, now_ms + RETRY_MS / 4)
            return
        self._contact_ms = now_ms
        if reply.code is not ErrorCode.STALE_BROKER_EPOCH:
            self._doubted_since_ms = None
        elif self._doubted_since_ms is None:
            self._doubted_since_ms = now_ms
        if self._doubted_since_ms is not None:
            self._check_registration()
        elif self._reported_version != self._engine.image.structure_version:
            self._send_heartbeat(now_ms)

    def _is_doubted(self, now_ms: float) -> bool:
        """True when controllers have known another registration, or none, for longer than one of
        them could be behind."""
        since_ms = self._doubted_since_ms
        return since_ms is not None and now_ms - since_ms >= UNLED_MS

    def _check_registration(self) -> None:
        """The controller knows another registration: it is behind, or this process's is over."""
        broker = self._engine.image.brokers.get(self._info.replica_id.node_id)
        if broker is None or broker.epoch != self.broker_epoch:
            self._become(Registration.UNREGISTERED)
            self.broker_epoch = -1
            self._register_at_ms = 0.0
