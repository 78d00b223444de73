"""Who leads each partition, as this node has heard: soft state, never safety.

New leaders push rows to all nodes once their election entry is committed; nodes exchange rows when
they connect. Merged by (leader epoch, revision), so late news never overrides newer.

Invariants: the leader epoch of a partition never goes back, whichever node answers; a leader once
known is named until a newer one is, since clients treat "no leader" worse than a stale one
(librdkafka stops looking for a while); `None` means none was ever known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Final, TypeAlias

import msgspec
from attrs import frozen

from raftmq.errors import RemoteProtocolError
from raftmq.foreign import (
    NODE_ID_MAX,
    PARTITION_MAX,
    POSITION_MAX,
    TERM_JUMP_MAX,
    TERM_MAX,
    decode_foreign,
)
from raftmq.types import Buffer, LeaderEpoch, NodeId, TopicId

Key = tuple[TopicId, int]


@frozen(slots=True)
class LeaderRow:
    """One partition's leader as it states it.

    `revision` counts its statements within the epoch (the ISR and voters change meanwhile).
    """

    topic_id: TopicId
    partition: int
    leader_epoch: LeaderEpoch
    revision: int
    leader_id: NodeId
    isr: tuple[NodeId, ...]
    voters: tuple[NodeId, ...]

    @property
    def key(self) -> Key:
        """What the row is about."""
        return self.topic_id, self.partition


_NodeNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=NODE_ID_MAX)]


class _Wire(msgspec.Struct, array_like=True):
    topic_id: TopicId
    partition: Annotated[int, msgspec.Meta(ge=0, le=PARTITION_MAX)]
    leader_epoch: Annotated[int, msgspec.Meta(ge=0, le=TERM_MAX)]
    revision: Annotated[int, msgspec.Meta(ge=0, le=POSITION_MAX)]
    leader_id: _NodeNumber
    isr: tuple[_NodeNumber, ...]
    voters: tuple[_NodeNumber, ...]


_decoder: Final[msgspec.msgpack.Decoder[list[_Wire]]] = msgspec.msgpack.Decoder(list[_Wire])


class LeaderTable:
    """Rows by partition."""

    def __init__(self) -> None:
        self._rows: dict[Key, LeaderRow] = {}
        self._callbacks: list[Callable[[LeaderRow, bool], None]] = []
        self.version = 0
        """Rises with every change: a key for caches of encoded answers."""

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, topic_id: TopicId, partition: int) -> LeaderRow | None:
        """The newest row of a partition; None where no leader was ever known."""
        return self._rows.get((topic_id, partition))

    def on_change(self, callback: Callable[[LeaderRow, bool], None]) -> None:
        """Call `callback(row, is_own)` after each change."""
        self._callbacks.append(callback)

    def led(
        self,
        topic_id: TopicId,
        partition: int,
        *,
        leader: NodeId,
        leader_epoch: LeaderEpoch,
        isr: Iterable[NodeId],
        voters: Iterable[NodeId],
    ) -> LeaderRow | None:
        """State that this node leads; only once its election entry is committed.

        Returns the row to push to the others, None when it says nothing new (or is outdated).
        """
        known = self._rows.get((topic_id, partition))
        revision = 0
        if known is not None and known.leader_epoch == leader_epoch:
            revision = known.revision + 1
        row = LeaderRow(
            topic_id, partition, leader_epoch, revision, leader, tuple(isr), tuple(voters)
        )
        if known is not None and _facts(known) == _facts(row):
            return None
        return row if self._take(row, is_own=True) else None

    def merge(self, rows: Iterable[LeaderRow]) -> list[LeaderRow]:
        """Take in what another node said; returns what was news.

        Raises:
            RemoteProtocolError: an epoch beyond all that elections can have made. Believed, it
                would hide the partition's true leader for good, so none of the rows is taken.
        """
        rows = list(rows)
        for row in rows:
            known = self._rows.get(row.key)
            if row.leader_epoch - (0 if known is None else known.leader_epoch) > TERM_JUMP_MAX:
                raise RemoteProtocolError(
                    f"leader epoch {row.leader_epoch} of partition {row.partition} of "
                    f"{row.topic_id}, known is {known and known.leader_epoch}"
                )
        return [row for row in rows if self._take(row, is_own=False)]

    def forget(self, topic_id: TopicId) -> None:
        """Drop the rows of a deleted topic."""
        gone = [key for key in self._rows if key[0] == topic_id]
        for key in gone:
            del self._rows[key]
        self.version += bool(gone)

    def rows(self) -> list[LeaderRow]:
        """All rows, in a fixed order, for a node that just connected."""
        return [self._rows[key] for key in sorted(self._rows)]

    def _take(self, row: LeaderRow, *, is_own: bool) -> bool:
        known = self._rows.get(row.key)
        if known is not None and _age(row) <= _age(known):
            return False
        self._rows[row.key] = row
        self.version += 1
        for callback in self._callbacks:
            callback(row, is_own)
        return True


def _age(row: LeaderRow) -> tuple[int, int]:
    return row.leader_epoch, row.revision


def _facts(row: LeaderRow) -> tuple[object, ...]:
    return row.leader_epoch, row.leader_id, row.isr, row.voters


def encode_rows(rows: Iterable[LeaderRow]) -> bytes:
    """Bytes of a push."""
    return msgspec.msgpack.encode(
        [
            _Wire(r.topic_id, r.partition, r.leader_epoch, r.revision, r.leader_id, r.isr, r.voters)
            for r in rows
        ]
    )


def decode_rows(data: Buffer) -> list[LeaderRow]:
    """Read a push.

    Raises:
        RemoteProtocolError: not one.
    """
    wires = decode_foreign("leader rows", _decoder.decode, data)
    return [
        LeaderRow(
            wire.topic_id,
            wire.partition,
            LeaderEpoch(wire.leader_epoch),
            wire.revision,
            NodeId(wire.leader_id),
            tuple(NodeId(n) for n in wire.isr),
            tuple(NodeId(n) for n in wire.voters),
        )
        for wire in wires
    ]
