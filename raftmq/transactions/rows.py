"""Rows of transactions on their way to the metadata group: many in one command, each with a result.

What is asked for in one turn of the loop leaves together at its end; while commands are under way
the next ones gather, and what comes late joins them. On the controller all that waits goes with the
next batch. Never judges a row: that is done at apply.

Invariants: rows leave in the order in which they came; each has one outcome, applied or unknown;
what waits is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.commands import UNDATED, Row, TransactionRows
from raftmq.metadata.results import RowDone, RowsDone
from raftmq.partition.parked import Deadlines
from raftmq.promise import Promise

ROWS_PER_COMMAND_MAX: Final = 200
ROWS_WAITING_MAX: Final = 50_000
COMMANDS_IN_FLIGHT_MAX: Final = 2
COMMAND_TIMEOUT_MS: Final = 10_000.0


class CommandSink(Protocol):
    """The metadata engine, as far as rows need it."""

    def propose(self, command: Any, *, timeout_ms: float | None = None) -> Promise[Any]:
        """Get a command applied; kept once this node's image shows it. Failed: unknown."""
        ...


class RowQueue:
    """The rows of one node."""

    def __init__(
        self,
        engine: CommandSink,
        deadlines: Deadlines,
        now_ms: Callable[[], int | None],
        wall_ms: Callable[[], int],
        *,
        rows_per_command_max: int = ROWS_PER_COMMAND_MAX,
        rows_waiting_max: int = ROWS_WAITING_MAX,
    ) -> None:
        """`now_ms` tells what time it is at the latest, as a majority of clocks says; None where
        that is not known. `wall_ms`: this node's own clock, for people alone."""
        self._engine = engine
        self._deadlines = deadlines
        self._now_ms = now_ms
        self._wall_ms = wall_ms
        self._per_command_max = rows_per_command_max
        self._waiting_max = rows_waiting_max
        self._waiting: deque[tuple[Row, Promise[RowDone]]] = deque()
        self._in_flight = 0
        self._is_due = False
        self.rows_count = 0
        self.commands_count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, row: Row) -> Promise[RowDone]:
        """Get a row applied; its promise fails with a KafkaError where the outcome is unknown."""
        if len(self._waiting) >= self._waiting_max:
            busy = KafkaError("too many rows wait", code=ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
            return Promise.failed(busy)
        promise: Promise[RowDone] = Promise()
        self._waiting.append((row, promise))
        self.rows_count += 1
        self._send_soon()
        return promise

    def _send_soon(self) -> None:
        if self._waiting and self._in_flight < COMMANDS_IN_FLIGHT_MAX and not self._is_due:
            self._is_due = True
            self._deadlines.soon(self._send_due)

    def _send_due(self) -> None:
        self._is_due = False
        if self._waiting and self._in_flight < COMMANDS_IN_FLIGHT_MAX:
            self._send()

    def send_now(self) -> None:
        """Let what waits leave in one command, however many are under way: it is just in time for
        the batch that is about to enter the log."""
        if self._waiting:
            self._send()

    def _send(self) -> None:
        count = min(len(self._waiting), self._per_command_max)
        taken = [self._waiting.popleft() for _ in range(count)]
        self._in_flight += 1
        self.commands_count += 1
        now_ms = self._now_ms()
        command = TransactionRows(
            rows=tuple(row for row, _ in taken),
            now_ms=UNDATED if now_ms is None else now_ms,
            said_ms=self._wall_ms(),
        )

        def done(outcome: Promise[RowsDone]) -> None:
            self._in_flight -= 1
            if outcome.error is None:
                for (_, promise), result in zip(taken, outcome.result().rows, strict=True):
                    promise.resolve(result)
            else:
                for _, promise in taken:
                    promise.fail(outcome.error)
            self._send_soon()

        self._engine.propose(command, timeout_ms=COMMAND_TIMEOUT_MS).when_done(done)
        self._send_soon()
