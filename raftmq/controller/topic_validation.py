"""What the controller accepts of clients' admin requests, with Kafka's error codes. Pure functions.

Each turns one row of a request and an image into a part of a command, or raises a KafkaError that
says why not. Never proposes, never waits. Randomness (topic ids) comes in as an argument.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final
from uuid import UUID

from attrs import frozen

from raftmq.controller.placement import Candidate, Load, Replicas, place
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import (
    ConfigResource,
    MoveRequest,
    NewPartitions,
    NewTopic,
)
from raftmq.metadata.commands import (
    ConfigChange,
    NodeState,
    PartitionAddition,
    PlannedMove,
    TopicCreation,
)
from raftmq.metadata.config_keys import (
    DEAD_TO,
    DELIVERS_TO,
    RETRY_ATTEMPTS,
    RETRY_FACTOR,
    RETRY_MAX,
    RETRY_MIN,
    SET_AT_CREATION,
    invalid,
    retries_nothing,
    split_list,
)
from raftmq.metadata.configs import (
    BROKER_KEYS,
    TOPIC_KEYS,
    apply_operations,
    broker_value,
    check_broker_configs,
    check_topic_configs,
    effective_topic_configs,
)
from raftmq.metadata.features import write_error
from raftmq.metadata.image import (
    LEVEL_OF_DEAD_TOPICS,
    LEVEL_OF_DELAYS,
    MetadataImage,
    TopicImage,
)
from raftmq.types import INTERNAL_TOPICS, METADATA_TOPIC, NodeId, TopicId

NAME_LENGTH_MAX: Final = 249
PARTITIONS_MAX: Final = 10_000
TOPIC_RESOURCE, BROKER_RESOURCE = 2, 4
_POLICY: Final = "cleanup.policy"
_NAME: Final = re.compile(r"[a-zA-Z0-9._-]+")


@frozen(slots=True)
class Settings:
    """What the controller's node knows beside the image.

    Attributes:
        node_id: the controller's node.
        static: Kafka settings of this node's file.
        voters_count: how many vote on metadata now: the cluster will have at least so many nodes.
        replicas_max: of a broker that does not report its own limit.
        reported_max: the limits that brokers reported.
    """

    node_id: NodeId
    static: Mapping[str, str]
    voters_count: Callable[[], int] = lambda: 1
    replicas_max: int = 20_000
    reported_max: Mapping[NodeId, int] = {}

    def limit_of(self, node_id: NodeId) -> int:
        """How many partition replicas a broker may hold."""
        return self.reported_max.get(node_id, self.replicas_max)


def check_topic_name(name: str) -> None:
    """Kafka's rules for names.

    Raises:
        KafkaError: INVALID_TOPIC_EXCEPTION.
    """
    if not name:
        raise _bad_name("the empty string is not allowed")
    if name in (".", ".."):
        raise _bad_name(f"'{name}' is not allowed")
    if len(name) > NAME_LENGTH_MAX:
        raise _bad_name(f"the length of '{name}' is longer than the max allowed length 249")
    if _NAME.fullmatch(name) is None:
        raise _bad_name(
            f"'{name}' contains one or more characters other than ASCII alphanumerics, '.', '_' "
            "and '-'"
        )


def check_free_name(image: MetadataImage, taken: Mapping[str, str], name: str) -> None:
    """Check that a topic or a view may get a name; `taken` as in `plan_topic`.

    Raises:
        KafkaError: it is an internal topic's, or is taken, or would be one with a name that is.
    """
    if name == METADATA_TOPIC:
        raise KafkaError(
            f"Creation of internal topic {name} is prohibited.", code=ErrorCode.INVALID_REQUEST
        )
    if name in INTERNAL_TOPICS:
        raise _bad_name(f"'{name}' is the name of an internal topic")
    if name in image.topics or name in image.views:
        kind = "Topic" if name in image.topics else "View"
        raise KafkaError(f"{kind} '{name}' already exists.", code=ErrorCode.TOPIC_ALREADY_EXISTS)
    rival = taken.get(name.replace(".", "_"))
    if rival is not None and rival != name:
        raise KafkaError(
            f"Topic '{name}' collides with existing topic: {rival}",
            code=ErrorCode.INVALID_TOPIC_EXCEPTION,
        )


def no_such_topic(image: MetadataImage, name: str, why: str = "") -> KafkaError:
    """Why nothing can be done to a topic that is not there: perhaps it is a view."""
    view = image.views.get(name)
    topic = None if view is None else image.topic_by_id(view.source)
    if topic is None:
        return KafkaError(why, code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    return KafkaError(
        f"{name} is a view of {topic.name}: its partitions and configs are those of that topic.",
        code=ErrorCode.INVALID_REQUEST,
    )


def plan_topic(
    image: MetadataImage,
    taken: Mapping[str, str],
    load: Load,
    new: NewTopic,
    topic_id: TopicId,
    settings: Settings,
) -> TopicCreation:
    """Check a new topic and place its replicas.

    Args:
        image: the state to judge by.
        taken: names with `.` as `_`, of all topics and of those created in the same request.
        load: of the brokers, with all of these topics.
        new: what the client wants.
        topic_id: the id that it gets.
        settings: of the controller.

    Raises:
        KafkaError: with Kafka's code for what is wrong.
    """
    check_topic_name(new.name)
    check_free_name(image, taken, new.name)
    configs = _topic_configs(new)
    if new.assignments:
        replicas = _manual_assignment(image, new)
    else:
        replicas = _automatic_assignment(image, load, new, settings)
    factor = min(len(nodes) for nodes in replicas)
    check_topic_configs(configs, replication_factor=factor)
    _check_delays(image, configs, settings)
    _check_time(image, configs, factor)
    _check_room(load, replicas, settings)
    return TopicCreation(name=new.name, topic_id=topic_id, replicas=replicas, configs=configs)


def plan_partitions(
    image: MetadataImage, load: Load, new: NewPartitions, settings: Settings
) -> PartitionAddition:
    """Check the new number of partitions of a topic and place the added ones; `load` is that of
    the brokers, with what was placed for the same request before.

    Raises:
        KafkaError: with Kafka's code for what is wrong.
    """
    topic = image.topics.get(new.name)
    if topic is None:
        raise no_such_topic(image, new.name)
    present = len(topic.partitions)
    if new.count == present:
        raise KafkaError(
            f"Topic already has {present} partition(s).", code=ErrorCode.INVALID_PARTITIONS
        )
    if new.count < present:
        raise KafkaError(
            f"The topic {new.name} currently has {present} partition(s); {new.count} would not "
            "be an increase.",
            code=ErrorCode.INVALID_PARTITIONS,
        )
    if new.count > PARTITIONS_MAX:
        raise KafkaError(
            f"A topic has at most {PARTITIONS_MAX} partitions.", code=ErrorCode.INVALID_PARTITIONS
        )
    added = new.count - present
    if new.assignments is None:
        of_topic = [partition.replicas for partition in topic.partitions]
        elsewhere = load.without(of_topic)
        candidates = _candidates(image, topic.replication_factor, load, settings)
        replicas = place(
            candidates,
            partitions=added,
            replication_factor=topic.replication_factor,
            of_topic=of_topic,
            elsewhere=elsewhere,
        )
    else:
        replicas = _added_assignment(image, topic, new.assignments, added)
    _check_room(load, replicas, settings)
    return PartitionAddition(topic_id=topic.topic_id, first_partition=present, replicas=replicas)


def plan_move(
    image: MetadataImage,
    load: Load,
    wanted: MoveRequest,
    settings: Settings,
    *,
    allow_factor_change: bool,
) -> PlannedMove | None:
    """Check where a partition should go, or that it has a move to cancel; None where it is there
    already. `load` is that of the brokers with what is planned; this move is added to it.

    Raises:
        KafkaError: with Kafka's code for what is wrong.
    """
    topic = image.topics.get(wanted.topic)
    partition = None if topic is None else topic.partition(wanted.partition)
    if topic is None:
        raise no_such_topic(image, wanted.topic, f"Unable to find a topic named {wanted.topic}.")
    if partition is None:
        raise KafkaError(
            f"Unable to find partition {wanted.topic}:{wanted.partition}.",
            code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        )
    if wanted.replicas is None and not partition.planned and not partition.moving_from:
        raise KafkaError(
            "No partition reassignment is in progress.",
            code=ErrorCode.NO_REASSIGNMENT_IN_PROGRESS,
        )
    replicas: Replicas = ()
    if wanted.replicas is not None:
        replicas = _checked_replicas(image, wanted.replicas)
        if replicas == (partition.planned or partition.replicas):
            return None
        before = partition.moving_from or partition.replicas
        if len(replicas) != len(before):
            _check_factor(image, topic, len(before), len(replicas), settings, allow_factor_change)
        known = (*before, *partition.replicas, *partition.planned)
        _check_added(image, load, [n for n in replicas if n not in known], settings)
    return PlannedMove(
        topic_id=topic.topic_id,
        partition=partition.index,
        creation_epoch=partition.creation_epoch,
        replicas=replicas,
    )


def _check_factor(
    image: MetadataImage,
    topic: TopicImage,
    before: int,
    after: int,
    settings: Settings,
    allow_factor_change: bool,
) -> None:
    if not allow_factor_change:
        raise KafkaError(
            f"The replication factor is changed from {before} to {after}",
            code=ErrorCode.INVALID_REPLICATION_FACTOR,
        )
    _check_time(image, topic.configs, after)
    name = "min.insync.replicas"
    text = topic.configs.get(name) or broker_value(image, settings.node_id, settings.static, name)
    if after < min(before, int(text or 1)):
        raise KafkaError(
            f"{name} of topic {topic.name} is {text}: with a replication factor of {after} every "
            "acks=all would fail.",
            code=ErrorCode.INVALID_REPLICATION_FACTOR,
        )


def _check_takes(image: MetadataImage, node_id: NodeId) -> None:
    broker = image.brokers[node_id]
    if not broker.takes_replicas:
        hint = f": `raftmq node add {node_id}`" if broker.state is NodeState.NEW else ""
        raise _bad_assignment(
            f"Broker {node_id} takes no replicas, since it is {broker.state}{hint}."
        )


def _check_added(
    image: MetadataImage, load: Load, added: Sequence[NodeId], settings: Settings
) -> None:
    """Refuse brokers that take no new replicas, or have no room for one more; count those."""
    leaving = image.leaving()
    for node_id in added:
        if node_id in leaving:
            raise _bad_assignment(
                f"Broker {node_id} is being replaced by broker {leaving[node_id]}."
            )
        _check_takes(image, node_id)
    _check_room(load, [tuple(added)] if added else [], settings)
    for node_id in added:
        load.replicas[node_id] = load.replicas.get(node_id, 0) + 1


def _check_room(load: Load, added: Sequence[Replicas], settings: Settings) -> None:
    """Refuse replicas for which a broker would not have enough file descriptors."""
    more = Load(added).replicas
    for node_id in sorted(more):
        count = load.replicas.get(node_id, 0) + more[node_id]
        replicas_max = settings.limit_of(node_id)
        if count > replicas_max:
            raise KafkaError(
                f"Broker {node_id} would hold {count} partition replicas; replicas_max "
                f"is {replicas_max}.",
                code=ErrorCode.POLICY_VIOLATION,
            )


def plan_configs(
    image: MetadataImage, resource: ConfigResource, settings: Settings
) -> ConfigChange:
    """Check changes of one resource and turn them into whole values.

    Raises:
        KafkaError: with Kafka's code for what is wrong.
    """
    rows = [(op.name, op.operation, op.value) for op in resource.operations]
    if resource.resource_type == TOPIC_RESOURCE:
        check_topic_name(resource.resource_name)
        topic = image.topics.get(resource.resource_name)
        if topic is None:
            raise no_such_topic(image, resource.resource_name)
        effective = in_force(image, settings, topic.name)
        present = {name: topic.configs[name] for name in sorted(topic.configs)}
        start = {} if resource.replaces_all else present
        values = apply_operations(TOPIC_KEYS, start, rows, effective)
        factor = min(len(partition.replicas) for partition in topic.partitions)
        check_topic_configs(values, replication_factor=factor)
        for key in SET_AT_CREATION:
            if values.get(key, "") != present.get(key, ""):
                raise invalid(key, values.get(key, ""), "set when the topic is created")
        if values.get(DELIVERS_TO):
            _check_policy(values, values[DELIVERS_TO])
        policy = values.get(_POLICY) or broker_value(
            image, settings.node_id, settings.static, "log.cleanup.policy"
        )
        if "compact" in split_list(policy or ""):
            _check_no_views(image, topic, policy or "")
        return _change("topic", resource.resource_name, present, values)
    if resource.resource_type != BROKER_RESOURCE:
        raise KafkaError(
            f"Unexpected resource type {resource.resource_type}.", code=ErrorCode.INVALID_REQUEST
        )
    name = _broker_name(image, resource.resource_name)
    stored = image.configs.get(("broker", name))
    present = {} if stored is None else {key: stored[key] for key in sorted(stored)}
    start = {} if resource.replaces_all else present
    values = apply_operations(BROKER_KEYS, start, rows, {})
    check_broker_configs(values)
    policy = values.get("log.cleanup.policy", "")
    if "compact" in split_list(policy):
        for topic in image.topics_by_id() if image.views else ():
            if _POLICY not in topic.configs:
                _check_no_views(image, topic, policy)
    return _change("broker", name, present, values)


def _change(
    kind: str, name: str, present: Mapping[str, str], values: Mapping[str, str]
) -> ConfigChange:
    return ConfigChange(
        resource_type=kind,
        resource_name=name,
        set={key: values[key] for key in sorted(values) if present.get(key) != values[key]},
        delete=tuple(key for key in sorted(present) if key not in values),
    )


def _broker_name(image: MetadataImage, name: str) -> str:
    if name == "":
        return name
    try:
        node_id = NodeId(int(name))
    except ValueError as error:
        raise KafkaError(
            f"Node id must be an integer, but it is: {name}", code=ErrorCode.INVALID_REQUEST
        ) from error
    if node_id not in image.brokers:
        raise KafkaError(f"No such broker: {name}", code=ErrorCode.INVALID_REQUEST)
    return str(node_id)


def _check_delays(image: MetadataImage, configs: Mapping[str, str], settings: Settings) -> None:
    """Refuse a delay or retry topic that could not deliver what it takes."""
    target, dead = configs.get(DELIVERS_TO, ""), configs.get(DEAD_TO, "")
    if dead and (not target or target == dead):
        why = f"a topic with a dead topic has another topic as its {DELIVERS_TO}"
        raise invalid(DEAD_TO, dead, why)
    for key in (RETRY_ATTEMPTS, RETRY_MIN, RETRY_MAX, RETRY_FACTOR):
        if key in configs and not dead:
            raise invalid(key, configs[key], f"a retry topic has a {DEAD_TO}")
    if dead and retries_nothing(configs.get(RETRY_ATTEMPTS)):
        _check_without_retries(image, configs)
    if target:
        _check_policy(configs, target)
        _check_target(image, configs, DELIVERS_TO, settings)
    if dead:
        _check_target(image, configs, DEAD_TO, settings)


def _check_without_retries(image: MetadataImage, configs: Mapping[str, str]) -> None:
    """Refuse a dead topic of what retries nothing where nodes may be that take it for a retry topic
    all of whose records were tried too often."""
    if image.level < LEVEL_OF_DEAD_TOPICS:
        why = write_error(
            f"a delay topic with {DEAD_TO} and no retries", LEVEL_OF_DEAD_TOPICS, image
        )
        raise KafkaError(why, code=ErrorCode.UNSUPPORTED_VERSION)
    for key in (RETRY_MIN, RETRY_MAX, RETRY_FACTOR):
        if key in configs:
            raise invalid(key, configs[key], f"there are no retries, by {RETRY_ATTEMPTS}=0")


def _check_time(image: MetadataImage, configs: Mapping[str, str], factor: int) -> None:
    """Refuse a delay topic whose leader may never know what time it is: of several nodes no one's
    clock is believed alone, and the replies of its followers are what brings others'."""
    if configs.get(DELIVERS_TO) and factor == 1 and len(image.brokers) > 1:
        raise KafkaError(
            f"With {len(image.brokers)} brokers a delay topic has 2 replicas at least: a leader "
            "that hears no other clock does not know when a record is due.",
            code=ErrorCode.INVALID_REPLICATION_FACTOR,
        )


def _check_target(
    image: MetadataImage, configs: Mapping[str, str], key: str, settings: Settings
) -> None:
    target = configs[key]
    if image.level < LEVEL_OF_DELAYS:
        why = write_error("a delay topic", LEVEL_OF_DELAYS, image)
        raise KafkaError(why, code=ErrorCode.UNSUPPORTED_VERSION)
    if target in image.views:
        raise invalid(key, target, "that is a view, which nobody writes to")
    if target in INTERNAL_TOPICS or target == METADATA_TOPIC:
        raise invalid(key, target, "that is an internal topic")
    topic = image.topics.get(target)
    if topic is None:
        raise invalid(key, target, "there is no such topic")
    if topic.configs.get(DELIVERS_TO):
        raise invalid(key, target, "that is a delay topic itself")
    size = "max.message.bytes"
    own = configs.get(size) or in_force(image, settings, "")[size]
    theirs = in_force(image, settings, topic.name)[size]
    if int(own) > int(theirs):
        raise invalid(key, target, f"its {size} is {theirs}, less than {own} here")


def _check_no_views(image: MetadataImage, topic: TopicImage, policy: str) -> None:
    names = ", ".join(view.name for view in image.conditions_of(topic.topic_id))
    if names:
        why = f"{topic.name} has views, which would still show what is superseded: {names}"
        raise invalid(_POLICY, policy, why)


def _check_policy(configs: Mapping[str, str], target: str) -> None:
    if "compact" in split_list(configs.get("cleanup.policy", "")):
        raise invalid(DELIVERS_TO, target, "a delay topic cannot be compacted")


def in_force(image: MetadataImage, settings: Settings, topic: str) -> dict[str, str]:
    """Every config of a topic with the value that holds for it."""
    return effective_topic_configs(image, topic, settings.node_id, settings.static)


def _bad_name(why: str) -> KafkaError:
    return KafkaError(f"Topic name is invalid: {why}", code=ErrorCode.INVALID_TOPIC_EXCEPTION)


def _topic_configs(new: NewTopic) -> dict[str, str]:
    configs = {}
    for name in sorted(new.configs):
        value = new.configs[name]
        if value is None:
            raise KafkaError(
                f"Null value not supported for topic configs: {name}",
                code=ErrorCode.INVALID_CONFIG,
            )
        configs[name] = value.strip()
    check_topic_configs(configs)
    return configs


def _automatic_assignment(
    image: MetadataImage, load: Load, new: NewTopic, settings: Settings
) -> tuple[Replicas, ...]:
    if new.replication_factor < -1 or new.replication_factor == 0:
        raise KafkaError(
            "Replication factor must be larger than 0, or -1 to use the default value.",
            code=ErrorCode.INVALID_REPLICATION_FACTOR,
        )
    if new.partitions < -1 or new.partitions == 0:
        raise KafkaError(
            "Number of partitions was set to an invalid non-positive value.",
            code=ErrorCode.INVALID_PARTITIONS,
        )
    partitions = new.partitions
    if partitions == -1:
        partitions = _broker_number(image, settings, "num.partitions")
    if partitions > PARTITIONS_MAX:
        raise KafkaError(
            f"A topic has at most {PARTITIONS_MAX} partitions.", code=ErrorCode.INVALID_PARTITIONS
        )
    factor = new.replication_factor
    if factor == -1:
        known = [b for b in image.brokers.values() if b.state is not NodeState.NEW]
        nodes = max(len(known), settings.voters_count())
        factor = min(_broker_number(image, settings, "default.replication.factor"), nodes)
    candidates = _candidates(image, factor, load, settings)
    return place(candidates, partitions=partitions, replication_factor=factor, elsewhere=load)


def _broker_number(image: MetadataImage, settings: Settings, name: str) -> int:
    value = broker_value(image, settings.node_id, settings.static, name)
    assert value is not None, "the key has a default"
    return int(value)


def _candidates(
    image: MetadataImage, factor: int, load: Load, settings: Settings
) -> list[Candidate]:
    """Live brokers that take replicas; where they are too few but a majority of the replicas would
    live, registered ones too, so that a topic can be created while a node is down."""
    leaving = image.leaving()
    brokers = [
        image.brokers[n]
        for n in sorted(image.brokers)
        if n not in leaving and image.brokers[n].takes_replicas
    ]
    live = [broker for broker in brokers if not broker.is_fenced]
    if len(live) < factor <= len(brokers) and len(live) > factor // 2:
        chosen = brokers
    else:
        chosen = live
    others = [b for b in image.live_brokers() if not b.takes_replicas and b.node_id not in leaving]
    if len(chosen) < factor <= len(chosen) + len(others):
        states = ", ".join(f"broker {b.node_id} is {b.state}" for b in others)
        raise KafkaError(
            f"The target replication factor of {factor} cannot be reached because only "
            f"{len(chosen)} broker(s) take new replicas: {states}.",
            code=ErrorCode.INVALID_REPLICATION_FACTOR,
        )
    return [
        Candidate(
            broker.node_id,
            broker.rack,
            broker.is_fenced,
            settings.limit_of(broker.node_id) - load.replicas.get(broker.node_id, 0),
        )
        for broker in chosen
    ]


def planned_load_of(image: MetadataImage) -> Load:
    """How many replicas each broker has or is to have, once what is planned has begun."""
    return Load(
        tuple(dict.fromkeys((*partition.replicas, *partition.planned)))
        if partition.planned
        else partition.replicas
        for topic in image.topics_by_id()
        for partition in topic.held
    )


def load_of(image: MetadataImage) -> Load:
    """How many replicas each broker has, of all topics."""
    return Load(partition.replicas for topic in image.topics_by_id() for partition in topic.held)


def _manual_assignment(image: MetadataImage, new: NewTopic) -> tuple[Replicas, ...]:
    if new.partitions != -1:
        raise KafkaError(
            "A manual partition assignment was specified, but numPartitions was not set to -1.",
            code=ErrorCode.INVALID_REQUEST,
        )
    if new.replication_factor != -1:
        raise KafkaError(
            "A manual partition assignment was specified, but replication factor was not set to "
            "-1.",
            code=ErrorCode.INVALID_REQUEST,
        )
    if sorted(new.assignments) != list(range(len(new.assignments))):
        raise _bad_assignment("partitions should be a consecutive 0-based integer sequence")
    if len(new.assignments) > PARTITIONS_MAX:
        raise KafkaError(
            f"A topic has at most {PARTITIONS_MAX} partitions.", code=ErrorCode.INVALID_PARTITIONS
        )
    replicas = [new.assignments[i] for i in range(len(new.assignments))]
    return _checked(image, replicas, len(replicas[0]))


def _added_assignment(
    image: MetadataImage, topic: TopicImage, assignments: Sequence[tuple[int, ...]], added: int
) -> tuple[Replicas, ...]:
    if len(assignments) != added:
        raise _bad_assignment(
            f"Attempted to add {added} additional partition(s), but only {len(assignments)} "
            "assignment(s) were specified."
        )
    return _checked(image, assignments, topic.replication_factor)


def _checked(
    image: MetadataImage, assignments: Sequence[tuple[int, ...]], factor: int
) -> tuple[Replicas, ...]:
    checked = []
    for nodes in assignments:
        if not nodes:
            raise _bad_assignment("The manual partition assignment includes an empty replica list.")
        if len(nodes) != factor:
            raise _bad_assignment(
                "The manual partition assignment includes a partition with "
                f"{len(nodes)} replica(s), but this is not consistent with previous partitions, "
                f"which have {factor} replica(s)."
            )
        checked.append(_checked_replicas(image, nodes))
    for node_id in sorted({node_id for nodes in checked for node_id in nodes}):
        _check_takes(image, node_id)
    return tuple(checked)


def _checked_replicas(image: MetadataImage, nodes: Sequence[int]) -> Replicas:
    """One partition's replicas as a client names them."""
    seen: dict[NodeId, None] = {}
    for node in nodes:
        if NodeId(node) not in image.brokers:
            raise _bad_assignment(
                f"The manual partition assignment includes broker {node}, but no such broker is "
                "registered."
            )
        if node in seen:
            raise _bad_assignment(
                f"The manual partition assignment includes the broker {node} more than once."
            )
        seen[NodeId(node)] = None
    if not seen:
        raise _bad_assignment("The manual partition assignment includes an empty replica list.")
    return tuple(seen)


def _bad_assignment(why: str) -> KafkaError:
    return KafkaError(why, code=ErrorCode.INVALID_REPLICA_ASSIGNMENT)


NO_ID: Final = TopicId(UUID(int=0))
