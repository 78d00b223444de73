"""Metrics of the cluster's transactions, as this node's image has them; the look that finds them.

All transactional ids are looked at, in short turns; each node shows the same numbers, a moment
apart. Rows are as many as there are states, however many ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Final

from attrs import define, field

from raftmq.metadata.commands import UNDATED
from raftmq.metadata.transactions import Transaction, TransactionsImage, TransactionState
from raftmq.node.metrics.families import Collector, Metric, Scrape, Work

if TYPE_CHECKING:
    from raftmq.node.composition import NodeCore

IDS_PER_LOOK: Final = 200
OLDEST_MAX: Final = 20
OVERDUE_TIMEOUTS: Final = 2
"""A transaction is aborted after its timeout; after as much again, where the controller changed."""

IDS: Final = Metric(
    "raftmq_transactional_ids", "gauge", "Transactional ids of the cluster", ("state",)
)
OWED: Final = Metric(
    "raftmq_transactions_decided",
    "gauge",
    "Transactions that are decided and whose markers are not all reported",
)
OLDEST: Final = Metric(
    "raftmq_transaction_oldest_open_seconds",
    "gauge",
    "For how long the oldest transaction has been open; 0 when there is none",
)
OVERDUE: Final = Metric(
    "raftmq_transactions_overdue",
    "gauge",
    "Transactions open for longer than twice their timeout: they hang",
)


@define(slots=True)
class Census:
    """What a look at all transactional ids finds.

    Attributes:
        oldest: open transactions, the one that began first being first; `OLDEST_MAX` of them.
    """

    now_ms: int
    states: dict[TransactionState, int] = field(factory=lambda: dict.fromkeys(TransactionState, 0))
    oldest: list[Transaction] = field(factory=list)
    overdue: int = 0

    def take(self, known: TransactionsImage) -> Iterator[None]:
        """Look at all ids; yields after some of them."""
        ids = iter(known.ids.values())
        while some := list(islice(ids, IDS_PER_LOOK)):
            opened = []
            for one in some:
                self.states[one.state] += 1
                if not one.state.may_begin and one.started_at_ms != UNDATED:
                    opened.append(one)
                    limit_ms = OVERDUE_TIMEOUTS * one.timeout_ms
                    self.overdue += self.now_ms - one.started_at_ms > limit_ms
            if opened:
                self.oldest += opened
                self.oldest.sort(key=lambda one: (one.started_at_ms, one.transactional_id))
                del self.oldest[OLDEST_MAX:]
            yield None

    @property
    def oldest_open_ms(self) -> int:
        """For how long the oldest has been open; 0 without one."""
        return max(0, self.now_ms - self.oldest[0].started_at_ms) if self.oldest else 0


def _collect(node: NodeCore, scrape: Scrape) -> Iterator[Work | None]:
    known = node.engine.image.transactions
    census = Census(node.plane.clock.wall_ms())
    yield from census.take(known)
    for state, count in census.states.items():
        scrape[IDS].add((state.label,), count)
    scrape[OWED].add((), len(known.decided))
    scrape[OLDEST].add((), census.oldest_open_ms / 1e3)
    scrape[OVERDUE].add((), census.overdue)
    yield None


TRANSACTIONS: Final = Collector((IDS, OWED, OLDEST, OVERDUE), _collect)
