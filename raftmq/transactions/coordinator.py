"""What producers ask of transactions: to begin, to add to them, to end them (KIP-98, KIP-890).

Any node serves any transactional id: a request becomes a row that names what it was made for, and
is judged where it is applied. (FindCoordinator names one node for each id, so that its requests are
answered by an image that has what was answered before.) A row that comes before the last
transaction's end is complete waits here until it is, since clients come again after 20 ms
otherwise.

Under protocol 1 all transactions of a producer may have one epoch. So a request names the one that
it is meant for, by the image that it met as it came: the running one or the next. It never becomes
part of a later one, however long it was under way: its producer may have given it up, aborted and
begun anew elsewhere. Where the image was behind, the producer is told CONCURRENT_TRANSACTIONS, and
asks again.

Invariants: what is answered was applied; what is not known to be applied is answered with
COORDINATOR_NOT_AVAILABLE, after which every client asks again; what waits is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

from attrs import define, field, frozen

from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.commands import (
    UNDATED,
    AddPartitions,
    EndTransaction,
    InitProducer,
)
from raftmq.metadata.image import (
    LEVEL_OF_CONDITIONS,
    LEVEL_OF_TRANSACTIONS,
    MetadataImage,
    candidate,
)
from raftmq.metadata.results import RowDone
from raftmq.metadata.transactions import Transaction, TransactionState
from raftmq.partition.parked import Deadline, Deadlines
from raftmq.promise import Promise
from raftmq.transactions.rows import RowQueue
from raftmq.types import NodeId, TopicId

PARKED_MS: Final = 2_000.0
"""So long a request waits for the end of the transaction before: all its markers."""
PARKED_MAX: Final = 20_000
PARTITIONS_PER_ROW_MAX: Final = 500
"""A larger request becomes several rows, one after the other: each is applied in one turn."""
ID_BYTES_MAX: Final = 4_096
"""Of a transactional id, a key of the metadata state; as with names of groups."""
TRIES_MAX: Final = 5
"""So often a row is sent that comes before the end of the transaction before."""
ANY_SEQ: Final = -1
"""In place of a transaction's number: the epoch tells which one is meant."""
BARRIER_TIMEOUT_MS: Final = 5_000.0

Partitions = Mapping[TopicId, Sequence[int]]


@frozen(slots=True)
class TransactionConfig:
    """Limits of transactions, by Kafka's names for brokers.

    Attributes:
        max_timeout_ms: `transaction.max.timeout.ms`; a producer that asks for more is refused.
        id_expiration_ms: `transactional.id.expiration.ms`; an id unused for so long is forgotten.
    """

    max_timeout_ms: int = 900_000
    id_expiration_ms: int = 604_800_000


@frozen(slots=True)
class ProducerResult:
    """What a producer is answered: whether it went well, and as who it goes on."""

    code: ErrorCode
    producer_id: int = -1
    epoch: int = -1


class Engine(Protocol):
    """The metadata engine, as far as the coordinator needs it."""

    @property
    def image(self) -> MetadataImage:
        """The newest applied state on this node."""
        ...

    @property
    def controller_id(self) -> NodeId | None:
        """The leader of the metadata group, as far as this node knows."""
        ...

    def on_batch(self, callback: Callable[[MetadataImage], None]) -> None:
        """Call `callback(image)` on the controller before commands enter the log that leave that
        image; what is proposed there enters with them."""
        ...

    def read_barrier(self, timeout_ms: float | None = None) -> Promise[None]:
        """Kept once this node has applied all that was committed before the call."""
        ...

    def on_image(self, callback: Callable[[MetadataImage, MetadataImage], None]) -> None:
        """Call `callback(before, after)` after every change of the image."""
        ...


@define(slots=True, eq=False)
class _Request:
    """One request until it is answered."""

    row: InitProducer | AddPartitions | EndTransaction
    answer: Promise[RowDone] = field(factory=Promise)
    tries_left: int = TRIES_MAX
    deadline: Deadline | None = field(default=None)

    @property
    def transactional_id(self) -> str:
        """Whose transaction it is about."""
        return self.row.transactional_id

    @property
    def waits(self) -> bool:
        """True where it can only be for the transaction after one whose end is not complete."""
        return not isinstance(self.row, EndTransaction)

    def is_too_late(self, refusal: RowDone) -> bool:
        """True when the transaction that its row names is over."""
        row = self.row
        return not isinstance(row, InitProducer) and ANY_SEQ < row.txn_seq <= refusal.txn_seq


class TransactionCoordinator:
    """Transactions, as this node's clients ask of them."""

    def __init__(
        self,
        engine: Engine,
        rows: RowQueue,
        deadlines: Deadlines,
        config: TransactionConfig,
    ) -> None:
        self.config = config
        self._engine = engine
        self._rows = rows
        self._deadlines = deadlines
        self._parked: dict[str, list[_Request]] = {}
        self.parked_count = 0
        engine.on_image(self._image_changed)
        engine.on_batch(self._batch_comes)

    @property
    def is_offered(self) -> bool:
        """True once the cluster's level lets transactions be written; never False again."""
        return self._engine.image.level >= LEVEL_OF_TRANSACTIONS

    @property
    def may_wait(self) -> bool:
        """True once it lets them be written to delay topics, too; never False again."""
        return self._engine.image.level >= LEVEL_OF_CONDITIONS

    # ---- what clients ask ----

    def find(self, transactional_id: str) -> NodeId | None:
        """The node that an id's producer is sent to; None without one that may coordinate.

        The controller, where rows of all producers meet a hop before the log; while there is none,
        or it takes no such work, another one. A controller that was is asked on, and serves as any
        node does.
        """
        controller = self._engine.controller_id
        if controller in self._engine.image.coordinators():
            return controller
        return candidate(transactional_id, self._engine.image.coordinators())

    def init_producer(
        self, transactional_id: str, timeout_ms: int, producer_id: int = -1, epoch: int = -1
    ) -> Promise[ProducerResult]:
        """A producer begins; what ran under its id is aborted first, and those before it fenced.

        `producer_id` and `epoch` are what the producer had (KIP-360), -1 where it is a new one.
        """
        if not transactional_id or len(transactional_id.encode()) > ID_BYTES_MAX:
            return Promise.resolved(ProducerResult(ErrorCode.INVALID_REQUEST))
        if not 0 < timeout_ms <= self.config.max_timeout_ms:
            return Promise.resolved(ProducerResult(ErrorCode.INVALID_TRANSACTION_TIMEOUT))
        row = InitProducer(
            transactional_id=transactional_id,
            timeout_ms=timeout_ms,
            producer_id=producer_id,
            epoch=epoch,
        )
        return self._credentials(row)

    def add_partitions(
        self,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        *,
        protocol: int,
        partitions: Partitions | None = None,
        groups: Iterable[str] = (),
    ) -> Promise[ErrorCode]:
        """Partitions and groups are part of the running transaction, or begin the next one; all of
        them or none."""
        pairs = [
            (topic_id, index)
            for topic_id, indexes in (partitions or {}).items()
            for index in indexes
        ]
        parts = [
            _by_topic(pairs[at : at + PARTITIONS_PER_ROW_MAX])
            for at in range(0, max(len(pairs), 1), PARTITIONS_PER_ROW_MAX)
        ]
        named = tuple(groups)
        txn_seq = self.meant_seq(transactional_id, protocol)
        answer: Promise[ErrorCode] = Promise()

        def add_next(at: int) -> None:
            row = AddPartitions(
                transactional_id=transactional_id,
                producer_id=producer_id,
                epoch=epoch,
                txn_seq=txn_seq,
                protocol=protocol,
                partitions=parts[at],
                groups=named,
            )

            def added(outcome: Promise[RowDone]) -> None:
                code = _code_of(outcome)
                if code is ErrorCode.NONE and at + 1 < len(parts):
                    add_next(at + 1)
                else:
                    answer.resolve(code)

            self._ask(row).when_done(added)

        add_next(0)
        return answer

    def end(
        self, transactional_id: str, producer_id: int, epoch: int, *, is_commit: bool, protocol: int
    ) -> Promise[ProducerResult]:
        """Commit or abort; kept once that is decided. Markers are written after it."""
        txn_seq = ANY_SEQ
        if protocol == 1:
            known = self._engine.image.transactions.get(transactional_id)
            txn_seq = 0 if known is None else known.txn_seq
        row = EndTransaction(
            transactional_id=transactional_id,
            producer_id=producer_id,
            epoch=epoch,
            is_commit=is_commit,
            txn_seq=txn_seq,
            protocol=protocol,
        )
        return self._credentials(row)

    def is_ending(self, transactional_id: str) -> bool:
        """True while this node's image shows a decision that is not carried out everywhere."""
        return _is_ending(self._engine.image.transactions.get(transactional_id))

    def has_group(self, transactional_id: str, producer_id: int, epoch: int, group: str) -> bool:
        """True when this node's image shows the group in the producer's running transaction."""
        known = self._engine.image.transactions.get(transactional_id)
        return (
            known is not None
            and known.state is TransactionState.ONGOING
            and known.credentials == (producer_id, epoch)
            and group in known.groups
        )

    def meant_seq(self, transactional_id: str, protocol: int) -> int:
        """The number of the transaction that what comes now is meant for, as this node's image
        shows it: the running one or the next. ANY_SEQ under protocol 2."""
        if protocol == 2:
            return ANY_SEQ
        known = self._engine.image.transactions.get(transactional_id)
        if known is None:
            return 1
        return known.txn_seq + (known.state is not TransactionState.ONGOING)

    def verify(
        self, transactional_id: str, producer_id: int, epoch: int, topic_id: TopicId, partition: int
    ) -> ErrorCode:
        """Whether a partition is part of a producer's running transaction (KIP-890)."""
        known = self._engine.image.transactions.get(transactional_id)
        if known is None or known.producer_id != producer_id:
            return ErrorCode.INVALID_PRODUCER_ID_MAPPING
        if known.epoch != epoch:
            return ErrorCode.PRODUCER_FENCED
        if known.state.is_prepared:
            return ErrorCode.CONCURRENT_TRANSACTIONS
        is_in = (topic_id, partition) in known.partitions
        is_running = known.state is TransactionState.ONGOING
        return ErrorCode.NONE if is_running and is_in else ErrorCode.TRANSACTION_ABORTABLE

    # ---- what operators ask ----

    def catch_up(self) -> Promise[bool]:
        """Kept once this node's image is as new as the call, with True; with False where no
        majority of the metadata group answered."""
        told: Promise[bool] = Promise()
        barrier = self._engine.read_barrier(timeout_ms=BARRIER_TIMEOUT_MS)
        barrier.when_done(lambda done: told.resolve(done.error is None))
        return told

    def describe(
        self, transactional_ids: Sequence[str]
    ) -> Promise[dict[str, Transaction | ErrorCode]]:
        """These ids as they are now; TRANSACTIONAL_ID_NOT_FOUND for those that are not."""
        told: Promise[dict[str, Transaction | ErrorCode]] = Promise()

        def done(is_current: Promise[bool]) -> None:
            if not is_current.result():
                unknown = ErrorCode.COORDINATOR_NOT_AVAILABLE
                told.resolve(dict.fromkeys(transactional_ids, unknown))
                return
            found = self._engine.image.transactions.ids
            missing = ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
            told.resolve({name: found.get(name, missing) for name in transactional_ids})

        self.catch_up().when_done(done)
        return told

    # ---- rows ----

    def _credentials(self, row: InitProducer | EndTransaction) -> Promise[ProducerResult]:
        answer: Promise[ProducerResult] = Promise()

        def done(outcome: Promise[RowDone]) -> None:
            code = _code_of(outcome)
            if code is ErrorCode.NONE:
                row = outcome.result()
                answer.resolve(ProducerResult(code, row.producer_id, row.epoch))
            else:
                answer.resolve(ProducerResult(code))

        self._ask(row).when_done(done)
        return answer

    def _ask(self, row: InitProducer | AddPartitions | EndTransaction) -> Promise[RowDone]:
        request = _Request(row)
        self._try(request)
        return request.answer

    def _try(self, request: _Request) -> None:
        if request.waits and self.is_ending(request.transactional_id) and self._park(request):
            return
        self._send(request)

    def _send(self, request: _Request) -> None:
        request.tries_left -= 1
        self._rows.add(request.row).when_done(partial(self._tried, request))

    def _tried(self, request: _Request, outcome: Promise[RowDone]) -> None:
        is_early = (
            outcome.error is None
            and outcome.result().code == ErrorCode.CONCURRENT_TRANSACTIONS
            and not request.is_too_late(outcome.result())
        )
        is_ending = self.is_ending(request.transactional_id)
        if is_early and is_ending and self._park(request):
            return
        if is_early and not is_ending and request.tries_left > 0:
            self._try(request)
        else:
            self._answer(request, outcome)

    def _answer(self, request: _Request, outcome: Promise[RowDone]) -> None:
        if request.deadline is not None:
            request.deadline.cancel()
        if outcome.error is None:
            request.answer.resolve(outcome.result())
        else:
            request.answer.fail(outcome.error)

    # ---- waiting for the end of the transaction before ----

    def _park(self, request: _Request) -> bool:
        """Wait; False when this request waited already, or too many do."""
        if request.deadline is None:
            if self.parked_count >= PARKED_MAX:
                return False
            request.deadline = self._deadlines.after(PARKED_MS, partial(self._gave_up, request))
        elif request.deadline.callback is None:
            return False
        self._parked.setdefault(request.transactional_id, []).append(request)
        self.parked_count += 1
        return True

    def _gave_up(self, request: _Request) -> None:
        waiting = self._parked.get(request.transactional_id, [])
        if request not in waiting:
            return  # its row is under way
        waiting.remove(request)
        self.parked_count -= 1
        if not waiting:
            del self._parked[request.transactional_id]
        early = RowDone(int(ErrorCode.CONCURRENT_TRANSACTIONS))
        request.answer.resolve(early)

    def _image_changed(self, before: MetadataImage, after: MetadataImage) -> None:
        if not self._parked or before.transactions is after.transactions:
            return
        self._go_on(after)

    def _batch_comes(self, after: MetadataImage) -> None:
        """What may begin once the next commands are applied begins with them: between two
        transactions of a producer that is one round of the metadata group less. Where they are
        lost, so are the rows of those that begin, or they are refused and wait on."""
        if self._parked and after.transactions is not self._engine.image.transactions:
            self._go_on(after)
        self._rows.send_now()

    def _go_on(self, image: MetadataImage) -> None:
        ids = image.transactions.ids
        ended = [name for name in self._parked if not _is_ending(ids.get(name))]
        for name in ended:
            waiting = self._parked.pop(name)
            self.parked_count -= len(waiting)
            for request in waiting:
                self._send(request)


def _is_ending(known: Transaction | None) -> bool:
    return known is not None and known.state.is_prepared


def _by_topic(
    pairs: Iterable[tuple[TopicId, int]],
) -> tuple[tuple[TopicId, tuple[int, ...]], ...]:
    topics: dict[TopicId, list[int]] = {}
    for topic_id, index in pairs:
        topics.setdefault(topic_id, []).append(index)
    return tuple((topic_id, tuple(indexes)) for topic_id, indexes in topics.items())


def _code_of(outcome: Promise[RowDone]) -> ErrorCode:
    """What became of a row; not applied and unknown are alike to clients, who ask again."""
    error = outcome.error
    if error is None:
        return ErrorCode(outcome.result().code)
    if isinstance(error, KafkaError) and error.code is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS:
        return error.code
    return ErrorCode.COORDINATOR_NOT_AVAILABLE


# ---- ListTransactions ----


class Pattern(Protocol):
    """A compiled regular expression."""

    def fullmatch(self, text: str) -> object | None:
        """None when it does not match all of the text."""
        ...


@frozen(slots=True)
class Filters:
    """Which ids are listed; what is empty lets all through (KIP-664, KIP-994, KIP-1152).

    Attributes:
        running_for_ms: only transactions that have run for longer; below 0 all.
        pattern: matches whole ids.
    """

    states: frozenset[TransactionState] = frozenset()
    producer_ids: frozenset[int] = frozenset()
    running_for_ms: int = -1
    pattern: Pattern | None = None

    def lets_through(self, known: Transaction, now_ms: int) -> bool:
        """True when an id is listed."""
        if self.states and known.state not in self.states:
            return False
        if self.producer_ids and known.producer_id not in self.producer_ids:
            return False
        if self.running_for_ms >= 0:
            if known.state.may_begin or known.started_at_ms == UNDATED:
                return False
            if now_ms - known.started_at_ms <= self.running_for_ms:
                return False
        return self.pattern is None or self.pattern.fullmatch(known.transactional_id) is not None
