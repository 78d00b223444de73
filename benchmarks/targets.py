"""A cluster under measurement: where clients connect, which processes serve it.

A `Target` is any Kafka bootstrap. `pids` lets CPU and memory be read; node ids beside the pids let
a leader be killed; admin addresses (raftmq's) let faults be injected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from attrs import define, field

from benchmarks.errors import BenchmarkError, UnsupportedError


class Restartable(Protocol):
    """What can start a dead node again."""

    def restart(self, node_id: int) -> int:
        """Start it and give its pid, without waiting until it serves."""
        ...


@define
class Target:
    """One cluster."""

    name: str
    bootstrap: str
    pids: dict[int, int] = field(factory=dict)
    """Process by node id; ids below zero stand for nodes whose id was not told."""
    admin: dict[int, str] = field(factory=dict)
    """HTTP address by node id, for raftmq."""
    topic_config: dict[str, str] = field(factory=dict)
    """What makes topics comparable: fsync where the cluster would not by itself."""
    replicas: int = 3
    client: dict[str, str] = field(factory=dict)
    """How the clients under load come in, in librdkafka's words; nothing where nobody is asked."""
    operator: dict[str, str] = field(factory=dict)
    """The same of the client that makes topics and rules."""
    restarter: Restartable | None = None

    @property
    def servers(self) -> list[int]:
        """The pids."""
        return list(self.pids.values())

    def pid_of(self, node_id: int) -> int:
        """The process of a node.

        Raises:
            UnsupportedError: it was not told which it is.
        """
        pid = self.pids.get(node_id)
        if pid is None:
            raise UnsupportedError(f"needs --pids ID:PID,...; the process of node {node_id}")
        return pid

    def restart(self, node_id: int) -> None:
        """Start a dead node again.

        Raises:
            UnsupportedError: this cluster was not started by us.
        """
        if self.restarter is None:
            raise UnsupportedError("needs a cluster of its own, to start a dead node again")
        self.pids[node_id] = self.restarter.restart(node_id)


def parse_pids(text: str) -> dict[int, int]:
    """`ID:PID,...`, or `PID,...` where only CPU and memory are wanted.

    Raises:
        BenchmarkError: neither.
    """
    pids: dict[int, int] = {}
    for number, word in enumerate(filter(None, text.split(",")), start=1):
        node, colon, pid = word.rpartition(":")
        if not pid.isdigit() or (colon and not node.isdigit()):
            raise BenchmarkError(f"--pids {word!r}: ID:PID or PID is wanted, such as 1:4711")
        pids[int(node) if colon else -number] = int(pid)
    return pids


def read_cluster_file(path: Path) -> Target:
    """The target that a `cluster.json` of `raftmq dev` describes.

    Raises:
        BenchmarkError: it is not one.
    """
    try:
        content: Mapping[str, object] = json.loads(path.read_text())
        nodes = content["nodes"]
        assert isinstance(nodes, list)
        return Target(
            name="raftmq",
            bootstrap=str(content["bootstrap"]),
            pids={node["id"]: node["pid"] for node in nodes},
            admin={node["id"]: f"{node['host']}:{node['admin_port']}" for node in nodes},
            replicas=min(3, len(nodes)),
        )
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise BenchmarkError(f"{path} is no cluster.json of raftmq dev: {error!r}") from error
