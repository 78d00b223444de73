"""Readers of the metadata log: it is shown by a partition whose replica another machine owns."""

from __future__ import annotations

from attrs import define, field

from jepsen_like.cluster.options import ClusterOptions
from jepsen_like.cluster.run import quiet_logs
from jepsen_like.cluster.world import ClusterWorld
from raftmq.partition.partition import Partition
from raftmq.types import METADATA_TOPIC


@define(eq=False)
class Waiter:
    """Waits at a partition, and notes whether that was led here whenever it is woken."""

    partition: Partition
    was_led: list[bool] = field(factory=list)

    def woken(self) -> None:
        self.was_led.append(self.partition.is_leader)


def test_who_waits_at_the_metadata_log_is_woken_when_it_is_not_led_here_any_more() -> None:
    """Its old leader hears of no later command, which alone had woken anybody."""
    with quiet_logs():
        world = ClusterWorld(1, ClusterOptions(weights=()))
        world.start()
        world.run_until(2_000.0)
        cores = {int(node.node_id): node.core for node in world.nodes}
        (controller,) = (
            number
            for number, core in cores.items()
            if core is not None and core.metadata_replica is not None
            if core.metadata_replica.is_leader
        )
        core = cores[controller]
        assert core is not None
        log = core.partitions.registry.by_name(METADATA_TOPIC, 0)
        assert log is not None
        assert log.is_leader
        waiter = Waiter(log)
        log.fetches.park(waiter)
        for other in cores.keys() - {controller}:
            world.wires.cut(controller, other)
            world.wires.cut(other, controller)
        world.run_until(world.now_ms + 5_000.0)
        assert not log.is_leader
        assert waiter.was_led[-1:] == [False]
        world.close()


def test_readers_at_a_follower_are_woken_by_its_flush() -> None:
    """It shows what it has flushed: a flush that ends after the commit is news to who waits."""
    with quiet_logs():
        world = ClusterWorld(1, ClusterOptions(weights=()))
        world.start()
        world.run_until(2_000.0)
        core = next(
            node.core
            for node in world.nodes
            if node.core is not None
            and node.core.metadata_replica is not None
            and not node.core.metadata_replica.is_leader
        )
        log = core.partitions.registry.by_name(METADATA_TOPIC, 0)
        assert log is not None
        waiter = Waiter(log)
        log.fetches.park(waiter)
        assert core.metadata_replica is not None
        core.metadata_replica.machine.progressed()
        assert waiter.was_led == [False]
        core.metadata_replica.machine.progressed()
        assert waiter.was_led == [False], "nothing more was flushed"
        world.close()
