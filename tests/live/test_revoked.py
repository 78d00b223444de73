"""Access that ends while clients work: certificates that are revoked, users that are deleted or get
another password, tokens that are replaced. Who is meant cannot go on, and says why; others lose
nothing."""

from __future__ import annotations

import http.client
import json
import os
import signal
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import trustme

from jepsen_like.live.cluster import free_ports
from raftmq.runtime.peer_tls import node_name
from tests.live.harness import Cluster, Node, run_command, wait_until
from tests.live.load import Load, create_topic, in_sync, read_numbers
from tests.live.sending import CLIENTS, Sender
from tests.runtime.test_revocation import crl_of

pytestmark = [pytest.mark.live, pytest.mark.slow]

ENDED = "revoked certificates: connections ended"
LOADED = "certificates loaded"


def events(node: Node, event: str, listener: str) -> list[dict[str, Any]]:
    """Lines of a node's log."""
    lines = [json.loads(line) for line in node.log_path.read_text().splitlines()]
    return [one for one in lines if one["event"] == event and one.get("listener") == listener]


class Authority:
    """A CA with its certificates and its list of those that are good no more."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.ca = trustme.CA(organization_name=name)
        self.ca_file = folder / f"{name}-ca.pem"
        self.crl_file = folder / f"{name}.crl"
        self.ca.cert_pem.write_to_path(str(self.ca_file))
        self.revoked: list[trustme.LeafCert] = []
        self.leaves: dict[str, trustme.LeafCert] = {}
        self.revoke()

    def issue(self, name: str, *dns_names: str) -> tuple[str, str]:
        """Certificate and key, as files."""
        leaf = self.leaves[name] = self.ca.issue_cert(*dns_names, common_name=name)
        pem, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        pem.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        key.write_bytes(leaf.private_key_pem.bytes())
        key.chmod(0o600)
        return str(pem), str(key)

    def revoke(self, *names: str) -> None:
        """Publish a list with these, too."""
        self.revoked += [self.leaves[name] for name in names]
        new = self.crl_file.with_suffix(".new")
        new.write_bytes(crl_of(self.ca, *self.revoked))
        os.replace(new, self.crl_file)


def reload(nodes: list[Node], listener: str) -> None:
    """Have nodes load their lists, by SIGHUP, and wait until they have."""
    before = [len(events(node, LOADED, listener)) for node in nodes]
    for node in nodes:
        node.signal(signal.SIGHUP)
    for node, count in zip(nodes, before, strict=True):
        wait_until(
            lambda n=node, c=count: len(events(n, LOADED, listener)) > c, 60, "the list is loaded"
        )


# ---- certificates of clients ----


def established(ports: set[int]) -> set[int]:
    """Our ends of connections to these ports."""
    found = psutil.Process().net_connections("tcp")
    return {c.laddr.port for c in found if c.status == "ESTABLISHED" and c.raddr.port in ports}


def test_a_producer_whose_certificate_is_revoked(tmp_path: Path) -> None:
    """Its connections end at the reload, and no other one comes about; nothing that was
    acknowledged is lost, and another producer of the same listener keeps its connections."""
    clients = Authority(tmp_path, "clients")
    node_pair = clients.issue("node", "127.0.0.1")
    pairs = {name: clients.issue(name, f"{name}.example.org") for name in ("alice", "bob")}
    cluster = Cluster(tmp_path)
    ports = dict(zip(cluster.nodes, free_ports(3, "127.0.0.1"), strict=True))
    for node_id, node in cluster.nodes.items():
        table = {
            "address": f"127.0.0.1:{ports[node_id]}",
            "protocol": "SSL",
            "certificate_file": node_pair[0],
            "key_file": node_pair[1],
            "client_certificates": "required",
            "client_ca_file": str(clients.ca_file),
            "client_crl_file": str(clients.crl_file),
        }
        node.environment["RAFTMQ_LISTENERS"] = json.dumps({"MUTUAL": table})
    bootstrap = ",".join(f"127.0.0.1:{port}" for port in ports.values())

    def settings(name: str, errors: list[str]) -> dict[str, Any]:
        certificate, key = pairs[name]
        return {
            "security.protocol": "ssl",
            "ssl.ca.location": str(clients.ca_file),
            "ssl.certificate.location": certificate,
            "ssl.key.location": key,
            "error_cb": lambda error: errors.append(error.str()),
            "message.timeout.ms": 15_000,
            "log_level": 0,
        }

    with cluster, ExitStack() as stack:
        told: dict[str, list[str]] = {"alice": [], "bob": []}
        loads = {}
        for name, errors in told.items():
            create_topic(cluster.bootstrap, name, 3, min_insync_replicas="2")
            load = Load(bootstrap, name, 3, rate=200, **settings(name, errors))
            loads[name] = stack.enter_context(load)
        alice, bob = loads["alice"], loads["bob"]
        for load in loads.values():
            load.wait_for(300)
        before = established(set(ports.values()))
        clients.revoke("alice")
        reload(list(cluster.nodes.values()), "MUTUAL")
        sent = alice.sent
        ended = [sum(one["n"] for one in events(n, ENDED, "MUTUAL")) for n in cluster.live]
        assert all(ended), "each node has ended some"
        wait_until(
            lambda: any("certificate revoked" in one for one in told["alice"]),
            60,
            f"the client itself says so: {told['alice'][-3:]}",
        )
        wait_until(lambda: alice.errors, 60, "it gives up")
        bob.wait_for(300)
        kept = established(set(ports.values()))
        alice.stop()
        bob.stop()
        late = [n for one in alice.acknowledged for n in one if n >= sent]
        assert late == [], "nothing is acknowledged after the reload"
        there = [n for p in range(3) for _, n in read_numbers(cluster.bootstrap, "alice", p)]
        assert max(there) < sent, "nor written"
        alice.reckon(cluster.bootstrap).check()
        assert told["bob"] == bob.errors == []
        bob.reckon(cluster.bootstrap).check()
        assert len(before & kept) >= 3, "bob's stay as they are"
        page = "".join(node.text("/metrics") for node in cluster.live)
        assert 'raftmq_tls_handshake_failures_total{reason="certificate"}' in page


# ---- users ----

FAILED = {
    "confluent-kafka": "invalid credentials with SASL mechanism SCRAM-SHA-512",
    "kafka-python": "SaslAuthenticationFailed",
    "aiokafka": "invalid credentials with SASL mechanism SCRAM-SHA-512",
}
"""What each client says that does not come in."""


class Users:
    """One node whose clients have to authenticate, and its users."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.cluster = Cluster(folder, nodes=1, settings=settings)
        (port,) = free_ports(1, "127.0.0.1")
        self.address = f"127.0.0.1:{port}"
        tables = {"SASL": {"address": self.address, "protocol": "SASL_PLAINTEXT"}}
        self.cluster[1].environment["RAFTMQ_LISTENERS"] = json.dumps(tables)

    def _run(self, *words: str) -> None:
        done = self.cluster.run("user", *words)
        assert done.returncode == 0, done.stderr

    def set(self, what: str, user: str, password: str) -> None:
        """`create` or `password`."""
        file = self.folder / f"{user}.txt"
        file.write_text(password)
        self._run(what, user, "--password-file", str(file))

    def delete(self, user: str) -> None:
        self._run("delete", user)

    def topic(self, name: str) -> str:
        create_topic(self.cluster.bootstrap, name, 1, 1)
        return name

    def sender(self, client: str, topic: str, user: str, password: str) -> Sender:
        return Sender(client, self.address, topic, user, password)

    def check(self, sender: Sender, topic: str) -> None:
        """All that was acknowledged is there, where it was told to be."""
        there = dict(read_numbers(self.cluster.bootstrap, topic, 0))
        missing = {n: o for n, o in sender.acked.items() if there.get(o) != n}
        assert missing == {}

    def authentications(self) -> float:
        page = self.cluster[1].text("/metrics")
        name = "raftmq_authentications_total{"
        rows = [line for line in page.splitlines() if line.startswith(name)]
        return sum(float(row.rpartition(" ")[2]) for row in rows)


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Users]:
    found = Users(tmp_path_factory.mktemp("users"))
    with found.cluster:
        found.set("create", "bob", "bob-secret")
        yield found


@pytest.mark.parametrize("client", CLIENTS)
def test_a_user_that_is_deleted(users: Users, client: str) -> None:
    user, topic, others = f"gone-{client}", users.topic(f"gone-{client}"), f"others-{client}"
    users.set("create", user, "first")
    users.topic(others)
    with (
        users.sender("confluent-kafka", others, "bob", "bob-secret") as bob,
        users.sender(client, topic, user, "first") as sender,
    ):
        sender.wait_acked(50)
        bob.wait_acked(50)
        users.delete(user)
        sender.wait_told(FAILED[client])
        acked = len(sender.acked)
        sender.wait_given_up(2)
        assert len(sender.acked) == acked, "nothing more"
        # The node has no sessions of it, and writes nothing for it any more.
        written = len(read_numbers(users.cluster.bootstrap, topic, 0))
        sender.wait_given_up(1)
        assert len(read_numbers(users.cluster.bootstrap, topic, 0)) == written
        bob.wait_acked(50)
    users.check(sender, topic)
    users.check(bob, others)
    assert bob.errors == [], "others lose nothing"


@pytest.mark.parametrize("client", CLIENTS)
def test_a_password_that_is_changed(users: Users, client: str) -> None:
    """Connections that are open go on; whoever comes with the old one is refused."""
    user, topic = f"changed-{client}", users.topic(f"changed-{client}")
    users.set("create", user, "first")
    with users.sender(client, topic, user, "first") as sender:
        sender.wait_acked(50)
        came_in = users.authentications()
        users.set("password", user, "second")
        sender.wait_acked(200)
        assert users.authentications() == came_in, "by the same connections"
        with users.sender(client, topic, user, "first") as late:
            late.wait_told(FAILED[client])
            assert late.acked == {}
        with users.sender(client, topic, user, "second") as new:
            new.wait_acked(20)
        sender.wait_acked(50)
    assert sender.errors == []
    users.check(sender, topic)
    assert new.errors == []


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Users]:
    found = Users(tmp_path_factory.mktemp("sessions"), sasl_session_ms_max=4_000)
    with found.cluster:
        yield found


@pytest.mark.parametrize("client", CLIENTS)
def test_a_session_ends_with_a_password_that_was_changed(sessions: Users, client: str) -> None:
    """Clients come in again and again by the right one, and lose nothing by that."""
    user, topic = f"session-{client}", sessions.topic(f"session-{client}")
    sessions.set("create", user, "first")
    with sessions.sender(client, topic, user, "first") as sender:
        sender.wait_acked(50)
        came_in = sessions.authentications()
        wait_until(lambda: sessions.authentications() >= came_in + 2, 60, "it comes in again")
        assert sender.given_up == []
        sessions.set("password", user, "second")
        sender.wait_told(FAILED[client])
        acked = len(sender.acked)
        sender.wait_given_up(2)
        assert len(sender.acked) == acked
    sessions.check(sender, topic)


# ---- operators ----

TOKENS = ("first-token-of-operators", "second-token-of-operators")


def https(node: Node, context: ssl.SSLContext) -> http.client.HTTPSConnection:
    return http.client.HTTPSConnection(node.host, node.admin_port, context=context, timeout=20)


def status_of(connection: http.client.HTTPConnection, token: str = "") -> int:
    """What a request that changes nothing gets, on a connection that goes on."""
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    connection.request("POST", "/balance", b'{"dry_run": true}', headers)
    answer = connection.getresponse()
    answer.read()
    return answer.status


def test_operators_at_the_admin_port(tmp_path: Path) -> None:
    """A connection ends with its certificate, and loses its rights with its token."""
    operators = Authority(tmp_path, "operators")
    node_pair = operators.issue("node", "127.0.0.1")
    pairs = {name: operators.issue(name, f"{name}.example.org") for name in ("alice", "bob")}
    token_file = tmp_path / "tokens"
    token_file.write_text(TOKENS[0])
    token_file.chmod(0o600)
    settings = {
        "admin_certificate_file": node_pair[0],
        "admin_key_file": node_pair[1],
        "admin_client_ca_file": str(operators.ca_file),
        "admin_client_crl_file": str(operators.crl_file),
        "admin_token_file": str(token_file),
    }
    cluster = Cluster(tmp_path, nodes=1, settings=settings)
    node = cluster[1]
    trusting = ssl.create_default_context(cafile=str(operators.ca_file))
    node.admin_context = trusting

    def context(name: str) -> ssl.SSLContext:
        found = ssl.create_default_context(cafile=str(operators.ca_file))
        found.load_cert_chain(*pairs[name])
        return found

    def command(name: str) -> Any:
        certificate, key = pairs[name]
        return run_command(
            ("node", "cordon", "1", "--dry-run", "--bootstrap", cluster.bootstrap),
            timeout_s=60,
            RAFTMQ_ADMIN_CA_FILE=str(operators.ca_file),
            RAFTMQ_ADMIN_CLIENT_CERTIFICATE_FILE=certificate,
            RAFTMQ_ADMIN_CLIENT_KEY_FILE=key,
        )

    with cluster, ExitStack() as stack:

        def opened(one: ssl.SSLContext) -> http.client.HTTPSConnection:
            connection = https(node, one)
            stack.callback(connection.close)
            return connection

        alice, bob, holder = opened(context("alice")), opened(context("bob")), opened(trusting)
        for _ in range(2):
            assert [status_of(alice), status_of(bob), status_of(holder, TOKENS[0])] == [200] * 3
        assert command("alice").returncode == 0
        sock = alice.sock
        operators.revoke("alice")
        reload([node], "admin_listener")
        (ended,) = events(node, ENDED, "admin_listener")
        assert ended["n"] == 1
        assert alice.sock is sock, "still the same connection"
        with pytest.raises((http.client.RemoteDisconnected, ConnectionError, ssl.SSLError)):
            status_of(alice)
        with pytest.raises(ssl.SSLError, match=r"(?i)certificate revoked"):
            status_of(opened(context("alice")))
        refused = command("alice")
        assert refused.returncode != 0
        assert "CERTIFICATE_REVOKED" in refused.stderr, refused.stderr
        assert [status_of(bob), status_of(holder, TOKENS[0])] == [200] * 2, "others go on"

        sock = holder.sock
        token_file.write_text(TOKENS[1])
        wait_until(lambda: status_of(holder, TOKENS[0]) == 401, 30, "the old token is none")
        assert holder.sock is sock, "on the same connection"
        assert status_of(holder, TOKENS[1]) == 200
        assert status_of(bob) == 200


# ---- nodes ----


def test_a_node_whose_certificate_is_revoked(tmp_path: Path) -> None:
    """Its links end at the reload on both others, which go on without it; by another certificate it
    comes back, and nothing is lost."""
    peers = Authority(tmp_path, "peers")
    cluster = Cluster(tmp_path, settings={"peer_tls": "required"})
    for node_id, node in cluster.nodes.items():
        certificate, key = peers.issue(f"peer-{node_id}", node_name(node_id))
        node.environment |= {
            "RAFTMQ_PEER_CERTIFICATE_FILE": certificate,
            "RAFTMQ_PEER_KEY_FILE": key,
            "RAFTMQ_PEER_CA_FILE": str(peers.ca_file),
            "RAFTMQ_PEER_CRL_FILE": str(peers.crl_file),
        }
    with cluster:
        create_topic(cluster.bootstrap, "t", 3, min_insync_replicas="2")
        first, second, third = cluster.nodes.values()
        others = cluster.bootstrap_of((1, 2))
        with Load(others, "t", 3, rate=500) as load:
            load.wait_for(500)
            peers.revoke("peer-3")
            reload([first, second], "peer_listener")
            for node in (first, second):
                ended = events(node, ENDED, "peer_listener")
                assert sum(one["n"] for one in ended) > 0
            wait_until(
                lambda: set(map(frozenset, in_sync(others, "t").values())) == {frozenset({1, 2})},
                60,
                "it is in sync no more",
            )
            load.wait_for(500)
            wait_until(lambda: "revoked" in third.log_tail(), 60, "it hears why")
            size = len(third.log_path.read_text())
            third.signal(signal.SIGHUP)
            wait_until(
                lambda: "the old ones stay" in third.log_path.read_text()[size:],
                30,
                "a node does not load the list that its own certificate is in",
            )
            peers.issue("peer-3", node_name(3))
            reload([third], "peer_listener")
            wait_until(
                lambda: set(map(len, in_sync(others, "t").values())) == {3}, 90, "it is back"
            )
            load.wait_for(500)
        assert load.errors == []
        load.reckon(others).check()
