"""A broker cut off from the metadata majority gives its leaderships to who is not."""

from __future__ import annotations

from raftmq.controller.leaders import ASK_EVERY_MS, Isolation
from raftmq.errors import RequestTimedOutError
from raftmq.promise import Promise
from raftmq.types import NodeId, ReplicaId, StorageId

ONE, TWO, THREE = NodeId(1), NodeId(2), NodeId(3)


class FakeReplica:
    def __init__(self, *in_sync: NodeId) -> None:
        self.in_sync = tuple(ReplicaId(node_id, StorageId(9)) for node_id in in_sync)
        self.handed_to: list[NodeId] = []

    def in_sync_replicas(self) -> tuple[ReplicaId, ...]:
        return self.in_sync

    @property
    def is_handing_over(self) -> bool:
        return bool(self.handed_to)

    def transfer_leadership(self, node_id: NodeId) -> bool:
        self.handed_to.append(node_id)
        return True


class World:
    def __init__(self, *replicas: FakeReplica) -> None:
        self.replicas = list(replicas)
        self.is_isolated = True
        self.asked: dict[NodeId, Promise[bool]] = {}
        self.isolation = Isolation(
            ONE, is_isolated=lambda: self.is_isolated, ask=self.ask, led=lambda: self.replicas
        )

    def ask(self, node_id: NodeId) -> Promise[bool]:
        self.asked[node_id] = Promise()
        return self.asked[node_id]


def test_hands_over_to_an_in_sync_peer_that_sees_the_majority() -> None:
    both, two_only = FakeReplica(ONE, TWO, THREE), FakeReplica(ONE, TWO)
    world = World(both, two_only)
    world.isolation.tick(0.0)
    assert sorted(world.asked) == [TWO, THREE]
    world.asked[TWO].fail(RequestTimedOutError())
    world.asked[THREE].resolve(True)
    assert (both.handed_to, two_only.handed_to) == ([THREE], [])
    assert world.isolation.handed_over_count == 1


def test_hands_over_to_one_node_only() -> None:
    """Two that are told to stand at once take each other's votes."""
    replica = FakeReplica(ONE, TWO, THREE)
    world = World(replica)
    world.isolation.tick(0.0)
    world.asked[TWO].resolve(True)
    world.asked[THREE].resolve(True)
    assert replica.handed_to == [TWO]
    assert world.isolation.handed_over_count == 1


def test_keeps_what_nobody_better_could_take() -> None:
    replica = FakeReplica(ONE, TWO)
    world = World(replica)
    world.isolation.tick(0.0)
    world.asked[TWO].resolve(False)
    assert replica.handed_to == []


def test_asks_once_a_second_and_only_while_cut_off() -> None:
    world = World(FakeReplica(ONE, TWO))
    world.isolation.tick(0.0)
    first = world.asked.pop(TWO)
    world.isolation.tick(ASK_EVERY_MS / 2)
    assert not world.asked
    world.isolation.tick(ASK_EVERY_MS)
    assert TWO in world.asked
    world.is_isolated = False
    first.resolve(True)
    assert world.replicas[0].handed_to == [], "it sees the majority again"
    world.asked.clear()
    world.isolation.tick(3 * ASK_EVERY_MS)
    assert not world.asked
