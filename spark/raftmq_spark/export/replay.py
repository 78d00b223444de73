"""Produces an archive back into topics: same partition, key, value, headers and timestamp.

Each record gets two headers more, where it comes from and its old offset. They make a replay
resumable without a file of its own: what a target partition holds last says how far it came. Rows
go out in blocks that are acknowledged as a whole before the next begins, so a failure can tear the
last block at most; a resumed replay holds that block against the archive, goes on behind it if it's
whole, and refuses if rows in its midst are missing, since they could only be added out of order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import pyarrow as pa
from attrs import define, field, frozen

from raftmq.types import TopicPartition
from raftmq_client.blocking import Admin, Producer
from raftmq_client.core.accumulator import Receipt
from raftmq_client.core.admin import EARLIEST, LATEST, READ_COMMITTED
from raftmq_spark.export.archive import Archive
from raftmq_spark.export.errors import ArchiveError, ExportError
from raftmq_spark.export.manifest import ExportedRange
from raftmq_spark.export.planning import find_topics
from raftmq_spark.export.verify import range_rows, windows
from raftmq_spark.plan import RangePart, open_admin
from raftmq_spark.reader import read_range
from raftmq_spark.security import ClientSettings

SOURCE_HEADER: Final = "raftmq-replay"
OFFSET_HEADER: Final = "raftmq-replay-offset"
BLOCK_ROWS: Final = 10_000
_BLOCK_BYTES: Final = 16 << 20
_QUIET_S: Final = 1.0
_QUIET_TRIES: Final = 10


class Place(NamedTuple):
    """Where a record was when it was exported."""

    topic_id: str
    offset: int


@frozen
class ReplayWishes:
    """What to produce back, and where to."""

    topics: tuple[str, ...] = ()
    """Topics of the archive; all for none."""
    into: str | None = None
    """Another name, for one topic."""
    appends: bool = False
    """Also into a topic that has records of others."""
    compression: str = "none"


@define
class Replayed:
    """What became of one topic."""

    topic: str
    into: str
    rows: int = 0
    """Produced now."""
    rows_before: int = 0
    """There already, by an earlier replay."""


@frozen
class _Source:
    """One partition of one topic in the archive, over all its incarnations, in order."""

    topic: str
    partition: int
    ranges: list[ExportedRange] = field(factory=list)


Progressed = Callable[[int, int], None]
"""Told of rows done, and rows in all."""


def replay(
    archive: Archive,
    client: ClientSettings,
    wishes: ReplayWishes,
    *,
    progress: Progressed = lambda _done, _all: None,
    after_block: Callable[[], None] = lambda: None,
) -> list[Replayed]:
    """Produce what is missing of the archive; what is there already is not produced again.

    Raises:
        ArchiveError: a topic is not in the archive, or what is in the target contradicts it.
        ExportError: a target has too few partitions, or records of others.
        ClientError: records could not be produced.
    """
    sources = _sources(archive, wishes)
    reports: dict[str, Replayed] = {}
    total = sum(item.rows for source in sources for item in source.ranges)
    with (
        open_admin(client) as admin,
        Producer(
            client.bootstrap,
            client_id="raftmq-replay",
            security=client.security(),
            compression=wishes.compression,  # type: ignore[arg-type]  # it is checked there
        ) as producer,
    ):
        targets = _make_targets(admin, sources, wishes)
        _wait_for_quiet(admin, targets.values())
        done = 0
        for source in sources:
            into = targets[source.topic, source.partition]
            report = reports.setdefault(source.topic, Replayed(source.topic, into.topic))
            one = _Replay(archive, client, admin, producer, source, into, wishes)
            last = one.find_last()
            for rows, was_there in one.produce_after(last):
                if was_there:
                    report.rows_before += rows
                else:
                    report.rows += rows
                    after_block()
                done += rows
                progress(done, total)
    return list(reports.values())


def _sources(archive: Archive, wishes: ReplayWishes) -> list[_Source]:
    found: dict[tuple[str, int], _Source] = {}
    for stored in archive.manifests():
        for item in stored.manifest.ranges:
            key = item.topic, item.partition
            found.setdefault(key, _Source(*key)).ranges.append(item)
    topics = sorted({topic for topic, _ in found})
    for name in wishes.topics:
        if name not in topics:
            has = ", ".join(topics) or "nothing"
            raise ArchiveError(f"{archive.store.location} has no topic {name!r}; it has {has}")
    chosen = [
        source
        for _, source in sorted(found.items())
        if not wishes.topics or source.topic in wishes.topics
    ]
    if wishes.into is not None and len({source.topic for source in chosen}) > 1:
        raise ExportError("--into names one topic; say which of the archive is to go there")
    return chosen


def _make_targets(
    admin: Admin, sources: Sequence[_Source], wishes: ReplayWishes
) -> dict[tuple[str, int], TopicPartition]:
    """Where each partition goes; topics that are not there are made."""
    needed: dict[str, int] = {}
    for source in sources:
        name = wishes.into or source.topic
        needed[name] = max(needed.get(name, 0), source.partition + 1)
    there = find_topics(admin, needed)
    for name, count in needed.items():
        if name not in there:
            admin.create_topic(name, partitions=count)
        elif len(there[name].partitions) < count:
            has = len(there[name].partitions)
            raise ExportError(f"topic {name!r} has {has} partitions where {count} are needed")
    return {
        (source.topic, source.partition): TopicPartition(
            wishes.into or source.topic, source.partition
        )
        for source in sources
    }


def _wait_for_quiet(admin: Admin, targets: Iterable[TopicPartition]) -> None:
    """What a killed replay had sent may still be on its way: wait until the ends stand still."""
    keys = list(targets)
    before = _ends(admin, keys)
    for _ in range(_QUIET_TRIES):
        if not any(before.values()):
            return
        time.sleep(_QUIET_S)
        now = _ends(admin, keys)
        if now == before:
            return
        before = now
    raise ExportError("others are producing into the target; a replay cannot tell what is its own")


def _ends(admin: Admin, keys: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
    wanted = dict.fromkeys(keys, LATEST)
    found = admin.list_offsets(wanted, isolation=READ_COMMITTED) if wanted else {}
    return {key: item.offset for key, item in found.items()}


class _Replay:
    """One partition of an archive on its way into one partition of a topic."""

    def __init__(
        self,
        archive: Archive,
        client: ClientSettings,
        admin: Admin,
        producer: Producer,
        source: _Source,
        into: TopicPartition,
        wishes: ReplayWishes,
    ) -> None:
        self._archive = archive
        self._client = client
        self._admin = admin
        self._producer = producer
        self._source = source
        self._into = into
        self._wishes = wishes
        self._is_skipping = False
        self._name = f"{archive.identity.archive}/{source.topic}/{source.partition}"

    # What is there.

    def find_last(self) -> list[Place]:
        """The last records of this archive's partition in the target, oldest first.

        Raises:
            ExportError: there are records of others, and none of ours.
        """
        end = _ends(self._admin, [self._into])[self._into]
        found = self._admin.list_offsets({self._into: EARLIEST})
        start = found[self._into].offset
        places: list[Place] = []
        stop = end
        others = 0
        while stop > start and len(places) < BLOCK_ROWS:
            begin = max(start, stop - BLOCK_ROWS)
            ours = self._places(begin, stop)
            others += stop - begin - len(ours)
            places = ours + places
            stop = begin
        if others and not places and not self._wishes.appends:
            raise ExportError(
                f"{self._into} has records that are not of this archive; --into names another"
                " topic, --append adds to this one"
            )
        return places[-BLOCK_ROWS:]

    def _places(self, start: int, end: int) -> list[Place]:
        """Where the records `[start, end)` of the target come from, if from our source."""
        part = RangePart(self._into.topic, self._into.partition, start, end)
        places = []
        for batch in read_range(self._client, part, columns=("offset", "headers")):
            for headers in batch.column("headers").to_pylist():
                told = {item["key"]: item["value"] for item in headers or ()}
                source = (told.get(SOURCE_HEADER) or b"").decode()
                name, _, topic_id = source.rpartition("/")
                if name == self._name:
                    places.append(Place(topic_id, int(told[OFFSET_HEADER])))
        return places

    # What is missing.

    def produce_after(self, last: list[Place]) -> Iterator[tuple[int, bool]]:
        """Produce what comes behind `last`; gives rows, and whether they were there before.

        Raises:
            ArchiveError: the last rows in the target are not in a row in the archive.
        """
        waiting = list(last)
        is_behind = not waiting
        for item in self._source.ranges:
            for begin, end in windows(item.start, item.end):
                table = range_rows(self._archive, item, begin, end)
                if not is_behind:
                    table, was_there = self._skip(table, item, waiting)
                    is_behind = not waiting
                    yield was_there, True
                for rows in self._produce(table, item.topic_id):
                    yield rows, False
        if waiting:
            raise self._torn(waiting[0])

    def _skip(
        self, table: pa.Table, item: ExportedRange, waiting: list[Place]
    ) -> tuple[pa.Table, int]:
        """Pass over what is there; it must come in the archive's order, without a hole."""
        offsets = table["offset"].to_pylist()
        is_begun = self._is_skipping
        first = waiting[0]
        if not is_begun and (item.topic_id != first.topic_id or first.offset not in offsets):
            return table.slice(len(offsets)), len(offsets)
        position = 0 if is_begun else offsets.index(first.offset)
        self._is_skipping = True
        while position < len(offsets) and waiting:
            if Place(item.topic_id, offsets[position]) != waiting[0]:
                raise self._torn(Place(item.topic_id, offsets[position]))
            waiting.pop(0)
            position += 1
        return table.slice(position), position

    def _produce(self, table: pa.Table, topic_id: str) -> Iterator[int]:
        """Send rows in blocks, each acknowledged before the next."""
        source = f"{self._name}/{topic_id}".encode()
        receipts: list[Receipt] = []
        size = 0
        times = table["timestamp"].cast(pa.int64())
        table = table.set_column(table.schema.get_field_index("timestamp"), "timestamp", times)
        for batch in table.to_batches(BLOCK_ROWS):
            for row in batch.to_pylist():
                headers = [
                    (item["key"], item["value"])
                    for item in row["headers"] or ()
                    if item["key"] not in (SOURCE_HEADER, OFFSET_HEADER)
                ]
                headers.append((SOURCE_HEADER, source))
                headers.append((OFFSET_HEADER, b"%d" % row["offset"]))
                receipts.append(
                    self._producer.send(
                        self._into.topic,
                        row["value"],
                        row["key"],
                        headers,
                        self._into.partition,
                        row["timestamp"] // 1000,
                    )
                )
                size += len(row["value"] or b"") + len(row["key"] or b"")
                if len(receipts) >= BLOCK_ROWS or size >= _BLOCK_BYTES:
                    yield self._settle(receipts)
                    receipts, size = [], 0
        if receipts:
            yield self._settle(receipts)

    def _settle(self, receipts: list[Receipt]) -> int:
        self._producer.flush()
        for receipt in receipts:
            receipt.result()
        return len(receipts)

    def _torn(self, place: Place) -> ArchiveError:
        return ArchiveError(
            f"{self._into}: the replayed rows around old offset {place.offset} are not in a row: an"
            " earlier replay failed within a block. Delete the topic, or name another with --into"
        )
