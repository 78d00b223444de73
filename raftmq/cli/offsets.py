"""Offsets for tables: many partitions in few requests, and a blank where nobody can tell.

A table of a cluster in trouble is when it is read most; so partitions without a live leader are
not waited for.
"""

from __future__ import annotations

from collections.abc import Iterable

from raftmq.types import TopicPartition
from raftmq_client.blocking.admin import Admin
from raftmq_client.errors import BrokerError, ClientError


def known_offsets(
    admin: Admin, partitions: Iterable[TopicPartition], which: int
) -> dict[TopicPartition, int]:
    """Earliest or latest offsets; partitions without a live leader, or gone, are left out."""
    wanted = list(partitions)
    if not wanted:
        return {}
    info = admin.cluster(sorted({key.topic for key in wanted}))
    alive = {broker.node_id for broker in info.brokers}
    led = {
        TopicPartition(topic.name, item.partition)
        for topic in info.topics
        for item in topic.partitions
        if item.leader in alive
    }
    try:
        found = admin.list_offsets({key: which for key in wanted if key in led})
    except ClientError as error:
        if isinstance(error, BrokerError) and not error.retriable:
            raise
        return {}  # leaders are moving: the table shows dashes rather than nothing
    return {key: item.offset for key, item in found.items()}
