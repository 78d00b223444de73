"""Producer ids that this broker may hand out.

They come in blocks from the metadata group, so that most InitProducerId need no round trip. A block
is never handed out twice, also not after a crash: what was left of it is lost.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, Protocol

from raftmq.metadata.commands import AllocateProducerIds, ProducerIds
from raftmq.promise import Promise
from raftmq.types import NodeId

BLOCK_SIZE: Final = 1000
TIMEOUT_MS: Final = 5_000


class BlockOwner(Protocol):
    """The node for which blocks are allocated."""

    node_id: NodeId
    engine: Any


class ProducerIdBlocks:
    """The producer ids that this broker may hand out."""

    def __init__(self, broker: BlockOwner) -> None:
        self._broker = broker
        self._next = 0
        self._end = 0
        self._is_asking = False
        self._waiting: deque[Promise[int]] = deque()

    def take(self) -> Promise[int]:
        """A producer id that nobody else has or will have."""
        if self._next < self._end and not self._waiting:
            self._next += 1
            return Promise.resolved(self._next - 1)
        promise: Promise[int] = Promise()
        self._waiting.append(promise)
        self._ask()
        return promise

    @property
    def waiting_count(self) -> int:
        """Producers that wait for a block."""
        return len(self._waiting)

    def _ask(self) -> None:
        if self._is_asking:
            return
        self._is_asking = True
        command = AllocateProducerIds(node_id=self._broker.node_id, count=BLOCK_SIZE)
        self._broker.engine.propose(command, timeout_ms=TIMEOUT_MS).when_done(self._answered)

    def _answered(self, promise: Promise[ProducerIds]) -> None:
        self._is_asking = False
        if promise.error is not None:
            waiting, self._waiting = self._waiting, deque()
            for one in waiting:
                one.fail(promise.error)
            return
        block = promise.result()
        # A block whose answer was lost is not used: the newest one is this broker's alone.
        self._next, self._end = block.start, block.end
        while self._waiting and self._next < self._end:
            self._next += 1
            self._waiting.popleft().resolve(self._next - 1)
        if self._waiting:
            self._ask()
