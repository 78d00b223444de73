"""Topics as a set: what was created is listed, what was deleted is not, nothing else appears.

In one pass; linear/ searches for an order of the same operations, which finds more.

- lost-topic: a list lacks a topic that certainly existed all the while.
- resurrected-topic: a list shows a topic that certainly did not exist all the while.
- phantom-topic: a list shows a topic that nobody tried to create.

A list marked `stale` shows some past state: only phantoms are looked for in it. Topics that clients
append to or subscribe to may have been there before the history began, and names that begin with
`__` are the cluster's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from attrs import define

from jepsen_like.checkers.checker import Checker
from jepsen_like.checkers.verdict import Findings, Verdict
from jepsen_like.history_events import Event


@define
class Topic:
    """What is certain of a topic: None while an operation on it is under way or unknown."""

    exists: bool | None = False
    under_way: int = 0
    was_alone: bool = True
    """No other operation was under way with the one that is."""
    before: bool | None = False
    op: int = -1
    """The last operation that began or ended on it, in invocations counted."""
    since: int = -1
    """When the certainty began: an operation that begins later can rely on it."""


class TopicsChecker(Checker):
    """Judges lists of topics."""

    operations: ClassVar = frozenset(
        {"create_topic", "delete_topic", "list_topics", "append", "subscribe"}
    )

    def __init__(self) -> None:
        self._lost = Findings("lost-topic")
        self._resurrected = Findings("resurrected-topic")
        self._phantoms: dict[str, int] = {}
        self._partitions: set[str] = set()
        self._mentioned: set[str] = set()
        self._topics: dict[str, Topic] = {}
        self._moment = 0
        self._lists: dict[int, int] = {}

    def invoked(self, event: Event) -> None:
        """What is under way is uncertain."""
        if event.f in ("append", "subscribe"):
            self._mention(event)
            return
        self._moment += 1
        if event.f == "list_topics":
            self._lists[event.op] = self._moment
            return
        for name in event.topics:
            topic = self._topics.setdefault(name, Topic())
            topic.was_alone = not topic.under_way
            if topic.was_alone:
                topic.before = topic.exists
            topic.under_way += 1
            topic.exists = None

    def completed(self, event: Event, invoked: Event) -> None:
        """What ended alone is certain, what ended unknown never is again."""
        if event.f in ("append", "subscribe"):
            return
        self._moment += 1
        if event.f == "list_topics":
            moment = self._lists.pop(event.op)
            if event.type == "ok":
                self._listed(event, moment, is_stale=event.stale or invoked.stale)
            return
        if event.type == "info":
            return
        for name in invoked.topics:
            topic = self._topics[name]
            topic.under_way -= 1
            if topic.under_way or not topic.was_alone:
                topic.was_alone = False
            elif event.type == "ok":
                topic.exists = event.f == "create_topic"
            else:
                topic.exists = topic.before
            topic.since, topic.op = self._moment, event.op

    def _mention(self, event: Event) -> None:
        self._mentioned.update(event.topics)
        for name in event.records:
            if name not in self._partitions:
                self._partitions.add(name)
                self._mentioned.add(name.rpartition("-")[0])

    def _listed(self, event: Event, began: int, *, is_stale: bool) -> None:
        listed = set(event.topics)
        for name in event.topics:
            if name not in self._topics and not name.startswith("__"):
                self._phantoms.setdefault(name, event.op)
        if is_stale:
            return
        for name, topic in self._topics.items():
            if topic.exists is None or topic.since > began:
                continue
            if topic.exists and name not in listed:
                self._lost.add(name, "created, not listed", topic.op, event.op)
            elif not topic.exists and name in listed:
                self._resurrected.add(name, "does not exist, and is listed", topic.op, event.op)

    def finish(self) -> Sequence[Verdict]:
        """What was found."""
        phantom = Findings("phantom-topic")
        for name, op in self._phantoms.items():
            if name not in self._mentioned:
                created = self._topics.get(name)
                told = "listed before anybody tried to create it"
                phantom.add(name, told, op, -1 if created is None else created.op)
        found = (self._lost, self._resurrected, phantom)
        return [findings.verdict() for findings in found]
