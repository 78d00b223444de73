"""What the objects do, one operation after another. An action is what was asked and answered."""

from __future__ import annotations

from bisect import bisect_right
from typing import cast

from attrs import frozen

from jepsen_like.checkers.linear.search import Action, State


@frozen
class Register:
    """A value that is set and read: ("commit", v), ("committed", v)."""

    initial: State = -1
    overwrites: bool = True

    def step(self, state: State, action: Action) -> State | None:
        """A commit sets the value, a read must be told it."""
        kind, value = cast("tuple[str, int]", action)
        if kind == "commit":
            return value
        return state if state == value else None


@frozen
class Topic:
    """One topic: ("create",), ("delete",), and what tells that it is "there" or "absent"."""

    initial: State = False
    overwrites: bool = False

    def step(self, state: State, action: Action) -> State | None:
        """Create needs its absence, delete its presence."""
        (kind,) = cast("tuple[str]", action)
        if kind == "create":
            return None if state else True
        if kind == "delete":
            return False if state else None
        return state if bool(state) == (kind == "there") else None


@frozen
class TopicSet:
    """All topics: the state has a bit for each. Actions: (kind, bits), ("list", bits)."""

    initial: State = 0
    overwrites: bool = False

    def step(self, state: State, action: Action) -> State | None:
        """As for one topic; a list shows all of them at one moment."""
        kind, bits = cast("tuple[str, int]", action)
        present = cast("int", state)
        if kind == "create":
            return None if present & bits else present | bits
        if kind == "delete":
            return present & ~bits if present & bits == bits else None
        if kind == "there":
            return state if present & bits == bits else None
        if kind == "absent":
            return None if present & bits else state
        return state if present == bits else None


@frozen
class Log:
    """A partition whose records are known by offset; the state is its end.

    ("append", start, end): these offsets, and so it can only be next where the log ends at `start`.
    ("append ?",): a record never seen: it can only stand where nothing else was seen.
    ("poll", end): a prefix up to `end` exists, and more may. ("end", end): the log ends just there.
    ("contradiction", offset): an answer that names another value than the log holds.
    """

    hole_starts: tuple[int, ...] = ()
    hole_ends: tuple[int, ...] = ()
    """Where something must be and nothing was seen, as half-open ranges."""
    gaps_allowed: bool = False
    initial: State = 0
    overwrites: bool = False

    def _hole_end(self, offset: int) -> int:
        """Where the hole ends in which `offset` lies; -1 if it lies in none."""
        position = bisect_right(self.hole_starts, offset) - 1
        if position >= 0 and offset < self.hole_ends[position]:
            return self.hole_ends[position]
        return -1

    def step(self, state: State, action: Action) -> State | None:
        """Appends move the end, all others look at it."""
        kind, *rest = cast("tuple[str, *tuple[int, ...]]", action)
        end = cast("int", state)
        if kind == "append":
            start = rest[0]
            if end != start and not (self.gaps_allowed and self._hole_end(end) == start):
                return None
            return rest[1]
        if kind == "append ?":
            return end + 1 if end < self._hole_end(end) else None
        if kind == "poll":
            return state if end >= rest[0] else None
        if kind == "end":
            return state if end == rest[0] else None
        return None
