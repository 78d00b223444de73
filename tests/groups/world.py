"""A metadata engine made of plain lists, with the real commands applied by the real code.

One log of committed entries; each node applies it at its own pace. Proposals can be held, lost
before they are committed, or committed while their submitter is told that they failed.
"""

from __future__ import annotations

import random
from typing import Any

from attrs import define, field

from raftmq.errors import ErrorCode, KafkaError
from raftmq.groups.coordinator import Coordinator
from raftmq.groups.model import GroupConfig
from raftmq.metadata.apply_groups import apply_group
from raftmq.metadata.commands import GroupCommand
from raftmq.metadata.image import GroupsImage
from raftmq.metadata.results import Rejection
from raftmq.partition.parked import Deadlines
from raftmq.promise import Promise
from raftmq.types import NodeId, TopicId


@define
class FakeClock:
    """Monotonic and wall time, moved by hand."""

    now_ms: float = 0.0
    skew_ms: int = 1_700_000_000_000

    def monotonic_ms(self) -> float:
        return self.now_ms

    def wall_ms(self) -> int:
        return int(self.now_ms) + self.skew_ms


@define
class Fencing:
    """A broker's liveness changes at a place in the log: its new epoch, or None for fenced."""

    node_id: NodeId
    epoch: int | None


@define(eq=False)
class Proposal:
    node_id: NodeId
    command: GroupCommand
    promise: Promise[Any]


def _resolve(promise: Promise[Any], result: Any) -> None:
    """As the engine does: a rejection fails with its code. A promise that had failed already
    ("unknown") stays so, though the command was applied."""
    if promise.is_done:
        return
    if isinstance(result, Rejection):
        promise.fail(KafkaError(result.message, code=result.code))
    else:
        promise.resolve(result)


@define
class Image:
    groups: GroupsImage = field(factory=GroupsImage)
    live: dict[NodeId, int] = field(factory=dict)
    level: int = 1
    topics: dict[str, Any] = field(factory=dict)
    shunned: tuple[NodeId, ...] = ()
    views: dict[str, str] = field(factory=dict)

    def live_epoch(self, node_id: NodeId) -> int | None:
        return self.live.get(node_id)

    def sources(self) -> dict[str, str]:
        return self.views

    def committed_id(self, name: str) -> TopicId | None:
        topic = self.topics.get(name)
        return None if topic is None else topic.topic_id

    def coordinators(self) -> list[NodeId]:
        return [node_id for node_id in sorted(self.live) if node_id not in self.shunned]

    def apply(self, entry: Fencing | Proposal) -> Any:
        if isinstance(entry, Fencing):
            self.live.pop(entry.node_id, None)
            if entry.epoch is not None:
                self.live[entry.node_id] = entry.epoch
            return None
        self.groups, result = apply_group(self.groups, entry.command, self.live_epoch)
        return result


class Engine:
    """One node's view of the metadata log."""

    def __init__(self, log: MetadataLog, node_id: NodeId) -> None:
        self.image = Image()
        self.applied = 0
        self._log = log
        self._node_id = node_id
        self._barriers: list[tuple[int, Promise[None]]] = []
        self.is_cut_off = False

    def propose(self, command: Any, *, timeout_ms: float | None = None) -> Promise[Any]:
        promise: Promise[Any] = Promise()
        self._log.in_flight.append(Proposal(self._node_id, command, promise))
        self._log.settle_if_prompt()
        return promise

    def read_barrier(self, timeout_ms: float | None = None) -> Promise[None]:
        if self.is_cut_off:
            return Promise.failed(KafkaError(code=ErrorCode.REQUEST_TIMED_OUT))
        promise: Promise[None] = Promise()
        self._barriers.append((len(self._log.entries), promise))
        self._log.settle_if_prompt()
        return promise

    def apply_next(self) -> bool:
        """Apply one more entry; False when there is none."""
        self._keep_barriers()
        if self.applied == len(self._log.entries):
            return False
        entry = self._log.entries[self.applied]
        self.applied += 1
        result = self.image.apply(entry)
        if isinstance(entry, Proposal) and entry.node_id == self._node_id:
            _resolve(entry.promise, result)
        self._keep_barriers()
        return True

    def _keep_barriers(self) -> None:
        kept = [promise for end, promise in self._barriers if end <= self.applied]
        self._barriers = [b for b in self._barriers if b[0] > self.applied]
        for promise in kept:
            promise.resolve(None)

    def fail_barriers(self) -> None:
        failed, self._barriers = self._barriers, []
        for _end, promise in failed:
            promise.fail(KafkaError(code=ErrorCode.REQUEST_TIMED_OUT))


class MetadataLog:
    """The committed entries, and what is on its way to them."""

    def __init__(self, *node_ids: int, is_prompt: bool = True) -> None:
        self.entries: list[Fencing | Proposal] = []
        self.in_flight: list[Proposal] = []
        self.is_prompt = is_prompt
        self.engines = {NodeId(n): Engine(self, NodeId(n)) for n in node_ids}
        self._is_settling = False
        for node_id in self.engines:
            self.entries.append(Fencing(node_id, 100 + node_id))
        self.apply_all()

    def apply_all(self) -> None:
        for engine in self.engines.values():
            while not engine.is_cut_off and engine.apply_next():
                pass

    def commit(self, proposal: Proposal) -> None:
        self.in_flight.remove(proposal)
        self.entries.append(proposal)

    def lose(self, proposal: Proposal) -> None:
        self.in_flight.remove(proposal)
        if not proposal.promise.is_done:
            proposal.promise.fail(KafkaError(code=ErrorCode.REQUEST_TIMED_OUT))

    def fence(self, node_id: int, epoch: int | None = None) -> None:
        self.entries.append(Fencing(NodeId(node_id), epoch))

    def settle_if_prompt(self) -> None:
        if not self.is_prompt or self._is_settling:
            return
        self._is_settling = True
        try:
            while self.in_flight or any(
                e.applied < len(self.entries) for e in self.engines.values() if not e.is_cut_off
            ):
                while self.in_flight:
                    self.commit(self.in_flight[0])
                self.apply_all()
            self.apply_all()
        finally:
            self._is_settling = False


class Nodes:
    """Coordinators over one log, with one clock."""

    def __init__(
        self,
        *node_ids: int,
        is_prompt: bool = True,
        config: GroupConfig | None = None,
        has_deadlines: bool = False,
    ) -> None:
        self.clock = FakeClock()
        self.deadlines = Deadlines(self.clock) if has_deadlines else None
        self.log = MetadataLog(*node_ids, is_prompt=is_prompt)
        self.config = config or GroupConfig(initial_rebalance_delay_ms=0)
        self.coordinators = {
            node_id: Coordinator(
                node_id,
                engine,
                self.clock,
                self.config,
                random=random.Random(node_id),
                retention_now_ms=self.clock.wall_ms,
                latest_now_ms=self.clock.wall_ms,
                deadlines=self.deadlines,
            )
            for node_id, engine in self.log.engines.items()
        }

    def of(self, group: str) -> Coordinator:
        """The coordinator that every node names."""
        node_ids = [c.find(group) for c in self.coordinators.values()]
        assert node_ids[0] is not None
        return self.coordinators[node_ids[0]]

    def pass_time(self, ms: float, step_ms: float = 50.0) -> None:
        end_ms = self.clock.now_ms + ms
        while self.clock.now_ms < end_ms:
            self.pass_deadlines(min(end_ms, self.clock.now_ms + step_ms))
            for coordinator in self.coordinators.values():
                coordinator.tick(self.clock.now_ms)

    def pass_deadlines(self, until_ms: float) -> int:
        """Let time pass without a tick, deadline by deadline; how many came."""
        count = 0
        while self.deadlines is not None and (at_ms := self.deadlines.next_ms) is not None:
            if at_ms > until_ms:
                break
            self.clock.now_ms = max(self.clock.now_ms, at_ms)
            self.deadlines.expire(self.clock.now_ms)
            count += 1
            assert count < 10_000, "deadlines without end"
        self.clock.now_ms = until_ms
        return count


def got(promise: Promise[Any]) -> Any:
    """The value of a promise that must be kept by now."""
    assert promise.is_done, "still parked"
    return promise.result()
