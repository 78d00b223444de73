"""Placement: no two replicas on a broker or (where racks suffice) in a rack, and balance."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftmq.controller.placement import Candidate, Replicas, place
from raftmq.errors import ErrorCode, KafkaError
from raftmq.types import NodeId


def _candidates(racks: list[str | None]) -> list[Candidate]:
    return [Candidate(NodeId(i + 1), rack) for i, rack in enumerate(racks)]


def _spread(counts: list[int]) -> int:
    return max(counts) - min(counts)


def _check(
    candidates: list[Candidate],
    placed: tuple[Replicas, ...],
    factor: int,
    before: tuple[Replicas, ...],
) -> None:
    rack_of = {c.node_id: c.rack if c.rack is not None else f"#{c.node_id}" for c in candidates}
    racks = set(rack_of.values())
    for replicas in placed:
        assert len(replicas) == factor == len(set(replicas))
        used = {rack_of[n] for n in replicas}
        if len(racks) >= factor:
            assert len(used) == factor
    everything = before + placed
    leaders = [sum(r[0] == c.node_id for r in everything) for c in candidates]
    counts = [sum(c.node_id in r for r in everything) for c in candidates]
    sizes = [list(rack_of.values()).count(rack) for rack in racks]
    if len(racks) < factor or all(size * factor <= len(candidates) for size in sizes):
        assert _spread(counts) <= 1
    for rack in racks:  # even where racks are unequal, brokers of one rack are equal
        mine = [n for n, c in zip(counts, candidates, strict=True) if rack_of[c.node_id] == rack]
        assert _spread(mine) <= 1
    assert _spread(leaders) <= 1


@settings(max_examples=150, deadline=None)
@given(
    brokers=st.lists(
        st.tuples(st.sampled_from([None, "a", "b", "c"]), st.integers(-2, 40)),
        min_size=1,
        max_size=7,
    ),
    partitions=st.integers(1, 30),
    factor=st.integers(1, 7),
)
def test_no_broker_takes_more_than_it_has_room_for(
    brokers: list[tuple[str | None, int]], partitions: int, factor: int
) -> None:
    candidates = [Candidate(NodeId(i), rack, room=room) for i, (rack, room) in enumerate(brokers)]
    factor = min(factor, len(candidates))
    placed = place(candidates, partitions=partitions, replication_factor=factor)
    boundless = _candidates([rack for rack, _ in brokers])
    counts = [sum(c.node_id in replicas for replicas in placed) for c in candidates]
    assert all(len(replicas) == factor == len(set(replicas)) for replicas in placed)
    racks = {c.rack if c.rack is not None else f"#{c.node_id}" for c in candidates}
    if len(racks) < factor or len(racks) == len(candidates):  # spreading over racks takes no room
        rooms = sum(min(partitions, max(0, room)) for _, room in brokers)
        has_room = rooms >= partitions * factor
        is_kept = all(n <= max(0, room) for n, (_, room) in zip(counts, brokers, strict=True))
        assert is_kept == has_room
    if all(room >= partitions for _, room in brokers):
        again = place(boundless, partitions=partitions, replication_factor=factor)
        assert again == tuple(tuple(NodeId(n + 1) for n in replicas) for replicas in placed)


@settings(max_examples=150, deadline=None)
@given(
    racks=st.lists(st.sampled_from([None, "a", "b", "c"]), min_size=1, max_size=7),
    partitions=st.integers(1, 200),
    factor=st.integers(1, 7),
)
def test_placement_is_spread_and_balanced(
    racks: list[str | None], partitions: int, factor: int
) -> None:
    candidates = _candidates(racks)
    factor = min(factor, len(candidates))
    placed = place(candidates, partitions=partitions, replication_factor=factor)
    assert len(placed) == partitions
    _check(candidates, placed, factor, ())


@settings(max_examples=60, deadline=None)
@given(
    racks=st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=7),
    first=st.integers(1, 60),
    added=st.integers(1, 60),
    factor=st.integers(1, 3),
)
def test_added_partitions_keep_the_topic_balanced(
    racks: list[str | None], first: int, added: int, factor: int
) -> None:
    candidates = _candidates(racks)
    factor = min(factor, len(candidates))
    before = place(candidates, partitions=first, replication_factor=factor)
    placed = place(candidates, partitions=added, replication_factor=factor, of_topic=before)
    for replicas in placed:
        assert len(set(replicas)) == factor
    everything = before + placed
    for rack in set(racks):
        mine = [c.node_id for c in candidates if c.rack == rack]
        assert _spread([sum(n in r for r in everything) for n in mine]) <= 1


def test_small_topics_spread_by_the_load_of_the_others() -> None:
    candidates = _candidates([None] * 5)
    everything: tuple[Replicas, ...] = ()
    for _ in range(50):
        everything += place(candidates, partitions=1, replication_factor=2, elsewhere=everything)
    assert _spread([sum(c.node_id in r for r in everything) for c in candidates]) <= 1
    assert _spread([sum(r[0] == c.node_id for r in everything) for c in candidates]) <= 2


@pytest.mark.parametrize("factor", [0, 3])
def test_too_few_brokers(factor: int) -> None:
    with pytest.raises(KafkaError) as caught:
        place(_candidates([None, None]), partitions=1, replication_factor=factor)
    assert caught.value.code is ErrorCode.INVALID_REPLICATION_FACTOR
