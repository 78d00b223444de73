"""Giving preferred leaders their partitions back, slowly: what the controller does about imbalance.

Leaderships pile up on the brokers that stayed while others were away. Owns how long things have
been quiet; never moves anything itself. Pure but for what it remembers of earlier calls.

Invariants: a leadership is moved only after both it and the preferred broker have been stable for a
while (a broker that hands over in order to leave gets nothing back meanwhile), only to a replica in
the reported ISR whose broker is fit to lead, a few at a time, and the same one not again before a
cool-down. A leadership that was lost again soon after it was moved waits twice as long each time:
whatever made the broker lose it may go on, and each move interrupts producers.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

from attrs import define, frozen

from raftmq.controller.leader_table import LeaderRow, LeaderTable
from raftmq.metadata.image import MetadataImage
from raftmq.types import NodeId, TopicId

QUIET_MS: Final = 3_000.0
COOL_DOWN_MS: Final = 8_000.0
COOL_DOWN_MAX_MS: Final = 300_000.0
LOST_SOON_MS: Final = 60_000.0
"""A leadership that was kept for so long after its move did come back."""
MOVES_MAX: Final = 50

Key = tuple[TopicId, int]


@frozen(slots=True)
class Move:
    """Ask the leader of a partition to hand over to `to`."""

    topic_id: TopicId
    partition: int
    to: NodeId


@define(slots=True)
class _Moved:
    """What came of the last move of a partition."""

    to: NodeId
    at_ms: float
    leader_epoch: int
    """The one that was asked to end: a later one under another leader is a move that was undone."""
    cool_down_ms: float
    until_ms: float
    """Not again before."""
    is_lost: bool = False

    def see_undone(self, now_ms: float) -> None:
        """The partition is led by another one again, since just now."""
        self.is_lost = True
        if now_ms - self.at_ms < LOST_SOON_MS:
            self.cool_down_ms = min(2 * self.cool_down_ms, COOL_DOWN_MAX_MS)
            self.until_ms = now_ms + self.cool_down_ms
        else:
            self.cool_down_ms = COOL_DOWN_MS


class LeaderBalance:
    """The memory of one controller's term of office."""

    def __init__(self) -> None:
        self._live_since: dict[NodeId, tuple[int, float]] = {}
        self._led_since: dict[Key, tuple[int, float]] = {}
        self._moved: dict[Key, _Moved] = {}
        self._balanced = (-1, -1)  # versions of image and leaders when all was as it should be

    def due(
        self,
        image: MetadataImage,
        leaders: LeaderTable,
        now_ms: float,
        *,
        unfit: Set[NodeId] = frozenset(),
    ) -> list[Move]:
        """The moves to make now; `unfit` brokers are given nothing."""
        seen = image.structure_version, leaders.version
        if seen == self._balanced:
            return []  # a thousand partitions at rest cost nothing here
        self._balanced = seen
        live = {b.node_id: b.epoch for b in image.live_brokers() if b.node_id not in unfit}
        self._live_since = {
            node_id: self._live_since[node_id]
            if self._live_since.get(node_id, (-1, 0.0))[0] == epoch
            else (epoch, now_ms)
            for node_id, epoch in live.items()
        }
        moves: list[Move] = []
        led_since: dict[Key, tuple[int, float]] = {}
        for topic in image.topics_by_id():
            for partition in topic.partitions:
                row = leaders.get(topic.topic_id, partition.index)
                if row is None:
                    continue
                key = row.key
                known = self._led_since.get(key)
                if known is None or known[0] != row.leader_epoch:
                    known = (row.leader_epoch, now_ms)
                led_since[key] = known
                wish = partition.preferred_leader
                if row.leader_id == wish:
                    continue
                self._balanced = (-1, -1)
                moved = self._last_move(row, wish, now_ms)
                is_due = (
                    wish in row.isr
                    and wish in live
                    and now_ms - known[1] >= QUIET_MS
                    and now_ms - self._live_since[wish][1] >= QUIET_MS
                    and (moved is None or now_ms >= moved.until_ms)
                )
                if is_due and len(moves) < MOVES_MAX:
                    cool_down_ms = COOL_DOWN_MS if moved is None else moved.cool_down_ms
                    until_ms = now_ms + COOL_DOWN_MS
                    self._moved[key] = _Moved(
                        wish, now_ms, row.leader_epoch, cool_down_ms, until_ms
                    )
                    moves.append(Move(*key, wish))
        self._led_since = led_since
        self._moved = {
            k: moved for k, moved in self._moved.items() if now_ms - moved.until_ms < LOST_SOON_MS
        }
        return moves

    def _last_move(self, row: LeaderRow, wish: NodeId, now_ms: float) -> _Moved | None:
        """What is remembered of a partition that its preferred leader does not lead."""
        moved = self._moved.get(row.key)
        if moved is None or moved.to != wish:
            return None
        if not moved.is_lost and row.leader_epoch != moved.leader_epoch:
            moved.see_undone(now_ms)
        return moved
