"""Topics that shrink: what `raftmq topic shrink` does to the state, and what it refuses. Pure.

One command lists fewer partitions; everything after that follows from the state (`node/
retirement.py`). A shrink is refused where records would be lost in silence: where groups read the
topic and not the view over what is retired, where retention would never end what is retired, and of
delay topics and those that they deliver in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from raftmq.controller.moves import first_names
from raftmq.controller.topic_validation import no_such_topic
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.apply_views import delays_error
from raftmq.metadata.broker_messages import Outcome, Outcomes, ShrinkTopicCall
from raftmq.metadata.commands import NO_TOPIC_ID, PartitionState, SealPartitions, ShrinkTopic
from raftmq.metadata.config_keys import CLOSING_QUIET
from raftmq.metadata.features import write_error
from raftmq.metadata.image import LEVEL_OF_ALIASES, LEVEL_OF_VIEWS, MetadataImage, TopicImage
from raftmq.metadata.subscriptions import reads_retired, topics_in_use
from raftmq.types import VIEW_SUFFIX, TopicId, TopicPartition

NAMES_MAX: Final = 10


def view_name(image: MetadataImage, topic: TopicImage, wanted: str) -> str:
    """The name of the view over what a topic retires."""
    known = image.view_of(topic.topic_id)
    if wanted:
        return wanted
    return f"{topic.name}{VIEW_SUFFIX}" if known is None else known.name


def plan_shrink(
    image: MetadataImage,
    call: ShrinkTopicCall,
    new_ids: tuple[TopicId, TopicId],
    configs: Mapping[str, str],
) -> tuple[ShrinkTopic | SealPartitions | None, Outcomes]:
    """Judge a call: the command that does it, None when there is nothing to do, and the answer: one
    row with the verdict, then one for each step, and one for each group that is left behind.

    `new_ids` are for a view that is not there yet and for the topic's next alias, `configs` are
    those in force for the topic.
    """
    groups: list[str] = []
    try:
        command, steps = _plan(image, call, new_ids, configs, groups)
    except KafkaError as error:
        verdict = Outcome(name="verdict", code=error.code, message=error.message)
        return None, (verdict, *(Outcome(name="group", message=name) for name in groups))
    if command is None:
        return None, (Outcome(name="verdict", message="done already"),)
    rows = (
        Outcome(name="verdict", message="would begin" if call.dry_run else "begun"),
        *(Outcome(name="step", message=text) for text in steps),
        *(Outcome(name="group", message=name) for name in groups),
    )
    return (None if call.dry_run else command), rows


def _plan(
    image: MetadataImage,
    call: ShrinkTopicCall,
    new_ids: tuple[TopicId, TopicId],
    configs: Mapping[str, str],
    groups: list[str],
) -> tuple[ShrinkTopic | SealPartitions | None, list[str]]:
    if reason := write_error("a topic that shrinks", LEVEL_OF_VIEWS, image):
        raise KafkaError(reason, code=ErrorCode.UNSUPPORTED_VERSION)
    topic = image.topics.get(call.name)
    if topic is None:
        raise no_such_topic(image, call.name, f"there is no topic {call.name}")
    listed = len(topic.partitions)
    if call.partitions == listed and (topic.retired or topic.numbers):
        return _seal_now(topic, call)
    if not 1 <= call.partitions < listed:
        raise KafkaError(
            f"Topic currently has {listed} partition(s); {call.partitions} would not be fewer.",
            code=ErrorCode.INVALID_PARTITIONS,
        )
    if refused := delays_error(image, topic):
        raise KafkaError(refused.message, code=refused.code)
    if not call.keep:
        _check_retention(topic, configs)
    view = view_name(image, topic, call.view)
    groups += left_behind(image, topic, view)
    if groups and not call.force:
        raise KafkaError(
            f"{first_names(groups, NAMES_MAX)}: would never see what they have not read of the "
            f"retired partitions. Have them subscribe to {view} as well, which is there from the "
            "shrink on; --force shrinks all the same",
            code=ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC,
        )
    known = image.view_of(topic.topic_id)
    view_id, alias = new_ids
    command = ShrinkTopic(
        topic_id=topic.topic_id,
        partitions=call.partitions,
        listed=listed,
        view=view,
        view_id=view_id if known is None else known.topic_id,
        alias=alias if image.level >= LEVEL_OF_ALIASES else NO_TOPIC_ID,
        is_sealed_now=call.now,
    )
    return command, _steps(topic, call, view, configs)


def _seal_now(topic: TopicImage, call: ShrinkTopicCall) -> tuple[SealPartitions | None, list[str]]:
    """The same shrink again: with `now`, what still closes is sealed."""
    closing = [p for p in topic.retired if p.state is PartitionState.CLOSING]
    if not call.now or not closing:
        return None, []
    command = SealPartitions(
        topic_id=topic.topic_id,
        partitions=tuple((p.index, p.creation_epoch) for p in closing),
    )
    return command, [f"partitions {_numbers([p.index for p in closing])} are sealed now"]


def _check_retention(topic: TopicImage, configs: Mapping[str, str]) -> None:
    """Refuse where what is retired would stay for ever."""
    policy, retention = configs["cleanup.policy"], configs["retention.ms"]
    if "delete" in policy and int(retention) >= 0:
        return
    raise KafkaError(
        f"{topic.name} has cleanup.policy={policy} and retention.ms={retention}: what is retired "
        "would never go. --keep shrinks all the same",
        code=ErrorCode.POLICY_VIOLATION,
    )


def left_behind(image: MetadataImage, topic: TopicImage, view: str) -> list[str]:
    """The groups that read a topic, or did, and that would not see what it retires: they do not
    read the view, nor do all their members read on by themselves."""
    found = []
    for name in image.groups.names():
        group = image.groups.groups[name]
        reads = topics_in_use(group.protocol_type, (m.subscription for m in group.members))
        if reads is not None and view in reads:
            continue
        if (
            reads
            and topic.name in reads
            and all(reads_retired(m.subscription) for m in group.members)
        ):
            continue
        # One that has read nothing of what goes has all of that before it.
        has_offsets = any(
            TopicPartition(topic.name, partition.index) in group.offsets for partition in topic.held
        )
        if has_offsets or (reads is not None and topic.name in reads):
            found.append(name)
    return found


def _steps(
    topic: TopicImage, call: ShrinkTopicCall, view: str, configs: Mapping[str, str]
) -> list[str]:
    numbers = _numbers(range(call.partitions, len(topic.partitions)))
    quiet_s = float(configs[CLOSING_QUIET]) / 1e3
    closes = (
        "sealed at once"
        if call.now
        else f"sealed once nobody has written to them for {quiet_s:g} s"
    )
    until = "for good" if call.keep else f"until retention.ms={configs['retention.ms']} ends them"
    return [
        f"partitions {numbers} of {topic.name} are listed no more, and {closes}",
        f"what they hold is read as {view}, under the same numbers and offsets, {until}",
    ]


def _numbers(numbers: range | list[int]) -> str:
    found = list(numbers)
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"
