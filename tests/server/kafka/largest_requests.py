"""By table, one row for each announced API: as many entries as fit the largest request and its
elements. They speak of a topic "t" of `PARTITIONS` partitions; all other names are unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raftmq.protocol import ANNOUNCED, ApiKey, encode_request
from raftmq.protocol.fetch import FetchPartition, FetchRequest, FetchTopic, encode_fetch_request
from raftmq.protocol.produce import (
    ProducePartition,
    ProduceRequest,
    ProduceTopic,
    encode_produce_request,
)

PARTITIONS = 2_000
CONTROL_BYTES_MAX = 1 << 20
ELEMENTS_MAX = 100_000

MANY = ELEMENTS_MAX // 2 - 10
NAMES = [f"n{number:05}" for number in range(ELEMENTS_MAX)]
GROUPS = [f"{number:x}" for number in range(ELEMENTS_MAX)]


def topics(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"name": name, **fields} for name in NAMES[:count]]


PARTS = list(range(PARTITIONS))
REPEATED = [index % PARTITIONS for index in range(ELEMENTS_MAX - 10)]
"""Of one topic that is there."""

PRODUCER = {"transactional_id": "x", "producer_id": 1, "producer_epoch": 0}
ADDED = {"name": "t", "partitions": REPEATED}

FILTER = {
    "resource_type_filter": 1,
    "resource_name_filter": None,
    "pattern_type_filter": 1,
    "principal_filter": None,
    "host_filter": None,
    "operation": 1,
    "permission_type": 1,
}
ROWS: dict[ApiKey, dict[str, Callable[[], dict[str, Any]]]] = {
    ApiKey.API_VERSIONS: {
        "text": lambda: {"client_software_name": "n" * 30_000, "client_software_version": "1"}
    },
    ApiKey.METADATA: {
        "all": lambda: {"topics": None},
        "unknown": lambda: {"topics": topics(70_000 // 2), "allow_auto_topic_creation": False},
        "equal": lambda: {"topics": [{"name": "t"}] * 40_000},
    },
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: {"unknown": lambda: {"topics": topics(70_000)}},
    ApiKey.DESCRIBE_CLUSTER: {"one": dict},
    ApiKey.LIST_OFFSETS: {
        "equal": lambda: {
            "replica_id": -1,
            "topics": [
                {
                    "name": "t",
                    "partitions": [
                        {"partition_index": n, "timestamp": -1} for n in REPEATED[:60_000]
                    ],
                }
            ],
        }
    },
    ApiKey.OFFSET_FOR_LEADER_EPOCH: {
        "equal": lambda: {
            "replica_id": -1,
            "topics": [
                {
                    "topic": "t",
                    "partitions": [{"partition": n, "leader_epoch": 1} for n in REPEATED[:60_000]],
                }
            ],
        }
    },
    ApiKey.DELETE_RECORDS: {
        "equal": lambda: {
            "timeout": 1000,
            "topics": [
                {
                    "name": "t",
                    "partitions": [{"partition_index": n, "offset": 0} for n in REPEATED[:80_000]],
                }
            ],
        }
    },
    ApiKey.CREATE_TOPICS: {
        "many": lambda: {
            "timeout": 1000,
            "validate_only": True,
            "topics": topics(
                40_000, num_partitions=1000, replication_factor=3, assignments=[], configs=[]
            ),
        },
        "assigned": lambda: {
            "timeout": 1000,
            "topics": [
                {
                    "name": "a",
                    "num_partitions": -1,
                    "replication_factor": -1,
                    "configs": [],
                    "assignments": [
                        {"partition_index": n, "broker_ids": [1]} for n in range(49_000)
                    ],
                }
            ],
        },
    },
    ApiKey.DELETE_TOPICS: {
        "unknown": lambda: {"timeout": 1000, "topics": topics(35_000, topic_id=None)}
    },
    ApiKey.CREATE_PARTITIONS: {
        "many": lambda: {
            "timeout": 1000,
            "validate_only": True,
            "topics": [{"name": n, "count": 1000, "assignments": None} for n in NAMES[:60_000]],
        }
    },
    ApiKey.DESCRIBE_CONFIGS: {
        "equal": lambda: {
            "resources": [{"resource_type": 2, "resource_name": "t", "configuration_keys": None}]
            * 90_000,
            "include_synonyms": True,
            "include_documentation": True,
        },
        "keys": lambda: {
            "resources": [
                {"resource_type": 2, "resource_name": "t", "configuration_keys": [name]}
                for name in NAMES[:49_000]
            ],
        },
        "brokers": lambda: {
            "resources": [
                {"resource_type": 4, "resource_name": "1", "configuration_keys": [name]}
                for name in NAMES[:49_000]
            ],
        },
    },
    ApiKey.ALTER_CONFIGS: {
        "many": lambda: {
            "resources": [
                {"resource_type": 2, "resource_name": name, "configs": []}
                for name in NAMES[:90_000]
            ]
        }
    },
    ApiKey.INCREMENTAL_ALTER_CONFIGS: {
        "many": lambda: {
            "resources": [
                {
                    "resource_type": 2,
                    "resource_name": name,
                    "configs": [{"name": "k", "config_operation": 0, "value": "v"}],
                }
                for name in NAMES[:45_000]
            ]
        }
    },
    ApiKey.DESCRIBE_QUORUM: {
        "equal": lambda: {
            "topics": [
                {
                    "topic_name": "__cluster_metadata",
                    "partitions": [{"partition_index": 0}] * 99_000,
                }
            ]
        },
        "many": lambda: {
            "topics": [{"topic_name": "t", "partitions": [{"partition_index": n} for n in NUMBERS]}]
        },
    },
    ApiKey.SASL_HANDSHAKE: {"text": lambda: {"mechanism": "m" * 30_000}},
    ApiKey.SASL_AUTHENTICATE: {"token": lambda: {"auth_bytes": b"t" * 900_000}},
    ApiKey.DESCRIBE_CLIENT_QUOTAS: {
        "many": lambda: {
            "components": [
                {"entity_type": "user", "match_type": 0, "match": name} for name in NAMES[:60_000]
            ],
            "strict": True,
        }
    },
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: {
        "unknown": lambda: {"users": [{"name": name} for name in NAMES[:90_000]]}
    },
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: {
        "many": lambda: {
            "deletions": [{"name": name, "mechanism": 1} for name in NAMES[:90_000]],
            "upsertions": [],
        }
    },
    ApiKey.UPDATE_FEATURES: {
        "many": lambda: {
            "feature_updates": [
                {"feature": name, "max_version_level": 1, "upgrade_type": 1}
                for name in NAMES[:90_000]
            ],
            "validate_only": False,
        }
    },
    ApiKey.DESCRIBE_LOG_DIRS: {
        "all": lambda: {"topics": None},
        "equal": lambda: {"topics": [{"topic": "t", "partitions": REPEATED}]},
    },
    ApiKey.ELECT_LEADERS: {
        "all": lambda: {"topic_partitions": None, "timeout": 0},
        "equal": lambda: {
            "topic_partitions": [{"topic": "t", "partitions": REPEATED}],
            "timeout": 0,
        },
        "many": lambda: {
            "topic_partitions": [{"topic": "u", "partitions": list(range(99_000))}],
            "timeout": 0,
        },
    },
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: {
        "many": lambda: {
            "timeout": 0,
            "topics": [
                {
                    "name": "t",
                    "partitions": [{"partition_index": n, "replicas": [1]} for n in range(MANY)],
                }
            ],
        },
        "equal": lambda: {
            "timeout": 0,
            "topics": [
                {
                    "name": "t",
                    "partitions": [{"partition_index": 0, "replicas": None}] * (2 * MANY),
                }
            ],
        },
        "wide": lambda: {
            "timeout": 0,
            "topics": [
                {
                    "name": "t",
                    "partitions": [{"partition_index": 0, "replicas": list(range(2 * MANY))}],
                }
            ],
        },
    },
    ApiKey.LIST_PARTITION_REASSIGNMENTS: {
        "all": lambda: {"timeout": 0, "topics": None},
        "many": lambda: {
            "timeout": 0,
            "topics": [{"name": "t", "partition_indexes": list(range(99_000))}],
        },
    },
    ApiKey.INIT_PRODUCER_ID: {"one": lambda: {"transactional_id": None}},
    ApiKey.ADD_PARTITIONS_TO_TXN: {
        "many": lambda: {"transactions": [{**PRODUCER, "verify_only": False, "topics": [ADDED]}]},
        "verified": lambda: {
            "transactions": [
                {
                    **PRODUCER,
                    "transactional_id": name,
                    "verify_only": True,
                    "topics": [{"name": "t", "partitions": [0]}],
                }
                for name in NAMES[:30_000]
            ]
        },
    },
    ApiKey.ADD_OFFSETS_TO_TXN: {"text": lambda: {**PRODUCER, "group_id": "g" * 30_000}},
    ApiKey.END_TXN: {
        "text": lambda: {**PRODUCER, "transactional_id": "x" * 30_000, "committed": True}
    },
    ApiKey.WRITE_TXN_MARKERS: {
        "many": lambda: {
            "markers": [
                {
                    "producer_id": 1,
                    "producer_epoch": 0,
                    "transaction_result": False,
                    "topics": [{"name": "t", "partition_indexes": REPEATED}],
                    "coordinator_epoch": 0,
                }
            ]
        }
    },
    ApiKey.TXN_OFFSET_COMMIT: {
        "many": lambda: {
            **PRODUCER,
            "group_id": "g",
            "generation_id": -1,
            "member_id": "",
            "group_instance_id": None,
            "topics": [
                {
                    "name": "t",
                    "partitions": [
                        {
                            "partition_index": n,
                            "committed_offset": 1,
                            "committed_leader_epoch": 1,
                            "committed_metadata": None,
                        }
                        for n in REPEATED[:50_000]
                    ],
                }
            ],
        }
    },
    ApiKey.DESCRIBE_TRANSACTIONS: {"many": lambda: {"transactional_ids": NAMES[:90_000]}},
    ApiKey.LIST_TRANSACTIONS: {
        "states": lambda: {
            "state_filters": NAMES[:90_000],
            "producer_id_filters": [],
            "duration_filter": -1,
            "transactional_id_pattern": "x" * 30_000,
        },
        "producers": lambda: {
            "state_filters": [],
            "producer_id_filters": list(range(90_000)),
            "duration_filter": -1,
            "transactional_id_pattern": None,
        },
    },
    ApiKey.DESCRIBE_PRODUCERS: {
        "equal": lambda: {"topics": [{"name": "t", "partition_indexes": REPEATED}]},
        "many": lambda: {"topics": [{"name": "u", "partition_indexes": list(range(99_000))}]},
    },
    ApiKey.FIND_COORDINATOR: {
        "many": lambda: {"key_type": 0, "coordinator_keys": GROUPS[:99_000]},
    },
    ApiKey.JOIN_GROUP: {
        "protocols": lambda: {
            "group_id": "g",
            "session_timeout": 10_000,
            "rebalance_timeout": 10_000,
            "member_id": "",
            "protocol_type": "consumer",
            "protocols": [{"name": name, "metadata": b""} for name in NAMES[:90_000]],
        },
        "bytes": lambda: {
            "group_id": "g",
            "session_timeout": 10_000,
            "rebalance_timeout": 10_000,
            "member_id": "",
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": bytes(1_000_000)}],
        },
    },
    ApiKey.SYNC_GROUP: {
        "many": lambda: {
            "group_id": "g",
            "generation_id": 1,
            "member_id": "m",
            "protocol_type": "consumer",
            "protocol_name": "range",
            "assignments": [{"member_id": name, "assignment": b""} for name in NAMES[:90_000]],
        }
    },
    ApiKey.HEARTBEAT: {
        "text": lambda: {"group_id": "g" * 30_000, "generation_id": 1, "member_id": "m" * 30_000}
    },
    ApiKey.LEAVE_GROUP: {
        "many": lambda: {
            "group_id": "g",
            "members": [{"member_id": name, "group_instance_id": None} for name in NAMES[:90_000]],
        }
    },
    ApiKey.OFFSET_COMMIT: {
        "many": lambda: {
            "group_id": "g",
            "generation_id_or_member_epoch": -1,
            "member_id": "",
            "topics": [
                {
                    "name": "t",
                    "partitions": [
                        {"partition_index": n, "committed_offset": 1} for n in REPEATED[:50_000]
                    ],
                }
            ],
        }
    },
    ApiKey.OFFSET_FETCH: {
        "groups": lambda: {
            "groups": [{"group_id": name, "topics": None} for name in GROUPS[:80_000]]
        },
        "partitions": lambda: {
            "groups": [{"group_id": "g", "topics": [{"name": "t", "partition_indexes": REPEATED}]}]
        },
    },
    ApiKey.OFFSET_DELETE: {
        "many": lambda: {
            "group_id": "g",
            "topics": [{"name": "t", "partitions": [{"partition_index": n} for n in REPEATED]}],
        }
    },
    ApiKey.DESCRIBE_GROUPS: {
        "many": lambda: {"groups": GROUPS[:99_000]},
        "equal": lambda: {"groups": ["g"] * 99_000},
    },
    ApiKey.LIST_GROUPS: {
        "states": lambda: {"states_filter": NAMES[:90_000], "types_filter": []},
        "types": lambda: {"states_filter": [], "types_filter": NAMES[:90_000]},
    },
    ApiKey.DELETE_GROUPS: {"many": lambda: {"groups_names": GROUPS[:99_000]}},
    ApiKey.DESCRIBE_ACLS: {"all": lambda: FILTER},
    ApiKey.CREATE_ACLS: {
        "many": lambda: {
            "creations": [
                {
                    "resource_type": 2,
                    "resource_name": name,
                    "principal": "User:x",
                    "host": "*",
                    "operation": 3,
                    "permission_type": 3,
                }
                for name in NAMES[:40_000]
            ]
        }
    },
    ApiKey.DELETE_ACLS: {"many": lambda: {"filters": [FILTER] * 90_000}},
}
NUMBERS = range(90_000)


def produce_body(name: str, count: int) -> bytes:
    parts = [ProducePartition(n % PARTITIONS, None) for n in range(count)]
    request = ProduceRequest(None, 1, 1000, [ProduceTopic(name, None, parts)])
    return b"".join(bytes(piece) for piece in encode_produce_request(9, request))


def fetch_body(name: str, count: int) -> bytes:
    parts = [FetchPartition(n % PARTITIONS, fetch_offset=0) for n in range(count)]
    request = FetchRequest(topics=[FetchTopic(name, None, parts)], max_wait_ms=0)
    return encode_fetch_request(12, request)


BODIES: dict[tuple[ApiKey, str], tuple[int, Callable[[], bytes]]] = {
    (ApiKey.PRODUCE, "known"): (9, lambda: produce_body("t", 9_990)),
    (ApiKey.PRODUCE, "unknown"): (9, lambda: produce_body("u", 9_990)),
    (ApiKey.FETCH, "known"): (12, lambda: fetch_body("t", 30_000)),
    (ApiKey.FETCH, "unknown"): (12, lambda: fetch_body("u", 30_000)),
}
for api, kinds in ROWS.items():
    for kind, fields in kinds.items():
        version = ANNOUNCED[api][1]
        BODIES[api, kind] = (
            version,
            lambda api=api, version=version, fields=fields: encode_request(api, version, fields()),  # type: ignore[misc]
        )
