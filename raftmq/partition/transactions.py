"""What a partition asks the metadata group about transactions, and the answers.

The metadata group knows which producer runs which transaction. A leader asks before it takes any
batch of one (KIP-890): a late producer must not write into a transaction that is over, since nobody
would end what it wrote. The answer comes from this node's image, once that is not older than a read
barrier of this leadership. Where the image does not show the partition yet, the batch waits, and
the leader asks again when the answer may be another.

`RunningTransactions` asks for one partition; `partition.py` obeys.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol, TypeAlias

from attrs import field, frozen

from raftmq.errors import ErrorCode, KafkaError
from raftmq.partition.producer_state import NO_OFFSET, Producer
from raftmq.promise import Promise
from raftmq.records import BatchHeader, InvalidRecordError
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

    @property
    def may_wait(self) -> bool:
        """True once it lets them be written to delay topics, too; never False again."""
        ...

    def verify(self, asked: Asked) -> Verdict:
        """May this batch be taken now? Called before each transactional batch that continues its
        producer's sequence, in the turn in which it is appended: between an answer `Added` and the
        append nothing else runs."""
        ...


class NoTransactions:
    """Transactions are not offered."""

    is_offered: Final = False
    may_wait: Final = False

    def verify(self, _asked: Asked) -> Verdict:
        """Nothing is added, since nothing can be."""
        return NotAdded()


NO_TRANSACTIONS: Final = NoTransactions()


WHATEVER_SEQ: Final = (1 << 63) - 1
"""Not below the number of any transaction."""


@frozen(slots=True, kw_only=True)
class Decided:
    """How a transaction ended; what `Partition.end_transaction` is given.

    Attributes:
        producer_epoch: the marker's. Under protocol 1 that of the data, or above it where the
            producer was fenced; under protocol 2 always above it.
        txn_seq: of the transaction that is to end; WHATEVER_SEQ: of an orphan, where the metadata
            group knows of none, whichever this leader took it for.
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


class RunningTransactions:
    """The transactions of which one leader took batches, and what is asked before it takes more."""

    __slots__ = ("_index", "_port", "_running", "_topic_id")

    def __init__(self, port: TransactionsPort, topic_id: TopicId, index: int) -> None:
        self._port = port
        self._topic_id = topic_id
        self._index = index
        self._running: dict[int, int] = {}  # txn_seq by producer id

    @property
    def is_offered(self) -> bool:
        """As `TransactionsPort.is_offered`."""
        return self._port.is_offered

    def check_offered(self, *, is_delayed: bool) -> None:
        """See that batches of transactions may be taken, in a delay topic or in another.

        Raises:
            KafkaError: the cluster's level does not let them be yet.
        """
        if not self._port.is_offered:
            raise KafkaError("transactions are not enabled", code=ErrorCode.INVALID_TXN_STATE)
        if is_delayed and not self._port.may_wait:
            raise InvalidRecordError("a delay topic takes no transactions at this raftmq.level")

    def clear(self) -> None:
        """Another leadership begins, or none."""
        self._running.clear()

    def ended(self, producer_id: int) -> None:
        """The marker of what runs was written."""
        self._running.pop(producer_id, None)

    def refusal(
        self, header: BatchHeader, version: int, leader_epoch: LeaderEpoch
    ) -> KafkaError | None:
        """Why a batch that cannot be taken anyhow belongs to no running transaction; None when it
        does, or that is not known."""
        verdict = self._port.verify(self._asked(header, version, leader_epoch, is_again=True))
        return None if isinstance(verdict, Added | Unknown) else not_taken(verdict, version)

    def verify(
        self,
        header: BatchHeader,
        producer: Producer | None,
        version: int,
        leader_epoch: LeaderEpoch,
        *,
        is_again: bool,
    ) -> Promise[None] | None:
        """See that a batch's transaction runs, and has this partition; what to wait for where that
        cannot be told now. `producer` is what the log says.

        Raises:
            KafkaError: the batch is not to be taken.
        """
        is_open = producer is not None and producer.open_since != NO_OFFSET
        if producer is not None and is_open and header.producer_epoch > producer.epoch:
            raise not_taken(Ending(), version)  # whatever the image shows: its marker is missing
        asked = self._asked(header, version, leader_epoch, is_again=is_again)
        verdict = self._port.verify(asked)
        if isinstance(verdict, Unknown) and not is_again:
            return verdict.settled
        if not isinstance(verdict, Added):
            raise not_taken(verdict, version)
        running = self._running.get(header.producer_id)
        if is_open and running is not None and running != verdict.txn_seq:
            raise not_taken(Ending(), version)
        self._running[header.producer_id] = verdict.txn_seq
        return None

    def check_end(self, decided: Decided, producer: Producer) -> None:
        """Refuse to end a later transaction than the decided one.

        Raises:
            KafkaError: INVALID_PRODUCER_EPOCH.
        """
        is_later = self._running.get(decided.producer_id, -1) > decided.txn_seq
        if is_later or decided.producer_epoch < producer.epoch + decided.protocol - 1:
            raise KafkaError(
                f"producer {decided.producer_id} has epoch {producer.epoch} here, its transaction "
                f"{decided.txn_seq} ended under {decided.producer_epoch}",
                code=ErrorCode.INVALID_PRODUCER_EPOCH,
            )

    def _asked(
        self, header: BatchHeader, version: int, leader_epoch: LeaderEpoch, *, is_again: bool
    ) -> Asked:
        return Asked(
            self._topic_id,
            self._index,
            leader_epoch,
            ProducerId(header.producer_id),
            header.producer_epoch,
            version >= ADDS_FROM,
            is_again,
        )
