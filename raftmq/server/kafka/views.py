"""Views, as handlers find them: by name or id, and what is behind each of their numbers.

A view looks at the retired partitions of one topic. Its numbers are the topic's; one that is listed
there (again), or of which nothing is left, is empty here. Offsets of groups are the topic's own, so
a group goes on in the view where it stood; what it says of an empty number is passed over, since it
would be taken for a position in the topic's listed partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from uuid import UUID

from attrs import frozen

from raftmq.metadata.image import LEVEL_OF_VIEWS, MetadataImage, TopicImage, ViewImage
from raftmq.partition.empty import EmptyPartition
from raftmq.partition.parked import Deadlines
from raftmq.ports import Clock
from raftmq.types import VIEW_SUFFIX, Offset, TopicId, TopicPartition


@frozen(slots=True)
class View:
    """A view and the topic that it looks at."""

    image: ViewImage
    topic: TopicImage

    def __contains__(self, index: int) -> bool:
        return 0 <= index < self.image.width

    def is_retired(self, index: int) -> bool:
        """True while that number has something to read here."""
        return index >= len(self.topic.partitions) and self.topic.partition(index) is not None

    def numbers(self) -> Iterator[int]:
        """All numbers."""
        return iter(range(self.image.width))


class Views:
    """Those of one node's image."""

    def __init__(
        self, image_of: Callable[[], MetadataImage], deadlines: Deadlines, clock: Clock
    ) -> None:
        self._image_of = image_of
        self._deadlines = deadlines
        self._clock = clock
        self._empty: dict[tuple[int, int], EmptyPartition] = {}

    def find(self, name: str | None, topic_id: UUID | None) -> View | None:
        """A view by name or by id, whichever is given."""
        image = self._image_of()
        if not image.views:
            return None
        if name is not None:
            view = image.views.get(name)
        else:
            view = None if topic_id is None else image.view_by_id(TopicId(topic_id))
        topic = None if view is None else image.topic_by_id(view.source)
        return None if view is None or topic is None else View(view, topic)

    def empty(self, view: View, index: int) -> EmptyPartition:
        """What readers of an empty number are given."""
        known = view.topic.numbers.get(index)
        end = Offset(0 if known is None else known.end_offset)
        key = (index, int(end))
        if key not in self._empty:
            self._empty[key] = EmptyPartition(index, end, self._deadlines, self._clock)
        return self._empty[key]

    def source_of(self, name: str) -> str:
        """Whose rights count for a name: a view is read by whoever may read its topic."""
        view = self.find(name, None)
        return name if view is None else view.topic.name

    def is_reserved(self, name: str) -> bool:
        """True of a name that no topic is to get by being asked for."""
        image = self._image_of()
        if image.level < LEVEL_OF_VIEWS:
            return False
        base = name.removesuffix(VIEW_SUFFIX)
        return name in image.views or (base != name and base in image.topics)

    def committed_at(self, name: str, index: int) -> TopicPartition:
        """Under which partition a group's offset is kept."""
        view = self.find(name, None)
        return TopicPartition(name if view is None else view.topic.name, index)

    def shown_at(self, at: TopicPartition) -> TopicPartition:
        """Where the offset of a partition is told of unasked: of a retired one in the view. A tool
        that then looks for its end by the name of the topic, which does not list it, asks for
        metadata without a pause."""
        image = self._image_of()
        topic = image.topics.get(at.topic) if image.views else None
        if topic is None or at.partition < len(topic.partitions):
            return at
        view = image.view_of(topic.topic_id)
        return at if view is None else TopicPartition(view.name, at.partition)

    def takes_commit(self, name: str, index: int) -> bool:
        """False where an offset of a view is passed over."""
        view = self.find(name, None)
        return view is None or view.is_retired(index)
