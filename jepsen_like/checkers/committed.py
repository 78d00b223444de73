"""Committed offsets: one register per group and partition, and no way back.

In one pass, for histories of any length (linear/ finds what needs a search):

- phantom-commit: a group was told an offset that nobody had tried to commit.
- lost-commit: a group was told an offset that had certainly been overwritten before it asked.
- commit-regression: within a generation a partition's committed offset went down, though its owner
  reads forwards; nor across a rebalance, for the next owner goes on from the committed offset. A
  client that means to go back (a seek) commits without a generation: only the rules above apply.
- zombie-commit: a commit of an older generation was accepted though it began after a newer
  generation's commit had been, or after a newer generation had been handed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from attrs import define, field

from jepsen_like.checkers.checker import Checker
from jepsen_like.checkers.verdict import Findings, Verdict
from jepsen_like.history_events import OFFSET_UNKNOWN, Event

PRUNE_AT = 1024


@define
class Writes:
    """Commits of one value in one register."""

    open: int = 0
    """Under way, or without a certain end."""
    last_end: int = -1


@define
class Certain:
    """The highest acknowledged offset by a commit with a generation."""

    offset: int = -1
    generation: int = -1
    op: int = -1


@define
class Register:
    """One group's offset in one partition. Moments count the events that this checker saw."""

    writes: dict[int, Writes] = field(factory=dict)
    overwritten_before: int = -1
    """Whatever ended before this moment is overwritten: the latest start of an ok commit."""
    overwriting_op: int = -1
    certain: Certain = field(factory=Certain)
    prune_at: int = PRUNE_AT
    has_forgotten: bool = False


@define
class UnderWay:
    """What was certain when an operation began."""

    moment: int
    generation: Certain
    certain: dict[str, Certain] = field(factory=dict)
    overwritten: dict[str, tuple[int, int]] = field(factory=dict)


class CommittedChecker(Checker):
    """Judges commits and what groups are told of them."""

    operations: ClassVar = frozenset({"commit", "committed", "assigned", "heartbeat"})

    def __init__(self) -> None:
        self._phantom = Findings("phantom-commit")
        self._lost = Findings("lost-commit")
        self._regression = Findings("commit-regression")
        self._zombie = Findings("zombie-commit")
        self._registers: dict[tuple[str, str], Register] = {}
        self._generations: dict[str, Certain] = {}
        self._under_way: dict[int, UnderWay] = {}
        self._moment = 0

    def _register(self, group: str, partition: str) -> Register:
        register = self._registers.get((group, partition))
        if register is None:
            register = self._registers[group, partition] = Register()
        return register

    def invoked(self, event: Event) -> None:
        """Remember what was certain."""
        self._moment += 1
        generation = self._generations.get(event.group, Certain())
        under_way = self._under_way[event.op] = UnderWay(self._moment, generation)
        for name in {**event.offsets, **dict.fromkeys(event.partitions)}:
            register = self._register(event.group, name)
            if event.f == "commit":
                register.writes.setdefault(event.offsets[name], Writes()).open += 1
                under_way.certain[name] = register.certain
            else:
                under_way.overwritten[name] = (register.overwritten_before, register.overwriting_op)

    def completed(self, event: Event, invoked: Event) -> None:
        """Judge."""
        self._moment += 1
        if event.f == "assigned":
            self._advance(event.group, event.generation, event.op)
            return
        under_way = self._under_way.pop(event.op)
        if event.type == "ok" and 0 <= invoked.generation < under_way.generation.generation:
            newer = under_way.generation
            told = f"generation {invoked.generation} accepted, {newer.generation} was there before"
            self._zombie.add(invoked.group, told, newer.op, event.op)
        if event.f == "commit":
            self._commit_ended(event, invoked, under_way)
        elif event.f == "committed" and event.type == "ok":
            for name, offset in event.offsets.items():
                self._told(name, offset, event, invoked, under_way)

    def _advance(self, group: str, generation: int, op: int) -> None:
        if generation > self._generations.get(group, Certain()).generation:
            self._generations[group] = Certain(-1, generation, op)

    def _commit_ended(self, event: Event, invoked: Event, under_way: UnderWay) -> None:
        if event.type == "info":
            return
        for name, offset in invoked.offsets.items():
            register = self._register(invoked.group, name)
            writes = register.writes[offset]
            writes.open -= 1
            if event.type == "fail":
                if not writes.open and writes.last_end < 0:
                    del register.writes[offset]
                continue
            writes.last_end = self._moment
            if under_way.moment > register.overwritten_before:
                register.overwritten_before = under_way.moment
                register.overwriting_op = event.op
            if invoked.generation >= 0:
                self._accepted(register, name, offset, invoked, under_way)
            if len(register.writes) > register.prune_at:
                self._prune(register)
        if event.type == "ok" and invoked.generation >= 0:
            self._advance(invoked.group, invoked.generation, event.op)

    def _accepted(
        self, register: Register, name: str, offset: int, invoked: Event, under_way: UnderWay
    ) -> None:
        before = under_way.certain[name]
        if offset < before.offset and invoked.generation >= before.generation:
            told = (
                f"{offset} in generation {invoked.generation} after {before.offset} "
                f"in generation {before.generation}"
            )
            self._regression.add(f"{invoked.group} {name}", told, before.op, invoked.op)
        if offset > register.certain.offset:
            register.certain = Certain(offset, invoked.generation, invoked.op)

    def _told(
        self, name: str, offset: int, event: Event, invoked: Event, under_way: UnderWay
    ) -> None:
        register = self._register(invoked.group, name)
        before, overwriting_op = under_way.overwritten.get(name, (-1, -1))
        where = f"{invoked.group} {name}"
        writes = register.writes.get(offset)
        if invoked.stale or event.stale:
            before = -1
        if offset == OFFSET_UNKNOWN:
            if before >= 0:
                self._lost.add(where, "no offset, after a commit", overwriting_op, event.op)
        elif writes is None:
            if register.has_forgotten and before >= 0:
                told = f"{offset} was overwritten long before, or never committed"
                self._lost.add(where, told, overwriting_op, event.op)
            elif not register.has_forgotten:
                self._phantom.add(where, f"{offset} was never committed", event.op)
        elif not writes.open and writes.last_end < before:
            self._lost.add(where, f"{offset} had been overwritten", overwriting_op, event.op)

    def _prune(self, register: Register) -> None:
        """Forget values that nobody may be told any more; not while somebody may be asking."""
        if any(under_way.overwritten for under_way in self._under_way.values()):
            return
        register.writes = {
            value: writes
            for value, writes in register.writes.items()
            if writes.open or writes.last_end >= register.overwritten_before
        }
        register.has_forgotten = True
        register.prune_at = 2 * len(register.writes) + PRUNE_AT

    def finish(self) -> Sequence[Verdict]:
        """What was found."""
        found = (self._phantom, self._lost, self._regression, self._zombie)
        return [findings.verdict() for findings in found]
