"""Verdicts: what a checker found, as values, text and JSON.

A verdict is valid, invalid or unknown; unknown never counts as valid. Examples name operations by
their number, which is the line (from zero) of the history that invoked them.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import msgspec
from attrs import frozen

EXAMPLES_MAX = 8


class Validity(Enum):
    """What is known."""

    VALID = "valid"
    INVALID = "invalid"
    UNKNOWN = "unknown"


SEVERITY = {Validity.VALID: 0, Validity.UNKNOWN: 1, Validity.INVALID: 2}


@frozen
class Example:
    """One anomaly: where, what, and the operations that show it."""

    where: str
    told: str
    ops: tuple[int, ...]

    def __str__(self) -> str:
        ops = ", ".join(str(op) for op in self.ops)
        return f"{self.where}: {self.told}" + (f"  [op {ops}]" if ops else "")


@frozen
class Verdict:
    """What one checker says about one kind of anomaly."""

    name: str
    validity: Validity
    count: int = 0
    examples: tuple[Example, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        line = f"{self.name:24} {self.validity.value}"
        if self.count:
            line += f"  {self.count}"
        if self.note:
            line += f"  ({self.note})"
        more = self.count - len(self.examples)
        lines = [line, *(f"    {example}" for example in self.examples)]
        if self.examples and more > 0:
            lines.append(f"    and {more} more")
        return "\n".join(lines)


class Findings:
    """Gathers anomalies of one name: counts all, keeps the first few."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self.excused = 0
        """What looks like it and is allowed, by an option or by what the client said of itself."""
        self._examples: list[Example] = []

    def add(self, where: str, told: str, *ops: int) -> None:
        """One more."""
        self.count += 1
        if len(self._examples) < EXAMPLES_MAX:
            self._examples.append(Example(where, told, tuple(op for op in ops if op >= 0)))

    def verdict(self) -> Verdict:
        """Invalid if there was any."""
        note = f"{self.excused} excused" if self.excused else ""
        validity = Validity.INVALID if self.count else Validity.VALID
        return Verdict(self.name, validity, self.count, tuple(self._examples), note)


@frozen
class Report:
    """All verdicts over one history."""

    verdicts: tuple[Verdict, ...]
    operations: int = 0
    counts: tuple[tuple[str, int], ...] = ()
    """How often what happened: `append ok`, 1000; of what the history is made."""

    @property
    def validity(self) -> Validity:
        """The worst of all."""
        worst = (verdict.validity for verdict in self.verdicts)
        return max(worst, key=SEVERITY.__getitem__, default=Validity.VALID)

    @property
    def exit_code(self) -> int:
        """0 valid, 1 invalid, 2 unknown."""
        codes = {Validity.VALID: 0, Validity.INVALID: 1, Validity.UNKNOWN: 2}
        return codes[self.validity]

    def __getitem__(self, name: str) -> Verdict:
        """The verdict of that name."""
        return {verdict.name: verdict for verdict in self.verdicts}[name]

    def named(self, validity: Validity) -> tuple[str, ...]:
        """Names of the verdicts of that validity."""
        return tuple(v.name for v in self.verdicts if v.validity is validity)

    def to_text(self) -> str:
        """For people; what is wrong stands last, where a terminal shows it."""
        ordered = sorted(self.verdicts, key=lambda verdict: SEVERITY[verdict.validity])
        counted = ", ".join(f"{what} {count}" for what, count in self.counts)
        head = f"{self.operations} operations: {counted}" if counted else "no operations"
        return "\n".join([head, *(str(verdict) for verdict in ordered), self.validity.value])

    def to_json(self) -> bytes:
        """For programs."""
        return msgspec.json.format(
            msgspec.json.encode(
                {
                    "validity": self.validity.value,
                    "operations": self.operations,
                    "counts": dict(self.counts),
                    "verdicts": [_plain(verdict) for verdict in self.verdicts],
                }
            ),
            indent=1,
        )


def _plain(verdict: Verdict) -> dict[str, object]:
    return {
        "name": verdict.name,
        "validity": verdict.validity.value,
        "count": verdict.count,
        "note": verdict.note,
        "examples": [
            {"where": example.where, "told": example.told, "ops": example.ops}
            for example in verdict.examples
        ],
    }


def first(ops: Iterable[int], count: int = 4) -> tuple[int, ...]:
    """The first few operations of many, for an example."""
    return tuple(sorted(ops)[:count])
