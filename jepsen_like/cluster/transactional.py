"""Transactional producers: begin, write to several partitions, commit offsets of a group, end.

A process runs one transaction after the other, by protocol 1 or 2, as clients do: it adds
partitions (protocol 1), sends each batch until it is answered, and EndTxn until its outcome is
told. Some transactions are aborted by wish, some stand still for longer than their timeout and go
on as zombies, and two processes of the same transactional id fence each other. What comes late,
under an epoch that is over, is told to the history as a transaction of its own that must never be
seen.

The history has a `transaction` with all that it is to write (`ok`: committed, `fail`: aborted),
and an `end` for each EndTxn that is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import define, field

from jepsen_like.cluster.kafka import STALE_LEADER, Kafka, Lost, NotSent
from jepsen_like.cluster.tasks import until
from jepsen_like.history_events import Event, Value
from jepsen_like.invariants import InvariantViolation
from jepsen_like.virtual_time import EPOCH_MS
from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from raftmq.protocol.produce import (
    ProducePartition,
    ProduceRequest,
    ProduceTopic,
    decode_produce_response,
    encode_produce_request,
)
from raftmq.records import NewRecord, build_batch

if TYPE_CHECKING:
    from jepsen_like.cluster.world import ClusterWorld

TOPIC: Final = "x0"
PARTITIONS: Final = 3
INPUT: Final = "t0-0"
"""Where the offsets that transactions commit are of, whatever stands there."""
GIVE_UP_MS: Final = 4_000.0
FENCED_REST_MS: Final = (100.0, 1_000.0)
PRODUCE_VERSIONS: Final = {1: 9, 2: 12}
OFFSET_VERSIONS: Final = {1: 3, 2: 5}
END_VERSIONS: Final = {1: 3, 2: 5}

_AGAIN: Final = frozenset(
    {
        *STALE_LEADER,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        ErrorCode.REQUEST_TIMED_OUT,
    }
)
_FENCED: Final = frozenset(
    {
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.INVALID_PRODUCER_ID_MAPPING,
    }
)
_ABORTABLE: Final = frozenset({ErrorCode.INVALID_TXN_STATE, ErrorCode.TRANSACTION_ABORTABLE})
_OUT_OF_SEQUENCE: Final = frozenset(
    {ErrorCode.UNKNOWN_PRODUCER_ID, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER}
)


def group_of(transactional_id: str) -> str:
    """The group in which transactions of that id commit offsets, and nobody else."""
    return f"group-of-{transactional_id}"


class _FencedError(Exception):
    """Another producer of this transactional id goes on, or the transaction expired."""


class _AbortError(Exception):
    """This transaction cannot be committed any more."""


@define(eq=False)
class _Running:
    """One transaction."""

    operation: Event
    batches: list[tuple[int, list[int]]]
    """Partitions and the values that go there, in their order."""
    offset: int
    """What is committed of the input; -1: nothing."""
    is_commit: bool
    began_ms: float
    placed: dict[str, list[tuple[int, Value]]] = field(factory=dict)
    is_decided_unknown: bool = False
    """An EndTxn that asked for the commit got no answer that says what became of it."""


class TransactionalProducer:
    """One process, one transaction at a time."""

    def __init__(
        self, world: ClusterWorld, process: int, transactional_id: str, protocol: int
    ) -> None:
        self._world = world
        self._kafka = Kafka(world, process)
        self._process = process
        self._id = transactional_id
        self._group = group_of(transactional_id)
        self._protocol = protocol
        self._producer_id = self._epoch = -1
        self._sequences: dict[int, int] = {}
        self._coordinator: int | None = None
        self._must_init = True
        self._offset = 0

    async def run(self) -> None:
        """Go on until the world is quiet."""
        world, kafka = self._world, self._kafka
        while not world.is_quiet:
            if self._must_init and not await self._init():
                await kafka.pause()
                continue
            await self._transact()
            await kafka.think(*world.options.think_ms)
        kafka.hang_up()

    # ---- requests ----

    async def _ask(self, api: ApiKey, version: int | None = None, **fields: Any) -> Any:
        """Ask whom FindCoordinator named, or now and then anybody."""
        kafka = self._kafka
        if self._coordinator is None:
            found = await kafka.ask(
                kafka.any_node(), ApiKey.FIND_COORDINATOR, key=self._id, key_type=1
            )
            if found.error_code:
                raise NotSent("nobody coordinates the id")
            self._coordinator = found.node_id
        node_id = kafka.any_node() if kafka.random.random() < 0.2 else self._coordinator
        try:
            return await kafka.ask(node_id, api, version=version, **fields)
        except Lost:
            self._coordinator = None
            raise

    async def _insist(self, api: ApiKey, version: int, read: Any, **fields: Any) -> None:
        """Ask until the answer says that it is done.

        Raises:
            _FencedError, _AbortError: it never will be.
        """
        began_ms = self._world.now_ms
        while True:
            try:
                code = read(await self._ask(api, version, **fields))
            except Lost:
                code = ErrorCode.COORDINATOR_NOT_AVAILABLE
            if code == ErrorCode.NONE:
                return
            self._judge(code)
            if self._world.now_ms - began_ms > GIVE_UP_MS:
                raise _AbortError
            await self._kafka.pause()

    def _judge(self, code: int) -> None:
        if code in _FENCED:
            raise _FencedError
        if code in _ABORTABLE:
            raise _AbortError
        if code not in _AGAIN:
            told = f"{self._id}: {ErrorCode(code).name}"
            raise InvariantViolation("TransactionsAreServed", told)

    async def _init(self) -> bool:
        """Become the producer of this id; whoever was before is fenced."""
        is_named = self._producer_id >= 0 and self._kafka.random.random() < 0.3
        try:
            answer = await self._ask(
                ApiKey.INIT_PRODUCER_ID,
                transactional_id=self._id,
                transaction_timeout=self._world.options.transaction_timeout_ms,
                producer_id=self._producer_id if is_named else -1,
                producer_epoch=self._epoch if is_named else -1,
            )
        except Lost:
            return False
        if answer.error_code:
            if answer.error_code in _FENCED:
                self._producer_id = self._epoch = -1
                await self._kafka.sleep(self._kafka.random.uniform(*FENCED_REST_MS))
            else:
                self._judge(answer.error_code)
            return False
        self._become(answer.producer_id, answer.producer_epoch)
        self._must_init = False
        self._world.note("producer", self._id, self._producer_id, self._epoch)
        return True

    def _become(self, producer_id: int, epoch: int) -> None:
        if (producer_id, epoch) != (self._producer_id, self._epoch):
            self._sequences.clear()
        self._producer_id, self._epoch = producer_id, epoch

    @property
    def _who(self) -> dict[str, Any]:
        return {
            "transactional_id": self._id,
            "producer_id": self._producer_id,
            "producer_epoch": self._epoch,
        }

    # ---- a transaction ----

    def _begin(self, *, is_late: bool = False) -> _Running:
        world, random = self._world, self._kafka.random
        batches = []
        for _ in range(1 if is_late else random.choice((1, 2, 3, 5))):
            count = random.randint(1, world.options.records_max)
            values = [world.next_value() for _ in range(count)]
            batches.append((random.randrange(PARTITIONS), values))
        records: dict[str, list[tuple[int, Value]]] = {}
        for partition, values in batches:
            rows: list[tuple[int, Value]] = [(-1, value) for value in values]
            records.setdefault(f"{TOPIC}-{partition}", []).extend(rows)
        offset = -1
        if not is_late and random.random() < 0.5:
            offset = world.next_value()
        operation = world.recorder.invoke(
            self._process,
            "transaction",
            transactional_id=self._id,
            producer=[self._producer_id, self._epoch],
            protocol=self._protocol,
            records=records,
            offsets={} if offset < 0 else {INPUT: offset},
        )
        is_commit = random.random() < 0.7
        return _Running(operation, batches, offset, is_commit, world.now_ms)

    async def _transact(self) -> None:
        running = self._begin()
        try:
            await self._write(running)
        except _AbortError:
            # What may still be on its way must not become part of the next one.
            running.is_commit, self._must_init = False, True
        except _FencedError:
            self._end(running, "fail")
            await self._fenced()
            return
        await self._decide(running)

    async def _write(self, running: _Running) -> None:
        random = self._kafka.random
        pause_at = -1
        if random.random() < self._world.options.transaction_pauses:
            pause_at = random.randrange(len(running.batches))
        if self._protocol == 1:
            await self._add_partitions(running)
        for number, (partition, values) in enumerate(running.batches):
            if pause_at == number and not self._world.is_healed:
                timeout_ms = self._world.options.transaction_timeout_ms
                await self._kafka.sleep(random.uniform(0.2, 1.6) * timeout_ms)
            await self._send(running, partition, values)
        if running.offset >= 0:
            await self._commit_offset(running)

    async def _add_partitions(self, running: _Running) -> None:
        wanted = sorted({partition for partition, _ in running.batches})

        def read(answer: Any) -> int:
            rows = answer.results_by_topic_v3_and_below[0].results_by_partition
            return next((int(r.partition_error_code) for r in rows if r.partition_error_code), 0)

        await self._insist(
            ApiKey.ADD_PARTITIONS_TO_TXN,
            3,
            read,
            v3_and_below_transactional_id=self._id,
            v3_and_below_producer_id=self._producer_id,
            v3_and_below_producer_epoch=self._epoch,
            v3_and_below_topics=[{"name": TOPIC, "partitions": wanted}],
        )

    async def _send(self, running: _Running, partition: int, values: list[int]) -> None:
        """Send a batch until it is acknowledged."""
        kafka, began_ms = self._kafka, self._world.now_ms
        sequence = self._sequences.get(partition, 0)
        while True:
            code, base = await self._produce(partition, values, sequence)
            if code == ErrorCode.NONE:
                break
            if code in _OUT_OF_SEQUENCE:
                told = f"{self._id}: {sequence} of {TOPIC}-{partition}: {ErrorCode(code).name}"
                raise InvariantViolation("SequenceAccepted", told)
            self._judge(code)
            if self._world.now_ms - began_ms > GIVE_UP_MS:
                self._must_init = True
                raise _AbortError
            kafka.leaders.pop((TOPIC, partition), None)
            await kafka.pause()
        self._sequences[partition] = sequence + len(values)
        rows: list[tuple[int, Value]] = [
            (base + i if base >= 0 else -1, value) for i, value in enumerate(values)
        ]
        running.placed.setdefault(f"{TOPIC}-{partition}", []).extend(rows)

    async def _produce(self, partition: int, values: list[int], sequence: int) -> tuple[int, int]:
        """One try; gives the code and the base offset."""
        kafka, version = self._kafka, PRODUCE_VERSIONS[self._protocol]
        data = build_batch(
            [NewRecord(None, b"%d." % value) for value in values],
            timestamp=EPOCH_MS + int(self._world.now_ms),
            producer_id=self._producer_id,
            producer_epoch=self._epoch,
            base_sequence=sequence,
            transactional=True,
        )
        topic = ProduceTopic(TOPIC, None, [ProducePartition(partition, memoryview(data))])
        request = ProduceRequest(self._id, -1, 1_000, [topic])
        body = b"".join(map(bytes, encode_produce_request(version, request)))
        try:
            leader = await kafka.leader(TOPIC, partition)
            answer = await until(kafka.request(leader, ApiKey.PRODUCE, body, version=version))
        except Lost:
            return ErrorCode.REQUEST_TIMED_OUT, -1
        told = decode_produce_response(version, answer).topics[0].partitions[0]
        return told.error_code, told.base_offset

    async def _commit_offset(self, running: _Running) -> None:
        if self._protocol == 1:
            await self._insist(
                ApiKey.ADD_OFFSETS_TO_TXN,
                3,
                lambda answer: answer.error_code,
                **self._who,
                group_id=self._group,
            )
        row = {
            "partition_index": 0,
            "committed_offset": running.offset,
            "committed_leader_epoch": -1,
            "committed_metadata": "",
        }
        await self._insist(
            ApiKey.TXN_OFFSET_COMMIT,
            OFFSET_VERSIONS[self._protocol],
            lambda answer: answer.topics[0].partitions[0].error_code,
            **self._who,
            group_id=self._group,
            generation_id=-1,
            member_id="",
            group_instance_id=None,
            topics=[{"name": INPUT.partition("-")[0], "partitions": [row]}],
        )

    # ---- its end ----

    async def _decide(self, running: _Running) -> None:
        """Ask for the end until it is told what became of it, or for too long."""
        began_ms = self._world.now_ms
        while self._world.now_ms - began_ms <= GIVE_UP_MS:
            code = await self._end_once(running)
            if code == ErrorCode.NONE:
                self._end(running, "ok" if running.is_commit else "fail")
                return
            if code in _FENCED:
                self._end(running, "info" if running.is_decided_unknown else "fail")
                await self._fenced()
                return
            if code in _ABORTABLE:
                # It was decided otherwise: by its timeout, or by who began anew.
                self._end(running, "fail")
                self._must_init = True
                return
            self._judge(code)
            await self._kafka.pause()
        self._end(running, "info" if running.is_decided_unknown else "fail")
        self._must_init = True

    async def _end_once(self, running: _Running) -> int:
        recorder = self._world.recorder
        operation = recorder.invoke(
            self._process,
            "end",
            transactional_id=self._id,
            transaction=running.operation.op,
            is_commit=running.is_commit,
        )
        try:
            answer = await self._ask(
                ApiKey.END_TXN,
                END_VERSIONS[self._protocol],
                **self._who,
                committed=running.is_commit,
            )
        except NotSent:
            recorder.fail(operation)
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        except Lost:
            recorder.info(operation)
            running.is_decided_unknown |= running.is_commit
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        code = int(answer.error_code)
        if code == ErrorCode.NONE:
            recorder.ok(operation)
            if answer.producer_id >= 0:
                self._become(answer.producer_id, answer.producer_epoch)
        elif code in _AGAIN and code != ErrorCode.CONCURRENT_TRANSACTIONS:
            recorder.info(operation, code=code)
            running.is_decided_unknown |= running.is_commit
        else:
            recorder.fail(operation, code=code)
        return code

    def _end(self, running: _Running, how: str) -> None:
        world, operation = self._world, running.operation
        world.note("transaction", how, self._id, operation.op)
        if how == "ok":
            world.counts.acked += 1
            world.recorder.ok(operation, records=running.placed)
        elif how == "fail":
            world.recorder.fail(operation, records=running.placed)
        else:
            world.recorder.info(operation, records=running.placed)

    async def _fenced(self) -> None:
        """Somebody else goes on; a zombie writes on for a while."""
        self._must_init = True
        random = self._kafka.random
        if random.random() < 0.7:
            await self._write_late()
        await self._kafka.sleep(random.uniform(*FENCED_REST_MS))

    async def _write_late(self) -> None:
        """A batch under an epoch that is over."""
        late = self._begin(is_late=True)
        ((partition, values),) = late.batches
        code, _ = await self._produce(partition, values, self._sequences.get(partition, 0))
        # A leader that does not know of the decision yet lets it in: the marker comes behind it.
        is_let_in = code == ErrorCode.NONE
        self._world.had_effect("a zombie was let in" if is_let_in else "a zombie was refused")
        self._end(late, "fail")
