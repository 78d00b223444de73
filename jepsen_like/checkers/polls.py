"""The order of what was polled: no process goes back, none leaves something out.

- nonmonotonic-poll, poll-skip: between two polls of one process.
- int-nonmonotonic-poll, int-poll-skip: within one poll.
- offset-gap: a poll jumps over offsets at which nothing was ever seen. Without transactions and
  compaction offsets are dense; with them (`gaps_allowed`) the jump is excused.

What a process expects next is a position per partition, as a consumer holds it. `assign` names
positions (a seek) or keeps those of partitions that stay assigned; `assigned` and `revoked` move
partitions of a group's member: what is revoked is forgotten, what comes starts unknown or where the
note says; `subscribe` and `crash` forget everything. A partition that a poll names in `partitions`
was rebalanced while it ran: nothing is claimed of it (Jepsen's rebalance log). Only ok polls move a
position. What lies below a log start that anybody had asked for by then may be missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from attrs import frozen

from jepsen_like.checkers.checker import Checker
from jepsen_like.checkers.logs import Logs
from jepsen_like.checkers.verdict import Findings, Verdict
from jepsen_like.history_events import Event, Value


@frozen
class Position:
    """What a process reads next of a partition, and since which operation."""

    offset: int
    op: int


@frozen
class Jump:
    """Offsets left out: [start, end)."""

    name: str
    start: int
    end: int
    ops: tuple[int, ...]
    is_within: bool


class PollChecker(Checker):
    """Follows each process through its partitions."""

    operations: ClassVar = frozenset(
        {"poll", "assign", "subscribe", "assigned", "revoked", "crash"}
    )

    def __init__(self, logs: Logs, *, gaps_allowed: bool = False) -> None:
        self._logs = logs
        self._gaps_allowed = gaps_allowed
        self._back = Findings("nonmonotonic-poll")
        self._back_within = Findings("int-nonmonotonic-poll")
        self._jumps: list[Jump] = []
        self._positions: dict[int, dict[str, Position]] = {}

    def completed(self, event: Event, invoked: Event) -> None:
        """Follow."""
        positions = self._positions.setdefault(event.process, {})
        if event.f == "poll":
            self._polled(event, invoked, positions)
        elif event.f in ("subscribe", "crash"):
            if event.type != "fail":
                positions.clear()
        elif event.f == "revoked":
            for name in event.partitions:
                positions.pop(name, None)
        elif event.type != "fail":
            self._assigned(event, invoked, positions)

    def _assigned(self, event: Event, invoked: Event, positions: dict[str, Position]) -> None:
        """Keep what stays, seek where positions are named."""
        offsets = event.offsets or invoked.offsets
        kept = {*(event.partitions or invoked.partitions), *offsets}
        for name in [name for name in positions if name not in kept]:
            del positions[name]
        if event.type == "ok":
            for name, offset in offsets.items():
                positions[name] = Position(offset, event.op)
        else:
            positions.clear()

    def _polled(self, event: Event, invoked: Event, positions: dict[str, Position]) -> None:
        rebalanced = {*event.partitions, *invoked.partitions}
        for name, offset in invoked.offsets.items():
            positions[name] = Position(offset, event.op)
        for name, records in event.records.items():
            if not records:
                continue
            if name in rebalanced:
                positions.pop(name, None)
                continue
            position = positions.get(name)
            first = records[0][0]
            if position is not None and first != position.offset:
                self._moved(name, position, first, event)
            end = self._look_within(name, records, event.op)
            if event.type == "ok":
                positions[name] = Position(end, event.op)
        if event.type == "ok":
            for name in rebalanced:
                positions.pop(name, None)

    def _moved(self, name: str, position: Position, first: int, event: Event) -> None:
        if first < position.offset:
            told = f"process {event.process} polled offset {first}, {position.offset} was next"
            self._back.add(name, told, position.op, event.op)
            return
        ops = (position.op, event.op) if position.op != event.op else (event.op,)
        self._jumped(name, position.offset, first, ops, is_within=False)

    def _jumped(
        self, name: str, start: int, end: int, ops: tuple[int, ...], *, is_within: bool
    ) -> None:
        start = max(start, self._logs[name].log_start)
        if start < end:
            self._jumps.append(Jump(name, start, end, ops, is_within))

    def _look_within(self, name: str, records: list[tuple[int, Value]], op: int) -> int:
        """Compare neighbours; the position after the poll."""
        expected = records[0][0]
        for offset, _ in records:
            if offset != expected:
                if offset < expected:
                    told = f"offset {offset} follows {expected - 1} in one poll"
                    self._back_within.add(name, told, op)
                else:
                    self._jumped(name, expected, offset, (op,), is_within=True)
            expected = offset + 1
        return expected

    def finish(self) -> Sequence[Verdict]:
        """Look at what the jumps left out, now that all is known."""
        skip, skip_within = Findings("poll-skip"), Findings("int-poll-skip")
        gap = Findings("offset-gap")
        for jump in self._jumps:
            held = next(self._logs[jump.name].held(jump.start, jump.end), None)
            where = f"offsets {jump.start} to {jump.end - 1}"
            if held is not None:
                findings = skip_within if jump.is_within else skip
                told = f"{where} left out, where {held.value!r} stands at {held.offset}"
                findings.add(jump.name, told, *jump.ops, max(held.writer, held.reader))
            elif self._gaps_allowed:
                gap.excused += 1
            else:
                gap.add(jump.name, f"{where} do not exist for this poll nor for any", *jump.ops)
        found = (self._back, self._back_within, skip, skip_within, gap)
        return [findings.verdict() for findings in found]
