"""Listeners that are encrypted, on real nodes with stock clients: what works, and what is refused.

Three nodes; each has a plain listener, SECURE, and MUTUAL where clients must show a certificate.
Node 1 has LAPSED too, whose certificate is valid no more.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import confluent_kafka
import psutil
import pytest
import trustme
from attrs import frozen
from confluent_kafka.admin import AdminClient

from jepsen_like.live.cluster import free_ports
from raftmq_client import ClientError, Outcome
from raftmq_client.blocking import Admin, Consumer, Producer
from tests.live.harness import Cluster, need, wait_until
from tests.live.load import create_topic

pytestmark = [pytest.mark.live, pytest.mark.slow]

LISTENERS = ("SECURE", "MUTUAL")


@frozen
class Secured:
    """The cluster, and what a client needs to trust and to be trusted."""

    cluster: Cluster
    folder: Path
    ca: trustme.CA
    ports: dict[tuple[int, str], int]

    def bootstrap(self, listener: str, nodes: tuple[int, ...] = (1, 2, 3)) -> str:
        return ",".join(f"127.0.0.1:{self.ports[node_id, listener]}" for node_id in nodes)

    @property
    def ca_file(self) -> str:
        return str(self.folder / "ca.pem")

    def issue(self, name: str, **fields: Any) -> None:
        """Write NAME.pem and NAME.key, each in one step."""
        issued = self.ca.issue_cert("127.0.0.1", common_name=name, **fields)
        chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        for end, data in ((".pem", chain), (".key", issued.private_key_pem.bytes())):
            new = self.folder / f"{name}{end}.new"
            new.write_bytes(data)
            new.chmod(0o600)
            os.replace(new, self.folder / f"{name}{end}")

    def context(self, certificate: str = "") -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca_file)
        if certificate:
            pair = (self.folder / f"{certificate}.pem", self.folder / f"{certificate}.key")
            context.load_cert_chain(*pair)
        return context

    def librdkafka(self, listener: str, **fields: Any) -> dict[str, Any]:
        return {
            "bootstrap.servers": self.bootstrap(listener),
            "security.protocol": "ssl",
            "ssl.ca.location": self.ca_file,
            **fields,
        }

    def shown(self, node_id: int, listener: str) -> bytes:
        """The certificate that a node shows now."""
        where = ("127.0.0.1", self.ports[node_id, listener])
        context = self.context("client" if listener == "MUTUAL" else "")
        with (
            socket.create_connection(where) as sock,
            context.wrap_socket(sock, server_hostname="127.0.0.1") as hidden,
        ):
            certificate = hidden.getpeercert(binary_form=True)
        assert certificate is not None
        return certificate


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    cluster = Cluster(folder)
    names = [(node_id, name) for node_id in cluster.nodes for name in LISTENERS] + [(1, "LAPSED")]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    found = Secured(cluster, folder, trustme.CA(), ports)
    found.ca.cert_pem.write_to_path(found.ca_file)
    for name in ("node", "client"):
        found.issue(name)
    found.issue("lapsed", not_after=datetime(2021, 1, 1, tzinfo=UTC))
    for node_id, node in cluster.nodes.items():
        tables = {}
        for (owner, name), port in ports.items():
            pair = str(folder / ("lapsed" if name == "LAPSED" else "node"))
            if owner == node_id:
                tables[name] = {
                    "address": f"127.0.0.1:{port}",
                    "protocol": "SSL",
                    "certificate_file": f"{pair}.pem",
                    "key_file": f"{pair}.key",
                }
        tables["MUTUAL"] |= {"client_certificates": "required", "client_ca_file": found.ca_file}
        node.environment["RAFTMQ_LISTENERS"] = json.dumps(tables)
    with cluster:
        create_topic(cluster.bootstrap, "t", 3)
        yield found


@pytest.mark.parametrize("listener", LISTENERS)
def test_confluent_kafka_produces_and_consumes_in_a_group(secured: Secured, listener: str) -> None:
    pair = {}
    if listener == "MUTUAL":
        pair["ssl.certificate.location"] = str(secured.folder / "client.pem")
        pair["ssl.key.location"] = str(secured.folder / "client.key")
    options = secured.librdkafka(listener, **pair)
    brokers = AdminClient(options).list_topics(timeout=30).brokers
    told = {f"{broker.host}:{broker.port}" for broker in brokers.values()}
    assert told == set(secured.bootstrap(listener).split(",")), "addresses of this listener alone"
    topic = f"confluent-{listener}"
    create_topic(secured.cluster.bootstrap, topic, 3)
    producer = confluent_kafka.Producer({**options, "message.max.bytes": 2_000_000})
    values = [b"%d" % i * 40 for i in range(1_000)] + [bytes([i]) * 900_000 for i in range(6)]
    for value in values:
        producer.produce(topic, value)
    assert producer.flush(60) == 0
    consumer = confluent_kafka.Consumer(
        {**options, "group.id": topic, "auto.offset.reset": "earliest"}
    )
    consumer.subscribe([topic])
    found: list[bytes] = []
    while len(found) < len(values):
        message = consumer.poll(60)
        assert message is not None, f"{len(found)} of {len(values)}"
        assert message.error() is None
        value = message.value()
        assert isinstance(value, bytes)
        found.append(value)
    consumer.close()
    assert sorted(found) == sorted(values)


def test_kcat_produces_and_consumes(secured: Secured) -> None:
    words = [need("kcat"), "-b", secured.bootstrap("SECURE"), "-X", "security.protocol=ssl"]
    words += ["-X", f"ssl.ca.location={secured.ca_file}"]
    lines = b"".join(b"line %d\n" % i for i in range(500))
    subprocess.run([*words, "-P", "-t", "kcat"], input=lines, check=True, timeout=60)
    read = [*words, "-C", "-t", "kcat", "-o", "beginning", "-e", "-q"]
    done = subprocess.run(read, capture_output=True, check=True, timeout=60)
    assert sorted(done.stdout.splitlines()) == sorted(lines.splitlines())


def test_our_client_produces_and_consumes(secured: Secured) -> None:
    security = secured.context("client")
    with Producer(secured.bootstrap("MUTUAL"), security=security) as producer:
        receipts = [producer.send("ours", bytes([i]) * 50_000) for i in range(100)]
    assert {receipt.outcome for receipt in receipts} == {Outcome.OK}
    found = []
    options: dict[str, Any] = {"topics": ["ours"], "group": "ours", "reset": "earliest"}
    with Consumer(secured.bootstrap("MUTUAL"), security=security, **options) as consumer:
        while len(found) < 100:
            found += [message.value for message in consumer.poll(30)]
    assert sorted(filter(None, found)) == [bytes([i]) * 50_000 for i in range(100)]


# ---- what is refused, each with the client's own error ----


def error_of(options: dict[str, Any]) -> str:
    """What librdkafka tells first of a connection that does not come about."""
    told: list[str] = []
    client = AdminClient({**options, "error_cb": lambda error: told.append(error.str())})
    wait_until(lambda: client.poll(0.1) or told, 30, "an error of librdkafka")
    return told[0]


def test_a_client_that_trusts_another_ca(secured: Secured, tmp_path: Path) -> None:
    other = trustme.CA()
    other.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    options = secured.librdkafka("SECURE", **{"ssl.ca.location": str(tmp_path / "ca.pem")})
    assert "certificate verify failed" in error_of(options)
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    with (
        Admin(secured.bootstrap("SECURE"), security=context, timeout_ms=2_000) as admin,
        pytest.raises(ClientError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        admin.cluster()


def test_a_certificate_that_lapsed(secured: Secured) -> None:
    where = secured.bootstrap("LAPSED", (1,))
    options = secured.librdkafka("SECURE", **{"bootstrap.servers": where})
    assert "certificate verify failed" in error_of(options)
    with (
        Admin(where, security=secured.context(), timeout_ms=2_000) as admin,
        pytest.raises(ClientError, match="certificate has expired"),
    ):
        admin.cluster()


def test_a_client_without_the_certificate_that_is_required(secured: Secured) -> None:
    assert "certificate required" in error_of(secured.librdkafka("MUTUAL"))
    with (
        Admin(secured.bootstrap("MUTUAL"), security=secured.context(), timeout_ms=2_000) as admin,
        pytest.raises(ClientError, match="CERTIFICATE_REQUIRED"),
    ):
        admin.cluster()
    page = "".join(node.text("/metrics") for node in secured.cluster.nodes.values())
    assert 'raftmq_tls_handshake_failures_total{reason="certificate"}' in page


# ---- certificates that are replaced ----


def test_certificates_are_replaced_without_a_connection_lost(secured: Secured) -> None:
    """Once because the files changed, once by SIGHUP."""
    nodes = list(secured.cluster.nodes.values())
    ports = {port for (_, name), port in secured.ports.items() if name == "SECURE"}

    def established() -> set[int]:
        """Our ends of connections to SECURE."""
        found = psutil.Process().net_connections("tcp")
        return {c.laddr.port for c in found if c.status == "ESTABLISHED" and c.raddr.port in ports}

    others = established()
    with Producer(secured.bootstrap("SECURE"), security=secured.context()) as producer:
        producer.send("t", b"before", partition=0).result(30)
        ours = established() - others
        assert ours
        for is_signalled in (False, True):
            old = [secured.shown(node_id, "SECURE") for node_id in (1, 2, 3)]
            secured.issue("node")
            for node in nodes if is_signalled else ():
                node.signal(signal.SIGHUP)
            for node_id in (1, 2, 3):
                wait_until(
                    lambda i=node_id, seen=old: secured.shown(i, "SECURE") != seen[i - 1],
                    30,
                    "another certificate",
                )
            assert secured.shown(1, "MUTUAL") not in old
            for _ in range(20):
                producer.send("t", b"after", partition=0).result(30)
            assert ours <= established()
    page = nodes[0].text("/metrics")
    assert total(page, "raftmq_tls_handshakes_total") > 2
    expiry = 'raftmq_certificate_expires_timestamp_seconds{listener="LAPSED"}'
    assert total(page, expiry) == datetime(2021, 1, 1, tzinfo=UTC).timestamp()


def total(page: str, series: str) -> float:
    (value,) = [
        line.removeprefix(series) for line in page.splitlines() if line.startswith(series + " ")
    ]
    return float(value)


def test_a_node_whose_files_cannot_be_used_says_which(secured: Secured, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1)
    node = cluster.nodes[1]
    tables = json.loads(secured.cluster.nodes[1].environment["RAFTMQ_LISTENERS"])
    for table, port in zip(tables.values(), free_ports(len(tables)), strict=True):
        table["address"] = f"127.0.0.1:{port}"
    tables["SECURE"]["key_file"] = str(secured.folder / "client.key")
    node.environment["RAFTMQ_LISTENERS"] = json.dumps(tables)
    node.start()
    assert node.wait_end() == 2
    assert f"SECURE: key_file {secured.folder}/client.key: it is not the key" in node.log_tail()
