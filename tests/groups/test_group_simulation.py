"""No partition has two live owners and no position goes back, whatever happens; then it heals."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest

from raftmq.errors import ErrorCode
from raftmq.groups.group import Group
from raftmq.groups.model import SyncResult
from raftmq.metadata import apply_groups
from tests.groups.consumers import World

SEEDS = [int(os.environ["RAFTMQ_SEED"])] if "RAFTMQ_SEED" in os.environ else list(range(20))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_groups_are_safe_under_faults_and_live_afterwards(seed: int) -> None:
    world = World(seed)
    for _ in range(5):
        world.run(500, trouble=0.04)
        world.run(150, trouble=0.0)
    world.heal()
    for _ in range(40):
        world.run(50, trouble=0.0)
        if world.is_converged():
            break
    assert world.is_converged(), (
        f"seed {seed}: {[(c.generation, c.owned) for c in world.consumers]}"
    )
    assert world.acknowledged > 20
    assert world.referee.current > 2


@pytest.mark.slow
def test_the_same_seed_is_the_same_story() -> None:
    stories = []
    for _ in range(2):
        world = World(5)
        world.run(300, trouble=0.05)
        stories.append((world.referee.positions, world.referee.current, world.now_ms))
    assert stories[0] == stories[1]


def caught(seeds: int) -> bool:
    """True when the referee objects in one of so many runs."""
    for seed in range(seeds):
        world = World(seed)
        try:
            world.run(2_000, trouble=0.05)
        except (AssertionError, KeyError):
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["commits unchecked", "told before applied", "epoch ignored"])
def test_planted_bugs_are_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "commits unchecked":
        # Either check alone would do here: the coordinator's own, and the one at apply.
        monkeypatch.setattr(apply_groups, "check_commit", lambda *_: None)
        monkeypatch.setattr(Group, "check_commit", lambda *_: ErrorCode.NONE)
    elif bug == "told before applied":
        original = Group._park_sync

        def eager(self: Group, member: Any, promise: Any, assignments: Any, now_ms: float) -> None:
            original(self, member, promise, assignments, now_ms)
            if assignments:
                member.sync = None
                self._answer(promise, SyncResult(assignment=assignments[member.member_id]))

        monkeypatch.setattr(Group, "_park_sync", eager)
    else:
        real = apply_groups.apply_group

        def lax(image: Any, command: Any, live_epoch: Any) -> Any:
            group = image.get(command.group)
            if group is not None and hasattr(command, "coordinator_epoch"):
                command = msgspec.structs.replace(
                    command, coordinator_epoch=group.coordinator_epoch
                )
            return real(image, command, live_epoch)

        monkeypatch.setattr("tests.groups.world.apply_group", lax)
    assert caught(40)
