"""A Kafka client for Python: typed, tested against raftmq and Apache Kafka alike.

`raftmq_client.aio` has `Producer`, `Consumer`, `Worker` and `Admin` for trio and asyncio,
`raftmq_client.blocking` the same on plain sockets (also importable from here); all that decides is
sans-IO in `raftmq_client.core`. Nothing of the broker is imported.
"""

from raftmq.errors import ErrorCode
from raftmq.rights import Kind as AclKind
from raftmq.rights import Operation as AclOperation
from raftmq.rights import Pattern as AclPattern
from raftmq.rights import Permission as AclPermission
from raftmq.rights import Rule as AclRule
from raftmq.rights import RuleFilter as AclFilter
from raftmq.types import TopicPartition
from raftmq_client.blocking import Admin, Consumer, Producer, Transaction, Worker
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
    Reassignment,
    ResourceType,
    UserCredential,
    ViewInfo,
)
from raftmq_client.core.group_admin import (
    CommittedOffset,
    GroupDescription,
    GroupListing,
    GroupMember,
)
from raftmq_client.core.messages import ConsumerRecord
from raftmq_client.core.metadata import Broker, ClusterInfo, PartitionInfo, TopicInfo
from raftmq_client.core.security import OAuthBearer, Plain, Scram, Security
from raftmq_client.core.transaction_requests import (
    ProducerState,
    TransactionDescription,
    TransactionHandle,
    TransactionListing,
)
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
    EndUnknownError,
    FencedError,
    ForkedError,
    MustAbortError,
    NoOffsetError,
    Outcome,
    PollIntervalError,
    RecordTooLargeError,
    SerializationError,
    TimedOutError,
    TransactionError,
    UndeliveredError,
    UnsupportedError,
    UsageError,
)
from raftmq_client.serializers import Typed

__all__ = [
    "EARLIEST",
    "LATEST",
    "MAX_TIMESTAMP",
    "AclFilter",
    "AclKind",
    "AclOperation",
    "AclPattern",
    "AclPermission",
    "AclRule",
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
    "EndUnknownError",
    "ErrorCode",
    "FeatureLevel",
    "FeaturesInfo",
    "FencedError",
    "ForkedError",
    "GroupDescription",
    "GroupListing",
    "GroupMember",
    "LogDirPartition",
    "MustAbortError",
    "NewTopic",
    "NoOffsetError",
    "OAuthBearer",
    "OffsetFound",
    "Outcome",
    "PartitionInfo",
    "Plain",
    "PollIntervalError",
    "Producer",
    "ProducerState",
    "QuorumInfo",
    "QuorumReplica",
    "Reassignment",
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
    "Transaction",
    "TransactionDescription",
    "TransactionError",
    "TransactionHandle",
    "TransactionListing",
    "Typed",
    "UndeliveredError",
    "UnsupportedError",
    "UsageError",
    "UserCredential",
    "ViewInfo",
    "Worker",
]
