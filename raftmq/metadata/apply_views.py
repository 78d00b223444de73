"""What commands do to retired partitions, which their topic lists no more, and to views: pure
functions of `apply.py`.

A retired partition closes, is sealed once nobody is to write to it any more, and is gone when
nothing is left in it; growth lists it again at any time before that. Its leader writes the seal and
reports it: metadata holds the order, the partition's own log the fact.

Invariants: listed partitions are the active ones, numbered from 0 without a hole. An order has the
offset of its command as `state_version`, and a report about another order changes nothing: so an
end offset that was told before a partition was listed again is never taken for final later. End
offsets and leader epochs of a number never fall within a topic, whatever was grown or is gone in
between. What a number knows of producers changes with the command that ends its partition, and with
nothing else: every replica of the next one begins with the same, whenever it begins. A topic has a
view for as long as any of its partitions is retired; no topic has the name or the id of a view.
Below LEVEL_OF_VIEWS nothing is retired, and from LEVEL_OF_ALIASES on the newest aliases of a topic
are kept. Neither a delay topic shrinks nor a topic that one delivers to: pending records could not
leave a retired partition, and what was delivered to one might be delivered to another again.

A view with a condition is over one topic, by its id: it goes with that topic, and a topic that is
made again under the same name has none. Below LEVEL_OF_CONDITIONS there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import define, evolve, field

from raftmq.errors import ErrorCode
from raftmq.foreign import TERM_MAX
from raftmq.metadata.apply_groups import remove_partitions as remove_offsets
from raftmq.metadata.apply_groups import remove_topics as remove_all_offsets
from raftmq.metadata.apply_moves import Applied
from raftmq.metadata.apply_transactions import remove_partitions as remove_stakes
from raftmq.metadata.commands import (
    NO_TOPIC_ID,
    Envelope,
    PartitionState,
    ReportGone,
    ReportSealed,
    SealPartitions,
    SealReport,
    ShrinkTopic,
    ViewCreation,
)
from raftmq.metadata.config_keys import DEAD_TO, DELIVERS_TO
from raftmq.metadata.image import (
    ALIASES_MAX,
    EPOCH_ROOM,
    KNOWN_IN_ALL_BYTES_MAX,
    LEVEL_OF_ALIASES,
    LEVEL_OF_CONDITIONS,
    LEVEL_OF_DELAYS,
    LEVEL_OF_KNOWN_PRODUCERS,
    LEVEL_OF_VIEWS,
    VIEWS_OF_TOPIC_MAX,
    MetadataImage,
    NumberImage,
    PartitionImage,
    RemovalImage,
    TopicImage,
    ViewImage,
)
from raftmq.metadata.results import Done, Rejection, TopicOutcome
from raftmq.types import INTERNAL_TOPICS, Offset, RaftGroupId, TopicId, TopicPartition

_TOO_LOW = Rejection(ErrorCode.UNSUPPORTED_VERSION, "the level is too low")


# ---- what an operator orders ----


def shrink_topic(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    """List fewer partitions of a topic."""
    command: ShrinkTopic = envelope.command  # type: ignore[assignment]
    if image.level < LEVEL_OF_VIEWS:
        return image, _TOO_LOW
    topic = image.topic_by_id(command.topic_id)
    if topic is None:
        return image, Rejection(ErrorCode.UNKNOWN_TOPIC_ID)
    rejection = (
        _shrink_error(topic, command)
        or _view_error(image, topic, command)
        or delays_error(image, topic)
    )
    if rejection is not None:
        return image, rejection
    state = PartitionState.SEALING if command.is_sealed_now else PartitionState.CLOSING
    closing = tuple(
        evolve(partition, state=state, state_version=int(offset))
        for partition in topic.partitions[command.partitions :]
    )
    names, aliases = image.topic_names, topic.aliases
    if command.alias != NO_TOPIC_ID:
        names, aliases = names.set(command.alias, topic.name), (*aliases, command.alias)
    if image.level >= LEVEL_OF_ALIASES:
        for oldest in aliases[:-ALIASES_MAX]:
            names = names.delete(oldest)
        aliases = aliases[-ALIASES_MAX:]
    changed = evolve(
        topic,
        partitions=topic.partitions[: command.partitions],
        retired=closing + topic.retired,
        aliases=aliases,
    )
    known = image.view_of(topic.topic_id)
    width = max(len(topic.partitions), 0 if known is None else known.width)
    if known is None:
        view = ViewImage(command.view, command.view_id, topic.topic_id, width)
    else:
        view = evolve(known, width=width)
    after = evolve(
        image,
        topics=image.topics.set(topic.name, changed),
        topic_names=names,
        views=image.views.set(view.name, view),
    )
    return after, Done(offset)


def _shrink_error(topic: TopicImage, command: ShrinkTopic) -> Rejection | None:
    if topic.name in INTERNAL_TOPICS:
        return Rejection(ErrorCode.INVALID_REQUEST, "an internal topic does not shrink")
    listed = len(topic.partitions)
    if command.listed != listed:
        return Rejection(ErrorCode.INVALID_UPDATE_VERSION, f"{listed} partitions are listed by now")
    if not 1 <= command.partitions < listed:
        return Rejection(
            ErrorCode.INVALID_PARTITIONS,
            f"Topic currently has {listed} partitions, {command.partitions} are not fewer",
        )
    return None


def delays_error(image: MetadataImage, topic: TopicImage) -> Rejection | None:
    """Why a topic cannot shrink that has to do with delayed records; None when it can."""
    if image.level < LEVEL_OF_DELAYS:
        return None
    target = topic.configs.get(DELIVERS_TO)
    if target:
        return Rejection(
            ErrorCode.INVALID_REQUEST,
            f"{topic.name} is a delay topic, which does not shrink: what is pending in a retired "
            f"partition would never come to {target}",
        )
    for name, other in image.topics.items():
        if topic.name in (other.configs.get(DELIVERS_TO), other.configs.get(DEAD_TO)):
            return Rejection(
                ErrorCode.INVALID_REQUEST,
                f"the delay topic {name} delivers in {topic.name}, which therefore does not shrink",
            )
    return None


def _view_error(image: MetadataImage, topic: TopicImage, command: ShrinkTopic) -> Rejection | None:
    """Why the view of a command, or its alias, cannot be; None when they can."""
    known = image.view_of(topic.topic_id)
    if known is not None:
        if (command.view, command.view_id) != (known.name, known.topic_id):
            return Rejection(ErrorCode.INVALID_REQUEST, f"the topic has the view {known.name}")
    elif not command.view or command.view in image.topics or command.view in image.views:
        return Rejection(ErrorCode.TOPIC_ALREADY_EXISTS, f"'{command.view}' already exists")
    fresh = [command.alias] if command.alias != NO_TOPIC_ID else []
    if known is None:
        fresh.append(command.view_id)
    for topic_id in fresh:
        is_taken = topic_id in image.topic_names or image.view_by_id(topic_id) is not None
        if is_taken or not topic_id.int or fresh.count(topic_id) > 1:
            return Rejection(ErrorCode.INVALID_REQUEST, "topic ids are never zero and never reused")
    return None


def seal_partitions(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    """Order closing partitions to take no more records."""
    command: SealPartitions = envelope.command  # type: ignore[assignment]
    if image.level < LEVEL_OF_VIEWS:
        return image, _TOO_LOW
    topic = image.topic_by_id(command.topic_id)
    if topic is None:
        return image, Rejection(ErrorCode.UNKNOWN_TOPIC_ID)
    changed: dict[int, PartitionImage] = {}
    for number, epoch in command.partitions:
        partition = topic.partition(number)
        if partition is None or partition.creation_epoch != epoch:
            return image, Rejection(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        if partition.state is not PartitionState.CLOSING:
            return image, Rejection(
                ErrorCode.INVALID_UPDATE_VERSION, f"partition {number} is {partition.state} by now"
            )
        changed[number] = evolve(partition, state=PartitionState.SEALING, state_version=int(offset))
    if not changed:
        return image, Done(offset)
    sealing = topic.with_partitions(changed)
    return evolve(image, topics=image.topics.set(topic.name, sealing)), Done(offset)


# ---- what leaders report ----


@define
class _Draft:
    """A topic with what the reports of one command have changed so far: each is judged with the
    changes of those before it, and the topic is copied once for all of them."""

    topic: TopicImage
    rows: dict[int, PartitionImage] = field(factory=dict)
    numbers: dict[int, NumberImage] = field(factory=dict)
    gone: dict[int, PartitionImage] = field(factory=dict)

    def ordered(self, report: SealReport, state: PartitionState) -> PartitionImage | None:
        """The partition that a report is about, while what it obeyed is what is ordered."""
        number = report.partition
        partition = self.rows.get(number) or self.topic.partition(number)
        if partition is None or number in self.gone:
            return None
        known = (partition.creation_epoch, partition.state_version, partition.state)
        told = (report.creation_epoch, report.seal_version, state)
        return partition if known == told else None

    def number(self, number: int) -> NumberImage | None:
        """How far a number has come by now."""
        return self.numbers.get(number) or self.topic.numbers.get(number)

    def reach(
        self, partition: PartitionImage, report: SealReport, producers: bytes | None = None
    ) -> None:
        """A number has come as far as a report says; never back. `producers`: what the next
        partition of that number begins with; what this one began with is kept otherwise."""
        known = self.number(partition.index) or NumberImage(-1, -1)
        epochs = (known.leader_epoch, partition.voters_epoch, partition.after_epoch)
        self.numbers[partition.index] = NumberImage(
            max(known.end_offset, report.end_offset),
            max(report.leader_epoch, *epochs),
            known.producers if producers is None else producers,
        )

    def finish(self) -> TopicImage:
        """The topic with all that."""
        rows = {number: row for number, row in self.rows.items() if number not in self.gone}
        topic = self.topic.with_partitions(rows)
        return evolve(
            topic,
            retired=tuple(p for p in topic.retired if p.index not in self.gone),
            numbers=topic.numbers.update(self.numbers),
        )


def report_sealed(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    """Take in which seals are committed, and up to where these partitions go."""
    command: ReportSealed = envelope.command  # type: ignore[assignment]
    return _taken(image, [(report, b"") for report in command.reports], _seal), Done(offset)


def report_gone(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    """Take in what has nothing left, and what was known of its producers if there is room."""
    command: ReportGone = envelope.command  # type: ignore[assignment]
    unknown = [(report, b"") for report in command.reports]
    if not any(command.producers) or image.level < LEVEL_OF_KNOWN_PRODUCERS:
        return _taken(image, unknown, _end), Done(offset)
    # Without an entry for each report nobody can say whose they are.
    told = list(zip(command.reports, command.producers, strict=False))
    after = _taken(image, told if len(told) == len(unknown) else unknown, _end)
    if after.known_bytes > KNOWN_IN_ALL_BYTES_MAX:
        after = _taken(image, unknown, _end)
    return after, Done(offset)


def _taken(
    image: MetadataImage,
    reports: Sequence[tuple[SealReport, bytes]],
    take: Callable[[_Draft, SealReport, bytes], None],
) -> MetadataImage:
    if image.level < LEVEL_OF_VIEWS:
        return image
    drafts: dict[str, _Draft] = {}
    for report, producers in reports:
        topic = image.topic_by_id(report.topic_id)
        if topic is not None:
            take(drafts.setdefault(topic.name, _Draft(topic)), report, producers)
    after = image
    for draft in drafts.values():
        if draft.rows or draft.gone:
            topic = draft.finish()
            after = evolve(after, topics=after.topics.set(topic.name, topic))
            after = _without_gone(after, draft)
    return after


def _seal(draft: _Draft, report: SealReport, _producers: bytes) -> None:
    partition = draft.ordered(report, PartitionState.SEALING)
    if partition is None:
        return
    known = draft.number(partition.index)
    if report.end_offset < max(partition.begins_at, -1 if known is None else known.end_offset):
        return  # no log is that short
    draft.rows[partition.index] = evolve(partition, state=PartitionState.SEALED)
    draft.reach(partition, report)


def _end(draft: _Draft, report: SealReport, producers: bytes) -> None:
    partition = draft.ordered(report, PartitionState.SEALED)
    known = draft.number(report.partition)
    if partition is None or known is None or report.end_offset != known.end_offset:
        return
    draft.gone[partition.index] = partition
    draft.reach(partition, report, producers)


def _without_gone(image: MetadataImage, draft: _Draft) -> MetadataImage:
    """The same without what was about partitions that are gone."""
    topic = draft.topic
    if not draft.gone:
        return image
    removals = image.removals
    for partition in draft.gone.values():
        removals = removals.update(removal_of(image, topic, partition))
    after = evolve(
        image,
        groups=remove_offsets(
            image.groups,
            [TopicPartition(name, n) for name in committed_in(image, topic) for n in draft.gone],
        ),
        transactions=remove_stakes(image.transactions, topic.topic_id, draft.gone),
        removals=removals,
    )
    return without_view(after, after.topics[topic.name])


def committed_in(image: MetadataImage, topic: TopicImage) -> tuple[str, ...]:
    """The names under which groups have offsets of a topic's partitions."""
    return (topic.name, *(view.name for view in image.conditions_of(topic.topic_id)))


def removal_of(
    image: MetadataImage, topic: TopicImage, partition: PartitionImage
) -> dict[RaftGroupId, RemovalImage]:
    """The order to delete a partition, for every node that may have data of it."""
    group = topic.group_id(partition.index)
    key = image.removal_key(group)
    ordered = image.removals.get(key)
    left = partition.dismissed if ordered is None else (*partition.dismissed, *ordered.nodes)
    nodes = tuple(sorted(dict.fromkeys((*partition.replicas, *partition.voters, *left))))
    return {key: RemovalImage(topic.name, group, nodes)}


def without_view(image: MetadataImage, topic: TopicImage) -> MetadataImage:
    """The same without the view of a topic of which nothing is retired any more."""
    view = image.view_of(topic.topic_id)
    if topic.retired or view is None:
        return image
    return evolve(image, views=image.views.delete(view.name))


# ---- growth ----


def growth_error(topic: TopicImage, count: int) -> Rejection | None:
    """Why a topic cannot list so many more partitions; None when it can."""
    first = len(topic.partitions)
    for number in range(first, first + count):
        known = topic.numbers.get(number)
        is_gone = known is not None and topic.partition(number) is None
        if is_gone and known is not None and known.leader_epoch > TERM_MAX - 2 * EPOCH_ROOM:
            return Rejection(
                ErrorCode.INVALID_PARTITIONS, f"the leader epochs of partition {number} are used up"
            )
    return None


def grown(topic: TopicImage, added: tuple[PartitionImage, ...], offset: Offset) -> TopicImage:
    """A topic with these partitions listed as well, numbered from the first that it does not list.

    A retired one of such a number is listed again with what it has, on the nodes that have it. One
    that is gone begins where the last one of its number ended.
    """
    listed = []
    for fresh in added:
        known = topic.numbers.get(fresh.index)
        partition = topic.partition(fresh.index)
        if partition is not None:
            listed.append(evolve(partition, state=PartitionState.ACTIVE, state_version=int(offset)))
        elif known is not None:
            after_epoch = known.leader_epoch + EPOCH_ROOM
            listed.append(evolve(fresh, begins_at=known.end_offset, after_epoch=after_epoch))
        else:
            listed.append(fresh)
    partitions = topic.partitions + tuple(listed)
    retired = tuple(p for p in topic.retired if p.index >= len(partitions))
    return evolve(topic, partitions=partitions, retired=retired)


# ---- views with conditions ----


def create_views(
    image: MetadataImage, creations: tuple[ViewCreation, ...], offset: Offset
) -> tuple[MetadataImage, list[TopicOutcome]]:
    """Make views with conditions; each succeeds or fails by itself."""
    outcomes = []
    for creation in creations:
        rejection = _creation_error(image, creation)
        if rejection is None:
            view = ViewImage(
                creation.name, creation.topic_id, creation.source, 0, creation.condition, offset
            )
            image = evolve(image, views=image.views.set(view.name, view))
            outcomes.append(TopicOutcome(view.name, view.topic_id))
        else:
            told = rejection.code, rejection.message
            outcomes.append(TopicOutcome(creation.name, creation.topic_id, *told))
    return image, outcomes


def _creation_error(image: MetadataImage, creation: ViewCreation) -> Rejection | None:
    if image.level < LEVEL_OF_CONDITIONS:
        return _TOO_LOW
    if not creation.name or creation.name in image.topics or creation.name in image.views:
        return Rejection(ErrorCode.TOPIC_ALREADY_EXISTS, f"'{creation.name}' already exists.")
    known = creation.topic_id in image.topic_names or image.view_by_id(creation.topic_id)
    if known or not creation.topic_id.int:
        return Rejection(ErrorCode.INVALID_REQUEST, "topic ids are never zero and never reused")
    source = image.topic_by_id(creation.source)
    if source is None or source.topic_id != creation.source:
        return Rejection(ErrorCode.UNKNOWN_TOPIC_ID, "the view is over a topic that is not there")
    if source.name in INTERNAL_TOPICS:
        return Rejection(ErrorCode.INVALID_REQUEST, "an internal topic has no views")
    if len(image.conditions_of(source.topic_id)) >= VIEWS_OF_TOPIC_MAX:
        return Rejection(
            ErrorCode.POLICY_VIOLATION, f"a topic has at most {VIEWS_OF_TOPIC_MAX} views"
        )
    return None


def delete_views(
    image: MetadataImage, topic_ids: tuple[TopicId, ...]
) -> tuple[MetadataImage, list[TopicOutcome]]:
    """Delete views with conditions by id, with what groups have committed in them."""
    outcomes = []
    for topic_id in topic_ids:
        view = image.view_by_id(topic_id)
        if view is None or not view.condition:
            outcomes.append(TopicOutcome("", topic_id, ErrorCode.UNKNOWN_TOPIC_ID))
            continue
        image = evolve(
            image,
            views=image.views.delete(view.name),
            groups=remove_all_offsets(image.groups, [view.name]),
        )
        outcomes.append(TopicOutcome(view.name, topic_id))
    return image, outcomes
