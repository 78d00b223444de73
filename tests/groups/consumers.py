"""Simulated consumers and faults around real coordinators, with a referee over the metadata log.

One seed decides everything. The referee applies every committed entry once, in order, and knows
what each generation's members own; whatever a consumer is told is compared with that.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from attrs import define, field

from raftmq.errors import ErrorCode, KafkaError
from raftmq.groups.coordinator import Coordinator
from raftmq.groups.model import GroupConfig, JoinRequest, JoinResult, SyncResult
from raftmq.metadata.commands import (
    CommitMany,
    CommitOffsets,
    CommittedOffset,
    Generation,
)
from raftmq.metadata.results import Rejection
from raftmq.promise import Promise
from raftmq.types import NodeId, TopicPartition
from tests.groups.world import Fencing, Image, Nodes, Proposal

GROUP = "g"
PARTITIONS = 6
SESSION_MS = 6_000
REQUEST_TIMEOUT_MS = 15_000

ELSEWHERE = (ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE)


class Referee:
    """What the log says, entry by entry."""

    def __init__(self) -> None:
        self.image = Image()
        self.seen = 0
        self.generations: dict[int, dict[str, bytes]] = {}
        self.current = 0
        self.positions: dict[TopicPartition, int] = {}

    def follow(self, entries: list[Fencing | Proposal]) -> None:
        for entry in entries[self.seen :]:
            self.seen += 1
            result = self.image.apply(entry)
            if isinstance(entry, Fencing) or isinstance(result, Rejection):
                continue
            if isinstance(entry.command, Generation):
                self._generation(entry.command)
            elif isinstance(entry.command, CommitOffsets):
                self._commit(entry.command)
            elif isinstance(entry.command, CommitMany):
                for commit, code in zip(entry.command.commits, result.codes, strict=True):
                    if code == ErrorCode.NONE:
                        self._commit(commit)

    def _generation(self, command: Generation) -> None:
        assert command.generation > self.current, "generations only rise"
        self.current = command.generation
        owned = {m.member_id: m.assignment for m in command.members}
        partitions = [p for assignment in owned.values() for p in assignment]
        assert len(set(partitions)) == len(partitions), "a partition has one owner"
        self.generations[command.generation] = owned

    def _commit(self, command: CommitOffsets) -> None:
        assert command.generation == self.current, "only the live generation commits"
        owned = self.generations[command.generation][command.member_id]
        for entry in command.offsets:
            assert entry.partition in owned, "only its owner commits a partition"
            at = TopicPartition(entry.topic, entry.partition)
            assert entry.offset >= self.positions.get(at, 0), f"{at} went back"
            self.positions[at] = entry.offset

    def told(self, generation: int, member_id: str, assignment: bytes) -> None:
        """A consumer learned what it owns."""
        assert generation in self.generations, "told before it was agreed"
        assert self.generations[generation].get(member_id) == assignment


@define(eq=False)
class Consumer:
    """An eager consumer of the classic protocol, as far as safety needs it."""

    name: str
    world: World
    member_id: str = ""
    generation: int = -1
    owned: bytes | None = None
    node: NodeId | None = None
    positions: dict[int, int] = field(factory=dict)
    next_heartbeat_ms: float = 0.0
    is_gone: bool = False
    _pending: Promise[Any] | None = None
    _on_result: Callable[[Any], None] | None = None
    _incarnation: int = 0
    _give_up_ms: float = 0.0
    _rest_until_ms: float = 0.0

    def step(self) -> None:
        now_ms = self.world.now_ms
        if self._pending is not None:
            if self.node is None or self.world.incarnations[self.node] != self._incarnation:
                self._lost()
            elif self._pending.is_done:
                promise, self._pending = self._pending, None
                assert self._on_result is not None
                self._on_result(promise.result())
            elif now_ms >= self._give_up_ms:
                self._lost()
            return
        if self.is_gone or now_ms < self._rest_until_ms:
            return
        if self.node is None:
            self.node = self.world.random.choice(self.world.coordinators()).find(GROUP)
            if self.node is None:
                self._rest(200)
            return
        if self.owned is None:
            self._join()
        elif now_ms >= self.next_heartbeat_ms:
            self.next_heartbeat_ms = now_ms + SESSION_MS / 3
            self._ask(
                self._home().heartbeat(GROUP, self.generation, self.member_id, None), self._heard
            )
        elif self.world.random.random() < 0.2 and self.owned:
            self._commit()

    def _home(self) -> Coordinator:
        assert self.node is not None
        return self.world.nodes.coordinators[self.node]

    def _ask(self, promise: Promise[Any], then: Callable[[Any], None]) -> None:
        assert self.node is not None
        self._pending, self._on_result = promise, then
        self._incarnation = self.world.incarnations[self.node]
        self._give_up_ms = self.world.now_ms + REQUEST_TIMEOUT_MS

    def _lost(self) -> None:
        self._pending = None
        self.node = None
        self._rest(100)

    def _rest(self, ms: float) -> None:
        self._rest_until_ms = self.world.now_ms + ms

    def _failed(self, error: ErrorCode) -> None:
        if error in ELSEWHERE:
            self.node = None
            self._rest(100)
            return
        self.owned = None  # revoked before it joins again
        if error in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_INSTANCE_ID):
            self.member_id = ""

    def _join(self) -> None:
        self._ask(
            self._home().join(
                GROUP,
                JoinRequest(
                    self.member_id,
                    client_id=self.name,
                    session_timeout_ms=SESSION_MS,
                    rebalance_timeout_ms=10_000,
                    protocols=(("range", b""),),
                    requires_member_id=True,
                ),
            ),
            self._joined,
        )

    def _joined(self, result: JoinResult) -> None:
        if result.error is ErrorCode.MEMBER_ID_REQUIRED:
            self.member_id = result.member_id
            return
        if result.error is not ErrorCode.NONE:
            self._failed(result.error)
            return
        self.member_id, self.generation = result.member_id, result.generation
        assignments: list[tuple[str, bytes]] = []
        if result.leader == self.member_id:
            members = [m.member_id for m in result.members]
            for i, member_id in enumerate(members):
                assignments.append((member_id, bytes(range(i, PARTITIONS, len(members)))))
        self._ask(
            self._home().sync(GROUP, self.generation, self.member_id, None, assignments),
            self._synced,
        )

    def _synced(self, result: SyncResult) -> None:
        if result.error is not ErrorCode.NONE:
            self._failed(result.error)
            return
        self.world.referee.told(self.generation, self.member_id, result.assignment)
        assignment = result.assignment
        self._ask(
            self._home().fetch_offsets(GROUP), lambda fetched: self._fetched(assignment, fetched)
        )

    def _fetched(self, assignment: bytes, fetched: Any) -> None:
        if fetched.error is not ErrorCode.NONE:
            self._failed(fetched.error)
            return
        self.owned = assignment
        self.next_heartbeat_ms = self.world.now_ms
        self.positions = {}
        for partition in assignment:
            saved = fetched.offsets.get(TopicPartition("t", partition))
            self.positions[partition] = 0 if saved is None else saved.offset

    def _heard(self, error: ErrorCode) -> None:
        if error is not ErrorCode.NONE:
            self._failed(error)

    def _commit(self) -> None:
        for partition in self.positions:
            self.positions[partition] += self.world.random.randrange(5)
        offsets = [CommittedOffset("t", p, o) for p, o in self.positions.items()]
        promise = self._home().commit(GROUP, self.generation, self.member_id, None, offsets)
        self._ask(promise, self._committed)

    def _committed(self, codes: tuple[ErrorCode, ...]) -> None:
        if codes[0] is ErrorCode.NONE:
            self.world.acknowledged += 1
            for partition, position in self.positions.items():
                at = TopicPartition("t", partition)
                assert self.world.referee.positions[at] >= position, "acknowledged, not applied"
        else:
            self._failed(codes[0])


class World:
    """Three coordinators, a few consumers, and trouble."""

    def __init__(self, seed: int, consumers: int = 4) -> None:
        self.random = random.Random(seed)
        config = GroupConfig(initial_rebalance_delay_ms=200)
        self.nodes = Nodes(1, 2, 3, is_prompt=False, config=config)
        self.referee = Referee()
        self.incarnations = dict.fromkeys(self.nodes.coordinators, 0)
        self.consumers = [Consumer(f"c{i}", self) for i in range(consumers)]
        self.acknowledged = 0
        self.faults = 0
        self._broker_epoch = 1_000

    @property
    def now_ms(self) -> float:
        return self.nodes.clock.now_ms

    def coordinators(self) -> list[Coordinator]:
        return list(self.nodes.coordinators.values())

    def run(self, steps: int, trouble: float) -> None:
        for _ in range(steps):
            if self.random.random() < trouble:
                self.faults += 1
                self.random.choice(self.TROUBLES)(self)
            self._advance_metadata(trouble)
            self.nodes.pass_time(self.random.choice((10, 50, 50, 100)))
            for consumer in self.consumers:
                consumer.step()

    def _advance_metadata(self, trouble: float) -> None:
        log = self.nodes.log
        for node_id, engine in log.engines.items():
            if engine.is_cut_off:
                continue
            mine = [p for p in log.in_flight if p.node_id == node_id]
            for proposal in mine[: self.random.randrange(3)]:
                if self.random.random() < trouble:
                    if self.random.random() < 0.5:
                        log.lose(proposal)  # never applied
                        continue
                    self._disown(proposal)  # applied, but its submitter is told "unknown"
                log.commit(proposal)
        self.referee.follow(log.entries)
        for engine in log.engines.values():
            for _ in range(self.random.randrange(4)):
                if not engine.is_cut_off:
                    engine.apply_next()

    def _disown(self, proposal: Proposal) -> None:
        if not proposal.promise.is_done:
            proposal.promise.fail(KafkaError(code=ErrorCode.REQUEST_TIMED_OUT))

    def _a_node(self) -> NodeId:
        return self.random.choice(sorted(self.nodes.coordinators))

    def _cut_off(self) -> None:
        engine = self.nodes.log.engines[self._a_node()]
        engine.is_cut_off = not engine.is_cut_off
        if engine.is_cut_off:
            engine.fail_barriers()

    def _fence(self) -> None:
        self.nodes.log.fence(self._a_node())

    def _unfence(self) -> None:
        node_id = self._a_node()
        if self.referee.image.live_epoch(node_id) is None:
            self._broker_epoch += 1
            self.nodes.log.fence(node_id, self._broker_epoch)

    def _crash(self) -> None:
        node_id = self._a_node()
        engine = self.nodes.log.engines[node_id]
        # What it had sent may be on its way still; who waited for it is gone.
        self.incarnations[node_id] += 1
        for proposal in self.nodes.log.in_flight:
            if proposal.node_id == node_id and not proposal.promise.is_done:
                proposal.promise = Promise()
        engine._barriers = []
        self.nodes.coordinators[node_id] = Coordinator(
            node_id,
            engine,
            self.nodes.clock,
            self.nodes.config,
            random=random.Random(self.random.random()),
            retention_now_ms=self.nodes.clock.wall_ms,
            latest_now_ms=self.nodes.clock.wall_ms,
            deadlines=self.nodes.deadlines,
        )
        self._broker_epoch += 1
        self.nodes.log.fence(node_id, self._broker_epoch)

    def _vanish(self) -> None:
        consumer = self.random.choice(self.consumers)
        consumer.is_gone = not consumer.is_gone
        if consumer.is_gone and consumer.node is not None and self.random.random() < 0.5:
            leaver = self.nodes.coordinators[consumer.node]
            leaver.leave(GROUP, [(consumer.member_id, None)])

    def _pause(self) -> None:
        self.nodes.clock.now_ms += self.random.randrange(8_000)

    TROUBLES = (_cut_off, _fence, _unfence, _unfence, _crash, _vanish, _vanish, _vanish, _pause)

    def heal(self) -> None:
        log = self.nodes.log
        for node_id, engine in log.engines.items():
            engine.is_cut_off = False
            if self.referee.image.live_epoch(node_id) is None:
                self._broker_epoch += 1
                log.fence(node_id, self._broker_epoch)
        for consumer in self.consumers:
            consumer.is_gone = False

    def is_converged(self) -> bool:
        """Every consumer is in the last generation and every partition has its owner."""
        owned = sorted(p for c in self.consumers for p in c.owned or b"")
        in_last = all(c.generation == self.referee.current for c in self.consumers)
        return in_last and owned == list(range(PARTITIONS))
