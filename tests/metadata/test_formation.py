"""A new cluster's first voters: any order of start, losses, restarts; never two decisions."""

from __future__ import annotations

from random import Random

import pytest

from raftmq.errors import RemoteProtocolError
from raftmq.metadata.formation import (
    UNBOUND_STORAGE,
    Formation,
    FormationState,
    formation_id_of,
)
from raftmq.types import NodeId, ReplicaId, StorageId


class Net:
    """Nodes that form a cluster over a lossy network in virtual milliseconds."""

    def __init__(self, voters: dict[int, list[int]], seed: int = 0, loss: float = 0.0) -> None:
        self.random = Random(seed)
        self.loss = loss
        self.now_ms = 0.0
        self.lists = voters
        self.saved: dict[int, FormationState] = {}
        self.nodes: dict[int, Formation] = {}
        self.queue: list[tuple[float, int, int, bytes]] = []

    def start(self, node_id: int) -> None:
        me = NodeId(node_id)

        def save(state: FormationState) -> None:
            self.saved[node_id] = state

        def send(to: NodeId, payload: bytes) -> None:
            if self.random.random() >= self.loss:
                due = self.now_ms + self.random.random() * 20
                self.queue.append((due, node_id, to, payload))

        self.nodes[node_id] = Formation(
            me,
            StorageId(100 + node_id),
            [NodeId(n) for n in self.lists[node_id]],
            state=self.saved.get(node_id, FormationState()),
            save=save,
            send=send,
            random=self.random,
        )
        for other_id, other in self.nodes.items():
            if other_id != node_id:
                other.heard(me, StorageId(100 + node_id))
                self.nodes[node_id].heard(NodeId(other_id), StorageId(100 + other_id))

    def run(self, duration_ms: float) -> None:
        end_ms = self.now_ms + duration_ms
        while self.now_ms < end_ms:
            self.now_ms += 10
            due = [m for m in self.queue if m[0] <= self.now_ms]
            self.queue = [m for m in self.queue if m[0] > self.now_ms]
            for _, sender, to, payload in due:
                if to in self.nodes:
                    self.nodes[to].receive(NodeId(sender), payload)
            for node in self.nodes.values():
                node.tick(self.now_ms)

    def decisions(self) -> set[tuple[ReplicaId, ...]]:
        return {node.chosen for node in self.nodes.values() if node.chosen is not None}


@pytest.mark.parametrize("size", [1, 3, 5])
def test_all_present_bind_every_storage(size: int) -> None:
    ids = list(range(1, size + 1))
    net = Net(dict.fromkeys(ids, ids))
    for node_id in ids:
        net.start(node_id)
    net.run(3_000)
    assert net.decisions() == {tuple(ReplicaId(NodeId(n), StorageId(100 + n)) for n in ids)}
    assert len({node.formation_id for node in net.nodes.values()}) == 1


def test_a_late_voter_stands_unbound_and_learns_the_decision() -> None:
    net = Net({n: [1, 2, 3] for n in (1, 2, 3)})
    net.start(3)
    net.run(60_000)
    assert net.decisions() == set(), "one of three forms nothing"
    net.start(2)
    net.run(3_000)
    (decision,) = net.decisions()
    assert decision[0] == ReplicaId(NodeId(1), UNBOUND_STORAGE)
    net.start(1)
    net.run(3_000)
    assert net.nodes[1].chosen == decision


def test_a_node_that_is_no_voter_asks() -> None:
    net = Net({1: [1, 2, 3], 2: [1, 2, 3], 3: [1, 2, 3], 7: [1, 2, 3]})
    for node_id in (7, 1, 2, 3):
        net.start(node_id)
    net.run(3_000)
    assert len(net.decisions()) == 1
    assert net.nodes[7].chosen == net.nodes[1].chosen


@pytest.mark.parametrize(("size", "left"), [(3, 0), (5, 1)])
def test_a_wiped_voter_learns_from_those_who_replaced_the_others(size: int, left: int) -> None:
    """Of those whom its config names nobody, or too few for a majority, are there."""
    ids = list(range(1, size + 1))
    everybody = [*ids, size + 1, size + 2]
    net = Net(dict.fromkeys(everybody, ids))
    for node_id in everybody:
        net.start(node_id)
    net.run(3_000)
    (decision,) = net.decisions()
    for node_id in ids[: size - left]:
        del net.nodes[node_id]
    del net.saved[1]
    net.start(1)
    net.run(3_000)
    assert net.nodes[1].chosen == decision


def test_other_voter_lists_are_named_and_never_counted() -> None:
    net = Net({1: [1, 2, 3], 2: [1, 2, 4]})
    net.start(1)
    net.start(2)
    net.run(5_000)
    assert net.decisions() == set()
    assert net.nodes[1].mismatches == {2: (1, 2, 4)}


@pytest.mark.parametrize("seed", range(60))
def test_never_two_decisions(seed: int) -> None:
    random = Random(seed)
    ids = list(range(1, random.choice([3, 5]) + 1))
    net = Net(dict.fromkeys(ids, ids), seed=seed, loss=0.3)
    order = ids[:]
    random.shuffle(order)
    for node_id in order:
        net.start(node_id)
        net.run(random.randrange(0, 1_500))
        if random.random() < 0.5:
            net.start(random.choice(order[: order.index(node_id) + 1]))  # a restart
    net.loss = 0.0
    net.run(20_000)
    assert len(net.decisions()) == 1
    assert all(node.chosen is not None for node in net.nodes.values())


def test_nonsense_is_the_senders_fault() -> None:
    net = Net({1: [1]})
    net.start(1)
    with pytest.raises(RemoteProtocolError):
        net.nodes[1].receive(NodeId(2), b"\xc1nonsense")


def test_formations_of_other_disks_have_other_names() -> None:
    assert formation_id_of(((1, 5), (2, 6))) != formation_id_of(((1, 5), (2, 7)))


def test_who_joins_a_recovered_cluster_learns_of_the_recovery() -> None:
    net = Net({1: [1, 2, 3], 4: [1, 2, 3], 2: [1, 2, 3]})
    chosen = ((1, 101), (2, 102), (3, 103))
    net.saved[1] = FormationState(chosen=chosen, recoveries=("1",))
    net.saved[2] = FormationState(chosen=chosen)
    for node_id in (1, 4, 2):
        net.start(node_id)
    net.run(3_000)
    survivor, joined, given_up = (net.nodes[n] for n in (1, 4, 2))
    assert joined.chosen == survivor.chosen
    assert joined.formation_id in (survivor.formation_id, given_up.formation_id)
    assert given_up.formation_id != survivor.formation_id, "they refuse each other by name"


def test_a_wiped_node_takes_the_recovered_formation() -> None:
    net = Net({1: [1, 2, 3], 2: [1, 2, 3]})
    chosen = ((1, 101), (2, 102), (3, 103))
    net.saved[1] = FormationState(chosen=chosen, recoveries=("1", "1"))
    for node_id in (1, 2):
        net.start(node_id)
    net.run(5_000)
    assert net.nodes[2].formation_id == net.nodes[1].formation_id
    assert net.saved[2].recoveries == ("1", "1")


def test_every_recovery_makes_another_formation() -> None:
    chosen = ((1, 101),)
    names = [formation_id_of(chosen, recoveries) for recoveries in ((), ("1",), ("1", "1"), ("4",))]
    assert len(set(names)) == len(names)
    assert names[0] == formation_id_of(chosen)
