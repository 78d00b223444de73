"""What a Fetch request and its answer say, as plain objects.

Owns the types alone; `fetch.py` and `fetch_request.py` turn them into bytes and back. `Piece` is
what an answer is made of: bytes, or a span of the log that is sent without being read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol, TypeAlias
from uuid import UUID

from attrs import Factory, define, frozen

from raftmq.protocol.wire import CurrentLeader, NodeEndpoint
from raftmq.types import Buffer

FLEXIBLE_FROM: Final = 12
TOPIC_IDS_FROM: Final = 13
REPLICA_STATE_FROM: Final = 15
ENDPOINTS_FROM: Final = 16
UNKNOWN_HIGH_WATERMARK: Final = (1 << 63) - 1


class Span(Protocol):
    """Bytes that stand elsewhere; only their number matters here."""

    @property
    def size(self) -> int:
        """How many bytes will be sent."""
        ...


Piece: TypeAlias = Buffer | Span


@define
class FetchPartition:
    """What a client wants of one partition."""

    partition: int
    current_leader_epoch: int = -1
    fetch_offset: int = 0
    last_fetched_epoch: int = -1
    log_start_offset: int = -1
    partition_max_bytes: int = 1 << 20
    replica_directory_id: UUID | None = None
    high_watermark: int = UNKNOWN_HIGH_WATERMARK


@define
class FetchTopic:
    """A topic, by name or (v13+) by id."""

    name: str | None
    topic_id: UUID | None
    partitions: list[FetchPartition]


@define
class ForgottenTopic:
    """Partitions that leave a fetch session (v7+)."""

    name: str | None
    topic_id: UUID | None
    partitions: list[int]


@define
class FetchRequest:
    """A Fetch request. `replica_id` is -1 for consumers."""

    replica_id: int = -1
    max_wait_ms: int = 500
    min_bytes: int = 1
    max_bytes: int = 0x7FFFFFFF
    isolation_level: int = 0
    session_id: int = 0
    session_epoch: int = -1
    topics: list[FetchTopic] = Factory(list)
    forgotten: list[ForgottenTopic] = Factory(list)
    rack_id: str = ""
    cluster_id: str | None = None
    replica_epoch: int = -1


@frozen
class AbortedTransaction:
    """An aborted transaction whose records stand in what is answered."""

    producer_id: int
    first_offset: int


@frozen
class DivergingEpoch:
    """Where the log of a follower parts from the leader's (v12+)."""

    epoch: int = -1
    end_offset: int = -1


@define
class FetchPartitionResponse:
    """What one partition has. `records` are spans or buffers, sent one after the other."""

    partition: int
    error_code: int = 0
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start_offset: int = -1
    aborted_transactions: Sequence[AbortedTransaction] | None = None
    preferred_read_replica: int = -1
    records: Sequence[Any] | None = ()
    current_leader: CurrentLeader | None = None
    diverging_epoch: DivergingEpoch | None = None


@define
class FetchTopicResponse:
    """What one topic has, named as the request named it."""

    name: str | None
    topic_id: UUID | None
    partitions: list[FetchPartitionResponse]


@define
class FetchResponse:
    """The answer to a Fetch."""

    topics: list[FetchTopicResponse] = Factory(list)
    throttle_time_ms: int = 0
    error_code: int = 0
    session_id: int = 0
    node_endpoints: Sequence[NodeEndpoint] = ()
