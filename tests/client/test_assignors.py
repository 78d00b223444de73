"""Every partition has exactly one reader, and members' bytes are read with care."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmq.errors import RemoteProtocolError
from raftmq.types import TopicPartition
from raftmq_client.core.assignors import (
    ASSIGNORS,
    Subscription,
    assign,
    assign_cooperative,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_generation,
    encode_subscription,
)

topics = st.sampled_from(["a", "b", "c"])
members = st.dictionaries(
    st.sampled_from([f"m{i}" for i in range(6)]),
    st.lists(topics, min_size=1, max_size=3, unique=True).map(lambda t: Subscription(tuple(t))),
    min_size=1,
)
partitions = st.lists(st.builds(TopicPartition, topics, st.integers(0, 99)), unique=True)


@pytest.mark.parametrize("name", sorted(ASSIGNORS))
@given(members, st.dictionaries(topics, st.integers(0, 20)))
def test_each_partition_has_one_reader_who_asked_for_it(
    name: str, members: dict[str, Subscription], counts: dict[str, int]
) -> None:
    result = assign(name, members, counts)
    given_out = [key for keys in result.values() for key in keys]
    wanted = {topic for item in members.values() for topic in item.topics}
    expected = {TopicPartition(t, p) for t in wanted for p in range(counts.get(t, 0))}
    assert len(given_out) == len(expected)
    assert set(given_out) == expected
    for member, keys in result.items():
        assert {key.topic for key in keys} <= set(members[member].topics)


def test_range_gives_runs_and_the_first_members_one_more() -> None:
    members = {name: Subscription(("t",)) for name in ("c", "a", "b")}
    result = assign("range", members, {"t": 8})
    assert {name: [key.partition for key in keys] for name, keys in result.items()} == {
        "a": [0, 1, 2],
        "b": [3, 4, 5],
        "c": [6, 7],
    }


def test_round_robin_deals_one_by_one_over_topics() -> None:
    members = {name: Subscription(("t", "u")) for name in ("a", "b")}
    result = assign("roundrobin", members, {"t": 3, "u": 3})
    assert result["a"] == [("t", 0), ("t", 2), ("u", 1)]
    assert result["b"] == [("t", 1), ("u", 0), ("u", 2)]


def test_an_assignor_nobody_offered_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="'sticky'"):
        assign("sticky", {}, {})


@given(st.lists(topics, unique=True), st.binary(max_size=20), partitions)
def test_subscriptions_round_trip(
    names: list[str], user_data: bytes, owned: list[TopicPartition]
) -> None:
    sent = Subscription(tuple(names), user_data, tuple(owned))
    read = decode_subscription(encode_subscription(sent))
    assert (read.topics, read.user_data) == (sent.topics, sent.user_data)
    assert set(read.owned) == set(owned)


@given(partitions)
def test_assignments_round_trip(keys: list[TopicPartition]) -> None:
    assert set(decode_assignment(encode_assignment(keys))) == set(keys)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for decode in (decode_subscription, decode_assignment):
        try:
            decode(data)
        except RemoteProtocolError:
            continue


def test_a_member_without_assignment_has_nothing() -> None:
    assert decode_assignment(b"") == ()


def test_kafka_pythons_subscription_is_understood() -> None:
    from kafka.protocol.consumer.metadata import ConsumerProtocolSubscription

    theirs = ConsumerProtocolSubscription(
        topics=["x", "y"], user_data=b"u", owned_partitions=[], version=1
    )
    read = decode_subscription(bytes(theirs.encode()))
    assert (read.topics, read.user_data) == (("x", "y"), b"u")


groups = st.lists(
    st.sets(st.sampled_from([f"m{i}" for i in range(5)]), min_size=1), min_size=1, max_size=5
)


@given(groups, st.integers(0, 12))
def test_cooperative_rounds_move_little_and_end_even(groups: list[set[str]], count: int) -> None:
    """No partition ever has two readers; two rounds settle; who stays keeps what is even."""
    held: dict[str, list[TopicPartition]] = {}
    everything = {TopicPartition("t", p) for p in range(count)}
    generation = 0
    for names in groups:
        for _ in range(2):
            generation += 1
            members = {
                name: Subscription(("t",), encode_generation(generation), tuple(held.get(name, ())))
                for name in sorted(names)
            }
            result = assign_cooperative(members, {"t": count})
            for name, keys in result.items():
                others = [key for other in names - {name} for key in held.get(other, ())]
                assert not set(keys) & set(others), "given before it was given up"
            before, held = held, result
        sizes = [len(keys) for keys in held.values()]
        assert {key for keys in held.values() for key in keys} == everything
        assert max(sizes) - min(sizes) <= 1
        for name in names & set(before):
            assert len(set(before[name]) & set(held[name])) >= min(len(before[name]), *sizes)


def test_of_two_claims_the_later_generation_counts() -> None:
    key = TopicPartition("t", 0)
    old = Subscription(("t",), encode_generation(1), (key,))
    new = Subscription(("t",), encode_generation(2), (key,))
    assert assign_cooperative({"a": old, "b": new}, {"t": 1}) == {"a": [], "b": [key]}
