"""A node that is gone for good is replaced under load; a lost majority is given up by an operator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.live.harness import Cluster, wait_until
from tests.live.load import Load, create_topic


def _voters(cluster: Cluster, asked: int) -> list[int]:
    nodes: list[dict[str, Any]] = cluster[asked].get("/nodes")["nodes"]
    return [node["node_id"] for node in nodes if node["role"] == "voter"]


@pytest.mark.slow
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
            cluster[1].wipe()
            load.wait_for(1000, 60)
            wait_until(lambda: _state(cluster, 2, 1) == "fenced", 30, "node 1 is fenced")
            dry = cluster.run("node", "replace", "1", "4", "--dry-run")
            assert dry.returncode == 0, dry.stderr
            assert "voters 2,3,4, 3 of 3 live, quorum 2" in dry.stdout
            done = cluster.run("node", "replace", "1", "4", timeout_s=180)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "done: node 4 has taken the place of node 1" in done.stdout
            load.wait_for(1000, 60)
            again = cluster.run("node", "replace", "1", "4")
            assert again.returncode == 0, again.stderr
            assert _voters(cluster, 2) == [2, 3, 4]
            cluster[2].kill()
            load.wait_for(1000, 60)
        load.reckon(f"127.0.0.1:{cluster[4].client_port}").check()
        status = cluster[4].get("/status")
        assert {tuple(p["voters"]) for p in status["partitions"]} == {(2, 3, 4)}
        nodes = json.loads(cluster.run("node", "list", "--json").stdout)
        assert [node["NodeId"] for node in nodes] == [2, 3, 4]


def _state(cluster: Cluster, asked: int, node_id: int) -> str:
    nodes = cluster[asked].get("/nodes")["nodes"]
    return str(next(node["state"] for node in nodes if node["node_id"] == node_id))
