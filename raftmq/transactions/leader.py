"""What the leaders of partitions owe to transactions: to let in what belongs, and to write ends.

A leader knows transactions by this node's image. Once it leads (its first entry is committed) it
takes one read barrier for its term; from then on an open transaction in its log can only be one
that the image has, or one that was decided and not reported by this partition. Decisions come with
the image; each is written as a marker, and reported when the marker is committed. Any leader does
so, for whatever transaction, whoever asked for the decision: nothing hangs on a node.

Invariants: nothing is let in and no marker written by an image older than the barrier of this term
(hazard 21); a report never precedes the commit of its marker; what was not reported is found again
in the image, by this leader or the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Final, Protocol

import structlog

from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.commands import ReportMarkers
from raftmq.metadata.image import MetadataImage
from raftmq.metadata.results import RowDone
from raftmq.metadata.transactions import Standing, Transaction
from raftmq.partition.parked import Deadlines
from raftmq.partition.transactions import (
    Added,
    Asked,
    Decided,
    Ending,
    Fenced,
    NotAdded,
    Unknown,
    Verdict,
)
from raftmq.promise import Promise
from raftmq.transactions.coordinator import (
    BARRIER_TIMEOUT_MS,
    Engine,
    TransactionCoordinator,
)
from raftmq.transactions.rows import RowQueue
from raftmq.types import LeaderEpoch, Offset, ProducerId, TopicId

RETRY_MS: Final = 100.0
"""After so long what could not be written, or not reported, is looked for again."""

Key = tuple[TopicId, int]
_NOT_LEADER: Final = ErrorCode.NOT_LEADER_OR_FOLLOWER
COMES_AGAIN: Final = (
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
)
"""What keeps a partition from being added for a moment."""

_log = structlog.get_logger("raftmq.transactions")


class LedPartition(Protocol):
    """A partition, as far as its transactions are concerned."""

    @property
    def is_leader(self) -> bool: ...
    @property
    def leader_epoch(self) -> LeaderEpoch: ...
    def end_transaction(self, decided: Decided) -> Promise[Offset]: ...


class LeaderTransactions:
    """Transactions in all partitions that this node leads: their `TransactionsPort`."""

    def __init__(
        self,
        engine: Engine,
        rows: RowQueue,
        coordinator: TransactionCoordinator,
        deadlines: Deadlines,
        find: Callable[[TopicId, int], LedPartition | None],
        batch: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`find` gives this node's replica of a partition; what is appended within `batch` is sent
        and flushed together."""
        self._batch = batch
        self._engine = engine
        self._rows = rows
        self._coordinator = coordinator
        self._deadlines = deadlines
        self._find = find
        self._current: dict[Key, LeaderEpoch] = {}
        """Since the barrier of which term this node's image is new enough for a partition."""
        self._barriers: dict[Key, tuple[LeaderEpoch, Promise[None]]] = {}
        self._ending: set[tuple[Key, int, int]] = set()
        """(partition, producer id, txn_seq) of ends that are being written."""
        self._ended: dict[Key, list[tuple[int, int]]] = {}  # to be reported soon
        self._not_added: dict[tuple[Key, int, int], ErrorCode] = {}
        """What keeps a partition from being added for a moment, for a batch (by producer id and
        epoch) that is asked for again."""
        self._later: set[Key] = set()  # to be looked at again
        self._seen_decision = 0
        self._is_due = False  # `_look_at_decided` is
        self.markers_count = 0
        self.reports_failed_count = 0
        engine.on_image(self._image_changed)

    @property
    def ends_under_way(self) -> int:
        """Markers that are being written here, or are not committed yet."""
        return len(self._ending)

    # ---- the partition's port ----

    @property
    def is_offered(self) -> bool:
        """True once the cluster's level lets transactions be written; never False again."""
        return self._coordinator.is_offered

    @property
    def may_wait(self) -> bool:
        """True once it lets them be written to delay topics, too; never False again."""
        return self._coordinator.may_wait

    def verify(self, asked: Asked) -> Verdict:
        """May this batch be taken now? See `TransactionsPort`."""
        key = (asked.topic_id, asked.partition)
        not_added = None
        if self._not_added:  # what was told of a batch is told once, and of no later one
            not_added = self._not_added.pop((key, asked.producer_id, asked.producer_epoch), None)
        is_current = self._current.get(key) == asked.leader_epoch
        known = self._engine.image.transactions
        standing = known.standing(asked.producer_id, asked.producer_epoch, *key)
        if is_current and standing is Standing.ADDED:
            of = known.of_producer(asked.producer_id)
            assert of is not None, "what is added is known"
            return Added(of.txn_seq)
        if is_current and standing is Standing.FENCED:
            return Fenced()
        if not asked.is_again:
            return Unknown(self._look_closer(asked))
        if not is_current or not_added is not None:
            return Unknown(Promise.failed(KafkaError(code=not_added or _NOT_LEADER)))
        return Ending() if standing is Standing.ENDING else NotAdded()

    def _look_closer(self, asked: Asked) -> Promise[None]:
        """Kept when it is worth while to ask again: this node's image is as new as the question,
        and under protocol 2 the partition was added if it may be.

        A barrier that was begun before the question would not do: the producer may have got its
        epoch since.
        """
        key = (asked.topic_id, asked.partition)
        settled: Promise[None] = Promise()

        def look(barrier: Promise[None]) -> None:
            if barrier.error is not None:
                settled.fail(barrier.error)
                return
            self._current[key] = asked.leader_epoch
            if asked.adds and self._may_add(asked):
                self._add(asked, settled)
            else:
                settled.resolve(None)

        def look_soon(barrier: Promise[None]) -> None:
            self._deadlines.soon(partial(look, barrier))

        is_current = self._current.get(key) == asked.leader_epoch
        if is_current and asked.adds and self._may_add(asked):
            look_soon(Promise.resolved(None))
        else:
            self._engine.read_barrier(timeout_ms=BARRIER_TIMEOUT_MS).when_done(look_soon)
        return settled

    def _may_add(self, asked: Asked) -> bool:
        standing = self._engine.image.transactions.standing(
            asked.producer_id, asked.producer_epoch, asked.topic_id, asked.partition
        )
        return standing in (Standing.NOT_ADDED, Standing.ENDING)

    def _add(self, asked: Asked, settled: Promise[None]) -> None:
        """Add the partition to its producer's transaction; the image says whether it is."""
        of = self._engine.image.transactions.of_producer(asked.producer_id)
        assert of is not None, "a producer that may add is known"
        batch = (asked.topic_id, asked.partition), asked.producer_id, asked.producer_epoch

        def added(done: Promise[ErrorCode]) -> None:
            if done.result() in COMES_AGAIN:
                self._not_added[batch] = done.result()
            settled.resolve(None)

        self._coordinator.add_partitions(
            of.transactional_id,
            asked.producer_id,
            asked.producer_epoch,
            protocol=2,
            partitions={asked.topic_id: (asked.partition,)},
        ).when_done(lambda done: self._deadlines.soon(partial(added, done)))

    # ---- terms ----

    def led(self, topic_id: TopicId, index: int) -> None:
        """This node leads a partition, and the first entry of its term is committed."""
        if self.is_offered:
            self._look_at((topic_id, index))

    def removed(self, topic_id: TopicId, index: int) -> None:
        """This node has no replica of that partition any more."""
        key = (topic_id, index)
        self._current.pop(key, None)
        self._later.discard(key)
        self._ended.pop(key, None)

    def _barrier(self, key: Key, epoch: LeaderEpoch) -> Promise[None]:
        """The barrier of a term, one for all that wait for it."""
        under_way = self._barriers.get(key)
        if under_way is not None and under_way[0] == epoch:
            return under_way[1]
        shared: Promise[None] = Promise()
        self._barriers[key] = epoch, shared

        def done(barrier: Promise[None]) -> None:
            if self._barriers.get(key) == (epoch, shared):
                del self._barriers[key]
            if barrier.error is not None:
                shared.fail(barrier.error)
                return
            self._current[key] = epoch
            shared.resolve(None)

        self._engine.read_barrier(timeout_ms=BARRIER_TIMEOUT_MS).when_done(done)
        return shared

    # ---- decisions ----

    def _image_changed(self, before: MetadataImage, after: MetadataImage) -> None:
        if before.transactions is after.transactions:
            return
        is_new = after.transactions.last_decision != before.transactions.last_decision
        if is_new and not self._is_due:
            self._is_due = True
            self._deadlines.soon(self._look_at_decided)

    def _look_at_decided(self) -> None:
        """Write what was decided since the last look. The engine tells of an image in the midst of
        its own work, in which partitions are not to be called."""
        self._is_due = False
        known = self._engine.image.transactions
        seen, self._seen_decision = self._seen_decision, known.last_decision
        self._look_at_all(
            {key: None for one in known.decided_after(seen) for key in one.partitions}
        )

    def _look_at_all(self, keys: Iterable[Key]) -> None:
        with self._batch():
            for key in keys:
                self._look_at(key)

    def _look_at(self, key: Key) -> None:
        """Write the ends that a partition owes, once the image is new enough for its term."""
        partition = self._find(*key)
        if partition is None or not partition.is_leader:
            return
        epoch = partition.leader_epoch

        def look(barrier: Promise[None]) -> None:
            led = self._find(*key)
            if led is None or not led.is_leader or led.leader_epoch != epoch:
                return
            if barrier.error is not None:
                self._look_later(key)
                return
            for known in self._engine.image.transactions.stakes(*key):
                if known.state.is_prepared:
                    self._end(key, led, known)

        if self._current.get(key) == epoch:
            look(Promise.resolved(None))
        else:
            self._barrier(key, epoch).when_done(
                lambda barrier: self._deadlines.soon(partial(look, barrier))
            )

    def _end(self, key: Key, partition: LedPartition, known: Transaction) -> None:
        producer_id, epoch = known.marker
        end = (key, producer_id, known.txn_seq)
        if end in self._ending:
            return
        self._ending.add(end)
        decided = Decided(
            producer_id=ProducerId(producer_id),
            producer_epoch=epoch,
            txn_seq=known.txn_seq,
            is_commit=known.state.is_commit,
            protocol=known.protocol,
        )

        def done(written: Promise[Offset]) -> None:
            self._ending.discard(end)
            if written.error is None:
                self.markers_count += 1
                self._report(key, producer_id, known.txn_seq)
            elif _code(written.error) is not ErrorCode.NOT_LEADER_OR_FOLLOWER:
                # The next leader finds it in its image; this one looks again itself.
                _log.warning(
                    "an end of a transaction could not be written",
                    partition=key[1],
                    transactional_id=known.transactional_id,
                    why=str(written.error),
                )
                self._look_later(key)

        partition.end_transaction(decided).when_done(done)

    def _look_later(self, key: Key) -> None:
        if not self._later:
            self._deadlines.after(RETRY_MS, self._look_again)
        self._later.add(key)

    def _look_again(self) -> None:
        keys, self._later = self._later, set()
        self._look_at_all(keys)

    # ---- reports ----

    def _report(self, key: Key, producer_id: int, txn_seq: int) -> None:
        if not self._ended:
            self._deadlines.soon(self._send_reports)
        self._ended.setdefault(key, []).append((producer_id, txn_seq))

    def _send_reports(self) -> None:
        reports, self._ended = self._ended, {}
        image = self._engine.image
        for key, ended in reports.items():
            partition = image.partition_by_id(*key)
            if partition is None:
                continue  # deleted meanwhile: it owes nothing
            row = ReportMarkers(
                topic_id=key[0],
                partition=key[1],
                creation_epoch=partition.creation_epoch,
                ended=tuple(ended),
            )
            self._rows.add(row).when_done(partial(self._reported, key))

    def _reported(self, key: Key, outcome: Promise[RowDone]) -> None:
        if outcome.error is not None:
            self.reports_failed_count += 1
            self._look_later(key)  # what is still owed then is reported again


def _code(error: BaseException) -> ErrorCode:
    return error.code if isinstance(error, KafkaError) else ErrorCode.UNKNOWN_SERVER_ERROR
