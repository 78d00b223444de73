"""The control plane's own traffic: leader pushes, handing over, calls that get lost."""

from __future__ import annotations

import msgspec
import pytest

from raftmq.controller.broker_lifecycle import UNLED_MS, BrokerInfo, BrokerLifecycle
from raftmq.errors import ErrorCode, KafkaError, RemoteProtocolError
from raftmq.metadata.broker_messages import (
    FORMAT_MAX,
    AdmissionRequest,
    AlterConfigsCall,
    BrokerHeartbeat,
    CreateTopicsCall,
    DeleteTopicsCall,
    ForwardCommands,
    NewTopic,
    Reply,
    decode_reply,
    decode_request,
    encode,
    read_reply,
)
from raftmq.metadata.commands import (
    CreateTopics,
    Envelope,
    NoOperation,
    RegisterBroker,
    ReplaceNode,
    encode_envelope,
)
from raftmq.promise import Promise
from raftmq.types import LeaderEpoch, NodeId, ReplicaId, StorageId, TopicId
from tests.controller.metadata_cluster import CLIENT, MetadataCluster
from tests.metadata.metadata_commands import creation, topic_id

TOPIC = topic_id(7)


def _formed() -> MetadataCluster:
    """A cluster with a partition that all nodes hold."""
    cluster = MetadataCluster.formed()
    cluster.nodes[1].engine.propose(CreateTopics(topics=(creation("t", 7, (1, 2, 3)),)))
    cluster.run(100)
    return cluster


def _lead(cluster: MetadataCluster, node_id: int, epoch: int, topic_id: TopicId = TOPIC) -> None:
    cluster.nodes[node_id].control.partition_led(
        topic_id,
        0,
        leader_epoch=LeaderEpoch(epoch),
        isr=[cluster.nodes[node_id].self_id],
        voters=[cluster.nodes[n].self_id for n in cluster.voters],
    )


def _known(cluster: MetadataCluster, topic_id: TopicId = TOPIC) -> list[tuple[int, int] | None]:
    rows = [cluster.nodes[n].control.leaders.get(topic_id, 0) for n in cluster.voters]
    return [None if row is None else (row.leader_id, row.leader_epoch) for row in rows]


def test_a_node_whose_former_storage_still_votes_is_not_in_sync() -> None:
    """Whoever relies on the ISR to take another node down would end the group."""
    cluster = MetadataCluster.formed()
    one, two, three = (cluster.nodes[n].self_id for n in (1, 2, 3))
    control = cluster.nodes[1].control
    former = ReplicaId(two.node_id, StorageId(two.storage_id ^ 1))

    def told(voters: list[ReplicaId]) -> list[NodeId]:
        epoch = LeaderEpoch(1)
        control.partition_led(TOPIC, 0, leader_epoch=epoch, isr=[one, two, three], voters=voters)
        row = control.leaders.get(TOPIC, 0)
        assert row is not None
        return list(row.isr)

    assert told([one, former, two, three]) == [one.node_id, three.node_id]
    assert told([one, two, three]) == [one.node_id, two.node_id, three.node_id]


def test_a_new_leader_is_known_everywhere_at_once() -> None:
    cluster = _formed()
    _lead(cluster, 2, 5)
    cluster.turn()
    assert _known(cluster) == [(2, 5)] * 3


def test_who_missed_a_push_is_told_when_it_is_reached_again() -> None:
    cluster = _formed()
    cluster.cut = [3]
    _lead(cluster, 2, 5)
    cluster.run(700)
    assert _known(cluster) == [(2, 5), (2, 5), None]
    cluster.cut = []
    cluster.run(700)
    assert _known(cluster) == [(2, 5)] * 3


def test_a_node_that_connects_is_told_all() -> None:
    cluster = _formed()
    _lead(cluster, 2, 5)
    cluster.turn()
    cluster.kill(3)
    cluster.start(3)
    assert _known(cluster)[2] is None
    assert "t" not in cluster.nodes[3].engine.image.topics, "it does not know yet who holds it"
    cluster.nodes[1].control.peer_connected(NodeId(3))
    cluster.turn()
    assert _known(cluster) == [(2, 5)] * 3


def test_leaders_of_deleted_topics_are_forgotten() -> None:
    cluster = MetadataCluster.formed()
    cluster.auto_lead = True
    created = cluster.nodes[1].control.call(CreateTopicsCall(topics=(NewTopic(name="a"),)), CLIENT)
    cluster.run(300)
    topic_id = created.result()[0].topic_id
    assert topic_id is not None
    assert None not in _known(cluster, topic_id)
    cluster.nodes[1].control.call(DeleteTopicsCall(names=("a",)), CLIENT)
    cluster.run(300)
    assert _known(cluster, topic_id) == [None, None, None]


def test_leadership_is_moved_by_whoever_leads() -> None:
    cluster = _formed()
    nobody = cluster.nodes[1].control.move_leadership(TOPIC, 0, NodeId(3))
    assert nobody.result() is ErrorCode.LEADER_NOT_AVAILABLE
    _lead(cluster, 2, 5)
    cluster.turn()
    asked = cluster.nodes[1].control.move_leadership(TOPIC, 0, NodeId(3))
    cluster.turn()
    assert asked.result() is ErrorCode.NONE
    assert cluster.nodes[2].moves == [(TOPIC, 0, 3)]
    cluster.kill(2)
    lost = cluster.nodes[1].control.move_leadership(TOPIC, 0, NodeId(3))
    assert lost.result() is ErrorCode.NETWORK_EXCEPTION


def test_a_call_whose_answer_is_lost_is_unknown() -> None:
    cluster = MetadataCluster.formed()
    cluster.lost_replies_from = [1]
    promise = cluster.nodes[2].control.call(CreateTopicsCall(topics=(NewTopic(name="a"),)), CLIENT)
    cluster.run(2_000)
    assert isinstance(promise.error, KafkaError)
    assert promise.error.code is ErrorCode.REQUEST_TIMED_OUT
    assert "a" in cluster.nodes[1].engine.image.topics


def test_an_empty_call_is_answered_at_once() -> None:
    cluster = MetadataCluster.formed()
    promise = cluster.nodes[1].control.call(AlterConfigsCall(resources=()), CLIENT)
    assert promise.result() == ()


def test_nobody_speaks_for_another_node() -> None:
    cluster = MetadataCluster.formed()
    beat = encode(BrokerHeartbeat(NodeId(2), 1, 1))
    with pytest.raises(RemoteProtocolError, match="speaks as 2"):
        cluster.nodes[1].control.receive(NodeId(3), beat)
    with pytest.raises(RemoteProtocolError):
        cluster.nodes[1].control.receive(NodeId(3), b"\xc1nonsense")


def test_nobody_submits_as_another_node() -> None:
    """Not as the controller either; what it forwards of its own before that is taken."""
    cluster = MetadataCluster.formed()
    control = cluster.nodes[1].control
    before = cluster.nodes[1].engine.image.version

    def command(node_id: int, sequence: int) -> bytes:
        return encode_envelope(
            Envelope(
                version=1,
                node_id=NodeId(node_id),
                incarnation=9_000_000_000_000,
                sequence=sequence,
                command=NoOperation(),
            )
        )

    for spoken_for in (1, 2):
        forwarded = encode(ForwardCommands((command(3, spoken_for), command(spoken_for, 1))))
        reply = decode_reply(control.receive(NodeId(3), forwarded).result())
        assert (reply.code, reply.index) == (ErrorCode.INVALID_REQUEST, 1)
        assert reply.message == f"node 3 speaks as {spoken_for}"
    cluster.turn()
    assert cluster.nodes[1].engine.image.version == before + 2
    submitters = cluster.nodes[1].engine.image.submitters
    assert submitters[NodeId(3)] == (9_000_000_000_000, 2)
    assert all(submitters[NodeId(n)][0] < 9_000_000_000_000 for n in (1, 2) if n in submitters)


def test_a_heartbeat_of_a_node_that_knows_fewer_fields_is_of_a_fit_broker() -> None:
    beat = BrokerHeartbeat(NodeId(2), 1, 1, is_unfit=True)
    tagged = msgspec.msgpack.decode(encode(beat))
    assert tagged[-3:] == [True, 0, False]
    assert decode_request(msgspec.msgpack.encode(tagged[:-1])) == beat, "nor of pending records"
    assert decode_request(msgspec.msgpack.encode(tagged[:-2])) == beat, "and says nothing of room"
    assert decode_request(msgspec.msgpack.encode(tagged[:-3])) == BrokerHeartbeat(NodeId(2), 1, 1)
    assert decode_request(msgspec.msgpack.encode([*tagged, 7])) == beat
    with pytest.raises(RemoteProtocolError):
        decode_request(msgspec.msgpack.encode([*tagged[:-2], -1, False]))


def test_a_broker_whose_registration_was_replaced_registers_anew() -> None:
    cluster = MetadataCluster.formed()
    lifecycle = cluster.nodes[3].control.lifecycle
    epoch = lifecycle.broker_epoch
    twin_command = lifecycle._info
    cluster.nodes[3].engine.propose(
        RegisterBroker(
            node_id=NodeId(3),
            storage_id=f"{twin_command.replica_id.storage_id:x}",
            cluster_id="test",
        )
    )
    cluster.run(1_000)
    assert lifecycle.is_ready
    assert lifecycle.broker_epoch > epoch + 1


def test_a_joiner_whose_file_does_not_name_the_controller_is_told_where_it_is() -> None:
    """After replacements none of the first voters may lead, and a new node knows only those."""
    cluster = MetadataCluster.formed(3)
    cluster.elect(3)
    cluster.run(300)
    answer = cluster.nodes[1].control.receive(NodeId(4), encode(AdmissionRequest(NodeId(4), 104)))
    learned: list[tuple[NodeId, str]] = []

    class OnlyFirst:
        """Reaches node 1 alone, until it was told of others."""

        def version(self, _node_id: NodeId) -> int:
            return FORMAT_MAX

        def send(self, node_id: NodeId, payload: bytes, *, is_beat: bool = False) -> Promise[bytes]:
            if node_id == 1:
                return cluster.nodes[1].control.receive(NodeId(4), payload)
            if (node_id, "127.0.0.1:9103") not in learned:
                return Promise.failed(KafkaError(code=ErrorCode.NETWORK_EXCEPTION))
            return cluster.nodes[3].control.receive(NodeId(4), payload)

    reply = read_reply(answer)
    assert reply is not None
    assert (reply.code, reply.controller_id) == (ErrorCode.NOT_CONTROLLER, 3)
    assert reply.payload == b"127.0.0.1:9103"
    joiner = MetadataCluster(1).nodes[1]
    lifecycle = BrokerLifecycle(
        BrokerInfo(ReplicaId(NodeId(4), StorageId(104)), "test", None, ()),
        joiner.engine,
        OnlyFirst(),
        clock=cluster.clock,
        heartbeat_ms=250,
        bootstrap=(NodeId(1), NodeId(2)),
        is_member=lambda: False,
        learn_address=lambda node_id, where: learned.append((node_id, where)),
    )
    for _ in range(3):
        cluster.clock.now_ms += 300
        lifecycle.tick()
    assert (NodeId(3), "127.0.0.1:9103") in learned
    assert ReplicaId(NodeId(4), StorageId(104)) in cluster.configuration.learners


def _ask_standing(cluster: MetadataCluster, asked: int, node_id: int) -> Reply:
    request = AdmissionRequest(NodeId(node_id), 100 + node_id, is_member=True)
    answer = cluster.nodes[asked].control.receive(NodeId(node_id), encode(request))
    reply = read_reply(answer)
    assert reply is not None
    return reply


def test_a_node_that_was_replaced_while_it_was_away_is_told_so() -> None:
    """It takes itself for a member, nobody leads it, and it would wait for ever."""
    cluster = MetadataCluster.formed(3)
    cluster.elect(3)
    cluster.run(300)
    assert _ask_standing(cluster, 3, 1).code is ErrorCode.NONE, "it is a member"
    elsewhere = _ask_standing(cluster, 2, 1)
    assert (elsewhere.code, elsewhere.controller_id) == (ErrorCode.NOT_CONTROLLER, 3)
    assert _ask_standing(cluster, 3, 4).code is ErrorCode.INELIGIBLE_REPLICA, "nobody knows it"
    cluster.kill(1)
    cluster.run(20_000)
    cluster.start(4)
    cluster.run(1_000)
    cluster.nodes[3].engine.propose(ReplaceNode(old_id=NodeId(1), new_id=NodeId(4)))
    cluster.run(5_000)
    assert cluster.nodes[3].engine.image.replacements[NodeId(1)].is_done
    told = _ask_standing(cluster, 3, 1)
    assert told.code is ErrorCode.BROKER_ID_NOT_REGISTERED
    assert "`raftmq node replace 1 4`" in told.message
    assert cluster.nodes[3].control.turned_away == {1: told.message}


def test_a_member_without_a_leader_asks_what_became_of_it() -> None:
    world = MetadataCluster(3)
    asked: list[tuple[NodeId, bool]] = []

    class Others:
        def version(self, _node_id: NodeId) -> int:
            return FORMAT_MAX

        def send(self, node_id: NodeId, payload: bytes, *, is_beat: bool = False) -> Promise[bytes]:
            request = decode_request(payload)
            assert isinstance(request, AdmissionRequest)
            asked.append((node_id, request.is_member))
            if node_id == 2:
                return Promise.resolved(encode(Reply(ErrorCode.NOT_CONTROLLER, NodeId(4))))
            gone = Reply(ErrorCode.BROKER_ID_NOT_REGISTERED, NodeId(4), message="replaced by 4")
            return Promise.resolved(encode(gone))

    lifecycle = BrokerLifecycle(
        BrokerInfo(ReplicaId(NodeId(1), StorageId(101)), "test", None, ()),
        world.nodes[1].engine,
        Others(),
        clock=world.clock,
        heartbeat_ms=250,
        bootstrap=(NodeId(1), NodeId(2)),
        is_member=lambda: True,
        learn_address=lambda _node_id, _where: None,
    )
    lifecycle.tick()
    assert asked == [], "an election takes a moment"
    world.clock.now_ms += UNLED_MS
    lifecycle.tick()
    assert asked == [(2, True), (4, True)]
    assert lifecycle.is_replaced
    assert lifecycle.refusal == "replaced by 4"


def test_a_member_whom_nobody_knows_joins_anew() -> None:
    """What made it one was lost with the leader that proposed it, before it was committed."""
    world = MetadataCluster(3)
    asked: list[tuple[NodeId, bool]] = []

    class Controller:
        def version(self, _node_id: NodeId) -> int:
            return FORMAT_MAX

        def send(self, node_id: NodeId, payload: bytes, *, is_beat: bool = False) -> Promise[bytes]:
            request = decode_request(payload)
            assert isinstance(request, AdmissionRequest)
            asked.append((node_id, request.is_member))
            code = ErrorCode.INELIGIBLE_REPLICA if request.is_member else ErrorCode.NONE
            return Promise.resolved(encode(Reply(code, NodeId(2), message="no member")))

    lifecycle = BrokerLifecycle(
        BrokerInfo(ReplicaId(NodeId(4), StorageId(104)), "test", None, ()),
        world.nodes[1].engine,
        Controller(),
        clock=world.clock,
        heartbeat_ms=250,
        bootstrap=(NodeId(2),),
        is_member=lambda: True,
        learn_address=lambda _node_id, _where: None,
    )
    lifecycle.tick()
    world.clock.now_ms += UNLED_MS
    lifecycle.tick()
    assert asked == [(2, True), (2, False)]
    assert (lifecycle.is_replaced, lifecycle.refusal) == (False, None), "it is refused nothing"
