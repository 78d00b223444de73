"""Bugs planted in transactions: what leaders, coordinators, logs and groups do with them.

Each patches the product's own modules and undoes it, with the options that stress what it breaks,
what it breaks, and what it must be caught by.
"""

from __future__ import annotations

from typing import Any, Final

import attrs

from jepsen_like.bug import Bug, nothing, patching
from jepsen_like.cluster import stress
from raftmq.errors import ErrorCode
from raftmq.metadata import apply_groups, apply_transactions
from raftmq.metadata.snapshot import SnapshotEncoder
from raftmq.metadata.transactions import NO_TRANSACTIONS
from raftmq.partition.producers import PartitionProducers
from raftmq.promise import Promise
from raftmq.replication.replica import Replica
from raftmq.transactions.coordinator import ProducerResult, TransactionCoordinator
from raftmq.transactions.leader import LeaderTransactions
from raftmq.types import Offset

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


def _nothing_aborted(_self: PartitionProducers, _start: Offset, _end: Offset) -> list[Any]:
    return []


_pend = apply_groups.pend
_settle = apply_groups.settle_pending


def _visible_at_once(group: Any, producer_id: int, entries: Any) -> Any:
    return _settle(_pend(group, producer_id, entries), producer_id, True)


def _always_kept(group: Any, producer_id: int, _is_commit: bool) -> Any:
    return _settle(group, producer_id, True)


_retain = Replica.retain


def _retained_to_watermark(self: Replica, _below: Offset) -> Any:
    return _retain(self, self.high_watermark)


TRANSACTION_BUGS: Final[dict[str, Bug]] = {
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
    "nothing-was-aborted": Bug(
        patching((PartitionProducers, "aborted", _nothing_aborted)),
        stress.transactions,
        8,
        (21,),
        ("committed-aborted-read", "early-read"),
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
    "new-leader-skips-stakes": Bug(
        patching((LeaderTransactions, "led", nothing)),
        stress.transactions,
        8,
        (21,),
        ("TransactionsEnd",),
    ),
    "retention-past-the-open": Bug(
        patching((Replica, "retain", _retained_to_watermark)),
        stress.full_logs_of_transactions,
        8,
        (21,),
        ("RetentionSparesTheOpen",),
    ),
}
