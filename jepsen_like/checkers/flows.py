"""What transactions read: nothing flows in a circle, and what a group reads is read once.

A `poll_committed` that names a `transaction` was made within it. In one pass:

- circular-flow (G1c): committed transactions each of which read what another one of them wrote.
  What one wrote over another's (G0) does not count: records are appended, and in Kafka's own model
  those of two transactions may stand in any order in two partitions.
- input-twice: two committed transactions of a group were given the same record.
- input-skipped: a committed record below what a group has committed, given to none of them.

The transactions of a group name it, and commit what they were given as its positions, from the
beginning of each partition on. A transaction is committed if it was `ok`, or anybody read a record
of it. By protocol 1 a delayed EndTxn may end the next transaction (`transactions.py`), and what
follows from that is excused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from attrs import define, field

from jepsen_like.checkers.checker import Checker
from jepsen_like.checkers.verdict import Findings, Verdict
from jepsen_like.history_events import Event, Value

Record = tuple[str, Value]


@define(eq=False)
class Flow:
    """What one transaction read."""

    event: Event
    outcome: str = "info"
    reads: dict[Record, int] = field(factory=dict)
    """With the poll that was given it."""
    ends: dict[str, int] = field(factory=dict)
    """How far it read."""
    was_asked: bool = False
    """An EndTxn of it that got no answer asked for its commit."""
    is_seen: bool = False

    @property
    def is_committed(self) -> bool:
        """True when it certainly is."""
        return self.outcome == "ok" or self.is_seen

    @property
    def credentials(self) -> tuple[object, ...]:
        """Of its producer."""
        return self.event.transactional_id, self.event.protocol, *self.event.producer


class FlowChecker(Checker):
    """Judges transactions by what was read within them."""

    operations: ClassVar = frozenset({"transaction", "end", "poll_committed", "log_start"})

    def __init__(self) -> None:
        names = ("circular-flow", "input-twice", "input-skipped")
        self._findings = {name: Findings(name) for name in names}
        self._flows: dict[int, Flow] = {}
        self._writers: dict[Record, Flow] = {}
        self._places: dict[Record, int] = {}
        """The first offset at which somebody read it."""
        self._log_starts: dict[str, int] = {}

    def invoked(self, event: Event) -> None:
        """Something begins."""
        if event.f == "transaction":
            flow = self._flows[event.op] = Flow(event)
            for name, rows in event.records.items():
                self._writers.update({(name, value): flow for _, value in rows})

    def completed(self, event: Event, invoked: Event) -> None:
        """Something ended."""
        if event.f == "log_start":
            for name, offset in event.offsets.items():
                self._log_starts[name] = max(offset, self._log_starts.get(name, 0))
        elif event.f == "transaction":
            self._flows[invoked.op].outcome = event.type
        elif event.f == "end":
            if event.type == "info" and invoked.is_commit:
                self._flows[invoked.transaction].was_asked = True
        elif event.type == "ok":
            self._polled(event, invoked.transaction)

    def _polled(self, event: Event, within: int) -> None:
        flow = self._flows.get(within)
        for name, rows in event.records.items():
            for offset, value in rows:
                record = name, value
                self._places.setdefault(record, offset)
                if record in self._writers:
                    self._writers[record].is_seen = True
                if flow is not None:
                    flow.reads.setdefault(record, event.op)
        if flow is not None:
            for name, end in event.offsets.items():
                flow.ends[name] = max(end, flow.ends.get(name, 0))

    def finish(self) -> Sequence[Verdict]:
        """What was found."""
        self._find_circles()
        groups: dict[str, list[Flow]] = {}
        for flow in self._flows.values():
            if flow.event.group:
                groups.setdefault(flow.event.group, []).append(flow)
        for group, flows in groups.items():
            self._judge_input(group, flows)
        return [findings.verdict() for findings in self._findings.values()]

    # ---- circles ----

    def _sources(self, flow: Flow) -> Iterator[Flow]:
        """The other committed transactions of which it read something."""
        for record in flow.reads:
            writer = self._writers.get(record)
            if writer is not None and writer is not flow and writer.is_committed:
                yield writer

    def _find_circles(self) -> None:
        """Go back from each committed transaction to those it read of, each once."""
        done: set[int] = set()
        for first in self._flows.values():
            if not first.is_committed or first.event.op in done:
                continue
            path: dict[int, Flow] = {first.event.op: first}
            ways = [self._sources(first)]
            while ways:
                source = next(ways[-1], None)
                if source is None:
                    done.add(path.popitem()[0])
                    ways.pop()
                elif source.event.op in path:
                    self._found_circle(list(path.values()), source)
                elif source.event.op not in done:
                    path[source.event.op] = source
                    ways.append(self._sources(source))

    def _found_circle(self, path: list[Flow], first: Flow) -> None:
        circle = path[path.index(first) :]
        findings = self._findings["circular-flow"]
        if any(self._may_be_ended_late(flow) for flow in circle):
            findings.excused += 1
            return
        names = [f"{f.event.transactional_id} {f.event.producer}" for f in circle]
        told = " read of ".join([*names, names[0]])
        findings.add(first.event.transactional_id, told, *(f.event.op for f in circle))

    def _may_be_ended_late(self, flow: Flow) -> bool:
        return flow.event.protocol == 1 and any(
            earlier.was_asked and earlier.credentials == flow.credentials
            for op, earlier in self._flows.items()
            if op < flow.event.op
        )

    # ---- input ----

    def _judge_input(self, group: str, flows: list[Flow]) -> None:
        readers: dict[Record, Flow] = {}
        ends: dict[str, int] = {}
        for flow in flows:
            if not flow.is_committed:
                continue
            for name, end in flow.ends.items():
                ends[name] = max(end, ends.get(name, 0))
            for record, op in flow.reads.items():
                other = readers.setdefault(record, flow)
                if other is not flow and flow.outcome == other.outcome == "ok":
                    told = f"{group}: {record[1]} at {self._places[record]}"
                    twice = self._findings["input-twice"]
                    twice.add(record[0], told, other.event.op, flow.event.op, op)
        unknown = {record for flow in flows if flow.outcome == "info" for record in flow.reads}
        for record, offset in self._places.items():
            name, value = record
            if not self._log_starts.get(name, 0) <= offset < ends.get(name, 0):
                continue
            if record not in readers and record not in unknown:
                told = f"{group}: {value} at {offset}, and it has committed {ends[name]}"
                self._findings["input-skipped"].add(name, told)
