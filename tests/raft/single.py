"""A single core, what it is told and what it wants done: for tests of one rule at a time."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from raftmq.raft.core import RaftCore
from raftmq.raft.messages import (
    AppendReply,
    AppendRequest,
    Entry,
    HardState,
    Ready,
    Role,
    StoredChunk,
    VoteReply,
)
from raftmq.raft.replica_state import RaftConfig
from raftmq.types import RaftIndex, ReplicaId, Term
from tests.raft.network import Disk, configuration, entries_of, epochs_of, replica

ONE, TWO, THREE, FOUR, FIVE = (replica(number) for number in range(1, 6))


class Source:
    """Entries below the ones at hand, for followers that lag."""

    def __init__(self, entries: list[Entry]) -> None:
        self.log = entries
        self.memory_start = 0  # below it entries come one by one from a disk
        self.may_leave = self.is_read = True
        self.waits = False  # for its turn at the limit
        self.reads = 0
        self.asked: list[tuple[int, ReplicaId, bool]] = []
        self.from_disk: list[bool] = []
        self.grew: list[int] = []

    def entries(self, start: RaftIndex, _bytes_max: int) -> tuple[Entry, ...]:
        self.reads += 1
        if start < self.memory_start:
            return ()
        return tuple(each for each in self.log if each.start >= start)

    def stored(self, start: RaftIndex, _bytes_max: int) -> StoredChunk | None:
        if not self.is_read:
            return None
        return StoredChunk((next(each for each in self.log if each.start == start),), 100)

    def admit(
        self,
        to: ReplicaId,
        entries: Sequence[Entry],
        _size_bytes: int,
        *,
        is_needed: bool,
        next_bytes_max: int,
    ) -> bool:
        self.asked.append((entries[0].start, to, is_needed))
        self.from_disk.append(next_bytes_max > 0)
        return self.may_leave

    def is_waiting(self) -> bool:
        return self.waits

    def grown(self, entries: Sequence[Entry]) -> None:
        self.grew += [each.start for each in entries]

    def log_start_payload(self) -> bytes:
        return b"log start"


def make(
    terms: list[int] | None = None,
    *,
    voters: int = 3,
    learners: tuple[int, ...] = (),
    term: int = 0,
    commit_end: int = 0,
    pre_vote: bool = False,
    check_quorum: bool = False,
) -> RaftCore:
    """Node 1 of a group, with a log of one position per term, flushed."""
    entries = entries_of(terms or [])
    disk = Disk(entries)
    return RaftCore(
        RaftConfig(ONE, pre_vote=pre_vote, check_quorum=check_quorum),
        hard_state=HardState(Term(max([term, *(terms or [])]))),
        epochs=epochs_of(disk),
        configuration=configuration(range(1, voters + 1), learners),
        flushed_end=disk.log_end,
        commit_end=RaftIndex(commit_end),
        source=Source(entries),
        random=Random(1),
    )


def effects(core: RaftCore) -> Ready:
    """What it wants done; everything written is flushed at once."""
    ready = core.ready() or Ready()
    assert isinstance(core.source, Source)
    if ready.truncate_end is not None:
        core.source.log = [each for each in core.source.log if each.end <= ready.truncate_end]
    core.source.log += ready.append
    core.advance(core.log_end)
    return ready


def leader(
    terms: list[int] | None = None,
    *,
    voters: int = 3,
    learners: tuple[int, ...] = (),
    term: int = 0,
) -> RaftCore:
    """A leader of the next term whose election entry is appended and flushed."""
    core = make(terms, voters=voters, learners=learners, term=term)
    for _ in range(20):
        core.tick()
        if core.role is not Role.FOLLOWER:
            break
    for voter in core.configuration.voters:
        if core.role is Role.CANDIDATE:
            core.step(VoteReply(core.term, voter, ONE, True))
    assert core.role is Role.LEADER
    effects(core)
    return core


def append(
    core: RaftCore, prev_end: int, prev_term: int, *entries: Entry, term: int, commit_end: int = 0
) -> Ready:
    """Node 2, leader of `term`, sends entries."""
    core.step(
        AppendRequest(
            Term(term),
            TWO,
            ONE,
            RaftIndex(prev_end),
            Term(prev_term),
            RaftIndex(commit_end),
            entries,
        )
    )
    return effects(core)


def accept(core: RaftCore, sender: int, flushed_end: int) -> Ready:
    """Node `sender` has flushed so much."""
    core.step(AppendReply(core.term, replica(sender), ONE, True, RaftIndex(flushed_end)))
    return effects(core)
