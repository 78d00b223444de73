"""The `raftmq` command: picks what to import before it imports anything.

`start` and `dev` run nodes, whose start time is a budget: they are dispatched by hand, parse with
the standard library and never import typer or rich. Everything else is a typer application, built
only when it is needed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from raftmq.cli.console import EXIT_INTERRUPTED, silence_client_log


def run(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command; ends the process with its exit code."""
    try:
        _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:  # also while modules are imported
        sys.exit(EXIT_INTERRUPTED)


def _run(words: list[str]) -> None:
    is_completing = "_RAFTMQ_COMPLETE" in os.environ
    if words[:1] == ["start"] and not is_completing:
        from raftmq.cli.start import start

        sys.exit(start(words[1:]))
    if words[:1] == ["dev"] and not is_completing:
        from raftmq.cli.dev import dev

        sys.exit(dev(words[1:]))
    if words[:1] == ["demo"] and not is_completing:
        from raftmq.cli.demo import demo

        sys.exit(demo(words[1:]))
    from raftmq.cli.app import app

    silence_client_log()
    app(words, prog_name="raftmq")


if __name__ == "__main__":
    run()
