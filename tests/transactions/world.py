"""One node's transactions, on the real state machine; commands are applied when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from attrs import evolve
from immutables import Map

from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.image import LEVEL_OF_TRANSACTIONS, RAFTMQ_LEVEL, MetadataImage
from raftmq.metadata.results import Rejection
from raftmq.partition.parked import Deadlines
from raftmq.partition.transactions import Decided
from raftmq.promise import Promise
from raftmq.transactions.coordinator import TransactionConfig, TransactionCoordinator
from raftmq.transactions.expiry import TransactionExpiry
from raftmq.transactions.leader import LeaderTransactions
from raftmq.transactions.rows import RowQueue
from raftmq.types import LeaderEpoch, NodeId, Offset, TopicId
from tests.groups.world import FakeClock
from tests.metadata.transaction_machine import Transactions


class Engine:
    """A metadata engine that a test drives."""

    def __init__(self) -> None:
        self.machine = Transactions()
        features = Map({RAFTMQ_LEVEL: LEVEL_OF_TRANSACTIONS})
        self.machine.image = evolve(self.machine.image, features=features)
        self.image: MetadataImage = self.machine.image
        self.is_leader = True
        self.is_prompt = True
        self.under_way: list[tuple[Any, Promise[Any]]] = []
        self.barriers: list[Promise[None]] = []
        self.controller_id: NodeId | None = None
        self._callbacks: list[Callable[[MetadataImage, MetadataImage], None]] = []
        self._batch_callbacks: list[Callable[[MetadataImage], None]] = []

    def on_batch(self, callback: Callable[[MetadataImage], None]) -> None:
        self._batch_callbacks.append(callback)

    def on_image(self, callback: Callable[[MetadataImage, MetadataImage], None]) -> None:
        self._callbacks.append(callback)

    def propose(self, command: Any, *, timeout_ms: float | None = None) -> Promise[Any]:
        promise: Promise[Any] = Promise()
        self.under_way.append((command, promise))
        if self.is_prompt:
            self.apply_all()
        return promise

    def begin_batch(self, after: MetadataImage) -> None:
        """A batch is about to enter the log that leaves this image."""
        for callback in self._batch_callbacks:
            callback(after)

    def read_barrier(self, timeout_ms: float | None = None) -> Promise[None]:
        promise: Promise[None] = Promise()
        self.barriers.append(promise)
        if self.is_prompt:
            self.keep_barriers()
        return promise

    def keep_barriers(self) -> None:
        self.show()
        kept, self.barriers = self.barriers, []
        for promise in kept:
            promise.resolve(None)

    def fail_barriers(self) -> None:
        failed, self.barriers = self.barriers, []
        for promise in failed:
            promise.fail(KafkaError(code=ErrorCode.REQUEST_TIMED_OUT))

    def show(self) -> None:
        """Let this node's image catch up with what other nodes did to the machine."""
        before, self.image = self.image, self.machine.image
        if before is not self.image:
            for callback in self._callbacks:
                callback(before, self.image)

    def apply_all(self) -> None:
        while self.under_way:
            command, promise = self.under_way.pop(0)
            result = self.machine.apply(command)
            self.show()
            if isinstance(result, Rejection):
                promise.fail(KafkaError(result.message, code=result.code))
            else:
                promise.resolve(result)

    def lose_all(self) -> None:
        """The outcome of what is under way stays unknown; nothing of it was applied."""
        lost, self.under_way = self.under_way, []
        for _, promise in lost:
            promise.fail(KafkaError(code=ErrorCode.REQUEST_TIMED_OUT))


class FakePartition:
    """A partition that writes ends when a test says so."""

    def __init__(self) -> None:
        self.is_leader = True
        self.leader_epoch = LeaderEpoch(1)
        self.ends: list[tuple[Decided, Promise[Offset]]] = []

    def end_transaction(self, decided: Decided) -> Promise[Offset]:
        promise: Promise[Offset] = Promise()
        self.ends.append((decided, promise))
        return promise

    def commit_all(self) -> None:
        ends, self.ends = self.ends, []
        for _, promise in ends:
            promise.resolve(Offset(1))

    def fail_all(self, code: ErrorCode) -> None:
        ends, self.ends = self.ends, []
        for _, promise in ends:
            promise.fail(KafkaError(code=code))


class World:
    """Everything that one node has for transactions."""

    def __init__(self, config: TransactionConfig | None = None) -> None:
        self.clock = FakeClock()
        self.deadlines = Deadlines(self.clock)
        self.engine = Engine()
        self.machine = self.engine.machine
        config = config or TransactionConfig()
        self.rows = RowQueue(self.engine, self.deadlines, self.clock.wall_ms, self.clock.wall_ms)
        self.coordinator = TransactionCoordinator(self.engine, self.rows, self.deadlines, config)
        self.partitions: dict[tuple[TopicId, int], FakePartition] = {}
        self.leader = LeaderTransactions(
            self.engine,
            self.rows,
            self.coordinator,
            self.deadlines,
            lambda topic_id, index: self.partitions.get((topic_id, index)),
            nullcontext,
        )
        self.expiry = TransactionExpiry(
            self.engine, self.rows, self.clock, config, self.clock.wall_ms
        )

    def run(self, milliseconds: float = 0.0) -> None:
        """Let time pass, and all that is due happen."""
        self.clock.now_ms += milliseconds
        for _ in range(20):
            self.deadlines.expire(self.clock.now_ms)

    def got(self, promise: Promise[Any]) -> Any:
        """What an answer says, once what is due has happened."""
        self.run()
        assert promise.is_done, "nobody has answered"
        return promise.result()
