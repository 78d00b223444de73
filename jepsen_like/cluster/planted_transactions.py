"""Bugs planted in transactions: what leaders, coordinators, logs and groups do with them.

Each patches the product's own modules and undoes it, with the options that stress what it breaks,
what it breaks, and what it must be caught by.
"""

from __future__ import annotations

from typing import Any, Final

import attrs
from msgspec.structs import replace

from jepsen_like.bug import Bug, nothing, patching
from jepsen_like.cluster import stress
from raftmq.errors import ErrorCode
from raftmq.metadata import apply_groups, apply_transactions
from raftmq.metadata.commands import AbortExpired, EndTransaction
from raftmq.metadata.snapshot import SnapshotEncoder
from raftmq.metadata.transactions import NO_TRANSACTIONS, TransactionState
from raftmq.partition.producers import PartitionProducers
from raftmq.partition.transactions import Added, Decided, RunningTransactions
from raftmq.promise import Promise
from raftmq.replication.replica import Replica
from raftmq.transactions.coordinator import ProducerResult, TransactionCoordinator
from raftmq.transactions.leader import RETRY_MS, LeaderTransactions
from raftmq.types import Offset

_abort_expired = apply_transactions._abort_expired


def _whichever_runs(draft: Any, row: AbortExpired) -> Any:
    """Whatever the producer runs by now expires in place of what did."""
    known = draft.ids.get(row.transactional_id)
    if known is not None:
        row = replace(row, producer_id=known.producer_id, epoch=known.epoch, txn_seq=known.txn_seq)
    return _abort_expired(draft, row)


_end_transaction = apply_transactions._end_transaction


def _whichever_runs_ends(draft: Any, row: EndTransaction) -> Any:
    """An EndTxn of protocol 2 that comes late ends whatever its producer runs by now."""
    known = draft.ids.get(row.transactional_id)
    if known is not None and row.protocol == 2 and known.state is TransactionState.ONGOING:
        row = replace(row, producer_id=known.producer_id, epoch=known.epoch)
    return _end_transaction(draft, row)


_encode_snapshot = SnapshotEncoder.encode


def _without_transactions(self: SnapshotEncoder, image: Any) -> bytes:
    return _encode_snapshot(self, attrs.evolve(image, transactions=NO_TRANSACTIONS))


_end = TransactionCoordinator.end


def _answered_at_once(
    self: TransactionCoordinator,
    transactional_id: str,
    producer_id: int,
    epoch: int,
    *,
    is_commit: bool,
    protocol: int,
) -> Promise[ProducerResult]:
    _end(self, transactional_id, producer_id, epoch, is_commit=is_commit, protocol=protocol)
    after = (producer_id, epoch + 1) if protocol == 2 else (-1, -1)
    return Promise.resolved(ProducerResult(ErrorCode.NONE, *after))


_end_at_leader = LeaderTransactions._end


def _reported_before_commit(self: LeaderTransactions, key: Any, partition: Any, known: Any) -> None:
    _end_at_leader(self, key, partition, known)
    self._report(key, known.marker[0], known.txn_seq)


_verify = LeaderTransactions.verify


def _by_any_image(self: LeaderTransactions, asked: Any) -> Any:
    self._current[asked.topic_id, asked.partition] = asked.leader_epoch
    return _verify(self, asked)


def _no_barrier(self: LeaderTransactions, key: Any, epoch: Any) -> Promise[None]:
    self._current[key] = epoch
    return Promise.resolved(None)


def _written_again(self: LeaderTransactions, key: Any, partition: Any, known: Any) -> None:
    """A marker is tried once more after a while, whatever the image shows then."""
    _end_at_leader(self, key, partition, known)
    decided = Decided(
        producer_id=known.marker[0],
        producer_epoch=known.marker[1],
        txn_seq=known.txn_seq,
        is_commit=known.state.is_commit,
        protocol=known.protocol,
    )
    self._deadlines.after(RETRY_MS, lambda: partition.end_transaction(decided))


def _nothing_aborted(_self: PartitionProducers, _start: Offset, _end: Offset) -> list[Any]:
    return []


_replay = PartitionProducers._replay


def _markers_passed_over(self: Any, table: Any, header: Any, found: Any) -> int:
    """What has ended is open again once the log is read back."""
    if not header.is_control:
        return _replay(self, table, header, found)
    table.next_offset = Offset(header.next_offset)
    return 0


_pend = apply_groups.pend
_settle = apply_groups.settle_pending


def _visible_at_once(group: Any, producer_id: int, entries: Any) -> Any:
    return _settle(_pend(group, producer_id, entries), producer_id, True)


def _always_kept(group: Any, producer_id: int, _is_commit: bool) -> Any:
    return _settle(group, producer_id, True)


def _always_dropped(group: Any, producer_id: int, _is_commit: bool) -> Any:
    return _settle(group, producer_id, False)


def _whoever_comes(self: LeaderTransactions, asked: Any) -> Added:
    known = self._engine.image.transactions.of_producer(asked.producer_id)
    return Added(1 if known is None else known.txn_seq)


_retain = Replica.retain


def _retained_to_watermark(self: Replica, _below: Offset) -> Any:
    return _retain(self, self.high_watermark)


_decide = apply_transactions.Draft.decide


def _one_partition_forgotten(self: Any, running: Any, **named: Any) -> Any:
    """The decision leaves out a partition, which waits for its marker for ever."""
    key = min(running.partitions, default=None, key=str)
    if len(running.partitions) > 1 and key is not None:
        self.released(running, key)
        running = self.ids[running.transactional_id]
    return _decide(self, running, **named)


def _with_the_same_epoch(self: Any, credentials: Any) -> Any:
    """Nobody is fenced."""
    del self
    return credentials


TRANSACTION_BUGS: Final[dict[str, Bug]] = {
    "expiry-without-number": Bug(
        patching(
            (
                apply_transactions,
                "_ROWS",
                {
                    **apply_transactions._ROWS,
                    AbortExpired: _whichever_runs,
                },
            )
        ),
        stress.hasty_transactions,
        8,
        (21,),
        ("ExpiryWaits",),
    ),
    "snapshot-without-transactions": Bug(
        patching((SnapshotEncoder, "encode", _without_transactions)),
        stress.full_logs_of_transactions,
        8,
        (21, 22),
        ("Convergence", "TransactionsEnd", "lost-transaction", "torn-transaction"),
    ),
    "end-answered-before-decision": Bug(
        patching((TransactionCoordinator, "end", _answered_at_once)),
        stress.transactions,
        8,
        (21,),
        ("lost-transaction", "lost-transactional-offset", "committed-aborted-read"),
    ),
    "reported-before-marker-commits": Bug(
        patching((LeaderTransactions, "_end", _reported_before_commit)),
        stress.transactions,
        8,
        (21,),
        ("TransactionsEnd", "committed-aborted-read", "torn-transaction", "lost-transaction"),
    ),
    "nothing-was-aborted": Bug(
        patching((PartitionProducers, "aborted", _nothing_aborted)),
        stress.transactions,
        8,
        (21,),
        ("committed-aborted-read", "early-read"),
    ),
    "replay-passes-over-markers": Bug(
        patching((PartitionProducers, "_replay", _markers_passed_over)),
        stress.transactions,
        8,
        (21,),
        ("MonotonicStableEnd",),
    ),
    "pending-offsets-visible": Bug(
        patching((apply_transactions, "pend", _visible_at_once)),
        stress.transactions,
        8,
        (21,),
        ("early-offset", "aborted-offset"),
    ),
    "aborted-offsets-kept": Bug(
        patching((apply_transactions, "settle_pending", _always_kept)),
        stress.transactions,
        8,
        (21,),
        ("aborted-offset", "early-offset"),
    ),
    "committed-offsets-dropped": Bug(
        patching((apply_transactions, "settle_pending", _always_dropped)),
        stress.transactions,
        8,
        (21,),
        ("lost-transactional-offset",),
    ),
    "fenced-producer-let-in": Bug(
        patching((LeaderTransactions, "verify", _whoever_comes)),
        stress.transactions,
        8,
        (21,),
        ("TransactionsEnd", "early-read", "committed-aborted-read"),
    ),
    "new-leader-skips-stakes": Bug(
        patching((LeaderTransactions, "led", nothing)),
        stress.transactions,
        8,
        (21,),
        ("TransactionsEnd",),
        begins_at=23,
    ),
    "retention-past-the-open": Bug(
        patching((Replica, "retain", _retained_to_watermark)),
        stress.full_logs_of_transactions,
        8,
        (21,),
        ("RetentionSparesTheOpen",),
        begins_at=28,
    ),
    "decision-forgets-a-partition": Bug(
        patching((apply_transactions.Draft, "decide", _one_partition_forgotten)),
        stress.transactions,
        8,
        (21,),
        ("TransactionsEnd", "torn-transaction", "lost-transaction"),
    ),
    "nobody-is-fenced": Bug(
        patching((apply_transactions.Draft, "after", _with_the_same_epoch)),
        stress.transactions,
        8,
        (21,),
        ("SequenceAccepted", "AssertionError", "TransactionsEnd", "early-read"),
    ),
    "no-barrier-of-the-term": Bug(
        patching(
            (LeaderTransactions, "verify", _by_any_image),
            (LeaderTransactions, "_barrier", _no_barrier),
        ),
        stress.stale_leaders,
        8,
        (21,),
        ("StraysAreRefused", "TransactionsEnd", "committed-aborted-read", "early-read"),
    ),
    "late-end-ends-a-later-one": Bug(
        patching(
            (
                apply_transactions,
                "_ROWS",
                {**apply_transactions._ROWS, EndTransaction: _whichever_runs_ends},
            )
        ),
        stress.late_ends,
        8,
        (21,),
        ("early-read", "committed-aborted-read", "torn-transaction", "lost-transaction"),
    ),
    "late-marker-ends-a-later-one": Bug(
        patching(
            (LeaderTransactions, "_end", _written_again),
            (RunningTransactions, "check_end", nothing),
        ),
        stress.transactions,
        8,
        (21,),
        ("early-read", "committed-aborted-read", "torn-transaction", "lost-transaction"),
    ),
}
