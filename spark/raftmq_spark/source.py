"""The source that Spark runs: options checked at once, ranges planned once, rows as Arrow batches.

Spark makes a `RaftmqDataSource` when a DataFrame is defined, asks its reader for partitions when
the DataFrame is first run (its ranges stay fixed from then on), and calls `read` once per task
attempt on executors; attempts of one part read the very same offsets. All that travels between
those processes is plain data. The only module of this package that imports Spark.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import datasource
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from raftmq_spark.errors import OptionError
from raftmq_spark.filters import Limits, read_filter
from raftmq_spark.options import COLUMNS, SourceOptions, read_options
from raftmq_spark.plan import RangePart, make_plan, split

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT: Final = "raftmq"
_TYPES: Final[dict[str, DataType]] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
    "headers": ArrayType(
        StructType([StructField("key", StringType()), StructField("value", BinaryType())])
    ),
}
assert tuple(_TYPES) == COLUMNS


def spark_schema(columns: Iterable[str]) -> StructType:
    """The schema of these columns, as Spark's Kafka source has it."""
    return StructType([StructField(name, _TYPES[name]) for name in columns])


class RaftmqDataSource(datasource.DataSource):
    """`spark.read.format("raftmq")`."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.checked: SourceOptions = read_options(dict(options.items()))

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return FORMAT

    def schema(self) -> StructType:
        """The columns chosen by `columns` and `includeHeaders`."""
        return spark_schema(self.checked.columns)

    def reader(self, schema: StructType) -> datasource.DataSourceReader:
        """A batch reader.

        Raises:
            OptionError: `schema` was given by the user and is another one.
        """
        expected = self.schema()
        if [(f.name, f.dataType) for f in schema] != [(f.name, f.dataType) for f in expected]:
            raise OptionError(
                f"the schema is {expected.simpleString()}; it cannot be given, but option"
                " 'columns' chooses columns and their order"
            )
        # Spark itself refuses a reader with pushFilters, naming the setting, where
        # spark.sql.python.filterPushdown.enabled is not set.
        kind = FilteringReader if self.checked.pushes_filters else RaftmqReader
        return kind(self.checked)


class RaftmqReader(datasource.DataSourceReader):
    """Plans parts of ranges, and reads them."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._limits = Limits()

    def partitions(self) -> Sequence[datasource.InputPartition]:
        """Fix the ranges; called once, on the driver."""
        options = self._options
        plan = self._limits.narrow(make_plan(options), options)
        parts = split(plan, partitions_min=options.partitions_min, records_max=options.records_max)
        return [datasource.InputPartition(part) for part in parts]

    def read(self, partition: datasource.InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one part, on an executor."""
        if partition.value is None:
            return  # what Spark sends for a plan without parts
        from raftmq_spark.reader import read_range

        part: RangePart = partition.value
        options = self._options
        yield from read_range(
            options.client,
            part,
            columns=options.columns,
            fails_on_data_loss=options.fails_on_data_loss,
            passed_by=_warn_of(part) if options.skips_unreadable else None,
        )


def _warn_of(part: RangePart) -> Callable[[int, int, str], None]:
    def warn(start: int, end: int, why: str) -> None:
        where = f"partition {part.topic}-{part.partition}: offsets [{start}, {end})"
        warnings.warn(f"{where} are passed by, unreadable: {why}", RuntimeWarning, stacklevel=2)

    return warn


class FilteringReader(RaftmqReader):
    """A reader that leaves out ranges which filters exclude: only where the user asks for it.

    Spark 4.2 and 4.3 keep what a scan with pushed filters planned for every other scan of the same
    DataFrame, too (PythonScanBuilder, `ds.setReadInfo`), which then reads too few rows.
    """

    def pushFilters(self, filters: list[datasource.Filter]) -> Iterable[datasource.Filter]:
        """Take what narrows ranges; give back what Spark must still evaluate."""
        left = []
        for item in filters:
            limits = read_filter(item)
            if limits is None:
                left.append(item)
                continue
            self._limits = self._limits.both(limits)
            if not limits.is_exact:
                left.append(item)
        return left
