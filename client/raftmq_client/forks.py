"""Whether this process is a fork of the one that made a client.

Owns a number that a fork raises in the child, so that a client can tell at every call, where asking
the kernel for the process's id would cost as much as the call itself.
"""

from __future__ import annotations

import os
from typing import ClassVar, Protocol
from weakref import WeakSet


class Lineage:
    """How many forks lie between this process and the one that imported this."""

    number = 0
    after: ClassVar[WeakSet[Forked]] = WeakSet()
    """Told in the child. A lock that another thread held at the fork is never released there."""


class Forked(Protocol):
    """What has something to mend in the child of a fork."""

    def after_fork(self) -> None:
        """This is the child."""
        ...


def _count() -> None:
    Lineage.number += 1
    for item in list(Lineage.after):
        item.after_fork()


os.register_at_fork(after_in_child=_count)
