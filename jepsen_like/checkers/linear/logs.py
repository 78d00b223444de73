"""linear-log: each partition is a log; appends take its end, reads show what stands before it.

A poll promises a prefix and no freshness (Kafka's Fetch may come from a replica that is behind), so
it asks only that what it shows existed by then. A `read` shows everything from its position up to
the end, an `end_offset` the end alone; marked `stale` they are polls too. What stands at which
offset is known from the whole history, so a search need only place the appends in time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import ClassVar

from attrs import define, field, frozen

from jepsen_like.checkers.linear.checks import Bounds, Judgement, MomentChecker, Taken
from jepsen_like.checkers.linear.models import Log
from jepsen_like.checkers.linear.search import FOREVER, Action, Call
from jepsen_like.checkers.logs import Logs
from jepsen_like.checkers.partition_log import PartitionLog
from jepsen_like.checkers.verdict import Verdict
from jepsen_like.history_events import Event, Value


@frozen
class Seen:
    """One operation on one partition, until its offsets are known."""

    op: int
    f: str
    begin: int
    end: int
    records: tuple[tuple[int, Value], ...]
    log_end: int = -1
    """Where a read or an end_offset says that the log ends."""


@define
class Partition:
    """What was taken of one partition."""

    seen: list[Seen] = field(factory=list)
    cut: int = FOREVER


class PartitionLogs(MomentChecker):
    """Gathers appends and reads, and searches at the end, when all offsets are known."""

    operations: ClassVar = frozenset({"append", "poll", "read", "end_offset"})

    def __init__(self, logs: Logs, bounds: Bounds, *, gaps_allowed: bool = False) -> None:
        super().__init__(bounds)
        self._logs = logs
        self._gaps_allowed = gaps_allowed
        self._partitions: dict[str, Partition] = {}

    def take(self, event: Event, invoked: Event, begin: int, end: int) -> None:
        """Take what happened, or may have."""
        if event.type == "fail" or (event.f != "append" and event.type != "ok"):
            return
        if event.f == "end_offset":
            for name, log_end in event.offsets.items():
                f = "poll" if event.stale or invoked.stale else event.f
                self._add(name, Seen(event.op, f, begin, end, (), log_end))
            return
        if event.f == "append" and event.type == "info":
            self._add_partly(event, invoked, begin)
            return
        if event.f == "append":
            for name, records in (event.records or invoked.records).items():
                self._add(name, Seen(event.op, "append", begin, end, tuple(records)))
            return
        is_fresh = event.f == "read" and not (event.stale or invoked.stale)
        for name in dict.fromkeys([*event.records, *(invoked.offsets if is_fresh else ())]):
            told = tuple(event.records.get(name, ()))
            log_end = told[-1][0] + 1 if told else invoked.offsets.get(name, 0)
            f = "read" if is_fresh else "poll"
            self._add(name, Seen(event.op, f, begin, end, told, log_end if is_fresh else -1))

    def _add_partly(self, event: Event, invoked: Event, begin: int) -> None:
        """Of an append that ended unknown: what has an offset is certain, the rest is not."""
        for name, records in invoked.records.items():
            placed = tuple(row for row in event.records.get(name, ()) if row[0] >= 0)
            if placed:
                self._add(name, Seen(event.op, "append", begin, self._moment, placed))
            known = {value for _, value in placed}
            rest = tuple(row for row in records if row[1] not in known)
            if rest:
                self._add(name, Seen(event.op, "append", begin, FOREVER, rest))

    def _add(self, name: str, seen: Seen) -> None:
        partition = self._partitions.get(name)
        if partition is None:
            partition = self._partitions[name] = Partition()
        if seen.begin > partition.cut:
            return
        partition.seen.append(seen)
        if partition.cut == FOREVER and len(partition.seen) >= self.bounds.calls_max:
            partition.cut = self._moment

    def finish(self) -> Sequence[Verdict]:
        """Search each log."""
        judgement = Judgement("linear-log", self.bounds)
        for name, partition in self._partitions.items():
            judgement.is_cut |= partition.cut < FOREVER
            log = self._logs[name]
            told_end = max((seen.log_end for seen in partition.seen), default=-1)
            starts, ends = _holes(log, told_end)
            model = Log(starts, ends, self._gaps_allowed)
            taken = Taken(cut=partition.cut)
            for call in self._calls(log, partition.seen):
                taken.add(call, FOREVER)
            judgement.search(name, model, taken.calls)
        return [judgement.verdict()]

    def _calls(self, log: PartitionLog, seen: list[Seen]) -> Iterator[Call]:
        unplaced = {
            value: -1
            for each in seen
            if each.f == "append"
            for offset, value in each.records
            if offset < 0 or each.end == FOREVER
        }
        again = {
            value: offsets
            for value, offsets in log.repeated().items()
            if log.may_repeat(value, offsets)
        }
        if unplaced:
            for held in log.held():
                if unplaced.get(held.value, 0) < 0:
                    unplaced[held.value] = held.offset
        for each in seen:
            if each.f != "append":
                is_end = each.log_end >= 0 and each.f != "poll"
                yield Call(
                    each.op, self._shown(log, each, is_end=is_end), each.begin, each.end, True
                )
                continue
            for action, is_known in _runs(log, each, unplaced):
                yield Call(each.op, action, each.begin, each.end if is_known else FOREVER)
            for own, value in each.records if again else ():
                for offset in again.get(value, ()):
                    if offset not in (own, unplaced.get(value)):
                        yield Call(each.op, ("append", offset, offset + 1), each.begin)

    def _shown(self, log: PartitionLog, seen: Seen, *, is_end: bool) -> Action:
        for offset, value in seen.records:
            if log.value_at(offset) != value:
                return ("contradiction", offset)
        if is_end:
            return ("end", seen.log_end)
        return ("poll", max([seen.log_end, *(offset + 1 for offset, _ in seen.records)]))


def _runs(
    log: PartitionLog, seen: Seen, unplaced: dict[Value, int]
) -> Iterator[tuple[Action, bool]]:
    """An append's records as runs of offsets; False with those that may never have happened."""
    offsets = [
        offset if offset >= 0 and seen.end < FOREVER else unplaced[value]
        for offset, value in seen.records
    ]
    for offset in offsets:
        if offset < 0:  # one by one: some of an operation's records may have been seen, some not
            yield ("append ?",), False
    placed = [
        (offset, value)
        for offset, (_, value) in zip(offsets, seen.records, strict=True)
        if offset >= 0
    ]
    for offset, value in placed:
        if log.value_at(offset) != value:
            yield ("contradiction", offset), True
            return
    first = 0
    for position in range(1, len(placed) + 1):
        if position == len(placed) or placed[position][0] != placed[position - 1][0] + 1:
            yield ("append", placed[first][0], placed[position - 1][0] + 1), True
            first = position


def _holes(log: PartitionLog, told_end: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ranges at which nothing was seen; the last has no end if the log was told to go on there."""
    starts: list[int] = []
    ends: list[int] = []
    offsets = [held.offset for held in log.held()]
    for one, other in pairwise([-1, *offsets]):
        if other > one + 1:
            starts.append(one + 1)
            ends.append(other)
    known_end = offsets[-1] + 1 if offsets else 0
    if told_end > known_end:
        starts.append(known_end)
        ends.append(FOREVER)
    return tuple(starts), tuple(ends)
