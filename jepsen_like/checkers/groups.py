"""Ownership: a partition belongs to one member of a group at a time.

Members note `assigned` (group, generation, all their partitions) after the coordinator handed them
out, and `revoked` when they gave some up. A member that was cut off may believe in its assignment
longer than the group does; what it may not do is act on it, which is zombie-commit in committed.py.

- double-assignment: one generation gave a partition to two members.
- generation-back: a member was handed a lower generation than it had before, or the same one anew
  with other partitions: the group's memory was lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from attrs import define, field

from jepsen_like.checkers.checker import Checker
from jepsen_like.checkers.verdict import Findings, Verdict
from jepsen_like.history_events import Event

GENERATIONS_KEPT = 64


@define
class Assignment:
    """What one generation gave to whom: by partition, the process and the note's operation."""

    owners: dict[str, tuple[int, int]] = field(factory=dict)


class OwnershipChecker(Checker):
    """Judges what coordinators hand out."""

    operations: ClassVar = frozenset({"assigned", "crash"})

    def __init__(self) -> None:
        self._double = Findings("double-assignment")
        self._back = Findings("generation-back")
        self._assignments: dict[str, dict[int, Assignment]] = {}
        self._latest: dict[tuple[str, int], tuple[int, int, frozenset[str]]] = {}

    def completed(self, event: Event, invoked: Event) -> None:
        """Judge an assignment."""
        if event.f == "crash":
            for key in [key for key in self._latest if key[1] == event.process]:
                del self._latest[key]
            return
        if event.generation < 0:
            return
        self._look_back(event)
        generations = self._assignments.setdefault(event.group, {})
        assignment = generations.setdefault(event.generation, Assignment())
        for name in event.partitions:
            process, op = assignment.owners.setdefault(name, (event.process, event.op))
            if process != event.process:
                told = (
                    f"generation {event.generation} gave it to processes {process} "
                    f"and {event.process}"
                )
                self._double.add(f"{event.group} {name}", told, op, event.op)
        if len(generations) > GENERATIONS_KEPT:
            del generations[min(generations)]

    def _look_back(self, event: Event) -> None:
        key = (event.group, event.process)
        partitions = frozenset(event.partitions)
        generation, op, held = self._latest.get(key, (-1, -1, frozenset()))
        if event.generation < generation:
            told = f"process {event.process} went from {generation} to {event.generation}"
            self._back.add(event.group, told, op, event.op)
        elif event.generation == generation and partitions != held:
            told = f"process {event.process} got generation {generation} twice, and not the same"
            self._back.add(event.group, told, op, event.op)
        self._latest[key] = (event.generation, event.op, partitions)

    def finish(self) -> Sequence[Verdict]:
        """What was found."""
        return [self._double.verdict(), self._back.verdict()]
