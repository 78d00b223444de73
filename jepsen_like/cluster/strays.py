"""What comes between, beside and too late: all that transactions meet from their own producer.

Between two transactions the producer appends plain batches, under its credentials, and commits
offsets in its group without any transaction. Within one it reads, so that something flows from
transaction to transaction, and writes to a topic that others delete and make again. And after one
there come, too late: an EndTxn (by protocol 2; by protocol 1 nothing tells which transaction it is
meant for), and a batch that was given up before the transaction was aborted. Somebody else deletes
the group of one id now and then.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from jepsen_like.cluster.admins import ADMIN_TIMEOUT_MS, topic_row
from jepsen_like.cluster.committed_fetch import fetch_committed
from jepsen_like.cluster.kafka import Kafka, Lost, NotSent
from jepsen_like.cluster.transactional import (
    END_VERSIONS,
    FENCED,
    GIVE_UP_MS,
    INPUT,
    INPUT_AT,
    PARTITIONS,
    VOLATILE,
    Running,
    TransactionalProducer,
    group_of,
    rows_of,
)
from jepsen_like.history_events import Event, Value
from jepsen_like.invariants import InvariantViolation
from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey

if TYPE_CHECKING:
    from jepsen_like.cluster.world import ClusterWorld

PLAIN: Final = 0
"""In place of a protocol."""
LATE_END_MS: Final = (0.0, 300.0)
LATE_BATCH_MS: Final = (0.0, 600.0)
TRIES: Final = 10
"""Of a batch that comes too late, where such insist."""
_NOT_DONE: Final = frozenset(
    {
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.GROUP_ID_NOT_FOUND,
    }
)
"""Refusals that say that a group was left as it is."""
_MAY_BE_DONE: Final = (ErrorCode.REQUEST_TIMED_OUT, ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND)


class StrayProducer(TransactionalProducer):
    """A producer of transactions, and of what is none."""

    def __init__(
        self, world: ClusterWorld, process: int, transactional_id: str, protocol: int
    ) -> None:
        super().__init__(world, process, transactional_id, protocol)
        self._read_to = dict.fromkeys(range(PARTITIONS), 0)
        self._volatile_sequence = 0
        self._rest_ms = 0.0

    # ---- within ----

    async def _within(self, running: Running) -> None:
        random, options = self._kafka.random, self._world.options
        if random.random() < options.transaction_reads:
            for _ in range(random.choice((1, 2))):
                await self._read(running)
        if random.random() < options.transaction_volatile:
            await self._write_volatile()
            if running.positions is not None and random.random() < 0.5:
                running.positions.offsets[VOLATILE, 0] = running.positions.offsets[INPUT_AT]

    async def _read(self, running: Running) -> None:
        """Go on where this process has come to; what is read is part of the transaction."""
        if not self._read_to:
            return
        partition = self._kafka.random.choice(sorted(self._read_to))
        position = self._read_to[partition]
        operation = self._world.recorder.invoke(
            self._process,
            "poll_committed",
            offsets={f"{self._topic}-{partition}": position},
            transaction=running.operation.op,
        )
        found = await fetch_committed(self._kafka, operation, self._topic, partition, position)
        if found.code == ErrorCode.OFFSET_OUT_OF_RANGE:
            del self._read_to[partition]  # retention came first
        else:
            self._read_to[partition] = found.end

    async def _write_volatile(self) -> None:
        """Once; whatever comes of it."""
        if self._protocol == 1:
            try:
                await self._ask(
                    ApiKey.ADD_PARTITIONS_TO_TXN,
                    3,
                    v3_and_below_transactional_id=self._id,
                    v3_and_below_producer_id=self._producer_id,
                    v3_and_below_producer_epoch=self._epoch,
                    v3_and_below_topics=[{"name": VOLATILE, "partitions": [0]}],
                )
            except Lost:
                return
        values = [self._world.next_value()]
        code, _ = await self._produce(0, values, self._volatile_sequence, topic=VOLATILE)
        if code == ErrorCode.NONE:
            self._world.had_effect("a topic that goes is part of a transaction")
            self._volatile_sequence += 1
        else:
            self._kafka.leaders.pop((VOLATILE, 0), None)
            self._volatile_sequence = 0

    # ---- between ----

    async def _between(self) -> None:
        random = self._kafka.random
        rest_ms, self._rest_ms = self._rest_ms, 0.0
        if rest_ms and random.random() < 0.7:
            await self._kafka.sleep(rest_ms)  # nothing of the next one is there when it comes
        if self._must_init or random.random() >= self._world.options.transaction_plain:
            return
        if random.random() < 0.5:
            await self._append_plainly()
        else:
            await self._commit_plainly()

    def _plain(self, **what: Any) -> Event:
        return self._world.recorder.invoke(
            self._process,
            "transaction",
            transactional_id=self._id,
            producer=[self._producer_id, self._epoch],
            protocol=PLAIN,
            **what,
        )

    async def _append_plainly(self) -> None:
        world, random = self._world, self._kafka.random
        partition, began_ms = self._choose_partition(), world.now_ms
        values = [world.next_value() for _ in range(random.randint(1, world.options.records_max))]
        name = f"{self._topic}-{partition}"
        operation = self._plain(records={name: [(-1, value) for value in values]})
        sequence, is_lost = self._sequences.get(partition, 0), False
        while world.now_ms - began_ms <= GIVE_UP_MS:
            code, base = await self._produce(partition, values, sequence, is_plain=True)
            if code == ErrorCode.NONE:
                self._sequences[partition] = sequence + len(values)
                rows: list[tuple[int, Value]] = [
                    (base + i if base >= 0 else -1, value) for i, value in enumerate(values)
                ]
                world.had_effect("a plain batch between transactions")
                world.recorder.ok(operation, records={name: rows})
                return
            is_lost |= code in _MAY_BE_DONE
            if code in FENCED:
                break
            if code != ErrorCode.INVALID_TXN_STATE:  # the marker before is on its way
                self._judge(code)
            self._kafka.leaders.pop((self._topic, partition), None)
            await self._kafka.pause()
        self._must_init = True
        (world.recorder.info if is_lost else world.recorder.fail)(operation)

    async def _commit_plainly(self) -> None:
        world = self._world
        positions = self._positions(world.next_value())
        operation = self._plain(offsets={INPUT: positions.offsets[INPUT_AT]})
        try:
            answer = await self._ask_group(
                self._group,
                ApiKey.OFFSET_COMMIT,
                8,
                group_id=self._group,
                generation_id_or_member_epoch=-1,
                member_id="",
                group_instance_id=None,
                topics=rows_of(positions.offsets),
            )
        except NotSent:
            world.recorder.fail(operation)
            return
        except Lost:
            world.recorder.info(operation)
            return
        code = answer.topics[0].partitions[0].error_code
        if code == ErrorCode.NONE:
            world.had_effect("a plain commit between transactions")
            world.recorder.ok(operation)
            return
        self._group_coordinator = None
        is_certain = code in _NOT_DONE
        (world.recorder.fail if is_certain else world.recorder.info)(operation, code=code)

    # ---- too late ----

    def _is_over(self, running: Running, how: str) -> None:
        random = self._kafka.random
        if running.is_late or not running.is_told:
            return
        if random.random() >= self._world.options.transaction_strays:
            return
        producer_id, epoch = running.operation.producer
        if self._protocol == 2:
            delay_ms = random.uniform(*LATE_END_MS)
            late_end = partial(self._end_late, running, delay_ms)
            self._world.clients.spawn(late_end)
        if how == "fail":
            # Its sequence is used up for those credentials: nobody knows whether it was taken.
            self._must_init = True
            partitions = [random.choice([partition for partition, _ in running.batches])]
            delay_ms = self._rest_ms = random.uniform(*LATE_BATCH_MS)
            if self._world.options.strays_insist:
                partitions = sorted({partition for partition, _ in running.batches})
            for partition in partitions:
                sequence = running.sequences.get(partition, 0)
                late_batch = partial(
                    self._write_stray, (producer_id, epoch), partition, sequence, delay_ms
                )
                self._world.clients.spawn(late_batch)

    async def _end_late(self, running: Running, delay_ms: float) -> None:
        """The same EndTxn, once more."""
        await self._kafka.sleep(delay_ms)
        recorder = self._world.recorder
        operation = recorder.invoke(
            self._process,
            "end",
            transactional_id=self._id,
            transaction=running.operation.op,
            is_commit=running.is_commit,
        )
        producer_id, epoch = running.operation.producer
        try:
            answer = await self._ask(
                ApiKey.END_TXN,
                END_VERSIONS[self._protocol],
                transactional_id=self._id,
                producer_id=producer_id,
                producer_epoch=epoch,
                committed=running.is_commit,
            )
        except Lost:
            recorder.info(operation)
            return
        (recorder.fail if answer.error_code else recorder.ok)(operation, code=answer.error_code)
        self._world.had_effect("an end came late")

    async def _write_stray(
        self, credentials: tuple[int, int], partition: int, sequence: int, delay_ms: float
    ) -> None:
        """A batch of an aborted transaction that was on its way all the time."""
        await self._kafka.sleep(delay_ms)
        world = self._world
        value = world.next_value()
        operation = world.recorder.invoke(
            self._process,
            "transaction",
            transactional_id=self._id,
            producer=list(credentials),
            protocol=self._protocol,
            records={f"{self._topic}-{partition}": [(-1, value)]},
        )
        is_over = is_let_in = may_be_taken = False
        for number in range(TRIES if world.options.strays_insist else 1):
            if number:
                self._kafka.leaders.pop((self._topic, partition), None)
                await self._kafka.pause()
            if not may_be_taken:
                is_over = self._is_over_at(credentials[0], partition)
            code, _ = await self._produce(partition, [value], sequence, credentials=credentials)
            is_let_in = code == ErrorCode.NONE
            if is_let_in:
                break
            may_be_taken |= code in _MAY_BE_DONE
        world.had_effect("a stray batch was let in" if is_let_in else "a stray batch was refused")
        world.recorder.fail(operation, code=code)
        if is_let_in and is_over:
            told = f"{self._id} {credentials}: {value} was taken by {self._topic}-{partition}"
            raise InvariantViolation("StraysAreRefused", told)

    def _is_over_at(self, producer_id: int, partition: int) -> bool:
        """True once a partition has reported the end of what that producer wrote there, by the
        newest image that any node has: nothing of it can be taken from then on."""
        cores = [node.core for node in self._world.present if node.core is not None]
        if not cores:
            return False
        image = max((core.engine.image for core in cores), key=lambda image: image.version)
        topic, known = image.topics.get(self._topic), image.transactions.of_producer(producer_id)
        if topic is None or known is None:
            return False
        return (topic.topic_id, partition) not in known.partitions


class VolatileTopic:
    """Somebody who makes and deletes a topic that transactions write to."""

    def __init__(self, world: ClusterWorld, process: int) -> None:
        self._world = world
        self._kafka = Kafka(world, process)

    async def run(self) -> None:
        """Go on until the world is quiet."""
        kafka = self._kafka
        fields: dict[str, Any] = {"timeout_ms": 4_000.0, "timeout": ADMIN_TIMEOUT_MS}
        while not self._world.is_quiet:
            try:
                await kafka.ask(
                    kafka.any_node(),
                    ApiKey.CREATE_TOPICS,
                    topics=[topic_row(VOLATILE, 1)],
                    validate_only=False,
                    **fields,
                )
                await kafka.sleep(kafka.random.uniform(100.0, 900.0))
                await kafka.ask(
                    kafka.any_node(), ApiKey.DELETE_TOPICS, topic_names=[VOLATILE], **fields
                )
            except Lost:
                await kafka.pause()
            await kafka.sleep(kafka.random.uniform(10.0, 200.0))
        kafka.hang_up()


class GroupDeleter:
    """Somebody who deletes the group of a transactional id now and then."""

    def __init__(self, world: ClusterWorld, process: int, transactional_id: str) -> None:
        self._world = world
        self._kafka = Kafka(world, process)
        self._process = process
        self._id = transactional_id

    async def run(self) -> None:
        """Go on until the world is quiet."""
        while not self._world.is_quiet:
            await self._kafka.sleep(self._kafka.random.uniform(200.0, 1_200.0))
            await self._delete()
        self._kafka.hang_up()

    async def _delete(self) -> None:
        kafka, recorder, group = self._kafka, self._world.recorder, group_of(self._id)
        operation = recorder.invoke(self._process, "delete_group", transactional_id=self._id)
        try:
            found = await kafka.ask(
                kafka.any_node(), ApiKey.FIND_COORDINATOR, key=group, key_type=0
            )
        except Lost:
            recorder.fail(operation)
            return
        if found.error_code:
            recorder.fail(operation, code=found.error_code)
            return
        try:
            answer = await kafka.ask(found.node_id, ApiKey.DELETE_GROUPS, groups_names=[group])
        except NotSent:
            recorder.fail(operation)
            return
        except Lost:
            recorder.info(operation)
            return
        code = answer.results[0].error_code
        if code == ErrorCode.NONE:
            self._world.had_effect("a group of transactions was deleted")
            recorder.ok(operation)
        else:
            is_certain = code in _NOT_DONE
            (recorder.fail if is_certain else recorder.info)(operation, code=code)
