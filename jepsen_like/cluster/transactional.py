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

from attrs import define, field, frozen

from jepsen_like.cluster.kafka import STALE_LEADER, Kafka, Lost, NotSent
from jepsen_like.cluster.producers import headers_of
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
VOLATILE: Final = "x1"
"""A topic that comes and goes while transactions write to it and commit offsets of it: what becomes
of that is told to nobody, but all else of them must."""
INPUT: Final = "t0-0"
"""Where the offsets that transactions commit are of, whatever stands there."""
INPUT_AT: Final = ("t0", 0)
GIVE_UP_MS: Final = 4_000.0
FENCED_REST_MS: Final = (100.0, 1_000.0)
PRODUCE_VERSIONS: Final = {1: 9, 2: 12}
OFFSET_VERSIONS: Final = {1: 3, 2: 5}
END_VERSIONS: Final = {1: 3, 2: 5}

AGAIN: Final = frozenset(
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
FENCED: Final = frozenset(
    {
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.INVALID_PRODUCER_ID_MAPPING,
    }
)
_ABORTABLE: Final = frozenset({ErrorCode.INVALID_TXN_STATE, ErrorCode.TRANSACTION_ABORTABLE})
_LEFT_BEHIND: Final = frozenset(
    {
        ErrorCode.ILLEGAL_GENERATION,
        ErrorCode.UNKNOWN_MEMBER_ID,
        ErrorCode.FENCED_INSTANCE_ID,
    }
)
_OUT_OF_SEQUENCE: Final = frozenset(
    {ErrorCode.UNKNOWN_PRODUCER_ID, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER}
)


Records = dict[str, list[tuple[int, Value]]]


def group_of(transactional_id: str) -> str:
    """The group in which transactions of that id commit offsets, and nobody else."""
    return f"group-of-{transactional_id}"


def rows_of(offsets: dict[tuple[str, int], int]) -> list[dict[str, Any]]:
    """Offsets as commits have them."""
    topics: dict[str, list[dict[str, Any]]] = {}
    for (topic, index), offset in offsets.items():
        row = {
            "partition_index": index,
            "committed_offset": offset,
            "committed_leader_epoch": -1,
            "committed_metadata": "",
        }
        topics.setdefault(topic, []).append(row)
    return [{"name": topic, "partitions": rows} for topic, rows in topics.items()]


def _worst_code(answer: Any) -> int:
    rows = [row for topic in answer.topics if topic.name != VOLATILE for row in topic.partitions]
    return next((int(row.error_code) for row in rows if row.error_code), 0)


class _FencedError(Exception):
    """Another producer of this transactional id goes on, or the transaction expired."""


class _AbortError(Exception):
    """This transaction cannot be committed any more."""


class _LeftBehindError(_AbortError):
    """The group went on without this member."""


@frozen
class Positions:
    """What a transaction commits in a group.

    Attributes:
        fields: member, generation and instance, as requests have them.
    """

    group: str
    offsets: dict[tuple[str, int], int]
    fields: dict[str, Any]


NO_MEMBER: Final[dict[str, Any]] = {
    "generation_id": -1,
    "member_id": "",
    "group_instance_id": None,
}


@define(eq=False)
class Running:
    """One transaction."""

    operation: Event
    batches: list[tuple[int, list[int]]]
    """Partitions and the values that go there, in their order."""
    positions: Positions | None
    is_commit: bool
    began_ms: float
    placed: dict[str, list[tuple[int, Value]]] = field(factory=dict)
    outcome: str = ""
    is_told: bool = False
    """Its end was asked for, and answered."""
    is_late: bool = False
    sequences: dict[int, int] = field(factory=dict)
    """By partition, that of the batch which would have been next."""
    ends: dict[tuple[str, int], int] = field(factory=dict)
    """How far it read."""
    is_decided_unknown: bool = False
    """An EndTxn that asked for the commit got no answer that says what became of it."""


class TransactionalProducer:
    """One process, one transaction at a time."""

    def __init__(
        self,
        world: ClusterWorld,
        process: int,
        transactional_id: str,
        protocol: int,
        topic: str = TOPIC,
    ) -> None:
        self._world = world
        self._kafka = Kafka(world, process)
        self._process = process
        self._topic = topic
        self._id = transactional_id
        self._group = group_of(transactional_id)
        self._protocol = protocol
        self._producer_id = self._epoch = -1
        self._sequences: dict[int, int] = {}
        self._coordinator: int | None = None
        self._group_coordinator: int | None = None
        self._must_init = True

    async def run(self) -> None:
        """Go on until the world is quiet."""
        world, kafka = self._world, self._kafka
        while not world.is_quiet:
            if not await self.ready():
                await kafka.pause()
                continue
            await self.transact()
            await self._between()
            await kafka.think(*world.options.think_ms)
        kafka.hang_up()

    async def _within(self, _running: Running) -> None:
        """What else is part of a transaction, before its records are written."""

    async def _between(self) -> None:
        """What comes between two transactions."""

    def _is_over(self, _running: Running, _how: str) -> None:
        """A transaction ended."""

    def _choose_partition(self) -> int:
        """Where a batch is to go."""
        return self._kafka.random.randrange(PARTITIONS)

    def _is_listed(self, _partition: int) -> bool:
        """False where no producer writes any more."""
        return True

    def _record(self, _partition: int, value: int) -> NewRecord:
        """The record with that value, the same at each try."""
        return NewRecord(None, b"%d." % value, headers=headers_of(self._world, value))

    def _told_of(self, records: Records) -> Records:
        """What of its records the history is told, for its checkers to look for."""
        return records

    # ---- requests ----

    async def ready(self) -> bool:
        """True once it is the producer of its id."""
        return not self._must_init or await self._init()

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

    async def _ask_group(self, group: str, api: ApiKey, version: int, **fields: Any) -> Any:
        """Ask the coordinator of a group."""
        kafka = self._kafka
        if self._group_coordinator is None:
            found = await kafka.ask(
                kafka.any_node(), ApiKey.FIND_COORDINATOR, key=group, key_type=0
            )
            if found.error_code:
                raise NotSent("nobody coordinates the group")
            self._group_coordinator = found.node_id
        node_id, self._group_coordinator = self._group_coordinator, None
        answer = await kafka.ask(node_id, api, version=version, **fields)
        self._group_coordinator = node_id
        return answer

    async def _insist(
        self, api: ApiKey, version: int, read: Any, *, group: str = "", **fields: Any
    ) -> None:
        """Ask until the answer says that it is done.

        Raises:
            _FencedError, _AbortError: it never will be.
        """
        began_ms = self._world.now_ms
        while True:
            try:
                if group:
                    answer = await self._ask_group(group, api, version, **fields)
                else:
                    answer = await self._ask(api, version, **fields)
                code = read(answer)
            except Lost:
                code = ErrorCode.COORDINATOR_NOT_AVAILABLE
            if code == ErrorCode.NONE:
                return
            if code in _LEFT_BEHIND and fields.get("member_id"):
                raise _LeftBehindError
            self._judge(code)
            if code == ErrorCode.NOT_COORDINATOR:
                self._group_coordinator = None
            if self._world.now_ms - began_ms > GIVE_UP_MS:
                raise _AbortError
            await self._kafka.pause()

    def _judge(self, code: int) -> None:
        if code in FENCED:
            raise _FencedError
        if code in _ABORTABLE:
            raise _AbortError
        if code not in AGAIN:
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
            if answer.error_code in FENCED:
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

    def _begin(self, *, is_late: bool = False, group: str = "") -> Running:
        """`group`: whose positions it commits, as it reads."""
        world, random = self._world, self._kafka.random
        batches = []
        for _ in range(1 if is_late else random.choice((1, 2, 3, 5))):
            count = random.randint(1, world.options.records_max)
            values = [world.next_value() for _ in range(count)]
            batches.append((self._choose_partition(), values))
        records: dict[str, list[tuple[int, Value]]] = {}
        for partition, values in batches:
            rows: list[tuple[int, Value]] = [(-1, value) for value in values]
            records.setdefault(f"{self._topic}-{partition}", []).extend(rows)
        positions = None
        if not (is_late or group) and random.random() < 0.5:
            positions = self._positions(world.next_value())
        operation = world.recorder.invoke(
            self._process,
            "transaction",
            transactional_id=self._id,
            producer=[self._producer_id, self._epoch],
            protocol=self._protocol,
            records=self._told_of(records),
            offsets={} if positions is None else {INPUT: positions.offsets[INPUT_AT]},
            group=group,
        )
        is_commit = random.random() >= world.options.transaction_aborts
        return Running(operation, batches, positions, is_commit, world.now_ms)

    def _positions(self, offset: int) -> Positions:
        return Positions(self._group, {INPUT_AT: offset}, NO_MEMBER)

    async def transact(self, group: str = "") -> str:
        """One transaction; gives how it ended, as histories have it."""
        running = self._begin(group=group)
        try:
            await self._write(running)
        except _AbortError as error:
            # What may still be on its way must not become part of the next one.
            self._must_init |= not isinstance(error, _LeftBehindError)
            running.is_commit = False
        except _FencedError:
            self._end(running, "fail")
            await self._fenced()
            return running.outcome
        await self._decide(running)
        return running.outcome

    async def _write(self, running: Running) -> None:
        random = self._kafka.random
        pause_at = -1
        if random.random() < self._world.options.transaction_pauses:
            pause_at = random.randrange(len(running.batches))
        if self._protocol == 1:
            await self._add_partitions(running)
        await self._within(running)
        for number, (partition, values) in enumerate(running.batches):
            if pause_at == number and not self._world.is_healed:
                timeout_ms = self._world.options.transaction_timeout_ms
                await self._kafka.sleep(random.uniform(0.2, 1.6) * timeout_ms)
            await self._send(running, partition, values)
        if running.positions is not None:
            await self._commit(running.positions)

    async def _add_partitions(self, running: Running) -> None:
        wanted = sorted({partition for partition, _ in running.batches})

        def read(answer: Any) -> int:
            rows = answer.results_by_topic_v3_and_below[0].results_by_partition
            codes = [int(row.partition_error_code) for row in rows if row.partition_error_code]
            if codes and not all(map(self._is_listed, wanted)):
                raise _AbortError
            return next((code for code in codes if code != ErrorCode.OPERATION_NOT_ATTEMPTED), 0)

        await self._insist(
            ApiKey.ADD_PARTITIONS_TO_TXN,
            3,
            read,
            v3_and_below_transactional_id=self._id,
            v3_and_below_producer_id=self._producer_id,
            v3_and_below_producer_epoch=self._epoch,
            v3_and_below_topics=[{"name": self._topic, "partitions": wanted}],
        )

    async def _send(self, running: Running, partition: int, values: list[int]) -> None:
        """Send a batch until it is acknowledged."""
        kafka, began_ms = self._kafka, self._world.now_ms
        sequence = self._sequences.get(partition, 0)
        while True:
            code, base = await self._produce(partition, values, sequence)
            if code == ErrorCode.NONE:
                break
            if code in _OUT_OF_SEQUENCE:
                name = f"{self._topic}-{partition}"
                told = f"{self._id}: {sequence} of {name}: {ErrorCode(code).name}"
                raise InvariantViolation("SequenceAccepted", told)
            self._judge(code)
            if self._world.now_ms - began_ms > GIVE_UP_MS or not self._is_listed(partition):
                self._must_init = True
                raise _AbortError
            kafka.leaders.pop((self._topic, partition), None)
            await kafka.pause()
        self._sequences[partition] = running.sequences[partition] = sequence + len(values)
        rows: list[tuple[int, Value]] = [
            (base + i if base >= 0 else -1, value) for i, value in enumerate(values)
        ]
        running.placed.setdefault(f"{self._topic}-{partition}", []).extend(rows)

    async def _produce(
        self,
        partition: int,
        values: list[int],
        sequence: int,
        *,
        topic: str = "",
        credentials: tuple[int, int] | None = None,
        is_plain: bool = False,
    ) -> tuple[int, int]:
        """One try, in another topic where one is named; gives the code and the base offset."""
        topic = topic or self._topic
        kafka, version = self._kafka, PRODUCE_VERSIONS[self._protocol]
        producer_id, epoch = credentials or (self._producer_id, self._epoch)
        data = build_batch(
            [self._record(partition, value) for value in values],
            timestamp=EPOCH_MS + int(self._world.now_ms),
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            transactional=not is_plain,
        )
        row = ProduceTopic(topic, None, [ProducePartition(partition, memoryview(data))])
        request = ProduceRequest(None if is_plain else self._id, -1, 1_000, [row])
        body = b"".join(map(bytes, encode_produce_request(version, request)))
        try:
            leader = await kafka.leader(topic, partition)
            answer = await until(kafka.request(leader, ApiKey.PRODUCE, body, version=version))
        except Lost:
            return ErrorCode.REQUEST_TIMED_OUT, -1
        told = decode_produce_response(version, answer).topics[0].partitions[0]
        return told.error_code, told.base_offset

    async def _commit(self, positions: Positions) -> None:
        if self._protocol == 1:
            await self._insist(
                ApiKey.ADD_OFFSETS_TO_TXN,
                3,
                lambda answer: answer.error_code,
                **self._who,
                group_id=positions.group,
            )
        await self._insist(
            ApiKey.TXN_OFFSET_COMMIT,
            OFFSET_VERSIONS[self._protocol],
            _worst_code,
            group=positions.group,
            **self._who,
            group_id=positions.group,
            **positions.fields,
            topics=rows_of(positions.offsets),
        )

    # ---- its end ----

    async def _decide(self, running: Running) -> None:
        """Ask for the end until it is told what became of it, or for too long."""
        began_ms = self._world.now_ms
        while self._world.now_ms - began_ms <= GIVE_UP_MS:
            code = await self._end_once(running)
            if code == ErrorCode.NONE:
                running.is_told = True
                self._end(running, "ok" if running.is_commit else "fail")
                return
            if code in FENCED:
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

    async def _end_once(self, running: Running) -> int:
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
        elif code in AGAIN and code != ErrorCode.CONCURRENT_TRANSACTIONS:
            recorder.info(operation, code=code)
            running.is_decided_unknown |= running.is_commit
        else:
            recorder.fail(operation, code=code)
        return code

    def _end(self, running: Running, how: str) -> None:
        world, operation = self._world, running.operation
        running.outcome = how
        world.note("transaction", how, self._id, operation.op)
        if how == "ok":
            world.counts.acked += 1
            world.recorder.ok(operation, records=self._told_of(running.placed))
        elif how == "fail":
            world.recorder.fail(operation, records=self._told_of(running.placed))
        else:
            world.recorder.info(operation, records=self._told_of(running.placed))
        self._is_over(running, how)

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
        late.is_late = True
        ((partition, values),) = late.batches
        code, _ = await self._produce(partition, values, self._sequences.get(partition, 0))
        # A leader that does not know of the decision yet lets it in: the marker comes behind it.
        is_let_in = code == ErrorCode.NONE
        self._world.had_effect("a zombie was let in" if is_let_in else "a zombie was refused")
        self._end(late, "fail")
