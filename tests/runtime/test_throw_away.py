"""The CA, users and token of a local cluster: made once, and trusted by both sides."""

from __future__ import annotations

import builtins
import ssl
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from raftmq.config import load_config
from raftmq.errors import RaftmqError
from raftmq.runtime.certificates import files_of, load, subject
from raftmq.runtime.peer_tls import load_peer_files, peer_files
from raftmq.runtime.throw_away import (
    ADMIN,
    MODES,
    USER,
    NoCryptographyError,
    ThrowAwaySecurity,
    toml_text,
)
from raftmq.tls import TlsLayer, TlsTrustError
from raftmq_client.security_file import read_security_file


def config_of(security: ThrowAwaySecurity, folder: Path) -> Any:
    keys = {
        "node_id": 1,
        "cluster_id": "c",
        "data": str(folder / "data"),
        "peer_listener": "127.0.0.1:2",
        "admin_listener": "127.0.0.1:3",
        "peers": [{"id": 1, "host": "127.0.0.1", "port": 2}],
        **security.node_settings(1, "127.0.0.1:1"),
    }
    return load_config("".join(f"{key} = {toml_text(value)}\n" for key, value in keys.items()))


def shake(server: ssl.SSLContext, client: ssl.SSLContext) -> TlsLayer:
    """Both sides of a handshake in memory; the server's."""
    ours = TlsLayer(client, "127.0.0.1")
    theirs = TlsLayer(server, is_server=True)
    for _ in range(6):
        for one, other in ((ours, theirs), (theirs, ours)):
            one.shake() if not one.is_ready else one.read_into(memoryview(bytearray(1)))
            for piece in one.outgoing():
                other.feed(piece)
    return theirs


@pytest.mark.parametrize("mode", MODES)
def test_a_node_takes_it_and_clients_come_in(tmp_path: Path, mode: str) -> None:
    security = ThrowAwaySecurity.make(tmp_path / "s", mode, [1, 2])
    config = config_of(security, tmp_path)
    (listener,) = config.client_listeners
    assert listener.protocol == security.protocol
    assert config.peer_tls == "required"
    load_peer_files(peer_files(config), 1)
    user = USER if mode == "tls" else ADMIN
    security.write_client_files(user, "127.0.0.1:1")
    said = read_security_file(tmp_path / "s" / f"{user}.toml")
    assert said.bootstrap == "127.0.0.1:1"
    assert said.admin.token == security.admin_token
    shown = said.access.security()
    assert shown is not None
    assert shown.tls is not None
    met = shake(load(files_of(listener)).context, shown.tls)
    assert met.is_ready
    if mode == "mtls":
        assert met.peer_certificate is not None
        assert f"User:{subject(met.peer_certificate)}" == security.principal(ADMIN)
        assert config.super_users == ("User:CN=admin",)
    assert (said.access.password == security.password(user) != "") == (mode == "scram")
    properties = read_security_file(tmp_path / "s" / f"{user}.properties")
    assert properties.access.password == said.access.password
    assert properties.admin.token == ""


def test_it_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    assert ThrowAwaySecurity.of(folder) is None
    first = ThrowAwaySecurity.make(folder, "scram", [1])
    texts = {path.name: path.read_bytes() for path in folder.iterdir()}
    again = ThrowAwaySecurity.make(folder, "scram", [1, 2])
    assert ThrowAwaySecurity.of(folder) == first == again
    assert {name: (folder / name).read_bytes() for name in texts} == texts
    again.write_client_files(ADMIN, "h:1")
    assert len({again.password(ADMIN), again.password(USER), again.admin_token}) == 3
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(RaftmqError, match="was made for scram, not mtls"):
        ThrowAwaySecurity.make(folder, "mtls", [1])


def test_a_certificate_that_lapsed_is_refused_and_one_of_a_node_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    security = ThrowAwaySecurity.make(folder, "mtls", [1])
    (listener,) = config_of(security, tmp_path).client_listeners
    server = load(files_of(listener))
    assert server.expires_s > datetime.now(UTC).timestamp() + 20 * 86_400
    security.add_user("late", is_expired=True)
    security.write_client_files("late", "h:1")
    shown = read_security_file(folder / "late.toml").access.security()
    assert shown is not None
    assert shown.tls is not None
    with pytest.raises(TlsTrustError, match="certificate has expired"):
        shake(server.context, shown.tls)
    (folder / "node-1.pem").write_bytes((folder / "late.pem").read_bytes())
    (folder / "node-1.key").write_bytes((folder / "late.key").read_bytes())
    ThrowAwaySecurity.make(folder, "mtls", [1])
    assert load(files_of(listener)).expires_s > datetime.now(UTC).timestamp()


def test_what_is_not_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "cryptography":
            raise ModuleNotFoundError(name=name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(NoCryptographyError, match=r'pip install "raftmq\[secure\]"'):
        ThrowAwaySecurity.make(tmp_path, "scram", [1])


@pytest.mark.parametrize("name", ["ca", "peers-ca", "node-1", "peer-2", "first-user", "../a", ""])
def test_no_user_has_the_name_of_another_file(tmp_path: Path, name: str) -> None:
    security = ThrowAwaySecurity.make(tmp_path, "mtls", [1])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RaftmqError, match="no name of a user"):
        security.add_user(name)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_values_are_written_as_toml() -> None:
    value = {"a": {"b c": ["x", 1, True]}, "d": 'quote " and \\'}
    assert tomllib.loads(f"x = {toml_text(value)}")["x"] == value
