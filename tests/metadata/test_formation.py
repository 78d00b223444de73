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

    def __init__(
        self,
        voters: dict[int, list[int]],
        seed: int = 0,
        loss: float = 0.0,
        *,
        wait_ms: float = 0.0,
        latency_ms: float = 20.0,
    ) -> None:
        self.random = Random(seed)
        self.wait_ms = wait_ms
        self.latency_ms = latency_ms
        self.loss = loss
        self.now_ms = 0.0
        self.lists = voters
        self.storages = {node_id: StorageId(100 + node_id) for node_id in voters}
        self.saved: dict[int, FormationState] = {}
        self.nodes: dict[int, Formation] = {}
        self.queue: list[tuple[float, int, int, bytes]] = []

    def start(self, node_id: int, *, is_met: bool = True) -> None:
        """Begin a process; it and the others meet at once, or only those that `meet` names."""
        me = NodeId(node_id)

        def save(state: FormationState) -> None:
            self.saved[node_id] = state

        def send(to: NodeId, payload: bytes) -> None:
            if self.random.random() >= self.loss:
                due = self.now_ms + self.random.random() * self.latency_ms
                self.queue.append((due, node_id, to, payload))

        self.nodes[node_id] = Formation(
            me,
            self.storages[node_id],
            [NodeId(n) for n in self.lists[node_id]],
            state=self.saved.get(node_id, FormationState()),
            save=save,
            send=send,
            random=self.random,
            wait_ms=self.wait_ms,
        )
        for other_id in [n for n in self.nodes if n != node_id and is_met]:
            self.meet(node_id, other_id)

    def meet(self, one: int, other: int) -> None:
        """Two nodes introduce themselves to each other."""
        self.nodes[one].heard(NodeId(other), self.storages[other])
        self.nodes[other].heard(NodeId(one), self.storages[one])

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


class Replaced(Net):
    """A cluster that its first voters left; they are all there again, with empty disks."""

    def __init__(self, **options: float) -> None:
        super().__init__({n: [1, 2, 3] for n in range(1, 6)}, wait_ms=WAIT_MS, **options)  # type: ignore[arg-type]  # no seed
        for node_id in range(1, 6):
            self.start(node_id)
        self.run(5_000)
        (self.decision,) = self.decisions()
        for node_id in (1, 2, 3):
            del self.nodes[node_id], self.saved[node_id]
            self.storages[node_id] = StorageId(200 + node_id)
        for node_id in (1, 2, 3):
            self.start(node_id, is_met=False)
        for one, other in ((1, 2), (1, 3), (2, 3)):
            self.meet(one, other)


WAIT_MS = 4_000.0


@pytest.mark.parametrize("after_ms", [0, 500, 3_500])
@pytest.mark.parametrize("meets", [1, 2, 3])
def test_first_voters_that_are_all_empty_wait_for_word_of_their_cluster(
    after_ms: int, meets: int
) -> None:
    """They hear each other first; nodes that took their places dial them after a while."""
    net = Replaced()
    net.run(after_ms)
    net.meet(4, meets)
    net.run(5_000)
    assert net.decisions() == {net.decision}
    assert all(net.nodes[n].chosen == net.decision for n in (1, 2, 3))


@pytest.mark.parametrize("after_ms", [0, 3_900])
def test_a_node_that_was_just_heard_has_time_to_answer(after_ms: int) -> None:
    net = Replaced(latency_ms=400.0)
    net.run(after_ms)
    for node_id in (1, 2, 3):
        net.meet(5, node_id)
    net.run(5_000)
    assert net.decisions() == {net.decision}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("after_ms", [4_025, 4_225, 4_425])
def test_a_round_that_is_under_way_stops_where_another_node_is_heard(
    seed: int, after_ms: int
) -> None:
    net = Replaced(latency_ms=400.0, seed=seed)
    net.run(after_ms)
    assert net.decisions() == {net.decision}
    for node_id in (1, 2, 3):
        net.meet(5, node_id)
    net.run(5_000)
    assert net.decisions() == {net.decision}
    assert all(net.nodes[n].chosen == net.decision for n in (1, 2, 3))


def test_a_node_that_has_just_begun_promises_nothing() -> None:
    """Others may have listened for long, and could not be found by those that it will hear."""
    net = Net({n: [1, 2, 3] for n in (1, 2, 3)}, wait_ms=WAIT_MS)
    net.start(1)
    net.run(60_000)
    net.start(2)
    net.run(WAIT_MS - 10)
    assert 2 not in net.saved
    assert net.decisions() == set()
    net.run(3_000)
    assert len(net.decisions()) == 1


@pytest.mark.parametrize(("wait_ms", "within_ms"), [(0.0, 200), (WAIT_MS, 5_000)])
@pytest.mark.parametrize("ids", [[1], [1, 2, 3], [1, 2, 3, 4, 5]])
def test_a_new_cluster_forms_soon(ids: list[int], wait_ms: float, within_ms: int) -> None:
    net = Net(dict.fromkeys(ids, ids), wait_ms=wait_ms)
    for node_id in ids:
        net.start(node_id)
    net.run(within_ms)
    assert len(net.decisions()) == 1
    assert all(node.chosen is not None for node in net.nodes.values())


@pytest.mark.parametrize("every_ms", [500, 900])
@pytest.mark.parametrize("stranger", [3, 9])
def test_a_node_that_comes_with_ever_new_disks_holds_up_nobody(
    stranger: int, every_ms: int
) -> None:
    """It may be a third voter, or stand in no config; nobody has proved who it is."""
    net = Net({n: [1, 2, 3] for n in (1, 2)}, wait_ms=WAIT_MS)
    for node_id in (1, 2):
        net.start(node_id)
    for number in range(10_000 // every_ms):
        net.run(every_ms)
        for node in net.nodes.values():
            node.heard(NodeId(stranger), StorageId(500 + number))
    assert len(net.decisions()) == 1


def test_many_strangers_hold_up_a_new_cluster_for_a_while_only() -> None:
    net = Net({n: [1, 2, 3] for n in (1, 2, 3)}, wait_ms=WAIT_MS)
    for node_id in (1, 2, 3):
        net.start(node_id)
    for number in range(25):
        net.run(900)
        for node in net.nodes.values():
            node.heard(NodeId(100 + number), StorageId(500 + number))
    assert len(net.decisions()) == 1


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
