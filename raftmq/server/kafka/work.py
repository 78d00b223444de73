"""Answers that take time: promises put together, and long work done in short turns of the loop.

A question about ten thousand partitions takes a tenth of a second to read, answer and write; in one
go it would hold up heartbeats and other clients. Such work is a generator (`Work`) that yields
after each few milliseconds, or yields a promise of what it waits for (a worker, say). Short work
ends before its first turn is over and costs nothing more. Of all long work of a node one piece is
done in a pass of the loop (`WorkScheduler`), so that many askers do not add up.

Requests behind long work on the same connection are not begun before it has asked for all that it
wants from others (`RequestSource.bar`), so that what changes anything is done in the order of the
requests. While it waits for what it asked, or makes its answer, they are; their answers still come
later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from enum import Enum
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar, cast

from raftmq.partition.parked import Deadlines
from raftmq.promise import Promise

T = TypeVar("T")
R = TypeVar("R")
Work: TypeAlias = Generator[Promise[None] | None, None, R]

TURN_PARTITIONS: Final = 256
"""So many partitions are looked at in one turn of the loop."""


class HangUp(Enum):
    """What a handler returns instead of an answer where the client should ask another node: its
    connection ends, after which every client turns to another node."""

    HANG_UP = "ask another node"


HANG_UP: Final = HangUp.HANG_UP


class Abandonable(Promise[T], Generic[T]):
    """A promise whose asker may go away: then nothing needs to wait any more."""

    __slots__ = ()

    def abandon(self) -> None:
        """Stop waiting and settle; the value is not read."""
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


def all_at_once(work: Work[R]) -> R:
    """What `work` returns, without a pause; it must not wait for anything."""
    while True:
        try:
            waits = next(work)
            assert waits is None, "work that waits is for `WorkScheduler`"
        except StopIteration as end:
            result: R = end.value
            return result


def in_turns(
    items: Iterable[T], one: Callable[[T], R], per_turn: int = TURN_PARTITIONS
) -> Work[list[R]]:
    """`one` of each item, so many in a turn."""
    results = []
    for count, item in enumerate(items, 1):
        results.append(one(item))
        if count % per_turn == 0:
            yield None
    return results


def value_of(result: Promise[R]) -> Work[R]:
    """The value, waited for."""
    if not result.is_done:
        yield cast("Promise[None]", result)
    return result.result()


def all_of(results: Sequence[R | Promise[R]]) -> Work[list[R]]:
    """All values, waited for where they are promised."""
    values: list[R] = []
    for count, result in enumerate(results, 1):
        if isinstance(result, Promise):
            values.append((yield from value_of(result)))
        else:
            values.append(result)
        if count % TURN_PARTITIONS == 0:
            yield None
    return values


class RequestSource(Protocol):
    """Where a request came from."""

    def bar(self) -> None:
        """Begin no request behind this one."""
        ...

    def unbar(self) -> None:
        """Go on with the next ones."""
        ...


class _Piece:
    """One work, and how far it is."""

    __slots__ = ("is_long", "promise", "source", "work")

    def __init__(self, work: Work[Any], source: RequestSource | None) -> None:
        self.work = work
        self.promise: Promise[Any] = Promise()
        self.source = source  # while it is barred, or may be
        self.is_long = False


class WorkScheduler:
    """The long work of one node, in order of arrival, each getting a turn after the other."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._queue: deque[_Piece] = deque()
        self.turns = 0

    def __len__(self) -> int:
        return len(self._queue)

    def run(self, work: Work[R], source: RequestSource | None = None) -> R | Promise[R]:
        """What `work` returns: at once if it never yields, else when its last turn is over.

        `source` is barred from its first turn until it waits for something or ends: what it asks of
        others by then is asked in the order of the requests.
        """
        try:
            waits = next(work)
        except StopIteration as end:
            result: R = end.value
            return result
        piece = _Piece(work, source)
        if waits is None and source is not None:
            source.bar()
        else:
            piece.source = None
        self._put(piece, waits)
        return piece.promise

    def _put(self, piece: _Piece, waits: Promise[None] | None) -> None:
        """Queue work, once what it waits for is there, whatever came of it."""
        if waits is not None:
            waits.when_done(lambda _: self._resume(piece))
            return
        piece.is_long = True
        self._queue.append(piece)
        if len(self._queue) == 1:
            self._deadlines.soon(self._go_on)

    def _resume(self, piece: _Piece) -> None:
        if piece.is_long:
            self._put(piece, None)
        else:
            self._step(piece)  # little work that waited

    def _go_on(self) -> None:
        piece = self._queue.popleft()
        self.turns += 1
        if self._queue:
            self._deadlines.soon(self._go_on)
        self._step(piece)

    def _step(self, piece: _Piece) -> None:
        end: Any = None
        error: Exception | None = None
        try:
            waits = next(piece.work)
        except StopIteration as stop:
            end = stop.value
        except Exception as caught:  # noqa: BLE001 - it fails the promise
            error = caught
        else:
            if waits is not None:
                self._unbar(piece)
            self._put(piece, waits)
            return
        self._unbar(piece)
        if error is None:
            piece.promise.resolve(end)
        else:
            piece.promise.fail(error)

    def _unbar(self, piece: _Piece) -> None:
        source, piece.source = piece.source, None
        if source is not None:
            source.unbar()
