"""The audit file of a real node: what clients and operators did stands there, also after it was
moved."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from jepsen_like.live.cluster import free_ports
from tests.live.harness import Cluster, wait_until

pytestmark = [pytest.mark.live, pytest.mark.slow]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_what_was_done_stands_in_the_file(tmp_path: Path) -> None:
    from confluent_kafka.admin import AdminClient, NewTopic

    path = tmp_path / "audit.jsonl"
    cluster = Cluster(tmp_path, nodes=1, settings={"audit_file": str(path)})
    (port,) = free_ports(1, "127.0.0.1")
    listeners = {"SASL": {"address": f"127.0.0.1:{port}", "protocol": "SASL_PLAINTEXT"}}
    cluster[1].environment["RAFTMQ_LISTENERS"] = json.dumps(listeners)
    password = tmp_path / "alice.txt"
    password.write_text("alice-secret\n")
    with cluster:
        made = cluster.run("user", "create", "alice", "--password-file", str(password))
        assert made.returncode == 0, made.stderr
        conf = {
            "bootstrap.servers": f"127.0.0.1:{port}",
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "SCRAM-SHA-256",
            "sasl.username": "alice",
            "sasl.password": "alice-secret",
        }
        admin = AdminClient(conf)
        admin.create_topics([NewTopic("orders", 1, 1)])["orders"].result(30)
        wait_until(lambda: any(line.get("request") == "CreateTopics" for line in lines(path)))
        old = path.with_suffix(".1")
        path.rename(old)
        os.kill(cluster[1].pid, signal.SIGHUP)
        wait_until(path.exists)
        admin.delete_topics(["orders"])["orders"].result(30)
        wait_until(lambda: any(line.get("request") == "DeleteTopics" for line in lines(path)))
        moved = cluster.run("node", "cordon", "1")
        assert moved.returncode == 0, moved.stderr
        wait_until(lambda: any(line["listener"] == "admin_listener" for line in lines(path)))
    assert path.stat().st_mode & 0o777 == 0o600
    told = lines(old) + lines(path)
    assert b"alice-secret" not in old.read_bytes() + path.read_bytes()
    who = {(line["kind"], line.get("request"), line.get("principal")) for line in told}
    assert {
        ("administration", "AlterUserScramCredentials", "User:ANONYMOUS"),
        ("authentication", None, "User:alice"),
        ("administration", "CreateTopics", "User:alice"),
        ("administration", "DeleteTopics", "User:alice"),
        ("administration", "POST /nodes/change", "User:ANONYMOUS"),
    } <= who
    (deleted,) = [line for line in told if line.get("request") == "DeleteTopics"]
    assert (deleted["outcome"], deleted["listener"]) == ("ok", "SASL")
    assert deleted["changes"] == [{"resource": "topic:orders", "detail": "", "code": "NONE"}]
