"""Stock clients that come with tokens of another service, and those whose tokens are no good."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jepsen_like.live.cluster import free_ports
from raftmq.types import TopicPartition
from raftmq_client import AuthenticationError, OAuthBearer
from raftmq_client.blocking import Admin
from tests.client.drivers import NAMES, open_driver
from tests.clients.programs import kafka_command
from tests.live.harness import RAFTMQ, Cluster
from tests.runtime.test_token_keys import Server
from tests.sasl.tokens import AUDIENCE, ISSUER, Issuer

pytestmark = [pytest.mark.live, pytest.mark.slow]


class Served:
    """One node that takes tokens, by keys out of a file or by those of a server."""

    def __init__(self, address: str, issuer: Issuer, keys: Server | None) -> None:
        self.address = address
        self.issuer = issuer
        self.keys = keys

    def token(self, **said: Any) -> str:
        return self.issuer.token(**{"now_s": time.time(), **said})


@pytest.fixture(scope="module", params=["file", "http"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("oauth")
    issuer = Issuer()
    settings: dict[str, Any] = {
        "sasl_mechanisms": "OAUTHBEARER",
        "sasl_plain_without_tls": True,
        "oauth_issuer": ISSUER,
        "oauth_audience": AUDIENCE,
    }
    keys = None
    if request.param == "file":
        (folder / "jwks.json").write_bytes(issuer.jwks())
        settings["oauth_jwks_file"] = str(folder / "jwks.json")
    else:
        keys = Server()
        keys.body = issuer.jwks()
        settings["oauth_jwks_url"] = f"http://127.0.0.1:{keys.port}/jwks"
    cluster = Cluster(folder, nodes=1, settings=settings)
    (port,) = free_ports(1, "127.0.0.1")
    listeners = {"SASL": {"address": f"127.0.0.1:{port}", "protocol": "SASL_PLAINTEXT"}}
    cluster[1].environment["RAFTMQ_LISTENERS"] = json.dumps(listeners)
    try:
        with cluster:
            yield Served(f"127.0.0.1:{port}", issuer, keys)
    finally:
        if keys is not None:
            keys.close()


def confluent(served: Served, tell: Callable[[], str]) -> dict[str, Any]:
    return {
        "bootstrap.servers": served.address,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
        "oauth_cb": lambda _config: (tell(), time.time() + 300),
    }


def test_confluent_kafka_comes_in_and_goes_on(served: Served) -> None:
    """Its tokens live for three seconds more, before which it authenticates again (KIP-368)."""
    from confluent_kafka import Producer

    told: list[str] = []

    def tell() -> str:
        told.append(served.token(exp=int(time.time()) - 27))  # the clocks may be 30 s apart
        return told[-1]

    producer = Producer(
        {**confluent(served, tell), "oauth_cb": lambda _config: (tell(), time.time() + 3)}
    )
    failures: list[Any] = []
    end_s = time.monotonic() + 8
    while time.monotonic() < end_s:
        producer.produce("confluent", b"x", on_delivery=lambda error, _: failures.append(error))
        assert producer.flush(30) == 0
        time.sleep(0.2)
    assert set(failures) == {None}
    assert len(told) > 1


BAD: dict[str, Callable[[Served], str]] = {
    "signature": lambda served: Issuer().token(now_s=time.time()),
    "audience": lambda served: served.token(aud="elsewhere"),
    "expired": lambda served: served.token(lives_s=-60),
    "none": lambda served: unsigned(served.token()),
    "key": lambda served: served.token(header={"kid": "gone"}),
}


def unsigned(token: str) -> str:
    import base64

    head = base64.urlsafe_b64encode(b'{"alg":"none","typ":"JWT"}').rstrip(b"=").decode()
    return f"{head}.{token.split('.')[1]}."


@pytest.mark.parametrize("kind", BAD)
def test_confluent_kafka_is_told_of_a_bad_token(served: Served, kind: str) -> None:
    from confluent_kafka import KafkaError
    from confluent_kafka.admin import AdminClient

    errors: list[Any] = []
    admin = AdminClient(
        {
            **confluent(served, lambda: BAD[kind](served)),
            "error_cb": errors.append,
        }
    )
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s and not errors:
        admin.poll(0.1)
    assert errors[0].code() == KafkaError._AUTHENTICATION
    assert "invalid_token" in str(errors[0])


def test_kafka_python(served: Served) -> None:
    from kafka import KafkaConsumer, KafkaProducer
    from kafka.net.sasl.oauth import AbstractTokenProvider

    class Tokens(AbstractTokenProvider):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()

        def token(self) -> str:
            return served.token(key_id="ec")

    conf: dict[str, Any] = {
        "bootstrap_servers": served.address,
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "OAUTHBEARER",
        "sasl_oauth_token_provider": Tokens(),
    }
    producer = KafkaProducer(**conf)
    producer.send("kafka-python", b"x").get(30)
    producer.close()
    consumer = KafkaConsumer("kafka-python", auto_offset_reset="earliest", **conf)
    assert next(iter(consumer)).value == b"x"
    consumer.close()


def test_aiokafka(served: Served) -> None:
    from aiokafka import AIOKafkaProducer
    from aiokafka.abc import AbstractTokenProvider

    class Tokens(AbstractTokenProvider):  # type: ignore[misc]
        async def token(self) -> str:
            return served.token(key_id="ed")

    async def run() -> int:
        producer = AIOKafkaProducer(
            bootstrap_servers=served.address,
            security_protocol="SASL_PLAINTEXT",
            sasl_mechanism="OAUTHBEARER",
            sasl_oauth_token_provider=Tokens(),
        )
        await producer.start()
        try:
            return int((await producer.send_and_wait("aiokafka", b"x")).offset)
        finally:
            await producer.stop()

    assert asyncio.run(run()) == 0


def test_a_new_key_is_found_without_a_restart(served: Served, tmp_path: Path) -> None:
    from confluent_kafka.admin import AdminClient

    if served.keys is None:
        return  # tests/runtime has it for files
    served.issuer.add("next", "RS256")
    served.keys.body = served.issuer.jwks()
    admin = AdminClient(confluent(served, lambda: served.token(key_id="next")))
    assert admin.list_topics(timeout=60).brokers


@pytest.mark.parametrize("name", NAMES)
def test_our_client_comes_in_and_goes_on(served: Served, name: str) -> None:
    """Its tokens live for five seconds more, before which it authenticates again (KIP-368)."""
    told: list[str] = []

    def tell() -> str:
        told.append(served.token(exp=int(time.time()) - 25))  # the clocks may be 30 s apart
        return told[-1]

    topic = f"ours-{name}"
    with open_driver(name) as driver:
        with driver.admin(served.address, security=OAuthBearer(tell)) as admin:
            admin.create_topic(topic, 1)
        told.clear()
        with driver.producer(served.address, security=OAuthBearer(tell)) as producer:
            sent, end_s = 0, time.monotonic() + 9
            while time.monotonic() < end_s:
                sent += 1
                assert producer.send(topic, b"%d" % sent).result(30).offset == sent - 1
        assert len(set(told)) > 1
        with driver.consumer(served.address, security=OAuthBearer(tell)) as consumer:
            consumer.assign({TopicPartition(topic, 0): 0})
            read: list[bytes] = []
            while len(read) < sent:
                read += [bytes(one.value or b"") for one in consumer.poll(30)]
    assert read == [b"%d" % number for number in range(1, sent + 1)]


@pytest.mark.parametrize("kind", BAD)
def test_our_client_is_told_of_a_bad_token(served: Served, kind: str) -> None:
    with (
        Admin(served.address, security=OAuthBearer(lambda: BAD[kind](served))) as admin,
        pytest.raises(AuthenticationError, match="OAUTHBEARER"),
    ):
        admin.brokers()


def test_the_command_line_takes_a_file_with_a_token(served: Served, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(served.token())
    file = tmp_path / "client.toml"
    file.write_text(
        f'bootstrap.servers = "{served.address}"\nsecurity.protocol = "SASL_PLAINTEXT"\n'
        'sasl.mechanism = "OAUTHBEARER"\nsasl.oauthbearer.token_file = "token"\n'
    )
    words = [RAFTMQ, "topic", "list", "--security", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    token.write_text(served.token(lives_s=-60))
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "OAUTHBEARER" in done.stderr
    assert token.read_text() not in done.stderr


JAVA = "org.apache.kafka.common.security.oauthbearer"


@pytest.mark.polyglot
@pytest.mark.parametrize("kind", ["good", "audience"])
def test_kafkas_own_client(served: Served, tmp_path: Path, kind: str) -> None:
    """Kafka 4.1 reads a token only where a property of the virtual machine allows it
    (CVE-2025-27817)."""
    token = tmp_path / "token.jwt"
    token.write_text(served.token() if kind == "good" else BAD[kind](served))
    config = tmp_path / "client.properties"
    config.write_text(
        "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=OAUTHBEARER\n"
        f"sasl.jaas.config={JAVA}.OAuthBearerLoginModule required;\n"
        f"sasl.login.callback.handler.class={JAVA}.OAuthBearerLoginCallbackHandler\n"
        f"sasl.oauthbearer.token.endpoint.url={token.as_uri()}\n"
        "request.timeout.ms=20000\ndefault.api.timeout.ms=20000\n"
    )
    java, *rest = kafka_command()
    allowed = f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={token.as_uri()}"
    words = [java, allowed, *rest, "org.apache.kafka.tools.TopicCommand", "--create"]
    words += ["--bootstrap-server", served.address, "--command-config", str(config)]
    words += ["--topic", "java"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    told = done.stdout + done.stderr
    if kind == "good":
        assert done.returncode == 0, told
        assert "Created topic java" in told
    else:
        assert done.returncode != 0
        assert "SaslAuthenticationException" in told, told
        assert "invalid_token" in told
