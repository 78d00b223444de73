"""Whether this process is a fork of the one that made a client.

Owns a number that a fork raises in the child, so that a client can tell at every call, where asking
the kernel for the process's id would cost as much as the call itself.
"""

from __future__ import annotations

import os


class Lineage:
    """How many forks lie between this process and the one that imported this."""

    number = 0


def _count() -> None:
    Lineage.number += 1


os.register_at_fork(after_in_child=_count)
