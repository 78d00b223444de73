"""How far every member of the metadata group is, as DescribeQuorum (KIP-595) tells it.

Only the leader knows others' log ends, so a follower asks it (`ControlPlane.ask_quorum`) and falls
back to what it knows itself: its own. -1 stands for unknown, as in Kafka.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

import msgspec

from raftmq.foreign import decode_foreign
from raftmq.types import Buffer, LeaderEpoch, NodeId, Offset, ReplicaId

UNKNOWN: Final = -1


class QuorumMember(msgspec.Struct, frozen=True, array_like=True):
    """One voter or observer; times are the leader's wall clock."""

    node_id: int
    storage_id: int
    log_end_offset: int = UNKNOWN
    last_fetch_ms: int = UNKNOWN
    last_caught_up_ms: int = UNKNOWN


class QuorumState(msgspec.Struct, frozen=True, array_like=True):
    """The metadata group at one moment."""

    leader_id: int
    leader_epoch: int
    high_watermark: int
    voters: tuple[QuorumMember, ...]
    observers: tuple[QuorumMember, ...]


AskQuorum: TypeAlias = Callable[[], "QuorumState | None"]
"""This node's own view; None where metadata is no Raft group of ours."""


class QuorumReplica(Protocol):
    """The part of the metadata replica that is asked."""

    @property
    def is_leader(self) -> bool: ...
    @property
    def leader_epoch(self) -> LeaderEpoch: ...
    @property
    def high_watermark(self) -> Offset: ...
    @property
    def log_end_offset(self) -> Offset: ...
    @property
    def voters(self) -> tuple[ReplicaId, ...]: ...
    @property
    def learners(self) -> tuple[ReplicaId, ...]: ...
    def follower_end_offset(self, replica: ReplicaId) -> Offset | None: ...


def view_of(
    replica: QuorumReplica, *, node_id: NodeId, leader_id: int, wall_ms: int
) -> QuorumState:
    """What `node_id` knows by its own replica."""
    now_ms = wall_ms if replica.is_leader else UNKNOWN

    def member(other: ReplicaId) -> QuorumMember:
        is_own = other.node_id == node_id
        end = replica.log_end_offset if is_own else replica.follower_end_offset(other)
        return QuorumMember(
            other.node_id,
            other.storage_id,
            UNKNOWN if end is None else end,
            UNKNOWN if end is None else now_ms,
            now_ms if end == replica.log_end_offset else UNKNOWN,
        )

    return QuorumState(
        leader_id,
        replica.leader_epoch,
        replica.high_watermark,
        tuple(member(voter) for voter in replica.voters),
        tuple(member(learner) for learner in replica.learners),
    )


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(QuorumState)


def encode_quorum(state: QuorumState) -> bytes:
    """Bytes for another node."""
    return _encoder.encode(state)


def decode_quorum(data: Buffer) -> QuorumState:
    """Read what `encode_quorum` wrote.

    Raises:
        RemoteProtocolError: other bytes.
    """
    return decode_foreign("quorum state", _decoder.decode, data)
