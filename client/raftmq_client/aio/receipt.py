"""What an async producer's `send` gives: a receipt that is awaited."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from raftmq_client.core.accumulator import Receipt as CoreReceipt
from raftmq_client.core.accumulator import RecordMetadata


class Receipt(CoreReceipt, eq=False):
    """The promise of a record's place: `place = await receipt`."""

    def __await__(self) -> Generator[Any, Any, RecordMetadata]:
        return self.result().__await__()

    async def result(  # type: ignore[override] # an async driver's receipt is awaited
        self, timeout: float | None = None
    ) -> RecordMetadata:
        """Wait until the record is acknowledged.

        Args:
            timeout: seconds; None waits for the producer's delivery timeout.

        Raises:
            ClientError: failed or unknown, see its `outcome`.
            TimeoutError: nothing is settled yet; the record is still on its way.
        """
        if not self.is_done:
            await self._waiter._settle(self, timeout)
        if not self.is_done:
            raise TimeoutError("the record is still on its way")
        return CoreReceipt.result(self)
