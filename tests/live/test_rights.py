"""Rules of who may do what, made by our command line and met by a stock client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, ConfigResource

from tests.live.harness import Cluster

pytestmark = [pytest.mark.live, pytest.mark.slow]

WHO = "User:ANONYMOUS"


def produced(cluster: Cluster, topic: str, **settings: Any) -> KafkaError | None:
    """What a producer is told of one record."""
    told: list[KafkaError | None] = []
    producer = Producer({"bootstrap.servers": cluster.bootstrap, **settings})
    producer.produce(topic, b"v", on_delivery=lambda error, _: told.append(error))
    assert producer.flush(60) == 0
    return told[0]


def consumed(cluster: Cluster, group: str, topic: str) -> Any:
    """The first record, or error, of a consumer."""
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": group,
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([topic])
    try:
        found = consumer.poll(60)
        assert found is not None
        return found.error() or found.value()
    finally:
        consumer.close()


def test_a_stock_client_may_do_what_rules_allow_and_no_more(tmp_path: Path) -> None:
    settings = {"authorizer": "acl", "super_users": [WHO]}
    with Cluster(tmp_path, nodes=1, settings=settings) as cluster:
        for topic in ("open-1", "secret"):
            assert cluster.run("topic", "create", topic, "-p", "1").returncode == 0
        words = ["--topic", "open", "--group", "open", "--resource-pattern-type", "prefixed"]
        made = cluster.run(
            *["acl", "create", "--allow-principal", WHO, "--producer", "--consumer", *words]
        )
        assert made.returncode == 0, made.stderr
        match = ["--topic", "open-1", "--resource-pattern-type", "match", "--json"]
        listed = json.loads(cluster.run("acl", "list", *match).stdout)
        operations = {row["OPERATION"] for row in listed}
        assert operations == {"read", "write", "describe", "create"}
        allowed = cluster.run("acl", "why", "ANONYMOUS", "Read", "topic:open-1")
        assert (allowed.returncode, "prefixed 'open'" in allowed.stdout) == (0, True)
        refused = cluster.run("acl", "why", WHO, "read", "topic:secret")
        assert (refused.returncode, "no rule allows it" in refused.stdout) == (1, True)

        cluster[1].terminate()
        cluster.settings["super_users"] = []
        cluster.bring_back()
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
        assert list(admin.list_topics(timeout=60).topics) == ["open-1"]
        assert produced(cluster, "open-1", **{"enable.idempotence": True}) is None
        error = produced(cluster, "secret")
        assert error is not None
        assert error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
        assert consumed(cluster, "open-group", "open-1") == b"v"
        assert consumed(cluster, "closed", "open-1").code() == KafkaError.GROUP_AUTHORIZATION_FAILED
        broker = ConfigResource(ConfigResource.Type.BROKER, "1")
        with pytest.raises(KafkaException) as caught:
            admin.describe_configs([broker])[broker].result(60)
        assert caught.value.args[0].code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED
        late = cluster.run("acl", "delete", "--principal", WHO)
        assert (late.returncode, "CLUSTER_AUTHORIZATION_FAILED" in late.stderr) == (1, True)
        lines = [json.loads(line) for line in cluster[1].log_path.read_text().splitlines()]
        denied = [line for line in lines if line["event"] == "denied"]
        told = {(line["resource"], line["operation"], line["principal"]) for line in denied}
        assert ("topic:secret", "describe", WHO) in told
        assert any(resource == "group:closed" for resource, _, _ in told)
        assert "raftmq_denials_total{" in cluster[1].text("/metrics")
