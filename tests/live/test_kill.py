"""kill -9 of whatever hurts most, under load: nothing acknowledged is missing, nothing twice.

One cluster serves all tests; each has a topic of its own and finds all nodes ready.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import confluent_kafka
import pytest

from tests.live.harness import Cluster, wait_until
from tests.live.load import Load, create_topic, in_sync, leaders

pytestmark = [pytest.mark.live, pytest.mark.slow]


GAP_MS_MAX = 10_000
"""Only that somebody takes over at all; how soon on a quiet machine is the benchmark's matter."""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("kill")) as cluster:
        yield cluster


@pytest.fixture
def cluster(three: Cluster) -> Cluster:
    three.bring_back()
    return three


def controller_id(cluster: Cluster) -> int:
    """Who leads the metadata group, as a live node tells it."""
    return int(
        wait_until(
            lambda: next(
                (c for n in cluster.live if (c := n.get("/status").get("controller_id", -1)) >= 0),
                None,
            ),
            60,
        )
    )


@pytest.mark.parametrize("victim", ["leader", "follower", "controller"])
def test_one_node_killed(cluster: Cluster, unique: str, victim: str) -> None:
    create_topic(cluster.bootstrap, unique, 1, min_insync_replicas="2")
    with Load(cluster.bootstrap, unique, 1) as load:
        load.wait_for(500)
        leader = leaders(cluster.bootstrap, unique)[0]
        if victim == "leader":
            chosen = leader
        elif victim == "controller":
            chosen = controller_id(cluster)
        else:
            chosen = next(n for n in cluster.nodes if n != leader)
        cluster[chosen].kill()
        load.wait_for(500)
        cluster[chosen].start()
        cluster[chosen].wait_ready()
        load.wait_for(500)
        wait_until(
            lambda: in_sync(cluster.bootstrap, unique)[0] == {1, 2, 3}, 60, "three of three in sync"
        )
    reckoning = load.reckon()
    reckoning.check()
    assert reckoning.gap_ms_max < GAP_MS_MAX


def test_leader_and_controller_in_one_killed(cluster: Cluster, unique: str) -> None:
    partitions = 3
    create_topic(cluster.bootstrap, unique, partitions, min_insync_replicas="2")
    chosen = controller_id(cluster)
    wait_until(
        lambda: chosen in leaders(cluster.bootstrap, unique).values(), 60, "leaders spread over all"
    )
    with Load(cluster.bootstrap, unique, partitions) as load:
        load.wait_for(500)
        cluster[chosen].kill()
        load.wait_for(1500)
    load.reckon().check()


def test_all_nodes_killed_and_restarted(cluster: Cluster, unique: str) -> None:
    partitions = 4
    create_topic(cluster.bootstrap, unique, partitions)
    with Load(cluster.bootstrap, unique, partitions, rate=5000) as load:
        load.wait_for(3000)
        for node in cluster.nodes.values():
            node.signal(signal.SIGKILL)
        for node in cluster.nodes.values():
            node.wait_end()
        for node in cluster.nodes.values():
            node.start()
        for node in cluster.nodes.values():
            node.wait_ready()
        load.wait_for(1000)
    load.reckon().check()


def test_producers_survive_many_elections(cluster: Cluster, unique: str) -> None:
    create_topic(cluster.bootstrap, unique, 1, min_insync_replicas="2")
    with Load(cluster.bootstrap, unique, 1) as load:
        for _ in range(5):
            load.wait_for(100)
            leader = leaders(cluster.bootstrap, unique)[0]
            cluster[leader].kill()
            load.wait_for(100)
            cluster[leader].start()
            cluster[leader].wait_ready()
    load.reckon().check()
    assert load.errors == []


def test_frozen_node(cluster: Cluster, unique: str) -> None:
    """SIGSTOP: others go on; the sleeper leaves the ISR and comes back."""
    create_topic(cluster.bootstrap, unique, 1, min_insync_replicas="2")
    # A client waits for a broker's answer as long as it was told to: by default half a minute.
    impatient = {"request.timeout.ms": 500, "socket.timeout.ms": 1000}
    with Load(cluster.bootstrap, unique, 1, **impatient) as load:
        load.wait_for(300)
        leader = leaders(cluster.bootstrap, unique)[0]
        cluster[leader].signal(signal.SIGSTOP)
        try:
            load.wait_for(300)
            others = ",".join(
                f"{n.host}:{n.client_port}" for n in cluster.live if n.node_id != leader
            )
            wait_until(
                lambda: leader not in in_sync(others, unique)[0], 60, "the sleeper leaves the ISR"
            )
        finally:
            cluster[leader].signal(signal.SIGCONT)
        wait_until(lambda: in_sync(others, unique)[0] == {1, 2, 3}, 60, "the sleeper is back")
        load.wait_for(300)
    load.reckon().check()


def test_group_goes_on_when_its_coordinator_dies(cluster: Cluster, unique: str) -> None:
    create_topic(cluster.bootstrap, unique, 2)
    with Load(cluster.bootstrap, unique, 2, rate=300) as load:
        load.wait_for(200)
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": cluster.bootstrap,
                "group.id": unique,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
            }
        )
        consumer.subscribe([unique])
        seen = 0

        def poll_and_commit(more: int) -> None:
            nonlocal seen
            goal = seen + more

            def step() -> bool:
                nonlocal seen
                found = [m for m in consumer.consume(100, 0.2) if m.error() is None]
                seen += len(found)
                return seen >= goal

            wait_until(step, 90, f"{more} more records for the group")
            wait_until(lambda: commits(consumer), 60, "a commit")

        def commits(member: confluent_kafka.Consumer) -> bool:
            try:
                member.commit(asynchronous=False)
            except confluent_kafka.KafkaException:
                return False
            return True

        poll_and_commit(100)
        group = wait_until(lambda: cluster[1].get("/status")["groups"].get(unique))
        coordinator = group["coordinator"]
        cluster[coordinator].kill()
        poll_and_commit(200)
        consumer.close()
    load.reckon().check()
