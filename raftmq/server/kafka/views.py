"""Views, as handlers find them by name or id, and what stands behind their partition numbers.

A view shows one topic, and has that topic's partition numbers. One without a condition shows the
retired partitions: a number that the topic lists (again), or of which nothing is left, is empty in
the view. Groups commit the topic's own offsets, so a group goes on in the view where it stood. A
commit at an empty number is ignored, since it would become a position in the partition that the
topic lists. Whoever may read the topic may read that view.

One with a condition looks at all partitions of its topic. For clients it is a topic of its own: it
is listed among all topics, groups commit under its name, and rights are asked for by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, cast
from uuid import UUID

from attrs import frozen
from immutables import Map

from raftmq.errors import ErrorCode
from raftmq.metadata.image import LEVEL_OF_VIEWS, MetadataImage, TopicImage, ViewImage
from raftmq.partition.parked import Deadlines
from raftmq.partition.partition import Partition
from raftmq.partition.ports import (
    NO_OFFSET,
    AppendResult,
    EpochEnd,
    OffsetResult,
    ReadResult,
    ReplicaPort,
)
from raftmq.partition.settings import PartitionSettings
from raftmq.ports import Clock
from raftmq.promise import Promise
from raftmq.types import (
    VIEW_SUFFIX,
    LeaderEpoch,
    NodeId,
    Offset,
    RaftGroupId,
    TopicId,
    TopicPartition,
)

_FAR: Final = Offset((1 << 63) - 1)
_NO_GROUP: Final = TopicId(UUID(int=0))


class _Nothing:
    """What readers ask of a replica."""

    leader_epoch: Final = LeaderEpoch(1)
    log_start_offset: Final = Offset(0)


class EmptyPartition(Partition):
    """A number of a view under which there is nothing to read; it stands for every one that would
    have its log end at `end`.

    Clients take a topic with a hole for a broken one, so a view has all numbers from 0 on. Wherever
    a reader of such a number stands, its log ends there: it is never sent elsewhere, since the
    number may have records again, from where that reader stands or after it.
    """

    def __init__(self, index: int, end: Offset, deadlines: Deadlines, clock: Clock) -> None:
        super().__init__(
            TopicPartition("", index),
            RaftGroupId(_NO_GROUP, index, 0),
            NodeId(-1),
            settings=PartitionSettings(),
            deadlines=deadlines,
            clock=clock,
            on_broken_invariant=lambda _why: None,
            is_internal=True,
        )
        self._end = end

    @property
    def replica(self) -> ReplicaPort:
        """There is none: only what readers ask of it."""
        return cast(ReplicaPort, _Nothing())

    @property
    def is_leader(self) -> bool:
        """True: every node can tell that there is nothing."""
        return True

    @property
    def serves_fetches(self) -> bool:
        """True, likewise."""
        return True

    @property
    def readable_end(self) -> Offset:
        """Before every reader."""
        return Offset(0)

    @property
    def stable_end(self) -> Offset:
        """Before every reader."""
        return Offset(0)

    def read(self, offset: Offset, bytes_max: int, **_how: Any) -> ReadResult:
        """Nothing, and no reason to go elsewhere."""
        return ReadResult(ErrorCode.NONE, offset, Offset(0), last_stable_offset=offset)

    def list_offset(self, timestamp: int, **_how: Any) -> OffsetResult:
        """Begin and end are one; no record has a time."""
        return OffsetResult(ErrorCode.NONE, self._end if timestamp < 0 else NO_OFFSET)

    def end_offset_for_epoch(self, epoch: int, **_how: Any) -> EpochEnd:
        """No epoch contradicts a reader's position."""
        return EpochEnd(ErrorCode.NONE, LeaderEpoch(max(epoch, 0)), _FAR)

    def acknowledged(self, _timeout_ms: int) -> Promise[AppendResult] | None:
        """None: there is nothing to wait for."""
        return None


@frozen(slots=True)
class View:
    """A view and the topic that it looks at."""

    image: ViewImage
    topic: TopicImage

    def __contains__(self, index: int) -> bool:
        return 0 <= index < self.width

    @property
    def width(self) -> int:
        """How many numbers it has."""
        return self.topic.width if self.image.condition else self.image.width

    @property
    def source_name(self) -> str:
        """The name under which its offsets are kept and rights to it are judged."""
        return self.image.source_name(self.topic.name)

    def is_retired(self, index: int) -> bool:
        """True of a number that the topic lists no more, and that is not gone."""
        return index >= len(self.topic.partitions) and self.topic.partition(index) is not None

    def shows(self, index: int) -> bool:
        """True while that number may have something to read here."""
        if self.image.condition:
            return self.topic.partition(index) is not None
        return self.is_retired(index)

    def ignores_commits(self, index: int) -> bool:
        """True of an empty number, in which an offset that a group commits means nothing."""
        return not self.shows(index) and (not self.image.condition or index in self)

    def numbers(self) -> Iterator[int]:
        """All numbers."""
        return iter(range(self.width))


class Views:
    """The views of one node's image."""

    def __init__(
        self, image_of: Callable[[], MetadataImage], deadlines: Deadlines, clock: Clock
    ) -> None:
        self._image_of = image_of
        self._deadlines = deadlines
        self._clock = clock
        self._empty: dict[tuple[int, int], EmptyPartition] = {}
        self._known: Map[str, ViewImage] = Map()
        self._by_id: dict[UUID, ViewImage] = {}

    def find(self, name: str | None, topic_id: UUID | None) -> View | None:
        """A view by name or by id, whichever is given."""
        image = self._image_of()
        if not image.views:
            return None
        if name is not None:
            view = image.views.get(name)
        else:
            view = None if topic_id is None else self._ids(image).get(topic_id)
        topic = None if view is None else image.topic_by_id(view.source)
        return None if view is None or topic is None else View(view, topic)

    def _ids(self, image: MetadataImage) -> dict[UUID, ViewImage]:
        """All of them by id: each fetch asks for one."""
        if self._known is not image.views:
            self._known = image.views
            self._by_id = {view.topic_id: view for view in image.views.values()}
        return self._by_id

    def listed(self) -> list[View]:
        """The views that a list of all topics contains, by name."""
        views = self._image_of().views
        names = sorted(name for name, view in views.items() if view.condition)
        return [view for name in names if (view := self.find(name, None)) is not None]

    def empty(self, view: View, index: int) -> EmptyPartition:
        """What readers of an empty number are given."""
        known = view.topic.numbers.get(index)
        end = Offset(0 if known is None else known.end_offset)
        key = (index, int(end))
        if key not in self._empty:
            self._empty[key] = EmptyPartition(index, end, self._deadlines, self._clock)
        return self._empty[key]

    def source_of(self, name: str) -> str:
        """The name whose offsets and rights count for a topic or a view."""
        return self._image_of().source_of(name)

    def is_reserved(self, name: str) -> bool:
        """True of a name under which no topic is created automatically."""
        image = self._image_of()
        if image.level < LEVEL_OF_VIEWS:
            return False
        base = name.removesuffix(VIEW_SUFFIX)
        return name in image.views or (base != name and base in image.topics)

    def committed_at(self, name: str, index: int) -> TopicPartition:
        """The partition under which a group's offset is kept."""
        return TopicPartition(self.source_of(name), index)

    def shown_at(self, at: TopicPartition) -> TopicPartition:
        """The name under which a list of all offsets shows one: of a retired partition the view's.
        The topic does not list that partition, and a tool that looked for its end there would ask
        for metadata again and again."""
        image = self._image_of()
        topic = image.topics.get(at.topic) if image.views else None
        if topic is None or at.partition < len(topic.partitions):
            return at
        view = image.view_of(topic.topic_id)
        return at if view is None else TopicPartition(view.name, at.partition)

    def takes_commit(self, name: str, index: int) -> bool:
        """False where a commit is ignored."""
        view = self.find(name, None)
        return view is None or not view.ignores_commits(index)
