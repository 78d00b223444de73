"""A command of many rows about partitions: the same as one row after the other, at one copy of each
topic."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from raftmq.metadata import image as image_module
from raftmq.metadata.apply_moves import is_news, plan_moves, reassign_partition, report_voters
from raftmq.metadata.commands import (
    CreateTopics,
    Envelope,
    MembersReport,
    Origin,
    PlanMoves,
    PlannedMove,
    ReassignPartition,
    ReportVoters,
    VotersReport,
    version_of,
)
from raftmq.metadata.image import MetadataImage, TopicImage
from raftmq.metadata.results import MoveOutcomes
from raftmq.types import NodeId, Offset
from tests.metadata.metadata_commands import Machine, creation, node, raised, topic_id

PARTITIONS = 3
_ACTS: Final = {
    PlanMoves: plan_moves,
    ReassignPartition: reassign_partition,
    ReportVoters: report_voters,
}
REPLICAS = ((1, 2, 3), (3, 2, 1), (4, 5))


def _image(*, is_raised: bool = True) -> MetadataImage:
    """Two topics with three partitions each, on nodes 1 to 6."""
    machine = Machine()
    machine.register_all(1, 2, 3, 4, 5, 6)
    for number, name in enumerate("ab", 1):
        machine.apply(CreateTopics(topics=(creation(name, number, *REPLICAS),)))
    return raised(machine.image) if is_raised else machine.image


RAISED, LOW = _image(), _image(is_raised=False)
EPOCH = RAISED.topics["a"].partitions[0].creation_epoch

_nodes = st.lists(st.integers(1, 6).map(node), max_size=3, unique=True).map(tuple)
_sorted = _nodes.map(lambda nodes: tuple(sorted(nodes)))
# Few partitions, and mostly such as there are: rows should meet.
_topics = st.sampled_from((1, 1, 1, 1, 2, 3)).map(topic_id)
_numbers = st.sampled_from((0, 0, 0, 1, PARTITIONS, -1))
_epochs = st.sampled_from((EPOCH, EPOCH, EPOCH, -1, EPOCH + 1))
_expected: st.SearchStrategy[tuple[NodeId, ...]] = st.sampled_from(
    ((), (), (), (), *(tuple(map(node, replicas)) for replicas in REPLICAS))
)
MOVES = st.builds(
    PlannedMove,
    topic_id=_topics,
    partition=_numbers,
    creation_epoch=_epochs,
    replicas=_nodes,
    expected=_expected,
)


def _members(
    row: tuple[Any, ...], voters: tuple[NodeId, ...], learners: tuple[NodeId, ...], seen: int
) -> MembersReport:
    topic, number, creation_epoch, leader_epoch = row
    members = tuple(sorted({*voters, *learners}))
    return MembersReport(topic, number, creation_epoch, leader_epoch, voters, members, seen)


MEMBERS = st.builds(
    _members,
    st.tuples(_topics, _numbers, _epochs, st.integers(0, 4)),
    _sorted,
    _sorted,
    st.integers(0, 40),
)
VOTERS = st.builds(VotersReport, _topics, _numbers, st.integers(0, 4), _sorted)
PLANS = st.tuples(st.lists(MOVES, max_size=6), st.sampled_from((Origin.OPERATOR, Origin.BALANCE)))


def _applied(
    image: MetadataImage, command: msgspec.Struct, offset: int
) -> tuple[MetadataImage, Any]:
    envelope = Envelope(
        version=version_of(command),
        node_id=node(1),
        incarnation=1,
        sequence=1,
        broker_epoch=-1,
        expected_version=-1,
        command=command,
    )
    return _ACTS[type(command)](image, envelope, Offset(offset))


def _begun(image: MetadataImage) -> MetadataImage:
    """The same with all that is planned under way, so that the next command meets moves."""
    for topic in image.topics_by_id():
        for partition in topic.partitions:
            if partition.planned:
                order = ReassignPartition(
                    topic_id=topic.topic_id,
                    partition=partition.index,
                    replicas=partition.planned,
                    creation_epoch=partition.creation_epoch,
                    expected=partition.replicas,
                    origin=partition.origin,
                )
                image, _ = _applied(image, order, 20)
    return image


@settings(max_examples=150)
@given(plans=st.lists(PLANS, max_size=3), rows=st.lists(MEMBERS, max_size=8))
def test_rows_of_one_command_are_judged_one_after_the_other(
    plans: list[tuple[list[PlannedMove], Origin]], rows: list[MembersReport]
) -> None:
    whole = single = RAISED
    for moves, origin in plans:
        whole, told = _applied(whole, PlanMoves(moves=tuple(moves), origin=origin), 19)
        outcomes: list[Any] = []
        for move in moves:
            single, one = _applied(single, PlanMoves(moves=(move,), origin=origin), 19)
            outcomes += one.moves
        assert told == MoveOutcomes(tuple(outcomes))
        assert whole == single
        whole = single = _begun(whole)
        whole, _ = _applied(whole, ReportVoters(reports=(), members=tuple(rows)), 21)
        for row in rows:
            before = single
            single, _ = _applied(single, ReportVoters(reports=(), members=(row,)), 21)
            assert is_news(before, row) == (single != before)
        assert whole == single


@given(rows=st.lists(VOTERS, max_size=8))
def test_reports_below_the_level_of_moves_too(rows: list[VotersReport]) -> None:
    whole, _ = _applied(LOW, ReportVoters(reports=tuple(rows)), 19)
    single = LOW
    for row in rows:
        single, _ = _applied(single, ReportVoters(reports=(row,)), 19)
    assert whole == single


@pytest.mark.parametrize("kind", ["plan", "report"])
def test_a_topic_is_copied_once_for_a_command(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 rows about a topic of 10,000 partitions took 140 ms of the loop."""
    machine = Machine()
    machine.register_all(1, 2, 3, 4)
    machine.apply(CreateTopics(topics=(creation("a", 1, *[(1, 2, 3)] * 100),)))
    image = raised(machine.image)
    command: PlanMoves | ReportVoters
    if kind == "plan":
        moves = tuple(
            PlannedMove(
                topic_id=topic_id(1),
                partition=i,
                creation_epoch=-1,
                replicas=(node(1), node(2), node(4)),
            )
            for i in range(100)
        )
        command = PlanMoves(moves=moves, origin=Origin.OPERATOR)
    else:
        both = (node(1), node(2))
        epoch = image.topics["a"].partitions[0].creation_epoch
        members = tuple(
            MembersReport(topic_id(1), i, epoch, 5, both, both, image.version) for i in range(100)
        )
        command = ReportVoters(reports=(), members=members)
    copied: list[str] = []

    def counted(instance: Any, **changes: Any) -> Any:
        if isinstance(instance, TopicImage):
            copied.append(instance.name)
        return evolve(instance, **changes)

    monkeypatch.setattr(image_module, "evolve", counted)
    after, _ = _applied(image, command, 19)
    assert copied == ["a"]
    changed = after.topics["a"].partitions
    assert len(changed) == 100
    assert all(new != old for new, old in zip(changed, image.topics["a"].partitions, strict=True))
