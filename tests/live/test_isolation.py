"""A broker cut off from the metadata majority, though not from the replicas of what it leads.

Voters of metadata are 1, 2 and 3. Node 4 leads a partition whose other replicas are 5 and 6; it
hears nothing of the voters any more, and they nothing of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey, Struct
from tests.live.harness import Cluster, Node, wait_until
from tests.live.load import Load, leaders
from tests.live.raw import ask

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.soak]

VOTERS = {1, 2, 3}
CUT = 4
HEIRS = [5, 6]
TOPIC = "t"


def create(cluster: Cluster, replicas: list[int]) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    config = {"min.insync.replicas": "2"}
    new = NewTopic(TOPIC, num_partitions=1, replica_assignment=[replicas], config=config)
    admin.create_topics([new])[TOPIC].result(30)
    wait_until(
        lambda: leaders(cluster.bootstrap, TOPIC)[0] == replicas[0], 60, "the preferred leader"
    )


def commit_code(node: Node) -> int:
    """What a coordinator says to a committed offset."""
    part = Struct(
        partition_index=0, committed_offset=1, committed_leader_epoch=-1, committed_metadata=""
    )
    answer = ask(
        node,
        ApiKey.OFFSET_COMMIT,
        8,
        Struct(
            group_id="g",
            generation_id_or_member_epoch=-1,
            member_id="",
            group_instance_id=None,
            topics=[Struct(name=TOPIC, partitions=[part])],
        ),
    )
    return int(answer.topics[0].partitions[0].error_code)


def test_a_broker_that_sees_no_metadata_majority(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=6, voters=3, faults=True) as cluster:
        node = cluster[CUT]
        create(cluster, [CUT, *HEIRS])
        with Load(cluster.bootstrap, TOPIC, 1) as load:
            load.wait_for(100)
            cluster.partition({CUT}, VOTERS)
            wait_until(
                lambda: node.get("/status")["isolation"]["isolated_ms"] > 5_000, 60, "it is cut off"
            )
            assert leaders(cluster[5].address, TOPIC)[0] == CUT, "it leads on for a while"
            load.wait_for(100)
            assert commit_code(node) != ErrorCode.NONE, "the work of a coordinator is refused"
            wait_until(lambda: leaders(cluster[5].address, TOPIC)[0] in HEIRS, 60, "an heir")
            assert node.get("/health")["reason"] == "no majority of the metadata group is seen"
            load.wait_for(100)
            cluster.heal()
            wait_until(lambda: node.get("/health")["status"] == "ok", 60, "it is back")
            load.wait_for(100)
        load.reckon().check()
        assert load.errors == []
