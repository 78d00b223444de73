"""The synchronous engine of one Raft group: core, log and journal behind ports.

The core decides, this performs, in the order that `raft/ready.py` demands: hard state, log, then
messages; promises leave only after the flush of the position at which they were made. It owns the
translation of term to leader epoch and the group's place in the journal. It never waits, starts no
thread and reads no clock but the one it is given, so the simulation runs it as it is.

Invariants: the journal's claimed flushed end never exceeds what this log really has flushed; the
persisted high watermark lies below it; a leader counts itself only for what it flushed; a replica
that failed says nothing any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from raftmq.cluster.in_sync import InSyncTracker
from raftmq.cluster.log_source import LogSource
from raftmq.cluster.log_start_moves import LogStartMoves, encode_wish
from raftmq.cluster.outbox import Outbox
from raftmq.cluster.peer_messages import (
    PeerMessage,
    RepairReply,
    RepairRequest,
    TailReply,
    TailRequest,
    WrongReplica,
)
from raftmq.cluster.read_barriers import ReadBarriers
from raftmq.cluster.readmission import Readmission
from raftmq.cluster.repair import Repairer
from raftmq.cluster.replica_ports import LogReader, Peers, ReplicaConfig, StateMachine
from raftmq.cluster.retention import Retention
from raftmq.errors import (
    CorruptBatchError,
    KafkaError,
    NotLeaderError,
    RemoteProtocolError,
    StorageError,
)
from raftmq.log.flush import FlushJob
from raftmq.log.hard_state import GroupState, HardStateJournal
from raftmq.log.log_start import LogStart
from raftmq.log.model import LogEntry
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.ports import Buggify, Clock, DiskError, DiskFullError, Random, never
from raftmq.promise import Promise
from raftmq.raft.core import RaftCore
from raftmq.raft.membership import Configuration
from raftmq.raft.messages import (
    AppendReply,
    AppendRequest,
    Entry,
    EntryKind,
    Heartbeat,
    HeartbeatReply,
    InstallLogStart,
)
from raftmq.raft.ready import HardState, Ready, Role, SoftState
from raftmq.records import BatchHeader, check_batch, stamp
from raftmq.types import (
    LeaderEpoch,
    NodeId,
    Offset,
    RaftGroupId,
    RaftIndex,
    ReplicaId,
    Term,
)

__all__ = ["LogReader", "Peers", "Replica", "ReplicaConfig", "StateMachine"]


def _nobody(_replica: object) -> None:
    """Nobody wants to be told."""


class Replica:
    """One copy of one Raft group. `cluster/recovery.py` opens it."""

    def __init__(
        self,
        group: RaftGroupId,
        self_id: ReplicaId,
        log: ReplicatedLog,
        journal: HardStateJournal,
        *,
        machine: StateMachine,
        peers: Peers,
        clock: Clock,
        random: Random,
        config: ReplicaConfig,
        buggify: Buggify = never,
    ) -> None:
        """Take up the group where log and journal left it."""
        self.group = group
        self.self_id = self_id
        self.log = log
        self.machine = machine
        self.config = config
        self.failure: str | None = None
        self._journal = journal
        self._peers = peers
        self._clock = clock
        self._random = random
        self._buggify = buggify
        self._outbox = Outbox()
        self._in_sync = InSyncTracker()
        self._retention = Retention(self, clock)
        self._repairer = Repairer(self, config.repair_bytes_max)
        self._readmission = Readmission()
        self._barriers = ReadBarriers()
        self._moves = LogStartMoves(self)
        self._source = LogSource(
            log, self._repairer.look, lambda error: self.fail(f"read failed: {error}")
        )
        self._prewritten_end = RaftIndex(0)
        self._disk_full_until_ms = 0.0
        self._ticks = 0

        state = journal.get(group) or GroupState()
        assert state.bootstrapped in (None, self_id.storage_id), "another replica's hard state"
        self.state = state
        self._sequence = 0
        if state.bootstrapped is None:
            # Durable before the first vote or acknowledgement: if this folder is ever found empty,
            # the node knows that something was promised here.
            self.put_state(attrs.evolve(state, bootstrapped=self_id.storage_id))
        commit = min(RaftIndex(self.state.commit_end), log.flushed_end)
        self._commit_end = max(commit, log.log_start.index)
        self.high_watermark = log.offset_of(self._commit_end)
        self.on_touched: Callable[[Replica], None] = _nobody
        self._has_started = False
        if isinstance(machine, LogReader):
            machine.attach_log(log)
        machine.restore(log.log_start)
        self.core = self._new_core()
        for bare in log.bare_entries():
            if bare.kind == EntryKind.LOG_START:
                self._moves.note(RaftIndex(bare.index + 1), bare.payload)

    # ---- what it is ----

    @property
    def is_leader(self) -> bool:
        """True while this replica believes that it leads."""
        return self.failure is None and self.core.role is Role.LEADER

    @property
    def is_writable(self) -> bool:
        """True for a leader whose own term has a committed entry: its high watermark is known."""
        return self.is_leader and self.core.has_committed_own_term

    @property
    def leader(self) -> ReplicaId | None:
        """Who leads the current term, as far as known here."""
        return None if self.failure is not None else self.core.leader

    @property
    def leader_epoch(self) -> LeaderEpoch:
        """The current term, as Kafka clients see it."""
        return LeaderEpoch(self.core.term)

    @property
    def log_end_offset(self) -> Offset:
        """The next offset to assign."""
        return self.log.log_end_offset

    @property
    def log_start_offset(self) -> Offset:
        """The first kept offset."""
        return self.log.log_start_offset

    @property
    def commit_end(self) -> RaftIndex:
        """Everything below is committed, as far as known here."""
        return self._commit_end

    @property
    def configuration(self) -> Configuration:
        """The replicas of this group, as the newest entry of this log has it."""
        return self.core.configuration

    @property
    def voters(self) -> tuple[ReplicaId, ...]:
        """Who counts in the quorum."""
        return self.core.configuration.voters

    @property
    def learners(self) -> tuple[ReplicaId, ...]:
        """Who only copies."""
        return self.core.configuration.learners

    def follower_end_offset(self, replica: ReplicaId) -> Offset | None:
        """Up to where another replica is known to have flushed; None when nothing is known."""
        progress = self.core.progress.get(replica)
        if progress is None or progress.match_end < self.log.log_start.index:
            return None
        return self.log.offset_of(min(progress.match_end, self.log.end_index))

    def in_sync_replicas(self) -> tuple[ReplicaId, ...]:
        """Leader and voters caught up within the allowed lag; only a leader knows."""
        if not self.is_leader:
            return ()
        now_ms = self._clock.monotonic_ms()
        lag_ms = self.config.replica_lag_time_max_ms
        return tuple(
            voter
            for voter in self.voters
            if voter == self.self_id or self._in_sync.is_in_sync(voter, now_ms, lag_ms)
        )

    def flushed_voters(self, end: RaftIndex) -> int:
        """How many voters are known to have flushed everything below `end`; only a leader knows."""
        return sum(1 for voter in self.voters if self._flushed_end_of(voter) >= end)

    # ---- inputs ----

    def keep_claims(self) -> None:
        """After opening: keep the word given for bytes that recovery cut off or found damaged."""
        recovery = self.log.recovery
        floor = max(recovery.cut_claimed_end, RaftIndex(self.state.cut_floor))
        if not self.state.cut_floor and not recovery.dropped_bare_entries:
            # A batch is written only after its epoch's election entry is durable, and none of
            # those was lost: what was cut is of the last epoch that is left, or earlier.
            self.core.claimed_term_floor = self.core.epochs.last_term
        if floor != self.state.cut_floor:
            self.put_state(attrs.evolve(self.state, cut_floor=floor))
        self._repairer.set_cut_floor(floor)

    def append(self, batch: bytearray | memoryview, header: BatchHeader) -> Offset:
        """Stamp, write and propose a checked batch; returns its base offset. Durable at no time
        before the high watermark covers it.

        Raises:
            NotLeaderError: another replica leads, or nobody.
            StorageError: the disk refused; nothing was appended.
        """
        self._check_may_propose()
        log = self.log
        base_offset = log.log_end_offset
        start = log.end_index
        epoch = LeaderEpoch(self.core.term)
        stamp(batch, base_offset, epoch)
        header = header._replace(base_offset=base_offset, leader_epoch=epoch)
        # Written before it is proposed: a full disk can then refuse without the core knowing.
        try:
            log.append_batch(batch, header)
        except DiskFullError as error:
            raise StorageError(f"disk full: {error}") from error
        except DiskError as error:
            self.fail(f"append failed: {error}")
            raise StorageError(str(error)) from error
        try:
            entry = self.core.propose(batch, header.offset_count)
        except KafkaError:
            log.truncate_to(start)  # never flushed, never sent, never counted
            raise
        assert entry.start == start, "core and log disagree about the log's end"
        self._prewritten_end = entry.end
        self._appended(entry)
        self.on_touched(self)
        return base_offset

    def move_log_start(self, target: Offset) -> Entry:
        """Propose that everything below `target` is dropped; done on each replica once committed.

        Raises:
            NotLeaderError: another replica leads, or this one cannot tell its high watermark yet.
        """
        self._check_may_propose()
        if not self.is_writable:
            raise NotLeaderError("the new leader has not committed in its term yet")
        assert target <= self.high_watermark, "only committed records may be dropped"
        entry = self.core.propose(encode_wish(target), 1, EntryKind.LOG_START)
        self.on_touched(self)
        return entry

    def change_membership(self, configuration: Configuration) -> Entry:
        """Propose a configuration that differs by one replica.

        Raises:
            KafkaError: not the leader, or another change is under way.
        """
        self._check_may_propose()
        entry = self.core.propose_membership(configuration)
        self.on_touched(self)
        return entry

    def transfer_leadership(self, node_id: NodeId) -> bool:
        """Hand leadership to a voter's node; False when this replica cannot."""
        if not self.is_leader:
            return False
        for voter in self.voters:
            if voter.node_id == node_id and voter != self.self_id:
                self.core.transfer_leadership(voter)
                self.on_touched(self)
                return True
        return False

    def read_barrier(self) -> Promise[RaftIndex]:
        """Promise the committed end at a moment after this call, confirmed by a quorum
        (linearizable, Raft §8); fails with NotLeaderError when leadership is lost."""
        if not self.is_leader:
            return Promise.failed(NotLeaderError())
        promise = self._barriers.add()
        self.on_touched(self)
        return promise

    def step(self, message: PeerMessage) -> None:
        """Take a message of another replica.

        Raises:
            RemoteProtocolError: it carries what no correct replica sends.
        """
        if self.failure is not None:
            return
        if message.to != self.self_id:
            self._answer_stray(message)
            return
        if self._prewritten_end:
            self.drain()  # what was appended belongs to the term before this message
        match message:
            case AppendRequest():
                if not self._may_take(message):
                    return
                self.core.step(message)
            case InstallLogStart():
                _check_install(message)
                self.core.step(message)
            case AppendReply() | HeartbeatReply():
                self.core.step(message)
                self._observe(message.sender)
            case WrongReplica():
                if message.term == self.core.term:
                    self.peer_identity(message.sender)
            case RepairRequest():
                self._repairer.answer(message)
            case RepairReply():
                self._repairer.take(message)
            case TailRequest():
                tail = message.floor, self.log.end_index, self.core.epochs.last_term
                reply = TailReply(self.core.term, self.self_id, message.sender, *tail)
                self._peers.send(self.group, reply)
            case TailReply():
                self._repairer.take_tail(message)
            case _:
                self.core.step(message)

    def tick(self) -> None:
        """One tick of abstract time passed."""
        if self.failure is not None:
            return
        self.core.clock_ms = self._clock.wall_ms()
        self.core.tick()
        self._ticks += 1
        if self._ticks % self.config.election_ticks == 0:
            self._maintain()

    def peer_identity(self, peer: ReplicaId) -> None:
        """A node was heard to run this group under this storage id."""
        if peer.node_id != self.self_id.node_id:
            self._readmission.heard(peer)

    def peer_lost(self, node_id: NodeId) -> None:
        """A peer's connections closed: when it led, do not wait for the election timeout."""
        leader = self.leader
        if leader is not None and leader.node_id == node_id and not self.is_leader:
            self.core.campaign()

    def stand(self) -> None:
        """Stand for election now, as the preferred leader of a new group does."""
        if self.failure is None and self.leader is None:
            self.core.campaign()
            self.on_touched(self)

    # ---- flushing ----

    def flush_job(self) -> FlushJob | None:
        """The next flush of the log that is due; its `run()` may go to another thread."""
        if self.failure is not None:
            return None
        return self.log.flush_job()

    def flushed(self, job: FlushJob) -> None:
        """`job` ran; what it covered is durable."""
        if self.failure is not None:
            return
        try:
            self.log.complete(job)
        except DiskFullError:
            # Batches staged behind a bare entry do not fit: as if this follower or leader crashed
            # before writing them; the log cut them off and says so by its end.
            self._rebuild_core()
        except DiskError as error:
            self.fail(f"write after flush failed: {error}")
            return
        self._claim()

    def flush_failed(self, error: DiskError) -> None:
        """`job` failed. An fsync is never retried: what it covered may be gone."""
        self.fail(f"flush failed: {error}")

    def fail(self, reason: str) -> None:
        """Stop for good: say nothing, promise nothing, count nothing."""
        if self.failure is not None:
            return
        self.failure = reason
        self._outbox.clear()
        self._barriers.fail(StorageError(reason))
        self.machine.role_changed(SoftState(Role.FOLLOWER, self.core.term, None))

    # ---- effects ----

    def drain(self) -> None:
        """Perform everything the core decided, then release what the flushes allow."""
        if not self._has_started:
            self._start()
        self._perform_all()
        if self.failure is None and not self.waits_for_journal:
            # A group of one has no message to hold back: its vote must be durable before its own
            # flush counts, just as if it were another's.
            self.core.advance(self.log.flushed_end)
            self._perform_all()
        if self.failure is not None:
            return
        if len(self._outbox):
            released = self._outbox.release(
                self._journal.flushed_sequence, self.log.flushed_end, self.core.term
            )
            for message in released:
                self._peers.send(self.group, message)
        if len(self._barriers):
            self._barriers.begin(self.core)
            self._perform_all()
            self._barriers.settle(self.core)

    def _perform_all(self) -> None:
        while self.failure is None and (ready := self.core.ready()) is not None:
            self._perform(ready)

    def _start(self) -> None:
        """Tell the machine, which knows its replica by now, what was committed before."""
        self._has_started = True
        self.machine.committed(self.high_watermark, self._commit_end)
        self._moves.fulfil(self._commit_end)

    @property
    def waits_for_journal(self) -> bool:
        """True when a journal flush would let something go on."""
        return self._journal.flushed_sequence < self._sequence

    def _perform(self, ready: Ready) -> None:
        try:
            if ready.hard_state is not None:
                hard_state = ready.hard_state
                self.put_state(attrs.evolve(self.state, term=hard_state.term, vote=hard_state.vote))
            if ready.install is not None:
                self._install(ready.install)
            if ready.truncate_end is not None:
                self._truncate(ready.truncate_end)
            for entry in ready.append:
                self._write(entry)
            if ready.append:
                self._prewritten_end = RaftIndex(0)
        except DiskFullError as error:
            if self.core.role is Role.LEADER:
                # Only a bare entry beyond the reserve comes here; the core already counts it.
                self.fail(f"disk full: {error}")
            else:
                self._disk_full_until_ms = (
                    self._clock.monotonic_ms() + self.config.disk_full_backoff_ms
                )
                self._rebuild_core()
            return
        except DiskError as error:
            self.fail(f"write failed: {error}")
            return
        send = self._peers.send
        for message in ready.send_now:
            send(self.group, message)
        for message in ready.send_after_flush:
            self._outbox.hold(message, self._sequence, self.log.end_index)
        if ready.soft_state is not None:
            self._role_changed(ready.soft_state)
        if ready.commit_end is not None:
            self._committed(ready.commit_end)

    def _write(self, entry: Entry) -> None:
        if entry.end <= self._prewritten_end:
            return  # by append(), before it was proposed
        epoch = LeaderEpoch(entry.term)
        if entry.kind is EntryKind.BATCH:
            self.log.append_batch(entry.payload)
        else:
            self.log.append_bare(entry.start, epoch, int(entry.kind), bytes(entry.payload))
            if entry.kind is EntryKind.LOG_START:
                self._moves.note(entry.end, entry.payload)
        self._appended(entry)

    def _appended(self, entry: Entry) -> None:
        assert self.log.end_index == entry.end, "log and core disagree about an entry's place"
        self.machine.appended(
            LogEntry(
                entry.start, entry.end, LeaderEpoch(entry.term), int(entry.kind), entry.payload
            )
        )

    def _truncate(self, end: RaftIndex) -> None:
        assert end >= self._commit_end, "truncation below the high watermark"
        self._lower_claim(end)
        self.log.truncate_to(end)
        self._outbox.cap(end)
        self._prewritten_end = min(self._prewritten_end, end)
        self._moves.truncate_to(end)
        self.machine.truncated(end)

    def _install(self, install: InstallLogStart) -> None:
        log_start = LogStart.decode(install.payload)
        assert log_start.index == install.log_start, "a log start that is not where it says"
        self._lower_claim(log_start.index)
        self.log.reset_to(log_start)
        self._outbox.cap(log_start.index)
        self._prewritten_end = RaftIndex(0)
        self._moves.clear()
        self.machine.restore(log_start)

    def _committed(self, commit_end: RaftIndex) -> None:
        if commit_end <= self._commit_end:
            return  # told again to a core that was rebuilt from what is flushed
        self._commit_end = commit_end
        high_watermark = self.log.offset_of(commit_end)
        assert high_watermark >= self.high_watermark, "the high watermark never falls"
        self.high_watermark = high_watermark
        self.machine.committed(high_watermark, commit_end)
        self._moves.fulfil(self._commit_end)

    def _role_changed(self, soft: SoftState) -> None:
        if soft.role is not Role.LEADER:
            self._prewritten_end = RaftIndex(0)
            self._barriers.fail(NotLeaderError())
        self._in_sync.reset()
        self.machine.role_changed(soft)

    # ---- the journal ----

    def put_state(self, state: GroupState) -> None:
        """Write what promises depend on; they wait for the sequence noted here."""
        self.state = state
        self._sequence = self._journal.put(self.group, state)

    def _claim(self) -> None:
        """Record, without a flush of its own, how far the log is flushed and committed.

        The high watermark is capped by the flushed end: above it this disk may still hold another
        leader's entries, which a crash would bring back under a watermark that covers them.
        """
        flushed_end = self.log.flushed_end
        commit_end = max(self.state.commit_end, min(self._commit_end, flushed_end))
        if (flushed_end, commit_end) == (self.state.flushed_end, self.state.commit_end):
            return
        self.state = attrs.evolve(self.state, flushed_end=flushed_end, commit_end=commit_end)
        try:
            self._journal.put(self.group, self.state, lazy=True)
        except DiskError as error:
            self.fail(f"journal write failed: {error}")

    def _lower_claim(self, end: RaftIndex) -> None:
        """Make durable that less than before is claimed, before the log may lose it.

        Otherwise a crash right after a truncation would look like damage to flushed entries. Rare
        (a deposed leader's suffix), so the flush is awaited here.
        """
        if end >= self.state.flushed_end:
            return
        self.put_state(attrs.evolve(self.state, flushed_end=end))
        self._journal.flush_now()

    # ---- the core ----

    def _new_core(self) -> RaftCore:
        return self._source.new_core(
            self.config.raft(self.self_id),
            HardState(Term(self.state.term), self.state.vote),
            self._commit_end,
            self._random,
            self._buggify,
        )

    def _rebuild_core(self) -> None:
        """Begin again from disk, as after a crash: the core took what the log could not."""
        if self.log.end_index < self._commit_end:
            # Only entries staged behind an election's; the machine has used them, so it must
            # begin again as well.
            self.fail("disk full: committed entries could not be written here")
            return
        before = self.core
        self.core = self._new_core()
        self.core.suspended = before.suspended
        self.core.claimed_end_floor = before.claimed_end_floor
        self.core.claimed_term_floor = before.claimed_term_floor
        self._prewritten_end = RaftIndex(0)
        self._outbox.clear()  # withdrawn: what they vouch for may be what was lost
        self._moves.truncate_to(self.log.end_index)
        self.machine.truncated(self.log.end_index)
        self._role_changed(SoftState(Role.FOLLOWER, self.core.term, None))

    # ---- details of inputs ----

    def _check_may_propose(self) -> None:
        if self.failure is not None:
            raise StorageError(self.failure)
        if self.core.role is Role.LEADER and self.log.end_index != self.core.log_end:
            self.drain()
        if not self.is_leader:
            raise NotLeaderError()

    def _may_take(self, request: AppendRequest) -> bool:
        """Check a leader's batches before anything is written; False: let it come again later."""
        if not request.entries:
            return True
        if self._clock.monotonic_ms() < self._disk_full_until_ms:
            return False
        for entry in request.entries:
            if entry.kind is not EntryKind.BATCH:
                continue
            try:
                header = check_batch(entry.payload)
            except CorruptBatchError as error:
                raise RemoteProtocolError(f"a damaged batch from {request.sender}") from error
            if header.leader_epoch != entry.term or header.offset_count != entry.end - entry.start:
                raise RemoteProtocolError(f"a batch from {request.sender} in a wrong place")
        return True

    def _answer_stray(self, message: PeerMessage) -> None:
        """A message for another storage of this node: tell who runs here, do nothing else."""
        if message.to.node_id == self.self_id.node_id and isinstance(
            message, AppendRequest | Heartbeat | InstallLogStart
        ):
            notice = WrongReplica(message.term, self.self_id, message.sender)
            self._peers.send(self.group, notice)

    def _flushed_end_of(self, replica: ReplicaId) -> RaftIndex:
        if replica == self.self_id:
            return self.log.flushed_end
        progress = self.core.progress.get(replica)
        return RaftIndex(0) if progress is None else progress.match_end

    def _observe(self, sender: ReplicaId) -> None:
        if self.core.role is Role.LEADER:
            self._in_sync.observe(
                sender,
                self._flushed_end_of(sender),
                self.log.end_index,
                self._clock.monotonic_ms(),
            )

    # ---- upkeep ----

    def _maintain(self) -> None:
        self._claim()
        self._repairer.tick()
        self._moves.fulfil(self._commit_end)
        if self.is_writable:
            self._readmission.step(self.core, self._commit_end)

    def retention_now_ms(self) -> int | None:
        """The time that a majority of voters agrees on; None on any but a leader."""
        return self._retention.now_ms()

    def retain(self, below: Offset) -> Entry | None:
        """Propose the log start that retention wants, never above `below`; None when there is none.

        Raises:
            KafkaError: leadership was lost.
        """
        target = self._retention.target(below)
        return None if target is None or len(self._moves) else self.move_log_start(target)

    def scrub(self, bytes_max: int) -> None:
        """Check stored batches against their checksums, going on where the last call stopped."""
        if self.failure is not None:
            return
        try:
            found = self.log.scrub(bytes_max)
        except DiskError as error:
            self.fail(f"scrub failed: {error}")
            return
        if found:
            self._repairer.look()

    def send(self, message: PeerMessage) -> None:
        """Send to another replica of this group."""
        self._peers.send(self.group, message)

    def damaged(self) -> Sequence[tuple[Offset, Offset]]:
        """Offset ranges whose bytes are damaged here and not served."""
        return self.log.damaged


def _check_install(install: InstallLogStart) -> None:
    """Look at a leader's log start before anything is dropped for it.

    Raises:
        RemoteProtocolError: the tuple contradicts its message.
    """
    log_start = LogStart.decode(install.payload)
    if (
        log_start.index != install.log_start
        or log_start.previous_epoch != install.previous_term
        or log_start.configuration != install.configuration
    ):
        raise RemoteProtocolError(f"a log start from {install.sender} that contradicts itself")
