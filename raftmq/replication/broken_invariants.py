"""Reports of broken invariants: the engine says itself that it is not what it believes to be.

Its callers may log the exception or lose a connection by it: the node stops all the same, since the
part that met it has reported first. `MultiRaft` reports what ends its rounds of drains; the methods
that are decorated here are the other ways in.
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
    """A part of the engine that has somebody to tell."""

    on_broken_invariant: ReportBroken


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=Reporter)
Method = Callable[Concatenate[S, P], R]


def reports_assertions(method: Method[S, P, R]) -> Method[S, P, R]:
    """For methods that look: an assertion that fails in one is reported, and goes on as it was."""

    @wraps(method)
    def reporting(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except AssertionError as error:
            self.on_broken_invariant(f"broken invariant: {error!r}")
            raise

    return reporting


def reports_bugs(method: Method[S, P, R]) -> Method[S, P, R]:
    """For methods that change what several parts hold: any exception but an operating error ended
    one half-way, and is reported."""

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
