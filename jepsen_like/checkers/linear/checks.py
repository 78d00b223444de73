"""Linearizability of committed offsets, of topics and of partitions' logs.

A history is taken apart by object (P-compositionality: all is linearizable exactly if each object
is), so a search sees one group's partition, one topic or one log. Topics are searched together
besides, for a list shows all of them at one moment. Long histories are searched up to a cut: what
returned by then counts as it is, what was under way counts as unknown. A false is always true of
the whole; a true is said of what was searched, and the note says how much that was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Self

from attrs import define, field, frozen

from jepsen_like.checkers.checker import Checker
from jepsen_like.checkers.linear.explain import explain
from jepsen_like.checkers.linear.models import Register, Topic, TopicSet
from jepsen_like.checkers.linear.search import FOREVER, Call, Model, Search
from jepsen_like.checkers.verdict import Example, Validity, Verdict
from jepsen_like.history_events import Event

TOPIC_ALREADY_EXISTS = 36
UNKNOWN_TOPIC_OR_PARTITION = 3


@frozen
class Bounds:
    """How much is searched, and how long."""

    calls_max: int = 20_000
    """Per object."""
    steps_max: int = 2_000_000
    """Per object; a step is a question to the model, some microseconds."""
    is_over: Callable[[], bool] | None = None
    """True when time is up. Without it a verdict depends on the history alone."""

    @classmethod
    def until(cls, is_over: Callable[[], bool]) -> Self:
        """So much more that time decides, and memory holds."""
        return cls(steps_max=50_000_000, is_over=is_over)


@define
class Judgement:
    """Gathers what was found of many objects under one name."""

    name: str
    bounds: Bounds
    objects: int = 0
    calls: int = 0
    unknown: list[str] = field(factory=list)
    count: int = 0
    examples: list[Example] = field(factory=list)
    is_cut: bool = False

    def search(self, where: str, model: Model, calls: Sequence[Call]) -> bool | None:
        """Search one object."""
        self.objects += 1
        self.calls += len(calls)
        search = Search(model, calls, steps_max=self.bounds.steps_max, is_over=self.bounds.is_over)
        found = search.run()
        if found.is_linearizable is None:
            self.unknown.append(where)
        elif found.failure is not None:
            self.count += 1
            if len(self.examples) < 4:
                window = explain(model, search, found.failure)
                self.examples.append(Example(where, str(window), window.ops))
        return found.is_linearizable

    def verdict(self) -> Verdict:
        """Invalid if one object is, else unknown if one is."""
        note = f"{self.calls} operations on {self.objects} objects"
        if self.is_cut:
            note += f", the first {self.bounds.calls_max} of each"
        validity = Validity.VALID
        if self.unknown:
            validity = Validity.UNKNOWN
            note += f", given up on {len(self.unknown)}: {', '.join(self.unknown[:4])}"
        if self.count:
            validity = Validity.INVALID
        return Verdict(self.name, validity, self.count, tuple(self.examples), note)


@define
class Taken:
    """The calls on one object, up to the cut."""

    calls: list[Call] = field(factory=list)
    cut: int = FOREVER

    def add(self, call: Call, calls_max: int) -> None:
        """Take a call that ended, in order of ends."""
        if call.begin > self.cut:
            return
        if call.end > self.cut:
            call = Call(call.op, call.action, call.begin, FOREVER, call.is_read)
        if call.end == FOREVER and call.is_read:
            return
        self.calls.append(call)
        if self.cut == FOREVER and len(self.calls) >= calls_max:
            self.cut = call.end if call.end < FOREVER else call.begin


class MomentChecker(Checker):
    """Counts the moments at which operations begin and end."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._moment = 0
        self._begun: dict[int, int] = {}

    def invoked(self, event: Event) -> None:
        """Note when it began."""
        self._moment += 1
        self._begun[event.op] = self._moment

    def completed(self, event: Event, invoked: Event) -> None:
        """Take it, unless nothing happened and nothing was told."""
        self._moment += 1
        begin = self._begun.pop(event.op, self._moment)
        self.take(event, invoked, begin, FOREVER if event.type == "info" else self._moment)

    def take(self, event: Event, invoked: Event, begin: int, end: int) -> None:
        """Turn it into calls."""


class CommittedOffsets(MomentChecker):
    """linear-committed: each group's offset in each partition is a register.

    A commit whose request left several times may take effect as often, each time between its
    beginning and its end: its copies come to a coordinator in their order, a former coordinator's
    are fenced, and the last of them is the one that was answered. One that never came is as good as
    one just before the next.
    """

    operations: ClassVar = frozenset({"commit", "committed"})

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._registers: dict[tuple[str, str], Taken] = {}

    def take(self, event: Event, invoked: Event, begin: int, end: int) -> None:
        """Commits write, committed reads."""
        is_read = event.f == "committed"
        if event.type == "fail" or (is_read and (event.stale or invoked.stale)):
            return
        for name, offset in (event.offsets if is_read else invoked.offsets).items():
            taken = self._registers.setdefault((invoked.group, name), Taken())
            for _ in range(event.sent):
                call = Call(event.op, (event.f, offset), begin, end, is_read)
                taken.add(call, self.bounds.calls_max)

    def finish(self) -> Sequence[Verdict]:
        """Search each register."""
        judgement = Judgement("linear-committed", self.bounds)
        for (group, name), taken in self._registers.items():
            judgement.is_cut |= taken.cut < FOREVER
            told = {call.action[1] for call in taken.calls if call.is_read}  # type: ignore[index]
            calls = [
                call
                for call in taken.calls
                if call.end < FOREVER or call.action[1] in told  # type: ignore[index]
            ]  # a commit of unknown fate that nobody was told of need not have happened
            judgement.search(f"{group} {name}", Register(), calls)
        return [judgement.verdict()]


class TopicOperations(MomentChecker):
    """linear-topics: creations, deletions, refusals and fresh lists."""

    operations: ClassVar = frozenset({"create_topic", "delete_topic", "list_topics"})

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._topics: dict[str, list[Call]] = {}
        self._all: list[tuple[str, tuple[str, ...], int, int, int]] = []
        """Kind, topics, begin, end, operation."""

    def take(self, event: Event, invoked: Event, begin: int, end: int) -> None:
        """Refusals tell what was there."""
        names = tuple(event.topics or invoked.topics)
        if event.f == "list_topics":
            if event.type == "ok" and not (event.stale or invoked.stale):
                self._all.append(("list", tuple(event.topics), begin, end, event.op))
            return
        for name in invoked.topics:
            self._topics.setdefault(name, [])
        kind = "create" if event.f == "create_topic" else "delete"
        if event.type == "fail":
            if kind == "create" and event.code == TOPIC_ALREADY_EXISTS:
                kind = "there"
            elif kind == "delete" and event.code == UNKNOWN_TOPIC_OR_PARTITION:
                kind = "absent"
            else:
                return
        self._all.append((kind, names, begin, end, event.op))

    def finish(self) -> Sequence[Verdict]:
        """Search each topic, then all together."""
        judgement = Judgement("linear-topics", self.bounds)
        bits = {name: 1 << position for position, name in enumerate(self._topics)}
        together: list[Call] = []
        for kind, names, begin, end, op in sorted(self._all, key=lambda row: row[3]):
            is_read = kind in ("list", "there", "absent")
            shown = sum(bits.get(name, 0) for name in dict.fromkeys(names))
            together.append(Call(op, (kind, shown), begin, end, is_read))
            if kind == "list":
                listed = set(names)
                for name, calls in self._topics.items():
                    seen = ("there",) if name in listed else ("absent",)
                    calls.append(Call(op, seen, begin, end, is_read=True))
            else:
                for name in names:
                    self._topics[name].append(Call(op, (kind,), begin, end, is_read))
        each = [self._search_one(judgement, *item) for item in self._topics.items()]
        if all(each) and any(kind == "list" for kind, *_ in self._all):
            judgement.search("all topics together", TopicSet(), together)
        return [judgement.verdict()]

    def _search_one(self, judgement: Judgement, name: str, calls: list[Call]) -> bool:
        taken = Taken()
        for call in calls:
            taken.add(call, self.bounds.calls_max)
        judgement.is_cut |= taken.cut < FOREVER
        return judgement.search(name, Topic(), taken.calls) is True
