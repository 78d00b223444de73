"""Answers that wait a moment for an election under way.

When a leader's node goes away its clients ask other nodes at once for the new leader, some
milliseconds before it is elected. A client that is told the old leader once more waits for its own
timer (librdkafka: a second) before it asks again. So an answer about such a partition is parked
until the next leader is known, but no longer than `WAIT_MS`, and only that soon after the loss:
where no election can succeed, no answer is delayed. The same holds where this node itself has just
ceased to lead, or hands over: "not the leader" is said together with the new leader.

Answers of a connection leave in order, so those behind a parked one wait as well, also
acknowledgements of partitions to which nothing happened. Where hundreds of partitions elect one
after the other, that would be nearly always; so after a wait (`Hold`) no answer of the same
connection waits for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from raftmq.controller.leaders import Key, LeaderRow, LeaderTable
from raftmq.metadata.image import TopicImage
from raftmq.partition.parked import Deadlines
from raftmq.ports import Clock
from raftmq.promise import Promise
from raftmq.types import NodeId

WAIT_MS: Final = 1_000.0
LOOK_MS: Final = 20.0
"""How often a leadership that was to be handed over is looked at again: one that stays makes no
event."""
WAITING_MAX: Final = 10_000
REST_FACTOR: Final = 4.0
"""After a wait, no answer of the same connection waits for so many times its length."""


class Hold:
    """How long the answers of one connection waited lately, and until when none waits again."""

    __slots__ = ("free_at_ms",)

    def __init__(self) -> None:
        self.free_at_ms = 0.0
        """Before that time none waits again."""

    def ended(self, since_ms: float, now_ms: float) -> None:
        """An answer waited until now."""
        self.free_at_ms = max(self.free_at_ms, now_ms + REST_FACTOR * (now_ms - since_ms))


class LeaderWaits:
    """Which leaders were just lost, and which answers wait for the next ones."""

    def __init__(
        self,
        leaders: LeaderTable,
        deadlines: Deadlines,
        clock: Clock,
        *,
        has_ended: Callable[[NodeId], bool],
        has_left: Callable[[LeaderRow], bool],
    ) -> None:
        """`has_ended` says whether a node's connection is over, also before `node_lost` was called:
        the client that lost its leader is often quicker than this node's own loop. `has_left` says
        of a row that names this node whether it does not lead there, or is about to cease to."""
        self._has_ended = has_ended
        self._has_left = has_left
        self._leaders = leaders
        self._deadlines = deadlines
        self._clock = clock
        self._lost_at_ms: dict[NodeId, float] = {}
        self._waiting: dict[Promise[None], set[Key]] = {}
        self._unled_since_ms: dict[Key, float] = {}
        self._left_since_ms: dict[Key, float] = {}
        leaders.on_change(self._leader_changed)

    def node_lost(self, node_id: NodeId) -> None:
        """The connection to a node ended."""
        self._lost_at_ms[node_id] = self._clock.monotonic_ms()

    def node_connected(self, node_id: NodeId) -> None:
        """A node is reached again."""
        self._lost_at_ms.pop(node_id, None)

    def next_leaders(self, topics: Iterable[TopicImage], hold: Hold) -> Promise[None] | None:
        """Kept when partitions of these topics whose leader was just lost, or that never had one,
        have the next one, or when that takes too long; None when there is nothing to wait for.

        `hold` is of the connection that asks.
        """
        if len(self._waiting) >= WAITING_MAX:
            return None
        keys = [
            (topic.topic_id, partition.index) for topic in topics for partition in topic.partitions
        ]
        return self.next_leaders_of(keys, hold)

    def next_leaders_of(self, keys: Iterable[Key], hold: Hold) -> Promise[None] | None:
        """As `next_leaders`, for single partitions."""
        asked = list(keys)
        now_ms = self._clock.monotonic_ms()
        for node_id in self._leading(asked):
            if node_id not in self._lost_at_ms and self._has_ended(node_id):
                self._lost_at_ms[node_id] = now_ms
        recent = {n for n, at_ms in self._lost_at_ms.items() if now_ms - at_ms < WAIT_MS}
        missing = {}
        for key in asked:
            since_ms = self._missing_since(key, recent, now_ms)
            if since_ms is not None and now_ms - since_ms < WAIT_MS:
                missing[key] = since_ms
        if not missing or len(self._waiting) >= WAITING_MAX or now_ms < hold.free_at_ms:
            return None
        promise: Promise[None] = Promise()
        promise.when_done(lambda _: hold.ended(now_ms, self._clock.monotonic_ms()))
        self._waiting[promise] = set(missing)
        delay_ms = min(missing.values()) + WAIT_MS - now_ms
        self._deadlines.after(delay_ms, lambda: self._settle(promise))
        if any(key in self._left_since_ms for key in missing):
            self._deadlines.after(LOOK_MS, lambda: self._look_again(promise))
        return promise

    def _missing_since(self, key: Key, lost: set[NodeId], now_ms: float) -> float | None:
        """Since when a partition has no leader that can be reached; None when it has one."""
        row = self._leaders.get(*key)
        if row is None:  # a new partition: its first election is under way
            return self._unled_since_ms.setdefault(key, now_ms)
        if self._has_left(row):
            return self._left_since_ms.setdefault(key, now_ms)
        self._left_since_ms.pop(key, None)
        return self._lost_at_ms[row.leader_id] if row.leader_id in lost else None

    def _leading(self, keys: Iterable[Key]) -> list[NodeId]:
        rows = (self._leaders.get(*key) for key in keys)
        return sorted({row.leader_id for row in rows if row is not None})

    def _leader_changed(self, row: LeaderRow, _is_own: bool) -> None:
        self._unled_since_ms.pop(row.key, None)
        if self._has_left(row):
            return
        self._left_since_ms.pop(row.key, None)
        if not self._waiting or row.leader_id in self._lost_at_ms:
            return
        for promise, missing in list(self._waiting.items()):
            missing.discard(row.key)
            if not missing:
                self._settle(promise)

    def _look_again(self, promise: Promise[None]) -> None:
        """A leadership that was to be handed over may have stayed."""
        missing = self._waiting.get(promise)
        if missing is None:
            return
        for key in sorted(missing & self._left_since_ms.keys()):
            row = self._leaders.get(*key)
            if row is not None and not self._has_left(row):
                del self._left_since_ms[key]
                missing.discard(key)
        if missing:
            self._deadlines.after(LOOK_MS, lambda: self._look_again(promise))
        else:
            self._settle(promise)

    def _settle(self, promise: Promise[None]) -> None:
        if self._waiting.pop(promise, None) is not None:
            promise.resolve(None)
