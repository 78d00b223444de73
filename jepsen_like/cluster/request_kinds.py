"""What the API fuzzer asks for: every API that other clients have no use for, well and badly.

A table of questions, each drawn from the given randomness and sent to whom it names. Nothing here
may disturb what other clients' histories claim: topics, groups and settings that change are the
API fuzzer's own (`OWN`, `own-*`), or come and go anyway (`set-*`).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final

from jepsen_like.virtual_time import EPOCH_MS
from raftmq.protocol import ApiKey

Question = tuple[ApiKey, dict[str, Any]]

TOPIC: Final = "t0"
GROUP: Final = "g"
OWN: Final = "own"
TOPIC_RESOURCE: Final = 2
BROKER_RESOURCE: Final = 4
NAMES: Final = (OWN, "own-2", "own.2", "", "..", "a b", "n" * 250, "__cluster_metadata")
SETTINGS: Final = (
    ("retention.bytes", "4096"),
    ("retention.ms", "1500"),
    ("segment.bytes", "2048"),
    ("compression.type", "gzip"),
    ("compression.type", "producer"),
    ("message.timestamp.type", "LogAppendTime"),
    ("message.timestamp.type", "CreateTime"),
    ("message.timestamp.before.max.ms", "1000"),
    ("min.insync.replicas", "2"),
    ("min.insync.replicas", "9"),
    ("max.message.bytes", "200"),
    ("max.message.bytes", "1048588"),
    ("flush.messages", "1"),
    ("raftmq.acks1.fsync", "true"),
    ("cleanup.policy", "compact"),
    ("cleanup.policy", "delete"),
    ("unheard.of", "1"),
    ("retention.ms", "soon"),
    ("segment.bytes", "-5"),
    ("index.interval.bytes", "300"),
)
BROKER_SETTINGS: Final = (
    ("num.partitions", "2"),
    ("auto.leader.rebalance.enable", "true"),
    ("node.id", "5"),
    ("message.max.bytes", "no"),
    ("background.threads", "9"),
)


def _partition(random: Random) -> int:
    return random.choice((0, 0, 0, 1, 9))


def _list_offsets(random: Random, now_ms: float) -> Question:
    time = random.choice(
        (-1, -2, -3, EPOCH_MS + int(now_ms) - 500, EPOCH_MS + int(now_ms * random.random()), 0)
    )
    row = {
        "partition_index": _partition(random),
        "current_leader_epoch": random.choice((-1, -1, 1, 99)),
        "timestamp": time,
    }
    topics = [{"name": random.choice((TOPIC, OWN, "t9")), "partitions": [row]}]
    level = random.choice((0, 1))
    return ApiKey.LIST_OFFSETS, {"replica_id": -1, "isolation_level": level, "topics": topics}


def _epochs(random: Random, _now_ms: float) -> Question:
    row = {
        "partition": _partition(random),
        "current_leader_epoch": random.choice((-1, -1, 1, 99)),
        "leader_epoch": random.choice((0, 1, 2, 3, 5, 99)),
    }
    topics = [{"topic": random.choice((TOPIC, OWN, "t9")), "partitions": [row]}]
    return ApiKey.OFFSET_FOR_LEADER_EPOCH, {"replica_id": -1, "topics": topics}


def _resource(random: Random) -> dict[str, Any]:
    if random.random() < 0.7:
        return {"resource_type": TOPIC_RESOURCE, "resource_name": random.choice((OWN, "t9"))}
    name = random.choice(("1", "2", "", "77", "x"))
    return {"resource_type": random.choice((BROKER_RESOURCE, 8)), "resource_name": name}


def _describe_configs(random: Random, _now_ms: float) -> Question:
    keys = random.choice((None, ["retention.ms", "log.retention.ms"], ["unheard.of"]))
    resources = [{**_resource(random), "configuration_keys": keys}]
    return ApiKey.DESCRIBE_CONFIGS, {
        "resources": resources,
        "include_synonyms": random.random() < 0.5,
        "include_documentation": random.random() < 0.5,
    }


def _change_configs(random: Random, _now_ms: float) -> Question:
    resource = _resource(random)
    changes = []
    for name, value in random.sample(SETTINGS, random.choice((1, 1, 2))):
        if resource["resource_type"] == BROKER_RESOURCE:
            # Of those that others do not depend on.
            name, value = random.choice(BROKER_SETTINGS)
        operation = random.choice((0, 0, 0, 1, 2, 3))
        told = None if operation == 1 or random.random() < 0.05 else value
        changes.append({"name": name, "config_operation": operation, "value": told})
    return ApiKey.INCREMENTAL_ALTER_CONFIGS, {
        "resources": [{**resource, "configs": changes}],
        "validate_only": random.random() < 0.2,
    }


def _replace_configs(random: Random, _now_ms: float) -> Question:
    name, value = random.choice(SETTINGS)
    resource = {"resource_type": TOPIC_RESOURCE, "resource_name": random.choice((OWN, "own-2"))}
    configs = [{"name": name, "value": value}] if random.random() < 0.6 else []
    return ApiKey.ALTER_CONFIGS, {
        "resources": [{**resource, "configs": configs}],
        "validate_only": random.random() < 0.2,
    }


def _create_topic(random: Random, _now_ms: float) -> Question:
    is_manual = random.random() < 0.4
    # Three replicas or none: fewer are lost with one storage.
    rows = [[1, 2, 3], [2, 3, 1]] if random.random() < 0.6 else [[1, 1], [], [77], [1, 2, 77]]
    assignments = [
        {"partition_index": number, "broker_ids": nodes}
        for number, nodes in enumerate(random.sample(rows, random.randint(1, 2)))
    ]
    name, value = random.choice(SETTINGS)
    row = {
        "name": random.choice(NAMES),
        "num_partitions": -1 if is_manual else random.choice((-1, 1, 2, 0, 100_000)),
        "replication_factor": -1 if is_manual else random.choice((-1, 3, 3, 0, 9)),
        "assignments": assignments if is_manual else [],
        "configs": [{"name": name, "value": value}] if random.random() < 0.3 else [],
    }
    validate_only = random.random() < 0.2
    return ApiKey.CREATE_TOPICS, {"topics": [row], "timeout": 500, "validate_only": validate_only}


def _delete_topic(random: Random, _now_ms: float) -> Question:
    name = random.choice(("own-2", "own.2", "t9", "__cluster_metadata"))
    return ApiKey.DELETE_TOPICS, {"topic_names": [name], "timeout": 500}


def _create_partitions(random: Random, _now_ms: float) -> Question:
    assignments = random.choice((None, None, [{"broker_ids": [1, 2, 3]}], [{"broker_ids": [1]}]))
    name = random.choice(("own-2", "set-0", OWN, "t9"))
    row = {"name": name, "count": random.randint(1, 4), "assignments": assignments}
    if random.random() < 0.05:
        row["count"] = 1_000_000
    return ApiKey.CREATE_PARTITIONS, {
        "topics": [row],
        "timeout": 500,
        "validate_only": random.random() < 0.2,
    }


def _commit_own(random: Random, _now_ms: float) -> Question:
    row = {
        "partition_index": _partition(random),
        "committed_offset": random.randrange(1_000),
        "committed_leader_epoch": -1,
        "committed_metadata": random.choice(("", "m", "m" * 5_000)),
    }
    topics = [{"name": random.choice((TOPIC, "set-1", "t9")), "partitions": [row]}]
    return ApiKey.OFFSET_COMMIT, {
        "group_id": random.choice(("own-1", "own-2", "")),
        "generation_id_or_member_epoch": random.choice((-1, -1, -1, 3)),
        "member_id": random.choice(("", "", "stranger")),
        "group_instance_id": random.choice((None, None, "stranger")),
        "topics": topics,
    }


def _fetch_own(random: Random, _now_ms: float) -> Question:
    return ApiKey.OFFSET_FETCH, {
        "group_id": random.choice(("own-1", "own-2", GROUP, "")),
        "topics": random.choice((None, [{"name": TOPIC, "partition_indexes": [0, 9]}])),
        "require_stable": random.random() < 0.5,
    }


def _delete_groups(random: Random, _now_ms: float) -> Question:
    # Not that of the members: it may be without any for a moment, and must not vanish.
    return ApiKey.DELETE_GROUPS, {"groups_names": random.sample(("own-1", "own-2", "nobody"), 2)}


def _delete_offsets(random: Random, _now_ms: float) -> Question:
    # Of topics that no member reads, so that nobody's position is lost.
    name = random.choice(("set-0", "set-1", "t9"))
    topics = [{"name": name, "partitions": [{"partition_index": _partition(random)}]}]
    group = random.choice((GROUP, "own-1", "nobody", ""))
    return ApiKey.OFFSET_DELETE, {"group_id": group, "topics": topics}


def _stranger(random: Random, _now_ms: float) -> Question:
    """Somebody who is no member says what members say."""
    who = {"member_id": "stranger", "group_instance_id": random.choice((None, "stranger"))}
    draw = random.randrange(3)
    if draw == 0:
        return ApiKey.HEARTBEAT, {"group_id": GROUP, "generation_id": 1, **who}
    if draw == 1:
        return ApiKey.LEAVE_GROUP, {"group_id": GROUP, "members": [who]}
    return ApiKey.SYNC_GROUP, {
        "group_id": GROUP,
        "generation_id": 1,
        **who,
        "protocol_type": "consumer",
        "protocol_name": "range",
        "assignments": [],
    }


def _odd_join(random: Random, _now_ms: float) -> Question:
    return ApiKey.JOIN_GROUP, {
        "group_id": random.choice((GROUP, "own-2", "")),
        "session_timeout": random.choice((1, 1_500, 1 << 30)),
        "rebalance_timeout": 500,
        "member_id": random.choice(("stranger", "stranger", "")),
        "group_instance_id": None,
        "protocol_type": random.choice(("consumer", "connect", "")),
        "protocols": [{"name": "odd", "metadata": b"\0"}],
    }


def _describe_groups(random: Random, _now_ms: float) -> Question:
    groups = [random.choice((GROUP, "own-1", "own-2", "nobody", "register-0"))]
    return ApiKey.DESCRIBE_GROUPS, {"groups": groups, "include_authorized_operations": False}


def _list_groups(random: Random, _now_ms: float) -> Question:
    return ApiKey.LIST_GROUPS, {"states_filter": random.choice(([], ["Stable"], ["Empty"]))}


def _elect(random: Random, _now_ms: float) -> Question:
    chosen = random.choice((None, [{"topic": TOPIC, "partitions": [0, 9]}]))
    return ApiKey.ELECT_LEADERS, {
        "election_type": random.choice((0, 0, 1)),
        "topic_partitions": chosen,
        "timeout": 500,
    }


def _reassignments(random: Random, _now_ms: float) -> Question:
    topics = random.choice((None, [{"name": TOPIC, "partition_indexes": [0]}]))
    return ApiKey.LIST_PARTITION_REASSIGNMENTS, {"timeout": 500, "topics": topics}


def _fixed(api: ApiKey, **fields: Any) -> Callable[[Random, float], Question]:
    return lambda _random, _now_ms: (api, fields)


_METADATA_QUORUM = [{"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}]
QUESTIONS: Final[tuple[Callable[[Random, float], Question], ...]] = (
    _fixed(ApiKey.API_VERSIONS, client_software_name="sim", client_software_version="1"),
    _list_offsets,
    _list_offsets,
    _epochs,
    _describe_configs,
    _change_configs,
    _change_configs,
    _replace_configs,
    _create_topic,
    _create_topic,
    _delete_topic,
    _create_partitions,
    _commit_own,
    _commit_own,
    _fetch_own,
    _delete_groups,
    _delete_offsets,
    _stranger,
    _odd_join,
    _describe_groups,
    _list_groups,
    _fixed(ApiKey.DESCRIBE_CLUSTER, include_cluster_authorized_operations=False),
    _fixed(ApiKey.DESCRIBE_QUORUM, topics=_METADATA_QUORUM),
    _fixed(ApiKey.DESCRIBE_LOG_DIRS, topics=None),
    _elect,
    _fixed(ApiKey.DESCRIBE_PRODUCERS, topics=[{"name": TOPIC, "partition_indexes": [0]}]),
    _reassignments,
    _fixed(
        ApiKey.DESCRIBE_TOPIC_PARTITIONS,
        topics=[{"name": TOPIC}],
        response_partition_limit=10,
        cursor=None,
    ),
)
