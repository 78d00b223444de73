"""Giving preferred leaders their partitions back, slowly: what the controller does about imbalance.

Leaderships pile up on the brokers that stayed while others were away. Owns how long things have
been quiet; never moves anything itself. Pure but for what it remembers of earlier calls.

Invariants: a leadership is moved only after both it and the preferred broker have been stable for a
while (a broker that hands over in order to leave gets nothing back meanwhile), only to a replica in
the reported ISR, a few at a time, and the same one not again before a cool-down.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen

from raftmq.cluster.leader_table import LeaderTable
from raftmq.cluster.metadata_image import MetadataImage
from raftmq.types import NodeId, TopicId

QUIET_MS: Final = 3_000.0
COOL_DOWN_MS: Final = 8_000.0
MOVES_MAX: Final = 50

Key = tuple[TopicId, int]


@frozen(slots=True)
class Move:
    """Ask the leader of a partition to hand over to `to`."""

    topic_id: TopicId
    partition: int
    to: NodeId


class LeaderBalance:
    """The memory of one controller's term of office."""

    def __init__(self) -> None:
        self._live_since: dict[NodeId, tuple[int, float]] = {}
        self._led_since: dict[Key, tuple[int, float]] = {}
        self._moved: dict[Key, float] = {}
        self._balanced = (-1, -1)  # versions of image and leaders when all was as it should be

    def due(self, image: MetadataImage, leaders: LeaderTable, now_ms: float) -> list[Move]:
        """The moves to make now."""
        seen = image.structure_version, leaders.version
        if seen == self._balanced:
            return []  # a thousand partitions at rest cost nothing here
        self._balanced = seen
        live = {broker.node_id: broker.epoch for broker in image.live_brokers()}
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
                is_due = (
                    wish in row.isr
                    and wish in live
                    and now_ms - known[1] >= QUIET_MS
                    and now_ms - self._live_since[wish][1] >= QUIET_MS
                    and now_ms - self._moved.get(key, -COOL_DOWN_MS) >= COOL_DOWN_MS
                )
                if is_due and len(moves) < MOVES_MAX:
                    self._moved[key] = now_ms
                    moves.append(Move(*key, wish))
        self._led_since = led_since
        self._moved = {k: at for k, at in self._moved.items() if now_ms - at < COOL_DOWN_MS}
        return moves
