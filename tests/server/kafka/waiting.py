"""Wait for a promise in a trio test, with a deadline."""

from __future__ import annotations

from typing import TypeVar

import trio

from raftmq.errors import RequestTimedOutError
from raftmq.promise import Promise

T = TypeVar("T")


async def wait_for(promise: Promise[T], timeout_s: float | None = None) -> T:
    """Sleep until the promise settles and return its value. Always a checkpoint.

    Raises:
        RequestTimedOutError: not settled within `timeout_s`; the outcome is unknown.
        Exception: what the promise failed with.
    """
    settled = trio.Event()
    promise.when_done(lambda _promise: settled.set())
    with trio.move_on_after(float("inf") if timeout_s is None else timeout_s):
        await settled.wait()
    if not promise.is_done:
        raise RequestTimedOutError("no outcome in time")
    return promise.result()
