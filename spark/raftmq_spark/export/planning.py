"""What an export is to write: ranges and gaps, decided from the archive, the group and the log.

The archive's own end counts first, since the manifests are the truth; a partition that it does not
know begins at the group's committed offset, else at the log start. Records that retention
took, or that others committed, are an error unless somebody accepted the gap, which is then written
down. `positions` asks the cluster, `decide` decides without one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import field, frozen

from raftmq.errors import ErrorCode
from raftmq.types import TopicPartition
from raftmq_client.blocking import Admin
from raftmq_client.core.admin import EARLIEST, LATEST, READ_COMMITTED
from raftmq_client.core.metadata import TopicInfo, without_views
from raftmq_client.errors import BrokerError
from raftmq_spark.errors import PlanError
from raftmq_spark.export.errors import ArchiveError, LostRecordsError
from raftmq_spark.export.manifest import Gap, PartitionKey, Until
from raftmq_spark.plan import Plan, RangePart, Ranges, committed_offsets, split


@frozen
class Wishes:
    """What the operator said about ranges."""

    group: str
    until: Until = Until.STABLE
    accepts_loss: bool = False
    """Go on behind what retention took, and write the gap down."""
    skips_to_committed: bool = False
    """Go on at the committed offsets where they are ahead of the archive, and write that down."""
    records_per_file: int = 500_000


@frozen
class Position:
    """One partition as the cluster tells of it."""

    log_start: int
    stable_end: int
    committed: int | None = None


@frozen
class Decided:
    """What a run is to write, and to write down."""

    parts: list[RangePart] = field(factory=list)
    gaps: list[Gap] = field(factory=list)

    @property
    def is_empty(self) -> bool:
        """Nothing is new."""
        return not self.parts and not self.gaps


def positions(
    admin: Admin, topics: Iterable[TopicInfo], group: str
) -> dict[PartitionKey, Position]:
    """Log starts, last stable offsets and committed offsets of all partitions of these topics, and
    of those that they list no more, which no view is to show once more."""
    keys = {
        TopicPartition(info.name, item.partition): partition_key(info, item.partition)
        for info in without_views(topics)
        for item in info.readable
    }
    if not keys:
        return {}
    committed = committed_offsets(admin, group, keys)
    ends = admin.list_offsets(dict.fromkeys(keys, LATEST), isolation=READ_COMMITTED)
    starts = admin.list_offsets(dict.fromkeys(keys, EARLIEST))  # last: they may pass the others
    return {
        key: Position(starts[name].offset, ends[name].offset, committed.get(name))
        for name, key in keys.items()
    }


def find_topics(admin: Admin, names: Iterable[str]) -> dict[str, TopicInfo]:
    """The topics that are there, by name.

    Raises:
        BrokerError: a broker could not tell of one.
    """
    names = sorted(set(names))
    found = {}
    for info in admin.cluster(names).topics if names else ():
        if info.error_code in (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID):
            continue
        if info.error_code:
            raise BrokerError(info.error_code, about=f"topic {info.name!r}")
        found[info.name] = info
    return found


def need_topics(admin: Admin, names: Iterable[str]) -> list[TopicInfo]:
    """All of these topics.

    Raises:
        PlanError: one is not there.
    """
    names = sorted(set(names))
    found = find_topics(admin, names)
    missing = [name for name in names if name not in found]
    if missing:
        raise PlanError(
            f"there is no topic {missing[0]!r}; what the archive has of a deleted topic stays"
        )
    return [found[name] for name in names]


def partition_key(info: TopicInfo, partition: int) -> PartitionKey:
    """A partition of this incarnation of a topic."""
    return PartitionKey(info.name, str(info.topic_id or ""), partition)


def decide(
    wishes: Wishes,
    ends: Mapping[PartitionKey, int],
    found: Mapping[PartitionKey, Position],
    topics: Iterable[TopicInfo] = (),
) -> Decided:
    """Fix ranges and gaps.

    Raises:
        LostRecordsError: retention took records that were not exported.
        ArchiveError: archive, group and log contradict each other.
    """
    ranges: Ranges = {}
    gaps: list[Gap] = []
    for key, position in sorted(found.items()):
        start = _start(wishes, key, ends, position, gaps)
        end = position.stable_end
        if wishes.until is Until.COMMITTED:
            end = min(end, -1 if position.committed is None else position.committed)
        if start < position.log_start:
            _lose(wishes, key, start, position.log_start)
            gaps.append(Gap(*key, start, position.log_start, "retention"))
            start = position.log_start
        if start > position.stable_end:
            raise ArchiveError(
                f"{key} ends at {position.stable_end}, before {start}, where the export stands:"
                " the topic or its cluster is not the one that was exported"
            )
        if start < end:
            ranges.setdefault(key.topic, {})[key.partition] = (start, end)
    ids = {info.name: info.topic_id for info in topics}
    return Decided(split(Plan(ranges, ids), records_max=wishes.records_per_file), gaps)


def _start(
    wishes: Wishes,
    key: PartitionKey,
    ends: Mapping[PartitionKey, int],
    position: Position,
    gaps: list[Gap],
) -> int:
    """Where a partition's export goes on."""
    have, committed = ends.get(key), position.committed
    if wishes.until is Until.COMMITTED:
        return position.log_start if have is None else have
    if have is None:
        if committed is None or _is_of_the_past(key, committed, ends):
            return position.log_start
        return committed
    if committed is None or committed <= have:
        return have
    if not wishes.skips_to_committed:
        raise ArchiveError(
            f"group {wishes.group!r} has committed {key} up to {committed}, but this archive ends"
            f" at {have}: the records between were exported elsewhere, or somebody moved the"
            " group. --skip-to-committed goes on there and writes the gap down"
        )
    gaps.append(Gap(*key, have, committed, "skipped"))
    return committed


def _is_of_the_past(key: PartitionKey, committed: int, ends: Mapping[PartitionKey, int]) -> bool:
    """Whether an offset was committed for a topic of this name that was deleted since."""
    return any(
        other.topic == key.topic
        and other.partition == key.partition
        and other.topic_id != key.topic_id
        and end == committed
        for other, end in ends.items()
    )


def _lose(wishes: Wishes, key: PartitionKey, start: int, end: int) -> None:
    if not wishes.accepts_loss:
        raise LostRecordsError(
            f"{key}: the records [{start}, {end}) were deleted by retention before they were"
            " exported; --accept-loss goes on without them and writes the gap down"
        )
