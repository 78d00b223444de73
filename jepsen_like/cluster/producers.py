"""Producers: idempotent, up to five batches of a partition in flight, sent again until answered.

A pipe is one producer id on one partition, or none: some producers do without, and send nothing
twice. Each compresses in its own way. What is refused or lost of the others is sent again in the
order of its sequences, once all that is under way has come back; what is not acknowledged in time
is given up as unknown, and the pipe goes on under a fresh producer id. Every value is unique, so
that each can be found again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import define, field

from jepsen_like.cluster.kafka import Kafka, Lost
from jepsen_like.cluster.tasks import until
from jepsen_like.history_events import Event, Value
from jepsen_like.invariants import InvariantViolation
from jepsen_like.virtual_time import EPOCH_MS
from raftmq.codec import Codec
from raftmq.errors import ErrorCode
from raftmq.promise import Promise
from raftmq.protocol import ApiKey
from raftmq.protocol.produce import (
    ProducePartition,
    ProducePartitionResponse,
    ProduceRequest,
    ProduceTopic,
    decode_produce_response,
    encode_produce_request,
)
from raftmq.records import NewRecord, build_batch

if TYPE_CHECKING:
    from jepsen_like.cluster.world import ClusterWorld

IN_FLIGHT_MAX: Final = 5
GIVE_UP_MS: Final = 3_000.0
REST_MS: Final = (300.0, 1_500.0)
VERSION: Final = 9
_FORGOTTEN = frozenset({ErrorCode.UNKNOWN_PRODUCER_ID, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER})
_REFUSED = frozenset({ErrorCode.INVALID_PRODUCER_EPOCH})

TAGS: Final = (b"a", b"b", b"c")


def tag_of(value: int) -> bytes:
    """The tag of the record with that value, where records have tags: runs of a few have the
    same."""
    return TAGS[value // 3 % 7 % 3]


def headers_of(world: ClusterWorld, value: int) -> list[tuple[str, bytes | None]]:
    """What a record is written with."""
    return [("tag", tag_of(value))] if world.options.views else []


@define(eq=False)
class Batch:
    """Records on their way, and what became of them."""

    number: int
    sequence: int
    values: list[int]
    operation: Event
    began_ms: float
    tries: int = 0
    is_in_flight: bool = False
    is_done: bool = False
    is_next: bool = False
    """All before it were acknowledged when it was sent."""
    error: int = 0


@define(eq=False)
class Pipe:
    """One producer id on one partition."""

    producer_id: int = -1
    producer_epoch: int = -1
    sequence: int = 0
    made: int = 0
    batches: list[Batch] = field(factory=list)
    must_drain: bool = False

    @property
    def in_flight(self) -> int:
        """How many are under way."""
        return sum(batch.is_in_flight for batch in self.batches)

    @property
    def has_room(self) -> bool:
        """True while a broker that remembers five batches knows the oldest that is owed: an answer
        may be lost while those of later batches come."""
        return not self.batches or self.made - self.batches[0].number < IN_FLIGHT_MAX


class Producer:
    """One process that appends to one partition at a time."""

    def __init__(self, world: ClusterWorld, process: int, topic: str, partition: int) -> None:
        self._world = world
        self._kafka = Kafka(world, process)
        self._process = process
        self._topic = topic
        self._partition = partition
        self._name = f"{topic}-{partition}"
        self._is_idempotent = self._kafka.random.random() < 0.85
        self._codec = self._kafka.random.choice(tuple(Codec))
        self._pipe = Pipe()
        self._news: Promise[None] = Promise()

    async def run(self) -> None:
        """Produce until the world is quiet and nothing is owed."""
        world, kafka = self._world, self._kafka
        while not world.is_quiet or self._pipe.batches:
            pipe = self._pipe
            if self._is_idempotent and pipe.producer_id < 0 and not await self._init(pipe):
                await kafka.pause()
                continue
            # From the oldest unanswered one on, so that those after it are never more than brokers
            # remember of a producer: each may have gone to another node, and be answered first.
            while pipe.batches and pipe.batches[0].is_done:
                del pipe.batches[0]
            if pipe.must_drain:
                if pipe.in_flight:
                    await self._wait()
                    continue
                if self._gives_up(pipe):
                    continue
                pipe.must_drain = False
                await kafka.refresh([self._topic])
                await kafka.pause()
                for batch in list(pipe.batches):
                    if not batch.is_done:
                        await self._send(pipe, batch)
                continue
            if pipe.has_room and not world.is_quiet:
                await self._send(pipe, self._make(pipe))
                await kafka.think(*world.options.think_ms)
                if world.options.rest and kafka.random.random() < world.options.rest:
                    await kafka.sleep(kafka.random.uniform(*REST_MS))
            elif pipe.in_flight:
                await self._wait()
        kafka.hang_up()

    async def _wait(self) -> None:
        if self._news.is_done:
            self._news = Promise()
        await until(self._news)

    async def _init(self, pipe: Pipe) -> bool:
        try:
            answer = await self._kafka.ask(
                self._kafka.any_node(),
                ApiKey.INIT_PRODUCER_ID,
                transactional_id=None,
                transaction_timeout=60_000,
                producer_id=-1,
                producer_epoch=-1,
            )
        except Lost:
            return False
        if answer.error_code:
            return False
        pipe.producer_id, pipe.producer_epoch = answer.producer_id, answer.producer_epoch
        return True

    def _make(self, pipe: Pipe) -> Batch:
        world = self._world
        count = self._kafka.random.randint(1, world.options.records_max)
        values = [world.next_value() for _ in range(count)]
        operation = world.recorder.invoke(
            self._process,
            "append",
            records={self._name: [(-1, value) for value in values]},
            idempotent=self._is_idempotent,
        )
        batch = Batch(pipe.made, pipe.sequence, values, operation, world.now_ms)
        pipe.made += 1
        pipe.sequence += count
        pipe.batches.append(batch)
        return batch

    async def _send(self, pipe: Pipe, batch: Batch) -> None:
        kafka = self._kafka
        try:
            leader = await kafka.leader(self._topic, self._partition)
        except Lost:
            pipe.must_drain = True
            return
        batch.is_in_flight = True
        batch.is_next = all(b.is_done for b in pipe.batches[: pipe.batches.index(batch)])
        batch.tries += 1
        batch.error = 0
        body = b"".join(map(bytes, self._request(pipe, batch)))
        answer = kafka.request(leader, ApiKey.PRODUCE, body)
        answer.when_done(lambda done: self._answered(pipe, batch, done))

    def _request(self, pipe: Pipe, batch: Batch) -> list[bytes]:
        size = self._world.options.value_bytes_max
        records = [
            NewRecord(
                None,
                b"%d." % value + b"." * self._kafka.random.randrange(0, size),
                headers=headers_of(self._world, value),
            )
            for value in batch.values
        ]
        is_numbered = pipe.producer_id >= 0
        data = build_batch(
            records,
            codec=self._codec,
            timestamp=EPOCH_MS + int(self._world.now_ms),
            producer_id=pipe.producer_id,
            producer_epoch=pipe.producer_epoch,
            base_sequence=batch.sequence if is_numbered else -1,
        )
        topic = ProduceTopic(
            self._topic, None, [ProducePartition(self._partition, memoryview(data))]
        )
        request = ProduceRequest(None, -1, 1_000, [topic])
        return [bytes(piece) for piece in encode_produce_request(VERSION, request)]

    def _answered(self, pipe: Pipe, batch: Batch, done: Promise[memoryview]) -> None:
        batch.is_in_flight = False
        if done.error is not None:
            pipe.must_drain = True
            batch.error = -1
            self._let_go(batch)
        else:
            response = decode_produce_response(VERSION, done.result())
            self._judge(pipe, batch, response.topics[0].partitions[0])
        if not self._news.is_done:
            self._news.resolve(None)

    def _judge(self, pipe: Pipe, batch: Batch, answer: ProducePartitionResponse) -> None:
        world = self._world
        code = answer.error_code
        if code == ErrorCode.NONE:
            batch.is_done = True
            base = answer.base_offset
            rows: list[tuple[int, Value]] = [
                (base + i if base >= 0 else -1, value) for i, value in enumerate(batch.values)
            ]
            if world.recorder.ok(batch.operation, records={self._name: rows}):
                world.counts.acked += 1
                world.note("ack", batch.operation.op, base)
            return
        world.note("refused", batch.operation.op, code)
        batch.error = code
        pipe.must_drain = True
        self._let_go(batch)
        if code in _REFUSED or (code in _FORGOTTEN and batch.is_next):
            raise InvariantViolation(
                "SequenceAccepted",
                f"{self._name}: the next batch in sequence ({batch.sequence}) of producer "
                f"{pipe.producer_id} was refused with {ErrorCode(code).name}",
            )

    def _let_go(self, batch: Batch) -> None:
        """Without a sequence nothing tells a second copy from the first: it is not sent again."""
        if not self._is_idempotent:
            batch.is_done = True
            self._world.recorder.info(batch.operation, code=batch.error)

    def _gives_up(self, pipe: Pipe) -> bool:
        """After too long: nobody knows what became of these, and the pipe begins anew."""
        world = self._world
        late = [b for b in pipe.batches if not b.is_done]
        if not late or world.now_ms - late[0].began_ms <= GIVE_UP_MS:
            return False
        for batch in late:
            if batch.tries:
                world.recorder.info(batch.operation, idempotent=False, code=batch.error)
            else:
                world.recorder.fail(batch.operation)
        self._kafka.hang_up()
        self._pipe = Pipe()
        return True


class Probe(Producer):
    """Appends to a partition, nothing twice, until one record is acknowledged."""

    def __init__(self, world: ClusterWorld, process: int, topic: str, partition: int) -> None:
        super().__init__(world, process, topic, partition)
        self._is_idempotent = False

    async def run(self) -> None:
        """Try until the partition takes a record, or the world is quiet."""
        kafka, is_taken = self._kafka, False
        while not is_taken and not self._world.is_quiet:
            pipe = self._pipe = Pipe()
            batch = self._make(pipe)
            await self._send(pipe, batch)
            if not batch.tries:
                self._world.recorder.fail(batch.operation)
            while pipe.in_flight:
                await self._wait()
            is_taken = bool(batch.tries) and not batch.error
            if not is_taken:
                await kafka.pause()
                await kafka.refresh([self._topic])
        kafka.hang_up()
