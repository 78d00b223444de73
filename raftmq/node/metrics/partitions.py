"""Metrics per partition with a replica on this node, their sums, and the lag of consumer groups.

Rows per partition are bounded by `metrics_partitions_max`; what is above is summed in one row whose
topic is "(other)". The sums (under-replicated, leaderless, ...) always cover all.

The lag of a group is reported by the leader of each partition, in records and in seconds. Committed
offsets are in every node's metadata image, high watermarks are the leader's, so exactly one node
has a row for each (group, topic, partition). Seconds are the age of the first record that the group
has not committed: now less that record's timestamp, 0 when there is none. Timestamps are read from
the log in a worker thread and remembered until the group commits further (`Ages`). Rows are bounded
by `metrics_groups_max`; above it lags in records are summed under "(other)". Names of groups may be
long and hold anything, so a label shows at most `LABEL_BYTES_MAX` of one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Final

from attrs import define, frozen

from raftmq.foreign import visible
from raftmq.metadata.image import PartitionImage
from raftmq.node.metrics.families import OTHER, Collector, Metric, Scrape, Work
from raftmq.partition.filtered import FilteredPartition
from raftmq.ports import DiskError
from raftmq.types import Offset, RaftGroupId
from raftmq.views.index import AwayError, BlockJob

if TYPE_CHECKING:
    from raftmq.node.composition import NodeCore
    from raftmq.partition.partition import Partition
    from raftmq.replication.replica import Replica


LABELS: Final = ("topic", "partition")


@define(slots=True, eq=False)
class View:
    """What a metric reads of one partition here.

    Attributes:
        wanted: replicas that it should have: voters, or those assigned if that is more.
        in_sync: those in sync; -1 where others lead, since only a leader knows.
    """

    partition: Partition
    replica: Replica
    wanted: int
    in_sync: int


Read = Callable[[View], "float | None"]
_TABLE: Final[list[tuple[Metric, Read]]] = []


def gauge(name: str, help_text: str, read: Read) -> None:
    """Declare a number of each partition; None: no row."""
    _TABLE.append((Metric(f"raftmq_partition_{name}", "gauge", help_text, LABELS), read))


def _stable_end(partition: Partition) -> float | None:
    lag = partition.stable_lag if partition.is_leader else None
    return None if lag is None else partition.readable_end - lag


def first_kept_offset(replica: Replica) -> Offset:
    """Where a replica's log begins, as it is told: never behind its end. One that was begun anew at
    a start within a batch lacks that batch until it comes."""
    return min(replica.log_start_offset, replica.log_end_offset)


gauge("high_watermark", "Everything below is committed", lambda v: v.replica.high_watermark)
gauge(
    "log_start_offset",
    "First kept offset",
    lambda v: first_kept_offset(v.replica),
)
gauge(
    "log_end_offset",
    "Next offset to assign, as this replica has it",
    lambda v: v.replica.log_end_offset,
)
gauge(
    "messages",
    "Messages held: high watermark less log start",
    lambda v: max(0, v.replica.high_watermark - v.replica.log_start_offset),
)
gauge("size_bytes", "Bytes of the log on this node", lambda v: v.partition.size_bytes)
gauge("leader_epoch", "Leader epoch (Raft term)", lambda v: v.replica.leader_epoch)
gauge("is_leader", "1 where this node leads", lambda v: v.replica.is_leader)
gauge(
    "replicas",
    "Replicas that it should have, told by the leader",
    lambda v: v.wanted if v.in_sync >= 0 else None,
)
gauge(
    "in_sync_replicas",
    "Replicas in sync, told by the leader",
    lambda v: v.in_sync if v.in_sync >= 0 else None,
)
gauge(
    "lag_messages",
    "Committed messages that this replica does not have yet",
    lambda v: v.partition.lag,
)
gauge(
    "last_stable_offset",
    "Where consumers of committed records stop, told by the leader",
    lambda v: _stable_end(v.partition),
)
gauge(
    "stable_lag_messages",
    "How far that is below the end for all consumers: a transaction is open",
    lambda v: v.partition.stable_lag if v.partition.is_leader else None,
)
gauge(
    "damaged_messages",
    "Offsets whose bytes are damaged here and not served",
    lambda v: sum(end - start for start, end in v.replica.damaged()),
)

_SUMS: Final = {
    "hosted": Metric("raftmq_partitions", "gauge", "Partitions with a replica on this node"),
    "led": Metric("raftmq_partitions_led", "gauge", "Partitions that this node leads"),
    "under_replicated": Metric(
        "raftmq_partitions_under_replicated",
        "gauge",
        "Partitions led here with replicas out of sync",
    ),
    "under_min_isr": Metric(
        "raftmq_partitions_under_min_isr",
        "gauge",
        "Partitions led here with fewer in sync than min.insync.replicas",
    ),
    "leaderless": Metric(
        "raftmq_partitions_leaderless",
        "gauge",
        "Partitions with a replica here that know no leader",
    ),
    "failed": Metric(
        "raftmq_partitions_failed",
        "gauge",
        "Replicas here that stopped for good, a failed disk say",
    ),
    "damaged": Metric(
        "raftmq_partitions_damaged", "gauge", "Replicas here with damage that is not repaired yet"
    ),
    "absurd_terms": Metric(
        "raftmq_partitions_absurd_term",
        "gauge",
        "Replicas here whose term no election can have reached (`raftmq recover --reset-term`)",
    ),
    "parked_produces": Metric(
        "raftmq_parked_produces", "gauge", "Produces that wait to be acknowledged"
    ),
}
PARTITIONS_LEFT_OUT: Final = Metric(
    "raftmq_partitions_left_out",
    "gauge",
    f'Partitions without rows of their own (metrics_partitions_max): summed as "{OTHER}"',
)
SLICE: Final = 16


def _collect_partitions(node: NodeCore, scrape: Scrape) -> Iterator[Work | None]:
    rows = node.partitions.rows()
    image = node.engine.image
    yield None
    rows_max = node.config.metrics_partitions_max
    sums = dict.fromkeys(_SUMS, 0)
    rest: list[float | None] = [None] * len(_TABLE)
    for number, (partition, replica) in enumerate(rows):
        in_sync = len(replica.in_sync_replicas()) if replica.is_leader else -1
        wanted = max(len(replica.voters), _lasting(image.partition(partition.name)))
        view = View(partition, replica, wanted, in_sync)
        _add_to_sums(sums, view)
        values = [read(view) for _, read in _TABLE]
        if number < rows_max:
            labels = (partition.name.topic, str(partition.index))
            for (metric, _), value in zip(_TABLE, values, strict=True):
                if value is not None:
                    scrape[metric].add(labels, float(value))
        else:
            for i, value in enumerate(values):
                if value is not None:
                    rest[i] = (rest[i] or 0) + value
        if number % SLICE == SLICE - 1:
            yield None
    for (metric, _), value in zip(_TABLE, rest, strict=True):
        if value is not None:
            scrape[metric].add((OTHER, "-1"), float(value))
    for key, metric in _SUMS.items():
        scrape[metric].add((), sums[key])
    scrape[PARTITIONS_LEFT_OUT].add((), max(0, len(rows) - rows_max))
    yield None


def _lasting(partition: PartitionImage | None) -> int:
    """How many replicas should be in sync whatever moves: those that a move adds are no lack."""
    if partition is None:
        return 0
    before = partition.moving_from or partition.replicas
    return sum(node_id in before for node_id in partition.replicas)


def _add_to_sums(sums: dict[str, int], view: View) -> None:
    partition, replica, in_sync = view.partition, view.replica, view.in_sync
    sums["hosted"] += 1
    if in_sync >= 0:
        sums["led"] += 1
        sums["under_replicated"] += in_sync < view.wanted
        sums["under_min_isr"] += in_sync < partition.settings.min_insync_replicas
    sums["leaderless"] += replica.leader is None
    sums["failed"] += replica.failure is not None
    sums["damaged"] += bool(replica.damaged())
    sums["absurd_terms"] += replica.core.is_term_absurd
    sums["parked_produces"] += partition.parked_produces_count


PARTITIONS: Final = Collector(
    (*(metric for metric, _ in _TABLE), *_SUMS.values(), PARTITIONS_LEFT_OUT), _collect_partitions
)


GROUP_LABELS: Final = ("group", "topic", "partition")
LAG: Final = Metric(
    "raftmq_group_lag_messages",
    "gauge",
    "Committed messages that the group has not committed yet, told by the partition's leader",
    GROUP_LABELS,
)
STABLE_LAG: Final = Metric(
    "raftmq_group_stable_lag_messages",
    "gauge",
    "Those of them below the last stable offset; only where a transaction makes a difference",
    GROUP_LABELS,
)
LAG_SECONDS: Final = Metric(
    "raftmq_group_lag_seconds",
    "gauge",
    "Age of the first message that the group has not committed; 0 when there is none",
    GROUP_LABELS,
)
GROUPS_LEFT_OUT: Final = Metric(
    "raftmq_group_lags_left_out",
    "gauge",
    f'Group lags without rows of their own (metrics_groups_max): summed as "{OTHER}"',
)
LABEL_BYTES_MAX: Final = 128
_DIGEST_LENGTH: Final = 32
_SHORTENED: Final = re.compile(r".*~[0-9a-f]{32}", re.DOTALL)


def group_label(name: str) -> str:
    """The label of a group: its name, or where that is long or does not print its beginning, `~`
    and a digest of all of it. No two groups share one: a name that looks shortened is shortened."""
    shown = visible(name)
    is_short = len(name.encode()) <= LABEL_BYTES_MAX
    if is_short and shown == name and _SHORTENED.fullmatch(name) is None:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST_LENGTH]
    head = shown.encode()[: LABEL_BYTES_MAX - 1 - _DIGEST_LENGTH].decode(errors="ignore")
    return f"{head}~{digest}"


@frozen(slots=True)
class _Lag:
    """What a group has not committed in one partition led here, from `position` on."""

    labels: tuple[str, str, str]
    partition: Partition
    position: Offset
    lag: int
    stable_lag: int


def _lags(node: NodeCore) -> Iterator[_Lag | None]:
    """Of every committed offset in a partition led here; None now and then where others lead. In a
    view the lag is counted up to its last match."""
    groups = node.engine.image.groups
    views = {fill.shown.name: fill.shown for fill in node.partitions.views.fills()}
    elsewhere = 0
    for name in groups.names():
        offsets = groups.groups[name].offsets
        label = group_label(name)
        for at in sorted(offsets):
            partition = views.get(at) or node.partitions.registry.by_name(at.topic, at.partition)
            if partition is None or not partition.is_leader:
                elsewhere += 1
                if elsewhere % (4 * SLICE) == 0:
                    yield None
                continue
            replica = partition.replica
            position = Offset(max(offsets[at].offset, replica.log_start_offset))
            lag = max(0, partition.readable_end - position)
            stable_lag = max(0, lag - (partition.stable_lag or 0))
            labels = label, at.topic, str(at.partition)
            yield _Lag(labels, partition, position, lag, stable_lag)


def _first_match(found: _Lag) -> Generator[Work, None, tuple[Partition, Offset] | None]:
    """Whose age the lag has, in its log; in a view that is the first match. None: not known."""
    partition = found.partition
    if not isinstance(partition, FilteredPartition):
        return partition, found.position
    while True:
        try:
            return partition.base, partition.first_match(found.position)
        except AwayError as away:
            job = away.job
        failures: list[DiskError] = []

        def run(job: BlockJob = job, failures: list[DiskError] = failures) -> None:
            try:
                job.run()
            except DiskError as error:
                failures.append(error)

        yield run
        if failures:
            return None  # a read for a client from there reports it
        partition.prepared(job)


def _collect_groups(node: NodeCore, scrape: Scrape) -> Iterator[Work | None]:
    left_out = left_lag = left_stable_lag = number = 0
    behind: dict[tuple[str, str, str], tuple[RaftGroupId, int]] = {}
    ages = scrape.ages
    for found in _lags(node):
        if found is None:
            yield None
            continue
        labels, lag, stable_lag = found.labels, found.lag, found.stable_lag
        number += 1
        if number > node.config.metrics_groups_max:
            left_out += 1
            left_lag += lag
            left_stable_lag += stable_lag
        else:
            scrape[LAG].add(labels, lag)
            if stable_lag != lag:
                scrape[STABLE_LAG].add(labels, stable_lag)
            if lag:
                first = yield from _first_match(found)
                if first is not None:
                    ages.want(*first)
                    behind[labels] = first[0].group, first[1]
            else:
                scrape[LAG_SECONDS].add(labels, 0)
        if number % SLICE == 0:
            yield None
    yield ages.run
    ages.take(behind.values())
    now_ms = node.plane.clock.wall_ms()
    for labels, key in behind.items():
        stamp = ages.timestamp(key)
        if stamp is not None:
            scrape[LAG_SECONDS].add(labels, max(0, now_ms - stamp) / 1e3)
    if left_out:
        scrape[LAG].add((OTHER, OTHER, "-1"), left_lag)
        if left_stable_lag != left_lag:
            scrape[STABLE_LAG].add((OTHER, OTHER, "-1"), left_stable_lag)
    scrape[GROUPS_LEFT_OUT].add((), left_out)
    yield None


GROUPS: Final = Collector((LAG, STABLE_LAG, LAG_SECONDS, GROUPS_LEFT_OUT), _collect_groups)
