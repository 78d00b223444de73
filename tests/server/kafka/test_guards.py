"""Every API, asked by whoever may do nothing, and by whoever may do just what it needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

import pytest

from raftmq.errors import ErrorCode
from raftmq.protocol import ANNOUNCED, ApiKey
from raftmq.records import NewRecord, build_batch
from raftmq.rights import (
    CLUSTER_NAME,
    NO_RULES,
    Kind,
    Operation,
    Pattern,
    Permission,
    Rule,
)
from raftmq.server.kafka.authentication import Caller
from raftmq.server.kafka.guards import GUARDS, NEEDS
from raftmq.types import METADATA_TOPIC, NodeId
from tests.groups.world import Nodes
from tests.server.kafka.world import FakeSlot, World

HERE, GONE = "here", "gone"
USER = "User:alice"
MAY_NOT = {
    ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    ErrorCode.GROUP_AUTHORIZATION_FAILED,
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
    ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
DOCUMENTED = """
PRODUCE Write TransactionalId, IdempotentWrite Cluster, Write Topic
FETCH ClusterAction Cluster, Read Topic
LIST_OFFSETS Describe Topic
METADATA Describe Topic, Create Cluster, Create Topic
OFFSET_COMMIT Read Group, Read Topic
OFFSET_FETCH Describe Group, Describe Topic
FIND_COORDINATOR Describe Group, Describe TransactionalId
JOIN_GROUP Read Group
HEARTBEAT Read Group
LEAVE_GROUP Read Group
SYNC_GROUP Read Group
DESCRIBE_GROUPS Describe Group
LIST_GROUPS Describe Cluster, Describe Group
SASL_HANDSHAKE
API_VERSIONS
CREATE_TOPICS Create Cluster, Create Topic
DELETE_TOPICS Delete Topic
DELETE_RECORDS Delete Topic
INIT_PRODUCER_ID Write TransactionalId, IdempotentWrite Cluster
OFFSET_FOR_LEADER_EPOCH ClusterAction Cluster, Describe Topic
ADD_PARTITIONS_TO_TXN Write TransactionalId, Write Topic
ADD_OFFSETS_TO_TXN Write TransactionalId, Read Group
END_TXN Write TransactionalId
WRITE_TXN_MARKERS Alter Cluster, ClusterAction Cluster
TXN_OFFSET_COMMIT Write TransactionalId, Read Group, Read Topic
DESCRIBE_ACLS Describe Cluster
CREATE_ACLS Alter Cluster
DELETE_ACLS Alter Cluster
DESCRIBE_CONFIGS DescribeConfigs Cluster, DescribeConfigs Topic
ALTER_CONFIGS AlterConfigs Cluster, AlterConfigs Topic
DESCRIBE_LOG_DIRS Describe Cluster
SASL_AUTHENTICATE
CREATE_PARTITIONS Alter Topic
DELETE_GROUPS Delete Group
ELECT_LEADERS Alter Cluster
INCREMENTAL_ALTER_CONFIGS AlterConfigs Cluster, AlterConfigs Topic
ALTER_PARTITION_REASSIGNMENTS Alter Cluster
LIST_PARTITION_REASSIGNMENTS Describe Cluster
OFFSET_DELETE Delete Group, Read Topic
DESCRIBE_CLIENT_QUOTAS DescribeConfigs Cluster
DESCRIBE_USER_SCRAM_CREDENTIALS Describe Cluster
ALTER_USER_SCRAM_CREDENTIALS Alter Cluster
DESCRIBE_QUORUM Describe Cluster
UPDATE_FEATURES Alter Cluster
DESCRIBE_CLUSTER Describe Cluster
DESCRIBE_PRODUCERS Read Topic
DESCRIBE_TRANSACTIONS Describe TransactionalId
LIST_TRANSACTIONS Describe TransactionalId
DESCRIBE_TOPIC_PARTITIONS Describe Topic
"""
"""Kafka's "Operations and Resources on Protocols"; of ELECT_LEADERS, DESCRIBE_QUORUM and the Alter
of WRITE_TXN_MARKERS what its broker asks for."""
FREE = {ApiKey.API_VERSIONS, ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE}
"""What whoever wants to authenticate asks first."""
LESS = {
    (ApiKey.PRODUCE, "IdempotentWrite", "Cluster"),  # not asked for since Kafka 3.0 (KIP-679)
    (ApiKey.FETCH, "ClusterAction", "Cluster"),  # replicas of raftmq do not use Fetch
    (ApiKey.OFFSET_FOR_LEADER_EPOCH, "ClusterAction", "Cluster"),
}
MORE = {
    (ApiKey.INIT_PRODUCER_ID, "Write", "Topic"),  # of any topic, KIP-679
    (ApiKey.CREATE_TOPICS, "DescribeConfigs", "Topic"),  # of the configs in the answer, KIP-525
    (ApiKey.CREATE_TOPICS, "Write", "Topic"),  # what a delay topic delivers to
    (ApiKey.CREATE_TOPICS, "Read", "Topic"),  # what a view is over
    (ApiKey.DELETE_TOPICS, "Describe", "Topic"),  # of the name in an answer about an id
    (ApiKey.ADD_PARTITIONS_TO_TXN, "ClusterAction", "Cluster"),  # versions for brokers, KIP-890
    (ApiKey.DESCRIBE_TRANSACTIONS, "Describe", "Topic"),  # of the topics in the answer
}


def _kafka_word(word: str) -> str:
    return "".join(part.capitalize() for part in word.split("-"))


def test_needs_are_those_of_kafkas_documentation() -> None:
    documented = set()
    for line in DOCUMENTED.strip().splitlines():
        name, _, needs = line.partition(" ")
        for need in filter(None, needs.split(", ")):
            documented.add((ApiKey[name], *need.split()))
    ours = {
        (api, _kafka_word(operation), _kafka_word(kind))
        for api, needs in NEEDS.items()
        for kind, operation in needs
    }
    assert ours == (documented - LESS) | MORE
    assert set(NEEDS) == set(ANNOUNCED)
    unguarded = {ApiKey.PRODUCE, ApiKey.FETCH, *FREE}
    assert set(GUARDS) == set(NEEDS) - unguarded


# ---- a world with rights ----


def allow(operation: Operation, kind: Kind, name: str, principal: str = USER) -> Rule:
    return Rule(kind, Pattern.LITERAL, name, principal, "*", operation, Permission.ALLOW)


def deny(operation: Operation, kind: Kind, name: str) -> Rule:
    return Rule(kind, Pattern.LITERAL, name, USER, "*", operation, Permission.DENY)


class Guarded(World):
    """A world in which alice asks; there is a topic `here`."""

    def __init__(self, *rules: Rule, principal: str = USER, is_audited: bool = False) -> None:
        super().__init__(is_audited=is_audited, authorizer="acl", super_users=("User:root",))
        self.topic_id = self.add_topic(HERE)
        self.broker.coordinator = Nodes(1).coordinators[NodeId(1)]
        self.let(*rules)
        self.connection.caller = Caller(principal, "10.0.0.9")

    def let(self, *rules: Rule) -> None:
        """These rules are in force from now on, and no others."""
        self.engine.change(rules=NO_RULES.with_rules(rules))

    def settle(self) -> None:
        """Let long work end, and whatever waits give up."""
        for _ in range(20):
            self.bench.deadlines.expire(self.bench.clock.now_ms)
            self.bench.sleep(400)


def _of_clients(name: str, topic_id: UUID | None) -> dict[ApiKey, dict[str, Any]]:
    committed = {"partition_index": 0, "committed_offset": 1, "committed_metadata": None}
    offsets = [{"name": name, "partitions": [committed]}]
    member = {"group_id": name, "member_id": "m"}
    generation = {**member, "generation_id": 1}
    new = {"name": name, "num_partitions": 1, "replication_factor": 1}
    return {
        ApiKey.LIST_OFFSETS: {
            "replica_id": -1,
            "topics": [{"name": name, "partitions": [{"partition_index": 0, "timestamp": -2}]}],
        },
        ApiKey.METADATA: {"topics": [{"name": name}], "allow_auto_topic_creation": True},
        ApiKey.OFFSET_COMMIT: {
            "group_id": name,
            "generation_id_or_member_epoch": -1,
            "member_id": "",
            "topics": offsets,
        },
        ApiKey.OFFSET_FETCH: {
            "group_id": name,
            "topics": [{"name": name, "partition_indexes": [0]}],
            "groups": [
                {"group_id": name, "topics": [{"name": name, "partition_indexes": [0]}]},
            ],
        },
        ApiKey.FIND_COORDINATOR: {"key": name, "key_type": 0, "coordinator_keys": [name]},
        ApiKey.JOIN_GROUP: {
            "group_id": name,
            "session_timeout": 10_000,
            "rebalance_timeout": 10_000,
            "member_id": "",
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": b""}],
        },
        ApiKey.HEARTBEAT: generation,
        ApiKey.LEAVE_GROUP: {**member, "members": [{"member_id": "m"}]},
        ApiKey.SYNC_GROUP: {**generation, "assignments": []},
        ApiKey.DESCRIBE_GROUPS: {"groups": [name], "include_authorized_operations": True},
        ApiKey.LIST_GROUPS: {"states_filter": [], "types_filter": []},
        ApiKey.API_VERSIONS: {"client_software_name": "x", "client_software_version": "1"},
        ApiKey.CREATE_TOPICS: {
            "topics": [{**new, "assignments": [], "configs": []}],
            "timeout": 10,
            "validate_only": False,
        },
    }


def _of_consumers(name: str, topic_id: UUID | None) -> dict[ApiKey, dict[str, Any]]:
    ids = {"transactional_id": name, "producer_id": 1, "producer_epoch": 0}
    committed = {"partition_index": 0, "committed_offset": 1, "committed_metadata": None}
    offsets = [{"name": name, "partitions": [committed]}]
    marker = {"producer_id": 1, "producer_epoch": 0, "transaction_result": False}
    return {
        ApiKey.DELETE_TOPICS: {
            "topics": [{"name": name, "topic_id": None}, {"name": None, "topic_id": topic_id}],
            "topic_names": [name],
            "timeout": 10,
        },
        ApiKey.DELETE_RECORDS: {
            "topics": [{"name": name, "partitions": [{"partition_index": 0, "offset": 0}]}],
            "timeout": 10,
        },
        ApiKey.INIT_PRODUCER_ID: {**ids, "transaction_timeout": 1000},
        ApiKey.OFFSET_FOR_LEADER_EPOCH: {
            "replica_id": -1,
            "topics": [{"topic": name, "partitions": [{"partition": 0, "leader_epoch": 1}]}],
        },
        ApiKey.ADD_PARTITIONS_TO_TXN: {
            **{f"v3_and_below_{key}": value for key, value in ids.items()},
            "v3_and_below_topics": [{"name": name, "partitions": [0]}],
            "transactions": [
                {**ids, "verify_only": True, "topics": [{"name": name, "partitions": [0]}]}
            ],
        },
        ApiKey.ADD_OFFSETS_TO_TXN: {**ids, "group_id": name},
        ApiKey.END_TXN: {**ids, "committed": True},
        ApiKey.WRITE_TXN_MARKERS: {
            "markers": [
                {
                    **marker,
                    "topics": [{"name": name, "partition_indexes": [0]}],
                    "coordinator_epoch": 0,
                }
            ]
        },
        ApiKey.TXN_OFFSET_COMMIT: {
            **ids,
            "group_id": name,
            "generation_id": -1,
            "member_id": "",
            "topics": offsets,
        },
    }


def _of_transactions(name: str, topic_id: UUID | None) -> dict[ApiKey, dict[str, Any]]:
    filters = {
        "resource_type_filter": 1,
        "resource_name_filter": None,
        "pattern_type_filter": 1,
        "principal_filter": None,
        "host_filter": None,
        "operation": 1,
        "permission_type": 1,
    }
    resource = {"resource_type": 2, "resource_name": name}
    return {
        ApiKey.DESCRIBE_ACLS: filters,
        ApiKey.CREATE_ACLS: {
            "creations": [
                {
                    **resource,
                    "principal": USER,
                    "host": "*",
                    "operation": 3,
                    "permission_type": 3,
                }
            ]
        },
        ApiKey.DELETE_ACLS: {"filters": [filters]},
        ApiKey.DESCRIBE_CONFIGS: {
            "resources": [
                {**resource, "configuration_keys": None},
                {"resource_type": 4, "resource_name": "1", "configuration_keys": None},
            ]
        },
        ApiKey.ALTER_CONFIGS: {
            "resources": [{**resource, "configs": []}],
            "validate_only": False,
        },
        ApiKey.DESCRIBE_LOG_DIRS: {"topics": None},
        ApiKey.CREATE_PARTITIONS: {
            "topics": [{"name": name, "count": 2, "assignments": None}],
            "timeout": 10,
            "validate_only": False,
        },
        ApiKey.DELETE_GROUPS: {"groups_names": [name]},
        ApiKey.ELECT_LEADERS: {
            "topic_partitions": [{"topic": name, "partitions": [0]}],
            "timeout": 10,
        },
    }


def _of_operators(name: str, topic_id: UUID | None) -> dict[ApiKey, dict[str, Any]]:
    resource = {"resource_type": 2, "resource_name": name}
    return {
        ApiKey.INCREMENTAL_ALTER_CONFIGS: {
            "resources": [
                {**resource, "configs": [{"name": "k", "config_operation": 0, "value": "v"}]},
                {"resource_type": 4, "resource_name": "1", "configs": []},
            ],
            "validate_only": False,
        },
        ApiKey.ALTER_PARTITION_REASSIGNMENTS: {
            "timeout": 10,
            "topics": [{"name": name, "partitions": [{"partition_index": 0, "replicas": [1]}]}],
        },
        ApiKey.LIST_PARTITION_REASSIGNMENTS: {"timeout": 10, "topics": None},
        ApiKey.OFFSET_DELETE: {
            "group_id": name,
            "topics": [{"name": name, "partitions": [{"partition_index": 0}]}],
        },
        ApiKey.DESCRIBE_QUORUM: {
            "topics": [{"topic_name": METADATA_TOPIC, "partitions": [{"partition_index": 0}]}]
        },
        ApiKey.SASL_HANDSHAKE: {"mechanism": "PLAIN"},
        ApiKey.SASL_AUTHENTICATE: {"auth_bytes": b"x"},
        ApiKey.DESCRIBE_CLIENT_QUOTAS: {
            "components": [{"entity_type": "user", "match_type": 0, "match": name}],
            "strict": False,
        },
        ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: {"users": [{"name": name}]},
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS: {
            "deletions": [{"name": name, "mechanism": 1}],
            "upsertions": [],
        },
        ApiKey.UPDATE_FEATURES: {"feature_updates": [], "timeout": 10},
        ApiKey.DESCRIBE_CLUSTER: {"include_cluster_authorized_operations": True},
        ApiKey.DESCRIBE_PRODUCERS: {"topics": [{"name": name, "partition_indexes": [0]}]},
        ApiKey.DESCRIBE_TRANSACTIONS: {"transactional_ids": [name]},
        ApiKey.LIST_TRANSACTIONS: {
            "state_filters": [],
            "producer_id_filters": [],
            "transactional_id_pattern": None,
        },
        ApiKey.DESCRIBE_TOPIC_PARTITIONS: {
            "topics": [{"name": name}],
            "response_partition_limit": 10,
            "cursor": None,
        },
    }


def requests(name: str, topic_id: UUID | None) -> dict[ApiKey, dict[str, Any]]:
    """One request to each API, about a topic; groups and transactional ids have the same name."""
    parts = _of_clients, _of_consumers, _of_transactions, _of_operators
    return {api: fields for part in parts for api, fields in part(name, topic_id).items()}


BATCH = build_batch([NewRecord(None, b"v")])


def asked(world: Guarded, api: ApiKey, version: int, name: str, topic_id: UUID) -> FakeSlot:
    key: str | UUID = topic_id if version >= 13 else name
    if api is ApiKey.PRODUCE:
        slot = world.produce(version, [(key, 0, BATCH)], timeout_ms=10)
    elif api is ApiKey.FETCH:
        slot = world.fetch(version, [(key, 0, 0)], max_wait_ms=0, min_bytes=0)
    else:
        slot = world.send(api, version, **requests(name, topic_id)[api])
    world.settle()
    return slot


def codes_of(value: Any) -> set[ErrorCode]:
    """All error codes of an answer."""
    if isinstance(value, list | tuple):
        return {code for one in value for code in codes_of(one)}
    fields = getattr(value, "__dict__", None)
    if fields is None and hasattr(value, "__attrs_attrs__"):
        fields = {one.name: getattr(value, one.name) for one in value.__attrs_attrs__}
    if fields is None:
        return set()
    own = {
        ErrorCode(code)
        for key, code in fields.items()
        if key.endswith("error_code") and isinstance(code, int)
    }
    return own.union(*(codes_of(one) for one in fields.values()))


def answer_of(world: Guarded, api: ApiKey, version: int, slot: FakeSlot) -> Any:
    if api is ApiKey.PRODUCE:
        return world.produced(version, slot)
    if api is ApiKey.FETCH:
        return world.fetched(version, slot)
    return world.read(api, version, slot)


VERSIONS = [
    (api, version)
    for api, (low, high) in ANNOUNCED.items()
    for version in range(3 if api is ApiKey.PRODUCE else low, high + 1)
]
SILENT = {
    *FREE,
    ApiKey.LIST_GROUPS,
    ApiKey.DESCRIBE_CLUSTER,
    ApiKey.LIST_TRANSACTIONS,
}
"""These leave out what is not to be seen, or need nothing; they refuse nothing."""


@pytest.mark.parametrize(
    ("api", "version"), VERSIONS, ids=[f"{api.title}-{version}" for api, version in VERSIONS]
)
def test_whoever_may_do_nothing_does_and_learns_nothing(api: ApiKey, version: int) -> None:
    told = []
    unknown = UUID(int=77)
    for name in (HERE, GONE):
        world = Guarded()
        slot = asked(world, api, version, name, world.topic_id if name == HERE else unknown)
        answer = answer_of(world, api, version, slot)
        codes = codes_of(answer)
        assert ErrorCode.UNKNOWN_SERVER_ERROR not in codes
        by_id = api in (ApiKey.PRODUCE, ApiKey.FETCH) and version >= 13
        if api is ApiKey.DESCRIBE_LOG_DIRS and version < 3:
            assert answer.results in ([], ())
        elif by_id:
            assert codes - {ErrorCode.NONE} == {ErrorCode.UNKNOWN_TOPIC_ID}
        elif api not in SILENT:
            assert codes & MAY_NOT, answer
            assert world.broker.metrics.denials
        assert world.replica(HERE).log_end_offset == 0
        assert not world.controller.calls
        assert not world.engine.proposed
        data = bytes(world_body(slot)).replace(name.encode(), b"....")
        told.append(data.replace(world.topic_id.bytes, b"." * 16).replace(unknown.bytes, b"." * 16))
    assert told[0] == told[1], "the answer depends on what is there"


def world_body(slot: FakeSlot) -> bytes:
    return slot.data[8:]  # without size and correlation id


def needed(api: ApiKey) -> Iterable[Rule]:
    for kind, operation in NEEDS[api]:
        yield allow(operation, kind, CLUSTER_NAME if kind is Kind.CLUSTER else HERE)


@pytest.mark.parametrize("api", list(ANNOUNCED), ids=lambda api: api.title)
def test_what_an_api_needs_is_enough(api: ApiKey) -> None:
    low, high = ANNOUNCED[api]
    for version in (max(low, 3 if api is ApiKey.PRODUCE else low), high):
        world = Guarded(*needed(api))
        slot = asked(world, api, version, HERE, world.topic_id)
        if slot.pieces is None:
            assert not slot.is_failed
            assert world.controller.calls or world.engine.proposed, "it went on"
            continue
        codes = codes_of(answer_of(world, api, version, slot))
        allowed = MAY_NOT
        if not world.broker.transactions.is_offered:
            # Which says that there are no transactions at this level.
            allowed = MAY_NOT - {ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED}
        assert not codes & allowed
        assert not world.broker.metrics.denials
