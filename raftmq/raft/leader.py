"""What a leader does: replicate, count, commit, prove that it still leads, hand over.

Exists only while its replica leads, so nothing of one leadership can leak into the next. Messages
to followers are built in `send`, once per Ready, so that all proposals since the last one leave in
one request. How much may be sent to each follower is decided in `progress.py`.

Invariants: commit_end moves only by counting what a majority flushed, this replica included, and
only past an entry of the own term (Raft §5.4.2); nothing of this term leaves before it is certain
that a restart would not enter the same term again; nothing that a replica said before it became a
member, or before it became one again, counts for anything.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from struct import Struct
from typing import Final

from raftmq.errors import ErrorCode, KafkaError, RemoteProtocolError
from raftmq.raft.election import Election
from raftmq.raft.membership import Configuration, check_change, majority, quorum_end
from raftmq.raft.messages import (
    AppendReply,
    AppendRequest,
    Entry,
    Heartbeat,
    HeartbeatReply,
    InstallLogStart,
    StoredChunk,
    TimeoutNow,
)
from raftmq.raft.progress import Progress, ProgressState
from raftmq.raft.replica_state import ReplicaState
from raftmq.types import RaftIndex, ReplicaId

ASKED_APART_MS: Final = 200.0
"""So closely is it known when a heartbeat left that is answered."""
ASKED_MAX: Final = 32
"""And of how many times: answers to earlier heartbeats tell no clock."""
_ELECTION_PAYLOAD: Final = Struct(">BiQ")  # version, node id, storage id of the leader
_entry_start = attrgetter("start")


def election_payload(leader: ReplicaId) -> bytes:
    """The payload of an election entry: who leads from here on, for readers of the log."""
    return _ELECTION_PAYLOAD.pack(1, *leader)


def may_commit(end: RaftIndex, commit_end: RaftIndex, term_start: RaftIndex) -> bool:
    """True when a majority's `end` may become the commit.

    Entries of earlier terms are never committed by counting replicas (Raft §5.4.2, figure 8), only
    together with one of the own term, the first being the election entry at `term_start`.
    """
    return end > commit_end and end > term_start


class Leadership:
    """One replica's time as a leader, from its election entry on."""

    __slots__ = (
        "_asked",
        "_began_ms",
        "_chunks",
        "_core",
        "_counts_self",
        "_election",
        "_first_round",
        "_followers",
        "_heartbeat_at",
        "_quorum",
        "_round",
        "_round_is_unsent",
        "_transfer_deadline",
        "_transfer_is_sent",
        "_voting",
        "progress",
        "term_start",
        "transferee",
    )

    def __init__(self, core: ReplicaState, election: Election, term_start: RaftIndex) -> None:
        self._core = core
        self._election = election
        self.term_start = term_start
        self.progress: dict[ReplicaId, Progress] = {}  # of all members but this replica
        self._followers: list[Progress] = []  # the same, in a fixed order
        self._voting: list[Progress] = []  # those that count
        self._counts_self = True
        self._quorum = 1
        self._heartbeat_at = core.now + core.config.heartbeat_ticks
        self._first_round = self._round = core.next_round()
        self._round_is_unsent = False
        # (round, time): it began then or later, and so did those after it.
        self._began_ms = core.monotonic_ms
        self._asked = deque([(self._round, self._began_ms)], maxlen=ASKED_MAX)
        self.transferee: ReplicaId | None = None
        self._transfer_deadline = 0
        self._transfer_is_sent = False
        self._chunks: dict[RaftIndex, tuple[tuple[Entry, ...], int]] = {}
        self.configuration_changed()

    @property
    def has_committed_own_term(self) -> bool:
        """True once commit_end is exact (Raft §8)."""
        return self._core.commit_end > self.term_start

    @property
    def is_due(self) -> bool:
        """True when `send` has a message that no other message or proposal gave rise to."""
        return self._round_is_unsent or any(
            p.is_far_behind and not p.is_held for p in self._followers
        )

    # Time.

    def tick(self) -> None:
        """Send heartbeats when due; step down when no majority answers (thesis §6.2)."""
        core = self._core
        if core.now < self._heartbeat_at:
            return
        self._heartbeat_at = core.now + core.config.heartbeat_ticks
        if core.config.check_quorum and not self._hears_quorum():
            self._election.lose_time()
            core.become_follower(core.term, None)
            return
        self._election.decay_backoff()
        if self.transferee is not None and core.now >= self._transfer_deadline:
            self.transferee = None
        self._begin_round()

    def _hears_quorum(self) -> bool:
        # As long as the slowest follower waits: before that no other replica stands for election.
        since = self._core.now - 2 * self._election.least_timeout
        heard = int(self._counts_self)
        for progress in self._voting:
            if progress.last_heard_tick > since:
                heard += 1
        return heard >= self._quorum

    def _begin_round(self) -> None:
        if not self._round_is_unsent:
            self._round = self._core.next_round()
            self._round_is_unsent = True
            now_ms = self._core.monotonic_ms
            if now_ms - self._asked[-1][1] >= ASKED_APART_MS:
                self._asked.append((self._round, now_ms))

    # Sending.

    def send(self) -> None:
        """Build the messages that are due: heartbeats first, then entries."""
        core = self._core
        if core.flushed_end <= self.term_start and core.is_sole_voter:
            # No other replica voted, so until the election entry is on disk a restart might enter
            # this term again, with other entries: learners must not see any of it.
            return
        if self._round_is_unsent:
            self._round_is_unsent = False
            for progress in self._followers:
                self._send_heartbeat(progress)
        log_end = core.epochs.log_end
        for progress in self._followers:
            if progress.is_behind and core.effects.append and self._is_fed(progress):
                core.source.grown(core.effects.append)
            # Runs for every Ready, and nearly always finds all followers served.
            if (
                progress.next_end < log_end
                or progress.must_ask
                or progress.state is not ProgressState.REPLICATE
            ) and progress.is_met:
                self._replicate(progress)
        if self._chunks:
            self._chunks.clear()
        if core.config.announce_commit:
            commit_end = core.commit_end
            for progress in self._followers:
                if progress.told_commit_end < commit_end and (
                    progress.told_commit_end < progress.match_end
                ):
                    self._send_heartbeat(progress)

    def _send_heartbeat(self, progress: Progress) -> None:
        core = self._core
        commit_end = progress.told_commit_end = min(core.commit_end, progress.match_end)
        core.effects.send_now.append(
            Heartbeat(core.term, core.self_id, progress.replica, commit_end, self._round)
        )

    def _replicate(self, progress: Progress) -> None:
        if progress.state is not ProgressState.REPLICATE and progress.is_awaiting:
            return
        core = self._core
        if progress.next_end < core.log_start or progress.state is ProgressState.CATCH_UP:
            progress.become_catch_up(core.log_start)
            self._send_log_start(progress)
        elif progress.state is ProgressState.PROBE:
            self._send_probe(progress)
        else:
            log_end = core.log_end
            while progress.next_end < log_end and progress.has_room:
                if progress.inflight_messages and core.buggify("raft.full_window"):
                    break  # an answer is on its way, and what is left goes then
                if progress.is_held and core.source.is_waiting() and not self._is_needed(progress):
                    break
                entries, size_bytes = self._entries(progress.next_end)
                if entries and entries[0].start < progress.next_end:
                    progress.become_catch_up(core.log_start)  # it asked for a place in an entry
                    break
                if entries:
                    if not progress.may_go_by(is_far_behind=False):
                        break
                    if progress.is_behind and not self._may_leave(progress, entries, size_bytes):
                        break
                    self._send_entries(progress, entries, size_bytes)
                elif not self._send_stored(progress):
                    break
            if progress.must_ask:
                self._send_entries(progress, (), 0)

    def _send_stored(self, progress: Progress) -> bool:
        """Send what has to come from the disk; False when that has to wait."""
        core = self._core
        if core.effects.install is not None or core.effects.truncate_end is not None:
            return False  # the engine's log is about to change
        if not progress.may_go_by(is_far_behind=True):
            return False
        chunk = core.source.stored(progress.next_end, core.config.append_bytes_max)
        if chunk is None:
            return False
        if chunk.entries[0].start < progress.next_end:
            progress.become_catch_up(core.log_start)  # it asked for a place within an entry
            return False
        if not self._may_leave(
            progress, chunk.entries, chunk.size_bytes, core.config.append_bytes_max
        ):
            return False
        self._send_entries(progress, chunk.entries, chunk.size_bytes, chunk)
        return True

    def _may_leave(
        self,
        progress: Progress,
        entries: Sequence[Entry],
        size_bytes: int,
        next_bytes_max: int = 0,
    ) -> bool:
        """True when the limits of catch-up let this go to a replica that is behind."""
        may_leave = self._core.source.admit(
            progress.replica,
            entries,
            size_bytes,
            is_needed=self._is_needed(progress),
            next_bytes_max=next_bytes_max,
        )
        progress.is_held = not may_leave
        return may_leave

    def _is_needed(self, progress: Progress) -> bool:
        """True when the commit waits for this replica: too few of the others hold more."""
        end = progress.match_end
        ahead = int(self._counts_self and self._core.flushed_end > end)
        ahead += sum(1 for other in self._voting if other.match_end > end)
        return ahead < self._quorum

    def _is_fed(self, progress: Progress) -> bool:
        """True for a replica that answers and takes entries."""
        heard_ticks = self._core.now - progress.last_heard_tick
        return (
            progress.state is ProgressState.REPLICATE
            and heard_ticks <= self._core.config.election_ticks
        )

    def _send_probe(self, progress: Progress) -> None:
        """Ask at one position, with the entries at hand if they happen to follow it."""
        pending = self._core.effects.append
        if pending and pending[0].start <= progress.next_end < self._core.log_end:
            self._send_entries(progress, *self._entries(progress.next_end))
        else:
            self._send_entries(progress, (), 0)

    def _send_entries(
        self,
        progress: Progress,
        entries: tuple[Entry, ...],
        size_bytes: int,
        chunk: StoredChunk | None = None,
    ) -> None:
        core = self._core
        prev_end = progress.next_end
        core.effects.send_now.append(
            AppendRequest(
                core.term,
                core.self_id,
                progress.replica,
                prev_end,
                core.epochs.term_at_end(prev_end),
                core.commit_end,
                entries,
                chunk,
            )
        )
        if entries:
            end = entries[-1].end
            progress.sent_entries(end, size_bytes, core.now)
            if progress.is_behind and end == core.log_end:
                progress.sent_all(end)
        else:
            end = prev_end
            progress.sent_question(core.now)
        progress.told_commit_end = min(core.commit_end, end)

    def _send_log_start(self, progress: Progress) -> None:
        core = self._core
        if core.effects.install is not None:
            return  # the engine does not have it yet; the next Ready will
        core.effects.send_now.append(
            InstallLogStart(
                core.term,
                core.self_id,
                progress.replica,
                core.log_start,
                core.epochs.previous_term,
                core.source.log_start_payload(),
                core.configurations.base.encode(),
            )
        )
        progress.sent_question(core.now)

    def _entries(self, start: RaftIndex) -> tuple[tuple[Entry, ...], int]:
        """What to send from `start`, and its bytes; the same for all followers at that point."""
        chunk = self._chunks.get(start)
        if chunk is None:
            core = self._core
            bytes_max = core.config.append_bytes_max
            if core.buggify("raft.short_append"):
                bytes_max = 1
            pending = core.effects.append
            entries: Sequence[Entry]
            if pending and pending[0].start <= start:
                first = bisect_left(pending, start, key=_entry_start)
                entries = pending[first:] if first else pending
            elif core.effects.install is not None or core.effects.truncate_end is not None:
                return (), 0  # the engine's log is about to change
            else:
                entries = core.source.entries(start, bytes_max)
            chunk = self._chunks[start] = _cut(entries, bytes_max)
        return chunk

    # Answers.

    def on_append_reply(self, reply: AppendReply) -> None:
        """Count what a follower flushed, or look for where its log parts from ours."""
        core = self._core
        progress = self.progress.get(reply.sender)
        if progress is None or not progress.is_met:
            return
        progress.last_heard_tick = core.now
        if reply.clock_ms:
            progress.clock_ms = reply.clock_ms
            if progress.told_clock is None:
                # All that is known of its age is that it was asked for in this term.
                progress.told_clock = reply.clock_ms, self._began_ms
        if not reply.accepted:
            next_end = core.epochs.next_end_after(reply.hint_end, reply.hint_term)
            progress.refused(reply.refused_prev_end, next_end, core.log_start, core.now)
            return
        if reply.flushed_end > core.log_end:
            raise RemoteProtocolError(f"{reply.sender} agrees with more than there is")
        if progress.accepted(reply.flushed_end, core.now, is_promise=reply.is_promise):
            if reply.flushed_end > core.commit_end:
                self.commit_if_possible()
            if self.transferee == reply.sender:
                self._hand_over_if_ready()

    def on_heartbeat_reply(self, reply: HeartbeatReply) -> None:
        """Note that a follower lives, and what it is missing."""
        core = self._core
        progress = self.progress.get(reply.sender)
        if progress is None:
            return
        if reply.round > self._round or reply.matched_end > core.log_end:
            raise RemoteProtocolError(f"{reply.sender} answers a round that was not begun")
        if reply.round < progress.added_round:
            return  # of a time before it was added: it may have lost all that it had since
        progress.last_heard_tick = core.now
        if reply.clock_ms:
            progress.clock_ms = reply.clock_ms
            self._take_clock(progress, reply)
        if reply.round > progress.acked_round:
            progress.acked_round = reply.round
        patience_ticks = core.config.election_ticks // 2
        progress.heard_matched_end(reply.matched_end, core.now, patience_ticks)

    def _take_clock(self, progress: Progress, reply: HeartbeatReply) -> None:
        for round_, asked_ms in reversed(self._asked):
            if round_ <= reply.round:
                if progress.told_clock is None or asked_ms >= progress.told_clock[1]:
                    progress.told_clock = reply.clock_ms, asked_ms
                return

    def takes_quietly(self, reply: HeartbeatReply) -> bool:
        """Note a reply of a follower that was sent all there is; False when something is due."""
        progress = self.progress.get(reply.sender)
        log_end = self._core.log_end
        if (
            progress is None
            or self.transferee is not None
            or progress.state is not ProgressState.REPLICATE
            or progress.must_ask
            or progress.next_end != log_end
            or reply.matched_end > log_end
        ):
            return False
        self.on_heartbeat_reply(reply)
        return progress.state is ProgressState.REPLICATE and not progress.must_ask

    def commit_if_possible(self) -> None:
        """Move commit_end to what a majority flushed."""
        core = self._core
        ends = [progress.match_end for progress in self._voting]
        if self._counts_self:
            ends.append(RaftIndex(0) if core.suspended else core.flushed_end)
        end = quorum_end(ends)
        if may_commit(end, core.commit_end, self.term_start):
            core.set_commit_end(end)
            if self.transferee is not None:
                self._hand_over_if_ready()

    # Membership.

    def check_membership_change(self, configuration: Configuration) -> None:
        """Refuse an unsafe step.

        Raises:
            KafkaError: as `RaftCore.propose_membership` says.
        """
        core = self._core
        # The second condition is the thesis's, the first its known fix: two leaders might else
        # each append a change to an uncommitted configuration, with majorities that do not overlap.
        if not self.has_committed_own_term or not core.configurations.is_committed(core.commit_end):
            raise KafkaError(
                "another change is not committed yet", code=ErrorCode.REASSIGNMENT_IN_PROGRESS
            )
        check_change(core.configuration, configuration)

    def configuration_changed(self) -> None:
        """Lead the members of the configuration now in force; new ones are probed at the end, once
        they answered a round that begins now."""
        core = self._core
        config = core.config
        configuration = core.configuration
        progress: dict[ReplicaId, Progress] = {}
        is_change = self.has_committed_own_term  # else this leadership begins
        for member in configuration.members:
            if member == core.self_id:
                continue
            known = self.progress.get(member)
            if known is None and is_change:
                self._begin_round()
            progress[member] = known or Progress(
                member,
                self.term_start,
                core.now,
                bytes_max=config.inflight_bytes_max,
                messages_max=config.inflight_messages_max,
                is_behind=member not in configuration.voters,
                # Whom this leader leads from the first answers in this term what it asked then.
                added_round=self._round if is_change else 0,
            )
        self.progress = progress
        self._followers = list(progress.values())
        self._voting = [progress[voter] for voter in configuration.voters if voter in progress]
        # A leader that removes itself goes on until that is committed, without counting itself.
        self._counts_self = core.self_id in configuration.voters
        self._quorum = majority(len(configuration.voters))

    def configuration_committed(self) -> None:
        """Step down if the group now goes on without this replica (thesis §4.2.2)."""
        if self._counts_self:
            return
        core = self._core
        successor = max(self._voting, key=attrgetter("match_end"))
        core.effects.send_now.append(TimeoutNow(core.term, core.self_id, successor.replica))
        core.become_follower(core.term, None)

    # Transfer of leadership (thesis §3.10).

    def start_transfer(self, to: ReplicaId) -> None:
        """Stop proposals, wait until `to` has all, then tell it to campaign.

        Raises:
            KafkaError: INELIGIBLE_REPLICA when `to` is no other voter in good order.
        """
        core = self._core
        progress = self.progress.get(to)
        if progress not in self._voting or progress is None or not progress.is_promising:
            raise KafkaError(f"{to} cannot lead", code=ErrorCode.INELIGIBLE_REPLICA)
        self.transferee = to
        self._transfer_deadline = core.now + core.config.election_ticks
        self._transfer_is_sent = False
        self._hand_over_if_ready()

    def _hand_over_if_ready(self) -> None:
        core = self._core
        to = self.transferee
        assert to is not None
        # Nothing is left uncommitted either, so all pending acknowledgements are given.
        has_all = self.progress[to].match_end == core.log_end == core.commit_end
        if has_all and not self._transfer_is_sent:
            self._transfer_is_sent = True
            core.effects.send_now.append(TimeoutNow(core.term, core.self_id, to))

    # Reads (Raft §8, thesis §6.4).

    def read_index(self) -> tuple[int, RaftIndex] | None:
        """A new round, shared by all reads until it is sent, and the commit_end to read up to."""
        if not self.has_committed_own_term:
            return None
        self._begin_round()
        return self._round, self._core.commit_end

    def is_confirmed(self, round: int) -> bool:
        """True once a majority answered `round` or a later one of this leadership."""
        if round <= self._first_round:
            return False  # asked in an earlier leadership; others may have led and written since
        acked = int(self._counts_self)
        for progress in self._voting:
            if progress.acked_round >= round:
                acked += 1
        return acked >= self._quorum


def _cut(entries: Sequence[Entry], bytes_max: int) -> tuple[tuple[Entry, ...], int]:
    """The first entries of at most `bytes_max`, at least one, and their bytes."""
    size_bytes = 0
    for count, entry in enumerate(entries):
        size = len(entry.payload)
        if count and size_bytes + size > bytes_max:
            return tuple(entries[:count]), size_bytes
        size_bytes += size
    return tuple(entries), size_bytes
