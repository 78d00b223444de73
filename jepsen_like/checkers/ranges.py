"""out-of-range: offsets that a broker may not refuse, and offsets that it may not return.

A poll that names positions in its invocation is a direct fetch: nothing was buffered before. Then

- OFFSET_OUT_OF_RANGE is wrong where the position lies between every log start anybody asked for
  and what was known to exist (acknowledged or polled) when the poll began;
- no record below the position, and none below a log start acknowledged before it began, may come;
  the latter may come from a replica that does not lead (`stale`), which learns of it later.

Nobody may refuse an offset that it merely does not have yet: neither a follower that is behind nor
a leader that was replaced and does not know. Negative offsets are wrong anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from jepsen_like.checkers.checker import Checker
from jepsen_like.checkers.logs import Logs
from jepsen_like.checkers.verdict import Findings, Verdict
from jepsen_like.history_events import Event

OFFSET_OUT_OF_RANGE = 1


class RangeChecker(Checker):
    """Judges refusals and answers of direct fetches."""

    operations: ClassVar = frozenset({"append", "poll", "read", "delete_records"})

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self._findings = Findings("out-of-range")
        self._known: dict[int, dict[str, tuple[int, int, int]]] = {}
        """By poll under way: known end, deleted start when it began, and who told the end."""
        self._deleted: dict[str, int] = {}

    def invoked(self, event: Event) -> None:
        """Remember what was certain when it began."""
        if event.f in ("poll", "read") and event.offsets:
            known = self._known[event.op] = {}
            for name in event.offsets:
                log = self._logs[name]
                end, op = max(
                    (log.acked_end, log.acked_last_op), (log.polled_end, log.polled_last_op)
                )
                known[name] = (end, self._deleted.get(name, 0), op)

    def completed(self, event: Event, invoked: Event) -> None:
        """Judge an answer."""
        if event.f == "append":
            self._look_for_negative(event)
        elif event.f == "delete_records":
            if event.type == "ok":
                for name, offset in (event.offsets or invoked.offsets).items():
                    self._deleted[name] = max(self._deleted.get(name, 0), offset)
        else:
            self._look_for_negative(event)
            known = self._known.pop(event.op, None)
            if known is not None:
                self._fetched(event, invoked, known)

    def _look_for_negative(self, event: Event) -> None:
        least = 0 if event.f != "append" else -1
        for name, records in event.records.items():
            for offset, value in records:
                if offset < least:
                    self._findings.add(name, f"{value!r} at offset {offset}", event.op)

    def _fetched(
        self, event: Event, invoked: Event, known: dict[str, tuple[int, int, int]]
    ) -> None:
        for name, position in invoked.offsets.items():
            end, deleted, end_op = known[name]
            is_refused = event.code == OFFSET_OUT_OF_RANGE
            if event.offsets and name not in event.offsets:
                is_refused = False  # the answer says which partitions it refuses
            if is_refused and self._logs[name].log_start <= position <= end:
                told = f"offset {position} refused, the log was known to reach to {end}"
                self._findings.add(name, told, end_op, event.op)
            for offset, value in event.records.get(name, ())[:1]:
                if offset < position:
                    told = f"{value!r} at offset {offset}, asked for from {position}"
                    self._findings.add(name, told, event.op)
                elif offset < deleted and not event.stale:
                    told = f"{value!r} at offset {offset}, deleted below {deleted}"
                    self._findings.add(name, told, event.op)

    def finish(self) -> Sequence[Verdict]:
        """What was found."""
        return [self._findings.verdict()]
