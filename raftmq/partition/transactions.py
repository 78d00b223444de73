"""What a partition must be told of transactions, and what it tells in turn.

Who has which transaction is for the metadata group to say. A leader asks before it takes the first
and every other batch of one (KIP-890): a producer that is late must not write into a transaction
that is over, which nobody would end again. The answer comes from the image that this node applied,
once that is not older than a read barrier of this leadership; where the image does not show the
partition yet, the batch waits, and the answer is asked for again when it may be another.

Only values and protocols; `partition.py` asks, and obeys.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol, TypeAlias

from attrs import field, frozen

from raftmq.errors import ErrorCode, KafkaError
from raftmq.promise import Promise
from raftmq.types import LeaderEpoch, ProducerId, TopicId

NEWEST_PRODUCE: Final = 13
"""The version by which those go who are not a client's request."""
ADDS_FROM: Final = 12
"""From this version of Produce on (protocol 2) a batch adds its partition to the transaction."""
_ABORTABLE_FROM: Final = 11
_CONCURRENT_FROM: Final = 12


class Asked(NamedTuple):
    """A transactional batch that a leader would take now.

    Attributes:
        leader_epoch: of the leadership whose read barrier counts.
        adds: a partition that is missing in the transaction is to be added (protocol 2), in one row
            with the others that are asked for in this turn.
        is_again: what an `Unknown` of before waited for has come: the answer is now for good.
    """

    topic_id: TopicId
    partition: int
    leader_epoch: LeaderEpoch
    producer_id: ProducerId
    producer_epoch: int
    adds: bool
    is_again: bool


@frozen(slots=True)
class Added:
    """The transaction runs under this epoch and has the partition: take the batch."""

    txn_seq: int


@frozen(slots=True)
class NotAdded:
    """No transaction of this producer that runs has the partition."""


@frozen(slots=True)
class Ending:
    """The one before is decided, and not reported by all of its partitions yet."""


@frozen(slots=True)
class Fenced:
    """The producer has a higher epoch by now, or another producer id."""


@frozen(slots=True)
class Unknown:
    """This node cannot tell yet.

    Attributes:
        settled: kept when it is worth while to ask again; broken when it will not be told soon.
            Resolved by the loop, outside of `verify`, and never without an end.
    """

    settled: Promise[None] = field(eq=False)


Verdict: TypeAlias = Added | NotAdded | Ending | Fenced | Unknown


class TransactionsPort(Protocol):
    """The way to what is known of transactions on this node."""

    @property
    def is_offered(self) -> bool:
        """True once the cluster's level lets transactions be written; never False again."""
        ...

    def verify(self, asked: Asked) -> Verdict:
        """May this batch be taken now? Called before each transactional batch that continues its
        producer's sequence, in the turn in which it is appended: between an answer `Added` and the
        append nothing else runs."""
        ...


class NoTransactions:
    """Transactions are not offered."""

    is_offered: Final = False

    def verify(self, _asked: Asked) -> Verdict:
        """Nothing is added, since nothing can be."""
        return NotAdded()


NO_TRANSACTIONS: Final = NoTransactions()


@frozen(slots=True, kw_only=True)
class Decided:
    """How a transaction ended; what `Partition.end_transaction` is given.

    Attributes:
        producer_epoch: the marker's. Under protocol 1 that of the data, or above it where the
            producer was fenced; under protocol 2 always above it.
        protocol: 1 (KIP-98) or 2 (KIP-890).
    """

    producer_id: ProducerId
    producer_epoch: int
    txn_seq: int
    is_commit: bool
    protocol: int


def not_taken(verdict: Verdict, produce_version: int) -> KafkaError:
    """What a client is told of a batch with that verdict, in the codes that its version knows."""
    if isinstance(verdict, Fenced):
        return KafkaError("the producer has a newer epoch", code=ErrorCode.INVALID_PRODUCER_EPOCH)
    if isinstance(verdict, NotAdded):
        is_new = produce_version >= _ABORTABLE_FROM
        code = ErrorCode.TRANSACTION_ABORTABLE if is_new else ErrorCode.INVALID_TXN_STATE
        return KafkaError("no running transaction of the producer has this partition", code=code)
    if isinstance(verdict, Ending):
        is_new = produce_version >= _CONCURRENT_FROM
        code = ErrorCode.CONCURRENT_TRANSACTIONS if is_new else ErrorCode.NOT_ENOUGH_REPLICAS
        return KafkaError("the transaction before has not ended everywhere", code=code)
    assert isinstance(verdict, Unknown), "what is added is taken"
    return KafkaError(
        "whether the transaction has this partition cannot be told now",
        code=ErrorCode.NOT_ENOUGH_REPLICAS,
    )
