"""Mending what recovery or the scrub found: damaged ranges, and tails that were cut.

Damage. Batches at the same position with the same leader epoch are the same bytes on every replica
(Log Matching, Raft §5.3), so any peer's verified copy repairs ours, committed or not. Until then a
follower is suspended: it keeps its log's end, does not campaign and acknowledges nothing.

A cut tail. Recovery cut a whole-looking but broken batch beyond the recorded flushed end. It was
almost certainly never flushed; if it was, someone may count on it. So the replica refuses its vote
to logs that may lack it (those that end below the cut, its floor, or end in an earlier term) until
it agrees with a leader's log again. What it promised and a majority may count on is held by some
other voter, too: once all of them said where their logs end, a log as up to date as the best of
those that are longer than its own is good enough; if none is, there is nothing to wait for.

Ranges are read for peers, gathered, copied and synced by workers and in files, never in memory or
on the loop: one may be a whole segment. Damage at every replica, in different places, heals too:
who is damaged answers for what it holds, and nobody has to lead for that.

Invariants: nothing is installed unchecked; at most one request for damage is under way.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Final, Protocol

from raftmq.errors import CorruptBatchError, StorageError
from raftmq.log.holes import cut_filler, is_filler
from raftmq.log.log_start import LogStart
from raftmq.log.model import DamagedError
from raftmq.log.repair import Fill, RepairJob
from raftmq.log.replicated_log import ReplicatedLog
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
from raftmq.types import Offset, RaftIndex, ReplicaId, Term

ANSWERS_MAX: Final = 4
"""Ranges read for peers at once, per replica: each has a megabyte of memory until it left."""


class RepairPorts(Protocol):
    """What a repair needs of its replica."""

    @property
    def core(self) -> RaftCore: ...
    @property
    def log(self) -> ReplicatedLog: ...
    @property
    def machine(self) -> object: ...
    @property
    def failure(self) -> str | None: ...
    @property
    def self_id(self) -> ReplicaId: ...
    @property
    def voters(self) -> tuple[ReplicaId, ...]: ...
    @property
    def commit_end(self) -> RaftIndex: ...
    def send(self, message: PeerMessage) -> None:
        """Send to another replica of the group."""
        ...

    def fail(self, reason: str) -> None:
        """Stop for good."""
        ...

    def touch(self) -> None:
        """Unquiesce the group."""
        ...

    def damage_found(self) -> None:
        """The log learned of damage."""
        ...

    def set_cut_floor(self, floor: RaftIndex) -> None:
        """Remember durably to which logs no vote goes; 0 lifts it."""
        ...


class Repairer:
    """The part of a replica that mends its log."""

    def __init__(self, replica: RepairPorts, bytes_max: int, port: CatchUp) -> None:
        self._replica = replica
        self._bytes_max = bytes_max
        self._port = port
        self._asked = 0
        self._answering = 0
        self._fill: Fill | None = None
        self._job: RepairJob | None = None
        self._cut_floor = RaftIndex(0)
        self._tails: dict[ReplicaId, tuple[Term, RaftIndex]] = {}
        self._best_tail: tuple[Term, RaftIndex] | None = None  # once all other voters answered

    # ---- damage ----

    def look(self) -> None:
        """Damage may have been found or mended: suspend or resume."""
        replica = self._replica
        is_damaged = bool(replica.log.damaged)
        core = replica.core
        # A leader goes on: what it commits from now on does not rest on the damaged range.
        core.suspended = is_damaged and core.role is not Role.LEADER
        claimed_end = replica.log.recovery.claimed_end if is_damaged else RaftIndex(0)
        floor = self._cut_floor
        if self._best_tail is not None:
            core.claimed_term_floor, floor = self._best_tail
        core.claimed_end_floor = max(floor, claimed_end)

    def scrub(self, bytes_max: int) -> None:
        """Check stored batches, going on where the last call stopped."""
        replica = self._replica
        if replica.failure is not None:
            return
        try:
            found = replica.log.scrub(bytes_max)
        except DiskError as error:
            replica.fail(f"scrub failed: {error}")
            return
        if found:
            replica.damage_found()

    def tick(self) -> None:
        """Ask for what is missing; called about once per election timeout."""
        self.look()
        if self._replica.log.damaged:
            self._ask()
        self.settle()
        if self._cut_floor:
            self._ask_tails()

    def _ask(self) -> None:
        replica = self._replica
        if self._job is not None:
            return  # one range after the other
        peers = [r for r in replica.voters if r != replica.self_id]
        if not peers:
            return
        start, end = replica.log.damaged[0]
        fill = self._fill
        if fill is None or (fill.start, fill.end) != (start, end):
            self._drop_fill()
            fill = self._fill = replica.log.begin_repair(start)
        to = peers[self._asked % len(peers)]
        self._asked += 1
        replica.send(
            RepairRequest(replica.core.term, replica.self_id, to, Offset(fill.next_offset), end)
        )

    def _drop_fill(self) -> None:
        if self._fill is not None:
            self._fill.drop()
            self._fill = None

    def answer(self, request: RepairRequest) -> None:
        """Send a peer what this replica holds, verified, of a range."""
        replica = self._replica
        log = replica.log
        # The batch that the log start lies within is whole: its first records alone are dropped.
        if request.start < log.log_start.base_offset:
            term, start = replica.core.term, request.start
            replica.send(
                RepairReply(
                    term, replica.self_id, request.sender, start, (), log.log_start.encode()
                )
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
        self._port.run(job, lambda error: self._answer_read(request, job, error))

    def _answer_read(self, request: RepairRequest, job: StoredJob, error: DiskError | None) -> None:
        self._answering -= 1
        replica = self._replica
        if error is not None or replica.failure is not None:
            return  # another peer will be asked
        try:
            found = replica.log.checked(job)
        except DiskError as failure:
            replica.fail(f"damage could not be noted: {failure}")
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
        replica.send(
            RepairReply(replica.core.term, replica.self_id, request.sender, request.start, batches)
        )

    def take(self, reply: RepairReply) -> None:
        """Check a peer's batches; once the whole range is there, repair it durably."""
        replica = self._replica
        fill = self._fill
        if fill is None or self._job is not None:
            return
        if (fill.start, fill.end) not in replica.log.damaged:
            self._drop_fill()
            return
        if len(reply.log_start):
            self._adopt(read_log_start(reply.log_start, replica.machine))
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
            replica.fail(f"repair failed: {error}")
            return
        if fill.is_full:
            self._mend(fill)
        elif fill.next_offset > before:
            self._ask()

    def _mend(self, fill: Fill) -> None:
        replica = self._replica
        try:
            job = replica.log.filled_job(fill)
        except (DiskFullError, CorruptBatchError):
            self._drop_fill()  # begin again
            return
        except DiskError as error:
            replica.fail(f"repair failed: {error}")
            return
        self._job = job
        self._port.run_long(job, lambda error: self._mended(job, error))

    def _mended(self, job: RepairJob, error: DiskError | None) -> None:
        replica = self._replica
        self._job = None
        self._fill = None
        if replica.failure is not None:
            return
        try:
            if error is not None:
                raise error
            replica.log.repaired(job)
        except DiskFullError:
            return  # begin again
        except DiskError as failure:
            replica.fail(f"repair failed: {failure}")
            return
        self.look()
        if replica.log.damaged:
            self._ask()
        replica.touch()

    def _adopt(self, log_start: LogStart) -> None:
        """A peer dropped the damaged range by a committed order: do so too, with its tuple.

        The same position of a committed log has the same tuple on every replica, so this is what
        this replica would have made itself, could it read what leads up to it.
        """
        replica = self._replica
        log = replica.log
        index = log_start.index
        if not log.log_start.index < index <= replica.commit_end:
            return
        epoch = log.previous_epoch_at(index)
        if epoch != log_start.previous_epoch or log.offset_of(index) != log_start.base_offset:
            return
        try:
            log.move_start(log_start)
        except DiskFullError:
            return
        except DiskError as error:
            replica.fail(f"moving the log start failed: {error}")
            return
        replica.core.log_start_moved(index, Term(epoch))
        self.look()

    # ---- a cut tail ----

    def set_cut_floor(self, floor: RaftIndex) -> None:
        """Recovery cut a tail that claimed to end at `floor`."""
        self._cut_floor = floor
        self.look()

    def settle(self) -> None:
        """Lift the floor once this log holds again whatever it may have promised."""
        if self._cut_floor and self._replica.core.is_claim_restored:
            self._lift()

    def _ask_tails(self) -> None:
        replica = self._replica
        for voter in replica.voters:
            if voter != replica.self_id:
                replica.send(
                    TailRequest(replica.core.term, replica.self_id, voter, self._cut_floor)
                )

    def answer_tail(self, request: TailRequest) -> None:
        """Say where this replica's log ends."""
        replica = self._replica
        core = replica.core
        tail = request.floor, replica.log.end_index, core.epochs.last_term
        replica.send(TailReply(core.term, replica.self_id, request.sender, *tail))

    def take_tail(self, reply: TailReply) -> None:
        """A voter says where its log ends."""
        replica = self._replica
        if not self._cut_floor or reply.floor != self._cut_floor:
            return
        self._tails[reply.sender] = reply.last_term, reply.log_end
        tails = [self._tails.get(v) for v in replica.voters if v != replica.self_id]
        known = [tail for tail in tails if tail is not None]
        if len(known) < len(tails):
            return
        longer = [tail for tail in known if tail[1] > replica.core.log_end]
        if longer:
            self._best_tail = max(longer)
            self.look()
        else:
            self._lift()

    def _lift(self) -> None:
        self._cut_floor = RaftIndex(0)
        self._best_tail = None
        self._tails.clear()
        self._replica.set_cut_floor(RaftIndex(0))
        self.look()
