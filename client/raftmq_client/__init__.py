"""A Kafka client for Python: typed, tested against raftmq and Apache Kafka alike.

`raftmq_client.blocking` has `Producer`, `Consumer` and `Admin` on plain sockets; all that decides
is sans-IO in `raftmq_client.core`. Nothing of the broker is imported.
"""

from raftmq_client.blocking import Admin, Consumer, Producer
from raftmq_client.core.accumulator import Receipt, RecordMetadata
from raftmq_client.core.admin import EARLIEST, LATEST, MAX_TIMESTAMP, ResourceType
from raftmq_client.core.fetcher import ConsumerRecord
from raftmq_client.errors import (
    BrokerError,
    BufferFullError,
    ClientError,
    ConnectionFailedError,
    ConnectionLostError,
    CorruptAnswerError,
    ForkedError,
    NoOffsetError,
    Outcome,
    RecordTooLargeError,
    TimedOutError,
    UnsupportedError,
    UsageError,
)

__all__ = [
    "EARLIEST",
    "LATEST",
    "MAX_TIMESTAMP",
    "Admin",
    "BrokerError",
    "BufferFullError",
    "ClientError",
    "ConnectionFailedError",
    "ConnectionLostError",
    "Consumer",
    "ConsumerRecord",
    "CorruptAnswerError",
    "ForkedError",
    "NoOffsetError",
    "Outcome",
    "Producer",
    "Receipt",
    "RecordMetadata",
    "RecordTooLargeError",
    "ResourceType",
    "TimedOutError",
    "UnsupportedError",
    "UsageError",
]
