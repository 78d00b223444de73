"""A bug to be planted in the product's own modules, and how patches become a plant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from unittest.mock import patch

from attrs import frozen

from jepsen_like.cluster.options import ClusterOptions

Plant = Callable[[], AbstractContextManager[None]]


@frozen
class Bug:
    """A planted bug, where to look for it, and what it is that it breaks.

    Attributes:
        options: of the run for a seed.
        promise: of mission.md, by number.
        rules: of hazards.md, by number.
        caught_by: invariants and checkers that count as having caught it.
        begins_at: a hunt's first seed; another one where what the bug needs is rarely drawn.
    """

    plant: Plant
    options: Callable[[int], ClusterOptions]
    promise: int
    rules: tuple[int, ...]
    caught_by: tuple[str, ...]
    begins_at: int = 1


def patching(*targets: tuple[object, str, object]) -> Plant:
    """Replace these attributes while the bug is planted."""

    @contextmanager
    def plant() -> Iterator[None]:
        with ExitStack() as patches:
            for target in targets:
                patches.enter_context(patch.object(*target))
            yield

    return plant


def nothing(*_arguments: object, **_named: object) -> None:
    """In place of what is forgotten."""
    return
