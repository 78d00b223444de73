"""Apache Kafka for tests: three nodes of `peer-kafka.sh`, killed and restarted by pid.

Everything that a client does must hold here as on raftmq. `KafkaCluster` ends what it started and
nothing else; its ports are below those of outgoing connections. Without Java a test is skipped.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from jepsen_like.live.cluster import PORTS
from raftmq_client import Admin, ClientError, Producer
from tests.live.harness import need, wait_until

SCRIPT = Path(__file__).with_name("peer-kafka.sh")
NODES = (1, 2, 3)
USER, PASSWORD = "alice", "alice-secret"
TLS_PORT, SASL_PORT, BOTH_PORT = 2, 3, 4


def free_base(count: int = 30) -> int:
    """The first of so many free ports in a row."""
    while True:
        base = random.randrange(PORTS[0], PORTS[1] - count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in range(base, base + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return base


class KafkaCluster:
    """A context manager: serves on entry, gone after."""

    def __init__(self) -> None:
        need("java")
        self.folder = Path(tempfile.mkdtemp(prefix="raftmq-kafka-")) / "nodes"
        self.base = free_base()

    @property
    def bootstrap(self) -> str:
        """All nodes, without security."""
        return self.at(0)

    def at(self, listener: int) -> str:
        """All nodes at one of their listeners."""
        return ",".join(f"127.0.0.1:{self.base + 10 * (node - 1) + listener}" for node in NODES)

    def __enter__(self) -> Self:
        try:
            self._run("start", str(self.folder), str(self.base))
            wait_until(self._serves, 180, "Kafka serves")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End all nodes and remove their folder."""
        self._run("stop", str(self.folder))
        self.folder.parent.rmdir()

    def signal(self, node: int, number: signal.Signals) -> None:
        """Send a signal to a node."""
        os.kill(int((self.folder / f"{node}.pid").read_text()), number)

    def heal(self, node: int) -> None:
        """A node that was killed or stopped serves again, and every partition is whole."""
        pid = int((self.folder / f"{node}.pid").read_text())
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            self._run("node", str(self.folder), str(node))
        wait_until(self._is_whole, 180, f"node {node} is back")

    def _run(self, *words: str) -> None:
        subprocess.run([str(SCRIPT), *words], check=True)

    def _serves(self) -> bool:
        try:
            with Admin(self.bootstrap, timeout_ms=2_000) as admin:
                if len(admin.brokers()) < len(NODES):
                    return False
            with Producer(self.bootstrap, delivery_timeout_ms=5_000) as producer:
                producer.send("ready", b"x", partition=0).result()
        except (ClientError, TimeoutError):
            return False
        return True

    def _is_whole(self) -> bool:
        try:
            with Admin(self.bootstrap, timeout_ms=5_000) as admin:
                topics = admin.cluster().topics
        except ClientError:
            return False
        return all(
            set(item.in_sync) == set(item.replicas) for topic in topics for item in topic.partitions
        )
