"""Plain lines for people and pipes, without rich: results to standard output, notes to the other.

The exit codes of all commands are here, too. Nodes and `dev` use this module; nothing in it may
import typer or rich.
"""

from __future__ import annotations

import sys
from typing import Final

from raftmq.foreign import ascii_json, visible

EXIT_DONE: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_UNKNOWN: Final = 3
EXIT_INTERRUPTED: Final = 130


def out(line: str) -> None:
    """A result, at once: a reader of the pipe may wait for it. What does not print is escaped."""
    sys.stdout.write(visible(line) + "\n")
    sys.stdout.flush()


def out_json(encoded: bytes) -> None:
    """A result for machines: JSON, perhaps on several lines."""
    sys.stdout.write(ascii_json(encoded) + "\n")
    sys.stdout.flush()


def clear_screen() -> None:
    """Begin at the top of an empty terminal."""
    sys.stdout.write("\x1b[H\x1b[2J")


def silence_client_log() -> None:
    """Silence the client's own log: a command shows its errors itself."""
    import logging  # a node that is starting has no need of it

    logging.getLogger("raftmq_client").addHandler(logging.NullHandler())


def note(text: str) -> None:
    """Something for people to read that is no result; lines stay, what does not print is escaped.

    A name from outside must be made `visible` before it becomes part of several lines.
    """
    sys.stderr.write("\n".join(map(visible, text.split("\n"))) + "\n")
    sys.stderr.flush()
