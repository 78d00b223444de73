"""A command that this node proposed and whose outcome it does not know yet.

Owns how an outcome becomes the promise's value or error. A result comes from the applied log; two
marks stand for what the log says without a result: a later command of this node was applied, so
this one never will be; or a snapshot came in between, so nobody can tell.
"""

from __future__ import annotations

from typing import Any, Final

from attrs import define

from raftmq.errors import KafkaError, RequestTimedOutError
from raftmq.metadata.commands import Rejection, Result
from raftmq.metadata.metadata_engine import CommandNotAppliedError
from raftmq.promise import Promise

OVERTAKEN: Final = object()
SKIPPED: Final = object()


@define(eq=False)
class Pending:
    """One command, encoded once: it is sent again under its old number.

    Attributes:
        may_resend: False where it makes sense from the present controller only.
        is_sent: it may be in a log.
        is_abandoned: it may be, and is not sent again; a later command tells.
    """

    sequence: int
    data: bytes
    promise: Promise[Any]
    deadline_ms: float
    may_resend: bool
    is_sent: bool = False
    is_abandoned: bool = False


def settle(promise: Promise[Any], result: Result) -> None:
    """Keep or break the promise, as the log says."""
    if result is OVERTAKEN:
        promise.fail(CommandNotAppliedError("overtaken by a later command"))
    elif result is SKIPPED:
        promise.fail(RequestTimedOutError("applied or not, before the snapshot that came"))
    elif isinstance(result, Rejection):
        promise.fail(KafkaError(result.message, code=result.code))
    else:
        promise.resolve(result)
