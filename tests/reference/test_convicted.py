"""The reference engine under the faults that our own engine passes, judged by the same checkers.

Clients create topics and list them through whichever node they ask, each list after a barrier, as
the simulated admins do. The library is unmodified; power loss takes what was written since the
system wrote the files back, for the library asks for no sync (see `test_shipped_failures.py`).
It must be convicted within a few seeds: these are the faults that find something.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from jepsen_like.checkers import Options, Report, check_events
from jepsen_like.checkers.verdict import Validity
from jepsen_like.history_events import Event, Recorder
from raftmq.metadata.commands import CreateTopics
from raftmq.metadata.engine import CommandNotAppliedError
from raftmq.promise import Promise
from raftmq.runtime.reference_engine import ReferenceMetadataEngine, ReferenceOptions
from raftmq.types import NodeId
from tests.controller.metadata_cluster import FakeClock
from tests.metadata.metadata_commands import creation, register
from tests.reference.memory_network import MemoryNetwork, MemoryTransport

pytestmark = pytest.mark.filterwarnings(
    # The library leaves files for the garbage collector to close.
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)

ADDRESSES = {NodeId(n): f"127.0.0.1:{7000 + n}" for n in (1, 2, 3)}
STEP_S = 0.1
WRITE_BACK_STEPS = 20
"""The system writes files back by itself every two seconds here; Linux takes longer."""
SEEDS = 10


class FaultyCluster:
    """Three engines with files, that lose power and each other, and clients that ask them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, seed: int) -> None:
        self.random = Random(seed)
        self.network = MemoryNetwork(monkeypatch, seed)
        self.clock = FakeClock()
        self.events: list[Event] = []
        self.recorder = Recorder(self.events.append, lambda: int(self.clock.now_ms * 1e6))
        self.engines: dict[NodeId, ReferenceMetadataEngine] = {}
        self._folder = folder
        self._incarnation = 0
        self._steps = 0
        self._topics = 0
        for node_id in ADDRESSES:
            self.start(node_id)
        self.network.connect_all()

    # ---- nodes ----

    def _files(self, node_id: NodeId) -> Path:
        return self._folder / f"node-{node_id}"

    def _written_back(self, node_id: NodeId) -> Path:
        return self._folder / f"disk-{node_id}"

    def start(self, node_id: NodeId) -> None:
        """Start a node on what its files hold."""
        self._files(node_id).mkdir(exist_ok=True)
        self._written_back(node_id).mkdir(exist_ok=True)
        self._incarnation += 1
        engine = ReferenceMetadataEngine(
            self_id=node_id,
            incarnation=self._incarnation,
            clock=self.clock,
            post=lambda call: call(),
            options=ReferenceOptions(
                ADDRESSES,
                folder=str(self._files(node_id)),
                auto_tick=False,
                transport=MemoryTransport(self.network, ADDRESSES[node_id]),
                contact_every_ms=0,
            ),
        )
        self.engines[node_id] = engine
        self.network.nodes[ADDRESSES[node_id]] = engine.library
        if len(self.engines) == len(ADDRESSES):
            self.network.connect_all()

    def kill(self, node_id: NodeId) -> None:
        """The process ends; what it wrote is in the page cache."""
        del self.network.nodes[ADDRESSES[node_id]]
        self.engines.pop(node_id).close()

    def lose_power(self, node_id: NodeId) -> None:
        """As `kill`, and the page cache is gone as well."""
        self.kill(node_id)
        shutil.rmtree(self._files(node_id))
        shutil.copytree(self._written_back(node_id), self._files(node_id))

    def _write_back(self) -> None:
        for node_id in self.engines:
            shutil.rmtree(self._written_back(node_id))
            shutil.copytree(self._files(node_id), self._written_back(node_id))

    # ---- time ----

    def step(self) -> None:
        """A little time passes."""
        self.network.run(STEP_S)
        self.clock.now_ms += STEP_S * 1000
        for engine in list(self.engines.values()):
            engine.tick()
        self._steps += 1
        if self._steps % WRITE_BACK_STEPS == 0:
            self._write_back()

    def run(self, seconds: float) -> None:
        """Let time pass."""
        for _ in range(round(seconds / STEP_S)):
            self.step()

    def close(self) -> None:
        """End all nodes."""
        for node_id in list(self.engines):
            self.kill(node_id)

    # ---- clients ----

    def create(self) -> None:
        """Create a topic that nobody created before."""
        self._topics += 1
        name = f"set-{self._topics}"
        node_id = self.random.choice(sorted(self.engines))
        operation = self.recorder.invoke(int(node_id), "create_topic", topics=[name])
        command = CreateTopics(topics=(creation(name, self._topics, (1, 2, 3)),))

        def answered(done: Promise[Any]) -> None:
            if done.error is None:
                self.recorder.ok(operation)
            elif isinstance(done.error, CommandNotAppliedError):
                self.recorder.fail(operation)
            else:
                self.recorder.info(operation)

        self.engines[node_id].propose(command, timeout_ms=2_000).when_done(answered)

    def list(self) -> None:
        """List all topics, once a barrier says that this node knows."""
        node_id = self.random.choice(sorted(self.engines))
        engine = self.engines[node_id]
        operation = self.recorder.invoke(int(node_id), "list_topics")

        def answered(done: Promise[None]) -> None:
            if done.error is None:
                self.recorder.ok(operation, topics=sorted(engine.image.topics))
            else:
                self.recorder.info(operation)

        engine.read_barrier(timeout_ms=2_000).when_done(answered)

    def settle(self) -> None:
        """Brokers are registered, so that topics can be placed."""
        self.network.elect(ADDRESSES[NodeId(1)])
        for number in ADDRESSES:
            self.engines[number].propose(register(number))
        self.run(3.0)

    def strike(self, fault: Callable[[FaultyCluster], None], seconds: float) -> None:
        """Ask and be struck; then heal, and ask once more."""
        for number in range(round(seconds / STEP_S)):
            self.create() if self.random.random() < 0.7 else self.list()
            self.step()
            if number % 15 == 14:
                fault(self)
        self.network.dead_links = []
        self.run(5.0)
        for _ in range(3):
            self.list()
            self.run(1.0)


def all_lose_power(cluster: FaultyCluster) -> None:
    """The whole rack goes dark and comes back."""
    for node_id in ADDRESSES:
        cluster.lose_power(node_id)
    for node_id in ADDRESSES:
        cluster.start(node_id)


def one_loses_power(cluster: FaultyCluster) -> None:
    """One of three loses power and comes back; one, perhaps another, is cut off."""
    node_id = cluster.random.choice(sorted(ADDRESSES))
    cluster.lose_power(node_id)
    cluster.start(node_id)
    isolate(cluster)


def isolate(cluster: FaultyCluster) -> None:
    """One of three is cut off, until another is."""
    lonely = cluster.random.choice(sorted(ADDRESSES.values()))
    others = [address for address in ADDRESSES.values() if address != lonely]
    cluster.network.dead_links = [
        pair for other in others for pair in ((lonely, other), (other, lonely))
    ]


def judge(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    seed: int,
    fault: Callable[[FaultyCluster], None],
) -> Report:
    """One seed of one kind of fault, judged."""
    folder.mkdir()
    cluster = FaultyCluster(monkeypatch, folder, seed)
    try:
        cluster.settle()
        cluster.strike(fault, 15.0)
    finally:
        cluster.close()
    acknowledged = sum(e.f == "create_topic" and e.type == "ok" for e in cluster.events)
    assert acknowledged > 10, "it must have worked at all"
    return check_events(cluster.events, Options(must_see_all=False))


def convicted_by(
    monkeypatch: pytest.MonkeyPatch, folder: Path, fault: Callable[[FaultyCluster], None]
) -> tuple[str, ...]:
    """Run seeds until one is convicted; what convicted it."""
    for seed in range(1, SEEDS + 1):
        report = judge(monkeypatch, folder / f"seed-{seed}", seed, fault)
        if report.validity is Validity.INVALID:
            return tuple(report.named(Validity.INVALID))
    return ()


@pytest.mark.parametrize("fault", [all_lose_power, one_loses_power])
def test_power_loss_takes_acknowledged_topics(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: Callable[[FaultyCluster], None]
) -> None:
    assert "lost-topic" in convicted_by(monkeypatch, tmp_path, fault)


def test_without_power_loss_the_same_clients_convict_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What convicts above is the library, not the world around it."""
    for seed in (1, 2):
        report = judge(monkeypatch, tmp_path / f"seed-{seed}", seed, isolate)
        assert report.validity is not Validity.INVALID, report.to_text()
