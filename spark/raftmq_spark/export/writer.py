"""Writes one range of a partition as Parquet files, one for each date; runs in Spark's tasks.

File names carry topic, date, partition, range, run and attempt, so that a retried or speculative
task never touches the files of another one; which of them count is up to the manifest alone. Rows
of a file are in the order of their offsets. Never plans, commits or decides what counts.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import date, timedelta
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from attrs import define, field, frozen

from raftmq_spark.decode import arrow_schema
from raftmq_spark.errors import ReadError
from raftmq_spark.export.archive import DATE_PREFIX, NO_DATE, topic_folder
from raftmq_spark.export.manifest import DataFile, ExportedRange, Gap, PartitionKey
from raftmq_spark.export.store import Location, Store, open_store
from raftmq_spark.plan import RangePart
from raftmq_spark.reader import read_range
from raftmq_spark.security import ClientSettings

COLUMNS: Final = ("partition", "offset", "timestamp", "timestampType", "key", "value", "headers")
"""Of every file. The topic and the date are in the path, as Hive and Spark read them."""
COMPRESSIONS: Final = ("zstd", "snappy", "lz4", "gzip", "none")
_DAY_US: Final = 86_400_000_000
_EPOCH: Final = date(1970, 1, 1)
_DAYS: Final = (date.min - _EPOCH).days, (date.max - _EPOCH).days
_NO_DAY: Final = _DAYS[0] - 1
_NO_TIMESTAMP_US: Final = -1_000
UNREADABLE: Final = "unreadable"
"""Why of a gap: batches whose records cannot be read."""
_OPEN_MAX: Final = 24
"""Files that a task has open. Beyond it the one longest unused ends, and its date gets another."""


@frozen
class RangeTask:
    """What a task needs to know."""

    part: RangePart
    run: str
    client: ClientSettings
    location: Location
    compression: str = "zstd"
    skips_unreadable: bool = False


@frozen
class Written:
    """What became of a task's range: ranges and gaps that fill it."""

    ranges: tuple[ExportedRange, ...]
    gaps: tuple[Gap, ...] = ()

    @property
    def rows(self) -> int:
        """Rows in its files."""
        return sum(item.rows for item in self.ranges)


def write_range(task: RangeTask, store: Store | None = None) -> Written:
    """Write all records of a range; gives the files for the manifest.

    Raises:
        DataLossError: some are not there any more.
        ReadError: some cannot be read, and are not to be passed by.
        StoreError: they cannot be written.
    """
    part = task.part
    store = open_store(task.location) if store is None else store
    writing = _Writing(store, task, secrets.token_hex(4))
    try:
        passed_by = writing.pass_by if task.skips_unreadable else None
        for batch in read_range(task.client, part, columns=COLUMNS, passed_by=passed_by):
            writing.add(batch)
        return writing.finish()
    except BaseException as error:
        writing.abandon(error)
        raise


class _HashingSink:
    """A file for pyarrow to write to that counts and sums what passes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.digest = hashlib.sha256()
        self.size = 0
        self.closed = False

    def write(self, data: Any) -> int:
        """Pass bytes on."""
        self.digest.update(data)
        self._stream.write(data)
        self.size += len(data)
        return len(data)

    def tell(self) -> int:
        """Bytes so far."""
        return self.size

    def flush(self) -> None:
        """Nothing is held back here."""

    def close(self) -> None:
        """The stream belongs to who opened it."""
        self.closed = True


@define
class _OpenFile:
    """A Parquet file in the making."""

    path: str
    date: str
    first_offset: int
    sink: _HashingSink
    writer: Any
    closing: ExitStack
    rows: int = 0
    last_offset: int = -1

    def add(self, batch: pa.RecordBatch) -> None:
        """Append rows, in the order of their offsets."""
        self.writer.write_batch(batch)
        self.rows += batch.num_rows
        self.last_offset = batch.column("offset")[-1].as_py()

    def finish(self) -> DataFile:
        """End the file; from here on it is seen under its name."""
        self.writer.close()
        self.closing.close()
        return DataFile(
            path=self.path,
            date=self.date,
            rows=self.rows,
            bytes=self.sink.size,
            sha256=self.sink.digest.hexdigest(),
            first_offset=self.first_offset,
            last_offset=self.last_offset,
        )


@define
class _Writing:
    """One attempt at one range."""

    store: Store
    task: RangeTask
    attempt: str
    next_offset: int = -1
    open: dict[int, _OpenFile] = field(factory=dict)  # by day, the longest unused first
    done: list[DataFile] = field(factory=list)
    gaps: list[Gap] = field(factory=list)

    def add(self, batch: pa.RecordBatch) -> None:
        """Write the rows of a batch to the files of their dates."""
        self._check_order(batch)
        for day, rows in split_by_day(batch):
            file = self.open.pop(day, None)
            if file is None:
                if len(self.open) >= _OPEN_MAX:
                    oldest = next(iter(self.open))
                    self.done.append(self.open.pop(oldest).finish())
                file = self._create(day, rows)
            self.open[day] = file
            file.add(rows)

    def pass_by(self, start: int, end: int, _why: str) -> None:
        """These offsets cannot be read: what is before them ends, what follows is a new range."""
        self._end_files()
        if self.gaps and self.gaps[-1].end == start:
            start = self.gaps.pop().start
        self.gaps.append(Gap(*self._key, start, end, UNREADABLE))

    def finish(self) -> Written:
        """End all files."""
        self._end_files()
        files = sorted(self.done, key=lambda file: (file.first_offset, file.path))
        part, ranges, at = self.task.part, [], self.task.part.start
        for start, end in [*((gap.start, gap.end) for gap in self.gaps), (part.end, part.end)]:
            if at < start:
                mine = tuple(file for file in files if at <= file.first_offset < start)
                rows = sum(file.rows for file in mine)
                ranges.append(ExportedRange(*self._key, at, start, rows, mine))
            at = end
        return Written(tuple(ranges), tuple(self.gaps))

    @property
    def _key(self) -> PartitionKey:
        part = self.task.part
        return PartitionKey(part.topic, str(part.topic_id or ""), part.partition)

    def _end_files(self) -> None:
        while self.open:
            self.done.append(self.open.pop(next(iter(self.open))).finish())

    def abandon(self, error: BaseException) -> None:
        """Delete what was written: this attempt failed."""
        for file in self.open.values():
            with suppress(OSError):  # maybe what failed; all that counts is that the file goes
                file.writer.close()
            file.closing.__exit__(type(error), error, error.__traceback__)
        for done in self.done:
            self.store.delete(done.path)

    def _check_order(self, batch: pa.RecordBatch) -> None:
        """What goes into an archive is within its range, ascending, each offset once."""
        part = self.task.part
        offsets = batch.column("offset").to_numpy()
        if not len(offsets):
            return
        is_ascending = bool(np.all(np.diff(offsets) > 0))
        lowest = max(part.start, self.next_offset)
        if not is_ascending or offsets[0] < lowest or offsets[-1] >= part.end:
            raise ReadError(
                f"{part}: offsets {offsets[0]} to {offsets[-1]} were read where those from"
                f" {lowest} on were due"
            )
        self.next_offset = int(offsets[-1]) + 1

    def _create(self, day: int, rows: pa.RecordBatch) -> _OpenFile:
        part = self.task.part
        told = day_text(day)
        piece = len(self.done) + len(self.open)
        name = (
            f"{part.topic}-{part.partition:05d}-{part.start:020d}-{part.end:020d}"
            f"-{self.task.run}-{self.attempt}-{piece}.parquet"
        )
        path = f"{topic_folder(part.topic)}/{DATE_PREFIX}{told or NO_DATE}/{name}"
        closing = ExitStack()
        sink = _HashingSink(closing.enter_context(self.store.create(path)))
        compression = self.task.compression
        writer = pq.ParquetWriter(
            pa.PythonFile(sink, mode="w"), arrow_schema(COLUMNS), compression=compression
        )
        first = rows.column("offset")[0].as_py()
        return _OpenFile(path, told, first, sink, writer, closing)


def split_by_day(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """A batch by days since 1970 (UTC), each part in the order of its rows."""
    if not batch.num_rows:
        return
    times = batch.column("timestamp").cast(pa.int64()).to_numpy(zero_copy_only=False)
    days = times // _DAY_US
    days[(days < _DAYS[0]) | (days > _DAYS[1]) | (times == _NO_TIMESTAMP_US)] = _NO_DAY
    first = int(days[0])
    if bool(np.all(days == first)):
        yield first, batch
        return
    for day in np.unique(days).tolist():
        yield day, batch.filter(pa.array(days == day))


def day_text(day: int) -> str:
    """A day as in paths: `2026-03-01`; empty for times that are no date."""
    return "" if day == _NO_DAY else (_EPOCH + timedelta(days=day)).isoformat()
