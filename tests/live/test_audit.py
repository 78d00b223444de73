"""The audit files of real nodes: what clients and operators did stands there once, also after a
file was moved."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import struct
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import confluent_kafka
import pytest

from jepsen_like.live.cluster import free_ports
from raftmq.protocol import (
    ANNOUNCED,
    ApiKey,
    decode_response,
    decode_response_header,
    encode_request,
    encode_request_header,
)
from raftmq.server.kafka.audited import CHANGES
from tests.live.harness import Cluster, Node, run_command, wait_until
from tests.live.load import create_topic
from tests.live.raw import ask, receive
from tests.server.kafka.test_guards import requests

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


# ---- every administrative path: one line, where the request came to ----

PASSWORD = "eve-secret"
TOKEN = "a-token-of-the-operators"
HERE = "here"
ANONYMOUS = "User:ANONYMOUS"


class Audited:
    """Three nodes that write what is done. Whoever comes by the plain listener may do everything;
    eve, who has to log in, may do nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token_file = folder / "token"
        self.token_file.write_text(TOKEN)
        self.token_file.chmod(0o600)
        settings = {
            "authorizer": "acl",
            "super_users": [ANONYMOUS],
            "sasl_mechanisms": "PLAIN,SCRAM-SHA-256",
            "sasl_plain_without_tls": True,
            "admin_token_file": str(self.token_file),
        }
        self.cluster = Cluster(folder, settings=settings)
        self.ports = dict(zip(self.cluster.nodes, free_ports(3, "127.0.0.1"), strict=True))
        for node_id, node in self.cluster.nodes.items():
            table = {"address": f"127.0.0.1:{self.ports[node_id]}", "protocol": "SASL_PLAINTEXT"}
            node.environment["RAFTMQ_LISTENERS"] = json.dumps({"SASL": table})
            node.environment["RAFTMQ_AUDIT_FILE"] = str(self.path(node_id))
        self._sentinels = 0

    def path(self, node_id: int) -> Path:
        return self.folder / f"audit-{node_id}.jsonl"

    def prepare(self) -> None:
        """Eve, a topic, and a group that had members."""
        (self.folder / "eve.txt").write_text(PASSWORD)
        words = ("--password-file", str(self.folder / "eve.txt"))
        assert self.run("user", "create", "eve", *words).returncode == 0
        security = self.folder / "eve.toml"
        security.touch(mode=0o600)
        security.write_text(
            f'bootstrap.servers = "127.0.0.1:{self.ports[1]}"\n'
            'security.protocol = "SASL_PLAINTEXT"\nsasl.mechanism = "SCRAM-SHA-256"\n'
            f'sasl.username = "eve"\nsasl.password = "{PASSWORD}"\n'
        )
        create_topic(self.cluster.bootstrap, HERE, 1)
        for group in ("billing", "parting"):
            consumer = confluent_kafka.Consumer(
                {
                    "bootstrap.servers": self.cluster.bootstrap,
                    "group.id": group,
                    "auto.offset.reset": "earliest",
                }
            )
            consumer.subscribe([HERE])
            wait_until(lambda c=consumer: c.poll(0.1) is None and c.assignment(), 60, "members")
            where = confluent_kafka.TopicPartition(HERE, 0, 0)
            consumer.commit(offsets=[where], asynchronous=False)
            consumer.close()

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A command of raftmq, by the plain listener."""
        place = {"RAFTMQ_BOOTSTRAP": self.cluster.bootstrap, **environment}
        return run_command(words, timeout_s=120, **place)

    def told(self, act: Callable[[], Any]) -> list[dict[str, Any]]:
        """The lines of all nodes that come of something: those before a request that is made
        afterwards, at each node."""
        before = {node_id: len(lines(self.path(node_id))) for node_id in self.cluster.nodes}
        act()
        found = []
        for node_id, node in self.cluster.nodes.items():
            self._sentinels += 1
            name = f"sentinel-{self._sentinels}"
            rule = {"resource_type": 2, "resource_name": name, "resource_pattern_type": 3}
            right = {"principal": "User:x", "host": "*", "operation": 3, "permission_type": 3}
            # One that is made: the number of those that fail is bounded.
            ask_fields(node, ApiKey.CREATE_ACLS, 3, {"creations": [{**rule, **right}]})
            wait_until(lambda i=node_id, n=name: told_of(lines(self.path(i)), n), 60, "its line")
            new = lines(self.path(node_id))[before[node_id] :]
            found += [line for line in new if not told_of([line], name)]
        return found

    def ask_as_eve(self, node_id: int, api: ApiKey, version: int, fields: dict[str, Any]) -> None:
        """One request of somebody who has logged in."""
        with socket.create_connection(("127.0.0.1", self.ports[node_id]), timeout=20) as sock:
            proof = f"\0eve\0{PASSWORD}".encode()
            for key, number, body in (
                (ApiKey.SASL_HANDSHAKE, 1, {"mechanism": "PLAIN"}),
                (ApiKey.SASL_AUTHENTICATE, 2, {"auth_bytes": proof}),
                (api, version, fields),
            ):
                frame = encode_request_header(key, number, 7, "raw")
                frame += encode_request(key, number, body)
                sock.sendall(struct.pack(">i", len(frame)) + frame)
                (size,) = struct.unpack(">i", receive(sock, 4))
                answer = memoryview(receive(sock, size))
                _, position = decode_response_header(key, number, answer)
                decoded = decode_response(key, number, answer[position:])
                assert key is api or not decoded.error_code


def told_of(found: list[dict[str, Any]], topic: str) -> bool:
    """A line is about this topic."""
    resource = f"topic:{topic}"
    return any(one["resource"] == resource for line in found for one in line.get("changes", ()))


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Audited]:
    found = Audited(tmp_path_factory.mktemp("audited"))
    with found.cluster:
        found.prepare()
        yield found


def of_kind(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [line for line in found if line["kind"] == kind]


def fields_of(api: ApiKey) -> dict[str, Any]:
    if api is ApiKey.UPDATE_FEATURES:
        update = {"feature": "raftmq.level", "max_version_level": 1, "allow_downgrade": False}
        return {"feature_updates": [{**update, "upgrade_type": 1}], "timeout": 10_000}
    fields = requests(f"raw-{api.title}", UUID(int=7))[api]
    if api is ApiKey.DELETE_TOPICS:
        fields = {**fields, "topics": fields["topics"][:1]}
    return {**fields, "timeout": 10_000} if "timeout" in fields else fields


@pytest.mark.parametrize("api", CHANGES, ids=lambda api: api.title)
def test_each_request_that_changes_something_leaves_one_line(audited: Audited, api: ApiKey) -> None:
    """Also where another node decides; and one that is denied leaves one for each right, once."""
    cluster = audited.cluster
    controller = cluster[1].get("/status")["metadata"]["leader"]
    node_id = next(n for n in cluster.nodes if n != controller)
    version = ANNOUNCED[api][1]
    fields = fields_of(api)
    found = audited.told(lambda: ask_fields(cluster[node_id], api, version, fields))
    (line,) = found
    assert (line["kind"], line["request"], line["node"]) == ("administration", api.title, node_id)
    assert (line["principal"], line["host"]) == (ANONYMOUS, "127.0.0.1")
    assert (line["listener"], line["client_id"]) == ("PLAINTEXT", "raw")
    assert line["outcome"] in ("ok", "partial", "failed")

    found = audited.told(lambda: audited.ask_as_eve(node_id, api, version, fields))
    assert {line["node"] for line in found} == {node_id}
    assert {line["principal"] for line in found} == {"User:eve"}
    (line,) = of_kind(found, "administration")
    assert (line["request"], line["outcome"]) == (api.title, "failed")
    assert len(of_kind(found, "authentication")) == 1
    denials = [(one["operation"], one["resource"]) for one in of_kind(found, "denial")]
    assert denials
    assert len(set(denials)) == len(denials), "each right once"
    assert PASSWORD not in audited.path(node_id).read_text()


def ask_fields(node: Node, api: ApiKey, version: int, fields: dict[str, Any]) -> None:
    ask(node, api, version, fields)  # type: ignore[arg-type]  # what is encoded may be either


COMMANDS: list[tuple[str, list[str]]] = [
    ("topic create orders -p 2 -r 1", ["CreateTopics"]),
    ("topic alter orders --set retention.ms=3600000", ["IncrementalAlterConfigs"]),
    ("topic add-partitions orders 3", ["CreatePartitions"]),
    ("topic trim orders --partition 0 --before 0", ["DeleteRecords"]),
    ("topic shrink orders --partitions 2 --now", ["POST /topics/shrink"]),
    ("acl create --allow-principal User:bob --operation read --topic orders", ["CreateAcls"]),
    ("acl delete --principal User:bob", ["DeleteAcls"]),
    ("user delete mallory --mechanism SCRAM-SHA-256", ["AlterUserScramCredentials"]),
    ("group seek billing --to earliest", ["OffsetCommit"]),
    ("group delete parting", ["DeleteGroups"]),
    ("cluster config set replica.catchup.bytes.per.s=1048576", ["IncrementalAlterConfigs"]),
    ("node config set 2 replica.catchup.bytes.per.s=1048576", ["IncrementalAlterConfigs"]),
    ("view create refunds --of here --where \"tag = 'refund'\"", ["CreateTopics"]),
    ("view delete refunds", ["DeleteTopics"]),
    ("leader transfer here 0 2", ["POST /leaders/transfer"]),
    ("node cordon 3", ["POST /nodes/change"]),
    ("node uncordon 3", ["POST /nodes/change"]),
    ("cluster balance --no-wait", ["POST /balance"]),
    ("topic delete orders", ["DeleteTopics"]),
]
"""Commands, and what each asks for."""


def test_each_command_leaves_one_line_for_each_request(audited: Audited) -> None:
    audited.run("user", "create", "mallory", "--password-file", str(audited.folder / "eve.txt"))
    token = {"RAFTMQ_ADMIN_TOKEN_FILE": str(audited.token_file)}
    seen = {}
    done: list[Any] = []
    for command, _ in COMMANDS:
        words = shlex.split(command)
        found = audited.told(lambda w=words: done.append(audited.run(*w, **token)))
        assert done[-1].returncode == 0, (command, done[-1].stderr)
        seen[command] = [line["request"] for line in of_kind(found, "administration")]
        assert {line["outcome"] for line in found} == {"ok"}, (command, found)
        assert {line["kind"] for line in found} == {"administration"}, command
    assert seen == dict(COMMANDS)


def test_each_denied_command_leaves_its_lines(audited: Audited) -> None:
    """At the port of clients the request and the right that lacks; at the admin port the latter."""
    eve = ("--security", str(audited.folder / "eve.toml"))
    place = {"RAFTMQ_BOOTSTRAP": f"127.0.0.1:{audited.ports[1]}"}
    made = audited.told(lambda: audited.run("topic", "create", "mine", *eve, **place))
    assert [line["outcome"] for line in of_kind(made, "authentication")].count("ok") > 0
    (line,) = of_kind(made, "administration")
    assert (line["principal"], line["outcome"]) == ("User:eve", "failed")
    (denial,) = of_kind(made, "denial")
    assert (denial["principal"], denial["request"]) == ("User:eve", "CreateTopics")
    (line,) = audited.told(lambda: audited.run("node", "cordon", "3"))
    assert (line["kind"], line["request"]) == ("denial", "POST /nodes/change")
    assert line["listener"] == "admin_listener"
    (line,) = audited.told(lambda: post(audited.cluster[2], "x" * 20))
    assert (line["kind"], line["outcome"]) == ("authentication", "failed")
    assert (line["mechanism"], line["node"]) == ("token", 2)


def post(node: Node, token: str) -> None:
    """A change at the admin port, by a token that is none of it."""
    url = f"http://{node.host}:{node.admin_port}/nodes/change"
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, b'{"ids": [3], "change": "cordon"}', headers)
    with pytest.raises(urllib.error.HTTPError, match="401") as caught:
        urllib.request.urlopen(request, timeout=20)
    caught.value.close()


def test_a_topic_that_a_client_names_leaves_one_line(audited: Audited) -> None:
    def produce() -> None:
        producer = confluent_kafka.Producer({"bootstrap.servers": audited.cluster.bootstrap})
        producer.produce("named", b"x")
        assert producer.flush(60) == 0

    (line,) = audited.told(produce)
    assert (line["request"], line["outcome"]) == ("Metadata", "ok")
    assert line["changes"][0]["resource"] == "topic:named"
