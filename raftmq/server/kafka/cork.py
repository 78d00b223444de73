"""Doing several things at once: appends of one receive drained together, answers sent together.

A drain of the replicas may settle many answers of one connection, and one receive may hold many
requests. Sent one by one each answer costs a system call and a packet, drained one by one each
append costs a message to every peer. So while the replicas drain, or while the requests of one
receive are begun, answers gather, and leave when that is done, still in the same turn of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Drains(Protocol):
    """What the server knows of the engine of all replicas (`replication/multiraft.py`)."""

    after_drain: list[Callable[[], None]]

    @property
    def is_draining(self) -> bool:
        """True while effects of replicas are performed; `after_drain` follows."""
        ...

    def batch(self) -> AbstractContextManager[None]:
        """Do several things to replicas and drain each of them once, at the end."""
        ...


class Corked(Protocol):
    """Something with answers to send."""

    def flush(self) -> None:
        """Send what is ready."""
        ...


class Cork:
    """Holds answers back for the rest of the present piece of work."""

    __slots__ = ("_depth", "_drains", "_waiting")

    def __init__(self, drains: Drains) -> None:
        self._depth = 0
        self._drains = drains
        self._waiting: dict[int, Corked] = {}
        drains.after_drain.append(self.flush)

    @property
    def is_in(self) -> bool:
        """True when answers are to be held back for now: `flush` is certain to follow."""
        return self._depth > 0 or self._drains.is_draining

    def hold(self, corked: Corked) -> None:
        """Let `corked` send when the work is done."""
        self._waiting[id(corked)] = corked

    def flush(self) -> None:
        """Send everything held."""
        while self._waiting:
            waiting, self._waiting = self._waiting, {}
            for corked in waiting.values():
                corked.flush()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Begin several requests as one piece of work."""
        self._depth += 1
        try:
            with self._drains.batch():
                yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.flush()
