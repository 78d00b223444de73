"""Leads one export from the group's offsets to a manifest and back to the group.

    take the group -> settle runs that died -> finish what the last manifest lacks -> plan
    -> note the run -> write files -> put the manifest -> commit offsets -> forget the run

The manifest is the moment at which rows count. Before it a crash leaves files that do not count and
are deleted by the next run; after it the next run commits the offsets that are missing. Whoever
watches is told of each step (`Watcher`); which machine writes the files is the runner's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from itertools import pairwise
from typing import Final, Protocol

from attrs import field, frozen

from raftmq.types import TopicPartition
from raftmq_client.blocking import Admin
from raftmq_client.core.group_admin import CommittedOffset
from raftmq_client.errors import ClientError
from raftmq_spark.errors import DataLossError, SparkSourceError
from raftmq_spark.export.archive import Archive, State, open_archive
from raftmq_spark.export.errors import ArchiveError, ExportError, LostRecordsError
from raftmq_spark.export.lease import Lease
from raftmq_spark.export.manifest import Manifest, PartitionKey, Run, Until, in_order
from raftmq_spark.export.planning import (
    Decided,
    Wishes,
    decide,
    find_topics,
    need_topics,
    partition_key,
    positions,
)
from raftmq_spark.export.store import Location
from raftmq_spark.export.writer import RangeTask, Written
from raftmq_spark.plan import open_admin
from raftmq_spark.security import ClientSettings

_PLANS_MAX: Final = 3
LEASE_SUFFIX: Final = ".raftmq-export"
"""With `--until committed` the group is its consumers'; exports keep apart in one beside it."""


class Step(Enum):
    """What was just reached."""

    GROUP_TAKEN = "group taken"
    SETTLED = "earlier runs settled"
    FINISHED = "earlier manifest finished"
    PLANNED = "planned"
    NOTED = "run noted"
    WRITTEN = "files written"
    COUNTED = "manifest written"
    COMMITTED = "offsets committed"
    DONE = "done"


@frozen
class Progress:
    """How far the writing is."""

    tasks_done: int
    tasks: int
    rows: int


class Watcher:
    """Is told what happens; this one keeps it to itself."""

    def reached(self, step: Step) -> None:
        """A step is done, and durable where it says so."""

    def planned(self, decided: Decided) -> None:
        """What will be written."""

    def progress(self, progress: Progress) -> None:
        """Some of it is written."""

    def say(self, text: str) -> None:
        """Something for people to know."""


class Runner(Protocol):
    """Writes ranges, somewhere."""

    def run(
        self, tasks: Sequence[RangeTask], progress: Callable[[Progress], None]
    ) -> list[Written]:
        """Write all; each once, in any order.

        Raises:
            DataLossError: records of one are not there any more.
            ExportError: it did not work, and trying again within the run did not help.
        """
        ...


@frozen
class Order:
    """What to export."""

    topics: tuple[str, ...]
    location: Location
    client: ClientSettings
    wishes: Wishes
    compression: str = "zstd"
    skips_unreadable: bool = False
    session_ms: int = 15_000


@frozen
class Report:
    """What came of it."""

    manifest: Manifest | None
    """None when nothing was new."""
    finished: int | None = None
    """The manifest of an earlier run whose offsets this one committed."""
    voided: tuple[str, ...] = ()
    """Earlier runs that died before their manifest."""
    deleted: tuple[str, ...] = field(factory=tuple)
    """Files of theirs."""


def export(order: Order, runner: Runner, watcher: Watcher | None = None) -> Report:
    """Export what is new, exactly once.

    Raises:
        BusyError: another export has the group.
        LostRecordsError: retention took records first.
        ArchiveError: archive, group and log contradict each other.
        ExportError: something else is in the way; nothing of this run counts.
    """
    with open_admin(order.client) as admin:
        return _Export(order, runner, watcher or Watcher(), admin).run()


class _Export:
    """One run."""

    def __init__(self, order: Order, runner: Runner, watcher: Watcher, admin: Admin) -> None:
        self._order = order
        self._runner = runner
        self._watcher = watcher
        self._admin = admin
        self._archive: Archive
        self._lease: Lease | None = None

    def run(self) -> Report:
        order, watcher = self._order, self._watcher
        need_topics(self._admin, order.topics)  # a wrong name should not make an archive
        with self._take() as lease:
            self._lease = lease
            watcher.reached(Step.GROUP_TAKEN)
            self._archive, _ = open_archive(
                order.location,
                cluster=self._admin.cluster([]).cluster_id or "",
                group=order.wishes.group,
                until=order.wishes.until,
            )
            dead, deleted = self._settle()
            watcher.reached(Step.SETTLED)
            state = self._archive.state()
            finished = self._finish(state)
            watcher.reached(Step.FINISHED)
            manifest = self._write(state)
            for run in dead:  # tasks of a dead driver may have gone on for a while
                deleted += self._archive.clean(run)
                self._archive.end(run)
            watcher.reached(Step.DONE)
        return Report(manifest, finished, tuple(run.run for run in dead), tuple(deleted))

    def _take(self) -> AbstractContextManager[Lease]:
        order = self._order
        group = order.wishes.group
        if order.wishes.until is Until.COMMITTED:
            group += LEASE_SUFFIX
        return Lease(order.client, group, session_ms=order.session_ms, tell=self._watcher.say)

    def _settle(self) -> tuple[list[Run], list[str]]:
        """Decide about runs that did not end; those that do not count leave nothing."""
        dead, deleted = [], []
        for run in self._archive.open_runs():
            if self._archive.settle(run):
                manifest = self._archive.manifest(run.number).manifest
                deleted += self._archive.sweep(run, manifest)
                self._archive.end(run)
            else:
                deleted += self._archive.clean(run)
                dead.append(run)
        return dead, deleted

    def _finish(self, state: State) -> int | None:
        """Commit what the manifests count and the group does not yet; its number if any."""
        if state.last is None or self._order.wishes.until is Until.COMMITTED:
            return None
        behind = self._behind(state.ends)
        if not behind:
            return None
        self._commit(behind, state.last.manifest.number)
        return state.last.manifest.number

    def _behind(self, ends: dict[PartitionKey, int]) -> dict[TopicPartition, int]:
        """Partitions whose committed offset is below the archive's end, with that end."""
        topics = find_topics(self._admin, (key.topic for key in ends))
        current = {
            key: end
            for key, end in ends.items()
            if key.topic in topics
            and key == partition_key(topics[key.topic], key.partition)
            and topics[key.topic].has(key.partition)
        }
        found = (
            self._admin.group_offsets(
                self._order.wishes.group,
                [TopicPartition(key.topic, key.partition) for key in current],
            )
            if current
            else {}
        )
        behind = {}
        for key, end in current.items():
            name = TopicPartition(key.topic, key.partition)
            if name not in found or found[name].offset < end:
                behind[name] = end
        return behind

    def _write(self, state: State) -> Manifest | None:
        """Plan, write and count; again where retention passes and that is accepted."""
        order = self._order
        for attempt in range(_PLANS_MAX):
            decided = self._plan(state)
            if decided.is_empty:
                return None
            run = self._archive.begin(state, {part.topic for part in decided.parts})
            self._watcher.reached(Step.NOTED)
            try:
                return self._count(state, run, decided)
            except DataLossError as error:
                self._give_up(run)
                told = str(error).partition("; failOnDataLoss")[0]  # no option of exports
                for name in sorted({*order.topics} - {*find_topics(self._admin, order.topics)}):
                    raise LostRecordsError(
                        f"topic {name!r} was deleted while it was exported; nothing of this run"
                        f" counts, export again without it ({told})"
                    ) from error
                if not order.wishes.accepts_loss or attempt == _PLANS_MAX - 1:
                    raise LostRecordsError(
                        f"{told}; --accept-loss goes on without them and writes the gap down"
                    ) from error
                self._watcher.say(f"{told}; planning again")
                state = self._archive.state()
            except (SparkSourceError, ClientError, OSError, KeyboardInterrupt):
                self._give_up(run)
                raise
        raise AssertionError("the last attempt returns or raises")

    def _plan(self, state: State) -> Decided:
        wishes = self._order.wishes
        topics = need_topics(self._admin, self._order.topics)
        found = positions(self._admin, topics, wishes.group)
        decided = decide(wishes, state.ends, found, topics)
        self._watcher.planned(decided)
        self._watcher.reached(Step.PLANNED)
        return decided

    def _count(self, state: State, run: Run, decided: Decided) -> Manifest:
        order = self._order
        tasks = [
            RangeTask(
                part,
                run.run,
                order.client,
                order.location,
                order.compression,
                order.skips_unreadable,
            )
            for part in decided.parts
        ]
        written = self._runner.run(tasks, self._watcher.progress) if tasks else []
        _check(decided, written)
        ranges = [item for one in written for item in one.ranges]
        unreadable = [gap for one in written for gap in one.gaps]
        for gap in unreadable:
            self._watcher.say(f"{gap.key} [{gap.start}, {gap.end}) cannot be read: passed by")
        self._watcher.reached(Step.WRITTEN)
        assert self._lease is not None
        self._lease.check()
        in_order = sorted(ranges, key=lambda item: (item.key, item.start))
        gaps = sorted([*decided.gaps, *unreadable], key=lambda gap: (gap.key, gap.start))
        manifest = self._archive.put(state, run, in_order, gaps)
        self._watcher.reached(Step.COUNTED)
        if order.wishes.until is Until.STABLE:
            touched = {item.key for item in ranges} | {gap.key for gap in gaps}
            offsets = {
                TopicPartition(key.topic, key.partition): end
                for key, end in manifest.end_of().items()
                if key in touched
            }
            self._commit(offsets, manifest.number)
        self._watcher.reached(Step.COMMITTED)
        self._archive.sweep(run, manifest)
        self._archive.end(run)
        return manifest

    def _commit(self, offsets: dict[TopicPartition, int], number: int) -> None:
        assert self._lease is not None
        note = f"raftmq-export {self._archive.identity.archive} {number}"
        gone = self._lease.commit(
            {key: CommittedOffset(offset, metadata=note) for key, offset in offsets.items()}
        )
        for key in gone:
            self._watcher.say(f"{key} was deleted meanwhile; the archive has it up to its end")

    def _give_up(self, run: Run) -> None:
        """This run failed: unless its manifest stands after all, leave nothing of it."""
        try:
            if not self._archive.settle(run):
                deleted = self._archive.clean(run)
                self._watcher.say(f"{len(deleted)} files of this run deleted; nothing of it counts")
            self._archive.end(run)
        except ExportError as error:
            self._watcher.say(f"the next run will clean up after this one: {error}")


def _check(decided: Decided, written: Sequence[Written]) -> None:
    """Each range was written once and no other, filled by what was read and what could not be."""
    planned = sorted((part.topic, part.partition, part.start, part.end) for part in decided.parts)
    found = []
    for one in written:
        items = in_order(one.ranges, one.gaps)
        if any(before.end != after.start for before, after in pairwise(items)):
            raise ArchiveError(f"a range was written with holes: {items}")
        found.append((items[0].topic, items[0].partition, items[0].start, items[-1].end))
    if planned != sorted(found):
        raise ArchiveError(f"{len(found)} ranges were written where {len(planned)} were planned")


__all__ = ["Order", "Progress", "Report", "Runner", "Step", "Watcher", "export"]
