"""The log start: when a leader moves it, how each replica does, and how a follower takes one.

Dropping a prefix of the log is proposed by the leader in a bare entry, and done by each replica
once that entry is committed. Retention and DeleteRecords go the same way, so all replicas drop the
same records and none drops what another may still have to send. The tuple that replaces the prefix
is durable before anything below it goes (`log.move_start`).

A replica that cannot do it yet (its disk is full, or damage must be repaired first) tries again at
every election timeout, and meanwhile hides the records that are to go: other replicas have dropped
them, so an earlier log start would be one that went back. The same holds while its turn has not
come: thousands of moves may be due at once, and the state of many producers takes long, while all
of them together may take a share of the loop's time only (`LoopShare`). It goes on at its next
tick.

A follower whose disk is full cannot append what stands before the entry that would let it drop
something. So a leader tells followers that make no headway where its own log starts, which is
committed, in the message that serves those that are further behind (`InstallLogStart`). And every
replica keeps room for the tuple that it would write by now, before its disk is full (`reserve`).

A follower that is behind the leader's log start installs that. A snapshot of the metadata group may
take seconds to decode, while this node's other groups have leaders to hear and followers to answer;
so `Installing` has a worker decode it, and the core is told of the log start only then. The leader
may have sent it again by that time, which changes nothing.

Invariants: nothing above the high watermark is dropped, and nothing without a committed proposal.
The log start never falls, whatever the order of proposals: each replica learns of commits in
portions of its own, and goes to the greatest of what is committed. One install is under way at a
time, the newest; it is stepped as it came, so that the core alone judges whether it still means
anything.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import attrs

from raftmq.log.log_start import LogStart
from raftmq.log.model import DamagedError, NewerFormatError
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.ports import Clock, DiskError, DiskFullError
from raftmq.raft.core import RaftCore
from raftmq.raft.messages import EntryKind, InstallLogStart
from raftmq.replication.catch_up import CatchUp
from raftmq.replication.ports import GrowingState, SlowRestorer, StateMachine
from raftmq.types import Buffer, Offset, RaftIndex, ReplicaId, Term

_PROPOSAL: Final = struct.Struct(">Bq")  # version, offset: payload of a LOG_START entry
_VERSION: Final = 1
RESERVE_PAUSE_MS: Final = 10_000.0
"""Pause after an attempt to reserve room on a full disk."""
REMINDED_AFTER: Final = 8
"""A follower is reminded once it had no more than before at so many looks, an election timeout
apart."""
REMINDED_EACH: Final = 64
"""Then at twice as many looks each time, since the tuple may be large, and at every 64th."""


class LogStartProposal(NamedTuple):
    """A log-start entry that ends at `end` and proposes to drop everything below `target`."""

    end: RaftIndex
    target: Offset


def encode_proposal(target: Offset) -> bytes:
    """The payload of the entry that proposes to drop everything below `target`."""
    return _PROPOSAL.pack(_VERSION, target)


def decode_proposal(payload: Buffer) -> Offset:
    """The offset below which an entry proposes to drop everything.

    Raises:
        NewerFormatError: a newer raftmq wrote it.
    """
    version, target = _PROPOSAL.unpack(payload)
    if version > _VERSION:
        raise NewerFormatError(f"a log-start entry of format {version}, known is {_VERSION}")
    return Offset(target)


class LogStartMoves:
    """The proposals in one replica's log that are not carried out yet."""

    __slots__ = (
        "_clock",
        "_growing",
        "_log",
        "_machine",
        "_reserve_at_ms",
        "_standing",
        "is_due",
        "owed",
        "proposals",
    )

    def __init__(self, log: ReplicatedLog, machine: StateMachine, clock: Clock) -> None:
        self._log = log
        self._machine = machine
        self._clock = clock
        self._growing = machine if isinstance(machine, GrowingState) else None
        self._reserve_at_ms = 0.0
        self.is_due = False
        """True while a committed proposal waits for its turn on the loop."""
        self.proposals: deque[LogStartProposal] = deque()
        """In order of their ends; every commit looks whether there are any."""
        self._standing: dict[ReplicaId, tuple[RaftIndex, RaftIndex, int]] = {}
        self.owed = Offset(0)
        """Records below it are hidden, though the log may still hold them."""
        for bare in log.bare_entries():
            if bare.kind == EntryKind.LOG_START:
                self.note(RaftIndex(bare.index + 1), bare.payload)

    def retire(self) -> None:
        """Let go of the state machine, which knows the replica."""
        del self._machine, self._growing

    @property
    def start_offset(self) -> Offset:
        """The first offset that readers may ask for."""
        return max(self._log.log_start_offset, self.owed)

    def note(self, end: RaftIndex, payload: Buffer) -> None:
        """The log has a proposal that ends at `end`."""
        self.proposals.append(LogStartProposal(end, decode_proposal(payload)))

    def told(self, start: LogStart, commit_end: RaftIndex) -> None:
        """A leader's log starts there, which is committed: this log may follow if it agrees."""
        if start.index > commit_end or start.offset <= self.start_offset:
            return
        self.proposals.append(LogStartProposal(start.index, start.offset))
        self.proposals = deque(sorted(self.proposals))
        self.is_due = True

    def reminders(self, core: RaftCore) -> list[InstallLogStart]:
        """Messages that tell followers which make no headway where this leader's log starts."""
        start, reminders = self._log.log_start, []
        before, self._standing = self._standing, {}
        for follower, progress in core.progress.items():
            end = progress.match_end
            is_heard = core.now - progress.last_heard_tick <= 2 * core.config.election_ticks
            if not (is_heard and 0 < start.index <= end < core.commit_end):
                continue
            *known, looks = before.get(follower, (end, start.index, 0))
            looks = looks + 1 if known == [end, start.index] else 1
            self._standing[follower] = (end, start.index, looks)
            is_power = not looks & (looks - 1)
            if (looks >= REMINDED_AFTER and is_power) or not looks % REMINDED_EACH:
                reminders.append(
                    InstallLogStart(
                        core.term,
                        core.self_id,
                        follower,
                        start.index,
                        Term(start.previous_epoch),
                        start.encode(),
                        start.configuration,
                    )
                )
        return reminders

    def reserve(self) -> None:
        """Keep room for the tuple of a log start as it would be by now.

        Raises:
            DiskError: the disk failed; it is not merely full.
        """
        now_ms, log = self._clock.monotonic_ms(), self._log
        if self._growing is None or now_ms < self._reserve_at_ms or not log.moves.is_free(now_ms):
            return
        try:
            log.reserve_start(self._growing.state_bytes_max)
        except DiskFullError:
            self._reserve_at_ms = now_ms + RESERVE_PAUSE_MS
        finally:
            log.moves.spend(now_ms, self._clock.monotonic_ms())

    def truncate_to(self, end: RaftIndex) -> None:
        """Proposals above `end` are gone."""
        while self.proposals and self.proposals[-1].end > end:
            self.proposals.pop()

    def clear(self) -> None:
        """The log begins anew."""
        self.proposals.clear()
        self.is_due = False
        self.owed = Offset(0)

    def fulfil(self, core: RaftCore, commit_end: RaftIndex, high_watermark: Offset) -> bool:
        """Carry out the greatest of the committed proposals; True when the log start moved.

        Raises:
            DiskError: the disk failed; it is not merely full.
        """
        if not self.proposals or self.proposals[0].end > commit_end:
            self.is_due = False
            return False
        greatest, proposal_end = Offset(-1), RaftIndex(0)
        while self.proposals and self.proposals[0].end <= commit_end:
            proposal_end, target = self.proposals.popleft()
            greatest = max(greatest, target)
        target = min(greatest, high_watermark)
        before = self._log.log_start_offset
        share, began_ms = self._log.moves, self._clock.monotonic_ms()
        is_done = is_stuck = False
        try:
            if share.is_free(began_ms):
                is_done = target <= before or self._move(core, target, commit_end)
        except (DamagedError, DiskFullError):
            is_stuck = True  # without a repair, or some room, the state there cannot be kept
        finally:
            share.spend(began_ms, self._clock.monotonic_ms())
        self.is_due = not is_done and not is_stuck
        if is_done:
            self.owed = Offset(0)
        else:
            self.proposals.appendleft(LogStartProposal(proposal_end, greatest))
            self.owed = target
        return self._log.log_start_offset > before

    def _move(self, core: RaftCore, target: Offset, commit_end: RaftIndex) -> bool:
        """True when it is done; False when there is more to do, at another time."""
        log = self._log
        if any(start < target for start, _ in log.damaged):
            raise DamagedError(*log.damaged[0])
        start = log.start_at(target)
        index = start.index
        assert index <= commit_end, "only a committed prefix may be dropped"
        state = self._machine.state_at(start.base_offset, index)
        if state is None:
            return False
        configuration = core.configurations.committed(index)[1].encode()
        log_start = attrs.evolve(start, configuration=configuration, state=state)
        log.move_start(log_start)
        core.log_start_moved(index, Term(log_start.previous_epoch))
        return True


class Installing:
    """The log start that a worker decodes for one replica."""

    __slots__ = ("_machine", "_on_read", "_pending", "_port")

    def __init__(
        self,
        machine: object,
        port: CatchUp,
        on_read: Callable[[InstallLogStart, LogStart], None],
    ) -> None:
        """`on_read` is called with a log start once `machine` can begin with it at once."""
        self._machine = machine if isinstance(machine, SlowRestorer) else None
        self._port = port
        self._on_read = on_read
        self._pending: InstallLogStart | None = None

    def may_step(self, install: InstallLogStart, term: Term, commit_end: RaftIndex) -> bool:
        """True when a core in `term` that knows of `commit_end` may be given it now; otherwise
        `on_read` is called when it is decoded."""
        if self._machine is None or install.term < term or install.log_start <= commit_end:
            return True
        pending = self._pending
        if pending is not None and (pending.term, pending.log_start) == (
            install.term,
            install.log_start,
        ):
            return False
        log_start = LogStart.decode(install.payload)
        job = self._machine.restoring(log_start.state)
        if job is None:
            return True
        self._pending = install
        self._port.run_long(job, lambda error: self._read(install, log_start, error))
        return False

    def _read(
        self, install: InstallLogStart, log_start: LogStart, _error: DiskError | None
    ) -> None:
        if self._pending is not install:
            return
        self._pending = None
        self._on_read(install, log_start)
