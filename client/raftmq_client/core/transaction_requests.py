"""Bodies of requests about transactions, by version, and what their refusals mean.

Pure. Owns the handle by which another process ends a transaction, and the judgement of every error
that a coordinator may answer with (KIP-98, KIP-360, KIP-447, KIP-890).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Final

from attrs import asdict, frozen

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey, Struct
from raftmq.types import TopicPartition
from raftmq_client.core.admin import Operation, Route, by_topic, check_named
from raftmq_client.core.group_admin import CommittedOffset
from raftmq_client.core.group_requests import Identity
from raftmq_client.errors import BrokerError, ClientError, Outcome, UsageError, check_code

FEATURE: Final = "transaction.version"
ADD_PARTITIONS_VERSION_MAX: Final = 3
"""Later ones are for brokers."""
FENCE_VERSION_MIN: Final = 3
"""From here on InitProducerId takes the id and epoch that a producer has (KIP-360)."""


class Protocol:
    """What versions the two protocols of transactions speak (KIP-890).

    The second has partitions and groups added by the requests that use them, and every end raises
    the epoch, so that nothing that comes late can reach a later transaction.
    """

    ONE: Final = 1
    TWO: Final = 2


PRODUCE_VERSIONS: Final = {Protocol.ONE: (3, 11), Protocol.TWO: (12, 12)}
END_VERSIONS: Final = {Protocol.ONE: (0, 4), Protocol.TWO: (5, 5)}
OFFSET_VERSIONS: Final = {Protocol.ONE: (0, 4), Protocol.TWO: (5, 5)}


class Verdict(Enum):
    """What is to be done about a refusal, or about no answer."""

    RETRY = "ask again"
    MOVED = "ask again whoever coordinates now"
    CHECK = "the epoch is old: InitProducerId tells by timeout or by another producer"
    ABORT = "the transaction cannot be committed"
    FATAL = "the producer cannot go on"


_MOVED: Final = frozenset(
    {
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
    }
)
_CHECK: Final = frozenset(
    {
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.INVALID_PRODUCER_ID_MAPPING,
        ErrorCode.UNKNOWN_PRODUCER_ID,
        ErrorCode.INVALID_TXN_STATE,
    }
)
_FATAL: Final = frozenset(
    {
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
        ErrorCode.INVALID_TRANSACTION_TIMEOUT,
        ErrorCode.UNSUPPORTED_VERSION,
        ErrorCode.INVALID_REQUEST,
    }
)


def judge(error: ClientError) -> Verdict:
    """What an error of a request about a transaction means for it."""
    if not isinstance(error, BrokerError):
        return Verdict.MOVED if error.retriable else Verdict.FATAL
    if error.code in _MOVED or error.outcome is Outcome.UNKNOWN:
        return Verdict.MOVED
    if error.code in _CHECK:
        return Verdict.CHECK
    if error.code in _FATAL:
        return Verdict.FATAL
    return Verdict.RETRY if error.retriable else Verdict.ABORT


@frozen
class TransactionHandle:
    """An open transaction as another process may end it: `Admin.end_transaction(handle, ...)`.

    Small and plain: `to_json` and `from_json`, or pickle. It holds no secret but the epoch.
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int
    protocol: int
    """1, or 2 where the cluster's feature `transaction.version` is at 2 (KIP-890)."""
    deadline_ms: int
    """About when the cluster aborts it by itself: ms since 1970, by the clock of who detached."""
    is_empty: bool = False
    """Nothing was sent in it: there is nothing to end."""

    def to_json(self) -> str:
        """The handle as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TransactionHandle:
        """The handle that `to_json` wrote.

        Raises:
            UsageError: the text is none.
        """
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise UsageError(f"no handle of a transaction: {ascii(text)[:60]}") from error


def init_request(
    transactional_id: str, timeout_ms: int, producer_id: int, producer_epoch: int
) -> Callable[[int], Struct]:
    """InitProducerId: a new epoch, and the end of whatever is open under the old one."""

    def request(version: int) -> Struct:
        fields: dict[str, Any] = {
            "transactional_id": transactional_id,
            "transaction_timeout": timeout_ms,
        }
        if version >= FENCE_VERSION_MIN:
            fields |= {"producer_id": producer_id, "producer_epoch": producer_epoch}
        return Struct(**fields)

    return request


def add_partitions_request(
    transactional_id: str,
    producer_id: int,
    producer_epoch: int,
    partitions: Iterable[TopicPartition],
) -> Struct:
    """AddPartitionsToTxn as clients speak it."""
    return Struct(
        v3_and_below_transactional_id=transactional_id,
        v3_and_below_producer_id=producer_id,
        v3_and_below_producer_epoch=producer_epoch,
        v3_and_below_topics=[
            Struct(name=topic, partitions=[key.partition for key in keys])
            for topic, keys in by_topic(partitions)
        ],
    )


def read_added(response: Struct, wanted: Iterable[TopicPartition]) -> None:
    """Raise what refused an AddPartitionsToTxn, which adds all or nothing.

    Raises:
        BrokerError: a refusal; one that says more than "not attempted", if there is any.
    """
    found: dict[TopicPartition, int] = {
        TopicPartition(topic.name, item.partition_index): item.partition_error_code
        for topic in response.results_by_topic_v3_and_below
        for item in topic.results_by_partition
    }
    check_named(wanted, found)
    refused = {key: code for key, code in found.items() if code}
    for key, code in sorted(
        refused.items(), key=lambda item: item[1] == ErrorCode.OPERATION_NOT_ATTEMPTED
    ):
        raise BrokerError(code, about=f"adding {key} to the transaction")


def add_offsets_request(
    transactional_id: str, producer_id: int, producer_epoch: int, group: str
) -> Struct:
    """AddOffsetsToTxn."""
    return Struct(
        transactional_id=transactional_id,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        group_id=group,
    )


def offset_commit_request(
    transactional_id: str,
    producer_id: int,
    producer_epoch: int,
    who: Identity,
    offsets: Mapping[TopicPartition, CommittedOffset],
) -> Callable[[int], Struct]:
    """TxnOffsetCommit; from v3 on fenced by the group's generation (KIP-447)."""

    def request(version: int) -> Struct:
        fields: dict[str, Any] = {
            "transactional_id": transactional_id,
            "group_id": who.group,
            "producer_id": producer_id,
            "producer_epoch": producer_epoch,
            "topics": [
                Struct(
                    name=topic,
                    partitions=[_committed(version, key, offsets[key]) for key in keys],
                )
                for topic, keys in by_topic(offsets)
            ],
        }
        if version >= 3:
            fields |= {
                "generation_id": who.generation,
                "member_id": who.member_id,
                "group_instance_id": who.instance_id,
            }
        return Struct(**fields)

    return request


def _committed(version: int, key: TopicPartition, offset: CommittedOffset) -> Struct:
    fields: dict[str, Any] = {
        "partition_index": key.partition,
        "committed_offset": offset.offset,
        "committed_metadata": offset.metadata,
    }
    if version >= 2:
        fields["committed_leader_epoch"] = offset.leader_epoch
    return Struct(**fields)


def read_offset_commit(response: Struct, wanted: Iterable[TopicPartition]) -> None:
    """Raise what refused a TxnOffsetCommit.

    Raises:
        BrokerError: the first refusal.
    """
    found = {
        TopicPartition(topic.name, item.partition_index): item.error_code
        for topic in response.topics
        for item in topic.partitions
    }
    check_named(wanted, found)
    for key, code in found.items():
        check_code(code, about=f"commit of {key} in the transaction")


def end_request(
    transactional_id: str, producer_id: int, producer_epoch: int, *, commit: bool
) -> Struct:
    """EndTxn."""
    return Struct(
        transactional_id=transactional_id,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        committed=commit,
    )


def end_transaction(handle: TransactionHandle, *, commit: bool) -> Operation[None]:
    """End a transaction that another process began; asking again is harmless."""

    def read(response: Struct) -> None:
        check_code(response.error_code, about=f"end of transaction {handle.transactional_id!r}")

    request = end_request(
        handle.transactional_id, handle.producer_id, handle.producer_epoch, commit=commit
    )
    low, high = END_VERSIONS[handle.protocol]
    return Operation(
        ApiKey.END_TXN,
        lambda _: request,
        read,
        Route.TRANSACTIONS,
        handle.transactional_id,
        min_version=low,
        max_version=high,
    )
