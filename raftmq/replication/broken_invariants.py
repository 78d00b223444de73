"""Reports of broken invariants, by the code that meets them.

Callers may log the exception, or lose a connection by it: the node stops all the same, since the
part that met it has reported first. `MultiRaft` reports exceptions that end its rounds of drains;
methods with the decorators below are the other ways into the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from raftmq.errors import RaftmqError
from raftmq.ports import DiskError

ReportBroken = Callable[[str], None]
"""report(reason): the node must promise nothing more."""


class Reporter(Protocol):
    """A part of the engine that can report."""

    on_broken_invariant: ReportBroken


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=Reporter)
Method = Callable[Concatenate[S, P], R]


def reports_assertions(method: Method[S, P, R]) -> Method[S, P, R]:
    """For methods that only read: report an assertion that fails in one, and let it pass on."""

    @wraps(method)
    def reporting(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except AssertionError as error:
            self.on_broken_invariant(f"broken invariant: {error!r}")
            raise

    return reporting


def reports_bugs(method: Method[S, P, R]) -> Method[S, P, R]:
    """For methods that change several parts: report any exception but an operating error, since it
    ended the change half-way, and let it pass on."""

    @wraps(method)
    def reporting(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except (RaftmqError, DiskError):
            raise
        except Exception as error:
            self.on_broken_invariant(f"broken invariant: {error!r}")
            raise

    return reporting
