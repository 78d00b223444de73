"""Who leads: epochs never go back, a known leader is never forgotten, news merge in any order."""

from __future__ import annotations

from uuid import UUID

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from raftmq.controller.leaders import LeaderRow, LeaderTable, decode_rows, encode_rows
from raftmq.errors import RemoteProtocolError
from raftmq.metadata.image import PartitionImage
from raftmq.types import LeaderEpoch, NodeId, TopicId

TOPIC = TopicId(UUID(int=7))

ROWS = st.builds(
    LeaderRow,
    topic_id=st.just(TOPIC),
    partition=st.integers(0, 2),
    leader_epoch=st.integers(0, 4).map(LeaderEpoch),
    revision=st.integers(0, 3),
    leader_id=st.integers(1, 3).map(NodeId),
    isr=st.lists(st.integers(1, 3).map(NodeId), max_size=3).map(tuple),
    voters=st.lists(st.integers(1, 3).map(NodeId), max_size=3).map(tuple),
)


def _led(table: LeaderTable, epoch: int, *, leader: int = 1, isr: tuple[int, ...] = (1, 2)) -> bool:
    row = table.led(
        TOPIC,
        0,
        leader=NodeId(leader),
        leader_epoch=LeaderEpoch(epoch),
        isr=[NodeId(n) for n in isr],
        voters=[NodeId(1), NodeId(2), NodeId(3)],
    )
    return row is not None


def test_the_next_life_of_a_partition_begins_again_with_low_epochs() -> None:
    table = LeaderTable()
    where = TOPIC, 0
    first = LeaderRow(*where, LeaderEpoch(9), 0, NodeId(1), (), (), creation_epoch=4)
    older = LeaderRow(*where, LeaderEpoch(8), 0, NodeId(3), (), ())
    second = LeaderRow(*where, LeaderEpoch(1), 0, NodeId(2), (), (), creation_epoch=7)
    assert table.merge([first, older]) == [first], "an older node does not say of which life it is"
    assert table.merge([second]) == [second]
    late = LeaderRow(*where, LeaderEpoch(10), 0, NodeId(1), (), (), creation_epoch=4)
    assert table.merge([late]) == []
    assert table.get(*where) == second
    assert decode_rows(encode_rows([second]), second.leader_id) == [second]


def test_who_led_an_earlier_life_leads_nothing_of_the_next() -> None:
    """Clients would be sent to a node that has nothing of it."""
    table = LeaderTable()
    where = TOPIC, 0
    partition = PartitionImage(0, 7, (NodeId(2),), (), (NodeId(2),))
    assert table.of(TOPIC, partition) is None
    old = LeaderRow(*where, LeaderEpoch(9), 0, NodeId(1), (), (), creation_epoch=4)
    table.merge([old])
    assert table.of(TOPIC, partition) is None
    assert table.of(TOPIC, evolve(partition, creation_epoch=4)) == old
    own = LeaderRow(*where, LeaderEpoch(10), 0, NodeId(2), (), (), creation_epoch=7)
    table.merge([own])
    assert table.of(TOPIC, partition) == own
    untold = LeaderTable()
    row = LeaderRow(*where, LeaderEpoch(1), 0, NodeId(2), (), ())
    untold.merge([row])
    assert untold.of(TOPIC, partition) == row, "an older node does not say of which life it is"


def test_nobody_was_ever_known() -> None:
    assert LeaderTable().get(TOPIC, 0) is None


def test_an_own_statement_is_news_once() -> None:
    table = LeaderTable()
    assert _led(table, 3)
    assert not _led(table, 3)
    assert _led(table, 3, isr=(1,))
    row = table.get(TOPIC, 0)
    assert row is not None
    assert (row.leader_epoch, row.revision, row.isr) == (3, 1, (1,))
    assert not _led(table, 2, leader=2)  # deposed long ago
    assert table.version == 2


def test_callbacks_tell_own_from_foreign() -> None:
    table, other = LeaderTable(), LeaderTable()
    seen: list[tuple[int, bool]] = []
    table.on_change(lambda row, is_own: seen.append((row.leader_epoch, is_own)))
    _led(table, 1)
    _led(other, 2, leader=2)
    assert len(table.merge(decode_rows(encode_rows(other.rows()), NodeId(2)))) == 1
    assert seen == [(1, True), (2, False)]
    assert table.merge(other.rows()) == []


def test_deleted_topics_are_forgotten() -> None:
    table = LeaderTable()
    _led(table, 1)
    table.forget(TopicId(UUID(int=8)))
    assert len(table) == 1
    table.forget(TOPIC)
    assert len(table) == 0
    assert table.get(TOPIC, 0) is None


@given(rows=st.lists(ROWS, max_size=12), order=st.randoms())
def test_epochs_rise_whatever_the_order(rows: list[LeaderRow], order: object) -> None:
    table = LeaderTable()
    best: dict[int, tuple[int, int]] = {}
    for row in rows:
        table.merge([row])
        age = (int(row.leader_epoch), row.revision)
        best[row.partition] = max(best.get(row.partition, (-1, -1)), age)
        known = table.get(TOPIC, row.partition)
        assert known is not None
        assert (known.leader_epoch, known.revision) == best[row.partition]
    shuffled = list(rows)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    again = LeaderTable()
    for row in shuffled:
        again.merge(decode_rows(encode_rows([row]), row.leader_id))
    assert [(r.key, r.leader_epoch, r.revision) for r in again.rows()] == [
        (r.key, r.leader_epoch, r.revision) for r in table.rows()
    ]


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x91\x01", b"\xc0"])
def test_bad_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_rows(data, NodeId(1))
