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

Invariants: nothing is installed unchecked; at most one request for damage is under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raftmq.cluster.peer_messages import RepairReply, RepairRequest, TailReply, TailRequest
from raftmq.errors import CorruptBatchError, StorageError
from raftmq.log.filler import cut_filler, is_filler
from raftmq.log.log_start import LogStart
from raftmq.log.model import DamagedError
from raftmq.ports import DiskError, DiskFullError
from raftmq.raft.ready import Role
from raftmq.records import check_batch, parse_header
from raftmq.types import Buffer, Offset, RaftIndex, ReplicaId, Term

if TYPE_CHECKING:
    from raftmq.cluster.replica import Replica


class Repairer:
    """The part of a replica that mends its log."""

    def __init__(self, replica: Replica, bytes_max: int) -> None:
        self._replica = replica
        self._bytes_max = bytes_max
        self._asked = 0
        self._gathered: list[Buffer] = []
        self._range: tuple[Offset, Offset] | None = None
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
        wanted = replica.log.damaged[0]
        if wanted != self._range:
            self._range = wanted
            self._gathered.clear()
        peers = [r for r in replica.voters if r != replica.self_id]
        if not peers:
            return
        start = self._next_offset()
        to = peers[self._asked % len(peers)]
        self._asked += 1
        replica.send(RepairRequest(replica.core.term, replica.self_id, to, start, wanted[1]))

    def _next_offset(self) -> Offset:
        assert self._range is not None, "no repair is under way"
        if not self._gathered:
            return self._range[0]
        return Offset(parse_header(self._gathered[-1]).next_offset)

    def answer(self, request: RepairRequest) -> None:
        """Send a peer what this replica holds, verified, of a range."""
        replica = self._replica
        log = replica.log
        end = min(request.end, log.log_end_offset)
        if request.start < log.log_start_offset:
            term, start = replica.core.term, request.start
            replica.send(
                RepairReply(
                    term, replica.self_id, request.sender, start, (), log.log_start.encode()
                )
            )
            return
        if request.start >= end:
            return
        try:
            spans = log.locate(request.start, self._bytes_max, end)
            data = b"".join(span.file.pread(span.size, span.position) for span in spans)
            batches = _split(memoryview(data))
        except DamagedError:
            self.look()
            return
        except (DiskError, StorageError, CorruptBatchError):
            return  # another peer will be asked
        if batches:
            replica.send(
                RepairReply(
                    replica.core.term, replica.self_id, request.sender, request.start, batches
                )
            )

    def take(self, reply: RepairReply) -> None:
        """Check a peer's batches; once the whole range is there, repair it durably."""
        replica = self._replica
        if self._range is None or self._range not in replica.log.damaged:
            return
        if len(reply.log_start):
            self._adopt(LogStart.decode(reply.log_start))
            return
        expected = self._next_offset()
        for batch in reply.batches:
            try:
                header = check_batch(batch)
            except CorruptBatchError:
                return
            if header.next_offset <= expected:
                continue
            if header.base_offset >= self._range[1]:
                break
            epoch = replica.log.epoch_at(Offset(header.base_offset))
            if is_filler(header):
                batch = cut_filler(batch, header, expected, self._range[1])
                header = parse_header(batch)
            if header.base_offset < expected or header.leader_epoch != epoch:
                return  # another history than ours: Raft will truncate it, or the peer's
            self._gathered.append(batch)
            expected = Offset(header.next_offset)
        if expected < self._range[1]:
            if reply.batches:
                self._ask()
            return
        try:
            replica.log.repair(self._range[0], self._gathered)
        except (DiskFullError, CorruptBatchError):
            self._gathered.clear()  # what was gathered does not fill the range: begin again
            return
        except DiskError as error:
            replica.fail(f"repair failed: {error}")
            return
        self._range = None
        self._gathered = []
        self.look()
        if replica.log.damaged:
            self._ask()

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


def _split(data: memoryview) -> tuple[Buffer, ...]:
    """Whole batches at the front of `data`."""
    batches: list[Buffer] = []
    position = 0
    while position < len(data):
        size = parse_header(data, position).size
        batches.append(data[position : position + size])
        position += size
    return tuple(batches)
