"""A balance through the controller: what it tells, submits, refuses, and what comes of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from attrs import evolve

from raftmq.controller.balance import Brokers
from raftmq.controller.balancing import DRY_RUN_MS, changed_texts, group_steps
from raftmq.controller.placement import Candidate
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import (
    BalanceCall,
    ChangeNodesCall,
    CreatePartitionsCall,
    MoveRequest,
    MoveTold,
    NewPartitions,
    Outcome,
    PartitionSize,
    PlanMovesCall,
    SizesRequest,
    decode_reply,
    decode_sizes,
    encode,
)
from raftmq.metadata.commands import NodeState, Origin
from raftmq.types import NodeId
from tests.controller.metadata_cluster import CLIENT, MetadataCluster
from tests.controller.test_controller import _call
from tests.controller.test_mover import change, formed, partitions

MIB = 1 << 20


def balance(cluster: MetadataCluster, **options: Any) -> tuple[Outcome, list[MoveTold]]:
    verdict, *rows = _call(cluster, BalanceCall(**options))
    return verdict, [row.move for row in rows if row.move is not None]


def counts(cluster: MetadataCluster) -> list[int]:
    held = Counter(n for partition in partitions(cluster) for n in partition.replicas)
    return [held[NodeId(n)] for n in (1, 2, 3, 4)]


def with_sizes(cluster: MetadataCluster) -> MetadataCluster:
    """Each leader says that its partition `i` has `i` MiB."""
    topic = cluster.nodes[1].engine.image.topics["t"]
    for node_id in (1, 2, 3):
        cluster.nodes[node_id].sizes = tuple(
            PartitionSize(topic.topic_id, p.index, p.index * MIB)
            for p in topic.partitions
            if p.preferred_leader == node_id
        )
    return cluster


def test_what_a_dry_run_tells_is_what_happens() -> None:
    cluster = with_sizes(formed(8))
    verdict, told = balance(cluster, dry_run=True)
    assert (verdict.code, verdict.message) == (ErrorCode.NONE, "would move")
    assert counts(cluster) == [8, 8, 8, 0], "nothing has moved"
    copies = [move for move in told if move.copied_bytes]
    assert [move.partition for move in copies] == [1, 2, 3, 4, 5]
    assert [move.copied_bytes for move in copies] == [n * MIB for n in (1, 2, 3, 4, 5)]
    assert copies[0].why.startswith("replicas: node ")
    assert "node 4 has 0" in copies[0].why
    done, planned = balance(cluster)
    assert (done.code, done.message) == (ErrorCode.NONE, "planned")
    assert [(m.partition, m.after) for m in planned] == [(m.partition, m.after) for m in told]
    cluster.run(5_000)
    assert counts(cluster) == [6, 6, 6, 6]
    for move in told:
        partition = partitions(cluster)[move.partition]
        assert partition.replicas == move.after
        assert (partition.planned, partition.origin in (Origin.NONE, Origin.BALANCE)) == ((), True)
    again, nothing = balance(cluster)
    assert (again.message, nothing) == ("nothing to move", [])


def test_sizes_that_grow_meanwhile_change_no_plan_and_a_new_partition_does() -> None:
    cluster = with_sizes(formed(8))
    told = balance(cluster, dry_run=True)[1]
    for node_id in (1, 2, 3):
        node = cluster.nodes[node_id]
        node.sizes = tuple(
            PartitionSize(s.topic_id, s.partition, 100 * MIB - s.size_bytes) for s in node.sizes
        )
    again = balance(cluster, dry_run=True)[1]
    assert [(m.partition, m.after) for m in again] == [(m.partition, m.after) for m in told]
    assert {m.partition: m.copied_bytes for m in again if m.partition == 1} == {1: 99 * MIB}
    more = NewPartitions(name="t", count=9)
    assert _call(cluster, CreatePartitionsCall(topics=(more,)))[0].code is ErrorCode.NONE
    verdict, planned = balance(cluster)
    assert verdict.message == "planned (anew: since the dry run t-8 was made)"
    assert [m.partition for m in planned if m.partition == 1] == []


def test_a_controller_that_took_over_since_the_dry_run_says_so() -> None:
    cluster = with_sizes(formed(8))
    cluster.clock.now_ms += DRY_RUN_MS
    assert balance(cluster, dry_run=True)[0].message == "would move"
    cluster.elect(2)
    cluster.run(3_000)
    verdict, planned = balance(cluster)
    assert planned
    assert verdict.message == (
        "planned (the controller is another one since 3 s: a dry run before that may have told "
        "another plan)"
    )


def test_what_has_changed_since_a_dry_run_is_named() -> None:
    def shape(rows: list[tuple[str, int, tuple[int, ...], bool]], *targets: Candidate) -> Any:
        return [(t, p, tuple(map(NodeId, nodes)), stays) for t, p, nodes, stays in rows], Brokers(
            targets
        )

    one, two, three = (Candidate(NodeId(n), "a", room=9) for n in (1, 2, 3))
    rows = [("t", 0, (1, 2), False), ("t", 1, (1, 2), False), ("t", 2, (1, 2), True)]
    before = shape([*rows, ("t", 3, (1,), False)], one, two)
    later = [("t", 0, (1, 3), False), ("t", 1, (1, 2), True), ("t", 2, (1, 2), False)]
    after = shape([*later, ("u", 0, (1,), False)], evolve(one, room=8), three)
    assert changed_texts(before, after) == [
        "t-0 went from 1,2 to 1,3",
        "t-1 cannot be moved now",
        "t-2 can be moved again",
        "u-0 was made",
        "t-3 was deleted",
        "node 3 takes replicas",
        "node 2 takes no replicas any more",
    ]
    assert changed_texts(shape(rows, one), shape(rows, evolve(one, room=8))) == [
        "node 1 has other room"
    ]
    assert changed_texts(shape(rows, one), shape(rows, evolve(one, rack="b"))) == [
        "node 1 has another rack"
    ]
    assert changed_texts(before, before) == []


def test_each_step_of_a_group_has_its_quorum() -> None:
    cluster = formed()
    image = cluster.nodes[1].engine.image
    topic = image.topics["t"]
    steps = list(group_steps(image, topic, topic.partitions[0], (NodeId(4), NodeId(2), NodeId(3))))
    assert steps == [
        "t-0: now: voters 1,2,3, 3 of 3 live, quorum 2",
        "t-0: add 4 as a learner: voters 1,2,3, 3 of 3 live, quorum 2",
        "t-0: let 4 vote once it has caught up: voters 1,2,3,4, 4 of 4 live, quorum 3",
        "t-0: remove 1: voters 2,3,4, 3 of 3 live, quorum 2",
    ]
    told = balance(cluster, dry_run=True)[1]
    assert [len(move.steps) for move in told if set(move.after) - set(move.before)] == [4, 4]


def test_without_sizes_they_are_told_as_unknown() -> None:
    cluster = formed()
    cluster.cut = [3]
    promise = cluster.nodes[2].control.call(BalanceCall(dry_run=True), CLIENT)
    cluster.run(300)
    told = [row.move for row in promise.result()[1:]]
    assert [move.copied_bytes for move in told if move is not None] == [-1, -1]


def test_a_broker_that_does_not_answer_is_not_waited_for_long() -> None:
    cluster = with_sizes(formed())
    cluster.formats = {2: 7}
    asked = cluster.nodes[1].control.ask_sizes(NodeId(2))
    assert asked.result() == (), "it would end the stream of an older version"
    reply = cluster.nodes[3].control.receive(NodeId(1), encode(SizesRequest()))
    assert decode_sizes(decode_reply(reply.result()).payload) == cluster.nodes[3].sizes


def test_a_broker_that_takes_no_replicas_gets_none() -> None:
    cluster = formed()
    change(cluster, 4, NodeState.CORDONED)
    assert balance(cluster, dry_run=True)[0].message == "nothing to move"


def test_the_share_of_some_brokers_alone() -> None:
    cluster = formed()
    verdict, told = balance(cluster, onto=(3,))
    assert all(set(move.after) == set(move.before) for move in told)
    verdict, told = balance(cluster, onto=(4,))
    assert verdict.code is ErrorCode.NONE
    cluster.run(3_000)
    assert sorted(counts(cluster)) == [2, 2, 2, 3]


def test_a_broker_that_is_added_gets_its_share() -> None:
    cluster = with_sizes(formed())
    change(cluster, 4, NodeState.NEW)
    assert balance(cluster, dry_run=True)[0].message == "nothing to move"
    call = ChangeNodesCall(node_ids=(4,), change="add", dry_run=True)
    verdict, *steps = _call(cluster, call)
    assert verdict.message == "would begin"
    texts = [str(step.message) for step in steps]
    assert any(text.startswith("t-0: from 1,2,3 to ") for text in texts), texts
    assert "t-0: add 4 as a learner: voters 1,2,3, 3 of 3 live, quorum 2" in texts
    assert counts(cluster) == [3, 3, 3, 0]
    verdict, *steps = _call(cluster, ChangeNodesCall(node_ids=(4,), change="add"))
    assert verdict.message == "added"
    moves = [str(step.message) for step in steps if " to " in str(step.message)]
    assert moves == [text for text in texts if " to " in text and "vote" not in text]
    cluster.run(3_000)
    assert sorted(counts(cluster)) == [2, 2, 2, 3]
    verdict, *steps = _call(cluster, ChangeNodesCall(node_ids=(4,), change="add"))
    assert (verdict.message, steps) == ("done already", [])


def test_an_operators_moves_come_first_and_are_named() -> None:
    cluster = formed()
    cluster.auto_lead = False
    wanted = MoveRequest(topic="t", partition=1, replicas=(4, 2, 3))
    [accepted] = _call(cluster, PlanMovesCall(moves=(wanted,)))
    assert accepted.code is ErrorCode.NONE
    refused, _ = balance(cluster)
    assert refused.code is ErrorCode.REASSIGNMENT_IN_PROGRESS
    assert "1 moves of an operator are not done yet (t-1)" in str(refused.message)
    told, moves = balance(cluster, dry_run=True)
    assert told.code is ErrorCode.NONE
    assert "would move, but not now: 1 moves" in str(told.message)
    assert 1 not in [move.partition for move in moves]


def test_below_the_level_of_moves_it_is_refused() -> None:
    cluster = formed(level=3)
    verdict, _ = balance(cluster)
    assert verdict.code is ErrorCode.UNSUPPORTED_VERSION
    assert "--raise raftmq.level=4" in str(verdict.message)


def test_two_at_a_time_are_refused_and_a_new_controller_is_asked_again() -> None:
    cluster = formed()
    first = cluster.nodes[1].control.controller.call(BalanceCall())
    second = cluster.nodes[1].control.controller.call(BalanceCall())
    [verdict] = second.result()
    assert verdict.code is ErrorCode.REASSIGNMENT_IN_PROGRESS
    cluster.elect(2)
    cluster.run(50)
    with pytest.raises(KafkaError) as caught:
        first.result()
    assert caught.value.code is ErrorCode.NOT_CONTROLLER
