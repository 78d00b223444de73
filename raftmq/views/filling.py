"""What workers do for views: judge stretches of a log, and make mixed batches anew.

A job holds what it reads and touches nothing that the loop uses, so it runs in any thread; the loop
takes over what it found. Only committed records are ever judged: the spans lie below the last
stable offset, and what belongs to an aborted transaction is passed over, as are markers. A batch
that cannot be opened, though its sum is right, can be read by nobody: it is passed over as well,
and counted.

`RebuiltBatches` keeps what was made anew for all readers of all views of a node, so that ten groups
cost one. Invariant: it is bounded by bytes, and the batch that was put last is in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol, TypeAlias

from attrs import define, field

from raftmq.errors import KafkaError
from raftmq.ports import Span
from raftmq.records import TIMESTAMP_MAX, BatchHeader, read_records, split_batches
from raftmq.types import Buffer
from raftmq.views.batches import NOTHING, Judged, Kind, judge, keep_matches
from raftmq.views.conditions import Condition

REBUILT_BYTES_MAX: Final = 32 << 20
"""What one node keeps of batches that it made anew."""
_OVERHEAD: Final = 200
"""About so many bytes an entry takes beside its batch."""


class AbortedRow(Protocol):
    """A transaction that was aborted: what its producer wrote between two offsets."""

    @property
    def producer_id(self) -> int: ...
    @property
    def first_offset(self) -> int: ...
    @property
    def marker_offset(self) -> int: ...


def _batches(spans: Iterable[Span]) -> Iterator[tuple[BatchHeader, memoryview]]:
    """The batches of spans, read from their files."""
    for span in spans:
        yield from split_batches(span.file.pread(span.size, span.position))


@define(slots=True, eq=False)
class JudgeJob:
    """Judges the batches of spans that follow each other, from the one on that holds `start`.

    Attributes:
        rebuilds: make mixed batches anew as well: somebody waits for them.
        judged: base offset, next offset and verdict of each batch.
        rebuilt: base offset and bytes of those that were made anew.
        size: bytes that were looked at.
        matches_count: records that match.
        unreadable: base offsets of batches that could not be opened.
    """

    spans: Sequence[Span]
    start: int
    aborted: Sequence[AbortedRow]
    condition: Condition
    rebuilds: bool = False
    judged: list[tuple[int, int, Judged]] = field(factory=list)
    rebuilt: list[tuple[int, Buffer]] = field(factory=list)
    size: int = 0
    matches_count: int = 0
    unreadable: list[int] = field(factory=list)

    def run(self) -> None:
        """Read and judge them.

        Raises:
            DiskError: the device failed.
            CorruptBatchError: the spans are no batches.
        """
        for header, batch in _batches(self.spans):
            if header.next_offset > self.start:
                self._take(header, batch)

    def _take(self, header: BatchHeader, batch: memoryview) -> None:
        self.size += header.size
        judged = NOTHING
        if not header.is_control and not self._is_aborted(header):
            try:
                judged = judge(batch, self.condition)
                if judged.kind is Kind.MIXED and self.rebuilds:
                    self.rebuilt.append((header.base_offset, kept(batch, self.condition)))
            except KafkaError:
                self.unreadable.append(header.base_offset)
                judged = NOTHING
        self.matches_count += judged.count
        self.judged.append((header.base_offset, header.next_offset, judged))

    def _is_aborted(self, header: BatchHeader) -> bool:
        return header.is_transactional and any(
            row.producer_id == header.producer_id
            and row.first_offset <= header.base_offset < row.marker_offset
            for row in self.aborted
        )


@define(slots=True, eq=False)
class RebuildJob:
    """Makes some of the batches in a span anew, of their matches alone.

    Attributes:
        wanted: their base offsets.
        rebuilt: base offset and bytes of each; none where nothing can be shown of it.
    """

    spans: Sequence[Span]
    wanted: frozenset[int]
    condition: Condition
    rebuilt: list[tuple[int, Buffer]] = field(factory=list)

    def run(self) -> None:
        """Read and rebuild them.

        Raises:
            DiskError: the device failed.
            CorruptBatchError: the spans are no batches.
        """
        for header, batch in _batches(self.spans):
            if header.base_offset in self.wanted:
                self.rebuilt.append((header.base_offset, kept(batch, self.condition)))


@define(slots=True, eq=False)
class TimeJob:
    """Finds the first match in a batch that is not older than a timestamp, or the newest of those.

    Attributes:
        start: matches below are deleted.
        is_newest: the first of those that have the greatest timestamp is wanted.
        found: (timestamp, offset, leader epoch), None where there is none.
    """

    spans: Sequence[Span]
    base_offset: int
    start: int
    timestamp_ms: int
    condition: Condition
    is_newest: bool = False
    found: tuple[int, int, int] | None = None

    def run(self) -> None:
        """Read and open it.

        Raises:
            DiskError: the device failed.
            CorruptBatchError: the spans are no batches.
        """
        for header, batch in _batches(self.spans):
            is_meant = header.base_offset == self.base_offset
            if is_meant and header.max_timestamp >= self.timestamp_ms:
                self._look(header, kept(batch, self.condition))

    def _look(self, header: BatchHeader, matches: Buffer) -> None:
        for record in read_records(matches) if matches else ():
            stamp = min(record.timestamp, TIMESTAMP_MAX)
            if record.offset < self.start or stamp < self.timestamp_ms:
                continue
            if self.found is None or stamp > self.found[0]:
                self.found = stamp, record.offset, header.leader_epoch
            if not self.is_newest:
                return


def kept(batch: Buffer, condition: Condition) -> Buffer:
    """A batch of the matches in one that has some; nothing where it can be judged, but breaks its
    format further on, so that no reader could use it."""
    try:
        return keep_matches(batch, condition)
    except KafkaError:
        return b""


Key: TypeAlias = tuple[object, int]
"""Which partition of which view, and a base offset."""


class RebuiltBatches:
    """Batches that were made anew, those used last, up to a number of bytes."""

    __slots__ = ("_batches", "_bytes", "_bytes_max")

    def __init__(self, bytes_max: int = REBUILT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._batches: OrderedDict[Key, Buffer] = OrderedDict()
        self._bytes = 0

    @property
    def size_bytes(self) -> int:
        """What it takes."""
        return self._bytes

    def get(self, owner: object, base_offset: int) -> Buffer | None:
        """The batch that was made of the one at an offset, if it is still here."""
        key = (owner, base_offset)
        found = self._batches.get(key)
        if found is not None:
            self._batches.move_to_end(key)
        return found

    def put(self, owner: object, rebuilt: Iterable[tuple[int, Buffer]]) -> None:
        """Keep batches; older ones make room."""
        for base_offset, batch in rebuilt:
            key = (owner, base_offset)
            before = self._batches.pop(key, None)
            if before is not None:
                self._bytes -= len(before) + _OVERHEAD
            self._batches[key] = batch
            self._bytes += len(batch) + _OVERHEAD
            while self._bytes > self._bytes_max and len(self._batches) > 1:
                _, dropped = self._batches.popitem(last=False)
                self._bytes -= len(dropped) + _OVERHEAD

    def forget(self, owner: object) -> None:
        """Let go of one partition of a view."""
        for key in [key for key in self._batches if key[0] == owner]:
            self._bytes -= len(self._batches.pop(key)) + _OVERHEAD
