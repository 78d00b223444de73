"""Delayed records: what was asked for (`delay`), and what came into the target (`poll_due`).

- NeverEarly: a record came, or is stamped, before it was due.
- DeliveredOnce: a record came twice, in a partition that is not its own, or though nobody sent it
  or its transaction was aborted.
- NothingPendingIsDropped: a record was acknowledged, nobody asked to call it back, and it never
  came. Only where the run ended with a look at everything (`must_see_all`).
- CancelledStaysAway: a record came although its cancellation, asked for after the record was
  acknowledged, had been acknowledged before it was due.

Each record is sent once, with a value of its own, and called back by one operation at most. What is
due within a `slack` of the run's clock is judged for neither side. Brokers go by the clock that
most of them agree on: while more of their clocks than that are wrong (`clocks_wrong`), time is
whatever they make of it. A record whose delay topic was written to in such a time, or that came in
one, is excused from all that is about time, and from coming: it may be due in a month, and so is
all that is appended behind what was stamped so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from attrs import define, evolve

from jepsen_like.checkers.checker import Checker
from jepsen_like.checkers.verdict import Findings, Verdict
from jepsen_like.history_events import Event, Value

MS: Final = 1_000_000
"""Headers and timestamps are whole milliseconds."""
NAMES: Final = ("NeverEarly", "DeliveredOnce", "NothingPendingIsDropped", "CancelledStaysAway")
Span = tuple[int, int]


@define(eq=False)
class Sent:
    """One delayed record, and what became of it; times in nanoseconds of the run's clock."""

    topic: str
    partition: str
    op: int
    asked: int
    due: int
    """Less the slack."""
    acked: int = -1
    """When it was acknowledged; -1: it was not, or not yet."""
    is_refused: bool = False
    """It certainly was not sent, or its transaction was aborted."""
    recall: int = -1
    """The operation that calls it back."""
    away: int = -1
    """When that was acknowledged, having been asked for after the record was acknowledged."""


@define(eq=False)
class Came:
    """Where and when a record was found."""

    name: str
    offset: int
    op: int
    stamp: int
    seen: int


class DelayChecker(Checker):
    """Judges what came by what was asked for."""

    operations: ClassVar = frozenset({"delay", "poll_due"})

    def __init__(self, *, must_see_all: bool = True, clocks_wrong: Sequence[Span] = ()) -> None:
        self._must_see_all = must_see_all
        self._wrong = clocks_wrong
        self._findings = {name: Findings(name) for name in NAMES}
        self._sent: dict[Value, Sent] = {}
        self._came: dict[Value, list[Came]] = {}
        self._lives: dict[str, Span] = {}
        """By delay topic, from when to when it was written to."""

    def invoked(self, event: Event) -> None:
        """Note what is asked for, before it can come."""
        if event.f != "delay":
            return
        for name, rows in event.records.items():
            topic, _, partition = name.rpartition("-")
            for (_, value), due in zip(rows, event.due, strict=True):
                self._sent[value] = Sent(topic, partition, event.op, event.time, due - event.slack)
            began, ended = self._lives.get(topic, (event.time, event.time))
            self._lives[topic] = min(began, event.time), max(ended, event.time)
        for value in event.cancels:
            self._sent[value].recall = event.op

    def completed(self, event: Event, invoked: Event) -> None:
        """Note how it ended, or what came."""
        if event.f == "delay":
            self._delayed(event, invoked)
            return
        for name, rows in event.records.items():
            for (offset, value), stamp in zip(rows, event.stamps[name], strict=True):
                found = self._came.setdefault(value, [])
                if all((one.name, one.offset) != (name, offset) for one in found):
                    found.append(Came(name, offset, event.op, stamp, event.time))

    def _delayed(self, event: Event, invoked: Event) -> None:
        for name, rows in invoked.records.items():
            topic = name.rpartition("-")[0]
            began, ended = self._lives[topic]
            self._lives[topic] = began, max(ended, event.time)
            for _, value in rows:
                sent = self._sent[value]
                sent.is_refused = event.type == "fail"
                if event.type == "ok":
                    sent.acked = event.time
        for value in invoked.cancels:
            sent = self._sent[value]
            if event.type == "ok" and 0 <= sent.acked <= invoked.time:
                sent.away = event.time

    def _is_excused(self, sent: Sent, came: Came | None) -> bool:
        """True where clocks were wrong when its topic was written to, or when it came."""
        spans = [self._lives[sent.topic]]
        if came is not None:
            spans.append((came.seen, came.seen))
        return any(
            began <= end and start <= ended for began, ended in self._wrong for start, end in spans
        )

    def finish(self) -> Sequence[Verdict]:
        """Judge."""
        late = []
        for value, found in self._came.items():
            sent = self._sent.get(value)
            if sent is None or sent.is_refused:
                told = f"{value} came, which nobody sent"
                self._findings["DeliveredOnce"].add(found[0].name, told, found[0].op)
            else:
                self._judge(value, sent, found)
                late.append((found[0].stamp - max(sent.due, sent.asked)) / 1e6)
        if self._must_see_all:
            self._missing()
        return self._verdicts(sorted(late))

    def _judge(self, value: Value, sent: Sent, found: list[Came]) -> None:
        first = found[0]
        if len(found) > 1:
            told = " and ".join(f"{one.name} at {one.offset}" for one in found[:4])
            ops = [one.op for one in found[:4]]
            self._findings["DeliveredOnce"].add(first.name, f"{value}: {told}", sent.op, *ops)
        if first.name.rpartition("-")[2] != sent.partition:
            told = f"{value} of partition {sent.partition}"
            self._findings["DeliveredOnce"].add(first.name, told, sent.op, first.op)
        early, cancelled = self._findings["NeverEarly"], self._findings["CancelledStaysAway"]
        is_excused = self._is_excused(sent, first)
        if min(first.stamp, first.seen) + MS < sent.due:
            before_ms = (sent.due - min(first.stamp, first.seen)) / 1e6
            if is_excused:
                early.excused += 1
            else:
                told = f"{value} at {first.offset} came {before_ms:.0f} ms before it was due"
                early.add(first.name, told, sent.op, first.op)
        if 0 <= sent.away < sent.due - MS:
            if is_excused:
                cancelled.excused += 1
            else:
                left_ms = (sent.due - sent.away) / 1e6
                told = f"{value} at {first.offset} was called back {left_ms:.0f} ms before"
                cancelled.add(first.name, told, sent.op, sent.recall, first.op)

    def _missing(self) -> None:
        dropped = self._findings["NothingPendingIsDropped"]
        for value, sent in self._sent.items():
            if sent.acked < 0 or sent.recall >= 0 or value in self._came:
                continue
            if self._is_excused(sent, None):
                dropped.excused += 1
            else:
                where = f"{sent.topic}-{sent.partition}"
                dropped.add(where, f"{value} was acknowledged and never came", sent.op)

    def _verdicts(self, late_ms: list[float]) -> list[Verdict]:
        """With how many came, and how late, by the stamp of the target."""
        verdicts = [findings.verdict() for findings in self._findings.values()]
        if late_ms:
            middle, last = late_ms[len(late_ms) // 2], late_ms[len(late_ms) * 99 // 100]
            told = f"{len(late_ms)} came, late by {middle:.0f} ms, p99 {last:.0f} ms"
            early = verdicts[0]
            note = f"{told}; {early.note}" if early.note else told
            verdicts[0] = evolve(early, note=note)
        return verdicts
