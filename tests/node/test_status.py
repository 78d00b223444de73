"""/status, /health and `raftmq cluster status|quorum`: a cluster that loses nodes, told truly."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.error
import urllib.request
from typing import Any

import confluent_kafka
import pytest

from tests.live.forks import run_command
from tests.live.harness import RAFTMQ, Cluster, Node, wait_until
from tests.live.load import create_topic

pytestmark = [pytest.mark.live, pytest.mark.slow]


def cli(*words: str) -> subprocess.CompletedProcess[str]:
    return run_command(["cluster", *words])


def status(cluster: Cluster, *words: str) -> tuple[int, dict[str, Any]]:
    done = cli("status", "--json", "-b", cluster.bootstrap, *words)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def http_status(node: Node, path: str) -> int:
    try:
        with urllib.request.urlopen(
            f"http://{node.host}:{node.admin_port}{path}", timeout=5
        ) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def row(told: dict[str, Any], topic: str) -> dict[str, Any]:
    (found,) = (r for r in told["partitions"] if r["topic"] == topic)
    return dict(found)


@pytest.fixture(scope="module")
def topic(three: Cluster) -> str:
    create_topic(three.bootstrap, "s", 1, 3, min_insync_replicas="2")
    producer = confluent_kafka.Producer({"bootstrap.servers": three.bootstrap})
    for _ in range(50):
        producer.produce("s", b"x" * 1000, partition=0)
    assert producer.flush(30) == 0
    return "s"


def test_a_healthy_cluster(three: Cluster, topic: str) -> None:
    code, told = status(three, "--wait", "60")
    assert code == 0
    assert [node["NodeId"] for node in told["Nodes"]] == [1, 2, 3]
    assert {node["State"] for node in told["Nodes"]} == {"ok"}
    assert sorted(node["Metadata"] for node in told["Nodes"]) == ["leader", "voter", "voter"]
    assert told["Stuck"] == []
    assert told["CatchingUp"] == []
    assert sorted(told["Metadata"]["voters"]) == [1, 2, 3]
    assert sum(node["Led"] for node in told["Nodes"]) == told["Partitions"]
    text = cli("status", "-b", three.bootstrap).stdout
    assert "cluster test-cluster: brokers 1, 2, 3" in text
    assert "in trouble" not in text


def test_a_node_tells_of_transactions(three: Cluster, topic: str) -> None:
    """One is open: its id, for how long, its groups; nothing is owed, nothing waits."""
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": three.bootstrap, "transactional.id": "shop-1"}
    )
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce("s", b"x", partition=0)
    assert producer.flush(30) == 0

    def told_by_all() -> list[dict[str, Any]]:
        return [node.get("/status")["transactions"] for node in three.live]

    wait_until(lambda: all(one["oldest_open"] for one in told_by_all()), 30, "all nodes know it")
    told = told_by_all()
    producer.abort_transaction(60)
    for one in told:
        assert (one["is_offered"], one["ids"], one["decided"]) == (True, 1, 0)
        assert (one["parked_requests"], one["rows_waiting"], one["owed_markers"]) == (0, 0, 0)
        (opened,) = one["oldest_open"]
        assert 0 <= opened.pop("open_ms") < 60_000
        assert opened.pop("producer_id") >= 0
        assert opened.pop("epoch") >= 0
        assert opened == {
            "transactional_id": "shop-1",
            "state": "Ongoing",
            "timeout_ms": 60_000,
            "partitions": 1,
            "groups": [],
        }


def test_a_node_tells_its_side(three: Cluster, topic: str) -> None:
    for node in three.live:
        told = node.get("/status")
        assert told["health"] == {
            "status": "ok",
            "is_ready": True,
            "is_live": True,
            "node_id": node.node_id,
        }
        assert told["faults"] is None
        assert told["isolation"]["is_isolated"] is False
        assert told["not_running"] == []
        assert told["disk"]["free_bytes"] > 0
        assert row(told, topic)["troubles"] == []
        addresses = [broker["addresses"]["admin"] for broker in told["brokers"]]
        assert f"{node.host}:{node.admin_port}" in addresses
        for path in ("/health", "/health/ready", "/health/live"):
            assert http_status(node, path) == 200


def test_quorum_is_the_same_whoever_is_asked(three: Cluster, topic: str) -> None:
    for node in three.live:
        where = f"{node.host}:{node.client_port}"

        def is_known(where: str = where) -> bool:
            done = cli("quorum", "--json", "-b", where)
            assert done.returncode == 0, done.stderr
            rows = json.loads(done.stdout)["Replicas"]
            states = sorted(r["Status"] for r in rows)
            assert states == ["Follower", "Follower", "Leader"]
            return all(r["LogEndOffset"] is not None and r["Lag"] <= 5 for r in rows)

        wait_until(is_known, 60, f"node {node.node_id} knows every member's end")
    assert "LeaderId:" in cli("describe", "-b", three.bootstrap).stdout


def events(node: Node) -> list[dict[str, Any]]:
    lines = [line for line in node.log_path.read_text().splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines]


def why_stuck(told: dict[str, Any], topic: str) -> list[str]:
    return [" ".join(r["Why"]) for r in told["Stuck"] if r["Topic"] == topic]


def test_lost_nodes_are_named_and_the_reason_given(three: Cluster, topic: str) -> None:
    """One node dies, then a second; each answer is of whoever is left."""
    _, told = status(three)
    leader = next(n for n in three.live if row(n.get("/status"), topic)["is_leader"])
    first, second = (n for n in three.live if n is not leader)
    first.kill()
    try:
        # Partitions of other topics may lose their replica sooner.
        out_of_sync = [f"out of sync: nodes [{first.node_id}] do not answer"]

        def is_told() -> tuple[int, dict[str, Any]] | None:
            # Why is told by the leader itself; of the short ISR the broker that is asked for
            # metadata hears by the leader's next report.
            code, told = status(three)
            under = [r for r in told["UnderReplicatedPartitions"] if r["Topic"] == topic]
            return (code, told) if under and why_stuck(told, topic) == out_of_sync else None

        code, told = wait_until(is_told, 60, "the ISR is short, and why")
        assert code == 1
        states = {node["NodeId"]: node for node in told["Nodes"]}
        assert states[first.node_id]["State"] in ("no answer", "fenced")
        assert "refused" in states[first.node_id]["Remarks"]

        def is_logged() -> bool:
            left = [e for e in events(leader) if e["event"] == "replica left the ISR"]
            mine = [e for e in left if e["topic"] == topic]
            return first.node_id in [e["replica"] for e in mine]

        wait_until(is_logged, 60, "the leader's log tells who left")
        second.kill()
        admin = f"{leader.host}:{leader.admin_port}"

        def is_stuck() -> bool:
            _, told = status(three, "--admin", admin, "--timeout", "3")
            (why,) = why_stuck(told, topic) or [""]
            return "no quorum: 1 of voters [1, 2, 3]" in why

        wait_until(is_stuck, 60, "the survivor says that there is no quorum")
        assert http_status(leader, "/health/live") == 200
        shown = cli("status", "-b", three.bootstrap, "--admin", admin, "--timeout", "3")
        assert shown.returncode == 1
        assert "in trouble, and why:" in shown.stdout
        assert "Traceback" not in shown.stderr
    finally:
        for node in (first, second):
            if not node.is_running:
                node.start()
        for node in (first, second):
            node.wait_ready()

    def is_well() -> bool:
        # Metadata names the last leader while a group elects; its replicas say what they see.
        code, told = status(three, "--wait", "20")
        return code == 0 and told["Stuck"] == []

    wait_until(is_well, 90, "all is well again")
    joined = [e for e in events(leader) if e["event"] == "replica joined the ISR"]
    for event in joined:
        assert {"cluster", "node", "topic", "partition", "leader_epoch"} <= set(event)


def test_a_node_that_hangs_is_told_and_does_not_hang_the_asker(three: Cluster) -> None:
    paused = three[3]
    paused.signal(signal.SIGSTOP)
    try:
        code, told = status(three, "--timeout", "3", "--admin", f"127.0.0.1:{three[1].admin_port}")
    finally:
        paused.signal(signal.SIGCONT)
    assert code in (0, 1)
    (row,) = (node for node in told["Nodes"] if node["NodeId"] == paused.node_id)
    assert row["State"] in ("no answer", "fenced")
    assert "no answer in time" in row["Remarks"]
    code, told = status(three, "--wait", "60")
    assert code == 0


def test_watching_ends_without_a_traceback(three: Cluster) -> None:
    watching = [RAFTMQ, "cluster", "status", "--watch", "--interval", "0.1", "-b", three.bootstrap]
    process = subprocess.Popen(
        # A shell's background job hands down that it ignores Ctrl-C; a terminal does not.
        ["env", "--default-signal=INT", *watching],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    seen = 0
    while seen < 2:
        seen += process.stdout.readline().startswith("cluster test-cluster")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode in (0, 130)
    assert "Traceback" not in errors


def test_nobody_there_is_one_line() -> None:
    done = cli("status", "-b", "127.0.0.1:1", "--timeout", "1")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    done = cli("status", "-b", "127.0.0.1:1", "--admin", "127.0.0.1:1", "--timeout", "1", "--json")
    assert done.returncode == 1
    (node,) = json.loads(done.stdout)["Nodes"]
    assert (node["State"], "refused" in node["Remarks"]) == ("no answer", True)
