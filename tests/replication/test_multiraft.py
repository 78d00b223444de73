"""Many groups on one node: one frame of heartbeats, one drain per input, one journal flush."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from uuid import UUID

import pytest

from jepsen_like.disk import SimDisk
from raftmq.errors import RemoteProtocolError
from raftmq.log.journal import HardStateJournal
from raftmq.log.model import FlushJob, LogConfig
from raftmq.metadata.state_machine import Skip, UnappliableCommandError
from raftmq.ports import DiskError
from raftmq.raft.membership import Configuration
from raftmq.raft.messages import (
    AppendRequest,
    Heartbeat,
    HeartbeatReply,
    PreVoteReply,
    PreVoteRequest,
    Role,
    VoteReply,
    VoteRequest,
)
from raftmq.records import NewRecord, build_batch, parse_header
from raftmq.replication.messages import (
    NodeBeat,
    PeerMessage,
    Quiesce,
    Unquiesce,
    decode,
    encode,
    encode_beats,
    encode_several,
)
from raftmq.replication.multiraft import ORPHANS_MAX, STANDING_MAX, MultiRaft, Stream
from raftmq.replication.opening import Opening, open_replica
from raftmq.replication.ports import ReplicaConfig
from raftmq.replication.replica import Replica
from raftmq.types import (
    METADATA_GROUP,
    Buffer,
    NodeId,
    RaftGroupId,
    RaftIndex,
    ReplicaId,
    StorageId,
    Term,
    TopicId,
)
from tests.partition.fake_replica import FakeClock
from tests.replication.inline import InlineCatchUp, stored_as_frames
from tests.replication.sim_cluster import SimCluster
from tests.replication.sim_nodes import Machine

A, B, C = (ReplicaId(NodeId(n), StorageId(n)) for n in (1, 2, 3))


def group(number: int) -> RaftGroupId:
    return RaftGroupId(TopicId(UUID(int=number + 1)), number, 1)


class Node:
    """Node A with some groups; nothing leaves it, flushes happen on demand."""

    def __init__(self, groups: int, voters: tuple[ReplicaId, ...] = (A, B, C)) -> None:
        self.disk = SimDisk(Random(1))
        self.disk.make_directories("data")
        self.journal = HardStateJournal.open(self.disk, "data/state.journal")
        self.sent: list[tuple[NodeId, bytes, bool]] = []
        self.flushes: list[tuple[FlushJob, Callable[[DiskError | None], None]]] = []
        self.failures: list[DiskError] = []
        self.broken: list[str] = []
        self.multiraft = MultiRaft(
            A.node_id,
            self.journal,
            send=self._send,
            send_stored=stored_as_frames(self._send),
            request_flush=lambda job, done: self.flushes.append((job, done)),
            on_journal_failed=self.failures.append,
            on_broken_invariant=self.broken.append,
        )
        opening = Opening(
            node=A,
            disk=self.disk,
            journal=self.journal,
            host=self.multiraft,
            catch_up=InlineCatchUp(),
            clock=FakeClock(),
            random=Random(2),
        )
        for number in range(groups):
            replica = open_replica(
                opening,
                group(number),
                f"data/{number}",
                initial=Configuration(voters),
                machine=Machine(),
                log_config=LogConfig(),
                config=ReplicaConfig(),
            )
            self.multiraft.register(replica)

    def _send(self, node_id: NodeId, frame: list[Buffer], stream: Stream) -> bool:
        self.sent.append((node_id, b"".join(frame), stream))
        return True

    def replica(self, number: int) -> Replica:
        return self.multiraft.replicas[group(number)]

    def flush(self) -> None:
        while self.flushes:
            job, done = self.flushes.pop(0)
            job.run()
            done(None)

    def messages(self) -> list[tuple[NodeId, RaftGroupId, PeerMessage]]:
        found: list[tuple[NodeId, RaftGroupId, PeerMessage]] = []
        for to, frame, _ in self.sent:
            content = decode(frame)
            assert not isinstance(content, NodeBeat)
            found += [(to, group, message) for group, message in content]
        return found

    def deliver(self, sender: ReplicaId, messages: list[tuple[RaftGroupId, PeerMessage]]) -> None:
        frame = encode_several([encode(group, message) for group, message in messages])
        self.multiraft.deliver(sender.node_id, b"".join(frame))

    def hear_leader(self, leader: ReplicaId, term: int = 1) -> None:
        beats: list[tuple[RaftGroupId, Heartbeat | HeartbeatReply]] = [
            (g, Heartbeat(Term(term), leader, A, RaftIndex(0), 1)) for g in self.multiraft.replicas
        ]
        frame = encode_beats(leader.node_id, A.node_id, beats)
        self.multiraft.deliver(leader.node_id, b"".join(frame))


def test_heartbeat_replies_of_all_groups_leave_in_one_urgent_frame() -> None:
    node = Node(50)
    node.flush()
    node.hear_leader(B)
    [(to, frame, stream)] = node.sent
    assert to == B.node_id
    assert stream is Stream.HEARTBEAT
    replies = decode(frame)
    assert len(replies) == 50
    assert all(isinstance(message, HeartbeatReply) for _, message in replies)


def test_heartbeats_that_say_nothing_new_cost_no_round_of_effects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(50)
    node.flush()
    node.hear_leader(B)
    drained: list[Replica] = []
    drain = Replica.drain
    monkeypatch.setattr(Replica, "drain", lambda self: (drained.append(self), drain(self)))
    node.sent.clear()
    node.hear_leader(B)
    [(_, frame, _)] = node.sent
    assert len(decode(frame)) == 50
    assert drained == []
    node.hear_leader(C, term=2)
    assert len(drained) == 50, "another leader is news"


def test_few_groups_stand_at_a_time_and_all_get_their_turn() -> None:
    node = Node(200)
    node.flush()
    stood: dict[RaftGroupId, bool] = {}
    for _ in range(20 * ReplicaConfig().election_ticks):
        node.multiraft.tick()
        standing = [
            g for g, r in node.multiraft.replicas.items() if r.core.role is Role.PRE_CANDIDATE
        ]
        assert len(standing) <= STANDING_MAX
        stood |= dict.fromkeys(standing, True)
    assert len(stood) == 200


def test_replicas_that_failed_while_they_stood_take_no_turn_from_others() -> None:
    node = Node(STANDING_MAX + 10)
    node.flush()
    failed: list[Replica] = []
    while len(failed) < STANDING_MAX:
        node.multiraft.tick()
        for replica in node.multiraft.replicas.values():
            if replica.core.role is Role.PRE_CANDIDATE and replica.failure is None:
                replica.fail("disk full")
                failed.append(replica)
    stood: dict[RaftGroupId, bool] = {}
    for _ in range(3 * ReplicaConfig().election_ticks):
        node.multiraft.tick()
        for g, replica in node.multiraft.replicas.items():
            if replica.failure is None and replica.core.role is Role.PRE_CANDIDATE:
                stood[g] = True
    assert len(failed) + len(stood) == STANDING_MAX + 10


def test_a_thousand_votes_are_one_flush_and_none_leaves_before_it() -> None:
    node = Node(100)
    node.flush()
    with node.multiraft.batch():
        for number in range(100):
            request = VoteRequest(Term(5), C, A, Term(0), RaftIndex(0))
            node.multiraft.deliver(C.node_id, b"".join(encode(group(number), request)))
    assert len(node.flushes) == 1
    assert node.sent == []
    node.flush()
    assert all(stream is Stream.HEARTBEAT for _, _, stream in node.sent), "never behind bulk"
    assert node.messages() == [
        (C.node_id, group(number), VoteReply(Term(5), A, C, True)) for number in range(100)
    ]
    assert len(node.sent) == 2


def test_the_elections_of_many_groups_are_few_frames() -> None:
    """From the leader's end to the first entries of the new terms: 60 groups, two other nodes."""
    node = Node(60)
    node.flush()
    node.hear_leader(C, term=2)  # in term 3 it is this node's turn to stand at once
    node.sent.clear()
    node.multiraft.peer_lost(C.node_id)
    assert len(node.sent) == 2
    asked = [(to, g) for to, g, message in node.messages() if isinstance(message, PreVoteRequest)]
    assert sorted(asked) == sorted((to, group(n)) for to in (2, 3) for n in range(60))
    node.sent.clear()
    node.deliver(B, [(group(n), PreVoteReply(Term(3), B, A, True)) for n in range(60)])
    assert node.sent == [], "its own vote is not durable yet"
    node.flush()
    assert len(node.sent) == 2
    assert {type(message) for _, _, message in node.messages()} == {VoteRequest}
    node.sent.clear()
    node.deliver(B, [(group(n), VoteReply(Term(3), B, A, True)) for n in range(60)])
    entries = [(to, g) for to, g, message in node.messages() if isinstance(message, AppendRequest)]
    assert sorted(entries) == sorted((to, group(n)) for to in (2, 3) for n in range(60))
    assert len(node.sent) == 2


def test_a_thousand_groups_whose_leader_is_lost_do_not_elect_in_one_turn() -> None:
    node = Node(3 * ORPHANS_MAX - 1)
    node.flush()
    node.hear_leader(C, term=2)
    gone = group(3 * ORPHANS_MAX - 2)
    asked: list[int] = []
    node.multiraft.peer_lost(C.node_id)
    node.multiraft.unregister(gone)
    for _ in range(3):
        asking = [g for g, r in node.multiraft.replicas.items() if r.leader is None]
        asked.append(len(asking))
        node.multiraft.tick()
    assert asked == [ORPHANS_MAX, 2 * ORPHANS_MAX, 3 * ORPHANS_MAX - 2]
    requests = [g for _, g, message in node.messages() if isinstance(message, PreVoteRequest)]
    assert sorted(requests) == sorted(2 * [*node.multiraft.replicas])


def test_a_message_that_is_alone_leaves_as_it_is() -> None:
    node = Node(1)
    node.flush()
    request = VoteRequest(Term(5), C, A, Term(0), RaftIndex(0))
    node.multiraft.deliver(C.node_id, b"".join(encode(group(0), request)))
    node.flush()
    [(_, frame, _)] = node.sent
    assert frame == b"".join(encode(group(0), VoteReply(Term(5), A, C, True)))


def test_what_is_said_outside_of_any_input_leaves_at_once() -> None:
    node = Node(1)
    node.flush()
    reply = VoteReply(Term(5), A, C, False)
    node.multiraft.send(group(0), reply)
    assert node.messages() == [(C.node_id, group(0), reply)]


def test_what_is_to_follow_a_round_is_called_once_and_outside_of_replicas() -> None:
    node = Node(1)
    node.flush()
    called: list[str] = []

    def again() -> None:
        called.append("again")
        node.multiraft.after_round(last)

    def last() -> None:
        called.append("last")

    node.multiraft.after_round(again)
    node.multiraft.after_round(again)
    assert called == [], "no replica was drained"
    node.multiraft.touch(group(0))
    assert called == ["again"], "what is asked for now follows the next round"
    node.multiraft.touch(group(0))
    node.multiraft.touch(group(0))
    assert called == ["again", "last"]


def test_what_is_asked_for_within_a_round_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(2)
    node.flush()
    done: list[str] = []

    def drain(_replica: Replica) -> None:
        assert node.multiraft.is_draining
        done.append("drained")
        node.multiraft.after_round(followed)

    def followed() -> None:
        done.append("followed")

    monkeypatch.setattr(Replica, "drain", drain)
    with node.multiraft.batch():
        node.multiraft.touch(group(0))
        node.multiraft.touch(group(1))
    assert done == ["drained", "drained", "followed"]


def test_what_wakes_a_group_takes_the_stream_that_is_read_at_once() -> None:
    """A node whose groups all rest reads the urgent one at its ticks only."""
    node = Node(1)
    node.flush()
    node.multiraft.send(group(0), Unquiesce(Term(5), A, B))
    node.multiraft.send(group(0), Quiesce(Term(5), A, B, RaftIndex(0), 1))
    assert [type(message) for _, _, message in node.messages()] == [Unquiesce, Quiesce]
    assert [stream for _, _, stream in node.sent] == [Stream.BULK, Stream.HEARTBEAT]


def test_the_metadata_group_waits_for_no_partition() -> None:
    """Its answers and heartbeats take the stream of all such; what it appends has its own."""
    node = Node(1)
    node.flush()
    for of in (group(0), METADATA_GROUP):
        node.multiraft.send(
            of, AppendRequest(Term(5), A, B, RaftIndex(0), Term(0), RaftIndex(0), ())
        )
        node.multiraft.send(of, VoteReply(Term(5), A, B, False))
    assert [stream for _, _, stream in node.sent] == [
        *(Stream.BULK, Stream.HEARTBEAT),
        *(Stream.CONTROL, Stream.HEARTBEAT),
    ]


def test_a_vote_written_while_the_journal_is_flushed_waits_for_the_next_flush() -> None:
    node = Node(2)
    node.flush()
    for number in range(2):
        request = VoteRequest(Term(5), C, A, Term(0), RaftIndex(0))
        node.multiraft.deliver(C.node_id, b"".join(encode(group(number), request)))
    assert len(node.flushes) == 1
    job, done = node.flushes.pop()
    job.run()
    done(None)
    assert len(node.sent) == 1
    node.flush()
    assert len(node.sent) == 2


def test_a_group_of_one_commits_only_what_it_flushed() -> None:
    node = Node(1, voters=(A,))
    for _ in range(30):
        node.multiraft.tick()
    replica = node.replica(0)
    assert replica.is_leader
    assert not replica.is_writable
    node.flush()
    assert replica.is_writable
    batch = build_batch([NewRecord(None, b"v")] * 3)
    assert replica.append(batch, parse_header(batch)) == 0
    assert replica.high_watermark == 0
    node.flush()
    assert replica.high_watermark == 3


def test_a_node_cannot_speak_for_another() -> None:
    node = Node(1)
    request = VoteRequest(Term(5), C, A, Term(0), RaftIndex(0))
    with pytest.raises(RemoteProtocolError, match="speaks as"):
        node.multiraft.deliver(B.node_id, b"".join(encode(group(0), request)))
    assert node.replica(0).core.term == 0


def test_messages_of_unknown_groups_are_ignored() -> None:
    node = Node(1)
    node.flush()
    request = VoteRequest(Term(5), C, A, Term(0), RaftIndex(0))
    node.multiraft.deliver(C.node_id, b"".join(encode(group(9), request)))
    assert node.sent == []


def test_a_failed_journal_flush_stops_every_replica() -> None:
    node = Node(3)
    node.flush()
    request = VoteRequest(Term(5), C, A, Term(0), RaftIndex(0))
    node.multiraft.deliver(C.node_id, b"".join(encode(group(0), request)))
    _, done = node.flushes.pop()
    done(DiskError("broken"))
    assert [str(failure) for failure in node.failures] == ["broken"]
    assert all(replica.failure for replica in node.multiraft.replicas.values())
    assert node.sent == []


def test_a_failed_log_flush_stops_that_replica_alone() -> None:
    node = Node(2, voters=(A,))
    for _ in range(30):
        node.multiraft.tick()
    logs = [(job, done) for job, done in node.flushes if not job.sequence]
    assert len(logs) == 2
    logs[0][1](DiskError("broken"))
    assert node.replica(0).failure is not None
    assert node.replica(1).failure is None
    assert node.failures == []


def test_a_replica_that_left_hears_nothing_more() -> None:
    node = Node(2, voters=(A,))
    for _ in range(30):
        node.multiraft.tick()
    gone = node.multiraft.unregister(group(0))
    assert gone is not None
    node.flush()
    assert not gone.is_writable
    assert node.replica(1).is_writable


def test_a_flush_that_ends_when_the_node_has_closed_touches_nothing() -> None:
    node = Node(1, voters=(A,))
    for _ in range(30):
        node.multiraft.tick()
    node.flush()
    batch = build_batch([NewRecord(None, b"v")])
    node.replica(0).append(batch, parse_header(batch))
    under_way, node.flushes = node.flushes, []
    node.multiraft.close()
    node.replica(0).log.close()
    node.journal.close()
    for job, done in under_way:
        assert not job.sequence, "the log's own"
        with node.multiraft.batch():  # as the flusher reports
            done(None)
    assert node.replica(0).high_watermark == 0
    assert node.broken == []


def test_who_comes_late_itself_takes_no_short_silence_for_an_end() -> None:
    """What its peers sent lies in its sockets: many groups would depose leaders that live."""
    cluster = SimCluster(groups=5)
    cluster.run(500)
    leader, node = cluster.leader, cluster.followers()[0]
    election_ms = 25.0 * cluster.world.options.election_ticks
    replicas = [replica for replica in node.replicas.values() if not replica.is_leader]
    terms = [replica.core.term for replica in replicas]
    assert node.multiraft is not None
    node.multiraft.tick(late_ticks=cluster.world.options.election_ticks)
    cluster.isolate(node)
    cluster.run(3 * election_ms)
    assert all(replica.leader is not None for replica in replicas)
    cluster.mend()
    cluster.run(20_000)
    cluster.isolate(node)
    # A timeout that was drawn meanwhile stays as long as it was.
    cluster.until(lambda: all(r.leader is None for r in replicas), 8 * election_ms)
    cluster.mend()
    cluster.run(1_000)
    assert [replica.core.term for replica in replicas] == terms
    assert cluster.leader is leader


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (UnappliableCommandError(Skip(7, 1, "ab"), b"{}", KeyError("planted")), "^the metadata c"),
        (AssertionError("planted"), "^broken invariant: AssertionError"),
    ],
)
def test_what_stops_the_node_says_why(
    monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    node = Node(1)
    reasons = node.broken

    def raising(_replica: Replica) -> None:
        raise error

    monkeypatch.setattr(Replica, "drain", raising)
    replica = next(iter(node.multiraft.replicas.values()))
    with pytest.raises(type(error)):
        node.multiraft.touch(replica.group)
    assert len(reasons) == 1
    assert re.search(says, reasons[0])
