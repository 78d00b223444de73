"""What is pending in one delay partition: the entries that are due next, in bounded memory.

Fed with the committed log in its order, from the log start on. Entries are ordered by (due time,
offset), and all up to the cursor are done with: delivered, or cancelled before they were due. Of
what is behind it only the first `entries_max` are held; what is due later is *beyond*, and found
again by another reading of the log once everything that is held has gone.

Invariants: what is held is exactly what of the log that was read is pending, above the cursor and
below the horizon; `first_offset` is never above the offset of anything that is pending, so nothing
below it is needed any more.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from raftmq.delays.asks import Kind

ENTRIES_MAX: Final = 50_000
"""Some 15 MB."""


class Place(NamedTuple):
    """Where an entry stands in the order of deliveries."""

    due_ms: int
    offset: int


FIRST: Final = Place(-1, -1)


class Row(NamedTuple):
    """One record of the log: `key` is its digest, None where it has no key; `position` that in its
    batch, in bytes, -1 where it is not known."""

    offset: int
    due_ms: int
    kind: Kind
    key: bytes | None
    position: int = -1


class Pending:
    """The entries of one partition above a cursor."""

    def __init__(self, cursor: Place = FIRST, *, entries_max: int = ENTRIES_MAX) -> None:
        assert entries_max > 0, "something must be held to go on"
        self.cursor = cursor
        self._entries_max = entries_max
        self._order: list[Place] = []  # a heap; entries that are gone may still stand in it
        self._held: dict[int, tuple[int, bytes | None, int]] = {}  # offset: (due, key, position)
        self._by_key: dict[bytes, list[int]] = {}
        self._horizon: Place | None = None
        self._beyond_first = -1
        self.beyond_count = 0
        """Entries that are due beyond the horizon, those among them that were cancelled since."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def count(self) -> int:
        """All that is pending, and of what is beyond the horizon what was cancelled since."""
        return len(self._held) + self.beyond_count

    @property
    def is_exhausted(self) -> bool:
        """True when the log has to be read anew to go on."""
        return self.beyond_count > 0 and not self._held

    @property
    def is_low(self) -> bool:
        """True when the log should be read anew soon: less is held than a quarter of what may be,
        and there is more."""
        return self.beyond_count > 0 and len(self._held) < self._entries_max // 4

    @property
    def next_due_ms(self) -> int | None:
        """When the next entry is due; None: nothing is held."""
        self._drop_gone()
        return self._order[0].due_ms if self._order else None

    @property
    def first_offset(self) -> int | None:
        """The first offset that is needed; None: none is. Looks at all that is held."""
        offsets = [*self._held] if self._beyond_first < 0 else [*self._held, self._beyond_first]
        return min(offsets, default=None)

    def read(self, row: Row) -> None:
        """Take in the next record of the log."""
        if row.kind is not Kind.ADD:
            assert row.key is not None, "what cancels has a key"
            self._cancel(row.key)
        if row.kind is not Kind.CANCEL:
            self._add(row)

    def due(self, at_ms: int, count: int) -> list[Place]:
        """The first entries that are due at that time, in order; they stay."""
        found: list[Place] = []
        while len(found) < count:
            self._drop_gone()
            if not self._order or self._order[0].due_ms > at_ms:
                break
            found.append(heappop(self._order))
        for place in found:
            heappush(self._order, place)
        return found

    def position_of(self, offset: int) -> int:
        """Where an entry that is held stands in its batch; -1: that is not known."""
        return self._held[offset][2]

    def settle(self, cursor: Place) -> None:
        """Everything up to `cursor` is done with."""
        assert cursor >= self.cursor, "deliveries go forward"
        self.cursor = cursor
        while True:
            self._drop_gone()
            if not self._order or self._order[0] > cursor:
                return
            self._forget(heappop(self._order).offset)

    def _add(self, row: Row) -> None:
        place = Place(row.due_ms, row.offset)
        if place <= self.cursor:
            return
        if self._horizon is not None and place >= self._horizon:
            self._leave(place)
            return
        self._held[row.offset] = (row.due_ms, row.key, row.position)
        heappush(self._order, place)
        if row.key is not None:
            self._by_key.setdefault(row.key, []).append(row.offset)
        if len(self._held) > self._entries_max:
            self._shrink()

    def _leave(self, place: Place) -> None:
        self.beyond_count += 1
        if self._beyond_first < 0 or place.offset < self._beyond_first:
            self._beyond_first = place.offset

    def _shrink(self) -> None:
        """Let go of the later half of what is held."""
        places = sorted(Place(due_ms, offset) for offset, (due_ms, _, _) in self._held.items())
        keep = max(1, len(places) // 2)
        self._horizon = places[keep]
        for place in places[keep:]:
            self._forget(place.offset)
            self._leave(place)
        self._order = places[:keep]
        heapify(self._order)

    def _cancel(self, key: bytes) -> None:
        for offset in self._by_key.pop(key, ()):
            del self._held[offset]

    def _forget(self, offset: int) -> None:
        _, key, _ = self._held.pop(offset)
        if key is not None:
            offsets = self._by_key[key]
            offsets.remove(offset)
            if not offsets:
                del self._by_key[key]

    def _drop_gone(self) -> None:
        while self._order and self._order[0].offset not in self._held:
            heappop(self._order)
