"""The order of what was sent, against the order of offsets.

- nonmonotonic-send: one process appended twice to a partition and the later append got the lower
  offset. For an idempotent producer appends are ordered by their invocation, pipelined or not; for
  others only where the first was acknowledged before the second began.
- int-nonmonotonic-send: the same within one operation of several records.
- realtime-send: an append began after another, of anybody, was acknowledged, and got a lower
  offset. (Jepsen finds these as cycles; a log must order them as time did.)
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

from attrs import define, field

from jepsen_like.checkers.checker import Checker
from jepsen_like.checkers.verdict import Findings, Verdict
from jepsen_like.history_events import Event


@define
class Last:
    """The highest acknowledged offset so far, and whose it is."""

    offset: int = -1
    op: int = -1
    process: int = -1


@define
class Sends:
    """What one process had acknowledged in one partition, in order of completion."""

    ops: array[int] = field(factory=lambda: array("q"))
    offsets: array[int] = field(factory=lambda: array("q"))
    last: Last = field(factory=Last)


class SendChecker(Checker):
    """Judges acknowledged offsets by process and by time."""

    operations: ClassVar = frozenset({"append"})

    def __init__(self) -> None:
        self._nonmonotonic = Findings("nonmonotonic-send")
        self._within = Findings("int-nonmonotonic-send")
        self._realtime = Findings("realtime-send")
        self._last: dict[str, Last] = {}
        self._sends: dict[tuple[int, str], Sends] = {}
        self._floors: dict[int, list[tuple[str, Last, Last]]] = {}
        """By operation under way: what was acknowledged when it began, by all and by itself."""

    def invoked(self, event: Event) -> None:
        """Remember how far the partitions were acknowledged."""
        floors = []
        for name in event.records:
            own = self._sends.get((event.process, name))
            if own is None:
                own = self._sends[event.process, name] = Sends()
            last = self._last.get(name)
            if last is None:
                last = self._last[name] = Last()
            floors.append((name, last, own.last))
        self._floors[event.op] = floors

    def completed(self, event: Event, invoked: Event) -> None:
        """Compare with what was acknowledged before it began."""
        floors = self._floors.pop(event.op)
        if event.type == "fail":
            return
        is_ordered = event.idempotent and invoked.idempotent
        for name, last, own in floors:
            offsets = [offset for offset, _ in event.records.get(name, ()) if offset >= 0]
            if not offsets:
                continue
            lowest = offsets[0] if len(offsets) == 1 else self._look_within(name, offsets, event)
            if lowest <= last.offset and last.process != event.process:
                told = f"offset {lowest} after {last.offset} had been acknowledged"
                self._realtime.add(name, told, last.op, event.op)
            sends = self._sends[event.process, name]
            if is_ordered:
                sends.ops.append(event.op)
                sends.offsets.append(lowest)
            elif lowest <= own.offset:
                told = f"offset {lowest} after its own {own.offset} had been acknowledged"
                self._nonmonotonic.add(name, told, own.op, event.op)
            highest = max(offsets)
            if highest > sends.last.offset:
                sends.last = Last(highest, event.op, event.process)
            if highest > self._last[name].offset:
                self._last[name] = Last(highest, event.op, event.process)

    def _look_within(self, name: str, offsets: list[int], event: Event) -> int:
        for one, other in pairwise(offsets):
            if other <= one:
                told = f"offset {other} after {one} in one operation"
                self._within.add(name, told, event.op)
        return min(offsets)

    def finish(self) -> Sequence[Verdict]:
        """Judge pipelined appends in order of invocation."""
        for (process, name), sends in self._sends.items():
            pairs = list(zip(sends.ops, sends.offsets, strict=True))
            if any(later[0] < earlier[0] for earlier, later in pairwise(pairs)):
                pairs.sort()
            for (op, offset), (op_later, offset_later) in pairwise(pairs):
                if offset_later <= offset:
                    told = f"process {process} got offset {offset_later} after {offset}"
                    self._nonmonotonic.add(name, told, op, op_later)
            pairs.clear()
        return [f.verdict() for f in (self._nonmonotonic, self._within, self._realtime)]
