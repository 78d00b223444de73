"""consume-skip: a group committed past records that none of its members ever polled.

At least once means that an offset is committed after its record was polled by somebody of the
group. The union of what the members of a group polled, from where the group began, must cover all
records below the highest committed offset. Only groups with subscribed members are judged: others
commit what they like.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import ClassVar

from attrs import define, field

from jepsen_like.checkers.checker import Checker
from jepsen_like.checkers.logs import Logs
from jepsen_like.checkers.verdict import Findings, Verdict
from jepsen_like.history_events import Event


@define
class Ranges:
    """A set of offsets as half-open ranges, in order, none touching another."""

    starts: list[int] = field(factory=list)
    ends: list[int] = field(factory=list)

    def add(self, start: int, end: int) -> None:
        """Include [start, end)."""
        first = bisect_left(self.ends, start)
        last = bisect_right(self.starts, end)
        if first < last:
            start = min(start, self.starts[first])
            end = max(end, self.ends[last - 1])
        self.starts[first:last] = [start]
        self.ends[first:last] = [end]

    def missing(self, end: int) -> Iterator[tuple[int, int]]:
        """What lies between the first start and `end` and is not included."""
        for position, begin in enumerate(self.ends):
            following = self.starts[position + 1] if position + 1 < len(self.starts) else end
            if begin < min(following, end):
                yield begin, min(following, end)


class ConsumeChecker(Checker):
    """Judges what groups committed by what their members polled."""

    operations: ClassVar = frozenset({"subscribe", "poll", "commit", "crash"})

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self._groups: dict[int, str] = {}
        self._polled: dict[tuple[str, str], Ranges] = {}
        self._committed: dict[tuple[str, str], tuple[int, int]] = {}

    def completed(self, event: Event, invoked: Event) -> None:
        """Gather ranges and commits."""
        if event.f == "subscribe":
            if event.type != "fail" and (group := event.group or invoked.group):
                self._groups[event.process] = group
        elif event.f == "crash":
            self._groups.pop(event.process, None)
        elif (group := self._groups.get(event.process, "")) and event.type == "ok":
            if event.f == "poll":
                for name, records in event.records.items():
                    ranges = self._polled.setdefault((group, name), Ranges())
                    self._add(ranges, [offset for offset, _ in records])
            elif invoked.group == group:
                for name, offset in invoked.offsets.items():
                    key = (group, name)
                    if offset > self._committed.get(key, (-1, -1))[0]:
                        self._committed[key] = (offset, event.op)

    def _add(self, ranges: Ranges, offsets: list[int]) -> None:
        if not offsets:
            return
        if offsets[-1] - offsets[0] == len(offsets) - 1:
            ranges.add(offsets[0], offsets[-1] + 1)
            return
        for offset in offsets:
            ranges.add(offset, offset + 1)

    def finish(self) -> Sequence[Verdict]:
        """Look for records in what is missing."""
        skip = Findings("consume-skip")
        for (group, name), (end, op) in self._committed.items():
            ranges = self._polled.get((group, name))
            if ranges is None:
                continue
            log = self._logs[name]
            for start, stop in ranges.missing(end):
                held = next(log.held(max(start, log.log_start), stop), None)
                if held is not None:
                    told = (
                        f"{end} committed, no member polled offsets {start} to {stop - 1}, "
                        f"where {held.value!r} stands at {held.offset}"
                    )
                    skip.add(f"{group} {name}", told, max(held.writer, held.reader), op)
        return [skip.verdict()]
