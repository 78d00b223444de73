"""Admin calls under trio and asyncio: one method, one answer or one error.

What is asked, of whom, and what is repeated, is decided by flows (`core/admin_flow.py`); this runs
them on the engine's connections. The methods are those of `raftmq_client.blocking.Admin`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar

from raftmq.errors import ErrorCode
from raftmq.rights import Rule, RuleFilter
from raftmq.types import TopicPartition
from raftmq_client.aio.engine import Engine
from raftmq_client.core import admin as operations
from raftmq_client.core import group_admin, group_requests, transaction_requests
from raftmq_client.core.admin import (
    SCRAM_ITERATIONS,
    ConfigEntry,
    CreatedTopic,
    FeaturesInfo,
    LogDirPartition,
    NewTopic,
    OffsetFound,
    Operation,
    QuorumInfo,
    Reassignment,
    ResourceType,
    UserCredential,
    ViewInfo,
)
from raftmq_client.core.admin_flow import AdminFlows, Flow
from raftmq_client.core.assignors import decode_assignment
from raftmq_client.core.build import build_client
from raftmq_client.core.group_admin import CommittedOffset, GroupDescription, GroupListing
from raftmq_client.core.metadata import Broker, ClusterInfo, TopicInfo
from raftmq_client.core.security import SecurityChoice
from raftmq_client.core.transaction_requests import (
    ProducerState,
    TransactionDescription,
    TransactionHandle,
    TransactionListing,
)
from raftmq_client.errors import BrokerError, ClientError
from raftmq_client.options import DEFAULT_BOOTSTRAP

T = TypeVar("T")


class Admin:
    """Administers a cluster: `async with Admin("localhost:9092") as admin: ...`."""

    def __init__(
        self,
        bootstrap: str | Sequence[str] = DEFAULT_BOOTSTRAP,
        *,
        client_id: str = "raftmq-admin",
        security: SecurityChoice = None,
        timeout_ms: float = 15_000,
    ) -> None:
        self._engine = Engine(build_client(bootstrap, client_id, security))
        self._flows = AdminFlows(self._engine.client, self._engine.now, timeout_ms)

    async def __aenter__(self) -> Self:
        await self._engine.start(in_block=True)
        return self

    async def start(self) -> Self:
        """Begin without a block; then `close` ends it, in any task. Not under trio."""
        await self._engine.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return await self._engine.stop(kind, error, trace)

    async def close(self) -> None:
        """Close the connections."""
        await self._engine.close()

    async def cluster(self, topics: Sequence[str] | None = None) -> ClusterInfo:
        """Brokers, controller, topics and where their partitions live."""
        return await self._run(self._flows.cluster(topics))

    async def brokers(self) -> tuple[Broker, ...]:
        """The live brokers, by id."""
        return await self._run(self._flows.brokers())

    async def topic(self, name: str) -> TopicInfo:
        """One topic.

        Raises:
            BrokerError: there is none of that name.
        """
        return await self._run(self._flows.topic(name))

    async def views(self, of: str | None = None) -> list[ViewInfo]:
        """All views with conditions, or those of one topic, by name: `create_topic` with the
        configs `raftmq.view.of` and `raftmq.view.where` makes one."""
        return await self._run(self._flows.views(of))

    async def topic_configs(self, keys: Sequence[str]) -> dict[str, dict[str, str | None]]:
        """These settings of all topics that are not internal, and that the caller may look at."""
        return await self._run(self._flows.topic_configs(keys))

    async def create_topic(
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
        return await self._run(self._flows.create_topic(topic, validate_only=validate_only))

    async def delete_topic(self, name: str) -> None:
        """Delete a topic and its records."""
        await self._run_one(operations.delete_topics([name], timeout_ms=self._flows.server_timeout))

    async def create_partitions(self, name: str, count: int) -> None:
        """Raise a topic's partitions to `count` in all."""
        await self._run_one(
            operations.create_partitions(name, count, timeout_ms=self._flows.server_timeout)
        )

    async def elect_leaders(
        self, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, ErrorCode]:
        """Hand partitions to their preferred leaders; what became of each."""
        operation = operations.elect_leaders(partitions, timeout_ms=self._flows.server_timeout)
        return await self._run_one(operation)

    async def alter_partition_reassignments(
        self,
        targets: Mapping[TopicPartition, Sequence[int] | None],
        *,
        allow_factor_change: bool = True,
    ) -> dict[TopicPartition, BrokerError | None]:
        """Move partitions onto these brokers, the first of which is to lead; None cancels a move.

        Gives the refusal of each, None for those whose move is planned: it runs on its own, and
        `list_partition_reassignments` tells whether it still does.
        """
        operation = operations.alter_partition_reassignments(
            targets,
            timeout_ms=self._flows.server_timeout,
            allow_factor_change=allow_factor_change,
        )
        return await self._run_one(operation)

    async def list_partition_reassignments(
        self, partitions: Sequence[TopicPartition] | None = None
    ) -> dict[TopicPartition, Reassignment]:
        """The moves that run or wait, of all partitions or of these."""
        operation = operations.list_partition_reassignments(
            partitions, timeout_ms=self._flows.server_timeout
        )
        return await self._run_one(operation)

    async def describe_configs(
        self,
        resource: ResourceType,
        name: str,
        *,
        documentation: bool = False,
        synonyms: bool = False,
    ) -> list[ConfigEntry]:
        """All settings of a topic or broker, by name."""
        return await self._run_one(
            operations.describe_configs(
                resource, name, documentation=documentation, synonyms=synonyms
            )
        )

    async def alter_configs(
        self,
        resource: ResourceType,
        name: str,
        changes: Mapping[str, str | None],
        *,
        validate_only: bool = False,
    ) -> None:
        """Set keys, or put them back to their default (None)."""
        await self._run_one(
            operations.alter_configs(resource, name, changes, validate_only=validate_only)
        )

    async def list_offsets(
        self, timestamps: Mapping[TopicPartition, int], *, isolation: int = 0
    ) -> dict[TopicPartition, OffsetFound]:
        """Offsets by timestamp (ms), or EARLIEST (-2), LATEST (-1), MAX_TIMESTAMP (-3)."""
        return await self._run(self._flows.list_offsets(timestamps, isolation=isolation))

    async def delete_records(
        self, offsets: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int]:
        """Delete records below the given offsets; gives the new log starts."""
        return await self._run(self._flows.delete_records(offsets))

    async def delete_records_each(
        self, offsets: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int | ClientError]:
        """Delete records below the given offsets; each partition's new log start, or its error.

        Raises:
            ClientError: nobody could be asked, or a topic or partition is unknown.
        """
        return await self._run(self._flows.delete_records_each(offsets))

    async def list_groups(self) -> list[GroupListing]:
        """All groups, by name; each broker tells of those that it coordinates."""
        return await self._run(self._flows.list_groups())

    async def describe_group(self, group: str) -> GroupDescription:
        """A group's state and members."""
        return await self._run_one(group_admin.describe_group(group, decode_assignment))

    async def group_offsets(
        self, group: str, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, CommittedOffset]:
        """A group's committed offsets."""
        return await self._run_one(group_admin.fetch_offsets(group, partitions))

    async def alter_group_offsets(
        self, group: str, offsets: Mapping[TopicPartition, CommittedOffset]
    ) -> None:
        """Set a group's committed offsets.

        Raises:
            BrokerError: UNKNOWN_MEMBER_ID while the group has members.
        """
        await self._run_one(group_requests.alter_offsets(group, offsets))

    async def delete_group(self, group: str) -> None:
        """Forget an empty group."""
        await self._run_one(group_admin.delete_groups(group))

    async def coordinator(self, group: str) -> int:
        """The node that coordinates a group."""
        return await self._run(self._flows.coordinator(group))

    async def transaction_coordinator(self, transactional_id: str) -> int:
        """The node that coordinates the transactions of an id."""
        return await self._run(self._flows.coordinator(transactional_id, group_admin.TRANSACTIONS))

    async def end_transaction(self, handle: TransactionHandle, *, commit: bool) -> None:
        """Commit or abort a transaction that a producer detached; again, it does no more.

        Raises:
            EndUnknownError: nobody answered in time: call it again.
            FencedError: it took too long, or its transactional id has been used since.
            TransactionError: it is not open, or has ended the other way.
        """
        await self._run(self._flows.end_transaction(handle, commit=commit))

    async def list_transactions(
        self,
        *,
        states: Sequence[str] = (),
        producer_ids: Sequence[int] = (),
        running_for_ms: int = -1,
        pattern: str | None = None,
    ) -> list[TransactionListing]:
        """Transactional ids, by name; empty filters, and below 0, let all through.

        `running_for_ms`: only those whose transaction has run for longer. `pattern`: a regular
        expression (RE2) of whole ids.
        """
        return await self._run(
            self._flows.list_transactions(
                states=states,
                producer_ids=producer_ids,
                running_for_ms=running_for_ms,
                pattern=pattern,
            )
        )

    async def describe_listed(
        self, listed: Sequence[TransactionListing]
    ) -> dict[str, TransactionDescription]:
        """What listed transactional ids are about; those that are gone meanwhile are left out."""
        return await self._run(self._flows.describe_listed(listed))

    async def describe_transaction(self, transactional_id: str) -> TransactionDescription:
        """One transactional id and its running transaction.

        Raises:
            BrokerError: TRANSACTIONAL_ID_NOT_FOUND.
        """
        return await self._run_one(transaction_requests.describe_transaction(transactional_id))

    async def describe_producers(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, list[ProducerState]]:
        """Idempotent and transactional producers that the partitions' logs know."""
        return await self._run(self._flows.describe_producers(partitions))

    async def fence_producer(
        self, transactional_id: str, timeout_ms: int = 60_000
    ) -> tuple[int, int]:
        """Abort what runs under a transactional id and shut its producer out; the new (producer id,
        epoch). An id that is not known is begun: look before."""
        return await self._run_one(
            transaction_requests.fence_producer(transactional_id, timeout_ms)
        )

    async def abort_orphan(self, partition: TopicPartition, producer: ProducerState) -> None:
        """End a transaction in a partition's log that no coordinator knows of.

        Raises:
            BrokerError: INVALID_TXN_STATE, it is known.
        """
        await self._run(self._flows.abort_orphan(partition, producer))

    async def create_acls(self, rules: Sequence[Rule]) -> None:
        """Let rules of who may do what be in force, all of them or none; those that are stay."""
        await self._run_one(operations.create_acls(rules))

    async def describe_acls(self, wanted: RuleFilter = RuleFilter()) -> list[Rule]:
        """The rules that a filter means; all of them by default."""
        return await self._run_one(operations.describe_acls(wanted))

    async def delete_acls(self, wanted: RuleFilter) -> list[Rule]:
        """Let the rules that a filter means be in force no more; which they were."""
        return await self._run_one(operations.delete_acls(wanted))

    async def log_dirs(self) -> list[LogDirPartition]:
        """Bytes of every replica on every live broker."""
        return await self._run(self._flows.log_dirs())

    async def features(self, node: int | None = None) -> FeaturesInfo:
        """Levels of features, and which ones a node supports (any, or that one)."""
        return await self._run(self._flows.features(node))

    async def update_features(
        self, levels: Mapping[str, int], *, lower: bool = False, validate_only: bool = False
    ) -> None:
        """Set levels of features, all of them or none; `lower` where they are to fall."""
        await self._run_one(
            operations.update_features(
                levels,
                timeout_ms=self._flows.server_timeout,
                lower=lower,
                validate_only=validate_only,
            )
        )

    async def users(
        self, names: Sequence[str] | None = None
    ) -> dict[str, tuple[UserCredential, ...]]:
        """These users, or all, with how each can authenticate; unknown ones are left out."""
        return await self._run_one(operations.describe_users(names))

    async def set_password(
        self,
        user: str,
        password: str,
        *,
        mechanism: str = "SCRAM-SHA-512",
        iterations: int = SCRAM_ITERATIONS,
    ) -> None:
        """Let a user, a new one or one that is there, authenticate with that password."""
        operation = operations.set_password(
            user, password, mechanism=mechanism, iterations=iterations
        )
        await self._run_one(operation)

    async def delete_credential(self, user: str, mechanism: str = "SCRAM-SHA-512") -> None:
        """Let a user authenticate by a mechanism no more; after the last one there is none."""
        await self._run_one(operations.delete_credential(user, mechanism))

    async def quorum(self) -> QuorumInfo:
        """The metadata group."""
        return await self._run(self._flows.quorum())

    async def _run_one(self, operation: Operation[T]) -> T:
        return await self._engine.run(self._flows.run(operation))

    async def _run(self, flow: Flow[T]) -> T:
        return await self._engine.run(flow)
