"""Metrics per partition with a replica on this node, and their sums over all of those.

Rows per partition are bounded by `metrics_partitions_max`; what is above is summed in one row whose
topic is "(other)". The sums (under-replicated, leaderless, ...) always cover all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from raftmq.node.metrics.families import OTHER, Area, Metric, Scrape, Work

if TYPE_CHECKING:
    from raftmq.cluster.partition import Partition
    from raftmq.cluster.replica import Replica
    from raftmq.node.node import Node

LABELS: Final = ("topic", "partition")
Read = Callable[["Partition", "Replica"], "float | None"]
_TABLE: Final[list[tuple[Metric, Read]]] = []


def gauge(name: str, help_text: str, read: Read) -> None:
    """Declare a number of each partition; None: no row."""
    _TABLE.append((Metric(f"raftmq_partition_{name}", "gauge", help_text, LABELS), read))


def is_under_replicated(replica: Replica) -> bool:
    """A leader with voters out of sync; only it can tell."""
    return replica.is_leader and len(replica.in_sync_replicas()) < len(replica.voters)


def is_under_min_isr(partition: Partition, replica: Replica) -> bool:
    """A leader that must refuse acks=all; only it can tell."""
    wanted = partition.settings.min_insync_replicas
    return replica.is_leader and len(replica.in_sync_replicas()) < wanted


gauge("high_watermark", "Everything below is committed", lambda _, r: r.high_watermark)
gauge("log_start_offset", "First kept offset", lambda _, r: r.log_start_offset)
gauge(
    "log_end_offset", "Next offset to assign, as this replica has it", lambda _, r: r.log_end_offset
)
gauge(
    "messages",
    "Messages held: high watermark less log start",
    lambda _, r: max(0, r.high_watermark - r.log_start_offset),
)
gauge("size_bytes", "Bytes of the log on this node", lambda p, _: p.size_bytes)
gauge("leader_epoch", "Leader epoch (Raft term)", lambda _, r: r.leader_epoch)
gauge("is_leader", "1 where this node leads", lambda _, r: r.is_leader)
gauge("replicas", "Voters, told by the leader", lambda _, r: len(r.voters) if r.is_leader else None)
gauge(
    "in_sync_replicas",
    "Replicas in sync, told by the leader",
    lambda _, r: len(r.in_sync_replicas()) if r.is_leader else None,
)
gauge(
    "lag_messages",
    "Committed messages that this replica does not have yet",
    lambda p, _: p.lag,
)
gauge(
    "damaged_messages",
    "Offsets whose bytes are damaged here and not served",
    lambda _, r: sum(end - start for start, end in r.damaged()),
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


def _collect(node: Node, scrape: Scrape) -> Iterator[Work | None]:
    rows = node.partitions.rows()
    yield None
    rows_max = node.config.metrics_partitions_max
    sums = dict.fromkeys(_SUMS, 0)
    rest: list[float | None] = [None] * len(_TABLE)
    for number, (partition, replica) in enumerate(rows):
        _add_to_sums(sums, partition, replica)
        values = [read(partition, replica) for _, read in _TABLE]
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


def _add_to_sums(sums: dict[str, int], partition: Partition, replica: Replica) -> None:
    sums["hosted"] += 1
    sums["led"] += replica.is_leader
    sums["under_replicated"] += is_under_replicated(replica)
    sums["under_min_isr"] += is_under_min_isr(partition, replica)
    sums["leaderless"] += replica.leader is None
    sums["failed"] += replica.failure is not None
    sums["damaged"] += bool(replica.damaged())
    sums["parked_produces"] += partition.parked_produces_count


PARTITIONS: Final = Area((*(metric for metric, _ in _TABLE), *_SUMS.values(), LEFT_OUT), _collect)
