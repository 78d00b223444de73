"""Committed offsets as registers: written and read by processes that are members of no group.

They ask whom they were told coordinates the group, and now and then any node: one that has ceased
to coordinate must say so, not answer from what it remembers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from jepsen_like.cluster.kafka import Kafka, Lost, NotSent
from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey

if TYPE_CHECKING:
    from jepsen_like.cluster.world import ClusterWorld

TOPIC: Final = "t0"
VALUES: Final = 100_000
_NOT_DONE: Final = frozenset(
    {
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.UNKNOWN_MEMBER_ID,
    }
)


class RegisterClient:
    """One process that commits and reads one register."""

    def __init__(self, world: ClusterWorld, process: int, group: str) -> None:
        self._world = world
        self._kafka = Kafka(world, process)
        self._process = process
        self._group = group
        self._coordinator: int | None = None

    async def run(self) -> None:
        """Go on until the world is quiet."""
        kafka = self._kafka
        while not self._world.is_quiet:
            if kafka.random.random() < 0.5:
                await self._write()
            else:
                await self._read()
            await kafka.think(10.0, 120.0)
        kafka.hang_up()

    async def _ask(self, api: ApiKey, **fields: Any) -> Any:
        kafka = self._kafka
        if kafka.random.random() < 0.2:
            return await kafka.ask(kafka.any_node(), api, **fields)
        if self._coordinator is None:
            found = await kafka.ask(
                kafka.any_node(), ApiKey.FIND_COORDINATOR, key=self._group, key_type=0
            )
            if found.error_code:
                raise NotSent("nobody coordinates the group")
            self._coordinator = found.node_id
        return await kafka.ask(self._coordinator, api, **fields)

    async def _write(self) -> None:
        world = self._world
        value = self._kafka.random.randrange(VALUES)
        operation = world.recorder.invoke(
            self._process, "commit", group=self._group, offsets={f"{TOPIC}-0": value}
        )
        row = {
            "partition_index": 0,
            "committed_offset": value,
            "committed_leader_epoch": -1,
            "committed_metadata": "",
        }
        try:
            answer = await self._ask(
                ApiKey.OFFSET_COMMIT,
                group_id=self._group,
                generation_id_or_member_epoch=-1,
                member_id="",
                group_instance_id=None,
                topics=[{"name": TOPIC, "partitions": [row]}],
            )
        except NotSent:
            self._coordinator = None
            world.recorder.fail(operation)
            return
        except Lost:
            self._coordinator = None
            world.recorder.info(operation)
            return
        code = answer.topics[0].partitions[0].error_code
        if code == ErrorCode.NONE:
            world.counts.acked += 1
            world.note("wrote", operation.op, value)
            world.recorder.ok(operation)
            return
        self._coordinator = None
        told = world.recorder.fail if code in _NOT_DONE else world.recorder.info
        told(operation, code=code)

    async def _read(self) -> None:
        world = self._world
        operation = world.recorder.invoke(
            self._process, "committed", group=self._group, partitions=[f"{TOPIC}-0"]
        )
        try:
            answer = await self._ask(
                ApiKey.OFFSET_FETCH,
                group_id=self._group,
                topics=[{"name": TOPIC, "partition_indexes": [0]}],
                require_stable=True,
            )
        except Lost:
            self._coordinator = None
            world.recorder.fail(operation)
            return
        row = answer.topics[0].partitions[0] if answer.topics else None
        if answer.error_code or row is None or row.error_code:
            self._coordinator = None
            world.recorder.fail(operation, code=answer.error_code)
            return
        world.counts.acked += 1
        world.note("read", operation.op, row.committed_offset)
        world.recorder.ok(operation, offsets={f"{TOPIC}-0": row.committed_offset})
