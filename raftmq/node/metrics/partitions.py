"""Metrics per partition with a replica on this node, and their sums over all of those.

Rows per partition are bounded by `metrics_partitions_max`; what is above is summed in one row whose
topic is "(other)". The sums (under-replicated, leaderless, ...) always cover all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from attrs import define

from raftmq.node.metrics.families import OTHER, Collector, Metric, Scrape, Work

if TYPE_CHECKING:
    from raftmq.node.composition import NodeCore
    from raftmq.partition.partition import Partition
    from raftmq.replication.replica import Replica
    from raftmq.types import Offset

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
LEFT_OUT: Final = Metric(
    "raftmq_partitions_left_out",
    "gauge",
    f'Partitions without rows of their own (metrics_partitions_max): summed as "{OTHER}"',
)
SLICE: Final = 16


def _collect(node: NodeCore, scrape: Scrape) -> Iterator[Work | None]:
    rows = node.partitions.rows()
    image = node.engine.image
    yield None
    rows_max = node.config.metrics_partitions_max
    sums = dict.fromkeys(_SUMS, 0)
    rest: list[float | None] = [None] * len(_TABLE)
    for number, (partition, replica) in enumerate(rows):
        in_sync = len(replica.in_sync_replicas()) if replica.is_leader else -1
        assigned = image.partition(partition.name)
        wanted = max(len(replica.voters), 0 if assigned is None else len(assigned.replicas))
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
    scrape[LEFT_OUT].add((), max(0, len(rows) - rows_max))
    yield None


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
    (*(metric for metric, _ in _TABLE), *_SUMS.values(), LEFT_OUT), _collect
)
