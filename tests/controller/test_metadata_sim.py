"""The control plane under crashes, partitions, loss: safety always, liveness when it is healed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raftmq.metadata.broker_messages import (
    AdminRequest,
    ChangeNodesCall,
    FeatureRequest,
    ReplaceNodeCall,
    UpdateFeaturesCall,
)
from raftmq.metadata.image import LEVEL_OF_CONDITIONS, RAFTMQ_LEVEL
from tests.controller.control_world import ControlWorld
from tests.controller.metadata_cluster import CLIENT

SEEDS = range(4)
FEW = [*range(2), *(pytest.param(seed, marks=pytest.mark.soak) for seed in (2, 3))]
"""Of what takes seconds; the simulation of whole nodes has the same faults in more seeds."""


def nemesis(world: ControlWorld, *, wipes: bool) -> None:
    random = world.random
    nodes = list(world.nodes.values())
    voters = [world.nodes[n] for n in world.voters]
    draw = random.random()
    if draw < 0.35:
        node = random.choice(nodes)
        node.crash()
        world.schedule(random.uniform(50, 1_500), lambda: None if node.is_up else node.boot())
    elif draw < 0.75:
        alone = random.choice(nodes)
        for other in nodes:
            if other is not alone:
                world.cut[alone.node_id, other.node_id] = True
                if random.random() < 0.7:
                    world.cut[other.node_id, alone.node_id] = True
        world.schedule(random.uniform(100, 2_000), world.cut.clear)
    elif draw < 0.85:
        for node in nodes:  # power fails everywhere at once
            node.crash()
            world.schedule(
                random.uniform(10, 400), lambda node=node: None if node.is_up else node.boot()
            )
    elif wipes and all(node.is_up for node in voters):
        node = random.choice(voters)
        node.crash(wipe=True)
        world.schedule(random.uniform(10, 300), node.boot)


def heal(world: ControlWorld) -> None:
    world.cut.clear()
    world.loss = 0.0
    for node in world.nodes.values():
        if not node.is_up:
            node.boot()  # unless it is gone for good


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_metadata_survives_faults(seed: int) -> None:
    world = ControlWorld(seed)
    world.run(1_500)
    for node in world.nodes.values():
        world.client(node)
    for _ in range(12):
        nemesis(world, wipes=False)
        world.run(world.random.uniform(200, 900))
    heal(world)
    world.run(3_000)
    world.is_over = True
    world.run(4_000)
    world.check()
    assert world.is_converged()
    assert not any(node.engine.image.removals for node in world.nodes.values())
    acknowledged = sum(1 for o in world.operations if o.promise.is_done and o.promise.error is None)
    assert acknowledged > 100
    assert world.barriers > 30
    assert any(node.engine.image.topics for node in world.nodes.values()) or world.topics < 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_wiped_voter_of_the_metadata_group_comes_back(seed: int) -> None:
    world = ControlWorld(1_000 + seed)
    world.run(2_000)
    for node in world.nodes.values():
        world.client(node)
    world.run(500)
    victim = world.nodes[world.random.choice(world.voters)]
    old = victim.storage_id
    victim.crash(wipe=True)
    world.run(world.random.uniform(10, 1_500))
    victim.boot()
    heal(world)
    world.run(3_000)
    world.is_over = True
    world.run(4_000)
    world.check()
    assert world.is_converged()
    assert not any(node.engine.image.removals for node in world.nodes.values())
    for node in world.nodes.values():
        voters = node.replica.configuration.voters
        assert [v.node_id for v in voters] == [1, 2, 3]
        assert old not in [v.storage_id for v in voters]
        assert node.control.lifecycle.is_ready


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS[:2])
def test_a_voter_gone_for_good_is_replaced_under_faults(seed: int) -> None:
    """Crashes, partitions and power failures at any step; the same wish is said again and again."""
    world = ControlWorld(2_000 + seed, observers=2)
    world.has_leaders = True
    world.run(2_000)
    for node in world.nodes.values():
        world.client(node)
    world.run(500)
    gone = world.nodes[world.random.choice(world.voters)]
    gone.crash()
    gone.is_gone = True
    stay = [n for n in world.nodes.values() if n is not gone]

    def ask() -> None:
        if world.is_over:
            return
        world.schedule(400, ask)
        node = world.random.choice(stay)
        if node.is_up:
            node.control.call(
                ReplaceNodeCall(old_id=gone.node_id, new_id=4, timeout_ms=300), CLIENT
            )

    ask()
    for _ in range(6):
        nemesis(world, wipes=False)
        world.run(world.random.uniform(200, 900))
    heal(world)
    world.run(5_000)
    world.is_over = True
    world.run(4_000)
    world.check()
    assert world.is_converged()
    wanted = sorted([*(n for n in world.voters if n != gone.node_id), 4])
    for node in stay:
        assert [v.node_id for v in node.replica.configuration.voters] == wanted
        assert gone.node_id not in node.engine.image.brokers
        assert node.engine.image.replacements[gone.node_id].is_done
        assert not node.engine.image.removals
        for topic in node.engine.image.topics_by_id():
            for partition in topic.partitions:
                assert gone.node_id not in partition.replicas


def ask_until_over(world: ControlWorld, request: AdminRequest) -> Callable[[], None]:
    """Ask random nodes for the same again and again; call what is returned to end it."""
    is_over = False

    def ask() -> None:
        if not is_over:
            world.schedule(400, ask)
            node = world.random.choice(list(world.nodes.values()))
            if node.is_up:
                node.control.call(request, CLIENT)

    def end() -> None:
        nonlocal is_over
        is_over = True

    ask()
    return end


def raise_level(world: ControlWorld) -> None:
    updates = (FeatureRequest(RAFTMQ_LEVEL, LEVEL_OF_CONDITIONS),)
    end = ask_until_over(world, UpdateFeaturesCall(updates=updates, timeout_ms=300))
    world.run(1_500)
    end()
    assert all(node.engine.image.level >= LEVEL_OF_CONDITIONS for node in world.nodes.values())


@pytest.mark.slow
@pytest.mark.parametrize("seed", FEW)
def test_three_voters_become_five_and_three_again_under_faults(seed: int) -> None:
    world = ControlWorld(4_000 + seed, observers=2)
    world.run(2_000)
    raise_level(world)
    for node in world.nodes.values():
        world.client(node)
    for voters in (5, 3, 5, 3):
        end = ask_until_over(world, ChangeNodesCall(voters=voters, timeout_ms=300))
        for _ in range(3):
            nemesis(world, wipes=False)
            world.run(world.random.uniform(200, 900))
        heal(world)
        world.run(4_000)
        end()
        for node in world.nodes.values():
            assert len(node.replica.configuration.voters) == voters
            assert node.engine.image.voters_wanted == voters
    assert world.views_max, "views come and go, too"
    world.is_over = True
    world.run(4_000)
    world.check()
    assert world.is_converged()


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS[:2])
def test_a_voter_is_drained_and_removed_under_faults(seed: int) -> None:
    """It dies on the way or lives; what holds nothing and is stopped goes, and stays away."""
    world = ControlWorld(5_000 + seed, observers=2)
    world.has_leaders = True
    world.run(2_000)
    raise_level(world)
    for node in world.nodes.values():
        world.client(node)
    world.run(500)
    going = world.nodes[world.random.choice(world.voters)]
    ids = (going.node_id,)
    end = ask_until_over(world, ChangeNodesCall(node_ids=ids, change="drain", timeout_ms=300))
    for _ in range(5):
        nemesis(world, wipes=False)
        world.run(world.random.uniform(200, 900))
        if going.is_up:
            held = [v.node_id for v in going.replica.configuration.voters]
            assert len(held) >= 3, "the vote was given before it was taken"
    heal(world)
    world.run(4_000)
    end()
    going.crash()
    going.is_gone = True
    end = ask_until_over(world, ChangeNodesCall(node_ids=ids, change="remove", timeout_ms=300))
    for _ in range(3):
        nemesis(world, wipes=False)
        world.run(world.random.uniform(200, 900))
    heal(world)
    world.run(5_000)
    end()
    world.is_over = True
    world.run(4_000)
    world.check()
    assert world.is_converged()
    for node in world.nodes.values():
        if node is going:
            continue
        image, configuration = node.engine.image, node.replica.configuration
        assert going.node_id not in image.brokers
        assert image.removed[going.node_id] == (going.storage_id,)
        assert len(configuration.voters) == 3
        assert going.node_id not in [m.node_id for m in configuration.members]
        for topic in image.topics_by_id():
            for partition in topic.partitions:
                assert going.node_id not in (*partition.replicas, *partition.voters)
