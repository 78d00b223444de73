"""The rights that an admin call needs, as the controller checks them once more.

The node that a client asked has checked them by its own copy of the rules. The controller checks
them again by the newest rules: so a right that was taken away meanwhile is gone, and a call in the
name of nobody, or of somebody without the right, changes nothing. Whether a call really comes from
the client that it names, only the asking node can tell; the controller knows that this node is one
of the cluster, and no more.

`CALL_NEEDS` has a row for each kind of call. What the admin port lets through (its token, or its
being open) is as good as every right, but only for the calls that the port has. A node asks in its
own name for the first user, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeAlias

from attrs import frozen

from raftmq.controller.topic_validation import BROKER_RESOURCE
from raftmq.errors import ErrorCode
from raftmq.metadata.broker_messages import (
    AdminRequest,
    AlterConfigsCall,
    AlterUsersCall,
    Asker,
    BalanceCall,
    ChangeNodesCall,
    CreateAclsCall,
    CreatePartitionsCall,
    CreateTopicsCall,
    DeleteAclsCall,
    DeleteTopicsCall,
    PlanMovesCall,
    PreferLeaderCall,
    ReplaceNodeCall,
    ShrinkTopicCall,
    UpdateFeaturesCall,
    Way,
)
from raftmq.metadata.config_keys import DEAD_TO, DELIVERS_TO, VIEW_OF
from raftmq.metadata.image import MetadataImage
from raftmq.rights import CLUSTER_NAME, Authorizer, Kind, Operation
from raftmq.types import TopicId

_Op, _TOPIC, _CLUSTER = Operation, Kind.TOPIC, Kind.CLUSTER
Right: TypeAlias = tuple[Operation, Kind, str]
Need: TypeAlias = tuple[Right, ...]
"""Any one of these rights will do."""
Needs: TypeAlias = Callable[[Any, MetadataImage], Iterable[Need]]

BEHIND: Final = {DELIVERS_TO: _Op.WRITE, DEAD_TO: _Op.WRITE, VIEW_OF: _Op.READ}
"""A delay topic writes to another one, for whoever writes to it; a view is read by whoever is let
read it, and shows what its creator may read. So its creator needs that right himself."""


def _alters(_call: Any, _image: MetadataImage) -> Iterable[Need]:
    yield ((_Op.ALTER, _CLUSTER, CLUSTER_NAME),)


def _creates(call: CreateTopicsCall, image: MetadataImage) -> Iterator[Need]:
    for topic in call.topics:
        if call.is_auto and topic.name in image.topics:
            continue  # of another request for it: nothing is made
        yield (_Op.CREATE, _CLUSTER, CLUSTER_NAME), (_Op.CREATE, _TOPIC, topic.name)
        for name, value in topic.configs.items():
            if name in BEHIND and value:
                yield ((BEHIND[name], _TOPIC, image.source_of(value.strip())),)


def _deletes(call: DeleteTopicsCall, image: MetadataImage) -> Iterator[Need]:
    named = list(call.names)
    for topic_id in map(TopicId, call.topic_ids):
        known = image.topic_by_id(topic_id) or image.view_by_id(topic_id)
        named += [known.name] if known is not None else []  # else there is nothing to delete
    for name in named:
        yield ((_Op.DELETE, _TOPIC, image.source_of(name)),)


def _adds_partitions(call: CreatePartitionsCall, image: MetadataImage) -> Iterator[Need]:
    for topic in call.topics:
        yield ((_Op.ALTER, _TOPIC, image.source_of(topic.name)),)


def _alters_configs(call: AlterConfigsCall, image: MetadataImage) -> Iterator[Need]:
    for one in call.resources:
        if one.resource_type == BROKER_RESOURCE:
            yield ((_Op.ALTER_CONFIGS, _CLUSTER, CLUSTER_NAME),)
        else:
            yield ((_Op.ALTER_CONFIGS, _TOPIC, image.source_of(one.resource_name)),)


CALL_NEEDS: Final[dict[type, Needs]] = {
    CreateTopicsCall: _creates,
    DeleteTopicsCall: _deletes,
    CreatePartitionsCall: _adds_partitions,
    AlterConfigsCall: _alters_configs,
    UpdateFeaturesCall: _alters,
    PlanMovesCall: _alters,
    CreateAclsCall: _alters,
    DeleteAclsCall: _alters,
    AlterUsersCall: _alters,
    ReplaceNodeCall: _alters,
    ChangeNodesCall: _alters,
    BalanceCall: _alters,
    ShrinkTopicCall: _alters,
    PreferLeaderCall: _alters,
}
"""The rights that each kind of call needs, all of them."""
OPERATOR_CALLS: Final = frozenset(
    {ReplaceNodeCall, ChangeNodesCall, BalanceCall, ShrinkTopicCall, PreferLeaderCall}
)
"""What the admin port has pages for."""


@frozen(slots=True)
class CallRefusal:
    """Why a call is not decided, and the right that is missing."""

    operation: Operation
    kind: Kind
    name: str
    message: str = "not authorized"

    @property
    def code(self) -> ErrorCode:
        """What the client is told."""
        if self.kind is Kind.TOPIC:
            return ErrorCode.TOPIC_AUTHORIZATION_FAILED
        return ErrorCode.CLUSTER_AUTHORIZATION_FAILED


def call_refusal(
    authorizer: Authorizer | None, image: MetadataImage, call: AdminRequest, asker: Asker
) -> CallRefusal | None:
    """Why the controller does not decide a call; None where it does.

    Args:
        authorizer: None where clients may do everything.
    """
    kind = type(call)
    needs = CALL_NEEDS[kind]
    if asker.way is Way.NODE:
        is_first = isinstance(call, AlterUsersCall) and call.is_first
        return None if is_first else _refused(f"no node may ask for {kind.__name__} itself")
    if asker.way is Way.OPERATOR:
        if kind in OPERATOR_CALLS:
            return None
        return _refused(f"{kind.__name__} is nothing that the admin port asks for")
    if isinstance(call, AlterUsersCall) and call.is_first:
        return _refused("no client asks for the first user")
    if authorizer is None:
        return None
    rights = authorizer.rights_of(asker.principal, asker.host)
    for need in needs(call, image):
        if not any(rights.may(*right) for right in need):
            return CallRefusal(*need[-1])
    return None


def _refused(message: str) -> CallRefusal:
    return CallRefusal(_Op.ALTER, _CLUSTER, CLUSTER_NAME, message)


NOBODY_ASKS: Final = _refused("the call does not say on whose behalf it is made")
"""For a call without an asker."""
