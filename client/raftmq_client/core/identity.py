"""The id and epoch that a cluster gives to an idempotent producer (KIP-98).

Owns asking for it, one request at a time with a pause after a failure. Pure; `ProducerCore` says
when one is needed and numbers batches with it.
"""

from __future__ import annotations

from typing import Any

from raftmq.protocol import ApiKey, Struct
from raftmq_client.core.call import Call, struct_call
from raftmq_client.errors import BrokerError, ClientError

_TIMEOUT_MS_MAX = 5_000.0


class ProducerIdentity:
    """What one producer is called by brokers; not known at first."""

    def __init__(self, request_timeout_ms: float, backoff_ms: float) -> None:
        self.producer_id = -1
        self.producer_epoch = -1
        self.error: ClientError | None = None
        """Why the last request brought none."""
        self._timeout_ms = min(request_timeout_ms, _TIMEOUT_MS_MAX)
        self._pause_ms = backoff_ms * 2
        self._is_asking = False
        self._not_before = 0.0

    @property
    def is_known(self) -> bool:
        """True when batches can be numbered."""
        return self.producer_id >= 0

    def forget(self) -> None:
        """Its epochs are used up: another id is wanted."""
        self.producer_id = -1

    def ask_at(self, now: float) -> float | None:
        """When `calls` would ask; None while an answer is awaited."""
        return None if self._is_asking else max(now, self._not_before)

    def calls(self, now: float) -> list[Call]:
        """The request, when one is due."""
        if self.is_known or self._is_asking or now < self._not_before:
            return []
        self._is_asking = True
        request = Struct(transactional_id=None, transaction_timeout=60_000)
        return [
            struct_call(
                ApiKey.INIT_PRODUCER_ID,
                request,
                self._answered,
                timeout_ms=self._timeout_ms,
                is_expendable=True,
            )
        ]

    def _answered(self, response: Any, error: ClientError | None, now: float) -> None:
        self._is_asking = False
        if error is None and response.error_code:
            error = BrokerError(response.error_code, about="producer id")
        if error is not None:
            self.error = error
            self._not_before = now + self._pause_ms
            return
        self.producer_id = response.producer_id
        self.producer_epoch = response.producer_epoch
