"""The same state machine on both engines: same commands, same image, where nothing is lost."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.commands import (
    AllocateProducerIds,
    Envelope,
    NoOperation,
    encode_envelope,
)
from raftmq.metadata.results import ProducerIds, Registered
from raftmq.metadata.snapshot import encode_image
from raftmq.records import NewRecord, build_batch, parse_header
from raftmq.runtime.reference_engine import (
    ReferenceMetadataEngine,
    ReferenceOptions,
    check_addresses,
)
from raftmq.types import NodeId
from tests.controller.metadata_cluster import FakeClock, MetadataCluster
from tests.metadata.metadata_commands import ENVELOPES, Machine, node, register
from tests.reference.memory_network import MemoryNetwork, MemoryTransport

pytestmark = pytest.mark.filterwarnings(
    # The library leaves files for the garbage collector to close.
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)

ADDRESSES = {NodeId(n): f"127.0.0.1:{7000 + n}" for n in (1, 2, 3)}


class ReferenceCluster:
    """Three engines on one in-memory network."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.network = MemoryNetwork(monkeypatch)
        self.clock = FakeClock()
        self.engines: dict[int, ReferenceMetadataEngine] = {}
        self.images: list[tuple[int, int]] = []
        for node_id, address in ADDRESSES.items():
            engine = ReferenceMetadataEngine(
                self_id=node_id,
                incarnation=1,
                clock=self.clock,
                post=lambda call: call(),
                options=ReferenceOptions(
                    ADDRESSES,
                    auto_tick=False,
                    transport=MemoryTransport(self.network, address),
                    contact_every_ms=0,
                ),
            )
            self.engines[node_id] = engine
            self.network.nodes[address] = engine.library
        self.network.connect_all()
        self.network.elect(ADDRESSES[NodeId(1)])
        self.run(0.2)

    def run(self, seconds: float) -> None:
        self.network.run(seconds)
        self.clock.now_ms += seconds * 1000
        for engine in self.engines.values():
            engine.tick()

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReferenceCluster]:
    cluster = ReferenceCluster(monkeypatch)
    yield cluster
    cluster.close()


def test_it_serves_the_port(cluster: ReferenceCluster) -> None:
    first = cluster.engines[1]
    assert first.is_leader
    assert not cluster.engines[2].is_leader
    assert [e.controller_id for e in cluster.engines.values()] == [1, 1, 1]
    assert first.controller_epoch == 1
    seen: list[int] = []
    cluster.engines[3].on_image(lambda _before, after: seen.append(after.version))
    registered = cluster.engines[2].propose(register(2))
    cluster.run(0.5)
    assert registered.result() == Registered(0)
    blocks = [
        engine.propose(AllocateProducerIds(node_id=node(2), count=5))
        for engine in cluster.engines.values()
    ]
    barrier = cluster.engines[3].read_barrier()
    cluster.run(0.5)
    assert sorted(b.result().start for b in blocks) == [0, 5, 10]
    assert isinstance(blocks[0].result(), ProducerIds)
    assert barrier.error is None
    assert barrier.is_done
    assert seen == sorted(seen)
    images = {encode_image(engine.image) for engine in cluster.engines.values()}
    assert len(images) == 1


def test_rejections_and_unknown_outcomes(cluster: ReferenceCluster) -> None:
    stale = cluster.engines[2].propose(NoOperation(), broker_epoch=9)
    cluster.run(0.5)
    assert isinstance(stale.error, KafkaError)
    assert stale.error.code is ErrorCode.STALE_BROKER_EPOCH
    cluster.network.deaf = list(ADDRESSES.values())
    lost = cluster.engines[2].propose(NoOperation(), timeout_ms=300)
    cluster.run(0.4)
    assert isinstance(lost.error, KafkaError)
    assert lost.error.code is ErrorCode.REQUEST_TIMED_OUT


def test_a_dump_carries_the_image(cluster: ReferenceCluster) -> None:
    cluster.engines[1].propose(register(1))
    cluster.run(0.3)
    state = cluster.engines[1].consumer._serialize()
    cluster.engines[2].consumer._deserialize(state)
    assert encode_image(cluster.engines[2].image) == encode_image(cluster.engines[1].image)


def test_only_loopback() -> None:
    check_addresses(ADDRESSES)
    with pytest.raises(ValueError, match="loopback only"):
        check_addresses({NodeId(1): "10.0.0.1:7000"})


def _on_our_raft(envelopes: list[Envelope], sizes: list[int]) -> list[bytes]:
    """The images after these commands went through the log, in batches of these sizes."""
    cluster = MetadataCluster(3)
    cluster.elect(1)
    cluster.replicate()
    left = list(envelopes)
    turn = 0
    while left:
        size = sizes[turn % len(sizes)]
        chunk, left, turn = left[:size], left[size:], turn + 1
        batch = build_batch([NewRecord(None, encode_envelope(e)) for e in chunk])
        cluster.nodes[1].replica.append(batch, parse_header(batch))
        cluster.replicate()
    return [encode_image(cluster.nodes[n].machine.image) for n in (1, 2, 3)]


def _on_pysyncobj(cluster: ReferenceCluster, envelopes: list[Envelope]) -> list[bytes]:
    told: list[Any] = []
    for envelope in envelopes:
        cluster.engines[1].consumer.submit(
            encode_envelope(envelope), callback=lambda *answer: told.append(answer)
        )
    cluster.network.run_until(lambda: len(told) == len(envelopes))
    cluster.run(0.3)
    return [encode_image(engine.consumer.image) for engine in cluster.engines.values()]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(envelopes=st.lists(ENVELOPES, max_size=30), sizes=st.lists(st.integers(1, 9), min_size=1))
def test_same_commands_same_image(envelopes: list[Envelope], sizes: list[int]) -> None:
    envelopes = [envelope for envelope in envelopes if envelope.version == 1]
    plain = Machine()
    for envelope in envelopes:
        plain.apply_envelope(envelope)
    expected = encode_image(plain.image)
    assert _on_our_raft(envelopes, sizes) == [expected] * 3
    with pytest.MonkeyPatch.context() as monkeypatch:
        cluster = ReferenceCluster(monkeypatch)
        try:
            assert _on_pysyncobj(cluster, envelopes) == [expected] * 3
        finally:
            cluster.close()


def test_sockets_stay_as_they_were() -> None:
    """The library swaps a function of the socket module when it is imported."""
    assert socket.inet_ntop(socket.AF_INET, b"\x7f\0\0\x01") == "127.0.0.1"
