"""Real nodes: processes of `raftmq start`, killed, paused, wiped and started again by pid.

`Cluster` owns the folder, the nodes and their disks, and ends what it started and nothing else. It
says how the nodes are (`up`, `is_whole`, `troubles`) from their admin ports alone, which are never
behind a broken link. It does not decide what breaks: nemeses do.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from jepsen_like.live.links import Links
from jepsen_like.live.scarcity import CLIENTS, LINKS, NODES, OWN, Patience, Sampler, Scarcity
from jepsen_like.live.storage import Disk

POLL_S: Final = 0.05
POLL_MAX_S: Final = 0.25
"""Who waits for long asks less often: nodes have better to do with their cores."""
PORTS: Final = (10_000, 30_000)
"""Below those that the kernel gives to outgoing connections: such a one could take the place of a
node that is down."""
RAFTMQ: Final = str(Path(sys.executable).parent / "raftmq")
_ANSWER_S: Final = 3.0
_given: Final[set[int]] = set()


class StuckError(Exception):
    """A cluster that should be well again is not, within a generous time."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that nobody listens on, and that were given to nobody in this process before: who asks
    for a node's ports begins to listen on them later than the next one asks."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(*PORTS)
        if port not in _given:
            with contextlib.suppress(OSError), socket.create_server((host, port)):
                ports.append(port)
                _given.add(port)
    return ports


def wait_until(
    condition: Callable[[], bool],
    timeout_s: float,
    what: Callable[[], str],
    scarcity: Scarcity | None = None,
) -> None:
    """Poll until the condition holds.

    Raises:
        StuckError: it did not in time, of which what is scarce does not count.
    """
    patience, pause_s = Patience(timeout_s, scarcity), POLL_S
    while not condition():
        if patience.is_over:
            raise StuckError(f"not within {timeout_s:g} s: {what()}")
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, POLL_MAX_S)


class Node:
    """One node: its files and, while it runs, its process."""

    def __init__(self, cluster: Cluster, node_id: int, disk: Disk) -> None:
        client, peer, admin = free_ports(3)
        self.cluster = cluster
        self.node_id = node_id
        self.disk = disk
        self.data = disk.folder / "data"
        self.places = cluster.links.place(node_id, (client, peer, admin))
        self.process: subprocess.Popen[bytes] | None = None
        self.environment: dict[str, str] = {}
        self.is_paused = False

    @property
    def log_path(self) -> Path:
        """What the process says."""
        return self.cluster.folder / f"node-{self.node_id}.log"

    @property
    def is_running(self) -> bool:
        """True while the process was neither killed nor has ended."""
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """The process, which must run."""
        assert self.process is not None, f"node {self.node_id} does not run"
        return self.process.pid

    def config_text(self) -> str:
        """The node's configuration file."""
        places, cluster = self.places, self.cluster
        peers = []
        for voter in cluster.voters:
            host, _, port = voter.places.advertised_peer.rpartition(":")
            peers.append(f'{{id = {voter.node_id}, host = "{host}", port = {port}}}')
        texts = {
            "cluster_id": cluster.cluster_id,
            "data": str(self.data),
            "client_listener": f"{places.host}:{places.client_port}",
            "peer_listener": f"{places.host}:{places.peer_port}",
            "admin_listener": f"{places.host}:{places.admin_port}",
            "advertised_client": places.advertised_client,
            "advertised_peer": places.advertised_peer,
            "admin_token_file": str(self.cluster.token_path),
            "log_format": "json",
        }
        lines = [f"node_id = {self.node_id}", f"peers = [{', '.join(peers)}]"]
        lines.append("formation_wait_ms = 0")
        if self not in cluster.voters:
            lines.append("takes_data_at_once = true")
        lines += [f"{key} = {json.dumps(value)}" for key, value in texts.items()]
        lines.append("[defaults]")
        lines += [f'"{key}" = {json.dumps(value)}' for key, value in cluster.defaults.items()]
        return "\n".join(lines) + "\n"

    def start(self) -> None:
        """Start the process, with `environment` besides ours."""
        assert not self.is_running
        config = self.cluster.folder / f"node-{self.node_id}.toml"
        config.write_text(self.config_text())
        setpriv = shutil.which("setpriv")
        dies_with_us = [setpriv, "--pdeathsig", "KILL"] if setpriv else []
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.places.prefix, *dies_with_us, RAFTMQ, "start", "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "RAFTMQ_FAULTS": "1", **self.environment},
            )
        self.is_paused = False

    def kill(self) -> None:
        """kill -9 and reap."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait(30)
            self.process = None

    def terminate(self) -> None:
        """SIGTERM, as an operator would; killed when it does not end."""
        os.kill(self.pid, signal.SIGTERM)
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(15)
        self.kill()

    def pause(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)
        self.is_paused = True

    def resume(self) -> None:
        """SIGCONT."""
        if self.is_running and self.is_paused:
            os.kill(self.pid, signal.SIGCONT)
        self.is_paused = False

    def wipe(self) -> None:
        """Throw the data away; the node must not run."""
        assert not self.is_running
        shutil.rmtree(self.data)

    def get(self, path: str) -> dict[str, Any] | None:
        """A JSON answer of the admin port, also one with an error status; None without one."""
        return self.ask(urllib.request.Request(self._url(path)))

    def fault(self, faults: Mapping[str, Any]) -> None:
        """Tell the product's own fault switch."""
        body = json.dumps(faults).encode()
        request = urllib.request.Request(self._url("/faults"), body, method="PUT")
        answer = self.ask(request)
        if answer is None:
            raise StuckError(f"node {self.node_id} does not take faults")

    def ask(self, request: urllib.request.Request) -> dict[str, Any] | None:
        """A JSON answer; None when there is none."""
        request.add_header("Authorization", f"Bearer {self.cluster.token}")
        try:
            try:
                with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
                    body = answer.read()
            except urllib.error.HTTPError as error:
                with error:
                    body = error.read()
            parsed: dict[str, Any] = json.loads(body)
        except (OSError, ValueError):
            return None  # not up, paused, or just going down
        return parsed

    def _url(self, path: str) -> str:
        return f"http://{self.places.host}:{self.places.admin_port}{path}"

    @property
    def is_up(self) -> bool:
        """True once recovery is over and the process does its work, whatever its peers do."""
        if not self.is_running or self.is_paused:
            return False
        health = self.get("/health/live")
        return health is not None and bool(health.get("is_live"))

    def troubles(self) -> list[str]:
        """What keeps this node from being as good as new."""
        if not self.is_running:
            return [f"node {self.node_id} does not run: {self.log_tail()}"]
        status = self.get("/status")
        if status is None:
            return [f"node {self.node_id} does not answer"]
        found = []
        if status["health"]["status"] != "ok":
            found.append(f"node {self.node_id}: {status['health'].get('reason')}")
        for row in status["partitions"]:
            found += [f"{row['topic']}-{row['partition']}: {t}" for t in row["troubles"]]
        found += [f"node {self.node_id} does not run {row}" for row in status["not_running"]]
        metadata = status["metadata"]
        if len(metadata.get("voters", ())) != len(self.cluster.voters):
            found.append(f"node {self.node_id} sees metadata voters {metadata.get('voters')}")
        elif metadata["leader"] is None:
            found.append(f"node {self.node_id} sees no metadata leader")
        return found

    def log_tail(self, size: int = 1500) -> str:
        """The last of what the process said."""
        return self.log_path.read_text(errors="replace")[-size:] if self.log_path.exists() else ""


class Cluster:
    """Several nodes in one folder."""

    def __init__(
        self,
        folder: Path,
        nodes: int,
        links: Links,
        make_disk: Callable[[Path], Disk],
        defaults: Mapping[str, str],
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.links = links
        self.cluster_id = "jepsen-like"
        self.token = secrets.token_hex(16)
        """Of admin ports, which are not on the loopback where nodes have networks of their own."""
        self.token_path = folder / "admin-token"
        self.token_path.touch(0o600)
        self.token_path.write_text(self.token)
        self.defaults = dict(defaults)
        self._make_disk = make_disk
        self.nodes: dict[int, Node] = {}
        self.voters: list[Node] = []
        """The first voters of metadata, as every configuration names them."""
        self.scarcity = Scarcity()
        """What nodes and clients lack of this machine's cores, from `start` on."""
        self.client_pids: list[int] = []
        self._sampler: Sampler | None = None
        self._highest = 0
        self._lock = threading.Lock()
        for _ in range(nodes):
            self.add()
        self.voters = list(self.nodes.values())

    def add(self) -> Node:
        """One more node, which does not run yet."""
        self._highest += 1
        node = Node(self, self._highest, self._make_disk(self.folder / f"disk-{self._highest}"))
        self.nodes[self._highest] = node
        return node

    def remove(self, node: Node) -> None:
        """Forget a node that is gone for good, and its disk."""
        node.kill()
        del self.nodes[node.node_id]
        node.disk.close()

    def start(self) -> None:
        """Start all nodes and wait until the cluster is well."""
        self._sampler = Sampler(self.scarcity, self._kinds)
        for node in self.nodes.values():
            node.start()
        self.wait_whole(60)

    def stop(self) -> None:
        """Kill what still runs and give back the disks."""
        if self._sampler is not None:
            self._sampler.close()
        for node in self.nodes.values():
            node.kill()
        for node in self.nodes.values():
            node.disk.close()

    def _kinds(self) -> dict[int, str]:
        """All processes of the run."""
        kinds = {os.getpid(): OWN, **dict.fromkeys(self.links.pids, LINKS)}
        kinds.update(dict.fromkeys(self.client_pids, CLIENTS))
        processes = [node.process for node in [*self.nodes.values()]]
        kinds.update({process.pid: NODES for process in processes if process is not None})
        return kinds

    def troubles(self) -> list[str]:
        """What keeps the cluster from being as good as new."""
        return [trouble for node in self.nodes.values() for trouble in node.troubles()]

    def wait_whole(self, timeout_s: float) -> None:
        """Return once every node is well and every partition fully replicated.

        Raises:
            StuckError: with what is wrong.
        """
        wait_until(
            lambda: not any(node.troubles() for node in self.nodes.values()),  # until the first
            timeout_s,
            lambda: "; ".join(self.troubles()[:8]),
            self.scarcity,
        )

    def wait_up(self, nodes: Sequence[Node], timeout_s: float) -> None:
        """Return once these processes do their work."""
        wait_until(
            lambda: all(node.is_up for node in nodes),
            timeout_s,
            lambda: "; ".join(f"{n.node_id}: {n.log_tail(300)}" for n in nodes if not n.is_up),
            self.scarcity,
        )

    def command(self, *words: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run a command of raftmq against this cluster."""
        return subprocess.run(
            [*self.links.client_prefix, RAFTMQ, *words],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={
                **os.environ,
                "RAFTMQ_BOOTSTRAP": self.bootstrap,
                "RAFTMQ_ADMIN_TOKEN": self.token,
            },
            check=False,
        )

    @property
    def bootstrap(self) -> str:
        """Where clients find the cluster."""
        return ",".join(node.places.advertised_client for node in self.nodes.values())
