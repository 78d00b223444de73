"""pysyncobj over an in-memory transport and a clock in the test's hand, the library unmodified.

Only what the library takes from its surroundings is replaced: the transport (its own extension
point), the monotonic clock and the random numbers. Messages are pickled and unpickled, as TCP does.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

import pysyncobj.syncobj as library
import pytest
from pysyncobj import FAIL_REASON, SyncObj, SyncObjConf, SyncObjConsumer, replicated
from pysyncobj.node import Node
from pysyncobj.transport import Transport

LEADER = library._RAFT_STATE.LEADER
TICK_S = 0.02


class ListConsumer(SyncObjConsumer):  # type: ignore[misc]  # pysyncobj has no types
    """Replicates a list of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Any] = []

    @replicated  # type: ignore[untyped-decorator]
    def put(self, item: Any) -> int:
        self.items.append(item)
        return len(self.items)


class MemoryTransport(Transport):  # type: ignore[misc]  # pysyncobj has no types
    """One node's end of the network."""

    def __init__(self, network: MemoryNetwork, name: str) -> None:
        super().__init__(None, None, [])
        self._network = network
        self._name = name

    def send(self, node: Node, message: Any) -> bool:
        return self._network.post(self._name, node.id, message)

    def destroy(self) -> None:
        """Nothing is open."""


class MemoryNetwork:
    """Nodes, their messages, time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int = 1) -> None:
        self.now_s = 100.0
        self.nodes: dict[str, SyncObj] = {}
        self.consumers: dict[str, Any] = {}
        self.mail: deque[tuple[str, str, bytes]] = deque()
        self.deaf: list[str] = []
        """Nodes that hear nothing (their connections stand)."""
        self.dead_links: list[tuple[str, str]] = []
        self.delivered: list[tuple[str, str, Any]] = []
        self.delay_ticks = 0
        self.deliver_max = 1_000_000
        """Messages delivered in one tick; a slow network spreads a snapshot over several."""
        self._later: deque[tuple[int, tuple[str, str, bytes]]] = deque()
        self._ticks = 0
        monkeypatch.setattr(library, "monotonicTime", lambda: self.now_s)
        monkeypatch.setattr(library, "random", Random(seed))

    def start(
        self,
        name: str,
        others: list[str],
        *,
        consumer: Any = None,
        **conf: Any,
    ) -> SyncObj:
        """Start a node; without batching, as raftmq's reference engine runs it."""
        self.consumers[name] = consumer or ListConsumer()
        settings: dict[str, Any] = {
            "autoTick": False,
            "appendEntriesUseBatch": False,
            "appendEntriesPeriod": 0.05,
            "raftMinTimeout": 0.3,
            "raftMaxTimeout": 0.6,
            "leaderFallbackTimeout": 2.0,
            "useFork": False,
        }
        settings.update(conf)
        transport = MemoryTransport(self, name)
        self.nodes[name] = SyncObj(
            Node(name),
            [Node(other) for other in others],
            conf=SyncObjConf(**settings),
            consumers=[self.consumers[name]],
            transport=transport,
        )
        return self.nodes[name]

    def start_all(self, *names: str, **conf: Any) -> None:
        """Start nodes and connect them."""
        for name in names:
            self.start(name, [other for other in names if other != name], **conf)
        self.connect_all()

    def connect_all(self) -> None:
        """Tell every node that it is connected to every other."""
        for name in self.nodes:
            for other in self.nodes:
                if other != name:
                    self.transport(name)._onNodeConnected(Node(other))

    def transport(self, name: str) -> Any:
        return self.nodes[name]._SyncObj__transport

    def stop(self, name: str) -> None:
        """End a node; its files stay."""
        self.nodes.pop(name).destroy()

    def close(self) -> None:
        """End all nodes."""
        for name in list(self.nodes):
            self.stop(name)

    # ---- messages ----

    def post(self, sender: str, to: str, message: Any) -> bool:
        data = pickle.dumps(message)
        if self.delay_ticks:
            self._later.append((self._ticks + self.delay_ticks, (sender, to, data)))
        else:
            self.mail.append((sender, to, data))
        return True

    def inject(self, sender: str, to: str, message: Any) -> None:
        """Let a node receive a message."""
        self.transport(to)._onMessageReceived(Node(sender), message)

    def deliver(self) -> None:
        """Deliver what is on its way."""
        while self._later and self._later[0][0] <= self._ticks:
            self.mail.append(self._later.popleft()[1])
        for _ in range(min(len(self.mail), self.deliver_max)):
            sender, to, data = self.mail.popleft()
            if to not in self.nodes or to in self.deaf or (sender, to) in self.dead_links:
                continue
            message = pickle.loads(data)
            self.delivered.append((sender, to, message))
            self.inject(sender, to, message)

    # ---- time ----

    def tick(self) -> None:
        """A little time passes for everybody."""
        self.now_s += TICK_S
        self._ticks += 1
        for name in list(self.nodes):
            self.nodes[name].doTick(0.0)
        self.deliver()

    def run(self, seconds: float) -> None:
        """Let time pass."""
        for _ in range(round(seconds / TICK_S)):
            self.tick()

    def run_until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        """Let time pass until something holds."""
        for _ in range(round(seconds / TICK_S)):
            if condition():
                return
            self.tick()
        raise AssertionError("it did not come to pass")

    # ---- looking ----

    def leaders(self) -> list[str]:
        return [name for name, node in self.nodes.items() if node._isLeader()]

    def elect(self, name: str, voters: list[str] | None = None) -> None:
        """Let a node's election timeout pass first, and only it campaign."""
        node = self.nodes[name]
        node._SyncObj__raftElectionDeadline = 0
        for other, its in self.nodes.items():
            if other != name:
                its._SyncObj__raftElectionDeadline = self.now_s + 1000
        self.run_until(node._isLeader)

    def log(self, name: str) -> list[tuple[bytes, int, int]]:
        """(command, index, term) of the entries a node holds."""
        journal = self.nodes[name]._SyncObj__raftLog
        return [journal[i] for i in range(len(journal))]

    def put(self, name: str, item: Any) -> list[tuple[Any, int]]:
        """Submit through a node; what its callback is told comes into the returned list."""
        told: list[tuple[Any, int]] = []
        self.consumers[name].put(item, callback=lambda result, why: told.append((result, why)))
        return told

    def put_acknowledged(self, name: str, *items: Any) -> None:
        """Submit and wait for success."""
        for item in items:
            told = self.put(name, item)
            self.run_until(lambda told=told: bool(told))  # type: ignore[misc]
            assert told[0][1] == FAIL_REASON.SUCCESS
