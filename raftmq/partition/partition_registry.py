"""The partitions of which this node holds a replica, by name and by topic id.

The reconciler adds and removes; handlers look up. A topic deleted and created again under the same
name is another topic id: the newer one owns the name.
"""

from __future__ import annotations

from collections.abc import Iterator

from raftmq.partition.partition import Partition
from raftmq.types import TopicId, TopicPartition


class PartitionRegistry:
    """Partitions on this node."""

    def __init__(self) -> None:
        self._by_name: dict[TopicPartition, Partition] = {}
        self._by_id: dict[tuple[TopicId, int], Partition] = {}
        self._internal_by_name: dict[TopicPartition, Partition] = {}
        self._internal_by_id: dict[tuple[TopicId, int], Partition] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Partition]:
        return iter(list(self._by_id.values()))

    def add(self, partition: Partition) -> None:
        """Make a partition known to handlers."""
        key = (partition.topic_id, partition.index)
        assert key not in self._by_id, f"{partition.name} is registered already"
        self._by_id[key] = partition
        self._by_name[partition.name] = partition

    def add_internal(self, partition: Partition) -> None:
        """Let handlers find a log that is no data partition: by name or id, never by iteration."""
        self._internal_by_id[(partition.topic_id, partition.index)] = partition
        self._internal_by_name[partition.name] = partition

    def remove(self, partition: Partition) -> None:
        """Forget a partition; what is parked in it was failed by its `close`."""
        del self._by_id[(partition.topic_id, partition.index)]
        if self._by_name.get(partition.name) is partition:
            del self._by_name[partition.name]

    def by_name(self, topic: str, index: int) -> Partition | None:
        """The replica of a partition that this node holds."""
        name = TopicPartition(topic, index)
        return self._by_name.get(name) or self._internal_by_name.get(name)

    def by_id(self, topic_id: TopicId, index: int) -> Partition | None:
        """The replica of a partition that this node holds."""
        key = (topic_id, index)
        return self._by_id.get(key) or self._internal_by_id.get(key)
