"""A broker dies for good, and its replicas are made again on the others, under load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.live.harness import Cluster, Node, wait_until
from tests.live.load import Load, create_topic

pytestmark = [pytest.mark.live, pytest.mark.slow]


def _voters(node: Node, topic: str) -> list[list[int]]:
    rows: list[dict[str, Any]] = node.get("/status")["partitions"]
    return [sorted(row["voters"]) for row in rows if row["topic"] == topic]


def _events(cluster: Cluster, name: str) -> list[dict[str, Any]]:
    lines = (line for n in cluster.nodes.values() for line in n.log_path.read_text().splitlines())
    told = [json.loads(line) for line in lines if line.startswith("{")]
    return [row for row in told if row.get("event") == name]


def test_a_dead_brokers_replicas_are_made_again_on_the_others(tmp_path: Path) -> None:
    after_ms = 3_000
    with Cluster(tmp_path, 4, voters=4, defaults={"replica.replace.after.ms": after_ms}) as cluster:
        create_topic(cluster.bootstrap, "t", partitions=3)
        with Load(cluster.bootstrap, "t", 3, rate=1000) as load:
            load.wait_for(1000)
            cluster[3].kill()
            load.wait_for(1000, 90)
            wait_until(
                lambda: _voters(cluster[1], "t") == [[1, 2, 4]] * 3, 120, "three live replicas"
            )
            load.wait_for(1000, 90)
            # Each has three: one more may go.
            cluster[2].kill()
            load.wait_for(1000, 90)
        load.reckon(cluster[4].address).check()
        assert _events(cluster, "dead broker replaced")[0]["broker"] == 3
        begun = _events(cluster, "move begun")
        assert {row["origin"] for row in begun} == {"repair"}
        assert all(3 in row["before"] and 3 not in row["after"] for row in begun)
        cluster[2].start()
        cluster[3].start()
        for number in (2, 3):
            cluster[number].wait_ready()
        wait_until(lambda: _voters(cluster[3], "t") == [], 60, "it holds nothing")
        wait_until(
            lambda: list(cluster[3].data.glob("topics/*/*")) == [], 60, "its data is deleted"
        )
        load.reckon(cluster[3].address).check()


def test_a_drain_outlives_its_controllers(tmp_path: Path) -> None:
    with Cluster(tmp_path, 5, voters=5, settings={"replica_moves_max": 1}) as cluster:
        create_topic(cluster.bootstrap, "t", partitions=12)
        first = cluster[1].get("/nodes")["controller_id"]
        drained = next(n for n in cluster.nodes if n != first)
        with Load(cluster.bootstrap, "t", 12, rate=1000) as load:
            load.wait_for(1000)
            begun = cluster.run("node", "drain", str(drained), "--no-wait")
            assert begun.returncode == 0, begun.stdout + begun.stderr
            wait_until(lambda: _events(cluster, "move begun"), 60, "a move")
            cluster[first].kill()
            load.wait_for(1000, 90)
            cluster[first].start()
            cluster[first].wait_ready()
            done = cluster.run("node", "drain", str(drained), timeout_s=180)
            assert done.returncode == 0, done.stdout + done.stderr
            load.wait_for(1000, 90)
            rows = cluster[first].get("/leaders")["partitions"]
            assert all(drained not in row["replicas"] for row in rows)
            assert all(len(row["replicas"]) == 3 for row in rows)
            assert all(row["leader"] != drained for row in rows)
        load.reckon(cluster[first].address).check()
        begun_moves = [row for row in _events(cluster, "move begun") if row["origin"] == "drain"]
        assert all(drained not in row["after"] for row in begun_moves)
        assert len({row["node"] for row in begun_moves}) > 1, "another controller went on"
