"""Reconciling: starts follow the image, data goes only by an order that names it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from immutables import Map

from raftmq.controller.reconciler import (
    Action,
    Quarantine,
    StartReplica,
    StopReplica,
    UpdateConfigs,
    UpdateTarget,
    at_start,
    reconcile,
)
from raftmq.log.folders import FIRST_LIFE, ReplicaFolder, partition_folder
from raftmq.metadata.commands import (
    AlterConfigs,
    ConfigChange,
    ConfirmRemoved,
    CreatePartitions,
    CreateTopics,
    DeleteTopics,
    Envelope,
    PartitionAddition,
    ReassignPartition,
    ReportVoters,
    VotersReport,
)
from raftmq.metadata.image import (
    EMPTY_IMAGE,
    MetadataImage,
    NumberImage,
    PartitionImage,
    RemovalImage,
)
from raftmq.types import RaftGroupId, TopicPartition
from tests.metadata.metadata_commands import ENVELOPES, Machine, creation, node, raised, topic_id


def folder(topic: int, partition: int, life: int = FIRST_LIFE) -> ReplicaFolder:
    name = partition_folder(partition, life)
    return ReplicaFolder(topic_id(topic), partition, life, f"t-{topic_id(topic)}/{name}")


@pytest.fixture
def machine() -> Machine:
    machine = Machine()
    machine.register_all(1, 2, 3, 4)
    machine.apply(CreateTopics(topics=(creation("a", 1, (1, 2, 3), (2, 3, 4)),)))
    return machine


def _names(actions: list[Action], kind: type) -> list[TopicPartition]:
    return [a.name for a in actions if isinstance(a, kind)]  # type: ignore[union-attr]


def test_creation_starts_what_the_node_should_hold(machine: Machine) -> None:
    actions = reconcile(EMPTY_IMAGE, machine.image, node(1))
    assert _names(actions, StartReplica) == [TopicPartition("a", 0)]
    [start] = actions
    assert isinstance(start, StartReplica)
    assert [v.node_id for v in start.voters] == [1, 2, 3]
    assert start.preferred_leader == 1
    assert reconcile(EMPTY_IMAGE, machine.image, node(5)) == []


def test_nothing_changed_nothing_to_do(machine: Machine) -> None:
    assert reconcile(machine.image, machine.image, node(1)) == []


def test_added_partitions(machine: Machine) -> None:
    before = machine.image
    addition = PartitionAddition(
        topic_id=topic_id(1), first_partition=2, replicas=((node(1), node(4)),)
    )
    machine.apply(CreatePartitions(additions=(addition,)))
    actions = reconcile(before, machine.image, node(1))
    assert _names(actions, StartReplica) == [TopicPartition("a", 2)]


def test_deletion_stops_until_confirmed(machine: Machine) -> None:
    before = machine.image
    group = before.topics["a"].group_id(1)
    machine.apply(DeleteTopics(topic_ids=(topic_id(1),)))
    deleted = machine.image
    assert reconcile(before, deleted, node(4)) == [StopReplica(group, TopicPartition("a", 1))]
    # A node that was away finds the order when it returns, and not once it confirmed.
    folders = [folder(1, 1)]
    assert at_start(deleted, node(4), folders) == [StopReplica(group, TopicPartition("a", 1))]
    machine.apply(ConfirmRemoved(node_id=node(4), replicas=((topic_id(1), 1),)))
    assert reconcile(deleted, machine.image, node(4)) == []


def test_recreated_topics_are_other_groups(machine: Machine) -> None:
    before = machine.image
    machine.apply(DeleteTopics(topic_ids=(topic_id(1),)))
    machine.apply(CreateTopics(topics=(creation("a", 2, (1, 2, 3)),)))
    stop, start = reconcile(before, machine.image, node(1))
    assert isinstance(stop, StopReplica)
    assert isinstance(start, StartReplica)
    assert stop.name == start.name == TopicPartition("a", 0)
    assert stop.group != start.group


def test_configs_reach_the_partitions(machine: Machine) -> None:
    before = machine.image
    change = ConfigChange(resource_type="topic", resource_name="a", set={"retention.ms": "1"})
    machine.apply(AlterConfigs(changes=(change,)))
    [action] = reconcile(before, machine.image, node(1))
    assert isinstance(action, UpdateConfigs)
    assert dict(action.configs) == {"retention.ms": "1"}
    before = machine.image
    change = ConfigChange(resource_type="broker", resource_name="", set={"log.retention.ms": "1"})
    machine.apply(AlterConfigs(changes=(change,)))
    assert _names(reconcile(before, machine.image, node(2)), UpdateConfigs) == [
        TopicPartition("a", 0),
        TopicPartition("a", 1),
    ]


def test_a_reassigned_replica_stays_until_its_group_let_it_go(machine: Machine) -> None:
    before = machine.image
    wish = ReassignPartition(
        topic_id=topic_id(1), partition=0, replicas=(node(2), node(3), node(4))
    )
    machine.apply(wish)
    wished = machine.image
    [start] = reconcile(before, wished, node(4))[:1]
    assert isinstance(start, StartReplica)
    assert _names(reconcile(before, wished, node(1)), StopReplica) == []
    assert _names(reconcile(before, wished, node(2)), UpdateTarget) == [TopicPartition("a", 0)]
    row = VotersReport(topic_id(1), 0, 3, (node(2), node(3), node(4)))
    machine.apply(ReportVoters(reports=(row,)))
    left = machine.image
    actions = reconcile(wished, left, node(1))
    assert _names(actions, StopReplica) == [TopicPartition("a", 0)]
    assert not start.is_return
    nodes = (node(1), node(2), node(3))
    machine.apply(ReassignPartition(topic_id=topic_id(1), partition=0, replicas=nodes))
    [again] = reconcile(left, machine.image, node(1))[:1]
    assert isinstance(again, StartReplica)
    assert again.is_return  # its group began with it, and goes on without it
    assert [a for a in at_start(machine.image, node(1), []) if a == again]


def test_what_a_node_is_dismissed_from_runs_until_it_is_ordered_away(machine: Machine) -> None:
    """Its leader may not have seen it, and have let it vote: without it there may be no majority.
    What it never began it does not begin now."""
    machine.register_all(5)
    machine.image = raised(machine.image)
    before = machine.image
    for last in (4, 5, 3):
        replicas = tuple(map(node, (1, 2, last)))
        machine.apply(ReassignPartition(topic_id=topic_id(1), partition=0, replicas=replicas))
    assert machine.image.topics["a"].partitions[0].dismissed == (4, 5)
    [told] = reconcile(before, machine.image, node(1))
    assert isinstance(told, UpdateTarget), "its leader says that it has seen it all"
    assert at_start(machine.image, node(5), []) == []
    [going_on] = at_start(machine.image, node(5), [folder(1, 0)])
    assert isinstance(going_on, StartReplica)
    assert machine.image.may_hold(node(5), going_on.group)
    assert not machine.image.holds(node(5), going_on.group)
    [stranger] = at_start(machine.image, node(5), [folder(1, 1)])
    assert isinstance(stranger, Quarantine)


def test_unknown_folders_are_put_aside_never_deleted(machine: Machine) -> None:
    strange = folder(9, 0)
    not_held = folder(1, 1)
    actions = at_start(machine.image, node(1), [strange, not_held, folder(1, 0)])
    assert actions[:2] == [Quarantine(not_held), Quarantine(strange)]
    assert _names(actions, StartReplica) == [TopicPartition("a", 0)]
    assert at_start(EMPTY_IMAGE, node(1), [strange]) == [Quarantine(strange)]


# ---- lives of a number ----

LATER = 100
"""The creation epoch of the next partition of a number."""


def ended(image: MetadataImage, name: str, number: int) -> MetadataImage:
    """The last partition of a topic is gone: all its nodes are ordered to delete it."""
    topic = image.topics[name]
    gone = topic.partitions[number]
    assert number == len(topic.partitions) - 1
    group = topic.group_id(number)
    nodes = tuple(sorted({*gone.replicas, *gone.voters, *gone.dismissed}))
    return evolve(
        image,
        structure_version=image.structure_version + 1,
        topics=image.topics.set(name, evolve(topic, partitions=topic.partitions[:-1])),
        removals=image.removals.set(image.removal_key(group), RemovalImage(name, group, nodes)),
    )


def begun_again(image: MetadataImage, name: str, **changes: Any) -> MetadataImage:
    """The topic has one more partition, whose number another one had before."""
    topic = image.topics[name]
    nodes = tuple(map(node, (1, 2, 3)))
    members = tuple(image.brokers[node_id].replica_id for node_id in nodes)
    fresh = PartitionImage(len(topic.partitions), LATER, nodes, members, nodes, after_epoch=7)
    partitions = (*topic.partitions, evolve(fresh, **changes))
    return evolve(
        image,
        structure_version=image.structure_version + 1,
        topics=image.topics.set(name, evolve(topic, partitions=partitions)),
    )


@pytest.fixture
def shrinking(machine: Machine) -> MetadataImage:
    """Orders name groups; both nodes 2 and 3 hold partition 1 of its first life."""
    return raised(machine.image)


def test_a_later_life_begins_with_what_is_known_of_producers(shrinking: MetadataImage) -> None:
    """Whoever begins it, and whenever; a first life begins with nothing."""
    again = begun_again(ended(shrinking, "a", 1), "a", begins_at=40)
    topic = again.topics["a"]
    numbers = Map({0: NumberImage(3, 1, b"of 0"), 1: NumberImage(50, 9, b"of 1")})
    image = evolve(again, topics=again.topics.set("a", evolve(topic, numbers=numbers)))
    for before in (EMPTY_IMAGE, shrinking):
        starts = [s for s in reconcile(before, image, node(2)) if isinstance(s, StartReplica)]
        last = starts[-1]
        assert (last.name.partition, last.begins_at, last.producers) == (1, 40, b"of 1")
        assert all(start.producers == b"" for start in starts[:-1])


@pytest.mark.parametrize("is_one_step", [True, False])
def test_a_later_life_is_another_partition(shrinking: MetadataImage, is_one_step: bool) -> None:
    """The old one goes, by its own order, and the new one begins, also in one step."""
    gone = ended(shrinking, "a", 1)
    again = begun_again(gone, "a")
    old = shrinking.topics["a"].group_id(1)
    if is_one_step:
        actions = reconcile(shrinking, again, node(2))
    else:
        actions = reconcile(shrinking, gone, node(2)) + reconcile(gone, again, node(2))
    stop, start = actions
    assert stop == StopReplica(old, TopicPartition("a", 1))
    assert isinstance(start, StartReplica)
    assert start.group == old._replace(creation_epoch=LATER)
    assert not start.is_first_life
    assert start.life == LATER


def test_an_order_of_an_earlier_life_comes_late(shrinking: MetadataImage) -> None:
    """A node that was away when the first life ended meets its order in the midst of the next."""
    again = begun_again(shrinking, "a")  # a partition 2 that nobody had before
    old = RaftGroupId(topic_id(1), 2, 5)
    order = RemovalImage("a", old, (node(2),))
    late = evolve(
        again,
        structure_version=again.structure_version + 1,
        removals=again.removals.set(again.removal_key(old), order),
    )
    assert reconcile(again, late, node(2)) == [StopReplica(old, TopicPartition("a", 2))]
    assert reconcile(again, late, node(3)) == []


def test_at_start_each_life_has_its_folder(shrinking: MetadataImage) -> None:
    again = begun_again(ended(shrinking, "a", 1), "a")
    both = [folder(1, 1), folder(1, 1, LATER)]
    old = shrinking.topics["a"].group_id(1)
    actions = at_start(again, node(2), [folder(1, 0), *both])
    assert not [a for a in actions if isinstance(a, Quarantine)]
    assert [a.group for a in actions if isinstance(a, StopReplica)] == [old]
    assert old._replace(creation_epoch=LATER) in [
        a.group for a in actions if isinstance(a, StartReplica)
    ]
    # Once it is confirmed, what is there of the first life is a stranger, and blocks nothing.
    confirmed = evolve(again, removals=again.removals.delete(again.removal_key(old)))
    actions = at_start(confirmed, node(2), [folder(1, 0), *both])
    assert [a for a in actions if isinstance(a, Quarantine)] == [Quarantine(folder(1, 1))]
    assert TopicPartition("a", 1) in _names(actions, StartReplica)


def test_a_folder_of_another_life_than_the_one_that_is_held_is_a_stranger(
    shrinking: MetadataImage,
) -> None:
    stray = [folder(1, 1, 50), folder(1, 1, LATER)]
    actions = at_start(shrinking, node(2), [folder(1, 0), folder(1, 1), *stray])
    assert [a for a in actions if isinstance(a, Quarantine)] == list(map(Quarantine, stray))
    again = begun_again(ended(shrinking, "a", 1), "a", replicas=(node(1),), voters=(node(1),))
    dismissed = begun_again(
        ended(shrinking, "a", 1),
        "a",
        replicas=(node(1),),
        voters=(node(1),),
        dismissed=(node(4),),
    )
    later = [folder(1, 1, LATER)]
    nobody = evolve(again, removals=Map())
    assert [a for a in at_start(nobody, node(4), later) if isinstance(a, Quarantine)]
    waits = evolve(dismissed, removals=Map())
    [going_on] = at_start(waits, node(4), later)
    assert isinstance(going_on, StartReplica)
    assert going_on.life == LATER
    assert at_start(waits, node(4), [folder(1, 1)]) == [Quarantine(folder(1, 1))]


class _Disk:
    """What one node would hold, had it done all it was told."""

    def __init__(self) -> None:
        self.held: dict[RaftGroupId, TopicPartition] = {}
        self.orders: list[RaftGroupId] = []

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StartReplica):
                self.held[action.group] = action.name
            elif isinstance(action, StopReplica):
                self.held.pop(action.group, None)
                self.orders.append(action.group)


@settings(max_examples=100, deadline=None)
@given(envelopes=st.lists(ENVELOPES, max_size=30), steps=st.lists(st.integers(1, 6), min_size=1))
def test_steps_of_any_size_end_alike(envelopes: list[Envelope], steps: list[int]) -> None:
    """Images may be skipped (a snapshot was installed): what is held in the end is the same."""
    machine = Machine()
    machine.register_all(1, 2, 3, 4, 5)
    images: list[MetadataImage] = [machine.image]
    for envelope in envelopes:
        machine.apply_envelope(envelope)
        images.append(machine.image)
    me = node(1)
    fine, coarse = _Disk(), _Disk()
    for before, after in pairwise(images):
        fine.perform(reconcile(before, after, me))
    at = 0
    turn = 0
    while at < len(images) - 1:
        target = min(len(images) - 1, at + steps[turn % len(steps)])
        coarse.perform(reconcile(images[at], images[target], me))
        at, turn = target, turn + 1
    wanted = {
        topic.group_id(p.index)
        for topic in images[-1].topics_by_id()
        for p in topic.partitions
        if me in p.replicas or me in p.voters
    }
    for disk in (fine, coarse):
        assert wanted <= set(disk.held)
        left = {g for g in disk.held if g not in wanted}
        ordered = {r.group for r in images[-1].removals.values() if me in r.nodes}
        assert not left & ordered
