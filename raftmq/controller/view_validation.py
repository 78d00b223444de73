"""Validation of views with conditions, which clients create and delete as topics. Pure functions.

A view is a topic whose configs name another one (`raftmq.view.of`) and a condition
(`raftmq.view.where`). It has nothing else of its own: neither partitions, nor replicas, nor other
configs. It is refused where it would not show what its condition says: over a compacted topic
superseded values would still match, in a delay topic no record is due yet, and records of a view
over a view would be judged twice. A change that would make such a topic of one that has views is
refused as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raftmq.controller.topic_validation import (
    Settings,
    check_free_name,
    check_topic_name,
    in_force,
)
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import NewTopic
from raftmq.metadata.commands import ViewCreation
from raftmq.metadata.config_keys import (
    DELIVERS_TO,
    VIEW_KEYS,
    VIEW_OF,
    VIEW_WHERE,
    invalid,
    split_list,
)
from raftmq.metadata.features import write_error
from raftmq.metadata.image import (
    LEVEL_OF_CONDITIONS,
    VIEWS_OF_TOPIC_MAX,
    MetadataImage,
    TopicImage,
    ViewImage,
)
from raftmq.types import INTERNAL_TOPICS, METADATA_TOPIC, TopicId
from raftmq.views.conditions import BadConditionError, parse_condition


def is_view(new: NewTopic) -> bool:
    """True where a client means a view."""
    return any(key in new.configs for key in VIEW_KEYS)


def plan_view(
    image: MetadataImage,
    taken: Mapping[str, str],
    new: NewTopic,
    topic_id: TopicId,
    settings: Settings,
    planned: Sequence[ViewCreation] = (),
) -> tuple[ViewCreation, TopicImage]:
    """Check a new view; also the topic that it is over.

    Args:
        image: the state to judge by.
        taken: names with `.` as `_`, of what is there and of what the same request creates.
        new: what the client wants.
        topic_id: the id that it gets.
        settings: of the controller.
        planned: views that the same request creates.

    Raises:
        KafkaError: with Kafka's code for what is wrong; INVALID_CONFIG names the place in a
            condition that cannot be read.
    """
    check_topic_name(new.name)
    check_free_name(image, taken, new.name)
    if reason := write_error("a view with a condition", LEVEL_OF_CONDITIONS, image):
        raise KafkaError(reason, code=ErrorCode.UNSUPPORTED_VERSION)
    condition = _condition(new)
    topic = _topic(image, new, settings)
    _check_shape(new, topic)
    others = sum(view.source == topic.topic_id for view in planned)
    if len(image.conditions_of(topic.topic_id)) + others >= VIEWS_OF_TOPIC_MAX:
        raise KafkaError(
            f"{topic.name} has {VIEWS_OF_TOPIC_MAX} views, more are not allowed.",
            code=ErrorCode.POLICY_VIOLATION,
        )
    creation = ViewCreation(
        name=new.name, topic_id=topic_id, source=topic.topic_id, condition=condition
    )
    return creation, topic


def _condition(new: NewTopic) -> str:
    text = new.configs.get(VIEW_WHERE) or ""
    try:
        return parse_condition(text).text
    except BadConditionError as error:
        raise invalid(VIEW_WHERE, text, error.message) from error


def _topic(image: MetadataImage, new: NewTopic, settings: Settings) -> TopicImage:
    """The topic that a view is to be over."""
    name = (new.configs.get(VIEW_OF) or "").strip()
    if not name:
        raise invalid(VIEW_OF, name, "a view is over a topic, which this names")
    if name in INTERNAL_TOPICS or name == METADATA_TOPIC:
        raise invalid(VIEW_OF, name, "that is an internal topic")
    if name in image.views:
        raise invalid(VIEW_OF, name, "that is a view itself")
    topic = image.topics.get(name)
    if topic is None:
        raise invalid(VIEW_OF, name, "there is no such topic")
    if target := topic.configs.get(DELIVERS_TO):
        raise invalid(
            VIEW_OF,
            name,
            f"that is a delay topic; what is due comes to {target}, which can have one",
        )
    if "compact" in split_list(in_force(image, settings, name)["cleanup.policy"]):
        raise invalid(VIEW_OF, name, "that is compacted: superseded records would still match")
    return topic


def _check_shape(new: NewTopic, topic: TopicImage) -> None:
    """A view has the partitions and the replicas of its topic; a client may say so."""
    others = sorted(key for key in new.configs if key not in VIEW_KEYS)
    if others:
        raise KafkaError(
            f"A view has no configs of its own but {VIEW_OF} and {VIEW_WHERE}: {', '.join(others)}",
            code=ErrorCode.INVALID_CONFIG,
        )
    if new.assignments:
        raise KafkaError(
            f"A view has no replicas of its own: it is read where {topic.name} is.",
            code=ErrorCode.INVALID_REPLICA_ASSIGNMENT,
        )
    if new.partitions not in (-1, len(topic.partitions)):
        raise KafkaError(
            f"A view has the partitions of its topic: {topic.name} has {len(topic.partitions)}, "
            f"not {new.partitions}; -1 takes them as they are.",
            code=ErrorCode.INVALID_PARTITIONS,
        )
    if new.replication_factor not in (-1, topic.replication_factor):
        raise KafkaError(
            f"A view has no replicas of its own: {topic.name} has {topic.replication_factor}, "
            f"not {new.replication_factor}; -1 takes them as they are.",
            code=ErrorCode.INVALID_REPLICATION_FACTOR,
        )


def deletable(image: MetadataImage, view: ViewImage) -> TopicId:
    """The id of a view that a client may delete.

    Raises:
        KafkaError: INVALID_REQUEST: it goes with what its topic has retired.
    """
    if not view.condition:
        topic = image.topic_by_id(view.source)
        whose = "its topic" if topic is None else topic.name
        raise KafkaError(
            f"{view.name} is the view over what {whose} has retired: it goes when nothing of that "
            "is left.",
            code=ErrorCode.INVALID_REQUEST,
        )
    return view.topic_id
