"""Read barriers, coalesced: all callers that came before a round began share it.

Owns who waits for which round. Never asks anybody itself: the engine takes the round that is due,
asks the leader how far is committed, and says what it heard and how far this node has applied.

Invariants: one round is under way at a time; a caller never joins one that was asked before it
came, since the answer might not cover what the caller must see.
"""

from __future__ import annotations

from attrs import define, field

from raftmq.errors import RequestTimedOutError
from raftmq.promise import Promise
from raftmq.types import RaftIndex


@define(eq=False)
class Round:
    """Who waits (with deadlines), when it was asked (-1: not yet), and the answer."""

    promises: list[tuple[Promise[None], float]] = field(factory=list)
    asked_ms: float = -1.0
    index: RaftIndex | None = None


class BarrierRounds:
    """The round under way and the next one."""

    def __init__(self) -> None:
        self._current: Round | None = None
        self._next: Round | None = None

    @property
    def has_next(self) -> bool:
        """True when somebody waits for a round that cannot begin yet."""
        return self._next is not None

    def add(self, promise: Promise[None], deadline_ms: float) -> None:
        """Wait for the next round."""
        if self._next is None:
            self._next = Round()
        self._next.promises.append((promise, deadline_ms))

    @property
    def is_due(self) -> bool:
        """True when `due` gives a round."""
        first = self._current or self._next
        return first is not None and first.asked_ms < 0

    def due(self) -> Round | None:
        """The round that should be asked now; the caller sets `asked_ms` when it is."""
        if self._current is None:
            self._current, self._next = self._next, None
        if self._current is None or self._current.asked_ms >= 0:
            return None
        return self._current

    def is_waiting(self, asked: Round) -> bool:
        """True while this round is under way and has no answer."""
        return asked is self._current and asked.index is None

    def ask_again(self) -> None:
        """The question may be lost."""
        if self._current is not None and self._current.index is None:
            self._current.asked_ms = -1.0

    def applied(self, applied_end: RaftIndex) -> list[Promise[None]]:
        """The promises that are kept now that everything below `applied_end` is applied."""
        current = self._current
        if current is None or current.index is None or applied_end < current.index:
            return []
        self._current = None
        return [promise for promise, _ in current.promises]

    def expire(self, now_ms: float, resend_ms: float) -> None:
        """Fail who waited too long; ask again what has no answer."""
        for waiting in (self._current, self._next):
            if waiting is None:
                continue
            late = [promise for promise, deadline in waiting.promises if deadline <= now_ms]
            waiting.promises = [row for row in waiting.promises if row[1] > now_ms]
            for promise in late:
                promise.fail(RequestTimedOutError("no majority of the metadata group answered"))
        current = self._current
        if current is not None:
            if not current.promises:
                self._current = None
            elif current.index is None and now_ms - current.asked_ms >= resend_ms:
                current.asked_ms = -1.0
