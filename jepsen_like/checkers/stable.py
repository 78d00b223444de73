"""Last stable offsets, and what all readers of transactional topics agree on.

In one pass, over `stable_end` (a last stable offset, and the epoch of the leader that told it),
`settle` (the last look, when every transaction should have ended), `poll_committed` and
`poll_uncommitted`:

- stable-offset-back: a leader told a lower last stable offset than one of its own or of an earlier
  epoch had told before it was asked. A leader that was deposed and does not know it is of an
  earlier epoch, and may tell what it knows.
- hanging-transaction: when everything should have ended, a last stable offset was below its high
  watermark, or a transaction was still listed.
- stable-divergence: two records were read at one offset, of whatever isolation.
- uncommitted-skip: a reader of all records came behind an offset and was not given the committed
  record that stands there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from attrs import define, field

from jepsen_like.checkers.checker import Checker
from jepsen_like.checkers.verdict import Findings, Verdict
from jepsen_like.history_events import Event, Value


@define(eq=False)
class Told:
    """The highest last stable offset of a partition by the epoch of its leader."""

    by_epoch: dict[int, tuple[int, int]] = field(factory=dict)
    """With the operation that told it."""

    def highest(self, epoch: int) -> tuple[int, int]:
        """Told by leaders of that epoch or an earlier one; (-1, -1) when nothing was."""
        known = (told for at, told in self.by_epoch.items() if at <= epoch)
        return max(known, default=(-1, -1))


class StableChecker(Checker):
    """Judges last stable offsets, and readers against each other."""

    operations: ClassVar = frozenset(
        {"stable_end", "settle", "poll_committed", "poll_uncommitted", "log_start"}
    )

    def __init__(self) -> None:
        names = (
            "stable-offset-back",
            "hanging-transaction",
            "stable-divergence",
            "uncommitted-skip",
        )
        self._findings = {name: Findings(name) for name in names}
        self._told: dict[str, Told] = {}
        self._asked: dict[int, dict[str, Told]] = {}
        self._at: dict[str, dict[int, tuple[Value, int]]] = {}
        """What was read at an offset, and by which poll first."""
        self._committed: dict[str, set[int]] = {}
        self._given: dict[tuple[int, str], set[int]] = {}
        """Offsets that a reader of all records was given."""
        self._passed: dict[tuple[int, str], int] = {}
        self._log_starts: dict[str, int] = {}

    def invoked(self, event: Event) -> None:
        """Remember what had been told."""
        if event.f == "stable_end":
            self._asked[event.op] = {
                name: Told(dict(self._told[name].by_epoch))
                for name in event.partitions
                if name in self._told
            }

    def completed(self, event: Event, invoked: Event) -> None:
        """Judge."""
        if event.f == "log_start":
            for name, offset in event.offsets.items():
                self._log_starts[name] = max(offset, self._log_starts.get(name, 0))
        elif event.f == "stable_end":
            before = self._asked.pop(invoked.op)
            if event.type == "ok":
                self._stable_end(event, before)
        elif event.type != "ok":
            return
        elif event.f == "settle":
            self._settled(event)
        else:
            self._polled(event)

    def _stable_end(self, event: Event, before: dict[str, Told]) -> None:
        epoch = event.leader_epoch
        for name, offset in event.offsets.items():
            highest, op = before.get(name, Told()).highest(epoch)
            if offset < highest:
                told = f"{offset} in epoch {epoch}, after {highest}"
                self._findings["stable-offset-back"].add(name, told, op, event.op)
            by_epoch = self._told.setdefault(name, Told()).by_epoch
            by_epoch[epoch] = max(by_epoch.get(epoch, (-1, -1)), (offset, event.op))

    def _settled(self, event: Event) -> None:
        hanging = self._findings["hanging-transaction"]
        for name in event.partitions:
            told = f"the last stable offset stays at {event.offsets.get(name)}"
            hanging.add(name, told, event.op)
        if event.error:
            hanging.add("transactions", event.error, event.op)

    def _polled(self, event: Event) -> None:
        is_committed = event.f == "poll_committed"
        for name, rows in event.records.items():
            known = self._at.setdefault(name, {})
            offsets = {offset for offset, _ in rows}
            for offset, value in rows:
                other, op = known.setdefault(offset, (value, event.op))
                if other != value:
                    told = f"{other} and {value} at {offset}"
                    self._findings["stable-divergence"].add(name, told, op, event.op)
            if is_committed:
                self._committed.setdefault(name, set()).update(offsets)
            else:
                self._given.setdefault((event.process, name), set()).update(offsets)
        if not is_committed:
            for name, end in event.offsets.items():
                key = event.process, name
                self._passed[key] = max(end, self._passed.get(key, 0))

    def finish(self) -> Sequence[Verdict]:
        """What was found."""
        for (process, name), end in self._passed.items():
            given = self._given.get((process, name), set())
            for offset in sorted(self._committed.get(name, set()) - given):
                if self._log_starts.get(name, 0) <= offset < end:
                    value, op = self._at[name][offset]
                    told = f"process {process} was not given {value} at {offset}, and came to {end}"
                    self._findings["uncommitted-skip"].add(name, told, op)
        return [findings.verdict() for findings in self._findings.values()]
