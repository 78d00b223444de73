"""Plain lines for people and pipes, without rich: results to standard output, notes to the other.

Nodes and `dev` use this module; nothing here may import typer or rich.
"""

from __future__ import annotations

import sys


def out(line: str) -> None:
    """A result, at once: whoever reads the pipe may wait for it."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def note(line: str) -> None:
    """Something for people to read that is no result."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
