"""Histories written by hand, that one verdict must reject, or that all must accept."""

from __future__ import annotations

from collections.abc import Callable

from tests.jepsen_like.checkers.scribe import Scribe

Written = Callable[[Scribe], None]
REJECTED: list[tuple[str, Written]] = []
ACCEPTED: list[tuple[str, Written]] = []


def rejected(name: str) -> Callable[[Written], Written]:
    """The verdict `name` must be invalid."""

    def add(written: Written) -> Written:
        REJECTED.append((name, written))
        return written

    return add


def accepted(name: str) -> Callable[[Written], Written]:
    """Nothing may be invalid; `name` is the verdict that might have been."""

    def add(written: Written) -> Written:
        ACCEPTED.append((name, written))
        return written

    return add


def four(s: Scribe) -> None:
    s.append(1, {0: 10, 1: 11, 2: 12, 3: 13})
    s.poll(9, {0: 10, 1: 11, 2: 12, 3: 13})
