"""`raftmq config check --production`: what stands against a configuration where strangers are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tests.runtime.test_peer_secret import FIRST, SECOND
from tests.runtime.test_peer_tls import files as peer_files
from tests.server.kafka.tls_clients import write_files

SAFE = """
node_id = 1
data = "{folder}/data"
client_listener = "127.0.0.1:9092"
peer_listener = "10.0.0.1:9192"
admin_listener = "127.0.0.1:9292"
authorizer = "acl"
super_users = ["User:admin"]
[listeners.CLIENTS]
address = "0.0.0.0:9094"
advertised = "n1.example.org:9094"
protocol = "SASL_SSL"
certificate_file = "{certificate}"
key_file = "{key}"
"""


def write(folder: Path, **changes: str) -> Path:
    files = write_files(folder)
    files.key.chmod(0o600)
    text = SAFE.format(folder=folder, certificate=files.certificate, key=files.key)
    for before, after in changes.values():
        assert before in text
        text = text.replace(before, after)
    path = folder / "node.toml"
    path.write_text(text)
    return path


def verdicts(call: Call, path: Path, *, is_open: bool, **environment: str) -> dict[str, str]:
    words = ["config", "check", str(path), "--production", "--json", "--no-environment"]
    done = call(*words)
    assert done.exit_code == int(is_open), done.output
    return {row["Subject"]: row["Verdict"] for row in json.loads(done.stdout)}


def test_what_is_safe_has_nothing_open(call: Call, tmp_path: Path) -> None:
    assert verdicts(call, write(tmp_path), is_open=False) == {
        "listener PLAINTEXT": "ok",
        "listener CLIENTS": "ok",
        "authorizer": "ok",
        "peer_listener": "look",
        "admin_listener": "ok",
        "certificate of CLIENTS": "ok",
        "key_file of CLIENTS": "ok",
        "data": "ok",
        "audit_file": "look",
    }
    text = call("config", "check", str(tmp_path / "node.toml"), "--production").output
    assert "nothing is open; look yourself" in text


@pytest.mark.parametrize(
    ("subject", "change"),
    [
        ("listener PLAINTEXT", ('client_listener = "127.0.0.1', 'client_listener = "10.0.0.1')),
        ("listener CLIENTS", ('"SASL_SSL"', '"SSL"')),
        ("authorizer", ('authorizer = "acl"', 'authorizer = "off"')),
        ("peer_listener", ("10.0.0.1:9192", "8.8.8.8:9192")),
        ("admin_listener", ('admin_listener = "127.0.0.1', 'admin_listener = "8.8.8.8')),
    ],
)
def test_what_is_open_is_named(
    subject: str, change: tuple[str, str], call: Call, tmp_path: Path
) -> None:
    found = verdicts(call, write(tmp_path, change=change), is_open=True)
    assert [name for name, verdict in found.items() if verdict == "open"] == [subject]


def test_every_address_is_no_private_one(call: Call, tmp_path: Path) -> None:
    path = write(
        tmp_path,
        peer=('peer_listener = "10.0.0.1:9192"', 'peer_listener = "0.0.0.0:9192"'),
        told=("[listeners", 'advertised_peer = "10.0.0.1:9192"\n[listeners'),
    )
    assert verdicts(call, path, is_open=True)["peer_listener"] == "open"


def test_a_token_of_the_admin_port(call: Call, tmp_path: Path) -> None:
    token = tmp_path / "token"
    path = write(
        tmp_path,
        token=("authorizer", f'admin_token_file = "{token}"\nauthorizer'),
        port=('admin_listener = "127.0.0.1', 'admin_listener = "8.8.8.8'),
    )
    assert verdicts(call, path, is_open=True)["admin_listener"] == "open"
    token.write_text("a-token-of-16-characters\n")
    token.chmod(0o600)
    found = verdicts(call, path, is_open=False)
    assert (found["admin_listener"], found["admin_token_file"]) == ("look", "ok")


def test_anybody_at_the_admin_port(call: Call, tmp_path: Path) -> None:
    host = ('admin_listener = "127.0.0.1', 'admin_listener = "10.0.0.1')
    assert verdicts(call, write(tmp_path, host=host), is_open=False)["admin_listener"] == "look"
    path = write(tmp_path, host=host, insecure=("authorizer", "insecure = true\nauthorizer"))
    assert verdicts(call, path, is_open=True)["admin_listener"] == "open"


@pytest.mark.parametrize(("mode", "verdict"), [("accept", "open"), ("required", "ok")])
def test_tls_between_nodes(mode: str, verdict: str, call: Call, tmp_path: Path) -> None:
    found = peer_files(tmp_path / "peers", "raftmq-node-1")
    lines = [f'{key} = "{path}"\n' for key, path in found.items()] + [f'peer_tls = "{mode}"\n']
    path = write(tmp_path, tls=("authorizer", f"{''.join(lines)}authorizer"))
    told = verdicts(call, path, is_open=mode == "accept")
    assert told["peer_listener"] == verdict
    assert told["certificate of peer_listener"] == told["peer_key_file"] == "ok"
    found["peer_key_file"].chmod(0o640)
    assert verdicts(call, path, is_open=True)["peer_key_file"] == "open"
    peer_files(tmp_path / "peers", "raftmq-node-2")
    assert verdicts(call, path, is_open=True)["certificate of peer_listener"] == "open"


@pytest.mark.parametrize(("mode", "verdict"), [("accept", "open"), ("required", "ok")])
def test_a_secret_between_nodes(mode: str, verdict: str, call: Call, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(f"{FIRST}\n")
    secret.chmod(0o600)
    lines = f'cluster_secret_file = "{secret}"\npeer_tls = "{mode}"\n'
    path = write(tmp_path, tls=("authorizer", f"{lines}authorizer"))
    told = verdicts(call, path, is_open=mode == "accept")
    assert told["peer_listener"] == verdict
    assert told["secret of peer_listener"] == told["cluster_secret_file"] == "ok"
    secret.write_text(f"{FIRST}\n{SECOND}\n")
    told = verdicts(call, path, is_open=mode == "accept")
    assert told["secret of peer_listener"] == "look"
    secret.chmod(0o640)
    assert verdicts(call, path, is_open=True)["cluster_secret_file"] == "open"
    secret.write_text("too short\n")
    assert verdicts(call, path, is_open=True)["secret of peer_listener"] == "open"
    for words in ([], ["--production"], ["--json"], ["--production", "--json"]):
        output = call("config", "check", str(path), *words).output
        assert not any(text in output for text in (FIRST, SECOND, "too short"))


@pytest.mark.parametrize(("protocol", "verdict"), [("SASL_SSL", "look"), ("SSL", "open")])
def test_anonymous_rules_only_where_it_is_known(
    protocol: str, verdict: str, call: Call, tmp_path: Path
) -> None:
    path = write(
        tmp_path,
        users=("User:admin", "User:ANONYMOUS"),
        protocol=('"SASL_SSL"', f'"{protocol}"'),
    )
    assert verdicts(call, path, is_open=protocol == "SSL")["super_users"] == verdict


def test_secrets_are_for_one_user(call: Call, tmp_path: Path) -> None:
    path = write(tmp_path, user=("authorizer", f'first_user_file = "{tmp_path}/u"\nauthorizer'))
    assert verdicts(call, path, is_open=False)["first_user_file"] == "ok"  # gone after its use
    (tmp_path / "u").write_text("admin:hunter2\n")
    (tmp_path / "u").chmod(0o640)
    (tmp_path / "data").mkdir(0o755)
    found = verdicts(call, path, is_open=True)
    assert (found["first_user_file"], found["data"]) == ("open", "open")
    assert "hunter2" not in call("config", "check", str(path), "--production").output
    (tmp_path / "u").chmod(0o600)
    (tmp_path / "data").chmod(0o700)
    assert "open" not in verdicts(call, path, is_open=False).values()


def test_a_certificate_that_cannot_be_used(call: Call, tmp_path: Path) -> None:
    path = write(tmp_path)
    write_files(tmp_path).certificate.write_text("nothing")
    assert verdicts(call, path, is_open=True)["certificate of CLIENTS"] == "open"


def test_the_switch_for_faults_is_told(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAFTMQ_FAULTS", "1")
    done = call("config", "check", str(write(tmp_path)), "--production")
    assert done.exit_code == 1
    assert "RAFTMQ_FAULTS" in done.stdout


def test_the_audit_file_is_one_that_the_node_can_write_and_others_cannot(
    call: Call, tmp_path: Path
) -> None:
    folder = tmp_path / "audit"
    path = write(tmp_path, audit=("authorizer", f'audit_file = "{folder}/lines"\nauthorizer'))

    def verdict(*, is_open: bool) -> str:
        return verdicts(call, path, is_open=is_open)["audit_file"]

    assert verdict(is_open=True) == "open", "there is no folder"
    folder.mkdir(mode=0o700)
    assert verdict(is_open=False) == "ok"
    (folder / "lines").touch(mode=0o600)
    assert verdict(is_open=False) == "ok"
    (folder / "lines").chmod(0o644)
    assert verdict(is_open=True) == "open", "others read who did what"
    (folder / "lines").chmod(0o600)
    folder.chmod(0o777)
    assert verdict(is_open=True) == "open", "others replace it"
    folder.chmod(0o1777)
    assert verdict(is_open=False) == "ok"
    (folder / "lines").unlink()
    (folder / "lines").mkdir()
    assert verdict(is_open=True) == "open", "it is a folder"
