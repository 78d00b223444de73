"""What a leader knows of one other replica, and what it may send it next.

All transitions between the states live here. PROBE: the leader does not know where the logs agree
and sends one request at a time; REPLICATE: it does, and keeps a window of requests in flight;
CATCH_UP: the replica is behind the leader's log start, was sent that start, and gets nothing else
until it is there. In REPLICATE a replica may be far behind: the entries it needs are no longer in
memory, come in chunks from the disk and travel apart from live requests. It is *behind*, and so
subject to the limits of catch-up, from then on (a learner from its first day) until it has all that
there was when the last request for it left; in memory or not, a request that may not leave yet is
*held*.

Invariants: `match_end <= next_end` outside CATCH_UP; `match_end` rises only by a promise of the
replica itself, never by what was sent, and not before the replica is met; the window exceeds its
limits by less than one request; requests of one window all travel the same way, so that none
overtakes another.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Final

from raftmq.errors import RemoteProtocolError
from raftmq.types import RaftIndex, ReplicaId

FAR_PATIENCE: Final = 8
"""The leader waits so many times longer before it takes entries from the disk for lost."""
INSTALL_DOUBLINGS_MAX: Final = 8


class ProgressState(Enum):
    """How the leader sends to a replica."""

    PROBE = "probe"
    REPLICATE = "replicate"
    CATCH_UP = "catch-up"


class Progress:
    """One replica as its leader sees it. Times are the core's ticks."""

    __slots__ = (
        "_bytes_max",
        "_inflight",
        "_installs",
        "_messages_max",
        "acked_round",
        "added_round",
        "clock_ms",
        "full_end",
        "heard_end",
        "inflight_bytes",
        "is_awaiting",
        "is_behind",
        "is_far_behind",
        "is_held",
        "is_promising",
        "last_ack_tick",
        "last_heard_tick",
        "match_end",
        "must_ask",
        "next_end",
        "replica",
        "state",
        "told_clock",
        "told_commit_end",
    )

    def __init__(
        self,
        replica: ReplicaId,
        next_end: RaftIndex,
        now: int,
        *,
        bytes_max: int,
        messages_max: int,
        is_behind: bool = False,
        added_round: int = 0,
    ) -> None:
        self.replica = replica
        self.added_round: Final = added_round
        self.state = ProgressState.PROBE
        self.match_end = RaftIndex(0)  # agrees with our log and is flushed there: counts in quorums
        self.next_end = next_end  # the next request begins here
        self.is_awaiting = False  # PROBE, CATCH_UP: one request is out, wait for its answer
        self.must_ask = False  # REPLICATE: send an empty request, the last answer seems lost
        self.is_far_behind = False  # REPLICATE: served from the disk, in chunks
        self.is_behind = is_behind  # catches up: its requests are subject to limits
        self.is_held = False  # the limits hold its next request back; the engine drains in time
        self.full_end = RaftIndex(0)  # the log ended there when it was sent all of it
        self.is_promising = True  # False: damaged, as its last reply said
        self.last_heard_tick = now
        self.last_ack_tick = now  # of the last append reply, or of the request that awaits one
        self.acked_round = 0
        self.told_commit_end = RaftIndex(0)  # how far the messages sent so far let it commit
        self.clock_ms = 0
        # A clock that it showed, and when it was asked for it: not before that did it show it.
        self.told_clock: tuple[int, float] | None = None
        self.heard_end = RaftIndex(0)  # had arrived there, flushed or not, by its last reply
        self.inflight_bytes = 0
        self._inflight: deque[tuple[RaftIndex, int]] = deque()  # (end, bytes), oldest first
        self._installs = 0  # CATCH_UP: how often the log start was sent
        self._bytes_max = bytes_max
        self._messages_max = messages_max

    def __repr__(self) -> str:
        waiting = " awaiting" if self.is_awaiting else ""
        flight = f" inflight={len(self._inflight)}" if self._inflight else ""
        far = " far" if self.is_far_behind else ""
        mute = "" if self.is_promising else " mute"
        ends = f"match={self.match_end} next={self.next_end}"
        return f"{self.state.value} {ends}{waiting}{far}{flight}{mute}"

    @property
    def is_met(self) -> bool:
        """True once the replica is known to live as a member: all it promised, it still holds.

        A replica may leave the group and be added again under one leader. If it was ordered away
        meanwhile its data is gone and so is its identity, while promises that it made in its
        former life are still under way. Only its identity's end takes data away, so an answer to a
        heartbeat that left after the addition shows that nothing of this kind has happened.
        """
        return self.acked_round >= self.added_round

    @property
    def inflight_messages(self) -> int:
        """How many append requests with entries are unanswered."""
        return len(self._inflight)

    @property
    def has_room(self) -> bool:
        """True when another request with entries may be sent in REPLICATE."""
        return len(self._inflight) < self._messages_max and self.inflight_bytes < self._bytes_max

    def sent_entries(self, end: RaftIndex, size_bytes: int, now: int) -> None:
        """A request with entries up to `end` left."""
        assert end > self.next_end, "entries end above their start"
        if self.state is ProgressState.PROBE:
            # next_end stays at the asked position, by which the answer to this request is known.
            self.is_awaiting = True
            self.last_ack_tick = now
            return
        assert self.state is ProgressState.REPLICATE, "no entries while catching up"
        if not self._inflight:
            self.last_ack_tick = now
        self._inflight.append((end, size_bytes))
        self.inflight_bytes += size_bytes
        self.next_end = end

    def may_go_by(self, *, is_far_behind: bool) -> bool:
        """True when the next request may take this way; the way changes with an empty window."""
        assert self.state is ProgressState.REPLICATE, "there is one way only to probe"
        if not self._inflight:
            self.is_far_behind = is_far_behind
            self.is_behind |= is_far_behind
        return self.is_far_behind == is_far_behind

    def sent_all(self, log_end: RaftIndex) -> None:
        """A request left with which it has been sent all that there is: once it has that, it is
        not behind any more, however much was written meanwhile."""
        if self.is_behind and not self.full_end:
            self.full_end = log_end

    def sent_question(self, now: int) -> None:
        """A request without entries, or the log start, left."""
        self.is_awaiting = self.state is not ProgressState.REPLICATE
        self._installs += self.state is ProgressState.CATCH_UP
        self.must_ask = False
        self.last_ack_tick = now

    def accepted(self, end: RaftIndex, now: int, *, is_promise: bool) -> bool:
        """The replica holds all below `end`, flushed; True when `match_end` rose."""
        self.last_ack_tick = now
        self.is_promising = is_promise
        full_end = self.full_end
        inflight = self._inflight
        while inflight and inflight[0][0] <= end:
            self.inflight_bytes -= inflight.popleft()[1]
        if self.state is not ProgressState.REPLICATE and end >= self.next_end:
            self._become_replicate()
        if end > self.next_end:
            self.next_end = end
        if is_promise and end > self.match_end:
            self.match_end = end
            if self.is_behind and end >= full_end > 0:
                self.is_behind = False
                self.full_end = RaftIndex(0)
            return True
        return False

    def refused(
        self, asked_end: RaftIndex, next_end: RaftIndex | None, log_start: RaftIndex, now: int
    ) -> bool:
        """The request at `asked_end` did not fit; `next_end` is the next try, None: the log start.

        False: an answer to an older request, ignored.
        """
        self.last_ack_tick = now
        if self.state is ProgressState.CATCH_UP:
            return False
        if self.state is ProgressState.PROBE and asked_end != self.next_end:
            return False
        if asked_end < self.match_end:
            return False  # older than an acknowledgement that came since
        if next_end is None:
            self.become_catch_up(log_start)
        else:
            if next_end >= asked_end:
                raise RemoteProtocolError("a refusal that leads to no earlier try")
            self.become_probe(next_end)
        # Below match_end it had promised to hold the entries, so bytes were lost there. What is
        # committed stays committed: the replica does not vote for logs shorter than its promise.
        self.match_end = min(self.match_end, self.next_end)
        return True

    def heard_matched_end(self, matched_end: RaftIndex, now: int, patience_ticks: int) -> None:
        """A heartbeat's reply says what arrived; find out what was lost in transit.

        Heartbeats overtake appends, so only a silence of `patience_ticks` means anything; as long
        as more arrives there, nothing was lost, however slow its disk is.
        """
        if self._inflight and max(self.heard_end, self.match_end) < matched_end < self.next_end:
            self.last_ack_tick = now
        self.heard_end = matched_end
        if self.state is ProgressState.CATCH_UP:
            # A log start may be large, and take long to read: sent again ever more rarely.
            patience_ticks <<= min(max(0, self._installs - 1), INSTALL_DOUBLINGS_MAX)
        elif self.is_far_behind and self.match_end <= matched_end:
            # It has all that it promised, so it did not restart. Streams lose messages only with
            # their connection; a late one is far more often in a queue than lost.
            patience_ticks *= FAR_PATIENCE
        if now - self.last_ack_tick < patience_ticks:
            return
        if self.state is not ProgressState.REPLICATE:
            self.is_awaiting = False  # the request or its answer is lost: send it again
        elif matched_end < self.next_end:
            # Entries got lost, or it restarted and does not know yet what agrees.
            self.become_probe(max(self.match_end, matched_end))
        elif self._inflight or not self.is_promising:
            # All arrived, no answer: a slow disk, or a lost reply. Or it may promise again by now.
            self.must_ask = True

    def become_probe(self, next_end: RaftIndex) -> None:
        """Ask at `next_end` before sending more."""
        self.state = ProgressState.PROBE
        self.next_end = next_end
        self._forget_inflight()

    def become_catch_up(self, log_start: RaftIndex) -> None:
        """The replica needs the log start first."""
        if self.state is not ProgressState.CATCH_UP:
            self._installs = 0
        self.state = ProgressState.CATCH_UP
        self.next_end = log_start
        self.is_behind = True
        self._forget_inflight()

    def _become_replicate(self) -> None:
        self.state = ProgressState.REPLICATE
        self._forget_inflight()

    def _forget_inflight(self) -> None:
        self.is_awaiting = False
        self.is_far_behind = False
        self.is_held = False
        self.full_end = RaftIndex(0)
        self.must_ask = False
        self._inflight.clear()
        self.inflight_bytes = 0
