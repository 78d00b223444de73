"""Membership, step by step: nobody reads what another member may read already."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey, Struct, decode_request
from raftmq.types import TopicPartition
from raftmq_client.core.assignors import (
    Subscription,
    decode_assignment,
    decode_generation,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from raftmq_client.core.call import Call
from raftmq_client.core.client import COORDINATOR_LINKS
from raftmq_client.core.group import GroupCore
from raftmq_client.core.group_admin import CommittedOffset
from raftmq_client.core.group_state import (
    UNKNOWN_TOPIC_TRIES,
    Assigned,
    GaveUp,
    GroupOptions,
    MemberState,
    is_outdated,
)
from raftmq_client.core.metadata import (
    Broker,
    ClusterInfo,
    MetadataCore,
    PartitionInfo,
    TopicInfo,
)
from raftmq_client.errors import (
    BrokerError,
    ConnectionLostError,
    Outcome,
    PollIntervalError,
    UsageError,
)

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


def cluster(count: int) -> ClusterInfo:
    parts = tuple(PartitionInfo("t", p, 1, 0) for p in range(count))
    return ClusterInfo("c", 1, (Broker(1, "h", 1),), (TopicInfo("t", None, False, parts),))


class Member:
    """A member, its clock, and a coordinator that says what the test wants."""

    def __init__(self, **options: object) -> None:
        self.metadata = MetadataCore()
        self.metadata.apply(cluster(2), 0)
        self.core = GroupCore("g", GroupOptions(**options), self.metadata)  # type: ignore[arg-type]
        self.now = 0.0
        self.core.subscribe(["t"], 0)

    def due(self, ms: float = 0) -> Call:
        self.now += ms
        (call,) = self.core.calls(self.now)
        return call

    def say(self, call: Call, **fields: object) -> None:
        fields.setdefault("error_code", 0)
        call.complete(Struct(**fields), None, self.now)

    def find(self) -> None:
        call = self.due()
        assert call.api == ApiKey.FIND_COORDINATOR
        place = Struct(node_id=1, host="h", port=1, error_code=0, error_message=None)
        call.complete(Struct(coordinators=[place]), None, self.now)

    def join(self, *, leader: str = "m", generation: int = 1) -> None:
        call = self.due()
        assert call.api == ApiKey.JOIN_GROUP
        metadata = _subscription()
        self.say(
            call,
            generation_id=generation,
            protocol_name="range",
            leader=leader,
            member_id="m",
            members=[Struct(member_id="m", metadata=metadata)] if leader == "m" else [],
        )
        if leader == "m":
            self.metadata.apply(cluster(2), self.now)  # asked for by the leader

    def sync(self, *partitions: TopicPartition) -> Call:
        call = self.due()
        assert call.api == ApiKey.SYNC_GROUP
        self.say(call, assignment=encode_assignment(partitions))
        return call

    def look_up(self, **committed: int) -> None:
        call = self.due()
        assert call.api == ApiKey.OFFSET_FETCH
        parts = [
            Struct(partition_index=int(p[1:]), committed_offset=o, metadata="", error_code=0)
            for p, o in committed.items()
        ]
        group = Struct(error_code=0, topics=[Struct(name="t", partitions=parts)])
        call.complete(Struct(groups=[group]), None, self.now)

    def settle(self) -> Member:
        self.find()
        self.join()
        self.sync(T0, T1)
        self.look_up(p0=7)
        return self


def _subscription() -> bytes:
    return encode_subscription(Subscription(("t",)))


def test_a_leader_assigns_and_everybody_starts_at_committed_offsets() -> None:
    member = Member()
    member.find()
    member.join()
    call = member.due()
    assert call.api == ApiKey.SYNC_GROUP
    assert call.node == 1 + COORDINATOR_LINKS, "a parked join must not hold up fetches"
    member.say(call, assignment=encode_assignment([T0]))
    member.look_up(p0=7)
    assert member.core.state is MemberState.STABLE
    assert list(member.core.events) == [Assigned((T0,), {T0: CommittedOffset(7)})]


def test_a_follower_syncs_without_assignments() -> None:
    member = Member()
    member.find()
    member.join(leader="somebody else")
    member.sync(T1)
    member.look_up()
    assert list(member.core.events) == [Assigned((T1,), {})]


def test_partitions_are_given_up_before_joining_again() -> None:
    member = Member().settle()
    member.core.events.clear()
    beat = member.due(3_000)
    assert beat.api == ApiKey.HEARTBEAT
    member.say(beat, error_code=ErrorCode.REBALANCE_IN_PROGRESS)
    assert list(member.core.events) == [GaveUp((T0, T1), is_lost=False)]
    assert member.core.calls(member.now) == [], "the consumer has not given them up yet"
    beat = member.due(3_000)
    assert beat.api == ApiKey.HEARTBEAT, "still a member meanwhile"
    member.say(beat, error_code=ErrorCode.REBALANCE_IN_PROGRESS)
    assert len(member.core.events) == 1
    member.core.gave_up()
    assert member.due().api == ApiKey.JOIN_GROUP


@pytest.mark.parametrize("code", [ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION])
def test_a_member_put_out_has_lost_its_partitions(code: ErrorCode) -> None:
    member = Member().settle()
    member.core.events.clear()
    member.say(member.due(3_000), error_code=code)
    assert list(member.core.events) == [GaveUp((T0, T1), is_lost=True)]
    assert member.core.member_id == ("" if code is ErrorCode.UNKNOWN_MEMBER_ID else "m")
    assert member.core.generation == -1


def test_a_consumer_that_stops_polling_leaves() -> None:
    member = Member(max_poll_interval_ms=10_000.0, heartbeat_interval_ms=60_000.0).settle()
    member.core.events.clear()
    member.now = 10_000.0
    assert member.due().api == ApiKey.LEAVE_GROUP, "others need not wait for the session's end"
    assert list(member.core.events) == [GaveUp((T0, T1), is_lost=True)]
    assert member.core.state is MemberState.IDLE
    assert isinstance(member.core.error, PollIntervalError)
    assert "max_poll_interval_ms" in str(member.core.error)
    member.core.polled(member.now)
    assert member.core.calls(member.now) == [], "first the consumer has to hear of it"
    member.core.error = None
    member.core.gave_up()
    member.core.polled(member.now)
    assert member.due().api == ApiKey.JOIN_GROUP


def cooperative() -> Member:
    return Member(assignors=("cooperative-sticky",))


def owned_in(call: Call) -> tuple[tuple[TopicPartition, ...], int]:
    """What a JoinGroup says that its member has, and since which generation."""
    assert call.api == ApiKey.JOIN_GROUP
    request = decode_request(ApiKey.JOIN_GROUP, 5, memoryview(b"".join(call.body(5))))
    subscription = decode_subscription(bytes(request.protocols[0].metadata))
    return subscription.owned, decode_generation(subscription.user_data)


def rejoin(member: Member, call: Call, generation: int) -> None:
    member.say(
        call,
        generation_id=generation,
        protocol_name="cooperative-sticky",
        leader="somebody else",
        member_id="m",
        members=[],
    )


def test_a_cooperative_member_reads_on_and_gives_up_only_what_moves() -> None:
    member = cooperative().settle()
    assert list(member.core.events) == [
        Assigned((T0, T1), {T0: CommittedOffset(7)}, is_incremental=True)
    ]
    member.core.events.clear()
    member.say(member.due(3_000), error_code=ErrorCode.REBALANCE_IN_PROGRESS)
    assert not member.core.events, "nothing is given up before it is known what moves"
    join = member.due()
    assert owned_in(join) == ((T0, T1), 1)
    rejoin(member, join, 2)
    member.sync(T1)
    assert list(member.core.events) == [GaveUp((T0,), is_lost=False)]
    member.core.events.clear()
    assert member.core.state is MemberState.GIVING_UP
    member.core.gave_up()
    join = member.due()  # so that the other one gets it
    assert owned_in(join) == ((T1,), 2)
    rejoin(member, join, 3)
    member.sync(T1)
    assert list(member.core.events) == [Assigned((), {}, is_incremental=True)]
    assert member.core.owned == (T1,)
    assert member.core.state is MemberState.STABLE


def test_a_cooperative_member_looks_up_only_what_is_new() -> None:
    member = cooperative()
    member.find()
    member.join(leader="somebody else")
    member.sync(T0)
    member.look_up(p0=1)
    member.core.events.clear()
    member.say(member.due(3_000), error_code=ErrorCode.REBALANCE_IN_PROGRESS)
    rejoin(member, member.due(), 2)
    member.sync(T0, T1)
    member.look_up(p1=5)
    assert list(member.core.events) == [Assigned((T1,), {T1: CommittedOffset(5)}, True)]
    assert member.core.owned == (T0, T1)


def test_a_cooperative_member_that_was_thrown_out_loses_everything() -> None:
    member = cooperative().settle()
    member.core.events.clear()
    member.say(member.due(3_000), error_code=ErrorCode.UNKNOWN_MEMBER_ID)
    assert list(member.core.events) == [GaveUp((T0, T1), is_lost=True)]
    member.core.gave_up()
    assert owned_in(member.due())[0] == ()


U0 = TopicPartition("u", 0)


@pytest.mark.parametrize("chosen_while", ["stable", "joining", "giving up"])
def test_a_cooperative_member_gives_a_topic_up_before_it_joins_without_it(
    chosen_while: str,
) -> None:
    """Others may get its partitions in the very generation that this join makes (KIP-429)."""
    member = cooperative()
    member.core.subscribe(["t", "u"], 0)
    member.find()
    member.join(leader="somebody else")
    member.sync(T0, U0)
    member.look_up(p0=1)
    member.core.events.clear()
    join = None
    if chosen_while != "stable":
        member.say(member.due(3_000), error_code=ErrorCode.REBALANCE_IN_PROGRESS)
        join = member.due()
    if chosen_while == "giving up":
        assert join is not None
        rejoin(member, join, 2)
        member.sync(U0)
        (event,) = member.core.events
        assert event == GaveUp((T0,), is_lost=False)
    member.core.subscribe(["t"], member.now)
    if chosen_while == "joining":
        assert join is not None
        rejoin(member, join, 2)
    if chosen_while == "giving up":
        member.core.gave_up(member.core.events.popleft())  # type: ignore[arg-type]
    assert member.core.calls(member.now) == [], "first the consumer stops reading it"
    (event,) = member.core.events
    assert event == GaveUp((U0,), is_lost=False)
    assert member.due(3_000).api == ApiKey.HEARTBEAT, "a member meanwhile"
    member.core.gave_up(event)
    assert U0 not in member.core.owned


def test_a_pattern_that_no_longer_matches_gives_up_first() -> None:
    member = cooperative()
    member.core.subscribe(re.compile("[tu]"), 0)
    member.metadata.apply(named("t", "u"), 0)
    member.find()
    member.join(leader="somebody else")
    member.sync(T0, U0)
    member.look_up(p0=1)
    member.core.events.clear()
    del member.metadata.topics["u"]
    member.metadata.apply(named("t"), 0)
    assert member.core.calls(member.now) == []
    assert list(member.core.events) == [GaveUp((U0,), is_lost=False)]


def test_a_member_put_out_while_it_gives_up_has_lost_that_too() -> None:
    member = Member().settle()
    member.core.events.clear()
    pending = member.core.commit({T0: CommittedOffset(9)}, member.now)
    commit = member.due()
    commit.sent = True
    later = member.core.commit({TopicPartition("other", 0): CommittedOffset(9)}, member.now)
    member.say(member.due(3_000), error_code=ErrorCode.REBALANCE_IN_PROGRESS)
    event = member.core.events.popleft()
    assert event == GaveUp((T0, T1), is_lost=False)
    (beat,) = member.core.calls(member.now + 3_000)
    member.say(beat, error_code=ErrorCode.UNKNOWN_MEMBER_ID)
    assert event == GaveUp((T0, T1), is_lost=True), "while it is being told"
    assert not member.core.events, "and not once more"
    assert pending.error is not None
    assert pending.error.outcome is Outcome.UNKNOWN
    assert isinstance(later.error, BrokerError)
    assert later.error.outcome is Outcome.FAILED
    refused = member.core.commit({T0: CommittedOffset(9)}, member.now)
    assert refused.error is not None
    assert is_outdated(refused.error)
    member.core.gave_up(event)  # type: ignore[arg-type]
    (call,) = member.core.calls(member.now)
    assert call.api == ApiKey.JOIN_GROUP, "no commit without a generation"


def test_events_are_confirmed_one_by_one() -> None:
    """A member does not join while its consumer still reads what the second event asks for."""
    member = cooperative().settle()
    member.core.events.clear()
    member.say(member.due(3_000), error_code=ErrorCode.REBALANCE_IN_PROGRESS)
    rejoin(member, member.due(), 2)
    member.sync(T1)
    beat = member.due(3_000)
    member.say(beat, error_code=ErrorCode.UNKNOWN_MEMBER_ID)
    first, second = member.core.events
    assert (first, second) == (GaveUp((T0,), is_lost=True), GaveUp((T1,), is_lost=True))
    member.core.gave_up(first)  # type: ignore[arg-type]
    assert member.core.calls(member.now) == []
    member.core.gave_up(second)  # type: ignore[arg-type]
    assert member.due().api == ApiKey.JOIN_GROUP


def test_a_pattern_follows_the_topics_that_come_and_go() -> None:
    member = Member()
    member.core.subscribe(re.compile("log-.*"), 0)
    member.metadata.apply(named("log-a", "other"), 0)
    member.find()
    call = member.due()
    assert subscribed(call) == ("log-a",)
    rejoin(member, call, 1)
    member.sync()
    member.metadata.apply(named("log-a", "log-b", "__log-c"), 0)
    assert subscribed(member.due()) == ("log-a", "log-b")


def named(*names: str) -> ClusterInfo:
    topics = tuple(
        TopicInfo(name, None, name.startswith("__"), (PartitionInfo(name, 0, 1, 0),))
        for name in names
    )
    return ClusterInfo("c", 1, (Broker(1, "h", 1),), topics)


def subscribed(call: Call) -> tuple[str, ...]:
    assert call.api == ApiKey.JOIN_GROUP
    request = decode_request(ApiKey.JOIN_GROUP, 5, memoryview(b"".join(call.body(5))))
    return decode_subscription(bytes(request.protocols[0].metadata)).topics


def test_a_topic_that_grew_makes_the_leader_rebalance() -> None:
    member = Member().settle()
    member.core.events.clear()
    member.metadata.apply(cluster(3), member.now)
    member.core.calls(member.now)
    assert list(member.core.events) == [GaveUp((T0, T1), is_lost=False)]


def test_the_member_id_that_the_coordinator_gives_is_used() -> None:
    member = Member()
    member.find()
    member.say(member.due(), error_code=ErrorCode.MEMBER_ID_REQUIRED, member_id="given")
    call = member.due()
    assert call.api == ApiKey.JOIN_GROUP
    assert member.core.member_id == "given"


def test_a_lost_coordinator_is_looked_for_after_a_pause_and_membership_kept() -> None:
    member = Member().settle()
    member.due(3_000).complete(None, ConnectionLostError("gone"), member.now)
    assert member.core.calls(member.now) == []
    assert member.core.deadline() > member.now
    member.now = member.core.deadline()
    member.find()
    assert member.core.state is MemberState.STABLE
    assert member.core.member_id == "m"


def test_a_coordinator_that_is_found_and_refuses_is_told_of_and_asked_ever_more_rarely() -> None:
    """That it is found again each time is no success."""
    member = Member()
    pauses = []
    for _ in range(6):
        member.find()
        call = member.due()
        assert call.api == ApiKey.JOIN_GROUP
        member.say(call, error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE, member_id="")
        assert member.core.calls(member.now) == []
        pauses.append(member.core.deadline() - member.now)
        member.now = member.core.deadline()
    assert pauses == [50, 100, 200, 400, 800, 1_000]
    assert "COORDINATOR_NOT_AVAILABLE" in member.core.waits_for
    member.settle()
    assert not member.core.waits_for


def test_a_group_whose_coordinator_is_back_is_waited_for_no_longer() -> None:
    member = Member().settle()
    for _ in range(2):
        call = member.due(3_000)
        assert call.api == ApiKey.HEARTBEAT
        member.say(call, error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE)
        member.now = member.core.deadline()
        member.find()
    assert "does not get on" in member.core.waits_for
    member.say(member.due(3_000))
    assert not member.core.waits_for


def test_a_commit_carries_the_generation_and_outlives_its_coordinator() -> None:
    member = Member().settle()
    pending = member.core.commit({T0: CommittedOffset(9)}, member.now)
    call = member.due()
    assert call.api == ApiKey.OFFSET_COMMIT
    item = Struct(partition_index=0, error_code=ErrorCode.NOT_COORDINATOR)
    member.say(call, topics=[Struct(name="t", partitions=[item])])
    assert not pending.is_done
    member.now = member.core.deadline()
    member.find()
    item = Struct(partition_index=0, error_code=0)
    (call,) = member.core.calls(member.now)
    member.say(call, topics=[Struct(name="t", partitions=[item])])
    assert pending.is_done
    assert pending.error is None


def test_a_commit_of_an_old_generation_is_refused_for_good() -> None:
    member = Member().settle()
    pending = member.core.commit({T0: CommittedOffset(9)}, member.now)
    item = Struct(partition_index=0, error_code=ErrorCode.ILLEGAL_GENERATION)
    member.say(member.due(), topics=[Struct(name="t", partitions=[item])])
    assert isinstance(pending.error, BrokerError)
    assert pending.error.outcome is Outcome.FAILED


def test_an_unanswered_commit_is_unknown() -> None:
    member = Member(request_timeout_ms=1_000).settle()
    pending = member.core.commit({T0: CommittedOffset(9)}, member.now)
    call = member.due()
    call.sent = True
    call.complete(None, ConnectionLostError("gone"), member.now)
    member.now += 1_001
    member.core.calls(member.now)
    assert pending.error is not None
    assert pending.error.outcome is Outcome.UNKNOWN


def test_a_commit_whose_time_is_over_while_it_is_on_its_way_is_unknown() -> None:
    member = Member(request_timeout_ms=1_000).settle()
    pending = member.core.commit({T0: CommittedOffset(9)}, member.now)
    member.due().sent = True
    member.now += 1_001
    member.core.calls(member.now)
    assert pending.was_sent
    assert pending.error is not None
    assert pending.error.outcome is Outcome.UNKNOWN


def test_no_commit_of_partitions_that_were_given_up_is_sent_in_a_later_generation() -> None:
    """It would put the group back behind what their next reader has committed meanwhile."""
    member = Member().settle()
    pending = member.core.commit({T0: CommittedOffset(9)}, member.now)
    other = member.core.commit({TopicPartition("other", 0): CommittedOffset(1)}, member.now)
    commit = member.due()
    commit.sent = True
    member.say(member.due(3_000), error_code=ErrorCode.REBALANCE_IN_PROGRESS)
    member.core.gave_up()
    item = Struct(partition_index=0, error_code=ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
    member.say(commit, topics=[Struct(name="t", partitions=[item])])
    assert isinstance(pending.error, BrokerError)
    assert is_outdated(pending.error)
    assert pending.error.outcome is Outcome.UNKNOWN, "nobody knows what became of the first try"
    member.now = member.core.deadline()
    calls = member.core.calls(member.now)
    assert [call.api for call in calls] == [ApiKey.OFFSET_COMMIT, ApiKey.JOIN_GROUP]
    assert not other.is_done


@pytest.mark.parametrize("joins", [True, False])
def test_topics_that_are_chosen_while_joining_are_not_forgotten(joins: bool) -> None:
    member = Member()
    member.find()
    if not joins:
        member.join()
    call = member.due()
    member.core.subscribe(["t", "u"], member.now)
    assert member.core.calls(member.now) == [], "one thing at a time"
    member.say(
        call,
        generation_id=1,
        protocol_name="range",
        leader="m",
        member_id="m",
        members=[Struct(member_id="m", metadata=_subscription())],
        assignment=encode_assignment([T0]),
    )
    call = member.due()
    assert call.api == ApiKey.JOIN_GROUP
    request = decode_request(ApiKey.JOIN_GROUP, 9, memoryview(b"".join(call.body(9))))
    assert decode_subscription(bytes(request.protocols[0].metadata)).topics == ("t", "u")
    assert not member.core.events


def test_a_member_that_was_replaced_reads_no_longer() -> None:
    member = Member(instance_id="fixed").settle()
    member.core.events.clear()
    member.say(member.due(3_000), error_code=ErrorCode.FENCED_INSTANCE_ID)
    assert list(member.core.events) == [GaveUp((T0, T1), is_lost=True)]
    assert isinstance(member.core.error, BrokerError)
    member.core.polled(member.now)
    assert member.core.calls(member.now) == [], "it does not come back"


def test_leaving_tells_the_coordinator_unless_the_member_is_static() -> None:
    finish: Callable[..., None] = lambda *_: None  # noqa: E731
    call = Member().settle().core.leave(finish)
    assert call is not None
    assert call.api == ApiKey.LEAVE_GROUP
    assert Member(instance_id="fixed").settle().core.leave(finish) is None


def test_an_unknown_assignor_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="'sticky'"):
        GroupCore("g", GroupOptions(assignors=("sticky",)), MetadataCore())


def test_what_a_leader_sends_is_what_members_read() -> None:
    member = Member()
    member.find()
    member.join()
    call = member.due()
    request = b"".join(bytes(piece) for piece in call.body(5))
    from raftmq.protocol import decode_request

    (mine,) = decode_request(ApiKey.SYNC_GROUP, 5, request).assignments
    assert decode_assignment(bytes(mine.assignment)) == (T0, T1)


def test_a_member_that_wants_an_impossible_topic_gets_the_rest() -> None:
    member = Member()
    member.find()
    call = member.due()
    wanted = encode_subscription(Subscription(("t", "no such/topic", "")))
    other = Struct(member_id="m", metadata=wanted)
    member.say(
        call,
        generation_id=1,
        protocol_name="range",
        leader="m",
        member_id="m",
        members=[other],
    )
    member.metadata.apply(cluster(2), member.now)
    member.sync(T0, T1)
    member.look_up(p0=7)
    assert member.core.owned == (T0, T1)


def test_an_assignment_of_an_impossible_topic_is_a_damaged_answer() -> None:
    member = Member()
    member.find()
    member.join(leader="other")
    member.sync(T0, TopicPartition("no such/topic", 0))
    assert member.core.state is MemberState.UNJOINED
    assert member.core.owned == ()


def test_a_group_that_may_not_be_used_is_told_at_once() -> None:
    """Found out while its coordinator is looked for; asking again would never end."""
    member = Member()
    saved = member.core.committed([T0], member.now)
    call = member.due()
    assert call.api == ApiKey.FIND_COORDINATOR
    refused = Struct(
        node_id=-1,
        host="",
        port=-1,
        error_code=ErrorCode.GROUP_AUTHORIZATION_FAILED,
        error_message="no",
    )
    call.complete(Struct(coordinators=[refused]), None, member.now)
    assert isinstance(saved.error, BrokerError)
    assert isinstance(member.core.error, BrokerError)
    assert member.core.error.code is ErrorCode.GROUP_AUTHORIZATION_FAILED
    assert member.core.state is MemberState.IDLE
    assert member.core.calls(member.now + 10_000) == []


def test_a_topic_whose_offsets_may_not_be_read_puts_the_member_out() -> None:
    member = Member()
    member.find()
    member.join()
    member.sync(T0)
    call = member.due()
    assert call.api == ApiKey.OFFSET_FETCH
    part = Struct(
        partition_index=0,
        committed_offset=-1,
        metadata="",
        error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    )
    group = Struct(error_code=0, topics=[Struct(name="t", partitions=[part])])
    call.complete(Struct(groups=[group]), None, member.now)
    assert isinstance(member.core.error, BrokerError)
    assert member.core.error.code is ErrorCode.TOPIC_AUTHORIZATION_FAILED
    assert member.core.calls(member.now + 10_000) == []


def test_a_commit_for_a_topic_that_is_gone_fails_and_holds_nobody_up() -> None:
    member = Member().settle()
    gone = member.core.commit({TopicPartition("gone", 0): CommittedOffset(3)}, member.now)
    later = member.core.commit({T0: CommittedOffset(9)}, member.now)
    part = Struct(partition_index=0, error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    for _ in range(UNKNOWN_TOPIC_TRIES):
        assert not gone.is_done, "it may be so new that the coordinator learns of it in a moment"
        call = member.due()
        call.complete(Struct(topics=[Struct(name="gone", partitions=[part])]), None, member.now)
        member.now = member.core.deadline()
    assert member.now < 2_000
    assert isinstance(gone.error, BrokerError)
    call = member.due()
    assert call.api == ApiKey.OFFSET_COMMIT
    part = Struct(partition_index=0, error_code=0)
    call.complete(Struct(topics=[Struct(name="t", partitions=[part])]), None, member.now)
    assert later.is_done
    assert later.error is None
