"""Nothing stands behind a seal that metadata takes for final: a model of a topic that shrinks and
grows while its leaders see late what is ordered, append meanwhile, and report out of order. What is
known of producers is that of the life before, wherever the topic stands.

Drawn by Hypothesis: whoever reads by number must never be led back, whatever was grown or is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from attrs import define, evolve, field
from hypothesis import given, settings
from hypothesis import strategies as st

from raftmq.metadata.commands import (
    NO_TOPIC_ID,
    PartitionState,
    ReportGone,
    ReportSealed,
    SealReport,
)
from raftmq.metadata.image import (
    LEVEL_OF_KNOWN_PRODUCERS,
    LEVEL_OF_VIEWS,
    MetadataImage,
    PartitionImage,
)
from raftmq.metadata.snapshot import decode_image, encode_image
from raftmq.types import TopicId
from tests.metadata.metadata_commands import topic_id
from tests.metadata.test_apply_views import TOPIC, Shrinking

NUMBERS: Final = 8
"""No growth goes beyond that."""


@define
class Log:
    """One life of a number: its leader, and the bare entries of it that matter here."""

    number: int
    end: int
    epoch: int
    seal: int = -1
    """The order under which it is sealed, -1 while it is not."""
    obeyed: int = -1
    """The last order that it has an entry of."""
    began_with: bytes = b""
    """What it knows of producers of the life before."""


@define
class World:
    """A topic, the logs of all lives of its numbers, and reports on their way."""

    machine: Shrinking = field(factory=lambda: Shrinking(LEVEL_OF_KNOWN_PRODUCERS))
    logs: dict[tuple[int, int], Log] = field(factory=dict)
    seen: MetadataImage = field(init=False)
    """What leaders know of."""
    sealed: list[SealReport] = field(factory=list)
    ended: list[tuple[SealReport, bytes]] = field(factory=list)
    ids: int = 100

    def __attrs_post_init__(self) -> None:
        self.look()

    def fresh_id(self) -> TopicId:
        self.ids += 1
        return topic_id(self.ids)

    def look(self, _: int = 0, __: int = 0) -> None:
        """Leaders see the newest image; new lives begin."""
        self.seen = self.machine.image
        for part in self.machine.topic.held:
            key = part.index, part.creation_epoch
            if key not in self.logs:
                number = self.machine.topic.numbers.get(part.index)
                known = b"" if number is None else number.producers
                epoch = max(part.after_epoch, 0) + 1
                self.logs[key] = Log(part.index, part.begins_at, epoch, began_with=known)

    def log(self, at: int) -> tuple[PartitionImage, Log]:
        """A partition as its leader knows it, and its log."""
        held = self.seen.topics["a"].held
        part = held[at % len(held)]
        return part, self.logs[part.index, part.creation_epoch]

    def elect(self, at: int, _: int) -> None:
        _, log = self.log(at)
        log.epoch += 1

    def append(self, at: int, count: int) -> None:
        """Whoever asks, a log with a seal takes nothing."""
        _, log = self.log(at)
        if log.seal < 0:
            log.end += count % 5

    def obey(self, at: int, _: int) -> None:
        """A leader writes the seal that is ordered, or its end, and reports a seal."""
        part, log = self.log(at)
        if part.state_version > log.obeyed:
            log.obeyed = part.state_version
            log.seal = -1 if part.takes_records else part.state_version
        if log.seal >= 0:
            report = SealReport(
                TOPIC, log.number, part.creation_epoch, log.seal, log.end, log.epoch
            )
            self.sealed.append(report)
            if part.state is PartitionState.SEALED:
                self.ended.append((report, _known(part.creation_epoch, log)))

    def report(self, at: int, count: int) -> None:
        """Reports come late, out of order and more than once, several of them in one command."""
        if self.sealed:
            rows = tuple(self.sealed[(at + i) % len(self.sealed)] for i in range(1 + count % 3))
            self.machine.apply(ReportSealed(reports=rows))

    def end(self, at: int, _: int) -> None:
        if self.ended:
            report, known = self.ended[at % len(self.ended)]
            self.machine.apply(ReportGone(reports=(report,), producers=(known,)))

    def shrink(self, to: int, with_alias: int) -> None:
        alias = self.fresh_id() if with_alias % 3 == 0 else NO_TOPIC_ID
        view = self.machine.image.view_of(TOPIC)
        view_id = self.fresh_id() if view is None else view.topic_id
        self.machine.shrink(to % NUMBERS, alias=alias, view_id=view_id)

    def seal(self, at: int, count: int) -> None:
        retired = self.machine.topic.retired
        numbers = {retired[(at + i) % len(retired)].index for i in range(count % 3 + 1) if retired}
        self.machine.seal(*sorted(numbers))

    def grow(self, count: int, _: int) -> None:
        room = NUMBERS - len(self.machine.topic.partitions)
        if room:
            self.machine.grow(1 + count % room, 1, 2)

    def judge(self) -> None:
        topic, image = self.machine.topic, self.machine.image
        assert [part.index for part in topic.partitions] == list(range(len(topic.partitions)))
        assert topic.partitions
        assert all(part.state is PartitionState.ACTIVE for part in topic.partitions)
        numbers = [part.index for part in topic.retired]
        assert numbers == sorted(set(numbers))
        assert all(part.state is not PartitionState.ACTIVE for part in topic.retired)
        view = image.view_of(TOPIC)
        assert (view is not None) == bool(topic.retired)
        assert view is None or view.width > max(numbers)
        assert len(image.views) <= 1
        names = {TOPIC, *topic.aliases}
        assert set(image.topic_names) == names
        assert view is None or view.topic_id not in names
        self.judge_logs()
        copy = decode_image(encode_image(image))
        assert copy == image
        assert encode_image(copy) == encode_image(image)

    def judge_logs(self) -> None:
        topic = self.machine.topic
        for part in topic.held:
            lives = [log for key, log in self.logs.items() if key[0] == part.index]
            log = self.logs.get((part.index, part.creation_epoch))
            before = [key for key in self.logs if key[0] == part.index and key < _key(part)]
            known = _known(max(before)[1], self.logs[max(before)]) if before else b""
            number = topic.numbers.get(part.index)
            assert (b"" if number is None else number.producers) == known, "of the life before"
            assert log is None or log.began_with == known, "the same for whoever begins later"
            if log is None:  # nobody leads it yet
                assert all(part.begins_at >= life.end for life in lives), "offsets go back"
                assert all(part.after_epoch >= life.epoch for life in lives), "epochs go back"
            elif part.state is PartitionState.SEALED:
                assert log.seal == part.state_version
                assert topic.numbers[part.index].end_offset == log.end, "that end was not final"


def _key(part: PartitionImage) -> tuple[int, int]:
    return part.index, part.creation_epoch


def _known(creation_epoch: int, log: Log) -> bytes:
    """Stands for what a log knows of producers where it ends."""
    return b"life %d up to %d" % (creation_epoch, log.end)


Step: TypeAlias = tuple[Callable[[World, int, int], None], int, int]
ACTIONS: Final = (
    World.look,
    World.look,
    World.elect,
    World.append,
    World.append,
    World.obey,
    World.obey,
    World.obey,
    World.report,
    World.report,
    World.end,
    World.shrink,
    World.seal,
    World.seal,
    World.grow,
)
STEPS: Final[st.SearchStrategy[list[Step]]] = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 11), st.integers(0, 11)), max_size=80
)


def play(world: World, steps: Iterable[Step]) -> None:
    for action, one, other in steps:
        action(world, one, other)
        world.judge()


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_numbers_never_go_back_and_seals_are_final(steps: list[Step]) -> None:
    play(World(), steps)


def test_the_model_gets_everywhere() -> None:
    """What Hypothesis draws by chance, once for certain."""
    world = World()
    steps: tuple[Step, ...] = (
        (World.shrink, 4, 0),
        (World.seal, 0, 1),
        (World.look, 0, 0),
        (World.append, 4, 3),
        (World.obey, 4, 0),
        (World.obey, 5, 0),
        (World.report, 0, 1),
        (World.look, 0, 0),
        (World.obey, 5, 0),
        (World.elect, 5, 0),
        (World.end, 0, 0),
        (World.elect, 5, 0),
        (World.grow, 2, 0),
        (World.look, 0, 0),
        (World.shrink, 2, 1),
        (World.grow, 0, 0),
    )
    play(world, steps)
    assert world.machine.states() == ["active"] * 3 + ["closing"] * 4
    assert world.machine.part(5).after_epoch > 0, "it was gone"
    assert world.logs[4, world.machine.part(4).creation_epoch].end == 3


def test_the_model_gets_to_the_second_life_of_a_number() -> None:
    """Once more for certain: it is sealed and gone as well."""
    world = World()
    for _ in range(2):
        steps: tuple[Step, ...] = (
            (World.append, 5, 3),
            (World.shrink, 5, 1),
            (World.seal, 0, 0),
            (World.look, 0, 0),
            (World.obey, 5, 0),
            (World.report, -1, 0),
            (World.look, 0, 0),
            (World.obey, 5, 0),
            (World.end, -1, 0),
            (World.grow, 0, 0),
            (World.look, 0, 0),
        )
        play(world, steps)
    assert len([key for key in world.logs if key[0] == 5]) == 3
    assert world.machine.part(5).begins_at == 6


def test_below_the_level_there_is_none_of_it_in_a_snapshot() -> None:
    machine = Shrinking(LEVEL_OF_VIEWS - 1)
    machine.shrink(4)
    data = encode_image(machine.image)
    assert int.from_bytes(data[4:6], "big") == LEVEL_OF_VIEWS - 1
    assert decode_image(data) == machine.image
    raised = Shrinking()
    bare = evolve(raised.image, version=machine.image.version)
    assert int.from_bytes(encode_image(bare)[4:6], "big") == LEVEL_OF_VIEWS
