"""Two versions in one cluster under crashes and partitions, while somebody raises the level."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raftmq.errors import ErrorCode
from raftmq.metadata.broker_messages import FeatureRequest, Outcome, UpdateFeaturesCall
from raftmq.metadata.features import SUPPORTED, ranges_of
from raftmq.metadata.image import RAFTMQ_LEVEL
from raftmq.promise import Promise
from tests.controller.control_world import OLDER, ControlWorld, WorldNode
from tests.controller.metadata_cluster import CLIENT
from tests.controller.test_metadata_sim import FEW

NEWEST = SUPPORTED[RAFTMQ_LEVEL][1]
MISTAKES = 0.5
"""How often a node is started as the older version although the level is raised."""
ROUNDS = 24


def _is_raised(world: ControlWorld) -> bool:
    return any(node.is_up and node.engine.image.level > 1 for node in world.nodes.values())


def _check_older(world: ControlWorld) -> None:
    """An older version never has anything of the level to come."""
    for node in world.nodes.values():
        if node.is_up and node.ranges is OLDER:
            assert node.engine.image.level == 1
            assert node.engine.image.features_epoch == -1


def _restart(world: ControlWorld, node: WorldNode, older: float) -> None:
    """As the version that an operator chooses: back and forward, until the level is raised."""
    if _is_raised(world):
        older = MISTAKES
    node.crash()
    node.ranges = OLDER if world.random.random() < older else SUPPORTED
    world.schedule(world.random.uniform(10, 600), lambda: None if node.is_up else node.boot())


def _cut_off(world: ControlWorld) -> None:
    alone = world.random.choice(list(world.nodes.values()))
    for other in world.nodes.values():
        world.cut[alone.node_id, other.node_id] = True
        if world.random.random() < 0.7:
            world.cut[other.node_id, alone.node_id] = True
    world.schedule(world.random.uniform(100, 1_500), world.cut.clear)


def _raise_now_and_then(world: ControlWorld, refused: list[str]) -> None:
    def noted(node: WorldNode) -> Callable[[Promise[tuple[Outcome, ...]]], None]:
        def done(promise: Promise[tuple[Outcome, ...]]) -> None:
            if promise.error is not None:
                refused.append(str(promise.error))
                return
            [outcome] = promise.result()
            if outcome.code is ErrorCode.NONE:
                brokers = node.engine.image.brokers.values()
                assert all(ranges_of(b.features)[RAFTMQ_LEVEL][1] > 1 for b in brokers)
            else:
                refused.append(outcome.message or "")

        return done

    def ask() -> None:
        if world.is_over:
            return
        world.schedule(world.random.uniform(50, 400), ask)
        node = world.random.choice(list(world.nodes.values()))
        if node.is_up:
            update = FeatureRequest(RAFTMQ_LEVEL, NEWEST)
            call = UpdateFeaturesCall(updates=(update,), timeout_ms=400)
            node.control.call(call, CLIENT).when_done(noted(node))

    ask()


@pytest.mark.slow
@pytest.mark.parametrize("seed", FEW)
def test_two_versions_agree_until_only_one_is_left(seed: int) -> None:
    world = ControlWorld(3_000 + seed)
    refused: list[str] = []
    for node in world.nodes.values():
        node.ranges = OLDER
    world.run(1_500)
    for node in world.nodes.values():
        world.client(node)
    _raise_now_and_then(world, refused)
    world.run(500)
    for number in range(ROUNDS):
        if world.random.random() < 0.75:
            older = 0.5 if number < ROUNDS / 3 else 0.0
            _restart(world, world.random.choice(list(world.nodes.values())), older)
        else:
            _cut_off(world)
        for _ in range(4):
            world.run(world.random.uniform(50, 200))
            _check_older(world)
    world.cut.clear()
    world.loss = 0.0
    for node in world.nodes.values():
        if not node.is_up or node.ranges is OLDER:
            node.crash()
            node.ranges = SUPPORTED
            node.boot()
    world.run(4_000)
    world.is_over = True
    world.run(4_000)
    world.check()
    assert world.is_converged()
    assert [node.engine.image.level for node in world.nodes.values()] == [NEWEST] * len(world.nodes)
    assert any("supports 1 to 1" in told or "upgrade all nodes" in told for told in refused)
    acknowledged = sum(1 for o in world.operations if o.promise.is_done and o.promise.error is None)
    assert acknowledged > 100
