"""All checkers over one history, in one pass.

Pairs completions with what invoked them, tells each checker of the operations it asked for, ends
what is still open as `info`, and puts the verdicts together. A group that was forgotten while it
was empty (`group_gone`) begins anew, without offsets and at its first generation: to the checkers
it is another group from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
from attrs import frozen

from jepsen_like.checkers.checker import Checker
from jepsen_like.checkers.committed import CommittedChecker
from jepsen_like.checkers.consumed import ConsumeChecker
from jepsen_like.checkers.delays import DelayChecker, Span
from jepsen_like.checkers.flows import FlowChecker
from jepsen_like.checkers.groups import OwnershipChecker
from jepsen_like.checkers.linear.checks import Bounds, CommittedOffsets, TopicOperations
from jepsen_like.checkers.linear.logs import PartitionLogs
from jepsen_like.checkers.logs import LogChecker, Logs
from jepsen_like.checkers.polls import PollChecker
from jepsen_like.checkers.ranges import RangeChecker
from jepsen_like.checkers.sends import SendChecker
from jepsen_like.checkers.stable import StableChecker
from jepsen_like.checkers.topics import TopicsChecker
from jepsen_like.checkers.transactions import TransactionChecker
from jepsen_like.checkers.verdict import Report
from jepsen_like.checkers.views import ViewChecker
from jepsen_like.history_events import (
    NOTES,
    Event,
    MalformedHistoryError,
    read_history,
)


@frozen
class Options:
    """What a history's workload promised, and how far to search."""

    must_see_all: bool = True
    """The workload polled everything at its end; else `lost-write` and `unseen` are excused."""
    gaps_allowed: bool = False
    """Transactions or compaction leave offsets without records."""
    bounds: Bounds = Bounds()
    clocks_wrong: Sequence[Span] = ()
    """When more clocks of nodes were wrong than may be, in nanoseconds of the run's clock."""


def all_checkers(options: Options) -> list[Checker]:
    """One of each, on shared logs."""
    logs = Logs()
    return [
        # Ranges compare with what was known before an event, so they see it before the logs do.
        RangeChecker(logs),
        LogChecker(logs, must_see_all=options.must_see_all),
        SendChecker(),
        PollChecker(logs, gaps_allowed=options.gaps_allowed),
        CommittedChecker(),
        ConsumeChecker(logs),
        OwnershipChecker(),
        TopicsChecker(),
        CommittedOffsets(options.bounds),
        TopicOperations(options.bounds),
        TransactionChecker(must_see_all=options.must_see_all),
        FlowChecker(),
        PartitionLogs(logs, options.bounds, gaps_allowed=options.gaps_allowed),
        StableChecker(),
        ViewChecker(must_see_all=options.must_see_all),
        DelayChecker(must_see_all=options.must_see_all, clocks_wrong=options.clocks_wrong),
    ]


class Composed:
    """Feeds several checkers."""

    def __init__(self, checkers: Sequence[Checker]) -> None:
        self._checkers = checkers
        self._open: dict[int, Event] = {}
        self._lives: dict[str, int] = {}
        self._counts: dict[tuple[str, str], int] = {}
        self._invoked: dict[str, tuple[Callable[[Event], None], ...]] = {}
        self._completed: dict[str, tuple[Callable[[Event, Event], None], ...]] = {}

    def _handlers(self, f: str) -> None:
        """Find out once who wants to hear of an operation."""
        wanting = [checker for checker in self._checkers if f in checker.operations]
        self._invoked[f] = tuple(checker.invoked for checker in wanting)
        self._completed[f] = tuple(checker.completed for checker in wanting)

    def feed(self, event: Event) -> None:
        """Tell everybody.

        Raises:
            MalformedHistoryError: It ends what never began, or begins twice.
        """
        f = event.f
        if f not in self._completed:
            self._handlers(f)
        if f == "group_gone":
            self._lives[event.group] = self._lives.get(event.group, 1) + 1
        elif event.group and event.group in self._lives:  # what names no group is of none
            life = f"{event.group} (life {self._lives[event.group]})"
            event = msgspec.structs.replace(event, group=life)
        if event.type == "invoke":
            if event.op in self._open:
                raise MalformedHistoryError(f"operation {event.op} begins twice")
            self._open[event.op] = event
            for tell in self._invoked[f]:
                tell(event)
            return
        invoked = self._open.pop(event.op, None)
        if invoked is None:
            if f not in NOTES:
                raise MalformedHistoryError(f"operation {event.op} ({f}) ends and never began")
            invoked = event
        elif invoked.f != f or invoked.process != event.process:
            raise MalformedHistoryError(f"operation {event.op} ends as another than it began")
        self._complete(event, invoked)

    def _complete(self, event: Event, invoked: Event) -> None:
        key = (event.f, event.type)
        self._counts[key] = self._counts.get(key, 0) + 1
        for tell in self._completed[event.f]:
            tell(event, invoked)

    def finish(self) -> Report:
        """End what is open, and ask for verdicts."""
        for invoked in self._open.values():
            self._complete(
                Event("info", invoked.f, invoked.process, invoked.op, invoked.time), invoked
            )
        self._open.clear()
        verdicts = [verdict for checker in self._checkers for verdict in checker.finish()]
        counts = tuple((f"{f} {how}", n) for (f, how), n in sorted(self._counts.items()))
        return Report(tuple(verdicts), sum(self._counts.values()), counts)


def check_events(events: Iterable[Event], options: Options | None = None) -> Report:
    """All checkers over these events."""
    composed = Composed(all_checkers(options or Options()))
    for event in events:
        composed.feed(event)
    return composed.finish()


def check_file(path: Path, options: Options | None = None) -> Report:
    """All checkers over a history file."""
    return check_events(read_history(path), options)
