"""What other nodes ask of one: lies are refused and told once, what is early or late is not."""

from __future__ import annotations

from typing import Any, Final

import pytest
from attrs import evolve
from msgspec.structs import replace
from structlog.testing import capture_logs

from raftmq.controller.leaders import LeaderRow, decode_rows, encode_rows
from raftmq.controller.peer_requests import EARLY_ROWS_MAX, WAITING_MAX
from raftmq.delays.deliveries import NOTE_PRODUCER_ID, producer_id_of
from raftmq.errors import ErrorCode
from raftmq.metadata.broker_messages import (
    DeliverRecords,
    LeaderUpdate,
    MoveLeadership,
    Reply,
    Request,
    SizesRequest,
    decode_reply,
    encode,
)
from raftmq.metadata.commands import CreateTopics, ReassignPartition
from raftmq.metadata.config_keys import DEAD_TO, DELIVERS_TO
from raftmq.promise import Promise
from raftmq.records import NewRecord, build_batch
from raftmq.types import LeaderEpoch, NodeId, RaftGroupId, TopicId
from tests.controller.metadata_cluster import MetadataCluster
from tests.metadata.metadata_commands import creation, node, topic_id

TOPIC: Final = topic_id(7)
MINE, OTHERS = 0, 1
"""Partitions: node 2, the one that asks, leads the first one, and holds nothing of the second."""
DELAYED, OWED, DEAD = topic_id(8), topic_id(9), topic_id(10)
"""A delay topic with partitions like those, its target, and where it sends what is dead."""


@pytest.fixture
def cluster() -> MetadataCluster:
    cluster = MetadataCluster.formed()
    replicas = (2, 3), (1, 3)
    delays = {DELIVERS_TO: "owed", DEAD_TO: "dead"}
    topics = (
        creation("t", 7, *replicas),
        replace(creation("later", 8, *replicas), configs=delays),
        creation("owed", 9, (1,)),
        creation("dead", 10, (1,)),
    )
    apply(cluster, CreateTopics(topics=topics))
    return cluster


def apply(cluster: MetadataCluster, command: Any) -> None:
    done = cluster.nodes[1].engine.propose(command)
    cluster.run(100)
    assert done.error is None


def row(
    leader: int, number: int, epoch: int = 5, topic_id: TopicId = TOPIC, life: int = -1
) -> LeaderRow:
    only = (NodeId(leader),)
    said = LeaderRow(topic_id, number, LeaderEpoch(epoch), 0, only[0], only, only)
    return evolve(said, creation_epoch=life)


def send(cluster: MetadataCluster, request: Request, sender: int = 2, to: int = 1) -> Reply:
    """What a node answers."""
    answer: Promise[bytes] = cluster.nodes[to].control.receive(NodeId(sender), encode(request))
    cluster.turn()
    return decode_reply(answer.result())


def tell(cluster: MetadataCluster, *rows: LeaderRow, sender: int = 2, to: int = 1) -> ErrorCode:
    return send(cluster, LeaderUpdate(encode_rows(rows)), sender, to).code


def leader(cluster: MetadataCluster, number: int, at: int = 1) -> tuple[int, int] | None:
    known = cluster.nodes[at].control.leaders.get(TOPIC, number)
    return None if known is None else (known.leader_id, known.leader_epoch)


def refused(cluster: MetadataCluster, at: int = 1) -> dict[str, int]:
    return cluster.nodes[at].control.peer_requests.refused


# ---- rows of leaders ----


def test_a_node_leads_what_it_holds_and_nothing_else(cluster: MetadataCluster) -> None:
    """Clients everywhere would be sent to it, and the controller would order replicas away."""
    tell(cluster, row(1, OTHERS), sender=1, to=3)
    with capture_logs() as told:
        for epoch in (6, 7):
            code = tell(cluster, row(2, MINE, epoch), row(2, OTHERS, epoch), to=3)
            assert code is ErrorCode.NONE
    assert leader(cluster, MINE, at=3) == (2, 7)
    assert leader(cluster, OTHERS, at=3) == (1, 5)
    assert refused(cluster, at=3) == {"LeaderUpdate": 2}
    assert cluster.refused == [(2, "LeaderUpdate", told[0]["why"])] * 2, "the audit file has all"
    assert told == [
        {
            "event": "request of another node refused",
            "log_level": "warning",
            "sender": 2,
            "request": "LeaderUpdate",
            "why": "node 2 may not say that it leads t-1: a node that holds the partition may",
        }
    ]
    tell(cluster, row(1, OTHERS, 6), sender=1, to=3)
    assert leader(cluster, OTHERS, at=3) == (1, 6), "it stands in nobody's way"


def test_what_a_leader_said_itself_is_not_overridden_by_what_is_passed_on(
    cluster: MetadataCluster,
) -> None:
    tell(cluster, row(3, OTHERS, 100), to=1)
    assert leader(cluster, OTHERS) == (3, 100), "better than none"
    tell(cluster, row(3, OTHERS, 4), sender=3)
    assert leader(cluster, OTHERS) == (3, 4), "its own word"
    tell(cluster, row(1, OTHERS, 102), to=1)
    assert leader(cluster, OTHERS) == (3, 4)
    assert refused(cluster) == {}, "whoever passes it on may believe it"


def test_a_leader_that_was_spoken_for_speaks_for_itself(cluster: MetadataCluster) -> None:
    """All are told, though another node spoke of a later epoch."""
    tell(cluster, row(3, OTHERS, 100))
    cluster.nodes[1].control.partition_led(
        TOPIC,
        OTHERS,
        leader_epoch=LeaderEpoch(4),
        isr=[cluster.nodes[1].self_id],
        voters=[cluster.nodes[1].self_id],
    )
    cluster.turn()
    assert [leader(cluster, OTHERS, at=n) for n in (1, 2, 3)] == [(1, 4)] * 3


def test_the_controller_reports_no_members_that_the_leader_did_not_name(
    cluster: MetadataCluster,
) -> None:
    """Whoever is no member is told to delete its data."""
    before = cluster.nodes[1].engine.image.topics["t"]
    life = before.partitions[OTHERS].creation_epoch
    tell(cluster, row(3, OTHERS, 9, life=life))
    cluster.run(500)
    assert cluster.nodes[1].engine.image.topics["t"] == before
    tell(cluster, row(3, OTHERS, 9, life=life), sender=3)
    cluster.run(500)
    voters = cluster.nodes[1].engine.image.topics["t"].partitions[OTHERS].voters
    assert voters == (node(3),)


def test_a_leader_whose_move_is_not_known_here_yet_is_heard_once_it_is(
    cluster: MetadataCluster,
) -> None:
    cluster.cut = [3]
    apply(cluster, ReassignPartition(topic_id=TOPIC, partition=OTHERS, replicas=(node(2),)))
    assert tell(cluster, row(2, OTHERS, 6), to=3) is ErrorCode.NONE
    cluster.run(1_000)
    assert leader(cluster, OTHERS, at=3) is None
    assert refused(cluster, at=3) == {}, "nobody tells what is committed"
    cluster.cut = []
    cluster.run(7_000)
    assert leader(cluster, OTHERS, at=3) == (2, 6)
    assert refused(cluster, at=3) == {}


def test_a_leader_of_a_topic_that_is_not_known_here_yet_is_heard_with_the_topic(
    cluster: MetadataCluster,
) -> None:
    new = topic_id(20)
    cluster.cut = [3]
    apply(cluster, CreateTopics(topics=(creation("new", 20, (2,)),)))
    tell(cluster, row(2, 0, topic_id=new), row(1, 0, topic_id=topic_id(99)), to=3)
    cluster.cut = []
    cluster.run(7_000)
    known = cluster.nodes[3].control.leaders
    assert known.get(new, 0) is not None
    assert known.get(topic_id(99), 0) is None, "there is no such topic"
    assert refused(cluster, at=3) == {}


def test_who_led_before_it_left_is_only_late(cluster: MetadataCluster) -> None:
    for leader_id, epoch in ((2, 7), (3, 8)):
        only = (node(leader_id),)
        apply(cluster, ReassignPartition(topic_id=TOPIC, partition=OTHERS, replicas=only))
        known = cluster.nodes[1].engine.image.topics["t"].partitions[OTHERS]
        said = row(leader_id, OTHERS, epoch, life=known.creation_epoch)
        said = evolve(said, members=only, seen_version=known.target_version)
        tell(cluster, said, sender=leader_id)
        cluster.run(1_000)
    life = known.creation_epoch
    cluster.kill(3)
    cluster.start(3)
    cluster.run(300)
    tell(cluster, row(2, OTHERS, 8, life=life), to=3)
    assert leader(cluster, OTHERS, at=3) is None
    assert refused(cluster, at=3) == {}
    tell(cluster, row(2, OTHERS, 9, life=life), to=3)
    assert leader(cluster, OTHERS, at=3) is None
    assert refused(cluster, at=3) == {"LeaderUpdate": 1}


def test_what_waits_has_a_bound_and_comes_again(cluster: MetadataCluster) -> None:
    cluster.cut = [3]
    rows = [row(2, 0, topic_id=topic_id(100 + n)) for n in range(EARLY_ROWS_MAX)]
    assert tell(cluster, *rows, to=3) is ErrorCode.NONE
    assert tell(cluster, *rows, to=3) is ErrorCode.NONE
    assert tell(cluster, row(2, MINE), to=3) is ErrorCode.NONE
    again = tell(cluster, row(2, 0, topic_id=topic_id(99)), to=3)
    assert again is ErrorCode.THROTTLING_QUOTA_EXCEEDED
    assert tell(cluster, row(1, 0, topic_id=topic_id(99)), sender=1, to=3) is ErrorCode.NONE
    cluster.nodes[3].control.peer_lost(NodeId(2))
    assert tell(cluster, row(2, 0, topic_id=topic_id(99)), to=3) is ErrorCode.NONE


def test_rows_that_found_no_room_are_sent_again(
    cluster: MetadataCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raftmq.controller.peer_requests.EARLY_ROWS_MAX", 0)
    cluster.kill(3)
    cluster.start(3)
    cluster.nodes[2].control.leaders.merge([row(2, MINE)])
    cluster.nodes[2].control.peer_connected(NodeId(3))
    cluster.run(700)
    assert leader(cluster, MINE, at=3) == (2, 5)


def test_whose_word_a_row_is_says_who_sent_it() -> None:
    passed_on = evolve(row(2, MINE), is_firsthand=False)
    data = encode_rows([passed_on])
    assert decode_rows(data, node(2)) == [row(2, MINE)]
    assert decode_rows(data, node(3)) == [passed_on]


# ---- leaderships, sizes ----


def test_a_node_moves_leaders_to_where_they_belong(cluster: MetadataCluster) -> None:
    moves = cluster.nodes[3].moves
    for number, preferred in ((MINE, 2), (OTHERS, 1)):
        request = MoveLeadership(TOPIC, number, NodeId(preferred))
        assert send(cluster, request, to=3).code is ErrorCode.NONE
    moves.clear()
    lie = send(cluster, MoveLeadership(TOPIC, OTHERS, NodeId(2)), to=3)
    assert lie.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    assert lie.message.startswith("node 2 may not send MoveLeadership: the controller, or any node")
    assert moves == []
    assert refused(cluster, at=3) == {"MoveLeadership": 1}
    request = MoveLeadership(TOPIC, OTHERS, NodeId(3))
    assert send(cluster, request, sender=1, to=3).code is ErrorCode.NONE, "the controller"
    assert moves == [(TOPIC, OTHERS, 3)]


def test_a_preference_that_is_not_known_here_yet_is_waited_for(cluster: MetadataCluster) -> None:
    cluster.cut = [3]
    apply(cluster, ReassignPartition(topic_id=TOPIC, partition=MINE, replicas=(node(3), node(2))))
    request = encode(MoveLeadership(TOPIC, MINE, NodeId(3)))
    answer = cluster.nodes[3].control.receive(NodeId(2), request)
    cluster.turn()
    assert not answer.is_done
    cluster.cut = []
    cluster.run(2_000)
    assert decode_reply(answer.result()).code is ErrorCode.NONE
    assert refused(cluster, at=3) == {}


def test_the_controller_alone_asks_for_sizes(cluster: MetadataCluster) -> None:
    assert send(cluster, SizesRequest(), sender=1, to=3).code is ErrorCode.NONE
    assert send(cluster, SizesRequest(), to=3).code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    assert refused(cluster, at=3) == {"SizesRequest": 1}


def test_what_cannot_be_judged_is_asked_again_and_bounded(cluster: MetadataCluster) -> None:
    cluster.cut = [3]
    control = cluster.nodes[3].control
    answers = [control.receive(NodeId(2), encode(SizesRequest())) for _ in range(WAITING_MAX)]
    full = decode_reply(control.receive(NodeId(2), encode(SizesRequest())).result())
    assert full.code is ErrorCode.THROTTLING_QUOTA_EXCEEDED
    cluster.run(6_000)
    codes = {decode_reply(answer.result()).code for answer in answers}
    assert codes == {ErrorCode.NOT_CONTROLLER}
    assert refused(cluster, at=3) == {}
    cluster.cut = []
    cluster.run(1_000)
    assert send(cluster, SizesRequest(), to=3).code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED


# ---- deliveries ----


def delivery(producer_id: int) -> bytes:
    record = NewRecord(b"k", b"v")
    return bytes(
        build_batch(
            [record], timestamp=1, producer_id=producer_id, producer_epoch=0, base_sequence=0
        )
    )


def source(cluster: MetadataCluster, number: int) -> int:
    found = cluster.nodes[1].engine.image.topics["later"].partitions[number]
    return producer_id_of(RaftGroupId(DELAYED, number, found.creation_epoch))


def delivered(cluster: MetadataCluster) -> list[tuple[object, ...]]:
    taken: list[tuple[object, ...]] = []

    def take(*delivery: object) -> Promise[ErrorCode]:
        taken.append(delivery)
        return Promise.resolved(ErrorCode.NONE)

    cluster.nodes[1].control.take_delivery = take
    return taken


@pytest.mark.parametrize("target", [OWED, DEAD])
def test_a_delivery_of_whoever_may_lead_its_source_is_taken(
    cluster: MetadataCluster, target: Any
) -> None:
    taken, batch = delivered(cluster), delivery(source(cluster, MINE))
    assert send(cluster, DeliverRecords(target, 0, batch)).code is ErrorCode.NONE
    assert send(cluster, DeliverRecords(target, 0, batch), sender=3).code is ErrorCode.NONE
    assert taken == [(target, 0, batch)] * 2


@pytest.mark.parametrize("lie", ["of another's", "of nothing", "elsewhere", "a note"])
def test_a_delivery_that_cannot_be_is_refused(cluster: MetadataCluster, lie: str) -> None:
    taken = delivered(cluster)
    batch, target = delivery(source(cluster, MINE)), OWED
    if lie == "of another's":
        batch = delivery(source(cluster, OTHERS))
    elif lie == "of nothing":
        batch = delivery(producer_id_of(RaftGroupId(topic_id(55), 0, 0)))
    elif lie == "elsewhere":
        target = TOPIC
    else:
        batch, target = delivery(NOTE_PRODUCER_ID), DELAYED
    reply = send(cluster, DeliverRecords(target, 0, batch))
    assert reply.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    assert "node 2 may not send DeliverRecords" in reply.message
    assert taken == []
    assert refused(cluster) == {"DeliverRecords": 1}


def test_a_delivery_of_a_topic_that_is_not_known_here_yet_comes_again(
    cluster: MetadataCluster,
) -> None:
    taken = delivered(cluster)
    cluster.cut = [1]
    cluster.elect(3)
    made = replace(creation("soon", 30, (2,)), configs={DELIVERS_TO: "owed"})
    created = cluster.nodes[3].engine.propose(CreateTopics(topics=(made,)))
    cluster.run(100)
    assert created.error is None
    known = cluster.nodes[3].engine.image.topics["soon"].partitions[0]
    batch = delivery(producer_id_of(RaftGroupId(made.topic_id, 0, known.creation_epoch)))
    request = encode(DeliverRecords(OWED, 0, batch))
    answer = cluster.nodes[1].control.receive(NodeId(2), request)
    cluster.cut = []
    cluster.run(3_000)
    assert decode_reply(answer.result()).code is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert taken == []
    assert send(cluster, DeliverRecords(OWED, 0, batch)).code is ErrorCode.NONE
    assert refused(cluster) == {}


@pytest.mark.parametrize("batch", [b"", b"x" * 60])
def test_what_is_no_batch_is_for_the_partition_to_refuse(
    cluster: MetadataCluster, batch: bytes
) -> None:
    taken = delivered(cluster)
    assert send(cluster, DeliverRecords(OWED, 0, batch)).code is ErrorCode.NONE
    assert len(taken) == 1
