"""Quiescent groups cost nothing, and unquiesce when anything happens."""

from __future__ import annotations

import pytest

from raftmq.raft.membership import Configuration
from raftmq.raft.messages import Heartbeat
from raftmq.replication.messages import PeerMessage, Quiesce, Unquiesce, encode, encode_several
from raftmq.types import Offset
from tests.replication.sim_cluster import SimCluster
from tests.replication.sim_nodes import Network, SimNode


def quiescent(cluster: SimCluster) -> list[int]:
    return [n.multiraft.quiescent_count for n in cluster.nodes if n.multiraft is not None]


def at_rest(**options: object) -> SimCluster:
    cluster = SimCluster(quiesce_after_ticks=10, **options)
    cluster.commit(3)
    cluster.until(lambda: quiescent(cluster) == [cluster.world.options.groups] * 3)
    return cluster


def test_an_idle_group_sends_only_one_beat_per_pair_of_nodes() -> None:
    cluster = at_rest(groups=20)
    network: Network = cluster.world.network
    writes = [node.disk.counters.writes for node in cluster.nodes]
    before = network.sent
    cluster.run(1_000)
    # 40 ticks of 25 ms, a beat every second tick, from each of three nodes to two others.
    assert network.sent - before <= 20 * 6 * 1.2
    assert [node.disk.counters.writes for node in cluster.nodes] == writes
    assert quiescent(cluster) == [20] * 3


def test_a_busy_group_does_not_quiesce() -> None:
    cluster = SimCluster(quiesce_after_ticks=10)
    for _ in range(20):
        cluster.commit()
        cluster.run(50)
        assert quiescent(cluster) == [0, 0, 0]


def test_a_group_in_which_nobody_wrote_quiesces_sooner() -> None:
    """New ones come in hundreds, and so do those that lost their leader."""
    cluster = SimCluster(quiesce_after_ticks=400, groups=1)
    cluster.until(lambda: quiescent(cluster) == [1, 1, 1], within_ms=1_500)
    cluster.commit()
    cluster.run(3_000)
    assert quiescent(cluster) == [0, 0, 0]
    cluster.leader.crash()
    cluster.until(lambda: bool(cluster.leaders()))
    for node in cluster.nodes:
        if not node.is_up:
            node.start()
    cluster.until(lambda: quiescent(cluster) == [1, 1, 1])


def test_an_append_unquiesces_all_and_is_committed() -> None:
    cluster = at_rest()
    cluster.commit()
    cluster.settle()
    assert cluster.replica(cluster.leader).log_end_offset == 4
    cluster.until(lambda: quiescent(cluster) == [1, 1, 1])


def test_all_voters_are_in_sync_during_quiescence_and_right_after_it() -> None:
    cluster = at_rest()
    cluster.run(3_000)  # longer than the allowed lag
    leader = cluster.replica(cluster.leader)
    assert len(leader.in_sync_replicas()) == 3
    cluster.append()
    assert not leader.quiescence.is_quiescent
    assert len(leader.in_sync_replicas()) == 3


def test_clocks_are_known_during_quiescence_and_heard_again_after_a_question() -> None:
    cluster = at_rest()
    cluster.run(60_000)
    leader = cluster.replica(cluster.leader)
    now_ms, *others = leader.voters_clocks_ms()
    assert len(others) == 2
    assert all(now_ms - clock_ms > 50_000 for clock_ms in others), "they stood still"
    assert not leader.quiescence.is_quiescent
    cluster.run(200)
    now_ms, *others = leader.voters_clocks_ms()
    assert all(abs(now_ms - clock_ms) < 1_000 for clock_ms in others)


def test_only_groups_that_are_led_here_and_active_tell_clocks() -> None:
    """What a quiescent group has heard is old, and a follower hears nobody's clock."""
    cluster = at_rest()
    assert [list(node.multiraft.leading_cores()) for node in cluster.nodes] == [[], [], []]
    cluster.append()
    leading = {node: list(node.multiraft.leading_cores()) for node in cluster.nodes}
    assert leading.pop(cluster.leader) == [cluster.replica(cluster.leader).core]
    assert list(leading.values()) == [[], []]


def test_a_read_barrier_unquiesces_and_is_kept() -> None:
    cluster = at_rest()
    promise = cluster.replica(cluster.leader).read_barrier()
    cluster.until(lambda: promise.is_done, 200)
    assert promise.result() == cluster.replica(cluster.leader).commit_end


def test_a_dead_leader_is_replaced() -> None:
    cluster = at_rest()
    cluster.run(2_000)
    gone = cluster.leader
    gone.crash()
    cluster.until(lambda: bool(cluster.leaders()), 1_500)
    cluster.commit()
    gone.start()
    cluster.settle()
    cluster.until(lambda: quiescent(cluster) == [1, 1, 1])


def test_a_leader_that_restarts_at_once_is_noticed() -> None:
    cluster = at_rest()
    node = cluster.leader
    node.crash()
    node.start()
    cluster.until(lambda: bool(cluster.leaders()), 1_500)
    cluster.commit()
    cluster.settle()


def test_a_follower_that_restarts_hears_its_leader_again() -> None:
    cluster = at_rest()
    leader, node = cluster.leader, cluster.followers()[0]
    term = cluster.replica(leader).core.term
    node.crash()
    node.start()
    cluster.until(lambda: cluster.replica(node).leader is not None, 1_500)
    assert cluster.replica(leader).core.term == term
    cluster.until(lambda: quiescent(cluster) == [1, 1, 1])


def test_an_isolated_leader_unquiesces_and_steps_down() -> None:
    cluster = at_rest()
    node = cluster.leader
    cluster.isolate(node)
    cluster.until(lambda: not cluster.replica(node).is_leader, 2_000)
    cluster.until(lambda: bool(cluster.leaders()), 2_000)
    cluster.mend()
    cluster.commit()
    cluster.settle()


def test_a_leader_whose_replica_failed_is_noticed_although_its_node_lives() -> None:
    cluster = at_rest()
    node = cluster.leader
    assert node.multiraft is not None
    replica = cluster.replica(node)
    with node.multiraft.batch():
        node.multiraft.unregister(cluster.group)  # silently: nobody is told
    replica.log.close()
    cluster.until(lambda: any(n is not node for n in cluster.leaders()), 3_000)


def test_a_replica_that_left_is_quiescent_no_more() -> None:
    cluster = at_rest()
    node = cluster.followers()[0]
    assert node.multiraft is not None
    gone = node.multiraft.unregister(cluster.group)
    assert gone is not None
    gone.fail("deleted")
    cluster.run(100)
    assert node.multiraft.quiescent_count == 0


def test_damage_is_repaired_during_quiescence() -> None:
    cluster = SimCluster(quiesce_after_ticks=10, segment_bytes=400)
    cluster.commit(20, size=50)
    cluster.until(lambda: quiescent(cluster) == [1, 1, 1])
    node = cluster.followers()[0]
    replica = cluster.replica(node)
    span = replica.log.locate(Offset(3), 1, Offset(10))[0]
    node.disk.flip(span.file.path, span.position + 70)
    cluster.until(lambda: bool(replica.damaged()))
    cluster.until(lambda: not replica.damaged())
    assert node.machines[cluster.group].inner.doubted == [3], "what it read there may be wrong"
    cluster.until(lambda: quiescent(cluster) == [1, 1, 1])


def with_one_gone(groups: int) -> SimCluster:
    """A follower lacks one of the quiescent groups, and says nothing of it."""
    cluster = at_rest(groups=groups)
    node = cluster.followers()[0]
    assert node.multiraft is not None
    node.multiraft.unregister(cluster.group)
    node.machines.pop(cluster.group)
    return cluster


def test_a_group_that_is_gone_at_a_follower_does_not_keep_the_others_active() -> None:
    cluster = with_one_gone(groups=5)
    leader = cluster.leader
    cluster.until(lambda: not cluster.replica(leader).quiescence.is_quiescent, 1_000)
    cluster.until(lambda: quiescent(cluster).count(4) == 3, 5_000)
    cluster.run(1_000)
    assert quiescent(cluster) == [4, 4, 4]


def with_one_dead(**options: object) -> tuple[SimCluster, SimNode]:
    cluster = at_rest(**options)
    dead = cluster.followers()[0]
    dead.crash()
    cluster.until(lambda: quiescent(cluster) == [0, 0], 2_000)
    cluster.until(lambda: quiescent(cluster) == [cluster.world.options.groups] * 2, 10_000)
    return cluster, dead


def test_a_member_that_is_dead_for_long_keeps_no_group_active() -> None:
    cluster, _ = with_one_dead(groups=5)
    network: Network = cluster.world.network
    before = network.sent
    cluster.run(1_000)
    assert quiescent(cluster) == [5, 5], "they do not quiesce and unquiesce in turns"
    assert network.sent - before <= 20 * 2 * 1.2
    leader = cluster.replica(cluster.leader)
    assert len(leader.in_sync_replicas()) == 2, "the dead one is not vouched for"
    cluster.append()
    assert len(leader.in_sync_replicas()) == 2


def test_a_member_that_returns_to_a_quiescent_group_is_served() -> None:
    cluster, dead = with_one_dead()
    cluster.commit(2)
    cluster.until(lambda: quiescent(cluster) == [1, 1], 10_000)
    dead.start()
    cluster.settle()
    assert cluster.replica(dead).log_end_offset == 5
    cluster.until(lambda: quiescent(cluster) == [1, 1, 1])


def test_a_member_that_returns_with_an_old_term_is_served() -> None:
    cluster, dead = with_one_dead()
    old_leader = cluster.leader
    term = cluster.replica(old_leader).core.term
    old_leader.crash()
    old_leader.start()
    cluster.until(lambda: bool(cluster.leaders()), 5_000)
    cluster.commit()
    cluster.until(lambda: quiescent(cluster) == [1, 1], 20_000)
    assert cluster.replica(cluster.leader).core.term > term
    dead.start()
    cluster.settle()
    cluster.until(lambda: quiescent(cluster) == [1, 1, 1])


def test_two_dead_of_three_keep_the_third_active() -> None:
    cluster, dead = with_one_dead()
    next(node for node in cluster.followers() if node is not dead).crash()
    cluster.run(20_000)
    assert quiescent(cluster) == [0]


def test_a_learner_that_was_cut_off_is_served_again() -> None:
    """It never stands for election, so nothing else would tell the others that it is back."""
    cluster = SimCluster(quiesce_after_ticks=10)
    leader = cluster.leader
    node = cluster.followers()[0]
    replica, learner = cluster.replica(leader), cluster.replica(node)
    voters = tuple(voter for voter in replica.voters if voter != learner.self_id)
    replica.change_membership(Configuration(voters, (learner.self_id,)))
    cluster.commit(3)
    cluster.until(lambda: quiescent(cluster) == [1, 1, 1])
    cluster.isolate(node)
    cluster.until(lambda: learner.leader is None)
    cluster.commit(3)
    cluster.until(lambda: bool(replica.quiescence.absent), 10_000)
    cluster.run(500)
    assert replica.quiescence.is_quiescent
    cluster.mend()
    cluster.until(lambda: learner.leader is not None, 2_000)
    cluster.settle()


def test_the_absent_are_asked_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with another disk may have nothing to say of itself: it answers that it is new."""
    cluster, dead = with_one_dead()
    leader = cluster.replica(cluster.leader)
    (absent,) = leader.quiescence.absent
    assert absent.node_id == dead.node_id
    asked: list[object] = []
    send = leader.quiescence._send

    def noted(message: PeerMessage) -> None:
        asked.append((type(message), message.to))
        send(message)

    monkeypatch.setattr(leader.quiescence, "_send", noted)
    cluster.run(3_100)
    assert asked == [(Heartbeat, absent)] * 3
    assert quiescent(cluster) == [1, 1], "asking unquiesces nobody"


def test_a_member_whose_disk_was_exchanged_meanwhile_is_admitted() -> None:
    cluster, dead = with_one_dead()
    before = cluster.replica(cluster.leader).voters
    dead.wipe()
    dead.start()
    cluster.until(lambda: set(cluster.replica(cluster.leader).voters) != set(before), 20_000)
    cluster.settle()
    cluster.until(lambda: quiescent(cluster) == [1, 1, 1], 20_000)
    assert cluster.replica(dead).self_id in cluster.replica(cluster.leader).voters


def test_a_group_that_nodes_disagree_about_does_not_unquiesce_all_others() -> None:
    """Where cores are scarce, hundreds that unquiesce at once make everything later still."""
    cluster = with_one_gone(groups=60)
    leader = cluster.leader
    least = 60

    def is_awake() -> bool:
        nonlocal least
        least = min(least, *quiescent(cluster))
        return not cluster.replica(leader).quiescence.is_quiescent

    cluster.until(is_awake, 1_000)
    for _ in range(40):
        cluster.run(25)
        is_awake()
    assert least >= 45


def test_who_was_silent_for_a_moment_is_given_more_time_next() -> None:
    cluster = at_rest(groups=5)
    election_ms = 25 * cluster.world.options.election_ticks

    def rests_through(silence_ms: float) -> bool:
        cluster.isolate(cluster.followers()[0])
        cluster.run(silence_ms)
        cluster.mend()
        quiesced = quiescent(cluster)[cluster.leader.node_id - 1]
        cluster.until(lambda: quiescent(cluster) == [5] * 3, 10_000)
        return quiesced == 5

    assert not rests_through(1.6 * election_ms)
    assert rests_through(1.6 * election_ms)
    assert not rests_through(2.6 * election_ms)
    assert rests_through(2.6 * election_ms)
    cluster.run(30_000)
    assert not rests_through(1.6 * election_ms), "quick again after a quiet while"


def test_a_quiesce_that_a_follower_cannot_take_is_undone_at_once() -> None:
    cluster = at_rest(groups=2)
    leader, node = cluster.leader, cluster.followers()[0]
    follower = cluster.replica(node)
    cluster.append()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(follower), "is_settled", property(lambda replica: replica is not follower)
        )
        cluster.until(lambda: cluster.replica(leader).quiescence.is_quiescent, 5_000)
        assert not follower.quiescence.is_quiescent
        cluster.until(lambda: not cluster.replica(leader).quiescence.is_quiescent, 25)
    cluster.until(lambda: quiescent(cluster) == [2] * 3, 5_000)


def test_an_unquiesce_behind_a_quiesce_in_one_frame_ends_it() -> None:
    cluster = SimCluster(quiesce_after_ticks=10_000, groups=1)
    cluster.commit(3)
    cluster.run(500)
    leader, node = cluster.leader, cluster.followers()[0]
    core, follower = cluster.replica(leader).core, cluster.replica(node)
    them = core.term, core.self_id, follower.self_id
    messages = Quiesce(*them, core.log_end, core.next_round()), Unquiesce(*them)
    frame = encode_several([encode(follower.group, message) for message in messages])
    assert node.multiraft is not None
    node.multiraft.deliver(leader.node_id, b"".join(frame))
    assert not follower.quiescence.is_quiescent
    assert node.multiraft.quiescent_count == 0


def test_who_reports_what_is_led_is_told_of_every_quiescence_once() -> None:
    """Also of one between two reports: its in-sync replicas may be others than before."""
    cluster = at_rest(groups=3)
    multiraft = cluster.leader.multiraft
    assert multiraft is not None
    assert set(multiraft.take_quiesced()) == set(cluster.world.groups)
    assert multiraft.take_quiesced() == multiraft.active == []
    cluster.append()
    assert [replica.group for replica in multiraft.active] == [cluster.group]
    cluster.until(lambda: not multiraft.active)
    assert multiraft.take_quiesced() == [cluster.group]
    multiraft.unregister(cluster.group)
    assert multiraft.take_quiesced() == []
