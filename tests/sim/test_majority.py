"""The majority that goes on alone once faults end: who is left out, and for how long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jepsen_like.cluster.majority import Held, Majority, is_in_doubt
from jepsen_like.cluster.nemesis import Nemesis
from jepsen_like.cluster.options import ClusterOptions
from jepsen_like.cluster.run import quiet_logs
from jepsen_like.cluster.supervisor import MISSING_MS
from jepsen_like.cluster.world import ClusterWorld, Fault
from raftmq.types import METADATA_GROUP, RaftIndex
from tests.sim.failing_disks import topic_that_cannot_begin


@pytest.fixture
def world() -> Iterator[ClusterWorld]:
    world = ClusterWorld(1, ClusterOptions())
    yield world
    world.close()


@pytest.fixture
def running() -> Iterator[ClusterWorld]:
    """A healthy cluster, formed."""
    with quiet_logs():
        world = ClusterWorld(1, ClusterOptions(weights=()))
        world.start()
        world.run_until(2_000.0)
        yield world
        world.close()


def test_one_node_reaches_nobody_until_it_is_let_in(world: ClusterWorld) -> None:
    majority = Majority(world)
    assert majority.left_out is not None
    out = majority.left_out.node_id
    others = [node.node_id for node in world.nodes if node.node_id != out]
    assert all(world.wires.is_cut(out, other) for other in others)
    assert all(world.wires.is_cut(other, out) for other in others)
    assert not world.wires.is_cut(others[0], others[1])
    assert list(world.cut_off) == [out]
    assert [limit_ms for limit_ms, _ in majority.phases()][1:] == [10 * 2 * 25 * 6]
    majority.end()
    assert not any(world.wires.is_cut(out, other) for other in others)
    assert not world.cut_off


def test_members_that_are_patient_may_take_longer() -> None:
    world = ClusterWorld(1, ClusterOptions().with_patience())
    limits_ms = [limit_ms for limit_ms, _ in Majority(world).phases()]
    assert limits_ms[1:] == [10 * 2 * 25 * 6, 2.5 * 1_500 + 2 * 1_500 + 2_000]
    world.close()


def test_who_came_late_itself_is_patient_with_a_silent_leader(running: ClusterWorld) -> None:
    """Its timeout was eight times as long, and the one left out had led (seed 9401930)."""
    majority = Majority(running)
    node = next(node for node in running.nodes if node is not majority.left_out)
    assert node.core is not None
    node.core.plane.multiraft.tick(late_ticks=4.0)
    assert node.core.plane.multiraft.timeout_doublings == 2
    assert [*majority.phases()][1][0] == (10 + 3) * 2 * 25 * 6


def test_who_was_paused_until_now_knows_soon_how_late_it_came(running: ClusterWorld) -> None:
    """It refused its vote for longer than the others waited, and no limit said so (11200308)."""
    node = running.nodes[0]
    node.pauses.begin(1_000.0)
    running.run_until(2_400.0)
    node.pauses.end()
    majority = Majority(running)
    majority.left_out = running.nodes[1]
    phases = majority.phases()
    _, why_not_running = next(phases)
    assert why_not_running() == "without node 2: not every node has ticked since"
    running.run_until(2_450.0)
    assert why_not_running() == ""
    assert next(phases)[0] == (10 + 7) * 2 * 25 * 6


def test_what_a_failing_disk_kept_from_beginning_is_waited_for_first(running: ClusterWorld) -> None:
    """Of three replicas one was left out and one had not begun, and would only once its node was
    restarted, after seconds: the third could not lead alone (9200815, 9201195)."""
    majority = Majority(running)
    assert majority.left_out is not None
    node = next(node for node in running.nodes if node is not majority.left_out)
    topic_that_cannot_begin(running, node, 1_000.0)
    _, why_not_running = next(majority.phases())
    assert f"node {node.node_id} does not run" in why_not_running()
    running.run_until(running.now_ms + MISSING_MS + 50.0)
    why_not_running()
    assert not node.is_up, "somebody looks, and restarts it"
    running.run_until(running.now_ms + 2_000.0)
    assert why_not_running() == ""


def test_who_waits_is_told_without_whom(world: ClusterWorld) -> None:
    majority = Majority(world)
    assert majority.left_out is not None
    _, why_not_up = next(majority.phases())
    others = sorted({1, 2, 3} - {int(majority.left_out.node_id)})
    assert why_not_up() == f"without node {majority.left_out.node_id}: nodes {others} do not serve"


def test_nobody_is_left_out_while_a_storage_is_missing(world: ClusterWorld) -> None:
    world.watch.storage_is_lost()
    majority = Majority(world)
    assert majority.left_out is None
    boot_ms, _ = next(majority.phases())
    assert boot_ms == world.options.liveness_ms, "whose storage is missing needs the others first"


@pytest.mark.parametrize("fault", ["swizzle", "isolate", "clients-cut"])
def test_what_a_nemesis_has_under_way_does_not_let_it_in(world: ClusterWorld, fault: str) -> None:
    """The end of an isolation, due after the heal, mended links; a swizzle went on cutting."""
    nemesis = Nemesis(world, [])
    for bits in range(8):
        nemesis._strike(Fault(0.0, fault, bits))
    nemesis.stop()
    world.wires.mend_all()
    world.cut_off.clear()
    majority = Majority(world)
    assert majority.left_out is not None
    ids = (1, 2, 3)
    before = {(a, b): world.wires.is_cut(a, b) for a in ids for b in ids}
    for at_ms in range(100, 5_000, 100):
        world.run_until(at_ms)
        assert {(a, b): world.wires.is_cut(a, b) for a in ids for b in ids} == before
        assert list(world.cut_off) == [majority.left_out.node_id]


def test_power_does_not_go_any_more_once_faults_end(running: ClusterWorld) -> None:
    """It went a moment later, for certain, and the majority had two elections in its time
    (11200920)."""
    nemesis = Nemesis(running, [])
    lives = [node.life for node in running.nodes]
    for bits in range(8):
        nemesis._strike(Fault(0.0, "crash-point", bits))
    nemesis.stop()
    running.heal()
    running.run_until(6_000.0)
    assert [node.life for node in running.nodes] == lives
    assert all(node.is_serving for node in running.nodes)


def test_one_who_alone_can_tell_what_a_torn_tail_held_is_let_in(running: ClusterWorld) -> None:
    """The others could not lead without it, and need not: safety goes before progress (9100828)."""
    majority = Majority(running)
    assert majority.left_out is not None
    out = majority.left_out
    doubting, knowing = (
        running.watch.machines[node.node_id, METADATA_GROUP].replica
        for node in running.nodes
        if node is not out
    )
    end = max(doubting.log.end_index, knowing.log.end_index)
    doubting.core.claimed_end_floor = RaftIndex(end)
    assert majority._told(lambda: "no leader") == f"without node {out.node_id}: no leader"
    assert majority.left_out is out
    doubting.core.claimed_end_floor = RaftIndex(end + 1)
    assert majority._told(lambda: "no leader") == "no leader"
    assert majority.left_out is None
    assert not running.cut_off


@pytest.mark.parametrize(
    ("promised", "replicas", "expected"),
    [
        (0, [Held(9, 9)], False),
        (9, [Held(9, 9), Held(5, 5)], False),
        (10, [Held(9, 9), Held(5, 5)], True),
        (9, [Held(9, 9, [(3, 5)]), Held(5, 5)], False),
        (9, [Held(9, 9, [(3, 6)]), Held(5, 5)], True),
        (9, [Held(9, 9, [(3, 5)]), Held(5, 5, [(4, 5)])], True),
        (9, [Held(9, 9, [(3, 5)]), Held(9, 9, [(6, 7)])], False),
    ],
    ids=["nothing", "there", "torn off", "can be mended", "cannot be", "bad twice", "each other's"],
)
def test_in_doubt_is_what_nobody_has_nor_gets(
    promised: int, replicas: list[Held], expected: bool
) -> None:
    """Damage in the middle of what was promised, beyond the end of all others (9700911)."""
    assert is_in_doubt(promised, replicas) is expected
