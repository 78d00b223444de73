"""Tells of producers that nobody closed and that had records on board.

Owns one finalizer per producer, which Python runs when the producer is collected or the process
ends, whichever comes first. It warns and logs, and sends nothing: nobody would wait for it.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from typing import Final

from raftmq_client.core.producer import ProducerCore
from raftmq_client.forks import Lineage

LOG: Final = logging.getLogger("raftmq_client.producer")


def watch(producer: object, core: ProducerCore) -> weakref.finalize[..., object]:
    """The finalizer of a producer; `detach` it when it is closed."""
    return weakref.finalize(producer, _tell, core, Lineage.number)


def _tell(core: ProducerCore, forks: int) -> None:
    pending, untold = core.pending, core.untold
    if forks != Lineage.number or not (pending or untold.failed or untold.unknown):
        return  # nothing on board; or it is the parent's
    message = (
        f"a producer was not closed: {pending} records were on their way, {untold.failed} had"
        f" failed and {untold.unknown} are unknown, and nobody had heard of it"
    )
    LOG.error(message)
    warnings.warn(message, ResourceWarning, stacklevel=2)
