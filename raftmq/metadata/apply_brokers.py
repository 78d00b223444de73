"""What commands do to brokers, to their states and to their replacements: pure functions of
`apply.py`.

Invariants: each registration has an epoch of its own, the offset of its command; a live broker is
never put out by another one of its id with other storage; a node's state outlives its restarts; a
storage that was removed for good never registers again. Below LEVEL_OF_MOVES every node is active
and none leaves a tombstone.
"""

from __future__ import annotations

from typing import Final

from attrs import evolve

from raftmq.errors import ErrorCode
from raftmq.metadata.apply_moves import Applied, forget_node
from raftmq.metadata.apply_transactions import PRODUCER_ID_END
from raftmq.metadata.commands import (
    ChangeNodes,
    EndReplacement,
    Envelope,
    FenceBroker,
    NodeState,
    RegisterBroker,
    ReplaceNode,
    UnfenceBroker,
    UnregisterBroker,
)
from raftmq.metadata.features import outside, ranges_of
from raftmq.metadata.image import (
    LEVEL_OF_MOVES,
    BrokerImage,
    MetadataImage,
    ReplacementImage,
    all_partitions,
    holds,
)
from raftmq.metadata.results import Done, Registered, Rejection
from raftmq.types import NodeId, Offset, StorageId

PRODUCER_ID_BLOCK_MAX: Final = 1_000_000


def register_broker(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    """A broker's process has started."""
    command: RegisterBroker = envelope.command  # type: ignore[assignment]  # by _HANDLERS
    if image.cluster_id and command.cluster_id != image.cluster_id:
        return image, Rejection(
            ErrorCode.INCONSISTENT_CLUSTER_ID,
            f"this cluster is {image.cluster_id!r}, not {command.cluster_id!r}",
        )
    known = image.brokers.get(command.node_id)
    if known is not None and known.storage_id != command.storage and not known.is_fenced:
        return image, Rejection(
            ErrorCode.DUPLICATE_BROKER_REGISTRATION,
            f"another broker {command.node_id} with other storage is live",
        )
    if command.storage in image.removed.get(command.node_id, ()):
        return image, Rejection(
            ErrorCode.INCONSISTENT_CLUSTER_ID,
            f"node {command.node_id} was removed from this cluster, and the storage "
            f"{command.storage_id} with it: start it with an empty disk to let it join anew",
        )
    if beyond := outside(image.features, ranges_of(command.features)):
        return image, Rejection(
            ErrorCode.UNSUPPORTED_VERSION,
            f"broker {command.node_id} cannot be in this cluster: {beyond} by it",
        )
    broker = BrokerImage(
        node_id=command.node_id,
        storage_id=command.storage,
        epoch=offset,
        incarnation=envelope.incarnation,
        rack=command.rack,
        endpoints=command.endpoints,
        features=command.features,
        is_fenced=True,
        state=_first_state(image, command) if known is None else known.state,
    )
    if known is not None and known.storage_id != command.storage:
        # The data that it was ordered to delete is gone with its old disk.
        image = forget_node(image, command.node_id)
    replacements = image.replacements
    replaced = replacements.get(command.node_id)
    if replaced is not None and replaced.is_done:
        replacements = replacements.delete(command.node_id)  # it begins anew, with nothing
    next_producer_id = image.next_producer_id
    if command.recoveries > image.recoveries:
        next_producer_id = min(next_producer_id + PRODUCER_ID_BLOCK_MAX, PRODUCER_ID_END)
    after = evolve(
        image,
        recoveries=max(image.recoveries, command.recoveries),
        next_producer_id=next_producer_id,
        cluster_id=image.cluster_id or command.cluster_id,
        brokers=image.brokers.set(command.node_id, broker),
        replacements=replacements,
    )
    return after, Registered(offset)


def _first_state(image: MetadataImage, command: RegisterBroker) -> NodeState:
    if image.level < LEVEL_OF_MOVES:
        return NodeState.ACTIVE
    is_new = command.takes_no_data or command.node_id in image.removed
    return NodeState.NEW if is_new else NodeState.ACTIVE


def set_fenced(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    """Fence a broker, or let it back."""
    command: FenceBroker | UnfenceBroker = envelope.command  # type: ignore[assignment]
    broker = image.brokers.get(command.node_id)
    if broker is None:
        return image, Rejection(ErrorCode.BROKER_ID_NOT_REGISTERED)
    if broker.epoch != command.broker_epoch:
        return image, Rejection(ErrorCode.STALE_BROKER_EPOCH)
    is_fenced = isinstance(command, FenceBroker)
    if broker.is_fenced == is_fenced:
        return image, Done(offset)
    changed = evolve(broker, is_fenced=is_fenced)
    return evolve(image, brokers=image.brokers.set(broker.node_id, changed)), Done(offset)


def unregister_broker(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    """Forget a broker for good."""
    command: UnregisterBroker = envelope.command  # type: ignore[assignment]
    node_id = command.node_id
    broker = image.brokers.get(node_id)
    if broker is None:
        return image, Rejection(ErrorCode.BROKER_ID_NOT_REGISTERED)
    held = _held_by(image, node_id)
    if held is not None:
        return image, held
    if image.level < LEVEL_OF_MOVES:
        return _forget(image, node_id), Done(offset)
    if not broker.is_fenced:
        return image, Rejection(ErrorCode.POLICY_VIOLATION, f"broker {node_id} is alive")
    storages = (*image.removed.get(node_id, ()), broker.storage_id)
    removed = image.removed.set(node_id, tuple(dict.fromkeys(storages)))
    return evolve(_forget(image, node_id), removed=removed), Done(offset)


def _held_by(image: MetadataImage, node_id: NodeId) -> Rejection | None:
    for topic, partition in all_partitions(image):
        name = topic.name if image.level < LEVEL_OF_MOVES else f"{topic.name}-{partition.index}"
        if holds(partition, node_id):
            return Rejection(
                ErrorCode.POLICY_VIOLATION, f"broker {node_id} holds replicas of {name}"
            )
        if node_id in partition.moving_from:
            return Rejection(
                ErrorCode.POLICY_VIOLATION,
                f"a move of {name} away from broker {node_id} may still be cancelled",
            )
    return None


def _forget(image: MetadataImage, node_id: NodeId) -> MetadataImage:
    brokers = image.brokers
    if node_id in brokers:
        brokers = brokers.delete(node_id)
    return forget_node(evolve(image, brokers=brokers), node_id, is_gone=True)


def change_nodes(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    """Set states of nodes and the wanted number of metadata voters, all or nothing."""
    command: ChangeNodes = envelope.command  # type: ignore[assignment]
    if image.level < LEVEL_OF_MOVES:  # no snapshot of this level holds them
        return image, Rejection(ErrorCode.UNSUPPORTED_VERSION, "the level is too low")
    for change in command.changes:
        if change.node_id not in image.brokers:
            return image, Rejection(
                ErrorCode.BROKER_ID_NOT_REGISTERED, f"node {change.node_id} is not registered"
            )
    after = image.with_states({change.node_id: change.state for change in command.changes})
    voters = image.voters_wanted if command.voters is None else command.voters
    if voters != image.voters_wanted:
        after = evolve(after, voters_wanted=voters)
    return after, Done(offset)


def replace_node(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    """Begin a replacement."""
    command: ReplaceNode = envelope.command  # type: ignore[assignment]
    old_id, new_id = command.old_id, command.new_id
    if new_id not in image.brokers:
        return image, Rejection(
            ErrorCode.BROKER_ID_NOT_REGISTERED, f"node {new_id} is not registered"
        )
    leaving = image.leaving()
    if old_id == new_id or new_id in leaving:
        return image, Rejection(ErrorCode.INVALID_REQUEST, f"node {new_id} is to go itself")
    if leaving.get(old_id) == new_id:
        return image, Done(offset)
    return with_replacement(image, old_id, new_id), Done(offset)


def with_replacement(image: MetadataImage, old_id: NodeId, new_id: NodeId) -> MetadataImage:
    """The image once a registered node is to take the place of another."""
    if image.brokers[new_id].state is NodeState.NEW:  # this is what it takes data for
        image = image.with_states({new_id: NodeState.ACTIVE})
    replacements = image.replacements.set(old_id, ReplacementImage(old_id, new_id))
    return evolve(image, replacements=replacements)


def disk_error(image: MetadataImage, node_id: NodeId, storage_id: StorageId) -> str:
    """Why a node that is being replaced cannot join with this disk yet; "" when it can.

    With another one than that which is replaced it begins anew, but only after the end: till then
    its number stands for the old disk, which is the one to refuse for good.
    """
    successor, broker = image.leaving().get(node_id), image.brokers.get(node_id)
    if successor is None or (broker is not None and broker.storage_id == storage_id):
        return ""
    return (
        f"node {node_id} is being replaced by node {successor}: with another disk it joins anew, "
        "as a node that holds nothing, as soon as that has ended"
    )


def end_replacement(image: MetadataImage, envelope: Envelope, offset: Offset) -> Applied:
    """Forget a replaced node."""
    command: EndReplacement = envelope.command  # type: ignore[assignment]
    old_id = command.old_id
    row = image.replacements.get(old_id)
    if row is None or row.is_done:
        return image, Done(offset)
    if image.live_epoch(old_id) is not None:
        return image, Rejection(ErrorCode.POLICY_VIOLATION, f"broker {old_id} is alive")
    held = _held_by(image, old_id)
    if held is not None:
        return image, held
    replacements = image.replacements.set(old_id, evolve(row, is_done=True))
    return evolve(_forget(image, old_id), replacements=replacements), Done(offset)
