"""What a driver's `Transaction` decides: which of its producer's it is, and whose positions it has.

Positions of consumers go with a transaction. When it is committed they are the group's; when it is
not, the consumers go back to what the group has, so that nothing is passed over. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from raftmq.types import TopicPartition
from raftmq_client.core.consumer import check_offset, check_partitions
from raftmq_client.core.group import NO_GENERATION
from raftmq_client.core.group_admin import CommittedOffset
from raftmq_client.core.group_requests import Identity
from raftmq_client.core.progress import Places
from raftmq_client.core.transactions import Ending, State, TransactionCore
from raftmq_client.errors import UsageError

C = TypeVar("C")


class Scope(Generic[C]):
    """One transaction; `C` is the driver's kind of consumer."""

    def __init__(self, core: TransactionCore, consumer: C | None) -> None:
        self.core = core
        self.consumer = consumer
        """The one whose positions go along by themselves."""
        self.number = 0
        """Its producer's transactions are counted; 0: not begun."""
        self.ending: Ending | None = None
        self._positions: list[tuple[C, Places]] = []

    def begin(self, now: float) -> None:
        """It is begun."""
        self.number = self.core.begin(now)

    def check(self) -> None:
        """Refuse a transaction that was not begun, or whose producer went on since.

        Raises:
            UsageError: it is so.
        """
        if self.number == 0:
            raise UsageError("enter the transaction first, or use `begin`")
        if self.number != self.core.number:
            raise UsageError("this transaction is over: the producer has begun another one")

    @property
    def is_open(self) -> bool:
        """True when it is this one that is to be ended, and nobody asked for that."""
        return self.number == self.core.number and self.core.state is State.OPEN

    @property
    def is_committing(self) -> bool:
        """True once its commit was asked for and may yet come through."""
        return self.ending is not None and self.ending.commit and not self.ending.is_done

    def add(self, consumer: C, places: Places) -> None:
        """These positions go with it."""
        self._positions.append((consumer, places))

    def committed(self) -> list[tuple[C, Places]]:
        """Whom to tell that his positions are saved."""
        positions, self._positions = self._positions, []
        self.consumer = None
        return positions

    def given_up(self) -> list[C]:
        """Who has to go back to what the group has."""
        known = {id(consumer): consumer for consumer, _ in self._positions}
        if self.consumer is not None:
            known.setdefault(id(self.consumer), self.consumer)
        self._positions, self.consumer = [], None
        return list(known.values())


def explicit_positions(
    group: str, offsets: Mapping[TopicPartition, int] | None
) -> tuple[Identity, Places]:
    """Positions for a group by name, as nobody's member.

    Raises:
        UsageError: these are no partitions and offsets.
    """
    if offsets is None:
        raise UsageError("a group's name needs offsets: commit_offsets('g', {partition: offset})")
    check_partitions(offsets)
    for offset in offsets.values():
        check_offset(offset)
    places = {key: CommittedOffset(offset) for key, offset in offsets.items()}
    return Identity(group, NO_GENERATION, ""), places
