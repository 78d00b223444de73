"""Real nodes for tests: processes of `raftmq start`, killed, paused, wiped and restarted by pid.

Each node is a process group of its own (`forks.py`) with its output in a file; `Cluster` ends what
it started and nothing else. Waiting is for conditions, never for time.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from jepsen_like.live.cluster import free_ports
from tests.live.forks import Child, run_command, start_node

RAFTMQ = str(Path(sys.executable).parent / "raftmq")
POLL_S = 0.02


def wait_until(condition: Callable[[], Any], timeout_s: float = 60.0, what: str = "") -> Any:
    """Poll until the condition gives something true, and return that.

    Limits are for what never comes: several times what a slow, busy machine needs.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s} s: {what or condition}")
        time.sleep(POLL_S)


def need(tool: str) -> str:
    """The path of a command; without it the test is skipped, in CI it fails."""
    path = shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if path is None:
        lack(f"needs {tool}")
    assert path is not None
    return path


def lack(reason: str) -> None:
    """Skip for want of something; in CI that is a failure."""
    if os.environ.get("CI"):
        pytest.fail(f"{reason}, and CI must have it")
    pytest.skip(reason)


class Node:
    """One node: its files and, while it runs, its process."""

    def __init__(self, cluster: Cluster, node_id: int, host: str, data: Path, rack: str | None):
        self.cluster = cluster
        self.node_id = node_id
        self.host = host
        self.data = data
        self.rack = rack
        self.client_port, self.peer_port, self.admin_port = free_ports(3, host)
        self.process: Child | None = None
        self.takes_data_at_once = True
        self.formation_wait_ms: int | None = 0
        self.environment: dict[str, str] = {"RAFTMQ_FAULTS": "1"} if cluster.faults else {}
        self.admin_context: ssl.SSLContext | None = None

    @property
    def log_path(self) -> Path:
        return self.cluster.folder / f"node-{self.node_id}.log"

    @property
    def address(self) -> str:
        """Where clients find this node alone."""
        return f"{self.host}:{self.client_port}"

    @property
    def pid(self) -> int:
        assert self.process is not None, f"node {self.node_id} does not run"
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def config_text(self) -> str:
        peers = ", ".join(
            f'{{id = {n.node_id}, host = "{n.host}", port = {n.peer_port}}}'
            for n in self.cluster.voters
        )
        lines = [
            f"node_id = {self.node_id}",
            f'cluster_id = "{self.cluster.cluster_id}"',
            f'data = "{self.data}"',
            f'client_listener = "{self.host}:{self.client_port}"',
            f'peer_listener = "{self.host}:{self.peer_port}"',
            f'admin_listener = "{self.host}:{self.admin_port}"',
            f"peers = [{peers}]",
            'log_format = "json"',
        ]
        if self.takes_data_at_once and self not in self.cluster.voters:
            lines.append("takes_data_at_once = true")
        if self.formation_wait_ms is not None:
            lines.append(f"formation_wait_ms = {self.formation_wait_ms}")
        if self.rack:
            lines.append(f'rack = "{self.rack}"')
        lines += [f"{key} = {json.dumps(value)}" for key, value in self.cluster.settings.items()]
        lines.append("[defaults]")
        lines += [f'"{k}" = {json.dumps(v)}' for k, v in self.cluster.defaults.items()]
        return "\n".join(lines) + "\n"

    def start(self) -> None:
        """Start the process; use `wait_ready` to know that it serves."""
        assert not self.is_running
        config = self.cluster.folder / f"node-{self.node_id}.toml"
        config.write_text(self.config_text())
        words = ["start", "--config", str(config)]
        self.process = start_node(words, self.log_path, {**os.environ, **self.environment})

    def wait_ready(self, timeout_s: float = 90.0) -> None:
        """Return once the node's health is good."""

        def is_ready() -> bool:
            if not self.is_running:
                pytest.fail(f"node {self.node_id} ended:\n{self.log_tail()}")
            try:
                return self.get("/health").get("status") == "ok"
            except OSError:
                return False

        wait_until(is_ready, timeout_s, f"node {self.node_id} ready\n{self.log_tail()}")

    def get(self, path: str) -> dict[str, Any]:
        """A JSON answer of the admin port, also one with an error status."""
        try:
            with self._open(path) as answer:
                body = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                body = error.read()
        parsed: dict[str, Any] = json.loads(body)
        return parsed

    def fault(
        self,
        *,
        block_to: Collection[int] = (),
        block_from: Collection[int] = (),
        fsync_delay_ms: float = 0,
    ) -> None:
        """Break this node, of a cluster with `faults`; what is not named is whole again."""
        faults = {
            "block_to": sorted(block_to),
            "block_from": sorted(block_from),
            "fsync_delay_ms": fsync_delay_ms,
        }
        url = f"http://{self.host}:{self.admin_port}/faults"
        request = urllib.request.Request(url, json.dumps(faults).encode(), method="PUT")
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert json.loads(answer.read()) == faults

    def text(self, path: str) -> str:
        """A text answer of the admin port."""
        with self._open(path) as answer:
            return str(answer.read().decode())

    def _open(self, path: str) -> Any:
        scheme = "http" if self.admin_context is None else "https"
        url = f"{scheme}://{self.host}:{self.admin_port}{path}"
        return urllib.request.urlopen(url, timeout=5, context=self.admin_context)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9 and reap."""
        if self.is_running:
            self.signal(signal.SIGKILL)
        self.wait_end()

    def terminate(self, timeout_s: float = 60.0) -> int:
        """SIGTERM; the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait_end(timeout_s)

    def wait_end(self, timeout_s: float = 30.0) -> int:
        assert self.process is not None
        code = self.process.wait(timeout_s)
        self.process = None
        return code

    def wipe(self) -> None:
        """Throw the data folder away; the node must not run."""
        assert not self.is_running
        shutil.rmtree(self.data)

    def log_tail(self, size: int = 4000) -> str:
        return self.log_path.read_text()[-size:] if self.log_path.exists() else "(no output)"

    def partition_folder(self, topic: str, partition: int = 0) -> Path:
        """Where this node keeps a partition; a busy node makes it a moment after the others."""
        pattern = f"topics/{topic}-*/partition-{partition}"
        folder: Path = wait_until(lambda: next(self.data.glob(pattern), None), 60, pattern)
        return folder


class Cluster:
    """Several nodes on loopback addresses, in one folder."""

    def __init__(
        self,
        folder: Path,
        nodes: int = 3,
        *,
        voters: int | None = None,
        hosts: Sequence[str] | None = None,
        racks: Sequence[str] | None = None,
        defaults: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        data: Mapping[int, Path] | None = None,
        faults: bool = False,
    ) -> None:
        self.folder = folder
        self.faults = faults
        self._cuts: set[tuple[int, int]] = set()
        self.cluster_id = "test-cluster"
        self.defaults = {"group.initial.rebalance.delay.ms": "0", **(defaults or {})}
        self.settings = dict(settings or {})
        self.nodes: dict[int, Node] = {}
        for i in range(1, nodes + 1):
            host = hosts[i - 1] if hosts else "127.0.0.1"
            where = (data or {}).get(i, folder / f"data-{i}")
            self.nodes[i] = Node(self, i, host, where, racks[i - 1] if racks else None)
        self.voters = list(self.nodes.values())[: voters or min(nodes, 3)]

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        for node in self.nodes.values():
            node.start()
        for node in self.nodes.values():
            node.wait_ready()

    def bring_back(self) -> None:
        """Start what was killed; return once every node is ready."""
        for node in self.nodes.values():
            if not node.is_running:
                node.process = None
                node.start()
        for node in self.nodes.values():
            node.wait_ready()

    def add_node(self, rack: str | None = None) -> Node:
        """One more node, started and ready: it is told of the first voters alone, and new."""
        node_id = max(self.nodes) + 1
        node = Node(self, node_id, "127.0.0.1", self.folder / f"data-{node_id}", rack)
        node.takes_data_at_once = False
        self.nodes[node_id] = node
        node.start()
        node.wait_ready()
        return node

    def run(self, *words: str, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
        """Run a command of raftmq against this cluster."""
        return run_command(words, timeout_s=timeout_s, RAFTMQ_BOOTSTRAP=self.bootstrap)

    def stop(self) -> None:
        """Kill what still runs."""
        for node in self.nodes.values():
            if node.process is not None:
                if node.is_running:
                    os.kill(node.pid, signal.SIGCONT)
                node.kill()

    # ---- links, of a cluster with `faults`; a node that starts again forgets its cuts ----

    def cut(self, *links: tuple[int, int]) -> None:
        """Let nothing pass any more over these links, each (from, to)."""
        self._cuts |= set(links)
        self._apply_cuts()

    def one_way(self, sender: int, receiver: int) -> None:
        """Node `receiver` hears nothing of `sender` any more; the other direction is as it was."""
        self.cut((sender, receiver))

    def partition(self, *sides: Collection[int]) -> None:
        """Cut every link between nodes of different sides; nodes of no side keep theirs."""
        self.cut(
            *(
                (a, b)
                for mine, theirs in itertools.permutations(sides, 2)
                for a in mine
                for b in theirs
            )
        )

    def isolate(self, node_id: int) -> None:
        """Cut one node off from all others."""
        self.partition({node_id}, set(self.nodes) - {node_id})

    def deafen(self, node_id: int) -> None:
        """Let a node hear nothing, while all hear it."""
        self.cut(*((other, node_id) for other in self.nodes if other != node_id))

    def heal(self) -> None:
        """Make all links whole."""
        self._cuts.clear()
        self._apply_cuts()

    def _apply_cuts(self) -> None:
        # At both ends: a connection that ends over there must not be news here.
        for node in self.live:
            node.fault(
                block_to={b for a, b in self._cuts if a == node.node_id},
                block_from={a for a, b in self._cuts if b == node.node_id},
            )

    @property
    def bootstrap(self) -> str:
        return self.bootstrap_of(self.nodes)

    def bootstrap_of(self, node_ids: Iterable[int]) -> str:
        """Where a client begins that is to ask these nodes first."""
        nodes = [self.nodes[node_id] for node_id in node_ids]
        return ",".join(f"{node.host}:{node.client_port}" for node in nodes)

    @property
    def live(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.is_running]

    def __getitem__(self, node_id: int) -> Node:
        return self.nodes[node_id]
