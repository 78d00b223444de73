"""A topic that lists fewer partitions is read on by itself, each record by one member, once."""

from __future__ import annotations

from random import Random

import pytest

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey, Struct, decode_request, encode_response
from raftmq.protocol.compile import decode_response
from raftmq.types import TopicPartition
from raftmq_client.core.all_partitions import AllPartitions
from raftmq_client.core.assignors import (
    ASSIGNORS,
    Retired,
    Subscription,
    assign,
    assign_cooperative,
    decode_assignment,
    decode_subscription,
    encode_subscription,
    member_data,
)
from raftmq_client.core.fetcher import FetcherCore, FetcherOptions
from raftmq_client.core.metadata import (
    Broker,
    ClusterInfo,
    MetadataCore,
    PartitionInfo,
    TopicInfo,
    read_metadata,
)
from tests.client.test_group_core import Member

VIEW = "t.retired"
REST = {"t": Retired(VIEW, (4, 5))}
EAGER = member_data(None)


def keys(topic: str, *numbers: int) -> list[TopicPartition]:
    return [TopicPartition(topic, number) for number in numbers]


def parts(topic: str, *numbers: int, leader: int = 1) -> tuple[PartitionInfo, ...]:
    return tuple(PartitionInfo(topic, number, leader, 3) for number in numbers)


def cluster(listed: int, retired: tuple[int, ...] = (), *, leader: int = 1) -> ClusterInfo:
    topics = [
        TopicInfo(
            "t",
            None,
            False,
            parts("t", *range(listed)),
            retired=parts("t", *retired, leader=leader),
            retired_view=VIEW if retired else "",
        )
    ]
    if retired:
        topics.append(TopicInfo(VIEW, None, False, parts(VIEW, *range(max(retired) + 1))))
    else:
        topics.append(TopicInfo(VIEW, None, False, (), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
    return ClusterInfo("c", 1, (Broker(1, "h", 1),), tuple(topics))


# ---- metadata ----


def test_what_is_not_listed_has_a_leader_and_counts_for_no_producer() -> None:
    row = {"partition_index": 1, "leader_id": 1, "leader_epoch": 9}
    topic = {"name": "t", "partitions": [row | {"partition_index": 0}]}
    told = topic | {"retired_partitions": [row], "retired_view": VIEW}
    brokers = [{"node_id": 1, "host": "h", "port": 1}]
    body = encode_response(ApiKey.METADATA, 12, {"brokers": brokers, "topics": [told]})
    core = MetadataCore()
    core.apply(read_metadata(decode_response(ApiKey.METADATA, 12, body)), 0)
    assert core.leader("t", 1) == (1, 9)
    assert core.partition_count("t") == 1
    assert core.topics["t"].retired_view == VIEW
    assert [item.partition for item in core.topics["t"].readable] == [0, 1]


def test_a_retired_partition_without_a_leader_makes_nobody_ask_who_does_not_read_it() -> None:
    core = MetadataCore()
    core.want(["t"])
    core.calls(0)
    core._is_asking = False
    core.apply(cluster(4, (4, 5), leader=-1), 0)
    assert core.calls(100) == []


# ---- whoever reads all of a topic, in no group ----


def test_all_partitions_of_a_topic_are_also_those_that_it_lists_no_more() -> None:
    metadata = MetadataCore()
    fetcher = FetcherCore(FetcherOptions(), metadata)
    everything = AllPartitions(fetcher, metadata)
    everything.want(["t", VIEW])
    metadata.apply(cluster(6), 0)
    everything.calls(0)
    before = dict(fetcher.readers)
    assert list(before) == keys("t", *range(6))
    for info in (cluster(4, (4, 5)), cluster(6), cluster(5, (5,))):
        metadata.apply(info, 0)
        everything.calls(0)
        assert fetcher.readers == before, "and the view shows nothing again"
    late = FetcherCore(FetcherOptions(), metadata)
    everything = AllPartitions(late, metadata)
    everything.want(["t"])
    everything.calls(0)
    assert list(late.readers) == list(before)


def test_who_wants_only_the_view_reads_the_view() -> None:
    metadata = MetadataCore()
    fetcher = FetcherCore(FetcherOptions(), metadata)
    everything = AllPartitions(fetcher, metadata)
    everything.want([VIEW])
    metadata.apply(cluster(4, (4, 5)), 0)
    everything.calls(0)
    assert list(fetcher.readers) == keys(VIEW, *range(6))


# ---- assignors ----


@pytest.mark.parametrize("name", ASSIGNORS)
def test_what_is_listed_no_more_goes_to_members_that_can_read_it(name: str) -> None:
    """Others would ask for metadata for ever. Nobody reads the view beside it."""
    able = {name: Subscription(("t", VIEW), EAGER) for name in ("a", "c")}
    members = able | {"b": Subscription(("t", VIEW)), "d": Subscription((VIEW,))}
    result = assign(name, members, {"t": 4, VIEW: 6}, REST)
    given = [key for member in result.values() for key in member]
    assert sorted(given) == keys("t", *range(6))
    assert set(keys("t", 4, 5)) <= {*result["a"], *result["c"]}
    assert result["d"] == []
    assert max(map(len, result.values())) <= 3


@pytest.mark.parametrize("name", ASSIGNORS)
def test_where_no_member_can_the_view_is_read_as_any_topic(name: str) -> None:
    members = {"a": Subscription(("t", VIEW)), "b": Subscription(("t", VIEW))}
    counts = {"t": 4, VIEW: 6}
    assert assign(name, members, counts, REST) == assign(name, members, counts)


def test_who_has_a_number_of_the_view_gives_it_up_first() -> None:
    """The next member goes on where it committed, and not before."""
    old = Subscription(("t", VIEW), member_data(3), tuple(keys(VIEW, 4)))
    new = Subscription(("t",), member_data(3), tuple(keys("t", 0, 1)))
    members = {"a": evolve_to(old, ("t", VIEW), b"\0\0\0\3"), "b": new}
    first = assign_cooperative(members, {"t": 2, VIEW: 5}, {"t": Retired(VIEW, (4,))})
    assert TopicPartition("t", 4) not in [*first["a"], *first["b"]]
    members["a"] = Subscription(("t", VIEW), b"\0\0\0\4")
    members["b"] = Subscription(("t",), member_data(4), tuple(first["b"]))
    second = assign_cooperative(members, {"t": 2, VIEW: 5}, {"t": Retired(VIEW, (4,))})
    assert TopicPartition("t", 4) in second["b"]
    able = assign_cooperative({"a": old, "b": new}, {"t": 2}, {"t": Retired(VIEW, (4,))})
    assert able["a"] == keys("t", 4), "it goes on itself, under the other name"


def evolve_to(item: Subscription, topics: tuple[str, ...], data: bytes) -> Subscription:
    return Subscription(topics, data, item.owned)


@pytest.mark.parametrize("seed", range(30))
def test_a_cooperative_group_reads_through_shrinks_and_growths(seed: int) -> None:
    """Nothing has two readers, all has one after two rounds, and nothing moves for a shrink."""
    random = Random(seed)
    width, listed, generation = 8, 8, 0
    held: dict[str, list[TopicPartition]] = {}
    names = {"a"}
    for _ in range(12):
        is_shrink = bool(held) and random.random() < 0.6
        if is_shrink:
            listed = random.randint(1, width)
        else:
            names = set(random.sample("abcde", random.randint(1, 5)))
        retired = {"t": Retired(VIEW, tuple(range(listed, width)))}
        settled = held
        for _round in range(2):
            generation += 1
            members = {
                name: Subscription(("t",), member_data(generation), tuple(held.get(name, ())))
                for name in sorted(names)
            }
            result = assign_cooperative(members, {"t": listed}, retired)
            for name, given in result.items():
                others = [key for other in names - {name} for key in held.get(other, ())]
                assert not set(given) & set(others), "given before it was given up"
            held = result
        assert sorted(key for given in held.values() for key in given) == keys("t", *range(width))
        if is_shrink:
            assert held == settled


# ---- the group's leader ----


def of_topics(*topics: str, is_able: bool = True) -> bytes:
    return encode_subscription(Subscription(topics, EAGER if is_able else b""))


def lead(member: Member, info: ClusterInfo, *members: bytes) -> dict[str, list[TopicPartition]]:
    """Join as the leader of these and assign; what each was given."""
    call = member.due()
    assert call.api == ApiKey.JOIN_GROUP
    request = decode_request(ApiKey.JOIN_GROUP, 5, memoryview(b"".join(call.body(5))))
    assert decode_subscription(bytes(request.protocols[0].metadata)).reads_retired
    joined = [Struct(member_id=f"m{n or ''}", metadata=data) for n, data in enumerate(members)]
    member.say(
        call,
        generation_id=1,
        protocol_name="range",
        leader="m",
        member_id="m",
        members=joined,
    )
    member.metadata.apply(info, member.now)
    call = member.due()
    assert call.api == ApiKey.SYNC_GROUP
    synced = decode_request(ApiKey.SYNC_GROUP, 3, memoryview(b"".join(call.body(3))))
    given = {
        item.member_id: list(decode_assignment(bytes(item.assignment)))
        for item in synced.assignments
    }
    member.say(call, assignment=next(bytes(i.assignment) for i in synced.assignments))
    member.look_up()
    member.core.events.clear()
    return given


def test_a_shrink_disturbs_no_group_whose_members_can_read_on() -> None:
    member = Member()
    member.find()
    given = lead(member, cluster(6), of_topics("t"), of_topics("t"))
    for info in (cluster(4, (4, 5)), cluster(5, (5,)), cluster(6), cluster(4, (4, 5))):
        member.metadata.apply(info, member.now)
        member.core.calls(member.now)
        assert not member.core.events
    assert sorted(key for item in given.values() for key in item) == keys("t", *range(6))
    member.metadata.apply(cluster(4, (5,)), member.now)  # one is gone
    member.core.calls(member.now)
    assert member.core.events


def test_a_shrink_moves_what_a_member_cannot_read_on() -> None:
    member = Member()
    member.find()
    given = lead(member, cluster(6), of_topics("t"), of_topics("t", is_able=False))
    assert given == {"m": keys("t", 0, 1, 2), "m1": keys("t", 3, 4, 5)}
    member.metadata.apply(cluster(4, (4, 5)), member.now)
    member.core.calls(member.now)
    assert member.core.events
    member.core.gave_up()
    member.core.events.clear()
    again = lead(member, cluster(4, (4, 5)), of_topics("t"), of_topics("t", is_able=False))
    assert again == {"m": keys("t", 0, 1, 4, 5), "m1": keys("t", 2, 3)}


def test_a_topic_that_is_refused_has_nothing_to_read_on() -> None:
    member = Member()
    member.find()
    lead(member, cluster(4, (4, 5)), of_topics("t"))
    gone = TopicInfo("t", None, False, (), error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    member.metadata.apply(ClusterInfo("c", 1, (Broker(1, "h", 1),), (gone,)), member.now)
    member.core.calls(member.now)
    assert member.core.events
