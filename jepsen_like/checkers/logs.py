"""Records: lost, unseen, duplicated, at inconsistent offsets, divergent, aborted, never sent.

Names and meanings are Jepsen's (jepsen.tests.kafka), told in offsets instead of dense indices:

- lost-write: acknowledged, never polled, though somebody polled a higher offset.
- unseen: acknowledged and above all that was polled, when the history ends. In a history that
  does not end with polls of everything (`must_see_all` false) both are excused: nobody may have
  looked. What polls leave out shows as poll-skip all the same.
- duplicate: one value at two offsets, though its producer was idempotent.
- inconsistent-offsets: an acknowledgement names an offset where another value was seen.
- divergence: two polls read different values at one offset.
- aborted-read (G1a): a value was polled whose append had failed for certain.
- phantom: a value was polled that nobody had sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from attrs import define, field, frozen

from jepsen_like.checkers.checker import Checker
from jepsen_like.checkers.partition_log import ACKED, PLAIN, POLLED, Outcome, PartitionLog
from jepsen_like.checkers.verdict import Findings, Verdict
from jepsen_like.history_events import Event, Value


@define
class Logs:
    """All partitions of a history; shared with the checkers that need to know what stands where."""

    partitions: dict[str, PartitionLog] = field(factory=dict)

    def __getitem__(self, name: str) -> PartitionLog:
        """The log of a partition, empty at first."""
        log = self.partitions.get(name)
        if log is None:
            log = self.partitions[name] = PartitionLog(name)
        return log


@frozen
class Unsent:
    """A value polled that nobody was known to be sending just then."""

    log: PartitionLog
    offset: int
    value: Value
    op: int
    last_append: int
    """The last append invoked by then."""


class LogChecker(Checker):
    """Fills the logs and judges them."""

    operations: ClassVar = frozenset({"append", "poll", "read", "delete_records", "log_start"})

    def __init__(self, logs: Logs, *, must_see_all: bool = True) -> None:
        self._logs = logs
        self._must_see_all = must_see_all
        self._inconsistent = Findings("inconsistent-offsets")
        self._divergence = Findings("divergence")
        self._unsent: list[Unsent] = []
        self._last_append = -1

    def invoked(self, event: Event) -> None:
        """Note values that are under way, and wishes to delete."""
        if event.f == "append":
            for name, records in event.records.items():
                log = self._logs[name]
                for _, value in records:
                    log.sent[value] = event.op
                    if not event.idempotent:
                        log.plain.add(value)
            self._last_append = event.op
        elif event.f == "delete_records":
            self._raise_log_start(event)

    def completed(self, event: Event, invoked: Event) -> None:
        """Note what was told."""
        if event.f == "append":
            self._appended(event, invoked)
        elif event.f in ("poll", "read"):
            self._polled(event)
        elif event.type == "ok":
            self._raise_log_start(event)

    def _raise_log_start(self, event: Event) -> None:
        for name, offset in event.offsets.items():
            log = self._logs[name]
            log.log_start = max(log.log_start, offset)

    def _appended(self, event: Event, invoked: Event) -> None:
        op = event.op
        if event.type == "info" and not event.idempotent:
            for name, records in invoked.records.items():
                self._logs[name].plain.update(value for _, value in records)
        if event.type == "fail":
            for name, records in invoked.records.items():
                log = self._logs[name]
                for _, value in records:
                    log.sent.pop(value, None)
                    log.plain.discard(value)
                    log.failed[value] = op
            return
        flags = ACKED if event.idempotent and invoked.idempotent else ACKED | PLAIN
        records_by_name = event.records
        if event.type == "ok" and not records_by_name:
            records_by_name = invoked.records
        for name, records in records_by_name.items():
            log = self._logs[name]
            for offset, value in records:
                if offset < 0:
                    if event.type == "ok":
                        log.sent.pop(value, None)
                        log.unplaced[value] = op
                    continue  # else unknown for ever, unlike those of it that have an offset
                log.sent.pop(value, None)
                if log.plain:
                    log.plain.discard(value)
                if log.see(offset, value, flags, op) is Outcome.CONFLICT:
                    self._conflict(self._inconsistent, log, offset, value, op)
                if offset >= log.acked_end:
                    log.acked_end = offset + 1
                    log.acked_last_op = op

    def _polled(self, event: Event) -> None:
        op = event.op
        for name, records in event.records.items():
            if not records:
                continue
            log = self._logs[name]
            see, sent, unplaced = log.see, log.sent, log.unplaced
            for offset, value in records:
                outcome = see(offset, value, POLLED, op)
                if outcome is Outcome.KNOWN:
                    continue
                if value in unplaced and outcome is Outcome.NEW:
                    see(offset, value, ACKED, unplaced.pop(value))
                elif value not in sent and value not in unplaced:
                    self._unsent.append(Unsent(log, offset, value, op, self._last_append))
                if outcome is Outcome.CONFLICT:
                    self._polled_otherwise(log, offset, value, op)
            last = max(records[-1][0], records[0][0])
            if last >= log.polled_end:
                log.polled_end = last + 1
                log.polled_last_op = op

    def _polled_otherwise(self, log: PartitionLog, offset: int, value: Value, op: int) -> None:
        held = log.at(offset)
        assert held is not None
        was_polled = bool(held.flags & POLLED)
        self._conflict(
            self._divergence if was_polled else self._inconsistent, log, offset, value, op
        )

    def _conflict(
        self, findings: Findings, log: PartitionLog, offset: int, value: Value, op: int
    ) -> None:
        held = log.at(offset)
        assert held is not None
        earlier = held.reader if findings is self._divergence else max(held.writer, held.reader)
        told = f"offset {offset} held {held.value!r} and holds {value!r}"
        findings.add(log.name, told, earlier, op)

    def finish(self) -> Sequence[Verdict]:
        """Judge each log as a whole."""
        lost, unseen = Findings("lost-write"), Findings("unseen")
        duplicate, aborted = Findings("duplicate"), Findings("aborted-read")
        for log in self._logs.partitions.values():
            self._judge_unread(log, lost, unseen)
            self._judge_repeated(log, duplicate)
            if log.failed:
                self._judge_failed(log, aborted)
        found = (lost, unseen, duplicate, self._inconsistent, self._divergence, aborted)
        return [*(findings.verdict() for findings in found), self._phantoms().verdict()]

    def _judge_unread(self, log: PartitionLog, lost: Findings, unseen: Findings) -> None:
        """Acknowledged records that no poll returned."""
        unread = [(h.offset, h.value, h.writer) for h in log.unread()]
        for offset, sights in log.conflicts.items():
            unread += [
                (offset, sight.value, sight.op)
                for sight in sights
                if sight.flags & ACKED and not sight.flags & POLLED
            ]
        if unread or log.unplaced:
            polled = log.polled_values()
        for offset, value, op in unread:
            if offset < log.log_start or value in polled:
                continue
            told = f"{value!r} was acknowledged at offset {offset}"
            if offset < log.polled_end and self._must_see_all:
                told += f", polls reached {log.polled_end - 1}, none returned it"
                lost.add(log.name, told, op, log.polled_last_op)
            else:
                self._note_unseen(unseen, log, told, op)
        for value, op in log.unplaced.items():
            if value not in polled:
                told = f"{value!r} was acknowledged without an offset"
                self._note_unseen(unseen, log, told, op)

    def _note_unseen(self, unseen: Findings, log: PartitionLog, told: str, op: int) -> None:
        if self._must_see_all:
            unseen.add(log.name, f"{told}, nobody polled that far", op)
        else:
            unseen.excused += 1

    def _judge_repeated(self, log: PartitionLog, duplicate: Findings) -> None:
        for value, offsets in log.repeated().items():
            if log.may_repeat(value, offsets):
                duplicate.excused += 1
                continue
            held = [found for offset in offsets if (found := log.at(offset)) is not None]
            ops = [h.writer if h.writer >= 0 else h.reader for h in held]
            duplicate.add(log.name, f"{value!r} stands at offsets {offsets[:8]}", *ops[:4])

    def _judge_failed(self, log: PartitionLog, aborted: Findings) -> None:
        polled = log.polled_values()
        for value, op in log.failed.items():
            if value in polled:
                aborted.add(log.name, f"{value!r} was polled, its append had failed", op)

    def _phantoms(self) -> Findings:
        """Polled before anybody sent it; a value sent before and seen twice is a duplicate."""
        phantom = Findings("phantom")
        senders: dict[str, dict[Value, int]] = {}
        for unsent in self._unsent:
            log = unsent.log
            if unsent.value in log.failed:
                continue
            if log.name not in senders:
                senders[log.name] = log.senders()
            sender = senders[log.name].get(unsent.value, -1)
            told = f"{unsent.value!r} at offset {unsent.offset} was never sent"
            if sender > unsent.last_append:
                told = f"{unsent.value!r} was polled at offset {unsent.offset} before it was sent"
            elif sender >= 0:
                continue
            phantom.add(log.name, told, unsent.op, sender)
        return phantom
