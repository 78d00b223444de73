"""Admin calls as flows: what to ask of whom, what to repeat, when to wait. No I/O.

A flow is a generator. It yields an `Ask` (a call to send; its answer or error is sent back) or a
`Pause`, and returns the answer. Drivers run flows with `blocking` sockets or tasks. Routes
operations (any broker, a partition's leader, a group's coordinator), repeats what may be repeated
until the timeout, and reports an operation whose answer was lost as unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from attrs import frozen

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from raftmq.types import TopicPartition
from raftmq_client.core import admin as operations
from raftmq_client.core import group_admin, transaction_requests
from raftmq_client.core.admin import (
    VIEW_OF,
    VIEW_WHERE,
    CreatedTopic,
    FeaturesInfo,
    LogDirPartition,
    NewTopic,
    OffsetFound,
    Operation,
    QuorumInfo,
    Route,
    ViewInfo,
)
from raftmq_client.core.call import ANY_NODE, Call, Finish, struct_call
from raftmq_client.core.client import ClientCore
from raftmq_client.core.group_admin import GroupListing
from raftmq_client.core.metadata import Broker, ClusterInfo, TopicInfo
from raftmq_client.core.transaction_requests import (
    ProducerState,
    TransactionDescription,
    TransactionHandle,
    TransactionListing,
    end_transaction,
)
from raftmq_client.errors import (
    BrokerError,
    ClientError,
    ConnectionFailedError,
    CorruptAnswerError,
    EndUnknownError,
    FencedError,
    Outcome,
    TimedOutError,
    TransactionError,
)

T = TypeVar("T")

DESCRIBED_MAX: Final = 1_000
"""Topics of one request for their configs."""
_BACKOFF_MS: Final = 50.0
_BACKOFF_MAX_MS: Final = 1_000.0
_UNKNOWN_TOPIC: Final = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
_OVER: Final = (
    ErrorCode.PRODUCER_FENCED,
    ErrorCode.INVALID_PRODUCER_EPOCH,
    ErrorCode.INVALID_PRODUCER_ID_MAPPING,
)
"""A coordinator went on since a transaction was detached."""


@frozen
class Ask:
    """Send this call; the flow goes on with its answer."""

    make: Callable[[Finish], Call]


@frozen
class Pause:
    """Go on after a while."""

    duration_ms: float


Flow: TypeAlias = Generator[Ask | Pause, Any, T]


class AdminFlows:
    """Flows of one client. `is_patient`: a topic nobody knows may yet come to be known."""

    def __init__(
        self,
        client: ClientCore,
        now: Callable[[], float],
        timeout_ms: float = 15_000,
        *,
        is_patient: bool = False,
    ) -> None:
        self.timeout_ms = timeout_ms
        self._client = client
        self._now = now
        self._is_patient = is_patient

    @property
    def server_timeout(self) -> int:
        """How long brokers may work on a change."""
        return max(1_000, int(self.timeout_ms) - 1_000)

    def run(self, operation: Operation[T]) -> Flow[T]:
        """One operation, repeated while that helps and is harmless."""
        deadline = self._now() + self.timeout_ms
        backoff = _BACKOFF_MS
        was_sent = False
        while True:
            try:
                return _read(operation, (yield from self._ask(operation, deadline)))
            except ClientError as error:
                if error.outcome is Outcome.UNKNOWN:
                    was_sent = True
                if not self._may_repeat(operation, error) or self._now() + backoff >= deadline:
                    if was_sent and error.outcome is Outcome.FAILED and not operation.is_repeatable:
                        raise TimedOutError(f"no answer in time: {error}", sent=True) from error
                    raise
            yield Pause(backoff)
            backoff = min(backoff * 2, _BACKOFF_MAX_MS)

    def cluster(self, topics: Sequence[str] | None = None) -> Flow[ClusterInfo]:
        """Brokers, controller, topics and where their partitions live."""
        info = yield from self.run(operations.cluster_operation(topics))
        self._client.metadata.apply(info, self._now())
        return info

    def brokers(self) -> Flow[tuple[Broker, ...]]:
        """The live brokers, by id."""
        info = yield from self.cluster([])
        return tuple(sorted(info.brokers, key=lambda broker: broker.node_id))

    def topic(self, name: str) -> Flow[TopicInfo]:
        """One topic, or the error that there is none."""
        info = yield from self.cluster([name])
        for item in info.topics:
            if item.error_code:
                raise BrokerError(item.error_code, about=f"topic {name!r}")
            if item.name == name:
                return item
        raise BrokerError(_UNKNOWN_TOPIC, about=f"topic {name!r}")

    def views(self, of: str | None) -> Flow[list[ViewInfo]]:
        """All views with conditions, or those of one topic.

        What a topic is a view of stands in its settings alone. A view has its topic's numbers with
        the same replicas, so the settings of topics that lie elsewhere are not asked for.
        """
        info = yield from self.cluster()
        base = next((topic for topic in info.topics if topic.name == of), None)
        names = sorted(
            topic.name
            for topic in info.topics
            if not topic.is_internal and (base is None or _lies_where(topic, base))
        )
        found = yield from self._configs(names, (VIEW_OF, VIEW_WHERE))
        return [
            ViewInfo(name, topic, configs.get(VIEW_WHERE) or "")
            for name, configs in found.items()
            if (topic := configs.get(VIEW_OF)) and of in (None, topic)
        ]

    def topic_configs(self, keys: Sequence[str]) -> Flow[dict[str, dict[str, str | None]]]:
        """These settings of all topics that are not internal, by name."""
        info = yield from self.cluster()
        names = sorted(topic.name for topic in info.topics if not topic.is_internal)
        return (yield from self._configs(names, keys))

    def _configs(
        self, names: Sequence[str], keys: Sequence[str]
    ) -> Flow[dict[str, dict[str, str | None]]]:
        found: dict[str, dict[str, str | None]] = {}
        for at in range(0, len(names), DESCRIBED_MAX):
            part = names[at : at + DESCRIBED_MAX]
            found |= yield from self.run(operations.describe_topics(part, keys))
        return found

    def create_topic(self, topic: NewTopic, *, validate_only: bool) -> Flow[CreatedTopic]:
        """Create a topic."""
        created = yield from self.run(
            operations.create_topics(
                [topic], timeout_ms=self.server_timeout, validate_only=validate_only
            )
        )
        return created[0]

    def list_offsets(
        self, timestamps: Mapping[TopicPartition, int], *, isolation: int = 0
    ) -> Flow[dict[TopicPartition, OffsetFound]]:
        """Offsets by timestamp (ms), or EARLIEST (-2), LATEST (-1), MAX_TIMESTAMP (-3)."""
        return self._by_leader(
            timestamps,
            lambda node, part: operations.list_offsets(node, part, isolation=isolation),
        )

    def delete_records(
        self, offsets: Mapping[TopicPartition, int]
    ) -> Flow[dict[TopicPartition, int]]:
        """Delete records below the given offsets; gives the new log starts."""
        return self._by_leader(offsets, self._delete_records)

    def delete_records_each(
        self, offsets: Mapping[TopicPartition, int]
    ) -> Flow[dict[TopicPartition, int | ClientError]]:
        """Delete records below the given offsets; each partition's new log start, or its error."""
        return self._by_leader(offsets, self._delete_records, each=True)

    def _delete_records(
        self, node: int, part: Mapping[TopicPartition, int]
    ) -> Operation[dict[TopicPartition, int | BrokerError]]:
        return operations.delete_records(node, part, timeout_ms=self.server_timeout)

    def list_groups(self) -> Flow[list[GroupListing]]:
        """All groups, by name; each broker tells of those that it coordinates."""
        found: dict[str, GroupListing] = {}
        for broker in (yield from self.brokers()):
            for item in (yield from self.run(group_admin.list_groups(broker.node_id))):
                found.setdefault(item.group, item)
        return [found[name] for name in sorted(found)]

    def coordinator(self, name: str, key_type: int = group_admin.GROUP) -> Flow[int]:
        """The node that coordinates a group, or the transactions of an id."""
        node, host, port = yield from self.run(group_admin.find_coordinator(name, key_type))
        self._client.metadata.brokers.setdefault(node, Broker(node, host, port))
        return node

    def end_transaction(self, handle: TransactionHandle, *, commit: bool) -> Flow[None]:
        """Commit or abort a transaction that another process began."""
        if handle.is_empty:
            return
        about = f"transaction {handle.transactional_id!r}"
        try:
            yield from self.run(end_transaction(handle, commit=commit))
        except ClientError as error:
            code = error.code if isinstance(error, BrokerError) else None
            if code in _OVER:
                raise FencedError(
                    f"{about} is over: it took too long, or a newer producer has its id; how it"
                    f" ended only a reader can tell ({error})",
                    outcome=Outcome.UNKNOWN,
                ) from error
            if code is ErrorCode.INVALID_TXN_STATE:
                raise TransactionError(
                    f"{about} is not open, or ended otherwise: {error}"
                ) from error
            if error.retriable or error.outcome is Outcome.UNKNOWN:
                raise EndUnknownError(f"{about}: no answer in time: {error}") from error
            raise

    def list_transactions(
        self,
        *,
        states: Sequence[str] = (),
        producer_ids: Sequence[int] = (),
        running_for_ms: int = -1,
        pattern: str | None = None,
    ) -> Flow[list[TransactionListing]]:
        """Transactional ids that all filters let through, by name."""
        found: dict[str, TransactionListing] = {}
        for broker in (yield from self.brokers()):
            operation = transaction_requests.list_transactions(
                broker.node_id,
                states=states,
                producer_ids=producer_ids,
                running_for_ms=running_for_ms,
                pattern=pattern,
            )
            for item in (yield from self.run(operation)):
                found.setdefault(item.transactional_id, item)
        return [found[name] for name in sorted(found)]

    def describe_listed(
        self, listed: Sequence[TransactionListing]
    ) -> Flow[dict[str, TransactionDescription]]:
        """What listed ids are about; those that are gone meanwhile are left out."""
        found: dict[str, TransactionDescription] = {}
        names: dict[int, list[str]] = {}
        for item in listed:
            names.setdefault(item.coordinator, []).append(item.transactional_id)
        for node, those in names.items():
            for at in range(0, len(those), transaction_requests.DESCRIBED_MAX):
                part = those[at : at + transaction_requests.DESCRIBED_MAX]
                told = yield from self.run(transaction_requests.describe_transactions(node, part))
                for name, answer in told.items():
                    if isinstance(answer, TransactionDescription):
                        found[name] = answer
                    elif answer.code is not ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
                        raise answer
        return found

    def describe_producers(
        self, partitions: Iterable[TopicPartition]
    ) -> Flow[dict[TopicPartition, list[ProducerState]]]:
        """Producers that the partitions' logs know, by partition."""
        return self._by_leader(
            dict.fromkeys(partitions, 0), transaction_requests.describe_producers
        )

    def abort_orphan(self, partition: TopicPartition, producer: ProducerState) -> Flow[None]:
        """End a transaction in a partition's log that no coordinator knows of."""
        yield from self._by_leader(
            {partition: 0},
            lambda node, part: transaction_requests.abort_orphan(node, part, producer),
        )

    def log_dirs(self) -> Flow[list[LogDirPartition]]:
        """Bytes of every replica on every live broker."""
        found: list[LogDirPartition] = []
        for broker in (yield from self.brokers()):
            part = yield from self.run(operations.describe_log_dirs(broker.node_id))
            found.extend(part)
        return found

    def features(self, node: int | None = None) -> Flow[FeaturesInfo]:
        """Levels of features, as one broker knows them."""
        return (yield from self.run(operations.describe_features(node)))

    def quorum(self) -> Flow[QuorumInfo]:
        """The metadata group."""
        found = yield from self.run(operations.describe_quorum())
        knows_all = all(item.log_end_offset >= 0 for item in (*found.voters, *found.observers))
        if knows_all or found.leader not in self._client.metadata.brokers:
            return found
        return (yield from self.run(operations.describe_quorum(found.leader)))

    # How operations travel.

    @staticmethod
    def _may_repeat(operation: Operation[Any], error: ClientError) -> bool:
        if not error.retriable:
            return False
        if isinstance(error, BrokerError) and error.code is _UNKNOWN_TOPIC:
            return False  # to an operator that is an answer
        return operation.is_repeatable or error.outcome is Outcome.FAILED

    def _ask(self, operation: Operation[Any], deadline: float) -> Flow[Any]:
        node = ANY_NODE
        if operation.route is Route.NODE:
            node = int(operation.target)
            yield from self._need_broker(node)
        elif operation.route is Route.COORDINATOR:
            node = yield from self.coordinator(str(operation.target))
        elif operation.route is Route.TRANSACTIONS:
            node = yield from self.coordinator(str(operation.target), group_admin.TRANSACTIONS)

        def make(finish: Finish) -> Call:
            return struct_call(
                operation.api,
                operation.request,
                finish,
                node=node,
                min_version=operation.min_version,
                max_version=operation.max_version,
                timeout_ms=max(1.0, deadline - self._now()),
            )

        return (yield Ask(make))

    def _need_broker(self, node: int) -> Flow[None]:
        if node not in self._client.metadata.brokers:
            yield from self.cluster([])
        if node not in self._client.metadata.brokers:
            raise ConnectionFailedError(f"broker {node} is not in the cluster or not alive")

    def _by_leader(
        self,
        wanted: Mapping[TopicPartition, int],
        make: Callable[[int, dict[TopicPartition, int]], Operation[Any]],
        *,
        each: bool = False,
    ) -> Flow[dict[TopicPartition, Any]]:
        """Ask each partition's leader; leaders that moved meanwhile are looked up anew.

        Args:
            wanted: what to ask about each partition.
            make: the operation for one broker; its answer may hold an error for a partition.
            each: an error of a partition is its answer, and raised otherwise.
        """
        deadline = self._now() + self.timeout_ms
        found: dict[TopicPartition, Any] = {}
        backoff = _BACKOFF_MS
        while True:
            failures: dict[TopicPartition, ClientError] = {}
            rest = {key: value for key, value in wanted.items() if key not in found}
            try:
                groups = yield from self._leaders(rest)
            except BrokerError as error:
                if not (self._is_patient and error.retriable):
                    raise
                failures, groups = dict.fromkeys(rest, error), []
            for node, part in groups:
                told = yield from self._ask_leader(node, part, make, deadline)
                for key, item in told.items():
                    if not isinstance(item, ClientError):
                        found[key] = item
                    elif item.retriable:
                        failures[key] = item
                    elif each:
                        found[key] = item
                    else:
                        raise item
            if not failures:
                return found
            if self._now() + backoff >= deadline:
                if each:
                    return found | failures
                raise next(iter(failures.values()))
            yield Pause(backoff)
            backoff = min(backoff * 2, _BACKOFF_MAX_MS)

    def _ask_leader(
        self,
        node: int | None,
        part: dict[TopicPartition, int],
        make: Callable[[int, dict[TopicPartition, int]], Operation[Any]],
        deadline: float,
    ) -> Flow[dict[TopicPartition, Any]]:
        """What one leader says of its partitions, or the error that stands for each answer."""
        if node is None:
            code = ErrorCode.LEADER_NOT_AVAILABLE
            return {key: BrokerError(code, about=str(key)) for key in part}
        try:
            operation = make(node, part)
            found: dict[TopicPartition, Any] = _read(
                operation, (yield from self._ask(operation, deadline))
            )
        except ClientError as error:
            return dict.fromkeys(part, error)
        return found

    def _leaders(
        self, wanted: Mapping[TopicPartition, int]
    ) -> Flow[list[tuple[int | None, dict[TopicPartition, int]]]]:
        names = sorted({key.topic for key in wanted})
        info = yield from self.cluster(names)
        for topic in info.topics:
            if topic.error_code:
                raise BrokerError(topic.error_code, about=f"topic {topic.name!r}")
        metadata = self._client.metadata
        there = {(topic.name, item.partition) for topic in info.topics for item in topic.readable}
        groups: dict[int | None, dict[TopicPartition, int]] = {}
        for key, value in wanted.items():
            if key not in there:
                count = metadata.partition_count(key.topic) or 0
                raise BrokerError(_UNKNOWN_TOPIC, f"it has {count} partitions", about=str(key))
            leader = metadata.leader(*key)
            groups.setdefault(leader[0] if leader else None, {})[key] = value
        return list(groups.items())


def _read(operation: Operation[T], response: Any) -> T:
    """What an answer says; one that leaves out what was asked for is no answer.

    Raises:
        ClientError: the answer is a refusal.
        CorruptAnswerError: it can be read, but makes no sense.
    """
    try:
        return operation.read(response)
    except ClientError:
        raise
    except Exception as error:
        name = ApiKey(operation.api).name
        raise CorruptAnswerError(f"an answer to {name} makes no sense: {error!r}") from error


def _lies_where(topic: TopicInfo, base: TopicInfo) -> bool:
    """True when every partition of `base` has one of the same number and replicas in `topic`."""
    found = {partition.partition: partition.replicas for partition in topic.partitions}
    return all(found.get(one.partition) == one.replicas for one in base.partitions)
