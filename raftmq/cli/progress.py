"""How far something is that the cluster does by itself, as commands watch it until it is done.

A command that watches may be ended at any time, and run again to go on; whether the cluster goes on
does not depend on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Final

import typer

from raftmq.cli.common import CommandError
from raftmq.cli.console import note, out
from raftmq.cli.main import EXIT_UNKNOWN

POLL_S: Final = 0.25
LOST_S: Final = 30.0
"""When no node has answered for so long it is not known how far anything is."""
RATE_AFTER_S: Final = 2.0
"""Before that a guess of how long it takes would be worth nothing."""
WAIT_S: Final = 24 * 3600.0

NoWait = Annotated[bool, typer.Option("--no-wait", help="Begin it and return at once.")]
Wait = Annotated[float, typer.Option("--wait", metavar="SECONDS", help="Watch it so long.", min=0)]


class Progress:
    """How far something is: in words, what is left as a number, and what does not get on."""

    def __init__(self, text: str, left: int, *, is_done: bool, waiting: Sequence[str] = ()) -> None:
        """`text` is "" where nothing is to be shown, `left` 0 where nobody can count it."""
        self.text = text
        self.left = left
        self.is_done = is_done
        self.waiting = waiting

    def lines(self, time_left: str, waiting_max: int) -> list[str]:
        """What people are shown."""
        if not self.text:
            return []
        lines = [self.text + time_left, *(f"  {line}" for line in self.waiting[:waiting_max])]
        if len(self.waiting) > waiting_max:
            lines.append(f"  and {len(self.waiting) - waiting_max} more wait")
        return lines


def watch(
    look: Callable[[], Progress],
    time_left: Callable[[Progress, float], str],
    wait_s: float,
    *,
    unfinished: str,
    waiting_max: int,
    as_json: bool,
) -> Progress:
    """Show how far it is until it is done, and return what the last look saw.

    Args:
        look: asks the cluster.
        time_left: how long it may still take, in words, of what was seen at a time.
        unfinished: what is told where the wait is over before.
        waiting_max: so much of what does not get on is named.

    Raises:
        CommandError: it is not done in time, nobody answers, or `look` says that it cannot end.
    """
    began = heard = time.monotonic()
    shown = ""
    while True:
        now = time.monotonic()
        try:
            progress = look()
            heard = now
        except CommandError as error:
            if error.code != EXIT_UNKNOWN or now - heard > LOST_S:
                raise
        else:
            text = "; ".join(line.strip() for line in progress.lines("", waiting_max))
            left = time_left(progress, now)
            if text != shown and not as_json:
                for line in progress.lines(left, waiting_max):
                    out(line)
            shown = text
            if progress.is_done:
                return progress
        if now - began >= wait_s:
            note("The cluster goes on by itself; run the same again to watch it.")
            raise CommandError(f"{unfinished}: {shown}", EXIT_UNKNOWN)
        time.sleep(POLL_S)


class Pace:
    """Guesses when something will be done, by how fast it has become less so far."""

    def __init__(self) -> None:
        self._began = 0.0
        self._first: int | None = None

    def left_text(self, left: int, now: float) -> str:
        """How long it may still take, in words; "" when nobody knows."""
        if self._first is None:
            self._first = left
            self._began = now
        return time_left_text(self._first - left, left, now - self._began)


def time_left_text(done: float, left: float, passed_s: float) -> str:
    """How long it may still take, in words; "" when nobody knows."""
    if done <= 0 or not left or passed_s < RATE_AFTER_S:
        return ""
    seconds = passed_s * left / done
    if seconds < 90:
        return f" (about {max(1, round(seconds))} s to go)"
    if seconds < 90 * 60:
        return f" (about {round(seconds / 60)} min to go)"
    return f" (about {seconds / 3600:.1f} h to go)"
