"""One copy of one Raft group: core, log and journal, and the parts around them.

The core decides and the replica performs, in the order that `raft/messages.py` demands: hard state,
log, then messages; promises leave only after the flush of the position at which they were made. It
owns the translation of term to leader epoch and the group's place in the journal. It never waits,
starts no thread and reads no clock but the one it is given, so the simulation runs it as it is. Its
parts (repair, quiescence, moves of the log start, changes of members) are given the core, positions
and functions, and do not know it.

Invariants: the journal's claimed flushed end never exceeds what this log really has flushed; the
persisted high watermark lies below it; a leader counts itself only for what it flushed; a replica
that failed sends nothing any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import attrs

from raftmq.errors import (
    ErrorCode,
    KafkaError,
    NotLeaderError,
    RemoteProtocolError,
    StateError,
    StorageError,
)
from raftmq.log.journal import HardStateJournal
from raftmq.log.log_start import LogStart
from raftmq.log.model import FlushJob, LogEntry
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
    Ready,
    Role,
    SoftState,
)
from raftmq.raft.progress import ProgressState
from raftmq.records import BatchHeader, stamp
from raftmq.replication.append_checks import (
    check_append,
    check_install,
    check_place,
)
from raftmq.replication.broken_invariants import ReportBroken, reports_bugs
from raftmq.replication.catch_up import CatchUp, LogSource
from raftmq.replication.clocks import RetentionClock, heard_clocks
from raftmq.replication.durability import JournalFailedError, JournalPlace, Outbox
from raftmq.replication.leader_state import InSyncTracker, ReadBarriers
from raftmq.replication.log_start import Installing, LogStartMoves, encode_proposal
from raftmq.replication.membership import MembershipChanges, TargetMembership
from raftmq.replication.messages import (
    PeerMessage,
    Quiesce,
    RepairReply,
    RepairRequest,
    TailReply,
    TailRequest,
    Unquiesce,
    WrongReplica,
)
from raftmq.replication.ports import (
    LogReader,
    ReplicaConfig,
    ReplicaHost,
    StateChecker,
    StateMachine,
)
from raftmq.replication.quiescence import Quiescence
from raftmq.replication.repair import Repairer
from raftmq.replication.seals import Seal, Seals
from raftmq.types import (
    LeaderEpoch,
    NodeId,
    Offset,
    RaftGroupId,
    RaftIndex,
    ReplicaId,
)

CLOSE_BYTES: Final = 4 << 20
"""A follower with no more than this to flush can take over at once."""
DISK_FULL: Final = "disk full"
"""How the failure of a replica begins that stopped for want of space: with space it goes on."""


def _answer_to_stray(self_id: ReplicaId, message: PeerMessage) -> WrongReplica | None:
    """The answer to a message that names another storage of this node, which is not stepped."""
    is_leaders = isinstance(message, AppendRequest | Heartbeat | InstallLogStart)
    if message.to.node_id != self_id.node_id or not is_leaders:
        return None
    return WrongReplica(message.term, self_id, message.sender)


class Replica:
    """One copy of one Raft group. `replication/opening.py` opens it."""

    def __init__(
        self,
        group: RaftGroupId,
        self_id: ReplicaId,
        log: ReplicatedLog,
        journal: HardStateJournal,
        *,
        machine: StateMachine,
        host: ReplicaHost,
        clock: Clock,
        random: Random,
        config: ReplicaConfig,
        catch_up: CatchUp,
        buggify: Buggify = never,
    ) -> None:
        """Continue the group where log and journal ended."""
        self.group = group
        self.self_id = self_id
        self.log = log
        self.machine = machine
        self.config = config
        self.failure: str | None = None
        self.place = JournalPlace(journal, group, self_id.storage_id)
        self._host = host
        self.on_broken_invariant: ReportBroken = host.on_broken_invariant  # for `reports_bugs`
        self.send: Callable[[PeerMessage], None] = partial(host.send, group)
        """Send to another replica of this group."""
        self.touch: Callable[[], None] = partial(host.touch, group)
        """Ask to be drained: something is to be done, and a quiescent group has to hear of it."""
        self._clock = clock
        self._random = random
        self._buggify = buggify
        self._outbox = Outbox()
        self._in_sync = InSyncTracker(config.replica_lag_time_max_ms)
        self._retention_clock = RetentionClock()
        self._installing = Installing(machine, catch_up, self._log_start_read)
        self._membership = MembershipChanges()
        self._barriers = ReadBarriers()
        self._moves = LogStartMoves(log, machine, clock)
        self._seals = Seals(log)
        self.quiescence = Quiescence(config, self.send)
        self._source = LogSource(
            group, log, self._look_for_damage, self._read_failed, self.touch, catch_up
        )
        self._prewritten_end = RaftIndex(0)
        self._disk_full_until_ms = 0.0
        self._ticks = 0

        commit = min(RaftIndex(self.place.state.commit_end), log.flushed_end)
        self._commit_end = max(commit, log.log_start.index)
        self._known_commit_end = self._commit_end  # of the core; on a follower it may be ahead
        self.high_watermark = log.offset_of(self._commit_end)
        self.has_progressed = False  # a flushed end, here or elsewhere, or the log start moved
        self._has_started = False
        if isinstance(machine, LogReader):
            machine.attach_log(log)
        machine.restore(log.log_start)
        self.core = self._new_core()
        self._repairer = Repairer(
            log,
            self.core,
            machine,
            workers=catch_up,
            bytes_max=config.repair_bytes_max,
            send=self.send,
            fail=self.fail,
            touch=self.touch,
            lift_cut_floor=lambda: self.set_cut_floor(RaftIndex(0)),
        )

    # ---- inputs ----

    def keep_claims(self, floor_before: RaftIndex) -> None:
        """After opening: keep promises made for bytes that recovery cut off or found damaged.

        Args:
            floor_before: the cut floor that an earlier opening set and nothing lifted since.
        """
        recovery = self.log.recovery
        floor = max(recovery.cut_claimed_end, floor_before)
        if not floor_before and not recovery.dropped_bare_entries:
            # A batch is written only after its epoch's election entry is durable, and no such entry
            # was lost: the batches that were cut are of the last epoch that is left, or earlier.
            self.core.claimed_term_floor = self.core.epochs.last_term
        self.set_cut_floor(floor)
        self._repairer.set_cut_floor(floor)

    def set_cut_floor(self, floor: RaftIndex) -> None:
        """Write durably that no vote goes to logs that end below `floor`; 0 lifts that."""
        if floor == self.place.state.cut_floor:
            return
        try:
            self.place.put(attrs.evolve(self.place.state, cut_floor=floor))
        except JournalFailedError as error:
            self._journal_failed(error)

    @reports_bugs
    def append(self, batch: bytearray | memoryview, header: BatchHeader) -> Offset:
        """Stamp, write and propose a checked batch; returns its base offset. It may be lost until
        the high watermark covers it.

        Raises:
            NotLeaderError: another replica leads, or none.
            StorageError: the disk refused; nothing was appended.
            KafkaError: UNKNOWN_TOPIC_OR_PARTITION, behind a seal.
        """
        self._check_may_propose()
        if self._seals.is_closed:
            raise KafkaError("it is sealed", code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
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
        self.touch()
        return base_offset

    @reports_bugs
    def move_log_start(self, target: Offset) -> Entry:
        """Propose to drop everything below `target`; each replica does so once it is committed.

        Raises:
            NotLeaderError: another replica leads, or this one cannot tell its high watermark yet.
        """
        self._check_may_propose()
        if not self.is_writable:
            raise NotLeaderError("the new leader has not committed in its term yet")
        assert target <= self.high_watermark, "only committed records may be dropped"
        entry = self.core.propose(encode_proposal(target), 1, EntryKind.LOG_START)
        self.touch()
        return entry

    @reports_bugs
    def seal(self, seal: Seal) -> Entry:
        """Propose that no record follows, or that records may follow again. It is in force for
        every append after this call, as long as this log has it.

        Raises:
            NotLeaderError: another replica leads, or none.
        """
        self._check_may_propose()
        newest = self._seals.newest
        assert newest is None or seal.version > newest.version, "an older order than the last"
        entry = self.core.propose(seal.encode(), 1, EntryKind.SEAL)
        self.touch()
        return entry

    @reports_bugs
    def change_membership(self, configuration: Configuration) -> Entry:
        """Propose a configuration that differs by one replica.

        Raises:
            KafkaError: not the leader, or another change is under way.
        """
        self._check_may_propose()
        entry = self.core.propose_membership(configuration)
        self.touch()
        return entry

    def stand_last(self, is_last: bool, /) -> None:
        """In elections, wait for others, which would serve sooner."""
        self.core.stands_last = is_last

    @reports_bugs
    def transfer_leadership(self, node_id: NodeId) -> bool:
        """Hand leadership to a voter's node; False when this replica cannot."""
        if not self.is_leader:
            return False
        for voter in self.voters:
            if voter.node_id == node_id and voter != self.self_id:
                try:
                    self.core.transfer_leadership(voter)
                except KafkaError:
                    return False  # it is damaged there, for example
                self.touch()
                return True
        return False

    @reports_bugs
    def read_barrier(self) -> Promise[RaftIndex]:
        """Promise the committed end at a moment after this call, confirmed by a quorum
        (linearizable, Raft §8); fails with NotLeaderError when leadership is lost."""
        if not self.is_leader:
            return Promise.failed(NotLeaderError())
        promise = self._barriers.add()
        self.touch()
        return promise

    def step(self, message: PeerMessage) -> None:
        """Take a message of another replica.

        Raises:
            RemoteProtocolError: it carries what no correct replica sends.
        """
        if self.failure is not None:
            return
        if message.to != self.self_id:
            if (notice := _answer_to_stray(self.self_id, message)) is not None:
                self.send(notice)
            return
        if self._prewritten_end:
            self.drain()  # what was appended belongs to the term before this message
        self.core.clock_ms = self._clock.wall_ms()
        match message:
            case AppendRequest():
                if self._may_take(message):
                    self.core.step(message)
            case InstallLogStart():
                log_start = check_install(message, self.machine)
                if self._installing.may_step(message, self.core.term, self._commit_end):
                    self.core.step(message)
                self._moves.told(log_start, self._commit_end)
            case AppendReply() | HeartbeatReply():
                self.core.step(message)
                self._observe(message.sender)
                self.has_progressed = True
            case WrongReplica():
                if message.term == self.core.term:
                    self.peer_identity(message.sender)
            case RepairRequest():
                self._repairer.answer(message)
            case RepairReply():
                self._repairer.take(message, self._commit_end)
            case TailRequest():
                self._repairer.answer_tail(message)
            case TailReply():
                self._repairer.take_tail(message)
            case Quiesce():
                self.quiescence.on_quiesce(self.core, message, is_settled=self.is_settled)
            case Unquiesce():
                pass  # its arrival has unquiesced the group
            case _:
                self.core.step(message)

    def tick(self) -> bool:
        """One tick of abstract time passed; True when a `drain` is due."""
        if self.failure is not None:
            return False
        self.core.monotonic_ms = self._clock.monotonic_ms()
        self.core.tick()
        self._ticks += 1
        if self._ticks % self.config.election_ticks:
            if self._moves.is_due:
                self._fulfil_moves()
            return self.core.wants_ready or self.has_progressed
        self._maintain()
        return True

    def peer_identity(self, peer: ReplicaId) -> None:
        """A node was heard to run this group under this storage id."""
        if peer.node_id != self.self_id.node_id:
            self._membership.heard(peer)
            self._in_sync.forget_former(peer)

    def peer_lost(self, node_id: NodeId) -> None:
        """A node's connections closed: if it led, do not wait for the election timeout."""
        leader = self.leader
        if leader is not None and leader.node_id == node_id and not self.is_leader:
            self.core.campaign()

    def stand(self) -> None:
        """Stand for election now, as the preferred leader of a new group does."""
        if self.failure is None and self.leader is None:
            self.core.stand()
            self.touch()

    # ---- heartbeats that change nothing ----
    #
    # A thousand groups with three replicas exchange some fifty thousand heartbeats and replies a
    # second on each node. A round of effects for each would fill a core, delay the next ones and
    # end in elections that no replica wins. So one that brings nothing new is noted and answered at
    # once; one that would move the commit, change a role or cause a message is stepped.

    def take_beat(self, message: Heartbeat | HeartbeatReply) -> HeartbeatReply | bool:
        """Take a heartbeat or a reply to one, if it changes nothing.

        Returns:
            The reply to send; True when there is none; False when the message must be stepped.
        """
        if self.failure is not None or self._prewritten_end or self._barriers.waiting:
            return False
        if isinstance(message, Heartbeat):
            self.core.clock_ms = self._clock.wall_ms()
            return self.core.answer(message) or False
        if not self.core.takes_quietly(message):
            return False
        self._observe(message.sender)
        return True

    def _observe(self, sender: ReplicaId) -> None:
        if self.core.role is Role.LEADER:
            end, now_ms = self.log.end_index, self._clock.monotonic_ms()
            self._in_sync.observe(sender, self.flushed_end_of(sender), end, now_ms)

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
            # Batches staged behind a bare entry do not fit. The log cut them off, as if it had
            # crashed before they were written.
            self._rebuild_core()
        except DiskError as error:
            self.fail(f"write after flush failed: {error}")
            return
        else:
            self._announce()
        self.has_progressed = True

    def flush_failed(self, error: DiskError) -> None:
        """`job` failed. An fsync is never retried: the bytes that it covered may be gone."""
        self.fail(f"flush failed: {error}")

    def fail(self, reason: str) -> None:
        """Stop for good: send nothing, promise nothing, count nothing."""
        if self.failure is not None:
            return
        self.failure = reason
        self._outbox.clear()
        self._source.forget_stored()
        self._repairer.stop()
        self._barriers.fail(StorageError(reason))
        self.machine.role_changed(SoftState(Role.FOLLOWER, self.core.term, None))
        if self.quiescence.is_quiescent:
            self.touch()  # the other members must not stay quiescent because of it

    def retire(self) -> None:
        """Let go of the objects that refer to this replica, once it failed and was unregistered.

        A ring of objects would stay until a full collection, which never looks at objects that an
        earlier one froze. A replica that is still held somewhere shows its failure, log and core.
        """
        assert self.failure is not None, "this replica may still be called"
        self.core.retire()
        self._moves.retire()
        del self._source, self._repairer, self._installing, self.machine

    # ---- effects ----

    def drain(self) -> None:
        """Perform everything that the core decided, then send promises that are durable by now."""
        if not self._has_started:
            self._start()
        self._perform_all()
        is_due = self.failure is None and self.log.flushed_end > self.core.flushed_end
        if is_due and not self.waits_for_journal:
            # A group of one sends no vote that could be held back: its vote must be durable before
            # its own flush counts, as if it were another replica's.
            self.core.advance(self.log.flushed_end)
            self._perform_all()
        if self.failure is not None:
            return
        if self._outbox.held:
            ends = self.place.flushed_sequence, self.log.flushed_end, self.core.term
            for message in self._outbox.release(*ends):
                self.send(message)
        if self._barriers.waiting:
            self._barriers.begin(self.core)
            self._perform_all()
            self._barriers.settle(self.core)
        if self.has_progressed:
            self.has_progressed = False
            if self.log.flushed_end > self.place.state.flushed_end:
                self._claim()  # lazy in any case, so after the messages that others wait for
            self.machine.progressed()

    def _perform_all(self) -> None:
        while self.failure is None and (ready := self.core.ready()) is not None:
            self._perform(ready)

    def _start(self) -> None:
        """Tell the state machine, which is attached by now, what was committed before."""
        self._has_started = True
        self._repairer.look()  # the state machine may have met damage that recovery did not read
        self.machine.committed(self.high_watermark, self._commit_end)
        self._fulfil_moves()

    def _perform(self, ready: Ready) -> None:
        try:
            if ready.hard_state is not None:
                self.place.put_hard_state(ready.hard_state)
            if ready.install is not None:
                self._install(ready.install)
            if ready.truncate_end is not None:
                self._truncate(ready.truncate_end)
            for entry in ready.append:
                self._write(entry)
            if ready.append:
                self._prewritten_end = RaftIndex(0)
        except JournalFailedError as error:
            self._journal_failed(error)
            return
        except DiskFullError as error:
            if self.core.role is Role.LEADER:
                # Only a bare entry beyond the reserve fails so; the core counts on it already.
                self.fail(f"{DISK_FULL}: {error}")
            else:
                self._disk_full_until_ms = (
                    self._clock.monotonic_ms() + self.config.disk_full_backoff_ms
                )
                self._rebuild_core()
            return
        except DiskError as error:
            self.fail(f"write failed: {error}")
            return
        for message in ready.send_now:
            self.send(message)
        for message in ready.send_after_flush:
            self._outbox.hold(message, self.place.sequence, self.log.end_index)
        if ready.soft_state is not None:
            self._role_changed(ready.soft_state)
        if ready.commit_end is not None:
            self._known_commit_end = ready.commit_end
            self._announce()

    def _write(self, entry: Entry) -> None:
        if entry.end <= self._prewritten_end:
            return  # written by append(), before it was proposed
        epoch = LeaderEpoch(entry.term)
        if entry.kind is EntryKind.BATCH:
            self.log.append_batch(entry.payload)
        else:
            self.log.append_bare(entry.start, epoch, int(entry.kind), bytes(entry.payload))
            if entry.kind is EntryKind.LOG_START:
                self._moves.note(entry.end, entry.payload)
            elif entry.kind is EntryKind.SEAL:
                self._seals.note(entry.end, entry.payload)
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
        self.place.lower_claim(end)
        self.log.truncate_to(end)
        self._outbox.cap(end)
        self._prewritten_end = min(self._prewritten_end, end)
        self._moves.truncate_to(end)
        self._seals.look()
        self.machine.truncated(end)

    def _install(self, install: InstallLogStart) -> None:
        log_start = LogStart.decode(install.payload)
        assert log_start.index == install.log_start, "a log start that is not where it says"
        self.place.lower_claim(log_start.index)
        self.log.reset_to(log_start)
        self._outbox.cap(log_start.index)
        self._prewritten_end = RaftIndex(0)
        self._moves.clear()
        self._seals.look()
        self.machine.restore(log_start)

    def _announce(self) -> None:
        """Tell what is committed: on a follower only what is written here. What is staged behind an
        election's entry or an old segment may find the disk full; the state machine, which cannot
        go back, must not have used it by then. A leader shows all that it knows of: it serves
        once its own entry is committed, which is told here."""
        end = self._known_commit_end
        if self.core.role is not Role.LEADER:
            end = min(end, self.log.written_end)
        self._committed(end)

    def _committed(self, commit_end: RaftIndex) -> None:
        if commit_end <= self._commit_end:
            return  # a core that was rebuilt commits again what was committed before
        self._commit_end = commit_end
        high_watermark = self.log.offset_of(commit_end)
        assert high_watermark >= self.high_watermark, "the high watermark never falls"
        self.high_watermark = high_watermark
        self.machine.committed(high_watermark, commit_end)
        if self._moves.proposals:
            self._fulfil_moves()

    def _fulfil_moves(self) -> None:
        try:
            is_moved = self._moves.fulfil(self.core, self._commit_end, self.high_watermark)
        except DiskError as error:
            self.fail(f"moving the log start failed: {error}")
            return
        if is_moved:
            self.has_progressed = True

    def _role_changed(self, soft: SoftState) -> None:
        if soft.role is not Role.LEADER:
            self._prewritten_end = RaftIndex(0)
            self._barriers.fail(NotLeaderError())
        self._in_sync.reset()
        self._source.forget_stored()
        self._repairer.look()
        self.machine.role_changed(soft)

    def _claim(self) -> None:
        try:
            self.place.claim(self.log.flushed_end, self._commit_end)
        except JournalFailedError as error:
            self._journal_failed(error)

    def _journal_failed(self, error: DiskError) -> None:
        self.fail(str(error))
        self._host.journal_failed(error)

    # ---- the core ----

    def _new_core(self) -> RaftCore:
        return self._source.new_core(
            self.config.raft(self.self_id),
            self.place.hard_state,
            self._commit_end,
            self._random,
            self._buggify,
        )

    def _rebuild_core(self) -> None:
        """Begin again from disk, as after a crash: the core took entries that the log could not."""
        if self.log.end_index < self._commit_end:
            # Entries that were staged while it led: the state machine has used them, so it must
            # begin again as well.
            self.fail(f"{DISK_FULL}: committed entries could not be written here")
            return
        before = self.core
        self._known_commit_end = self._commit_end
        self.core = self._repairer.core = self._new_core()
        self.core.suspended = before.suspended
        self.core.claimed_end_floor = before.claimed_end_floor
        self.core.claimed_term_floor = before.claimed_term_floor
        self._prewritten_end = RaftIndex(0)
        self._outbox.clear()  # the promises may rest on entries that were lost
        self._moves.truncate_to(self.log.end_index)
        self._seals.look()
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
        if self.core.transferee is not None:
            raise NotLeaderError("leadership is being handed over")

    def _may_take(self, request: AppendRequest) -> bool:
        """Check a request before anything is written; False: drop it, the leader sends it again."""
        if not request.entries:
            return True
        if self._clock.monotonic_ms() < self._disk_full_until_ms:
            return False
        if self.core.effects.install is not None:
            return False  # the log is about to begin anew
        base_offsets = check_append(request)
        epochs = self.core.epochs
        if base_offsets and (
            request.prev_end < epochs.log_start
            or epochs.matches(request.prev_end, request.prev_term)
        ):
            check_place(request, base_offsets, self.log, self.core.effects)
        return True

    def _log_start_read(self, install: InstallLogStart, log_start: LogStart) -> None:
        """A worker decoded a leader's log start: give the core its message, as it came."""
        if self.failure is not None:
            return
        try:
            if isinstance(self.machine, StateChecker):
                self.machine.check_state(log_start)
            self.core.step(install)
        except (RemoteProtocolError, StateError):
            return  # this replica could not begin with that state: its log stays
        self.touch()

    # ---- maintenance ----

    def _maintain(self) -> None:
        self._claim()
        self._repairer.tick()
        self._fulfil_moves()
        try:
            self._moves.reserve()
        except DiskError as error:
            self.fail(f"keeping room for the log start failed: {error}")
        if self.is_writable:
            self._in_sync.keep(self.configuration.members)
            self._membership.step(self.core, self._commit_end, self.has_all_of)
            for reminder in self._moves.reminders(self.core):
                self.send(reminder)
        if self.config.quiesce_after_ticks:
            self._look_at_quiescence()

    def _look_at_quiescence(self) -> None:
        core, quiescence = self.core, self.quiescence
        quiescence.call(core)
        if not quiescence.is_idle(core, self.config.election_ticks):
            return
        if (
            self.is_writable
            and self.is_settled
            and core.transferee is None
            and not self.is_membership_pending
        ):
            quiescence.begin(core)

    def _retention_ms(self) -> int | None:
        """What time it is for retention; None on any but a leader that can commit."""
        if not self.is_writable:
            return None
        return self._retention_clock.now_ms(self.core, self._clock)

    def append_time_ms(self) -> int:
        """LogAppendTime of a record appended now: this leader's clock, unless it is behind the time
        by which retention will judge the record."""
        wall_ms, now_ms = self._clock.wall_ms(), self._retention_ms()
        return wall_ms if now_ms is None else max(wall_ms, now_ms)

    def voters_clocks_ms(self) -> list[int]:
        """The wall clocks of the voters that this leader hears, its own first."""
        if self.quiescence.is_quiescent:
            self.touch()  # the clocks of a quiescent group stand still: hear them
        return [self._clock.wall_ms(), *(clock_ms for _, clock_ms in heard_clocks(self.core))]

    @reports_bugs
    def retain(self, below: Offset) -> Entry | None:
        """Propose the log start that retention asks for, never above `below`; None for none.

        Raises:
            KafkaError: leadership was lost.
        """
        now_ms = self._retention_ms()
        if now_ms is None:
            return None
        limit = min(below, self.high_watermark)
        if self.quiescence.is_quiescent and self.log.retention_target(self._clock.wall_ms(), limit):
            self.touch()  # the clocks of a quiescent group stand still: hear them
        target = self.log.retention_target(now_ms, limit)
        if target is None or target <= self.log_start_offset or self._moves.proposals:
            return None
        return self.move_log_start(target)

    @reports_bugs
    def scrub(self, bytes_max: int) -> None:
        """Check some more stored batches, going on where the last call stopped."""
        if self.failure is not None:
            return
        try:
            found = self.log.scrub(bytes_max)
        except DiskError as error:
            self.fail(f"scrub failed: {error}")
            return
        if found:
            self.damage_found()

    def _look_for_damage(self) -> None:
        self._repairer.look()

    def _read_failed(self, error: DiskError) -> None:
        self.fail(f"read failed: {error}")

    def damage_found(self) -> None:
        """The log learned of damage: suspend, and have it repaired even in quiescence."""
        self._repairer.look()
        self.touch()

    # ---- what may be read at any time, without effect ----
    #
    # Positions of the log are offsets here, terms are leader epochs. What only a leader can know
    # is empty or unknown on other replicas.

    @property
    def lacks_space(self) -> bool:
        """True when it stopped because the disk was full: once opened again, it goes on."""
        return self.failure is not None and self.failure.startswith(DISK_FULL)

    @property
    def is_leader(self) -> bool:
        """True while this replica believes that it leads."""
        return self.failure is None and self.core.role is Role.LEADER

    @property
    def is_candidate(self) -> bool:
        """True while this replica asks for votes (not for pre-votes)."""
        return self.failure is None and self.core.role is Role.CANDIDATE

    @property
    def is_writable(self) -> bool:
        """True for a leader whose own term has a committed entry: its high watermark is known."""
        return self.is_leader and self.core.has_committed_own_term

    @property
    def is_handing_over(self) -> bool:
        """True while leadership is being transferred: nothing can be proposed meanwhile."""
        return self.core.transferee is not None

    @property
    def leader(self) -> ReplicaId | None:
        """The leader of the current term, as far as known here."""
        return None if self.failure is not None else self.core.leader

    @property
    def leader_epoch(self) -> LeaderEpoch:
        """The current term, as Kafka's clients see it."""
        return LeaderEpoch(self.core.term)

    @property
    def log_end_offset(self) -> Offset:
        """The next offset to assign."""
        return self.log.log_end_offset

    @property
    def log_start_offset(self) -> Offset:
        """The first offset that readers may ask for."""
        return max(self.log.log_start_offset, self._moves.owed)

    @property
    def commit_end(self) -> RaftIndex:
        """Everything below is committed, as far as known here."""
        return self._commit_end

    @property
    def newest_seal(self) -> Seal | None:
        """The newest seal of this log, or the newest end of one; committed or not."""
        return self._seals.newest

    @property
    def is_seal_committed(self) -> bool:
        """True when the newest of them is committed."""
        return self._seals.newest is not None and self._seals.end <= self._commit_end

    @property
    def configuration(self) -> Configuration:
        """The members of this group, by the newest configuration in this log."""
        return self.core.configuration

    @property
    def voters(self) -> tuple[ReplicaId, ...]:
        """The members that count in the quorum."""
        return self.core.configuration.voters

    @property
    def committed_configuration(self) -> Configuration:
        """That of the last change that is committed: what a later leader cannot take back."""
        return self.core.configurations.committed(self._commit_end)[1]

    @property
    def learners(self) -> tuple[ReplicaId, ...]:
        """The members that only copy."""
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
        if self.quiescence.is_quiescent:
            # Quiescence began with all caught up but the absent, and ends when one is silent.
            return tuple(voter for voter in self.voters if voter not in self.quiescence.absent)
        now_ms = self._clock.monotonic_ms()
        lag_ms = self.config.replica_lag_time_max_ms
        return tuple(
            voter
            for voter in self.voters
            if voter == self.self_id or self._in_sync.is_in_sync(voter, now_ms, lag_ms)
        )

    def catching_up(self) -> list[ReplicaId]:
        """Replicas that answer and lack committed entries; only a leader knows."""
        if not self.is_leader or self.quiescence.is_quiescent:
            return []
        core = self.core
        in_sync = self.in_sync_replicas()
        found = []
        for replica in self.configuration.members:
            progress = core.progress.get(replica)
            if progress is None or replica == self.self_id or replica in in_sync:
                continue
            is_heard = core.now - progress.last_heard_tick <= self.config.election_ticks
            if is_heard and progress.match_end < core.commit_end:
                found.append(replica)
        return found

    def bytes_behind(self, follower: ReplicaId) -> int:
        """Roughly how many bytes of this log another replica is not known to have."""
        offset = self.follower_end_offset(follower)
        return self.log.bytes_from(self.log.log_start_offset if offset is None else offset)

    def is_close_behind(self, node_id: NodeId) -> bool:
        """True for a voter that was sent everything and has little left to flush: it could take
        over at once. Only a leader knows. Nothing can be proposed during a transfer."""
        for voter, progress in self.core.progress.items():
            if voter.node_id == node_id and voter in self.voters:
                return (
                    progress.state is ProgressState.REPLICATE
                    and progress.next_end == self.core.log_end
                    and progress.inflight_bytes <= CLOSE_BYTES
                )
        return False

    def flushed_voters(self, end: RaftIndex) -> int:
        """How many voters are known to have flushed all below `end`; only a leader knows."""
        return sum(1 for voter in self.voters if self.flushed_end_of(voter) >= end)

    def flushed_end_of(self, replica: ReplicaId) -> RaftIndex:
        """The end up to which a replica is known to have flushed; of others only a leader knows."""
        if replica == self.self_id:
            return self.log.flushed_end
        progress = self.core.progress.get(replica)
        return RaftIndex(0) if progress is None else progress.match_end

    @property
    def is_settled(self) -> bool:
        """True when the whole log is committed, flushed and carried out, and nothing waits."""
        core = self.core
        return (
            core.log_end == core.commit_end == core.flushed_end == self._commit_end
            and not (core.suspended or core.claimed_end_floor)
            and not (len(self._outbox) or len(self._barriers) or self._moves.proposals)
            and self.place.is_durable
        )

    @property
    def waits_for_journal(self) -> bool:
        """True when promises wait for a flush of the journal."""
        return not self.place.is_durable

    def has_all_of(self, follower: ReplicaId, lag_ms_max: float) -> bool:
        """True when a follower or learner had everything within that time."""
        return self._in_sync.is_in_sync(follower, self._clock.monotonic_ms(), lag_ms_max)

    def lag_ms_of(self, follower: ReplicaId) -> float | None:
        """For how long it has not had everything; None: it never had, under this leader."""
        return self._in_sync.lag_ms(follower, self._clock.monotonic_ms())

    def follow_target_membership(self, target: Callable[[], TargetMembership | None]) -> None:
        """While this replica leads, change members towards what `target()` returns."""
        self._membership.target = target

    @property
    def is_membership_pending(self) -> bool:
        """True on a leader whose group has not reached its target membership."""
        return self.is_leader and self._membership.is_pending

    def unquiesce(self, silent: NodeId | None) -> None:
        """End the group's quiescence here; `silent` is the node whose silence was the reason."""
        now_ms = self._clock.monotonic_ms()
        for follower in self.quiescence.end(self.core, silent):
            self._in_sync.vouch(follower, now_ms)

    def damaged(self) -> Sequence[tuple[Offset, Offset]]:
        """Offset ranges whose bytes are damaged here and not served."""
        return self.log.damaged
