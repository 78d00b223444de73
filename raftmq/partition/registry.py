"""Which partitions a node holds, for whoever looks one up.

Owns nothing but the look-up: the node opens and closes what is in it.

Invariants: each Raft group is in it at most once; a name, and a number of a topic id, lead to the
newest partition that has them here.
"""

from __future__ import annotations

from collections.abc import Iterator

from raftmq.partition.partition import Partition
from raftmq.types import RaftGroupId, TopicId, TopicPartition


class PartitionRegistry:
    """The partitions of which this node holds a replica, by name, by topic id and by Raft group.

    The reconciler adds and removes; handlers look up. A topic deleted and created again under the
    same name is another topic id: the newer one owns the name. A number of a topic belongs to the
    newest partition that it has had: an earlier one that is not yet gone is found by its group.
    """

    def __init__(self) -> None:
        self._by_group: dict[RaftGroupId, Partition] = {}
        self._by_name: dict[TopicPartition, Partition] = {}
        self._by_id: dict[tuple[TopicId, int], Partition] = {}
        self._internal_by_name: dict[TopicPartition, Partition] = {}
        self._internal_by_id: dict[tuple[TopicId, int], Partition] = {}

    def __len__(self) -> int:
        return len(self._by_group)

    def __iter__(self) -> Iterator[Partition]:
        return iter(list(self._by_group.values()))

    def add(self, partition: Partition) -> None:
        """Make a partition known to handlers."""
        group = partition.group
        assert group not in self._by_group, f"{partition.name} is registered already"
        self._by_group[group] = partition
        key = (partition.topic_id, partition.index)
        newest = self._by_id.get(key)
        if newest is None or newest.group.creation_epoch < group.creation_epoch:
            self._by_id[key] = partition
            self._by_name[partition.name] = partition

    def add_internal(self, partition: Partition) -> None:
        """Let handlers find an internal partition by name or id; iteration leaves it out."""
        self._internal_by_id[(partition.topic_id, partition.index)] = partition
        self._internal_by_name[partition.name] = partition

    def remove(self, partition: Partition) -> None:
        """Forget a partition, whose `close` has failed what was parked in it."""
        del self._by_group[partition.group]
        key = (partition.topic_id, partition.index)
        if self._by_id.get(key) is partition:
            del self._by_id[key]
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

    def by_group(self, group: RaftGroupId) -> Partition | None:
        """The replica of a Raft group that this node holds; none of an internal one."""
        return self._by_group.get(group)
