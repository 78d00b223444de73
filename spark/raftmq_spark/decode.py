"""Records of whole batches into Arrow columns, without a Python object per record.

One short loop walks the records' lengths; all else (variable-length integers, offsets, times) is
numpy over every record of several batches at once (`fields.py`), and keys and values are gathered
by Arrow straight out of the batches' bytes. What does not follow the format is told exactly, by
`raftmq.records`, which reads the batch again record by record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from attrs import define, field

from raftmq.codec import OUTPUT_MAX, decompress
from raftmq.errors import CorruptBatchError
from raftmq.records import HEADER_SIZE, BatchHeader, read_records
from raftmq.types import Buffer
from raftmq_spark.fields import Fields, HeaderFields, Ints

_MILLISECONDS_MAX: Final = (2**63 - 1) // 1000
_HEADER: Final = [pa.field("key", pa.string()), pa.field("value", pa.binary())]

COLUMN_TYPES: Final[dict[str, pa.DataType]] = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestampType": pa.int32(),
    "headers": pa.list_(pa.field("element", pa.struct(_HEADER))),
}
"""What Spark makes of the Kafka source's schema, in Arrow's types."""


def arrow_schema(columns: Iterable[str]) -> pa.Schema:
    """The Arrow schema of these columns."""
    return pa.schema([(name, COLUMN_TYPES[name]) for name in columns])


class UndecodableError(CorruptBatchError):
    """A batch whose records cannot be read, though its checksum holds."""

    def __init__(self, message: str, base_offset: int) -> None:
        self.base_offset = base_offset
        super().__init__(message)


@define
class Pile:
    """Batches gathered until they are worth decoding together."""

    headers: list[BatchHeader] = field(factory=list)
    batches: list[memoryview] = field(factory=list)
    payloads: list[Buffer] = field(factory=list)
    """Of each batch its records, decompressed."""
    rows: int = 0
    size: int = 0

    def add(self, header: BatchHeader, batch: memoryview, output_max: int = OUTPUT_MAX) -> None:
        """Add a batch whose checksum holds, behind all others.

        Raises:
            UndecodableError: it does not decompress.
        """
        try:
            payload = decompress(header.codec, batch[HEADER_SIZE:], output_max=output_max)
        except CorruptBatchError as error:
            raise UndecodableError(error.message, header.base_offset) from error
        self.headers.append(header)
        self.batches.append(batch)
        self.payloads.append(payload)
        self.rows += header.record_count
        self.size += len(payload)

    def singles(self) -> Iterator[Pile]:
        """Each batch as a pile of its own."""
        for header, batch, payload in zip(self.headers, self.batches, self.payloads, strict=True):
            yield Pile([header], [batch], [payload], header.record_count, len(payload))


def decode(
    pile: Pile, topic: str, partition: int, start: int, end: int, columns: Sequence[str]
) -> pa.RecordBatch:
    """The records of a pile with offsets in `[start, end)`.

    Raises:
        UndecodableError: records break their format, or a timestamp does not fit.
    """
    data = b"".join(pile.payloads)
    try:
        fields = Fields(data, pile.headers, [len(payload) for payload in pile.payloads])
        fields.cut(start, end)
        headers = HeaderFields(fields) if "headers" in columns else None
    except (IndexError, CorruptBatchError) as error:
        raise _explain(pile, error) from error
    makers: dict[str, Callable[[], pa.Array]] = {
        "key": lambda: _gather(data, fields.key_starts, fields.key_sizes),
        "value": lambda: _gather(data, fields.value_starts, fields.value_sizes),
        "topic": lambda: pa.repeat(pa.scalar(topic, pa.string()), fields.count),
        "partition": lambda: pa.repeat(pa.scalar(partition, pa.int32()), fields.count),
        "offset": lambda: pa.array(fields.offsets),
        "timestamp": lambda: _times(fields),
        "timestampType": lambda: pa.array(fields.timestamp_types),
        "headers": lambda: _headers(data, fields, headers),
    }
    arrays = [makers[name]() for name in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(columns))


def _explain(pile: Pile, error: Exception) -> UndecodableError:
    """Say which batch is wrong, and how, by reading each record by record."""
    for header, batch in zip(pile.headers, pile.batches, strict=True):
        try:
            for _ in read_records(batch):
                pass
        except CorruptBatchError as found:
            return UndecodableError(found.message, header.base_offset)
    return UndecodableError(f"records cannot be decoded: {error!r}", pile.headers[0].base_offset)


def _gather(data: bytes, starts: Ints, sizes: Ints) -> pa.Array:
    """Slices of `data`, which follow each other, as one column; a size of -1 is null.

    The slices and what lies between them are, without a copy, one Arrow array over `data`, of
    which every other element is taken.
    """
    count = len(starts)
    is_null = sizes < 0
    nulls = int(np.count_nonzero(is_null))
    if nulls == count:
        return pa.nulls(count, pa.binary())
    edges = np.empty(2 * count, np.int32)
    edges[0::2] = starts
    edges[1::2] = starts + np.maximum(sizes, 0)
    buffers = [None, pa.py_buffer(edges), pa.py_buffer(data)]
    pieces = pa.Array.from_buffers(pa.binary(), 2 * count - 1, buffers, null_count=0)
    wanted = np.arange(0, 2 * count, 2, dtype=np.int32)
    return pieces.take(pa.array(wanted, mask=is_null if nulls else None))


def _times(fields: Fields) -> pa.Array:
    """Milliseconds as the microseconds that Spark has."""
    times = fields.timestamps
    wrong = np.abs(times) > _MILLISECONDS_MAX
    if wrong.any():
        row = int(np.argmax(wrong))
        raise UndecodableError(
            f"the timestamp {int(times[row])} ms at offset {int(fields.offsets[row])} does not fit"
            " Spark's microseconds; leave the column timestamp out (option columns)",
            int(fields.offsets[row]),
        )
    return pa.array(times * 1000).view(COLUMN_TYPES["timestamp"])


def _headers(data: bytes, fields: Fields, found: HeaderFields | None) -> pa.Array:
    assert found is not None, "they are looked for where the column is wanted"
    if not len(found.name_starts):
        return pa.nulls(fields.count, COLUMN_TYPES["headers"])
    try:
        names = _gather(data, found.name_starts, found.name_sizes).cast(pa.string())
    except pa.ArrowInvalid as error:
        raise UndecodableError(
            "a record header's name is not UTF-8; leave the column headers out (option columns)",
            int(fields.offsets[0]),
        ) from error
    values = _gather(data, found.value_starts, found.value_sizes)
    return pa.ListArray.from_arrays(
        pa.array(found.edges),
        pa.StructArray.from_arrays([names, values], fields=_HEADER),
        type=COLUMN_TYPES["headers"],
        mask=pa.array(fields.header_counts == 0),
    )
