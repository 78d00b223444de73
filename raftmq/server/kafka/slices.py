"""Long work of one request, done in short turns of the loop between everybody else's.

A question about ten thousand partitions takes a tenth of a second to read, answer and write; in one
go it would hold up heartbeats and other clients. Such work is a generator that yields after each
few milliseconds, or yields a promise of what it waits for (a worker, say). Short work ends before
its first turn is over and costs nothing more; of all long work of a node one piece is done in a
pass of the loop, so that many askers do not add up.

Requests behind it on the same connection are not begun before it has asked for all that it wants
from others (`Line.bar`), so that what changes anything is done in the order of the requests. While
it waits for what it asked, or makes its answer, they are; their answers still come later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Final, Protocol, TypeAlias, TypeVar, cast

from raftmq.partition.parked import Deadlines
from raftmq.promise import Promise

R = TypeVar("R")
T = TypeVar("T")
Work: TypeAlias = Generator[Promise[None] | None, None, R]

TURN_PARTITIONS: Final = 256
"""So many partitions are looked at before others have a turn."""


def all_at_once(work: Work[R]) -> R:
    """What `work` returns, without a pause; it must not wait for anything."""
    while True:
        try:
            waits = next(work)
            assert waits is None, "work that waits is for `Slices`"
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


class Line(Protocol):
    """Where a request came from."""

    def bar(self) -> None:
        """Begin no request behind this one."""
        ...

    def unbar(self) -> None:
        """Go on with the next ones."""
        ...


class _Piece:
    """One work, and how far it is."""

    __slots__ = ("is_long", "line", "promise", "work")

    def __init__(self, work: Work[Any], line: Line | None) -> None:
        self.work = work
        self.promise: Promise[Any] = Promise()
        self.line = line  # while it is barred, or may be
        self.is_long = False


class Slices:
    """The long work of one node, in order of arrival, each getting a turn after the other."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._queue: deque[_Piece] = deque()
        self.turns = 0

    def __len__(self) -> int:
        return len(self._queue)

    def run(self, work: Work[R], line: Line | None = None) -> R | Promise[R]:
        """What `work` returns: at once if it never yields, else when its last turn is over.

        `line` is barred from its first turn until it waits for something or ends: what it asks of
        others by then is asked in the order of the requests.
        """
        try:
            waits = next(work)
        except StopIteration as end:
            result: R = end.value
            return result
        piece = _Piece(work, line)
        if waits is None and line is not None:
            line.bar()
        else:
            piece.line = None
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
        except Exception as caught:  # noqa: BLE001 - it concerns whoever waits for the promise
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
        line, piece.line = piece.line, None
        if line is not None:
            line.unbar()
