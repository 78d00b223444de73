"""Repair of what recovery or the scrub found: damaged ranges, and tails that were cut.

Damage. Batches at the same position with the same leader epoch are the same bytes on every replica
(Log Matching, Raft §5.3), so any peer's verified copy repairs ours, committed or not. Until then a
follower is suspended: it keeps its log's end, does not campaign and acknowledges nothing.

A cut tail. Recovery cut a whole-looking but broken batch beyond the recorded flushed end. It was
almost certainly never flushed; if it was, the leader may have counted it. So the replica refuses
its vote to logs that may lack it (those that end below the cut, its floor, or end in an earlier
term) until it agrees with a leader's log again. What was committed by its promise is held by some
other voter, too: once all of them said where their logs end, a log as up to date as the best of
those that are longer than its own is good enough; if none is longer, it has nothing to wait for.

Ranges are read for peers, gathered, copied and synced by workers and in files, never in memory or
on the loop: one may be a whole segment. Damage at every replica, in different places, is repaired
too: a damaged replica answers with what it holds, and none has to lead for that.

Invariants: nothing is installed unchecked; at most one request for damage is under way.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Final

from raftmq.errors import CorruptBatchError, StorageError
from raftmq.log.log_start import LogStart
from raftmq.log.model import DamagedError
from raftmq.log.repair import Fill, RepairJob
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.log.segment import cut_filler, is_filler
from raftmq.log.verification import StoredJob
from raftmq.ports import DiskError, DiskFullError
from raftmq.raft.core import RaftCore
from raftmq.raft.messages import Role
from raftmq.records import parse_header
from raftmq.replication.append_checks import read_log_start
from raftmq.replication.catch_up import CatchUp
from raftmq.replication.messages import (
    PeerMessage,
    RepairReply,
    RepairRequest,
    TailReply,
    TailRequest,
)
from raftmq.replication.ports import UncheckedReader
from raftmq.types import Offset, RaftIndex, ReplicaId, Term

ANSWERS_MAX: Final = 4
"""Ranges read for peers at once, per replica: each takes a megabyte of memory until it is sent."""


class Repairer:
    """The part of a replica that repairs its log.

    Attributes:
        core: the replica's; exchanged when that begins again from disk.
    """

    def __init__(
        self,
        log: ReplicatedLog,
        core: RaftCore,
        machine: object,
        *,
        workers: CatchUp,
        bytes_max: int,
        send: Callable[[PeerMessage], None],
        fail: Callable[[str], None],
        touch: Callable[[], None],
        lift_cut_floor: Callable[[], None],
    ) -> None:
        """Take a log, whose damage `look` will find.

        Args:
            machine: judges whether it could begin with a log start of a peer, and is told of
                what it may have read wrong.
            bytes_max: how much of a range one answer may hold.
            send: sends to another replica of the group.
            fail: stops the replica, for this reason.
            touch: called when damage was repaired, which lets the replica go on.
            lift_cut_floor: forgets durably that recovery cut a tail.
        """
        self.core = core
        self._log = log
        self._machine = machine
        self._workers = workers
        self._bytes_max = bytes_max
        self._send = send
        self._fail = fail
        self._touch = touch
        self._lift_cut_floor = lift_cut_floor
        self._is_over = False
        self._asked = 0
        self._answering = 0
        self._fill: Fill | None = None
        self._job: RepairJob | None = None
        self._cut_floor = RaftIndex(0)
        self._tails: dict[ReplicaId, tuple[Term, RaftIndex]] = {}
        self._best_tail: tuple[Term, RaftIndex] | None = None  # once all other voters answered

    def stop(self) -> None:
        """The replica stopped: results of workers are dropped from now on."""
        self._is_over = True

    @property
    def _others(self) -> list[ReplicaId]:
        core = self.core
        return [voter for voter in core.configuration.voters if voter != core.self_id]

    # ---- damage ----

    def look(self) -> None:
        """Damage may have been found or repaired: suspend or resume."""
        core, is_damaged = self.core, bool(self._log.damaged)
        # A leader goes on: what it commits from now on does not depend on the damaged range.
        core.suspended = is_damaged and core.role is not Role.LEADER
        claimed_end = self._log.recovery.claimed_end if is_damaged else RaftIndex(0)
        floor = self._cut_floor
        if self._best_tail is not None:
            core.claimed_term_floor, floor = self._best_tail
        core.claimed_end_floor = max(floor, claimed_end)

    def tick(self) -> None:
        """Ask peers for what is missing; called about once per election timeout."""
        self.look()
        if self._log.damaged:
            self._ask()
        if self._cut_floor and self.core.is_claim_restored:
            self._lift()  # this log holds again whatever the replica may have promised
        if self._cut_floor:
            self._ask_tails()

    def _ask(self) -> None:
        if self._job is not None:
            return  # one range after the other
        core, peers = self.core, self._others
        if not peers:
            return
        start, end = self._log.damaged[0]
        fill = self._fill
        if fill is None or (fill.start, fill.end) != (start, end):
            self._drop_fill()
            fill = self._fill = self._log.begin_repair(start)
        to = peers[self._asked % len(peers)]
        self._asked += 1
        self._send(RepairRequest(core.term, core.self_id, to, Offset(fill.next_offset), end))

    def _drop_fill(self) -> None:
        if self._fill is not None:
            self._fill.drop()
            self._fill = None

    def answer(self, request: RepairRequest) -> None:
        """Send a peer those batches of a range that this replica holds, verified."""
        core, log = self.core, self._log
        # The batch that the log start lies within is whole: its first records alone are dropped.
        if request.start < log.log_start.base_offset:
            start = log.log_start.encode()
            self._send(
                RepairReply(core.term, core.self_id, request.sender, request.start, (), start)
            )
            return
        if request.start >= log.log_end_offset or self._answering >= ANSWERS_MAX:
            return
        try:
            job = log.stored_job_at(request.start, self._bytes_max)
        except DamagedError:
            self.look()
            return
        except (DiskError, StorageError):
            return  # another peer will be asked
        if job is None:
            return
        job.end_offset = min(job.end_offset, request.end)
        self._answering += 1
        self._workers.run(job, lambda error: self._answer_read(request, job, error))

    def _answer_read(self, request: RepairRequest, job: StoredJob, error: DiskError | None) -> None:
        self._answering -= 1
        if error is not None or self._is_over:
            return  # another peer will be asked
        try:
            found = self._log.checked(job)
        except DiskError as failure:
            self._fail(f"damage could not be noted: {failure}")
            return
        if found:
            self.look()
        if not job.batches:
            return
        span = job.span
        try:
            data = memoryview(span.file.pread(span.size, span.position))
        except DiskError:
            return
        ends = list(accumulate(size for *_, size in job.batches))
        batches = tuple(data[a:b] for a, b in pairwise([0, *ends]))
        core = self.core
        self._send(RepairReply(core.term, core.self_id, request.sender, request.start, batches))

    def take(self, reply: RepairReply, commit_end: RaftIndex) -> None:
        """Check a peer's batches; once the whole range is there, repair it durably."""
        fill = self._fill
        if fill is None or self._job is not None:
            return
        if (fill.start, fill.end) not in self._log.damaged:
            self._drop_fill()
            return
        if len(reply.log_start):
            self._adopt(read_log_start(reply.log_start, self._machine), commit_end)
            return
        before = fill.next_offset
        try:
            for batch in reply.batches:
                header = parse_header(batch)
                if header.next_offset <= fill.next_offset:
                    continue
                if header.base_offset >= fill.end:
                    break
                if is_filler(header):
                    batch = cut_filler(batch, header, fill.next_offset, fill.end)
                fill.add(batch)
        except CorruptBatchError:
            return  # another history than ours: Raft will truncate it, or the peer's
        except DiskFullError:
            return  # asked for again later
        except DiskError as error:
            self._fail(f"repair failed: {error}")
            return
        if fill.is_full:
            self._mend(fill)
        elif fill.next_offset > before:
            self._ask()

    def _mend(self, fill: Fill) -> None:
        try:
            job = self._log.filled_job(fill)
        except (DiskFullError, CorruptBatchError):
            self._drop_fill()  # begin again
            return
        except DiskError as error:
            self._fail(f"repair failed: {error}")
            return
        self._job = job
        self._workers.run_long(job, lambda error: self._mended(job, error))

    def _mended(self, job: RepairJob, error: DiskError | None) -> None:
        self._job = None
        self._fill = None
        if self._is_over:
            return
        try:
            if error is not None:
                raise error
            self._doubt(job.damage.start)
            self._log.repaired(job)
        except DiskFullError:
            return  # begin again
        except DiskError as failure:
            self._fail(f"repair failed: {failure}")
            return
        self.look()
        if self._log.damaged:
            self._ask()
        self._touch()

    def _adopt(self, log_start: LogStart, commit_end: RaftIndex) -> None:
        """A peer dropped the damaged range by a committed proposal: do so too, with its tuple.

        At a position of a committed log the tuple is the same on every replica, so this one would
        have made it itself, could it read the log up to there.
        """
        log, index = self._log, log_start.index
        if not log.log_start.index < index <= commit_end:
            return
        epoch = log.previous_epoch_at(index)
        if epoch != log_start.previous_epoch or log.offset_of(index) != log_start.base_offset:
            return
        try:
            self._doubt(log.damaged[0][0])
            log.move_start(log_start)
        except DiskFullError:
            return
        except DiskError as error:
            self._fail(f"moving the log start failed: {error}")
            return
        self.core.log_start_moved(index, Term(epoch))
        self.look()

    def _doubt(self, start: int) -> None:
        if isinstance(self._machine, UncheckedReader):
            self._machine.doubt(Offset(start))

    # ---- a cut tail ----

    def set_cut_floor(self, floor: RaftIndex) -> None:
        """Recovery cut a tail that claimed to end at `floor`."""
        self._cut_floor = floor
        self.look()

    def _ask_tails(self) -> None:
        core = self.core
        for voter in self._others:
            self._send(TailRequest(core.term, core.self_id, voter, self._cut_floor))

    def answer_tail(self, request: TailRequest) -> None:
        """Say where this replica's log ends."""
        core = self.core
        tail = request.floor, self._log.end_index, core.epochs.last_term
        self._send(TailReply(core.term, core.self_id, request.sender, *tail))

    def take_tail(self, reply: TailReply) -> None:
        """Note where the log of another voter ends."""
        if not self._cut_floor or reply.floor != self._cut_floor:
            return
        self._tails[reply.sender] = reply.last_term, reply.log_end
        tails = [self._tails.get(voter) for voter in self._others]
        known = [tail for tail in tails if tail is not None]
        if len(known) < len(tails):
            return
        longer = [tail for tail in known if tail[1] > self.core.log_end]
        if longer:
            self._best_tail = max(longer)
            self.look()
        else:
            self._lift()

    def _lift(self) -> None:
        self._cut_floor = RaftIndex(0)
        self._best_tail = None
        self._tails.clear()
        self._lift_cut_floor()
        self.look()
