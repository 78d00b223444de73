"""What the controller does as time passes: it aborts what runs for too long and forgets old ids.

A transaction's timeout runs on monotonic time from when this controller first saw it; a new
controller begins anew. An id is forgotten by the clocks of a majority, since no single clock may
take anything away. Both are compared at apply with what they were made for, so neither beats an
applied commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final, Protocol

from raftmq.metadata.commands import UNDATED, AbortExpired, ForgetId, Row
from raftmq.metadata.image import MetadataImage
from raftmq.metadata.results import RowDone
from raftmq.metadata.transactions import Transaction, TransactionState
from raftmq.ports import Clock
from raftmq.promise import Promise
from raftmq.transactions.coordinator import TransactionConfig
from raftmq.transactions.rows import RowQueue

LOOKED_AT_PER_TICK: Final = 1_000
"""So many ids are looked at in one tick: about a millisecond."""
ROWS_PER_TICK: Final = 200


class Engine(Protocol):
    """The metadata engine, as far as expiry needs it."""

    @property
    def image(self) -> MetadataImage:
        """The newest applied state on this node."""
        ...

    @property
    def is_leader(self) -> bool:
        """True while this node is the controller and has applied all that came before it."""
        ...


class TransactionExpiry:
    """The controller's look at all transactional ids, in turns."""

    def __init__(
        self,
        engine: Engine,
        rows: RowQueue,
        clock: Clock,
        config: TransactionConfig,
        earliest_now_ms: Callable[[], int | None],
    ) -> None:
        """`earliest_now_ms`: what time it is at the earliest, by a majority's clocks."""
        self._engine = engine
        self._rows = rows
        self._clock = clock
        self._config = config
        self._earliest_now_ms = earliest_now_ms
        self._turn: Iterator[Transaction] | None = None
        self._seen: dict[tuple[int, int], float] = {}
        """When this controller first saw each running transaction, by (producer id, txn_seq): an id
        that was forgotten counts its transactions from 1 again."""
        self._seen_in_turn: dict[tuple[int, int], float] = {}
        self._under_way: set[str] = set()
        self.aborted_count = 0
        self.forgotten_count = 0

    def tick(self) -> None:
        """Look at the next ids; call it every 50 ms or so."""
        if not self._engine.is_leader:
            if self._seen or self._turn is not None:
                self._seen, self._seen_in_turn, self._turn = {}, {}, None
            return
        if self._turn is None:
            if not self._engine.image.transactions.ids:
                return
            self._turn = iter(self._engine.image.transactions.ids.values())
        looked_at = 0
        rows_left = ROWS_PER_TICK
        for known in islice(self._turn, LOOKED_AT_PER_TICK):
            looked_at += 1
            row = self._due(known)
            if row is not None and known.transactional_id not in self._under_way:
                self._send(known.transactional_id, row)
                rows_left -= 1
                if rows_left == 0:
                    return
        if looked_at < LOOKED_AT_PER_TICK:
            self._turn = None
            self._seen, self._seen_in_turn = self._seen_in_turn, {}

    def _due(self, known: Transaction) -> Row | None:
        if known.state is TransactionState.ONGOING:
            return self._expired(known)
        if not known.state.may_begin:
            return None
        now_ms = self._earliest_now_ms()
        is_undated = known.changed_at_ms == UNDATED
        if now_ms is None or (
            not is_undated and now_ms - known.changed_at_ms < self._config.id_expiration_ms
        ):
            return None
        return ForgetId(
            transactional_id=known.transactional_id,
            producer_id=known.producer_id,
            epoch=known.epoch,
            txn_seq=known.txn_seq,
            changed_at_ms=known.changed_at_ms,
        )

    def _expired(self, known: Transaction) -> Row | None:
        now_ms = self._clock.monotonic_ms()
        key = known.producer_id, known.txn_seq
        since_ms = self._seen_in_turn[key] = self._seen.get(key, now_ms)
        if now_ms - since_ms < known.timeout_ms:
            return None
        return AbortExpired(
            transactional_id=known.transactional_id,
            producer_id=known.producer_id,
            epoch=known.epoch,
            txn_seq=known.txn_seq,
        )

    def _send(self, transactional_id: str, row: Row) -> None:
        self._under_way.add(transactional_id)

        def done(outcome: Promise[RowDone]) -> None:
            self._under_way.discard(transactional_id)
            if outcome.error is None and outcome.result().code == 0:
                if isinstance(row, AbortExpired):
                    self.aborted_count += 1
                else:
                    self.forgotten_count += 1

        self._rows.add(row).when_done(done)
