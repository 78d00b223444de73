"""So many at once, and so many a second after that: what is left of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Pace:
    """A bucket that holds `most` and fills by `per_s` a second."""

    __slots__ = ("_left", "_looked_ms", "_most", "_now_ms", "_per_s")

    def __init__(self, now_ms: Callable[[], float], most: int, per_s: float) -> None:
        self._now_ms = now_ms
        self._most = most
        self._per_s = per_s
        self._left = float(most)
        self._looked_ms = now_ms()

    def take(self, wanted: list[T]) -> list[T]:
        """Take as many as there is room for, from the front; gives those left over."""
        self._fill()
        count = min(len(wanted), int(self._left))
        self._left -= count
        return wanted[count:]

    def wait_ms(self) -> float:
        """Take one, and give how long it is until there is room for it; 0 when there is."""
        self._fill()
        self._left -= 1
        return 0.0 if self._left >= 0 else -self._left * 1e3 / self._per_s

    def _fill(self) -> None:
        now_ms = self._now_ms()
        self._left += max(0.0, now_ms - self._looked_ms) * self._per_s / 1e3
        self._left = min(self._left, float(self._most))
        self._looked_ms = now_ms
