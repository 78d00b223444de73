"""Admin requests as values: what to ask, whom, and how to read the answer. No I/O.

An `Operation` is one request with its reader; drivers route, send and repeat it. `is_repeatable`
says that sending it twice does no more than once, so that a lost connection need not end in an
unknown outcome.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, IntEnum, StrEnum
from typing import Any, Final, Generic, TypeVar
from uuid import UUID

from attrs import field, frozen

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey, Struct
from raftmq.rights import (
    CODE_ANY,
    CODE_MATCH,
    KIND_CODES,
    OPERATION_CODES,
    PATTERN_CODES,
    PERMISSION_CODES,
    Rule,
    RuleFilter,
)
from raftmq.types import TopicPartition
from raftmq_client.core.connection import SOFTWARE
from raftmq_client.core.metadata import ClusterInfo, metadata_request, read_metadata
from raftmq_client.core.security import check_credentials
from raftmq_client.errors import BrokerError, CorruptAnswerError, UsageError, check_code

T = TypeVar("T")
W = TypeVar("W", bound=StrEnum)

EARLIEST: Final = -2
VIEW_OF: Final = "raftmq.view.of"
VIEW_WHERE: Final = "raftmq.view.where"
LATEST: Final = -1
MAX_TIMESTAMP: Final = -3
READ_UNCOMMITTED: Final = 0
_UPGRADE, _SAFE_DOWNGRADE = 1, 2
READ_COMMITTED: Final = 1
LIST_OFFSETS_VERSION_MAX: Final = 7


class Route(Enum):
    """Which broker may answer."""

    ANY = "any"
    NODE = "node"
    COORDINATOR = "coordinator"
    TRANSACTIONS = "coordinator of transactions"


@frozen
class Operation(Generic[T]):
    """One admin request."""

    api: int
    request: Callable[[int], Struct]
    read: Callable[[Struct], T]
    route: Route = Route.ANY
    target: str | int = ""
    """The node of a NODE route, the group or transactional id of one to its coordinator."""
    min_version: int = 0
    max_version: int = 32767
    is_repeatable: bool = True


class ResourceType(IntEnum):
    """Kinds of things that have configs."""

    TOPIC = 2
    BROKER = 4
    GROUP = 32


class AlterOperation(IntEnum):
    """What IncrementalAlterConfigs does to a key (KIP-339)."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


CONFIG_SOURCES: Final = {
    0: "UNKNOWN",
    1: "DYNAMIC_TOPIC_CONFIG",
    2: "DYNAMIC_BROKER_CONFIG",
    3: "DYNAMIC_DEFAULT_BROKER_CONFIG",
    4: "STATIC_BROKER_CONFIG",
    5: "DEFAULT_CONFIG",
    6: "DYNAMIC_BROKER_LOGGER_CONFIG",
    7: "CLIENT_METRICS_CONFIG",
    8: "GROUP_CONFIG",
}


@frozen
class NewTopic:
    """A topic to create; -1 takes the cluster's default (KIP-464)."""

    name: str
    partitions: int = -1
    replication_factor: int = -1
    configs: Mapping[str, str] = field(factory=dict)
    assignments: Mapping[int, Sequence[int]] = field(factory=dict)


@frozen
class CreatedTopic:
    """What came of it."""

    name: str
    topic_id: UUID | None
    partitions: int
    replication_factor: int


@frozen
class ViewInfo:
    """A view with a condition: what it shows of which topic."""

    name: str
    topic: str
    condition: str


@frozen
class ConfigSynonym:
    """A value with where it is set; it holds where those before it are unset."""

    name: str
    value: str | None
    source: str


@frozen
class ConfigEntry:
    """One setting with where it comes from."""

    name: str
    value: str | None
    source: str
    is_read_only: bool
    is_sensitive: bool
    documentation: str | None = None
    synonyms: tuple[ConfigSynonym, ...] = ()
    """The value in force and those that it hides, where they were asked for."""

    @property
    def default(self) -> str | None:
        """What holds where nobody sets it; None without one, or where synonyms were not asked."""
        return next((s.value for s in self.synonyms if s.source == "DEFAULT_CONFIG"), None)


@frozen
class OffsetFound:
    """An answer of ListOffsets."""

    offset: int
    timestamp: int
    leader_epoch: int


@frozen
class LogDirPartition:
    """Bytes of one replica on one broker."""

    broker: int
    path: str
    topic: str
    partition: int
    size_bytes: int
    offset_lag: int


@frozen
class Reassignment:
    """A move of a partition: all replicas meanwhile, those that come and those that go."""

    replicas: tuple[int, ...]
    adding: tuple[int, ...]
    removing: tuple[int, ...]


@frozen
class QuorumReplica:
    """One voter or observer of the metadata group."""

    node_id: int
    log_end_offset: int
    last_caught_up_timestamp: int


@frozen
class QuorumInfo:
    """State of the metadata group."""

    leader: int
    leader_epoch: int
    high_watermark: int
    voters: tuple[QuorumReplica, ...]
    observers: tuple[QuorumReplica, ...]


@frozen
class FeatureLevel:
    """One feature: what the asked broker supports, and the level that the cluster has; 0: none."""

    name: str
    min_supported: int
    max_supported: int
    level: int


@frozen
class FeaturesInfo:
    """Features of a cluster, as one broker knows them; `epoch` is -1 where none has a level."""

    epoch: int
    features: tuple[FeatureLevel, ...]


@frozen
class UserCredential:
    """That a user can authenticate by a mechanism."""

    mechanism: str
    iterations: int


SCRAM_MECHANISMS: Final = {"SCRAM-SHA-256": 1, "SCRAM-SHA-512": 2}
_DIGESTS: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
SCRAM_ITERATIONS: Final = 4_096
_MECHANISM_NAMES: Final = {number: name for name, number in SCRAM_MECHANISMS.items()}
_SALT_BITS: Final = 130
_SALT_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"


def check_named(wanted: Iterable[object], found: Iterable[object]) -> None:
    """Whether an answer tells of everything that was asked.

    Raises:
        CorruptAnswerError: it leaves something out, whose outcome is therefore unknown.
    """
    missing = set(wanted).difference(found)
    if missing:
        raise CorruptAnswerError(f"an answer without {', '.join(sorted(map(str, missing)))}")


def cluster_operation(topics: Sequence[str] | None) -> Operation[ClusterInfo]:
    """Brokers, controller and topics; all topics for None, none for an empty sequence."""
    return Operation(
        ApiKey.METADATA, metadata_request(topics, create=False), read_metadata, min_version=4
    )


def describe_cluster() -> Operation[tuple[str, int]]:
    """(cluster id, controller)."""

    def read(response: Struct) -> tuple[str, int]:
        check_code(response.error_code, response.error_message, about="describe cluster")
        return response.cluster_id, response.controller_id

    request = Struct(include_cluster_authorized_operations=False, endpoint_type=1)
    return Operation(ApiKey.DESCRIBE_CLUSTER, lambda _: request, read)


def create_topics(
    topics: Sequence[NewTopic], *, timeout_ms: int, validate_only: bool
) -> Operation[list[CreatedTopic]]:
    """Create topics; the first refusal is raised."""

    def request(_version: int) -> Struct:
        return Struct(
            topics=[_new_topic(topic) for topic in topics],
            timeout=timeout_ms,
            validate_only=validate_only,
        )

    def read(response: Struct) -> list[CreatedTopic]:
        created = []
        for item in response.topics:
            check_code(item.error_code, item.error_message, about=f"topic {item.name!r}")
            created.append(
                CreatedTopic(item.name, item.topic_id, item.num_partitions, item.replication_factor)
            )
        check_named((topic.name for topic in topics), (topic.name for topic in created))
        return created

    return Operation(ApiKey.CREATE_TOPICS, request, read, is_repeatable=validate_only)


def _new_topic(topic: NewTopic) -> Struct:
    assignments = [
        Struct(partition_index=index, broker_ids=list(brokers))
        for index, brokers in sorted(topic.assignments.items())
    ]
    return Struct(
        name=topic.name,
        num_partitions=-1 if assignments else topic.partitions,
        replication_factor=-1 if assignments else topic.replication_factor,
        assignments=assignments,
        configs=[Struct(name=name, value=value) for name, value in topic.configs.items()],
    )


def delete_topics(names: Sequence[str], *, timeout_ms: int) -> Operation[None]:
    """Delete topics by name; the first refusal is raised."""

    def request(version: int) -> Struct:
        if version >= 6:
            return Struct(topics=[Struct(name=name) for name in names], timeout=timeout_ms)
        return Struct(topic_names=list(names), timeout=timeout_ms)

    def read(response: Struct) -> None:
        for item in response.responses:
            message = item.error_message
            check_code(item.error_code, message, about=f"topic {item.name!r}")
        check_named(names, (item.name for item in response.responses))

    return Operation(ApiKey.DELETE_TOPICS, request, read, is_repeatable=False)


def create_partitions(name: str, count: int, *, timeout_ms: int) -> Operation[None]:
    """Raise a topic's number of partitions to `count`."""

    def read(response: Struct) -> None:
        for item in response.results:
            check_code(item.error_code, item.error_message, about=f"topic {item.name!r}")
        check_named([name], (item.name for item in response.results))

    request = Struct(
        topics=[Struct(name=name, count=count, assignments=None)],
        timeout=timeout_ms,
        validate_only=False,
    )
    return Operation(ApiKey.CREATE_PARTITIONS, lambda _: request, read, is_repeatable=False)


def elect_leaders(
    partitions: Sequence[TopicPartition], *, timeout_ms: int
) -> Operation[dict[TopicPartition, ErrorCode]]:
    """Hand partitions to their preferred leaders; what became of each."""

    def read(response: Struct) -> dict[TopicPartition, ErrorCode]:
        check_code(response.error_code, about="electing leaders")
        return {
            TopicPartition(topic.topic, row.partition_id): ErrorCode(row.error_code)
            for topic in response.replica_election_results
            for row in topic.partition_result
        }

    def request(_version: int) -> Struct:
        topics: dict[str, list[int]] = {}
        for name in partitions:
            topics.setdefault(name.topic, []).append(name.partition)
        return Struct(
            election_type=0,
            topic_partitions=[
                Struct(topic=topic, partitions=indexes) for topic, indexes in topics.items()
            ],
            timeout=timeout_ms,
        )

    return Operation(ApiKey.ELECT_LEADERS, request, read, min_version=1)


def alter_partition_reassignments(
    targets: Mapping[TopicPartition, Sequence[int] | None],
    *,
    timeout_ms: int,
    allow_factor_change: bool = True,
) -> Operation[dict[TopicPartition, BrokerError | None]]:
    """Move partitions onto these brokers, or (None) cancel their moves; the refusal of each."""

    def read(response: Struct) -> dict[TopicPartition, BrokerError | None]:
        check_code(response.error_code, response.error_message, about="reassigning partitions")
        found: dict[TopicPartition, BrokerError | None] = {}
        for topic in response.responses:
            for row in topic.partitions:
                key = TopicPartition(topic.name, row.partition_index)
                code, message = row.error_code, row.error_message
                found[key] = BrokerError(code, message, about=str(key)) if code else None
        check_named(targets, found)
        return found

    def replicas(target: Sequence[int] | None) -> list[int] | None:
        return None if target is None else list(target)

    request = Struct(
        timeout=timeout_ms,
        allow_replication_factor_change=allow_factor_change,
        topics=[
            Struct(
                name=topic,
                partitions=[
                    Struct(partition_index=key.partition, replicas=replicas(targets[key]))
                    for key in keys
                ],
            )
            for topic, keys in by_topic(targets)
        ],
    )
    return Operation(
        ApiKey.ALTER_PARTITION_REASSIGNMENTS,
        lambda _: request,
        read,
        # Version 0 cannot say that the factor should stay.
        min_version=0 if allow_factor_change else 1,
        # A move that is cancelled twice was not there the second time.
        is_repeatable=None not in targets.values(),
    )


def list_partition_reassignments(
    partitions: Iterable[TopicPartition] | None, *, timeout_ms: int
) -> Operation[dict[TopicPartition, Reassignment]]:
    """The moves that run or wait; of these partitions only, unless None."""

    def read(response: Struct) -> dict[TopicPartition, Reassignment]:
        check_code(response.error_code, response.error_message, about="reassignments")
        return {
            TopicPartition(topic.name, row.partition_index): Reassignment(
                tuple(row.replicas), tuple(row.adding_replicas), tuple(row.removing_replicas)
            )
            for topic in response.topics
            for row in topic.partitions
        }

    named = None
    if partitions is not None:
        named = [
            Struct(name=topic, partition_indexes=[key.partition for key in keys])
            for topic, keys in by_topic(partitions)
        ]
    request = Struct(timeout=timeout_ms, topics=named)
    return Operation(ApiKey.LIST_PARTITION_REASSIGNMENTS, lambda _: request, read)


def describe_configs(
    resource: ResourceType, name: str, *, documentation: bool = False, synonyms: bool = False
) -> Operation[list[ConfigEntry]]:
    """All settings of a topic or broker."""

    def read(response: Struct) -> list[ConfigEntry]:
        entries: list[ConfigEntry] = []
        for result in response.results:
            about = f"{resource.name.lower()} {name!r}"
            check_code(result.error_code, result.error_message, about=about)
            entries.extend(
                ConfigEntry(
                    item.name,
                    item.value,
                    CONFIG_SOURCES.get(item.config_source, "UNKNOWN"),
                    bool(item.read_only),
                    bool(item.is_sensitive),
                    item.documentation,
                    tuple(
                        ConfigSynonym(s.name, s.value, CONFIG_SOURCES.get(s.source, "UNKNOWN"))
                        for s in item.synonyms or ()
                    ),
                )
                for item in result.configs
            )
        check_named([name], (result.resource_name for result in response.results))
        return sorted(entries, key=lambda entry: entry.name)

    request = Struct(
        resources=[
            Struct(resource_type=int(resource), resource_name=name, configuration_keys=None)
        ],
        include_synonyms=synonyms,
        include_documentation=documentation,
    )
    is_broker = resource is ResourceType.BROKER and name != ""
    return Operation(
        ApiKey.DESCRIBE_CONFIGS,
        lambda _: request,
        read,
        route=Route.NODE if is_broker else Route.ANY,
        target=int(name) if is_broker else "",
    )


def describe_topics(
    names: Sequence[str], keys: Sequence[str]
) -> Operation[dict[str, dict[str, str | None]]]:
    """These settings of these topics, without those that the caller may not look at."""
    unseen = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.TOPIC_AUTHORIZATION_FAILED)

    def read(response: Struct) -> dict[str, dict[str, str | None]]:
        found = {}
        for result in response.results:
            if result.error_code in unseen:
                continue
            about = f"topic {result.resource_name!r}"
            check_code(result.error_code, result.error_message, about=about)
            configs = {item.name: item.value for item in result.configs}
            found[str(result.resource_name)] = configs
        check_named(names, (result.resource_name for result in response.results))
        return dict(sorted(found.items()))

    request = Struct(
        resources=[
            Struct(
                resource_type=int(ResourceType.TOPIC),
                resource_name=name,
                configuration_keys=list(keys),
            )
            for name in names
        ],
        include_synonyms=False,
        include_documentation=False,
    )
    return Operation(ApiKey.DESCRIBE_CONFIGS, lambda _: request, read)


def alter_configs(
    resource: ResourceType,
    name: str,
    changes: Mapping[str, str | None],
    *,
    validate_only: bool = False,
) -> Operation[None]:
    """Set keys, or put them back to their default (None)."""

    def read(response: Struct) -> None:
        for item in response.responses:
            about = f"{resource.name.lower()} {item.resource_name!r}"
            check_code(item.error_code, item.error_message, about=about)
        check_named([name], (item.resource_name for item in response.responses))

    configs = [
        Struct(
            name=key,
            config_operation=int(AlterOperation.DELETE if value is None else AlterOperation.SET),
            value=value,
        )
        for key, value in changes.items()
    ]
    request = Struct(
        resources=[
            Struct(resource_type=int(resource), resource_name=name, configs=configs),
        ],
        validate_only=validate_only,
    )
    return Operation(ApiKey.INCREMENTAL_ALTER_CONFIGS, lambda _: request, read)


def delete_records(
    node: int, offsets: Mapping[TopicPartition, int], *, timeout_ms: int
) -> Operation[dict[TopicPartition, int | BrokerError]]:
    """Move log starts up on the partitions' leader; the new low watermark or refusal of each."""

    def read(response: Struct) -> dict[TopicPartition, int | BrokerError]:
        found: dict[TopicPartition, int | BrokerError] = {}
        for topic in response.topics:
            for item in topic.partitions:
                key = TopicPartition(topic.name, item.partition_index)
                code = item.error_code
                found[key] = BrokerError(code, about=str(key)) if code else item.low_watermark
        check_named(offsets, found)
        return found

    request = Struct(
        topics=[
            Struct(
                name=topic,
                partitions=[
                    Struct(partition_index=key.partition, offset=offsets[key]) for key in keys
                ],
            )
            for topic, keys in by_topic(offsets)
        ],
        timeout=timeout_ms,
    )
    return Operation(ApiKey.DELETE_RECORDS, lambda _: request, read, Route.NODE, node)


def list_offsets(
    node: int,
    timestamps: Mapping[TopicPartition, int],
    *,
    isolation: int = READ_UNCOMMITTED,
) -> Operation[dict[TopicPartition, OffsetFound]]:
    """Offsets by timestamp, or EARLIEST, LATEST, MAX_TIMESTAMP, from the partitions' leader."""

    def read(response: Struct) -> dict[TopicPartition, OffsetFound]:
        found = {}
        for key, offset in read_offsets(response).items():
            if isinstance(offset, BrokerError):
                raise offset
            found[key] = offset
        check_named(timestamps, found)
        return found

    # MAX_TIMESTAMP needs v7 (KIP-734); older brokers would look up a time before the epoch.
    needs = 7 if MAX_TIMESTAMP in timestamps.values() else 1
    request = offsets_request(timestamps, isolation)
    return Operation(
        ApiKey.LIST_OFFSETS,
        lambda _: request,
        read,
        Route.NODE,
        node,
        min_version=needs,
        max_version=LIST_OFFSETS_VERSION_MAX,
    )


def read_offsets(response: Struct) -> dict[TopicPartition, OffsetFound | BrokerError]:
    """What an answer to ListOffsets says of each partition."""
    found: dict[TopicPartition, OffsetFound | BrokerError] = {}
    for topic in response.topics:
        for item in topic.partitions:
            key = TopicPartition(topic.name, item.partition_index)
            if item.error_code:
                found[key] = BrokerError(item.error_code, about=str(key))
            else:
                found[key] = OffsetFound(item.offset, item.timestamp, item.leader_epoch)
    return found


def offsets_request(
    timestamps: Mapping[TopicPartition, int],
    isolation: int,
    epochs: Mapping[TopicPartition, int] | None = None,
) -> Struct:
    """A ListOffsets request for one leader's partitions."""
    known = epochs or {}
    return Struct(
        replica_id=-1,
        isolation_level=isolation,
        topics=[
            Struct(
                name=topic,
                partitions=[
                    Struct(
                        partition_index=key.partition,
                        current_leader_epoch=known.get(key, -1),
                        timestamp=timestamps[key],
                    )
                    for key in keys
                ],
            )
            for topic, keys in by_topic(timestamps)
        ],
    )


def describe_log_dirs(node: int) -> Operation[list[LogDirPartition]]:
    """Sizes of the replicas on one broker."""

    def read(response: Struct) -> list[LogDirPartition]:
        check_code(getattr(response, "error_code", 0), about=f"log dirs of broker {node}")
        found: list[LogDirPartition] = []
        for folder in response.results:
            check_code(folder.error_code, about=folder.log_dir)
            for topic in folder.topics:
                found.extend(
                    LogDirPartition(
                        node,
                        folder.log_dir,
                        topic.name,
                        item.partition_index,
                        item.partition_size,
                        item.offset_lag,
                    )
                    for item in topic.partitions
                )
        return found

    request = Struct(topics=None)
    return Operation(ApiKey.DESCRIBE_LOG_DIRS, lambda _: request, read, Route.NODE, node)


def describe_quorum(node: int | None = None) -> Operation[QuorumInfo]:
    """The metadata group: leader, voters, observers. Only its leader knows how far others are."""

    def replicas(items: Iterable[Any] | None) -> tuple[QuorumReplica, ...]:
        return tuple(
            QuorumReplica(
                item.replica_id,
                item.log_end_offset,
                getattr(item, "last_caught_up_timestamp", -1),
            )
            for item in items or ()
        )

    def read(response: Struct) -> QuorumInfo:
        check_code(response.error_code, about="quorum")
        item = response.topics[0].partitions[0]
        check_code(item.error_code, about="quorum")
        return QuorumInfo(
            item.leader_id,
            item.leader_epoch,
            item.high_watermark,
            replicas(item.current_voters),
            replicas(item.observers),
        )

    request = Struct(
        topics=[Struct(topic_name="__cluster_metadata", partitions=[Struct(partition_index=0)])]
    )
    route, target = (Route.ANY, "") if node is None else (Route.NODE, node)
    return Operation(ApiKey.DESCRIBE_QUORUM, lambda _: request, read, route, target)


def describe_features(node: int | None = None) -> Operation[FeaturesInfo]:
    """Levels of features (KIP-584), and what one broker supports; every broker tells them."""

    def read(response: Struct) -> FeaturesInfo:
        check_code(response.error_code, about="features")
        levels = {item.name: item.max_version_level for item in response.finalized_features}
        spans = {
            item.name: (item.min_version, item.max_version) for item in response.supported_features
        }
        return FeaturesInfo(
            response.finalized_features_epoch,
            tuple(
                FeatureLevel(name, *spans.get(name, (0, 0)), levels.get(name, 0))
                for name in sorted({*levels, *spans})
            ),
        )

    route, target = (Route.ANY, "") if node is None else (Route.NODE, node)
    return Operation(ApiKey.API_VERSIONS, lambda _: SOFTWARE, read, route, target, min_version=3)


def update_features(
    levels: Mapping[str, int], *, timeout_ms: int, lower: bool = False, validate_only: bool = False
) -> Operation[None]:
    """Set levels of features, all or none; `lower` where they fall."""

    def read(response: Struct) -> None:
        check_code(response.error_code, response.error_message, about="features")
        for row in getattr(response, "results", ()):
            check_code(row.error_code, row.error_message, about=row.feature)

    request = Struct(
        timeout=timeout_ms,
        feature_updates=[
            Struct(
                feature=name,
                max_version_level=level,
                upgrade_type=_SAFE_DOWNGRADE if lower else _UPGRADE,
            )
            for name, level in levels.items()
        ],
        validate_only=validate_only,
    )
    return Operation(ApiKey.UPDATE_FEATURES, lambda _: request, read, min_version=1)


def by_topic(
    keys: Iterable[TopicPartition],
) -> list[tuple[str, list[TopicPartition]]]:
    """Group partitions by topic, both sorted."""
    topics: dict[str, list[TopicPartition]] = {}
    for key in sorted(keys):
        topics.setdefault(key.topic, []).append(key)
    return list(topics.items())


# ---- rules of who may do what ----


def create_acls(rules: Sequence[Rule]) -> Operation[None]:
    """Let rules be in force; those that are already stay."""

    def read(response: Struct) -> None:
        for result in response.results:
            check_code(result.error_code, result.error_message, about="rules")
        if len(response.results) != len(rules):
            raise CorruptAnswerError(f"{len(response.results)} results of {len(rules)} rules")

    creations = [
        Struct(
            resource_type=KIND_CODES[rule.kind],
            resource_name=rule.name,
            resource_pattern_type=PATTERN_CODES[rule.pattern],
            principal=rule.principal,
            host=rule.host,
            operation=OPERATION_CODES[rule.operation],
            permission_type=PERMISSION_CODES[rule.permission],
        )
        for rule in rules
    ]
    return Operation(ApiKey.CREATE_ACLS, lambda _: Struct(creations=creations), read)


def describe_acls(wanted: RuleFilter) -> Operation[list[Rule]]:
    """The rules that a filter means."""

    def read(response: Struct) -> list[Rule]:
        check_code(response.error_code, response.error_message, about="rules")
        return sorted(
            _acl_rule(resource, entry) for resource in response.resources for entry in resource.acls
        )

    request = _acl_filter(wanted)
    return Operation(ApiKey.DESCRIBE_ACLS, lambda _: request, read)


def delete_acls(wanted: RuleFilter) -> Operation[list[Rule]]:
    """Let the rules that a filter means be in force no more; which they were."""

    def read(response: Struct) -> list[Rule]:
        gone: list[Rule] = []
        for result in response.filter_results:
            check_code(result.error_code, result.error_message, about="rules")
            for one in result.matching_acls:
                check_code(one.error_code, one.error_message, about="rules")
                gone.append(_acl_rule(one, one))
        return sorted(gone)

    request = Struct(filters=[_acl_filter(wanted)])
    # Sent twice, the second answer would name no rules.
    return Operation(ApiKey.DELETE_ACLS, lambda _: request, read, is_repeatable=False)


def _acl_filter(wanted: RuleFilter) -> Struct:
    pattern = _acl_code(PATTERN_CODES, wanted.pattern)
    return Struct(
        resource_type_filter=_acl_code(KIND_CODES, wanted.kind),
        resource_name_filter=wanted.name,
        pattern_type_filter=CODE_MATCH if wanted.is_match else pattern,
        principal_filter=wanted.principal,
        host_filter=wanted.host,
        operation=_acl_code(OPERATION_CODES, wanted.operation),
        permission_type=_acl_code(PERMISSION_CODES, wanted.permission),
    )


def _acl_code(codes: dict[W, int], word: W | None) -> int:
    return CODE_ANY if word is None else codes[word]


def _acl_word(codes: dict[W, int], code: int) -> W:
    for word, number in codes.items():
        if number == code:
            return word
    raise CorruptAnswerError(f"a rule with the number {code}, which is not known")


def _acl_rule(resource: Any, entry: Any) -> Rule:
    return Rule(
        _acl_word(KIND_CODES, resource.resource_type),
        _acl_word(PATTERN_CODES, resource.pattern_type),
        resource.resource_name,
        entry.principal,
        entry.host,
        _acl_word(OPERATION_CODES, entry.operation),
        _acl_word(PERMISSION_CODES, entry.permission_type),
    )


# ---- users: SCRAM (KIP-554); what is sent of a password is the salted one ----


def make_salt() -> bytes:
    """A salt in the form that Kafka's tools give it, so that users of all tools look alike."""
    number, text = secrets.randbits(_SALT_BITS), ""
    while number:
        number, digit = divmod(number, len(_SALT_DIGITS))
        text = _SALT_DIGITS[digit] + text
    return (text or "0").encode()


def describe_users(
    names: Sequence[str] | None = None,
) -> Operation[dict[str, tuple[UserCredential, ...]]]:
    """The credentials of these users, or of all; those without any are left out."""

    def read(response: Struct) -> dict[str, tuple[UserCredential, ...]]:
        check_code(response.error_code, response.error_message, about="users")
        found = {}
        for row in response.results:
            if row.error_code == ErrorCode.RESOURCE_NOT_FOUND:
                continue
            check_code(row.error_code, row.error_message, about=f"user {row.user!r}")
            found[row.user] = tuple(
                UserCredential(
                    _MECHANISM_NAMES.get(info.mechanism, f"mechanism {info.mechanism}"),
                    info.iterations,
                )
                for info in row.credential_infos
            )
        return found

    request = Struct(users=None if names is None else [Struct(name=name) for name in names])
    return Operation(ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS, lambda _: request, read)


def set_password(
    user: str,
    password: str,
    *,
    mechanism: str,
    iterations: int,
    salt: Callable[[], bytes] = make_salt,
) -> Operation[None]:
    """Let a user authenticate with that password; takes milliseconds."""
    _check_mechanism(mechanism)
    check_credentials(user, password)
    if not password:
        raise UsageError("a password must not be empty")
    salted_with = salt()
    salted = hashlib.pbkdf2_hmac(_DIGESTS[mechanism], password.encode(), salted_with, iterations)
    upsertion = Struct(
        name=user,
        mechanism=SCRAM_MECHANISMS[mechanism],
        iterations=iterations,
        salt=salted_with,
        salted_password=salted,
    )
    return _alter(user, Struct(deletions=[], upsertions=[upsertion]))


def delete_credential(user: str, mechanism: str) -> Operation[None]:
    """Let a user authenticate by a mechanism no more."""
    _check_mechanism(mechanism)
    deletion = Struct(name=user, mechanism=SCRAM_MECHANISMS[mechanism])
    return _alter(user, Struct(deletions=[deletion], upsertions=[]))


def _check_mechanism(mechanism: str) -> None:
    if mechanism not in SCRAM_MECHANISMS:
        raise UsageError(f"mechanism is one of {', '.join(SCRAM_MECHANISMS)}, not {mechanism!r}")


def _alter(user: str, request: Struct) -> Operation[None]:
    def read(response: Struct) -> None:
        check_named([user], [row.user for row in response.results])
        for row in response.results:
            check_code(row.error_code, row.error_message, about=f"user {row.user!r}")

    return Operation(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, lambda _: request, read)
