"""What clients asked and were told: one list of operations, each ok, failed or unknown.

A timeout or a lost leadership is `info` (unknown): the record may be there or may yet come. Calling
it a failure would make checkers lie.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from attrs import define

from raftmq.types import RaftGroupId


class Outcome(Enum):
    """How an operation ended."""

    PENDING = "pending"
    OK = "ok"
    FAIL = "fail"
    INFO = "info"


@define(slots=True, eq=False)
class Operation:
    """One append of some records, or one read barrier."""

    number: int
    group: RaftGroupId
    values: tuple[bytes, ...]
    invoked_ms: float
    offset: int = -1
    ended_ms: float = -1.0
    outcome: Outcome = Outcome.PENDING
    when_done: Callable[[], None] | None = None


class History:
    """All operations of a run, in order of invocation."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.acked_records = 0

    def invoke(self, group: RaftGroupId, values: tuple[bytes, ...], now_ms: float) -> Operation:
        """A client begins."""
        operation = Operation(len(self.operations), group, values, now_ms)
        self.operations.append(operation)
        return operation

    def end(self, operation: Operation, outcome: Outcome, now_ms: float) -> None:
        """A client learns, or gives up; later news is ignored."""
        if operation.outcome is not Outcome.PENDING:
            return
        operation.outcome = outcome
        operation.ended_ms = now_ms
        if outcome is Outcome.OK:
            self.acked_records += len(operation.values)
        if operation.when_done is not None:
            operation.when_done()
