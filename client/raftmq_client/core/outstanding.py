"""What a producer had not settled at one moment, and who has yet to be told.

Lets a driver wait for the records sent so far while others go on sending. Pure: it watches batches
and receipts, which `ProducerCore` settles.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from typing import Final

from raftmq_client.core.accumulator import Batch, Receipt
from raftmq_client.core.untold import Untold
from raftmq_client.errors import UndeliveredError

LOG: Final = logging.getLogger("raftmq_client.producer")


class Listeners:
    """Settled receipts that somebody listens to, until the driver has told him."""

    def __init__(self) -> None:
        self._waiting: list[Receipt] = []
        self._settled = 0
        self._told = 0

    @property
    def settled(self) -> int:
        """How many receipts with listeners were settled so far."""
        return self._settled

    def add(self, receipts: Sequence[Receipt]) -> None:
        """These are settled."""
        self._waiting += receipts
        self._settled += len(receipts)

    def take(self) -> list[Receipt]:
        """Those whose listeners the driver calls now, when no core is at work; then `told`."""
        taken, self._waiting = self._waiting, []
        return taken

    def told(self, count: int) -> None:
        """The listeners of so many have been called."""
        self._told += count

    def have_heard(self, count: int) -> bool:
        """True when the first `count` of all that were settled have been told."""
        return self._told >= count


def tell(settled: Iterable[Receipt]) -> int:
    """Call what listens to these receipts, and log what it raises; how many calls raised.

    Drivers do so when no core is at work. A fault of one listener is no reason to keep others from
    hearing, or records from leaving.
    """
    failed = 0
    for receipt in settled:
        for listener in receipt.listeners or ():
            try:
                answer = listener(receipt)
                if isinstance(answer, Coroutine):
                    answer.close()
                    raise TypeError("on_delivery is async; it has to be a plain function")
            except Exception:
                failed += 1
                LOG.exception("on_delivery raised, for %r", receipt)
    return failed


def report(untold: Untold) -> UndeliveredError | None:
    """What nobody has heard of as a producer ends: logged, and given to be raised."""
    error = untold.take()
    if error is not None:
        reasons = "; ".join(f"{item.records} times {item}" for item in error.leaves[:10])
        LOG.error(
            "a producer ended with %d records failed and %d unknown: %s",
            error.failed,
            error.unknown,
            reasons,
        )
    return error


class Outstanding:
    """Batches, and records without one, that were not settled when this was made."""

    def __init__(
        self, batches: Iterable[Batch], unrouted: Iterable[Receipt], listeners: Listeners
    ) -> None:
        self._batches = deque(batches)
        self._unrouted = deque(unrouted)
        self._listeners = listeners
        self._settled: int | None = None

    def is_over(self) -> bool:
        """True once all of it is settled, and who listened was told."""
        while self._batches and _is_settled(self._batches[0]):
            self._batches.popleft()
        while self._unrouted and self._unrouted[0].is_done:
            self._unrouted.popleft()
        if self._batches or self._unrouted:
            return False
        if self._settled is None:
            self._settled = self._listeners.settled
        return self._listeners.have_heard(self._settled)


def _is_settled(batch: Batch) -> bool:
    return batch.is_done if batch.halves is None else all(map(_is_settled, batch.halves))
