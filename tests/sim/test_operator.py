"""What the simulated operator would notice at a node that is down."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from jepsen_like.cluster.node import ClusterNode
from jepsen_like.cluster.operator import Operator
from jepsen_like.cluster.options import ClusterOptions
from jepsen_like.cluster.run import quiet_logs
from jepsen_like.cluster.world import ClusterWorld
from jepsen_like.invariants import InvariantViolation
from raftmq.cluster import giving_up
from raftmq.log import inspect
from raftmq.ports import Disk

CALM = ClusterOptions(drop=0.0, duplicate=0.0, straggler=0.0, client_drop=0.0, reorder=False)


@pytest.fixture(scope="module")
def world() -> Iterator[ClusterWorld]:
    with quiet_logs():
        world = ClusterWorld(1, CALM)
        world.start()
        world.run_until(2_000.0)
        assert world.watch.is_whole()
        yield world
        world.close()


@pytest.fixture
def node(world: ClusterWorld) -> Iterator[ClusterNode]:
    """A node without power."""
    node = world.node(2)
    node.crash()
    yield node
    node.start()
    world.run_until(world.now_ms + 2_000.0)


def rehearse(world: ClusterWorld, node: ClusterNode) -> None:
    for seed in range(12):
        Operator(world).visit(node, Random(seed))


def test_a_visit_changes_nothing_and_gives_up_a_copy(
    world: ClusterWorld, node: ClusterNode
) -> None:
    before = {path: node.disk.content(path) for path in node.disk.files("data")}
    rehearse(world, node)
    assert {path: node.disk.content(path) for path in node.disk.files("data")} == before
    told = [line for line in world.trace if " rehearses " in line]
    assert 2 <= len(told) < 12
    assert any("in the middle of giving up" in line for line in world.trace)


def test_a_look_that_writes_is_noticed(
    world: ClusterWorld, node: ClusterNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meddles(disk: Disk, folder: str) -> list[object]:
        disk.open(f"{folder}/bare.entries").pwrite(b"\xff", 0)
        return []

    monkeypatch.setattr(inspect, "verify_folder", meddles)
    with pytest.raises(InvariantViolation, match="LookingChangesNothing"):
        rehearse(world, node)


def test_words_that_do_nothing_are_noticed(
    world: ClusterWorld, node: ClusterNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(giving_up, "replace_configuration", lambda *_: None)
    with pytest.raises(InvariantViolation, match="GivingUpIsRepeatable"):
        rehearse(world, node)
