"""The metadata engine on pysyncobj: the same state machine, for comparison, never for real data.

The only file of raftmq that imports pysyncobj. It exists to be compared with (differential tests)
and to be convicted (jepsen_like, `tests/reference/`): as shipped the library reports success for
commands that were never committed, forgets acknowledged ones, never fsyncs, and unpickles what it
gets from the network. `docs/decisions/0001-metadata-on-our-raft.md` has the evidence.

pysyncobj ticks in a thread of its own, in which commands are applied; results and images are handed
to the node's loop by `post`. Invariant: only that thread touches the consumer's state, only the
loop touches everything else; the two exchange immutable values.
"""

from __future__ import annotations

import _socket
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import trio
from attrs import define, frozen
from pysyncobj import FAIL_REASON, SyncObj, SyncObjConf, SyncObjConsumer, replicated
from pysyncobj.node import Node
from pysyncobj.transport import Transport

from raftmq.config import ConfigError, NodeConfig
from raftmq.errors import ErrorCode, KafkaError, RequestTimedOutError
from raftmq.logs import structlog
from raftmq.metadata.apply import STALE_SEQUENCE, apply
from raftmq.metadata.broker_messages import NOBODY, BarrierRequest, ForwardCommands, Reply
from raftmq.metadata.commands import (
    AnyCommand,
    Envelope,
    NoOperation,
    UpdateFeatures,
    decode_envelope,
    encode_envelope,
    version_of,
)
from raftmq.metadata.engine import BatchCallback, CommandNotAppliedError, ImageCallback
from raftmq.metadata.features import write_error
from raftmq.metadata.image import EMPTY_IMAGE, MetadataImage
from raftmq.metadata.results import Rejection, Result
from raftmq.metadata.snapshot import decode_image, encode_image
from raftmq.ports import Clock
from raftmq.promise import Promise
from raftmq.types import NodeId, Offset, ReplicaId

# pysyncobj replaces it by a function for Windows, on every system.
socket.inet_ntop = _socket.inet_ntop

Post = Callable[[Callable[[], None]], None]
"""Run a function soon in the loop's thread (`TrioToken.run_sync_soon`)."""

WARNING: Final = (
    "the pysyncobj metadata engine loses acknowledged changes when nodes fail; it is for "
    "comparison on one machine only (docs/decisions/0001-metadata-on-our-raft.md)"
)

TIMEOUT_MS: Final = 5_000.0

PORT_OFFSET: Final = 10_000
"""The library listens so far above the peer port, on loopback: any process that reaches that port
can run code in this one."""
PORT_END: Final = 65_536

logger = structlog.get_logger("raftmq.node")

_NEVER_TAKEN: Final = frozenset(
    {FAIL_REASON.QUEUE_FULL, FAIL_REASON.MISSING_LEADER, FAIL_REASON.NOT_LEADER}
    | {FAIL_REASON.REQUEST_DENIED}
)
"""The library says so before it appends; every other failure is unknown."""


class MetadataConsumer(SyncObjConsumer):  # type: ignore[misc]  # pysyncobj has no types
    """The state machine as pysyncobj replicates it."""

    def __init__(self, on_applied: Callable[[MetadataImage, MetadataImage], None]) -> None:
        super().__init__()
        self._image = EMPTY_IMAGE
        self._on_applied = on_applied
        self.failure: Exception | None = None

    @property
    def image(self) -> MetadataImage:
        """The newest applied state."""
        return self._image

    @replicated  # type: ignore[untyped-decorator]
    def submit(self, data: bytes) -> Result:
        """Apply one encoded envelope; the offset is that of our own engine, which has no gaps."""
        before = self._image
        try:
            envelope = decode_envelope(data)
            self._image, result = apply(before, envelope, Offset(before.version + 1))
        except Exception as error:  # any error at all: the images would drift apart
            self.failure = error
            raise
        self._on_applied(before, self._image)
        return result

    def _serialize(self) -> dict[str, bytes]:
        return {"state": encode_image(self._image)}

    def _deserialize(self, data: Mapping[str, bytes]) -> None:
        before, self._image = self._image, decode_image(data["state"])
        self._on_applied(before, self._image)


@frozen(slots=True)
class ReferenceOptions:
    """Where the library talks and writes.

    Attributes:
        addresses: `host:port` of every node's own pysyncobj listener.
        folder: where journal and dump go; None keeps everything in memory.
        auto_tick: let the library tick in its own thread; tests tick by hand.
        transport: instead of the library's TCP.
        contact_every_ms: how often a command of no effect shows that a majority is there; 0 never.
    """

    addresses: Mapping[NodeId, str]
    folder: str | None = None
    auto_tick: bool = True
    transport: Transport | None = None
    contact_every_ms: float = 1_000.0


@define(eq=False)
class _Pending:
    promise: Promise[Any]
    deadline_ms: float


class ReferenceMetadataEngine:
    """Implements `DrivenEngine`; commands go by the library's own forwarding, not by ours."""

    def __init__(
        self,
        *,
        self_id: NodeId,
        incarnation: int,
        clock: Clock,
        post: Post,
        options: ReferenceOptions,
        on_failure: Callable[[Exception], None] | None = None,
    ) -> None:
        self._self_id = self_id
        self.incarnation = incarnation
        self._clock = clock
        self._post = post
        self._on_failure = on_failure
        self._image = EMPTY_IMAGE
        self._callbacks: list[ImageCallback] = []
        self.unauthorized: dict[str, int] = {}
        """Stays empty: no commands come from other nodes by our links."""
        self._role_callbacks: list[Callable[[], None]] = []
        self._role: tuple[NodeId | None, int] = (None, -1)
        self._sequence = 0
        self._pending: dict[int, _Pending] = {}
        self._contact_every_ms = options.contact_every_ms
        self._contact_due_ms = 0.0
        self.last_contact_ms = clock.monotonic_ms()
        self._nodes = {address: node_id for node_id, address in options.addresses.items()}
        self.consumer = MetadataConsumer(self._applied_in_thread)
        self.library = _library(self_id, options, self.consumer)

    def close(self) -> None:
        """End the library's thread."""
        if self.library.tick_thread_alive():
            self.library.destroy_synchronous()
        else:
            self.library.destroy()

    # ---- the port ----

    @property
    def image(self) -> MetadataImage:
        """The newest state that has reached the loop."""
        return self._image

    @property
    def is_leader(self) -> bool:
        """What the library believes; there may be two of them."""
        return bool(self.library._isLeader())

    @property
    def controller_id(self) -> NodeId | None:
        """The leader, as far as the library knows."""
        leader = self.library._getLeader()
        return None if leader is None else self._nodes.get(leader.id)

    @property
    def controller_epoch(self) -> int:
        """The library's term."""
        return int(self.library.raftCurrentTerm)

    @property
    def configuration(self) -> None:
        """No Raft group of ours."""
        return None

    @property
    def first_voters(self) -> tuple[NodeId, ...]:
        """None: the library does not know its first voters."""
        return ()

    @property
    def is_member(self) -> bool:
        """Always: the library has no learners."""
        return True

    def propose(
        self,
        command: AnyCommand,
        *,
        broker_epoch: int = -1,
        expected_version: int = -1,
        timeout_ms: float | None = None,
        may_resend: bool = True,
    ) -> Promise[Any]:
        """Get a command applied; see the port. Nothing is sent again, since the library does not
        say whether the first copy may still be applied."""
        version = version_of(command)
        if not isinstance(command, UpdateFeatures) and (
            reason := write_error(type(command).__name__, version, self.image)
        ):
            return Promise.failed(KafkaError(reason, code=ErrorCode.UNSUPPORTED_VERSION))
        self._sequence += 1
        sequence = self._sequence
        envelope = Envelope(
            version=version,
            node_id=self._self_id,
            incarnation=self.incarnation,
            sequence=sequence,
            broker_epoch=broker_epoch,
            expected_version=expected_version,
            command=command,
        )
        wait_ms = TIMEOUT_MS if timeout_ms is None else timeout_ms
        promise: Promise[Any] = Promise()
        self._pending[sequence] = _Pending(promise, self._clock.monotonic_ms() + wait_ms)

        def answered(result: Result, reason: int) -> None:
            self._post(lambda: self._settle(sequence, result, reason))

        self.consumer.submit(encode_envelope(envelope), callback=answered)
        return promise

    def read_barrier(self, timeout_ms: float | None = None) -> Promise[None]:
        """The library has no barrier; an applied command of our own serves as one."""
        barrier: Promise[None] = Promise()

        def done(promise: Promise[Any]) -> None:
            if promise.error is None:
                barrier.resolve(None)
            else:
                barrier.fail(promise.error)

        self.propose(NoOperation(), timeout_ms=timeout_ms).when_done(done)
        return barrier

    def on_image(self, callback: ImageCallback) -> None:
        """Call `callback(before, after)` after every change of the image."""
        self._callbacks.append(callback)

    def on_batch(self, callback: BatchCallback) -> None:
        """Never called: the library batches out of sight."""

    def on_role(self, callback: Callable[[], None]) -> None:
        """Call `callback()` when another node leads."""
        self._role_callbacks.append(callback)

    # ---- driven by the node ----

    def tick(self) -> None:
        """Let time pass: expire, notice another leader."""
        now_ms = self._clock.monotonic_ms()
        for sequence in [s for s, p in self._pending.items() if p.deadline_ms <= now_ms]:
            pending = self._pending.pop(sequence)
            pending.promise.fail(RequestTimedOutError("the command's outcome is unknown"))
        role = (self.controller_id, self.controller_epoch)
        if role != self._role:
            self._role = role
            for callback in self._role_callbacks:
                callback()
        every_ms = self._contact_every_ms
        if every_ms and role[0] is not None and now_ms >= self._contact_due_ms:
            self._contact_due_ms = now_ms + every_ms
            self.read_barrier()  # for last_contact_ms

    def drain(self) -> None:
        """Nothing waits: the library has its own thread."""

    def receive_commands(self, sender: NodeId, request: ForwardCommands) -> Reply:
        """Refused: the library forwards by itself."""
        return Reply(ErrorCode.NOT_CONTROLLER, NOBODY)

    def receive_barrier(self, request: BarrierRequest) -> Promise[Reply]:
        """Refused: barriers are commands here."""
        return Promise.resolved(Reply(ErrorCode.NOT_CONTROLLER, NOBODY))

    def admit(self, joiner: ReplicaId) -> None:
        """Refused: nodes are fixed.

        Raises:
            KafkaError: always.
        """
        raise KafkaError("the reference engine has fixed members", code=ErrorCode.INVALID_REQUEST)

    # ---- inside ----

    def _applied_in_thread(self, before: MetadataImage, after: MetadataImage) -> None:
        self._post(lambda: self._publish(after))

    def _publish(self, after: MetadataImage) -> None:
        before, self._image = self._image, after
        self.last_contact_ms = self._clock.monotonic_ms()
        for callback in self._callbacks:
            callback(before, after)
        failure = self.consumer.failure
        if failure is not None and self._on_failure is not None:
            self._on_failure(failure)

    def _settle(self, sequence: int, result: Result, reason: int) -> None:
        pending = self._pending.pop(sequence, None)
        if pending is None:
            return  # it expired
        promise = pending.promise
        if reason in _NEVER_TAKEN:
            promise.fail(CommandNotAppliedError(f"pysyncobj refused it (reason {reason})"))
        elif reason != FAIL_REASON.SUCCESS:
            promise.fail(RequestTimedOutError(f"pysyncobj does not know (reason {reason})"))
        elif result is STALE_SEQUENCE:
            last = self._image.submitters.get(self._self_id, (0, 0))
            self.incarnation = max(self.incarnation, last[0] + 1)
            promise.fail(CommandNotAppliedError("of an incarnation that is over"))
        elif isinstance(result, Rejection):
            promise.fail(KafkaError(result.message, code=result.code))
        else:
            promise.resolve(result)


def _library(self_id: NodeId, options: ReferenceOptions, consumer: MetadataConsumer) -> SyncObj:
    """The library with settings that make it usable: no batching (with batching a put takes a tick
    of 100 ms), short timeouts, and its own default otherwise."""
    folder = options.folder
    conf = SyncObjConf(
        autoTick=options.auto_tick,
        autoTickPeriod=0.01,
        appendEntriesUseBatch=False,
        appendEntriesPeriod=0.05,
        raftMinTimeout=0.3,
        raftMaxTimeout=0.6,
        leaderFallbackTimeout=2.0,
        connectionRetryTime=0.2,
        commandsWaitLeader=True,
        useFork=False,  # a child would inherit this node's sockets and threads
        journalFile=None if folder is None else f"{folder}/reference.journal",
        fullDumpFile=None if folder is None else f"{folder}/reference.dump",
    )
    own = options.addresses[self_id]
    others: Iterable[str] = [a for n, a in sorted(options.addresses.items()) if n != self_id]
    if options.transport is None:
        return SyncObj(own, list(others), conf=conf, consumers=[consumer])
    return SyncObj(
        Node(own),
        [Node(address) for address in others],
        conf=conf,
        consumers=[consumer],
        transport=options.transport,
    )


def check_addresses(addresses: Mapping[NodeId, str]) -> None:
    """Refuse anything but loopback: any process that reaches the port can run code in this one.

    Raises:
        ValueError: an address of another host.
    """
    for address in addresses.values():
        host = address.rpartition(":")[0]
        if host not in ("127.0.0.1", "localhost", "::1") and not host.startswith("127."):
            raise ValueError(f"the reference engine speaks on loopback only, not on {address}")


__all__ = [
    "WARNING",
    "MetadataConsumer",
    "ReferenceMetadataEngine",
    "ReferenceOptions",
    "check_addresses",
]


def open_reference_engine(
    config: NodeConfig, clock: Clock, folder: str, on_failure: Callable[[str], None]
) -> ReferenceMetadataEngine:
    """Start the library; call it in the loop that the engine will report to.

    Raises:
        ConfigError: this node is not among `peers`, or one of them is not on loopback.
    """
    addresses = {NodeId(peer.id): f"{peer.host}:{_port(peer.port)}" for peer in config.peers} or {
        NodeId(config.node_id): f"127.0.0.1:{_port(config.peer_listener.port)}"
    }
    if NodeId(config.node_id) not in addresses:
        raise ConfigError("the pysyncobj engine has no observers: every node must be in 'peers'")
    try:
        check_addresses(addresses)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    logger.warning("reference engine", reason=WARNING)
    token = trio.lowlevel.current_trio_token()

    def post(call: Callable[[], None]) -> None:
        try:
            token.run_sync_soon(call)
        except trio.RunFinishedError:
            return  # the node has ended, so no one waits for this

    return ReferenceMetadataEngine(
        self_id=NodeId(config.node_id),
        incarnation=clock.wall_ms(),
        clock=clock,
        post=post,
        options=ReferenceOptions(addresses, folder=folder),
        on_failure=lambda error: on_failure(f"metadata could not be applied: {error!r}"),
    )


def _port(peer_port: int) -> int:
    """A port far from those of other nodes of a local cluster."""
    port = peer_port + PORT_OFFSET
    return port if port < PORT_END else peer_port - PORT_OFFSET
