"""What a checker is: told of invocations and completions in order, asked for verdicts at the end.

Completions come with the event that invoked them, paired once for all checkers by compose.py; a
note (something that happened to a process) is a completion whose invocation is itself. What is open
when the history ends is ended as `info`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from jepsen_like.checkers.verdict import Verdict
from jepsen_like.history_events import Event


class Checker:
    """Base of all streaming checkers."""

    operations: ClassVar[frozenset[str]] = frozenset()
    """Which operations it wants to be told of."""

    def invoked(self, event: Event) -> None:
        """An operation begins."""

    def completed(self, event: Event, invoked: Event) -> None:
        """An operation ended, or a note."""

    def finish(self) -> Sequence[Verdict]:
        """No more events: what came of it."""
        return ()
