"""Views with conditions: made over one topic, gone with it, and groups commit in them by name."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest
from attrs import evolve

from raftmq.errors import ErrorCode
from raftmq.metadata.commands import (
    ClaimGroup,
    CommitOffsets,
    CommittedOffset,
    CreateTopics,
    DeleteOffsets,
    DeleteTopics,
    EndTransaction,
    InitProducer,
    OffsetsTransaction,
    TransactionRows,
    ViewCreation,
    version_of,
)
from raftmq.metadata.features import write_error
from raftmq.metadata.image import (
    LEVEL_OF_CONDITIONS,
    LEVEL_OF_DELAYS,
    VIEWS_OF_TOPIC_MAX,
    TopicImage,
    ViewImage,
)
from raftmq.metadata.results import CommitsDone, GroupDone, Rejection, TopicOutcome
from raftmq.metadata.snapshot import (
    SnapshotEncoder,
    SnapshotError,
    decode_image,
    encode_image,
)
from raftmq.types import INTERNAL_TOPICS, TopicId, TopicPartition
from tests.metadata.metadata_commands import creation, node, topic_id
from tests.metadata.test_apply_views import NODES, TOPIC, Shrinking
from tests.metadata.test_image import sealed

VIEW: Final = topic_id(31)
WHERE: Final = "tag = 'refund'"


class Viewed(Shrinking):
    """As `Shrinking`, at the newest level, with a group that may commit."""

    def __init__(self, level: int = LEVEL_OF_CONDITIONS) -> None:
        super().__init__(level)
        epoch = self.image.brokers[node(1)].epoch
        claimed = self.apply(ClaimGroup(group="g", node_id=node(1), broker_epoch=epoch))
        self.coordinator_epoch: int = claimed.coordinator_epoch

    def view(self, name: str = "v", at: TopicId = VIEW, **fields: Any) -> TopicOutcome:
        known: dict[str, Any] = {"name": name, "topic_id": at, "source": TOPIC, "condition": WHERE}
        result = self.apply(CreateTopics(topics=(), views=(ViewCreation(**known | fields),)))
        outcome: TopicOutcome = result.topics[0]
        return outcome

    def delete(self, *views: TopicId, topics: tuple[TopicId, ...] = ()) -> list[ErrorCode]:
        result = self.apply(DeleteTopics(topic_ids=topics, views=views))
        return [outcome.code for outcome in result.topics]

    def commit(self, name: str, number: int, offset: int, **fields: Any) -> Any:
        entry = CommittedOffset(topic=name, partition=number, offset=offset)
        return self.apply(
            CommitOffsets(
                group="g", coordinator_epoch=self.coordinator_epoch, offsets=(entry,), **fields
            )
        )

    def offsets(self) -> dict[TopicPartition, int]:
        return {at: o.offset for at, o in self.image.groups.groups["g"].offsets.items()}


@pytest.fixture
def machine() -> Viewed:
    return Viewed()


# ---- made and deleted ----


def test_a_view_is_made_over_a_topic(machine: Viewed) -> None:
    before = machine.image
    outcome = machine.view()
    assert outcome == TopicOutcome("v", VIEW)
    view = ViewImage("v", VIEW, TOPIC, 0, WHERE, machine.image.version)
    assert machine.image.views["v"] == view
    assert machine.image.conditions_of(TOPIC) == (view,)
    assert machine.image.view_of(TOPIC) is None, "it is not the one over what is retired"
    assert machine.image.view_by_id(VIEW) == view
    assert machine.image.topics == before.topics
    assert machine.image.structure_version == machine.image.version
    assert decode_image(encode_image(machine.image)) == machine.image


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"name": "a"}, ErrorCode.TOPIC_ALREADY_EXISTS),
        ({"name": "known"}, ErrorCode.TOPIC_ALREADY_EXISTS),
        ({"name": ""}, ErrorCode.TOPIC_ALREADY_EXISTS),
        ({"at": TOPIC}, ErrorCode.INVALID_REQUEST),
        ({"at": topic_id(30)}, ErrorCode.INVALID_REQUEST),
        ({"at": TopicId(type(TOPIC)(int=0))}, ErrorCode.INVALID_REQUEST),
        ({"source": topic_id(7)}, ErrorCode.UNKNOWN_TOPIC_ID),
        ({"source": topic_id(30)}, ErrorCode.UNKNOWN_TOPIC_ID),
        ({"source": topic_id(3)}, ErrorCode.INVALID_REQUEST),
    ],
)
def test_a_view_that_cannot_be_is_rejected(
    machine: Viewed, fields: dict[str, Any], code: ErrorCode
) -> None:
    internal = sorted(INTERNAL_TOPICS)[0]
    machine.apply(CreateTopics(topics=(creation(internal, 3, NODES),)))
    machine.view("known", topic_id(30))
    before = machine.image
    assert machine.view(**fields).code is code
    assert machine.image.views == before.views
    assert machine.image.structure_version == before.structure_version


def test_a_topic_has_so_many_views_at_most(machine: Viewed) -> None:
    for number in range(VIEWS_OF_TOPIC_MAX):
        assert machine.view(f"v{number:02}", topic_id(100 + number)).code is ErrorCode.NONE
    names = [view.name for view in machine.image.conditions_of(TOPIC)]
    assert names == sorted(names)
    assert machine.view().code is ErrorCode.POLICY_VIOLATION
    machine.shrink(4)
    assert machine.image.view_of(TOPIC) is not None, "that one is not counted"
    assert machine.delete(topic_id(100)) == [ErrorCode.NONE]
    assert machine.view().code is ErrorCode.NONE


def test_no_topic_gets_the_name_or_the_id_of_a_view(machine: Viewed) -> None:
    machine.view()
    made = machine.apply(
        CreateTopics(topics=(creation("v", 4, NODES), creation("b", 31, NODES))),
    )
    assert [topic.code for topic in made.topics] == [
        ErrorCode.TOPIC_ALREADY_EXISTS,
        ErrorCode.INVALID_REQUEST,
    ]
    shrunk = machine.shrink(4, view="v")
    assert isinstance(shrunk, Rejection)
    assert shrunk.code is ErrorCode.TOPIC_ALREADY_EXISTS


def test_one_command_makes_topics_and_views(machine: Viewed) -> None:
    view = ViewCreation(name="v", topic_id=VIEW, source=TOPIC, condition=WHERE)
    rival = ViewCreation(name="b", topic_id=topic_id(32), source=TOPIC, condition=WHERE)
    made = machine.apply(CreateTopics(topics=(creation("b", 2, NODES),), views=(view, rival)))
    assert [(topic.name, topic.code) for topic in made.topics] == [
        ("b", ErrorCode.NONE),
        ("v", ErrorCode.NONE),
        ("b", ErrorCode.TOPIC_ALREADY_EXISTS),
    ]


def test_a_deleted_topic_takes_its_views_along_and_a_new_one_inherits_none(machine: Viewed) -> None:
    machine.apply(CreateTopics(topics=(creation("b", 2, NODES),)))
    machine.view()
    machine.view("w", topic_id(32), source=topic_id(2))
    machine.shrink(4)
    machine.commit("a", 0, 3)
    machine.commit("v", 0, 5)
    machine.commit("w", 0, 7)
    assert machine.delete(topics=(TOPIC,)) == [ErrorCode.NONE]
    assert sorted(machine.image.views) == ["w"]
    assert machine.offsets() == {TopicPartition("w", 0): 7}
    machine.apply(CreateTopics(topics=(creation("a", 5, NODES),)))
    assert machine.image.conditions_of(topic_id(5)) == ()
    assert machine.view(source=TOPIC).code is ErrorCode.UNKNOWN_TOPIC_ID
    assert decode_image(encode_image(machine.image)) == machine.image


def test_a_view_goes_with_its_topic_in_one_command_and_both_are_told(machine: Viewed) -> None:
    machine.view()
    assert machine.delete(VIEW, topics=(TOPIC,)) == [ErrorCode.NONE, ErrorCode.NONE]
    assert not machine.image.views
    assert machine.delete(VIEW) == [ErrorCode.UNKNOWN_TOPIC_ID]


def test_the_view_over_what_is_retired_is_not_deleted(machine: Viewed) -> None:
    machine.shrink(4)
    retired = machine.image.view_of(TOPIC)
    assert retired is not None
    assert machine.delete(retired.topic_id) == [ErrorCode.UNKNOWN_TOPIC_ID]
    assert machine.image.view_of(TOPIC) == retired


def test_below_the_level_there_are_none() -> None:
    low = Viewed(LEVEL_OF_DELAYS)
    assert low.view().code is ErrorCode.UNSUPPORTED_VERSION
    assert not low.image.views
    creation_of_view = ViewCreation(name="v", topic_id=VIEW, source=TOPIC, condition=WHERE)
    for command in (
        CreateTopics(topics=(), views=(creation_of_view,)),
        DeleteTopics(topic_ids=(), views=(VIEW,)),
    ):
        assert version_of(command) == LEVEL_OF_CONDITIONS
        assert write_error(type(command).__name__, version_of(command), low.image)
    for command in (CreateTopics(topics=()), DeleteTopics(topic_ids=(TOPIC,))):
        assert version_of(command) == 1


# ---- numbers ----


def test_a_topic_remembers_how_many_numbers_it_had(machine: Viewed) -> None:
    def width() -> int:
        topic: TopicImage = machine.topic
        return topic.width

    assert width() == 6
    machine.shrink(4)
    assert width() == 6
    machine.sealed(5, 10)
    machine.gone(5, 10)
    assert machine.topic.partition(5) is None
    assert width() == 6
    assert machine.grow(3) is ErrorCode.NONE
    assert width() == 7


# ---- what groups commit ----


def test_groups_commit_in_a_view_by_its_own_name(machine: Viewed) -> None:
    machine.view()
    version = machine.image.version
    assert isinstance(machine.commit("v", 5, 9, known_version=version), GroupDone)
    assert isinstance(machine.commit("a", 5, 4, known_version=version), GroupDone)
    assert machine.offsets() == {TopicPartition("v", 5): 9, TopicPartition("a", 5): 4}
    assert machine.image.sources() == {}, "none are kept for the topic's sake"
    code = machine.commit("v", 6, 1, known_version=version).code
    assert code is ErrorCode.COORDINATOR_NOT_AVAILABLE, "there is no such number"
    assert machine.delete(VIEW) == [ErrorCode.NONE]
    assert machine.offsets() == {TopicPartition("a", 5): 4}


def test_a_view_that_is_made_again_inherits_no_commit(machine: Viewed) -> None:
    machine.view()
    seen = machine.image.version
    machine.delete(VIEW)
    late = machine.commit("v", 0, 9, known_version=seen)
    assert late.code is ErrorCode.COORDINATOR_NOT_AVAILABLE
    machine.view("v", topic_id(33))
    late = machine.commit("v", 0, 9, known_version=seen)
    assert late.code is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert machine.offsets() == {}
    machine.commit("v", 0, 2, known_version=machine.image.version)
    known = {"group": "g", "coordinator_epoch": machine.coordinator_epoch}
    machine.apply(DeleteOffsets(**known, partitions=(("v", 0),), topic_ids=(VIEW,)))
    assert machine.offsets() == {TopicPartition("v", 0): 2}, "it is another view by now"
    machine.apply(DeleteOffsets(**known, partitions=(("v", 0),), topic_ids=(topic_id(33),)))
    assert machine.offsets() == {}


def test_what_is_gone_of_the_topic_is_gone_of_its_views(machine: Viewed) -> None:
    machine.view()
    machine.commit("v", 4, 2)
    machine.commit("v", 5, 3)
    machine.shrink(4)
    machine.sealed(5, 10)
    machine.gone(5, 10)
    assert machine.offsets() == {TopicPartition("v", 4): 2}
    assert machine.image.conditions_of(TOPIC), "it stays when nothing is retired any more"
    machine.sealed(4, 10)
    machine.gone(4, 10)
    assert machine.image.view_of(TOPIC) is None
    assert machine.image.conditions_of(TOPIC)


def test_a_transaction_commits_in_a_view(machine: Viewed) -> None:
    machine.view()
    row = InitProducer(transactional_id="t", timeout_ms=1_000)
    [begun] = machine.apply(TransactionRows(rows=(row,))).rows
    who: dict[str, Any] = {"transactional_id": "t", "producer_id": begun.producer_id}
    who |= {"epoch": begun.epoch, "protocol": 2}
    for name, at in (("v", VIEW), ("v", topic_id(33)), ("a", VIEW)):
        done = machine.commit(
            name, 1, 8, transaction=OffsetsTransaction(**who, txn_seq=-1, topic_ids=(at,))
        )
        assert done == CommitsDone((0,)) or isinstance(done, GroupDone), done
    pending = machine.image.groups.groups["g"].pending[begun.producer_id]
    assert list(pending) == [TopicPartition("v", 1)], "of another id there is nothing any more"
    machine.apply(TransactionRows(rows=(EndTransaction(**who, is_commit=True),)))
    assert machine.offsets() == {TopicPartition("v", 1): 8}


# ---- snapshots ----


def test_views_of_both_kinds_come_back_from_a_snapshot(machine: Viewed) -> None:
    machine.view("z")
    machine.view("b", topic_id(32), condition="key = 'ü'")
    machine.shrink(4)
    image = machine.image
    data = encode_image(image)
    assert data[4:6] == b"\0\x08"
    assert decode_image(data) == image
    encoder = SnapshotEncoder()
    while not encoder.warm(image, 1):
        pass
    assert encoder.encode(image) == data
    older = decode_image(encode_image(Viewed(LEVEL_OF_DELAYS).image))
    assert older == Viewed(LEVEL_OF_DELAYS).image


def test_a_snapshot_of_format_8_without_its_part_is_refused(machine: Viewed) -> None:
    machine.view()
    body = msgspec.msgpack.decode(encode_image(machine.image)[10:])
    for other, why in ((body[:-1], "without conditions"), ([*body, "later"], "another shape")):
        with pytest.raises(SnapshotError, match=why):
            decode_image(sealed(8, msgspec.msgpack.encode(other)))


def test_the_order_of_creation_does_not_show() -> None:
    images = []
    for names in ("xy", "yx"):
        machine = Viewed()
        for name in names:
            machine.view(name, topic_id(40 + ord(name)))
        views = machine.image.views
        for name in names:
            views = views.set(name, evolve(views[name], creation_epoch=3))
        images.append(encode_image(evolve(machine.image, views=views)))
    assert images[0] == images[1]


def test_what_is_retired_is_told_from_conditions(machine: Viewed) -> None:
    assert not machine.image.has_retired
    machine.view()
    assert not machine.image.has_retired
    machine.shrink(4)
    assert machine.image.has_retired
