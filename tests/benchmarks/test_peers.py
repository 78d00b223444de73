"""Processes of a peer: who they share the cores with, and whose signals they get."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest

from benchmarks.peers import _end, _spawn
from benchmarks.secured import USER_PRINCIPAL, KafkaSecurity, let_in
from benchmarks.targets import Target
from raftmq.cli.dev_cluster import user_rules


def test_peers_share_the_session_and_not_the_process_group(tmp_path: Path) -> None:
    """A session is a share of the cores (autogroup); a group is who Ctrl-C is for."""
    process = _spawn(["sleep", "60"], tmp_path / "out")
    try:
        assert os.getsid(process.pid) == os.getsid(0)
        assert os.getpgid(process.pid) == process.pid
    finally:
        _end([process])


@pytest.mark.parametrize("variable", ["one", ""])
def test_the_environment_of_a_peer(tmp_path: Path, variable: str) -> None:
    output = tmp_path / "out"
    process = _spawn(["printenv", "RAFTMQ_PEER"], output, {"RAFTMQ_PEER": variable})
    assert process.wait(10) == 0
    assert output.read_text() == f"{variable}\n"


def test_a_secured_kafka_has_the_same_protection_and_shows_no_password(tmp_path: Path) -> None:
    security = KafkaSecurity.make(tmp_path / "security", range(1, 4))
    text = security.listeners(2, 1_000, 2_000, 3_000)
    lines = dict(line.split("=", 1) for line in text.splitlines())
    assert lines["listener.security.protocol.map"] == "CLIENTS:SASL_SSL,PEERS:SSL,CONTROLLER:SSL"
    assert lines["super.users"].split(";")[:2] == ["User:admin", "User:CN=node-1"]
    pair = Path(lines["ssl.keystore.location"])
    assert pair.stat().st_mode & 0o077 == 0
    context = ssl.create_default_context(cafile=lines["ssl.truststore.location"])
    context.load_cert_chain(pair)
    passwords = [security.made.password(user) for user in security.made.users]
    assert all(passwords)
    assert not any(password in text for password in passwords)
    target = Target("kafka", "127.0.0.1:1000")
    let_in(target, security.made)
    assert target.client["sasl.username"] == "alice"
    assert target.operator["sasl.username"] == "admin"
    assert USER_PRINCIPAL == "User:alice"
    assert {one.principal for one in user_rules(USER_PRINCIPAL)} == {"User:alice"}
