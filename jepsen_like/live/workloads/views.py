"""Views with conditions, read by stock clients and our own while anything breaks.

One view is over the first topic that producers write to, where batches hold several tags, another
over the topic that transactions write to, where some are aborted. Assigned readers of both
libraries, at both isolation levels, read them from their beginning on, and now and then begin anew;
the members of a group come and go. `look_back` is the last word: each view up to the end that
`latest` tells.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from attrs import frozen

from jepsen_like.live.workloads.base import (
    READ_BACK_S,
    Around,
    Crowd,
    Restarting,
    key_of,
    parts_of,
)
from jepsen_like.live.workloads.group import GroupMembers
from jepsen_like.live.workloads.members import ANSWER_S
from jepsen_like.live.workloads.poll import (
    POLL_RECORDS_MAX,
    POLL_S,
    READERS,
    assign,
    ends_in,
    new_consumer,
    records_of,
)
from raftmq.types import TopicPartition
from raftmq_client.blocking import Admin
from raftmq_client.core.admin import LATEST
from raftmq_client.errors import ClientError
from raftmq_client.options import Isolation

GROUP: Final = "viewers"
FIRST: Final = 20
"""Numbers of readers; others have those below."""
BEGIN_ANEW_S: Final = (30.0, 90.0)
CREATE_S: Final = 60.0
KINDS: Final[tuple[tuple[int, Isolation], ...]] = ((0, "read_uncommitted"), (1, "read_committed"))
"""By number of the reader: which library, and what it asks for."""
_ONE_TAG: Final = ("tag = 'red'", ["red"])
_SEVERAL: Final = ("not tag in ('red') and tag is not null", ["green", "blue"])


@frozen
class View:
    """One view."""

    name: str
    base: str
    partitions: int
    where: str
    tags: list[str]

    @property
    def keys(self) -> list[str]:
        """Its partitions."""
        return [key_of(self.name, number) for number in range(self.partitions)]


def views_of(around: Around) -> list[View]:
    """The views of a run."""
    plan = around.plan
    base, partitions = next(iter(plan.topics.items()))
    found = [View(f"view-of-{base}", base, partitions, *_ONE_TAG)]
    for base, partitions in plan.transactional.items():
        found.append(View(f"view-of-{base}", base, partitions, *_SEVERAL))
    return found


class Views:
    """Makes the views, and has them read."""

    def __init__(self, around: Around) -> None:
        self._around = around
        self._views = views_of(around)
        names = [view.name for view in self._views]
        self._crowds: tuple[Crowd, ...] = (
            Readers(around, [key for view in self._views for key in view.keys]),
            GroupMembers(around, GROUP, names, "poll_view"),
        )

    def start(self) -> None:
        """Make them, before anything breaks, and begin."""
        with Admin(self._around.plan.bootstrap, timeout_ms=CREATE_S * 1e3) as admin:
            for view in self._views:
                where = {"raftmq.view.of": view.base, "raftmq.view.where": view.where}
                admin.create_topic(view.name, configs=where)
                self._around.recorder.note(
                    self._around.process(),
                    "view_made",
                    topics=[view.name, view.base],
                    tags=view.tags,
                )
        for crowd in self._crowds:
            crowd.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the last polls."""
        return all(crowd.join(timeout_s) for crowd in self._crowds)

    def look_back(self) -> bool:
        """Read every view to its end; False when that took too long."""
        deadline = time.monotonic() + READ_BACK_S
        ends = _ends(self._around, self._views, deadline)
        return ends is not None and _read_to(self._around, ends, deadline)


class Readers(Restarting):
    """Consumers of both libraries that assign themselves every partition of the views."""

    def __init__(self, around: Around, keys: list[str]) -> None:
        super().__init__(around, "view-reader", len(KINDS), 55, BEGIN_ANEW_S)
        self._keys = keys

    def _live(self, number: int, until: float) -> None:
        around, recorder = self._around, self._around.recorder
        kind, isolation = KINDS[number]
        process = around.process()
        reader = READERS[kind](around, FIRST + number, isolation)
        starts = dict.fromkeys(self._keys, 0)
        try:
            reader.assign(starts)
            while self._goes_on(until):
                invoked = recorder.invoke(process, "poll_view", offsets=starts)
                starts = {}
                found, errors = reader.take()
                around.polled_records += sum(map(len, found.values()))
                recorder.ok(invoked, records=found, error="; ".join(sorted(errors)))
        finally:
            reader.close()


def _ends(around: Around, views: list[View], deadline: float) -> dict[str, int] | None:
    """Where the views end, all that is committed by now being examined; None: nobody says."""
    pause = threading.Event()
    wanted = {TopicPartition(*parts_of(key)): LATEST for view in views for key in view.keys}
    with Admin(around.plan.bootstrap, timeout_ms=ANSWER_S * 1e3) as admin:
        while time.monotonic() < deadline:
            try:
                told = admin.list_offsets(wanted)
            except ClientError:
                pause.wait(0.5)
                continue
            return {key_of(p.topic, p.partition): found.offset for p, found in told.items()}
    return None


def _read_to(around: Around, ends: dict[str, int], deadline: float) -> bool:
    """Read views from their starts to these ends."""
    process = around.process()
    settings = {"enable.partition.eof": True, "fetch.wait.max.ms": 50}
    consumer = new_consumer(around.plan.bootstrap, "final-viewer", **settings)
    missing = dict(ends)
    starts = dict.fromkeys(ends, 0)
    try:
        assign(consumer, starts)
        while missing and time.monotonic() < deadline:
            invoked = around.recorder.invoke(process, "poll_view", offsets=starts)
            starts = {}
            messages = consumer.consume(POLL_RECORDS_MAX, POLL_S)
            found, errors = records_of(messages)
            reached = ends_in(messages)
            around.recorder.ok(
                invoked, records=found, offsets=reached, error="; ".join(sorted(errors))
            )
            missing = {key: end for key, end in missing.items() if reached.get(key, -1) < end}
        return not missing
    finally:
        consumer.close()
