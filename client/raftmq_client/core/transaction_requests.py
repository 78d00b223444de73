"""Bodies of requests about transactions, by version, and what their refusals mean.

Pure. Owns the handle by which another process ends a transaction, and the judgement of every error
that a coordinator may answer with (KIP-98, KIP-360, KIP-447, KIP-890); and what operators ask
(KIP-664). A transaction that hangs is ended by fencing its producer (`fence_producer`), or, where
no coordinator knows of it, by a marker (`abort_orphan`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
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


# ---- what operators ask ----

STATES: Final = (
    "Empty",
    "Ongoing",
    "PrepareCommit",
    "PrepareAbort",
    "CompleteCommit",
    "CompleteAbort",
)
"""States of a transactional id, by Kafka's names."""
_OPEN: Final = ("Ongoing", "PrepareCommit", "PrepareAbort")
_DURATION_FROM: Final = 1  # ListTransactions (KIP-994)
_PATTERN_FROM: Final = 2  # ListTransactions (KIP-1152)
DESCRIBED_MAX: Final = 500
"""Ids that one request asks about."""


@frozen
class TransactionListing:
    """A transactional id, as its coordinator lists it."""

    transactional_id: str
    producer_id: int
    state: str
    coordinator: int

    @property
    def is_open(self) -> bool:
        """True while its transaction runs, or its markers are not all written."""
        return self.state in _OPEN


@frozen
class TransactionDescription:
    """A transactional id and its running transaction.

    Attributes:
        started_at_ms: when the running transaction began; -1 where none runs.
        partitions: that are part of it; once it is decided, those without their marker.
    """

    transactional_id: str
    state: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    started_at_ms: int
    partitions: tuple[TopicPartition, ...]

    @property
    def is_open(self) -> bool:
        """True while it runs, or its markers are not all written."""
        return self.state in _OPEN


@frozen
class ProducerState:
    """A producer, as a partition's log knows it.

    Attributes:
        last_timestamp_ms: of its last records; -1 where that is not known.
        open_since: the first offset of its open transaction in this partition; -1 without one.
    """

    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_timestamp_ms: int
    coordinator_epoch: int
    open_since: int


def list_transactions(
    node: int,
    *,
    states: Sequence[str] = (),
    producer_ids: Sequence[int] = (),
    running_for_ms: int = -1,
    pattern: str | None = None,
) -> Operation[list[TransactionListing]]:
    """The transactional ids that one broker coordinates, those that all filters let through.

    Raises:
        UsageError: a state has no such name.
    """
    strange = sorted(set(states) - set(STATES))
    if strange:
        raise UsageError(f"no state of transactions: {', '.join(strange)}; {', '.join(STATES)} are")

    def read(response: Struct) -> list[TransactionListing]:
        check_code(response.error_code, about=f"transactions of broker {node}")
        return [
            TransactionListing(
                item.transactional_id, item.producer_id, item.transaction_state, node
            )
            for item in response.transaction_states
        ]

    fields = {"state_filters": list(states), "producer_id_filters": list(producer_ids)}
    min_version = 0
    if running_for_ms >= 0:
        min_version = _DURATION_FROM
    if pattern is not None:
        min_version = _PATTERN_FROM

    def request(version: int) -> Struct:
        later: dict[str, Any] = {}
        if version >= _DURATION_FROM:
            later["duration_filter"] = running_for_ms
        if version >= _PATTERN_FROM:
            later["transactional_id_pattern"] = pattern
        return Struct(**fields, **later)

    return Operation(
        ApiKey.LIST_TRANSACTIONS, request, read, Route.NODE, node, min_version=min_version
    )


def describe_transactions(
    node: int, names: Sequence[str]
) -> Operation[dict[str, TransactionDescription | BrokerError]]:
    """Transactional ids that one broker coordinates; an id's own error is its answer."""

    def read(response: Struct) -> dict[str, TransactionDescription | BrokerError]:
        found: dict[str, TransactionDescription | BrokerError] = {}
        for item in response.transaction_states:
            name = item.transactional_id
            found[name] = _described(item)
        check_named(names, found)
        return found

    request = Struct(transactional_ids=list(names))
    return Operation(ApiKey.DESCRIBE_TRANSACTIONS, lambda _: request, read, Route.NODE, node)


def describe_transaction(name: str) -> Operation[TransactionDescription]:
    """One transactional id, from its coordinator."""

    def read(response: Struct) -> TransactionDescription:
        found = _described(response.transaction_states[0])
        if isinstance(found, BrokerError):
            raise found
        return found

    request = Struct(transactional_ids=[name])
    return Operation(
        ApiKey.DESCRIBE_TRANSACTIONS, lambda _: request, read, Route.TRANSACTIONS, name
    )


def _described(item: Struct) -> TransactionDescription | BrokerError:
    if item.error_code:
        return BrokerError(item.error_code, about=f"transactional id {item.transactional_id!r}")
    return TransactionDescription(
        item.transactional_id,
        item.transaction_state,
        item.producer_id,
        item.producer_epoch,
        item.transaction_timeout,
        item.transaction_start_time,
        tuple(
            sorted(
                TopicPartition(topic.topic, index)
                for topic in item.topics
                for index in topic.partitions
            )
        ),
    )


def describe_producers(
    node: int, partitions: Mapping[TopicPartition, int]
) -> Operation[dict[TopicPartition, list[ProducerState] | BrokerError]]:
    """Producers that the logs of partitions know, from their leader."""

    def read(response: Struct) -> dict[TopicPartition, list[ProducerState] | BrokerError]:
        found: dict[TopicPartition, list[ProducerState] | BrokerError] = {}
        for topic in response.topics:
            for item in topic.partitions:
                key = TopicPartition(topic.name, item.partition_index)
                if item.error_code:
                    found[key] = BrokerError(item.error_code, about=str(key))
                    continue
                found[key] = [
                    ProducerState(
                        one.producer_id,
                        one.producer_epoch,
                        one.last_sequence,
                        one.last_timestamp,
                        one.coordinator_epoch,
                        one.current_txn_start_offset,
                    )
                    for one in item.active_producers
                ]
        check_named(partitions, found)
        return found

    request = Struct(topics=_topics(partitions))
    return Operation(ApiKey.DESCRIBE_PRODUCERS, lambda _: request, read, Route.NODE, node)


def fence_producer(name: str, timeout_ms: int) -> Operation[tuple[int, int]]:
    """Abort what runs under a transactional id, and shut its producer out; (producer id, epoch)
    that a next one would have. `timeout_ms`: of the id's transactions from now on."""

    def read(response: Struct) -> tuple[int, int]:
        check_code(response.error_code, about=f"transactional id {name!r}")
        return response.producer_id, response.producer_epoch

    request = init_request(name, timeout_ms, -1, -1)
    return Operation(ApiKey.INIT_PRODUCER_ID, request, read, Route.TRANSACTIONS, name)


def abort_orphan(
    node: int, partitions: Mapping[TopicPartition, int], producer: ProducerState
) -> Operation[dict[TopicPartition, BrokerError | None]]:
    """End a transaction that no coordinator knows of, in partitions that one broker leads: an abort
    marker of its producer. A partition's own error is its answer."""

    def read(response: Struct) -> dict[TopicPartition, BrokerError | None]:
        found: dict[TopicPartition, BrokerError | None] = {}
        for marker in response.markers:
            for topic in marker.topics:
                for item in topic.partitions:
                    key = TopicPartition(topic.name, item.partition_index)
                    code = ErrorCode(item.error_code)
                    found[key] = BrokerError(code, about=str(key)) if code else None
        check_named(partitions, found)
        return found

    marker = Struct(
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        transaction_result=False,
        topics=_topics(partitions),
        coordinator_epoch=max(0, producer.coordinator_epoch),
    )
    return Operation(
        ApiKey.WRITE_TXN_MARKERS,
        lambda _: Struct(markers=[marker]),
        read,
        Route.NODE,
        node,
    )


def _topics(partitions: Iterable[TopicPartition]) -> list[Struct]:
    return [
        Struct(name=topic, partition_indexes=[key.partition for key in keys])
        for topic, keys in by_topic(partitions)
    ]
