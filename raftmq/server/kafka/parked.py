"""Promises of answers: several gathered into one, and those that a vanished client takes along."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, Generic, TypeVar

from raftmq.promise import Promise

T = TypeVar("T")
R = TypeVar("R")


class HangUp(Enum):
    """What a handler returns instead of an answer where the client should ask another node: its
    connection ends, the one thing after which every client looks elsewhere."""

    HANG_UP = "ask another node"


HANG_UP: Final = HangUp.HANG_UP


class Abandonable(Promise[T], Generic[T]):
    """A promise whose asker may go away: then nothing needs to wait any more."""

    __slots__ = ()

    def abandon(self) -> None:
        """Stop waiting and settle somehow; nobody reads the value."""
        raise AssertionError("a subclass says what is to be dropped")


def gather(results: Sequence[T | Promise[T]], finish: Callable[[list[T]], R]) -> R | Promise[R]:
    """`finish` of all values in order: at once when all are there, else when the last one comes.

    What `finish` raises then fails the promise: the last value may come from a call of the engine,
    which must not meet the faults of an answer.
    """
    values: list[T | None] = []
    waiting: list[tuple[int, Promise[T]]] = []
    for i, result in enumerate(results):
        if isinstance(result, Promise):
            if result.is_done:
                values.append(result.result())
            else:
                values.append(None)
                waiting.append((i, result))
        else:
            values.append(result)
    if not waiting:
        return finish(values)  # type: ignore[arg-type]  # every value is there
    promise: Promise[R] = Promise()
    left = len(waiting)

    def settled_at(i: int) -> Callable[[Promise[T]], None]:
        def settled(done: Promise[T]) -> None:
            nonlocal left
            if promise.is_done:
                return
            if done.error is not None:
                promise.fail(done.error)
                return
            values[i] = done.result()
            left -= 1
            if left == 0:
                _resolve(promise, lambda: finish(values))  # type: ignore[arg-type]  # all are there

        return settled

    for i, pending in waiting:
        pending.when_done(settled_at(i))
    return promise


def _resolve(promise: Promise[R], finish: Callable[[], R]) -> None:
    try:
        value = finish()
    except Exception as error:  # noqa: BLE001 - it concerns the request alone
        promise.fail(error)
    else:
        promise.resolve(value)


def chain(result: T | Promise[T], after: Callable[[T], R | Promise[R]]) -> R | Promise[R]:
    """`after` of one value, now or later, and what that promises in turn.

    What `after` raises later fails the promise, as with `gather`.
    """
    if not isinstance(result, Promise):
        return after(result)
    promise: Promise[R] = Promise()

    def settled(done: Promise[T]) -> None:
        if done.error is not None:
            promise.fail(done.error)
            return
        try:
            last = after(done.result())
        except Exception as error:  # noqa: BLE001 - it concerns the request alone
            promise.fail(error)
            return
        if isinstance(last, Promise):
            last.when_done(passed)
        else:
            promise.resolve(last)

    def passed(done: Promise[R]) -> None:
        if done.error is not None:
            promise.fail(done.error)
        else:
            promise.resolve(done.result())

    result.when_done(settled)
    return promise


def then(result: T | Promise[T], finish: Callable[[T], R]) -> R | Promise[R]:
    """`finish` of one value, now or later; an error passes through."""
    return gather((result,), lambda values: finish(values[0]))
