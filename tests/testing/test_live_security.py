"""Secured test clusters, and what stock clients say of them: who comes in, who does not and why."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
import trustme
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from raftmq.testing import Cluster, ClusterError, Login
from raftmq_client import AuthenticationError, BrokerError
from raftmq_client.blocking import Admin, Consumer, Producer
from tests.clients.adapters import is_told, is_told_by_kafka_python
from tests.live.harness import need, run_command, wait_until

pytestmark = [pytest.mark.live, pytest.mark.slow]

WAIT_S = 60.0


@pytest.fixture(scope="module")
def scram() -> Iterator[Cluster]:
    with Cluster(3, security="scram") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def mtls() -> Iterator[Cluster]:
    with Cluster(1, security="mtls") as cluster:
        yield cluster


@pytest.fixture(params=["scram", "mtls"])
def cluster(request: pytest.FixtureRequest) -> Cluster:
    found: Cluster = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def other_ca(tmp_path: Path) -> Path:
    path = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(path))
    return path


# ---- those who come in ----


def by_confluent(login: Login, topic: str) -> list[bytes]:
    producer = confluent_kafka.Producer({**login.confluent, "transactional.id": f"{topic}-id"})
    producer.init_transactions(WAIT_S)
    for ends in (producer.abort_transaction, producer.commit_transaction):
        producer.begin_transaction()
        producer.produce(topic, ends.__name__.encode())
        ends(WAIT_S)
    words = {"group.id": topic, "auto.offset.reset": "earliest"}
    consumer = confluent_kafka.Consumer({**login.confluent, **words})
    consumer.subscribe([topic])
    try:
        message = consumer.poll(WAIT_S)
        assert message is not None
        assert message.error() is None, message.error()
        consumer.commit(message, asynchronous=False)
        return [message.value()]
    finally:
        consumer.close()


def by_kafka_python(login: Login, topic: str) -> list[bytes]:
    from kafka import KafkaConsumer, KafkaProducer

    producer = KafkaProducer(**login.kafka_python, transactional_id=f"{topic}-id")
    producer.init_transactions()
    for ends in (producer.abort_transaction, producer.commit_transaction):
        producer.begin_transaction()
        producer.send(topic, ends.__name__.encode())
        producer.flush()
        ends()
    producer.close()
    words: dict[str, Any] = {"group_id": topic, "auto_offset_reset": "earliest"}
    consumer = KafkaConsumer(topic, **login.kafka_python, **words, isolation_level="read_committed")
    found: dict[Any, Any] = {}
    wait_until(lambda: found.update(consumer.poll(500)) or found, WAIT_S, "a record")
    consumer.commit()
    consumer.close()
    return [record.value for records in found.values() for record in records]


def by_aiokafka(login: Login, topic: str) -> list[bytes]:
    async def run() -> list[bytes]:
        from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

        producer = AIOKafkaProducer(**login.aiokafka, transactional_id=f"{topic}-id")
        await producer.start()
        async with producer.transaction():
            await producer.send_and_wait(topic, b"commit_transaction")
        await producer.stop()
        words: dict[str, Any] = {"group_id": topic, "auto_offset_reset": "earliest"}
        consumer = AIOKafkaConsumer(topic, **login.aiokafka, **words)
        await consumer.start()
        record = await asyncio.wait_for(consumer.getone(), WAIT_S)
        await consumer.commit()
        await consumer.stop()
        return [record.value]

    return asyncio.run(run())


def by_raftmq(login: Login, topic: str) -> list[bytes]:
    words: dict[str, Any] = {"security": login.security}
    with (
        Producer(login.bootstrap, transactional_id=f"{topic}-id", **words) as producer,
        producer.transaction() as transaction,
    ):
        transaction.send(topic, b"commit_transaction")
    with Consumer(
        login.bootstrap, topics=topic, group=topic, reset="earliest", **words
    ) as consumer:
        return [message.value for message in consumer.poll(WAIT_S)]


@pytest.mark.parametrize("client", [by_confluent, by_kafka_python, by_aiokafka, by_raftmq])
def test_each_client_works_in_transactions_and_groups(
    cluster: Cluster, client: Callable[[Login, str], list[bytes]]
) -> None:
    topic = cluster.create_topic(f"works-{client.__name__}".replace("_", "-"), partitions=1)
    assert client(cluster.client(), topic) == [b"commit_transaction"]


def test_the_admin_may_do_what_others_may_not(cluster: Cluster) -> None:
    boss = AdminClient(cluster.client("admin").confluent)
    assert boss.create_topics([NewTopic("mine", 1)])["mine"].result(WAIT_S) is None
    alice = AdminClient(cluster.client().confluent)
    assert "mine" in alice.list_topics(timeout=WAIT_S).topics
    with pytest.raises(KafkaException) as caught:
        alice.delete_topics(["mine"])["mine"].result(WAIT_S)
    assert caught.value.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    login = cluster.client()
    with (
        Admin(login.bootstrap, security=login.security) as admin,
        pytest.raises(BrokerError, match="AUTHORIZATION_FAILED"),
    ):
        admin.delete_topic("mine")
    assert boss.delete_topics(["mine"])["mine"].result(WAIT_S) is None


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_all_mechanisms_are_offered(scram: Cluster, mechanism: str) -> None:
    client = AdminClient(scram.client(mechanism=mechanism).confluent)
    assert len(client.list_topics(timeout=WAIT_S).brokers) == 3


def test_kcat_and_our_command_line_come_in(cluster: Cluster) -> None:
    topic = cluster.create_topic("by-files")
    toml = cluster.client().toml
    assert toml is not None
    words = [need("kcat"), "-F", str(toml.with_suffix(".properties")), "-L"]
    told = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert f'"{topic}"' in told.stdout, told.stderr
    done = run_command(("topic", "list"), timeout_s=WAIT_S, RAFTMQ_SECURITY=str(toml))
    assert topic in done.stdout, done.stderr


def test_faults_work_as_in_an_open_cluster(scram: Cluster) -> None:
    topic = scram.create_topic("kept", configs={"min.insync.replicas": 2})
    producer = confluent_kafka.Producer({**scram.client().confluent, "log_level": 0})
    for spoil, mend in (
        (lambda: scram.kill(scram.leader(topic)), scram.restart),
        (lambda: scram.partition({1}, {2, 3}), scram.heal),
    ):
        spoil()
        failures: list[Any] = []
        producer.produce(topic, b"x", on_delivery=lambda error, _, f=failures: f.append(error))
        assert producer.flush(WAIT_S) == 0
        assert failures == [None]
        mend()
        scram.wait_until_healthy()


# ---- those who do not ----


def told_by_confluent(login: Login, text: str, code: int | None = None) -> None:
    """It tells an error with that text, and code. On a busy machine others may come before it, one
    of a connection that took too long, with the same text and another code as well."""
    told: list[KafkaError] = []
    client = AdminClient({**login.confluent, "error_cb": told.append, "log_level": 0})

    def is_heard() -> bool:
        client.poll(0.1)
        return any(text in error.str() and code in (None, error.code()) for error in told)

    wait_until(is_heard, WAIT_S, f"librdkafka says {text!r}: {told}")


def told_by_aiokafka(login: Login) -> BaseException:
    async def run() -> None:
        from aiokafka import AIOKafkaProducer

        producer = AIOKafkaProducer(**login.aiokafka, request_timeout_ms=10_000)
        try:
            await producer.start()
        finally:
            await producer.stop()

    with pytest.raises(Exception) as caught:  # noqa: PT011 - its own, which are compared
        asyncio.run(run())
    return caught.value


def is_told_by_kcat(login: Login, folder: Path, text: str) -> bool:
    """By PLAIN where there is a password: below 2.6.1 librdkafka breaks SCRAM."""
    conf = login.but(mechanism="PLAIN").confluent if login.mechanism else login.confluent
    path = folder / "kcat.conf"
    path.write_text("".join(f"{word}={value}\n" for word, value in conf.items()))
    return is_told([need("kcat"), "-F", str(path), "-L", "-m", "60"], text)


def told_by_raftmq(login: Login) -> str:
    with (
        Admin(login.bootstrap, security=login.security, timeout_ms=100_000) as admin,
        pytest.raises(AuthenticationError) as caught,
    ):
        admin.cluster()
    return str(caught.value)


def test_a_wrong_password(scram: Cluster, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    login = scram.client().but(password="a-guess")
    text = "invalid credentials with SASL mechanism SCRAM-SHA-512"
    told_by_confluent(login, text, KafkaError._AUTHENTICATION)
    assert type(told_by_aiokafka(login)).__name__ in (
        "KafkaConnectionError",
        "AuthenticationFailedError",
    )
    assert "SCRAM-SHA-512: " in told_by_raftmq(login)
    assert is_told_by_kafka_python(login.kafka_python, "SaslAuthenticationFailedError")
    assert is_told_by_kcat(login, tmp_path, "invalid credentials with SASL mechanism PLAIN")
    assert "a-guess" not in repr(login) + caplog.text
    assert all("a-guess" not in scram.log(node) for node in scram.node_ids)


def test_another_ca(cluster: Cluster, other_ca: Path, tmp_path: Path) -> None:
    login = cluster.client().but(ca_file=other_ca)
    told_by_confluent(login, "certificate verify failed", KafkaError._SSL)
    assert "Unable to bootstrap" in str(told_by_aiokafka(login))
    assert "the certificate is not trusted" in told_by_raftmq(login)
    assert is_told_by_kafka_python(login.kafka_python, "CERTIFICATE_VERIFY_FAILED")
    assert is_told_by_kcat(login, tmp_path, "certificate verify failed")


def test_a_certificate_that_expired(mtls: Cluster) -> None:
    login = mtls.create_user("late", is_expired=True)
    told_by_confluent(login, "certificate expired")
    assert "our certificate is refused" in told_by_raftmq(login)
    assert "Unable to bootstrap" in str(told_by_aiokafka(login))


def test_no_certificate(mtls: Cluster) -> None:
    login = mtls.client().but(certificate_file=None, key_file=None)
    told_by_confluent(login, "certificate required")
    assert "our certificate is refused" in told_by_raftmq(login)


def test_a_user_who_is_deleted_in_the_middle_of_a_session(scram: Cluster) -> None:
    login = scram.create_user("carol")
    topic = scram.create_topic("session")
    errors: list[KafkaError] = []
    conf = {**login.confluent, "error_cb": errors.append, "log_level": 0}
    producer = confluent_kafka.Producer({**conf, "message.timeout.ms": 5_000})
    producer.produce(topic, b"before")
    assert producer.flush(WAIT_S) == 0
    with Producer(login.bootstrap, security=login.security) as ours:
        ours.send(topic, b"before").result(WAIT_S)
        scram.delete_user("carol")
        wait_until(
            lambda: (
                producer.poll(0.1) or any(e.code() == KafkaError._AUTHENTICATION for e in errors)
            ),
            WAIT_S,
            "librdkafka says so",
        )
        with pytest.raises(AuthenticationError):
            _send_until_refused(ours, topic)
    with pytest.raises(ClusterError, match="there is no user 'carol'"):
        scram.client("carol")
    again = scram.create_user("carol")
    assert again.password != login.password
    assert AdminClient(again.confluent).list_topics(timeout=WAIT_S).topics


def _is_refused(errors: list[KafkaError]) -> bool:
    return any(error.code() == KafkaError._AUTHENTICATION for error in errors)


def _send_until_refused(producer: Producer[Any, Any], topic: str) -> None:
    def send() -> bool:
        producer.send(topic, b"after").result(WAIT_S)
        return False

    wait_until(send, WAIT_S, "it is refused")


# ---- what is asked for in vain ----


def test_a_cluster_that_encrypts_alone_asks_nobody() -> None:
    with Cluster(1, security="tls") as cluster:
        topic = cluster.create_topic("t")
        assert by_raftmq(cluster.client(), topic) == [b"commit_transaction"]
        toml = cluster.client().toml
        done = run_command(("topic", "list"), timeout_s=WAIT_S, RAFTMQ_SECURITY=str(toml))
        assert topic in done.stdout, done.stderr
        with pytest.raises(ClusterError, match="has users"):
            cluster.create_user("bob")


def test_what_cannot_be(scram: Cluster) -> None:
    with pytest.raises(ValueError, match="security is 'sasl'"):
        Cluster(security="sasl")
    with pytest.raises(ClusterError, match="there is no user 'bob'"):
        scram.client("bob")
    with pytest.raises(ClusterError, match="there is no user 'bob'"):
        scram.delete_user("bob")
    with pytest.raises(ClusterError, match="have certificates"):
        scram.create_user("bob", is_expired=True)
    with pytest.raises(ClusterError, match="no name of a user"):
        scram.create_user("node-1")
