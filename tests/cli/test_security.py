"""`--security FILE` of every command that asks a cluster."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from raftmq.cli.admin_port import AdminPort, admin_request
from raftmq.cli.common import CommandError, client_security, secured_by
from raftmq.config import NOT_NODE_VARIABLES
from tests.cli.conftest import Call, command_tree, invoke
from tests.cli.test_commands import every_command
from tests.cli.test_quick_errors import WORDS
from tests.client.fake_broker import FakeBroker
from tests.client.tls_front import CERTIFICATE, TlsFront
from tests.tree import ROOT

CLI = ROOT / "raftmq" / "cli"
OWN_CLUSTER = {"demo.py", "dev_cluster.py"}
"""What runs nodes of its own, and knows how they are secured."""


def option_names(words: tuple[str, ...]) -> set[str]:
    command = command_tree()
    for word in words:
        command = command.commands[word]  # type: ignore[attr-defined]
    return {name for option in command.params for name in option.opts}


def test_every_command_that_asks_a_cluster_has_it() -> None:
    asking = [words for words in every_command() if "--bootstrap" in option_names(words)]
    assert {" ".join(words) for words in asking} == set(WORDS)
    assert [words for words in asking if "--security" not in option_names(words)] == []


def test_every_client_of_a_command_uses_it() -> None:
    """A client without it would meet a secured cluster as a stranger."""
    found = 0
    for path in CLI.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id in ("Admin", "Producer", "Consumer") and path.name not in OWN_CLUSTER:
                found += 1
                said = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert said.get("security") == "client_security()", f"{path.name}:{node.lineno}"
    assert found >= 12


def test_a_node_takes_no_variable_of_a_command_for_its_own() -> None:
    """Whoever has exported RAFTMQ_SECURITY can start a node, too."""
    words = re.findall(r'envvar="(RAFTMQ_\w+)"', (CLI / "common.py").read_text())
    assert len(words) >= 3
    assert set(words) <= NOT_NODE_VARIABLES


@pytest.fixture
def front(broker: FakeBroker) -> Iterator[FakeBroker]:
    """The broker behind TLS."""
    tls = TlsFront(broker)
    yield broker
    tls.close()


def file_of(folder: Path, bootstrap: str = "", ca: Path = CERTIFICATE) -> str:
    path = folder / "client.toml"
    lines = ['security.protocol = "SSL"', f'ssl.ca.location = "{ca}"']
    lines += [f'bootstrap.servers = "{bootstrap}"'] if bootstrap else []
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_a_command_speaks_tls_and_finds_brokers_by_the_file(
    front: FakeBroker, tmp_path: Path
) -> None:
    front.make_topic("orders", 1)
    done = invoke(["topic", "list", "--security", file_of(tmp_path, front.address), "--json"])
    assert done.exit_code == 0, done.output
    assert [row["Topic"] for row in json.loads(done.stdout)] == ["orders"]
    assert client_security() is None  # for the command alone


def test_words_and_environment_win_over_the_brokers_of_the_file(
    front: FakeBroker, tmp_path: Path
) -> None:
    file = file_of(tmp_path, "127.0.0.1:1")
    by_words = invoke(["topic", "list", "-b", front.address], env={"RAFTMQ_SECURITY": file})
    assert by_words.exit_code == 0, by_words.output
    env = {"RAFTMQ_SECURITY": file, "RAFTMQ_BOOTSTRAP": front.address}
    assert invoke(["topic", "list"], env=env).exit_code == 0
    assert "tried 127.0.0.1:1 " in invoke(["topic", "list", "--security", file]).stderr


def test_another_ca_is_told_at_once(call: Call, front: FakeBroker, tmp_path: Path) -> None:
    import trustme

    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other.pem"))
    file = file_of(tmp_path, ca=tmp_path / "other.pem")
    done = call("topic", "list", "-b", front.address, "--security", file, "--timeout", "100")
    assert done.exit_code == 1
    first, hint = done.stderr.splitlines()
    assert "TLS: the certificate is not trusted" in first
    assert hint.startswith("--security FILE")


@pytest.mark.parametrize("command", ["topic list", "produce t x", "node list", "why", "bench -c 1"])
def test_a_file_that_cannot_be_used_is_usage(command: str, tmp_path: Path) -> None:
    missing = str(tmp_path / "none.toml")
    done = invoke([*command.split(), "--security", missing])
    assert (done.exit_code, done.stderr) == (
        2,
        f"raftmq: {missing}: No such file or directory\n",
    )


def test_a_password_is_neither_shown_nor_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "client.toml"
    path.write_text(
        'security.protocol = "SASL_PLAINTEXT"\nsasl.mechanism = "PLAIN"\n'
        'sasl.username = "alice"\nsasl.password = "s3cret-word"\nsasl.usernam = "x"\n'
    )
    path.chmod(0o600)
    for more in ([], ["--json"]):
        done = invoke(["topic", "list", "--security", str(path), *more])
        assert done.exit_code == 2
        assert "s3cret" not in done.output


def test_admin_ports_are_asked_with_the_files_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAFTMQ_ADMIN_TOKEN", "token-of-the-environment")
    path = tmp_path / "client.toml"
    path.write_text(f'admin.token = "token-of-the-file"\nadmin.ca.location = "{CERTIFICATE}"\n')
    path.chmod(0o600)
    with secured_by(path):
        request = admin_request("h:1", "/")
        assert request.full_url == "https://h:1/"
        assert dict(request.unredirected_hdrs) == {"Authorization": "Bearer token-of-the-file"}
    plain = admin_request("h:1", "/")
    assert plain.full_url == "http://h:1/"
    assert plain.unredirected_hdrs["Authorization"] == "Bearer token-of-the-environment"
    with secured_by(path), pytest.raises(CommandError, match="no admin port answers"):
        AdminPort(["127.0.0.1:1"], 1.0).get("/nodes")
