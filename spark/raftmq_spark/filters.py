"""Filters of a query that narrow ranges: on topic, partition, offset and timestamp.

Topic, partition and offset are known of every range, so their filters are exact and Spark need not
look again. A timestamp only moves starts: the first record that is late enough is looked up, and as
later records may be older, Spark evaluates the filter too. All else is left to Spark.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any, Final

from attrs import evolve, frozen

from raftmq.types import TopicPartition
from raftmq_client.core.admin import READ_COMMITTED
from raftmq_spark.options import SourceOptions
from raftmq_spark.plan import Plan, Ranges, open_admin

_OFFSET_MAX: Final = 1 << 63
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@frozen
class Limits:
    """What a row's topic, partition, offset and timestamp may be."""

    topics: tuple[str, ...] | None = None
    partitions: tuple[int, ...] | None = None
    start: int = 0
    end: int = _OFFSET_MAX
    earliest_ms: int | None = None

    @property
    def is_exact(self) -> bool:
        """True where no row outside is left in the ranges."""
        return self.earliest_ms is None

    def both(self, other: Limits) -> Limits:
        """What both allow."""
        times = [ms for ms in (self.earliest_ms, other.earliest_ms) if ms is not None]
        return Limits(
            topics=_common(self.topics, other.topics),
            partitions=_common(self.partitions, other.partitions),
            start=max(self.start, other.start),
            end=min(self.end, other.end),
            earliest_ms=max(times, default=None),
        )

    def narrow(self, plan: Plan, options: SourceOptions) -> Plan:
        """The part of a plan within these limits; asks the cluster only for timestamps."""
        ranges: Ranges = {}
        for topic, partitions in plan.ranges.items():
            if self.topics is not None and topic not in self.topics:
                continue
            for partition, (start, end) in partitions.items():
                if self.partitions is not None and partition not in self.partitions:
                    continue
                end = max(start, min(end, self.end))
                ranges.setdefault(topic, {})[partition] = (min(end, max(start, self.start)), end)
        narrowed = evolve(plan, ranges=ranges)
        if self.earliest_ms is None or narrowed.size == 0:
            return narrowed
        return _start_later(narrowed, self.earliest_ms, options)


def _common(one: tuple[Any, ...] | None, other: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    if one is None or other is None:
        return other if one is None else one
    return tuple(item for item in one if item in other)


def _start_later(plan: Plan, earliest_ms: int, options: SourceOptions) -> Plan:
    wanted = {
        TopicPartition(part.topic, part.partition): max(earliest_ms, 0) for part in plan.parts()
    }
    with open_admin(options.client) as admin:
        found = admin.list_offsets(wanted, isolation=READ_COMMITTED)
    ranges: Ranges = {topic: dict(partitions) for topic, partitions in plan.ranges.items()}
    for key, item in found.items():
        start, end = ranges[key.topic][key.partition]
        later = end if item.offset < 0 else item.offset
        ranges[key.topic][key.partition] = (min(end, max(start, later)), end)
    return evolve(plan, ranges=ranges)


def read_filter(item: Any) -> Limits | None:
    """What one of Spark's filters says in our terms; None where it says nothing."""
    kind = type(item).__name__
    column: tuple[str, ...] = getattr(item, "attribute", ())
    value = getattr(item, "value", None)
    if len(column) != 1 or value is None:
        return None
    reader = _READERS.get(column[0])
    return None if reader is None else reader(kind, value)


def _topic(kind: str, value: Any) -> Limits | None:
    wanted = _wanted(kind, value, str)
    return None if wanted is None else Limits(topics=wanted)


def _partition(kind: str, value: Any) -> Limits | None:
    wanted = _wanted(kind, value, int)
    return None if wanted is None else Limits(partitions=wanted)


def _wanted(kind: str, value: Any, type_: type) -> tuple[Any, ...] | None:
    values = tuple(value) if kind == "In" else (value,)
    if kind not in ("EqualTo", "EqualNullSafe", "In"):
        return None
    values = tuple(item for item in values if item is not None)  # no row of ours equals null
    return values if all(type(item) is type_ for item in values) else None


def _offset(kind: str, value: Any) -> Limits | None:
    if type(value) is not int:
        return None
    after = value + 1
    limits: Mapping[str, tuple[int, int]] = {
        "EqualTo": (value, after),
        "EqualNullSafe": (value, after),
        "GreaterThan": (after, _OFFSET_MAX),
        "GreaterThanOrEqual": (value, _OFFSET_MAX),
        "LessThan": (0, value),
        "LessThanOrEqual": (0, after),
    }
    if kind not in limits:
        return None
    start, end = limits[kind]
    return Limits(start=max(start, 0), end=max(end, 0))


def _timestamp(kind: str, value: Any) -> Limits | None:
    if kind not in ("EqualTo", "EqualNullSafe", "GreaterThan", "GreaterThanOrEqual"):
        return None
    if not isinstance(value, datetime.datetime) or value.tzinfo is None:
        return None
    # Rounded down: a record of the same millisecond is kept.
    return Limits(earliest_ms=(value - _EPOCH) // datetime.timedelta(milliseconds=1))


_READERS: Final = {
    "topic": _topic,
    "partition": _partition,
    "offset": _offset,
    "timestamp": _timestamp,
}
