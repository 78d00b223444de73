"""A client that asks for everything that others have no use for, so that every handler is visited.

Answers are decoded and otherwise not judged: what matters is that no question, asked at whatever
moment, costs more than its own answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jepsen_like.cluster.kafka import Kafka, Lost
from raftmq.protocol import ApiKey

if TYPE_CHECKING:
    from jepsen_like.cluster.world import ClusterWorld

TOPIC = "t0"
GROUP = "g"
_PARTITION = {"topics": [{"name": TOPIC, "partition_indexes": [0]}]}


def _sights(now_ms: float) -> list[tuple[ApiKey, dict[str, Any]]]:
    time = 1_700_000_000_000 + int(now_ms) - 500
    wanted = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": time}
    return [
        (
            ApiKey.API_VERSIONS,
            {"client_software_name": "sim", "client_software_version": "1"},
        ),
        (
            ApiKey.LIST_OFFSETS,
            {
                "replica_id": -1,
                "isolation_level": 0,
                "topics": [{"name": TOPIC, "partitions": [wanted]}],
            },
        ),
        (
            ApiKey.OFFSET_FOR_LEADER_EPOCH,
            {
                "replica_id": -1,
                "topics": [
                    {
                        "topic": TOPIC,
                        "partitions": [
                            {"partition": 0, "current_leader_epoch": -1, "leader_epoch": 1}
                        ],
                    }
                ],
            },
        ),
        (
            ApiKey.DESCRIBE_CONFIGS,
            {
                "resources": [
                    {"resource_type": 2, "resource_name": TOPIC, "configuration_keys": None}
                ],
                "include_synonyms": True,
                "include_documentation": False,
            },
        ),
    ]


def _wishes() -> list[tuple[ApiKey, dict[str, Any]]]:
    return [
        (
            ApiKey.INCREMENTAL_ALTER_CONFIGS,
            {
                "resources": [
                    {
                        "resource_type": 2,
                        "resource_name": TOPIC,
                        "configs": [
                            {"name": "index.interval.bytes", "config_operation": 0, "value": "300"}
                        ],
                    }
                ],
                "validate_only": False,
            },
        ),
        (
            ApiKey.CREATE_PARTITIONS,
            {
                "topics": [{"name": "set-0", "count": 2, "assignments": None}],
                "timeout": 500,
                "validate_only": False,
            },
        ),
        (ApiKey.DESCRIBE_GROUPS, {"groups": [GROUP], "include_authorized_operations": False}),
        (ApiKey.LIST_GROUPS, {"states_filter": []}),
        (ApiKey.DESCRIBE_CLUSTER, {"include_cluster_authorized_operations": False}),
        (
            ApiKey.DESCRIBE_QUORUM,
            {
                "topics": [
                    {"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}
                ]
            },
        ),
        (
            ApiKey.ELECT_LEADERS,
            {
                "election_type": 0,
                "topic_partitions": [{"topic": TOPIC, "partitions": [0]}],
                "timeout": 500,
            },
        ),
        (ApiKey.DESCRIBE_PRODUCERS, _PARTITION),
        (ApiKey.LIST_PARTITION_REASSIGNMENTS, {"timeout": 500, **_PARTITION}),
        (
            ApiKey.DESCRIBE_TOPIC_PARTITIONS,
            {"topics": [{"name": TOPIC}], "response_partition_limit": 10, "cursor": None},
        ),
        (
            ApiKey.OFFSET_DELETE,
            # Of a topic that no member reads, so that nobody's position is lost.
            {
                "group_id": GROUP,
                "topics": [{"name": "set-0", "partitions": [{"partition_index": 0}]}],
            },
        ),
    ]


class Tourist:
    """One process that goes round."""

    def __init__(self, world: ClusterWorld, process: int) -> None:
        self._world = world
        self._kafka = Kafka(world, process)

    async def run(self) -> None:
        """Ask until the world is quiet."""
        world, kafka = self._world, self._kafka
        while not world.is_quiet:
            api, fields = kafka.random.choice([*_sights(world.now_ms), *_wishes()])
            try:
                await kafka.ask(kafka.any_node(), api, **fields)
            except Lost:
                await kafka.pause()
            await kafka.sleep(kafka.random.uniform(20.0, 200.0))
        kafka.hang_up()
