"""What the simulated operator would notice at a node that is down."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from jepsen_like.cluster.node import ClusterNode
from jepsen_like.cluster.operator import Operator, compare
from jepsen_like.cluster.options import ClusterOptions
from jepsen_like.cluster.run import quiet_logs
from jepsen_like.cluster.world import ClusterWorld
from jepsen_like.invariants import InvariantViolation
from raftmq.ports import Disk
from raftmq.tools import inspect, unsafe_recovery
from raftmq.tools.unsafe_recovery import GroupReport, Verdict
from raftmq.types import METADATA_GROUP, NodeId, Offset, ReplicaId, StorageId

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


def test_a_visit_changes_nothing_and_recovers_a_copy(
    world: ClusterWorld, node: ClusterNode
) -> None:
    before = {path: node.disk.content(path) for path in node.disk.files("data")}
    rehearse(world, node)
    assert {path: node.disk.content(path) for path in node.disk.files("data")} == before
    told = [line for line in world.trace if " rehearses " in line]
    assert 2 <= len(told) < 12
    assert any("in the middle of an unsafe recovery" in line for line in world.trace)


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
    monkeypatch.setattr(unsafe_recovery, "replace_configuration", lambda *_: None)
    with pytest.raises(InvariantViolation, match="UnsafeRecoveryIsRepeatable"):
        rehearse(world, node)


def report(*damaged: int, log_end: int = 86) -> GroupReport:
    """Of a group that lost nobody, with damage of a record each."""
    return GroupReport(
        name="t0-0",
        group=METADATA_GROUP,
        folder="t0",
        identity=ReplicaId(NodeId(1), StorageId(1)),
        verdict=Verdict.STAYS,
        log_end=Offset(log_end),
        damaged=tuple((Offset(at), Offset(at + 1)) for at in damaged),
    )


@pytest.mark.parametrize(
    ("new", "is_fine", "is_fine_without_power"),
    [
        (report(42, 50), True, True),
        (report(42), False, True),
        (report(42, 50, 60), False, True),
        (report(42, 50, log_end=85), False, False),
    ],
    ids=["the same", "forgotten", "more", "shorter"],
)
def test_damage_is_told_of_otherwise_only_where_the_power_went(
    new: GroupReport, is_fine: bool, is_fine_without_power: bool
) -> None:
    """It is noted in an index, which is not synced (seeds 9700059, 11201082)."""
    for power_went, expected in ((False, is_fine), (True, is_fine_without_power)):
        try:
            compare(report(42, 50), new, power_went=power_went)
        except InvariantViolation:
            assert not expected
        else:
            assert expected
