"""What the submitter of a metadata command is told: a struct for each kind of command.

Results never go over a wire: each node makes its own when it applies a command.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from raftmq.errors import ErrorCode
from raftmq.types import Offset, TopicId


class Rejection(msgspec.Struct, frozen=True):
    """The command changed nothing: a definite failure."""

    code: ErrorCode
    message: str = ""


class Registered(msgspec.Struct, frozen=True):
    """Result of RegisterBroker."""

    broker_epoch: int


class TopicOutcome(msgspec.Struct, frozen=True):
    """What became of one topic."""

    name: str
    topic_id: TopicId
    code: ErrorCode = ErrorCode.NONE
    message: str = ""


class TopicOutcomes(msgspec.Struct, frozen=True):
    """Result of CreateTopics, DeleteTopics and CreatePartitions."""

    topics: tuple[TopicOutcome, ...]


class MoveOutcome(msgspec.Struct, frozen=True):
    """What became of one move."""

    code: ErrorCode = ErrorCode.NONE
    message: str = ""


class MoveOutcomes(msgspec.Struct, frozen=True):
    """Result of PlanMoves: one of each of its moves, in order."""

    moves: tuple[MoveOutcome, ...]


class ProducerIds(msgspec.Struct, frozen=True):
    """Result of AllocateProducerIds: the half-open range [start, end)."""

    start: int
    end: int


class Done(msgspec.Struct, frozen=True):
    """Applied, at `offset`."""

    offset: Offset


class Claimed(msgspec.Struct, frozen=True):
    """Result of ClaimGroup."""

    coordinator_epoch: int


class GroupDone(msgspec.Struct, frozen=True):
    """Result of every other command that was accepted."""


class CommitsDone(msgspec.Struct, frozen=True):
    """Result of CommitMany: an ErrorCode for each of its commits, in order."""

    codes: tuple[int, ...]


class RowDone(msgspec.Struct, frozen=True):
    """What became of one row of a TransactionRows, and where its id stands after it.

    `producer_id` and `epoch` are what its producer must name from now on; -1 where there is no such
    id. `state` is a TransactionState, `txn_seq` the number of the id's running or last transaction.
    """

    code: int
    producer_id: int = -1
    epoch: int = -1
    txn_seq: int = -1
    state: int = -1


class RowsDone(msgspec.Struct, frozen=True):
    """Result of TransactionRows: one of each of its rows, in order."""

    rows: tuple[RowDone, ...]


Result: TypeAlias = Any
"""What the submitter of a command is told: a struct of this module."""
