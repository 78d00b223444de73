"""Stories told by hand: histories that one verdict must reject, or that all must accept."""

from __future__ import annotations

from collections.abc import Callable

from tests.jepsen_like.checkers.scribe import Scribe

Story = Callable[[Scribe], None]
REJECTED: list[tuple[str, Story]] = []
ACCEPTED: list[tuple[str, Story]] = []


def rejected(name: str) -> Callable[[Story], Story]:
    """The verdict `name` must be invalid."""

    def add(story: Story) -> Story:
        REJECTED.append((name, story))
        return story

    return add


def accepted(name: str) -> Callable[[Story], Story]:
    """Nothing may be invalid; `name` is the verdict that might have been."""

    def add(story: Story) -> Story:
        ACCEPTED.append((name, story))
        return story

    return add


def four(s: Scribe) -> None:
    s.append(1, {0: 10, 1: 11, 2: 12, 3: 13})
    s.poll(9, {0: 10, 1: 11, 2: 12, 3: 13})
