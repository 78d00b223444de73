"""Admin calls for scripts and the command line: one method, one answer or one error.

Routes operations (any broker, a partition's leader, a group's coordinator), repeats what may be
repeated until the timeout, and reports an operation whose answer was lost as unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from raftmq.errors import ErrorCode
from raftmq.types import TopicPartition
from raftmq_client.blocking.engine import Engine, now_ms
from raftmq_client.core import admin as operations
from raftmq_client.core import group_admin
from raftmq_client.core.admin import (
    ConfigEntry,
    CreatedTopic,
    LogDirPartition,
    NewTopic,
    OffsetFound,
    Operation,
    QuorumInfo,
    ResourceType,
    Route,
)
from raftmq_client.core.assignors import decode_assignment
from raftmq_client.core.call import ANY_NODE, Call, Finish, struct_call
from raftmq_client.core.client import ClientOptions
from raftmq_client.core.group_admin import CommittedOffset, GroupDescription, GroupListing
from raftmq_client.core.metadata import Broker, ClusterInfo, TopicInfo
from raftmq_client.errors import (
    BrokerError,
    ClientError,
    ConnectionFailedError,
    Outcome,
    TimedOutError,
)
from raftmq_client.options import client_options

T = TypeVar("T")

_BACKOFF_MS: Final = 50.0


class Admin:
    """Administers a cluster: `with Admin("localhost:9092") as admin: ...`."""

    def __init__(
        self,
        bootstrap: str | Sequence[str] = "127.0.0.1:9092",
        *,
        client_id: str = "raftmq-admin",
        timeout_ms: float = 15_000,
    ) -> None:
        options = client_options(bootstrap, client_id)
        self._timeout_ms = timeout_ms
        self._engine = Engine(options, name=client_id)
        self._engine.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._engine.close()

    def cluster(self, topics: Sequence[str] | None = None) -> ClusterInfo:
        """Brokers, controller, topics and where their partitions live."""
        info = self._run(operations.cluster_operation(topics))
        self._learn(info)
        return info

    def brokers(self) -> tuple[Broker, ...]:
        """The live brokers, by id."""
        return tuple(sorted(self.cluster([]).brokers, key=lambda broker: broker.node_id))

    def topic(self, name: str) -> TopicInfo:
        """One topic.

        Raises:
            BrokerError: there is none of that name.
        """
        info = self.cluster([name])
        for item in info.topics:
            if item.error_code:
                raise BrokerError(item.error_code, about=f"topic {name!r}")
            if item.name == name:
                return item
        raise BrokerError(3, about=f"topic {name!r}")

    def create_topic(
        self,
        name: str,
        partitions: int = -1,
        replication_factor: int = -1,
        configs: Mapping[str, str] | None = None,
        *,
        validate_only: bool = False,
    ) -> CreatedTopic:
        """Create a topic; the answer comes when the cluster knows it."""
        topic = NewTopic(name, partitions, replication_factor, configs or {})
        created = self._run(
            operations.create_topics(
                [topic], timeout_ms=self._server_timeout, validate_only=validate_only
            )
        )
        return created[0]

    def delete_topic(self, name: str) -> None:
        """Delete a topic and its records."""
        self._run(operations.delete_topics([name], timeout_ms=self._server_timeout))

    def create_partitions(self, name: str, count: int) -> None:
        """Raise a topic's partitions to `count` in all."""
        self._run(operations.create_partitions(name, count, timeout_ms=self._server_timeout))

    def elect_leaders(
        self, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, ErrorCode]:
        """Hand partitions to their preferred leaders; what became of each."""
        operation = operations.elect_leaders(partitions, timeout_ms=self._server_timeout)
        return self._run(operation)

    def describe_configs(
        self, resource: ResourceType, name: str, *, documentation: bool = False
    ) -> list[ConfigEntry]:
        """All settings of a topic or broker, by name."""
        return self._run(operations.describe_configs(resource, name, documentation=documentation))

    def alter_configs(
        self, resource: ResourceType, name: str, changes: Mapping[str, str | None]
    ) -> None:
        """Set keys, or put them back to their default (None)."""
        self._run(operations.alter_configs(resource, name, changes))

    def list_offsets(
        self, timestamps: Mapping[TopicPartition, int], *, isolation: int = 0
    ) -> dict[TopicPartition, OffsetFound]:
        """Offsets by timestamp (ms), or EARLIEST (-2), LATEST (-1), MAX_TIMESTAMP (-3)."""
        return self._by_leader(
            timestamps,
            lambda node, part: operations.list_offsets(node, part, isolation=isolation),
        )

    def delete_records(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Delete records below the given offsets; gives the new log starts."""
        return self._by_leader(
            offsets,
            lambda node, part: operations.delete_records(
                node, part, timeout_ms=self._server_timeout
            ),
        )

    def list_groups(self) -> list[GroupListing]:
        """All groups, by name; each broker tells of those that it coordinates."""
        found: dict[str, GroupListing] = {}
        for broker in self.brokers():
            for item in self._run(group_admin.list_groups(broker.node_id)):
                found.setdefault(item.group, item)
        return [found[name] for name in sorted(found)]

    def describe_group(self, group: str) -> GroupDescription:
        """A group's state and members."""
        return self._run(group_admin.describe_group(group, decode_assignment))

    def group_offsets(
        self, group: str, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, CommittedOffset]:
        """A group's committed offsets."""
        return self._run(group_admin.fetch_offsets(group, partitions))

    def delete_group(self, group: str) -> None:
        """Forget an empty group."""
        self._run(group_admin.delete_groups(group))

    def coordinator(self, group: str) -> int:
        """The node that coordinates a group."""
        node, host, port = self._run(group_admin.find_coordinator(group))
        with self._engine.lock:
            self._engine.client.metadata.brokers.setdefault(node, Broker(node, host, port))
        return node

    def log_dirs(self) -> list[LogDirPartition]:
        """Bytes of every replica on every live broker."""
        found: list[LogDirPartition] = []
        for broker in self.brokers():
            part: list[LogDirPartition] = self._run(operations.describe_log_dirs(broker.node_id))
            found.extend(part)
        return found

    def quorum(self) -> QuorumInfo:
        """The metadata group."""
        found = self._run(operations.describe_quorum())
        knows_all = all(item.log_end_offset >= 0 for item in (*found.voters, *found.observers))
        if knows_all or found.leader not in self._engine.client.metadata.brokers:
            return found
        return self._run(operations.describe_quorum(found.leader))

    # How operations travel.

    @property
    def _server_timeout(self) -> int:
        return max(1_000, int(self._timeout_ms) - 1_000)

    def _learn(self, info: ClusterInfo) -> None:
        with self._engine.lock:
            self._engine.client.metadata.apply(info, now_ms())

    def _run(self, operation: Operation[T]) -> T:
        deadline = now_ms() + self._timeout_ms
        backoff = _BACKOFF_MS
        was_sent = False
        while True:
            try:
                return operation.read(self._ask(operation, deadline))
            except ClientError as error:
                if error.outcome is Outcome.UNKNOWN:
                    was_sent = True
                if not self._may_repeat(operation, error) or now_ms() + backoff >= deadline:
                    if was_sent and error.outcome is Outcome.FAILED and not operation.is_repeatable:
                        raise TimedOutError(f"no answer in time: {error}", sent=True) from error
                    raise
            self._pause(backoff)
            backoff = min(backoff * 2, 1_000.0)

    @staticmethod
    def _may_repeat(operation: Operation[Any], error: ClientError) -> bool:
        if not error.retriable:
            return False
        if isinstance(error, BrokerError) and error.code.name == "UNKNOWN_TOPIC_OR_PARTITION":
            return False  # to an operator that is an answer
        return operation.is_repeatable or error.outcome is Outcome.FAILED

    def _ask(self, operation: Operation[Any], deadline: float) -> Any:
        node = ANY_NODE
        if operation.route is Route.NODE:
            node = int(operation.target)
            self._need_broker(node)
        elif operation.route is Route.COORDINATOR:
            node = self.coordinator(str(operation.target))

        def make(finish: Finish) -> Call:
            return struct_call(
                operation.api,
                operation.request,
                finish,
                node=node,
                min_version=operation.min_version,
                max_version=operation.max_version,
                timeout_ms=max(1.0, deadline - now_ms()),
            )

        return self._engine.call(make)

    def _need_broker(self, node: int) -> None:
        if node not in self._engine.client.metadata.brokers:
            self.cluster([])
        if node not in self._engine.client.metadata.brokers:
            raise ConnectionFailedError(f"broker {node} is not in the cluster or not alive")

    def _by_leader(
        self,
        wanted: Mapping[TopicPartition, int],
        make: Any,
    ) -> dict[TopicPartition, Any]:
        """Ask each partition's leader; leaders that moved meanwhile are looked up anew."""
        deadline = now_ms() + self._timeout_ms
        found: dict[TopicPartition, Any] = {}
        backoff = _BACKOFF_MS
        while True:
            failure: ClientError | None = None
            for node, part in self._leaders({k: v for k, v in wanted.items() if k not in found}):
                try:
                    if node is None:
                        key = next(iter(part))
                        raise BrokerError(5, about=str(key))
                    operation = make(node, part)
                    found.update(operation.read(self._ask(operation, deadline)))
                except ClientError as error:
                    if not error.retriable:
                        raise
                    failure = error
            if failure is None:
                return found
            if now_ms() + backoff >= deadline:
                raise failure
            self._pause(backoff)
            backoff = min(backoff * 2, 1_000.0)

    def _leaders(
        self, wanted: Mapping[TopicPartition, int]
    ) -> list[tuple[int | None, dict[TopicPartition, int]]]:
        names = sorted({key.topic for key in wanted})
        info = self.cluster(names)
        for topic in info.topics:
            if topic.error_code:
                raise BrokerError(topic.error_code, about=f"topic {topic.name!r}")
        metadata = self._engine.client.metadata
        groups: dict[int | None, dict[TopicPartition, int]] = {}
        for key, value in wanted.items():
            count = metadata.partition_count(key.topic) or 0
            if key.partition >= count:
                raise BrokerError(3, f"it has {count} partitions", about=str(key))
            leader = metadata.leader(*key)
            groups.setdefault(leader[0] if leader else None, {})[key] = value
        return list(groups.items())

    def _pause(self, duration_ms: float) -> None:
        with self._engine.lock:
            self._engine.wait_for(lambda: False, now_ms() + duration_ms)


__all__ = ["Admin", "ClientOptions"]
