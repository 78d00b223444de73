"""All of the control plane of one node, composed: engine, controller, lifecycle, leader table.

Owns the one way in for other nodes' requests (`receive`) and the ways out for this node's handlers
(`call`, `move_leadership`). Requests to this node itself take no wire. Also says how far every
member of the metadata group is, as DescribeQuorum (KIP-595) tells it: only the leader knows others'
log ends, so a follower asks it (`ask_quorum`) and falls back to what it knows itself. Sans-IO: the
node drives `tick` and `drain`, and hands over a `Forwarder`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol, TypeAlias

import msgspec
from attrs import define

from raftmq.controller.broker_lifecycle import (
    BrokerInfo,
    BrokerLifecycle,
    LearnAddress,
    removal_text,
)
from raftmq.controller.call_rights import NOBODY_ASKS, CallRefusal, call_refusal
from raftmq.controller.controller import Controller, ControllerConfig
from raftmq.controller.leaders import LeaderRow, LeaderTable, decode_rows, encode_rows
from raftmq.controller.peer_requests import PeerRequests
from raftmq.errors import ErrorCode, KafkaError, RemoteProtocolError, RequestTimedOutError
from raftmq.foreign import decode_foreign
from raftmq.metadata.apply_brokers import disk_error
from raftmq.metadata.broker_messages import (
    FORMAT_MAX,
    AdminCall,
    AdminRequest,
    AdmissionRequest,
    Asker,
    BarrierRequest,
    BrokerHeartbeat,
    ContactRequest,
    DeliverRecords,
    ForwardCommands,
    LeaderUpdate,
    MoveLeadership,
    Outcomes,
    PartitionSize,
    QuorumRequest,
    Reply,
    Request,
    SizesRequest,
    decode_admin,
    decode_outcomes,
    decode_request,
    decode_sizes,
    encode,
    encode_admin,
    encode_outcomes,
    encode_sizes,
    format_of,
    read_reply,
    reply_error,
)
from raftmq.metadata.commands import ConfirmRemoved
from raftmq.metadata.engine import DrivenEngine, Forwarder
from raftmq.metadata.image import LEVEL_OF_ASKERS, LEVEL_OF_MOVES, MetadataImage
from raftmq.ports import Clock, Random
from raftmq.promise import Promise
from raftmq.rights import Authorizer
from raftmq.types import (
    Buffer,
    LeaderEpoch,
    NodeId,
    Offset,
    RaftGroupId,
    ReplicaId,
    StorageId,
    TopicId,
)

UNKNOWN: Final = -1


class QuorumMember(msgspec.Struct, frozen=True, array_like=True):
    """One voter or observer; times are the leader's wall clock."""

    node_id: int
    storage_id: int
    log_end_offset: int = UNKNOWN
    last_fetch_ms: int = UNKNOWN
    last_caught_up_ms: int = UNKNOWN


class QuorumState(msgspec.Struct, frozen=True, array_like=True):
    """The metadata group at one moment; -1 stands for unknown, as in Kafka."""

    leader_id: int
    leader_epoch: int
    high_watermark: int
    voters: tuple[QuorumMember, ...]
    observers: tuple[QuorumMember, ...]


AskQuorum: TypeAlias = Callable[[], "QuorumState | None"]
"""This node's own view; None where metadata is no Raft group of ours."""


class QuorumReplica(Protocol):
    """The part of the metadata replica that is asked."""

    @property
    def is_leader(self) -> bool: ...
    @property
    def leader_epoch(self) -> LeaderEpoch: ...
    @property
    def high_watermark(self) -> Offset: ...
    @property
    def log_end_offset(self) -> Offset: ...
    @property
    def voters(self) -> tuple[ReplicaId, ...]: ...
    @property
    def learners(self) -> tuple[ReplicaId, ...]: ...
    def follower_end_offset(self, replica: ReplicaId) -> Offset | None: ...


def view_of(
    replica: QuorumReplica, *, node_id: NodeId, leader_id: int, wall_ms: int
) -> QuorumState:
    """What `node_id` knows by its own replica."""
    now_ms = wall_ms if replica.is_leader else UNKNOWN

    def member(other: ReplicaId) -> QuorumMember:
        is_own = other.node_id == node_id
        end = replica.log_end_offset if is_own else replica.follower_end_offset(other)
        return QuorumMember(
            other.node_id,
            other.storage_id,
            UNKNOWN if end is None else end,
            UNKNOWN if end is None else now_ms,
            now_ms if end == replica.log_end_offset else UNKNOWN,
        )

    return QuorumState(
        leader_id,
        replica.leader_epoch,
        replica.high_watermark,
        tuple(member(voter) for voter in replica.voters),
        tuple(member(learner) for learner in replica.learners),
    )


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(QuorumState)


def encode_quorum(state: QuorumState) -> bytes:
    """Bytes for another node."""
    return _encoder.encode(state)


def decode_quorum(data: Buffer) -> QuorumState:
    """Read what `encode_quorum` wrote.

    Raises:
        RemoteProtocolError: other bytes.
    """
    return decode_foreign("quorum state", _decoder.decode, data)


CALL_RETRY_MS: Final = 50.0
CALL_GRACE_MS: Final = 2_000.0
CONTACT_FRESH_MS: Final = 2_000.0
"""A node that heard of a metadata majority within this time counts as seeing it."""
PUSH_RETRY_MS: Final = 500.0


SizesHere: TypeAlias = Callable[[], Iterable[PartitionSize]]
FORMAT_OF_SIZES: Final = 8
FORMAT_OF_DELIVERIES: Final = 11
FORMAT_OF_ASKERS: Final = 13
CallRefused: TypeAlias = Callable[[NodeId, AdminRequest, "Asker | None", CallRefusal], None]
"""(the node that asked, for what, on whose behalf, why not)"""
TakeDelivery: TypeAlias = Callable[[TopicId, int, bytes], Promise[ErrorCode]]


def take_no_delivery(_topic_id: TopicId, _partition: int, _batch: bytes) -> Promise[ErrorCode]:
    """The answer of a node without partitions."""
    return Promise.resolved(ErrorCode.NOT_LEADER_OR_FOLLOWER)


MoveLocally = Callable[[TopicId, int, NodeId], bool]
"""Hand the leadership of a partition led here to a node; False when this node does not lead it."""


@define(eq=False)
class _Outstanding:
    """An admin call on its way to the controller, which may change meanwhile."""

    request: AdminRequest
    asker: Asker
    promise: Promise[Outcomes]
    deadline_ms: float
    retry_at_ms: float = 0.0
    is_sent: bool = False
    is_unknown: bool = False


class _Loopback:
    """The node's forwarder, with itself reached without a wire."""

    def __init__(
        self, node_id: NodeId, remote: Forwarder, serve: Callable[[NodeId, Buffer], Promise[bytes]]
    ) -> None:
        self._node_id = node_id
        self._remote = remote
        self._serve = serve

    def send(self, node_id: NodeId, payload: bytes, *, is_beat: bool = False) -> Promise[bytes]:
        """Send one request; never blocks."""
        if node_id == self._node_id:
            return self._serve(node_id, payload)
        return self._remote.send(node_id, payload, is_beat=is_beat)

    def version(self, node_id: NodeId) -> int:
        """The format that a node understands just now; 0 while it is not reached."""
        return FORMAT_MAX if node_id == self._node_id else self._remote.version(node_id)


class ControlPlane:
    """The control plane of one node.

    Attributes:
        take_delivery: appends a delivery to a partition that this node leads.
        turned_away: replaced and removed nodes that came back to this controller with their old
            data, and the refusal that each was given; until one registers, with an empty disk.
    """

    take_delivery: TakeDelivery = staticmethod(take_no_delivery)

    def __init__(
        self,
        info: BrokerInfo,
        engine: DrivenEngine,
        forwarder: Forwarder,
        *,
        clock: Clock,
        random: Random,
        config: ControllerConfig,
        heartbeat_ms: float,
        bootstrap: Iterable[NodeId],
        move_locally: MoveLocally,
        learn_address: LearnAddress,
        quorum_view: AskQuorum,
        sizes_here: SizesHere,
        authorizer: Authorizer | None,
        call_refused: CallRefused,
        request_refused: Callable[[NodeId, str, str], None],
        drain_later: Callable[[], None],
    ) -> None:
        """Compose.

        Args:
            info: what this node registers as.
            engine: the same that was given the machine.
            forwarder: requests to other nodes.
            clock: time.
            random: for topic ids.
            config: of the controller.
            heartbeat_ms: between two heartbeats to the controller.
            bootstrap: nodes to ask for the controller before any is known.
            move_locally: hands over the leadership of a partition that this node leads.
            learn_address: told where the controller listens, as a node says that cannot admit.
            quorum_view: this node's own view of the metadata quorum.
            sizes_here: the bytes of each partition that is led here.
            authorizer: says what clients may do; None where they may do everything.
            call_refused: told of each admin call that is not decided, for want of a right.
            request_refused: told of any other request: the node, what kind it is of, why.
            drain_later: called when there is something for `drain`.
        """
        self.node_id = info.replica_id.node_id
        self.self_id = info.replica_id
        self.engine = engine
        self.leaders = LeaderTable()
        self.peer_requests = PeerRequests(engine, self.leaders, clock, request_refused)
        self._forwarder = _Loopback(self.node_id, forwarder, self.receive)
        self._clock = clock
        self._move_locally = move_locally
        self._quorum_view, self._sizes_here = quorum_view, sizes_here
        self._authorizer, self._call_refused = authorizer, call_refused
        self._drain_later = drain_later
        self._outstanding: list[_Outstanding] = []
        self._pushes: dict[tuple[TopicId, int], LeaderRow] = {}
        self._behind: dict[NodeId, float] = {}  # a push failed; when to send all rows again
        self._removed: list[RaftGroupId] = []
        self._is_confirming = False
        self.controller = self._new_controller(random, config)
        self.lifecycle = BrokerLifecycle(
            info,
            engine,
            self._forwarder,
            clock=clock,
            heartbeat_ms=heartbeat_ms,
            bootstrap=tuple(bootstrap),
            is_member=lambda: engine.is_member,
            learn_address=learn_address,
        )
        self.turned_away: dict[NodeId, str] = {}
        self.leaders.on_change(self._leader_changed)
        engine.on_image(self._image_changed)

    def _new_controller(self, random: Random, config: ControllerConfig) -> Controller:
        return Controller(
            self.node_id,
            self.engine,
            self.leaders,
            clock=self._clock,
            random=random,
            config=config,
            move_leadership=self.move_leadership,
            ask_sizes=self.ask_sizes,
        )

    # ---- driven by the node ----

    def tick(self) -> None:
        """Let time pass; every Raft tick will do."""
        self.engine.tick()
        self.controller.tick()
        self.lifecycle.tick()
        self._retry_calls()
        self._confirm_removed()
        self._flush_pushes()
        self._push_again()
        self.peer_requests.tick()

    def drain(self) -> None:
        """Do the work that must not be done within callbacks of replicas: called after the round of
        their drains, once `drain_later` was, by the engine or here."""
        self.engine.drain()
        self._flush_pushes()

    def receive(self, sender: NodeId, payload: Buffer) -> Promise[bytes]:
        """Serve another node's request.

        Raises:
            RemoteProtocolError: close the connection that it came from.
        """
        request = decode_request(payload)
        if sender != self.node_id and self.peer_requests.error(sender, request):
            if isinstance(request, AdmissionRequest | BrokerHeartbeat):
                raise RemoteProtocolError(f"node {sender} speaks as {request.node_id}")
            return self.peer_requests.judge_again(
                sender, request, lambda: self._serve(sender, request)
            )
        return self._serve(sender, request)

    def _serve(self, sender: NodeId, request: Request) -> Promise[bytes]:
        match request:
            case ForwardCommands():
                return _encoded(self.engine.receive_commands(sender, request))
            case BarrierRequest():
                answer: Promise[bytes] = Promise()
                self.engine.receive_barrier(request).when_done(
                    lambda reply: answer.resolve(encode(reply.result()))
                )
                return answer
            case BrokerHeartbeat():
                return _encoded(self.controller.heartbeat(request))
            case AdmissionRequest():
                return _encoded(self._admit(request))
            case LeaderUpdate():
                is_heard = self.peer_requests.hear(sender, decode_rows(request.rows, sender))
                full = ErrorCode.THROTTLING_QUOTA_EXCEEDED
                return _encoded(Reply(ErrorCode.NONE if is_heard else full))
            case MoveLeadership():
                is_moving = self._move_locally(request.topic_id, request.partition, request.to)
                code = ErrorCode.NONE if is_moving else ErrorCode.NOT_LEADER_OR_FOLLOWER
                return _encoded(Reply(code))
            case ContactRequest():
                is_lost = self.lifecycle.isolated_ms() > CONTACT_FRESH_MS
                cannot = is_lost or self.lifecycle.disk_fails_producers
                return _encoded(Reply(ErrorCode.NOT_CONTROLLER if cannot else ErrorCode.NONE))
            case QuorumRequest():
                return _encoded(self._tell_quorum())
            case SizesRequest():
                payload = encode_sizes(tuple(self._sizes_here()))
                return _encoded(Reply(ErrorCode.NONE, payload=payload))
            case DeliverRecords():
                return self._serve_delivery(request)
            case AdminCall():
                return self._serve_call(sender, decode_admin(request.payload), request.asker)

    def peer_connected(self, node_id: NodeId) -> None:
        """A node is connected: send it all rows of the leader table."""
        rows = self.leaders.rows()
        if rows and node_id != self.node_id:
            self._push(node_id, encode(LeaderUpdate(encode_rows(rows))))

    def peer_lost(self, node_id: NodeId) -> None:
        """The connection to a node ended."""
        self.peer_requests.peer_lost(node_id)
        self.controller.peer_lost(node_id)

    # ---- for handlers ----

    def call(self, request: AdminRequest, asker: Asker) -> Promise[Outcomes]:
        """Have the controller decide an admin call, wherever it is."""
        promise: Promise[Outcomes] = Promise()
        deadline_ms = self._clock.monotonic_ms() + max(1, request.timeout_ms)
        self._outstanding.append(_Outstanding(request, asker, promise, deadline_ms))
        self._retry_calls()
        return promise

    def move_leadership(self, topic_id: TopicId, partition: int, to: NodeId) -> Promise[ErrorCode]:
        """Ask a partition's leader to hand over; kept with its answer, not with the outcome."""
        promise: Promise[ErrorCode] = Promise()
        row = self.leaders.get(topic_id, partition)
        if row is None:
            promise.resolve(ErrorCode.LEADER_NOT_AVAILABLE)
            return promise

        def done(answer: Promise[bytes]) -> None:
            reply = read_reply(answer)
            promise.resolve(ErrorCode.NETWORK_EXCEPTION if reply is None else reply.code)

        request = MoveLeadership(topic_id, partition, to)
        self._forwarder.send(row.leader_id, encode(request)).when_done(done)
        return promise

    def ask_contact(self, node_id: NodeId) -> Promise[bool]:
        """Ask whether another node could lead just now: it sees a majority of the metadata group,
        and its disk takes records."""
        promise: Promise[bool] = Promise()

        def done(answer: Promise[bytes]) -> None:
            reply = read_reply(answer)
            promise.resolve(reply is not None and reply.code is ErrorCode.NONE)

        self._forwarder.send(node_id, encode(ContactRequest())).when_done(done)
        return promise

    def ask_quorum(self) -> Promise[QuorumState | None]:
        """How far the metadata group's members are, as its leader knows it; None: no answer."""
        promise: Promise[QuorumState | None] = Promise()
        controller = self.engine.controller_id
        if controller is None or controller == self.node_id:
            promise.resolve(None)
            return promise

        def done(answer: Promise[bytes]) -> None:
            reply = read_reply(answer)
            if reply is None or reply.code is not ErrorCode.NONE:
                promise.resolve(None)
                return
            try:
                promise.resolve(decode_quorum(reply.payload))
            except RemoteProtocolError:
                promise.resolve(None)

        self._forwarder.send(controller, encode(QuorumRequest())).when_done(done)
        return promise

    def ask_sizes(self, node_id: NodeId) -> Promise[tuple[PartitionSize, ...]]:
        """How many bytes the partitions have that a broker leads; none where it does not say."""
        promise: Promise[tuple[PartitionSize, ...]] = Promise()
        if self._forwarder.version(node_id) < FORMAT_OF_SIZES:
            promise.resolve(())
            return promise

        def done(answer: Promise[bytes]) -> None:
            reply = read_reply(answer)
            try:
                promise.resolve(() if reply is None else decode_sizes(reply.payload))
            except RemoteProtocolError:
                promise.resolve(())

        self._forwarder.send(node_id, encode(SizesRequest())).when_done(done)
        return promise

    def deliver(
        self, node_id: NodeId, topic_id: TopicId, partition: int, batch: bytes
    ) -> Promise[ErrorCode]:
        """Have another partition's leader append a delivery; NONE once that is committed there."""
        if node_id == self.node_id:
            return self.take_delivery(topic_id, partition, batch)
        promise: Promise[ErrorCode] = Promise()
        if self._forwarder.version(node_id) < FORMAT_OF_DELIVERIES:
            promise.resolve(ErrorCode.NETWORK_EXCEPTION)
            return promise

        def done(answer: Promise[bytes]) -> None:
            reply = read_reply(answer)
            promise.resolve(ErrorCode.NETWORK_EXCEPTION if reply is None else reply.code)

        request = DeliverRecords(topic_id, partition, batch)
        self._forwarder.send(node_id, encode(request)).when_done(done)
        return promise

    def _serve_delivery(self, request: DeliverRecords) -> Promise[bytes]:
        answer: Promise[bytes] = Promise()
        self.take_delivery(request.topic_id, request.partition, request.batch).when_done(
            lambda done: answer.resolve(encode(Reply(done.result())))
        )
        return answer

    def _tell_quorum(self) -> Reply:
        state = self._quorum_view()
        if state is None or state.leader_id != self.node_id:
            return Reply(ErrorCode.NOT_CONTROLLER, self._controller_hint())
        return Reply(ErrorCode.NONE, payload=encode_quorum(state))

    # ---- for the node's partitions ----

    def partition_led(
        self,
        topic_id: TopicId,
        partition: int,
        *,
        leader_epoch: LeaderEpoch,
        isr: Iterable[ReplicaId],
        voters: Iterable[ReplicaId],
        learners: Iterable[ReplicaId] = (),
        seen_version: int = -1,
        creation_epoch: int = -1,
    ) -> None:
        """This node leads a partition, its election entry is committed; or its ISR or voters
        changed. All nodes are told at once (at the next drain).

        A node whose former storage still votes is not reported as in sync: that vote is lost, and
        until it is removed the group survives one failure less than its ISR would say.

        Args:
            seen_version: the version of the image since which this node knows what is wanted.
        """
        voting = list(voters)
        isr = [
            replica
            for replica in isr
            if all(voter == replica or voter.node_id != replica.node_id for voter in voting)
        ]
        self.leaders.led(
            topic_id,
            partition,
            leader=self.node_id,
            leader_epoch=leader_epoch,
            isr=sorted({replica.node_id for replica in isr}),
            voters=sorted({replica.node_id for replica in voting}),
            members=sorted({replica.node_id for replica in (*voting, *learners)}),
            seen_version=seen_version,
            creation_epoch=creation_epoch,
        )

    def replica_removed(self, group: RaftGroupId) -> None:
        """The data of a replica is deleted, as a StopReplica ordered."""
        self._removed.append(group)

    # ---- inside ----

    def _admit(self, request: AdmissionRequest) -> Reply:
        if self.engine.is_leader:
            image = self.engine.image
            if request.storage_id in image.removed.get(request.node_id, ()):
                return self._turn_away(request.node_id, removal_text(image, request.node_id))
            if request.is_member:
                return self._membership_of(request.node_id)
            storage_id = StorageId(request.storage_id)
            if reason := disk_error(image, request.node_id, storage_id):
                return Reply(ErrorCode.POLICY_VIOLATION, self.node_id, message=reason)
        try:
            if request.is_member:
                raise KafkaError(code=ErrorCode.NOT_CONTROLLER)
            self.engine.admit(ReplicaId(request.node_id, StorageId(request.storage_id)))
        except KafkaError as error:
            hint = self._controller_hint()
            where = self._peer_address(hint)
            return Reply(error.code, hint, payload=where.encode(), message=error.message)
        return Reply(ErrorCode.NONE, self.node_id)

    def _membership_of(self, node_id: NodeId) -> Reply:
        """Tell a node that believes itself a member of the metadata group whether it is one."""
        configuration, image = self.engine.configuration, self.engine.image
        members = () if configuration is None else configuration.members
        if not members or any(member.node_id == node_id for member in members):
            return Reply(ErrorCode.NONE, self.node_id)
        row = image.replacements.get(node_id)
        if row is None or (row.is_done and node_id in image.brokers):
            text = f"node {node_id} is no member of the metadata group any more"
            return Reply(ErrorCode.INELIGIBLE_REPLICA, self.node_id, message=text)
        return self._turn_away(node_id, removal_text(image, node_id))

    def _turn_away(self, node_id: NodeId, text: str) -> Reply:
        self.turned_away[node_id] = text
        return Reply(ErrorCode.BROKER_ID_NOT_REGISTERED, self.node_id, message=text)

    def _peer_address(self, node_id: NodeId) -> str:
        """Where other nodes reach a node, "" when it is not known: the file of a node that asks for
        admission may not name it."""
        broker = self.engine.image.brokers.get(node_id)
        endpoint = None if broker is None else broker.endpoint("peer")
        return "" if endpoint is None else f"{endpoint.host}:{endpoint.port}"

    def _controller_hint(self) -> NodeId:
        controller = self.engine.controller_id
        return NodeId(-1) if controller is None else controller

    def _serve_call(
        self, sender: NodeId, request: AdminRequest, asker: Asker | None
    ) -> Promise[bytes]:
        answer: Promise[bytes] = Promise()
        if self.engine.is_leader and (refusal := self._call_refusal(sender, request, asker)):
            self._call_refused(sender, request, asker, refusal)
            reply = Reply(refusal.code, self.node_id, message=refusal.message)
            return _encoded(reply)

        def done(outcomes: Promise[Outcomes]) -> None:
            error = outcomes.error
            if error is None:
                payload = encode_outcomes(outcomes.result())
                reply = Reply(ErrorCode.NONE, self.node_id, payload=payload)
            elif isinstance(error, KafkaError):
                reply = Reply(error.code, self._controller_hint(), message=error.message)
            else:  # a bug of ours: the outcome is unknown, here and to the caller
                text = f"the controller met a bug: {type(error).__name__}"
                reply = Reply(ErrorCode.UNKNOWN_SERVER_ERROR, self._controller_hint(), message=text)
            answer.resolve(encode(reply))

        self.controller.call(request).when_done(done)
        return answer

    def _call_refusal(
        self, sender: NodeId, request: AdminRequest, asker: Asker | None
    ) -> CallRefusal | None:
        image = self.engine.image
        if asker is not None:
            return call_refusal(self._authorizer, image, request, asker)
        if image.level < LEVEL_OF_ASKERS and self._forwarder.version(sender) < FORMAT_OF_ASKERS:
            return None  # an older node, which has asked for rights itself
        return NOBODY_ASKS

    def _retry_calls(self) -> None:
        now_ms = self._clock.monotonic_ms()
        controller = self.engine.controller_id
        outstanding, self._outstanding = self._outstanding, []
        for call in outstanding:
            if call.promise.is_done:
                continue
            # The controller answers at the deadline itself; it gets a little longer to say so.
            grace_ms = CALL_GRACE_MS if call.is_sent else 0.0
            if call.is_unknown or now_ms >= call.deadline_ms + grace_ms:
                call.promise.fail(RequestTimedOutError("the controller's answer is not known"))
                continue
            self._outstanding.append(call)
            if not call.is_sent and controller is not None and now_ms >= call.retry_at_ms:
                if reason := self._not_understood(controller, call.request):
                    error = KafkaError(reason, code=ErrorCode.UNSUPPORTED_VERSION)
                    call.promise.fail(error)
                    continue
                call.is_sent = True
                payload = encode(AdminCall(encode_admin(call.request), call.asker))
                reply = self._forwarder.send(controller, payload)
                if reply.is_done and reply.error is not None:
                    call.is_sent = False  # it never left
                    call.retry_at_ms = now_ms + CALL_RETRY_MS
                else:
                    reply.when_done(self._call_done(call))

    def _not_understood(self, controller: NodeId, request: AdminRequest) -> str:
        """Say why the controller would end the stream on which this came; "" if it would not."""
        needed, version = format_of(request), self._forwarder.version(controller)
        if needed <= version or not version:
            return ""
        return (
            f"node {controller}, the controller, runs a version of raftmq that does not know this "
            "request: upgrade all nodes first"
        )

    def _call_done(self, call: _Outstanding) -> Callable[[Promise[bytes]], None]:
        def done(promise: Promise[bytes]) -> None:
            if call.promise.is_done:
                return
            reply = read_reply(promise)
            if reply is None:
                call.is_unknown = True  # it may have been done
            elif reply.code is ErrorCode.NOT_CONTROLLER:
                call.is_sent = False  # nothing was done: ask the next controller
                call.retry_at_ms = self._clock.monotonic_ms() + CALL_RETRY_MS
            elif (error := reply_error(reply)) is not None:
                call.promise.fail(error)
            else:
                try:
                    outcomes = decode_outcomes(reply.payload)
                except RemoteProtocolError:
                    call.is_unknown = True
                    return
                call.promise.resolve(outcomes)

        return done

    def _leader_changed(self, row: LeaderRow, is_own: bool) -> None:
        if is_own:
            self._pushes[row.key] = row
            self._drain_later()

    def _flush_pushes(self) -> None:
        if not self._pushes:
            return
        rows, self._pushes = list(self._pushes.values()), {}
        payload = encode(LeaderUpdate(encode_rows(rows)))
        for node_id in sorted(self.engine.image.brokers):
            if node_id != self.node_id:
                self._push(node_id, payload)

    def _push(self, node_id: NodeId, payload: bytes) -> None:
        def done(promise: Promise[bytes]) -> None:
            reply = read_reply(promise)
            if reply is None or reply.code is ErrorCode.THROTTLING_QUOTA_EXCEEDED:
                self._behind[node_id] = self._clock.monotonic_ms() + PUSH_RETRY_MS

        self._behind.pop(node_id, None)
        self._forwarder.send(node_id, payload).when_done(done)

    def _push_again(self) -> None:
        now_ms = self._clock.monotonic_ms()
        brokers = self.engine.image.brokers
        for node_id in [n for n, due_ms in self._behind.items() if due_ms <= now_ms]:
            if node_id in brokers:
                self.peer_connected(node_id)
            else:
                del self._behind[node_id]

    def _image_changed(self, before: MetadataImage, after: MetadataImage) -> None:
        if before.topic_names is not after.topic_names:
            for topic_id in before.topic_names:
                if topic_id not in after.topic_names:
                    self.leaders.forget(topic_id)
        self.peer_requests.image_changed(before, after)
        if self.turned_away and before.brokers is not after.brokers:
            for node_id in list(self.turned_away):
                if node_id in after.brokers and node_id not in before.brokers:
                    del self.turned_away[node_id]

    def _confirm_removed(self) -> None:
        if not self._removed or self._is_confirming or not self.lifecycle.is_current:
            return
        removed, self._removed = self._removed, []
        self._is_confirming = True

        def done(promise: Promise[object]) -> None:
            self._is_confirming = False
            if promise.error is not None:
                self._removed = removed + self._removed

        if self.engine.image.level < LEVEL_OF_MOVES:
            replicas = tuple((group.topic_id, group.partition) for group in removed)
            command = ConfirmRemoved(node_id=self.node_id, replicas=replicas)
        else:
            groups = tuple((g.topic_id, g.partition, g.creation_epoch) for g in removed)
            command = ConfirmRemoved(node_id=self.node_id, replicas=(), groups=groups)
        self.engine.propose(command, broker_epoch=self.lifecycle.broker_epoch).when_done(done)


def _encoded(reply: Reply) -> Promise[bytes]:
    return Promise.resolved(encode(reply))
