"""What the simulation must not do: its own mistakes, each found as an anomaly that was none."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest

from jepsen_like.cluster.admins import create_topics
from jepsen_like.cluster.damage import Damage
from jepsen_like.cluster.faults import CRASHES_MIN, ENDS, draw_faults
from jepsen_like.cluster.fetch_session import NO_SESSION
from jepsen_like.cluster.kafka import Kafka
from jepsen_like.cluster.nemesis import Nemesis
from jepsen_like.cluster.node import ClusterNode
from jepsen_like.cluster.options import ClusterOptions, draw_cluster_options
from jepsen_like.cluster.producers import IN_FLIGHT_MAX, Batch, Pipe
from jepsen_like.cluster.run import quiet_logs
from jepsen_like.cluster.supervisor import Supervisor
from jepsen_like.cluster.world import ClusterWorld, Fault
from jepsen_like.disk import SimCrash, SimDisk
from jepsen_like.history_events import Event
from raftmq.log.journal import HardStateJournal
from raftmq.records import parse_header
from raftmq.types import METADATA_GROUP, NodeId
from tests.sim.failing_disks import topic_that_cannot_begin

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
    """Two of three clocks were a fortnight ahead: then that is the agreed time (500235). So it is
    for a partition whose replicas are on two such nodes out of five (9100364)."""
    options = ClusterOptions(nodes=nodes, clock_skew_ms=15 * DAY_MS)
    for seed in range(30):
        world = ClusterWorld(seed, options)
        nemesis = Nemesis(world, [])
        random = Random(seed)
        for _ in range(10):
            nemesis._strike(Fault(0.0, "clock-jump", random.getrandbits(48)))
        far = [node for node in world.nodes if abs(node.clock.skew_ms) > DAY_MS]
        assert len(far) <= 1
        world.close()


def test_crashes_come_early_where_the_odds_know_of_any() -> None:
    few = 0
    for seed in range(40):
        world = ClusterWorld(seed, draw_cluster_options(seed))
        faults = draw_faults(world)[: 4 * CRASHES_MIN]
        few += sum(fault.name in ENDS for fault in faults) < CRASHES_MIN
        world.close()
    assert few == 0


def test_a_trap_ends_the_power_in_the_middle_of_what_it_waits_for() -> None:
    disk = SimDisk(Random(1))
    disk.make_directories("d")
    disk.crash_when(lambda verb, path: 1 if (verb, path) == ("rename", "d/b") else None)
    file = disk.open("d/a", create=True)
    file.pwrite(b"x", 0)
    disk.rename("d/a", "d/b")
    with pytest.raises(SimCrash):
        disk.sync_directory("d")
    disk.crash()
    disk.make_directories("d/e")


def test_power_that_stays_tears_no_write() -> None:
    """A storage was missing, so that a crash only ended the process; the half of a batch that it
    left was a tail that the missing one may have committed: nobody could lead (940001)."""
    for is_torn in (False, True):
        disk = SimDisk(Random(5), tears=lambda answer=is_torn: answer)  # type: ignore[misc]
        file = disk.open("a", create=True)
        disk.crash_after(1)
        with pytest.raises(SimCrash):
            file.pwrite(bytes(1_000), 0)
        disk.end_process()
        assert (disk.open("a").size() > 0) == is_torn


def test_a_session_names_only_what_changed() -> None:
    first = NO_SESSION.request({("t", 0): 5, ("t", 1): 7})
    assert (first.session_id, first.session_epoch) == (0, 0)
    session = NO_SESSION.after({("t", 0): 5, ("t", 1): 7}, 33)
    second = session.request({("t", 0): 6})
    assert (second.session_id, second.session_epoch) == (33, 1)
    assert second.topics[0].partitions[0].fetch_offset == 6
    assert [(t.name, t.partitions) for t in second.forgotten] == [("t", [1])]
    third = NO_SESSION.after({("t", 0): 5}, 33, {("t", 0): 2}).request({("t", 0): 5}, {("t", 0): 3})
    assert third.topics[0].partitions[0].current_leader_epoch == 3


def test_a_client_does_not_go_back_to_an_older_leader() -> None:
    """A leader that was replaced while it was paused was named by a node that was behind; it had
    not the offset of who read on at its successor, and a member began again at 0 (seed 1 of
    `stress.coordinators`). Stock clients send the epoch that they know, and take no older one."""
    with quiet_logs():
        world = ClusterWorld(1, ClusterOptions(weights=()))
        world.partitions = [("t", 0)]
        kafka = Kafka(world, 91)
        kafka.keeps_epochs = True
        for epoch, leader, known in ((4, 2, 2), (3, 1, None), (5, 3, 3)):
            row = SimpleNamespace(partition_index=0, leader_id=leader, leader_epoch=epoch)
            topic = SimpleNamespace(name="t", error_code=0, partitions=[row])
            kafka._learn(SimpleNamespace(controller_id=1, topics=[topic]))
            assert kafka.leaders.get(("t", 0)) == known
        assert kafka.epochs == {("t", 0): 5}
        world.close()


def test_somebody_restarts_a_node_for_a_partition_that_could_not_begin() -> None:
    """Its disk failed while the replica was made; `/status` named it, and nobody looked there."""
    options = ClusterOptions(
        drop=0.0, duplicate=0.0, straggler=0.0, client_drop=0.0, api_fuzzers=0, weights=()
    )
    with quiet_logs():
        world = ClusterWorld(1, options)
        world.start()
        world.run_until(2_000.0)
        node = world.node(3)
        topic_that_cannot_begin(world, node, 3_000.0)
        supervisor = Supervisor(node)
        life = node.life
        assert "does not run on node 3" in world.watch.why_not_opened()
        for _ in range(200):
            supervisor.look()
            world.run_until(world.now_ms + 50.0)
        assert node.life > life
        assert world.watch.is_whole()
        world.close()


def test_no_storage_goes_while_a_node_that_is_given_up_still_votes() -> None:
    """It was alive, so one of the others lost its storage; then it was killed, and who is given up
    is not restarted: two of four voters were gone for good (seed 190)."""
    options = ClusterOptions(
        drop=0.0, duplicate=0.0, straggler=0.0, client_drop=0.0, api_fuzzers=0, weights=(), spares=1
    )
    with quiet_logs():
        world = ClusterWorld(1, options)
        world.start()
        world.run_until(2_000.0)
        assert world.watch.may_lose_a_storage()
        world.node(2).is_wanted = False
        assert not world.watch.may_lose_a_storage()
        world.close()


def test_a_node_that_was_given_up_is_no_spare_again() -> None:
    """A spare had taken a place and been replaced itself; it was to take one again, started while
    it ran, or with a storage that the cluster had given up."""
    with quiet_logs():
        world = ClusterWorld(1, ClusterOptions(weights=(), spares=1))
        world.start()
        world.run_until(2_000.0)
        spare = world.node(4)
        spare.start()
        spare.crash()
        Nemesis(world, [])._strike(Fault(0.0, "replace", 1))
        world.run_until(world.now_ms + 4_000.0)
        assert (world.counts.replacements, spare.is_up) == (0, False)
        world.close()


def test_a_group_of_which_only_who_was_given_up_knows_is_none() -> None:
    """Its topic was deleted after that node had left, so nobody could lead it any more."""
    with quiet_logs():
        world = ClusterWorld(1, ClusterOptions(weights=(), spares=1))
        world.start()
        made = world.clients.spawn(lambda: create_topics(world, 90, ["t"], 1))
        world.run_until(3_000.0)
        assert made.is_done
        (group,) = world.watch.groups()[1:]
        for node in world.nodes[1:3]:
            world.watch.machines.pop((node.node_id, group))
        world.node(1).is_wanted = False
        assert group not in world.watch.groups()
        world.close()


def journal_as_found(draw: int) -> tuple[ClusterWorld, HardStateJournal]:
    """A node's journal after a strike on it, as the node that comes up finds it."""
    world = ClusterWorld(1, ClusterOptions(weights=()))
    world.start()
    world.run_until(2_000.0)
    node = world.node(2)
    node.crash()
    Damage(world).rot_journal(node, Random(draw))
    return world, node.open_journal()


def test_every_strike_on_a_journal_is_noticed() -> None:
    """One that could pass for a write cut short would be more than anybody can survive."""
    for draw in range(24):
        with quiet_logs():
            world, journal = journal_as_found(draw)
            assert journal.damaged
            assert list(journal.groups()) == []
            world.close()


def test_one_bad_copy_in_a_journal_is_no_loss() -> None:
    """So a node keeps its word after such a strike, and the watch goes on to take it at it."""
    for draw in range(24):
        with quiet_logs():
            world = ClusterWorld(1, ClusterOptions(weights=()))
            world.start()
            world.run_until(2_000.0)
            node = world.node(2)
            node.crash()
            before = node.open_journal(disk=node.disk.copy(Random(1)))
            Damage(world).rot_promise(node, Random(draw))
            journal = node.open_journal()
            assert world.counts.effects["promise spoilt"] == 1
            assert not journal.damaged
            for group in before.groups():
                assert journal.get(group) == before.get(group)
            world.close()


def test_who_forgot_its_votes_is_admitted_as_somebody_else() -> None:
    with quiet_logs():
        world = ClusterWorld(1, ClusterOptions(weights=()))
        world.start()
        made = world.clients.spawn(lambda: create_topics(world, 90, ["t"], 2))
        world.run_until(3_000.0)
        assert made.is_done
        node, watch = world.node(2), world.watch
        machines = watch.machines
        before = {g: machines[node.node_id, g].replica.self_id for g in watch.groups()}
        node.crash()
        node.must_start.append(lambda: Damage(world).rot_journal(node, Random(1)))
        node.start()
        world.run_until(world.now_ms + 5_000.0)
        assert watch.is_whole()
        for group, replica_id in before.items():
            now = machines[node.node_id, group].replica
            assert now.self_id != replica_id
            assert now.self_id in now.voters
        world.close()


def test_of_what_is_written_twice_one_copy_stays() -> None:
    """Nobody had come to mend the first copy of a log start when the second one went bad, too: a
    fresh identity was right, and taken for a mistake (a run with many spoilt indexes)."""
    with quiet_logs():
        world = ClusterWorld(1, ClusterOptions(weights=()))
        world.start()
        world.run_until(2_000.0)
        node, damage = world.node(1), Damage(world)
        node.crash()
        for draw in range(30):
            damage.rot_one_copy(node, Random(draw))
        node.start()
        world.run_until(world.now_ms + 2_000.0)
        assert world.counts.effects["one copy spoilt"] >= 1
        assert world.watch.is_whole()
        world.close()


def test_who_comes_by_itself_is_dialled_at_once() -> None:
    """As nodes do. Links were dialled after their back-offs alone, up to one and a half seconds: a
    leader was heard that long, heard nobody, and nobody stood for election meanwhile (9200240)."""
    with quiet_logs():
        world = ClusterWorld(1, ClusterOptions(weights=()))
        world.start()
        world.run_until(2_000.0)
        one, two = world.node(1), world.node(2)
        assert one.links is not None
        assert two.links is not None
        world.wires.cut(1, 2)
        world.wires.cut(2, 1)
        for links, peer in ((one.links, NodeId(2)), (two.links, NodeId(1))):
            links.torn(peer)
            links._ends_later(peer, 0.0)
        world.run_until(world.now_ms + 4_000.0)
        assert not one.links.is_connected(NodeId(2))
        world.wires.mend_all()
        two.links._dial_later(NodeId(1), 0.0)
        world.run_until(world.now_ms + 2 * world.options.latency_ms[1])
        assert two.links.is_connected(NodeId(1))
        assert one.links.is_connected(NodeId(2))
        world.close()


def test_a_paused_node_goes_on_when_faults_end() -> None:
    """It heard frames, and its own timers stood still until the pause would have been over (seed 2
    of `stress.secluded`)."""
    with quiet_logs():
        world = ClusterWorld(1, ClusterOptions(weights=()))
        world.start()
        world.run_until(2_000.0)
        node = world.node(1)
        assert node.core is not None
        replica = node.core.plane.multiraft.replicas[METADATA_GROUP]
        node.pauses.begin(10_000.0)
        world.run_until(world.now_ms + 500.0)
        ticks = replica.core.now
        world.run_until(world.now_ms + 500.0)
        assert replica.core.now == ticks
        world.heal()
        world.run_until(world.now_ms + 10 * world.options.tick_ms)
        assert replica.core.now >= ticks + 5
        world.close()


def test_no_batch_goes_bad_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirds of what each node knew to be flushed overlapped, and the only batch of one node's
    third was spoilt on all three: nobody was left to mend it, and nobody led (500334)."""
    known = {1: 1, 2: 6, 3: 3}
    struck: list[int] = []

    def note(node: ClusterNode, path: str, position: int, *_: object) -> bool:
        struck.append(parse_header(node.disk.content(path), position).base_offset)
        return False

    monkeypatch.setattr(Damage, "_sure_offset", lambda _, node, group: known[int(node.node_id)])
    monkeypatch.setattr("jepsen_like.cluster.damage._spoil", note)
    with quiet_logs():
        world = ClusterWorld(1, ClusterOptions(weights=()))
        world.start()
        world.run_until(2_000.0)
        groups = world.watch.groups()
        monkeypatch.setattr(Damage, "_groups", lambda _: groups)
        for draw in range(24):
            Damage(world).rot_everywhere(Random(draw))
            for node in world.nodes:
                for strike in node.must_start:
                    strike()
                node.must_start.clear()
            assert len(struck) == len({*struck})
            struck.clear()
        assert world.counts.rots >= 24
        world.close()
