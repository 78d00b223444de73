"""Where Spark finds the source "raftmq": it imports every module whose name begins so.

Spark looks for `DefaultSource` (PySpark 4.0 and later). An error here would break the look-up of
everybody's sources, so nothing but the source is imported.
"""

from raftmq_spark.source import RaftmqDataSource as DefaultSource

__all__ = ["DefaultSource"]
