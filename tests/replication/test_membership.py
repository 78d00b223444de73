"""Steps towards a target membership: single, safe with whoever lives, and always arriving."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmq.raft.membership import Configuration, check_change
from raftmq.replication.membership import TargetMembership, keeps_quorum, next_configuration
from raftmq.types import NodeId, ReplicaId, StorageId

NODES = range(1, 8)
STORAGES = {NodeId(n): StorageId(n) for n in NODES}


def replica(node: int, storage: int | None = None) -> ReplicaId:
    return ReplicaId(NodeId(node), StorageId(storage or node))


def group(voters: str, learners: str = "") -> Configuration:
    return Configuration(
        tuple(replica(int(n)) for n in voters), tuple(replica(int(n)) for n in learners)
    )


def membership(
    voters: str, present: str = "1234567", leaving: str | None = None
) -> TargetMembership:
    return TargetMembership(
        tuple(NodeId(int(n)) for n in voters),
        {NodeId(int(n)): STORAGES[NodeId(int(n))] for n in present},
        None if leaving is None else tuple(NodeId(int(n)) for n in leaving),
    )


def live(nodes: str) -> list[ReplicaId]:
    return [replica(int(n)) for n in nodes]


@pytest.mark.parametrize(
    ("before", "target", "alive", "caught_up", "after"),
    [
        (group("123"), membership("423"), "23", "", group("123", "4")),
        (group("123"), membership("423", present="23"), "23", "", None),
        (group("123", "4"), membership("423"), "234", "", None),
        (group("123", "4"), membership("423"), "234", "4", group("1234")),
        (group("1234"), membership("423"), "234", "4", group("234")),
        (group("1234"), membership("423"), "24", "4", group("234")),
        (group("1234"), membership("423"), "41", "4", None),
        (group("123", "4"), membership("423"), "24", "4", None),
        (group("234"), membership("423"), "234", "234", None),
        (group("1"), membership("4"), "14", "4", group("1", "4")),
        (group("1", "4"), membership("4"), "14", "4", group("14")),
        (group("14"), membership("4"), "14", "4", group("4")),
        (group("123"), membership("12"), "123", "", group("12")),
        (group("12"), membership("123"), "12", "", group("12", "3")),
        (group("1234"), membership("45", leaving="12"), "1234", "4", group("1234", "5")),
        (group("123", "456"), membership("423", leaving="1"), "23456", "456", group("1234", "56")),
        (group("1234", "56"), membership("423", leaving="1"), "23456", "456", group("234", "56")),
        (group("234", "1"), membership("234", leaving="1"), "234", "", group("234")),
    ],
    ids=[
        "add",
        "not there yet",
        "wait",
        "promote",
        "remove",
        "remove, with one more down",
        "removing would lose the quorum",
        "promoting would lose the quorum",
        "done",
        "one: add",
        "one: promote",
        "one: remove",
        "fewer",
        "more",
        "never more than one above",
        "metadata: observers stay",
        "metadata: remove",
        "a learner that leaves",
    ],
)
def test_steps(
    before: Configuration,
    target: TargetMembership,
    alive: str,
    caught_up: str,
    after: Configuration | None,
) -> None:
    assert next_configuration(before, {}, live(alive), live(caught_up), target) == after


def test_the_silent_go_first_and_the_leader_last() -> None:
    before, target = group("123456"), membership("456")
    steps = []
    alive = live("13456")  # node 1 leads, node 2 is silent
    configuration: Configuration | None = before
    while configuration is not None:
        steps.append("".join(str(v.node_id) for v in configuration.voters))
        configuration = next_configuration(configuration, {}, alive, alive, target)
    assert steps == ["123456", "13456", "1456", "456"]


def test_a_node_heard_under_another_storage_is_added_under_that() -> None:
    step = next_configuration(
        group("123"), {NodeId(4): StorageId(99)}, live("123"), [], membership("423")
    )
    assert step is not None
    assert step.learners == (replica(4, 99),)


def test_a_wiped_successor_is_exchanged_before_it_votes() -> None:
    step = next_configuration(
        group("123", "4"), {NodeId(4): StorageId(99)}, live("23"), live("4"), membership("423")
    )
    assert step is not None
    assert replica(4, 99) in step.learners
    assert step.voters == group("123").voters
    after = next_configuration(
        step, {NodeId(4): StorageId(99)}, live("23"), live("4"), membership("423")
    )
    assert after is not None
    assert after.learners == (replica(4, 99),)


members = st.sets(st.sampled_from(NODES), min_size=1, max_size=5).map(
    lambda s: "".join(map(str, sorted(s)))
)


@given(members, members, st.sets(st.sampled_from(NODES)), st.data())
def test_every_step_is_single_and_safe_and_they_arrive(
    voters: str, wanted: str, dead: set[int], data: st.DataObject
) -> None:
    configuration = group(voters)
    alive = [replica(n) for n in NODES if n not in dead]
    if not keeps_quorum(configuration, alive):
        alive = [replica(n) for n in NODES]
    leader = next(v for v in configuration.voters if v in alive)
    target = membership(wanted, present="".join(str(r.node_id) for r in alive))
    for _ in range(40):
        # Whoever leads sees itself first; leaders change at any step.
        leaders = [v for v in configuration.voters if v in alive]
        leader = data.draw(st.sampled_from(leaders), label="leader")
        order = [leader, *(r for r in alive if r != leader)]
        step = next_configuration(configuration, {}, order, alive, target)
        if step is None:
            break
        check_change(configuration, step)
        assert len(set(step.members) ^ set(configuration.members)) <= 1
        assert keeps_quorum(step, alive)
        configuration = step
    else:
        pytest.fail("going round in circles")
    reachable = all(replica(int(n)) in alive for n in wanted)
    if reachable:
        assert target.is_reached(configuration)
