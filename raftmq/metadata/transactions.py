"""Transactional ids as the metadata group knows them: where each stands, and what it still owes.

Owns the immutable `TransactionsImage` and its questions; `apply_transactions.py` makes the next.

A transaction is numbered by `txn_seq`, which rises with each one of its id; (producer id, txn_seq)
names one for ever. It is ONGOING from its first partition or group on. Its decision (PREPARE_*) is
final; from then on each of its partitions owes a marker, and the report of it. With the last report
it is COMPLETE_*, and the next one may begin.

Credentials are what a producer has to name: (producer id, epoch). Under protocol 1 they stay the
same from one transaction to the next, under protocol 2 each end raises the epoch, and the marker
carries the raised one; an abort that no producer asked for always does. An epoch of EPOCH_LAST is
the last one given: what comes after it is a new producer id at epoch 0.

Invariants: a decision never changes; it is complete only when every partition that was added has
reported or was deleted; all that is in the image but `ids` and the two counters follows from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum, IntEnum
from typing import Final, TypeAlias

import msgspec
from attrs import frozen
from immutables import Map

from raftmq.metadata.commands import UNDATED
from raftmq.types import TopicId

EPOCH_LAST: Final = 32_766
"""The last epoch that a producer id has; only a marker may carry one more."""

Credentials: TypeAlias = tuple[int, int]
"""(producer id, epoch)."""
NOBODY: Final[Credentials] = (-1, -1)
PartitionKey: TypeAlias = tuple[TopicId, int]


class TransactionState(IntEnum):
    """Where the running transaction of an id stands, or the last one; numbers as in Kafka."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5

    @property
    def is_prepared(self) -> bool:
        """Decided, with markers to be written or reported."""
        return self in _PREPARED

    @property
    def may_begin(self) -> bool:
        """The next transaction may begin."""
        return self in _SETTLED

    @property
    def is_commit(self) -> bool:
        """Decided, and committed."""
        return self in _COMMITTED

    @property
    def label(self) -> str:
        """As Kafka's tools and clients know it."""
        return "".join(word.capitalize() for word in self.name.split("_"))


_PREPARED: Final = (TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT)
_COMMITTED: Final = (TransactionState.PREPARE_COMMIT, TransactionState.COMPLETE_COMMIT)
_SETTLED: Final = (
    TransactionState.EMPTY,
    TransactionState.COMPLETE_COMMIT,
    TransactionState.COMPLETE_ABORT,
)


class Transaction(msgspec.Struct, frozen=True, kw_only=True):
    """One transactional id, and its running or last transaction.

    Attributes:
        producer_id: with `epoch` the credentials that its producer has to name from now on.
        last: the credentials before these, while their holder may ask for its answer again: because
            it lost that of its InitProducerId, or (protocol 2) of its EndTxn. NOBODY: none may.
        txn_seq: the number of the running transaction, or of the last one; 0 before the first.
        protocol: of the running transaction, or of the last one.
        partitions: of an ongoing transaction all that were added, with their creation epochs; of a
            decided one those that have not reported their marker yet. What was deleted is in none.
        groups: that have, or may have, pending offsets of the running transaction.
        marker: what markers carry, once it is decided: the producer id of its records, and an epoch
            that is theirs or (protocol 2, or aborted for a producer that was silent) one more.
        decision: the number of the decision while markers are owed, else 0; see `decided_after`.
        started_at_ms: when the running or last transaction began; UNDATED where that was not known.
        changed_at_ms: when anything last happened to this id; for its expiry. UNDATED likewise.
    """

    transactional_id: str
    producer_id: int
    epoch: int
    timeout_ms: int
    last: Credentials = NOBODY
    txn_seq: int = 0
    state: TransactionState = TransactionState.EMPTY
    protocol: int = 1
    partitions: Map[PartitionKey, int] = Map()
    groups: tuple[str, ...] = ()
    marker: Credentials = NOBODY
    decision: int = 0
    started_at_ms: int = UNDATED
    changed_at_ms: int = UNDATED

    @property
    def credentials(self) -> Credentials:
        """What its producer has to name."""
        return self.producer_id, self.epoch

    @property
    def records_producer_id(self) -> int:
        """The producer id in the records of the running transaction, or of the undecided one."""
        return self.marker[0] if self.state.is_prepared else self.producer_id


class Standing(Enum):
    """What a partition's leader is told of a transactional batch."""

    ADDED = 1
    """Append it: its transaction runs, and this partition is part of it."""
    NOT_ADDED = 2
    """Its producer may write, but this partition is no part of a running transaction."""
    ENDING = 3
    """The transaction before is decided, and its markers are not all reported."""
    FENCED = 4
    """Its epoch is over."""
    UNKNOWN = 5
    """This image knows no such producer, or not this epoch yet: a newer one may."""


@frozen(slots=True)
class TransactionsImage:
    """All transactional ids.

    Attributes:
        ids: by transactional id.
        producers: transactional ids by producer id, also by the one of the records of a decided
            transaction whose producer has a new one already.
        stakes_at: what is undecided or unreported in a partition: transactional ids by the producer
            id of their records. No partition without any.
        decided: transactional ids with markers owed, by the number of their decision.
        last_decision: the number of the last decision of all.
    """

    ids: Map[str, Transaction] = Map()
    producers: Map[int, str] = Map()
    stakes_at: Map[PartitionKey, Map[int, str]] = Map()
    decided: Map[int, str] = Map()
    last_decision: int = 0

    def get(self, transactional_id: str) -> Transaction | None:
        """The id of that name."""
        return self.ids.get(transactional_id)

    def of_producer(self, producer_id: int) -> Transaction | None:
        """The id whose producer has, or whose owed markers carry, that producer id."""
        name = self.producers.get(producer_id)
        return None if name is None else self.ids[name]

    def names(self) -> list[str]:
        """All ids, sorted: a Map's own order differs from process to process."""
        return sorted(self.ids)

    def stakes(self, topic_id: TopicId, partition: int) -> list[Transaction]:
        """Transactions that are undecided there or owe a report from there, by producer id."""
        found = self.stakes_at.get((topic_id, partition))
        return [] if found is None else [self.ids[found[number]] for number in sorted(found)]

    def decided_after(self, decision: int) -> Iterator[Transaction]:
        """Transactions with markers owed that were decided after that decision, in their order.

        With 0 all of them; with `last_decision` of an earlier image what came since, at a cost that
        goes with how many those are.
        """
        if self.last_decision - decision > len(self.decided):
            numbers = [number for number in sorted(self.decided) if number > decision]
        else:
            numbers = [*range(decision + 1, self.last_decision + 1)]
        for number in numbers:
            name = self.decided.get(number)
            if name is not None:
                yield self.ids[name]

    def standing(self, producer_id: int, epoch: int, topic_id: TopicId, partition: int) -> Standing:
        """What is known here of a transactional batch of that producer for that partition.

        Never newer than the image; a leader asks one that is no older than its term's barrier.
        """
        known = self.of_producer(producer_id)
        if known is None:
            return Standing.UNKNOWN
        if known.producer_id != producer_id or epoch < known.epoch:
            return Standing.FENCED
        if epoch > known.epoch:
            return Standing.UNKNOWN
        if known.state.is_prepared:
            return Standing.ENDING
        is_added = (
            known.state is TransactionState.ONGOING and (topic_id, partition) in known.partitions
        )
        return Standing.ADDED if is_added else Standing.NOT_ADDED


NO_TRANSACTIONS: Final = TransactionsImage()


def transactions_of(ids: Iterable[Transaction], last_decision: int) -> TransactionsImage:
    """The image of these ids: all else follows from them."""
    by_name: dict[str, Transaction] = {}
    producers: dict[int, str] = {}
    stakes_at: dict[PartitionKey, dict[int, str]] = {}
    decided: dict[int, str] = {}
    for one in ids:
        name = one.transactional_id
        by_name[name] = one
        producers[one.producer_id] = name
        producers[one.records_producer_id] = name
        if one.decision:
            decided[one.decision] = name
        for key in one.partitions:
            stakes_at.setdefault(key, {})[one.records_producer_id] = name
    return TransactionsImage(
        ids=Map(by_name),
        producers=Map(producers),
        stakes_at=Map({key: Map(stakes) for key, stakes in stakes_at.items()}),
        decided=Map(decided),
        last_decision=last_decision,
    )
