"""Lag of consumer groups, reported by the leader of each partition: in records and in seconds.

Committed offsets are in every node's metadata image, high watermarks are the leader's, so exactly
one node has a row for each (group, topic, partition). Seconds are the age of the first record that
the group has not committed: now less that record's timestamp, 0 when there is none. Timestamps are
read from the log in a worker thread and remembered until the group commits further.

Rows are bounded by `metrics_groups_max`; above it lags in records are summed under "(other)".
Names of groups may be long and hold anything, so a label shows at most `LABEL_BYTES_MAX` of one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from raftmq.foreign import visible
from raftmq.node.metrics.families import OTHER, Collector, Metric, Scrape, Work
from raftmq.types import Offset, RaftGroupId

if TYPE_CHECKING:
    from raftmq.node.composition import NodeCore
    from raftmq.partition.partition import Partition

LABELS: Final = ("group", "topic", "partition")
LAG: Final = Metric(
    "raftmq_group_lag_messages",
    "gauge",
    "Committed messages that the group has not committed yet, told by the partition's leader",
    LABELS,
)
LAG_SECONDS: Final = Metric(
    "raftmq_group_lag_seconds",
    "gauge",
    "Age of the first message that the group has not committed; 0 when there is none",
    LABELS,
)
LEFT_OUT: Final = Metric(
    "raftmq_group_lags_left_out",
    "gauge",
    f'Group lags without rows of their own (metrics_groups_max): summed as "{OTHER}"',
)
SLICE: Final = 16
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


def _lags(node: NodeCore) -> Iterator[tuple[tuple[str, str, str], Partition, Offset, int] | None]:
    """(labels, partition, position, lag) of every committed offset in a partition led here; None
    now and then where others lead."""
    groups = node.engine.image.groups
    elsewhere = 0
    for name in groups.names():
        offsets = groups.groups[name].offsets
        label = group_label(name)
        for at in sorted(offsets):
            partition = node.partitions.registry.by_name(at.topic, at.partition)
            if partition is None or not partition.is_leader:
                elsewhere += 1
                if elsewhere % (4 * SLICE) == 0:
                    yield None
                continue
            replica = partition.replica
            position = Offset(max(offsets[at].offset, replica.log_start_offset))
            lag = max(0, partition.readable_end - position)
            yield (label, at.topic, str(at.partition)), partition, position, lag


def _collect(node: NodeCore, scrape: Scrape) -> Iterator[Work | None]:
    left_out = left_lag = number = 0
    behind: dict[tuple[str, str, str], tuple[RaftGroupId, int]] = {}
    ages = scrape.ages
    for found in _lags(node):
        if found is None:
            yield None
            continue
        labels, partition, position, lag = found
        number += 1
        if number > node.config.metrics_groups_max:
            left_out += 1
            left_lag += lag
        else:
            scrape[LAG].add(labels, lag)
            if lag:
                ages.want(partition, position)
                behind[labels] = (partition.group, position)
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
    scrape[LEFT_OUT].add((), left_out)
    yield None


GROUPS: Final = Collector((LAG, LAG_SECONDS, LEFT_OUT), _collect)
