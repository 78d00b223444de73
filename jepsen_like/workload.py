"""Simulated clients: each appends a few records at a time to one group, and waits for the answer.

A client sends to whoever it believes leads, tries others after a refusal and gives up waiting after
a while, which leaves the outcome unknown. Every value is unique, so that each can be found again.
"""

from __future__ import annotations

from random import Random

from jepsen_like.history import Outcome
from jepsen_like.node import SimNode
from jepsen_like.world import World
from raftmq.errors import KafkaError
from raftmq.promise import Promise
from raftmq.records import NewRecord, build_batch, parse_header
from raftmq.types import RaftGroupId, RaftIndex

PATIENCE_MS = 600.0


class Client:
    """One sequential client of one group."""

    def __init__(self, world: World, number: int, group: RaftGroupId) -> None:
        self._world = world
        self._random = Random(f"client {world.seed} {number}")
        self._number = number
        self._group = group
        self._written = 0
        self.is_stopped = False

    def start(self) -> None:
        """Begin."""
        self._next()

    def _next(self) -> None:
        low, high = self._world.options.think_ms
        self._world.schedule(self._random.uniform(low, high), self._act)

    def _act(self) -> None:
        if self.is_stopped:
            return
        nodes = self._world.leaders(self._group)
        if not nodes or self._world.now_ms < self._world.siesta_until_ms:
            self._next()
            return
        # Mostly the newest leader; sometimes one that may have been deposed without knowing.
        node = nodes[0] if self._random.random() < 0.7 else self._random.choice(nodes)
        if self._random.random() < 0.1:
            self._barrier(node)
        self._append(node)

    def _append(self, node: SimNode) -> None:
        world, options = self._world, self._world.options
        values = tuple(self._value() for _ in range(self._random.randint(1, options.records_max)))
        operation = world.history.invoke(self._group, values, world.now_ms)
        batch = build_batch([NewRecord(None, value) for value in values])
        outcome: list[int] = []

        def append() -> None:
            replica = node.leads(self._group)
            if replica is None:
                return
            try:
                operation.offset = replica.append(batch, parse_header(batch))
            except KafkaError:
                return
            outcome.append(operation.offset)
            machine = node.machines[self._group]
            world.park(operation, machine, operation.offset + len(values), replica.leader_epoch)

        incarnation = node.incarnation
        node.run(append)
        if not outcome:
            is_certain = node.incarnation == incarnation
            world.history.end(operation, Outcome.FAIL if is_certain else Outcome.INFO, world.now_ms)
            self._next()
            return
        # Some clients pipeline: they do not wait for the answer before they go on.
        if self._random.random() < 0.3 or operation.outcome is not Outcome.PENDING:
            self._next()
        else:
            operation.when_done = self._next
        world.schedule(
            PATIENCE_MS, lambda: world.history.end(operation, Outcome.INFO, world.now_ms)
        )

    def _value(self) -> bytes:
        self._written += 1
        name = b"%d-%d-%d" % (self._world.seed, self._number, self._written)
        return name.ljust(self._random.randint(12, self._world.options.value_bytes_max), b".")

    def _barrier(self, node: SimNode) -> None:
        """A linearizable read must see all that was acknowledged before it was asked for."""
        world = self._world
        acked_end = world.invariants.truth(self._group).acked_end

        def check(promise: Promise[RaftIndex]) -> None:
            if promise.error is None:
                world.invariants.barrier(self._group, promise.result(), acked_end)

        def ask() -> None:
            replica = node.leads(self._group)
            if replica is not None:
                replica.read_barrier().when_done(check)

        node.run(ask)
