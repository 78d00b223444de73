"""Stock clients that authenticate, and those that cannot; users by our command line and by Kafka's
`kafka-configs.sh`."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jepsen_like.live.cluster import free_ports
from tests.clients.adapters import is_told_by_kafka_python
from tests.clients.programs import kafka_command
from tests.live.harness import Cluster, need, wait_until

pytestmark = [pytest.mark.live, pytest.mark.slow]

PASSWORDS = {"alice": "alice-secret", "bob": "bob, or = not"}
MECHANISMS = ("SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN")


class Secured:
    """One node with an open listener and one that asks for SASL."""

    def __init__(self, cluster: Cluster, address: str) -> None:
        self.cluster = cluster
        self.address = address

    def conf(self, mechanism: str, user: str = "alice", password: str | None = None) -> Any:
        """Of librdkafka."""
        return {
            "bootstrap.servers": self.address,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": mechanism,
            "sasl.username": user,
            "sasl.password": PASSWORDS[user] if password is None else password,
        }


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("sasl")
    settings = {"sasl_mechanisms": ",".join(MECHANISMS), "sasl_plain_without_tls": True}
    cluster = Cluster(folder, nodes=1, settings=settings)
    (port,) = free_ports(1, "127.0.0.1")
    address = f"127.0.0.1:{port}"
    listeners = {"SASL": {"address": address, "protocol": "SASL_PLAINTEXT"}}
    cluster[1].environment["RAFTMQ_LISTENERS"] = json.dumps(listeners)
    with cluster:
        for user, password in PASSWORDS.items():
            file = folder / f"{user}.txt"
            file.write_text(f"{password}\n")
            made = cluster.run("user", "create", user, "--password-file", str(file))
            assert made.returncode == 0, made.stderr
            assert password not in made.stdout
        yield Secured(cluster, address)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_confluent_kafka_comes_in_and_goes_on(secured: Secured, mechanism: str) -> None:
    from confluent_kafka import Consumer, Producer

    for user in PASSWORDS:
        topic = f"confluent-{mechanism}-{user}".lower()
        producer = Producer(secured.conf(mechanism, user))
        failures: list[Any] = []
        producer.produce(topic, b"x", on_delivery=lambda error, _, f=failures: f.append(error))
        assert producer.flush(30) == 0
        assert failures == [None]
        settings = {"group.id": topic, "auto.offset.reset": "earliest"}
        consumer = Consumer({**secured.conf(mechanism, user), **settings})
        consumer.subscribe([topic])
        message = consumer.poll(30)
        assert message is not None
        assert message.value() == b"x", message.error()
        consumer.close()


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("user", ["alice", "nobody"])
def test_a_wrong_password_is_told_by_the_client_itself(
    secured: Secured, mechanism: str, user: str
) -> None:
    from confluent_kafka import KafkaError
    from confluent_kafka.admin import AdminClient

    errors: list[Any] = []
    client = AdminClient({**secured.conf(mechanism, user, "guess-7x"), "error_cb": errors.append})

    def is_told() -> bool:
        client.poll(0.1)
        return any(e.code() == KafkaError._AUTHENTICATION for e in errors)

    wait_until(is_told, 30, f"the client says so: {errors}")
    told = next(str(e) for e in errors if e.code() == KafkaError._AUTHENTICATION)
    assert "invalid credentials with SASL mechanism" in told, told
    assert "guess-7x" not in secured.cluster[1].log_tail()


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-512", "PLAIN"])
def test_kafka_python(secured: Secured, mechanism: str) -> None:
    from kafka import KafkaProducer

    settings = {
        "bootstrap_servers": secured.address,
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": mechanism,
        "sasl_plain_username": "alice",
    }
    producer = KafkaProducer(**settings, sasl_plain_password=PASSWORDS["alice"])
    producer.send(f"python-{mechanism}".lower(), b"x").get(timeout=30)
    producer.close()
    wrong = {**settings, "sasl_plain_password": "guess-7x"}
    assert is_told_by_kafka_python(wrong, "SaslAuthenticationFailed")
    assert is_told_by_kafka_python(wrong, "invalid credentials with SASL mechanism")


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-512", "PLAIN"])
def test_kcat(secured: Secured, mechanism: str) -> None:
    """Below 2.6.1 librdkafka says its own nonce twice in SCRAM, and no Kafka from 3.8.1 on takes
    that."""
    need("kcat")
    told = subprocess.run(["kcat", "-V"], capture_output=True, text=True, timeout=60, check=True)
    found = re.search(r"librdkafka (\d+)\.(\d+)\.(\d+)", told.stdout)
    assert found is not None, told.stdout
    is_sound = tuple(map(int, found.groups())) >= (2, 6, 1) or mechanism == "PLAIN"
    conf = secured.conf(mechanism)
    words = ["kcat", "-L", "-m", "20" if is_sound else "3", "-b", conf.pop("bootstrap.servers")]
    for key, value in conf.items():
        words += ["-X", f"{key}={value}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode == 0) == is_sound, done.stderr
    words[-1] = "sasl.password=wrong"
    words[3] = "3"  # it tries for so long
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "invalid credentials" in done.stderr, done.stderr


def test_a_user_that_is_deleted_loses_its_connection(secured: Secured, tmp_path: Path) -> None:
    from confluent_kafka import KafkaError
    from confluent_kafka.admin import AdminClient

    file = tmp_path / "carol.txt"
    file.write_text("carols")
    assert (
        secured.cluster.run("user", "create", "carol", "--password-file", str(file)).returncode == 0
    )
    errors: list[Any] = []
    conf = {**secured.conf("SCRAM-SHA-512", "alice", "carols"), "sasl.username": "carol"}
    client = AdminClient({**conf, "error_cb": errors.append})
    assert client.list_topics(timeout=30).brokers
    assert secured.cluster.run("user", "delete", "carol").returncode == 0

    def is_out() -> bool:
        client.poll(0.1)
        return any(e.code() == KafkaError._AUTHENTICATION for e in errors)

    wait_until(is_out, 30, "it comes in no more")


@pytest.mark.kafka
def test_kafkas_own_tool_changes_users(secured: Secured) -> None:
    def configs(*words: str) -> str:
        tool = ["kafka.admin.ConfigCommand", "--bootstrap-server", secured.cluster.bootstrap]
        done = subprocess.run(
            [*kafka_command(), *tool, "--entity-type", "users", *words],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    name = ("--entity-name", "dave")
    config = "SCRAM-SHA-512=[iterations=8192,password=daves-secret]"
    assert "Completed updating config for user dave" in configs(
        "--alter", *name, "--add-config", config
    )
    listed = json.loads(secured.cluster.run("user", "list", "--json").stdout)
    assert {"User": "dave", "Mechanism": "SCRAM-SHA-512", "Iterations": 8192} in listed
    from confluent_kafka.admin import AdminClient

    conf = {**secured.conf("SCRAM-SHA-512", "alice", "daves-secret"), "sasl.username": "dave"}
    assert AdminClient(conf).list_topics(timeout=30).brokers
    configs("--alter", *name, "--delete-config", "SCRAM-SHA-512")
    listed = json.loads(secured.cluster.run("user", "list", "--json").stdout)
    users = {row["User"] for row in listed}
    assert {"alice", "bob"} <= users
    assert "dave" not in users


def test_the_metadata_log_is_read_without_secrets(secured: Secured) -> None:
    from confluent_kafka import Consumer, TopicPartition

    settings = {"bootstrap.servers": secured.cluster.bootstrap, "group.id": "m"}
    consumer = Consumer({**settings, "check.crcs": True, "enable.partition.eof": True})
    consumer.assign([TopicPartition("__cluster_metadata", 0, 0)])
    values: list[bytes] = []
    while (message := consumer.poll(30)) is not None:
        if message.error():
            break
        values.append(message.value() or b"")
    consumer.close()
    users = [json.loads(value)["command"] for value in values if b"AlterUsers" in value]
    assert users, "they are there"
    for command in users:
        for one in command.get("upsertions", ()):
            for key in ("scram_salt", "scram_stored_key", "scram_server_key"):
                assert set(one[key]) == {"*"}
        assert set(command.get("scram_secret", "*")) == {"*"}
