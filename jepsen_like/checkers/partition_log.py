"""One partition's log as clients saw it: what was acknowledged and polled at which offset.

Filled in one pass, read by the checkers at the end. Per offset it keeps the value, the operation
that was told it as an acknowledgement, the first that polled it and two bits; what two clients saw
differently is kept apart, as a conflict. Values are unique within a partition, or it is an anomaly.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from enum import Enum

from attrs import define, field

from jepsen_like.history_events import Value

CHUNK = 4096
ACKED, POLLED, PLAIN = 1, 2, 4
"""Bits of an offset: acknowledged, polled, sent without a promise of once and in order."""


class Outcome(Enum):
    """What came of noting one sight of one offset."""

    KNOWN = 0
    NEW = 1
    CONFLICT = 2


class Chunk:
    """Some consecutive offsets; None where nothing was seen."""

    __slots__ = ("flags", "readers", "values", "writers")

    def __init__(self) -> None:
        self.values: list[Value | None] = [None] * CHUNK
        self.flags = bytearray(CHUNK)
        self.writers = array("q", [-1]) * CHUNK
        self.readers = array("q", [-1]) * CHUNK


@define
class Sight:
    """A value seen where another stood before."""

    value: Value
    flags: int
    op: int


@define
class Held:
    """An offset as known in the end."""

    offset: int
    value: Value
    flags: int
    writer: int
    reader: int


@define
class PartitionLog:
    """What is known of one partition."""

    name: str
    chunks: dict[int, Chunk] = field(factory=dict)
    conflicts: dict[int, list[Sight]] = field(factory=dict)
    sent: dict[Value, int] = field(factory=dict)
    """Values under way, or unknown for ever, with the operation that sent them."""
    unplaced: dict[Value, int] = field(factory=dict)
    """Acknowledged without an offset, not polled yet."""
    failed: dict[Value, int] = field(factory=dict)
    plain: set[Value] = field(factory=set)
    """Among `sent`: those that may come twice or out of order."""
    acked_end: int = 0
    acked_last_op: int = -1
    polled_end: int = 0
    polled_last_op: int = -1
    log_start: int = 0
    """The highest log start that anybody asked for or was told."""

    def see(self, offset: int, value: Value, flag: int, op: int) -> Outcome:
        """Note that `op` was told that `value` stands at `offset`."""
        chunk = self.chunks.get(offset // CHUNK)
        if chunk is None:
            chunk = self.chunks[offset // CHUNK] = Chunk()
        slot = offset % CHUNK
        held = chunk.values[slot]
        outcome = Outcome.KNOWN
        if held is None:
            chunk.values[slot] = value
            outcome = Outcome.NEW
        elif held != value:
            self._note_conflict(offset, value, flag, op)
            return Outcome.CONFLICT
        chunk.flags[slot] |= flag
        if flag & ACKED:
            chunk.writers[slot] = op
        elif chunk.readers[slot] < 0:
            chunk.readers[slot] = op
        return outcome

    def _note_conflict(self, offset: int, value: Value, flag: int, op: int) -> None:
        sights = self.conflicts.setdefault(offset, [])
        for sight in sights:
            if sight.value == value:
                sight.flags |= flag
                return
        sights.append(Sight(value, flag, op))

    def value_at(self, offset: int) -> Value | None:
        """What was first seen at an offset."""
        chunk = self.chunks.get(offset // CHUNK)
        return None if chunk is None else chunk.values[offset % CHUNK]

    def at(self, offset: int) -> Held | None:
        """What stands at an offset, as first seen."""
        chunk = self.chunks.get(offset // CHUNK)
        slot = offset % CHUNK
        if chunk is None or chunk.values[slot] is None:
            return None
        return self._held(chunk, offset, slot)

    def held(self, start: int = 0, end: int | None = None) -> Iterator[Held]:
        """What is known of the offsets from `start` up to `end`, in order."""
        numbers: Iterable[int] = sorted(self.chunks)
        if end is not None and (end - start) // CHUNK < len(self.chunks):
            numbers = range(start // CHUNK, (end - 1) // CHUNK + 1)
        for number in numbers:
            base = number * CHUNK
            chunk = self.chunks.get(number)
            if chunk is None or base + CHUNK <= start or (end is not None and base >= end):
                continue
            first = max(start - base, 0)
            last = CHUNK if end is None else min(end - base, CHUNK)
            for slot in range(first, last):
                if chunk.values[slot] is not None:
                    yield self._held(chunk, base + slot, slot)

    def _held(self, chunk: Chunk, offset: int, slot: int) -> Held:
        value = chunk.values[slot]
        assert value is not None
        flags = chunk.flags[slot]
        return Held(offset, value, flags, chunk.writers[slot], chunk.readers[slot])

    def unread(self) -> list[Held]:
        """Acknowledged offsets that nobody polled; skips quickly over all others."""
        found: list[Held] = []
        for number in sorted(self.chunks):
            chunk = self.chunks[number]
            for flags in (ACKED, ACKED | PLAIN):
                slot = chunk.flags.find(flags)
                while slot >= 0:
                    found.append(self._held(chunk, number * CHUNK + slot, slot))
                    slot = chunk.flags.find(flags, slot + 1)
        found.sort(key=lambda held: held.offset)
        return found

    def polled_values(self) -> set[Value]:
        """Everything that was polled anywhere."""
        polled = {held.value for held in self.held() if held.flags & POLLED}
        for sights in self.conflicts.values():
            polled.update(sight.value for sight in sights if sight.flags & POLLED)
        return polled

    def senders(self) -> dict[Value, int]:
        """Which operation sent each value."""
        senders = {held.value: held.writer for held in self.held() if held.flags & ACKED}
        for sights in self.conflicts.values():
            senders.update({sight.value: sight.op for sight in sights if sight.flags & ACKED})
        return {**senders, **self.sent, **self.unplaced}

    def repeated(self) -> dict[Value, list[int]]:
        """Values that stand at more than one offset, with these."""
        seen: set[Value] = set()
        twice: set[Value] = set()
        for chunk in self.chunks.values():
            known = [value for value in chunk.values if value is not None]
            before = len(seen)
            seen.update(known)
            if len(seen) < before + len(known):
                twice.update(self._standing_twice())
                break
        for sights in self.conflicts.values():
            twice.update(sight.value for sight in sights)
        if not twice:
            return {}
        where: dict[Value, list[int]] = {}
        for held in self.held():
            if held.value in twice:
                where.setdefault(held.value, []).append(held.offset)
        for offset, sights in self.conflicts.items():
            for sight in sights:
                where.setdefault(sight.value, []).append(offset)
        return {value: sorted(offsets) for value, offsets in where.items() if len(offsets) > 1}

    def may_repeat(self, value: Value, offsets: list[int]) -> bool:
        """True for a value whose producer never promised to write it once."""
        held = (self.at(offset) for offset in offsets)
        return value in self.plain or any(
            h is not None and h.value == value and h.flags & PLAIN for h in held
        )

    def _standing_twice(self) -> set[Value]:
        seen: set[Value] = set()
        found: set[Value] = set()
        for held in self.held():
            (found if held.value in seen else seen).add(held.value)
        return found
