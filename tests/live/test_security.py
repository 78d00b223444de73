"""Users, encryption and rights at once, met by a stock client: who comes in, what it may do."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from jepsen_like.live.cluster import free_ports
from tests.clients.programs import kafka_command
from tests.live.harness import Cluster, wait_until
from tests.server.kafka.tls_clients import write_files

pytestmark = [pytest.mark.live, pytest.mark.slow]

PASSWORDS = {"admin": "admin-secret", "alice": "alice-secret", "bob": "bob-secret"}
WAYS = [("HIDDEN", "PLAIN"), ("HIDDEN", "SCRAM-SHA-512"), ("OPEN", "SCRAM-SHA-256")]


class Secured:
    """One node with a plain listener for its operator, and two that ask for SASL."""

    def __init__(self, cluster: Cluster, ports: dict[str, int], ca_file: str) -> None:
        self.cluster = cluster
        self.ports = ports
        self.ca_file = ca_file

    def conf(self, listener: str, mechanism: str, user: str, password: str = "") -> dict[str, Any]:
        """Of librdkafka."""
        conf = {
            "bootstrap.servers": f"127.0.0.1:{self.ports[listener]}",
            "log_level": 0,
            "security.protocol": "SASL_SSL" if listener == "HIDDEN" else "SASL_PLAINTEXT",
            "sasl.mechanism": mechanism,
            "sasl.username": user,
            "sasl.password": password or PASSWORDS[user],
        }
        return {**conf, "ssl.ca.location": self.ca_file} if listener == "HIDDEN" else conf

    def run(self, *words: str) -> str:
        done = self.cluster.run(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    files = write_files(folder)
    settings = {
        "authorizer": "acl",
        "super_users": ["User:ANONYMOUS", "User:admin"],
        "sasl_mechanisms": "SCRAM-SHA-512,SCRAM-SHA-256,PLAIN",
    }
    cluster = Cluster(folder, nodes=1, settings=settings)
    ports = dict(zip(("HIDDEN", "OPEN"), free_ports(2, "127.0.0.1"), strict=True))
    tables = {
        "HIDDEN": {
            "address": f"127.0.0.1:{ports['HIDDEN']}",
            "protocol": "SASL_SSL",
            **files.keys,
        },
        "OPEN": {"address": f"127.0.0.1:{ports['OPEN']}", "protocol": "SASL_PLAINTEXT"},
    }
    cluster[1].environment["RAFTMQ_LISTENERS"] = json.dumps(tables)
    with cluster:
        found = Secured(cluster, ports, str(files.ca))
        for user, password in PASSWORDS.items():
            file = folder / f"{user}.txt"
            file.write_text(password)
            found.run("user", "create", user, "--password-file", str(file))
        yield found


def produced(conf: dict[str, Any], topic: str) -> KafkaError | None:
    """What a producer is told of one record."""
    told: list[KafkaError | None] = []
    producer = Producer(conf)
    producer.produce(topic, b"v", on_delivery=lambda error, _: told.append(error))
    assert producer.flush(60) == 0
    return told[0]


def consumed(conf: dict[str, Any], group: str, topic: str) -> Any:
    """The first record, or error, of a consumer."""
    consumer = Consumer({**conf, "group.id": group, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    try:
        found = consumer.poll(60)
        assert found is not None
        return found.error() or found.value()
    finally:
        consumer.close()


@pytest.mark.parametrize(("listener", "mechanism"), WAYS)
def test_a_user_may_do_what_rules_allow_it(secured: Secured, listener: str, mechanism: str) -> None:
    topic = f"t-{listener}-{mechanism}"
    secured.run("topic", "create", topic, "-p", "1")
    alice = secured.conf(listener, mechanism, "alice")
    assert topic not in AdminClient(alice).list_topics(timeout=60).topics
    error = produced(alice, topic)
    assert error is not None
    assert error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    group = ["--group", topic, "--topic", topic]
    rules = ["--allow-principal", "User:alice", "--producer", "--consumer"]
    secured.run("acl", "create", *rules, *group)
    assert produced(alice, topic) is None
    assert consumed(alice, topic, topic) == b"v"
    denied = consumed(alice, f"{topic}-other", topic)
    assert denied.code() == KafkaError.GROUP_AUTHORIZATION_FAILED
    assert topic not in AdminClient(secured.conf(listener, mechanism, "bob")).list_topics().topics
    secured.run("acl", "delete", "--principal", "User:alice", "--topic", topic)
    error = produced(alice, topic)
    assert error is not None
    assert error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED


def refusal(conf: dict[str, Any]) -> str:
    """What a client says that does not come in."""
    errors: list[KafkaError] = []
    client = AdminClient({**conf, "error_cb": errors.append})

    def told() -> str:
        client.poll(0.1)
        codes = (KafkaError._AUTHENTICATION, KafkaError.UNSUPPORTED_SASL_MECHANISM)
        return next((str(one) for one in errors if one.code() in codes), "")

    return str(wait_until(told, 30, f"the client says so: {errors}"))


@pytest.mark.parametrize(("listener", "mechanism"), WAYS)
def test_a_wrong_password_lets_nobody_in(secured: Secured, listener: str, mechanism: str) -> None:
    conf = secured.conf(listener, mechanism, "admin", "guess-7x")
    assert "invalid credentials with SASL mechanism" in refusal(conf)
    assert "guess-7x" not in secured.cluster[1].log_path.read_text()


def test_a_password_is_not_taken_where_nothing_is_encrypted(secured: Secured) -> None:
    assert "PLAIN" in refusal(secured.conf("OPEN", "PLAIN", "admin"))


def test_only_a_super_user_makes_rules_and_users(secured: Secured) -> None:
    rule = AclBinding(
        ResourceType.TOPIC,
        "b-",
        ResourcePatternType.PREFIXED,
        "User:bob",
        "*",
        AclOperation.ALL,
        AclPermissionType.ALLOW,
    )
    credential = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
    eve = UserScramCredentialUpsertion("eve", credential, b"eves-secret")
    bob = AdminClient(secured.conf("HIDDEN", "PLAIN", "bob"))
    (made,) = bob.create_acls([rule]).values()
    (changed,) = bob.alter_user_scram_credentials([eve]).values()
    for future in (made, changed):
        with pytest.raises(KafkaException) as caught:
            future.result(60)
        assert caught.value.args[0].code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED
    assert "eve" not in secured.run("user", "list")
    admin = AdminClient(secured.conf("HIDDEN", "PLAIN", "admin"))
    (made,) = admin.create_acls([rule]).values()
    (changed,) = admin.alter_user_scram_credentials([eve]).values()
    made.result(60)
    changed.result(60)
    assert "eve" in secured.run("user", "list")
    secured.run("acl", "why", "bob", "write", "topic:b-1")
    secured.run("topic", "create", "b-1", "-p", "1")
    assert produced(secured.conf("OPEN", "SCRAM-SHA-512", "bob"), "b-1") is None


def test_the_first_user_comes_from_a_file_and_makes_the_others(tmp_path: Path) -> None:
    """It is the only super user: whoever comes by the plain listener may do nothing."""
    file = tmp_path / "first.txt"
    file.write_text("root:roots-secret\n")
    file.chmod(0o600)
    settings = {"authorizer": "acl", "super_users": ["User:root"], "first_user_file": str(file)}
    cluster = Cluster(tmp_path, nodes=1, settings=settings)
    address = f"127.0.0.1:{cluster[1].client_port}"
    tables = {"SASL": {"address": address, "protocol": "SASL_PLAINTEXT"}}
    cluster[1].environment["RAFTMQ_LISTENERS"] = json.dumps(tables)
    cluster[1].environment["RAFTMQ_CLIENT_LISTENER"] = f"127.0.0.1:{free_ports(1, '127.0.0.1')[0]}"
    with cluster:
        conf = {
            "bootstrap.servers": address,
            "log_level": 0,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "SCRAM-SHA-256",
            "sasl.username": "root",
            "sasl.password": "roots-secret",
        }
        credential = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
        eve = UserScramCredentialUpsertion("eve", credential, b"eves-secret")
        root = AdminClient(conf)
        (made,) = root.alter_user_scram_credentials([eve]).values()
        made.result(60)
        eves = {**conf, "sasl.username": "eve", "sasl.password": "eves-secret"}
        assert not AdminClient(eves).list_topics(timeout=60).topics
        log = cluster[1].log_path.read_text()
        assert "the first user was made" in log
        assert "roots-secret" not in log


@pytest.mark.kafka
def test_kafkas_own_tools_make_rules_and_users_as_a_user(secured: Secured, tmp_path: Path) -> None:
    """`kafka-acls.sh` and `kafka-configs.sh`, which log in by SCRAM under TLS."""
    file = tmp_path / "client.properties"
    module = "org.apache.kafka.common.security.scram.ScramLoginModule"
    file.write_text(
        "security.protocol=SASL_SSL\nsasl.mechanism=SCRAM-SHA-512\n"
        f'sasl.jaas.config={module} required username="admin" password="admin-secret";\n'
        f"ssl.truststore.type=PEM\nssl.truststore.location={secured.ca_file}\n"
    )

    def tool(name: str, *words: str) -> str:
        where = ["--bootstrap-server", f"127.0.0.1:{secured.ports['HIDDEN']}"]
        command = [*kafka_command(), name, *where, "--command-config", str(file), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    acls, configs = "org.apache.kafka.tools.AclCommand", "kafka.admin.ConfigCommand"
    password = "SCRAM-SHA-256=[password=franks-secret]"
    frank = ("--entity-type", "users", "--entity-name", "frank")
    tool(configs, "--alter", *frank, "--add-config", password)
    assert "frank" in secured.run("user", "list")
    assert "SCRAM-SHA-256=iterations=4096" in tool(configs, "--describe", *frank)
    secured.run("topic", "create", "franks-1", "-p", "1")
    conf = {**secured.conf("OPEN", "SCRAM-SHA-256", "admin", "franks-secret")}
    conf["sasl.username"] = "frank"
    error = produced(conf, "franks-1")
    assert error is not None
    assert error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    rules = ("--topic", "franks-", "--resource-pattern-type", "prefixed")
    tool(acls, "--add", "--allow-principal", "User:frank", "--producer", *rules)
    assert produced(conf, "franks-1") is None
    listed = tool(acls, "--list", "--principal", "User:frank")
    assert "patternType=PREFIXED" in listed
    assert "operation=WRITE, permissionType=ALLOW" in listed
    deny = ("--deny-principal", "User:frank", "--operation", "Write", "--topic", "franks-1")
    tool(acls, "--add", *deny)
    error = produced(conf, "franks-1")
    assert error is not None
    assert error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    tool(acls, "--remove", "--force", *deny)
    assert produced(conf, "franks-1") is None
    tool(configs, "--alter", *frank, "--delete-config", "SCRAM-SHA-256")
    assert "frank" not in secured.run("user", "list")
