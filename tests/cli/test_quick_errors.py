"""What cannot succeed is told at once: refused ports, names that no topic has, unknown things."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest

from raftmq.cli.common import check_reachable
from raftmq_client.errors import ConnectionFailedError
from tests.cli.conftest import Call, invoke
from tests.cli.test_commands import every_command
from tests.client.fake_broker import FakeBroker

AT_ONCE_S = 6.0
"""Two seconds on a machine that does nothing else; each of these took ten to thirty."""


def at_once_s() -> float:
    """So long may it take here: as many times longer as others wait for the processors, too."""
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
    return AT_ONCE_S * max(1.0, waiting)


WORDS: dict[str, str] = {
    "topic create": "t",
    "topic list": "",
    "topic describe": "t",
    "topic alter": "t --set retention.ms=5",
    "topic delete": "t u v",
    "topic add-partitions": "t 4",
    "topic shrink": "t -p 1",
    "topic trim": "t --before 1",
    "view create": "v --of t --where key='a'",
    "view list": "",
    "view describe": "v",
    "view delete": "v w",
    "group list": "",
    "group describe": "g",
    "group delete": "g",
    "group seek": "g --to earliest",
    "retry create": "g --of t",
    "retry list": "",
    "retry describe": "g --of t",
    "retry delete": "g --of t",
    "dead list": "",
    "dead show": "t",
    "dead replay": "t",
    "txn list": "",
    "txn describe": "x",
    "txn hanging": "",
    "txn abort": "x",
    "cluster status": "",
    "cluster quorum": "",
    "cluster describe": "",
    "cluster features": "",
    "cluster balance": "",
    "cluster config show": "",
    "cluster config set": "a=b",
    "cluster config unset": "a",
    "leader list": "",
    "leader balance": "",
    "leader transfer": "t 0 1",
    "node list": "",
    "node add": "4 5",
    "node drain": "1",
    "node remove": "1",
    "node cordon": "1",
    "node uncordon": "1",
    "node maintenance": "1",
    "node replace": "1 2",
    "node config show": "1",
    "node config set": "1 a=b",
    "node config unset": "1 a",
    "acl create": "--allow-principal User:a --operation read --topic t",
    "acl list": "",
    "acl delete": "--topic t",
    "acl why": "User:a read topic:t",
    "user create": "a --password-file FOLDER/password.txt",
    "user list": "",
    "user delete": "a",
    "user password": "a --password-file FOLDER/password.txt",
    "produce": "t x",
    "consume": "t --follow",
    "bench": "-c 1",
    "why": "t/0",
    "export": "t -g g --to FOLDER",
}
"""What follows a command that asks a cluster."""
NO_CLUSTER = {"start", "dev", "demo", "recover", "config", "log"}


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    monkeypatch.setenv("RAFTMQ_BOOTSTRAP", address)
    for module in ("common", "cluster", "produce"):
        monkeypatch.setattr(f"raftmq.cli.{module}.REFUSED_S", 0.05)
    return address


def test_every_command_that_asks_a_cluster_is_here() -> None:
    asking = {" ".join(words) for words in every_command() if words[0] not in NO_CLUSTER}
    assert asking == set(WORDS)


@pytest.mark.parametrize("command", WORDS)
def test_a_port_that_refuses_is_told_at_once(command: str, refused: str, tmp_path: Path) -> None:
    if command == "export":
        pytest.importorskip("pyarrow")
    (tmp_path / "password.txt").write_text("correct horse")
    (tmp_path / "password.txt").chmod(0o600)
    words = [*command.split(), *WORDS[command].replace("FOLDER", str(tmp_path)).split()]
    for more in ((), () if command == "produce" else ("--json",)):
        begun = time.monotonic()
        done = invoke([*words, *more])
        assert time.monotonic() - begun < at_once_s()
        assert done.exit_code == 1, done.output
        error = json.loads(done.stderr)["error"]["message"] if more else done.stderr
        assert f"no broker answered: tried {refused} (Connection refused)" in error


def test_a_refused_port_is_tried_for_a_second(refused: str, broker: FakeBroker) -> None:
    """A broker that starts again is back in less."""
    begun = time.monotonic()
    with pytest.raises(ConnectionFailedError):
        check_reachable(refused, 0.3)
    assert time.monotonic() - begun >= 0.3
    check_reachable(f"{refused},{broker.address}", 0)


def test_a_host_that_nobody_knows_is_told_at_once() -> None:
    begun = time.monotonic()
    done = invoke(["topic", "list", "-b", "no-such-host.invalid:9092"])
    assert time.monotonic() - begun < at_once_s()
    assert done.exit_code == 1
    assert "tried no-such-host.invalid:9092 (" in done.stderr


@pytest.mark.parametrize("words", ["consume nope", "consume nope -G g", "consume nope -p 0"])
def test_a_topic_that_no_broker_knows_is_told_at_once(call: Call, words: str) -> None:
    begun = time.monotonic()
    done = call(*words.split())
    assert time.monotonic() - begun < at_once_s()
    assert done.exit_code == 1
    assert "topic 'nope': UNKNOWN_TOPIC_OR_PARTITION" in done.stderr


def test_records_for_a_topic_that_no_broker_makes_are_refused_at_once(
    call: Call, broker: FakeBroker
) -> None:
    broker.broker_configs = {"": {"auto.create.topics.enable": "false"}}
    begun = time.monotonic()
    done = call("produce", "nope", "x")
    assert time.monotonic() - begun < at_once_s()
    assert done.exit_code == 1
    assert "topic 'nope': UNKNOWN_TOPIC_OR_PARTITION" in done.stderr


@pytest.mark.parametrize(
    "words",
    ["produce b@d x", "consume b@d", "consume b@d -G g", "consume b@d -G g --follow"],
)
def test_a_name_that_no_topic_can_have_is_told_at_once(call: Call, words: str) -> None:
    begun = time.monotonic()
    done = call(*words.split())
    assert time.monotonic() - begun < at_once_s()
    assert done.exit_code == 2
    assert "a topic is a name of 1 to 249 letters" in done.stderr


@pytest.mark.parametrize("command", WORDS)
def test_ctrl_c_ends_with_130(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if command == "export":
        pytest.importorskip("pyarrow")

    def interrupt(_bootstrap: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("raftmq.cli.common.parse_bootstrap", interrupt)
    (tmp_path / "password.txt").write_text("correct horse")
    (tmp_path / "password.txt").chmod(0o600)
    words = WORDS[command].replace("FOLDER", str(tmp_path)).split()
    done = invoke([*command.split(), *words])
    assert (done.exit_code, done.output) == (130, "")


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ("config keys", "raftmq.cli.configs.documented_keys"),
        ("config check node.toml", "pathlib.Path.read_text"),
        ("log dump x.log", "raftmq.cli.log.reported"),
        ("log verify x", "raftmq.cli.log.reported"),
    ],
)
def test_ctrl_c_in_work_on_files_ends_with_130(
    words: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupt)
    done = invoke(words.split())
    assert (done.exit_code, done.output) == (130, "")
