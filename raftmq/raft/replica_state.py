"""What one replica knows of its Raft group, and the moves that every role makes in it.

The roles act on this: an election (`election.py`), a leader (`leader.py`) and a follower
(`follower.py`) read it, append, truncate and write down what is to be sent. How a replica goes from
one role to another is decided in `core.py`, which is this with the verbs of the engine. The state
keeps no entries: it knows positions and terms (`epoch_history.py`) and reads entries for replicas
that lag through an `EntrySource`.

Invariants: term and commit_end never fall; one vote per term; nothing below commit_end is ever
truncated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, Protocol

from attrs import field, frozen
from attrs.validators import ge

from raftmq.foreign import TERM_MAX
from raftmq.ports import Buggify, never
from raftmq.raft.epoch_history import EpochHistory
from raftmq.raft.membership import Configuration, ConfigurationHistory
from raftmq.raft.messages import Effects, Entry, EntryKind, HardState, Role, StoredChunk
from raftmq.types import Buffer, RaftIndex, ReplicaId, Term


@frozen(slots=True)
class RaftConfig:
    """Settings of one replica. Ticks are the engine's; their length is not known here."""

    self_id: ReplicaId
    election_ticks: int = field(default=10, validator=ge(2))
    heartbeat_ticks: int = field(default=2, validator=ge(1))
    append_bytes_max: int = 1 << 20  # of entries in one request, or one entry if that is larger
    inflight_bytes_max: int = 8 << 20
    inflight_messages_max: int = 64
    pre_vote: bool = True
    check_quorum: bool = True
    priority: int = 0  # higher campaigns earlier
    announce_commit: bool = False  # tell followers at once that the commit moved

    def __attrs_post_init__(self) -> None:
        assert self.heartbeat_ticks < self.election_ticks, "heartbeats keep elections away"


class EntrySource(Protocol):
    """The log, as the core reads it for replicas that lag."""

    def entries(self, start: RaftIndex, bytes_max: int) -> tuple[Entry, ...]:
        """Entries from `start`, an entry's start, as far as they are in memory; () if they are not
        or cannot be read. Never waits for a disk."""
        ...

    def stored(self, start: RaftIndex, bytes_max: int) -> StoredChunk | None:
        """Entries from `start` that are not in memory. None while they are being read."""
        ...

    def admit(
        self,
        to: ReplicaId,
        entries: Sequence[Entry],
        size_bytes: int,
        *,
        is_needed: bool,
        next_bytes_max: int,
    ) -> bool:
        """True when entries may leave now for a replica that is behind. False while the limits of
        catch-up hold them back: the core is drained again when they no longer do.

        Args:
            is_needed: the commit waits for that replica, so the limit of the rate does not hold.
            next_bytes_max: of the stored chunk that is wanted next; 0: these come from memory.
        """
        ...

    def is_waiting(self) -> bool:
        """True while `admit` would refuse whatever only the limit of the rate holds back, since
        another is next: what cannot leave need not be read."""
        ...

    def grown(self, entries: Sequence[Entry]) -> None:
        """These were appended while a replica catches up: they come on top of its limit."""
        ...

    def log_start_payload(self) -> Buffer:
        """The encoded log-start tuple for `InstallLogStart`."""
        ...


class ReplicaState(ABC):
    """The state of one replica of one group."""

    def __init__(
        self,
        config: RaftConfig,
        *,
        hard_state: HardState,
        epochs: EpochHistory,
        configuration: Configuration,
        configuration_history: Sequence[tuple[RaftIndex, Configuration]] = (),
        flushed_end: RaftIndex,
        commit_end: RaftIndex,
        source: EntrySource,
        buggify: Buggify = never,
    ) -> None:
        """Take over what recovery found.

        `configuration` is in force at the log start, `configuration_history` are the membership
        entries above. `commit_end` is a hint, recorded when all below it was flushed here (above
        that a crash may bring back what a truncation had dropped); at least the log start.
        """
        assert epochs.log_start <= flushed_end <= epochs.log_end, "flushed beyond the log"
        assert epochs.log_start <= commit_end <= flushed_end, "committed beyond what is flushed"
        self.config: Final = config
        self.self_id: Final = config.self_id
        self.source = source
        self.buggify: Final = buggify
        self.effects: Final = Effects()
        self.epochs: Final = epochs
        self.configurations: Final = ConfigurationHistory(
            configuration, epochs.log_start, configuration_history
        )
        self.now = 0  # ticks since the start
        # Set by the engine, and decide nothing here: the wall clock at the last message, for the
        # reply to it, and the monotonic clock at the last tick.
        self.clock_ms = 0
        self.monotonic_ms = 0.0

        self.term = hard_state.term
        self.vote = hard_state.vote
        if epochs.last_term > self.term:
            # The log reached the disk before the journal did. A vote in that term would have left
            # only after the journal, so there was none.
            self.term, self.vote = epochs.last_term, None
        self.role = Role.FOLLOWER
        self.leader: ReplicaId | None = None
        self._round = 0  # of heartbeats; never repeats while this process lives
        self.answered_round = (Term(0), 0)  # as a follower: (term, round) of the last reply

        self.flushed_end = flushed_end
        self.commit_end = commit_end
        # All below agrees with the leader of this term; what is committed agrees with any.
        self.matched_end = commit_end

        # Recovery cut, below this end, what this replica may have promised to keep. While its log
        # is shorter it does not campaign, and votes only for logs that must hold what it lost. The
        # engine sets it, and clears it once is_claim_restored.
        self.claimed_end_floor = RaftIndex(0)
        # No entry that was lost had a later term. A longer log is not enough to go by: it may be
        # full of an older term's entries and lack the committed ones.
        self.claimed_term_floor = self.term
        # No campaign, and no promise: set by the engine while bytes are damaged.
        self.suspended = False
        self.waits_for_turn = False  # no campaign: set by the engine while many groups stand
        # Others would serve sooner as leaders: it stands after them. Set by what the group is for.
        self.stands_last = False
        # Set by the engine while its loop is late, see `election.py`.
        self.timeout_doublings_floor = 0

    # State that others may read.

    @property
    def log_end(self) -> RaftIndex:
        """One past the last entry, flushed or not."""
        return self.epochs.log_end

    @property
    def log_start(self) -> RaftIndex:
        """Where the log begins."""
        return self.epochs.log_start

    @property
    def configuration(self) -> Configuration:
        """The configuration in force: the last one appended."""
        return self.configurations.current

    @property
    def is_voter(self) -> bool:
        """True when the configuration in force counts this replica."""
        return self.self_id in self.configurations.current.voters

    @property
    def is_sole_voter(self) -> bool:
        """True in a group of one: this one."""
        return self.configurations.current.voters == (self.self_id,)

    @property
    def can_campaign(self) -> bool:
        """True when this replica may ask for votes.

        One whose removal is not committed yet may, too: it might hold the only log that can win,
        and commit its removal (Raft thesis §4.2.2).
        """
        if self.suspended or self.log_end < self.claimed_end_floor:
            return False
        if self.term >= TERM_MAX:
            return False  # no later term has a place on Kafka's wire
        return (
            self.is_voter
            or self.self_id in self.configurations.committed(self.commit_end)[1].voters
        )

    @property
    def is_claim_restored(self) -> bool:
        """True when this replica holds again all that it may have promised before recovery.

        Either it agrees with a leader up to the claimed end, or it holds the election entry of a
        leader of a later term: that leader's log has everything committed before.
        """
        held_end = min(self.matched_end, self.flushed_end)
        if held_end >= self.claimed_end_floor:
            return True
        return (
            self.epochs.last_term == self.term > self.claimed_term_floor
            and held_end > self.epochs.last_start
        )

    # What every role may do.

    def append_own(self, payload: Buffer, width: int, kind: EntryKind) -> Entry:
        """Append an entry of the own term; the caller has checked that this replica may."""
        start = self.epochs.log_end
        entry = Entry(start, RaftIndex(start + width), self.term, kind, payload)
        self.epochs.append(self.term, start, entry.end)
        self.matched_end = entry.end
        self.effects.append.append(entry)
        return entry

    def next_round(self) -> int:
        """A new heartbeat round."""
        self._round += 1
        return self._round

    def truncate_to(self, end: RaftIndex) -> None:
        """Drop a suffix that the leader's log does not have (§5.3)."""
        assert end >= self.commit_end, "a committed entry is never truncated"
        assert end >= self.matched_end, "what agrees with this term's leader is never truncated"
        self.epochs.truncate_to(end)
        self.configurations.truncate_to(end)
        self.flushed_end = min(self.flushed_end, end)
        self.effects.truncate_to(end)

    @abstractmethod
    def set_commit_end(self, commit_end: RaftIndex) -> None:
        """Note that all below `commit_end` is on a majority."""

    @abstractmethod
    def become_follower(self, term: Term, leader: ReplicaId | None) -> None:
        """Follow `leader`, None while it is not known; a later term forgets the vote (§5.1)."""

    @abstractmethod
    def become_candidate(self, *, is_real: bool) -> None:
        """Stand for election; only a real candidate, not a pre-candidate, enters the next term."""

    @abstractmethod
    def become_leader(self) -> None:
        """Lead this term; its first entry says so and lets older ones be committed (§8)."""
