"""A node gone for good is replaced under load; a lost majority is given up by an operator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.live.harness import Cluster, Node, wait_until
from tests.live.load import Load, create_topic

pytestmark = [pytest.mark.live, pytest.mark.slow]


def _voters(cluster: Cluster, asked: int) -> list[int]:
    nodes: list[dict[str, Any]] = cluster[asked].get("/nodes")["nodes"]
    return [node["node_id"] for node in nodes if node["role"] == "voter"]


def test_a_node_gone_for_good_is_replaced_under_load(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3) as cluster:
        create_topic(cluster.bootstrap, "t", partitions=6)
        cluster.add_node()
        refused = cluster.run("node", "replace", "1", "4")
        assert refused.returncode == 1
        assert "node 1 is alive" in refused.stderr
        unknown = cluster.run("node", "replace", "1", "5")
        assert "node 5 has not joined" in unknown.stderr
        with Load(cluster.bootstrap, "t", 6, rate=1500) as load:
            load.wait_for(1000)
            cluster[1].kill()
            load.wait_for(1000, 90)
            wait_until(lambda: _state(cluster, 2, 1) == "fenced", 60, "node 1 is fenced")
            dry = cluster.run("node", "replace", "1", "4", "--dry-run")
            assert dry.returncode == 0, dry.stderr
            assert "voters 2,3,4, 3 of 3 live, quorum 2" in dry.stdout
            done = cluster.run("node", "replace", "1", "4", timeout_s=180)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "done: node 4 has taken the place of node 1" in done.stdout
            load.wait_for(1000, 90)
            again = cluster.run("node", "replace", "1", "4")
            assert again.returncode == 0, again.stderr
            assert _voters(cluster, 2) == [2, 3, 4]
            cluster[2].kill()
            load.wait_for(1000, 90)
        load.reckon(f"127.0.0.1:{cluster[4].client_port}").check()
        status = cluster[4].get("/status")
        assert {tuple(p["voters"]) for p in status["partitions"]} == {(2, 3, 4)}
        nodes = json.loads(cluster.run("node", "list", "--json").stdout)
        assert [node["NodeId"] for node in nodes] == [2, 3, 4]
        cluster[2].start()
        cluster[2].wait_ready()
        cluster[1].start()
        assert cluster[1].wait_end() == 1, "it would wait for ever"
        assert "was replaced by node 4 (`raftmq node replace 1 4`)" in cluster[1].log_tail()
        shown = cluster.run("cluster", "status").stdout
        assert "raftmq node replace 1 4" in " ".join(shown.split())


def _state(cluster: Cluster, asked: int, node_id: int) -> str:
    nodes = cluster[asked].get("/nodes")["nodes"]
    return str(next(node["state"] for node in nodes if node["node_id"] == node_id))


def test_a_lost_majority_is_given_up_and_said_truly(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3) as cluster:
        create_topic(cluster.bootstrap, "t", partitions=3)
        create_topic(cluster.bootstrap, "single", partitions=3, replicas=1)
        with Load(cluster.bootstrap, "t", 3, rate=1000) as load:
            load.wait_for(1500)
        survivor = cluster[1]
        running = cluster.run("recover", "--unsafe", "--data", str(survivor.data), "--yes")
        assert running.returncode == 1
        assert "in use by another process" in running.stderr
        for node_id in (2, 3):
            cluster[node_id].kill()
            cluster[node_id].wipe()
        survivor.terminate()
        words = ("recover", "--unsafe", "--data", str(survivor.data))
        majority = cluster.run(*words, "--survivors", "1,2", "--yes")
        assert majority.returncode == 1
        assert "start them instead" in majority.stderr
        unsaid = cluster.run(*words)
        assert unsaid.returncode == 1
        assert "nothing was changed" in unsaid.stderr
        told = cluster.run(*words, "--yes")
        assert told.returncode == 0, told.stderr
        assert "__cluster_metadata: voters 1,2,3 -> 1" in told.stdout
        ends = {
            partition: f"has offsets [0, {len(load.acknowledged[partition])})"
            for partition in range(3)
        }
        for partition, end in ends.items():
            lines = told.stdout.splitlines()
            at = next(i for i, line in enumerate(lines) if f" t-{partition}: voters" in line)
            assert end in lines[at + 1], told.stdout
        assert "2 partitions had no replica on a survivor" in told.stdout
        survivor.start()
        survivor.wait_ready()
        # Lost nodes are fenced first: until then theirs might come back.
        wait_until(lambda: len(survivor.get("/status")["unheld"]) == 2, 60, "two are named")
        shown = " ".join(cluster.run("cluster", "status").stdout.split())
        assert "none of which is up" in shown
        assert "`raftmq topic delete single`" in shown
        load.reckon(f"127.0.0.1:{survivor.client_port}").check()
        added = cluster.add_node()
        grown = cluster.run("node", "add", str(added.node_id), "--no-wait")
        assert grown.returncode == 0, grown.stdout + grown.stderr
        wait_until(lambda: _voters(cluster, 1) == [1, 4], 60, "voters are made up for")
        done = cluster.run("node", "replace", "2", str(added.node_id), "--wait", "5")
        assert done.returncode == 3, "a partition has no leader: it cannot end"
        assert "4 partition replicas go from node 2 to node 4" in done.stdout
        assert "1 have no leader (single-" in done.stdout
        wait_until(lambda: _holders(survivor, "t") == {(1, 4)}, 60, "it holds the partitions")
        with Load(f"127.0.0.1:{survivor.client_port}", "t", 3, rate=1000) as more:
            more.wait_for(500)


def _holders(node: Node, topic: str) -> set[tuple[int, ...]]:
    partitions = node.get("/status")["partitions"]
    return {tuple(p["voters"]) for p in partitions if p["topic"] == topic}


@pytest.mark.soak
def test_a_live_node_is_emptied_under_load_and_forgotten(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3) as cluster:
        create_topic(cluster.bootstrap, "t", partitions=6)
        cluster.add_node()
        old = cluster[1].get("/nodes")["controller_id"]
        with Load(cluster.bootstrap, "t", 6, rate=1000) as load:
            load.wait_for(1000)
            done = cluster.run("node", "replace", str(old), "4", "--even-if-alive")
            assert done.returncode == 0, done.stdout + done.stderr
            assert f"node {old} holds nothing any more" in done.stdout
            load.wait_for(500, 90)
            # The command ends once the metadata names that node nowhere; its orders come after.
            wait_until(lambda: cluster[old].get("/status")["partitions"] == [], 60, "it is empty")
            folders = cluster[old].data / "topics"
            wait_until(lambda: not list(folders.glob("*/*")), 60, "all is deleted by order")
            assert cluster[old].terminate() == 0
            again = cluster.run("node", "replace", str(old), "4")
            assert again.returncode == 0, again.stderr
            assert f"done: node 4 has taken the place of node {old}" in again.stdout
            load.wait_for(500, 90)
        load.reckon(f"127.0.0.1:{cluster[4].client_port}").check()
        assert _voters(cluster, 4) == [n for n in (1, 2, 3, 4) if n != old]
