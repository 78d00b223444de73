"""Identifiers and positions that every room uses, each with one meaning.

A leaf module: it imports nothing of raftmq. Every range in raftmq is half-open, `[start, end)`;
an "end" is the next free position.
"""

from __future__ import annotations

from typing import NamedTuple, NewType, TypeAlias
from uuid import UUID

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Bytes that are not changed any more; a memoryview avoids the copy."""

NodeId = NewType("NodeId", int)
"""A broker's number, as in the Kafka protocol."""

StorageId = NewType("StorageId", int)
"""64 random bits, drawn when a data folder is made; a wiped node comes back with another one."""

Offset = NewType("Offset", int)
"""A Kafka offset: counts records of one partition, from 0."""

RaftIndex = NewType("RaftIndex", int)
"""Kafka offset + number of bare entries before it. Only `log/replicated_log.py` converts."""

Term = NewType("Term", int)
"""A Raft term. The same integer is called leader epoch outside `raft/`."""

LeaderEpoch = NewType("LeaderEpoch", int)
"""A Raft term as Kafka clients see it. Converted in `replication/replica.py` alone."""

TopicId = NewType("TopicId", UUID)
"""Random, never zero, never reused."""

ProducerId = NewType("ProducerId", int)


class ReplicaId(NamedTuple):
    """A member of a Raft group: a node *with* its storage. A wiped node is another member."""

    node_id: NodeId
    storage_id: StorageId

    def __str__(self) -> str:
        return f"{self.node_id}/{self.storage_id:016x}"


class RaftGroupId(NamedTuple):
    """One Raft group. `creation_epoch` is the metadata version that created the partition."""

    topic_id: TopicId
    partition: int
    creation_epoch: int

    def __str__(self) -> str:
        return f"{self.topic_id}-{self.partition}@{self.creation_epoch}"


class TopicPartition(NamedTuple):
    """A partition by name, as clients name it."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


METADATA_TOPIC = "__cluster_metadata"
INTERNAL_TOPICS = frozenset(
    {METADATA_TOPIC, "__consumer_offsets", "__transaction_state"}
    | {"__share_group_state", "__remote_log_metadata"}
)
"""Kafka's own. Only the first exists here, and clients cannot create any of them."""
METADATA_TOPIC_ID = TopicId(UUID(int=1))
"""Kafka reserves this id for the metadata topic (KIP-500)."""
METADATA_GROUP = RaftGroupId(METADATA_TOPIC_ID, 0, 0)
VIEW_SUFFIX = ".retired"
"""How the name of a view over retired partitions ends, unless an operator gave it another one."""
READS_RETIRED = b"raftmq:retired"
"""How the user data of a group's member ends that can be given what a topic lists no more, as our
own client's can."""
