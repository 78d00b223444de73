"""Who reads what transactions wrote: committed records as consumers see them, and their offsets.

A reader goes through each partition from its beginning to its end, once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jepsen_like.cluster.committed_fetch import READ_COMMITTED, fetch_committed
from jepsen_like.cluster.consumers import EARLIEST
from jepsen_like.cluster.kafka import STALE_LEADER, Kafka, Lost
from jepsen_like.cluster.transactional import INPUT, PARTITIONS, TOPIC, group_of
from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey

if TYPE_CHECKING:
    from jepsen_like.cluster.world import ClusterWorld


class CommittedReader:
    """One process that reads committed records of all partitions that transactions write to."""

    def __init__(
        self,
        world: ClusterWorld,
        process: int,
        ids: list[str],
        topic: str = TOPIC,
        width: int = PARTITIONS,
    ) -> None:
        self._world = world
        self._kafka = Kafka(world, process)
        self._process = process
        self._ids = ids
        self._topic = topic
        self._positions = dict.fromkeys(range(width), 0)
        self._is_at_end = dict.fromkeys(self._positions, False)

    async def run(self) -> None:
        """Read until everything is written, and everything was read."""
        world, kafka = self._world, self._kafka
        while not world.is_written:
            await self._once()
        # What was found at the end before may have been all that a leader knew then.
        self._is_at_end = dict.fromkeys(self._positions, False)
        while not all(self._is_at_end.values()):
            await self._once()
        for transactional_id in self._ids:
            while not await self._read_offset(transactional_id):
                await kafka.pause()
        kafka.hang_up()

    def _is_there(self, _partition: int) -> bool:
        """False where all was deleted, and nobody serves what was."""
        return True

    async def _once(self) -> None:
        random = self._kafka.random
        if random.random() < 0.15:
            await self._read_offset(random.choice(self._ids))
            return
        behind = [p for p, is_at_end in self._is_at_end.items() if not is_at_end]
        is_last = self._world.is_written
        await self._poll(random.choice(behind if is_last else list(self._positions)))

    async def _poll(self, partition: int) -> None:
        world, kafka = self._world, self._kafka
        if not self._is_there(partition):
            self._is_at_end[partition] = True
            await kafka.pause()
            return
        name, position = f"{self._topic}-{partition}", self._positions[partition]
        operation = world.recorder.invoke(self._process, "poll_committed", offsets={name: position})
        found = await fetch_committed(kafka, operation, self._topic, partition, position)
        if found.code == ErrorCode.NETWORK_EXCEPTION:
            await kafka.pause()
        elif found.code:
            await self._refused(partition, found.code)
        else:
            self._positions[partition] = found.end
            if found.is_at_end:
                self._is_at_end[partition] = True
            if found.end == position:
                await kafka.think(1.0, 20.0)

    async def _refused(self, partition: int, code: int) -> None:
        kafka = self._kafka
        if code != ErrorCode.OFFSET_OUT_OF_RANGE:
            assert code in STALE_LEADER, ErrorCode(code).name
            await kafka.pause()
            return
        row = {"partition_index": partition, "current_leader_epoch": -1, "timestamp": EARLIEST}
        try:
            answer = await kafka.ask(
                await kafka.leader(self._topic, partition),
                ApiKey.LIST_OFFSETS,
                replica_id=-1,
                isolation_level=READ_COMMITTED,
                topics=[{"name": self._topic, "partitions": [row]}],
            )
        except Lost:
            await kafka.pause()
            return
        part = answer.topics[0].partitions[0]
        if not part.error_code:
            self._positions[partition] = max(part.offset, self._positions[partition])

    async def _read_offset(self, transactional_id: str) -> bool:
        """What an id's group is told; False when it is told nothing."""
        group = group_of(transactional_id)
        world, kafka = self._world, self._kafka
        operation = world.recorder.invoke(
            self._process, "stable_offset", transactional_id=transactional_id, partitions=[INPUT]
        )
        topic, _, index = INPUT.partition("-")
        try:
            found = await kafka.ask(
                kafka.any_node(), ApiKey.FIND_COORDINATOR, key=group, key_type=0
            )
            if found.error_code:
                world.recorder.fail(operation, code=found.error_code)
                return False
            answer = await kafka.ask(
                found.node_id,
                ApiKey.OFFSET_FETCH,
                group_id=group,
                topics=[{"name": topic, "partition_indexes": [int(index)]}],
                require_stable=True,
            )
        except Lost:
            world.recorder.fail(operation)
            return False
        row = answer.topics[0].partitions[0] if answer.topics else None
        if answer.error_code or row is None or row.error_code:
            code = answer.error_code if row is None else row.error_code
            if code == ErrorCode.UNSTABLE_OFFSET_COMMIT:
                world.had_effect("an offset was unstable")
            world.recorder.fail(operation, code=code)
            return False
        world.recorder.ok(operation, offsets={INPUT: row.committed_offset})
        return True
