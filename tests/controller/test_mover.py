"""Moves through controllers: dead brokers, drains and maintenance, settings, new terms, logs."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from raftmq.controller.mover import replace_after_ms
from raftmq.controller.moves import Figures
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import (
    AlterConfigsCall,
    ConfigOperation,
    ConfigResource,
    CreateTopicsCall,
    NewTopic,
)
from raftmq.metadata.commands import ChangeNodes, FeatureUpdate, NodeChange, NodeState, Origin
from raftmq.metadata.config_keys import MOVES_MAX, REPLACE_AFTER
from raftmq.metadata.configs import check_broker_configs
from raftmq.metadata.image import RAFTMQ_LEVEL, PartitionImage
from raftmq.types import NodeId
from tests.controller.metadata_cluster import CLIENT, MetadataCluster

LEVEL_4 = (FeatureUpdate(RAFTMQ_LEVEL, 4),)
AFTER_MS = 3_000


def formed(partitions: int = 3, *, level: int = 4, **static: str) -> MetadataCluster:
    """Four nodes, the fourth with nothing on it; partitions on the first three."""
    cluster = MetadataCluster.formed(
        3, first_levels=(FeatureUpdate(RAFTMQ_LEVEL, level),), static=static
    )
    cluster.auto_lead = True
    topic = NewTopic(name="t", partitions=partitions, replication_factor=3)
    created = cluster.nodes[2].control.call(CreateTopicsCall(topics=(topic,)), CLIENT)
    cluster.run(300)
    assert created.result()[0].code is ErrorCode.NONE
    cluster.start(4)
    cluster.run(1_000)
    change(cluster, 4, NodeState.ACTIVE)
    return cluster


def change(cluster: MetadataCluster, number: int, state: NodeState) -> None:
    image = cluster.nodes[1].engine.image
    if image.level >= 4:
        command = ChangeNodes(changes=(NodeChange(NodeId(number), state),))
        controller = cluster.leader
        assert controller is not None
        done = cluster.nodes[controller].engine.propose(command)
        cluster.run(50)
        assert done.error is None


def alter(cluster: MetadataCluster, name: str, value: str) -> None:
    resource = ConfigResource(
        resource_type=4, resource_name="", operations=(ConfigOperation(name, 0, value),)
    )
    done = cluster.nodes[2].control.call(AlterConfigsCall(resources=(resource,)), CLIENT)
    cluster.run(200)
    assert done.result()[0].code is ErrorCode.NONE, done.result()


def partitions(cluster: MetadataCluster) -> tuple[PartitionImage, ...]:
    return cluster.nodes[1].engine.image.topics["t"].partitions


def holders(cluster: MetadataCluster) -> list[list[int]]:
    return [sorted(partition.voters) for partition in partitions(cluster)]


def events(logs: list[Any], name: str) -> list[Any]:
    return [line for line in logs if line["event"] == name]


# ---- dead brokers ----


def test_a_dead_broker_is_replaced_after_the_set_time() -> None:
    cluster = formed(**{REPLACE_AFTER: str(AFTER_MS)})
    with capture_logs() as logs:
        cluster.kill(3)
        cluster.run(AFTER_MS)
        assert holders(cluster) == [[1, 2, 3]] * 3, "it has been known to be down for less"
        cluster.run(4_000)
    assert holders(cluster) == [[1, 2, 4]] * 3
    assert all(partition.origin is Origin.NONE for partition in partitions(cluster))
    [line] = events(logs, "dead broker replaced")
    assert (line["broker"], line["replicas"]) == (3, 3)
    begun = events(logs, "move begun")
    assert [(row["origin"], row["topic"]) for row in begun] == [("repair", "t")] * 3


def test_below_the_level_of_moves_nobody_is_replaced() -> None:
    cluster = formed(level=3, **{REPLACE_AFTER: "1000"})
    cluster.kill(3)
    cluster.run(6_000)
    assert holders(cluster) == [[1, 2, 3]] * 3


@pytest.mark.parametrize("value", ["off", "-1"])
def test_it_can_be_switched_off_and_on_again(value: str) -> None:
    cluster = formed(**{REPLACE_AFTER: "1000"})
    alter(cluster, REPLACE_AFTER, value)
    cluster.kill(3)
    cluster.run(6_000)
    assert holders(cluster) == [[1, 2, 3]] * 3
    alter(cluster, REPLACE_AFTER, "1000")
    cluster.run(1_000)
    assert holders(cluster) == [[1, 2, 4]] * 3


def test_the_time_begins_anew_with_a_new_controller() -> None:
    cluster = formed(**{REPLACE_AFTER: str(AFTER_MS)})
    cluster.kill(3)
    cluster.run(2_000 + AFTER_MS - 500)
    cluster.elect(2)
    cluster.run(AFTER_MS - 500)
    assert holders(cluster) == [[1, 2, 3]] * 3
    cluster.run(1_500)
    assert holders(cluster) == [[1, 2, 4]] * 3


def test_two_dead_brokers_are_not_replaced_and_that_is_said_once() -> None:
    cluster = MetadataCluster.formed(
        5, first_levels=LEVEL_4, static={REPLACE_AFTER: "1000"}, racks={4: "d"}
    )
    cluster.auto_lead = True
    topic = NewTopic(name="t", partitions=5, replication_factor=4)
    cluster.nodes[1].control.call(CreateTopicsCall(topics=(topic,)), CLIENT)
    cluster.run(300)
    before = holders(cluster)
    with capture_logs() as logs:
        cluster.kill(4)
        cluster.kill(5)
        cluster.run(6_000)
    assert holders(cluster) == before
    [line] = events(logs, "dead brokers not replaced")
    assert line["reason"] == "nodes 4,5 are down (racks d), more than one"
    cluster.start(4)
    cluster.run(1_000)
    assert {n for nodes in holders(cluster) for n in nodes} == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("storage", "is_back"), [(103, True), (999, False)], ids=["with its data", "empty"]
)
def test_a_broker_that_comes_back_meanwhile(storage: int, is_back: bool) -> None:
    cluster = formed(**{REPLACE_AFTER: "1000"})
    cluster.kill(3)
    cluster.run(1_500)
    cluster.auto_lead = False  # leaders do nothing from now on
    with capture_logs() as logs:
        cluster.run(2_500)
        assert all(4 in partition.replicas for partition in partitions(cluster))
        cluster.start(3, storage)
        cluster.run(2_000)
    wanted = 3 if is_back else 4
    assert [sorted(p.replicas) for p in partitions(cluster)] == [[1, 2, wanted]] * 3
    assert len(events(logs, "move cancelled")) == (3 if is_back else 0)


# ---- bounds ----


def test_the_bound_is_altered_at_run_time() -> None:
    cluster = formed(partitions=9)
    alter(cluster, MOVES_MAX, "2")
    cluster.auto_lead = False
    change(cluster, 1, NodeState.DRAINING)
    cluster.run(500)
    mover = cluster.nodes[1].control.controller.mover
    assert mover.figures()[Origin.DRAIN] == Figures(running=2, planned=7)
    alter(cluster, MOVES_MAX, "5")
    assert mover.figures()[Origin.DRAIN] == Figures(running=5, planned=4)


@pytest.mark.parametrize(
    ("name", "value"), [(MOVES_MAX, "0"), (REPLACE_AFTER, "never"), (REPLACE_AFTER, "-2")]
)
def test_what_settings_refuse(name: str, value: str) -> None:
    with pytest.raises(KafkaError, match=name):
        check_broker_configs({name: value})


def test_settings_that_say_never() -> None:
    assert [replace_after_ms(text) for text in (None, "OFF", "-1", "0")] == [None, None, None, 0]


# ---- leaderships ----


def test_leaderships_leave_a_broker_in_maintenance_and_come_back() -> None:
    cluster = formed(partitions=6)
    cluster.run(10_000)
    controller = cluster.nodes[1]
    led = [p for p in partitions(cluster) if p.preferred_leader == 2]
    cluster.auto_lead = False
    cluster.nodes[2].moves.clear()
    change(cluster, 2, NodeState.MAINTENANCE)
    cluster.run(1_500)
    asked = cluster.nodes[2].moves
    assert sorted(index for _, index, _ in asked) == [p.index for p in led]
    assert {to for _, _, to in asked} == {1, 3}, "evenly"
    cluster.run(2_500)
    assert len(asked) == 2 * len(led), "asked again: it leads still"
    image = controller.engine.image
    for topic_id, index, to in asked[: len(led)]:
        cluster.nodes[to].control.partition_led(
            topic_id,
            index,
            leader_epoch=2,  # type: ignore[arg-type]
            isr=[cluster.nodes[n].self_id for n in (1, 2, 3)],
            voters=[cluster.nodes[n].self_id for n in (1, 2, 3)],
            seen_version=int(image.version),
            creation_epoch=image.topics["t"].partitions[index].creation_epoch,
        )
    asked.clear()
    cluster.run(15_000)
    assert not any(to == 2 for n in (1, 3) for _, _, to in cluster.nodes[n].moves)
    change(cluster, 2, NodeState.ACTIVE)
    cluster.run(15_000)
    back = [index for n in (1, 3) for _, index, to in cluster.nodes[n].moves if to == 2]
    assert sorted(set(back)) == [p.index for p in led]
