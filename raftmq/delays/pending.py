"""The pending entries of one delay partition, which lie above a cursor, in bounded memory.

Fed with the committed log in its order, from the log start on. Entries are ordered by (due time,
offset), and all up to the cursor are done with: delivered, or cancelled before they were due. They
stand in three parts of that order:

    near     what is due next: objects in a heap, a few thousand
    far      all behind it: `Run`s of arrays, and the youngest ones until they fill another run
    beyond   what is due after the first `entries_max`: only counted, and found by another reading
             of the log once little is held

Whenever near has less than is asked for the next entries of all runs move there.

Invariants: what is held is exactly what of the log that was read is pending, above the cursor and
below what is beyond; near ends where far begins. `first_offset` is never above the offset of
anything that is pending, so nothing below it is needed any more. There are never two runs of which
either would fill less than half of one for long, so that arrays hold at most some two places for
each entry.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace, nsmallest
from typing import Final, NamedTuple

from raftmq.delays.headers import Kind
from raftmq.delays.runs import Entry, Place, Run, merged

ENTRY_BYTES: Final = 46
"""Of memory for an entry that is far and has a key."""
ENTRIES_MAX: Final = 1_000_000
NEAR_MAX: Final = 2_048
"""Entries that are near, and so many of the youngest far ones: 500 to 900 bytes each."""
RUN_MAX: Final = 8_192
"""Entries of a run: some milliseconds are enough to merge two."""
FIRST: Final = Place(-1, -1)

_SAMPLE: Final = 1_024


class Row(NamedTuple):
    """One record of the log: `key` is its digest, None where it has no key; `position` that in its
    batch, in bytes, -1 where it is not known."""

    offset: int
    due_ms: int
    kind: Kind
    key: bytes | None
    position: int = -1


class _Table:
    """Entries by offset and by key."""

    __slots__ = ("by_key", "held")

    def __init__(self) -> None:
        self.held: dict[int, Entry] = {}
        self.by_key: dict[bytes, list[int]] = {}

    def __len__(self) -> int:
        return len(self.held)

    def add(self, entry: Entry) -> None:
        """Take in another one."""
        self.held[entry.offset] = entry
        if entry.key is not None:
            self.by_key.setdefault(entry.key, []).append(entry.offset)

    def cancel(self, key: bytes) -> int:
        """Take out all of a key; how many there were."""
        offsets = self.by_key.pop(key, ())
        for offset in offsets:
            del self.held[offset]
        return len(offsets)

    def remove(self, offset: int) -> None:
        """Take out one."""
        key = self.held.pop(offset).key
        if key is not None:
            offsets = self.by_key[key]
            offsets.remove(offset)
            if not offsets:
                del self.by_key[key]

    def clear(self) -> list[Entry]:
        """Take out all, in order."""
        entries = sorted(self.held.values())
        self.held.clear()
        self.by_key.clear()
        return entries


class Pending:
    """The entries of one partition above a cursor."""

    def __init__(self, cursor: Place = FIRST, *, entries_max: int = ENTRIES_MAX) -> None:
        assert entries_max > 0, "something must be held to go on"
        self.cursor = cursor
        self._entries_max = entries_max
        self._near_max = max(1, min(NEAR_MAX, entries_max // 4))
        self._near = _Table()
        self._order: list[Place] = []  # a heap; entries that are gone may still stand in it
        self._near_end: Place | None = None  # None: nothing is far
        self._young = _Table()
        self._runs: list[Run] = []
        self._far_count = 0
        self._end: Place | None = None  # what is beyond begins there
        self._beyond_first = -1
        self.beyond_count = 0
        """Entries that are due beyond what is held, those among them that were cancelled since."""

    def __len__(self) -> int:
        return len(self._near) + self._far_count

    @property
    def count(self) -> int:
        """All that is pending, and of what is beyond what was cancelled since."""
        return len(self) + self.beyond_count

    @property
    def is_exhausted(self) -> bool:
        """True when the log has to be read anew to go on."""
        return self.beyond_count > 0 and not len(self)

    @property
    def is_low(self) -> bool:
        """True when the log should be read anew soon: less is held than a quarter of what may be,
        and there is more."""
        return self.beyond_count > 0 and len(self) < self._entries_max // 4

    @property
    def next_due_ms(self) -> int | None:
        """When the next entry is due; None: nothing is held."""
        self._drop_gone()
        if not self._order and self._far_count:
            self._load()
        return self._order[0].due_ms if self._order else None

    @property
    def first_offset(self) -> int | None:
        """The first offset that is needed; None: none is."""
        offsets = [run.first_offset for run in self._runs]
        offsets += [min(table.held) for table in (self._near, self._young) if table.held]
        offsets += [self._beyond_first] if self._beyond_first >= 0 else []
        return min(offsets, default=None)

    def read(self, row: Row) -> None:
        """Take in the next record of the log."""
        if row.kind is not Kind.ADD:
            assert row.key is not None, "what cancels has a key"
            self._cancel(row.key)
        if row.kind is not Kind.CANCEL:
            self._add(row)

    def allow(self, entries_max: int) -> None:
        """From now on so many entries may be held; what is due last goes where there are more."""
        self._entries_max = entries_max
        while len(self) > entries_max:
            self._cut()

    def due(self, at_ms: int, count: int) -> list[Place]:
        """The first entries that are due at that time, in order; they stay."""
        while len(self._near) < count and self._far_count and self._begins_by(at_ms):
            self._load()
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
        """Where an entry that is due stands in its batch; -1: that is not known."""
        return self._near.held[offset].position

    def settle(self, cursor: Place) -> None:
        """Everything up to `cursor` is done with."""
        assert cursor >= self.cursor, "deliveries go forward"
        self.cursor = cursor
        while True:
            self._drop_gone()
            if not self._order or self._order[0] > cursor:
                break
            self._near.remove(heappop(self._order).offset)
        if self._near_end is not None and cursor >= self._near_end:
            self._seal()
            self._far_count -= sum(run.drop_up_to(cursor) for run in self._runs)
            self._tidy()

    def _add(self, row: Row) -> None:
        place = row.due_ms, row.offset
        if place <= self.cursor:
            return
        if self._end is not None and place >= self._end:
            self._leave(1, row.offset)
            return
        entry = Entry(row.due_ms, row.offset, row.position, row.key)
        if self._near_end is None or place < self._near_end:
            self._near.add(entry)
            heappush(self._order, entry.place)
            if len(self._near) > self._near_max:
                self._push_back()
        else:
            self._young.add(entry)
            self._far_count += 1
            if len(self._young.held) >= self._near_max:
                self._seal()
                self._merge()
        if self._far_count + len(self._near.held) > self._entries_max:
            self._cut()

    def _leave(self, count: int, first_offset: int) -> None:
        self.beyond_count += count
        if count and (self._beyond_first < 0 or first_offset < self._beyond_first):
            self._beyond_first = first_offset

    def _cancel(self, key: bytes) -> None:
        self._near.cancel(key)
        gone = self._young.cancel(key)
        from_runs = sum([run.cancel(key) for run in self._runs])
        self._far_count -= gone + from_runs
        if from_runs:
            self._tidy()

    def _drop_gone(self) -> None:
        while self._order and self._order[0].offset not in self._near.held:
            heappop(self._order)

    # ---- near and far ----

    def _begins_by(self, at_ms: int) -> bool:
        """True when something that is far may be due."""
        return self._near_end is not None and self._near_end.due_ms <= at_ms

    def _push_back(self) -> None:
        """The later half of what is near is far from now on."""
        entries = self._near.clear()
        keep = max(1, len(entries) // 2)
        self._near_end = entries[keep].place
        self._runs.append(Run(entries[keep:]))
        self._far_count += len(entries) - keep
        self._order = []
        self._come_near(entries[:keep])
        self._merge()

    def _load(self) -> None:
        """The next ones of what is far are near from now on."""
        self._seal()
        self._merge()
        heads = [(head, n) for n, run in enumerate(self._runs) if (head := run.head) is not None]
        heapify(heads)
        entries: list[Entry] = []
        while heads and len(entries) < max(1, self._near_max // 2):
            number = heads[0][1]
            entries.append(self._runs[number].pop())
            head = self._runs[number].head
            if head is None:
                heappop(heads)
            else:
                heapreplace(heads, (head, number))
        self._far_count -= len(entries)
        self._near_end = heads[0][0] if heads else None
        self._come_near(entries)
        self._tidy()

    def _come_near(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._near.add(entry)
            heappush(self._order, entry.place)

    def _seal(self) -> None:
        """The youngest become a run."""
        if len(self._young):
            self._runs.append(Run(self._young.clear()))

    def _merge(self) -> None:
        """Make one run of the two smallest where they fit into one: once for each piece of work, so
        that nothing takes long."""
        if len(self._runs) > 1:
            one, other = nsmallest(2, self._runs, key=_live)
            if one.live + other.live <= RUN_MAX:
                self._runs = [run for run in self._runs if run is not one and run is not other]
                self._runs.append(merged((one, other)))

    def _tidy(self) -> None:
        self._runs = [run for run in self._runs if run.live]

    def _cut(self) -> None:
        """Let go of the last quarter of what is far, by a sample of it."""
        if not self._far_count:
            self._push_back()
        self._seal()
        step = max(1, self._far_count // _SAMPLE)
        sample = sorted(place for run in self._runs for place in run.places(step))
        if not sample:
            sample = sorted(place for run in self._runs for place in run.places(1))
        self._end = sample[len(sample) * 3 // 4]
        for run in self._runs:
            count, first_offset = run.cut(self._end)
            self._far_count -= count
            self._leave(count, first_offset)
        self._tidy()


def _live(run: Run) -> int:
    return run.live
