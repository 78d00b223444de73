"""The command line at a node that lets nobody in without a user, TLS and, for its admin port, a
token: one file says it all."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from jepsen_like.live.cluster import free_ports
from tests.live.harness import Cluster, need, run_command
from tests.server.kafka.tls_clients import write_files

pytestmark = [pytest.mark.live, pytest.mark.slow]

PASSWORD = "a-secret-of-the-admin"
TOKEN = "the-token-of-operators"
AT_ONCE_S = 20.0
"""Far less than the 100 s that commands are allowed to wait, on a slow machine."""


class Guarded:
    """The node, and files of those who come."""

    def __init__(self, cluster: Cluster, folder: Path, address: str) -> None:
        self.cluster = cluster
        self.folder = folder
        self.address = address

    def file(self, name: str = "admin.toml", **changes: str) -> str:
        """A file of the admin, with some words changed; `__` stands for a dot."""
        words = {
            "bootstrap.servers": self.address,
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": "admin",
            "sasl.password": PASSWORD,
            "ssl.ca.location": "ca.pem",
            "admin.token_file": "token",
            **{word.replace("__", "."): value for word, value in changes.items()},
        }
        path = self.folder / name
        if path.suffix == ".toml":
            text = "".join(f"{word} = {json.dumps(value)}\n" for word, value in words.items())
        else:
            words["ssl.ca.location"] = str(self.folder / "ca.pem")
            text = "".join(f"{w}={v}\n" for w, v in words.items() if not w.startswith("admin."))
        path.write_text(text)
        path.chmod(0o600)
        return str(path)

    def run(self, *words: str, file: str = "") -> subprocess.CompletedProcess[str]:
        return run_command(words, timeout_s=120, RAFTMQ_SECURITY=file or self.file())

    def done(self, *words: str) -> str:
        found = self.run(*words)
        assert found.returncode == 0, found.stderr
        return found.stdout


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    files = write_files(folder)
    secrets = {
        "token": f"{TOKEN}\n".encode(),
        "first.txt": f"admin:{PASSWORD}\n".encode(),
    }
    for name, data in secrets.items():
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o600)
    settings = {
        "authorizer": "acl",
        "sasl_mechanisms": "SCRAM-SHA-512,PLAIN",
        "super_users": ["User:admin"],
        "first_user_file": str(folder / "first.txt"),
        "admin_token_file": str(folder / "token"),
    }
    cluster = Cluster(folder, nodes=1, settings=settings)
    (port,) = free_ports(1, "127.0.0.1")
    table = {
        "address": f"127.0.0.1:{port}",
        "protocol": "SASL_SSL",
        **files.keys,
    }
    cluster[1].environment["RAFTMQ_LISTENERS"] = json.dumps({"CLIENTS": table})
    with cluster:
        yield Guarded(cluster, folder, f"127.0.0.1:{port}")


def test_records_groups_rights_and_users(guarded: Guarded) -> None:
    guarded.done("topic", "create", "orders", "-p", "2")
    guarded.done("produce", "orders", "hello")
    assert "hello" in guarded.done("consume", "orders", "-c", "1")
    assert "hello" in guarded.done("consume", "orders", "-G", "billing", "-c", "1")
    assert "billing" in guarded.done("group", "list")
    (guarded.folder / "alice.txt").write_text("alice-secret")
    guarded.done("user", "create", "alice", "--password-file", str(guarded.folder / "alice.txt"))
    rule = ("--allow-principal", "User:alice", "--operation", "read", "--topic", "orders")
    guarded.done("acl", "create", *rule)
    assert "User:alice" in guarded.done("acl", "list")
    guarded.done("bench", "-c", "200")
    guarded.done("txn", "list")
    guarded.done("dead", "list")
    guarded.done("leader", "list")
    guarded.done("node", "config", "show", "1")
    alice = guarded.file("alice.toml", sasl__username="alice", sasl__password="alice-secret")
    assert "orders" in guarded.run("topic", "list", file=alice).stdout
    refused = guarded.run("topic", "create", "more", file=alice)
    assert (refused.returncode, "AUTHORIZATION_FAILED" in refused.stderr) == (1, True)


def test_admin_ports_with_the_token_of_the_file(guarded: Guarded) -> None:
    guarded.done("node", "cordon", "1")
    assert "cordoned" in guarded.done("node", "list")
    guarded.done("node", "uncordon", "1")
    assert "nothing is stuck" in guarded.done("why")
    (node,) = json.loads(guarded.done("cluster", "status", "--json"))["Nodes"]
    assert (node["NodeId"], node["State"]) == (1, "ok")
    (guarded.folder / "guess").write_text("a-token-that-nobody-knows")
    (guarded.folder / "guess").chmod(0o600)
    wrong = guarded.run(
        "node", "cordon", "1", file=guarded.file("x.toml", admin__token_file="guess")
    )
    assert wrong.returncode == 1
    assert "no token of this port" in wrong.stderr


def test_one_file_of_properties_is_kcats_as_well(guarded: Guarded) -> None:
    """By PLAIN: below 2.6.1 librdkafka breaks SCRAM."""
    file = guarded.file("admin.properties", sasl__mechanism="PLAIN")
    guarded.done("topic", "create", "shared")
    assert "shared" in guarded.run("topic", "list", file=file).stdout
    told = subprocess.run(
        [need("kcat"), "-F", file, "-L"], capture_output=True, text=True, timeout=60, check=False
    )
    assert '"shared"' in told.stdout, told.stderr


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sasl__password": "a guess"}, "SCRAM-SHA-512: "),
        ({"sasl__username": "nobody"}, "SCRAM-SHA-512: "),
        ({"ssl__ca__location": "other.pem"}, "TLS: the certificate is not trusted"),
    ],
)
def test_who_is_not_let_in_hears_so_at_once(
    guarded: Guarded, changes: dict[str, str], told: str
) -> None:
    trustme.CA().cert_pem.write_to_path(str(guarded.folder / "other.pem"))
    file = guarded.file("wrong.toml", **changes)
    for words in (("topic", "list", "--timeout", "100"), ("consume", "t"), ("produce", "t", "x")):
        begun = time.monotonic()
        done = guarded.run(*words, file=file)
        assert time.monotonic() - begun < AT_ONCE_S
        assert done.returncode == 1
        assert told in done.stderr
        assert "Traceback" not in done.stderr
        assert "a guess" not in done.stderr
    assert "a guess" not in guarded.cluster[1].log_path.read_text()
    assert PASSWORD not in guarded.cluster[1].log_path.read_text()


def test_looking_whether_a_port_is_there_is_no_failed_handshake(guarded: Guarded) -> None:
    before = guarded.cluster[1].log_path.read_text().count("TLS handshake failed")
    guarded.done("topic", "list")
    after = guarded.cluster[1].log_path.read_text().count("TLS handshake failed")
    assert after == before
