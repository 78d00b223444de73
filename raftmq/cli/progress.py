"""A progress bar for work that takes long: on a terminal's standard error, and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from raftmq.cli.console import note


class Bar:
    """A progress bar on a terminal's standard error; elsewhere nothing but what is said."""

    def __init__(self, progress: Any, name: str) -> None:
        self._progress = progress
        self._task = None if progress is None else progress.add_task(name, total=None, told="")

    def name(self, text: str) -> None:
        """What is going on."""
        if self._progress is not None:
            self._progress.update(self._task, description=text)

    def update(self, done: int, of: int, told: str) -> None:
        """How far it is."""
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=of, told=told)

    def say(self, text: str) -> None:
        """A line for people."""
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False)
        else:
            note(text)


@contextmanager
def progress_bar(name: str, as_json: bool) -> Iterator[Bar]:
    """A bar while the block runs; none with JSON, or where standard error is no terminal."""
    if as_json or not sys.stderr.isatty():
        yield Bar(None, name)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[told]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield Bar(progress, name)
