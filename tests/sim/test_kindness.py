"""What the simulation must not do: its own mistakes, each found as an anomaly that was none."""

from __future__ import annotations

from random import Random

import pytest

from jepsen_like.cluster.nemesis import Nemesis
from jepsen_like.cluster.options import ClusterOptions
from jepsen_like.cluster.producers import IN_FLIGHT_MAX, Batch, Pipe
from jepsen_like.cluster.world import ClusterWorld, Fault
from jepsen_like.history_events import Event

DAY_MS = 86_400_000.0


def test_a_producer_never_runs_ahead_of_what_a_broker_remembers() -> None:
    """The oldest batch's answer was lost while four later ones were acknowledged: with only the
    batches counted that wait, a sixth was sent, and the first refused as out of order (500086)."""
    pipe = Pipe(made=5)
    event = Event("invoke", "append", 1, 0, 0)
    pipe.batches = [Batch(number, number, [number], event, 0.0) for number in range(5)]
    assert not pipe.has_room
    pipe.batches = pipe.batches[:1]
    assert not pipe.has_room
    pipe.batches = []
    assert pipe.has_room
    assert IN_FLIGHT_MAX == 5


@pytest.mark.parametrize("nodes", [3, 5])
def test_most_clocks_are_about_right(nodes: int) -> None:
    """Two of three clocks were a fortnight ahead: then that is the agreed time (500235)."""
    options = ClusterOptions(nodes=nodes, clock_skew_ms=15 * DAY_MS)
    for seed in range(30):
        world = ClusterWorld(seed, options)
        nemesis = Nemesis(world, [])
        random = Random(seed)
        for _ in range(10):
            nemesis._strike(Fault(0.0, "clock-jump", random.getrandbits(48)))
        far = [node for node in world.nodes if abs(node.clock.skew_ms) > DAY_MS]
        assert 2 * len(far) < nodes
        world.close()
