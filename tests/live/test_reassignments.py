"""Moves by Kafka's protocol under load, to and fro, while controllers are killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from raftmq.errors import ErrorCode
from raftmq_client import Admin, TopicPartition
from tests.live.harness import Cluster, wait_until
from tests.live.load import Load

pytestmark = [pytest.mark.live, pytest.mark.slow]

COUNT = 6
KEYS = [TopicPartition("t", index) for index in range(COUNT)]


def _kill_controller(cluster: Cluster) -> None:
    """End it, and let it come back."""
    live = cluster.live
    told = [node.get("/nodes")["controller_id"] for node in live]
    cluster[next(one for one in told if one is not None)].kill()
    cluster.bring_back()


def _wait_still(cluster: Cluster) -> dict[TopicPartition, tuple[int, ...]]:
    """The replicas, once nothing moves any more."""
    with Admin(cluster.bootstrap, timeout_ms=60_000) as admin:
        wait_until(lambda: not admin.list_partition_reassignments(), 180, "all have moved")
        wait_until(
            lambda: all(
                sorted(part.in_sync) == sorted(part.replicas)
                for part in admin.topic("t").partitions
            ),
            120,
            "all are in sync",
        )
        return {
            TopicPartition("t", part.partition): tuple(part.replicas)
            for part in admin.topic("t").partitions
        }


def test_moves_outlive_their_controllers_and_cancel_is_exact(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3) as cluster:
        stock = AdminClient({"bootstrap.servers": cluster.bootstrap})
        new = NewTopic("t", COUNT, replica_assignment=[[1, 2]] * COUNT)
        stock.create_topics([new])["t"].result(60)
        with Load(cluster.bootstrap, "t", COUNT, rate=500) as load:
            load.wait_for(500)
            with Admin(cluster.bootstrap, timeout_ms=60_000) as admin:
                told = admin.alter_partition_reassignments(dict.fromkeys(KEYS, (3, 2)))
                assert set(told.values()) == {None}
            _kill_controller(cluster)
            assert _wait_still(cluster) == dict.fromkeys(KEYS, (3, 2))
            load.wait_for(500, 120)
            with Admin(cluster.bootstrap, timeout_ms=60_000) as admin:
                admin.alter_partition_reassignments(dict.fromkeys(KEYS, (1, 3)))
                cancelled = admin.alter_partition_reassignments(dict.fromkeys(KEYS[::2]))
            _kill_controller(cluster)
            wanted = dict.fromkeys(KEYS, (1, 3))
            for key, error in cancelled.items():
                if error is None:
                    wanted[key] = (3, 2)
                else:
                    assert error.code is ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, "it was quicker"
            assert _wait_still(cluster) == wanted
            load.wait_for(500, 120)
        load.reckon(cluster.bootstrap).check()
