"""All replicas of one node: one tick, one way in, one way out, one journal.

Inputs (ticks, frames, finished flushes) touch few replicas; only those are drained afterwards. The
messages of their groups then leave in few frames: when a node dies that led hundreds of groups,
each of them asks for votes, answers and begins its term at the same moment, and a frame for each of
these messages would cost both sides more than the message itself. So small ones wait in
`FrameBatcher` for the end of the round of drains that caused them. Flushes are asked for per
replica, plus one for the journal that all groups share, so a thousand elections are a handful of
fsyncs. Sans-IO: the shell provides a way to send and a way to flush.

Invariants: a replica is drained after every input that touched it, before anything else happens to
the node; at most one flush per log and one of the journal are under way; frames from nodes that
claim to be another are dropped. Messages of one stream to one node leave in the order they came, so
a group's requests never overtake each other; what is urgent (heartbeats, votes, answers) has a
stream of its own and never waits for bulk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from enum import StrEnum
from itertools import islice
from typing import Final, Protocol

from raftmq.errors import ContainedError, NodeMustStopError, RemoteProtocolError
from raftmq.log.journal import HardStateJournal
from raftmq.log.model import FlushJob
from raftmq.ports import DiskError
from raftmq.raft.core import RaftCore
from raftmq.raft.messages import (
    AppendRequest,
    Heartbeat,
    HeartbeatReply,
    InstallLogStart,
    Role,
    StoredChunk,
)
from raftmq.replication.broken_invariants import ReportBroken
from raftmq.replication.messages import (
    SEVERAL_MAX,
    NodeBeat,
    PeerMessage,
    RepairReply,
    Unquiesce,
    decode,
    encode,
    encode_beats,
    encode_node_beat,
    encode_several,
    forget_group,
)
from raftmq.replication.quiescence import QuiescentReplicas
from raftmq.replication.replica import Replica
from raftmq.replication.timeout_backoff import LoopBackoff
from raftmq.types import METADATA_GROUP, Buffer, NodeId, RaftGroupId

SMALL_BYTES_MAX: Final = 2 << 10
"""A larger message gets a frame of its own and is not copied."""
GATHERED_BYTES_MAX: Final = 32 << 10
BEATS_MAX: Final = 256


class Stream(StrEnum):
    """The streams between two nodes; none waits for another. A stream's hello names it.

    Raft's messages travel on the first three; catch-up, read from files, has its own.
    """

    BULK = "bulk"
    CONTROL = "control"
    HEARTBEAT = "heartbeat"
    CATCH_UP = "catch-up"


class SendFrame(Protocol):
    """The shell's function that sends to another node."""

    def __call__(self, node_id: NodeId, frame: list[Buffer], stream: Stream) -> bool:
        """Send one frame, given in pieces, without blocking; False when it was dropped."""
        ...


class _Bag:
    """The frames that wait for one node on one stream."""

    __slots__ = ("frames", "size_bytes")

    def __init__(self) -> None:
        self.frames: list[list[Buffer]] = []
        self.size_bytes = 0


class FrameBatcher:
    """Messages of a node's replicas, put together into few frames for each other node."""

    def __init__(self, node_id: NodeId, send: SendFrame) -> None:
        self._node_id = node_id
        self._send = send
        self._beats: dict[NodeId, list[tuple[RaftGroupId, Heartbeat | HeartbeatReply]]] = {}
        self._bags: dict[tuple[NodeId, Stream], _Bag] = {}

    def add_beat(self, group: RaftGroupId, beat: Heartbeat | HeartbeatReply) -> None:
        """Take a heartbeat or the reply to one; it leaves in a frame with others."""
        to = beat.to.node_id
        beats = self._beats.setdefault(to, [])
        beats.append((group, beat))
        if len(beats) >= BEATS_MAX:
            self._send_beats(to, self._beats.pop(to))

    def add(self, group: RaftGroupId, message: PeerMessage, stream: Stream) -> None:
        """Take another message; a large one leaves at once, after those that came before it."""
        to = message.to.node_id
        frame = encode(group, message)
        size = len(frame[0]) if len(frame) == 1 else sum(map(len, frame))
        bag = self._bags.get((to, stream))
        if size > SMALL_BYTES_MAX:
            if bag is not None:
                self._send_bag(to, stream)
            self._send(to, frame, stream)
            return
        if bag is None:
            bag = self._bags[to, stream] = _Bag()
        bag.frames.append(frame)
        bag.size_bytes += size
        if len(bag.frames) >= SEVERAL_MAX or bag.size_bytes >= GATHERED_BYTES_MAX:
            self._send_bag(to, stream)

    def send_all(self) -> None:
        """Send all that waits."""
        while self._bags:
            self._send_bag(*next(iter(self._bags)))
        while self._beats:
            self._send_beats(*self._beats.popitem())

    def _send_bag(self, to: NodeId, stream: Stream) -> None:
        frames = self._bags.pop((to, stream)).frames
        frame = frames[0] if len(frames) == 1 else encode_several(frames)
        self._send(to, frame, stream)

    def _send_beats(
        self, to: NodeId, beats: list[tuple[RaftGroupId, Heartbeat | HeartbeatReply]]
    ) -> None:
        self._send(to, encode_beats(self._node_id, to, beats), Stream.HEARTBEAT)


class SendStored(Protocol):
    """The shell's function that sends to replicas that are far behind, on a stream of their own."""

    def __call__(self, node_id: NodeId, head: list[Buffer], chunk: StoredChunk) -> bool:
        """Send one frame: its head, then the chunk's span, if any; False when it was dropped."""
        ...


class RequestFlush(Protocol):
    """The shell's function that hands a flush to its threads."""

    def __call__(self, job: FlushJob, done: Callable[[DiskError | None], None]) -> None:
        """Run `job.run()` elsewhere, then call `done` in the loop's thread."""
        ...


STANDING_MAX: Final = 64
"""Groups of a node that may ask for votes at a time. When a thousand lose their leaders at once and
all ask, the answers to each come after its next timeout, for ever."""
ORPHANS_MAX: Final = 128
"""Groups of a lost leader that begin to elect in one tick: a thousand in one turn of the loop would
delay the heartbeats of all other groups, which then lose their leaders too."""
_STANDING: Final = (Role.PRE_CANDIDATE, Role.CANDIDATE)
# Tuples, since a union would be built anew for every message.
_BEATS: Final = (Heartbeat, HeartbeatReply)
_BULK: Final = (AppendRequest, InstallLogStart, RepairReply, Unquiesce)
"""Messages that may be large, or that unquiesce a group: heartbeats never queue behind them."""


def _stream_of(group: RaftGroupId, message: PeerMessage) -> Stream:
    """The stream of a message. Appends of the metadata group wait for no partition's data: a surge
    of that would hold up claims, commits of offsets and the barriers of coordinators."""
    if not isinstance(message, _BULK):
        return Stream.HEARTBEAT
    return Stream.CONTROL if group == METADATA_GROUP else Stream.BULK


def _stands(replica: Replica) -> bool:
    """True while a replica asks for votes, which one that failed does not, whatever its role."""
    return replica.core.role in _STANDING and replica.failure is None


class _Batch(AbstractContextManager[None]):
    """The context manager of `MultiRaft.batch`: one object for all, since every frame needs one."""

    __slots__ = ("_owner",)

    def __init__(self, owner: MultiRaft) -> None:
        self._owner = owner

    def __enter__(self) -> None:
        self._owner.depth += 1

    def __exit__(self, *_: object) -> None:
        owner = self._owner
        owner.depth -= 1
        if not owner.depth:
            owner.drain()


class MultiRaft:
    """The replicas of one node.

    Attributes:
        depth: how many `batch()` blocks the present call is in.
    """

    def __init__(
        self,
        node_id: NodeId,
        journal: HardStateJournal,
        *,
        send: SendFrame,
        send_stored: SendStored,
        request_flush: RequestFlush,
        on_journal_failed: Callable[[DiskError], None],
        on_broken_invariant: ReportBroken,
    ) -> None:
        self.node_id = node_id
        self.replicas: dict[RaftGroupId, Replica] = {}
        self._journal = journal
        self._send = send
        self._send_stored = send_stored
        self._request_flush = request_flush
        self._on_journal_failed = on_journal_failed
        self.on_broken_invariant = on_broken_invariant
        self._active: dict[RaftGroupId, Replica] = {}  # all that are not quiescent
        # Ordered, and keyed by the replicas themselves: the hash of a group's name is slow.
        self._dirty: dict[Replica, None] = {}
        self._waiting: dict[Replica, None] = {}  # for the journal
        self._standing: dict[Replica, None] = {}  # asked for votes when last looked at
        self._orphans: dict[RaftGroupId, NodeId] = {}  # led by a node that was lost
        self._quiesced: dict[RaftGroupId, None] = {}
        self._batcher = FrameBatcher(node_id, send)
        self.depth = 0
        self._batch = _Batch(self)
        self._is_draining = False
        self._after_round: dict[Callable[[], None], None] = {}
        self.has_failed = False
        self._is_closed = False
        # A journal's sequence only grows, and each opening rewrites it: no two processes share one.
        self._quiescent = QuiescentReplicas(
            node_id,
            journal.flushed_sequence,
            self._send_node_beat,
            self._unquiesce_group,
            self._probe,
        )
        self._loop_backoff = LoopBackoff()
        self._heartbeat_ticks = 1
        self._election_ticks = 2

    def close(self) -> None:
        """Take no more finished flushes: logs and journal are about to be closed."""
        self._is_closed = True

    # ---- replicas ----

    def register(self, replica: Replica) -> None:
        """Let an opened replica take part from now on."""
        assert replica.group not in self.replicas, "a group has one replica per node"
        self.replicas[replica.group] = replica
        self._active[replica.group] = replica
        self._heartbeat_ticks = replica.config.heartbeat_ticks
        self._election_ticks = replica.config.election_ticks
        self.touch(replica.group)

    def unregister(self, group: RaftGroupId) -> Replica | None:
        """Remove a replica, whose log the caller closes or deletes."""
        self._active.pop(group, None)
        self._quiescent.remove(group)
        self._quiesced.pop(group, None)
        replica = self.replicas.pop(group, None)
        if replica is not None:
            self._dirty.pop(replica, None)
            self._waiting.pop(replica, None)
            self._standing.pop(replica, None)
            replica.quiescence.is_quiescent = False
        forget_group(group)
        return replica

    @property
    def quiescent_count(self) -> int:
        """How many replicas are quiescent."""
        return len(self._quiescent)

    @property
    def active(self) -> list[Replica]:
        """The replicas that are not quiescent."""
        return list(self._active.values())

    def leading_cores(self) -> Iterator[RaftCore]:
        """The cores of groups that this node leads and that are not quiescent."""
        for replica in self._active.values():
            if replica.is_leader and not replica.quiescence.is_quiescent:
                yield replica.core

    def take_quiesced(self) -> list[RaftGroupId]:
        """The groups that quiesced since the last call, active again or not."""
        quiesced, self._quiesced = self._quiesced, {}
        return list(quiesced)

    @property
    def timeout_doublings(self) -> int:
        """How many times all timeouts are doubled now, because ticks come late."""
        return self._loop_backoff.doublings

    @property
    def is_quiescent(self) -> bool:
        """True when only the metadata group is active, and knows its leader."""
        if len(self._active) > 1:
            return False
        return all(
            group == METADATA_GROUP and replica.core.leader is not None
            for group, replica in self._active.items()
        )

    def touch(self, group: RaftGroupId) -> None:
        """Something happened to a replica from outside (an append, a proposal): drain it, at the
        end of the current `batch()` or now. One that is not registered is left alone."""
        replica = self.replicas.get(group)
        if replica is None:
            return
        self._dirty[replica] = None
        self._unquiesce(replica)
        if not self.depth:
            self.drain()

    def batch(self) -> AbstractContextManager[None]:
        """Do several things to replicas and drain each of them once, at the end."""
        return self._batch

    @property
    def is_draining(self) -> bool:
        """True while effects of replicas are performed; what waits for `after_round` follows."""
        return self._is_draining

    def after_round(self, call: Callable[[], None]) -> None:
        """Call this once, after the round of drains that is under way, else after the next one: for
        calls to replicas that state machines must not make from within their own callbacks. What is
        asked for twice meanwhile is called once."""
        self._after_round[call] = None

    # ---- inputs ----

    def tick(self, late_ticks: float = 0.0) -> None:
        """One tick for every active replica; it came late by so many ticks."""
        self._loop_backoff.ticked(late_ticks, self._election_ticks)
        doublings = self.timeout_doublings
        with self.batch():
            self._quiescent.tick(self._heartbeat_ticks, self._election_ticks << doublings)
            self._tell_orphans()
            active = list(self._active.values())
            # Nodes begin at different groups, so that they do not compete in elections.
            start = len(active) * (self.node_id % 5) // 5
            self._standing = {r: None for r in self._standing if _stands(r)}
            for replica in active[start:] + active[:start]:
                if replica.quiescence.is_quiescent:
                    continue
                replica.core.timeout_doublings_floor = doublings
                replica.core.waits_for_turn = len(self._standing) >= STANDING_MAX
                if replica.tick():
                    self._dirty[replica] = None
                if _stands(replica):
                    self._standing[replica] = None
                elif self._standing:
                    self._standing.pop(replica, None)  # its election timed out

    def deliver(self, sender: NodeId, frame: Buffer) -> None:
        """Take a frame that `sender` sent, and that stays unchanged from now on.

        Raises:
            RemoteProtocolError: the connection that it came from must be closed.
            ContainedError: likewise; a replica met a broken invariant and has stopped.
        """
        with self.batch():
            content = decode(frame)
            if isinstance(content, NodeBeat):
                if content.sender != sender:
                    raise RemoteProtocolError(f"node {sender} speaks as node {content.sender}")
                self._quiescent.on_beat(content, self._election_ticks)
                return
            for group, message in content:
                if message.sender.node_id != sender:
                    raise RemoteProtocolError(f"node {sender} speaks as {message.sender}")
                replica = self.replicas.get(group)
                if replica is None:
                    continue  # not created here yet, or deleted; the sender tries again
                if replica.quiescence.is_quiescent and message.to == replica.self_id:
                    if replica.quiescence.is_late(replica.core, message):
                        continue
                    self._unquiesce(replica, by=message)
                if (
                    isinstance(message, _BEATS)
                    and replica not in self._dirty
                    and (reply := replica.take_beat(message))
                ):
                    if reply is not True:
                        self.send(group, reply)
                    continue
                self._dirty[replica] = None
                self._step(replica, message)

    def _step(self, replica: Replica, message: PeerMessage) -> None:
        """Give a replica a message.

        Raises:
            RemoteProtocolError: no correct replica sends it.
            ContainedError: it broke an invariant; this replica alone has stopped.
        """
        try:
            replica.step(message)
        except RemoteProtocolError:
            raise
        except Exception as error:
            kind = type(message).__name__
            replica.fail(f"broken invariant, at a {kind} of {message.sender}: {error!r}")
            raise ContainedError(f"{kind} of {message.sender} to {replica.group}") from error

    def peer_lost(self, node_id: NodeId) -> None:
        """A peer's connections closed: groups that it leads need not wait for the timeout."""
        for group, replica in self.replicas.items():
            leader = replica.leader
            if leader is not None and leader.node_id == node_id:
                self._orphans[group] = node_id
        with self.batch():
            self._tell_orphans()

    def _tell_orphans(self) -> None:
        for group in list(islice(self._orphans, ORPHANS_MAX)):
            node_id = self._orphans.pop(group)
            if (replica := self.replicas.get(group)) is not None:
                self._unquiesce(replica, node_id)
                replica.peer_lost(node_id)
                self._dirty[replica] = None

    def _unquiesce(
        self, replica: Replica, silent: NodeId | None = None, *, by: PeerMessage | None = None
    ) -> None:
        """End a replica's quiescence, and that of the other members unless they ended it."""
        # A replica that quiesced by this very frame is not filed yet.
        if replica.group in self._active and not replica.quiescence.is_quiescent:
            return
        self._quiescent.remove(replica.group)
        self._active[replica.group] = replica
        replica.unquiesce(silent)
        self._dirty[replica] = None
        if by is None or replica.core.is_leader or by.sender != replica.core.leader:
            replica.quiescence.announce(replica.core)
        if silent is not None and replica.leader is not None and replica.leader.node_id == silent:
            replica.peer_lost(silent)

    def _unquiesce_group(self, group: RaftGroupId, silent: NodeId | None) -> None:
        self._unquiesce(self.replicas[group], silent)

    def _probe(self, group: RaftGroupId) -> None:
        replica = self.replicas[group]
        replica.quiescence.probe(replica.core)

    def _quiesced_now(self, replica: Replica) -> None:
        group, core = replica.group, replica.core
        self._quiescent.add(
            group,
            replica.quiescence.nodes(core),
            is_led_here=core.is_leader,
            has_absent=bool(replica.quiescence.absent),
        )
        self._quiesced[group] = None
        self._active.pop(group, None)

    # ---- the way out ----

    def send(self, group: RaftGroupId, message: PeerMessage) -> None:
        """Send a replica's message."""
        to = message.to.node_id
        if to == self.node_id:
            return  # to an earlier storage of this node, which is gone
        if isinstance(message, _BEATS):
            self._batcher.add_beat(group, message)
        elif isinstance(message, AppendRequest) and message.chunk is not None:
            self._send_stored(to, encode(group, message), message.chunk)
        else:
            self._batcher.add(group, message, _stream_of(group, message))
        if not self.depth and not self._is_draining:
            self._batcher.send_all()

    def _send_node_beat(self, beat: NodeBeat) -> None:
        self._send(beat.to, encode_node_beat(beat), Stream.HEARTBEAT)

    def drain(self) -> None:
        """Drain the replicas that were touched, ask for due flushes, send the messages."""
        if self._is_draining or self._is_closed:
            return  # touched from within the loop below; or closed while a flush ended
        self._is_draining = True
        try:
            while self._dirty:
                dirty, self._dirty = self._dirty, {}
                for replica in dirty:
                    replica.drain()
                    self._flush(replica)
                    if replica.quiescence.is_quiescent and replica.group not in self._quiescent:
                        self._quiesced_now(replica)
                    if _stands(replica):
                        self._standing[replica] = None
                self._batcher.send_all()
                if self._after_round:
                    calls, self._after_round = self._after_round, {}
                    for call in calls:
                        call()
        except NodeMustStopError as error:
            self.on_broken_invariant(str(error))  # the error says what an operator can do
            raise
        except Exception as error:
            # A round ended half-way: the engine's state in memory is inconsistent.
            self.on_broken_invariant(f"broken invariant: {error!r}")
            raise
        finally:
            self._is_draining = False
        job = self._journal.flush_job()
        if job is not None:
            self._flush_journal(job)
        self._batcher.send_all()

    def _flush(self, replica: Replica) -> None:
        if replica.waits_for_journal:
            self._waiting[replica] = None
        job = replica.flush_job()
        if job is None:
            return

        def done(error: DiskError | None) -> None:
            if self.has_failed or self._is_closed:
                return
            if error is None:
                replica.flushed(job)
            else:
                replica.flush_failed(error)
            if self.replicas.get(replica.group) is replica:
                self.touch(replica.group)

        self._request_flush(job, done)

    def _flush_journal(self, job: FlushJob) -> None:
        def done(error: DiskError | None) -> None:
            if self.has_failed or self._is_closed:
                return
            if error is not None:
                self.journal_failed(error)
                return
            with self.batch():
                self._journal.complete(job)
                waiting, self._waiting = self._waiting, {}
                for replica in waiting:
                    if self.replicas.get(replica.group) is replica:
                        self._dirty[replica] = None

        self._request_flush(job, done)

    def journal_failed(self, error: DiskError) -> None:
        """Votes and terms of every group rest on the journal: the node stops."""
        if self.has_failed:
            return
        self.has_failed = True
        for replica in list(self.replicas.values()):
            replica.fail(f"journal failed: {error}")
        self._on_journal_failed(error)
