"""Pipelines: members of a group that read, write and commit what they read, in one transaction.

Each member has a transactional id of its own. It reads committed records of what it owns within the
transaction, writes others, and commits in its group how far it came, as the member that it was when
it read: who was left out of a rebalance meanwhile is refused. Some fall silent in the midst of it.
The next owner is told no offset while a transaction may change it, and goes on exactly there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jepsen_like.cluster.committed_fetch import fetch_committed
from jepsen_like.cluster.consumers import SILENCE_MAX, Member, Where, name_of
from jepsen_like.cluster.transactional import TOPIC, Positions, Running, TransactionalProducer
from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey

if TYPE_CHECKING:
    from jepsen_like.cluster.world import ClusterWorld


class PipeMember(Member):
    """One process of the pipeline."""

    def __init__(self, world: ClusterWorld, process: int, group: str, protocol: int) -> None:
        """It takes this process number and the next one."""
        super().__init__(world, process, group, [TOPIC])
        self._producer = PipeProducer(world, process + 1, f"pipe-{process}", protocol, self)

    async def _consume(self) -> None:
        """One transaction."""
        kafka, number = self.kafka, self._round
        if not await self._producer.ready():
            await kafka.pause()
            return
        how = await self._producer.transact(self._group)
        if how == "ok" and number == self._round:
            self.positions.update(self._producer.ends)
        elif how == "info":
            self._lose_assignment()  # the group knows how far it came
        await kafka.think(*self.world.options.think_ms)

    async def read(self, running: Running) -> Positions | None:
        """Poll some of what this member owns; what is to be committed for it, if anything."""
        kafka, number = self.kafka, self._round
        fields = {
            "generation_id": self._generation,
            "member_id": self._member_id,
            "group_instance_id": self._instance_id,
        }
        owned = dict(self.positions)
        for where in kafka.random.sample(sorted(owned), min(len(owned), 2)):
            operation = self.world.recorder.invoke(
                self.process,
                "poll_committed",
                group=self._group,
                offsets={name_of(where): owned[where]},
                transaction=running.operation.op,
            )
            found = await fetch_committed(kafka, operation, *where, owned[where])
            if found.code == ErrorCode.OFFSET_OUT_OF_RANGE:
                offset = await self.earliest(where)
                if number == self._round:
                    self.positions[where] = offset
            elif found.end > owned[where]:
                running.ends[where] = found.end
        if kafka.random.random() < 0.02 and not self.world.is_healed:
            await self._stall()
        return Positions(self._group, dict(running.ends), fields) if running.ends else None

    async def _stall(self) -> None:
        self._is_stalled = True
        session_ms = self.world.options.session_ms
        await self.kafka.sleep(self.kafka.random.uniform(0.8, SILENCE_MAX) * session_ms)
        self._is_stalled = False

    async def _commit(self) -> None:
        """Only transactions do."""

    async def _committed(self, owned: list[Where]) -> dict[Where, int] | None:
        """Ask until no transaction is under way there; what is committed, if this member still
        owns it."""
        number = self._round
        topics = [{"name": TOPIC, "partition_indexes": [index for _, index in owned]}]
        while number == self._round:
            answer = await self._ask(
                ApiKey.OFFSET_FETCH,
                group_id=self._group,
                topics=topics if owned else [],
                require_stable=True,
            )
            if answer is None or not self._heard(answer.error_code):
                return None
            rows = [row for topic in answer.topics for row in topic.partitions]
            codes = {row.error_code for row in rows if row.error_code}
            if not codes:
                return {(TOPIC, row.partition_index): row.committed_offset for row in rows}
            if codes == {ErrorCode.UNSTABLE_OFFSET_COMMIT}:
                self.world.had_effect("the next owner waited for a transaction")
                await self.kafka.pause()
            elif not all(self._heard(code) for code in codes):
                return None
        return None


class PipeProducer(TransactionalProducer):
    """The transactions of one member."""

    def __init__(
        self,
        world: ClusterWorld,
        process: int,
        transactional_id: str,
        protocol: int,
        member: PipeMember,
    ) -> None:
        super().__init__(world, process, transactional_id, protocol)
        self._member = member
        self.ends: dict[Where, int] = {}
        """How far the last transaction read."""

    async def _within(self, running: Running) -> None:
        running.positions = await self._member.read(running)
        self.ends = running.ends
