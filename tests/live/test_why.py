"""`raftmq why` on real nodes: what it says is so, and what it advises works."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from tests.live.harness import Cluster, wait_until
from tests.live.load import Load, create_topic, in_sync

pytestmark = [pytest.mark.live, pytest.mark.slow]


def kinds(cluster: Cluster, *what: str) -> dict[str, dict[str, Any]]:
    """Findings by kind; the exit code is as they say."""
    done = cluster.run("why", *what, "--json")
    assert done.returncode in (0, 1), done.stderr
    told = json.loads(done.stdout)
    assert done.returncode == any(one["IsBlocked"] for one in told)
    return {finding["Kind"]: finding for one in told for finding in one["Findings"]}


def test_a_lost_majority_is_explained_and_the_advice_works(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3) as cluster:
        create_topic(cluster.bootstrap, "t", partitions=2)
        with Load(cluster.bootstrap, "t", 2, rate=300) as load:
            load.wait_for(300)
            wait_until(lambda: not kinds(cluster, "t/0"), 60, "nothing blocks it")
            for node_id in (2, 3):
                cluster[node_id].kill()
            wait_until(lambda: "no quorum" in kinds(cluster, "t/0"), 60, "it has no leader")
            shown = cluster.run("why", "t/0").stdout
            assert max(map(len, shown.splitlines())) <= 80
            text = " ".join(shown.split())
            assert "of its voters 1, 2 and 3 (quorum 2) only node 1 is there" in text
            assert "node 2 does not answer (connection refused)" in text
            assert "start node 2 or node 3:" in text
            assert kinds(cluster, "node", "2")["node down"]["Remedy"] == "start it"
            everything = kinds(cluster)
            assert {"no quorum", "node down", "metadata without majority"} <= everything.keys()

            cluster[2].start()
            cluster[2].wait_ready()
            load.wait_for(300)
            wait_until(
                lambda: kinds(cluster, "t/0").keys() == {"replica down"}, 60, "it is led again"
            )
            assert kinds(cluster, "t/0")["replica down"]["Remedy"] == "start node 3"
            cluster[3].start()
            cluster[3].wait_ready()
            load.wait_for(300)
            wait_until(lambda: not kinds(cluster, "t/0"), 60, "nothing blocks it")
            assert cluster.run("why").stdout == "nothing is stuck, and nothing is under way\n"
        load.reckon().check()
        unknown = cluster.run("why", "t/7")
        assert (unknown.returncode, "there is no partition t/7" in unknown.stdout) == (1, True)
        assert cluster.run("why", "t").returncode == 2


def test_what_holds_readers_and_new_replicas_back_is_named(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3) as cluster:
        create_topic(cluster.bootstrap, "t", partitions=1)
        settings = {"bootstrap.servers": cluster.bootstrap, "linger.ms": 0}
        producer = confluent_kafka.Producer({**settings, "transactional.id": "shop-1"})
        producer.init_transactions(60)
        producer.begin_transaction()
        for _ in range(200):
            producer.produce("t", b"x" * 60_000, partition=0)
        assert producer.flush(60) == 0
        held = wait_until(lambda: kinds(cluster, "t/0").get("open transaction"), 30, "it is open")
        assert "stop at offset 0 (high watermark 200): the transaction of 'shop-1'" in held["Text"]
        assert held["Otherwise"] == "raftmq txn abort shop-1"
        aborted = cluster.run("txn", "abort", "shop-1")
        assert aborted.returncode == 0, aborted.stderr
        wait_until(lambda: "open transaction" not in kinds(cluster, "t/0"), 30, "it is not")

        limited = cluster.run("cluster", "config", "set", "replica.catchup.bytes.per.s=400000")
        assert limited.returncode == 0, limited.stderr
        leader = next(n for n in cluster.live if n.get("/status")["partitions"][0]["is_leader"])
        away = next(n for n in cluster.live if n is not leader)
        away.kill()
        away.wipe()
        away.start()
        away.wait_ready()
        behind = wait_until(
            lambda: _held(kinds(cluster, "t/0").get("catching up")), 60, "it catches up"
        )
        assert f"node {away.node_id}" in behind["Text"]
        assert "the limit is 390.6 KiB a second" in behind["Text"]
        (faster,) = behind["Commands"]
        words = faster.split()[1:]
        assert cluster.run(*words[:-1], words[-1] + "00").returncode == 0
        wait_until(lambda: len(in_sync(cluster.bootstrap, "t")[0]) == 3, 60, "it has all")
        wait_until(lambda: not kinds(cluster, "t/0"), 60, "nothing blocks it")


def _held(finding: dict[str, Any] | None) -> dict[str, Any] | None:
    return finding if finding is not None and finding["Commands"] else None


def test_a_new_node_is_told_from_one_that_takes_data(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3) as cluster:
        create_topic(cluster.bootstrap, "t", partitions=1)
        cluster.add_node()
        (command,) = kinds(cluster, "node", "4")["new"]["Commands"]
        added = cluster.run(*command.split()[1:])
        assert added.returncode == 0, added.stderr
        assert "new" not in kinds(cluster, "node", "4")
        assert cluster.run("node", "cordon", "4").returncode == 0
        (command,) = kinds(cluster, "node", "4")["cordoned"]["Commands"]
        assert cluster.run(*command.split()[1:]).returncode == 0
        wait_until(lambda: "cordoned" not in kinds(cluster, "node", "4"), 30, "it is not any more")
