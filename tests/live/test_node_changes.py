"""Nodes come, drain, rest and go under load; the metadata voters become five and three again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.live.harness import Cluster, wait_until
from tests.live.load import Load, create_topic

pytestmark = [pytest.mark.live, pytest.mark.slow]


def _nodes(cluster: Cluster, asked: int) -> dict[int, dict[str, Any]]:
    return {node["node_id"]: node for node in cluster[asked].get("/nodes")["nodes"]}


def _voters(cluster: Cluster, asked: int) -> list[int]:
    return [n for n, node in _nodes(cluster, asked).items() if node["role"] == "voter"]


def _holders(cluster: Cluster, asked: int) -> set[int]:
    rows = cluster[asked].get("/leaders")["partitions"]
    return {node_id for row in rows for node_id in row["replicas"]}


def test_a_node_comes_and_another_one_goes_under_load(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3) as cluster:
        create_topic(cluster.bootstrap, "t", partitions=6)
        cluster.add_node()
        create_topic(cluster.bootstrap, "early", partitions=8)
        assert 4 not in _holders(cluster, 1), "it is new"
        assert _nodes(cluster, 2)[4]["node_state"] == "new"
        early = cluster.run("node", "remove", "1")
        assert early.returncode == 1
        for what in ("holds replicas of 14 partitions (", "votes on metadata", "it lives"):
            assert what in early.stderr
        no_place = cluster.run("node", "drain", "1")
        assert no_place.returncode == 1, "of three nodes none can take a third replica"
        assert "early-0" in no_place.stderr
        with Load(cluster.bootstrap, "t", 6, rate=1500) as load:
            load.wait_for(1000)
            dry = cluster.run("node", "add", "4", "--dry-run")
            assert dry.returncode == 0, dry.stderr
            assert "would begin" in dry.stdout
            assert "(replicas: node " in dry.stdout, "each move of its share, and why"
            assert _nodes(cluster, 2)[4]["node_state"] == "new"
            added = cluster.run("node", "add", "4")
            assert added.returncode == 0, added.stdout + added.stderr
            assert "done: node 4 is part of the cluster; metadata voters: 1, 2, 3" in added.stdout
            counts = [node["replicas"] for node in _nodes(cluster, 2).values()]
            assert (sum(counts), max(counts) - min(counts) <= 1) == (42, True), counts
            load.wait_for(500, 90)
            done = cluster.run("node", "drain", "1", timeout_s=300)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "let 4 vote once it has caught up: voters 1,2,3,4" in done.stdout
            assert "done: node 1 is empty; stop it, then `raftmq node remove 1`" in done.stdout
            load.wait_for(500, 90)
            assert _voters(cluster, 2) == [2, 3, 4]
            assert _holders(cluster, 2) == {2, 3, 4}
            wait_until(lambda: not cluster[1].get("/status")["partitions"], 60, "it is deleted")
            alive = cluster.run("node", "remove", "1")
            assert alive.returncode == 1
            assert "node 1 cannot be removed: it lives" in alive.stderr
            assert cluster[1].terminate() == 0
            gone = cluster.run("node", "remove", "1")
            assert gone.returncode == 0, gone.stdout + gone.stderr
            assert "done: node 1 is gone" in gone.stdout
            load.wait_for(500, 90)
        load.reckon(f"127.0.0.1:{cluster[4].client_port}").check()
        listed = json.loads(cluster.run("node", "list", "--json").stdout)
        assert [(node["NodeId"], node["State"]) for node in listed] == [
            (2, "live"),
            (3, "live"),
            (4, "live"),
        ]
        cluster[1].start()
        assert cluster[1].wait_end() == 1, "its storage is refused"
        assert "node 1 was removed from this cluster" in cluster[1].log_tail()
        assert "node 1 was removed" in cluster.run("cluster", "status").stdout
        cluster[1].wipe()
        cluster[1].start()
        cluster[1].wait_ready()
        wait_until(lambda: 1 in _nodes(cluster, 2), 60, "it joins anew")
        assert _nodes(cluster, 2)[1]["node_state"] == "new"
        assert _nodes(cluster, 2)[1]["replicas"] == 0


def test_three_voters_become_five_and_three_again(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3) as cluster:
        create_topic(cluster.bootstrap, "t", partitions=3)
        for _ in range(2):
            cluster.add_node()
        with Load(cluster.bootstrap, "t", 3, rate=500) as load:
            load.wait_for(200)
            added = cluster.run("node", "add", "4", "5")
            assert added.returncode == 0, added.stdout + added.stderr
            assert "voters 1,2,3,4,5, 5 of 5 live, quorum 3" in added.stdout
            assert _voters(cluster, 1) == [1, 2, 3, 4, 5]
            for victim in (1, 4):
                cluster[victim].kill()
            load.wait_for(200, 90)
            for victim in (1, 4):
                cluster[victim].start()
                cluster[victim].wait_ready()
            wait_until(lambda: len(_live(cluster, 3)) == 5, 60, "all are back")
            fewer = cluster.run("cluster", "quorum", "--voters", "3")
            assert fewer.returncode == 0, fewer.stdout + fewer.stderr
            assert "done: metadata voters: 1, 2, 3" in fewer.stdout
            load.wait_for(200, 90)
            odd = cluster.run("cluster", "quorum", "--voters", "4")
            assert odd.returncode == 1
            assert "an odd number from 1 to 9" in odd.stderr
            assert _voters(cluster, 4) == [1, 2, 3], "they stay three"
            told = json.loads(cluster.run("cluster", "quorum", "--json").stdout)
            assert len(told["Replicas"]) == 5
        load.reckon(cluster.bootstrap).check()


def _live(cluster: Cluster, asked: int) -> list[int]:
    return [n for n, node in _nodes(cluster, asked).items() if node["state"] == "live"]


def test_maintenance_takes_leaderships_away_and_gives_them_back(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3) as cluster:
        create_topic(cluster.bootstrap, "t", partitions=6)
        cordoned = cluster.run("node", "cordon", "2")
        assert cordoned.returncode == 0, cordoned.stderr
        create_topic(cluster.bootstrap, "u", partitions=4, replicas=2)
        rows = cluster[1].get("/leaders")["partitions"]
        assert all(2 not in row["replicas"] for row in rows if row["topic"] == "u")
        assert cluster.run("node", "uncordon", "2").returncode == 0
        controller = cluster[1].get("/nodes")["controller_id"]
        with Load(cluster.bootstrap, "t", 6, rate=500) as load:
            load.wait_for(200)
            begun = cluster.run("node", "maintenance", str(controller))
            assert begun.returncode == 0, begun.stdout + begun.stderr
            assert f"done: node {controller} leads and coordinates nothing" in begun.stdout
            asked = 1 if controller != 1 else 2
            told = cluster[asked].get("/nodes")
            assert told["controller_id"] != controller
            assert _nodes(cluster, asked)[controller]["leaders"] == 0
            cluster[controller].kill()
            load.wait_for(200, 90)
            cluster[controller].start()
            cluster[controller].wait_ready()
            state = _nodes(cluster, asked)[controller]["node_state"]
            assert state == "maintenance", "a restart does not end it"
            ended = cluster.run("node", "maintenance", str(controller), "--end")
            assert ended.returncode == 0, ended.stdout + ended.stderr
            wait_until(
                lambda: _nodes(cluster, asked)[controller]["leaders"] >= 2, 90, "they are back"
            )
        load.reckon(cluster.bootstrap).check()
