"""A result that comes later, without a scheduler.

The deciding code is synchronous and runs unchanged in the simulation, so it cannot await. It hands
out a `Promise`; trio code goes on from its callback, the simulation looks at it between events.
Callbacks run at once, in the order they were added, in the thread that resolves it, which is the
loop's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Promise(Generic[T]):
    """Resolved exactly once, with a value or an exception."""

    __slots__ = ("_callbacks", "_error", "_value", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        self._value: T | None = None
        self._error: Exception | None = None
        self._callbacks: list[Callable[[Promise[T]], None]] | None = None

    @classmethod
    def resolved(cls, value: T) -> Promise[T]:
        """A promise that has its value already."""
        promise: Promise[T] = cls()
        promise.resolve(value)
        return promise

    @classmethod
    def failed(cls, error: Exception) -> Promise[T]:
        """A promise that has failed already."""
        promise: Promise[T] = cls()
        promise.fail(error)
        return promise

    def resolve(self, value: T) -> None:
        """Settle it with a value."""
        assert not self.is_done, "a promise settles once"
        self.is_done = True
        self._value = value
        if self._callbacks is not None:
            self._tell()

    def fail(self, error: Exception) -> None:
        """Settle it with an error, which `result()` raises."""
        assert not self.is_done, "a promise settles once"
        self.is_done = True
        self._error = error
        if self._callbacks is not None:
            self._tell()

    def when_done(self, callback: Callable[[Promise[T]], None]) -> None:
        """Call `callback(self)` once settled; at once when it already is."""
        if self.is_done:
            callback(self)
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    @property
    def error(self) -> Exception | None:
        """The exception it failed with; None while it is pending, or where it has a value."""
        return self._error

    def result(self) -> T:
        """The value.

        Raises:
            Exception: whatever `fail` was given.
        """
        assert self.is_done, "result() of a pending promise"
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # resolve() stored a T

    def _tell(self) -> None:
        callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            callback(self)
