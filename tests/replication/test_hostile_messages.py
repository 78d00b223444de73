"""A peer that says hello and then lies: what it says is refused before it is kept or believed."""

from __future__ import annotations

import struct
from random import Random

import msgspec
import pytest

from raftmq.controller.leaders import LeaderRow, LeaderTable, decode_rows, encode_rows
from raftmq.errors import ErrorCode, KafkaError, RemoteProtocolError
from raftmq.foreign import CLOCK_MS_MAX, POSITION_MAX, TERM_JUMP_MAX, TERM_MAX
from raftmq.log.log_start import LogStart
from raftmq.metadata import submissions
from raftmq.metadata.broker_messages import ForwardCommands
from raftmq.metadata.commands import (
    Envelope,
    NoOperation,
    RegisterBroker,
    UnknownCommandError,
    decode_envelope,
    encode_envelope,
)
from raftmq.metadata.formation import (
    BALLOT_JUMP_MAX,
    Accept,
    Formation,
    FormationState,
    Prepare,
)
from raftmq.metadata.state_machine import MetadataMachine
from raftmq.raft.membership import Configuration
from raftmq.raft.messages import (
    AppendReply,
    AppendRequest,
    Entry,
    EntryKind,
    Heartbeat,
    HeartbeatReply,
    InstallLogStart,
    VoteRequest,
)
from raftmq.replication.append_checks import check_append, read_log_start
from raftmq.replication.log_start import encode_proposal
from raftmq.replication.messages import Quiesce, TailReply, decode, encode
from raftmq.types import (
    METADATA_GROUP,
    LeaderEpoch,
    NodeId,
    Offset,
    RaftIndex,
    ReplicaId,
    StorageId,
    Term,
    TopicId,
)
from tests.controller.metadata_cluster import MetadataCluster
from tests.raft.network import configuration, group, replica

ME, YOU = ReplicaId(NodeId(1), StorageId(1)), ReplicaId(NodeId(2), StorageId(2))
HUGE = (1 << 63) - 1
ZERO = RaftIndex(0)
ROW = LeaderRow(TopicId(METADATA_GROUP.topic_id), 0, LeaderEpoch(5), 0, NodeId(1), (), (NodeId(1),))

LIES = {
    "a term": VoteRequest(Term(HUGE), YOU, ME, Term(0), ZERO, False),
    "a term above int32": VoteRequest(Term(TERM_MAX + 1), YOU, ME, Term(0), ZERO, False),
    "a last term": VoteRequest(Term(3), YOU, ME, Term(4), ZERO, False),
    "a log end": VoteRequest(Term(3), YOU, ME, Term(2), RaftIndex(HUGE), False),
    "a commit": Heartbeat(Term(1), YOU, ME, RaftIndex(POSITION_MAX + 1), 1),
    "a round": HeartbeatReply(Term(1), YOU, ME, HUGE, ZERO),
    "a clock": HeartbeatReply(Term(1), YOU, ME, 1, ZERO, HUGE),
    "a flushed end": AppendReply(Term(1), YOU, ME, True, RaftIndex(HUGE)),
    "a hint": AppendReply(Term(1), YOU, ME, False, ZERO, ZERO, ZERO, Term(HUGE)),
    "a log start": InstallLogStart(Term(1), YOU, ME, RaftIndex(HUGE), Term(1), b"", b""),
    "a rest": Quiesce(Term(1), YOU, ME, RaftIndex(HUGE), 1),
    "a tail": TailReply(Term(1), YOU, ME, ZERO, RaftIndex(HUGE), Term(1)),
    "a node": VoteRequest(Term(1), ReplicaId(NodeId(-1), StorageId(1)), ME, Term(0), ZERO, False),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_numbers_beyond_all_sense_are_refused_where_they_are_decoded(lie: VoteRequest) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(b"".join(encode(METADATA_GROUP, lie)))


def test_a_term_may_rise_only_so_far_at_once() -> None:
    core = group([1, 2, 3], logs={1: [1]}).core(1)
    beyond = Term(1 + TERM_JUMP_MAX + 1)
    with pytest.raises(RemoteProtocolError, match="claims term"):
        core.step(VoteRequest(beyond, replica(2), replica(1), Term(1), RaftIndex(9), False))
    assert core.term == 1
    far = Term(1 + TERM_JUMP_MAX)  # of a cluster that held elections for half a year
    core.step(VoteRequest(far, replica(2), replica(1), Term(1), RaftIndex(9), False))
    assert (core.term, core.vote) == (far, replica(2))


def test_with_the_last_term_there_is_nobody_to_stand_and_nothing_breaks() -> None:
    core = group([1, 2, 3], logs={1: [1]}).core(1)
    while core.term < TERM_MAX:
        term = Term(min(TERM_MAX, core.term + TERM_JUMP_MAX))
        core.step(VoteRequest(term, replica(2), replica(1), Term(1), RaftIndex(9), False))
    for _ in range(100):
        core.tick()
        core.ready()
    assert core.term == TERM_MAX
    assert not core.can_campaign


@pytest.mark.parametrize("epoch", [(1 << 31) - 1, 5 + TERM_JUMP_MAX + 1])
def test_a_row_cannot_hide_a_leader_for_good(epoch: int) -> None:
    table = LeaderTable()
    table.merge([ROW])
    lie = LeaderRow(ROW.topic_id, 0, LeaderEpoch(epoch), 0, NodeId(2), (), (NodeId(2),))
    with pytest.raises(RemoteProtocolError, match="leader epoch"):
        table.merge(decode_rows(encode_rows([lie]), lie.leader_id))
    assert table.get(ROW.topic_id, 0) == ROW


def test_a_row_of_no_int32_is_refused() -> None:
    for row in (
        LeaderRow(ROW.topic_id, 0, LeaderEpoch(1 << 31), 0, NodeId(2), (), ()),
        LeaderRow(ROW.topic_id, -1, LeaderEpoch(1), 0, NodeId(2), (), ()),
        LeaderRow(ROW.topic_id, 0, LeaderEpoch(1), HUGE, NodeId(2), (), ()),
        LeaderRow(ROW.topic_id, 0, LeaderEpoch(1), 0, NodeId(1 << 40), (), ()),
    ):
        with pytest.raises(RemoteProtocolError):
            decode_rows(encode_rows([row]), row.leader_id)


def _append(*entries: Entry) -> AppendRequest:
    return AppendRequest(Term(2), YOU, ME, RaftIndex(3), Term(1), ZERO, entries)


def _bare(kind: EntryKind, payload: bytes, start: int = 3) -> Entry:
    return Entry(RaftIndex(start), RaftIndex(start + 1), Term(2), kind, payload)


@pytest.mark.parametrize(
    "entry",
    [
        _bare(EntryKind.MEMBERSHIP, b"nonsense"),
        _bare(EntryKind.MEMBERSHIP, Configuration().encode()),
        _bare(EntryKind.LOG_START, b""),
        _bare(EntryKind.LOG_START, encode_proposal(Offset(HUGE))),
        _bare(EntryKind.ELECTION, bytes(2 << 20)),
        _bare(EntryKind.ELECTION, b"", start=4),
        Entry(RaftIndex(3), RaftIndex(4), Term(2), EntryKind.BATCH, b"no batch"),
    ],
)
def test_an_entry_that_cannot_be_is_not_appended(entry: Entry) -> None:
    with pytest.raises(RemoteProtocolError):
        check_append(_append(entry))


@pytest.mark.parametrize("state", [b"no snapshot", b"RMQM" + bytes(40)])
def test_a_state_that_nobody_can_begin_with_is_no_log_start(state: bytes) -> None:
    start = LogStart(Offset(7), RaftIndex(9), LeaderEpoch(1), configuration([1, 2]).encode(), state)
    with pytest.raises(RemoteProtocolError, match="state of a log start"):
        read_log_start(start.encode(), MetadataMachine())


def test_formation_keeps_no_ballot_beyond_reach() -> None:
    saved: list[FormationState] = []
    formation = Formation(
        NodeId(1),
        StorageId(1),
        [NodeId(n) for n in (1, 2, 3)],
        state=FormationState(),
        save=saved.append,
        send=lambda _to, _payload: None,
        random=Random(1),
    )
    for message in (
        Prepare((BALLOT_JUMP_MAX + 1, 2), (1, 2, 3)),
        Accept((1, 2), ()),
        Accept((1, 2), ((1, 1), (1, 1))),
    ):
        with pytest.raises(RemoteProtocolError):
            formation.receive(NodeId(2), msgspec.msgpack.encode(message))
    with pytest.raises(RemoteProtocolError):
        formation.receive(NodeId(2), b"\x91" * 5_000)
    assert not saved


# ---- commands ----


def _command(
    sequence: int, command: object, node_id: int = 2, incarnation: int = 9_000_000_000_000
) -> bytes:
    return encode_envelope(
        Envelope(
            version=1,
            node_id=NodeId(node_id),
            incarnation=incarnation,
            sequence=sequence,
            command=command,  # type: ignore[arg-type]
        )
    )


POISON = RegisterBroker(node_id=NodeId(9), storage_id="zz", cluster_id="c")


def test_a_poisoned_command_is_refused_and_what_came_before_it_is_taken() -> None:
    cluster = MetadataCluster.formed()
    leader = cluster.nodes[1].engine
    before = leader.image.version
    reply = leader.receive_commands(
        NodeId(2),
        ForwardCommands(
            (_command(1, NoOperation()), _command(2, POISON), _command(3, NoOperation()))
        ),
    )
    assert (reply.code, reply.index) == (ErrorCode.INVALID_REQUEST, 1)
    assert "storage_id" in reply.message
    cluster.turn()
    assert [cluster.nodes[n].engine.image.version for n in cluster.up] == [before + 1] * 3


@pytest.mark.parametrize("proposer", [1, 2])
def test_what_raises_at_apply_never_enters_the_log(
    proposer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in `apply` is planted, where the controller tries commands."""
    cluster = MetadataCluster.formed()
    real = submissions.apply

    def apply(image: object, envelope: Envelope, offset: Offset) -> object:
        if isinstance(envelope.command, RegisterBroker) and envelope.command.rack == "poison":
            raise KeyError("planted")
        return real(image, envelope, offset)  # type: ignore[arg-type]

    monkeypatch.setattr(submissions, "apply", apply)
    engine = cluster.nodes[proposer].engine
    itself = NodeId(proposer)
    poison = RegisterBroker(node_id=itself, storage_id="1", cluster_id="c", rack="poison")
    before = engine.propose(NoOperation())
    refused = engine.propose(poison)
    after = engine.propose(NoOperation())
    cluster.run(200)
    assert before.error is None
    assert before.is_done
    assert isinstance(refused.error, KafkaError)
    assert refused.error.code is ErrorCode.INVALID_REQUEST
    assert "KeyError" in refused.error.message
    assert after.is_done
    assert after.error is None
    for node in cluster.nodes.values():
        assert node.engine.image.brokers[itself].rack is None


def test_the_image_that_a_command_is_tried_on_has_those_before_it() -> None:
    """Two commands in the queue at once: the second is judged with the first one done."""
    cluster = MetadataCluster.formed()
    leader = cluster.nodes[1].engine
    assert (
        leader.receive_commands(NodeId(2), ForwardCommands((_command(1, NoOperation()),))).index
        == 0
    )
    tried = leader._queue.trial
    assert tried is not None
    assert tried.version == leader.image.version + 1
    leader.receive_commands(NodeId(2), ForwardCommands((_command(2, NoOperation()),)))
    assert leader._queue.trial is not None
    assert leader._queue.trial.version == leader.image.version + 2
    cluster.turn()
    assert leader.image == leader._queue.trial


@pytest.mark.parametrize("victim", [1, 2])
def test_no_command_takes_the_last_incarnation_that_a_node_could_have(victim: int) -> None:
    """Once it was applied, the node itself could submit nothing for ever."""
    cluster = MetadataCluster.formed()
    leader, engine = cluster.nodes[1].engine, cluster.nodes[victim].engine

    def claim(incarnation: int) -> ErrorCode:
        """What the controller says; the node's next command but one is applied."""
        claimed = _command(9, NoOperation(), victim, incarnation)
        code = leader.receive_commands(NodeId(victim), ForwardCommands((claimed,))).code
        cluster.turn()
        engine.propose(NoOperation())  # may find that its incarnation is over
        cluster.turn()
        promise = engine.propose(NoOperation())
        cluster.turn()
        assert promise.is_done
        assert promise.error is None
        return code

    assert claim(POSITION_MAX) is ErrorCode.INVALID_REQUEST
    assert claim(POSITION_MAX - 1) is ErrorCode.INVALID_REQUEST
    assert claim(CLOCK_MS_MAX + 1) is ErrorCode.INVALID_REQUEST
    assert claim(CLOCK_MS_MAX) is ErrorCode.NONE
    assert engine.incarnation == CLOCK_MS_MAX + 1
    assert claim(CLOCK_MS_MAX + 2) is ErrorCode.NONE
    assert engine.incarnation == CLOCK_MS_MAX + 3
    assert claim(CLOCK_MS_MAX + 5) is ErrorCode.INVALID_REQUEST


def test_a_controller_that_is_behind_refuses_no_command_for_good() -> None:
    """What shows that a command is fit may be in the log, and not applied there yet."""
    cluster = MetadataCluster.formed()
    leader, engine = cluster.nodes[1].engine, cluster.nodes[2].engine
    leader.receive_commands(
        NodeId(2), ForwardCommands((_command(9, NoOperation(), 2, CLOCK_MS_MAX),))
    )
    cluster.turn()
    engine.propose(NoOperation())
    cluster.turn()
    assert engine.incarnation > CLOCK_MS_MAX
    behind = cluster.start(3)
    behind.replica.follow(cluster.nodes[1].replica)
    cluster.elect(3)
    promise = engine.propose(NoOperation())
    cluster.deliver()
    assert behind.engine.image.version < engine.image.version
    assert promise.error is None
    cluster.run(200)
    assert promise.is_done
    assert promise.error is None


def test_a_command_that_is_nested_without_end_is_no_command() -> None:
    for data in (b'{"z":' + b"[" * 5_000, b'{"v":1,"node":"\xff"}', struct.pack(">I", 7)):
        with pytest.raises(UnknownCommandError):
            decode_envelope(data)
