"""ViewEqualsFilter: what a view gave is what its condition says of the committed records of its
base, up to the same offset: none is missing, none is too many, none comes twice or out of order.

`view_made` names a view, its base and the tags that it shows; the tag of a record follows from its
value (`tag_of`), and what is committed in a base is what its readers polled. A reader of a view
(`poll_view`) has a position as `polls.py` knows it: given by `offsets` when it asks, behind all
that it was given and all that it was told to have passed, and unknown after a rebalance. What
stands in the base between two positions and has one of the tags had to be given. The members of a
group together have to be given all that lies below what the group committed.

Where the run ended with a look at everything (`must_see_all`), every match has to have been passed
by somebody, and what nobody found in the base was given too much.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Final

from attrs import define, field, frozen

from jepsen_like.checkers.checker import Checker
from jepsen_like.checkers.verdict import Findings, Verdict
from jepsen_like.history_events import Event, Value

NAME: Final = "ViewEqualsFilter"
TAGS: Final = ("red", "green", "blue", "")


def tag_of(value: int) -> str:
    """The tag of a record with that value; "" where it has none. Runs of values have the same,
    those that count up by ones and those that count up by 256."""
    return TAGS[((value >> 2) ^ (value >> 12)) & 3]


@frozen
class Shown:
    """A view."""

    base: str
    tags: frozenset[str]

    def has(self, value: Value) -> bool:
        """True where it shows the record of that value."""
        return tag_of(int(value)) in self.tags


@define(eq=False)
class Reading:
    """What one process was given of one partition of a view."""

    position: int = -1
    """Of what comes next; -1: unknown."""
    given: set[int] = field(factory=set)
    passed: list[tuple[int, int]] = field(factory=list)
    """Half-open ranges of offsets in which nothing may be missing."""

    def pass_to(self, end: int) -> None:
        """It went on to there."""
        start, self.position = self.position, end
        if not 0 <= start < end:
            return
        if self.passed and self.passed[-1][1] == start:
            start = self.passed.pop()[0]
        self.passed.append((start, end))


class ViewChecker(Checker):
    """Compares views with their bases."""

    operations: ClassVar = frozenset({"view_made", "poll", "poll_committed", "poll_view", "commit"})

    def __init__(self, *, must_see_all: bool = True) -> None:
        self._must_see_all = must_see_all
        self._findings = Findings(NAME)
        self._views: dict[str, Shown] = {}
        self._bases: dict[str, dict[int, Value]] = {}
        """What stands in partitions of bases, by topic and partition."""
        self._base_topics: set[str] = set()
        self._readings: dict[tuple[int, str], Reading] = {}
        self._shown: dict[str, dict[int, tuple[Value, int]]] = {}
        """What a view gave at an offset, and by which operation."""
        self._given: dict[tuple[str, str], set[int]] = {}
        """By group and partition."""
        self._committed: dict[tuple[str, str], tuple[int, int]] = {}

    def completed(self, event: Event, invoked: Event) -> None:
        """Gather what stands in bases, and follow readers of views."""
        if event.f == "view_made":
            view, base = event.topics
            self._views[view] = Shown(base, frozenset(event.tags))
            self._base_topics.add(base)
        elif event.f == "commit":
            if event.type == "ok":
                self._commit(invoked)
        elif event.f == "poll_view":
            self._polled(event, invoked)
        else:
            for name, rows in event.records.items():
                if name.rpartition("-")[0] in self._base_topics:
                    self._bases.setdefault(name, {}).update(rows)

    def _commit(self, invoked: Event) -> None:
        for name, offset in invoked.offsets.items():
            if name.rpartition("-")[0] in self._views:
                key = invoked.group, name
                before = self._committed.get(key, (-1, -1))
                self._committed[key] = max(before, (offset, invoked.op))

    def _polled(self, event: Event, invoked: Event) -> None:
        for name, offset in invoked.offsets.items():
            self._reading(event, name).position = offset
        for name in event.partitions:
            self._reading(event, name).position = -1
        for name, rows in event.records.items():
            self._rows(event, name, rows, is_moved=name in event.partitions)
        for name, end in event.offsets.items():
            if name not in event.partitions:
                reading = self._reading(event, name)
                reading.pass_to(max(end, reading.position))

    def _reading(self, event: Event, name: str) -> Reading:
        return self._readings.setdefault((event.process, name), Reading())

    def _rows(
        self, event: Event, name: str, rows: list[tuple[int, Value]], *, is_moved: bool
    ) -> None:
        view = self._views[name.rpartition("-")[0]]
        reading, shown = self._reading(event, name), self._shown.setdefault(name, {})
        for offset, value in rows:
            if offset < reading.position and not is_moved:
                told = f"process {event.process} was given {offset}, {reading.position} was next"
                self._findings.add(name, told, event.op)
            if not view.has(value):
                self._findings.add(name, f"{value} at {offset} does not match", event.op)
            shown.setdefault(offset, (value, event.op))
            if shown[offset][0] != value:
                told = f"{shown[offset][0]} and {value} at {offset}"
                self._findings.add(name, told, shown[offset][1], event.op)
            reading.given.add(offset)
            if event.group:
                self._given.setdefault((event.group, name), set()).add(offset)
            if not is_moved:
                if reading.position < 0:
                    reading.position = offset
                reading.pass_to(offset + 1)

    def finish(self) -> Sequence[Verdict]:
        """Compare, now that all is known of the bases."""
        matches = {
            f"{view}-{name.rpartition('-')[2]}": {
                offset: value for offset, value in rows.items() if shown.has(value)
            }
            for view, shown in self._views.items()
            for name, rows in self._bases.items()
            if name.rpartition("-")[0] == shown.base
        }
        ordered = {name: sorted(rows) for name, rows in matches.items()}
        for (process, name), reading in self._readings.items():
            for start, end in reading.passed:
                for offset in _between(ordered.get(name, ()), start, end):
                    if offset not in reading.given:
                        told = f"process {process} was not given {offset}, in [{start}, {end})"
                        self._findings.add(name, told)
        for (group, name), (end, op) in self._committed.items():
            for offset in _between(ordered.get(name, ()), 0, end):
                if offset not in self._given.get((group, name), ()):
                    told = f"{group} committed {end}, and nobody was given {offset}"
                    self._findings.add(name, told, op)
        if self._must_see_all:
            self._all(ordered)
        self._compare()
        return [self._findings.verdict()]

    def _compare(self) -> None:
        """What was given stands in the base."""
        for name, shown in self._shown.items():
            view, _, partition = name.rpartition("-")
            base = self._bases.get(f"{self._views[view].base}-{partition}", {})
            for offset, (value, op) in shown.items():
                other = base.get(offset)
                if other != value and (other is not None or self._must_see_all):
                    told = f"{value} at {offset}, where the base has {other}"
                    self._findings.add(name, told, op)

    def _all(self, ordered: Mapping[str, Sequence[int]]) -> None:
        ends: dict[str, int] = {}
        for (_, name), reading in self._readings.items():
            ends[name] = max(ends.get(name, 0), *(end for _, end in reading.passed), 0)
        for name, offsets in ordered.items():
            if offsets and offsets[-1] >= ends.get(name, 0):
                told = f"nobody came behind {ends.get(name, 0)}, {offsets[-1]} matches"
                self._findings.add(name, told)


def _between(offsets: Sequence[int], start: int, end: int) -> Iterator[int]:
    yield from offsets[bisect_left(offsets, start) : bisect_left(offsets, end)]
