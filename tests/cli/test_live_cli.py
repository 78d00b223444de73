"""`raftmq dev`, `demo` and the commands on real nodes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from jepsen_like.live.cluster import free_ports
from tests.live.forks import run_command
from tests.live.harness import RAFTMQ, wait_until

pytestmark = [pytest.mark.live, pytest.mark.slow]

LAST_LINE = re.compile(r"acknowledged (\d+), read (\d+), lost 0, duplicates 0, failover (\d+) ms")


class Dev:
    """One `raftmq dev` with its folder."""

    def __init__(self, folder: Path, *words: str, nodes: int = 1) -> None:
        self.folder = folder
        self.port = free_run(nodes)
        self.words = ["--nodes", str(nodes), "--port", str(self.port), *words]
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.end()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [RAFTMQ, "dev", "--data", str(self.folder), *self.words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            pytest.fail(f"no ready line: {self.process.communicate()[1]}")
        assert line == f"ready {self.bootstrap}\n"

    @property
    def bootstrap(self) -> str:
        content: str = self.file()["bootstrap"]
        return content

    def file(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "cluster.json").read_text())
        return content

    def pids(self) -> list[int]:
        return [node["pid"] for node in self.file()["nodes"]]

    def end(self) -> int:
        assert self.process is not None
        self.process.communicate(timeout=90)
        return self.process.returncode

    def run(self, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return run_command(words, stdin=stdin, RAFTMQ_BOOTSTRAP=self.bootstrap)


def free_run(count: int) -> int:
    """The first of `count` free ports in a row."""
    while True:
        (port,) = free_ports(1)
        try:
            if port + count < 65_536:
                _try_ports(range(port, port + count))
                return port
        except OSError:
            continue


def _try_ports(ports: range) -> None:
    import socket

    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    with Dev(tmp_path_factory.mktemp("dev") / "cluster", nodes=3) as dev:
        yield dev


def test_cluster_json_names_every_node(three: Dev) -> None:
    content = three.file()
    assert content["bootstrap"] == ",".join(f"127.0.0.1:{three.port + i}" for i in range(3))
    for i, node in enumerate(content["nodes"]):
        assert list(node) == ["id", "pid", "host", "port", "peer_port", "admin_port", "data"]
        assert (node["id"], node["host"], node["port"]) == (i + 1, "127.0.0.1", three.port + i)
        assert os.getpgid(node["pid"]) == node["pid"], "a process group of its own"
        assert os.getsid(node["pid"]) != node["pid"], "the nodes share the CPU as one session"
        assert Path(node["data"]).is_dir()


def test_the_commands_of_a_day(three: Dev) -> None:
    assert three.run("topic", "create", "day", "-p", "3").returncode == 0
    assert three.run("topic", "create", "day").returncode == 1
    listed = json.loads(three.run("node", "list", "--json").stdout)
    assert [node["NodeId"] for node in listed] == [1, 2, 3]
    sent = three.run("produce", "day", "-K", ":", stdin="\n".join(f"k{i}:{i}" for i in range(100)))
    assert sent.returncode == 0, sent.stderr
    read = three.run("consume", "day", "--group", "g")
    assert sorted(map(int, read.stdout.split())) == list(range(100))
    lag = json.loads(three.run("group", "describe", "g", "--json").stdout)
    assert sum(row["LAG"] for row in lag["PARTITIONS"]) == 0
    assert three.run("group", "seek", "g", "--shift", "-1").returncode == 0
    assert len(three.run("consume", "day", "--group", "g").stdout.split()) == 3
    assert three.run("group", "seek", "g", "--to", "@0").returncode == 0
    assert len(three.run("consume", "day", "--group", "g").stdout.split()) == 100
    trimmed = three.run("topic", "trim", "day", "--before", "-1")
    assert trimmed.returncode == 0, trimmed.stderr
    assert three.run("consume", "day").stdout == ""
    grown = three.run("topic", "add-partitions", "day", "4")
    assert grown.returncode == 0, grown.stderr
    status = three.run("cluster", "status", "--wait", "20")
    assert status.returncode == 0, status.stdout
    assert three.run("cluster", "describe").returncode == 0
    assert three.run("topic", "delete", "day").returncode == 0
    assert three.run("topic", "describe", "day").returncode == 1


def test_leaders_are_listed_moved_and_moved_back(three: Dev) -> None:
    assert three.run("topic", "create", "moved", "-p", "3", "-r", "3").returncode == 0

    def row(partition: int = 0) -> dict[str, Any]:
        listed = three.run("leader", "list", "-t", "moved", "--json")
        found: dict[str, Any] = json.loads(listed.stdout)[partition]
        return found

    wait_until(lambda: sorted(row()["Isr"]) == [1, 2, 3], 60, "all in sync")
    before = row()
    target = next(node for node in (1, 2, 3) if node != before["Leader"])
    moved = three.run("leader", "transfer", "moved", "0", str(target))
    assert moved.stdout == f"node {target} leads moved-0\n", moved.stderr
    wait_until(lambda: (row()["Leader"], row()["Preferred"]) == (target, target), 60)
    refused = three.run("leader", "transfer", "moved", "0", "9")
    assert refused.returncode == 1
    assert "INVALID_REPLICA_ASSIGNMENT" in refused.stderr
    balanced = three.run("leader", "balance", "-t", "moved")
    assert balanced.returncode == 0, balanced.stderr
    planned = three.run("leader", "balance", "--dry-run", "--json")
    assert planned.returncode == 0
    assert all(move["Topic"] != "moved" or move["From"] for move in json.loads(planned.stdout))


def test_brokers_settings_change_while_they_run(three: Dev) -> None:
    assert three.run("cluster", "config", "set", "num.partitions=4").returncode == 0
    done = three.run("topic", "create", "four")
    assert "four created: 4 partitions" in done.stdout, done.stderr
    assert three.run("node", "config", "set", "2", "num.partitions=2").returncode == 0
    rows = json.loads(three.run("cluster", "config", "show", "num.partitions", "--json").stdout)
    assert [(row["Value"], row["Default"], row["Nodes"]) for row in rows] == [
        ("4", "1", [1, 3]),
        ("2", "1", [2]),
    ]
    fixed = json.loads(three.run("node", "config", "show", "3", "node.id", "--json").stdout)
    assert (fixed[0]["Value"], fixed[0]["Source"], fixed[0]["FileKey"]) == (
        *("3", "STATIC_BROKER_CONFIG", "node_id"),
    )
    done = three.run("cluster", "config", "set", "num.partitions=0")
    assert done.returncode == 1
    assert "Value must be at least 1" in done.stderr
    assert three.run("node", "config", "unset", "2", "num.partitions").returncode == 0
    assert three.run("cluster", "config", "unset", "num.partitions").returncode == 0
    assert len(three.run("cluster", "config", "show").stdout.splitlines()) == 1


@pytest.mark.parametrize("is_copied", [True, False], ids=["copied data", "empty data"])
def test_a_second_process_of_a_node_ends_and_is_named(
    tmp_path: Path, three: Dev, is_copied: bool
) -> None:
    """It has another address and a folder of its own, which no lock of a file can notice."""
    text = (three.folder / "node-1.toml").read_text()
    if is_copied:
        shutil.copytree(three.folder / "node-1", tmp_path / "node-1")
    ports = iter(free_ports(3))
    text = re.sub(r'(_listener = ".*:)\d+', lambda found: f"{found[1]}{next(ports)}", text)
    text = text.replace(str(three.folder / "node-1"), str(tmp_path / "node-1"))
    (tmp_path / "node.toml").write_text(text)
    command = [RAFTMQ, "start", "--config", str(tmp_path / "node.toml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as second:
        wait_until(
            lambda: "node_id 1 is used twice" in three.run("cluster", "status").stdout,
            what="status names it",
        )
        _, log = second.communicate(timeout=60)
        assert second.returncode == 1
    assert b"node must stop" in log
    assert b"node_id 1 is taken: another process with this node_id answers at 127.0.0.1:" in log
    assert three.run("topic", "list").returncode == 0


def test_a_dead_cluster_is_told_without_a_traceback(
    tmp_path: Path,
) -> None:
    with Dev(tmp_path / "c") as dev:
        bootstrap = dev.bootstrap
    done = subprocess.run(
        [RAFTMQ, "topic", "list", "-b", bootstrap, "--timeout", "0.5"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_it_ends_with_its_nodes_and_comes_back_with_its_data(
    tmp_path: Path, number: signal.Signals
) -> None:
    dev = Dev(tmp_path / "c")
    with dev:
        assert dev.run("topic", "create", "kept").returncode == 0
        assert dev.run("produce", "kept", "still here").returncode == 0
        pids = dev.pids()
        assert dev.process is not None
        dev.process.send_signal(number)
        assert dev.end() == 0
        assert not any(is_alive(pid) for pid in pids)
    with dev:
        assert dev.run("consume", "kept").stdout == "still here\n"


def test_nodes_die_with_a_killed_parent(tmp_path: Path) -> None:
    dev = Dev(tmp_path / "c")
    with dev:
        pids = dev.pids()
        assert dev.process is not None
        dev.process.kill()
        dev.end()
        wait_until(lambda: not any(is_alive(pid) for pid in pids), 60, "nodes ended")


def test_a_dead_node_stays_dead_until_it_is_run_again(tmp_path: Path) -> None:
    dev = Dev(tmp_path / "c", nodes=3)
    with dev:
        victim = dev.pids()[1]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: not is_alive(victim), what="reaped by its parent")
        assert dev.pids()[1] == victim
        wait_until(  # there are no topics: only the metadata group can miss it
            lambda: "metadata voter 2 is not there" in dev.run("cluster", "status").stdout, 60
        )
        assert dev.run("cluster", "status", "--wait", "0.2").returncode == 1
        with subprocess.Popen(
            [RAFTMQ, "dev", "--node", "2", "--data", str(dev.folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as again:
            wait_until(lambda: dev.pids()[1] == again.pid, what="pid rewritten")
            address = f"127.0.0.1:{dev.port + 1}"
            wait_until(
                lambda: dev.run("node", "list", "-b", address).returncode == 0, what="serves again"
            )
            assert dev.process is not None
            dev.process.send_signal(signal.SIGTERM)
            assert dev.end() == 0
            again.wait(90)  # it belongs to the cluster and ends with it


def test_restart_brings_dead_nodes_back(tmp_path: Path) -> None:
    with Dev(tmp_path / "c", "--restart") as dev:
        (victim,) = dev.pids()
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: dev.pids() != [victim], what="a new pid")
        assert dev.run("topic", "create", "after").returncode == 0


def test_a_taken_port_is_told_before_anything_starts(tmp_path: Path, three: Dev) -> None:
    done = subprocess.run(
        [RAFTMQ, "dev", "--nodes", "1", "--port", str(three.port), "--data", str(tmp_path / "c")],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert str(three.port) in done.stderr
    assert "another --port" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_demo_keeps_its_contract() -> None:
    done = subprocess.run(
        [RAFTMQ, "demo"], capture_output=True, text=True, timeout=240, check=False
    )
    last = LAST_LINE.fullmatch(done.stdout.splitlines()[-1])
    assert last is not None, done.stdout + done.stderr
    assert done.returncode == 0
    assert done.stderr == "", "it tells of the dead node itself"
    acknowledged, read, _failover = map(int, last.groups())
    assert read >= acknowledged >= 50_000
