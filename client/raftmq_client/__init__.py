"""A Kafka client for Python: typed, tested against raftmq and Apache Kafka alike.

`raftmq_client.aio` has `Producer`, `Consumer` and `Admin` for trio and asyncio,
`raftmq_client.blocking` the same on plain sockets (also importable from here); all that decides is
sans-IO in `raftmq_client.core`. Nothing of the broker is imported.
"""

from raftmq.errors import ErrorCode
from raftmq.types import TopicPartition
from raftmq_client.blocking import Admin, Consumer, Producer
from raftmq_client.core.accumulator import Receipt, RecordMetadata
from raftmq_client.core.admin import (
    EARLIEST,
    LATEST,
    MAX_TIMESTAMP,
    ConfigEntry,
    ConfigSynonym,
    CreatedTopic,
    FeatureLevel,
    FeaturesInfo,
    LogDirPartition,
    NewTopic,
    OffsetFound,
    QuorumInfo,
    QuorumReplica,
    ResourceType,
)
from raftmq_client.core.group_admin import (
    CommittedOffset,
    GroupDescription,
    GroupListing,
    GroupMember,
)
from raftmq_client.core.messages import ConsumerRecord
from raftmq_client.core.metadata import Broker, ClusterInfo, PartitionInfo, TopicInfo
from raftmq_client.core.security import Plain, Scram, Security
from raftmq_client.errors import (
    AuthenticationError,
    BrokerError,
    BufferFullError,
    ClientError,
    ConnectionFailedError,
    ConnectionLostError,
    CorruptAnswerError,
    CorruptRecordsError,
    DeserializationError,
    ForkedError,
    NoOffsetError,
    Outcome,
    PollIntervalError,
    RecordTooLargeError,
    SerializationError,
    TimedOutError,
    UndeliveredError,
    UnsupportedError,
    UsageError,
)
from raftmq_client.serializers import Typed

__all__ = [
    "EARLIEST",
    "LATEST",
    "MAX_TIMESTAMP",
    "Admin",
    "AuthenticationError",
    "Broker",
    "BrokerError",
    "BufferFullError",
    "ClientError",
    "ClusterInfo",
    "CommittedOffset",
    "ConfigEntry",
    "ConfigSynonym",
    "ConnectionFailedError",
    "ConnectionLostError",
    "Consumer",
    "ConsumerRecord",
    "CorruptAnswerError",
    "CorruptRecordsError",
    "CreatedTopic",
    "DeserializationError",
    "ErrorCode",
    "FeatureLevel",
    "FeaturesInfo",
    "ForkedError",
    "GroupDescription",
    "GroupListing",
    "GroupMember",
    "LogDirPartition",
    "NewTopic",
    "NoOffsetError",
    "OffsetFound",
    "Outcome",
    "PartitionInfo",
    "Plain",
    "PollIntervalError",
    "Producer",
    "QuorumInfo",
    "QuorumReplica",
    "Receipt",
    "RecordMetadata",
    "RecordTooLargeError",
    "ResourceType",
    "Scram",
    "Security",
    "SerializationError",
    "TimedOutError",
    "TopicInfo",
    "TopicPartition",
    "Typed",
    "UndeliveredError",
    "UnsupportedError",
    "UsageError",
]
