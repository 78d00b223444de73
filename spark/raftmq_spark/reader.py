"""Reads half-open ranges of partitions as Arrow record batches; runs on executors and in exports.

    for batch in read_range(client, part, columns=("key", "value", "offset")):
        ...                                  # pyarrow.RecordBatch, offsets in order

All but the last have at least `rows_min` rows or `bytes_min` bytes. Together they hold every record
of `[part.start, part.end)` once, in order, or the read fails: records that retention took
meanwhile, a topic that was deleted (or deleted and created anew) and a log that ends below the
range are data loss, named with partition and offsets. Gaps inside a range (compaction, transaction
markers) are none. Each batch's CRC-32C is checked; a wrong one is fetched again and then refused.
Nothing here imports Spark.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Final, Self

import pyarrow as pa
from attrs import define, field

from raftmq.errors import ErrorCode
from raftmq.records import BatchHeader
from raftmq.types import TopicPartition
from raftmq_client.blocking.batches import BatchReader
from raftmq_client.errors import BrokerError, NoOffsetError
from raftmq_spark.decode import Pile, UndecodableError, decode
from raftmq_spark.errors import ReadError
from raftmq_spark.options import COLUMNS
from raftmq_spark.plan import RangePart, lose
from raftmq_spark.security import ClientSettings

PassedBy = Callable[[int, int, str], None]
"""Is told of offsets `[start, end)` that cannot be read, and why."""
ROWS_MIN: Final = 100_000
BYTES_MIN: Final = 8 << 20
_TURN_S: Final = 1.0
_FETCH_BYTES_MIN: Final = 256 << 10
_OFFSET_BYTES: Final = 4 << 10
"""A small range is not worth a fetch of many megabytes, most of which lie beyond it."""
_DELETED_S: Final = 10.0
"""A topic that brokers deny for so long is deleted; a broker just started may know none yet."""


def read_range(
    client: ClientSettings,
    part: RangePart,
    *,
    columns: Sequence[str] = COLUMNS,
    fails_on_data_loss: bool = True,
    passed_by: PassedBy | None = None,
    rows_min: int = ROWS_MIN,
    bytes_min: int = BYTES_MIN,
) -> Iterator[pa.RecordBatch]:
    """The records of one range, in order, as Arrow batches of these columns.

    A batch whose records cannot be read is an error, unless there is somebody to be told of it:
    then `passed_by(start, end, why)` is, between the rows before it and those behind it.

    Raises:
        DataLossError: some are not there any more, and `fails_on_data_loss`; else it is a warning.
        ReadError: nobody answers in time, or a batch breaks its format.
        ClientError: the cluster refuses us.
    """
    if part.size <= 0:
        return
    with _Read(client, part, fails_on_data_loss) as read:
        decoding = _Decoding(part, columns, passed_by)
        pile = Pile()
        first = part.start
        for header, batch in read.batches():
            if read.first != first and pile.rows:  # records were lost before this batch
                yield from decoding.rows(pile, first)
                pile = Pile()
            first = read.first
            try:
                pile.add(header, batch)
            except UndecodableError as error:
                yield from decoding.rows(pile, first)
                pile = Pile()
                decoding.pass_by(header, first, error)
            if pile.rows >= rows_min or pile.size >= bytes_min:
                yield from decoding.rows(pile, first)
                pile = Pile()
        read.check_topic()  # before the last rows: a topic created anew meanwhile is another one
        yield from decoding.rows(pile, first)


@define
class _Decoding:
    """Turns piles of one range into rows, and knows what to do with batches that cannot be."""

    part: RangePart
    columns: Sequence[str]
    passed_by: PassedBy | None

    def rows(self, pile: Pile, first: int) -> Iterator[pa.RecordBatch]:
        """The rows of a pile, in one batch; around unreadable ones in several.

        Raises:
            ReadError: one is unreadable, and nobody is to be told.
        """
        if not pile.rows:
            return
        part = self.part
        try:
            yield decode(pile, part.topic, part.partition, first, part.end, self.columns)
            return
        except UndecodableError as error:
            if self.passed_by is None:
                raise self._refused(error) from error
        for header, single in zip(pile.headers, pile.singles(), strict=True):
            try:
                rows = decode(single, part.topic, part.partition, first, part.end, self.columns)
            except UndecodableError as error:
                self.pass_by(header, first, error)
            else:
                yield rows

    def pass_by(self, header: BatchHeader, first: int, error: UndecodableError) -> None:
        """Go on behind a batch.

        Raises:
            ReadError: nobody is to be told.
        """
        if self.passed_by is None:
            raise self._refused(error) from error
        start, end = max(header.base_offset, first), min(header.next_offset, self.part.end)
        self.passed_by(start, end, str(error))

    def _refused(self, error: UndecodableError) -> ReadError:
        part = self.part
        return ReadError(
            f"partition {part.topic}-{part.partition}: the batch at offset {error.base_offset}"
            f" cannot be read: {error} (option skipUnreadable, in exports --skip-unreadable,"
            " passes it by)"
        )


@define
class _Read:
    """One range on its way: what is lost, what is late, and where it ends."""

    client: ClientSettings
    part: RangePart
    fails_on_data_loss: bool
    reader: BatchReader = field(init=False)
    first: int = field(init=False)
    """Records below it are not wanted, or gone: a batch may begin below the log start."""
    _is_over: bool = False

    def __enter__(self) -> Self:
        part, client = self.part, self.client
        self.first = part.start
        self.reader = BatchReader(
            client.bootstrap,
            TopicPartition(part.topic, part.partition),
            part.start,
            end=part.end,
            client_id=client.client_id,
            security=client.security(),
            rack=client.rack,
            fetch_bytes=min(client.fetch_bytes, max(_FETCH_BYTES_MIN, part.size * _OFFSET_BYTES)),
        )
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.reader.close()

    def batches(self) -> Iterator[tuple[BatchHeader, memoryview]]:
        """Whole batches that reach into the range, in order."""
        part, reader = self.part, self.reader
        self.check_topic()
        moved_at = time.monotonic()
        position = part.start
        while position < part.end and not self._is_over:
            for header, batch in self._receive():
                if header.base_offset >= part.end:
                    break
                if header.next_offset > self.first:
                    yield header, batch
            if reader.position != position:
                position, moved_at = reader.position, time.monotonic()
                continue
            waited = time.monotonic() - moved_at
            if waited >= _DELETED_S and reader.is_unknown:
                gone = "the topic is deleted, or has no such partition any more"
                self._lost(f"offsets [{position}, {part.end}) are gone: {gone}")
                return
            if waited * 1000 >= self.client.timeout_ms:
                raise ReadError(
                    f"partition {part.topic}-{part.partition}: nothing came at offset {position}"
                    f" of the range [{part.start}, {part.end}) for {waited:.0f} s"
                    f" ({reader.trouble})"
                )

    def check_topic(self) -> None:
        """Make sure that the topic is still the one that was planned.

        One that nobody knows (any more) is not judged here: whether its records can be read is.
        """
        if self.part.topic_id is None:
            return
        try:
            topic_id = self.reader.topic_id(self.client.timeout_ms / 1000)
        except BrokerError as error:
            if error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                raise
            return
        if topic_id is not None and topic_id != self.part.topic_id:
            self._lost("the topic was deleted and created anew since it was planned")
            self._is_over = True

    def _receive(self) -> list[tuple[BatchHeader, memoryview]]:
        try:
            return self.reader.read(_TURN_S)
        except NoOffsetError:
            try:
                log_start, stable_end = self.reader.bounds(self.client.timeout_ms / 1000)
            except BrokerError as error:
                if error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                    raise
                return []
            self._out_of_range(log_start, stable_end)
            return []

    def _out_of_range(self, log_start: int, stable_end: int) -> None:
        position, end = self.reader.position, self.part.end
        if position < log_start:
            lost_end = min(log_start, end)
            self._lost(f"offsets [{position}, {lost_end}) are gone, its log starts at {log_start}")
            self._is_over = log_start >= end
            self.first = log_start
            self.reader.seek(log_start)
        elif position > stable_end:
            self._lost(f"offsets [{position}, {end}) are gone, its log ends at {stable_end}")
            self._is_over = True
        else:
            self.reader.seek(position)  # it moved meanwhile; ask again

    def _lost(self, what: str) -> None:
        part = self.part
        where = f"partition {part.topic}-{part.partition}"
        lose(self.fails_on_data_loss, f"{where}: {what} (range [{part.start}, {part.end}))")
