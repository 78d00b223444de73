"""Which term each position of a log belongs to, and how to find where two logs part.

Holds (term, start) pairs, never entries, so it costs a few words per election. A cache of the log's
own bare entries, never a source of truth. Invariants: terms and starts ascend strictly, starts lie
in `[log_start, log_end)`, and position p belongs to the last epoch that starts at or below p. By
the Log Matching Property (Raft §5.3) two logs whose positions p have the same term agree up to p.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from raftmq.types import RaftIndex, Term


class EpochHistory:
    """The terms of a log's entries, as ranges."""

    __slots__ = ("_starts", "_terms", "last_term", "log_end", "log_start", "previous_term")

    def __init__(
        self,
        epochs: Iterable[tuple[Term, RaftIndex]] = (),
        *,
        log_start: RaftIndex = RaftIndex(0),
        previous_term: Term = Term(0),
        log_end: RaftIndex = RaftIndex(0),
    ) -> None:
        """Take the epochs of a recovered log; one that began below `log_start` is cut to it."""
        assert log_start <= log_end, "a log ends before it starts"
        self.log_start = log_start
        self.previous_term = previous_term  # of the entry that ended at log_start
        self.log_end = log_end
        self._terms: list[Term] = []
        self._starts: list[RaftIndex] = []
        for term, start in epochs:
            start = max(start, log_start)
            assert start < log_end, "an epoch starts beyond its log"
            assert not self._terms or term > self._terms[-1], "terms do not ascend"
            assert not self._starts or start > self._starts[-1], "epochs do not ascend"
            self._terms.append(term)
            self._starts.append(start)
        assert log_start == log_end or (self._starts and self._starts[0] == log_start), (
            "the first position belongs to no epoch"
        )
        self.last_term = self._terms[-1] if self._terms else previous_term

    @property
    def last_start(self) -> RaftIndex:
        """Where the last epoch starts; `log_start` of an empty log."""
        return self._starts[-1] if self._starts else self.log_start

    def pairs(self) -> list[tuple[Term, RaftIndex]]:
        """All epochs, oldest first."""
        return list(zip(self._terms, self._starts, strict=True))

    def append(self, term: Term, start: RaftIndex, end: RaftIndex) -> None:
        """Note an entry `[start, end)` of `term` at the end of the log."""
        assert self.log_end <= start < end, "an entry overlaps its predecessor"
        if term != self.last_term or not self._terms:
            assert term >= self.last_term, "terms never fall along a log"
            # The first position always belongs to an epoch, also where compaction left a gap.
            self._starts.append(start if self._terms else self.log_start)
            self._terms.append(term)
            self.last_term = term
        self.log_end = end

    def truncate_to(self, end: RaftIndex) -> None:
        """Forget all at or above `end`, an entry's end."""
        assert self.log_start <= end <= self.log_end, "truncation outside the log"
        self.log_end = end
        while self._starts and self._starts[-1] >= end:
            self._starts.pop()
            self._terms.pop()
        self.last_term = self._terms[-1] if self._terms else self.previous_term

    def move_start(self, log_start: RaftIndex, previous_term: Term) -> None:
        """Forget all below `log_start`; the entry that ended there had `previous_term`."""
        assert self.log_start <= log_start <= self.log_end, "log start outside the log"
        assert self.term_at_end(log_start) == previous_term, "another log's start"
        kept = bisect_right(self._starts, log_start) - 1
        if log_start == self.log_end:
            kept = len(self._starts)
        if kept > 0:
            del self._starts[:kept]
            del self._terms[:kept]
        if self._starts:
            self._starts[0] = log_start
        self.log_start = log_start
        self.previous_term = previous_term
        self.last_term = self._terms[-1] if self._terms else previous_term

    def reset(self, log_start: RaftIndex, previous_term: Term) -> None:
        """Begin anew with an empty log at `log_start`."""
        self._starts.clear()
        self._terms.clear()
        self.log_start = self.log_end = log_start
        self.previous_term = self.last_term = previous_term

    def term_at_end(self, end: RaftIndex) -> Term:
        """The term of the entry that ends at `end`, within `[log_start, log_end]`."""
        if end == self.log_end:
            return self.last_term
        assert self.log_start <= end < self.log_end, "asked for a term outside the log"
        if end == self.log_start:
            return self.previous_term
        return self._terms[bisect_left(self._starts, end) - 1]

    def matches(self, end: RaftIndex, term: Term) -> bool:
        """True when this log has an entry of `term` that ends at `end`."""
        return self.log_start <= end <= self.log_end and self.term_at_end(end) == term

    def hint(self, prev_end: RaftIndex, prev_term: Term) -> tuple[RaftIndex, Term]:
        """The follower's answer to a request that does not match: where to try next, and the term.

        That is the greatest end of a term not above `prev_term`: the leader's log before `prev_end`
        has no greater term, so nothing above can agree.
        """
        position = bisect_right(self._terms, prev_term) - 1
        if position < 0:
            return self.log_start, self.previous_term
        term = self._terms[position]
        end = self._end_of(position)
        return (min(prev_end, end) if term == prev_term else end), term

    def next_end_after(self, hint_end: RaftIndex, hint_term: Term) -> RaftIndex | None:
        """The leader's next try after a follower's hint; None: below the log start, so install.

        Of the hint's own term both logs hold prefixes of the same entries, so the shorter prefix
        ends at an entry's end in both. Otherwise all of the leader's epoch below that term is
        tried. Terms fall with each round trip, so it ends after few.
        """
        position = bisect_right(self._terms, hint_term) - 1
        if position < 0:
            is_known = self.previous_term <= hint_term and hint_end >= self.log_start
            return self.log_start if is_known else None
        end = self._end_of(position)
        if self._terms[position] == hint_term:
            end = min(end, hint_end)
        return end if end >= self.log_start else None

    def _end_of(self, position: int) -> RaftIndex:
        following = position + 1
        return self._starts[following] if following < len(self._starts) else self.log_end
