"""What can go wrong between Spark and a cluster, each error naming what it is about.

Errors cross processes (executor to driver) as text, so a message says everything: option, topic,
partition, offsets, and what to do. Nothing here imports Spark.
"""

from __future__ import annotations

from raftmq.errors import RaftmqError


class SparkSourceError(RaftmqError):
    """Base of all that this package raises on purpose."""


class OptionError(SparkSourceError, ValueError):
    """An option is unknown, makes no sense, or contradicts another one; the message names it."""


class PlanError(SparkSourceError):
    """The cluster cannot give what the options ask for."""


class DataLossError(SparkSourceError):
    """Records of a planned or asked-for range are not there any more (`failOnDataLoss`)."""


class ReadError(SparkSourceError):
    """A range cannot be read: nobody answers in time, or what was stored breaks its format."""


class MissingPrerequisiteError(SparkSourceError):
    """Java, pyspark or pyarrow is missing or too old; the message says what to install."""
