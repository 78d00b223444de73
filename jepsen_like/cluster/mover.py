"""Partitions are moved from node to node, and often back to where they were a moment ago.

The order is the command that `raftmq node replace` gives for each partition, to the controller of
the moment; whoever is down, late or cut off learns of it when it can.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from raftmq.metadata.commands import PlanMoves, PlannedMove, ReassignPartition
from raftmq.metadata.image import all_partitions
from raftmq.types import METADATA_GROUP, NodeId, TopicId

if TYPE_CHECKING:
    from jepsen_like.cluster.world import ClusterWorld


class Mover:
    """An operator who moves one replica of a partition at a time, and thinks better of some."""

    def __init__(self, world: ClusterWorld) -> None:
        self._world = world
        self._left: dict[tuple[TopicId, int], NodeId] = {}
        """The node that each partition left last."""

    def move(self, random: Random) -> None:
        """Order one replica elsewhere, if there is a controller to tell."""
        world = self._world
        controllers = world.watch.leaders(METADATA_GROUP)[:1]
        if not controllers or controllers[0].core is None:
            return
        engine = controllers[0].core.engine
        rows = [
            (topic.topic_id, partition)
            for topic, partition in all_partitions(engine.image)
            if len(partition.replicas) > 1
        ]
        if not rows:
            return
        topic_id, partition = random.choice(rows)
        key = (topic_id, partition.index)
        others = [n.node_id for n in world.present if n.node_id not in partition.replicas]
        if not others:
            return
        back = self._left.get(key)
        arriving = back if back in others and random.random() < 0.7 else random.choice(others)
        assert arriving is not None
        leaving = random.choice(partition.replicas)
        replicas = tuple(arriving if n == leaving else n for n in partition.replicas)
        command: ReassignPartition | PlanMoves = ReassignPartition(
            topic_id=topic_id, partition=partition.index, replicas=replicas
        )
        if partition.moving_from and random.random() < 0.4:
            command = PlanMoves(
                moves=(
                    PlannedMove(
                        topic_id=topic_id,
                        partition=partition.index,
                        creation_epoch=partition.creation_epoch,
                    ),
                )
            )
            world.note("cancel", str(topic_id), partition.index)
        else:
            world.note("move", str(topic_id), partition.index, leaving, arriving)
            self._left[key] = leaving
        world.counts.moves += 1
        controllers[0].run(lambda: engine.propose(command, may_resend=False))
