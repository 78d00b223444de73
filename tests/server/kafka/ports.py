"""A client port by itself: no engine of replicas behind it, no links beside it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext

import trio

from raftmq.runtime.loop import LoopBudget
from raftmq.server.audit import Audit
from raftmq.server.kafka.connection import Begin
from raftmq.server.kafka.counts import ServerCounts
from raftmq.server.kafka.limits import Limits, RequestMemory
from raftmq.server.kafka.listener import ClientPort
from tests.server.auditing import NO_AUDIT


class NoReplicas:
    """An engine that has nothing to drain."""

    is_draining = False

    def after_round(self, call: Callable[[], None]) -> None:
        """There is never such a round."""

    def batch(self) -> AbstractContextManager[None]:
        """Nothing is to be done at its end."""
        return nullcontext()


def client_port(
    begin: Begin,
    limits: Limits,
    metrics: ServerCounts,
    *,
    pause: Callable[[float], Awaitable[None]] = trio.sleep,
    audit: Audit = NO_AUDIT,
) -> ClientPort:
    """A port with all that a node gives it."""
    return ClientPort(
        begin,
        limits,
        metrics,
        drains=NoReplicas(),
        memory=RequestMemory(limits.request_memory_bytes_max),
        budget=LoopBudget(),
        pause=pause,
        audit=audit,
    )
