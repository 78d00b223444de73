"""What seeds of whole nodes found, told again as one fault at a time on a healthy cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
import pytest

from jepsen_like.cluster.admins import NodeReplacer, create_topics
from jepsen_like.cluster.kafka import Kafka
from jepsen_like.cluster.majority import Majority
from jepsen_like.cluster.node import ClusterNode
from jepsen_like.cluster.options import ClusterOptions
from jepsen_like.cluster.run import quiet_logs
from jepsen_like.cluster.settling import Settling
from jepsen_like.cluster.transactional import TOPIC
from jepsen_like.cluster.watch import Watcher
from jepsen_like.cluster.world import ClusterWorld
from jepsen_like.invariants import InvariantViolation
from raftmq.errors import ErrorCode
from raftmq.log.log_start import LogStartFile, Pending
from raftmq.metadata.commands import UNDATED, CommittedOffset
from raftmq.protocol import ApiKey
from raftmq.records import NewRecord, build_batch, parse_header
from raftmq.types import METADATA_GROUP, NodeId, Offset, RaftGroupId, RaftIndex

CALM = ClusterOptions(drop=0.0, duplicate=0.0, straggler=0.0, client_drop=0.0, reorder=False)


@pytest.fixture
def world() -> Iterator[ClusterWorld]:
    with quiet_logs():
        world = ClusterWorld(1, attrs.evolve(CALM))
        world.start()
        world.run_until(2_000.0)
        assert world.watch.is_whole()
        yield world
        world.close()


def test_a_metadata_log_that_fails_while_a_node_comes_up_ends_the_process(
    world: ClusterWorld,
) -> None:
    """Else it would wait for ever, neither serving nor given up by its supervisor (seed 92)."""
    node = world.node(2)
    node.crash()

    def fails(what: str, path: str) -> bool:
        is_met = what == "fdatasync" and path.startswith("data/meta/") and node.core is not None
        if is_met:
            node.disk.fail_when(None)
            failed.append(path)
        return is_met

    failed: list[str] = []
    node.disk.fail_when(fails)
    node.start()
    world.run_until(world.now_ms + 5_000.0)
    assert failed
    assert node.is_serving


def lead_a_partition(world: ClusterWorld, name: str = "t") -> tuple[ClusterNode, RaftGroupId]:
    """Create a topic of one partition, with one record; returns its leader and its group."""
    made = world.clients.spawn(lambda: create_topics(world, 90, [name], 1))
    world.run_until(world.now_ms + 2_000.0)
    assert made.is_done
    assert world.watch.is_whole()
    group = world.watch.groups()[1]
    (leader,) = world.watch.leaders(group)
    append(world, leader, group)
    assert world.watch.is_whole()
    return leader, group


def append(world: ClusterWorld, node: ClusterNode, group: RaftGroupId) -> None:
    """Append a batch at a leader, and give it time to flush."""
    replica = world.watch.machines[node.node_id, group].replica
    end = replica.log.end_index
    batch = build_batch([NewRecord(b"k", b"v")], timestamp=node.clock.wall_ms())
    node.run(lambda: replica.append(batch, parse_header(batch)))
    world.run_until(world.now_ms + 50.0)
    assert replica.log.flushed_end == replica.log.end_index == end + 1


def fail_a_sync(node: ClusterNode, name: str) -> list[str]:
    """The next sync of a partition's file of that name fails; its path is in the list then."""
    failed: list[str] = []

    def fails(what: str, path: str) -> bool:
        is_met = what == "fdatasync" and path.startswith("data/topics/") and path.endswith(name)
        if is_met:
            node.disk.fail_when(None)
            failed.append(path)
        return is_met

    node.disk.fail_when(fails)
    return failed


def begin_again(world: ClusterWorld, node: ClusterNode, group: RaftGroupId) -> Watcher:
    """Start a node that is down; returns its replica's watcher, just when it begins."""
    node.start()
    deadline_ms = world.now_ms + 5_000.0
    while (node.node_id, group) not in world.watch.machines:
        assert world.now_ms < deadline_ms, "the replica does not come back"
        world.run_until(world.now_ms + 0.1)
    return world.watch.machines[node.node_id, group]


def test_what_a_failed_truncation_cut_off_is_neither_missed_nor_durable(
    world: ClusterWorld,
) -> None:
    """A sync fails after the old leader's tail, flushed but never committed, was cut (seed 21)."""
    node, group = lead_a_partition(world)
    watcher = world.watch.machines[node.node_id, group]
    committed = watcher.commit_end
    others = [other.node_id for other in world.nodes if other is not node]
    for other in others:
        world.wires.cut(node.node_id, other)
        world.wires.cut(other, node.node_id)
    for _ in range(3):
        append(world, node, group)
    failed = fail_a_sync(node, "/log-start")
    world.run_until(world.now_ms + 1_000.0)
    for other in others:
        world.wires.mend(node.node_id, other)
        world.wires.mend(other, node.node_id)
    world.run_until(world.now_ms + 1_000.0)
    assert failed
    assert watcher.replica.failure is not None
    assert watcher.replica.log.flushed_end == committed + 3

    node.kill("a replica failed")
    again = begin_again(world, node, group)
    assert again.durable_end == committed
    world.run_until(world.now_ms + 5_000.0)
    assert world.watch.is_whole()


def test_a_failed_disk_is_no_excuse_for_the_loss_of_what_was_committed(
    world: ClusterWorld,
) -> None:
    node, group = lead_a_partition(world)
    replica = world.watch.machines[node.node_id, group].replica
    committed = world.watch.machines[node.node_id, group].commit_end
    failed = fail_a_sync(node, ".log")
    batch = build_batch([NewRecord(b"k", b"v")], timestamp=node.clock.wall_ms())
    node.run(lambda: replica.append(batch, parse_header(batch)))
    world.run_until(world.now_ms + 50.0)
    assert failed
    assert replica.failure is not None

    node.kill("a replica failed")
    folder = world.watch.folder_of(node.node_id, group)
    assert folder is not None
    start_file = LogStartFile(node.disk, folder)
    local = start_file.read()
    assert local is not None
    too_low = RaftIndex(committed - 1)
    start_file.replace(attrs.evolve(local, pending=Pending.TRUNCATE, truncated_end=too_low))
    with pytest.raises(InvariantViolation, match="FlushedSurvives"):
        begin_again(world, node, group)


def test_who_led_and_has_not_flushed_what_others_did_takes_nothing_back(
    world: ClusterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower tells what it has flushed; when it led it told all that others had (seed 1000060).
    What is stable up to its high watermark is what it was; only that must never fall."""
    node, group = lead_a_partition(world, TOPIC)
    watcher = world.watch.machines[node.node_id, group]
    replica, partition = watcher.replica, watcher.inner
    monkeypatch.setattr(node, "in_thread", lambda *_: None)  # its disk stands still
    batch = build_batch([NewRecord(b"k", b"v")], timestamp=node.clock.wall_ms())
    node.run(lambda: replica.append(batch, parse_header(batch)))
    world.run_until(world.now_ms + 50.0)
    assert (partition.stable_end, replica.log.flushed_end_offset) == (2, 1)

    (heir, _) = (other for other in world.nodes if other is not node)
    node.run(lambda: replica.transfer_leadership(heir.node_id))
    commit_end = watcher.commit_end
    world.run_until(world.now_ms + 200.0)
    assert watcher.commit_end > commit_end, "it heard its successor"
    assert (partition.stable_end, replica.log.flushed_end_offset) == (1, 1)
    beyond = partition.read(Offset(2), 1 << 20, may_follow=True, committed_only=True)
    assert beyond.code is ErrorCode.OFFSET_NOT_AVAILABLE, "its reader comes again, at its offset"

    producers = world.watch.machines[heir.node_id, group].inner._producers
    monkeypatch.setattr(producers, "last_stable_offset", lambda _end: Offset(0))
    with pytest.raises(InvariantViolation, match="MonotonicStableEnd"):
        append(world, heir, group)


def test_no_storage_is_taken_before_all_that_was_agreed_on_runs(world: ClusterWorld) -> None:
    """Voters of a topic just created are named, and of them none runs yet (seed 700121)."""
    assert world.watch.may_lose_a_storage()
    (leader,) = world.watch.leaders(METADATA_GROUP)
    assert leader.core is not None
    world.clients.spawn(lambda: create_topics(world, 90, ["t"], 1))
    deadline_ms = world.now_ms + 2_000.0
    while "t" not in leader.core.engine.image.topics:
        assert world.now_ms < deadline_ms
        world.run_until(world.now_ms + 0.05)
    assert world.watch.groups() == [METADATA_GROUP]
    assert "t-0 does not run on node" in world.watch.why_not_opened()
    assert not world.watch.may_lose_a_storage()
    assert not world.watch.is_whole()
    world.run_until(world.now_ms + 2_000.0)
    assert len(world.watch.groups()) == 2
    assert world.watch.may_lose_a_storage()


def test_no_storage_is_taken_while_one_that_is_gone_is_registered(world: ClusterWorld) -> None:
    """A topic that is created now would name it."""
    node = world.node(3)
    node.wipe()
    node.start()
    assert not world.watch.may_lose_a_storage()
    told = []
    for _ in range(400):
        world.run_until(world.now_ms + 10.0)
        told.append(world.watch.why_not_opened())
    assert any("node 3 is registered as" in why for why in told)
    assert world.watch.may_lose_a_storage()


def test_no_storage_is_taken_while_nobody_knows_what_was_agreed_on(world: ClusterWorld) -> None:
    lead_a_partition(world)
    for node in world.nodes:
        node.crash()
    for node in world.nodes:
        node.start()
    assert world.watch.why_not_opened() == "no controller knows what was agreed on"
    assert not world.watch.may_lose_a_storage()
    world.run_until(world.now_ms + 5_000.0)
    assert world.watch.may_lose_a_storage()


# ---- what the last waits take for settled ----


def append_all_the_time(world: ClusterWorld, node: ClusterNode, group: RaftGroupId) -> None:
    """A batch every few milliseconds, so that something is under way at every moment."""
    replica = world.watch.machines[node.node_id, group].replica

    def write() -> None:
        batch = build_batch([NewRecord(b"k", b"v")], timestamp=node.clock.wall_ms())
        node.run(lambda: replica.append(batch, parse_header(batch)))
        world.schedule(2.0, write)

    write()


def run_until(world: ClusterWorld, condition: Callable[[], bool]) -> None:
    limit_ms = world.now_ms + 5_000.0
    while not condition():
        assert world.now_ms < limit_ms
        world.run_until(world.now_ms + 0.1)


def looks(world: ClusterWorld, look: Callable[[], str]) -> list[str]:
    """What is told within two seconds, some at which replicas are not equally far."""
    told = []
    for _ in range(40):
        world.run_until(world.now_ms + 50.0)
        told.append(look())
    return told


def test_offsets_of_a_coordinator_whose_clock_is_behind_live_on(world: ClusterWorld) -> None:
    """It led nothing, stamped them by its own clock, then led and expired them (seed 271)."""
    (controller,) = world.watch.leaders(METADATA_GROUP)
    behind = next(node for node in world.nodes if node is not controller)
    behind.clock.skew_ms = -12 * 86_400_000.0
    core = behind.core
    assert core is not None
    group = next(f"g{i}" for i in range(99) if core.coordinator.find(f"g{i}") == behind.node_id)
    answers = []

    def commit() -> None:
        done = core.coordinator.commit(group, -1, "", None, [CommittedOffset("t", 0, 5)])
        done.when_done(lambda promise: answers.append(promise.result()))

    behind.run(commit)
    world.run_until(world.now_ms + 1_000.0)
    assert answers == [(ErrorCode.NONE,)]
    replica = world.watch.machines[controller.node_id, METADATA_GROUP].replica
    controller.run(lambda: replica.transfer_leadership(behind.node_id))
    world.run_until(world.now_ms + 5_000.0)
    assert world.watch.leaders(METADATA_GROUP) == [behind]
    state = core.machine.image.groups.get(group)
    assert state is not None, "its offsets expired at once"
    (saved,) = state.offsets.values()
    assert saved.offset == 5
    assert saved.timestamp_ms > controller.clock.wall_ms() - 10_000, "dated by who knew the time"


def test_entries_under_way_are_no_reason_to_wait(world: ClusterWorld) -> None:
    """A follower lacked the last entry at every look, another one each time (seed 700121)."""
    leader, group = lead_a_partition(world)
    append_all_the_time(world, leader, group)
    watchers = [world.watch.machines[node.node_id, group] for node in world.nodes]

    def how_far() -> str:
        ends = {(w.replica.log.end_index, w.commit_end) for w in watchers}
        return "equally" if len(ends) == 1 else "differently"

    assert {*looks(world, how_far)} == {"differently"}
    for look in (Settling(world).why_not_whole, Settling(world).why_apart):
        assert {*looks(world, look)[12:]} == {""}


def test_who_lags_behind_has_not_settled(world: ClusterWorld) -> None:
    leader, group = lead_a_partition(world)
    append_all_the_time(world, leader, group)
    settling = Settling(world)
    assert looks(world, settling.why_apart)[-1] == ""
    (follower, _) = (node for node in world.nodes if node is not leader)
    world.wires.cut(leader.node_id, follower.node_id)
    assert "is behind" in looks(world, settling.why_apart)[-1]


def test_images_of_one_version_that_differ_are_found_at_once(world: ClusterWorld) -> None:
    settling = Settling(world)
    assert settling.why_apart() == ""
    core = world.node(2).core
    assert core is not None
    core.machine.image = attrs.evolve(core.machine.image, next_producer_id=77)
    with pytest.raises(InvariantViolation, match="Convergence"):
        settling.why_apart()


def test_nobody_is_on_its_way_out_once_faults_end(world: ClusterWorld) -> None:
    """It ended seconds later, while the majority could do without nobody else (seed 8300051)."""
    leaver = world.node(2)
    for other in (1, 3):
        world.wires.cut(2, other)
        world.wires.cut(other, 2)
    leaver.shut_down()
    world.run_until(world.now_ms + 200.0)
    assert leaver.is_up, "it has nobody to hand over to yet"
    world.heal()
    life = leaver.life
    world.run_until(world.now_ms + 5_000.0)
    assert (leaver.is_serving, leaver.life) == (True, life)


def test_a_client_of_the_majority_is_not_held_up_by_who_is_left_out(
    world: ClusterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asked but the node left out, or one that is not there, four times (seed 8200943)."""
    leader, _ = lead_a_partition(world)
    world.heal()
    majority = Majority(world)
    assert majority.left_out is not None
    kafka = Kafka(world, 91)
    monkeypatch.setattr(kafka, "any_node", lambda: int(majority.left_out.node_id))
    learned = world.clients.spawn(lambda: kafka.refresh(["t"]))
    world.run_until(world.now_ms + 2.0 * world.options.request_timeout_ms)
    assert learned.is_done
    assert learned.result() is True
    assert kafka.leaders["t", 0] == leader.node_id


def test_a_wiped_node_finds_its_cluster_when_all_whom_it_knows_were_replaced() -> None:
    """It asked the nodes of its config alone and waited for ever (found by live faults: two nodes
    replaced, the third wiped)."""
    with quiet_logs():
        world = ClusterWorld(1, attrs.evolve(CALM, spares=2))
        world.start()
        world.run_until(2_000.0)
        for old, new in ((2, 4), (3, 5)):
            wait_until_whole(world)
            world.node(old).crash()
            world.node(old).is_wanted = False
            world.node(new).is_wanted = True
            world.node(new).start()
            world.clients.spawn(NodeReplacer(world, NodeId(old), NodeId(new)).run)
        wait_until_whole(world)
        world.node(1).wipe()
        world.node(1).start()
        wait_until_whole(world)
        assert {node.node_id for node in world.present} == {1, 4, 5}
        world.close()


def wait_until_whole(world: ClusterWorld) -> None:
    """Let time pass, 30 seconds at most, until every node serves and every group is whole."""
    world.run_until(world.now_ms + 1_000.0)  # what was begun a moment ago shows by then
    end_ms = world.now_ms + 30_000.0
    while not world.watch.is_whole():
        assert world.now_ms < end_ms, Settling(world).why_not_whole()
        world.run_until(world.now_ms + 100.0)


def test_a_joiner_whose_membership_was_never_committed_joins_anew() -> None:
    """It had the entry that names it from a leader that was lost with it. To the next one it was
    nobody; it was told so, and waited for ever, to be replicated to (seed 15)."""
    with quiet_logs():
        world = ClusterWorld(1, attrs.evolve(CALM, spares=1))
        world.start()
        world.run_until(2_000.0)
        leader = world.watch.leaders(METADATA_GROUP)[0]
        others = [n for n in (1, 2, 3) if n != leader.node_id]
        joiner = world.node(4)
        joiner.is_wanted = True
        joiner.start()
        replica = world.watch.machines[leader.node_id, METADATA_GROUP].replica
        run_until(world, lambda: any(m.node_id == 4 for m in replica.configuration.members))
        for other in others:  # before what was sent to them arrives
            world.wires.cut(leader.node_id, other)
            world.wires.cut(other, 4)

        def is_named() -> bool:
            return joiner.core is not None and joiner.core.engine.is_member

        run_until(world, is_named)
        leader.crash()
        world.wires.mend_all()
        leader.is_wanted = False
        assert is_named()
        world.run_until(world.now_ms + 8_000.0)
        assert joiner.is_serving
        world.close()


def test_who_leaves_and_was_silent_for_a_moment_hands_over_what_it_leads() -> None:
    """It was out of the metadata group for good as soon as its heartbeats were late: it never heard
    what it was to give away, and led it for ten seconds more, for nobody's clients (seed 15)."""
    with quiet_logs():
        world = ClusterWorld(1, attrs.evolve(CALM, spares=1))
        world.start()
        world.run_until(2_000.0)
        world.clients.spawn(lambda: create_topics(world, 90, ["t"], 3))
        world.run_until(world.now_ms + 2_000.0)
        world.node(4).is_wanted = True
        world.node(4).start()
        wait_until_whole(world)
        controller = world.watch.leaders(METADATA_GROUP)[0]
        leaders = {group: world.watch.leaders(group)[0] for group in world.watch.groups()}
        group = next(g for g, who in leaders.items() if who is not controller)
        leader = leaders[group]
        world.wires.cut(leader.node_id, controller.node_id)
        world.wires.cut(controller.node_id, leader.node_id)

        def is_fenced() -> bool:
            assert controller.core is not None
            return controller.core.engine.image.live_epoch(leader.node_id) is None

        run_until(world, is_fenced)
        leader.is_wanted = False
        world.clients.spawn(NodeReplacer(world, leader.node_id, NodeId(4)).run)
        metadata = world.watch.machines[controller.node_id, METADATA_GROUP].replica
        run_until(world, lambda: len(metadata.configuration.voters) == 4)
        run_until(world, lambda: len(metadata.configuration.voters) == 3)
        assert world.watch.leaders(group) == [leader], "one of its followers hears it"
        world.wires.mend_all()
        world.run_until(world.now_ms + 3_000.0)
        assert world.watch.is_whole(), Settling(world).why_not_whole()
        assert leader not in world.watch.leaders(group)
        world.close()


def test_an_id_of_a_quiet_cluster_whose_nodes_stood_still_is_dated() -> None:
    """Nodes that stood still hear no clocks for ten seconds, and by then nothing goes on that would
    let the controller hear any: without a date no id, and no group, ever expires."""
    with quiet_logs():
        world = ClusterWorld(1, attrs.evolve(CALM))
        world.start()
        world.run_until(100.0)
        for node in world.nodes:
            node.pauses.begin(2_000.0)
        world.run_until(4_500.0)
        world.clients.spawn(lambda: init_producer(world, "a"))
        world.run_until(world.now_ms + 15_000.0)
        (known,) = {
            node.core.engine.image.transactions.ids["a"].changed_at_ms
            for node in world.nodes
            if node.core is not None
        }
        world.close()
    assert known != UNDATED


async def init_producer(world: ClusterWorld, transactional_id: str) -> None:
    """Become the producer of an id, asking until it is so."""
    kafka = Kafka(world, 7)
    while True:
        answer = await kafka.ask(
            kafka.any_node(),
            ApiKey.INIT_PRODUCER_ID,
            transactional_id=transactional_id,
            transaction_timeout=1_000,
            producer_id=-1,
            producer_epoch=-1,
        )
        if not answer.error_code:
            return
        await kafka.pause()


def test_what_tears_a_stream_that_has_ended_does_not_tear_the_next_one(world: ClusterWorld) -> None:
    """A frame on its way into a cut had the next stream carry nothing, for ever (seed 700359)."""
    links = world.node(2).links
    assert links is not None
    world.node(1).crash()
    world.run_until(world.now_ms + 5_000.0)
    assert not links.is_connected(NodeId(1))
    links.torn(NodeId(1))
    world.node(1).start()
    world.run_until(world.now_ms + 5_000.0)
    core = world.node(1).core
    assert core is not None
    barrier = core.engine.read_barrier()
    world.run_until(world.now_ms + 500.0)
    assert barrier.is_done
    assert barrier.error is None
