"""Replicas of data partitions as a node runs them: opened side by side, and again when they can."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import attrs
import pytest
import trio
from immutables import Map

from raftmq.config import NodeConfig
from raftmq.controller.reconciler import Action, StartReplica
from raftmq.errors import ErrorCode, KafkaError
from raftmq.log.journal import GroupState, HardStateJournal, JournalConfig
from raftmq.log.model import FlushJob
from raftmq.log.shared import Shared
from raftmq.metadata.image import EMPTY_IMAGE, BrokerImage, PartitionImage, RemovalImage, TopicImage
from raftmq.node import partitions as module
from raftmq.node.partitions import Partitions
from raftmq.partition.parked import Deadlines
from raftmq.partition.ports import AppendResult
from raftmq.partition.registry import PartitionRegistry
from raftmq.ports import DiskError, DiskFullError, never
from raftmq.promise import Promise
from raftmq.raft.messages import Heartbeat
from raftmq.records import NewRecord, build_batch, parse_header
from raftmq.replication.catch_up import CatchUpRate
from raftmq.replication.clocks import AgreedTime
from raftmq.replication.multiraft import MultiRaft
from raftmq.replication.opening import ReplicaOpener
from raftmq.replication.ports import ReplicaConfig
from raftmq.replication.replica import Replica
from raftmq.runtime.clock import RealClock
from raftmq.runtime.disk import RealDisk
from raftmq.runtime.loop import TrioTasks
from raftmq.types import (
    METADATA_GROUP,
    NodeId,
    RaftGroupId,
    RaftIndex,
    ReplicaId,
    StorageId,
    Term,
    TopicId,
    TopicPartition,
)
from tests.partition import fake_replica
from tests.replication.inline import InlineCatchUp

PARTITIONS = 40
ONE, TWO, THREE, FOUR = (ReplicaId(NodeId(n), StorageId(n)) for n in (1, 2, 3, 4))


def flush(job: FlushJob, done: Any) -> None:
    job.run()
    done(None)


class Bench:
    """The partitions of a node whose peers are silent."""

    def __init__(self, folder: Path, disk: Any = None) -> None:
        disk = disk or RealDisk()
        small = JournalConfig(size_max=64 << 10, reserve_bytes=16 << 10)
        self.journal = HardStateJournal.open(disk, str(folder / "state.journal"), config=small)
        self.multiraft = MultiRaft(
            ONE.node_id,
            self.journal,
            send=lambda _node, _frame, _stream: True,
            send_stored=lambda _node, _head, _chunk: True,
            request_flush=flush,
            on_journal_failed=lambda error: pytest.fail(str(error)),
            on_broken_invariant=pytest.fail,
        )
        clock = RealClock()
        self.plane: Any = SimpleNamespace(
            self_id=ONE,
            node_id=ONE.node_id,
            folder=SimpleNamespace(path=str(folder)),
            disk=disk,
            journal=self.journal,
            multiraft=self.multiraft,
            clock=clock,
            random=Random(1),
            shared=Shared.make(disk),
            catch_up=InlineCatchUp(CatchUpRate(clock, 0)),
            batch_openers=None,
            links=SimpleNamespace(is_connected=lambda _node_id: True),
            config=NodeConfig(node_id=1, data=folder),
            tasks=TrioTasks(),
            buggify=never,
            replica_config=lambda priority: ReplicaConfig(priority=priority),
            fail=pytest.fail,
        )
        engine = SimpleNamespace(
            image=EMPTY_IMAGE,
            on_image=lambda _callback: None,
            read_barrier=lambda timeout_ms: Promise.resolved(None),
        )
        self.control: Any = SimpleNamespace(
            engine=engine,
            lifecycle=SimpleNamespace(is_isolated=False),
            ask_contact=lambda: None,
            partition_led=lambda *_, **__: None,
            leaders=SimpleNamespace(forget=lambda _topic_id: None, get=lambda *_: None),
            replica_removed=lambda group: self.removed.append(group),  # noqa: PLW0108 - made below
        )
        self.removed: list[RaftGroupId] = []
        self.transactions: Any = SimpleNamespace(
            is_offered=False, led=lambda *_: None, removed=lambda *_: None
        )
        self.partitions = Partitions(
            self.plane,
            self.control,
            Deadlines(clock),
            on_role=lambda *_: None,
            transactions=self.transactions,
            agreed=AgreedTime(NodeId(1), clock, lambda: (), lambda: 1),
        )

    def start(self, number: int, topic: int = 1) -> StartReplica:
        """The order to run a replica, which the image has as well."""
        topic_id = TopicId(UUID(int=topic))
        nodes = tuple(member.node_id for member in (ONE, TWO, THREE))
        rows = tuple(
            PartitionImage(index, 1, nodes, (ONE, TWO, THREE), nodes)
            for index in range(max(number + 1, PARTITIONS))
        )
        image = self.control.engine.image
        self.control.engine.image = attrs.evolve(
            image,
            topics=image.topics.set(f"t{topic}", TopicImage(f"t{topic}", topic_id, rows, Map())),
            topic_names=image.topic_names.set(topic_id, f"t{topic}"),
        )
        return StartReplica(
            RaftGroupId(topic_id, number, 1),
            TopicPartition(f"t{topic}", number),
            (ONE, TWO, THREE),
            TWO.node_id,
            Map(),
        )

    def delete(self, action: StartReplica) -> None:
        """A topic is deleted: the image has the order to remove this replica."""
        before = self.control.engine.image
        group, topic = action.group, action.name.topic
        removal = RemovalImage(topic, group, (ONE.node_id,))
        self.control.engine.image = attrs.evolve(
            before,
            structure_version=before.structure_version + 1,
            topics=before.topics.delete(topic),
            topic_names=before.topic_names.delete(group.topic_id),
            removals=before.removals.set(before.removal_key(group), removal),
        )
        self.partitions._image_changed(before, self.control.engine.image)

    def move(self, replicas: tuple[ReplicaId, ...], voters: tuple[ReplicaId, ...]) -> None:
        """Partition 0 of the first topic should be on these nodes, and its leader reports those."""
        before = self.control.engine.image
        topic = before.topics["t1"]
        row = attrs.evolve(
            topic.partitions[0],
            replicas=tuple(member.node_id for member in replicas),
            voters=tuple(member.node_id for member in voters),
        )
        group, removals = topic.group_id(0), before.removals
        if ONE in (*replicas, *voters):
            removals = Map()
        elif ONE.node_id in topic.partitions[0].voters:
            removal = RemovalImage("t1", group, (ONE.node_id,))
            removals = removals.set(before.removal_key(group), removal)
        topic = attrs.evolve(topic, partitions=(row, *topic.partitions[1:]))
        self.control.engine.image = attrs.evolve(
            before,
            structure_version=before.structure_version + 1,
            topics=before.topics.set("t1", topic),
            removals=removals,
        )
        self.partitions._image_changed(before, self.control.engine.image)

    async def obey(self) -> None:
        """Do all that was ordered."""
        actions, self.partitions._ordered = self.partitions._ordered, []
        await self.partitions._perform_all(actions)

    def replica(self, action: StartReplica) -> Replica:
        return self.multiraft.replicas[action.group]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for replica in bench.multiraft.replicas.values():
        replica.log.close()
    bench.journal.close()


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.partitions.run)
        yield
        nursery.cancel_scope.cancel()


async def until(condition: Any) -> None:
    with trio.fail_after(30):
        while True:
            if condition():
                return
            await trio.sleep(0.01)


async def test_topic_folders_that_another_process_made_are_durable_first(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have died between making one and syncing the folder that names it."""
    action = bench.start(0)
    Path(bench.partitions._folder(action)).parent.mkdir(parents=True)
    synced: list[str] = []
    sync = bench.plane.disk.sync_directory

    def noted(path: str) -> None:
        sync(path)
        synced.append(path)

    monkeypatch.setattr(bench.plane.disk, "sync_directory", noted)
    await bench.partitions.start()
    await bench.partitions._perform_all([action])
    assert synced[0] == bench.partitions._root


async def test_replicas_open_side_by_side(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening is waiting for the disk; the loop and the other replicas do not wait with it."""
    monkeypatch.setattr(module, "LEADERLESS_MAX", 1_000)
    together = most = 0
    attempt = ReplicaOpener.attempt

    def counted(opener: ReplicaOpener) -> bool:
        nonlocal together, most
        together += 1
        most = max(most, together)
        done = attempt(opener)
        together -= 1
        return done

    monkeypatch.setattr(ReplicaOpener, "attempt", counted)
    actions: list[Action] = [bench.start(n, topic) for topic in (1, 2) for n in range(20)]
    await bench.partitions._perform_all(actions)
    assert set(bench.multiraft.replicas) == {a.group for a in actions if hasattr(a, "group")}
    assert 1 < most <= module.OPENERS


async def test_many_new_groups_wait_for_each_others_elections(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEADERLESS_MAX", 10)
    monkeypatch.setattr(module, "CALM_WAIT_S", 0.1)
    actions = [bench.start(n) for n in range(40)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.partitions._perform_all, actions)
        await until(lambda: len(bench.multiraft.replicas) >= 10)
        # Nobody answers, so the elections come to no end, and waiting ends all the same.
        await until(lambda: len(bench.multiraft.replicas) == 40)


async def test_a_replica_that_lacked_space_begins_again_when_there_is_some(bench: Bench) -> None:
    first, second = bench.start(0), bench.start(1)
    await bench.partitions._perform_all([first, second])
    stopped, other = bench.replica(first), bench.replica(second)
    stopped.fail("disk full: no room for an election")
    assert stopped.lacks_space
    async with running(bench):
        bench.partitions.space_is_back()
        await until(lambda: bench.multiraft.replicas.get(first.group) not in (None, stopped))
    assert bench.replica(first).failure is None
    assert bench.replica(second) is other
    assert bench.partitions.registry.by_id(first.group.topic_id, 0) is not None


async def test_what_failed_otherwise_stays_as_it_is(bench: Bench) -> None:
    action = bench.start(0)
    await bench.partitions._perform_all([action])
    bench.replica(action).fail("flush failed: an fsync is never retried")
    assert not bench.replica(action).lacks_space
    bench.partitions.space_is_back()
    assert not bench.partitions._ordered


async def test_a_replica_that_found_no_space_to_begin_is_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_opener: ReplicaOpener) -> bool:
        raise DiskFullError("no space left")

    action = bench.start(0)
    with monkeypatch.context() as patch:
        patch.setattr(ReplicaOpener, "attempt", full)
        await bench.partitions._perform_all([action])
    assert bench.multiraft.replicas == {}
    assert bench.partitions.lacks_space
    async with running(bench):
        bench.partitions.space_is_back()
        await until(lambda: action.group in bench.multiraft.replicas)
    assert not bench.partitions.lacks_space


async def test_what_was_deleted_does_not_begin_when_that_made_space(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_opener: ReplicaOpener) -> bool:
        raise DiskFullError("no space left")

    action = bench.start(0)
    with monkeypatch.context() as patch:
        patch.setattr(ReplicaOpener, "attempt", full)
        await bench.partitions._perform_all([action])
    bench.delete(action)
    bench.partitions.space_is_back()
    other = bench.start(0, topic=2)
    bench.partitions._order(other)
    async with running(bench):
        await until(lambda: other.group in bench.multiraft.replicas)
    assert action.group not in bench.multiraft.replicas
    assert bench.partitions.registry.by_name("t1", 0) is None
    assert bench.removed == [action.group]


async def test_a_deleted_partition_takes_nothing_while_it_waits_for_its_turn(bench: Bench) -> None:
    """Brokers say that they applied a deletion before the folders are gone."""
    action = bench.start(0)
    await bench.partitions._perform_all([action])
    partition = bench.partitions.registry.by_id(action.group.topic_id, 0)
    assert partition is not None
    records = memoryview(bytearray(build_batch([NewRecord(None, b"v")], timestamp=1)))
    bench.delete(action)
    answer = partition.append(records, -1, 1_000)
    assert isinstance(answer, AppendResult)
    assert answer.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


async def test_a_deleted_partition_leaves_no_ring_of_objects(bench: Bench) -> None:
    """A full collection is rare, and never looks at what an earlier one froze."""
    action = bench.start(0)
    await bench.partitions._perform_all([action])
    replica = bench.replica(action)
    replica.stand()  # timers, votes, messages: as a replica has them that was at work
    left = [weakref.ref(part) for part in (replica, replica.log, replica.core, replica.machine)]
    del replica
    gc.collect()
    gc.disable()
    try:
        async with running(bench):
            bench.delete(action)
            await until(lambda: bench.removed)
            await until(lambda: all(ref() is None for ref in left))
    finally:
        gc.enable()


async def test_what_could_not_be_deleted_is_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    action = bench.start(0)
    await bench.partitions._perform_all([action])
    folder = bench.partitions._folder(action)
    with monkeypatch.context() as patch:

        def fails(_self: Partitions, _order: object) -> None:
            raise DiskError("Input/output error")

        patch.setattr(Partitions, "_remove_folders", fails)
        bench.delete(action)
        async with running(bench):
            await until(lambda: action.group not in bench.multiraft.replicas)
            await until(lambda: bench.partitions._unstopped)
    assert bench.plane.disk.exists(folder)
    assert not bench.removed
    async with running(bench):
        bench.partitions.stop_again()
        await until(lambda: bench.removed)
    assert not bench.plane.disk.exists(folder)
    bench.partitions.stop_again()
    assert not bench.partitions._ordered


def test_retention_stops_at_the_last_stable_offset() -> None:
    """What is open keeps its records, however old they are: its end may commit them."""
    bench = fake_replica.Bench()
    registry = PartitionRegistry()
    registry.add(bench.partition)
    asked: list[int] = []
    leading = SimpleNamespace(
        group=fake_replica.GROUP, failure=None, is_writable=True, retain=asked.append
    )
    elsewhere = SimpleNamespace(**{**vars(leading), "is_writable": False})
    holder: Any = SimpleNamespace(registry=registry)
    for sequence in range(3):
        batch = build_batch(
            [NewRecord(None, b"v")],
            producer_id=7 if sequence else -1,
            producer_epoch=0 if sequence else -1,
            base_sequence=sequence - 1,
            transactional=bool(sequence),
        )
        bench.replica.append(batch, parse_header(batch))
    bench.replica.commit(3)
    replicas: Any = [elsewhere, leading]
    Partitions.retain(holder, replicas)
    assert asked == [1]


async def test_a_replica_that_comes_back_is_somebody_new(bench: Bench) -> None:
    """It has forgotten its log, and may have forgotten what it promised: it must not vote with
    that under the name by which others know it."""
    action = bench.start(0)
    await bench.partitions._perform_all([action])
    first = bench.replica(action).self_id
    assert first == ONE
    bench.move((TWO, THREE, FOUR), (TWO, THREE, FOUR))
    await bench.obey()
    assert bench.removed
    seen = [first]
    for _ in range(2):
        bench.move((ONE, TWO, THREE), (TWO, THREE, FOUR))
        await bench.obey()
        replica = bench.replica(action)
        assert replica.self_id.node_id == ONE.node_id
        assert replica.self_id not in seen
        assert not replica.core.is_voter
        seen.append(replica.self_id)
        bench.move((ONE, TWO, THREE), (ONE, TWO, THREE))  # it votes, under its new name
        bench.move((TWO, THREE, FOUR), (TWO, THREE, FOUR))
        await bench.obey()


async def test_a_crash_amid_a_removal_leaves_no_old_name(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    action = bench.start(0)
    await bench.partitions._perform_all([action])
    kept: list[HardStateJournal] = []

    def ends(partitions: Partitions, order: object) -> None:
        assert bench.journal.flushed_sequence == bench.journal._sequence
        path = bench.journal._path  # as the disk has it at this moment
        copy = f"{path}.copy"
        Path(copy).write_bytes(Path(path).read_bytes())
        kept.append(HardStateJournal.open(bench.plane.disk, copy))

    monkeypatch.setattr(Partitions, "_remove_folders", ends)
    bench.move((TWO, THREE, FOUR), (TWO, THREE, FOUR))
    await bench.obey()
    state = kept[0].get(action.group)
    assert state is not None
    assert state.bootstrapped not in (None, ONE.storage_id)


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_former_life_is_forgotten_with_its_topic(bench: Bench, restarts: bool) -> None:
    action = bench.start(0)
    await bench.partitions._perform_all([action])
    counts = bench.partitions.topic_counts["t1"]
    bench.move((TWO, THREE, FOUR), (TWO, THREE, FOUR))
    await bench.obey()
    assert bench.partitions.topic_counts["t1"] is counts, "it may come back, and counts on"
    assert bench.journal.get(action.group) is not None
    before = bench.control.engine.image
    gone = attrs.evolve(
        before,
        structure_version=before.structure_version + 1,
        topics=before.topics.delete("t1"),
        topic_names=before.topic_names.delete(action.group.topic_id),
        removals=Map(),
    )
    bench.journal.put(METADATA_GROUP, GroupState(bootstrapped=StorageId(5)))
    if restarts:
        bench.control.engine.image = gone
        bench.partitions._left.clear()
        await bench.partitions.start()
    else:
        bench.partitions._image_changed(before, gone)
        assert "t1" not in bench.partitions.topic_counts
    assert bench.journal.get(action.group) is None
    assert bench.journal.get(METADATA_GROUP) is not None


async def test_with_the_journal_lost_any_group_may_have_been_left(bench: Bench) -> None:
    action, other = bench.start(0), bench.start(1)
    bench.move((TWO, THREE, FOUR), (TWO, THREE, FOUR))
    bench.control.engine.image = attrs.evolve(bench.control.engine.image, removals=Map())
    bench.partitions._ordered.clear()
    bench.journal.damaged = True
    await bench.partitions.start()
    assert not bench.journal.damaged
    assert bench.replica(other).self_id != ONE
    bench.move((ONE, TWO, THREE), (TWO, THREE, FOUR))
    [start] = (a for a in bench.partitions._ordered if isinstance(a, StartReplica))
    await bench.partitions._perform_all([attrs.evolve(start, is_return=False)])
    assert bench.replica(action).self_id != ONE


async def test_one_of_the_first_voters_that_is_none_now_begins_as_somebody_new(
    bench: Bench,
) -> None:
    """Also where the journal knows nothing: an earlier version forgot."""
    action = bench.start(0)
    bench.move((ONE, TWO, FOUR), (TWO, THREE, FOUR))
    await bench.partitions._perform_all([attrs.evolve(action, is_return=True)])
    assert bench.replica(action).self_id != ONE
    assert not bench.replica(action).core.is_voter


async def test_an_order_that_was_withdrawn_deletes_nothing(bench: Bench) -> None:
    """It may vote again by then, with the data that it has."""
    action = bench.start(0)
    await bench.partitions._perform_all([action])
    bench.move((TWO, THREE, FOUR), (TWO, THREE, FOUR))
    bench.move((ONE, TWO, THREE), (TWO, THREE, FOUR))
    await bench.obey()
    assert not bench.removed
    assert bench.replica(action).self_id == ONE
    assert bench.replica(action).failure is None
    assert bench.partitions.registry.by_id(action.group.topic_id, 0) is not None


@pytest.mark.parametrize("why", ["withdrawn", "unreachable", "answered"])
async def test_an_order_is_obeyed_only_when_it_certainly_stands(bench: Bench, why: str) -> None:
    """The image of this node may be old: its group may have taken the replica in since, and count
    on what it answers."""
    action = bench.start(0)
    await bench.partitions._perform_all([action])
    replica = bench.replica(action)
    bench.move((TWO, THREE, FOUR), (TWO, THREE, FOUR))
    engine = bench.control.engine
    read_barrier = engine.read_barrier

    def asked(timeout_ms: float) -> Promise[None]:
        if why == "unreachable":
            return Promise.failed(KafkaError("no answer", code=ErrorCode.REQUEST_TIMED_OUT))
        if why == "withdrawn":
            bench.move((ONE, TWO, THREE), (TWO, THREE, FOUR))
        else:
            replica.step(Heartbeat(Term(1), TWO, ONE, RaftIndex(0), 1))
            replica.core.become_follower(Term(1), None)  # that leader falls silent
        return Promise.resolved(None)

    engine.read_barrier = asked
    await bench.obey()
    await bench.obey()
    assert not bench.removed
    assert bench.replica(action) is replica
    assert (replica.self_id, replica.failure) == (ONE, None)
    engine.read_barrier = read_barrier
    bench.partitions.stop_again()
    await bench.obey()
    if why == "unreachable":
        assert not bench.removed, "it asks no more for a while"
        bench.partitions._ask_orders_at_ms = 0.0
        bench.partitions.stop_again()
        await bench.obey()
    assert bench.removed == ([] if why == "withdrawn" else [action.group])


async def led_alone(bench: Bench) -> tuple[StartReplica, Replica]:
    """A partition of one voter, this node, which leads it and has reported so."""
    action = attrs.evolve(bench.start(0), voters=(ONE,), preferred_leader=ONE.node_id)
    await bench.partitions._perform_all([action])
    replica = bench.replica(action)
    replica.stand()
    for _ in range(3):
        bench.multiraft.drain()
    return action, replica


async def test_voters_are_reported_once_they_are_committed(bench: Bench) -> None:
    """The data of whoever is missing in a report is ordered away."""
    reports: list[Any] = []
    bench.control.partition_led = lambda *_, **told: reports.append(told["voters"])
    _, replica = await led_alone(bench)
    assert reports == [(ONE,)]
    for change in (
        replica.configuration.with_learner(TWO),
        replica.configuration.with_voter(TWO),
    ):
        replica.change_membership(change)
        for _ in range(3):
            bench.multiraft.drain()
    assert replica.voters == (ONE, TWO)  # in force, and nobody else has it
    bench.partitions._led(bench.partitions.registry.by_name("t1", 0))
    assert reports[-1] == (ONE,)


async def test_a_new_leader_reports_what_the_last_one_did_until_it_knows_more(bench: Bench) -> None:
    """Followers of a new leader were in sync a moment ago, and it has not heard them yet."""
    reports: list[list[ReplicaId]] = []
    bench.control.partition_led = lambda *_, **told: reports.append(told["isr"])
    _, replica = await led_alone(bench)
    assert reports == [[ONE]]
    replica.change_membership(replica.configuration.with_voter(TWO))  # which never answers
    bench.multiraft.drain()
    partition = bench.partitions.registry.by_name("t1", 0)

    def isr_told(epoch: int, **changes: Any) -> list[ReplicaId]:
        two = BrokerImage(TWO.node_id, TWO.storage_id, 1, 1, None, (), (), False)
        brokers = Map({TWO.node_id: attrs.evolve(two, **changes)})
        bench.control.engine.image = attrs.evolve(bench.control.engine.image, brokers=brokers)
        row = SimpleNamespace(leader_epoch=epoch, isr=(1, 2, 3), creation_epoch=1)
        bench.control.leaders.get = lambda *_: row
        bench.partitions._led(partition)
        return reports[-1]

    own = replica.leader_epoch
    assert isr_told(own) == [ONE], "its own report says nothing new"
    assert isr_told(0) == [ONE, TWO]
    assert replica.in_sync_replicas() == (ONE,), "nothing counts on it"
    assert isr_told(own) == [ONE, TWO]
    assert isr_told(own, is_fenced=True) == [ONE]
    assert isr_told(own) == [ONE], "once it is back it answers itself"
    assert isr_told(0, storage_id=StorageId(9)) == [ONE], "the one that votes is lost"
    bench.plane.links.is_connected = lambda _node_id: False
    assert isr_told(0) == [ONE]


async def test_a_replica_that_a_leader_counts_on_does_not_go(bench: Bench) -> None:
    """Its group may have taken it in again before the order to go came to its node."""
    action, replica = await led_alone(bench)
    assert replica.is_writable
    bench.move((TWO, THREE, FOUR), (TWO, THREE, FOUR))
    await bench.obey()
    assert bench.replica(action) is replica
    assert replica.is_writable
    records = memoryview(bytearray(build_batch([NewRecord(None, b"v")], timestamp=1)))
    partition = bench.partitions.registry.by_name("t1", 0)
    assert partition is not None
    answer = partition.append(records, -1, 1_000)
    assert isinstance(answer, AppendResult)
    assert answer.code is ErrorCode.NONE  # it serves on meanwhile
    replica.core.become_follower(replica.core.term, None)
    bench.partitions.stop_again()
    await bench.obey()
    assert bench.removed
    assert action.group not in bench.multiraft.replicas
