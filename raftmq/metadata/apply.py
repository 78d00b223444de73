"""What a command does to the metadata image: a pure function, the same on every node.

Never raises on a well-formed command: a command that cannot be done returns a `Rejection` and
changes nothing but the submitter's sequence. (Were it to raise nevertheless, the node stops: going
on would let images drift apart.) Never looks at a clock, at randomness or at this node's identity.

Invariants: an envelope takes effect at most once (its sequence must be above its submitter's last);
a command of an older broker epoch, or computed from a state that has changed, is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from attrs import evolve
from immutables import Map

from raftmq.errors import ErrorCode
from raftmq.metadata.apply_brokers import (
    PRODUCER_ID_BLOCK_MAX,
    change_nodes,
    end_replacement,
    register_broker,
    replace_node,
    set_fenced,
    unregister_broker,
)
from raftmq.metadata.apply_groups import apply_group
from raftmq.metadata.apply_moves import (
    Applied,
    by_group,
    confirm_removed,
    plan_moves,
    reassign_partition,
    report_voters,
)
from raftmq.metadata.apply_topics import create_partitions, create_topics, delete_topics
from raftmq.metadata.apply_transactions import (
    PRODUCER_ID_END,
    apply_commits,
    apply_rows,
    is_transactional,
)
from raftmq.metadata.apply_views import report_gone, report_sealed, seal_partitions, shrink_topic
from raftmq.metadata.commands import (
    GROUP_COMMANDS,
    NO_TOPIC_ID,
    AllocateProducerIds,
    AlterConfigs,
    AlterUsers,
    ChangeNodes,
    CommitMany,
    CommitOffsets,
    ConfirmRemoved,
    CreateAcls,
    CreatePartitions,
    CreateTopics,
    DeleteAcls,
    DeleteOffsets,
    DeleteTopics,
    EndReplacement,
    Envelope,
    FenceBroker,
    NoOperation,
    PlanMoves,
    ReassignPartition,
    RegisterBroker,
    ReplaceNode,
    ReportGone,
    ReportSealed,
    ReportVoters,
    SealPartitions,
    ShrinkTopic,
    TransactionRows,
    UnfenceBroker,
    UnregisterBroker,
    UpdateFeatures,
)
from raftmq.metadata.features import changed, update_error
from raftmq.metadata.image import (
    LEVEL_OF_MOVES,
    LEVEL_OF_SECURITY,
    LEVEL_OF_TRANSACTIONS,
    ConfigKey,
    MetadataImage,
)
from raftmq.metadata.results import CommitsDone, Done, ProducerIds, Rejection, Result
from raftmq.sasl.scram import ScramCredential
from raftmq.types import Offset, TopicPartition

RULES_MAX: Final = 100_000
USERS_IN_ALL_MAX: Final = 10_000
STALE_SEQUENCE: Final = Rejection(
    ErrorCode.INVALID_UPDATE_VERSION, "the sequence is not above the submitter's last"
)
"""Result of a command that was applied before, or came too late to be applied at all."""


def apply(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    """Apply one command at `offset`; returns the next image and the command's result."""
    assert offset > image.version, "commands are applied once, in log order"
    submitted = (envelope.incarnation, envelope.sequence)
    if submitted <= image.submitters.get(envelope.node_id, (-1, -1)):
        return evolve(image, version=offset), STALE_SEQUENCE
    submitters = image.submitters.set(envelope.node_id, submitted)
    command = envelope.command
    rejection = _fencing(image, envelope)
    if rejection is not None:
        return evolve(image, version=offset, submitters=submitters), rejection
    result: Result
    if isinstance(command, CommitOffsets | CommitMany):
        after, result = _apply_commits(image, command)
        return evolve(after, version=offset, submitters=submitters), result
    if isinstance(command, TransactionRows):
        after, result = _apply_transactional(image, command)
        return evolve(after, version=offset, submitters=submitters), result
    if isinstance(command, DeleteOffsets) and command.topic_ids:
        command = _of_their_topics(image, command)
    if isinstance(command, _GROUP_TYPES):
        groups, result = apply_group(image.groups, command, image.live_epoch)  # type: ignore[arg-type]
        return evolve(image, version=offset, submitters=submitters, groups=groups), result
    handler = _HANDLERS[type(command)]
    after, result = handler(image, envelope, offset)
    changed = after is not image and not isinstance(command, AllocateProducerIds)
    return (
        evolve(
            after,
            version=offset,
            submitters=submitters,
            structure_version=offset if changed else image.structure_version,
        ),
        result,
    )


def _apply_transactional(
    image: MetadataImage, command: TransactionRows | CommitOffsets | CommitMany
) -> Applied:
    if image.level < LEVEL_OF_TRANSACTIONS:  # no snapshot of this level holds them
        return image, Rejection(ErrorCode.UNSUPPORTED_VERSION, "the level is too low")
    if isinstance(command, TransactionRows):
        return apply_rows(image, command)
    return apply_commits(image, command)


def _apply_commits(image: MetadataImage, command: CommitOffsets | CommitMany) -> Applied:
    """Commits, except those for partitions that are others by now under the same name. Whoever
    committed there is asked to try again: its coordinator knows them as they are now."""
    if isinstance(command, CommitOffsets):
        is_astray = _is_astray(image, command)
        return (image, Rejection(_ASTRAY)) if is_astray else _apply_all(image, command)
    astray = [_is_astray(image, commit) for commit in command.commits]
    if not any(astray):
        return _apply_all(image, command)
    kept = tuple(commit for commit, is_it in zip(command.commits, astray, strict=True) if not is_it)
    after, result = _apply_all(image, msgspec.structs.replace(command, commits=kept))
    if not isinstance(result, CommitsDone):
        return after, result
    codes = iter(result.codes)
    return after, CommitsDone(tuple(int(_ASTRAY) if is_it else next(codes) for is_it in astray))


def _apply_all(image: MetadataImage, command: CommitOffsets | CommitMany) -> Applied:
    if is_transactional(command):
        return _apply_transactional(image, command)
    groups, result = apply_group(image.groups, command, image.live_epoch)
    return evolve(image, groups=groups), result


def _of_their_topics(image: MetadataImage, command: DeleteOffsets) -> DeleteOffsets:
    """The same without what is in another topic of the same name by now."""
    kept = []
    for at, topic_id in zip(command.partitions, command.topic_ids, strict=False):
        if (image.committed_id(at[0]) or NO_TOPIC_ID) == topic_id:
            kept.append(at)
    return msgspec.structs.replace(command, partitions=tuple(kept))


def _is_astray(image: MetadataImage, commit: CommitOffsets) -> bool:
    """True when a partition was deleted, or made, after the version in which it was seen."""
    if commit.known_version < 0:
        return False
    for offset in commit.offsets:
        since = image.committed_since(TopicPartition(offset.topic, offset.partition))
        if since is None or since > commit.known_version:
            return True
    return False


def _fencing(image: MetadataImage, envelope: Envelope) -> Rejection | None:
    if envelope.broker_epoch >= 0:
        broker = image.brokers.get(envelope.node_id)
        if broker is None or broker.epoch != envelope.broker_epoch:
            return Rejection(ErrorCode.STALE_BROKER_EPOCH, "made under an older registration")
    if 0 <= envelope.expected_version < image.structure_version:
        return Rejection(ErrorCode.INVALID_UPDATE_VERSION, "the state it was computed from changed")
    return None


# ---- configs and producers ----


def _alter_configs(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    command: AlterConfigs = envelope.command  # type: ignore[assignment]
    after = image
    for change in command.changes:
        if change.resource_type == "topic":
            topic = after.topics.get(change.resource_name)
            if topic is None:
                return image, Rejection(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, change.resource_name)
            configs = _with_configs(topic.configs, change.set, change.delete)
            after = evolve(
                after, topics=after.topics.set(topic.name, evolve(topic, configs=configs))
            )
        else:
            key = (change.resource_type, change.resource_name)
            configs = _with_configs(after.configs.get(key, Map()), change.set, change.delete)
            stored = after.configs.set(key, configs) if configs else _discard(after.configs, key)
            after = evolve(after, configs=stored)
    return after, Done(offset)


def _discard(
    configs: Map[ConfigKey, Map[str, str]], key: ConfigKey
) -> Map[ConfigKey, Map[str, str]]:
    return configs.delete(key) if key in configs else configs


def _with_configs(
    configs: Map[str, str], values: dict[str, str], deleted: Sequence[str]
) -> Map[str, str]:
    for name in deleted:
        configs = configs.delete(name) if name in configs else configs
    return configs.update(values) if values else configs


def _allocate_producer_ids(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    command: AllocateProducerIds = envelope.command  # type: ignore[assignment]
    start = image.next_producer_id
    end = start + max(1, min(command.count, PRODUCER_ID_BLOCK_MAX))
    if end > PRODUCER_ID_END:
        return image, Rejection(ErrorCode.UNKNOWN_SERVER_ERROR, "producer ids are used up")
    return evolve(image, next_producer_id=end), ProducerIds(start, end)


def _update_features(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    command: UpdateFeatures = envelope.command  # type: ignore[assignment]
    updates = [(update.name, update.level) for update in command.updates]
    if reason := update_error(image, updates):
        return image, Rejection(ErrorCode.FEATURE_UPDATE_FAILED, reason)
    levels = changed(image, updates)
    if levels == dict(image.features):
        return image, Done(offset)
    after = evolve(image, features=Map(levels), features_epoch=int(offset))
    if image.level < LEVEL_OF_MOVES <= after.level:
        after = by_group(after)
    return after, Done(offset)


# ---- rules and users ----


def _change_rules(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    if image.level < LEVEL_OF_SECURITY:  # no snapshot of this level holds them
        return image, Rejection(ErrorCode.UNSUPPORTED_VERSION, "the level is too low")
    command: CreateAcls | DeleteAcls = envelope.command  # type: ignore[assignment]
    if isinstance(command, CreateAcls):
        rules = image.rules.with_rules(command.rules)
        if rules.count > RULES_MAX:
            reason = f"there are at most {RULES_MAX} rules"
            return image, Rejection(ErrorCode.POLICY_VIOLATION, reason)
    else:
        rules = image.rules.without_rules(command.rules)
    after = image if rules is image.rules else evolve(image, rules=rules)
    return after, Done(offset)


def _alter_users(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    """Change credentials."""
    command: AlterUsers = envelope.command  # type: ignore[assignment]  # by _HANDLERS
    if image.level < LEVEL_OF_SECURITY:  # no snapshot of this level holds them
        return image, Rejection(ErrorCode.UNSUPPORTED_VERSION, "the level is too low")
    users = image.users
    credentials = users.credentials
    for gone in command.deletions:
        known = credentials.get(gone.user)
        if known is not None and gone.mechanism in known:
            left = known.delete(gone.mechanism)
            credentials = (
                credentials.set(gone.user, left) if left else credentials.delete(gone.user)
            )
    for one in command.upsertions:
        credential = ScramCredential(
            one.scram_salt, one.scram_stored_key, one.scram_server_key, one.iterations
        )
        known = credentials.get(one.user, Map())
        credentials = credentials.set(one.user, known.set(one.mechanism, credential))
    if len(credentials) > max(USERS_IN_ALL_MAX, len(users.credentials)):
        return image, Rejection(
            ErrorCode.POLICY_VIOLATION, f"there are at most {USERS_IN_ALL_MAX} users"
        )
    changed = evolve(users, credentials=credentials, secret=users.secret or command.scram_secret)
    return (image if changed == users else evolve(image, users=changed)), Done(offset)


def _no_operation(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    return image, Done(offset)


_ASTRAY: Final = ErrorCode.COORDINATOR_NOT_AVAILABLE  # which every client tries again

_GROUP_TYPES: Final[tuple[type, ...]] = tuple(GROUP_COMMANDS)
_HANDLERS: Final[dict[type, Callable[[MetadataImage, Envelope, Offset], Applied]]] = {
    RegisterBroker: register_broker,
    FenceBroker: set_fenced,
    UnfenceBroker: set_fenced,
    UnregisterBroker: unregister_broker,
    ReplaceNode: replace_node,
    EndReplacement: end_replacement,
    ChangeNodes: change_nodes,
    CreateTopics: create_topics,
    DeleteTopics: delete_topics,
    CreatePartitions: create_partitions,
    ShrinkTopic: shrink_topic,
    SealPartitions: seal_partitions,
    ReportSealed: report_sealed,
    ReportGone: report_gone,
    ReassignPartition: reassign_partition,
    PlanMoves: plan_moves,
    ReportVoters: report_voters,
    ConfirmRemoved: confirm_removed,
    AlterConfigs: _alter_configs,
    AllocateProducerIds: _allocate_producer_ids,
    UpdateFeatures: _update_features,
    CreateAcls: _change_rules,
    DeleteAcls: _change_rules,
    AlterUsers: _alter_users,
    NoOperation: _no_operation,
}
