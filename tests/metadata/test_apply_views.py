"""Topics shrink and grow: what closes, is sealed and is gone, under which names it can be read, and
where a number goes on."""

from __future__ import annotations

from typing import Any, Final

import pytest
from attrs import evolve
from immutables import Map

from raftmq.errors import ErrorCode
from raftmq.metadata import apply_views
from raftmq.metadata.commands import (
    KNOWN_BYTES_MAX,
    NO_TOPIC_ID,
    AddPartitions,
    ClaimGroup,
    CommitOffsets,
    CommittedOffset,
    CreatePartitions,
    CreateTopics,
    DeleteTopics,
    Envelope,
    InitProducer,
    MembersReport,
    PartitionAddition,
    PartitionState,
    ReassignPartition,
    ReportGone,
    ReportSealed,
    ReportVoters,
    SealPartitions,
    SealReport,
    ShrinkTopic,
    TransactionRows,
    UnknownCommandError,
    decode_envelope,
    encode_envelope,
    version_of,
)
from raftmq.metadata.features import write_error
from raftmq.metadata.image import (
    ALIASES_MAX,
    EPOCH_ROOM,
    LEVEL_OF_ALIASES,
    LEVEL_OF_CONDITIONS,
    LEVEL_OF_DELAYS,
    LEVEL_OF_KNOWN_PRODUCERS,
    LEVEL_OF_VIEWS,
    NumberImage,
    PartitionImage,
    TopicImage,
    ViewImage,
    all_partitions,
    holds_any,
    partition_target,
)
from raftmq.metadata.results import Done, Rejection
from raftmq.metadata.snapshot import decode_image, encode_image
from raftmq.types import RaftGroupId, TopicId, TopicPartition
from tests.metadata.metadata_commands import Machine, creation, node, raised, topic_id

TOPIC: Final = topic_id(1)
VIEW: Final = topic_id(11)
ALIAS: Final = topic_id(21)
NODES: Final = (1, 2, 3)


class Shrinking(Machine):
    """A machine with the topic "a" of six partitions on three nodes."""

    def __init__(self, level: int = LEVEL_OF_VIEWS) -> None:
        super().__init__()
        self.register_all(1, 2, 3, 4)
        self.image = raised(self.image, level)
        self.apply(CreateTopics(topics=(creation("a", 1, *[NODES] * 6),)))

    @property
    def topic(self) -> TopicImage:
        return self.image.topics["a"]

    def part(self, number: int) -> PartitionImage:
        partition = self.topic.partition(number)
        assert partition is not None
        return partition

    def shrink(self, partitions: int, **fields: Any) -> Any:
        known: dict[str, Any] = {"topic_id": TOPIC, "listed": len(self.topic.partitions)}
        known |= {"view": "a.retired", "view_id": VIEW}
        return self.apply(ShrinkTopic(**(known | {"partitions": partitions} | fields)))

    def seal(self, *numbers: int) -> Any:
        partitions = tuple((n, self.part(n).creation_epoch) for n in numbers)
        return self.apply(SealPartitions(topic_id=TOPIC, partitions=partitions))

    def report(self, number: int, end: int, epoch: int = 3) -> SealReport:
        part = self.part(number)
        return SealReport(TOPIC, number, part.creation_epoch, part.state_version, end, epoch)

    def sealed(self, number: int, end: int, epoch: int = 3) -> None:
        self.seal(number)
        self.apply(ReportSealed(reports=(self.report(number, end, epoch),)))

    def gone(self, number: int, end: int, epoch: int = 3, *producers: bytes) -> None:
        reports = (self.report(number, end, epoch),)
        self.apply(ReportGone(reports=reports, producers=producers))

    def grow(self, count: int, *nodes: int) -> Any:
        replicas = (tuple(node(n) for n in nodes or NODES),) * count
        addition = PartitionAddition(
            topic_id=TOPIC, first_partition=len(self.topic.partitions), replicas=replicas
        )
        return self.apply(CreatePartitions(additions=(addition,))).topics[0].code

    def states(self) -> list[str]:
        numbers = range(max(p.index for p in self.topic.held) + 1)
        return [str(self.topic.state_of(number)) for number in numbers]


@pytest.fixture
def machine() -> Shrinking:
    return Shrinking()


def code(result: object) -> ErrorCode:
    assert isinstance(result, Rejection)
    return result.code


# ---- shrinking ----


def test_what_is_not_listed_any_more_is_still_there(machine: Shrinking) -> None:
    listed, before = machine.image, machine.topic
    offset = machine.image.version + 1
    assert machine.shrink(4) == Done(offset)  # type: ignore[arg-type]
    assert machine.topic.partitions == before.partitions[:4]
    assert machine.states() == ["active"] * 4 + ["closing"] * 2
    assert [p.index for p in machine.topic.held] == list(range(6))
    assert machine.part(5) == evolve(
        before.partitions[5], state=PartitionState.CLOSING, state_version=offset
    )
    assert machine.part(5).takes_records
    assert machine.topic.partition(6) is None
    assert machine.topic.state_of(6) is None
    assert machine.topic.partition(-1) is None
    group = RaftGroupId(TOPIC, 5, before.partitions[5].creation_epoch)
    assert machine.topic.group_id(5) == group
    assert machine.topic.has(group)
    assert not machine.topic.has(group._replace(partition=6))
    assert machine.image.partition(TopicPartition("a", 5)) == machine.part(5)
    assert machine.image.holds(node(2), group)
    assert not machine.image.holds(node(4), group)
    assert partition_target(machine.image, group) == partition_target(listed, group) is not None
    assert len(list(all_partitions(machine.image))) == 6
    assert machine.image.structure_version == offset


def test_a_view_lists_the_retired_partitions_without_a_hole(machine: Shrinking) -> None:
    machine.shrink(4)
    view = ViewImage("a.retired", VIEW, TOPIC, 6)
    assert machine.image.view_of(TOPIC) == view
    assert machine.image.view_by_id(VIEW) == view
    assert machine.image.view_by_id(TOPIC) is None
    assert machine.image.topic_by_id(VIEW) is None
    machine.shrink(2)
    assert machine.image.views == Map({"a.retired": view})
    machine.sealed(5, 10)
    machine.gone(5, 10)
    assert machine.image.view_of(TOPIC) == view, "a view never becomes narrower"


def test_a_topic_may_have_more_ids_than_one(machine: Shrinking) -> None:
    machine.shrink(4, alias=ALIAS)
    assert machine.topic.topic_id == TOPIC
    assert machine.topic.aliases == (ALIAS,)
    assert machine.image.topic_by_id(ALIAS) is machine.image.topic_by_id(TOPIC)
    machine.shrink(3, alias=topic_id(22), topic_id=ALIAS)
    assert machine.topic.aliases == (ALIAS, topic_id(22))
    assert machine.states() == ["active"] * 3 + ["closing"] * 3


@pytest.mark.parametrize("level", [LEVEL_OF_VIEWS, LEVEL_OF_ALIASES])
def test_so_many_of_the_newest_aliases_are_kept(level: int) -> None:
    machine = Shrinking(level)
    fresh = [topic_id(30 + number) for number in range(ALIASES_MAX + 2)]
    for alias in fresh:
        machine.shrink(5, alias=alias)
        machine.grow(1)
    kept = fresh if level < LEVEL_OF_ALIASES else fresh[2:]
    assert machine.topic.aliases == tuple(kept)
    assert set(machine.image.topic_names) == {TOPIC, *kept}
    assert (machine.image.topic_by_id(fresh[0]) is None) is (level >= LEVEL_OF_ALIASES)
    machine.shrink(4)
    assert machine.topic.aliases == tuple(kept), "a shrink without one leaves them as they are"
    assert decode_image(encode_image(machine.image)) == machine.image


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({"topic_id": topic_id(9)}, ErrorCode.UNKNOWN_TOPIC_ID, id="no topic"),
        pytest.param({"topic_id": VIEW}, ErrorCode.UNKNOWN_TOPIC_ID, id="no topic but a view"),
        pytest.param({"partitions": 6}, ErrorCode.INVALID_PARTITIONS, id="as many"),
        pytest.param({"partitions": 7}, ErrorCode.INVALID_PARTITIONS, id="more"),
        pytest.param({"partitions": 0}, ErrorCode.INVALID_PARTITIONS, id="none"),
        pytest.param({"partitions": -1}, ErrorCode.INVALID_PARTITIONS, id="fewer than none"),
        pytest.param({"listed": 5}, ErrorCode.INVALID_UPDATE_VERSION, id="others are listed"),
        pytest.param({"view": "a"}, ErrorCode.TOPIC_ALREADY_EXISTS, id="a topic's name"),
        pytest.param({"view": "b.retired"}, ErrorCode.TOPIC_ALREADY_EXISTS, id="a view's name"),
        pytest.param({"view": ""}, ErrorCode.TOPIC_ALREADY_EXISTS, id="no name"),
        pytest.param({"view_id": NO_TOPIC_ID}, ErrorCode.INVALID_REQUEST, id="no id"),
        pytest.param({"view_id": TOPIC}, ErrorCode.INVALID_REQUEST, id="a topic's id"),
        pytest.param({"view_id": topic_id(12)}, ErrorCode.INVALID_REQUEST, id="a view's id"),
        pytest.param({"alias": TOPIC}, ErrorCode.INVALID_REQUEST, id="its own id as alias"),
        pytest.param({"alias": topic_id(12)}, ErrorCode.INVALID_REQUEST, id="a view's as alias"),
        pytest.param({"alias": VIEW}, ErrorCode.INVALID_REQUEST, id="one id for both"),
    ],
)
def test_what_cannot_be_changes_nothing(
    machine: Shrinking, fields: dict[str, Any], expected: ErrorCode
) -> None:
    machine.apply(CreateTopics(topics=(creation("b", 2, NODES, NODES),)))
    b = {"topic_id": topic_id(2), "listed": 2, "view": "b.retired", "view_id": topic_id(12)}
    machine.shrink(1, **b)
    before = machine.image
    assert code(machine.shrink(**({"partitions": 4} | fields))) is expected
    assert machine.image.topics == before.topics
    assert machine.image.views == before.views
    assert machine.image.topic_names == before.topic_names
    assert machine.image.structure_version == before.structure_version


def test_a_topic_has_one_view(machine: Shrinking) -> None:
    machine.shrink(4)
    assert code(machine.shrink(3, view="other")) is ErrorCode.INVALID_REQUEST
    assert code(machine.shrink(3, view_id=topic_id(12))) is ErrorCode.INVALID_REQUEST
    assert machine.states() == ["active"] * 4 + ["closing"] * 2


def test_internal_topics_do_not_shrink(machine: Shrinking) -> None:
    machine.apply(CreateTopics(topics=(creation("__consumer_offsets", 3, NODES, NODES),)))
    result = machine.shrink(1, topic_id=topic_id(3), listed=2)
    assert code(result) is ErrorCode.INVALID_REQUEST


def test_no_topic_has_the_name_or_the_id_of_a_view_or_an_alias(machine: Shrinking) -> None:
    machine.shrink(4, alias=ALIAS)
    made = machine.apply(
        CreateTopics(
            topics=(
                creation("a.retired", 4, NODES),
                creation("b", 11, NODES),
                creation("c", 21, NODES),
                creation("d", 5, NODES),
            )
        )
    )
    assert [topic.code for topic in made.topics] == [
        ErrorCode.TOPIC_ALREADY_EXISTS,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.NONE,
    ]


def test_nothing_is_done_below_the_level(machine: Shrinking) -> None:
    low = Shrinking(LEVEL_OF_VIEWS - 1)
    before = low.image
    assert code(low.shrink(4)) is ErrorCode.UNSUPPORTED_VERSION
    assert code(low.seal(5)) is ErrorCode.UNSUPPORTED_VERSION
    for kind in (ReportSealed, ReportGone):
        assert low.apply(kind(reports=(low.report(5, 7),))) == Done(low.image.version)  # type: ignore[arg-type]
    assert low.image.topics == before.topics
    assert low.image.structure_version == before.structure_version


@pytest.mark.parametrize(
    ("is_target", "key"),
    [(True, "raftmq.delivers.to"), (True, "raftmq.dead.to"), (False, "raftmq.delivers.to")],
)
def test_what_delays_or_is_delivered_in_does_not_shrink(is_target: bool, key: str) -> None:
    """Also where the two commands were planned at once; and only where there are delay topics."""
    for level in (LEVEL_OF_DELAYS - 1, LEVEL_OF_DELAYS):
        machine = Shrinking(level)
        delivers = {key: "a" if is_target else "c"}
        machine.apply(CreateTopics(topics=(creation("b", 2, NODES),)))
        name = "b" if is_target else "a"
        topic = evolve(machine.image.topics[name], configs=Map(delivers))
        machine.image = evolve(machine.image, topics=machine.image.topics.set(name, topic))
        before = machine.topic
        if level < LEVEL_OF_DELAYS:
            assert isinstance(machine.shrink(4), Done)
        else:
            assert code(machine.shrink(4)) is ErrorCode.INVALID_REQUEST
            assert machine.topic == before


def test_below_their_level_these_commands_are_not_written(machine: Shrinking) -> None:
    image = raised(machine.image, LEVEL_OF_VIEWS - 1)
    report = machine.report(5, 7)
    for command in (
        ShrinkTopic(topic_id=TOPIC, partitions=4, listed=6, view="v", view_id=VIEW),
        SealPartitions(topic_id=TOPIC, partitions=()),
        ReportSealed(reports=(report,)),
        ReportGone(reports=(report,)),
    ):
        assert version_of(command) == LEVEL_OF_VIEWS
        assert write_error(type(command).__name__, version_of(command), image)


# ---- sealing ----


def test_only_what_closes_is_sealed_and_all_of_it_or_nothing(machine: Shrinking) -> None:
    machine.shrink(4)
    epoch = machine.part(4).creation_epoch
    for partitions, expected in (
        (((4, epoch), (3, epoch)), ErrorCode.INVALID_UPDATE_VERSION),
        (((4, epoch), (6, epoch)), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (((4, epoch), (5, epoch + 1)), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    ):
        result = machine.apply(SealPartitions(topic_id=TOPIC, partitions=partitions))
        assert code(result) is expected
    assert code(machine.apply(SealPartitions(topic_id=VIEW, partitions=()))) is (
        ErrorCode.UNKNOWN_TOPIC_ID
    )
    assert machine.states()[4:] == ["closing", "closing"]
    structure = machine.image.structure_version
    assert isinstance(machine.apply(SealPartitions(topic_id=TOPIC, partitions=())), Done)
    assert machine.image.structure_version == structure
    machine.seal(4, 5)
    assert machine.states()[4:] == ["sealing", "sealing"]
    assert machine.part(4).state_version == machine.image.version
    assert not machine.part(4).takes_records
    assert code(machine.seal(5)) is ErrorCode.INVALID_UPDATE_VERSION


def test_a_seal_is_committed_when_its_leader_says_so(machine: Shrinking) -> None:
    machine.shrink(4)
    machine.seal(4, 5)
    report = machine.report(4, 17, 6)
    machine.apply(ReportSealed(reports=(report, report)))
    assert machine.states()[4:] == ["sealed", "sealing"]
    assert machine.topic.numbers == Map({4: NumberImage(17, 6)})
    structure = machine.image.structure_version
    machine.apply(ReportSealed(reports=(evolve_report(report, end_offset=99),)))
    assert machine.topic.numbers[4] == NumberImage(17, 6), "an end offset is final"
    assert machine.image.structure_version == structure


def evolve_report(report: SealReport, **fields: Any) -> SealReport:
    values = {name: getattr(report, name) for name in SealReport.__struct_fields__}
    return SealReport(**(values | fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"topic_id": topic_id(9)},
        {"partition": 3},
        {"partition": 6},
        {"creation_epoch": 0},
        {"seal_version": 0},
    ],
    ids=str,
)
def test_a_report_of_something_else_changes_nothing(
    machine: Shrinking, fields: dict[str, Any]
) -> None:
    machine.shrink(4)
    machine.seal(5)
    report = machine.report(5, 7)
    before = machine.topic
    machine.apply(ReportSealed(reports=(evolve_report(report, **fields),)))
    machine.apply(ReportGone(reports=(report,)))  # it is not sealed yet
    assert machine.topic is before
    machine.apply(ReportSealed(reports=(report,)))
    before = machine.topic
    for wrong in (fields, {"end_offset": 6}, {"end_offset": 8}):
        machine.apply(ReportGone(reports=(evolve_report(report, **wrong),)))
    assert machine.topic is before


def test_a_report_of_an_older_seal_is_not_taken_for_one_of_the_next(machine: Shrinking) -> None:
    machine.shrink(5)
    machine.seal(5)
    late = machine.report(5, 7)
    machine.grow(1)
    assert machine.states() == ["active"] * 6
    machine.shrink(5)
    machine.seal(5)
    machine.apply(ReportSealed(reports=(late,)))
    assert machine.states()[5] == "sealing", "records came after that seal"
    machine.apply(ReportSealed(reports=(machine.report(5, 9),)))
    assert machine.topic.numbers[5].end_offset == 9


def test_an_end_offset_below_that_of_before_is_passed_over(machine: Shrinking) -> None:
    machine.shrink(5)
    machine.sealed(5, 7)
    machine.grow(1)
    machine.shrink(5)
    machine.sealed(5, 6)
    assert machine.states()[5] == "sealing"
    machine.apply(ReportSealed(reports=(machine.report(5, 7, 1),)))
    assert machine.states()[5] == "sealed"
    assert machine.topic.numbers[5] == NumberImage(7, 3)


# ---- gone ----


def test_with_what_is_gone_goes_all_that_is_about_it(machine: Shrinking) -> None:
    machine.shrink(4)
    live = machine.image.live_epoch(node(1))
    assert live is not None
    claim = ClaimGroup(group="g", node_id=node(1), broker_epoch=live)
    epoch = machine.apply(claim).coordinator_epoch
    offsets = tuple(CommittedOffset("a", number, 3) for number in (3, 4, 5))
    machine.apply(CommitOffsets(group="g", coordinator_epoch=epoch, offsets=offsets))
    group = machine.topic.group_id(5)
    machine.sealed(5, 7)
    machine.gone(5, 7, 12)
    assert machine.topic.state_of(5) is PartitionState.GONE
    assert machine.topic.partition(5) is None
    assert [p.index for p in machine.topic.retired] == [4]
    assert machine.topic.numbers[5] == NumberImage(7, 12)
    order = machine.image.removal(group)
    assert order is not None
    assert order.nodes == tuple(map(node, NODES))
    known = machine.image.groups.get("g")
    assert known is not None
    assert sorted(at.partition for at in known.offsets) == [3, 4]
    assert not machine.image.holds(node(1), group)
    assert machine.image.view_of(TOPIC) is not None
    machine.sealed(4, 2)
    machine.gone(4, 2)
    assert machine.image.view_of(TOPIC) is None
    assert machine.image.views == Map()
    assert holds_any(machine.image, node(1))


def test_many_partitions_are_gone_by_one_command(machine: Shrinking) -> None:
    machine.shrink(2)
    for number in (2, 3, 4, 5):
        machine.sealed(number, number)
    reports = tuple(machine.report(number, number) for number in (2, 4, 4, 5))
    machine.apply(ReportGone(reports=reports))
    assert [p.index for p in machine.topic.retired] == [3]
    assert len(machine.image.removals) == 3


# ---- growth ----


@pytest.mark.parametrize("state", ["closing", "sealing", "sealed"])
def test_growth_lists_a_retired_partition_again(machine: Shrinking, state: str) -> None:
    before = machine.part(4)
    machine.shrink(4)
    if state != "closing":
        machine.seal(4)
    if state == "sealed":
        machine.apply(ReportSealed(reports=(machine.report(4, 7),)))
    assert machine.states()[4:] == [state, "closing"]
    assert machine.grow(1, 4) is ErrorCode.NONE
    assert machine.states() == ["active"] * 5 + ["closing"]
    assert machine.part(4) == evolve(before, state_version=machine.image.version)
    assert machine.image.view_of(TOPIC) is not None
    assert machine.grow(2, 4) is ErrorCode.NONE
    assert machine.states() == ["active"] * 7
    assert machine.part(5).replicas == tuple(map(node, NODES)), "it stays where its records are"
    assert machine.part(6).replicas == (node(4),)
    assert machine.image.view_of(TOPIC) is None
    assert code_of_first_partition(machine) is ErrorCode.INVALID_PARTITIONS


def code_of_first_partition(machine: Shrinking) -> ErrorCode:
    """What growth is told that was computed before the last one."""
    addition = PartitionAddition(topic_id=TOPIC, first_partition=6, replicas=((node(1),),))
    result: ErrorCode = machine.apply(CreatePartitions(additions=(addition,))).topics[0].code
    return result


def test_a_number_that_is_gone_goes_on_where_it_ended(machine: Shrinking) -> None:
    machine.shrink(4)
    old = machine.topic.group_id(5)
    machine.sealed(5, 40, 6)
    machine.gone(5, 40, 9)
    assert machine.grow(2) is ErrorCode.NONE
    fresh = machine.part(5)
    assert fresh.creation_epoch == machine.image.version
    assert fresh.begins_at == 40
    assert fresh.after_epoch == 9 + EPOCH_ROOM
    assert fresh.state is PartitionState.ACTIVE
    assert (machine.part(4).begins_at, machine.part(4).after_epoch) == (0, -1)
    assert machine.image.removal(old) is not None, "the old life's data still goes"
    assert not machine.topic.has(old)
    machine.shrink(4)
    machine.sealed(5, 39, 2_000)
    assert machine.states()[5] == "sealing", "no log ends before it begins"
    machine.apply(ReportSealed(reports=(machine.report(5, 40, 5),)))
    assert machine.topic.numbers[5] == NumberImage(40, 9 + EPOCH_ROOM)


def test_a_snapshot_has_the_orders_of_all_lives_of_a_number(machine: Shrinking) -> None:
    """A node that was away deletes what it has of both."""
    groups = []
    for end in (40, 50):
        machine.shrink(4)
        groups.append(machine.topic.group_id(5))
        machine.sealed(5, end, 3 * end)
        machine.gone(5, end, 3 * end)
        machine.grow(2)
    copy = decode_image(encode_image(machine.image))
    assert [copy.removal(group) is not None for group in groups] == [True, True]
    assert copy == machine.image


def test_a_number_that_is_gone_keeps_what_was_known_of_its_producers() -> None:
    """Until the next partition of that number is gone, wherever it stands in between."""
    machine = Shrinking(LEVEL_OF_KNOWN_PRODUCERS)
    machine.shrink(4)
    machine.sealed(4, 10)
    machine.sealed(5, 40)
    assert machine.topic.numbers[5].producers == b""
    machine.gone(5, 40, 3, b"first")
    assert machine.topic.numbers[5] == NumberImage(40, 3, b"first")
    assert machine.topic.numbers[4].producers == b""
    assert decode_image(encode_image(machine.image)) == machine.image
    machine.grow(2)
    machine.shrink(4)
    machine.sealed(5, 70, 2_000)
    assert machine.topic.numbers[5] == NumberImage(70, 2_000, b"first"), "it began with that"
    assert decode_image(encode_image(machine.image)) == machine.image
    machine.gone(5, 70, 2_000)
    assert machine.topic.numbers[5].producers == b"", "what is older is wrong"
    machine.grow(2)
    machine.shrink(4)
    machine.sealed(5, 71, 4_000)
    machine.gone(5, 71, 4_000, b"third")
    assert machine.topic.numbers[5].producers == b"third"
    machine.apply(DeleteTopics(topic_ids=(TOPIC,)))
    assert machine.image.known_bytes == 0


def test_what_was_known_for_another_order_is_not_taken() -> None:
    machine = Shrinking(LEVEL_OF_KNOWN_PRODUCERS)
    machine.shrink(4)
    machine.sealed(5, 40)
    late = ReportGone(reports=(machine.report(5, 40),), producers=(b"late",))
    machine.grow(2)
    machine.apply(late)
    machine.shrink(4)
    machine.sealed(5, 50)
    machine.apply(late)
    assert machine.topic.numbers[5] == NumberImage(50, 3)
    report = machine.report(5, 50)
    machine.apply(ReportGone(reports=(evolve_report(report, end_offset=49),), producers=(b"x",)))
    assert machine.states()[5] == "sealed"
    machine.apply(ReportGone(reports=(report, report), producers=(b"first", b"second")))
    assert machine.topic.numbers[5].producers == b"first", "it was gone by then"


def test_what_is_known_of_producers_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply_views, "KNOWN_IN_ALL_BYTES_MAX", 10)
    machine = Shrinking(LEVEL_OF_KNOWN_PRODUCERS)
    machine.shrink(1)
    for number, known in ((5, b"123456"), (4, b"12345"), (3, b"1234")):
        machine.sealed(number, 7)
        machine.gone(number, 7, 3, known)
    assert [machine.topic.numbers[n].producers for n in (5, 4, 3)] == [b"123456", b"", b"1234"]
    assert {machine.topic.state_of(n) for n in (5, 4, 3)} == {PartitionState.GONE}
    machine.grow(5)
    machine.shrink(5)
    machine.sealed(5, 8, 2_000)
    machine.gone(5, 8, 2_000, b"654321")
    assert machine.topic.numbers[5].producers == b"654321", "it takes the place of the first"
    command = ReportGone(reports=(), producers=(b"x" * (KNOWN_BYTES_MAX + 1),))
    envelope = Envelope(version=9, node_id=node(1), incarnation=1, sequence=1, command=command)
    with pytest.raises(UnknownCommandError):
        decode_envelope(encode_envelope(envelope))


def test_without_one_for_each_report_nothing_is_known() -> None:
    machine = Shrinking(LEVEL_OF_KNOWN_PRODUCERS)
    machine.shrink(4)
    machine.sealed(4, 1)
    machine.sealed(5, 2)
    reports = (machine.report(4, 1), machine.report(5, 2))
    machine.apply(ReportGone(reports=reports, producers=(b"of whom?",)))
    assert {machine.topic.state_of(n) for n in (4, 5)} == {PartitionState.GONE}
    assert machine.image.known_bytes == 0


def test_below_the_level_nothing_is_known_of_producers() -> None:
    machine = Shrinking(LEVEL_OF_CONDITIONS)
    machine.shrink(4)
    machine.sealed(5, 2)
    command = ReportGone(reports=(machine.report(5, 2),), producers=(b"known",))
    assert version_of(command) == LEVEL_OF_KNOWN_PRODUCERS
    assert write_error("ReportGone", version_of(command), machine.image)
    machine.apply(command)
    assert machine.topic.state_of(5) is PartitionState.GONE
    assert machine.image.known_bytes == 0
    machine.image = raised(machine.image, LEVEL_OF_KNOWN_PRODUCERS)
    machine.grow(2)
    assert machine.topic.numbers[5].producers == b""
    assert decode_image(encode_image(machine.image)) == machine.image


def test_leader_epochs_of_a_number_may_be_used_up(machine: Shrinking) -> None:
    machine.shrink(5)
    machine.sealed(5, 1)
    machine.gone(5, 1, (1 << 31) - EPOCH_ROOM)
    assert machine.grow(1) is ErrorCode.INVALID_PARTITIONS
    assert machine.states() == ["active"] * 5


# ---- everything else that commands do ----


def test_a_deleted_topic_takes_what_was_retired_along(machine: Shrinking) -> None:
    machine.shrink(4, alias=ALIAS)
    groups = [machine.topic.group_id(number) for number in range(6)]
    machine.apply(DeleteTopics(topic_ids=(ALIAS,)))
    assert "a" not in machine.image.topics
    assert sorted(machine.image.removals) == sorted(groups)
    assert machine.image.views == Map()
    assert machine.image.topic_names == Map()
    made = machine.apply(CreateTopics(topics=(creation("a.retired", 11, NODES),)))
    assert made.topics[0].code is ErrorCode.NONE


def test_retired_partitions_move_like_others(machine: Shrinking) -> None:
    machine.shrink(4)
    target = (node(1), node(2), node(4))
    order = ReassignPartition(topic_id=TOPIC, partition=5, replicas=target)
    assert isinstance(machine.apply(order), Done)
    assert machine.part(5).replicas == target
    assert machine.part(5).moving_from == tuple(map(node, NODES))
    epoch = machine.part(5).creation_epoch
    seen = machine.part(5).target_version
    report = MembersReport(TOPIC, 5, epoch, 4, target, target, seen)
    machine.apply(ReportVoters(reports=(), members=(report,)))
    assert machine.part(5).voters == target
    assert machine.part(5).state is PartitionState.CLOSING
    order_to_delete = machine.image.removal(machine.topic.group_id(5))
    assert order_to_delete is not None
    assert order_to_delete.nodes == (node(3),)
    assert decode_image(encode_image(machine.image)) == machine.image


def test_no_new_transaction_has_what_is_being_sealed(machine: Shrinking) -> None:
    machine.shrink(4, alias=ALIAS)
    machine.seal(5)

    def rows(*added: Any) -> Any:
        return machine.apply(TransactionRows(rows=added)).rows[-1]

    begun = rows(InitProducer(transactional_id="t", timeout_ms=1_000))

    def add(known_as: TopicId, number: int) -> int:
        row = AddPartitions(
            transactional_id="t",
            producer_id=begun.producer_id,
            epoch=begun.epoch,
            txn_seq=1,
            partitions=((known_as, (number,)),),
        )
        told: int = rows(row).code
        return told

    assert add(TOPIC, 5) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert add(TOPIC, 6) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert add(ALIAS, 4) == ErrorCode.NONE
    assert machine.image.transactions.stakes(TOPIC, 4), "it stands under the topic's own id"
    machine.sealed(4, 3)
    machine.gone(4, 3)
    assert not machine.image.transactions.stakes(TOPIC, 4)
