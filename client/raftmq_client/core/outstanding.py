"""What a producer had not settled at one moment, and who has yet to be told.

Lets a driver wait for the records sent so far while others go on sending. Pure: it watches batches
and receipts, which `ProducerCore` settles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from raftmq_client.core.accumulator import Batch, Receipt


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


def tell(settled: Iterable[Receipt]) -> None:
    """Call who listens to these receipts; drivers do so when no core is at work.

    Raises:
        Exception: the first that a listener raised, after all of them were called.
    """
    failure: Exception | None = None
    for receipt in settled:
        for listener in receipt.listeners or ():
            try:
                listener(receipt)
            except Exception as error:  # noqa: BLE001 - raised below, once all have been told
                failure = failure or error
    if failure is not None:
        raise failure


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
