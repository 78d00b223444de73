"""Plans: which half-open ranges of which partitions a read covers, fixed once.

    plan = make_plan(options)          # asks the cluster, with the blocking client
    plan.ranges                        # {topic: {partition: (start, end)}}
    parts = split(plan, partitions_min=8)

Ends lie at or below the last stable offset at planning, so what a range holds never changes:
retries and speculative tasks read the very same rows. A start below the log start, or an end past
the last stable offset, is data loss and is refused unless the options say otherwise. Topics are
remembered with their id: one that is deleted and created anew is not mistaken for itself.
"""

from __future__ import annotations

import heapq
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, TypeAlias
from uuid import UUID

from attrs import evolve, field, frozen

from raftmq.errors import ErrorCode
from raftmq.types import TopicPartition
from raftmq_client.blocking import Admin
from raftmq_client.core.admin import EARLIEST, LATEST, READ_COMMITTED
from raftmq_client.core.metadata import TopicInfo, without_views
from raftmq_client.errors import BrokerError
from raftmq_spark.errors import DataLossError, PlanError
from raftmq_spark.options import Bound, BoundKind, SourceOptions
from raftmq_spark.security import ClientSettings

Ranges: TypeAlias = dict[str, dict[int, tuple[int, int]]]
"""Half-open offset ranges: `{topic: {partition: (start, end)}}`."""
Offsets: TypeAlias = dict[TopicPartition, int]

_PARTS_MAX: Final = 1_000_000


@frozen
class RangePart:
    """A piece of work: the offsets `[start, end)` of one partition."""

    topic: str
    partition: int
    start: int
    end: int
    topic_id: UUID | None = None
    """The topic's id at planning; None where the broker tells none."""

    @property
    def size(self) -> int:
        """Offsets in it; compaction may have left fewer records."""
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition} [{self.start}, {self.end})"


@frozen
class Plan:
    """What a read covers. Empty ranges are kept: they say where a partition stands."""

    ranges: Ranges
    topic_ids: Mapping[str, UUID | None] = field(factory=dict)

    def parts(self) -> Iterator[RangePart]:
        """Each range that is not empty, by topic and partition."""
        for topic in sorted(self.ranges):
            for partition, (start, end) in sorted(self.ranges[topic].items()):
                if start < end:
                    yield RangePart(topic, partition, start, end, self.topic_ids.get(topic))

    @property
    def size(self) -> int:
        """Offsets in all ranges."""
        return sum(part.size for part in self.parts())


@frozen
class Positions:
    """What the cluster says of each partition at planning."""

    log_starts: Offsets
    stable_ends: Offsets
    committed: Offsets = field(factory=dict)
    """Of the options' group; partitions that it never committed are missing."""
    start_times: Offsets = field(factory=dict)
    """Offsets found for starting timestamps; -1 where no record is that late."""
    end_times: Offsets = field(factory=dict)


def open_admin(client: ClientSettings) -> Admin:
    """An admin client for these settings."""
    return Admin(
        client.bootstrap,
        client_id=client.client_id,
        security=client.security(),
        timeout_ms=client.timeout_ms,
    )


def make_plan(options: SourceOptions) -> Plan:
    """Ask the cluster and fix the ranges.

    Raises:
        PlanError: a topic or partition is not there, or offsets for some are not said.
        DataLossError: a range reaches below a log start or past a last stable offset.
        ClientError: the cluster does not answer.
    """
    with open_admin(options.client) as admin:
        topics = find_topics(admin, options)
        keys = _partitions(options, topics)
        positions = find_positions(admin, options, keys)
    return Plan(
        ranges=fix_ranges(options, keys, positions),
        topic_ids={info.name: info.topic_id for info in topics},
    )


def find_topics(admin: Admin, options: SourceOptions) -> list[TopicInfo]:
    """The topics that the options choose, by name.

    Raises:
        PlanError: one does not exist.
    """
    names = tuple(dict.fromkeys(key.topic for key in options.assigned)) or options.topics
    info = admin.cluster(names if options.pattern is None else None)
    for topic in info.topics:
        if topic.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and topic.name in names:
            raise PlanError(f"there is no topic {topic.name!r}")
        if topic.error_code and options.pattern is None:
            raise BrokerError(topic.error_code, about=f"topic {topic.name!r}")
    found = {topic.name: topic for topic in info.topics}
    if options.pattern is not None:
        pattern = re.compile(options.pattern)
        names = tuple(
            name
            for name in sorted(found)
            if pattern.fullmatch(name) and not found[name].is_internal
        )
    for name in names:
        if name not in found:
            raise PlanError(f"there is no topic {name!r}")
    return [found[name] for name in sorted(names)]


def _partitions(options: SourceOptions, topics: Iterable[TopicInfo]) -> list[TopicPartition]:
    """What is to be read: also what a topic lists no more, which no view is to show once more."""
    whole = topics if options.assigned else without_views(topics)
    keys = [
        TopicPartition(topic.name, item.partition) for topic in whole for item in topic.readable
    ]
    if not options.assigned:
        return keys
    there = dict.fromkeys(keys)
    for key in options.assigned:
        if key not in there:
            raise PlanError(f"there is no partition {key}")
    return sorted(options.assigned)


def find_positions(
    admin: Admin, options: SourceOptions, keys: Iterable[TopicPartition]
) -> Positions:
    """Ask for log starts, last stable offsets, and what the options' bounds need."""
    keys = list(keys)
    committed: Offsets = {}
    if options.group is not None and keys:
        committed = committed_offsets(admin, options.group, keys)
    # Log starts last: one that moves meanwhile is seen, and ends may only grow.
    start_times = _find_times(admin, options.starts, keys)
    end_times = _find_times(admin, options.ends, keys)
    stable_ends = _list_offsets(admin, dict.fromkeys(keys, LATEST))
    log_starts = _list_offsets(admin, dict.fromkeys(keys, EARLIEST))
    return Positions(log_starts, stable_ends, committed, start_times, end_times)


def committed_offsets(admin: Admin, group: str, keys: Iterable[TopicPartition]) -> Offsets:
    """A group's committed offsets; partitions without one are missing."""
    found = admin.group_offsets(group, list(keys))
    return {key: item.offset for key, item in found.items()}


def _find_times(admin: Admin, bound: Bound, keys: Iterable[TopicPartition]) -> Offsets:
    if bound.kind is not BoundKind.TIMESTAMPS:
        return {}
    wanted = {
        key: bound.offsets.get(key, -1) if bound.timestamp is None else bound.timestamp
        for key in keys
    }
    return _list_offsets(admin, {key: time for key, time in wanted.items() if time >= 0})


def _list_offsets(admin: Admin, wanted: Mapping[TopicPartition, int]) -> Offsets:
    if not wanted:
        return {}
    found = admin.list_offsets(wanted, isolation=READ_COMMITTED)
    return {key: item.offset for key, item in found.items()}


# Deciding, without a cluster.


def fix_ranges(
    options: SourceOptions, keys: Iterable[TopicPartition], positions: Positions
) -> Ranges:
    """Make ranges of bounds and positions.

    Raises:
        PlanError: offsets for a partition are not said, or no record is as late as a timestamp.
        DataLossError: a range reaches below the log start or past the last stable offset.
    """
    ranges: Ranges = {}
    for key in keys:
        start = _resolve(options.starts, key, positions, positions.start_times, "starting")
        end = _resolve(options.ends, key, positions, positions.end_times, "ending")
        start, end = _check_range(options, key, start, end, positions)
        ranges.setdefault(key.topic, {})[key.partition] = (start, end)
    return ranges


def _resolve(
    bound: Bound, key: TopicPartition, positions: Positions, times: Offsets, side: str
) -> int:
    stable_end = positions.stable_ends[key]
    if bound.kind is BoundKind.EARLIEST:
        return positions.log_starts[key]
    if bound.kind is BoundKind.LATEST:
        return stable_end
    if bound.kind is BoundKind.COMMITTED:
        return positions.committed.get(key, positions.log_starts[key])
    if bound.kind is BoundKind.TIMESTAMPS:
        found = times.get(key)
        if found is None:
            raise PlanError(f"{side}OffsetsByTimestamp says nothing about {key}")
        if found < 0 and not bound.falls_to_latest:
            raise PlanError(
                f"{key} has no record at or after the starting timestamp;"
                " startingOffsetsByTimestampStrategy=latest would read nothing of it"
            )
        # A record may be found between the last stable offset and the high watermark.
        return stable_end if found < 0 else min(found, stable_end)
    offset = bound.offsets.get(key)
    if offset is None:
        raise PlanError(f"{side}Offsets says nothing about {key}")
    if offset == EARLIEST:
        return positions.log_starts[key]
    return stable_end if offset == LATEST else offset


def _check_range(
    options: SourceOptions, key: TopicPartition, start: int, end: int, positions: Positions
) -> tuple[int, int]:
    """Hold a range against what is there; `(start, end)` with start <= end within it."""
    log_start, stable_end = positions.log_starts[key], positions.stable_ends[key]
    where = f"partition {key}"
    asked_end = end
    if end > stable_end:
        lose(
            options.fails_on_data_loss,
            f"{where}: the range [{start}, {end}) ends past the last stable offset {stable_end}",
        )
        end = stable_end
    if start > stable_end:
        lose(
            options.fails_on_data_loss,
            f"{where}: the range [{start}, {asked_end}) starts past the last stable offset"
            f" {stable_end}",
        )
        start = stable_end
    if start < min(log_start, end):
        lose(
            options.fails_on_data_loss,
            f"{where}: offsets [{start}, {min(log_start, end)}) of the range [{start}, {end})"
            f" are gone, its log starts at {log_start}",
        )
        start = min(log_start, end)
    if start > end:
        if options.ends.kind is BoundKind.OFFSETS and options.starts.kind is BoundKind.OFFSETS:
            raise PlanError(f"{where}: the range [{start}, {end}) starts behind its end")
        start = end
    return start, end


def lose(fails: bool, what: str) -> None:
    """Fail, or warn and let the caller go on without what is lost.

    Raises:
        DataLossError: `fails` (the option failOnDataLoss).
    """
    if fails:
        raise DataLossError(f"{what}; failOnDataLoss=false would go on without")
    warnings.warn(f"data loss: {what}", RuntimeWarning, stacklevel=2)


def split(
    plan: Plan, *, partitions_min: int | None = None, records_max: int | None = None
) -> list[RangePart]:
    """Cut ranges into parts of at most `records_max` offsets, and at least `partitions_min` parts.

    Parts of one range are of nearly equal size, in order, without gap or overlap. Fewer parts come
    out only where there are fewer offsets.
    """
    whole = list(plan.parts())
    counts = [1 if records_max is None else -(-part.size // records_max) for part in whole]
    if partitions_min is not None:
        _raise_counts(whole, counts, min(partitions_min, _PARTS_MAX))
    parts: list[RangePart] = []
    for part, count in zip(whole, counts, strict=True):
        edges = [part.start + part.size * number // count for number in range(count + 1)]
        parts.extend(
            evolve(part, start=edges[number], end=edges[number + 1]) for number in range(count)
        )
    return parts


def _raise_counts(whole: list[RangePart], counts: list[int], wanted: int) -> None:
    """Cut the range with the largest parts once more until there are enough."""
    total = sum(counts)
    heap = [(-part.size / counts[i], i) for i, part in enumerate(whole) if part.size > counts[i]]
    heapq.heapify(heap)
    while total < wanted and heap:
        _, i = heap[0]
        counts[i] += 1
        total += 1
        if counts[i] < whole[i].size:
            heapq.heapreplace(heap, (-whole[i].size / counts[i], i))
        else:
            heapq.heappop(heap)
