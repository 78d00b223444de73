"""When a process stands still, and what it does as soon as it goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jepsen_like.cluster.world import ClusterWorld


class Pauses:
    """Of one process."""

    def __init__(self, world: ClusterWorld) -> None:
        self._world = world
        self._until_ms = 0.0
        self._late: list[Callable[[], None]] = []

    @property
    def is_paused(self) -> bool:
        """True while nothing is done."""
        return self._world.now_ms < self._until_ms

    def begin(self, lasts_ms: float) -> None:
        """Stand still for so long from now on."""
        self._until_ms = self._world.now_ms + lasts_ms

    def end(self) -> None:
        """Go on now."""
        self._until_ms = 0.0
        self._go_on()

    def defer(self, turn: Callable[[], None]) -> None:
        """Do something as soon as the process goes on, after what was deferred before."""
        self._world.had_effect("done late")
        if not self._late:
            self._world.schedule(self._until_ms - self._world.now_ms, self._go_on)
        self._late.append(turn)

    def _go_on(self) -> None:
        if self.is_paused:  # another pause began before this one was over
            self._world.schedule(self._until_ms - self._world.now_ms, self._go_on)
            return
        late, self._late = self._late, []
        for turn in late:
            self._world.schedule(0.0, turn)
